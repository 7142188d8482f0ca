# SPDX-License-Identifier: Apache-2.0

"""The files of one directory on any filesystem that fsspec knows, whose errors become ``StorageError`` here.

On a local filesystem, data is on the disk when a method returns, and no symbolic link is followed (``LocalFiles``). On
others, durability, access rights and links are the filesystem's own.

A file gets its name by a move, which appears whole: a rename, or on S3 and GCS a copy inside the store that is complete
when the call returns. On Azure it need not be, and the deletion of the source would break it off. So there the file is
written under its name directly, which appears whole too. Nothing here needs a write with a condition: what must be
unique has a random token in its name.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from spark_bridge.common.bootstrap import ensure_importable
from spark_bridge.common.secret_texts import Secrets, check_no_password
from spark_bridge.storage.errors import CheckpointUnreadable, StorageError

ensure_importable("fsspec")

from fsspec.core import url_to_fs  # noqa: E402 - fsspec must be importable first
from fsspec.implementations.local import LocalFileSystem  # noqa: E402
from fsspec.spec import AbstractBufferedFile  # noqa: E402

CheckHead = Callable[[bytes, int], None]

_COPIES_LATE = frozenset({"abfs", "abfss", "az"})
"""The protocols of the stores that may finish a copy later than they say."""

_ALWAYS_WHOLE_BYTES = 2**16
"""Remote files up to this size are read in one request, without looking at their head first."""
PIECE_BYTES = 2**20
"""How much of a file of a state is in memory while it is written, or read from a local disk."""
_REQUEST_BYTES = 8 * 2**20
"""How much of a remote file one request writes or reads."""
_REQUESTS_MAX = 9_000
"""S3 takes a file in at most 10,000 parts."""
_USE = ". Correct the URL or the options, or install the package of its filesystem (s3fs, gcsfs, adlfs, ...)"
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a named pipe must not wait for its writer


class Files:
    """The files of one directory. Paths are relative to it.

    The methods block, and may be called from several threads concurrently. Whatever the filesystem raises, they raise
    ``StorageError`` with the name of the file.
    """

    def __init__(self, url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> None:
        self.url = str(url)
        check_no_password(self.url, "storage", "give it in options", StorageError)
        self._secrets = Secrets("storage_options", options or {})
        with self._secrets.kept(make=self._refused("use", self.url, _USE), typed=True):  # each raises its own
            filesystem, root = url_to_fs(str(url), **(options or {}))
        self._filesystem: Any = filesystem
        self._root: str = root.rstrip("/")
        protocols = filesystem.protocol
        self._writes_in_place = not _COPIES_LATE.isdisjoint([protocols] if isinstance(protocols, str) else protocols)
        self._local: LocalFiles | None = None
        if type(filesystem) is LocalFileSystem:  # a subclass may do anything
            self._local = LocalFiles(self._root or "/")
            self.url = root  # absolute, whatever the working directory is

    def name_of(self, path: str) -> str:
        """The file's full name, for messages."""
        return f"{self.url.rstrip('/')}/{path}" if path else self.url

    def make_folder(self, path: str = "") -> None:
        """Create the folder and its missing parents."""
        with self._refusals("make the directory", path, missing_too=True):
            if self._local is not None:
                self._local.make_folder(path)
            else:
                self._filesystem.makedirs(self._full(path), exist_ok=True)

    def names(self, path: str = "") -> list[str]:
        """The names in a folder, in no particular order; none if there is no such folder."""
        with self._refusals("list", path), suppress(FileNotFoundError):
            if self._local is not None:
                return self._local.names(path)
            full = self._full(path)
            self._filesystem.invalidate_cache(full)  # another application may have written in the meantime
            listed = self._filesystem.ls(full, detail=False)
            if [name.rstrip("/") for name in listed] == [full]:
                raise NotADirectoryError(
                    f"{self.name_of(path)} is a file, and a directory is needed: choose another path"
                )
            return [name.rstrip("/").rpartition("/")[2] for name in listed]
        return []

    def folders(self) -> list[str]:
        """The names of the folders in the directory, in no particular order; none if there is no such directory."""
        with self._refusals("list", ""), suppress(FileNotFoundError):
            if self._local is not None:
                return self._local.folders()
            self._filesystem.invalidate_cache(self._full(""))
            listed = self._filesystem.ls(self._full(""), detail=True)
            return [entry["name"].rstrip("/").rpartition("/")[2] for entry in listed if entry["type"] == "directory"]
        return []

    def size(self, path: str) -> int:
        """The size of a file in bytes. Raises ``FileNotFoundError`` if there is no such file."""
        with self._refusals("read", path):
            if self._local is not None:
                return self._local.size(path)
            return self._remote_size(self._full(path))

    def _remote_size(self, full: str) -> int:
        """Ask the store, and not the listing that its filesystem keeps, which another application may have outdated."""
        self._filesystem.invalidate_cache(os.path.dirname(full))
        return int(self._filesystem.info(full)["size"])

    def read(self, path: str, *, head_bytes: int, check_head: CheckHead, follow_link: bool = False) -> bytes:
        """Read a whole file, if its head says that it is one of ours.

        ``check_head`` gets the first ``head_bytes`` and the size of the file. If it raises, no more is read; for a
        small remote file, everything has been read by then.

        Raises ``FileNotFoundError`` if there is no such file, ``CheckpointUnreadable`` if it is not a regular file, and
        what ``check_head`` raises.
        """
        with self._refusals("read", path):
            if self._local is not None:
                return self._read_local(self._local, path, head_bytes, check_head, follow_link)
            full = self._full(path)
            size = self._remote_size(full)
            if size > _ALWAYS_WHOLE_BYTES:
                check_head(bytes(self._filesystem.cat_file(full, start=0, end=head_bytes)), size)
                return bytes(self._filesystem.cat_file(full, start=0, end=size))
            data = bytes(self._filesystem.cat_file(full))
            check_head(data[:head_bytes], len(data))
            return data

    def _read_local(
        self, local: LocalFiles, path: str, head_bytes: int, check_head: CheckHead, follow_link: bool
    ) -> bytes:
        try:
            with local.opened(path, follow_link=follow_link) as (descriptor, size):
                with open(descriptor, "rb", closefd=False) as file:
                    check_head(file.read(head_bytes), size)
                    file.seek(0)
                    return file.read(size)
        except NotRegular as error:
            raise CheckpointUnreadable(self.name_of(path), str(error.strerror)) from error

    def exists(self, path: str) -> bool:
        """Whether there is such a file, by asking for it and not by listing its folder."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def create_empty(self, path: str) -> None:
        """Create an empty file."""
        with self._refusals("create", path, missing_too=True):
            if self._local is not None:
                self._local.create_empty(path)
            else:
                self._filesystem.pipe_file(self._full(path), b"")

    def write(self, path: str, data: bytes, *, temporary: str, before_move: Callable[[], None]) -> None:
        """Write a file so that a reader sees all of it or nothing: under ``temporary`` first, then move it.

        On Azure, ``temporary`` is empty, and only says what is being written.

        ``before_move`` is called in between. If it raises, the file does not appear. After an error of the filesystem,
        the file may have appeared. The caller knows whether it may be deleted, and must do so.
        """
        try:
            with self._refusals("write", temporary, missing_too=True):
                self._put(temporary, b"" if self._writes_in_place else data)
            before_move()
            with self._refusals("write", path, missing_too=True):
                if self._writes_in_place:
                    self._put(path, data)
                else:
                    self._move(temporary, path)
                self._require_size(path, len(data))
        except BaseException:
            self.sweep(temporary)
            raise
        if self._writes_in_place:
            self.sweep(temporary)

    def write_new(self, path: str, data: bytes, permit: Callable[[], None]) -> None:
        """Write a file whose name nobody else uses, so that a reader sees all of it or nothing; replaces nothing.

        The name has a random token, so no other call writes it or its temporary file, ``path`` with ``.tmp``. Where a
        filesystem can create a file exclusively, that is verified too. After an error, only what this call has written
        is deleted. ``permit`` is called before the file appears and after it, and may raise.
        """
        temporary = f"{path}.tmp"
        with self._refusals("write", path, missing_too=True):
            if self._writes_in_place:
                permit()
                self._appear(path, len(data), permit, partial(self._put, path, data))
                return
            with self._taken_back(temporary):
                if self._local is not None:
                    self._local.write(temporary, [data], replace=False)
                else:
                    self._put(temporary, data)
            try:
                permit()
                self._appear(path, len(data), permit, partial(self._move, temporary, path, replace=False))
            finally:
                self.sweep(temporary)

    def _appear(self, path: str, size_bytes: int, permit: Callable[[], None], make: Callable[[], None]) -> None:
        """Make the file visible; takes it back if it is not whole or no longer wanted."""
        with self._taken_back(path):
            make()
            self._require_size(path, size_bytes)
            permit()

    @contextmanager
    def _taken_back(self, path: str) -> Iterator[None]:
        """Delete the file that the block creates if the block fails, but never one that was there before."""
        try:
            yield
        except FileExistsError:  # it is another's
            raise
        except BaseException:
            self.sweep(path)
            raise

    def _require_size(self, path: str, size_bytes: int) -> None:
        written = self.size(path)
        if written != size_bytes:
            raise OSError(f"{size_bytes} bytes were written, but the file has {written}")

    def write_pieces(self, path: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        """Write a file whose name nobody else uses from pieces, with little memory, and its folder if it is missing.

        It is written under its name directly. So if the process is killed, a part of the file may be there, and a
        reader must know size and digest from elsewhere. After any other error, also one of ``pieces``, which is raised
        as it is if it is Headgate's, nothing remains; what a store has of an unfinished file is given up.
        """
        with self._refusals("write", path, missing_too=True):
            if self._local is not None:
                self._local.make_folder(os.path.dirname(path))
            with self._taken_back(path):
                if self._local is not None:
                    self._local.write(path, pieces, replace=False)
                    self._local.sync(os.path.dirname(path))
                else:
                    self._stream(self._full(path), pieces, size_bytes)
                self._require_size(path, size_bytes)

    def _stream(self, full: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        """Write a remote file."""
        if size_bytes <= _REQUEST_BYTES:
            data = b"".join(pieces)
            self._in_folder(full, lambda: self._filesystem.pipe_file(full, data))
            return
        least = max(_REQUEST_BYTES, size_bytes // _REQUESTS_MAX)
        block_bytes = -(-least // PIECE_BYTES) * PIECE_BYTES  # GCS wants multiples of 256 KiB
        file = self._in_folder(full, lambda: self._filesystem.open(full, "wb", block_size=block_bytes))
        try:
            for piece in pieces:
                file.write(piece)
            file.close()
        except BaseException:
            _give_up(file)
            raise

    def _in_folder(self, full: str, write: Callable[[], Any]) -> Any:
        """Write, and create the folder if the filesystem wants one: object stores need no rights for that."""
        try:
            return write()
        except FileNotFoundError:
            self._filesystem.makedirs(os.path.dirname(full), exist_ok=True)
            return write()

    def pieces(self, path: str, size_bytes: int) -> Iterator[bytes]:
        """The content of a file in pieces.

        Raises ``FileNotFoundError`` if there is no such file, and ``CheckpointUnreadable`` if it has another size or
        is not a regular file. It may be changed while it is read.
        """
        with self._refusals("read", path):
            if self._local is not None:
                try:
                    with self._local.opened(path) as (descriptor, size):
                        self._expect_size(path, size, size_bytes)
                        with open(descriptor, "rb", buffering=0, closefd=False) as file:
                            while piece := file.read(PIECE_BYTES):
                                yield piece
                except NotRegular as error:
                    raise CheckpointUnreadable(self.name_of(path), str(error.strerror)) from error
                return
            full = self._full(path)
            self._expect_size(path, self._remote_size(full), size_bytes)
            for start in range(0, size_bytes, _REQUEST_BYTES):
                yield bytes(self._filesystem.cat_file(full, start=start, end=min(start + _REQUEST_BYTES, size_bytes)))

    def _expect_size(self, path: str, found: int, expected: int) -> None:
        if found != expected:
            raise CheckpointUnreadable(self.name_of(path), f"it has {found} bytes, and {expected} were stored")

    def sync(self, path: str) -> None:
        """Make durable which names a folder has and has no more, if the filesystem is local."""
        with self._refusals("write", path), suppress(FileNotFoundError):
            if self._local is not None:
                self._local.sync(path)

    def remove_folder(self, path: str) -> None:
        """Delete a folder that is empty, if the filesystem is local; harmless if it is not, or if there is none."""
        if self._local is not None:
            with suppress(OSError):
                self._local.remove_folder(path)

    def sweep(self, path: str) -> None:
        """Delete what a failure may have left, ignoring errors, because that failure is the one to report."""
        with suppress(StorageError):
            self.remove(path)

    def remove(self, path: str) -> None:
        """Delete a file; harmless if there is none."""
        with self._refusals("delete", path), suppress(FileNotFoundError):
            if self._local is not None:
                self._local.remove(path)
            else:
                self._filesystem.rm_file(self._full(path))

    def _put(self, path: str, data: bytes) -> None:
        if self._local is not None:
            self._local.write(path, [data])
        else:
            self._filesystem.pipe_file(self._full(path), data)

    def _move(self, source: str, target: str, *, replace: bool = True) -> None:
        if self._local is not None:
            self._local.move(source, target, replace=replace)
            return
        self._filesystem.mv(self._full(source), self._full(target))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root or "/"

    @contextmanager
    def _refusals(self, action: str, path: str, *, missing_too: bool = False) -> Iterator[None]:
        passing = () if missing_too else (FileNotFoundError,)  # only a missing file is distinguished
        with self._secrets.kept(make=self._refused(action, self.name_of(path)), passing=passing, typed=True):
            yield

    @staticmethod
    def _refused(action: str, name: str, advice: str = "") -> Callable[[str], StorageError]:
        """Makes an error of the first line of a text: some filesystems raise pages of it."""
        return lambda text: StorageError(f"cannot {action} {name}: {text}".partition("\n")[0] + advice)


class NotRegular(OSError):
    """There is something else than a regular file: a link, a directory, a pipe."""


class LocalFiles:
    """The files of one local directory: private, durable, and never reached through a symbolic link.

    Only the directory itself may be a link, because the user chose it. Below it, each folder is opened without
    following links, and each file relative to its open folder. So no link in the directory makes Headgate read,
    overwrite or delete a file elsewhere, even if somebody puts it there between two calls. New files have the mode 0600
    and new directories 0700, less what the umask forbids.

    ``root`` is an absolute path, and paths are relative to it. Files and names are on the disk when a method returns.
    Methods raise ``OSError``. For any thread.
    """

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

    def write(self, path: str, pieces: Iterable[bytes], *, replace: bool = True) -> None:
        """Write a new file. Its name is not durable yet.

        Replaces one that is left of an earlier try, or raises ``FileExistsError`` if ``replace`` is False.
        """
        with self._parent(path) as (folder, name):
            if replace:
                with suppress(FileNotFoundError):  # it may be a link, or another name of a file elsewhere
                    os.unlink(name, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(name, flags, _FILE_MODE, dir_fd=folder), "wb") as file:
                for piece in pieces:
                    file.write(piece)
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

    def sync(self, path: str) -> None:
        """Make the names in a folder durable."""
        with self._folder(path) as folder:
            os.fsync(folder)

    def remove_folder(self, path: str) -> None:
        """Delete a folder that is empty."""
        with self._parent(path) as (folder, name):
            os.rmdir(name, dir_fd=folder)

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


def _give_up(file: Any) -> None:
    """Leave a remote file unfinished: to close it, which Python does with an object that is gone, would finish it."""
    if isinstance(file, AbstractBufferedFile):
        with suppress(Exception):
            file.discard()
        file.closed = True
    else:
        with suppress(Exception):
            file.close()


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
