# SPDX-License-Identifier: Apache-2.0

"""``connect_...``: the same with Spark Connect and in the driver, in one run.

The subject is the sidecar of a client, whose server is another process on this machine. The baseline is a sidecar in
the driver, with the same operator in the same kind of task, ``mapInArrow``. Both jobs run all the time, and are
measured in turn.

``connect_event_confirm``: microseconds until an event is in the operator's mailbox. ``connect_event_echo``: until the
operator's answer is in the coordinator's method. ``connect_checkpoint``: milliseconds of a checkpoint of one subtask,
in memory. ``connect_failover``: milliseconds from a task's throw until the coordinator knows ("failed"), and until the
next attempt is ready ("ready").
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyspark
from pyspark import cloudpickle

from actors.coordination import OperatorCoordinator, SubtaskGateway
from benchmarks.harness import Figure, Progress, Rounds, interleave_async
from benchmarks.spark_session import SETTINGS, spark_session
from protocol.attempts import FailureReason
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask import SubtaskContext, SubtaskOperator

MASTER = "local[2,10000]"
START_S = 120.0
PAUSE_S = 0.03
STOP = "stop"


class TalkingOperator(SubtaskOperator):
    """Echoes events, and throws when it is told to."""

    def __init__(self) -> None:
        self._stopped = False
        self._context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context

    def handle_event(self, event: Any) -> None:
        if event == STOP:
            self._stopped = True
        elif event[0] == "echo":
            self._context.send_event(event)
        elif event[0] == "throw":
            time.sleep(PAUSE_S)  # in which the machine becomes quiet
            raise RuntimeError(f"thrown at {time.time_ns()}")

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        while not self._stopped:
            self._context.wait_for_event()
        yield from ()

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"state"


class TalkingCoordinator(OperatorCoordinator):
    """Notes when the attempt is lost and ready, and passes echoes on."""

    def __init__(self) -> None:
        self.gateway: SubtaskGateway
        self.ready = asyncio.Event()
        self.ready_ns = self.failed_ns = self.thrown_ns = 0
        self.echoed: asyncio.Future[None]

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateway, self.ready_ns = gateway, time.time_ns()
        self.ready.set()

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.failed_ns = time.time_ns()
        found = re.search(r"thrown at (\d+)", reason.text)
        assert found is not None, f"the task failed otherwise: {reason.text}"
        self.thrown_ns = int(found[1])

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.echoed.set_result(None)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b"state"


class Talk:
    """One running job, and how to measure it."""

    def __init__(self, sidecar: SidecarRuntime, coordinator: TalkingCoordinator) -> None:
        self._sidecar = sidecar
        self._coordinator = coordinator

    async def confirm(self) -> list[float]:
        began = time.perf_counter_ns()
        await (await self._coordinator.gateway.send_event(["confirm"]))
        return [(time.perf_counter_ns() - began) / 1e3]

    async def echo(self) -> list[float]:
        self._coordinator.echoed = asyncio.get_running_loop().create_future()
        began = time.perf_counter_ns()
        await self._coordinator.gateway.send_event(["echo"])
        await self._coordinator.echoed
        return [(time.perf_counter_ns() - began) / 1e3]

    async def checkpoint(self) -> list[float]:
        began = time.perf_counter_ns()
        await self._sidecar.checkpoint("bench")
        return [(time.perf_counter_ns() - began) / 1e6]

    async def failover(self) -> list[float]:
        coordinator = self._coordinator
        coordinator.ready.clear()
        await coordinator.gateway.send_event(["throw"])
        await coordinator.ready.wait()
        thrown = coordinator.thrown_ns
        return [(coordinator.failed_ns - thrown) / 1e6, (coordinator.ready_ns - thrown) / 1e6]


@asynccontextmanager
async def _talk(session: Any) -> AsyncIterator[Talk]:
    coordinator = TalkingCoordinator()
    async with asyncio.TaskGroup() as group, Sidecar(session) as sidecar:
        handle = await sidecar.coordinate("bench", lambda: coordinator, parallelism=1, mode="streaming")
        job = group.create_task(asyncio.to_thread(_run, session, handle))
        async with asyncio.timeout(START_S):
            await coordinator.ready.wait()
        yield Talk(sidecar, coordinator)
        await (await coordinator.gateway.send_event(STOP))
        await job


def _run(session: Any, handle: OperatorHandle) -> None:
    session.range(0, 1, 1, 1).mapInArrow(handle.subtask(TalkingOperator), "nothing long").collect()


@contextmanager
def remote_session() -> Iterator[Any]:
    """A session of a Spark Connect server that is started for it."""
    from pyspark.sql.connect.session import SparkSession

    script = Path(pyspark.__file__).parent / "sbin" / "start-connect-server.sh"
    settings = {**SETTINGS, "spark.connect.grpc.binding.port": "0", "spark.connect.grpc.binding.address": "127.0.0.1"}
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    with tempfile.TemporaryDirectory(prefix="headgate-benchmark-") as folder:
        said = Path(folder, "said")
        with said.open("wb") as log:
            server = subprocess.Popen(
                [script, "--wait", "--master", MASTER, *options],
                cwd=folder,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_PID_DIR": folder, "SPARK_LOG_DIR": folder},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            session = SparkSession.builder.remote(f"sc://127.0.0.1:{_port_said_in(said)}").create()
            yield session
            session.stop()
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _port_said_in(said: Path) -> int:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        found = re.search(r"Spark Connect server started at: \S+:(\d+)", said.read_text(errors="replace"))
        if found is not None:
            return int(found[1])
        time.sleep(0.1)
    raise RuntimeError(f"the Spark Connect server has not started within {START_S:g} s: {said.read_text()[-2000:]}")


Once = Callable[[Talk], Awaitable[list[float]]]


@dataclass(frozen=True)
class Plan:
    """How one figure is measured: so many rounds, of so many times. ``cases``: those of its samples, in turn."""

    unit: str
    once: Once
    rounds: int
    count: int
    cases: tuple[str, ...] = ("",)


PLANS = {
    "connect_event_confirm": Plan("µs", Talk.confirm, 10, 500),
    "connect_event_echo": Plan("µs", Talk.echo, 10, 500),
    "connect_checkpoint": Plan("ms", Talk.checkpoint, 10, 50),
    "connect_failover": Plan("ms", Talk.failover, 8, 10, ("failed", "ready")),
}
_measured: dict[bool, dict[str, list[Figure]]] = {}
"""All figures of a run, by whether it was a quick one: the two sessions are started once for all."""


async def _compare(driver: Any, remote: Any, quick: bool, progress: Progress) -> dict[str, list[Figure]]:
    figures = {}
    async with _talk(driver) as in_driver, _talk(remote) as in_client:
        for name, plan in PLANS.items():
            count = 2 if quick else plan.count

            async def times(talk: Talk, once: Once = plan.once, count: int = count) -> list[float]:
                return [sample for _ in range(count) for sample in await once(talk)]

            samples, baseline = await interleave_async(
                1 if quick else plan.rounds,
                partial(times, in_driver),
                partial(times, in_client),
                lambda text, name=name: progress(f"{name}: {text}"),  # type: ignore[misc]
            )
            figures[name] = list(_figures_of(name, plan, samples, baseline))
    return figures


def _figures_of(name: str, plan: Plan, samples: Rounds, baseline: Rounds) -> Iterator[Figure]:
    for place, case in enumerate(plan.cases):
        params: dict[str, Any] = {"case": {"until": case}} if case else {}
        params |= {"baseline": "the same in the driver", "master": MASTER}
        subject, raw = ([of_round[place :: len(plan.cases)] for of_round in side] for side in (samples, baseline))
        yield Figure(name, plan.unit, subject, raw, params)


def _measure(name: str, quick: bool, progress: Progress) -> list[Figure]:
    if quick not in _measured:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
        with spark_session(MASTER) as driver, remote_session() as remote:
            _measured[quick] = asyncio.run(_compare(driver, remote, quick, progress))
    return _measured[quick][name]


def connect_event_confirm(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds until an event is confirmed."""
    return _measure("connect_event_confirm", quick, progress)


def connect_event_echo(quick: bool, progress: Progress) -> list[Figure]:
    """Microseconds until an event has been answered."""
    return _measure("connect_event_echo", quick, progress)


def connect_checkpoint(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds of a checkpoint."""
    return _measure("connect_checkpoint", quick, progress)


def connect_failover(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds from a task's throw until it is known, and until the next attempt is ready."""
    return _measure("connect_failover", quick, progress)
