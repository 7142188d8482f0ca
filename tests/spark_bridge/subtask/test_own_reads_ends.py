# SPDX-License-Identifier: Apache-2.0

"""How the connection of a task that reads its own socket ends; the cases were found by breaking connections."""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest

from protocol.wire.messages import EventMessage
from spark_bridge.subtask import SubtaskContext, io_loop
from tests.spark_bridge.subtask.operators import Calling, EventSource
from tests.spark_bridge.subtask.peer import Peer, RunningTask
from tests.spark_bridge.subtask.test_own_reads import begin, eager, send, until, until_it_reads_itself  # noqa: F401

ANSWER_AFTER_S = 0.05
"""The latency of a slow network; each handshake step is far below ``connect_timeout_s``."""


@pytest.mark.usefixtures("eager")
def test_after_a_break_that_the_io_thread_sees_first_a_distant_sidecar_can_be_reached() -> None:  # H24
    """Reconnecting has its own timeout, not the millisecond after which a self-reading task is checked."""
    operator = EventSource()
    with Peer() as peer:
        task = RunningTask(lambda: operator, peer.endpoint())
        first = peer.take_task(window_bytes=2**25)
        send(first, 1, "first")
        until_it_reads_itself(operator)
        channel, reads = operator.context._channel, operator.context._channel._own_reads
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
            send(second, 2, "end")
            second.finish()
            assert task.outputs() == ["first"]
    assert given_up == 0, f"{given_up} connections in a row were given up within {ANSWER_AFTER_S} s"


def test_whoever_only_waits_for_a_moment_does_not_take_the_reading_over() -> None:
    """A short deadline says nothing about when data will come."""

    def body(context: SubtaskContext) -> int:
        return sum(context.wait_for_event(timeout_s=0.001) for _ in range(20))

    operator = Calling(body)
    with Peer() as peer:
        task = RunningTask(lambda: operator, peer.endpoint())
        peer.take_task().finish()
        assert task.outputs() == [0]
    assert operator.context._channel._own_reads._waits <= 2  # the confirmations of Opened and of Finished count as data


@pytest.mark.usefixtures("eager")
def test_what_breaks_the_protocol_is_counted_once() -> None:  # H48
    """Although the task's thread has seen it, and the I/O thread reads the bytes after it."""
    operator = EventSource()
    with Peer() as peer:
        task, connection = begin(peer, operator)
        channel = operator.context._channel
        with suppress(ConnectionError):  # the task closes at the first bytes
            connection.sock.sendall(bytes(8) + b"x" * 1_000_000)
        connection, _ = peer.resume(received_seq=1)
        counted, left_over = channel.breaches_in_a_row, channel._breach
        send(connection, 2, "end")
        connection.finish()
        task.outputs()
    assert (counted, left_over) == (1, None)


@pytest.mark.usefixtures("eager")
def test_a_peer_that_only_breaks_the_protocol_is_given_up_though_the_task_reads() -> None:  # H48
    operator = EventSource()
    with Peer() as peer:
        task, connection = begin(peer, operator)
        for broken in range(1, io_loop.BROKEN_IN_A_ROW_MAX + 1):
            until_it_reads_itself(operator)
            connection.sock.sendall(bytes(8))
            if broken < io_loop.BROKEN_IN_A_ROW_MAX:
                connection, _ = peer.resume(received_seq=1)
        error = task.error()
    assert "connections in a row broke the protocol" in str(error)
