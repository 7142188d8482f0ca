# SPDX-License-Identifier: Apache-2.0

"""Between the server and the actors: which connection belongs to which gateway."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Any

from actors import ActorRef
from actors.coordination.engine.messages import (
    AttachConnection,
    AttemptConnection,
    ConnectionClosed,
    GatewayMessage,
    MessagesArrived,
)
from actors.logs import get_logger
from protocol.ids import ExecutionAttempt
from protocol.wire.keys import identity_of
from protocol.wire.messages import RefusalCode, Refused, Register, Resume
from spark_bridge.bridge.messages import (
    BridgeMessage,
    RegistrationAbandoned,
    RegistrationReceived,
    UnknownAttemptResumed,
)
from spark_bridge.server.server import Connection

__all__ = ["ConnectionRouter"]

log = get_logger("headgate.bridge")


class ConnectionRouter:
    """The server's handler: knows which gateway serves which connection. Loop only.

    ``token_of`` returns what an attempt shows to resume (H74), given its operator's id and its task attempt id. A peer
    speaks only for the operator whose key it has proved (H76).

    If it ``takes_over``, tasks of an earlier sidecar may connect. They wait until ``attach``. An attempt that this
    sidecar has never accepted, or that has ended, is then killed through Spark, so that it does not count as a failure.
    """

    def __init__(self, token_of: Callable[[str, int], bytes], *, takes_over: bool = False) -> None:
        self._token_of = token_of
        self._takes_over = takes_over
        self._early: list[tuple[Connection, Register | Resume]] = []
        self._bridge_ref: ActorRef[BridgeMessage] | None = None
        self._why_refused = "the sidecar is not running"
        self._open: dict[int, Connection] = {}
        self._by_connection: dict[int, ActorRef[GatewayMessage]] = {}
        self._by_attempt: dict[tuple[str, int], ActorRef[GatewayMessage]] = {}
        self._connection_of: dict[tuple[str, int], int] = {}  # the newest of each attempt
        self._over: set[int] = set()  # open connections whose attempt is over
        self.messages_dropped = 0

    def attach(self, bridge_ref: ActorRef[BridgeMessage]) -> None:
        """Send registrations to the bridge from now on. Before, they are refused, or wait for the takeover."""
        self._bridge_ref = bridge_ref
        early, self._early = self._early, []
        for connection, message in early:
            if connection.connection_id not in self._open:
                continue
            if isinstance(message, Register):
                self._register(connection, message)
            else:
                self._resume(connection, message)

    def refuse_tasks(self, why: str) -> None:
        """Refuse registrations from now on, with this reason. Attempts that were accepted continue."""
        self._bridge_ref, self._why_refused = None, why

    # --- the server's side ----------------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        self._open[connection.connection_id] = connection

    def messages_received(self, connection: Connection, messages: Sequence[Any]) -> None:
        gateway = self._by_connection.get(connection.connection_id)
        if gateway is not None:
            gateway.tell_direct(MessagesArrived(connection.connection_id, messages))
            return
        if connection.connection_id in self._over:  # a killed task may keep sending for seconds (H3)
            self.messages_dropped += len(messages)
            log.debug("messages of ended attempt dropped", peer=connection.peer, messages=len(messages))
            return
        first, rest = messages[0], messages[1:]
        if why := self._why_not_believed(connection, first):
            connection.drop(why)
            return
        match first:
            case Register() | Resume() if self._takes_over and self._bridge_ref is None:
                connection.identified()
                self._early.append((connection, first))  # the rest is from an attempt that will be killed
            case Register() if not rest and not connection.is_identified:
                connection.identified()
                self._register(connection, first)
            case Resume():
                connection.identified()
                self._resume(connection, first)
                if rest and connection.connection_id in self._by_connection:  # the rest of a refused one is dropped
                    self.messages_received(connection, rest)
            case _:
                connection.drop("the peer did not register, and wait for the answer, before it sent other messages")

    def _why_not_believed(self, connection: Connection, message: Any) -> str:
        """Why the peer cannot be what it says that it is; empty if it can."""
        if not isinstance(message, Register | Resume):
            return ""
        if connection.authenticated_as != identity_of(message.operator_id):
            return f"the peer has the key of another operator than {message.operator_id!r}"
        if isinstance(message, Resume):
            token = self._token_of(message.operator_id, message.task_attempt_id)
            if not hmac.compare_digest(token, message.token):
                return f"the peer does not have the token of task {message.task_attempt_id}"
        return ""

    def disconnected(self, connection: Connection, reason: str) -> None:
        self._open.pop(connection.connection_id, None)
        gateway = self._by_connection.pop(connection.connection_id, None)
        if gateway is not None:
            gateway.tell_direct(ConnectionClosed(connection.connection_id, reason))
        elif connection.connection_id in self._over:
            self._over.remove(connection.connection_id)
        elif self._bridge_ref is not None:
            self._bridge_ref.tell_direct(RegistrationAbandoned(connection.connection_id))

    def attempt_token(self, attempt: ExecutionAttempt) -> bytes:
        """What the attempt is given, and shows when it connects again."""
        return self._token_of(attempt.operator_id, attempt.task_attempt_id)

    # --- the operators' side --------------------------------------------------------------------------------------

    def gateway_opened(
        self, attempt: ExecutionAttempt, ref: ActorRef[GatewayMessage], connection: AttemptConnection
    ) -> None:
        self._by_attempt[attempt.operator_id, attempt.task_attempt_id] = ref
        if connection.connection_id in self._open:
            self._serve(connection.connection_id, (attempt.operator_id, attempt.task_attempt_id), ref)
        else:
            ref.tell(ConnectionClosed(connection.connection_id, "closed before the attempt was accepted"))

    def gateway_closed(self, attempt: ExecutionAttempt) -> None:
        key = (attempt.operator_id, attempt.task_attempt_id)
        self._by_attempt.pop(key, None)
        connection_id = self._connection_of.pop(key, None)
        if connection_id is not None and self._by_connection.pop(connection_id, None) is not None:
            self._over.add(connection_id)

    @property
    def gateway_count(self) -> int:
        """The number of execution attempts that have a gateway now."""
        return len(self._by_attempt)

    def _serve(self, connection_id: int, key: tuple[str, int], gateway: ActorRef[GatewayMessage]) -> None:
        self._by_connection[connection_id] = gateway
        self._connection_of[key] = connection_id

    def _register(self, connection: Connection, message: Register) -> None:
        if self._bridge_ref is None:
            connection.send(Refused(message.task_attempt_id, RefusalCode.SHUTTING_DOWN, self._why_refused))
            connection.close()
        else:
            self._bridge_ref.tell_direct(RegistrationReceived(connection, message))

    def _resume(self, connection: Connection, message: Resume) -> None:
        gateway = self._by_attempt.get((message.operator_id, message.task_attempt_id))
        if gateway is None and self._takes_over and self._bridge_ref is not None:
            self._over.add(connection.connection_id)  # it is not answered: the kill arrives before it times out
            self._bridge_ref.tell_direct(UnknownAttemptResumed(message.task_attempt_id))
        elif gateway is None:
            text = f"task {message.task_attempt_id} of operator {message.operator_id!r} has ended"
            connection.send(Refused(message.task_attempt_id, RefusalCode.ATTEMPT_OVER, text))
            connection.close()
        else:
            self._serve(connection.connection_id, (message.operator_id, message.task_attempt_id), gateway)
            gateway.tell_direct(AttachConnection(connection, message.received_seq))
