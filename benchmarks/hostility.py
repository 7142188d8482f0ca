# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.hostility``: what one hostile peer costs another operator, for each kind that fuzzers know.

An operator's only task echoes events, one at a time. First without, then beside, and again without a hostile peer in
another process: strangers, peers with a key, peers below TLS, at the status port, at the port of a group's member, and
a task that says anything to a ready-made part, a source or a sink of a second operator. Only Spark is simulated. A line
of a Markdown table says for each

* the round trip at p99 without (before and after it) and beside it, and what it adds;
* the memory that the sidecar's process had at most more than before: nothing is taken off for configured bounds;
* how often the first operator was restarted;
* the connections of the peer, or the attempts of the task, and how many of them were still there at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import platform
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import structlog

from actors.coordination import OperatorCoordinator, SubtaskGateway
from benchmarks.__main__ import host_facts
from benchmarks.crowd import TIMEOUT_S, Child, CrowdRuntime, PretendedSpark, running_child
from benchmarks.harness import percentile
from benchmarks.many_endpoints import ECHO, resident_bytes
from protocol.facts import (
    JobEnded,
    JobStarted,
    StageSubmitted,
    StatusReported,
    TaskEnded,
    TaskOutcome,
    TaskPlace,
    TaskStarted,
    TaskState,
)
from protocol.wire.messages import RestoreMode
from spark_bridge.common.certificates import certificate_digest
from spark_bridge.driver.config import SidecarConfig, Watching
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.primitives.primitive import Primitive
from tests.fuzz.hostile_parts import PARALLELISM, PARTS, quiet_main
from tests.load.hostile import KINDS

ECHOING = "echo"
ECHO_STAGE = 1
PAYLOAD_BYTES = 100
PAUSE_S = (0.0005, 0.003)
BASELINE_OF_S = 0.4
"""How long each of the two baselines is, as a part of the time of the hostile peer."""
HEAD = "| hostile peer | p99 without, ms | beside, ms | added, ms | added, MiB | restarts | came (still there) |"


