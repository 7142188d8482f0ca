# SPDX-License-Identifier: Apache-2.0

"""The besieged driver's half: server, router, bridge, trackers, coordinators and gateways, all of them real.

It has two operators. ``honest`` has tasks that behave; its coordinator checks that each event comes once and in order.
``victim`` is the target of hostile tasks. Spark is simulated: a task exists once it is introduced, and a killed task
ends immediately.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from actors import ActorRef, ActorSystem
from actors.coordination import (
    BarrierTrackerActor,
    OperatorConfig,
    OperatorCoordinator,
    OperatorPorts,
    OperatorStatistics,
    SubtaskGateway,
    parts_of,
)
from actors.coordination.engine.messages import RequestCheckpoint, StartOperator, TrackerMessage
from actors.coordination.engine.operator_config import UNBOUNDED
from benchmarks.no_spark import QuietRelay
from protocol.attempts import LedgerConfig
from protocol.barrier_tracker import CheckpointConfig
from protocol.errors import GatewayFull
from protocol.facts import (
    EngineFact,
    JobStarted,
    StageSubmitted,
    StatusReported,
    TaskEnded,
    TaskOutcome,
    TaskPlace,
    TaskStarted,
    TaskState,
)
from protocol.gateway.types import GatewayLimits
from protocol.wire.keys import NO_IDENTITY, KeyRing, Purpose
from spark_bridge.bridge.actor import BridgeActor
from spark_bridge.bridge.messages import AddOperator, BridgeMessage
from spark_bridge.bridge.relay.records import RelayedFact
from spark_bridge.bridge.router import ConnectionRouter
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.server.connection import task_dialect
from spark_bridge.server.server import AuthenticatedServer, ServerConfig

HONEST, VICTIM = "honest", "victim"
STAGES = {HONEST: 1, VICTIM: 2}
PARALLELISM = {HONEST: 4, VICTIM: 8}
FLOOD_BYTES = 50_000
VICTIM_LIMITS = GatewayLimits(
    confirm_timeout_s=5.0,
    reconnect_timeout_s=0.5,
    events_max=256,
    bytes_max=4 * 2**20,
    upward_events_max=64,
    upward_bytes_max=2**20,
)


class PlayedSpark(QuietRelay):
    """A relay for two jobs that never end."""

    def __init__(self) -> None:
        super().__init__()
        self.bridge: ActorRef[BridgeMessage]
        self.running: dict[int, TaskStarted] = {}
        self.killed = 0
        self.faults: list[str] = []

    def tell(self, fact: EngineFact) -> None:
        self.bridge.tell(RelayedFact(fact, 0))

    def begin(self) -> None:
        for operator, stage in STAGES.items():
            self.tell(JobStarted(stage, (stage,)))
            self.tell(StageSubmitted(stage, 0, PARALLELISM[operator]))

    def introduce(self, operator: str, task_attempt_id: int, subtask: int, attempt_number: int) -> None:
        """Start a task as Spark would."""
        started = TaskStarted(task_attempt_id, STAGES[operator], 0, subtask, attempt_number)
        self.running[task_attempt_id] = started
        self.tell(started)

    def end(self, task_attempt_id: int, outcome: TaskOutcome, reason: str) -> None:
        """Report the end of a task as Spark would. Does nothing for a task that does not run."""
        started = self.running.pop(task_attempt_id, None)
        if started is not None:
            place = (started.stage_id, 0, started.partition, started.attempt_number)
            self.tell(TaskEnded(task_attempt_id, *place, outcome, reason))

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        started = self.running.get(task_attempt_id)
        if started is not None and started.stage_id == STAGES[HONEST]:
            self.faults.append(f"honest task {task_attempt_id} was killed: {reason}")
        self.killed += started is not None
        self.end(task_attempt_id, TaskOutcome.KILLED, reason)

    async def cancel_job(self, job_id: int, reason: str) -> None:
        self.faults.append(f"job {job_id} was cancelled: {reason}")

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        tasks = {id: TaskState.RUNNING if id in self.running else TaskState.UNKNOWN for id in task_attempt_ids}
        running = [self.running[id] for id in tasks if id in self.running]
        places = {started.task_attempt_id: TaskPlace(started.stage_id, started.partition) for started in running}
        return StatusReported(dict.fromkeys(job_ids, True), tasks, places)


class HonestCoordinator(OperatorCoordinator):
    """Sends back every event, and records violations (H22, H30)."""

    def __init__(self) -> None:
        self.gateways: dict[int, SubtaskGateway] = {}
        self.taken = dict.fromkeys(range(PARALLELISM[HONEST]), 0)
        self.faults: list[str] = []

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateways[subtask] = gateway

    async def subtask_failed(self, subtask: int, attempt: int, reason: Any) -> None:
        self.faults.append(f"honest subtask {subtask} has failed: {reason}")

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if event != self.taken[subtask]:
            self.faults.append(f"subtask {subtask} sent {event!r:.60}, but {self.taken[subtask]} was the next")
        self.taken[subtask] += 1
        await self.gateways[subtask].send_event(event)


class VictimCoordinator(OperatorCoordinator):
    """Accepts every event. One that asks for a flood gets one. ``largest``: the entries of the longest list."""

    def __init__(self) -> None:
        self.gateways: dict[int, SubtaskGateway] = {}
        self.events = 0
        self.largest = 0

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateways[subtask] = gateway

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        """A peer with the operator's key may pose as a task of another run, which is then served."""

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self.events += 1
        self.largest = max(self.largest, len(event) if isinstance(event, list) else 0)
        gateway = self.gateways.get(subtask)  # a restored event may be of any subtask (H52)
        if event == "flood" and gateway is not None:
            with suppress(GatewayFull):
                for _ in range(200):
                    gateway.send_event_nowait(bytes(FLOOD_BYTES), loss_tolerant=True)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return request

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b""


