# SPDX-License-Identifier: Apache-2.0

"""The driver's half of a PostgreSQL source: divides the table into ranges, and hands the changes to one task.

The slot is created before the first range is read, so no change is missed. The changes begin when every range is
*settled*: processed, and covered by a checkpoint that has completed. From then on no restart can read a range again,
with another snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import psycopg
import pyarrow
from psycopg import sql

from actors.coordination import SplitEnumerator, SplitEnumeratorContext
from actors.coordination.sources.pending_splits import PendingSplits
from actors.coordination.user_calls import Begun, in_turns
from actors.threads import USER
from protocol.arguments import AT_LEAST_1, POSITIVE, TEXT, checked, given
from protocol.describing import show, with_article
from protocol.errors import RemoteProtocolError
from protocol.kept_bytes import KeptBytes
from protocol.source_events import SplitAt, encode_split
from protocol.wire.state import (
    OLD,
    Steps,
    decode_entry,
    decode_state_in_steps,
    drain,
    encode_entry,
    encode_state_in_steps,
)
from spark_bridge.common.conninfo import connect
from spark_bridge.sources.errors import SourceBlocked, SourceUnreachable
from spark_bridge.sources.postgres.ranges import pack_ranges
from spark_bridge.sources.postgres.table import (
    TableFacts,
    arrow_type,
    identity_columns,
    look,
    place_in_publication,
    why_no_changes,
)
from spark_bridge.sources.postgres.task import (
    CHANGES_READ,
    RANGE_READ,
    PostgresReader,
    PostgresSettings,
    check_published,
    check_table,
    free_slot,
)
from spark_bridge.sources.source import Source
from spark_bridge.subtask.source import SplitReader

SLOT_TIMEOUT_S = 30.0
"""The server creates a slot when all transactions that were open have ended."""

POSTGRES = "the enumerator of a PostgreSQL source"
READ_BYTES_MAX = 2**30
"""How much is kept of the ranges that were read, with their snapshots."""
ENTRY_BYTES = 400
"""What one of them takes beside its texts."""
_READ = "read"
_LEFT = "left"
_NO_CUT = -1
"""What was read since the last cut belongs to no checkpoint."""
_KEY_TYPES = ("smallint", "integer", "bigint", "uuid")


class PostgresSource(Source):
    """Reads a PostgreSQL table as Arrow batches, and then its changes. Needs ``headgate[postgres,dataframe]``.

    The table is read in ranges of its key, by all tasks. With ``changes``, one task then reads what is changed, in the
    order of the commits, from the server's log. Nothing is locked.

    Exactly once: each range counts once, as it was when it was read. With ``changes``, each change counts once, too:
    either the rows that were read contain it, or it follows as a change.

    Changes need streaming mode with periodic checkpoints, since they begin after the first checkpoint that covers the
    whole table; a server with ``wal_level=logical``, to which ``conninfo`` leads without a pooler; and a user with the
    right to replicate, who owns the table.

    The server keeps changes in a replication slot until a checkpoint covers them. Drop it with ``drop_slot`` when the
    job is never run again; otherwise the server's disk fills up.

    Args:
        conninfo: how to connect, from the driver and from every task: a libpq connection string or URL.
        table: the table, as ``table`` (of the schema public) or ``schema.table``.
        key: the column of the primary key, an integer or a UUID.
        columns: the columns to read; by default all that the table has at the start. A column that comes later is then
            an error; with ``columns``, it is not read.
        changes: the name of the replication slot for changes, unique in the server; letters, digits and underscores.
            None reads the table only, and ends.
        bounded: end when everything has been read that was committed when the task began to read changes. In streaming
            mode, the run after that reads the changes since then; without ``changes``, the whole table.
        op_column: gets what a row is: r (read from the table), i, u or d (inserted, updated, deleted), or t (the table
            was emptied with TRUNCATE; all columns are NULL). A deleted row has its key only, unless the table has
            REPLICA IDENTITY FULL. None for no such column.
        lsn_column: gets the place of the commit in the server's log, an integer that grows; 0 for rows of the table.
            None for no such column.
        range_rows: how many rows are read in one transaction, and make one batch.
        batch_rows: about how many changes a batch has at most. A transaction is divided if it alone has more, or has
            more than 4 MiB.
        rate_limit_per_s: how many rows all tasks together read in a second; None for no limit.

    Raises:
        ValueError: a number that is not positive, or an invalid name of the slot.
    """

    @checked(conninfo=TEXT, range_rows=AT_LEAST_1, batch_rows=AT_LEAST_1, rate_limit_per_s=POSITIVE)
    def __init__(
        self,
        conninfo: str,
        table: str,
        key: str,
        columns: list[str] | None = None,
        *,
        changes: str | None = None,
        bounded: bool = False,
        op_column: str | None = "op",
        lsn_column: str | None = "lsn",
        range_rows: int = 10_000,
        batch_rows: int = 1_000,
        rate_limit_per_s: float | None = None,
    ) -> None:
        if changes is not None and not (
            changes.isascii() and changes.replace("_", "a").isalnum() and changes.islower()
        ):
            raise ValueError(
                "changes must be the name of a slot, of lower-case letters, digits and underscores, not "
                f"{given('changes', changes)}"
            )
        extra = [one for one in (op_column, lsn_column) if one is not None and changes is not None]
        names = [*(columns or (key,)), *extra]
        if len(set(names)) < len(names):
            raise ValueError(f"columns must be names that differ, also from op_column and lsn_column, not {names}")
        schema, _, name = table.rpartition(".")
        self._conninfo = conninfo
        self._table = (schema or "public", name)
        self._key = key
        self._given_columns = columns
        self._slot = changes
        self._bounded = bounded
        self._op_column = op_column if changes is not None else None
        self._lsn_column = lsn_column if changes is not None else None
        self.range_rows = range_rows
        self._batch_rows = batch_rows
        self._rate_limit_per_s = rate_limit_per_s

    def __repr__(self) -> str:
        return f"PostgresSource({'.'.join(self._table)!r})"

    def _connect(self, *, autocommit: bool = False) -> psycopg.Connection:
        """Open a connection. Raises ``SourceUnreachable``, or ``ValueError`` if ``conninfo`` cannot be understood."""
        try:
            return connect(self._conninfo, autocommit=autocommit)
        except psycopg.OperationalError as error:
            raise SourceUnreachable(
                f"{self!r} cannot connect: {str(error).strip()}. Check conninfo, with which the driver and every "
                "executor connect"
            ) from error

    def _check_replication(self, connection: psycopg.Connection) -> None:
        """Raise ``SourceUnreachable`` if changes cannot be read over ``conninfo``, which may name a pooler.

        Raises ``ValueError`` if everybody's commits would wait for this source.
        """
        (standbys,) = connection.execute("SHOW synchronous_standby_names").fetchone() or ("",)
        if "*" in standbys:
            raise ValueError(
                f"synchronous_standby_names is {standbys!r}: the server would take this source for a standby, and each "
                "commit of others would wait for a checkpoint. Put the names of the standbys there in place of '*'"
            )
        try:
            connect(self._conninfo, autocommit=True, replication="database").close()
        except psycopg.OperationalError as error:
            raise SourceUnreachable(
                f"{self!r} cannot read changes, because what is at conninfo takes no replication connection: "
                f"{str(error).strip()}. Let conninfo name the server itself and not a pooler: PgBouncer before 1.23 "
                "passes none on. The server needs a free one of its max_wal_senders, and the user the right REPLICATION"
            ) from error

    def _look(self) -> TableFacts:
        """What the table is now. Blocks."""
        with self._connect() as connection:
            found = look(connection, self._table)
        name = ".".join(self._table)
        if found is None:
            raise ValueError(f"there is no table {name}: create it, or name the schema too")
        missing = [column for column in (self._key, *(self._given_columns or ())) if column not in found.types]
        if missing:
            raise ValueError(
                f"table {name} has no columns {missing}, only {list(found.types)}: correct key and columns"
            )
        if (type_ := found.types[self._key]) not in _KEY_TYPES:
            raise ValueError(f"the key {self._key!r} is {with_article(type_)}: it must be one of {_KEY_TYPES}")
        return found

    @cached_property
    def _table_as_planned(self) -> TableFacts:
        """Of which the columns are read, whatever the table is later. Blocks."""
        return self._look()

    @property
    def columns(self) -> list[str]:
        """The columns of the table that are read; the key is always among them. Blocks."""
        columns = list(self._given_columns or self._table_as_planned.types)
        return columns if self._key in columns else [self._key, *columns]

    @cached_property
    def schema(self) -> pyarrow.Schema:
        """The columns, as a ``pyarrow.Schema``. Asks the server, and blocks."""
        found = {column.name: column for column in self._table_as_planned.columns}
        fields = [pyarrow.field(column, arrow_type(found[column])) for column in self.columns]
        fields += [pyarrow.field(self._op_column, pyarrow.string())] if self._op_column else []
        fields += [pyarrow.field(self._lsn_column, pyarrow.int64())] if self._lsn_column else []
        return pyarrow.schema(fields)

    @property
    def settings(self) -> PostgresSettings:
        """What both halves know. Blocks."""
        with self._connect() as connection:
            found = self._look()
            identity = identity_columns(connection, found, self._key)
        return PostgresSettings(
            self._conninfo,
            self._table,
            self._key,
            self._table_as_planned.types[self._key],
            tuple(self.columns),
            self.schema,
            self._op_column,
            self._lsn_column,
            self._slot,
            self._publication,
            self._batch_rows,
            self._bounded,
            self.range_rows,
            found.oid,
            identity,
            self._given_columns is None and self.has_changes,
        )

    @property
    def _publication(self) -> str:
        return f"headgate_{self._slot}"

    def create_slot(self) -> list[int | None] | None:
        """Create publication and slot if they do not exist, before anything is read. Blocks.

        Returns the identity of the table, which a checkpoint keeps: its number, that of its place in the publication,
        and the place in the log where the slot begins.

        Raises ``SourceUnreachable`` if there is a pooler that passes no replication connection on, and
        ``SourceBlocked`` if transactions that are open, of whatever database of the server, do not end in time:
        the server waits for them. Raises ``ValueError`` if the server keeps no logical log; if the table is one whose
        changes would not come, or would fail for others; or if the name belongs to something else: the publication to
        other tables, or the slot to another database or output plugin. Whatever can be refused is, before anything is
        created.
        """
        found = self._look()
        with self._connect(autocommit=True) as connection:
            (level,) = connection.execute("SHOW wal_level").fetchone() or ("",)
            if level != "logical":
                raise ValueError(f"wal_level is {level!r}: set it to logical and restart the server, to read changes")
            why = why_no_changes(connection, found, self._table, self._key, self.columns)
            if why is not None:
                raise ValueError(why)
            self._check_replication(connection)
            self._check_slot_name(connection)
            with suppress(psycopg.errors.DuplicateObject):  # from an earlier start
                connection.execute(
                    sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH (publish_via_partition_root = true)").format(
                        sql.Identifier(self._publication), sql.Identifier(*self._table)
                    )
                )
            place = self._check_publication(connection, found.oid)
            timeout = sql.Literal(f"{SLOT_TIMEOUT_S:g}s")
            try:
                with connection.transaction():
                    connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(timeout))
                    connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (self._slot,))
            except psycopg.errors.DuplicateObject:
                pass  # what it has more is recognised by the snapshots
            except psycopg.errors.LockNotAvailable as error:
                raise SourceBlocked(
                    f"the server has not created the replication slot {self._slot!r} within {SLOT_TIMEOUT_S:g} s, "
                    f"because it waits for transactions that are open: {_open_transactions(connection)}"
                ) from error
            (begin,) = connection.execute(
                "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = %s",
                (self._slot,),
            ).fetchone() or (0,)
        return [found.oid, place, begin]

    def _check_identity(self, identity: list[int | None]) -> None:
        """Raise ``SourceDataLost`` if the table is not the one that a checkpoint was made of. Blocks.

        ``identity`` is the number of the table, which another one with its name does not have; the number of its place
        in the publication; and the place in the log where the slot began. Without changes, these two are None.
        """
        self._look()
        oid, place, _ = identity
        with self._connect() as connection:
            found = check_table(connection, self._table, oid)
            if self.has_changes:
                self._check_replication(connection)
                check_published(connection, self._table, self._publication, found.oid, place)

    def _check_publication(self, connection: psycopg.Connection, oid: int) -> int:
        """What an earlier start left is this source's: otherwise no change of the table would ever come."""
        name = self._publication
        found = place_in_publication(connection, name, oid)
        if found is None:
            published = connection.execute(
                "SELECT schemaname::text, tablename::text FROM pg_publication_tables WHERE pubname = %s", (name,)
            ).fetchall()
            tables = ", ".join(".".join(table) for table in published) or "no table"
            raise ValueError(
                f"the publication {name!r} is for {tables}, not for {'.'.join(self._table)}: give each source another "
                f"name as changes=, or call drop_slot() of the source that had {self._slot!r} before"
            )
        if found[1] is not None:
            raise ValueError(
                f"the publication {name!r} {found[1]} for {'.'.join(self._table)}, so that changes would be missing: "
                f"run DROP PUBLICATION {name}, and this source creates the one it needs"
            )
        return found[0]

    def _check_slot_name(self, connection: psycopg.Connection) -> None:
        found = connection.execute(
            "SELECT plugin::text, database::text, current_database()::text FROM pg_replication_slots "
            "WHERE slot_name = %s",
            (self._slot,),
        ).fetchone()
        if found is not None and found != ("pgoutput", found[2], found[2]):
            raise ValueError(
                f"the replication slot {self._slot!r} is of the plugin {found[0]!r} in the database {found[1]!r}, not "
                f"of 'pgoutput' in {found[2]!r}: somebody else uses this name, so pass another one as changes="
            )

    def drop_slot(self) -> None:
        """Drop slot and publication: the job is never run again. Does nothing if they do not exist. Blocks.

        A task that still reads from the slot fails.
        """
        with self._connect(autocommit=True) as connection:
            free_slot(connection, str(self._slot))
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
                (self._slot,),
            )
            connection.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(self._publication)))

    def ranges(self) -> Iterator[list[Any]]:
        """The ranges of the key, ``["range", low, high]``: above ``low``, up to ``high``. The last one has no end.

        Blocks.
        """
        type_ = sql.SQL(self._table_as_planned.types[self._key])
        key, table = sql.Identifier(self._key), sql.Identifier(*self._table)
        query = sql.SQL(
            "SELECT {key}::text FROM (SELECT {key} FROM {table} WHERE {above} ORDER BY {key} OFFSET {skip} LIMIT 1) one"
        )
        low: str | None = None
        with self._connect() as connection:
            while True:
                above = (
                    sql.SQL("{} IS NOT NULL").format(key)  # the last range has those without one
                    if low is None
                    else sql.SQL("{} > CAST({} AS {})").format(key, sql.Literal(low), type_)
                )
                one = connection.execute(
                    query.format(key=key, table=table, above=above, skip=sql.Literal(self.range_rows - 1))
                ).fetchone()
                yield ["range", low, one[0] if one else None]
                if one is None:
                    return
                low = one[0]

    @property
    def has_changes(self) -> bool:
        """Whether changes follow the table."""
        return self._slot is not None

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return PostgresEnumerator(self, state)

    def next_part(self, split: Any, position: Any) -> tuple[Any, Any] | None:
        if self.has_changes:
            raise ValueError(
                "spark.readStream cannot read the changes of a PostgreSQL table, because it takes no checkpoints of "
                "Headgate: read them in a chain, with chain(source=...)"
            )
        return super().next_part(split, position)

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return partial(PostgresReader, self.settings, self._rate_limit_per_s)


