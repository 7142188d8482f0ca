# SPDX-License-Identifier: Apache-2.0

"""What a source needs of the table, its publication and its columns, and how they are asked.

A name is not a table: another one may be renamed to it. So a table is known by its number (oid), and its place in the
publication by the number that it got when it was added. What no longer matches would not be an error of the server.
The changes would just not come, or come with NULL. So both halves look, again and again, and refuse what they see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow
from psycopg import sql

from spark_bridge.sources.postgres.pgoutput import Column

_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}
_PERSISTENCE = {"u": "an unlogged table", "t": "a temporary table"}
_UNLOGGED = (
    "{table} is {what}, whose changes the server does not log: make it an ordinary table, name the tables that it is "
    "made of, or read it without changes="
)


@dataclass(frozen=True)
class TableFacts:
    """What the server says of a table. ``types`` has the server's names of the types of all columns."""

    oid: int
    kind: str
    persistence: str
    has_children: bool
    columns: tuple[Column, ...]
    types: dict[str, str]
    generated: frozenset[str]
    nullable: frozenset[str]


def look(connection: psycopg.Connection, table: tuple[str, str]) -> TableFacts | None:
    """Return what the table with this name is now; None if there is none."""
    found = connection.execute(
        "SELECT c.oid::bigint, c.relkind::text, c.relpersistence::text, c.relkind <> 'p' AND EXISTS (SELECT FROM "
        "pg_inherits WHERE inhparent = c.oid) FROM pg_class c WHERE c.oid = to_regclass(%s)",
        (sql.Identifier(*table).as_string(connection),),
    ).fetchone()
    if found is None:
        return None
    columns = connection.execute(
        "SELECT attname::text, atttypid::bigint, atttypmod, format_type(atttypid, NULL), attgenerated <> '', "
        "NOT attnotnull FROM pg_attribute WHERE attrelid = %s::oid AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        (found[0],),
    ).fetchall()
    oid, kind, persistence, has_children = found
    return TableFacts(
        oid,
        kind,
        persistence,
        has_children,
        columns=tuple(Column(*row[:3]) for row in columns),
        types={row[0]: row[3] for row in columns},
        generated=frozenset(row[0] for row in columns if row[4]),
        nullable=frozenset(row[0] for row in columns if row[5]),
    )


def identity_columns(connection: psycopg.Connection, facts: TableFacts, key: str) -> tuple[str, ...]:
    """The columns that tell the rows of the table apart in its changes."""
    own = next((row for row in _identities(connection, facts.oid) if row[0] == facts.oid), None)
    return tuple(own[5] or own[6] or (key,)) if own else (key,)


def why_no_changes(
    connection: psycopg.Connection, facts: TableFacts, table: tuple[str, str], key: str, columns: Sequence[str]
) -> str | None:
    """Return why the changes of the table would not come, or would break the work of others, and what to do."""
    name = ".".join(table)
    what = _KINDS.get(facts.kind) or _PERSISTENCE.get(facts.persistence)
    if what is not None:
        return _UNLOGGED.format(table=name, what=what)
    if facts.has_children:
        return (
            f"{name} has tables that inherit from it, whose changes the server does not publish under its name: make "
            "it a partitioned table, or read each of these tables with a separate source"
        )
    if generated := [column for column in columns if column in facts.generated]:
        return (
            f"the columns {generated} of {name} are generated, and the server does not send their values with changes: "
            "pass columns= without them, and compute them from the others"
        )
    if key in facts.nullable:
        return (
            f"the key {key!r} of {name} may be NULL, so that a change does not say which row it is of: run "
            f"ALTER TABLE {name} ALTER {key} SET NOT NULL, or choose another key"
        )
    rows = _identities(connection, facts.oid)
    return next((why for row in rows if (why := _why_no_identity(row, facts, name, key)) is not None), None)


def _identities(connection: psycopg.Connection, oid: int) -> list[tuple[Any, ...]]:
    """For the table and each of its partitions: how the server logs which row was changed.

    That is the number, name, kind, persistence and replica identity; the columns of the index that is the replica
    identity; and those of the primary key.
    """
    index = (
        "(SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_index i JOIN pg_attribute a ON a.attrelid = "
        "i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) WHERE i.indrelid = r.oid AND "
        "i.indisvalid AND i.indimmediate AND {})"
    )
    identity = index.format("(CASE WHEN r.relreplident = 'i' THEN i.indisreplident ELSE i.indisprimary END)")
    return connection.execute(
        "SELECT r.oid::bigint, r.oid::regclass::text, r.relkind::text, r.relpersistence::text, r.relreplident::text, "
        f"CASE WHEN r.relreplident IN ('d', 'i') OR r.relkind = 'p' THEN {identity} END, "
        f"{index.format('i.indisprimary')} FROM pg_class r WHERE r.oid = %(oid)s::oid OR r.oid IN "
        "(SELECT relid FROM pg_partition_tree(%(oid)s::oid)) ORDER BY r.oid <> %(oid)s::oid, r.oid",
        {"oid": oid},
    ).fetchall()


