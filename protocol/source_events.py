# SPDX-License-Identifier: Apache-2.0

"""The events between a split enumerator and its readers, as values that msgpack can encode.

Each is a list whose first element is one of the reserved names below; every other event is the user's own. A first
element that is not a str is compared with nothing: it is the user's, and comparing an array gives no bool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from protocol.describing import is_a
from protocol.values import value
from protocol.wire.state import decode_entry, encode_entry

_REQUEST = "headgate/split-request"
_SPLITS = "headgate/splits"
_NO_MORE = "headgate/no-more-splits"
_FORGET = "headgate/forget-splits"
_BACKLOG = "headgate/split-backlog"
_AT = "headgate/split-at"
_STREAM_BATCH = "headgate/stream-batch"
REPORTED_MAX = 1000
"""A report of the backlog names so many splits. What is left in the others is one more entry."""


@dataclass(frozen=True, slots=True)
class SplitAt:
    """A split, and the position from which on it is to be read. None is its beginning."""

    split: Any
    position: Any


@value
class SplitRequested:
    """Reader to enumerator: the reader has nothing to read."""


@value
class SplitsAdded:
    """Enumerator to reader: read these splits, in this order."""

    splits: tuple[Any, ...]


@value
class NoMoreSplits:
    """Enumerator to reader: no splits follow the ones that are assigned."""


@value
class ForgetSplits:
    """Coordinator to reader: the run has a new enumeration, so splits that were restored from an earlier one are void.

    Splits of the current one are not (``SubtaskContext.input_begins_again``).
    """


@value
class BacklogReported:
    """Reader to coordinator: how much is left in each split that it is reading, in units of the reader's own."""

    backlogs: tuple[tuple[Any, int], ...]


@value
class StreamBatch:
    """A micro-batch of a stream: what is planned in it after batch ``start`` up to batch ``end``."""

    stream: str
    start: int
    end: int


SourceEvent = SplitRequested | SplitsAdded | NoMoreSplits | ForgetSplits | BacklogReported


def split_request_event() -> list[Any]:
    return [_REQUEST]


def splits_event(splits: Iterable[Any]) -> list[Any]:
    return [_SPLITS, [split_to_value(split) for split in splits]]


def backlog_event(backlogs: Iterable[tuple[Any, int]]) -> list[Any]:
    return [_BACKLOG, [[split, left] for split, left in backlogs]]


def stream_batch_event(batch: StreamBatch) -> list[Any]:
    """Reader to enumerator: the task belongs to this micro-batch. An event of the enumerator's own."""
    return [_STREAM_BATCH, batch.stream, batch.start, batch.end]


def parse_stream_batch(event: Any) -> StreamBatch | None:
    """Return what ``stream_batch_event`` was given, or None for another event."""
    match event:
        case [str(name), str(stream), int(start), int(end)] if name == _STREAM_BATCH:
            return StreamBatch(stream, start, end)
        case _:
            return None


def split_to_value(split: Any) -> Any:
    """Return a split, or a ``SplitAt``, as a value that msgpack can encode."""
    return [_AT, split.split, split.position] if is_a(split, SplitAt) else split


def split_from_value(value: Any) -> Any:
    """Return what ``split_to_value`` was given."""
    match value:
        case [str(mark), split, position] if mark == _AT:
            return SplitAt(split, position)
        case _:
            return value


def encode_split(split: Any) -> bytes:
    """A split, or a ``SplitAt``, as an entry of a state. Raises ``EventEncodeError`` if an event cannot have it."""
    return encode_entry(split_to_value(split))


def decode_split(encoded: bytes) -> Any:
    """Return what ``encode_split`` was given."""
    return split_from_value(decode_entry(encoded))


def no_more_splits_event() -> list[Any]:
    return [_NO_MORE]


def forget_splits_event() -> list[Any]:
    return [_FORGET]


def parse_source_event(event: Any) -> SourceEvent | None:
    """Return the event as a typed value, or None for a user's event."""
    match event:
        case [str(name)] if name == _REQUEST:
            return SplitRequested()
        case [str(name), list(splits)] if name == _SPLITS:
            return SplitsAdded(tuple(map(split_from_value, splits)))
        case [str(name)] if name == _NO_MORE:
            return NoMoreSplits()
        case [str(name)] if name == _FORGET:
            return ForgetSplits()
        case [str(name), list(entries)] if (
            name == _BACKLOG and len(entries) <= REPORTED_MAX + 1 and all(map(_is_backlog, entries))
        ):
            return BacklogReported(tuple((split, left) for split, left in entries))
        case _:
            return None


def _is_backlog(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 2 and type(entry[1]) is int
