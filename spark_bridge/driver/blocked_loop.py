# SPDX-License-Identifier: Apache-2.0

"""Says which line blocks the event loop of a sidecar, while it does.

A loop that is blocked serves no task. If it is blocked by a Spark action whose tasks need their coordinator, both wait
for each other, and nothing on the loop can say so. Therefore another thread looks. It says nothing while the loop works
for Headgate alone, as it may for long on a machine that is too busy.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import threading
from types import FrameType
from typing import Any, Final

import anyio
import structlog

import actors
import protocol
import spark_bridge
from actors.logs import get_logger
from actors.waiting_at import running_at
from spark_bridge.driver.loop import SidecarLoop
from spark_bridge.observability.meters import LoopLag

__all__ = ["BlockedLoopWatch"]

log = get_logger("headgate.loop")

LOOK_S: Final = 0.25
LOOKS: Final = 4
"""A report is due when the loop has not turned between so many looks in a row.

Looks are counted, and not seconds, because a process that was stopped as a whole has missed its looks too.
"""
DEPTH_MAX: Final = 200
SHOWN_MAX: Final = 30
LOOP: Final = frozenset({"_run", "_run_once", "run_forever", "run_until_complete", "run"})
"""Functions of asyncio that call what is on the loop. Those of uvloop cannot be seen, but the one that runs it can."""
HINT_CALLERS_LOOP: Final = (
    "call a Spark action with `await sidecar.run(action)`, and other blocking work with `await asyncio.to_thread(...)`"
)
HINT_OWN_LOOP: Final = "a coordinator must not block: give such work to call_async"


def _folder(module: Any) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(str(module.__file__))), "")


_OURS = ("<frozen ", *(_folder(module) for module in (actors, protocol, spark_bridge, anyio, structlog)))
_INSTALLED = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))
_STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))


def _is_others(filename: str) -> bool:
    """Whether the code is the user's, or of a library that Headgate does not use on a loop, such as pyspark."""
    if filename.startswith(_OURS):
        return False
    return filename.startswith(_INSTALLED) or not filename.startswith(_STANDARD)  # what is installed may be in it


class BlockedLoopWatch:
    """Looks at a loop from a separate thread until ``close``. Make it on the loop that ``lag`` measures."""

    def __init__(self, lag: LoopLag) -> None:
        self._lag = lag
        self._loop_thread_id = threading.get_ident()
        own_loop = isinstance(asyncio.get_running_loop(), SidecarLoop)
        self._hint = HINT_OWN_LOOP if own_loop else HINT_CALLERS_LOOP
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="headgate-loop-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, which takes a moment. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        turns, looks, due = self._lag.turns, 0, LOOKS
        reported = False
        while not self._closed.wait(LOOK_S):
            if self._lag.turns != turns:
                if reported:
                    log.info("event loop unblocked", blocked_s=looks * LOOK_S)
                turns, looks, due, reported = self._lag.turns, 0, LOOKS, False
                continue
            looks += 1
            if looks >= due:
                due *= 2
                reported |= self._report(looks * LOOK_S)

    def _report(self, blocked_s: float) -> bool:
        frames = _frames_on_loop(sys._current_frames().get(self._loop_thread_id))
        if not any(_is_others(frame.f_code.co_filename) for frame in frames):
            return False
        shown = frames[:SHOWN_MAX]
        stack = (f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}" for frame in shown)
        log.warning(
            "event loop blocked",
            blocked_s=blocked_s,
            at=running_at(frames[0]),
            hint=self._hint,
            stack=" < ".join(stack),
        )
        return True


def _frames_on_loop(frame: FrameType | None) -> list[FrameType]:
    """Where the loop's thread is, innermost first, up to the loop itself."""
    frames: list[FrameType] = []
    while frame is not None and len(frames) < DEPTH_MAX:
        code = frame.f_code
        if code.co_filename.startswith(asyncio.__path__[0]) and code.co_name in LOOP:
            break
        frames.append(frame)
        frame = frame.f_back
    return frames
