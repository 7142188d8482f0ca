"""One checkpoint between its trigger and its end: its phase, its parts, and what is in turn.

A checkpoint N goes through these phases (H40), and is in exactly one of them::

    CLOSING         each running subtask closes its valve and says so
    SNAPSHOTTING    the coordinator snapshots; its return is the cut
    DRAINING        every event sent before the cut is being confirmed (H42)
    ACKNOWLEDGING   barriers are out; each subtask answers with its snapshot
    STORING         the durable write

Each running subtask has a part in it, which only moves forward::

    AWAITING_CLOSE ─► AWAITING_DRAIN ─► AWAITING_ACKNOWLEDGE ─► SETTLED

A phase ends when no part is left in the step that it waits for. A drain may be reported before the
coordinator's snapshot is, because they come on different ways. An acknowledgement cannot come before its
barrier; if it does, the tracker aborts. A subtask that has ended is SETTLED
with its final state, from whatever step: it ends only when its valve holds nothing, and nothing more will be
taken from its mailbox, so there is no drain to wait for (G10).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from protocol.barrier_tracker.vocabulary import (
    CheckpointStored,
    CheckpointStoreFailed,
    CompletedCheckpoint,
    CoordinatorSnapshotFailed,
    CoordinatorSnapshotTaken,
    GatewayDrained,
    SendBarrier,
    SnapshotCoordinator,
    StoreCheckpoint,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    SubtaskSnapshot,
    TrackerEffect,
)
from protocol.errors import LocalProtocolError
from protocol.ids import ExecutionAttempt


class Phase(Enum):
    """Where an operator's one checkpoint is; IDLE when there is none."""

    IDLE = "idle"
    CLOSING = "closing"
    SNAPSHOTTING = "snapshotting"
    DRAINING = "draining"
    ACKNOWLEDGING = "acknowledging"
    STORING = "storing"


class Step(Enum):
    """How far one subtask's part is."""

    AWAITING_CLOSE = 0
    AWAITING_DRAIN = 1
    AWAITING_ACKNOWLEDGE = 2
    SETTLED = 3


# In which phases an input about the pending checkpoint is in turn. Elsewhere it is our own shell's mistake;
# the acknowledgement and the refusal are the peer's, who may send them when it likes: out of turn, they
# abort.
IN_TURN: dict[type, frozenset[Phase]] = {
    SubtaskClosed: frozenset({Phase.CLOSING}),
    CoordinatorSnapshotTaken: frozenset({Phase.SNAPSHOTTING}),
    CoordinatorSnapshotFailed: frozenset({Phase.SNAPSHOTTING}),
    GatewayDrained: frozenset({Phase.SNAPSHOTTING, Phase.DRAINING}),
    SubtaskAcknowledged: frozenset({Phase.ACKNOWLEDGING}),
    SubtaskDeclined: frozenset(Phase) - {Phase.IDLE, Phase.STORING},
    CheckpointStored: frozenset({Phase.STORING}),
    CheckpointStoreFailed: frozenset({Phase.STORING}),
}

# The step at which the part of an attempt must be when the attempt speaks; past it, the input is a
# repetition.
STEP_OF: dict[type, Step] = {
    SubtaskClosed: Step.AWAITING_CLOSE,
    GatewayDrained: Step.AWAITING_DRAIN,
    SubtaskAcknowledged: Step.AWAITING_ACKNOWLEDGE,
    SubtaskDeclined: Step.AWAITING_ACKNOWLEDGE,
}

# Which step a phase waits for.
WAITS_FOR: dict[Phase, Step] = {
    Phase.CLOSING: Step.AWAITING_CLOSE,
    Phase.DRAINING: Step.AWAITING_DRAIN,
    Phase.ACKNOWLEDGING: Step.AWAITING_ACKNOWLEDGE,
}

SubtaskWord = SubtaskClosed | GatewayDrained | SubtaskAcknowledged | SubtaskDeclined
"""What is said of a checkpoint on behalf of one attempt."""

DriverWord = CoordinatorSnapshotTaken | CoordinatorSnapshotFailed | CheckpointStored | CheckpointStoreFailed
"""What the coordinator and the storage say of a checkpoint."""


@dataclass(slots=True)
class Part:
    attempt: ExecutionAttempt
    step: Step = Step.AWAITING_CLOSE
    snapshot: SubtaskSnapshot | None = None

    def settle(self, snapshot: SubtaskSnapshot) -> None:
        self.step, self.snapshot = Step.SETTLED, snapshot


