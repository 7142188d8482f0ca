# SPDX-License-Identifier: Apache-2.0

"""Fixtures for tests of programs that use Headgate. pytest finds them by itself wherever Headgate is installed.

``headgate_world`` runs coordinators without Spark, ``headgate_spark`` is a local Spark session that all tests share,
and ``headgate_sidecar`` a sidecar of it.

To import this module imports nothing of Spark and little of Headgate. It has no options, and a test that asks for none
of the fixtures does not notice it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headgate import Sidecar
    from headgate.testing import World

HAS_PYTEST_ASYNCIO = find_spec("pytest_asyncio") is not None
NewWorld = Callable[..., Awaitable["World"]]


async def _worlds() -> AsyncIterator[NewWorld]:
    from headgate.testing import running_operator

    async with AsyncExitStack() as worlds:

        async def new_world(*arguments: Any, **settings: Any) -> World:
            return await worlds.enter_async_context(running_operator(*arguments, **settings))

        yield new_world


@pytest.fixture
async def _headgate_world_of_anyio() -> AsyncIterator[NewWorld]:
    async for new_world in _worlds():
        yield new_world


if HAS_PYTEST_ASYNCIO:  # which takes only its own fixtures in its strict mode
    import pytest_asyncio

    @pytest_asyncio.fixture
    async def _headgate_world_of_asyncio() -> AsyncIterator[NewWorld]:
        async for new_world in _worlds():
            yield new_world


@pytest.fixture
def headgate_world(request: pytest.FixtureRequest) -> NewWorld:
    """Make worlds of ``headgate.testing``: ``world = await headgate_world(MyCoordinator, parallelism=2)``.

    The arguments are those of ``running_operator``. Each world is left at the end of the test, the newest one first.
    For async tests, of pytest-asyncio in each of its modes or of anyio on asyncio.
    """
    if not inspect.iscoroutinefunction(request.function) and not hasattr(request.function, "hypothesis"):
        pytest.fail(
            f"headgate_world must be awaited, but {request.function.__name__} is not async: write `async def`, and "
            "install pytest-asyncio, or mark the test with pytest.mark.anyio",
            pytrace=False,
        )
    of_anyio = not HAS_PYTEST_ASYNCIO or "anyio_backend" in request.fixturenames
    new_world: NewWorld = request.getfixturevalue(f"_headgate_world_of_{'anyio' if of_anyio else 'asyncio'}")
    return new_world


@pytest.fixture(scope="session")
def headgate_spark() -> Iterator[SparkSession]:
    """A Spark session with two tasks at a time, each of which may fail three times; it needs Java.

    It is the session that is active already, if there is one, and is stopped at the end otherwise. A fixture of this
    name in your ``conftest.py`` replaces it, for example with a session of Spark Connect.
    """
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    with pytest.MonkeyPatch.context() as patch:
        if "PYSPARK_PYTHON" not in os.environ:
            patch.setenv("PYSPARK_PYTHON", sys.executable)
        builder = SparkSession.builder.master("local[2,4]").appName("tests")
        for key, value in {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }.items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        yield spark
        spark.stop()


@pytest.fixture
def headgate_sidecar(headgate_spark: SparkSession) -> Iterator[Sidecar]:
    """A running ``Sidecar`` of ``headgate_spark``, for one test: no test sees the operators or checkpoints of another.

    With its default settings, so checkpoints are kept in memory.
    """
    from headgate import Sidecar

    with Sidecar(headgate_spark) as sidecar:
        yield sidecar
