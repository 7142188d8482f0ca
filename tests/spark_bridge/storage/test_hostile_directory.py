# SPDX-License-Identifier: Apache-2.0

"""A directory in which somebody else put names, files and links: none of them is believed without a check."""

from __future__ import annotations

import os
import stat
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from spark_bridge.storage import CheckpointStorage, CheckpointUnreadable, StorageError
from spark_bridge.storage.layout import EPOCH_MAX, ID_MAX, why_ignored
from tests.spark_bridge.storage.checkpoints import a_checkpoint, a_prepared_storage, a_storage_with

HUGE_BYTES = 3 * 2**30
LITTLE_MEMORY = 5_000_000


@pytest.fixture(autouse=True)
def unusual_umask() -> Iterator[None]:
    """One that would leave files readable for everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


def goes_on(root: Path) -> list[int]:
    """Start an application, store a checkpoint and restore it in another one; return the ids that were assigned."""
    storage = a_prepared_storage(root)
    ids = list(storage.reserve_ids(3))
    storage.restore_latest("words", first=ids[0], allow_older=True)
    storage.store("words", a_checkpoint(ids[1]))
    assert a_prepared_storage(root).latest("words") == a_checkpoint(ids[1])
    return ids


# --- names --------------------------------------------------------------------------------------------------------

POISON = [
    f"words/checkpoint-{2**63 - 1}.hgc",
    f"words/checkpoint-{ID_MAX + 1}.hgc",
    f"words/checkpoint-{2**63 - 1}.hgc.1-aa.tmp",
    f"words/checkpoint-1.hgc.{EPOCH_MAX + 1}-aa.tmp",
    f"words/void-{2**63 - 1}-1-aa",
    f"words/void-1-{'9' * 20}-aa",
    f"words/restored-1-1-0-{2**63 - 1}-aa",
    f"words/restored-{EPOCH_MAX + 1}-1-0-1000-aa",
    f"_ids/1-{'9' * 20}-aa",
    f"_ids/1-{'9' * 400}"[:200] + "-aa",
    f"_ids/{'9' * 20}-1-aa",
    f"_ids/{EPOCH_MAX + 1}-1-aa",
]


@pytest.mark.parametrize("poison", POISON, ids=lambda name: name[:40])
def test_a_name_with_an_impossible_number_is_ignored_and_logged(poison: str, tmp_path: Path) -> None:  # H81, H4
    a_storage_with(tmp_path, 2)
    (tmp_path / poison).touch()
    with capture_logs() as logs:
        ids = goes_on(tmp_path)
    assert ids == [3, 4, 5]
    ignored = [entry for entry in logs if entry["event"] == "file name ignored"]
    assert {entry["file"] for entry in ignored} == {str(tmp_path / poison)}
    assert all(str(ID_MAX) in entry["problem"] for entry in ignored)
    assert (tmp_path / poison).exists()


NEAR_THE_END = [
    f"words/checkpoint-{ID_MAX}.hgc",
    f"words/void-{ID_MAX}-1-aa",
    f"words/restored-1-1-0-{ID_MAX}-aa",
    f"_ids/1-{ID_MAX}-aa",
    f"_ids/{EPOCH_MAX}-1-aa",
    f"words/restored-{EPOCH_MAX}-1-0-1-aa",
]


@pytest.mark.parametrize("poison", NEAR_THE_END)
def test_a_name_that_leaves_no_numbers_is_refused_by_name_until_it_is_deleted(
    poison: str, tmp_path: Path
) -> None:  # H81, H4
    a_storage_with(tmp_path, 2)
    (tmp_path / poison).touch()
    for _ in range(2):  # the refusal leaves nothing behind that would stop the next application
        with pytest.raises(StorageError, match=r"delete this file if none of your applications wrote it") as refusal:
            a_prepared_storage(tmp_path)
        assert str(tmp_path / poison) in str(refusal.value)
    (tmp_path / poison).unlink()
    assert goes_on(tmp_path) == [3, 4, 5]


def test_a_claim_that_appears_later_is_refused_by_name_until_it_is_deleted(tmp_path: Path) -> None:  # H81, H4
    storage = a_prepared_storage(tmp_path)
    poison = tmp_path / "_ids" / f"1-{ID_MAX}-00"
    poison.touch()
    with pytest.raises(StorageError, match=str(poison)):
        storage.reserve_ids(1)
    poison.unlink()
    assert list(storage.reserve_ids(1)) == [1]


def test_a_restored_id_that_leaves_none_is_refused(tmp_path: Path) -> None:  # H81, H4
    storage = a_prepared_storage(tmp_path)
    with pytest.raises(StorageError, match=f"no checkpoint ids are left above {ID_MAX}"):
        storage.reserve_ids(1, above=ID_MAX)
    assert list(storage.reserve_ids(1)) == [1]


@pytest.mark.parametrize(
    "name", ["checkpoint-02.hgc", "notes-1", "void-0-1-aa", "1-2-xyz", "checkpoint-3.hgc", "1-9-a"]
)
def test_names_of_others_and_valid_names_are_not_reported(name: str) -> None:
    assert why_ignored(name) == ""


# --- contents -----------------------------------------------------------------------------------------------------


def a_foreign_file(file: Path, head: bytes) -> None:
    with file.open("wb") as sparse:
        sparse.write(head)
        sparse.truncate(HUGE_BYTES)


WRONG_HEADS = {
    "zeros": (b"", "is not a Headgate checkpoint"),
    "another length": (
        b"\x89HGC\r\n\x1a\n" + bytes([0, 0, 0, 1, *bytes(7), 9]),
        f"claims 61 bytes, but has {HUGE_BYTES}",
    ),
    "another length, later format": (b"\x89HGC\r\n\x1a\n" + bytes([0, 0, 0, 9, *bytes(7), 9]), "claims 61 bytes"),
    "truncated": (b"\x89HGC\r\n\x1a\n" + bytes([0, 0, 0, 1]) + (2**32).to_bytes(8, "big"), "truncated or altered"),
}


@pytest.mark.parametrize("url", ["local", "hooked"])
@pytest.mark.parametrize("kind", WRONG_HEADS)
def test_a_huge_file_of_another_kind_is_refused_by_its_head(kind: str, url: str, tmp_path: Path) -> None:  # H81
    """The file system behind the URL reports how much is read of it."""
    head, says = WRONG_HEADS[kind]
    _, (whole, foreign) = a_storage_with(tmp_path, 2)
    file = tmp_path / "words" / f"checkpoint-{foreign}.hgc"
    a_foreign_file(file, head)
    storage = CheckpointStorage(tmp_path if url == "local" else f"hooked://{tmp_path}")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointUnreadable, match=says):
            storage.latest("words")
        assert storage.latest("words", allow_older=True) == a_checkpoint(whole)
        (problem,) = [info.problem for info in storage.verify()]
        assert tracemalloc.get_traced_memory()[1] < LITTLE_MEMORY
    finally:
        tracemalloc.stop()
    assert says in problem


@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_what_is_not_a_regular_file_is_refused_without_waiting_for_it(kind: str, tmp_path: Path) -> None:  # H81
    _, (whole,) = a_storage_with(tmp_path, 1)
    strange = tmp_path / "words" / "checkpoint-2.hgc"
    os.mkfifo(strange) if kind == "pipe" else strange.mkdir()
    storage = CheckpointStorage(tmp_path)
    with pytest.raises(CheckpointUnreadable, match="it is not a regular file"):
        storage.latest("words")
    assert storage.latest("words", allow_older=True) == a_checkpoint(whole)


# --- access and links ---------------------------------------------------------------------------------------------


def modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*")}


def test_only_the_owner_may_read_what_is_stored(tmp_path: Path) -> None:  # H82
    root = tmp_path / "new" / "checkpoints"
    storage, (_, discarded) = a_storage_with(root, 2)
    (first,) = storage.reserve_ids(1)
    storage.restore_latest("words", first=first)
    storage.discard("letters", discarded)
    storage.store_savepoint(tmp_path / "savepoints", "words", a_checkpoint(9))
    found = modes(tmp_path)
    assert len(found) == 12
    assert {mode for path, mode in found.items() if (tmp_path / path).is_dir()} == {0o700}
    assert {mode for path, mode in found.items() if (tmp_path / path).is_file()} == {0o600}


def test_a_temporary_file_is_private_from_its_first_byte(tmp_path: Path) -> None:  # H82
    storage = a_prepared_storage(tmp_path)
    (checkpoint_id,) = storage.reserve_ids(1)
    seen: list[int] = []

    def look() -> None:
        seen.extend(mode for name, mode in modes(tmp_path).items() if name.endswith(".tmp"))

    storage._files.write("words.hgc", b"data", temporary="words.hgc.1-aa.tmp", before_move=look)
    assert seen == [0o600]
    assert checkpoint_id == 1


def test_the_root_itself_may_be_a_link_and_keeps_its_mode(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o755)
    (tmp_path / "chosen").symlink_to(real)
    assert goes_on(tmp_path / "chosen") == [1, 2, 3]
    assert stat.S_IMODE(real.stat().st_mode) == 0o755


def elsewhere(tmp_path: Path) -> Path:
    """Another storage, from which nothing may be read or deleted."""
    a_storage_with(tmp_path / "elsewhere", 3)
    return tmp_path / "elsewhere"


def test_a_folder_that_is_a_link_is_neither_read_nor_written_nor_emptied(tmp_path: Path) -> None:  # H82
    other = elsewhere(tmp_path)
    storage = a_prepared_storage(tmp_path / "mine", retained=1)
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    (tmp_path / "mine" / "words").symlink_to(other / "words")
    (checkpoint_id,) = storage.reserve_ids(1)
    for use in (
        lambda: storage.latest("words"),
        lambda: storage.store("words", a_checkpoint(checkpoint_id)),
        lambda: storage.discard("words", 1),
        lambda: storage.start_from("words", None, first=checkpoint_id),
        lambda: storage.list("words"),
    ):
        with pytest.raises(StorageError, match="is a symbolic link, which Headgate does not follow"):
            use()
    assert storage.list() == []
    assert a_prepared_storage(tmp_path / "mine").latest("letters") is None
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before


def test_a_link_instead_of_a_checkpoint_is_refused_and_only_the_link_is_deleted(tmp_path: Path) -> None:  # H82, H51
    other = elsewhere(tmp_path)
    secret = other / "words" / "checkpoint-2.hgc"
    storage, (first,) = a_storage_with(tmp_path / "mine", 1, retained=1)
    link = tmp_path / "mine" / "words" / "checkpoint-2.hgc"
    link.symlink_to(secret)
    with pytest.raises(CheckpointUnreadable, match="is a symbolic link, which Headgate does not follow"):
        storage.latest("words")
    assert storage.latest("words", allow_older=True) == a_checkpoint(first)
    for checkpoint_id in storage.reserve_ids(4):
        storage.store("words", a_checkpoint(checkpoint_id))
    assert not link.is_symlink()
    assert a_checkpoint(2) == CheckpointStorage(other).read("words", 2)


@pytest.mark.parametrize("name", ["checkpoint-1.hgc", "checkpoint-1.hgc.{owner}.tmp", "void-1-{owner}"])
def test_writing_never_goes_through_a_link(name: str, tmp_path: Path) -> None:  # H82
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    storage = a_prepared_storage(tmp_path / "mine")
    (checkpoint_id,) = storage.reserve_ids(1)
    owner = storage._claims.owner
    (tmp_path / "mine" / "words").mkdir()
    link = tmp_path / "mine" / "words" / name.format(owner=f"{owner.epoch}-{owner.token}")
    link.symlink_to(victim)
    if name.startswith("void"):
        with pytest.raises(StorageError, match="cannot create"):
            storage.discard("words", checkpoint_id)
    else:
        storage.store("words", a_checkpoint(checkpoint_id))
        assert storage.latest("words") == a_checkpoint(checkpoint_id)
    assert victim.read_bytes() == b"precious"


def test_a_temporary_name_that_is_another_name_of_a_file_does_not_overwrite_it(tmp_path: Path) -> None:  # H82
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    storage = a_prepared_storage(tmp_path / "mine")
    storage._files.make_folder("words")
    os.link(victim, tmp_path / "mine" / "words" / "x.tmp")
    storage._files.write("words/x", b"data", temporary="words/x.tmp", before_move=lambda: None)
    assert victim.read_bytes() == b"precious"


def test_a_file_that_the_user_names_may_be_a_link(tmp_path: Path) -> None:
    _, (checkpoint_id,) = a_storage_with(tmp_path / "mine", 1)
    (tmp_path / "newest.hgc").symlink_to(tmp_path / "mine" / "words" / f"checkpoint-{checkpoint_id}.hgc")
    assert CheckpointStorage.read_file(tmp_path / "newest.hgc").checkpoint == a_checkpoint(checkpoint_id)
