"""Events and requests between a coordinator and one attempt (H20 to H28, H30, H33)."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from actors.coordination import Confirmation
from actors.coordination.gateway import SendBudget
from actors.coordination.messages import ConnectionClosed, MessagesArrived
from actors.testing import settle
from protocol.attempts import AttemptCondemned, ConnectionExpired, FailureKind
from protocol.codec import encode_event
from protocol.errors import AttemptOver, ConfirmationTimeout, EventEncodeError, GatewayFull
from protocol.messages import EventMessage
from tests.actors.coordination.operator_world import RecordingCoordinator, running_operator


class OneThatWaits:
    """Sends an event in a task of its own, because it may have to wait for room."""

    def __init__(self, tasks: Any, gateway: Any, event: Any) -> None:
        self.scope = anyio.CancelScope()
        self.confirmation: Confirmation | None = None
        tasks.start_soon(self._send, gateway, event)

    def waits(self) -> bool:
        return self.confirmation is None

    async def _send(self, gateway: Any, event: Any) -> None:
        with self.scope:
            self.confirmation = await gateway.send_event(event)


# --- sending down -------------------------------------------------------------------------------------------------


async def test_events_arrive_in_order_each_once_and_are_confirmed() -> None:  # H22, H23
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        confirmations = [await coordinator.gateways[0].send_event(number) for number in range(20)]
        await world.settle()
        assert task.events == list(range(20))
        for confirmation in confirmations:
            await confirmation
            assert confirmation.confirmed()


async def test_an_event_is_confirmed_when_it_lies_in_the_mailbox_and_not_before() -> None:  # H23
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        task.deaf = task.busy = True
        confirmation = await coordinator.gateways[0].send_event("hello")
        await world.settle()
        assert not confirmation.done()
        task.deaf = False
        await world.settle()
        assert confirmation.confirmed()
        assert task.events == []  # still in the mailbox


async def test_an_event_is_encoded_at_once_so_later_changes_do_not_matter() -> None:  # H21
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        event = ["before"]
        await coordinator.gateways[0].send_event(event)
        coordinator.gateways[0].send_event_nowait(event)
        event.append("after")
        await world.settle()
        assert task.events == [["before"], ["before"]]


async def test_what_cannot_be_encoded_raises_where_it_was_sent_and_takes_no_room() -> None:  # H21
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        await world.running(0)
        gateway = coordinator.gateways[0]
        with pytest.raises(EventEncodeError):
            await gateway.send_event(object())
        with pytest.raises(EventEncodeError):
            gateway.send_event_nowait(object())
        assert gateway.events_pending == 0
        assert not world.reports


async def test_sending_never_raises_because_the_attempt_is_over() -> None:  # H21, H26
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, events_max=1) as world:
        (task,) = await world.running(0)
        task.deaf = True
        gateway = coordinator.gateways[0]
        first = await gateway.send_event("held")
        late: list[Confirmation] = []
        # In the moment of the end one still stands in line: nobody behind it may be refused for that.
        first.add_done_callback(lambda _: late.append(gateway.send_event_nowait("no room, and others before")))
        async with anyio.create_task_group() as tasks:
            waiting = OneThatWaits(tasks, gateway, "waits for room")
            await world.settle()
            world.fail(task)
            await world.settle()
        assert waiting.confirmation is not None
        for confirmation in (waiting.confirmation, first, *late):
            assert isinstance(confirmation.error(), AttemptOver)


async def test_one_that_stands_in_line_refuses_nobody_once_the_attempt_is_over() -> None:  # H14, H21
    budget = SendBudget(1, 100)
    assert budget.try_take(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(budget.take, 1)
        await settle()
        assert not budget.try_take(1)
        budget.end(AttemptOver("over"))
        assert budget.try_take(1)


async def test_room_for_two_wakes_two() -> None:  # H27
    budget = SendBudget(2, 100)
    assert budget.try_take(1)
    assert budget.try_take(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(budget.take, 1)
        tasks.start_soon(budget.take, 1)
        await settle()
        budget.give_back(1)
        budget.give_back(1)
        await settle()
        assert budget.events == 2
        tasks.cancel_scope.cancel()
    assert budget.events == 2


async def test_held_and_unconfirmed_events_fail_at_the_end_and_nothing_follows() -> None:  # H26
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        task, _ = await world.running(0, 1)
        task.deaf = True
        gateway = coordinator.gateways[0]
        unconfirmed = await gateway.send_event("unconfirmed")
        other_event = await coordinator.gateways[1].send_event("to another")
        await world.settle()
        in_its_mailbox = await gateway.send_event("in the same moment as the end")
        world.fail(task, FailureKind.EXECUTOR_LOST)
        await world.settle()
        for confirmation in (unconfirmed, in_its_mailbox):
            with pytest.raises(AttemptOver):
                await confirmation
        assert other_event.confirmed()
        assert not world.reports
        assert world.statistics.events_failed == 2


# --- deadlines ----------------------------------------------------------------------------------------------------


async def test_an_unconfirmed_event_condemns_exactly_its_attempt() -> None:  # H25
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, confirm_timeout_s=3.0) as world:
        deaf, _ = await world.running(0, 1)
        deaf.deaf = True
        late = await coordinator.gateways[0].send_event("nobody listens")
        other = await coordinator.gateways[1].send_event("hello")
        await world.advance(2.9)
        assert not world.reports
        await world.advance(0.2)
        (condemned,) = world.reports
        assert isinstance(condemned, AttemptCondemned)
        assert (condemned.operator_id, condemned.task_attempt_id) == ("words", deaf.attempt.task_attempt_id)
        assert "event 1" in condemned.reason
        assert isinstance(late.error(), ConfirmationTimeout)
        assert other.confirmed()
        await world.advance(10.0)
        assert len(world.reports) == 1


async def test_an_attempt_that_is_over_already_is_not_condemned() -> None:  # H25
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, confirm_timeout_s=3.0) as world:
        (task,) = await world.running(0)
        task.deaf = True
        await coordinator.gateways[0].send_event("nobody listens")
        world.fail(task)
        await world.advance(10.0)
        assert not world.reports


async def test_the_deadline_moves_on_with_each_confirmation() -> None:  # H25
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, confirm_timeout_s=3.0) as world:
        await world.running(0)
        for number in range(5):
            await coordinator.gateways[0].send_event(number)
            await world.advance(2.0)
        assert not world.reports


async def test_a_loss_tolerant_event_fails_no_attempt() -> None:  # H28
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, confirm_timeout_s=3.0) as world:
        (task,) = await world.running(0)
        task.deaf = True
        hint = await coordinator.gateways[0].send_event("a hint", loss_tolerant=True)
        also = coordinator.gateways[0].send_event_nowait("another", loss_tolerant=True)
        await world.advance(100.0)
        assert not world.reports
        assert not hint.done()
        task.deaf = False
        await world.settle()
        assert hint.confirmed()
        assert also.confirmed()


# --- bounds -------------------------------------------------------------------------------------------------------


async def test_at_the_bound_a_sender_waits_and_nowait_is_refused() -> None:  # H27
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, events_max=2) as world:
        (task,) = await world.running(0)
        task.deaf = True
        gateway = coordinator.gateways[0]
        await gateway.send_event(1)
        await gateway.send_event(2)
        assert (gateway.events_pending, gateway.bytes_pending) == (2, 2)
        with pytest.raises(GatewayFull, match="2 events"):
            gateway.send_event_nowait("refused")
        async with anyio.create_task_group() as tasks:
            third, fourth = OneThatWaits(tasks, gateway, 3), OneThatWaits(tasks, gateway, 4)
            await world.settle()
            assert third.waits()
            task.deaf = False
            task.read()
            task.deaf = True
            await world.settle()  # one confirmation for two events has made room for two
            assert not third.waits()
            assert not fourth.waits()
            task.deaf = False
            await world.settle()
        assert task.events == [1, 2, 3, 4]
        assert (gateway.events_pending, gateway.bytes_pending) == (0, 0)


async def test_the_bound_holds_for_bytes_too_but_a_large_event_passes_alone() -> None:  # H27
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, bytes_max=100) as world:
        (task,) = await world.running(0)
        task.deaf = True
        gateway = coordinator.gateways[0]
        await gateway.send_event(b"x" * 500)
        with pytest.raises(GatewayFull):
            gateway.send_event_nowait(b"y")
        task.deaf = False
        await world.settle()
        await gateway.send_event(b"y")
        await world.settle()
        assert task.events == [b"x" * 500, b"y"]


async def test_nobody_overtakes_one_that_waits_for_room() -> None:  # H22, H27
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, bytes_max=100) as world:
        (task,) = await world.running(0)
        task.deaf = True
        gateway = coordinator.gateways[0]
        await gateway.send_event("first")
        async with anyio.create_task_group() as tasks:
            OneThatWaits(tasks, gateway, "x" * 98)
            await world.settle()
            with pytest.raises(GatewayFull):
                gateway.send_event_nowait("small")
            task.deaf = False
            await world.settle()
        assert task.events == ["first", "x" * 98]


async def test_one_that_is_cancelled_while_it_waits_sends_nothing_and_the_others_go_on() -> None:  # H27
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, events_max=1) as world:
        (task,) = await world.running(0)
        task.deaf = True
        gateway = coordinator.gateways[0]
        await gateway.send_event("first")
        async with anyio.create_task_group() as tasks:
            cancelled, patient = OneThatWaits(tasks, gateway, "cancelled"), OneThatWaits(tasks, gateway, "patient")
            await world.settle()
            cancelled.scope.cancel()
            await world.settle()
            assert patient.waits()
            task.deaf = False
            await world.settle()
        assert cancelled.confirmation is None
        assert task.events == ["first", "patient"]
        assert gateway.events_pending == 0


async def test_one_that_is_cancelled_in_the_moment_of_its_turn_passes_it_on() -> None:  # H27
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, events_max=1) as world:
        (task,) = await world.running(0)
        task.deaf = True
        gateway = coordinator.gateways[0]
        first = await gateway.send_event("first")
        async with asyncio.TaskGroup() as native, anyio.create_task_group() as tasks:
            cancelled = native.create_task(gateway.send_event("cancelled"))
            await world.settle()
            patient = OneThatWaits(tasks, gateway, "patient")
            await world.settle()
            first.add_done_callback(lambda _: cancelled.cancel())  # there is room, and it has not yet taken it
            task.deaf = False
            await world.settle()
        assert cancelled.cancelled()
        assert patient.confirmation is not None
        assert patient.confirmation.confirmed()
        assert task.events == ["first", "patient"]


async def test_answers_take_no_room_from_events() -> None:  # H27, H33
    async def answer(subtask: int, attempt: int, request: Any) -> Any:
        return "yes"

    coordinator = RecordingCoordinator(handle_request=answer)
    async with running_operator(coordinator, events_max=2) as world:
        (task,) = await world.running(0)
        for _ in range(3):
            task.ask("may I?")
        task.deaf = True
        await world.settle()
        sent = [await coordinator.gateways[0].send_event(number) for number in range(2)]
        await world.settle()
        task.deaf = False
        await world.settle()
        assert all(confirmation.confirmed() for confirmation in sent)
        assert list(task.answers.values()) == ["yes"] * 3


# --- reconnects ---------------------------------------------------------------------------------------------------


async def test_a_broken_connection_loses_and_doubles_nothing() -> None:  # H24, H22, H30
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        gateway = coordinator.gateways[0]
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
        assert coordinator.events == expected
        assert all(confirmation.confirmed() for confirmation in sent)
        assert not world.reports


async def test_a_confirmation_that_is_lost_with_its_connection_is_made_good() -> None:  # H24, H22
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        task.mute = True
        confirmation = await coordinator.gateways[0].send_event("once")
        await world.settle()
        assert task.events == ["once"]
        assert not confirmation.done()
        task.lose_connection()
        task.mute = False
        task.reconnect(world.connection())
        await world.settle()
        assert confirmation.confirmed()
        assert task.events == ["once"]


async def test_an_attempt_that_does_not_come_back_in_time_is_reported() -> None:  # H24
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, reconnect_timeout_s=5.0) as world:
        (task,) = await world.running(0)
        confirmation = await coordinator.gateways[0].send_event("on the way")
        task.deaf = True
        await world.settle()
        task.lose_connection()
        await world.advance(4.9)
        assert not world.reports
        await world.advance(0.2)
        assert world.reports == [ConnectionExpired("words", task.attempt.task_attempt_id)]
        assert isinstance(confirmation.error(), AttemptOver)


async def test_the_confirm_clock_stands_still_while_the_connection_is_down() -> None:  # H24, H25
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, confirm_timeout_s=3.0, reconnect_timeout_s=60.0) as world:
        (task,) = await world.running(0)
        task.deaf = True
        confirmation = await coordinator.gateways[0].send_event("patience")
        await world.advance(2.0)
        task.lose_connection()
        await world.advance(30.0)
        task.deaf = False
        task.reconnect(world.connection())
        await world.settle()
        assert confirmation.confirmed()
        assert not world.reports


async def test_a_second_connection_replaces_the_first() -> None:  # H24
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        old = task.connection
        assert old is not None
        task.reconnect(world.connection())
        await world.settle()
        assert old.closed
        await coordinator.gateways[0].send_event("on the new one")
        await world.settle()
        assert task.events == ["on the new one"]


async def test_what_a_replaced_connection_brings_is_dropped_and_its_end_means_nothing() -> None:  # H3, H24
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, reconnect_timeout_s=5.0) as world:
        (task,) = await world.running(0)
        assert task.connection is not None
        old_id = task.connection.connection_id
        task.reconnect(world.connection())
        await world.settle()
        stray = EventMessage(task.attempt.task_attempt_id, 2, encode_event("stray"))
        task.gateway_ref.tell(MessagesArrived(old_id, [stray]))
        task.gateway_ref.tell(ConnectionClosed(old_id, "at last"))
        await world.advance(10.0)
        assert coordinator.events == []
        assert world.statistics.messages_dropped == 1
        assert not world.reports
        await coordinator.gateways[0].send_event("still connected")
        await world.settle()
        assert task.events == ["still connected"]


async def test_a_peer_that_breaks_the_protocol_loses_its_connection_and_harms_nobody() -> None:  # H24, H62
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        bad, good = await world.running(0, 1)
        assert bad.connection is not None
        bad.gateway_ref.tell(
            MessagesArrived(bad.connection.connection_id, [EventMessage(bad.attempt.task_attempt_id, 99, b"\xc0")])
        )
        await world.settle()
        assert bad.connection.closed
        good.send("fine")
        await world.settle()
        assert coordinator.events == ["fine"]
        assert not world.failures


async def test_an_unreadable_event_condemns_its_attempt_only() -> None:  # H62
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        bad, good = await world.running(0, 1)
        assert bad.connection is not None
        bad.gateway_ref.tell(  # 0xc1 is no msgpack; item 1 was Opened
            MessagesArrived(bad.connection.connection_id, [EventMessage(bad.attempt.task_attempt_id, 2, b"\xc1")])
        )
        good.send("fine")
        await world.settle()
        (condemned,) = world.reports
        assert isinstance(condemned, AttemptCondemned)
        assert condemned.task_attempt_id == bad.attempt.task_attempt_id
        assert coordinator.events == ["fine"]


# --- up -----------------------------------------------------------------------------------------------------------


async def test_events_of_one_attempt_come_in_order_and_after_it_is_ready() -> None:  # H30, H10
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        task = world.accept(0)
        task.opens_at_once = False
        await world.settle()
        task.send("before it opened")
        task.open()
        for number in range(10):
            task.send(number)
        await world.settle()
        assert coordinator.calls[1] == ("subtask_ready", 0, 0)
        assert coordinator.events == ["before it opened", *range(10)]
        assert task.machine.all_confirmed


async def test_an_event_is_confirmed_to_the_task_only_when_the_coordinator_has_handled_it() -> None:  # H30, H27
    gate = anyio.Event()

    async def stay(*args: Any) -> None:
        await gate.wait()

    coordinator = RecordingCoordinator(handle_event_from_operator=stay)
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        task.send("slow")
        await world.settle()
        assert not task.machine.all_confirmed
        gate.set()
        await world.settle()
        assert task.machine.all_confirmed


# --- requests -----------------------------------------------------------------------------------------------------


async def test_a_request_gets_its_answer_in_the_order_of_the_events_around_it() -> None:  # H33
    async def double(subtask: int, attempt: int, request: Any) -> Any:
        coordinator.gateways[subtask].send_event_nowait("sent before the answer")
        return request * 2

    coordinator = RecordingCoordinator(handle_request=double)
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        task.send("before")
        request_id = task.ask(21)
        task.send("after")
        await world.settle()
        assert [call[0] for call in coordinator.calls[2:]] == [
            "handle_event_from_operator",
            "handle_request",
            "handle_event_from_operator",
        ]
        assert task.answers == {request_id: 42}
        assert task.events == ["sent before the answer"]


@pytest.mark.parametrize("answer", [object(), ValueError("no such split")], ids=["no value", "an exception"])
async def test_a_request_that_fails_is_the_askers_trouble_only(answer: Any) -> None:  # H33
    async def fail(*args: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    coordinator = RecordingCoordinator(handle_request=fail)
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        request_id = task.ask("please")
        await world.settle()
        assert isinstance(task.answers[request_id], RuntimeError)
        assert not world.failures
        task.send("we go on")
        await world.settle()
        assert coordinator.events == ["we go on"]


async def test_a_coordinator_that_answers_no_requests_says_so() -> None:  # H33
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        request_id = task.ask("please")
        await world.settle()
        assert "override handle_request" in str(task.answers[request_id])
        assert not world.failures


async def test_an_answer_to_an_attempt_that_is_over_is_dropped() -> None:  # H33
    gate = anyio.Event()

    async def late(*args: Any) -> str:
        await gate.wait()
        return "too late"

    coordinator = RecordingCoordinator(handle_request=late)
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        request_id = task.ask("hurry")
        await world.settle()
        world.fail(task)
        await world.settle()
        gate.set()
        await world.settle()
        assert "over" in str(task.answers[request_id])
        assert not world.failures


# --- the end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
async def test_every_confirmation_is_settled_when_the_operator_stops(seed: int) -> None:  # H26
    sent: list[Confirmation] = []

    async def send_more() -> None:
        sent.extend(gateway.send_event_nowait("in close") for gateway in coordinator.gateways.values())

    coordinator = RecordingCoordinator(close=send_more)
    async with running_operator(coordinator, seed=seed) as world:
        deaf, _ = await world.running(0, 1)
        deaf.deaf = True
        for gateway in coordinator.gateways.values():
            sent.append(await gateway.send_event("on the way"))
        await world.settle()
        for gateway in coordinator.gateways.values():
            sent.append(await gateway.send_event("still in the gateway's mailbox"))
        await world.stop()
        assert len(sent) == 6
        assert all(confirmation.done() for confirmation in sent)


async def test_every_confirmation_is_settled_when_the_system_stops() -> None:  # H26
    coordinator = RecordingCoordinator()
    sent: list[Confirmation] = []
    async with running_operator(coordinator) as world:
        (task,) = await world.running(0)
        task.deaf = True
        sent.append(await coordinator.gateways[0].send_event("on the way"))
        await world.settle()
        sent.append(await coordinator.gateways[0].send_event("in the mailbox"))
    assert [type(confirmation.error()) for confirmation in sent] == [AttemptOver, AttemptOver]


async def test_a_confirmation_may_be_awaited_often_or_never_and_a_cancelled_wait_leaves_it_alone() -> None:  # H21
    confirmation = Confirmation()
    heard: list[str] = []
    scope = anyio.CancelScope()

    async def wait(name: str) -> None:
        await confirmation
        heard.append(name)

    async def give_up() -> None:
        with scope:
            await confirmation
            heard.append("cancelled")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, "one")
        tasks.start_soon(wait, "two")
        tasks.start_soon(give_up)
        await anyio.lowlevel.checkpoint()
        scope.cancel()
        await anyio.lowlevel.checkpoint()
        confirmation.add_done_callback(lambda _: heard.append("callback"))
        confirmation.settle()
        confirmation.settle(AttemptOver("only the first call counts"))
    await confirmation
    confirmation.add_done_callback(lambda _: heard.append("late callback"))
    assert sorted(heard) == ["callback", "late callback", "one", "two"]
    assert confirmation.confirmed()
