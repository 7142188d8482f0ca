# SPDX-License-Identifier: Apache-2.0

"""Whole checkpoints that hold no events, with both ends of every channel (H79)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.coordination.engine.reply import Reply
from protocol.wire.codec import decode_event
from protocol.wire.messages import HeldEvent, SubtaskState
from tests.actors.coordination.executor import Task
from tests.actors.coordination.operator_world import (
    RecordingCoordinator,
    World,
    running_operator,
    running_tasks,
    waiting_for,
)
from tests.actors.coordination.test_checkpoints import decoded


@asynccontextmanager
async def unheld(
    count: int, coordinator: RecordingCoordinator | None = None, **config: Any
) -> AsyncIterator[tuple[World, list[Task]]]:
    async with running_tasks(count, coordinator, hold_events=False, **config) as running:
        yield running


def answering(answer: Any) -> Any:
    async def handle_request(subtask: int, attempt: int, request: Any) -> Any:
        return answer

    return handle_request


async def test_no_event_waits_for_a_checkpoint_in_either_direction() -> None:
    async with unheld(2) as (world, (quick, slow)):
        slow.busy = True
        answer = await world.checkpoint()
        for task in (quick, slow):
            task.send(f"up from {task.attempt.subtask}")
            world.coordinator.gateways[task.attempt.subtask].send_event_nowait("down")
        await world.settle()
        assert sorted(world.coordinator.events) == ["up from 0", "up from 1"]
        assert world.statistics.events_confirmed == 2
        assert world.statistics.events_held == 0
        assert answer.open
        slow.busy = False
        await world.settle()
        assert slow.handled == [("snapshot", 1), "down", ("completed", 1)]
        assert decoded(world.stored[0], 0)[1] == []
        assert decoded(world.stored[0], 1)[1] == ["up from 1"]
        assert world.stored[0].subtask_states[1].events_sent == ()
        assert world.statistics.events_in_snapshots == 1


async def test_only_the_subtask_that_is_reset_sends_what_was_recorded_again() -> None:
    async with unheld(2) as (world, (one, two)):
        one.busy = two.busy = True
        await world.checkpoint()
        one.send("recorded 0")
        two.send("recorded 1")
        await world.settle()
        one.busy = two.busy = False
        await world.settle()
        assert sorted(world.coordinator.events) == ["recorded 0", "recorded 1"]
        world.fail(one)
        await world.settle()
        assert ("subtask_reset", 0, 1) in world.coordinator.calls
        world.coordinator.calls.clear()
        restored = world.accept(0)
        await world.settle()
        restored.send("new")
        await world.settle()
        assert world.coordinator.events == ["recorded 0", "new"]


async def test_positions_go_on_over_what_is_sent_again() -> None:  # H32
    positions = []

    async def note_position(subtask: int, attempt: int, event: Any) -> None:
        positions.append((event, coordinator.context.events_taken(subtask)))

    coordinator = RecordingCoordinator(handle_event_from_operator=note_position)
    async with unheld(1, coordinator) as (world, (task,)):
        task.send("before")
        await world.settle()
        task.busy = True
        await world.checkpoint()
        task.send("recorded")
        await world.settle()
        task.busy = False
        await world.settle()
        world.fail(task)
        await world.settle()
        world.accept(0)
        await world.settle()
    assert positions == [("before", 1), ("recorded", 2), ("recorded", 2)]


async def test_an_event_that_is_recorded_twice_keeps_its_first_sender() -> None:  # H52
    held = HeldEvent(3, b"\xa1r")
    async with unheld(1) as (world, (task,)):
        assert task.registered is not None
        task.busy = True
        await world.checkpoint()
        task.send("own")
        await world.settle()
        task.busy = False
        await world.settle()
        (checkpoint,) = world.stored
        assert [event.sender for event in checkpoint.subtask_states[0].held] == [0]
    parts = checkpoint.subtask_states[0]
    rescaled = {0: type(parts)((SubtaskState(0, b"\x90"),), (held,), ())}
    restored = type(checkpoint)(checkpoint.checkpoint_id, 2, b"state", rescaled)
    async with running_operator(hold_events=False, restored=restored) as world:
        task = world.accept(0)
        task.busy = True
        task.opens_immediately = False
        await world.settle()
        task.open()
        begun = world.begin_checkpoint()
        await world.settle()
        task.busy = False
        await world.settle()
        assert begun.values
        assert world.coordinator.events == ["r"]


async def test_a_checkpoint_is_not_complete_before_the_coordinator_has_what_came_before_the_snapshots() -> None:
    """Completed at the acknowledgements, the tail of the stream would be missing."""
    gate = asyncio.Event()
    coordinator = RecordingCoordinator()
    async with unheld(1, coordinator) as (world, (task,)):
        task.busy = True
        answer = await world.checkpoint()
        coordinator.methods["handle_event_from_operator"] = waiting_for(gate)
        task.send("first")
        task.send("tail")
        task.busy = False
        await world.settle()
        assert task.handled == [("snapshot", 1)]
        assert answer.open
        assert world.stored == []
        gate.set()
        await world.settle()
        assert answer.values == [1]
        assert decoded(world.stored[0], 0)[1] == ["first", "tail"]


async def test_without_a_record_no_checkpoint_completes_and_none_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """H32: the counts are the net under everything else."""
    monkeypatch.setattr("actors.coordination.engine.coordinator.TakenEvents.record", lambda self, checkpoint_id: None)
    async with unheld(1) as (world, (task,)):
        task.busy = True
        answer = await world.checkpoint()
        task.send("lost to the record")
        await world.settle()
        task.busy = False
        await world.settle()
        assert "had taken 0 at the cut and recorded 0" in answer.reason()
        assert world.stored == []


async def test_an_attempt_that_becomes_ready_during_the_snapshot_is_announced_behind_it() -> None:
    gate = asyncio.Event()
    async with unheld(1, RecordingCoordinator(checkpoint_coordinator=snapshot_at(gate))) as (world, _):
        answer = world.begin_checkpoint()
        await world.settle()
        (late,) = await world.running(1)
        late.send("not in the checkpoint")
        gate.set()
        await world.settle()
        assert answer.values == [1]
        assert world.stored[0].subtask_states.keys() == {0}
        order = [call[0] for call in world.coordinator.calls]
        assert order.index("checkpoint_coordinator") < len(order) - 1 - order[::-1].index("subtask_ready")


def snapshot_at(gate: asyncio.Event) -> Any:
    async def snapshot(checkpoint_id: int) -> bytes:
        await gate.wait()
        return b"state"

    return snapshot


async def test_a_deferred_answer_that_is_given_after_the_cut_comes_behind_the_barrier() -> None:  # H33
    reply = Reply()
    async with unheld(1, RecordingCoordinator(handle_request=answering(reply))) as (world, (task,)):
        task.ask("?")
        await world.settle()
        task.busy = True
        await world.checkpoint()
        reply.answer("late")
        await world.settle()
        assert task.answers == {}
        task.busy = False
        await world.settle()
        assert list(task.answers.values()) == ["late"]
        assert decoded(world.stored[0], 0)[1] == []  # it was taken before the cut


async def test_a_request_that_is_taken_after_the_cut_is_recorded_as_a_request() -> None:  # H73
    async with unheld(1, RecordingCoordinator(handle_request=answering("answer"))) as (world, (task,)):
        task.busy = True
        await world.checkpoint()
        task.ask("?")
        await world.settle()
        assert task.answers == {}
        task.busy = False
        await world.settle()
        assert list(task.answers.values()) == ["answer"]
        (held,) = world.stored[0].subtask_states[0].held
        assert held.is_request
        assert decode_event(held.payload) == "?"


@pytest.mark.parametrize("immediately", [1, 16])
@pytest.mark.parametrize("hold_events", [True, False], ids=["holding", "recording"])
async def test_an_event_after_the_cut_is_behind_it_though_its_gateway_is_told_late(
    hold_events: bool, immediately: int
) -> None:  # H41
    """The loop does not work through all gateways in one turn, so the last ones learn of the cut a little later."""
    handed_over: list[Any] = []

    async def send_to_all(checkpoint_id: int) -> bytes:
        handed_over.extend(gateway.send_event_nowait("before") for gateway in coordinator.context.gateways)
        coordinator.context.call_soon_threadsafe(send_later)
        return b"state"

    async def send_later() -> None:
        handed_over.extend(gateway.send_event_nowait("after") for gateway in coordinator.context.gateways)

    coordinator = RecordingCoordinator(checkpoint_coordinator=send_to_all)
    config: dict[str, Any] = {"hold_events": hold_events, "gateways_per_turn": immediately, "parallelism": 5}
    async with running_tasks(5, coordinator, **config) as (world, tasks):
        answer = await world.checkpoint()
        await world.settle()
        assert answer.values == [1]
        for task in tasks:
            assert task.handled[:3] == ["before", ("snapshot", 1), "after"]
        assert all(confirmation.confirmed() for confirmation in handed_over)
        assert [decoded(world.stored[0], subtask)[0] for subtask in range(5)] == [["before"]] * 5


async def test_an_operator_that_floods_its_coordinator_completes_checkpoints_and_loses_nothing() -> None:
    """The record is bounded: what exceeds it waits for the snapshot, and is held in the checkpoint."""
    async with unheld(1, upward_events_max=4) as (world, (task,)):
        task.busy = True
        answer = await world.checkpoint()
        sent = 0
        for _ in range(6):
            while task.machine.statistics().unconfirmed_events < 4:
                task.send(sent)
                sent += 1
            await world.settle()
        assert sent == 8
        assert world.coordinator.events == [0, 1, 2, 3]
        assert world.statistics.events_received == 4
        task.busy = False
        await world.settle()
        assert answer.values == [1]
        assert world.coordinator.events == list(range(8))
        assert decoded(world.stored[0], 0)[1] == list(range(8))


async def test_a_savepoint_holds_nothing_either() -> None:  # H49
    async with unheld(1) as (world, (task,)):
        task.busy = True
        answer = await world.checkpoint("savepoints")
        task.send("recorded")
        await world.settle()
        assert world.coordinator.events == ["recorded"]
        task.busy = False
        await world.settle()
        assert answer.values == [1]
        ((_, checkpoint),) = world.savepoints
        assert decoded(checkpoint, 0)[1] == ["recorded"]
