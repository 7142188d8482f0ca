# SPDX-License-Identifier: Apache-2.0

"""The splits of an enumerator that wait to be handed out, each encoded.

Encoded, a million splits are a few objects that the garbage collector never looks at, and a checkpoint copies them as
they are. As lists, they would make it stop the event loop for a third of a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from protocol.source_events import SplitAt, decode_split, encode_split, split_from_value, split_to_value
from protocol.wire.codec import encode_argument
from protocol.wire.state import Steps, drain, in_chunks

__all__ = ["PendingSplits"]


class PendingSplits:
    """A queue of splits. For the event loop. ``backlog(split, position)`` says how much there is to read in one."""

    def __init__(self, backlog: Callable[[Any, Any], int] | None = None) -> None:
        self._encoded: deque[bytes] = deque()
        self._amounts: deque[int] = deque()
        self._backlog = backlog
        self.amount = 0
        """How much there is to read in all of them; what a split has counted is kept, in case it grows meanwhile."""

    def __len__(self) -> int:
        return len(self._encoded)

    def _count(self, split: Any) -> int:
        if self._backlog is None:
            return 0
        at = split if isinstance(split, SplitAt) else SplitAt(split, None)
        amount = self._backlog(at.split, at.position)
        self.amount += amount
        return amount

    def _counts(self, encoded: list[bytes]) -> list[int]:
        return [0] * len(encoded) if self._backlog is None else [self._count(decode_split(one)) for one in encoded]

    def add(self, split: Any) -> bytes:
        """Let this be the last split; returns it encoded. Raises ``EventEncodeError`` if no event can have it."""
        encoded = encode_argument("a split", split_to_value(split))  # the state does not have the limits of an event
        self._amounts.append(self._count(split))
        self._encoded.append(encoded)
        return encoded

    def put_back_in_steps(self, splits: list[Any]) -> Steps[None]:
        """Let these be the next splits, in their order."""
        for chunk in in_chunks(reversed(splits)):
            for split in chunk:
                self._amounts.appendleft(self._count(split))
                self._encoded.appendleft(encode_split(split))
            yield

    def put_encoded_back_in_steps(self, encoded: list[bytes]) -> Steps[None]:
        """The same for splits that ``encode_split`` returned."""
        for chunk in in_chunks(reversed(encoded)):
            self._amounts.extendleft(self._counts(chunk))
            self._encoded.extendleft(chunk)
            yield

    def take(self, count: int) -> list[Any]:
        """Take out the next splits, at most ``count``."""
        taken = []
        for _ in range(min(count, len(self._encoded))):
            self.amount -= self._amounts.popleft()
            taken.append(decode_split(self._encoded.popleft()))
        return taken

    def encoded(self) -> Iterator[bytes]:
        """All of them, for a state. The enumerator takes no other call until that is encoded.

        A copy of a million would take a turn of 20 ms by itself.
        """
        return iter(self._encoded)

    def restore_in_steps(self, encoded: list[bytes]) -> Steps[None]:
        """Add what ``encoded`` had, which is empty afterwards."""
        for chunk in drain(encoded):
            self._encoded += chunk
            self._amounts += self._counts(chunk)
            yield

    def restore_values_in_steps(self, values: Iterable[Any]) -> Steps[None]:
        """Add the splits of a state before version 1."""
        for chunk in in_chunks(values):
            for value in chunk:
                self.add(split_from_value(value))
            yield
