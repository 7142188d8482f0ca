# SPDX-License-Identifier: Apache-2.0

"""Single checkpoint files in any directory: savepoints (H49), and the files that a storage reads."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from protocol.barrier_tracker import CompletedCheckpoint
from protocol.errors import CheckpointCorrupt, CheckpointTooNew, LocalProtocolError
from protocol.wire.checkpoint_format import (
    HEAD_BYTES,
    StoredCheckpoint,
    check_head,
    decode_checkpoint,
    encode_checkpoint,
)
from protocol.wire.messages import RestoreMode
from spark_bridge.storage.errors import CheckpointUnreadable, StorageError
from spark_bridge.storage.files import Files
from spark_bridge.storage.interface import CheckpointInfo, Permit, always_permitted, describe
from spark_bridge.storage.layout import SUFFIX, savepoint_name
from spark_bridge.storage.state_files.folder import StateFolder


def encoded(operator_id: str, checkpoint: CompletedCheckpoint, mode: RestoreMode) -> bytes:
    """The bytes of its file, with the current time. Raises ``StorageError`` if it cannot be encoded."""
    try:
        release = version("headgate")
    except PackageNotFoundError:  # it runs from an archive, or from its sources
        release = "unknown"
    try:
        return encode_checkpoint(StoredCheckpoint(operator_id, mode, time.time_ns() // 1_000_000, release, checkpoint))
    except LocalProtocolError as error:
        raise StorageError(str(error)) from error


def read_one(files: Files, path: str, *, named_by_user: bool = False) -> tuple[StoredCheckpoint, int]:
    """Read a checkpoint; returns it with the size of its file in bytes.

    The head of a large file is read first, so a file that is too long, or of another kind, takes no memory. A file that
    the user named may be a symbolic link.

    Raises ``FileNotFoundError``, or ``CheckpointUnreadable`` for a damaged file.
    """
    try:
        data = files.read(path, head_bytes=HEAD_BYTES, check_head=check_head, follow_link=named_by_user)
        return decode_checkpoint(data), len(data)
    except CheckpointTooNew as error:
        raise CheckpointUnreadable(files.name_of(path), str(error), too_new=True) from error
    except CheckpointCorrupt as error:
        raise CheckpointUnreadable(files.name_of(path), str(error)) from error


def new_savepoint(operator_id: str, checkpoint_id: int) -> str:
    """Return a name that no other savepoint has, in whatever application."""
    # H162
    return savepoint_name(operator_id, checkpoint_id, secrets.token_hex(8))


def store_savepoint(
    directory: str | os.PathLike[str],
    operator_id: str,
    checkpoint: CompletedCheckpoint,
    *,
    mode: RestoreMode = RestoreMode.STREAMING,
    options: Mapping[str, Any] | None = None,
    permit: Permit = always_permitted,
    name: str = "",
) -> str:
    """Write a savepoint into ``directory``, a path or a URL, which is created if it is missing; returns its file.

    The file gets a name that no other savepoint has, in whatever application. So nothing is replaced, and after an
    error only what this call has written is deleted. ``permit`` is called just before the file appears and once more
    after it; an exception from it takes the file back. ``name``: of the file, if ``new_savepoint`` has given it one.

    A reader sees the whole file or none, as with a checkpoint (H50). Blocks; for any thread. Raises ``StorageError``.
    """
    # H162
    files = Files(directory, options)
    files.make_folder()
    name = name or new_savepoint(operator_id, checkpoint.checkpoint_id)
    files.write_new(name, encoded(operator_id, checkpoint, mode), permit)
    return files.name_of(name)


def delete_savepoint(file: str, options: Mapping[str, Any] | None = None) -> None:
    """Delete a savepoint that ``store_savepoint`` has written, and then the files of its states; harmless if it is
    gone. Raises ``StorageError``."""
    folder, slash, name = file.rpartition("/")
    files = Files(folder + slash, options)
    files.remove(name)
    StateFolder.of_savepoint(files, name).delete_all()


def read_file(url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> StoredCheckpoint:
    """Read the checkpoint or savepoint in one file, given as a path or a URL. Blocks; for any thread.

    Raises ``CheckpointUnreadable`` for a damaged file, ``StorageError`` if it cannot be read.
    """
    return read_url(url, options)[0]


def read_url(url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> tuple[StoredCheckpoint, int]:
    """Like ``read_file``, with the size of the file in bytes."""
    folder, slash, name = str(url).rstrip("/").rpartition("/")
    files = Files(folder + slash or ".", options)
    try:
        return read_one(files, name, named_by_user=True)
    except (FileNotFoundError, CheckpointUnreadable, StorageError) as error:
        if name in files.folders():
            raise StorageError(
                f"{files.name_of(name)}: it is a directory, and a checkpoint or savepoint is a file: name one of its "
                "files, which `headgate checkpoints DIRECTORY` lists"
            ) from None
        if isinstance(error, FileNotFoundError):
            raise StorageError(f"{files.name_of(name)}: no such file; check the path") from None
        raise


def savepoints_in(
    url: str | os.PathLike[str], operator_id: str | None = None, options: Mapping[str, Any] | None = None
) -> list[CheckpointInfo]:
    """Read and verify the savepoints that lie in a directory, of all operators or one; sorted by operator and id."""
    files = Files(url, options)
    infos = []
    for name in files.names():
        if name.endswith(SUFFIX):
            try:
                infos.append(describe(read_one(files, name)[0], files.name_of(name), files.size(name)))
            except CheckpointUnreadable as error:
                infos.append(CheckpointInfo("?", 0, error.file, files.size(name), error.problem))
            except FileNotFoundError:  # deleted since it was listed
                continue
    wanted = [info for info in infos if operator_id in (None, info.operator_id) or info.problem]
    return sorted(wanted, key=lambda info: (info.operator_id, info.checkpoint_id, info.file))
