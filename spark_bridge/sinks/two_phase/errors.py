# SPDX-License-Identifier: Apache-2.0

"""Exceptions raised by the two halves of a sink."""

from __future__ import annotations

from protocol.errors import HeadgateError, NoRestart


class SinkMisused(HeadgateError, ValueError):
    """The sink is used wrongly: a relative path, batch mode, two halves that name different targets, a target that does
    not match it, or a task that lists a part which it did not prepare.

    The message says what to correct.
    """


class SinkTargetChanged(SinkMisused, NoRestart):
    """The target no longer takes the rows that were prepared for it. Each restart would fail like this: none is tried.

    The message says what was changed and what to do. The rows are still prepared."""


class SinkBroken(HeadgateError, RuntimeError):
    """An earlier write of this writer failed, so what it holds may end in the middle of a row. Let the task fail."""


class SinkCommitFailed(HeadgateError, RuntimeError):
    """Prepared parts could not be committed, even after several tries. The last failure is chained as the cause.

    The parts are still prepared: run the job again when the target takes commits.
    """


class SinkDataLost(HeadgateError, RuntimeError):
    """A part that was prepared for a completed checkpoint and never committed is gone from the target system, and its
    rows with it. The message names the usual causes."""


class SinkFileLost(SinkDataLost):
    """A sealed file that was never published is gone, and its rows with it. The message names the usual causes."""
