# SPDX-License-Identifier: Apache-2.0

"""The third hunter: seeded histories of actions over one operator, and the rules for each (H56, H68).

The simulation's coordinator resets itself. This hunter covers coordinators that do not, and sources whose output the
engine keeps in part. The actors are real, the tasks exist in memory, and the seed decides the history.
"""

from __future__ import annotations

import asyncio
import random

from actors.coordination import ResetNotSupported, SourceCoordinator, StaticSplitEnumerator, SubtaskGateway
from actors.coordination.host.given import built_anew_or_kept
from actors.coordination.interface import OperatorCoordinator
from protocol.attempts import FailureKind
from protocol.facts import StageLook
from protocol.wire.messages import RestoreMode
from tests.actors.coordination.operator_world import World, running_operator
from tests.actors.coordination.reader import ReaderTask
from tests.simulation.checkers import demand

SPLITS = list(range(9))
SUBTASKS = 3
RUNS = 4


class Remembering(OperatorCoordinator):
    """Remembers the run of its first attempt, and accepts attempts of that run only."""

    def __init__(self) -> None:
        self.run: int | None = None

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        number = gateway.attempt.attempt  # each subtask has one attempt in each run
        self.run = number if self.run is None else self.run
        demand(self.run == number, f"H68: run {number} meets the coordinator of run {self.run}")


def check_history(seed: int) -> None:
    """Run one history; raise the violation that it finds."""
    asyncio.run(_check_history(seed))


async def _check_history(seed: int) -> None:
    dice = random.Random(seed)
    await _built_anew(seed)
    await _refused(seed)
    await _read_once(seed, dice)


async def _next_run(world: World, look: StageLook | None = None) -> None:
    world.end_run()
    world.look = look or StageLook()
    world.reset("a new run")
    await world.settle()


async def _built_anew(seed: int) -> None:
    async with running_operator(built_anew_or_kept(Remembering), mode=RestoreMode.BATCH, seed=seed) as world:
        for _ in range(RUNS):
            await world.running(0, 1)
            demand(not world.failures, f"H68: {world.failures}")
            await _next_run(world)


async def _refused(seed: int) -> None:
    async with running_operator(built_anew_or_kept(Remembering()), mode=RestoreMode.BATCH, seed=seed) as world:
        await world.running(0, 1)
        demand(not world.failures, "H68: the first run is disturbed")
        await _next_run(world)
        refused = [failure for failure in world.failures if isinstance(failure, ResetNotSupported)]
        demand(len(refused) == 1, "H68: a second run sees the state of the first")


async def _read_once(seed: int, dice: random.Random) -> None:
    """Check actions over a cached RDD: kept and recomputed output together contain every split once."""
    built: list[StaticSplitEnumerator] = []

    def build(state: bytes | None) -> StaticSplitEnumerator:
        built.append(StaticSplitEnumerator(SPLITS, state))
        return built[-1]

    source = SourceCoordinator(build)
    async with running_operator(source, parallelism=SUBTASKS, mode=RestoreMode.BATCH, seed=seed) as world:
        world.task_type = ReaderTask
        everything = frozenset(range(SUBTASKS))
        cache, kept = 0, dict[int, list[int]]()  # the number of the RDD
        for _ in range(RUNS):
            lost = dice.sample(range(SUBTASKS), dice.randint(1, SUBTASKS))
            if not kept or len(lost) == SUBTASKS or dice.random() < 0.3:
                cache, kept, lost = cache + 1, {}, list(everything)  # another RDD
            outputs = frozenset({cache})
            world.look = StageLook(everything, SUBTASKS, outputs, outputs if kept else frozenset())
            rows = await _run(world, dice, lost)
            kept = {**kept, **rows}
            demand(len(built) == cache, f"H68: {len(built)} enumerations of {cache} outputs")
            read = sorted(split for splits in kept.values() for split in splits)
            demand(read == SPLITS, f"H56: the partitions of one action hold {read}")
            world.end_run()
            world.reset("a new run")
            await world.settle()


async def _run(world: World, dice: random.Random, subtasks: list[int]) -> dict[int, list[int]]:
    tasks = {task.attempt.subtask: task for task in await world.running(*subtasks) if isinstance(task, ReaderTask)}
    for _ in range(500):
        subtask = dice.choice(subtasks)
        task = tasks[subtask]
        task.step()
        await world.settle()
        if not task.is_over and task.done and dice.random() < 0.02:
            world.fail(task, FailureKind.FAILED)
            await world.settle()
            (again,) = await world.running(subtask)
            assert isinstance(again, ReaderTask)
            tasks[subtask] = again
        if all(task.is_over for task in tasks.values()):
            break
    demand(all(task.is_over for task in tasks.values()), f"H68: an action hangs {world.failures}")
    for task in tasks.values():
        world.finish(task)
    await world.settle()
    return {subtask: task.done for subtask, task in tasks.items()}
