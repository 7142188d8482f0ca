# SPDX-License-Identifier: Apache-2.0

"""The PostgreSQL sink's half on the driver.

The ledger ``headgate_commits`` has the number of the last committed part of each writer. It changes in the same
transaction as the rows, so a commit that is repeated is recognised, whatever was reported about the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from psycopg import sql

from spark_bridge.sinks.postgres.table import PostgresTable, gid_of, gid_prefix
from spark_bridge.sinks.two_phase.errors import SinkCommitFailed, SinkDataLost, SinkMisused
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, TwoPhaseCommitter, check_rows

_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
_NO_SUCH_PREPARED = psycopg.errors.UndefinedObject


class _PostgresCommitter(TwoPhaseCommitter):
    """What both modes share. A connection lives for one call: a server that was restarted is met with a new one."""

    transient_errors = (psycopg.OperationalError, OSError)

    def __init__(self, context: SinkCommitterContext, table: PostgresTable) -> None:
        self._sink = context.sink
        self._table = table

    def open(self) -> None:
        """Create the ledger, and check the settings. Raises ``SinkMisused`` if the table does not fit them."""
        with self._table.connect() as connection:
            connection.execute(_LOCK, ("headgate create",))  # CREATE IF NOT EXISTS is not safe against itself
            if not self._types(connection, self._table.commits):
                connection.execute(
                    sql.SQL(
                        "CREATE TABLE {} (sink text NOT NULL, writer text NOT NULL, number bigint NOT NULL, "
                        "PRIMARY KEY (sink, writer, number))"
                    ).format(self._table.commits)
                )
            self._create(connection, self._column_types(connection))

    def _create(self, connection: psycopg.Connection, types: dict[str, str]) -> None:
        """Create or check what the mode needs. ``types``: of the table's columns."""

    def _column_types(self, connection: psycopg.Connection) -> dict[str, str]:
        types = self._types(connection, self._table.name)
        if not types:
            raise SinkMisused(f"there is no table {self._table.table}: create it, or name the schema too")
        missing = [column for column in (*self._table.columns, *self._table.key) if column not in types]
        if missing:
            raise SinkMisused(
                f"table {self._table.table} has no columns {missing}, only {list(types)}: name its columns"
            )
        return types

    @staticmethod
    def _types(connection: psycopg.Connection, table: sql.Identifier) -> dict[str, str]:
        """The types of the columns of a table; empty if there is none."""
        found = connection.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped",
            (table.as_string(connection),),
        ).fetchall()
        return dict(found)

    def _committed(self, connection: psycopg.Connection, committables: Sequence[Committable]) -> set[str]:
        """The names of those that are committed."""
        found = connection.execute(
            sql.SQL("SELECT writer, max(number) FROM {} WHERE sink = %s AND writer = ANY(%s) GROUP BY writer").format(
                self._table.commits
            ),
            (self._sink, [part.writer for part in committables]),
        ).fetchall()
        highest: dict[str, int] = dict(found)
        return {part.name for part in committables if part.number <= highest.get(part.writer, -1)}

    def _prune(self, connection: psycopg.Connection, committables: Sequence[Committable]) -> None:
        """Keep only the highest number of each writer."""
        highest = {part.writer: part.number for part in committables}
        connection.cursor().executemany(
            sql.SQL("DELETE FROM {} WHERE sink = %s AND writer = %s AND number < %s").format(self._table.commits),
            [(self._sink, writer, number) for writer, number in highest.items()],
        )

    def _lost(self, what: str) -> SinkDataLost:
        return SinkDataLost(
            f"{what} of sink {self._sink!r} never reached table {self._table.table}, and is no longer prepared, so "
            "its rows are lost. If a savepoint or an older checkpoint was restored after the application that took it "
            "had failed or continued, which destroys what it did not commit, restore the newest checkpoint. If "
            "somebody rolled it back or emptied the staging table, start again without this checkpoint"
        )


