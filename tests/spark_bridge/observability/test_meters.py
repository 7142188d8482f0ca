# SPDX-License-Identifier: Apache-2.0

"""Percentiles, rates and the lag of the loop."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from actors.coordination import LatencyRecorder
from spark_bridge.observability import meters
from spark_bridge.observability.meters import ACCURACY, SAMPLES_TOGETHER_MAX, LatencySketch, LoopLag, Rates
from spark_bridge.observability.status import BINS, LatencyStatus, Percentiles


def test_percentiles_are_within_one_percent_however_often_somebody_looks() -> None:
    recorder = LatencyRecorder()
    sketch = LatencySketch(recorder)
    samples = [random.Random(7).lognormvariate(5, 1) + number % 50 for number in range(3000)]
    for number, sample in enumerate(samples):
        recorder.record(sample)
        if number % 700 == 0:
            sketch.status(number / 10)
    status = sketch.status(400.0)
    assert status.samples == len(samples)
    assert status.sum_us == pytest.approx(sum(samples), abs=len(samples) / 2)
    check(status.ever, samples)


def check(found: Percentiles, samples: list[float]) -> None:
    ordered = sorted(samples)
    for rank, one in zip((0.5, 0.99, 0.999), found, strict=True):
        exact = round(ordered[int(rank * (len(ordered) - 1))])
        assert one == pytest.approx(exact, rel=ACCURACY, abs=1)


def test_recent_percentiles_leave_out_what_is_older_however_often_somebody_looks() -> None:
    dice = random.Random(11)
    recorder, samples = LatencyRecorder(), list[tuple[float, float]]()
    often = LatencySketch(recorder)
    for second in range(1200):
        for _ in range(dice.randrange(0, 4)):
            recorder.record(one := dice.uniform(100, 200) * (1 + second // 100))
            samples.append((second, one))
        often.fold(second)
        if second % 7 == 0:
            status = often.status(second)
            for seconds, found in ((60, status.last_minute), (300, status.last_five_minutes), (1e9, status.ever)):
                # The slice in which the time began counts as a whole.
                spans = [[one for when, one in samples if when > second - seconds - more] for more in range(16)]
                assert any(close(found, span) for span in spans if span), (second, seconds)
    assert often.status(1300.0).last_minute == Percentiles()
    assert often.status(1300.0).last_five_minutes != Percentiles()
    assert often.status(1600.0).last_five_minutes == Percentiles()
    assert often.status(1600.0).ever == often.status(1200.0).ever


def close(found: Percentiles, samples: list[float]) -> bool:
    try:
        check(found, samples)
    except AssertionError:
        return False
    return True


def test_a_histogram_counts_each_quarter_of_a_decade_and_what_lies_beyond() -> None:
    recorder = LatencyRecorder()
    sketch = LatencySketch(recorder)
    for microseconds in (0.2, 10.0, 17.0, 18.0, 99.0, 100.0, 100.0, 99_000_000.0, 1e9):
        recorder.record(microseconds)
    expected = [0] * BINS
    expected[0], expected[1], expected[3], expected[4], expected[27] = 3, 1, 1, 2, 2
    assert list(sketch.status(1.0).histogram) == list(sketch.status(99.0).histogram) == expected


def test_a_burst_is_taken_in_evenly_spaced_samples_with_their_weight() -> None:
    recorder = LatencyRecorder()
    sketch = LatencySketch(recorder)
    count = 5 * SAMPLES_TOGETHER_MAX
    for number in range(count):
        recorder.record(float(number + 1))
    status = sketch.status(1.0)
    assert status.ever.p50_us == pytest.approx(count / 2, rel=0.02)
    assert status.ever.p999_us == pytest.approx(count * 0.999, rel=0.02)
    assert sum(status.histogram) == count


def test_the_recorder_returns_what_came_since_newest_first_as_far_as_it_is_kept() -> None:
    recorder = LatencyRecorder(samples_max=3)
    for number in range(5):
        recorder.record(float(number))
    assert recorder.since(4) == [4.0]
    assert recorder.since(0) == [4.0, 3.0, 2.0]
    assert recorder.since(5) == []


def test_without_the_package_there_are_no_percentiles_but_a_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LatencySketch(LatencyRecorder()).status(1.0) == LatencyStatus()
    monkeypatch.setattr(meters, "_new_sketch", None)
    recorder = LatencyRecorder()
    sketch = LatencySketch(recorder)
    recorder.record(1.0)
    sketch.fold(2.0)
    assert sketch.status(99.0) == LatencyStatus(1, sum_us=1.0, histogram=(1, *[0] * 27))


def test_a_rate_is_over_the_last_seconds_only() -> None:
    rates = Rates(window_s=5.0)
    assert rates.per_s("events", {"events": 7}, 1.0) == 0.0
    for second in range(20):
        rates.sample({"events": 1000 if second < 10 else 1000 + 10 * (second - 10)}, float(second))
    assert rates.per_s("events", {"events": 1100}, 20.0) == pytest.approx(10.0)


async def test_the_lag_of_the_loop_shows_a_handler_that_blocked_it() -> None:
    lag = LoopLag()
    assert lag.percentile_ms(0.99) == 0.0
    lag.start()
    try:
        while lag.percentile_ms(1.0) < 150:
            time.sleep(0.2)  # noqa: ASYNC251 - what is to be measured
            await asyncio.sleep(0)
    finally:
        lag.close()
