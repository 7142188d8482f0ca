# SPDX-License-Identifier: Apache-2.0

"""Exceptions raised in a task. Each message states the cause and the fix, because it is read in Spark's log."""

from __future__ import annotations

from protocol.describing import lines
from protocol.errors import HeadgateError, NoRestart, ProtocolError, RequestFailed
from protocol.wire.messages import RefusalCode

__all__ = [
    "NO_ANSWER",
    "BudgetExhausted",
    "CannotReachSidecar",
    "CheckpointDeclinedByOperator",
    "CoordinatorTraceback",
    "PeerLost",
    "RegistrationFailed",
    "RegistrationRefused",
    "RequestFailed",
    "TimedOut",
    "for_unknown_reasons",
    "request_failure",
]


class CannotReachSidecar(ProtocolError):
    """The task could not connect to the sidecar within ``connect_timeout_s``.

    Check from an executor that it reaches that address; ``Addresses.advertised_host`` gives another one.
    """


class RegistrationFailed(ProtocolError):
    """The sidecar was reached, but did not accept the task: no answer came in time, or the connection broke.

    Spark retries the task; if that repeats, look at the log of the driver.
    """


class RegistrationRefused(RegistrationFailed):
    """The sidecar refused the task; ``message`` says why. ``code`` is a ``RefusalCode``, or a later release's code."""

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


class CoordinatorTraceback(Exception):
    """The cause of a ``RequestFailed``: the driver's traceback of ``handle_request``, or its last 8 KiB."""

    def __init__(self, text: str) -> None:
        self.text = lines(text)
        super().__init__(self.text)

    def __str__(self) -> str:
        return f"\n\nThe coordinator's traceback, on the driver:\n{self.text}"


class TimedOut(ProtocolError, TimeoutError):
    """The coordinator did not take events, answer, become ready or confirm in time. The message names the timeout.

    If a method of the coordinator is the reason, the message says where it waits.
    """


NO_ANSWER = "no answer to request"


def for_unknown_reasons(failure: str) -> str:
    """The text of a wait that took too long, if the coordinator has not reported that one of its methods waits."""
    if not failure.startswith(NO_ANSWER):
        return failure
    return (
        f"{failure}: the coordinator is busy with earlier calls, its handle_request() has not returned yet, or it has "
        "returned a Reply that nothing has answered. Call answer() or fail() of each Reply, let the coordinator's "
        "methods do less, or ask with a longer timeout_s"
    )


class PeerLost(HeadgateError):
    """Another member of the group is lost, so this generation is over: enter ``with group as member:`` again.

    ``generation`` is the number of the generation, ``reason`` says what happened to whom.
    """

    def __init__(self, generation: int, reason: str) -> None:
        super().__init__(generation, reason)
        self.generation = generation
        self.reason = reason

    def __str__(self) -> str:
        return f"generation {self.generation} of the group is over: {self.reason}"


class BudgetExhausted(NoRestart):
    """What is left of a budget will never be enough for what was to be reserved.

    Catch it in the task to end its work cleanly. A job whose task fails with it ends with it, and is not restarted.
    """


class CheckpointDeclinedByOperator(HeadgateError):
    """Raise it in ``snapshot_state`` to decline the checkpoint without failing the task."""


def request_failure(error: str, traceback: bytes) -> RequestFailed:
    """What a request raises to which the coordinator has answered with an error."""
    failure = RequestFailed(error)
    if traceback:
        failure.__cause__ = CoordinatorTraceback(traceback.decode("utf-8", "replace"))
    return failure
