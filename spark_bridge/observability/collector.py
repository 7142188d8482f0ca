# SPDX-License-Identifier: Apache-2.0

"""Takes the status of a sidecar: asks the bridge and the operators' actors, and puts the answers together.

Many subtasks are read in slices, so that no turn of the event loop takes long. Each attempt is consistent in itself;
two attempts may be a few milliseconds apart.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from actors import ActorRef
from actors.clock import Clock
from actors.coordination import OperatorStatistics
from actors.coordination.engine.messages import GatewayView, OperatorView, TrackerMessage, ViewGateways, ViewOperator
from actors.coordination.statistics import SourceBacklog
from actors.coordination.user_calls import CallWatch
from protocol.attempts.views import AttemptView, KnownAttempts, RunView
from protocol.barrier_tracker.pending import CheckpointView, Phase, Step
from protocol.wire.messages import RestoreMode
from spark_bridge.bridge.messages import BridgeMessage, ViewAttempts, ViewRun
from spark_bridge.observability.journal import Journal, OperatorJournal
from spark_bridge.observability.meters import LatencySketch, LoopLag, Rates
from spark_bridge.observability.status import (
    AttemptStatus,
    AutoscaleStatus,
    CallStatus,
    CheckpointProgress,
    LatencyStatus,
    OperatorStatus,
    RegistrationStatus,
    RelayStatus,
    RunStatus,
    SidecarStatus,
    SourceStatus,
    SplitStatus,
)

T = TypeVar("T")

SLICE = 250
"""How many attempts one turn of the event loop reads."""
ANSWER_TIMEOUT_S = 10.0

COUNTS = (
    "attempts",
    "ready",
    "failures",
    "subtask_resets",
    "operator_resets",
    "runs",
    "events_sent",
    "events_held",
    "events_confirmed",
    "events_failed",
    "events_received",
    "requests_received",
    "client_requests",
    "requests_deferred",
    "messages_dropped",
    "checkpoints_completed",
    "checkpoints_aborted",
    "checkpoints_refused",
    "savepoints_completed",
    "uploaded_bytes",
)
"""The counts of ``OperatorStatistics`` that a status shows."""

_STEPS = {
    Step.AWAITING_CLOSE: "close",
    Step.AWAITING_ACKNOWLEDGE: "acknowledge",
    Step.AWAITING_STATE: "state",
    Step.SETTLED: "nothing",
}


class _Rows(NamedTuple):
    """Some attempts of an operator as a status shows them, and what they were made of."""

    views: list[AttemptView]
    ids: list[int]
    gateways: list[GatewayView | None]
    made: list[AttemptStatus]


_NO_ROWS = _Rows([], [], [], [])


class ObservedOperator:
    """What a status needs of one operator, in addition to the answers of its actors."""

    def __init__(
        self,
        tracker_ref: ActorRef[TrackerMessage],
        statistics: OperatorStatistics,
        watch: CallWatch,
        mode: RestoreMode,
        parallelism: int,
    ) -> None:
        self.tracker_ref = tracker_ref
        self.statistics = statistics
        self.watch = watch
        self.mode = mode
        self.parallelism = parallelism
        self.autoscale: Callable[[], AutoscaleStatus] | None = None
        self.known = KnownAttempts()
        self.rows: dict[int, _Rows] = {}
        self.rates = Rates()
        self.confirm = LatencySketch(statistics.confirm_us)
        self.request = LatencySketch(statistics.request_us)
        self.checkpoint = LatencySketch(statistics.checkpoint_us)
        self.fact = LatencySketch(statistics.fact_us)

    def counts(self) -> dict[str, int]:
        """The names and the current counts."""
        return {name: getattr(self.statistics, name) for name in COUNTS}

    def sample(self, now: float) -> None:
        """Keep the figures of the latencies and rates up to date; about once a second."""
        self.rates.sample(self.counts(), now)
        for sketch in (self.confirm, self.request, self.checkpoint, self.fact):
            sketch.fold(now)


@dataclass(slots=True)
class Process:
    """What a status says about the sidecar as a whole. ``cores`` is asked only while a subtask has no task."""

    host: str
    port: int
    tls: bool
    relay: Callable[[], RelayStatus]
    started: float
    cores: Callable[[], Awaitable[int | None]]
    loop_lag: LoopLag = field(default_factory=LoopLag)


class StatusCollector:
    """Takes statuses. Loop only; several may be taken at the same time."""

    def __init__(
        self,
        bridge_ref: ActorRef[BridgeMessage],
        clock: Clock,
        journal: Journal,
        process: Process,
        operators: Callable[[], Mapping[str, ObservedOperator]],
    ) -> None:
        self._bridge_ref = bridge_ref
        self._clock = clock
        self._journal = journal
        self._process = process
        self._operators = operators

    async def take(self) -> SidecarStatus:
        """The status now. Raises ``AskTimeout`` if an actor does not answer within 10 s."""
        process = self._process
        operators = {name: await self._operator(name, one) for name, one in dict(self._operators()).items()}
        lacks_tasks = any(one.run and one.run.subtasks_seen < one.parallelism for one in operators.values())
        return SidecarStatus(
            taken_at=time.time(),
            uptime_s=self._clock.now() - process.started,
            host=process.host,
            port=process.port,
            tls=process.tls,
            relay=process.relay(),
            loop_lag_p99_ms=process.loop_lag.percentile_ms(0.99),
            loop_lag_max_ms=process.loop_lag.percentile_ms(1.0),
            cores=await process.cores() if lacks_tasks else None,
            operators=operators,
            display_failures=self._journal.displays.failures(),
        )

    async def _operator(self, operator_id: str, operator: ObservedOperator) -> OperatorStatus:
        run: RunView | None = await self._bridge_ref.ask(
            lambda reply_to: ViewRun(operator_id, reply_to), timeout_s=ANSWER_TIMEOUT_S
        )
        view: OperatorView = await operator.tracker_ref.ask(ViewOperator, timeout_s=ANSWER_TIMEOUT_S)
        attempts: list[AttemptStatus] = []
        count = 0 if run is None else run.attempts
        if not count:
            operator.known.begin(None)
            operator.rows.clear()
        for first in range(0, count, SLICE):
            attempts.extend(await self._slice(operator_id, operator, first))
        now, journal, statistics = self._clock.now(), self._journal.of(operator_id), operator.statistics
        counts = operator.counts()
        return OperatorStatus(
            operator_id=operator_id,
            mode=operator.mode.name.lower(),
            parallelism=operator.parallelism,
            run=None if run is None else self._run(run, journal, now),
            call=_call(operator.watch),
            queued=view.queued,
            attempts=tuple(attempts),
            checkpoints=tuple(self._checkpoint(one, journal, now) for one in view.checkpoints),
            checkpoint_history=tuple(journal.checkpoints),
            failures=tuple(journal.failures),
            last_completed_checkpoint_id=statistics.last_completed_checkpoint_id,
            last_checkpoint_files_bytes=statistics.last_checkpoint_files_bytes,
            last_checkpoint_uploaded_bytes=statistics.last_checkpoint_uploaded_bytes,
            in_doubt=view.in_doubt,
            counts=counts,
            events_up_per_s=operator.rates.per_s("events_received", counts, now),
            events_down_per_s=operator.rates.per_s("events_sent", counts, now),
            requests_per_s=operator.rates.per_s("requests_received", counts, now),
            confirm=self._latency(operator.confirm, now),
            request=self._latency(operator.request, now),
            checkpoint=self._latency(operator.checkpoint, now),
            fact=self._latency(operator.fact, now),
            failures_by_kind=dict(statistics.failures_by_kind),
            timeline=tuple(journal.timeline),
            counters=self._shown("counters", statistics.counter_totals) or {},
            sources=self._shown("sources", lambda: _by_stage(statistics.sources())) or {},
            parts=self._shown("parts", lambda: _figures_of_parts(statistics)) or {},
            jobs_of_last_action=journal.jobs.count,
            autoscale=operator.autoscale and operator.autoscale(),
        )

    def _shown(self, figures: str, take: Callable[[], T]) -> T | None:
        """Figures that code of users or of other packages computes. They are missing from the status if it fails."""
        return self._journal.displays.run(figures, take)

    def _latency(self, sketch: LatencySketch, now: float) -> LatencyStatus:
        return self._shown("latencies", lambda: sketch.status(now)) or LatencyStatus()

    async def _slice(self, operator_id: str, operator: ObservedOperator, first: int) -> list[AttemptStatus]:
        views: list[AttemptView] = await self._bridge_ref.ask(
            lambda reply_to: ViewAttempts(operator_id, first, SLICE, operator.known, reply_to),
            timeout_s=ANSWER_TIMEOUT_S,
        )
        before = operator.rows.get(first, _NO_ROWS)
        ids = before.ids if before.views is views else [view.attempt.task_attempt_id for view in views]
        gateways: list[GatewayView | None] = await operator.tracker_ref.ask(
            lambda reply_to: ViewGateways(reply_to, ids), timeout_s=ANSWER_TIMEOUT_S
        )
        if before.views is views and before.gateways == gateways:  # in C, and most often of the same values
            return before.made
        made = []
        for index, (view, gateway) in enumerate(zip(views, gateways, strict=True)):
            if index < len(before.made) and before.views[index] is view and before.gateways[index] is gateway:
                made.append(before.made[index])
            else:
                made.append(_attempt(view, gateway, self._journal.epoch))
        operator.rows[first] = _Rows(views, ids, gateways, made)
        return made

    def _run(self, run: RunView, journal: OperatorJournal, now: float) -> RunStatus | None:
        if run.stage_id is None:
            return None
        began = now if journal.run_began is None else journal.run_began
        registrations = tuple(
            RegistrationStatus(held.subtask, held.task_attempt_id, now - held.since, held.waits_for.value)
            for held in run.held
        )
        return RunStatus(
            run.stage_id,
            self._journal.epoch + began,
            run.tasks_started,
            run.task_count,
            run.subtasks,
            run.missing,
            registrations,
            run.failed_cause or "",
        )

    def _checkpoint(self, view: CheckpointView, journal: OperatorJournal, now: float) -> CheckpointProgress:
        known = journal.under_way.get(view.checkpoint_id)
        triggered, phase_began = (now, now) if known is None else (known.triggered, known.phase_began)
        closed = view.phase is Phase.CLOSING and Step.AWAITING_CLOSE not in view.steps.values()
        return CheckpointProgress(
            view.checkpoint_id,
            view.savepoint,
            self._journal.epoch + triggered,
            "waiting" if closed else view.phase.value,
            now - phase_began,
            view.deadline - now,
            {subtask: _STEPS[step] for subtask, step in view.steps.items()},
        )


def _call(watch: CallWatch) -> CallStatus | None:
    call = watch.oldest
    return None if call is None else CallStatus(call.name, watch.age_s(call), call.place)


def _attempt(view: AttemptView, gateway: GatewayView | None, epoch: float) -> AttemptStatus:
    attempt = view.attempt
    head = (
        attempt.subtask,
        attempt.attempt,
        attempt.task_attempt_id,
        view.state.value,
        epoch + view.accepted_at,
        "" if view.failure is None else view.failure.name.lower(),
        view.host,
        view.executor_id,
    )
    if gateway is None:
        return AttemptStatus(*head, False, False, None, 0, None, 0, (), 0, 0, None)
    return AttemptStatus(
        *head,
        gateway.connected,
        gateway.ready,
        epoch + gateway.heard_at,
        gateway.events_unconfirmed,
        None if gateway.unconfirmed_since is None else epoch + gateway.unconfirmed_since,
        gateway.events_held,
        gateway.closed_for,
        gateway.events_untaken,
        gateway.bytes,
        None if gateway.requested_at is None else epoch + gateway.requested_at,
        None if gateway.deferred_at is None else epoch + gateway.deferred_at,
    )


def _figures_of_parts(statistics: OperatorStatistics) -> dict[str, Mapping[str, float]]:
    return {name: dict(figures) for name, figures in statistics.part_figures().items()}


def _by_stage(backlogs: Mapping[str, SourceBacklog]) -> dict[str, SourceStatus]:
    return {
        name: SourceStatus(*backlog[:3], tuple([SplitStatus(*one) for one in backlog.largest]))
        for name, backlog in backlogs.items()
    }
