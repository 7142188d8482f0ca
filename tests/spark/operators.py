# SPDX-License-Identifier: Apache-2.0

"""Operators of the tests. They are module-level, so that Spark's closures carry their values or their names."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spark_bridge.subtask import SubtaskContext, SubtaskOperator


def kill_once(marker: Path) -> None:
    """Kill this process, unless one was killed before."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Listening(SubtaskOperator):
    """Yields every event until it is told to stop, and echoes each event."""

    def __init__(self) -> None:
        self.context: SubtaskContext
        self.received: list[Any] = []
        self.stopping = False

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def handle_event(self, event: Any) -> None:
        match event:
            case "stop":
                self.stopping = True
            case "raise":
                raise ValueError("as it was told")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case ["compute", int(count)]:
                sum(range(count))  # one call in C, which holds the interpreter lock throughout
                self.context.send_event(["echo", "computed"])
            case _:
                self.received.append(event)
                self.context.send_event(["echo", event])

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for _ in records:
            pass
        while not self.stopping:
            self.context.wait_for_event()
        yield (self.context.subtask, self.context.attempt, self.received)


class Asking(SubtaskOperator):
    """Yields its records, and then the answer to a question."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records
        yield self.context.request("a question")
