# SPDX-License-Identifier: Apache-2.0

"""Checkpoints in a task: while it computes, inside its snapshot, and at its restore."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.errors import LocalProtocolError
from protocol.wire.codec import WireLimits, decode_event, encode_event
from protocol.wire.messages import (
    AnswerMessage,
    AttemptEnded,
    BarrierMessage,
    CheckpointAborted,
    CheckpointAcknowledged,
    CheckpointCompleted,
    CheckpointDeclined,
    Confirm,
    EventMessage,
    Opened,
    RequestMessage,
    RestoredRequestMessage,
    SavepointTaken,
    SubtaskState,
)
from spark_bridge.subtask import TimedOut
from tests.spark_bridge.subtask.operators import EventSource, Recorder
from tests.spark_bridge.subtask.peer import PATIENCE_S, TASK_ID, Peer, PeerConnection, barrier

SMALL_EVENTS = 2**20
MESSAGE_BYTES = WireLimits.for_events(SMALL_EVENTS).message_bytes_max
End = SavepointTaken | CheckpointCompleted | CheckpointAborted


def put_into_mailbox(connection: PeerConnection, *words: BarrierMessage | AnswerMessage | End) -> None:
    """Items of a checkpoint are confirmed later, but a resent one is confirmed immediately (H22)."""
    connection.send(*words, words[-1])
    connection.confirmed(words[-1].seq)


class Busy(Recorder):
    """Computes at its first record, in pure Python, until ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.computing = threading.Event()
        self.go_on = threading.Event()

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for place, record in enumerate(records):
            turns = 0
            self.computing.set()
            while place == 0 and not self.go_on.is_set():
                turns += 1
                if turns == 1000:
                    self.context.send_event("computed")
            self.calls.append(record)
            yield record


def test_a_task_that_computes_closes_immediately_and_snapshots_at_its_next_record(peer: Peer) -> None:
    """H31, H40: the I/O thread closes the valve; what the task sends from then on waits for its own snapshot."""
    operator = Busy()
    task, connection = peer.run(operator, [1, 2])
    assert operator.computing.wait(PATIENCE_S)
    connection.next_item(EventMessage)  # sent while the valve was open
    connection.close_for(1, 6)
    put_into_mailbox(connection, barrier(2, 6, 0))  # and the task still computes
    assert operator.calls == [("open", None)]
    operator.go_on.set()
    acknowledged = connection.next_item(CheckpointAcknowledged)
    assert (acknowledged.checkpoint_id, acknowledged.state, acknowledged.events_sent) == (6, b"state at 6", (1,))
    peer.finish(task)
    assert operator.calls[:4] == [("open", None), 1, ("snapshot", 6), 2]


def test_a_task_that_computes_holds_what_it_sends_after_the_close(peer: Peer) -> None:  # H31
    class Late(Busy):
        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            for record in records:
                self.computing.set()
                while not self.go_on.is_set():
                    pass
                self.context.send_event(["at", record])
                yield record

    operator = Late()
    task, connection = peer.run(operator, [1, 2])
    assert operator.computing.wait(PATIENCE_S)
    connection.close_for(1, 6)
    put_into_mailbox(connection, barrier(2, 6, 0))
    operator.go_on.set()
    acknowledged = connection.next_item(CheckpointAcknowledged)
    assert [decode_event(held.payload) for held in acknowledged.held] == [["at", 1]]
    assert acknowledged.events_sent == ()
    assert [decode_event(connection.next_item(EventMessage).payload) for _ in range(2)] == [["at", 1], ["at", 2]]
    assert connection.finish().events_sent == (2,)
    task.outputs()


class Sealing(EventSource):
    """Sends its sealed files from inside its snapshot, as a two-phase sink does."""

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        self.context.send_event(["sealed", checkpoint_id])
        return super().snapshot_state(checkpoint_id)


@pytest.mark.parametrize("window_events", [1000, 1])
def test_an_event_sent_inside_the_snapshot_is_in_that_very_snapshot(peer: Peer, window_events: int) -> None:
    """H31: also if the window is already full of held events, which leave only after this snapshot (H48)."""

    class Telling(Sealing):
        def handle_event(self, event: Any) -> None:
            if event == "tell":
                self.context.send_event("told")
            super().handle_event(event)

    task, connection = peer.run(Telling, send_timeout_s=5.0, answer={"window_events": window_events})
    connection.close_for(1, 6)
    connection.send(connection.event(2, "tell"), barrier(3, 6, 2))
    acknowledged = connection.next_item(CheckpointAcknowledged)
    assert [decode_event(held.payload) for held in acknowledged.held] == ["told", ["sealed", 6]]
    for expected in ("told", ["sealed", 6]):
        event = connection.next_item(EventMessage)
        assert decode_event(event.payload) == expected
        connection.send(Confirm(TASK_ID, event.seq))
    connection.send(CheckpointAborted(TASK_ID, 4, 6), connection.event(5, "end"))
    final = connection.next_item(EventMessage)
    assert decode_event(final.payload) == ["sealed", -1]
    connection.send(Confirm(TASK_ID, final.seq))
    peer.finish(task)


