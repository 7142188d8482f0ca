# SPDX-License-Identifier: Apache-2.0

"""H195: another parallelism while the application runs: what waits, what is refused, and what is a failure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
import structlog

from actors.coordination import CheckpointFailed, CoordinatorContext, OperatorCoordinator
from protocol.attempts import RunEnded, RunStarted
from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.barrier_tracker.rescale import rescaled
from protocol.parts import join_states
from protocol.restart import FixedDelay
from protocol.wire.messages import SubtaskState
from protocol.wire.state_handles import KeyGroupRange, StateHandle
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.common.errors import CoordinatorStartError, SidecarError, SidecarNotRunning
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.rescaling import counts_records, lacks_merge
from spark_bridge.driver.restarts import Restarter
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.storage import MemoryStorage, StorageError
from spark_bridge.subtask import SplitReader, SubtaskOperator
from tests.spark_bridge.simulated_driver import SimulatedDriver
from tests.spark_bridge.test_restarts import Runs


class Counted(OperatorCoordinator):
    """Its state is how often it was asked. ``allowed``: the parallelisms with which it starts."""

    allowed: tuple[int, ...] = (1, 2, 3)
    gate: anyio.Event | None = None
    waits: anyio.Event

    def __init__(self) -> None:
        self.asked = 0

    async def start(self, context: CoordinatorContext) -> None:
        if context.parallelism not in self.allowed:
            raise ValueError(f"{context.parallelism} is too many")

    async def close(self) -> None:
        if self.gate is not None:
            self.waits.set()
            await self.gate.wait()

    async def handle_client_request(self, payload: Any) -> Any:
        self.asked += 1
        return self.asked

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        if self.asked == 13:
            raise ValueError("unlucky")
        return bytes([self.asked])

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.asked = state[0] if state else 0


@asynccontextmanager
async def a_sidecar(kind: type[Counted] = Counted, mode: Any = "streaming") -> AsyncIterator[SidecarRuntime]:
    async with SidecarRuntime(SimulatedDriver(), SidecarConfig()) as runtime:
        await runtime.coordinate("a", kind, parallelism=1, mode=mode)
        yield runtime


async def test_what_comes_in_the_meantime_waits_and_is_served_with_the_state_before() -> None:
    class Slow(Counted):
        gate, waits = anyio.Event(), anyio.Event()

    async with a_sidecar(Slow) as runtime:
        handle = runtime.handles["a"]
        assert await runtime.request("a", None) == 1
        answers: list[Any] = []

        async def ask(call: Coroutine[Any, Any, Any]) -> None:
            answers.append(await call)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.rescale, "a", 2)
            await Slow.waits.wait()
            for call in (runtime.request("a", None), runtime.checkpoint("a"), runtime._operators.settle(60.0, {"a"})):
                tasks.start_soon(ask, call)
            with pytest.raises(SidecarError, match="another change of the parallelism of operator 'a' is under way"):
                await runtime.rescale("a", 3)
            assert runtime.handles == {"a": handle}
            await anyio.wait_all_tasks_blocked()
            assert answers == []
            Slow.gate.set()
        assert len(answers) == 3
        assert 2 in answers
        assert (handle.parallelism, runtime.handles["a"]) == (2, handle)


async def test_leaving_the_sidecar_in_the_middle_of_a_change_fails_no_operator() -> None:
    class Slow(Counted):
        gate, waits = anyio.Event(), anyio.Event()

    async def change(runtime: SidecarRuntime) -> None:
        with pytest.raises(SidecarNotRunning, match="the sidecar was closed before the call for operator 'a'"):
            await runtime.rescale("a", 2)

    async def go_on() -> None:
        await anyio.wait_all_tasks_blocked()
        Slow.gate.set()

    with structlog.testing.capture_logs() as logs:
        async with anyio.create_task_group() as tasks, a_sidecar(Slow) as runtime:
            tasks.start_soon(change, runtime)
            await Slow.waits.wait()
            tasks.start_soon(go_on)  # when the sidecar is being left
    assert [line["event"] for line in logs if line["log_level"] in ("warning", "error")] == []


async def test_an_operator_that_cannot_start_with_the_new_parallelism_continues_with_the_old_one() -> None:
    async with a_sidecar() as runtime:
        await runtime.request("a", None)
        with pytest.raises(CoordinatorStartError, match="4 is too many"):
            await runtime.rescale("a", 4)
        assert runtime.handles["a"].parallelism == 1
        assert await runtime.request("a", None) == 2
        await runtime.rescale("a", 2)
        assert runtime.handles["a"].parallelism == 2
        assert await runtime.request("a", None) == 3


@pytest.mark.parametrize("broken", ["coordinator", "storage"])
async def test_without_a_checkpoint_nothing_is_stopped(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise StorageError("no space left")

    async with a_sidecar() as runtime:
        tracker = runtime._operators.find("a").tracker_ref
        asked = 0
        for _ in range(13 if broken == "coordinator" else 1):
            asked = await runtime.request("a", None)
        with monkeypatch.context() as patch:
            if broken == "storage":
                patch.setattr(MemoryStorage, "store", fail)
            with pytest.raises(CheckpointFailed):
                await runtime.rescale("a", 2)
        assert runtime._operators.find("a").tracker_ref is tracker
        assert runtime.handles["a"].parallelism == 1
        assert await runtime.request("a", None) == asked + 1
        if broken == "storage":  # the failure does not count, although none is tolerated (H45)
            await runtime.rescale("a", 2)
            assert runtime.handles["a"].parallelism == 2


async def test_batch_mode_and_an_instance_that_cannot_be_reset_are_refused() -> None:
    async with a_sidecar(mode="batch") as runtime:
        with pytest.raises(SidecarError, match="in batch mode nothing of a run is kept"):
            await runtime.rescale("a", 2)
        await runtime.coordinate("b", OperatorCoordinator(), parallelism=1, mode="streaming")
        with pytest.raises(SidecarError, match=r"'b' cannot be rescaled: .*does not override reset_to_checkpoint"):
            await runtime.rescale("b", 2)
        with pytest.raises(SidecarError, match="'c' is not coordinated here"):
            await runtime.rescale("c", 2)


async def test_a_change_waits_for_the_end_of_a_micro_batch() -> None:
    async with a_sidecar() as runtime:
        turn = runtime._operators.find("a").batch_turn
        async with anyio.create_task_group() as tasks:
            async with turn:
                with pytest.raises(SidecarError, match="a micro-batch has not ended within"):
                    await runtime.rescale("a", 2, timeout_s=0.01)
                tasks.start_soon(runtime.rescale, "a", 2)
                await anyio.wait_all_tasks_blocked()
                assert runtime.handles["a"].parallelism == 1
        assert runtime.handles["a"].parallelism == 2
        assert runtime._operators.find("a").batch_turn is turn


# --- what is a failure --------------------------------------------------------------------------------------------


def running(action_id: str, *, named: bool = False) -> RunningJobs:
    jobs = RunningJobs()
    jobs.begin_action(action_id, frozenset({"a"}) if named else None)
    return jobs


def test_a_run_that_ends_for_another_parallelism_has_not_failed_but_a_coordinator_may_have() -> None:
    jobs = running("x")
    jobs.registered(1, "x")
    jobs.note(RunStarted("a", 1))
    assert jobs.rescaled("x") is None
    assert jobs.end_for_rescale("a") == {"x"}
    jobs.note(RunEnded("a", 1, False, "by the test"))
    assert (jobs.rescaled("x"), jobs.failures_of("x")) == (1, (0, None))
    error = ValueError("mine")
    jobs.failed("a", error)
    assert jobs.failures_of("x") == (1, error)


def test_an_action_whose_run_is_over_goes_on_and_one_that_is_about_to_run_the_operator_does_not() -> None:
    jobs = running("x", named=True)
    jobs.begin_action("y", frozenset({"b"}))
    assert jobs.end_for_rescale("a") == {"x"}
    assert jobs.rescaled("y") is None
    jobs = running("x", named=True)
    jobs.registered(1, "x")
    jobs.note(RunStarted("a", 1))
    jobs.note(RunEnded("a", 1, True, ""))
    assert jobs.end_for_rescale("a") == frozenset()
    assert jobs.rescaled("x") is None


async def test_an_ended_action_is_called_again_immediately_and_no_strategy_counts_it() -> None:
    runs = Runs()
    restarter = Restarter(runs, FixedDelay(restarts_max=0, delay_s=5.0))
    await restarter.begin()
    runs.rescaled = 0  # its jobs were cancelled before a run had begun
    assert await restarter.succeeded() is None, "it had ended by itself"
    assert await restarter.failed(RuntimeError("cancelled")) == 0.0
    runs.rescaled = 1
    assert await restarter.succeeded() == 0.0, "it has caught what Spark raised"
    runs.fenced = SidecarError("another application has the storage")
    with pytest.raises(RuntimeError, match="cancelled"):
        await restarter.failed(RuntimeError("cancelled"))


# --- H174 ---------------------------------------------------------------------------------------------------------


class Plain(SubtaskOperator):
    """It has no state."""


class Counting(SubtaskOperator):
    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b""


class Says(Counting):
    counts_records = False


class Asks(SubtaskOperator):
    def __init__(self) -> None:
        self.exactly = True

    @property
    def counts_records(self) -> bool:
        return self.exactly


@pytest.mark.parametrize(
    ("makers", "found"),
    [
        ([Counting], "Counting"),
        ([Plain, Counting], "Counting"),
        ([Plain], ""),
        ([Says], ""),
        ([SplitReader, Counting], ""),
        ([lambda: Plain(), Counting], ""),  # noqa: PLW0108 - not a class
        ([Asks], ""),
        ([None], ""),
    ],
)
def test_what_counts_records_is_known_without_an_instance_or_not_at_all(makers: list[object], found: str) -> None:
    assert counts_records(makers) == found


class Keeps(SubtaskOperator):
    def __init__(self, number: int = 0) -> None: ...


def make_one() -> SubtaskOperator:
    return Keeps()


class Merges(Keeps):
    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return b"".join(states.values())

    def merge_files(self, pieces: Any) -> bytes:
        return b""


def in_files(first: int, end: int, total: int = 8) -> StateHandle:
    return StateHandle("1-e-t/0-1-n-1", 1, bytes(32), 1, 1, KeyGroupRange(first, end, total))


def met(before: dict[int, SubtaskState], parallelism: int, makers: dict[str, object]) -> str:
    states = {subtask: SubtaskSnapshot((state,)) for subtask, state in before.items()}
    checkpoint = CompletedCheckpoint(1, len(before), b"", states)
    return lacks_merge(rescaled(checkpoint, parallelism), makers)


@pytest.mark.parametrize(
    ("state", "parallelism", "lacks"),
    [
        (lambda subtask: SubtaskState(subtask, b"x"), 1, "merge_states"),
        (lambda subtask: SubtaskState(subtask, b""), 1, ""),
        (lambda subtask: SubtaskState(subtask, b"x"), 4, ""),
        (lambda subtask: SubtaskState(subtask, b"", in_files(4 * subtask, 4 * subtask + 4)), 1, "merge_files"),
        (lambda subtask: SubtaskState(subtask, b"", in_files(4 * subtask, 4 * subtask + 4)), 4, "merge_files"),
        (lambda subtask: SubtaskState(subtask, join_states(b"", {"stage": b"x"})), 1, "merge_states of stage"),
    ],
    ids=["bytes", "no bytes", "more subtasks", "files", "a part of files", "a stage"],
)
def test_states_that_would_meet_without_a_method_that_merges_them_are_found(
    state: Callable[[int], SubtaskState], parallelism: int, lacks: str
) -> None:  # H52
    before = {subtask: state(subtask) for subtask in range(2)}
    method, _, stage = lacks.partition(" of ")
    for kind, expected in ((Keeps, f"Keeps.{method}" if method else ""), (Merges, "")):
        for made_by in (kind, partial(kind, 1)):
            makers: dict[str, object] = {stage: made_by} if stage else {"": made_by, "stage": Merges}
            assert met(before, parallelism, makers) == expected
    assert met(before, parallelism, {"": make_one, "stage": None}) == "", "nothing is known of these"
