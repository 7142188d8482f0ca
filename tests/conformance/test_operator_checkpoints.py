# SPDX-License-Identifier: Apache-2.0

"""S8 to S24: one operator's checkpoints, with the real tracker, coordinator and gateway actors and tasks in memory.

Flink's coordinator completes a future; here ``checkpoint_coordinator`` returns, and its return is the cut (H40).
Sending and the cut cannot race: both happen in the coordinator's own order (H5).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import anyio.lowlevel
import pytest

from protocol.attempts import AttemptCondemned, FailureKind, GlobalFailureRaised
from protocol.subtask.types import MailboxEvent
from protocol.wire.codec import decode_event
from tests.actors.coordination.executor import Task
from tests.actors.coordination.operator_world import RecordingCoordinator, World, running_operator
from tests.conformance.harness import SlowSnapshot, abort, acknowledge, cut, send

ONLY_HOLDING = frozenset(
    {
        "test_events_wait_after_the_snapshot",
        "test_a_checkpoint_after_an_aborted_one_keeps_the_order_of_events",
        "test_a_checkpoint_waits_for_the_confirmations_of_events",
        "test_each_subtask_reopens_on_its_own",
    }
)
"""What only holds if events wait for checkpoints. Everything else must hold in both modes (H79)."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    both = (True,) if metafunc.function.__name__ in ONLY_HOLDING else (True, False)
    metafunc.parametrize("hold_events", both, ids=lambda holds: "holding" if holds else "recording", indirect=True)


@pytest.fixture(autouse=True)
def hold_events(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODE, "hold_events", request.param)


MODE: dict[str, Any] = {}


@asynccontextmanager
async def holder(coordinator: RecordingCoordinator, **settings: Any) -> AsyncIterator[tuple[World, list[Task]]]:
    """Three running subtasks. No scenario may end in a global failure."""
    async with running_operator(coordinator, parallelism=3, **MODE, **settings) as world:
        yield world, await world.running(0, 1, 2)
        assert world.reported(GlobalFailureRaised) == []


def received(task: Task) -> list[Any]:
    """Return the events in the task's mailbox, including those that it has taken out."""
    return task.events + [decode_event(item.payload) for item in task.mailbox if isinstance(item, MailboxEvent)]


async def test_a_checkpoint_waits_for_the_coordinators_snapshot() -> None:
    """S8, S9 (R41, R45; H40, H46): its bytes are the checkpoint."""
    snapshot = SlowSnapshot()
    async with holder(RecordingCoordinator(checkpoint_coordinator=snapshot)) as (world, _):
        answer = await cut(world)
        assert snapshot.begun == [1]
        assert answer.open
        snapshot.complete(1, bytes([11, 22, 33, 44]))
        await world.settle()
        assert answer.values == [1]
        assert [checkpoint.coordinator_state for checkpoint in world.stored] == [bytes([11, 22, 33, 44])]


async def test_events_sent_before_the_snapshot_is_finished_pass_through() -> None:
    """S10 (R42; H41)."""
    snapshot = SlowSnapshot()
    coordinator = RecordingCoordinator()

    async def send_and_take(checkpoint_id: int) -> bytes:
        await coordinator.gateways[1].send_event("e1")
        return await snapshot(checkpoint_id)

    coordinator.methods["checkpoint_coordinator"] = send_and_take
    async with holder(coordinator) as (world, tasks):
        answer = await cut(world)
        assert received(tasks[1]) == ["e1"], "while the coordinator is still at its snapshot"
        snapshot.complete(1)
        await world.settle()
        assert answer.values == [1]
        assert tasks[1].handled == ["e1", ("snapshot", 1), ("completed", 1)]


async def test_events_wait_after_the_snapshot() -> None:
    """S11 (R43, R44; H41)."""
    coordinator = RecordingCoordinator()
    async with holder(coordinator) as (world, tasks):
        await cut(world, *tasks)
        await send(world, coordinator, 0, 1337)
        assert received(tasks[0]) == []


async def test_an_abort_releases_waiting_events() -> None:
    """S12 (R48; H44). The abort names its checkpoint."""
    coordinator = RecordingCoordinator()
    async with holder(coordinator) as (world, tasks):
        await cut(world, *tasks)
        await send(world, coordinator, 0, 1337)
        await abort(world, 1)
        assert received(tasks[0]) == [1337]


async def test_an_acknowledgement_releases_waiting_events_and_is_not_an_event_of_the_coordinators() -> None:
    """S13 (R51; H41)."""
    coordinator = RecordingCoordinator()
    async with holder(coordinator) as (world, tasks):
        await cut(world, *tasks)
        await send(world, coordinator, 0, 1337)
        await acknowledge(world, tasks[0])
        assert tasks[0].handled == [("snapshot", 1), 1337]
        assert coordinator.events == []


