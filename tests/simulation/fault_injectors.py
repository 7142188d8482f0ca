# SPDX-License-Identifier: Apache-2.0

"""Faults that can strike a world's connections, tasks, executors and driver, as often as its settings allow."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from tests.simulation import accidents
from tests.simulation.application import JUMP_S
from tests.simulation.network import Connection
from tests.simulation.process import Life, Process
from tests.simulation.troubles import Trap

if TYPE_CHECKING:
    from tests.simulation.world import World

DRIVERS_MAX = 4
LONGEST_CUT_S = 4.0
"""Longer than a task may take to come back, so that some cuts are survived and some are not."""


FaultInjector = Callable[["World"], None]


def some_of(all_of_them: list[FaultInjector], random: Random) -> list[FaultInjector]:
    """Choose the injectors: half of the worlds get all of them, the others only a few, and these more often.

    The consequences of one kind show only if another kind does not interfere.
    """
    if random.random() < 0.5:
        return all_of_them
    left = list(all_of_them)
    return [left.pop(random.randrange(len(left))) for _ in range(random.randint(1, min(4, len(left))))]


def strike(world: World) -> None:
    """Before each step, continue the faults under way, and perhaps inject another."""
    random, faults = world.random, world.faults
    if world.drivers < DRIVERS_MAX and random.random() < faults.lose_driver:
        if world.successor is None and random.random() < 0.3:
            world.take_over()
        else:
            world.lose_driver()
    if world.driver.monitor.in_doubt and faults.spend(random, world.grudge):
        strike_in_doubt(world)
    world.now += world.engine.pending.rest()
    world.engine.pending.catch_up(world.now)
    for connection in world.connections:
        connection.arrive(world.now)
    for process in world.living:
        if process.troubles.becoming_unresponsive and process.life is Life.RUNNING and process.awaits_events():
            stop_responding(world, process)
    if world.calm:
        return
    if faults.spend(random, faults.break_connection):
        random.choice(world.cuts)(world)
    if world.engine.active and faults.spend(random, faults.crash):
        random.choice(world.fault_injectors)(world)


def strike_in_doubt(world: World) -> None:
    """Fail the job or kill the driver while an aborted checkpoint is in doubt: a restart may or may not find it."""
    if world.random.random() < 0.5:
        world.figures.happen("the coordinator fails the job, in doubt")
        world.driver.fail_job("in doubt")
    elif world.drivers < DRIVERS_MAX and world.successor is None and world.random.random() < 0.5:
        world.take_over()
    elif world.drivers < DRIVERS_MAX:
        world.figures.happen("the driver dies, in doubt")
        world.lose_driver()


# --- the network ---


def whole_connections(world: World) -> list[Connection]:
    return [c for c in world.connections if not (c.task_gone or c.server_gone or c.broken)]


def break_a_connection(world: World) -> None:
    if whole := whole_connections(world):
        connection = world.random.choice(whole)
        world.befall(
            "connection breaks", f"connection {connection.connection_id} of task {connection.task_attempt_id} breaks"
        )
        connection.break_now(world.random)


def half_break_a_connection(world: World) -> None:
    """Break a connection so that one end notices much later than the other."""
    if whole := whole_connections(world):
        connection, random = world.random.choice(whole), world.random
        name = f"connection {connection.connection_id} of task {connection.task_attempt_id}"
        later = world.now + random.uniform(0.0, LONGEST_CUT_S)
        if random.random() < 0.5:
            world.befall("half-open: the task knows later", f"{name} breaks, and the task finds out at {later:.4f}")
            connection.break_now(random, task_sees_at=later)
        else:
            world.befall("half-open: the server knows later", f"{name} breaks, and the server finds out at {later:.4f}")
            connection.break_now(random, server_sees_at=later)


def cut_off(world: World) -> None:
    """Cut off the network between an executor and the driver for a while, also for tasks that it starts later."""
    executors = sorted({process.task.executor_id for process in world.living if process.life is not Life.GONE})
    if not executors:
        return
    executor, until = world.random.choice(executors), world.now + world.random.uniform(0.0, LONGEST_CUT_S)
    world.befall("network cut", f"{executor} is cut off until {until:.4f}")
    for process in world.living:
        if process.task.executor_id == executor and process.life is not Life.GONE:
            process.cut_off(until)


CUTS: list[FaultInjector] = [
    break_a_connection,
    break_a_connection,
    half_break_a_connection,
    cut_off,
]


# --- tasks ---


def victims(world: World, *lives: Life) -> list[Process]:
    """Return the processes of the running jobs in one of these lives, or in any if none is given."""
    return [
        process
        for process in world.living
        if process.life is not Life.GONE and not process.hung and (not lives or process.life in lives)
    ]


def crash(world: World) -> None:
    if those := victims(world):
        process = world.random.choice(those)
        world.befall(
            "crash before it registers" if process.life is Life.NEW else "crash", f"task {process.tid} crashes"
        )
        process.exit("the process crashed")


def hang(world: World) -> None:
    """Make a task unresponsive. Only a missing confirmation can show it, so an event must be waiting for one."""
    if those := [process for process in victims(world, Life.RUNNING) if process.awaits_events()]:
        stop_responding(world, world.random.choice(those))


def stop_responding(world: World, process: Process) -> None:
    world.befall("unresponsive", f"task {process.tid} stops responding")
    process.troubles.unresponsive, process.troubles.becoming_unresponsive = True, False


def freeze(world: World) -> None:
    """Freeze a process. It later goes on as if nothing had happened, even if it was given up meanwhile."""
    if those := victims(world):
        process = world.random.choice(those)
        process.troubles.frozen_until = world.now + world.random.uniform(0.0, LONGEST_CUT_S)
        world.befall("frozen", f"task {process.tid} stands still until {process.troubles.frozen_until:.4f}")


def stall(world: World) -> None:
    """Keep the operator busy inside a method, while the I/O thread confirms."""
    if those := victims(world, Life.RESTORING, Life.RUNNING):
        process = world.random.choice(those)
        process.troubles.stalled_until = world.now + world.random.uniform(0.0, 8.0)
        world.befall(
            "slow to open" if process.life is Life.RESTORING else "stalled",
            f"the operator of task {process.tid} is busy until {process.troubles.stalled_until:.4f}",
        )


def set_trap(world: World) -> None:
    """Make the operator raise in a method that is not running now."""
    if those := victims(world, Life.REGISTERING, Life.RESTORING, Life.RUNNING):
        process, trap = world.random.choice(those), world.random.choice(list(Trap))
        world.tell(f"the operator of task {process.tid} will raise in {trap.value}")
        process.troubles.trap = trap


def raise_in_operator(world: World) -> None:
    if those := victims(world, Life.RESTORING, Life.RUNNING):
        process = world.random.choice(those)
        world.befall("operator raises in process", f"the operator of task {process.tid} raises")
        process.fail()


def register_twice(world: World) -> None:
    if those := victims(world, Life.REGISTERING, Life.RESTORING, Life.RUNNING):
        process = world.random.choice(those)
        world.befall("registers twice", f"task {process.tid} registers once more")
        process.register_again()


def claim(world: World) -> None:
    """Let a hostile task claim to be an attempt of another one's subtask, which Spark does not confirm (H75)."""
    if those := victims(world, Life.RESTORING, Life.RUNNING):
        process = world.random.choice(those)
        world.tell(f"a hostile task claims the subtask of task {process.tid}")
        world.figures.happen("forged claim")
        world.forge(process)


