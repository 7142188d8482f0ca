# SPDX-License-Identifier: Apache-2.0

"""States in files in a task: stored while it goes on, verified before ``open``, and gone with the attempt."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import LocalProtocolError
from protocol.file_retention import LAST_STATE, FileOrigin, origin_of
from protocol.key_groups import KeyGroups
from protocol.wire.framing import WireLimits
from protocol.wire.messages import (
    AttemptEnded,
    CheckpointAborted,
    CheckpointAcknowledged,
    CheckpointCompleted,
    CheckpointDeclined,
    Confirm,
    Finished,
    Heartbeat,
    Opened,
    SavepointTarget,
    StateFailed,
    StateStored,
    SubtaskState,
)
from protocol.wire.state_handles import KeyGroupRange, StateHandle
from spark_bridge.common.endpoint import StateStorage
from spark_bridge.storage.errors import CheckpointUnreadable, StorageError
from spark_bridge.storage.files import Files
from spark_bridge.storage.state_files.folder import StateFolder, UploadStopped
from spark_bridge.storage.state_files.restoring import restore
from spark_bridge.storage.state_files.uploading import StateUploader
from spark_bridge.storage.state_files.values import RestoredFiles, StateFiles
from spark_bridge.subtask import AttemptOver, SubtaskContext
from spark_bridge.subtask.local_folder import FOLDER, LocalFolder
from spark_bridge.subtask.uploads import LEFT_BEHIND_MAX, Upload, UploadThread
from tests.spark_bridge.subtask.operators import EventSource
from tests.spark_bridge.subtask.peer import PATIENCE_S, TASK_ID, Peer, PeerConnection, RunningTask, barrier
from tests.spark_bridge.subtask.reading import until

ROOT = Path(__file__).resolve().parents[3]
SMALL_EVENTS = 2**20
MESSAGE_BYTES = WireLimits.for_events(SMALL_EVENTS).message_bytes_max


@pytest.fixture(autouse=True)
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the attempts of one executor."""
    local = tmp_path / "blockmgr-1"
    local.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(local))
    return local / FOLDER


@pytest.fixture
def storage(tmp_path: Path) -> StateStorage:
    return StateStorage(str(tmp_path / "storage"), None, 3, "ab")


class Keeper(EventSource):
    """Keeps each event in a separate file; these files are its state. Yields its events, as ``EventSource`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.restored: bytes | RestoredFiles | None = None
        self.snapshots: list[Path] = []

    def open(self, context: SubtaskContext, state: Any) -> None:
        super().open(context, state)
        self.restored = state
        self.kept = content_of(context.state_folder)

    def handle_event(self, event: Any) -> None:
        super().handle_event(event)
        (self.context.state_folder / f"{len(self.calls)}.sst").write_bytes(repr(event).encode())

    def snapshot_state(self, checkpoint_id: int) -> StateFiles:  # type: ignore[override]
        self.calls.append(("snapshot", checkpoint_id))
        return StateFiles(self.context.state_folder, b"beside")


class Gate:
    """Holds back the writes of a storage, from the first piece of a file on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writing = threading.Event()
        self.open = threading.Event()
        self.names: list[str] = []
        original = StateFolder.write

        def write(folder: StateFolder, name: str, pieces: Any, size_bytes: int) -> None:
            if is_probe(name):
                original(folder, name, pieces, size_bytes)
                return
            self.names.append(name)
            original(folder, name, self._held(pieces), size_bytes)

        monkeypatch.setattr(StateFolder, "write", write)

    def _held(self, pieces: Any) -> Iterator[bytes]:
        self.writing.set()
        assert self.open.wait(PATIENCE_S)
        yield from pieces


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def folder_of(storage: StateStorage) -> StateFolder:
    return StateFolder.of_operator(Files(storage.url), "words")


def is_probe(name: str) -> bool:
    """Whether it is what each attempt writes before its first state."""
    return name.endswith("-probe")


def names_in(storage: StateStorage) -> tuple[str, ...]:
    """What is in the storage, without what a sweep would delete in any case."""
    return tuple(name for name in folder_of(storage).names() if not is_probe(name))


def state_at(storage: StateStorage, handle: StateHandle | None, into: Path) -> dict[str, bytes]:
    """What a handle of the storage names."""
    assert handle is not None
    return content_of(restore(folder_of(storage), handle, into).files.folder)


def ask_for_snapshot(connection: PeerConnection, seq: int, checkpoint_id: int) -> CheckpointAcknowledged:
    connection.close_for(seq, checkpoint_id)
    connection.send(barrier(seq + 1, checkpoint_id, 0))
    return connection.next_item(CheckpointAcknowledged)


def end(peer: Peer, connection: PeerConnection, task: RunningTask, seq: int) -> list[Any]:
    connection.send(connection.event(seq, "end"))
    return peer.finish(task)


# --- snapshots ------------------------------------------------------------------------------------------------------


def test_the_bytes_leave_at_the_cut_and_the_handle_when_the_files_are_stored(
    peer: Peer, storage: StateStorage, gate: Gate, tmp_path: Path
) -> None:
    """H190, H192: the task goes on during the upload, and what it does then is not in the state."""
    task, connection = peer.run(keeper := Keeper(), state_storage=storage)
    connection.send_events(1, "one")
    acknowledged = ask_for_snapshot(connection, 2, 6)
    assert (acknowledged.state, acknowledged.state_follows) == (b"beside", True)
    assert gate.writing.wait(PATIENCE_S)
    connection.send(connection.event(4, "two"))
    connection.confirmed(4)
    gate.open.set()
    stored = connection.next_item(StateStored)
    assert stored.checkpoint_id == 6
    assert list(state_at(storage, stored.handle, tmp_path / "found").values()) == [b"'one'"]
    connection.send(connection.event(5, "end"))
    finished = connection.finish()
    assert finished.state == b"beside"
    assert sorted(state_at(storage, finished.files, tmp_path / "last").values()) == [b"'end'", b"'one'", b"'two'"]
    assert task.outputs() == ["one", "two"]
    written = sum(len(content) for name, content in content_of(Path(storage.url)).items() if not is_probe(name))
    assert keeper.context.statistics.uploaded_bytes == written
    last = {origin_of(name) for name in gate.names[2:]}
    assert {origin.checkpoint_id for origin in last if origin} == {LAST_STATE}


