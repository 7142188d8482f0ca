# SPDX-License-Identifier: Apache-2.0

"""After a global failure, the run starts again according to its strategy (H15)."""

from __future__ import annotations

import pytest

from protocol.restart import NO_RESTART, ExponentialDelay, FixedDelay, RestartBackoff, RestartStrategy


def delays(strategy: RestartStrategy, runs: list[float]) -> list[float | None]:
    """Return the decisions for a job that runs for this many seconds each time before it fails."""
    backoff, now, heard = RestartBackoff(strategy), 100.0, []
    for lasted_s in runs:
        backoff.begun(now)
        now += lasted_s
        heard.append(backoff.failed(now))
    return heard


def test_a_fixed_delay_gives_up_after_its_number() -> None:
    assert delays(FixedDelay(restarts_max=2, delay_s=0.5), [1, 1, 1, 1]) == [0.5, 0.5, None, None]


def test_a_fixed_delay_without_a_number_never_gives_up() -> None:
    assert delays(FixedDelay(restarts_max=None, delay_s=3), [0] * 50) == [3] * 50


def test_no_restart_gives_up_immediately() -> None:
    assert delays(NO_RESTART, [10]) == [None]


def test_an_exponential_delay_doubles_up_to_its_maximum() -> None:
    assert delays(ExponentialDelay(initial_s=1, maximum_s=5), [0] * 5) == [1, 2, 4, 5, 5]


def test_a_delay_may_stay_as_it_is() -> None:
    assert delays(ExponentialDelay(initial_s=2, maximum_s=2, multiplier=1), [0] * 3) == [2, 2, 2]


def test_a_long_delay_never_overflows() -> None:
    assert delays(ExponentialDelay(initial_s=1, maximum_s=60, multiplier=10), [0] * 2000)[-1] == 60


def test_a_job_that_ran_long_enough_is_trusted_again() -> None:
    strategy = ExponentialDelay(initial_s=1, maximum_s=60, reset_after_s=600, restarts_max=2)
    assert delays(strategy, [0, 0, 599.9]) == [1, 2, None]
    assert delays(strategy, [0, 0, 600, 0]) == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: FixedDelay(restarts_max=-1), "restarts_max"),
        (lambda: FixedDelay(delay_s=-0.1), "delay_s"),
        (lambda: ExponentialDelay(initial_s=-1), "initial_s"),
        (lambda: ExponentialDelay(initial_s=5, maximum_s=4), "maximum_s"),
        (lambda: ExponentialDelay(multiplier=0.5), "multiplier"),
    ],
)
def test_a_strategy_that_makes_no_sense_is_refused_by_name(make: object, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        make()  # type: ignore[operator]
