# SPDX-License-Identifier: Apache-2.0

"""Exceptions raised by the two halves of the sink."""

from __future__ import annotations

from protocol.errors import HeadgateError

__all__ = ["SinkBroken", "SinkFileLost", "SinkMisused", "SinkPublishError"]


class SinkMisused(HeadgateError, ValueError):
    """The sink is used wrongly: a relative path, batch mode, two halves that name different directories, or a task that
    lists a file which it did not write."""


class SinkBroken(HeadgateError, RuntimeError):
    """An earlier write of this writer failed, so its open file may end in the middle of a row. Let the task fail."""


class SinkPublishError(HeadgateError, RuntimeError):
    """Sealed files could not be made visible, even after several tries. The last failure is chained as the cause."""


class SinkFileLost(HeadgateError, RuntimeError):
    """A sealed file that was never published is gone, and its rows with it. The message names the usual causes."""
