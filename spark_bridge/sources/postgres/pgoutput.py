# SPDX-License-Identifier: Apache-2.0

"""Reads the messages of PostgreSQL's own output plugin, ``pgoutput``, protocol version 1 (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


@dataclass(slots=True)
class Transaction:
    """A committed transaction. ``end`` is the position in the log behind its commit."""

    xid: int
    end: int = 0
    changes: list[Change] = field(default_factory=list)


def transactions(messages: Iterable[bytes]) -> Iterator[Transaction]:
    """Yield the complete transactions, in the order of their commits."""
    relations: dict[int, Relation] = {}
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
            relation = Relation.read(message)
            relations[relation.number] = relation
        elif kind in b"IUDT" and open_ is not None:
            open_.changes += _changes(kind, message, relations)


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
