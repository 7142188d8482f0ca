# SPDX-License-Identifier: Apache-2.0

"""Extended tasks of ``headgate.testing`` that lose connections, send messages late and keep requests by number."""

from __future__ import annotations

from typing import Any

from actors.coordination.engine.messages import AttachConnection, ConnectionClosed
from headgate.testing import Task as PublicTask
from headgate.testing._task import MemoryConnection
from protocol.subtask.types import BarrierArrived, RequestAbandoned
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import CoordinatorAwaited, UpMessage

__all__ = ["MemoryConnection", "Task"]


class Task(PublicTask):
    """A task whose state is the list of handled events. ``silent``: its messages are kept back."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.answers: dict[int, Any] = {}
        self.tracebacks: dict[int, bytes] = {}  # of the requests that failed
        self.notes: list[CoordinatorAwaited] = []
        self.kept_back: list[UpMessage] = []
        self.silent = False

    def snapshot_state(self) -> bytes:
        return encode_event(self.events)

    def finish(self, failure: str = "", state: bytes | None = b"") -> None:
        super().finish(failure, state)

    def ask(self, request: Any) -> int:
        """Send a request like ``request``, but return its number; the answer goes to ``answers``."""
        self.request(request)
        return len(self._requests)

    def abandon(self, request_id: int) -> None:
        """Wait no more for the answer to this request, as ``SubtaskContext.request`` does after its timeout."""
        self._drive(RequestAbandoned(request_id))

    def meet_barrier(self, checkpoint_id: int, events_before: int) -> None:
        """Deliver a barrier outside the stream of events."""
        self._drive(BarrierArrived(checkpoint_id, events_before))

    def lose_connection(self) -> None:
        """Lose everything in flight; both sides notice."""
        connection = self.connection
        assert connection is not None
        self.kept_back.clear()
        super().lose_connection()
        self.gateway_ref.tell(ConnectionClosed(connection.connection_id, "lost by the test"))

    def reconnect(self, connection: MemoryConnection) -> None:
        self.connection = connection
        self.gateway_ref.tell(AttachConnection(connection, self.machine.resume_seq))

    def speak(self) -> None:
        """Send the messages that were kept back."""
        self.silent = False
        kept_back, self.kept_back = self.kept_back, []
        for message in kept_back:
            self._say(message)

    def _take_note(self, note: CoordinatorAwaited) -> None:
        self.notes.append(note)

    def _resolve(self, request_id: int, error: str, payload: bytes) -> None:
        super()._resolve(request_id, error, payload)
        self.answers[request_id] = RuntimeError(error) if error else decode_event(payload)
        if error:
            self.tracebacks[request_id] = payload

    def _say(self, message: UpMessage) -> None:
        if self.silent:
            self.kept_back.append(message)
        else:
            super()._say(message)
