"""One life of the driver, as the user has configured it, and which subtask works at what.

The work is cut into *keys*. At the beginning key k belongs to subtask ``k % parallelism``; with each change of
parallelism it goes where the state of its subtask goes (H52). So events of a key have one sender at a time, and a key
keeps its history through every restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.barrier_tracker import CheckpointConfig, CompletedCheckpoint
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import RestoreMode

OPERATOR = "words"
PARALLELISM_MAX = 4
EVENTS_MAX = 8
"""How many events of one gateway may be unsettled (H27)."""
CONFIRM_S = 3.0
"""How long an event may be unconfirmed on a connection."""
RECONNECT_S = 2.0
"""How long an attempt may be without a connection."""
REPORT_S = 0.2
"""How long a method of the coordinator may be awaited before it is reported (H70)."""
UPWARD_EVENTS_MAX = 4
"""How many events and requests of one attempt may be on their way to the coordinator (H27)."""


def pack(event: str) -> bytes:
    """An event as it travels."""
    return encode_event(event)


def unpack(payload: bytes) -> str:
    event = decode_event(payload)
    assert isinstance(event, str)
    return event


@dataclass(frozen=True)
class Settings:
    """What holds for all lives of the driver in one world. Probabilities are per chance.

    ``requests``: how likely what a subtask sends wants an answer. ``stalls``: how likely a method of the coordinator
    takes its time. ``inside``: how likely it sends from inside its methods. ``loose``: how likely a loss-tolerant
    event is sent. ``apart``: how likely the barriers go their own way. ``in_snapshot``: how likely a subtask sends
    from inside its snapshot. ``by_notice``: whether the coordinator cleans up what it prepared as it is told that
    checkpoints are discarded; otherwise it asks which ones are in doubt. ``attempts_max``: how often a subtask may be
    killed in one run (H69).
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


@dataclass
class Application:
    """``ways``: the parallelisms that the restored state has been cut to, this one last.

    ``restore``: what the user says, "latest" or a file; ``restored``: what came of it, once that is known.
    """

    settings: Settings
    parallelism: int
    restore: str = "latest"
    ways: tuple[int, ...] = ()
    restored: CompletedCheckpoint | None = None

    def __post_init__(self) -> None:
        self.ways = self.ways or (self.parallelism,)

    def become(self, restored: Stored) -> None:
        """This is what it starts from."""
        cut = restored.checkpoint.parallelism != self.parallelism
        self.ways = (*restored.ways, self.parallelism) if cut else restored.ways
        self.restored = restored.checkpoint

    @property
    def generation(self) -> int:
        """How often the parallelism has changed; positions are counted anew with each change (H32)."""
        return len(self.ways)

    def keys_of(self, subtask: int) -> list[int]:
        return [key for key in range(self.settings.keys) if self.owner(key) == subtask]

    def owner(self, key: int) -> int:
        place = key
        for parallelism in self.ways:
            place %= parallelism
        return place


@dataclass(frozen=True)
class Stored:
    """A checkpoint that is durable, and the ways that its state has come."""

    checkpoint: CompletedCheckpoint
    ways: tuple[int, ...]
