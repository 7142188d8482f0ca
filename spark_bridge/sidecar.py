"""The sidecar: everything of Headgate that lives beside the Spark driver, behind one ``with``.

``with Sidecar(spark) as sidecar`` runs it on a thread and an event loop of its own; ``async with Sidecar(spark) as
sidecar`` on the caller's loop. Both give a handle for each operator, whose ``subtask(...)`` is what ``mapPartitions``
and its kin take.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from actors.coordination import OperatorCoordinator
from protocol.barrier_tracker import CheckpointConfig
from protocol.gateway_types import GatewayLimits
from protocol.messages import RestoreMode
from spark_bridge.config import SidecarConfig
from spark_bridge.driver import driver_context
from spark_bridge.errors import SidecarError, SidecarNotRunning
from spark_bridge.handle import OperatorHandle
from spark_bridge.interrupts import interrupts_held_back
from spark_bridge.runtime import SidecarRuntime


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

    @property
    def relay_kind(self) -> str:
        """How Spark's facts come: ``"jvm"``, or ``"py4j"`` where that was asked for or the JVM refused the first."""
        return self._entered()[1].relay_kind

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
