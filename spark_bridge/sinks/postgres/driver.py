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

from spark_bridge.sinks.postgres.table import OP, PostgresTable, gid_of, gid_prefix, old_gid_prefix
from spark_bridge.sinks.postgres.values import Column, columns_of
from spark_bridge.sinks.two_phase.errors import SinkCommitFailed, SinkDataLost, SinkMisused
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, TwoPhaseCommitter, check_rows

_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
_LOCK_TIMEOUT = "5s"
_KEY_COLLATIONS = """
SELECT attname, nspname, collname
FROM pg_index CROSS JOIN LATERAL unnest(indkey::int2[], indcollation::oid[]) AS one (place, collation_id)
JOIN pg_attribute ON attrelid = indrelid AND attnum = place
JOIN pg_collation ON pg_collation.oid = collation_id AND NOT collisdeterministic
JOIN pg_namespace ON pg_namespace.oid = collnamespace
WHERE indrelid = to_regclass(%s) AND indisunique AND indpred IS NULL AND indnkeyatts = %s AND NOT EXISTS (
    SELECT FROM unnest((indkey::int2[])[0:indnkeyatts - 1]) AS of_index (number)
    LEFT JOIN pg_attribute AS named ON named.attrelid = indrelid AND named.attnum = number
    WHERE (named.attname = ANY(%s)) IS NOT TRUE
)
"""
_PREPARED = """
SELECT gid, starts_with(gid, %(new)s) FROM pg_prepared_xacts AS one
WHERE database = current_database() AND (starts_with(gid, %(new)s) OR (starts_with(gid, %(old)s) AND EXISTS (
    SELECT FROM pg_locks AS own JOIN pg_locks AS held USING (virtualtransaction)
    WHERE own.transactionid = one.transaction AND own.pid IS NULL AND held.pid IS NULL
    AND held.relation = to_regclass(%(table)s) AND held.mode = 'RowExclusiveLock'
)))
"""  # the old names do not say which table they are for, but their transactions have locked it
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
            if not columns_of(connection, self._table.commits):
                connection.execute(
                    sql.SQL(
                        "CREATE TABLE {} (sink text NOT NULL, writer text NOT NULL, number bigint NOT NULL, "
                        "PRIMARY KEY (sink, writer, number))"
                    ).format(self._table.commits)
                )
            self._create(connection, self._columns(connection))

    def _create(self, connection: psycopg.Connection, columns: dict[str, Column]) -> None:
        """Create or check what the mode needs. ``columns``: the table's."""

    def _columns(self, connection: psycopg.Connection) -> dict[str, Column]:
        columns = columns_of(connection, self._table.name)
        if not columns:
            raise SinkMisused(f"there is no table {self._table.table}: create it, or name the schema too")
        missing = [column for column in (*self._table.columns, *self._table.key) if column not in columns]
        if missing:
            raise SinkMisused(
                f"table {self._table.table} has no columns {missing}, only {list(columns)}: name its columns"
            )
        return columns

    def _committed(self, connection: psycopg.Connection, committables: Sequence[Committable]) -> set[str]:
        """The names of those that are committed."""
        found = connection.execute(
            sql.SQL("SELECT writer, max(number) FROM {} WHERE sink = {} AND writer = ANY({}) GROUP BY writer").format(
                self._table.commits, sql.Literal(self._sink), _texts([part.writer for part in committables])
            )
        ).fetchall()
        highest: dict[str, int] = dict(found)
        return {part.name for part in committables if part.number <= highest.get(part.writer, -1)}

    def _prune(self, connection: psycopg.Connection, committables: Sequence[Committable]) -> None:
        """Keep only the highest number of each writer."""
        highest = {part.writer: part.number for part in committables}
        for writer, number in highest.items():
            connection.execute(
                sql.SQL("DELETE FROM {} WHERE sink = {} AND writer = {} AND number < {}").format(
                    self._table.commits, *map(sql.Literal, (self._sink, writer, number))
                )
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

    def _create(self, connection: psycopg.Connection, columns: dict[str, Column]) -> None:
        if not columns_of(connection, self._table.staging):
            connection.execute(
                sql.SQL(
                    "CREATE TABLE {} (headgate_sink text NOT NULL, headgate_part text NOT NULL, "
                    "headgate_row bigint NOT NULL, PRIMARY KEY (headgate_sink, headgate_part, headgate_row))"
                ).format(self._table.staging)
            )
        self._follow(connection, columns)
        self._check_key(connection)

    def _follow(self, connection: psycopg.Connection, columns: dict[str, Column]) -> None:
        """Give the staging table the types of the table. Rows that are staged keep theirs, and are refused later."""
        staging = self._table.staging
        staged = columns_of(connection, staging)
        changed = [
            column
            for column in self._table.columns
            if column in staged and staged[column].identity != columns[column].identity
        ]
        try:
            with connection.transaction():
                if changed:
                    connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(_LOCK_TIMEOUT)))
                    connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(staging))
                    if connection.execute(sql.SQL("SELECT FROM {} LIMIT 1").format(staging)).fetchone() is not None:
                        return
                for column in changed:
                    connection.execute(sql.SQL("ALTER TABLE {} DROP COLUMN {}").format(staging, sql.Identifier(column)))
        except psycopg.errors.LockNotAvailable:
            return  # tasks are writing into it
        except psycopg.errors.InsufficientPrivilege:
            self._table.checked_columns(connection)  # says what its owner must do
            raise
        if self._table.op_column is not None and OP not in staged:
            connection.execute(sql.SQL("ALTER TABLE {} ADD COLUMN {} text").format(staging, sql.Identifier(OP)))
        for column in self._table.columns:
            if column in changed or column not in staged:
                type_ = sql.SQL(columns[column].declared)  # as the server itself writes it
                connection.execute(
                    sql.SQL("ALTER TABLE {} ADD COLUMN {} {}").format(staging, sql.Identifier(column), type_)
                )

    def _check_key(self, connection: psycopg.Connection) -> None:
        """Ask the server whether it can update by the key, before there are rows."""
        key = ", ".join(self._table.key)
        try:
            with connection.transaction():
                connection.execute(sql.SQL("EXPLAIN {}").format(self._apply(connection, [])))
        except psycopg.errors.InvalidColumnReference:
            raise SinkMisused(
                f"table {self._table.table} has no unique index on ({key}), so no row can be updated by this key: "
                f"CREATE UNIQUE INDEX ON {self._table.table} ({key}), or leave out key="
            ) from None
        except psycopg.errors.DatatypeMismatch:
            pass  # rows of another type are staged: they may be aborted, and commit refuses them otherwise

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
                        "SELECT headgate_part, count(*) FROM {} WHERE headgate_sink = {} AND headgate_part = ANY({}) "
                        "GROUP BY headgate_part"
                    ).format(self._table.staging, sql.Literal(self._sink), _texts(names))
                ).fetchall()
            )
            for name, part in new.items():
                if staged.get(name, 0) != part.payload:
                    raise self._lost(name)
            # Takes the lock of an INSERT, and inserts nothing, so the types stay as they are until the commit.
            connection.execute(sql.SQL("EXPLAIN INSERT INTO {} DEFAULT VALUES").format(self._table.name))
            try:
                self._table.checked_columns(connection)
            except SinkMisused as error:
                raise SinkCommitFailed(f"sink {self._sink!r} cannot commit: {error}") from None
            try:
                if self._table.op_column is not None:
                    self._apply_deletions(connection, names)
                connection.execute(self._apply(connection, names))
            except (psycopg.IntegrityError, psycopg.DataError, psycopg.ProgrammingError) as error:
                raise self._refused(error) from error
            writers, numbers = zip(*((part.writer, part.number) for part in new.values()), strict=True)
            connection.execute(
                sql.SQL(
                    "INSERT INTO {} (sink, writer, number) SELECT {}, * FROM unnest({}, CAST({} AS bigint[]))"
                ).format(self._table.commits, sql.Literal(self._sink), _texts(writers), sql.Literal(list(numbers)))
            )
            self._prune(connection, list(new.values()))
            self._delete(connection, names)

    def _refused(self, error: psycopg.Error) -> SinkCommitFailed:
        *schema, staging = self._table.staging.as_string(None).replace('"', "").split(".")
        return SinkCommitFailed(
            f"table {self._table.table} refuses rows of sink {self._sink!r}. They stay in "
            f"{'.'.join((*schema, staging))}, and each restart from this checkpoint tries to commit them again. Change "
            "the table back or its constraint, or the values there, without deleting rows, or start again without this "
            f"checkpoint. The server says: {error}"
        )

    def check_payload(self, payload: Any) -> None:
        check_rows(payload)

    def abort(self, names: Sequence[str]) -> None:
        with self._table.connect() as connection:
            self._delete(connection, names)

    def prepared(self) -> Iterable[str]:
        with self._table.connect() as connection:
            self._follow(connection, self._columns(connection))  # an attempt that met other types is tried again
            found = connection.execute(
                sql.SQL("SELECT DISTINCT headgate_part FROM {} WHERE headgate_sink = {}").format(
                    self._table.staging, sql.Literal(self._sink)
                )
            ).fetchall()
        return [str(name) for (name,) in found]

    def _key_collations(self, connection: psycopg.Connection) -> dict[str, sql.Identifier]:
        """The collations in which different texts are one key, by column: those of the key's unique indexes."""
        found = connection.execute(
            _KEY_COLLATIONS, (self._table.name.as_string(connection), len(self._table.key), list(self._table.key))
        ).fetchall()
        return {column: sql.Identifier(*collation) for column, *collation in found}

    def _apply(self, connection: psycopg.Connection, names: Sequence[str]) -> sql.Composed:
        """The statement that appends the rows, or updates those with the same key; the last row of a key counts."""
        table = self._table
        order, rows = self._staged(names)
        if not table.key:
            return sql.SQL("INSERT INTO {} ({}) SELECT {} {} ORDER BY {}, headgate_row").format(
                table.name, table.column_list, table.column_list, rows, order
            )
        key = sql.SQL(", ").join(map(sql.Identifier, table.key))
        others = [sql.Identifier(column) for column in table.columns if column not in table.key]
        update = sql.SQL(", ").join(sql.SQL("{} = EXCLUDED.{}").format(column, column) for column in others)
        return sql.SQL("INSERT INTO {} ({}) SELECT {} FROM ({}) AS last {} ON CONFLICT ({}) DO {}").format(
            table.name,
            table.column_list,
            table.column_list,
            self._last_of_each_key(connection, names),
            sql.SQL("" if table.op_column is None else f"WHERE {OP} <> 'd'"),
            key,
            sql.SQL("UPDATE SET {}").format(update) if others else sql.SQL("NOTHING"),
        )

    def _apply_deletions(self, connection: psycopg.Connection, names: Sequence[str]) -> None:
        """Delete what is deleted: first everything, if the table was emptied, with what was staged before that."""
        table = self._table
        order, rows = self._staged(names)
        emptied = connection.execute(
            sql.SQL("SELECT {}, headgate_row {} AND {} = 't' ORDER BY 1 DESC, 2 DESC LIMIT 1").format(
                order, rows, sql.Identifier(OP)
            )
        ).fetchone()
        if emptied is not None:
            connection.execute(sql.SQL("DELETE FROM {}").format(table.name))
            connection.execute(
                sql.SQL("DELETE {} AND ({}, headgate_row) <= ({}, {})").format(rows, order, *map(sql.Literal, emptied))
            )
        connection.execute(
            sql.SQL("DELETE FROM {} AS target USING ({}) AS last WHERE {} = 'd' AND ({}) = ({})").format(
                table.name,
                self._last_of_each_key(connection, names),
                sql.Identifier(OP),
                self._compared_key(connection, "target"),
                self._compared_key(connection, "last"),
            )
        )

    def _last_of_each_key(self, connection: psycopg.Connection, names: Sequence[str]) -> sql.Composed:
        order, rows = self._staged(names)
        key = self._compared_key(connection)
        return sql.SQL("SELECT DISTINCT ON ({}) * {} ORDER BY {}, {} DESC, headgate_row DESC").format(
            key, rows, key, order
        )

    def _compared_key(self, connection: psycopg.Connection, *table: str) -> sql.Composed:
        """The columns of the key, as its index compares them."""
        collations = self._key_collations(connection)
        return sql.SQL(", ").join(
            sql.SQL("{} COLLATE {}").format(sql.Identifier(*table, column), collations[column])
            if column in collations
            else sql.Identifier(*table, column)
            for column in self._table.key
        )

    def _staged(self, names: Sequence[str]) -> tuple[sql.Composed, sql.Composed]:
        """What orders the staged rows of these parts together with their number, and where they are."""
        parts = _texts(names)
        rows = sql.SQL("FROM {} WHERE headgate_sink = {} AND headgate_part = ANY({})").format(
            self._table.staging, sql.Literal(self._sink), parts
        )
        return sql.SQL("array_position({}, headgate_part)").format(parts), rows

    def _delete(self, connection: psycopg.Connection, names: Sequence[str]) -> None:
        connection.execute(
            sql.SQL("DELETE FROM {} WHERE headgate_sink = {} AND headgate_part = ANY({})").format(
                self._table.staging, sql.Literal(self._sink), _texts(names)
            )
        )


