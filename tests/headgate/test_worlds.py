# SPDX-License-Identifier: Apache-2.0

"""What a world of ``headgate.testing`` can say about storage, tasks, the driver and neighbours, and its errors.

``examples/testing/test_troubles.py`` has a test for each trouble; these are the edges, and random histories.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headgate import CheckpointConfig, FailureKind, Reply, SubtaskContext, SubtaskOperator, chain
from headgate.actors.testing import deterministic_system
from headgate.errors import CheckpointFailed
from headgate.testing import Answer, RecordingCoordinator, Task, running_operator
from protocol.errors import LocalProtocolError

TOLERANT = CheckpointConfig(tolerated_failures=100)


class Counting(SubtaskOperator):
    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.count = 0

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            self.count += 1
            yield record


# --- random histories -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_is_held_back_arrives_in_order_and_once(seed: int) -> None:
    dice = random.Random(seed)
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1, seed=seed) as world:
        (task,) = await world.launch_all()
        ups, downs = 0, 0
        for _ in range(60):
            match dice.randrange(6):
                case 0:
                    task.silent = not task.silent
                case 1:
                    task.late_confirmations = not task.late_confirmations
                case 2:
                    task.send(ups)
                    ups += 1
                case 3:
                    coordinator.gateways[0].send_event_nowait(downs)
                    downs += 1
                case 4:
                    await world.settle()
                case 5:
                    await world.advance(0.01)
        task.silent = task.late_confirmations = False
        await world.advance(1.0)
        assert (coordinator.events, task.events) == (list(range(ups)), list(range(downs))), seed
        task.finish()
        await world.settle()
        assert task.outcome == "success"


@pytest.mark.parametrize("seed", range(20))
async def test_a_restart_finds_what_the_storage_may_hold_and_nothing_else(seed: int) -> None:
    """A completed checkpoint is in ``checkpoints``; one that failed is in ``in_doubt``, if it may be there, or gone."""
    dice = random.Random(seed)
    coordinator = RecordingCoordinator()
    settings = {"parallelism": 1, "mode": "streaming", "checkpoint": TOLERANT, "seed": seed}
    async with running_operator(coordinator, **settings) as world:  # type: ignore[arg-type]
        await world.launch_all()
        complete = 0
        for _ in range(20):
            world.storage_delay_s = dice.choice((0.0, 5.0))
            world.storage_error = dice.choice((None, OSError("no space left")))
            world.storage_in_doubt = dice.random() < 0.5
            answer = world.begin_checkpoint()
            await world.advance(10.0)
            assert answer.done
            complete += answer.error is None
            in_doubt = {checkpoint.checkpoint_id for checkpoint in world.in_doubt}
            assert in_doubt == coordinator.context.checkpoints_in_doubt, seed
        assert len(world.checkpoints) == complete


# --- errors and edges -------------------------------------------------------------------------------------------------


async def test_only_a_success_of_a_job_that_runs_can_be_revoked() -> None:
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        first, second = await world.launch_all()
        with pytest.raises(LocalProtocolError, match="has no success that Spark could revoke"):
            await world.revoke(first)
        first.finish()
        await world.settle()
        await world.revoke(first)
        with pytest.raises(LocalProtocolError, match="has no success"):
            await world.revoke(first)
        second.finish()
        await world.settle()
        assert coordinator.calls_of("run_ended") == []
        (await world.retry(first)).finish()
        await world.settle()
        assert [call[2] for call in coordinator.calls_of("run_ended")] == [True]
        with pytest.raises(LocalProtocolError, match="before the other subtasks have ended the job"):
            await world.revoke(second)
        assert coordinator.calls_of("subtask_failed") == [("subtask_failed", 0, 0, FailureKind.REVOKED)]


async def test_an_operator_task_is_ended_by_its_input_and_loses_nothing() -> None:
    async with running_operator(RecordingCoordinator(), parallelism=1) as world:
        task = await world.launch_operator(0, Counting)
        task.feed(1, 2, 3)
        with pytest.raises(LocalProtocolError, match=r"call end_records\(\) and await world\.settle\(\)"):
            task.finish()
        task.end_records()
        await world.settle()
        assert (task.outcome, task.outputs) == ("success", [1, 2, 3])


async def test_an_operator_ends_when_the_coordinator_has_all_that_it_sent() -> None:
    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        yield from records
        context.send_event("the last one")

    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1) as world:
        task = await world.launch_operator(0, work)
        task.silent = True
        task.end_records()
        await world.settle()
        assert (task.outcome, coordinator.events) == ("", [])
        task.silent = False
        await world.settle()
        assert (task.outcome, coordinator.events) == ("success", ["the last one"])


async def test_a_stopped_operator_says_so_and_its_tasks_learn_of_it() -> None:
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=2, mode="streaming") as world:
        await world.launch(0)
        operator = await world.launch_operator(1, Counting)
        await world.stop()
        await world.stop()
        assert coordinator.calls[-1] == ("close",)
        assert operator.outcome == "failed"
        for call in (world.begin_checkpoint, lambda: world.begin_request("anything")):
            with pytest.raises(LocalProtocolError, match="this operator was stopped"):
                call()
        late = await world.launch(0)
        assert late.outcome == "failed"


async def test_an_operator_of_the_same_name_cannot_join_nor_set_the_order() -> None:
    async with running_operator() as world:
        with pytest.raises(ValueError, match="operator_id must be another name than 'operator'"):
            async with running_operator(beside=world):
                pass
        with pytest.raises(ValueError, match="seed and schedule belong to the world that was made first"):
            async with running_operator(beside=world, operator_id="second", seed=1):
                pass
    with pytest.raises(LocalProtocolError, match="this world has ended"):
        async with running_operator(beside=world, operator_id="second"):
            pass


async def test_a_neighbour_that_leaves_stops_alone() -> None:
    first, second = RecordingCoordinator(), RecordingCoordinator()
    async with running_operator(first, parallelism=1) as world:
        (task,) = await world.launch_all()
        async with running_operator(second, parallelism=1, operator_id="second", beside=world) as beside:
            await beside.launch_all()
        assert second.calls[-1] == ("close",)
        task.send("still here")
        await world.settle()
        assert first.events == ["still here"]


async def test_a_checkpoint_that_is_complete_is_not_given_up() -> None:
    async with running_operator(RecordingCoordinator(), parallelism=1, mode="streaming") as world:
        await world.launch_all()
        answer = world.begin_checkpoint()
        await world.settle()
        await world.abort_checkpoint(answer)
        assert answer.value == 1


async def test_the_task_of_a_given_up_checkpoint_is_told() -> None:
    async with running_operator(parallelism=1, mode="streaming", checkpoint=TOLERANT) as world:
        (task,) = await world.launch_all()
        task.silent = True
        answer = world.begin_checkpoint()
        await world.settle()
        await world.abort_checkpoint(answer)
        with pytest.raises(CheckpointFailed, match="given up"):
            _ = answer.value
        assert task.handled == [("aborted", 1)]


async def test_a_task_that_does_not_wait_for_the_start_does_not_hear_about_it() -> None:
    async with running_operator(parallelism=1) as world:
        (task,) = await world.launch_all()
        assert task.handled == []


class Early(Task):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.awaits_start = True


async def test_tasks_of_an_own_class_learn_of_the_start_and_retried_as_they_were() -> None:
    async with running_operator(parallelism=2) as world:
        first, second = await world.launch_all(task_class=Early)
        assert (first.handled, second.handled) == ([("start",)], [("start",)])
        await world.kill(first)
        assert (await world.retry(first)).handled == [("start",)]


@pytest.mark.parametrize(("used", "of"), [("running_operator", running_operator), ("deterministic_system", None)])
async def test_the_hint_names_the_function_that_the_test_has_called(used: str, of: Any) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        async with of(seed=4711) if of else deterministic_system(seed=4711):
            raise ZeroDivisionError
    assert raised.value.__notes__ == [f"replay with {used}(seed=4711)"]


async def test_a_cancelled_job_fails_its_run_and_the_next_launch_begins_another() -> None:
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        first, second = await world.launch_all()
        await world.kill(first)
        first = await world.retry(first)
        assert (first.attempt_number, second.attempt_number) == (1, 0)
        await world.cancel_job("the user pressed a key")
        assert (first.outcome, second.outcome) == ("killed", "killed")
        assert world.cancelled_jobs == ["the user pressed a key"]
        ((_, _, success, *_),) = coordinator.calls_of("run_ended")
        assert not success
        await world.cancel_job()  # there is none
        assert len(world.cancelled_jobs) == 1
        again = await world.launch(0)
        assert again.attempt_number == 0
        assert coordinator.calls_of("reset_to_checkpoint") == [("reset_to_checkpoint", -1, None)]


async def test_a_job_fails_as_in_spark_when_a_subtask_has_failed_four_times() -> None:
    async with running_operator(parallelism=1) as world:
        task = await world.launch(0)
        for number in range(1, 5):
            assert world.cancelled_jobs == []
            task.finish(f"failure {number}")
            await world.settle()
            if number < 4:
                task = await world.retry(task)
        assert world.cancelled_jobs == ["subtask 0 has failed 4 times; the last time: failure 4"]


async def test_a_second_answer_changes_nothing() -> None:
    answer = Answer[int]()
    assert answer.answer(1)
    assert not answer.answer(2)
    assert not answer.fail(ValueError("late"))
    assert (answer.value, answer.error) == (1, None)
    failed = Answer[int]()
    assert failed.fail(ValueError("early"))
    assert not failed.answer(1)
    with pytest.raises(ValueError, match="early"):
        _ = failed.value


async def test_answers_come_to_the_requests_that_they_are_for() -> None:
    waiting: list[Reply] = []

    async def later(subtask: int, attempt: int, request: Any) -> Reply:
        waiting.append(Reply())
        return waiting[-1]

    async with running_operator(RecordingCoordinator(handle_request=later), parallelism=1) as world:
        (task,) = await world.launch_all()
        first, second = task.request("first"), task.request("second")
        await world.settle()
        waiting[1].answer(2)
        await world.settle()
        assert (second.value, first.open) == (2, True)
        waiting[0].answer(1)
        await world.settle()
        assert first.value == 1


async def test_a_savepoint_is_kept_with_its_directory() -> None:
    async with running_operator(RecordingCoordinator(), parallelism=1, mode="streaming") as world:
        (task,) = await world.launch_all()
        task.state = b"saved"
        savepoint = await world.checkpoint("/savepoints/monday")
        ((directory, kept),) = world.savepoints
        assert (directory, kept.checkpoint_id) == ("/savepoints/monday", savepoint)
        assert kept.subtask_states[0].states[0].state == b"saved"


async def test_a_subtask_that_does_not_exist_is_refused() -> None:
    async with running_operator(parallelism=2) as world:
        with pytest.raises(ValueError, match="there is no subtask 2: the operator has 2, counted from 0"):
            await world.launch(2)
        assert world.tasks == []


async def test_an_operator_is_given_unless_there_is_a_chain_and_only_then() -> None:
    async with running_operator() as world:
        with pytest.raises(ValueError, match="pass make_operator"):
            await world.launch_operator(0)
    async with running_operator(chain(stage=Counting)) as world:
        with pytest.raises(ValueError, match="unless the operator is a chain"):
            await world.launch_operator(0, Counting)


# --- turns ------------------------------------------------------------------------------------------------------------


async def test_the_event_loop_stands_still_while_an_operator_computes() -> None:
    loop = asyncio.get_running_loop()

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[bool]:
        for _ in records:
            moved = threading.Event()
            loop.call_soon_threadsafe(moved.set)
            yield moved.wait(0.2)  # a loop that goes on sets it within microseconds; one that stands still never does

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, work, range(3))
        await world.settle()
        assert task.outputs == [False, False, False]
