# SPDX-License-Identifier: Apache-2.0

"""The tasks' half of a PostgreSQL source: reads ranges of the key, then the changes, as Arrow batches.

A range ``["range", low, high]`` is read in one transaction, and yields one batch. Its position is the transaction's
snapshot, which says which other transactions the rows contain. When the batch has been processed, the enumerator is
told, and knows the snapshot of each range in the end.

The changes ``["changes", ranges]`` are one split, with the ranges as ``pack_ranges`` returns them. The server's slot
keeps the changes until a checkpoint covers them. A position is a place in the server's log: what was committed before
it is read. Inside of a large transaction, it is ``[place, commit, count]``: so many of its changes are read too. A
change is left out if the range that its key belongs to was read with it, that is, if its transaction is visible in the
snapshot of the range. So the hand-over is exact, without locks, and although each range was read at another time.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow
from psycopg import sql
from psycopg.types.json import Jsonb

from protocol.describing import show
from spark_bridge.common.conninfo import connect
from spark_bridge.sources.errors import SourceDataLost
from spark_bridge.sources.postgres.pgoutput import UNCHANGED, Change, Column, Decoder, Transaction
from spark_bridge.sources.postgres.ranges import ordered, unpack_ranges
from spark_bridge.sources.postgres.stream import ChangeStream, lsn_text
from spark_bridge.sources.postgres.table import (
    TableFacts,
    look,
    place_in_publication,
    why_columns_differ,
    why_no_changes,
)
from spark_bridge.subtask.source import SplitReader

BATCH_BYTES = 4 * 2**20
"""How large the messages are, about, whose changes make one batch at most, unless a single one is larger."""
PATIENCE_S = 60.0
"""How long a server that cannot be reached is waited for."""
TAKE_OVER_S = 2.0
"""After so long, the session that has the slot is taken for that of an attempt that was lost with its machine."""
IDLE_LOG_BYTES = 2**20
"""After so much log without changes of this table, the position moves on, so that the server can drop it."""
RANGE_READ = "headgate/postgres-range-read"
CHANGES_READ = "headgate/postgres-changes-read"
"""With the place in the log before which all changes are read, and where a bounded source ends."""


_FORMATS = {
    "timezone": "UTC",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
}
"""The settings of the server that say how it writes values, with those that are read."""
_Row = tuple[str, int, dict[str, Any]]
"""What happened to it, where in the log, and its values as texts."""
_IN_TRANSACTION = {**_FORMATS, "idle_in_transaction_session_timeout": "0", "transaction_timeout": "0"}


@dataclass(frozen=True)
class PostgresSettings:
    """How a table is read. ``schema`` is that of the batches.

    ``oid`` is the server's number of the table, ``identity`` the columns that tell its rows apart.
    """

    conninfo: str = field(repr=False)
    table: tuple[str, str]
    key: str
    key_type: str
    columns: tuple[str, ...]
    schema: pyarrow.Schema
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

    def stream(self, start: int) -> ChangeStream:
        """Open a stream of changes, whose texts do not depend on the server's settings. Raises ``psycopg.Error``."""
        options = " ".join(f"-c {name}={value}" for name, value in _FORMATS.items())
        connection = connect(self.conninfo, autocommit=True, replication="database", options=options)
        try:
            return ChangeStream(connection, str(self.slot), self.publication, start)
        except psycopg.Error:
            connection.close()
            raise


def check_table(connection: psycopg.Connection, table: tuple[str, str], oid: Any) -> TableFacts:
    """Look at the table. Raises ``SourceDataLost`` if what has its name is not the table with this number."""
    found = look(connection, table)
    if found is not None and found.oid == oid:
        return found
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


