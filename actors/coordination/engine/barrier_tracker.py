# SPDX-License-Identifier: Apache-2.0

"""The actor around one ``BarrierTracker``: the root of one operator's actors.

Every decision of the attempt ledger about this operator passes through here on its way to the coordinator, so that
one mailbox fixes the order of checkpoints against failures and resets (H16, H18). It is the parent of the
coordinator and of every gateway; they end with it.

``CheckpointRequests`` has the triggered checkpoints that are not answered yet: since when, and who waits for them.
``CheckpointWrites`` has their durable writes, of which several may be in progress concurrently (H43).
``StateRetention`` has the files that they name, if there are any (H190).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from actors import ActorContext, ActorRef, Background, DirectActor, Reply
from actors.actor import DeadlineTimer
from actors.coordination.engine.coordinator import CoordinatorActor, FailureLatch
from actors.coordination.engine.gateway import OpenGateways
from actors.coordination.engine.inputs import CheckpointLabels
from actors.coordination.engine.messages import (
    AnnounceBatch,
    AnnounceNext,
    AskLabelledWork,
    AttemptConnection,
    AwaitSettled,
    BatchDone,
    ClientRequest,
    CoordinatorMessage,
    FilesGathered,
    Flush,
    GatewayMessage,
    LabelledWork,
    LedgerDecided,
    NoteAwaited,
    OperatorView,
    RecordsListed,
    RequestCheckpoint,
    Settled,
    StartCoordinator,
    StartOperator,
    Timed,
    TrackerMessage,
    ViewGateways,
    ViewOperator,
    WithdrawBatch,
    WithdrawCheckpoint,
)
from actors.coordination.engine.operator_config import UNBOUNDED, DiscardRefused, OperatorConfig, OperatorPorts
from actors.coordination.engine.state_retention import Gathered, StateRetention, StatesPort
from actors.coordination.host.gateway import Announcer
from actors.coordination.host.given import ResetNotSupported, why_not_resettable
from actors.coordination.host.part import Parts
from actors.coordination.statistics import OperatorStatistics, PartStatistics
from protocol.attempts import (
    AttemptAccepted,
    OperatorReset,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
)
from protocol.barrier_tracker import (
    AbortRequested,
    AwaitUploads,
    CheckpointDiscarded,
    CheckpointStored,
    CheckpointStoreFailed,
    CheckpointTriggered,
    CloseSubtask,
    CollectRecorded,
    CompletedCheckpoint,
    CoordinatorSnapshotTaken,
    DiscardCheckpoint,
    EndSavepoint,
    InputBegan,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NotifyCheckpointDiscarded,
    OperatorResetToCheckpoint,
    RaiseGlobalFailure,
    RefuseCheckpoint,
    ReopenSubtask,
    ReportStale,
    RestoreAttempt,
    SnapshotCoordinator,
    StoreCheckpoint,
    SubtaskFinalState,
    SubtaskResetToCheckpoint,
    SubtaskStateStored,
    TrackerEffect,
    TrackerInput,
    TriggerCheckpoint,
)
from protocol.barrier_tracker.pending import files_of, with_copies
from protocol.barrier_tracker.rescale import refitted
from protocol.barrier_tracker.tracker import ONE_OF_MANY, BarrierTracker
from protocol.describing import describe
from protocol.errors import HeadgateError, InputRefused
from protocol.file_retention import ClaimConfirmed, FilesDeleted, FilesListed, RestoreChosen
from protocol.gateway.types import CheckpointOutcome, CheckpointOver, CloseRequested
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.wire.messages import RestoreMode
from protocol.wire.state_handles import StateHandle

T = TypeVar("T")


class CheckpointFailed(HeadgateError):
    """A checkpoint was aborted, or never began; the message says why. Take it again when the cause is gone."""


@dataclass(frozen=True, slots=True)
class _Request:
    since: float
    reply_to: Reply[int] | None  # None if the schedule asked
    savepoint_directory: str | None


class CheckpointRequests:
    """One entry for each trigger, until one of the four ways to end answers it. Loop only.

    ``final_pending``, as an argument: a run has succeeded, and no checkpoint that started after its end is complete.
    ``uncommitted``: why the last checkpoint failed while that was the case, whenever it began. It is empty once a later
    one has completed.
    """

    def __init__(self, statistics: OperatorStatistics) -> None:
        self._open: dict[int, _Request] = {}
        self._statistics = statistics
        self.uncommitted = ""

    def savepoint_directory(self, checkpoint_id: int) -> str:
        """The directory of a savepoint that is in progress."""
        directory = self._open[checkpoint_id].savepoint_directory
        assert directory is not None
        return directory

    @property
    def open_ids(self) -> list[int]:
        """The triggered checkpoints that are not answered yet, ascending."""
        return list(self._open)

    def is_savepoint(self, checkpoint_id: int) -> bool:
        return self._open[checkpoint_id].savepoint_directory is not None

    def triggered(
        self,
        checkpoint_id: int,
        now: float,
        reply_to: Reply[int] | None = None,
        savepoint_directory: str | None = None,
    ) -> None:
        self._open[checkpoint_id] = _Request(now, reply_to, savepoint_directory)

    def without_id(self, error: Exception, reply_to: Reply[int] | None, *, final_pending: bool) -> None:
        """A checkpoint was requested or due, but no id was available."""
        reason = f"no checkpoint id: {describe(error)}"
        self._statistics.checkpoints_refused += 1
        if final_pending:
            self.uncommitted = reason
        _fail(reply_to, reason, error)

    def completed(self, checkpoint_id: int, now: float, files_bytes: int, uploaded_bytes: int) -> None:
        """A checkpoint is complete. It names files with ``files_bytes``; ``uploaded_bytes`` of them are new."""
        request = self._open.pop(checkpoint_id)
        statistics = self._statistics
        statistics.checkpoints_completed += 1
        statistics.last_completed_checkpoint_id = checkpoint_id
        statistics.last_checkpoint_ms = round((now - request.since) * 1e3, 3)
        statistics.checkpoint_us.record((now - request.since) * 1e6)
        statistics.last_checkpoint_files_bytes = files_bytes
        statistics.last_checkpoint_uploaded_bytes = uploaded_bytes
        statistics.uploaded_bytes += uploaded_bytes
        self.uncommitted = ""
        if request.reply_to is not None:
            request.reply_to.answer(checkpoint_id)

    def savepoint_completed(self, checkpoint_id: int) -> bool:
        """A savepoint is complete. False if nobody waits for it any more, so that nobody would learn its name."""
        request = self._open.pop(checkpoint_id)
        self._statistics.savepoints_completed += 1
        return request.reply_to is not None and request.reply_to.answer(checkpoint_id)

    def withdrawn(self, reply_to: Reply[int]) -> int | None:
        """The requester waits no longer, and gets no answer. Returns the id of its checkpoint; None if it is over."""
        for checkpoint_id, request in self._open.items():
            if request.reply_to is reply_to:
                self._open[checkpoint_id] = replace(request, reply_to=None)
                return checkpoint_id
        return None

    def aborted(self, checkpoint_id: int, reason: str, *, final_pending: bool, written: bool) -> None:
        """A checkpoint was aborted.

        ``written``: its write had begun, so it may exist. The requester of a savepoint must know that (H64).
        """
        self._statistics.checkpoints_aborted += 1
        self._statistics.last_abort_reason = reason
        directory = self._open[checkpoint_id].savepoint_directory
        if written and directory is not None:
            reason = (
                f"{reason}; its file may exist in {directory}, or appear there later: do not restore it, because what "
                "it refers to may have been deleted"
            )
        self._failed(checkpoint_id, reason, final_pending)

    def refused(self, checkpoint_id: int, reason: str, *, final_pending: bool) -> None:
        self._statistics.checkpoints_refused += 1
        self._failed(checkpoint_id, reason, final_pending)

    def _failed(self, checkpoint_id: int, reason: str, final_pending: bool) -> None:
        request = self._open.pop(checkpoint_id)
        if final_pending:
            self.uncommitted = f"checkpoint {checkpoint_id}: {reason}"
        _fail(request.reply_to, f"checkpoint {checkpoint_id}: {reason}")


def _fail(reply_to: Reply[int] | None, reason: str, cause: Exception | None = None) -> None:
    if reply_to is not None:
        failure = CheckpointFailed(reason)
        failure.__cause__ = cause
        reply_to.fail(failure)


Discard = Callable[[int], Awaitable[None]]

_FIRST_RETRY_S = 1.0
_RETRY_S_MAX = 60.0


class CheckpointWrites:
    """Writes and discards checkpoints concurrently with the tracker's actor, which gets each outcome as a message.

    A discard that fails is tried again, with growing delays. That ends when it succeeds, when the storage says that no
    try can succeed (``DiscardRefused``), when the doubt ends in another way (``no_doubt``), or when the actor ends.
    Nothing waits for it. Loop only.
    """

    def __init__(self, context: ActorContext[TrackerMessage]) -> None:
        self._context = context
        self._writes: dict[int, Background] = {}
        self._in_doubt: set[int] = set()

    def __contains__(self, checkpoint_id: int) -> bool:
        """Whether the write of this checkpoint has begun, and its fate is not decided yet."""
        return checkpoint_id in self._writes

    @property
    def ids(self) -> list[int]:
        """The checkpoints whose writes have begun, and whose fate is not decided yet."""
        return list(self._writes)

    def gather(self, checkpoint_id: int, gather: Callable[[], Awaitable[Gathered]]) -> None:
        """Read what the checkpoint names, before its write. ``FilesGathered`` or ``CheckpointStoreFailed`` follows."""
        self._run(checkpoint_id, gather, lambda found: FilesGathered(checkpoint_id, *found))

    def start(
        self,
        checkpoint: CompletedCheckpoint,
        write: Callable[[CompletedCheckpoint], Awaitable[None]],
        copied: dict[StateHandle, StateHandle],
    ) -> None:
        """Begin the write. ``CheckpointStored`` or ``CheckpointStoreFailed`` follows, unless it is taken back first.

        ``copied``: as in ``CheckpointStored``.
        """
        stored = CheckpointStored(checkpoint.checkpoint_id, copied)
        self._run(checkpoint.checkpoint_id, partial(write, checkpoint), lambda _: stored)

    def _run(
        self,
        checkpoint_id: int,
        step: Callable[[], Awaitable[T]],
        to_message: Callable[[T], TrackerMessage],
    ) -> None:
        self._writes[checkpoint_id] = self._context.run(
            step,
            on_result=to_message,
            on_error=lambda error: CheckpointStoreFailed(checkpoint_id, describe(error)),
        )

    def kept(self, checkpoint_id: int) -> None:
        """The checkpoint is durable, and stays."""
        del self._writes[checkpoint_id]

    def take_back(self, checkpoint_id: int, discard: Discard) -> None:
        """Cancel the write if it still runs, and discard the checkpoint; ``CheckpointDiscarded`` follows.

        ``discard``: how to remove what has been written. Work that the write began in a thread continues. Only the
        storage knows whether the checkpoint still appears.
        """
        work = self._writes.pop(checkpoint_id, None)
        if work is not None:
            work.cancel()
        self._in_doubt.add(checkpoint_id)
        self._context.run(self._discard, checkpoint_id, discard)

    def no_doubt(self, checkpoint_id: int) -> None:
        """The checkpoint's fate is known, so a failed discard is not tried again."""
        self._in_doubt.discard(checkpoint_id)

    async def _discard(self, checkpoint_id: int, discard: Discard) -> None:
        log, delay_s = self._context.log.bind(checkpoint_id=checkpoint_id), _FIRST_RETRY_S
        while True:
            try:
                await discard(checkpoint_id)
            except DiscardRefused as error:
                log.warning("checkpoint stays in doubt", error=str(error))
                return
            except Exception as error:  # it fails nothing (H48)
                log.warning("checkpoint discard failed", error=describe(error), retry_s=delay_s)
            else:
                self._in_doubt.discard(checkpoint_id)
                self._context.self_ref.tell(CheckpointDiscarded(checkpoint_id))
                return
            if checkpoint_id in self._in_doubt:
                await self._context.clock.sleep(delay_s)
            if checkpoint_id not in self._in_doubt:
                return
            delay_s = min(2 * delay_s, _RETRY_S_MAX)


