# SPDX-License-Identifier: Apache-2.0

"""What both halves of the PostgreSQL sink know: the table, its staging table and the ledger of commits."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

import psycopg
from psycopg import sql

from spark_bridge.common.conninfo import connect, parameters
from spark_bridge.sinks.two_phase.errors import SinkMisused

Mode = Literal["staged", "prepared"]

_GID_BYTES_MAX = 199
_NAME_BYTES = 90  # of a part
_IDENTIFIER_BYTES_MAX = 63


@dataclass(frozen=True)
class PostgresTable:
    """The settings of a ``PostgresSink``."""

    conninfo: str = field(repr=False)
    table: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    mode: Mode

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
        return connect(self.conninfo, autocommit=autocommit, application_name="headgate")


def gid_of(sink: str, part: str) -> str:
    """The identifier of a part's prepared transaction. They are one namespace in the whole server."""
    return f"{gid_prefix(sink)}{part}"


def gid_prefix(sink: str) -> str:
    """What the identifiers of a sink begin with. Raises ``SinkMisused`` if its name is too long for them."""
    prefix = f"headgate/{sink}/"
    if len(prefix.encode()) + _NAME_BYTES > _GID_BYTES_MAX:
        raise SinkMisused(
            f"the sink's name {sink!r} is too long for prepared transactions: give the sink a name of at most "
            f"{_GID_BYTES_MAX - _NAME_BYTES - len('headgate//')} bytes"
        )
    return prefix
