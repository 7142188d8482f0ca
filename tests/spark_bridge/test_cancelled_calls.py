# SPDX-License-Identifier: Apache-2.0

"""Every call of a sidecar is cancelled after every turn of the loop, alone and beside another one like it.

Afterwards everything is as before the call or as after it, the name can be used, and nothing is left. The driver is
simulated, and worker threads run in the middle of a turn. So the same turn is the same point of a call each time.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from actors import ActorSystem
from actors.coordination import CoordinatorContext, OperatorCoordinator, SplitEnumerator, StaticSplitEnumerator
from actors.testing import settle
from actors.virtual_loop import VirtualClock, VirtualLoop, virtual_loop
from headgate.testing import running_operator
from protocol.errors import HeadgateError
from protocol.facts import ApplicationEnded, JobStarted
from protocol.restart import FixedDelay
from spark_bridge.common.errors import SidecarError, SidecarNotRunning
from spark_bridge.driver.config import SidecarConfig, Watching
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.sources.source import Source
from spark_bridge.storage import CheckpointFile, MemoryStorage, StorageError
from spark_bridge.subtask import SplitReader
from tests.spark_bridge.simulated_driver import SimulatedDriver

COLUMNS = StructType([StructField("id", LongType())])
TURNS_MAX = 2_000
"""A call that takes more turns than this hangs."""


class Living(OperatorCoordinator):
    """Counts those that have started and are not closed. Each step takes some turns."""

    living: set[Living] = set()  # noqa: RUF012 - of all of them
    restored: list[bytes | None] = []  # noqa: RUF012 - of all of them
    snapshots: list[int] = []  # noqa: RUF012 - of all of them

    async def start(self, context: CoordinatorContext) -> None:
        self.living.add(self)
        for _ in range(3):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)
        self.living.discard(self)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self.snapshots.append(checkpoint_id)
        await asyncio.sleep(0)
        return b"state"

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.restored.append(state)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return request

    async def handle_client_request(self, payload: Any) -> Any:
        await asyncio.sleep(0)
        return payload


class Numbers(Source):
    """A source that nobody reads here."""

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return StaticSplitEnumerator([1, 2])

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return SplitReader


@dataclass
class Bench:
    """A running sidecar, and the loop with the worker threads that it sees."""

    runtime: SidecarRuntime
    driver: SimulatedDriver
    virtual: VirtualLoop
    folder: Path
    found: dict[str, Any] = field(default_factory=dict)

    def task(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        with self.virtual.enter():
            return asyncio.get_running_loop().create_task(call)

    async def do(self, call: Coroutine[Any, Any, Any]) -> Any:
        return await self.task(call)


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    before = others()
    with virtual_loop(VirtualClock()) as virtual:
        driver = SimulatedDriver()
        runtime = SidecarRuntime(driver, SidecarConfig(watching=Watching(stalled_report_s=3600.0)))
        it = Bench(runtime, driver, virtual, folder)
        await it.do(runtime.__aenter__())
        try:
            yield it
        finally:
            virtual.close()
            await it.do(runtime.__aexit__(None, None, None))
    assert others() == before
    assert driver.closed


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


# --- the calls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """``prepare`` comes before each call, ``check`` after it, if it ended."""

    call: Callable[[Bench], Awaitable[Any]]
    prepare: Callable[[Bench], Awaitable[Any]] | None = None
    check: Callable[[Bench], Awaitable[None]] | None = None


async def coordinate(it: Bench, **options: Any) -> None:
    await it.runtime.coordinate("a", Living, parallelism=1, **options)


async def streaming(it: Bench) -> None:
    await coordinate(it, mode="streaming")


async def with_checkpoint(it: Bench) -> None:
    await coordinate(it, mode="streaming", restore="none")
    await it.runtime.checkpoint("a")
    await it.runtime.release("a")
    await coordinate(it, mode="streaming")  # it exists
    await it.runtime.release("a")
    assert Living.restored[-1] == b"state"


async def start_is_as_before_or_as_after(it: Bench) -> None:
    """If the call has not started an operator, it has not skipped the stored checkpoint either."""
    started = "a" in it.runtime.handles
    Living.restored.clear()
    await coordinate(it, mode="streaming", replace=True)
    assert Living.restored == ([] if started else [b"state"])


async def still_there(it: Bench) -> None:
    assert "a" in it.runtime.handles


async def has_one_parallelism(it: Bench) -> None:
    """The old one or the new one, everywhere; and it can be changed again."""
    handle = it.runtime.handles["a"]
    status = (await it.runtime.status()).operators["a"]
    assert handle.parallelism == status.parallelism in (1, 2)
    await it.runtime.rescale("a", 3)
    assert it.runtime.handles["a"] is handle
    assert handle.parallelism == (await it.runtime.status()).operators["a"].parallelism == 3
    assert Living.restored[-1] == b"state"


async def source(it: Bench, **options: Any) -> None:
    await it.runtime.source("a", Numbers(), schema=COLUMNS, **options)


async def savepoint(it: Bench) -> None:
    file = await it.runtime.savepoint("a", directory=str(it.folder / "savepoints"))
    it.found.setdefault("files", set()).add(Path(file))


async def two_of(call: Callable[[Bench], Awaitable[Any]], it: Bench) -> None:
    """The second one waits for the first."""
    await asyncio.gather(call(it), call(it))


async def nothing_is_taken_later(it: Bench) -> None:
    """What was cancelled holds up nobody, is not taken any more, and leaves no file whose name nobody knows."""
    assert "a" in it.runtime.handles
    taken = await it.runtime.checkpoint("a")
    await settle()
    statistics = it.runtime.handles["a"].statistics()
    assert statistics["last_completed_checkpoint_id"] == taken
    assert Living.snapshots[-1] == taken
    assert set((it.folder / "savepoints").glob("*")) == it.found.get("files", set())


async def trace(it: Bench) -> None:
    async with it.runtime.trace(it.folder / "trace.json"):
        await asyncio.sleep(0)


async def traced_no_more(it: Bench) -> None:
    await trace(it)


CASES = {
    "coordinate": Case(coordinate),
    "coordinate streaming": Case(lambda it: coordinate(it, mode="streaming")),
    "coordinate restore=none": Case(
        lambda it: coordinate(it, mode="streaming", restore="none"), with_checkpoint, start_is_as_before_or_as_after
    ),
    "coordinate replace": Case(lambda it: coordinate(it, replace=True), coordinate, still_there),
    "release": Case(lambda it: it.runtime.release("a"), coordinate),
    "source": Case(source),
    "source replace": Case(lambda it: source(it, replace=True), source, still_there),
    "release source": Case(lambda it: it.runtime.release("a"), source),
    "rescale": Case(lambda it: it.runtime.rescale("a", 2), streaming, has_one_parallelism),
    "checkpoint": Case(lambda it: it.runtime.checkpoint("a"), streaming, nothing_is_taken_later),
    "two checkpoints": Case(
        lambda it: two_of(lambda it: it.runtime.checkpoint("a"), it), streaming, nothing_is_taken_later
    ),
    "savepoint": Case(savepoint, streaming, nothing_is_taken_later),
    "two savepoints": Case(lambda it: two_of(savepoint, it), streaming, nothing_is_taken_later),
    "request": Case(lambda it: it.runtime.request("a", 1), coordinate, still_there),
    "status": Case(lambda it: it.runtime.status(), coordinate, still_there),
    "explain": Case(lambda it: it.runtime.explain(), coordinate, still_there),
    "settle": Case(lambda it: it.runtime._operators.settle(120.0), coordinate, still_there),
    "uncommitted_output": Case(lambda it: it.runtime._uncommitted_output(), coordinate, still_there),
    "trace": Case(trace, None, traced_no_more),
    "run": Case(lambda it: it.runtime.run(lambda: 1), coordinate, still_there),
}


async def usable(it: Bench) -> None:
    """The name works again, and nothing that was cancelled is left."""
    runtime = it.runtime
    was_there = "a" in runtime.handles
    assert len(Living.living) <= was_there
    if was_there:
        await runtime.status()
    await runtime.coordinate("a", Living, parallelism=1, replace=True)
    assert await runtime.request("a", 1) == 1
    assert len(Living.living) == 1
    await runtime.release("a")
    assert len(Living.living) == 0
    assert not runtime.handles


@pytest.mark.parametrize("scoped", [False, True], ids=["task", "scope"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside the same"])
@pytest.mark.parametrize("name", CASES)
async def test_call_cancelled_after_any_turn_leaves_everything_as_before_or_as_after(
    name: str, beside: bool, scoped: bool, tmp_path: Path
) -> None:  # H160
    case = CASES[name]
    Living.living.clear()
    async with bench(tmp_path) as it:
        await it.do(source(it))  # the first one opens a port, which stays
        await it.do(it.runtime.release("a"))
        await settle()
        tasks, threads = len(others()), threading.active_count()
        for turns in range(TURNS_MAX):
            print(f"{name} cancelled after {turns} turns")
            if case.prepare is not None:
                await it.do(case.prepare(it))  # type: ignore[arg-type]
            ended = await _cancelled_after(it, case, turns, scoped=scoped, beside=beside)
            if case.check is not None:
                await it.do(case.check(it))  # type: ignore[arg-type]
            await it.do(usable(it))
            await settle()
            assert len(others()) == tasks, others()
            assert threading.active_count() <= threads
            if ended:
                break
        else:
            raise AssertionError(f"{name} does not end")
        assert turns > 1, "cancelled nowhere"


async def _cancelled_after(it: Bench, case: Case, turns: int, *, scoped: bool, beside: bool) -> bool:
    """Return whether the call ended before it was cancelled."""
    scope = anyio.CancelScope()

    async def call() -> None:
        with scope:
            await case.call(it)

    async def other() -> None:
        try:
            await case.call(it)
        except HeadgateError as error:  # the other one came first
            print("the other one:", error)

    task = it.task(call())
    second = it.task(other()) if beside else None
    for _ in range(turns):
        if task.done():
            break
        await asyncio.sleep(0)
    ended = task.done()
    if scoped:
        scope.cancel()
    elif not ended:
        task.cancel()
    results = await asyncio.gather(task, *([second] if second else []), return_exceptions=True)
    errors = [one for one in results if isinstance(one, BaseException)]
    allowed = (asyncio.CancelledError, HeadgateError) if beside else (asyncio.CancelledError,)
    assert all(isinstance(one, allowed) for one in errors), errors
    return ended


async def test_a_coordinator_does_nothing_before_the_storage_knows_where_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H52: it may commit what its checkpoint has prepared, and a later start from another one would repeat that."""

    def fail(*args: object, **options: object) -> None:
        raise StorageError("no space left")

    async with bench(tmp_path) as it:
        await with_checkpoint(it)
        await coordinate(it, mode="streaming")
        file = await it.runtime.savepoint("a", directory=str(tmp_path))
        await it.runtime.release("a")
        Living.living.clear()
        Living.restored.clear()
        with monkeypatch.context() as patch:
            patch.setattr(MemoryStorage, "start_from", fail)
            for restore in (CheckpointFile(file), "none"):
                with pytest.raises(StorageError, match="no space left"):
                    await coordinate(it, mode="streaming", restore=restore)
        assert Living.restored == []
        await coordinate(it, mode="streaming", restore=CheckpointFile(file))
        assert Living.restored == [b"state"]


