# SPDX-License-Identifier: Apache-2.0

"""A driver for one barrier tracker: the tests of ``protocol.barrier_tracker`` read as inputs and replies."""

from __future__ import annotations

from collections.abc import Sequence

from protocol import barrier_tracker as t
from protocol.attempts import AttemptAccepted, FailureKind, FailureReason, SubtaskReady
from protocol.barrier_tracker.tracker import BarrierTracker
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.wire.messages import HeldEvent, Positions, RestoreMode, SubtaskState

FAILED = FailureReason(FailureKind.FAILED, "it broke")


def attempt_of(subtask: int, number: int = 0) -> ExecutionAttempt:
    return ExecutionAttempt("words", subtask, number, 100 * (number + 1) + subtask)


A, B = attempt_of(0), attempt_of(1)
A2, B2 = attempt_of(0, 1), attempt_of(1, 1)


def held_by(attempt: ExecutionAttempt) -> tuple[HeldEvent, ...]:
    """The events that the valves hold in every acknowledgement of a ``Dialogue``."""
    return (HeldEvent(attempt.subtask, b"held"),)


def snapshot_of(subtask: int, state: bytes, *held: bytes, events_sent: Positions = ()) -> t.SubtaskSnapshot:
    """The default checkpoint part of a subtask: its own state and its own events."""
    events = tuple(HeldEvent(subtask, payload) for payload in held)
    return t.SubtaskSnapshot((SubtaskState(subtask, state),), events, events_sent)


def accepted(attempt: ExecutionAttempt, mode: RestoreMode = RestoreMode.STREAMING) -> AttemptAccepted:
    return AttemptAccepted(attempt, mode, run_id=7, connection_id=attempt.task_attempt_id)


class Dialogue:
    """A tracker whose invariants are checked after every input, with a clock that only the test advances."""

    def __init__(
        self,
        parallelism: int = 2,
        *,
        tolerated_failures: int = 0,
        mode: RestoreMode = RestoreMode.STREAMING,
        restored: t.CompletedCheckpoint | None = None,
        interval_s: float | None = None,
        min_pause_s: float = 0.0,
        concurrent_max: int = 1,
    ) -> None:
        config = t.CheckpointConfig(10.0, tolerated_failures, mode, interval_s, min_pause_s, concurrent_max)
        self.mode = mode
        self.now = 0.0
        self.tracker = BarrierTracker("words", parallelism, config, restored)

    def tell(self, *inputs: t.TrackerInput) -> list[t.TrackerEffect]:
        out: list[t.TrackerEffect] = []
        for input in inputs:
            out.extend(self.tracker.handle(input, self.now))
            self.tracker.check_invariants()
        return out

    def run(self, *attempts: ExecutionAttempt) -> Dialogue:
        for attempt in attempts:
            self.tell(accepted(attempt, self.mode), SubtaskReady(attempt))
        return self

    def close(
        self, checkpoint_id: int, *attempts: ExecutionAttempt, savepoint: bool = False, counts: bool = True
    ) -> Dialogue:
        self.tell(t.CheckpointTriggered(checkpoint_id, savepoint, counts=counts))
        self.tell(*(t.SubtaskClosed(attempt, checkpoint_id) for attempt in attempts))
        return self

    def cut(self, checkpoint_id: int, *attempts: ExecutionAttempt, savepoint: bool = False) -> Dialogue:
        """Run a checkpoint up to the barriers."""
        self.close(checkpoint_id, *attempts, savepoint=savepoint)
        self.tell(t.CoordinatorSnapshotTaken(checkpoint_id, b"coordinator %d" % checkpoint_id))
        return self

    def acknowledge(self, checkpoint_id: int, *attempts: ExecutionAttempt) -> list[t.TrackerEffect]:
        return self.tell(
            *(
                t.SubtaskAcknowledged(
                    attempt, checkpoint_id, b"%d at %d" % (attempt.subtask, checkpoint_id), held_by(attempt)
                )
                for attempt in attempts
            )
        )

    def store(self, checkpoint_id: int, *attempts: ExecutionAttempt, savepoint: bool = False) -> Dialogue:
        """Run a checkpoint up to the durable write."""
        self.cut(checkpoint_id, *attempts, savepoint=savepoint).acknowledge(checkpoint_id, *attempts)
        return self

    def complete(self, checkpoint_id: int, *attempts: ExecutionAttempt) -> list[t.TrackerEffect]:
        self.store(checkpoint_id, *attempts)
        return self.tell(t.CheckpointStored(checkpoint_id))

    def wait(self, seconds: float) -> list[t.TrackerEffect]:
        self.now += seconds
        return self.tell(TimePassed())


def kinds(effects: Sequence[t.TrackerEffect]) -> list[type]:
    return [type(effect) for effect in effects]


def stored(effects: Sequence[t.TrackerEffect]) -> t.CompletedCheckpoint:
    """The checkpoint of the only pending durable write."""
    [effect] = effects
    assert isinstance(effect, t.StoreCheckpoint)
    return effect.checkpoint
