# SPDX-License-Identifier: Apache-2.0

"""Freezes the folder of a state: what is uploaded later is what was there at the cut, whatever the store does then.

A file that is declared immutable gets a second name, a hard link, which survives its deletion. Others are copied. A
file is recognized later by its *status*: device, inode, size and time of change. That is only safe while the inode
cannot be given to another file. So each file that is known by its status keeps a link (``uploading``).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from protocol.describing import show
from protocol.wire.state_handles import KeyGroupRange
from spark_bridge.storage.errors import StorageError
from spark_bridge.storage.state_files.values import StateFiles

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class FileStatus(NamedTuple):
    """By which a file that is never changed is recognized, as long as it has a name."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStatus:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class FrozenFile(NamedTuple):
    """A file of the snapshot. ``path``: in the state's folder. ``place``: where its content is. ``status``: None if it
    is not declared immutable, and must be read."""

    path: str
    place: str
    size: int
    status: FileStatus | None


class Snapshot(NamedTuple):
    """A folder as it was at the cut. Remove it when it is not needed any more."""

    checkpoint_id: int
    folder: Path
    files: tuple[FrozenFile, ...]
    key_groups: KeyGroupRange | None = None

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def remove(self) -> None:
        """Delete it. A folder that cannot be deleted goes with the private folder of the attempt."""
        shutil.rmtree(self.folder, ignore_errors=True)


def freeze(state: StateFiles, checkpoint_id: int, into: Path, *, owned: bool = False) -> Snapshot:
    """Freeze the folder of a state.

    ``into``: a folder that is made for it, on the same filesystem. ``owned``: the state's folder was made for this
    checkpoint alone, so it is the snapshot itself, and ``into`` is not used.

    Raises ``StorageError``, after which ``into`` is gone.
    """
    source = os.path.abspath(state.folder)
    try:
        if owned:
            files = tuple(_as_it_is(source, state.immutable))
            return Snapshot(checkpoint_id, Path(source), files)
        os.makedirs(into, mode=0o700)
        files = tuple(_frozen(source, str(into), state.immutable))
    except (OSError, StorageError) as error:
        if not owned:
            shutil.rmtree(into, ignore_errors=True)
        if isinstance(error, OSError):
            raise StorageError(
                f"cannot freeze the state in {source}: {error}. If files were just deleted or changed there, let "
                "the store write its own checkpoint into context.snapshot_folder(checkpoint_id)"
            ) from error
        raise
    return Snapshot(checkpoint_id, into, files)


def _as_it_is(source: str, immutable: tuple[str, ...]) -> Iterator[FrozenFile]:
    for path, place, status in regular_files(source):
        known = FileStatus.of(status) if _matches(path, immutable) else None
        yield FrozenFile(path, place, status.st_size, known)


def _frozen(source: str, into: str, immutable: tuple[str, ...]) -> Iterator[FrozenFile]:
    made = {into}
    for number, (path, place, status) in enumerate(regular_files(source)):
        above = os.path.join(into, str(number // 1_000))
        if above not in made:
            os.mkdir(above)
            made.add(above)
        copy = os.path.join(above, str(number))
        if _matches(path, immutable) and _linked(place, copy):
            linked = FileStatus.of(os.lstat(copy))
            yield FrozenFile(path, copy, linked.size, linked)
            continue
        shutil.copyfile(place, copy, follow_symlinks=False)
        after = os.lstat(place)
        if FileStatus.of(after) != FileStatus.of(status) or os.path.getsize(copy) != status.st_size:
            raise StorageError(
                f"{place} was changed while it was copied: nothing may change in the folder until snapshot_state is "
                "over; stop the threads of your store for that time, or let it write into "
                "context.snapshot_folder(checkpoint_id)"
            )
        yield FrozenFile(path, copy, status.st_size, None)


def regular_files(folder: str) -> Iterator[tuple[str, str, os.stat_result]]:
    """The files in a folder and those below it: path with slashes, full path and status. Raises ``StorageError`` for
    anything else, such as a link."""
    folders = [""]
    while folders:
        above = folders.pop()
        with os.scandir(os.path.join(folder, above) if above else folder) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                path = f"{above}/{entry.name}" if above else entry.name
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(path)
                elif stat.S_ISREG(status.st_mode):
                    yield path, entry.path, status
                else:
                    kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "neither a file nor a folder"
                    raise StorageError(
                        f"{show(entry.path)} is {kind}, and a state consists of regular files: remove it, or keep it "
                        "outside of the folder"
                    )


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _linked(place: str, copy: str) -> bool:
    """Give a file a second name. False on a filesystem that cannot do that."""
    try:
        os.link(place, copy, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise StorageError(
                f"{place} is on another filesystem than the task's own folder, and cannot be frozen without a copy: "
                "keep the state in context.state_folder, or let the store write its own checkpoint into "
                "context.snapshot_folder(checkpoint_id)"
            ) from error
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True
