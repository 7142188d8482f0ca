# SPDX-License-Identifier: Apache-2.0

"""The PostgreSQL sink's half in a task: rows in a staging table, or in a prepared transaction."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg
from psycopg import sql
from psycopg.adapt import PyFormat, Transformer

from protocol.arguments import SHOWN_CHARS_MAX
from protocol.describing import show
from spark_bridge.sinks.postgres.table import OP, PostgresTable, gid_of
from spark_bridge.sinks.rows import Columns
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkWriterContext, TwoPhaseWriter

_ROWS_MAX = 1000  # in memory


class PostgresWriter(TwoPhaseWriter[Any]):
    """Copies rows into one transaction for each checkpoint. The server undoes it if the task dies before it ends."""

    def __init__(self, context: SinkWriterContext, table: PostgresTable) -> None:
        self._context = context
        self._table = table
        self._connection: psycopg.Connection | None = None
        self._part: Committable | None = None  # of the open transaction
        self._place = ""  # of the table
        self._columns: Columns  # of the open transaction, with what its types demand
        self._rows_copied = 0  # in it
        self._rows: list[Sequence[Any]] = []

    def write(self, record: Any) -> None:
        if self._part is None:
            if not Columns(self._table.given, {}).rows(record):  # a record that does not fit begins nothing
                return
            self._begin()
        self._rows.extend(self._columns.rows(record))
        if len(self._rows) >= _ROWS_MAX:
            self._copy()

    def prepare(self) -> list[Committable]:
        if self._rows:
            self._copy()
        part, self._part = self._part, None
        if part is None:
            return []
        assert self._connection is not None
        if self._table.mode == "staged":
            self._connection.commit()
        else:
            self._connection.execute(
                sql.SQL("INSERT INTO {} (sink, writer, number) VALUES ({}, {}, {})").format(
                    self._table.commits, *map(sql.Literal, (self._context.sink, part.writer, part.number))
                )
            )
            gid = sql.Literal(gid_of(self._context.sink, self._place, part.name))
            self._connection.execute(sql.SQL("PREPARE TRANSACTION {}").format(gid))
        return [part._replace(payload=self._rows_copied)]

    def close(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()

    def _begin(self) -> None:
        """Begin the transaction of a part. The tables keep the columns that it finds here until it ends."""
        # It is idle between rows for as long as a checkpoint takes. The settings end with the transaction.
        settings = (
            "SELECT set_config(name, '0', true) FROM (VALUES ('idle_in_transaction_session_timeout'), "
            "('transaction_timeout')) AS one (name) WHERE current_setting(name, true) IS NOT NULL"
        )
        try:
            if self._connection is not None:
                self._connection.execute(settings)
        except psycopg.OperationalError:  # idle_session_timeout: nothing was in it since the last checkpoint
            self.close()
            self._connection = None
        if self._connection is None:
            self._connection = self._table.connect()
            self._connection.execute(settings)
        with self._connection.cursor().copy(self._copy_into()):
            pass  # takes the lock that keeps the types as they are
        columns = self._table.checked_columns(self._connection)
        self._place = self._table.place(self._connection) if self._table.mode == "prepared" else ""
        takes = {name: columns[name].take for name in self._table.columns}
        never_null = dict.fromkeys(self._table.key, "in the key")
        truncates = None
        if (op := self._table.op_column) is not None:
            takes[op], never_null[op], truncates = _known_op, "the op_column", (op, "t")
        kept = {name: one.kept for name, one in columns.items()}
        self._columns = Columns(self._table.given, takes, never_null, truncates, kept)
        self._part, self._rows_copied = Committable(self._context.next_name()), 0

    def _copy_into(self) -> sql.Composed:
        staged = self._table.mode == "staged"
        into = self._table.staging if staged else self._table.name
        columns = "headgate_sink, headgate_part, headgate_row, {}" if staged else "{}"
        columns += f", {OP}" if self._table.op_column is not None else ""
        return sql.SQL("COPY {} ({}) FROM STDIN").format(into, sql.SQL(columns).format(self._table.column_list))

    def _copy(self) -> None:
        assert self._connection is not None, "a part has begun"
        assert self._part is not None
        staged = self._table.mode == "staged"
        with self._connection.cursor() as cursor:
            try:
                with cursor.copy(self._copy_into()) as copy:
                    for number, row in enumerate(self._rows, start=self._rows_copied):
                        copy.write_row((self._context.sink, self._part.name, number, *row) if staged else row)
            except (psycopg.DataError, psycopg.ProgrammingError, UnicodeEncodeError) as error:
                if getattr(error, "sqlstate", None) is None:  # psycopg's own, which does not say where
                    forms = Transformer(self._connection)
                    self._columns.name_value(self._rows, partial(_dump, forms), error)
                raise
        self._rows_copied += len(self._rows)
        self._rows = []


def _dump(forms: Any, column: str, value: Any) -> None:
    try:
        forms.get_dumper(value, PyFormat.TEXT).dump(value)
    except (psycopg.Error, TypeError) as error:
        raise ValueError(
            f"{error}. Replace the value, or change it to one that PostgreSQL has, in encode of the operator"
        ) from error


def _known_op(op: Any, of_spark: bool) -> Any:
    if op not in ("r", "i", "u", "d", "t"):
        shown = show(op, SHOWN_CHARS_MAX)
        raise ValueError(f"{shown} is not an operation: write r, i or u for a row, d for its deletion, or t for all")
    return op
