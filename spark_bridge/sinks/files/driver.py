# SPDX-License-Identifier: Apache-2.0

"""The file sink's half on the driver: sealed files become visible when the checkpoint that covers them completes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from protocol.describing import describe
from spark_bridge.sinks.files.directory import Published, SinkDirectory
from spark_bridge.sinks.files.journal import PublicationJournal
from spark_bridge.sinks.two_phase.errors import SinkFileLost
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, TwoPhaseCommitter, check_rows_and_bytes

_LOOKS_MAX = 5


class FileCommitter(TwoPhaseCommitter):
    """Moves sealed files to the readers' directory, after the journal says that they will be."""

    def __init__(self, url: str, context: SinkCommitterContext, options: dict[str, Any] | None = None) -> None:
        self._sink = context.sink
        self._log = context.log
        self._directory = SinkDirectory(url, context.sink, options)
        self._journal = PublicationJournal(self._directory)
        self._batch: Sequence[Committable] | None = None  # of the last commit, which may be tried again
        self._known: set[str] = set()  # those in it that were published before
        self._tried: set[str] = set()  # those in it of which a move seems to have failed

    def open(self) -> None:
        self._directory.prepare()
        for name in self._load_journal():
            self._log.warning("broken publication journal ignored", file=name)

    def commit(self, committables: Sequence[Committable]) -> None:
        """Publish the files in order. If one is lost, nothing is published, and nothing is written to the journal.

        Raises ``SinkFileLost`` for a file that is in neither place, unless it was published before, so that a reader
        may have taken it.
        """
        if committables is not self._batch:
            self._batch, self._tried = committables, set()
            self._known = {file.name for file in committables if self._journal.covers(file.part)}
        here = {*self._directory.staged(), *self._known, *self._tried}
        absent = [file.name for file in committables if file.name not in here]
        self._report_lost([name for name in absent if not self._directory.is_published(name)])
        self._journal.record(file.part for file in committables)
        lost = [file.name for file in committables if not self._publish(file)]
        self._directory.sync_published()
        self._batch = None
        self._report_lost(lost)

    def check_payload(self, payload: Any) -> None:
        check_rows_and_bytes(payload)

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self._directory.delete(name)
            except OSError as error:
                self._log.warning("part deletion failed", file=name, error=describe(error))

    def prepared(self) -> list[str]:
        return self._directory.staged()

    def close(self) -> None:
        """Delete the staging directory if it is empty. Files that a checkpoint may still cover are kept."""
        self._directory.remove_if_empty()

    def _publish(self, file: Committable) -> bool:
        """Publish one file; False if it is lost."""
        before = file.name in self._known or file.name in self._tried
        self._tried.add(file.name)
        outcome = self._directory.publish(file.name)
        if outcome is Published.GONE and not before:  # it existed a moment ago
            return False
        if outcome is Published.GONE:
            self._log.info("published file already removed by reader", file=file.name)
        return True

    def _report_lost(self, lost: list[str]) -> None:
        if lost:
            raise SinkFileLost(
                f"{lost} of sink {self._sink!r} were sealed and never published, but are gone from "
                f"{self._directory.address}, so their rows are lost. If a savepoint or an older checkpoint was "
                "restored after the application that took it had failed or continued, which deletes what it did not "
                "commit, restore the newest checkpoint. If somebody deleted files in the sink's hidden folder, put "
                "them back, or start again without this checkpoint"
            )

    def _load_journal(self) -> list[str]:
        for _ in range(_LOOKS_MAX - 1):
            with suppress(FileNotFoundError):  # a fenced application that is still running may replace its journal
                return self._journal.load(self._directory.staged())
        return self._journal.load(self._directory.staged())
