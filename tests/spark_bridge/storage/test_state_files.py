# SPDX-License-Identifier: Apache-2.0

"""States in files: what is restored is what was frozen, and nothing else is named, deleted or believed."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from moto.core.authorization import ActionAuthenticatorMixin

from protocol.file_retention import LAST_STATE, origin_of
from protocol.wire.state_handles import FILES_MAX, KeyGroupRange, StateHandle, unpack_handle
from spark_bridge.storage.errors import CheckpointUnreadable, StorageError
from spark_bridge.storage.files import PIECE_BYTES, Files
from spark_bridge.storage.state_files.folder import StateFolder, UploadStopped
from spark_bridge.storage.state_files.manifest import StoredFile, decode_manifest, encode_manifest
from spark_bridge.storage.state_files.restoring import restore
from spark_bridge.storage.state_files.uploading import StateUploader
from spark_bridge.storage.state_files.values import RestoredFiles, StateFiles, check_holds_files
from tests.spark_bridge.object_stores import STORES, ObjectStore

ON_STORES = [pytest.param(name, marks=pytest.mark.long) for name in STORES]
ROOT = Path(__file__).resolve().parents[3]

# Clients of GCS and Azure send parts of a file from a loop that fsspec runs in a thread: there it may be locked.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture(params=["local", "hooked", *ON_STORES])
def files(
    request: pytest.FixtureRequest, tmp_path: Path, object_stores: Callable[[str], ObjectStore]
) -> Iterator[Files]:
    """An empty place on each kind of filesystem. ``hooked`` is the local disk, treated as a remote one."""
    match request.param:
        case "local":
            yield Files(tmp_path / "storage")
        case "hooked":
            yield Files(f"hooked://{tmp_path}/storage")
        case name:
            store = object_stores(name)
            yield Files(f"{store.protocol}://{store.new_bucket()}/storage", store.options)


@pytest.fixture
def folder(files: Files) -> StateFolder:
    return StateFolder.of_operator(files, "words")


def an_uploader(folder: StateFolder, tmp_path: Path, name: str = "private", subtask: int = 0) -> StateUploader:
    return StateUploader(folder, tmp_path / name, epoch=1, token="ab", subtask=subtask, task_attempt_id=7)


def a_state(tmp_path: Path, **contents: bytes) -> Path:
    state = tmp_path / "state"
    state.mkdir(exist_ok=True)
    for name, content in contents.items():
        (state / name.replace("_", ".")).write_bytes(content)
    return state


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def store(uploader: StateUploader, state: Path, checkpoint_id: int, **settings: Any) -> StateHandle:
    return uploader.upload(uploader.freeze(StateFiles(state, **settings), checkpoint_id))


# --- random histories -----------------------------------------------------------------------------------------------


class Store:
    """A user's store: it changes files in every way, but never one that is declared immutable in place."""

    def __init__(self, r: random.Random, folder: Path) -> None:
        self.r = r
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def change(self) -> None:
        for _ in range(self.r.randrange(6)):
            present = sorted(one for one in self.folder.rglob("*") if one.is_file())
            act = self.r.choice([self.add, self.add, self.replace, self.in_place, self.delete, self.rename, self.link])
            if present or act == self.add:
                act(self.r.choice(present) if present else self.folder)

    def _new(self, suffix: str) -> Path:
        above = self.folder / self.r.choice(["", "", "sub", "sub/deeper", "ümlaut und Leerzeichen"])
        above.mkdir(parents=True, exist_ok=True)
        return above / f"{self.r.randrange(12)}{suffix}"

    def _content(self) -> bytes:
        return self.r.randbytes(self.r.choice([0, 1, 10, 10, 1_000, 40_000]))

    def add(self, _: Path) -> None:
        path = self._new(self.r.choice([".sst", ".sst", ".log", ""]))
        path.unlink(missing_ok=True)
        path.write_bytes(self._content())

    def replace(self, path: Path) -> None:
        """Another file under the name of an old one, with its size and time, and often with its inode too."""
        status = path.stat()
        path.unlink()
        path.write_bytes(self.r.randbytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def in_place(self, path: Path) -> None:
        """Another content with the same size and time, or more of it."""
        if path.suffix == ".sst":
            return
        status = path.stat()
        with path.open("r+b") as file:
            file.write(self.r.randbytes(status.st_size))
            if self.r.random() < 0.3:
                file.write(b"more")
        if self.r.random() < 0.7:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def delete(self, path: Path) -> None:
        path.unlink()

    def rename(self, path: Path) -> None:
        path.replace(self._new(path.suffix))

    def link(self, path: Path) -> None:
        other = self._new(path.suffix)
        if not other.exists():
            os.link(path, other)


@dataclass
class History:
    """A task that stores states, is stopped, and fails over; and a driver that deletes what nothing needs."""

    seed: int
    files: Files
    tmp_path: Path
    stored: dict[int, tuple[StateHandle, dict[str, bytes]]] = field(default_factory=dict)
    last: int = 0
    attempts: int = 0
    reused: int = 0

    def run(self, steps: int) -> None:
        self.r = random.Random(self.seed)
        self.folder = StateFolder.of_operator(self.files, "words")
        self.begin(None)
        for checkpoint_id in range(1, steps + 1):
            self.store.change()
            self.checkpoint(checkpoint_id)
            if self.r.random() < 0.2:
                self.savepoint(checkpoint_id)
            if self.r.random() < 0.2:
                self.begin(self.last)
            self.verify()

    def begin(self, restored: int | None) -> None:
        """A new attempt, from the last complete checkpoint."""
        before = self.tmp_path / f"state-{self.attempts}"
        self.attempts += 1
        state = self.tmp_path / f"state-{self.attempts}"
        private = f"private-{self.attempts}"
        self.uploader = an_uploader(self.folder, self.tmp_path, private, subtask=self.attempts)
        if restored:
            handle, content = self.stored[restored]
            found = restore(self.folder, handle, state, local=self.r.choice([None, before]))
            assert content_of(state) == content, f"seed {self.seed}"
            self.uploader.restored(found)
        self.store = Store(self.r, state)

    def checkpoint(self, checkpoint_id: int) -> None:
        immutable = ("*.sst",) if self.r.random() < 0.8 else ()
        content = content_of(self.store.folder)
        owned = self.r.random() < 0.3
        frozen = self.store.folder
        if owned:  # the store writes its own checkpoint, as RocksDB does
            frozen = self.tmp_path / f"own-{checkpoint_id}"
            shutil.copytree(
                self.store.folder,
                frozen,
                copy_function=lambda a, b: os.link(a, b) if a.endswith("t") else shutil.copy2(a, b),
            )
        snapshot = self.uploader.freeze(StateFiles(frozen, immutable=immutable), checkpoint_id, owned=owned)
        self.store.change()  # the store goes on while the upload runs
        before = self.uploader.uploaded_bytes
        pieces = self.r.randrange(12) if self.r.random() < 0.3 else 10**9
        asked = iter(range(10**9))
        try:
            handle = self.uploader.upload(snapshot, stopped=lambda: next(asked) >= pieces)
        except UploadStopped:
            self.uploader.aborted(checkpoint_id)
            return
        assert not snapshot.folder.exists()
        self.reused += handle.total_bytes + handle.size - (self.uploader.uploaded_bytes - before)
        if self.r.random() < 0.2:
            self.uploader.aborted(checkpoint_id)
            return
        self.stored[checkpoint_id] = handle, content
        self.last = checkpoint_id
        self.uploader.completed(checkpoint_id)
        for old in sorted(self.stored)[:-2]:
            del self.stored[old]
        named = {name for handle, _ in self.stored.values() for name in self.folder.names_of(handle)}
        self.folder.delete(name for name in self.folder.orphans(named) if _id_of(name) < checkpoint_id)

    def savepoint(self, checkpoint_id: int) -> None:
        target = StateFolder.of_savepoint(self.files, f"savepoint-{self.seed}-{checkpoint_id}.hgc")
        if self.r.random() < 0.5 and self.last:
            handle, content = self.stored[self.last]
            self.folder.copy(handle, target)
        else:
            content = content_of(self.store.folder)
            snapshot = self.uploader.freeze(StateFiles(self.store.folder), checkpoint_id)
            handle = self.uploader.upload(snapshot, target)
        assert self.restored(target, handle) == content, f"seed {self.seed}"  # H193
        assert set(target.names()) == target.names_of(handle)

    def verify(self) -> None:
        for handle, content in self.stored.values():
            assert self.restored(self.folder, handle) == content, f"seed {self.seed}"

    def restored(self, folder: StateFolder, handle: StateHandle) -> dict[str, bytes]:
        into = self.tmp_path / "restored"
        restore(folder, handle, into)
        content = content_of(into)
        shutil.rmtree(into)
        return content


def _id_of(name: str) -> int:
    origin = origin_of(name)
    assert origin is not None
    return origin.checkpoint_id


@pytest.mark.parametrize("seed", range(3))
def test_each_restore_of_a_random_history_is_what_was_frozen(files: Files, tmp_path: Path, seed: int) -> None:
    # H190, H191, H193
    print("seed", seed)
    for number in range(3 if str(tmp_path) in files.url else 1):
        history = History(seed * 100 + number, files, tmp_path / str(number))
        (tmp_path / str(number)).mkdir()
        history.run(12)
        StateFolder.of_operator(files, "words").delete(StateFolder.of_operator(files, "words").names())
        assert history.reused > 0, "a history that never reuses anything shows nothing"


# --- what is uploaded -----------------------------------------------------------------------------------------------


def test_only_what_changed_is_uploaded(folder: StateFolder, tmp_path: Path) -> None:
    state = a_state(tmp_path, a_sst=b"a" * 50_000, b_sst=b"b" * 50_000, log=b"log" * 1_000)
    uploader = an_uploader(folder, tmp_path)
    store(uploader, state, 1)
    uploader.completed(1)
    before = uploader.uploaded_bytes
    (state / "a.sst").rename(state / "renamed.sst")
    (state / "log").write_bytes(b"log" * 1_000)  # the same content again
    (state / "c.sst").write_bytes(b"c" * 500)
    handle = store(uploader, state, 2)
    assert uploader.uploaded_bytes - before == 500 + handle.size
    assert (handle.files, handle.total_bytes) == (4, 103_500)


def test_an_immutable_file_that_was_uploaded_is_not_read_again(folder: StateFolder, tmp_path: Path) -> None:
    state = a_state(tmp_path, a_sst=b"a" * 50_000)
    uploader = an_uploader(folder, tmp_path)
    store(uploader, state, 1)
    uploader.completed(1)
    snapshot = uploader.freeze(StateFiles(state), 2)
    os.truncate(snapshot.files[0].place, 3)  # as nobody may, and nobody looks
    handle = uploader.upload(snapshot)
    assert [file.size for file in folder.read_manifest(handle)] == [50_000]
    folder.verify(handle)


def upload_in_part(uploader: StateUploader, state: Path, *, pieces: int) -> None:
    """Stop the upload for checkpoint 1 after so many pieces."""
    done: list[int] = []
    with pytest.raises(UploadStopped):
        uploader.upload(
            uploader.freeze(StateFiles(state), 1),
            progress=lambda one, total: done.append(one),
            stopped=lambda: len(done) >= pieces,
        )


def test_what_a_stopped_upload_has_stored_is_named_by_the_next_one(folder: StateFolder, tmp_path: Path) -> None:
    state = a_state(tmp_path, a_sst=b"a" * 50_000, b_sst=b"b" * 70_000)
    uploader = an_uploader(folder, tmp_path)
    upload_in_part(uploader, state, pieces=1)
    uploader.aborted(1)
    assert (uploader.uploaded_bytes, len(folder.names())) == (50_000, 1)
    handle = store(uploader, state, 2)
    assert uploader.uploaded_bytes == 120_000 + handle.size
    folder.verify(handle)


def test_what_the_state_at_a_completed_checkpoint_does_not_have_is_uploaded_again(
    folder: StateFolder, tmp_path: Path
) -> None:  # H190
    state = a_state(tmp_path, a_sst=b"a" * 50_000)
    uploader = an_uploader(folder, tmp_path)
    store(uploader, state, 1)
    (state / "a.sst").rename(tmp_path / "away.sst")
    kept = store(uploader, state, 2)
    uploader.completed(2)
    folder.delete(folder.orphans(folder.names_of(kept)))
    (tmp_path / "away.sst").rename(state / "a.sst")
    folder.verify(store(uploader, state, 3))
    assert len(list((tmp_path / "private" / "known").iterdir())) == 1


def test_a_restored_state_is_not_uploaded_again(folder: StateFolder, tmp_path: Path) -> None:
    state = a_state(tmp_path, a_sst=b"a" * 50_000, log=b"log")
    handle = store(an_uploader(folder, tmp_path), state, 1)
    found = restore(folder, handle, tmp_path / "next", data=b"more", local=state)
    assert found.files == RestoredFiles(tmp_path / "next", b"more", None)
    assert found.local_bytes == 50_003
    second = an_uploader(folder, tmp_path, "second", subtask=1)
    second.restored(found)
    again = store(second, tmp_path / "next", 2)
    assert second.uploaded_bytes == again.size
    assert folder.names_of(again) - {again.manifest} == folder.names_of(handle) - {handle.manifest}


def test_a_savepoint_gets_all_files_and_none_of_them_is_named_again(
    files: Files, folder: StateFolder, tmp_path: Path
) -> None:  # H193
    state = a_state(tmp_path, a_sst=b"a" * 50_000)
    uploader = an_uploader(folder, tmp_path)
    store(uploader, state, 1)
    savepoint = StateFolder.of_savepoint(files, "savepoint-words-2-ab.hgc")
    (state / "b.sst").write_bytes(b"b" * 20_000)
    handle = uploader.upload(uploader.freeze(StateFiles(state), 2), savepoint)
    assert set(savepoint.names()) == savepoint.names_of(handle)
    assert len(folder.names()) == 2
    folder.verify(store(uploader, state, 3))


def test_progress_counts_all_bytes_of_the_state(folder: StateFolder, tmp_path: Path) -> None:
    state = a_state(tmp_path, a_sst=b"a" * (2 * PIECE_BYTES + 1), b_sst=b"b")
    uploader = an_uploader(folder, tmp_path)
    told: list[tuple[int, int]] = []
    uploader.upload(uploader.freeze(StateFiles(state), 1), progress=lambda done, total: told.append((done, total)))
    total = 2 * PIECE_BYTES + 2
    assert told == [(PIECE_BYTES, total), (2 * PIECE_BYTES, total), (total - 1, total), (total, total)]
    told.clear()
    handle = uploader.upload(
        uploader.freeze(StateFiles(state), LAST_STATE), progress=lambda done, total: told.append((done, total))
    )
    assert told == [(total - 1, total), (total, total)]
    into = restore(folder, handle, tmp_path / "into", progress=lambda done, total: told.append((done, total)))
    assert told[2:] == told[:2]
    assert into.local_bytes == 0


def test_large_files_are_written_in_parts(folder: StateFolder, tmp_path: Path) -> None:
    content = random.Random(1).randbytes(17_500_000)
    state = a_state(tmp_path, a_sst=content)
    handle = store(an_uploader(folder, tmp_path), state, 1)
    restore(folder, handle, tmp_path / "into")
    assert content_of(tmp_path / "into") == {"a.sst": content}


def test_a_stopped_upload_of_a_large_file_leaves_nothing(
    files: Files, folder: StateFolder, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    state = a_state(tmp_path, a_sst=bytes(17_500_000))
    uploader = an_uploader(folder, tmp_path)
    upload_in_part(uploader, state, pieces=12)
    gc.collect()
    assert folder.names() == ()
    if "s3" in request.node.callspec.id:
        filesystem = files._filesystem
        bucket = files.url.split("/")[2]
        assert filesystem.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", []) == []


class PartsFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file of an object store: it appears when it is closed, also by the garbage collector."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        if final:
            PartsFileSystem.objects[self.path] = b"".join(self.parts)
        return True


class PartsFileSystem(AbstractFileSystem):  # type: ignore[misc]
    protocol: Any = "parts"
    objects: ClassVar[dict[str, bytes]] = {}
    cut = 0

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> PartsFile:
        return PartsFile(self, path, mode, block_size, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.objects[path]) - self.cut, "type": "file"}

    def rm_file(self, path: str) -> None:
        self.objects.pop(path, None)


def test_a_writer_that_is_given_up_never_completes_its_object() -> None:
    fsspec.register_implementation("parts", PartsFileSystem, clobber=True)
    files = Files("parts://bucket")

    def failing() -> Iterator[bytes]:
        yield bytes(9_000_000)
        raise UploadStopped("over")

    kept: list[str] = []
    remove = PartsFileSystem.rm_file
    try:
        PartsFileSystem.rm_file = lambda self, path: kept.append(path)  # type: ignore[method-assign]
        with pytest.raises(UploadStopped):
            files.write_pieces("a/b", failing(), 20_000_000)
    finally:
        PartsFileSystem.rm_file = remove  # type: ignore[method-assign]
    gc.collect()
    assert PartsFileSystem.objects == {}
    files.write_pieces("a/b", [bytes(9_000_000)], 9_000_000)
    assert [len(one) for one in PartsFileSystem.objects.values()] == [9_000_000]
    PartsFileSystem.objects.clear()


def test_a_store_that_keeps_less_than_was_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("parts", PartsFileSystem, clobber=True)
    monkeypatch.setattr(PartsFileSystem, "cut", 1)
    with pytest.raises(StorageError, match="9000000 bytes were written, but the file has 8999999"):
        Files("parts://bucket").write_pieces("a/b", [bytes(9_000_000)], 9_000_000)
    assert PartsFileSystem.objects == {}


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "folder link", "pipe"])
def test_a_state_consists_of_regular_files(tmp_path: Path, kind: str) -> None:
    state = a_state(tmp_path, a_sst=b"a")
    match kind:
        case "link":
            (state / "odd").symlink_to("/etc/passwd")
        case "folder link":
            (state / "odd").symlink_to("/etc")
        case _:
            os.mkfifo(state / "odd")
    uploader = an_uploader(StateFolder(Files(tmp_path / "storage"), "x"), tmp_path)
    with pytest.raises(StorageError, match=r"odd' is .*, and a state consists of regular files: remove it"):
        uploader.freeze(StateFiles(state), 1)
    assert [one.name for one in (tmp_path / "private").iterdir()] == ["known"]


