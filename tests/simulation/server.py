# SPDX-License-Identifier: Apache-2.0

"""The driver's end of each connection, and the real router behind it."""

from __future__ import annotations

from collections.abc import Callable

from actors import ActorRef
from actors.coordination.engine.messages import AttemptConnection, GatewayMessage
from protocol.ids import ExecutionAttempt
from protocol.wire.keys import identity_of
from protocol.wire.messages import BarrierMessage, DownMessage
from spark_bridge.bridge.router import ConnectionRouter
from tests.simulation.application import OPERATOR
from tests.simulation.network import Connection


class ServerEnd:
    """Stands in for the server's own ``Connection``, over one that breaks.

    ``barrier_leaves``: hears of each barrier, with its task.
    """

    def __init__(
        self,
        connection: Connection,
        dropped: Callable[[str], None],
        barrier_leaves: Callable[[int, int], None],
    ) -> None:
        self.connection_id = connection.connection_id
        self.peer = f"task {connection.task_attempt_id}"
        self.is_identified = False
        self.authenticated_as = identity_of(OPERATOR)
        self._connection = connection
        self._dropped = dropped
        self._barrier_leaves = barrier_leaves
        self.came = False  # something was read since the last look

    def identified(self) -> None:
        self.is_identified = True

    def heard(self) -> bool:
        came, self.came = self.came or bool(self._connection.up), False
        return came

    def progressed(self) -> bool:
        return False

    def send(self, message: DownMessage, *, immediately: bool = False) -> None:
        if isinstance(message, BarrierMessage):
            self._barrier_leaves(message.task_attempt_id, message.checkpoint_id)
        self._connection.send_down(message)

    def close(self, *, flush: bool = True) -> None:
        """Stop reading; the end is reported later, as for a broken connection."""
        if not flush:
            self._dropped(self.peer)
        self._connection.close_by_server(flush=flush)


class Router(ConnectionRouter):
    """Records which attempts have a gateway, and which siblings each had when it was closed (H13)."""

    def __init__(self) -> None:
        super().__init__(lambda operator_id, task_attempt_id: f"token of {task_attempt_id}".encode())
        self.open: dict[int, ExecutionAttempt] = {}
        self.accepted: set[int] = set()
        self.closed_beside: dict[int, set[int]] = {}
        self.told: Callable[[], int] = lambda: 0  # how much the coordinator was told so far
        self._opened_at: dict[int, int] = {}

    def gateway_opened(
        self, attempt: ExecutionAttempt, ref: ActorRef[GatewayMessage], connection: AttemptConnection
    ) -> None:
        self.open[attempt.task_attempt_id] = attempt
        self.accepted.add(attempt.task_attempt_id)
        self._opened_at[attempt.task_attempt_id] = self.told()
        super().gateway_opened(attempt, ref, connection)

    def gateway_closed(self, attempt: ExecutionAttempt) -> None:
        self.open.pop(attempt.task_attempt_id, None)
        self.closed_beside[attempt.task_attempt_id] = self.beside(attempt)
        super().gateway_closed(attempt)

    def beside(self, attempt: ExecutionAttempt, told: int | None = None) -> set[int]:
        """Return the other live attempts of its subtask, ready or not.

        ``told``: only those that were there before the coordinator was told so much. The tracker may take many
        decisions in one step, after it has held them back.
        """
        same = (other for other in self.open.values() if other.subtask == attempt.subtask)
        return {
            other.attempt
            for other in same
            if other != attempt and (told is None or self._opened_at[other.task_attempt_id] < told)
        }
