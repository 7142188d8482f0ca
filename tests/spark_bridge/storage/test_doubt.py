# SPDX-License-Identifier: Apache-2.0

"""Checkpoints with an unknown outcome: what a storage guarantees for them, and which one a restart restores (H64)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from protocol.wire.messages import RestoreMode
from spark_bridge.command import main
from spark_bridge.storage import CheckpointStorage, Storage, StorageError, StorageFenced, StorageSession, WriteOptions
from spark_bridge.storage.layout import ID_MAX, Owner, RestoreRecord, parse_record, parse_void, void_name
from spark_bridge.storage.validity import NOTHING, Validity, no_longer_kept
from tests.mutants.mutant import Edit
from tests.spark_bridge.object_stores import STORES
from tests.spark_bridge.storage.checkpoints import (
    a_checkpoint,
    a_prepared_storage,
    a_storage_with,
    content_of,
    failing,
    hooked,
    interrupted,
    overwrite,
)

FIRST = Owner(1, "a")
TIMEOUT_S = 60.0
NO_ANSWER = ConnectionError("no answer")


def restored(storage: CheckpointStorage) -> int:
    """The id that the application starts the operator "words" from; 0 for nothing."""
    (first,) = storage.reserve_ids(1)
    checkpoint = storage.restore_latest("words", first=first)
    return NOTHING if checkpoint is None else checkpoint.checkpoint_id


def appear(storage: CheckpointStorage, checkpoint_id: int, of: int) -> None:
    """Complete a rename that the filesystem had queued, whichever process is alive; with another checkpoint's bytes."""
    whole = content_of(f"{storage.url}/words/checkpoint-{of}.hgc")
    overwrite(f"{storage.url}/words/checkpoint-{checkpoint_id}.hgc", whole)


# --- the rule -----------------------------------------------------------------------------------------------------


def record(number: int, base: int, first: int) -> RestoreRecord:
    return RestoreRecord(Owner(number, "a"), 1, base, first)


@pytest.mark.parametrize(
    ("voided", "records", "restorable"),
    [
        ([], [], [1, 2, 3, 4, 5, 6]),
        ([2, 5], [], [1, 3, 4, 6]),
        ([], [record(1, 3, 5)], [1, 2, 3, 5, 6]),
        ([], [record(1, 0, 5)], [5, 6]),
        ([3], [record(1, 3, 5)], [1, 2, 3, 5, 6]),  # a marker of a fenced application comes too late for the base
        ([2, 5], [record(1, 3, 5)], [1, 3, 6]),
        ([], [record(1, 1, 3), record(2, 4, 6)], [1, 3, 4, 6]),
        ([], [record(1, 2, 3), record(2, 0, 6)], [6]),
        ([], [record(1, 4, 5), record(2, 2, 6)], [1, 2, 6]),
    ],
)
def test_what_may_be_restored(voided: list[int], records: list[RestoreRecord], restorable: list[int]) -> None:  # H64
    for order in (records, records[::-1]):
        voids = [(id_, Owner(2, "a")) for id_ in voided]
        validity = Validity.of(voids, order)
        assert [id_ for id_ in range(1, 7) if validity.may_restore(id_)] == restorable
        needed = [kept for kept in records if kept not in validity.superseded()]
        assert [id_ for id_ in range(1, 7) if Validity.of(voids, needed).may_restore(id_)] == restorable


def test_retention_counts_neither_what_is_void_nor_what_was_given_up_nor_what_is_in_doubt() -> None:  # H64, H51
    ids = [1, 2, 3, 4, 5, 6, 7]
    assert no_longer_kept(ids, Validity(), 2, 5) == [1, 2, 3]
    assert no_longer_kept(ids, Validity({4}), 2, 5) == [1, 2, 4]
    assert no_longer_kept(ids, Validity({7}), 2, 5, [5]) == [1, 2, 7]
    assert no_longer_kept(ids, Validity(), 1, -1) == []


def test_only_whole_names_with_ids_that_fit_are_markers() -> None:  # H64, H81
    assert parse_void(void_name(ID_MAX, FIRST)) == (ID_MAX, FIRST)
    for checkpoint_id in (0, -1, ID_MAX + 1):
        with pytest.raises(ValueError, match="invalid checkpoint id"):
            void_name(checkpoint_id, FIRST)
    good = RestoreRecord(FIRST, 3, 4, 9)
    assert parse_record(good.name) == good
    for name in (f"void-{ID_MAX + 1}-1-a", "void-0-1-a", "void-1-1-", "void-1-1-a.tmp", "checkpoint-1.hgc"):
        assert parse_void(name) is None
    for name in (f"restored-1-1-0-{ID_MAX + 1}-a", "restored-1-1-9-9-a", "restored-1-1-9-4-a", "restored-1-1-1-2"):
        assert parse_record(name) is None


