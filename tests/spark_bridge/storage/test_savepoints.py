# SPDX-License-Identifier: Apache-2.0

"""Savepoints of several applications in one directory: each has its own name, and nothing of others is touched (H162).

Applications whose checkpoints are in memory, or in separate storages, assign the same ids.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from protocol.barrier_tracker import CompletedCheckpoint
from protocol.wire.checkpoint_format import StoredCheckpoint
from protocol.wire.messages import RestoreMode
from spark_bridge.command import main
from spark_bridge.storage import (
    CheckpointStorage,
    MemoryStorage,
    Storage,
    StorageError,
    StorageSession,
    read_file,
)
from spark_bridge.storage.files import Files
from spark_bridge.storage.single_files import encoded
from tests.spark_bridge.storage.checkpoints import a_checkpoint, content_of, failing, hooked

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 300.0
STRANGERS = {
    "savepoint-words-1.hgc": encoded("words", a_checkpoint(1, state=b"of a former release"), RestoreMode.STREAMING),
    "savepoint-words-1-0123456789abcdef.hgc.tmp": b"of another application, which is writing it",
    "notes.txt": b"of the user",
}


def of(application: object) -> CompletedCheckpoint:
    """Checkpoint 1 of an application: all have the same id."""
    return a_checkpoint(1, state=f"of application {application}".encode())


def contents(url: str) -> dict[str, bytes]:
    return {name: content_of(f"{url}/{name}") for name in Files(url).names()}


def with_strangers(directory: Path) -> Path:
    directory.mkdir()
    for name, content in STRANGERS.items():
        (directory / name).write_bytes(content)
    return directory


# --- names --------------------------------------------------------------------------------------------------------


def test_savepoints_with_the_same_id_of_several_applications_are_all_kept(any_url: str, tmp_path: Path) -> None:  # H162
    storages: list[Storage] = [
        MemoryStorage(),
        MemoryStorage(),
        CheckpointStorage(tmp_path / "a"),
        CheckpointStorage(tmp_path / "b"),
    ]
    files = {}
    for number, storage in enumerate([*storages, storages[0]]):  # one takes the same one twice
        files[storage.store_savepoint(any_url, "words", of(number))] = of(number)
    assert {file: read_file(file).checkpoint for file in files} == files
    assert sorted(file.rpartition("/")[2] for file in files) == sorted(contents(any_url)), "nothing else is left"


def test_a_savepoint_whose_name_is_taken_after_all_fails_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # H162
    """A local disk creates files exclusively, so not even a token that comes twice does harm."""
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 16)
    file = MemoryStorage().store_savepoint(tmp_path, "words", of("a"))
    with pytest.raises(StorageError, match=r"cannot write .*savepoint-words-1-0{16}\.hgc: FileExistsError"):
        MemoryStorage().store_savepoint(tmp_path, "words", of("b"))
    assert read_file(file).checkpoint == of("a")
    Path(f"{file}.tmp").write_bytes(b"another one is writing it")
    Path(file).unlink()
    with pytest.raises(StorageError, match="FileExistsError"):
        MemoryStorage().store_savepoint(tmp_path, "words", of("b"))
    assert contents(str(tmp_path)) == {f"{Path(file).name}.tmp": b"another one is writing it"}


def test_a_disk_without_hard_links_takes_savepoints_and_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # H162
    def no_links(*arguments: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    file = MemoryStorage().store_savepoint(tmp_path, "words", of("a"))
    assert contents(str(tmp_path)).keys() == {Path(file).name}
    monkeypatch.setattr("secrets.token_hex", lambda size: file[-20:-4])
    with pytest.raises(StorageError, match="FileExistsError"):
        MemoryStorage().store_savepoint(tmp_path, "words", of("b"))
    assert read_file(file).checkpoint == of("a")


@pytest.mark.parametrize("operator_id", ["words", "München/*?", "x" * 1000, "-", "a-1"])
def test_a_name_tells_operator_and_id_and_fits_every_filesystem(operator_id: str, tmp_path: Path) -> None:  # H162
    file = MemoryStorage().store_savepoint(tmp_path, operator_id, a_checkpoint(2**53 - 1))
    name = Path(file).name
    assert name.startswith("savepoint-")
    assert f"-{2**53 - 1}-" in name
    assert len(f"{name}.tmp") <= 255
    assert read_file(file).operator_id == operator_id


# --- crashes and failures -----------------------------------------------------------------------------------------


def savepoints_of_a_process(directory: Path, *how: str) -> tuple[int, list[str]]:
    """Run ``savepointer``; return its exit status and what it printed."""
    command = [sys.executable, "-m", "tests.spark_bridge.storage.savepointer", str(directory), *how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def kept(directory: Path, before: dict[str, bytes]) -> dict[str, bytes]:
    """Check that what was there is there, unchanged; return the rest."""
    now = contents(str(directory))
    assert {name: now.get(name) for name in before} == before
    return {name: content for name, content in now.items() if name not in before}


def test_an_application_killed_before_any_operation_on_the_disk_leaves_all_savepoints_as_they_were(
    tmp_path: Path,
) -> None:  # H162, H50
    """A real kill of a real process on a local disk, each time with the savepoints of the ones before."""
    directory = with_strangers(tmp_path / "savepoints")
    before, whole = contents(str(directory)), 0
    for step in itertools.count():
        status, lines = savepoints_of_a_process(directory, "kill", str(step))
        new = kept(directory, before)
        for name in new:
            if name.endswith(".hgc"):
                assert read_file(directory / name).checkpoint == a_checkpoint(1), f"step {step}"
                whole += 1
            else:
                assert name.endswith(".hgc.tmp"), f"step {step}"
        before |= new
        if lines:
            assert status == 0
            break
    assert step >= 5
    assert 2 <= whole < step


def test_savepoints_that_fail_at_any_operation_on_the_disk_leave_nothing_and_delete_nothing(
    tmp_path: Path,
) -> None:  # H162, H50
    directory = with_strangers(tmp_path / "savepoints")
    before = contents(str(directory))
    status, lines = savepoints_of_a_process(directory, "fail")
    assert status == 0
    assert sum(line.startswith("failed") for line in lines) >= 4
    stored = [line.removeprefix("stored ") for line in lines if line.startswith("stored ")]
    new = kept(directory, before)
    left = {str(directory / name) for name in new if not name.endswith(".tmp")}
    assert left == set(stored)
    assert all(read_file(file).checkpoint == a_checkpoint(1) for file in stored)
    assert len(new) - len(left) <= 2, "only a failure of its deletion, which is two operations, leaves a temporary file"


def test_a_savepoint_on_a_full_disk_deletes_only_its_own_file(tmp_path: Path) -> None:  # H162
    directory = with_strangers(tmp_path / "savepoints")
    file = MemoryStorage().store_savepoint(directory, "words", of("a"))
    before = contents(str(directory))
    status, (line,) = savepoints_of_a_process(directory, "full")
    assert (status, line.startswith("failed cannot write"), "File too large" in line) == (0, True, True)
    assert contents(str(directory)) == before
    assert read_file(file).checkpoint == of("a")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory in which nobody may write")
def test_a_savepoint_into_a_directory_where_nobody_may_write_says_so() -> None:
    with pytest.raises(StorageError, match=r"cannot (write|make the directory) /proc/self"):
        MemoryStorage().store_savepoint("/proc/self/savepoints", "words", of("a"))


class Crash(BaseException):
    """The application has died at this call; none of its later calls has an effect."""


def stopped_at(step: int, *, crash: bool) -> tuple[Callable[[str, str], None], list[str]]:
    """A hook that fails at this call, or at all from this one on; and the calls so far."""
    calls: list[str] = []

    def hook(call: str, path: str) -> None:
        calls.append(call)
        here = len(calls) - 1
        if here == step or (crash and here > step):
            raise Crash if crash else ConnectionError("the answer was lost")

    return hook, calls


@pytest.mark.parametrize("crash", [True, False], ids=["dies", "fails"])
def test_at_whatever_request_to_a_store_an_application_stops_all_savepoints_stay(
    crash: bool, stepped_url: str
) -> None:  # H162, H50
    url, others = stepped_url, [MemoryStorage() for _ in range(2)]
    files = {other.store_savepoint(url, "words", of(number)): of(number) for number, other in enumerate(others)}
    for step in itertools.count():
        before = contents(url)
        hook, calls = stopped_at(step, crash=crash)
        file = ""
        with hooked(hook):
            with suppress(Crash, StorageError):
                file = MemoryStorage().store_savepoint(url, "words", of(step))
        now = contents(url)
        assert {name: now.get(name) for name in before} == before, f"step {step}: {calls}"
        new = now.keys() - before.keys()
        if file:
            assert new <= {file.rpartition("/")[2], f"{file.rpartition('/')[2]}.tmp"}
            files[file] = of(step)
        elif not crash:
            assert not new, f"step {step}: {calls} left {new}"
        for name in new:
            if name.endswith(".hgc"):
                assert read_file(f"{url}/{name}").checkpoint == of(step)
        if len(calls) <= step:
            break
    assert step >= 2
    assert {file: read_file(file).checkpoint for file in files} == files


# --- cancellations ------------------------------------------------------------------------------------------------


async def test_a_savepoint_that_is_cancelled_while_it_is_written_does_not_appear(hooked_url: str) -> None:  # H162
    """Before each of its requests to the store."""
    file = MemoryStorage().store_savepoint(hooked_url, "words", of("a"))
    for step in itertools.count():
        calls = await cancelled_at(step, hooked_url)
        if len(calls) <= step:
            break
        names = {f"{hooked_url}/{name}" for name in contents(hooked_url)}
        if calls[step] != "rm_file":  # the deletion of its temporary file comes after it has appeared
            assert names == {file}, f"step {step}: {calls}"
        assert not [name for name in names if name.endswith(".tmp")], f"step {step}: {calls}"
    assert step >= 2
    assert read_file(file).checkpoint == of("a")


async def cancelled_at(step: int, url: str) -> list[str]:
    """Cancel a savepoint while it waits at this call; return its calls, once it has ended in its thread too."""
    storage, scope, given_up, calls = Watched(), anyio.CancelScope(), threading.Event(), list[str]()
    loop = anyio.lowlevel.current_token()

    def hook(call: str, path: str) -> None:
        calls.append(call)
        if len(calls) - 1 == step:
            anyio.from_thread.run_sync(scope.cancel, token=loop)
            assert given_up.wait(TIMEOUT_S)

    async with StorageSession(storage) as session:
        port = session.port("words", RestoreMode.STREAMING)
        with hooked(hook), scope:
            try:
                await port.store_savepoint(url, a_checkpoint(1))
            finally:
                given_up.set()
                await storage.idle()
    return calls


class Watched(MemoryStorage):
    """Knows when no thread writes a savepoint any more, even for a call that was cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self._busy = threading.Condition()
        self._writing = 0

    def store_savepoint(self, *arguments: Any, **options: Any) -> str:
        with self._busy:
            self._writing += 1
        try:
            return super().store_savepoint(*arguments, **options)
        finally:
            with self._busy:
                self._writing -= 1
                self._busy.notify_all()

    async def idle(self) -> None:
        def wait() -> bool:
            with self._busy:
                return self._busy.wait_for(lambda: not self._writing, TIMEOUT_S)

        with anyio.CancelScope(shield=True):
            assert await anyio.to_thread.run_sync(wait)


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 13))])
async def test_a_directory_holds_the_savepoints_that_succeeded_and_no_others(
    seed: int, stepped_url: str
) -> None:  # H162
    """Several applications at a time take savepoints that succeed, fail or are cancelled."""
    print(f"seed {seed}")
    dice, url = random.Random(seed), stepped_url
    storages = [Watched() for _ in range(4)]
    successes: dict[str, CompletedCheckpoint] = {}
    cancelled: list[CompletedCheckpoint] = []
    unkind = random.Random(seed + 1000)

    def hook(call: str, path: str) -> None:
        if call != "rm_file" and unkind.random() < 0.1:
            raise ConnectionError("the answer was lost")

    async def take(port: Any, checkpoint: CompletedCheckpoint, turns: int) -> None:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def cancel_after_turns() -> None:
                    for _ in range(turns):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()

                if turns:
                    tasks.start_soon(cancel_after_turns)
                try:
                    successes[await port.store_savepoint(url, checkpoint)] = checkpoint
                except StorageError:
                    pass
                except anyio.get_cancelled_exc_class():
                    cancelled.append(checkpoint)
                    raise
                tasks.cancel_scope.cancel()

    async def application(number: int, storage: Watched, plan: list[int]) -> None:
        async with StorageSession(storage) as session:
            port = session.port("words", RestoreMode.STREAMING)
            for turn, turns in enumerate(plan):
                await take(port, a_checkpoint(port.next_checkpoint_id(), state=f"{number} {turn}".encode()), turns)

    with hooked(hook):
        async with anyio.create_task_group() as tasks:
            for number, storage in enumerate(storages):
                plan = [dice.choice([0, 0, dice.randint(1, 60)]) for _ in range(15)]
                tasks.start_soon(application, number, storage, plan)
        for storage in storages:
            await storage.idle()
    found = {f"{url}/{name}": read_file(f"{url}/{name}").checkpoint for name in contents(url)}
    late = {file: checkpoint for file, checkpoint in found.items() if file not in successes}
    assert {file: checkpoint for file, checkpoint in found.items() if file in successes} == successes
    assert all(checkpoint in cancelled for checkpoint in late.values()), "what has failed is there"
    assert len(successes) > 10


