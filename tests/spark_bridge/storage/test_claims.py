# SPDX-License-Identifier: Apache-2.0

"""Checkpoint ids are never reused (H4), and two applications may share a directory."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from spark_bridge.storage import CheckpointStorage, StorageError, StorageFenced
from tests.mutants.mutant import Edit
from tests.spark_bridge.object_stores import STORES
from tests.spark_bridge.storage.checkpoints import (
    a_checkpoint,
    a_prepared_storage,
    content_of,
    delete_markers,
    hooked,
    interrupted,
    names_in,
)


def test_ids_increase_from_one(any_url: str) -> None:  # H4
    storage = a_prepared_storage(any_url)
    assert [*storage.reserve_ids(3), *storage.reserve_ids(2)] == [1, 2, 3, 4, 5]


def test_ids_continue_in_a_new_application_whether_they_were_used_or_not(any_url: str) -> None:  # H4
    a_prepared_storage(any_url).reserve_ids(10)
    a_prepared_storage(any_url)  # crashed before it reserved any
    assert list(a_prepared_storage(any_url).reserve_ids(2)) == [11, 12]


def test_ids_are_above_every_stored_checkpoint_even_if_the_markers_are_lost(tmp_path: Path) -> None:  # H4
    storage = a_prepared_storage(tmp_path)
    storage.store("words", a_checkpoint(41))
    for marker in (tmp_path / "_ids").iterdir():
        marker.unlink()
    assert list(a_prepared_storage(tmp_path).reserve_ids(1)) == [42]


@pytest.mark.parametrize("seed", range(4))
def test_no_id_is_assigned_twice_whatever_the_order_of_applications(seed: int, near_url: str) -> None:  # H4
    assign_ids(near_url, seed)


def test_no_id_is_assigned_twice_on_any_filesystem(any_url: str) -> None:  # H4
    assign_ids(any_url, 4)


def assign_ids(any_url: str, seed: int) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    seen: list[int] = []
    storage = a_prepared_storage(any_url)
    for _ in range(40):
        if dice.random() < 0.4:
            storage = a_prepared_storage(any_url)
        elif dice.random() < 0.9:
            seen.extend(storage.reserve_ids(dice.randint(1, 5)))
        elif seen:
            storage.store("words", a_checkpoint(dice.choice(seen)))
    assert seen == sorted(set(seen))


def test_threads_of_one_application_get_different_ids(tmp_path: Path) -> None:  # H4
    storage = a_prepared_storage(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda _: list(storage.reserve_ids(3)), range(80)))
    assert sorted(itertools.chain(*seen)) == list(range(1, 241))


def test_applications_that_start_at_the_same_moment_never_share_an_id(tmp_path: Path) -> None:  # H4
    seen: list[int] = []
    gate = threading.Barrier(6)

    def start() -> None:
        gate.wait()
        storage = a_prepared_storage(tmp_path)
        for _ in range(10):
            seen.extend(storage.reserve_ids(7))

    with ThreadPoolExecutor(6) as pool:
        ends = [pool.submit(start) for _ in range(6)]
    errors = [end.exception() for end in ends]
    assert len(seen) == len(set(seen))
    assert {type(error) for error in errors} <= {type(None), StorageFenced}
    assert None in errors  # the last of them is not fenced


def test_ids_reserved_during_a_takeover_are_not_assigned_again(hooked_url: str) -> None:  # H4
    earlier = a_prepared_storage(hooked_url)
    seen: list[int] = []
    # The later one has looked at the markers, and is about to write its own.
    with interrupted("pipe_file", lambda: seen.extend(earlier.reserve_ids(5))):
        later = a_prepared_storage(hooked_url)
    seen.extend(later.reserve_ids(5))
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_an_application_that_is_taken_over_while_it_reserves_ids_gets_none(hooked_url: str) -> None:  # H4
    earlier = a_prepared_storage(hooked_url)
    seen: list[int] = []
    take_over = interrupted("pipe_file", lambda: seen.extend(a_prepared_storage(hooked_url).reserve_ids(5)))
    with take_over, pytest.raises(StorageFenced):
        earlier.reserve_ids(5)
    assert seen == [1, 2, 3, 4, 5]


def test_few_markers_stay(tmp_path: Path) -> None:
    for _ in range(5):
        storage = a_prepared_storage(tmp_path)
        for _ in range(20):
            storage.reserve_ids(1)
    assert len(list((tmp_path / "_ids").iterdir())) == 1


def test_the_later_application_fences_the_earlier(any_url: str) -> None:
    earlier = a_prepared_storage(any_url)
    (first,) = earlier.reserve_ids(1)
    earlier.store("words", a_checkpoint(first))
    later = a_prepared_storage(any_url)
    for use in (
        lambda: earlier.store("words", a_checkpoint(first)),
        lambda: earlier.reserve_ids(1),
        lambda: earlier.discard("words", first),
    ):
        with pytest.raises(StorageFenced, match=r"was taken over by a later application \(number 2, this one is 1\)"):
            use()
    assert later.latest("words") == a_checkpoint(first)


def test_preparing_again_does_not_take_a_storage_back(tmp_path: Path) -> None:
    earlier = a_prepared_storage(tmp_path)
    later = a_prepared_storage(tmp_path)
    earlier.prepare()
    assert list(later.reserve_ids(1)) == [1]


@pytest.mark.parametrize("moment", ["pipe_file", "mv", "moved"])
def test_either_the_later_application_finds_the_checkpoint_or_nobody_will(moment: str, hooked_url: str) -> None:  # H50
    earlier = a_prepared_storage(hooked_url)
    (checkpoint_id,) = earlier.reserve_ids(1)
    found = []

    def take_over() -> None:
        later = a_prepared_storage(hooked_url)
        found.append(later.restore_latest("words", first=later.reserve_ids(1)[0]))

    with interrupted(moment, take_over), pytest.raises(StorageFenced):
        earlier.store("words", a_checkpoint(checkpoint_id))
    assert found == [a_checkpoint(checkpoint_id) if moment == "moved" else None]
    assert found == [CheckpointStorage(hooked_url).latest("words")]


@pytest.mark.parametrize("moment", ["pipe_file", "mv", "moved"])
def test_a_move_fails_when_a_later_application_has_begun(moment: str, tmp_path: Path) -> None:  # H50
    """Even if that one restores nothing, and so voids nothing."""
    url = f"hooked://{tmp_path}"
    earlier = a_prepared_storage(url)
    (checkpoint_id,) = earlier.reserve_ids(1)
    found = []
    take_over = interrupted(moment, lambda: found.append(a_prepared_storage(url).latest("words")))
    with take_over, pytest.raises(StorageFenced):
        earlier.store("words", a_checkpoint(checkpoint_id))
    assert found == [a_checkpoint(checkpoint_id) if moment == "moved" else None]
    assert found == [CheckpointStorage(url).latest("words")]


# --- markers that somebody deleted ---------------------------------------------------------------------------------

EARLIER, LATER = "00", "ff"


def with_token(storage: CheckpointStorage, token: str) -> CheckpointStorage:
    """Fix what is random: among equal epochs, the greater token counts as the later application."""
    storage._claims._token = token
    storage.prepare()
    return storage


@pytest.mark.parametrize("token", [EARLIER, LATER])
def test_without_its_own_marker_an_application_names_no_checkpoint(token: str, tmp_path: Path) -> None:  # H81, H50
    """Both were assigned the same id. Without the check, the first one replaced the other's file if its token was the
    greater one.
    """
    first = with_token(CheckpointStorage(tmp_path), token)
    (checkpoint_id,) = first.reserve_ids(1)
    delete_markers(tmp_path)
    second = with_token(CheckpointStorage(tmp_path), "88")
    assert list(second.reserve_ids(1)) == [checkpoint_id]
    file = Path(second.store("words", a_checkpoint(checkpoint_id, state=b"of the second")))
    stored = file.read_bytes()
    uses: list[Callable[[], object]] = [
        lambda: first.store("words", a_checkpoint(checkpoint_id, state=b"of the first")),
        lambda: first.reserve_ids(1),
        lambda: first.discard("words", checkpoint_id),
        lambda: first.start_from("words", None, first=checkpoint_id),
    ]
    for use in uses:
        with pytest.raises(StorageFenced):
            use()
    assert file.read_bytes() == stored
    assert sorted(os.listdir(tmp_path / "words")) == [file.name]
    assert list(second.reserve_ids(1)) == [checkpoint_id + 1]


def test_what_is_being_written_counts_if_the_markers_were_deleted(tmp_path: Path) -> None:  # H81, H4
    """Its writer may be alive, and just about to give it its name."""
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "checkpoint-7.hgc.4-aa.tmp").touch()
    (tmp_path / "words" / "void-2-5-aa").touch()
    storage = a_prepared_storage(tmp_path)
    assert list(storage.reserve_ids(1)) == [8]
    assert storage._claims.owner.epoch == 6


def test_a_deleted_marker_alone_ends_the_application_with_its_name(tmp_path: Path) -> None:  # H81, H4
    storage = a_prepared_storage(tmp_path)
    (checkpoint_id,) = storage.reserve_ids(1)
    (marker,) = (tmp_path / "_ids").iterdir()
    marker.unlink()
    with pytest.raises(StorageFenced, match=f"{marker}: this application's marker was deleted") as fenced:
        storage.store("words", a_checkpoint(checkpoint_id))
    assert "This application must end" in str(fenced.value)
    assert not list((tmp_path / "words").iterdir())


def test_a_marker_that_a_listing_does_not_show_yet_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # H81, H4
    storage = a_prepared_storage(tmp_path)
    (checkpoint_id,) = storage.reserve_ids(1)
    monkeypatch.setattr(storage._claims, "_read", list)  # listings that lag cannot be caused on a local disk
    storage.store("words", a_checkpoint(checkpoint_id))
    assert storage.latest("words") == a_checkpoint(checkpoint_id)


def test_reservations_in_other_threads_never_look_like_a_deleted_marker(tmp_path: Path) -> None:  # H81, H4
    storage = a_prepared_storage(tmp_path)
    over = threading.Event()

    def check() -> None:
        while not over.is_set():
            storage._claims.check()

    with ThreadPoolExecutor(2) as pool:
        checks = [pool.submit(check) for _ in range(2)]
        for _ in range(200):
            storage.reserve_ids(1)
        over.set()
    assert [check.exception() for check in checks] == [None, None]


USES: dict[str, Callable[[CheckpointStorage, list[int]], Any]] = {
    "store": lambda first, given: first.store("words", a_checkpoint(given[-3], state=b"of the first")),
    "reserve_ids": lambda first, given: first.reserve_ids(2),
    "discard": lambda first, given: first.discard("words", given[-3]),
    "start_from": lambda first, given: first.start_from("words", None, first=given[-1]),
}


def interfered_with_at(step: int, url: str, does: str, token: str) -> bool:
    """At one filesystem call of the first application, the markers are deleted, and a second one starts and stores.

    Return whether there is such a call.
    """
    first = with_token(CheckpointStorage(url), token)
    given = list(first.reserve_ids(4))
    ids: list[int] = []
    files: list[tuple[str, bytes]] = []
    calls = itertools.count()

    def interfere(call: str, path: str) -> None:
        if ids or next(calls) < step:
            return
        with hooked(lambda call, path: None):
            delete_markers(url)
            second = with_token(CheckpointStorage(url), "88")
            ids.extend(second.reserve_ids(3))
            second.restore_latest("words", first=ids[0])
            stored = second.store("words", a_checkpoint(ids[1], state=b"of the second"))
            files.append((stored, content_of(stored)))

    reserved: Any = ()
    with hooked(interfere), suppress(StorageFenced):
        reserved = USES[does](first, given)
    if not ids:
        return False
    for file, content in files:
        assert content_of(file) == content, f"step {step}: replaced or deleted"
    if does == "reserve_ids":
        assert not set(reserved) & set(ids), f"step {step}: assigned twice"
    with pytest.raises(StorageFenced):
        first.store("words", a_checkpoint(given[0]))
    third = a_prepared_storage(url)
    assert third.latest("words") == a_checkpoint(ids[1], state=b"of the second")
    assert third.reserve_ids(1)[0] > max(ids)
    return True


@pytest.mark.parametrize("token", [EARLIER, LATER])
@pytest.mark.parametrize("does", USES)
def test_at_whatever_step_the_markers_are_deleted_no_checkpoint_is_replaced(
    does: str, token: str, stepped_url: str
) -> None:  # H81, H50
    step = 0
    while interfered_with_at(step, f"{stepped_url}/{step}", does, token):
        step += 1
    assert step >= 4


@pytest.mark.long
@pytest.mark.parametrize("name", STORES)
def test_at_whatever_step_the_markers_are_deleted_on_a_store_no_checkpoint_is_replaced(
    name: str, store_url: Callable[[str], str]
) -> None:  # H81, H50, H136
    """Every third step, for each takes hundreds of requests."""
    url, step = store_url(name), 0
    while interfered_with_at(step, f"{url}/{step}", "store", LATER):
        step += 3
    assert step >= 4


def test_a_missing_check_of_the_own_marker_is_detected(
    stepped_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # H81
    check = "if own not in claims and not self._files.exists(_file(own)):"
    Edit("spark_bridge.storage.claims:Claims._check", check, "if False:").apply(monkeypatch)
    with pytest.raises(AssertionError, match="replaced or deleted"):
        test_at_whatever_step_the_markers_are_deleted_no_checkpoint_is_replaced("store", LATER, stepped_url)


def test_temporary_files_of_a_dead_writer_are_deleted(hooked_url: str) -> None:
    dying = a_prepared_storage(hooked_url)
    (lost,) = dying.reserve_ids(1)

    def die(call: str, path: str) -> None:
        if call in ("mv", "rm_file"):
            raise OSError("killed")

    with hooked(die), pytest.raises(StorageError, match="killed"):
        dying.store("words", a_checkpoint(lost))
    left = [name for name in names_in(hooked_url, "words") if not name.startswith("void-1-")]
    assert left
    assert all(name.endswith(".tmp") for name in left)
    assert CheckpointStorage(hooked_url).latest("words") is None
    a_prepared_storage(hooked_url)
    assert [name.partition("-")[0] for name in names_in(hooked_url, "words")] == ["void"]


def test_the_clean_up_keeps_what_this_application_is_writing(hooked_url: str) -> None:
    storage = a_prepared_storage(hooked_url)
    (new,) = storage.reserve_ids(1)
    with interrupted("mv", storage.prepare):
        storage.store("words", a_checkpoint(new))
    assert storage.latest("words") == a_checkpoint(new)
