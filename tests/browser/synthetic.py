# SPDX-License-Identifier: Apache-2.0

"""Statuses as a real sidecar takes them, of any size and in any trouble, for the page alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spark_bridge.observability.status import (
    AttemptStatus,
    CallStatus,
    CheckpointProgress,
    CheckpointRecord,
    FailureRecord,
    LatencyStatus,
    OperatorStatus,
    Percentiles,
    RelayStatus,
    RunStatus,
    SidecarStatus,
    SourceStatus,
    SplitStatus,
    TimelineRecord,
)

NOW = 1_790_000_000.0
COUNTS = {
    "attempts": 4,
    "ready": 4,
    "failures": 0,
    "subtask_resets": 0,
    "operator_resets": 0,
    "runs": 1,
    "checkpoints_completed": 0,
    "checkpoints_aborted": 0,
}


CONFIRMED = (*[0] * 6, 1_200, 21_000, 19_000, 6_011, 900, 90, 10, *[0] * 15)
"""A histogram whose only peak lies just below a millisecond."""


LARGEST = (SplitStatus(3, "['pages', 7]", 5_000), SplitStatus(0, "['pages', 1]", 40))


def an_attempt(subtask: int, *, attempt: int | None = None, state: str = "ready", **more: Any) -> AttemptStatus:
    """A connected attempt that waits for nothing."""
    number = subtask if attempt is None else attempt
    made = AttemptStatus(
        subtask,
        number,
        100 + number,
        state,
        NOW - 60,
        "",
        "127.0.0.1",
        "driver",
        True,
        True,
        NOW - 0.1,
        0,
        None,
        0,
        (),
        0,
        0,
        None,
    )
    return made._replace(**more)


def latency(samples: int, *ever: float) -> LatencyStatus:
    """One that was slower in the last minute than since the start."""
    minute, five_minutes = (Percentiles(*(factor * one for one in ever)) for factor in (2, 1.5))
    return LatencyStatus(samples, Percentiles(*ever), minute, five_minutes)


def an_operator(name: str, attempts: list[AttemptStatus], *, parallelism: int, at: float = NOW) -> OperatorStatus:
    """An operator whose run began a minute ago."""
    none = LatencyStatus()
    return OperatorStatus(
        operator_id=name,
        mode="streaming",
        parallelism=parallelism,
        run=RunStatus(3, at - 60, parallelism, parallelism, len({one.subtask for one in attempts}), (), (), ""),
        call=None,
        queued=0,
        attempts=tuple(attempts),
        checkpoints=(),
        checkpoint_history=(),
        failures=(),
        last_completed_checkpoint_id=-1,
        in_doubt=(),
        counts=COUNTS,
        events_up_per_s=0.0,
        events_down_per_s=0.0,
        requests_per_s=0.0,
        confirm=none,
        request=none,
        checkpoint=none,
        fact=none,
    )


def a_sidecar(*operators: OperatorStatus, at: float = NOW) -> SidecarStatus:
    """A sidecar that is well."""
    return SidecarStatus(
        at,
        75.0,
        "127.0.0.1",
        40_123,
        False,
        RelayStatus("jvm", 1204, 0, 0),
        0.4,
        3.0,
        None,
        {one.operator_id: one for one in operators},
    )


def of_many_subtasks(count: int, *, at: float = NOW) -> SidecarStatus:
    """A large operator in which a bit of everything goes on."""
    attempts = []
    for subtask in range(count):
        state = "finished" if subtask % 97 == 0 else "over" if subtask % 501 == 3 else "ready"
        waits: dict[str, Any] = (
            {"requested_at": at - 41.0}
            if subtask % 1009 == 5
            else {"requested_at": at - 0.2}
            if subtask % 31 == 0
            else {}
        )
        attempts.append(an_attempt(subtask, state=state, events_unconfirmed=subtask % 3, **waits))
    return a_sidecar(an_operator("large", attempts, parallelism=count, at=at), at=at)


def an_eventful_one(name: str = "crawl", *, stuck: bool = False, at: float = NOW) -> OperatorStatus:
    """An operator with checkpoints, a lost attempt, a reset and latencies; stuck in a request if asked."""
    attempts = [an_attempt(subtask) for subtask in range(4)]
    attempts[1] = an_attempt(1, attempt=1, state="over", failure="failed", connected=False)
    attempts.append(an_attempt(1, attempt=4, accepted_at=at - 30))
    timeline = [TimelineRecord(at - 60, "run started", None, None, "stage 3")]
    for subtask in range(4):
        timeline.append(TimelineRecord(at - 59.5 + subtask / 10, "accepted", subtask, subtask, ""))
        timeline.append(TimelineRecord(at - 59.0 + subtask / 10, "ready", subtask, subtask, ""))
    timeline += [
        TimelineRecord(at - 34, "failed", 1, 1, "failed"),
        TimelineRecord(at - 33.8, "subtask reset", 1, None, ""),
        TimelineRecord(at - 30, "accepted", 1, 4, ""),
        TimelineRecord(at - 28.5, "ready", 1, 4, ""),
    ]
    history = [
        CheckpointRecord(
            number,
            False,
            at - 60 + 5 * number,
            0.21 + 0.05 * number,
            {
                "closing": 0.02,
                "snapshotting": 0.04,
                "acknowledging": 0.03 + 0.05 * number,
                "storing": 0.04,
            },
            "aborted" if number == 5 else "completed",
            "subtask 1 failed" if number == 5 else "",
        )
        for number in range(1, 11)
    ]
    operator = replace(
        an_operator(name, attempts, parallelism=4, at=at),
        counts=COUNTS
        | {"attempts": 5, "failures": 1, "subtask_resets": 1, "checkpoints_completed": 9, "checkpoints_aborted": 1},
        sources={
            "pages": SourceStatus(
                1_200, 64, 9_000, (SplitStatus(3, "['pages', 7]", 5_000), SplitStatus(0, "['pages', 1]", 40))
            )
        },
        counters={"pages fetched": 48_211, "bytes": 10_500_000.5},
        parts={"geocode": {"hit_share": 0.955, "entries": 48_211}, "usd": {"spent": 12.5}},
        checkpoint_history=tuple(history),
        failures=(FailureRecord(at - 34, 1, 1, "failed", "ValueError: page 17 cannot be read"),),
        last_completed_checkpoint_id=10,
        timeline=tuple(timeline),
        events_up_per_s=812.4,
        events_down_per_s=96.2,
        requests_per_s=31.5,
        confirm=latency(48_211, 912.0, 4_310.0, 12_800.0)._replace(histogram=CONFIRMED),
        request=latency(1_890, 1_420.0, 8_100.0, 41_000.0),
        checkpoint=latency(9, 410_000.0, 720_000.0, 731_000.0),
        fact=latency(31, 2_300.0, 18_000.0, 19_500.0),
    )
    if not stuck:
        return operator
    waiting = tuple(
        one._replace(requested_at=at - 41.2)
        if one.subtask == 3
        else one._replace(requested_at=at - 2.0)
        if one.subtask == 2
        else one
        for one in attempts
    )
    return replace(
        operator,
        attempts=waiting,
        queued=2,
        call=CallStatus("handle_request(subtask=3, attempt=3)", 41.0, "crawl.py:31 in Crawler.handle_request"),
        checkpoints=(
            CheckpointProgress(
                11,
                False,
                at - 8,
                "acknowledging",
                7.6,
                52.0,
                {0: "nothing", 1: "nothing", 2: "nothing", 3: "acknowledge"},
            ),
        ),
    )
