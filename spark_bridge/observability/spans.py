# SPDX-License-Identifier: Apache-2.0

"""Spans for OpenTelemetry: runs, attempts, checkpoints with their phases, restores and restarts. Never one per event.

Needs the package ``opentelemetry-api`` (``pip install 'headgate[opentelemetry]'``). The spans go to the tracer provider
that the application has set; without one they cost a few microseconds each and go nowhere.

A run is the root of a trace with its attempts and restores below it. Each checkpoint is the root of a trace with its
phases below it, because a long run takes many of them. Links lead from each span to what caused it: from a checkpoint
to its run, from a restore to the failed attempt and to the checkpoint that it restores, from a restart to the run that
failed, and from a run to its restart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from actors.coordination.engine.operator_config import Observed
from protocol.attempts import AttemptAccepted, RunEnded, RunStarted, SubtaskFailed, SubtaskFinished, SubtaskReady
from protocol.barrier_tracker import CheckpointTriggered, OperatorResetToCheckpoint, SubtaskResetToCheckpoint
from protocol.describing import readable
from protocol.ids import ExecutionAttempt
from spark_bridge.common.errors import SidecarError
from spark_bridge.observability.journal import Journal, end_of, phase_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer, TracerProvider

CHECKPOINTS_LINKED = 100
"""How many completed checkpoints of an operator a restore can link to."""
WHOLE_OPERATOR = -1
"""In place of a subtask's number: the restore of everything."""


@dataclass(slots=True)
class _Checkpoint:
    span: Span
    phase: Span | None = None


@dataclass(slots=True)
class _Operator:
    """The open spans of one operator, and what later ones may link to."""

    run: Span | None = None
    failed_run: tuple[SpanContext, float] | None = None
    attempts: dict[int, Span] = field(default_factory=dict)
    failed: dict[int, SpanContext] = field(default_factory=dict)  # by subtask: its last failed attempt
    restores: dict[int, Span] = field(default_factory=dict)  # by subtask
    checkpoints: dict[int, _Checkpoint] = field(default_factory=dict)
    completed: OrderedDict[int, SpanContext] = field(default_factory=OrderedDict)


def require_opentelemetry() -> ModuleType:
    """The package's API. Raises ``SidecarError`` without it."""
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise SidecarError(
            "watching=Watching(opentelemetry=True) needs pip install 'headgate[opentelemetry]' where the sidecar runs"
        ) from error
    return trace


