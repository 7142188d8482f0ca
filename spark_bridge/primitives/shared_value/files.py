# SPDX-License-Identifier: Apache-2.0

"""Large values as files of an executor, so that one of its Python workers fetches a value and the others read it.

Spark forks a Python worker for each core. They have a directory in common, the executor's own, which Spark removes at
its end. A file there has the digest of its bytes as its name. Who reads one checks the digest, which came over the
authenticated connection, before anything is decoded; so a file that is torn, altered or forged is fetched again.

The worker that fetches a value holds a lock on ``DIGEST.part``, which the kernel releases if the worker dies. Files
only save work: whatever goes wrong with one, the value is fetched over the connection.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from spark_bridge.common.local_folders import executor_folder
from spark_bridge.primitives.shared_value.encoding import VALUE_BYTES_MAX, digest_of

FOLDER = "headgate-values"
KEPT_FILES = 8
"""The newest files stay."""


class Fetch:
    """This process fetches a value for all. Ends with ``finish`` or ``abandon``; a second end changes nothing."""

    def __init__(self, files: ValueFiles, digest: bytes, descriptor: int) -> None:
        self.digest = digest
        self._files = files
        self._descriptor: int | None = descriptor

    def moved(self) -> None:
        """A part has come. The others see it and go on waiting."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.utime(self._descriptor)

    def finish(self, payload: bytes) -> bool:
        """Show the value, whose digest was checked, to the others; return whether that went well."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return False
        part = self._files.part_of(self.digest)
        try:
            with open(descriptor, "wb") as file:  # closing it releases the lock
                file.truncate(0)
                file.write(payload)
                file.flush()
                part.rename(self._files.file_of(self.digest))
        except OSError:  # the disk is full, or the folder is gone
            with suppress(OSError):  # if another process has begun meanwhile, it keeps the value for itself
                part.unlink()
            return False
        self._files.remove_old()
        return True

    def abandon(self) -> None:
        """Let another process fetch it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                self._files.part_of(self.digest).unlink()
            os.close(descriptor)


class ValueFiles:
    """The files of one executor. For any thread and process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_executor(cls) -> ValueFiles | None:
        """Those of the executor of this process. None outside of one, or if its directory cannot be used."""
        folder = executor_folder(FOLDER)
        return None if folder is None else cls(folder)

    def file_of(self, digest: bytes) -> Path:
        return self._folder / digest.hex()

    def part_of(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}.part"

    def read(self, digest: bytes) -> bytes | None:
        """The value with this digest. None if there is none, or if the file is not what its name says."""
        path = self.file_of(digest)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode) or found.st_size > VALUE_BYTES_MAX:
                    return None
                payload = file.read(VALUE_BYTES_MAX + 1)
        except OSError:
            return None
        if digest_of(payload) == digest:
            return payload
        with suppress(OSError):
            path.unlink()
        return None

    def begin(self, digest: bytes) -> Fetch | None:
        """Become the process that fetches this value. None if another one is, or if no file can be made."""
        path = self.part_of(digest)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == path.stat().st_ino:  # else it was finished in the meantime
                if not self.file_of(digest).exists():
                    return Fetch(self, digest, descriptor)
                path.unlink()
        except OSError:
            pass
        os.close(descriptor)
        return None

    def progress(self, digest: bytes) -> int:
        """A number that changes while the process that fetches this value makes progress."""
        try:
            return self.part_of(digest).stat().st_mtime_ns
        except OSError:
            return 0

    def remove_old(self) -> None:
        """Remove all but the newest files, those of processes that died while they fetched included."""
        with suppress(OSError):
            newest_first = sorted(self._folder.iterdir(), key=_modified_ns, reverse=True)
            for path in newest_first[KEPT_FILES:]:
                with suppress(OSError):
                    path.unlink()


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
