# SPDX-License-Identifier: Apache-2.0

"""Checkpoint ids are never reused (H4), and two applications may share a directory."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from spark_bridge.storage import CheckpointStorage, StorageError, StorageFenced
from tests.spark_bridge.storage.checkpoints import HookedFileSystem, a_checkpoint, a_prepared_storage


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


@pytest.mark.parametrize("seed", range(5))
def test_no_id_is_assigned_twice_whatever_the_order_of_applications(seed: int, any_url: str) -> None:  # H4
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
    seen: list[int] = []

    def reserve() -> None:
        for _ in range(20):
            seen.extend(storage.reserve_ids(3))

    threads = [threading.Thread(target=reserve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1, 241))


def test_applications_that_start_at_the_same_moment_never_share_an_id(tmp_path: Path) -> None:  # H4
    seen: list[int] = []
    fenced: list[StorageFenced] = []
    gate = threading.Barrier(6)

    def start() -> None:
        gate.wait()
        storage = a_prepared_storage(tmp_path)
        try:
            for _ in range(10):
                seen.extend(storage.reserve_ids(7))
        except StorageFenced as error:
            fenced.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == len(set(seen))
    assert len(fenced) <= 5  # the last of them is not fenced


def test_ids_reserved_during_a_takeover_are_not_assigned_again(hooked_url: str) -> None:  # H4
    earlier = a_prepared_storage(hooked_url)
    seen: list[int] = []

    def reserve_meanwhile(call: str, path: str) -> None:
        if call == "pipe_file":  # the later one has looked at the markers, and is about to write its own
            HookedFileSystem.hook = staticmethod(lambda call, path: None)
            seen.extend(earlier.reserve_ids(5))

    HookedFileSystem.hook = staticmethod(reserve_meanwhile)
    later = a_prepared_storage(hooked_url)
    seen.extend(later.reserve_ids(5))
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_an_application_that_is_taken_over_while_it_reserves_ids_gets_none(hooked_url: str) -> None:  # H4
    earlier = a_prepared_storage(hooked_url)
    seen: list[int] = []

    def take_over(call: str, path: str) -> None:
        if call == "pipe_file":
            HookedFileSystem.hook = staticmethod(lambda call, path: None)
            seen.extend(a_prepared_storage(hooked_url).reserve_ids(5))

    HookedFileSystem.hook = staticmethod(take_over)
    with pytest.raises(StorageFenced):
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

    def take_over(call: str, path: str) -> None:
        if call == moment:
            HookedFileSystem.hook = staticmethod(lambda call, path: None)
            found.append(a_prepared_storage(hooked_url).latest("words"))

    HookedFileSystem.hook = staticmethod(take_over)
    with pytest.raises(StorageFenced):
        earlier.store("words", a_checkpoint(checkpoint_id))
    assert found == [a_checkpoint(checkpoint_id) if moment == "moved" else None]
    assert found == [CheckpointStorage(hooked_url).latest("words")]


def test_temporary_files_of_a_dead_writer_are_deleted(hooked_url: str) -> None:
    folder = f"{hooked_url.removeprefix('hooked://')}/words"
    dying = a_prepared_storage(hooked_url)
    (lost,) = dying.reserve_ids(1)

    def die(call: str, path: str) -> None:
        if call in ("mv", "rm_file"):
            raise OSError("killed")

    HookedFileSystem.hook = staticmethod(die)
    with pytest.raises(StorageError, match="killed"):
        dying.store("words", a_checkpoint(lost))
    assert [name for name in os.listdir(folder) if not name.startswith("void-1-")] != []
    assert all(name.endswith(".tmp") for name in os.listdir(folder) if not name.startswith("void-1-"))
    HookedFileSystem.hook = staticmethod(lambda call, path: None)
    assert CheckpointStorage(hooked_url).latest("words") is None
    a_prepared_storage(hooked_url)
    assert [name.partition("-")[0] for name in os.listdir(folder)] == ["void"]


def test_the_clean_up_keeps_what_this_application_is_writing(hooked_url: str) -> None:
    storage = a_prepared_storage(hooked_url)
    (new,) = storage.reserve_ids(1)

    def prepare_meanwhile(call: str, path: str) -> None:
        if call == "mv":
            storage.prepare()

    HookedFileSystem.hook = staticmethod(prepare_meanwhile)
    storage.store("words", a_checkpoint(new))
    assert storage.latest("words") == a_checkpoint(new)