@pytest.mark.parametrize("change", ["content", "size"])
def test_an_immutable_file_that_is_changed_during_its_upload_is_refused(tmp_path: Path, change: str) -> None:
    folder = StateFolder(Files(tmp_path / "storage"), "x")
    state = a_state(tmp_path, a_sst=b"a" * 1_000)
    uploader = an_uploader(folder, tmp_path)
    snapshot = uploader.freeze(StateFiles(state), 1)
    with (state / "a.sst").open("r+b" if change == "content" else "ab") as file:
        file.write(b"b")
    with pytest.raises(StorageError, match=r"changed after it was frozen.*leave it out of StateFiles\(immutable"):
        uploader.upload(snapshot)
    assert folder.names() == ()


def test_a_folder_on_another_filesystem_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    uploader = an_uploader(StateFolder(Files(tmp_path / "storage"), "x"), tmp_path)
    with pytest.raises(StorageError, match=r"on another filesystem.*keep the state in context\.state_folder"):
        uploader.freeze(StateFiles(a_state(tmp_path, a_sst=b"a")), 1)


def test_a_filesystem_without_hard_links_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    folder = StateFolder(Files(tmp_path / "storage"), "x")
    uploader = an_uploader(folder, tmp_path)
    state = a_state(tmp_path, a_sst=b"a" * 1_000)
    folder.verify(store(uploader, state, 1))
    uploader.completed(1)
    before = uploader.uploaded_bytes
    assert store(uploader, state, 2).size == uploader.uploaded_bytes - before


