# SPDX-License-Identifier: Apache-2.0

"""Wait for a task that reads its socket itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from spark_bridge.subtask.connection import OwnReads
from tests.spark_bridge.subtask.operators import Recorder, channel_of
from tests.spark_bridge.subtask.peer import PATIENCE_S, Peer, PeerConnection, RunningTask

NEVER_S = 3 * PATIENCE_S  # the peer gives up earlier


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll: a change of reader is not announced."""
    deadline = time.monotonic() + PATIENCE_S
    between_looks = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        between_looks.wait(0.001)


def reads_of(operator: Recorder) -> OwnReads:
    return channel_of(operator)._own_reads


def until_it_reads_itself(operator: Recorder) -> None:
    """Wait until it has handled all items, waits in its own read, and the I/O thread has released the socket since."""
    channel, reads = channel_of(operator), reads_of(operator)

    def it_does() -> bool:
        with channel._changed:
            return reads.active and reads.waiting and not channel.mailbox and reads._seen == reads._waits

    until(it_does, "the task reads by itself")


def begin(peer: Peer, operator: Recorder, **changes: Any) -> tuple[RunningTask, PeerConnection]:
    """Start a task that has received one event, its first item, and now reads its socket to wait for the next one."""
    task, connection = peer.run(operator, **changes)
    connection.send_events(1, "first")
    until_it_reads_itself(operator)
    return task, connection