# --- discarding ---------------------------------------------------------------------------------------------------


def test_a_discarded_checkpoint_is_not_restored_even_if_its_write_succeeds_later(tmp_path: Path) -> None:  # H64
    storage, (completed,) = a_storage_with(tmp_path, 1)
    (lost,) = storage.reserve_ids(1)
    storage.discard("words", lost)
    appear(storage, lost, of=completed)
    assert restored(a_prepared_storage(tmp_path)) == completed


def test_a_discard_that_cannot_write_its_marker_guarantees_nothing(hooked_url: str) -> None:  # H64
    storage, (_, in_doubt) = a_storage_with(hooked_url, 2)
    with failing("pipe_file", NO_ANSWER), pytest.raises(StorageError, match="no answer"):
        storage.discard("words", in_doubt)
    assert restored(a_prepared_storage(hooked_url)) == in_doubt


def test_a_discard_is_durable_although_the_file_cannot_be_deleted(hooked_url: str) -> None:  # H64
    storage, (completed, in_doubt) = a_storage_with(hooked_url, 2)
    with failing("rm_file", NO_ANSWER):
        storage.discard("words", in_doubt)
    assert [(info.checkpoint_id, info.void) for info in storage.list()] == [(completed, False), (in_doubt, True)]
    assert restored(a_prepared_storage(hooked_url)) == completed


def test_a_fenced_application_discards_nothing(any_url: str) -> None:  # H64
    earlier, (_, in_doubt) = a_storage_with(any_url, 2)
    later = a_prepared_storage(any_url)
    with pytest.raises(StorageFenced):
        earlier.discard("words", in_doubt)
    assert restored(later) == in_doubt


def test_what_was_restored_again_in_the_same_application_cannot_be_discarded(storage: Storage) -> None:  # H64
    storage.prepare()
    (in_doubt, first) = storage.reserve_ids(2)
    storage.store("words", a_checkpoint(in_doubt))
    assert storage.restore_latest("words", first=first) == a_checkpoint(in_doubt)
    with pytest.raises(StorageError):
        storage.discard("words", in_doubt)
    assert storage.latest("words") == a_checkpoint(in_doubt)


# --- restoring ----------------------------------------------------------------------------------------------------


def test_a_write_that_succeeds_after_its_successor_restored_is_permanently_void(tmp_path: Path) -> None:  # H64
    dead, (completed,) = a_storage_with(tmp_path, 1)
    (lost,) = dead.reserve_ids(1)
    successor = a_prepared_storage(tmp_path)
    assert restored(successor) == completed
    appear(dead, lost, of=completed)
    assert successor.latest("words") == a_checkpoint(completed)
    assert restored(a_prepared_storage(tmp_path)) == completed
    assert [(info.checkpoint_id, info.void) for info in successor.list()] == [(completed, False), (lost, True)]


def taken_over_at(step: int, url: str, *, discards: bool) -> bool:
    """Return whether there is such a step: a filesystem call of the earlier application.

    It writes a checkpoint, gets an error after the rename, and discards it. At that call the later application takes
    over and restores; then the earlier one goes on.
    """
    earlier, _ = a_storage_with(url, 1)
    (in_doubt,) = earlier.reserve_ids(1)
    chosen: list[int] = []
    calls = itertools.count()

    def hook(call: str, path: str) -> None:
        if not chosen and next(calls) == step:
            with hooked(lambda call, path: None):
                chosen.append(restored(a_prepared_storage(url)))
        if call == "moved":
            raise ConnectionError("the answer was lost")

    discarded = False
    with hooked(hook):
        with suppress(StorageError):
            earlier.store("words", a_checkpoint(in_doubt))
        if discards:
            with suppress(StorageError):
                earlier.discard("words", in_doubt)
                discarded = True
    if chosen:
        third = a_prepared_storage(url)
        assert restored(third) == chosen[0], f"step {step}: what the dead successor chose stays what is restored"
        assert third.read("words", chosen[0]) == a_checkpoint(chosen[0])
        assert not (discarded and chosen[0] == in_doubt), f"step {step}: discarded, and restored all the same"
    return bool(chosen)


