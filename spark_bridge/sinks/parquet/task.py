# SPDX-License-Identifier: Apache-2.0

"""The half in a task of sinks whose tables consist of Parquet files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow
from pyarrow import parquet

from spark_bridge.common.arrow_types import conform
from spark_bridge.sinks.parquet.folder import DataFolder
from spark_bridge.sinks.parquet.values import take_of
from spark_bridge.sinks.rows import Columns, refuse_unknown
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkWriterContext, TwoPhaseWriter

_ROWS_MAX = 10_000  # of single rows in memory


class ParquetWriter(TwoPhaseWriter[Any]):
    """Writes one data file for each checkpoint. Arrow batches go into it without a detour; single rows are collected.

    ``schema`` is what the user has declared, and ``stored`` the same in types that the table format has. ``check``
    raises ``ValueError`` for rows that the committer could not add.
    """

    def __init__(
        self,
        context: SinkWriterContext,
        folder: DataFolder,
        schema: pyarrow.Schema,
        stored: pyarrow.Schema,
        check: Callable[[pyarrow.Table], None] = lambda table: None,
    ) -> None:
        self._context = context
        self._folder = folder
        self._schema = schema
        self._stored = stored
        self._check = check
        takes = {field.name: take_of(field.type, field.name) for field in schema}
        required = {field.name: "nullable=False in the sink's schema" for field in schema if not field.nullable}
        self._columns = Columns(schema.names, takes, required)
        self._rows: list[Any] = []
        self._name: str | None = None  # of the open file
        self._file: Any = None
        self._parquet: Any = None
        self._rows_written = 0  # in the open file

    def write(self, record: Any) -> None:
        if isinstance(record, pyarrow.RecordBatch):
            # pyarrow.table imports pandas, which takes a worker half a second: the first job of `parquet_to_delta`.
            record = pyarrow.Table.from_batches([record])
        if isinstance(record, pyarrow.Table):
            self._write_rows()
            self._append(self._fitting(record))
            return
        self._rows.extend(self._columns.rows(record))
        if len(self._rows) >= _ROWS_MAX:
            self._write_rows()

    def prepare(self) -> list[Committable]:
        self._write_rows()
        if self._name is None:
            return []
        self._parquet.close()
        size = self._folder.finish(self._file)
        part = Committable(self._name, [self._rows_written, size])
        self._name = self._file = self._parquet = None
        return [part]

    def close(self) -> None:
        """Delete the open file, as far as possible; the committer finds it otherwise."""
        if self._name is not None:
            with suppress(Exception):
                self._parquet.close()
                self._file.close()
            with suppress(Exception):
                self._folder.delete(self._name)
            self._name = None

    def _fitting(self, table: pyarrow.Table) -> pyarrow.Table:
        """The table with the columns of the schema. Missing ones are NULL, as in rows; unknown ones are refused."""
        refuse_unknown(table.schema.names, self._schema.names)
        for field in self._schema:
            if field.name not in table.schema.names:
                table = table.append_column(field, pyarrow.nulls(table.num_rows, field.type))
        return self._converted(table)

    def _converted(self, table: pyarrow.Table) -> pyarrow.Table:
        batches = [conform(batch, self._stored) for batch in table.to_batches()]
        return pyarrow.Table.from_batches(batches, self._stored)

    def _write_rows(self) -> None:
        if not self._rows:
            return
        columns = zip(*self._rows, strict=True)
        try:
            arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError) as error:
            self._columns.name_value(self._rows, self._write_value, error)
            raise
        self._rows = []
        self._append(self._converted(pyarrow.Table.from_arrays(arrays, schema=self._schema)))

    def _write_value(self, column: str, value: Any) -> None:
        given = self._schema.field(column).type
        try:
            pyarrow.array([value], given)
        except (pyarrow.ArrowException, OverflowError) as error:
            raise ValueError(f"{given} cannot hold it ({error}): change the value, or declare another type") from error

    def _append(self, table: pyarrow.Table) -> None:
        if table.num_rows == 0:
            return
        self._check(table)
        if self._name is None:
            self._name = self._context.next_name(suffix=".parquet")
            self._file = self._folder.create(self._name)
            self._parquet = parquet.ParquetWriter(self._file, self._stored)
            self._rows_written = 0
        self._parquet.write_table(table)
        self._rows_written += table.num_rows
