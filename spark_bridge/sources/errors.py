# SPDX-License-Identifier: Apache-2.0

"""What a source raises in tasks and on the driver."""

from __future__ import annotations

from protocol.errors import HeadgateError


class SourceBlocked(HeadgateError):
    """The source cannot begin, because somebody else's work has to end first. The message says whose."""


class SourceDataLost(HeadgateError):
    """The source cannot be read on from the restored position: what follows there is gone. The message says why."""


class SourceUnreachable(HeadgateError):
    """The servers of a source did not answer for too long, or refused to. The message says what they said.

    Start the job again when they answer.
    """
