# SPDX-License-Identifier: Apache-2.0

"""The tasks' half of a PostgreSQL source: reads ranges of the key, then the changes, as Arrow batches.

A range ``["range", low, high]`` is read in one transaction, and yields one batch. Its position is the transaction's
snapshot, which says which other transactions the rows contain. When the batch has been processed, the enumerator is
told, and knows the snapshot of each range in the end.

The changes ``["changes", ranges]`` are one split, with the ranges as ``pack_ranges`` returns them. The server's slot
keeps the changes until a checkpoint covers them. A position is the place in the server's log behind a commit. A change
is left out if the range that its key belongs to was read with it, that is, if its transaction is visible in the
snapshot of the range. So the hand-over is exact, without locks, and although each range was read at another time.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from protocol.describing import show
from spark_bridge.common.conninfo import connect
from spark_bridge.sources.errors import SourceDataLost
from spark_bridge.sources.postgres.pgoutput import UNCHANGED, Change, Column, Relation, Transaction, transactions
from spark_bridge.sources.postgres.ranges import unpack_ranges
from spark_bridge.sources.postgres.table import (
    TableFacts,
    look,
    place_in_publication,
    why_columns_differ,
    why_no_changes,
)
from spark_bridge.subtask.source import SplitReader

if TYPE_CHECKING:
    import pyarrow

CHANGES_MAX = 5_000
"""How many changes are asked for in one query, at first."""
PATIENCE_S = 60.0
"""How long a server that cannot be reached is waited for."""
IDLE_LOG_BYTES = 16 * 2**20
"""After so much log without changes of this table, the position moves on, so that the server can drop it."""
RANGE_READ = "headgate/postgres-range-read"
CHANGES_READ = "headgate/postgres-changes-read"


@dataclass(frozen=True)
class PostgresSettings:
    """How a table is read. ``schema`` is that of the batches, in Arrow's own format.

    ``oid`` is the server's number of the table, ``identity`` the columns that tell its rows apart.
    """

    conninfo: str = field(repr=False)
    table: tuple[str, str]
    key: str
    key_type: str
    columns: tuple[str, ...]
    schema: bytes
    op_column: str | None
    lsn_column: str | None
    slot: str | None
    publication: str
    batch_rows: int
    bounded: bool
    range_rows: int
    oid: int
    identity: tuple[str, ...]
    has_all_columns: bool

    @property
    def name(self) -> sql.Identifier:
        return sql.Identifier(*self.table)

    def connect(self) -> psycopg.Connection:
        """Open a connection whose texts do not depend on the server's settings. Raises ``OperationalError``."""
        options = "-c timezone=UTC -c datestyle=ISO -c intervalstyle=postgres -c bytea_output=hex"
        options += " -c extra_float_digits=1"
        return connect(
            self.conninfo, autocommit=True, application_name="headgate", options=options, client_encoding="utf8"
        )


def check_table(connection: psycopg.Connection, found: TableFacts | None, table: tuple[str, str], oid: Any) -> None:
    """Raise ``SourceDataLost`` if what has the table's name is not the table with this number."""
    if found is not None and found.oid == oid:
        return
    name = ".".join(table)
    now = connection.execute("SELECT %s::oid::regclass::text FROM pg_class WHERE oid = %s::oid", (oid, oid)).fetchone()
    raise SourceDataLost(
        f"{name} is not the table that was being read: "
        + (f"that one is {now[0]} now" if now else "that one was dropped")
        + (f", and another one has the name {name}" if found else "")
        + ". What was changed since then cannot be known. Give the table its name back, or start again without a "
        "checkpoint, after drop_slot(), to read the table that has the name"
    )


def check_published(
    connection: psycopg.Connection, table: tuple[str, str], publication: str, oid: int, place: int | None
) -> None:
    """Raise ``SourceDataLost`` if the publication has not all changes of the table, or was without it for a time."""
    found = place_in_publication(connection, publication, oid)
    if found is None:
        what = "does not have the table any more"
    elif place is not None and found[0] != place:
        what = "was without the table for a time, or was changed"
    elif found[1] is not None:
        what = found[1]
    else:
        return
    raise SourceDataLost(
        f"the publication {publication!r} {what}: changes of {'.'.join(table)} are missing. Call drop_slot(), and "
        "start again without a checkpoint to copy the table again"
    )


