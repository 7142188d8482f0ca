# SPDX-License-Identifier: Apache-2.0

"""A coordinator that only commits files, and its part for other coordinators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol.arguments import checked
from spark_bridge.sinks.files.driver import FileCommitter
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.two_phase.driver import SinkCommits, TwoPhaseSinkCoordinator

__all__ = ["FileSinkCoordinator", "SinkCommitter"]


class SinkCommitter(SinkCommits):
    """Commits the files of a sink, as a part of any ``OperatorCoordinator``.

    Call each method in the coordinator's method of that name, and await those that are coroutines. They are for the
    coordinator's loop only. Work on files runs in a worker thread and is awaited, so the order of the coordinator's
    calls is kept and the loop is never blocked. Let exceptions leave the coordinator's method: they fail the job, and
    the restore that follows publishes again.

    ``url`` and ``options`` must be the same as those of the writers, and so must ``name``, whose default is the
    operator's id. Only one application at a time may use a name in a directory, because the next one deletes what this
    one has not published. Readers may rename, move or delete published files.

    ``retry_delays_s`` are the seconds to wait before each further try if the filesystem fails.
    """

    @checked()
    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        options: dict[str, Any] | None = None,
        retry_delays_s: Sequence[float] = (0.1, 0.5, 2.0),
    ) -> None:
        super().__init__(FileSink(url, name=name, options=options), retry_delays_s=retry_delays_s)
        self._committer: FileCommitter

    @property
    def files_pending(self) -> int:
        """The number of sealed files that wait for their checkpoint."""
        return self.pending

    @property
    def files_published(self) -> int:
        """The number of files that were made visible."""
        return self._committer.files_published if self._context is not None else 0

    @property
    def rows_published(self) -> int:
        """The number of rows in these files."""
        return self._committer.rows_published if self._context is not None else 0

    async def sealed(self, subtask: int, attempt: int, event: Any) -> bool:
        """Handle ``event`` and return True if it is a file list of this sink. For ``handle_event_from_operator``.

        Raises:
            SinkMisused: the subtask writes into another directory, or lists a file that it did not write.
            SinkFileLost, SinkCommitFailed: a file that had to be published now could not be published.
        """
        return await self.prepared(subtask, attempt, event)


class FileSinkCoordinator(TwoPhaseSinkCoordinator):
    """Commits the files of ``FileSinkOperator``, and of other operators whose only events come from a ``SinkWriter``.

    The arguments are those of ``SinkCommitter``. A coordinator with further tasks contains a ``SinkCommitter`` and
    calls it as this class does. It is for streaming mode: in batch mode, ``start`` raises ``SinkMisused``, and so
    ``coordinate`` raises ``CoordinatorStartError``.
    """

    @checked()
    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        options: dict[str, Any] | None = None,
        retry_delays_s: Sequence[float] = (0.1, 0.5, 2.0),
    ) -> None:
        super().__init__(FileSink(url, name=name, options=options), retry_delays_s=retry_delays_s)
        self.committer = SinkCommitter(url, name=name, options=options, retry_delays_s=retry_delays_s)
        """What publishes the files, with the figures of it."""
        self.commits = self.committer
