# SPDX-License-Identifier: Apache-2.0

"""Delays Ctrl-C at the few moments when it would do harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupts_held_back"]


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Delay a Ctrl-C that comes within the block until its end. For short blocks that end by themselves.

    Has no effect outside the main thread, which alone receives signals, or if Python does not handle SIGINT.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held_back: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: held_back.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held_back:
        handler(signal.SIGINT, held_back[0])