def damage(file: Path, kind: str) -> None:
    content = file.read_bytes()
    file.unlink()
    match kind:
        case "flipped":
            place = len(content) // 2
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        case "cut":
            file.write_bytes(content[:-1])
        case "longer":
            file.write_bytes(content + b"x")
        case "empty":
            file.write_bytes(b"")
        case "link":
            (file.parent / "elsewhere").write_bytes(content)
            file.symlink_to(file.parent / "elsewhere")


@pytest.mark.parametrize("which", ["manifest", "file"])
@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        *(("", kind) for kind in ("flipped", "cut", "longer", "empty", "missing", "link")),
        *(("hooked://", kind) for kind in ("flipped", "cut", "longer", "empty", "missing")),
    ],
)
def test_damage_is_refused_and_leaves_no_folder(tmp_path: Path, which: str, kind: str, scheme: str) -> None:  # H191
    folder = StateFolder(Files(f"{scheme}{tmp_path}/storage"), "x")
    handle = store(an_uploader(folder, tmp_path), a_state(tmp_path, a_sst=b"a" * 3_000_000, b_sst=b"b"), 1)
    name = handle.manifest if which == "manifest" else folder.read_manifest(handle)[0].name
    damage(tmp_path / "storage" / "x" / name, kind)
    with pytest.raises(CheckpointUnreadable) as raised:
        restore(folder, handle, tmp_path / "into")
    assert name in raised.value.file
    assert "restore an older one" in raised.value.hint
    assert not (tmp_path / "into").exists()
    with pytest.raises(CheckpointUnreadable):
        folder.copy(handle, StateFolder(Files(f"{scheme}{tmp_path}/storage"), "y"))
    with pytest.raises(CheckpointUnreadable):
        folder.verify(handle)


