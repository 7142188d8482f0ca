# SPDX-License-Identifier: Apache-2.0

"""Leaves a sidecar that has its own thread, within the time of its settings, whatever the user's code does.

The contexts are left in a separate thread, so that the calling thread can receive a Ctrl-C and check whether the event
loop still turns. A loop that a coordinator blocks permanently cannot be stopped. The blocking code is logged and the
loop abandoned. Its thread is a daemon, so the process can end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Final

from actors.logs import get_logger
from actors.waiting_at import running_at
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.interrupts import holding_interrupts
from spark_bridge.driver.runtime import SidecarRuntime

__all__ = ["Leaver", "leave"]

log = get_logger("headgate.sidecar")

LOOK_S: Final = 0.1
BLOCKED_S: Final = 5.0
"""On a busy machine, a healthy loop may not turn for longer than a small ``shutdown_timeout_s``."""


class Leaver:
    """The thread that leaves a sidecar.

    It starts with the sidecar, because no thread can be started while the interpreter of Python 3.12 or later ends.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="headgate-leaving", daemon=True)
        self._thread.start()

    def call(self, close: Callable[[], bool | None]) -> Future[bool | None]:
        """Call ``close`` there, and return its outcome."""
        outcome: Future[bool | None] = Future()

        def call() -> None:
            try:
                outcome.set_result(close())
            except BaseException as error:  # for the waiting thread
                outcome.set_exception(error)

        self._calls.put(call)
        return outcome

    def end(self) -> None:
        """End the thread, which may itself call this."""
        self._calls.put(None)
        self.join()

    def join(self) -> None:
        """Wait until the thread has ended. Returns immediately in the thread itself."""
        if current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def leave(
    close: Callable[[], bool | None],
    leaver: Leaver,
    runtime: SidecarRuntime,
    shutdown_timeout_s: float,
    *,
    raising: bool,
) -> bool | None:
    """Have ``leaver`` call ``close``, which leaves the contexts of ``runtime`` and ends ``leaver``.

    Returns what ``close`` returns, or raises what it raises. A Ctrl-C cancels what is still running, and is raised at
    the end. If the loop does not turn for ``shutdown_timeout_s`` plus ``BLOCKED_S``, or does not end within this time
    after the sidecar is closed, it is abandoned. This raises ``SidecarError``, but is only logged if another exception
    is being raised (``raising``).
    """
    patience_s = shutdown_timeout_s + BLOCKED_S
    loop = _Loop(runtime)
    interrupt: BaseException | None = None
    with holding_interrupts() as interrupts:
        outcome = leaver.call(close)
        while not outcome.done():
            if (pressed := interrupts.wait(outcome, LOOK_S)) is not None:
                interrupt = interrupt or pressed
                loop.call(runtime._hurry)
            elif loop.silent_s() > patience_s:
                problem = loop.describe()
                log.error("event loop abandoned", why=problem)
                if interrupt is None and not raising:
                    raise SidecarError(problem)
                break
        else:
            leaver.join()
    if interrupt is not None:
        raise interrupt
    return outcome.result() if outcome.done() else None


class _Loop:
    """The sidecar's event loop, observed from another thread."""

    def __init__(self, runtime: SidecarRuntime) -> None:
        self._runtime = runtime
        self._turned_at = time.monotonic()
        self._asked = False

    def call(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nothing runs any more
            self._runtime._loop.call_soon_threadsafe(function)

    def silent_s(self) -> float:
        """The seconds for which the loop has not turned, or has not ended although the sidecar is closed."""
        if not self._asked and not self._runtime._closed:
            self._asked = True
            self.call(self._turned)
        return time.monotonic() - self._turned_at

    def _turned(self) -> None:
        self._turned_at, self._asked = time.monotonic(), False

    def describe(self) -> str:
        if self._runtime._closed:
            return (
                "the sidecar is closed, but tasks that a coordinator has started ignore their cancellation: end them "
                "in close(), and let asyncio.CancelledError through"
            )
        frame = sys._current_frames().get(self._runtime._thread_id)
        place = "a place that is not known" if frame is None else running_at(frame)
        return (
            f"the sidecar could not be closed: its event loop has been blocked for {self.silent_s():.0f} s at {place}. "
            "A coordinator must not block: give such work to call_async"
        )
