# SPDX-License-Identifier: Apache-2.0

"""The wheel where Spark is of each kind: there is none, a platform brought it, or it is the client of Spark Connect.

Each environment has what pip installs with the wheel, from the package index, and nothing of the environment of this
test but what is linked. ``make release`` installs ``headgate[pyspark]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.release.environments import Environment
from tests.spark.connect.server import CLIENT_PACKAGES, WORKER_PACKAGES, ConnectServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SPARK_ITSELF = ("pyspark", "py4j")
NO_JAVA = {"JAVA_HOME": "", "PATH": ""}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    return Environment(tmp_path_factory.mktemp("alone") / "env", wheel)


def test_headgate_alone_brings_nothing_of_spark_and_runs_actors(alone: Environment) -> None:
    assert not {*SPARK_ITSELF, "pandas", "pyarrow", "grpc"} & {path.name for path in alone.packages.iterdir()}
    ran = alone.call("headgate", "example", "first_actor", "--run")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout
    names = "import headgate as h; [getattr(h, name) for name in h.__all__]"
    assert alone.call("python", "-W", "error", "-c", names).stderr == ""


def test_headgate_alone_says_that_spark_is_missing_and_how_to_get_it(alone: Environment) -> None:
    said = alone.checks()
    assert (said["status"], list(said)[:3]) == ("1", ["place", "packages", "Spark"])
    assert said["Spark"].startswith(f"FAILED: Spark is not installed for this Python, {alone.folder}/bin/python")
    for way in ("'headgate[pyspark]'", "'headgate[pyspark-client]'", "PYTHONPATH"):
        assert way in said["Spark"]
    assert alone.call("headgate", "version").stdout.splitlines()[1].split() == ["pyspark", "not", "installed"]


@pytest.mark.spark
def test_a_spark_that_a_platform_brought_is_used_as_it_is(alone: Environment, tmp_path: Path) -> None:
    """It is a folder on the path, which pip knows nothing of."""
    alone.link(tmp_path / "spark", *SPARK_ITSELF)
    said = alone.checks(PYTHONPATH=str(tmp_path / "spark"), PYSPARK_PYTHON=str(alone.folder / "bin" / "python"))
    assert said["last"] == "Headgate works here.", said
    assert said["Spark"].endswith(f"({tmp_path}/spark/pyspark)")


@pytest.mark.spark
def test_a_platform_without_py4j_on_the_path_is_told_so(alone: Environment, tmp_path: Path) -> None:
    alone.link(tmp_path / "spark", "pyspark")
    said = alone.checks(PYTHONPATH=str(tmp_path / "spark"))
    assert said["Spark"].startswith(f"FAILED: the pyspark in {tmp_path}/spark/pyspark cannot be imported (Module")
    assert "py4j-*.zip on PYTHONPATH" in said["Spark"]


@pytest.fixture(scope="module")
def server() -> Iterator[ConnectServer]:
    server = ConnectServer()
    server.start()
    yield server
    server.stop()


@pytest.mark.spark
@pytest.mark.parametrize("release", ["4.1.*", "4.2.*"])
def test_a_client_of_spark_connect_needs_neither_java_nor_py4j(
    release: str, server: ConnectServer, wheel: Path, tmp_path: Path
) -> None:
    thin = Environment(tmp_path / "env", wheel, f"pyspark-client=={release}")
    thin.link(thin.packages, *({*WORKER_PACKAGES, *CLIENT_PACKAGES} - {*SPARK_ITSELF}))
    assert not (thin.packages / "py4j").exists()

    said = thin.checks(**NO_JAVA)
    assert (said["status"], list(said)[:3]) == ("0", ["place", "packages", "Spark"])
    assert "a client of Spark Connect, which needs no Java (pyspark-client " in said["Spark"]
    assert "headgate check --remote sc://" in said["last"]

    said = thin.checks("--remote", f"{server.url}/;user_id=ann", **NO_JAVA)
    assert said["last"] == "Headgate works here.", said
    assert f" at {server.url}, Java " in said["session"]

    ran = thin.call("headgate", "example", "connect_client", "--run", server.url, **NO_JAVA)
    assert (ran.returncode, ran.stdout) == (0, "285\n"), ran.stderr

    gone = thin.checks("--remote", "sc://127.0.0.1:1", **NO_JAVA)
    assert gone["session"].startswith("FAILED: no session of the Spark Connect server sc://127.0.0.1:1 (")
