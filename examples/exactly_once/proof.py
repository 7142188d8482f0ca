# SPDX-License-Identifier: Apache-2.0

"""Verify from a run's files that every number was sent exactly once and in order.

The job's own reports do not count. The newest checkpoint says what both sides know: it is the final one, taken when
all subtasks had ended. The visible part files show what a reader of the sink sees.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import fsspec

from examples.exactly_once.pipeline import OPERATOR_ID, Position, read_state
from headgate import CheckpointStorage
from headgate.errors import StorageError
from headgate.types import CompletedCheckpoint

DIRECTIONS = ("down", "up")
PROBLEMS_SHOWN = 10


class Side(NamedTuple):
    """One row of the table: how many numbers of one subtask each place knows. All must be the same."""

    subtask: int
    sent_down: int
    received_down: int
    sink_down: int
    sent_up: int
    received_up: int
    sink_up: int


class Proof(NamedTuple):
    """The result of the proof: it holds if there are no problems."""

    rows: list[Side]
    files: int
    checkpoint_id: int
    problems: list[str]


def prove(storage_url: str, sink_url: str, numbers: int, parallelism: int) -> Proof:
    """Read the files of the run, and compare them with 1 to ``numbers`` for each subtask and direction."""
    try:
        checkpoint = CheckpointStorage(storage_url).latest(OPERATOR_ID)
    except StorageError as error:
        return Proof([], 0, -1, [str(error)])
    if checkpoint is None:
        return Proof([], 0, -1, ["there is no checkpoint"])
    files = list(visible_files(sink_url))
    return judge(checkpoint, files, numbers, parallelism)


def judge(checkpoint: CompletedCheckpoint, files: Iterable[tuple[str, str]], numbers: int, parallelism: int) -> Proof:
    """``files`` are the names and contents of the visible files."""
    files = sorted(files)
    problems: list[str] = []
    written = numbers_written(files, problems)
    positions, _ = read_state(checkpoint.coordinator_state)
    rows = []
    for subtask in range(parallelism):
        known = positions.get(subtask, Position())
        sent, received = subtask_state(checkpoint, subtask)
        down, up = (written.pop((subtask, direction), []) for direction in DIRECTIONS)
        rows.append(Side(subtask, known.sent, received, len(down), sent, known.received, len(up)))
        if len({numbers, *rows[-1][1:]}) > 1:
            problems.append(f"subtask {subtask}: not all of the two sides and the sink are at {numbers}")
        problems.extend(f"subtask {subtask}: {text}" for text in differences("down", down, numbers))
        problems.extend(f"subtask {subtask}: {text}" for text in differences("up", up, numbers))
    problems.extend(f"the sink has rows of subtask {subtask}, {direction}" for subtask, direction in written)
    return Proof(rows, len(files), checkpoint.checkpoint_id, problems)


def subtask_state(checkpoint: CompletedCheckpoint, subtask: int) -> tuple[int, int]:
    """How many numbers the subtask has sent and received."""
    snapshot = checkpoint.subtask_states.get(subtask)
    if snapshot is None or len(snapshot.states) != 1:
        return 0, 0
    sent, received = json.loads(snapshot.states[0].state)
    return sent, received


def numbers_written(files: Iterable[tuple[str, str]], problems: list[str]) -> dict[tuple[int, str], list[int]]:
    """(subtask, direction) -> the numbers, in the order of the files and of the rows in them."""
    written: dict[tuple[int, str], list[int]] = {}
    for name, content in files:
        if not content.endswith("\n"):
            problems.append(f"{name} ends in the middle of a row")
        for row in content.splitlines():
            match row.split():
                case [subtask, ("down" | "up") as direction, number] if subtask.isdigit() and number.isdigit():
                    written.setdefault((int(subtask), direction), []).append(int(number))
                case _:
                    problems.append(f"{name} has a row that nobody wrote: {row!r}")
    return written


def differences(direction: str, found: list[int], numbers: int) -> Iterator[str]:
    """The errors among the numbers in the sink, in words; empty if they are 1 to ``numbers`` in order."""
    expected = range(1, numbers + 1)
    missing = sorted(set(expected) - set(found))
    doubled = sorted(number for number, times in Counter(found).items() if times > 1)
    if missing:
        yield f"{direction}: {len(missing)} numbers are missing in the sink, {some(missing)}"
    if doubled:
        yield f"{direction}: {len(doubled)} numbers are doubled in the sink, {some(doubled)}"
    if not missing and not doubled and found != list(expected):
        yield f"{direction}: the numbers in the sink are out of order"


def some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:PROBLEMS_SHOWN])) + (" ..." if len(numbers) > PROBLEMS_SHOWN else "")


def visible_files(url: str) -> Iterator[tuple[str, str]]:
    """Name and content of every file that a reader sees: names that begin with a dot or an underscore are hidden."""
    filesystem, root = fsspec.core.url_to_fs(url)
    for path in filesystem.find(root):
        name = path[len(root) :].strip("/")
        if not any(part.startswith((".", "_")) for part in name.split("/")):
            yield name, filesystem.cat_file(path).decode()


def table(proof: Proof) -> str:
    """Print the proof."""
    heads = ("subtask", "sent down", "received", "in the sink", "sent up", "received", "in the sink")
    lines = ["  ".join(f"{head:>11}" for head in heads)]
    lines += ["  ".join(f"{figure:>11}" for figure in row) for row in proof.rows]
    return "\n".join(lines)
