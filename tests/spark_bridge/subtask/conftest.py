# SPDX-License-Identifier: Apache-2.0

"""Nothing of a task may outlive it: every test here is checked for threads, files and the switch interval."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from spark_bridge.subtask import channel, connection
from spark_bridge.subtask.connection import OwnReads
from tests.spark_bridge.descriptors import open_descriptors, opened_since
from tests.spark_bridge.subtask.operators import Recorder
from tests.spark_bridge.subtask.peer import Peer
from tests.spark_bridge.subtask.reading import NEVER_S, until_it_reads_itself

SOCKETS = ("socket:", "anon_inode:[eventpoll]")


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """What earlier tests have imported is not searched for garbage again after each test of a module."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_survives_the_test() -> Iterator[None]:
    sockets, interval_s = open_descriptors(*SOCKETS), sys.getswitchinterval()
    yield
    gc.collect()
    left_behind = channel.attached_keys()
    for attempt in tuple(channel._process.attached.values()):
        attempt.close()  # otherwise the next test would fail as well
    assert left_behind == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith(("headgate-", "task-"))] == []
    assert opened_since(sockets, *SOCKETS) == set()
    assert sys.getswitchinterval() == interval_s


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a task read its socket in every wait, and never give the socket back for lack of data.

    Anything that must end such a wait therefore has to wake the task: it never notices by chance.
    """
    monkeypatch.setattr(OwnReads, "are_worthwhile", True)
    monkeypatch.setattr(connection, "IDLE_S", NEVER_S)


@pytest.fixture(params=["the I/O thread reads", "the task reads"])
def until_it_waits(request: pytest.FixtureRequest) -> Callable[[Recorder], None]:
    """For a test that holds for both readers: call it to wait until a task that reads itself waits."""
    if request.param == "the I/O thread reads":
        return lambda operator: None
    request.getfixturevalue("eager")
    return until_it_reads_itself
