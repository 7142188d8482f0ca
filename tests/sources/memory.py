# SPDX-License-Identifier: Apache-2.0

"""Systems in memory with small sources that are right, one for each enumerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from actors.coordination.sources.enumerators import BoundedLogEnumerator, OwnedSplitEnumerator
from headgate import SplitReader, StaticSplitEnumerator
from headgate.sources import DiscoveringSplitEnumerator, HybridSource, Source, SplitEnumerator
from headgate.testing import SourceTarget

Log = list[int]
System = list[Log]
"""The numbers in each split."""


class Splits(SplitReader):
    """Reads a split ``[name, numbers]``."""

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any] | None]:
        _, numbers = split
        for place in range(position or 0, len(numbers)):
            yield place + 1, numbers[place]

    def backlog(self, split: Any, position: Any) -> int:
        return len(split[1]) - (position or 0)


class Logs(SplitReader):
    """Reads a split ``[log, end]``; without an end it goes on."""

    splits_open_max = 9

    def __init__(self, system: System) -> None:
        self.system = system

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any] | None]:
        log, end = split
        place = position or 0
        while end is None or place < end:
            if place < len(self.system[log]):
                place += 1
                yield place, self.system[log][place - 1]
            else:
                yield None


class MemorySource(Source):
    def __init__(self, build: Callable[[bytes | None], SplitEnumerator], operator: Callable[[], SplitReader]) -> None:
        self.build = build
        self._operator = operator

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return self.build(state)

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return self._operator


class MemoryTarget(SourceTarget):
    """Each write is another split, and those that there are in the beginning are read."""

    forms: tuple[Literal["bounded", "unbounded"], ...] = ("bounded",)

    def __init__(self, *, batch_size: int = 1, reader: Callable[[], SplitReader] = Splits) -> None:
        self.system: System = []
        self.batch_size = batch_size
        self.reader = reader

    def splits(self) -> list[Any]:
        return [[str(name), numbers] for name, numbers in enumerate(self.system)]

    def source(self, *, bounded: bool) -> Source:
        splits = self.splits()
        return MemorySource(lambda state: StaticSplitEnumerator(splits, state, batch_size=self.batch_size), self.reader)

    def write(self, split: int, numbers: Sequence[int]) -> None:
        self.system.append(list(numbers))

    def clear(self) -> None:
        self.system = []

    def numbers(self, output: Any) -> Log:
        return [output]


class DiscoveringTarget(MemoryTarget):
    """Splits are found at any time."""

    forms = ("bounded", "unbounded")

    def source(self, *, bounded: bool) -> Source:
        return MemorySource(partial(self.enumerator, None if bounded else 0.5), self.reader)

    def enumerator(self, every_s: float | None, state: bytes | None) -> SplitEnumerator:
        return DiscoveringSplitEnumerator(self.splits, state, every_s=every_s, batch_size=self.batch_size)


class LogTarget(MemoryTarget):
    """Each split is a log, which grows."""

    forms = ("bounded", "unbounded")

    def source(self, *, bounded: bool) -> Source:
        return MemorySource(self.ending if bounded else self.endless, lambda: Logs(self.system))

    def ending(self, state: bytes | None) -> SplitEnumerator:
        return BoundedLogEnumerator(
            lambda: [[log, len(numbers)] for log, numbers in enumerate(self.system)],
            state,
            key=lambda split: str(split[0]),
            end=lambda split: split[1],
            is_later=lambda one, other: one > other,
        )

    def endless(self, state: bytes | None) -> SplitEnumerator:
        return OwnedSplitEnumerator(
            lambda: [[log, None] for log in range(len(self.system))], state, place=lambda split: split[0], every_s=0.5
        )

    def write(self, split: int, numbers: Sequence[int]) -> None:
        while len(self.system) <= split:
            self.system.append([])
        self.system[split] += numbers


class HybridTarget(SourceTarget):
    """Several systems: each split is in one of them. What comes after the source has begun is in the last one."""

    def __init__(self, *parts: SourceTarget) -> None:
        self.parts = parts
        self.forms = parts[-1].forms
        self._begun = False

    def source(self, *, bounded: bool) -> Source:
        self._begun = not bounded
        *first, last = self.parts
        return HybridSource(*(part.source(bounded=True) for part in first), last.source(bounded=bounded))

    def write(self, split: int, numbers: Sequence[int]) -> None:
        part = -1 if self._begun else split % len(self.parts)
        self.parts[part].write(split // len(self.parts), numbers)

    def clear(self) -> None:
        self._begun = False
        for part in self.parts:
            part.clear()

    def numbers(self, output: Any) -> Any:
        return self.parts[-1].numbers(output)