def test_what_did_not_change_is_not_stored_again(peer: Peer, storage: StateStorage) -> None:
    task, connection = peer.run(Keeper(), state_storage=storage)
    connection.send_events(1, "one")
    ask_for_snapshot(connection, 2, 6)
    first = connection.next_item(StateStored).handle
    connection.send(CheckpointCompleted(TASK_ID, 4, 6))
    ask_for_snapshot(connection, 5, 7)
    second = connection.next_item(StateStored).handle
    files = [folder_of(storage).read_manifest(handle) for handle in (first, second)]
    assert files[0] == files[1]
    assert first.manifest != second.manifest
    end(peer, connection, task, 7)


def test_a_file_of_a_checkpoint_that_completed_without_it_is_stored_again(peer: Peer, storage: StateStorage) -> None:
    """H190: after the completion the driver may delete it."""

    class Changing(Keeper):
        def snapshot_state(self, checkpoint_id: int) -> StateFiles:  # type: ignore[override]
            folder = self.context.snapshot_folder(checkpoint_id)
            (folder / "1.sst").write_bytes(b"odd" if checkpoint_id % 2 else b"even")
            return StateFiles(folder)

    task, connection = peer.run(Changing(), state_storage=storage)
    handles, seq = [], 1
    for checkpoint_id in (5, 6, 7):
        ask_for_snapshot(connection, seq, checkpoint_id)
        handles.append(connection.next_item(StateStored).handle)
        connection.send(CheckpointCompleted(TASK_ID, seq + 2, checkpoint_id))
        seq += 3
    first, _, third = (folder_of(storage).read_manifest(handle)[0] for handle in handles)
    assert first.sha256 == third.sha256
    assert first.name != third.name
    end(peer, connection, task, seq)


def test_a_file_of_an_aborted_checkpoint_is_named_by_the_next_one(peer: Peer, storage: StateStorage) -> None:
    task, connection = peer.run(Keeper(), state_storage=storage)
    connection.send_events(1, "one")
    ask_for_snapshot(connection, 2, 6)
    first = connection.next_item(StateStored).handle
    connection.send(CheckpointAborted(TASK_ID, 4, 6))
    ask_for_snapshot(connection, 5, 7)
    second = connection.next_item(StateStored).handle
    assert folder_of(storage).read_manifest(first) == folder_of(storage).read_manifest(second)
    end(peer, connection, task, 7)


@pytest.mark.parametrize("below", ["", "db"])
def test_a_folder_for_a_snapshot_is_the_snapshot_and_is_gone_after_its_upload(
    peer: Peer, storage: StateStorage, gate: Gate, tmp_path: Path, executor: Path, below: str
) -> None:
    class Checkpointing(Keeper):
        def snapshot_state(self, checkpoint_id: int) -> StateFiles:  # type: ignore[override]
            unused = self.context.snapshot_folder(checkpoint_id)
            (unused / "forgotten").write_bytes(b"")
            folder = self.context.snapshot_folder(checkpoint_id)
            assert list(folder.iterdir()) == []
            self.snapshots += [unused, folder]
            (folder / below).mkdir(exist_ok=True)
            (folder / below / "a.sst").write_bytes(b"content")
            return StateFiles(folder / below, immutable=())

    operator = Checkpointing()
    task, connection = peer.run(operator, state_storage=storage)
    ask_for_snapshot(connection, 1, 6)
    assert gate.writing.wait(PATIENCE_S)
    unused, folder = operator.snapshots
    assert (unused.exists(), folder.exists()) == (False, True), "it is not copied"
    gate.open.set()
    handle = connection.next_item(StateStored).handle
    assert not folder.exists()
    assert state_at(storage, handle, tmp_path / "found") == {"a.sst": b"content"}
    end(peer, connection, task, 3)
    assert list(executor.iterdir()) == []


def test_a_savepoint_gets_all_files_in_its_own_folder(peer: Peer, storage: StateStorage, tmp_path: Path) -> None:
    """H193: nothing of it is where the checkpoints are, and no checkpoint names it."""
    task, connection = peer.run(Keeper(), state_storage=storage)
    connection.send_events(1, "one")
    ask_for_snapshot(connection, 2, 6)
    connection.next_item(StateStored)
    connection.close_for(4, 7)
    savepoint = tmp_path / "savepoints" / "savepoint-a.state"
    connection.send(SavepointTarget(TASK_ID, 5, 7, str(savepoint)), barrier(6, 7, 0))
    connection.next_item(CheckpointAcknowledged)
    handle = connection.next_item(StateStored).handle
    assert (savepoint / handle.manifest).exists()
    restored = restore(StateFolder.at(str(savepoint), None), handle, tmp_path / "found")
    assert list(content_of(restored.files.folder).values()) == [b"'one'"]
    end(peer, connection, task, 7)
    task, connection = peer.run(
        keeper := Keeper(), state_storage=storage, answer=restoring(handle, files_from=str(savepoint))
    )
    assert list(keeper.kept.values()) == [b"'one'"]
    ask_for_snapshot(connection, 1, 8)
    after = connection.next_item(StateStored).handle
    assert list(state_at(storage, after, tmp_path / "after").values()) == [b"'one'"], "it is stored again"
    end(peer, connection, task, 3)


# --- uploads that fail or are stopped -------------------------------------------------------------------------------


def test_an_upload_that_fails_fails_the_checkpoint_and_nothing_else(peer: Peer, storage: StateStorage) -> None:
    """H192."""
    task, connection = peer.run(Keeper(), state_storage=storage)
    in_the_way = Path(storage.url)
    shutil.rmtree(in_the_way)
    in_the_way.write_text("a file")
    connection.send_events(1, "one")
    ask_for_snapshot(connection, 2, 6)
    failed = connection.next_item(StateFailed)
    assert (failed.checkpoint_id, f"cannot write {storage.url}" in failed.reason) == (6, True)
    connection.send(CheckpointAborted(TASK_ID, 4, 6))
    in_the_way.unlink()
    ask_for_snapshot(connection, 5, 7)
    assert connection.next_item(StateStored).checkpoint_id == 7
    assert end(peer, connection, task, 7) == ["one"]