class PreparedCommitter(_PostgresCommitter):
    """Commits prepared transactions one by one."""

    def _create(self, connection: psycopg.Connection, columns: dict[str, Column]) -> None:
        gid_prefix(self._sink, self._table.place(connection))
        (most,) = connection.execute("SHOW max_prepared_transactions").fetchone() or ("0",)
        if int(most) == 0:
            raise SinkMisused(
                "prepared transactions are switched off in this server: set max_prepared_transactions to at least "
                'four times the parallelism and restart it, or use mode="staged"'
            )

    def commit(self, committables: Sequence[Committable]) -> None:
        with self._table.connect(autocommit=True) as connection:
            place = self._table.place(connection)
            for part in committables:
                if not self._end(connection, "COMMIT", place, part.name) and not self._committed(connection, [part]):
                    raise self._lost(part.name)
            self._prune(connection, committables)

    def abort(self, names: Sequence[str]) -> None:
        with self._table.connect(autocommit=True) as connection:
            place = self._table.place(connection)
            for name in names:
                self._end(connection, "ROLLBACK", place, name)

    def prepared(self) -> Iterable[str]:
        with self._table.connect() as connection:
            prefix = gid_prefix(self._sink, self._table.place(connection))
            of_earlier_releases = old_gid_prefix(self._sink)
            found = connection.execute(
                _PREPARED, {"new": prefix, "old": of_earlier_releases, "table": self._table.name.as_string(connection)}
            ).fetchall()
        names = [str(gid).removeprefix(prefix if new else of_earlier_releases) for gid, new in found]
        return [name for name in names if "/" not in name]

    def _end(self, connection: psycopg.Connection, how: str, place: str, name: str) -> bool:
        """Commit or roll back a part; False if it is not prepared."""
        for gid in (gid_of(self._sink, place, name), f"{old_gid_prefix(self._sink)}{name}"):
            try:
                connection.execute(sql.SQL("{} PREPARED {}").format(sql.SQL(how), sql.Literal(gid)))
                return True
            except _NO_SUCH_PREPARED:
                continue
        return False


def _texts(texts: Iterable[str]) -> sql.Composable:
    """An array of texts, as a literal: with parameters in its query, a name with % in it would be one too."""
    return sql.SQL("CAST({} AS text[])").format(sql.Literal(list(texts)))
