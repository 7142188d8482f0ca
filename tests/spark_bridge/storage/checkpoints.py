# SPDX-License-Identifier: Apache-2.0

"""Checkpoints to store, and filesystems that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.wire.messages import HeldEvent, SubtaskState
from spark_bridge.storage import CheckpointStorage
from spark_bridge.storage.files import Files
from spark_bridge.storage.layout import SUFFIX


def a_checkpoint(checkpoint_id: int, *, state: bytes = b"state") -> CompletedCheckpoint:
    """A small checkpoint with a held event; subtask 1 of 2 took part as empty (H47)."""
    part = SubtaskSnapshot((SubtaskState(0, state),), (HeldEvent(0, b"\xc0"),), (3,))
    return CompletedCheckpoint(checkpoint_id, 2, f"coordinator {checkpoint_id}".encode(), {0: part})


def a_prepared_storage(url: str | Path, **settings: Any) -> CheckpointStorage:
    storage = CheckpointStorage(url, **settings)
    storage.prepare()
    return storage


def a_storage_with(url: str | Path, count: int, **settings: Any) -> tuple[CheckpointStorage, list[int]]:
    """A prepared storage with this many checkpoints of the operator "words", and their ids."""
    storage = a_prepared_storage(url, **settings)
    ids = list(storage.reserve_ids(count))
    for checkpoint_id in ids:
        storage.store("words", a_checkpoint(checkpoint_id))
    return storage, ids


class HookedFileSystem(LocalFileSystem):  # type: ignore[misc]
    """The local filesystem, disguised as one that is not known to be local; ``hook`` is called before each call.

    It gets the name of the call and its path, and may raise; it is called twice for a move, as ``mv`` and ``moved``.
    """

    protocol: Any = "hooked"
    hook: Callable[[str, str], None] = staticmethod(lambda call, path: None)

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        HookedFileSystem.hook("ls", path)
        return super().ls(path, detail=detail, **kwargs)

    def cat_file(self, path: str, **kwargs: Any) -> Any:
        HookedFileSystem.hook("cat_file", path)
        return super().cat_file(path, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> Any:
        HookedFileSystem.hook("pipe_file", path)
        return super().pipe_file(path, value, **kwargs)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> Any:
        HookedFileSystem.hook("mv", path2)
        super().mv(path1, path2, **kwargs)
        HookedFileSystem.hook("moved", path2)

    def rm_file(self, path: str) -> Any:
        HookedFileSystem.hook("rm_file", path)
        return super().rm_file(path)


class HookedWholeFileSystem(HookedFileSystem):
    """The same, disguised as Azure, where files are not moved.

    ``hook`` is called for the write of a checkpoint as for a move, because there the checkpoint gets its name.
    """

    protocol: Any = ("whole", "az")

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> Any:
        _piped(path, lambda: LocalFileSystem.pipe_file(self, path, value, **kwargs))


class HookedStore(AbstractFileSystem):  # type: ignore[misc]
    """An object store with the same hook. A test sets ``inner``, the filesystem that talks to it."""

    protocol: Any = "store"
    inner: Any = None

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        HookedFileSystem.hook("ls", path)
        return self.inner.ls(path, detail=detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        return self.inner.info(path, **kwargs)

    def cat_file(self, path: str, **kwargs: Any) -> Any:
        HookedFileSystem.hook("cat_file", path)
        return self.inner.cat_file(path, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> Any:
        _piped(path, lambda: self.inner.pipe_file(path, value, **kwargs))

    def mv(self, path1: str, path2: str, **kwargs: Any) -> Any:
        HookedFileSystem.hook("mv", path2)
        self.inner.mv(path1, path2, **kwargs)
        HookedFileSystem.hook("moved", path2)

    def rm_file(self, path: str) -> Any:
        HookedFileSystem.hook("rm_file", path)
        return self.inner.rm_file(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.inner.makedirs(path, exist_ok=exist_ok)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.inner.invalidate_cache(path)


class HookedAzure(HookedStore):
    """The same for Azure, where files are not moved."""

    protocol: Any = ("azure", "az")


def _piped(path: str, write: Callable[[], object]) -> None:
    names_it = path.endswith(SUFFIX)
    HookedFileSystem.hook("mv" if names_it else "pipe_file", path)
    write()
    if names_it:
        HookedFileSystem.hook("moved", path)


# --- the files behind a URL, whatever its filesystem is ------------------------------------------------------------


def names_in(url: str, folder: str) -> list[str]:
    return Files(url).names(folder)


def content_of(file: str) -> bytes:
    filesystem, path = url_to_fs(file)
    with hooked(lambda call, path: None):
        return bytes(filesystem.cat_file(path))


def overwrite(file: str, content: bytes) -> None:
    filesystem, path = url_to_fs(file)
    with hooked(lambda call, path: None):
        filesystem.pipe_file(path, content)


def delete_markers(url: str | Path) -> None:
    files = Files(url)
    for name in files.names("_ids"):
        files.remove(f"_ids/{name}")


@contextmanager
def hooked(hook: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``hook`` before each filesystem call."""
    before, HookedFileSystem.hook = HookedFileSystem.hook, staticmethod(hook)
    try:
        yield
    finally:
        HookedFileSystem.hook = staticmethod(before)


def failing(call: str, error: Exception, within: str = "") -> AbstractContextManager[None]:
    """Raise ``error`` at each such call (any, if empty) whose path contains ``within``."""

    def hook(called: str, path: str) -> None:
        if call in ("", called) and within in path:
            raise error

    return hooked(hook)


def interrupted(call: str, act: Callable[[], object], within: str = "") -> AbstractContextManager[None]:
    """Do ``act`` just before the first such call."""
    waiting = [act]

    def hook(called: str, path: str) -> None:
        if call in ("", called) and within in path and waiting:
            waiting.pop()()

    return hooked(hook)
