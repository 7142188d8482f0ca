# SPDX-License-Identifier: Apache-2.0

"""``headgate.testing``: a coordinator and its operators without Spark, in virtual time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from inspect import isfunction, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import anyio
import anyio.to_thread
import pytest

from headgate import (
    CheckpointConfig,
    CoordinatorContext,
    FailureKind,
    GatewayLimits,
    OperatorCoordinator,
    SourceCoordinator,
    SplitReader,
    StaticSplitEnumerator,
    SubtaskContext,
    SubtaskOperator,
)
from headgate.errors import AttemptOver, CheckpointFailed, RequestFailed
from headgate.sinks import FileSink, TwoPhaseSinkCoordinator, TwoPhaseSinkOperator
from headgate.testing import Answer, RecordingCoordinator, running_operator
from protocol.attempts import QueryStatus
from protocol.errors import LocalProtocolError
from protocol.facts import TaskState
from spark_bridge.subtask.errors import for_unknown_reasons


class Counting(SubtaskOperator):
    """Counts its records, and yields the coordinator's answer to each."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.count = int(state or b"0")
        self.events: list[Any] = []
        self.closed = False

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            self.count += 1
            yield self.context.request(record, timeout_s=5.0)

    def handle_event(self, event: Any) -> None:
        self.events.append(event)

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"%d" % self.count

    def close(self) -> None:
        self.closed = True


async def double(subtask: int, attempt: int, request: Any) -> Any:
    return 2 * request


# --- tasks that the test controls ------------------------------------------------------------------------------------


async def test_events_and_requests_travel_both_ways() -> None:
    coordinator = RecordingCoordinator(handle_request=double)
    async with running_operator(coordinator) as world:
        first, second = await world.launch_all()
        first.send("hello")
        answer = second.request(21)
        assert answer.open
        await world.settle()
        assert answer.value == 42
        assert coordinator.calls_of("handle_event_from_operator") == [("handle_event_from_operator", 0, 0, "hello")]
        await coordinator.gateways[1].send_event(["down", 1])
        await world.settle()
        assert (first.events, second.events) == ([], [["down", 1]])
    assert coordinator.calls[-1] == ("close",)


async def test_failed_request_has_the_error_of_an_operator() -> None:
    async with running_operator(RecordingCoordinator(), parallelism=1) as world:
        task = await world.launch(0)
        answer = task.request("anything")
        await world.settle()
        with pytest.raises(RequestFailed, match="cannot handle requests"):
            _ = answer.value


async def test_open_answer_says_what_to_do() -> None:
    with pytest.raises(AssertionError, match=r"there is no answer yet: await world.settle\(\)"):
        _ = Answer[int]().value


class AnyArgument:
    """Stands for any argument of a callback."""

    attempt = SimpleNamespace(attempt=0)
    kind = "killed"


@pytest.mark.parametrize("method", [name for name, one in vars(OperatorCoordinator).items() if isfunction(one)])
async def test_a_recording_coordinator_records_every_method_of_the_interface(method: str) -> None:
    given: list[Any] = []

    async def called(*args: Any) -> None:
        given.extend(args)

    coordinator = RecordingCoordinator(**{method: called})
    parameters = list(signature(getattr(OperatorCoordinator, method)).parameters)
    args = [AnyArgument() for _ in parameters[1:]]
    await getattr(coordinator, method)(*args)
    assert [call[0] for call in coordinator.calls] == [method]
    assert given == args
    assert list(signature(getattr(RecordingCoordinator, method)).parameters) == parameters


async def test_kill_and_retry_restore_the_state_of_the_last_checkpoint() -> None:
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1, mode="streaming") as world:
        task = await world.launch(0)
        task.state = b"three"
        assert await world.checkpoint() == 1
        task.state = b"four"
        await world.kill(task)
        assert task.outcome == "killed"
        assert coordinator.calls[-2:] == [("subtask_failed", 0, 0, FailureKind.KILLED), ("subtask_reset", 0, 1)]
        retried = await world.retry(task)
        assert (retried.attempt.attempt, retried.restored_state, retried.restored_checkpoint_id) == (1, b"three", 1)


async def test_retry_of_a_running_task_is_refused() -> None:
    async with running_operator(RecordingCoordinator(), parallelism=1) as world:
        task = await world.launch(0)
        with pytest.raises(LocalProtocolError, match="still runs: kill it"):
            await world.retry(task)


