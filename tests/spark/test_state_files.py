# SPDX-License-Identifier: Apache-2.0

"""States in files on real Spark: executors have what it takes, and a killed task goes on from its files."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import CheckpointFile, SubtaskOperator
from headgate.types import KeyGroups, RestoredFiles, StateFiles
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


GROUPS = KeyGroups(32)


class KeyedCounts(SubtaskOperator):
    """Counts its records by key, with a file for each key group. Yields all counts at the end."""

    counts_records = False

    def open(self, context: SubtaskContext, state: bytes | RestoredFiles | None) -> None:
        self.folder = context.state_folder
        own = GROUPS.range_of(context.subtask, context.parallelism)
        assert {int(one.stem) for one in self.folder.iterdir()} <= {*own}

    def merge_files(self, pieces: Sequence[RestoredFiles]) -> bytes:
        for one in pieces:
            for group in list(one.folder.iterdir()):
                assert one.key_groups is not None
                if int(group.stem) not in one.key_groups:
                    group.unlink()
                elif one is not pieces[0]:
                    group.rename(pieces[0].folder / group.name)
        return b""

    def process(self, records: Iterator[tuple[str, None]]) -> Iterator[tuple[str, int]]:
        for key, _ in records:
            file = self.folder / f"{GROUPS.of(key)}.json"
            counts = Counter(json.loads(file.read_text())) if file.exists() else Counter()
            counts[key] += 1
            file.write_text(json.dumps(counts))
        for file in self.folder.iterdir():
            yield from json.loads(file.read_text()).items()

    def snapshot_state(self, checkpoint_id: int) -> StateFiles:
        return StateFiles(self.folder, immutable=(), key_groups=GROUPS)


@pytest.mark.long
def test_each_application_may_have_another_parallelism(spark: SparkSession, tmp_path: Path) -> None:
    """H52, H190: 4, 8, 3 and then 5 subtasks; nothing is lost or counted twice."""
    random, model = Random(1), Counter[str]()
    for n, parallelism in enumerate((4, 8, 3, 5)):
        keys = [f"key {random.randrange(200)}" for _ in range(1000)]
        model.update(keys)
        rdd = spark.sparkContext.parallelize([(key, None) for key in keys], 2)
        rdd = rdd.partitionBy(parallelism, partial(GROUPS.subtask_of, parallelism=parallelism))
        with Sidecar(spark, SidecarConfig(storage=tmp_path / "storage")) as sidecar:
            handle = sidecar.coordinate("counts", parallelism=parallelism, mode=STREAMING)
            tasks = rdd.mapPartitions(handle.subtask(KeyedCounts))
            counts = sidecar.run(tasks.collect, input_id=f"input {n}")
        assert len(counts) == len(dict(counts))
        assert dict(counts) == model


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
