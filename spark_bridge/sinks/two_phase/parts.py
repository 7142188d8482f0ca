# SPDX-License-Identifier: Apache-2.0

"""What a writer prepares, and the event that lists it.

A *part* is what a writer prepares as one: a file, a prepared transaction, or rows in a staging table. A part has one
name for all of its life, in the target system too. So a committer recognises what it has committed before, and finds
what nobody will commit.

The name contains what the clean-up needs: ``part-s00003-e0000000015-a00002-TOKEN-000000.jsonl`` belongs to subtask 3.
It was begun in epoch 15 (after checkpoint 14; epoch 0 is the beginning) by the subtask's attempt 2. A token identifies
the writer, and this is the writer's part number 0. In the order of their names, the parts of a subtask are
in the order of their rows.

Any task can see the names of all parts, and must not have those of others committed. So the token is the hash of a
random secret, the writer's *proof*. A list of prepared parts contains the proof, and names only parts with its token.
Only the writer has the proof, and an attempt that restores a snapshot which holds its list. The list travels with the
snapshot to the next attempt, to another application, and to another subtask if the parallelism changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple, Self

from protocol.arguments import ID, checked
from protocol.describing import show
from protocol.errors import RemoteProtocolError
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from spark_bridge.sinks.two_phase.errors import SinkMisused

_PREPARED = "headgate/prepared"
PARTS_PER_EVENT = 1000  # about 100 bytes each
NAME_CHARS_MAX = 255

_NAME = re.compile(
    r"(?P<prefix>[^/\x00-\x1f]+)-s(?P<subtask>[0-9]{5,18})-e(?P<epoch>[0-9]{10,18})-a(?P<attempt>[0-9]{5,18})"
    r"-(?P<token>[0-9a-f]{32})-(?P<number>[0-9]{6,18})(?P<suffix>(\.[^/\x00-\x1f]*)?)"
)


def token_of(proof: str) -> str:
    """The token in the names of the parts of the writer that has this proof."""
    return sha256(f"headgate part {proof}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class PartName:
    """The name of a part; see the module. ``after`` is the checkpoint before the part, -1 for the beginning."""

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
    @lru_cache(2 * PARTS_PER_EVENT)  # those of one list are looked at several times
    def parse(cls, name: str) -> PartName | None:
        """Parse ``name``; None if it is not the name of a part."""
        match = _NAME.fullmatch(name) if len(name) <= NAME_CHARS_MAX else None
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


class _Committable(NamedTuple):
    name: str
    payload: Any = None
    checkpoint_id: int = VIRTUAL_EMPTY_CHECKPOINT


class Committable(_Committable):
    """One prepared part: what a writer hands to the committer, through the checkpoint.

    Attributes:
        name: the part's name in the target, from ``SinkWriterContext.next_name``.
        payload: what the committer needs to know about the part; any value that JSON can hold.
        checkpoint_id: the snapshot that the part was prepared for; -1 for the end of the operator. The operator sets
            it.
    """

    __slots__ = ()

    @checked(checkpoint_id=ID)
    def __new__(cls, name: str, payload: Any = None, checkpoint_id: int = VIRTUAL_EMPTY_CHECKPOINT) -> Self:
        return super().__new__(cls, name, payload, checkpoint_id)

    @property
    def prepared_at_end(self) -> bool:
        """Whether the operator had ended, so that no snapshot was being taken."""
        return self.checkpoint_id == VIRTUAL_EMPTY_CHECKPOINT

    @property
    def part(self) -> PartName:
        """The parsed name. Raises ``ValueError`` if it is not the name of a part."""
        part = PartName.parse(self.name)
        if part is None:
            raise ValueError(
                f"{show(self.name)} is not the name of a part: take names from SinkWriterContext.next_name"
            )
        return part

    @property
    def writer(self) -> str:
        """Identifies the writer. It is another one for each execution attempt."""
        return self.part.token

    @property
    def number(self) -> int:
        """The number of the part among those of its writer, which are committed in the order of their numbers."""
        return self.part.number


class PreparedList(NamedTuple):
    """What one event lists. ``last``: no other event belongs to the same snapshot."""

    checkpoint_id: int
    last: bool
    committables: tuple[Committable, ...]


def prepared_events(
    sink: str, target: str, proof: str, checkpoint_id: int, committables: Iterable[Committable], *, always: bool = False
) -> Iterator[list[Any]]:
    """The list of ``committables`` as events: usually one, several if there are many.

    ``sink`` is the sink's name and ``target`` says where its rows go, which the other end compares with its own.
    ``proof`` is the writer's, and shows that these parts are its own. ``always``: also one event for an empty list.
    """
    rest = iter(committables)
    batch = [[entry.name, entry.payload] for entry in islice(rest, PARTS_PER_EVENT)]
    while batch or always:
        following = [[entry.name, entry.payload] for entry in islice(rest, PARTS_PER_EVENT)]
        yield [_PREPARED, sink, target, proof, checkpoint_id, not following, batch]
        batch, always = following, False


def parse_prepared(sink: str, target: str, event: Any) -> PreparedList | None:
    """What ``event`` lists, or None if it is an event of another kind or another sink.

    Raises:
        SinkMisused: the parts are in another target, or one was not prepared by the writer of the list.
        ValueError: the list is malformed.
        RemoteProtocolError: no task of ours sends a list that is so long.
    """
    match event:
        case [str(tag), str(name), str(place), str(proof), int(checkpoint_id), bool(last), list(entries)] if (
            tag == _PREPARED and name == sink
        ):
            if place != target:
                raise SinkMisused(
                    f"sink {sink!r}: a subtask writes to {place}, but its coordinator commits to {target}: give both "
                    "the same target, such as the same URL. A checkpoint can only be restored with the target that it "
                    "was taken with"
                )
            if len(entries) > PARTS_PER_EVENT:
                raise RemoteProtocolError(f"a list of {len(entries)} parts, and one has at most {PARTS_PER_EVENT}")
            whole = [[*entry, checkpoint_id] if isinstance(entry, list) else entry for entry in entries]
            committables, token = committables_from(whole), token_of(proof)
            for committable in committables:
                if committable.part.token != token:
                    raise SinkMisused(
                        f"a task lists {committable.name}, which another writer wrote: a task can only list the parts "
                        "that it wrote itself, and those in the state that it restored"
                    )
            return PreparedList(checkpoint_id, last, committables)
        case _:
            return None


def committables_from(entries: Sequence[Any]) -> tuple[Committable, ...]:
    """Read committables from plain lists. Raises ``ValueError`` for anything else."""
    committables = []
    for entry in entries:
        match entry:
            case [str(name), payload, int(checkpoint_id)] if PartName.parse(name) and (
                type(checkpoint_id) is int and VIRTUAL_EMPTY_CHECKPOINT <= checkpoint_id < 2**63
            ):  # that is all that the constructor looks at, which takes long
                committables.append(_Committable.__new__(Committable, name, payload, checkpoint_id))
            case _:
                raise ValueError(f"not a prepared part: {show(entry)}: list what prepare() has returned")
    return tuple(committables)
