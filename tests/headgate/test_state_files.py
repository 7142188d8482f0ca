# SPDX-License-Identifier: Apache-2.0

"""An operator whose state is in files, in the test kit: real files, and every upload when the world moves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from actors.coordination.engine.barrier_tracker import CheckpointFailed
from headgate import CheckpointConfig, OperatorCoordinator, SubtaskContext, SubtaskOperator, chain
from headgate.errors import StorageError
from headgate.testing import running_operator
from headgate.types import KeyGroups, RestoredFiles, StateFiles


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


async def test_a_file_that_stays_as_it_was_is_uploaded_once_and_counted() -> None:
    async with a_world(checkpoint=CheckpointConfig(tolerated_failures=2)) as world:
        task = await world.launch_operator(0, Counts)
        (task.operator.folder / "large.txt").write_bytes(Random(1).randbytes(10_000))
        uploaded = []
        for aborted in (True, False, False):
            task.uploads_wait = aborted
            answer = world.begin_checkpoint()
            await world.settle()
            if aborted:
                await world.abort_checkpoint(answer)
                task.uploads_wait = False
                await world.settle()
            uploaded.append(task.operator.context.statistics.uploaded_bytes)
        assert uploaded[0] == 0
        assert uploaded[1] > 10_000
        assert uploaded[2] - uploaded[1] < 1_000  # the list of the files


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


class Keyed(SubtaskOperator):
    """Counts its records by key. Its state has a file for each key, in a folder for each of its key groups."""

    counts_records = False
    groups = KeyGroups(16)

    def open(self, context: SubtaskContext, state: bytes | RestoredFiles | None) -> None:
        self.context = context
        self.own = self.groups.range_of(context.subtask, context.parallelism)
        assert state is None or (isinstance(state, RestoredFiles) and state.key_groups == self.own)
        assert {int(one.name) for one in context.state_folder.iterdir()} <= {*self.own}

    def merge_files(self, pieces: Sequence[RestoredFiles]) -> bytes:
        for one in pieces:
            for group in list(one.folder.iterdir()):
                assert one.key_groups is not None
                if int(group.name) not in one.key_groups:
                    shutil.rmtree(group)
                elif one is not pieces[0]:
                    group.rename(pieces[0].folder / group.name)
        return b""

    def process(self, records: Iterator[str]) -> Iterator[str]:
        for key in records:
            assert self.groups.of(key) in self.own
            count = self.context.state_folder / str(self.groups.of(key)) / f"{key}.txt"
            count.parent.mkdir(exist_ok=True)
            count.write_text(str(int(count.read_text() if count.exists() else "0") + 1))
            yield key

    def snapshot_state(self, checkpoint_id: int) -> StateFiles:
        return StateFiles(self.context.state_folder, immutable=(), key_groups=self.groups)

    def counts(self) -> dict[str, int]:
        return {one.stem: int(one.read_text()) for one in self.context.state_folder.glob("*/*")}


@pytest.mark.parametrize("seed", range(4))
async def test_each_key_survives_each_change_of_the_parallelism(seed: int) -> None:
    """H52, H190: from 4 to 8 to 3 to 5 subtasks, some of which do not restore before the next change."""
    random = Random(seed)
    model: Counter[str] = Counter()
    checkpoint, counts = None, model
    for parallelism in (4, 8, 3, 5):
        async with a_world(restored=checkpoint, parallelism=parallelism, seed=seed) as world:
            running = [n for n in range(parallelism) if parallelism != 3 or random.random() < 0.6]
            tasks = {n: await world.launch_operator(n, Keyed) for n in running}
            assert [task.error for task in tasks.values()] == [None] * len(tasks)
            for _ in range(100):
                key = f"key {random.randrange(60)}"
                if (subtask := Keyed.groups.subtask_of(key, parallelism)) in tasks:
                    tasks[subtask].feed(key)
                    model[key] += 1
            await world.settle()
            await world.checkpoint()
            checkpoint = world.checkpoints[-1]
            counts = Counter()
            for task in tasks.values():
                assert not counts.keys() & task.operator.counts().keys()
                counts.update(task.operator.counts())
    assert counts == model


async def test_the_files_of_a_stage_are_divided_and_the_states_of_others_are_not() -> None:
    """H52: each subtask of the source goes on where it was, and keys go where their groups are."""

    class Source(SubtaskOperator):
        counts_records = False

        def open(self, context: SubtaskContext, state: bytes | None) -> None:
            self.states = () if state is None else tuple(state.split())

        def merge_states(self, states: dict[int, bytes]) -> bytes:
            return b" ".join(states.values())

        def snapshot_state(self, checkpoint_id: int) -> bytes:
            return b" ".join(self.states) or b"new"

        def process(self, records: Iterator[str]) -> Iterator[str]:
            yield from records

    def make() -> Any:
        return chain(source=Source, counts=Keyed)

    async with running_operator(make(), mode="streaming", parallelism=3) as world:
        tasks = [await world.launch_operator(n) for n in range(3)]
        for key in map(str, range(30)):
            tasks[Keyed.groups.subtask_of(key, 3)].feed(key)
        await world.settle()
        await world.checkpoint()
        (checkpoint,) = world.checkpoints
    async with running_operator(make(), mode="streaming", parallelism=2, restored=checkpoint) as world:
        tasks = [await world.launch_operator(n) for n in range(2)]
        operators: list[Any] = [task.stages for task in tasks]
        assert [one["source"].states for one in operators] == [(b"new", b"new"), (b"new",)]
        counts = [one["counts"].counts() for one in operators]
        assert counts[0] | counts[1] == dict.fromkeys(map(str, range(30)), 1)
        assert not counts[0].keys() & counts[1].keys()


async def test_nothing_of_a_task_is_left_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with a_world() as world:
        task = await world.launch_operator(0, Counts)
        await world.checkpoint()
        assert attempts_in(tmp_path)
        await world.kill(task)
    assert not attempts_in(tmp_path)


def test_the_storage_of_a_program_goes_with_it_and_not_with_a_process_that_it_has_forked() -> None:
    program = """
import os, sys
from headgate.testing._state_files import storage_of_tests
folder = storage_of_tests().url
if os.fork():
    os.wait()
    print(folder, os.path.exists(folder))
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    folder, was_there = said
    assert was_there == "True"
    assert not Path(folder).exists()
