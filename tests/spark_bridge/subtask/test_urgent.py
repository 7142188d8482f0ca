# SPDX-License-Identifier: Apache-2.0

"""Urgent events in a task: real threads, over a real connection (H90 to H93)."""

from __future__ import annotations

import gc
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from protocol.errors import LocalProtocolError
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import (
    AttemptEnded,
    CheckpointAcknowledged,
    Confirm,
    EventMessage,
    Opened,
    StartProcessing,
    UrgentEventMessage,
)
from spark_bridge.subtask import AttemptOver, SubtaskContext
from tests.spark_bridge.subtask.operators import Calling, EventSource, Recorder, channel_of
from tests.spark_bridge.subtask.peer import PATIENCE_S, TASK_ID, Peer, PeerConnection, barrier
from tests.spark_bridge.subtask.reading import until


class Steered(Calling):
    """Runs a function of the test; ``act`` handles each urgent event."""

    def __init__(self, body: Callable[[SubtaskContext], Any], act: Callable[[Any], None] = lambda event: None) -> None:
        super().__init__(body)
        self._act = act

    def handle_urgent(self, event: Any) -> None:
        self.calls.append(("urgent", event))
        self._act(event)


def urgent(seq: int, value: Any, part: int = 0) -> UrgentEventMessage:
    return UrgentEventMessage(TASK_ID, seq, encode_event(value), part)


def send_urgent(connection: PeerConnection, seq: int, value: Any) -> None:
    connection.send(urgent(seq, value))
    connection.confirmed(seq)


def test_task_blocked_in_foreign_code_is_freed_by_an_urgent_event(
    peer: Peer, until_it_waits: Callable[[Recorder], None]
) -> None:  # H90
    ours, theirs = socket.socketpair()

    def block(context: SubtaskContext) -> bytes:
        context.wait_for_event()
        return ours.recv(1)  # as a collective does: in C, without the interpreter lock

    operator = Steered(block, lambda event: ours.shutdown(socket.SHUT_RDWR))
    task, connection = peer.run(operator)
    until_it_waits(operator)
    connection.send_events(1, "go")
    send_urgent(connection, 2, "stop")
    assert peer.finish(task) == [b""]
    assert ("urgent", "stop") in operator.calls
    ours.close()
    theirs.close()


def test_urgent_events_overtake_the_mailbox_and_keep_their_order(peer: Peer) -> None:  # H91
    seen: queue.Queue[Any] = queue.Queue()
    go = threading.Event()

    def body(context: SubtaskContext) -> list[Any]:
        first = [seen.get(timeout=PATIENCE_S) for _ in range(3)]
        go.wait(PATIENCE_S)
        context.handle_pending()
        return first

    operator = Steered(body, seen.put)
    task, connection = peer.run(operator)
    connection.send(connection.event(1, "a"), urgent(2, 1), connection.event(3, "b"), urgent(4, 2), urgent(5, 3))
    connection.confirmed(5)
    go.set()
    assert peer.finish(task) == [[1, 2, 3]]
    assert [event for event in operator.calls if event[0] == "event"] == [("event", "a"), ("event", "b")]


def test_no_event_that_was_sent_later_is_handled_before_an_urgent_one_begins(peer: Peer) -> None:  # H91
    begun, go = threading.Semaphore(0), threading.Semaphore(0)

    def act(event: Any) -> None:
        begun.release()
        assert go.acquire(timeout=PATIENCE_S)

    def body(context: SubtaskContext) -> Any:
        assert begun.acquire(timeout=PATIENCE_S)
        assert not context.wait_for_event(timeout_s=0.05)  # after the second urgent event, which has not begun
        before = list(operator.calls)
        go.release()
        while ("event", "later") not in operator.calls:
            context.wait_for_event()
        go.release()
        return [call for call in before if call[0] == "event"]

    operator = Steered(body, act)
    task, connection = peer.run(operator)
    connection.send(urgent(1, 1), urgent(2, 2), connection.event(3, "later"))
    connection.confirmed(3)
    assert peer.finish(task) == [[]]
    assert operator.calls.index(("urgent", 2)) < operator.calls.index(("event", "later"))


def test_snapshot_waits_for_the_handler_and_includes_what_it_did(peer: Peer) -> None:  # H92
    entered, go = threading.Event(), threading.Event()
    operator: Steered

    def act(event: Any) -> None:
        entered.set()
        assert go.wait(PATIENCE_S)
        operator.context.send_event(["from the handler"])
        operator.calls.append("handled")

    def body(context: SubtaskContext) -> None:
        assert entered.wait(PATIENCE_S)
        assert context.wait_for_event(timeout_s=0.05) == 0  # the barrier has come, and waits
        go.set()
        while ("snapshot", 6) not in operator.calls:
            context.wait_for_event()

    operator = Steered(body, act)
    task, connection = peer.run(operator)
    connection.close_for(1, 6)
    connection.send(urgent(2, "u"), barrier(3, 6, 2))
    acknowledged = connection.next_item(CheckpointAcknowledged)
    assert [decode_event(held.payload) for held in acknowledged.held] == [["from the handler"]]
    assert operator.calls.index("handled") < operator.calls.index(("snapshot", 6))
    assert decode_event(connection.next_item(EventMessage).payload) == ["from the handler"]
    peer.finish(task)


