# SPDX-License-Identifier: Apache-2.0

"""Keeps Python's garbage collector from visiting what thousands of subtasks keep alive.

A full run of the collector visits every object that may be in a cycle, and stops the event loop meanwhile: for 0.2 s
with 2,000 subtasks. These objects live as long as their attempts. So once the subtasks of a run are ready, everything
is moved out of the collector's sight (``gc.freeze``), and back when no run is left.

Frozen objects are freed as usual when nothing refers to them. Only those that are garbage in a cycle have to wait for
the end of the runs.

Python begins a full run when a quarter of all objects are new. It does not count the frozen ones, so it would visit
the states of the latest checkpoints again and again. Instead, a full run is made when the process holds a quarter more
than after the last one. A run of the middle generation visits what a few runs of the youngest one have left. While a
checkpoint of thousands of subtasks is taken, almost everything is left, so the middle one is run earlier. Garbage in a
cycle that outlives it waits for a full run.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable

from actors.coordination import OperatorStatistics
from actors.logs import get_logger
from spark_bridge.bridge.runs import RunningJobs

__all__ = ["FrozenHeap"]

log = get_logger("headgate.heap")

SUBTASKS_MIN = 100
"""With fewer, a run of the collector takes no longer than other turns of the loop."""
GROWTH = 4
"""It is frozen again when a quarter as many attempts have become ready since: each time may freeze some garbage. A full
run is made when the process holds a quarter more blocks of memory."""
MIDDLE_RUN_AFTER = 2
"""As a threshold: more than so many runs of the youngest generation. Python's own is 10."""
NEVER = 2**31 - 1
"""As a threshold: after so many runs of the younger generations."""


class FrozenHeap:
    """``look`` is to be called about once a second. Loop only."""

    def __init__(self, running: RunningJobs, statistics: Callable[[], Iterable[OperatorStatistics]]) -> None:
        self._running = running
        self._statistics = statistics
        self._ready = 0
        self._frozen_at_ready = 0
        self._frozen = False
        self._own_thresholds: tuple[int, int] | None = None  # the program's, if this sidecar has replaced them
        self._blocks_min = 0

    def look(self) -> None:
        """Freeze once no attempt has become ready since the last look, and undo it when no run is left.

        Meanwhile, make a full run if the process has grown.
        """
        ready = sum(one.ready for one in self._statistics())
        settled, self._ready = ready == self._ready, ready
        if not self._running.operator_ids:
            self.close()
            self._frozen_at_ready = ready
        elif settled and ready - self._frozen_at_ready >= max(SUBTASKS_MIN, self._frozen_at_ready // GROWTH):
            self._freeze()
            self._frozen_at_ready = ready
            log.info("heap frozen", attempts=ready)
        elif self._frozen:
            self._collect_if_grown()

    def _freeze(self) -> None:
        gc.freeze()
        self._blocks_min = sys.getallocatedblocks()
        self._frozen = True
        young, middle, full = gc.get_threshold()
        if full != NEVER:  # otherwise they are replaced already, by this sidecar or by another one of this process
            self._own_thresholds = middle, full
            gc.set_threshold(young, min(middle, MIDDLE_RUN_AFTER), NEVER)

    def _collect_if_grown(self) -> None:
        blocks = sys.getallocatedblocks()
        if blocks - self._blocks_min >= self._blocks_min // GROWTH and gc.isenabled():
            gc.collect()
            self._blocks_min = sys.getallocatedblocks()
        else:
            self._blocks_min = min(self._blocks_min, blocks)

    def close(self) -> None:
        """Let the collector see everything again. May be called more than once."""
        if self._frozen:
            self._frozen = False
            gc.unfreeze()
            if self._own_thresholds is not None:
                gc.set_threshold(gc.get_threshold()[0], *self._own_thresholds)
                self._own_thresholds = None
            log.info("heap unfrozen")