class StagedCommitter(_PostgresCommitter):
    """Moves rows from the staging table to the table, in one transaction for each call."""

    def _create(self, connection: psycopg.Connection, types: dict[str, str]) -> None:
        staging = self._table.staging
        known = self._types(connection, staging)
        if not known:
            connection.execute(
                sql.SQL(
                    "CREATE TABLE {} (headgate_sink text NOT NULL, headgate_part text NOT NULL, "
                    "headgate_row bigint NOT NULL, PRIMARY KEY (headgate_sink, headgate_part, headgate_row))"
                ).format(staging)
            )
        for column in self._table.columns:
            if column not in known:
                type_ = sql.SQL(types[column])  # as the server itself writes it
                connection.execute(
                    sql.SQL("ALTER TABLE {} ADD COLUMN {} {}").format(staging, sql.Identifier(column), type_)
                )
        self._check_key(connection)

    def _check_key(self, connection: psycopg.Connection) -> None:
        """Ask the server whether it can update by the key, before there are rows."""
        key = ", ".join(self._table.key)
        try:
            connection.execute(sql.SQL("EXPLAIN {}").format(self._apply()), {"sink": self._sink, "parts": []})
        except psycopg.errors.InvalidColumnReference:
            raise SinkMisused(
                f"table {self._table.table} has no unique index on ({key}), so no row can be updated by this key: "
                f"CREATE UNIQUE INDEX ON {self._table.table} ({key}), or leave out key="
            ) from None

    def commit(self, committables: Sequence[Committable]) -> None:
        with self._table.connect() as connection:
            connection.execute(_LOCK, (f"{self._table.target}/{self._sink}",))  # a driver that was given up may try too
            committed = self._committed(connection, committables)
            new = {part.name: part for part in committables if part.name not in committed}
            if not new:
                return
            names = list(new)
            staged: dict[str, int] = dict(
                connection.execute(
                    sql.SQL(
                        "SELECT headgate_part, count(*) FROM {} WHERE headgate_sink = %s AND headgate_part = ANY(%s) "
                        "GROUP BY headgate_part"
                    ).format(self._table.staging),
                    (self._sink, names),
                ).fetchall()
            )
            for name, part in new.items():
                if staged.get(name, 0) != part.payload:
                    raise self._lost(name)
            try:
                connection.execute(self._apply(), {"sink": self._sink, "parts": names})
            except psycopg.IntegrityError as error:
                raise self._refused(error) from error
            connection.cursor().executemany(
                sql.SQL("INSERT INTO {} (sink, writer, number) VALUES (%s, %s, %s)").format(self._table.commits),
                [(self._sink, part.writer, part.number) for part in new.values()],
            )
            self._prune(connection, list(new.values()))
            self._delete(connection, names)

    def _refused(self, error: psycopg.IntegrityError) -> SinkCommitFailed:
        *schema, staging = self._table.staging.as_string(None).replace('"', "").split(".")
        return SinkCommitFailed(
            f"table {self._table.table} refuses rows of sink {self._sink!r}. They stay in "
            f"{'.'.join((*schema, staging))}, and each restart from this checkpoint tries to commit them again. Change "
            "the constraint or the values there, without deleting rows, or start again without this checkpoint. The "
            f"server says: {error}"
        )

    def check_payload(self, payload: Any) -> None:
        check_rows(payload)

    def abort(self, names: Sequence[str]) -> None:
        with self._table.connect() as connection:
            self._delete(connection, names)

    def prepared(self) -> Iterable[str]:
        with self._table.connect() as connection:
            found = connection.execute(
                sql.SQL("SELECT DISTINCT headgate_part FROM {} WHERE headgate_sink = %s").format(self._table.staging),
                (self._sink,),
            ).fetchall()
        return [str(name) for (name,) in found]

    def _apply(self) -> sql.Composed:
        """The statement that appends the rows, or updates those with the same key; the last row of a key counts."""
        table = self._table
        key = sql.SQL(", ").join(map(sql.Identifier, table.key))
        order = sql.SQL("array_position(%(parts)s::text[], headgate_part)")
        rows = sql.SQL("FROM {} WHERE headgate_sink = %(sink)s AND headgate_part = ANY(%(parts)s)").format(
            table.staging
        )
        if not table.key:
            return sql.SQL("INSERT INTO {} ({}) SELECT {} {} ORDER BY {}, headgate_row").format(
                table.name, table.column_list, table.column_list, rows, order
            )
        others = [sql.Identifier(column) for column in table.columns if column not in table.key]
        update = sql.SQL(", ").join(sql.SQL("{} = EXCLUDED.{}").format(column, column) for column in others)
        return sql.SQL(
            "INSERT INTO {} ({}) SELECT DISTINCT ON ({}) {} {} ORDER BY {}, {} DESC, headgate_row DESC "
            "ON CONFLICT ({}) DO {}"
        ).format(
            table.name,
            table.column_list,
            key,
            table.column_list,
            rows,
            key,
            order,
            key,
            sql.SQL("UPDATE SET {}").format(update) if others else sql.SQL("NOTHING"),
        )

    def _delete(self, connection: psycopg.Connection, names: Sequence[str]) -> None:
        connection.execute(
            sql.SQL("DELETE FROM {} WHERE headgate_sink = %s AND headgate_part = ANY(%s)").format(self._table.staging),
            (self._sink, list(names)),
        )


class PreparedCommitter(_PostgresCommitter):
    """Commits prepared transactions one by one."""

    def _create(self, connection: psycopg.Connection, types: dict[str, str]) -> None:
        gid_prefix(self._sink)
        (most,) = connection.execute("SHOW max_prepared_transactions").fetchone() or ("0",)
        if int(most) == 0:
            raise SinkMisused(
                "prepared transactions are switched off in this server: set max_prepared_transactions to at least "
                'four times the parallelism and restart it, or use mode="staged"'
            )

    def commit(self, committables: Sequence[Committable]) -> None:
        with self._table.connect(autocommit=True) as connection:
            for part in committables:
                try:
                    connection.execute(self._end("COMMIT", part.name))
                except _NO_SUCH_PREPARED:
                    if not self._committed(connection, [part]):
                        raise self._lost(part.name) from None
            self._prune(connection, committables)

    def abort(self, names: Sequence[str]) -> None:
        with self._table.connect(autocommit=True) as connection:
            for name in names:
                try:
                    connection.execute(self._end("ROLLBACK", name))
                except _NO_SUCH_PREPARED:
                    continue  # rolled back before

    def prepared(self) -> Iterable[str]:
        prefix = gid_prefix(self._sink)
        with self._table.connect() as connection:
            found = connection.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, %s)",
                (prefix,),
            ).fetchall()
        return [str(gid).removeprefix(prefix) for (gid,) in found]

    def _end(self, how: str, name: str) -> sql.Composed:
        return sql.SQL("{} PREPARED {}").format(sql.SQL(how), sql.Literal(gid_of(self._sink, name)))
