# SPDX-License-Identifier: Apache-2.0

"""Counts and latencies of one operator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import compress, islice
from typing import Any, NamedTuple

from protocol.parts import ONE_PART, PartTable

SAMPLES_MAX = 100_000


SPLITS_SHOWN = 10


class SplitBacklog(NamedTuple):
    """What is left in a split that a subtask has. ``split`` is its text, which may be cut."""

    subtask: int
    split: str
    amount: int


class SourceBacklog(NamedTuple):
    """What a source has not read yet.

    ``splits_pending`` are known and not handed out; None if the enumerator does not say. ``splits_in_hand`` were handed
    out, and are not read to their end. ``amount``: how much there is in all of these, as last reported, in the units of
    the readers; None if neither the readers nor the enumerator report it. ``largest`` are those of the splits in hand
    that have the most left, at most ``SPLITS_SHOWN``, the largest first.
    """

    splits_pending: int | None
    splits_in_hand: int
    amount: int | None
    largest: tuple[SplitBacklog, ...] = ()


class LatencyRecorder:
    """The newest samples of one latency, in microseconds. Bounded: the oldest sample goes first."""

    __slots__ = ("_samples", "count", "show")

    def __init__(self, samples_max: int = SAMPLES_MAX) -> None:
        self._samples: deque[float] = deque(maxlen=samples_max)
        self.count = 0
        self.show: Callable[[float, object], None] | None = None
        """Called with each sample and with what it is about."""

    def record(self, microseconds: float, subject: object = None) -> None:
        """Add a sample. ``subject`` is what it is about."""
        self._samples.append(microseconds)
        self.count += 1
        if self.show is not None:
            self.show(microseconds, subject)

    def since(self, count: int) -> list[float]:
        """Return the samples, newest first, that came after the first ``count``, as far as they are kept."""
        fresh = min(self.count - count, len(self._samples))
        return list(islice(reversed(self._samples), fresh))

    def percentiles(self) -> dict[str, float | None]:
        """Return ``{"p50": µs, "p99": µs, "count": n}``, by nearest rank and rounded to a tenth of a microsecond.

        A percentile is None if nothing was measured.
        """
        ordered = sorted(self._samples)

        def rank(fraction: float) -> float | None:
            return round(ordered[min(len(ordered) - 1, int(fraction * len(ordered)))], 1) if ordered else None

        return {"p50": rank(0.5), "p99": rank(0.99), "count": self.count}


@dataclass(slots=True)
class PartStatistics:
    """What one part of an operator has exchanged with its tasks."""

    events_sent: int = 0
    events_confirmed: int = 0
    events_received: int = 0
    requests_received: int = 0


@dataclass(slots=True)
class OperatorStatistics:
    """Counts and latencies of one operator. Only the event loop changes them.

    Events and requests of the operator are those of the user's own parts: its coordinator's, or its stages'. What
    others exchange, such as the counters, is in ``parts`` alone (H150).
    """

    operator_id: str
    table: PartTable = ONE_PART
    parts: list[PartStatistics] = field(default_factory=lambda: [PartStatistics()])  # by index
    attempts: int = 0  # execution attempts accepted
    ready: int = 0
    finished: int = 0  # that Spark has counted as successes; some may have been revoked
    suspicions: int = 0  # hints that an attempt may be dead
    failures_by_kind: dict[str, int] = field(default_factory=dict)
    subtask_resets: int = 0
    operator_resets: int = 0
    runs: int = 0
    events_held: int = 0  # of those sent, the ones that waited for a checkpoint or a connection
    events_failed: int = 0
    events_restored: int = 0  # of those received, the ones from a restored snapshot (H31)
    events_unhandled: int = 0  # of those received; the coordinator does not override handle_event_from_operator
    operator_ignores_events: str = ""  # the class of all tasks, if it does not override handle_event
    client_requests: int = 0
    requests_deferred: int = 0  # of both kinds: answered with a ``Reply`` that was not settled yet
    replies_open: int = 0  # of these, the ones that are not settled, now
    messages_dropped: int = 0  # messages of attempts that were over (H3)
    checkpoints_completed: int = 0
    checkpoints_aborted: int = 0
    checkpoints_refused: int = 0  # requested or due, and never begun
    savepoints_completed: int = 0
    events_in_snapshots: int = 0  # upward events that a subtask's valve held at its snapshot (H31)
    last_completed_checkpoint_id: int = -1
    last_checkpoint_ms: float | None = None  # of the last completed one, from its trigger to the durable write
    last_checkpoint_files_bytes: int = 0  # of the last completed one: the files of its states
    last_checkpoint_uploaded_bytes: int = 0  # of these, the ones that were uploaded for it
    uploaded_bytes: int = 0  # the same of all completed ones together
    last_abort_reason: str = ""
    checkpoint_us: LatencyRecorder = field(default_factory=LatencyRecorder)
    confirm_us: LatencyRecorder = field(default_factory=LatencyRecorder)
    fact_us: LatencyRecorder = field(default_factory=LatencyRecorder)
    request_us: LatencyRecorder = field(default_factory=LatencyRecorder)  # from arrival to answer, if not deferred
    splits: Callable[[], tuple[int, int | None] | None] = lambda: None  # of a source: how many are read, and all
    sources: Callable[[], dict[str, SourceBacklog]] = dict  # of each source among its coordinators, by its name
    counters: Callable[[], list[Any]] = lambda: [{}, {}]  # what the tasks have counted: sums, distributions
    counter_totals: Callable[[], dict[str, int | float]] = dict  # the same in short, which costs little
    part_figures: Callable[[], Mapping[str, Mapping[str, float]]] = dict  # of each ready-made part, by its name

    @property
    def failures(self) -> int:
        return sum(self.failures_by_kind.values())

    @property
    def events_sent(self) -> int:
        return sum(part.events_sent for part in self._users())

    @property
    def events_confirmed(self) -> int:
        return sum(part.events_confirmed for part in self._users())

    @property
    def events_received(self) -> int:
        return sum(part.events_received for part in self._users())

    @property
    def requests_received(self) -> int:
        """From subtasks."""
        return sum(part.requests_received for part in self._users())

    def _users(self) -> Iterator[PartStatistics]:
        return compress(self.parts, self.table.users)

    @property
    def resets(self) -> int:
        """Resets of subtasks and of the whole operator together."""
        return self.subtask_resets + self.operator_resets

    def snapshot(self) -> dict[str, Any]:
        """Return plain values, which another thread may use."""
        splits_done, splits_total = self.splits() or (None, None)
        return {
            "operator_id": self.operator_id,
            "attempts": self.attempts,
            "ready": self.ready,
            "finished": self.finished,
            "suspicions": self.suspicions,
            "failures": self.failures,
            "failures_by_kind": dict(self.failures_by_kind),
            "subtask_resets": self.subtask_resets,
            "operator_resets": self.operator_resets,
            "resets": self.resets,
            "runs": self.runs,
            "events_sent": self.events_sent,
            "events_held": self.events_held,
            "events_confirmed": self.events_confirmed,
            "events_failed": self.events_failed,
            "events_received": self.events_received,
            "events_restored": self.events_restored,
            "events_unhandled": self.events_unhandled,
            "events_unhandled_by_operator": self.events_confirmed if self.operator_ignores_events else 0,
            "requests_received": self.requests_received,
            "client_requests": self.client_requests,
            "requests_deferred": self.requests_deferred,
            "replies_open": self.replies_open,
            "messages_dropped": self.messages_dropped,
            "checkpoints_completed": self.checkpoints_completed,
            "checkpoints_aborted": self.checkpoints_aborted,
            "checkpoints_refused": self.checkpoints_refused,
            "savepoints_completed": self.savepoints_completed,
            "events_in_snapshots": self.events_in_snapshots,
            "parts": {name: asdict(part) for name, part in zip(self.table.names, self.parts, strict=True) if name},
            "splits_done": splits_done,
            "splits_total": splits_total,
            "counters": self.counters(),
            "last_completed_checkpoint_id": self.last_completed_checkpoint_id,
            "last_checkpoint_ms": self.last_checkpoint_ms,
            "last_checkpoint_files_bytes": self.last_checkpoint_files_bytes,
            "last_checkpoint_uploaded_bytes": self.last_checkpoint_uploaded_bytes,
            "uploaded_bytes": self.uploaded_bytes,
            "last_abort_reason": self.last_abort_reason,
            "checkpoint_us": self.checkpoint_us.percentiles(),
            "confirm_us": self.confirm_us.percentiles(),
            "fact_us": self.fact_us.percentiles(),
            "request_us": self.request_us.percentiles(),
        }
