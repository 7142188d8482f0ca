"""Exceptions raised by the storage. Each message names the file or directory, the cause and the fix."""

from __future__ import annotations

from spark_bridge.errors import SidecarError


class StorageError(SidecarError):
    """The storage cannot do what was asked: no access, no room, no such place, or used in the wrong order."""


class StorageFenced(StorageError):
    """Another application has taken the storage over since; this one must end, and clean nothing up.

    Whether a checkpoint that was being stored at that moment counts is for the later application to find.
    """


class CheckpointUnreadable(StorageError):
    """A file is no whole, unaltered checkpoint, or is not the one that its name says (H50).

    ``too_new``: it is whole, but a later release wrote it, so no older checkpoint may stand in for it.
    """

    def __init__(self, file: str, problem: str, hint: str = "", *, too_new: bool = False) -> None:
        super().__init__(file, problem, hint)
        self.file = file
        self.problem = problem
        self.hint = hint
        self.too_new = too_new

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}" + (f"; {self.hint}" if self.hint else "")