def test_a_state_that_cannot_be_frozen_declines_the_checkpoint(peer: Peer, storage: StateStorage) -> None:
    class Linking(Keeper):
        def snapshot_state(self, checkpoint_id: int) -> StateFiles:  # type: ignore[override]
            if checkpoint_id == 6:
                (self.context.state_folder / "link").symlink_to("elsewhere")
            else:
                (self.context.state_folder / "link").unlink(missing_ok=True)
            return super().snapshot_state(checkpoint_id)

    task, connection = peer.run(Linking(), state_storage=storage)
    connection.close_for(1, 6)
    connection.send(barrier(2, 6, 0))
    assert (
        "is a symbolic link, and a state consists of regular files" in connection.next_item(CheckpointDeclined).reason
    )
    connection.send(CheckpointAborted(TASK_ID, 3, 6))
    ask_for_snapshot(connection, 4, 7)
    connection.next_item(StateStored)
    end(peer, connection, task, 6)


def test_what_was_frozen_for_a_checkpoint_that_is_declined_after_all_is_removed(
    peer: Peer, storage: StateStorage
) -> None:
    """H62: the bytes beside the files do not fit into a message."""

    class Large(Keeper):
        def snapshot_state(self, checkpoint_id: int) -> StateFiles:  # type: ignore[override]
            self.snapshots.append(self.context.snapshot_folder(checkpoint_id))
            return StateFiles(self.snapshots[-1], bytes(MESSAGE_BYTES) if checkpoint_id == 6 else b"")

        def close(self) -> None:
            self.left = [folder.exists() for folder in self.snapshots]

    keeper = Large()
    task, connection = peer.run(keeper, state_storage=storage, event_bytes_max=SMALL_EVENTS)
    connection.close_for(1, 6)
    connection.send(barrier(2, 6, 0))
    assert "the snapshot is too large" in connection.next_item(CheckpointDeclined).reason
    end(peer, connection, task, 3)
    assert keeper.left == [False, False]


def test_the_upload_of_an_aborted_checkpoint_stops_and_the_next_one_is_stored(
    peer: Peer, storage: StateStorage, gate: Gate, tmp_path: Path
) -> None:
    task, connection = peer.run(Keeper(), state_storage=storage)
    connection.send_events(1, "one")
    ask_for_snapshot(connection, 2, 6)
    assert gate.writing.wait(PATIENCE_S)
    connection.send(CheckpointAborted(TASK_ID, 4, 6), connection.event(5, "two"))
    connection.confirmed(5)
    gate.open.set()
    ask_for_snapshot(connection, 6, 7)
    stored = connection.next_item(StateStored)
    assert stored.checkpoint_id == 7
    assert sorted(state_at(storage, stored.handle, tmp_path / "found").values()) == [b"'one'", b"'two'"]
    end(peer, connection, task, 8)
    named = {name for name in names_in(storage) if origin_of(name) == (6, 3)}
    assert named == set(), "what was not complete is gone"


def uploading_threads() -> int:
    return sum(thread.name.startswith("headgate-upload") for thread in threading.enumerate())


