# SPDX-License-Identifier: Apache-2.0

"""The operations that an operator's context offers (H21, H27, H33)."""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Callable, Iterator
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
    RequestMessage,
)
from spark_bridge.subtask import AttemptOver, RequestFailed, SubtaskContext, TimedOut
from tests.spark_bridge.subtask.operators import Calling, Recorder
from tests.spark_bridge.subtask.peer import TASK_ID, Peer, RunningTask, registered


def test_an_answer_resolves_its_request() -> None:  # H33
    with Peer() as peer:
        task = RunningTask(lambda: Calling(lambda context: context.request("which?")), peer.endpoint())
        connection = peer.take_task()
        request = connection.expect(RequestMessage)
        assert decode_event(request.payload) == "which?"
        connection.send(AnswerMessage(TASK_ID, 1, request.request_id, "", encode_event({"split": 4})))
        connection.confirmed(1)
        connection.finish()
        assert task.outputs() == [{"split": 4}]


def test_an_answer_that_is_an_error_is_raised_with_its_text() -> None:  # H33
    def body(context: SubtaskContext) -> str:
        with pytest.raises(RequestFailed, match="no such table"):
            context.request("which?")
        return "went on"

    with Peer() as peer:
        task = RunningTask(lambda: Calling(body), peer.endpoint())
        connection = peer.take_task()
        request = connection.expect(RequestMessage)
        connection.send(AnswerMessage(TASK_ID, 1, request.request_id, "no such table", b""))
        connection.confirmed(1)
        connection.finish()
        assert task.outputs() == ["went on"]


def test_a_failed_request_has_the_coordinators_traceback_as_its_cause() -> None:  # H33
    def body(context: SubtaskContext) -> list[str]:
        with pytest.raises(RequestFailed, match=r"^no such table$") as raised:
            context.request("which?")
        return traceback.format_exception(raised.value)

    with Peer() as peer:
        task = RunningTask(lambda: Calling(body), peer.endpoint())
        connection = peer.take_task()
        request = connection.expect(RequestMessage)
        told = "Traceback ...\n  in handle_request\nKeyError: \xe4".encode()
        connection.send(AnswerMessage(TASK_ID, 1, request.request_id, "no such table", told + b"\xff"))
        connection.confirmed(1)
        connection.finish()
        (lines,) = task.outputs()
    shown = "".join(lines)
    assert "The coordinator's traceback, on the driver:\nTraceback ...\n  in handle_request\nKeyError: \xe4" in shown
    assert shown.endswith("RequestFailed: no such table\n")


def test_a_request_without_an_answer_times_out_and_a_late_answer_is_dropped() -> None:  # H33, H48
    def body(context: SubtaskContext) -> Any:
        with pytest.raises(TimedOut, match=r"no answer to request 1 within 0\.05 s"):
            context.request("first", timeout_s=0.05)
        return context.request("second")

    with Peer() as peer:
        task = RunningTask(lambda: Calling(body), peer.endpoint())
        connection = peer.take_task()
        first, second = connection.expect(RequestMessage), connection.expect(RequestMessage)
        connection.send(
            AnswerMessage(TASK_ID, 1, first.request_id, "", encode_event("late")),
            AnswerMessage(TASK_ID, 2, second.request_id, "", encode_event("in time")),
        )
        connection.confirmed(2)
        connection.finish()
        assert task.outputs() == ["in time"]


WAITING = CoordinatorAwaited(TASK_ID, "handle_request(subtask=1, attempt=0)", 29.0, "jobs.py:31 in meet")


def test_a_request_that_times_out_says_what_the_coordinator_waits_for() -> None:  # H70
    def body(context: SubtaskContext) -> Any:
        context.wait_for_event()  # the note is also here
        with pytest.raises(TimedOut) as raised:
            context.request("first", timeout_s=0.05)
        return str(raised.value)

    with Peer() as peer:
        task = RunningTask(lambda: Calling(body), peer.endpoint())
        connection = peer.take_task()
        connection.send(WAITING, EventMessage(TASK_ID, 1, encode_event("go on")))
        connection.confirmed(1)
        connection.expect(RequestMessage)
        connection.finish()
        (text,) = task.outputs()
    assert re.fullmatch(
        r"no answer to request 1 within 0\.05 s: the coordinator has been in handle_request\(subtask=1, attempt=0\) "
        r"for \d+ s, waiting at jobs\.py:31 in meet",
        text,
    )


def test_a_method_that_has_returned_is_not_blamed_for_a_timeout() -> None:  # H70
    def body(context: SubtaskContext) -> Any:
        context.wait_for_event()
        with pytest.raises(TimedOut) as raised:
            context.request("first", timeout_s=0.05)
        return str(raised.value)

    with Peer() as peer:
        task = RunningTask(lambda: Calling(body), peer.endpoint())
        connection = peer.take_task()
        returned = CoordinatorAwaited(TASK_ID, "", 0.0, "")
        connection.send(WAITING, returned, EventMessage(TASK_ID, 1, encode_event("go on")))
        connection.confirmed(1)
        connection.expect(RequestMessage)
        connection.finish()
        assert task.outputs() == ["no answer to request 1 within 0.05 s"]


def test_a_full_window_makes_the_sender_wait_until_there_is_room() -> None:  # H27
    def body(context: SubtaskContext) -> None:
        for number in range(6):
            context.send_event(number)

    with Peer() as peer:
        task = RunningTask(lambda: Calling(body), peer.endpoint())
        connection = peer.take_task(window_events=2)
        for number in range(6):
            event = connection.expect(EventMessage)
            assert decode_event(event.payload) == number
            connection.send(Confirm(TASK_ID, event.seq))
        connection.finish()
        task.outputs()


