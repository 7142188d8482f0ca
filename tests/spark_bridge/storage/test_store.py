# SPDX-License-Identifier: Apache-2.0

"""Checkpoints in a directory: written completely, read completely, kept as long as they are needed (H50, H51, H52)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from protocol.wire.messages import RestoreMode
from spark_bridge.storage import CheckpointStorage, StorageError, WriteOptions
from tests.spark_bridge.storage.checkpoints import (
    a_checkpoint,
    a_prepared_storage,
    a_storage_with,
    failing,
    hooked,
    interrupted,
    names_in,
    overwrite,
)


def ids_of(storage: CheckpointStorage, operator_id: str = "words") -> list[int]:
    return [info.checkpoint_id for info in storage.list(operator_id)]


def test_a_new_application_reads_the_newest_one(any_url: str) -> None:  # H52
    _, ids = a_storage_with(any_url, 2)
    restored = a_prepared_storage(any_url)
    assert restored.latest("words") == a_checkpoint(ids[-1])
    assert restored.read("words", ids[0]) == a_checkpoint(ids[0])
    with pytest.raises(StorageError, match=f"there is no checkpoint {ids[-1] + 1} of 'words'"):
        restored.read("words", ids[-1] + 1)


def test_an_empty_storage_has_no_latest_one(any_url: str) -> None:
    assert a_prepared_storage(any_url).latest("words") is None


def test_operators_are_kept_apart_whatever_they_are_called(any_url: str) -> None:
    names = ["words", "Words of München", "..", ".", "_ids", "~", "a=b", "100 %", "x" * 256, "ü" * 256, "a:b*?\\"]
    storage = a_prepared_storage(any_url)
    for name, checkpoint_id in zip(names, storage.reserve_ids(len(names)), strict=True):
        storage.store(name, a_checkpoint(checkpoint_id))
    restored = a_prepared_storage(any_url)
    coordinator_states = [latest.coordinator_state for name in names if (latest := restored.latest(name)) is not None]
    assert coordinator_states == [f"coordinator {number}".encode() for number in range(1, len(names) + 1)]
    assert {info.operator_id for info in restored.list()} == set(names)


def test_the_newest_are_retained(any_url: str) -> None:  # H51
    storage, ids = a_storage_with(any_url, 10, retained=2)
    assert ids_of(storage) == ids[-3:]  # two, and the newest, which may still be given up


def test_the_last_completed_one_stays_when_all_pending_ones_are_given_up(any_url: str) -> None:  # H51
    storage = a_prepared_storage(any_url, retained=1)
    completed, *under_way = storage.reserve_ids(4)
    storage.store("words", a_checkpoint(completed))
    for checkpoint_id in under_way:
        storage.store("words", a_checkpoint(checkpoint_id), WriteOptions(completed_id=completed))
    for checkpoint_id in under_way:
        storage.discard("words", checkpoint_id)
    assert storage.latest("words") == a_checkpoint(completed)


def test_one_operator_retains_its_own(any_url: str) -> None:  # H51
    storage = a_prepared_storage(any_url, retained=1)
    lonely, *others = storage.reserve_ids(6)
    storage.store("lonely", a_checkpoint(lonely))
    for checkpoint_id in others:
        storage.store("words", a_checkpoint(checkpoint_id))
    assert ids_of(storage, "lonely") == [lonely]


def test_a_checkpoint_that_is_known_to_be_damaged_is_not_one_of_those_retained(tmp_path: Path) -> None:  # H51
    _, (whole, damaged) = a_storage_with(tmp_path, 2, retained=1)
    (tmp_path / "words" / f"checkpoint-{damaged}.hgc").write_bytes(b"rubbish")
    storage = a_prepared_storage(tmp_path, retained=1)
    assert storage.latest("words", allow_older=True) == a_checkpoint(whole)
    (new,) = storage.reserve_ids(1)
    storage.store("words", a_checkpoint(new))
    storage.discard("words", new)
    assert storage.latest("words", allow_older=True) == a_checkpoint(whole)


def test_deleting_a_damaged_checkpoint_is_logged(tmp_path: Path) -> None:  # H51
    _, (_, damaged) = a_storage_with(tmp_path, 2, retained=1)
    (tmp_path / "words" / f"checkpoint-{damaged}.hgc").write_bytes(b"rubbish")
    storage = a_prepared_storage(tmp_path, retained=1)
    storage.latest("words", allow_older=True)
    with capture_logs() as logs:
        for checkpoint_id in storage.reserve_ids(3):
            storage.store("words", a_checkpoint(checkpoint_id))
    assert damaged not in ids_of(storage)
    assert [entry["file"] for entry in logs if entry["log_level"] == "warning"] == [f"words/checkpoint-{damaged}.hgc"]


def test_discarding_a_missing_checkpoint_is_not_an_error(any_url: str) -> None:
    storage, ids = a_storage_with(any_url, 2)
    storage.discard("words", ids[1])
    storage.discard("words", ids[1])
    storage.discard("nobody", 1)
    assert storage.latest("words") == a_checkpoint(ids[0])


def test_a_list_says_what_each_file_holds(tmp_path: Path) -> None:
    storage = a_prepared_storage(tmp_path)
    (checkpoint_id,) = storage.reserve_ids(1)
    file = storage.store("words", a_checkpoint(checkpoint_id), WriteOptions(mode=RestoreMode.BATCH))
    (info,) = storage.list()
    assert (info.operator_id, info.checkpoint_id, info.file) == ("words", checkpoint_id, file)
    assert (info.parallelism, info.subtasks, info.held_events, info.mode) == (2, 1, 1, "batch")
    assert (info.size_bytes, info.problem) == (os.path.getsize(file), "")
    assert storage.verify() == []


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name_and_its_name_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # H50
    """A machine that loses its power right after the rename would otherwise leave an empty file of that name."""
    synced: list[tuple[str, bool]] = []  # what, and whether the checkpoint had its name then
    storage = a_prepared_storage(tmp_path)
    (checkpoint_id,) = storage.reserve_ids(1)
    fsync, named = os.fsync, tmp_path / "words" / f"checkpoint-{checkpoint_id}.hgc"

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        synced.append((kind, named.exists()))

    monkeypatch.setattr(os, "fsync", noting)
    file = storage.store("words", a_checkpoint(checkpoint_id))
    assert Path(file) == named
    assert ("file", False) in synced
    assert synced[-1] == ("folder", True)


def test_a_checkpoint_appears_by_a_rename_of_the_complete_file(tmp_path: Path) -> None:  # H50
    storage = a_prepared_storage(tmp_path)
    (checkpoint_id,) = storage.reserve_ids(1)
    written: list[tuple[int, int]] = []

    def look() -> None:
        (temporary,) = (tmp_path / "words").iterdir()
        written.append((temporary.stat().st_ino, temporary.stat().st_size))

    file = storage.store("words", a_checkpoint(checkpoint_id), WriteOptions(permit=look))
    assert written == [(os.stat(file).st_ino, os.stat(file).st_size)]


@pytest.mark.parametrize("fails", ["pipe_file", "mv"])
def test_a_write_that_fails_leaves_nothing(fails: str, hooked_url: str) -> None:  # H50
    storage, ids = a_storage_with(hooked_url, 1)
    (new,) = storage.reserve_ids(1)
    with (
        failing(fails, OSError(28, "No space left on device")),
        pytest.raises(StorageError, match=r"cannot write .*checkpoint-2\.hgc.*No space left on device"),
    ):
        storage.store("words", a_checkpoint(new))
    left = names_in(hooked_url, "words")
    assert [name for name in left if not name.startswith("void-2-")] == ["checkpoint-1.hgc"]
    assert storage.latest("words") == a_checkpoint(ids[0])


def test_a_write_of_which_only_a_part_arrives_is_noticed(hooked_url: str) -> None:  # H50
    storage = a_prepared_storage(hooked_url)
    (new,) = storage.reserve_ids(1)

    def cut() -> None:
        overwrite(f"{hooked_url}/words/checkpoint-{new}.hgc", bytes(10))

    with interrupted("moved", cut), pytest.raises(StorageError, match=r"\d+ bytes were written, but the file has 10"):
        storage.store("words", a_checkpoint(new))
    assert storage.latest("words") is None


def test_one_that_is_stored_but_whose_fence_cannot_be_seen_stays_in_doubt(hooked_url: str) -> None:  # H50, H64
    storage, ids = a_storage_with(hooked_url, 1)
    (new,) = storage.reserve_ids(1)
    calls: list[str] = []

    def fail_after_the_move(call: str, path: str) -> None:
        calls.append(call)
        if call == "ls" and "moved" in calls:
            raise ConnectionError("no answer")

    with hooked(fail_after_the_move), pytest.raises(StorageError, match="no answer"):
        storage.store("words", a_checkpoint(new))
    assert CheckpointStorage(hooked_url).latest("words") == a_checkpoint(new)
    storage.discard("words", new)
    assert CheckpointStorage(hooked_url).latest("words") == a_checkpoint(ids[0])


def test_an_unprepared_storage_raises(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    with pytest.raises(StorageError, match=r"is not prepared: call prepare\(\) first"):
        storage.store("words", a_checkpoint(1))
    with pytest.raises(StorageError, match="is not prepared"):
        storage.reserve_ids(1)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense://bucket/folder", "cannot use nonsense://bucket/folder: ValueError: Protocol not known"),
        ("file-in-the-way", "cannot make the directory .*file-in-the-way/checkpoints"),
    ],
)
def test_an_unusable_directory_is_named(url: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file-in-the-way").write_text("here", encoding="utf-8")
    with pytest.raises(StorageError, match=says):
        CheckpointStorage(url if "://" in url else f"{url}/checkpoints").prepare()


def test_prepare_finds_a_directory_that_cannot_be_written(hooked_url: str) -> None:
    with (
        failing("pipe_file", PermissionError(13, "Permission denied")),
        pytest.raises(StorageError, match=r"cannot create .*_ids/.*Permission denied"),
    ):
        CheckpointStorage(hooked_url).prepare()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_local_directory_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(StorageError, match="Permission denied"):
        CheckpointStorage(tmp_path).prepare()


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="retained must be an int of at least 1"):
        CheckpointStorage(tmp_path, retained=0)
    with pytest.raises(ValueError, match="count must be an int of at least 1"):
        a_prepared_storage(tmp_path).reserve_ids(0)
