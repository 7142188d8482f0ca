# SPDX-License-Identifier: Apache-2.0

"""A job that runs every day with a two-phase sink: each day's input appears once, however often it is interrupted."""

from __future__ import annotations

import random
from collections.abc import Sequence

from headgate.testing._sink_model import Row
from headgate.testing._sink_world import SinkTarget
from headgate.testing._world import World, running_operator
from protocol.barrier_tracker import CompletedCheckpoint
from spark_bridge.sinks.two_phase.driver import TwoPhaseSinkCoordinator
from spark_bridge.sinks.two_phase.task import TwoPhaseSinkOperator

__all__ = ["days"]

NAME = "sink"
SUBTASKS = (0, 1)
DAYS = 3
ROWS = 4
"""How many rows of a subtask a day has. Their numbers go on from day to day, so that a reader can tell them apart."""


async def days(target: SinkTarget, histories: int, seed: int) -> None:
    """A run that ended well, then runs with other input: all of it appears; an interrupted one continues, once."""
    for number in range(seed, seed + max(2, histories)):
        for named in (False, True):
            try:
                await _history(target, random.Random(number), named=named)
            except BaseException as error:
                error.add_note(f"the days of history {number}, {'with' if named else 'without'} input_id")
                raise


async def _history(target: SinkTarget, chance: random.Random, *, named: bool) -> None:
    target.clear()
    restored: CompletedCheckpoint | None = None
    expected: list[Row] = []
    for day in range(DAYS):
        numbers = range(day * ROWS, (day + 1) * ROWS)
        expected += [(subtask, number) for subtask in SUBTASKS for number in numbers]
        interruptions, done = chance.randrange(3), False
        while not done:
            coordinator = TwoPhaseSinkCoordinator(target.sink(NAME), retry_delays_s=())
            async with running_operator(coordinator, mode="streaming", restored=restored) as world:
                world.input_id = f"day {day}" if named else None
                done = await _application(world, target, numbers, chance, interrupted=interruptions > 0)
                restored = world.checkpoints[-1] if world.checkpoints else restored
            interruptions -= 1
            if done and named and chance.random() < 0.3:  # a scheduler repeats a day that is done
                done = False
        _compare(target.read(), expected, day)


async def _application(
    world: World, target: SinkTarget, numbers: Sequence[int], chance: random.Random, *, interrupted: bool
) -> bool:
    """Run the day in one application. False if its driver dies in the middle, sometimes before any checkpoint."""

    def make() -> TwoPhaseSinkOperator:
        return TwoPhaseSinkOperator(target.sink(NAME))

    tasks = [await world.launch_operator(subtask, make) for subtask in SUBTASKS]
    for place, number in enumerate(numbers):
        for subtask in SUBTASKS:
            tasks[subtask].feed(target.record(subtask, number))
        await world.settle()
        if chance.random() < 0.4:
            await world.checkpoint()
        if interrupted and chance.random() < 0.4:
            return False
        if chance.random() < 0.2:
            victim = chance.choice(SUBTASKS)
            await world.kill(tasks[victim])
            tasks[victim] = await world.launch_operator(victim, make)
            tasks[victim].feed(*(target.record(victim, one) for one in numbers[: place + 1]))
            await world.settle()
    if interrupted:
        return False
    for task in tasks:
        task.end_records()
    await world.advance(1.0)
    assert not world.failures, world.failures[0]
    assert all(task.outcome == "success" for task in tasks), [task.outcome for task in tasks]
    return True


def _compare(found: Sequence[Row], expected: list[Row], day: int) -> None:
    lost, doubled = sorted(set(expected) - set(found)), len(found) - len(set(found))
    assert not lost, f"rows are lost at the end of day {day}: {lost}"
    assert not doubled, f"rows are doubled at the end of day {day}: {sorted(found)}"
    assert set(found) == set(expected), f"there are other rows: {sorted(set(found) - set(expected))}"
