# SPDX-License-Identifier: Apache-2.0

"""One operator's checkpoints, and the order of everything that its coordinator is told.

Every decision of the attempt ledger passes through this machine on its way to the coordinator, so this machine alone
orders failures and resets against checkpoints. Usually at most one checkpoint is in progress. With ``concurrent_max``
there may be several (H43, ``pending``). Each goes through these phases::

    IDLE ── trigger ──► CLOSING ► SNAPSHOTTING ► ACKNOWLEDGING ► STORING ── complete ──► IDLE
                           └───────────┴─── abort ─────┴────────────┘

If checkpoints hold no events (H79), COLLECTING comes between ACKNOWLEDGING and STORING: ``CollectRecorded`` asks the
coordinator for the events that it has taken after its cut and before the subtasks' snapshots. If subtasks store a part
of their state as files (H190), UPLOADING comes before STORING. An operator's checkpoints
and savepoints are all of one kind, so the two kinds never overlap.

The table ``pending.LEGAL`` says which input about a checkpoint may come in which phase. The ledger's decisions may come
in every phase.

**The participants** are fixed at the start. A subtask whose attempt is ready takes part step by step (``pending``). One
that has finished, or finishes meanwhile, takes part with its final state. One that is not running takes part with what
its next attempt would restore, unchanged; that is nothing if nothing was ever restored (H47). The coordinator has
exchanged no event with it since. To keep that true, an attempt that becomes ready while the others are closing is
*withheld*: the coordinator learns of it after the request for its own snapshot, so everything that they exchange is
after the cut.

**Copies** and checkpoints exclude each other (H13), because a subtask with two attempts has no single state. If an
attempt is accepted beside a living one, everything pending is aborted. Requests are refused while there are two of
which none has finished.

**Aborts** are by id (H44). An attempt that fails or gets a copy, a reset, and the end of a run abort everything that is
pending. The aborts are in the same list of effects, ahead of the news that caused them (H16), and do not count as
failures of the checkpoint. A timeout, a refusal, an exception of the coordinator, an error of the storage, and two
halves that do not match (H32) do count (H45).

**In doubt** is a checkpoint that is aborted after its write has begun (H64): the storage may hold it, now or later, and
a new application may restore it. ``NotifyCheckpointAborted.in_doubt`` says so, and ``DiscardCheckpoint`` follows it.
The doubt ends with ``NotifyCheckpointDiscarded``, exactly once: when the storage has discarded the checkpoint durably
(``CheckpointDiscarded``), or right after the ``NotifyCheckpointComplete`` of a higher one, which every restart prefers.
Until then nothing that was prepared for the checkpoint may be destroyed. Resets and ends of runs do not end the doubt.
A checkpoint that is aborted earlier was never written, so it is discarded together with its abort.

**A savepoint** goes through the same phases, but is stored elsewhere and changes nothing: both sides reopen, nothing is
committed, and no reset ever names it (H49). One that fails is aborted like any other, but does not count as a failure,
because its requester is told. One that succeeds does not end a row of failures either. It is never in doubt, because a
restart restores it only if the user names its file.

**A request** waits if the maximum number of checkpoints is pending, or if a reset is due: a subtask has failed and is
not yet reset, so the coordinator's view of it is outdated. At most one request waits, and it is refused after
``timeout_s``. It never waits for the reset that comes with the next run, because ``Sidecar.run`` starts that run only
when no request is left here. So it is refused when too many checkpoints have failed, and when the run ends without the
reset. Each request is answered by exactly one of complete, end of the savepoint, abort and refuse. A checkpoint that is
due without a request (``CheckpointSchedule``) is asked for with ``TriggerCheckpoint`` as soon as it can start.

**Restores.** In batch mode Spark owns the output, so a retry restarts from nothing, -1, whatever was completed. In
streaming mode it restores the last checkpoint whose completion the coordinator *was told*. ``NotifyCheckpointComplete``
and the id in a ``SubtaskResetToCheckpoint`` are in one ordered sequence of effects, so they cannot cross (H18). The
checkpoint that a new application starts from counts as such, cut to its parallelism (``rescale``).

**What the coordinator is told** are the ledger's own values, unchanged: ``SubtaskReady``, ``SubtaskFailed``,
``SubtaskFinished``, ``RunEnded``. Only a ``SubtaskReset`` or ``OperatorReset`` gets another name,
``SubtaskResetToCheckpoint`` or ``OperatorResetToCheckpoint``, and the checkpoint to go back to, which only this machine
knows.

**The order of effects is part of the contract.** Carry them out one after the other. Pass those for the coordinator
through one ordered mailbox, which also takes the events of its subtasks.

- ``NotifyCheckpointAborted`` comes before ``SubtaskFailed``, ``SubtaskResetToCheckpoint``,
  ``OperatorResetToCheckpoint``, ``RunEnded`` and ``RaiseGlobalFailure`` (H16), and that of a subsumed checkpoint before
  the ``NotifyCheckpointComplete`` of the one above it.
- ``SnapshotCoordinator`` comes before the ``SubtaskReady`` of withheld attempts.
- ``NotifyCheckpointComplete`` comes before the ``NotifyCheckpointDiscarded`` of those that it supersedes, and before
  the next ``CloseSubtask``.
- ``RunEnded`` comes before the ``TriggerCheckpoint`` of the final checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from protocol.attempts import (
    AttemptAccepted,
    OperatorReset,
    RunEnded,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.barrier_tracker import (
    AbortRequested,
    CheckpointConfig,
    CheckpointDiscarded,
    CheckpointStored,
    CheckpointStoreFailed,
    CheckpointTriggered,
    CloseSubtask,
    CompletedCheckpoint,
    CoordinatorSnapshotFailed,
    CoordinatorSnapshotTaken,
    InputBegan,
    OperatorResetToCheckpoint,
    RecordedCollected,
    ReportStale,
    RestoreAttempt,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    SubtaskFinalState,
    SubtaskResetToCheckpoint,
    SubtaskSnapshot,
    SubtaskStateFailed,
    SubtaskStateStored,
    TrackerEffect,
    TrackerInput,
    TriggerCheckpoint,
)
from protocol.barrier_tracker.pending import (
    LEGAL,
    CheckpointsUnderWay,
    CheckpointView,
    Part,
    Phase,
    Report,
    Step,
    files_of,
)
from protocol.barrier_tracker.rescale import rescaled
from protocol.describing import type_name
from protocol.errors import LocalProtocolError
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT, ExecutionAttempt
from protocol.machine import TimePassed
from protocol.wire.framing import DEFAULT_LIMITS, WireLimits
from protocol.wire.messages import Positions, RestoreMode, SubtaskState


@dataclass(slots=True)
class KnownAttempt:
    """An attempt that is not over: accepted, then ready, then perhaps finished, which may be revoked.

    ``events_restored``: where its count of events began (H32). ``final``: its final state.
    """

    attempt: ExecutionAttempt
    events_restored: Positions
    ready: bool = False
    finished: bool = False
    final: SubtaskSnapshot | None = None


@dataclass(slots=True)
class KnownAttempts:
    """The attempts that are not over, by task attempt id, in the order of acceptance.

    The attempt ledger decides about attempts; here is what checkpoints depend on. ``resets_owed``: subtasks that have
    failed and wait for their reset.

    Every input asks whether any attempt runs, and whether a subtask has several. These are counted as they change,
    because an operator may have thousands of subtasks.
    """

    parallelism: int
    by_task: dict[int, KnownAttempt] = field(default_factory=dict)
    resets_owed: set[int] = field(default_factory=set)
    _tasks_of: dict[int, list[int]] = field(default_factory=dict)  # by subtask
    _crowded: set[int] = field(default_factory=set)  # subtasks with several alive and none finished
    _running: int = 0  # that are ready and have not finished

    def get(self, attempt: ExecutionAttempt) -> KnownAttempt | None:
        """The attempt, or None if it is over or unknown."""
        return self.by_task.get(attempt.task_attempt_id)

    def accept(self, attempt: ExecutionAttempt, events_restored: Positions) -> None:
        self.by_task[attempt.task_attempt_id] = KnownAttempt(attempt, events_restored)
        self._tasks_of.setdefault(attempt.subtask, []).append(attempt.task_attempt_id)
        self._look_at(attempt.subtask)

    def become_ready(self, attempt: ExecutionAttempt) -> None:
        known = self.by_task[attempt.task_attempt_id]
        known.ready = True
        self._running += not known.finished

    def finish(self, attempt: ExecutionAttempt) -> None:
        known = self.by_task[attempt.task_attempt_id]
        known.finished = True
        self._running -= known.ready
        self._look_at(attempt.subtask)

    def fail(self, attempt: ExecutionAttempt) -> None:
        """Remove an attempt that is over. If it was the last one of its subtask, the reset is due (H13)."""
        known = self.by_task.pop(attempt.task_attempt_id, None)
        if known is None:
            return
        self._running -= known.ready and not known.finished
        self._tasks_of[attempt.subtask].remove(attempt.task_attempt_id)
        self._look_at(attempt.subtask)
        if not self._tasks_of[attempt.subtask]:
            del self._tasks_of[attempt.subtask]
            self.resets_owed.add(attempt.subtask)

    def keep_finished(self) -> None:
        """End the run: forget every attempt that has not finished."""
        self.by_task = {key: known for key, known in self.by_task.items() if known.finished}
        self._tasks_of.clear()
        for task_attempt_id, known in self.by_task.items():
            self._tasks_of.setdefault(known.attempt.subtask, []).append(task_attempt_id)
        self._crowded.clear()
        self._running = 0

    def clear(self) -> None:
        """Reset the operator: no attempt is left, and no reset is due."""
        self.by_task.clear()
        self.resets_owed.clear()
        self.keep_finished()

    def of_subtask(self, subtask: int) -> list[KnownAttempt]:
        return [self.by_task[task_attempt_id] for task_attempt_id in self._tasks_of.get(subtask, ())]

    def running(self) -> bool:
        """Whether any attempt is ready and has not finished."""
        return self._running > 0

    def copies(self) -> str:
        """Name a subtask with several live attempts and none finished, so without a single state; otherwise empty."""
        if not self._crowded:
            return ""
        subtask = min(self._crowded)
        return f"subtask {subtask} has {len(self._tasks_of[subtask])} concurrent attempts"

    def _look_at(self, subtask: int) -> None:
        known = self.of_subtask(subtask)
        if len(known) > 1 and not any(attempt.finished for attempt in known):
            self._crowded.add(subtask)
        else:
            self._crowded.discard(subtask)

    def parts(
        self, point: CompletedCheckpoint | None, *, closes: bool, hold_events: bool
    ) -> tuple[dict[int, Part], dict[int, SubtaskSnapshot]]:
        """The parts of a checkpoint that starts now: of running and finished subtasks, and of those at rest (H47).

        ``point`` is the checkpoint that the next attempt of a subtask at rest would restore. ``closes``: whether
        subtasks are asked to close.
        """
        first, settled = Step.AWAITING_CLOSE if closes else Step.AWAITING_ACKNOWLEDGE, Step.SETTLED
        parts: dict[int, Part] = {}
        at_rest: dict[int, SubtaskSnapshot] = {}
        for subtask in range(self.parallelism):
            known = self._speaks_for(subtask)
            if known is not None:
                step = first if known.final is None else settled
                parts[subtask] = Part(known.attempt, known.events_restored, step, known.final, None, hold_events)
            elif point is not None and subtask in point.subtask_states:
                at_rest[subtask] = point.subtask_states[subtask]
        return parts, at_rest

    def _speaks_for(self, subtask: int) -> KnownAttempt | None:
        """The attempt whose state is that of the subtask; None if the subtask is at rest."""
        tasks = self._tasks_of.get(subtask)
        if tasks is None:
            return None
        if len(tasks) == 1:  # as it usually is, of thousands of subtasks
            known = self.by_task[tasks[0]]
            return known if known.ready or known.finished else None
        running = [known for known in self.of_subtask(subtask) if known.ready or known.finished]
        ended = [known for known in running if known.finished]
        return ended[-1] if ended else running[0] if running else None

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the counts are wrong."""
        counted = KnownAttempts(self.parallelism)
        for known in self.by_task.values():
            counted.accept(known.attempt, known.events_restored)
            if known.ready:
                counted.become_ready(known.attempt)
            if known.finished:
                counted.finish(known.attempt)
        assert self._tasks_of == counted._tasks_of
        assert self._crowded == counted._crowded
        assert self._running == counted._running