class HostileSpark(PretendedSpark):
    """Knows which tasks run, and says what becomes of those that the sidecar ends."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[int, TaskStarted] = {}
        self.restarts = 0
        self.live: set[int] = set()  # jobs
        self._last = 0
        self._job = ECHO_STAGE

    def begin_job(self, parallelism: int) -> int:
        stage, self._job = self._job, self._job + 1
        self.live.add(stage)
        self.say(JobStarted(stage, (stage,)))
        self.say(StageSubmitted(stage, 0, parallelism))
        return stage

    def launch(self, stage: int, subtask: int, attempt_number: int) -> TaskStarted:
        self._last += 1
        task = self.running[self._last] = TaskStarted(self._last, stage, 0, subtask, attempt_number)
        self.say(task)
        return task

    def end(self, task: TaskStarted, outcome: TaskOutcome, reason: str) -> None:
        if self.running.pop(task.task_attempt_id, None) is not None:
            self.restarts += task.stage_id == ECHO_STAGE
            place = (task.task_attempt_id, task.stage_id, 0, task.partition, task.attempt_number)
            self.say(TaskEnded(*place, outcome, reason))

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        if (task := self.running.get(task_attempt_id)) is not None:
            self.end(task, TaskOutcome.KILLED, reason)

    async def cancel_job(self, job_id: int, reason: str) -> None:
        for task in [task for task in self.running.values() if task.stage_id == job_id]:
            self.end(task, TaskOutcome.KILLED, reason)
        if job_id in self.live:
            self.live.discard(job_id)
            self.say(JobEnded(job_id, False, reason))

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        states = {one: TaskState.RUNNING if one in self.running else TaskState.ENDED for one in task_attempt_ids}
        known = [self.running[one] for one in task_attempt_ids if one in self.running]
        places = {task.task_attempt_id: TaskPlace(task.stage_id, task.partition) for task in known}
        return StatusReported({job: job in self.live for job in job_ids}, states, places)


class EchoCoordinator(OperatorCoordinator):
    """Keeps when the last event came."""

    def __init__(self) -> None:
        self.gateway: SubtaskGateway
        self.ready = asyncio.Event()
        self.arrived = asyncio.Event()

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateway = gateway
        self.ready.set()

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.arrived.set()


@dataclass(frozen=True, slots=True)
class Cost:
    """What one kind of hostile peer has cost. Times are in milliseconds."""

    kind: str
    p99_without: float
    p99_beside: float
    added_bytes: int
    restarts: int
    came: int
    still_there: int

    @property
    def row(self) -> str:
        return (
            f"| {self.kind} | {self.p99_without:.1f} | {self.p99_beside:.1f} | "
            f"{max(0.0, self.p99_beside - self.p99_without):.1f} | {max(0, self.added_bytes) / 2**20:.0f} | "
            f"{self.restarts} | {self.came:,} ({self.still_there}) |"
        )


class Bench:
    """The sidecar, the operator that echoes, and the process of the hostile peers."""

    def __init__(self, spark: HostileSpark, runtime: SidecarRuntime, echo: EchoCoordinator, hostile: Child) -> None:
        self._spark = spark
        self._runtime = runtime
        self._echo = echo
        self._hostile = hostile
        self._most = 0

    async def cost_of(self, kind: str, seconds: float, command: dict[str, Any]) -> Cost:
        """Measure the peers that ``command`` starts in the other process, or the tasks of a part that it names."""
        spark = self._spark
        before = await self._samples(seconds * BASELINE_OF_S)
        gc.collect()
        resident, restarts = resident_bytes(), spark.restarts
        self._most = resident
        accepted = self._runtime._server.statistics
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            work = group.create_task(self._attack(until, command))
            beside = await self._samples(until - time.monotonic())
            still_there = max(0, _open(self._runtime._server.statistics) - _open(accepted))
            most = self._most
        after = await self._samples(seconds * BASELINE_OF_S)
        without = median([percentile(before, 0.99), percentile(after, 0.99)])
        p99 = percentile(beside, 0.99)
        return Cost(kind, without, p99, most - resident, spark.restarts - restarts, work.result(), still_there)

    async def _attack(self, until: float, command: dict[str, Any]) -> int:
        if "part" in command:
            return await self._hostile_tasks(until, command)
        self._hostile.tell(seconds=until - time.monotonic(), seed=random.getrandbits(30), **command)
        return int((await self._hostile.hear())["count"])

    async def _hostile_tasks(self, until: float, command: dict[str, Any]) -> int:
        """Attempts of one task, each of which goes on until it is ended; return how many."""
        (part,) = (one for one in PARTS if one.name == command["part"])
        operator = f"hostile-{part.name}"
        made = part.make()
        is_part = isinstance(made, Primitive)
        uses: list[Any] = [made] if is_part else []
        main: Any = quiet_main() if is_part else made
        await self._runtime.coordinate(operator, main, parallelism=PARALLELISM, uses=uses, mode=part.mode)
        attempts, stage, number = 0, 0, 0
        while (left_s := until - time.monotonic()) > 0.05:
            if stage not in self._spark.live or number == 3:  # Spark would give it up, too
                await self._spark.cancel_job(stage, "a task has failed too often")
                stage, number = self._spark.begin_job(PARALLELISM), 0
            task, number = self._spark.launch(stage, 0, number), number + 1
            slot = [task.task_attempt_id, 0, task.attempt_number, PARALLELISM, stage]
            self._hostile.tell(
                seconds=left_s, seed=random.getrandbits(30), part=part.name, operator=operator, slot=slot
            )
            await self._hostile.hear()
            attempts += 1
            if time.monotonic() < until:  # otherwise it was there to the end
                await asyncio.sleep(0.01)
                self._spark.end(task, TaskOutcome.FAILED, "its connection was ended")
        await self._spark.cancel_job(stage, "the measurement is over")
        return attempts

    async def _samples(self, seconds: float) -> list[float]:
        """Milliseconds of each round trip in this time."""
        samples: list[float] = []
        until, echo = time.monotonic() + seconds, self._echo
        while time.monotonic() < until or not samples:
            await asyncio.sleep(random.uniform(*PAUSE_S))
            echo.arrived.clear()
            began = time.monotonic_ns()
            await echo.gateway.send_event([ECHO, bytes(PAYLOAD_BYTES)])
            await echo.arrived.wait()
            samples.append((time.monotonic_ns() - began) / 1e6)
            self._most = max(self._most, resident_bytes())
        return samples


def _open(statistics: Any) -> int:
    return int(statistics.unauthenticated + statistics.unidentified + statistics.identified)


@asynccontextmanager
async def running_bench(*, tls: bool) -> AsyncIterator[Bench]:
    spark, echo = HostileSpark(), EchoCoordinator()
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(
            CrowdRuntime(spark, SidecarConfig(tls=tls, watching=Watching(status_port=0)))
        )
        host, port = runtime.address
        await runtime.coordinate(ECHOING, echo, parallelism=1)
        stage = spark.begin_job(1)
        task = spark.launch(stage, 0, 0)
        pin = certificate_digest(tls, spark.keys).hex()
        own = {
            "host": host,
            "port": port,
            "key": spark.keys.task_key(ECHOING).secret.hex(),
            "pin": pin,
            "operator_id": ECHOING,
            "parallelism": 1,
            "mode": int(RestoreMode.BATCH),
            "stage_id": stage,
            "files": 64,
        }
        echoing = await stack.enter_async_context(running_child(own))
        echoing.tell(do="open", tasks=[[task.task_attempt_id, 0]])
        await echoing.hear()
        async with asyncio.timeout(TIMEOUT_S):
            await echo.ready.wait()
        peers = {
            "tasks": [host, port],
            "status": list(runtime.status_address or (host, port)),
            "pin": pin,
            "secret": spark.secret.hex(),
        }
        hostile = await stack.enter_async_context(running_child(peers, "tests.load.hostile"))
        gc.collect()
        gc.freeze()  # what is imported here for the other process is in no sidecar
        yield Bench(spark, runtime, echo, hostile)


def kinds(*, tls: bool) -> dict[str, dict[str, Any]]:
    """Each kind of hostile peer, by what the table calls it: the command that starts it."""
    with_tls = {"stranger with TLS", "below TLS"}
    found: dict[str, dict[str, Any]] = {}
    for kind, attacks in KINDS.items():
        if tls or kind not in with_tls:
            found |= {f"{kind}: {one.__name__}": {"kind": kind, "name": one.__name__} for one in attacks}
    found["port of a group's member"] = {"kind": "ring"}
    return found | {f"task at {part.name}": {"part": part.name} for part in PARTS}


async def measure(wanted: Sequence[str], seconds: float, *, tls: bool) -> list[Cost]:
    costs = []
    async with running_bench(tls=tls) as bench:
        await bench._samples(min(1.0, seconds))  # until everything is warm
        print(f"{HEAD}\n|{'---|' * (HEAD.count('|') - 1)}", flush=True)
        for kind, command in kinds(tls=tls).items():
            if not wanted or any(word in kind for word in wanted):
                costs.append(await bench.cost_of(kind, seconds, command))
                print(costs[-1].row, flush=True)
    return costs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostility", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each hostile peer goes on (default: 5)")
    parser.add_argument("--tls", action="store_true", help="encrypt all connections")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="kinds with this in their name")
    options = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    costs = asyncio.run(measure(options.only, options.seconds, tls=options.tls))
    facts = host_facts()
    print(
        f"\n{facts['processor']}, {os.cpu_count()} cores, Python {platform.python_version()}, {facts['system']}, "
        f"{options.seconds:g} s each, {'with TLS' if options.tls else 'plain'}, load {facts['load_1m']:.1f}"
    )
    return 1 if any(cost.restarts for cost in costs) else 0


if __name__ == "__main__":
    sys.exit(main())
