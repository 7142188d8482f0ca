"""A driver's half in this process and an executor's half in a child, over loopback TCP, without Spark.

Everything of Headgate is the real thing: server, router, bridge with its attempt ledger, barrier tracker, coordinator,
gateway; on the other side what runs inside a Spark task. Only Spark's facts (a job, a stage, a task have started) are
said by this module instead of by Spark.

Beside it, between the same two processes, stands the raw baseline: a bare ``asyncio.Protocol`` here, a blocking socket
loop there, length-prefixed msgpack between them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgpack

from actors import ActorRef, ActorSystem
from actors.coordination import (
    BarrierTrackerActor,
    OperatorConfig,
    OperatorCoordinator,
    OperatorPorts,
    OperatorStatistics,
    SubtaskGateway,
)
from actors.coordination.barrier_tracker import UNBOUNDED
from actors.coordination.messages import StartOperator
from benchmarks.raw_frames import FLOOD, LENGTH
from protocol.attempts import LedgerConfig
from protocol.facts import JobStarted, StageSubmitted, StatusReported, TaskStarted, TaskState
from spark_bridge.bridge import BridgeActor, ConnectionRouter
from spark_bridge.bridge_messages import AddOperator, BridgeMessage
from spark_bridge.facts import RelayedFact
from spark_bridge.relay import Relay
from spark_bridge.runs import RunningJobs
from spark_bridge.server import SubtaskServer
from spark_bridge.subtask.endpoint import TaskEndpoint

OPERATOR, JOB, STAGE, TASK = "bench", 1, 1, 1
READY_TIMEOUT_S = 30.0
EXIT_TIMEOUT_S = 10.0


class BenchCoordinator(OperatorCoordinator):
    """Hands its gateway out, and each event that comes to whoever waits for it."""

    def __init__(self) -> None:
        self.gateway: asyncio.Future[SubtaskGateway] = asyncio.get_running_loop().create_future()
        self.answers: dict[int, asyncio.Future[None]] = {}

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateway.set_result(gateway)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        answer = self.answers.pop(event[1], None)  # of a flood, only the last one is waited for
        if answer is not None:
            answer.set_result(None)


class RawProtocol(asyncio.Protocol):
    """The baseline's end here: ``send`` returns a future that the answer resolves."""

    def __init__(self) -> None:
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._seq = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.connected.set_result(None)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4 and len(buffer) >= 4 + (size := LENGTH.unpack_from(buffer)[0]):
            _, seq, _ = msgpack.unpackb(buffer[4 : 4 + size])
            del buffer[: 4 + size]
            answer = self._waiting.pop(seq, None)
            if answer is not None:
                answer.set_result(None)

    def send(self, kind: int, payload: Any) -> asyncio.Future[None]:
        self._seq += 1
        answer: asyncio.Future[None] = self._loop.create_future()
        self._waiting[self._seq] = answer
        body = msgpack.packb([kind, self._seq, payload])
        self._transport.write(LENGTH.pack(len(body)) + body)
        return answer

    def send_flood(self, count: int, payload: bytes) -> asyncio.Future[None]:
        """Resolved by the last of ``count`` answers."""
        answer: asyncio.Future[None] = self._loop.create_future()
        self._waiting[0] = answer
        body = msgpack.packb([FLOOD, 0, [count, payload]])
        self._transport.write(LENGTH.pack(len(body)) + body)
        return answer

    def close(self) -> None:
        self._transport.abort()


class Pair:
    """Both ends, connected and ready."""

    def __init__(self, raw: RawProtocol, coordinator: BenchCoordinator, gateway: SubtaskGateway) -> None:
        self.raw = raw
        self.coordinator = coordinator
        self.gateway = gateway


class _NoSpark:
    """A relay whose engine says that everything runs as it should."""

    async def start(self) -> None:
        """There is no bus to attach to."""

    async def close(self) -> None:
        """Nothing is open."""

    async def query_status(self, tasks: frozenset[int], jobs: frozenset[int]) -> StatusReported:
        return StatusReported(dict.fromkeys(jobs, True), dict.fromkeys(tasks, TaskState.RUNNING))

    async def kill_task(self, task_attempt_id: int, reason: str) -> None:
        raise AssertionError(f"the benchmark's task failed: {reason}")

    async def cancel_job(self, job_id: int, reason: str) -> None:
        raise AssertionError(f"the benchmark's coordinator failed: {reason}")