def test_damage_of_the_local_folder_is_downloaded_instead(folder: StateFolder, tmp_path: Path) -> None:
    state = a_state(tmp_path, a_sst=b"a" * 3_000, b_sst=b"b", c_sst=b"c", d_sst=b"d")
    content = content_of(state)
    handle = store(an_uploader(folder, tmp_path), state, 1)
    damage(state / "a.sst", "flipped")
    damage(state / "b.sst", "longer")
    damage(state / "c.sst", "missing")
    found = restore(folder, handle, tmp_path / "into", local=state)
    assert content_of(tmp_path / "into") == content
    assert found.local_bytes == 1


def a_manifest(*entries: list[Any], **changes: Any) -> tuple[bytes, StateHandle]:
    """A manifest that its handle vouches for, whatever is in it."""
    listed = [
        [path, size, digest.hex() if isinstance(digest, bytes) else digest, name]
        for path, size, digest, name in entries
    ]
    total = sum(entry[1] for entry in entries if isinstance(entry[1], int))
    fields = {"files": listed, "headgate": "state files", "key_groups": None, "total": total, "version": 1} | changes
    data = json.dumps(fields, separators=(",", ":")).encode()
    return data, StateHandle("1-1-ab/0-7-ab-m1", len(data), hashlib.sha256(data).digest(), max(total, 0), len(entries))


