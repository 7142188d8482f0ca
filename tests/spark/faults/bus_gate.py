# SPDX-License-Identifier: Apache-2.0

"""A listener on Spark's bus that delays its whole queue, for as long as a test wants or a little at each event.

The queue gives each event to its listeners one after the other. While one of them does not return, events wait in the
queue, and a full queue drops them. In production, any slow third-party listener has this effect on Headgate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from spark_bridge.bridge.jvm_classes import new_compiled_object

QUEUE = "headgate"
CLASS_NAME = "headgate.tests.BusGate"
JAVA = """
package headgate.tests;

public final class BusGate extends org.apache.spark.SparkFirehoseListener {
    private boolean shut = true;
    private long pauseMs;
    private int held;

    public synchronized void onEvent(org.apache.spark.scheduler.SparkListenerEvent event) {
        held = shut ? held + 1 : held;
        notifyAll();
        try {
            while (shut) {
                wait();
            }
            Thread.sleep(pauseMs);
        } catch (InterruptedException told) {
            Thread.currentThread().interrupt();
        }
    }

    public synchronized void open(long pauseMs) {
        this.pauseMs = pauseMs;
        shut = false;
        notifyAll();
    }

    public synchronized boolean awaitHeld(long withinMs) throws InterruptedException {
        long deadline = System.currentTimeMillis() + withinMs;
        while (held == 0 && System.currentTimeMillis() < deadline) {
            wait(Math.max(1L, deadline - System.currentTimeMillis()));
        }
        return held > 0;
    }
}
"""


class BusGate:
    """The gate is closed when it is made. Thread-safe."""

    def __init__(self, java_gate: Any) -> None:
        self._java_gate = java_gate

    def wait_until_it_holds(self) -> None:
        """Wait until an event has reached the gate, so that whatever Spark posts from now on waits after it."""
        assert self._java_gate.awaitHeld(60_000), "Spark has posted nothing within 60 s"

    def open(self, *, pause_ms: int = 0) -> None:
        """Let the waiting events through; each event takes at least ``pause_ms``."""
        self._java_gate.open(pause_ms)


@contextmanager
def shut_gate(spark: SparkSession) -> Iterator[BusGate]:
    """Listeners that joined the queue before this one get one event more than those after it, and then none either."""
    java_context: Any = spark.sparkContext._jsc
    java_gate = new_compiled_object(spark.sparkContext, CLASS_NAME, lambda: JAVA)
    bus = java_context.sc().listenerBus()
    bus.addToQueue(java_gate, QUEUE)
    try:
        yield BusGate(java_gate)
    finally:
        java_gate.open(0)
        bus.removeListener(java_gate)
