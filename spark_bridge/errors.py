"""Exceptions raised on the driver. Each message states the cause and the fix."""

from __future__ import annotations

from protocol.errors import HeadgateError


class SidecarError(HeadgateError):
    """The sidecar cannot do what was asked."""


class SidecarNotRunning(SidecarError):
    """The sidecar is not entered yet, or has been closed."""


class CoordinatorStartError(SidecarError):
    """A coordinator's ``start`` raised; the cause is chained, and what was built is closed (H6)."""


class RestartsExhausted(SidecarError):
    """The action of ``Sidecar.run`` failed more often than its restart strategy allows; the last cause is chained."""


class NotSettled(SidecarError):
    """The end of a run, or its final checkpoint, did not come within ``SidecarConfig.settle_timeout_s`` (H48)."""


class OutputNotCommitted(SidecarError):
    """The output of a successful run was not committed when the sidecar was left; the message says why.

    Run the job again. Raised at the end of the ``with`` block; an exception that is already on its way gets a note.
    """


class BatchRefused(SidecarError):
    """The micro-batch that Spark asks for does not follow the operator's last completed checkpoint."""


class BatchFailed(SidecarError):
    """A micro-batch is not committed, or the coordinator failed behind it, although its function returned."""
