"""What the event benchmarks run inside a Spark task: an operator, and beside it the bare sockets of the baseline."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.raw_frames import ANSWER, ECHO, FLOOD, RawSocket
from spark_bridge.subtask import SubtaskContext, SubtaskOperator

STOP = "stop"
INTERVAL = 6
"""``[INTERVAL, number, seconds]``: set the interpreter's switch interval, then answer with the same event."""
RECORD_STEPS = 1_000
"""What a busy operator computes for one record: some tens of microseconds of pure Python."""


class EchoOperator(SubtaskOperator):
    """Answers each event whose first entry says so with the same event, and waits for the next one.

    The baseline's socket has a thread of its own, which blocks in its read.
    """

    def __init__(self, raw_ports: list[int]) -> None:
        self.stopped = False
        self.context: SubtaskContext
        self._raw_ports = raw_ports
        self._sockets: list[RawSocket] = []
        self._reader: threading.Thread

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self._sockets = [RawSocket(port) for port in self._raw_ports]
        self._reader = threading.Thread(target=self._sockets[-1].serve, name="raw-reader", daemon=True)
        self._reader.start()

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
        elif kind == INTERVAL:
            sys.setswitchinterval(event[2])
            self.context.send_event(event)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._reader.join()


class BusyOperator(EchoOperator):
    """Computes pure Python all the time, and between records looks at the first of two raw sockets, too.

    The second one is read by a thread, as somebody would write it who has not thought of the switch interval.
    """

    def process(self, records: Iterator[Any]) -> None:
        polled = self._sockets[0]
        for _ in records:
            if self.stopped:
                return
            compute(RECORD_STEPS)
            polled.poll()


def endless(records: Iterable[Any]) -> Iterator[int]:
    """As many records as it takes."""
    return itertools.count()


def compute(steps: int) -> int:
    total = 0
    for step in range(steps):
        total += step & 7
    return total