# --- the engine and its users ---


def lull(world: World) -> None:
    world.now += world.random.uniform(0.0, JUMP_S)


def upset(world: World) -> None:
    """Let the coordinator fail the job, abort a checkpoint on request, or cancel a call that waits for one."""
    if world.random.random() < 0.5:
        world.befall("the coordinator fails the job", "the coordinator fails the job")
        world.driver.fail_job("fail_job")
    elif world.random.random() < 0.5:
        world.figures.happen("a checkpoint is given up")
        world.driver.abort_checkpoint("never mind")
    else:
        world.figures.happen("a request for a checkpoint is cancelled")
        world.driver.give_up_request()


def cancel(world: World) -> None:
    world.befall("the user cancels", "the user cancels what runs")
    world.engine.cancel(tuple(job.job_id for job in world.engine.active_jobs()), "by the user")


def start_rival(world: World) -> None:
    """Start a second action over the same operator while one runs (H55). It may get its turn after the first ends."""
    engine = world.engine
    if engine.rival is None and engine.job is not None and engine.job.active:
        world.befall("two jobs at a time", "the user starts a second job as well")
        world.targets[engine.rival_stage_id] = world.targets[engine.stage_id]
        engine.start_rival()


def lose_executor(world: World) -> None:
    world.tell("an executor is lost")
    accidents.lose_executor(world.engine)


def fail_fetch(world: World) -> None:
    accidents.fail_fetch(world.engine)


def fail_fetch_downstream(world: World) -> None:
    accidents.fail_fetch_downstream(world.engine)


def copy(world: World) -> None:
    """Let Spark copy a slow task: sometimes one that stops responding but is not given up yet (H25).

    Its copy may be slow, too, so that both exist when the first is given up.
    """
    random, engine = world.random, world.engine
    if engine.copies and random.random() < 0.5 and (those := victims(world, Life.REGISTERING, Life.RUNNING)):
        random.choice(those).troubles.becoming_unresponsive = True
    before = len(world.living)
    unresponsive = {
        p.task.partition for p in world.living if p.troubles.unresponsive or p.troubles.becoming_unresponsive
    }
    accidents.copy_a_task(engine, unresponsive)
    for process in world.living[before:]:
        process.troubles.stalled_until = world.now + random.choice([0.0, random.uniform(0.0, 8.0)])


FAULT_INJECTORS: list[FaultInjector] = [
    lull,
    stall,
    freeze,
    upset,
    copy,
    copy,
    hang,
    set_trap,
    set_trap,
    raise_in_operator,
    crash,
    crash,
    crash,
    fail_fetch,
    fail_fetch,
    fail_fetch_downstream,
    lose_executor,
    lose_executor,
    register_twice,
    claim,
    claim,
    cancel,
    start_rival,
]
"""The injectors; some are more likely than others."""
