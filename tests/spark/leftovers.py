# SPDX-License-Identifier: Apache-2.0

"""Check that a sidecar leaves nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark import SparkContext

SETTLE_S = 60.0  # a thread that was told to end may take a moment
LISTENING = "0A"


def sockets() -> dict[str, str]:
    """This process's TCP sockets, inode -> local address, remote address and state; Spark's own are left out.

    Py4J keeps one connection for each thread that ever called the JVM, until the thread is collected. The JVM keeps
    one to the accumulators of the driver, and some to a running callback server, which the first ``foreachBatch``
    starts.
    """
    open_inodes = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:  # the socket that this scan used
            continue
        if target.startswith("socket:["):
            open_inodes.add(target[len("socket:[") : -1])
    gateway: Any = SparkContext._gateway
    jvm_port = gateway.gateway_parameters.port if gateway is not None else -1
    context: Any = SparkContext._active_spark_context
    accumulators_port = context._accumulatorServer.server_address[1] if context is not None else -1
    callbacks = getattr(gateway, "__dict__", {}).get("_callback_server")
    callback_port = callbacks.get_listening_port() if callbacks is not None else -1
    found = {}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, remote, state, *rest = line.split()
            inode = rest[5]
            sparks_own = port(remote) == jvm_port or port(local) in (accumulators_port, callback_port)
            if inode in open_inodes and not sparks_own:
                found[inode] = f"{local} {remote} {'listening' if state == LISTENING else state}"
    return found


def port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def listeners(context: SparkContext) -> list[str]:
    """The class names of Headgate's listeners on Spark's bus: the Java one, and proxies of Python ones.

    Spark adds its own listeners over time.
    """
    java_context: Any = context._jsc
    names = (str(listener.getClass().getName()) for listener in java_context.sc().listenerBus().listeners())
    return [name for name in names if "headgate" in name or "Proxy" in name]


def jvm_threads() -> list[str]:
    """Headgate's threads in the driver's JVM; some of Spark's are named after the path of the worker's Python."""
    jvm: Any = SparkContext._jvm
    stacks = jvm.java.lang.Thread.getAllStackTraces().keySet()
    return [name for thread in stacks if (name := str(thread.getName())).startswith("headgate-")]


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fail if the block leaves a thread or a socket, or a listener or a thread in the driver's JVM.

    If the earlier SparkContext still runs, it must also be able to run a plain job.
    """
    context = SparkContext._active_spark_context
    threads_before, sockets_before = threads(), sockets()
    yield
    deadline = time.monotonic() + SETTLE_S
    for thread in threads() - threads_before:
        if not thread.name.startswith(("Thread-", "pydevd")):  # Spark's and Py4J's threads may stay
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"left behind: {thread}"
    gc.collect()
    new = sockets().keys() - sockets_before.keys()
    assert not new, f"left behind: {[sockets()[inode] for inode in new]}"
    if context is not None and context is SparkContext._active_spark_context:
        assert not listeners(context)
        assert context.parallelize(range(10), 2).sum() == 45
        assert jvm_threads() == []
