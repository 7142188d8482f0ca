# SPDX-License-Identifier: Apache-2.0

"""How soon a coordinator is told what Spark's scheduler has seen, on a real Spark.

The fact is the end of a failed task. The task fails again and again, each time after a pause in which nothing else
happens, and outside the subtask, so that only Spark knows. A sample is the time from the listener's callback in the
driver's JVM to the coordinator's ``subtask_failed``: relay, bridge with its ledger, barrier tracker, coordinator, in
a whole sidecar. The figures do not include the time until Spark makes that callback.

``spark_fact``: with the relay in the JVM. The baseline is the same relay with a bare socket at its other end: from
the callback to a function, on a thread that blocks in ``recv``, for the same failures of plain tasks. After each
failure Spark starts the next attempt while the fact is in transit. To give the machine as much to do then, the worker
of a plain task imports the same modules as that of a subtask. ``spark_fact_py4j``: through Py4J. The baseline is the
sidecar of ``spark_fact``. Py4J's listener cannot say when it was called, so a second listener, the relay in the JVM,
records when the bus came to the same event.

All times are from the machine's wall clock.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

import anyio
from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator
from benchmarks.harness import Figure, Progress, interleave, percentile
from benchmarks.plain_tasks import FailDownstream
from benchmarks.raw_frames import LENGTH
from benchmarks.spark_session import spark_session
from benchmarks.spark_tasks import Pausing, PausingOperator
from protocol.attempts import FailureReason
from protocol.facts import TaskEnded, TaskOutcome
from protocol.wire.handshake import NONCE_BYTES, ServerHandshake
from protocol.wire.keys import Key, KeyRing, Purpose
from spark_bridge.bridge.relay import OnFact, OnLost, Relay, RelayKind
from spark_bridge.bridge.relay.jvm_relay import close_listener, open_listener
from spark_bridge.bridge.relay.records import RelayedFact, decode_record
from spark_bridge.common.certificates import Encryption
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.driver.spark_driver import LocalDriver

MASTER = "local[2,1000000]"
"""Two cores, and a practically unlimited number of task failures."""
PAUSE_S = 0.03
CONNECT_TIMEOUT_S = 20.0
SEQUENCE = Struct(">q")
OnRecord = Callable[[bytes], None]


def now_us() -> float:
    return time.time_ns() / 1000


# --- the relay with a bare socket at its other end ----------------------------------------------------------------


@contextmanager
def bare_relay(spark: SparkSession, on_record: OnRecord) -> Iterator[None]:
    """The relay in Spark's JVM; a separate thread reads its records and hands them, as bytes, to ``on_record``."""
    key = KeyRing(secrets.token_bytes(32)).key(Purpose.RELAY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(CONNECT_TIMEOUT_S)
        listener = open_listener(spark.sparkContext, "127.0.0.1", server.getsockname()[1], key)
        try:
            connection, _ = server.accept()
            with connection:
                buffer = _shake_hands(connection, key)
                reader = threading.Thread(target=_read, args=(connection, buffer, on_record), name="bare-relay")
                reader.start()
                listener.attach()
                try:
                    yield
                finally:
                    close_listener(listener)
                    reader.join()
        finally:
            close_listener(listener)


def _shake_hands(connection: socket.socket, key: Key) -> bytearray:
    handshake = ServerHandshake(lambda identity: key, secrets.token_bytes(NONCE_BYTES))
    while not handshake.done:
        connection.sendall(handshake.receive(connection.recv(4096)))
    return bytearray(handshake.trailing_data)


def _read(connection: socket.socket, buffer: bytearray, on_record: OnRecord) -> None:
    while data := connection.recv(65536):
        buffer += data
        while len(buffer) >= 4 and len(buffer) >= 4 + (size := LENGTH.unpack_from(buffer)[0]):
            on_record(bytes(buffer[LENGTH.size + SEQUENCE.size : LENGTH.size + size]))
            del buffer[: LENGTH.size + size]


@dataclass(slots=True)
class BareEnds:
    """Records when a bare listener received each failed task, and the fact. Give its ``hear`` to ``bare_relay``."""

    callbacks_us: list[float] = field(default_factory=list)
    heard_us: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def hear(self, record: bytes) -> None:
        heard_us = now_us()
        relayed = decode_record(record)
        if isinstance(relayed, RelayedFact) and is_failure(relayed):
            assert isinstance(relayed.fact, TaskEnded)
            self.callbacks_us.append(relayed.callback_us)
            self.heard_us.append(heard_us)
            self.texts.append(relayed.fact.reason)


def is_failure(relayed: RelayedFact) -> bool:
    return isinstance(relayed.fact, TaskEnded) and relayed.fact.outcome is TaskOutcome.FAILED


# --- the sidecar --------------------------------------------------------------------------------------------------


class TimedDriver(LocalDriver):
    """Records for each failed task when the listener was called, and when the sidecar's loop had the fact."""

    def __init__(self, spark: SparkSession) -> None:
        super().__init__(spark)
        self.callbacks_us: list[float] = []
        self.heard_us: list[float] = []

    def open_relay(
        self,
        on_fact: OnFact,
        config: SidecarConfig,
        on_lost: OnLost,
        encryption: Encryption,
        tasks_at: Callable[[], tuple[str, int]],
    ) -> Relay:
        def hear(relayed: RelayedFact) -> None:
            if is_failure(relayed):
                self.heard_us.append(now_us())
                self.callbacks_us.append(relayed.callback_us)
            on_fact(relayed)

        return super().open_relay(hear, config, on_lost, encryption, tasks_at)


class Listening(OperatorCoordinator):
    """Records when it learned of each failure."""

    def __init__(self) -> None:
        self.failed_us: list[float] = []

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.failed_us.append(now_us())


@dataclass(slots=True)
class Stages:
    """The two halves of each path, in microseconds: to the sidecar's loop, and from there to the method."""

    relay_us: list[float] = field(default_factory=list)
    actors_us: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            name: {"p50": percentile(samples, 0.5), "p99": percentile(samples, 0.99)}
            for name, samples in (("callback to loop", self.relay_us), ("loop to coordinator", self.actors_us))
        }


