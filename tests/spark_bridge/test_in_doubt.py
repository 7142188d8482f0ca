# SPDX-License-Identifier: Apache-2.0

"""No row is lost or duplicated, whatever the storage answers and whenever the driver dies.

Storage, sink and actors are real. One subtask writes thirty rows, ten for each checkpoint, and the second checkpoint
gets into doubt (H64).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.coordination import OperatorConfig
from actors.testing import deterministic_system
from protocol.attempts import FailureKind
from protocol.barrier_tracker import CheckpointConfig, CompletedCheckpoint
from protocol.subtask.types import SnapshotTaken
from protocol.wire.messages import Registered, RestoreMode
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.two_phase.driver import TwoPhaseSinkCoordinator
from spark_bridge.sinks.two_phase.errors import SinkFileLost
from spark_bridge.storage import CheckpointStorage, StorageError, StorageFenced, WriteOptions, read_file
from tests.actors.coordination.executor import Task
from tests.actors.coordination.operator_world import World
from tests.spark_bridge.sinks.files.kit import SinkTask as SinkEnd
from tests.spark_bridge.sinks.files.kit import rows_of, staged, take_visible, visible
from tests.spark_bridge.storage.checkpoints import hooked, interrupted

pytestmark = pytest.mark.usefixtures("without_threads")

ROWS = [f"{number:02d}" for number in range(30)]
IN_DOUBT = "checkpoint-2.hgc"


class SinkTask(Task):
    """An attempt that writes rows; its state is the number of the next one."""

    output: str
    position: int
    sink: SinkEnd

    def restore(self, registered: Registered) -> None:
        self.position = int(registered.states[0].state) if registered.states else 0
        number, after = self.attempt.attempt, registered.checkpoint_id
        self.sink = SinkEnd(FileSink(self.output, name="words"), attempt=number, checkpoint_id=after)

    def write(self) -> None:
        """Write the rows up to the next checkpoint."""
        for row in ROWS[self.position : self.position + 10]:
            self.sink.write(row)
        self.position = min(self.position + 10, len(ROWS))

    def acknowledge(self, checkpoint_id: int, state: bytes) -> None:
        self.sink.operator.snapshot_state(checkpoint_id)
        while self.sink.context.sent:
            self.send(self.sink.context.sent.pop(0))
        self._drive(SnapshotTaken(checkpoint_id, str(self.position).encode()))


class Driver(World):
    """One application. ``on_store`` is awaited when a write is done, ``on_discard`` before a discard."""

    storage: CheckpointStorage
    task: SinkTask

    async def _store(self, checkpoint: CompletedCheckpoint) -> None:
        self.storage.store("words", checkpoint, WriteOptions(completed_id=max(self.completed, default=-1)))
        if self.on_store is not None:
            await self.on_store(checkpoint)

    async def _discard(self, checkpoint_id: int) -> None:
        await super()._discard(checkpoint_id)
        self.storage.discard("words", checkpoint_id)

    async def _store_savepoint(self, checkpoint: CompletedCheckpoint, directory: str) -> None:
        self.storage.store_savepoint(directory, "words", checkpoint)

    async def begin(self) -> None:
        """Run the next attempt of the only subtask."""
        (task,) = await self.running(0)
        assert isinstance(task, SinkTask)
        self.task = task

    async def write_and_checkpoint(self) -> Any:
        self.task.write()
        answer = await self.checkpoint()
        return answer


@asynccontextmanager
async def a_driver(tmp_path: Path, *, savepoint: str = "", allow_older: bool = False) -> AsyncIterator[Driver]:
    """Start an application that restores what it finds, and end it."""
    storage = CheckpointStorage(f"hooked://{tmp_path}/checkpoints")
    storage.prepare()
    ids = storage.reserve_ids(10)
    if savepoint:
        restored: CompletedCheckpoint | None = read_file(savepoint).checkpoint
        assert restored is not None
        storage.start_from("words", restored.checkpoint_id, first=ids[0])
    else:
        restored = storage.restore_latest("words", first=ids[0], allow_older=allow_older)
    checkpoint = CheckpointConfig(tolerated_failures=10)
    config = OperatorConfig("words", 1, RestoreMode.STREAMING, checkpoint=checkpoint, restored=restored)
    SinkTask.output = str(tmp_path / "out")
    async with deterministic_system() as kit:
        driver = Driver(kit, TwoPhaseSinkCoordinator(FileSink(SinkTask.output)), config)
        driver.storage, driver.task_type, driver.next_id = storage, SinkTask, ids[0]
        await driver.start()
        await driver.begin()
        yield driver


def storm() -> AbstractContextManager[None]:
    """The storage stops answering once the second checkpoint has its name."""
    begun: list[str] = []

    def hook(call: str, path: str) -> None:
        if begun or (call == "moved" and path.endswith(IN_DOUBT)):
            begun.append(path)
            raise ConnectionError("the storage does not answer")

    return hooked(hook)


async def no_answer(_: Any) -> None:
    raise StorageError("no answer")


async def write_the_rest(driver: Driver, *, until: int = len(ROWS)) -> None:
    while driver.task.position < until:
        answer = await driver.write_and_checkpoint()
        assert answer.values, answer.errors


def rows(tmp_path: Path, taken: dict[str, bytes]) -> list[str]:
    return sorted(rows_of(taken | visible(str(tmp_path / "out"))))


def take(tmp_path: Path, reader: bool) -> dict[str, bytes]:
    return take_visible(str(tmp_path / "out")) if reader else {}


READERS = pytest.mark.parametrize("reader", [False, True], ids=["nobody-reads", "a-reader-takes-files"])


@READERS
async def test_no_row_is_lost_if_the_storage_is_lost_right_after_the_rename(tmp_path: Path, reader: bool) -> None:
    """H64: the checkpoint and the job fail, one reset, the driver ends; the next driver restores it nevertheless."""
    async with a_driver(tmp_path) as driver:
        await write_the_rest(driver, until=10)
        taken = take(tmp_path, reader)
        with storm():
            answer = await driver.write_and_checkpoint()
            assert "does not answer" in answer.reason()
            driver.fail(driver.task, FailureKind.FAILED, reset=False)
            driver.reset("the job has failed")
            await driver.settle()
            await driver.begin()
            assert driver.task.position == 10
            driver.task.write()
            await driver.stop()
    async with a_driver(tmp_path) as driver:
        assert driver.config.restored is not None
        assert driver.config.restored.checkpoint_id == 2
        taken |= take(tmp_path, reader)
        await write_the_rest(driver)
        assert rows(tmp_path, taken) == ROWS


@READERS
@pytest.mark.parametrize("discard", ["hangs", "fails"])
async def test_no_row_is_lost_if_an_executor_dies_during_the_write_and_then_the_driver(
    discard: str, tmp_path: Path, reader: bool
) -> None:  # H64
    async def never(_: Any) -> None:
        await asyncio.Event().wait()

    async with a_driver(tmp_path) as driver:
        await write_the_rest(driver, until=10)
        taken = take(tmp_path, reader)
        driver.on_store, driver.on_discard = never, never if discard == "hangs" else no_answer
        answer = await driver.write_and_checkpoint()
        assert answer.open
        driver.fail(driver.task)
        await driver.begin()
        assert answer.errors
        assert driver.task.position == 10
        driver.task.write()
        await driver.stop()
    async with a_driver(tmp_path) as driver:
        taken |= take(tmp_path, reader)
        await write_the_rest(driver)
        assert rows(tmp_path, taken) == ROWS


@READERS
async def test_what_was_kept_for_a_checkpoint_in_doubt_goes_when_it_is_discarded(tmp_path: Path, reader: bool) -> None:
    """H64: the storage answers again; the driver continues, and its successor restores the checkpoint before."""
    async with a_driver(tmp_path) as driver:
        await write_the_rest(driver, until=10)
        taken = take(tmp_path, reader)
        with storm():
            await driver.write_and_checkpoint()
            driver.fail(driver.task)
            await driver.begin()
            assert len(staged(str(tmp_path / "out"))) == 1
        await driver.advance(2.0)
        assert staged(str(tmp_path / "out")) == []
        driver.task.write()
        await driver.stop()
    async with a_driver(tmp_path) as driver:
        assert driver.config.restored is not None
        assert driver.config.restored.checkpoint_id == 1
        await write_the_rest(driver)
        assert rows(tmp_path, taken) == ROWS


async def test_what_was_kept_for_a_checkpoint_in_doubt_goes_when_a_later_one_completes(tmp_path: Path) -> None:  # H64
    async with a_driver(tmp_path) as driver:
        await write_the_rest(driver, until=10)
        driver.on_store = driver.on_discard = no_answer
        await driver.write_and_checkpoint()
        driver.fail(driver.task)
        await driver.begin()
        driver.on_store = None
        await write_the_rest(driver)
        assert staged(str(tmp_path / "out")) == []
        assert rows(tmp_path, {}) == ROWS


@READERS
@pytest.mark.parametrize("moment", ["pipe_file", "mv", "moved", "void", "after"])
async def test_no_row_is_lost_if_a_successor_takes_over_during_a_write(
    moment: str, tmp_path: Path, reader: bool
) -> None:
    """H64: the fencing window. The earlier driver fails over before it ends; by then the later one has restored."""
    chosen: list[CompletedCheckpoint | None] = []

    def choose() -> None:
        successor = CheckpointStorage(f"hooked://{tmp_path}/checkpoints")
        successor.prepare()
        (first,) = successor.reserve_ids(1)
        chosen.append(successor.restore_latest("words", first=first))

    call, within = ("", "/void-2-") if moment == "void" else (moment, IN_DOUBT)
    async with a_driver(tmp_path) as driver:
        await write_the_rest(driver, until=10)
        taken = take(tmp_path, reader)
        if moment in ("void", "after"):
            driver.on_store = no_answer
        if moment == "after":
            driver.on_discard = no_answer
        with interrupted(call, choose, within):
            answer = await driver.write_and_checkpoint()
        assert answer.errors
        if moment == "after":
            choose()
        assert len(chosen) == 1
        driver.fail(driver.task, reset=False)
        driver.reset("fenced")
        await driver.settle()
        with pytest.raises(StorageFenced):
            driver.storage.store("words", CompletedCheckpoint(3, 1, b""))
        await driver.stop()
    async with a_driver(tmp_path) as driver:
        assert driver.config.restored == chosen[0]
        taken |= take(tmp_path, reader)
        await write_the_rest(driver)
        assert rows(tmp_path, taken) == ROWS


async def test_a_savepoint_whose_files_are_gone_is_refused(tmp_path: Path) -> None:  # H64, H49
    async with a_driver(tmp_path) as driver:
        await write_the_rest(driver, until=10)
        driver.task.write()
        await driver.checkpoint(str(tmp_path / "saved"))
        driver.fail(driver.task)  # files sealed for the savepoint are discarded: no checkpoint covers them
        await driver.settle()
        await driver.stop()
    (file,) = (tmp_path / "saved").iterdir()
    with pytest.raises(SinkFileLost, match="savepoint"):
        await restore_and_hear(tmp_path, str(file))


async def restore_and_hear(tmp_path: Path, savepoint: str) -> None:
    async with a_driver(tmp_path, savepoint=savepoint) as driver:
        await driver.settle()
        raise driver.failures[0]
