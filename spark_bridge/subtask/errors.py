"""Exceptions raised in a task. Each message states the cause and the fix, because it is read in Spark's log."""

from __future__ import annotations

from protocol.errors import HeadgateError, ProtocolError
from protocol.wire.messages import RefusalCode

__all__ = [
    "CannotReachSidecar",
    "CheckpointDeclinedByOperator",
    "CoordinatorTraceback",
    "RegistrationFailed",
    "RegistrationRefused",
    "RequestFailed",
    "TimedOut",
]


class CannotReachSidecar(ProtocolError):
    """No connection to the sidecar could be made within ``connect_timeout_s`` (H48)."""


class RegistrationFailed(ProtocolError):
    """The sidecar was reached, but never said whether it takes this task."""


class RegistrationRefused(RegistrationFailed):
    """The sidecar said no; the message is its own. ``code`` is one of ``RefusalCode``, or a later release's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        try:
            name = RefusalCode(self.code).name
        except ValueError:
            name = str(self.code)
        return f"the coordinator refused this task ({name}): {self.message}"


class RequestFailed(ProtocolError):
    """The coordinator answered a request with an error (H33); the text is the coordinator's.

    Its ``__cause__`` is a ``CoordinatorTraceback``, where the error was raised by ``handle_request``.
    """


class CoordinatorTraceback(Exception):
    """The cause of a ``RequestFailed``: where ``handle_request`` raised on the driver. The last 8 KiB of that text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\nThe coordinator's traceback, on the driver:\n{self.text}"


class TimedOut(ProtocolError, TimeoutError):
    """Room for an event, an answer, or the last confirmation did not come within its deadline (H48)."""


class CheckpointDeclinedByOperator(HeadgateError):
    """Raise it in ``snapshot_state`` to decline this checkpoint without failing the task (H45)."""
