# SPDX-License-Identifier: Apache-2.0

"""The checkpoints in progress, at most ``concurrent_max`` at one time, and the request that waits (H43).

**Several at the same time.** Each goes through its own phases (``pending``). Starts, the coordinator's snapshots and
completions are in the order of the ids. A checkpoint that completes *subsumes* every lower one that is still pending. A
subsumed checkpoint is aborted, but this does not count as a failure. A savepoint neither subsumes nor is subsumed: it
is stored elsewhere, and its requester waits for this savepoint and no other (H49).

**Withheld** is an attempt that becomes ready while a checkpoint in which it has no part is closing the others. The
coordinator learns of the attempt after the request for its own snapshot.

**Failures** in a row are counted over all checkpoints except savepoints. More than ``tolerated_failures`` become a
global failure (H45). From then on everything is *halted* until the operator's reset: pending checkpoints are given up,
none starts, and requests are refused. The same holds after the end of a run in which a subtask has failed and was not
reset. If the run succeeds nevertheless, nothing is left to fail, and its final checkpoint may start.

**In doubt** is a checkpoint that was aborted after its write had begun (H64). It stays so until the storage has
discarded it durably, or until a higher one completes. Resets and the end of a run do not change this. The set grows by
one with each such abort. It stays bounded: a storage that fails permanently leads to a global failure, and restarts are
limited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol.attempts.types import SubtaskReady
from protocol.barrier_tracker.effects import (
    DiscardCheckpoint,
    EndSavepoint,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NotifyCheckpointDiscarded,
    RaiseGlobalFailure,
    RefuseCheckpoint,
    ReopenSubtask,
    TrackerEffect,
)
from protocol.barrier_tracker.pending import (
    BEFORE_CUT,
    DriverReport,
    Part,
    PendingCheckpoint,
    Phase,
    Step,
    SubtaskReport,
    Verdict,
)
from protocol.barrier_tracker.vocabulary import (
    CheckpointConfig,
    CheckpointDiscarded,
    CheckpointStoreFailed,
    CheckpointTriggered,
    CompletedCheckpoint,
    CoordinatorSnapshotFailed,
    CoordinatorSnapshotTaken,
    RecordedCollected,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    SubtaskSnapshot,
)
from protocol.describing import type_name
from protocol.errors import LocalProtocolError
from protocol.ids import ExecutionAttempt
from protocol.subtask.outbound import HELD_OVERHEAD_BYTES
from protocol.subtask.types import snapshot_bytes_max
from protocol.wire.framing import DEFAULT_LIMITS, WireLimits
from protocol.wire.messages import SubtaskState

Effects = list[TrackerEffect]


@dataclass(slots=True)
class CheckpointsUnderWay:
    """The checkpoints in progress; see the module.

    ``pending`` is by id, ascending. ``queued`` is the waiting request, and until when it waits.
    """

    operator_id: str
    parallelism: int
    config: CheckpointConfig
    limits: WireLimits = DEFAULT_LIMITS
    pending: dict[int, PendingCheckpoint] = field(default_factory=dict)
    queued: tuple[CheckpointTriggered, float] | None = None
    withheld: list[ExecutionAttempt] = field(default_factory=list)
    in_doubt: set[int] = field(default_factory=set)
    failures: int = 0
    halted: bool = False

    def phase(self) -> Phase:
        """The phase of the lowest one."""
        return next((pending.phase for pending in self.pending.values()), Phase.IDLE)

    def next_deadline(self) -> float | None:
        deadlines = [pending.deadline for pending in self.pending.values()]
        if self.queued is not None:
            deadlines.append(self.queued[1])
        return min(deadlines, default=None)

    def obstacle(self) -> str:
        """Why no checkpoint can start now; empty if one can."""
        if self.halted:
            return "the operator has failed, and its next run begins with a reset: ask again when that run is on"
        if len(self.pending) < self.config.concurrent_max:
            return ""
        return ", ".join(f"checkpoint {checkpoint_id} is pending" for checkpoint_id in self.pending)

    # --- requests -----------------------------------------------------------------------------------------

    def queue(self, request: CheckpointTriggered, now: float, out: Effects) -> None:
        """Let the request wait; a second one is refused."""
        if self.queued is not None:
            reason = (
                f"checkpoint {self.queued[0].checkpoint_id} waits already, and only one may: ask again when an earlier "
                "one has ended, or let more be taken at one time with CheckpointConfig.concurrent_max"
            )
            out.append(RefuseCheckpoint(request.checkpoint_id, reason))
        else:
            self.queued = (request, now + self.config.timeout_s)

    def refuse_queued(self, reason: str, out: Effects) -> None:
        if self.queued is not None:
            out.append(RefuseCheckpoint(self.queued[0].checkpoint_id, reason))
            self.queued = None

    def is_known(self, checkpoint_id: int) -> bool:
        """Whether the checkpoint is pending or waiting."""
        return checkpoint_id in self.pending or (
            self.queued is not None and self.queued[0].checkpoint_id == checkpoint_id
        )

    def start_queued(
        self, parts: dict[int, Part], at_rest: dict[int, SubtaskSnapshot], now: float
    ) -> PendingCheckpoint:
        """Start the waiting request. The caller then closes its subtasks and calls ``move_on``."""
        assert self.queued is not None
        request, self.queued = self.queued[0], None
        pending = PendingCheckpoint(request.checkpoint_id, now + self.config.timeout_s, parts, at_rest)
        pending.savepoint, pending.hold_events = request.savepoint, self.config.hold_events
        self.pending[request.checkpoint_id] = pending
        return pending

    def expire(self, now: float, out: Effects) -> None:
        """Give up every checkpoint that is not complete in time (H48)."""
        for pending in list(self.pending.values()):
            if pending.deadline <= now and pending.checkpoint_id in self.pending:
                reason = f"not complete within {self.config.timeout_s:g} s: {pending.waiting_for()}"
                self._fail(pending, reason, out)
        self.move_on(out)

    # --- steps --------------------------------------------------------------------------------------------

    def why_stale(self, report: SubtaskReport | DriverReport) -> str | None:
        """Say why the report is stale, or None. Raises ``LocalProtocolError`` if it must not come in this phase."""
        pending = self.pending.get(report.checkpoint_id)
        if pending is None:
            return f"{type_name(report)} for checkpoint {report.checkpoint_id}, which is not pending"
        verdict = pending.judge(report)
        if verdict is Verdict.ILLEGAL:
            raise LocalProtocolError(pending.describe(report))
        return pending.describe(report) if verdict is Verdict.STALE else None

    def take(self, report: SubtaskReport | DriverReport, out: Effects) -> None:
        """Take a step of one checkpoint, which is not stale."""
        pending = self.pending[report.checkpoint_id]
        _STEPS[type(report)](self, pending, report, out)
        self.move_on(out)

    def _closed(self, pending: PendingCheckpoint, report: SubtaskClosed, out: Effects) -> None:
        pending.move(report.attempt.subtask, Step.AWAITING_ACKNOWLEDGE)

    def _snapshot_taken(self, pending: PendingCheckpoint, report: CoordinatorSnapshotTaken, out: Effects) -> None:
        pending.cut(report.state, report.events_taken)
        self._fail_if_torn(pending, pending.why_torn(), out)

    def _collected(self, pending: PendingCheckpoint, report: RecordedCollected, out: Effects) -> None:
        problem = pending.collect(report.recorded) or self._why_too_large(pending)
        if problem:
            self._fail(pending, problem, out)
        else:
            pending.store(self.parallelism, out)

    def _why_too_large(self, pending: PendingCheckpoint) -> str:
        """Say which part could not be restored, because it does not fit into a message; empty if all do (H62)."""
        events_max, bytes_max = self.limits.held_events_max, snapshot_bytes_max(self.limits)
        for part in pending.parts.values():
            assert part.snapshot is not None
            held = part.snapshot.held
            if not held:
                continue
            size = sum(len(event.payload) for event in held) + HELD_OVERHEAD_BYTES * len(held)
            size += sum(len(state.state) for state in part.snapshot.states)
            if len(held) > events_max or size > bytes_max:
                return (
                    f"{part.attempt}: {len(held)} recorded and held events take {size} bytes with its state, where "
                    f"{events_max} events and {bytes_max} bytes fit into a message: let it send less, lower its "
                    "upward_events_max and upward_bytes_max, or let checkpoints hold events"
                )
        return ""

    def _snapshot_failed(self, pending: PendingCheckpoint, report: CoordinatorSnapshotFailed, out: Effects) -> None:
        self._fail(pending, f"coordinator: {report.reason}", out)

    def _acknowledged(self, pending: PendingCheckpoint, report: SubtaskAcknowledged, out: Effects) -> None:
        if pending.judge(report) is Verdict.ABORT:
            self._fail(pending, f"{report.attempt} acknowledged it before the coordinator was asked", out)
            return
        subtask = report.attempt.subtask
        states = (SubtaskState(subtask, report.state),)
        pending.settle(subtask, SubtaskSnapshot(states, report.held, report.events_sent))
        self._fail_if_torn(pending, pending.parts[subtask].why_torn(), out)

    def _declined(self, pending: PendingCheckpoint, report: SubtaskDeclined, out: Effects) -> None:
        self._fail(pending, f"{report.attempt} declined: {report.reason}", out)

    def _store_failed(self, pending: PendingCheckpoint, report: CheckpointStoreFailed, out: Effects) -> None:
        self._fail(pending, f"storage: {report.reason}", out)

    def _fail_if_torn(self, pending: PendingCheckpoint, why_torn: str, out: Effects) -> None:
        if why_torn:
            self._fail(pending, why_torn, out)

    def end_part(self, attempt: ExecutionAttempt, final: SubtaskSnapshot, out: Effects) -> None:
        """The attempt's operator has ended: use its final state as its part wherever that is missing (H47)."""
        for pending in list(self.pending.values()):
            if pending.checkpoint_id not in self.pending:
                continue  # already given up together with an earlier one
            if pending.has_part(attempt) and pending.parts[attempt.subtask].step is not Step.SETTLED:
                pending.settle(attempt.subtask, final)
                out.append(ReopenSubtask(attempt, pending.checkpoint_id))
                self._fail_if_torn(pending, pending.parts[attempt.subtask].why_torn(), out)
        self.move_on(out)

    def move_on(self, out: Effects) -> None:
        """Advance each as far as possible, in the order of the ids; then report the attempts no longer withheld."""
        may_cut = True
        for pending in self.pending.values():
            pending.advance(self.parallelism, may_cut, out)
            may_cut = may_cut and pending.phase not in BEFORE_CUT
        withheld, self.withheld = self.withheld, []
        for attempt in withheld:
            if self._withholds(attempt):
                self.withheld.append(attempt)
            else:
                out.append(SubtaskReady(attempt))

    # --- readiness ----------------------------------------------------------------------------------------

    def tell_ready(self, attempt: ExecutionAttempt, out: Effects) -> None:
        """Report an attempt ready, immediately or after the snapshots in which it has no part."""
        self.withheld.append(attempt)
        self.move_on(out)

    def forget(self, attempt: ExecutionAttempt) -> None:
        """Forget an attempt that is over: it is no longer reported ready."""
        self.withheld = [other for other in self.withheld if other != attempt]

    def _withholds(self, attempt: ExecutionAttempt) -> bool:
        return any(
            pending.phase is Phase.CLOSING and not pending.has_part(attempt) for pending in self.pending.values()
        )

    # --- ends ---------------------------------------------------------------------------------------------

    def complete(self, checkpoint_id: int, out: Effects) -> CompletedCheckpoint | None:
        """Complete a durable checkpoint and return it, for later restores; None for a savepoint."""
        pending = self.pending.pop(checkpoint_id)
        if pending.savepoint:
            out.append(EndSavepoint(checkpoint_id))
        else:
            lower = [other for other in self.pending.values() if other.checkpoint_id < checkpoint_id]
            subsumed = [other for other in lower if not other.savepoint]
            self.give_up(subsumed, f"subsumed by checkpoint {checkpoint_id}", out)
            self.failures = 0
            out.append(NotifyCheckpointComplete(checkpoint_id))
            superseded = sorted(other for other in self.in_doubt if other < checkpoint_id)
            self.in_doubt.difference_update(superseded)
            out.extend(map(NotifyCheckpointDiscarded, superseded))
        self.move_on(out)
        return None if pending.savepoint else pending.stored

    def abort(self, checkpoint_id: int, reason: str, out: Effects) -> None:
        """Give up one checkpoint, pending or waiting, by its id (H44). It does not count as a failure."""
        pending = self.pending.get(checkpoint_id)
        if pending is None:
            self.refuse_queued(reason, out)
        else:
            self.give_up([pending], reason, out)

    def abort_all(self, reason: str, out: Effects) -> None:
        """Give up everything pending; none counts as a failure."""
        self.give_up(list(self.pending.values()), reason, out)

    def give_up(self, those: list[PendingCheckpoint], reason: str, out: Effects) -> None:
        """Give up one checkpoint: tell both sides first, then what waited for it."""
        for pending in those:
            self._end(pending, reason, out)
        self.move_on(out)

    def _fail(self, pending: PendingCheckpoint, reason: str, out: Effects) -> None:
        """Fail a checkpoint, which counts unless it is a savepoint (H45). The caller then calls ``move_on``."""
        self._end(pending, reason, out)
        if not pending.savepoint:
            self.failures += 1
        if self.failures > self.config.tolerated_failures:
            what = f"{self.failures} checkpoints in a row failed, the last one, {pending.checkpoint_id}"
            self.failures, self.halted = 0, True
            self.abort_all(f"the operator fails over: {what}", out)
            out.append(RaiseGlobalFailure(f"operator {self.operator_id!r}: {what}: {reason}"))

    def _end(self, pending: PendingCheckpoint, reason: str, out: Effects) -> None:
        checkpoint_id = pending.checkpoint_id
        del self.pending[checkpoint_id]
        written = pending.phase is Phase.STORING
        in_doubt = written and not pending.savepoint
        if in_doubt:
            self.in_doubt.add(checkpoint_id)
        out.append(NotifyCheckpointAborted(checkpoint_id, reason, in_doubt))
        if written:
            out.append(DiscardCheckpoint(checkpoint_id, pending.savepoint))

    # --- doubt --------------------------------------------------------------------------------------------

    def why_no_doubt(self, report: CheckpointDiscarded) -> str | None:
        """Say why the report is stale, or None. Raises ``LocalProtocolError`` if no discard was requested."""
        checkpoint_id = report.checkpoint_id
        if checkpoint_id in self.pending:
            raise LocalProtocolError(f"checkpoint {checkpoint_id} was discarded, although it is pending")
        if checkpoint_id in self.in_doubt:
            return None
        return f"CheckpointDiscarded for checkpoint {checkpoint_id}, which is not in doubt"

    def discarded(self, checkpoint_id: int, out: Effects) -> None:
        """End the doubt about a checkpoint: no restart restores it any more."""
        self.in_doubt.remove(checkpoint_id)
        out.append(NotifyCheckpointDiscarded(checkpoint_id))

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state is impossible."""
        assert list(self.pending) == sorted(self.pending)
        assert len(self.pending) <= self.config.concurrent_max
        assert self.failures <= self.config.tolerated_failures
        assert not (self.halted and self.pending), "H16: pending, although the operator's reset is owed"
        assert not self.in_doubt.intersection(self.pending), "pending and aborted"
        may_cut = True
        for checkpoint_id, pending in self.pending.items():
            assert pending.checkpoint_id == checkpoint_id
            pending.check_invariants(may_cut)
            may_cut = may_cut and pending.phase not in BEFORE_CUT
        assert all(self._withholds(attempt) for attempt in self.withheld), "withheld, and for nothing"


_Step = Callable[[CheckpointsUnderWay, PendingCheckpoint, Any, Effects], None]

_STEPS: dict[type, _Step] = {
    SubtaskClosed: CheckpointsUnderWay._closed,
    CoordinatorSnapshotTaken: CheckpointsUnderWay._snapshot_taken,
    CoordinatorSnapshotFailed: CheckpointsUnderWay._snapshot_failed,
    RecordedCollected: CheckpointsUnderWay._collected,
    SubtaskAcknowledged: CheckpointsUnderWay._acknowledged,
    SubtaskDeclined: CheckpointsUnderWay._declined,
    CheckpointStoreFailed: CheckpointsUnderWay._store_failed,
}