@dataclass(slots=True)
class CheckpointSchedule:
    """When one operator's next checkpoint is due without a request, on the tracker's clock, in seconds.

    There are two reasons. While an attempt runs, a checkpoint is due every ``interval_s``, but not before
    ``min_pause_s`` have passed since the last one ended. After a run that succeeded in streaming mode, a *final* one is
    due, because otherwise the last output would never be committed. It is due immediately, and again if it fails, until
    one that started after the run's end completes. A checkpoint that is due but cannot start stays due until it can: it
    is late, but never asked for twice.

    Asking means ``TriggerCheckpoint``: the shell takes an id and answers with ``CheckpointTriggered``. If no answer
    comes, for example because there was no id, the schedule asks again after ``timeout_s``. It asks for the final one
    only as often as failures are tolerated in a row, because the end of the run waits for it (H48).
    """

    config: CheckpointConfig
    due_at: float = inf  # by the interval
    final_at: float = inf  # the final one; inf if none is pending
    final_id: int | None = None  # the pending checkpoint that becomes the final one if it completes
    not_before: float = -inf  # the pause after the last one
    asked_until: float = -inf  # until when an answer to the last question is awaited
    final_asked: int = 0  # how often in a row the final one was asked for

    def see_attempts(self, running: bool, now: float) -> None:
        """Start the interval's clock with the first attempt that runs, and stop it with the last."""
        if not running:
            self.due_at = inf
        elif self.due_at == inf and self.config.interval_s is not None:
            self.due_at = now + self.config.interval_s

    def run_ended_well(self, now: float) -> None:
        """Record that the last output waits for a checkpoint that starts from here on."""
        self.final_at, self.final_id, self.final_asked = now, None, 0

    def reset(self) -> None:
        """Forget what is due, because its run no longer counts."""
        self.due_at, self.final_at, self.final_id = inf, inf, None
        self.triggered()

    def triggered(self) -> None:
        """Record that the answer has come, or another request, which has the same effect."""
        self.asked_until, self.final_asked = -inf, 0

    def started(self, checkpoint_id: int) -> None:
        """A checkpoint has started; it covers everything up to here."""
        if self.final_pending and self.final_id is None:
            self.final_id = checkpoint_id

    def completed(self, checkpoint_id: int) -> None:
        """A checkpoint is durable, and the coordinator will be told."""
        if self.final_id is not None and checkpoint_id >= self.final_id:
            self.final_at, self.final_id = inf, None

    def ended(self, checkpoint_id: int, now: float) -> None:
        """A checkpoint is over, completed or not."""
        self.not_before = now + self.config.min_pause_s
        if checkpoint_id == self.final_id:
            self.final_at, self.final_id = self.not_before, None

    @property
    def final_pending(self) -> bool:
        """Whether the last output of a successful run is not committed yet."""
        return self.final_at < inf

    def next_deadline(self) -> float | None:
        """When a checkpoint is due, provided that it can start."""
        due_at = self._due_at()
        return None if due_at == inf else due_at

    def is_due(self, now: float) -> bool:
        """Whether to call ``ask``, provided that a checkpoint can start; this check is cheaper."""
        return now >= self._due_at()

    def ask(self, now: float) -> bool:
        """Whether to ask for a checkpoint now. Call it only if one can start."""
        if -inf < self.asked_until <= now:
            self.asked_until = -inf
            if self.final_asked > self.config.tolerated_failures:
                self.final_at = inf
        if now < self._due_at():
            return False
        self.asked_until = now + self.config.timeout_s
        self.final_asked += self.final_pending
        if self.config.interval_s is not None and self.due_at <= now:
            self.due_at += self.config.interval_s
            if self.due_at <= now:  # late by more than an interval: the missed ones are skipped
                self.due_at = now + self.config.interval_s
        return True

    def _due_at(self) -> float:
        due_at = self.not_before if self.due_at < self.not_before else self.due_at  # by the interval
        if self.final_id is None and self.final_at < due_at:
            due_at = self.final_at
        return self.asked_until if due_at < self.asked_until else due_at


