# SPDX-License-Identifier: Apache-2.0

"""What ``headgate checkpoints`` says about files of states: whether they are intact, and which ones nothing needs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from protocol.barrier_tracker.pending import files_of
from spark_bridge.storage.errors import CheckpointUnreadable
from spark_bridge.storage.files import Files
from spark_bridge.storage.interface import CheckpointInfo
from spark_bridge.storage.layout import SUFFIX, is_savepoint_folder, operator_folder, savepoint_folder
from spark_bridge.storage.single_files import read_file
from spark_bridge.storage.state_files.folder import StateFolder
from spark_bridge.storage.store import CheckpointStorage


def folder_of(info: CheckpointInfo) -> str:
    """The name of the folder of its operator."""
    return operator_folder(info.operator_id)


def verified(info: CheckpointInfo, named: set[str], *, contents: bool) -> CheckpointInfo:
    """The entry of a checkpoint or savepoint, with the ``problem`` if the files of its states are not intact.

    ``named`` gets what it names. The manifests are read, and with ``contents`` all files.
    """
    if info.problem or info.void or not info.files:
        return info
    try:
        folder = StateFolder.beside(info.file, None)
        for handle in files_of(read_file(info.file).checkpoint):
            named |= folder.names_of(handle)
            if contents:
                folder.verify(handle)
    except CheckpointUnreadable as error:
        return replace(info, problem=str(error)) if _is_there(info.file) else info
    return info


def _is_there(file: str) -> bool:
    """Whether no application has deleted the checkpoint meanwhile."""
    above, _, name = file.rpartition("/")
    return Files(above or ".", None).exists(name)


def unneeded(
    storage: CheckpointStorage, named: Mapping[str, Collection[str]], damaged: Collection[str]
) -> Iterator[str]:
    """A line for each operator that has files of states which no checkpoint names.

    ``damaged``: the folders of operators with a checkpoint that cannot be read, which may name any.
    """
    for folder, states in storage.state_folders().items():
        if folder in damaged:
            yield f"{states.url}: not known which files nothing needs, because a checkpoint is damaged"
        elif orphans := states.orphans(named.get(folder, ())):
            yield (
                f"{states.url}: {len(orphans)} files that no checkpoint names, for example {orphans[0]}; an "
                "application that runs may need them, and otherwise the next one deletes them"
            )


def without_savepoint(url: str | os.PathLike[str]) -> Iterator[str]:
    """A line for each folder with files of a savepoint that is not there."""
    files = Files(url)
    expected = {savepoint_folder(name) for name in files.names() if name.endswith(SUFFIX)}
    for folder in sorted(files.folders()):
        if is_savepoint_folder(folder) and folder not in expected:
            where = files.name_of(folder)
            yield f"{where}: no savepoint has these files; delete the folder, unless a savepoint is being written"
