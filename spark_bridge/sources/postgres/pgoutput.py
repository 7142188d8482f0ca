# SPDX-License-Identifier: Apache-2.0

"""Reads the messages of PostgreSQL's own output plugin, ``pgoutput``, protocol version 1 (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

_BEGIN = Struct(">qqI")
_COMMIT = Struct(">bqqq")
_INT32 = Struct(">I")
_INT16 = Struct(">H")
UNCHANGED: Any = object()
"""A large value that an update has not changed, so that the server did not send it."""


@dataclass(slots=True)
class Change:
    """One change of a row. ``op``: i, u, d, or t for a TRUNCATE. Values are text, by the names of the columns.

    ``old`` has what identified the row before, if the server sent it: all deletes have it, and updates of the key.
    """

    op: str
    schema: str
    table: str
    new: dict[str, Any] = field(default_factory=dict)
    old: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Transaction:
    """A committed transaction. ``end`` is the position in the log behind its commit."""

    xid: int
    end: int = 0
    changes: list[Change] = field(default_factory=list)


def transactions(messages: Iterable[bytes]) -> Iterator[Transaction]:
    """Yield the complete transactions, in the order of their commits."""
    relations: dict[int, _Relation] = {}
    open_: Transaction | None = None
    for message in messages:
        kind, at = message[:1], 1
        if kind == b"B":
            open_ = Transaction(_BEGIN.unpack_from(message, at)[2])
        elif kind == b"C":
            assert open_ is not None, "a commit follows its begin"
            open_.end = _COMMIT.unpack_from(message, at)[2]
            yield open_
            open_ = None
        elif kind == b"R":
            relation = _Relation.read(message)
            relations[relation.number] = relation
        elif kind in b"IUDT" and open_ is not None:
            open_.changes += _changes(kind, message, relations)


@dataclass(frozen=True, slots=True)
class _Relation:
    number: int
    schema: str
    table: str
    columns: tuple[str, ...]

    @classmethod
    def read(cls, message: bytes) -> _Relation:
        (number,) = _INT32.unpack_from(message, 1)
        schema, at = _text(message, 5)
        table, at = _text(message, at)
        (count,) = _INT16.unpack_from(message, at + 1)  # behind the replica identity
        at += 3
        columns = []
        for _ in range(count):
            name, at = _text(message, at + 1)  # behind the flags
            columns.append(name)
            at += 8
        return cls(number, schema, table, tuple(columns))


def _changes(kind: bytes, message: bytes, relations: dict[int, _Relation]) -> Iterator[Change]:
    if kind == b"T":
        (count,) = _INT32.unpack_from(message, 1)
        for number in range(count):
            relation = relations[_INT32.unpack_from(message, 6 + 4 * number)[0]]
            yield Change("t", relation.schema, relation.table)
        return
    relation = relations[_INT32.unpack_from(message, 1)[0]]
    change = Change(kind.decode().lower(), relation.schema, relation.table)
    at = 5
    while at < len(message):
        part = message[at : at + 1]
        values, at = _tuple(message, at + 1, relation.columns)
        if part == b"N":
            change.new = values
        else:
            change.old = values
    for column, value in change.new.items():
        if value is UNCHANGED and change.old.get(column) is not None:
            change.new[column] = change.old[column]  # with REPLICA IDENTITY FULL
    yield change


def _tuple(message: bytes, at: int, columns: tuple[str, ...]) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    (count,) = _INT16.unpack_from(message, at)
    at += 2
    for column in columns[:count]:
        kind = message[at : at + 1]
        at += 1
        if kind == b"t":
            (length,) = _INT32.unpack_from(message, at)
            at += 4
            values[column] = message[at : at + length].decode()
            at += length
        else:
            values[column] = UNCHANGED if kind == b"u" else None
    return values, at


def _text(message: bytes, at: int) -> tuple[str, int]:
    end = message.index(b"\0", at)
    return message[at:end].decode(), end + 1
