# SPDX-License-Identifier: Apache-2.0

"""Reads the messages of PostgreSQL's own output plugin, ``pgoutput``, protocol version 1 (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, NamedTuple

_BEGIN = Struct(">qqI")
_COMMIT = Struct(">bqqq")
_INT32 = Struct(">I")
_INT16 = Struct(">H")
_TYPE = Struct(">Ii")
UNCHANGED: Any = object()
"""A large value that an update has not changed, so that the server did not send it."""


class Column(NamedTuple):
    """A column of a table, with its type as the server numbers it."""

    name: str
    type_oid: int
    modifier: int


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as a change finds it. ``number`` is its oid; of a partition, that of the root."""

    number: int
    columns: tuple[Column, ...]

    @classmethod
    def read(cls, message: bytes) -> Relation:
        (number,) = _INT32.unpack_from(message, 1)
        _, at = _text(message, 5)  # the schema
        _, at = _text(message, at)  # the name, which may be another one by now
        (count,) = _INT16.unpack_from(message, at + 1)  # behind the replica identity
        at += 3
        columns = []
        for _ in range(count):
            name, at = _text(message, at + 1)  # behind the flags
            columns.append(Column(name, *_TYPE.unpack_from(message, at)))
            at += _TYPE.size
        return cls(number, tuple(columns))


@dataclass(slots=True)
class Change:
    """One change of a row. ``op``: i, u, d, or t for a TRUNCATE. Values are text, by the names of the columns.

    ``old`` has what identified the row before, if the server sent it: all deletes have it, and updates of the key.
    ``relation`` is the table as it was then.
    """

    op: str
    relation: Relation
    new: dict[str, Any] = field(default_factory=dict)
    old: dict[str, Any] = field(default_factory=dict)


class Transaction(NamedTuple):
    """A committed transaction. ``commit`` is where its commit begins in the server's log."""

    commit: int
    xid: int


class Decoder:
    """Reads the messages of one session of the server, which describes a table before its first change only.

    ``transaction`` is the one whose changes come now, None between two; ``end`` is the place behind the last commit.
    """

    def __init__(self) -> None:
        self.transaction: Transaction | None = None
        self.end = 0
        self._relations: dict[int, Relation] = {}

    def changes(self, message: bytes) -> list[Change]:
        """Take the next message, and return the changes in it."""
        kind = message[:1]
        if kind == b"B":
            commit, _, xid = _BEGIN.unpack_from(message, 1)
            self.transaction = Transaction(commit, xid)
        elif kind == b"C":
            self.transaction = None
            self.end = _COMMIT.unpack_from(message, 1)[2]
        elif kind == b"R":
            relation = Relation.read(message)
            self._relations[relation.number] = relation
        elif kind in (b"I", b"U", b"D", b"T"):
            return list(_changes(kind, message, self._relations))
        return []


def _changes(kind: bytes, message: bytes, relations: dict[int, Relation]) -> Iterator[Change]:
    if kind == b"T":
        (count,) = _INT32.unpack_from(message, 1)
        for number in range(count):
            relation = relations[_INT32.unpack_from(message, 6 + 4 * number)[0]]
            yield Change("t", relation)
        return
    relation = relations[_INT32.unpack_from(message, 1)[0]]
    change = Change(kind.decode().lower(), relation)
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


def _tuple(message: bytes, at: int, columns: tuple[Column, ...]) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    (count,) = _INT16.unpack_from(message, at)
    at += 2
    for column, _, _ in columns[:count]:
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