class DriverHalf:
    """The system under attack, and its simulated surroundings."""

    def __init__(self, server: AuthenticatedServer, router: ConnectionRouter, spark: PlayedSpark) -> None:
        self.server = server
        self.router = router
        self.spark = spark
        self.honest = HonestCoordinator()
        self.victim = VictimCoordinator()
        self.trackers: dict[str, ActorRef[TrackerMessage]] = {}
        self.checkpoints = {"completed": 0, "failed": 0}

    @property
    def faults(self) -> list[str]:
        """Everything that happened and must not."""
        return self.honest.faults + self.spark.faults

    async def add(self, system: ActorSystem, operator: str) -> None:
        coordinator = self.honest if operator == HONEST else self.victim
        limits = GatewayLimits() if operator == HONEST else VICTIM_LIMITS
        # A hostile task may lie about its own snapshot, which fails that checkpoint of the same operator.
        checkpoint = CheckpointConfig() if operator == HONEST else CheckpointConfig(tolerated_failures=2**31)
        config = OperatorConfig(operator, PARALLELISM[operator], gateway=limits, checkpoint=checkpoint)
        ports = OperatorPorts(
            report=self.spark.bridge.tell,
            gateway_opened=self.router.gateway_opened,
            attempt_token=self.router.attempt_token,
            gateway_closed=self.router.gateway_closed,
            store=_nothing,
            discard=_nothing,
            failed=lambda error: self.spark.faults.append(f"{operator} has failed: {error!r}"),
            store_savepoint=_nothing,
            next_checkpoint_id=itertools.count(1).__next__,
        )
        statistics = OperatorStatistics(operator)
        tracker = system.spawn(
            lambda: BarrierTrackerActor(parts_of(coordinator), config, ports, statistics),
            name=operator,
            mailbox=UNBOUNDED,
        )
        self.trackers[operator] = tracker
        await tracker.ask(StartOperator, timeout_s=60.0)
        parallelism = PARALLELISM[operator]
        await self.spark.bridge.ask(
            lambda reply_to: AddOperator(operator, parallelism, tracker, reply_to), timeout_s=10
        )

    async def checkpoint(self, operator: str, timeout_s: float) -> None:
        """Request a checkpoint; among hostile tasks it may fail."""
        try:
            await self.trackers[operator].ask(RequestCheckpoint, timeout_s=timeout_s)
        except Exception:
            self.checkpoints["failed"] += 1
        else:
            self.checkpoints["completed"] += 1


@asynccontextmanager
async def running_driver_half(keys: KeyRing, config: ServerConfig) -> AsyncIterator[DriverHalf]:
    """Assemble the driver's half as the sidecar does."""
    router = ConnectionRouter(partial(keys.attempt_token, NO_IDENTITY))
    server = AuthenticatedServer(router, lambda identity: keys.key(Purpose.TASKS, identity), task_dialect(), config)
    spark = PlayedSpark()
    await server.start()
    try:
        async with ActorSystem("besieged") as system:
            # Each hostile task may have to be killed, and all of them may be attempts of one subtask.
            ledger = LedgerConfig(heal_after_s=0.5, query_every_s=0.5, give_up_after_s=2.0, attempts_max=2**31)
            spark.bridge = system.spawn(
                lambda: BridgeActor(ledger, lambda: spark, running=RunningJobs()), name="bridge", mailbox=UNBOUNDED
            )
            half = DriverHalf(server, router, spark)
            for operator in STAGES:
                await half.add(system, operator)
            router.attach(spark.bridge)
            spark.begin()
            yield half
    finally:
        await server.close()


async def _nothing(*_: object) -> None:
    """Store nothing."""
