# SPDX-License-Identifier: Apache-2.0

"""The PostgreSQL sink's half in a task: rows in a staging table, or in a prepared transaction."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import sql

from spark_bridge.sinks.postgres.table import PostgresTable, gid_of
from spark_bridge.sinks.rows import naming_lone_surrogates, rows_of
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
        self._rows_copied = 0  # in it
        self._rows: list[Sequence[Any]] = []

    def write(self, record: Any) -> None:
        self._rows.extend(rows_of(record, self._table.columns))
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
                sql.SQL("INSERT INTO {} (sink, writer, number) VALUES (%s, %s, %s)").format(self._table.commits),
                (self._context.sink, part.writer, part.number),
            )
            gid = sql.Literal(gid_of(self._context.sink, part.name))
            self._connection.execute(sql.SQL("PREPARE TRANSACTION {}").format(gid))
        return [part._replace(payload=self._rows_copied)]

    def close(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()

    def _copy(self) -> None:
        if self._connection is None:
            self._connection = self._table.connect()
        if self._part is None:
            self._part, self._rows_copied = Committable(self._context.next_name()), 0
        staged = self._table.mode == "staged"
        into = self._table.staging if staged else self._table.name
        columns = sql.SQL("headgate_sink, headgate_part, headgate_row, {}" if staged else "{}").format(
            self._table.column_list
        )
        with self._connection.cursor() as cursor, naming_lone_surrogates(self._rows, self._table.columns):
            with cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN").format(into, columns)) as copy:
                for number, row in enumerate(self._rows, start=self._rows_copied):
                    copy.write_row((self._context.sink, self._part.name, number, *row) if staged else row)
        self._rows_copied += len(self._rows)
        self._rows = []
