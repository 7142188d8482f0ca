# SPDX-License-Identifier: Apache-2.0

"""What the two halves of a work queue send to each other, as values that msgpack can encode.

An item is a triple of its id, its priority and its value. The id of an item with a key is a hash of the key; that of
another one is a hash of its parent's id, its value, and its number among the parent's children of this value. So a
parent that is processed again, after its task was lost, adds the same ids for what it has added before, in whatever
order, and nothing counts twice; only what it finds for the first time is new.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from protocol.describing import show
from protocol.errors import SAME_RELEASE, RemoteProtocolError
from protocol.values import value
from protocol.wire.codec import encode_argument

_REPORT = "headgate/work-report"
_RETURN = "headgate/work-return"
_KEEP = "headgate/work-keep"
ROOT = 0
"""The parent of the roots."""

Item = tuple[int, int, Any]


def id_of_child(parent: int, encoded: bytes, number: int) -> int:
    """The id of a parent's child without a key, of which ``number`` with the same value came before. 63 bits."""
    return _hashed(b"child", parent.to_bytes(8, "big") + number.to_bytes(8, "big") + encoded)


def id_of_key(key: Any) -> int:
    """The id of every item with this key. 63 bits."""
    return _hashed(b"key", encode_argument("the key of an item", key))


def _hashed(kind: bytes, data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8, person=kind).digest(), "big") >> 1


@value
class Report:
    """From a task: these items are finished, these were found meanwhile, these are given back, and so many are wanted.

    ``wanted`` replaces what the task wanted before; below 0, it holds more than it should. ``last``: its function has
    returned; in streaming mode, it keeps in its state what it gives back here. ``begun``: how many it works on.
    """

    finished: tuple[int, ...]
    found: tuple[Item, ...]
    given_back: tuple[int, ...]
    wanted: int
    last: bool = False
    begun: int = 0

    def as_event(self) -> list[Any]:
        found = [list(item) for item in self.found]
        return [_REPORT, list(self.finished), found, list(self.given_back), self.wanted, self.last, self.begun]


@value
class ReturnItems:
    """To a task: give back up to ``count`` items that it has not begun."""

    count: int

    def as_event(self) -> list[Any]:
        return [_RETURN, self.count]


@value
class KeepItems:
    """To a task: keep these items, which you have given back. A concurrent attempt has got them too."""

    ids: tuple[int, ...]

    def as_event(self) -> list[Any]:
        return [_KEEP, list(self.ids)]


def parse_report(event: Any) -> Report:
    """Raises ``RemoteProtocolError`` for anything else. What is found is for ``parse_item``: there may be many."""
    match event:
        case [str(name), [*finished], [*found], [*given_back], int(wanted), bool(last), int(begun)] if (
            name == _REPORT and _are_ints(finished) and _are_ints(given_back)
        ):
            return Report(tuple(finished), tuple(found), tuple(given_back), wanted, last, begun)
        case _:
            raise RemoteProtocolError(f"not a report of a work queue: {show(event, 80)}; {SAME_RELEASE}")


def parse_item(item: Any) -> Item:
    """Raises ``RemoteProtocolError`` for anything else."""
    match item:
        case [id_, priority, value_] if (
            type(id_) is int and id_ >= 0 and type(priority) is int and -(2**63) <= priority < 2**63
        ):
            return id_, priority, value_
        case _:
            raise RemoteProtocolError(f"not a report of a work queue: an item is {show(item, 80)}; {SAME_RELEASE}")


def parse_return(event: Any) -> ReturnItems | KeepItems | None:
    """Return the request to give back or to keep; None for another event."""
    match event:
        case [str(name), int(count)] if name == _RETURN:
            return ReturnItems(count)
        case [str(name), [*ids]] if name == _KEEP:
            return KeepItems(tuple(ids))
        case _:
            return None


def _are_ints(values: list[Any]) -> bool:
    return {int}.issuperset(map(type, values))