async def test_job_ends_when_every_subtask_has_succeeded_and_the_next_launch_begins_a_run() -> None:
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        for task in await world.launch_all():
            task.finish()
        await world.settle()
        assert [task.outcome for task in world.tasks] == ["success", "success"]
        assert [call[2] for call in coordinator.calls_of("run_ended")] == [True]
        await world.launch(0)
        assert coordinator.calls_of("reset_to_checkpoint") == [("reset_to_checkpoint", -1, None)]


async def test_a_query_about_tasks_is_answered_as_spark_does() -> None:  # H19 H75
    async with running_operator(RecordingCoordinator(), parallelism=3) as world:
        runs, succeeds, ends = await world.launch_all()
        succeeds.finish()
        await world.settle()
        await world.kill(ends)
        ids = [task.attempt.task_attempt_id for task in (runs, succeeds, ends)]
        report = world._look(QueryStatus(frozenset(ids), frozenset({world._job_id, world._job_id + 1})))
        assert [report.tasks[id_] for id_ in ids] == [TaskState.RUNNING, TaskState.SUCCEEDED, TaskState.ENDED]
        assert report.jobs == {world._job_id: True, world._job_id + 1: False}
        assert [report.places[id_].partition for id_ in ids] == [0, 1, 2]


async def test_final_checkpoint_follows_a_good_streaming_run() -> None:
    async with running_operator(RecordingCoordinator(), parallelism=1, mode="streaming") as world:
        task = await world.launch(0)
        task.finish(state=b"the end")
        await world.settle()
        (checkpoint,) = world.checkpoints
        assert checkpoint.subtask_states[0].states[0].state == b"the end"


async def test_copy_runs_beside_the_first_attempt_and_is_killed_when_that_succeeds() -> None:  # H86
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=2) as world:
        first = await world.launch(0)
        copy = await world.launch(0)
        assert coordinator.calls_of("subtask_ready") == [("subtask_ready", 0, 0), ("subtask_ready", 0, 1)]
        first.finish()
        await world.settle()
        assert (first.outcome, copy.outcome) == ("success", "killed")
        assert coordinator.calls_of("subtask_failed", "subtask_finished") == [
            ("subtask_finished", 0, 0),
            ("subtask_failed", 0, 1, FailureKind.SUPERSEDED),
        ]


async def test_broken_connection_is_a_suspicion_until_it_is_restored() -> None:  # H87
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1) as world:
        task = await world.launch(0)
        with pytest.raises(LocalProtocolError, match="has no broken connection"):
            await world.restore_connection(task)
        for number in range(2):
            await world.break_connection(task)
            assert coordinator.calls[-1] == ("subtask_suspected", 0, 0)
            with pytest.raises(LocalProtocolError, match="has no connection that could break"):
                await world.break_connection(task)
            task.send(number)
            await coordinator.gateways[0].send_event(number)
            await world.restore_connection(task)
            assert coordinator.calls[-2] == ("subtask_responsive", 0, 0)
            assert (coordinator.events[-1], task.events[-1]) == (number, number)
        await world.break_connection(task)
        await world.advance(10.0)
        assert coordinator.calls_of("subtask_failed") == [("subtask_failed", 0, 0, FailureKind.CONNECTION_LOST)]
        assert task.outcome


@pytest.mark.parametrize("mode", ["batch", "streaming"])
async def test_broken_connection_of_an_operator_is_restored_or_expires_like_that_of_a_task(
    mode: Literal["batch", "streaming"],
) -> None:  # H87
    class Echo(SubtaskOperator):
        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            self.context = context

        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            for record in records:
                self.context.send_event(record)
                yield record

    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1, mode=mode) as world:
        task = await world.launch_operator(0, Echo)
        for number in range(2):
            await world.break_connection(task)
            assert coordinator.calls[-1] == ("subtask_suspected", 0, 0)
            task.feed(number)
            await world.settle()
            assert (task.outputs[-1], number in coordinator.events) == (number, False)
            await world.restore_connection(task)
            assert coordinator.events[-1] == number
        await world.break_connection(task)
        await world.advance(10.0)
        assert coordinator.calls_of("subtask_failed") == [("subtask_failed", 0, 0, FailureKind.CONNECTION_LOST)]
        assert task.outcome


