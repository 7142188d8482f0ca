# SPDX-License-Identifier: Apache-2.0

"""What a user gives for a state in files, and gets back; and which storages can have one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from protocol.arguments import Rule, check_fields, checked_names, given
from protocol.key_groups import KeyGroups
from spark_bridge.storage.errors import StorageError

_FOLDER = Rule("the path of a folder, as a str or a Path", lambda value: True)


@checked_names
@dataclass(frozen=True, slots=True)
class StateFiles:
    """A state that is a folder of files, of any size: return it from ``snapshot_state``.

    ``folder`` is frozen before ``process`` goes on, in milliseconds. Then one thread uploads what the storage does not
    have yet, while records are processed. The checkpoint is complete when that is done. If it fails, so does the
    checkpoint, and the next one uploads only what is still missing. All regular files in the folder and in the folders
    below it belong to the state; empty folders, times and rights of files do not. Links and devices are refused.

    Nothing may change in the folder until the call is over: let your store flush and write its own checkpoint first,
    best into ``context.snapshot_folder(checkpoint_id)``, which is deleted after the upload and is not copied.

    ``data``: bytes that belong to the state too. They go through the driver with each checkpoint: keep them small.

    ``immutable``: patterns as in a shell, of the paths of files in the folder; ``*`` also stands for slashes. Your
    store creates, renames and deletes such files, and never changes one. So they are frozen by a hard link, and a file
    that was uploaded before is not read again. All others are copied, and read for each checkpoint. The folder must be
    on the same filesystem as ``context.state_folder``.

    ``key_groups``: set it if the state has exactly the keys of the subtask's own groups,
    ``key_groups.range_of(context.subtask, context.parallelism)``. Then a restart with another parallelism gives each
    subtask its groups of each state that has some of them: see ``SubtaskOperator.merge_files``. None: the state is not
    divided.

    It may be made in any thread, and is immutable.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value, or there is no such folder.
    """

    folder: str | os.PathLike[str]
    data: bytes = b""
    immutable: tuple[str, ...] = ("*.sst",)
    key_groups: KeyGroups | None = None

    def __post_init__(self) -> None:
        check_fields(self, folder=_FOLDER)
        if not os.path.isdir(self.folder):
            raise ValueError(
                f"folder must be a folder that exists, is {given('folder', os.fspath(self.folder))}: create it before "
                "you return it from snapshot_state"
            )


@dataclass(frozen=True, slots=True)
class RestoredFiles:
    """A state in files, as ``open`` and ``merge_files`` receive it.

    ``folder``: it has all files of the state, byte for byte as they were at the checkpoint, each verified, and the task
    may change it. In ``open``, it is ``context.state_folder``. ``data``: as it was given to ``StateFiles``.
    ``key_groups``: those whose keys the subtask takes from this folder; None if the state is not divided.
    """

    folder: Path
    data: bytes = b""
    key_groups: range | None = None


def check_holds_files(url: str | None) -> None:
    """Raise ``StorageError`` unless executors can write states in files into this storage: a path or a URL, or None."""
    if url is None:
        problem = "there is no storage"
    elif url.rpartition("::")[2].startswith("memory:"):
        problem = f"{url} is the memory of the driver's process"
    else:
        return
    raise StorageError(
        f"a state in files needs a storage that all executors can write, and {problem}: set SidecarConfig(storage=...) "
        "to a URL (s3://, gs://, abfs://, ...) or to a directory that all executors share, or return bytes from "
        "snapshot_state instead of StateFiles"
    )
