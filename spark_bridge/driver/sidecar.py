"""The sidecar: everything of Headgate that lives beside the Spark driver, behind one ``with``.

``with Sidecar(spark) as sidecar`` runs it on a thread and an event loop of its own; ``async with Sidecar(spark) as
sidecar`` on the caller's loop. Both give a handle for each operator, whose ``subtask(...)`` is what ``mapPartitions``
and its kin take.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from functools import partial, update_wrapper
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from anyio.from_thread import BlockingPortal

from protocol.restart import DEFAULT_RESTART, RestartStrategy
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.environment import driver_context
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.interrupts import interrupts_held_back
from spark_bridge.driver.leaving import leave
from spark_bridge.driver.loop import start_sidecar_loop
from spark_bridge.driver.micro_batches import ForEachBatch, MicroBatches
from spark_bridge.driver.restarts import run_blocking
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.driver.spark_driver import LocalDriver
from spark_bridge.errors import SidecarError, SidecarNotRunning

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _on_its_loop(
    method: Callable[Concatenate[SidecarRuntime, P], Awaitable[R]],
) -> Callable[[Callable[..., object]], Callable[Concatenate[Sidecar, P], R]]:
    """Make a method of ``Sidecar`` that calls ``method`` on the sidecar's loop and waits for its result.

    The arguments are those of ``method``, for type checkers as for ``help``; the name and the docstring are those of
    the decorated function, which is never called.
    """

    def decorate(described: Callable[..., object]) -> Callable[Concatenate[Sidecar, P], R]:
        def call(self: Sidecar, /, *args: P.args, **kwargs: P.kwargs) -> R:
            portal, runtime = self._entered()
            return portal.call(partial(method, runtime, *args, **kwargs))

        update_wrapper(call, described)
        vars(call)["__wrapped__"] = method  # so that `help` shows its signature
        return call

    return decorate


class Sidecar:
    """Headgate's half of a Spark driver; see the module.

    ``spark`` is a classic SparkSession or SparkContext. ``config`` sets addresses, times and bounds. The object can be
    entered again after it was left, also with the same SparkContext; never twice at once.

    Raises on entering: ``RelayError`` for a Spark Connect session or a stopped context, ``TypeError`` for no session at
    all, ``SidecarError`` for a wrong worker Python, ``ServerStartError`` where the port is in use. Leaving it ends
    every operator: a job that still runs fails with a text that says so, coordinators are closed, and no thread, socket
    or listener stays, whether the job runs, has failed, or the context is stopped already. Leaving raises
    ``OutputNotCommitted`` if the output of a run that ended well could not be committed, in streaming mode, and neither
    ``run`` nor a micro-batch has said so; another exception that is on its way gets a note instead. Ctrl-C while it is
    entered or left still ends it whole; it comes out as the usual ``KeyboardInterrupt``.
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
                self._portal = stack.enter_context(start_sidecar_loop())
            runtime = SidecarRuntime(LocalDriver(self._spark), self._config)
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
        runtime = self._runtime
        if stack is None or runtime is None:
            return None
        close = partial(stack.__exit__, exception_type, exception, traceback)
        try:
            return leave(close, runtime, self._config.shutdown_timeout_s, raising=exception is not None)
        finally:
            self._runtime = self._portal = None

    @_on_its_loop(SidecarRuntime.coordinate)
    def coordinate(self, *args: Any, **kwargs: Any) -> Any:
        """Start ``coordinator`` for an operator of ``parallelism`` subtasks and return the operator's handle.

        ``coordinator`` is a class or a factory (a function without arguments that returns a coordinator), and a new one
        is built for each run and each restart, after the old one is closed. Or it is an instance, which lives over all
        runs: then it must override ``reset_to_checkpoint`` to forget the run before, or its second run fails with
        ``ResetNotSupported``. The coordinator lives on the sidecar's loop until ``release`` or the sidecar's end.

        ``mode`` says who owns the operator's output: Spark (``"batch"``), or the operator, which commits it with
        checkpoints (``"streaming"``). ``gateway`` replaces the sidecar's own limits. ``checkpoint`` says when they
        are taken, and how many failures are tolerated; without it there are only those that ``checkpoint()`` asks for,
        and the last one of each streaming run.

        In streaming mode the operator goes on from the newest checkpoint of this name that the sidecar's storage holds,
        also with another parallelism (H52): the coordinator hears ``reset_to_checkpoint`` before ``start``.
        ``restore`` is ``"latest"`` for that, ``"none"`` to start from nothing and leave what is stored, or the path or
        URL of one checkpoint or savepoint file. A later ``"latest"`` never goes back to what was left by that.

        ``inject_barrier(attempt, checkpoint_id, events_before)`` sends barriers on a way of your own, say with the
        data; the operator hands what arrives to ``SubtaskContext.barrier_arrived``. It is called on the sidecar's loop
        and must not block. Without it the barrier travels with the events.

        The RDD or DataFrame must have exactly ``parallelism`` partitions. A run over more is refused, and so is one
        over fewer, unless ``allow_fewer``: then the subtasks without a partition are never ready.

        Raises ``CoordinatorStartError`` with the cause if the factory, ``start`` or the restore raises,
        ``CheckpointUnreadable`` naming the file that cannot be restored (H50), ``SidecarError`` for a name in use,
        ``ValueError`` or ``TypeError`` for bad arguments, ``SidecarNotRunning`` outside the ``with``.
        """

    def release(self, operator_id: str) -> None:
        """Close an operator's coordinator and gateways; its live tasks are told. The name is free afterwards."""
        portal, runtime = self._entered()
        portal.call(runtime.release, operator_id)

    def checkpoint(self, operator_id: str | None = None, *, timeout_s: float = 60.0) -> int:
        """Take one checkpoint of an operator now and return its id once it is complete and durable (H40).

        The name may be left out where only one operator is coordinated. ``timeout_s`` bounds this call; the checkpoint
        has its own deadline. Raises ``CheckpointFailed`` with the reason, ``AskTimeout`` when the call took too long.
        """
        portal, runtime = self._entered()
        return portal.call(partial(runtime.checkpoint, operator_id, timeout_s=timeout_s))

    def savepoint(self, operator_id: str | None = None, *, directory: str, timeout_s: float = 60.0) -> int:
        """Write a snapshot of an operator into ``directory`` (path or URL), apart from its checkpoints; return its id.

        Nothing is committed for it, and no retry falls back to it (H49); a new application starts from it with
        ``coordinate(..., restore=...)``. Raises as ``checkpoint`` does.
        """
        portal, runtime = self._entered()
        return portal.call(partial(runtime.savepoint, operator_id, directory=directory, timeout_s=timeout_s))

    def request(self, operator_id: str, payload: Any, *, timeout_s: float = 30.0) -> Any:
        """Ask a coordinator from the driver's code: the answer of its ``handle_client_request`` (R97).

        ``payload`` and answer stay in this process and are not copied. Raises what the coordinator raises;
        ``SidecarError`` when the operator does not exist, ``AskTimeout`` without an answer.
        """
        portal, runtime = self._entered()
        return portal.call(partial(runtime.request, operator_id, payload, timeout_s=timeout_s))

    def run(
        self,
        action: Callable[[], T],
        *,
        restart: RestartStrategy = DEFAULT_RESTART,
        operators: Collection[OperatorHandle | str] | None = None,
    ) -> T:
        """Call ``action``, your Spark action, and again after a failed run, as ``restart`` says; return its result.

        It runs on the caller's thread. A failure of a coordinated run (an exception of the coordinator, ``fail_job``,
        too many failed tasks or checkpoints) is followed by a delay and the next call; coordinators and subtasks start
        from the last completed checkpoint in streaming mode, from the beginning in batch mode (H15, H55). When the
        action returns, this waits until the last output is committed by a final checkpoint, and restarts if that fails.

        Only the operators whose tasks run in the Spark jobs of this action count, whatever other threads run meanwhile.
        The jobs are those that this thread starts, and its ``pyspark.InheritableThread``s. ``operators`` names the
        operators instead, as handles or names: for an action whose jobs are started by other threads while actions of
        further operators run, and for one that reads what a job of another action computes.

        Raises what ``action`` raises where no coordinated run has failed, for then a restart mends nothing;
        ``RestartsExhausted``, with the last cause chained; ``StorageFenced`` when a later application has taken the
        storage over; ``NotSettled`` when the run's end does not become known.
        """
        portal, runtime = self._entered()
        runs = portal.call(runtime.action_runs, operators)

        async def on_loop(step: Callable[[], Awaitable[R]], /) -> R:
            return portal.call(step)

        return run_blocking(runs, restart, action, driver_context(self._spark), on_loop=on_loop)

    def for_each_batch(
        self, operator: OperatorHandle | str, function: Callable[[Any, int], object], *, adopt: bool = False
    ) -> Callable[[Any, int], None]:
        """What to give to ``writeStream.foreachBatch``, so that ``function(frame, batch_id)`` commits each batch once.

        ``function`` runs one Spark action over the tasks of ``operator``, which is in streaming mode and belongs to
        this one query; or none where the batch has nothing for it. It returns when the action has. Then this waits for
        the final checkpoint of that run, which holds the batch and is labelled with it, and lets Spark note the end of
        the batch. So when Spark asks for a batch again, it runs from the checkpoint that matches, or is skipped if
        it is committed. What else ``function`` does comes before the action, and may be done again.

        ``adopt``: take the first batch from whatever state there is, for an operator that is new in a query which has
        run before. The module ``spark_bridge.driver.micro_batches`` says what is refused without it.

        In the query this raises ``BatchRefused``, ``BatchFailed``, ``NotSettled``, ``StorageFenced``, and what
        ``function`` raises: each fails the query. Here: ``SidecarError`` for an operator that is not coordinated, or in
        batch mode.
        """
        operator_id = operator if isinstance(operator, str) else operator.operator_id

        def call(method: Callable[[MicroBatches], Awaitable[Any]]) -> Any:
            portal, runtime = self._entered()
            return portal.call(method, runtime.micro_batches)

        async def check(batches: MicroBatches) -> None:
            batches.check(operator_id)

        call(check)
        return ForEachBatch(operator_id, function, adopt, call)

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that tasks are told."""
        return self._entered()[1].address

    @property
    def relay_kind(self) -> str:
        """How Spark's facts come: ``"jvm"``, or ``"py4j"`` if asked for, or where the first was refused or lost."""
        return self._entered()[1].relay_kind

    # --- async with: the caller's loop ----------------------------------------------------------------------------

    async def __aenter__(self) -> SidecarRuntime:
        self._require_idle()
        runtime = SidecarRuntime(LocalDriver(self._spark), self._config)
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
            raise SidecarError("this sidecar is already running: exit its `with` block or create another Sidecar")

    def _entered(self) -> tuple[BlockingPortal, SidecarRuntime]:
        if self._portal is None or self._runtime is None:
            if self._runtime is not None:
                raise SidecarNotRunning(
                    "this sidecar was entered with `async with`: await the methods of what that gave you"
                )
            raise SidecarNotRunning("the sidecar is not running: enter it with `with Sidecar(spark) as sidecar:`")
        return self._portal, self._runtime
