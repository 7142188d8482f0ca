# SPDX-License-Identifier: Apache-2.0

"""A simulated Spark application around one operator: the real ledger, barrier tracker, gateways and coordinator."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from random import Random
from typing import Any, Literal, TypeVar, cast, overload

from actors import Actor, ActorContext, ActorRef, Reply
from actors.actor import DeadlineTimer
from actors.coordination.engine.barrier_tracker import BarrierTrackerActor, CheckpointFailed
from actors.coordination.engine.inputs import ActionId, RestoredInput
from actors.coordination.engine.messages import (
    AttachConnection,
    AttemptConnection,
    ClientRequest,
    ConnectionClosed,
    GatewayMessage,
    LedgerDecided,
    RequestCheckpoint,
    StartOperator,
    TrackerMessage,
    WithdrawCheckpoint,
)
from actors.coordination.engine.operator_config import UNBOUNDED, OperatorConfig, OperatorPorts
from actors.coordination.host.given import GivenCoordinator
from actors.coordination.host.traces import current_traceparent
from actors.coordination.interface import OperatorCoordinator
from actors.coordination.statistics import OperatorStatistics
from actors.coordination.store import CoordinatorStore
from actors.testing import DeterministicKit, Schedule, kit_of
from headgate.testing._answer import Answer
from headgate.testing._operator_task import OperatorTask
from headgate.testing._task import MemoryConnection, Task
from protocol.arguments import ANY, AT_LEAST_1, NAME, PARALLELISM, WAIT, check_attributes, checked
from protocol.attempts import (
    AttemptAccepted,
    CancelJobs,
    KillTask,
    LedgerConfig,
    LedgerInput,
    OperatorAdded,
    OperatorRemoved,
    QueryStatus,
    RefuseRegistration,
    RegistrationArrived,
    ReportStale,
    RunStarted,
)
from protocol.attempts.ledger import AttemptLedger
from protocol.barrier_tracker import CheckpointConfig, CompletedCheckpoint
from protocol.barrier_tracker.rescale import rescaled
from protocol.errors import LocalProtocolError
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
from protocol.gateway.types import GatewayLimits
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.wire.messages import Refused, Register, RestoreMode
from spark_bridge.primitives.chain import COORDINATOR, Chain, composed
from spark_bridge.primitives.counters.book import Book, Distribution
from spark_bridge.primitives.primitive import USES, Primitive
from spark_bridge.subtask.operator import SubtaskOperator, operator_factory

T = TypeVar("T")
TaskT = TypeVar("TaskT", bound=Task)

Mode = RestoreMode | Literal["batch", "streaming"]


@check_attributes(storage_delay_s=WAIT)
class World:
    """A Spark application with one operator, in which the test plays Spark. ``running_operator`` makes it.

    The test launches tasks, kills and retries them, asks for checkpoints, and lets time pass. The rest of Spark's
    behaviour is automatic: a task that has finished counts as a success, and other copies of it are killed. The job
    ends when every subtask has succeeded. It fails when the coordinator fails it, or when a subtask has failed
    ``attempts_max`` times. The next launch then begins a new run.

    Nothing happens between the test's calls. The methods that move the world are coroutines, and each returns when
    nothing more can happen without another call or time passing. Only one may run at a time; a second one raises
    ``RuntimeError``. After the ``async with`` they raise ``LocalProtocolError``.
    """

    input_id: str | None
    storage_error: Exception | None
    storage_delay_s: float
    storage_in_doubt: bool
    id_error: Exception | None

    def __init__(
        self,
        kit: DeterministicKit,
        coordinator: GivenCoordinator | Chain,
        config: OperatorConfig,
        attempts_max: int,
        uses: Collection[Primitive],
        beside: World | None = None,
        seed: int = 0,
    ) -> None:
        self.kit = kit
        """The deterministic actor system of this world, with its ``trace`` of all steps."""
        self.parallelism = config.parallelism
        self.tasks: list[Task] = []
        """All tasks that were launched, in order."""
        self.checkpoints: list[CompletedCheckpoint] = []
        """The completed checkpoints, in order. ``running_operator(restored=...)`` starts from one of them."""
        self.savepoints: list[tuple[str, CompletedCheckpoint]] = []
        """The completed savepoints, each with its requested directory."""
        self.failures: list[BaseException] = []
        """The causes with which the coordinator has failed its jobs, in order."""
        self.cancelled_jobs: list[str] = []
        """Why jobs were cancelled, in order."""
        self.input_id: str | None = None
        """The name of the input of the runs that begin from now on, as in ``Sidecar.run(..., input_id=...)``.

        None for no name, as for an action outside of ``run``: a run after one that has ended well has other input, and
        one after an interrupted run continues it.
        """
        self.storage_error: Exception | None = None
        """The exception that the storage raises when it writes a checkpoint; None if it works."""
        self.storage_delay_s = 0.0
        """How many seconds each write takes, before it succeeds or fails."""
        self.storage_in_doubt = False
        """Whether a write that fails has written the checkpoint all the same, and nothing can be taken back.

        Such a checkpoint stays in doubt (``CoordinatorContext.checkpoints_in_doubt``), and is in ``in_doubt``, until
        this is False again and the storage is asked once more, or a later checkpoint completes.
        """
        self.id_error: Exception | None = None
        """The exception that the storage raises when a checkpoint needs an id; None if it has one."""
        self.statistics = OperatorStatistics(config.operator_id)
        self._config = config
        self._seed: int = seed if beside is None else beside._seed
        self._attempts_max = attempts_max
        self._next_id = 1 if config.restored is None else config.restored.checkpoint_id + 1
        self._written: list[CompletedCheckpoint] = []
        self._open: dict[int, ActorRef[GatewayMessage]] = {}
        self._job_id = 0
        self._job_runs = False
        self._closed = False
        self._stopped = False
        self._connection_id = 0
        self._worlds: list[World] = [] if beside is None else beside._worlds
        self._task_attempt_id = 100 + 100_000 * len(self._worlds)
        self._worlds.append(self)
        self._numbers: Counter[int] = Counter()
        self._failed: Counter[int] = Counter()
        self._succeeded: set[int] = set()
        self._coordinator_store: CoordinatorStore = CoordinatorStore() if beside is None else beside._coordinator_store
        ports = OperatorPorts(
            report=self._report,
            gateway_opened=self._gateway_opened,
            gateway_closed=self._gateway_closed,
            store=self._store,
            discard=self._discard,
            failed=self.failures.append,
            store_savepoint=self._store_savepoint,
            next_checkpoint_id=self._next_checkpoint_id,
            completed=self._completed,
            coordinator_store=self._coordinator_store,
        )
        self._composed = composed(config.operator_id, coordinator, uses)
        parts = self._composed.parts
        suffix = "" if beside is None else f"-{config.operator_id}"
        self._tracker: ActorRef[TrackerMessage] = kit.system.spawn(
            lambda: BarrierTrackerActor(parts, config, ports, self.statistics),
            name=f"operator{suffix}",
            mailbox=UNBOUNDED,
        )
        self._spark: ActorRef[Any] = kit.system.spawn(
            lambda: _LedgerActor(self, self._tracker, LedgerConfig(attempts_max=attempts_max)),
            name=f"ledger{suffix}",
            mailbox=UNBOUNDED,
        )
        kit.outside = lambda: sum([world._move_tasks() for world in self._worlds]) > 0

    # --- time -----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The virtual time, in seconds since the start."""
        return self.kit.clock.now()

    async def settle(self) -> None:
        """Let everything happen that can happen without time passing."""
        self._check_open()
        await self.kit.run_until_idle()

    @checked(by_s=WAIT)
    async def advance(self, by_s: float) -> None:
        """Let ``by_s`` seconds pass. Timers fire in the order of their times, each followed by its consequences."""
        self._check_open()
        await self.kit.advance(by_s)

    @checked()
    async def drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in virtual time, such as ``gateway.send_event(...)``, until it is done.

        Raises:
            AssertionError: nothing moves any more before it is done; it may need time to pass.
        """
        if self._closed:
            coroutine.close()
        self._check_open()
        return await self.kit.drive(coroutine)

    # --- Spark ----------------------------------------------------------------------------------------------------

    @overload
    async def launch(self, subtask: int, *, opens: bool = True) -> Task: ...

    @overload
    async def launch(self, subtask: int, *, task_class: type[TaskT], opens: bool = True) -> TaskT: ...

    @checked()
    async def launch(self, subtask: int, *, task_class: type[Task] = Task, opens: bool = True) -> Task:
        """Launch a task of ``subtask``, whose operator the test plays.

        If an attempt of the subtask is alive, the new one is a speculative copy. The first launch after the end of a
        job begins the next run. ``task_class`` is ``Task`` or a subclass of it. Unless ``opens``, the task
        registers and does not open, until ``task.open()``.

        Raises:
            ValueError: there is no such subtask.
        """
        task = self._started(subtask, self._maker(task_class, opens))
        await self.settle()
        return task

    @overload
    async def launch_all(self, *, opens: bool = True) -> list[Task]: ...

    @overload
    async def launch_all(self, *, task_class: type[TaskT], opens: bool = True) -> list[TaskT]: ...

    @checked()
    async def launch_all(self, *, task_class: type[Task] = Task, opens: bool = True) -> list[Any]:
        """Launch one task for each subtask, as ``launch`` does."""
        tasks = [self._started(subtask, self._maker(task_class, opens)) for subtask in range(self.parallelism)]
        await self.settle()
        return tasks

    @checked()
    async def launch_operator(
        self,
        subtask: int,
        make_operator: Callable[..., SubtaskOperator | Iterable[Any] | None] | None = None,
        records: Iterable[Any] | None = None,
    ) -> OperatorTask:
        """Launch a task of ``subtask`` that runs ``make_operator()``, a ``SubtaskOperator``, over ``records``.

        ``make_operator`` may also be a plain function of the records, as for ``OperatorHandle.subtask``.

        ``records``: None if the test gives them with ``task.feed(...)`` and ``task.end_records()``.

        Without ``make_operator`` the task runs the stages of the chain that the operator consists of.

        Raises:
            ValueError: there is no such subtask, or no operator: neither ``make_operator`` nor a chain.
        """
        stages = self._composed.stages
        if (make_operator is None) != bool(stages):
            raise ValueError("pass make_operator, the class of the operator, unless the operator is a chain")
        operator = None if make_operator is None else operator_factory(make_operator)

        def make(attempt: ExecutionAttempt, line: MemoryConnection) -> OperatorTask:
            mode = self._config.mode
            parallelism, parts = self.parallelism, self._composed.task_parts
            dice = Random(f"{self._seed} {attempt}")
            return OperatorTask(
                attempt, line, self.kit.clock, operator, records, parallelism, mode, parts, stages, dice
            )

        task = self._started(subtask, make)
        await self.settle()
        return task

    @checked()
    async def kill(self, task: Task, reason: str = "killed by the test") -> None:
        """Kill the task as Spark does: its process is gone immediately. Does nothing if the task is over."""
        self._end(task, TaskOutcome.KILLED, reason)
        await self.settle()

    @checked()
    async def break_connection(self, task: Task) -> None:
        """Break the task's connection to the driver: messages on their way are lost, and sent again later.

        The coordinator gets ``subtask_suspected``. Call ``restore_connection`` before ``reconnect_timeout_s`` has
        passed; otherwise the attempt fails.

        Raises:
            LocalProtocolError: the task is over, is not registered yet, or has no connection.
        """
        if task.connection is None or task.registered is None:
            raise LocalProtocolError(
                f"{task!r} has no connection that could break: await world.settle() until it is registered, and "
                "break it before it is over"
            )
        connection_id = task.connection.connection_id
        task.lose_connection()
        task.gateway_ref.tell(ConnectionClosed(connection_id, "broken by the test"))
        await self.settle()

    @checked()
    async def restore_connection(self, task: Task) -> None:
        """Let the task connect again. The coordinator gets ``subtask_responsive``.

        Raises:
            LocalProtocolError: the task is over, or its connection is not broken.
        """
        if task.connection is not None or task.registered is None or task.outcome:
            raise LocalProtocolError(
                f"{task!r} has no broken connection: call break_connection() first, and restore it before the "
                "task is over"
            )
        self._connection_id -= 1  # a first connection has the positive number of its task
        connection = task.connection = MemoryConnection(self._connection_id)
        task.gateway_ref.tell(AttachConnection(connection, task.machine.resume_seq))
        await self.settle()

    @checked()
    async def lose_executor(self, task: Task, reason: str = "executor lost") -> None:
        """Let the executor of the task die. Does nothing if the task is over."""
        self._end(task, TaskOutcome.EXECUTOR_LOST, reason)
        await self.settle()

    @overload
    async def retry(self, task: OperatorTask, records: Iterable[Any] | None = None) -> OperatorTask: ...

    @overload
    async def retry(self, task: Task) -> Task: ...

    @checked()
    async def retry(self, task: Task, records: Iterable[Any] | None = None) -> Task:
        """Launch the subtask of ``task`` again: a ``Task``, or an ``OperatorTask`` that runs a new operator.

        ``records``: as in ``launch_operator``.

        Raises:
            LocalProtocolError: the task still runs.
        """
        if not task.outcome:
            raise LocalProtocolError(f"{task!r} still runs: kill it, or let it fail, before it is retried")
        if isinstance(task, OperatorTask):
            return await self.launch_operator(task.attempt.subtask, task.make_operator, records)
        return await self.launch(task.attempt.subtask, task_class=type(task), opens=task.opens_immediately)

    @checked()
    async def revoke(self, task: Task, reason: str = "its output was lost") -> None:
        """Revoke a success, as Spark does if the output of a finished task is lost. Its subtask has to run again.

        The coordinator gets ``subtask_failed`` with ``FailureKind.REVOKED``, and the outcome of the task is then
        ``"revoked"``.

        Raises:
            LocalProtocolError: the task has not succeeded, or the job has ended.
        """
        if task.outcome != "success" or not self._job_runs:
            raise LocalProtocolError(
                f"{task!r} has no success that Spark could revoke: revoke it after its success and before the other "
                "subtasks have ended the job"
            )
        task.outcome = "revoked"
        self._succeeded.discard(task.attempt.subtask)
        self._tell_end(task, TaskOutcome.RESUBMITTED, reason)
        await self.settle()

    @checked()
    async def cancel_job(self, reason: str = "cancelled by the test") -> None:
        """Cancel the Spark job: all its tasks are killed, and the run has failed."""
        self._end_job(reason)
        await self.settle()

    # --- the driver's program -------------------------------------------------------------------------------------

    @checked()
    async def checkpoint(self, savepoint_directory: str | None = None) -> int:
        """Take a checkpoint, or a savepoint, and return its id.

        Raises:
            CheckpointFailed: it was aborted or refused.
            AssertionError: it has not ended yet, because a task is busy or unresponsive or time has to pass; use
                ``begin_checkpoint`` for that.
        """
        answer = self.begin_checkpoint(savepoint_directory)
        await self.settle()
        return answer.value

    @checked()
    def begin_checkpoint(self, savepoint_directory: str | None = None) -> Answer[int]:
        """Request a checkpoint, which begins when the world moves. The answer is its id, or ``CheckpointFailed``."""
        self._check_operator()
        answer: Answer[int] = Answer()
        self._tracker.tell(RequestCheckpoint(cast("Reply[int]", answer), savepoint_directory))
        return answer

    @checked()
    async def abort_checkpoint(self, answer: Answer[int]) -> None:
        """Give up the checkpoint of ``begin_checkpoint``, as the driver's program does if it waits no longer.

        Does nothing if it has ended. Otherwise the answer is ``CheckpointFailed``, the tasks are told, and the
        coordinator gets ``notify_checkpoint_aborted``.
        """
        self._check_operator()
        self._tracker.tell(WithdrawCheckpoint(cast("Reply[int]", answer)))
        await self.settle()
        answer.fail(CheckpointFailed("it was given up by the test"))  # otherwise nobody answers one that was given up

    @property
    def in_doubt(self) -> list[CompletedCheckpoint]:
        """The checkpoints that the storage has written and that are not complete, in order.

        A restart may find any of them: pass one as ``running_operator(restored=...)``.
        """
        return list(self._written)

    async def stop(self) -> None:
        """Stop the operator inside the block, as ``Sidecar.release`` does. Idempotent.

        A run in progress has failed, tasks that are alive are told (``Task.ended``), and the coordinator is closed.
        After that, checkpoints and requests raise ``LocalProtocolError``, and tasks that are launched are refused.
        """
        self._check_open()
        if self._stopped:
            return
        self._stopped = True
        self._spark.tell(OperatorRemoved(self._config.operator_id))
        await self.settle()
        await self.kit.drive(self.kit.system.stop(self._tracker))
        await self.settle()

    def counters(self) -> dict[str, int | float | Distribution]:
        """Return what the tasks have counted, as ``OperatorHandle.counters`` does."""
        return Book.from_value(self._composed.counters.sums()).values()

    def counter_totals(self) -> dict[str, int | float]:
        """Return the same in short, as ``OperatorStatus.counters`` has it: sums, and how many values were observed."""
        return self._composed.counters.totals()

    @checked()
    async def request(self, payload: Any, *, part: str | None = None) -> Any:
        """Send a request as the driver's program does, and return the answer of ``handle_client_request``.

        ``part``: the stage of a chain that it is for.

        Raises:
            AssertionError: the coordinator has not answered yet; use ``begin_request`` if it returns a ``Reply``.
            Exception: what ``handle_client_request`` raised.
        """
        answer = self.begin_request(payload, part=part)
        await self.settle()
        return answer.value

    @checked()
    def begin_request(self, payload: Any, *, part: str | None = None) -> Answer[Any]:
        """Send a request like ``request``, which arrives when the world moves, and return its answer, still open."""
        self._check_operator()
        answer: Answer[Any] = Answer()
        traceparent = current_traceparent()
        self._tracker.tell(ClientRequest(payload, cast("Reply[Any]", answer), part or "", traceparent))
        return answer

    # --- for the simulated Spark ----------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Start the coordinator; raises what its ``start`` raises."""
        await self.kit.drive(self._tracker.ask(StartOperator, timeout_s=60.0))
        self._spark.tell(OperatorAdded(self._config.operator_id, self.parallelism))
        await self.settle()

    def _end(self, task: Task, outcome: TaskOutcome, reason: str = "") -> None:
        """End ``task`` with this outcome, and report that as Spark does."""
        if task.outcome:
            return
        connection, attempt = task.connection, task.attempt
        task.stop()
        task.outcome = {TaskOutcome.SUCCESS: "success", TaskOutcome.KILLED: "killed"}.get(outcome, "failed")
        gateway = self._open.get(attempt.task_attempt_id)
        if gateway is not None and connection is not None:
            gateway.tell(ConnectionClosed(connection.connection_id, "the task has ended"))
        subtask = attempt.subtask
        self._tell_end(task, outcome, reason)
        if outcome is TaskOutcome.SUCCESS:
            self._succeeded.add(subtask)
            for other in self._running(subtask):
                self._end(other, TaskOutcome.KILLED, "another attempt succeeded")
            if len(self._succeeded) == self.parallelism:
                self._job_runs = False
                self._spark.tell(JobEnded(self._job_id, True))
        elif outcome is TaskOutcome.FAILED:
            self._failed[subtask] += 1
            if self._failed[subtask] >= self._attempts_max:
                self._end_job(f"subtask {subtask} has failed {self._attempts_max} times; the last time: {reason}")

    def _tell_end(self, task: Task, outcome: TaskOutcome, reason: str) -> None:
        id_, subtask, number = task.attempt.task_attempt_id, task.attempt.subtask, task.attempt_number
        self._spark.tell(TaskEnded(id_, self._stage_id, 0, subtask, number, outcome, reason))

    def _end_job(self, reason: str) -> None:
        """Fail the job as Spark does, and kill its tasks."""
        if not self._job_runs:
            return
        self._job_runs = False
        self.cancelled_jobs.append(reason)
        for task in self._running():
            self._end(task, TaskOutcome.KILLED, reason)
        self._spark.tell(JobEnded(self._job_id, False, reason))

    def _find(self, task_attempt_id: int) -> Task:
        """Return the task with this task attempt id."""
        return next(task for task in self.tasks if task.attempt.task_attempt_id == task_attempt_id)

    def _look(self, query: QueryStatus) -> StatusReported:
        """Answer a query about these jobs and tasks, as Spark does."""
        states = {"": TaskState.RUNNING, "success": TaskState.SUCCEEDED}
        return StatusReported(
            {job_id: self._job_runs and job_id == self._job_id for job_id in query.job_ids},
            {one: states.get(self._find(one).outcome, TaskState.ENDED) for one in query.task_attempt_ids},
            {one: TaskPlace(self._stage_id, self._find(one).attempt.subtask) for one in query.task_attempt_ids},
        )

    @property
    def _stage_id(self) -> int:
        return 10 * self._job_id

    def _running(self, subtask: int | None = None) -> list[Task]:
        return [task for task in self.tasks if not task.outcome and subtask in (None, task.attempt.subtask)]

    def _start_job(self) -> None:
        self._job_id += 1
        self._job_runs = True
        self._numbers.clear()
        self._failed.clear()
        self._succeeded.clear()
        self._spark.tell(JobStarted(self._job_id, (self._stage_id,)))
        self._spark.tell(StageSubmitted(self._stage_id, 0, self.parallelism, False, self.parallelism))

    def _started(self, subtask: int, make: Callable[[ExecutionAttempt, MemoryConnection], TaskT]) -> TaskT:
        self._check_open()
        if not 0 <= subtask < self.parallelism:
            raise ValueError(f"there is no subtask {subtask}: the operator has {self.parallelism}, counted from 0")
        if not self._job_runs:
            self._start_job()
        config, number, copy = self._config, self._numbers[subtask], bool(self._running(subtask))
        self._numbers[subtask] += 1
        self._task_attempt_id += 1
        id_, stage_id = self._task_attempt_id, self._stage_id
        line = MemoryConnection(id_)
        task = make(ExecutionAttempt(config.operator_id, subtask, number, id_), line)
        task.attempt_number = number
        self.tasks.append(task)
        self._spark.tell(TaskStarted(id_, stage_id, 0, subtask, number, copy))
        register = Register(
            id_, config.operator_id, subtask, stage_id, number, config.mode, config.parallelism, "test/1", "3"
        )
        self._spark.tell(RegistrationArrived(line.connection_id, register))
        return task

    def _maker(self, task_class: type[Task], opens: bool) -> Callable[[ExecutionAttempt, MemoryConnection], Task]:
        def make(attempt: ExecutionAttempt, line: MemoryConnection) -> Task:
            task = task_class(attempt, line, self.kit.clock)
            task.opens_immediately = opens
            return task

        return make

    def _check_open(self) -> None:
        if self._closed:
            raise LocalProtocolError("this world has ended: use it inside its `async with`")

    def _check_operator(self) -> None:
        self._check_open()
        if self._stopped:
            raise LocalProtocolError("this operator was stopped: call it before world.stop(), or run another one")

    def _check_joins(self, operator_id: str, seed: int, schedule: Schedule | None) -> None:
        """Raise unless an operator of this name can join the application."""
        self._check_open()
        if operator_id in {world._config.operator_id for world in self._worlds}:
            raise ValueError(f"operator_id must be another name than {operator_id!r}, which runs in this application")
        if seed or schedule is not None:
            raise ValueError("seed and schedule belong to the world that was made first: give them there")

    # --- ports ----------------------------------------------------------------------------------------------------

    def _gateway_opened(
        self, attempt: ExecutionAttempt, ref: ActorRef[GatewayMessage], connection: AttemptConnection
    ) -> None:
        self._find(attempt.task_attempt_id).gateway_ref = ref
        self._open[attempt.task_attempt_id] = ref

    def _gateway_closed(self, attempt: ExecutionAttempt) -> None:
        self._open.pop(attempt.task_attempt_id, None)

    def _report(self, report: LedgerInput) -> None:
        self._spark.tell(report)

    async def _store(self, checkpoint: CompletedCheckpoint) -> None:
        await self._write(lambda: self._written.append(checkpoint))

    async def _write(self, write: Callable[[], None]) -> None:
        if self.storage_delay_s:
            await asyncio.sleep(self.storage_delay_s)
        if self.storage_error is None or self.storage_in_doubt:
            write()
        if self.storage_error is not None:
            raise self.storage_error

    async def _store_savepoint(self, checkpoint: CompletedCheckpoint, directory: str) -> None:
        await self._write(lambda: self.savepoints.append((directory, checkpoint)))

    async def _discard(self, checkpoint_id: int) -> None:
        if self.storage_in_doubt:
            raise self.storage_error or OSError("the storage does not answer")
        self._written = [one for one in self._written if one.checkpoint_id != checkpoint_id]

    def _completed(self, checkpoint_id: int) -> None:
        self.checkpoints += [one for one in self._written if one.checkpoint_id == checkpoint_id]
        self._written = [one for one in self._written if one.checkpoint_id > checkpoint_id]

    def _next_checkpoint_id(self) -> int:
        if self.id_error is not None:
            raise self.id_error
        self._next_id += 1
        return self._next_id - 1

    # --- moving ---------------------------------------------------------------------------------------------------

    def _move_tasks(self) -> bool:
        """Let every task read and work, not only the first that has something; returns whether anything moved."""
        moved = sum(task.read() for task in self._running()) > 0
        for task in self._running():
            status = task.exit_status()
            if status is not None:
                moved = True
                self._end(task, TaskOutcome.SUCCESS if status[0] else TaskOutcome.FAILED, status[1])
        return moved

    def _close(self) -> None:
        """End the threads of operators that still run."""
        self._closed = True
        self._worlds.remove(self)
        for task in self._running():
            with suppress(RuntimeError):
                task.stop()