def changes_read_event(until: int) -> list[Any]:
    """All changes before this place in the log are read, and a bounded source ends there."""
    return [CHANGES_READ, until]


def range_read_event(low: str | None, high: str | None, snapshot: str) -> list[Any]:
    """Reader to enumerator: the range is processed, in any checkpoint from now on."""
    return [RANGE_READ, low, high, snapshot]


class PostgresReader(SplitReader):
    """Reads the splits of a ``PostgresSource``: yields ``pyarrow.RecordBatch`` objects, all with one schema."""

    def __init__(self, settings: PostgresSettings, rate_limit_per_s: float | None) -> None:
        self._settings = settings
        self.rate_limit_per_s = rate_limit_per_s
        self._connection: psycopg.Connection | None = None
        self._identity: list[Any] = [settings.oid, None, None]  # number, place in the publication, slot
        self._position = 0  # of the changes
        self._at_checkpoints: dict[int, int] = {}
        self._changes_max = CHANGES_MAX
        self._failing_since: float | None = None
        self._log_end = 0  # when it was last looked at
        self._looked_to = 0  # there is no change before that is not handed on

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, pyarrow.RecordBatch] | None]:
        if split[0] == "range":
            return self._read_range(split[1], split[2], position)
        return self._read_changes(split[1], position, *split[2:])

    def weight(self, output: pyarrow.RecordBatch) -> float:
        return float(output.num_rows)

    def backlog(self, split: Any, position: Any) -> int | None:
        """Rows of the table, as if each range were full; then the bytes of the server's log behind the position."""
        if split[0] == "range":
            return self._settings.range_rows if position is None else 0
        return max(0, self._log_end - max(self._position, self._looked_to)) if self._log_end else None

    def _reported(self, split: Any) -> Any:
        return split if split[0] == "range" else split[:1]

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # --- a range of the table -------------------------------------------------------------------------------------

    def _read_range(
        self, low: str | None, high: str | None, snapshot: str | None
    ) -> Iterator[tuple[Any, pyarrow.RecordBatch]]:
        if snapshot is None:
            snapshot, rows = self._select(low, high)
            values = {column: [row[at] for row in rows] for at, column in enumerate(self._settings.columns)}
            yield snapshot, self._batch(values, ["r"] * len(rows), [0] * len(rows))
        self.context.send_event(range_read_event(low, high, snapshot))

    def _select(self, low: str | None, high: str | None) -> tuple[str, list[tuple[Any, ...]]]:
        settings, key = self._settings, sql.Identifier(self._settings.key)
        bound = sql.SQL("{} {} CAST({} AS {})")
        type_ = sql.SQL(settings.key_type)
        wanted = [bound.format(key, sql.SQL(">"), sql.Literal(low), type_)] if low is not None else []
        if high is not None:
            wanted.append(bound.format(key, sql.SQL("<="), sql.Literal(high), type_))
        elif wanted:
            wanted = [sql.SQL("({} OR {} IS NULL)").format(*wanted, key)]
        query = sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY {}").format(
            sql.SQL(", ").join(map(sql.Identifier, settings.columns)),
            settings.name,
            sql.SQL(" AND ").join(wanted) if wanted else sql.SQL("true"),
            key,
        )
        with settings.connect() as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            unlocked = (psycopg.errors.WrongObjectType, psycopg.errors.InsufficientPrivilege)  # a foreign table, say
            with suppress(*unlocked), connection.transaction():  # so that the columns are still these when it is read
                connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(settings.name))
            found = look(connection, settings.table)
            check_table(connection, found, settings.table, settings.oid)
            self._check_columns(found.columns if found else (), "")
            (snapshot,) = connection.execute("SELECT pg_current_snapshot()::text").fetchone() or ("",)
            return snapshot, _texts(connection.execute(query))

    def _check_columns(self, found: Sequence[Column], where: str) -> None:
        settings = self._settings
        why = why_columns_differ(found, self._schema, settings.columns, are_all=settings.has_all_columns)
        if why is not None:
            raise SourceDataLost(
                f"the columns of {'.'.join(settings.table)} are not those that are read{where}: {why}. Pass columns= "
                "without this one to read on; or start again without a checkpoint, to copy the table again as it is now"
            )

    # --- changes --------------------------------------------------------------------------------------------------

    def _read_changes(
        self, ranges: bytes | list[Any], position: int | None, identity: list[int] | None = None
    ) -> Iterator[tuple[Any, pyarrow.RecordBatch] | None]:
        self._identity = identity or [self._settings.oid, None, None]
        covered = _Ranges(self._settings.key_type, ranges)
        self._position = position or 0
        until: int | None = None  # if it is bounded, where the log ended when it was asked first
        while True:
            if (seen := self._peek_if_reachable()) is None:
                yield None
                continue
            log_end, found = seen
            if until is None and self._settings.bounded:
                until = log_end
            due = [one for one in found if until is None or one.end <= until]
            for batch in self._batches(due, covered):
                yield self._position, batch
            if until is not None and (not found or len(due) < len(found)):
                self.context.send_event(changes_read_event(until))
                return
            if not found:
                yield self._idle(log_end)

    def _idle(self, log_end: int) -> tuple[Any, pyarrow.RecordBatch] | None:
        if log_end - self._position <= IDLE_LOG_BYTES:
            return None
        self._position = log_end
        return self._position, self._batch({}, [], [])

    def _peek_if_reachable(self) -> tuple[int, list[Transaction]] | None:
        """What ``_peek`` returns; None while the server cannot be reached, which is waited for."""
        try:
            seen = self._peek()
        except (psycopg.OperationalError, psycopg.errors.ObjectInUse):
            self.close()  # the server is restarting, or the session of a dead attempt has the slot for a moment
            self._failing_since = self._failing_since or time.monotonic()
            if time.monotonic() - self._failing_since > PATIENCE_S:
                raise
            return None
        self._failing_since = None
        self._log_end, found = seen
        if not found:
            self._looked_to = self._log_end
        return seen

    def _peek(self) -> tuple[int, list[Transaction]]:
        """Return where the log ended before, and the transactions behind the position, oldest first."""
        if self._connection is None:
            self._connection = self._settings.connect()
            self._check_slot(self._connection)
            self._check_outside(self._connection)
        # What is written and not flushed yet, such as a commit that nobody waits for, is not decoded yet either.
        (log_end,) = self._connection.execute("SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint").fetchone() or (0,)
        while True:
            messages = [
                bytes(data)
                for (data,) in self._connection.execute(
                    "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, %s, 'proto_version', '1', "
                    "'publication_names', %s)",
                    (self._settings.slot, self._changes_max, self._settings.publication),
                )
            ]
            self._check_outside(self._connection)  # after it: what was there at the end of the log is known to match
            found = [one for one in transactions(messages) if one.end > self._position]
            if found or len(messages) < self._changes_max:
                return log_end, found
            self._changes_max *= 2  # all of these were read, but no checkpoint covers them yet

    def _check_outside(self, connection: psycopg.Connection) -> None:
        """The table is the one that was copied, and all of its changes come."""
        settings, (oid, place, _) = self._settings, self._identity
        found = look(connection, settings.table)
        check_table(connection, found, settings.table, oid)
        assert found is not None, "the table has just been compared"
        check_published(connection, settings.table, settings.publication, oid, place)
        why = why_no_changes(connection, found, settings.table, settings.key, settings.columns)
        if why is not None:
            raise SourceDataLost(f"{why}. To stop reading its changes, call drop_slot()")

    def _check_slot(self, connection: psycopg.Connection) -> None:
        """The slot begins where the last checkpoint that has completed ends, or before."""
        found = connection.execute(
            "SELECT (confirmed_flush_lsn - '0/0')::bigint, wal_status FROM pg_replication_slots WHERE slot_name = %s",
            (self._settings.slot,),
        ).fetchone()
        if found is None:
            what = "is gone"
        elif found[1] == "lost":
            what = "has lost changes, because max_slot_wal_keep_size was too small for the time without checkpoints"
        elif (begin := self._position or self._identity[2]) and found[0] > begin:
            what = "has moved on past the checkpoint that was restored, which is not the newest one"
        else:
            return
        raise SourceDataLost(
            f"the replication slot {self._settings.slot!r} {what}: changes of {'.'.join(self._settings.table)} cannot "
            "be read any more. Restore the newest checkpoint, or start again without one to copy the table again"
        )

    def _batches(self, found: Sequence[Transaction], covered: _Ranges) -> Iterator[pyarrow.RecordBatch]:
        """Whole transactions, about ``batch_rows`` rows in a batch; moves the position."""
        rows: list[tuple[str, int, dict[str, Any]]] = []
        checked: Relation | None = None
        for one in found:
            for change in one.changes:
                if change.relation.number == self._identity[0]:
                    if change.relation is not checked:
                        self._check_columns(change.relation.columns, self._at(change))
                        checked = change.relation
                    rows += [(op, one.end, values) for op, values in self._rows(one.xid, change, covered)]
            self._position = one.end
            if len(rows) >= self._settings.batch_rows or (one is found[-1]):
                columns = {name: [values.get(name) for _, _, values in rows] for name in self._settings.columns}
                yield self._batch(columns, [op for op, _, _ in rows], [lsn for _, lsn, _ in rows])
                rows = []

    def _at(self, change: Change) -> str:
        key = self._settings.key
        value = (change.new or change.old).get(key)
        return f", at the change of the row with {key} = {value}" if value is not None else ", at a change"

    def _rows(self, xid: int, change: Change, covered: _Ranges) -> Iterator[tuple[str, dict[str, Any]]]:
        """The rows that a change makes: a change of the key deletes one row and inserts another."""
        key = self._settings.key
        if change.op == "t":
            if covered.any_has(xid):
                raise SourceDataLost(
                    f"{'.'.join(self._settings.table)} was emptied with TRUNCATE while it was being copied: start "
                    "again without a checkpoint"
                )
            yield "t", {}
            return
        for column in self._settings.columns:
            if change.new.get(column) is UNCHANGED:
                raise SourceDataLost(
                    f"the server does not send the value of {column!r}, which is large and was not changed: run "
                    f"ALTER TABLE {'.'.join(self._settings.table)} REPLICA IDENTITY FULL, and start again without a "
                    "checkpoint"
                )
        moved = change.op == "u" and any(
            change.old.get(column) not in (None, change.new.get(column)) for column in self._settings.identity
        )
        if (change.op == "d" or moved) and not covered.has(change.old[key], xid):
            yield "d", change.old
        if change.op != "d" and not covered.has(change.new[key], xid):
            yield "i" if moved else change.op, change.new

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        if self._position:
            self._at_checkpoints[checkpoint_id] = self._position
        return super().snapshot_state(checkpoint_id)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """No restart goes back further, so the server may forget what is before."""
        position = self._at_checkpoints.pop(checkpoint_id, None)
        for older in [one for one in self._at_checkpoints if one < checkpoint_id]:
            del self._at_checkpoints[older]
        if position is None or self._connection is None:
            return
        try:
            self._connection.execute(
                "SELECT pg_replication_slot_advance(%s, %s::pg_lsn)", (self._settings.slot, lsn_text(position))
            )
        except psycopg.Error:
            self.close()  # the next checkpoint tries again
        else:
            self._changes_max = CHANGES_MAX

    # --- Arrow ----------------------------------------------------------------------------------------------------

    @cached_property
    def _schema(self) -> pyarrow.Schema:
        import pyarrow

        return pyarrow.ipc.read_schema(pyarrow.BufferReader(self._settings.schema))

    def _batch(self, columns: dict[str, list[Any]], ops: list[str], lsns: list[int]) -> pyarrow.RecordBatch:
        import pyarrow

        arrays = []
        for one in self._schema:
            if one.name == self._settings.op_column:
                arrays.append(pyarrow.array(ops, one.type))
            elif one.name == self._settings.lsn_column:
                arrays.append(pyarrow.array(lsns, one.type))
            else:
                arrays.append(self._column(one, columns.get(one.name, []), columns.get(self._settings.key, [])))
        return pyarrow.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(self, field: pyarrow.Field, texts: list[str | None], keys: list[str | None]) -> pyarrow.Array:
        """Convert a column. Raises ``ValueError``, which names the first value that its type does not have."""
        import pyarrow

        try:
            return _array(texts, field.type)
        except pyarrow.ArrowInvalid:
            for key, text in zip(keys, texts, strict=True):
                try:
                    _array([text], field.type)
                except pyarrow.ArrowInvalid as error:
                    table, key_column = ".".join(self._settings.table), self._settings.key
                    raise ValueError(
                        f"column {field.name!r} of {table} is {show(text, 80)} in the row with {key_column} = {key}, "
                        f"which {field.type} in Arrow cannot be: pass columns= without this column; or correct the "
                        "value and start again without a checkpoint, since the log has it too"
                    ) from error
            raise


