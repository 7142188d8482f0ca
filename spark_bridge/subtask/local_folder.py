# SPDX-License-Identifier: Apache-2.0

"""The private folder of one attempt on the executor's local disk.

It is in the executor's own directory, which Spark removes at its end, or in the system's directory for temporary
files. While its attempt lives, its process holds a lock on the folder, which the kernel releases if the process is
killed. So a later attempt knows what is left of others. It takes what earlier attempts of the same subtask have left,
and removes what is left of other applications. What other subtasks have left is for their next attempts.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from spark_bridge.common.local_folders import executor_folder, private_folder

__all__ = ["LocalFolder"]

FOLDER = "headgate-states"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 8


class LocalFolder:
    """A folder that this process has locked. ``path`` is where it is."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def make(cls, operator_id: str, subtask: int, application: str) -> LocalFolder:
        """Make a new one, and remove what is left of other applications. Raises ``OSError``."""
        base = _base()
        of_application = f"{application}-"
        for path in _found(base):
            if not path.name.startswith(of_application) and (left := cls._locked(path)) is not None:
                left.remove()
        for _ in range(_TRIES):
            path = base / f"{_prefix(operator_id, subtask, application)}{secrets.token_hex(8)}"
            path.mkdir(0o700)
            if (made := cls._locked(path)) is not None:  # otherwise another process took it for one that is left
                return made
        raise OSError(f"folders in {base} cannot be locked: use a local disk")

    @classmethod
    def left_of(cls, operator_id: str, subtask: int, application: str) -> list[LocalFolder]:
        """What earlier attempts of a subtask have left on this host, the newest first."""
        prefix = _prefix(operator_id, subtask, application)
        left = [cls._locked(path) for path in _found(_base()) if path.name.startswith(prefix)]
        return sorted(filter(None, left), key=lambda one: os.fstat(one._descriptor).st_mtime_ns, reverse=True)

    @classmethod
    def _locked(cls, path: Path) -> LocalFolder | None:
        """None if another process has it, or if it is gone."""
        try:
            descriptor = os.open(path, _FLAGS)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                return cls(path, descriptor)
        except OSError:
            pass
        os.close(descriptor)
        return None

    def forget(self) -> None:
        """In a forked process: it is not ours, so do not keep it locked."""
        os.close(self._descriptor)

    def leave(self) -> None:
        """Leave it to the next attempt of the subtask, if Spark removes the directory at its end."""
        if executor_folder(FOLDER) == self.path.parent:
            os.close(self._descriptor)
        else:
            self.remove()

    def remove(self) -> None:
        """Delete it. What cannot be deleted stays for a later attempt."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def _base() -> Path:
    folder = executor_folder(FOLDER)
    if folder is None:
        folder = private_folder(Path(tempfile.gettempdir(), f"{FOLDER}-{os.getuid()}"))
    if folder is None:
        raise PermissionError(
            f"{tempfile.gettempdir()}/{FOLDER}-{os.getuid()} is not a folder of this user's alone, or cannot be made"
        )
    return folder


def _prefix(operator_id: str, subtask: int, application: str) -> str:
    return f"{application}-{sha256(operator_id.encode()).hexdigest()[:16]}-{subtask}-"


def _found(base: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from base.iterdir()
