# SPDX-License-Identifier: Apache-2.0

"""The relay that needs nothing in the driver's JVM but Py4J: a Python object on the listener bus.

Each field of an event is one round trip to the JVM, on the bus's own thread, so this relay is 5 to 100 times
slower for each event than the one in Java, and its queue on the bus can overflow. It is the fallback
if the JVM refuses the other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio

from actors.logs import CountedLog, get_logger
from actors.threads import DRIVER
from protocol.facts import (
    ApplicationEnded,
    EngineFact,
    ExecutorLost,
    FactsDropped,
    JobEnded,
    JobStarted,
    StageCompleted,
    StageLook,
    StageSubmitted,
    StatusReported,
    TaskEnded,
    TaskOutcome,
    TaskPlace,
    TaskStarted,
    TaskState,
)
from spark_bridge.bridge.relay.interface import (
    REJECTED,
    OnFact,
    RelayError,
    RelayRefused,
    RelayStatistics,
    RelayStopped,
    require_driver,
)
from spark_bridge.bridge.relay.jvm_link import deliver
from spark_bridge.bridge.relay.records import RelayedFact, shorten
from spark_bridge.task_entry import ACTION_PROPERTY

BUS_QUEUE = "headgate-py4j"

# The outcome for each class of a task's end reason, and how to read its message. Any other failure is FAILED.
_END_REASONS: dict[str, tuple[TaskOutcome, Callable[[Any], str]]] = {
    "Success$": (TaskOutcome.SUCCESS, lambda reason: ""),
    "ExceptionFailure": (TaskOutcome.FAILED, lambda reason: reason.description()),
    "TaskKilled": (TaskOutcome.KILLED, lambda reason: reason.reason()),
    "Resubmitted$": (TaskOutcome.RESUBMITTED, lambda reason: reason.toErrorString()),
    "ExecutorLostFailure": (TaskOutcome.EXECUTOR_LOST, lambda reason: reason.toErrorString()),
    "FetchFailed": (TaskOutcome.FETCH_FAILED, lambda reason: reason.message()),
    "TaskCommitDenied": (TaskOutcome.COMMIT_DENIED, lambda reason: reason.toErrorString()),
}
_OTHER_REASON = (TaskOutcome.FAILED, lambda reason: reason.toErrorString())

_log = get_logger("headgate.relay")
_repeated = CountedLog(_log)  # what each fact may cause


def _each(sequence: Any) -> Iterator[Any]:
    iterator = sequence.iterator()
    while iterator.hasNext():
        yield iterator.next()


def _job_started(event: Any) -> JobStarted:
    stage_ids = tuple(stage.stageId() for stage in _each(event.stageInfos()))
    return JobStarted(event.jobId(), stage_ids, _action_of(event.properties()))


def _action_of(properties: Any) -> str:
    return "" if properties is None else str(properties.getProperty(ACTION_PROPERTY, ""))


def _job_ended(event: Any) -> JobEnded:
    result = event.jobResult()
    failed = _class_name(result) == "JobFailed"
    # String.valueOf in the other relay says "null" for an exception without a message; so does this.
    reason = str(result.exception().getMessage() or "null") if failed else ""
    return JobEnded(event.jobId(), not failed, shorten(reason))


def _stage_submitted(event: Any) -> StageSubmitted:
    stage = event.stageInfo()
    rdds = list(_each(stage.rddInfos()))  # the stage's own RDD, then those that it is made of
    barrier = any(rdd.isBarrier() for rdd in rdds)
    partitions = rdds[0].numPartitions() if rdds else 0
    return StageSubmitted(stage.stageId(), stage.attemptNumber(), stage.numTasks(), barrier, partitions)


def _stage_completed(event: Any) -> StageCompleted:
    stage = event.stageInfo()
    failure = stage.failureReason()
    return StageCompleted(
        stage.stageId(), stage.attemptNumber(), shorten(failure.get()) if failure.isDefined() else None
    )


def _task_started(event: Any) -> TaskStarted:
    task = event.taskInfo()
    return TaskStarted(
        task.taskId(),
        event.stageId(),
        event.stageAttemptId(),
        task.partitionId(),  # not index(): that is the place in the task set
        task.attemptNumber(),
        task.speculative(),
        shorten(task.executorId()),
        shorten(task.host()),
    )


def _task_ended(event: Any) -> TaskEnded:
    task, reason = event.taskInfo(), event.reason()
    outcome, message = _END_REASONS.get(_class_name(reason), _OTHER_REASON)
    return TaskEnded(
        task.taskId(),
        event.stageId(),
        event.stageAttemptId(),
        task.partitionId(),
        task.attemptNumber(),
        outcome,
        shorten(message(reason) or ""),
    )


def _executor_lost(event: Any) -> ExecutorLost:
    return ExecutorLost(shorten(event.executorId()), shorten(event.reason()))


def _application_ended(_event: Any) -> ApplicationEnded:
    return ApplicationEnded()


def _class_name(java_object: Any) -> str:
    return str(java_object.getClass().getSimpleName())


_READERS: dict[str, Callable[[Any], EngineFact]] = {
    "onJobStart": _job_started,
    "onJobEnd": _job_ended,
    "onStageSubmitted": _stage_submitted,
    "onStageCompleted": _stage_completed,
    "onTaskStart": _task_started,
    "onTaskEnd": _task_ended,
    "onExecutorRemoved": _executor_lost,
    "onApplicationEnd": _application_ended,
}


class _BusListener:
    """The object that Py4J's callback server calls, on its own threads, for the 35 methods of the listener.

    Spark logs an exception for each event of a missing method, and each release adds methods. So this class
    answers every name that begins with ``on``; the methods that are not needed do nothing.
    """

    class Java:
        implements = ("org.apache.spark.scheduler.SparkListenerInterface",)

    def __init__(self, heard: Callable[[EngineFact, int], None], failed: Callable[[str], None]) -> None:
        self._heard = heard
        self._failed = failed

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        if not name.startswith("on"):
            raise AttributeError(name)
        read = _READERS.get(name)
        if read is None:
            return lambda event: None

        def callback(event: Any) -> None:
            callback_us = time.time_ns() // 1000
            try:
                self._heard(read(event), callback_us)
            except Exception as problem:  # no exception may reach Spark's bus
                self._failed(f"{name}: {problem!r}")

        return callback


class Py4jRelay:
    """A ``Relay`` whose listener is a Python object behind Py4J's callback server.

    Args:
        spark: a classic SparkContext or SparkSession.
        on_fact: called on the event loop of ``start`` for each fact.
    """

    kind = "py4j"

    def __init__(self, spark: Any, on_fact: OnFact) -> None:
        self._context = require_driver(spark)
        self._on_fact = on_fact
        self.statistics = RelayStatistics()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Any = None
        self._bus: Any = None
        self._bus_drops: Any = None
        self._bus_drops_seen = 0
        self._started_callback_server = False
        self._over: str | None = None

    async def start(self) -> None:
        """See ``Relay.start``. A start that fails leaves nothing behind."""
        self._loop = asyncio.get_running_loop()
        try:
            await DRIVER.run(self._attach)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.close()
            raise

    async def close(self) -> None:
        """See ``Relay.close``."""
        self._over = self._over or "the relay is closed"
        self._loop = None  # facts from the callback threads are dropped from now on
        await DRIVER.run(self._detach)

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        """See ``Relay.kill_task``."""

        def kill(java_context: Any) -> None:
            ids = frozenset({task_attempt_id} if place is not None else ())
            if _look(java_context, ids, frozenset()).places.get(task_attempt_id, place) == place:
                java_context.killTaskAttempt(task_attempt_id, True, shorten(reason))

        await self._command(kill)

    async def cancel_job(self, job_id: int, reason: str) -> None:
        """See ``Relay.cancel_job``."""
        await self._command(lambda sc: sc.cancelJob(job_id, shorten(reason)))

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        """See ``Relay.query_status``."""
        for started in await self._command(_active_jobs):
            self._deliver(RelayedFact(started, time.time_ns() // 1000))
        status: StatusReported = await self._command(lambda sc: _look(sc, task_attempt_ids, job_ids))
        return status

    async def watch(self, stage_id: int, task_attempt_id: int) -> None:
        """See ``Relay.watch``. Nothing to do: this relay holds nothing back."""

    async def look_at_stage(self, stage_id: int) -> StageLook:
        """See ``Relay.look_at_stage``."""
        look: StageLook = await self._command(lambda sc: _look_at_stage(sc, stage_id))
        return look

    async def _command(self, call: Callable[[Any], Any]) -> Any:
        from py4j.protocol import Py4JError

        if self._over is not None:
            raise RelayStopped(self._over)

        def run() -> Any:
            return call(self._context._jsc.sc())

        try:
            return await DRIVER.run(run)
        except (Py4JError, AttributeError, OSError) as problem:  # AttributeError: _jsc is None
            if self._context._jsc is None:
                raise RelayStopped("the SparkContext has stopped: make a new session and a new sidecar") from problem
            raise RelayError(f"Spark rejected the command: {shorten(str(problem))}. {REJECTED}") from problem

    # --- on worker threads, because Py4J blocks ---

    def _attach(self) -> None:
        from py4j.protocol import Py4JError
        from pyspark import java_gateway

        gateway, java_context = self._context._gateway, self._context._jsc.sc()
        if java_context.isStopped():
            raise RelayStopped("the SparkContext has stopped: build a new session first")
        try:
            self._started_callback_server = gateway.__dict__.get("_callback_server") is None
            java_gateway.ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
            # The bus finds a listener by identity, and Py4J makes a new Java proxy each time a Python object
            # crosses over: take one Java proxy out of a list, to leave the bus with what has joined it.
            one = self._context._jvm.java.util.ArrayList()
            one.add(_BusListener(self._heard, self._callback_failed))
            self._listener = one.get(0)
            self._bus = java_context.listenerBus()
            metrics = self._bus.metrics().metricRegistry()
            self._bus_drops = metrics.counter(f"queue.{BUS_QUEUE}.numDroppedEvents")
            self._bus_drops_seen = self._bus_drops.getCount()
            self._bus.addToQueue(self._listener, BUS_QUEUE)
        except (Py4JError, OSError) as problem:
            raise RelayRefused(
                f"Py4J could not add a listener to Spark's bus: {shorten(str(problem))}. Look into the driver's log, "
                'make sure that its JVM can connect to Python on 127.0.0.1, or use SidecarConfig(relay="jvm")'
            ) from problem

    def _detach(self) -> None:
        from py4j.protocol import Py4JError

        listener, self._listener = self._listener, None
        try:
            if listener is not None and self._bus is not None:
                self._bus.removeListener(listener)
        except (Py4JError, OSError) as problem:  # the JVM is gone, and the bus with it
            _log.debug("py4j listener already gone", cause=repr(problem))
        if self._started_callback_server:
            self._started_callback_server = False
            if self._context._gateway is not None:
                _stop_callback_server(self._context._gateway)

    # --- on the threads of the callback server ---

    def _heard(self, fact: EngineFact, callback_us: int) -> None:
        if isinstance(fact, JobEnded | StageCompleted):  # rare enough for one more round trip
            lost = self._bus_drops.getCount()
            if lost > self._bus_drops_seen:
                self._hand_over(FactsDropped(lost - self._bus_drops_seen), callback_us)
                self._bus_drops_seen = lost
        self._hand_over(fact, callback_us)

    def _callback_failed(self, problem: str) -> None:
        _repeated.warning("Spark event read failed", problem=problem)
        self._hand_over(FactsDropped(1), time.time_ns() // 1000)

    def _hand_over(self, fact: EngineFact, callback_us: int) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._deliver, RelayedFact(fact, callback_us))
        except RuntimeError:  # the loop has closed
            self._loop = None

    def _deliver(self, relayed: RelayedFact) -> None:
        if self._loop is None:
            return
        if isinstance(relayed.fact, FactsDropped):
            self.statistics.dropped += relayed.fact.count
        self.statistics.records += 1
        if isinstance(relayed.fact, ApplicationEnded):
            self._over = "the SparkContext has stopped: make a new session and a new sidecar"
        deliver(self._on_fact, relayed)


def _stop_callback_server(gateway: Any) -> None:
    """Stop the server that we started, unless it now serves another Python object as well."""
    server = gateway._callback_server
    if server is None:  # it could not start
        return
    if not all(isinstance(proxy, _BusListener) for proxy in list(gateway.gateway_property.pool.dict.values())):
        return
    # Py4J closes each connection's stream, which waits permanently for the thread that reads from it: end the
    # reading first.
    for connection in list(server.connections):
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)
    gateway.shutdown_callback_server()
    gateway._callback_server = None  # so that it is started again when needed


def _active_jobs(java_context: Any) -> list[JobStarted]:
    """The start of each active job, which may be known already: the bus may have dropped some."""
    from py4j.protocol import Py4JJavaError

    scheduler = java_context.dagScheduler()
    started = []
    with contextlib.suppress(Py4JJavaError):  # the tables have changed in the meantime; the next query finds the rest
        for job in list(_each(scheduler.jobIdToActiveJob().values())):
            with contextlib.suppress(Py4JJavaError):  # this one has ended
                stages = tuple(_each(scheduler.jobIdToStageIds().apply(job.jobId())))
                started.append(JobStarted(job.jobId(), stages, _action_of(job.properties())))
    return started


def _look(java_context: Any, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
    """Read the schedulers' tables without their locks, so an absence counts only if it is seen three times."""
    active = java_context.dagScheduler().jobIdToActiveJob()
    jobs = {job_id: any(active.contains(job_id) for _ in range(3)) for job_id in job_ids}
    states = dict.fromkeys(task_attempt_ids, TaskState.UNKNOWN)
    places: dict[int, TaskPlace] = {}
    for task_set in _task_sets(java_context.taskScheduler().rootPool()) if states else ():
        infos = task_set.taskInfos()
        for task_attempt_id in task_attempt_ids - places.keys():
            task = _task_info(infos, task_attempt_id)
            if task is not None:
                states[task_attempt_id] = _state(task)
                places[task_attempt_id] = TaskPlace(task_set.stageId(), task.partitionId())
    return StatusReported(jobs, states, places)


