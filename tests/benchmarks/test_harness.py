# SPDX-License-Identifier: Apache-2.0

"""The common parts of all benchmarks: turns, percentiles, ratios, and a figure as JSON."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness import CURVE, Figure, Rounds, interleave, interleave_async, percentile, ratio

COLUMNS = {
    "name",
    "unit",
    "p50",
    "p99",
    "baseline_p50",
    "baseline_p99",
    "ratio_p50",
    "ratio_p99",
    "params",
}
"""The keys that tables and readers of the JSON need."""
TURNS = ["baseline", "subject", "baseline", "subject", "subject", "baseline", "baseline", "subject"]
"""A warm-up and three rounds: the order alternates."""


def test_percentiles_are_samples_and_never_beyond_the_largest() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.0) == 1.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 1.0) == 3.0
    assert percentile([7.0], 0.99) == 7.0


def test_a_figure_has_the_columns_of_the_table() -> None:
    figure = Figure("f", "µs", [[6.0, 8.0], [4.0]], [[2.0, 2.0], [4.0]], {"case": {"subtasks": 4}}, {"why": "because"})
    written = json.loads(json.dumps(figure.as_dict()))
    assert set(written) >= COLUMNS
    assert (written["name"], written["unit"]) == ("f", "µs")
    assert (written["p50"], written["p99"], written["max"]) == (6.0, 8.0, 8.0)
    assert (written["baseline_p50"], written["baseline_p99"]) == (2.0, 4.0)
    assert (written["samples"], written["rounds"]) == (3, 2)
    assert (written["params"], written["details"]) == ({"case": {"subtasks": 4}}, {"why": "because"})


def test_a_ratio_is_subject_over_baseline_and_bounded_by_that_of_single_rounds() -> None:
    figure = Figure("f", "µs", [[6.0, 6.0], [4.0, 4.0], [9.0, 9.0]], [[2.0, 2.0], [4.0, 4.0], [3.0, 3.0]]).as_dict()
    assert figure["ratio_p50"] == 2.0
    assert (figure["ratio_p50_low"], figure["ratio_p50_high"]) == (1.0, 3.0)
    with pytest.raises(ValueError, match="the baseline of 1 is 0"):
        ratio(1.0, 0.0)


def test_a_curve_rises_from_the_smallest_sample_to_the_largest() -> None:
    samples = [float(number) for number in range(1000, 0, -1)]
    curve = Figure("f", "µs", [samples], [[1.0]]).as_dict()["curve"]
    assert curve["fractions"] == list(CURVE)
    assert curve["subject"] == sorted(curve["subject"])
    assert (curve["subject"][0], curve["subject"][-1]) == (1.0, 1000.0)
    assert set(curve["baseline"]) == {1.0}


def test_a_figure_without_the_same_rounds_on_both_sides_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Figure("f", "µs", [[1.0], [1.0]], [[1.0]]).as_dict()


class Turns:
    """Two sides that record their turns; each sample is the number of its turn."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.heard: list[str] = []

    def take(self, who: str) -> list[float]:
        self.taken.append(who)
        return [float(len(self.taken))]

    async def take_async(self, who: str) -> list[float]:
        return self.take(who)

    def check(self, subject: Rounds, baseline: Rounds) -> None:
        assert self.taken == TURNS
        assert (subject, baseline) == ([[4.0], [5.0], [8.0]], [[3.0], [6.0], [7.0]])  # the warm-up does not count
        assert len(self.heard) == 3


def test_baseline_and_subject_take_turns_and_who_is_first_changes() -> None:
    turns = Turns()
    turns.check(*interleave(3, lambda: turns.take("baseline"), lambda: turns.take("subject"), turns.heard.append))


async def test_the_same_holds_on_a_loop() -> None:
    turns = Turns()
    turns.check(
        *await interleave_async(
            3, lambda: turns.take_async("baseline"), lambda: turns.take_async("subject"), turns.heard.append
        )
    )
