# SPDX-License-Identifier: Apache-2.0

"""The smallest sink that is right: a server in memory with prepared batches and a ledger of commits."""

from __future__ import annotations

from collections.abc import Sequence
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

    rows: list[tuple[int, int]] = field(default_factory=list)
    prepared: dict[str, dict[str, list[tuple[int, int]]]] = field(default_factory=dict)  # by sink and name
    committed: dict[str, dict[str, int]] = field(default_factory=dict)  # by sink and writer, the highest number

    def commit(self, sink: str, parts: Sequence[Committable]) -> None:
        """One transaction."""
        numbers = dict(self.committed.get(sink, {}))
        prepared = dict(self.prepared.get(sink, {}))
        rows = list(self.rows)
        for part in parts:
            if part.number <= numbers.get(part.writer, -1):
                continue
            if part.name not in prepared:
                raise SinkDataLost(f"{part.name} is gone")
            rows += prepared.pop(part.name)
            numbers[part.writer] = part.number
        self.rows, self.prepared[sink], self.committed[sink] = rows, prepared, numbers


class MemoryWriter(TwoPhaseWriter[Any]):
    def __init__(self, context: SinkWriterContext, server: Server) -> None:
        self._context = context
        self._server = server
        self._rows: list[tuple[int, int]] = []

    def write(self, record: Any) -> None:
        self._rows.append((record["subtask"], record["number"]))

    def prepare(self) -> list[Committable]:
        if not self._rows:
            return []
        name = self._context.next_name()
        self._server.prepared.setdefault(self._context.sink, {})[name] = self._rows
        self._rows = []
        return [Committable(name)]


class MemoryCommitter(TwoPhaseCommitter):
    def __init__(self, context: SinkCommitterContext, server: Server) -> None:
        self._sink = context.sink
        self._server = server

    def commit(self, committables: Sequence[Committable]) -> None:
        self._server.commit(self._sink, committables)

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._server.prepared.get(self._sink, {}).pop(name, None)

    def prepared(self) -> list[str]:
        return list(self._server.prepared.get(self._sink, {}))


class MemorySink(TwoPhaseSink[Any]):
    def __init__(self, server: Server, name: str, *, atomic: bool = True) -> None:
        self._server = server
        self.name = name
        self.atomic = atomic

    @property
    def target(self) -> str:
        return "memory"

    def writer(self, context: SinkWriterContext) -> MemoryWriter:
        return MemoryWriter(context, self._server)

    def committer(self, context: SinkCommitterContext) -> MemoryCommitter:
        return MemoryCommitter(context, self._server)


class MemoryTarget(SinkTarget):
    def __init__(self, *, atomic: bool = True) -> None:
        self.server = Server()
        self._atomic = atomic

    def sink(self, name: str) -> MemorySink:
        return MemorySink(self.server, name, atomic=self._atomic)

    def read(self) -> list[tuple[int, int]]:
        return list(self.server.rows)

    def clear(self) -> None:
        self.server.rows, self.server.prepared, self.server.committed = [], {}, {}
