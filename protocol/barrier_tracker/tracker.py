"""One operator's checkpoints, and the order of everything that its coordinator is told.

Every decision of the attempt ledger passes through this machine on its way to the coordinator, so it alone
orders failures and resets against checkpoints. At most one checkpoint is under way (H43)::

    IDLE ── trigger ──► CLOSING ► SNAPSHOTTING ► DRAINING ► ACKNOWLEDGING ► STORING ── complete ──► IDLE
                           └──────────────┴────────── abort ┴───────────────────┘

**Who takes part** is settled at the start. A subtask whose attempt is ready takes part step by step
(``pending``). One that has finished, or finishes meanwhile, takes part with its final state. One that is
not running takes part with what its next attempt would restore, which is nothing where nothing was ever
restored (H47): the coordinator has exchanged no event with it since. To keep that true, an attempt that
becomes ready while the others are closing is *withheld*: the coordinator hears of it behind the request for
its own snapshot, so whatever passes between them is after the cut. A subtask with two ready attempts has no
single state; while there are two (H13), checkpoints are refused.

**Abort** is by id (H44). An attempt that fails, a reset and the end of a run abort what is pending, in the
same list of effects and ahead of what they tell (H16); they do not count as failures of the checkpoint. A
timeout, a refusal, an exception of the coordinator and the storage do (H45). A checkpoint that is aborted
while it is being stored is taken back from the storage, so that no restart finds one of which both sides
were told it is aborted.

**A request** that comes while a checkpoint is pending waits, at most one. So does one that comes while a
reset is owed (a subtask has failed and is not yet reset): the coordinator's view of that subtask is of the
past. A request that waits longer than ``timeout_s`` is refused. Each request is answered by one of
complete, abort and refuse.

**Restores.** In batch mode Spark owns the output, so a retry restarts from nothing, -1, whatever was
completed. In streaming mode it restores the last checkpoint whose completion the coordinator *was told*:
``CompleteCheckpoint`` and the id in a ``TellReset`` come in one ordered sequence of effects, so they cannot
cross (H18).

**The order of effects is part of the contract**: carry them out one after the other, and hand on those for
the coordinator through one ordered mailbox, which also takes the events of its subtasks.
``AbortCheckpoint`` stands before ``TellFailed``, ``TellReset``, ``TellResetToCheckpoint`` and
``TellRunEnded`` (H16); ``SnapshotCoordinator`` before the ``TellReady`` of withheld attempts;
``CompleteCheckpoint`` before the next ``CloseSubtask``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.barrier_tracker.pending import IN_TURN, Part, PendingCheckpoint, Phase, Step
from protocol.barrier_tracker.vocabulary import (
    AbortCheckpoint,
    AbortRequested,
    AttemptAccepted,
    AttemptFailed,
    AttemptFinished,
    AttemptReady,
    CheckpointConfig,
    CheckpointStored,
    CheckpointStoreFailed,
    CheckpointTriggered,
    CloseSubtask,
    CompleteCheckpoint,
    CompletedCheckpoint,
    CoordinatorSnapshotFailed,
    CoordinatorSnapshotTaken,
    DiscardCheckpoint,
    GatewayDrained,
    OperatorResetRequired,
    RaiseGlobalFailure,
    RefuseCheckpoint,
    ReopenSubtask,
    ReportStale,
    RestoreAttempt,
    RunEnded,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    SubtaskFinalState,
    SubtaskResetRequired,
    SubtaskSnapshot,
    TellFailed,
    TellReady,
    TellReset,
    TellResetToCheckpoint,
    TellRunEnded,
    TrackerEffect,
    TrackerInput,
)
from protocol.errors import LocalProtocolError
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT, ExecutionAttempt
from protocol.machine import TimePassed
from protocol.messages import RestoreMode


@dataclass(slots=True)
class _Attempt:
    """An attempt that is not over: accepted, then ready, then perhaps finished, a success that may be
    revoked.
    """

    attempt: ExecutionAttempt
    ready: bool = False
    finished: bool = False
    final_state: bytes | None = None


class BarrierTracker:
    """See the module. Pure; one per operator.

    ``restored`` is the checkpoint that this application starts from; the shell has told the coordinator of
    it by ``reset_to_checkpoint`` before ``start`` (H52). Raises ``LocalProtocolError`` when ``parallelism``
    has no room for a subtask in it.
    """

    def __init__(
        self,
        operator_id: str,
        parallelism: int,
        config: CheckpointConfig,
        restored: CompletedCheckpoint | None = None,
    ) -> None:
        if parallelism < 1:
            raise LocalProtocolError(f"operator {operator_id!r}: parallelism {parallelism} must be 1 or more")
        if restored is not None and not set(restored.subtask_states) <= set(range(parallelism)):
            raise LocalProtocolError(
                f"operator {operator_id!r}: checkpoint {restored.checkpoint_id} holds subtask"
                f" {max(restored.subtask_states)}, but its parallelism is {parallelism}"
            )
        self._operator_id = operator_id
        self._parallelism = parallelism
        self._config = config
        self._mode = config.mode
        self._completed = restored
        self._highest_id = VIRTUAL_EMPTY_CHECKPOINT if restored is None else restored.checkpoint_id
        self._attempts: dict[int, _Attempt] = {}
        self._pending: PendingCheckpoint | None = None
        self._queued: tuple[int, float] | None = None  # id, deadline
        self._withheld: list[ExecutionAttempt] = []
        self._resets_owed: set[int] = set()
        self._operator_reset_owed = False
        self._failures = 0

    @property
    def phase(self) -> Phase:
        return Phase.IDLE if self._pending is None else self._pending.phase

    @property
    def pending_id(self) -> int | None:
        return None if self._pending is None else self._pending.checkpoint_id

    @property
    def restore_id(self) -> int:
        """The checkpoint that a reset refers to at this moment, -1 for none (H18)."""
        point = self._restore_point()
        return VIRTUAL_EMPTY_CHECKPOINT if point is None else point.checkpoint_id

    def next_deadline(self) -> float | None:
        """When ``TimePassed`` is due at the latest."""
        deadlines = [] if self._pending is None else [self._pending.deadline]
        if self._queued is not None:
            deadlines.append(self._queued[1])
        return min(deadlines, default=None)

    def handle(self, input: TrackerInput, now: float) -> list[TrackerEffect]:
        """Take a fact in, return what to do, in order. ``now`` is in seconds, of a monotonic clock.

        Raises ``LocalProtocolError``, with nothing changed, for what our own side may not say at this point.
        """
        stale = self._why_stale(input)
        if stale is not None:
            return [ReportStale(stale)]
        out: list[TrackerEffect] = []
        _HANDLERS[type(input)](self, input, now, out)
        self._start_queued(now, out)
        return out

    # --- staleness and turn, once for all ---

    def _why_stale(self, input: TrackerInput) -> str | None:
        """Say why the input is of the past, or None; raise when it is out of turn by our own fault."""
        name = type(input).__name__
        match input:
            case AttemptReady(attempt) | AttemptFinished(attempt) | SubtaskFinalState(attempt, _):
                return self._why_not_news(input, self._attempts.get(attempt.task_attempt_id))
            case AttemptAccepted(attempt, _):
                if attempt.task_attempt_id in self._attempts or not 0 <= attempt.subtask < self._parallelism:
                    raise LocalProtocolError(f"{attempt} was accepted before, or has no place")
                return None
            case CheckpointTriggered(checkpoint_id):
                if checkpoint_id <= self._highest_id:
                    raise LocalProtocolError(f"checkpoint ids rise: {checkpoint_id} after {self._highest_id} (H4)")
                return None
            case (
                SubtaskClosed()
                | GatewayDrained()
                | SubtaskAcknowledged()
                | SubtaskDeclined()
                | CoordinatorSnapshotTaken()
                | CoordinatorSnapshotFailed()
                | CheckpointStored()
                | CheckpointStoreFailed()
            ):
                if self._pending is None or self._pending.checkpoint_id != input.checkpoint_id:
                    return f"{name} for checkpoint {input.checkpoint_id}, which is not pending"
                return self._pending.why_stale(input)
            case AbortRequested(checkpoint_id, _):
                queued_id = None if self._queued is None else self._queued[0]
                known = checkpoint_id in (self.pending_id, queued_id)
                return None if known else f"{name} for checkpoint {checkpoint_id}, which is not pending"
            case _:
                return None

    def _why_not_news(
        self, input: AttemptReady | AttemptFinished | SubtaskFinalState, known: _Attempt | None
    ) -> str | None:
        if known is None:
            return f"{type(input).__name__} of {input.attempt}, which is over or unknown"
        repeated = {
            AttemptReady: known.ready,
            AttemptFinished: known.finished,
            SubtaskFinalState: known.final_state is not None,
        }[type(input)]
        return f"{type(input).__name__} of {input.attempt}, said before" if repeated else None

    # --- requests ---

    def _trigger(self, input: CheckpointTriggered, now: float, out: list[TrackerEffect]) -> None:
        self._highest_id = input.checkpoint_id
        if self._queued is not None:
            reason = f"checkpoint {self._queued[0]} waits already, and only one may (H43)"
            out.append(RefuseCheckpoint(input.checkpoint_id, reason))
            return
        self._queued = (input.checkpoint_id, now + self._config.timeout_s)

    def _abort_requested(self, input: AbortRequested, now: float, out: list[TrackerEffect]) -> None:
        if input.checkpoint_id == self.pending_id:
            self._abort(input.reason, out)
        else:
            self._refuse_queued(input.reason, out)

    def _time_passed(self, input: TimePassed, now: float, out: list[TrackerEffect]) -> None:
        timeout_s = self._config.timeout_s
        if self._queued is not None and self._queued[1] <= now:
            self._refuse_queued(f"could not start within {timeout_s:g} s: {self._obstacle()}", out)
        if self._pending is not None and self._pending.deadline <= now:
            reason = f"not complete within {timeout_s:g} s: {self._pending.waiting_for()}"
            self._abort(reason, out, counted=True)

    def _refuse_queued(self, reason: str, out: list[TrackerEffect]) -> None:
        if self._queued is not None:
            out.append(RefuseCheckpoint(self._queued[0], reason))
            self._queued = None

    # --- what the ledger decided ---

    def _accepted(self, input: AttemptAccepted, now: float, out: list[TrackerEffect]) -> None:
        attempt = input.attempt
        self._mode = RestoreMode(input.mode)
        self._attempts[attempt.task_attempt_id] = _Attempt(attempt)
        point = self._restore_point()
        snapshot = None if point is None else point.subtask_states.get(attempt.subtask)
        if snapshot is None:
            out.append(RestoreAttempt(attempt, self.restore_id, None, ()))
        else:
            out.append(RestoreAttempt(attempt, self.restore_id, snapshot.state, snapshot.held))

    def _ready(self, input: AttemptReady, now: float, out: list[TrackerEffect]) -> None:
        self._attempts[input.attempt.task_attempt_id].ready = True
        if self.phase is Phase.CLOSING:
            self._withheld.append(input.attempt)
        else:
            out.append(TellReady(input.attempt))

    def _failed(self, input: AttemptFailed, now: float, out: list[TrackerEffect]) -> None:
        attempt = input.attempt
        known = self._attempts.pop(attempt.task_attempt_id, None)
        if attempt in self._withheld:
            self._withheld.remove(attempt)  # it was never announced, and never will be (H11)
        self._abort(f"{attempt}: {input.reason}", out)
        out.append(TellFailed(attempt, input.reason))
        if known is not None and not self._of_subtask(attempt.subtask):
            self._resets_owed.add(attempt.subtask)

    def _finished(self, input: AttemptFinished, now: float, out: list[TrackerEffect]) -> None:
        self._attempts[input.attempt.task_attempt_id].finished = True

    def _subtask_reset(self, input: SubtaskResetRequired, now: float, out: list[TrackerEffect]) -> None:
        self._abort(f"subtask {input.subtask} is reset", out)
        self._resets_owed.discard(input.subtask)
        out.append(TellReset(input.subtask, self.restore_id))

    def _operator_reset(self, input: OperatorResetRequired, now: float, out: list[TrackerEffect]) -> None:
        self._withheld.clear()
        self._abort(f"the operator is reset: {input.cause}", out)
        self._attempts.clear()
        self._resets_owed.clear()
        self._operator_reset_owed = False
        point = self._restore_point()
        state = None if point is None else point.coordinator_state
        out.append(TellResetToCheckpoint(self.restore_id, state))

    def _run_ended(self, input: RunEnded, now: float, out: list[TrackerEffect]) -> None:
        """What has finished stays known, with its final state, until the reset that comes before the next
        run.
        """
        self._attempts = {key: known for key, known in self._attempts.items() if known.finished}
        self._withheld.clear()
        pending = self._pending
        if pending is not None:
            over = [part for part in pending.parts.values() if part.attempt.task_attempt_id not in self._attempts]
            if over or not pending.settled():
                self._abort(f"run {input.run_id} has ended", out)
        out.append(TellRunEnded(input.run_id, input.succeeded, input.reason))

    # --- the steps of a checkpoint ---

    def _start_queued(self, now: float, out: list[TrackerEffect]) -> None:
        if self._queued is None or self._obstacle():
            return
        parts: dict[int, Part] = {}
        at_rest: dict[int, SubtaskSnapshot] = {}
        for subtask in range(self._parallelism):
            running = [known for known in self._of_subtask(subtask) if known.ready or known.finished]
            ended = [known for known in running if known.finished]
            if len(running) > 1 and not ended:
                self._refuse_queued(f"subtask {subtask} has {len(running)} attempts at once", out)
                return
            point = self._restore_point()
            if running:
                parts[subtask] = self._part_of(ended[-1] if ended else running[0])
            elif point is not None and subtask in point.subtask_states:
                at_rest[subtask] = point.subtask_states[subtask]
        checkpoint_id, _ = self._queued
        self._queued = None
        self._pending = PendingCheckpoint(checkpoint_id, now + self._config.timeout_s, parts, at_rest)
        out.extend(
            CloseSubtask(part.attempt, checkpoint_id)
            for part in parts.values()
            if part.step is Step.AWAITING_CLOSE and not self._attempts[part.attempt.task_attempt_id].finished
        )
        self._advance(self._pending, out)

    @staticmethod
    def _part_of(known: _Attempt) -> Part:
        part = Part(known.attempt)
        if known.final_state is not None:
            part.settle(SubtaskSnapshot(known.final_state))
        return part

    def _advance(self, pending: PendingCheckpoint, out: list[TrackerEffect]) -> None:
        pending.advance(out)
        if pending.phase is not Phase.CLOSING:
            self._release_withheld(out)

    def _closed(self, input: SubtaskClosed, now: float, out: list[TrackerEffect]) -> None:
        pending = self._required()
        pending.parts[input.attempt.subtask].step = Step.AWAITING_DRAIN
        self._advance(pending, out)

    def _snapshot_taken(self, input: CoordinatorSnapshotTaken, now: float, out: list[TrackerEffect]) -> None:
        pending = self._required()
        pending.coordinator_state = input.state
        pending.phase = Phase.DRAINING
        self._advance(pending, out)

    def _snapshot_failed(self, input: CoordinatorSnapshotFailed, now: float, out: list[TrackerEffect]) -> None:
        self._abort(f"coordinator: {input.reason}", out, counted=True)

    def _drained(self, input: GatewayDrained, now: float, out: list[TrackerEffect]) -> None:
        pending = self._required()
        pending.parts[input.attempt.subtask].step = Step.AWAITING_ACKNOWLEDGE
        self._advance(pending, out)

    def _acknowledged(self, input: SubtaskAcknowledged, now: float, out: list[TrackerEffect]) -> None:
        pending = self._required()
        if pending.phase not in IN_TURN[SubtaskAcknowledged]:
            self._abort(f"{input.attempt} acknowledged it before its barrier", out, counted=True)
            return
        pending.parts[input.attempt.subtask].settle(SubtaskSnapshot(input.state, input.held))
        self._advance(pending, out)

    def _declined(self, input: SubtaskDeclined, now: float, out: list[TrackerEffect]) -> None:
        self._abort(f"{input.attempt} declined: {input.reason}", out, counted=True)

    def _final_state(self, input: SubtaskFinalState, now: float, out: list[TrackerEffect]) -> None:
        attempt, pending = input.attempt, self._pending
        self._attempts[attempt.task_attempt_id].final_state = input.state
        part = None if pending is None else pending.parts.get(attempt.subtask)
        if pending is None or part is None or part.attempt != attempt or part.step is Step.SETTLED:
            return
        part.settle(SubtaskSnapshot(input.state))  # it ends only when its valve holds nothing
        out.append(ReopenSubtask(attempt, pending.checkpoint_id))
        self._advance(pending, out)

    def _stored(self, input: CheckpointStored, now: float, out: list[TrackerEffect]) -> None:
        self._completed = self._required().whole()
        self._pending = None
        self._failures = 0
        out.append(CompleteCheckpoint(input.checkpoint_id))

    def _store_failed(self, input: CheckpointStoreFailed, now: float, out: list[TrackerEffect]) -> None:
        self._abort(f"storage: {input.reason}", out, counted=True)

    def _abort(self, reason: str, out: list[TrackerEffect], *, counted: bool = False) -> None:
        """Give up what is pending, if anything is: both sides first, then those who waited for it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        out.append(AbortCheckpoint(pending.checkpoint_id, reason))
        if pending.phase is Phase.STORING:
            out.append(DiscardCheckpoint(pending.checkpoint_id))
        self._release_withheld(out)
        if not counted:
            return
        self._failures += 1
        if self._failures > self._config.tolerated_failures:
            what = f"{self._failures} checkpoints in a row failed, the last one, {pending.checkpoint_id}"
            out.append(RaiseGlobalFailure(f"operator {self._operator_id!r}: {what}: {reason}"))
            self._failures = 0
            self._operator_reset_owed = True

    # --- what is known ---

    def _release_withheld(self, out: list[TrackerEffect]) -> None:
        out.extend(TellReady(attempt) for attempt in self._withheld)
        self._withheld.clear()

    def _restore_point(self) -> CompletedCheckpoint | None:
        return self._completed if self._mode is RestoreMode.STREAMING else None

    def _of_subtask(self, subtask: int) -> list[_Attempt]:
        return [known for known in self._attempts.values() if known.attempt.subtask == subtask]

    def _required(self) -> PendingCheckpoint:
        assert self._pending is not None
        return self._pending

    def _obstacle(self) -> str:
        """Why no checkpoint can start now; empty when one can."""
        if self._operator_reset_owed:
            return "the operator waits for its reset"
        if self._resets_owed:
            return f"subtasks {sorted(self._resets_owed)} have failed and are not yet reset"
        return "" if self._pending is None else f"checkpoint {self._pending.checkpoint_id} is pending"

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` when the state is impossible."""
        assert not self._withheld or self.phase is Phase.CLOSING
        assert self._queued is None or self._obstacle(), "a request waits for nothing"
        assert self._failures <= self._config.tolerated_failures
        assert all(self._attempts[attempt.task_attempt_id].ready for attempt in self._withheld)
        if self._completed is not None:
            assert self._completed.checkpoint_id <= self._highest_id
        pending = self._pending
        if pending is not None:
            pending.check_invariants()
            assert not self._resets_owed, "H16: pending, although a reset is owed"
            assert not self._operator_reset_owed, "H16: pending, although the operator's reset is owed"
            assert pending.checkpoint_id <= self._highest_id
            for part in pending.parts.values():
                assert part.attempt.task_attempt_id in self._attempts, f"{part.attempt} has a part, and is over"


_Handler = Callable[[BarrierTracker, Any, float, list[TrackerEffect]], None]

_HANDLERS: dict[type, _Handler] = {
    CheckpointTriggered: BarrierTracker._trigger,
    AbortRequested: BarrierTracker._abort_requested,
    TimePassed: BarrierTracker._time_passed,
    AttemptAccepted: BarrierTracker._accepted,
    AttemptReady: BarrierTracker._ready,
    AttemptFailed: BarrierTracker._failed,
    AttemptFinished: BarrierTracker._finished,
    SubtaskResetRequired: BarrierTracker._subtask_reset,
    OperatorResetRequired: BarrierTracker._operator_reset,
    RunEnded: BarrierTracker._run_ended,
    SubtaskClosed: BarrierTracker._closed,
    CoordinatorSnapshotTaken: BarrierTracker._snapshot_taken,
    CoordinatorSnapshotFailed: BarrierTracker._snapshot_failed,
    GatewayDrained: BarrierTracker._drained,
    SubtaskAcknowledged: BarrierTracker._acknowledged,
    SubtaskDeclined: BarrierTracker._declined,
    SubtaskFinalState: BarrierTracker._final_state,
    CheckpointStored: BarrierTracker._stored,
    CheckpointStoreFailed: BarrierTracker._store_failed,
}
