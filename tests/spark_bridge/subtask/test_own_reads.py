# SPDX-License-Identifier: Apache-2.0

"""A task that waits repeatedly reads its socket itself; the I/O thread reads while the task does something else.

First the whole task against a peer; then ``OwnReads`` alone, on a pair of sockets.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import (
    AnswerMessage,
    AttemptEnded,
    CheckpointAcknowledged,
    ClosedForCheckpoint,
    CloseForCheckpoint,
    Confirm,
    EventMessage,
    Finished,
    RequestMessage,
)
from spark_bridge.subtask import AttemptOver, SubtaskContext, TimedOut, channel, own_reads
from spark_bridge.subtask.channel import SubtaskChannel
from spark_bridge.subtask.own_reads import OwnReads
from tests.spark_bridge.subtask.operators import Calling, EventSource, Recorder
from tests.spark_bridge.subtask.peer import PATIENCE_S, TASK_ID, Peer, PeerConnection, RunningTask

NEVER_S = 3 * PATIENCE_S  # the peer gives up earlier
SPIN_S = 0.0002


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a task read its socket in every wait, and never give the socket back for lack of data.

    Anything that must end such a wait therefore has to wake the task: it never notices by chance.
    """
    monkeypatch.setattr(OwnReads, "are_worthwhile", True)
    monkeypatch.setattr(own_reads, "IDLE_S", NEVER_S)


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll: a change of reader is not announced."""
    deadline = time.monotonic() + PATIENCE_S
    between_looks = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        between_looks.wait(0.001)


def reads_of(operator: Recorder) -> OwnReads:
    return operator.context._channel._own_reads


def until_it_reads_itself(operator: Recorder) -> None:
    """Wait until it has handled all items, waits in its own read, and the I/O thread has released the socket since."""
    channel, reads = operator.context._channel, reads_of(operator)

    def it_does() -> bool:
        with channel._changed:
            return reads.active and reads.waiting and not channel.mailbox and reads._seen == reads._waits

    until(it_does, "the task reads by itself")


def begin(peer: Peer, operator: Recorder, **changes: Any) -> tuple[RunningTask, PeerConnection]:
    """Start a task that has received one event, its first item, and now reads its socket to wait for the next one."""
    task = RunningTask(lambda: operator, peer.endpoint(**changes))
    connection = peer.take_task()
    send(connection, 1, "first")
    until_it_reads_itself(operator)
    return task, connection


def send(connection: PeerConnection, seq: int, value: Any) -> None:
    """Send one event, and wait for the confirmation that it is in the mailbox."""
    connection.send(connection.event(seq, value))
    connection.confirmed(seq)


def end(connection: PeerConnection, seq: int) -> None:
    send(connection, seq, "end")
    connection.finish()


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
def test_a_task_that_waits_again_and_again_reads_by_itself(changes: dict[str, Any]) -> None:  # H22, H23, H30
    operator = Echoing()
    with Peer() as peer:
        task = RunningTask(lambda: operator, peer.endpoint(**changes))
        connection = peer.take_task()
        took_over = False
        for seq in range(1, 401):
            send(connection, seq, seq)
            assert decode_event(connection.expect(EventMessage).payload) == seq
            took_over |= reads_of(operator).active
        assert took_over
        send(connection, 401, "end")
        connection.expect(EventMessage)
        connection.finish()
        assert task.outputs() == list(range(1, 401))
    assert operator.context.statistics.events_received == 401


@pytest.mark.usefixtures("eager")
def test_it_does_not_need_the_io_thread_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:  # H22, H23
    operator = EventSource()
    with Peer() as peer:
        task, connection = begin(peer, operator)
        assert operator.context._channel.interests == 0
        with monkeypatch.context() as patch:
            patch.setattr(SubtaskChannel, "interests", 0)  # the I/O thread never reads, and never takes over
            for seq in range(2, 102):
                send(connection, seq, seq)
        end(connection, 102)
        assert task.outputs() == ["first", *range(2, 102)]


@pytest.mark.usefixtures("eager")
def test_what_comes_all_at_once_arrives_in_order_each_once(monkeypatch: pytest.MonkeyPatch) -> None:  # H22
    monkeypatch.setattr(channel, "WATCH_S", 0.0)  # the reader changes as often as possible
    operator = EventSource()
    with Peer() as peer:
        task, connection = begin(peer, operator)
        for first in range(2, 1002, 50):
            connection.send(*(connection.event(seq, seq) for seq in range(first, first + 50)))
        connection.confirmed(1001)
        end(connection, 1002)
        assert task.outputs() == ["first", *range(2, 1002)]
    assert operator.context.statistics.events_received == 1002


def test_it_gives_the_reading_back_when_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:  # H23
    operator = EventSource()
    with Peer() as peer:
        task = RunningTask(lambda: operator, peer.endpoint())
        connection = peer.take_task()
        reads = reads_of(operator)
        for seq in range(1, 6):
            with monkeypatch.context() as patch:
                patch.setattr(OwnReads, "are_worthwhile", True)
                send(connection, seq, seq)
                until(lambda: reads.active, "the task reads by itself")
            until(lambda: not (reads.active or reads.waiting), "the reading is given back")
        end(connection, 6)
        assert task.outputs() == list(range(1, 6))


def _compute_in_python(go_on: threading.Event) -> None:
    while not go_on.is_set():
        pass


def _compute_elsewhere(go_on: threading.Event) -> None:
    assert go_on.wait(PATIENCE_S)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("compute", [_compute_in_python, _compute_elsewhere])
def test_events_are_confirmed_though_the_task_that_reads_them_computes(
    compute: Callable[[threading.Event], None],
) -> None:  # H23: confirmed means in the mailbox, however long the task computes
    go_on = threading.Event()
    operator = Computing(lambda: compute(go_on))
    with Peer() as peer:
        task, connection = begin(peer, operator)
        send(connection, 2, "compute")
        try:
            until(lambda: operator.calls[-1] == ("event", "compute"), "the task computes")
            for seq in range(3, 13):
                send(connection, seq, seq)
            assert operator.calls[-1] == ("event", "compute")
            assert not reads_of(operator).active
        finally:
            go_on.set()
        until_it_reads_itself(operator)
        send(connection, 13, 13)
        end(connection, 14)
        assert task.outputs() == ["first", "compute", *range(3, 14)]


@pytest.mark.usefixtures("eager")
def test_a_mailbox_that_fills_while_it_computes_stops_the_reading() -> None:  # H27
    go_on = threading.Event()
    operator = Computing(lambda: go_on.wait(PATIENCE_S))
    with Peer() as peer:
        task, connection = begin(peer, operator, mailbox_events_max=4)
        send(connection, 2, "compute")
        for first in range(3, 2003, 200):  # far more than one read takes, or the mailbox holds
            connection.send(*(connection.event(seq, "x" * 2000) for seq in range(first, first + 200)))
            if first == 3:
                assert connection.expect(Confirm).seq < 200
                until(lambda: operator.context._channel._reading_paused, "nobody reads on")
                assert len(operator.context._channel.mailbox) < 100
                go_on.set()
        connection.confirmed(2002)
        end(connection, 2003)
        assert len(task.outputs()) == 2002
    assert operator.context.statistics.events_received == 2003


# --- what the task waits for in its own reads ------------------------------------------------------------


@pytest.mark.usefixtures("eager")
def test_answers_and_room_come_to_a_task_that_reads_by_itself() -> None:  # H27, H33
    def body(context: SubtaskContext) -> list[Any]:
        answers = [context.request(number) for number in range(100)]
        for number in range(100):
            context.send_event(number)
        return answers

    operator = Calling(body)
    with Peer() as peer:
        task = RunningTask(lambda: operator, peer.endpoint())
        connection = peer.take_task(window_events=1)
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
        finished = connection.next_item(Finished)
        connection.send(Confirm(TASK_ID, finished.seq))
        assert task.outputs() == [[2 * number for number in range(100)]]


@pytest.mark.usefixtures("eager")
def test_its_deadlines_are_kept() -> None:  # H48
    def body(context: SubtaskContext) -> int:
        context.wait_for_event()
        with pytest.raises(TimedOut):
            context.request("never answered", timeout_s=0.01)
        return context.wait_for_event(timeout_s=0.01)

    operator = Calling(body)
    with Peer() as peer:
        task = RunningTask(lambda: operator, peer.endpoint())
        connection = peer.take_task()
        send(connection, 1, "first")
        connection.expect(RequestMessage)
        connection.finish()
        assert task.outputs() == [0]
    assert reads_of(operator)._waits > 1


@pytest.mark.usefixtures("eager")
def test_the_answer_to_another_thread_is_read_for_it() -> None:  # H33
    operator = EventSource()
    answers: list[Any] = []
    with Peer() as peer:
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
        end(connection, 22)
        assert task.outputs() == ["first"]


@pytest.mark.usefixtures("eager")
def test_a_barrier_of_another_thread_wakes_it() -> None:  # H23, H40
    operator = EventSource()
    with Peer() as peer:
        task, connection = begin(peer, operator)
        connection.send(CloseForCheckpoint(TASK_ID, 2, 6))
        connection.next_item(ClosedForCheckpoint)
        until_it_reads_itself(operator)
        operator.context.barrier_arrived(6, events_before=2)  # this is the test's thread, not the task's
        assert connection.next_item(CheckpointAcknowledged).checkpoint_id == 6
        connection.send(connection.event(3, "end"))
        finished = connection.next_item(Finished)
        connection.send(Confirm(TASK_ID, finished.seq))
        assert task.outputs() == ["first"]
    assert operator.calls[1:4] == [("event", "first"), ("snapshot", 6), ("event", "end")]


# --- ends -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
def test_the_end_of_the_attempt_ends_its_wait_at_once() -> None:  # H26
    operator = EventSource()
    with Peer() as peer:
        task, connection = begin(peer, operator)
        connection.send(AttemptEnded(TASK_ID, "superseded by attempt 4"))
        error = task.error()
    assert isinstance(error, AttemptOver)
    assert "superseded by attempt 4" in str(error)


@pytest.mark.usefixtures("eager")
def test_the_end_of_the_attempt_reaches_whoever_else_waits() -> None:  # H26
    operator = EventSource()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            operator.context.request("never answered", timeout_s=NEVER_S)
        except AttemptOver as error:
            errors.append(error)

    with Peer() as peer:
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
def test_whoever_closes_the_channel_ends_its_wait() -> None:  # H57
    operator = EventSource()
    with Peer() as peer:
        task, connection = begin(peer, operator)
        operator.context._channel.close()  # this is the test's thread, not the task's
        connection.expect_end()
        error = task.error()
    assert isinstance(error, AttemptOver)
    assert "closed its end" in str(error)


# --- broken connections -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
def test_a_connection_that_breaks_under_it_is_replaced_again_and_again() -> None:  # H24
    operator = EventSource()
    with Peer() as peer:
        task, connection = begin(peer, operator)
        for seq in range(2, 12):
            connection.close()
            connection, resume = peer.resume(received_seq=1)
            assert resume.received_seq == seq - 1
            send(connection, seq, seq)
            until_it_reads_itself(operator)
        end(connection, 12)
        assert task.outputs() == ["first", *range(2, 12)]
    assert operator.context.statistics.reconnects == 10


@pytest.mark.usefixtures("eager")
def test_an_answer_comes_though_the_connection_broke_meanwhile() -> None:  # H24, H33
    def body(context: SubtaskContext) -> Any:
        context.wait_for_event()
        return context.request("which?")

    operator = Calling(body)
    with Peer() as peer:
        task = RunningTask(lambda: operator, peer.endpoint())
        first = peer.take_task()
        send(first, 1, "first")
        asked = first.expect(RequestMessage)
        until_it_reads_itself(operator)
        first.close()
        second, _ = peer.resume(received_seq=1)
        assert second.next_item(RequestMessage) == asked
        until_it_reads_itself(operator)
        second.send(AnswerMessage(TASK_ID, 2, asked.request_id, "", encode_event("this one")))
        second.confirmed(2)
        second.finish()
        assert task.outputs() == ["this one"]


@pytest.mark.usefixtures("eager")
def test_a_bad_frame_that_it_reads_costs_the_connection_and_nothing_else() -> None:  # H62
    operator = EventSource()
    with Peer() as peer:
        task, first = begin(peer, operator)
        first.sock.sendall(b"\xff" * 64)
        first.expect_end()
        second, resume = peer.resume(received_seq=1)
        assert resume.received_seq == 1
        send(second, 2, "second")
        until_it_reads_itself(operator)
        end(second, 3)
        assert task.outputs() == ["first", "second"]


@pytest.mark.usefixtures("eager")
def test_a_hole_in_the_stream_that_it_reads_is_filled_by_the_next_connection() -> None:  # H22
    operator = EventSource()
    with Peer() as peer:
        task, first = begin(peer, operator)
        first.send(first.event(2, "b"), first.event(4, "d"))
        first.expect_end()
        second, resume = peer.resume(received_seq=1)
        assert resume.received_seq == 2
        second.send(second.event(3, "c"), second.event(4, "d"))
        second.confirmed(4)
        end(second, 5)
        assert task.outputs() == ["first", "b", "c", "d"]


@pytest.mark.usefixtures("eager")
def test_without_a_connection_for_too_long_the_attempt_is_over_for_it_too() -> None:  # H24
    operator = EventSource()
    with Peer() as peer:
        task = RunningTask(lambda: operator, peer.endpoint())
        connection = peer.take_task(reconnect_timeout_s=0.2)
        send(connection, 1, "first")
        until_it_reads_itself(operator)
        peer.stop_listening()
        connection.close()
        assert isinstance(task.error(), AttemptOver)


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
    for waited_s in (own_reads.SOON_S / 2, 2 * own_reads.SOON_S):
        reads.was_told(waited_s)
        promises.append(reads.are_worthwhile)
    reads.begin(pair[0])
    promises.append(reads.are_worthwhile)
    assert promises == [False, True, False, True]


def test_whoever_waits_is_not_away_however_long_it_takes(reads: OwnReads, pair: Pair) -> None:
    reads.begin(pair[0])
    assert (reads.active, reads.waiting) == (True, True)
    assert [reads.has_been_away() for _ in range(3)] == [False] * 3


def test_away_is_who_has_not_waited_between_two_looks(reads: OwnReads, pair: Pair) -> None:  # H23
    for _ in range(3):
        reads.begin(pair[0])
        reads.waiting = False
        assert [reads.has_been_away() for _ in range(3)] == [False, True, True]


def test_who_has_waited_between_two_looks_is_not_away(reads: OwnReads, pair: Pair) -> None:
    for _ in range(3):
        reads.begin(pair[0])
        reads.waiting = False
        assert not reads.has_been_away()


def test_what_has_come_ends_the_wait_and_stays_where_it_is(reads: OwnReads, pair: Pair) -> None:
    here, there = pair
    for byte in (b"a", b"b", b"c"):
        there.send(byte)
        reads.begin(here)
        assert reads.wait(None)
        assert here.recv(16) == byte


@pytest.mark.usefixtures("eager")
def test_what_comes_later_ends_the_wait(reads: OwnReads, pair: Pair) -> None:
    here, there = pair
    reads.begin(here)
    coming = threading.Timer(0.01, there.send, [b"a"])
    coming.start()
    assert reads.wait(None)
    coming.join()


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
def test_another_thread_can_wake_it(reads: OwnReads, pair: Pair) -> None:
    reads.begin(pair[0])
    waking = threading.Timer(0.01, reads.wake)
    waking.start()
    assert reads.wait(None)
    waking.join()


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
def test_a_socket_that_the_other_end_closes_ends_the_wait(reads: OwnReads, pair: Pair) -> None:
    here, there = pair
    reads.begin(here)
    there.close()
    assert reads.wait(None)
    assert here.recv(16) == b""


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
