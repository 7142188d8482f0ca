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
queries-share-a-plan [found; H173]
  A second query takes the plan of the first one.
  @ spark_bridge.streams.driver:StreamPlanner._begin
  - if not (self._first.last or self._is_first_taken):
  + if True:
another-stream-of-the-same-name [found; H170]
  A stream that was filled again with smaller ids is read on from the old position, which skips its entries.
  @ spark_bridge.sources.redis.task:check_position
  - if entry_number(last) < entry_number(position):
  + if False:
bytes-as-pythons-text [found; H171]
  Bytes in an array become a text such as b'x'.
  @ spark_bridge.sinks.redis.task:_plain
  - raise TypeError(f"{a_type(value)} cannot be written as JSON")
  + return str(value)
times-beyond-arrow [found; H171]
  A time of Kafka that Arrow cannot hold stops the task with an error that names no record.
  @ spark_bridge.sources.kafka.task:_microseconds
  - if not -(2**63) <= at_us < 2**63:
  + if False:
dicts-lose-their-order [found; H171]
  A running task has the entries of a shared value in another order than a later one.
  @ spark_bridge.primitives.shared_value.encoding:encode_change
  ~ if encode_value(apply_change(decode_value(encoded), change)) == payload else => if True else
keys-of-work-lose-their-type [new; H171]
  A work queue takes the key 1 for the key True.
  @ spark_bridge.primitives.work_queue.messages:id_of_key
  ~ encode_argument("the key of an item", key) => encode_argument("the key of an item", 1 if key is True else key)
"""
)
