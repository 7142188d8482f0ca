# SPDX-License-Identifier: Apache-2.0

"""An operator whose state is in files, in the test kit: real files, and every upload when the world moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.coordination.engine.barrier_tracker import CheckpointFailed
from headgate import CheckpointConfig, OperatorCoordinator, SubtaskContext, SubtaskOperator, chain
from headgate.errors import StorageError
from headgate.testing import running_operator
from headgate.types import RestoredFiles, StateFiles


class Counts(SubtaskOperator):
    """Counts the words of its records, each in a file."""

    goes_on_after_restore = True

    def open(self, context: SubtaskContext, state: bytes | RestoredFiles | None) -> None:
        self.context = context
        self.folder = context.state_folder
        self.done = 0
        if isinstance(state, RestoredFiles):
            assert state.folder == self.folder
            self.done = int(state.data) if context.input_begins_again else 0

    def process(self, records: Iterator[str]) -> Iterator[str]:
        for number, word in enumerate(records):
            if number >= self.done:
                count = self.folder / f"{word}.txt"
                count.write_text(str(int(count.read_text() if count.exists() else "0") + 1))
                self.done = number + 1
                yield word

    def counts(self) -> dict[str, int]:
        return {one.stem: int(one.read_text()) for one in self.folder.iterdir()}

    def snapshot_state(self, checkpoint_id: int) -> StateFiles:
        return StateFiles(self.folder, str(self.done).encode())


class Last(Counts):
    """Yields its counts at the end."""

    def process(self, records: Iterator[str]) -> Iterator[Any]:
        yield from super().process(records)
        yield self.counts()


def attempts_in(folder: Path) -> list[Path]:
    return list(folder.glob("headgate-states-*/*"))


def a_world(**settings: Any) -> Any:
    return running_operator(OperatorCoordinator, mode="streaming", **settings)


async def test_a_state_in_files_is_restored_after_a_failure() -> None:
    async with a_world() as world:
        task = await world.launch_operator(0, Counts)
        task.feed("a", "b", "a")
        await world.settle()
        await world.checkpoint()
        task.feed("a")
        await world.settle()
        folder = task.operator.folder
        await world.kill(task)
        retried = await world.launch_operator(0, Last, ["a", "b", "a", "a", "c"])
        assert retried.outputs == ["a", "c", {"a": 3, "b": 1, "c": 1}]
        assert not folder.exists()
        assert not retried.operator.folder.exists()


async def test_a_checkpoint_of_one_world_is_restored_in_another() -> None:
    async with a_world() as world:
        task = await world.launch_operator(0, Counts)
        task.feed("a", "b")
        await world.settle()
        await world.checkpoint()
        (checkpoint,) = world.checkpoints
    async with a_world(restored=checkpoint) as world:
        task = await world.launch_operator(0, Last, ["a", "b", "b"])
        assert task.outputs[-1] == {"a": 1, "b": 2}


async def test_the_operator_goes_on_during_the_upload() -> None:  # H192
    async with a_world() as world:
        task = await world.launch_operator(0, Counts)
        task.uploads_wait = True
        task.feed("a")
        await world.settle()
        answer = world.begin_checkpoint()
        await world.settle()
        task.feed("b")
        await world.settle()
        assert (task.outputs, answer.done) == (["a", "b"], False)
        task.uploads_wait = False
        await world.settle()
        assert answer.value == world.checkpoints[-1].checkpoint_id
        await world.kill(task)
        retried = await world.launch_operator(0, Last, ["a"])
        assert retried.outputs == [{"a": 1}]


async def test_a_failed_upload_fails_the_checkpoint_and_not_the_task() -> None:  # H192
    async with a_world(checkpoint=CheckpointConfig(tolerated_failures=2)) as world:
        task = await world.launch_operator(0, Counts)
        task.upload_error = StorageError("the disk is full")
        with pytest.raises(CheckpointFailed, match="the disk is full"):
            await world.checkpoint()
        task.upload_error = None
        await world.checkpoint()
        assert not task.outcome


async def test_a_failed_upload_of_the_last_state_fails_the_task() -> None:
    async with a_world() as world:
        task = await world.launch_operator(0, Counts)
        task.upload_error = StorageError("the disk is full")
        task.end_records()
        await world.settle()
        assert task.outcome == "failed"
        assert str(task.error) == "the disk is full"


async def test_the_last_state_of_a_subtask_is_in_later_checkpoints() -> None:
    async with a_world(parallelism=2) as world:
        first = await world.launch_operator(0, Counts, ["a"])
        second = await world.launch_operator(1, Counts)
        assert first.outcome == "success"
        await world.checkpoint()
        states = {n: one.states[0] for n, one in world.checkpoints[-1].subtask_states.items()}
        assert [state.files.files for _, state in sorted(states.items())] == [1, 0]
        second.end_records()
        await world.settle()


async def test_a_checkpoint_that_is_given_up_stops_the_upload() -> None:
    async with a_world() as world:
        task = await world.launch_operator(0, Counts)
        task.uploads_wait = True
        answer = world.begin_checkpoint()
        await world.settle()
        await world.abort_checkpoint(answer)
        assert [upload.stopped for upload in task.uploads] == [True]
        task.uploads_wait = False
        await world.checkpoint()


async def test_a_stage_of_a_chain_has_a_state_in_files() -> None:
    def make() -> Any:
        return chain(double=lambda records: (2 * record for record in records), counts=Last)

    async with running_operator(make(), mode="streaming") as world:
        task = await world.launch_operator(0)
        task.feed("a", "b")
        await world.settle()
        await world.checkpoint()
        (checkpoint,) = world.checkpoints
    async with running_operator(make(), mode="streaming", restored=checkpoint) as world:
        task = await world.launch_operator(0, records=["a", "b", "b"])
        assert task.outputs == ["bb", {"aa": 1, "bb": 2}]


async def test_nothing_of_a_task_is_left_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with a_world() as world:
        task = await world.launch_operator(0, Counts)
        await world.checkpoint()
        assert attempts_in(tmp_path)
        await world.kill(task)
    assert not attempts_in(tmp_path)
