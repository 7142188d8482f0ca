# SPDX-License-Identifier: Apache-2.0

"""``headgate checkpoints``: lists and verifies the checkpoints in a storage."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import compress

from protocol.describing import line, plain
from spark_bridge.common import command_line
from spark_bridge.storage.errors import CheckpointUnreadable, StorageError
from spark_bridge.storage.interface import CheckpointInfo, describe
from spark_bridge.storage.layout import SUFFIX
from spark_bridge.storage.single_files import read_url, savepoints_in
from spark_bridge.storage.state_inspection import folder_of, unneeded, verified, without_savepoint
from spark_bridge.storage.store import CheckpointStorage

_ALL_INTACT, _SOME_DAMAGED, _NO_STORAGE = 0, 1, 2
_COLUMNS = ("OPERATOR", "ID", "TIME (UTC)", "BYTES", "FILES", "FILE BYTES", "PARALLELISM", "SUBTASKS", "HELD", "STATE")
_OF_FILES = frozenset({"FILES", "FILE BYTES"})


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``checkpoints``; its ``run`` takes the arguments and returns the exit status."""
    parser = commands.add_parser(
        "checkpoints",
        help="list and verify the checkpoints and savepoints of a directory",
        description="List the checkpoints and savepoints of a directory, newest last, and verify each: every byte is "
        "read. Of states in files, the lists of files are read, and with --files the files too. Says which files of "
        "states nothing needs. Changes nothing, and may be used while an application is running.",
        epilog="Exit status: 0 all are intact, 1 some are damaged, 2 there are none, or the directory cannot be read.",
    )
    parser.add_argument(
        "directory",
        type=command_line.path,
        metavar="DIR|URL",
        help=f"the directory, or one file that ends with {SUFFIX}",
    )
    parser.add_argument("--operator", type=command_line.label, metavar="NAME", help="only this operator's")
    parser.add_argument("--json", action="store_true", help="print a JSON array, one object for each checkpoint")
    parser.add_argument("--files", action="store_true", help="read and verify all files of states too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        checkpoints, savepoints, notes = _look(arguments.directory, arguments.operator, contents=arguments.files)
    except StorageError as error:
        command_line.tell(sys.stderr, f"headgate: {error}")
        return _NO_STORAGE
    infos = [*checkpoints, *savepoints]
    if arguments.json:
        sys.stdout.write(json.dumps(plain([asdict(info) for info in infos]), indent=2) + "\n")
    else:
        for text in (*_as_text(infos, with_files=bool(savepoints)), *notes):
            command_line.tell(sys.stdout, text)
    return _SOME_DAMAGED if any(info.problem for info in infos) else _ALL_INTACT


def _look(
    url: str, operator_id: str | None, *, contents: bool
) -> tuple[Sequence[CheckpointInfo], Sequence[CheckpointInfo], Sequence[str]]:
    """The checkpoints of a storage, the savepoints in the directory, and what there is to say about files of states.

    A single file counts as a checkpoint.
    """
    if url.endswith(SUFFIX):
        try:
            stored, size_bytes = read_url(url)
            return [verified(describe(stored, url, size_bytes), set(), contents=contents)], (), ()
        except CheckpointUnreadable as error:
            return [CheckpointInfo("?", 0, error.file, 0, error.problem)], (), ()
    storage = CheckpointStorage(url)
    savepoints = savepoints_in(url, operator_id)
    left = list(without_savepoint(url))
    if not (savepoints or left or storage.exists()):
        raise StorageError(f"{storage.url}: no application has stored checkpoints or savepoints here; check the path")
    named: dict[str, set[str]] = {}
    checkpoints = [
        verified(info, named.setdefault(folder_of(info), set()), contents=contents)
        for info in storage.list(operator_id)
    ]
    savepoints = [verified(info, set(), contents=contents) for info in savepoints]
    damaged = {folder_of(info) for info in checkpoints if info.problem}
    return checkpoints, savepoints, [*unneeded(storage, named, damaged), *left]


def _as_text(infos: Sequence[CheckpointInfo], *, with_files: bool) -> list[str]:
    """One line for each, and ``with_files`` the file, because two savepoints may have the same operator and id."""
    if not infos:
        return ["no checkpoints"]
    shown = [any(info.files for info in infos) or name not in _OF_FILES for name in _COLUMNS]
    rows = [tuple(compress(row, shown)) for row in (_COLUMNS, *map(_row, infos))]
    rows = [tuple(map(command_line.cell, row)) for row in rows]
    if with_files:
        rows = [(*row, line(file)) for row, file in zip(rows, ("FILE", *(info.file for info in infos)), strict=True)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = [
        "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1])) for row in rows
    ]
    lines += [f"{info.file}: {info.problem}" for info in infos if info.problem]
    return lines


def _row(info: CheckpointInfo) -> tuple[str, ...]:
    known = (info.files, info.file_bytes, info.parallelism, info.subtasks, info.held_events)
    return (
        info.operator_id,
        str(info.checkpoint_id),
        _time(info.created_ms),
        str(info.size_bytes),
        *("-" if figure is None else str(figure) for figure in known),
        "DAMAGED" if info.problem else ", ".join(filter(None, ("void" if info.void else "ok", info.label))),
    )


def _time(created_ms: int | None) -> str:
    if created_ms is None:
        return "-"
    try:
        return datetime.fromtimestamp(created_ms / 1000, UTC).isoformat(" ", "milliseconds")[:-6]
    except (ValueError, OverflowError, OSError):  # the clock was far off
        return f"{created_ms} ms"
