# SPDX-License-Identifier: Apache-2.0

"""Large events, requests and answers between real tasks and real coordinators, over real TCP (H112 to H115)."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from actors import ActorSystem
from actors.coordination import (
    BarrierTrackerActor,
    OperatorConfig,
    OperatorCoordinator,
    OperatorPorts,
    OperatorStatistics,
    SubtaskGateway,
    parts_of,
)
from actors.coordination.engine.messages import StartOperator
from actors.coordination.engine.operator_config import UNBOUNDED
from protocol.attempts import LedgerConfig
from protocol.errors import EventEncodeError
from protocol.facts import JobStarted, StageSubmitted
from protocol.gateway.types import GatewayLimits
from protocol.wire.framing import WireLimits
from protocol.wire.keys import NO_IDENTITY, KeyRing, Purpose
from spark_bridge.bridge.actor import BridgeActor
from spark_bridge.bridge.messages import AddOperator
from spark_bridge.bridge.router import ConnectionRouter
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.server.connection import task_dialect
from spark_bridge.server.server import AuthenticatedServer, ServerConfig
from spark_bridge.subtask import RequestFailed, SubtaskOperator, TaskEndpoint, TaskIdentity, run_subtask
from tests.fuzz.driver_half import HONEST, STAGES, PlayedSpark

PATIENCE_S = 60.0
LARGE = 4 * 2**20 - 64
LARGEST = 64 * 2**20 - 64


def pattern(size: int, seed: int) -> bytes:
    """Bytes in which each place can be told from every other one."""
    block = hashlib.shake_128(bytes((seed,))).digest(2**20 + 7)
    return (block * (size // len(block) + 1))[:size]


def digest(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


class Echo(OperatorCoordinator):
    """Returns the digest of what comes, and sends what it is asked for. Events are counted."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.confirmed: list[str] = []
        self.failures: list[Any] = []

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """There is no state."""

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateway = gateway

    async def subtask_failed(self, subtask: int, attempt: int, reason: Any) -> None:
        self.failures.append(reason)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        match event:
            case ["send", int(size), int(seed)]:
                await self.gateway.send_event(["before", seed])
                await self.gateway.send_event(pattern(size, seed))
                await self.gateway.send_event(["after", seed])
            case bytes():
                self.events.append(digest(event))
            case _:
                self.events.append(event)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        match request:
            case ["make", int(size), int(seed)]:
                return pattern(size, seed)
            case _:
                return digest(request)


class World:
    """The driver's half with one operator, and the endpoint of its tasks."""

    def __init__(self, coordinator: Echo, endpoint: TaskEndpoint, statistics: OperatorStatistics) -> None:
        self.coordinator = coordinator
        self.endpoint = endpoint
        self.statistics = statistics

    async def run(self, operator: SubtaskOperator) -> list[Any]:
        """Run a task on a thread to its end."""
        identity = TaskIdentity(1, 0, STAGES[HONEST], 0)
        return await asyncio.to_thread(lambda: list(run_subtask(lambda: operator, self.endpoint, identity, ())))


class Line:
    """A line to the driver's half. ``cuts``: after how many bytes (up, down) of each connection it breaks."""

    def __init__(self, cuts: list[tuple[float, float]]) -> None:
        self.cuts = cuts
        self.connections = 0

    async def serve(self, address: tuple[str, int], reader: Any, writer: Any) -> None:
        up_max, down_max = self.cuts.pop(0) if self.cuts else (float("inf"), float("inf"))
        self.connections += 1
        further_reader, further_writer = await asyncio.open_connection(*address)

        async def carry(source: Any, sink: Any, bytes_max: float) -> None:
            carried = 0
            with suppress(ConnectionError):
                while (data := await source.read(65536)) and carried < bytes_max:
                    carried += len(data)
                    sink.write(data)
                    await sink.drain()
            writer.transport.abort()
            further_writer.transport.abort()

        await asyncio.gather(carry(reader, further_writer, up_max), carry(further_reader, writer, down_max))