async def test_a_restore_brings_open_gateways() -> None:
    """S14 (R52; H15, H20)."""
    coordinator = RecordingCoordinator()
    async with holder(coordinator) as (world, tasks):
        await cut(world, *tasks)
        for task in tasks:
            world.fail(task, FailureKind.GLOBAL_FAILURE, reset=False)
        world.reset()
        _, task, _ = await world.running(0, 1, 2)
        await send(world, coordinator, 1, 999)
        assert received(task) == [999]
        assert [received(old) for old in tasks] == [[], [], []]


async def test_the_late_snapshot_of_an_aborted_checkpoint_blocks_no_events() -> None:
    """S15 (R53; H44). The next snapshot begins when the late one has returned (H5)."""
    snapshot = SlowSnapshot()
    coordinator = RecordingCoordinator(checkpoint_coordinator=snapshot)
    async with holder(coordinator) as (world, tasks):
        late = await cut(world)
        await abort(world, 1)
        after = await cut(world, *tasks)
        snapshot.complete(1)
        await world.settle()
        snapshot.complete(2)
        await world.settle()
        await acknowledge(world, tasks[0])
        await send(world, coordinator, 0, 123)
        assert [received(task) for task in tasks] == [[123], [], []]
        assert "by the test" in late.reason()
        assert after.open
        assert world.stored == []


async def test_checkpoints_one_after_the_other_keep_the_order_of_events() -> None:
    """S16 (R48; H22, H41)."""
    coordinator = RecordingCoordinator()
    async with holder(coordinator) as (world, tasks):
        await send(world, coordinator, 0, "e0")
        for number in (1, 2):
            await cut(world, *tasks)
            await send(world, coordinator, 0, f"e{2 * number - 1}")
            for task in tasks:
                await acknowledge(world, task)
            await send(world, coordinator, 0, f"e{2 * number}")
        assert received(tasks[0]) == ["e0", "e1", "e2", "e3", "e4"]
        assert [checkpoint.checkpoint_id for checkpoint in world.stored] == [1, 2]


async def test_a_checkpoint_after_an_aborted_one_keeps_the_order_of_events() -> None:
    """S17 (R48; H22, H44)."""
    coordinator = RecordingCoordinator()
    async with holder(coordinator) as (world, tasks):
        await send(world, coordinator, 0, "e0")
        await cut(world, *tasks)
        await send(world, coordinator, 0, "e1")
        await abort(world, 1)
        await send(world, coordinator, 0, "e2")
        await cut(world)
        await send(world, coordinator, 0, "e3")
        assert received(tasks[0]) == ["e0", "e1", "e2"], "the second checkpoint holds it"
        await acknowledge(world, tasks[0])
        assert received(tasks[0]) == ["e0", "e1", "e2", "e3"]


async def test_a_job_that_is_failed_again_and_again_fails_once_until_the_reset() -> None:
    """S18 (R15; H7, H8)."""
    coordinator = RecordingCoordinator()

    async def fail(subtask: int, attempt: int, event: Any) -> None:
        coordinator.context.fail_job(f"because of {event}")

    coordinator.methods["handle_event_from_operator"] = fail
    async with running_operator(coordinator, parallelism=3) as world:
        tasks = await world.running(0, 1, 2)

        async def failures_after(task: Task, event: str) -> list[str]:
            task.send(event)
            await world.settle()
            return [failure.cause for failure in world.reported(GlobalFailureRaised)]

        first = await failures_after(tasks[0], "one")
        assert len(first) == 1
        assert await failures_after(tasks[1], "two") == first
        for task in tasks:
            world.fail(task, FailureKind.GLOBAL_FAILURE, reset=False)
        world.reset()
        tasks = await world.running(0, 1, 2)
        assert tasks[1].attempt.attempt == 1
        _, second = await failures_after(tasks[1], "three")
        assert "because of one" in first[0]
        assert "because of three" in second


async def test_a_checkpoint_waits_for_the_confirmations_of_events() -> None:
    """S19 (R45; H42)."""
    coordinator = RecordingCoordinator()
    async with holder(coordinator) as (world, tasks):
        tasks[0].unresponsive = True
        await send(world, coordinator, 0, "e0")
        answer = await cut(world)
        assert answer.open
        assert not any(("snapshot", 1) in task.handled for task in tasks), "no barrier before the confirmation"
        tasks[0].unresponsive = False
        await world.settle()
        assert answer.values == [1]
        assert tasks[0].handled[:2] == ["e0", ("snapshot", 1)]


