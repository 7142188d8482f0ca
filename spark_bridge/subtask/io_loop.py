"""What the I/O thread of one attempt does: read, write, reconnect, and end when the attempt ends."""

from __future__ import annotations

import logging
import selectors
import time
from typing import TYPE_CHECKING, Final

from protocol.errors import HandshakeFailed, RemoteProtocolError, VersionMismatch
from protocol.wire.codec import encode_message
from protocol.wire.messages import AttemptEnded, Refused, Resumed
from spark_bridge.subtask.connection import Connection
from spark_bridge.subtask.waker import Interrupted

if TYPE_CHECKING:
    from spark_bridge.subtask.valve_core import ValveCore

__all__ = ["serve"]

_log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0
BROKEN_IN_A_ROW_MAX: Final = 8  # so many connections may break the protocol before the attempt is given up


def serve(valve: ValveCore) -> None:
    """The body of the I/O thread. Returns when the valve is closed or its attempt is over; raises nothing."""
    try:
        _Loop(valve).run()
    except Interrupted:
        pass
    except BaseException as error:
        _log.exception("the I/O thread of task %s failed", valve.key[0])
        valve.end(f"the task's end of the wire failed: {error!r}")
    finally:
        valve.loop_ended()


class _Loop:
    def __init__(self, valve: ValveCore) -> None:
        self._valve = valve

    def run(self) -> None:
        while not self._valve.stopping:
            connection = self._valve.connection
            if connection is None:
                self._reconnect()
                continue
            try:
                self._converse(connection)
            except RemoteProtocolError as error:
                # The peer sends again from where we are, so a new connection heals a gap or a torn frame.
                self._lost(str(error))
                self._valve.take_breach()  # or it would count twice
                self._count_broken(error)
            except OSError as error:
                self._lost(str(error))
                if (breach := self._valve.take_breach()) is not None:  # the task's thread has seen it
                    self._count_broken(breach)

    def _count_broken(self, error: RemoteProtocolError) -> None:
        self._valve.breaches_in_a_row += 1
        if self._valve.breaches_in_a_row >= BROKEN_IN_A_ROW_MAX:
            self._valve.end(f"the sidecar breaks the protocol again and again: {error}")

    def _lost(self, why: str) -> None:
        _log.info("task %s lost its connection: %s", self._valve.key[0], why)
        self._valve.lose_connection()

    def _converse(self, connection: Connection) -> None:
        """Read and write until the valve stops; a broken connection raises."""
        valve = self._valve
        with selectors.DefaultSelector() as selector:
            selector.register(valve.waker, selectors.EVENT_READ)
            registered = 0
            while not valve.stopping:
                wanted = valve.interests
                if wanted != registered:
                    _set_interests(selector, connection, registered, wanted)
                    registered = wanted
                for key, events in selector.select(valve.time_to_look()):
                    if key.fileobj is valve.waker:
                        valve.waker.answer()
                        continue
                    if events & selectors.EVENT_WRITE:
                        valve.write()
                    if events & selectors.EVENT_READ:
                        valve.read()

    def _reconnect(self) -> None:
        """Try until a connection stands, with growing pauses; the machine's deadline ends the attempt (H24)."""
        valve = self._valve
        pause_s = FIRST_PAUSE_S
        while True:
            left_s = valve.pass_time()
            if valve.stopping:
                return
            try:
                self._resume(time.monotonic() + min(10.0, left_s if left_s is not None else 10.0))
                return
            except (HandshakeFailed, VersionMismatch) as error:
                # Another sidecar listens there now: it will never know this task.
                valve.end(f"the connection broke, and the peer is not the one it was before: {error}")
                return
            except RemoteProtocolError as error:
                self._count_broken(error)
            except OSError as error:
                _log.info("task %s cannot reconnect yet: %s", valve.key[0], error)
            self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _resume(self, deadline: float) -> None:
        valve = self._valve
        endpoint = valve.endpoint
        connection = Connection.open(endpoint.host, endpoint.port, endpoint.secret, deadline, valve.waker)
        attached = False
        try:
            answer, *rest = connection.exchange(encode_message(valve.resume_message()), deadline)
            match answer:
                case Resumed(received_seq=received_seq):
                    valve.attach_connection(connection, received_seq, rest)
                    attached = True
                case Refused(message=why) | AttemptEnded(reason=why):
                    valve.end(why)
                case other:
                    raise RemoteProtocolError(f"the sidecar answered a resumption with {type(other).__name__}")
        finally:
            if not attached and valve.connection is not connection:
                connection.close()

    def _pause(self, pause_s: float) -> None:
        """Wait, but not for an attempt that is being closed; the task's own wake-ups do not shorten it."""
        valve = self._valve
        left_s = valve.pass_time()
        deadline = time.monotonic() + (pause_s if left_s is None else min(pause_s, left_s))
        with selectors.DefaultSelector() as selector:
            selector.register(valve.waker, selectors.EVENT_READ)
            while not valve.stopping and (rest_s := deadline - time.monotonic()) > 0:
                if selector.select(rest_s):
                    valve.waker.answer()


def _set_interests(selector: selectors.BaseSelector, connection: Connection, registered: int, wanted: int) -> None:
    """A selector knows no empty set of events: then the socket is taken out."""
    if not wanted:
        selector.unregister(connection.sock)
    elif registered:
        selector.modify(connection.sock, wanted)
    else:
        selector.register(connection.sock, wanted)
