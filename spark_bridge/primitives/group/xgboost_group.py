# SPDX-License-Identifier: Apache-2.0

"""XGBoost among the members of a group. The only module of a group that needs XGBoost.

XGBoost's workers find each other through a *tracker*, a thread in the process of rank 0. Two things need care when a
member is lost. A worker that leaves tells the tracker, and tries again for 12 s if nobody answers: so it tries once
only, and the tracker stays until the next generation has begun. And each worker has a thread that waits in ``accept``
for bad news: a worker that could not leave properly wakes it, or it would stay as long as the process.
"""

from __future__ import annotations

import math
import time
import warnings
from contextlib import suppress
from types import TracebackType
from typing import Any

from xgboost.collective import CommunicatorContext, get_rank
from xgboost.tracker import RabitTracker

from protocol.errors import LocalProtocolError
from spark_bridge.primitives.group.guard import SocketGuard

_TRACKER_STARTS_S = 0.005
"""The tracker's thread takes less. ``worker_args`` looks for it, and sleeps for 0.1 s if it is not there yet."""

NO_BAD_NEWS = bytes(4)
"""What ends the thread of a worker that waits for bad news, and only that."""


class Tracker:
    """The tracker of one generation, in the process of rank 0. ``free`` it when all its workers have left."""

    def __init__(self, host: str, world_size: int) -> None:
        # Ranks follow the workers' names, which are those of the group's ranks: so the model has the same bits each
        # time.
        self._tracker = RabitTracker(n_workers=world_size, host_ip=host or "127.0.0.1", sortby="task")
        self._guard = SocketGuard(frozenset())
        self._tracker.start()
        time.sleep(_TRACKER_STARTS_S)

    def arguments(self) -> dict[str, Any]:
        """What its workers need to know."""
        found = dict(self._tracker.worker_args())
        self._guard.only_port = int(found["dmlc_tracker_port"])
        return found

    def free(self) -> None:
        self._guard.free()  # it would wait for one that has connected and says nothing
        with suppress(Exception):  # it says that the workers did not come
            self._tracker.free()
        self._guard.leave()


class Worker:
    """This process as a worker of XGBoost."""

    def __init__(self, arguments: dict[str, Any], rank: int, timeout_s: float, guard: SocketGuard) -> None:
        self._rank = rank
        self._guard = guard
        self._context = CommunicatorContext(
            **arguments, dmlc_task_id=f"{rank:010}", dmlc_retry=1, dmlc_timeout=math.ceil(timeout_s)
        )
        self._is_connected = False
        self._has_left = False

    def __enter__(self) -> Worker:
        return self

    def begin(self) -> None:
        self._context.__enter__()
        self._is_connected = True
        if get_rank() != self._rank:
            raise LocalProtocolError(f"XGBoost has given rank {get_rank()} to the member of rank {self._rank}")

    def end(self) -> None:
        self._is_connected = False
        self._context.__exit__()
        self._has_left = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._has_left:
            return
        if self._is_connected:
            with warnings.catch_warnings(), suppress(Exception):
                warnings.simplefilter("ignore")  # it tells at length that peers and tracker are gone
                self._context.__exit__()
        self._guard.wake()