# --- entering and leaving -----------------------------------------------------------------------------------------


async def _enter_and_leave(folder: Path) -> None:
    runtime = SidecarRuntime(SimulatedDriver(), SidecarConfig(storage=str(folder)))
    async with runtime:
        await runtime.coordinate("a", Living, parallelism=1)


async def _system(folder: Path) -> None:
    async with ActorSystem():
        await asyncio.sleep(0)


@pytest.mark.parametrize("scoped", [False, True], ids=["task", "scope"])
@pytest.mark.parametrize("use", [_enter_and_leave, _system], ids=["sidecar", "system"])
async def test_entering_and_leaving_can_be_cancelled_after_any_turn(
    use: Callable[[Path], Coroutine[Any, Any, None]], scoped: bool, tmp_path: Path
) -> None:  # H160, H163
    Living.living.clear()
    before, threads = others(), threading.active_count()
    for turns in range(TURNS_MAX):
        print(f"cancelled after {turns} turns")
        scope = anyio.CancelScope()

        async def scoped_use(scope: anyio.CancelScope = scope) -> None:
            with scope:
                await use(tmp_path)

        with virtual_loop(VirtualClock()) as virtual:
            virtual.close()  # time runs by itself
            with virtual.enter():
                task = asyncio.get_running_loop().create_task(scoped_use())
            for _ in range(turns):
                if task.done():
                    break
                await asyncio.sleep(0)
            ended = task.done()
            if scoped:
                scope.cancel()
            else:
                task.cancel()
            await asyncio.wait([task])
        if ended or scoped:
            await task
        else:
            assert task.cancelled(), task.exception()
        await settle()
        assert others() == before
        assert len(Living.living) == 0
        assert threading.active_count() <= threads
        if ended:
            return
    raise AssertionError("it does not end")


