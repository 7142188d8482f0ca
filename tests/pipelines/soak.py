# SPDX-License-Identifier: Apache-2.0

"""Pipelines between real servers, in Headgate's real machines around a simulated Spark, while everything dies.

A run is one pair of a source and a sink, and one seed. Tasks, drivers and servers die at random. At the end every row
of the source must be in the target once, and nothing may be left prepared.
"""

from __future__ import annotations

import random
import tempfile

from headgate import chain
from protocol.barrier_tracker import CompletedCheckpoint
from tests.pipelines.pairs import Outcome, Pair, Servers, drop_slot, insert, prepare
from tests.sources.incarnations import incarnation_of

__all__ = ["soak_once"]


async def soak_once(servers: Servers, source: str, sink: str, seed: int) -> Outcome:
    """Run one pair once, and return what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(source, sink, folder, servers.postgres.conninfo, servers.redis.url)
        return await _soak(servers, pair, random.Random(f"{source} {sink} {seed}"), seed)


async def _soak(servers: Servers, pair: Pair, chance: random.Random, seed: int) -> Outcome:
    faults = Outcome()
    restored: CompletedCheckpoint | None = None
    late = prepare(servers, pair, late=True)
    deaths = chance.randrange(1, 4)
    while True:
        last = faults["driver"] >= deaths
        if last:
            insert(servers, late)
            late.clear()
        stages = chain(source=pair.source(ends=last), transform=pair.transform, sink=pair.sink())
        async with incarnation_of(stages, chance, restored, seed) as world:
            world.input_id = "soak"
            tasks = {subtask: await world.launch_operator(subtask) for subtask in range(world.parallelism)}
            steps = 500 if last else chance.randrange(3, 12)
            for step in range(steps):
                await world.advance(0.4)
                if late:
                    insert(servers, late[:12])
                    del late[:12]
                if world.failures or all(task.outcome == "success" for task in tasks.values()):
                    break
                if step < 12 and chance.random() < 0.3:
                    victim = chance.choice([*tasks.values()])
                    if not victim.outcome:
                        faults["task"] += 1
                        await world.kill(victim)
                if step < 12 and chance.random() < 0.12:
                    server = servers.postgres if chance.random() < 0.5 else servers.redis
                    faults["server"] += 1
                    server.kill()
                    server.start()
                for subtask, task in tasks.items():
                    if task.outcome in ("failed", "killed"):
                        tasks[subtask] = await world.retry(task)
            done = all(task.outcome == "success" for task in tasks.values()) and not world.failures
            if done:
                await world.advance(1.0)
                done = not world.failures
            restored = world.checkpoints[-1] if world.checkpoints else restored
        if done:
            break
        faults["driver"] += 1
        if faults["driver"] > 50:
            break
    outcome = pair.judge(servers)
    outcome.update(faults)
    drop_slot(servers, pair)
    return outcome