def free_slot(connection: psycopg.Connection, slot: str) -> None:
    """End the session that reads from the slot, if there is one, and wait until it has ended."""
    connection.execute(
        "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots WHERE slot_name = %s", (slot,)
    )


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
        self._stream: ChangeStream | None = None
        self._decoder = Decoder()
        self._place = 0  # what was committed before it has been handed on
        self._inside: tuple[int, int] | None = None  # a transaction, and how many of its changes were handed on too
        self._at_checkpoints: dict[int, int] = {}
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
        return max(0, self._log_end - max(self._place, self._looked_to)) if self._log_end else None

    def _reported(self, split: Any) -> Any:
        return split if split[0] == "range" else split[:1]

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._close_stream()

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    # --- a range of the table -------------------------------------------------------------------------------------

    def _read_range(
        self, low: str | None, high: str | None, snapshot: str | None
    ) -> Iterator[tuple[Any, pyarrow.RecordBatch]]:
        if snapshot is None:
            snapshot, rows = self._select(low, high)
            values = {column: [row[at] for row in rows] for at, column in enumerate(self._settings.columns)}
            try:
                yield snapshot, self._batch(values, ["r"] * len(rows), [0] * len(rows))
            except GeneratorExit:
                with suppress(Exception):  # what comes after this stage has returned early, or the task has failed
                    self.context.send_event_nowait(range_read_event(low, high, snapshot))
                raise
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
        with connect(settings.conninfo, autocommit=True) as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            # The settings end with the transaction, because a pooler may give the session to others after it.
            connection.execute(
                "SELECT set_config(key, value, true) FROM jsonb_each_text(%s) JOIN pg_settings ON name = lower(key)",
                (Jsonb(_IN_TRANSACTION),),
            )
            unlocked = (psycopg.errors.WrongObjectType, psycopg.errors.InsufficientPrivilege)  # a foreign table, say
            with suppress(*unlocked), connection.transaction():  # so that the columns are still these when it is read
                connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(settings.name))
            self._check_columns(check_table(connection, settings.table, settings.oid).columns, "")
            (snapshot,) = connection.execute("SELECT pg_current_snapshot()::text").fetchone() or ("",)
            return snapshot, _texts(connection.execute(query))

    def _check_columns(self, found: Sequence[Column], where: str) -> None:
        settings = self._settings
        why = why_columns_differ(found, self._settings.schema, settings.columns, are_all=settings.has_all_columns)
        if why is not None:
            raise SourceDataLost(
                f"the columns of {'.'.join(settings.table)} are not those that are read{where}: {why}. Pass columns= "
                "without this one to read on; or start again without a checkpoint, to copy the table again as it is now"
            )

    # --- changes --------------------------------------------------------------------------------------------------

    def _read_changes(
        self, ranges: bytes | list[Any], position: int | list[int] | None, identity: list[int] | None = None
    ) -> Iterator[tuple[Any, pyarrow.RecordBatch] | None]:
        self._identity = identity or [self._settings.oid, None, None]
        covered = _Ranges(ranges)
        self._place, *inside = position if isinstance(position, list) else [position or 0]
        self._inside = (inside[0], inside[1]) if inside else None
        until: int | None = None  # if it is bounded, where the log ended when it was asked first
        while True:
            has_found = False
            try:
                log_end = self._look()
                if until is None and self._settings.bounded:
                    until = log_end
                for batch in self._new_batches(log_end, until, covered):
                    if batch is not None:
                        has_found, self._failing_since = True, None
                    place = self._place if self._inside is None else [self._place, *self._inside]
                    yield None if batch is None else (place, batch)
            except (psycopg.OperationalError, psycopg.errors.ObjectInUse) as error:
                self._lose(error)
                yield None
                continue
            self._failing_since = None
            self._looked_to = log_end
            if until is not None:
                self._close_stream()  # frees the slot for the run after this one
                self._place, self._inside = max(until, self._place), None
                self.context.send_event([CHANGES_READ, self._place])
                return
            if not has_found:
                yield self._idle(log_end)

    def _idle(self, log_end: int) -> tuple[Any, pyarrow.RecordBatch] | None:
        if log_end - self._place <= IDLE_LOG_BYTES:
            return None
        self._place, self._inside = log_end, None
        return self._place, self._batch({}, [], [])

    def _lose(self, error: psycopg.Error) -> None:
        """Close what was open after an error of the server, which is tried again for a while."""
        self.close()
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now - self._failing_since > PATIENCE_S:
            raise error
        if isinstance(error, psycopg.errors.ObjectInUse) and now - self._failing_since > TAKE_OVER_S:
            with suppress(psycopg.Error), connect(self._settings.conninfo, autocommit=True) as connection:
                free_slot(connection, str(self._settings.slot))

    def _look(self) -> int:
        """Return where the log ends, after a check that all of it can be read; so the changes are, from now on."""
        if self._connection is None:
            self._connection = connect(self._settings.conninfo, autocommit=True)
        # What is written and not flushed yet, such as a commit that nobody waits for, is not decoded yet either.
        (log_end,) = self._connection.execute("SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint").fetchone() or (0,)
        if self._stream is None:
            self._check_slot(self._connection)
        if self._stream is None or log_end != self._looked_to:
            self._check_outside(self._connection)
        if self._stream is None:
            self._decoder = Decoder()
            self._stream = self._settings.stream(self._place)
        self._log_end = log_end
        return int(log_end)

    def _new_batches(self, log_end: int, until: int | None, covered: _Ranges) -> Iterator[pyarrow.RecordBatch | None]:
        """Read to ``log_end``, or to ``until`` at most, and to the end of a transaction; None if the server is silent.

        Moves the position with each batch, which has whole transactions, if they are not too large.
        """
        rows: list[_Row] = []
        opened: list[_Row] = []  # those of the transaction whose commit has not come yet
        size = opened_size = count = 0
        place, here = self._place, (0, 0)
        for sent in self._sent(log_end, until):
            if sent is None:
                yield None
                continue
            transaction = self._decoder.transaction
            for change in sent[1]:
                assert transaction is not None, "changes come between the begin and the commit of a transaction"
                count += 1
                here = (transaction.commit, count)
                if self._inside is None or here > self._inside:
                    opened += self._rows(transaction, change, covered)
            opened_size += sent[0]
            if transaction is None:
                rows += opened
                size += opened_size
                opened, opened_size, count = [], 0, 0
                place = max(place, self._decoder.end)
            rows_max = self._settings.batch_rows
            if rows and (len(rows) + len(opened) >= rows_max or size + opened_size >= BATCH_BYTES):
                self._place, self._inside = place, None
                yield self._batch_of(rows)
                rows, size = [], 0
            if opened and (len(opened) > rows_max or opened_size >= BATCH_BYTES):
                self._place, self._inside = place, here
                yield self._batch_of(opened)
                opened, opened_size = [], 0
        if rows:
            self._place, self._inside = place, None
            yield self._batch_of(rows)

    def _sent(self, log_end: int, until: int | None) -> Iterator[tuple[int, list[Change]] | None]:
        """Yield how large each message is, with the changes of the table in it; None if the server is silent."""
        assert self._stream is not None, "a look has opened it"
        stream, decoder, checked = self._stream, self._decoder, None
        stream.report(asks=stream.sent_to < log_end)
        while True:
            before = decoder.transaction
            is_behind = before is not None or stream.sent_to < log_end
            message = stream.receive(waits=is_behind)
            if message is None and not is_behind:
                return
            changes = [one for one in decoder.changes(message or b"") if one.relation.number == self._identity[0]]
            for change in changes:
                if change.relation is not checked:
                    self._check_columns(change.relation.columns, self._at(change))
                    checked = change.relation
            if until is not None and decoder.transaction is not None and decoder.transaction.commit >= until:
                return
            yield None if message is None else (len(message), changes)
            if before is not None and decoder.transaction is None:
                stream.sent_to = max(stream.sent_to, decoder.end)
                if stream.sent_to >= log_end:
                    return

    def _batch_of(self, rows: list[_Row]) -> pyarrow.RecordBatch:
        columns = {name: [values.get(name) for _, _, values in rows] for name in self._settings.columns}
        return self._batch(columns, [op for op, _, _ in rows], [lsn for _, lsn, _ in rows])

    def _check_outside(self, connection: psycopg.Connection) -> None:
        """The table is the one that was copied, and all of its changes come."""
        settings, (oid, place, _) = self._settings, self._identity
        found = check_table(connection, settings.table, oid)
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
        elif (begin := self._place or self._identity[2]) and found[0] > begin:
            what = "has moved on past the checkpoint that was restored, which is not the newest one"
        else:
            self._place = self._place or found[0]
            return
        raise SourceDataLost(
            f"the replication slot {self._settings.slot!r} {what}: changes of {'.'.join(self._settings.table)} cannot "
            "be read any more. Restore the newest checkpoint, or start again without one to copy the table again"
        )

    def _at(self, change: Change) -> str:
        key = self._settings.key
        value = (change.new or change.old).get(key)
        return f", at the change of the row with {key} = {value}" if value is not None else ", at a change"

    def _rows(self, transaction: Transaction, change: Change, covered: _Ranges) -> Iterator[_Row]:
        """The rows that a change makes: a change of the key deletes one row and inserts another."""
        key, (lsn, xid) = self._settings.key, transaction
        if change.op == "t":
            if covered.any_has(xid):
                raise SourceDataLost(
                    f"{'.'.join(self._settings.table)} was emptied with TRUNCATE while it was being copied: start "
                    "again without a checkpoint"
                )
            yield "t", lsn, {}
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
            yield "d", lsn, change.old
        if change.op != "d" and not covered.has(change.new[key], xid):
            yield "i" if moved else change.op, lsn, change.new

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        if self._place:
            self._at_checkpoints[checkpoint_id] = self._place
        return super().snapshot_state(checkpoint_id)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """No restart goes back further, so the server may forget what is before."""
        position = self._at_checkpoints.pop(checkpoint_id, None)
        for older in [one for one in self._at_checkpoints if one < checkpoint_id]:
            del self._at_checkpoints[older]
        with suppress(psycopg.Error):  # the next checkpoint tries again
            if position is not None and self._stream is not None:
                self._stream.confirm(position)
            elif position is not None and self._connection is not None:
                self._connection.execute(
                    "SELECT pg_replication_slot_advance(%s, %s::pg_lsn)", (self._settings.slot, lsn_text(position))
                )

    # --- Arrow ----------------------------------------------------------------------------------------------------

    def _batch(self, columns: dict[str, list[Any]], ops: list[str], lsns: list[int]) -> pyarrow.RecordBatch:
        arrays = []
        for one in self._settings.schema:
            if one.name == self._settings.op_column:
                arrays.append(pyarrow.array(ops, one.type))
            elif one.name == self._settings.lsn_column:
                arrays.append(pyarrow.array(lsns, one.type))
            else:
                arrays.append(self._column(one, columns.get(one.name, []), columns.get(self._settings.key, [])))
        return pyarrow.RecordBatch.from_arrays(arrays, schema=self._settings.schema)

    def _column(self, field: pyarrow.Field, texts: list[str | None], keys: list[str | None]) -> pyarrow.Array:
        """Convert a column. Raises ``ValueError``, which names the first value that its type does not have."""
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
    if pyarrow.types.is_boolean(type_):
        return pyarrow.array([None if one is None else one.startswith("t") for one in texts], type_)
    if pyarrow.types.is_binary(type_):
        return pyarrow.array([None if one is None else bytes.fromhex(one[2:]) for one in texts], type_)
    return pyarrow.array(texts, pyarrow.string()).cast(type_)


class _Ranges:
    """Which transactions the rows of each range contain."""

    def __init__(self, ranges: bytes | list[Any]) -> None:
        highs, snapshots = unpack_ranges(ranges)
        self._highs = [ordered(high) for high in highs if high is not None]  # the last one has none
        parsed = {snapshot: _Snapshot.parse(str(snapshot)) for snapshot in set(snapshots)}
        self._snapshots = [parsed[snapshot] for snapshot in snapshots]

    def has(self, key: str, xid: int) -> bool:
        """Whether the range of the key was read with this transaction."""
        return bool(self._snapshots) and self._snapshots[bisect_left(self._highs, ordered(key))].shows(xid)

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
        if not self.end:
            return False  # nothing was read
        whole = (self.end & ~0xFFFFFFFF) | xid
        if whole - self.end > 1 << 31:
            whole -= 1 << 32
        elif self.end - whole > 1 << 31:
            whole += 1 << 32
        return whole < self.first or (whole < self.end and whole not in self.running)
