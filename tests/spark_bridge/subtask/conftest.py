# SPDX-License-Identifier: Apache-2.0

"""Nothing of a task may outlive it: every test here is checked for threads, files and the switch interval."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from spark_bridge.subtask import attached


def open_sockets() -> int:
    """How many sockets and selectors this process holds."""
    kinds = ("socket:", "anon_inode:[eventpoll]")
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith(kinds)
        except OSError:
            continue  # the descriptor that listed the folder
    return count


@pytest.fixture(autouse=True)
def nothing_survives_the_test() -> Iterator[None]:
    sockets, interval_s = open_sockets(), sys.getswitchinterval()
    yield
    gc.collect()
    left_behind = attached.attached_keys()
    for attempt in tuple(attached._process.attached.values()):
        attempt.close()  # otherwise the next test would fail as well
    assert left_behind == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith(("headgate-", "task-"))] == []
    assert open_sockets() == sockets
    assert sys.getswitchinterval() == interval_s
