# SPDX-License-Identifier: Apache-2.0

"""Makes a folder again of a state in files: nothing comes into it that is not what was stored (H191)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from protocol.describing import describe
from protocol.wire.state_handles import StateHandle
from spark_bridge.common.regular_files import open_regular
from spark_bridge.storage.errors import StorageError
from spark_bridge.storage.files import PIECE_BYTES
from spark_bridge.storage.state_files.folder import Progress, StateFolder, check_wanted, verified
from spark_bridge.storage.state_files.manifest import StoredFile
from spark_bridge.storage.state_files.snapshot import FileStatus
from spark_bridge.storage.state_files.values import RestoredFiles


class RestoredState(NamedTuple):
    """What ``open`` receives; and each file, where it is, and its status when it was written.

    ``local_bytes``: how much was found on this host.
    """

    files: RestoredFiles
    stored: tuple[tuple[StoredFile, str, FileStatus], ...]
    local_bytes: int


def restore(
    folder: StateFolder,
    handle: StateHandle,
    into: Path,
    *,
    data: bytes = b"",
    local: Path | None = None,
    progress: Progress = lambda done, total: None,
    stopped: Callable[[], bool] = bool,
) -> RestoredState:
    """Restore a state into a folder, which must be missing or empty. Blocks, for any thread.

    ``data``: what belongs to the state and is not in files. ``local``: a folder that an earlier attempt may have left
    on this host. A file there is used if it has the right content; it is copied, because that attempt may still write.

    Raises ``CheckpointUnreadable`` for a damaged or missing file, ``StorageError``, or ``UploadStopped``. After that
    there is nothing in the folder.
    """
    files = folder.read_manifest(handle)
    done = found = 0
    stored = []
    _make(into)
    try:
        for file in files:
            check_wanted(stopped)
            place = os.path.join(into, *file.path.split("/"))
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if local is not None and _taken(os.path.join(local, *file.path.split("/")), file, place, stopped):
                found += file.size
            else:
                _write(place, folder.verified(file, stopped))
            stored.append((file, place, FileStatus.of(os.lstat(place))))
            done += file.size
            progress(done, handle.total_bytes)
    except BaseException as error:
        shutil.rmtree(into, ignore_errors=True)
        if isinstance(error, OSError):
            raise StorageError(f"cannot restore a state into {into}: {describe(error)}") from error
        raise
    groups = None if handle.key_groups is None else range(handle.key_groups.first, handle.key_groups.end)
    return RestoredState(RestoredFiles(into, data, groups), tuple(stored), found)


def _make(into: Path) -> None:
    try:
        with suppress(FileExistsError):
            os.makedirs(into, mode=0o700)
        if os.path.islink(into) or os.listdir(into):
            raise StorageError(f"cannot restore a state into {into}, because it is a link, or there is something in it")
    except OSError as error:
        raise StorageError(f"cannot restore a state into {into}: {describe(error)}") from error


def _write(place: str, pieces: Iterable[bytes]) -> None:
    with open(place, "xb") as out:
        for piece in pieces:
            out.write(piece)


def _taken(source: str, file: StoredFile, place: str, stopped: Callable[[], bool]) -> bool:
    """Copy a file of this host, if its content is right."""
    try:
        with open_regular(source) as found:
            if os.fstat(found.fileno()).st_size != file.size:
                return False
            _write(place, verified(iter(lambda: found.read(PIECE_BYTES), b""), file, stopped))
    except FileExistsError:  # two paths are one to this filesystem
        raise
    except (OSError, ValueError):
        with suppress(FileNotFoundError):
            os.unlink(place)
        return False
    return True