def test_another_thread_waits_for_capacity_while_the_snapshot_does_not(peer: Peer) -> None:  # H27, H31
    outcomes: list[object] = []

    class Crowded(Sealing):
        def snapshot_state(self, checkpoint_id: int) -> bytes:
            self.context.send_event("first")
            thread = threading.Thread(target=self._send)
            thread.start()
            thread.join()
            return super().snapshot_state(checkpoint_id)

        def final_state(self) -> bytes:
            return b""

        def _send(self) -> None:
            try:
                self.context.send_event("from another thread")
            except TimedOut as error:
                outcomes.append(error)

    task, connection = peer.run(Crowded, send_timeout_s=0.05, answer={"window_events": 1})
    connection.close_for(1, 6)
    connection.send(barrier(2, 6, 0))
    acknowledged = connection.next_item(CheckpointAcknowledged)
    assert [decode_event(held.payload) for held in acknowledged.held] == ["first", ["sealed", 6]]
    connection.send(connection.event(3, "end"))
    for _ in range(2):
        connection.send(Confirm(TASK_ID, connection.next_item(EventMessage).seq))
    peer.finish(task)
    assert len(outcomes) == 1


def test_a_request_inside_the_snapshot_is_refused_immediately(peer: Peer) -> None:
    # H33, H48: its answer could never come in time
    class Asking(EventSource):
        def snapshot_state(self, checkpoint_id: int) -> bytes:
            if checkpoint_id == 6:
                with pytest.raises(LocalProtocolError, match="Send an event instead"):
                    self.context.request("which?", timeout_s=1000)
            return b""

    task, connection = peer.run(Asking)
    connection.close_for(1, 6)
    connection.send(barrier(2, 6, 0))
    assert connection.next_item(CheckpointAcknowledged).held == ()
    connection.send(connection.event(3, "end"))
    peer.finish(task)


# --- barriers that travel with the data -------------------------------------------------------------------


class Aligned(Recorder):
    """A record may be a barrier: ``("barrier", checkpoint_id, events_before)``."""

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            if isinstance(record, tuple):
                self.context.barrier_arrived(record[1], record[2])
                if self.context.wait_for_event(PATIENCE_S):
                    yield "aligned"
                continue
            self.calls.append(record)
            yield record


def test_a_barrier_that_comes_with_the_data_is_met_between_two_records(peer: Peer) -> None:  # H23, H40
    closed = threading.Event()

    def records() -> Iterator[Any]:
        yield 1
        assert closed.wait(PATIENCE_S)
        yield ("barrier", 6, 0)
        yield 2

    operator = Aligned()
    task, connection = peer.run(operator, records())
    connection.close_for(1, 6)
    closed.set()
    assert connection.next_item(CheckpointAcknowledged).checkpoint_id == 6
    assert peer.finish(task) == [1, "aligned", 2]
    assert operator.calls[1:4] == [1, ("snapshot", 6), 2]


def test_a_barrier_of_another_thread_waits_for_the_events_before_it(peer: Peer) -> None:  # H23
    operator = EventSource()
    task, connection = peer.run(operator)
    connection.close_for(1, 6)
    operator.context.barrier_arrived(6, events_before=3)  # this is the test's thread, not the task's
    connection.send_events(2, "a")
    connection.send(connection.event(3, "b"))
    assert connection.next_item(CheckpointAcknowledged).checkpoint_id == 6
    connection.send(connection.event(4, "end"))
    peer.finish(task)
    assert operator.calls[1:4] == [("event", "a"), ("event", "b"), ("snapshot", 6)]


def test_a_barrier_that_nobody_waits_for_is_counted_and_has_no_effect(peer: Peer) -> None:  # H44
    operator = EventSource()
    task, connection = peer.run(operator)
    operator.context.barrier_arrived(9)
    assert operator.context.statistics.messages_refused == 1
    connection.send(connection.event(1, "end"))
    peer.finish(task)
    assert ("snapshot", 9) not in operator.calls


# --- ends -------------------------------------------------------------------------------------------------


def test_of_a_savepoint_the_operator_hears_only_the_snapshot(peer: Peer) -> None:  # H49
    operator = EventSource()
    task, connection = peer.run(operator)
    connection.close_for(1, 6)
    connection.send(barrier(2, 6, 0))
    connection.next_item(CheckpointAcknowledged)
    connection.send(SavepointTaken(TASK_ID, 3, 6), connection.event(4, "end"))
    peer.finish(task)
    assert operator.calls == [("open", None), ("snapshot", 6), ("event", "end"), ("snapshot", -1), "close"]


