# SPDX-License-Identifier: Apache-2.0

"""The PostgreSQL sink's half in a task: rows in a staging table, or in a prepared transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import sql

from protocol.arguments import SHOWN_CHARS_MAX
from protocol.describing import show
from spark_bridge.sinks.postgres.table import OP, PostgresTable, gid_of
from spark_bridge.sinks.postgres.values import name_what_cannot_be_sent
from spark_bridge.sinks.rows import WithZone, instants_of_row, naming_lone_surrogates, rows_of
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
        self._with_zone: dict[str, WithZone] = {}
        self._takers: list[tuple[int, Callable[[Any], Any]]] = []
        self._keys = [table.columns.index(column) for column in table.key]
        self._rows_copied = 0  # in it
        self._rows: list[Sequence[Any]] = []

    def write(self, record: Any) -> None:
        rows = list(rows_of(record, self._table.given))
        if not rows:
            return
        if self._part is None:
            self._begin()
        of_spark = hasattr(record, "asDict")
        self._rows.extend([self._taken(row, of_spark) for row in rows])
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
            "SELECT set_config(name, '0', true) FROM pg_settings "
            "WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')"
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
        self._place = self._table.place(self._connection)
        self._with_zone = {name: one.with_zone for name, one in columns.items() if one.with_zone}
        takers = [(place, columns[name].taker()) for place, name in enumerate(self._table.columns)]
        self._takers = [(place, taker) for place, taker in takers if taker is not None]
        if self._table.op_column is not None:
            self._takers.append((len(takers), _known_op))
        self._part, self._rows_copied = Committable(self._context.next_name()), 0

    def _taken(self, row: Sequence[Any], of_spark: bool) -> Sequence[Any]:
        """What is sent of a row. Raises ``ValueError`` with the column whose value would not arrive as it is."""
        for place in self._keys:
            if row[place] is None and not (self._table.op_column is not None and row[-1] == "t"):
                raise ValueError(
                    f"column {self._table.columns[place]!r} is in the key and NULL in the row "
                    f"{show(row, SHOWN_CHARS_MAX)}: no row can be found by NULL, so give it a value, or leave it out"
                )
        if self._with_zone:
            row = instants_of_row(row, self._table.given, self._with_zone, of_spark=of_spark)
        values = list(row)
        for place, take in self._takers:
            if values[place] is not None or take is _known_op:
                values[place] = take(values[place])
        return tuple(values)

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
        with self._connection.cursor() as cursor, naming_lone_surrogates(self._rows, self._table.given):
            try:
                with cursor.copy(self._copy_into()) as copy:
                    for number, row in enumerate(self._rows, start=self._rows_copied):
                        copy.write_row((self._context.sink, self._part.name, number, *row) if staged else row)
            except (psycopg.DataError, psycopg.ProgrammingError) as error:
                if error.sqlstate is None:  # psycopg's own, which does not say where
                    name_what_cannot_be_sent(self._connection, self._rows, self._table.given, error)
                raise
        self._rows_copied += len(self._rows)
        self._rows = []


def _known_op(op: Any) -> Any:
    if op not in ("r", "i", "u", "d", "t"):
        raise ValueError(f"op_column has {show(op, 80)}: write r, i or u for a row, d for its deletion, or t for all")
    return op
