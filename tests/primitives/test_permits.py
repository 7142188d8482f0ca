# SPDX-License-Identifier: Apache-2.0

"""Permits: a rate and a number of users that all tasks keep to together (H111)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from headgate import CheckpointConfig, Permits, SubtaskContext, chain
from headgate.errors import TimedOut
from headgate.testing import running_operator
from headgate.testing._bookkeeping import with_held
from protocol.errors import LocalProtocolError
from spark_bridge.primitives.permits.schedule import EXPIRY_S, RateSchedule
from spark_bridge.subtask.coroutines.concurrently import concurrently
from tests.primitives.histories import (
    given_up_history,
    passing_on,
    permits_history,
    until_done,
    with_held_requests,
)

pytestmark = pytest.mark.anyio


def check_rate(times: list[float], per_s: float, burst: int) -> None:
    """In no window are there more uses than the bucket allows."""
    times = sorted(times)
    for first in range(len(times)):
        for last in range(first, len(times)):
            allowed = burst + per_s * (times[last] - times[first])
            assert last - first + 1 <= allowed + 1e-6, f"{last - first + 1} uses from {times[first]} to {times[last]}"


@pytest.mark.parametrize(("per_s", "burst"), [(10.0, 1), (10.0, 5), (200.0, 1), (200.0, 30)])
async def test_all_tasks_together_keep_to_the_rate_and_use_all_of_it(per_s: float, burst: int) -> None:
    permits = Permits("api", per_s=per_s, burst=burst)
    times: list[float] = []
    uses = 20 if per_s < 100 else 100

    def call(context: SubtaskContext, records: Iterator[Any]) -> None:
        for _ in range(uses):
            with permits:
                times.append(context.now())

    async with running_operator(parallelism=3, uses=[permits]) as world:
        tasks = [await world.launch_operator(subtask, call, []) for subtask in range(3)]
        await until_done(world, tasks)
        assert [task.error for task in tasks] == [None] * 3
    check_rate(times, per_s, burst)
    took_s = max(times) - min(times)
    assert len(times) == 3 * uses
    assert took_s <= 1.5 * (3 * uses - burst) / per_s + EXPIRY_S, "nobody waits longer than needed"


async def test_at_a_high_rate_the_usual_use_costs_no_round_trip() -> None:
    permits = Permits("api", per_s=1000.0, burst=100)

    def call(context: SubtaskContext, records: Iterator[Any]) -> Iterator[float]:
        for _ in range(500):
            permits.acquire()
            yield context.now()
            context.sleep(0.004)

    async with running_operator(parallelism=1, uses=[permits]) as world:
        task = await world.launch_operator(0, call, [])
        await until_done(world, [task])
        assert task.error is None
        exchanged = world.statistics.snapshot()["parts"]["api"]
        assert exchanged["requests_received"] <= 25
        assert 0 < exchanged["events_received"] <= 250
    check_rate(task.outputs, 1000.0, 100)


@pytest.mark.parametrize("seed", range(10))
async def test_never_more_users_than_allowed_and_the_slots_of_the_lost_come_back(seed: int) -> None:
    await permits_history(seed)


@pytest.mark.parametrize("seed", range(40))
async def test_after_all_have_given_up_a_patient_task_is_served_within_its_time(seed: int) -> None:  # H111 H176
    await given_up_history(seed)


async def test_one_that_polls_with_a_short_timeout_gets_all_of_the_rate() -> None:  # H111 H176
    permits = Permits("api", per_s=1.0)
    used: list[float] = []

    def poll(context: SubtaskContext, records: Iterator[Any]) -> None:
        while context.now() - begun < 8.0:
            try:
                permits.acquire(timeout_s=0.2)
                used.append(context.now())
            except TimedOut:
                context.sleep(0.05)

    async with running_operator(parallelism=1, uses=[permits]) as world:
        begun = world.now
        await until_done(world, [await world.launch_operator(0, poll, [])])
    assert len(used) == 8
    check_rate(used, 1.0, 1)


@pytest.mark.parametrize("how", ["kill", "lose_executor", "cancel_job"])
async def test_the_permits_of_tasks_that_died_while_they_waited_are_not_waited_for(how: str) -> None:  # H111 H176
    permits = Permits("api", per_s=0.1)
    used: list[float] = []

    def wait(context: SubtaskContext, records: Iterator[Any]) -> None:
        permits.acquire()
        used.append(context.now())

    async with running_operator(parallelism=9, uses=[permits], attempts_max=100) as world:
        begun = world.now
        tasks = [await world.launch_operator(subtask, wait, []) for subtask in range(9)]
        await world.advance(5.0)
        assert len(used) == 1
        if how == "cancel_job":
            await world.cancel_job()
        else:
            for task in tasks[1:]:
                await getattr(world, how)(task)
        await until_done(world, [await world.launch_operator(8, wait, [])])
    assert used == [begun, begun + 10.0]


@pytest.mark.parametrize("hold", [True, False], ids=["held", "recorded"])
async def test_tasks_that_contend_for_one_permit_decline_no_checkpoint(hold: bool) -> None:
    """H152: each checkpoint is complete within the time of one record."""
    permits = Permits("db", concurrency=1)

    def call(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            with permits:
                context.sleep(0.5)
            yield record

    async with running_operator(
        parallelism=3, mode="streaming", uses=[permits], checkpoint=CheckpointConfig(hold_events=hold)
    ) as world:
        tasks = [await world.launch_operator(subtask, call, range(10)) for subtask in range(3)]
        for _ in range(6):
            answer = world.begin_checkpoint()
            await world.advance(3 * 0.5)  # of three tasks, two wait for their turn
            assert answer.value > 0
        await until_done(world, tasks)
        assert [task.outputs for task in tasks] == [list(range(10))] * 3
        assert world.statistics.checkpoints_aborted == 0
        held = [one.held for checkpoint in world.checkpoints for one in checkpoint.subtask_states.values()]
        assert not any(event.part for events in held for event in events)


async def test_a_checkpoint_is_taken_while_a_task_waits_for_the_rate() -> None:
    permits = Permits("api", per_s=0.05)

    def call(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        for record in records:
            permits.acquire()
            yield record

    async with running_operator(parallelism=1, mode="streaming", uses=[permits]) as world:
        task = await world.launch_operator(0, call, [1, 2, 3])
        await world.advance(1.0)
        answer = world.begin_checkpoint()
        await world.advance(30.0)
        assert answer.value == 1
        await until_done(world, [task])
        assert task.outputs == [1, 2, 3]


@pytest.mark.parametrize("event", [["more", 5], ["release", [1]], ["give up", 1]])
async def test_what_a_task_of_before_the_restore_had_said_changes_nothing(event: list[Any]) -> None:  # H73 H111
    permits = Permits("api", per_s=1000.0, burst=100, concurrency=1)
    kept: dict[str, Any] = {"mode": "streaming", "uses": [permits]}
    async with running_operator(parallelism=2, **kept) as world:
        for subtask in range(2):
            await world.launch_operator(subtask, passing_on)
        await world.checkpoint()
    restored = with_held(world.checkpoints[-1], 1, [event], part="api")
    async with running_operator(parallelism=1, **kept, restored=restored) as world:
        task = await world.launch_operator(0, passing_on)
        await world.settle()
        assert task.outcome == ""
        assert not world.failures


async def test_a_slot_that_nobody_else_wants_is_kept_and_given_up_when_somebody_does() -> None:
    permits = Permits("db", concurrency=1)

    def use(context: SubtaskContext, records: Iterator[Any]) -> Iterator[float]:
        for _ in range(3):
            with permits:
                yield context.now()
        for _ in records:
            yield context.now()

    async with running_operator(parallelism=2, uses=[permits]) as world:
        first = await world.launch_operator(0, use)
        await world.settle()
        assert len(first.outputs) == 3
        assert world.statistics.snapshot()["parts"]["db"]["requests_received"] == 1
        assert permits.in_use == 1
        second = await world.launch_operator(1, use, [])
        await world.advance(1.0)
        assert len(second.outputs) == 3, "the first has given it up while it waits for a record"


async def test_who_waits_too_long_gets_an_error_and_leaves_no_slot_behind() -> None:
    permits = Permits("db", concurrency=1)

    def hold(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        with permits:
            context.sleep(5.0)
        yield from ()

    def hurry(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        try:
            permits.acquire(timeout_s=1.0)
        except TimedOut as error:
            yield str(error)
        permits.acquire(timeout_s=60.0)
        permits.release()
        yield "later"

    async with running_operator(parallelism=2, uses=[permits]) as world:
        first = await world.launch_operator(0, hold, [])
        await world.advance(0.1)
        second = await world.launch_operator(1, hurry, [])
        await until_done(world, [first, second])
        assert "no permit of 'db' within 1 s" in second.outputs[0]
        assert second.outputs[1] == "later"
        assert permits.in_use == 0


async def test_a_release_without_an_acquire_is_refused_and_frees_no_place() -> None:  # H111
    permits = Permits("db", concurrency=1)

    def use(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        for record in records:
            with pytest.raises(LocalProtocolError, match=r"release\(\) of the permits 'db' without an acquire"):
                permits.release()
            with permits:
                with pytest.raises(TimedOut, match="this task itself holds one that it has not released"):
                    permits.acquire(timeout_s=1.0)
            yield record

    async with running_operator(parallelism=1, uses=[permits]) as world:
        task = await world.launch_operator(0, use, [1])
        await until_done(world, [task])
        assert task.outputs == [1]
        assert permits.in_use == 0


async def test_a_second_action_gets_the_places_of_one_that_failed_in_the_middle() -> None:  # H111
    permits = Permits("db", concurrency=1)

    def use(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        for record in records:
            with permits:
                yield record

    async with running_operator(parallelism=1, uses=[permits]) as world:
        task = await world.launch_operator(0, use)
        task.feed(1, 2)
        await world.settle()
        assert permits.in_use == 1
        await world.cancel_job()
        await world.settle()
        assert permits.in_use == 0
        second = await world.launch_operator(0, use, [3, 4])
        await until_done(world, [second])
        assert second.outputs == [3, 4]


async def test_calls_that_wait_for_the_rate_are_served_though_another_operator_that_had_their_timer_is_gone() -> None:
    # H176: the second call of a task is behind its first one, and only a timer looks at it again
    permits = Permits("api", per_s=0.01)

    async def call(number: int) -> int:
        await permits.acquire_async()
        await asyncio.sleep(1000.0)
        return number

    async with running_operator(parallelism=1, uses=[permits]) as world:
        stages = chain(call=concurrently(call, limit=3))
        other = running_operator(stages, parallelism=1, uses=[permits], operator_id="other", beside=world)
        async with other as lasting:
            task = await lasting.launch_operator(0, None, range(3))
            await lasting.advance(1.0)
            await world.stop()
            await lasting.advance(1300.0)
            assert task.outputs == [0, 1, 2]


async def test_a_rate_and_a_number_of_users_together() -> None:
    permits = Permits("api", per_s=10.0, concurrency=2)
    times: list[float] = []

    def call(context: SubtaskContext, records: Iterator[Any]) -> None:
        for _ in range(5):
            with permits:
                times.append(context.now())
                context.sleep(0.25)

    async with running_operator(parallelism=4, uses=[permits]) as world:
        tasks = [await world.launch_operator(subtask, call, []) for subtask in range(4)]
        await until_done(world, tasks)
        assert [task.error for task in tasks] == [None] * 4
    check_rate(times, 10.0, 1)
    check_rate(times, 2 / 0.25, 2)


def test_wrong_limits_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "limit nothing"),
        ({"per_s": 0}, "per_s must be a positive number, not 0"),
        ({"per_s": float("inf")}, "per_s must be a positive number, and finite, not inf"),
        ({"per_s": float("nan")}, "per_s must be a positive number, not nan"),
        ({"per_s": -1.0}, "per_s must be a positive number"),
        ({"per_s": 1, "burst": 0}, "must be an int of at least 1"),
        ({"concurrency": 0}, "must be an int of at least 1"),
    ]
    for limits, text in wrong:
        with pytest.raises(ValueError, match=text):
            Permits("api", **limits)
    with pytest.raises(LocalProtocolError, match=r"handle\.subtask"):
        Permits("api", per_s=1).acquire()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("per_s", "burst"), [(1.0, 1), (50.0, 3), (200.0, 60), (1000.0, 60), (1000.0, 200)])
def test_the_schedule_allows_no_more_than_the_bucket_even_if_permits_are_used_when_they_expire(
    per_s: float, burst: int, seed: int
) -> None:
    chance = random.Random(seed)
    now = 0.0
    schedule = RateSchedule(per_s, burst)
    late = EXPIRY_S if schedule.shares else 0.0
    due: list[float] = []
    for _ in range(20):
        for _ in range(chance.choice([1, 5, 20]) if schedule.shares else 1):
            due.append(schedule.due(now))
            schedule.take(now)
        now += chance.expovariate(per_s / 2)
    # As many as possible are used at one moment: the late ones keep their permits for it.
    crowded = chance.choice(due) + late
    check_rate([min(max(one, crowded), one + late) for one in due], per_s, burst)


async def test_a_request_of_an_attempt_before_the_restore_takes_no_slot() -> None:  # H73 H111
    permits = Permits("api", concurrency=1)
    kept: dict[str, Any] = {"parallelism": 1, "mode": "streaming", "uses": [permits]}
    async with running_operator(**kept) as world:
        await world.launch_operator(0, passing_on)
        await world.checkpoint()
    restored = with_held_requests(world.checkpoints[-1], ["acquire", 1, True, 600.0, 1], part="api")
    async with running_operator(**kept, restored=restored) as world:
        await world.launch_operator(0, passing_on)
        assert permits.in_use == 0
