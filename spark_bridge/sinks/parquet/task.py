# SPDX-License-Identifier: Apache-2.0

"""The half in a task of sinks whose tables consist of Parquet files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime, time
from functools import partial
from numbers import Number
from typing import Any

import pyarrow
from pyarrow import parquet, types

from spark_bridge.common.arrow_types import conform
from spark_bridge.sinks.parquet.folder import DataFolder
from spark_bridge.sinks.rows import Columns, Take, instant, naming, refuse_unknown, take_list, take_map, take_struct
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkWriterContext, TwoPhaseWriter

_ROWS_MAX = 10_000  # of single rows in memory
_STEPS_US = {"s": 1_000_000, "ms": 1_000}


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
        takes = {field.name: _take_of(field.type, field.name) for field in schema}
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


# --- the values of rows -----------------------------------------------------------------------------------------------


def _take_of(given: pyarrow.DataType, path: str) -> Take | None:
    """What becomes of the values of a type in rows; None if pyarrow's own checks are enough. ``path`` is for errors.

    pyarrow drops the fraction of a number in a column of integers, the part of a time that is finer than its column,
    the fields of a nested dict that its type lacks, and a zone that its column lacks; and takes a time without a zone
    to be in UTC. Here each value stays what it was, or is refused.
    """
    if types.is_dictionary(given) or types.is_run_end_encoded(given):
        return _take_of(given.value_type, path)
    if types.is_struct(given):
        return take_struct(path, given, {field.name: _take_of(field.type, f"{path}.{field.name}") for field in given})
    if types.is_map(given):
        key, item = _take_of(given.key_type, f"{path} (key)"), _take_of(given.item_type, f"{path} (value)")
        return take_map(key, item) if key or item else None
    if types.is_nested(given) and given.num_fields == 1:
        element = _take_of(given.value_type, f"{path}[]")
        return take_list(element) if element else None
    if types.is_timestamp(given):
        return naming(path, given, partial(_timestamp, given=given))
    if types.is_date(given):
        return naming(path, given, _date)
    if types.is_time(given):
        return naming(path, given, partial(_time, given=given))
    return naming(path, given, _integer) if types.is_integer(given) else None


def _integer(value: Any, of_spark: bool) -> Any:
    if type(value) is int:
        return value
    try:
        is_whole = int(value) == value
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if is_whole:
        return value
    raise ValueError("this is not a whole number: round it first, or declare another type")


def _refuse_number(value: Any) -> None:
    """Arrow would count it from 1970 on, drop its fraction, and take NaN for NULL."""
    if isinstance(value, Number):
        raise ValueError("this is a number: write a date or a time")


def _timestamp(value: Any, of_spark: bool, given: pyarrow.TimestampType) -> Any:
    _refuse_number(value)
    if value != value:  # NaT of pandas, which is not equal to itself, is its NULL
        return None
    if isinstance(value, datetime):
        if given.tz is None and value.utcoffset() is not None:
            raise ValueError("it has a zone: declare timestamp('us', 'UTC'), or remove the zone first")
        _check_precision(value, given)
    return instant(value, of_spark) if given.tz is not None and isinstance(value, date) else value


def _date(value: Any, of_spark: bool) -> Any:
    _refuse_number(value)
    if value != value:  # NaT of pandas, as above
        return None
    if isinstance(value, datetime) and (value.time() != time() or value.tzinfo is not None):
        raise ValueError("this has a time of day: write value.date()")
    return value


def _time(value: Any, of_spark: bool, given: Any) -> Any:
    _refuse_number(value)
    if isinstance(value, time):
        _check_precision(value, given)
    return value


def _check_precision(value: datetime | time, given: Any) -> None:
    is_finer = value.microsecond % _STEPS_US.get(given.unit, 1)
    if is_finer or (given.unit != "ns" and getattr(value, "nanosecond", 0)):
        raise ValueError("this is finer: declare a finer unit, or truncate it first")