class BarrierTrackerActor(DirectActor[TrackerMessage]):
    """Run one operator's ``BarrierTracker`` and carry out its effects; see the module."""

    def __init__(
        self,
        parts: Parts,
        config: OperatorConfig,
        ports: OperatorPorts,
        statistics: OperatorStatistics,
    ) -> None:
        self._parts = parts
        self._config = config
        self._ports = ports
        self._statistics = statistics
        checkpoint = replace(config.checkpoint, mode=config.mode)
        self._table = parts.table
        statistics.table, statistics.parts = self._table, [PartStatistics() for _ in self._table.parts]
        self._machine = BarrierTracker(
            config.operator_id,
            config.parallelism,
            checkpoint,
            None if config.restored is None else refitted(config.restored, self._table),
            restored_elsewhere=bool(config.files_from),
            barriers_apart=config.inject_barrier is not None,
            limits=config.wire_limits,
        )
        self._requests = CheckpointRequests(statistics)
        self._labels = CheckpointLabels(config.restored, config.restored_input)
        self._pending_ids: tuple[int, ...] = ()  # as the labels know them
        self._accepting: dict[int, AttemptConnection] = {}
        self._failures = FailureLatch(config.operator_id, ports.report, ports.failed)
        self._run_is_on = False
        self._run_id = -1
        self._partitions = config.parallelism  # of the run's input
        self._has_run = False
        self._input_refused: InputRefused | None = None
        self._held: deque[LedgerDecided] = deque()  # of a run that waits for the commit of the previous one's output
        self._awaiting_settled: list[Reply[Settled]] = []
        self._deadline = DeadlineTimer()
        self._announcer: Announcer[GatewayMessage]
        self._coordinator_ref: ActorRef[CoordinatorMessage]
        self._gateways: OpenGateways
        self._writes: CheckpointWrites
        self._retention: StateRetention
        self._may_have_files = config.restored is not None and bool(files_of(config.restored))
        self._to_write: dict[int, StoreCheckpoint] = {}  # what names files, until it is being written
        self._copied: dict[int, dict[StateHandle, StateHandle]] = {}  # for these
        self._file_bytes: dict[int, tuple[int, int]] = {}  # of the files that it names, and of those uploaded for it
        if config.restored is not None:
            statistics.last_completed_checkpoint_id = config.restored.checkpoint_id

    async def started(self, context: ActorContext[TrackerMessage]) -> None:
        loop, self_ref = asyncio.get_running_loop(), context.self_ref
        self._context, self._now, self._log = context, context.clock.now, context.log

        def next_turn() -> None:
            loop.call_soon(announce_next)

        def announce_next() -> None:
            if self_ref.is_alive:
                self_ref.tell_direct(AnnounceNext())

        self._announcer = Announcer(self._config.gateways_per_turn, next_turn)
        self._coordinator_ref = context.spawn(
            lambda: CoordinatorActor(
                self._parts,
                operator_id=self._config.operator_id,
                parallelism=self._config.parallelism,
                mode=self._config.mode,
                snapshot_timeout_s=self._config.snapshot_timeout_s,
                store=self._ports.coordinator_store,
                report=self._ports.report,
                tracker_ref=context.self_ref,
                statistics=self._statistics,
                failures=self._failures,
                announcer=self._announcer,
                hold_events=self._config.checkpoint.hold_events,
                watch=self._ports.watch,
                report_s=self._config.method_report_s,
                limits=self._config.wire_limits,
                look_at_run=lambda: self._ports.look_at_run(self._run_id),
                is_pending=lambda checkpoint_id: checkpoint_id in self._machine.pending_ids,
            ),
            name="coordinator",
            mailbox=UNBOUNDED,
        )
        self._writes = CheckpointWrites(context)
        self._retention = StateRetention(context, self._ports.states, self._write_allowed, self._write_refused)
        self._gateways = OpenGateways(
            context,
            self._config,
            replace(self._ports, gateway_closed=self._attempt_over),
            self._statistics,
            self._coordinator_ref,
            self._announcer,
            self._table,
        )

    def handle(self, context: ActorContext[TrackerMessage], message: TrackerMessage) -> None:
        if type(message) in ONE_OF_MANY and self._machine.take_one_of_many(message):
            return
        now = self._now()
        self._handle_other(message, now)
        while self._held and not self._must_wait(self._held[0]):
            self._take_decision(now, self._held.popleft())
        self._deadline.arm(context, self._machine.next_deadline(), now)
        self._answer_if_settled()

    def _handle_other(self, message: TrackerMessage, now: float) -> None:
        match message:
            case AnnounceNext():
                self._announcer.go_on()
            case StartOperator(reply_to):
                restored = self._config.restored
                point = None if restored is None else (restored.checkpoint_id, restored.coordinator_state)
                self._retention.start()
                self._coordinator_ref.tell(StartCoordinator(reply_to, point))
            case ClientRequest():
                self._coordinator_ref.tell(message)
            case NoteAwaited():
                self._gateways.tell_all(message)
            case RequestCheckpoint(reply_to, savepoint_directory, counts):
                self._trigger(now, reply_to, savepoint_directory, counts=counts)
            case WithdrawCheckpoint(reply_to):
                self._withdraw(reply_to, now)
            case AnnounceBatch() | WithdrawBatch() | BatchDone():
                self._take_batch(message, now)
            case LedgerDecided():
                self._held.append(message)
            case AskLabelledWork() | ViewOperator() | ViewGateways() | AwaitSettled():
                self._answer(message)
            case (
                FilesGathered()
                | RecordsListed()
                | RestoreChosen()
                | FilesListed()
                | ClaimConfirmed()
                | FilesDeleted()
                | SubtaskStateStored()
                | SubtaskFinalState(files=StateHandle())
            ):
                self._hear_of_files(message, now)
            case _:
                if isinstance(message, TimePassed):
                    self._deadline.fired()
                self._handle(message, now)

    def _withdraw(self, reply_to: Reply[int], now: float) -> None:
        checkpoint_id = self._requests.withdrawn(reply_to)
        if checkpoint_id is not None:
            self._handle(AbortRequested(checkpoint_id, "its requester no longer waits for it"), now)

    def _hear_of_files(
        self,
        message: FilesGathered
        | RecordsListed
        | RestoreChosen
        | FilesListed
        | ClaimConfirmed
        | FilesDeleted
        | SubtaskStateStored
        | SubtaskFinalState,
        now: float,
    ) -> None:
        match message:
            case SubtaskStateStored() | SubtaskFinalState():
                self._may_have_files = True
                self._handle(message, now)
            case FilesGathered():
                self._gathered(message)
            case RecordsListed(checkpoint_ids):
                self._retention.records_listed(checkpoint_ids)
            case _:
                self._retention.tell(message)

    def _take_batch(self, message: AnnounceBatch | WithdrawBatch | BatchDone, now: float) -> None:
        match message:
            case AnnounceBatch(batch, adopted):
                self._labels.announce(batch, adopted=adopted)
            case WithdrawBatch():
                self._labels.withdraw()
            case BatchDone(batch):
                self._labels.done_without_run(batch)
                self._handle(InputBegan(same=False), now)

    def _handle(self, machine_input: TrackerInput, now: float, callback_us: int | None = None) -> None:
        if type(machine_input) in OBSERVED_INPUTS:
            self._ports.observe(machine_input, now)
        effects = self._machine.handle(machine_input, now)
        if effects:
            self._observe(effects, now)
            self._carry_out(effects, now, callback_us)
        pending_ids = self._machine.pending_ids
        if pending_ids != self._pending_ids:
            self._pending_ids = pending_ids
            self._labels.see(pending_ids)
        if effects and type(effects[-1]) is TriggerCheckpoint:
            self._trigger(now)

    def _observe(self, effects: Sequence[TrackerEffect], now: float) -> None:
        """Show the effects that are steps of the operator or of a checkpoint; of those to many subtasks, the first."""
        shown: type | None = None
        for effect in effects:
            kind = type(effect)
            if kind in OBSERVED_EFFECTS and (kind is not shown or kind not in ONE_FOR_EACH_SUBTASK):
                self._ports.observe(effect, now)
                shown = kind

    def _trigger(
        self,
        now: float,
        reply_to: Reply[int] | None = None,
        savepoint_directory: str | None = None,
        *,
        counts: bool = True,
    ) -> None:
        """Take a checkpoint that was requested or is due. Ids come from the storage, which may have none (H4)."""
        try:
            checkpoint_id = self._ports.next_checkpoint_id()
        except Exception as error:
            self._log.warning("checkpoint id not available", error=describe(error), exc_info=error)
            self._requests.without_id(error, reply_to, final_pending=self._machine.final_pending)
            return
        target = "" if savepoint_directory is None else self._ports.name_savepoint(checkpoint_id, savepoint_directory)
        self._requests.triggered(checkpoint_id, now, reply_to, savepoint_directory)
        self._retention.began(checkpoint_id)
        self._handle(CheckpointTriggered(checkpoint_id, savepoint_directory is not None, target, counts), now)

    def _must_wait(self, message: LedgerDecided) -> bool:
        """Whether a run begins before the last output of the previous one is committed, which its reset would drop."""
        begins = isinstance(message.decision, RunStarted | OperatorReset) and not self._run_is_on
        return begins and self._machine.final_pending and self._machine.next_deadline() is not None

    def _take_decision(self, now: float, message: LedgerDecided) -> None:
        """Act on a decision of the ledger, then give it to the machine unchanged."""
        decision = message.decision
        self._ports.observe(decision, now)
        match decision:
            case RunStarted():
                self._start_run(now, decision, message.action)
                return
            case RunEnded(succeeded=succeeded, job_succeeded=job_succeeded):
                self._run_is_on = False
                self._labels.run_ended(succeeded, job_succeeded)
            case AttemptAccepted(attempt, partitions=partitions):
                self._partitions = partitions or self._config.parallelism
                if self._input_refused is not None:
                    # This comes before the answer to the registration, so no attempt of the run is ever ready.
                    error, self._input_refused = self._input_refused, None
                    self._failures.raise_failure(self._failures.resets, error, str(error))
                assert message.connection is not None
                self._accepting[attempt.task_attempt_id] = message.connection
        self._handle(decision, now, message.callback_us)

    def _start_run(self, now: float, decision: RunStarted, action: str) -> None:
        """Begin a run. If it is not the first one, the reset of the coordinator follows (H55)."""
        self._run_is_on = True
        self._run_id = decision.run_id
        self._requests.uncommitted = ""
        if self._config.mode is RestoreMode.STREAMING:
            same, refused = self._labels.run_begins(action)
            if refused:
                self._input_refused = InputRefused(f"operator {self._config.operator_id!r}: {refused}")
            else:
                self._handle(InputBegan(same), now)
                if not (same or self._has_run) and self._machine.restore_id >= 0:
                    self._handle(OperatorReset(self._config.operator_id, "another input begins"), now)
        self._has_run = True

    def _carry_out(
        self,
        effects: Sequence[TrackerEffect],
        now: float,
        callback_us: int | None,
    ) -> None:
        closing: list[CloseSubtask] = []
        for effect in effects:
            if type(effect) is CloseSubtask:
                closing.append(effect)
                continue
            if closing:
                self._close(closing)
                closing = []
            self._carry_out_one(effect, now, callback_us)
        if closing:
            self._close(closing)

    def _carry_out_one(self, effect: TrackerEffect, now: float, callback_us: int | None) -> None:
        match effect:
            case ReopenSubtask(attempt, checkpoint_id):
                self._gateways.tell([attempt], CheckpointOver(checkpoint_id, CheckpointOutcome.ABORTED))
            case StoreCheckpoint():
                self._store(effect)
            case AwaitUploads():
                pass  # it is shown, and the subtasks report by themselves
            case DiscardCheckpoint(checkpoint_id, savepoint):
                discard = self._ports.discard_savepoint if savepoint else self._ports.discard
                self._writes.take_back(checkpoint_id, discard)
            case NotifyCheckpointComplete() | EndSavepoint() | NotifyCheckpointAborted() | RefuseCheckpoint():
                self._end_checkpoint(effect, now)
            case ReportStale(what):
                self._log.debug("stale input ignored", what=what)
            case RaiseGlobalFailure(cause):
                self._log.error("too many checkpoints failed", cause=cause)
                self._failures.raise_failure(self._failures.resets, CheckpointFailed(cause), cause)
            case RestoreAttempt(attempt=attempt):
                connection, before, refused = self._accepting.pop(attempt.task_attempt_id), effect.partitions_before, ""
                if before:
                    refused = self._labels.why_not_counted(before, self._partitions)
                self._gateways.open(effect, connection, refused)
            case TriggerCheckpoint():
                pass  # carried out after the other effects, because it leads to new ones
            case _:
                self._tell_coordinator(effect, callback_us)

    def _close(self, closing: Sequence[CloseSubtask]) -> None:
        """Tell the gateways of a checkpoint that begins; an input starts at most one."""
        message = CloseRequested(closing[0].checkpoint_id)
        self._gateways.tell([effect.attempt for effect in closing], message)

    def _tell_coordinator(self, effect: TrackerEffect, callback_us: int | None) -> None:
        """Pass an effect on as the message that the coordinator handles."""
        tell = self._coordinator_ref.tell
        match effect:
            case SnapshotCoordinator() | CollectRecorded():
                tell(effect)
            case NotifyCheckpointDiscarded(checkpoint_id):
                self._writes.no_doubt(checkpoint_id)
                self._retention.doubt_ended(checkpoint_id)
                tell(effect)
            case SubtaskReady(attempt):
                readiness = self._gateways.readiness(attempt)
                if readiness is not None:  # otherwise it is over, and its gateway is closed (H11)
                    tell(readiness)
            case SubtaskFinished(attempt):
                tell(_timed(effect, callback_us))
                self._gateways.close(attempt, "it has finished")
            case SubtaskFailed(attempt, reason):
                why = f"{reason.kind.name.lower()}: {reason.text}"
                self._gateways.reject_sends(attempt, why)
                tell(_timed(effect, callback_us))  # without waiting for the end of the gateway
                self._gateways.close(attempt, why)
            case SubtaskResetToCheckpoint():
                tell(_timed(effect, callback_us))
            case OperatorResetToCheckpoint():
                self._failures.reset()
                if self._has_run and (problem := why_not_resettable(self._config.operator_id, self._parts)):
                    # This comes before the answer to the registration, so no attempt of the new run is ever ready.
                    self._failures.raise_failure(self._failures.resets, ResetNotSupported(problem), problem)
                tell(effect)
            case RunEnded():
                self._gateways.close_all("the run has ended")
                tell(_timed(effect, callback_us))
            case _:
                raise TypeError(f"no effect of a tracker: {effect!r}")

    def _attempt_over(self, attempt: ExecutionAttempt) -> None:
        if self._may_have_files:
            self._retention.attempt_over(attempt.task_attempt_id)
        self._ports.gateway_closed(attempt)

    def _store(self, effect: StoreCheckpoint) -> None:
        """Have a checkpoint written. If it may name files, these are read first, and their retention must allow it."""
        checkpoint = replace(effect.checkpoint, parts=self._table.names)
        checkpoint_id = checkpoint.checkpoint_id
        if self._config.mode is RestoreMode.STREAMING:
            checkpoint = replace(checkpoint, label=self._labels.of(checkpoint_id))
        states = self._ports.states
        if states is None and effect.to_copy:
            self._writes.start(checkpoint, _refuse_copies, {})
            return
        has_files = self._may_have_files and bool(files_of(checkpoint))  # thousands of subtasks usually have none
        if has_files:
            self._retention.turn_on(self._requests.open_ids, self._writes.ids)
        if not self._retention.is_on:
            self._write(checkpoint, effect.savepoint, (), {})
            return
        effect = self._to_write[checkpoint_id] = replace(effect, checkpoint=checkpoint)
        if not has_files:
            self._retention.named(checkpoint_id, frozenset())
            return
        assert states is not None
        gather = partial(_gathered_for_savepoint if effect.savepoint else _gathered, states, effect)
        self._writes.gather(checkpoint_id, gather)

    def _gathered(self, found: FilesGathered) -> None:
        effect = self._to_write.get(found.checkpoint_id)
        if effect is not None:  # otherwise it was given up meanwhile
            self._copied[found.checkpoint_id] = found.copied
            total = sum([files.total_bytes for files in files_of(effect.checkpoint)])
            self._file_bytes[found.checkpoint_id] = total, found.uploaded_bytes
            self._retention.named(found.checkpoint_id, found.names)

    def _write_allowed(self, checkpoint_id: int) -> None:
        """No file that the checkpoint names will be deleted."""
        effect = self._to_write.pop(checkpoint_id, None)
        if effect is not None:
            self._write(effect.checkpoint, effect.savepoint, effect.to_copy, self._copied.pop(checkpoint_id, {}))

    def _write_refused(self, checkpoint_id: int, reason: str) -> None:
        self._context.self_ref.tell(CheckpointStoreFailed(checkpoint_id, reason))

    def _write(
        self,
        checkpoint: CompletedCheckpoint,
        savepoint: bool,
        to_copy: Sequence[StateHandle],
        copied: dict[StateHandle, StateHandle],
    ) -> None:
        checkpoint = with_copies(checkpoint, copied) if copied else checkpoint
        if not savepoint:
            self._writes.start(checkpoint, self._ports.store, copied)
            return
        directory = self._requests.savepoint_directory(checkpoint.checkpoint_id)
        states = self._ports.states

        async def write(checkpoint: CompletedCheckpoint) -> None:
            if states is not None and to_copy:
                await states.copy_for_savepoint(checkpoint.checkpoint_id, to_copy)
            await self._ports.store_savepoint(checkpoint, directory)

        self._writes.start(checkpoint, write, copied)

    def _checkpoint_over(self, checkpoint_id: int, *, in_doubt: bool = False) -> None:
        """A checkpoint was aborted or refused, or a savepoint has ended."""
        self._to_write.pop(checkpoint_id, None)
        self._copied.pop(checkpoint_id, None)
        self._file_bytes.pop(checkpoint_id, None)
        self._retention.given_up(checkpoint_id, in_doubt=in_doubt)

    def _end_checkpoint(
        self,
        effect: NotifyCheckpointComplete | EndSavepoint | NotifyCheckpointAborted | RefuseCheckpoint,
        now: float,
    ) -> None:
        checkpoint_id = effect.checkpoint_id
        match effect:
            case NotifyCheckpointComplete():
                self._writes.kept(checkpoint_id)
                self._ports.completed(checkpoint_id)
                self._retention.completed(checkpoint_id)
                self._labels.complete(checkpoint_id)
                self._gateways.tell_all(CheckpointOver(checkpoint_id, CheckpointOutcome.COMPLETED))
                self._coordinator_ref.tell(effect)
                self._requests.completed(checkpoint_id, now, *self._file_bytes.pop(checkpoint_id, (0, 0)))
            case EndSavepoint():
                self._checkpoint_over(checkpoint_id)
                self._gateways.tell_all(CheckpointOver(checkpoint_id, CheckpointOutcome.SAVEPOINT))
                if self._requests.savepoint_completed(checkpoint_id):
                    self._writes.kept(checkpoint_id)
                else:
                    self._writes.take_back(checkpoint_id, self._ports.discard_savepoint)
            case NotifyCheckpointAborted(reason=reason, in_doubt=in_doubt):
                self._log.info("checkpoint aborted", checkpoint_id=checkpoint_id, reason=reason, in_doubt=in_doubt)
                self._gateways.tell_all(CheckpointOver(checkpoint_id, CheckpointOutcome.ABORTED))
                self._coordinator_ref.tell(effect)
                if not in_doubt:
                    self._coordinator_ref.tell(NotifyCheckpointDiscarded(checkpoint_id))
                written = checkpoint_id in self._writes
                if not (written or checkpoint_id in self._to_write):
                    self._discard_files_of_savepoint(checkpoint_id)
                self._checkpoint_over(checkpoint_id, in_doubt=in_doubt)
                self._requests.aborted(
                    checkpoint_id, reason, final_pending=self._machine.final_pending, written=written
                )
            case RefuseCheckpoint(reason=reason):
                self._log.info("checkpoint refused", checkpoint_id=checkpoint_id, reason=reason)
                self._checkpoint_over(checkpoint_id)
                self._discard_files_of_savepoint(checkpoint_id)
                self._requests.refused(checkpoint_id, reason, final_pending=self._machine.final_pending)

    def _discard_files_of_savepoint(self, checkpoint_id: int) -> None:
        """A savepoint ends before its write, but tasks may have stored files in its folder."""
        if self._ports.states is not None and self._requests.is_savepoint(checkpoint_id):
            self._writes.take_back(checkpoint_id, self._ports.discard_savepoint)

    def _answer(self, question: AskLabelledWork | ViewOperator | ViewGateways | AwaitSettled) -> None:
        match question:
            case AwaitSettled(reply_to):
                self._awaiting_settled.append(reply_to)
            case AskLabelledWork(reply_to):
                labels = self._labels
                reply_to.answer(LabelledWork(labels.completed, labels.runs, self._failures.latched))
            case ViewOperator(view_to):
                machine, queued = self._machine, self._coordinator_ref.statistics().queued
                view_to.answer(
                    OperatorView(queued, len(self._gateways), machine.view(), machine.restore_id, machine.in_doubt_ids)
                )
            case ViewGateways(views_to, task_attempt_ids):
                views_to.answer(self._gateways.view(task_attempt_ids))

    def _answer_if_settled(self) -> None:
        """Answer ``AwaitSettled``, through the coordinator's mailbox: after everything that it was sent.

        While no attempt runs, the machine has a deadline exactly if a checkpoint is pending, waits, or is due.
        """
        if not self._awaiting_settled or self._run_is_on or self._machine.next_deadline() is not None:
            return
        settled = Settled(self._machine.restore_id, self._requests.uncommitted)
        for reply_to in self._awaiting_settled:
            self._coordinator_ref.tell(Flush(reply_to, settled))
        self._awaiting_settled.clear()


