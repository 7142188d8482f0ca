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
  - return pyarrow.timestamp("us", "UTC")
  + return pyarrow.timestamp("us")
numbers-with-leading-zeros [found; H171]
  A postal code that comes after the head of a file loses its zeros.
  @ spark_bridge.sources.files.csv_files:_numbers
  - wrong = texts.filter(compute.match_substring_regex(texts, NO_NUMBER)).to_pylist() if inferred else []
  + wrong = []
doubles-round [found; H171]
  A long number in lines of JSON becomes a double.
  @ spark_bridge.sources.files.json_files:_check_floats
  - if not _matches(block, pattern):
  + if True:
small-numbers-become-zero [new; H171]
  A number of few digits with a large exponent in lines of JSON becomes 0.
  @ spark_bridge.sources.files.json_files:_check_floats
  - if narrowest is None or not (has_many_digits(block, narrowest) or _has_limits(table)):
  + if narrowest is None or not has_many_digits(block, narrowest):
columns-of-two-types-are-kept [new; H171]
  A column with a value of another type than the kept one is sent as it is.
  @ spark_bridge.sinks.rows:Columns.rows
  - if place not in self._kept or not self._kept[place].issuperset(map(type, given[place])):
  + if place not in self._kept:
an-empty-text-is-null [found; H171]
  Texts that are empty and NULL are the same in a CSV file.
  @ spark_bridge.sources.files.csv_files:_made
  - **DEFAULTS, **options
  + **DEFAULTS, "quoted_strings_can_be_null": True, **options
later-fields-are-lost [found; H171]
  A column that the head of the first file does not have is skipped.
  @ spark_bridge.sources.files.format:FileFormat.check_known
  - if self.inferred else []
  + if False else []
folders-say-nothing [found; H171]
  The values in the names of folders are lost.
  @ spark_bridge.sources.files.task:read_schema
  - for name in file_format.values_of_folders(path):
  + for name in ():
deleted-rows-return [found; H170]
  The files of a table are read, with the rows that were deleted.
  @ spark_bridge.sources.files.driver:FileSource.files
  - for path in found:
  + for path in ():
intervals-are-bytes [found; H171]
  An interval in Parquet arrives as twelve bytes.
  @ spark_bridge.sources.files.parquet_files:_schema_of
  - if any(leaf.converted_type == "INTERVAL" for leaf in leaves):
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
times-of-spark-as-utc [found; H171]
  A Row's times, which are in the worker's zone, are taken for UTC.
  @ spark_bridge.sinks.rows:instant
  - return value.astimezone(UTC)
  + return value.replace(tzinfo=UTC)
any-time-as-an-instant [found; H171]
  Times without a zone of records that are not Spark's are taken in the zone of the worker.
  @ spark_bridge.sinks.rows:instant
  - if not (of_spark and isinstance(value, datetime)):
  + if False:
rows-of-other-types-are-committed [found; H171]
  Rows that were staged with other types than the table's are converted at the commit.
  @ spark_bridge.sinks.postgres.table:PostgresTable.checked_columns
  F if name in columns and name in staged and columns[name].identity != staged[name].identity:
staging-keeps-its-types [found; H170]
  The staging table has the types that the table had when it was made.
  @ spark_bridge.sinks.postgres.driver:StagedCommitter._follow
  - staged[column].identity != columns[column].identity
  + False
a-number-is-rounded [found; H171]
  PostgreSQL rounds a number to the scale of its column.
  @ spark_bridge.sinks.postgres.values:_number
  F if number and int(exponent) + zeros < -scale:
a-zone-is-dropped [found; H171]
  An instant loses its zone in a column that has none.
  @ spark_bridge.sinks.postgres.values:_time
  F if named and not has_zone:
keys-of-json-become-text [feared; H171]
  Different keys of a dict become one in a JSON object.
  @ spark_bridge.sinks.rows:json_form
  F if len(found) < len(value):
transactions-without-their-table [found; H172]
  The name of a prepared transaction says the sink only, so another table's are destroyed.
  @ spark_bridge.sinks.postgres.table:gid_prefix
  - return f"{prefix}{place}/"
  + return prefix
