# SPDX-License-Identifier: Apache-2.0

"""A sidecar in this process and many subtasks in a few children, over loopback TCP, without Spark.

The sidecar is the real one on the running loop (``SidecarRuntime``). Only Spark is simulated: this module reports
that a job, a stage and its tasks have started. The subtasks are in ``benchmarks.many_endpoints``. The same processes
also have bare connections, one for each subtask: an ``asyncio.Protocol`` here, a bare socket there, a length and
msgpack.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgpack

from actors.coordination import CoordinatorContext, OperatorCoordinator, SubtaskGateway
from benchmarks.many_endpoints import LENGTH, STATE, TAKE, allow_files
from benchmarks.no_spark import PretendedDriver
from protocol.barrier_tracker import CheckpointConfig, CompletedCheckpoint
from protocol.facts import (
    JobEnded,
    JobStarted,
    StageSubmitted,
    StatusReported,
    TaskPlace,
    TaskStarted,
    TaskState,
)
from protocol.gateway.types import GatewayLimits
from protocol.wire.messages import RestoreMode
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.storage import MemoryStorage, Storage
from spark_bridge.storage.interface import DEFAULT_WRITE, WriteOptions

OPERATOR, JOB, STAGE = "bench", 1, 1
CHILDREN = 2
TIMEOUT_S = 120.0
DEFAULTS = SidecarConfig()
CHECKPOINT = CheckpointConfig(timeout_s=TIMEOUT_S)
MODES = {"aligned": CHECKPOINT, "unheld": replace(CHECKPOINT, hold_events=False)}
"""What becomes of an event that meets a checkpoint: it is held back, or delivered and recorded (H79)."""
OWN_FILES = 200
"""The files that a process opens in addition to the sockets of its subtasks: a generous guess."""
LINE_BYTES_MAX = 64 * 1024 * 1024


class PretendedSpark(PretendedDriver):
    """The driver's side of a sidecar: an engine that reports only success, from facts made up here."""

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        places = {task: TaskPlace(STAGE, task - 1) for task in task_attempt_ids}
        return StatusReported(dict.fromkeys(job_ids, True), dict.fromkeys(task_attempt_ids, TaskState.RUNNING), places)

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        raise AssertionError(f"a subtask of the benchmark failed: {reason}")


class TimedStorage(MemoryStorage):
    """The storage of a sidecar without a directory; ``stored_ns`` is when it got the last checkpoint."""

    stored_ns = 0

    def store(self, operator_id: str, checkpoint: CompletedCheckpoint, options: WriteOptions = DEFAULT_WRITE) -> str:
        file = super().store(operator_id, checkpoint, options)
        self.stored_ns = time.monotonic_ns()
        return file


class CrowdRuntime(SidecarRuntime):
    """A sidecar whose storage records when it stored."""

    def __init__(self, spark: PretendedSpark, config: SidecarConfig = DEFAULTS) -> None:
        super().__init__(spark, replace(config, limits=replace(config.limits, register_timeout_s=TIMEOUT_S)))
        self.storage = TimedStorage()

    def _open_storage(self) -> Storage:
        return self.storage


class CrowdCoordinator(OperatorCoordinator):
    """Keeps each subtask's gateway, and the times of its snapshot requests and of checkpoint completions."""

    def __init__(self) -> None:
        self.gateways: dict[int, SubtaskGateway] = {}
        self.ready = asyncio.Event()
        self.completed = asyncio.Event()
        self.cut_ns = 0
        self.completed_ns = 0
        self.after_cut: Callable[[], Awaitable[None]] | None = None
        """Called once, as the coordinator's first step after its next snapshot."""
        self.context: CoordinatorContext
        self.arrived: asyncio.Queue[tuple[Any, int]] = asyncio.Queue()

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateways[subtask] = gateway
        self.ready.set()

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self.cut_ns = time.monotonic_ns()
        if self.after_cut is not None:
            self.context.call_soon_threadsafe(self.after_cut)
            self.after_cut = None
        return STATE

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.completed_ns = time.monotonic_ns()
        self.completed.set()

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.arrived.put_nowait((event, time.monotonic_ns()))