def _texts(cursor: psycopg.Cursor[Any]) -> list[tuple[str | None, ...]]:
    """The rows as the server writes their values itself, which is also how it writes those of changes."""
    result = cursor.pgresult
    assert result is not None, "a query has just been run"
    columns = range(result.nfields)
    values = ((result.get_value(row, column) for column in columns) for row in range(result.ntuples))
    return [tuple(None if value is None else value.decode() for value in row) for row in values]


def _array(texts: list[str | None], type_: pyarrow.DataType) -> pyarrow.Array:
    """A column of the values that PostgreSQL writes as these texts."""
    import pyarrow

    if pyarrow.types.is_boolean(type_):
        return pyarrow.array([None if one is None else one.startswith("t") for one in texts], type_)
    if pyarrow.types.is_binary(type_):
        return pyarrow.array([None if one is None else bytes.fromhex(one[2:]) for one in texts], type_)
    return pyarrow.array(texts, pyarrow.string()).cast(type_)


def lsn_text(position: int) -> str:
    """A place in the log as PostgreSQL writes it."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


class _Ranges:
    """Which transactions the rows of each range contain."""

    def __init__(self, key_type: str, ranges: bytes | list[Any]) -> None:
        self._number = int if key_type in ("smallint", "integer", "bigint") else str
        highs, snapshots = unpack_ranges(ranges)
        self._highs = [self._number(high) for high in highs if high is not None]  # the last one has none
        parsed = {snapshot: _Snapshot.parse(str(snapshot)) for snapshot in set(snapshots)}
        self._snapshots = [parsed[snapshot] for snapshot in snapshots]

    def has(self, key: str, xid: int) -> bool:
        """Whether the range of the key was read with this transaction."""
        return bool(self._snapshots) and self._snapshots[bisect_left(self._highs, self._number(key))].shows(xid)

    def any_has(self, xid: int) -> bool:
        return any(snapshot.shows(xid) for snapshot in self._snapshots)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """``pg_snapshot``: transactions below ``first`` are visible, those from ``end`` on and ``running`` ones are not."""

    first: int
    end: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> _Snapshot:
        first, end, running = text.split(":")
        return cls(int(first), int(end), frozenset(map(int, running.split(","))) if running else frozenset())

    def shows(self, xid: int) -> bool:
        """Whether the transaction is visible. ``xid`` has 32 bits, and belongs to the epoch that is nearest."""
        whole = (self.end & ~0xFFFFFFFF) | xid
        if whole - self.end > 1 << 31:
            whole -= 1 << 32
        elif self.end - whole > 1 << 31:
            whole += 1 << 32
        return whole < self.first or (whole < self.end and whole not in self.running)
