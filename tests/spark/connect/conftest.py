# SPDX-License-Identifier: Apache-2.0

"""A Spark Connect server for each module, shared by its tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

from tests.spark import counting
from tests.spark.connect import jobs
from tests.spark.connect.server import ConnectServer

WAIT_S = 300.0
SHOWING = {
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.rolling.enabled": "false",
    "spark.eventLog.compress": "false",
}
CLIENT_MODE = ("SPARK_CONNECT_MODE_ENABLED", "SPARK_LOCAL_REMOTE", "SPARK_REMOTE")


# Cases of shared scenarios that are not run here: no action of DataFrames uses the shuffle files of another one, and
# the tasks of an Iceberg sink are those of a Delta sink.
LEFT_OUT = ("shuffle files]", "iceberg]")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if item.path.parent.name != "connect" or not item.name.endswith(LEFT_OUT)]


@pytest.fixture(scope="module", autouse=True)
def other_tests_are_not_remote() -> Iterator[None]:
    """PySpark notes in the environment that this process is a client, and all its later sessions would be remote."""
    before = {name: os.environ.get(name) for name in CLIENT_MODE}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="module", autouse=True)
def jobs_travel_by_value() -> Iterator[None]:
    for module in (jobs, counting):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    yield
    for module in (jobs, counting):
        cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    """A server that shows and writes everything that Spark can show and write."""
    events: Path = tmp_path_factory.mktemp("events")
    server = ConnectServer(settings={**SHOWING, "spark.eventLog.dir": events.as_uri()}, events=events)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def session(server: ConnectServer) -> Iterator[Any]:
    session = server.session()
    yield session
    session.stop()
