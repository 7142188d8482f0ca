# SPDX-License-Identifier: Apache-2.0

"""Whole checkpoints, with both ends of every channel (H31, H40 to H43, H47)."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.attempts import AttemptCondemned
from protocol.barrier_tracker import AbortRequested, CompletedCheckpoint
from protocol.ids import ExecutionAttempt
from protocol.wire.codec import decode_event
from protocol.wire.messages import SubtaskState
from tests.actors.coordination.operator_world import (
    RecordingCoordinator,
    World,
    running_operator,
    running_tasks,
    waiting_for,
)


def decoded(checkpoint: CompletedCheckpoint, subtask: int) -> tuple[list[Any], list[Any]]:
    """Return the events that a subtask had handled, and those that its valve held, in a checkpoint."""
    snapshot = checkpoint.subtask_states[subtask]
    (state,) = snapshot.states
    return decode_event(state.state), [decode_event(held.payload) for held in snapshot.held]


async def test_a_request_is_answered_with_the_id_of_the_complete_checkpoint() -> None:  # H4, H40
    async with running_tasks(2) as (world, (one, two)):
        first = await world.checkpoint()
        second = await world.checkpoint()
        assert (first.values, second.values) == ([1], [2])
        assert [checkpoint.checkpoint_id for checkpoint in world.stored] == [1, 2]
        assert world.stored[0].coordinator_state == b"state"
        assert world.coordinator.calls[3:] == [
            ("checkpoint_coordinator", 1),
            ("notify_checkpoint_complete", 1),
            ("checkpoint_coordinator", 2),
            ("notify_checkpoint_complete", 2),
        ]
        for task in (one, two):
            assert task.handled == [("snapshot", 1), ("completed", 1), ("snapshot", 2), ("completed", 2)]
        assert world.statistics.checkpoints_completed == 2


async def test_the_steps_of_a_checkpoint_are_shown_in_their_order_each_once() -> None:
    async with running_tasks(2) as (world, _):
        world.shown.clear()
        await world.checkpoint()
        steps = list(world.shown)
        await world.checkpoint()
    assert world.shown == 2 * steps
    assert steps == [
        "CheckpointTriggered",
        "CloseSubtask",
        "SnapshotCoordinator",
        "CoordinatorSnapshotTaken",
        "StoreCheckpoint",
        "NotifyCheckpointComplete",
    ], "what is done for each subtask is shown once"


async def test_completion_is_announced_only_after_the_checkpoint_is_durable() -> None:  # H40
    written = asyncio.Event()

    async with running_tasks(1) as (world, (task,)):
        world.on_store = waiting_for(written)
        answer = await world.checkpoint()
        assert answer.open
        assert world.coordinator.calls[-1] == ("checkpoint_coordinator", 1)
        assert task.handled == [("snapshot", 1)]
        written.set()
        await world.settle()
        assert answer.values == [1]
        assert task.handled == [("snapshot", 1), ("completed", 1)]


async def test_all_subtasks_close_before_the_coordinator_takes_its_snapshot() -> None:  # H40
    async with running_tasks(2) as (world, (_, slow)):
        slow.unresponsive = True
        await world.checkpoint()
        assert not world.coordinator.calls_of("checkpoint_coordinator")
        slow.unresponsive = False
        await world.settle()
        assert world.coordinator.calls_of("checkpoint_coordinator")


async def test_events_of_a_closed_subtask_are_in_its_snapshot_and_arrive_once_after_it() -> None:  # H31
    async with running_tasks(2) as (world, (task, slow)):
        task.send("before")
        await world.settle()
        slow.unresponsive = True
        await world.checkpoint()
        task.send("held 1")
        task.send("held 2")
        await world.settle()
        assert world.coordinator.events == ["before"]
        slow.unresponsive = False
        await world.settle()
        (checkpoint,) = world.stored
        assert decoded(checkpoint, 0)[1] == ["held 1", "held 2"]
        assert world.coordinator.events == ["before", "held 1", "held 2"]


async def test_held_events_leave_first_after_a_restore() -> None:  # H31, H18
    async with running_tasks(2) as (world, (task, slow)):
        slow.unresponsive = True
        await world.checkpoint()
        task.send("held")
        slow.unresponsive = False
        await world.settle()
        world.fail(task)
        await world.settle()
        world.coordinator.calls.clear()
        restored = world.accept(0)
        restored.opens_immediately = False
        await world.settle()
        assert restored.registered is not None
        assert restored.registered.checkpoint_id == 1
        assert [state.subtask for state in restored.registered.states] == [0]
        restored.open()
        restored.send("new")
        await world.settle()
        assert world.coordinator.events == ["held", "new"]


async def test_events_sent_after_the_cut_wait_for_that_subtasks_acknowledge_and_only_for_that() -> None:  # H41
    async with running_tasks(2) as (world, (quick, slow)):
        slow.busy = True
        await world.checkpoint()
        assert quick.handled == [("snapshot", 1)]
        confirmations = [await world.coordinator.gateways[subtask].send_event("after the cut") for subtask in (0, 1)]
        await world.settle()
        assert quick.events == ["after the cut"]
        assert [confirmation.confirmed() for confirmation in confirmations] == [True, False]
        slow.busy = False
        await world.settle()
        assert slow.handled == [("snapshot", 1), "after the cut", ("completed", 1)]
        assert confirmations[1].confirmed()


async def test_a_subtask_that_has_acknowledged_talks_immediately_although_others_have_not() -> None:  # H41, H31
    async with running_tasks(3, parallelism=3) as (world, (quick, slow, slower)):
        slow.busy = slower.busy = True
        answer = await world.checkpoint()
        for task in (quick, slow, slower):
            task.send(f"up from {task.attempt.subtask}")
            world.coordinator.gateways[task.attempt.subtask].send_event_nowait("down")
        await world.settle()
        assert (quick.events, slow.events, slower.events) == (["down"], [], [])
        assert world.coordinator.events == ["up from 0"]
        slow.busy = False
        await world.settle()
        assert (slow.events, slower.events) == (["down"], [])
        assert world.coordinator.events == ["up from 0", "up from 1"]
        assert answer.open
        slower.busy = False
        await world.settle()
        assert slower.events == ["down"]
        assert world.coordinator.events == ["up from 0", "up from 1", "up from 2"]
        assert answer.values == [1]
        assert world.statistics.events_in_snapshots == 2
        assert world.statistics.events_held == 2


async def test_an_event_of_before_the_cut_that_is_not_confirmed_fails_the_checkpoint() -> None:  # H42, H25
    async def send_and_return(checkpoint_id: int) -> bytes:
        task.unresponsive = True
        await coordinator.gateways[0].send_event("inside")
        return b""

    coordinator = RecordingCoordinator(checkpoint_coordinator=send_and_return)
    async with running_tasks(2, coordinator, confirm_timeout_s=3.0) as (world, (task, other)):
        answer = world.begin_checkpoint()
        await world.advance(4.0)
        assert isinstance(world.reports[0], AttemptCondemned)
        world.fail(task)  # as the ledger does then
        await world.settle()
        assert answer.reason().startswith("checkpoint 1: words[0]#0")
        assert other.handled == [("snapshot", 1), ("aborted", 1)]  # its own barrier waits for no other gateway (H78)


async def test_an_attempt_that_becomes_ready_while_others_close_is_announced_after_the_snapshot() -> None:  # H40
    async with running_tasks(1) as (world, (slow,)):
        slow.unresponsive = True
        world.begin_checkpoint()
        (late,) = await world.running(1)
        late.send("not in the checkpoint")
        await world.settle()
        slow.unresponsive = False
        await world.settle()
        assert [call[0] for call in world.coordinator.calls[2:]] == [
            "checkpoint_coordinator",
            "subtask_ready",
            "handle_event_from_operator",
            "notify_checkpoint_complete",
        ]
        assert 1 not in world.stored[0].subtask_states  # H47: as empty


async def test_a_finished_subtask_takes_part_with_its_final_state() -> None:  # H47
    async with running_tasks(2) as (world, (done, _)):
        done.finish(state=b"final")
        await world.settle()
        world.finish(done)
        answer = await world.checkpoint()
        assert answer.values == [1]
        assert world.stored[0].subtask_states[0].states == (SubtaskState(0, b"final"),)


async def test_a_checkpoint_goes_on_over_a_broken_connection() -> None:  # H24, H40
    async with running_tasks(2) as (world, (task, other)):
        task.busy = True
        answer = await world.checkpoint()
        task.lose_connection()
        await world.settle()
        task.busy = False
        task.send("from between")
        await world.settle()
        task.reconnect(world.connection())
        await world.settle()
        assert answer.values == [1]
        assert world.coordinator.events == ["from between"]
        assert other.handled[-1] == ("completed", 1)


# --- barriers apart -------------------------------------------------------------------------------------------------


async def test_barriers_are_handed_over_and_the_checkpoint_waits_for_them() -> None:  # H23, H40
    handed_over: list[tuple[ExecutionAttempt, int, int]] = []
    async with running_tasks(2, inject_barrier=lambda *args: handed_over.append(args)) as (world, tasks):
        await world.coordinator.gateways[0].send_event("before the cut")
        answer = await world.checkpoint()
        assert sorted(attempt.subtask for attempt, _, _ in handed_over) == [0, 1]
        await world.coordinator.gateways[0].send_event("after the cut")
        await world.settle()
        assert tasks[0].handled == ["before the cut"]
        assert answer.open
        for attempt, checkpoint_id, events_before in handed_over:
            tasks[attempt.subtask].meet_barrier(checkpoint_id, events_before)
        await world.settle()
        assert tasks[0].handled[:2] == ["before the cut", ("snapshot", 1)]
        assert tasks[0].events == ["before the cut", "after the cut"]
        assert answer.values == [1]


async def test_a_barrier_that_cannot_be_sent_aborts_the_checkpoint() -> None:  # H45, H48
    def fail(attempt: ExecutionAttempt, checkpoint_id: int, events_before: int) -> None:
        raise ConnectionError("no micro-batch is running")

    async with running_tasks(1, inject_barrier=fail) as (world, (task,)):
        answer = await world.checkpoint()
        assert "its barrier could not be sent: ConnectionError: no micro-batch is running" in answer.reason()
        assert task.handled == [("aborted", 1)]
        task.send("open again")
        await world.settle()
        assert world.coordinator.events == ["open again"]
        assert not world.failures


# --- several at a time (H43) ----------------------------------------------------------------------------------------


class Disk:
    """A storage whose writes end when the test says so."""

    def __init__(self, world: World) -> None:
        self.writing: dict[int, asyncio.Event] = {}
        self.cancelled: list[int] = []
        world.on_store = self._write

    async def _write(self, checkpoint: Any) -> None:
        written = self.writing[checkpoint.checkpoint_id] = asyncio.Event()
        try:
            await written.wait()
        except asyncio.CancelledError:
            self.cancelled.append(checkpoint.checkpoint_id)
            raise


async def test_a_second_one_goes_its_way_while_the_first_is_written() -> None:  # H43
    async with running_operator(concurrent_max=2) as world:
        disk = Disk(world)
        await world.running(0, 1)
        first, second = world.begin_checkpoint(), world.begin_checkpoint()
        await world.settle()
        assert sorted(disk.writing) == [1, 2]
        disk.writing[1].set()
        await world.settle()
        assert first.values == [1]
        assert second.open
        disk.writing[2].set()
        await world.settle()
        assert second.values == [2]
        assert world.coordinator.calls_of("notify_checkpoint_complete") == [
            ("notify_checkpoint_complete", 1),
            ("notify_checkpoint_complete", 2),
        ]


async def test_a_later_one_that_completes_first_ends_the_lower_one() -> None:  # H43
    async with running_operator(concurrent_max=2, tolerated_failures=0) as world:
        disk = Disk(world)
        (task,) = await world.running(0)
        first, second = world.begin_checkpoint(), world.begin_checkpoint()
        await world.settle()
        disk.writing[2].set()
        await world.settle()
        assert "subsumed" in first.reason()
        assert second.values == [2]
        assert world.coordinator.calls[-3:] == [
            ("notify_checkpoint_aborted", 1),
            ("notify_checkpoint_complete", 2),
            ("notify_checkpoint_discarded", 1),  # H64: it was in doubt until then
        ]
        assert (disk.cancelled, world.discarded) == ([1], [1])
        assert task.handled[-2:] == [("aborted", 1), ("completed", 2)]
        assert not world.failures


async def test_giving_one_up_leaves_the_write_of_the_other_alone() -> None:  # H43, H44
    async with running_operator(concurrent_max=2) as world:
        disk = Disk(world)
        await world.running(0)
        first, second = world.begin_checkpoint(), world.begin_checkpoint()
        await world.settle()
        world.tracker.tell(AbortRequested(2, "by the test"))
        await world.settle()
        assert second.errors
        assert (disk.cancelled, world.discarded) == ([2], [2])
        disk.writing[1].set()
        await world.settle()
        assert first.values == [1]
        assert [checkpoint.checkpoint_id for checkpoint in world.stored] == [1]
