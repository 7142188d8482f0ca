# SPDX-License-Identifier: Apache-2.0

"""One operator's actors in a world without Spark: a deterministic system, in-memory tasks, and the test as ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import anyio

from actors import ActorRef, Reply
from actors.coordination import (
    BarrierTrackerActor,
    CheckpointFailed,
    OperatorConfig,
    OperatorCoordinator,
    OperatorPorts,
    OperatorStatistics,
    Parts,
    RecreateOnReset,
    parts_of,
)
from actors.coordination.engine.barrier_tracker import UNBOUNDED
from actors.coordination.engine.inputs import BatchInput, RestoredInput
from actors.coordination.engine.messages import (
    AnnounceBatch,
    AskLabelledWork,
    AttemptConnection,
    AwaitSettled,
    ClientRequest,
    GatewayMessage,
    LabelledWork,
    LedgerDecided,
    RequestCheckpoint,
    Settled,
    StartOperator,
    TrackerMessage,
)
from actors.coordination.engine.operator_config import BarrierInjector
from actors.testing import Candidate, DeterministicKit, Schedule, deterministic_system
from headgate.testing import Answer as PublicAnswer
from headgate.testing import RecordingCoordinator
from headgate.testing._recording import Call, Method
from protocol.attempts import (
    AttemptAccepted,
    Decision,
    FailureKind,
    FailureReason,
    LedgerInput,
    OperatorOpened,
    OperatorReset,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.barrier_tracker import CheckpointConfig, CompletedCheckpoint
from protocol.facts import StageLook
from protocol.gateway.types import GatewayLimits
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import RestoreMode
from tests.actors.coordination.executor import MemoryConnection, Task

T = TypeVar("T")

Given = OperatorCoordinator | RecreateOnReset | Parts
"""The own part of an operator, or all of its parts."""

__all__ = [
    "Answer",
    "Call",
    "Method",
    "RecordingCoordinator",
    "World",
    "raising",
    "running_operator",
    "running_tasks",
    "the_turn_of",
]


class Answer(PublicAnswer[Any]):
    """An answer with its value or error in a list, which is empty while the answer is pending."""

    @property
    def values(self) -> list[Any]:
        return [self.value] if self.done and self.error is None else []

    @property
    def errors(self) -> list[BaseException]:
        return [] if self.error is None else [self.error]

    def reason(self) -> str:
        """Return why the requested checkpoint failed."""
        assert isinstance(self.error, CheckpointFailed)
        return str(self.error)


class World:
    """The operator under test, and everything around it."""

    def __init__(self, kit: DeterministicKit, given: Given, config: OperatorConfig) -> None:
        self.kit = kit
        self.config = config
        parts = given if isinstance(given, Parts) else parts_of(given)
        self._own = parts[0]
        self.statistics = OperatorStatistics(config.operator_id)
        self.reports: list[LedgerInput] = []  # inputs of the ledger, except OperatorOpened
        self.failures: list[BaseException] = []
        self.stored: list[CompletedCheckpoint] = []
        self.savepoints: list[tuple[str, CompletedCheckpoint]] = []  # with the requested directory
        self.next_id = 1 if config.restored is None else config.restored.checkpoint_id + 1
        self.no_ids: Exception | None = None  # raised by the storage if an id is requested
        self.discarded: list[int] = []
        self.completed: list[int] = []
        self.shown: list[str] = []  # the steps that the engine's side is shown
        self.on_store: Method | None = None  # awaited in the storage, before the write
        self.on_discard: Method | None = None
        self.look = StageLook()  # the result of a look at the current run
        self.tasks: list[Task] = []
        self.task_type: type[Task] = Task
        self.gateways: dict[int, ActorRef[GatewayMessage]] = {}  # open ones, by task attempt id
        kit.outside = self._read
        self._connections = 0
        self._numbers: dict[int, int] = {}
        self._run_is_on = False
        self.action = ""  # the id of the call of an action that the next run belongs to
        ports = OperatorPorts(
            report=self._hear_report,
            gateway_opened=self._gateway_opened,
            gateway_closed=lambda attempt: self.gateways.__delitem__(attempt.task_attempt_id),
            store=self._store,
            discard=self._discard,
            failed=self.failures.append,
            store_savepoint=self._store_savepoint,
            next_checkpoint_id=self._next_checkpoint_id,
            look_at_run=self._look_at_run,
            observe=lambda step, now: self.shown.append(type(step).__name__),
            **{"completed": self.completed.append, **self._more_ports()},
        )
        self.tracker: ActorRef[TrackerMessage] = kit.system.spawn(
            lambda: BarrierTrackerActor(parts, config, ports, self.statistics), name="operator", mailbox=UNBOUNDED
        )

    def _more_ports(self) -> dict[str, Any]:
        """Ports that a test adds."""
        return {}

    async def _look_at_run(self, run_id: int) -> StageLook:
        return self.look

    @property
    def coordinator(self) -> RecordingCoordinator:
        coordinator = self._own.coordinator
        assert isinstance(coordinator, RecordingCoordinator)
        return coordinator

    # --- time and traffic -----------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until actors, connections and responsive operators have nothing left to do."""
        await self.kit.run_until_idle()

    async def advance(self, by_s: float) -> None:
        await self.kit.advance(by_s)

    def _read(self) -> bool:
        return sum(task.read() for task in self.tasks) > 0  # each of them, not only the first that has something

    def connection(self) -> MemoryConnection:
        self._connections += 1
        return MemoryConnection(self._connections)

    # --- the test as ledger ---------------------------------------------------------------------------------------

    def decide(self, decision: Decision, connection: AttemptConnection | None = None) -> None:
        self.tracker.tell(LedgerDecided(decision, None, connection))

    def accept(self, subtask: int) -> Task:
        """Register the next attempt of a subtask. It opens and becomes ready by itself.

        A run starts with the first attempt that registers.
        """
        self._begin_run()
        number = self._numbers[subtask] = self._numbers.get(subtask, -1) + 1
        attempt = ExecutionAttempt(self.config.operator_id, subtask, number, 1000 * (subtask + 1) + number)
        connection = self.connection()
        task = self.task_type(attempt, connection, self.kit.clock)
        self.tasks.append(task)
        self.decide(AttemptAccepted(attempt, self.config.mode, 1, connection.connection_id), connection)
        return task

    def _begin_run(self) -> None:
        if not self._run_is_on:
            self._run_is_on = True
            self.tracker.tell(LedgerDecided(RunStarted(self.config.operator_id, 1), action=self.action))

    async def running(self, *subtasks: int) -> list[Task]:
        """Return attempts that are ready, one for each subtask."""
        tasks = [self.accept(subtask) for subtask in subtasks]
        await self.settle()
        return tasks

    def fail(self, task: Task, kind: FailureKind = FailureKind.FAILED, *, reset: bool = True) -> None:
        self.decide(SubtaskFailed(task.attempt, FailureReason(kind, "by the test")))
        if reset:
            self.reset_subtask(task.attempt.subtask)

    def reset_subtask(self, subtask: int) -> None:
        self.decide(SubtaskReset(self.config.operator_id, subtask))

    def finish(self, task: Task) -> None:
        self.decide(SubtaskFinished(task.attempt))

    def reset(self, cause: str = "by the test") -> None:
        """Reset the operator; if no run is in progress, this is the beginning of the next one."""
        self._begin_run()
        self.decide(OperatorReset(self.config.operator_id, cause))

    def end_run(self, succeeded: bool = True, reason: str = "") -> None:
        self._run_is_on = False
        self.decide(RunEnded(self.config.operator_id, 1, succeeded, reason))

    async def checkpoint(self, savepoint_directory: str | None = None) -> Answer:
        """Request a checkpoint, and let everything happen that needs no time to pass."""
        answer = self.begin_checkpoint(savepoint_directory)
        await self.settle()
        return answer

    def begin_checkpoint(self, savepoint_directory: str | None = None) -> Answer:
        answer = Answer()
        self.tracker.tell(RequestCheckpoint(cast("Reply[int]", answer), savepoint_directory))
        return answer

    async def ask_client_request(self, request: Any) -> Answer:
        answer = Answer()
        self.tracker.tell(ClientRequest(request, cast("Reply[Any]", answer)))
        await self.settle()
        return answer

    async def await_settled(self) -> Answer:
        answer = Answer()
        self.tracker.tell(AwaitSettled(cast("Reply[Settled]", answer)))
        await self.settle()
        return answer

    def announce(self, batch: BatchInput, *, adopted: bool = False) -> None:
        self.tracker.tell(AnnounceBatch(batch, adopted))

    async def labelled_work(self) -> LabelledWork:
        answer = Answer()
        self.tracker.tell(AskLabelledWork(cast("Reply[LabelledWork]", answer)))
        await self.settle()
        (work,) = answer.values
        return cast("LabelledWork", work)

    async def start(self) -> None:
        await self.kit.drive(self.tracker.ask(StartOperator, timeout_s=1.0))

    async def stop(self) -> None:
        """Stop the operator, as a sidecar that releases it does."""
        await self.kit.drive(self.kit.system.stop(self.tracker))

    def reported(self, kind: type[T]) -> list[T]:
        return [report for report in self.reports if isinstance(report, kind)]

    # --- ports ----------------------------------------------------------------------------------------------------

    def _hear_report(self, report: LedgerInput) -> None:
        if isinstance(report, OperatorOpened):
            task = next(task for task in self.tasks if task.attempt.task_attempt_id == report.task_attempt_id)
            self.decide(SubtaskReady(task.attempt))
        else:
            self.reports.append(report)

    def _gateway_opened(
        self, attempt: ExecutionAttempt, ref: ActorRef[GatewayMessage], connection: AttemptConnection
    ) -> None:
        self.gateways[attempt.task_attempt_id] = ref
        next(task for task in self.tasks if task.attempt == attempt).gateway_ref = ref

    async def _store(self, checkpoint: CompletedCheckpoint) -> None:
        if self.on_store is not None:
            await self.on_store(checkpoint)
        self.stored.append(checkpoint)

    async def _store_savepoint(self, checkpoint: CompletedCheckpoint, directory: str) -> None:
        if self.on_store is not None:
            await self.on_store(checkpoint)
        self.savepoints.append((directory, checkpoint))

    def _next_checkpoint_id(self) -> int:
        if self.no_ids is not None:
            raise self.no_ids
        self.next_id += 1
        return self.next_id - 1

    async def _discard(self, checkpoint_id: int) -> None:
        self.discarded.append(checkpoint_id)
        if self.on_discard is not None:
            await self.on_discard(checkpoint_id)


