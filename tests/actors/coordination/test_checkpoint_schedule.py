# SPDX-License-Identifier: Apache-2.0

"""Scheduled checkpoints: by the interval, and the final one of a run (H40, H45, H48)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.coordination import CheckpointFailed
from actors.coordination.engine.messages import Settled
from protocol.wire.messages import SubtaskState
from tests.actors.coordination.executor import Task
from tests.actors.coordination.operator_world import (
    RecordingCoordinator,
    World,
    raising,
    running_operator,
    running_tasks,
    waiting_for,
)


def stored_ids(world: World) -> list[int]:
    return [checkpoint.checkpoint_id for checkpoint in world.stored]


async def end_well(world: World, *tasks: Task) -> None:
    """End the operators and the job; Spark counts their tasks as successes."""
    for task in tasks:
        task.finish(state=b"last")
    await world.settle()
    for task in tasks:
        world.finish(task)
    world.end_run()


# --- the interval -------------------------------------------------------------------------------------------------


async def test_one_is_due_at_each_interval_while_an_attempt_runs() -> None:
    async with running_operator(interval_s=10.0) as world:
        await world.advance(25.0)
        assert stored_ids(world) == []
        await world.running(0, 1)
        await world.advance(9.9)
        assert stored_ids(world) == []
        await world.advance(0.2)
        assert stored_ids(world) == [1]
        await world.advance(20.0)
        assert stored_ids(world) == [1, 2, 3]
        world.end_run(succeeded=False)
        await world.advance(30.0)
        assert stored_ids(world) == [1, 2, 3]


async def test_one_that_takes_too_long_fails_by_itself_and_the_next_one_comes() -> None:  # H45, H48
    async with running_tasks(1, interval_s=20.0, checkpoint_timeout_s=10.0) as (world, (task,)):
        task.busy = True
        await world.advance(31.0)
        assert task.mailbox
        assert world.statistics.checkpoints_aborted == 1
        assert "10 s" in world.statistics.last_abort_reason
        task.busy = False
        await world.advance(10.0)
        assert stored_ids(world) == [2]


async def test_the_schedule_tries_again_without_a_failure_if_no_checkpoint_id_is_available() -> None:  # H4, H48
    async with running_tasks(1, interval_s=10.0, checkpoint_timeout_s=30.0) as (world, _):
        world.no_ids = OSError("the storage is gone")
        await world.advance(10.1)
        assert world.statistics.checkpoints_refused == 1
        world.no_ids = None
        await world.advance(30.0)
        assert stored_ids(world) == [1]
        assert not world.failures


async def test_a_request_without_an_id_fails_with_what_the_storage_said() -> None:  # H4
    async with running_tasks(1) as (world, _):
        world.no_ids = OSError("the storage is gone")
        answer = await world.checkpoint()
        assert answer.reason() == "no checkpoint id: OSError: the storage is gone"
        assert answer.errors[0].__cause__ is world.no_ids
        world.no_ids = None
        answer = await world.checkpoint()
        assert answer.values == [1]


# --- the end of a run ---------------------------------------------------------------------------------------------


async def test_a_run_that_ended_well_is_committed_by_a_final_checkpoint() -> None:  # H40, H47
    async with running_operator() as world:
        await end_well(world, *await world.running(0, 1))
        await world.settle()
        assert world.coordinator.calls[-3:] == [
            ("run_ended", 1, True, ""),
            ("checkpoint_coordinator", 1),
            ("notify_checkpoint_complete", 1),
        ]
        states = {subtask: part.states for subtask, part in world.stored[0].subtask_states.items()}
        assert states == {0: (SubtaskState(0, b"last"),), 1: (SubtaskState(1, b"last"),)}
        world.reset("a new run")
        await world.settle()
        assert world.coordinator.calls[-1] == ("reset_to_checkpoint", 1, b"state")  # H55


async def test_an_operator_without_a_run_is_settled_immediately() -> None:
    async with running_operator() as world:
        answer = await world.await_settled()
        assert answer.values == [Settled(-1, "")]


async def test_a_run_is_settled_when_its_final_checkpoint_is_and_the_coordinator_knows() -> None:
    written, committed = asyncio.Event(), asyncio.Event()

    async with running_operator(RecordingCoordinator(notify_checkpoint_complete=waiting_for(committed))) as world:
        world.on_store = waiting_for(written)
        (task,) = await world.running(0)
        answer = await world.await_settled()
        assert answer.open, "the run is on"
        await end_well(world, task)
        await world.settle()
        assert answer.open, "the final checkpoint is not durable"
        written.set()
        await world.settle()
        assert answer.open, "the coordinator still commits"
        committed.set()
        await world.settle()
        assert answer.values == [Settled(1, "")]


async def test_a_run_that_failed_is_settled_when_the_coordinator_has_heard_of_it() -> None:
    async with running_tasks(1) as (world, (task,)):
        task.busy = True
        await world.checkpoint()
        world.end_run(succeeded=False)
        answer = await world.await_settled()
        assert answer.values == [Settled(-1, "")]
        assert [call[0] for call in world.coordinator.calls[-3:]] == [
            "notify_checkpoint_aborted",
            "notify_checkpoint_discarded",
            "run_ended",
        ]


async def test_a_final_checkpoint_that_failed_is_taken_again() -> None:  # H45
    async def fail_once(checkpoint: Any) -> None:
        world.on_store = None
        raise OSError("no space left")

    async with running_tasks(1) as (world, (task,)):
        world.on_store = fail_once
        await end_well(world, task)
        answer = await world.await_settled()
        assert answer.values == [Settled(2, "")]


async def test_a_caller_that_waits_learns_that_the_last_output_is_not_committed() -> None:  # H45
    async with running_tasks(1, tolerated_failures=1) as (world, (task,)):
        await world.checkpoint()
        world.on_store = raising(OSError("no space left"))
        await end_well(world, task)
        answer = await world.await_settled()
        assert answer.values == [Settled(1, "checkpoint 3: storage: OSError: no space left")]
        (failure,) = world.failures
        assert "no space left" in str(failure)
        world.on_store = None
        world.reset("a new run")
        await world.running(0)
        world.end_run(succeeded=False)
        answer = await world.await_settled()
        assert answer.values == [Settled(1, "")], "a run that failed owes nothing, and the one before it is gone"


async def test_it_is_told_too_when_the_last_try_had_begun_before_the_end_of_the_run() -> None:  # H45
    written = asyncio.Event()

    async def fail(checkpoint: Any) -> None:
        await written.wait()
        raise OSError("no space left")

    async with running_tasks(1, tolerated_failures=0) as (world, (task,)):
        task.finish(state=b"last")
        await world.settle()
        world.on_store = fail
        world.begin_checkpoint()
        await world.settle()  # all took part, and it is being stored
        world.finish(task)
        world.end_run()
        answer = await world.await_settled()
        assert answer.open
        written.set()
        await world.settle()
        (settled,) = answer.values
        assert "no space left" in settled.uncommitted
        assert len(world.failures) == 1


async def test_a_final_checkpoint_that_found_no_id_is_still_owed() -> None:  # H4, H48
    async with running_tasks(1, checkpoint_timeout_s=30.0) as (world, (task,)):
        world.no_ids = OSError("the storage is gone")
        await end_well(world, task)
        answer = await world.await_settled()
        assert answer.open
        world.no_ids = None
        await world.advance(30.1)
        assert answer.values == [Settled(1, "")]


async def test_a_final_checkpoint_that_never_finds_an_id_is_given_up_and_its_output_is_not_called_committed() -> None:
    """H4 H45: the storage fails for longer than failures are tolerated."""
    async with running_tasks(1, checkpoint_timeout_s=30.0, tolerated_failures=1) as (world, (task,)):
        world.no_ids = OSError("the storage is gone")
        await end_well(world, task)
        answer = await world.await_settled()
        await world.advance(30.1)
        assert answer.open
        await world.advance(30.1)
        assert answer.values == [Settled(-1, "no checkpoint id: OSError: the storage is gone")]


async def test_the_figures_tell_of_the_last_checkpoints() -> None:
    async with running_tasks(1) as (world, (task,)):
        task.busy = True
        world.begin_checkpoint()
        await world.advance(2.0)
        task.busy = False
        await world.settle()
        task.declines = "not now"
        answer = await world.checkpoint()
        assert isinstance(answer.errors[0], CheckpointFailed)
        figures = world.statistics.snapshot()
        assert figures["checkpoints_completed"] == 1
        assert figures["checkpoints_aborted"] == 1
        assert figures["last_completed_checkpoint_id"] == 1
        assert figures["last_checkpoint_ms"] == pytest.approx(2000.0)
        assert "not now" in figures["last_abort_reason"]
