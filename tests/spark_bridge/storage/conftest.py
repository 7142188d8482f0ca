# SPDX-License-Identifier: Apache-2.0

"""Filesystems for the tests of storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from spark_bridge.storage import CheckpointStorage, MemoryStorage, Storage


@pytest.fixture(params=["local", "memory", "hooked"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty directory on each of three kinds of filesystem."""
    yield {"local": str(tmp_path / "checkpoints"), "memory": "memory://checkpoints"}.get(
        request.param, f"hooked://{tmp_path}/checkpoints"
    )
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def hooked_url(tmp_path: Path) -> str:
    """An empty directory whose calls go through ``HookedFileSystem.hook``."""
    return f"hooked://{tmp_path}/checkpoints"


@pytest.fixture(params=["directory", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return MemoryStorage(retained=2) if request.param == "memory" else CheckpointStorage(tmp_path, retained=2)
