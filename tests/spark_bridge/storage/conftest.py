# SPDX-License-Identifier: Apache-2.0

"""Filesystems for the tests of storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from spark_bridge.storage import CheckpointStorage, MemoryStorage, Storage
from tests.spark_bridge.object_stores import STORES, ObjectStore
from tests.spark_bridge.storage.checkpoints import HookedStore

ON_STORES = [pytest.param(name, marks=pytest.mark.long) for name in STORES]


@pytest.fixture
def store_url(object_stores: Callable[[str], ObjectStore]) -> Iterator[Callable[[str], str]]:
    """For the name of a store: an empty directory there, whose calls go through ``HookedFileSystem.hook``."""

    def new(name: str) -> str:
        store = object_stores(name)
        HookedStore.inner = store.filesystem
        return f"{'azure' if name == 'azure' else 'store'}://{store.new_bucket()}/checkpoints"

    yield new
    HookedStore.inner = None


@pytest.fixture(params=["local", "memory", "hooked", "whole", *ON_STORES])
def any_url(request: pytest.FixtureRequest, tmp_path: Path, store_url: Callable[[str], str]) -> Iterator[str]:
    """An empty directory on each kind of filesystem."""
    match request.param:
        case "local":
            yield str(tmp_path / "checkpoints")
        case "memory":
            yield "memory://checkpoints"
        case "hooked" | "whole":
            yield f"{request.param}://{tmp_path}/checkpoints"
        case store:
            yield store_url(store)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["local", "memory", "hooked", "whole"])
def near_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty directory on each kind of filesystem that needs no server."""
    near = {"local": str(tmp_path / "checkpoints"), "memory": "memory://checkpoints"}
    yield near.get(request.param, f"{request.param}://{tmp_path}/checkpoints")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["hooked", "whole", *ON_STORES])
def hooked_url(request: pytest.FixtureRequest, tmp_path: Path, store_url: Callable[[str], str]) -> str:
    """An empty directory whose calls go through ``HookedFileSystem.hook``."""
    if request.param in ("hooked", "whole"):
        return f"{request.param}://{tmp_path}/checkpoints"
    return store_url(request.param)


@pytest.fixture(params=["hooked", "whole"])
def stepped_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same, for tests with thousands of calls: on a local disk."""
    return f"{request.param}://{tmp_path}/checkpoints"


@pytest.fixture(params=["directory", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return MemoryStorage(retained=2) if request.param == "memory" else CheckpointStorage(tmp_path, retained=2)
