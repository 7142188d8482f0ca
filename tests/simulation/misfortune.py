"""What can befall a world: connections, tasks, executors and the driver, in the measure of its faults."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from tests.simulation.driver import Driver
from tests.simulation.engine import Engine, Faults
from tests.simulation.network import Connection
from tests.simulation.process import Life, Process

DRIVERS_MAX = 4


class UnluckyWorld(Protocol):
    """What misfortune may touch."""

    random: Random
    now: float
    faults: Faults
    engine: Engine
    driver: Driver
    drivers: int
    living: list[Process]
    connections: list[Connection]

    @property
    def calm(self) -> bool: ...
    def tell(self, line: str) -> None: ...
    def lose_driver(self) -> None: ...


def strike(world: UnluckyWorld) -> None:
    """Before each step: perhaps something goes wrong."""
    random, faults = world.random, world.faults
    if world.drivers < DRIVERS_MAX and random.random() < faults.lose_driver:
        world.lose_driver()
    if world.calm:
        return
    if faults.spend(random, faults.break_connection):
        break_a_connection(world)
    if world.engine.active and faults.spend(random, faults.crash):
        random.choice(MISFORTUNES)(world)


def break_a_connection(world: UnluckyWorld) -> None:
    whole = [c for c in world.connections if not c.task_gone and not c.server_gone]
    if whole:
        connection = world.random.choice(whole)
        world.tell(f"connection {connection.connection_id} of task {connection.task_attempt_id} breaks")
        connection.break_now(world.random)


def victims(world: UnluckyWorld) -> list[Process]:
    return [process for process in world.living if process.life is not Life.GONE and not process.hung]


def crash(world: UnluckyWorld) -> None:
    if those := victims(world):
        process = world.random.choice(those)
        world.tell(f"task {process.tid} crashes")
        process.exit("the process crashed")


def hang(world: UnluckyWorld) -> None:
    """Deaf: only a missing confirmation can show it, so there must be one to miss."""
    if those := [process for process in victims(world) if process.life is Life.RUNNING and process.awaits_events()]:
        process = world.random.choice(those)
        world.tell(f"task {process.tid} goes deaf")
        process.hung = True


def raise_in_operator(world: UnluckyWorld) -> None:
    if those := [process for process in victims(world) if process.life in (Life.RESTORING, Life.RUNNING)]:
        process = world.random.choice(those)
        world.tell(f"the operator of task {process.tid} raises")
        process.fail()


def lose_executor(world: UnluckyWorld) -> None:
    world.tell("an executor is lost")
    world.engine.lose_executor()


def copy(world: UnluckyWorld) -> None:
    if world.engine.copies:
        world.engine.copy_one()


def lull(world: UnluckyWorld) -> None:
    world.now += world.random.uniform(0.0, 2.5)


def upset(world: UnluckyWorld) -> None:
    """The coordinator fails the job, or somebody gives a checkpoint up."""
    if world.random.random() < 0.5:
        world.tell("the coordinator fails the job")
        world.driver.fail_job("fail_job")
    else:
        world.driver.abort_checkpoint("never mind")


MISFORTUNES: list[Callable[[UnluckyWorld], None]] = [
    crash,
    crash,
    hang,
    raise_in_operator,
    lose_executor,
    copy,
    lull,
    upset,
]
