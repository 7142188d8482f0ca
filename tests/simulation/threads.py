# SPDX-License-Identifier: Apache-2.0

"""Worker threads whose every file system operation waits for the world's permission.

The product's storage blocks, so it runs in threads. Here each of them is a real thread that stops before each operation
on the file system until the world answers it. Only one thread runs at a time, counting the world's own, so a seed
decides everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

BLOCKED_S = 120.0
"""How long a thread may run between two operations before it counts as blocked on something else."""

_current = threading.local()


class ProcessDied(BaseException):
    """Ends a thread whose process has died, so that none of its code runs any more."""


@dataclass
class Operation:
    """One requested step on the file system. ``effect`` carries it out and returns the answer.

    Or a wait for something else, until ``until`` holds or ``timeout_s`` seconds have passed.
    """

    kind: str
    path: str
    effect: Callable[[], Any]
    until: Callable[[], bool] | None = None
    timeout_s: float = 0.0


class SimulatedThread:
    """Runs ``work`` as far as the world lets it. ``finished`` is called with its result or error, in the world."""

    def __init__(self, work: Callable[[], Any], finished: Callable[[Any, BaseException | None], None]) -> None:
        self.operation: Operation | None = None
        self.over = False
        self.hangs_until = 0.0  # the operation is not answered before this time on the world's clock
        self.decided: tuple[Any, BaseException | None] | None = None  # the future answer of a hanging operation
        self._work = work
        self._finished = finished
        self._result: Any = None
        self._error: BaseException | None = None
        self._answer: tuple[Any, BaseException | None] = (None, None)
        self._killed = False
        self._turn = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._let_run()

    # --- in the world ---------------------------------------------------------------------------------------------

    def answer(self, result: Any, error: BaseException | None = None) -> None:
        """Answer the operation that the thread waits for, and let it run up to the next one."""
        self.operation, self.decided, self.hangs_until = None, None, 0.0
        self._answer = result, error
        self._let_run()

    def kill(self) -> None:
        """Kill the thread's process."""
        self._killed = True
        while not self.over:
            self._let_run()
        self._thread.join()

    def _let_run(self) -> None:
        self._turn.release()
        if not self._back.acquire(timeout=BLOCKED_S):
            raise AssertionError("a simulated thread blocks on something that is not the file system")
        if self.over and not self._killed:
            self._thread.join()
            self._finished(self._result, self._error)

    # --- in the thread --------------------------------------------------------------------------------------------

    def ask(self, operation: Operation) -> Any:
        """Wait for the world's answer."""
        if self._killed:
            raise ProcessDied
        self.operation = operation
        self._back.release()
        self._turn.acquire()
        if self._killed:
            raise ProcessDied
        result, error = self._answer
        if error is not None:
            raise error
        return result

    def _run(self) -> None:
        self._turn.acquire()
        _current.thread = self
        try:
            self._result = self._work()
        except BaseException as error:  # it belongs to the caller, wherever that is
            self._error = error
        self.over = True
        self._back.release()


def this_thread() -> SimulatedThread | None:
    """Return the calling simulated thread, or None for the world itself."""
    return getattr(_current, "thread", None)


class SimulatedLock:
    """Stands in for ``threading.Lock``, for ``with``; a simulated thread that waits for it lets the world go on."""

    def __init__(self) -> None:
        self._held = False

    def __enter__(self) -> None:
        thread = this_thread()
        while self._held:
            assert thread is not None, "the world itself never waits for a lock"
            thread.ask(Operation("wait", "for a lock", lambda: None, lambda: not self._held, inf))
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False