async def test_unresponsive_task_is_killed_after_the_confirmation_timeout() -> None:
    coordinator = RecordingCoordinator()
    limits = GatewayLimits(confirm_timeout_s=30.0)
    async with running_operator(coordinator, parallelism=1, gateway=limits) as world:
        task = await world.launch(0)
        task.unresponsive = True
        confirmation = await coordinator.gateways[0].send_event("are you there?")
        await world.advance(29.0)
        assert task.outcome == ""
        await world.advance(1.0)
        assert task.outcome == "killed"
        assert coordinator.calls_of("subtask_failed") == [("subtask_failed", 0, 0, FailureKind.CONFIRMATION_TIMEOUT)]
        with pytest.raises(AttemptOver):
            await confirmation


async def test_frozen_task_is_killed_after_the_heartbeat_timeout_and_a_busy_one_is_not() -> None:  # H94
    coordinator = RecordingCoordinator()
    limits = GatewayLimits(heartbeat_interval_s=0.25, heartbeat_timeout_s=1.0)
    async with running_operator(coordinator, parallelism=2, gateway=limits) as world:
        frozen, busy = await world.launch_all()
        busy.busy = True
        await world.advance(30.0)
        assert (frozen.outcome, busy.outcome) == ("", "")
        frozen.unresponsive = True
        await world.advance(0.9)
        assert frozen.outcome == ""
        await world.advance(0.6)
        assert (frozen.outcome, busy.outcome) == ("killed", "")
        assert coordinator.calls_of("subtask_failed") == [("subtask_failed", 0, 0, FailureKind.HEARTBEAT_TIMEOUT)]
        retried = await world.retry(frozen)
        await world.advance(30.0)
        assert retried.outcome == ""


async def test_failure_of_the_coordinator_cancels_the_job() -> None:
    async def fail(*args: Any) -> None:
        raise ValueError("a bad event")

    coordinator = RecordingCoordinator(handle_event_from_operator=fail)
    async with running_operator(coordinator) as world:
        first, _ = await world.launch_all()
        first.send("x")
        await world.settle()
        assert [str(error) for error in world.failures] == ["a bad event"]
        assert world.cancelled_jobs == ["operator 'operator': handle_event_from_operator: ValueError: a bad event"]
        assert [task.outcome for task in world.tasks] == ["killed", "killed"]


async def test_job_fails_when_a_subtask_has_failed_too_often() -> None:
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1, attempts_max=2) as world:
        task = await world.launch(0)
        task.finish("it broke")
        await world.settle()
        task = await world.retry(task)
        task.finish("it broke again")
        await world.settle()
        assert world.cancelled_jobs == ["subtask 0 has failed 2 times; the last time: it broke again"]


async def test_periodic_checkpoints_follow_the_virtual_clock() -> None:
    checkpoint = CheckpointConfig(interval_s=60.0)
    async with running_operator(
        RecordingCoordinator(), parallelism=1, mode="streaming", checkpoint=checkpoint
    ) as world:
        await world.launch(0)
        await world.advance(180.0)
        assert [one.checkpoint_id for one in world.checkpoints] == [1, 2, 3]


async def test_storage_that_fails_aborts_the_checkpoint() -> None:
    coordinator = RecordingCoordinator()
    tolerant = CheckpointConfig(tolerated_failures=1)
    async with running_operator(coordinator, mode="streaming", checkpoint=tolerant) as world:
        await world.launch_all()
        world.storage_error = OSError("the disk is full")
        with pytest.raises(CheckpointFailed, match="the disk is full"):
            await world.checkpoint()
        assert coordinator.calls_of("notify_checkpoint_aborted", "notify_checkpoint_discarded") == [
            ("notify_checkpoint_aborted", 1),
            ("notify_checkpoint_discarded", 1),
        ]
        world.storage_error = None
        assert await world.checkpoint() == 2


async def test_application_starts_from_a_checkpoint_of_another_one() -> None:
    async with running_operator(RecordingCoordinator(), parallelism=1, mode="streaming") as world:
        task = await world.launch(0)
        task.state = b"seven"
        await world.checkpoint()
        (restored,) = world.checkpoints
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1, mode="streaming", restored=restored) as world:
        assert coordinator.calls == [("reset_to_checkpoint", 1, b"state"), ("start",)]
        assert (await world.launch(0)).restored_state == b"seven"


async def test_error_of_start_reaches_the_test() -> None:
    async def fail(context: CoordinatorContext) -> None:
        raise ValueError("no such table")

    with pytest.raises(ValueError, match="no such table"):
        async with running_operator(RecordingCoordinator(start=fail)):
            pass


