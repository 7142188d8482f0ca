"""The sidecar: everything of Headgate that lives beside the Spark driver, behind one ``with``.

``with Sidecar(spark) as sidecar`` runs it on a thread and an event loop of its own; ``async with Sidecar(spark) as
sidecar`` on the caller's loop. Both give a handle for each operator, whose ``subtask(...)`` is what ``mapPartitions``
and its kin take.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, suppress
from types import TracebackType
from typing import Any

import anyio
import structlog
from anyio.from_thread import BlockingPortal, start_blocking_portal

from actors import ActorError, ActorRef, ActorSystem, AskTimeout
from actors.coordination import (
    BarrierTrackerActor,
    OperatorConfig,
    OperatorCoordinator,
    OperatorPorts,
    OperatorStatistics,
)
from actors.coordination.barrier_tracker import UNBOUNDED
from actors.coordination.messages import RequestCheckpoint, StartOperator, TrackerMessage
from protocol.barrier_tracker import CheckpointConfig, CompletedCheckpoint
from protocol.gateway_types import GatewayLimits
from protocol.messages import RestoreMode
from spark_bridge.bridge import (
    AddOperator,
    AwaitRunsOver,
    BridgeActor,
    BridgeMessage,
    ConnectionRouter,
    FailRuns,
    RemoveOperator,
)
from spark_bridge.config import SidecarConfig
from spark_bridge.driver import advertised_and_bind_host, check_worker_python, driver_context
from spark_bridge.errors import CoordinatorStartError, SidecarError, SidecarNotRunning
from spark_bridge.interrupts import interrupts_held_back
from spark_bridge.relay import Relay, RelayError, open_relay
from spark_bridge.runs import RunningJobs
from spark_bridge.server import ServerConfig, SubtaskServer
from spark_bridge.shipping import ship_packages
from spark_bridge.subtask.endpoint import TaskEndpoint
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.task_entry import SubtaskTask

log = structlog.get_logger("headgate.sidecar")

RUN_END_GRACE_S = 1.0
RUN_FAIL_S = 5.0
CLOSED_WHILE_RUNNING = (
    "the sidecar was closed while this job was running; leave the `with` block only when the action has returned"
)


class OperatorHandle:
    """One coordinated operator, as the driver's code holds it. Thread-safe."""

    def __init__(
        self,
        endpoint: TaskEndpoint,
        statistics: Callable[[], dict[str, Any]],
        failure: Callable[[], BaseException | None],
    ) -> None:
        self._endpoint = endpoint
        self._statistics = statistics
        self._failure = failure

    def __repr__(self) -> str:
        return f"<OperatorHandle {self.operator_id!r} x {self.parallelism}>"

    @property
    def operator_id(self) -> str:
        return self._endpoint.operator_id

    @property
    def parallelism(self) -> int:
        return self._endpoint.parallelism

    @property
    def failure(self) -> BaseException | None:
        """The first exception with which the coordinator failed its latest job, if it did (H7)."""
        return self._failure()

    def subtask(self, operator: Callable[..., SubtaskOperator], *args: Any, **kwargs: Any) -> SubtaskTask:
        """The function for ``mapPartitions``, ``mapInPandas``, ``mapInArrow``, ``foreachPartition`` and barrier stages.

        ``operator(*args, **kwargs)`` is called in each task; all three must be picklable. The partition is the subtask,
        so the RDD or DataFrame must have exactly ``parallelism`` partitions.

        Raises ``TypeError`` for what cannot make a ``SubtaskOperator``, as far as that shows here.
        """
        if not callable(operator):
            raise TypeError(
                f"{operator!r} cannot be called to make an operator: pass the class and its arguments, "
                "subtask(MyOperator, ...), for every task makes its own"
            )
        if isinstance(operator, type) and not issubclass(operator, SubtaskOperator):
            raise TypeError(f"{operator!r} is no SubtaskOperator: derive it from that class")
        return SubtaskTask(operator, self._endpoint, args, kwargs)

    def statistics(self) -> dict[str, Any]:
        """Counts and latencies so far, as plain values. Also after the sidecar has closed."""
        return self._statistics()


class _Operator:
    """What the runtime keeps of an operator."""

    def __init__(self, tracker_ref: ActorRef[TrackerMessage], statistics: OperatorStatistics) -> None:
        self.tracker_ref = tracker_ref
        self.statistics = statistics
        self.failure: BaseException | None = None
        self.last_checkpoint: CompletedCheckpoint | None = None


