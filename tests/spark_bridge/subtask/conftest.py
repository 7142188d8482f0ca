# SPDX-License-Identifier: Apache-2.0

"""Nothing of a task may outlive it: every test here is checked for threads, files and the switch interval."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from spark_bridge.subtask import attached, own_reads
from spark_bridge.subtask.own_reads import OwnReads
from tests.spark_bridge.subtask.operators import Recorder
from tests.spark_bridge.subtask.peer import Peer
from tests.spark_bridge.subtask.reading import NEVER_S, until_it_reads_itself


def open_sockets() -> set[tuple[str, str]]:
    """The sockets and selectors that this process holds: each descriptor, and what it stands for."""
    kinds = ("socket:", "anon_inode:[eventpoll]")
    held = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            meaning = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # the descriptor that listed the folder
        if meaning.startswith(kinds):
            held.add((descriptor, meaning))
    return held


def is_of_py4j(descriptor: int) -> bool:
    """Whether it is a connection to a JVM that other tests have left in this process: Py4J opens them at any moment."""
    gateway = getattr(getattr(sys.modules.get("pyspark"), "SparkContext", None), "_gateway", None)
    try:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            return gateway is not None and one.getpeername()[1] == gateway.gateway_parameters.port
    except OSError:
        return False


@pytest.fixture(autouse=True)
def nothing_survives_the_test() -> Iterator[None]:
    """What an earlier test in this process left to the collector may be closed meanwhile; nothing may be added."""
    sockets, interval_s = open_sockets(), sys.getswitchinterval()
    yield
    gc.collect()
    left_behind = attached.attached_keys()
    for attempt in tuple(attached._process.attached.values()):
        attempt.close()  # otherwise the next test would fail as well
    assert left_behind == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith(("headgate-", "task-"))] == []
    assert {one for one in open_sockets() - sockets if not is_of_py4j(int(one[0]))} == set()
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
    monkeypatch.setattr(own_reads, "IDLE_S", NEVER_S)


@pytest.fixture(params=["the I/O thread reads", "the task reads"])
def until_it_waits(request: pytest.FixtureRequest) -> Callable[[Recorder], None]:
    """For a test that holds for both readers: call it to wait until a task that reads itself waits."""
    if request.param == "the I/O thread reads":
        return lambda operator: None
    request.getfixturevalue("eager")
    return until_it_reads_itself
