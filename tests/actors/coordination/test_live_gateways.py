# SPDX-License-Identifier: Apache-2.0

"""The gateways that the context keeps for a coordinator (H88)."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

from actors.coordination import CoordinatorContext, LiveGateways, OperatorCoordinator, RecreateOnReset, parts_of
from actors.coordination.host.gateway import SendEvent
from headgate.testing import PartEvent
from protocol.errors import AttemptOver, EventEncodeError, GatewayFull, LocalProtocolError
from protocol.wire.codec import WireLimits, encode_event
from tests.actors.coordination.operator_world import RecordingCoordinator, running_operator, running_tasks


class Keeping(RecordingCoordinator):
    """Notes which subtasks are ready in each call about an attempt."""

    def __init__(self, **methods: Any) -> None:
        super().__init__(**methods)
        self.seen: list[tuple[Any, ...]] = []

    async def _called(self, method: str, *args: Any, noted: tuple[Any, ...] = ()) -> Any:
        if method.startswith(("subtask", "reset", "run")):
            self.seen.append((method, self.context.gateways.ready))
        return await super()._called(method, *args, noted=noted)


def gateways_of(coordinator: RecordingCoordinator) -> LiveGateways:
    return coordinator.context.gateways


async def test_an_attempt_is_there_from_its_readiness_until_it_is_over() -> None:  # H88
    coordinator = Keeping()
    async with running_tasks(2, coordinator) as (world, (one, two)):
        world.fail(one)
        await world.settle()
        two.finish()
        await world.settle()
        world.finish(two)
        world.end_run()
        await world.settle()
        world.reset()
        await world.settle()
        assert coordinator.seen[0][1] in ((0,), (1,))
        assert coordinator.seen == [
            ("subtask_ready", coordinator.seen[0][1]),
            ("subtask_ready", (0, 1)),
            ("subtask_failed", (1,)),
            ("subtask_reset", (1,)),
            ("subtask_finished", ()),
            ("run_ended", ()),
            ("reset_to_checkpoint", ()),
        ]


async def test_a_subtask_with_copies_has_several_gateways() -> None:  # H88, H13
    coordinator = RecordingCoordinator()
    async with running_tasks(2, coordinator) as (world, (first, other)):
        (copy,) = await world.running(0)
        gateways = gateways_of(coordinator)
        assert [gateway.attempt for gateway in gateways.gateways(0)] == [first.attempt, copy.attempt]
        assert [gateway.attempt for gateway in gateways] == [first.attempt, copy.attempt, other.attempt]
        assert (len(gateways), gateways.ready) == (3, (0, 1))
        confirmations = await gateways.send(0, "to both")
        await world.settle()
        assert [confirmation.confirmed() for confirmation in confirmations] == [True, True]
        assert (first.events, copy.events, other.events) == (["to both"], ["to both"], [])
        assert len(await gateways.send(0, "to the copy", attempt=1)) == 1
        assert await gateways.send(0, "to nobody", attempt=2) == ()
        await world.settle()
        assert (first.events, copy.events) == (["to both"], ["to both", "to the copy"])
        world.fail(first, reset=False)
        await world.settle()
        assert [gateway.attempt for gateway in gateways.gateways(0)] == [copy.attempt]


async def test_a_broadcast_is_encoded_once_and_reaches_all_in_order(monkeypatch: pytest.MonkeyPatch) -> None:  # H88
    encoded: list[Any] = []

    def counting(event: Any, limits: WireLimits) -> bytes:
        encoded.append(event)
        return encode_event(event, limits)

    monkeypatch.setattr("actors.coordination.host.gateway.encode_event", counting)
    coordinator = RecordingCoordinator()
    async with running_tasks(3, coordinator, parallelism=3) as (world, tasks):
        gateways = gateways_of(coordinator)
        coordinator.gateways[1].send_event_nowait("before")
        confirmations = await gateways.broadcast(["rule", 1])
        coordinator.gateways[1].send_event_nowait("after")
        gateways.broadcast_nowait(["rule", 2])
        await world.settle()
        assert encoded == ["before", ["rule", 1], "after", ["rule", 2]]
        assert [task.events for task in tasks] == [
            [["rule", 1], ["rule", 2]],
            ["before", ["rule", 1], "after", ["rule", 2]],
            [["rule", 1], ["rule", 2]],
        ]
        assert [confirmation.confirmed() for confirmation in confirmations] == [True] * 3


async def test_a_broadcast_reaches_those_that_have_capacity_before_it_waits_for_the_others() -> None:  # H88, H27
    coordinator = RecordingCoordinator()
    async with running_tasks(2, coordinator, events_max=1) as (world, (slow, quick)):
        slow.unresponsive = True
        gateways = gateways_of(coordinator)
        await gateways.send(0, "fills it")
        with pytest.raises(GatewayFull, match="so nothing was sent"):
            gateways.broadcast_nowait("no capacity")
        sent: list[Any] = []

        async def note(result: Any, error: Exception | None) -> None:
            sent.append(error or len(result))

        coordinator.context.run_in_background(gateways.broadcast, "to all", handler=note)
        await world.settle()
        assert not sent
        assert quick.events == ["to all"]
        slow.unresponsive = False
        await world.settle()
        assert sent == [2]
        assert slow.events == ["fills it", "to all"]


WAYS: dict[str, Callable[[LiveGateways, dict[str, bool]], Any]] = {
    "send_event": lambda gateways, how: gateways.gateways(0)[0].send_event("x", **how),
    "send_event_nowait": lambda gateways, how: gateways.gateways(0)[0].send_event_nowait("x", **how),
    "send": lambda gateways, how: gateways.send(0, "x", **how),
    "broadcast": lambda gateways, how: gateways.broadcast("x", **how),
    "broadcast_nowait": lambda gateways, how: gateways.broadcast_nowait("x", **how),
}


@pytest.mark.parametrize("how", [{}, {"loss_tolerant": True}, {"urgent": True}], ids=["default", "tolerant", "urgent"])
@pytest.mark.parametrize("way", WAYS)
async def test_an_event_may_get_lost_or_be_urgent_only_if_that_was_said(
    way: str, how: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:  # H88, H90
    sent: list[SendEvent] = []

    def noting(*args: Any, **fields: Any) -> SendEvent:
        sent.append(SendEvent(*args, **fields))
        return sent[-1]

    coordinator = RecordingCoordinator()
    async with running_tasks(1, coordinator):
        monkeypatch.setattr("actors.coordination.host.gateway.SendEvent", noting)
        begun = WAYS[way](gateways_of(coordinator), how)
        if inspect.iscoroutine(begun):
            await begun
        (event,) = sent
        assert (event.loss_tolerant, event.urgent) == ("loss_tolerant" in how, "urgent" in how)


async def test_urgent_events_go_to_all_too() -> None:  # H88, H90
    coordinator = RecordingCoordinator()
    async with running_tasks(2, coordinator) as (world, tasks):
        gateways = gateways_of(coordinator)
        await gateways.broadcast("now", urgent=True)
        gateways.broadcast_nowait("again", urgent=True)
        await gateways.send(1, "you", urgent=True)
        await world.settle()
        assert [task.urgent_events for task in tasks] == [["now", "again"], ["now", "again", "you"]]


async def test_what_cannot_be_sent_raises_and_nobody_gets_it() -> None:  # H88, H21
    coordinator = RecordingCoordinator()
    async with running_tasks(2, coordinator) as (world, tasks):
        gateways = gateways_of(coordinator)
        with pytest.raises(EventEncodeError):
            await gateways.broadcast(object())
        for subtask in (-1, 2):
            with pytest.raises(ValueError, match="the operator has 2"):
                await gateways.send(subtask, "x")
            with pytest.raises(ValueError, match=rf"there is no subtask {subtask}|subtask must be .*, not {subtask}"):
                gateways.gateways(subtask)
        world.fail(tasks[0])
        await world.settle()
        assert await gateways.send(0, "to nobody") == ()
        await world.settle()
        assert tasks[1].events == []


async def test_another_thread_is_told_what_to_call() -> None:  # H88, H59
    coordinator = RecordingCoordinator()
    async with running_tasks(1, coordinator):
        errors: list[str] = []

        def elsewhere() -> None:
            try:
                gateways_of(coordinator).broadcast_nowait("x")
            except LocalProtocolError as error:
                errors.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "call context.call_soon_threadsafe(handler)" in errors[0]


# --- all are ready ------------------------------------------------------------------------------------------------


async def test_a_handler_is_called_between_methods_as_soon_as_all_are_ready() -> None:  # H88
    async def begin(context: CoordinatorContext) -> None:
        context.gateways.when_all_ready(all_there)

    async def all_there() -> None:
        coordinator.calls.append(("all there", gateways_of(coordinator).ready))
        await gateways_of(coordinator).broadcast("go")

    coordinator = RecordingCoordinator(start=begin)
    async with running_tasks(2, coordinator, parallelism=3) as (world, tasks):
        assert not coordinator.calls_of("all there")
        assert not gateways_of(coordinator).are_complete
        world.fail(tasks[0])
        await world.running(2)
        assert not coordinator.calls_of("all there")
        await world.running(0)
        assert coordinator.calls[-2:] == [("subtask_ready", 0, 1), ("all there", (0, 1, 2))]
        assert [task.events for task in world.tasks[1:]] == [["go"]] * 3
        world.fail(tasks[1])
        await world.running(1)
        assert len(coordinator.calls_of("all there")) == 1  # once
        gateways_of(coordinator).when_all_ready(all_there)
        await world.settle()
        assert len(coordinator.calls_of("all there")) == 2  # they are, already
        assert gateways_of(coordinator).are_complete


async def test_a_failure_that_waits_behind_the_last_readiness_comes_after_the_handler() -> None:  # H88
    gate = asyncio.Event()

    async def begin(context: CoordinatorContext) -> None:
        context.gateways.when_all_ready(all_there)

    async def all_there() -> None:
        coordinator.calls.append(("all there", gateways_of(coordinator).ready))

    async def slow(*args: Any) -> None:
        await gate.wait()

    coordinator = RecordingCoordinator(start=begin, subtask_ready=slow)
    async with running_tasks(2, coordinator) as (world, (one, _)):
        world.fail(one)
        gate.set()
        await world.settle()
        assert [call[0] for call in coordinator.calls[1:]] == [
            "subtask_ready",
            "subtask_ready",
            "all there",
            "subtask_failed",
            "subtask_reset",
        ]
        assert coordinator.calls_of("all there") == [("all there", (0, 1))]


async def test_a_reset_of_the_whole_drops_the_handler_and_a_failure_in_it_fails_the_job() -> None:  # H88, H7
    async def forget() -> None:
        raise AssertionError("never called")

    async def broken() -> None:
        raise ValueError("not like this")

    coordinator = RecordingCoordinator()
    async with running_tasks(1, coordinator) as (world, (task,)):
        gateways_of(coordinator).when_all_ready(forget)
        world.fail(task, reset=False)
        world.reset()
        await world.running(0, 1)
        assert not world.failures
        gateways_of(coordinator).when_all_ready(broken)
        await world.settle()
        assert [str(failure) for failure in world.failures] == ["not like this"]


async def test_waiting_for_all_is_refused_inside_a_method_and_works_in_the_background() -> None:  # H88
    told: list[str] = []

    async def wait() -> str:
        await gateways_of(coordinator).all_ready()
        return "all there"

    async def handled(result: str | None, error: Exception | None) -> None:
        told.append(str(result or error))

    async def begin(context: CoordinatorContext) -> None:
        context.run_in_background(wait, handler=handled)
        await asyncio.sleep(0)
        with pytest.raises(LocalProtocolError, match="Use when_all_ready"):
            await context.gateways.all_ready()

    coordinator = RecordingCoordinator(start=begin)
    async with running_tasks(1, coordinator) as (world, _):
        await world.settle()
        assert not told
        await world.running(1)
        assert told == ["all there"]
        coordinator.context.run_in_background(wait, handler=handled)
        await world.settle()
        assert told == ["all there"] * 2


# --- views --------------------------------------------------------------------------------------------------------


async def test_an_incarnation_that_was_replaced_sees_and_reaches_nobody() -> None:  # H88, G16
    made: list[RecordingCoordinator] = []

    def make() -> RecordingCoordinator:
        made.append(RecordingCoordinator())
        return made[-1]

    async def never() -> None:
        raise AssertionError("it was replaced")

    async def note(result: Any, error: Exception | None) -> None:
        raise AssertionError("it was replaced")

    async with running_operator(RecreateOnReset(make), parallelism=1, events_max=1) as world:
        (task,) = await world.running(0)
        old = gateways_of(made[0])
        (gateway,) = old
        old.broadcast_nowait("from the old one")
        await world.settle()
        task.unresponsive = True
        old.broadcast_nowait("fills it")
        made[0].context.run_in_background(old.broadcast, "waits for capacity", handler=note)
        await world.settle()
        world.fail(task, reset=False)
        world.reset()
        (retry,) = await world.running(0)
        old.when_all_ready(never)
        await world.settle()
        assert (old.ready, len(old), list(old), old.gateways(0)) == ((), 0, [], ())
        assert await old.broadcast("too late") == ()
        assert isinstance(gateway.send_event_nowait("x").error(), AttemptOver)
        await gateways_of(made[1]).broadcast("from the new one")
        await world.settle()
        assert retry.events == ["from the new one"]
        assert not world.failures


async def test_a_part_of_a_chain_sends_in_its_name() -> None:  # H88, H80
    class Part(OperatorCoordinator):
        async def start(self, context: CoordinatorContext) -> None:
            self.context = context

    part, main = Part(), RecordingCoordinator()
    async with running_tasks(2, parts_of(main, {"rules": part})) as (world, tasks):
        await part.context.gateways.broadcast(1)
        await gateways_of(main).broadcast(2)
        (of_part,) = part.context.gateways.gateways(0)
        of_part.send_event_nowait(3)
        await world.settle()
        assert tasks[0].events == [PartEvent("rules", 1), 2, PartEvent("rules", 3)]
        assert tasks[1].events == [PartEvent("rules", 1), 2]
