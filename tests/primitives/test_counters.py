# SPDX-License-Identifier: Apache-2.0

"""Counters: exact sums, whatever is lost, copied or restored meanwhile (H101)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import isclose
from typing import Any

import pytest

from headgate import Distribution, SubtaskContext, SubtaskOperator
from headgate.testing import running_operator
from headgate.testing._bookkeeping import with_held
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.errors import LocalProtocolError
from spark_bridge.primitives.counters.book import Book, added_up
from spark_bridge.subtask.parts import COUNTERS
from tests.primitives.histories import (
    RECORDS,
    Counting,
    counters_history,
    passing_on,
    until_done,
)

pytestmark = pytest.mark.anyio


def counting(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
    """Counts its records and what they add up to; a record takes a while."""
    for record in records:
        context.count("records")
        context.count("sum", record)
        context.observe("value", record)
        context.wait_for_event(timeout_s=0.3)
        yield record


async def test_counts_add_up_over_the_tasks_and_are_there_before_the_end() -> None:
    async with running_operator(parallelism=3) as world:
        tasks = [await world.launch_operator(subtask, counting, range(1, 5)) for subtask in range(3)]
        await world.advance(0.1)
        assert world.counters()["records"] == 3
        await until_done(world, tasks)
        value = world.counters().pop("value")
        assert {name: count for name, count in world.counters().items() if name != "value"} == {
            "records": 12,
            "sum": 30,
        }
    assert isinstance(value, Distribution)
    assert (value.count, value.sum, value.minimum, value.maximum, value.mean) == (12, 30, 1, 4, 2.5)


@pytest.mark.parametrize("seed", range(20))
async def test_a_lost_attempt_takes_its_counts_back_and_a_copy_counts_once(seed: int) -> None:
    await counters_history(seed)


async def a_checkpoint_of_counts() -> CompletedCheckpoint:
    """In which three subtasks have counted six records."""
    async with running_operator(parallelism=3, mode="streaming") as world:
        for subtask in range(3):
            await world.launch_operator(subtask, Counting, range(subtask + 1))
            await world.advance(5.0)
        await world.checkpoint()
        assert world.counters()["records"] == 6
        return world.checkpoints[-1]


@pytest.mark.parametrize("parallelism", [2, 3])
async def test_a_restored_driver_knows_the_counts_of_tasks_that_have_not_come_back(parallelism: int) -> None:  # H101
    restored = await a_checkpoint_of_counts()
    async with running_operator(parallelism=parallelism, mode="streaming", restored=restored) as world:
        for subtask in range(parallelism):
            if parallelism == 3:  # otherwise the tasks bring them
                assert world.counters()["records"] == world.counter_totals()["records"] == 6
            await world.launch_operator(subtask, Counting)
        assert world.counters()["records"] == 6


@pytest.mark.parametrize("parallelism", [1, 3])
async def test_reports_in_a_checkpoint_count_once_after_its_restore(parallelism: int) -> None:
    restored = await a_checkpoint_of_counts()
    for subtask in range(3):
        report = [restored.checkpoint_id, [{"records": subtask + 1}, {}]]
        restored = with_held(restored, subtask, [report], part=COUNTERS)
    async with running_operator(parallelism=parallelism, mode="streaming", restored=restored) as world:
        for run in range(2):  # the second one after a reset of the whole operator
            for subtask in range(parallelism):
                await world.launch_operator(subtask, Counting)
            assert world.counters()["records"] == 6, run
            await world.cancel_job()


async def test_a_streaming_run_that_fails_before_its_first_checkpoint_leaves_no_counts() -> None:
    async with running_operator(parallelism=2, mode="streaming") as world:
        finished = await world.launch_operator(0, counting, range(3))
        await until_done(world, [finished])
        await world.launch_operator(1, passing_on)
        assert world.counters()["records"] == 3
        await world.cancel_job()
        tasks = [await world.launch_operator(subtask, counting, range(5)) for subtask in range(2)]
        await until_done(world, tasks)
        assert world.counters()["records"] == 10


async def test_a_second_action_counts_from_zero() -> None:
    async with running_operator(parallelism=2) as world:
        for _ in range(2):
            tasks = [await world.launch_operator(subtask, counting, range(RECORDS)) for subtask in range(2)]
            await until_done(world, tasks)
            assert world.counters()["records"] == 2 * RECORDS


async def test_wrong_names_and_values_are_refused() -> None:
    refused: list[str] = []

    def wrong(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        def too_many() -> None:
            for number in range(1001):
                context.count(f"name {number}")

        context.count("both")
        attempts: list[Any] = [
            lambda: context.observe("both", 1.0),
            lambda: context.count(""),
            lambda: context.count("x" * 201),
            lambda: context.observe("nan", float("nan")),
            too_many,
        ]
        for attempt in attempts:
            try:
                attempt()
            except ValueError as error:
                refused.append(str(error))
        yield from ()

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, wrong, [])
        await until_done(world, [task])
        assert task.error is None
    assert len(refused) == 5
    assert ["count() uses already" in refused[0], "'name 999' is one more" in refused[4]] == [True, True]


async def test_a_context_counts_from_open_to_close() -> None:
    class Early(SubtaskOperator):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            context.count("opened")

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            yield from records

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, Early, [])
        await until_done(world, [task])
        assert world.counters() == {"opened": 1}


def test_quantiles_are_within_one_percent() -> None:
    chance = random.Random(7)
    values = sorted(chance.lognormvariate(0, 3) * chance.choice([-1, 1]) for _ in range(5000)) + [0.0] * 10
    books = [Book() for _ in range(4)]
    for number, value in enumerate(values):
        books[number % 4].observe("x", value)
    found = added_up(books).values()["x"]
    assert isinstance(found, Distribution)
    ordered = sorted(values)
    for fraction in (0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0):
        exact = ordered[int(fraction * (len(ordered) - 1))]
        assert isclose(found.quantile(fraction), exact, rel_tol=0.0101), fraction
    with pytest.raises(ValueError, match="fraction must be a number from 0 to 1"):
        found.quantile(2)


def test_what_is_not_the_count_of_a_task_is_refused() -> None:
    for value in (None, [], [{}, {"x": 1}], [{}, {"x": [1, 2, 3, 4]}]):
        with pytest.raises(ValueError, match="not the counts of a task"):
            Book.from_value(value)


def test_the_error_outside_a_task_says_what_is_missing() -> None:
    context = SubtaskContext.__new__(SubtaskContext)
    context._counters = None
    with pytest.raises(LocalProtocolError, match="before open"):
        context.count("x")
