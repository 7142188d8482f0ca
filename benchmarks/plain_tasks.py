# SPDX-License-Identifier: Apache-2.0

"""Functions that the benchmarks run in Spark's tasks without Headgate. Newly forked workers import this again."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any

from pyspark import TaskContext


def planned_to_fail(failures: int) -> bool:
    """Whether this attempt is one of the first ``failures`` of its task."""
    context = TaskContext.get()
    assert context is not None
    return context.attemptNumber() < failures


class FailDownstream:
    """Raises after the task's function, so that only Spark knows the end of a subtask, not its completion message."""

    def __init__(self, failures: int) -> None:
        self._failures = failures

    def __call__(self, record: Any) -> Any:
        if planned_to_fail(self._failures):
            raise RuntimeError("as planned")
        return record


class Thrower:
    """A plain task that notes when its first line ran, then pauses, and throws with the time in the text."""

    def __init__(self, failures: int, pause_s: float, notes: str) -> None:
        self._failures = failures
        self._pause_s = pause_s
        self._notes = notes

    def __call__(self, records: Iterable[Any]) -> Iterator[int]:
        began_ns = time.time_ns()
        with open(self._notes, "a") as notes:
            notes.write(f"{began_ns}\n")
        time.sleep(self._pause_s)
        if planned_to_fail(self._failures):
            raise RuntimeError(f"thrown at {time.time_ns()}")
        yield 0


def read(split: int) -> int:
    """The work for one split: next to nothing."""
    return split + 1


def note_the_start(records: Iterable[Any]) -> list[float]:
    """Return one record: when this function was called, which is when the task's function began."""
    return [time.perf_counter()]


class BareExchange:
    """Exchanges a message with a server on this machine, and yields the milliseconds from the start to its answer."""

    def __init__(self, port: int) -> None:
        self._port = port

    def __call__(self, records: Iterable[float]) -> Iterator[float]:
        for began in records:
            with socket.create_connection(("127.0.0.1", self._port)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(bytes(64))
                connection.recv(64)
            yield (time.perf_counter() - began) * 1e3
