# SPDX-License-Identifier: Apache-2.0

"""Parquet. A position is ``[row group, rows]``.

Two things in it are not what Arrow says. Times that are written as INT96, the default of Spark and Hive, are instants;
they are read in microseconds, because nanoseconds end in 2262. And programs before Spark 3 counted early days in
another calendar; a file says so, and such days are refused.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow
from pyarrow import types
from pyarrow.parquet import ParquetFile

from spark_bridge.common.arrow_types import with_leaves
from spark_bridge.sources.files.format import FileFormat, leaves_of, not_in

FIRST_DAY = datetime.date(1582, 10, 15)
"""Of the calendar of today."""
FIRST_TIME = datetime.datetime(1900, 1, 1, tzinfo=datetime.UTC)
"""Before it, zones had other offsets, which the two calendars differ in, too."""


def _opened(file: BinaryIO) -> Any:
    return ParquetFile(file, coerce_int96_timestamp_unit="us")


def parquet_schema(file: BinaryIO, file_format: FileFormat) -> pyarrow.Schema:
    """The columns that the file itself names."""
    parquet = _opened(file)
    return _schema_of(parquet, parquet.schema_arrow.names).remove_metadata()


def _schema_of(parquet: Any, wanted: list[str]) -> pyarrow.Schema:
    """The columns of these names as they are read. Raises ``ValueError`` for one whose values nothing would show."""
    names = parquet.schema_arrow.names
    if twice := sorted({name for name in wanted if names.count(name) > 1}):
        raise ValueError(f"it has more than one column of the name {', '.join(twice)}: pass schema= without it")
    fields = {}
    at = 0  # a column in Parquet has no other columns in it, and its name does not say where it belongs
    for one in parquet.schema_arrow:
        leaves = [parquet.schema.column(number) for number in range(at, at + _leaf_count(one.type))]
        at += len(leaves)
        if one.name not in wanted:
            continue
        if any(leaf.converted_type == "INTERVAL" for leaf in leaves):
            raise ValueError(
                f"column {one.name!r} is an interval of months, days and milliseconds, which pyarrow reads as bytes: "
                "pass schema= without it, or write the file again with a duration or a string for it"
            )
        count, (times, changed) = sum(leaf.physical_type == "INT96" for leaf in leaves), _in_utc(one.type)
        if count and times != count:
            raise ValueError(f"column {one.name!r} has INT96 beside other times without a zone: leave it out")
        fields[one.name] = one.with_type(changed) if count else one
    return pyarrow.schema([fields[name] for name in wanted])


def _leaf_count(found: Any) -> int:
    if isinstance(found, pyarrow.BaseExtensionType):
        return _leaf_count(found.storage_type)
    return sum(_leaf_count(found.field(place).type) for place in range(found.num_fields)) or 1


def _in_utc(found: Any) -> tuple[int, Any]:
    """How many times without a zone are in the type, and the type with these as instants."""
    times = 0

    def instant(leaf: Any) -> Any:
        nonlocal times
        if not types.is_timestamp(leaf) or leaf.tz is not None:
            return leaf
        times += 1
        return pyarrow.timestamp("us", "UTC")

    changed = with_leaves(found, instant)
    return times, changed


def read_parquet(
    file: BinaryIO, file_format: FileFormat, start: int, end: int, position: Any
) -> Iterator[tuple[Any, pyarrow.RecordBatch]]:
    """Yield the rows of the row groups that begin in the range, in batches, each with the position after it."""
    parquet = _opened(file)
    names, known = parquet.schema_arrow.names, file_format.schema
    wanted = names if file_format.inferred else [name for name in known.names if name in names]
    schema = _schema_of(parquet, wanted)
    if missing := list(not_in([one for one in known if one.name in wanted], schema)):
        raise ValueError(
            f"it has no {', '.join(map(repr, missing))}: correct the schema, or read such files separately"
        )
    legacy = _is_legacy(parquet.metadata.metadata or {})
    first, done = (0, 0) if position is None else position
    for group in range(first, parquet.num_row_groups):
        if not start <= _group_offset(parquet.metadata.row_group(group)) < end:
            continue
        rows = 0
        skipped = done if group == first else 0
        for batch in parquet.iter_batches(file_format.batch_rows, row_groups=[group], columns=wanted):
            rows += batch.num_rows
            if rows <= skipped:
                continue
            left = batch.slice(max(0, batch.num_rows - (rows - skipped)))
            if not left.schema.equals(schema):
                left = pyarrow.Table.from_batches([left]).select(wanted).cast(schema)
            if legacy:
                _check_calendar(left)
            yield [group, rows], left


def _is_legacy(metadata: dict[bytes, bytes]) -> bool:
    """Whether Spark wrote the file with the calendar of before its release 3."""
    version = metadata.get(b"org.apache.spark.version", b"")
    marks = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
    return any(mark in metadata for mark in marks) or version.startswith((b"1.", b"2."))


def _check_calendar(batch: Any) -> None:
    """Raise ``ValueError`` if days in it are so early that calendars differ."""
    from pyarrow import compute  # not at the top, as in `numbers`

    for one in batch.schema:
        for values in leaves_of(batch.column(one.name)):
            kind = values.type
            if not (types.is_date(kind) or types.is_timestamp(kind)):
                continue
            first = FIRST_DAY if types.is_date(kind) else FIRST_TIME if kind.tz else FIRST_TIME.replace(tzinfo=None)
            early = compute.min(values)  # Python has no years after 9999
            if compute.less(early, pyarrow.scalar(first, kind)).as_py():
                raise ValueError(
                    f"column {one.name!r} has {early.cast('string')}, and Spark wrote the file with the calendar of "
                    "before 1582: let Spark write it again with spark.sql.parquet.datetimeRebaseModeInWrite=CORRECTED, "
                    "and int96RebaseModeInWrite"
                )


def _group_offset(group: Any) -> int:
    column = group.column(0)
    dictionary = column.dictionary_page_offset
    return int(column.data_page_offset if dictionary is None else min(dictionary, column.data_page_offset))