async def _refuse_copies(checkpoint: CompletedCheckpoint) -> None:
    raise CheckpointFailed(
        f"checkpoint {checkpoint.checkpoint_id} needs copies of files of states, and this application has no storage "
        "that has such files: set SidecarConfig(storage=...) to a directory or URL that all executors can write"
    )


async def _gathered(states: StatesPort, effect: StoreCheckpoint) -> Gathered:
    return await states.gather(effect.checkpoint, effect.to_copy)


async def _gathered_for_savepoint(states: StatesPort, effect: StoreCheckpoint) -> Gathered:
    names = await states.gather_for_savepoint(effect.checkpoint, effect.to_copy)
    return names, {files: files for files in effect.to_copy}, 0  # a copy has the names of its original


OBSERVED_INPUTS = frozenset({CheckpointTriggered, CoordinatorSnapshotTaken})
ONE_FOR_EACH_SUBTASK = frozenset({CloseSubtask})
OBSERVED_EFFECTS = frozenset(
    {
        CloseSubtask,
        SnapshotCoordinator,
        CollectRecorded,
        AwaitUploads,
        StoreCheckpoint,
        NotifyCheckpointComplete,
        EndSavepoint,
        NotifyCheckpointAborted,
        RefuseCheckpoint,
        SubtaskResetToCheckpoint,
        OperatorResetToCheckpoint,
        RaiseGlobalFailure,
    }
)
"""What ``OperatorPorts.observe`` is shown, in addition to every decision of the ledger."""


def _timed(
    message: SubtaskFailed | SubtaskFinished | SubtaskResetToCheckpoint | RunEnded, callback_us: int | None
) -> CoordinatorMessage:
    return message if callback_us is None else Timed(message, callback_us)


__all__ = ["OBSERVED_EFFECTS", "OBSERVED_INPUTS", "UNBOUNDED", "BarrierTrackerActor", "CheckpointFailed"]
