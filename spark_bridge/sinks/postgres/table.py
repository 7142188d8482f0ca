# SPDX-License-Identifier: Apache-2.0

"""What both halves of the PostgreSQL sink know: the table, its staging table and the ledger of commits."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

import psycopg
from psycopg import sql

from spark_bridge.common.conninfo import connect, parameters
from spark_bridge.sinks.postgres.values import Column, columns_of
from spark_bridge.sinks.two_phase.errors import SinkMisused

Mode = Literal["staged", "prepared"]
OP = "headgate_op"
"""The column of the staging table that says what a row is."""

_GID_BYTES_MAX = 199
_NAME_BYTES = 90  # of a part
_IDENTIFIER_BYTES_MAX = 63
_PLACE_BYTES = 16


@dataclass(frozen=True)
class PostgresTable:
    """The settings of a ``PostgresSink``."""

    conninfo: str = field(repr=False)
    table: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    mode: Mode
    op_column: str | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """The columns of the records: those of the table, and what a row is."""
        return self.columns if self.op_column is None else (*self.columns, self.op_column)

    @property
    def target(self) -> str:
        """Database and table, without the host, which may change when a standby takes over."""
        return f"postgresql:{parameters(self.conninfo, SinkMisused).get('dbname') or ''}/{self.table}/{self.mode}"

    @property
    def name(self) -> sql.Identifier:
        return sql.Identifier(*self.table.split("."))

    @property
    def staging(self) -> sql.Identifier:
        """The staging table, in the same schema."""
        *schema, table = self.table.split(".")
        name = f"headgate_staged_{table}"
        if len(name.encode()) > _IDENTIFIER_BYTES_MAX:
            name = f"headgate_staged_{sha256(table.encode()).hexdigest()[:32]}"
        return sql.Identifier(*schema, name)

    @property
    def commits(self) -> sql.Identifier:
        """The ledger of commits, in the same schema: sink, writer and number of each part that is committed last."""
        *schema, _ = self.table.split(".")
        return sql.Identifier(*schema, "headgate_commits")

    @property
    def column_list(self) -> sql.Composed:
        return sql.SQL(", ").join(map(sql.Identifier, self.columns))

    def connect(self, *, autocommit: bool = False) -> psycopg.Connection:
        """Open a connection. Raises ``psycopg.OperationalError``."""
        return connect(self.conninfo, autocommit=autocommit)

    def place(self, connection: psycopg.Connection) -> str:
        """What distinguishes the table from all others of the server, with 16 digits; empty if there is none."""
        found = connection.execute(
            "SELECT current_database(), nspname, relname FROM pg_class JOIN pg_namespace ON relnamespace = "
            "pg_namespace.oid WHERE pg_class.oid = to_regclass(%s)",
            (self.name.as_string(connection),),
        ).fetchone()
        return "" if found is None else sha256("\0".join(found).encode()).hexdigest()[:_PLACE_BYTES]

    def checked_columns(self, connection: psycopg.Connection) -> dict[str, Column]:
        """The table's columns. Raises ``SinkMisused`` if those of the staging table have other types."""
        columns = columns_of(connection, self.name)
        if self.mode == "staged":
            staged = columns_of(connection, self.staging)
            for name in self.columns:
                if name in columns and name in staged and columns[name].identity != staged[name].identity:
                    raise SinkMisused(self._differs(columns[name], staged[name]))
        return columns

    def _differs(self, column: Column, staged: Column) -> str:
        staging = self.staging.as_string(None)
        alter = (
            f"ALTER TABLE {staging} ALTER COLUMN {sql.Identifier(column.name).as_string(None)} TYPE {column.declared}"
        )
        return (
            f"column {column.name!r} of table {self.table} is {column.declared} now, but still {staged.declared} in "
            f"its staging table {staging}, whose rows are not committed. Change the table back until they are; or "
            f"give the staging table the new type, if their values stay what they are: {alter}. Then start from the "
            "same checkpoint. A staging table without rows follows when an application starts or tries again"
        )


def gid_of(sink: str, place: str, part: str) -> str:
    """The identifier of a part's prepared transaction. They are one namespace in the whole server."""
    return f"{gid_prefix(sink, place)}{part}"


def gid_prefix(sink: str, place: str) -> str:
    """What the identifiers of a sink begin with, for the table at ``place``.

    Raises ``SinkMisused`` if the sink's name is too long for them.
    """
    prefix = old_gid_prefix(sink)
    if len(prefix.encode()) + _NAME_BYTES > _GID_BYTES_MAX:
        raise SinkMisused(
            f"the sink's name {sink!r} is too long for prepared transactions: give the sink a name of at most "
            f"{_GID_BYTES_MAX - _NAME_BYTES - len('headgate//')} bytes"
        )
    if len(prefix.encode()) + _PLACE_BYTES + 1 + _NAME_BYTES > _GID_BYTES_MAX:
        prefix = old_gid_prefix(sha256(sink.encode()).hexdigest()[:32])
    return f"{prefix}{place}/"


def old_gid_prefix(sink: str) -> str:
    """What they began with in releases that did not put the table into them."""
    return f"headgate/{sink}/"
