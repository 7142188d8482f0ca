# SPDX-License-Identifier: Apache-2.0

"""Checkpoints on real Spark: when they are taken, how they fail, and what is restored from them and where."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from actors.coordination import CheckpointFailed
from protocol.barrier_tracker import CheckpointConfig
from protocol.restart import FixedDelay
from protocol.wire.messages import RestoreMode
from spark_bridge.driver.config import SidecarConfig, StorageDetails
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.storage import CheckpointStorage, CheckpointUnreadable, StorageFenced
from tests.spark.actions import coordinated
from tests.spark.counting import Counting, CountingCoordinator

pytestmark = pytest.mark.spark

STREAMING = RestoreMode.STREAMING


def action_of(spark: SparkSession, handle: Any, parallelism: int, *args: Any) -> Callable[[], list[Any]]:
    rdd = spark.sparkContext.parallelize(range(parallelism), parallelism)
    return lambda: sorted(rdd.mapPartitions(handle.subtask(*args)).collect())


@contextmanager
def running(action: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run the action on another thread; its result or exception is there when the block is left."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(action())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    yield outcome
    thread.join(300)
    assert not thread.is_alive()


def ready(count: int) -> Callable[[list[tuple[Any, ...]]], bool]:
    return lambda story: sum(1 for callback in story if callback[0] == "ready") >= count


def completed(count: int) -> Callable[[list[tuple[Any, ...]]], bool]:
    return lambda story: sum(1 for callback in story if callback[0] == "complete") >= count


# --- when they are taken ------------------------------------------------------------------------------------------


def test_checkpoints_are_taken_at_their_interval_and_once_more_at_the_end(spark: SparkSession) -> None:
    """H40, H47: they are taken while the tasks run in turn; one after a successful run holds its final states."""
    coordinator = CountingCoordinator()
    with Sidecar(spark) as sidecar:
        every = CheckpointConfig(interval_s=0.05)
        handle = sidecar.coordinate("op", coordinator, parallelism=2, mode=STREAMING, checkpoint=every)
        with running(lambda: sidecar.run(action_of(spark, handle, 2, Counting))) as outcome:
            coordinator.wait_for(ready(2))
            coordinator.send_numbers(0, 100)
            coordinator.send_numbers(1, 50)
            coordinator.wait_for(completed(3))
            coordinator.stop_all()
        statistics = handle.statistics()

    assert outcome == [[(0, 100), (1, 50)]]
    assert coordinator.wrong == []
    taken = [callback[1] for callback in coordinator.named("checkpoint")]
    done = [callback[1] for callback in coordinator.named("complete")]
    assert taken == sorted(taken)
    assert set(done) <= set(taken)
    ended = coordinator.story.index(("run_ended", True))
    assert [callback[0] for callback in coordinator.story[ended + 1 :][-3:]] == ["checkpoint", "complete", "close"]
    assert statistics["checkpoints_completed"] == len(done)


def test_a_computing_task_closes_its_valve_immediately_and_snapshots_later(spark: SparkSession, tmp_path: Path) -> None:
    """H31, H40, H41: the coordinator's snapshot is taken while the task still computes, and events that it sends are
    held. An event to a subtask that has already acknowledged is delivered, although the other one has not.
    """
    coordinator = CountingCoordinator()
    with coordinated(spark, coordinator, 2, mode=STREAMING) as job:
        with running(job.action(Counting, str(tmp_path))) as outcome:
            coordinator.wait_for(ready(2))
            coordinator.tell(1, "compute")
            coordinator.wait_for(lambda story: ("event", 1, 0, "computing") in story)
            with running(job.sidecar.checkpoint) as checkpoint:
                coordinator.wait_for(lambda story: ("checkpoint", 1) in story)
                coordinator.send_numbers(0, 3)
                coordinator.send_numbers(1, 3)
                coordinator.wait_until_seen(0, 3)  # subtask 0 has acknowledged
                at_that_moment = list(coordinator.story)
                (tmp_path / "go on").touch()
            coordinator.wait_until_seen(1, 3)
            coordinator.stop_all()

    assert checkpoint == [1]
    assert ("complete", 1) not in at_that_moment
    assert outcome == [[(0, 3), (1, 3)]]
    story = coordinator.story
    assert story.index(("checkpoint", 1)) < story.index(("event", 1, 0, "computed"))
    assert coordinator.wrong == []


class Asking(Counting):
    """A coroutine on the task's thread asks, and asks once more while a checkpoint waits for the thread."""

    async def ask(self) -> Any:
        first = await self.context.request_async("what is it?")
        self.compute()
        return first, await self.context.request_async("and now?", 60.0)

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        answers = asyncio.run(self.ask())
        list(super().process(records))  # until it is told to stop
        yield answers


