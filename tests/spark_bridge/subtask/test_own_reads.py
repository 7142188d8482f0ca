# SPDX-License-Identifier: Apache-2.0

"""A task that waits repeatedly reads its socket itself; the I/O thread reads while the task does something else.

First the whole task against a peer; then ``OwnReads`` alone, on a pair of sockets.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import (
    AnswerMessage,
    AttemptEnded,
    CheckpointAcknowledged,
    Confirm,
    EventMessage,
    RequestCancelled,
    RequestMessage,
)
from spark_bridge.subtask import AttemptOver, SubtaskContext, TimedOut, channel, connection
from spark_bridge.subtask.channel import SubtaskChannel
from spark_bridge.subtask.connection import OwnReads
from tests.spark_bridge.subtask.operators import Calling, EventSource, channel_of
from tests.spark_bridge.subtask.peer import PATIENCE_S, TASK_ID, Peer
from tests.spark_bridge.subtask.reading import NEVER_S, begin, reads_of, until, until_it_reads_itself

SPIN_S = 0.0002


class Echoing(EventSource):
    """Echoes each event, so that the peer goes on when the task is about to wait."""

    def handle_event(self, event: Any) -> None:
        super().handle_event(event)
        self.context.send_event(event)


class Computing(EventSource):
    """Runs ``compute`` at the event ``"compute"``."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        super().__init__()
        self._compute = compute

    def handle_event(self, event: Any) -> None:
        super().handle_event(event)
        if event == "compute":
            self._compute()


# --- who reads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"spin_s": 0}], ids=["spinning", "not spinning"])
def test_a_task_that_waits_again_and_again_reads_by_itself(peer: Peer, changes: dict[str, Any]) -> None:
    # H22, H23, H30
    operator = Echoing()
    task, connection = peer.run(operator, **changes)
    took_over = False
    for seq in range(1, 401):
        connection.send_events(seq, seq)
        assert decode_event(connection.expect(EventMessage).payload) == seq
        took_over |= reads_of(operator).active
    assert took_over
    connection.send_events(401, "end")
    connection.expect(EventMessage)
    assert peer.finish(task) == list(range(1, 401))
    assert operator.context.statistics.events_received == 401