class BarrierTracker:
    """The pure state machine of one operator's checkpoints; see the module.

    ``restored`` is the checkpoint that this application starts from. The shell has already passed it to the
    coordinator's ``reset_to_checkpoint``, before ``start`` (H52). It may be of another parallelism (``rescale``); ids
    continue above its own (H4). ``restored_elsewhere``: it is a savepoint, so its files are not among those of this
    application, and the first checkpoint copies what it needs of them (H193). ``barriers_apart``: barriers do not
    travel among the items. ``limits``: what fits into a message. Raises ``LocalProtocolError`` if the checkpoint cannot
    be cut to ``parallelism``.
    """

    def __init__(
        self,
        operator_id: str,
        parallelism: int,
        config: CheckpointConfig,
        restored: CompletedCheckpoint | None = None,
        *,
        restored_elsewhere: bool = False,
        barriers_apart: bool = False,
        limits: WireLimits = DEFAULT_LIMITS,
    ) -> None:
        if parallelism < 1:
            raise LocalProtocolError(f"operator {operator_id!r}: parallelism {parallelism} must be 1 or more")
        self._mode = config.mode
        self._completed = None if restored is None else rescaled(restored, parallelism)
        self._highest_id = VIRTUAL_EMPTY_CHECKPOINT if restored is None else restored.checkpoint_id
        self._attempts = KnownAttempts(parallelism)
        self._under_way = CheckpointsUnderWay(operator_id, parallelism, config, limits)
        if restored_elsewhere and restored is not None:
            self._under_way.elsewhere = frozenset(files_of(restored))
        self._hold_events = config.hold_events
        self._closes = config.hold_events or barriers_apart  # whether subtasks are asked to close
        self._schedule = CheckpointSchedule(config)
        self._foreign_up_to = VIRTUAL_EMPTY_CHECKPOINT  # checkpoints of another input than the current run's (H174)
        self._partitions = parallelism  # of the current run's input
        self._counted_in = 0 if self._completed is None else self._completed.partitions  # of the subtasks' positions

    @property
    def phase(self) -> Phase:
        """The phase of the lowest pending checkpoint."""
        return self._under_way.phase()

    @property
    def pending_ids(self) -> tuple[int, ...]:
        """The checkpoints in progress, ascending."""
        return tuple(self._under_way.pending)

    @property
    def restore_id(self) -> int:
        """The checkpoint that a reset refers to at this moment, -1 for none (H18)."""
        point = self._restore_point()
        return VIRTUAL_EMPTY_CHECKPOINT if point is None else point.checkpoint_id

    @property
    def completed_id(self) -> int:
        """The last completed checkpoint, or the one that this application started from; -1 for none."""
        return VIRTUAL_EMPTY_CHECKPOINT if self._completed is None else self._completed.checkpoint_id

    @property
    def in_doubt_ids(self) -> tuple[int, ...]:
        """The aborted checkpoints that a restart may still restore, ascending (H64)."""
        return tuple(sorted(self._under_way.in_doubt))

    @property
    def final_pending(self) -> bool:
        """Whether a run that ended well still waits for the checkpoint that commits its last output."""
        return self._schedule.final_pending

    def view(self) -> tuple[CheckpointView, ...]:
        """The checkpoints in progress at this moment, ascending, for people."""
        return tuple(pending.view() for pending in self._under_way.pending.values())

    def next_deadline(self) -> float | None:
        """The latest time for ``TimePassed``; None if none is needed."""
        due_at, deadline = self._schedule.next_deadline(), self._under_way.next_deadline()
        if due_at is None or (deadline is not None and deadline <= due_at) or not self._could_start():
            return deadline
        return due_at

    def handle(self, input: TrackerInput, now: float) -> list[TrackerEffect]:
        """Take one input and return what to do, in order. ``now`` is in seconds, of a monotonic clock.

        Raises ``LocalProtocolError``, and changes nothing, for an input that our own side must not give now.
        """
        kind = type(input)
        if kind in ONE_OF_MANY and self.take_one_of_many(input):
            return []
        act = _HANDLERS.get(kind)
        if act is None:
            raise LocalProtocolError(f"not an input of a barrier tracker: {input!r}")
        stale = self._why_stale(input)
        if stale is not None:
            return [ReportStale(stale)]
        out: list[TrackerEffect] = []
        pending_before = self.pending_ids
        act(self, input, now, out)
        for checkpoint_id in pending_before:
            if checkpoint_id not in self._under_way.pending:
                self._schedule.ended(checkpoint_id, now)
        self._start_queued(now, out)
        self._schedule.see_attempts(self._attempts.running(), now)
        if self._schedule.is_due(now) and self._could_start() and self._schedule.ask(now):
            out.append(TriggerCheckpoint())
        return out

    def take_one_of_many(self, report: Any) -> bool:
        """Take a report of ``ONE_OF_MANY`` that changes nothing but its own part of a checkpoint: others are awaited as
        before, and no deadline has moved. False for every other one, which ``handle`` then takes."""
        pending = self._under_way.pending.get(report.checkpoint_id)
        return pending is not None and pending.take_one_of_many(report)

    # --- staleness and turn, checked in one place ---

    def _why_stale(self, input: Any) -> str | None:
        """Say why the input is stale, or None; raise if our own side sent it out of turn."""
        if type(input) in LEGAL:  # a report about a checkpoint
            return self._under_way.why_stale(input)
        match input:
            case CheckpointDiscarded():
                return self._under_way.why_no_doubt(input)
            case SubtaskReady() | SubtaskFinished() | SubtaskFinalState():
                return self._why_not_news(input)
            case AttemptAccepted(attempt):
                if self._attempts.get(attempt) or not 0 <= attempt.subtask < self._attempts.parallelism:
                    raise LocalProtocolError(f"{attempt} was accepted before, or has no place")
                return None
            case CheckpointTriggered(checkpoint_id):
                if checkpoint_id <= self._highest_id:
                    raise LocalProtocolError(f"checkpoint ids must increase: {checkpoint_id} after {self._highest_id}")
                return None
            case AbortRequested(checkpoint_id):
                known = self._under_way.is_known(checkpoint_id)
                return None if known else f"AbortRequested for checkpoint {checkpoint_id}, which is not pending"
            case _:
                return None

    def _why_not_news(self, input: SubtaskReady | SubtaskFinished | SubtaskFinalState) -> str | None:
        known = self._attempts.get(input.attempt)
        if known is None:
            return f"{type_name(input)} of {input.attempt}, which is over or unknown"
        repeated = {
            SubtaskReady: known.ready,
            SubtaskFinished: known.finished,
            SubtaskFinalState: known.final is not None,
        }[type(input)]
        return f"{type_name(input)} of {input.attempt}, said before" if repeated else None

    # --- requests ---

    def _trigger(self, input: CheckpointTriggered, now: float, out: list[TrackerEffect]) -> None:
        self._highest_id = input.checkpoint_id
        if not input.savepoint:
            self._schedule.triggered()
        self._under_way.queue(input, now, out)

    def _abort_requested(self, input: AbortRequested, now: float, out: list[TrackerEffect]) -> None:
        self._under_way.abort(input.checkpoint_id, input.reason, out)

    def _time_passed(self, input: TimePassed, now: float, out: list[TrackerEffect]) -> None:
        under_way = self._under_way
        if under_way.queued is not None and under_way.queued[1] <= now:
            timeout_s = under_way.config.timeout_s
            under_way.refuse_queued(f"could not start within {timeout_s:g} s: {self._obstacle()}", out)
        under_way.expire(now, out)

    def _start_queued(self, now: float, out: list[TrackerEffect]) -> None:
        if self._under_way.halted:
            self._under_way.refuse_queued(self._under_way.obstacle(), out)
        if self._under_way.queued is None or self._obstacle():
            return
        copies = self._attempts.copies()
        if copies:
            self._under_way.refuse_queued(copies, out)
            return
        parts, at_rest = self._attempts.parts(self._restore_point(), closes=self._closes, hold_events=self._hold_events)
        if self._is_foreign(self._restore_point()):
            at_rest = {subtask: replace(one, earlier_input=True) for subtask, one in at_rest.items()}
        pending = self._under_way.start_queued(parts, at_rest, now)
        pending.partitions = self._counted_in
        if not pending.savepoint:
            self._schedule.started(pending.checkpoint_id)
        if self._closes:
            checkpoint_id, awaiting_close, by_task = pending.checkpoint_id, Step.AWAITING_CLOSE, self._attempts.by_task
            for part in parts.values():
                if part.step is awaiting_close and not by_task[part.attempt.task_attempt_id].finished:
                    out.append(CloseSubtask(part.attempt, checkpoint_id))
        self._under_way.move_on(out)

    # --- what the ledger decided ---

    def _input_began(self, input: InputBegan, now: float, out: list[TrackerEffect]) -> None:
        """What has begun before, and so all that can be restored now, belongs to this input or to another one."""
        latest = max((*self._under_way.pending, self.completed_id))
        self._foreign_up_to = VIRTUAL_EMPTY_CHECKPOINT if input.same else latest

    def _is_foreign(self, point: CompletedCheckpoint | None) -> bool:
        """Whether the positions in a checkpoint count the records of another input than the current one (H174)."""
        return point is not None and point.checkpoint_id <= self._foreign_up_to

    def _partitions_before(self, point: CompletedCheckpoint | None) -> int:
        """In how many partitions the current input was when positions in a checkpoint were taken, if that was another
        number than now; otherwise 0. Then they say nothing about the records of a subtask, if they count them (H174).
        """
        if point is None or point.partitions in (0, self._partitions) or self._is_foreign(point):
            return 0
        has_positions = any(not part.earlier_input for part in point.subtask_states.values())
        return point.partitions if has_positions else 0

    def _accepted(self, input: AttemptAccepted, now: float, out: list[TrackerEffect]) -> None:
        attempt = input.attempt
        self._mode = RestoreMode(input.mode)
        self._partitions = input.partitions or self._attempts.parallelism
        point = self._restore_point()
        nothing = SubtaskSnapshot(earlier_input=True)
        snapshot = nothing if point is None else point.subtask_states.get(attempt.subtask, nothing)
        begins_again = not snapshot.earlier_input and not self._is_foreign(point)
        self._attempts.accept(attempt, snapshot.events_sent)
        copies = self._attempts.copies()
        if copies:
            self._under_way.abort_all(copies, out)
        restore = (snapshot.states, snapshot.held, snapshot.events_sent, begins_again, self._partitions_before(point))
        elsewhere = any(state.files in self._under_way.elsewhere for state in snapshot.states)
        out.append(RestoreAttempt(attempt, self.restore_id, *restore, elsewhere))

    def _ready(self, input: SubtaskReady, now: float, out: list[TrackerEffect]) -> None:
        self._attempts.become_ready(input.attempt)
        # Not before: an operator that counts records is never ready after ``partitions_before``, and a checkpoint in
        # the meantime has only the positions of the run before.
        self._counted_in = self._partitions if self._mode is RestoreMode.STREAMING else 0
        self._under_way.tell_ready(input.attempt, out)

    def _failed(self, input: SubtaskFailed, now: float, out: list[TrackerEffect]) -> None:
        attempt = input.attempt
        self._attempts.fail(attempt)
        self._under_way.forget(attempt)  # an attempt that was not announced yet never will be (H11)
        self._under_way.abort_all(f"{attempt}: {input.reason}", out)
        out.append(input)

    def _finished(self, input: SubtaskFinished, now: float, out: list[TrackerEffect]) -> None:
        self._attempts.finish(input.attempt)
        self._under_way.forget(input.attempt)  # its readiness would come too late; it has exchanged nothing
        out.append(input)

    def _subtask_reset(self, input: SubtaskReset, now: float, out: list[TrackerEffect]) -> None:
        self._under_way.abort_all(f"subtask {input.subtask} is reset", out)
        self._attempts.resets_owed.discard(input.subtask)
        out.append(SubtaskResetToCheckpoint(input.subtask, self.restore_id))

    def _operator_reset(self, input: OperatorReset, now: float, out: list[TrackerEffect]) -> None:
        self._under_way.withheld.clear()
        self._under_way.abort_all(f"the operator is reset: {input.cause}", out)
        self._under_way.halted = False
        self._attempts.clear()
        self._schedule.reset()
        point = self._restore_point()
        state = None if point is None else point.coordinator_state
        begins_again = point is not None and not self._is_foreign(point)
        out.append(OperatorResetToCheckpoint(self.restore_id, state, begins_again))

    def _run_ended(self, input: RunEnded, now: float, out: list[TrackerEffect]) -> None:
        """End the run. Finished attempts stay known, with their final states, until the reset before the next run."""
        self._attempts.keep_finished()
        self._under_way.withheld.clear()
        over = [
            pending
            for pending in self._under_way.pending.values()
            if not pending.settled() or not all(self._attempts.get(part.attempt) for part in pending.parts.values())
        ]
        self._under_way.give_up(over, f"run {input.run_id} has ended", out)
        out.append(input)
        if input.succeeded and self._mode is RestoreMode.STREAMING:
            # A global failure that came too late for the run must not prevent the commit of its last output.
            self._under_way.halted = False
            self._schedule.run_ended_well(now)
        if self._attempts.resets_owed:  # nothing but the reset before the next run ends that
            self._under_way.halted = True

    # --- the steps of a checkpoint ---

    def _step(self, input: Report, now: float, out: list[TrackerEffect]) -> None:
        self._under_way.take(input, out)

    def _final_state(self, input: SubtaskFinalState, now: float, out: list[TrackerEffect]) -> None:
        """Take a final state. A subtask ends only when its valve holds nothing, so no held events come with it."""
        attempt = input.attempt
        final = SubtaskSnapshot((SubtaskState(attempt.subtask, input.state, input.files),), (), input.events_sent)
        self._attempts.by_task[attempt.task_attempt_id].final = final
        self._under_way.end_part(attempt, final, out)

    def _stored(self, input: CheckpointStored, now: float, out: list[TrackerEffect]) -> None:
        completed = self._under_way.complete(input, out)
        if completed is not None:
            self._completed = completed
            self._schedule.completed(completed.checkpoint_id)

    def _discarded(self, input: CheckpointDiscarded, now: float, out: list[TrackerEffect]) -> None:
        self._under_way.discarded(input.checkpoint_id, out)

    # --- what is known ---

    def _restore_point(self) -> CompletedCheckpoint | None:
        return self._completed if self._mode is RestoreMode.STREAMING else None

    def _obstacle(self) -> str:
        """Why a request must wait; empty if it need not."""
        if self._attempts.resets_owed and not self._under_way.halted:
            return f"subtasks {sorted(self._attempts.resets_owed)} have failed and are not yet reset"
        return self._under_way.obstacle()

    def _could_start(self) -> bool:
        """Whether a request would start immediately now."""
        return self._under_way.queued is None and not self._obstacle() and not self._attempts.copies()

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state is impossible."""
        under_way = self._under_way
        under_way.check_invariants()
        self._attempts.check_invariants()
        assert under_way.queued is None or self._obstacle(), "a request waits for nothing"
        assert all(self._attempts.by_task[attempt.task_attempt_id].ready for attempt in under_way.withheld)
        if self._completed is not None:
            assert self._completed.checkpoint_id <= self._highest_id
            assert self._completed.parallelism == self._attempts.parallelism
        for checkpoint_id in under_way.in_doubt:
            assert self.completed_id < checkpoint_id <= self._highest_id, "in doubt, although it is superseded"
        for pending in under_way.pending.values():
            assert not self._attempts.resets_owed, "H16: pending, although a reset is owed"
            assert not self._attempts.copies(), "H13: pending, although a subtask has two attempts"
            assert pending.checkpoint_id <= self._highest_id
            assert pending.savepoint or pending.checkpoint_id > self.completed_id, "pending, although it is subsumed"
            for part in pending.parts.values():
                assert self._attempts.get(part.attempt), f"{part.attempt} has a part, and is over"


ONE_OF_MANY = frozenset({SubtaskClosed, SubtaskAcknowledged})
"""The reports that every subtask gives about each checkpoint."""

_Handler = Callable[[BarrierTracker, Any, float, list[TrackerEffect]], None]

_HANDLERS: dict[type, _Handler] = {
    CheckpointTriggered: BarrierTracker._trigger,
    InputBegan: BarrierTracker._input_began,
    AbortRequested: BarrierTracker._abort_requested,
    TimePassed: BarrierTracker._time_passed,
    AttemptAccepted: BarrierTracker._accepted,
    SubtaskReady: BarrierTracker._ready,
    SubtaskFailed: BarrierTracker._failed,
    SubtaskFinished: BarrierTracker._finished,
    SubtaskReset: BarrierTracker._subtask_reset,
    OperatorReset: BarrierTracker._operator_reset,
    RunEnded: BarrierTracker._run_ended,
    SubtaskClosed: BarrierTracker._step,
    CoordinatorSnapshotTaken: BarrierTracker._step,
    CoordinatorSnapshotFailed: BarrierTracker._step,
    RecordedCollected: BarrierTracker._step,
    SubtaskAcknowledged: BarrierTracker._step,
    SubtaskStateStored: BarrierTracker._step,
    SubtaskStateFailed: BarrierTracker._step,
    SubtaskDeclined: BarrierTracker._step,
    SubtaskFinalState: BarrierTracker._final_state,
    CheckpointStored: BarrierTracker._stored,
    CheckpointStoreFailed: BarrierTracker._step,
    CheckpointDiscarded: BarrierTracker._discarded,
}
