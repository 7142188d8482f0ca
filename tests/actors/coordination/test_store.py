# SPDX-License-Identifier: Apache-2.0

"""The store that coordinators share (R100)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from actors.coordination.store import CoordinatorStore, StoreRevoked


def test_a_value_is_there_once_it_was_put() -> None:  # R100
    store = CoordinatorStore()
    assert not store.contains("leader")
    assert store.get("leader") is None
    assert store.put_if_absent("leader", "one") is None
    assert store.contains("leader")
    assert store.get("leader") == "one"


def test_what_is_there_stays_when_another_puts() -> None:  # R100
    store = CoordinatorStore()
    store.put_if_absent("leader", "one")
    assert store.put_if_absent("leader", "two") == "one"
    assert store.get("leader") == "one"


def test_compute_if_present_changes_only_what_is_there() -> None:  # R100
    store = CoordinatorStore()
    assert store.compute_if_present("count", lambda count: count + 1) is None
    assert not store.contains("count")
    store.put_if_absent("count", 1)
    assert store.compute_if_present("count", lambda count: count + 1) == 2
    assert store.get("count") == 2
    assert store.compute_if_present("count", lambda count: None) is None
    assert not store.contains("count")


def test_compute_is_called_with_none_where_there_is_nothing() -> None:  # R100
    store = CoordinatorStore()
    assert store.compute("count", lambda count: (count or 0) + 1) == 1
    assert store.compute("count", lambda count: (count or 0) + 1) == 2
    assert store.compute("count", lambda count: None) is None
    assert not store.contains("count")


def test_apply_returns_what_its_function_makes_of_the_value() -> None:  # R100
    store = CoordinatorStore()
    assert store.apply("names", lambda names: names is None)
    store.put_if_absent("names", ["one"])
    assert store.apply("names", lambda names: len(names or ())) == 1
    assert store.get("names") == ["one"]


def test_none_is_not_a_value() -> None:  # R100
    store = CoordinatorStore()
    with pytest.raises(TypeError, match="None means that there is no value"):
        store.put_if_absent("leader", None)
    assert not store.contains("leader")


def test_a_function_that_raises_changes_nothing() -> None:  # R100
    def refuse(value: Any) -> Any:
        raise ValueError("not like this")

    store = CoordinatorStore()
    store.put_if_absent("count", 1)
    for method in (store.compute, store.compute_if_present, store.apply):
        with pytest.raises(ValueError, match="not like this"):
            method("count", refuse)
    assert store.get("count") == 1
    with pytest.raises(ValueError, match="not like this"):
        store.compute("absent", refuse)
    assert not store.contains("absent")


def test_no_other_call_comes_between_reading_and_writing() -> None:  # R100
    store, inside, asked = CoordinatorStore(), threading.Event(), threading.Event()

    def add_slowly(count: Any) -> int:
        inside.set()
        assert asked.wait(60.0)
        return int(count or 0) + 1

    def put() -> Any:
        assert inside.wait(60.0)
        asked.set()
        return store.put_if_absent("count", 100)

    with ThreadPoolExecutor(2) as threads:
        adding, putting = threads.submit(store.compute, "count", add_slowly), threads.submit(put)
        assert adding.result(10.0) == 1
        assert putting.result(10.0) == 1
    assert store.get("count") == 1


def test_a_function_may_use_the_store() -> None:  # R100
    store = CoordinatorStore()
    store.put_if_absent("source", 20)
    assert store.compute("sum", lambda _: (store.get("source") or 0) + 1) == 21


def test_a_revoked_view_writes_nothing_and_reads_on() -> None:  # R100, G16
    store = CoordinatorStore()
    view, other = store.view(), store.view()
    view.put_if_absent("leader", "one")
    view.revoke()
    with pytest.raises(StoreRevoked):
        view.put_if_absent("other", "one")
    with pytest.raises(StoreRevoked):
        view.compute("leader", lambda _: "again")
    with pytest.raises(StoreRevoked):
        view.compute_if_present("leader", lambda _: None)
    assert view.get("leader") == "one"
    assert view.put_if_absent("leader", "two") == "one"  # nothing needs to be written
    assert view.apply("leader", lambda leader: leader) == "one"
    other.compute("leader", lambda _: "two")
    store.put_if_absent("other", "three")
    assert (view.get("leader"), view.get("other")) == ("two", "three")


def test_a_write_that_was_under_way_when_its_view_was_revoked_does_not_happen() -> None:  # R100, G16
    store = CoordinatorStore()
    view = store.view()

    def revoked_meanwhile(value: Any) -> str:
        view.revoke()
        return "one"

    with pytest.raises(StoreRevoked):
        view.compute("leader", revoked_meanwhile)
    assert not store.contains("leader")