class SidecarRuntime:
    """The sidecar on the running event loop. ``Sidecar`` makes it; its methods are for that loop only."""

    def __init__(self, spark: Any, config: SidecarConfig) -> None:
        self._context = driver_context(spark)
        self._config = config
        self._secret = secrets.token_bytes(32)
        self._router = ConnectionRouter()
        self._operators: dict[str, _Operator] = {}
        self._running_jobs = RunningJobs()
        self._stack = AsyncExitStack()
        self._system: ActorSystem
        self._server: SubtaskServer
        self._relay: Relay
        self._bridge_ref: ActorRef[BridgeMessage]
        self._running = False
        self.facts_dropped = 0

    async def __aenter__(self) -> SidecarRuntime:
        config = self._config
        await anyio.to_thread.run_sync(check_worker_python, self._context)
        bind_host, advertised_host = await anyio.to_thread.run_sync(
            advertised_and_bind_host, self._context, config.bind_host, config.advertised_host
        )
        async with AsyncExitStack() as stack:
            self._server = SubtaskServer(
                self._router,
                self._secret,
                ServerConfig(
                    bind_host=bind_host,
                    port=config.port,
                    advertised_host=advertised_host,
                    advertised_port=config.advertised_port,
                    authenticate_timeout_s=config.authenticate_timeout_s,
                ),
            )
            stack.push_async_callback(self._server.close)
            await self._server.start()
            self._system = await stack.enter_async_context(
                ActorSystem(
                    "headgate",
                    shutdown_timeout_s=config.shutdown_timeout_s,
                    slow_handler_limit_s=config.slow_handler_limit_s,
                )
            )
            self._bridge_ref = self._system.spawn(
                lambda: BridgeActor(
                    config.ledger,
                    lambda: self._relay,
                    running=self._running_jobs,
                    on_facts_dropped=self._count_dropped_facts,
                ),
                name="bridge",
                mailbox=UNBOUNDED,
            )
            self._relay = open_relay(self._context, self._bridge_ref.tell, kind=config.relay, on_lost=self._relay_lost)
            stack.push_async_callback(self._close_relay)
            await self._relay.start()
            await anyio.to_thread.run_sync(ship_packages, self._context)
            self._router.attach(self._bridge_ref)
            stack.push_async_callback(self._end_runs)
            self._stack = stack.pop_all()
        self._running = True
        host, port = self._server.address
        log.info("sidecar running", host=host, port=port, relay=self._relay.kind)
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._running = False
        result = await self._stack.__aexit__(exception_type, exception, traceback)
        log.info("sidecar closed")
        return result

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that tasks are told."""
        return self._server.address

    @property
    def relay_kind(self) -> str:
        return self._relay.kind

    async def coordinate(
        self,
        operator_id: str,
        coordinator: OperatorCoordinator,
        *,
        parallelism: int,
        mode: RestoreMode = RestoreMode.BATCH,
        gateway: GatewayLimits | None = None,
        checkpoint: CheckpointConfig | None = None,
    ) -> OperatorHandle:
        """See ``Sidecar.coordinate``."""
        self._require_running()
        _check_arguments(operator_id, coordinator, parallelism)
        if operator_id in self._operators:
            raise SidecarError(f"operator {operator_id!r} is coordinated already: choose another name")
        config = OperatorConfig(
            operator_id,
            parallelism,
            mode,
            gateway or self._config.gateway,
            checkpoint or CheckpointConfig(mode=mode),
        )
        operator = await self._start_operator(config, coordinator)
        host, port = self._server.address
        endpoint = TaskEndpoint(
            host,
            port,
            self._secret,
            operator_id,
            parallelism,
            mode,
            connect_timeout_s=self._config.connect_timeout_s,
            register_timeout_s=self._config.register_timeout_s,
        )
        return OperatorHandle(endpoint, operator.statistics.snapshot, lambda: operator.failure)

    async def _start_operator(self, config: OperatorConfig, coordinator: OperatorCoordinator) -> _Operator:
        operator_id = config.operator_id
        statistics = OperatorStatistics(operator_id)
        ports = OperatorPorts(
            report=self._bridge_ref.tell,
            gateway_opened=self._router.gateway_opened,
            gateway_closed=self._router.gateway_closed,
            store=self._keep_checkpoint(operator_id),
            discard=self._forget_checkpoint(operator_id),
            failed=lambda error: self._coordinator_failed(operator_id, error),
        )
        tracker_ref = self._system.spawn(
            lambda: BarrierTrackerActor(coordinator, config, ports, statistics),
            name=f"operator-{operator_id}",
            mailbox=UNBOUNDED,
            log_context={"operator_id": operator_id},
        )
        operator = self._operators[operator_id] = _Operator(tracker_ref, statistics)
        try:
            try:
                await tracker_ref.ask(StartOperator, timeout_s=self._config.start_timeout_s)
            except Exception as error:
                raise CoordinatorStartError(
                    f"coordinator of operator {operator_id!r} failed in start: {type(error).__name__}: {error}"
                ) from error
            await self._bridge_ref.ask(
                lambda reply_to: AddOperator(operator_id, config.parallelism, tracker_ref, reply_to),
                timeout_s=self._config.start_timeout_s,
            )
        except BaseException:
            del self._operators[operator_id]
            with anyio.CancelScope(shield=True):
                await self._system.stop(tracker_ref)
            raise
        return operator

    async def release(self, operator_id: str) -> None:
        """See ``Sidecar.release``."""
        self._require_running()
        operator = self._operators.pop(operator_id, None)
        if operator is None:
            raise SidecarError(f"operator {operator_id!r} is not coordinated here")
        await self._bridge_ref.ask(
            lambda reply_to: RemoveOperator(operator_id, reply_to), timeout_s=self._config.start_timeout_s
        )
        await self._system.stop(operator.tracker_ref)

    async def checkpoint(self, operator_id: str, *, timeout_s: float = 60.0) -> int:
        """See ``Sidecar.checkpoint``."""
        self._require_running()
        operator = self._operators.get(operator_id)
        if operator is None:
            raise SidecarError(f"operator {operator_id!r} is not coordinated here")
        return await operator.tracker_ref.ask(RequestCheckpoint, timeout_s=timeout_s)

    def _keep_checkpoint(self, operator_id: str) -> Callable[[CompletedCheckpoint], Any]:
        async def keep(checkpoint: CompletedCheckpoint) -> None:
            self._operators[operator_id].last_checkpoint = checkpoint

        return keep

    def _forget_checkpoint(self, operator_id: str) -> Callable[[int], Any]:
        async def forget(checkpoint_id: int) -> None:
            operator = self._operators.get(operator_id)
            if operator and operator.last_checkpoint and operator.last_checkpoint.checkpoint_id == checkpoint_id:
                operator.last_checkpoint = None

        return forget

    def _coordinator_failed(self, operator_id: str, error: BaseException) -> None:
        operator = self._operators.get(operator_id)
        if operator is not None:
            operator.failure = error

    def _count_dropped_facts(self, count: int) -> None:
        self.facts_dropped += count

    def _relay_lost(self, error: RelayError) -> None:
        log.error("the relay is lost: no more facts of Spark; the ledger asks Spark's books", error=str(error))

    async def _end_runs(self) -> None:
        """Leave no job behind whose tasks would look for their coordinator in vain (H57).

        The fact of a job's end may come a moment after the user's action has returned.
        """
        with anyio.CancelScope(shield=True):
            try:
                with suppress(AskTimeout):
                    await self._bridge_ref.ask(AwaitRunsOver, timeout_s=RUN_END_GRACE_S)
                    return
                self._bridge_ref.tell(FailRuns(CLOSED_WHILE_RUNNING))
                await self._bridge_ref.ask(AwaitRunsOver, timeout_s=min(RUN_FAIL_S, self._config.shutdown_timeout_s))
            except AskTimeout as error:
                log.warning("closed while a job was running, whose end is not known", error=str(error))
            except ActorError:  # cancelled from outside, or failed: the actors are gone before their time
                await self._cancel_jobs()

    async def _cancel_jobs(self) -> None:
        for job_id in self._running_jobs.job_ids:
            try:
                await self._relay.cancel_job(job_id, CLOSED_WHILE_RUNNING)
            except RelayError as error:
                log.warning("a job could not be cancelled", job_id=job_id, error=str(error))

    async def _close_relay(self) -> None:
        try:
            with anyio.CancelScope(shield=True), anyio.fail_after(self._config.shutdown_timeout_s):
                await self._relay.close()
        except (RelayError, TimeoutError) as error:
            log.warning("the relay did not close cleanly", error=repr(error))

    def _require_running(self) -> None:
        if not self._running:
            raise SidecarNotRunning("the sidecar is closed: enter it with `with Sidecar(spark) as sidecar:`")


def _check_arguments(operator_id: object, coordinator: object, parallelism: object) -> None:
    """Users need not have a type checker."""
    if not isinstance(operator_id, str):
        raise TypeError(f"operator_id must be a str, not {operator_id!r}")
    if not operator_id or "/" in operator_id:
        raise ValueError(f"operator_id must be a name without a slash, and not the empty string: {operator_id!r}")
    if not isinstance(parallelism, int) or isinstance(parallelism, bool):
        raise TypeError(f"parallelism must be an int, the number of subtasks, not {parallelism!r}")
    if parallelism < 1:
        raise ValueError(f"parallelism must be the number of subtasks, at least 1, not {parallelism}")
    if isinstance(coordinator, type):
        raise TypeError(f"{coordinator!r} is a class: give an instance of it")
    if not isinstance(coordinator, OperatorCoordinator):
        raise TypeError(f"{coordinator!r} is no OperatorCoordinator: derive it from that class")


class Sidecar:
    """Headgate's half of a Spark driver; see the module.

    ``spark`` is a classic SparkSession or SparkContext. ``config`` sets addresses, times and bounds. The object can be
    entered again after it was left, also with the same SparkContext; never twice at once.

    Raises on entering: ``RelayError`` for a Spark Connect session or a stopped context, ``TypeError`` for no session at
    all, ``SidecarError`` for a wrong worker Python, ``ServerStartError`` where the port is in use. Leaving it ends
    every operator: a job that still runs fails with a text that says so, coordinators are closed, and no thread, socket
    or listener stays, whether the job runs, has failed, or the context is stopped already. Ctrl-C while it is entered
    or left still ends it whole; it comes out as the usual ``KeyboardInterrupt``.
    """

    def __init__(self, spark: Any, config: SidecarConfig | None = None) -> None:
        self._spark = spark
        self._config = config or SidecarConfig()
        self._runtime: SidecarRuntime | None = None
        self._portal: BlockingPortal | None = None
        self._stack: ExitStack | None = None

    # --- with: own thread and loop --------------------------------------------------------------------------------

    def __enter__(self) -> Sidecar:
        self._require_idle()
        driver_context(self._spark)
        with ExitStack() as stack:
            with interrupts_held_back():  # or the thread that has just been started would never be told to end
                self._portal = stack.enter_context(start_blocking_portal("asyncio", name="headgate-sidecar"))
            runtime = SidecarRuntime(self._spark, self._config)
            manager: AbstractContextManager[SidecarRuntime] = self._portal.wrap_async_context_manager(runtime)
            self._runtime = stack.enter_context(manager)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        stack, self._stack = self._stack, None
        try:
            return stack.__exit__(exception_type, exception, traceback) if stack is not None else None
        finally:
            self._runtime = self._portal = None

    def coordinate(
        self,
        operator_id: str,
        coordinator: OperatorCoordinator,
        *,
        parallelism: int,
        mode: RestoreMode = RestoreMode.BATCH,
        gateway: GatewayLimits | None = None,
        checkpoint: CheckpointConfig | None = None,
    ) -> OperatorHandle:
        """Start ``coordinator`` for an operator of ``parallelism`` subtasks and return the operator's handle.

        The coordinator lives on the sidecar's loop until ``release`` or the sidecar's end, over as many runs as there
        are (H55). ``mode`` says who owns the operator's output; ``gateway`` and ``checkpoint`` replace the sidecar's
        own limits.

        Raises ``CoordinatorStartError`` with the cause if ``start`` raises, ``SidecarError`` for a name in use,
        ``ValueError`` or ``TypeError`` for bad arguments, ``SidecarNotRunning`` outside the ``with``.
        """
        portal, runtime = self._entered()

        async def call() -> OperatorHandle:
            return await runtime.coordinate(
                operator_id,
                coordinator,
                parallelism=parallelism,
                mode=mode,
                gateway=gateway,
                checkpoint=checkpoint,
            )

        return portal.call(call)

    def release(self, operator_id: str) -> None:
        """Close an operator's coordinator and gateways; its live tasks are told. The name is free afterwards."""
        portal, runtime = self._entered()
        portal.call(runtime.release, operator_id)

    def checkpoint(self, operator_id: str, *, timeout_s: float = 60.0) -> int:
        """Take one checkpoint of an operator now; returns its id, or raises ``CheckpointFailed`` with the reason."""
        portal, runtime = self._entered()

        async def call() -> int:
            return await runtime.checkpoint(operator_id, timeout_s=timeout_s)

        return portal.call(call)

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that tasks are told."""
        return self._entered()[1].address

    # --- async with: the caller's loop ----------------------------------------------------------------------------

    async def __aenter__(self) -> SidecarRuntime:
        self._require_idle()
        runtime = SidecarRuntime(self._spark, self._config)
        self._runtime = await runtime.__aenter__()
        return self._runtime

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        runtime, self._runtime = self._runtime, None
        return await runtime.__aexit__(exception_type, exception, traceback) if runtime is not None else None

    def _require_idle(self) -> None:
        if self._runtime is not None or self._stack is not None:
            raise SidecarError("this sidecar is entered already: leave it first, or make a second one")

    def _entered(self) -> tuple[BlockingPortal, SidecarRuntime]:
        if self._portal is None or self._runtime is None:
            if self._runtime is not None:
                raise SidecarNotRunning(
                    "this sidecar was entered with `async with`: await the methods of what that gave you"
                )
            raise SidecarNotRunning("the sidecar is not running: enter it with `with Sidecar(spark) as sidecar:`")
        return self._portal, self._runtime
