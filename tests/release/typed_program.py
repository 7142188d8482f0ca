# SPDX-License-Identifier: Apache-2.0

"""A user's program, for type checkers: with the wheel installed it passes mypy --strict and pyright's strict mode.

``make release`` checks a copy of it outside of the repository. It is not meant to be run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_type

from pyspark.sql import SparkSession

import headgate
from headgate import (
    NO_RESTART,
    AttachedSidecar,
    CheckpointConfig,
    CheckpointStorage,
    CoordinatorContext,
    ExponentialDelay,
    FailureKind,
    FailureReason,
    FixedDelay,
    GatewayLimits,
    HeadgateError,
    LedgerConfig,
    OperatorCoordinator,
    OperatorHandle,
    RecreateOnReset,
    Request,
    Sidecar,
    SidecarConfig,
    SidecarLimits,
    SidecarRuntime,
    SourceCoordinator,
    SplitReader,
    StaticSplitEnumerator,
    SubtaskContext,
    SubtaskGateway,
    SubtaskOperator,
)
from headgate.actors import Actor, ActorContext, ActorRef, ActorSystem, AskTimeout, Reply
from headgate.actors.testing import deterministic_system, settle
from headgate.errors import (
    CheckpointDeclinedByOperator,
    CheckpointFailed,
    ConfirmationTimeout,
    GatewayFull,
    OutputNotCommitted,
    RequestFailed,
    StorageError,
)
from headgate.sinks import FileSink, TwoPhaseSinkCoordinator, TwoPhaseSinkOperator
from headgate.sources import SplitEnumerator, SplitEnumeratorContext
from headgate.testing import running_operator
from headgate.types import (
    AsyncOperatorHandle,
    CompletedCheckpoint,
    Confirmation,
    ExecutionAttempt,
    LiveGateways,
    RestoreMode,
)


class Rules(OperatorCoordinator):
    """Sends its rule to each task that is ready, and counts what the tasks report."""

    def __init__(self, rule: str = "first") -> None:
        self._rule = rule
        self._seen = 0

    async def start(self, context: CoordinatorContext) -> None:
        self._context = context
        context.call_later(1.0, self._remind)
        if context.mode is RestoreMode.STREAMING:
            context.log.info("streaming", operator=context.operator_id, parallelism=context.parallelism)

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        attempt: ExecutionAttempt = gateway.attempt
        try:
            confirmation: Confirmation = gateway.send_event_nowait({"rule": self._rule, "to": str(attempt)})
        except GatewayFull:
            confirmation = await gateway.send_event({"rule": self._rule})
        try:
            await confirmation
        except ConfirmationTimeout as error:
            self._context.fail_job(error)

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        if reason.kind is FailureKind.GLOBAL_FAILURE:
            self._context.log.warning("job failed", reason=str(reason))

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self._seen += int(event)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return self._context.store.get(str(request))

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return str(self._seen).encode()

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self._seen = int(state or 0)

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._context.log.info("complete", checkpoint_id=checkpoint_id)

    async def _remind(self) -> None:
        gateways: LiveGateways = self._context.gateways
        confirmations: tuple[Confirmation, ...] = await gateways.broadcast("again", loss_tolerant=True)
        ready: tuple[int, ...] = gateways.ready
        self._context.log.info("reminded", ready=ready, count=len(confirmations))
        gateways.when_all_ready(self._remind)


class Apply(SubtaskOperator):
    """Applies the rule to its records."""

    context: SubtaskContext
    rule: str = ""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.count = int(state or 0)

    def handle_event(self, event: Any) -> None:
        self.rule = str(event)

    def process(self, records: Iterator[Any]) -> Iterator[tuple[str, Any]]:
        for record in records:
            self.count += 1
            self.context.send_event(1)
            yield self.rule, record
        try:
            self.rule = str(self.context.request("last", timeout_s=5.0))
        except RequestFailed:
            self.rule = "none"

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        if not self.rule:
            raise CheckpointDeclinedByOperator("no rule yet")
        return str(self.count).encode()


@headgate.event
@dataclass(frozen=True)
class NewLimit:
    limit: int


@headgate.event("report")
@dataclass(frozen=True)
class Report:
    above: int


@headgate.event
@dataclass(frozen=True)
class Grant:
    permits: int


@headgate.event
@dataclass(frozen=True)
class Ask(Request[Grant]):
    """A request whose answer is a ``Grant``."""

    permits: int


class LimitCoordinator(OperatorCoordinator[Report, NewLimit]):
    """Knows the type of what it receives, and of what it may send."""

    above = 0

    async def handle_request(self, subtask: int, attempt: int, request: Ask) -> Grant | headgate.Reply[Grant]:
        if request.permits < 10:
            return Grant(request.permits)
        reply = headgate.Reply[Grant]()
        reply.answer(Grant(10))
        reply.answer("ten")  # type: ignore[arg-type]
        return reply

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway[NewLimit]) -> None:
        await gateway.send_event(NewLimit(3))
        gateway.send_event_nowait("no limit")  # type: ignore[arg-type]

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Report) -> None:
        assert_type(event.above, int)
        self.above += event.above


class Above(SubtaskOperator[NewLimit, Report]):
    """The other half: the events of the two fit together."""

    limit = 0

    def open(self, context: SubtaskContext[Report], state: bytes | None) -> None:
        self.context = context

    def handle_event(self, event: NewLimit) -> None:
        self.limit = event.limit

    def process(self, records: Iterator[Any]) -> None:
        self.context.send_event(Report(sum(record > self.limit for record in records)))
        self.context.send_event(NewLimit(1))  # type: ignore[arg-type]
        assert_type(self.context.request(Ask(3)), Grant)
        limit: NewLimit = self.context.request(Ask(3))  # type: ignore[assignment]
        self.handle_event(limit)


class WrongEvent(SubtaskOperator[NewLimit, Report]):
    def handle_event(self, event: Report) -> None:  # type: ignore[override]
        pass


class TakesReports(SubtaskOperator[Report, Report]):
    """Handles other events than a ``LimitCoordinator`` sends."""


class SendsLimits(SubtaskOperator[NewLimit, NewLimit]):
    """Sends other events than a ``LimitCoordinator`` receives."""


class TakesMore(SubtaskOperator[NewLimit | Report, Report]):
    """Handles more than a ``LimitCoordinator`` sends, which fits."""


def above(context: SubtaskContext[Report], records: Iterator[int], limit: int = 0) -> Iterator[int]:
    context.send_event(Report(limit))
    yield from (record for record in records if record > limit)


def sends_limits(context: SubtaskContext[NewLimit], records: Iterator[int]) -> None:
    context.send_event(NewLimit(sum(records)))


def halves(records: Iterator[int]) -> Iterator[float]:
    return (record / 2 for record in records)


class Numbers(SplitReader):
    def read_split(self, number: int) -> Iterable[int]:
        return [number, number + 1]


class Growing(SplitEnumerator):
    """Gives each subtask its own number."""

    async def start(self, context: SplitEnumeratorContext) -> None:
        self._context = context

    async def handle_split_request(self, subtask: int) -> None:
        await self._context.assign_splits(subtask, [subtask])


def config(directory: str) -> SidecarConfig:
    return SidecarConfig(
        storage=directory, gateway=GatewayLimits(confirm_timeout_s=5.0), ledger=LedgerConfig(attempts_max=3)
    )


def newest(directory: str) -> CompletedCheckpoint | None:
    try:
        return CheckpointStorage(directory).latest("rules")
    except StorageError:
        return None


def apply_rules(spark: SparkSession, directory: str) -> list[tuple[str, int]]:
    with Sidecar(spark, config(directory)) as sidecar:
        handle: OperatorHandle = sidecar.coordinate(
            "rules",
            lambda: Rules("strict"),
            parallelism=2,
            mode="streaming",
            checkpoint=CheckpointConfig(interval_s=1.0),
        )
        rows = spark.sparkContext.parallelize(range(10), 2)

        def collect() -> list[tuple[str, int]]:
            return rows.mapPartitions(handle.subtask(Apply)).collect()

        try:
            result = sidecar.run(collect, restart=ExponentialDelay(restarts_max=3))
            checkpoint_id: int = sidecar.checkpoint("rules")
            print(checkpoint_id, handle.failure, handle.statistics(), sidecar.request("rules", "count"))
        except (CheckpointFailed, AskTimeout, OutputNotCommitted) as error:
            raise RuntimeError("no result") from error
    return result


def read_numbers(spark: SparkSession) -> list[int]:
    with Sidecar(spark) as sidecar:
        source = SourceCoordinator(lambda state: StaticSplitEnumerator(range(10), state))
        job = sidecar.coordinate("numbers", source, parallelism=2, mode=RestoreMode.BATCH)
        growing = sidecar.coordinate("growing", lambda: SourceCoordinator(lambda state: Growing()), parallelism=2)
        sidecar.coordinate("again", RecreateOnReset(Rules), parallelism=2)
        slots = spark.sparkContext.parallelize(range(2), 2)
        slots.foreachPartition(growing.subtask(Numbers))
        job.run(Above)  # type: ignore[arg-type]
        again: list[int] = job.run(Numbers, restart=FixedDelay(2, 0.5))
        return again + sidecar.run(lambda: slots.mapPartitions(job.subtask(Numbers)).collect(), restart=FixedDelay(2))


def count_above(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("limit", LimitCoordinator, parallelism=2)
        assert_type(handle, OperatorHandle[Report, NewLimit])
        made = sidecar.coordinate("made", partial(LimitCoordinator), parallelism=2)
        kept = sidecar.coordinate("kept", RecreateOnReset(LimitCoordinator), parallelism=2)
        assert_type([handle, made, kept], list[OperatorHandle[Report, NewLimit]])
        rows = spark.sparkContext.parallelize(range(10), 2)
        rows.foreachPartition(handle.subtask(Above))
        rows.foreachPartition(handle.subtask(TakesMore))
        rows.foreachPartition(handle.subtask(above, limit=3))
        rows.foreachPartition(handle.subtask(TakesReports))  # type: ignore[arg-type]
        rows.foreachPartition(handle.subtask(SendsLimits))  # type: ignore[arg-type]
        rows.foreachPartition(handle.subtask(Numbers))  # type: ignore[arg-type]
        rows.foreachPartition(handle.subtask(Report))  # type: ignore[arg-type]
        rows.foreachPartition(handle.subtask(sends_limits))  # type: ignore[arg-type]
        handle.run(TakesReports)  # type: ignore[arg-type]
        handle.run(LimitCoordinator)  # type: ignore[arg-type]
        assert_type(handle.run(above, range(3)), list[int])
        assert_type(handle.run(halves, [1, 2]), list[float])
        without = sidecar.coordinate("without", parallelism=2)
        assert_type(without, OperatorHandle)
        assert_type(without.run(halves), list[float])


def write_files(spark: SparkSession, directory: str) -> None:
    with Sidecar(spark) as sidecar:
        sink = FileSink(directory)
        job = sidecar.coordinate("files", lambda: TwoPhaseSinkCoordinator(sink), parallelism=1, mode="streaming")
        rows = spark.sparkContext.parallelize(["a", "b"], 1)
        sidecar.run(lambda: rows.foreachPartition(job.subtask(TwoPhaseSinkOperator, sink)), restart=NO_RESTART)


def in_a_notebook(spark: SparkSession) -> OperatorHandle:
    sidecar: Sidecar = headgate.start(spark, SidecarConfig(limits=SidecarLimits(shutdown_timeout_s=5.0)), name="rules")
    handle: OperatorHandle = sidecar.coordinate("rules", Rules, parallelism=2, replace=True)
    sidecar.stop()
    headgate.stop("rules")
    return handle


async def on_my_own_loop(spark: SparkSession) -> OperatorHandle:
    async with Sidecar(spark) as runtime:
        limit = await runtime.coordinate("limit", LimitCoordinator, parallelism=2)
        assert_type(await limit.run(halves, [1]), list[float])
        await limit.run(TakesReports)  # type: ignore[arg-type]
        return await coordinate_rules(runtime)


async def coordinate_rules(runtime: SidecarRuntime) -> AsyncOperatorHandle:
    return await runtime.coordinate("rules", Rules, parallelism=2)


async def test_limits() -> None:
    async with running_operator(LimitCoordinator, parallelism=1) as world:
        await world.launch_operator(0, Above, [1, 2])


def attach(spark: SparkSession, secret_file: str) -> OperatorHandle:
    with AttachedSidecar(spark, "127.0.0.1:7650", secret_file=secret_file) as sidecar:
        return sidecar.operator("rules")


@dataclass(frozen=True)
class HowMany:
    reply: Reply[int]


class Count(Actor[HowMany | str]):
    """An actor without Spark."""

    def __init__(self) -> None:
        self.words = 0

    async def receive(self, context: ActorContext[HowMany | str], message: HowMany | str) -> None:
        match message:
            case HowMany(reply):
                reply.answer(self.words)
            case str():
                self.words += len(message.split())


async def count_words() -> int:
    async with ActorSystem("words") as system:
        counter: ActorRef[HowMany | str] = system.spawn(Count, name="count")
        counter.tell("two words")
        return await counter.ask(HowMany, timeout_s=1.0)


async def count_in_virtual_time() -> None:
    async with deterministic_system() as kit:
        counter = kit.system.spawn(Count)
        counter.tell("one")
        await settle()


def main() -> int:
    print(headgate.__version__)
    try:
        apply_rules(SparkSession.builder.getOrCreate(), "/tmp/checkpoints")
    except HeadgateError as error:
        print(error)
        return 1
    return 0
