# SPDX-License-Identifier: Apache-2.0

"""The files of one local directory: private, durable, and never reached through a symbolic link.

Only the directory itself may be a link, because the user chose it. Below it, each folder is opened without following
links, and each file relative to its open folder. So no link in the directory makes Headgate read, overwrite or delete
a file elsewhere, even if somebody puts it there between two calls. New files have the mode 0600 and new directories
0700, less what the umask forbids.

Files and names are on the disk when a method returns. Methods raise ``OSError``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["LocalFiles", "NotRegular"]

_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a named pipe must not wait for its writer


class NotRegular(OSError):
    """There is something else than a regular file: a link, a directory, a pipe."""


class LocalFiles:
    """The files below ``root``, an absolute path. Paths are relative to it. For any thread."""

    def __init__(self, root: str) -> None:
        self._root = root

    def make_folder(self, path: str) -> None:
        """Create the directory, its missing parents, and the folder ``path`` in it."""
        self._make_root()
        made = ""
        for name in filter(None, path.split("/")):
            with self._folder(made) as parent:
                with suppress(FileExistsError):
                    os.mkdir(name, _FOLDER_MODE, dir_fd=parent)
                    os.fsync(parent)
            made = f"{made}/{name}".lstrip("/")
        with self._folder(made):
            pass  # it is a directory, and not a link to one

    def names(self, path: str) -> list[str]:
        """The names in a folder."""
        with self._folder(path) as folder:
            return os.listdir(folder)

    def folders(self) -> list[str]:
        """The names of the folders in the directory; links to folders are not among them."""
        with self._folder("") as folder, os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def size(self, path: str) -> int:
        with self._parent(path) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size

    @contextmanager
    def opened(self, path: str, *, follow_link: bool = False) -> Iterator[tuple[int, int]]:
        """The descriptor of a regular file that can be read, and its size. Raises ``NotRegular``.

        ``follow_link``: also through a link, because the user named this file.
        """
        with self._parent(path) as (folder, name):
            try:
                descriptor = os.open(name, _READ_FLAGS | (0 if follow_link else os.O_NOFOLLOW), dir_fd=folder)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise NotRegular(errno.ELOOP, "it is a symbolic link, which Headgate does not follow") from error
                raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise NotRegular(errno.EINVAL, "it is not a regular file")
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)

    def create_empty(self, path: str) -> None:
        """Create an empty file, if there is none."""
        with self._parent(path) as (folder, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(name, flags, _FILE_MODE, dir_fd=folder))
            os.fsync(folder)

    def write(self, path: str, data: bytes, *, replace: bool = True) -> None:
        """Write a new file. Its name is not durable yet.

        Replaces one that is left of an earlier try, or raises ``FileExistsError`` if ``replace`` is False.
        """
        with self._parent(path) as (folder, name):
            if replace:
                with suppress(FileNotFoundError):  # it may be a link, or another name of a file elsewhere
                    os.unlink(name, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(name, flags, _FILE_MODE, dir_fd=folder), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def move(self, source: str, target: str, *, replace: bool = True) -> None:
        """Rename a file within its folder, in one step.

        With ``replace=False``, raises ``FileExistsError`` if there is a file of the new name, and may leave the old
        name behind.
        """
        with self._parent(target) as (folder, name):
            old = source.rpartition("/")[2]
            if replace:
                os.replace(old, name, src_dir_fd=folder, dst_dir_fd=folder)
            else:
                _link(old, name, folder)
            os.fsync(folder)

    def remove(self, path: str) -> None:
        """Delete a file. A link is deleted itself, never what it points to."""
        with self._parent(path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    @contextmanager
    def _folder(self, path: str) -> Iterator[int]:
        """An open folder."""
        descriptor = os.open(self._root, _FOLDER_FLAGS)
        try:
            for name in filter(None, path.split("/")):
                try:
                    inner = os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=descriptor)
                except OSError as error:
                    if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(name, descriptor):
                        explained = "it is a symbolic link, which Headgate does not follow: replace it by a directory"
                        raise NotADirectoryError(errno.ENOTDIR, explained) from error
                    raise
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """The open folder of a file, and the file's name in it."""
        above, _, name = path.rpartition("/")
        with self._folder(above) as folder:
            yield folder, name

    def _make_root(self) -> None:
        missing = []
        ancestor = self._root
        while not os.path.isdir(ancestor):
            missing.append(ancestor)
            above = os.path.dirname(ancestor)
            if above == ancestor:
                break
            ancestor = above
        for folder in reversed(missing):
            with suppress(FileExistsError):  # another thread or application was faster
                os.mkdir(folder, _FOLDER_MODE)
            _sync(os.path.dirname(folder))


def _link(old: str, name: str, folder: int) -> None:
    """Give a file another name, which nothing has yet; on a filesystem without hard links, rename it."""
    try:
        os.link(old, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if name in os.listdir(folder):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from error
        os.rename(old, name, src_dir_fd=folder, dst_dir_fd=folder)


def _is_link(name: str, folder: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _sync(folder: str) -> None:
    """Make names in the folder durable."""
    descriptor = os.open(folder, _FOLDER_FLAGS)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
