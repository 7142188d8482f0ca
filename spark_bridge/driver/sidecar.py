# SPDX-License-Identifier: Apache-2.0

"""The sidecar: Headgate's part of the Spark driver, in one ``with`` block.

``with Sidecar(spark) as sidecar`` runs it on its own thread and event loop. ``async with Sidecar(spark) as sidecar``
runs it on the caller's loop. Both return a handle for each operator. Its ``subtask(...)`` makes the function for
``mapPartitions`` and similar functions.

A sidecar with its own thread is left within the time of its settings, whatever the user's code does. Its contexts are
left in another thread, so that the calling thread can receive a Ctrl-C and check whether the event loop still turns. A
loop that a coordinator blocks permanently cannot be stopped. The blocking code is logged and the loop abandoned. Its
thread is a daemon, so the process can end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, update_wrapper
from os import PathLike
from queue import SimpleQueue
from threading import Thread, current_thread
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from actors.logs import get_logger
from actors.waiting_at import running_at
from protocol.arguments import ACTION, checked
from protocol.event_types import Received, Sent
from protocol.restart import DEFAULT_RESTART, RestartStrategy
from spark_bridge.common.errors import ConnectRefused, ServerLost, SidecarError, SidecarNotRunning
from spark_bridge.driver.actions import ActionRuns
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.environment import SPARK, is_remote
from spark_bridge.driver.handle import OperatorHandle, PartFactories
from spark_bridge.driver.interrupts import holding_interrupts, interrupts_held_back
from spark_bridge.driver.loop import LoopCalls, call_on_loop, enter_on_loop, refuse_await
from spark_bridge.driver.micro_batches import ForEachBatch, MicroBatches
from spark_bridge.driver.restarts import run_blocking
from spark_bridge.driver.runtime import AsyncOperatorHandle, SidecarRuntime
from spark_bridge.driver.spark_driver import LocalDriver, SparkDriver
from spark_bridge.observability.diagnosis import explain
from spark_bridge.observability.html import sidecar_html
from spark_bridge.observability.status import SidecarStatus
from spark_bridge.observability.trace import Tracing
from spark_bridge.storage.port import ValuePort

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
log = get_logger("headgate.sidecar")

LOOK_S: Final = 0.1
BLOCKED_S: Final = 5.0
"""On a busy machine, a healthy loop may not turn for longer than a small ``shutdown_timeout_s``."""


def _on_its_loop(
    method: Callable[Concatenate[SidecarRuntime, P], Awaitable[R]],
) -> Callable[[Callable[..., object]], Callable[Concatenate[Sidecar, P], R]]:
    """Make a method of ``Sidecar`` that calls ``method`` on the sidecar's loop and waits for its result.

    The arguments are those of ``method``, for type checkers as for ``help``; the name and the docstring are those of
    the decorated function, which is never called.
    """

    def decorate(described: Callable[..., object]) -> Callable[Concatenate[Sidecar, P], R]:
        def call(self: Sidecar, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return self._call(method, *args, **kwargs)

        update_wrapper(call, described)
        vars(call)["__wrapped__"] = method  # so that `help` shows its signature
        return call

    return decorate


def _handle_on_its_loop(
    method: Callable[Concatenate[SidecarRuntime, P], Awaitable[AsyncOperatorHandle[Received, Sent]]],
) -> Callable[[Callable[..., object]], Callable[Concatenate[Sidecar, P], OperatorHandle[Received, Sent]]]:
    """``_on_its_loop`` for type checkers: the runtime of a ``Sidecar`` makes handles whose ``run`` blocks."""
    return _on_its_loop(method)


class Sidecar(PartFactories):
    """Runs coordinators alongside a Spark driver: ``with Sidecar(spark) as sidecar:``.

    ``spark`` is a SparkSession, classic or of Spark Connect, or a SparkContext. With Spark Connect, the sidecar runs in
    the client's process, and the server and its executors connect to it. ``config`` sets addresses, times and limits.
    After its block has ended, a sidecar can be entered again, even with the same session. All methods are
    thread-safe and block the calling thread. None may be called on the sidecar's own loop, that is, by a coordinator.
    With ``async with``, use the methods of the ``SidecarRuntime`` that it returns.

    Raises ``TypeError`` for an object that is neither a session nor a context. Entering raises ``RelayError`` for a
    stopped context, ``ConnectRefused`` if a Spark Connect server cannot be served, ``SidecarError`` if the workers'
    Python cannot run a task or the sidecar is already running, and ``ServerStartError`` if the port is in use.

    Leaving fails each job that is still running, with a message that says so, and closes all coordinators. No thread,
    socket or listener is left behind, whether the job is running, has failed, or the context has stopped. In streaming
    mode, leaving raises ``OutputNotCommitted`` if the output of a successful run could not be committed and neither
    ``run`` nor a micro-batch has reported that. If another exception is already being raised, it gets a note instead.
    ``SidecarConfig`` says how long leaving may take. After that, every method raises ``SidecarNotRunning``.

    Ctrl-C during entering or leaving still shuts the sidecar down completely, and then raises ``KeyboardInterrupt``.
    """

    @checked(spark=SPARK)
    def __init__(self, spark: Any, config: SidecarConfig | None = None) -> None:
        self._spark = spark
        self._config = config or SidecarConfig()
        self._runtime: SidecarRuntime | None = None
        self._calls: LoopCalls | None = None
        self._stack: ExitStack | None = None
        self._leaver: Leaver
        self._process_id = 0

    # --- with: own thread and loop --------------------------------------------------------------------------------

    def __enter__(self) -> Sidecar:
        self._require_idle()
        try:
            with interrupts_held_back(), ExitStack() as stack:
                driver = driver_of(self._spark)
                self._leaver = Leaver()
                stack.callback(self._leaver.end)
                calls = stack.enter_context(LoopCalls())
                runtime, leave_runtime = enter_on_loop(calls, SidecarRuntime(driver, self._config, self.run))
                stack.push(leave_runtime)
                self._calls, self._runtime, self._process_id = calls, runtime, os.getpid()
                self._stack = stack.pop_all()
            return self
        except BaseException as error:  # a Ctrl-C, if it runs: nobody else would leave it
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        try:
            return self._leave(exception_type, exception, traceback)
        except KeyboardInterrupt:
            if self.is_running:  # it came before leaving had begun
                self._leave(exception_type, exception, traceback)
            raise

    def _leave(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        with interrupts_held_back():
            runtime, stack = self._runtime, self._stack
            if stack is None or runtime is None or self._is_in_fork:
                return None

            def close() -> bool | None:
                self._stack = None
                return stack.__exit__(exception_type, exception, traceback)

            try:
                return leave(
                    close, self._leaver, runtime, self._config.limits.shutdown_timeout_s, raising=exception is not None
                )
            finally:
                if not self.is_running:  # otherwise there is no thread for it
                    self._runtime = self._calls = None

    def stop(self) -> None:
        """Do what leaving the ``with`` block does, without a block: see ``headgate.start``.

        Does nothing if the sidecar is not running. Inside a ``with`` block, it is then closed before the block ends.
        Raises as leaving does, and ``SidecarError`` if it is called on the sidecar's own loop, that is, by a
        coordinator.
        """
        if self._calls is None and self._runtime is not None:
            raise SidecarError("this sidecar was entered with `async with`: leave that block")
        if self._runtime is not None and self._runtime._thread_id == threading.get_ident():
            raise SidecarError("a coordinator cannot stop its own sidecar: let the program do that")
        self.__exit__(None, None, None)

    @property
    def is_running(self) -> bool:
        """Whether it was entered or started, and has not been left or stopped."""
        if self._is_in_fork:
            return False
        return self._runtime is not None and (self._stack is not None or self._calls is None)

    @property
    def _is_in_fork(self) -> bool:
        """Whether this is a copy in a forked process, which has none of the sidecar's threads."""
        return self._calls is not None and self._process_id != os.getpid()

    def _hurry(self) -> None:
        """Cancel the waits of its end, which may not have begun. Any thread."""
        runtime = self._runtime
        if runtime is not None:
            with suppress(RuntimeError):  # its loop is closed
                runtime._loop.call_soon_threadsafe(runtime._hurry)

    @_handle_on_its_loop(SidecarRuntime.coordinate)
    def coordinate(self, *args: Any, **kwargs: Any) -> Any:
        """Start ``coordinator`` for an operator of ``parallelism`` subtasks and return the operator's handle.

        ``coordinator`` is a class or a factory (a function without arguments that returns a coordinator). A new
        coordinator is then built for each run and each restart, after the old one is closed. It may also be an
        instance, which is kept for all runs. It must override ``reset_to_checkpoint`` to forget the previous run,
        otherwise its second run fails with ``ResetNotSupported``. The coordinator runs on the sidecar's loop until
        ``release`` or the end of the sidecar.

        It may also be a ``chain`` of several coordinators and operators.

        Without a ``coordinator``, the operator has only what it ``uses``: ready-made parts, such as what ``work_queue``
        returns.

        ``mode`` says who owns the operator's output: Spark (``"batch"``), or the operator, which commits it with
        checkpoints (``"streaming"``). ``gateway`` replaces the limits of ``SidecarConfig``. ``checkpoint`` says when
        checkpoints are taken and how many failures are tolerated. Without it, only ``checkpoint()`` and the end of each
        streaming run take one.

        In streaming mode, the operator continues from its newest checkpoint in the sidecar's storage, even if that was
        taken with another parallelism. The coordinator's ``reset_to_checkpoint`` is called before its ``start``.
        ``restore="latest"`` means this. ``"none"`` starts without a checkpoint and keeps the stored ones. A
        ``Path(...)`` or ``CheckpointFile(path_or_url)`` is the file of one checkpoint or savepoint. A later
        ``"latest"`` never returns to the checkpoints that were skipped in this way.

        The restored checkpoint says which input it belongs to (see ``run``), and so whether the first run has the same
        input. ``restored_input`` says it instead: ``"same"`` if the records that the checkpoint counts come again,
        ``"other"`` if the run begins with records of which none was processed. It is for what is refused otherwise:
        an input that was interrupted and is given up, and checkpoints of releases that did not label them. It holds
        until this application has completed a checkpoint.

        ``inject_barrier(attempt, checkpoint_id, events_before)`` sends barriers through a channel of yours, for example
        with the data. The operator passes each barrier that arrives to ``SubtaskContext.barrier_arrived``. The function
        is called on the sidecar's loop and must not block. Without it, barriers travel with the events.

        The RDD or DataFrame must have exactly ``parallelism`` partitions. A run with more is refused. So is a run with
        fewer, unless ``allow_fewer`` is set; the subtasks without a partition then never become ready.

        ``autoscale`` lets the sidecar call ``rescale``, depending on what the operator's sources have not read yet. It
        needs streaming mode, and a source.

        With ``replace``, an operator of the same name is released first, as ``release`` does, so that a notebook's cell
        can be run again. In streaming mode, the new one continues from the newest checkpoint of the old one. While a
        run of the old one is on, this raises ``SidecarError``, and the old one stays.

        Without heartbeats, a frozen task is found only when it does not confirm an event in time. ``gateway`` sets
        them: with ``GatewayLimits(heartbeat_interval_s=0.25, heartbeat_timeout_s=1.0)``, each task gives a sign of life
        four times a second. One that is silent for 1 s although its connection stands is killed through Spark, and
        retried: its process is frozen, or native code holds the interpreter lock. A task that computes is not silent.

        Raises ``CoordinatorStartError``, with the cause chained, if the factory, ``start`` or the restore raises;
        ``CheckpointUnreadable``, naming the file, for a damaged checkpoint; ``SidecarError`` for a name in use;
        ``ValueError`` or ``TypeError`` for invalid arguments; ``SidecarNotRunning`` outside the ``with`` block.
        """

    @_handle_on_its_loop(SidecarRuntime.source)
    def source(self, *args: Any, **kwargs: Any) -> Any:
        """Make ``spark.read.format(name).load()`` read ``source``, with splits on demand, and return its handle.

        Each action over the DataFrame reads the source once, in ``parallelism`` tasks (by default, as many as Spark can
        run at the same time), each of which takes the next split when it is free. What a lost task has read is read
        again, and counts once. The batches of a ``FileSource`` reach Spark as Arrow. ``handle.counters()``,
        ``handle.progress()`` and ``handle.statistics()`` are those of the operator ``name``.

        ``schema`` is a ``StructType``, a ``pyarrow.Schema`` or text such as ``"id long, name string"``; a source that
        knows its columns does not need it. The format belongs to the session that the sidecar was given, and reads
        until the sidecar is left. ``replace`` is that of ``coordinate``.

        ``spark.readStream.format(name).load()`` reads the source as a stream: each micro-batch has what is new, with
        about ``splits_max`` splits at most. Its plan is in ``SidecarConfig.storage``, so a query that is started again
        with its ``checkpointLocation`` continues exactly where it was, in this application or another one. Several
        queries may read a source, each with its own plan; with Spark 4.1, only one. If Spark repeats a micro-batch, it
        has the same rows, but perhaps in other partitions.

        A scan needs a separate stage, and only one scan of a source can run at a time. So a query that reads it twice
        at the same time, or unites it with another input, has to put ``.repartition(n)`` or ``.cache()`` after
        ``load()``. An unbounded source never ends, so ``spark.read`` cannot read it.

        Raises ``ValueError`` without a schema, for an empty name or an invalid parallelism, and as ``coordinate`` does.
        """

    @_on_its_loop(SidecarRuntime.release)
    def release(self, *args: Any, **kwargs: Any) -> Any:
        """Close an operator's coordinator and gateways, notify its live tasks, and free its name.

        Waits at most ``SidecarLimits.shutdown_timeout_s`` for a run to end. Raises ``SidecarError`` for an unknown
        operator.
        """

    @_on_its_loop(SidecarRuntime.rescale)
    def rescale(self, *args: Any, **kwargs: Any) -> Any:
        """Give an operator in streaming mode another ``parallelism``, even while its action runs.

        A checkpoint is taken first. Then the jobs of the action end, the operator starts again from its newest
        checkpoint, and ``run`` calls the action again. No restart strategy counts that. ``handle.run`` divides its data
        anew. An action of yours has to read ``handle.parallelism``, and call ``handle.subtask``, whenever it is called:
        the handle stays, and has the new number. Without a run, only the next one changes.

        Requests, checkpoints and calls of ``run`` that come in the meantime wait. A request that the coordinator has
        not answered by then raises ``RequestFailed``. A change waits for the end of a micro-batch. ``timeout_s`` limits
        the checkpoint and each other wait, in seconds. If the call is cancelled before the checkpoint is complete,
        nothing changes, and afterwards the change is completed.

        Raises ``SidecarError``, before anything is stopped: in batch mode; for a run whose action was not given to
        ``run``; for an operator whose state counts Spark's records, during its run; for one whose states would meet and
        whose class does not merge them; if another change is under way. ``CheckpointFailed`` and ``AskTimeout`` come
        from the checkpoint, whose failure does not count towards ``tolerated_failures``. With each of them, the
        parallelism stays as it is, and so does the run. If the operator cannot start with the new
        parallelism, as for a ``Group`` that is too large, this raises why, and it continues with the old one.
        """

    @_on_its_loop(SidecarRuntime.checkpoint)
    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Take one checkpoint of an operator now and return its id once it is complete and durable.

        ``operator_id`` may be omitted if only one operator is coordinated. ``timeout_s`` limits this call, in seconds;
        the checkpoint has its own deadline. If the call is cancelled or takes too long, the checkpoint is given up
        unless it is complete. Raises ``CheckpointFailed`` with the reason, ``AskTimeout`` if the call took too long,
        and ``SidecarError`` for an unknown operator.
        """

    @_on_its_loop(SidecarRuntime.savepoint)
    def savepoint(self, *args: Any, **kwargs: Any) -> Any:
        """Write a savepoint of an operator into ``directory`` (a path or URL) and return the path or URL of its file.

        Nothing is committed for a savepoint, and no retry restores it. A new application starts from it with
        ``coordinate(..., restore=CheckpointFile(file))``.

        The file's name, ``savepoint-OPERATOR-ID-TOKEN.hgc``, is unique, so any number of applications may write into
        one directory. Nothing there is replaced. A savepoint that fails, or whose call is cancelled or takes too long,
        deletes only what it has written itself.

        Raises ``SidecarError`` for a directory outside ``StorageDetails.savepoint_roots``, and otherwise as
        ``checkpoint`` does.
        """

    @_on_its_loop(SidecarRuntime.request)
    def request(self, *args: Any, **kwargs: Any) -> Any:
        """Send ``payload`` to a coordinator and return the result of its ``handle_client_request``.

        ``part`` is the name of the stage, if the operator is a ``chain``.

        Payload and result stay in this process and are not copied. Raises what the coordinator raises, ``SidecarError``
        for an unknown operator, and ``AskTimeout`` if there is no answer within ``timeout_s`` seconds.
        """

    @_on_its_loop(SidecarRuntime.status)
    def status(self, *args: Any, **kwargs: Any) -> Any:
        """Return the current state: operators, subtasks and attempts, checkpoints, latencies, recent failures.

        The result is immutable, and ``to_dict()`` makes JSON of it. It is cheap enough to be taken ten times a second
        with 10,000 subtasks. The percentiles of latencies need ``pip install 'headgate[observability]'``. Raises
        ``AskTimeout`` if an actor does not answer within 10 s.
        """

    @_on_its_loop(SidecarRuntime.explain)
    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """Return a sentence for everything that has waited for ``waiting_s``: who waits for whom, and since when.

        The log says the same unasked after ``Watching.stalled_report_s``. Another sentence names each operator
        whose last action was several jobs for Spark, as ``take`` is. Otherwise the result is empty if everything moves.
        Raises ``AskTimeout`` as ``status`` does.
        """

    @checked()
    @contextmanager
    def trace(self, path: str | PathLike[str]) -> Iterator[None]:
        """Write a timeline into the file ``path`` while the block runs; ``ui.perfetto.dev`` and Chrome open it.

        It has the coordinators' methods, runs, attempts by executor, checkpoints with their phases, events in flight,
        failures and resets. The file has at most 100 MiB, and is readable even if this process is killed. Leaving the
        sidecar ends the trace too. Raises ``SidecarError`` if the file cannot be written, or another trace is being
        written.
        """
        started: list[Tracing] = []
        try:
            self._call(SidecarRuntime._open_trace, path, started.append)
            yield
        finally:
            try:
                self._end_trace(started)
            except KeyboardInterrupt:  # it may have come before that had begun
                self._end_trace(started)
                raise

    def _end_trace(self, started: list[Tracing]) -> None:
        if self._calls is not None:  # otherwise leaving the sidecar has ended it
            self._call(SidecarRuntime._close_trace, *started)

    @checked(action=ACTION)
    def run(
        self,
        action: Callable[[], T],
        *,
        restart: RestartStrategy = DEFAULT_RESTART,
        operators: Collection[OperatorHandle | str] | None = None,
        input_id: str | None = None,
    ) -> T:
        """Call ``action``, your Spark action, again after each failed run, as ``restart`` allows; return its result.

        The action runs on the caller's thread. After a failure of a coordinated run (an exception in the coordinator,
        ``fail_job``, too many failed tasks or checkpoints), this waits for the delay that ``restart`` sets and calls
        the action again. Coordinators and subtasks then start from the last completed checkpoint in streaming mode,
        from the beginning in batch mode. When the action returns, this waits until a final checkpoint has committed the
        last output, and restarts if that fails.

        Only operators whose tasks run in the Spark jobs of this action count, whatever other threads run at the same
        time. These are the jobs that are started by this thread and its ``pyspark.InheritableThread``s. ``operators``
        names the operators explicitly, as handles or names. Use it if other threads start the action's jobs while
        actions of further operators run, or if the action reads the result of another action's job.

        In streaming mode, a run after one that has ended well has other input, and one after an interrupted run
        continues it. ``input_id`` names the input, for example by its date. Use it for a job that a scheduler repeats
        if its driver dies: if that happens between the last checkpoint and the end of the program, only the name shows
        that everything is written. A run with the name of the last input continues it or, if it was finished, skips all
        of it. A run with another name is refused while an input is unfinished. If the action has several jobs, give
        each of them a separate operator: each job over one operator is another run of it, which begins at its first
        record, and a repeat is refused once the second job has completed a checkpoint. Batch mode ignores it.

        If the action is interrupted (Ctrl-C, or the interrupt of a notebook's kernel), its jobs fail, and this raises
        ``KeyboardInterrupt``.

        Raises what ``action`` raises if no coordinated run has failed, because a restart would not help;
        ``RestartsExhausted``, with the last cause chained; ``StorageFenced`` if a later application has taken over the
        storage; ``ServerLost`` if the Spark Connect server or the session there is gone; ``NotSettled`` if the end of
        the run is not known in time; ``InputRefused`` if it is not known whether a run has the same input as the last
        checkpoint; ``TypeError`` or ``ValueError`` unless ``input_id`` is a text of 1 to 200 printable characters.
        """
        calls, runtime = self._entered()

        async def begin() -> ActionRuns:
            return runtime._actions.runs(operators, input_id)

        async def on_loop(step: Callable[[], Awaitable[R]], /) -> R:
            return call_on_loop(calls, step)

        def stop(action_id: str, cause: str) -> None:
            call_on_loop(calls, partial(runtime._actions.stop, action_id, cause))

        return run_blocking(call_on_loop(calls, begin), restart, action, runtime._driver.marked, stop, on_loop=on_loop)

    @checked()
    def for_each_batch(
        self, operator: OperatorHandle | str, function: Callable[[Any, int], object], *, adopt: bool = False
    ) -> Callable[[Any, int], None]:
        """Return a function for ``writeStream.foreachBatch`` that commits each batch of ``function`` exactly once.

        ``function(frame, batch_id)`` runs one Spark action over the tasks of ``operator``, or none if the batch has
        nothing for it, and returns when the action has returned. The operator must be in streaming mode and belong to
        this query only. The returned function then waits for the final checkpoint of that run, which contains the batch
        and is labelled with it, before Spark records the end of the batch. If Spark asks for a batch again, it runs
        from the matching checkpoint, or is skipped if it is already committed. Everything else that ``function`` does
        must come before the action, and may be repeated.

        With ``adopt``, the first batch runs from the existing state, whatever it is. Use it for an operator that is new
        in a query which has run before.

        In the query, the returned function raises ``BatchRefused``, ``BatchFailed``, ``NotSettled``, ``StorageFenced``,
        and what ``function`` raises. Each of them fails the query. This method raises ``SidecarError`` for an operator
        that is unknown or in batch mode.
        """
        if is_remote(self._spark):
            raise ConnectRefused(
                "with Spark Connect, Spark calls the function of foreachBatch on the server, and this sidecar is not "
                "there: run the operator inside the query, with mapInArrow or mapInPandas, or run the program in the "
                "driver"
            )
        operator_id = operator if isinstance(operator, str) else operator.operator_id

        def call(method: Callable[[MicroBatches], Awaitable[Any]]) -> Any:
            calls, runtime = self._entered()
            return call_on_loop(calls, lambda: method(runtime._batches()))

        async def check(batches: MicroBatches) -> None:
            batches.check(operator_id)

        call(check)
        return ForEachBatch(operator_id, function, adopt, call)

    def _repr_html_(self) -> str:
        """What a notebook shows: the status and the diagnosis, or why there is none within a second."""

        def read() -> tuple[SidecarStatus, tuple[str, ...]]:
            status = self.status()
            return status, explain(status)

        return sidecar_html(read)

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that tasks connect to."""
        return self._running()[1].address

    @property
    def status_address(self) -> tuple[str, int] | None:
        """The host and port on which the status is shown; None without ``Watching.status_port``."""
        return self._running()[1].status_address

    @property
    def lost(self) -> ServerLost | None:
        """Why the Spark Connect server, or the session there, is gone; None if it is not, as far as is known."""
        return self._running()[1].lost

    @property
    def relay_kind(self) -> str:
        """The way Spark's events reach the sidecar: ``"jvm"``, or ``"py4j"`` if configured or as the fallback."""
        return self._running()[1].relay_kind

    # --- async with: the caller's loop ----------------------------------------------------------------------------

    async def __aenter__(self) -> SidecarRuntime:
        self._require_idle()
        runtime = SidecarRuntime(driver_of(self._spark), self._config)
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

    def _values_of(self, part: str) -> ValuePort:
        return self._running()[1]._values_of(part)

    def _call(
        self, method: Callable[Concatenate[SidecarRuntime, P], Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        calls, runtime = self._entered()
        return call_on_loop(calls, partial(method, runtime, *args, **kwargs))

    def _entered(self) -> tuple[LoopCalls, SidecarRuntime]:
        """What is needed to wait for the sidecar's loop.

        Raises ``SidecarError`` on that loop itself, and ``TypeError`` for a call that is awaited.
        """
        calls, runtime = self._running()
        refuse_await("or enter the sidecar with `async with Sidecar(spark) as sidecar`, whose methods are awaited")
        if threading.get_ident() == runtime._thread_id:
            raise SidecarError(
                "a method of Sidecar was called on the sidecar's own event loop, by a coordinator, and would wait for "
                "itself: let the program call it, or use context.call_async(function, handler=...), which calls it on "
                "another thread"
            )
        return calls, runtime

    def _running(self) -> tuple[LoopCalls, SidecarRuntime]:
        if self._is_in_fork:
            raise SidecarError(
                f"the sidecar runs in process {self._process_id}, from which this one was forked, and only that one can"
                " use it: call it there, and pass the result on, for example through a multiprocessing.Queue"
            )
        if self._calls is None or self._runtime is None:
            if self._runtime is not None:
                raise SidecarNotRunning(
                    "this sidecar was entered with `async with ... as sidecar`: await the methods of that object"
                )
            raise SidecarNotRunning(
                "the sidecar is not running: enter it with `with Sidecar(spark) as sidecar:`, "
                "or start one with `sidecar = headgate.start(spark)`"
            )
        return self._calls, self._runtime


def driver_of(spark: Any) -> SparkDriver:
    """The driver of a session or context, classic or of Spark Connect.

    Raises ``TypeError`` for something else, and ``RelayStopped`` for a stopped context.
    """
    if is_remote(spark):
        from spark_bridge.connect.driver import ConnectDriver

        return ConnectDriver(spark)
    return LocalDriver(spark)


# --- leaving a sidecar that has its own thread -------------------------------------------------------------------


class Leaver:
    """The thread that leaves a sidecar.

    It starts with the sidecar, because no thread can be started while the interpreter of Python 3.12 or later ends.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="headgate-leaving", daemon=True)
        self._thread.start()

    def call(self, close: Callable[[], bool | None]) -> Future[bool | None]:
        """Call ``close`` there, and return its outcome."""
        outcome: Future[bool | None] = Future()

        def call() -> None:
            try:
                outcome.set_result(close())
            except BaseException as error:  # for the waiting thread
                outcome.set_exception(error)

        self._calls.put(call)
        return outcome

    def end(self) -> None:
        """End the thread, which may itself call this."""
        self._calls.put(None)
        self.join()

    def join(self) -> None:
        """Wait until the thread has ended. Returns immediately in the thread itself."""
        if current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def leave(
    close: Callable[[], bool | None],
    leaver: Leaver,
    runtime: SidecarRuntime,
    shutdown_timeout_s: float,
    *,
    raising: bool,
) -> bool | None:
    """Have ``leaver`` call ``close``, which leaves the contexts of ``runtime`` and ends ``leaver``.

    Returns what ``close`` returns, or raises what it raises. A Ctrl-C cancels what is still running, and is raised at
    the end. If the loop does not turn for ``shutdown_timeout_s`` plus ``BLOCKED_S``, or does not end within this time
    after the sidecar is closed, it is abandoned. This raises ``SidecarError``, but is only logged if another exception
    is being raised (``raising``).
    """
    patience_s = shutdown_timeout_s + BLOCKED_S
    loop = _Loop(runtime)
    interrupt: BaseException | None = None
    with holding_interrupts() as interrupts:
        outcome = leaver.call(close)
        while not outcome.done():
            if (pressed := interrupts.wait(outcome, LOOK_S)) is not None:
                interrupt = interrupt or pressed
                loop.call(runtime._hurry)
            elif loop.silent_s() > patience_s:
                problem = loop.describe()
                log.error("event loop abandoned", why=problem)
                if interrupt is None and not raising:
                    raise SidecarError(problem)
                break
        else:
            leaver.join()
    if interrupt is not None:
        raise interrupt
    return outcome.result() if outcome.done() else None


class _Loop:
    """The sidecar's event loop, observed from another thread."""

    def __init__(self, runtime: SidecarRuntime) -> None:
        self._runtime = runtime
        self._turned_at = time.monotonic()
        self._asked = False

    def call(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nothing runs any more
            self._runtime._loop.call_soon_threadsafe(function)

    def silent_s(self) -> float:
        """The seconds for which the loop has not turned, or has not ended although the sidecar is closed."""
        if not self._asked and not self._runtime._closed:
            self._asked = True
            self.call(self._turned)
        return time.monotonic() - self._turned_at

    def _turned(self) -> None:
        self._turned_at, self._asked = time.monotonic(), False

    def describe(self) -> str:
        if self._runtime._closed:
            return (
                "the sidecar is closed, but tasks that a coordinator has started ignore their cancellation: end them "
                "in close(), and let asyncio.CancelledError through"
            )
        frame = sys._current_frames().get(self._runtime._thread_id)
        place = "a place that is not known" if frame is None else running_at(frame)
        return (
            f"the sidecar could not be closed: its event loop has been blocked for {self.silent_s():.0f} s at {place}. "
            "A coordinator must not block: give such work to call_async"
        )