@types.coroutine
def _cancelled_at_step(
    steps: int, coroutine: Coroutine[Any, Any, Any], cancel: Callable[[], object], over: list[bool]
) -> Generator[Any, Any, None]:
    """Run ``coroutine``, and cancel it when it has suspended so often: the kit itself waits for turns without work."""
    thrown: BaseException | None = None
    for count in itertools.count():
        try:
            yielded = coroutine.send(None) if thrown is None else coroutine.throw(thrown)
        except StopIteration:
            over.append(count <= steps)
            return
        if count == steps:
            asyncio.get_running_loop().call_soon(cancel)
        thrown = None
        try:
            yield yielded
        except BaseException as error:
            thrown = error


async def _kit() -> None:
    async with running_operator(Living) as world:
        task = (await world.launch_all())[0]
        answer = task.request("x")
        await world.settle()
        assert answer.value == "x"
        await world.checkpoint()


@pytest.mark.parametrize("scoped", [False, True], ids=["task", "scope"])
async def test_test_kit_can_be_cancelled_at_any_step(scoped: bool) -> None:  # H160, H163
    Living.living.clear()
    before = others()
    for steps in range(TURNS_MAX):
        print(f"cancelled after {steps} steps")
        scope = anyio.CancelScope()
        over: list[bool] = []
        tasks: list[asyncio.Task[None]] = []

        def cancel(scope: anyio.CancelScope = scope, tasks: list[asyncio.Task[None]] = tasks) -> None:
            if scoped:
                scope.cancel()
            else:
                tasks[0].cancel()

        async def use(
            steps: int = steps,
            scope: anyio.CancelScope = scope,
            over: list[bool] = over,
            cancel: Callable[[], None] = cancel,
        ) -> None:
            with scope:
                await _cancelled_at_step(steps, _kit(), cancel, over)

        tasks.append(asyncio.get_running_loop().create_task(use()))
        await asyncio.wait(tasks)
        assert tasks[0].cancelled() or tasks[0].exception() is None, tasks[0].exception()
        await settle()
        assert others() == before
        assert not Living.living
        if over == [True]:
            return
    raise AssertionError("it does not end")