async def test_request_of_the_driver_is_answered() -> None:
    async def length(request: Any) -> int:
        return len(request)

    async with running_operator(RecordingCoordinator(handle_client_request=length)) as world:
        assert await world.request("abc") == 3


async def test_every_method_is_refused_after_the_end() -> None:
    async with running_operator(RecordingCoordinator()) as world:
        pass
    for move in (
        world.settle(),
        world.advance(1.0),
        world.launch(0),
        world.checkpoint(),
        world.drive(anyio.sleep(1.0)),
    ):
        with pytest.raises(LocalProtocolError, match="this world has ended"):
            await move


async def test_same_seed_gives_the_same_order() -> None:
    async def trace(seed: int) -> list[str]:
        async with running_operator(RecordingCoordinator(), parallelism=3, seed=seed) as world:
            for task in await world.launch_all():
                task.send("x")
            await world.checkpoint()
            return [step.actor for step in world.kit.trace]

    assert await trace(1) == await trace(1)
    assert await trace(1) != await trace(2)


# --- steps at the wrong moment ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("move", ["settle", "advance", "launch", "kill", "checkpoint"])
async def test_step_taken_while_drive_runs_is_refused(move: str) -> None:
    async with running_operator(RecordingCoordinator()) as world:
        task = await world.launch(0)
        moves: dict[str, Callable[[], Awaitable[Any]]] = {
            "settle": world.settle,
            "advance": lambda: world.advance(1.0),
            "launch": lambda: world.launch(1),
            "kill": lambda: world.kill(task),
            "checkpoint": world.checkpoint,
        }

        async def move_inside() -> None:
            await moves[move]()

        with pytest.raises(RuntimeError, match=r"was called while drive\(\) is moving the same system"):
            await world.drive(move_inside())
        await world.settle()


async def test_step_taken_by_the_coordinator_fails_its_job() -> None:
    async def settle(*args: Any) -> None:
        await world.settle()

    async with running_operator(RecordingCoordinator(handle_event_from_operator=settle)) as world:
        task = await world.launch(0)
        task.send("x")
        await world.settle()
        assert "was called while run_until_idle() is moving the same system" in str(world.failures[0])


# --- worker threads ---------------------------------------------------------------------------------------------------