HI = hashlib.sha256(b"hi").digest()
NAME = "1-1-ab/0-7-ab-1"


@pytest.mark.parametrize(
    "path",
    [
        "../../evil",
        "/etc/evil",
        "a/../../evil",
        "..",
        ".",
        "",
        "a//b",
        "a/",
        "a/./b",
        "nul\0",
        "x" * 256,
        "a/" * 600 + "b",
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(tmp_path: Path, path: str) -> None:  # H191
    refused(tmp_path, *a_manifest([path, 2, HI, NAME]), "has the path")


@pytest.mark.parametrize(
    ("entries", "changes", "problem"),
    [
        ([["a", 2, HI, NAME], ["a", 2, HI, NAME]], {}, "twice"),
        ([["a", 2, HI, NAME], ["a/b", 2, HI, NAME]], {}, "both as a file and as a folder"),
        ([["b", 2, HI, NAME], ["a", 2, HI, NAME]], {}, "not written as Headgate writes it"),
        ([["a", 2, HI, NAME], ["b", 3, HI, NAME]], {}, "two contents under the name"),
        ([["a", 2, HI, "../../evil"]], {}, "under a name that must be a relative path"),
        ([["a", 2, HI, "/etc/passwd"]], {}, "under a name that must be a relative path"),
        ([["a", -2, HI, NAME]], {}, "impossible size"),
        ([["a", 2, HI[:5], NAME]], {}, "impossible size or digest"),
        ([["a", 2, HI.hex().upper(), NAME]], {}, "not written as Headgate writes it"),
        ([["a", True, HI, NAME]], {}, "not a list of files"),
        ([["a", 2.0, HI, NAME]], {}, "not a list of files"),
        ([["a", 10**400, HI, NAME]], {"total": 1}, "as Headgate writes it"),
        ([["a", 2, HI, NAME]], {"total": 3}, "not written as Headgate writes it"),
        ([["a", 2, HI, NAME]], {"version": 2}, "not written as Headgate writes it"),
        ([["a", 2, HI, NAME]], {"more": 2}, "not written as Headgate writes it"),
        ([["a", 2, HI, NAME]], {"key_groups": [0, 5, 8]}, "other key groups"),
        ([["a", 2, HI, NAME]], {"files": 5}, "not a list of files"),
        ([["a", 2, HI, NAME]], {"files": [5]}, "not a list of files"),
    ],
)
def test_a_manifest_that_cannot_be_ours_is_refused(
    tmp_path: Path, entries: list[list[Any]], changes: dict[str, Any], problem: str
) -> None:
    data, handle = a_manifest(*entries, **changes)
    refused(tmp_path, data, handle._replace(total_bytes=min(handle.total_bytes, 5)), problem)


@pytest.mark.parametrize(
    "changes", [{"files": 2**32 - 1}, {"total_bytes": 2**62}, {"key_groups": KeyGroupRange(0, 1, 8)}]
)
def test_a_handle_that_says_something_else_than_its_manifest_is_refused(tmp_path: Path, changes: Any) -> None:
    data, handle = a_manifest(["a", 2, HI, NAME])
    refused(tmp_path, data, handle._replace(**changes), "than its handle")


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"null", b"\xff", b'{"files":[]}', b"9" * 10_000])
def test_what_is_not_json_of_ours_is_refused(tmp_path: Path, data: bytes) -> None:
    if data:
        handle = StateHandle("1-1-ab/0-7-ab-m1", len(data), hashlib.sha256(data).digest(), 0, 0)
        refused(tmp_path, data, handle, "the manifest (is|must)")


