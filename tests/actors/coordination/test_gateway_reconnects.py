# SPDX-License-Identifier: Apache-2.0

"""A gateway and its connections (H24, H62)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from actors.coordination.engine.messages import ConnectionClosed, MessagesArrived
from protocol.attempts import AttemptCondemned, ConnectionExpired
from protocol.errors import AttemptOver
from protocol.wire.codec import encode_event
from protocol.wire.event_classes import event
from protocol.wire.messages import EventMessage
from tests.actors.coordination.operator_world import RecordingCoordinator, running_tasks


async def test_a_broken_connection_loses_and_doubles_nothing() -> None:  # H24, H22, H30
    async with running_tasks(1) as (world, (task,)):
        gateway = world.coordinator.gateways[0]
        sent = []
        for number in range(12):
            sent.append(await gateway.send_event(number))
            task.send(number)
            if number % 4 == 1:
                await world.settle()
            if number % 4 == 3:
                task.lose_connection()
                await world.kit.run_until_idle()
                sent.append(await gateway.send_event(f"while away {number}"))
                task.send(f"while away {number}")
                task.reconnect(world.connection())
        await world.settle()
        expected: list[Any] = []
        for number in range(12):
            expected += [number, f"while away {number}"] if number % 4 == 3 else [number]
        assert task.events == expected
        assert world.coordinator.events == expected
        assert all(confirmation.confirmed() for confirmation in sent)
        assert not world.reports


async def test_an_attempt_that_does_not_come_back_in_time_is_reported() -> None:  # H24
    async with running_tasks(1, reconnect_timeout_s=5.0) as (world, (task,)):
        confirmation = await world.coordinator.gateways[0].send_event("on the way")
        task.unresponsive = True
        await world.settle()
        task.lose_connection()
        await world.advance(4.9)
        assert not world.reports
        await world.advance(0.2)
        assert world.reports == [ConnectionExpired("words", task.attempt.task_attempt_id)]
        assert isinstance(confirmation.error(), AttemptOver)


async def test_a_second_connection_replaces_the_first() -> None:  # H24
    async with running_tasks(1) as (world, (task,)):
        old = task.connection
        assert old is not None
        task.reconnect(world.connection())
        await world.settle()
        assert old.closed
        await world.coordinator.gateways[0].send_event("on the new one")
        await world.settle()
        assert task.events == ["on the new one"]


async def test_what_a_replaced_connection_brings_is_dropped_and_its_end_means_nothing() -> None:  # H3, H24
    async with running_tasks(1, reconnect_timeout_s=5.0) as (world, (task,)):
        assert task.connection is not None
        old_id = task.connection.connection_id
        task.reconnect(world.connection())
        await world.settle()
        stray = EventMessage(task.attempt.task_attempt_id, 2, encode_event("stray"))
        task.gateway_ref.tell(MessagesArrived(old_id, [stray]))
        task.gateway_ref.tell(ConnectionClosed(old_id, "at last"))
        await world.advance(10.0)
        assert world.coordinator.events == []
        assert world.statistics.messages_dropped == 1
        assert not world.reports
        await world.coordinator.gateways[0].send_event("still connected")
        await world.settle()
        assert task.events == ["still connected"]


async def test_a_peer_that_breaks_the_protocol_loses_only_its_own_connection() -> None:  # H24, H62
    async with running_tasks(2) as (world, (bad, good)):
        assert bad.connection is not None
        bad.gateway_ref.tell(
            MessagesArrived(bad.connection.connection_id, [EventMessage(bad.attempt.task_attempt_id, 99, b"\xc0")])
        )
        await world.settle()
        assert bad.connection.closed
        good.send("fine")
        await world.settle()
        assert world.coordinator.events == ["fine"]
        assert world.coordinator.calls_of("subtask_suspected") == [("subtask_suspected", 0, 0)]
        assert not world.failures


async def test_an_unreadable_event_condemns_its_attempt_only() -> None:  # H62
    async with running_tasks(2) as (world, (bad, good)):
        assert bad.connection is not None
        bad.gateway_ref.tell(  # 0xc1 is not valid msgpack; item 1 was Opened
            MessagesArrived(bad.connection.connection_id, [EventMessage(bad.attempt.task_attempt_id, 2, b"\xc1")])
        )
        good.send("fine")
        await world.settle()
        (condemned,) = world.reports
        assert isinstance(condemned, AttemptCondemned)
        assert condemned.task_attempt_id == bad.attempt.task_attempt_id
        assert world.coordinator.events == ["fine"]


_raised: list[BaseException] = []


@event
@dataclass(frozen=True)
class OnlyInTasks:
    """Cannot be built where ``_raised`` has an error: at the driver, in an ordinary program."""

    number: int

    def __post_init__(self) -> None:
        if _raised:
            raise _raised[0]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("n must be even")], ids=repr)
@pytest.mark.parametrize("size", [0, 20_000])
async def test_whatever_a_class_raises_when_its_event_arrives_condemns_the_attempt_and_not_the_operator(
    error: BaseException, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # H62, H97
    async with running_tasks(2) as (world, (bad, good)):
        bad.send([OnlyInTasks(1), "x" * size])
        monkeypatch.setattr(f"{__name__}._raised", [error])
        good.send("fine")
        await world.settle()
        (condemned,) = world.reports
        assert isinstance(condemned, AttemptCondemned)
        assert (condemned.task_attempt_id, condemned.unusable) == (bad.attempt.task_attempt_id, True)
        assert "an unreadable event from the task: " in condemned.reason
        assert "OnlyInTasks" in condemned.reason
        assert f"{type(error).__name__}: " in condemned.reason
        assert "Correct the class" in condemned.reason
        assert world.coordinator.events == ["fine"]
        assert not world.failures


# --- suspicion (H87) ----------------------------------------------------------------------------------------------


HINTS = ("subtask_suspected", "subtask_responsive", "subtask_failed", "subtask_finished")


async def test_a_broken_connection_is_a_suspicion_until_it_comes_back() -> None:  # H87, H24
    async with running_tasks(2) as (world, (task, _)):
        for _ in range(2):
            task.lose_connection()
            await world.settle()
            assert world.coordinator.calls[-1] == ("subtask_suspected", 0, 0)
            sent = world.coordinator.gateways[0].send_event_nowait("still taken")
            task.reconnect(world.connection())
            await world.settle()
            assert world.coordinator.calls[-1] == ("subtask_responsive", 0, 0)
            assert sent.confirmed()
        assert world.statistics.suspicions == 2
        assert not world.reports


async def test_a_suspicion_says_why() -> None:  # H87
    reasons: list[str] = []

    async def note(subtask: int, attempt: int, reason: str) -> None:
        reasons.append(reason)

    async with running_tasks(1, RecordingCoordinator(subtask_suspected=note)) as (world, (task,)):
        task.lose_connection()
        await world.settle()
        assert reasons == ["its connection is gone"]


async def test_a_suspicion_that_comes_after_the_failure_is_dropped() -> None:  # H87
    gate = asyncio.Event()

    async def slow(*args: Any) -> None:
        await gate.wait()

    async with running_tasks(1, RecordingCoordinator(handle_event_from_operator=slow)) as (world, (task,)):
        task.send("the coordinator is busy with this")
        await world.settle()
        world.fail(task)
        task.lose_connection()
        gate.set()
        await world.settle()
        assert [call[0] for call in world.coordinator.calls_of(*HINTS)] in (
            ["subtask_failed"],
            ["subtask_suspected", "subtask_failed"],
        )
        assert world.statistics.messages_dropped == 0


async def test_the_end_of_an_operator_is_not_a_suspicion() -> None:  # H87
    async with running_tasks(1) as (world, (task,)):
        task.finish()
        await world.settle()
        task.lose_connection()
        await world.settle()
        world.finish(task)
        await world.settle()
        assert [call[0] for call in world.coordinator.calls_of(*HINTS)] == ["subtask_finished"]


async def test_a_connection_that_does_not_come_back_is_a_suspicion_before_it_is_a_failure() -> None:  # H87, H24
    async with running_tasks(1, reconnect_timeout_s=10.0) as (world, (task,)):
        task.lose_connection()
        await world.settle()
        assert world.coordinator.calls_of(*HINTS) == [("subtask_suspected", 0, 0)]
        await world.advance(10.0)
        assert len(world.reports) == 1
        world.fail(task)
        await world.settle()
        assert [call[0] for call in world.coordinator.calls_of(*HINTS)] == ["subtask_suspected", "subtask_failed"]
