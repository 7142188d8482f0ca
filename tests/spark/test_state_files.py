# SPDX-License-Identifier: Apache-2.0

"""States in files on real Spark: executors have what it takes, and a killed task goes on from its files."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import CheckpointFile
from headgate.types import RestoredFiles, StateFiles
from protocol.wire.messages import RestoreMode
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask import SubtaskContext
from spark_bridge.subtask.local_folder import FOLDER
from tests.spark.counting import Counting, CountingCoordinator
from tests.spark.test_checkpoints import action_of, ready, running

pytestmark = pytest.mark.spark

STREAMING = RestoreMode.STREAMING


class InFiles(Counting):
    """Its state is a file for each number, with the last number beside them as bytes."""

    def open(self, context: SubtaskContext, state: Any) -> None:
        assert state is None or isinstance(state, RestoredFiles)
        super().open(context, None if state is None else state.data)
        self.folder = context.state_folder
        assert self.folder.parent.parent.name == FOLDER
        found = sorted(int(one.stem) for one in self.folder.iterdir())
        assert found == list(range(1, self.last + 1)), (found, self.last)

    def handle_event(self, event: Any) -> None:
        super().handle_event(event)
        if self.last:
            (self.folder / f"{self.last}.sst").write_text(str(self.last))

    def snapshot_state(self, checkpoint_id: int) -> StateFiles:  # type: ignore[override]
        return StateFiles(self.folder, super().snapshot_state(checkpoint_id))


def test_a_killed_task_goes_on_from_its_files(spark: SparkSession, tmp_path: Path) -> None:
    """H190: what it wrote after the checkpoint is not in what the next attempt has."""
    coordinator = CountingCoordinator()
    with Sidecar(spark, SidecarConfig(storage=tmp_path / "storage")) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=2, mode=STREAMING)
        with running(lambda: sidecar.run(action_of(spark, handle, 2, InFiles))) as outcome:
            coordinator.wait_for(ready(2))
            coordinator.send_numbers(0, 5)
            coordinator.send_numbers(1, 2)
            coordinator.wait_until_seen(0, 5)
            coordinator.wait_until_seen(1, 2)
            sidecar.checkpoint()
            status = sidecar.status().operators["op"]
            assert status.last_checkpoint_files_bytes == 7
            assert status.last_checkpoint_uploaded_bytes == status.counts["uploaded_bytes"] > 7  # with the manifests
            coordinator.send_numbers(0, 2)
            coordinator.wait_until_seen(0, 7)
            coordinator.tell(0, "die")
            coordinator.wait_for(ready(3))
            coordinator.send_numbers(0, 4)
            coordinator.wait_until_seen(0, 9)
            coordinator.stop_all()
    assert outcome == [[(0, 9), (1, 2)]]
    assert coordinator.wrong == []


class InADatabase(Counting):
    """Its state is a database with all numbers."""

    def open(self, context: SubtaskContext, state: bytes | RestoredFiles | None) -> None:
        self.context = context
        if state is not None:
            assert isinstance(state, RestoredFiles)
            assert state.folder == context.state_folder
        self._database = sqlite3.connect(context.state_folder / "numbers.db", isolation_level=None)
        self._database.execute("CREATE TABLE IF NOT EXISTS numbers (number INTEGER PRIMARY KEY, text TEXT)")
        numbers = [row[0] for row in self._database.execute("SELECT number FROM numbers ORDER BY number")]
        assert numbers == list(range(1, len(numbers) + 1))
        self.last = len(numbers)

    def handle_event(self, event: object) -> None:
        before = self.last
        super().handle_event(event)
        if self.last != before:
            self._database.execute("INSERT INTO numbers VALUES (?, ?)", (self.last, "x" * 1000))

    def snapshot_state(self, checkpoint_id: int) -> StateFiles:  # type: ignore[override]
        folder = self.context.snapshot_folder(checkpoint_id)
        copy = sqlite3.connect(folder / "numbers.db")
        self._database.backup(copy)
        copy.close()
        return StateFiles(folder, immutable=())


def test_a_database_survives_a_task_and_an_application(spark: SparkSession, tmp_path: Path) -> None:
    """H190, H192: the second attempt and the second application each have what the last checkpoint had."""
    config = SidecarConfig(storage=tmp_path / "storage")
    first = CountingCoordinator()
    with Sidecar(spark, config) as sidecar:
        handle = sidecar.coordinate("op", first, parallelism=2, mode=STREAMING)
        with running(lambda: sidecar.run(action_of(spark, handle, 2, InADatabase))) as outcome:
            first.wait_for(ready(2))
            first.send_numbers(0, 300)
            first.wait_until_seen(0, 300)
            sidecar.checkpoint()
            first.send_numbers(0, 2)
            first.wait_until_seen(0, 302)
            first.tell(0, "die")
            first.wait_for(ready(3))
            first.send_numbers(0, 5)
            first.wait_until_seen(0, 305)
            sidecar.checkpoint()
            first.stop_all()
    assert outcome == [[(0, 305), (1, 0)]]
    assert first.wrong == []

    coordinator = CountingCoordinator()
    with Sidecar(spark, config) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=2, mode=STREAMING)
        with running(lambda: sidecar.run(action_of(spark, handle, 2, InADatabase))) as outcome:
            coordinator.wait_for(ready(2))
            coordinator.send_numbers(0, 1)
            coordinator.send_numbers(1, 1)
            coordinator.wait_until_seen(0, 306)
            coordinator.wait_until_seen(1, 1)
            sidecar.checkpoint()
            coordinator.stop_all()
    assert outcome == [[(0, 306), (1, 1)]]
    assert coordinator.wrong == []


def test_without_a_storage_the_task_says_what_to_set(spark: SparkSession) -> None:
    coordinator = CountingCoordinator()
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=1, mode=STREAMING)
        with pytest.raises(Exception, match=r"needs a storage that all executors can write.*SidecarConfig\(storage"):
            action_of(spark, handle, 1, InFiles)()


def test_an_application_continues_from_a_savepoint_and_needs_it_no_more(spark: SparkSession, tmp_path: Path) -> None:
    """H193: neither the storage of the first application, nor the savepoint after the first checkpoint."""
    first = CountingCoordinator()
    with Sidecar(spark, SidecarConfig(storage=tmp_path / "first")) as sidecar:
        handle = sidecar.coordinate("op", first, parallelism=2, mode=STREAMING)
        with running(action_of(spark, handle, 2, InFiles)):
            first.wait_for(ready(2))
            first.send_numbers(0, 5)
            first.wait_until_seen(0, 5)
            sidecar.checkpoint()
            savepoint = sidecar.savepoint(directory=str(tmp_path / "saved"))
            sidecar.release("op")
    shutil.rmtree(tmp_path / "first")
    second = CountingCoordinator()
    with Sidecar(spark, SidecarConfig(storage=tmp_path / "second")) as sidecar:
        handle = sidecar.coordinate("op", second, parallelism=2, mode=STREAMING, restore=CheckpointFile(savepoint))
        with running(lambda: sidecar.run(action_of(spark, handle, 2, InFiles))) as outcome:
            second.wait_for(ready(2))
            sidecar.checkpoint()
            shutil.rmtree(tmp_path / "saved")
            second.send_numbers(0, 3)
            second.wait_until_seen(0, 8)
            sidecar.checkpoint()
            second.tell(0, "die")
            second.wait_for(ready(3))
            second.send_numbers(0, 1)
            second.wait_until_seen(0, 9)
            second.stop_all()
    assert outcome == [[(0, 9), (1, 0)]]
    assert second.wrong == []