def _open_transactions(connection: psycopg.Connection) -> str:
    prepared = connection.execute("SELECT gid, database FROM pg_prepared_xacts ORDER BY prepared").fetchall()
    sessions = connection.execute(
        "SELECT pid, datname, application_name, extract(epoch FROM now() - xact_start)::int FROM pg_stat_activity "
        "WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY xact_start"
    ).fetchall()
    found = [f"{gid!r} in {database!r}, prepared (end it with ROLLBACK PREPARED)" for gid, database in prepared]
    found += [
        f"that of process {pid} ({name or 'unnamed'}) in {database!r}, for {open_s} s (pg_terminate_backend ends it)"
        for pid, database, name, open_s in sessions
    ]
    return "; ".join(found) or "they have ended since, so start again"


class PostgresEnumerator(SplitEnumerator):
    """Hands out the ranges of the table and then, to one reader, the changes.

    A range that was read is *unsettled* until a checkpoint completes whose cut came after the news of it.
    """

    def __init__(self, source: PostgresSource, state: bytes | None) -> None:
        self._source = source
        self._is_restored = state is not None
        self._pending = PendingSplits(lambda split, position: source.range_rows if split[0] == "range" else 0)
        self._count = 0
        self._has_begun = False  # the changes were handed out
        self._identity: list[int | None] | None = None  # of the table; None in a state of before
        self._changes_to: int | None = None  # where a bounded read of the changes has ended
        self._read: dict[str | None, bytes] = {}  # the low end of a range to an encoded ``[low, high, snapshot]``
        self._unsettled: dict[int, dict[str | None, int]] = {_NO_CUT: {}}  # by first cut: low end to who has read it
        self._waiting: dict[int, None] = {}
        self._holding: set[int] = set()  # subtasks that may have a range which they have not read to its end
        self._account = KeptBytes(
            READ_BYTES_MAX,
            f"what tasks say of the ranges of {source!r} that they have read",
            "choose a larger range_rows",
        )
        self._restoring = Begun(self._restore(state))
        self._context: SplitEnumeratorContext

    def _restore(self, state: bytes | None) -> Steps[None]:
        if state is None:
            return
        fields = yield from decode_state_in_steps(POSTGRES, state)
        if OLD in fields:
            fields = fields[OLD]
            yield from self._pending.restore_values_in_steps(fields["pending"])
            fields["read"] = list(map(encode_entry, fields["read"]))
        else:
            yield from self._pending.restore_in_steps(fields["pending"])
        self._count, self._has_begun = fields["count"], fields["begun"]
        self._changes_to = fields.get("changes_to")
        self._identity = fields.get("identity")
        for chunk in drain(fields["read"]):
            self._read |= {decode_entry(one)[0]: one for one in chunk}
            self._account.keep(_READ, sum(map(len, chunk)) + ENTRY_BYTES * len(chunk))
            yield

    @property
    def continues_with_other_input(self) -> bool:  # type: ignore[override]  # depends on the source
        """See ``SplitEnumerator``: a run with other input reads the changes since then, or the whole table again."""
        return self._source.has_changes

    @property
    def pending_count(self) -> int:
        """How many splits are known and not assigned."""
        return len(self._pending)

    @property
    def pending_backlog(self) -> int:
        """How many rows these have, as if each range were full. The changes count when a task has them."""
        return self._pending.amount

    async def start(self, context: SplitEnumeratorContext) -> None:
        self._context = context
        await self._restoring.finish()
        if self._is_restored:
            self._holding.update(range(context.parallelism))
            if self._identity is not None and (self._source.has_changes or len(self._pending)):
                await USER.run(self._source._check_identity, self._identity)
            if self._changes_to is not None and not context.coordinator.input_begins_again:
                self._pending.add(SplitAt(await self._changes(), self._changes_to))
                self._changes_to = None
            return
        if self._source.has_changes:
            self._identity = await USER.run(self._source.create_slot)
        else:
            self._identity = [(await USER.run(self._source._look)).oid, None, None]
        ranges = await USER.run(lambda: [encode_split(one) for one in self._source.ranges()])
        await in_turns(self._pending.restore_in_steps(ranges))
        self._count = len(self._pending)

    async def handle_split_request(self, subtask: int) -> None:
        self._waiting[subtask] = None
        self._holding.discard(subtask)
        await self._serve()

    async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
        match event:
            case [str(name), (str() | None) as low, (str() | None) as high, str(snapshot)] if name == RANGE_READ:
                if low not in self._read or any(low in cut for cut in self._unsettled.values()):
                    self._note_read(subtask, low, encode_entry([low, high, snapshot]))
            case [str(name), int(until)] if name == CHANGES_READ and 0 <= until < 2**63:
                self._changes_to = until
                self._unsettled[_NO_CUT][CHANGES_READ] = subtask  # no low end of a range
            case _:
                raise ValueError(
                    f"subtask {subtask} sent {show(event)}, which is not a message of a PostgresSource's reader: send "
                    "your own events to a coordinator of yours, in another stage"
                )

    def _note_read(self, subtask: int, low: str | None, entry: bytes) -> None:
        if low not in self._read and len(self._read) >= self._count:
            raise RemoteProtocolError(f"a range of the table that it was not divided into, from {show(low, 80)} on")
        self._forget_read(low)
        self._account.charge(_READ, len(entry) + ENTRY_BYTES)
        self._read[low] = entry
        self._unsettled[_NO_CUT][low] = subtask

    def _forget_read(self, low: str | None) -> None:
        if (entry := self._read.pop(low, None)) is not None:
            self._account.release(_READ, len(entry) + ENTRY_BYTES)

    async def attempt_ended(self, subtask: int, attempt: int, succeeded: bool) -> None:
        """What a task has left that returned early, nobody reads, as soon as a checkpoint covers that it succeeded."""
        if succeeded and subtask in self._holding:
            self._holding.discard(subtask)
            self._unsettled[_NO_CUT][f"{_LEFT} {subtask}"] = subtask  # no low end of a range
            await self._serve()

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self._holding.add(subtask)  # perhaps what the checkpoint has for it; until it asks

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        for cut in self._unsettled.values():
            for low in [low for low, reader in cut.items() if reader == subtask]:
                del cut[low]  # it is read again, with another snapshot
                self._forget_read(low)
                if low == CHANGES_READ:
                    self._changes_to = None
        await in_turns(self._pending.put_back_in_steps(splits))
        await self._serve()

    async def _serve(self) -> None:
        if not len(self._pending) and not self._has_begun and self._source.has_changes and self._is_settled:
            self._has_begun = True
            self._pending.add(await self._changes())
        for subtask in tuple(self._waiting):
            if not self._context.attempts(subtask):
                del self._waiting[subtask]  # its next attempt asks itself
            elif len(self._pending):
                del self._waiting[subtask]
                self._holding.add(subtask)
                await self._context.assign_splits(subtask, self._pending.take(1))
            elif self._has_begun or not self._source.has_changes:
                del self._waiting[subtask]
                await self._context.signal_no_more_splits(subtask)

    async def _changes(self) -> list[Any]:
        """In the order of the key, with the snapshot of each range."""
        changes = ["changes", await USER.run(pack_ranges, self._read, self._count)]
        return changes if self._identity is None else [*changes, self._identity]

    @property
    def _is_settled(self) -> bool:
        is_read = len(self._read) == self._count or not self._holding
        return is_read and not any(self._unsettled.values())

    async def snapshot_state(self, checkpoint_id: int) -> bytes:
        self._unsettled[checkpoint_id] = self._unsettled[_NO_CUT]
        self._unsettled[_NO_CUT] = {}
        fields = {
            "pending": self._pending.encoded(),
            "count": self._count,
            "begun": self._has_begun,
            "changes_to": self._changes_to,
            "identity": self._identity,
            "read": iter(self._read.values()),
        }
        return await in_turns(encode_state_in_steps(POSTGRES, fields))

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        for covered in [cut for cut in self._unsettled if _NO_CUT != cut <= checkpoint_id]:
            del self._unsettled[covered]
        await self._serve()
