# SPDX-License-Identifier: Apache-2.0

"""A source whose splits are found as they are read: a tree of numbers, of which only the root is known at first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from actors.coordination import SourceCoordinator, SplitEnumerator, SplitEnumeratorContext
from spark_bridge.subtask import SplitReader

NODES = 31


def children_of(node: int) -> list[int]:
    return [child for child in (2 * node + 1, 2 * node + 2) if child < NODES]


class TreeEnumerator(SplitEnumerator):
    """No splits remain once every known node has been read; until then a reader with nothing to read waits."""

    def __init__(self) -> None:
        self.context: SplitEnumeratorContext
        self.known = {0}
        self.pending = deque([0])
        self.read: set[int] = set()
        self.waiting: set[int] = set()

    async def start(self, context: SplitEnumeratorContext) -> None:
        self.context = context

    async def handle_split_request(self, subtask: int) -> None:
        self.waiting.add(subtask)
        await self._serve()

    async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
        node, children = event
        self.read.add(node)
        self.pending.extend(child for child in children if child not in self.known)
        self.known.update(children)
        await self._serve()

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        self.pending.extendleft(reversed(splits))
        self.read.difference_update(splits)
        self.waiting.discard(subtask)
        await self._serve()

    async def _serve(self) -> None:
        while self.waiting and self.pending:
            await self.context.assign_splits(self.waiting.pop(), [self.pending.popleft()])
        if self.read == self.known:
            for subtask in sorted(self.waiting):
                await self.context.signal_no_more_splits(subtask)
            self.waiting.clear()


class TreeSource(SourceCoordinator):
    """``built`` holds every enumerator made so far."""

    def __init__(self) -> None:
        self.built: list[TreeEnumerator] = []
        super().__init__(self._another)

    def _another(self, state: bytes | None) -> TreeEnumerator:
        self.built.append(TreeEnumerator())
        return self.built[-1]


class TreeReader(SplitReader):
    """Reports the nodes below each node, then yields the node."""

    def read_split(self, split: int) -> Iterator[int]:
        self.context.send_event([split, children_of(split)])
        yield split
