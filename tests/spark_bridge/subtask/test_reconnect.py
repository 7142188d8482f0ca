# SPDX-License-Identifier: Apache-2.0

"""A broken connection is not a failure (H24)."""

from __future__ import annotations

import pytest

from protocol.errors import HandshakeFailed
from protocol.wire.codec import decode_event
from protocol.wire.keys import KeyRing
from protocol.wire.messages import AttemptEnded, Confirm, EventMessage, Finished, RefusalCode, Refused, Resume
from spark_bridge.subtask import AttemptOver, SubtaskContext, io_loop
from tests.spark_bridge.subtask.operators import Calling, EventSource
from tests.spark_bridge.subtask.peer import TASK_ID, TOKEN, Peer, RunningTask


def test_after_a_break_both_sides_go_on_where_they_were() -> None:  # H24, H22, H74
    with Peer() as peer:
        task = RunningTask(EventSource, peer.endpoint())
        first = peer.take_task()
        first.send(first.event(1, "a"), first.event(2, "b"))
        first.confirmed(2)
        first.close()
        second, resume = peer.resume(received_seq=1)
        assert resume == Resume(TASK_ID, "words", received_seq=2, token=TOKEN)
        second.send(second.event(2, "b"), second.event(3, "c"), second.event(4, "end"))
        second.confirmed(4)
        second.finish()
        assert task.outputs() == ["a", "b", "c"]


def test_what_was_not_received_is_sent_again_in_order() -> None:  # H24, H30
    def send(context: SubtaskContext) -> None:
        for number in range(5):
            context.send_event(number)
        context.wait_for_event()

    with Peer() as peer:
        task = RunningTask(lambda: Calling(send), peer.endpoint())
        first = peer.take_task()
        for _ in range(5):
            first.expect(EventMessage)
        first.send(Confirm(TASK_ID, 2))
        first.close()  # two events arrived, one of them was confirmed
        second, _ = peer.resume(received_seq=3)
        again = [second.expect(EventMessage) for _ in range(3)]
        assert [(event.seq, decode_event(event.payload)) for event in again] == [(4, 2), (5, 3), (6, 4)]
        second.send(second.event(1, "go on"))
        second.confirmed(1)
        second.finish()
        task.outputs()


def test_events_sent_while_there_is_no_connection_wait_for_the_next_one() -> None:  # H24
    def send(context: SubtaskContext) -> None:
        context.wait_for_event()
        context.send_event("into the gap")

    with Peer() as peer:
        task = RunningTask(lambda: Calling(send), peer.endpoint())
        first = peer.take_task()
        first.send(first.event(1, "go"))
        first.close()
        second, resume = peer.resume(received_seq=1)
        if resume.received_seq == 0:  # the event may have been lost with the connection
            second.send(second.event(1, "go"))
        assert decode_event(second.next_item(EventMessage).payload) == "into the gap"
        second.finish()
        task.outputs()


def test_a_break_at_the_very_end_does_not_lose_the_goodbye() -> None:  # H24
    with Peer() as peer:
        task = RunningTask(lambda: Calling(lambda context: None), peer.endpoint())
        first = peer.take_task()
        first.expect(Finished)
        first.close()
        second, _ = peer.resume(received_seq=1)
        second.finish()
        assert task.outputs() == [None]


def test_without_a_connection_for_too_long_the_attempt_is_over() -> None:  # H24
    with Peer() as peer:
        task = RunningTask(EventSource, peer.endpoint())
        connection = peer.take_task(reconnect_timeout_s=0.2)
        peer.stop_listening()
        connection.close()
        error = task.error()
    assert isinstance(error, AttemptOver)


def test_a_sidecar_that_was_replaced_ends_the_attempt_at_once() -> None:  # H61
    with Peer() as peer:
        task = RunningTask(EventSource, peer.endpoint())
        peer.take_task().close()
        peer.change_keys(KeyRing(b"the secret of the next sidecar.."))
        with pytest.raises(HandshakeFailed):
            peer.accept()
        error = task.error()
    assert isinstance(error, AttemptOver)


def test_a_resume_that_is_refused_ends_the_attempt() -> None:
    with Peer() as peer:
        task = RunningTask(EventSource, peer.endpoint())
        peer.take_task().close()
        connection = peer.accept()
        connection.expect(Resume)
        connection.send(Refused(TASK_ID, RefusalCode.ATTEMPT_OVER, "attempt 5 has taken its place"))
        error = task.error()
    assert isinstance(error, AttemptOver)
    assert "attempt 5 has taken its place" in str(error)


def test_an_attempt_that_ended_meanwhile_learns_it_on_its_return() -> None:
    with Peer() as peer:
        task = RunningTask(EventSource, peer.endpoint())
        peer.take_task().close()
        connection = peer.accept()
        connection.expect(Resume)
        connection.send(AttemptEnded(TASK_ID, "killed meanwhile"))
        error = task.error()
    assert isinstance(error, AttemptOver)
    assert "killed meanwhile" in str(error)


def test_a_bad_frame_costs_the_connection_and_nothing_else() -> None:  # H62
    with Peer() as peer:
        task = RunningTask(EventSource, peer.endpoint())
        first = peer.take_task()
        first.sock.sendall(b"\xff" * 64)
        first.expect_end()
        second, _ = peer.resume(received_seq=1)
        second.send(second.event(1, "end"))
        second.confirmed(1)
        second.finish()
        assert task.outputs() == []


def test_a_hole_in_the_stream_costs_the_connection_and_is_filled_by_the_next() -> None:  # H22
    with Peer() as peer:
        task = RunningTask(EventSource, peer.endpoint())
        first = peer.take_task()
        first.send(first.event(1, "a"), first.event(3, "c"))
        first.expect_end()
        second, resume = peer.resume(received_seq=1)
        assert resume.received_seq == 1
        second.send(second.event(2, "b"), second.event(3, "c"), second.event(4, "end"))
        second.confirmed(4)
        second.finish()
        assert task.outputs() == ["a", "b", "c"]


def test_a_peer_that_only_breaks_the_protocol_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:  # H48
    monkeypatch.setattr(io_loop, "LONGEST_PAUSE_S", 0.01)
    with Peer() as peer:
        task = RunningTask(EventSource, peer.endpoint())
        connection = peer.take_task()
        connection.sock.sendall(bytes(8))
        for _ in range(7):
            connection, _ = peer.resume(received_seq=1)
            connection.sock.sendall(bytes(8))
        error = task.error()
    assert isinstance(error, AttemptOver)
    assert "connections in a row broke the protocol" in str(error)