def _why_no_identity(row: tuple[Any, ...], facts: TableFacts, name: str, key: str) -> str | None:
    oid, part, kind, persistence, replica_identity, logged, primary = row
    part = name if oid == facts.oid else part
    what = _KINDS.get(kind) or _PERSISTENCE.get(persistence)
    if what is not None:
        return _UNLOGGED.format(table=f"the partition {part} of {name}", what=what)
    if kind == "p":
        logged, replica_identity = primary, "d"  # what new partitions have; a partitioned table logs nothing itself
    if replica_identity == "f" or (logged and key in logged):
        return None
    return _without_identity(part, kind, key, replica_identity, logged, primary)


def _without_identity(
    part: str, kind: str, key: str, replica_identity: str, logged: list[str] | None, primary: list[str] | None
) -> str:
    """What is missing in the replica identity of a table or partition, and how to give it."""
    alter = f"ALTER TABLE {part}"
    way_out = f"{alter} ADD PRIMARY KEY ({key})" if primary is None else f"{alter} REPLICA IDENTITY DEFAULT"
    if kind != "p":
        way_out += f"; or {alter} REPLICA IDENTITY FULL, which logs whole rows"
    if logged:
        if primary is None or key not in primary or replica_identity == "d":
            way_out = f"{alter} REPLICA IDENTITY FULL"
        return (
            f"the replica identity of {part} is {', '.join(logged)}, without the key {key!r}: an update of the key and "
            f"a delete would not say which row they are of. Run {way_out}; or pass key={logged[0]!r}"
        )
    if primary is None and replica_identity != "d":
        way_out = way_out.replace(";", f" and {alter} REPLICA IDENTITY DEFAULT;", 1)
    return (
        f"{part} has no replica identity: publishing it would make every UPDATE and DELETE of it fail, also those of "
        f"other programs. Run {way_out}"
    )


def place_in_publication(connection: psycopg.Connection, publication: str, oid: int) -> tuple[int, str | None] | None:
    """Return the number of the table's place in the publication, and what the publication leaves out of its changes.

    None if there is no publication, or one without this table. The number is 0 if it is for all tables.
    """
    found = connection.execute(
        "SELECT coalesce(r.oid, 0)::bigint, p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate, "
        "to_jsonb(r)->>'prattrs' IS NOT NULL, to_jsonb(r)->>'prqual' IS NOT NULL, EXISTS (SELECT FROM "
        "pg_get_publication_tables(p.pubname::text) one WHERE one.relid = %(oid)s::oid), p.pubviaroot OR "
        "(SELECT relkind FROM pg_class WHERE oid = %(oid)s::oid) <> 'p' "
        "FROM pg_publication p LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = %(oid)s::oid "
        "WHERE p.pubname = %(name)s",
        {"oid": oid, "name": publication},
    ).fetchone()
    if found is None or not (found[4] or not found[5]):
        return None
    place, all_kinds, has_list, has_filter, _, via_root = found
    left_out = [
        text
        for text, applies in (
            ("has a list of columns", has_list),
            ("has a row filter", has_filter),
            ("does not publish all of insert, update, delete and truncate", not all_kinds),
            ("does not publish through the root of partitions", not via_root),
        )
        if applies
    ]
    return place, " and ".join(left_out) or None


def why_columns_differ(
    found: Sequence[Column], schema: pyarrow.Schema, columns: Sequence[str], *, are_all: bool
) -> str | None:
    """Return how these columns of a table differ from those that are read, with ``schema``.

    ``are_all``: those that are read are meant to be all.
    """
    by_name = {column.name: column for column in found}
    for name in columns:
        column = by_name.pop(name, None)
        if column is None:
            return f"column {name!r} is not there: it was renamed, dropped, added later, or is a generated one"
        if (type_ := arrow_type(column)) != schema.field(name).type:
            return f"column {name!r} has another type: it is {type_} in Arrow, and {schema.field(name).type} was read"
    if are_all and by_name:
        return f"column {next(iter(by_name))!r} is not among those that are read: it was added, renamed or dropped"
    return None


def arrow_type(column: Column) -> pyarrow.DataType:
    """The Arrow type of a column; a text for all types that have none. The numbers of these types never change."""
    simple = {
        16: pyarrow.bool_(),
        17: pyarrow.binary(),
        20: pyarrow.int64(),
        21: pyarrow.int16(),
        23: pyarrow.int32(),
        700: pyarrow.float32(),
        701: pyarrow.float64(),
        1082: pyarrow.date32(),
        1114: pyarrow.timestamp("us"),
        1184: pyarrow.timestamp("us", "UTC"),
    }
    if column.type_oid == _NUMERIC and column.modifier >= 4:
        precision, scale = (column.modifier - 4) >> 16, (column.modifier - 4) & 0x7FF
        if precision <= 38 and scale <= precision:
            return pyarrow.decimal128(precision, scale)
    return simple.get(column.type_oid, pyarrow.string())


_NUMERIC = 1700
