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
  @ spark_bridge.common.arrow_types:_check_zones
  - if given.tz is None and wanted.tz is not None and not (utc_is_named and wanted.tz in ("UTC", "+00:00")):
  + if False:
splits-are-known-by-their-offsets [found; H172]
  Another size of splits in a later run reads rows twice.
  @ spark_bridge.sources.files.driver:FileSource.enumerator
  - divide=self._divide,
  + divide=None,
times-of-spark-as-utc [found; H171]
  A Row's times, which are in the worker's zone, are taken for UTC.
  @ spark_bridge.sinks.rows:_instant
  - return value.astimezone(UTC)
  + return value.replace(tzinfo=UTC)
any-time-as-an-instant [found; H171]
  Times without a zone of records that are not Spark's are taken in the zone of the worker.
  @ spark_bridge.sinks.rows:_instant
  - if not (of_spark and isinstance(value, datetime)):
  + if False:
queries-share-a-plan [found; H173]
  A second query takes the plan of the first one.
  @ spark_bridge.streams.driver:StreamPlanner._begin
  - if not (self._first.last or self._is_first_taken):
  + if True:
"""
)