def test_huge_counts_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    data, handle = a_manifest(["a", 2, HI, NAME])
    refused(tmp_path, data, handle._replace(size=2**30), "a handle says that it has 1073741824 bytes")
    one = StoredFile("a", 0, HI, NAME)
    with pytest.raises(ValueError, match=f"must have at most {FILES_MAX} files"):
        encode_manifest([one] * (FILES_MAX + 1), None)


def refused(tmp_path: Path, data: bytes, handle: StateHandle, problem: str) -> None:
    files = Files(tmp_path / "storage")
    for name, content in ((NAME, b"hi"), (handle.manifest, data)):
        files.write_pieces(f"x/{name}", [content], len(content))
    (tmp_path / "inner").mkdir()
    with pytest.raises(CheckpointUnreadable, match=problem):
        restore(StateFolder(files, "x"), handle, tmp_path / "inner" / "into")
    assert sorted(one.name for one in tmp_path.rglob("*evil*")) == []
    assert list((tmp_path / "inner").iterdir()) == []


def test_a_manifest_with_the_same_bytes_is_read_back() -> None:
    files = [StoredFile("ü/b", 2, HI, NAME), StoredFile("a\udcff", 2, HI, NAME)]
    data = encode_manifest(files, KeyGroupRange(3, 9, 16))
    handle = StateHandle("m", len(data), hashlib.sha256(data).digest(), 4, 2, KeyGroupRange(3, 9, 16))
    assert list(decode_manifest(data, handle)) == sorted(files)


