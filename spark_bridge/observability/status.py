# SPDX-License-Identifier: Apache-2.0

"""The status of a sidecar at one moment, as immutable values; see ``Sidecar.status``.

Points in time are seconds since the epoch, durations are seconds, and both end in ``_at`` and ``_s``. Every value has a
plain form for JSON: ``SidecarStatus.to_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from protocol.describing import NOT_FINITE, plain, readable, show
from spark_bridge.observability.html import status_html

BINS = 28
"""How many numbers the histogram of a latency has: four for each decade from 10 µs to 100 s."""


class Percentiles(NamedTuple):
    """Percentiles of a latency, in microseconds, within 1 % of the exact values.

    None without a sample, and without the package ``ddsketch`` (``pip install 'headgate[observability]'``).
    """

    p50_us: float | None = None
    p99_us: float | None = None
    p999_us: float | None = None


class LatencyStatus(NamedTuple):
    """One latency.

    ``ever`` is since the operator was coordinated; ``last_minute`` and ``last_five_minutes`` may reach back 15 s
    further. ``samples``, ``sum_us`` in microseconds, and ``histogram`` are since the operator was coordinated.
    ``histogram``: how many samples fall into each quarter of a decade from 10 µs to 100 s, 28 numbers; the first and
    the last include what lies beyond.
    """

    samples: int = 0
    ever: Percentiles = Percentiles()
    last_minute: Percentiles = Percentiles()
    last_five_minutes: Percentiles = Percentiles()
    sum_us: float = 0.0
    histogram: tuple[int, ...] = (0,) * BINS


class CallStatus(NamedTuple):
    """The coordinator's method that has been running for longest.

    ``name`` includes the numbers among its arguments. ``waiting_at`` is the file, line and function at which it awaits
    something.
    """

    name: str
    running_s: float
    waiting_at: str


class AttemptStatus(NamedTuple):
    """One execution attempt of a subtask, in the current run.

    ``state`` is ``"accepted"`` (it has registered, and its operator restores its state), ``"ready"``, ``"ending"`` (the
    operator has ended well, and Spark has not said so yet), ``"finished"`` or ``"over"``; then ``failure`` says why.
    ``accepted_at``: when it was accepted. ``heard_at``: when something last came from the task's process.
    ``events_unconfirmed`` were sent to the task, the oldest of them at ``unconfirmed_since_at``. ``events_held`` wait
    for the checkpoints ``held_by``. ``events_untaken`` came from the task, and the coordinator has not taken them yet.
    ``bytes``: of these events together. ``requested_at``: when its oldest request came that has no answer yet, and
    ``deferred_at`` the same of those whose answer the coordinator has deferred with a ``Reply``. The figures of an
    attempt without a gateway, because it is over, are zero or None.

    An attempt in which nothing has changed is the same object in the next status.
    """

    subtask: int
    attempt: int
    task_attempt_id: int
    state: str
    accepted_at: float
    failure: str
    host: str
    executor_id: str
    connected: bool
    known_to_coordinator: bool
    heard_at: float | None
    events_unconfirmed: int
    unconfirmed_since_at: float | None
    events_held: int
    held_by: tuple[int, ...]
    events_untaken: int
    bytes: int
    requested_at: float | None
    deferred_at: float | None = None

    @property
    def is_live(self) -> bool:
        """Whether the attempt is neither finished nor over."""
        return self.state in ("accepted", "ready", "ending")

    @property
    def waits_for(self) -> str:
        """What it waits for, in words; empty if it works, or has ended."""
        if not self.is_live:
            return ""
        if not self.connected:
            return "its connection to come back"
        if self.requested_at is not None:
            return "the answer to its request"
        if self.deferred_at is not None:
            return "the coordinator to settle its Reply"
        if self.state == "accepted":
            return "its operator to open"
        if self.state == "ending":
            return "Spark to report its success"
        return "" if self.known_to_coordinator else "the coordinator's subtask_ready to return"


class RegistrationStatus(NamedTuple):
    """A task that has registered and waits to be accepted, and what for."""

    subtask: int
    task_attempt_id: int
    waiting_s: float
    waits_for: str


class RunStatus(NamedTuple):
    """The current run of an operator: one Spark action over its tasks.

    ``tasks_started``: how many tasks of the stage Spark has started. ``task_count``: how many the action runs in the
    stage, 0 if not known. ``missing``: the first subtasks that have had no attempt yet, at most 20. ``registrations``:
    tasks that wait to be accepted. ``failed_cause``: why the run is being failed; empty otherwise.
    """

    stage_id: int
    started_at: float
    tasks_started: int
    task_count: int
    subtasks_seen: int
    missing: tuple[int, ...]
    registrations: tuple[RegistrationStatus, ...]
    failed_cause: str


class CheckpointProgress(NamedTuple):
    """A checkpoint or savepoint in progress.

    ``phase`` is ``"waiting"`` (for the cut of an earlier one), ``"closing"``, ``"snapshotting"``,
    ``"acknowledging"``, ``"collecting"``, ``"uploading"`` or ``"storing"``, and lasts for ``phase_s`` so far.
    ``subtasks`` maps each subtask that takes part while it runs to what is awaited of it: ``"close"``,
    ``"acknowledge"``, ``"state"``, or ``"nothing"``.
    """

    checkpoint_id: int
    savepoint: bool
    triggered_at: float
    phase: str
    phase_s: float
    deadline_s: float
    subtasks: Mapping[int, str]

    @property
    def awaited(self) -> tuple[int, ...]:
        """The subtasks for which the present phase waits, ascending."""
        awaited = {"closing": "close", "acknowledging": "acknowledge", "uploading": "state"}.get(self.phase)
        return tuple(sorted(subtask for subtask, step in self.subtasks.items() if step == awaited))

    @property
    def uploading(self) -> int:
        """How many subtasks are still storing the files of their states, in whatever phase it is."""
        return list(self.subtasks.values()).count("state")


class CheckpointRecord(NamedTuple):
    """A checkpoint or savepoint that has ended. ``phases_s``: the duration of each phase that it went through.

    ``outcome`` is ``"completed"``, ``"aborted"`` or ``"refused"``; ``reason`` says why in the last two cases.
    """

    checkpoint_id: int
    savepoint: bool
    triggered_at: float
    duration_s: float
    phases_s: Mapping[str, float]
    outcome: str
    reason: str


class FailureRecord(NamedTuple):
    """A failure: of one attempt, or of the whole job (``subtask`` and ``attempt`` are None)."""

    at: float
    subtask: int | None
    attempt: int | None
    kind: str
    reason: str


class TimelineRecord(NamedTuple):
    """One step in the life of an operator and its attempts.

    ``what`` is ``"run started"``, ``"accepted"``, ``"ready"``, ``"failed"``, ``"finished"``, ``"subtask reset"``,
    ``"operator reset"`` or ``"run ended"``. ``subtask`` and ``attempt`` are None for what concerns all, ``attempt``
    also for the reset of a subtask. ``text`` says why, or which run.
    """

    at: float
    what: str
    subtask: int | None
    attempt: int | None
    text: str


class SplitStatus(NamedTuple):
    """How much there is to read in a split that a task has. ``split`` is its text, which may be cut."""

    subtask: int
    split: str
    backlog: int


class SourceStatus(NamedTuple):
    """What a source has not read yet.

    ``splits_pending`` are known and not handed out; None if the enumerator does not say (``pending_count``).
    ``splits_in_hand`` were handed out, and are not read to their end. ``backlog``: how much there is to read in all of
    these, in the readers' own units; bytes for ``FileSource``. Readers report it about once a second. Pending splits
    count if the enumerator has a ``pending_backlog``. None if neither reports it. ``largest_splits`` are the ten
    splits in hand that have the most left, the largest first.
    """

    splits_pending: int | None
    splits_in_hand: int
    backlog: int | None
    largest_splits: tuple[SplitStatus, ...] = ()


class ScalingRecord(NamedTuple):
    """A change of the parallelism because of the backlog, or one that was refused."""

    at: float
    before: int
    parallelism: int
    why: str


class AutoscaleStatus(NamedTuple):
    """The scaling of an operator that was coordinated with ``autoscale``.

    ``wanted``: how many subtasks its backlog needs now; None if that is not known. ``why`` says what it is and why the
    parallelism stays, or why nothing is known. ``last_change`` is the last one that this has made. ``last_refusal`` is
    the last one that failed or was refused, with the error.
    """

    min: int
    max: int
    wanted: int | None
    why: str
    last_change: ScalingRecord | None = None
    last_refusal: ScalingRecord | None = None


@dataclass(frozen=True, slots=True)
class OperatorStatus:
    """One operator. Counts are since it was coordinated, rates over the last seconds.

    ``attempts`` are those of the current run, in the order in which they were accepted; empty without a run.
    ``checkpoints`` are in progress, ``checkpoint_history`` and ``failures`` the most recent ones, newest last.
    ``attempts_left_out``: how many more there are, in a status of another process that would have been too large.
    ``last_completed_checkpoint_id`` is -1 if there is none. ``in_doubt``: aborted checkpoints that the storage may
    hold. ``timeline``: the most recent steps of this run and those before it, newest last. ``counters``: what the tasks
    have counted, and how many values they have observed, for each name; ``handle.counters()`` has the distributions.
    ``sources`` has the backlog of each source, by the name of the stage; the name is empty if there are no stages.
    ``parts`` has the figures of the ready-made parts that have some, such as how full a cache is, by the names of the
    part and of the figure. A part that several operators share has the same figures in each.
    ``jobs_of_last_action``: how many jobs ``take`` or a similar action has made of the last action, each of which is a
    run over some of the subtasks; 0 or 1 for any other action.
    ``last_checkpoint_files_bytes``: the size of the files of states that the last completed checkpoint has, and
    ``last_checkpoint_uploaded_bytes`` of those that were uploaded for it. ``counts["uploaded_bytes"]`` is the sum of
    the latter over all completed checkpoints. ``autoscale``: what the backlog needs; None without that argument.
    """

    operator_id: str
    mode: str
    parallelism: int
    run: RunStatus | None
    call: CallStatus | None
    queued: int
    attempts: tuple[AttemptStatus, ...]
    checkpoints: tuple[CheckpointProgress, ...]
    checkpoint_history: tuple[CheckpointRecord, ...]
    failures: tuple[FailureRecord, ...]
    last_completed_checkpoint_id: int
    in_doubt: tuple[int, ...]
    counts: Mapping[str, int]
    events_up_per_s: float
    events_down_per_s: float
    requests_per_s: float
    confirm: LatencyStatus
    request: LatencyStatus
    checkpoint: LatencyStatus
    fact: LatencyStatus
    failures_by_kind: Mapping[str, int] = field(default_factory=dict)
    attempts_left_out: int = 0
    timeline: tuple[TimelineRecord, ...] = ()
    counters: Mapping[str, int | float] = field(default_factory=dict)
    sources: Mapping[str, SourceStatus] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, int | float]] = field(default_factory=dict)
    jobs_of_last_action: int = 0
    last_checkpoint_files_bytes: int = 0
    last_checkpoint_uploaded_bytes: int = 0
    autoscale: AutoscaleStatus | None = None

    def attempts_of(self, subtask: int) -> tuple[AttemptStatus, ...]:
        """The attempts of one subtask, oldest first."""
        return tuple(attempt for attempt in self.attempts if attempt.subtask == subtask)

    @property
    def ready(self) -> int:
        """How many subtasks are ready or have ended well."""
        well = ("ready", "ending", "finished")
        return len({attempt.subtask for attempt in self.attempts if attempt.state in well})


class RelayStatus(NamedTuple):
    """How Spark's facts reach the sidecar, and how many have; ``dropped``: lost on the way.

    ``way``: ``"tunnel"`` if tasks reach a Spark Connect client through the server, else ``"direct"``.
    """

    kind: str
    facts: int
    dropped: int
    reconnects: int
    way: str = "direct"


@dataclass(frozen=True, slots=True)
class SidecarStatus:
    """A sidecar at one moment; see ``Sidecar.status``.

    ``loop_lag_p99_ms``: how late the event loop ran its timers in the last minute. ``cores``: how many tasks the
    application can run at the same time; None if that is not known. ``display_failures``: how often each display, such
    as the tab in Spark's UI, has failed; empty if none has. They are in the log, and ``explain`` mentions them.
    """

    taken_at: float
    uptime_s: float
    host: str
    port: int
    tls: bool
    relay: RelayStatus
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    cores: int | None
    operators: Mapping[str, OperatorStatus]
    display_failures: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The same as builtins that ``json.dumps`` takes: dicts, lists, texts, numbers.

        A float for which JSON has no number is the text ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
        """
        builtins: dict[str, Any] = _plain(self)
        return builtins

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> SidecarStatus:
        """The inverse of ``to_dict``, even after JSON. Raises ``ValueError`` for anything else."""
        try:
            status: SidecarStatus = _from_plain(cls, plain)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a status of this release: {error!r}. Use the same release on both sides") from error
        return status

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return status_html(self)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(one) for name, one in value._asdict().items()}
    if isinstance(value, Mapping):
        return {readable(str(key)): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return plain(value)


def _from_plain(kind: Any, plain: Any) -> Any:
    """Make a value of the type ``kind`` of what ``_plain`` has made of it."""
    arguments = get_args(kind)
    match get_origin(kind):
        case None if hasattr(kind, "__annotations__"):
            hints = _hints(kind)
            if plain.keys() != hints.keys():
                raise ValueError(f"{kind.__name__} has the fields {sorted(hints)}, not {sorted(plain)}")
            return kind(**{name: _from_plain(hint, plain[name]) for name, hint in hints.items()})
        case None:
            return _scalar(kind, plain)
        case _ if get_origin(kind) is tuple:
            return tuple(_from_plain(arguments[0], one) for one in plain)
        case _ if get_origin(kind) is UnionType:
            return None if plain is None else _from_plain(arguments[0], plain)
        case _:
            key, item = arguments
            return {key(name): _from_plain(item, one) for name, one in plain.items()}


def _scalar(kind: Any, plain: Any) -> Any:
    if kind in (int, float) and type(plain) is str:
        return NOT_FINITE[plain]
    if type(plain) is kind or (kind in (int, float) and type(plain) in (bool, int, float)):
        return plain
    raise TypeError(f"{show(plain, 80)} is not of the type {kind.__name__}")


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