def test_handler_finds_capacity_while_the_snapshot_waits_for_it(peer: Peer) -> None:  # H92
    done = threading.Event()

    def act(event: Any) -> None:
        for number in range(5):  # the window has capacity for two
            operator.context.send_event(number)
        done.set()

    def body(context: SubtaskContext) -> None:
        while ("snapshot", 6) not in operator.calls:
            context.wait_for_event()

    operator = Steered(body, act)
    task, connection = peer.run(operator, answer={"window_events": 2})
    connection.close_for(1, 6)
    connection.send(urgent(2, "u"), barrier(3, 6, 2))
    acknowledged = connection.next_item(CheckpointAcknowledged)
    assert [decode_event(held.payload) for held in acknowledged.held] == [0, 1, 2, 3, 4]
    assert done.is_set()
    for _ in range(5):
        connection.send(Confirm(TASK_ID, connection.next_item(EventMessage).seq))
    peer.finish(task)


def test_what_subtask_ready_sends_urgently_is_handled_before_process(peer: Peer) -> None:  # H92, H66
    entered, go = threading.Event(), threading.Event()

    def act(event: Any) -> None:
        entered.set()
        assert go.wait(PATIENCE_S)
        operator.calls.append("handled")

    operator = Steered(lambda context: operator.calls.append("process"), act)
    operator.waits_for_subtask_ready = True
    task = peer.start(operator)
    connection = peer.register()
    connection.send(Confirm(TASK_ID, connection.expect(Opened).seq))
    connection.send(urgent(1, "rule"), StartProcessing(TASK_ID, 2))
    connection.confirmed(2)
    assert entered.wait(PATIENCE_S)
    go.set()
    peer.finish(task)
    assert operator.calls.index("handled") < operator.calls.index("process")


def test_final_state_comes_after_every_urgent_event(peer: Peer) -> None:  # H93
    entered, go = threading.Event(), threading.Event()

    class Stateful(Steered):
        value = 0

        def final_state(self) -> bytes:
            return b"%d" % self.value

    def act(event: Any) -> None:
        entered.set()
        assert go.wait(PATIENCE_S)
        operator.value = event

    operator = Stateful(lambda context: entered.wait(PATIENCE_S), act)
    task, connection = peer.run(operator)
    send_urgent(connection, 1, 7)
    threading.Timer(0.05, go.set).start()
    finished = connection.finish()
    assert (finished.failure, finished.state) == ("", b"7")
    task.outputs()


def test_urgent_event_during_final_state_is_in_the_final_state(peer: Peer) -> None:  # H93
    asked, came = threading.Event(), threading.Event()

    class Stateful(Steered):
        value = 0

        def final_state(self) -> bytes:
            state = b"%d" % self.value
            asked.set()
            assert came.wait(PATIENCE_S)
            return state

    def act(event: Any) -> None:
        operator.value = event
        came.set()

    operator = Stateful(lambda context: None, act)
    task, connection = peer.run(operator)
    assert asked.wait(PATIENCE_S)
    connection.send(urgent(1, 7))
    assert connection.finish().state == b"7"
    task.outputs()