old-transactions-of-any-table [feared; H172]
  A transaction of an earlier release, whose name has no table, is everybody's.
  @ spark_bridge.sinks.postgres.driver:PreparedCommitter.prepared
  - _PREPARED,
  + _PREPARED.replace("AND held.relation = to_regclass(%(table)s)", ""),
null-is-a-key [found; H171]
  Rows with NULL in their key become one.
  @ spark_bridge.sinks.rows:Columns.rows
  F if at is not None:
keys-in-two-cases [found; H171]
  Two rows whose keys are equal in the index's collation fail each commit.
  @ spark_bridge.sinks.postgres.driver:StagedCommitter._key_collations
  - for column, *collation in found
  + for column, *collation in ()
idle-transactions-end [found; H170]
  The server ends the transaction of a task that waits for its next row.
  @ spark_bridge.sinks.postgres.task:PostgresWriter._begin
  - ('idle_in_transaction_session_timeout'),
  + ('transaction_timeout'),
statements-stay-prepared [found; H170]
  A statement that psycopg has prepared is missing in the next session of a pooler.
  @ spark_bridge.common.conninfo:connect
  - prepare_threshold=None
  + prepare_threshold=5
nameless-value [found; H171]
  Text with NUL in it is refused without its column.
  @ spark_bridge.sinks.postgres.task:PostgresWriter._copy
  F if getattr(error, "sqlstate", None) is None:
queries-share-a-plan [found; H173]
  A second query takes the plan of the first one.
  @ spark_bridge.streams.driver:StreamPlanner._begin
  - if not (self._first.state.last or self._is_first_taken):
  + if True:
tables-without-an-identity-are-published [found; H170]
  A PostgreSQL table without a replica identity is published, and the application's updates fail.
  @ spark_bridge.sources.postgres.table:_why_no_identity
  - if replica_identity == "f" or (logged and key in logged):
  + if True:
tables-are-known-by-their-names [found; H170 H172]
  Another table that is renamed to the one that was read is taken for it.
  @ spark_bridge.sources.postgres.task:check_table
  - if found is not None and found.oid == oid:
  + if found is not None:
publications-are-narrowed [found; H170]
  A publication that was without the table for a time is as good as before.
  @ spark_bridge.sources.postgres.task:check_published
  - elif place is not None and found[0] != place:
  + elif False:
publications-of-inserts [new; H170]
  A publication that leaves out kinds of changes is read.
  @ spark_bridge.sources.postgres.task:check_published
  - elif found[1] is not None:
  + elif False:
slots-begin-anywhere [new; H170]
  A slot that was made again before the first change is read from its new beginning.
  @ spark_bridge.sources.postgres.task:PostgresReader._check_slot
  - (begin := self._place or self._identity[2])
  + (begin := self._place)
columns-that-are-not-sent-are-null [found; H170 H171]
  A column that a change does not have, because it was renamed, becomes NULL.
  @ spark_bridge.sources.postgres.table:why_columns_differ
  - for name in columns:
  + for name in by_name.keys() & set(columns):
wider-columns-are-cut [found; H171]
  A column of another type is read as the one that it was.
  @ spark_bridge.sources.postgres.table:why_columns_differ
  - if (type_ := arrow_type(column)) != schema.field(name).type:
  + if (type_ := None):
keys-are-one-column [new; H171]
  An update of another column of the primary key leaves the old row.
  @ spark_bridge.sources.postgres.task:PostgresReader._rows
  - for column in self._settings.identity
  + for column in (key,)
transactions-begin-again [new; H134]
  A reader that is restored inside of a transaction reads its first changes again.
  @ spark_bridge.sources.postgres.task:PostgresReader._new_batches
  - if self._inside is None or here > self._inside:
  + if True:
transactions-are-kept-whole [found; H157]
  A transaction is one batch, however large it is.
  @ spark_bridge.sources.postgres.task:PostgresReader._new_batches
  - (len(opened) > rows_max or opened_size >= BATCH_BYTES)
  + False