class Looker(OperatorCoordinator):
    """Looks each event up in a slow table, in one of three ways."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.found: list[Any] = []

    def look_up(self, key: str) -> str:
        time.sleep(0.001)
        return f"{key}: {threading.current_thread() is threading.main_thread()}"

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        match self.way:
            case "call_async":
                self.context.call_async(self.look_up, event, handler=self.found_one)
            case "asyncio":
                self.found.append(await asyncio.to_thread(self.look_up, event))
            case "anyio":
                self.found.append(await anyio.to_thread.run_sync(self.look_up, event))

    async def found_one(self, result: str | None, error: Exception | None) -> None:
        self.found.append(result or error)


@pytest.mark.parametrize("way", ["call_async", "asyncio", "anyio"])
async def test_worker_threads_of_a_coordinator_are_part_of_a_step(way: str) -> None:
    coordinator = Looker(way)
    async with running_operator(coordinator) as world:
        (task, _) = await world.launch_all()
        for key in "abc":
            task.send(key)
        await world.settle()
        assert coordinator.found == ["a: False", "b: False", "c: False"]


async def test_file_sink_tries_again_in_virtual_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = FileSink(str(tmp_path))
    coordinator = TwoPhaseSinkCoordinator(sink, retry_delays_s=(600.0,))
    async with running_operator(coordinator, parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0, lambda: TwoPhaseSinkOperator(sink))
        task.feed("a")
        await world.settle()
        committer = coordinator.commits._committer
        publish, failures = committer.commit, [OSError("the network is down")]

        def fail_once(*args: Any) -> None:
            if failures:
                raise failures.pop()
            publish(*args)

        monkeypatch.setattr(committer, "commit", fail_once)
        await world.checkpoint()
        assert visible_rows(tmp_path) == []
        await world.advance(600.0)
        assert visible_rows(tmp_path) == ["a"]


def visible_rows(folder: Path) -> list[str]:
    return sorted(row for file in folder.glob("[!._]*") if file.is_file() for row in file.read_text().splitlines())


# --- real operators ---------------------------------------------------------------------------------------------------


async def test_operator_talks_to_its_coordinator() -> None:
    coordinator = RecordingCoordinator(handle_request=double)
    async with running_operator(coordinator, parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0, Counting)
        task.feed(1, 2)
        await world.settle()
        assert task.outputs == [2, 4]
        await coordinator.gateways[0].send_event("between records")
        await world.settle()
        assert task.operator.events == ["between records"]  # type: ignore[attr-defined]
        task.end_records()
        await world.settle()
        assert (task.outcome, task.error) == ("success", None)
        assert task.operator.closed  # type: ignore[attr-defined]
        with pytest.raises(LocalProtocolError, match="its input has ended"):
            task.feed(3)


async def test_killed_operator_restores_its_state() -> None:
    coordinator = RecordingCoordinator(handle_request=double)
    async with running_operator(coordinator, parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0, Counting)
        task.feed(1, 2)
        await world.settle()
        await world.checkpoint()
        task.feed(3)
        await world.settle()
        await world.kill(task)
        assert task.outcome == "killed"
        again = await world.retry(task)
        assert again.operator.count == 2  # type: ignore[attr-defined]


async def test_operator_waits_in_virtual_time() -> None:
    never = asyncio.Event()

    async def no_answer(*args: Any) -> None:
        await never.wait()

    async with running_operator(RecordingCoordinator(handle_request=no_answer), parallelism=1) as world:
        task = await world.launch_operator(0, Counting, [1])
        await world.advance(4.9)
        assert task.outcome == ""
        await world.advance(0.1)
        assert task.outcome == "failed"
        assert str(task.error) == for_unknown_reasons("no answer to request 1 within 5 s")
        never.set()
        await world.settle()


async def test_error_of_an_operator_fails_its_task() -> None:
    class Broken(SubtaskOperator):
        def process(self, records: Iterator[Any]) -> Iterator[Any]:
            yield 1 // 0

    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1) as world:
        task = await world.launch_operator(0, Broken, [])
        assert task.outcome == "failed"
        assert isinstance(task.error, ZeroDivisionError)
        assert coordinator.calls_of("subtask_failed") == [("subtask_failed", 0, 0, FailureKind.FAILED)]


class Squares(SplitReader):
    def read_split(self, split: int) -> list[int]:
        return [split * split]


async def test_split_readers_share_the_splits_of_a_source() -> None:
    source = SourceCoordinator(lambda state: StaticSplitEnumerator(range(10), state))
    async with running_operator(source) as world:
        readers = [await world.launch_operator(subtask, Squares, []) for subtask in range(2)]
        await world.settle()
        assert sorted(value for reader in readers for value in reader.outputs) == [n * n for n in range(10)]
        assert [reader.outcome for reader in readers] == ["success", "success"]


async def test_splits_of_a_killed_reader_are_read_again() -> None:
    class Slow(Squares):
        def read_split(self, split: int) -> list[int]:
            self.context.request("may I?")
            return super().read_split(split)

    class Gate(SourceCoordinator):
        async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
            await anyio.sleep(1.0)

    source = Gate(lambda state: StaticSplitEnumerator(range(4), state))
    async with running_operator(source) as world:
        first = await world.launch_operator(0, Slow, [])
        await world.advance(1.5)
        assert first.outputs == [0]
        await world.kill(first)
        await world.retry(first, [])
        await world.launch_operator(1, Slow, [])
        await world.advance(10.0)
        kept = [value for task in world.tasks[1:] for value in task.outputs]  # type: ignore[attr-defined]
        assert sorted(kept) == [0, 1, 4, 9]


async def test_operator_that_never_waits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.testing._operator_task.TURN_LIMIT_S", 0.05)
    release = threading.Event()

    class Stuck(SubtaskOperator):
        def process(self, records: Iterator[Any]) -> None:
            release.wait()

    async with running_operator(RecordingCoordinator(), parallelism=1) as world:
        with pytest.raises(RuntimeError, match=r"(?s)has computed for 0.05 s without waiting.*release.wait\(\)"):
            await world.launch_operator(0, Stuck, [])
        release.set()


async def test_operators_that_still_run_end_with_the_world() -> None:
    async with running_operator(RecordingCoordinator(), parallelism=1) as world:
        task = await world.launch_operator(0, Counting)
    assert task.operator.closed  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("operator of")]