@pytest.mark.parametrize("discards", [True, False], ids=["discards", "only-writes"])
def test_at_whatever_step_a_later_application_takes_over_both_agree(discards: bool, stepped_url: str) -> None:  # H64
    step = 0
    while taken_over_at(step, f"{stepped_url}/{step}", discards=discards):
        step += 1
    assert step > 10


@pytest.mark.long
@pytest.mark.parametrize("name", STORES)
def test_at_whatever_step_a_later_application_takes_over_on_a_store_both_agree(
    name: str, store_url: Callable[[str], str]
) -> None:  # H64, H136
    """Every third step, for each takes hundreds of requests."""
    url, step = store_url(name), 0
    while taken_over_at(step, f"{url}/{step}", discards=True):
        step += 3
    assert step > 10


def discard_beside_a_restore(url: str) -> tuple[bool, int]:
    """Interleave a discard with a restore; return whether the discard is durable then, and what is restored.

    The earlier application looks at the claims and is about to write its marker. By then the later one has read what
    it restores, but has recorded nothing yet.
    """
    earlier, _ = a_storage_with(url, 1)
    (in_doubt,) = earlier.reserve_ids(1)
    earlier.store("words", a_checkpoint(in_doubt))
    has_read, may_record = threading.Event(), threading.Event()

    def hook(call: str, path: str) -> None:
        if "/restored-" in path and not has_read.is_set():
            has_read.set()
            assert may_record.wait(TIMEOUT_S)
        elif call == "pipe_file" and "/void-" in path:
            successors.append(pool.submit(lambda: restored(a_prepared_storage(url))))
            assert has_read.wait(TIMEOUT_S)

    successors: list[Future[int]] = []
    with ThreadPoolExecutor(1) as pool, hooked(hook):
        discarded = False
        with suppress(StorageFenced):
            earlier.discard("words", in_doubt)
            discarded = True
        may_record.set()
        (successor,) = successors
        chosen = successor.result(TIMEOUT_S)
    assert chosen == in_doubt
    return discarded, restored(a_prepared_storage(url))


def test_a_discard_marked_after_a_later_application_listed_has_no_effect(hooked_url: str) -> None:  # H64
    assert discard_beside_a_restore(hooked_url) == (False, 2)


