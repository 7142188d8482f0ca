# SPDX-License-Identifier: Apache-2.0

"""H199: which parallelism a backlog needs, and when an operator gets it."""

from __future__ import annotations

import random
from math import ceil, inf
from typing import Any

import pytest

from protocol.autoscaling import GAP_S, TOLERANCE, Autoscale, Autoscaler, Decision

EACH = 100


def policy(**changed: Any) -> Autoscale:
    given: dict[str, Any] = {"up_after_s": 10.0, "down_after_s": 30.0, "pause_s": 20.0, "backlog_per_subtask": EACH}
    return Autoscale(2, 8, **{**given, **changed})


class Driven:
    """An operator whose scaler is asked once a second, and gets what it asks for."""

    def __init__(self, **changed: Any) -> None:
        self.scaler = Autoscaler(policy(**changed))
        self.now = 0.0
        self.parallelism = 2
        self.changes: list[tuple[float, int]] = []
        self.last: Decision

    def run(self, seconds: int, backlog: int | None, *, accepts: bool = True, slots: int | None = None) -> None:
        for _ in range(seconds):
            self.now += 1
            self.last = self.scaler.decide(self.now, self.parallelism, backlog, slots)
            if self.last.to is None:
                continue
            self.changes.append((self.now, self.last.to))
            if accepts:
                self.parallelism = self.last.to
            else:
                self.scaler.refused(self.now)


def test_more_subtasks_come_when_they_were_wanted_for_the_whole_time_and_fewer_likewise() -> None:
    it = Driven()
    it.run(10, 400)
    assert (it.changes, it.last.wanted) == ([], 4)
    assert it.last.why == "400 left to read, at 100 for each subtask, but not for 10 s yet"
    it.run(2, 400)
    assert it.changes == [(12.0, 4)]
    it.run(28, 0)
    assert it.changes == [(12.0, 4)]
    it.run(20, 0)
    assert it.changes == [(12.0, 4), (44.0, 2)]


def test_growing_takes_the_smallest_number_of_its_window_and_shrinking_the_largest() -> None:
    it = Driven(pause_s=0.0)
    for backlog in (800, 500, 700):
        it.run(4, backlog)
    assert it.changes == [(12.0, 5)]
    for backlog in (200, 400, 300):
        it.run(11, backlog)
    assert it.changes[1:] == [(44.0, 4)]


def test_a_short_peak_changes_nothing() -> None:
    it = Driven()
    for _ in range(20):
        it.run(9, 800)
        it.run(2, 200)
    assert it.changes == []


def test_a_difference_within_the_tolerance_changes_nothing() -> None:
    it = Driven()
    it.run(100, 220)
    assert it.changes == []
    it.run(12, 221)
    assert [to for _, to in it.changes] == [3]


def test_nothing_changes_without_a_figure_and_a_long_gap_begins_anew() -> None:
    it = Driven()
    it.run(8, 800)
    it.run(int(GAP_S), None)
    assert it.last == Decision(None, None, "the backlog is not known")
    it.run(3, 800)
    assert it.changes == [], "nothing is known of the gap"
    it = Driven(up_after_s=0.0)
    it.run(1, None)
    it.run(1, 800)
    assert it.changes == [], "one figure is not a window"
    it.run(1, 800)
    assert it.changes == [(3.0, 8)]


def test_a_change_by_hand_is_followed_by_the_pause_too() -> None:
    it = Driven(up_after_s=1.0)
    it.run(1, 800)
    it.parallelism = 4
    it.run(20, 800)
    assert it.changes == []
    assert it.last.why.endswith("but the last change was less than 20 s ago")
    it.run(2, 800)
    assert it.changes == [(22.0, 8)]


def test_what_is_refused_is_tried_again_later_each_time() -> None:
    it = Driven(up_after_s=0.0)
    it.run(100, 800, accepts=False)
    assert [at for at, _ in it.changes] == [2.0, 12.0, 32.0, 72.0]
    assert it.last.why.endswith("but the last change was refused, and is tried again later")
    it.parallelism = 3
    it.run(21, 800)
    assert it.changes[-1] == (121.0, 8), "a change by hand may have removed the reason"


def test_it_never_grows_beyond_the_slots_and_never_shrinks_for_them() -> None:
    it = Driven()
    it.run(20, 800, slots=3)
    assert [to for _, to in it.changes] == [3]
    assert it.last.why.endswith("while Spark can run 3 tasks at the same time")
    it.run(100, 800, slots=1)
    assert it.parallelism == 3


