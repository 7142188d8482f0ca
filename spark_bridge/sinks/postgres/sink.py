# SPDX-License-Identifier: Apache-2.0

"""PostgreSQL as a two-phase sink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from protocol.arguments import TEXT, checked
from spark_bridge.common.extras import require
from spark_bridge.sinks.rows import check_columns
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, SinkWriterContext, TwoPhaseCommitter, TwoPhaseSink

if TYPE_CHECKING:
    from spark_bridge.sinks.postgres.table import PostgresTable
    from spark_bridge.sinks.postgres.task import PostgresWriter


class PostgresSink(TwoPhaseSink[Any]):
    """Rows of a PostgreSQL table, appended, or updated and deleted by key, exactly once. Needs ``headgate[postgres]``.

    Exactly once, as long as the server keeps what it has committed: ``fsync`` and ``synchronous_commit`` must not be
    off, and a standby that takes over must have all commits. Otherwise rows may be lost when the server dies.

    A record is a dict or a Spark ``Row`` with the columns' names, a tuple in their order, or an Arrow batch. The table
    must exist. The user needs the right to create tables in its schema, for the ledger ``headgate_commits``, and in
    staged mode for the staging table ``headgate_staged_TABLE``; or create both before, as the page of the sink shows.

    Args:
        conninfo: how to connect, from the driver and from every task: a libpq connection string or URL. It travels to
            the tasks in Spark's closure; a password can stay in each machine's ``~/.pgpass`` instead.
        table: the table, as ``table`` or ``schema.table``.
        columns: the columns to write.
        key: columns with a unique constraint. A row with the same key as an existing one replaces its other columns.
            Without, all rows are appended. Only in staged mode.
        op_column: a column of the records, not of the table, that says what each row is, as that of ``PostgresSource``
            does: r, i or u replace the row with this key, or insert it; d deletes it, and needs the key only; t deletes
            all rows of the table, also those of others. Of the rows of a subtask with one key in a checkpoint, the
            last one counts; between subtasks the order is not defined. Needs ``key``.
        mode: ``"staged"``: tasks write into the staging table, and the driver moves all rows of a checkpoint in one
            transaction, so readers see whole checkpoints. ``"prepared"``: tasks write into the table itself, in one
            prepared transaction each, which the driver commits one after the other. Each row is written once only, but
            readers may see one subtask's rows of a checkpoint before another's. It needs
            ``max_prepared_transactions``.
        name: distinguishes the sinks of one table; by default the operator's id.

    Raises:
        SinkMisused: no columns, an unknown mode, ``op_column`` without ``key`` or among ``columns``, or a key in
            prepared mode, in which an update would wait for the locks of transactions that are prepared and not
            committed.
    """

    @checked(conninfo=TEXT)
    def __init__(
        self,
        conninfo: str,
        table: str,
        columns: Sequence[str],
        *,
        key: Sequence[str] = (),
        op_column: str | None = None,
        mode: Literal["staged", "prepared"] = "staged",
        name: str | None = None,
    ) -> None:
        check_columns(columns)
        unknown = sorted(set(key) - set(columns))
        if unknown:
            raise SinkMisused(f"key must be some of columns, {', '.join(columns)}, not {', '.join(unknown)}")
        if key and mode == "prepared":
            raise SinkMisused(
                "a prepared transaction keeps its locks until it is committed, so an update of the same key by the "
                'next one would wait for it, and with it for its own checkpoint: use mode="staged" with a key'
            )
        if op_column is not None and (not key or op_column in columns):
            raise SinkMisused(
                "op_column says what to do with the row that has the key: pass key= too, and leave it out of columns, "
                "which are those of the table"
            )
        self.name = name
        self.atomic = mode == "staged"
        self._settings = (conninfo, table, tuple(columns), tuple(key), mode, op_column)

    @property
    def target(self) -> str:
        return self._table.target

    def writer(self, context: SinkWriterContext) -> PostgresWriter:
        table = self._table
        from spark_bridge.sinks.postgres.task import PostgresWriter

        return PostgresWriter(context, table)

    def committer(self, context: SinkCommitterContext) -> TwoPhaseCommitter:
        table = self._table
        from spark_bridge.sinks.postgres.driver import PreparedCommitter, StagedCommitter

        made = StagedCommitter if self.atomic else PreparedCommitter
        return made(context, table)

    @property
    def _table(self) -> PostgresTable:
        require("psycopg", "postgres")
        from spark_bridge.sinks.postgres.table import PostgresTable

        return PostgresTable(*self._settings)
