# SPDX-License-Identifier: Apache-2.0

"""The smallest sink that is right: a server in memory with prepared batches and a ledger of commits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headgate.errors import SinkDataLost
from headgate.sinks import (
    Committable,
    SinkCommitterContext,
    SinkWriterContext,
    TwoPhaseCommitter,
    TwoPhaseSink,
    TwoPhaseWriter,
)
from headgate.testing import SinkTarget


@dataclass
class Server:
    """What survives every process."""

    tables: dict[str, list[tuple[int, Any]]] = field(default_factory=dict)
    prepared: dict[str, dict[str, list[tuple[int, Any]]]] = field(default_factory=dict)  # by sink and name
    committed: dict[str, dict[str, int]] = field(default_factory=dict)  # by sink and writer, the highest number
    is_narrow: bool = False  # it has no column for the rows
    lock: Any = field(default_factory=threading.RLock)  # a death may leave it taken by its thread

    @property
    def rows(self) -> list[tuple[int, Any]]:
        return self.tables.get("rows", [])

    def seen(self, table: str) -> list[tuple[int, Any]]:
        return list(self.tables.get(table, ()))

    def commit(self, sink: str, table: str, parts: Sequence[Committable]) -> None:
        """One transaction."""
        if self.is_narrow:
            raise ValueError(f"{table} has no column 'number' any more: add it again")
        with self.lock:
            numbers = dict(self.committed.get(sink, {}))
            prepared = dict(self.prepared.get(sink, {}))
            rows = self.seen(table)
            for part in parts:
                if part.number <= numbers.get(part.writer, -1):
                    continue
                if part.name not in prepared:
                    raise SinkDataLost(f"{part.name} is gone")
                rows += prepared.pop(part.name)
                numbers[part.writer] = part.number
            self.tables[table], self.prepared[sink], self.committed[sink] = rows, prepared, numbers


class MemoryWriter(TwoPhaseWriter[Any]):
    def __init__(self, context: SinkWriterContext, sink: MemorySink) -> None:
        self._context = context
        self._of = sink
        self._rows: list[tuple[int, Any]] = []

    def write(self, record: Any) -> None:
        self._rows.append((record["subtask"], self._of.column.stored(record["number"])))

    def prepare(self) -> list[Committable]:
        if not self._rows:
            return []
        name = self._context.next_name()
        self._of.server.prepared.setdefault(self._of.key(self._context.sink), {})[name] = self._rows
        self._rows = []
        return [Committable(name)]


class MemoryCommitter(TwoPhaseCommitter):
    def __init__(self, context: SinkCommitterContext, sink: MemorySink) -> None:
        self._key = sink.key(context.sink)
        self._of = sink

    def commit(self, committables: Sequence[Committable]) -> None:
        self._of.server.commit(self._key, self._of.table, committables)

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._of.server.prepared.get(self._key, {}).pop(name, None)

    def prepared(self) -> list[str]:
        return list(self._of.server.prepared.get(self._key, {}))


class Column:
    """A type with a few of its values. Others are refused."""

    kept: tuple[Any, ...] = (2**62, -1)

    def stored(self, value: Any) -> Any:
        if type(value) is not int or not -(2**63) <= value < 2**63:
            raise ValueError(f"{value!r} is not an integer of 64 bits")
        return value


class MemorySink(TwoPhaseSink[Any]):
    def __init__(
        self, server: Server, name: str, *, atomic: bool = True, table: str = "rows", column: Column | None = None
    ) -> None:
        self.server = server
        self.table = table
        self.column = column or Column()
        self.name = name
        self.atomic = atomic

    def key(self, sink: str) -> str:
        return sink if self.table == "rows" else f"{sink} of {self.table}"

    @property
    def target(self) -> str:
        return "memory" if self.table == "rows" else f"memory:{self.table}"

    def writer(self, context: SinkWriterContext) -> MemoryWriter:
        return MemoryWriter(context, self)

    def committer(self, context: SinkCommitterContext) -> MemoryCommitter:
        return MemoryCommitter(context, self)


class MemoryTarget(SinkTarget):
    def __init__(
        self,
        *,
        atomic: bool = True,
        make: type[MemorySink] = MemorySink,
        server: Server | None = None,
        table: str = "rows",
        column: Column | None = None,
    ) -> None:
        self.server = server or Server()
        self.column = column or Column()
        self._make = make
        self._table = table
        self._atomic = atomic

    def sink(self, name: str) -> MemorySink:
        return self._make(self.server, name, atomic=self._atomic, table=self._table, column=self.column)

    def read(self) -> list[tuple[int, Any]]:
        return list(self.server.tables.get(self._table, ()))

    def clear(self) -> None:
        self.server.tables, self.server.prepared, self.server.committed = {}, {}, {}

    def other(self, kind: str = "") -> SinkTarget:
        table = f"other {kind}"
        return MemoryTarget(atomic=self._atomic, make=self._make, server=self.server, table=table, column=self.column)

    def types(self) -> Mapping[str, Sequence[Any]]:
        return {"bigint": self.column.kept}

    def schema_changes(self) -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
        def narrow(is_narrow: bool) -> Callable[[], None]:
            return lambda: setattr(self.server, "is_narrow", is_narrow)

        return {"the column is dropped": (narrow(True), narrow(False))}