early-returns-keep-changes-back [found; H134]
  The changes never begin when a stage after the source has returned early.
  @ spark_bridge.sources.postgres.driver:PostgresEnumerator._is_settled
  - or not self._holding
  + or False
early-returns-are-not-told [new; H134]
  What a stage took of a range before it returned early comes again as changes.
  @ spark_bridge.sources.postgres.task:PostgresReader._read_range
  - self.context.send_event_nowait(range_read_event(low, high, snapshot))
  + pass
sessions-keep-settings [new; H170]
  A setting stays in a session that a pooler gives to others.
  @ spark_bridge.sources.postgres.task:PostgresReader._select
  - set_config(key, value, true)
  + set_config(key, value, false)
deleted-rows-stay [new; H140]
  A row whose deletion is the last change of its key is inserted again.
  @ spark_bridge.sinks.postgres.driver:StagedCommitter._apply
  - f"WHERE {OP} <> 'd'"
  + "WHERE true"
emptied-tables-lose-rows [new; H140]
  What was staged before a TRUNCATE is written after it.
  @ spark_bridge.sinks.postgres.driver:StagedCommitter._apply_deletions
  - if emptied is not None:
  + if False:
idle-sessions-fail-tasks [new; H170]
  A task fails when the server has ended its idle session between two checkpoints.
  @ spark_bridge.sinks.postgres.task:PostgresWriter._begin
  - except psycopg.OperationalError:
  + except ZeroDivisionError:
copies-cast-to-text [found; H171]
  The table's values are cast to text, which cuts char(n) and lengthens inet.
  @ spark_bridge.sources.postgres.task:PostgresReader._select
  - sql.SQL(", ").join(map(sql.Identifier, settings.columns))
  + sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(one)) for one in settings.columns)
values-without-their-row [found; H171]
  A value that Arrow does not have is an error that names neither its column nor its row.
  @ spark_bridge.sources.postgres.task:PostgresReader._column
  - for key, text in zip(keys, texts, strict=True):
  + for key, text in ():
rows-without-a-key-are-skipped [new; H171]
  Rows whose key is NULL are in no range.
  @ spark_bridge.sources.postgres.task:PostgresReader._select
  - elif wanted:
  + elif False:
rows-in-records-are-nobodys [new; H171]
  The times of a Row of Spark inside another record have no zone.
  @ spark_bridge.sinks.rows:take_struct
  - of_spark or _is_row(value)
  + of_spark
fields-of-a-composite-type-change [new; H171]
  A value in a composite type is sent as it is, whatever PostgreSQL makes of it.
  @ spark_bridge.sinks.postgres.values:_composite
  - if not isinstance(value, (tuple, Mapping)):
  + if True:
numbers-lose-their-fraction [new; H171]
  A number that is not whole is cut for a column of integers.
  @ spark_bridge.sinks.parquet.task:_integer
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
  @ spark_bridge.sinks.parquet.driver:ParquetCommitter._of_field
  - elif _plain(our) != _plain(their) and not self.is_read_as(our, their):
  + elif False:
tables-that-may-not-be-null [found; H170]
  Rows with NULL go into a table that has none in this column.
  @ spark_bridge.sinks.parquet.driver:ParquetCommitter._of_field
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
another-stream-of-the-same-name [found; H170]
  A stream that was filled again with smaller ids is read on from the old position, which skips its entries.
  @ spark_bridge.sources.redis.task:check_position
  - if entry_number(last) < entry_number(position):
  + if False:
bytes-as-pythons-text [found; H171]
  Bytes in an array become a text such as b'x'.
  @ spark_bridge.sinks.redis.task:_other
  - raise ValueError(
  + return str(value) or ValueError(
what-redis-forgets [found; H170]
  A Redis server that may lose what it has confirmed in the last second gets rows without a word.
  @ spark_bridge.sinks.redis.driver:RedisCommitter.open
  - if settings.get(name, durable) != durable:
  + if settings.get(name, durable) == "no":
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
