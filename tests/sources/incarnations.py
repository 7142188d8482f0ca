# SPDX-License-Identifier: Apache-2.0

"""Applications one after the other, each from the last checkpoint of the one before it, while tasks are killed."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from headgate import CheckpointConfig
from headgate.testing import World, running_operator
from headgate.types import Chain
from protocol.barrier_tracker import CompletedCheckpoint


def incarnation_of(
    stages: Chain, chance: random.Random, restored: CompletedCheckpoint | None, seed: int
) -> AbstractAsyncContextManager[World]:
    """Return an application that continues from ``restored``, with any parallelism, and tolerates every death."""
    return running_operator(
        stages,
        parallelism=chance.choice([1, 2, 3]),
        mode="streaming",
        checkpoint=CheckpointConfig(interval_s=0.4, tolerated_failures=1000),
        restored=restored,
        attempts_max=1000,
        seed=seed,
    )


async def run_until_the_end(
    stages: Callable[[], Chain], chance: random.Random, seed: int, *, incarnations: int
) -> None:
    """Run a bounded chain with another parallelism each time; in the last incarnation nothing is killed."""
    restored: CompletedCheckpoint | None = None
    for incarnation in range(incarnations):
        last = incarnation == incarnations - 1
        async with incarnation_of(stages(), chance, restored, seed) as world:
            world.input_id = "all of it"
            tasks = [await world.launch_operator(subtask) for subtask in range(world.parallelism)]
            for _ in range(100 if last else chance.randrange(1, 5)):
                await world.advance(0.7)
                running = [task for task in tasks if not task.outcome]
                if running and not last:
                    victim = chance.choice(running)
                    await world.kill(victim)
                    tasks.append(await world.retry(victim))
            await world.advance(1.0)
            assert not world.failures
            restored = world.checkpoints[-1] if world.checkpoints else restored
            if not [task for task in tasks if not task.outcome]:
                break
