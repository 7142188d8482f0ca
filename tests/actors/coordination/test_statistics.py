# SPDX-License-Identifier: Apache-2.0

"""The statistics of one operator."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.coordination import LatencyRecorder, OperatorStatistics, percentiles_of


def test_where_nothing_was_measured_there_is_no_percentile() -> None:
    assert LatencyRecorder().percentiles() == {"p50": None, "p99": None, "count": 0}


def test_percentiles_are_samples_by_rank() -> None:
    assert percentiles_of(range(100)) == {"p50": 50, "p99": 99}


@given(st.lists(st.integers(0, 10_000), min_size=1))
def test_percentiles_lie_among_the_samples_and_in_order(samples: list[int]) -> None:
    figures = percentiles_of(samples)
    p50, p99 = figures["p50"], figures["p99"]
    assert p50 in samples
    assert p99 in samples
    assert p50 is not None
    assert p99 is not None
    assert p50 <= p99


def test_a_recorder_keeps_the_newest_samples_and_counts_all() -> None:
    recorder = LatencyRecorder(samples_max=3)
    for sample in range(5):
        recorder.record(sample)
    assert recorder.samples() == [2, 3, 4]
    assert recorder.count == 5


def test_a_snapshot_is_a_copy() -> None:
    statistics = OperatorStatistics("words")
    statistics.failures_by_kind["killed"] = 1
    snapshot = statistics.snapshot()
    statistics.failures_by_kind["killed"] = 2
    assert snapshot["failures_by_kind"] == {"killed": 1}
