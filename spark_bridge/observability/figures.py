# SPDX-License-Identifier: Apache-2.0

"""The figures that machines read, as a table: name, kind, unit, labels, meaning, and how a status gives the value.

The table is the source for Prometheus, for Spark's metrics and for the table in docs/observability/metrics.md. Names
follow Prometheus' conventions: base units (seconds, bytes) at the end, and ``_total`` for counters. Labels are bounded
by the number of operators and by fixed lists of states; a subtask is never a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, Literal, NamedTuple, TypeVar

from protocol.attempts import FailureKind
from spark_bridge.observability.status import LatencyStatus, OperatorStatus, SidecarStatus

PREFIX = "headgate_"
STATES = ("accepted", "ready", "ending", "finished", "over")
FAILURES = tuple(sorted(kind.name.lower() for kind in FailureKind))
PHASES = ("waiting", "closing", "snapshotting", "acknowledging", "collecting", "uploading", "storing")

Kind = Literal["gauge", "counter", "histogram"]
Values = Iterable[tuple[tuple[str, ...], float | LatencyStatus | None]]
S = TypeVar("S")


class Sample(NamedTuple):
    """One value of a family: the values of its labels, in the family's order, and the figure."""

    labels: tuple[str, ...]
    value: float | LatencyStatus


@dataclass(frozen=True, slots=True, eq=False)
class Family(Generic[S]):
    """Figures with one name. ``read`` takes them from its source; a value of None is left out."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    meaning: str
    read: Callable[[S], Values]

    @property
    def full_name(self) -> str:
        """The name as Prometheus shows it."""
        return f"{PREFIX}{self.name}"


class Operator:
    """An operator's status, with what is summed up over its attempts."""

    def __init__(self, status: OperatorStatus, taken_at: float) -> None:
        self.status = status
        attempts = status.attempts
        self.states = Counter(map(attrgetter("state"), attempts))  # these loops run in C: there may be 10,000 attempts
        self.disconnected = sum(one.is_live for one in attempts if not one.connected)
        self.unconfirmed = sum(map(attrgetter("events_unconfirmed"), attempts))
        self.held = sum(map(attrgetter("events_held"), attempts))
        self.untaken = sum(map(attrgetter("events_untaken"), attempts))
        self.bytes = sum(map(attrgetter("bytes"), attempts))
        self.unconfirmed_s = _oldest_s(map(attrgetter("unconfirmed_since_at"), attempts), taken_at)
        self.request_s = _oldest_s(map(attrgetter("requested_at"), attempts), taken_at)
        self.completed = next((one for one in reversed(status.checkpoint_history) if one.outcome == "completed"), None)


def _one(name: str, kind: Kind, meaning: str, read: Callable[[S], float | LatencyStatus | None]) -> Family[S]:
    """A family without any labels but those of all families."""
    return _labelled(name, kind, (), meaning, lambda source: [((), read(source))])


def _labelled(name: str, kind: Kind, labels: tuple[str, ...], meaning: str, read: Callable[[S], Values]) -> Family[S]:
    unit = next((unit for unit in ("seconds", "bytes") if name.removesuffix("_total").endswith(unit)), "")
    return Family(name, kind, unit, labels, meaning, read)


def _gauge(name: str, path: str, meaning: str) -> Family[Operator]:
    """A figure that an ``Operator`` has there."""
    return _one(name, "gauge", meaning, attrgetter(path))


def _histogram(name: str, path: str, meaning: str) -> Family[Operator]:
    return _one(name, "histogram", meaning, attrgetter(path))


def _of_sources(field: str, meaning: str) -> Family[Operator]:
    """The figure of each source by its stage, or by the operator's name if there are no stages."""

    def read(operator: Operator) -> Values:
        status, figure = operator.status, attrgetter(field)
        return [((stage or status.operator_id,), figure(source)) for stage, source in status.sources.items()]

    return _labelled(f"source_{field}", "gauge", ("stage",), meaning, read)


def _count(name: str, key: str, meaning: str) -> Family[Operator]:
    """A counter that ``OperatorStatus.counts`` holds under ``key``."""
    return _one(name, "counter", meaning, lambda operator: operator.status.counts.get(key, 0))


