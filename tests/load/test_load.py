# SPDX-License-Identifier: Apache-2.0

"""A short run of the load test with few subtasks, and the checker itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import SystemRandom

import pytest
import structlog

from tests.load.__main__ import main
from tests.load.checker import Durations, Sequence, Tally
from tests.load.driver import Plan, Report, run_load


@pytest.fixture(autouse=True)
def log_of_the_process() -> Iterator[None]:
    """The command configures the log for its own process, with the standard error of the test that runs it."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def run(*, seed: int | None = None, lose: int | None = None, tls: bool = False) -> Report:
    """Run a few thousand events, as fast as they go, with kills, checkpoints, strangers and a neighbour."""
    seed = SystemRandom().randrange(2**31) if seed is None else seed
    print(f"replay with {seed=}")
    plan = Plan(
        seed=seed,
        ends=8,
        processes=2,
        neighbours=2,
        strangers=2,
        events=2000,
        rate=None,
        kills=10,
        checkpoint_every=200,
        lose=lose,
        tls=tls,
    )
    return asyncio.run(run_load(plan, lambda report: None))


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_nothing_is_lost_or_doubled_under_kills_strangers_and_a_flooding_neighbour(*, tls: bool) -> None:
    # H20, H22, H30, H31, H32, H77, H157
    report = run(tls=tls)
    assert report.tally.clean, report.tally
    assert report.neighbour.clean, report.neighbour
    assert report.passed
    assert report.kills == report.restored == 10
    assert report.checkpoints >= 2
    assert report.strangers > 0
    assert report.attacks > 0
    assert report.neighbour.events > 0
    assert report.tally.events >= report.round_trips > 0
    assert report.p50_ms <= report.p99_ms <= report.p999_ms <= report.max_ms * 1.01


def test_an_event_that_the_checker_does_not_see_fails_the_run() -> None:
    report = run(lose=700)
    assert not report.passed
    assert report.tally.lost == 1, report
    assert (report.tally.doubled, report.tally.out_of_order, report.tally.faults) == (0, 0, 0)
    assert report.tally.stories


@pytest.mark.parametrize(("options", "status"), [([], 0), (["--lose", "20"], 1)])
def test_the_exit_status_says_whether_something_was_lost(
    options: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--ends", "4", "--strangers", "1", "--neighbours", "1", "--minutes", "0.01", "--seed", "4711"]
    assert main([*few, *options]) == status
    said = capsys.readouterr().out
    assert "--seed 4711" in said
    assert ("nothing was lost" in said) is (status == 0)


# --- the checker --------------------------------------------------------------------------------------------------


def judged(*numbers: int) -> tuple[int, int, int]:
    """Return what is lost, doubled and out of order in this sequence."""
    tally = Tally()
    sequence = Sequence(tally, "subtask 0, up")
    for number in numbers:
        sequence.take(number)
    assert tally.events == len(numbers)
    assert tally.clean == (not tally.stories)
    return tally.lost, tally.doubled, tally.out_of_order


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0, 1, 2), (0, 0, 0)),
        ((0, 2, 3), (1, 0, 0)),
        ((1, 2), (1, 0, 0)),
        ((0, 3), (2, 0, 0)),
        ((0, 0, 1), (0, 1, 0)),
        ((0, 1, 0), (0, 1, 0)),
        ((1, 0, 2), (0, 0, 1)),
        ((0, 3, 1, 1), (1, 1, 1)),
    ],
)
def test_each_event_is_counted_as_what_it_is(numbers: tuple[int, ...], expected: tuple[int, int, int]) -> None:
    assert judged(*numbers) == expected


def test_the_last_events_are_lost_if_they_never_come() -> None:
    tally = Tally()
    sequence = Sequence(tally, "subtask 0, up")
    sequence.take(0)
    sequence.end(3)
    assert (tally.lost, tally.clean) == (2, False)


def test_a_return_to_a_checkpoint_expects_the_same_numbers_again() -> None:
    tally = Tally()
    sequence = Sequence(tally, "subtask 0, up")
    for number in (0, 1, 2):
        sequence.take(number)
    sequence.rewind(1)
    for number in (1, 2, 3):
        sequence.take(number)
    sequence.end(4)
    assert tally.clean
    sequence.rewind(2)
    sequence.take(3)
    assert tally.lost == 1


def test_percentiles_are_those_of_the_durations() -> None:
    durations = Durations()
    for ms in range(1, 1001):
        durations.add(ms / 1000)
    assert durations.percentile_ms(0.5) == pytest.approx(501, rel=0.01)
    assert durations.percentile_ms(0.999) == pytest.approx(1000, rel=0.01)
    assert durations.percentile_ms(1.0) == durations.max_ms == 1000
    assert Durations().percentile_ms(0.5) == 0.0
