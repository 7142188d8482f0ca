# SPDX-License-Identifier: Apache-2.0

"""Operators in the tables of a declarative pipeline, which Spark's own ``spark-pipelines`` runs on a server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.spark.cluster import ROOT
from tests.spark.connect.server import SPARK_HOME, ConnectServer, with_relay
from tests.spark.faults.own_process import SidecarProgram

pytestmark = [pytest.mark.spark, pytest.mark.long]

DEFINITIONS = Path(__file__).with_name("pipeline_definitions.py")
BESIDE = DEFINITIONS.with_name("pipeline_beside.py")
SPEC = """
name: test
storage: {storage}
libraries: [{{glob: {{include: definitions.py}}}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server's operator has, and the client's secret."""
    return tmp_path_factory.mktemp("installed")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ConnectServer]:
    server = ConnectServer(options=with_relay(folder, "client", "sidecar"))
    server.start()
    yield server
    server.stop()


def run_pipeline(
    server: ConnectServer, project: Path, definitions: Path = DEFINITIONS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``spark-pipelines`` in the folder of a new project, whose streaming table reads two lines."""
    shutil.copy(definitions, project / "definitions.py")
    (project / "spark-pipeline.yml").write_text(SPEC.format(storage=(project / "storage").as_uri()))
    lines = project / "lines"
    lines.mkdir()
    (lines / "a.txt").write_text("one\ntwo\n")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "SPARK_HOME"},
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "DIED": str(project / "died"),
        "LINES": lines.as_uri(),
        **variables,
    }
    command = [str(SPARK_HOME / "bin" / "spark-pipelines"), "run", "--remote", server.url]
    return subprocess.run(
        command,
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
        check=False,
    )


def rows(server: ConnectServer, table: str) -> list[Any]:
    """The rows of a table in the server's warehouse, each as the tuple of its values, sorted."""
    found = pyarrow.parquet.read_table(server.folder / "warehouse" / table)
    return sorted(zip(*(column.to_pylist() for column in found.columns), strict=True))


def test_operators_fill_the_tables_of_a_pipeline_once_although_a_worker_dies(
    server: ConnectServer, folder: Path, tmp_path: Path
) -> None:
    """A materialized view whose tasks share splits, one that reads it, and a streaming table whose tasks ask."""
    done = run_pipeline(server, tmp_path, RELAY_SECRET=str(folder / "client"))

    assert done.returncode == 0, done.stdout
    assert (tmp_path / "died").exists()
    assert rows(server, "all_squares") == [(number * number,) for number in range(10)]
    assert rows(server, "even_squares") == [(number * number,) for number in range(0, 10, 2)]
    assert rows(server, "numbered_lines") == [("one", 1), ("two", 2)]


def test_the_sidecar_of_a_pipeline_may_be_a_process_beside_the_server(
    server: ConnectServer, folder: Path, tmp_path: Path
) -> None:
    """For a client that nobody can reach; the tasks share a work queue, which is in the sidecar's process."""
    program = SidecarProgram(tmp_path, "with_parts")
    program.secret_file.write_text((folder / "sidecar").read_text())
    program.secret_file.chmod(0o600)
    program.start()
    try:
        done = run_pipeline(server, tmp_path, BESIDE, BESIDE=program.address, RELAY_SECRET=str(program.secret_file))
    finally:
        program.kill()

    assert done.returncode == 0, done.stdout
    assert rows(server, "pages") == [(page,) for page in range(1, 16)]


def test_without_the_client_s_secret_the_definitions_are_refused_with_what_to_do(
    server: ConnectServer, tmp_path: Path
) -> None:
    done = run_pipeline(server, tmp_path)

    assert done.returncode != 0
    assert "ConnectRefused: Spark does not let the definitions of a declarative pipeline register" in done.stdout
    assert "`headgate connect-server FOLDER --new-client FILE`" in done.stdout
    assert not (tmp_path / "died").exists(), "no table was begun"
