# SPDX-License-Identifier: Apache-2.0

"""Deadline lanes behave like one timer for each deadline."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from actors.clock import IDLE_LANES_MAX, Deadlines
from actors.testing import VirtualClock
from tests.actors.actors_under_test import Counter, GetTotal, running_system


async def no_pause() -> None:
    pass


def advance(clock: VirtualClock, by_s: float) -> None:
    """Advance the clock without a loop: nothing here awaits."""
    clock.between = no_pause
    step = clock.advance(by_s)
    try:
        step.send(None)
    except StopIteration:
        return
    raise AssertionError("advance() waited")


# Binary fractions: their sums are exact, so a deadline and the clock match to the bit.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from([0.5, 1.0, 1.125, 3.0])),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("advance"), st.sampled_from([0.125, 0.375, 1.0, 2.5])),
    ),
    max_size=60,
)


@given(STEPS)
def test_unmet_deadline_expires_once_at_its_time(steps: list[tuple[str, float]]) -> None:
    clock = VirtualClock()
    deadlines = Deadlines(clock)
    open_: dict[int, tuple[float, float]] = {}  # key: (timeout, due)
    expired: dict[int, float] = {}
    order: list[int] = []
    for kind, value in steps:
        if kind == "start":
            number = len(order)
            key = deadlines.start(value, partial(lambda n: expired.setdefault(n, clock.now()), number))
            order.append(key)
            open_[number] = (value, clock.now() + value)
        elif kind == "cancel" and int(value) in open_ and int(value) not in expired:
            timeout_s, _ = open_.pop(int(value))
            deadlines.cancel(timeout_s, order[int(value)])
        elif kind == "advance":
            advance(clock, value)
            now = clock.now()
            assert expired == {n: due for n, (_, due) in open_.items() if due <= now}


def test_unique_timeouts_leave_no_lanes() -> None:
    clock = VirtualClock()
    deadlines = Deadlines(clock)
    for n in range(1000):
        timeout_s = 1.0 + n / 1000
        deadlines.cancel(timeout_s, deadlines.start(timeout_s, lambda: None))
    assert len(deadlines._lanes) <= IDLE_LANES_MAX + 1
    advance(clock, 10.0)
    assert deadlines._lanes == {}
    assert clock.next_due_s() is None


def test_closing_cancels_every_timer() -> None:
    clock = VirtualClock()
    deadlines = Deadlines(clock)
    for timeout_s in (1.0, 2.0):
        deadlines.start(timeout_s, lambda: None)
    deadlines.close()
    assert clock.next_due_s() is None


async def test_asks_with_unique_timeouts_leave_no_lanes() -> None:
    async with running_system() as system:
        counter = system.spawn(Counter)
        for number in range(IDLE_LANES_MAX + 10):
            await counter.ask(GetTotal, timeout_s=60.0 + number)
        assert len(system.deadlines._lanes) <= IDLE_LANES_MAX + 1
