# SPDX-License-Identifier: Apache-2.0

"""Pin the driver's loop and the task to separate cores, as on two machines.

Otherwise the system sometimes puts both ends of the baseline on one core for a whole round. Then no sleeping
processor has to be woken, and a round trip takes 19 instead of 110 microseconds. Which of the two happens is a matter
of luck, so a ratio to the baseline would be, too. If cores cannot be chosen, nothing is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def two_cores() -> tuple[int, int] | None:
    """The driver's core and the task's; None if there are fewer than two, or they cannot be chosen."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else None


@contextmanager
def this_thread_on(core: int | None) -> Iterator[None]:
    """Run the calling thread, and those that it starts, on that core; afterwards where they did before."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def whole_process_on(core: int | None) -> None:
    """Run all threads of this process, and those that they start, on that core from now on."""
    if core is not None:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})