def test_a_folder_with_something_in_it_is_not_restored_into(tmp_path: Path) -> None:
    folder = StateFolder(Files(tmp_path / "storage"), "x")
    state = a_state(tmp_path, a_sst=b"a")
    handle = store(an_uploader(folder, tmp_path), state, 1)
    with pytest.raises(StorageError, match="there is something in it"):
        restore(folder, handle, state)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="it is a link"):
        restore(folder, handle, tmp_path / "link")
    assert content_of(state) == {"a.sst": b"a"}


def test_a_disk_error_is_explained_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StateFolder(Files(tmp_path / "storage"), "x")
    handle = store(an_uploader(folder, tmp_path), a_state(tmp_path, a_sst=b"a"), 1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spark_bridge.storage.state_files.restoring._write", full)
    with pytest.raises(StorageError, match=r"cannot restore a state into .*No space left on device"):
        restore(folder, handle, tmp_path / "into")
    assert not (tmp_path / "into").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"folder": 5}, "folder must be"),
        ({"folder": "/no/such/folder"}, "folder must be a folder that exists, is '/no/such/folder'"),
        ({"folder": "/", "data": "text"}, "data must be"),
        ({"folder": "/", "immutable": "*.sst"}, "immutable must be"),
        ({"folder": "/", "immutable": ("",)}, "immutable"),
        ({"folder": "/", "key_groups": (5, 8)}, "key_groups must be"),
        ({"folder": "/", "immutible": ()}, "Did you mean immutable"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], problem: str) -> None:  # H165
    with pytest.raises((TypeError, ValueError), match=problem):
        StateFiles(**arguments)


@pytest.mark.parametrize("url", [None, "memory://checkpoints", "simplecache::memory://checkpoints"])
def test_a_storage_that_executors_cannot_write_is_refused(url: str | None) -> None:
    with pytest.raises(StorageError, match=r"needs a storage that all executors can write, .*: set SidecarConfig"):
        check_holds_files(url)


def test_other_storages_can_have_states_in_files() -> None:
    for url in ("/mnt/shared", "s3://bucket/memory", "file:///mnt/memory:"):
        check_holds_files(url)


# --- the driver -----------------------------------------------------------------------------------------------------


def test_the_driver_lists_copies_and_deletes(files: Files, folder: StateFolder, tmp_path: Path) -> None:
    state = a_state(tmp_path, a_sst=b"a" * 10_000, b_sst=b"b")
    uploader = an_uploader(folder, tmp_path)
    assert folder.names() == ()
    first = store(uploader, state, 1)
    (state / "a.sst").unlink()
    second = store(uploader, state, 2)
    named = folder.names_of(second)
    assert named >= {second.manifest}
    orphans = folder.orphans(named)
    assert set(orphans) == folder.names_of(first) - named
    savepoint = StateFolder.of_savepoint(files, "savepoint-words-2-ab.hgc")
    folder.copy(first, savepoint)
    folder.copy(second, savepoint)  # it has one file already
    folder.delete(orphans)
    folder.delete(orphans)
    assert set(folder.names()) == named
    folder.verify(second)
    folder.delete(folder.names())
    assert folder.names() == ()
    savepoint.verify(first)
    savepoint.verify(second)


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "1-1-ab/../../evil", "other", "1-1-ab", ""])
def test_only_files_of_states_are_deleted(tmp_path: Path, name: str) -> None:
    folder = StateFolder(Files(tmp_path / "storage"), "x")
    store(an_uploader(folder, tmp_path), a_state(tmp_path, a_sst=b"a"), 1)
    before = folder.names()
    with pytest.raises(ValueError, match="is not the name of a file of a state"):
        folder.delete([*before, name])
    assert folder.names() == before


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = StateFolder(Files(tmp_path / "storage"), "x")
    handle = store(an_uploader(folder, tmp_path), a_state(tmp_path, a_sst=b"a"), 1)
    (tmp_path / "storage/x/notes.txt").write_text("mine")
    (tmp_path / "storage/x/1-1-ab/notes.txt").write_text("mine")
    assert set(folder.names()) == folder.names_of(handle)
    folder.delete(folder.names())
    assert (tmp_path / "storage/x/1-1-ab/notes.txt").exists()


