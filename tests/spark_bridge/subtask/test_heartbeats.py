# SPDX-License-Identifier: Apache-2.0

"""A task gives signs of life whatever it does, from a real thread over a real connection (H94)."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from protocol.wire.messages import Confirm, Finished, Heartbeat, Opened
from spark_bridge.subtask import SubtaskContext
from tests.spark_bridge.subtask.operators import Calling, channel_of
from tests.spark_bridge.subtask.peer import PATIENCE_S, Peer, PeerConnection, RunningTask
from tests.spark_bridge.subtask.reading import until

BEATS = {"heartbeat_interval_s": 0.005}


def run(peer: Peer, operator: Calling, **changes: Any) -> tuple[RunningTask, PeerConnection]:
    """Start a task and take it; heartbeats may come before it is open."""
    task = peer.start(operator, **changes)
    connection = peer.register(**BEATS)
    while isinstance(message := connection.receive(), Heartbeat):
        pass
    assert isinstance(message, Opened)
    connection.send(Confirm(message.task_attempt_id, message.seq))
    return task, connection


def hear_beats(connection: PeerConnection, count: int) -> None:
    while count:
        message = connection.receive()
        assert isinstance(message, Heartbeat | Confirm)
        count -= isinstance(message, Heartbeat)


def end(connection: PeerConnection) -> None:
    """Take the task's completion message, and confirm it."""
    while isinstance(message := connection.receive(), Heartbeat | Confirm):
        pass
    assert isinstance(message, Finished)
    assert not message.failure
    connection.send(Confirm(message.task_attempt_id, message.seq))


def compute_in_python(heard: threading.Event) -> None:
    total = 0
    while not heard.is_set():
        total = sum(range(1000)) + total % 7


def compute_in_c(heard: threading.Event) -> None:
    while not heard.is_set():
        hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)  # without the interpreter lock


def sleep(heard: threading.Event) -> None:
    assert heard.wait(PATIENCE_S)


@pytest.mark.parametrize("busy", [compute_in_python, compute_in_c, sleep])
def test_busy_task_gives_signs_of_life(peer: Peer, busy: Callable[[threading.Event], None]) -> None:  # H94
    heard = threading.Event()
    task, connection = run(peer, Calling(lambda context: busy(heard)))
    hear_beats(connection, 5)
    heard.set()
    end(connection)
    task.outputs()


def test_waiting_task_gives_signs_of_life_no_matter_who_reads(peer: Peer, until_it_waits: Any) -> None:  # H94
    operator = Calling(lambda context: context.wait_for_event())
    task, connection = run(peer, operator)
    until_it_waits(operator)
    hear_beats(connection, 5)
    connection.send(connection.event(1, "go"))
    end(connection)
    task.outputs()


def test_task_whose_mailbox_is_full_gives_signs_of_life(peer: Peer) -> None:  # H94, H27
    heard = threading.Event()

    def body(context: SubtaskContext) -> None:
        assert heard.wait(PATIENCE_S)
        context.handle_pending()

    operator = Calling(body)
    task, connection = run(peer, operator, mailbox_events_max=2)
    connection.send(connection.event(1, 1), connection.event(2, 2))
    channel = channel_of(operator)
    until(lambda: channel._reading_paused, "the task does not read its socket")
    hear_beats(connection, 5)
    heard.set()
    end(connection)
    task.outputs()


def test_new_connection_has_signs_of_life_too(peer: Peer) -> None:  # H94, H24
    heard = threading.Event()
    task, connection = run(peer, Calling(lambda context: heard.wait(PATIENCE_S)))
    hear_beats(connection, 2)
    connection.close()
    connection, _ = peer.resume(1)
    hear_beats(connection, 3)
    heard.set()
    end(connection)
    task.outputs()
