# SPDX-License-Identifier: Apache-2.0

"""What committers of tables of Parquet files have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow
from pyarrow import parquet, types

from spark_bridge.common.secret_texts import Secrets
from spark_bridge.sinks.parquet.folder import DataFolder
from spark_bridge.sinks.two_phase.errors import SinkDataLost, SinkMisused, SinkTargetChanged
from spark_bridge.sinks.two_phase.parts import Committable, PartName
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, TwoPhaseCommitter, check_rows_and_bytes

_CONFLICTS_MAX = 30


class ParquetCommitter(TwoPhaseCommitter):
    """Adds data files to a table. A subclass knows the format: ``load``, ``identity``, ``rules_of``, ``columns_of``,
    ``committed_numbers`` and ``add``.

    ``add`` raises one of ``conflicts`` if another writer was faster, or if the outcome is not known. Then the table is
    loaded again: perhaps this commit, or that of another driver, was the one that was faster.
    """

    form: Callable[[pyarrow.Schema], pyarrow.Schema]
    """Returns a schema in types that the table format has."""
    conflicts: tuple[type[BaseException], ...] = ()

    def __init__(self, context: SinkCommitterContext, folder: DataFolder, target: str, secrets: Secrets) -> None:
        self.sink = context.sink
        self.log = context.log
        self.folder = folder
        self._target = target
        self.secrets = secrets
        self._identity: Any = None

    def load(self) -> Any:
        """Return the newest version of the table."""
        raise NotImplementedError

    def identity(self, table: Any) -> Any:
        """Return what another table in the place of this one does not have."""
        raise NotImplementedError

    def rules_of(self, table: Any) -> Sequence[str]:
        """Return what the table demands of those who write to it, and this sink does not do, for an error."""
        raise NotImplementedError

    def columns_of(self, table: Any) -> pyarrow.Schema:
        """Return the table's columns in Arrow's types. Raises ``SinkMisused`` for one that Arrow has no type for."""
        raise NotImplementedError

    def is_read_as(self, ours: pyarrow.DataType, theirs: pyarrow.DataType) -> bool:
        """Whether values of a simple type in a file are the same in a table's column of another type."""
        return False

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
            self._check_table_again(table, new)
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

    def check_table(self, table: Any, stored: pyarrow.Schema) -> None:
        """Raise ``SinkMisused`` if rows with these columns may not be added to the table; otherwise remember which
        table it is."""
        self._check_rules(table)
        if found := list(self._differences(stored, self.columns_of(table))):
            raise SinkMisused(
                f"{self._target} does not have the columns of the sink ({'; '.join(found)}): give the sink the "
                "table's schema"
            )
        self._identity = self.identity(table)

    def _check_table_again(self, table: Any, new: Sequence[Committable]) -> None:
        """Raise ``SinkTargetChanged`` if the table is not what it was when the files were written."""
        if self.identity(table) != self._identity:
            raise SinkTargetChanged(
                f"{self._target} was dropped and made again, or replaced, while sink {self.sink!r} had rows for it "
                f"that are not committed: its id was {self._identity}, and is {self.identity(table)}. Start the "
                "application again if the rows belong to the new table; otherwise use another table"
            )
        try:
            self._check_rules(table)
            columns = self.columns_of(table)
        except SinkMisused as error:
            raise SinkTargetChanged(f"{error}. The rows are still prepared, and the next start commits them") from error
        for part in new:
            with self.folder.open(part.name) as file:
                stored = self.form(_columns_in(parquet.ParquetFile(file)))
            # A column that was added meanwhile is NULL in these rows, as one is that a row does not have.
            if found := list(self._differences(stored, columns, may_lack=True)):
                raise SinkTargetChanged(
                    f"{self._target} was changed after sink {self.sink!r} had prepared rows for it, which no longer "
                    f"fit: {'; '.join(found)}. Undo the change of the table, and start the application again: the "
                    "rows are still prepared, and it commits them"
                )

    def _check_rules(self, table: Any) -> None:
        rules = self.rules_of(table)
        if rules:
            raise SinkMisused(
                f"{self._target} demands of a writer what this sink does not do: {'; '.join(rules)}. Choose a table "
                "without it, or remove it from this one"
            )

    def _differences(
        self, ours: Iterable[pyarrow.Field], theirs: Iterable[pyarrow.Field], where: str = "", *, may_lack: bool = False
    ) -> Iterator[str]:
        """What keeps rows with the columns ``ours`` out of a table with ``theirs``, whatever their order, for an error.

        ``may_lack``: a column that may be NULL may be missing in ``ours``.
        """
        our, their = {one.name: one for one in ours}, {one.name: one for one in theirs}
        for name in our.keys() - their.keys():
            yield f"the table has no {where}{name}"
        for name, field in their.items():
            if name in our:
                yield from self._of_field(our[name], field, where + name, may_lack)
            elif not may_lack or not field.nullable:
                yield f"the sink has no {where}{name}"

    def _of_field(self, ours: pyarrow.Field, theirs: pyarrow.Field, where: str, may_lack: bool) -> Iterator[str]:
        if ours.nullable and not theirs.nullable:
            text = "may not be NULL in the table: declare it with nullable=False, and rows with NULL are refused"
            yield f"{where} {text}"
        our, their = ours.type, theirs.type
        if types.is_struct(our) and types.is_struct(their):
            yield from self._differences(our, their, f"{where}.", may_lack=may_lack)
        elif types.is_map(our) and types.is_map(their):
            yield from self._of_field(our.key_field, their.key_field, f"{where} (key)", may_lack)
            yield from self._of_field(our.item_field, their.item_field, f"{where} (value)", may_lack)
        elif _is_list(our) and _is_list(their):
            yield from self._of_field(our.value_field, their.value_field, f"{where}[]", may_lack)
        elif _plain(our) != _plain(their) and not self.is_read_as(our, their):
            yield f"{where} is {_plain(their)} in the table, and {_plain(our)} in the sink"

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
        noted = [Committable(name) for name in self.folder.staged() if PartName.parse(name) is not None]
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


def _columns_in(file: parquet.ParquetFile) -> pyarrow.Schema:
    """The columns of a file; one that could be NULL and never is counts as one that may not be."""
    schema, metadata = file.schema_arrow, file.metadata
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    chunks = [group.column(at) for group in groups for at in range(group.num_columns)]
    with_nulls = {one.path_in_schema for one in chunks if one.statistics is None or one.statistics.null_count != 0}
    return pyarrow.schema(
        [
            one if one.type.num_fields or one.name in with_nulls else one.with_nullable(False)
            for one in schema.remove_metadata()
        ]
    )


def _is_list(given: pyarrow.DataType) -> bool:
    return bool(types.is_list(given) or types.is_large_list(given))


def _plain(given: pyarrow.DataType) -> pyarrow.DataType:
    return {pyarrow.large_string(): pyarrow.string(), pyarrow.large_binary(): pyarrow.binary()}.get(given, given)
