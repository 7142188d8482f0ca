"""What an operator can do (H21, H27, H33)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from protocol.codec import decode_event, encode_event
from protocol.errors import EventEncodeError, LocalProtocolError
from protocol.messages import AnswerMessage, AttemptEnded, Confirm, EventMessage, RequestMessage
from spark_bridge.subtask import AttemptOver, RequestFailed, SubtaskContext, TimedOut
from tests.spark_bridge.subtask.operators import Calling, Recorder
from tests.spark_bridge.subtask.peer import TASK_ID, Peer, RunningTask


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
        peer.take_task(window_events=1)
        assert isinstance(task.error(), TimedOut)


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
        from tests.spark_bridge.subtask.peer import registered

        connection.send(registered(), connection.event(1, "x"))
        connection.confirmed(1)
        connection.receive()
        connection.finish()
        task.outputs()
    assert len(failures) == 1
    assert "own thread" in str(failures[0])


def test_handling_pending_items_does_not_wait() -> None:
    with Peer() as peer:
        task = RunningTask(lambda: Calling(lambda context: context.handle_pending()), peer.endpoint())
        peer.take_task().finish()
        assert task.outputs() == [0]