@pytest.mark.usefixtures("eager")
def test_it_does_not_need_the_io_thread_meanwhile(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:  # H22, H23
    operator = EventSource()
    task, connection = begin(peer, operator)
    assert channel_of(operator).interests == 0
    with monkeypatch.context() as patch:
        patch.setattr(SubtaskChannel, "interests", 0)  # the I/O thread never reads, and never takes over
        for seq in range(2, 102):
            connection.send_events(seq, seq)
    connection.send_events(102, "end")
    assert peer.finish(task) == ["first", *range(2, 102)]


@pytest.mark.usefixtures("eager")
def test_what_comes_together_arrives_in_order_each_once(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:  # H22
    monkeypatch.setattr(channel, "WATCH_S", 0.0)  # the reader changes as often as possible
    operator = EventSource()
    task, connection = begin(peer, operator)
    for first in range(2, 1002, 50):
        connection.send(*(connection.event(seq, seq) for seq in range(first, first + 50)))
    connection.confirmed(1001)
    connection.send_events(1002, "end")
    assert peer.finish(task) == ["first", *range(2, 1002)]
    assert operator.context.statistics.events_received == 1002


def test_it_gives_the_reading_back_when_nothing_comes(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:  # H23
    operator = EventSource()
    task, connection = peer.run(operator)
    reads = reads_of(operator)
    for seq in range(1, 6):
        with monkeypatch.context() as patch:
            patch.setattr(OwnReads, "are_worthwhile", True)
            connection.send_events(seq, seq)
            until(lambda: reads.active, "the task reads by itself")
        until(lambda: not (reads.active or reads.waiting), "the reading is given back")
    connection.send_events(6, "end")
    assert peer.finish(task) == list(range(1, 6))


def test_the_io_thread_that_is_about_to_wait_learns_that_the_reading_was_given_back(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:  # H23
    operator = EventSource()
    task, connection = peer.run(operator)
    reads, watch = reads_of(operator), SubtaskChannel.pass_time_and_watch
    looks: Callable[[SubtaskChannel], int] = vars(SubtaskChannel)["interests"].fget
    seen: list[int] = []
    once = [True]

    def look(of: SubtaskChannel) -> int:
        seen.append(looks(of))
        return seen[-1]

    def watch_late(of: SubtaskChannel) -> float | None:
        if once and seen and not seen[-1]:  # it has seen that the task reads, and then decides how long it waits
            once.clear()
            until(lambda: not reads.active, "the reading is given back")
        return watch(of)

    monkeypatch.setattr(SubtaskChannel, "interests", property(look))
    monkeypatch.setattr(SubtaskChannel, "pass_time_and_watch", watch_late)
    with monkeypatch.context() as patch:
        patch.setattr(OwnReads, "are_worthwhile", True)
        connection.send_events(1, 1)
        until(lambda: reads.active, "the task reads by itself")
    until(lambda: not (reads.active or reads.waiting), "the reading is given back")
    connection.send_events(2, 2, "end")
    assert peer.finish(task) == [1, 2]
    assert not once


def test_a_caller_that_only_waits_for_a_moment_does_not_take_the_reading_over(peer: Peer) -> None:
    """A short deadline says nothing about when data will come."""

    def body(context: SubtaskContext) -> int:
        return sum(context.wait_for_event(timeout_s=0.001) for _ in range(20))

    operator = Calling(body)
    task, _ = peer.run(operator)
    assert peer.finish(task) == [0]
    assert channel_of(operator)._own_reads._waits <= 2  # the confirmations of Opened and of Finished count as data


def _compute_in_python(go_on: threading.Event) -> None:
    while not go_on.is_set():
        pass


def _compute_elsewhere(go_on: threading.Event) -> None:
    assert go_on.wait(PATIENCE_S)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("compute", [_compute_in_python, _compute_elsewhere])
def test_events_are_confirmed_though_the_task_that_reads_them_computes(
    peer: Peer, compute: Callable[[threading.Event], None]
) -> None:  # H23: confirmed means in the mailbox, however long the task computes
    go_on = threading.Event()
    operator = Computing(lambda: compute(go_on))
    task, connection = begin(peer, operator)
    connection.send_events(2, "compute")
    try:
        until(lambda: operator.calls[-1] == ("event", "compute"), "the task computes")
        for seq in range(3, 13):
            connection.send_events(seq, seq)
        assert operator.calls[-1] == ("event", "compute")
        assert not reads_of(operator).active
    finally:
        go_on.set()
    until_it_reads_itself(operator)
    connection.send_events(13, 13)
    connection.send_events(14, "end")
    assert peer.finish(task) == ["first", "compute", *range(3, 14)]


@pytest.mark.usefixtures("eager")
def test_a_mailbox_that_fills_while_it_computes_stops_the_reading(peer: Peer) -> None:  # H27
    go_on = threading.Event()
    operator = Computing(lambda: go_on.wait(PATIENCE_S))
    task, connection = begin(peer, operator, mailbox_events_max=4)
    connection.send_events(2, "compute")
    for first in range(3, 2003, 200):  # far more than one read takes, or the mailbox holds
        connection.send(*(connection.event(seq, "x" * 2000) for seq in range(first, first + 200)))
        if first == 3:
            assert connection.expect(Confirm).seq < 200
            until(lambda: channel_of(operator)._reading_paused, "nobody reads on")
            assert len(channel_of(operator).mailbox) < 100
            go_on.set()
    connection.confirmed(2002)
    connection.send_events(2003, "end")
    assert len(peer.finish(task)) == 2002
    assert operator.context.statistics.events_received == 2003


# --- what the task waits for in its own reads ------------------------------------------------------------


@pytest.mark.usefixtures("eager")
def test_answers_and_capacity_come_to_a_task_that_reads_by_itself(peer: Peer) -> None:  # H27, H33
    def body(context: SubtaskContext) -> list[Any]:
        answers = [context.request(number) for number in range(100)]
        for number in range(100):
            context.send_event(number)
        return answers

    operator = Calling(body)
    task, connection = peer.run(operator, answer={"window_events": 1})
    for number in range(100):
        request = connection.next_item(RequestMessage)
        connection.send(
            Confirm(TASK_ID, request.seq),
            AnswerMessage(TASK_ID, number + 1, request.request_id, "", encode_event(2 * number)),
        )
    for number in range(100):
        event = connection.next_item(EventMessage)
        assert decode_event(event.payload) == number
        connection.send(Confirm(TASK_ID, event.seq))
    assert reads_of(operator)._waits > 0
    assert peer.finish(task) == [[2 * number for number in range(100)]]


@pytest.mark.usefixtures("eager")
def test_its_deadlines_are_kept(peer: Peer) -> None:  # H48
    def body(context: SubtaskContext) -> int:
        context.wait_for_event()
        with pytest.raises(TimedOut):
            context.request("never answered", timeout_s=0.01)
        return context.wait_for_event(timeout_s=0.01)

    operator = Calling(body)
    task, connection = peer.run(operator)
    connection.send_events(1, "first")
    connection.expect(RequestMessage)
    connection.next_item(RequestCancelled)
    assert peer.finish(task) == [0]
    assert reads_of(operator)._waits > 1


@pytest.mark.usefixtures("eager")
def test_the_answer_to_another_thread_is_read_for_it(peer: Peer) -> None:  # H33
    operator = EventSource()
    answers: list[Any] = []
    task, connection = begin(peer, operator)
    for number in range(20):
        asking = threading.Thread(target=lambda: answers.append(operator.context.request("which?")))
        asking.start()
        request = connection.next_item(RequestMessage)
        until_it_reads_itself(operator)
        answer = AnswerMessage(TASK_ID, number + 2, request.request_id, "", encode_event(number))
        connection.send(Confirm(TASK_ID, request.seq), answer)
        connection.confirmed(number + 2)
        asking.join(PATIENCE_S)
        assert answers == list(range(number + 1))
    connection.send_events(22, "end")
    assert peer.finish(task) == ["first"]


@pytest.mark.usefixtures("eager")
def test_a_barrier_of_another_thread_wakes_it(peer: Peer) -> None:  # H23, H40
    operator = EventSource()
    task, connection = begin(peer, operator)
    connection.close_for(2, 6)
    until_it_reads_itself(operator)
    operator.context.barrier_arrived(6, events_before=2)  # this is the test's thread, not the task's
    assert connection.next_item(CheckpointAcknowledged).checkpoint_id == 6
    connection.send(connection.event(3, "end"))
    assert peer.finish(task) == ["first"]
    assert operator.calls[1:4] == [("event", "first"), ("snapshot", 6), ("event", "end")]


# --- ends -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
def test_the_end_of_the_attempt_reaches_everyone_else_who_waits(peer: Peer) -> None:  # H26
    operator = EventSource()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            operator.context.request("never answered", timeout_s=NEVER_S)
        except AttemptOver as error:
            errors.append(error)

    task, connection = begin(peer, operator)
    asking = threading.Thread(target=ask)
    asking.start()
    connection.next_item(RequestMessage)
    until_it_reads_itself(operator)
    connection.send(AttemptEnded(TASK_ID, "killed"))
    assert isinstance(task.error(), AttemptOver)
    asking.join(PATIENCE_S)
    assert not asking.is_alive()
    assert len(errors) == 1


@pytest.mark.usefixtures("eager")
def test_closing_the_channel_ends_its_wait(peer: Peer) -> None:  # H57
    operator = EventSource()
    task, connection = begin(peer, operator)
    channel_of(operator).close()  # this is the test's thread, not the task's
    connection.expect_end()
    with pytest.raises(AttemptOver, match="closed its end"):
        task.outputs()


# --- broken connections -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
def test_a_connection_that_breaks_under_it_is_replaced_again_and_again(peer: Peer) -> None:  # H24
    operator = EventSource()
    task, connection = begin(peer, operator)
    for seq in range(2, 12):
        connection.close()
        connection, resume = peer.resume(received_seq=1)
        assert resume.received_seq == seq - 1
        connection.send_events(seq, seq)
        until_it_reads_itself(operator)
    connection.send_events(12, "end")
    assert peer.finish(task) == ["first", *range(2, 12)]
    assert operator.context.statistics.reconnects == 10


@pytest.mark.usefixtures("eager")
def test_an_answer_comes_though_the_connection_broke_meanwhile(peer: Peer) -> None:  # H24, H33
    def body(context: SubtaskContext) -> Any:
        context.wait_for_event()
        return context.request("which?")

    operator = Calling(body)
    task, first = peer.run(operator)
    first.send_events(1, "first")
    asked = first.expect(RequestMessage)
    until_it_reads_itself(operator)
    first.close()
    second, _ = peer.resume(received_seq=1)
    assert second.next_item(RequestMessage) == asked
    until_it_reads_itself(operator)
    second.answer(2, asked, "this one")
    assert peer.finish(task) == ["this one"]


ANSWER_AFTER_S = 0.05
"""The latency of a slow network; each handshake step is far below ``connect_timeout_s``."""


@pytest.mark.usefixtures("eager")
def test_after_a_break_that_the_io_thread_sees_first_a_distant_sidecar_can_be_reached(peer: Peer) -> None:  # H24
    """Reconnecting has its own timeout, not the millisecond after which a self-reading task is checked."""
    operator = EventSource()
    task, first = peer.run(operator, answer={"window_bytes": 2**25})
    first.send_events(1, "first")
    until_it_reads_itself(operator)
    channel, reads = channel_of(operator), channel_of(operator)._own_reads
    reads._poller.unregister(reads._registered)  # only to make the I/O thread notice first
    waits = reads._waits
    reads.wake()
    until(lambda: reads.waiting and reads._waits > waits, "it waits again")
    connection = channel.connection
    assert connection is not None
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    for _ in range(4):
        operator.context.send_event("x" * 3_000_000)  # from another thread of the task
    assert channel._wire.has_outgoing
    until_it_reads_itself(operator)
    first.close()
    given_up = 0
    for _ in range(20):
        sock = peer.accept_raw()
        assert not reads.active  # because there is nothing to read
        reads._registered = -1  # check the next connection's socket again
        sock.settimeout(ANSWER_AFTER_S)
        try:
            if sock.recv(65536):  # the first message of the handshake
                sock.recv(65536)  # now it can only wait or give up
            given_up += 1
        except TimeoutError:
            break
        except ConnectionError:
            given_up += 1
        finally:
            sock.close()
    if given_up:
        channel.close()
        task.error()
    else:
        second, _ = peer.resume(received_seq=1)
        for _ in range(4):
            second.next_item(EventMessage)
        second.send_events(2, "end")
        assert peer.finish(task) == ["first"]
    assert given_up == 0, f"{given_up} connections in a row were given up within {ANSWER_AFTER_S} s"


@pytest.mark.usefixtures("eager")
def test_what_breaks_the_protocol_is_counted_once(peer: Peer) -> None:  # H48
    """Although the task's thread has seen it, and the I/O thread reads the bytes after it."""
    operator = EventSource()
    task, connection = begin(peer, operator)
    channel = channel_of(operator)
    with suppress(ConnectionError):  # the task closes at the first bytes
        connection.sock.sendall(bytes(8) + b"x" * 1_000_000)
    connection, _ = peer.resume(received_seq=1)
    counted, left_over = channel.breaches_in_a_row, channel._breach
    connection.send_events(2, "end")
    peer.finish(task)
    assert (counted, left_over) == (1, None)


# --- alone ------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture
def reads() -> Iterator[OwnReads]:
    own = OwnReads(SPIN_S)
    yield own
    own.close()


Pair = tuple[socket.socket, socket.socket]


def test_only_a_short_wait_promises_another_one(reads: OwnReads, pair: Pair) -> None:
    promises = [reads.are_worthwhile]
    for waited_s in (connection.SOON_S / 2, 2 * connection.SOON_S):
        reads.was_told(waited_s)
        promises.append(reads.are_worthwhile)
    reads.begin(pair[0])
    promises.append(reads.are_worthwhile)
    assert promises == [False, True, False, True]


def test_away_is_who_has_not_waited_between_two_looks(reads: OwnReads, pair: Pair) -> None:  # H23
    for _ in range(3):
        reads.begin(pair[0])
        assert [reads.has_been_away() for _ in range(3)] == [False] * 3  # it waits, however long that takes
        reads.begin(pair[0])
        reads.waiting = False
        assert [reads.has_been_away() for _ in range(3)] == [False, True, True]


@pytest.mark.parametrize("timeout_s", [None, NEVER_S])
def test_a_wait_without_news_ends_after_a_while(reads: OwnReads, pair: Pair, timeout_s: float | None) -> None:
    reads.begin(pair[0])
    assert not reads.wait(timeout_s)
    reads.active = False
    assert not reads.are_worthwhile


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("last_wait_s", [0.0, 1.0], ids=["spinning", "not spinning"])
@pytest.mark.parametrize("timeout_s", [0.0, SPIN_S / 2, 0.002])
def test_a_deadline_that_is_nearer_is_kept(
    reads: OwnReads, pair: Pair, timeout_s: float, last_wait_s: float
) -> None:  # H48
    reads.was_told(last_wait_s)
    reads.begin(pair[0])
    assert not reads.wait(timeout_s)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("last_wait_s", [0.0, 1.0], ids=["spinning", "not spinning"])
def test_a_wake_up_before_the_wait_counts_and_counts_once(reads: OwnReads, pair: Pair, last_wait_s: float) -> None:
    reads.was_told(last_wait_s)
    reads.begin(pair[0])
    reads.wake()
    reads.wake()
    assert reads.wait(None)
    reads.begin(pair[0])
    assert not reads.wait(0.001)


def test_a_wake_up_is_not_lost_to_what_comes_with_it(reads: OwnReads, pair: Pair) -> None:
    here, there = pair
    there.send(b"a")
    reads.begin(here)
    reads.wake()
    assert reads.wait(None)
    assert here.recv(16) == b"a"
    reads.begin(here)
    assert not reads.wait(0.001)


@pytest.mark.usefixtures("eager")
def test_the_next_socket_takes_the_place_of_the_last_one(reads: OwnReads, pair: Pair) -> None:  # H24
    here, there = pair
    reads.begin(here)
    there.send(b"a")
    assert reads.wait(None)
    other, far = socket.socketpair()
    with other, far:
        reads.begin(other)
        assert not reads.wait(0.001)  # although the last one has something to send
        far.send(b"b")
        assert reads.wait(None)
    reads.begin(here)
    assert reads.wait(None)


@pytest.mark.usefixtures("eager")
def test_a_wait_that_is_closed_before_it_has_ended_ends(reads: OwnReads, pair: Pair) -> None:  # H57
    reads.begin(pair[0])
    reads.wake()
    reads.close()
    assert reads.wait(None)


def test_what_is_closed_can_be_closed_again_and_woken(reads: OwnReads) -> None:
    reads.close()
    reads.close()
    reads.wake()
