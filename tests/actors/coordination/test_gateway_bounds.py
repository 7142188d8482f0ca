# SPDX-License-Identifier: Apache-2.0

"""The limits of events in flight to one attempt, and the senders that wait for capacity (H27)."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from protocol.errors import GatewayFull
from tests.actors.coordination.one_that_waits import OneThatWaits
from tests.actors.coordination.operator_world import RecordingCoordinator, running_tasks


async def test_at_the_bound_a_sender_waits_and_nowait_is_refused() -> None:  # H27
    async with running_tasks(1, events_max=2) as (world, (task,)):
        task.unresponsive = True
        gateway = world.coordinator.gateways[0]
        await gateway.send_event(1)
        await gateway.send_event(2)
        assert (gateway.events_pending, gateway.bytes_pending) == (2, 2)
        with pytest.raises(GatewayFull, match="2 events"):
            gateway.send_event_nowait("refused")
        async with anyio.create_task_group() as tasks:
            third, fourth = OneThatWaits(tasks, gateway, 3), OneThatWaits(tasks, gateway, 4)
            await world.settle()
            assert third.waits()
            task.unresponsive = False
            task.read()
            task.unresponsive = True
            await world.settle()  # one confirmation for two events has freed the capacity of two
            assert not third.waits()
            assert not fourth.waits()
            task.unresponsive = False
            await world.settle()
        assert task.events == [1, 2, 3, 4]
        assert (gateway.events_pending, gateway.bytes_pending) == (0, 0)


async def test_the_bound_holds_for_bytes_too_but_a_large_event_passes_alone() -> None:  # H27
    async with running_tasks(1, bytes_max=100) as (world, (task,)):
        task.unresponsive = True
        gateway = world.coordinator.gateways[0]
        await gateway.send_event(b"x" * 500)
        with pytest.raises(GatewayFull):
            gateway.send_event_nowait(b"y")
        task.unresponsive = False
        await world.settle()
        await gateway.send_event(b"y")
        await world.settle()
        assert task.events == [b"x" * 500, b"y"]


async def test_events_held_by_a_checkpoint_count_against_the_bound() -> None:  # H27, G11
    async with running_tasks(1, events_max=2) as (world, (task,)):
        task.busy = True
        await world.checkpoint()
        gateway = world.coordinator.gateways[0]
        gateway.send_event_nowait(1)
        gateway.send_event_nowait(2)
        await world.settle()
        assert world.statistics.events_held == 2
        with pytest.raises(GatewayFull, match="2 events"):
            gateway.send_event_nowait("refused")
        task.busy = False
        await world.settle()
        assert task.events == [1, 2]
        assert gateway.events_pending == 0


async def test_no_event_overtakes_one_that_waits_for_capacity() -> None:  # H22, H27
    async with running_tasks(1, bytes_max=100) as (world, (task,)):
        task.unresponsive = True
        gateway = world.coordinator.gateways[0]
        await gateway.send_event("first")
        async with anyio.create_task_group() as tasks:
            OneThatWaits(tasks, gateway, "x" * 98)
            await world.settle()
            with pytest.raises(GatewayFull):
                gateway.send_event_nowait("small")
            task.unresponsive = False
            await world.settle()
        assert task.events == ["first", "x" * 98]


async def test_one_that_is_cancelled_while_it_waits_sends_nothing_and_the_others_go_on() -> None:  # H27
    async with running_tasks(1, events_max=1) as (world, (task,)):
        task.unresponsive = True
        gateway = world.coordinator.gateways[0]
        await gateway.send_event("first")
        async with anyio.create_task_group() as tasks:
            cancelled, patient = OneThatWaits(tasks, gateway, "cancelled"), OneThatWaits(tasks, gateway, "patient")
            await world.settle()
            cancelled.scope.cancel()
            await world.settle()
            assert patient.waits()
            task.unresponsive = False
            await world.settle()
        assert cancelled.confirmation is None
        assert task.events == ["first", "patient"]
        assert gateway.events_pending == 0


async def test_one_that_is_cancelled_in_the_moment_of_its_turn_passes_it_on() -> None:  # H27
    async with running_tasks(1, events_max=1) as (world, (task,)):
        task.unresponsive = True
        gateway = world.coordinator.gateways[0]
        first = await gateway.send_event("first")
        async with asyncio.TaskGroup() as native, anyio.create_task_group() as tasks:
            cancelled = native.create_task(gateway.send_event("cancelled"))
            await world.settle()
            patient = OneThatWaits(tasks, gateway, "patient")
            await world.settle()
            first.add_done_callback(lambda _: cancelled.cancel())  # there is capacity, but it has not yet taken it
            task.unresponsive = False
            await world.settle()
        assert cancelled.cancelled()
        assert patient.confirmation is not None
        assert patient.confirmation.confirmed()
        assert task.events == ["first", "patient"]


async def test_answers_take_no_capacity_from_events() -> None:  # H27, H33
    async def answer(subtask: int, attempt: int, request: Any) -> Any:
        return "yes"

    coordinator = RecordingCoordinator(handle_request=answer)
    async with running_tasks(1, coordinator, events_max=2) as (world, (task,)):
        for _ in range(3):
            task.ask("may I?")
        task.unresponsive = True
        await world.settle()
        sent = [await coordinator.gateways[0].send_event(number) for number in range(2)]
        await world.settle()
        task.unresponsive = False
        await world.settle()
        assert all(confirmation.confirmed() for confirmation in sent)
        assert list(task.answers.values()) == ["yes"] * 3
