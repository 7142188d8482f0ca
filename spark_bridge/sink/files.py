# SPDX-License-Identifier: Apache-2.0

"""The names of part files, and the event that lists what a subtask has sealed.

A part file never changes its name: it is written, sealed and listed in the staging directory, and published in the
sink's directory under the same name. So publishing is one move, and a repetition notices that it was already done.

The name contains what the clean-up needs: ``part-s00003-e0000000015-a00002-TOKEN-000000.jsonl`` belongs to subtask 3.
It was begun in epoch 15 (after checkpoint 14; epoch 0 is the beginning) by the subtask's attempt 2. A token identifies
the writer, and this is the writer's file number 0. Sorted by name, the files of a subtask are in the order of their
rows.

Any task can see the names of all parts, and must not have those of others published. So the token is the hash of a
random secret, the writer's *proof*. A list of sealed files contains the proof, and names only files with its token.
Only the writer has the proof, and an attempt that restores a snapshot which holds its list. The list travels with the
snapshot to the next attempt, to another application, and to another subtask if the parallelism changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple

from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from spark_bridge.sink.errors import SinkMisused

__all__ = ["PartName", "SealedFile", "parse_sealed_event", "sealed_events"]

_SEALED = "headgate/sealed-files"
FILES_PER_EVENT = 1000  # about 100 bytes each

_NAME = re.compile(
    r"(?P<prefix>[^/]+)-s(?P<subtask>\d{5,})-e(?P<epoch>\d{10,})-a(?P<attempt>\d{5,})-(?P<token>[0-9a-f]{32})"
    r"-(?P<number>\d{6,})(?P<suffix>(\.[^/]*)?)"
)


def token_of(proof: str) -> str:
    """The token in the names of the parts of the writer that has this proof."""
    return sha256(f"headgate part {proof}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class PartName:
    """The name of a part file; see the module. ``after`` is the checkpoint before the file, -1 for the beginning."""

    subtask: int
    after: int
    attempt: int
    token: str
    number: int
    prefix: str = "part"
    suffix: str = ""

    def __str__(self) -> str:
        return (
            f"{self.prefix}-s{self.subtask:05d}-e{self.after + 1:010d}-a{self.attempt:05d}-{self.token}"
            f"-{self.number:06d}{self.suffix}"
        )

    @classmethod
    def parse(cls, name: str) -> PartName | None:
        """Parse ``name``; None if it is not the name of a part file."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(
            subtask=int(match["subtask"]),
            after=int(match["epoch"]) - 1,
            attempt=int(match["attempt"]),
            token=match["token"],
            number=int(match["number"]),
            prefix=match["prefix"],
            suffix=match["suffix"],
        )


class SealedFile(NamedTuple):
    """A complete part file. ``checkpoint_id`` is the snapshot that sealed it, -1 for the end of the operator."""

    name: str
    rows: int
    size_bytes: int
    checkpoint_id: int

    @property
    def sealed_at_end(self) -> bool:
        """Whether the operator had ended, so that no snapshot was being taken."""
        return self.checkpoint_id == VIRTUAL_EMPTY_CHECKPOINT

    @property
    def part(self) -> PartName:
        """The parsed name. Raises ``ValueError`` if it is not the name of a part file."""
        part = PartName.parse(self.name)
        if part is None:
            raise ValueError(f"{self.name!r} is not the name of a part file")
        return part


def check_affixes(prefix: str, suffix: str) -> None:
    """Raise ``SinkMisused`` for an affix that would hide the published files, or make their names ambiguous."""
    if not prefix or "/" in prefix or prefix[0] in "._":
        raise SinkMisused(f"prefix {prefix!r} must not be empty, contain a slash, or begin with a dot or an underscore")
    if "/" in suffix or (suffix and suffix[0] != "."):
        raise SinkMisused(f"suffix {suffix!r} must be empty or begin with a dot, and must not contain a slash")


def sealed_events(sink: str, directory: str, proof: str, files: Iterable[SealedFile]) -> Iterator[list[Any]]:
    """The list of ``files`` as events: usually one, none if there are no files, several if there are many.

    ``sink`` is the sink's name and ``directory`` its full address, which the other end compares with its own. ``proof``
    is the writer's, and shows that it wrote these files.
    """
    rest = iter(files)
    while batch := [list(file) for file in islice(rest, FILES_PER_EVENT)]:
        yield [_SEALED, sink, directory, proof, batch]


def parse_sealed_event(sink: str, directory: str, event: Any) -> tuple[SealedFile, ...] | None:
    """The files that ``event`` lists, or None if it is an event of another kind or another sink.

    Raises:
        SinkMisused: the files are in another directory, or one was not written by the writer of the list.
        ValueError: the list is malformed.
    """
    match event:
        case [tag, name, str(place), str(proof), list(entries)] if tag == _SEALED and name == sink:
            if place != directory:
                raise SinkMisused(
                    f"sink {sink!r}: a subtask sealed files in {place}, but its coordinator publishes {directory}: "
                    "give both the same URL. A checkpoint can only be restored with the URL that it was taken with"
                )
            return _written_with(proof, files_from(entries))
        case _:
            return None


def _written_with(proof: str, files: tuple[SealedFile, ...]) -> tuple[SealedFile, ...]:
    token = token_of(proof)
    for file in files:
        if file.part.token != token:
            raise SinkMisused(
                f"a task lists {file.name}, which another writer wrote: a task can only list the files of its own "
                "SinkWriter, and those in the state that it restored"
            )
    return files


def files_from(entries: Sequence[Any]) -> tuple[SealedFile, ...]:
    """Read files from plain lists. Raises ``ValueError`` for anything else."""
    files = []
    for entry in entries:
        match entry:
            case [str(name), int(rows), int(size), int(checkpoint_id)] if PartName.parse(name) is not None:
                files.append(SealedFile(name, rows, size, checkpoint_id))
            case _:
                raise ValueError(f"not a sealed file: {entry!r}")
    return tuple(files)