@dataclass(frozen=True, slots=True)
class DriverHalf:
    """What stands beside a Spark driver, for one operator of one subtask."""

    bridge: ActorRef[BridgeMessage]
    statistics: OperatorStatistics
    endpoint: TaskEndpoint


@asynccontextmanager
async def running_driver_half(
    coordinator: OperatorCoordinator, relay: Callable[[ActorRef[BridgeMessage]], Relay]
) -> AsyncIterator[DriverHalf]:
    """Put together as the sidecar does it; ``relay`` makes the relay whose facts the bridge is told."""
    secret = secrets.token_bytes(32)
    router = ConnectionRouter()
    server = SubtaskServer(router, secret)
    await server.start()
    try:
        async with ActorSystem("bench") as system:
            bridge = system.spawn(
                lambda: BridgeActor(LedgerConfig(), lambda: the_relay, running=RunningJobs()),
                name="bridge",
                mailbox=UNBOUNDED,
            )
            the_relay = relay(bridge)
            await the_relay.start()
            try:
                statistics = OperatorStatistics(OPERATOR)
                ports = OperatorPorts(
                    report=bridge.tell,
                    gateway_opened=router.gateway_opened,
                    gateway_closed=router.gateway_closed,
                    store=_none,
                    discard=_none,
                    failed=_fail,
                    store_savepoint=_none,
                    next_checkpoint_id=itertools.count(1).__next__,
                )
                tracker = system.spawn(
                    lambda: BarrierTrackerActor(coordinator, OperatorConfig(OPERATOR, 1), ports, statistics),
                    name="operator",
                    mailbox=UNBOUNDED,
                )
                router.attach(bridge)
                await tracker.ask(StartOperator, timeout_s=10)
                await bridge.ask(lambda reply_to: AddOperator(OPERATOR, 1, tracker, reply_to), timeout_s=10)
                yield DriverHalf(bridge, statistics, TaskEndpoint(*server.address, secret, OPERATOR, 1))
            finally:
                await the_relay.close()
    finally:
        await server.close()


@asynccontextmanager
async def running_pair(*, busy: bool = False) -> AsyncIterator[Pair]:
    """``busy``: the child computes pure Python all the time, and looks at its mailbox between records."""
    raw = RawProtocol()
    raw_server = await asyncio.get_running_loop().create_server(lambda: raw, "127.0.0.1", 0)
    coordinator = BenchCoordinator()
    try:
        async with running_driver_half(coordinator, lambda bridge: cast(Relay, _NoSpark())) as driver:
            for fact in (
                JobStarted(JOB, (STAGE,)),
                StageSubmitted(STAGE, 0, 1),
                TaskStarted(TASK, STAGE, 0, 0, 0),
            ):
                driver.bridge.tell(RelayedFact(fact, 0))
            task = {
                "host": driver.endpoint.host,
                "port": driver.endpoint.port,
                "raw_port": raw_server.sockets[0].getsockname()[1],
                "secret": driver.endpoint.secret.hex(),
                "operator_id": OPERATOR,
                "task_attempt_id": TASK,
                "stage_id": STAGE,
                "busy": busy,
            }
            async with _child(task):
                async with asyncio.timeout(READY_TIMEOUT_S):
                    await raw.connected
                    gateway = await coordinator.gateway
                yield Pair(raw, coordinator, gateway)
                await (await gateway.send_event("stop"))
            raw.close()
    finally:
        raw_server.close()


@asynccontextmanager
async def _child(task: dict[str, Any]) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.task_side", stdin=asyncio.subprocess.PIPE, cwd=Path(__file__).parent.parent
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.close()
        yield
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            if await process.wait():
                raise RuntimeError(f"the benchmark's child ended with {process.returncode}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _none(*_: object) -> None:
    """Nothing is stored."""


def _fail(error: BaseException) -> None:
    raise error