# --- what users do with them --------------------------------------------------------------------------------------


def test_the_command_lists_the_savepoints_of_a_directory_with_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = with_strangers(tmp_path / "savepoints")
    files = [
        MemoryStorage().store_savepoint(directory, "words", of("a")),
        MemoryStorage().store_savepoint(directory, "words", of("b")),
        MemoryStorage().store_savepoint(directory, "letters", a_checkpoint(7)),
        str(directory / "savepoint-words-1.hgc"),
    ]
    assert main(["checkpoints", str(directory)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["STATE", "FILE"]
    assert sorted(row.split()[-1] for row in rows) == sorted(files)
    assert main(["checkpoints", str(directory), "--operator", "letters"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(files[2])
    Path(files[0]).write_bytes(b"rubbish")
    assert main(["checkpoints", str(directory)]) == 1
    assert f"{files[0]}: " in capsys.readouterr().out


def test_the_command_lists_savepoints_that_lie_in_a_storage_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sidecar's process may write them only there, unless it is told otherwise."""
    storage = CheckpointStorage(tmp_path)
    storage.prepare()
    (checkpoint_id, savepoint_id) = storage.reserve_ids(2)
    stored = storage.store("words", a_checkpoint(checkpoint_id))
    file = storage.store_savepoint(tmp_path, "words", a_checkpoint(savepoint_id))
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["FILE", stored, file]


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_directory_in_place_of_a_file_is_refused_with_how_to_list_its_files(tmp_path: Path, slash: str) -> None:
    MemoryStorage().store_savepoint(tmp_path / "savepoints", "words", of("a"))
    with pytest.raises(StorageError, match=r"it is a directory.*headgate checkpoints"):
        read_file(f"{tmp_path}/savepoints{slash}")


def test_a_savepoint_of_a_former_release_is_restored(tmp_path: Path) -> None:  # H162
    directory = with_strangers(tmp_path / "savepoints")
    stored = read_file(directory / "savepoint-words-1.hgc")
    assert isinstance(stored, StoredCheckpoint)
    assert stored.checkpoint == a_checkpoint(1, state=b"of a former release")


def test_a_failed_savepoint_leaves_an_earlier_one_of_another_application(hooked_url: str) -> None:  # H162
    """The disk fails while the third of three applications writes."""
    files = {MemoryStorage().store_savepoint(hooked_url, "words", of(name)): of(name) for name in "ab"}
    for call in ("pipe_file", "mv", "moved"):
        with failing(call, OSError(28, "No space left on device"), within="savepoint-"), suppress(StorageError):
            file = MemoryStorage().store_savepoint(hooked_url, "words", of("c"))
            files[file] = of("c")  # on Azure nothing is moved
    assert {file: read_file(file).checkpoint for file in files} == files