_SIDECAR: tuple[Family[SidecarStatus], ...] = (
    _labelled(
        "sidecar_info",
        "gauge",
        ("relay", "tls"),
        "Always 1: how Spark's facts reach the sidecar (jvm, py4j), and whether tasks' connections are encrypted.",
        lambda status: [((status.relay.kind, str(status.tls).lower()), 1)],
    ),
    _one(
        "start_time_seconds",
        "gauge",
        "When the sidecar started, in seconds since the epoch.",
        lambda status: round(status.taken_at - status.uptime_s, 1),
    ),
    _one(
        "event_loop_lag_p99_seconds",
        "gauge",
        "How late the event loop runs its timers: the 99th percentile over the last minute.",
        lambda status: status.loop_lag_p99_ms / 1e3,
    ),
    _one(
        "event_loop_lag_max_seconds",
        "gauge",
        "How late the event loop has run a timer at most in the last minute.",
        lambda status: status.loop_lag_max_ms / 1e3,
    ),
    _one(
        "spark_facts_total",
        "counter",
        "What Spark has reported of jobs, stages, tasks and executors.",
        lambda status: status.relay.facts,
    ),
    _one(
        "spark_facts_dropped_total",
        "counter",
        "Of these, what was lost on the way; anything above 0 delays the detection of failures.",
        lambda status: status.relay.dropped,
    ),
    _one(
        "relay_reconnects_total",
        "counter",
        "How often the connection to Spark's JVM had to be made again.",
        lambda status: status.relay.reconnects,
    ),
    _one("operators", "gauge", "Operators that are coordinated.", lambda status: len(status.operators)),
    _labelled(
        "display_failures_total",
        "counter",
        ("display",),
        "How often a display has failed, such as Spark's UI tab or a trace; missing for one that never has.",
        lambda status: [((display,), count) for display, count in status.display_failures.items()],
    ),
)

_OPERATOR: tuple[Family[Operator], ...] = (
    _labelled(
        "operator_info",
        "gauge",
        ("mode",),
        "Always 1: the operator's mode, batch or streaming.",
        lambda operator: [((operator.status.mode,), 1)],
    ),
    _gauge("subtasks", "status.parallelism", "The operator's parallelism."),
    _gauge("subtasks_ready", "status.ready", "Subtasks that are ready or have ended well."),
    _one("run_active", "gauge", "1 while a run is on, else 0.", lambda operator: int(operator.status.run is not None)),
    _one(
        "run_start_time_seconds",
        "gauge",
        "When the current run began, in seconds since the epoch; missing without a run.",
        lambda operator: None if operator.status.run is None else round(operator.status.run.started_at, 1),
    ),
    _labelled(
        "attempts",
        "gauge",
        ("state",),
        f"Attempts of the current run by state: {', '.join(STATES)}.",
        lambda operator: [((state,), operator.states[state]) for state in STATES],
    ),
    _gauge("attempts_disconnected", "disconnected", "Living attempts whose connection is broken."),
    _one(
        "registrations_waiting",
        "gauge",
        "Tasks that have registered and are not accepted yet.",
        lambda operator: 0 if operator.status.run is None else len(operator.status.run.registrations),
    ),
    _gauge("coordinator_queue_messages", "status.queued", "Messages that wait for the coordinator."),
    _one(
        "coordinator_call_seconds",
        "gauge",
        "For how long the coordinator's oldest method has been running; 0 if none runs.",
        lambda operator: 0.0 if operator.status.call is None else operator.status.call.running_s,
    ),
    _gauge(
        "oldest_request_seconds",
        "request_s",
        "For how long the oldest request of a subtask has waited for its answer; 0 if none waits.",
    ),
    _gauge(
        "oldest_unconfirmed_event_seconds",
        "unconfirmed_s",
        "The age of the oldest event that its task has not confirmed; 0 if there is none.",
    ),
    _gauge("unconfirmed_events", "unconfirmed", "Events that were sent to tasks and are not confirmed yet."),
    _gauge("held_events", "held", "Events that wait for a checkpoint."),
    _gauge("untaken_events", "untaken", "Events of tasks that the coordinator has not taken yet."),
    _of_sources(
        "splits_pending", "Splits that a source knows and has not handed out; missing if its enumerator does not say."
    ),
    _of_sources("splits_in_hand", "Splits that tasks have and have not read to their end."),
    _of_sources(
        "backlog",
        "What is not read yet in all these splits, in the units of the readers; missing if it is not reported.",
    ),
    _one(
        "autoscale_wanted_subtasks",
        "gauge",
        "How many subtasks the backlog needs; missing if that is not known, or without autoscale.",
        lambda operator: None if operator.status.autoscale is None else operator.status.autoscale.wanted,
    ),
    _labelled(
        "part",
        "gauge",
        ("part", "figure"),
        "The figures of the ready-made parts that the operator uses; each part's documentation names them.",
        lambda operator: [
            ((name, figure), value) for name, part in operator.status.parts.items() for figure, value in part.items()
        ],
    ),
    _gauge("buffered_bytes", "bytes", "The size of all these events together."),
    _count("runs_total", "runs", "Runs that have ended."),
    _count("attempts_accepted_total", "attempts", "Attempts that were accepted."),
    _count("attempts_ready_total", "ready", "Attempts that became ready."),
    _labelled(
        "attempt_failures_total",
        "counter",
        ("kind",),
        f"Attempts that failed, by the kind of failure: {', '.join(FAILURES)}.",
        lambda operator: [((kind,), operator.status.failures_by_kind.get(kind, 0)) for kind in FAILURES],
    ),
    _count("subtask_resets_total", "subtask_resets", "Resets of one subtask, one for each failed attempt."),
    _count("operator_resets_total", "operator_resets", "Resets of a whole operator."),
    _count("events_sent_total", "events_sent", "Events that the coordinator has sent to tasks."),
    _count("events_delayed_total", "events_held", "Of these, those that had to wait for a checkpoint or a connection."),
    _count("events_confirmed_total", "events_confirmed", "Events that a task has confirmed."),
    _count("events_failed_total", "events_failed", "Events that failed, because their attempt has ended."),
    _count("events_received_total", "events_received", "Events that tasks have sent to the coordinator."),
    _count("requests_received_total", "requests_received", "Requests of tasks to the coordinator."),
    _count("client_requests_total", "client_requests", "Requests of the driver's program to the coordinator."),
    _count("requests_deferred_total", "requests_deferred", "Of both, those that were answered later, with a Reply."),
    _count("messages_dropped_total", "messages_dropped", "Messages of attempts that were over, which are ignored."),
    _labelled(
        "checkpoints_total",
        "counter",
        ("outcome",),
        "Checkpoints that ended: completed, aborted, or refused before they began.",
        lambda operator: [
            ((outcome,), operator.status.counts.get(f"checkpoints_{outcome}", 0))
            for outcome in ("completed", "aborted", "refused")
        ],
    ),
    _count("savepoints_completed_total", "savepoints_completed", "Savepoints that were written."),
    _one(
        "checkpoints_in_progress",
        "gauge",
        "Checkpoints and savepoints in progress.",
        lambda operator: len(operator.status.checkpoints),
    ),
    _one(
        "checkpoints_in_doubt",
        "gauge",
        "Aborted checkpoints that the storage may hold.",
        lambda operator: len(operator.status.in_doubt),
    ),
    _one(
        "last_checkpoint_id",
        "gauge",
        "The id of the last completed checkpoint; missing before the first.",
        lambda operator: None if (last := operator.status.last_completed_checkpoint_id) < 0 else last,
    ),
    _one(
        "last_checkpoint_time_seconds",
        "gauge",
        "When the last completed checkpoint ended, in seconds since the epoch; missing before the first.",
        lambda operator: (
            None
            if operator.completed is None
            else round(operator.completed.triggered_at + operator.completed.duration_s, 3)
        ),
    ),
    _labelled(
        "last_checkpoint_phase_seconds",
        "gauge",
        ("phase",),
        f"How long each phase of the last completed checkpoint took: {', '.join(PHASES)}.",
        lambda operator: (
            []
            if operator.completed is None
            else [((phase,), operator.completed.phases_s.get(phase, 0.0)) for phase in PHASES]
        ),
    ),
    _one(
        "subtasks_uploading",
        "gauge",
        "Subtasks that are storing the files of their states, for a checkpoint in progress.",
        lambda operator: sum(one.uploading for one in operator.status.checkpoints),
    ),
    _gauge(
        "last_checkpoint_files_bytes",
        "status.last_checkpoint_files_bytes",
        "The size of the files of states that the last completed checkpoint has.",
    ),
    _gauge(
        "last_checkpoint_uploaded_bytes",
        "status.last_checkpoint_uploaded_bytes",
        "Of the files of states that the last completed checkpoint has, the size of those that were uploaded for it.",
    ),
    _count(
        "uploaded_bytes_total",
        "uploaded_bytes",
        "The size of all files of states that were uploaded for completed checkpoints.",
    ),
    _histogram("event_confirm_seconds", "status.confirm", "From an event's sending to its confirmation by the task."),
    _histogram("request_seconds", "status.request", "From the arrival of a task's request to its answer."),
    _histogram("checkpoint_seconds", "status.checkpoint", "From a checkpoint's trigger to its durable write."),
    _histogram("spark_fact_seconds", "status.fact", "From a fact in Spark to the coordinator's reaction."),
)


