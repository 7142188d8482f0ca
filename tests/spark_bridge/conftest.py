# SPDX-License-Identifier: Apache-2.0

"""What the tests of several folders use: filesystems, and a committer without threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest

from tests.spark_bridge.s3 import s3_server
from tests.spark_bridge.storage.checkpoints import HookedFileSystem

fsspec.register_implementation("hooked", HookedFileSystem, clobber=True)


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, Any]]:
    """The options of a filesystem on an object store that speaks S3."""
    with s3_server() as options:
        yield options


@pytest.fixture
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a committer's file operations in the event loop: threads take ten times as long for thousands of them."""

    async def run_here(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    monkeypatch.setattr("spark_bridge.sink.committer.run_sync", run_here)
