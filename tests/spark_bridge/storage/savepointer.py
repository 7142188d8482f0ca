# SPDX-License-Identifier: Apache-2.0

"""A separate application that writes savepoints of "words" with id 1, and does not get far.

``python -m tests.spark_bridge.storage.savepointer DIRECTORY kill STEP`` is killed just before it does its operation
number STEP on the disk. With ``fail`` in place of ``kill STEP``, one savepoint after the other fails at its first
operation, its second and so on, until one has no such operation. With ``full``, the disk takes only the first bytes of
a file. For each savepoint that was written it prints "stored FILE", for each that was not "failed ERROR".
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Callable

from spark_bridge.storage import MemoryStorage, StorageError
from tests.spark_bridge.storage.checkpoints import a_checkpoint

ON_DISK = frozenset({"open", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir"})


class Disk:
    """Calls ``act`` just before operation number ``step`` in a directory from now on, the first being 0."""

    def __init__(self, directory: str) -> None:
        self.step = -1
        self._directory = directory
        self.act: Callable[[], None] = lambda: None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in ON_DISK and self.step >= 0 and self._is_there(arguments[0]):
            self.step -= 1
            if self.step < 0:
                self.act()

    def _is_there(self, path: object) -> bool:
        """Whether the storage does it: it opens the directory, and names files relative to that."""
        return not isinstance(path, str) or "/" not in path or path.startswith(self._directory)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def savepoint(directory: str) -> None:
    try:
        print("stored", MemoryStorage().store_savepoint(directory, "words", a_checkpoint(1)), flush=True)
    except StorageError as error:
        print("failed", error, flush=True)


def main(directory: str, how: str, step: str = "0") -> None:
    disk = Disk(directory)
    if how == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
        savepoint(directory)
    elif how == "kill":
        disk.act, disk.step = kill, int(step)
        savepoint(directory)
    else:
        disk.act = fail
        for number in range(100):
            disk.step = number
            savepoint(directory)
            if disk.step >= 0:
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
