# SPDX-License-Identifier: Apache-2.0

"""Checkpoints to store, and filesystems that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.wire.messages import HeldEvent, SubtaskState
from spark_bridge.storage import CheckpointStorage


def a_checkpoint(checkpoint_id: int, *, state: bytes = b"state") -> CompletedCheckpoint:
    """A small checkpoint with a held event; subtask 1 of 2 took part as empty (H47)."""
    part = SubtaskSnapshot((SubtaskState(0, state),), (HeldEvent(0, b"\xc0"),), 3)
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

    protocol = "hooked"
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