class Spans:
    """Turns what a journal tells into spans. Loop only.

    ``provider``: by default, the one that the application has set. Raises ``SidecarError`` without the package.
    ``close`` ends the spans that are open; it may be called twice.
    """

    def __init__(self, journal: Journal, provider: TracerProvider | None = None) -> None:
        self._trace: Any = require_opentelemetry()
        self._tracer: Tracer = self._trace.get_tracer("headgate", tracer_provider=provider)
        self._epoch = journal.epoch
        self._operators: dict[str, _Operator] = {}
        self._now = 0.0
        self._unsubscribe: Callable[[], None] = journal.subscribe("spans", self.observe)

    def close(self) -> None:
        """See the class."""
        self._unsubscribe()
        for operator in self._operators.values():
            for checkpoint in operator.checkpoints.values():
                self._end(checkpoint.phase, self._now)
                self._end(checkpoint.span, self._now)
            self._end_run(operator, self._now)
        self._operators.clear()

    def observe(self, operator_id: str, observed: Observed, now: float) -> None:
        """See ``Subscriber``."""
        self._now = now
        operator = self._operators.get(operator_id)
        if operator is None:
            operator = self._operators[operator_id] = _Operator()
        found = phase_of(observed)
        if found is not None:
            self._enter(operator, operator_id, observed, *found, now)
            return
        if (ended := end_of(observed)) is not None:
            checkpoint_id, outcome, reason = ended
            self._end_checkpoint(operator, checkpoint_id, "" if outcome == "completed" else reason or outcome, now)
            return
        match observed:
            case RunStarted(run_id=run_id):
                self._start_run(operator, operator_id, run_id, now)
            case RunEnded(succeeded=succeeded, reason=reason):
                self._run_ended(operator, succeeded, reason, now)
            case _:
                self._observe_attempts(operator, operator_id, observed, now)

    # --- runs and attempts ----------------------------------------------------------------------------------------

    def _observe_attempts(self, operator: _Operator, operator_id: str, observed: Observed, now: float) -> None:
        match observed:
            case AttemptAccepted(attempt):
                operator.attempts[attempt.task_attempt_id] = self._attempt(operator, attempt, now)
            case SubtaskReady(attempt):
                span = operator.attempts.get(attempt.task_attempt_id)
                if span is not None:
                    span.add_event("ready", timestamp=self._ns(now))
                self._end(operator.restores.pop(attempt.subtask, None), now)
                self._end(operator.restores.pop(WHOLE_OPERATOR, None), now)
            case SubtaskFinished(attempt):
                self._end(operator.attempts.pop(attempt.task_attempt_id, None), now)
            case SubtaskFailed(attempt, reason_of_failure):
                span = operator.attempts.pop(attempt.task_attempt_id, None) or self._attempt(operator, attempt, now)
                span.set_attribute("headgate.failure", reason_of_failure.kind.name.lower())
                operator.failed[attempt.subtask] = span.get_span_context()
                self._end(span, now, str(reason_of_failure))
            case SubtaskResetToCheckpoint(subtask, checkpoint_id):
                links = (operator.failed.get(subtask), operator.completed.get(checkpoint_id))
                self._restore(operator, operator_id, subtask, checkpoint_id, links, now)
            case OperatorResetToCheckpoint(checkpoint_id=checkpoint_id):
                failed = None if operator.failed_run is None else operator.failed_run[0]
                links = (failed, operator.completed.get(checkpoint_id))
                self._restore(operator, operator_id, WHOLE_OPERATOR, checkpoint_id, links, now)

    def _start_run(self, operator: _Operator, operator_id: str, run_id: int, now: float) -> None:
        if operator.run is not None:
            self._end_run(operator, now)
        links: list[SpanContext | None] = []
        if operator.failed_run is not None:
            failed, ended = operator.failed_run
            restart = self._start("headgate.restart", operator_id, ended, links=[failed])
            self._end(restart, now)
            links.append(restart.get_span_context())
            operator.failed_run = None
        operator.run = self._start("headgate.run", operator_id, now, links=links)
        operator.run.set_attribute("headgate.stage_id", run_id)

    def _run_ended(self, operator: _Operator, succeeded: bool, reason: str, now: float) -> None:
        if operator.run is not None and not succeeded:
            operator.failed_run = (operator.run.get_span_context(), now)
        self._end_run(operator, now, "" if succeeded else reason or "the run failed")

    def _end_run(self, operator: _Operator, now: float, problem: str = "") -> None:
        for span in (*operator.attempts.values(), *operator.restores.values()):
            self._end(span, now)
        operator.attempts.clear()
        operator.restores.clear()
        operator.failed.clear()
        self._end(operator.run, now, problem)
        operator.run = None

    def _attempt(self, operator: _Operator, attempt: ExecutionAttempt, now: float) -> Span:
        span = self._start("headgate.attempt", attempt.operator_id, now, parent=operator.run)
        span.set_attribute("headgate.subtask", attempt.subtask)
        span.set_attribute("headgate.attempt", attempt.attempt)
        span.set_attribute("headgate.task_attempt_id", attempt.task_attempt_id)
        return span

    def _restore(
        self,
        operator: _Operator,
        operator_id: str,
        subtask: int,
        checkpoint_id: int,
        links: Iterable[SpanContext | None],
        now: float,
    ) -> None:
        self._end(operator.restores.pop(subtask, None), now)
        span = self._start("headgate.restore", operator_id, now, parent=operator.run, links=links)
        if subtask != WHOLE_OPERATOR:
            span.set_attribute("headgate.subtask", subtask)
        span.set_attribute("headgate.checkpoint_id", checkpoint_id)
        operator.restores[subtask] = span

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _enter(
        self, operator: _Operator, operator_id: str, observed: Observed, phase: str, checkpoint_id: int, now: float
    ) -> None:
        if isinstance(observed, CheckpointTriggered):
            name = "headgate.savepoint" if observed.savepoint else "headgate.checkpoint"
            run = None if operator.run is None else operator.run.get_span_context()
            span = self._start(name, operator_id, now, links=[run])
            span.set_attribute("headgate.checkpoint_id", checkpoint_id)
            operator.checkpoints[checkpoint_id] = _Checkpoint(span)
        checkpoint = operator.checkpoints.get(checkpoint_id)
        if checkpoint is not None:
            self._end(checkpoint.phase, now)
            checkpoint.phase = self._start(f"headgate.{phase}", operator_id, now, parent=checkpoint.span)

    def _end_checkpoint(self, operator: _Operator, checkpoint_id: int, problem: str, now: float) -> None:
        checkpoint = operator.checkpoints.pop(checkpoint_id, None)
        if checkpoint is None:
            return
        self._end(checkpoint.phase, now)
        self._end(checkpoint.span, now, problem)
        if not problem:
            operator.completed[checkpoint_id] = checkpoint.span.get_span_context()
            while len(operator.completed) > CHECKPOINTS_LINKED:
                operator.completed.popitem(last=False)

    # --- spans ----------------------------------------------------------------------------------------------------

    def _start(
        self,
        name: str,
        operator_id: str,
        now: float,
        *,
        parent: Span | None = None,
        links: Iterable[SpanContext | None] = (),
    ) -> Span:
        trace = self._trace
        return self._tracer.start_span(
            name,
            context=trace.set_span_in_context(trace.INVALID_SPAN if parent is None else parent),
            attributes={"headgate.operator": operator_id},
            links=[trace.Link(one) for one in links if one is not None],
            start_time=self._ns(now),
        )

    def _end(self, span: Span | None, now: float, problem: str = "") -> None:
        if span is None:
            return
        if problem:
            span.set_status(self._trace.StatusCode.ERROR, readable(problem))
        span.end(end_time=self._ns(now))

    def _ns(self, now: float) -> int:
        return int((self._epoch + now) * 1e9)
