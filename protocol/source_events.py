# SPDX-License-Identifier: Apache-2.0

"""The events between a split enumerator and its readers, as values that msgpack can encode.

Each is a list whose first element is one of the reserved names below; every other event is the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_REQUEST = "headgate/split-request"
_SPLITS = "headgate/splits"
_NO_MORE = "headgate/no-more-splits"


@dataclass(frozen=True, slots=True)
class SplitRequested:
    """Reader to enumerator: the reader has nothing to read."""


@dataclass(frozen=True, slots=True)
class SplitsAdded:
    """Enumerator to reader: read these splits, in this order."""

    splits: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class NoMoreSplits:
    """Enumerator to reader: no splits follow the ones that are assigned."""


SourceEvent = SplitRequested | SplitsAdded | NoMoreSplits


def split_request_event() -> list[Any]:
    return [_REQUEST]


def splits_event(splits: Iterable[Any]) -> list[Any]:
    return [_SPLITS, list(splits)]


def no_more_splits_event() -> list[Any]:
    return [_NO_MORE]


def parse_source_event(event: Any) -> SourceEvent | None:
    """Return the event as a typed value, or None for a user's event."""
    match event:
        case [name] if name == _REQUEST:
            return SplitRequested()
        case [name, list(splits)] if name == _SPLITS:
            return SplitsAdded(tuple(splits))
        case [name] if name == _NO_MORE:
            return NoMoreSplits()
        case _:
            return None
