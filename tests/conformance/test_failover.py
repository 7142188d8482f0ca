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
from tests.conformance.application import OPERATOR, Application, application

BATCH = RestoreMode.BATCH


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


async def test_the_failure_of_a_deploying_task_is_told() -> None:
    """S35 (R12; H11): it is reported failed, although it never was ready."""
    coordinator = RecordingCoordinator()
    async with application() as app:
        await app.coordinate(coordinator)
        tasks = await app.deployed()
        await app.end(tasks[1])
        assert failed(coordinator) == [1]
        assert coordinator.calls_of("subtask_ready") == []


async def test_the_failure_of_a_running_task_is_told() -> None:
    """S36 (R12; H12)."""
    coordinator = RecordingCoordinator()
    async with application() as app:
        await app.coordinate(coordinator)
        tasks = await app.running()
        await app.end(tasks[1])
        assert coordinator.calls_of("subtask_failed") == [("subtask_failed", 1, 0, FailureKind.FAILED)]


async def test_those_that_are_cancelled_for_the_sake_of_a_failover_are_told_too() -> None:
    """S37 (R12; H15): one task of a barrier stage fails, each is reported once."""
    coordinator = RecordingCoordinator()
    async with application() as app:
        await app.coordinate(coordinator)
        tasks = await app.running(barrier=True)
        await app.fail_barrier_stage(tasks[1])
        assert sorted(failed(coordinator)) == [0, 1]


async def test_a_task_that_fails_again_is_told_again() -> None:
    """S38 (R11; H10)."""
    coordinator = RecordingCoordinator()
    async with application() as app:
        await app.coordinate(coordinator)
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


async def test_a_deploying_task_that_is_cancelled_from_outside_is_told_as_killed() -> None:
    """S42 (R12; H12 decides). Flink does not report it: its test is disabled."""
    coordinator = RecordingCoordinator()
    async with application() as app:
        await app.coordinate(coordinator)
        tasks = await app.deployed()
        await app.end(tasks[1], TaskOutcome.KILLED)
        assert coordinator.calls_of("subtask_failed") == [("subtask_failed", 1, 0, FailureKind.KILLED)]


async def test_a_running_task_that_is_cancelled_from_outside_is_told_as_killed() -> None:
    """S43 (R12; H12 decides). Flink does not report it: its test is disabled."""
    coordinator = RecordingCoordinator()
    async with application() as app:
        await app.coordinate(coordinator)
        tasks = await app.running()
        await app.end(tasks[0], TaskOutcome.KILLED)
        assert coordinator.calls_of("subtask_failed") == [("subtask_failed", 0, 0, FailureKind.KILLED)]


async def state(checkpoint_id: int) -> bytes:
    return bytes([7, 11, 3, 5])


async def test_a_global_failure_resets_the_coordinator_to_its_checkpoint() -> None:
    """S48 (R84; H15, H55)."""
    coordinator = RecordingCoordinator(checkpoint_coordinator=state)
    async with application() as app:
        await app.coordinate(coordinator)
        await app.running()
        checkpoint_id = await complete_a_checkpoint(app)
        await fail_the_job_and_run_it_again(app, coordinator)
        assert global_resets(coordinator) == [(checkpoint_id, bytes([7, 11, 3, 5]))]
        assert sorted(failed(coordinator)) == [0, 1], "each attempt was reported first"


async def test_a_global_failure_before_any_checkpoint_resets_to_nothing() -> None:
    """S49 (R84; H15)."""
    coordinator = RecordingCoordinator(checkpoint_coordinator=state)
    async with application() as app:
        await app.coordinate(coordinator)
        await app.running()
        await fail_the_job_and_run_it_again(app, coordinator)
        assert global_resets(coordinator) == [(-1, None)]


async def test_two_global_failures_before_the_restart_reset_once() -> None:
    """S50 (R85; H15)."""
    coordinator = RecordingCoordinator()
    async with application() as app:
        await app.coordinate(coordinator)
        await app.running()
        coordinator.context.fail_job("by the test")
        await app.settle()
        app.bridge_ref.tell(GlobalFailureRaised(OPERATOR, "and once more"))
        await app.settle()
        await app.running()
        assert global_resets(coordinator) == [(-1, None)]


