# SPDX-License-Identifier: Apache-2.0

"""Tasks that behave while others do not: the real executor's half, each on its own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from spark_bridge.subtask import SubtaskOperator, TaskEndpoint, TaskIdentity, run_subtask

IN_FLIGHT_MAX = 8
PAUSE_S = 0.002
"""The pause between two events, which leaves time for the attackers."""
PATIENCE_S = 120.0


class EchoedOperator(SubtaskOperator):
    """Counts upwards to its coordinator, which returns each number; each must come once and in order (H22, H30)."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self.sent = 0
        self.returned = 0

    def open(self, context: Any, state: bytes | None) -> None:
        self._context = context

    def process(self, records: Iterator[Any]) -> Iterable[Any] | None:
        while not self._stop.is_set() or self.returned < self.sent:
            if self._stop.is_set() or self.sent - self.returned >= IN_FLIGHT_MAX:
                self._context.wait_for_event(1.0)
            else:
                self._context.send_event(self.sent)
                self.sent += 1
                time.sleep(PAUSE_S)
                self._context.handle_pending()
        return None

    def handle_event(self, event: Any) -> None:
        assert event == self.returned, f"{event!r} came back, but {self.returned} was the next"
        self.returned += 1


class HonestTask:
    """One task on its thread, from registration to completion message."""

    def __init__(self, endpoint: TaskEndpoint, task_attempt_id: int, subtask: int, run_id: int) -> None:
        self._stop = threading.Event()
        self.operator = EchoedOperator(self._stop)
        self._error: BaseException | None = None
        identity = TaskIdentity(task_attempt_id, subtask, run_id, 0)

        def run() -> None:
            try:
                for _ in run_subtask(lambda: self.operator, endpoint, identity, ()):
                    pass
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name=f"honest-{task_attempt_id}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the task end, and do not wait for it."""
        self._stop.set()

    def finish(self) -> int:
        """Let the task end; return how many events went up and came back. Raises the task's error."""
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "an honest task does not come to its end"
        if self._error is not None:
            raise self._error
        assert self.operator.sent == self.operator.returned
        return self.operator.sent
