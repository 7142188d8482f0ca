# SPDX-License-Identifier: Apache-2.0

"""Checkpoints that hold no events, in a task: real threads, over a real connection (H79)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import (
    AnswerMessage,
    CheckpointAborted,
    CheckpointAcknowledged,
    CheckpointDeclined,
    EventMessage,
    RequestMessage,
    UrgentEventMessage,
)
from spark_bridge.subtask import SubtaskContext
from spark_bridge.subtask.channel import SubtaskChannel
from tests.spark_bridge.subtask.operators import Calling, Recorder, channel_of
from tests.spark_bridge.subtask.peer import PATIENCE_S, TASK_ID, Peer, barrier
from tests.spark_bridge.subtask.test_checkpoints import put_into_mailbox

UNHELD = {"hold_events": False}


class Paused(Recorder):
    """Waits at each record, without looking at its mailbox, until ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.computing = threading.Event()
        self.go_on = threading.Event()

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            self.computing.set()
            assert self.go_on.wait(PATIENCE_S)
            yield record


def answer_to(request: RequestMessage, seq: int, value: Any) -> AnswerMessage:
    return AnswerMessage(TASK_ID, seq, request.request_id, "", encode_event(value))


def test_what_a_task_sends_while_a_barrier_waits_leaves_and_counts_in_the_snapshot(peer: Peer) -> None:
    class Telling(Paused):
        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            for record in super().process(records):
                self.context.send_event(["at", record])
                yield record

    operator = Telling()
    task, connection = peer.run(operator, [1, 2], answer=UNHELD)
    assert operator.computing.wait(PATIENCE_S)
    put_into_mailbox(connection, barrier(1, 6, 0))
    operator.go_on.set()
    assert decode_event(connection.next_item(EventMessage).payload) == ["at", 1]
    acknowledged = connection.next_item(CheckpointAcknowledged)
    assert (acknowledged.held, acknowledged.events_sent) == ((), (1,))
    assert decode_event(connection.next_item(EventMessage).payload) == ["at", 2]
    assert peer.finish(task) == [1, 2]


def test_an_answer_behind_a_barrier_is_given_after_the_snapshot(peer: Peer) -> None:  # H33
    class Asking(Recorder):
        snapshot_anywhere = True

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            self.calls.append(self.context.request("which?", PATIENCE_S))
            yield from self.calls

    task, connection = peer.run(Asking, answer=UNHELD)
    request = connection.next_item(RequestMessage)
    connection.send(barrier(1, 6, 0), answer_to(request, 2, "this"))
    connection.next_item(CheckpointAcknowledged)
    assert peer.finish(task)[-2:] == [("snapshot", 6), "this"]


def test_an_operator_that_waits_declines_a_barrier_anywhere_in_its_mailbox_and_gets_its_answer(peer: Peer) -> None:
    asking = threading.Event()

    def ask(context: SubtaskContext) -> Any:
        asking.set()
        return context.request("which?", PATIENCE_S)

    operator = Calling(ask)
    task, connection = peer.run(operator, answer=UNHELD)
    request = connection.next_item(RequestMessage)
    connection.send(connection.event(1, "first"), connection.event(2, "second"), barrier(3, 6, 2))
    connection.send(answer_to(request, 4, "this"))
    assert connection.next_item(CheckpointDeclined).checkpoint_id == 6
    connection.send(CheckpointAborted(TASK_ID, 5, 6))
    assert peer.finish(task) == ["this"]
    assert ("snapshot", 6) not in operator.calls


def test_a_barrier_is_not_met_before_another_thread_has_the_answer_ahead_of_it(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The asker may be slow to run; the snapshot must not be older than what it does with the answer."""
    answers_given, may_run = SubtaskChannel._given_answers, threading.Event()
    barrier_waits = threading.Event()
    wait = SubtaskChannel._wait_for_news

    def wait_for_news(self: SubtaskChannel, left_s: float | None) -> None:
        wait(self, left_s)
        if not self.on_task_thread and self._given_answers():
            self._changed.release()
            try:
                assert may_run.wait(PATIENCE_S)
            finally:
                self._changed.acquire()

    def given_answers(self: SubtaskChannel) -> set[int]:
        given = answers_given(self)
        if given and self.on_task_thread:
            barrier_waits.set()
        return given

    monkeypatch.setattr(SubtaskChannel, "_wait_for_news", wait_for_news)
    monkeypatch.setattr(SubtaskChannel, "_given_answers", given_answers)

    class Asking(Paused):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            super().open(context, state)
            self.got: list[Any] = []
            self.asker = threading.Thread(target=lambda: self.got.append(context.request("which?", PATIENCE_S)))

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            self.asker.start()
            yield from super().process(records)
            self.asker.join(PATIENCE_S)
            yield self.got

        def snapshot_state(self, checkpoint_id: int) -> bytes:
            return b"%d" % len(channel_of(self)._answers)

    operator = Asking()
    task, connection = peer.run(operator, [1, 2], answer=UNHELD)
    request = connection.next_item(RequestMessage)
    assert operator.computing.wait(PATIENCE_S)
    put_into_mailbox(connection, answer_to(request, 1, "this"), barrier(2, 6, 1))
    operator.go_on.set()
    assert barrier_waits.wait(PATIENCE_S)
    may_run.set()
    assert connection.next_item(CheckpointAcknowledged).state == b"0"
    assert peer.finish(task) == [1, 2, ["this"]]


def test_a_task_that_ends_meets_its_barrier_before_the_urgent_events_behind_it(peer: Peer) -> None:  # H92, H93
    class Ending(Paused):
        def handle_urgent(self, event: Any) -> None:
            self.calls.append(("urgent", event))

        def final_state(self) -> bytes:
            return repr(self.calls[-2:]).encode()

    operator = Ending()
    task, connection = peer.run(operator, [1], answer=UNHELD)
    assert operator.computing.wait(PATIENCE_S)
    urgent = UrgentEventMessage(TASK_ID, 2, encode_event("now"))
    connection.send(barrier(1, 6, 0), urgent)
    connection.confirmed(2)
    operator.go_on.set()
    connection.next_item(CheckpointAcknowledged)
    assert connection.finish().state == repr([("snapshot", 6), ("urgent", "now")]).encode()
    assert task.outputs() == [1]
