# SPDX-License-Identifier: Apache-2.0

"""States in files on a real Spark: after a kill, in a new application and from a savepoint, the database is whole."""

from __future__ import annotations

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
from spark_bridge.storage.errors import StorageError
from spark_bridge.subtask import SubtaskContext
from tests.spark.counting import Counting, CountingCoordinator
from tests.spark.test_checkpoints import action_of, ready, running

pytestmark = pytest.mark.spark

STREAMING = RestoreMode.STREAMING


class CountingInFiles(Counting):
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


def files_of_states(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file() and path.parent.parent.name == "state"}


def test_a_state_in_files_survives_a_task_an_application_and_a_savepoint(spark: SparkSession, tmp_path: Path) -> None:
    """H190 to H193."""
    config = SidecarConfig(storage=tmp_path / "storage")
    first = CountingCoordinator()
    with Sidecar(spark, config) as sidecar:
        handle = sidecar.coordinate("op", first, parallelism=2, mode=STREAMING)
        with running(lambda: sidecar.run(action_of(spark, handle, 2, CountingInFiles))) as outcome:
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
            saved = sidecar.savepoint("op", directory=str(tmp_path / "savepoints"))
            first.send_numbers(0, 5)
            first.wait_until_seen(0, 310)
            first.stop_all()
    assert outcome == [[(0, 310), (1, 0)]]
    assert first.wrong == []
    assert files_of_states(tmp_path / "storage") != set()

    check_continues(spark, tmp_path / "storage", "latest", 310)
    check_continues(spark, tmp_path / "elsewhere", CheckpointFile(saved), 305)


def check_continues(spark: SparkSession, storage: Path, restore: Any, last: int) -> None:
    coordinator = CountingCoordinator()
    with Sidecar(spark, SidecarConfig(storage=storage)) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=2, mode=STREAMING, restore=restore)
        with running(lambda: sidecar.run(action_of(spark, handle, 2, CountingInFiles))) as outcome:
            coordinator.wait_for(ready(2))
            coordinator.send_numbers(0, 1)
            coordinator.send_numbers(1, 1)
            coordinator.wait_until_seen(0, last + 1)
            coordinator.wait_until_seen(1, 1)
            sidecar.checkpoint()
            coordinator.stop_all()
    assert outcome == [[(0, last + 1), (1, 1)]]
    assert coordinator.wrong == []


def test_without_a_storage_that_has_files_the_task_fails_and_says_what_to_set(spark: SparkSession) -> None:
    coordinator = CountingCoordinator()
    with Sidecar(spark) as sidecar:
        handle = sidecar.coordinate("op", coordinator, parallelism=1, mode=STREAMING)
        with running(lambda: sidecar.run(action_of(spark, handle, 1, CountingInFiles))) as outcome:
            pass
    assert "a state in files needs a storage that all executors can write" in str(outcome[0])
    assert isinstance(outcome[0], StorageError) or "StorageError" in str(outcome[0])
