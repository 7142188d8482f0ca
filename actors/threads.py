# SPDX-License-Identifier: Apache-2.0

"""Blocking code in worker threads: who shares a pool with whom.

A pool with a bound must not be shared by calls that wait and by calls that they wait for. The waiting calls would hold
all its threads, and nothing would move any more (H161). anyio's default pool is shared by everything on the loop, so
ruff refuses ``anyio.to_thread.run_sync`` everywhere else in the product. Each kind of waiting has its own pool:

| pool | what runs there | bound |
|---|---|---|
| ``ACTIONS`` | users' Spark actions; they wait for their tasks, and those for coordinators | none |
| ``USER`` | users' other blocking code, and enumerators, sources and sinks; it may wait for anything | none |
| ``DRIVER`` | short calls of Spark's JVM or server, and of local files; they wait for nothing of Headgate's | 40 |
| one for each storage | reads and writes of checkpoints, which may hang with their disk | 8 |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

__all__ = ["ACTIONS", "DRIVER", "USER", "ThreadPool"]

T = TypeVar("T")


class ThreadPool:
    """At most ``threads_max`` worker threads of each event loop at the same time; further calls wait for one."""

    def __init__(self, name: str, threads_max: float = math.inf) -> None:
        self._threads_max = threads_max
        self._limiter: RunVar[anyio.CapacityLimiter] = RunVar(f"headgate_threads_{name}")

    async def run(self, function: Callable[..., T], *args: object, abandon_on_cancel: bool = False) -> T:
        """Call ``function(*args)`` in a thread and return its result, or raise what it raises.

        A cancellation waits until the function has returned. With ``abandon_on_cancel``, it leaves the thread behind,
        which ends when the function returns.

        When the interpreter ends, no thread can be started from Python 3.12 on. What is left to do then is done on the
        loop.
        """
        limiter = self._limiter.get(None)
        if limiter is None:
            limiter = anyio.CapacityLimiter(self._threads_max)
            self._limiter.set(limiter)
        begun = False

        def begin() -> T:
            nonlocal begun
            begun = True
            return function(*args)

        run_sync = anyio.to_thread.run_sync  # noqa: TID251 - the one place
        try:
            return await run_sync(begin, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
        except RuntimeError as error:
            if begun or "at interpreter shutdown" not in str(error):
                raise
        return function(*args)


ACTIONS = ThreadPool("actions")
USER = ThreadPool("user")
DRIVER = ThreadPool("driver", 40)