class RawEnd(asyncio.Protocol):
    """The driver's end of one bare connection of the baseline."""

    def __init__(self, raw: RawCrowd) -> None:
        self._raw = raw
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._raw.ends.append(self)
        self._raw.connected.set()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4 and len(buffer) >= 4 + (size := LENGTH.unpack_from(buffer)[0]):
            msgpack.unpackb(buffer[4 : 4 + size])
            del buffer[: 4 + size]
            self._raw.answered()


class RawCrowd:
    """One bare connection for each subtask."""

    def __init__(self) -> None:
        self.ends: list[RawEnd] = []
        self.connected = asyncio.Event()
        self._missing = 0
        self._all_answered: asyncio.Future[None]

    def answered(self) -> None:
        """A frame has come."""
        self._missing -= 1
        if not self._missing:
            self._all_answered.set_result(None)

    def expect(self, frames: int) -> asyncio.Future[None]:
        """The result is there when so many more frames have come."""
        self._missing = frames
        self._all_answered = asyncio.get_running_loop().create_future()
        return self._all_answered

    async def ask_all(self, number: int) -> None:
        """Send a frame to each, and wait for an answer from each."""
        all_answered = self.expect(len(self.ends))
        for end in self.ends:
            body = msgpack.packb([number, b"."])
            end.transport.write(LENGTH.pack(len(body)) + body)
        await all_answered


class Child:
    """A process that takes lines of JSON and answers them, such as one of ``benchmarks.many_endpoints``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._commands, self._answers = process.stdin, process.stdout

    def tell(self, **command: Any) -> None:
        self._commands.write(json.dumps(command).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        async with asyncio.timeout(TIMEOUT_S):
            line = await self._answers.readline()
        if not line:
            raise RuntimeError(f"a child of the benchmark has ended: {await self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        self._commands.close()
        async with asyncio.timeout(TIMEOUT_S):
            if await self._process.wait():
                raise RuntimeError(f"a child of the benchmark ended with {self._process.returncode}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Times from the trigger until the last participant knew that it is complete; and the subtasks' notes.

    Moments are of the monotonic clock, in nanoseconds, which the processes of a machine share.
    """

    began_ns: int
    ended_ns: int
    moments: list[tuple[str, int, int]]

    @property
    def took_ms(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e6


class Crowd:
    """Both ends. Subtasks are opened in portions; subtask ``i`` is in child ``i % len(children)``."""

    def __init__(
        self,
        spark: PretendedSpark,
        runtime: CrowdRuntime,
        raw: RawCrowd,
        children: list[Child],
        coordinator: CrowdCoordinator,
    ) -> None:
        self.coordinator = coordinator
        self.runtime = runtime
        self.raw = raw
        self.children = children
        self._spark = spark
        self._opened = 0

    async def open(self, count: int) -> None:
        """Start ``count`` more subtasks, and wait until the coordinator has each one ready."""
        numbers = range(self._opened, self._opened + count)
        for number in numbers:
            self._spark.say(TaskStarted(number + 1, STAGE, 0, number, 0, False, "1", "host"))
        for place, child in enumerate(self.children):
            mine = [[number + 1, number] for number in numbers if number % len(self.children) == place]
            child.tell(do="open", tasks=mine)
        self._opened += count
        for child in self.children:
            await child.hear()
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.coordinator.gateways) < self._opened:
                self.coordinator.ready.clear()
                await self.coordinator.ready.wait()

    async def open_raw(self, count: int) -> None:
        """Open ``count`` more bare connections."""
        wanted = len(self.raw.ends) + count
        for place, child in enumerate(self.children):
            child.tell(do="raw_open", count=len(range(place, count, len(self.children))))
        for child in self.children:
            await child.hear()
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.raw.ends) < wanted:
                self.raw.connected.clear()
                await self.raw.connected.wait()

    async def connect(self, count: int) -> None:
        """Open ``count`` connections that have proved the key and send nothing more. They last some seconds."""
        self.children[0].tell(do="connect", count=count)
        await self.children[0].hear()

    async def disconnect(self) -> None:
        """Close those that ``connect`` made."""
        self.children[0].tell(do="disconnect")
        await self.children[0].hear()

    async def checkpoint(self) -> Checkpoint:
        """Take a checkpoint, and wait until the coordinator and every subtask know that it is complete."""
        self.coordinator.completed.clear()
        began = time.monotonic_ns()
        await self.runtime.checkpoint(OPERATOR, timeout_s=TIMEOUT_S)
        told = [await child.hear() for child in self.children]
        await self.coordinator.completed.wait()
        ended = max(self.coordinator.completed_ns, *(each["completed_ns"] for each in told))
        return Checkpoint(began, ended, [tuple(moment) for each in told for moment in each["moments"]])

    async def settle(self) -> None:
        """Wait until nothing is in progress: an event has gone to each subtask and was confirmed."""
        confirmations = [await gateway.send_event([TAKE]) for gateway in self.coordinator.gateways.values()]
        for confirmation in confirmations:
            await confirmation