def the_turn_of(*names: str) -> Schedule:
    """Schedule these actors before all others, in the order of their names here."""

    def choose(candidates: Sequence[Candidate]) -> int:
        ranks = [names.index(candidate.actor) if candidate.actor in names else len(names) for candidate in candidates]
        return ranks.index(min(ranks))

    return choose


def raising(error: BaseException) -> Method:
    async def method(*args: Any) -> None:
        raise error

    return method


def waiting_for(gate: anyio.Event | asyncio.Event) -> Method:
    async def method(*args: Any) -> None:
        await gate.wait()

    return method


@asynccontextmanager
async def running_operator(
    coordinator: Given | None = None,
    *,
    parallelism: int = 2,
    mode: RestoreMode = RestoreMode.STREAMING,
    seed: int = 0,
    schedule: Schedule | None = None,
    started: bool = True,
    tolerated_failures: int = 10,
    checkpoint_timeout_s: float = 60.0,
    snapshot_timeout_s: float = 5.0,
    interval_s: float | None = None,
    min_pause_s: float = 0.0,
    concurrent_max: int = 1,
    restored: CompletedCheckpoint | None = None,
    inject_barrier: BarrierInjector | None = None,
    hold_events: bool = True,
    gateways_per_turn: int = 16,
    restored_input: RestoredInput | None = None,
    **limits: Any,
) -> AsyncIterator[World]:
    """Yield a started operator in a system whose order of delivery follows from ``seed``.

    Its coordinator is a ``RecordingCoordinator``, unless the test brings one. The first run has the same input as a
    ``restored`` checkpoint without a label, unless the test says otherwise.
    """
    if restored is not None and not restored.label and restored_input is None:
        restored_input = "same"
    checkpoint = CheckpointConfig(
        checkpoint_timeout_s,
        tolerated_failures,
        interval_s=interval_s,
        min_pause_s=min_pause_s,
        concurrent_max=concurrent_max,
        hold_events=hold_events,
    )
    config = OperatorConfig(
        "words",
        parallelism,
        mode,
        GatewayLimits(**limits),
        checkpoint,
        snapshot_timeout_s,
        restored,
        inject_barrier,
        gateways_per_turn=gateways_per_turn,
        restored_input=restored_input,
    )
    async with deterministic_system(seed=seed, schedule=schedule) as kit:
        world = World(kit, coordinator or RecordingCoordinator(), config)
        if started:
            await world.start()
        yield world


@asynccontextmanager
async def running_tasks(
    count: int, coordinator: Given | None = None, *, task_type: type[Task] = Task, **config: Any
) -> AsyncIterator[tuple[World, list[Task]]]:
    """Yield a started operator whose first ``count`` subtasks have a ready attempt each. See ``running_operator``."""
    async with running_operator(coordinator, **config) as world:
        world.task_type = task_type
        yield world, await world.running(*range(count))
