# SPDX-License-Identifier: Apache-2.0

"""Filesystems for the tests of storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.spark_bridge.storage.checkpoints import HookedFileSystem

fsspec.register_implementation("hooked", HookedFileSystem, clobber=True)


@pytest.fixture(params=["local", "memory", "hooked"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty directory on each of three kinds of filesystem."""
    HookedFileSystem.hook = staticmethod(lambda call, path: None)
    yield {"local": str(tmp_path / "checkpoints"), "memory": "memory://checkpoints"}.get(
        request.param, f"hooked://{tmp_path}/checkpoints"
    )
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def hooked_url(tmp_path: Path) -> Iterator[str]:
    """An empty directory whose calls go through ``HookedFileSystem.hook``."""
    HookedFileSystem.hook = staticmethod(lambda call, path: None)
    yield f"hooked://{tmp_path}/checkpoints"
    HookedFileSystem.hook = staticmethod(lambda call, path: None)