@pytest.mark.parametrize("barrier", [False, True])
async def test_a_global_failover_resets_no_single_subtask(barrier: bool) -> None:
    """S51 (R84; H15): neither when the job is run again nor when Spark starts a barrier stage again."""
    coordinator = RecordingCoordinator()
    async with application() as app:
        await app.coordinate(coordinator)
        tasks = await app.running(barrier=barrier)
        checkpoint_id = await complete_a_checkpoint(app)
        if barrier:
            await app.fail_barrier_stage(tasks[1])
        else:
            await fail_the_job_and_run_it_again(app, coordinator)
        assert resets(coordinator) == []
        assert global_resets(coordinator) == [(checkpoint_id, b"state")]
        assert len(coordinator.calls_of("subtask_ready")) == 4, "both subtasks run again"


async def test_a_local_failover_resets_its_subtask_to_the_last_checkpoint() -> None:
    """S52 (R83; H10, H18)."""
    coordinator = RecordingCoordinator()
    async with application() as app:
        await app.coordinate(coordinator)
        tasks = await app.running()
        checkpoint_id = await complete_a_checkpoint(app)
        await app.end(tasks[1])
        successor = await app.retry(tasks[1])
        assert resets(coordinator) == [(1, checkpoint_id)]
        assert successor.registered is not None
        assert successor.registered.checkpoint_id == checkpoint_id, "the attempt restores what the coordinator was told"


async def test_a_local_failover_before_any_checkpoint_resets_its_subtask_to_nothing() -> None:
    """S53 (R83; H10)."""
    coordinator = RecordingCoordinator()
    async with application() as app:
        await app.coordinate(coordinator)
        tasks = await app.running()
        await app.end(tasks[1])
        await app.retry(tasks[1])
        assert resets(coordinator) == [(1, -1)]


async def test_a_local_failover_leaves_the_coordinator_as_it_is() -> None:
    """S54 (R83; H13): the streaming operator keeps its state, and every other subtask its attempt."""
    coordinator = RecordingCoordinator()
    async with application() as app:
        await app.coordinate(coordinator)
        tasks = await app.running()
        await complete_a_checkpoint(app)
        await app.end(tasks[0])
        await app.retry(tasks[0])
        assert global_resets(coordinator) == []
        assert failed(coordinator) == [0]


async def test_in_batch_mode_a_global_failure_resets_to_nothing() -> None:
    """S56 (R86; H55): also after a checkpoint, because Spark computes the output again."""
    coordinator = RecordingCoordinator()
    async with application(mode=BATCH) as app:
        await app.coordinate(coordinator)
        await app.running()
        await complete_a_checkpoint(app)
        await fail_the_job_and_run_it_again(app, coordinator)
        assert global_resets(coordinator) == [(-1, None)]


async def test_in_batch_mode_a_global_failover_resets_no_single_subtask() -> None:
    """S57 (R86; H15)."""
    coordinator = RecordingCoordinator()
    async with application(mode=BATCH) as app:
        await app.coordinate(coordinator)
        await app.running()
        await fail_the_job_and_run_it_again(app, coordinator)
        assert resets(coordinator) == []


async def test_in_batch_mode_a_local_failover_resets_its_subtask_to_nothing() -> None:
    """S58 (R86; H18)."""
    coordinator = RecordingCoordinator()
    async with application(mode=BATCH) as app:
        await app.coordinate(coordinator)
        tasks = await app.running()
        await complete_a_checkpoint(app)
        await app.end(tasks[1])
        successor = await app.retry(tasks[1])
        assert resets(coordinator) == [(1, -1)]
        assert successor.registered is not None
        assert successor.registered.checkpoint_id == -1


async def test_in_batch_mode_a_local_failover_leaves_the_coordinator_as_it_is() -> None:
    """S59 (R86; H13)."""
    coordinator = RecordingCoordinator()
    async with application(mode=BATCH) as app:
        await app.coordinate(coordinator)
        tasks = await app.running()
        await app.end(tasks[0])
        await app.retry(tasks[0])
        assert global_resets(coordinator) == []