def _oldest_s(since: Iterable[float | None], taken_at: float) -> float:
    return max(0.0, taken_at - min(filter(None, since), default=taken_at))


def _with_operator(family: Family[Operator]) -> Family[tuple[Operator, ...]]:
    def read(operators: tuple[Operator, ...]) -> Values:
        for operator in operators:
            for labels, value in family.read(operator):
                yield (operator.status.operator_id, *labels), value

    return Family(family.name, family.kind, family.unit, ("operator", *family.labels), family.meaning, read)


_OF_OPERATORS = tuple(map(_with_operator, _OPERATOR))

AnyFamily = Family[SidecarStatus] | Family[tuple[Operator, ...]]

FAMILIES: tuple[AnyFamily, ...] = (*_SIDECAR, *_OF_OPERATORS)
"""Every family, those of the sidecar first."""


def figures(status: SidecarStatus) -> list[tuple[AnyFamily, list[Sample]]]:
    """Every family with its samples in this status; a latency that has never occurred has a count of 0."""
    operators = tuple(Operator(one, status.taken_at) for _, one in sorted(status.operators.items()))
    found: list[tuple[AnyFamily, list[Sample]]] = [(family, _samples(family.read(status))) for family in _SIDECAR]
    found.extend((family, _samples(family.read(operators))) for family in _OF_OPERATORS)
    return found


def _samples(values: Values) -> list[Sample]:
    return [Sample(labels, value) for labels, value in values if value is not None]
