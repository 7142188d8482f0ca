# SPDX-License-Identifier: Apache-2.0

"""Mutants: a source changes a value, reads something twice, or touches the plan of another query."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

VALUES = catalogue(
    """
int96-in-nanoseconds [found; H171]
  A time after 2262 that Spark has written becomes another one.
  @ spark_bridge.sources.files.parquet_files:_opened
  - coerce_int96_timestamp_unit="us"
  + coerce_int96_timestamp_unit="ns"
instants-without-a-zone [new; H171]
  Times in INT96 lose their zone.
  @ spark_bridge.sources.files.parquet_files:_in_utc
  - return 1, pa.timestamp("us", "UTC")
  + return 1, pa.timestamp("us")
numbers-with-leading-zeros [found; H171]
  A postal code that comes after the head of a file loses its zeros.
  @ spark_bridge.sources.files.csv_files:_numbers
  - wrong = texts.filter(compute.match_substring_regex(texts, LEADING_ZERO)).to_pylist()
  + wrong = []
doubles-round [found; H171]
  A long number in lines of JSON becomes a double.
  @ spark_bridge.sources.files.json_files:read_json
  - if file_format.inferred:
  + if False:
lossy-casts [found; H171]
  A schema that is narrower than its file changes values.
  @ spark_bridge.common.arrow_types:_converted
  - if _keeps(column.type, wanted) or _equal(column, converted.cast(column.type)):
  + if True:
times-get-a-zone [found; H171]
  Times without a zone are taken to be in UTC.
  @ spark_bridge.common.arrow_types:_check_zone
  - if given.tz is None and wanted.tz is not None and not is_named:
  + if False:
splits-are-known-by-their-offsets [found; H172]
  Another size of splits in a later run reads rows twice.
  @ spark_bridge.sources.files.driver:FileSource.enumerator
  - divide=self._divide,
  + divide=None,
queries-share-a-plan [found; H173]
  A second query takes the plan of the first one.
  @ spark_bridge.streams.driver:StreamPlanner._begin
  - if not (self._first.last or self._is_first_taken):
  + if True:
rows-of-workers-are-in-utc [found; H171]
  The local time in a Row of Spark is taken to be in UTC.
  @ spark_bridge.sinks.parquet.values:_timestamp
  - return value.astimezone()
  + return value
numbers-lose-their-fraction [new; H171]
  A number that is not whole is cut for a column of integers.
  @ spark_bridge.sinks.parquet.values:_integer
  - if is_whole:
  + if True:
unsigned-numbers-as-signed-ones [found; H171]
  A Delta table gets files whose numbers its own types do not have.
  @ spark_bridge.sinks.delta.sink:DeltaSink.writer
  - for_spark(self._schema))
  + self._schema)
rules-of-a-table-are-ignored [found; H170]
  Rows go into a Delta table whose CHECK constraints nobody has looked at.
  @ spark_bridge.sinks.parquet.driver:ParquetCommitter._check_rules
  - if rules:
  + if False:
types-of-a-table-are-ignored [found; H170]
  A sink starts on an Iceberg table with other types, and each commit fails.
  @ spark_bridge.sinks.parquet.fitting:_of_field
  - elif _plain(our) != _plain(their) and not is_read_as(our, their):
  + elif False:
tables-that-may-not-be-null [found; H170]
  Rows with NULL go into a table that has none in this column.
  @ spark_bridge.sinks.parquet.fitting:_of_field
  - if ours.nullable and not theirs.nullable:
  + if False:
tables-change-before-the-commit [found; H170]
  A file goes into a table that had other columns when it was written.
  @ spark_bridge.sinks.parquet.driver:ParquetCommitter.commit
  - self._check_table_again(table, new)
  + pass
tables-made-again [new; H170]
  Rows for a table go into another one that took its place.
  @ spark_bridge.sinks.parquet.driver:ParquetCommitter._check_table_again
  - if self.identity(table) != self._identity:
  + if False:
"""
)
