# SPDX-License-Identifier: Apache-2.0

"""Random failure histories: the successful attempts always read each split exactly once (H56)."""

from __future__ import annotations

import random

import pytest

from actors.coordination import SourceCoordinator, StaticSplitEnumerator
from protocol.attempts import FailureKind
from protocol.wire.messages import RestoreMode
from tests.actors.coordination.operator_world import World, running_operator
from tests.actors.coordination.reader import ReaderTask

SPLITS = list(range(17))
PARALLELISM = 3


class History:
    """Spark's actions on the subtasks of one source, all driven by one seed."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.world = world
        self.dice = dice
        self.living: dict[int, list[ReaderTask]] = {subtask: [] for subtask in range(PARALLELISM)}
        self.succeeded: dict[int, ReaderTask] = {}
        self.believed: dict[int, list[int]] = {}  # batch: a success's splits that others may have read, until the reset
        self.events = [self.read] * 12 + [self.fail] * 2 + [self.lose, self.take_checkpoint, self.speculate]

    async def live(self, steps: int) -> None:
        for _ in range(steps):
            self.keep_running()
            self.dice.choice(self.events)()
            for _ in range(self.dice.randrange(6)):
                await self.world.kit.step()
            self.see_who_is_over()
            if self.dice.random() < 0.01:
                self.fail_over()

    async def end(self) -> None:
        """Let every subtask finish without further failures."""
        for _ in range(200):
            self.keep_running()
            for attempts in self.living.values():
                for task in attempts:
                    task.step()
            await self.world.settle()
            self.see_who_is_over()
        assert len(self.succeeded) == PARALLELISM

    def keep_running(self) -> None:
        for subtask, attempts in self.living.items():
            if not attempts and subtask not in self.succeeded:
                self.start(subtask)

    def start(self, subtask: int) -> None:
        task = self.world.accept(subtask)
        assert isinstance(task, ReaderTask)
        self.living[subtask].append(task)

    def any_living(self) -> ReaderTask | None:
        living = [task for attempts in self.living.values() for task in attempts]
        return self.dice.choice(living) if living else None

    def read(self) -> None:
        task = self.any_living()
        if task is not None:
            task.read()
            task.step()

    def fail(self) -> None:
        task = self.any_living()
        if task is not None:
            self.living[task.attempt.subtask].remove(task)
            self.world.fail(task, FailureKind.FAILED, reset=not self.living[task.attempt.subtask])

    def lose(self) -> None:
        if self.succeeded:
            self.revoke(self.dice.choice(sorted(self.succeeded)))

    def revoke(self, subtask: int) -> None:
        if subtask in self.succeeded:
            self.world.fail(self.succeeded.pop(subtask), FailureKind.REVOKED)

    def speculate(self) -> None:
        task = self.any_living()
        if task is not None and len(self.living[task.attempt.subtask]) == 1:
            self.start(task.attempt.subtask)

    def take_checkpoint(self) -> None:
        self.world.begin_checkpoint()

    def fail_over(self) -> None:
        for attempts in self.living.values():
            for task in attempts:
                self.world.fail(task, FailureKind.GLOBAL_FAILURE, reset=False)
            attempts.clear()
        self.succeeded.clear()
        self.believed.clear()
        self.world.reset()

    def see_who_is_over(self) -> None:
        for subtask, attempts in self.living.items():
            winner = next((task for task in attempts if task.is_over), None)
            if winner is None:
                continue
            self.world.finish(winner)
            for task in attempts:
                if task is not winner:
                    self.world.fail(task, FailureKind.SUPERSEDED, reset=False)
            attempts.clear()
            self.succeeded[subtask] = winner
            if self.world.config.mode is RestoreMode.BATCH:
                believed = self.believed.setdefault(subtask, list(winner.done))
                assert winner.done == believed, "H56: a recomputed partition is not the one that was lost"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("mode", RestoreMode)
async def test_each_split_is_read_once_by_the_attempts_that_succeed(mode: RestoreMode, seed: int) -> None:  # H56
    dice = random.Random(f"{mode.name} {seed}")
    batch_size = 1 + seed % 3
    coordinator = SourceCoordinator(lambda state: StaticSplitEnumerator(SPLITS, state, batch_size=batch_size))
    async with running_operator(coordinator, parallelism=PARALLELISM, mode=mode, seed=seed) as world:
        world.task_type = ReaderTask
        history = History(world, dice)
        await history.live(100)
        await history.end()
        for subtask in range(PARALLELISM - seed % 2):  # Spark loses its output, and computes it again
            history.revoke(subtask)
        await history.live(60)
        await history.end()
        read = [split for task in history.succeeded.values() for split in task.done]
        assert sorted(read) == SPLITS, f"seed {seed}, {mode.name}"
        assert not world.failures
