# SPDX-License-Identifier: Apache-2.0

"""Exceptions raised by the storage. Each message names the file or directory, the cause and the fix."""

from __future__ import annotations

from spark_bridge.common.errors import SidecarError


class StorageError(SidecarError):
    """The storage cannot do what was asked: no access, no space, no such file, or calls in the wrong order.

    The message names the file and the cause.
    """


class StorageFenced(StorageError):
    """A later application has taken over the storage, or may have, because this one's marker was deleted.

    This application must end without cleaning up. If a checkpoint was being stored at that moment, the later
    application decides whether it counts. Never run two applications on one directory at the same time.
    """


class CheckpointUnreadable(StorageError):
    """A file is damaged, is not a checkpoint, or is not the checkpoint that its name says.

    ``file`` is its path or URL, ``problem`` what is wrong, and ``hint`` what to do. ``too_new`` means that the file is
    intact but was written by a later release, so an older checkpoint must not replace it.
    """

    def __init__(self, file: str, problem: str, hint: str = "", *, too_new: bool = False) -> None:
        super().__init__(file, problem, hint)
        self.file = file
        self.problem = problem
        self.hint = hint
        self.too_new = too_new

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}" + (f"; {self.hint}" if self.hint else "")
