# SPDX-License-Identifier: Apache-2.0

"""Requests of coroutines: many at the same time, none of which stops the loop or keeps a place that it does not use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from protocol.errors import AttemptOver, LocalProtocolError
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import (
    AnswerMessage,
    AttemptEnded,
    Confirm,
    OperatorPart,
    RequestCancelled,
    RequestMessage,
)
from spark_bridge.subtask import RequestFailed, SubtaskContext, TimedOut
from spark_bridge.subtask.context import QUESTIONS
from tests.spark_bridge.subtask.operators import Calling
from tests.spark_bridge.subtask.peer import TASK_ID, Peer


def awaiting(body: Callable[[SubtaskContext], Any]) -> Calling:
    """An operator that runs a coroutine of its context on a loop in its thread."""
    return Calling(lambda context: asyncio.run(body(context)))


async def failure(awaitable: Any) -> BaseException:
    try:
        await awaitable
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def test_answers_find_their_coroutines_in_any_order(peer: Peer) -> None:  # H33
    async def ask(context: SubtaskContext) -> Any:
        return await asyncio.gather(*(context.request_async(number) for number in range(100)))

    task, connection = peer.run(awaiting(ask))
    requests = [connection.next_item(RequestMessage) for _ in range(100)]
    for seq, request in enumerate(reversed(requests), 1):
        connection.send(
            AnswerMessage(TASK_ID, seq, request.request_id, "", encode_event(-decode_event(request.payload)))
        )
    assert peer.finish(task) == [[-number for number in range(100)]]


def test_a_question_is_outside_of_checkpoints_and_names_the_part_that_asks(peer: Peer) -> None:  # H152
    async def ask(context: SubtaskContext) -> Any:
        return await context.request_async("which?")

    task = peer.start(awaiting(ask))
    connection = peer.take_task(parts=(OperatorPart(""), OperatorPart(QUESTIONS, outside=True)))
    request = connection.next_item(RequestMessage)
    assert (request.part, decode_event(request.payload)) == (1, [0, "which?"])
    connection.send(AnswerMessage(TASK_ID, 1, request.request_id, "", encode_event("that one")))
    assert peer.finish(task) == ["that one"]


def test_a_failure_has_the_coordinators_words_and_traceback(peer: Peer) -> None:  # H33
    async def ask(context: SubtaskContext) -> str:
        error = await failure(context.request_async("which?"))
        assert isinstance(error, RequestFailed)
        return f"{error} {error.__cause__}"

    task, connection = peer.run(awaiting(ask))
    request = connection.next_item(RequestMessage)
    connection.send(AnswerMessage(TASK_ID, 1, request.request_id, "no such table", b"in handle_request"))
    (text,) = peer.finish(task)
    assert text.startswith("no such table")
    assert text.endswith("in handle_request")


def test_more_than_the_window_wait_for_their_turn_and_all_leave(peer: Peer) -> None:  # H27
    async def ask(context: SubtaskContext) -> Any:
        return sum(await asyncio.gather(*(context.request_async(1) for _ in range(50))))

    task, connection = peer.run(awaiting(ask), answer={"window_events": 8})
    for number in range(1, 51):
        request = connection.next_item(RequestMessage)
        connection.send(Confirm(TASK_ID, request.seq))
        connection.send(AnswerMessage(TASK_ID, number, request.request_id, "", encode_event(1)))
    assert peer.finish(task) == [50]


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
def test_one_that_is_given_up_gives_its_place_back(peer: Peer, how: str) -> None:  # H85, Q1
    async def ask(context: SubtaskContext) -> Any:
        for number in range(20):
            if how == "timed out":
                with pytest.raises(TimedOut, match=r"no answer to a request within 0\.001 s"):
                    await context.request_async(number, timeout_s=0.001)
            else:
                with anyio.move_on_after(0.001) as scope:
                    await context.request_async(number)
                assert scope.cancelled_caught
        return await context.request_async("the last")

    task, connection = peer.run(awaiting(ask), answer={"window_events": 4})
    number = seq = 0
    while True:
        item = connection.receive()
        if isinstance(item, RequestMessage | RequestCancelled):
            connection.send(Confirm(TASK_ID, item.seq))
        if isinstance(item, RequestCancelled):
            number, seq = number + 1, seq + 1
            connection.send(AnswerMessage(TASK_ID, seq, item.request_id, "nobody waits", b""))
        elif isinstance(item, RequestMessage) and decode_event(item.payload) == "the last":
            connection.send(AnswerMessage(TASK_ID, seq + 1, item.request_id, "", encode_event("still here")))
            break
    assert peer.finish(task) == ["still here"]
    assert 0 < number <= 20  # one that was given up before it left was never sent


def test_those_that_wait_end_with_the_attempt_wherever_its_thread_is(peer: Peer) -> None:  # H26
    outcomes: list[BaseException] = []

    def body(context: SubtaskContext) -> None:
        async def ask() -> None:
            outcomes.extend(await asyncio.gather(*(failure(context.request_async(number)) for number in range(3))))

        asking = threading.Thread(target=asyncio.run, args=(ask(),))
        asking.start()
        asking.join(60.0)  # the task's thread is away, and uses nothing of Headgate
        assert not asking.is_alive()

    task, connection = peer.run(Calling(body))
    for _ in range(3):
        connection.next_item(RequestMessage)
    connection.send(AttemptEnded(TASK_ID, "superseded"))
    with pytest.raises(AttemptOver, match="superseded"):
        task.outputs()
    assert [type(one) for one in outcomes] == [AttemptOver] * 3


def test_the_blocking_form_names_the_awaitable_one(peer: Peer) -> None:
    async def ask(context: SubtaskContext) -> None:
        with pytest.raises(LocalProtocolError, match=r"use `await request_async\(\.\.\.\)`"):
            context.request("which?")

    task, _ = peer.run(awaiting(ask))
    peer.finish(task)
