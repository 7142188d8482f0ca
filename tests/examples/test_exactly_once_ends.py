# SPDX-License-Identifier: Apache-2.0

"""The two ends of the exactly-once pipeline and their faults, each with simulated counterparts."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest

from examples.exactly_once.faults import (
    COORDINATOR,
    KINDS,
    TASK,
    UNRESPONSIVE,
    CoordinatorFault,
    Fault,
    FaultyCoordinator,
    plan_faults,
)
from examples.exactly_once.faulty_storage import LOST_ANSWER, OUT_OF_REACH, REFUSED_DELETIONS, FaultyFileSystem
from examples.exactly_once.pipeline import TICK_S, NumberCoordinator, NumberSubtask
from headgate import GatewayLimits
from headgate.testing import Task, running_operator
from protocol.barrier_tracker import CompletedCheckpoint
from spark_bridge.storage import CheckpointStorage, StorageError

NUMBERS = 10


class SubtaskWorld:
    """A context of a task: records what is sent, and lets a test act in the middle of it."""

    operator_id = "numbers"
    subtask = 1
    attempt = 0
    checkpoint_id = -1
    parallelism = 2
    input_begins_again = True

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.before_send: list[Callable[[], None]] = []

    def send_event(self, event: Any) -> None:
        while self.before_send:
            self.before_send.pop()()
        self.events.append(event)

    def wait_for_event(self, timeout_s: float) -> int:
        return 0

    @property
    def numbers(self) -> list[Any]:
        return [event for event in self.events if event[0] in ("number", "wrong")]


# --- the coordinator ----------------------------------------------------------------------------------------------


def coordinated(coordinator: NumberCoordinator, **options: Any) -> AbstractAsyncContextManager[Any]:
    return running_operator(coordinator, parallelism=2, mode="streaming", **options)


def numbers_of(task: Task) -> list[int]:
    """The numbers that the coordinator has sent to this attempt."""
    return [event[1] for event in task.events if event[0] == "number"]


async def test_one_subtask_goes_back_to_the_cut_and_the_coordinator_with_it(tmp_path: Path) -> None:
    """H13, H18: what was sent to it after the cut is sent again, what it sent will come again; the other continues."""
    wrong: list[str] = []
    async with coordinated(NumberCoordinator(NUMBERS, str(tmp_path), wrong.append)) as world:
        first, second = await world.launch_all()
        await world.advance(TICK_S)
        first.send(["number", 1])
        await world.checkpoint()
        await world.advance(TICK_S)
        first.send(["number", 2])
        await world.advance(TICK_S)
        assert numbers_of(first) == [1, 2, 3]

        await world.kill(first)
        again = await world.retry(first)
        again.send(["number", 2])
        await world.advance(TICK_S)
        assert (numbers_of(again), numbers_of(second)) == ([2], [1, 2, 3, 4])
    assert wrong == []


async def test_a_cut_is_kept_until_a_newer_one_is_complete_whatever_is_given_up_meanwhile(tmp_path: Path) -> None:
    """H18, H45: one is complete, the next was given up; before any of them a reset leads to the beginning."""
    async with coordinated(NumberCoordinator(NUMBERS, str(tmp_path), pytest.fail)) as world:
        task, other = await world.launch_all()
        await world.advance(TICK_S)
        await world.kill(task)
        task = await world.retry(task)
        await world.advance(TICK_S)
        assert numbers_of(task) == [1]
        await world.checkpoint()
        await world.advance(TICK_S)
        other.unresponsive = True
        given_up = world.begin_checkpoint()
        await world.settle()
        await world.kill(task)  # before the other one has closed
        assert not given_up.open
        task = await world.retry(task)
        await world.advance(TICK_S)
        assert numbers_of(task) == [2]


async def test_a_new_coordinator_goes_on_from_the_bytes_of_the_old_one(tmp_path: Path) -> None:
    """H52: restored before start."""
    async with coordinated(NumberCoordinator(NUMBERS, str(tmp_path), pytest.fail)) as world:
        _, task = await world.launch_all()
        await world.advance(TICK_S)
        task.send(["number", 1])
        await world.checkpoint()
        checkpoint = world.checkpoints[-1]
    async with coordinated(NumberCoordinator(NUMBERS, str(tmp_path), pytest.fail), restored=checkpoint) as world:
        _, task = await world.launch_all()
        task.send(["number", 2])
        await world.advance(TICK_S)
        assert numbers_of(task) == [2]


async def test_a_number_that_is_not_the_next_one_is_told(tmp_path: Path) -> None:
    """H30: a duplicated and a lost event, and one that a subtask reports."""
    wrong: list[str] = []
    async with coordinated(NumberCoordinator(NUMBERS, str(tmp_path), wrong.append)) as world:
        task, _ = await world.launch_all()
        for event in (["number", 1], ["number", 1], ["number", 3], ["wrong", "took 5 from the coordinator after 3"]):
            task.send(event)
        await world.settle()
    assert wrong == [
        "the coordinator took 1 from subtask 0 after 1",
        "the coordinator took 3 from subtask 0 after 1",
        "subtask 0 took 5 from the coordinator after 3",
    ]


async def test_a_full_gateway_gets_its_number_later_and_holds_up_nobody(tmp_path: Path) -> None:
    """H27."""
    coordinator = NumberCoordinator(NUMBERS, str(tmp_path), pytest.fail)
    async with coordinated(coordinator, gateway=GatewayLimits(events_max=3)) as world:
        tasks = await world.launch_all()
        slow, quick = (tasks[subtask] for subtask in coordinator.context.gateways.ready)  # as they are served
        slow.unresponsive = True
        await world.advance(NUMBERS * TICK_S)
        assert (len(numbers_of(slow)), numbers_of(quick)) == (0, list(range(1, NUMBERS + 1)))
        slow.unresponsive = False
        await world.advance(2 * NUMBERS * TICK_S)
        assert numbers_of(slow) == numbers_of(quick)


# --- the subtask --------------------------------------------------------------------------------------------------


def a_subtask(sink: Path, state: bytes | None = None, numbers: int = 1) -> tuple[NumberSubtask, SubtaskWorld]:
    operator = NumberSubtask(numbers, str(sink))
    world: Any = SubtaskWorld()
    operator.open(world, state)
    assert isinstance(world, SubtaskWorld)
    return operator, world


def test_a_snapshot_in_the_middle_of_a_send_has_neither_the_event_nor_its_count(tmp_path: Path) -> None:
    """H31: the event leaves after the snapshot, and after a restore it is sent as the next one."""
    operator, world = a_subtask(tmp_path)
    operator.handle_event(["number", 1])
    states: list[bytes] = []
    world.before_send.append(lambda: states.append(operator.snapshot_state(3)))

    operator.process(iter(()))
    state = operator.final_state()
    assert isinstance(state, bytes)
    states.append(state)
    operator.close()

    assert [json.loads(state) for state in states] == [[0, 1], [1, 1]]
    assert world.numbers == [["number", 1]]
    restored, its_world = a_subtask(tmp_path, states[0])
    restored.process(iter(()))
    restored.close()
    assert its_world.numbers == [["number", 1]]


def test_a_subtask_that_had_ended_sends_nothing_again(tmp_path: Path) -> None:
    """H47."""
    operator, world = a_subtask(tmp_path, json.dumps([1, 1]).encode())

    operator.process(iter(()))
    operator.close()

    assert world.numbers == []


def test_a_subtask_tells_of_a_number_that_is_not_the_next_one(tmp_path: Path) -> None:
    """H22."""
    operator, world = a_subtask(tmp_path)

    for number in (1, 2, 2):
        operator.handle_event(["number", number])
    operator.close()

    assert world.numbers == [["wrong", "took 2 from the coordinator after 2"]]


# --- the faults ---------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_faults_in_the_order_in_which_they_are_due() -> None:
    plans = [plan_faults(seed, KINDS, 4) for seed in range(200)]

    assert plans == [plan_faults(seed, KINDS, 4) for seed in range(200)]
    assert {tuple(fault.kind for fault in plan) for plan in plans} == set(permutations(KINDS))
    assert all(first.at <= second.at for plan in plans for first, second in pairwise(plan))


@pytest.mark.parametrize("how", [LOST_ANSWER, REFUSED_DELETIONS, OUT_OF_REACH])
def test_a_trouble_of_the_storage_begins_when_a_checkpoint_has_got_its_name(how: str, tmp_path: Path) -> None:  # H64
    struck: list[str] = []
    storage = CheckpointStorage(f"faulty://{tmp_path}")
    storage.prepare()
    storage.store("numbers", CompletedCheckpoint(1, 1, b"", {}))
    FaultyFileSystem.trouble.begin(how, 60.0, lambda: struck.append(how))

    with pytest.raises(StorageError):
        storage.store("numbers", CompletedCheckpoint(2, 1, b"", {}))

    assert struck == [how]
    assert list(tmp_path.rglob("checkpoint-2.hgc")) or how == LOST_ANSWER  # then it was discarded
    FaultyFileSystem.trouble.end()
    storage.store("numbers", CompletedCheckpoint(3, 1, b"", {}))


def a_fault(kind: str, at: float, *, in_checkpoint: bool = False, by_exception: bool = True) -> Fault:
    return Fault(kind, at, 0.0, 0, in_checkpoint, by_exception)


def a_faulty(sink: Path, fault: Fault) -> tuple[FaultyCoordinator, list[str]]:
    struck: list[str] = []
    return FaultyCoordinator(NUMBERS, str(sink), [fault], on_wrong=pytest.fail, on_fault=struck.append), struck


async def test_a_fault_is_due_when_its_part_of_the_numbers_has_passed(tmp_path: Path) -> None:
    """H7."""
    coordinator, struck = a_faulty(tmp_path, a_fault(COORDINATOR, 0.1))
    async with coordinated(coordinator) as world:
        await world.launch_all()
        await world.advance(TICK_S)
        assert (coordinator.progress, struck, world.failures) == (0.05, [], [])
        await world.advance(TICK_S)
        assert struck == [COORDINATOR]
        assert [type(error) for error in world.failures] == [CoordinatorFault]


async def test_some_wait_for_the_cut_of_a_checkpoint(tmp_path: Path) -> None:
    """H8, H45: it comes after the cut, by ``fail_job``."""
    coordinator, struck = a_faulty(tmp_path, a_fault(COORDINATOR, 0.0, in_checkpoint=True, by_exception=False))
    async with coordinated(coordinator) as world:
        await world.launch_all()
        await world.advance(2 * TICK_S)
        assert struck == []
        world.begin_checkpoint()
        await world.advance(TICK_S)
        assert struck == [COORDINATOR]
        assert [type(error) for error in world.failures] == [CoordinatorFault]


@pytest.mark.parametrize("kind", [TASK, UNRESPONSIVE])
async def test_an_attempt_that_fails_for_something_else_leaves_its_fault_to_the_next(tmp_path: Path, kind: str) -> None:
    coordinator, struck = a_faulty(tmp_path, a_fault(kind, 0.0))
    async with coordinated(coordinator) as world:
        await world.advance(TICK_S)  # not ready yet
        first, _ = await world.launch_all()
        await world.advance(TICK_S)
        coordinator.context.fail_job(RuntimeError("all of them"))
        await world.settle()
        second, _ = await world.launch_all()
        await world.advance(TICK_S)
        assert struck == []
        await world.kill(second)
        assert struck == [kind]
        for task in (first, second):
            assert ["fault", kind, 0.0] in task.events


async def test_one_that_has_almost_ended_is_spared_for_the_last_one(tmp_path: Path) -> None:
    """Otherwise it would end before it could fail."""
    coordinator, _ = a_faulty(tmp_path, a_fault(TASK, 0.4))
    state = b'{"0": [9, 9], "1": [0, 0]}\n'
    async with coordinated(coordinator, restored=CompletedCheckpoint(3, 2, state)) as world:
        first, second = await world.launch_all()
        await world.advance(TICK_S)
        assert ["fault", TASK, 0.0] in second.events
        assert numbers_of(first) == [10]