def test_files_that_cannot_be_deleted_do_not_keep_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tmp_path / "storage")
    folder = StateFolder(files, "x")
    store(an_uploader(folder, tmp_path), a_state(tmp_path, a_sst=b"a", b_sst=b"b"), 1)
    first, *others = folder.names()
    remove = Files.remove

    def failing(self: Files, path: str) -> None:
        if path.endswith(first):
            raise StorageError("no access")
        remove(self, path)

    monkeypatch.setattr(Files, "remove", failing)
    with pytest.raises(StorageError, match=r"1 of 3 files of states could not be deleted.*no access"):
        folder.delete([first, *others])
    assert folder.names() == (first,)


# --- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_during_an_upload_leaves_nothing_that_a_handle_names(tmp_path: Path, seed: int) -> None:  # H190, H191
    print("seed", seed)
    r = random.Random(seed)
    handles: list[StateHandle] = []
    folder = StateFolder.of_operator(Files(tmp_path / "storage"), "words")
    for attempt in range(3):
        command = [sys.executable, "-m", "tests.spark_bridge.storage.state_uploader"]
        place = [str(tmp_path / "storage"), str(tmp_path / f"task-{attempt}"), str(seed * 10 + attempt)]
        with subprocess.Popen([*command, *place], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(r.randrange(1, 60))]
            process.kill()
            lines += process.stdout.readlines()
        handles += [unpack_handle(bytes.fromhex(line.split()[1])) for line in lines if line.startswith("stored")]
    named = {name for handle in handles for name in folder.names_of(handle)}
    orphans = folder.orphans(named)
    print("stored", len(handles), "left without a handle", len(orphans))
    folder.delete(orphans)
    present = [one for one in (tmp_path / "storage").rglob("*") if one.is_file()]
    assert len(present) == len(named)  # nothing else is left, under whatever name
    for handle in handles:
        folder.verify(handle)


# --- executors ------------------------------------------------------------------------------------------------------


def test_a_task_needs_only_what_is_shipped() -> None:
    program = """
import sys
for name in ("anyio", "structlog", "actors", "pyspark"):
    sys.modules[name] = None
import spark_bridge.storage.state_files.uploading, spark_bridge.storage.state_files.restoring
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


# --- credentials ----------------------------------------------------------------------------------------------------


def test_a_probe_is_written_read_and_swept(folder: StateFolder) -> None:  # H190
    name = "1-1-ab/0-7-cd-probe"
    folder.probe(name)
    assert folder.names() == folder.orphans(()) == (name,)
    folder.delete([name])
    assert folder.names() == ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in ("s3", "azure")])
def test_wrong_credentials_are_an_error_that_says_what_was_refused(
    name: str, object_stores: Callable[[str], ObjectStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H190: for a task at its start, and for the driver whenever it reads, lists or deletes."""
    store_ = object_stores(name)
    url = f"{store_.protocol}://{store_.new_bucket()}/storage"
    handle = store(
        an_uploader(StateFolder.of_operator(Files(url, store_.options), "words"), tmp_path),
        a_state(tmp_path, a_sst=b"a"),
        1,
    )
    if name == "s3":
        options = {**store_.options, "key": "AKIAWRONG", "secret": "SecretWord"}
        monkeypatch.setattr(
            ActionAuthenticatorMixin, "request_count", math.inf
        )  # from now on, the server looks at keys
    else:
        given = store_.options["connection_string"]
        options = {"connection_string": re.sub("AccountKey=[^;]*", "AccountKey=U2VjcmV0V29yZA==", given)}
    folder = StateFolder.of_operator(Files(url, options), "words")
    refused = r"AccessKey|Access Key|[Ff]orbidden|[Aa]uthoriz|[Aa]uthenticat"
    calls: list[tuple[str, Callable[[], object]]] = [
        ("a task cannot write and read states in files: cannot write", lambda: folder.probe("1-1-ab/0-7-cd-probe")),
        ("cannot read", lambda: folder.read_manifest(handle)),
        ("cannot list", folder.names),
        ("could not be deleted, and will be tried again: cannot delete", lambda: folder.delete([handle.manifest])),
    ]
    for what, call in calls:
        with pytest.raises(StorageError, match=refused) as raised:
            call()
        assert what in str(raised.value)
        assert not isinstance(raised.value, CheckpointUnreadable), "nothing is said to be lost"
        assert "SecretWord" not in str(raised.value)
        assert "U2VjcmV0V29yZA" not in str(raised.value)
