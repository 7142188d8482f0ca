# SPDX-License-Identifier: Apache-2.0

"""The operators that the benchmarks run in Spark's tasks. A newly forked Python worker imports this again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.plain_tasks import planned_to_fail, read
from spark_bridge.subtask import SplitReader, SubtaskContext, SubtaskOperator


class Pausing:
    """A plain task: one output, after a pause in which the machine becomes quiet.

    It is defined here so that its worker imports as much as that of ``PausingOperator``.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def __call__(self, records: Iterable[Any]) -> Iterator[int]:
        time.sleep(self._pause_s)
        yield 0


class PausingOperator(SubtaskOperator):
    """``Pausing`` as a subtask."""

    def __init__(self, pause_s: float) -> None:
        self._pausing = Pausing(pause_s)

    def process(self, records: Iterator[Any]) -> Iterable[int]:
        return self._pausing(records)


class ThrowingOperator(SubtaskOperator):
    """``Thrower`` as a subtask: it begins when its coordinator has called it ready."""

    def __init__(self, failures: int, pause_s: float) -> None:
        self._failures = failures
        self._pause_s = pause_s
        self._told = False
        self._context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context

    def handle_event(self, event: Any) -> None:
        self._told = True

    def process(self, records: Iterator[Any]) -> Iterator[int]:
        while not self._told:
            self._context.wait_for_event()
        time.sleep(self._pause_s)
        if planned_to_fail(self._failures):
            raise RuntimeError(f"thrown at {time.time_ns()}")
        yield 0


class AddingReader(SplitReader):
    """Adds up the results of ``read`` for each split."""

    def __init__(self) -> None:
        super().__init__()
        self._total = 0

    def read_split(self, split: int) -> None:
        self._total += read(split)

    def finish(self) -> Iterable[int]:
        return [self._total]


class SinceTheStart(SubtaskOperator):
    """Yields the milliseconds from the start of the task, which is its record, to this record."""

    def process(self, records: Iterator[Any]) -> Iterator[float]:
        for began in records:
            yield (time.perf_counter() - began) * 1e3