class Counting(RecordingCoordinator):
    """Sends 0, 1, 2, ... to subtasks; its state is how many it has sent."""

    def __init__(self, *subtasks: int) -> None:
        super().__init__()
        self.sent = 0
        self.subtasks = subtasks

    async def step(self) -> None:
        for subtask in self.subtasks:
            await self.gateways[subtask].send_event(self.sent)
        self.sent += 1

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.context.call_soon_threadsafe(self.step)


def check_the_cut(world: World, coordinator: Counting, tasks: list[Task], sent: int) -> None:
    """Check that each subtask's snapshot has exactly the events that the coordinator counts; the rest came later."""
    (checkpoint,) = world.stored
    cut_at = int(checkpoint.coordinator_state)
    for subtask in coordinator.subtasks:
        handled = tasks[subtask].handled
        assert handled[: handled.index(("snapshot", 1))] == list(range(cut_at))
        assert tasks[subtask].events == list(range(sent))


@pytest.mark.parametrize("seed", range(20))
async def test_a_snapshot_that_returns_immediately_parts_the_events_sharply(seed: int) -> None:
    """S20 (R44, R6; H5, H40, H41). The order in which actors take their turns follows from the seed."""
    dice = Random(seed)
    before, after = dice.randrange(10), dice.randrange(10)
    coordinator = Counting(0)

    async def take(checkpoint_id: int) -> bytes:
        coordinator.steps(1)  # leaves immediately after the cut
        return str(coordinator.sent).encode()

    coordinator.methods["checkpoint_coordinator"] = take
    async with holder(coordinator, seed=seed) as (world, tasks):
        coordinator.steps(before)
        world.begin_checkpoint()
        coordinator.steps(after)
        await world.settle()
        check_the_cut(world, coordinator, tasks, before + 1 + after)


@pytest.mark.parametrize("seed", range(20))
async def test_what_is_sent_while_the_snapshot_takes_its_time_is_before_the_cut(seed: int) -> None:
    """S21 (R44, R42; H40, H41)."""
    dice = Random(seed)
    before, within, after = dice.randrange(5), dice.randrange(5), dice.randrange(5)
    coordinator = Counting(0, 1, 2)

    async def take(checkpoint_id: int) -> bytes:
        for _ in range(within):
            await anyio.lowlevel.checkpoint()
            await coordinator.step()
        return str(coordinator.sent).encode()

    coordinator.methods["checkpoint_coordinator"] = take
    async with holder(coordinator, seed=seed) as (world, tasks):
        coordinator.steps(before)
        world.begin_checkpoint()
        coordinator.steps(after)
        await world.settle()
        check_the_cut(world, coordinator, tasks, before + within + after)


async def test_an_event_that_fails_after_the_trigger_fails_the_checkpoint() -> None:
    """S22 (R45; H25, H42). The checkpoint waits for the confirmation, whose failure fails the attempt."""
    coordinator = RecordingCoordinator()
    async with holder(coordinator) as (world, tasks):
        tasks[0].unresponsive = True
        await send(world, coordinator, 0, "e0")
        answer = await cut(world)
        await world.advance(world.config.gateway.confirm_timeout_s)
        (condemned,) = world.reported(AttemptCondemned)
        assert condemned.task_attempt_id == tasks[0].attempt.task_attempt_id
        world.fail(tasks[0], FailureKind.CONFIRMATION_TIMEOUT)
        await world.settle()
        assert str(tasks[0].attempt) in answer.reason()


async def test_an_event_that_failed_before_the_trigger_fails_the_checkpoint_once_its_attempt_is_failed() -> None:
    """S23 (R26; H25, H42). Between the event's failure and the failover no checkpoint slips through."""
    coordinator = RecordingCoordinator()
    async with holder(coordinator) as (world, tasks):
        tasks[0].unresponsive = True
        confirmation = await coordinator.gateways[0].send_event("e0")
        await world.advance(world.config.gateway.confirm_timeout_s)
        assert confirmation.error() is not None
        answer = await cut(world)
        assert answer.open, "nobody has failed the attempt so far"
        assert coordinator.calls_of("subtask_failed") == []
        world.fail(tasks[0], FailureKind.CONFIRMATION_TIMEOUT)
        await world.settle()
        assert str(tasks[0].attempt) in answer.reason()
        assert world.stored == []


async def test_each_subtask_reopens_on_its_own() -> None:
    """S24 (R48, R51; H41)."""
    coordinator = RecordingCoordinator()
    async with holder(coordinator) as (world, tasks):
        await cut(world, *tasks)
        await send(world, coordinator, 0, "e0")
        await send(world, coordinator, 1, "e1")
        await acknowledge(world, tasks[1])
        assert (received(tasks[0]), received(tasks[1])) == ([], ["e1"])
        await acknowledge(world, tasks[0])
        assert (received(tasks[0]), received(tasks[1])) == (["e0"], ["e1"])
