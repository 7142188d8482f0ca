# SPDX-License-Identifier: Apache-2.0

"""Sidecars that have names and are started and stopped, in notebooks and services that cannot use a ``with`` block.

A started sidecar is stopped when the interpreter ends. This must happen before Python waits for the threads that are
still running, because one of them may wait for a job that only the end of the sidecar ends, and before it refuses new
threads. So the functions for ``atexit`` would come too late. They are also too late for thread pools, which Python ends
first.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - what was registered last is called first, so it must come before ours
import os
import threading
from dataclasses import dataclass, field
from typing import Any

from actors.logs import get_logger
from protocol.arguments import NAME, checked
from protocol.describing import describe
from spark_bridge.common.errors import SidecarError
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.environment import SPARK, driver_context, is_remote
from spark_bridge.driver.interrupts import interrupts_held_back
from spark_bridge.driver.sidecar import Sidecar

__all__ = ["start", "stop"]

log = get_logger("headgate.sidecar")


@dataclass(slots=True)
class _Entry:
    sidecar: Sidecar
    context: Any
    config: SidecarConfig

    def why_not(self, context: Any, config: SidecarConfig) -> str:
        """Why it cannot serve this context with these settings. Empty if it can."""
        if self.context is not context:
            return "its SparkContext is not the one that was given"
        return "" if self.config == config else "its settings have changed"


@dataclass(slots=True)
class _Started:
    """The names and sidecars that were started in this process."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    entries: dict[str, _Entry] = field(default_factory=dict)
    ending: bool = False


_started = _Started()
_of_the_parent: list[_Started] = []
"""Kept in a forked process, because collecting a running sidecar there would reach for threads that do not exist."""


@checked(spark=SPARK, name=NAME)
def start(spark: Any, config: SidecarConfig | None = None, *, name: str = "default") -> Sidecar:
    """Start a sidecar for a notebook or a service that cannot use a ``with`` block, and return it.

    A cell can be run again: with the same SparkContext and equal settings, ``start`` returns the sidecar of this
    ``name`` that is already running, with its operators. If the settings have changed, or the SparkContext is another
    one, the running sidecar is stopped first, as ``Sidecar.stop`` does, and a new one without operators is started; the
    log says so. ``spark`` and ``config`` are as for ``Sidecar``.

    ``Sidecar.stop`` or ``headgate.stop`` ends it. Otherwise it is stopped when the interpreter ends, within the times
    of ``SidecarConfig``: jobs that are still running in other threads fail, and what goes wrong is logged. One Ctrl-C
    cancels the waits. A signal that ends the process without Python, such as SIGTERM by default, stops nothing.

    Thread-safe, and blocks the calling thread. Raises as entering a ``Sidecar`` does, as stopping the earlier one does,
    and ``SidecarError`` if the interpreter is ending.
    """
    context = spark if is_remote(spark) else driver_context(spark)
    config = config or SidecarConfig()
    with _started.lock, interrupts_held_back():
        if _started.ending:
            raise SidecarError(
                "a sidecar cannot be started while the interpreter is ending: start it earlier, not at exit"
            )
        entry = _started.entries.get(name)
        if entry is not None and entry.sidecar.is_running:
            why = entry.why_not(context, config)
            if not why:
                return entry.sidecar
            log.warning("started sidecar replaced", name=name, why=why)
            stop(name)
        sidecar = Sidecar(spark, config)
        sidecar.__enter__()
        _started.entries[name] = _Entry(sidecar, context, config)
        return sidecar


@checked(name=NAME)
def stop(name: str = "default") -> None:
    """Stop the sidecar that ``start`` has started under this ``name``, as ``Sidecar.stop`` does.

    If there is none, or it has been stopped, this does nothing. Thread-safe. Raises as ``Sidecar.stop`` does, and the
    name is free then, too.
    """
    with _started.lock, interrupts_held_back():
        entry = _started.entries.pop(name, None)
        if entry is not None:
            entry.sidecar.stop()


def _stop_all() -> None:
    """The interpreter ends: stop everything, one after the other. After a Ctrl-C, wait for nothing more."""
    started = _started  # a forked process has its own
    with started.lock, interrupts_held_back():
        started.ending = True
        interrupted = False
        while started.entries:
            name, entry = started.entries.popitem()
            while entry.sidecar.is_running:  # it still is if the Ctrl-C came before the stop had begun
                try:
                    if interrupted:
                        entry.sidecar._hurry()
                    entry.sidecar.stop()
                except KeyboardInterrupt:
                    interrupted = True
                except Exception as error:  # nobody is left to catch it
                    log.error("sidecar stopped with an error", name=name, error=describe(error))
                    break


def _begin_in_a_forked_process() -> None:
    global _started  # noqa: PLW0603 - the lock may be held by a thread of the parent
    _of_the_parent.append(_started)
    _started = _Started()


getattr(threading, "_register_atexit", atexit.register)(_stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_a_forked_process)
