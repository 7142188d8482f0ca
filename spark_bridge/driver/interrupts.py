# SPDX-License-Identifier: Apache-2.0

"""Delays Ctrl-C while it would do harm, and lets it through where it can be obeyed.

A ``KeyboardInterrupt`` can be raised after any call that Python makes, also in the middle of ``threading`` and
``concurrent.futures``, whose locks then stay locked: a future can block the event loop that completes it for good. So
what must not be left halfway holds Ctrl-C back, and waits for other threads with ``Interrupts.wait`` (H160).
"""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from types import FrameType
from typing import Any

__all__ = ["Interrupts", "holding_interrupts", "interrupts_held_back"]


class Interrupts:
    """Holds interrupts back while it is entered, and is the handler of the signal meanwhile.

    Only the main thread has interrupts. An object and no generator: Python may close one late that was interrupted, and
    it would then change the handler once more.
    """

    def __init__(self) -> None:
        self._handler: Any = None  # the program's own
        self._depth = 0
        self._held_back: list[FrameType | None] = []
        self._awake = threading.Lock()
        self._awake.acquire()

    def __enter__(self) -> Interrupts:
        self._depth += 1
        if self._depth == 1 and _is_main_thread() and callable(handler := signal.getsignal(signal.SIGINT)):
            self._handler = handler
            signal.signal(signal.SIGINT, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth and self._handler is not None:
            if callable(signal.getsignal(signal.SIGINT)):
                signal.signal(signal.SIGINT, self._handler)
            self._raise_held_back()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Python calls this instead of the program's handler."""
        self._held_back.append(frame)
        self._wake()

    def _wake(self, *_: object) -> None:
        with suppress(RuntimeError):  # it is awake
            self._awake.release()

    def _raise_held_back(self) -> None:
        while self._held_back:
            self._handler(signal.SIGINT, self._held_back.pop())

    def wait(self, future: Future[Any], timeout_s: float = -1) -> BaseException | None:
        """Wait until ``future`` is done, or for ``timeout_s`` seconds.

        If an interrupt comes first, return what the program's handler raises for it. It is held back no longer.
        """
        future.add_done_callback(self._wake)
        while not future.done():
            try:
                self._raise_held_back()
            except BaseException as error:  # whatever it is: the caller raises it
                return error
            if not self._awake.acquire(timeout=timeout_s) and timeout_s >= 0:
                break
        return None

    def let_through(self) -> LetThrough:
        """Within the block, and at its beginning, the program's handler is called as usual."""
        return LetThrough(self)


class LetThrough:
    """See ``Interrupts.let_through``."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._held = False

    def __enter__(self) -> None:
        self._held = _is_main_thread() and signal.getsignal(signal.SIGINT) is self._interrupts
        if self._held:
            try:
                signal.signal(signal.SIGINT, self._interrupts._handler)
                self._interrupts._raise_held_back()
            except BaseException:
                signal.signal(signal.SIGINT, self._interrupts)
                raise

    def __exit__(self, *_: object) -> None:
        if self._held and callable(handler := signal.getsignal(signal.SIGINT)):
            self._interrupts._handler = handler  # which the code in the block may have changed
            signal.signal(signal.SIGINT, self._interrupts)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def holding_interrupts() -> Interrupts:
    """``interrupts_held_back``, for blocks that wait or call other code. In an inner block, it is that of the outer."""
    handler = signal.getsignal(signal.SIGINT)
    return handler if isinstance(handler, Interrupts) and _is_main_thread() else Interrupts()


def interrupts_held_back() -> AbstractContextManager[object]:
    """Delay a Ctrl-C that comes within the block until its end. For short blocks that end by themselves.

    Has no effect outside the main thread, which alone receives signals, or if Python does not handle SIGINT.
    """
    return holding_interrupts()
