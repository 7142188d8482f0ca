# SPDX-License-Identifier: Apache-2.0

"""What committers of tables of Parquet files have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spark_bridge.common.secret_texts import Secrets
from spark_bridge.sinks.parquet.folder import DataFolder
from spark_bridge.sinks.two_phase.errors import SinkDataLost
from spark_bridge.sinks.two_phase.parts import Committable, PartName
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, TwoPhaseCommitter, check_rows_and_bytes

_CONFLICTS_MAX = 30


class ParquetCommitter(TwoPhaseCommitter):
    """Adds data files to a table. A subclass knows the format: ``load``, ``committed_numbers`` and ``add``.

    ``add`` raises one of ``conflicts`` if another writer was faster, or if the outcome is not known. Then the table is
    loaded again: perhaps this commit, or that of another driver, was the one that was faster.
    """

    conflicts: tuple[type[BaseException], ...] = ()

    def __init__(self, context: SinkCommitterContext, folder: DataFolder, target: str, secrets: Secrets) -> None:
        self.sink = context.sink
        self.log = context.log
        self.folder = folder
        self._target = target
        self.secrets = secrets

    def load(self) -> Any:
        """Return the newest version of the table."""
        raise NotImplementedError

    def committed_numbers(self, table: Any, writers: Iterable[str]) -> Mapping[str, int]:
        """Return the highest committed number of each of these writers, from ``table``."""
        raise NotImplementedError

    def add(self, table: Any, new: Sequence[Committable]) -> None:
        """Add these files to ``table`` and their writers' numbers to its marker, atomically."""
        raise NotImplementedError

    def commit(self, committables: Sequence[Committable]) -> None:
        for conflicts_left in reversed(range(_CONFLICTS_MAX)):
            table = self._loaded()
            new = self._uncommitted(table, committables)
            if not new:
                break
            self._check_files(new)
            try:
                with self.secrets.kept():
                    self.add(table, new)
                break
            except self.conflicts as error:
                if not conflicts_left:
                    raise
                self.log.info("table commit conflict, retry", error=repr(error))
        for part in committables:
            self.folder.forget(part.name)

    def check_payload(self, payload: Any) -> None:
        check_rows_and_bytes(payload)

    def abort(self, names: Sequence[str]) -> None:
        """Delete the files. One that is in the table after all is never deleted, no matter who asks."""
        parts = [Committable(name) for name in names]
        uncommitted = {part.name for part in self._uncommitted(self._loaded(), parts)}
        for name in names:
            if name in uncommitted:
                self.folder.delete(name)
            else:
                self.folder.forget(name)

    def prepared(self) -> Iterable[str]:
        """The noted files, except those whose committer died before it deleted the note."""
        noted = [Committable(name) for name in self.folder.noted() if PartName.parse(name) is not None]
        if not noted:
            return []
        uncommitted = {part.name for part in self._uncommitted(self._loaded(), noted)}
        for part in noted:
            if part.name not in uncommitted:
                self.folder.forget(part.name)
        return sorted(uncommitted)

    def _loaded(self) -> Any:
        with self.secrets.kept():
            return self.load()

    def _uncommitted(self, table: Any, committables: Sequence[Committable]) -> list[Committable]:
        with self.secrets.kept():
            numbers = self.committed_numbers(table, {part.writer for part in committables})
        new = {part.name: part for part in committables if part.number > numbers.get(part.writer, -1)}
        return list(new.values())

    def _check_files(self, new: Sequence[Committable]) -> None:
        lost = [part.name for part in new if self.folder.size(part.name) != part.payload[1]]
        if lost:
            raise SinkDataLost(
                f"{lost} of sink {self.sink!r} were written and never added to {self._target}, but are gone, so their "
                "rows are lost. If a savepoint or an older checkpoint was restored after the application that took it "
                "had failed or continued, which deletes what it did not commit, restore the newest checkpoint. If a "
                "clean-up of the table deleted files that are not in it, let it keep those of the last days"
            )
