# SPDX-License-Identifier: Apache-2.0

"""A simulated Spark application around a sidecar's real bridge, ledger and operators: facts in, kills out.

Each job is a stage with as many tasks as the operator has subtasks. The test plays Spark: it launches tasks, ends them
and starts retries. Only the answers to commands are automatic: a killed task ends, and a cancelled job ends with all
its tasks. ``headgate.testing`` simulates more of Spark, without the bridge.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from actors import ActorRef, Reply
from actors.coordination import OperatorConfig, OperatorCoordinator, parts_of
from actors.coordination.engine.messages import AttemptConnection, GatewayMessage, RequestCheckpoint, TrackerMessage
from actors.coordination.engine.operator_config import UNBOUNDED
from actors.testing import DeterministicKit, deterministic_system
from protocol.attempts import LedgerConfig
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.facts import (
    EngineFact,
    JobEnded,
    JobStarted,
    StageCompleted,
    StageSubmitted,
    StatusReported,
    TaskEnded,
    TaskOutcome,
    TaskPlace,
    TaskStarted,
)
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import Downward, Refused, Register, RestoreMode
from spark_bridge.bridge.actor import BridgeActor
from spark_bridge.bridge.messages import BridgeMessage, RegistrationReceived
from spark_bridge.bridge.relay.records import RelayedFact
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.operators import Operators
from tests.actors.coordination.executor import MemoryConnection, Task
from tests.actors.coordination.operator_world import Answer, Method, RecordingCoordinator

OPERATOR = "words"


class SparkTask(Task):
    """A task of the simulated Spark. Until it is registered it is deploying; ``attempt`` is known afterwards."""

    def __init__(self, start: TaskStarted, clock: Any) -> None:
        self.line = MemoryConnection(start.task_attempt_id)
        attempt = ExecutionAttempt(OPERATOR, start.partition, start.attempt_number, start.task_attempt_id)
        super().__init__(attempt, self.line, clock)
        self.start = start
        self.refused: Refused | None = None
        self.running = True

    def _take(self, message: Downward) -> None:
        if isinstance(message, Refused):
            self.refused = message
        else:
            super()._take(message)


class MemoryStorage:
    """Replaces a storage session and each operator's port to it. ``latest`` may exist from the start."""

    def __init__(self, latest: CompletedCheckpoint | None) -> None:
        self.stored: list[CompletedCheckpoint] = []
        self._latest = latest
        self._highest_id = 0 if latest is None else latest.checkpoint_id

    def port(self, operator_id: str, mode: RestoreMode) -> MemoryStorage:
        return self

    def next_checkpoint_id(self) -> int:
        self._highest_id += 1
        return self._highest_id

    async def restore_latest(self, *, allow_older: bool) -> CompletedCheckpoint | None:
        return self._latest

    async def store(self, checkpoint: CompletedCheckpoint) -> None:
        self.stored.append(checkpoint)

    def completed(self, checkpoint_id: int) -> None:
        """Do nothing: this storage retains no checkpoints."""

    async def discard(self, checkpoint_id: int) -> None:
        raise AssertionError("no scenario takes a checkpoint back")

    def states(self) -> None:
        """Return None: no task stores files."""

    def name_savepoint(self, checkpoint_id: int, directory: str) -> str:
        raise AssertionError("no scenario takes a savepoint")

    async def store_savepoint(self, directory: str, checkpoint: CompletedCheckpoint) -> str:
        raise AssertionError("no scenario takes a savepoint")

    async def discard_savepoint(self, checkpoint_id: int) -> None:
        raise AssertionError("no scenario takes a savepoint")


