# SPDX-License-Identifier: Apache-2.0

"""What this process has open: files, sockets, selectors."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time

LEFT_S = 60.0
"""How long something may take to be closed by a thread that was left behind, such as one that writes to a slow disk."""


def open_descriptors(*kinds: str) -> set[tuple[str, str]]:
    """Each descriptor, and what it stands for; only what begins like one of ``kinds``, if there are any."""
    held = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            meaning = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # the descriptor that listed the folder
        if meaning.startswith(kinds or ""):
            held.add((descriptor, meaning))
    return held


def opened_since(before: set[tuple[str, str]], *kinds: str) -> set[tuple[str, str]]:
    """What was not open ``before``, except for Py4J's and the archives that Python imports from.

    What an earlier test in this process left to the collector may be closed meanwhile; nothing may be added. After a
    test with Spark, the path of imports has an archive, which ``importlib.metadata`` opens at its next look-up and
    keeps open. The path's own cache knows that archive only after the next import.
    """
    gc.collect()
    archives = {*sys.path, *sys.path_importer_cache}
    return {one for one in open_descriptors(*kinds) - before if one[1] not in archives and not _is_of_py4j(*one)}


def check_that_all_are_closed(before: set[tuple[str, str]]) -> None:
    """Wait until nothing is open that was not ``before``, and name what stays open."""
    deadline = time.monotonic() + LEFT_S
    between_looks = threading.Event()
    while (left := opened_since(before)) and time.monotonic() < deadline:
        between_looks.wait(0.01)
    assert not left, f"left open: {sorted(left)}"


def _is_of_py4j(descriptor: str, meaning: str) -> bool:
    """Whether it is a connection to a JVM that other tests have left in this process: Py4J opens them at any moment."""
    gateway = getattr(getattr(sys.modules.get("pyspark"), "SparkContext", None), "_gateway", None)
    if gateway is None or not meaning.startswith("socket:"):
        return False
    try:
        with socket.socket(fileno=os.dup(int(descriptor))) as one:
            peer = one.getpeername()  # a text, unless it is a connection over TCP
            return isinstance(peer, tuple) and peer[1] == gateway.gateway_parameters.port
    except OSError:
        return False
