# SPDX-License-Identifier: Apache-2.0

"""The statistics of one operator."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from actors.coordination import LatencyRecorder, OperatorStatistics
from actors.coordination.statistics import PartStatistics


def recorded(samples: Iterable[float], samples_max: int = 100) -> LatencyRecorder:
    recorder = LatencyRecorder(samples_max)
    for sample in samples:
        recorder.record(sample)
    return recorder


def test_all_counts_begin_at_nothing() -> None:
    of_operator, of_part = OperatorStatistics("words"), PartStatistics()
    numbers = {
        name: value
        for one in (of_operator, of_part)
        for name in one.__slots__
        if type(value := getattr(one, name)) in (int, float)
    }
    assert len(numbers) > 20
    assert numbers.pop("last_completed_checkpoint_id") == -1, "no checkpoint"
    assert set(numbers.values()) == {0}


def test_where_nothing_was_measured_there_is_no_percentile() -> None:
    assert LatencyRecorder().percentiles() == {"p50": None, "p99": None, "count": 0}


def test_percentiles_are_samples_by_rank() -> None:
    assert recorded(range(100)).percentiles() == {"p50": 50, "p99": 99, "count": 100}


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=100))
def test_percentiles_lie_among_the_samples_and_in_order(samples: list[int]) -> None:
    figures = recorded(samples).percentiles()
    p50, p99 = figures["p50"], figures["p99"]
    assert p50 in samples
    assert p99 in samples
    assert p50 is not None
    assert p99 is not None
    assert p50 <= p99


def test_a_recorder_keeps_the_newest_samples_and_counts_all() -> None:
    recorder = recorded(range(5), samples_max=3)
    assert recorder.since(0) == [4, 3, 2]
    assert recorder.count == 5


def test_a_snapshot_is_a_copy() -> None:
    statistics = OperatorStatistics("words")
    statistics.failures_by_kind["killed"] = 1
    snapshot = statistics.snapshot()
    statistics.failures_by_kind["killed"] = 2
    assert snapshot["failures_by_kind"] == {"killed": 1}
