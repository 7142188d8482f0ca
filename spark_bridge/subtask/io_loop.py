# SPDX-License-Identifier: Apache-2.0

"""The I/O thread of one attempt: it reads, writes and reconnects until the attempt ends."""

from __future__ import annotations

import logging
import selectors
import time
from typing import TYPE_CHECKING, Final

from protocol.describing import describe, type_name
from protocol.errors import HandshakeFailed, RemoteProtocolError, VersionMismatch
from protocol.wire.messages import AttemptEnded, Refused, Resumed
from spark_bridge.subtask.connection import Connection
from spark_bridge.subtask.waker import Interrupted

if TYPE_CHECKING:
    from spark_bridge.subtask.channel import SubtaskChannel

__all__ = ["serve"]

_log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0
BROKEN_IN_A_ROW_MAX: Final = 8  # connections in a row that break the protocol end the attempt


def serve(channel: SubtaskChannel) -> None:
    """The body of the I/O thread. It returns when the channel is closed or its attempt is over, and raises nothing."""
    try:
        _Loop(channel).run()
    except Interrupted:
        pass
    except BaseException as error:
        _log.exception("task %s: the I/O thread failed", channel.key[0])
        channel.end(f"the task's connection to the driver failed: {describe(error)}")
    finally:
        channel.loop_ended()


class _Loop:
    def __init__(self, channel: SubtaskChannel) -> None:
        self._channel = channel

    def run(self) -> None:
        while not self._channel.stopping:
            connection = self._channel.connection
            if connection is None:
                self._reconnect()
                continue
            try:
                self._converse(connection)
            except RemoteProtocolError as error:
                # The peer sends again what is missing here, so a new connection repairs a gap or a torn frame.
                self._lost(str(error))
                self._channel.take_breach()  # it is counted here, and would otherwise count twice
                self._count_broken(error)
            except OSError as error:
                self._lost(str(error))
                if (breach := self._channel.take_breach()) is not None:  # the task's thread read it
                    self._count_broken(breach)

    def _count_broken(self, error: RemoteProtocolError) -> None:
        self._channel.breaches_in_a_row += 1
        if self._channel.breaches_in_a_row >= BROKEN_IN_A_ROW_MAX:
            self._channel.end(
                f"{BROKEN_IN_A_ROW_MAX} connections in a row broke the protocol, the last one by: {error}"
            )

    def _lost(self, why: str) -> None:
        _log.info("task %s: connection lost: %s", self._channel.key[0], why)
        self._channel.lose_connection()

    def _converse(self, connection: Connection) -> None:
        """Read and write until the channel stops. Raises if the connection breaks."""
        channel = self._channel
        with selectors.DefaultSelector() as selector:
            selector.register(channel.waker, selectors.EVENT_READ)
            registered = 0
            while not channel.stopping:
                wanted = channel.interests
                if wanted != registered:
                    _set_interests(selector, connection, registered, wanted)
                    registered = wanted
                for key, events in selector.select(channel.pass_time_and_watch()):
                    if key.fileobj is channel.waker:
                        channel.waker.drain()
                        continue
                    if events & selectors.EVENT_WRITE:
                        channel.write()
                    if events & selectors.EVENT_READ:
                        channel.read()

    def _reconnect(self) -> None:
        """Try until a connection is up, with increasing pauses. The machine's deadline ends the attempt (H24)."""
        channel = self._channel
        pause_s = FIRST_PAUSE_S
        while True:
            left_s = channel.pass_time()
            if channel.stopping:
                return
            try:
                self._resume(time.monotonic() + min(10.0, left_s if left_s is not None else 10.0))
                return
            except (HandshakeFailed, VersionMismatch) as error:
                # Another sidecar listens there now, which can never know this task.
                channel.end(f"the connection broke, and another sidecar answers at its address: {error}")
                return
            except RemoteProtocolError as error:
                self._count_broken(error)
            except OSError as error:
                _log.info("task %s: reconnection failed, will retry: %s", channel.key[0], error)
            self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _resume(self, deadline: float) -> None:
        channel = self._channel
        connection = Connection.open(channel.endpoint, deadline, channel.waker)
        attached = False
        try:
            answer, *rest = connection.exchange(channel.resume_message(), deadline)
            match answer:
                case Resumed(received_seq=received_seq):
                    channel.attach_connection(connection, received_seq, rest)
                    attached = True
                case Refused(message=why) | AttemptEnded(reason=why):
                    channel.end(why)
                case other:
                    raise RemoteProtocolError(f"the sidecar answered a resumption with {type_name(other)}")
        finally:
            if not attached and channel.connection is not connection:
                connection.close()

    def _pause(self, pause_s: float) -> None:
        """Wait, unless the attempt is being closed. The task's own wake-ups do not end the wait."""
        channel = self._channel
        left_s = channel.pass_time()
        deadline = time.monotonic() + (pause_s if left_s is None else min(pause_s, left_s))
        with selectors.DefaultSelector() as selector:
            selector.register(channel.waker, selectors.EVENT_READ)
            while not channel.stopping and (rest_s := deadline - time.monotonic()) > 0:
                if selector.select(rest_s):
                    channel.waker.drain()


def _set_interests(selector: selectors.BaseSelector, connection: Connection, registered: int, wanted: int) -> None:
    """Watch the socket for ``wanted``. A selector accepts no empty set of events: then the socket is removed."""
    if not wanted:
        selector.unregister(connection.sock)
    elif registered:
        selector.modify(connection.sock, wanted)
    else:
        selector.register(connection.sock, wanted)
