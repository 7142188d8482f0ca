# SPDX-License-Identifier: Apache-2.0

"""A broken connection is not a failure (H24)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import get_args

import pytest

from protocol.describing import name_of
from protocol.errors import HandshakeFailed
from protocol.wire.codec import DEFAULT_LIMITS, decode_event
from protocol.wire.fragments import encode_whole
from protocol.wire.keys import KeyRing
from protocol.wire.messages import (
    AttemptEnded,
    Confirm,
    Downward,
    EventMessage,
    Finished,
    Message,
    RefusalCode,
    Refused,
    Resume,
    UpMessage,
)
from spark_bridge.subtask import AttemptOver, SubtaskContext, runner
from tests.fuzz.samples import message
from tests.spark_bridge.subtask.operators import Calling, EventSource, Recorder
from tests.spark_bridge.subtask.peer import TASK_ID, TOKEN, Peer


def test_after_a_break_both_sides_go_on_where_they_were(peer: Peer) -> None:  # H24, H22, H74
    task, first = peer.run(EventSource)
    first.send_events(1, "a", "b")
    first.close()
    second, resume = peer.resume(received_seq=1)
    assert resume == Resume(TASK_ID, "words", received_seq=2, token=TOKEN)
    second.send_events(2, "b", "c", "end")
    assert peer.finish(task) == ["a", "b", "c"]


def test_what_was_not_received_is_sent_again_in_order(peer: Peer) -> None:  # H24, H30
    def send(context: SubtaskContext) -> None:
        for number in range(5):
            context.send_event(number)
        context.wait_for_event()

    task, first = peer.run(Calling(send))
    for _ in range(5):
        first.expect(EventMessage)
    first.send(Confirm(TASK_ID, 2))
    first.close()  # two events arrived, one of them was confirmed
    second, _ = peer.resume(received_seq=3)
    again = [second.expect(EventMessage) for _ in range(3)]
    assert [(event.seq, decode_event(event.payload)) for event in again] == [(4, 2), (5, 3), (6, 4)]
    second.send_events(1, "go on")
    peer.finish(task)


def test_events_sent_while_there_is_no_connection_wait_for_the_next_one(peer: Peer) -> None:  # H24
    def send(context: SubtaskContext) -> None:
        context.wait_for_event()
        context.send_event("into the gap")

    task, first = peer.run(Calling(send))
    first.send(first.event(1, "go"))
    first.close()
    second, resume = peer.resume(received_seq=1)
    if resume.received_seq == 0:  # the event may have been lost with the connection
        second.send(second.event(1, "go"))
    assert decode_event(second.next_item(EventMessage).payload) == "into the gap"
    peer.finish(task)


def test_a_break_at_the_very_end_does_not_lose_the_goodbye(peer: Peer) -> None:  # H24
    task, first = peer.run(Calling(lambda context: None))
    first.expect(Finished)
    first.close()
    peer.resume(received_seq=1)
    assert peer.finish(task) == [None]


def test_without_a_connection_for_too_long_the_attempt_is_over(
    peer: Peer, until_it_waits: Callable[[Recorder], None]
) -> None:  # H24
    operator = EventSource()
    task, connection = peer.run(operator, answer={"reconnect_timeout_s": 0.2})
    until_it_waits(operator)
    peer.stop_listening()
    connection.close()
    assert isinstance(task.error(), AttemptOver)


def test_a_sidecar_that_was_replaced_ends_the_attempt_immediately(peer: Peer) -> None:  # H61
    task, connection = peer.run(EventSource)
    connection.close()
    peer.change_keys(KeyRing(b"the secret of the next sidecar.."))
    with pytest.raises(HandshakeFailed):
        peer.accept()
    assert isinstance(task.error(), AttemptOver)


@pytest.mark.parametrize(
    "answer",
    [
        Refused(TASK_ID, RefusalCode.ATTEMPT_OVER, "attempt 5 has taken its place"),
        AttemptEnded(TASK_ID, "attempt 5 has taken its place"),
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_a_resume_that_is_refused_ends_the_attempt(peer: Peer, answer: Message) -> None:
    task, connection = peer.run(EventSource)
    connection.close()
    connection = peer.accept()
    connection.expect(Resume)
    connection.send(answer)
    with pytest.raises(AttemptOver, match="attempt 5 has taken its place"):
        task.outputs()


NOT_FOR_TASKS = sorted(set(get_args(UpMessage)) - set(get_args(Downward)), key=name_of)


@pytest.mark.parametrize("bad", [None, *NOT_FOR_TASKS], ids=lambda bad: "no frame" if bad is None else bad.__name__)
def test_a_bad_frame_costs_the_connection_and_nothing_else(
    peer: Peer, until_it_waits: Callable[[Recorder], None], bad: type[Message] | None
) -> None:
    """H62: also a message that only tasks send."""
    operator = EventSource()
    task, first = peer.run(operator)
    first.send_events(1, "first")
    until_it_waits(operator)
    first.sock.sendall(b"\xff" * 64 if bad is None else encode_whole(message(Random(0), bad), DEFAULT_LIMITS))
    first.expect_end()
    second, resume = peer.resume(received_seq=1)
    assert resume.received_seq == 1
    second.send_events(2, "second", "end")
    assert peer.finish(task) == ["first", "second"]


def test_a_hole_in_the_stream_costs_the_connection_and_is_filled_by_the_next(
    peer: Peer, until_it_waits: Callable[[Recorder], None]
) -> None:  # H22
    operator = EventSource()
    task, first = peer.run(operator)
    first.send_events(1, "a")
    until_it_waits(operator)
    first.send(first.event(2, "b"), first.event(4, "d"))
    first.expect_end()
    second, resume = peer.resume(received_seq=1)
    assert resume.received_seq == 2
    second.send_events(3, "c", "d", "end")
    assert peer.finish(task) == ["a", "b", "c", "d"]


def test_a_peer_that_only_breaks_the_protocol_is_given_up(
    peer: Peer, until_it_waits: Callable[[Recorder], None], monkeypatch: pytest.MonkeyPatch
) -> None:  # H48
    monkeypatch.setattr(runner, "LONGEST_PAUSE_S", 0.01)
    operator = EventSource()
    task, connection = peer.run(operator)
    for broken in range(runner.BROKEN_IN_A_ROW_MAX):
        if broken:
            connection, _ = peer.resume(received_seq=1)
        until_it_waits(operator)
        connection.sock.sendall(bytes(8))
    with pytest.raises(AttemptOver, match="connections in a row broke the protocol"):
        task.outputs()
