"""What the two halves of the sink raise."""

from __future__ import annotations

from protocol.errors import HeadgateError

__all__ = ["SinkBroken", "SinkFileLost", "SinkMisused", "SinkPublishError"]


class SinkMisused(HeadgateError, ValueError):
    """The sink was set up wrongly: a relative path, batch mode, two ends that do not name the same directory."""


class SinkBroken(HeadgateError, RuntimeError):
    """An earlier write of this writer failed, so its open file may end in the middle of a row. Let the task fail."""


class SinkPublishError(HeadgateError, RuntimeError):
    """Sealed files could not be made visible, also not after several tries; the cause is the last failure."""


class SinkFileLost(HeadgateError, RuntimeError):
    """A sealed file that was never published is gone, and its rows with it; the text says what usually causes that."""