class _LedgerActor(Actor[LedgerInput]):
    """The part between Spark and the operator on a real driver: the attempt ledger, and the commands to Spark."""

    def __init__(self, world: World, tracker_ref: ActorRef[TrackerMessage], config: LedgerConfig) -> None:
        self._world = world
        self._tracker_ref = tracker_ref
        self._ledger = AttemptLedger(config)
        self._deadline = DeadlineTimer()
        self._calls = 0

    async def receive(self, context: ActorContext[LedgerInput], message: LedgerInput) -> None:
        now = context.clock.now()
        if isinstance(message, TimePassed):
            self._deadline.fired()
        world = self._world
        for effect in self._ledger.handle(message, now):
            match effect:
                case RefuseRegistration():
                    connection = world._find(effect.task_attempt_id).connection
                    if connection is not None:
                        connection.send(Refused(effect.task_attempt_id, effect.code, effect.message))
                case KillTask():
                    world._end(world._find(effect.task_attempt_id), TaskOutcome.KILLED, effect.reason)
                case CancelJobs():
                    world._end_job(effect.reason)
                case QueryStatus():
                    context.self_ref.tell(world._look(effect))
                case ReportStale():
                    pass
                case AttemptAccepted():
                    connection = world._find(effect.attempt.task_attempt_id).connection or MemoryConnection(0)
                    self._tracker_ref.tell(LedgerDecided(effect, None, connection))
                case RunStarted() if world.input_id is not None:
                    call = f"{self._calls:016x}"
                    self._calls += 1
                    self._tracker_ref.tell(LedgerDecided(effect, action=str(ActionId(call, 0, world.input_id))))
                case _:
                    self._tracker_ref.tell(LedgerDecided(effect, None))
        self._deadline.arm(context, self._ledger.next_deadline(), now)