@asynccontextmanager
async def running_crowd(
    parallelism: int,
    *,
    bare_too: bool = True,
    processes: int = CHILDREN,
    config: SidecarConfig = DEFAULTS,
    checkpoint: CheckpointConfig = CHECKPOINT,
    coordinator: CrowdCoordinator | None = None,
) -> AsyncIterator[Crowd]:
    """A streaming job of ``parallelism`` subtasks, none of which is open yet.

    ``bare_too``: there may be as many bare connections. ``processes``: how many children have the subtasks.
    """
    count = min(processes, parallelism)
    kinds = 2 if bare_too else 1
    allow_files(kinds * parallelism + OWN_FILES)
    spark, raw = PretendedSpark(), RawCrowd()
    async with AsyncExitStack() as stack:
        server = await asyncio.get_running_loop().create_server(lambda: RawEnd(raw), "127.0.0.1", 0)
        stack.callback(server.close)
        runtime = CrowdRuntime(spark, config)
        await stack.enter_async_context(runtime)
        children: list[Child] = []
        crowd = Crowd(spark, runtime, raw, children, coordinator or CrowdCoordinator())
        await runtime.coordinate(
            OPERATOR,
            crowd.coordinator,
            parallelism=parallelism,
            mode=RestoreMode.STREAMING,
            gateway=GatewayLimits(confirm_timeout_s=TIMEOUT_S),
            checkpoint=checkpoint,
        )
        spark.say(JobStarted(JOB, (STAGE,)))
        spark.say(StageSubmitted(STAGE, 0, parallelism))
        stack.callback(spark.say, JobEnded(JOB, False, "the benchmark is over"))
        host, port = runtime.address
        task = {
            "host": host,
            "port": port,
            "raw_port": server.sockets[0].getsockname()[1],
            "key": spark.keys.task_key(OPERATOR).secret.hex(),
            "operator_id": OPERATOR,
            "parallelism": parallelism,
            "mode": int(RestoreMode.STREAMING),
            "stage_id": STAGE,
            "files": (kinds + 3) * -(-parallelism // count) + OWN_FILES,
        }
        for _ in range(count):
            children.append(await stack.enter_async_context(running_child(task)))
        yield crowd


@asynccontextmanager
async def running_child(task: dict[str, Any], module: str = "benchmarks.many_endpoints") -> AsyncIterator[Child]:
    """A process of this module, which ends with its input. ``task`` is its first line: what its subtasks share."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
        limit=LINE_BYTES_MAX,
    )
    try:
        child = Child(process)
        child.tell(**task)
        yield child
        await child.end()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