def test_a_missing_second_check_of_the_claims_is_detected(
    hooked_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # H64
    marker = 'void_name(checkpoint_id, self._claims.owner)}")\n        '
    where = "spark_bridge.storage.store:CheckpointStorage.discard"
    Edit(where, f"{marker}self._claims.check()", f"{marker}pass").apply(monkeypatch)
    with pytest.raises(StorageError, match="is not in this storage"):  # what the later one restored is deleted
        discard_beside_a_restore(hooked_url)


def test_a_successor_that_is_fenced_while_it_restores_must_stop(hooked_url: str) -> None:  # H64
    _, (completed,) = a_storage_with(hooked_url, 1)
    successor = a_prepared_storage(hooked_url)
    (first,) = successor.reserve_ids(1)
    chosen: list[int] = []
    with (
        interrupted("", lambda: chosen.append(restored(a_prepared_storage(hooked_url))), within="/restored-"),
        pytest.raises(StorageFenced),
    ):
        successor.restore_latest("words", first=first)
    assert chosen == [completed]


def test_a_start_from_nothing_is_not_undone_by_a_later_restart(storage: Storage) -> None:  # H64
    storage.prepare()
    (old, first, new, second) = storage.reserve_ids(4)
    storage.store("words", a_checkpoint(old))
    storage.start_from("words", None, first=first)
    assert storage.latest("words") is None
    assert storage.read("words", old) == a_checkpoint(old)  # it stays, and may be named
    storage.store("words", a_checkpoint(new), WriteOptions(completed_id=new))
    assert storage.restore_latest("words", first=second) == a_checkpoint(new)


def test_a_restart_does_not_silently_fall_back_behind_a_savepoint(storage: Storage) -> None:  # H64
    storage.prepare()
    (old, savepoint, first, new) = storage.reserve_ids(4)
    storage.store("words", a_checkpoint(old))
    storage.start_from("words", savepoint, first=first)
    with pytest.raises(StorageError, match=rf"last started from checkpoint {savepoint}, .* name that file again"):
        storage.latest("words")
    assert storage.latest("words", allow_older=True) == a_checkpoint(old)
    storage.store("words", a_checkpoint(new), WriteOptions(completed_id=new))
    assert storage.latest("words") == a_checkpoint(new)


def test_a_checkpoint_with_an_id_that_was_never_assigned_is_refused(storage: Storage) -> None:  # H4, H64
    storage.prepare()
    (first,) = storage.reserve_ids(1)
    storage.store("words", a_checkpoint(41))
    with pytest.raises(StorageError, match="assigns ids from 1 on"):
        storage.restore_latest("words", first=first)


def test_an_older_replacement_is_what_later_restarts_restore(tmp_path: Path) -> None:  # H64, H50
    _, (whole, damaged) = a_storage_with(tmp_path, 2)
    file = tmp_path / "words" / f"checkpoint-{damaged}.hgc"
    good = file.read_bytes()
    file.write_bytes(b"rubbish")
    storage = a_prepared_storage(tmp_path)
    (first,) = storage.reserve_ids(1)
    assert storage.restore_latest("words", first=first, allow_older=True) == a_checkpoint(whole)
    file.write_bytes(good)  # a copy turns up
    assert restored(a_prepared_storage(tmp_path)) == whole


# --- retention and names ------------------------------------------------------------------------------------------


def test_files_and_markers_without_effect_are_deleted(any_url: str) -> None:  # H64, H51
    storage, completed = a_prepared_storage(any_url), 0
    for _ in range(4):
        storage = a_prepared_storage(any_url, retained=1)
        first, *ids = storage.reserve_ids(7)
        storage.restore_latest("words", first=first)
        completed = ids[0]
        for checkpoint_id in ids:
            storage.store("words", a_checkpoint(checkpoint_id), WriteOptions(completed_id=completed))
            if checkpoint_id % 2:
                storage.discard("words", checkpoint_id)
            else:
                completed = checkpoint_id
    names = storage._files.names("words")
    assert len([name for name in names if name.startswith("void-")]) <= 2
    assert len([name for name in names if name.startswith("restored-")]) == 1
    assert [info.checkpoint_id for info in storage.list()][-1] == completed
    assert len(storage.list()) <= 2


def test_an_application_that_starts_again_and_again_keeps_one_record(any_url: str) -> None:  # H64
    storage, _ = a_storage_with(any_url, 1)
    for _ in range(5):
        storage = a_prepared_storage(any_url)
        assert restored(storage) == 1
    assert len([name for name in storage._files.names("words") if name.startswith("restored-")]) == 1


def test_lost_claims_do_not_bring_back_an_id_or_an_epoch_that_a_marker_names(tmp_path: Path) -> None:  # H4, H64
    storage = a_prepared_storage(tmp_path)
    for _ in range(3):
        storage = a_prepared_storage(tmp_path)
        restored(storage)
    (void,) = storage.reserve_ids(1)
    storage.discard("words", void)
    for claim in (tmp_path / "_ids").iterdir():
        claim.unlink()
    storage = a_prepared_storage(tmp_path)
    (first, new) = storage.reserve_ids(2)
    assert first > void
    storage.restore_latest("words", first=first)
    storage.store("words", a_checkpoint(new))
    assert restored(a_prepared_storage(tmp_path)) == new


async def test_an_operator_that_is_coordinated_again_continues_from_what_it_restores(storage: Storage) -> None:  # H64
    """In one application: the first attempt leaves a checkpoint in doubt, which appears when the second has begun."""
    async with StorageSession(storage) as session:
        port = session.port("words", RestoreMode.STREAMING)
        assert await port.restore_latest() is None
        completed, in_doubt = port.next_checkpoint_id(), port.next_checkpoint_id()
        await port.store(a_checkpoint(completed))
        again = session.port("words", RestoreMode.STREAMING)
        assert await again.restore_latest() == a_checkpoint(completed)
        await port.store(a_checkpoint(in_doubt))
        new = again.next_checkpoint_id()
        assert storage.latest("words") == a_checkpoint(completed)
        await again.store(a_checkpoint(new))
        assert storage.latest("words") == a_checkpoint(new)


def test_the_command_shows_what_is_void(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # H64
    storage, (_, in_doubt) = a_storage_with(tmp_path, 2)
    data = (tmp_path / "words" / f"checkpoint-{in_doubt}.hgc").read_bytes()
    storage.discard("words", in_doubt)
    (tmp_path / "words" / f"checkpoint-{in_doubt}.hgc").write_bytes(data)
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["STATE", "ok", "void"]
    (tmp_path / "words" / f"checkpoint-{in_doubt}.hgc").write_bytes(data[:-1])
    assert storage.verify() == []