def test_a_coroutines_question_passes_while_a_checkpoint_waits_for_its_task(
    spark: SparkSession, tmp_path: Path
) -> None:
    """H152: the valve holds the task's events until its snapshot, and not what its coroutines ask."""
    coordinator = CountingCoordinator()
    with coordinated(spark, coordinator, 1, mode=STREAMING) as job:
        with running(job.action(Asking, str(tmp_path))) as outcome:
            coordinator.wait_for(lambda story: ("event", 0, 0, "computing") in story)
            with running(job.sidecar.checkpoint) as checkpoint:
                coordinator.wait_for(lambda story: ("checkpoint", 1) in story)
                (tmp_path / "go on").touch()
            coordinator.stop_all()

    assert checkpoint == [1]
    assert outcome == [[(["what is it?", "answered"], ["and now?", "answered"])]]
    story = coordinator.story
    assert story.index(("checkpoint", 1)) < story.index(("request", 0, 0, "and now?")) < story.index(("complete", 1))


# --- how they fail ------------------------------------------------------------------------------------------------


TOLERANT = CheckpointConfig(tolerated_failures=100)


def test_a_checkpoint_that_takes_too_long_names_who_is_late(spark: SparkSession, tmp_path: Path) -> None:
    """H45, H48: the timeout aborts it, the reason names the subtask that is late, and the next one works."""
    coordinator = CountingCoordinator()
    config = CheckpointConfig(timeout_s=1.0, tolerated_failures=1)
    with coordinated(spark, coordinator, 2, mode=STREAMING, checkpoint=config) as job:
        with running(job.action(Counting, str(tmp_path))):
            coordinator.wait_for(ready(2))
            coordinator.tell(1, "compute")
            coordinator.wait_for(lambda story: ("event", 1, 0, "computing") in story)
            with pytest.raises(CheckpointFailed, match=r"not complete within 1 s.*op\[1\]#0.*not acknowledged"):
                job.sidecar.checkpoint()
            (tmp_path / "go on").touch()
            coordinator.wait_for(lambda story: ("event", 1, 0, "computed") in story)
            coordinator.stop_all()
    assert coordinator.named("aborted") == [("aborted", 1)]


# --- what is restored, and where ----------------------------------------------------------------------------------


def test_a_new_application_continues_from_the_storage(spark: SparkSession, tmp_path: Path) -> None:
    """H4, H6, H52: reset before start, subtasks at their registration; checkpoint ids keep increasing."""
    config = SidecarConfig(storage=tmp_path / "checkpoints")
    first = CountingCoordinator()
    with Sidecar(spark, config) as sidecar:
        handle = sidecar.coordinate("op", first, parallelism=2, mode=STREAMING)
        with running(action_of(spark, handle, 2, Counting)) as outcome:
            first.wait_for(ready(2))
            first.send_numbers(0, 5)
            first.wait_until_seen(0, 5)
            first_id = sidecar.checkpoint()
            first.send_numbers(0, 2)  # these are lost
            first.wait_until_seen(0, 7)
            sidecar.release("op")
    assert isinstance(outcome[0], Exception)
    assert first.story[-2:] == [("run_ended", False), ("close",)]  # H57

    second = CountingCoordinator()
    with Sidecar(spark, config) as sidecar:
        handle = sidecar.coordinate("op", second, parallelism=2, mode=STREAMING)
        assert second.story[0] == ("reset_to_checkpoint", first_id, second.story[0][2])
        assert second.story[1] == ("start",)
        assert second.sent == {0: 5}
        with running(lambda: sidecar.run(action_of(spark, handle, 2, Counting))) as outcome:
            second.wait_for(ready(2))
            second.send_numbers(0, 3)
            second.send_numbers(1, 1)
            second.wait_until_seen(0, 8)
            second.stop_all()
    assert outcome == [[(0, 8), (1, 1)]]
    assert second.wrong == []
    assert second.named("complete")[0][1] > first_id