async def _through_sidecar(spark: SparkSession, kind: RelayKind, failures: int, stages: Stages) -> list[float]:
    driver, coordinator, aside = TimedDriver(spark), Listening(), BareEnds()
    with nullcontext() if kind == "jvm" else bare_relay(spark, aside.hear):
        async with SidecarRuntime(driver, SidecarConfig(relay=kind)) as sidecar:
            task = (await sidecar.coordinate("facts", coordinator, parallelism=1)).subtask(PausingOperator, PAUSE_S)
            await anyio.to_thread.run_sync(_fail, spark, task, failures)
            if sidecar.relay_kind != kind:
                raise RuntimeError(f"the relay is {sidecar.relay_kind}, not {kind}")
    called_us = driver.callbacks_us if kind == "jvm" else aside.callbacks_us
    ways = list(zip(called_us, driver.heard_us, coordinator.failed_us, strict=True))
    stages.relay_us += [heard_us - callback_us for callback_us, heard_us, _ in ways]
    stages.actors_us += [failed_us - heard_us for _, heard_us, failed_us in ways]
    return [failed_us - callback_us for callback_us, _, failed_us in ways]


def _to_bare_socket(spark: SparkSession, failures: int) -> list[float]:
    ends = BareEnds()
    with bare_relay(spark, ends.hear):
        _fail(spark, Pausing(PAUSE_S), failures)
    return [heard_us - callback_us for heard_us, callback_us in zip(ends.heard_us, ends.callbacks_us, strict=True)]


def _fail(spark: SparkSession, task: Callable[[Any], Any], failures: int) -> None:
    """A job of one task, whose first ``failures`` attempts fail."""
    spark.sparkContext.parallelize([0], 1).mapPartitions(task).map(FailDownstream(failures)).count()


# --- figures ------------------------------------------------------------------------------------------------------


def spark_fact(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds from the JVM's callback for a failed task to ``subtask_failed``, compared with a bare socket."""
    rounds, failures = (1, 2) if quick else (8, 16)
    stages = Stages()
    with spark_session(MASTER) as spark:
        samples, baseline = interleave(
            rounds,
            lambda: _to_bare_socket(spark, failures),
            lambda: asyncio.run(_through_sidecar(spark, "jvm", failures, stages)),
            progress,
        )
    params = {"failures": failures, "pause_s": PAUSE_S, "relay": "jvm", "master": MASTER}
    params |= {"baseline": "the same relay to a bare socket, under tasks whose workers import as much"}
    return [Figure("spark_fact", "µs", samples, baseline, params, {"stages": stages.as_dict()})]


def spark_fact_py4j(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds from the bus's call for a failed task to ``subtask_failed`` by Py4J, compared to ``spark_fact``."""
    rounds, failures = (1, 2) if quick else (8, 16)
    stages, jvm_stages = Stages(), Stages()
    with spark_session(MASTER) as spark:
        samples, baseline = interleave(
            rounds,
            lambda: asyncio.run(_through_sidecar(spark, "jvm", failures, jvm_stages)),
            lambda: asyncio.run(_through_sidecar(spark, "py4j", failures, stages)),
            progress,
        )
    params = {"failures": failures, "pause_s": PAUSE_S, "relay": "py4j", "master": MASTER}
    params |= {"baseline": "the sidecar with relay='jvm'"}
    return [Figure("spark_fact_py4j", "µs", samples, baseline, params, {"stages": stages.as_dict()})]
