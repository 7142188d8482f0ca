# SPDX-License-Identifier: Apache-2.0

"""Ctrl-C at the n-th point of a call at which Python looks for signals, for every n.

Python does that when a function begins, and after each call of a function in C. A profile function is called at exactly
these points, and sends the signal there. A call in C that waits ends with the signal before it has returned, which is
the same as if it were interrupted before it begins.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import _GeneratorContextManager, contextmanager
from types import FrameType
from typing import Any

__all__ = ["Point", "interrupted_at", "python_handles_interrupts"]

SWALLOWS = frozenset({"<genexpr>", "_remove", "__del__"})
"""Python calls these when it collects garbage, and swallows what they raise."""
_LEAVES = _GeneratorContextManager.__exit__.__code__
WAITS = frozenset({"acquire", "sleep", "recv", "recv_into", "connect", "select", "poll"})


class Point:
    """Where the interrupt came, if the call had so many points."""

    def __init__(self) -> None:
        self.place: str | None = None

    def __str__(self) -> str:
        return self.place or "nowhere"


@contextmanager
def interrupted_at(number: int, *, skip: str = "", spare: str = "") -> Iterator[Point]:
    """Interrupt the block at its point of this number, counted from 0.

    No point counts before the function ``skip`` has begun. Its beginning is none, nor is that of the function with the
    qualified name ``spare``: nobody can catch an interrupt there.
    """
    point, count = Point(), 0
    own = {_over.__code__, sys._getframe().f_code}
    waiting_for = skip

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count, waiting_for
        if event == "call" and waiting_for and frame.f_code.co_name == waiting_for:
            waiting_for = ""
            return
        name = getattr(argument, "__name__", "")
        if waiting_for or not (event in ("call", "c_return") or (event == "c_call" and name in WAITS)):
            return
        if frame.f_code in own or frame.f_code.co_name in SWALLOWS:
            return
        if event == "call" and frame.f_code.co_qualname == spare:
            return
        if frame.f_code is _LEAVES and frame.f_locals["self"].gen.gi_code in own:  # the block has ended
            return
        if count == number and point.place is None:
            what = f" of {name}" if name else ""
            point.place = f"{event}{what} in {frame.f_code.co_qualname}, line {frame.f_lineno}"
            signal.raise_signal(signal.SIGINT)
        count += 1

    sys.setprofile(look)
    try:
        yield point
    finally:
        _over()


def _over() -> None:
    sys.setprofile(None)


@contextmanager
def python_handles_interrupts() -> Iterator[None]:
    """Within the block, a Ctrl-C raises ``KeyboardInterrupt``. The handler must be the same at the end."""
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
