# SPDX-License-Identifier: Apache-2.0

"""A sidecar in a separate process that tests can start, kill and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from actors.coordination import Reply
from protocol.gateway.types import GatewayLimits
from protocol.wire.messages import RestoreMode
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.primitives.chain import Chain, chain
from spark_bridge.primitives.work_queue.driver import WorkQueue
from spark_bridge.standalone.attached import AttachedSidecar
from tests.spark.cluster import ROOT
from tests.spark.counting import Counting, CountingCoordinator

OPERATOR = "op"


class RemoteCounting(CountingCoordinator):
    """The counting coordinator, controlled by requests of the driver. Those that wait are answered by a stop."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Reply] = []

    async def handle_client_request(self, payload: Any) -> Any:
        match payload:
            case ["send", int(subtask), int(count)]:
                self.send_numbers(subtask, count)
            case ["tell", int(subtask), event]:
                self.tell(subtask, event)
            case "wait":
                self.waiting.append(Reply())
                return self.waiting[-1]
            case "waiting":
                return len(self.waiting)
            case "stop":
                self.stop_all()
                while self.waiting:
                    self.waiting.pop().answer()
            case ["callbacks", *names]:
                return [list(callback[:3]) for callback in self.story if callback[0] in names]
            case "seen":
                return self.seen
            case "wrong":
                return self.wrong
        return None


class CannotCommit(RemoteCounting):
    """Fails at each completed checkpoint, including the final one."""

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        raise OSError("cannot publish")


async def not_committing(sidecar: SidecarRuntime) -> None:
    await sidecar.coordinate(OPERATOR, CannotCommit(), parallelism=2, mode=RestoreMode.STREAMING)


async def streaming(sidecar: SidecarRuntime) -> None:
    await sidecar.coordinate(OPERATOR, RemoteCounting(), parallelism=2, mode=RestoreMode.STREAMING)


async def batch(sidecar: SidecarRuntime) -> None:
    await sidecar.coordinate(OPERATOR, RemoteCounting(), parallelism=2)


async def quick(sidecar: SidecarRuntime) -> None:
    """Coordinate an operator whose tasks give up soon after the sidecar is lost."""
    gateway = GatewayLimits(reconnect_timeout_s=1.0)
    await sidecar.coordinate(OPERATOR, RemoteCounting(), parallelism=2, gateway=gateway)


def negated(numbers: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for subtask, number in numbers:
        yield subtask, -number


def counting_chain() -> Chain:
    return chain(count=(RemoteCounting, Counting), negate=negated)


async def chained(sidecar: SidecarRuntime) -> None:
    await sidecar.coordinate(OPERATOR, counting_chain(), parallelism=2, mode=RestoreMode.STREAMING)


def page_key(page: int) -> int:
    return page


async def with_parts(sidecar: SidecarRuntime) -> None:
    """Coordinate one operator with every ready-made part, and one for each that a job uses alone."""
    queue: WorkQueue[int] = sidecar.work_queue("pages", [1], key=page_key, in_hand=2)
    rules = sidecar.shared("rules", {"factor": 1})
    permits = sidecar.permits("service", per_s=10_000, burst=50, concurrency=2)
    await sidecar.coordinate("crawl", parallelism=2, uses=[queue, permits, rules])
    await sidecar.coordinate("paid", parallelism=2, uses=[sidecar.cache("answers"), sidecar.budget("usd", 1.0)])
    await sidecar.coordinate("train", parallelism=2, uses=[sidecar.group("workers", 2)])
    numbers = chain(double=doubled, negate=negated)
    await sidecar.coordinate("chained", numbers, parallelism=2, uses=[sidecar.shared("rules", {"factor": 3})])


def doubled(numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
    for number in numbers:
        yield number, 2 * number


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


class SidecarProgram:
    """Runs ``headgate sidecar``, always with the same arguments. ``kill`` and ``start`` it at any time."""

    def __init__(self, folder: Path, factory: str = "streaming", *more: str) -> None:
        self.secret_file = folder / "secret"
        self.storage = str(folder / "checkpoints")
        control, relay, tasks = free_ports(3)
        self.address = f"127.0.0.1:{control}"
        self.ports = {"control": control, "relay": relay, "tasks": tasks}
        self._command = [
            *(sys.executable, "-m", "headgate", "sidecar", f"tests.spark.faults.own_process:{factory}"),
            *("--secret-file", str(self.secret_file), "--storage", self.storage),
            *("--port", str(control), "--relay-port", str(relay), "--task-port", str(tasks), *more),
        ]
        self._log = folder / "sidecar.log"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Return when drivers can send requests."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env={**os.environ}, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        assert "listening" in self._process.stdout.readline(), self.log()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
        self.wait()

    def terminate(self) -> int:
        """Send SIGTERM; return its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        if self._process is None:
            return 0
        process, self._process = self._process, None
        status = process.wait(300)
        assert process.stdout is not None
        process.stdout.close()
        return status

    def log(self) -> str:
        return self._log.read_text()


def attach(
    spark: SparkSession, program: SidecarProgram, connect_timeout_s: float = 60.0, **more: bool
) -> AttachedSidecar:
    """The driver's half of a program's sidecar, not entered yet."""
    return AttachedSidecar(
        spark, program.address, secret_file=program.secret_file, connect_timeout_s=connect_timeout_s, **more
    )


def callbacks(sidecar: AttachedSidecar, *names: str) -> list[list[Any]]:
    """The calls that the current coordinator has received: name, subtask or id, attempt or id."""
    told: list[list[Any]] = sidecar.request(OPERATOR, ["callbacks", *names])
    return told