def test_a_window_that_stays_full_is_an_error_in_time() -> None:  # H27, H48
    def body(context: SubtaskContext) -> None:
        context.send_event("fits")
        context.send_event("does not")

    with Peer() as peer:
        task = RunningTask(lambda: Calling(body), peer.endpoint(send_timeout_s=0.05, failure_timeout_s=0.05))
        connection = peer.take_task(window_events=1)
        connection.send(WAITING)
        error = task.error()
        assert isinstance(error, TimedOut)
        assert "no room to send within 0.05 s" in str(error)


def test_an_event_is_encoded_at_once() -> None:  # H21
    def body(context: SubtaskContext) -> None:
        event = {"state": "as it was"}
        context.send_event(event)
        event["state"] = "changed"
        with pytest.raises(EventEncodeError):
            context.send_event(object())

    with Peer() as peer:
        task = RunningTask(lambda: Calling(body), peer.endpoint())
        connection = peer.take_task()
        assert decode_event(connection.expect(EventMessage).payload) == {"state": "as it was"}
        connection.finish()
        task.outputs()


def test_waiting_for_an_event_has_a_deadline() -> None:  # H48
    with Peer() as peer:
        task = RunningTask(lambda: Calling(lambda context: context.wait_for_event(timeout_s=0.01)), peer.endpoint())
        peer.take_task().finish()
        assert task.outputs() == [False]


@pytest.mark.parametrize("waits", ["request", "send", "finish"])
def test_whoever_waits_learns_at_once_that_the_attempt_is_over(waits: str) -> None:  # H26
    def body(context: SubtaskContext) -> None:
        context.send_event("first")
        if waits == "request":
            context.request("never answered", timeout_s=1000)
        elif waits == "send":
            context.send_event("no room")

    with Peer() as peer:
        task = RunningTask(lambda: Calling(body), peer.endpoint(send_timeout_s=1000, finish_timeout_s=1000))
        connection = peer.take_task(window_events=2 if waits == "request" else 1)
        connection.expect(EventMessage)
        if waits == "request":
            connection.expect(RequestMessage)
        connection.send(AttemptEnded(TASK_ID, "killed"))
        assert isinstance(task.error(), AttemptOver)


def test_the_mailbox_cannot_be_entered_from_inside_a_handler_or_another_thread() -> None:  # H5
    failures: list[BaseException] = []

    class Nesting(Recorder):
        def handle_event(self, event: Any) -> None:
            for call in (self.context.wait_for_event, self.context.handle_pending):
                with pytest.raises(LocalProtocolError, match="inside handle_event"):
                    call()
            thread = threading.Thread(target=self._elsewhere)
            thread.start()
            thread.join()

        def _elsewhere(self) -> None:
            try:
                self.context.handle_pending()
            except LocalProtocolError as error:
                failures.append(error)

    operator = Nesting()
    with Peer() as peer:
        task = RunningTask(lambda: operator, peer.endpoint())
        connection = peer.accept()
        connection.receive()
        connection.send(registered(), connection.event(1, "x"))
        connection.confirmed(1)
        connection.receive()
        connection.finish()
        task.outputs()
    assert len(failures) == 1
    assert "own thread" in str(failures[0])


@pytest.mark.parametrize("call", ["request", "wait_for_event", "handle_pending"])
def test_what_would_wait_for_the_coordinator_inside_open_is_refused_at_once(call: str) -> None:  # H67
    calls: dict[str, Callable[[SubtaskContext], object]] = {
        "request": lambda context: context.request("which?"),
        "wait_for_event": lambda context: context.wait_for_event(),
        "handle_pending": lambda context: context.handle_pending(),
    }

    class Impatient(Recorder):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            calls[call](context)

    with Peer() as peer:
        task = RunningTask(Impatient, peer.endpoint())
        connection = peer.accept()
        connection.expect(Register)
        connection.send(registered())
        failure = connection.finish().failure
        assert failure.startswith(f"LocalProtocolError: {call}() cannot be used inside open()")
        assert "in process()" in failure
        assert "subtask_ready()" in failure
        assert isinstance(task.error(), LocalProtocolError)


def test_an_operator_may_ask_again_outside_of_open() -> None:  # H67: a refusal leaves nothing behind
    class Curious(Recorder):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            super().open(context, state)
            with pytest.raises(LocalProtocolError):
                context.request("too early")

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            yield self.context.request("now")

    with Peer() as peer:
        task = RunningTask(Curious, peer.endpoint())
        connection = peer.take_task()
        request = connection.expect(RequestMessage)
        assert decode_event(request.payload) == "now"
        connection.send(AnswerMessage(TASK_ID, 1, request.request_id, "", encode_event("yes")))
        connection.confirmed(1)
        connection.finish()
        assert task.outputs() == ["yes"]


def test_what_open_sends_leaves_and_is_refused_at_once_when_the_window_is_full() -> None:  # H67, H27
    class Announcing(Recorder):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            context.send_event("I am here")
            with pytest.raises(LocalProtocolError, match=r"no room inside open\(\).*Send the rest in process\(\)"):
                context.send_event("no room")

    with Peer() as peer:
        task = RunningTask(Announcing, peer.endpoint(send_timeout_s=1000))
        connection = peer.accept()
        connection.expect(Register)
        connection.send(registered(window_events=1))
        assert decode_event(connection.expect(EventMessage).payload) == "I am here"
        opened = connection.expect(Opened)
        connection.send(Confirm(TASK_ID, opened.seq))
        connection.finish()
        task.outputs()


def test_handling_pending_items_does_not_wait() -> None:
    with Peer() as peer:
        task = RunningTask(lambda: Calling(lambda context: context.handle_pending()), peer.endpoint())
        peer.take_task().finish()
        assert task.outputs() == [0]
