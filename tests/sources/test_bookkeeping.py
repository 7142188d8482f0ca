# SPDX-License-Identifier: Apache-2.0

"""Every enumerator survives random histories of failures, checkpoints and restores (H130 to H132, H151, H153)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from actors.coordination.sources.enumerators import BoundedLogEnumerator, OwnedSplitEnumerator
from headgate import SourceCoordinator, StaticSplitEnumerator, chain
from headgate.sources import DiscoveringSplitEnumerator, HybridSource, Source, SplitAt, SplitEnumerator
from headgate.testing import Bookkeeping, KeptOutputs, check_bookkeeping
from protocol.source_events import backlog_event, split_request_event
from tests.primitives.stage_histories import Numbers

pytestmark = pytest.mark.anyio

Build = Callable[[bytes | None], SplitEnumerator]
SPLITS = [[0, 4], [4, 5], [5, 9], [9, 20], [20, 21], [21, 30]]
NUMBERS = list(range(30))


class Reader(Numbers):
    """Reads ten numbers a second, and has several splits open at a time if its source says so."""

    def __init__(self, splits_open_max: int = 1) -> None:
        super().__init__(20.0)
        self.splits_open_max = splits_open_max


class Numbered(Source):
    """A source of numbers with any enumerator."""

    def __init__(self, build: Build, splits_open_max: int = 1) -> None:
        self.build = build
        self.splits_open_max = splits_open_max

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return self.build(state)

    @property
    def operator(self) -> Any:
        return partial(Reader, self.splits_open_max)


def shifted(by: int) -> list[list[int]]:
    return [[start + by, end + by] for start, end in SPLITS]


def static(by: int = 0, batch_size: int = 1) -> Source:
    return Numbered(lambda state: StaticSplitEnumerator(shifted(by), state, batch_size=batch_size))


def discovering(by: int = 0, batch_size: int = 1) -> Source:
    return Numbered(lambda state: DiscoveringSplitEnumerator(lambda: shifted(by), state, batch_size=batch_size))


def bounded_log() -> Source:
    def build(state: bytes | None) -> SplitEnumerator:
        return BoundedLogEnumerator(
            lambda: [SplitAt(split, None) for split in SPLITS],
            state,
            key=lambda split: str(split[0]),
            end=lambda split: split[1],
            is_later=lambda one, other: one > other,
        )

    return Numbered(build)


class Ending(OwnedSplitEnumerator):
    """Ends for a subtask that has all of its splits. The product's never ends."""

    async def _serve(self) -> None:
        await super()._serve()
        for subtask in tuple(self._waiting):
            del self._waiting[subtask]
            await self._context.signal_no_more_splits(subtask)


def owned() -> Source:
    return Numbered(lambda state: Ending(lambda: SPLITS, state, place=lambda split: split[0]), splits_open_max=4)


def subject(source: Source, expected: list[int], expected_later: list[int] | None = None) -> Bookkeeping:
    coordinator = source.coordinator
    return Bookkeeping(
        chain(source=(coordinator, source.operator), kept=KeptOutputs),
        expected=expected,
        expected_later=expected_later,
        held=[("source", split_request_event()), ("source", backlog_event([("a split", 5)]))],
        view=lambda subtask: known_of(coordinator, subtask),
    )


def known_of(coordinator: SourceCoordinator, subtask: int) -> Any:
    """What a source knows of a subtask: its splits, and whether one of several sources waits for it."""
    unread: set[int] = getattr(coordinator.enumerator, "_unread", set())
    return coordinator.assigned_splits(subtask), coordinator.has_no_more_splits(subtask), subtask in unread


SOURCES: dict[str, Callable[[], Bookkeeping]] = {
    "static": lambda: subject(static(), NUMBERS),
    "static, several at a time": lambda: subject(static(batch_size=3), NUMBERS),
    "discovering": lambda: subject(discovering(batch_size=2), NUMBERS, []),
    "bounded log": lambda: subject(bounded_log(), NUMBERS, []),
    "owned": lambda: subject(owned(), NUMBERS, []),
    "hybrid": lambda: subject(
        HybridSource(static(), static(100, 3), static(200)), [*NUMBERS, *range(100, 130), *range(200, 230)]
    ),
    "hybrid with discovery": lambda: subject(
        HybridSource(discovering(), discovering(100)), [*NUMBERS, *range(100, 130)], []
    ),
    "hybrid in a hybrid": lambda: subject(
        HybridSource(HybridSource(static(), static(100)), static(200)), [*NUMBERS, *range(100, 130), *range(200, 230)]
    ),
}


@pytest.mark.parametrize("mode", ["streaming", "batch"])
@pytest.mark.parametrize("name", SOURCES)
async def test_an_enumerator_knows_after_a_reset_what_it_knew_and_loses_no_split(name: str, mode: Any) -> None:
    """H52 H130 H131 H132 H151 H153"""

    def make() -> Bookkeeping:
        made = SOURCES[name]()
        return made if mode == "streaming" else replace(made, expected_later=made.expected)

    await check_bookkeeping(make, mode=mode, histories=12)
