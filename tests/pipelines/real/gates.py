# SPDX-License-Identifier: Apache-2.0

"""Places in a pipeline at which it waits until a fault has struck, in whatever process it gets there.

A fault strikes when the pipeline reaches a place for the nth time: while a task writes a record, before or after it
prepares its rows, before or after the driver commits them. The process that gets there waits, so the job cannot be
over. Everything is in files, because any process may die at any time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate.sinks import (
    Committable,
    SinkCommitterContext,
    SinkWriterContext,
    TwoPhaseCommitter,
    TwoPhaseSink,
    TwoPhaseWriter,
)

__all__ = ["PLACES", "Gate", "GatedSink", "Gates"]

PLACES = ("write", "before prepare", "after prepare", "before commit", "after commit")
LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class Gate:
    """The ``count``th time that the pipeline gets to ``place`` after the gate before this one was opened."""

    place: str
    count: int


@dataclass(frozen=True)
class Gates:
    """Gates in the order in which they are closed and opened. ``folder`` is where the processes see each other."""

    folder: str
    gates: tuple[Gate, ...]

    def pass_through(self, place: str) -> None:
        """Called by the pipeline. Waits if this is the gate that comes next."""
        for number, gate in enumerate(self.gates):
            if self._opened(number).exists():
                continue
            if gate.place == place and self._count(number) == gate.count:
                self._reached(number).touch()
                while not self._opened(number).exists():
                    time.sleep(LOOK_EVERY_S)
            return

    def is_reached(self, number: int) -> bool:
        return self._reached(number).exists()

    def open(self, number: int) -> None:
        self._opened(number).touch()

    def _count(self, number: int) -> int:
        with open(Path(self.folder, f"count-{number}"), "ab") as file:
            file.write(b".")
            file.flush()
            return file.tell()

    def _reached(self, number: int) -> Path:
        return Path(self.folder, f"reached-{number}")

    def _opened(self, number: int) -> Path:
        return Path(self.folder, f"opened-{number}")


class GatedSink(TwoPhaseSink[Any]):
    """A sink with gates. It also notes each process that writes, in ``FOLDER/task-PID``."""

    def __init__(self, sink: TwoPhaseSink[Any], gates: Gates) -> None:
        self._sink = sink
        self._gates = gates
        self.name = sink.name
        self.atomic = sink.atomic

    @property
    def target(self) -> str:
        return self._sink.target

    def writer(self, context: SinkWriterContext) -> TwoPhaseWriter[Any]:
        Path(self._gates.folder, f"task-{os.getpid()}").touch()
        return _GatedWriter(self._sink.writer(context), self._gates)

    def committer(self, context: SinkCommitterContext) -> TwoPhaseCommitter:
        return _GatedCommitter(self._sink.committer(context), self._gates)


class _GatedWriter(TwoPhaseWriter[Any]):
    def __init__(self, writer: TwoPhaseWriter[Any], gates: Gates) -> None:
        self._writer = writer
        self._gates = gates

    def write(self, record: Any) -> None:
        self._gates.pass_through("write")
        self._writer.write(record)

    def prepare(self) -> Iterable[Committable]:
        self._gates.pass_through("before prepare")
        prepared = list(self._writer.prepare())
        if prepared:
            self._gates.pass_through("after prepare")
        return prepared

    def close(self) -> None:
        self._writer.close()


class _GatedCommitter(TwoPhaseCommitter):
    def __init__(self, committer: TwoPhaseCommitter, gates: Gates) -> None:
        self._committer = committer
        self._gates = gates
        self.transient_errors = committer.transient_errors  # those of the instance

    def open(self) -> None:
        self._committer.open()

    def commit(self, committables: Sequence[Committable]) -> None:
        self._gates.pass_through("before commit")
        self._committer.commit(committables)
        self._gates.pass_through("after commit")

    def abort(self, names: Sequence[str]) -> None:
        self._committer.abort(names)

    def prepared(self) -> Iterable[str]:
        return self._committer.prepared()

    def committed(self, checkpoint_id: int) -> None:
        self._committer.committed(checkpoint_id)

    def close(self) -> None:
        self._committer.close()
