# SPDX-License-Identifier: Apache-2.0

"""The two ends of the exactly-once pipeline and their faults, each with simulated counterparts."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import structlog

from actors.coordination import CoordinatorStore
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
from examples.exactly_once.pipeline import NumberCoordinator, NumberSubtask
from protocol.attempts import FailureKind, FailureReason
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.errors import GatewayFull
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import RestoreMode
from spark_bridge.storage import CheckpointStorage, StorageError

NUMBERS = 10


class Gateway:
    """Records what is sent; refuses when it is full."""

    def __init__(self, subtask: int, attempt: int = 0) -> None:
        self.attempt = ExecutionAttempt("numbers", subtask, attempt, 100 * attempt + subtask)
        self.events: list[Any] = []
        self.full = False

    def send_event_nowait(self, event: Any, *, loss_tolerant: bool = False) -> None:
        if self.full:
            raise GatewayFull("full")
        self.events.append(event)

    @property
    def numbers(self) -> list[int]:
        return [event[1] for event in self.events if event[0] == "number"]


class CoordinatorWorld:
    """A context that keeps the scheduled calls, and the reason for which the job was failed."""

    operator_id = "numbers"
    parallelism = 2
    mode = RestoreMode.STREAMING
    log = structlog.get_logger()
    checkpoints_in_doubt: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.store = CoordinatorStore()
        self.later: list[Callable[[], Awaitable[None]]] = []
        self.failures: list[BaseException] = []

    def call_later(self, delay_s: float, handler: Callable[[], Awaitable[None]]) -> None:
        self.later.append(handler)

    def fail_job(self, cause: BaseException) -> None:
        self.failures.append(cause)

    async def tick(self) -> None:
        handlers, self.later = self.later, []
        for handler in handlers:
            await handler()


class SubtaskWorld:
    """A context of a task: records what is sent, and lets a test act in the middle of it."""

    operator_id = "numbers"
    subtask = 1
    attempt = 0
    checkpoint_id = -1

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


async def a_coordinator(sink: Path, **changed: Any) -> tuple[NumberCoordinator, CoordinatorWorld, list[str]]:
    wrong: list[str] = []
    coordinator = NumberCoordinator(NUMBERS, str(sink), changed.get("on_wrong", wrong.append))
    return coordinator, await a_start_of(coordinator), wrong


async def a_start_of(coordinator: NumberCoordinator) -> CoordinatorWorld:
    world: Any = CoordinatorWorld()
    await coordinator.start(world)
    assert isinstance(world, CoordinatorWorld)
    return world


async def ready(coordinator: NumberCoordinator, subtask: int, attempt: int = 0) -> Gateway:
    gateway: Any = Gateway(subtask, attempt)
    await coordinator.subtask_ready(subtask, gateway)
    assert isinstance(gateway, Gateway)
    return gateway


A_STATE = b'{"0": [9, 9], "1": [0, 0]}\n'
FAILED = FailureReason(FailureKind.FAILED, "it crashed")


# --- the coordinator ----------------------------------------------------------------------------------------------


async def test_one_subtask_goes_back_to_the_cut_and_the_coordinator_with_it(tmp_path: Path) -> None:
    """H13, H18: what was sent to it after the cut is sent again, what it sent will come again; the other continues."""
    coordinator, world, wrong = await a_coordinator(tmp_path)
    gateways = [await ready(coordinator, subtask) for subtask in range(2)]
    await world.tick()
    await coordinator.handle_event_from_operator(0, 0, ["number", 1])
    await coordinator.checkpoint_coordinator(5)
    await world.tick()
    await coordinator.notify_checkpoint_complete(5)
    await coordinator.handle_event_from_operator(0, 0, ["number", 2])
    await world.tick()

    await coordinator.subtask_failed(0, 0, FAILED)
    await coordinator.subtask_reset(0, 5)
    again = await ready(coordinator, 0, attempt=1)
    await coordinator.handle_event_from_operator(0, 1, ["number", 2])
    await world.tick()

    assert gateways[0].numbers == [1, 2, 3]
    assert again.numbers == [2]
    assert gateways[1].numbers == [1, 2, 3, 4]
    assert wrong == []


async def test_a_cut_is_kept_until_a_newer_one_is_complete_whatever_is_given_up_meanwhile(tmp_path: Path) -> None:
    """H18, H45: 5 is complete, 6 was given up; before any of them a reset leads to the beginning."""
    coordinator, world, _ = await a_coordinator(tmp_path)
    await ready(coordinator, 0)
    positions = []
    for checkpoint_id in (5, 6, 7):
        await world.tick()
        await coordinator.checkpoint_coordinator(checkpoint_id)
        if checkpoint_id == 5:
            await coordinator.notify_checkpoint_complete(5)
        if checkpoint_id == 6:
            await coordinator.notify_checkpoint_aborted(6)
    for back_to in (5, -1):
        await coordinator.subtask_failed(0, 0, FAILED)
        await coordinator.subtask_reset(0, back_to)
        gateway = await ready(coordinator, 0, attempt=1)
        await world.tick()
        positions.append(gateway.numbers)

    assert positions == [[2], [1]]


async def test_a_new_coordinator_goes_on_from_the_bytes_of_the_old_one(tmp_path: Path) -> None:
    """H52: restored before start."""
    first, world, _ = await a_coordinator(tmp_path)
    await ready(first, 1)
    await world.tick()
    await first.handle_event_from_operator(1, 0, ["number", 1])
    state = await first.checkpoint_coordinator(8)
    wrong: list[str] = []
    second = NumberCoordinator(NUMBERS, str(tmp_path), wrong.append)

    await second.reset_to_checkpoint(8, state)
    world = await a_start_of(second)
    gateway = await ready(second, 1)
    await world.tick()
    await second.handle_event_from_operator(1, 0, ["number", 2])

    assert (gateway.numbers, wrong) == ([2], [])


async def test_a_number_that_is_not_the_next_one_is_told(tmp_path: Path) -> None:
    """H30: a duplicated and a lost event, and one that a subtask reports."""
    coordinator, _, wrong = await a_coordinator(tmp_path)
    await ready(coordinator, 0)

    for event in (["number", 1], ["number", 1], ["number", 3], ["wrong", "took 5 from the coordinator after 3"]):
        await coordinator.handle_event_from_operator(0, 0, event)

    assert wrong == [
        "the coordinator took 1 from subtask 0 after 1",
        "the coordinator took 3 from subtask 0 after 1",
        "subtask 0 took 5 from the coordinator after 3",
    ]


async def test_a_full_gateway_gets_its_number_later_and_holds_up_nobody(tmp_path: Path) -> None:
    """H27."""
    coordinator, world, _ = await a_coordinator(tmp_path)
    slow, quick = [await ready(coordinator, subtask) for subtask in range(2)]
    slow.full = True
    await world.tick()
    slow.full = False
    for _ in range(NUMBERS + 3):
        await world.tick()

    assert slow.numbers == quick.numbers == list(range(1, NUMBERS + 1))


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
    states.append(operator.final_state())
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


async def a_faulty(sink: Path, *faults: Fault) -> tuple[FaultyCoordinator, CoordinatorWorld, list[str]]:
    struck: list[str] = []
    coordinator = FaultyCoordinator(NUMBERS, str(sink), faults, on_wrong=pytest.fail, on_fault=struck.append)
    return coordinator, await a_start_of(coordinator), struck


async def test_a_fault_is_due_when_its_part_of_the_numbers_has_passed(tmp_path: Path) -> None:
    """H7: and the coordinator continues after it."""
    coordinator, world, struck = await a_faulty(tmp_path, a_fault(COORDINATOR, 0.1))
    for subtask in range(2):
        await ready(coordinator, subtask)
    await world.tick()
    await world.tick()
    assert (coordinator.progress, struck) == (0.1, [])

    with pytest.raises(CoordinatorFault):
        await world.tick()

    assert struck == [COORDINATOR]
    assert len(world.later) == 1


async def test_some_wait_for_the_cut_of_a_checkpoint(tmp_path: Path) -> None:
    """H8, H45: it comes after the cut, by ``fail_job``."""
    fault = a_fault(COORDINATOR, 0.0, in_checkpoint=True, by_exception=False)
    coordinator, world, struck = await a_faulty(tmp_path, fault)
    await world.tick()
    await world.tick()
    assert struck == []

    await coordinator.checkpoint_coordinator(1)
    assert struck == []
    await world.tick()

    assert struck == [COORDINATOR]
    assert isinstance(world.failures[0], CoordinatorFault)


@pytest.mark.parametrize(
    ("kind", "way"), [(TASK, FailureKind.FAILED), (UNRESPONSIVE, FailureKind.CONFIRMATION_TIMEOUT)]
)
async def test_an_attempt_that_fails_for_something_else_leaves_its_fault_to_the_next(
    tmp_path: Path, kind: str, way: FailureKind
) -> None:
    coordinator, world, struck = await a_faulty(tmp_path, a_fault(kind, 0.0))
    await world.tick()  # not ready yet
    first = await ready(coordinator, 0)
    await world.tick()
    await coordinator.subtask_failed(0, 0, FailureReason(FailureKind.GLOBAL_FAILURE, "all of them"))
    await coordinator.reset_to_checkpoint(-1, None)
    second = await ready(coordinator, 0, attempt=1)
    await world.tick()
    assert struck == []

    await coordinator.subtask_failed(0, 1, FailureReason(way, "at last"))

    assert struck == [kind]
    for gateway in (first, second):
        assert ["fault", kind, 0.0] in gateway.events


async def test_one_that_has_almost_ended_is_spared_for_the_last_one(tmp_path: Path) -> None:
    """Otherwise it would end before it could fail."""
    coordinator, world, _ = await a_faulty(tmp_path, a_fault(TASK, 0.4))
    await coordinator.reset_to_checkpoint(3, A_STATE)
    gateways = [await ready(coordinator, subtask) for subtask in range(2)]

    await world.tick()

    assert ["fault", TASK, 0.0] in gateways[1].events
    assert gateways[0].numbers == [10]