# --- actions ------------------------------------------------------------------------------------------------------


async def _begun(driver: SimulatedDriver) -> str:
    """The id of the action that is being called."""
    while not driver.marked_actions:  # noqa: ASYNC110 - a thread begins
        await asyncio.sleep(0.001)
    return driver.marked_actions[-1]


async def test_jobs_of_a_cancelled_action_end_although_no_task_has_registered() -> None:  # H160
    driver = SimulatedDriver()
    go = threading.Event()
    async with SidecarRuntime(driver, SidecarConfig()) as runtime:
        await runtime.coordinate("a", Living, parallelism=1)
        run = asyncio.get_running_loop().create_task(runtime.run(go.wait))
        action_id = await _begun(driver)
        driver.say(JobStarted(7, (1, 2), action_id))
        driver.say(JobStarted(8, (3,), "another"))
        run.cancel()
        await asyncio.wait([run])
        assert run.cancelled()
        assert [job_id for job_id, _ in driver.cancelled] == [7]
        assert driver.forbidden == [action_id]
        driver.say(JobStarted(9, (4,), action_id))  # of a thread that the action has started
        await settle()
        assert [job_id for job_id, _ in driver.cancelled] == [7, 9]
        go.set()
        assert await runtime.run(lambda: "again") == "again"


async def test_leaving_ends_queued_jobs_and_the_caller_learns_that_the_sidecar_is_closed() -> None:  # H160
    driver = SimulatedDriver()
    go = threading.Event()

    def action() -> None:
        go.wait()
        raise LookupError("Spark has cancelled the job")

    runtime = await SidecarRuntime(driver, SidecarConfig()).__aenter__()
    run = asyncio.get_running_loop().create_task(runtime.run(action))
    driver.say(JobStarted(7, (1,), await _begun(driver)))
    await runtime.__aexit__(None, None, None)
    assert [job_id for job_id, _ in driver.cancelled] == [7]
    go.set()
    with pytest.raises(SidecarNotRunning):
        await run


class Failing(Living):
    """Fails the job when the driver asks it to."""

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context
        await super().start(context)

    async def handle_client_request(self, payload: Any) -> None:
        self.context.fail_job(LookupError("the coordinator cannot go on"))


@pytest.mark.parametrize("stopped", [True, False])
async def test_failed_run_is_repeated_unless_the_context_has_stopped(stopped: bool) -> None:
    driver = SimulatedDriver()
    calls: list[int] = []
    loop = asyncio.get_running_loop()
    async with SidecarRuntime(driver, SidecarConfig()) as runtime:
        await runtime.coordinate("a", Failing, parallelism=1)
        with pytest.raises(SidecarError, match="'unknown' is not coordinated here"):
            await runtime.run(lambda: calls.append(1), operators=["unknown"])

        async def fail_the_run() -> None:
            await runtime.request("a", "fail")
            await settle()
            if stopped:
                driver.say(ApplicationEnded())

        def action() -> str:
            calls.append(1)
            if len(calls) > 1:
                return "again"
            asyncio.run_coroutine_threadsafe(fail_the_run(), loop).result()
            raise LookupError("the job was cancelled")

        run = runtime.run(action, operators=["a"], restart=FixedDelay(delay_s=0.0))
        if stopped:
            with pytest.raises(SidecarError, match="the SparkContext has stopped, so the action is not called again"):
                await run
        else:
            assert await run == "again"
    assert len(calls) == 1 + (not stopped)
