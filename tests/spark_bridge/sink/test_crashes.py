"""Exactly once through crashes at every moment: the model of ``world`` driven through all of them, and at random."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.spark_bridge.sink.kit import BreakingFileSystem, new_url
from tests.spark_bridge.sink.world import World


@pytest.fixture(autouse=True)
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of short works on files: handing each to a thread takes ten times as long as doing it."""

    async def run_here(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    monkeypatch.setattr("spark_bridge.sink.committer.run_sync", run_here)


Step = Callable[[World], Awaitable[None] | None]

SCRIPT: list[Step] = [
    lambda world: world.write(0),
    lambda world: world.write(1),
    lambda world: world.write(0),
    lambda world: world.cut(),  # 1 completes
    lambda world: world.snapshot(0),
    lambda world: world.write(0),
    lambda world: world.snapshot(1),
    lambda world: world.deliver(0),
    lambda world: world.store(),
    lambda world: world.notify(),
    lambda world: world.deliver(1),  # the list comes behind the completion
    lambda world: world.write(1),
    lambda world: world.cut(),  # 2 is aborted when one of two has sealed for it
    lambda world: world.snapshot(0),
    lambda world: world.abort(),
    lambda world: world.write(0),
    lambda world: world.cut(0),  # 3 completes; at its cut the list of 2 is still held
    lambda world: world.snapshot(0),
    lambda world: world.snapshot(1),
    lambda world: world.store(),
    lambda world: world.deliver(1),
    lambda world: world.notify(),
    lambda world: world.deliver(0),
    lambda world: world.write(0),
    lambda world: world.write(0),
    lambda world: world.cut(),  # 4 completes
    lambda world: world.write(0),
    lambda world: world.finish(0),  # its last part is sealed for no checkpoint, and its list is held by 4
    lambda world: world.write(1),
    lambda world: world.snapshot(1),
    lambda world: world.snapshot(0),
    lambda world: world.store(),
    lambda world: world.notify(),
    lambda world: world.deliver(0),
    lambda world: world.finish(0),
    lambda world: world.write(1),
    lambda world: world.cut(),  # 5 completes
    lambda world: world.snapshot(1),
    lambda world: world.store(),
    lambda world: world.notify(),
]

TROUBLES: dict[str, Step] = {
    "nothing": lambda world: None,
    "the first subtask fails": lambda world: world.fail(0),
    "the second subtask fails": lambda world: world.fail(1),
    "the first subtask fails, and a completion is told before": lambda world: world.fail(0, told_first=True),
    "the second subtask fails, and a completion is told before": lambda world: world.fail(1, told_first=True),
    "the job fails": lambda world: world.fail_job(),
    "the driver dies": lambda world: world.boot(),
}


class Crash(Exception):
    """The process that did this is no more."""


async def take(world: World, step: Step) -> None:
    done = step(world)
    if done is not None:
        await done
    world.check()


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_trouble_between_any_two_steps_neither_loses_nor_doubles_a_row(trouble: str) -> None:
    """H18, H31, H47: with the driver dying right behind it, and with a reader who takes everything away."""
    for moment in range(len(SCRIPT) + 1):
        for then in (TROUBLES["nothing"], TROUBLES["the driver dies"], World.read):
            world = World(new_url())
            await world.boot()
            for step in [*SCRIPT[:moment], then, TROUBLES[trouble], then, *SCRIPT[moment:]]:
                await take(world, step)
            await world.end()
            world.check_end()


async def run_until_operation(number: int) -> tuple[World, str]:
    """Run the script on a filesystem that breaks at its change ``number``; returns what it was, "" for none."""
    world = World(new_url())
    seen: list[str] = []

    def count(what: str, path: str) -> None:
        seen.append(what)
        if len(seen) == number:
            raise Crash(what)

    BreakingFileSystem.on_operation = count
    try:
        await world.boot()
        for step in SCRIPT:
            await take(world, step)
        await world.end()
    except Crash as crash:
        return world, str(crash)
    finally:
        BreakingFileSystem.on_operation = None
    return world, ""


async def test_a_crash_at_any_change_of_the_filesystem_neither_loses_nor_doubles_a_row() -> None:
    """Between the copy and the removal too, where publishing is not one step; the whole application starts again."""
    kinds = set()
    number = 0
    while True:
        number += 1
        world, broken_at = await run_until_operation(number)
        if not broken_at:
            break
        kinds.add(broken_at)
        await world.boot()
        world.check()
        for step in SCRIPT:
            await take(world, step)
        await world.end()
        world.check_end()
    world.check_end()  # the run without a crash
    assert kinds >= {"before create", "after create", "before copy", "after copy", "before remove", "after remove"}


def a_step(dice: random.Random, subtasks: int) -> Step:
    subtask, which = dice.randrange(subtasks), dice.randrange(2)
    most, told_first = dice.choice([0, 1, 100]), dice.choice([True, False])
    steps: list[tuple[int, Step]] = [
        (30, lambda world: world.write(subtask)),
        (12, lambda world: world.deliver(subtask, most)),
        (10, lambda world: world.cut(most)),
        (25, lambda world: world.snapshot(subtask)),
        (10, lambda world: world.store()),
        (10, lambda world: world.notify()),
        (4, lambda world: world.abort()),
        (6, lambda world: world.finish(subtask)),
        (3, lambda world: world.fail(subtask, told_first=told_first)),
        (3, lambda world: world.copy(subtask)),
        (4, lambda world: world.lose_copy(subtask, which)),
        (1, lambda world: world.fail_job()),
        (2, lambda world: world.boot()),
        (2, lambda world: world.read()),
    ]
    (step,) = dice.choices([step for _, step in steps], [weight for weight, _ in steps])
    return step


@pytest.mark.parametrize("seed", range(60))
async def test_no_order_of_steps_and_troubles_loses_or_doubles_a_row(seed: int) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    subtasks = dice.choice([1, 2, 3])
    world = World(new_url(), subtasks=subtasks, rows=dice.choice([3, 12]))
    await world.boot()
    for _ in range(dice.choice([40, 150])):
        await take(world, a_step(dice, subtasks))
    await world.end()
    world.check_end()