def test_a_damaged_checkpoint_is_an_error_unless_an_older_one_is_allowed(spark: SparkSession, tmp_path: Path) -> None:
    """H50, H51: the error names the file and the setting; the setting says how many older ones are kept."""
    coordinator = CountingCoordinator()
    with Sidecar(
        spark, SidecarConfig(storage=tmp_path, storage_details=StorageDetails(retained_checkpoints=1))
    ) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=1, mode=STREAMING)
        with running(lambda: sidecar.run(action_of(spark, handle, 1, Counting))):
            coordinator.wait_for(ready(1))
            ids = [sidecar.checkpoint() for _ in range(3)]
            coordinator.stop_all()
    older, newest = sorted(tmp_path.rglob("*.hgc"))  # the retained one and the newest, which does not count
    newest.write_bytes(newest.read_bytes()[:-1])

    with Sidecar(spark, SidecarConfig(storage=tmp_path)) as sidecar:
        with pytest.raises(CheckpointUnreadable, match=rf"{newest.name}.*allow_older_checkpoint=True"):
            sidecar.coordinate("op", CountingCoordinator(), parallelism=1, mode=STREAMING)
    restored = CountingCoordinator()
    with Sidecar(
        spark, SidecarConfig(storage=tmp_path, storage_details=StorageDetails(allow_older_checkpoint=True))
    ) as sidecar:
        sidecar.coordinate("op", restored, parallelism=1, mode=STREAMING)
    assert str(ids[-1]) in older.name
    assert restored.story[0][:2] == ("reset_to_checkpoint", ids[-1])


def test_an_application_whose_storage_was_taken_over_ends(spark: SparkSession, tmp_path: Path) -> None:
    """H4, H50: the later application continues; the earlier one completes no more checkpoints and takes no tasks."""
    coordinator = CountingCoordinator()
    with coordinated(
        spark, coordinator, config=SidecarConfig(storage=tmp_path), mode=STREAMING, checkpoint=TOLERANT
    ) as job:
        action = job.action(Counting)
        with running(lambda: job.sidecar.run(action, restart=FixedDelay(restarts_max=None, delay_s=0))) as outcome:
            coordinator.wait_for(ready(1))
            CheckpointStorage(tmp_path).prepare()
            with pytest.raises(CheckpointFailed, match="taken over by a later application"):
                job.sidecar.checkpoint()
        assert isinstance(outcome[0], StorageFenced)
        with pytest.raises(StorageFenced):
            job.sidecar.coordinate("another", CountingCoordinator(), parallelism=1)
    assert coordinator.named("complete", "reset", "reset_to_checkpoint") == []


# --- restarts -----------------------------------------------------------------------------------------------------


def test_a_failed_job_is_run_again_from_its_last_checkpoint(spark: SparkSession) -> None:
    """H8, H15: fail_job ends the run; the next one starts from the last completed checkpoint, on both sides."""
    coordinator = CountingCoordinator()
    with coordinated(spark, coordinator, 2, mode=STREAMING) as job:
        action = job.action(Counting)
        with running(lambda: job.sidecar.run(action, restart=FixedDelay(restarts_max=1, delay_s=0))) as outcome:
            coordinator.wait_for(ready(2))
            coordinator.send_numbers(0, 3)
            coordinator.wait_until_seen(0, 3)
            checkpoint_id = job.sidecar.checkpoint()
            coordinator.send_numbers(0, 2)
            coordinator.wait_until_seen(0, 5)

            async def fail() -> None:
                coordinator.context.fail_job("as it was told")

            coordinator.context.call_soon_threadsafe(fail)
            coordinator.wait_for(ready(4))
            coordinator.send_numbers(0, 4)
            coordinator.wait_until_seen(0, 7)
            coordinator.stop_all()
    assert outcome == [[(0, 7), (1, 0)]]
    assert coordinator.wrong == []
    resets = coordinator.named("reset", "reset_to_checkpoint")
    assert [callback[:2] for callback in resets] == [("reset_to_checkpoint", checkpoint_id)]
    failed = [callback for callback in coordinator.story if callback[0] == "failed"]
    assert sorted(callback[1] for callback in failed) == [0, 1]
