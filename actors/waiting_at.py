# SPDX-License-Identifier: Apache-2.0

"""Where a suspended coroutine waits, in words: ``/app/jobs.py:31 in meet``.

The chain of awaited objects is followed from the called method to the innermost frame: through coroutines, generators,
asynchronous generators, tasks, and the task groups of asyncio and anyio. A frame in the standard library or in an
installed package says little to the author of the method. So the text names the innermost frame outside of those
first, and then the innermost frame of all.

Nothing here changes what it looks at. Call it on the event loop's thread, between two steps of the coroutine.
"""

from __future__ import annotations

import asyncio
import dis
import gc
import inspect
import os
import sys
import sysconfig
from types import CodeType, FrameType
from typing import Any

import anyio

_DEPTH_MAX = 200
_HERE = os.path.dirname(os.path.abspath(__file__))
_STEPPING = os.path.join(_HERE, "stepping.py")
_OWN = ("actors", "headgate", "protocol", "spark_bridge")


def _folder(module: Any) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(str(module.__file__))), "")


def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    installed = {os.path.abspath(paths[name]) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*sorted(installed), _folder(anyio), *_PACKAGES)


_PACKAGES = tuple(os.path.join(os.path.dirname(_HERE), name) + os.sep for name in _OWN)
_LIBRARIES = _libraries()


def waiting_at(awaited: object) -> str:
    """Where ``awaited`` waits now. Empty if that is unknown, for example because it has ended."""
    return _words(_frames(awaited))


def raised_at(error: BaseException) -> str:
    """Where an error that a coroutine raised came from, in the same words."""
    frames: list[tuple[CodeType, int]] = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    # A cancellation is raised in the runtime first, and then thrown into the coroutine.
    return _words([frame for frame in frames if frame[0].co_filename != _STEPPING])


def running_at(frame: FrameType) -> str:
    """Where running code is, for example in another thread. ``frame``: its innermost frame."""
    frames: list[tuple[CodeType, int]] = []
    found: FrameType | None = frame
    while found is not None:
        frames.append((found.f_code, found.f_lineno))
        found = found.f_back
    return _words(frames[::-1])


def awaited_at() -> str:
    """Where the code that has called Headgate awaits the result of this call. Empty if it does not.

    The result is not known yet: the next instruction of the caller shows what becomes of it.
    """
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller.f_code.co_filename.startswith(_PACKAGES):
        caller = caller.f_back
    if caller is None or not caller.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return ""
    last = caller.f_lasti
    following = next((step for step in dis.get_instructions(caller.f_code) if step.offset > last), None)
    awaits = following is not None and following.opname == "GET_AWAITABLE"
    return _describe(caller.f_code, caller.f_lineno) if awaits else ""


def _words(frames: list[tuple[CodeType, int]]) -> str:
    if not frames:
        return ""
    innermost = _describe(*frames[-1])
    own = next((frame for frame in reversed(frames) if not is_library(frame[0].co_filename)), None)
    if own is None or own is frames[-1]:
        return innermost
    return f"{_describe(*own)} (inside {innermost})"


def _describe(code: CodeType, line: int) -> str:
    return f"{code.co_filename}:{line} in {code.co_qualname}"


def is_library(filename: str) -> bool:
    """Whether the code is not the user's own. Code without a file (``<stdin>``, a notebook's cell) is the user's."""
    return filename.startswith(_LIBRARIES)


def _frames(awaited: object) -> list[tuple[CodeType, int]]:
    """From the outermost to the innermost."""
    frames: list[tuple[CodeType, int]] = []
    seen: set[int] = set()
    inside: FrameType | None = None
    while awaited is not None and id(awaited) not in seen and len(seen) < _DEPTH_MAX:
        seen.add(id(awaited))
        frame, then = _look(awaited)
        if frame is not None:
            inside = frame
            frames.append((frame.f_code, frame.f_lineno))
        if then is None or (isinstance(then, asyncio.Future) and not isinstance(then, asyncio.Task)):
            then = _child(then) or _member(inside)
        awaited = then
    return frames


def _look(awaited: Any) -> tuple[FrameType | None, Any]:
    """Return the frame of one link of the chain, and the next link."""
    if inspect.iscoroutine(awaited):
        return awaited.cr_frame, awaited.cr_await
    if inspect.isgenerator(awaited):
        return awaited.gi_frame, awaited.gi_yieldfrom
    if inspect.isasyncgen(awaited):
        return awaited.ag_frame, awaited.ag_await
    if isinstance(awaited, asyncio.Task):
        return None, None if awaited.done() else awaited.get_coro()
    # C code wraps a future, a coroutine or an asynchronous generator in objects that do not expose it otherwise.
    return None, next((held for held in gc.get_referents(awaited) if _is_link(held)), None)


def _is_link(held: object) -> bool:
    return inspect.isawaitable(held) or inspect.isgenerator(held) or inspect.isasyncgen(held)


def _child(future: Any) -> object:
    """The first future that ``asyncio.gather`` still waits for."""
    return next((child for child in getattr(future, "_children", ()) if not child.done()), None)


def _member(frame: FrameType | None) -> object:
    """The first unfinished task that a library waits for on behalf of its caller.

    At the end of a task group's block, that is one of its tasks; in ``asyncio.wait`` and ``wait_for``, an argument.
    """
    if frame is None or not is_library(frame.f_code.co_filename):
        return None
    held = frame.f_locals
    tasks: list[object] = [held.get("fut")]
    for many in (held.get("fs"), getattr(held.get("self"), "_tasks", None)):
        if isinstance(many, set | frozenset | list | tuple):
            tasks.extend(many)
    return next((task for task in tasks if isinstance(task, asyncio.Task) and not task.done()), None)


__all__ = ["awaited_at", "is_library", "raised_at", "running_at", "waiting_at"]
