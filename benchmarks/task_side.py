# SPDX-License-Identifier: Apache-2.0

"""The code that the event benchmarks run in a Spark task: an operator, and the bare sockets of the baseline."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.cores import whole_process_on
from benchmarks.raw_frames import ANSWER, ECHO, FLOOD, RawSocket
from spark_bridge.subtask import SubtaskContext, SubtaskOperator

STOP = "stop"
ALONE = 6
"""``[ALONE, number, seconds]``, to a busy operator: answer with the same event, then compute with this switch interval
and check nothing until the reader thread has ended.
"""
RECORD_STEPS = 1_000
"""The work of a busy operator for one record: some tens of microseconds of pure Python."""


class EchoOperator(SubtaskOperator):
    """Echoes each event whose first entry asks for it, and waits for the next one.

    The baseline's sockets have a thread each. One blocks in its read; the other stays awake for a while first, for as
    long as the operator does.
    """

    def __init__(self, raw_ports: list[int], core: int | None, spin_s: float) -> None:
        self.stopped = False
        self.alone_interval_s: float | None = None
        self.context: SubtaskContext
        self._raw_ports = raw_ports
        self._core = core
        self._spin_s = spin_s
        self._sockets: list[RawSocket] = []
        self._readers: list[threading.Thread] = []

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        whole_process_on(self._core)
        self._sockets = [RawSocket(port) for port in self._raw_ports]
        self._start_readers()

    def _start_readers(self) -> None:
        asleep, awake = self._sockets
        self._read_with(asleep.serve)
        self._read_with(awake.serve_awake, self._spin_s)

    def _read_with(self, serve: Callable[..., None], *args: float) -> None:
        reader = threading.Thread(target=serve, args=args, name="raw-reader", daemon=True)
        self._readers.append(reader)
        reader.start()

    def process(self, records: Iterator[Any]) -> None:
        while not self.stopped:
            self.context.wait_for_event()

    def handle_event(self, event: Any) -> None:
        if event == STOP:
            self.stopped = True
            return
        kind = event[0]
        if kind == ECHO:
            self.context.send_event(event)
        elif kind == FLOOD:
            _, _, payload, count = event
            for place in range(count - 1, -1, -1):
                self.context.send_event([ANSWER, place, payload])
        elif kind == ALONE:
            self.context.send_event(event)
            self.alone_interval_s = event[2]

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        for reader in self._readers:
            reader.join()


class BusyOperator(EchoOperator):
    """Computes pure Python all the time; between records it also polls the first of two raw sockets.

    A thread reads the second one, as in code that ignores the interpreter's lock. Each check of a socket lets that
    thread run, so it is measured while there are no checks.
    """

    def _start_readers(self) -> None:
        self._read_with(self._sockets[1].serve)

    def process(self, records: Iterator[Any]) -> None:
        polled = self._sockets[0]
        for _ in records:
            if self.stopped:
                return
            compute(RECORD_STEPS)
            polled.poll()
            if self.alone_interval_s is not None:
                self._compute_alone(self.alone_interval_s)
                self.alone_interval_s = None

    def _compute_alone(self, interval_s: float) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(interval_s)
        while self._readers[0].is_alive():
            compute(RECORD_STEPS)
        sys.setswitchinterval(before)


def endless(records: Iterable[Any]) -> Iterator[int]:
    """An endless stream of records, in place of the input."""
    return itertools.count()


def compute(steps: int) -> int:
    total = 0
    for step in range(steps):
        total += step & 7
    return total
