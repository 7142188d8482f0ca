# SPDX-License-Identifier: Apache-2.0

"""One life of the driver, as the user configured it, and the assignment of work to subtasks.

The work is cut into *keys*. Initially, key k belongs to subtask ``k % parallelism``. With each change of parallelism,
it moves with the state of its subtask (H52). So the events of a key have one sender at a time, and a key keeps its
history through every restart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from actors.coordination.engine.inputs import RestoredInput
from protocol.barrier_tracker import CheckpointConfig, CompletedCheckpoint
from protocol.key_groups import KeyGroups
from protocol.parts import split_states
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import RestoreMode, SubtaskState
from protocol.wire.state_handles import KeyGroupRange

OPERATOR = "words"
PARALLELISM_MAX = 4
PART = "@"
"""Begins the text of an event of a part, and no other."""
COUNTS, ITEMS, TEAM = "counts", "items", "team"
LOGS = "logs"
"""The logs of the application are the state of this part if tasks have tables: they do not go with the key groups."""
STAGES = ("source", "transform", "sink")
"""The names of the stages, in the order in which data flows."""
PARTS = (COUNTS, ITEMS, TEAM, LOGS, *STAGES)
"""The names of the parts."""
GROUPS = KeyGroups(5)
ENTRIES = tuple("abcfgjqr")
"""The keys of the tables, some of each group, so that each subtask has some."""
EVENTS_MAX = 8
"""The maximum number of unsettled events of one gateway (H27)."""
CONFIRM_S = 3.0
"""How long an event may stay unconfirmed on a connection."""
RECONNECT_S = 2.0
"""How long an attempt may be without a connection."""
REPORT_S = 0.2
"""A coordinator's method that is awaited for longer is reported (H70)."""
JUMP_S = 2.5
"""By how much the time may jump, as if nothing on the machine had run meanwhile."""
HEARTBEAT_S = 1.0
"""How often a task gives a sign of life, in worlds that want that."""
SILENCE_S = 2.0
"""How long it may be silent there on a connection (H94)."""
UPWARD_EVENTS_MAX = 4
"""The maximum number of events and requests of one attempt on their way to the coordinator (H27)."""


def pack(event: str) -> bytes:
    """Encode an event as it travels."""
    return encode_event(event)


def unpack(payload: bytes, part: str = "") -> str:
    """Return an event of this part as it is noted in records and shown in the story."""
    event = decode_event(payload)
    if part:
        return part_text(part, event)
    assert isinstance(event, str)
    return event


def part_text(part: str, event: Any) -> str:
    return f"{PART}{part} {json.dumps(event, default=repr)}"


def part_in(text: str) -> str:
    """The name of the part that an event in a record is of; empty for the application's own."""
    return text[len(PART) :].partition(" ")[0] if text.startswith(PART) else ""


def own_state(state: bytes) -> bytes:
    """The state without those of the parts."""
    own, of_parts = split_states(state, PARTS)
    return of_parts.get(LOGS, own)


def table_of(state: SubtaskState) -> dict[str, int]:
    """The entries of a table whose groups count in this state."""
    assert state.files is not None
    assert state.files.key_groups is not None
    low, high = state.groups or state.files.key_groups[:2]
    table: dict[str, int] = json.loads(split_states(state.state, PARTS)[0])
    return {entry: count for entry, count in table.items() if low <= GROUPS.of(entry) < high}


def whole_states(states: Iterable[SubtaskState]) -> list[SubtaskState]:
    """These states without pieces of tables, which belong to no old subtask any more."""
    return [state for state in states if state.groups is None]


@dataclass(frozen=True)
class Settings:
    """Settings that hold for all lives of the driver in one world. Probabilities are per chance.

    ``requests``: how likely a message of a subtask is a request. ``stalls``: how likely a method of the coordinator
    is slow. ``inside``: how likely it sends from inside its methods. ``loose``: how likely it sends a loss-tolerant
    event. ``apart``: how likely the barriers travel separately. ``in_snapshot``: how likely a subtask sends from inside
    its snapshot. ``by_notice``: whether the coordinator cleans up what it prepared when it is notified of discarded
    checkpoints; otherwise it asks which checkpoints are in doubt. ``attempts_max``: how often a subtask may be killed
    in one run (H69). ``urgent``: the events of every other key are urgent, and so are some loss-tolerant ones.
    ``heartbeats``: tasks have to give signs of life. ``in_hand``: the operator is a chain with a work queue of which
    each task holds so many items; 0 means that it is not. ``team``: a group is a part of it, "fixed" or "elastic".
    ``stages``: the operator is a chain of stages. ``in_flight``: one of them is an async stage with so many calls at a
    time; 0 means that none is. ``ordered``: its results leave in the order of the records. ``behind_plain``: a plain
    function comes before it. ``files``: tasks store a part of their states themselves (H190). ``tables``: this part
    is a table that counts the events, and goes with its key groups to another parallelism.
    """

    mode: RestoreMode
    keys: int
    checkpoints: CheckpointConfig
    requests: float
    stalls: float
    inside: float
    loose: float
    apart: float
    in_snapshot: float
    by_notice: bool
    copies: bool
    barrier_stage: bool
    attempts_max: int
    urgent: bool = False
    heartbeats: bool = False
    in_hand: int = 0
    team: str = ""
    stages: bool = False
    in_flight: int = 0
    ordered: bool = False
    behind_plain: bool = False
    files: bool = False
    tables: bool = False


@dataclass
class Application:
    """``ways``: the parallelisms that the restored state was cut to; this application's is last.

    ``restore``: what the user requests, "latest" or a file; ``restored``: the checkpoint found for it, once known.
    ``said``: what the user says about the input of its first run.
    """

    settings: Settings
    parallelism: int
    restore: str = "latest"
    ways: tuple[int, ...] = ()
    restored: CompletedCheckpoint | None = None
    said: RestoredInput | None = None

    def __post_init__(self) -> None:
        self.ways = self.ways or (self.parallelism,)

    def become(self, restored: Stored) -> None:
        """Start from this checkpoint."""
        cut = restored.checkpoint.parallelism != self.parallelism
        self.ways = (*restored.ways, self.parallelism) if cut else restored.ways
        self.restored = restored.checkpoint

    @property
    def generation(self) -> int:
        """How often the parallelism has changed; each change restarts the count of positions (H32)."""
        return len(self.ways)

    def keys_of(self, subtask: int) -> list[int]:
        return [key for key in range(self.settings.keys) if self.owner(key) == subtask]

    def groups_of(self, subtask: int) -> KeyGroupRange | None:
        if not self.settings.tables:
            return None
        own = GROUPS.range_of(subtask, self.parallelism)
        return KeyGroupRange(own.start, own.stop, GROUPS.count)

    def entries_of(self, subtask: int) -> list[str]:
        if not self.settings.tables:
            return []
        return [entry for entry in ENTRIES if GROUPS.subtask_of(entry, self.parallelism) == subtask]

    def owner(self, key: int) -> int:
        place = key
        for parallelism in self.ways:
            place %= parallelism
        return place


@dataclass(frozen=True)
class Stored:
    """A durable checkpoint and the parallelisms that its state has passed through."""

    checkpoint: CompletedCheckpoint
    ways: tuple[int, ...]
