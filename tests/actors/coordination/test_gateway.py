# SPDX-License-Identifier: Apache-2.0

"""Events from a coordinator to one attempt: order, confirmation, deadlines, the end, misuse (H20 to H28)."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from actors.coordination import Confirmation, RecreateOnReset
from protocol.attempts import AttemptCondemned, FailureKind
from protocol.errors import AttemptOver, ConfirmationTimeout, EventEncodeError, LocalProtocolError
from tests.actors.coordination.one_that_waits import OneThatWaits
from tests.actors.coordination.operator_world import RecordingCoordinator, running_tasks

# --- sending down -----------------------------------------------------------------------------------------------------


async def test_events_arrive_in_order_each_once_and_are_confirmed() -> None:  # H22, H23
    async with running_tasks(1) as (world, (task,)):
        confirmations = [await world.coordinator.gateways[0].send_event(number) for number in range(20)]
        await world.settle()
        assert task.events == list(range(20))
        for confirmation in confirmations:
            await confirmation
            assert confirmation.confirmed()


async def test_an_event_is_confirmed_when_it_lies_in_the_mailbox_and_not_before() -> None:  # H23
    async with running_tasks(1) as (world, (task,)):
        task.unresponsive = task.busy = True
        confirmation = await world.coordinator.gateways[0].send_event("hello")
        await world.settle()
        assert not confirmation.done()
        task.unresponsive = False
        await world.settle()
        assert confirmation.confirmed()
        assert task.events == []  # still in the mailbox


async def test_an_event_is_encoded_immediately_so_later_changes_do_not_matter() -> None:  # H21
    async with running_tasks(1) as (world, (task,)):
        event = ["before"]
        await world.coordinator.gateways[0].send_event(event)
        world.coordinator.gateways[0].send_event_nowait(event)
        event.append("after")
        await world.settle()
        assert task.events == [["before"], ["before"]]


async def test_what_cannot_be_encoded_raises_where_it_was_sent_and_takes_no_capacity() -> None:  # H21
    async with running_tasks(1) as (world, _):
        gateway = world.coordinator.gateways[0]
        with pytest.raises(EventEncodeError):
            await gateway.send_event(object())
        with pytest.raises(EventEncodeError):
            gateway.send_event_nowait(object())
        assert gateway.events_pending == 0
        assert not world.reports


async def test_sending_never_raises_because_the_attempt_is_over() -> None:  # H21, H26
    async with running_tasks(1, events_max=1) as (world, (task,)):
        task.unresponsive = True
        gateway = world.coordinator.gateways[0]
        first = await gateway.send_event("held")
        late: list[Confirmation] = []
        # At the end, one sender still waits for capacity. That must not refuse the senders after it.
        first.add_done_callback(lambda _: late.append(gateway.send_event_nowait("no capacity, and others before")))
        async with anyio.create_task_group() as tasks:
            waiting = OneThatWaits(tasks, gateway, "waits for capacity")
            await world.settle()
            world.fail(task)
            await world.settle()
        assert waiting.confirmation is not None
        for confirmation in (waiting.confirmation, first, *late):
            assert isinstance(confirmation.error(), AttemptOver)


async def test_held_and_unconfirmed_events_fail_at_the_end_and_nothing_follows() -> None:  # H26
    async with running_tasks(2) as (world, (task, _)):
        task.unresponsive = True
        gateway = world.coordinator.gateways[0]
        unconfirmed = await gateway.send_event("unconfirmed")
        other_event = await world.coordinator.gateways[1].send_event("to another")
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


# --- deadlines --------------------------------------------------------------------------------------------------------


async def test_an_unconfirmed_event_condemns_exactly_its_attempt() -> None:  # H25
    async with running_tasks(2, confirm_timeout_s=3.0) as (world, (silent, _)):
        silent.unresponsive = True
        late = await world.coordinator.gateways[0].send_event("nobody listens")
        other = await world.coordinator.gateways[1].send_event("hello")
        await world.advance(2.9)
        assert not world.reports
        await world.advance(0.2)
        (condemned,) = world.reports
        assert isinstance(condemned, AttemptCondemned)
        assert (condemned.operator_id, condemned.task_attempt_id) == ("words", silent.attempt.task_attempt_id)
        assert "event 1" in condemned.reason
        assert isinstance(late.error(), ConfirmationTimeout)
        assert other.confirmed()
        await world.advance(10.0)
        assert len(world.reports) == 1


async def test_a_condemned_attempt_is_told_immediately_and_does_not_wait_for_its_goodbye() -> None:  # H25, H48
    async with running_tasks(1, confirm_timeout_s=3.0) as (world, (task,)):
        task.silent = True
        await world.coordinator.gateways[0].send_event("heard, and not confirmed")
        await world.advance(3.1)
        assert isinstance(world.reports[0], AttemptCondemned)
        assert task.ended, "nobody has told the task"


async def test_who_awaits_a_loss_tolerant_event_waits_no_longer_than_for_any_other() -> None:  # H72
    outcomes: list[BaseException | None] = []

    async def send_and_wait(subtask: int, attempt: int, event: Any) -> None:
        confirmation = await coordinator.gateways[0].send_event("a hint", loss_tolerant=True)
        try:
            await confirmation
        except AttemptOver as error:
            outcomes.append(error)

    coordinator = RecordingCoordinator(handle_event_from_operator=send_and_wait)
    async with running_tasks(2, coordinator, confirm_timeout_s=3.0) as (world, (frozen, other)):
        frozen.unresponsive = True
        other.send("go on")
        await world.settle()
        await world.advance(2.9)
        assert outcomes == []
        await world.advance(0.2)
        (error,) = outcomes
        assert isinstance(error, ConfirmationTimeout)
        assert "loss-tolerant event 1" in str(error)
        assert not world.reports  # H28
        other.send("once more")
        await world.advance(3.1)
        assert len(outcomes) == 2  # the gateway's timer runs again
        gateway = coordinator.gateways[0]
        assert gateway.events_pending == 2  # H27: they are still on their way
        frozen.unresponsive = False
        await world.settle()
        assert gateway.events_pending == 0
        assert frozen.events == ["a hint", "a hint"]


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
async def test_every_confirmation_is_settled_when_the_operator_stops(seed: int) -> None:  # H26
    sent: list[Confirmation] = []

    async def send_more() -> None:
        sent.extend(gateway.send_event_nowait("in close") for gateway in coordinator.gateways.values())

    coordinator = RecordingCoordinator(close=send_more)
    async with running_tasks(2, coordinator, seed=seed) as (world, (silent, _)):
        silent.unresponsive = True
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
    async with running_tasks(1, coordinator) as (world, (task,)):
        task.unresponsive = True
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


# --- misuse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["send_event", "send_event_nowait"])
async def test_a_gateway_refuses_another_thread_and_names_the_way(method: str) -> None:  # H59
    async with running_tasks(1) as (world, (task,)):
        with pytest.raises(LocalProtocolError, match=r"from thread .* call context\.call_soon_threadsafe\(handler\)"):
            await anyio.to_thread.run_sync(getattr(world.coordinator.gateways[0], method), "from afar")
        await world.settle()
        assert task.events == []


@pytest.mark.parametrize("recreated", [False, True])
async def test_a_send_event_that_is_never_awaited_is_told_with_its_place(recreated: bool) -> None:  # H59
    made: list[RecordingCoordinator] = []

    def make() -> RecordingCoordinator:
        made.append(RecordingCoordinator())
        return made[-1]

    coordinator: Any = RecreateOnReset(make) if recreated else make()
    with capture_logs() as logs:
        async with running_tasks(1, coordinator) as (world, (task,)):
            gateway = made[-1].gateways[0]
            with pytest.warns(RuntimeWarning, match="never awaited"):
                gateway.send_event("lost")  # type: ignore[unused-coroutine]
            async with anyio.create_task_group() as group:
                group.start_soon(gateway.send_event, "sent")
            await world.settle()
            assert task.events == ["sent"]
    (line,) = [line for line in logs if line["event"] == "send never awaited"]
    assert (line["operator_id"], line["subtask"], line["attempt"]) == (world.config.operator_id, 0, 0)
    assert "test_gateway.py" in line["at"]
    assert "await gateway.send_event" in line["hint"]


@pytest.mark.parametrize("method", ["send", "broadcast"])
async def test_a_send_to_several_that_is_never_awaited_is_told_with_its_place(method: str) -> None:  # H59
    with capture_logs() as logs:
        async with running_tasks(2) as (world, tasks):
            gateways: Any = world.coordinator.context.gateways
            arguments = (0, "sent") if method == "send" else ("sent",)
            with pytest.warns(RuntimeWarning, match="never awaited"):
                getattr(gateways, method)(*arguments)
            await getattr(gateways, method)(*arguments)
            await world.settle()
            assert [task.events for task in tasks] == [["sent"], [] if method == "send" else ["sent"]]
    (line,) = [line for line in logs if line["event"] == "send never awaited"]
    assert "test_gateway.py" in line["at"]
    assert f"await gateways.{method}(" in line["hint"]


async def test_a_wait_for_a_confirmation_that_is_cut_off_leaves_nothing_behind() -> None:  # H163
    confirmation = Confirmation(0, 0.0)
    for _ in range(3):
        with anyio.move_on_after(0.0):
            await confirmation
    assert confirmation._waiters == []
