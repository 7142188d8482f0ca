# SPDX-License-Identifier: Apache-2.0

"""The sidecar on the running event loop: starts and stops server, actors and relay.

They start in the order server, actors, relay, and stop in the reverse order, after the jobs that are still running have
been failed. So each task hears from its gateway before the server closes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Generator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial, wraps
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast

import anyio

from actors import ActorError, ActorRef, ActorSystem, AskTimeout
from actors.coordination import GivenCoordinator, OperatorConfig, OperatorCoordinator, SourceCoordinator
from actors.coordination.engine.inputs import RestoredInput
from actors.coordination.engine.operator_config import UNBOUNDED
from actors.host import Host
from actors.logs import get_logger
from actors.threads import ACTIONS, DRIVER, USER
from protocol.arguments import ACTION, AT_LEAST_1, NAME, PARALLELISM, WAIT, checked, moved
from protocol.autoscaling import Autoscale
from protocol.barrier_tracker import CheckpointConfig
from protocol.describing import type_name
from protocol.event_types import Output, Received, Sent
from protocol.facts import StageLook
from protocol.gateway.types import GatewayLimits
from protocol.ids import ExecutionAttempt
from protocol.restart import DEFAULT_RESTART, RestartStrategy
from protocol.wire.framing import WireLimits
from protocol.wire.keys import Purpose
from protocol.wire.messages import RestoreMode
from spark_bridge.bridge.actor import BridgeActor
from spark_bridge.bridge.messages import AwaitRunsOver, BridgeMessage, FailRuns, InheritRuns, StopActions
from spark_bridge.bridge.relay import ApplicationLost, Relay, RelayError
from spark_bridge.bridge.router import ConnectionRouter
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.common.certificates import Encryption, encryption
from spark_bridge.common.endpoint import TaskEndpoint
from spark_bridge.common.errors import OutputNotCommitted, ServerLost, SidecarError, SidecarNotRunning
from spark_bridge.driver.actions import RUN_FAIL_S, Actions
from spark_bridge.driver.autoscaling import Autoscaling, check_autoscale
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.handle import RECORDS, TASKS, OperatorHandle, PartFactories
from spark_bridge.driver.loop import BlockedLoopWatch, FrozenHeap
from spark_bridge.driver.micro_batches import MicroBatches
from spark_bridge.driver.operators import Operators, WholeCalls, check_savepoint_directory
from spark_bridge.driver.rescaling import Rescaling
from spark_bridge.driver.restarts import run_with_restarts
from spark_bridge.driver.spark_driver import SparkDriver, columns_of, register_source
from spark_bridge.driver.stream_port import Streams
from spark_bridge.observability.collector import Process, StatusCollector
from spark_bridge.observability.diagnosis import WAITING_S, explain
from spark_bridge.observability.displays import Displays
from spark_bridge.observability.event_log import EventLog, EventLogActor, subscribe
from spark_bridge.observability.journal import Journal
from spark_bridge.observability.observer import ObserverActor
from spark_bridge.observability.otel_metrics import DISPLAY, OpenTelemetryMetrics
from spark_bridge.observability.page_files import page_routes
from spark_bridge.observability.prometheus import metrics_route
from spark_bridge.observability.spans import Spans, require_opentelemetry
from spark_bridge.observability.spark_metrics import Forget, Publish, SparkGauges, SparkGaugesActor, close_gauges
from spark_bridge.observability.spark_ui import SparkTab, SparkTabActor, close_tab
from spark_bridge.observability.status import RelayStatus, SidecarStatus
from spark_bridge.observability.status_server import LoopCaller, RecentStatus, StatusServer
from spark_bridge.observability.trace import Tracing, start_tracing
from spark_bridge.primitives.chain import COORDINATOR, Chain, Composed, composed
from spark_bridge.primitives.primitive import USES, Primitive
from spark_bridge.server.connection import task_dialect
from spark_bridge.server.server import AuthenticatedServer, ServerConfig
from spark_bridge.sources.source import Source
from spark_bridge.storage import (
    RESTORE,
    CheckpointStorage,
    MemoryStorage,
    Restore,
    Storage,
    StoragePort,
    StorageSession,
)
from spark_bridge.storage.port import ValuePort
from spark_bridge.streams.driver import FormatEnumerator, StreamPlanner
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.task_entry import SubtaskTask

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_bridge.driver.handle import TaskCode

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])
log = get_logger("headgate.sidecar")

RUN_END_GRACE_S = 1.0
REPLACE_GRACE_S = 5.0
_TRACE = "/trace"  # no operator has a slash in its name
CLOSED_WHILE_RUNNING = (
    "the sidecar was closed while this job was running; leave the `with` block, or stop the sidecar, only after the "
    "action has returned"
)


class _Call(Coroutine[Any, Any, Any]):
    """A coroutine of ``SidecarRuntime`` or one of its handles. It logs if it is dropped before anything has run it."""

    __slots__ = ("_at", "_begun", "_coroutine", "_method", "_owner", "_told")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], owner: str, method: str, at: str) -> None:
        self._coroutine = coroutine
        self._owner = owner
        self._method = method
        self._at = at
        self._begun = False  # or closed
        self._told = False  # the caller was, by an exception

    def __await__(self) -> Generator[Any, Any, Any]:
        self._begun = True
        return self._coroutine.__await__()

    def send(self, value: Any, /) -> Any:
        self._begun = True
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._begun = True
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._begun = True
        self._coroutine.close()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith(("_", "cr_", "gi_")):  # asked for by tools, which expect to be refused
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(self._without_await(f"its result with {name!r}"))

    def _refuse(self, *given: Any) -> NoReturn:
        raise TypeError(self._without_await("its result"))

    def _without_await(self, missing: str) -> str:
        self._told = True
        return (
            f"{self._method}() was called without await, so {missing} is not here yet: "
            f"write `await {self._owner}.{self._method}(...)` at {self._at}"
        )

    __bool__ = __contains__ = __getitem__ = __iter__ = __len__ = _refuse

    def __del__(self) -> None:
        if self._begun or sys.is_finalizing():
            return
        self._coroutine.close()  # Python would only name the coroutine, not the line
        if self._told:
            return
        log.warning(
            "sidecar method never awaited",
            method=self._method,
            at=self._at,
            hint=f"nothing was done: write `await {self._owner}.{self._method}(...)`",
        )


def must_be_awaited(method: F) -> F:
    """Decorate an ``async def`` of ``SidecarRuntime``: a forgotten ``await`` is then refused or logged, with its line.

    Without this, the second line of a forgotten ``await`` fails with "'coroutine' object has no attribute 'subtask'",
    and a call whose result is not used does nothing, silently.
    The call returns a coroutine as before, which can be awaited, given to a task, or passed to ``asyncio.gather``.
    """

    owner = "handle" if method.__qualname__.startswith("AsyncOperatorHandle") else "sidecar"

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> _Call:
        caller = sys._getframe(1)
        at = f"{caller.f_code.co_filename}:{caller.f_lineno} in {caller.f_code.co_name}"
        return _Call(method(*args, **kwargs), owner, method.__name__, at)

    return cast(F, call)


class AsyncOperatorHandle(OperatorHandle[Received, Sent]):
    """The handle of an operator on the caller's event loop: an ``OperatorHandle`` whose ``run`` must be awaited.

    ``coordinate`` of what ``async with Sidecar(spark)`` returns makes it. ``run`` is for that loop only.
    """

    @must_be_awaited
    @checked(operator=TASKS, data=RECORDS)
    async def run(  # type: ignore[override]  # as the methods of SidecarRuntime are those of Sidecar
        self,
        operator: TaskCode[Sent, Received, Output] | SubtaskTask = None,
        data: Iterable[Any] = (),
        *,
        restart: RestartStrategy = DEFAULT_RESTART,
        input_id: str | None = None,
    ) -> list[Output]:
        """Run the operator's tasks, and return what they yield: see ``OperatorHandle.run``.

        If the caller is cancelled, the jobs fail, as with ``SidecarRuntime.run``.
        """
        results: list[Output] = await self._run_with(operator, data, restart, input_id)
        return results


class SidecarRuntime(PartFactories):
    """What ``async with Sidecar(spark) as sidecar`` returns: the sidecar on the caller's event loop.

    Its methods are those of ``Sidecar``, as coroutines. They are not thread-safe: call them on that loop only. After
    the block, every method raises ``SidecarNotRunning``.

    A runtime that takes over from an earlier sidecar keeps its tasks waiting until ``_take_tasks``.
    """

    def __init__(
        self, driver: SparkDriver, config: SidecarConfig, blocking_run: Callable[..., Any] | None = None
    ) -> None:
        """``blocking_run`` is that of a ``Sidecar`` around this runtime, for the handles, which are then blocking."""
        self._blocking_run = blocking_run
        self._driver = driver
        self._config = config
        self._router = ConnectionRouter(
            partial(driver.keys.attempt_token, driver.identity), takes_over=driver.inherited is not None
        )
        self._operators: Operators
        self._actions: Actions
        self._calls: WholeCalls
        self._rescaling: Rescaling
        self._storage: StorageSession
        self._streams: Streams
        self._micro_batches: MicroBatches
        self._running_jobs = RunningJobs()
        self._wire_limits = WireLimits.for_events(config.limits.event_bytes_max)
        self._host = Host("headgate sidecar", self._enter, self._leave)
        self._stack = AsyncExitStack()
        self._system: ActorSystem
        self._server: AuthenticatedServer
        self._encryption: Encryption
        self._relay: Relay
        self._tracing: Tracing | None = None
        self._displays: Displays
        self._collector: StatusCollector
        self._status_server: StatusServer | None = None
        self._gauges_ref: ActorRef[Publish | Forget] | None = None
        self._bridge_ref: ActorRef[BridgeMessage]
        self._running = False
        self._uncommitted = ""
        self._lost: ServerLost | None = None
        self._patience: anyio.CancelScope  # around the waits while the sidecar is left
        self._thread_id = 0  # of the event loop
        self._loop: asyncio.AbstractEventLoop
        self._closed = False  # it was entered and has been left

    async def __aenter__(self) -> SidecarRuntime:
        return await self._host.enter()

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """Raises ``OutputNotCommitted`` unless another exception is being raised."""
        self._running = False
        return await self._host.leave(exception_type, exception, traceback)

    async def _enter(self) -> SidecarRuntime:
        config = self._config
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._patience = anyio.CancelScope()
        bind_host, advertised_host = await self._driver.hosts(config)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._driver.close)
            self._encryption = await DRIVER.run(encryption, config.tls, self._driver.keys)
            self._server = AuthenticatedServer(
                self._router,
                partial(self._driver.keys.key, Purpose.TASKS),
                task_dialect(self._wire_limits),
                ServerConfig(
                    bind_host=bind_host,
                    port=config.port,
                    advertised_host=advertised_host,
                    advertised_port=config.addresses.advertised_port,
                    tls=self._encryption.context,
                    authenticate_timeout_s=config.limits.authenticate_timeout_s,
                    incomplete_bytes_max=max(256 * 2**20, 2 * self._wire_limits.message_bytes_max),
                ),
            )
            stack.push_async_callback(self._server.close)
            await self._server.start()
            storage = self._storage = await stack.enter_async_context(StorageSession(self._open_storage()))
            self._streams = await stack.enter_async_context(
                Streams(
                    self._driver.keys,
                    bind_host,
                    config.addresses.advertised_host or self._server.address[0],
                    partial(self._driver.reached_at, Purpose.STREAMS),
                    self._encryption,
                )
            )
            self._system = await stack.enter_async_context(
                ActorSystem(
                    "headgate",
                    shutdown_timeout_s=config.limits.shutdown_timeout_s,
                    slow_handler_limit_s=config.watching.slow_handler_limit_s,
                )
            )
            ledger = config.ledger
            if ledger.attempts_max is None:
                ledger = dataclasses.replace(ledger, attempts_max=await self._driver.task_failures_max())
            self._bridge_ref = self._system.spawn(
                lambda: BridgeActor(
                    ledger,
                    lambda: self._relay,
                    running=self._running_jobs,
                ),
                name="bridge",
                mailbox=UNBOUNDED,
            )
            self._journal = journal = Journal(time.time() - self._system.clock.now())
            self._displays = journal.displays
            self._operators = Operators(
                config,
                self._system,
                self._bridge_ref,
                self._router,
                storage,
                self._look_at_run,
                self._running_jobs.failed,
                journal,
            )
            self._calls = WholeCalls(self._system, self._require_running)
            self._actions = Actions(
                self._running_jobs,
                self._bridge_ref,
                self._operators,
                self._driver.forbid,
                config.limits.settle_timeout_s,
                self._require_running,
                lambda: self._lost,
            )
            self._rescaling = Rescaling(
                self._running_jobs,
                self._operators,
                self._actions,
                self._calls,
                self._add_rescalable,
                self._release,
            )
            self._micro_batches = MicroBatches(self._operators, config.limits.settle_timeout_s)
            self._relay = self._driver.open_relay(
                self._bridge_ref.tell_direct,
                config,
                self._relay_lost,
                self._encryption,
                lambda: self.address,
            )
            stack.push_async_callback(self._close_relay)
            await self._relay.start()
            await self._driver.equip()
            if self._driver.inherited is None:
                self._take_tasks()
            else:
                self._bridge_ref.tell(InheritRuns(self._driver.inherited))
            self._observe(journal, stack)
            if config.watching.trace is not None:
                await self._start_trace(config.watching.trace, lambda tracing: None)
            stack.push_async_callback(self._end_trace)
            recent = self._recent_status(stack)
            self._serve_status(recent, stack)
            self._displays.run("spark-ui-tab", self._show_in_spark, stack)
            self._displays.run("spark-metrics", self._feed_spark_metrics, stack)
            self._displays.run("event-log", self._note_in_event_log, journal, stack)
            if config.watching.opentelemetry:
                require_opentelemetry()
                spans = self._displays.run("spans", Spans, journal)
                if spans is not None:
                    stack.callback(self._displays.run, "spans", spans.close)
                metrics = self._displays.run(DISPLAY, OpenTelemetryMetrics, recent, self._displays)
                if metrics is not None:
                    stack.callback(metrics.close)
            stack.push_async_callback(self._end_runs)
            self._stack = stack.pop_all()
        self._running = True
        host, port = self.address
        log.info("sidecar running", host=host, port=port, relay=self._relay.kind)
        return self

    async def _leave(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._running = False
        try:
            result = await self._stack.__aexit__(exception_type, exception, traceback)
        finally:
            self._closed = True
        log.info("sidecar closed")
        if self._uncommitted:
            complain_of_output(self._uncommitted, exception)
        return result

    def _observe(self, journal: Journal, stack: AsyncExitStack) -> None:
        host, port = self.address
        clock, relay = self._system.clock, self._relay
        process = Process(
            host,
            port,
            self._encryption.context is not None,
            lambda: RelayStatus(
                relay.kind,
                relay.statistics.records,
                relay.statistics.dropped,
                relay.statistics.reconnects,
                self._driver.way,
            ),
            clock.now(),
            self._driver.cores,
        )
        process.loop_lag.start()
        stack.callback(process.loop_lag.close)
        stack.callback(BlockedLoopWatch(process.loop_lag).close)
        self._collector = collector = StatusCollector(
            self._bridge_ref, clock, journal, process, lambda: self._operators.observed
        )
        report_s = self._config.watching.stalled_report_s
        each_second = None
        if self._config.limits.freeze_heap:
            heap = FrozenHeap(self._running_jobs, lambda: (one.statistics for one in self._operators.observed.values()))
            stack.callback(heap.close)
            each_second = heap.look
        self._displays.spawn(
            self._system,
            lambda: ObserverActor(collector, lambda: self._operators.observed, report_s, each_second),
            "observer",
        )

    def _recent_status(self, stack: AsyncExitStack) -> RecentStatus:
        """For those who look from other threads, until the sidecar closes."""
        recent = RecentStatus(LoopCaller(self._loop), self.status)
        stack.callback(recent.close)
        return recent

    def _serve_status(self, recent: RecentStatus, stack: AsyncExitStack) -> None:
        config = self._config
        if config.watching.status_port is None:
            return
        routes = {"/metrics": metrics_route(recent), **page_routes(recent)}  # called on the server's threads
        shown = {path: self._displays.route(f"status-page {path}", route) for path, route in routes.items()}
        server = StatusServer(
            config.watching.status_host, config.watching.status_port, shown, config.watching.status_token
        )
        server.start()
        self._status_server = server

        async def close() -> None:
            recent.close()  # a request that waits for it would keep the server from closing
            with anyio.CancelScope(shield=True):
                await DRIVER.run(server.close)

        stack.push_async_callback(close)
        host, port = server.address
        log.info("status port opened", host=host, port=port)

    def _show_in_spark(self, stack: AsyncExitStack) -> None:
        context = self._driver.spark_context
        if context is None or not self._config.watching.spark_ui_tab:
            return
        tab = SparkTab(context)
        take = self._collector.take
        self._displays.spawn(self._system, lambda: SparkTabActor(tab, take), "spark-ui-tab")
        stack.push_async_callback(
            self._displays.run_async, "spark-ui-tab", close_tab, tab, self._config.limits.shutdown_timeout_s
        )

    def _feed_spark_metrics(self, stack: AsyncExitStack) -> None:
        config, context = self._config, self._driver.spark_context
        if context is None or not config.watching.spark_metrics or config.relay != "jvm":
            return
        gauges = SparkGauges(context)
        self._gauges_ref = self._displays.spawn(
            self._system, lambda: SparkGaugesActor(gauges, self._collector.take), "spark-metrics"
        )
        stack.push_async_callback(
            self._displays.run_async, "spark-metrics", close_gauges, gauges, config.limits.shutdown_timeout_s
        )

    def _note_in_event_log(self, journal: Journal, stack: AsyncExitStack) -> None:
        context = self._driver.spark_context
        if context is None or self._config.relay != "jvm" or not EventLog.is_on(context):
            return
        event_log = EventLog(context)
        actor = self._displays.spawn(self._system, lambda: EventLogActor(event_log), "event-log", UNBOUNDED)
        stack.callback(subscribe(journal, actor))

    def _take_tasks(self) -> None:
        """Serve tasks from now on, including those that have been waiting."""
        self._router.attach(self._bridge_ref)

    @property
    def handles(self) -> Mapping[str, AsyncOperatorHandle]:
        """The names and handles of the operators that are coordinated now."""
        return cast("Mapping[str, AsyncOperatorHandle]", self._operators.handles)

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that tasks connect to."""
        return self._driver.reached_at(Purpose.TASKS, self._server.port, self._server.address)

    @property
    def status_address(self) -> tuple[str, int] | None:
        """See ``Sidecar.status_address``."""
        return None if self._status_server is None else self._status_server.address

    @property
    def lost(self) -> ServerLost | None:
        """See ``Sidecar.lost``."""
        return self._lost

    @property
    def relay_kind(self) -> str:
        """See ``Sidecar.relay_kind``."""
        return self._relay.kind

    @must_be_awaited
    @moved(
        heartbeat_interval_s="gateway=GatewayLimits(heartbeat_interval_s=...)",
        heartbeat_timeout_s="gateway=GatewayLimits(heartbeat_timeout_s=...)",
    )
    @checked(coordinator=COORDINATOR, parallelism=PARALLELISM, uses=USES, restore=RESTORE)
    async def coordinate(
        self,
        operator_id: str,
        coordinator: GivenCoordinator[Received, Sent] | Chain = OperatorCoordinator,
        *,
        parallelism: int,
        uses: Collection[Primitive] = (),
        mode: RestoreMode | Literal["batch", "streaming"] = "batch",
        gateway: GatewayLimits | None = None,
        checkpoint: CheckpointConfig | None = None,
        restore: Restore = "latest",
        restored_input: RestoredInput | None = None,
        inject_barrier: Callable[[ExecutionAttempt, int, int], None] | None = None,
        allow_fewer: bool = False,
        autoscale: Autoscale | None = None,
        replace: bool = False,
    ) -> AsyncOperatorHandle[Received, Sent]:
        """See ``Sidecar.coordinate``."""
        self._require_running()
        mode = RestoreMode.named(mode)
        config = self._operator_config(
            operator_id,
            parallelism,
            mode,
            gateway or self._config.gateway,
            checkpoint,
            inject_barrier=inject_barrier,
            allow_fewer=allow_fewer,
            restored_input=restored_input,
        )
        compose = partial(composed, operator_id, coordinator, uses)
        add = partial(self._add_rescalable, config, compose, restore, compose())
        if autoscale is not None:
            if not self._driver.is_here:
                raise SidecarError(
                    f"operator {operator_id!r} cannot have autoscale in this process, because the program that calls "
                    "its action is in another one: leave it out, or coordinate in a sidecar of that program"
                )
            check_autoscale(operator_id, autoscale, mode, parallelism, coordinator)
            add = partial(self._add_autoscaled, operator_id, autoscale, add)
        return await self._calls.run(operator_id, partial(self._replaced, operator_id, add, replace=replace))

    def _operator_config(
        self,
        operator_id: str,
        parallelism: int,
        mode: RestoreMode,
        limits: GatewayLimits,
        checkpoint: CheckpointConfig | None = None,
        *,
        inject_barrier: Callable[[ExecutionAttempt, int, int], None] | None = None,
        allow_fewer: bool,
        restored_input: RestoredInput | None = None,
    ) -> OperatorConfig:
        return OperatorConfig(
            operator_id,
            parallelism,
            mode,
            limits,
            dataclasses.replace(checkpoint or CheckpointConfig(), mode=mode),
            inject_barrier=inject_barrier,
            allow_fewer=allow_fewer,
            method_report_s=self._config.watching.method_report_s,
            wire_limits=self._wire_limits,
            restored_input=restored_input,
        )

    async def _replaced(
        self, operator_id: str, add: Callable[[], Awaitable[AsyncOperatorHandle]], *, replace: bool
    ) -> AsyncOperatorHandle:
        """Call ``add``, with ``replace`` after the release of the operator of this name."""
        await self._driver.require_spark()
        if not replace or operator_id not in self._operators:
            return await add()
        await self._until_idle(operator_id)
        handle: AsyncOperatorHandle | None = None
        with anyio.CancelScope(shield=True):  # from here on, a cancellation comes too late
            await self._release(operator_id)
            handle = await add()
        assert handle is not None
        return handle

    async def _add_rescalable(
        self,
        config: OperatorConfig,
        compose: Callable[[], Composed],
        restore: Restore = "latest",
        parts: Composed | None = None,
    ) -> AsyncOperatorHandle:
        handle = await self._add(config, parts or compose(), restore)
        self._operators.find(config.operator_id).compose = compose
        return handle

    async def _add_autoscaled(
        self, operator_id: str, autoscale: Autoscale, add: Callable[[], Awaitable[AsyncOperatorHandle]]
    ) -> AsyncOperatorHandle:
        handle = await add()
        autoscaling = Autoscaling(
            operator_id,
            autoscale,
            self._operators,
            self._rescaling,
            self._running_jobs,
            self._driver.cores_max,
            lambda: self._journal.epoch + self._system.clock.now(),
        )
        try:
            autoscaling.begin(self._system)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._release(operator_id)
            raise
        return handle

    async def _add(self, config: OperatorConfig, parts: Composed, restore: Restore) -> AsyncOperatorHandle:
        operator_id, parallelism, mode = config.operator_id, config.parallelism, config.mode
        encrypts_files = await self._driver.encrypts_files()
        operator = await self._operators.add(config, parts.parts, restore, parts)
        host, port = self.address
        states = self._storage.state_storage
        endpoint = TaskEndpoint(
            host,
            port,
            self._driver.keys.task_key(operator_id),
            operator_id,
            parallelism,
            mode,
            certificate_sha256=self._encryption.certificate_sha256,
            connect_timeout_s=self._config.limits.connect_timeout_s,
            register_timeout_s=self._config.limits.register_timeout_s,
            ready_timeout_s=self._config.limits.ready_timeout_s,
            event_bytes_max=self._config.limits.event_bytes_max,
            local_files=not encrypts_files,
            state_storage=states and dataclasses.replace(states, options=self._config.storage_details.task_options),
        )
        statistics = operator.statistics.snapshot
        make = cast("type[AsyncOperatorHandle]", AsyncOperatorHandle if self._blocking_run is None else OperatorHandle)
        handle = make(
            endpoint,
            statistics,
            lambda: operator.failure,
            operator.shipped,
            parts.task_parts,
            parts.stages,
            self._displays,
            self._blocking_run or self.run,
            self._driver.spark_context or self._driver.session,
        )
        operator.handle = handle
        return handle

    @must_be_awaited
    @checked(name=NAME, parallelism=PARALLELISM, splits_max=AT_LEAST_1)
    async def source(
        self,
        name: str,
        source: Source,
        *,
        parallelism: int | None = None,
        schema: Any = None,
        splits_max: int = 10_000,
        replace: bool = False,
    ) -> AsyncOperatorHandle:
        """See ``Sidecar.source``."""
        self._require_running()
        session = self._driver.session
        if session is None:
            raise SidecarError(
                f"source {name!r} cannot be registered here, because the Spark session is in another process: register "
                "it there, with Sidecar(spark).source(...)"
            )
        if parallelism is None:
            parallelism = await self._driver.cores() or 1
        config = self._operator_config(name, parallelism, RestoreMode.BATCH, self._config.gateway, allow_fewer=True)
        looked_at = await USER.run(lambda: (columns_of(source, schema), source.operator), abandon_on_cancel=True)
        storage = self._storage

        def port(stream: str) -> StoragePort:
            return storage.port(f"{name}.stream.{stream}" if stream else f"{name}.stream", RestoreMode.STREAMING)

        planner = StreamPlanner(name, source, port, splits_max, self._operators.coordinator_store)
        add = partial(self._add_source, config, planner, source, session, *looked_at)
        return await self._calls.run(name, partial(self._replaced, name, add, replace=replace))

    async def _add_source(
        self,
        config: OperatorConfig,
        planner: StreamPlanner,
        source: Source,
        session: SparkSession,
        columns: Any,
        operator: Callable[[], SubtaskOperator],
    ) -> AsyncOperatorHandle:
        name = config.operator_id
        coordinator = SourceCoordinator(lambda state: FormatEnumerator(source, planner))
        handle = await self._add(config, composed(name, coordinator, ()), "latest")
        try:
            await planner.open()
            stream = await self._streams.serve(name, planner)
            task = handle.subtask(operator)
            await DRIVER.run(register_source, session, columns, task, stream, handle)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._release(name)
            raise
        return handle

    @must_be_awaited
    @checked()
    async def release(self, operator_id: str) -> None:
        """See ``Sidecar.release``."""
        self._require_running()
        await self._calls.run(operator_id, partial(self._release, operator_id))

    async def _release(self, operator_id: str) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._operators.remove(operator_id)
            finally:
                with anyio.move_on_after(self._config.limits.shutdown_timeout_s):
                    await self._streams.release(operator_id)
            if self._gauges_ref is not None:
                self._gauges_ref.tell(Forget())

    @must_be_awaited
    @checked(parallelism=PARALLELISM)
    async def rescale(self, operator_id: str, parallelism: int, *, timeout_s: float = 60.0) -> None:
        """See ``Sidecar.rescale``."""
        self._require_running()
        if not self._driver.is_here:
            raise SidecarError(
                f"operator {operator_id!r} cannot be rescaled in this process, because the program that calls its "
                "action is in another one: end the run there, and coordinate the operator here with the other "
                "parallelism"
            )
        await self._rescaling.rescale(operator_id, parallelism, timeout_s)

    async def _until_idle(self, operator_id: str) -> None:
        if operator_id in self._running_jobs.operator_ids:  # its action may have returned a moment ago
            with suppress(AskTimeout):
                await self._bridge_ref.ask(AwaitRunsOver, timeout_s=REPLACE_GRACE_S)
        if operator_id in self._running_jobs.operator_ids:
            raise SidecarError(
                f"operator {operator_id!r} cannot be replaced during a run: wait until the action has returned. "
                "If it was interrupted, its job may still run: spark.sparkContext.cancelAllJobs() ends it"
            )

    @must_be_awaited
    @checked()
    async def checkpoint(self, operator_id: str | None = None, *, timeout_s: float = 60.0) -> int:
        """See ``Sidecar.checkpoint``."""
        self._require_running()
        return await self._operators.checkpoint(operator_id, timeout_s=timeout_s)

    @must_be_awaited
    @checked()
    async def savepoint(self, operator_id: str | None = None, *, directory: str, timeout_s: float = 60.0) -> str:
        """See ``Sidecar.savepoint``."""
        self._require_running()
        roots = self._config.storage_details.savepoint_roots
        if roots is None and not self._driver.is_here:
            roots = [] if self._config.storage is None else [self._config.storage]
        if roots is not None:
            await self._storage.run_in_thread(partial(check_savepoint_directory, directory, roots))
        return await self._operators.savepoint(operator_id, directory, timeout_s=timeout_s)

    @must_be_awaited
    @checked()
    async def request(self, operator_id: str, payload: Any, *, part: str | None = None, timeout_s: float = 30.0) -> Any:
        """See ``Sidecar.request``."""
        self._require_running()
        return await self._operators.request(operator_id, payload, part or "", timeout_s=timeout_s)

    @must_be_awaited
    async def status(self) -> SidecarStatus:
        """See ``Sidecar.status``."""
        self._require_running()
        return await self._collector.take()

    @checked()
    @asynccontextmanager
    async def trace(self, path: str | PathLike[str]) -> AsyncIterator[None]:
        """See ``Sidecar.trace``."""
        started: list[Tracing] = []
        try:
            await self._open_trace(path, started.append)
            yield
        finally:
            await self._close_trace(*started)

    @checked()
    async def _open_trace(self, path: str | PathLike[str], started: Callable[[Tracing], object]) -> None:
        """Begin what ``Sidecar.trace`` describes. Calls ``started`` with what ``_close_trace`` ends."""
        await self._calls.run(_TRACE, partial(self._start_trace, path, started))

    async def _close_trace(self, *tracings: Tracing) -> None:
        """End those that are still being written. Idempotent."""
        if self._running and self._tracing in tracings:
            await self._calls.run(_TRACE, self._end_trace, certain=True)

    async def _start_trace(self, path: str | PathLike[str], started: Callable[[Tracing], object]) -> None:
        if self._tracing is not None:
            raise SidecarError(
                f"this sidecar is already traced into {self._tracing.path}: end that trace first, one is written "
                "at a time"
            )
        parts = (self._system, self._journal, self._collector, self._operators)
        self._tracing = await start_tracing(Path(path), *parts)
        started(self._tracing)

    async def _end_trace(self) -> None:
        tracing, self._tracing = self._tracing, None
        if tracing is not None:
            await self._displays.run_async("trace", tracing.end)

    @must_be_awaited
    @checked(waiting_s=WAIT)
    async def explain(self, *, waiting_s: float = WAITING_S) -> tuple[str, ...]:
        """See ``Sidecar.explain``."""
        return explain(await self.status(), waiting_s=waiting_s)

    @must_be_awaited
    @checked(action=ACTION)
    async def run(
        self,
        action: Callable[[], T],
        *,
        restart: RestartStrategy = DEFAULT_RESTART,
        operators: Collection[OperatorHandle | str] | None = None,
        input_id: str | None = None,
    ) -> T:
        """See ``Sidecar.run``. The action runs in a worker thread.

        If the caller is cancelled, the jobs of the action fail, and the thread is left behind until the action returns.
        """
        runs = self._actions.runs(operators, input_id)

        cancelled = threading.Event()

        def call_marked(action_id: str) -> T:
            with self._driver.marked(action_id):
                if cancelled.is_set():  # nobody waits for the result any more
                    raise SidecarError(
                        "the action was cancelled before it began: nothing has run, so call it again if it is "
                        "still wanted"
                    )
                return action()

        async def call(action_id: str) -> T:
            try:
                return await ACTIONS.run(call_marked, action_id, abandon_on_cancel=True)
            except anyio.get_cancelled_exc_class():
                cancelled.set()
                cause = "the caller that awaited this job was cancelled"
                self._actions.fail(action_id, cause)
                with suppress(SidecarNotRunning):
                    await self._calls.run(f"/{action_id}", partial(self._actions.stop, action_id, cause), certain=True)
                raise

        return await run_with_restarts(runs, restart, call)

    def _batches(self) -> MicroBatches:
        """The batches of streaming queries; see ``Sidecar.for_each_batch``."""
        self._require_running()
        return self._micro_batches

    async def _look_at_run(self, run_id: int) -> StageLook:
        return await self._relay.look_at_stage(run_id)

    def _relay_lost(self, error: RelayError) -> None:
        log.error("relay lost, Spark can no longer be observed", error=str(error))
        if isinstance(error, ApplicationLost):
            self._lost = ServerLost(
                f"{error}. Make a new session and a new sidecar, which continues from the last checkpoint in "
                "SidecarConfig.storage; headgate.run_across_sessions does that"
            )

    async def _end_runs(self) -> None:
        """Fail the jobs that are still running: their tasks would look for a coordinator that is gone (H57).

        The fact that a job has ended may arrive shortly after the user's action has returned.
        """
        with anyio.CancelScope(shield=True):
            try:
                running = await self._await_ends()
                if running or self._running_jobs.action_ids or self._running_jobs.stopped_jobs:
                    await self._fail_runs()
                with self._patience:
                    self._uncommitted = await self._uncommitted_without(running)
                self._operators.cut_off_stuck()
            except ActorError:  # the actors were cancelled from outside, or failed
                await self._cancel_jobs()

    async def _fail_runs(self) -> None:
        timeout_s = min(RUN_FAIL_S, self._config.limits.shutdown_timeout_s)
        action_ids = self._running_jobs.action_ids  # their jobs may be queued, so that no operator has a run yet
        self._bridge_ref.tell(FailRuns(CLOSED_WHILE_RUNNING))
        self._bridge_ref.tell(StopActions(CLOSED_WHILE_RUNNING, action_ids))
        with anyio.move_on_after(timeout_s):
            for action_id in action_ids:
                await self._driver.forbid(action_id, CLOSED_WHILE_RUNNING)
        try:
            await self._bridge_ref.ask(AwaitRunsOver, timeout_s=timeout_s)
        except AskTimeout as error:
            log.warning("sidecar closed before a job was known to have ended", error=str(error))

    async def _uncommitted_output(self) -> str:
        """Wait for final checkpoints; return why the output of a successful run is not committed, or ""."""
        self._require_running()
        running = await self._await_ends()
        return await self._uncommitted_without(running)

    async def _uncommitted_without(self, running: Collection[str]) -> str:
        config = self._config
        return await self._operators.uncommitted(
            config.limits.settle_timeout_s, running, config.limits.shutdown_timeout_s
        )

    def _hurry(self) -> None:
        """Cancel the waits while the sidecar is being left. A second call cancels the coordinators' ``close`` too."""
        self._patience.cancel()
        self._system.hurry()

    async def _await_ends(self) -> list[str]:
        """Give runs whose action has returned a moment to end; return the operators that still have one."""
        with suppress(AskTimeout):
            await self._bridge_ref.ask(AwaitRunsOver, timeout_s=RUN_END_GRACE_S)
        return self._running_jobs.operator_ids

    async def _cancel_jobs(self) -> None:
        for job_id in self._running_jobs.job_ids:
            try:
                await self._relay.cancel_job(job_id, CLOSED_WHILE_RUNNING)
            except RelayError as error:
                log.warning("job cancellation failed", job_id=job_id, error=str(error))

    async def _close_relay(self) -> None:
        try:
            with anyio.CancelScope(shield=True), anyio.fail_after(self._config.limits.shutdown_timeout_s):
                await self._relay.close()
        except (RelayError, TimeoutError) as error:
            log.warning("relay close failed", error=repr(error))

    def _open_storage(self) -> Storage:
        config = self._config
        if config.storage is None:
            return MemoryStorage(retained=config.storage_details.retained_checkpoints)
        return CheckpointStorage(
            config.storage, retained=config.storage_details.retained_checkpoints, options=config.storage_details.options
        )

    def _values_of(self, part: str) -> ValuePort:
        return self._storage.values(part)

    def _require_running(self) -> None:
        if not self._running:
            raise SidecarNotRunning("the sidecar is closed: enter it with `with Sidecar(spark) as sidecar:`")


def complain_of_output(why: str, exception: BaseException | None) -> None:
    """Raise ``OutputNotCommitted``, or add it as a note to the ``exception`` that is being raised."""
    log.error("sidecar closed with uncommitted output", why=why)
    error = OutputNotCommitted(f"the last output is not committed: {why}; run the job again")
    if exception is None:
        raise error
    exception.add_note(f"{type_name(error)}: {error}")
