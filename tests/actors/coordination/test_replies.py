# SPDX-License-Identifier: Apache-2.0

"""Requests that are answered later, with a ``Reply`` (H84, H85)."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import anyio
import pytest

from actors import AskTimeout
from actors.coordination import RecreateOnReset, Reply
from actors.coordination.engine.messages import ClientRequest, ViewGateways
from protocol.attempts import FailureReason
from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.errors import LocalProtocolError, RequestFailed
from protocol.wire.codec import DEFAULT_LIMITS
from protocol.wire.messages import HeldEvent
from tests.actors.coordination.executor import Task
from tests.actors.coordination.operator_world import (
    Answer,
    RecordingCoordinator,
    World,
    running_operator,
    running_tasks,
)


class Deferring(RecordingCoordinator):
    """Defers every request, and keeps the replies in ``replies``."""

    def __init__(self, **methods: Any) -> None:
        super().__init__(**methods)
        self.replies: list[Reply] = []

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        await self._called("handle_request", subtask, attempt, request)
        self.replies.append(Reply())
        return self.replies[-1]

    async def handle_client_request(self, request: Any) -> Any:
        await self._called("handle_client_request", request)
        self.replies.append(Reply())
        return self.replies[-1]


@asynccontextmanager
async def an_open_request() -> AsyncIterator[tuple[World, Task, Deferring]]:
    """Yield a running task that has asked, and its coordinator, which has deferred the answer."""
    coordinator = Deferring()
    async with running_tasks(1, coordinator) as (world, (task,)):
        task.ask("x")
        await world.settle()
        yield world, task, coordinator


# --- the answer ---------------------------------------------------------------------------------------------------


async def test_an_answer_may_come_later_and_the_next_methods_run_meanwhile() -> None:  # H84, H21
    coordinator = Deferring()
    async with running_tasks(2, coordinator) as (world, (one, two)):
        number = one.ask("when all are here")
        await world.settle()
        (reply,) = coordinator.replies
        two.send("hello")
        await world.settle()
        assert coordinator.events == ["hello"]  # the open reply blocks nobody
        assert not one.answers
        assert (reply.over, reply.settled, repr(reply)) == (False, False, "<Reply open>")
        value = ["all", 2]
        reply.answer(value)
        value.append("a later change")
        await world.settle()
        assert one.answers == {number: ["all", 2]}
        assert (reply.over, reply.settled) == (True, True)


async def test_a_rendezvous_needs_no_polling() -> None:  # H84
    waiting: list[Reply] = []

    async def meet(subtask: int, attempt: int, request: Any) -> Reply:
        waiting.append(Reply())
        if len(waiting) == 4:
            for reply in waiting:
                reply.answer("go")
        return waiting[-1]

    async with running_tasks(4, RecordingCoordinator(handle_request=meet), parallelism=4) as (world, tasks):
        for task in tasks[:3]:
            task.ask("ready")
        await world.settle()
        assert not any(task.answers for task in tasks)
        tasks[3].ask("ready")
        await world.settle()
        assert [task.answers for task in tasks] == [{1: "go"}] * 4


async def test_answers_leave_when_they_are_settled_in_order_with_events() -> None:  # H84, H22
    coordinator = Deferring()
    async with running_tasks(1, coordinator) as (world, (task,)):
        order: list[Any] = []

        def resolve(request_id: int, error: str, payload: bytes) -> None:
            order.append(("answer", request_id))

        def put(item: Any) -> None:
            order.append("event")

        task._resolve, task._put = resolve, put  # type: ignore[method-assign]
        for _ in range(3):
            task.ask("x")
        await world.settle()
        gateway, (first, second, third) = coordinator.gateways[0], coordinator.replies
        third.answer()
        gateway.send_event_nowait("e")
        first.answer()
        gateway.send_event_nowait("f")
        second.fail("no")
        await world.settle()
        assert order == [("answer", 3), "event", ("answer", 1), "event", ("answer", 2)]


async def test_an_answer_that_is_there_before_the_reply_is_returned_leaves_with_the_return() -> None:  # H84
    async def immediately(subtask: int, attempt: int, request: Any) -> Reply:
        reply = Reply()
        reply.answer(request)
        coordinator.gateways[subtask].send_event_nowait("sent inside")
        await asyncio.sleep(0)
        assert not task.answers
        return reply

    coordinator = RecordingCoordinator(handle_request=immediately)
    async with running_tasks(1, coordinator) as (world, (task,)):
        task.ask("echo")
        await world.settle()
        assert task.answers == {1: "echo"}
        assert world.statistics.requests_deferred == 0


async def test_a_failed_reply_fails_the_request_with_its_text_or_its_exception() -> None:  # H84, H33
    coordinator = Deferring()
    async with running_tasks(1, coordinator) as (world, (task,)):
        for _ in range(3):
            task.ask("x")
        await world.settle()
        text, error, empty = coordinator.replies
        text.fail("no more work")
        try:
            raise ValueError("no such table")
        except ValueError as failure:
            error.fail(failure)
        empty.fail("")
        await world.settle()
        assert str(task.answers[1]) == "no more work"
        assert str(task.answers[2]) == "ValueError: no such table"
        assert b"Traceback" in task.tracebacks[2]
        assert str(task.answers[3])
        assert task.tracebacks[1] == b""
        assert not world.reports


@pytest.mark.parametrize("value", [object(), b"x" * DEFAULT_LIMITS.event_bytes_max], ids=["type", "size"])
async def test_an_answer_that_cannot_be_encoded_fails_the_request_and_not_the_job(value: Any) -> None:  # H84, H33
    async with an_open_request() as (world, task, coordinator):
        coordinator.replies[0].answer(value)
        await world.settle()
        assert "EventEncodeError" in str(task.answers[1])
        assert not world.reports
        task.send("still alive")
        await world.settle()
        assert coordinator.events == ["still alive"]


# --- wrong use ----------------------------------------------------------------------------------------------------


async def test_a_reply_is_settled_once() -> None:  # H84
    async with an_open_request() as (world, task, coordinator):
        (reply,) = coordinator.replies
        reply.answer(1)
        for again in (reply.answer, reply.fail):
            with pytest.raises(LocalProtocolError, match="settled already, and a request has one answer"):
                again("2")
        await world.settle()
        assert task.answers == {1: 1}


async def test_a_reply_belongs_to_one_request() -> None:  # H84
    only = Reply()

    async def the_same(subtask: int, attempt: int, request: Any) -> Reply:
        return only

    async with running_tasks(1, RecordingCoordinator(handle_request=the_same)) as (world, (task,)):
        task.ask("first")
        task.ask("second")
        await world.settle()
        only.answer("for the first")
        await world.settle()
        assert task.answers[1] == "for the first"
        assert "make a Reply() for each request" in str(task.answers[2])


async def test_another_thread_settles_through_the_loop() -> None:  # H84, H59
    async with an_open_request() as (world, task, coordinator):
        (reply,) = coordinator.replies
        errors: list[Exception] = []

        async def settle() -> None:
            reply.answer("through the loop")

        def elsewhere() -> None:
            try:
                reply.answer("from elsewhere")
            except LocalProtocolError as error:
                errors.append(error)
            coordinator.context.call_soon_threadsafe(settle)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        await world.settle()
        assert "call context.call_soon_threadsafe(handler)" in str(errors[0])
        assert task.answers == {1: "through the loop"}


async def test_a_reply_fails_with_an_exception_or_a_text() -> None:  # H84
    with pytest.raises(TypeError, match="error must be a BaseException or a str, not 3"):
        Reply().fail(3)  # type: ignore[arg-type]


async def test_a_lost_reply_fails_its_request_and_says_so(caplog: pytest.LogCaptureFixture) -> None:  # H84
    async def forget(subtask: int, attempt: int, request: Any) -> Reply:
        return Reply()

    async with running_tasks(1, RecordingCoordinator(handle_request=forget)) as (world, (task,)):
        task.ask("x")
        await world.settle()
        gc.collect()
        await world.settle()
        assert "the coordinator of operator 'words' has lost the Reply" in str(task.answers[1])
        assert world.statistics.replies_open == 0
    assert "has lost the Reply" in caplog.text


# --- who waits no more --------------------------------------------------------------------------------------------


async def test_the_replies_of_an_attempt_are_over_before_the_coordinator_hears_of_its_end() -> None:  # H85
    async def look(subtask: int, attempt: int, reason: FailureReason) -> None:
        seen.append([reply.over for reply in coordinator.replies])

    seen: list[list[bool]] = []
    coordinator = Deferring(subtask_failed=look)
    async with running_tasks(2, coordinator) as (world, (one, two)):
        one.ask("a")
        await world.settle()
        two.ask("b")
        await world.settle()
        world.fail(one)
        retry = world.accept(0)
        await world.settle()
        assert seen == [[True, False]]
        for reply in coordinator.replies:
            reply.answer("late for one of them")  # no effect there, and no error
        await world.settle()
        assert two.answers == {1: "late for one of them"}
        assert "the attempt is over" in str(one.answers[1])
        assert not retry.answers
        assert not world.reports
        assert world.statistics.replies_open == 0


@pytest.mark.parametrize("end", ["reset", "finish", "end_run"])
async def test_no_reply_of_a_task_outlives_its_run(end: str) -> None:  # H85
    async with an_open_request() as (world, task, coordinator):
        if end == "finish":
            world.finish(task)
        else:
            getattr(world, end)()
        await world.settle()
        assert coordinator.replies[0].over
        coordinator.replies[0].answer("to nobody")
        await world.settle()
        assert "to nobody" not in task.answers.values()
        assert not world.reports
        assert world.statistics.replies_open == 0


async def test_a_coordinator_that_was_replaced_settles_nothing() -> None:  # H85, G16
    made: list[Deferring] = []

    def make() -> Deferring:
        made.append(Deferring())
        return made[-1]

    async with running_operator(RecreateOnReset(make)) as world:
        (task,) = await world.running(0)
        task.ask("x")
        await world.settle()
        client = await world.ask_client_request("y")
        world.fail(task, reset=False)
        world.reset()
        await world.settle()
        assert all(reply.over for reply in made[0].replies)
        for reply in made[0].replies:
            reply.answer("too late")
        (error,) = client.errors
        assert isinstance(error, RequestFailed)
        assert "the coordinator of operator 'words' was reset" in str(error)
        (retry,) = await world.running(0)
        retry.ask("again")
        await world.settle()
        made[1].replies[0].answer("from the new one")
        await world.settle()
        assert retry.answers == {1: "from the new one"}


async def test_an_unanswered_reply_fails_when_the_coordinator_is_closed() -> None:  # H85
    async def in_close() -> None:
        coordinator.replies[0].answer("the last word")

    coordinator = Deferring(close=in_close)
    async with running_operator(coordinator) as world:
        answered = await world.ask_client_request("a")
        open_still = await world.ask_client_request("b")
        await world.stop()
        assert answered.values == ["the last word"]
        (error,) = open_still.errors
        assert isinstance(error, RequestFailed)
        assert "operator 'words' was closed before it answered" in str(error)
        assert coordinator.replies[1].over


# --- the driver's own code ----------------------------------------------------------------------------------------


async def test_the_drivers_own_code_may_wait_for_an_answer_too() -> None:  # H84, R97
    coordinator = Deferring()
    async with running_operator(coordinator) as world:
        answer, failed, refused = [await world.ask_client_request(number) for number in range(3)]
        cause = ValueError("no such table")
        coordinator.replies[0].answer(object)
        coordinator.replies[1].fail(cause)
        coordinator.replies[2].fail("not now")
        assert answer.values == [object]
        assert failed.errors == [cause]
        assert [(type(error), str(error)) for error in refused.errors] == [(RequestFailed, "not now")]
        assert (world.statistics.requests_deferred, world.statistics.replies_open) == (3, 0)


async def test_a_client_whose_time_is_over_waits_no_more() -> None:  # H85
    coordinator = Deferring()
    async with running_operator(coordinator) as world:
        answer = await world.ask_client_request("x")
        answer.fail(TimeoutError("after 30 s"))
        assert coordinator.replies[0].over
        coordinator.replies[0].answer("late")
        assert isinstance(answer.error, TimeoutError)


async def test_a_task_whose_time_is_over_waits_no_more_and_its_place_is_free() -> None:  # H85, H27
    coordinator = Deferring()
    async with running_tasks(1, coordinator, upward_events_max=3) as (world, (task,)):
        for number in range(3):
            task.ask(number)
        await world.settle()
        task.abandon(2)
        await world.settle()
        assert [reply.over for reply in coordinator.replies] == [False, True, False]
        assert world.statistics.replies_open == 2
        coordinator.replies[1].answer("late")  # has no effect
        await world.settle()
        task.ask("in its place")
        coordinator.replies[2].answer("here")
        await world.settle()
        assert task.answers[3] == "here"
        assert len(coordinator.replies) == 4


async def test_a_task_may_give_up_a_request_that_its_coordinator_has_not_taken_yet() -> None:  # H85, H5
    coordinator = Deferring()
    async with running_tasks(1, coordinator) as (world, (task,)):
        task.ask("in a hurry")
        task.abandon(1)
        await world.settle()
        (reply,) = coordinator.replies  # it had left, so it is handled
        assert reply.over
        assert world.statistics.replies_open == 0


async def test_a_late_reply_that_is_given_up_while_it_is_settled_is_answered_once() -> None:  # H85, H84
    async with an_open_request() as (world, task, coordinator):
        coordinator.replies[0].answer("crosses")
        task.abandon(1)
        await world.settle()
        assert task.answers == {1: "crosses"}
        assert world.statistics.messages_dropped == 0


async def test_the_drivers_code_that_really_asks_gets_the_answer_or_its_timeout() -> None:  # H84, H85
    coordinator = Deferring()
    async with running_operator(coordinator) as world:
        outcomes: list[Any] = []

        async def ask(request: str) -> None:
            try:
                build = partial(ClientRequest, request)
                outcomes.append((request, await world.tracker.ask(build, timeout_s=10.0)))
            except Exception as error:
                outcomes.append((request, error))

        async with anyio.create_task_group() as group:
            group.start_soon(ask, "answered")
            group.start_soon(ask, "too late")
            await world.settle()
            coordinator.replies[0].answer("here")
            await world.advance(10.0)
            assert outcomes[0] == ("answered", "here")
            assert isinstance(outcomes[1][1], AskTimeout)
            assert coordinator.replies[1].over
            coordinator.replies[1].answer("nobody hears this")


# --- checkpoints --------------------------------------------------------------------------------------------------


async def test_an_answer_after_the_cut_waits_for_the_acknowledgement_like_an_event() -> None:  # H84, H41
    async with an_open_request() as (world, task, coordinator):
        task.busy = True  # the barrier waits in its mailbox
        checkpoint = await world.checkpoint()
        coordinator.replies[0].answer("after the cut")
        coordinator.gateways[0].send_event_nowait("behind it")
        await world.settle()
        assert not task.answers
        task.busy = False
        await world.settle()
        assert checkpoint.values == [1]
        assert task.answers == {1: "after the cut"}
        assert task.events == ["behind it"]
        stored = world.stored[0].subtask_states[0]
        assert stored.held == ()  # the request was taken before the cut, so it is in neither part
        assert stored.events_sent == (1,)


async def test_an_answer_before_the_cut_is_confirmed_before_the_barrier() -> None:  # H84, H42
    async def settle_inside(checkpoint_id: int) -> bytes:
        coordinator.replies[0].answer("before the cut")
        return b"state"

    coordinator = Deferring(checkpoint_coordinator=settle_inside)
    async with running_tasks(1, coordinator) as (world, (task,)):
        task.ask("x")
        await world.settle()
        await world.checkpoint()
        assert task.answers == {1: "before the cut"}
        assert task.handled == [("snapshot", 1), ("completed", 1)]


async def test_nobody_waits_for_the_answer_to_a_restored_request() -> None:  # H85, H73
    held = (HeldEvent(0, b"\xa3ask", True),)
    restored = CompletedCheckpoint(7, 1, b"state", {0: SubtaskSnapshot((), held, ())})
    coordinator = Deferring()
    async with running_tasks(1, coordinator, parallelism=1, restored=restored) as (world, (task,)):
        await world.settle()
        assert coordinator.calls_of("handle_request") == [("handle_request", 0, 0, "ask")]
        assert coordinator.replies[0].over
        coordinator.replies[0].answer("to nobody")
        await world.settle()
        assert not task.answers
        assert world.statistics.requests_deferred == 0


# --- bounds and figures -------------------------------------------------------------------------------------------


async def test_the_window_bounds_the_open_replies_of_an_attempt() -> None:  # H84, H27
    coordinator = Deferring()
    async with running_tasks(1, coordinator, upward_events_max=3) as (world, (task,)):
        for number in range(3):
            task.ask(number)
            await world.settle()
        with pytest.raises(LocalProtocolError, match="3 open requests"):
            task.ask("one more")
        task.send("events still pass, because the requests are taken")
        await world.settle()
        assert len(coordinator.events) == 1
        coordinator.replies[1].answer()
        await world.settle()
        task.ask("capacity again")
        await world.settle()
        assert world.statistics.replies_open == 3


async def test_figures_tell_deferred_requests_from_answered_ones() -> None:  # H84
    async with an_open_request() as (world, _, coordinator):
        assert (world.statistics.requests_deferred, world.statistics.replies_open) == (1, 1)
        await world.advance(60.0)
        coordinator.replies[0].answer()
        await world.settle()
        assert world.statistics.request_us.count == 0  # how long it took is the user's decision
        assert world.statistics.replies_open == 0


async def test_an_open_reply_is_not_a_stuck_method(caplog: pytest.LogCaptureFixture) -> None:  # H84, H70
    async with an_open_request() as (world, task, _):
        await world.advance(3600.0)
        assert "has not returned" not in caplog.text
        assert not task.notes
        assert not world.reports


async def test_a_view_of_the_gateways_tells_since_when_a_task_waits_for_an_answer_and_who_has_to_give_it() -> None:
    """H87: the coordinator's method has not returned yet, or has deferred the answer."""
    may_return = asyncio.Event()

    class Slow(Deferring):
        async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
            await may_return.wait()
            return await super().handle_request(subtask, attempt, request)

    async def waits_since() -> tuple[float | None, float | None]:
        answer = Answer()
        world.tracker.tell(ViewGateways(cast("Any", answer), [task.attempt.task_attempt_id]))
        await world.settle()
        ((view,),) = answer.values
        return view.requested_at, view.deferred_at

    coordinator = Slow()
    async with running_tasks(1, coordinator) as (world, (task,)):
        assert await waits_since() == (None, None)
        began = world.kit.clock.now()
        task.ask("a question")
        await world.settle()
        await world.advance(3.0)
        assert await waits_since() == (began, None)
        may_return.set()
        await world.settle()
        assert await waits_since() == (None, began)
        coordinator.replies[0].answer("an answer")
        await world.settle()
        assert await waits_since() == (None, None)