@dataclass(slots=True)
class PendingCheckpoint:
    """See the module. ``at_rest`` is what the subtasks that are not running take part with."""

    checkpoint_id: int
    deadline: float
    parts: dict[int, Part]
    at_rest: dict[int, SubtaskSnapshot]
    phase: Phase = Phase.CLOSING
    coordinator_state: bytes | None = None

    def why_stale(self, input: SubtaskWord | DriverWord) -> str | None:
        """Say why an input about this checkpoint is of the past, or None.

        Raises ``LocalProtocolError`` when it is out of turn by our own side's fault.
        """
        name = type(input).__name__
        if isinstance(input, SubtaskWord):
            part = self.parts.get(input.attempt.subtask)
            if part is None or part.attempt != input.attempt:
                return f"{name} of {input.attempt}, which has no part in checkpoint {input.checkpoint_id}"
            if part.step.value > STEP_OF[type(input)].value:
                return f"{name} of {input.attempt} for checkpoint {input.checkpoint_id}, said before"
        peers_fault = isinstance(input, SubtaskAcknowledged | SubtaskDeclined)
        if self.phase not in IN_TURN[type(input)] and not peers_fault:
            raise LocalProtocolError(f"{name} for checkpoint {input.checkpoint_id}, which is {self.phase.value}")
        return None

    def settled(self) -> bool:
        return all(part.step is Step.SETTLED for part in self.parts.values())

    def advance(self, out: list[TrackerEffect]) -> None:
        """Move on through every phase that has nothing left to wait for."""
        steps = {part.step for part in self.parts.values()}
        if self.phase is Phase.CLOSING and Step.AWAITING_CLOSE not in steps:
            self.phase = Phase.SNAPSHOTTING
            out.append(SnapshotCoordinator(self.checkpoint_id))
        if self.phase is Phase.DRAINING and Step.AWAITING_DRAIN not in steps:
            self.phase = Phase.ACKNOWLEDGING
            out.extend(
                SendBarrier(part.attempt, self.checkpoint_id)
                for part in self.parts.values()
                if part.step is Step.AWAITING_ACKNOWLEDGE
            )
        if self.phase is Phase.ACKNOWLEDGING and self.settled():
            self.phase = Phase.STORING
            out.append(StoreCheckpoint(self.whole()))

    def whole(self) -> CompletedCheckpoint:
        """The checkpoint, once every part is settled."""
        assert self.coordinator_state is not None
        states = dict(self.at_rest)
        for subtask, part in self.parts.items():
            assert part.snapshot is not None
            states[subtask] = part.snapshot
        return CompletedCheckpoint(self.checkpoint_id, self.coordinator_state, dict(sorted(states.items())))

    def waiting_for(self) -> str:
        """Name who keeps the checkpoint waiting, for the reader of a log."""
        match self.phase:
            case Phase.SNAPSHOTTING:
                return "the coordinator has not returned its snapshot"
            case Phase.STORING:
                return "the storage has not written it"
            case Phase.CLOSING:
                what = "not closed"
            case Phase.DRAINING:
                what = "not confirmed every event sent before it"
            case Phase.ACKNOWLEDGING:
                what = "not acknowledged it"
            case Phase.IDLE:
                raise AssertionError("a pending checkpoint is never idle")
            case _:
                assert_never(self.phase)
        late = [str(part.attempt) for part in self.parts.values() if part.step is WAITS_FOR[self.phase]]
        return f"{', '.join(late)}: {what}"

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` when the state is impossible."""
        steps = {part.step for part in self.parts.values()}
        for subtask, part in self.parts.items():
            assert part.attempt.subtask == subtask
            assert (part.snapshot is not None) == (part.step is Step.SETTLED)
        assert not set(self.parts) & set(self.at_rest)
        assert (self.coordinator_state is None) == (self.phase in (Phase.CLOSING, Phase.SNAPSHOTTING))
        if self.phase in WAITS_FOR:
            assert WAITS_FOR[self.phase] in steps, f"{self.phase.value}, and waits for nobody"
        if self.phase is not Phase.CLOSING:
            assert Step.AWAITING_CLOSE not in steps
        if self.phase is Phase.ACKNOWLEDGING:
            assert Step.AWAITING_DRAIN not in steps, "a barrier would overtake an event (H23)"
        if self.phase is Phase.STORING:
            assert steps <= {Step.SETTLED}