def test_a_request_that_hangs_holds_up_no_upload_after_its_checkpoint_and_is_forgotten(
    peer: Peer, storage: StateStorage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """H190, H192: what it has stored may be deleted by now, when the answer comes at last."""
    original, before = StateFolder.write, uploading_threads()
    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts, and answers nothing

        def write(folder: StateFolder, name: str, pieces: Any, size_bytes: int) -> None:
            original(folder, name, pieces, size_bytes)
            origin = origin_of(name)
            if origin is not None and origin.checkpoint_id == 6:
                with socket.create_connection(server.getsockname()) as request:
                    request.recv(1)

        monkeypatch.setattr(StateFolder, "write", write)
        task, connection = peer.run(Keeper(), state_storage=storage)
        connection.send_events(1, "one")
        ask_for_snapshot(connection, 2, 6)
        request, _ = server.accept()
        connection.send(CheckpointAborted(TASK_ID, 4, 6))
        ask_for_snapshot(connection, 5, 7)
        stored = connection.next_item(StateStored)
        assert stored.checkpoint_id == 7
        assert list(state_at(storage, stored.handle, tmp_path / "found").values()) == [b"'one'"]
        connection.send(CheckpointCompleted(TASK_ID, 7, 7))
        request.close()
        until(lambda: uploading_threads() == before + 1, "the end of the request that hung")
        ask_for_snapshot(connection, 8, 8)
        handle = connection.next_item(StateStored).handle
        assert handle is not None
        (origin,) = (origin_of(file.name) for file in folder_of(storage).read_manifest(handle))
        assert origin in (FileOrigin(7, 3), FileOrigin(8, 3)), "8 if the answer came before the completion of 7"
        end(peer, connection, task, 10)


def test_only_so_many_uploads_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, go_on, begun = threading.Lock(), threading.Event(), queue.Queue[int]()
    ended: list[int] = []

    def upload(number: int) -> Upload:
        def store(stopped: Callable[[], bool]) -> StateHandle:
            begun.put(number)
            assert go_on.wait(PATIENCE_S)
            raise UploadStopped("over")

        return Upload(number, store)

    uploads = UploadThread(lock, "headgate-upload-test", lambda outcome: ended.append(outcome.checkpoint_id))
    most = LEFT_BEHIND_MAX + 1
    for number in range(most + 1):
        with lock:
            uploads.put(upload(number))
        if number < most:
            assert begun.get(timeout=PATIENCE_S) == number
            with lock:
                uploads.stop(number)
                assert uploads.idle is (number < LEFT_BEHIND_MAX)
    assert begun.empty(), "the last one waits"
    go_on.set()
    assert begun.get(timeout=PATIENCE_S) == most
    with lock:
        uploads.end()
    assert uploads.join(PATIENCE_S)
    assert ended in ([most - 1], [most - 1, most]), "and nothing is said of those that were left behind"


@pytest.mark.skipif(sys.platform != "linux", reason="a nice value is that of a thread on Linux only")
def test_an_upload_gives_way_to_the_tasks_own_thread() -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found = queue.Queue[int]()

    def store(stopped: Callable[[], bool]) -> StateHandle:
        found.put(nice())
        raise UploadStopped("over")

    lock, before = threading.Lock(), nice()
    uploads = UploadThread(lock, "headgate-upload-test", lambda outcome: None)
    with lock:
        uploads.put(Upload(1, store))
    assert found.get(timeout=PATIENCE_S) == min(before + 10, 19)
    with lock:
        uploads.end()
    assert uploads.join(PATIENCE_S)
    assert nice() == before


def test_uploads_are_done_one_after_the_other_in_order(peer: Peer, storage: StateStorage, gate: Gate) -> None:
    task, connection = peer.run(Keeper(), state_storage=storage)
    connection.send_events(1, "one")
    ask_for_snapshot(connection, 2, 6)
    connection.send(connection.event(4, "two"))
    ask_for_snapshot(connection, 5, 7)
    assert gate.writing.wait(PATIENCE_S)
    assert len(gate.names) == 1
    gate.open.set()
    assert [connection.next_item(StateStored).checkpoint_id for _ in range(2)] == [6, 7]
    end(peer, connection, task, 7)


def test_an_upload_ends_with_its_attempt(peer: Peer, storage: StateStorage, gate: Gate, executor: Path) -> None:
    """What it wrote is removed, nothing names it, and the task does not wait for it."""
    task, connection = peer.run(Keeper(), state_storage=storage, failure_timeout_s=0.01)
    connection.send_events(1, "one")
    ask_for_snapshot(connection, 2, 6)
    assert gate.writing.wait(PATIENCE_S)
    connection.send(AttemptEnded(TASK_ID, "superseded"))
    assert isinstance(task.error(), AttemptOver)
    [left] = executor.iterdir()
    assert (left / "uploads").exists(), "it is still being read"
    uploading = [one for one in threading.enumerate() if one.name.startswith("headgate-upload")]
    gate.open.set()
    for thread in uploading:
        thread.join(PATIENCE_S)
    assert names_in(storage) == ()
    assert [one.name for one in left.iterdir()] == ["state-0"], "for the next attempt of the subtask on this host"


def test_a_task_that_fails_during_an_upload_says_why_it_failed(peer: Peer, storage: StateStorage, gate: Gate) -> None:
    class Failing(Keeper):
        def handle_event(self, event: Any) -> None:
            if event == "fail":
                raise ValueError("as asked")
            super().handle_event(event)

    task, connection = peer.run(Failing(), state_storage=storage)
    connection.send_events(1, "one")
    ask_for_snapshot(connection, 2, 6)
    assert gate.writing.wait(PATIENCE_S)
    connection.send(connection.event(4, "fail"))
    assert "as asked" in connection.finish().failure
    gate.open.set()
    assert isinstance(task.error(), ValueError)
    assert names_in(storage) == ()


# --- what the storage allows ----------------------------------------------------------------------------------------


def test_an_attempt_with_states_in_files_writes_one_small_file_before_its_first_state(
    peer: Peer, storage: StateStorage
) -> None:
    task, connection = peer.run(Keeper(), state_storage=storage)
    [probe] = folder_of(storage).names()
    assert is_probe(probe)
    assert origin_of(probe) == (1, 3), "a sweep of this application deletes it"
    end(peer, connection, task, 1)
    assert [name for name in folder_of(storage).names() if is_probe(name)] == [probe]


def test_a_task_that_cannot_write_into_the_storage_fails_before_its_first_record(
    peer: Peer, storage: StateStorage, executor: Path
) -> None:
    Path(storage.url).write_text("a file, where a directory is needed")
    task = peer.start(Keeper(), state_storage=storage)
    connection = peer.register()
    assert "a task cannot write and read states in files: cannot write " in connection.finish().failure
    error = task.error()
    assert isinstance(error, StorageError)
    assert "StorageDetails(task_options=...)" in str(error)
    assert not executor.exists() or list(executor.iterdir()) == [], "nothing is left on this host"


# --- a disk that is full --------------------------------------------------------------------------------------------


class SmallDisk:
    """A file system of 1 MiB."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "of somebody else"

    def fill(self, *, but_bytes: int) -> None:
        free = os.statvfs(self.path)
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - but_bytes)

    def free(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[Path], SmallDisk]]:
    """Mounts one at a path."""
    mounted: list[Path] = []

    def mount(path: Path) -> SmallDisk:
        path.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "headgate-test", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        mounted.append(path)
        return SmallDisk(path)

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


class Large(Keeper):
    """Its state also has a file of 300 kB, which is copied at each cut because it may change."""

    def open(self, context: SubtaskContext, state: Any) -> None:
        super().open(context, state)
        (context.state_folder / "large").write_bytes(bytes(300_000))


@pytest.mark.parametrize("full", ["the local disk", "the storage"])
def test_a_full_disk_fails_the_checkpoint_and_the_next_one_succeeds_when_there_is_space(
    full: str, peer: Peer, storage: StateStorage, tmp_path: Path, small_disk: Callable[[Path], SmallDisk]
) -> None:
    """H192: records go on meanwhile, and nothing is lost."""
    local = full == "the local disk"
    disk = small_disk(tmp_path / "blockmgr-1" if local else Path(storage.url))
    task, connection = peer.run(Large(), state_storage=storage)
    connection.send_events(1, "one")
    disk.fill(but_bytes=100_000)
    connection.close_for(2, 6)
    connection.send(barrier(3, 6, 0))
    if not local:
        connection.next_item(CheckpointAcknowledged)
    failed = connection.next_item(CheckpointDeclined if local else StateFailed)
    assert isinstance(failed, (CheckpointDeclined, StateFailed))
    assert failed.checkpoint_id == 6
    assert "No space left on device" in failed.reason
    assert ("cannot freeze" if local else f"cannot write {storage.url}") in failed.reason
    connection.send(CheckpointAborted(TASK_ID, 4, 6), connection.event(5, "two"))
    connection.confirmed(5)
    assert os.statvfs(disk.path).f_bavail * os.statvfs(disk.path).f_frsize > 80_000, "what was begun is removed"
    disk.free()
    ask_for_snapshot(connection, 6, 7)
    stored = connection.next_item(StateStored)
    found = state_at(storage, stored.handle, tmp_path / "found")
    assert found.pop("large") == bytes(300_000)
    assert sorted(found.values()) == [b"'one'", b"'two'"]
    assert end(peer, connection, task, 8) == ["one", "two"]


# --- the end --------------------------------------------------------------------------------------------------------


def test_a_task_ends_after_the_upload_of_its_last_state_and_gives_signs_of_life_meanwhile(
    peer: Peer, storage: StateStorage, gate: Gate
) -> None:
    """H94, H190. The time that the upload takes is not that of the coordinator."""
    task = peer.start(Keeper(), state_storage=storage)
    connection = peer.register(heartbeat_interval_s=0.01)
    while not isinstance(message := connection.receive(), Opened):
        pass
    connection.send(Confirm(TASK_ID, message.seq), connection.event(1, "end"))
    assert gate.writing.wait(PATIENCE_S)
    connection.send(connection.event(1, "end"))  # a second time, which is confirmed immediately
    for _ in range(2):
        while not isinstance(connection.receive(), Confirm):  # with heartbeats from before the upload
            pass
    while not isinstance(connection.receive(), Heartbeat):
        pass
    gate.open.set()
    while not isinstance(message := connection.receive(), Finished):
        pass
    assert message.files is not None
    connection.send(Confirm(TASK_ID, message.seq))
    task.outputs()


def test_the_time_of_the_last_upload_does_not_count_as_the_coordinators(
    peer: Peer, storage: StateStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spark_bridge.subtask.channel import SubtaskChannel

    offset = [0.0]
    monotonic = SubtaskChannel.now
    monkeypatch.setattr(SubtaskChannel, "now", lambda channel: monotonic(channel) + offset[0])
    original = SubtaskChannel.wait_for_uploads

    def slow(channel: SubtaskChannel) -> bool:
        ended = original(channel)
        offset[0] += 10_000.0
        return ended

    monkeypatch.setattr(SubtaskChannel, "wait_for_uploads", slow)
    deadlines = []
    wait = SubtaskChannel.wait_until_finish_is_confirmed

    def waited(channel: SubtaskChannel, deadline: float) -> None:
        deadlines.append(deadline - channel.now())
        wait(channel, deadline)

    monkeypatch.setattr(SubtaskChannel, "wait_until_finish_is_confirmed", waited)
    task, connection = peer.run(Keeper(), state_storage=storage)
    end(peer, connection, task, 1)
    assert deadlines[0] > 0


def test_a_checkpoint_during_the_last_upload_is_taken_and_the_last_state_is_newer(
    peer: Peer, storage: StateStorage, gate: Gate, tmp_path: Path
) -> None:
    keeper = Keeper()
    task, connection = peer.run(keeper, state_storage=storage)
    connection.send(connection.event(1, "end"))
    assert gate.writing.wait(PATIENCE_S)
    connection.send(connection.event(2, "late"))
    acknowledged = ask_for_snapshot(connection, 3, 6)
    assert acknowledged.state_follows
    gate.open.set()
    handle = connection.next_item(StateStored).handle
    finished = connection.finish()
    expected = [b"'end'", b"'late'"]
    assert sorted(state_at(storage, handle, tmp_path / "found").values()) == expected
    assert sorted(state_at(storage, finished.files, tmp_path / "last").values()) == expected
    task.outputs()


def test_a_task_whose_outputs_are_abandoned_stores_its_last_state(
    peer: Peer, storage: StateStorage, tmp_path: Path
) -> None:
    """Spark counts it as a success, as after ``take(1)``."""
    task, connection = peer.run(Keeper(), limit=1, state_storage=storage)
    connection.send(connection.event(1, "one"))
    assert list(state_at(storage, connection.finish().files, tmp_path / "last").values()) == [b"'one'"]
    assert task.outputs() == ["one"]


def test_the_attempt_may_end_during_the_upload_of_its_last_state(peer: Peer, storage: StateStorage, gate: Gate) -> None:
    task, connection = peer.run(Keeper(), state_storage=storage)
    connection.send(connection.event(1, "end"))
    assert gate.writing.wait(PATIENCE_S)
    connection.send(AttemptEnded(TASK_ID, "superseded"))
    connection.expect_end()
    gate.open.set()
    assert isinstance(task.error(), AttemptOver)


def test_a_task_fails_if_its_last_state_cannot_be_stored(peer: Peer, storage: StateStorage) -> None:
    task, connection = peer.run(Keeper(), state_storage=storage)
    shutil.rmtree(storage.url)
    Path(storage.url).write_text("a file is in the way")
    connection.send(connection.event(1, "end"))
    assert "cannot write" in connection.finish().failure
    assert isinstance(task.error(), StorageError)


# --- restores -------------------------------------------------------------------------------------------------------


def restoring(handle: StateHandle | None, state: bytes = b"beside", **changes: Any) -> dict[str, Any]:
    return {"checkpoint_id": 6, "states": (SubtaskState(2, state, handle),), **changes}


@pytest.fixture
def kept(storage: StateStorage, tmp_path: Path) -> StateHandle:
    """A state of before, with two files."""
    folder = tmp_path / "before"
    (folder / "below").mkdir(parents=True)
    (folder / "1.sst").write_bytes(b"first")
    (folder / "below" / "2.sst").write_bytes(b"second")
    uploader = StateUploader(
        folder_of(storage), tmp_path / "private", epoch=2, token="cd", subtask=2, task_attempt_id=5
    )
    return uploader.upload(uploader.freeze(StateFiles(folder), 6))


FILES = {"1.sst": b"first", "below/2.sst": b"second"}


def test_a_state_is_in_the_state_folder_before_open_and_is_not_stored_again(
    peer: Peer, storage: StateStorage, kept: StateHandle, executor: Path
) -> None:
    """H191: what is restored is known, so the next checkpoint names it."""
    task, connection = peer.run(keeper := Keeper(), state_storage=storage, answer=restoring(kept))
    assert keeper.kept == FILES
    assert keeper.restored == RestoredFiles(keeper.context.state_folder, b"beside")
    ask_for_snapshot(connection, 1, 7)
    handle = connection.next_item(StateStored).handle
    assert folder_of(storage).read_manifest(handle) == folder_of(storage).read_manifest(kept)
    end(peer, connection, task, 3)
    assert list(executor.iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_state_is_not_restored(peer: Peer, storage: StateStorage, kept: StateHandle, damage: str) -> None:
    """H191."""
    files = folder_of(storage).read_manifest(kept)
    name = kept.manifest if damage == "manifest" else files[0].name
    path = Path(storage.url, "words", "state", name)
    if damage == "remove":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content[:-1] if damage == "cut" else content)
    task = peer.start(keeper := Keeper(), state_storage=storage)
    connection = peer.register(**restoring(kept))
    assert "the checkpoint that names it cannot be restored" in connection.finish().failure
    assert isinstance(task.error(), CheckpointUnreadable)
    assert keeper.calls == ["close"]


def test_the_attempt_may_end_while_a_state_is_restored(
    peer: Peer, storage: StateStorage, kept: StateHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    verified = StateFolder.verified

    def slow(folder: StateFolder, file: Any, stopped: Callable[[], bool]) -> Iterator[bytes]:
        reading.set()
        assert go_on.wait(PATIENCE_S)
        yield from verified(folder, file, stopped)

    monkeypatch.setattr(StateFolder, "verified", slow)
    task = peer.start(keeper := Keeper(), state_storage=storage)
    connection = peer.register(**restoring(kept))
    assert reading.wait(PATIENCE_S)
    connection.send(AttemptEnded(TASK_ID, "superseded"))
    connection.expect_end()
    go_on.set()
    assert isinstance(task.error(), AttemptOver)
    assert keeper.calls == ["close"]


def test_what_an_earlier_attempt_has_left_on_the_host_is_not_read_from_the_storage(
    peer: Peer, storage: StateStorage, kept: StateHandle, executor: Path
) -> None:
    task, connection = peer.run(Keeper(), state_storage=storage, answer=restoring(kept))
    connection.send(AttemptEnded(TASK_ID, "killed"))
    assert isinstance(task.error(), AttemptOver)
    [left] = executor.iterdir()
    first = folder_of(storage).read_manifest(kept)[0]
    (left / "state-0" / "below" / "2.sst").write_bytes(b"Second")  # it went on before it ended
    Path(storage.url, "words", "state", first.name).unlink()
    task, connection = peer.run(keeper := Keeper(), state_storage=storage, answer=restoring(kept))
    assert keeper.kept == FILES
    assert not left.exists()
    end(peer, connection, task, 1)


def test_a_state_that_was_bytes_is_restored_as_bytes(peer: Peer, storage: StateStorage) -> None:
    task, connection = peer.run(keeper := Keeper(), state_storage=storage, answer=restoring(None, b"old"))
    assert keeper.restored == b"old"
    assert keeper.kept == {}
    end(peer, connection, task, 1)


def test_a_state_of_bytes_beside_one_in_files_is_refused(peer: Peer, storage: StateStorage, kept: StateHandle) -> None:
    task = peer.start(Keeper(), state_storage=storage)
    connection = peer.register(checkpoint_id=6, states=(SubtaskState(6, b"b"), SubtaskState(2, b"a", kept)))
    assert "a state in files and one of bytes for one subtask" in connection.finish().failure
    with pytest.raises(LocalProtocolError, match="restore with the parallelism that it was taken with"):
        raise task.error()


def test_an_empty_state_beside_one_in_files_is_none(peer: Peer, storage: StateStorage, kept: StateHandle) -> None:
    answer = {"checkpoint_id": 6, "states": (SubtaskState(6, b""), SubtaskState(2, b"beside", kept))}
    task, connection = peer.run(keeper := Keeper(), state_storage=storage, answer=answer)
    assert keeper.kept == FILES
    end(peer, connection, task, 1)


# --- pieces ---------------------------------------------------------------------------------------------------------


class Merger(Keeper):
    """Moves the files of all pieces into the first one."""

    def merge_files(self, pieces: Sequence[RestoredFiles]) -> bytes:
        self.pieces = [(content_of(one.folder), one.data, one.key_groups) for one in pieces]
        self.folders = [one.folder for one in pieces]
        for n, one in enumerate(pieces[1:]):
            for path in content_of(one.folder):
                (one.folder / path).rename(pieces[0].folder / f"{n}-{Path(path).name}")
        return b" and ".join(one.data for one in pieces)


@pytest.fixture
def divided(storage: StateStorage, tmp_path: Path) -> list[StateHandle]:
    """The states of two subtasks of two, with 2 and 11 bytes, in the groups 0 to 3 and 4 to 7."""
    handles = []
    for n, content in enumerate((b"0s", b"larger ones")):
        folder = tmp_path / f"before-{n}"
        folder.mkdir()
        (folder / f"{n}.sst").write_bytes(content)
        uploader = StateUploader(
            folder_of(storage), tmp_path / f"private-{n}", epoch=2, token="cd", subtask=n, task_attempt_id=5
        )
        snapshot = uploader.freeze(StateFiles(folder), 6)
        handles.append(uploader.upload(snapshot._replace(key_groups=KeyGroupRange(4 * n, 4 * n + 4, 8))))
    return handles


def test_pieces_are_merged_before_open(
    peer: Peer, storage: StateStorage, divided: list[StateHandle], executor: Path
) -> None:
    """H52, H191: the largest one first, each with its own groups; ``open`` has one state, and nothing else is left."""
    states = tuple(SubtaskState(n, b"%d" % n, one, (4 * n, 4 * n + 4)) for n, one in enumerate(divided))
    answer = {"checkpoint_id": 6, "states": states}
    task, connection = peer.run(keeper := Merger(), state_storage=storage, answer=answer)
    assert keeper.pieces == [
        ({"1.sst": b"larger ones"}, b"1", range(4, 8)),
        ({"0.sst": b"0s"}, b"0", range(4)),
    ]
    assert keeper.kept == {"1.sst": b"larger ones", "0-0.sst": b"0s"}
    own = KeyGroups(8).range_of(keeper.context.subtask, keeper.context.parallelism)
    assert keeper.restored == RestoredFiles(keeper.context.state_folder, b"1 and 0", own)
    assert [one.exists() for one in keeper.folders] == [True, False]
    end(peer, connection, task, 1)
    assert list(executor.iterdir()) == []


def test_the_part_of_a_piece_that_counts_decides_which_is_first(
    peer: Peer, storage: StateStorage, divided: list[StateHandle]
) -> None:
    states = (SubtaskState(0, b"0", divided[0], (0, 4)), SubtaskState(1, b"1", divided[1], (7, 8)))
    answer = {"checkpoint_id": 6, "states": (*states, SubtaskState(1, b"1", divided[1], (4, 5)))}
    task, connection = peer.run(keeper := Merger(), state_storage=storage, answer=answer)
    assert [groups for _, _, groups in keeper.pieces] == [range(7, 8), range(4, 5), range(4)]  # 2.75 bytes, and 2
    end(peer, connection, task, 1)


def test_one_piece_with_more_than_its_groups_is_cut_and_a_whole_one_is_not(
    peer: Peer, storage: StateStorage, divided: list[StateHandle]
) -> None:
    """H52, H191."""
    for groups, merged in (((4, 6), True), ((4, 8), False)):
        answer = {"checkpoint_id": 6, "states": (SubtaskState(1, b"1", divided[1], groups),)}
        task, connection = peer.run(keeper := Merger(), state_storage=storage, answer=answer)
        assert hasattr(keeper, "pieces") is merged
        if merged:
            assert keeper.pieces == [({"1.sst": b"larger ones"}, b"1", range(4, 6))]
        end(peer, connection, task, 1)


def test_folders_without_groups_are_merged_too(peer: Peer, storage: StateStorage, kept: StateHandle) -> None:
    answer = {"checkpoint_id": 6, "states": (SubtaskState(2, b"b", kept), SubtaskState(6, b"a", kept))}
    task, connection = peer.run(keeper := Merger(), state_storage=storage, answer=answer)
    assert keeper.pieces == [(FILES, b"b", None), (FILES, b"a", None)]
    assert keeper.restored == RestoredFiles(keeper.context.state_folder, b"b and a")
    end(peer, connection, task, 1)


def test_pieces_are_refused_before_the_download_if_nothing_can_merge_them(
    peer: Peer, storage: StateStorage, divided: list[StateHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateFolder, "read_manifest", lambda *arguments: pytest.fail("downloaded"))
    task = peer.start(keeper := Keeper(), state_storage=storage)
    connection = peer.register(checkpoint_id=6, states=(SubtaskState(1, b"1", divided[1], (4, 6)),))
    assert "Define Keeper.merge_files(self, pieces)" in connection.finish().failure
    assert isinstance(task.error(), TypeError)
    assert keeper.calls == ["close"]


def test_a_merge_that_returns_no_bytes_fails_the_task(
    peer: Peer, storage: StateStorage, divided: list[StateHandle]
) -> None:  # H46
    class Forgetful(Merger):
        def merge_files(self, pieces: Sequence[RestoredFiles]) -> Any:
            super().merge_files(pieces)

    task = peer.start(Forgetful(), state_storage=storage)
    connection = peer.register(checkpoint_id=6, states=(SubtaskState(1, b"1", divided[1], (4, 6)),))
    assert "Forgetful.merge_files must return bytes, not NoneType" in connection.finish().failure
    assert isinstance(task.error(), TypeError)


class Grouped(Merger):
    """Its state has key groups. ``count``: how many."""

    count = 8

    def snapshot_state(self, checkpoint_id: int) -> StateFiles:  # type: ignore[override]
        return StateFiles(self.context.state_folder, b"beside", key_groups=KeyGroups(self.count))


def test_a_state_with_key_groups_has_those_of_its_subtask(peer: Peer, storage: StateStorage) -> None:
    task, connection = peer.run(keeper := Grouped(), state_storage=storage)
    ask_for_snapshot(connection, 1, 7)
    own = KeyGroups(8).range_of(keeper.context.subtask, keeper.context.parallelism)
    assert connection.next_item(StateStored).handle.key_groups == KeyGroupRange(own.start, own.stop, 8)
    end(peer, connection, task, 3)


@pytest.mark.parametrize(
    ("count", "problem"),
    [(16, "the restored state has 8 key groups, .* so use KeyGroups\\(8\\)"), (1, "the restored state has 8")],
)
def test_the_number_of_key_groups_cannot_change(
    peer: Peer, storage: StateStorage, divided: list[StateHandle], count: int, problem: str
) -> None:
    """H52: the keys of this subtask would belong to groups of others."""
    keeper = Grouped()
    keeper.count = count
    answer = {"checkpoint_id": 6, "states": (SubtaskState(1, b"1", divided[1]),)}
    task, connection = peer.run(keeper, state_storage=storage, answer=answer)
    connection.close_for(1, 7)
    connection.send(barrier(2, 7, 0))
    connection.finish()
    with pytest.raises(ValueError, match=problem):
        raise task.error()


# --- parts ----------------------------------------------------------------------------------------------------------


def test_a_named_part_may_have_the_files(peer: Peer, storage: StateStorage, tmp_path: Path) -> None:
    """H80: the checkpoint says whose they are, and each part has its own folder."""

    class Beside(Keeper):
        def snapshot_state(self, checkpoint_id: int) -> bytes:  # type: ignore[override]
            (self.context.state_folder / "own").write_bytes(b"")
            return b"own"

    def start(**answer: Any) -> tuple[Keeper, Beside, RunningTask, PeerConnection]:
        part, own = Keeper(), Beside()
        task, connection = peer.run(own, parts={"store": lambda: part}, state_storage=storage, answer=answer)
        return part, own, task, connection

    part, own, task, connection = start()
    (part.context.state_folder / "1.sst").write_bytes(b"of the part")
    state = ask_for_snapshot(connection, 1, 6).state
    handle = connection.next_item(StateStored).handle
    end(peer, connection, task, 3)
    part, own, task, connection = start(**restoring(handle, state))
    assert part.restored == RestoredFiles(part.context.state_folder, b"beside")
    assert part.kept == {"1.sst": b"of the part"}
    assert (own.restored, own.kept) == (b"own", {})
    end(peer, connection, task, 1)


def test_files_of_a_part_that_is_gone_are_not_dropped(peer: Peer, storage: StateStorage, kept: StateHandle) -> None:
    from protocol.parts import FILES_OF, join_states

    task = peer.start(Keeper(), state_storage=storage)
    connection = peer.register(**restoring(kept, join_states(b"", {FILES_OF: b"store"})))
    assert "'store'" in connection.finish().failure
    assert isinstance(task.error(), LocalProtocolError)


def test_two_parts_with_files_are_refused(peer: Peer, storage: StateStorage) -> None:
    task, connection = peer.run(Keeper(), parts={"store": Keeper}, state_storage=storage)
    connection.close_for(1, 6)
    connection.send(barrier(2, 6, 0))
    connection.finish()
    with pytest.raises(TypeError, match=r"Keeper.snapshot_state returned StateFiles, and so did another part"):
        raise task.error()


# --- without a storage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "problem"),
    [
        (None, "there is no storage"),
        (StateStorage("memory://states", None, 1, "ab"), "memory://states is the memory of the driver's process"),
    ],
)
@pytest.mark.parametrize("use", ["state_folder", "snapshot_folder", "snapshot_state", "final_state"])
def test_a_storage_without_files_is_an_error_that_says_what_to_do(
    peer: Peer, tmp_path: Path, storage: StateStorage | None, problem: str, use: str
) -> None:
    class Needing(EventSource):
        def handle_event(self, event: Any) -> None:
            super().handle_event(event)
            if use == "state_folder":
                self.context.state_folder  # noqa: B018
            elif use == "snapshot_folder":
                self.context.snapshot_folder(1)

        def snapshot_state(self, checkpoint_id: int) -> StateFiles:  # type: ignore[override]
            return StateFiles(tmp_path)

    task, connection = peer.run(Needing(), state_storage=storage)
    if use == "snapshot_state":
        connection.close_for(1, 6)
        connection.send(barrier(2, 6, 0))
    else:
        connection.send(connection.event(1, "end"))
    connection.finish()
    with pytest.raises(StorageError, match=f"needs a storage that all executors can write, and {problem}"):
        raise task.error()


def test_a_task_without_files_does_not_load_what_they_need() -> None:
    program = (
        "import sys, spark_bridge.subtask\n"
        "from spark_bridge.subtask import parts, runner, channel\n"
        "print([name for name in sys.modules if 'fsspec' in name or 'storage' in name or name == 'tempfile'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- processes that are killed --------------------------------------------------------------------------------------

_KILLED = """
import sys, threading
from spark_bridge.storage.state_files.folder import StateFolder
from spark_bridge.storage.state_files.values import StateFiles
from spark_bridge.common.endpoint import StateStorage, TaskIdentity
from spark_bridge.subtask import SubtaskOperator, run_subtask
from tests.spark_bridge.subtask.peer import KEYS, TASK_ID, TaskEndpoint

url, port = sys.argv[1], int(sys.argv[2])

class Writer(SubtaskOperator):
    waits_for_subtask_ready = False
    def open(self, context, state):
        self.context = context
        for number in range(3):
            (context.state_folder / f"{number}.sst").write_bytes(bytes([number]) * 3 * 2**20)
    def process(self, records):
        while True:
            self.context.wait_for_event()
        yield
    def snapshot_state(self, checkpoint_id):
        return StateFiles(self.context.state_folder)

original, written = StateFolder.write, []
def write(folder, name, pieces, size):
    def held():
        for piece in pieces:
            if written:
                yield piece
                print("writing", flush=True)
                threading.Event().wait()
            yield piece
        if not name.endswith("-probe"):
            written.append(name)
    original(folder, name, held(), size)
StateFolder.write = write
endpoint = TaskEndpoint("127.0.0.1", port, KEYS.task_key("words"), "words", 4,
    state_storage=StateStorage(url, None, 3, "ab"))
for _ in run_subtask(Writer, endpoint, TaskIdentity(TASK_ID, 2, 5, 1), ()):
    pass
"""


def test_a_process_that_is_killed_in_an_upload_leaves_nothing_that_is_named(
    peer: Peer, storage: StateStorage, executor: Path
) -> None:
    """H190, H191: its files are orphans in the storage, and the next attempt on the host removes its folder."""
    arguments = [sys.executable, "-c", _KILLED, storage.url, str(peer.port)]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            connection = peer.take_task()
            ask_for_snapshot(connection, 1, 6)
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
        finally:
            os.kill(process.pid, signal.SIGKILL)
    names = names_in(storage)
    assert len(names) == 2, "one that is complete, and one that is torn"
    assert not any("-m" in name for name in names), "without a manifest, nothing names them"
    [left] = executor.iterdir()
    task, connection = peer.run(keeper := Keeper(), state_storage=storage)
    assert keeper.kept == {}
    assert not left.exists()
    ask_for_snapshot(connection, 1, 7)
    named = folder_of(storage).names_of(connection.next_item(StateStored).handle)
    assert not named & set(names)
    end(peer, connection, task, 3)


def test_what_other_applications_have_left_is_removed_and_what_lives_is_not(
    peer: Peer, storage: StateStorage, executor: Path
) -> None:
    executor.mkdir(0o700)
    (executor / "ffff-0123456789abcdef-0-1").mkdir()
    (executor / "ab-0123456789abcdef-0-1").mkdir()  # for the next attempt of another subtask
    other = StateStorage(storage.url, None, 4, "dd")
    first, first_connection = peer.run(keeper := Keeper(), state_storage=storage)
    assert not (executor / "ffff-0123456789abcdef-0-1").exists()
    assert (executor / "ab-0123456789abcdef-0-1").exists()
    second, second_connection = peer.run(Keeper(), state_storage=other, parallelism=5, operator_id="others")
    assert keeper.context.state_folder.exists(), "it lives"
    assert not (executor / "ab-0123456789abcdef-0-1").exists()
    end(peer, second_connection, second, 1)
    first_connection.send(first_connection.event(1, "end"))
    first_connection.finish()
    first.outputs()


_FORKED = """
import os, sys
from spark_bridge.subtask.local_folder import LocalFolder
folder = LocalFolder.make("words", 2, "ab")
child = os.fork()
if not child:
    folder.forget()
    print("forgotten", flush=True)
    os.read(0, 1)
    os._exit(0)
os._exit(0)
"""


def test_a_forked_process_does_not_keep_the_folder_of_a_task_that_is_gone(executor: Path) -> None:
    arguments = [sys.executable, "-W", "error", "-c", _FORKED]
    with subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "forgotten\n"
        assert process.wait(PATIENCE_S) == 0
        [left] = LocalFolder.left_of("words", 2, "ab")
        left.remove()
    assert list(executor.iterdir()) == []


def test_secrets_are_not_shown(storage: StateStorage, peer: Peer) -> None:
    secret = StateStorage("s3://bucket", {"secret": "hunter2"}, 1, "ab")
    assert "hunter2" not in repr(secret)
    assert "hunter2" not in repr(peer.endpoint(state_storage=secret))
