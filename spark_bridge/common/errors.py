# SPDX-License-Identifier: Apache-2.0

"""Exceptions raised on the driver. Each message states the cause and the fix."""

from __future__ import annotations

from protocol.describing import describe
from protocol.errors import HeadgateError


class SidecarError(HeadgateError):
    """The sidecar cannot do what was asked. The message says why, and what to do."""


class SidecarNotRunning(SidecarError):
    """The sidecar has not been entered yet, or has been closed. Use it inside its ``with`` block."""


class CoordinatorStartError(SidecarError):
    """The factory or ``start`` of a coordinator raised. The cause is chained, and the coordinator is closed.

    Correct what raised, and coordinate again.
    """


class OperatorBroken(SidecarError):
    """An operator has ended because Headgate itself failed inside it; the cause is chained. Others continue.

    That is a bug of Headgate. The name can be used again after ``release``, or with ``replace=True``.
    """

    @classmethod
    def because(cls, operator_id: str, cause: BaseException) -> OperatorBroken:
        """The error with its text, and the cause chained."""
        error = cls(
            f"operator {operator_id!r} has ended, because Headgate itself failed inside it: {describe(cause)}. This is "
            "a bug of Headgate, not of your program: please report it with the log of the driver. Other operators "
            "continue. To use this one again, coordinate it with replace=True and run the job again"
        )
        error.__cause__ = cause
        return error


class RestartsExhausted(SidecarError):
    """The action of ``Sidecar.run`` failed more often than its restart strategy allows; the last cause is chained.

    Correct that cause, and run the action again.
    """


class NotSettled(SidecarError):
    """A run and its final checkpoint did not end within ``SidecarLimits.settle_timeout_s``.

    The text or the log says what is late.
    """


class OutputNotCommitted(SidecarError):
    """The output of a successful run was not committed when the sidecar was left; the message says why.

    Run the job again. Raised at the end of the ``with`` block. If another exception is being raised, it gets a note
    instead.
    """


class ConnectRefused(SidecarError):
    """A Spark Connect server, or its settings, cannot be served. The message says why and what to do."""


class ServerLost(SidecarError):
    """The Spark Connect server, or the session there, is gone. The message says what was observed.

    Neither the session nor the sidecar can be used again. A new sidecar in a new session continues from the last
    completed checkpoint in ``SidecarConfig.storage``.
    """


class BatchRefused(SidecarError):
    """The micro-batch that Spark asks for does not follow the operator's last completed checkpoint.

    The message says what does not match and how to continue.
    """


class BatchFailed(SidecarError):
    """A micro-batch was not committed, or the coordinator failed after it, although its function returned.

    Start the query again, with the same ``checkpointLocation``.
    """


class StreamRefused(SidecarError):
    """A streaming query cannot read a source from where it asks. The message says why and what to do."""