@checked(
    coordinator=COORDINATOR, parallelism=PARALLELISM, uses=USES, attempts_max=AT_LEAST_1, operator_id=NAME, seed=ANY
)
@asynccontextmanager
async def running_operator(
    coordinator: GivenCoordinator | Chain = OperatorCoordinator,
    *,
    parallelism: int = 2,
    uses: Collection[Primitive] = (),
    mode: Mode = "batch",
    checkpoint: CheckpointConfig | None = None,
    gateway: GatewayLimits | None = None,
    restored: CompletedCheckpoint | None = None,
    restored_input: RestoredInput | None = None,
    attempts_max: int = 4,
    snapshot_timeout_s: float = 60.0,
    operator_id: str = "operator",
    seed: int = 0,
    schedule: Schedule | None = None,
    beside: World | None = None,
) -> AsyncIterator[World]:
    """Run an operator whose coordinator has started, without Spark and in virtual time.

    ``coordinator``, ``parallelism``, ``uses``, ``mode``, ``checkpoint`` and ``gateway`` are those of
    ``Sidecar.coordinate``. ``restored`` is the checkpoint to start from, of any parallelism, and
    ``restored_input`` that of ``Sidecar.coordinate``: whether the first run has the input of that checkpoint again
    (``"same"``) or another one (``"other"``). By default the checkpoint's label says it, and a checkpoint without a
    label counts as the same. ``attempts_max``: how
    often one subtask may fail, or be killed by Headgate, until the job fails. ``snapshot_timeout_s``: how long
    ``checkpoint_coordinator`` may take.

    ``seed`` determines which message is delivered next. Each seed gives an order that could really happen, and always
    the same one. A test that fails names its seed. Alternatively, ``schedule`` decides, as in ``deterministic_system``.

    ``beside`` is another world, whose application this operator joins: both have the same time and order, and a method
    that moves one of them moves both. Enter it inside the other one's block, with another ``operator_id`` and without
    ``seed`` and ``schedule``.

    Inside the coordinator, and in what it starts, ``anyio.sleep``, ``asyncio.sleep`` and all timeouts follow the
    virtual clock. Functions given to a worker thread (``context.call_async``, ``asyncio.to_thread``,
    ``anyio.to_thread.run_sync``) run to their end while nothing else moves. On the way out the coordinator is closed,
    and operators that still run are killed.

    Raises:
        Exception: what ``start`` of the coordinator raised.
        ValueError: ``restored`` in batch mode, or what ``beside`` excludes.
    """
    mode = RestoreMode.named(mode)
    config = OperatorConfig(
        operator_id,
        parallelism,
        mode,
        gateway or GatewayLimits(),
        replace(checkpoint or CheckpointConfig(), mode=mode),
        snapshot_timeout_s,
        None if restored is None else rescaled(restored, parallelism),
        restored_input=restored_input or ("same" if restored is not None and not restored.label else None),
    )
    if beside is None:
        application: AbstractAsyncContextManager[DeterministicKit] = kit_of(
            "running_operator", "deterministic", seed, schedule
        )
    else:
        beside._check_joins(operator_id, seed, schedule)
        application = nullcontext(beside.kit)
    async with application as kit:
        world = World(kit, coordinator, config, attempts_max, uses, beside, seed)
        try:
            await world._start()
            yield world
        finally:
            try:
                if beside is not None and not beside._closed:
                    await world.stop()
            finally:
                world._close()