@asynccontextmanager
async def a_world(
    *, cuts: list[tuple[float, float]] | None = None, event_bytes_max: int = 64 * 2**20, **limits: float
) -> AsyncIterator[tuple[World, Line]]:
    keys, wire = KeyRing(b"a secret of the test, 32 bytes.."), WireLimits.for_events(event_bytes_max)
    router = ConnectionRouter(partial(keys.attempt_token, NO_IDENTITY))
    server = AuthenticatedServer(
        router, lambda identity: keys.key(Purpose.TASKS, identity), task_dialect(wire), ServerConfig()
    )
    await server.start()
    line = Line(cuts or [])
    listener = await asyncio.start_server(partial(line.serve, server.address), "127.0.0.1", 0)
    spark, coordinator, statistics = PlayedSpark(), Echo(), OperatorStatistics(HONEST)
    try:
        async with listener, ActorSystem("large") as system:
            spark.bridge = system.spawn(
                lambda: BridgeActor(LedgerConfig(), lambda: spark, running=RunningJobs()),
                name="bridge",
                mailbox=UNBOUNDED,
            )
            config = OperatorConfig(HONEST, 1, gateway=GatewayLimits(**limits), wire_limits=wire)  # type: ignore[arg-type]

            async def nothing(*_: object) -> None:
                """Store nothing."""

            ports = OperatorPorts(
                report=spark.bridge.tell,
                gateway_opened=router.gateway_opened,
                attempt_token=router.attempt_token,
                gateway_closed=router.gateway_closed,
                store=nothing,
                discard=nothing,
                failed=coordinator.failures.append,
                store_savepoint=nothing,
                next_checkpoint_id=itertools.count(1).__next__,
            )
            tracker = system.spawn(
                lambda: BarrierTrackerActor(parts_of(coordinator), config, ports, statistics),
                name=HONEST,
                mailbox=UNBOUNDED,
            )
            await tracker.ask(StartOperator, timeout_s=PATIENCE_S)
            await spark.bridge.ask(lambda reply_to: AddOperator(HONEST, 1, tracker, reply_to), timeout_s=PATIENCE_S)
            router.attach(spark.bridge)
            spark.tell(JobStarted(1, (STAGES[HONEST],)))
            spark.tell(StageSubmitted(STAGES[HONEST], 0, 1))
            spark.introduce(HONEST, 1, 0, 0)
            host, port = listener.sockets[0].getsockname()
            endpoint = TaskEndpoint(host, port, keys.task_key(HONEST), HONEST, 1, event_bytes_max=event_bytes_max)
            yield World(coordinator, endpoint, statistics), line
            assert not coordinator.failures, coordinator.failures
            assert not spark.faults, spark.faults
    finally:
        await server.close()


class BothWays(SubtaskOperator):
    """A large event up, one down, a large request, a large answer, and small events around them."""

    def __init__(self, size: int = LARGE) -> None:
        self.size = size

    def open(self, context: Any, state: bytes | None) -> None:
        self.context = context
        self.events: list[Any] = []

    def handle_event(self, event: Any) -> None:
        self.events.append(digest(event) if isinstance(event, bytes) else event)

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        context = self.context
        context.send_event("first")
        context.send_event(pattern(self.size, 1))
        context.send_event("last")
        context.send_event(["send", self.size, 2])
        yield context.request(pattern(self.size, 3), PATIENCE_S)
        yield digest(context.request(["make", self.size, 4], PATIENCE_S))
        while len(self.events) < 3:
            context.wait_for_event(PATIENCE_S)


def _check(operator: BothWays, world: World, outputs: list[Any]) -> None:
    assert world.coordinator.events == ["first", digest(pattern(operator.size, 1)), "last"]
    assert operator.events == [["before", 2], digest(pattern(operator.size, 2)), ["after", 2]]
    assert outputs == [digest(pattern(operator.size, 3)), digest(pattern(operator.size, 4))]


@pytest.mark.parametrize("size", [LARGE, pytest.param(LARGEST, marks=pytest.mark.long)])
async def test_large_events_requests_and_answers_come_whole_and_in_order(size: int) -> None:  # H22, H112
    async with a_world() as (world, line):
        operator = BothWays(size)
        _check(operator, world, await world.run(operator))
        assert line.connections == 1


@pytest.mark.parametrize(
    "cut",
    [(LARGE // 2, float("inf")), (LARGE + LARGE // 2, float("inf")), (float("inf"), LARGE // 3)],
    ids=["event-up", "request-up", "event-down"],
)
async def test_a_connection_that_breaks_in_the_middle_delivers_once(cut: tuple[float, float]) -> None:  # H24, H115
    async with a_world(cuts=[cut]) as (world, line):
        operator = BothWays()
        _check(operator, world, await world.run(operator))
        assert line.connections == 2


async def test_too_large_an_event_is_refused_at_both_ends_and_names_the_setting() -> None:  # H62
    at_task: list[str] = []

    class TooMuch(SubtaskOperator):
        def open(self, context: Any, state: bytes | None) -> None:
            self.context = context

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            for send in (self.context.send_event, self.context.request):
                with pytest.raises(EventEncodeError) as refused:
                    send(bytes(2**20))
                at_task.append(str(refused.value))
            with pytest.raises(RequestFailed, match="exceeds the limit of 1048576: raise event_bytes_max of"):
                self.context.request(["make", 2**20, 1])
            yield self.context.request(["make", 2**20 - 5, 1])

    async with a_world(event_bytes_max=2**20) as (world, _):
        assert await world.run(TooMuch()) == [pattern(2**20 - 5, 1)]
        assert len(at_task) == 2
        assert all("exceeds the limit of 1048576: raise event_bytes_max of SidecarLimits" in text for text in at_task)