class Application:
    """Operators of ``parallelism`` subtasks, and the jobs that run them. It also replaces relay and router."""

    def __init__(
        self, kit: DeterministicKit, parallelism: int, mode: RestoreMode, restored: CompletedCheckpoint | None
    ) -> None:
        self.kit = kit
        self.parallelism = parallelism
        self.mode = mode
        self.storage = MemoryStorage(restored)
        self.tasks: dict[int, SparkTask] = {}
        self.cancelled: list[int] = []  # jobs
        kit.outside = self._read
        self._trackers: dict[str, ActorRef[TrackerMessage]] = {}
        self._job_id = 0
        self._stage_attempt = 0
        self._task_attempt_id = 100
        self.bridge_ref: ActorRef[BridgeMessage] = kit.system.spawn(
            lambda: BridgeActor(LedgerConfig(), lambda: cast(Any, self)), name="bridge", mailbox=UNBOUNDED
        )
        self.operators = Operators(
            SidecarConfig(), kit.system, self.bridge_ref, cast(Any, self), cast(Any, self.storage)
        )

    # --- the driver's program -------------------------------------------------------------------------------------

    async def coordinate(self, coordinator: OperatorCoordinator, operator_id: str = OPERATOR) -> None:
        config = OperatorConfig(operator_id, self.parallelism, self.mode)
        operator = await self.kit.drive(self.operators.add(config, parts_of(coordinator), "latest"))
        self._trackers[operator_id] = operator.tracker_ref

    async def release(self, operator_id: str = OPERATOR) -> None:
        await self.kit.drive(self.operators.remove(operator_id))

    async def checkpoint(self) -> Answer:
        """Request a checkpoint, and let it proceed as far as it can."""
        answer = Answer()
        self._trackers[OPERATOR].tell(RequestCheckpoint(cast("Reply[int]", answer)))
        await self.settle()
        return answer

    async def request(self, request: Any, operator_id: str = OPERATOR) -> Any:
        return await self.kit.drive(self.operators.request(operator_id, request, timeout_s=1.0))

    # --- Spark ----------------------------------------------------------------------------------------------------

    def start_job(self, *, barrier: bool = False) -> None:
        """Start a user's action; a second one computes its lineage in a new stage (H55)."""
        self._job_id += 1
        self._stage_attempt = 0
        self.post(JobStarted(self._job_id, (self._stage_id,)))
        self.post(StageSubmitted(self._stage_id, 0, self.parallelism, barrier, self.parallelism))

    def launch(self, subtask: int, number: int = 0) -> SparkTask:
        self._task_attempt_id += 1
        start = TaskStarted(self._task_attempt_id, self._stage_id, self._stage_attempt, subtask, number)
        task = self.tasks[self._task_attempt_id] = SparkTask(start, self.kit.clock)
        self.post(start)
        return task

    def register(self, task: SparkTask, operator_id: str = OPERATOR) -> None:
        start = task.start
        register = Register(
            start.task_attempt_id,
            operator_id,
            start.partition,
            start.stage_id,
            start.attempt_number,
            self.mode,
            self.parallelism,
            "host/1",
            "3.11",
        )
        self.bridge_ref.tell(RegistrationReceived(task.line, register))

    async def deployed(self) -> list[SparkTask]:
        """Start a new job whose attempts are accepted, but not open yet."""
        self.start_job()
        return await self._launch_all(opens_immediately=False)

    async def running(self, *, barrier: bool = False, operator_id: str = OPERATOR) -> list[SparkTask]:
        """Start a new job whose attempts are all ready."""
        self.start_job(barrier=barrier)
        return await self._launch_all(operator_id=operator_id)

    async def end(self, task: SparkTask, outcome: TaskOutcome = TaskOutcome.FAILED, reason: str = "it broke") -> None:
        """Let Spark report that the task has ended."""
        self._end(task, outcome, reason)
        await self.settle()

    async def retry(self, task: SparkTask) -> SparkTask:
        """Let Spark start the failed task again."""
        successor = self.launch(task.start.partition, task.start.attempt_number + 1)
        self.register(successor)
        await self.settle()
        return successor

    async def fail_barrier_stage(self, task: SparkTask) -> list[SparkTask]:
        """Fail the task; Spark kills the others of its barrier stage and starts them all again."""
        self._end(task, TaskOutcome.FAILED, "it broke")
        self._kill_all("another task of the barrier stage has failed", stage_id=self._stage_id)
        self.post(StageCompleted(self._stage_id, self._stage_attempt, "a barrier task failed"))
        self._stage_attempt += 1
        self.post(StageSubmitted(self._stage_id, self._stage_attempt, self.parallelism, barrier=True))
        return await self._launch_all()

    def post(self, fact: EngineFact) -> None:
        self.bridge_ref.tell(RelayedFact(fact, 0))

    async def settle(self) -> None:
        await self.kit.run_until_idle()

    def _read(self) -> bool:
        return sum(task.read() for task in self.tasks.values()) > 0

    @property
    def _stage_id(self) -> int:
        return 10 * self._job_id

    async def _launch_all(self, *, opens_immediately: bool = True, operator_id: str = OPERATOR) -> list[SparkTask]:
        tasks = [self.launch(subtask) for subtask in range(self.parallelism)]
        for task in tasks:
            task.opens_immediately = opens_immediately
            self.register(task, operator_id)
        await self.settle()
        return tasks

    def _end(self, task: SparkTask, outcome: TaskOutcome, reason: str) -> None:
        if task.running:
            task.running = False
            at = task.start
            place = (at.task_attempt_id, at.stage_id, at.stage_attempt, at.partition, at.attempt_number)
            self.post(TaskEnded(*place, outcome, reason))

    def _kill_all(self, reason: str, *, stage_id: int) -> None:
        for task in self.tasks.values():
            if task.start.stage_id == stage_id:
                self._end(task, TaskOutcome.KILLED, reason)

    # --- in place of the relay ------------------------------------------------------------------------------------

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        self._end(self.tasks[task_attempt_id], TaskOutcome.KILLED, reason)

    async def cancel_job(self, job_id: int, reason: str) -> None:
        if job_id not in self.cancelled:
            self.cancelled.append(job_id)
            self._kill_all(reason, stage_id=10 * job_id)
            self.post(JobEnded(job_id, False, reason))

    async def watch(self, stage_id: int, task_attempt_id: int) -> None:
        """Nothing to do: every fact is delivered."""

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        raise AssertionError("no fact is lost here: the ledger has nothing to ask")

    # --- in place of the router -----------------------------------------------------------------------------------

    def attempt_token(self, attempt: ExecutionAttempt) -> bytes:
        return b""

    def gateway_opened(
        self, attempt: ExecutionAttempt, ref: ActorRef[GatewayMessage], connection: AttemptConnection
    ) -> None:
        self.tasks[attempt.task_attempt_id].gateway_ref = ref

    def gateway_closed(self, attempt: ExecutionAttempt) -> None:
        """Do nothing: later messages of the task end at the gateway."""


@asynccontextmanager
async def application(
    *,
    parallelism: int = 2,
    mode: RestoreMode = RestoreMode.STREAMING,
    restored: CompletedCheckpoint | None = None,
    seed: int = 0,
) -> AsyncIterator[Application]:
    """Yield an application without operators and jobs; the order of delivery follows from ``seed``."""
    async with deterministic_system(seed=seed) as kit:
        yield Application(kit, parallelism, mode, restored)


@asynccontextmanager
async def coordinated(
    mode: RestoreMode = RestoreMode.STREAMING, **methods: Method
) -> AsyncIterator[tuple[Application, RecordingCoordinator]]:
    """Yield an application and the coordinator of its operator, which has these methods."""
    coordinator = RecordingCoordinator(**methods)
    async with application(mode=mode) as app:
        await app.coordinate(coordinator)
        yield app, coordinator
