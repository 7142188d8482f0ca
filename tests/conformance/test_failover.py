# SPDX-License-Identifier: Apache-2.0

"""S35 to S38, S42, S43, S48 to S54, S56 to S59: how Spark's failures reach the coordinator.

A failed attempt that Spark retries corresponds to Flink's local failover. A global failover corresponds to a failed job
and the next action over the same lineage, or to a barrier stage, which Spark fails and restarts as a whole (H15, H55).
"""

from __future__ import annotations

import pytest

from protocol.attempts import FailureKind, GlobalFailureRaised
from protocol.facts import TaskOutcome
from protocol.wire.messages import RestoreMode
from tests.actors.coordination.operator_world import Call, RecordingCoordinator
from tests.conformance.application import OPERATOR, Application, coordinated

BATCH, STREAMING = RestoreMode.BATCH, RestoreMode.STREAMING


def failed(coordinator: RecordingCoordinator) -> list[int]:
    return [call[1] for call in coordinator.calls_of("subtask_failed")]


def resets(coordinator: RecordingCoordinator) -> list[Call]:
    return [call[1:] for call in coordinator.calls_of("subtask_reset")]


def global_resets(coordinator: RecordingCoordinator) -> list[Call]:
    return [call[1:] for call in coordinator.calls_of("reset_to_checkpoint")]


async def fail_the_job_and_run_it_again(app: Application, coordinator: RecordingCoordinator) -> None:
    coordinator.context.fail_job("by the test")
    await app.settle()
    await app.running()


async def complete_a_checkpoint(app: Application) -> int:
    answer = await app.checkpoint()
    (checkpoint_id,) = answer.values
    return int(checkpoint_id)


@pytest.mark.parametrize(
    ("outcome", "kind"), [(TaskOutcome.FAILED, FailureKind.FAILED), (TaskOutcome.KILLED, FailureKind.KILLED)]
)
@pytest.mark.parametrize("runs", [False, True], ids=["deploying", "running"])
async def test_the_failure_or_cancellation_of_a_task_is_told(
    runs: bool, outcome: TaskOutcome, kind: FailureKind
) -> None:
    """S35, S36, S42, S43 (R12; H11, H12): also if it never was ready. Flink does not report a cancellation from
    outside: its tests of that are disabled."""
    async with coordinated() as (app, coordinator):
        tasks = await (app.running if runs else app.deployed)()
        await app.end(tasks[1], outcome)
        assert coordinator.calls_of("subtask_failed") == [("subtask_failed", 1, 0, kind)]
        assert len(coordinator.calls_of("subtask_ready")) == 2 * runs


async def test_those_that_are_cancelled_for_the_sake_of_a_failover_are_told_too() -> None:
    """S37 (R12; H15): one task of a barrier stage fails, each is reported once."""
    async with coordinated() as (app, coordinator):
        tasks = await app.running(barrier=True)
        await app.fail_barrier_stage(tasks[1])
        assert sorted(failed(coordinator)) == [0, 1]


async def test_a_task_that_fails_again_is_told_again() -> None:
    """S38, S53 (R11, R83; H10): and before any checkpoint, its subtask is reset to nothing."""
    async with coordinated() as (app, coordinator):
        task, _ = await app.running()
        for _ in range(2):
            await app.end(task)
            task = await app.retry(task)
        assert failed(coordinator) == [0, 0]
        order = [call[:3] for call in coordinator.calls_of("subtask_ready", "subtask_failed", "subtask_reset")]
        assert [call for call in order if call[1] == 0] == [
            ("subtask_ready", 0, 0),
            ("subtask_failed", 0, 0),
            ("subtask_reset", 0, -1),
            ("subtask_ready", 0, 1),
            ("subtask_failed", 0, 1),
            ("subtask_reset", 0, -1),
            ("subtask_ready", 0, 2),
        ]


async def state(checkpoint_id: int) -> bytes:
    return bytes([7, 11, 3, 5])


@pytest.mark.parametrize("mode", [STREAMING, BATCH])
async def test_a_global_failure_resets_the_coordinator_to_its_checkpoint(mode: RestoreMode) -> None:
    """S48, S56 (R84, R86; H15, H55): in batch mode to nothing, because Spark computes the output again."""
    async with coordinated(mode, checkpoint_coordinator=state) as (app, coordinator):
        await app.running()
        checkpoint_id = await complete_a_checkpoint(app)
        await fail_the_job_and_run_it_again(app, coordinator)
        restored = (-1, None) if mode is BATCH else (checkpoint_id, bytes([7, 11, 3, 5]))
        assert global_resets(coordinator) == [restored]
        assert sorted(failed(coordinator)) == [0, 1], "each attempt was reported first"


async def test_two_global_failures_before_the_restart_reset_once() -> None:
    """S49, S50 (R84, R85; H15): before any checkpoint to nothing."""
    async with coordinated() as (app, coordinator):
        await app.running()
        coordinator.context.fail_job("by the test")
        await app.settle()
        app.bridge_ref.tell(GlobalFailureRaised(OPERATOR, "and once more"))
        await app.settle()
        await app.running()
        assert global_resets(coordinator) == [(-1, None)]


@pytest.mark.parametrize(("mode", "barrier"), [(STREAMING, False), (STREAMING, True), (BATCH, False)])
async def test_a_global_failover_resets_no_single_subtask(mode: RestoreMode, barrier: bool) -> None:
    """S51, S57 (R84, R86; H15): neither when the job is run again nor when Spark starts a barrier stage again."""
    async with coordinated(mode) as (app, coordinator):
        tasks = await app.running(barrier=barrier)
        checkpoint_id = await complete_a_checkpoint(app)
        if barrier:
            await app.fail_barrier_stage(tasks[1])
        else:
            await fail_the_job_and_run_it_again(app, coordinator)
        assert resets(coordinator) == []
        assert global_resets(coordinator) == [(-1, None) if mode is BATCH else (checkpoint_id, b"state")]
        assert len(coordinator.calls_of("subtask_ready")) == 4, "both subtasks run again"


@pytest.mark.parametrize("mode", [STREAMING, BATCH])
async def test_a_local_failover_resets_its_subtask_to_the_last_checkpoint(mode: RestoreMode) -> None:
    """S52, S54, S58, S59 (R83, R86; H10, H13, H18): in batch mode to nothing. The coordinator keeps its state, and
    every other subtask its attempt."""
    async with coordinated(mode) as (app, coordinator):
        tasks = await app.running()
        checkpoint_id = await complete_a_checkpoint(app)
        await app.end(tasks[1])
        successor = await app.retry(tasks[1])
        restored = -1 if mode is BATCH else checkpoint_id
        assert resets(coordinator) == [(1, restored)]
        assert successor.registered is not None
        assert successor.registered.checkpoint_id == restored, "the attempt restores what the coordinator was told"
        assert global_resets(coordinator) == []
        assert failed(coordinator) == [1]