def _look_at_stage(java_context: Any, stage_id: int) -> StageLook:
    stages = java_context.dagScheduler().stageIdToStage()
    found = next((stage for stage in (stages.get(stage_id) for _ in range(3)) if stage.isDefined()), None)
    if found is None:
        return StageLook()
    stage = found.get()
    count = stage.rdd().getNumPartitions()
    kept, outputs = set(), set()
    if _class_name(stage) == "ShuffleMapStage":
        partitions = frozenset(_each(stage.findMissingPartitions()))
        shuffle = -1 - stage.shuffleDep().shuffleId()
        outputs.add(shuffle)
        if len(partitions) < count:
            kept.add(shuffle)
    else:
        partitions = frozenset(stage.partitions())
    outputs.update(rdd.id() for rdd in _each(stage.latestInfo().rddInfos()) if rdd.storageLevel().isValid())
    if any(output >= 0 for output in outputs):
        for rdd in java_context.getRDDStorageInfo():
            if rdd.id() in outputs and 0 < rdd.numCachedPartitions() < rdd.numPartitions():
                kept.add(rdd.id())
    return StageLook(partitions, count, frozenset(outputs), frozenset(kept))


def _task_sets(place: Any) -> Iterator[Any]:
    """Every task set below a scheduling pool. (Its sorted queue leaves out those with nothing to launch.)"""
    inside = place.schedulableQueue()
    if inside is None:
        yield place
        return
    iterator = inside.iterator()
    while iterator.hasNext():
        yield from _task_sets(iterator.next())


def _task_info(infos: Any, task_attempt_id: int) -> Any:
    found = next((task for task in (infos.get(task_attempt_id) for _ in range(3)) if task.isDefined()), None)
    return None if found is None else found.get()


def _state(task: Any) -> TaskState:
    if not task.finished():
        return TaskState.RUNNING
    return TaskState.SUCCEEDED if task.successful() else TaskState.ENDED