@pytest.mark.parametrize("where", ["wait_for_event", "request", "send_event", "next record", "after process"])
def test_failed_handler_fails_the_task_where_it_next_meets_its_coordinator(
    peer: Peer, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # H93
    class Broken(Exception):
        pass

    cancelled = threading.Event()

    def act(event: Any) -> None:
        raise Broken("no")

    def body(context: SubtaskContext) -> None:
        if where == "wait_for_event":
            context.wait_for_event()
        elif where == "request":
            context.request("never answered")
        while not context.cancelled:
            cancelled.wait(0.001)
        if where == "send_event":
            context.send_event(1)

    operator = Steered(body, act)
    if where == "next record":

        def process(records: Iterator[Any]) -> Iterator[Any]:
            for record in records:
                body(operator.context)
                yield record

        monkeypatch.setattr(operator, "process", process)
    task, connection = peer.run(operator, [1, 2])
    connection.send(urgent(1, 1), urgent(2, 2))
    while isinstance(message := connection.receive(), Confirm) or type(message).__name__ == "RequestMessage":
        pass
    assert getattr(message, "failure", "") == "Broken: no"
    connection.send(Confirm(TASK_ID, message.seq))  # type: ignore[union-attr]
    error = task.error()
    assert isinstance(error, Broken)
    assert ("urgent", 2) not in operator.calls
    assert operator.calls[-1] == "close"


@pytest.mark.parametrize("method", ["request", "wait_for_event", "handle_pending"])
def test_handler_may_not_wait_for_its_coordinator(peer: Peer, method: str) -> None:  # H93
    errors: queue.Queue[Exception] = queue.Queue()

    def act(event: Any) -> None:
        try:
            getattr(operator.context, method)(*["?"] * (method == "request"))
        except Exception as error:
            errors.put(error)

    operator = Steered(lambda context: errors.get(timeout=PATIENCE_S), act)
    task, connection = peer.run(operator)
    send_urgent(connection, 1, "u")
    [error] = peer.finish(task)
    assert isinstance(error, LocalProtocolError)
    assert f"{method}() cannot be used inside handle_urgent()" in str(error)


def test_operator_closes_only_after_the_handler_has_returned(peer: Peer) -> None:  # H93
    entered, go = threading.Event(), threading.Event()

    def act(event: Any) -> None:
        entered.set()
        assert go.wait(PATIENCE_S)
        operator.calls.append("returned")

    def body(context: SubtaskContext) -> None:
        assert entered.wait(PATIENCE_S)
        threading.Timer(0.05, go.set).start()
        raise ValueError("the operator fails")

    operator = Steered(body, act)
    task, connection = peer.run(operator)
    connection.send(urgent(1, 1), urgent(2, 2))
    connection.finish()
    assert isinstance(task.error(), ValueError)
    assert operator.calls[-2:] == ["returned", "close"]
    assert ("urgent", 2) not in operator.calls


def test_no_handler_begins_after_the_attempt_is_over(peer: Peer) -> None:  # H93
    entered, go = threading.Event(), threading.Event()

    def act(event: Any) -> None:
        entered.set()
        assert go.wait(PATIENCE_S)

    def body(context: SubtaskContext) -> None:
        try:
            context.wait_for_event()
        finally:
            go.set()

    operator = Steered(body, act)
    task, connection = peer.run(operator)
    connection.send(urgent(1, 1), urgent(2, 2))
    assert entered.wait(PATIENCE_S)
    connection.send(AttemptEnded(TASK_ID, "superseded"))
    assert isinstance(task.error(), AttemptOver)
    assert [call for call in operator.calls if call[0] == "urgent"] == [("urgent", 1)]


def test_operator_without_handle_urgent_handles_it_in_its_place(peer: Peer) -> None:  # H90
    operator = EventSource()
    task, connection = peer.run(operator)
    connection.send(connection.event(1, "a"), urgent(2, "b"), connection.event(3, "end"))
    assert peer.finish(task) == ["a", "b"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headgate-urgent")]


def test_urgent_events_that_wait_count_as_the_mailbox_does(peer: Peer) -> None:  # H90, H27
    entered, go = threading.Event(), threading.Event()

    def act(event: Any) -> None:
        entered.set()
        assert go.wait(PATIENCE_S)

    operator = Steered(lambda context: context.wait_for_event(timeout_s=None), act)
    task, connection = peer.run(operator, mailbox_events_max=3)
    connection.send(urgent(1, 1))
    assert entered.wait(PATIENCE_S)
    connection.confirmed(1)
    send_urgent(connection, 2, 2)
    send_urgent(connection, 3, 3)
    connection.send_events(4, "waits for them")  # now three wait, and the mailbox is empty
    channel = channel_of(operator)
    until(lambda: channel._reading_paused, "the task does not read its socket")
    connection.send(connection.event(5, "not read yet"))
    go.set()
    connection.confirmed(5)
    peer.finish(task)


def test_abandoned_task_ends_its_urgent_thread(peer: Peer) -> None:  # H93
    handled = threading.Event()

    class Endless(Recorder):
        def handle_urgent(self, event: Any) -> None:
            handled.set()

    task, connection = peer.run(Endless(), iter(int, 1), limit=3)
    connection.send(urgent(1, 1))
    connection.finish()
    task.outputs()
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headgate-urgent")]


def test_parts_of_a_chain_get_their_urgent_events(peer: Peer) -> None:  # H90, H80
    seen: queue.Queue[Any] = queue.Queue()
    part = Steered(lambda context: None, lambda event: seen.put(("part", event)))
    main = Steered(
        lambda context: [seen.get(timeout=PATIENCE_S) for _ in range(2)], lambda event: seen.put(("main", event))
    )
    task, connection = peer.run(main, parts={"part": lambda: part})
    connection.send(urgent(1, 1, part=1), urgent(2, 2))
    assert peer.finish(task) == [[("part", 1), ("main", 2)]]
