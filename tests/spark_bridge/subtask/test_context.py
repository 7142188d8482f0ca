# SPDX-License-Identifier: Apache-2.0

"""The operations that an operator's context offers (H21, H27, H33)."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from protocol.errors import EventEncodeError, LocalProtocolError
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import (
    AnswerMessage,
    AttemptEnded,
    Confirm,
    CoordinatorAwaited,
    EventMessage,
    Opened,
    Register,
    RequestCancelled,
    RequestMessage,
)
from spark_bridge.subtask import AttemptOver, RequestFailed, SubtaskContext, TimedOut
from tests.spark_bridge.subtask.operators import Calling, Recorder
from tests.spark_bridge.subtask.peer import TASK_ID, Peer, barrier, registered


def test_an_answer_resolves_its_request(peer: Peer) -> None:  # H33
    task, connection = peer.run(Calling(lambda context: context.request("which?")))
    request = connection.expect(RequestMessage)
    assert decode_event(request.payload) == "which?"
    connection.answer(1, request, {"split": 4})
    assert peer.finish(task) == [{"split": 4}]


def test_an_answer_that_is_an_error_is_raised_with_its_text(peer: Peer) -> None:  # H33
    def body(context: SubtaskContext) -> str:
        with pytest.raises(RequestFailed, match="no such table"):
            context.request("which?")
        return "went on"

    task, connection = peer.run(Calling(body))
    request = connection.expect(RequestMessage)
    connection.send(AnswerMessage(TASK_ID, 1, request.request_id, "no such table", b""))
    connection.confirmed(1)
    assert peer.finish(task) == ["went on"]


def test_a_failed_request_has_the_coordinators_traceback_as_its_cause(peer: Peer) -> None:  # H33
    def body(context: SubtaskContext) -> list[str]:
        with pytest.raises(RequestFailed, match=r"^no such table$") as raised:
            context.request("which?")
        return traceback.format_exception(raised.value)

    task, connection = peer.run(Calling(body))
    request = connection.expect(RequestMessage)
    told = "Traceback ...\n  in handle_request\nKeyError: \xe4".encode()
    connection.send(AnswerMessage(TASK_ID, 1, request.request_id, "no such table", told + b"\xff"))
    connection.confirmed(1)
    (lines,) = peer.finish(task)
    shown = "".join(lines)
    assert "The coordinator's traceback, on the driver:\nTraceback ...\n  in handle_request\nKeyError: \xe4" in shown
    assert shown.endswith("RequestFailed: no such table\n")


def test_a_request_without_an_answer_times_out_and_a_late_answer_is_dropped(peer: Peer) -> None:  # H33, H48
    def body(context: SubtaskContext) -> Any:
        with pytest.raises(TimedOut, match=r"no answer to request 1 within 0\.05 s"):
            context.request("first", timeout_s=0.05)
        return context.request("second")

    task, connection = peer.run(Calling(body))
    first, cancelled = connection.expect(RequestMessage), connection.expect(RequestCancelled)
    assert cancelled.request_id == first.request_id
    second = connection.expect(RequestMessage)
    connection.send(
        AnswerMessage(TASK_ID, 1, first.request_id, "", encode_event("late")),
        AnswerMessage(TASK_ID, 2, second.request_id, "", encode_event("in time")),
    )
    connection.confirmed(2)
    assert peer.finish(task) == ["in time"]


def test_requests_that_timed_out_give_their_places_back(peer: Peer) -> None:  # H85, H27
    """Ten times the window of requests without an answer, and then one with an answer."""

    def body(context: SubtaskContext) -> Any:
        for number in range(20):
            with pytest.raises(TimedOut, match="no answer to request"):
                context.request(number, timeout_s=0.001)
            context.wait_for_event()  # its place is free
        return context.request("the last")

    task, connection = peer.run(Calling(body), answer={"window_events": 2})
    for number in range(20):
        request = connection.next_item(RequestMessage)
        cancelled = connection.next_item(RequestCancelled)
        assert (decode_event(request.payload), cancelled.request_id) == (number, request.request_id)
        nothing = AnswerMessage(TASK_ID, 2 * number + 1, request.request_id, "nobody waits", b"")
        connection.send(Confirm(TASK_ID, cancelled.seq), nothing, connection.event(2 * number + 2, "go on"))
    request = connection.next_item(RequestMessage)
    connection.answer(41, request, "still here")
    assert peer.finish(task) == ["still here"]


def test_an_interrupted_request_is_cancelled_as_one_that_timed_out(peer: Peer) -> None:  # H85
    """Whatever ends the wait: here the snapshot that has to be taken inside it."""

    class Failing(Recorder):
        snapshot_anywhere = True

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            with pytest.raises(ZeroDivisionError):
                self.context.request("first")
            yield "went on"

        def snapshot_state(self, checkpoint_id: int) -> bytes:
            if checkpoint_id == 5:
                raise ZeroDivisionError
            return b""

    task, connection = peer.run(Failing, answer={"hold_events": False})
    request = connection.next_item(RequestMessage)
    connection.send(barrier(1, 5, 0))
    assert connection.next_item(RequestCancelled).request_id == request.request_id
    assert peer.finish(task) == ["went on"]


WAITING = CoordinatorAwaited(TASK_ID, "handle_request(subtask=1, attempt=0)", 29.0, "jobs.py:31 in meet")


@pytest.mark.parametrize("returned", [False, True])
def test_a_request_that_times_out_says_what_the_coordinator_still_waits_for(peer: Peer, returned: bool) -> None:  # H70
    def body(context: SubtaskContext) -> Any:
        context.wait_for_event()  # the notes are also here
        with pytest.raises(TimedOut) as raised:
            context.request("first", timeout_s=0.05)
        return str(raised.value)

    task, connection = peer.run(Calling(body))
    notes = [WAITING, CoordinatorAwaited(TASK_ID, "", 0.0, "")] if returned else [WAITING]
    connection.send(*notes, connection.event(1, "go on"))
    connection.confirmed(1)
    connection.expect(RequestMessage)
    connection.next_item(RequestCancelled)
    (text,) = peer.finish(task)
    call = r"handle_request\(subtask=1, attempt=0\)"
    busy = r": the coordinator is busy with .* a Reply that nothing has answered\. .*a longer timeout_s"
    blamed = busy if returned else rf": the coordinator has been in {call} for \d+ s, waiting at jobs\.py:31 in meet"
    assert re.fullmatch(rf"no answer to request 1 within 0\.05 s{blamed}", text)


def test_a_full_window_makes_the_sender_wait_until_there_is_capacity(peer: Peer) -> None:  # H27
    def body(context: SubtaskContext) -> None:
        for number in range(6):
            context.send_event(number)

    task, connection = peer.run(Calling(body), answer={"window_events": 2})
    for number in range(6):
        event = connection.expect(EventMessage)
        assert decode_event(event.payload) == number
        connection.send(Confirm(TASK_ID, event.seq))
    peer.finish(task)


def test_a_window_that_stays_full_is_an_error_in_time(peer: Peer) -> None:  # H27, H48
    def body(context: SubtaskContext) -> None:
        context.send_event("fits")
        context.send_event("does not")

    task, connection = peer.run(Calling(body), send_timeout_s=0.05, failure_timeout_s=0.05, answer={"window_events": 1})
    connection.send(WAITING)
    with pytest.raises(TimedOut, match=r"no capacity to send within 0\.05 s"):
        task.outputs()


def test_an_event_is_encoded_immediately(peer: Peer) -> None:  # H21
    def body(context: SubtaskContext) -> None:
        event = {"state": "as it was"}
        context.send_event(event)
        event["state"] = "changed"
        with pytest.raises(EventEncodeError):
            context.send_event(object())

    task, connection = peer.run(Calling(body))
    assert decode_event(connection.expect(EventMessage).payload) == {"state": "as it was"}
    peer.finish(task)


@pytest.mark.parametrize(
    "call", [lambda context: context.wait_for_event(timeout_s=0.01), SubtaskContext.handle_pending]
)
def test_waiting_for_an_event_has_a_deadline_and_handling_pending_items_does_not_wait(
    peer: Peer, call: Callable[[SubtaskContext], int]
) -> None:  # H48
    task, _ = peer.run(Calling(call))
    assert peer.finish(task) == [0]


@pytest.mark.parametrize("waits", ["request", "send", "finish"])
def test_a_waiting_caller_learns_immediately_that_the_attempt_is_over(peer: Peer, waits: str) -> None:  # H26
    def body(context: SubtaskContext) -> None:
        context.send_event("first")
        if waits == "request":
            context.request("never answered", timeout_s=1000)
        elif waits == "send":
            context.send_event("no capacity")

    task, connection = peer.run(
        Calling(body),
        send_timeout_s=1000,
        finish_timeout_s=1000,
        answer={"window_events": 2 if waits == "request" else 1},
    )
    connection.expect(EventMessage)
    if waits == "request":
        connection.expect(RequestMessage)
    connection.send(AttemptEnded(TASK_ID, "killed"))
    assert isinstance(task.error(), AttemptOver)


def test_the_mailbox_cannot_be_entered_from_inside_a_handler_or_another_thread(peer: Peer) -> None:  # H5
    outside: list[BaseException | None] = []

    class Nesting(Recorder):
        def handle_event(self, event: Any) -> None:
            for call in (self.context.wait_for_event, self.context.handle_pending):
                with pytest.raises(LocalProtocolError, match="inside handle_event"):
                    call()
            with ThreadPoolExecutor(1) as pool:
                outside.append(pool.submit(self.context.handle_pending).exception())

    task = peer.start(Nesting)
    connection = peer.accept()
    connection.expect(Register)
    connection.send(registered(), connection.event(1, "x"))  # together: the task may end as soon as it is accepted
    connection.confirmed(1)
    connection.receive()
    peer.finish(task)
    assert isinstance(outside[0], LocalProtocolError)
    assert "own thread" in str(outside[0])


@pytest.mark.parametrize("call", ["request", "wait_for_event", "handle_pending"])
def test_what_would_wait_for_the_coordinator_inside_open_is_refused_immediately(peer: Peer, call: str) -> None:  # H67
    calls: dict[str, Callable[[SubtaskContext], object]] = {
        "request": lambda context: context.request("which?"),
        "wait_for_event": lambda context: context.wait_for_event(),
        "handle_pending": lambda context: context.handle_pending(),
    }

    class Impatient(Recorder):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            calls[call](context)

    task = peer.start(Impatient)
    connection = peer.register()
    failure = connection.finish().failure
    assert failure.startswith(f"LocalProtocolError: {call}() cannot be used inside open()")
    assert "in process()" in failure
    assert "subtask_ready()" in failure
    assert isinstance(task.error(), LocalProtocolError)


def test_an_operator_may_ask_again_outside_of_open(peer: Peer) -> None:  # H67: a refusal leaves nothing behind
    class Curious(Recorder):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            super().open(context, state)
            with pytest.raises(LocalProtocolError):
                context.request("too early")

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            yield self.context.request("now")

    task, connection = peer.run(Curious)
    request = connection.expect(RequestMessage)
    assert decode_event(request.payload) == "now"
    connection.answer(1, request, "yes")
    assert peer.finish(task) == ["yes"]


def test_what_open_sends_leaves_and_is_refused_immediately_when_the_window_is_full(peer: Peer) -> None:  # H67, H27
    class Announcing(Recorder):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            context.send_event("I am here")
            with pytest.raises(LocalProtocolError, match=r"no capacity inside open\(\).*Send the rest in process\(\)"):
                context.send_event("no capacity")

    task = peer.start(Announcing, send_timeout_s=1000)
    connection = peer.register(window_events=1)
    assert decode_event(connection.expect(EventMessage).payload) == "I am here"
    opened = connection.expect(Opened)
    connection.send(Confirm(TASK_ID, opened.seq))
    peer.finish(task)