@pytest.mark.parametrize("end", [SavepointTaken, CheckpointCompleted, CheckpointAborted])
def test_a_barrier_whose_checkpoint_is_over_asks_for_no_snapshot(peer: Peer, end: type[End]) -> None:  # H44, H49
    operator = Busy()
    task, connection = peer.run(operator, [1, 2])
    connection.next_item(EventMessage)
    assert operator.computing.wait(PATIENCE_S)
    connection.close_for(1, 6)
    put_into_mailbox(connection, barrier(2, 6, 0), end(TASK_ID, 3, 6))
    operator.go_on.set()
    peer.finish(task)
    assert ("snapshot", 6) not in operator.calls


def test_a_snapshot_that_fits_no_message_is_declined_and_the_task_goes_on(peer: Peer) -> None:  # H45, H62
    class Huge(EventSource):
        def snapshot_state(self, checkpoint_id: int) -> bytes:
            return bytes(MESSAGE_BYTES) if checkpoint_id == 6 else b""

    task, connection = peer.run(Huge, event_bytes_max=SMALL_EVENTS)
    connection.close_for(1, 6)
    connection.send(barrier(2, 6, 0))
    assert f"{MESSAGE_BYTES} bytes of state" in connection.next_item(CheckpointDeclined).reason
    connection.send(CheckpointAborted(TASK_ID, 3, 6), connection.event(4, "go on"), connection.event(5, "end"))
    assert peer.finish(task) == ["go on"]


def test_a_final_state_that_fits_no_message_ends_the_attempt_badly_on_both_sides(peer: Peer) -> None:  # H47, H62
    class Huge(Recorder):
        def final_state(self) -> bytes:
            return bytes(MESSAGE_BYTES)

    task, connection = peer.run(Huge, event_bytes_max=SMALL_EVENTS)
    finished = connection.finish()
    assert "the final state is too large" in finished.failure
    assert finished.state == b""
    assert isinstance(task.error(), LocalProtocolError)


# --- snapshots while a request waits ----------------------------------------------------------------------


def test_an_answer_that_lies_ahead_of_a_barrier_is_in_the_snapshot_of_that_barrier(peer: Peer) -> None:
    """H33, H41: even if the task was taking another snapshot when both arrived."""
    snapshotting, go_on = threading.Event(), threading.Event()

    class Asking(Recorder):
        snapshot_anywhere = True

        def __init__(self) -> None:
            super().__init__()
            self.answer = "none yet"

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            self.answer = self.context.request("which?", PATIENCE_S)
            while self.context.wait_for_event(PATIENCE_S) and ("complete", 7) not in self.calls:
                pass
            yield self.answer

        def snapshot_state(self, checkpoint_id: int) -> bytes:
            if checkpoint_id == 6:
                snapshotting.set()
                assert go_on.wait(PATIENCE_S)
            return self.answer.encode()

    task, connection = peer.run(Asking)
    request = connection.next_item(RequestMessage)
    connection.close_for(1, 6)
    connection.send(barrier(2, 6, 0))
    assert snapshotting.wait(PATIENCE_S)
    connection.close_for(3, 7)
    answer = AnswerMessage(TASK_ID, 4, request.request_id, "", encode_event("the answer"))
    put_into_mailbox(connection, answer, barrier(5, 7, 4))
    go_on.set()
    assert connection.next_item(CheckpointAcknowledged).state == b"none yet"
    assert connection.next_item(CheckpointAcknowledged).state == b"the answer"
    connection.send(CheckpointCompleted(TASK_ID, 6, 7))
    assert peer.finish(task) == ["the answer"]


def test_a_request_that_a_snapshot_holds_is_not_asked_a_second_time_after_the_restore() -> None:  # H73
    may_ask = threading.Event()

    class AskingOnce(Recorder):
        snapshot_anywhere = True

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            if "which?" not in self.context.restored_requests:
                assert may_ask.wait(PATIENCE_S)
                yield self.context.request("which?", PATIENCE_S)

        def snapshot_state(self, checkpoint_id: int) -> bytes:
            return b""

    with Peer() as peer:
        task, connection = peer.run(AskingOnce)
        connection.close_for(1, 6)
        may_ask.set()
        connection.send(barrier(2, 6, 0))
        snapshot = connection.next_item(CheckpointAcknowledged)
        assert [held.is_request for held in snapshot.held] == [True]
        connection.next_item(RequestMessage)
        connection.send(AttemptEnded(TASK_ID, "killed"))
        task.error()
    with Peer() as peer:
        task = peer.start(AskingOnce)
        connection = peer.register(checkpoint_id=6, states=(SubtaskState(2, snapshot.state),), held=snapshot.held)
        assert decode_event(connection.next_item(RestoredRequestMessage).payload) == "which?"
        connection.next_item(Opened)
        assert connection.finish().events_sent == (1,)
        assert task.outputs() == []
