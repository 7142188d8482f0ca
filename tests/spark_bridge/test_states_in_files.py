# SPDX-License-Identifier: Apache-2.0

"""The driver's half of states in files: what a checkpoint names stays, and what nothing needs goes."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from protocol.barrier_tracker import CompletedCheckpoint
from protocol.barrier_tracker.pending import files_of
from protocol.file_retention import LAST_STATE, FileOrigin, origin_of
from protocol.wire.messages import RestoreMode
from protocol.wire.state_handles import StateHandle
from spark_bridge.command import main
from spark_bridge.driver.config import SidecarConfig, StorageDetails
from spark_bridge.driver.runtime import SidecarRuntime
from spark_bridge.storage import CheckpointStorage, StorageError, read_file
from spark_bridge.storage.files import Files
from spark_bridge.storage.operator_states import OperatorStates
from spark_bridge.storage.state_files.folder import StateFolder
from spark_bridge.storage.state_files.values import StateFiles
from tests.spark_bridge.simulated_driver import SimulatedDriver
from tests.spark_bridge.states_in_files import Application, an_application, content_of, missing

ROOT = Path(__file__).resolve().parents[2]


def origins(application: Application) -> set[int]:
    """For which checkpoints the files in the storage were uploaded."""
    found = {origin_of(name) for name in application.files()}
    return {origin.checkpoint_id for origin in found if isinstance(origin, FileOrigin)}


def manifest_of(application: Application, handle: StateHandle) -> Path:
    return Path(application.storage.state_folder("words").name_of(handle.manifest))


def put_back(file: Path, content: bytes) -> None:
    assert not file.exists()
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)


async def test_a_checkpoint_names_files_and_a_restart_restores_them(tmp_path: Path) -> None:  # H190, H191
    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        task.write("one")
        await application.completed_checkpoint()
        task.write("two")
        await application.completed_checkpoint()
    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        assert content_of(task.words) == {"one.sst": b"one", "two.sst": b"two"}
        before = set(application.files())
        await application.completed_checkpoint()
        assert len(set(application.files()) - before) == 1  # the manifest; the rest is named again
        assert missing(application.storage) == []


async def test_the_statistics_tell_what_was_uploaded_from_what_a_checkpoint_has(tmp_path: Path) -> None:
    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        task.write("one", bytes(1000))
        (handle,) = files_of(await application.completed_checkpoint())
        statistics = application.statistics
        assert statistics.last_checkpoint_files_bytes == 1000
        assert statistics.last_checkpoint_uploaded_bytes == 1000 + handle.size
        task.write("two", bytes(10))
        (later,) = files_of(await application.completed_checkpoint())
        assert statistics.last_checkpoint_files_bytes == 1010
        assert statistics.last_checkpoint_uploaded_bytes == 10 + later.size
        assert statistics.uploaded_bytes == 1010 + handle.size + later.size
    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        (again,) = files_of(await application.completed_checkpoint())
        assert application.statistics.last_checkpoint_files_bytes == 1010
        assert application.statistics.last_checkpoint_uploaded_bytes == again.size, "the files are named again"
        task.inline = True
        await application.completed_checkpoint()
        assert application.statistics.last_checkpoint_files_bytes == 0
        await application.savepoint()
        assert application.statistics.uploaded_bytes == again.size


# --- the sweep ------------------------------------------------------------------------------------------------------


async def test_what_nothing_needs_is_deleted_and_what_a_kept_checkpoint_names_is_not(tmp_path: Path) -> None:  # H190
    async with an_application(tmp_path, retained=2) as application:
        (task,) = await application.tasks_of(0)
        for word in "abcde":
            task.write("same", word.encode())
            await application.completed_checkpoint()
            await application.settle()
            assert missing(application.storage) == []
        assert origins(application) == application.storage.kept_ids("words") == {3, 4, 5}


async def test_files_of_an_aborted_checkpoint_are_named_by_the_next_one_and_otherwise_go(tmp_path: Path) -> None:
    """H190: or else a first upload that takes longer than a checkpoint may would never end."""
    async with an_application(tmp_path, parallelism=2) as application:
        quick, slow = await application.tasks_of(0, 1)
        quick.write("one")
        slow.lazy = True
        answer = await application.checkpoint()
        await application.advance(61.0)
        assert "not stored the files of its state" in answer.reason()
        assert origins(application) == {1}
        slow.lazy = False
        quick.write("two")
        await application.completed_checkpoint()
        await application.settle()
        assert origins(application) == {1, 2}  # "one" was named again, and the manifest of 1 is gone
        assert [name.startswith("1-") for name in application.files()].count(True) == 1
        assert missing(application.storage) == []


async def test_the_next_application_deletes_what_no_kept_checkpoint_names(tmp_path: Path) -> None:  # H190
    async with an_application(tmp_path, parallelism=2) as application:
        first, second = await application.tasks_of(0, 1)
        first.write("one")
        await application.completed_checkpoint()
        first.write("two")
        second.lazy = True
        await application.checkpoint()  # the application ends while it is in progress
        assert origins(application) == {1, 2}
    async with an_application(tmp_path, parallelism=2) as application:
        assert origins(application) == {1}
        assert missing(application.storage) == []


async def test_an_older_application_deletes_nothing_any_more(tmp_path: Path) -> None:  # H190, H4
    async with an_application(tmp_path, retained=1) as application:
        (task,) = await application.tasks_of(0)
        task.write("one", b"1")
        await application.completed_checkpoint()
        task.write("one", b"2")
        await application.completed_checkpoint()
        await application.settle()
        task.write("one", b"3")

        async def take_over(checkpoint: CompletedCheckpoint) -> None:  # it is durable by now
            CheckpointStorage(application.root).prepare()

        application.on_store = take_over
        kept: list[tuple[str, ...]] = []
        application.on_completed = lambda: kept.append(application.files())
        await application.completed_checkpoint()
        await application.advance(100.0)
        assert application.files() == kept[0]
        assert 1 in origins(application)


async def test_nothing_is_deleted_while_a_kept_checkpoint_cannot_be_read(tmp_path: Path) -> None:
    """H190: somebody may copy it from a backup, and it may name any file."""
    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        task.write("one", b"1")
        await application.completed_checkpoint()
        task.write("one", b"2")
        await application.completed_checkpoint()
        before = application.files()
    checkpoint = application.root / "words" / "checkpoint-1.hgc"
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[:-1])
    async with an_application(tmp_path) as application:
        assert application.files() == before
        checkpoint.write_bytes(whole)
        assert missing(application.storage) == []


async def test_a_storage_that_does_not_answer_delays_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = True
    names = StateFolder.names

    def names_if_it_answers(self: StateFolder) -> tuple[str, ...]:
        if silent:
            raise StorageError("no answer")
        return names(self)

    async with an_application(tmp_path, retained=1) as application:
        monkeypatch.setattr(StateFolder, "names", names_if_it_answers)
        (task,) = await application.tasks_of(0)
        for word in "abcd":
            task.write("same", word.encode())
            await application.completed_checkpoint()
        silent = False
        assert origins(application) == {1, 2, 3, 4}
        await application.advance(60.0)
        assert origins(application) == application.storage.kept_ids("words") == {3, 4}


async def test_an_operator_without_files_lists_and_asks_nothing(tmp_path: Path) -> None:
    """A retention that is off costs nothing: no listing, and no turn of the loop."""
    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        task.inline = True
        states = application.states
        calls: list[str] = []
        for name in ("kept", "kept_ids", "gather", "names", "has_claim"):
            setattr(states, name, lambda *args, name=name: calls.append(name))
        await application.completed_checkpoint()
        await application.completed_checkpoint()
        assert calls == []


async def test_files_may_begin_while_a_checkpoint_without_files_is_being_written(tmp_path: Path) -> None:  # H190, H43
    disks = {1: asyncio.Event(), 2: asyncio.Event()}
    async with an_application(tmp_path, concurrent_max=2) as application:
        (task,) = await application.tasks_of(0)

        async def wait(checkpoint: CompletedCheckpoint) -> None:
            await disks[checkpoint.checkpoint_id].wait()

        application.on_store = wait
        task.inline = True
        first = await application.checkpoint()
        task.inline = False
        task.write("one")
        second = await application.checkpoint()
        disks[1].set()
        await application.settle()
        assert first.values == [1]
        disks[2].set()
        await application.settle()
        assert second.values == [2]
        assert missing(application.storage) == []
        assert not application.failures


async def test_the_files_of_a_subtask_at_rest_stay_as_long_as_it_rests(tmp_path: Path) -> None:  # H190
    async with an_application(tmp_path, parallelism=2) as application:
        _, resting = await application.tasks_of(0, 1)
        resting.write("two")
        await application.completed_checkpoint()
    async with an_application(tmp_path, parallelism=2, retained=1) as application:
        (task,) = await application.tasks_of(0)
        task.inline = True
        for _ in range(4):
            await application.completed_checkpoint()
            await application.settle()
        assert application.storage.kept_ids("words").isdisjoint({1})
        assert missing(application.storage) == []
    async with an_application(tmp_path, parallelism=2) as application:
        _, resting = await application.tasks_of(0, 1)
        assert content_of(resting.words) == {"two.sst": b"two"}


# --- what is read before a checkpoint is written --------------------------------------------------------------------


async def test_a_last_state_goes_with_its_attempt_if_no_checkpoint_needs_it(tmp_path: Path) -> None:  # H190
    async with an_application(tmp_path, retained=1) as application:
        (task,) = await application.tasks_of(0)
        await application.completed_checkpoint()
        task.write("last")
        task.uploader.upload(task.uploader.freeze(StateFiles(task.words), LAST_STATE))
        await application.completed_checkpoint()
        await application.settle()
        assert LAST_STATE in origins(application), "the attempt may still end with it"
        task.kill()
        await application.settle()
        (task,) = await application.tasks_of(0)
        task.remove("last")
        for _ in range(2):
            await application.completed_checkpoint()
            await application.settle()
        assert LAST_STATE not in origins(application)
        assert missing(application.storage) == []


async def test_a_last_state_from_before_the_first_checkpoint_with_files_stays(tmp_path: Path) -> None:  # H190
    async with an_application(tmp_path, parallelism=2, retained=1) as application:
        first, second = await application.tasks_of(0, 1)
        first.inline = second.lazy = True
        await application.checkpoint()
        first.write("last")
        first.end()
        await application.settle()
        application.finish(first)
        await application.settle()
        second.upload(1)
        await application.settle()
        assert application.completed == [1], "with the state of the first subtask from before its end"
        second.lazy = False
        for _ in range(2):
            await application.completed_checkpoint()
            await application.settle()
        assert missing(application.storage) == []
        assert LAST_STATE in origins(application)


@pytest.mark.parametrize("last", [False, True])
async def test_a_storage_that_is_local_to_each_executor_fails_the_checkpoint(last: bool, tmp_path: Path) -> None:
    """H190. ``last``: the only state in files is that of a subtask that has finished."""
    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        task.write("one")
        task.uploader._folder = StateFolder.of_operator(Files(tmp_path / "of another host"), "words")
        if last:
            task.end()
            await application.settle()
        answer = await application.checkpoint()
        assert "the driver cannot read what a subtask has stored" in answer.reason()
        assert "If the storage is a local path, all executors and the driver must share it" in answer.reason()
        assert application.storage.kept_ids("words") == frozenset()


async def test_a_checkpoint_that_names_what_may_be_deleted_is_not_written(tmp_path: Path) -> None:  # H190
    async with an_application(tmp_path, retained=1) as application:
        (task,) = await application.tasks_of(0)
        manifests = {}
        for word in "abc":
            task.write("same", word.encode())
            handle = files_of(await application.completed_checkpoint())[0]
            manifests[handle] = manifest_of(application, handle).read_bytes()
        await application.settle()
        deleted = next(iter(manifests))

        def name_again(snapshot: Any, savepoint: Any = None) -> StateHandle:
            return deleted

        task.uploader.upload = name_again  # type: ignore[method-assign,assignment]
        put_back(manifest_of(application, deleted), manifests[deleted])  # so that only its name is against it
        answer = await application.checkpoint()
        assert "names files of states that have been deleted" in answer.reason()
        assert 4 not in application.storage.kept_ids("words")


@pytest.mark.parametrize("inline", [False, True])
async def test_a_checkpoint_waits_until_it_is_known_what_the_storage_keeps(
    inline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # H190
    known = asyncio.Event()
    kept = OperatorStates.kept

    async def kept_later(self: OperatorStates) -> dict[int, frozenset[str]]:
        await known.wait()
        return await kept(self)

    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        task.write("one")
        await application.completed_checkpoint()
    monkeypatch.setattr(OperatorStates, "kept", kept_later)
    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        task.inline = inline
        aborted = await application.checkpoint()
        await application.advance(61.0)
        assert "the storage has not written it" in aborted.reason()
        answer = await application.checkpoint()
        assert application.stored == []
        known.set()
        await application.settle()
        assert answer.values == [application.stored[0].checkpoint_id]
        assert missing(application.storage) == []


async def test_what_is_in_doubt_keeps_its_files(tmp_path: Path) -> None:  # H190, H64
    async with an_application(tmp_path, retained=1) as application:
        (task,) = await application.tasks_of(0)
        task.write("one", b"1")
        await application.completed_checkpoint()

        async def no_answer(_: Any) -> None:
            raise StorageError("no answer")

        application.on_store, application.on_discard = no_answer, no_answer
        task.write("one", b"2")
        answer = await application.checkpoint()  # it is durable, and nobody knows
        assert "no answer" in answer.reason()
        await application.advance(10.0)
    async with an_application(tmp_path, retained=1) as application:
        assert application.config.restored is not None
        assert application.config.restored.checkpoint_id == 2
        (task,) = await application.tasks_of(0)
        assert content_of(task.words) == {"one.sst": b"2"}


async def test_a_sweep_spares_what_is_in_doubt(tmp_path: Path) -> None:  # H190, H64
    """Checkpoint 3 alone names a file of the aborted 1, and the sweep after 2 waits for its failure."""
    disks = {2: asyncio.Event(), 3: asyncio.Event()}
    async with an_application(tmp_path, parallelism=2, retained=1, concurrent_max=2) as application:
        task, other = await application.tasks_of(0, 1)
        task.write("one", b"1")
        other.fails = "no space"
        assert "no space" in (await application.checkpoint()).reason()
        other.fails = ""

        async def wait(checkpoint: CompletedCheckpoint) -> None:
            await disks[checkpoint.checkpoint_id].wait()
            if checkpoint.checkpoint_id == 3:
                raise StorageError("no answer")

        async def no_answer(_: Any) -> None:
            raise StorageError("no answer")

        application.on_store, application.on_discard = wait, no_answer
        task.remove("one")
        second = await application.checkpoint()
        task.write("one", b"1")
        third = await application.checkpoint()
        disks[2].set()
        await application.settle()
        disks[3].set()
        await application.settle()
        assert second.values == [2]
        assert "no answer" in third.reason()
        assert origins(application) == {1, 2, 3}
        assert missing(application.storage) == []
    async with an_application(tmp_path, parallelism=2) as application:
        (task,) = await application.tasks_of(0)
        assert content_of(task.words) == {"one.sst": b"1"}


# --- savepoints -----------------------------------------------------------------------------------------------------


async def test_a_savepoint_needs_no_file_outside_of_itself(tmp_path: Path) -> None:  # H193
    async with an_application(tmp_path, parallelism=2) as application:
        running, finishing = await application.tasks_of(0, 1)
        running.write("one")
        finishing.write("two")
        finishing.end()
        await application.settle()
        application.finish(finishing)
        await application.completed_checkpoint()
        savepoint = await application.savepoint()
    shutil.rmtree(tmp_path / "storage")
    async with an_application(tmp_path, parallelism=2, savepoint=savepoint) as application:
        assert application.config.files_from == str(savepoint).removesuffix(".hgc") + ".state"
        (task,) = await application.tasks_of(0)  # the other subtask stays at rest
        assert content_of(task.words) == {"one.sst": b"one"}
        again = await application.savepoint()  # before the first checkpoint
        await application.completed_checkpoint()
        shutil.rmtree(application.config.files_from)
        await application.completed_checkpoint()
        await application.settle()
        assert missing(application.storage) == []
    async with an_application(tmp_path, parallelism=2) as application:
        running, resting = await application.tasks_of(0, 1)
        assert content_of(running.words) == {"one.sst": b"one"}
        assert content_of(resting.words) == {"two.sst": b"two"}
    async with an_application(tmp_path, parallelism=2, savepoint=again, root="third") as application:
        _, resting = await application.tasks_of(0, 1)
        assert content_of(resting.words) == {"two.sst": b"two"}


async def test_a_savepoint_is_deleted_with_its_files_and_others_keep_theirs(tmp_path: Path) -> None:  # H162, H193
    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        task.write("one")
        first, second = await application.savepoint(), await application.savepoint()
        before = content_of(second.parent)
        application.storage.delete_savepoint(str(first))
        gone = {name for name in before if name.startswith(first.stem)}
        assert gone
        assert content_of(second.parent) == {name: data for name, data in before.items() if name not in gone}
        assert sorted(one.name for one in second.parent.iterdir()) == [second.name, f"{second.stem}.state"]


@pytest.mark.parametrize("when", ["upload", "write"])
async def test_a_savepoint_that_fails_leaves_no_files(when: str, tmp_path: Path) -> None:  # H162
    async with an_application(tmp_path, parallelism=2) as application:
        first, second = await application.tasks_of(0, 1)
        first.write("one")
        kept = await application.savepoint()
        before = content_of(kept.parent)

        async def no_answer(_: Any) -> None:
            raise StorageError("no answer")

        if when == "upload":
            second.fails = "no space"
        else:
            application.on_store = no_answer
        answer = await application.checkpoint(str(tmp_path / "saved"))
        assert ("no space" if when == "upload" else "no answer") in answer.reason()
        assert content_of(kept.parent) == before
        assert len(list(kept.parent.iterdir())) == 2
        assert not application.port._savepoints


async def test_a_savepoint_that_is_refused_is_forgotten(tmp_path: Path) -> None:
    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        task.lazy = True
        answers = [await application.checkpoint(str(tmp_path / "saved")) for _ in range(3)]
        assert "only one may" in answers[2].reason()
        assert sorted(application.port._savepoints) == [1, 2]


async def test_a_savepoint_that_copies_is_in_nobodys_way(tmp_path: Path) -> None:  # H190, H193
    """The files that a savepoint copies are not deleted meanwhile, and may be afterwards."""
    disk = asyncio.Event()
    async with an_application(tmp_path, parallelism=2, retained=1, concurrent_max=3) as application:
        running, finishing = await application.tasks_of(0, 1)
        finishing.write("two")
        finishing.end()
        await application.settle()
        application.finish(finishing)
        for word in "ab":
            running.write("one", word.encode())
            await application.completed_checkpoint()

        async def wait(checkpoint: CompletedCheckpoint) -> None:
            if checkpoint.checkpoint_id == 3:
                await disk.wait()

        application.on_store = wait
        saving = await application.checkpoint(str(tmp_path / "saved"))
        await application.completed_checkpoint()
        before = origins(application)
        running.write("one", b"c")
        await application.completed_checkpoint()
        assert before < origins(application)  # the sweep waits for what was triggered before
        disk.set()
        await application.settle()
        assert saving.values == [3]
        assert missing(application.storage) == []


async def test_a_checkpoint_of_the_same_storage_has_its_files_where_they_are(tmp_path: Path) -> None:
    async with an_application(tmp_path) as application:
        (task,) = await application.tasks_of(0)
        task.write("one")
        await application.completed_checkpoint()
        await application.completed_checkpoint()
    file = tmp_path / "storage" / "words" / "checkpoint-1.hgc"
    async with an_application(tmp_path, savepoint=file) as application:
        assert application.config.files_from == ""
        (task,) = await application.tasks_of(0)
        assert content_of(task.words) == {"one.sst": b"one"}


# --- kills ----------------------------------------------------------------------------------------------------------


def run_until_killed(place: Path, call: int) -> int:
    """Run a driver until it kills itself; return how many changes of files it made if it does not."""
    arguments = [sys.executable, "-m", "tests.spark_bridge.states_until_killed", str(place), str(call)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, -9), done.stderr
    return int(done.stdout) if done.returncode == 0 else 0


def verify_savepoints(directory: Path) -> None:
    for savepoint in directory.glob("*.hgc"):
        folder = StateFolder.beside(str(savepoint), None)
        for handle in files_of(read_file(savepoint).checkpoint):
            folder.verify(handle)


async def assert_that_nothing_is_lost_or_left(place: Path) -> None:
    """What checkpoints and savepoints name is there, and the next application deletes everything else."""
    assert missing(CheckpointStorage(place / "storage")) == []
    verify_savepoints(place / "saved")
    async with an_application(place, parallelism=2, retained=1) as application:
        await application.tasks_of(0, 1)
        await application.completed_checkpoint()
        await application.completed_checkpoint()
        await application.settle()
        storage = application.storage
        assert missing(storage) == []
        folder, named = storage.state_folder("words"), set[str]()
        for handles in storage.kept_states("words").values():
            named |= {name for handle in handles or () for name in folder.names_of(handle)}
        assert folder.orphans(named) == ()


@pytest.mark.parametrize("part", [pytest.param(n, marks=[pytest.mark.long] if n else []) for n in range(6)])
async def test_a_driver_that_is_killed_loses_nothing_and_leaves_nothing(part: int, tmp_path: Path) -> None:
    """H190, H193: it is killed before each of its changes of files, a sixth of them in each test."""
    changes = await anyio.to_thread.run_sync(run_until_killed, tmp_path / "whole", 0)
    assert changes > 100
    points = range(1 + part, changes + 1, 36 if part == 0 else 6)
    for call in points:
        place = tmp_path / str(call)
        assert await anyio.to_thread.run_sync(run_until_killed, place, call) == 0
        await assert_that_nothing_is_lost_or_left(place)


# --- headgate checkpoints -------------------------------------------------------------------------------------------


@pytest.fixture
async def used(tmp_path: Path) -> Path:
    """A place with two checkpoints and a savepoint of 2 and 3 files, and files that nothing names."""
    async with an_application(tmp_path, parallelism=2) as application:
        task, other = await application.tasks_of(0, 1)
        task.write("one", b"1" * 10)
        await application.completed_checkpoint()
        task.write("two", b"2" * 100)
        await application.completed_checkpoint()
        await application.savepoint()
        task.write("three")
        other.lazy = True
        await application.checkpoint()
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["checkpoints", *arguments])
    said = capsys.readouterr()
    assert said.err == ""
    return status, said.out


def test_the_command_shows_files_and_which_nothing_needs(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = told(capsys, str(used / "storage"))
    rows = [line.split() for line in out.splitlines()]
    assert (status, rows[0][5:8]) == (0, ["FILES", "FILE", "BYTES"])
    assert [row[5:7] for row in rows[1:3]] == [["1", "10"], ["2", "110"]]
    assert "2 files that no checkpoint names, for example 4-1-" in out
    status, out = told(capsys, str(used / "saved"))
    assert (status, out.splitlines()[1].split()[5:7]) == (0, ["2", "110"])
    first, second = json.loads(told(capsys, str(used / "storage"), "--json")[1])
    assert (first["files"], first["file_bytes"], second["files"], second["file_bytes"]) == (1, 10, 2, 110)


def test_the_command_verifies_files_if_it_is_asked_to(used: Path, capsys: pytest.CaptureFixture[str]) -> None:  # H191
    for place in ("storage", "saved"):
        damaged = next(one for one in (used / place).rglob("*") if one.is_file() and one.stat().st_size == 100)
        damaged.write_bytes(b"x" * 100)
        assert told(capsys, str(used / place))[0] == 0
        status, out = told(capsys, str(used / place), "--files")
        assert status == 1
        assert "DAMAGED" in out
        assert f"{damaged}: it is damaged: size or SHA-256 are not those that were stored" in out


def test_the_command_misses_a_manifest(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = CheckpointStorage(used / "storage")
    manifest = storage.state_folder("words").name_of(files_of(storage.read("words", 2))[0].manifest)
    Path(manifest).unlink()
    status, out = told(capsys, str(used / "storage"))
    assert status == 1
    assert f"{manifest}: there is no such file" in out
    assert "not known which files nothing needs, because a checkpoint is damaged" in out


def test_the_command_tells_of_files_without_their_savepoint(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (savepoint,) = (used / "saved").glob("*.hgc")
    savepoint.unlink()
    status, out = told(capsys, str(used / "saved"))
    assert status == 0
    assert f"{savepoint.with_suffix('.state')}: no savepoint has these files" in out


async def test_the_drivers_credentials_of_the_storage_stay_with_the_driver(tmp_path: Path) -> None:
    """They may delete everything, and Spark's closures go to every executor."""
    options = {"auto_mkdir": True}
    for task_options in (None, {"use_listings_cache": False}):
        details = StorageDetails(options=options, task_options=task_options)
        config = SidecarConfig(storage=tmp_path / "storage", storage_details=details)
        async with SidecarRuntime(SimulatedDriver(), config) as runtime:
            handle = await runtime.coordinate("op", parallelism=1, mode=RestoreMode.STREAMING)
            states = handle.endpoint.state_storage
        assert states is not None
        assert states.options == task_options
