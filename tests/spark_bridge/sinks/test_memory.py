# SPDX-License-Identifier: Apache-2.0

"""The conformance suite with a sink in memory, thoroughly: it tests the pattern itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import Any

import pytest

from headgate.errors import SinkDataLost
from headgate.sinks import Committable, SinkCommitterContext, SinkWriterContext
from headgate.testing import Case, SinkTarget, sink_cases
from tests.spark_bridge.sinks.memory import Column, MemoryCommitter, MemorySink, MemoryTarget, MemoryWriter, Server


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "one by one"])
@pytest.mark.parametrize("case", sink_cases(histories=100), ids=str)
def test_the_pattern_keeps_its_promises(case: Case[SinkTarget], atomic: bool) -> None:  # H31, H64, H83, H140, H141
    case.run(MemoryTarget(atomic=atomic))


class Halves(MemorySink):
    """Keeps which of its halves were opened, and which were closed."""

    opened: list[Any]
    closed: list[Any]

    def writer(self, context: SinkWriterContext) -> MemoryWriter:
        return self._kept(super().writer(context))

    def committer(self, context: SinkCommitterContext) -> MemoryCommitter:
        return self._kept(super().committer(context))

    def _kept(self, half: Any) -> Any:
        self.opened.append(half)
        half.close = lambda: self.closed.append(half)
        return half


def test_the_suite_closes_every_half_that_it_opens() -> None:
    """A target with connections would otherwise run out of them, as the suite has thousands of worlds."""
    Halves.opened, Halves.closed = [], []
    (every,) = (case for case in sink_cases() if "every row" in str(case))
    every.run(MemoryTarget(make=Halves))
    assert {type(half) for half in Halves.opened} == {MemoryWriter, MemoryCommitter}
    assert set(Halves.opened) == set(Halves.closed)


# --- sinks that are wrong, and the case that says so --------------------------------------------------------------


class OneName(MemorySink):
    """What it prepares does not say for which table."""

    def key(self, sink: str) -> str:
        return sink


class WithoutRoom(Server):
    """A table that lacks a column takes the rows without it."""

    def commit(self, sink: str, table: str, parts: Sequence[Committable]) -> None:
        was_narrow, self.is_narrow = self.is_narrow, False
        super().commit(sink, table, parts)
        self.is_narrow = was_narrow
        self.tables[table] = self.tables[table][: 2 if was_narrow else None]


class WithoutLock(Server):
    """Reads and writes in two steps, between which another commit may come."""

    def __init__(self) -> None:
        super().__init__(lock=nullcontext())
        self._both = threading.Barrier(2)

    def seen(self, table: str) -> list[tuple[int, Any]]:
        found = super().seen(table)
        with suppress(threading.BrokenBarrierError):
            self._both.wait(0.5)
        return found


class Doubles(Column):
    def stored(self, value: Any) -> Any:
        return int(float(super().stored(value)))


class Instants(Column):
    """A time without a zone is taken in that of the process."""

    kept = ()

    def stored(self, value: Any) -> Any:
        if not isinstance(value, datetime) or value.year in (1, 9999):
            raise ValueError("it is not a time")
        return value.astimezone()


class Few(Column):
    def stored(self, value: Any) -> Any:
        if abs(super().stored(value)) > 2**31:
            raise ValueError(f"{value!r} is too large")
        return value


BROKEN: dict[str, tuple[Callable[[], SinkTarget], str, str]] = {
    "one name for all tables": (lambda: MemoryTarget(make=OneName), "sink of the same name", "is gone"),
    "drops what has no column": (lambda: MemoryTarget(server=WithoutRoom()), "the schema changes", "lost|half"),
    "commits without a lock": (lambda: MemoryTarget(server=WithoutLock()), "two applications", "lost|half"),
    "integers become doubles": (lambda: MemoryTarget(column=Doubles()), "values are kept", "9007199254740993 is"),
    "times get a zone": (lambda: MemoryTarget(column=Instants()), "values are kept", "datetime.* is datetime"),
    "refuses what it promises": (lambda: MemoryTarget(column=Few()), "values are kept", "is refused: .*too large"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_sink_that_is_wrong_is_caught(name: str) -> None:
    make, where, words = BROKEN[name]
    (case,) = (case for case in sink_cases(histories=1) if where in str(case))
    with pytest.raises((AssertionError, SinkDataLost), match=words):
        case.run(make())
