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
        writer = super().writer(context)
        self._keep(writer)
        return writer

    def committer(self, context: SinkCommitterContext) -> MemoryCommitter:
        committer = super().committer(context)
        self._keep(committer)
        return committer

    def _keep(self, half: Any) -> None:
        self.opened.append(half)
        half.close = lambda: self.closed.append(half)


@pytest.mark.parametrize("name", ["every row", "a commit is repeated", "two drivers commit"])
def test_the_suite_closes_every_half_that_it_opens(name: str) -> None:
    """A target with connections would otherwise run out of them, as the suite has thousands of worlds."""
    Halves.opened, Halves.closed = [], []
    (case,) = (case for case in sink_cases() if name in str(case))
    case.run(MemoryTarget(make=Halves))
    assert {type(half) for half in Halves.opened} == {MemoryWriter, MemoryCommitter}
    assert set(Halves.opened) == set(Halves.closed)


@pytest.mark.parametrize("case", sink_cases(histories=1), ids=str)
def test_each_case_begins_with_an_empty_target(case: Case[SinkTarget]) -> None:
    target = MemoryTarget()
    target.server.tables["rows"] = [(0, 0)]
    case.run(target)


class Wide(Server):
    """Takes all rows without the column, too."""

    def commit(self, sink: str, table: str, parts: Sequence[Committable]) -> None:
        was_narrow, self.is_narrow = self.is_narrow, False
        super().commit(sink, table, parts)
        self.is_narrow = was_narrow


@pytest.mark.parametrize("make", [Server, Wide], ids=["refuses rows", "goes on"])
def test_the_suite_undoes_the_changes_of_the_schema(make: type[Server]) -> None:
    server = make()
    (changed,) = (case for case in sink_cases() if "the schema changes" in str(case))
    changed.run(MemoryTarget(server=server))
    assert not server.is_narrow


# --- sinks that are wrong, and the case that says so --------------------------------------------------------------


class OneName(MemorySink):
    """What it prepares does not say for which table."""

    def key(self, sink: str) -> str:
        return sink


class WithoutRoom(Wide):
    """A table that lacks a column takes some of the rows without it."""

    def commit(self, sink: str, table: str, parts: Sequence[Committable]) -> None:
        super().commit(sink, table, parts)
        self.tables[table] = self.tables[table][: 2 if self.is_narrow else None]


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


class InSteps(Server):
    """Commits a part after the other, and shows the rows of each before the ledger has it."""

    def commit(self, sink: str, table: str, parts: Sequence[Committable]) -> None:
        numbers = self.committed.setdefault(sink, {})
        for part in parts:
            if part.number > numbers.get(part.writer, -1):
                rows = self.prepared[sink][part.name]
                self.tables[table] = [*self.seen(table), *rows]
                numbers[part.writer] = part.number
                del self.prepared[sink][part.name]


class Racing(Server):
    """Looks at the ledger, and then another commit may come before this one goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(2)

    def commit(self, sink: str, table: str, parts: Sequence[Committable]) -> None:
        numbers = self.committed.setdefault(sink, {})
        new = [part for part in parts if part.number > numbers.get(part.writer, -1)]
        rows = [row for part in new for row in self.prepared[sink][part.name]]
        with suppress(threading.BrokenBarrierError):
            self._both.wait(0.5)
        self.tables.setdefault(table, []).extend(rows)
        for part in new:
            numbers[part.writer] = part.number
            self.prepared[sink].pop(part.name, None)


class RowByRow(Server):
    """Shows each row as soon as it is there."""

    def commit(self, sink: str, table: str, parts: Sequence[Committable]) -> None:
        for part in parts:
            for row in self.prepared[sink].pop(part.name):
                self.tables[table] = [*self.seen(table), row]


class LedgerOfBatches(Server):
    """Knows each batch that it has committed, and not what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self._batches: dict[frozenset[str], list[tuple[int, Any]]] = {}

    def commit(self, sink: str, table: str, parts: Sequence[Committable]) -> None:
        batch = frozenset(part.name for part in parts)
        if batch in self._batches:
            return
        rows = [row for known in self._batches if known < batch for row in self._batches[known]]
        for part in parts:
            rows += self.prepared[sink].pop(part.name, [])
        self._batches[batch] = rows
        self.tables[table] = [*self.seen(table), *rows]


class WithoutLedger(Server):
    """Does not know what it has committed, except for people."""

    history: frozenset[str] = frozenset()

    def commit(self, sink: str, table: str, parts: Sequence[Committable]) -> None:
        self.committed.clear()
        super().commit(sink, table, parts)
        self.history |= {part.name for part in parts}


class KnowsItsOwn(MemoryCommitter):
    """Knows what it has committed itself."""

    def open(self) -> None:
        self._known: frozenset[str] = frozenset()

    def commit(self, committables: Sequence[Committable]) -> None:
        super().commit([part for part in committables if part.name not in self._known])
        self._known |= {part.name for part in committables}


class KnowsOthers(KnowsItsOwn):
    """Knows what was committed before it began."""

    def open(self) -> None:
        self._known = self._of.server.history  # type: ignore[attr-defined]

    def commit(self, committables: Sequence[Committable]) -> None:
        MemoryCommitter.commit(self, [part for part in committables if part.name not in self._known])


