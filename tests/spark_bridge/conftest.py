# SPDX-License-Identifier: Apache-2.0

"""What the tests of several folders use: filesystems, and a committer without threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec
import pytest

from tests.spark_bridge.storage.checkpoints import HookedAzure, HookedFileSystem, HookedStore, HookedWholeFileSystem

fsspec.register_implementation("hooked", HookedFileSystem, clobber=True)
fsspec.register_implementation("whole", HookedWholeFileSystem, clobber=True)
fsspec.register_implementation("store", HookedStore, clobber=True)
fsspec.register_implementation("azure", HookedAzure, clobber=True)


@pytest.fixture
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a committer's file operations in the event loop: threads take ten times as long for thousands of them."""

    class Here:
        async def run(self, function: Callable[..., Any], *args: Any) -> Any:
            return function(*args)

    monkeypatch.setattr("spark_bridge.sinks.two_phase.driver.USER", Here())
