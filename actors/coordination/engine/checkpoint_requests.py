# SPDX-License-Identifier: Apache-2.0

"""Record the triggered checkpoints of an operator that are not answered yet: since when, and who waits for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from actors import Reply
from actors.coordination.statistics import OperatorStatistics
from protocol.describing import describe
from protocol.errors import HeadgateError


class CheckpointFailed(HeadgateError):
    """A checkpoint was aborted, or never began; the message says why."""


@dataclass(frozen=True, slots=True)
class _Request:
    since: float
    reply_to: Reply[int] | None  # None if the schedule asked
    savepoint_directory: str | None


class CheckpointRequests:
    """One entry for each trigger, until one of the four ways to end answers it. Loop only.

    ``final_pending``, as an argument: a run has succeeded, and no checkpoint that started after its end is complete.
    ``uncommitted``: why the last checkpoint failed while that was the case, whenever it began. It is empty once a later
    one has completed.
    """

    def __init__(self, statistics: OperatorStatistics) -> None:
        self._open: dict[int, _Request] = {}
        self._statistics = statistics
        self.uncommitted = ""

    def savepoint_directory(self, checkpoint_id: int) -> str:
        """The directory of a savepoint that is in progress."""
        directory = self._open[checkpoint_id].savepoint_directory
        assert directory is not None
        return directory

    def triggered(
        self,
        checkpoint_id: int,
        now: float,
        reply_to: Reply[int] | None = None,
        savepoint_directory: str | None = None,
    ) -> None:
        self._open[checkpoint_id] = _Request(now, reply_to, savepoint_directory)

    def without_id(self, error: Exception, reply_to: Reply[int] | None, *, final_pending: bool) -> None:
        """A checkpoint was requested or due, but no id was available."""
        reason = f"no checkpoint id: {describe(error)}"
        self._statistics.checkpoints_refused += 1
        if final_pending:
            self.uncommitted = reason
        _fail(reply_to, reason, error)

    def completed(self, checkpoint_id: int, now: float) -> None:
        request = self._open.pop(checkpoint_id)
        statistics = self._statistics
        statistics.checkpoints_completed += 1
        statistics.last_completed_checkpoint_id = checkpoint_id
        statistics.last_checkpoint_ms = round((now - request.since) * 1e3, 3)
        statistics.checkpoint_us.record((now - request.since) * 1e6)
        self.uncommitted = ""
        if request.reply_to is not None:
            request.reply_to.answer(checkpoint_id)

    def savepoint_completed(self, checkpoint_id: int) -> bool:
        """A savepoint is complete. False if nobody waits for it any more, so that nobody would learn its name."""
        request = self._open.pop(checkpoint_id)
        self._statistics.savepoints_completed += 1
        return request.reply_to is not None and request.reply_to.answer(checkpoint_id)

    def withdrawn(self, reply_to: Reply[int]) -> int | None:
        """The requester waits no longer, and gets no answer. Returns the id of its checkpoint; None if it is over."""
        for checkpoint_id, request in self._open.items():
            if request.reply_to is reply_to:
                self._open[checkpoint_id] = replace(request, reply_to=None)
                return checkpoint_id
        return None

    def aborted(self, checkpoint_id: int, reason: str, *, final_pending: bool, written: bool) -> None:
        """A checkpoint was aborted.

        ``written``: its write had begun, so it may exist. The requester of a savepoint must know that (H64).
        """
        self._statistics.checkpoints_aborted += 1
        self._statistics.last_abort_reason = reason
        directory = self._open[checkpoint_id].savepoint_directory
        if written and directory is not None:
            reason = (
                f"{reason}; its file may exist in {directory}, or appear there later: do not restore it, because what "
                "it refers to may have been deleted"
            )
        self._failed(checkpoint_id, reason, final_pending)

    def refused(self, checkpoint_id: int, reason: str, *, final_pending: bool) -> None:
        self._statistics.checkpoints_refused += 1
        self._failed(checkpoint_id, reason, final_pending)

    def _failed(self, checkpoint_id: int, reason: str, final_pending: bool) -> None:
        request = self._open.pop(checkpoint_id)
        if final_pending:
            self.uncommitted = f"checkpoint {checkpoint_id}: {reason}"
        _fail(request.reply_to, f"checkpoint {checkpoint_id}: {reason}")


def _fail(reply_to: Reply[int] | None, reason: str, cause: Exception | None = None) -> None:
    if reply_to is not None:
        failure = CheckpointFailed(reason)
        failure.__cause__ = cause
        reply_to.fail(failure)


__all__ = ["CheckpointFailed", "CheckpointRequests"]