class LateRows(MemoryWriter):
    """Does not prepare the row that was written last."""

    def prepare(self) -> list[Committable]:
        last = self._rows.pop() if len(self._rows) > 1 else None
        prepared = super().prepare()
        self._rows = [] if last is None else [last]
        return prepared


class SharedBuffer(MemoryWriter):
    """The attempts of a subtask write into one buffer, which outlives them."""

    def __init__(self, context: SinkWriterContext, sink: MemorySink) -> None:
        super().__init__(context, sink)
        self._rows = sink.server.tables.setdefault(f"buffer {context.subtask}", [])

    def prepare(self) -> list[Committable]:
        rows: list[tuple[int, Any]] = []
        self._of.server.tables[f"buffer {self._context.subtask}"] = rows
        prepared = super().prepare()
        self._rows = rows
        return prepared


class Forgetful(MemoryWriter):
    """Takes the rows of a later day for those of before."""

    def write(self, record: Any) -> None:
        if record["number"] < 5:
            super().write(record)


class Early(MemoryWriter):
    """What is prepared is visible immediately."""

    def prepare(self) -> list[Committable]:
        prepared = super().prepare()
        self._of.server.commit(self._of.key(self._context.sink), "rows", prepared)
        return prepared


class Negligent(MemoryCommitter):
    """Aborts nothing."""

    def abort(self, names: Sequence[str]) -> None:
        pass


class Greedy(MemoryCommitter):
    """Takes what other sinks have prepared for its own."""

    def prepared(self) -> list[str]:
        return [name for names in self._of.server.prepared.values() for name in names]

    def abort(self, names: Sequence[str]) -> None:
        for prepared in self._of.server.prepared.values():
            for name in names:
                prepared.pop(name, None)


def made_of(
    writer: type[MemoryWriter] = MemoryWriter, committer: type[MemoryCommitter] = MemoryCommitter
) -> type[MemorySink]:
    class Made(MemorySink):
        def writer(self, context: SinkWriterContext) -> MemoryWriter:
            return writer(context, self)

        def committer(self, context: SinkCommitterContext) -> MemoryCommitter:
            return committer(context, self)

    return Made


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
    "loses a row": (lambda: MemoryTarget(make=made_of(LateRows), atomic=False), "every row", "rows are lost"),
    "shows rows early": (lambda: MemoryTarget(make=made_of(Early)), "every row", "no complete checkpoint covers"),
    "a buffer for all attempts": (
        lambda: MemoryTarget(make=made_of(SharedBuffer)),
        "the first subtask fails",
        "doubled",
    ),
    "the same, and a task dies": (lambda: MemoryTarget(make=made_of(SharedBuffer)), "a task dies before", "doubled"),
    "the same, at random": (lambda: MemoryTarget(make=made_of(SharedBuffer)), "random histories", "doubled"),
    "leaves orphans": (lambda: MemoryTarget(make=made_of(committer=Negligent)), "the driver dies, between", "orphans"),
    "aborts what others prepared": (
        lambda: MemoryTarget(make=made_of(committer=Greedy)),
        "what another application prepared",
        "assert",
    ),
    "rows, then the ledger": (
        lambda: MemoryTarget(make=made_of(), server=InSteps(), atomic=False),
        "driver dies before a line",
        "doubled",
    ),
    "half a checkpoint": (lambda: MemoryTarget(server=InSteps()), "every moment", "half a checkpoint is visible"),
    "no ledger": (lambda: MemoryTarget(server=WithoutLedger()), "a commit is repeated", "is gone"),
    "no row of a second day": (
        lambda: MemoryTarget(make=made_of(Forgetful)),
        "every day",
        "are lost at the end of day 1",
    ),
    "rows of a day again": (lambda: MemoryTarget(make=made_of(SharedBuffer)), "every day", "are doubled at the end"),
    "a ledger of batches": (lambda: MemoryTarget(server=LedgerOfBatches()), "a commit is repeated", "doubled"),
    "no ledger of the dead": (
        lambda: MemoryTarget(make=made_of(committer=KnowsItsOwn), server=WithoutLedger()),
        "an answer is lost",
        "is gone",
    ),
    "no ledger of the living": (
        lambda: MemoryTarget(make=made_of(committer=KnowsOthers), server=WithoutLedger()),
        "an answer is lost",
        "is gone",
    ),
    "half a part": (
        lambda: MemoryTarget(make=made_of(), server=RowByRow(), atomic=False),
        "every moment",
        "half a part is visible",
    ),
    "a race without a lock": (
        lambda: MemoryTarget(server=Racing()),
        "two drivers commit the same",
        "doubled",
    ),
    "refuses what it promises": (lambda: MemoryTarget(column=Few()), "values are kept", "is refused: .*too large"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_sink_that_is_wrong_is_caught(name: str) -> None:
    make, where, words = BROKEN[name]
    (case,) = (case for case in sink_cases(histories=20) if where in str(case))
    with pytest.raises((AssertionError, SinkDataLost), match=words):
        case.run(make())
