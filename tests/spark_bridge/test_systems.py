# SPDX-License-Identifier: Apache-2.0

"""The table of supported systems: what it says of versions is what the tests run with, and what is refused."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from spark_bridge.common import conninfo, redis_clients
from spark_bridge.common.systems import SINKS, SOURCES, System
from spark_bridge.sinks.delta.driver import _WRITER_VERSIONS
from spark_bridge.sinks.iceberg.driver import FORMAT_VERSION_MAX
from spark_bridge.sinks.redis.task import connect
from tests.postgres import Postgres
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = [one for extra in EXTRAS["optional-dependencies"].values() for one in extra]
ROWS = {one.connectors.strip("`"): one for one in (*SOURCES, *SINKS)}


@pytest.mark.parametrize(("page", "systems"), [("sources", SOURCES), ("sinks", SINKS)])
def test_the_page_has_the_table(page: str, systems: tuple[System, ...]) -> None:  # H170
    text = (ROOT / f"docs/reference/{page}.md").read_text()
    for one in systems:
        assert f"| {one.connectors} | {one.system} | {one.tested} | {one.package} |" in text
    assert set(re.findall(rf"::: headgate.{page}.(\w+S(?:ource|ink))\n", text)) >= {
        one.connectors.strip("`") for one in systems
    }


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_packages_are_those_that_are_declared_and_tested(row: System) -> None:
    name, _, least = row.package.removesuffix(" or later").partition(" ")
    if least:
        assert any(re.fullmatch(rf"{name}(\[\w+\])?>={least}", one) for one in DECLARED)
    if row.tested.startswith(name):
        assert importlib.metadata.version(name).startswith(row.tested.split(",")[0].split(" ")[1] + ".")


def test_the_servers_of_the_tests_are_those_in_the_table(postgres: Postgres, redis_server: RedisServer) -> None:
    with postgres.connect() as connection:
        assert f"PostgreSQL {connection.info.server_version // 10_000}" == ROWS["PostgresSink"].tested
    version = redis_server.connect().info("server")["redis_version"]
    assert ROWS["RedisStreamsSink"].tested == f"Redis {version.rpartition('.')[0]}"


def test_the_versions_of_table_formats_are_those_that_are_accepted() -> None:  # H170
    assert _WRITER_VERSIONS == (1, 2, 3, 4, 5, 7)
    assert ROWS["DeltaSink"].system == "writer versions 1 to 5, and 7"
    assert ROWS["IcebergSink"].system == f"format versions 1 and {FORMAT_VERSION_MAX}"


def test_an_older_server_is_refused_with_both_versions(
    postgres: Postgres, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:  # H170
    monkeypatch.setattr(conninfo, "POSTGRES_LEAST", 99)
    monkeypatch.setattr(redis_clients, "REDIS_LEAST", 99)
    with pytest.raises(ValueError, match=r"the server is PostgreSQL \d+\.\d+.*: use one of version 99 or later"):
        conninfo.connect(postgres.conninfo)
    with pytest.raises(ValueError, match=r"^the server is Redis \d+\.\d+\.\d+: use one of version 99 or later"):
        connect(redis_server.url)