def test_splits_have_a_limit_of_their_number() -> None:
    it = Driven(backlog_per_subtask=None, splits_per_subtask=2.5)
    it.run(20, 10)
    assert [to for _, to in it.changes] == [4]
    assert it.last.why.startswith("10 splits left to read, at 2.5 for each subtask")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"min": 0, "max": 3}, "min must be an int from 1 to 1000000, not 0"),
        ({"min": 4, "max": 3}, r"max must be at least min \(4\), not 3"),
        ({"min": 1, "max": 3, "pause_s": -1.0}, "pause_s must be a number of seconds, at least 0"),
        ({"min": 1, "max": 3, "backlog_per_subtask": 0.0}, "backlog_per_subtask must be a positive number"),
        ({"min": 1, "max": 3, "backlog_per_subtask": None}, "needs either backlog_per_subtask"),
        ({"min": 1, "max": 3, "splits_per_subtask": 2.0}, "needs either backlog_per_subtask"),
    ],
)
def test_a_wrong_setting_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Autoscale(**{"backlog_per_subtask": EACH, **given})


class Model:
    """The same by brute force: every figure is kept, and each window looked through."""

    def __init__(self, given: Autoscale) -> None:
        self.given = given
        self.seen: list[tuple[float, int]] = []
        self.parallelism = 0
        self.changed_at = -inf
        self.again_at = -inf
        self.refusals = 0

    def decide(self, now: float, parallelism: int, backlog: int | None, slots: int | None) -> tuple[int | None, ...]:
        given = self.given
        if parallelism != self.parallelism:
            if self.parallelism:
                self.changed_at = now
            self.parallelism, self.seen, self.again_at, self.refusals = parallelism, [], -inf, 0
        if backlog is None:
            return None, None
        if not self.seen or now - self.seen[-1][0] > GAP_S:
            self.seen = [(now, parallelism)]
        within = (1 - TOLERANCE) * parallelism * EACH <= backlog <= (1 + TOLERANCE) * parallelism * EACH
        wanted = parallelism if within else ceil(backlog / EACH)
        wanted = min(max(wanted, given.min), given.max)
        if slots is not None:
            wanted = min(wanted, max(slots, parallelism))
        self.seen.append((now, wanted))
        more = min(number for at, number in self.seen if now - at <= given.up_after_s)
        fewer = max(number for at, number in self.seen if now - at <= given.down_after_s)
        may = now - self.changed_at >= given.pause_s and now >= self.again_at
        to = more if more > parallelism else fewer if fewer < parallelism else None
        return wanted, to if may else None

    def refused(self, now: float) -> None:
        self.again_at = now + min(10 * 2**self.refusals, 600)
        self.refusals += 1


@pytest.mark.parametrize("seed", [*range(10), *([None] * 10)])  # each worker of pytest must see the same names
def test_it_decides_as_the_model_does_whatever_comes(seed: int | None) -> None:
    if seed is None:
        seed = random.randrange(10**9)
    print(f"seed {seed}")
    chance = random.Random(seed)
    given = policy(
        up_after_s=chance.choice([0.0, 2.0, 15.0]),
        down_after_s=chance.choice([0.0, 5.0, 40.0]),
        pause_s=chance.choice([0.0, 10.0, 50.0]),
    )
    scaler, model = Autoscaler(given), Model(given)
    now, parallelism, level, changes = 1000.0, chance.randint(2, 8), 0, [-inf]
    for _ in range(1500):
        now += chance.choice([0.5, 1.0, 1.0, 1.0, 1.5, 30.0 if chance.random() < 0.02 else 1.0])
        if chance.random() < 0.03:
            level = chance.choice([0, 157, 307, 507, 1207])
        backlog = None if chance.random() < 0.05 else level + chance.choice([0, 0, 20, 300])
        slots = chance.choice([None, None, None, 5])
        if chance.random() < 0.005:  # by hand, even outside of the limits
            parallelism = chance.randint(1, 10)
        decision = scaler.decide(now, parallelism, backlog, slots)
        assert decision[:2] == model.decide(now, parallelism, backlog, slots)
        assert decision.why
        if decision.to is None:
            continue
        assert given.min <= decision.to <= given.max
        assert backlog is not None
        if chance.random() < 0.4:
            scaler.refused(now)
            model.refused(now)
        else:
            assert now - changes[-1] >= given.pause_s
            changes.append(now)
            parallelism = decision.to
