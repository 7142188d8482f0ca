# SPDX-License-Identifier: Apache-2.0

"""Where an operator can run in a Spark Connect session, what a sidecar offers there, and what a server may forbid."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headgate import Sidecar, SidecarConfig, Watching, check
from headgate.sources import FileSource
from spark_bridge.common.errors import ConnectRefused
from tests.spark import operators, test_sources, test_two_phase_sinks
from tests.spark.connect import frames, strict_server
from tests.spark.connect.frames import FrameJobs
from tests.spark.connect.jobs import SCHEMA, Numbers, ReadInPandas, ReadNumbers, ReadRows, travelling_by_value
from tests.spark.connect.server import ConnectServer
from tests.spark.test_streams import ROWS, Stream, add_files
from tests.spark.test_two_phase_sinks import (  # noqa: F401
    test_every_row_is_there_once_after_a_killed_task_and_a_driver_that_died_before_its_commit,
)

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.fixture(scope="module")
def sidecar(server: ConnectServer) -> Iterator[tuple[Any, Sidecar]]:
    session = server.session()
    with Sidecar(session, SidecarConfig(watching=Watching(status_port=0))) as sidecar:
        yield session, sidecar
    session.stop()


def test_a_session_is_checked_and_stays(server: ConnectServer, capsys: pytest.CaptureFixture[str]) -> None:
    session = server.session()
    assert check(session) is True
    said = capsys.readouterr().out
    [executor] = [line for line in said.splitlines() if line.strip().startswith("executor ")]
    assert re.search(r"executor driver at \S+: Python 3\.[\d.]+\S*, Java \d[\d.]*, reaches 127\.0\.0\.1:", executor)
    assert re.search(r"^session: +ok, Spark [\d.]+\S* at 127\.0\.0\.1, Java \d", said, re.MULTILINE)
    assert session.range(3).count() == 3
    session.stop()


def test_map_in_pandas(sidecar: tuple[Any, Sidecar]) -> None:
    session, headgate = sidecar
    handle = headgate.coordinate("pandas", lambda: Numbers(range(6)), parallelism=2)

    rows = session.range(0, 2, 1, 2).mapInPandas(handle.subtask(ReadInPandas), SCHEMA).collect()

    assert sorted(row.split for row in rows) == list(range(6))


def test_a_barrier_stage(sidecar: tuple[Any, Sidecar]) -> None:
    session, headgate = sidecar
    handle = headgate.coordinate("barrier", lambda: Numbers(range(6)), parallelism=2)

    rows = session.range(0, 2, 1, 2).mapInArrow(handle.subtask(ReadNumbers), SCHEMA, barrier=True).collect()

    assert sorted(row.split for row in rows) == list(range(6))


def test_foreach_partition(sidecar: tuple[Any, Sidecar]) -> None:
    session, headgate = sidecar
    numbers = Numbers(range(6))
    handle = headgate.coordinate("foreach", lambda: numbers, parallelism=2)

    session.range(0, 2, 1, 2).foreachPartition(handle.subtask(ReadRows))

    assert len(numbers.pids) == 6


def test_a_streaming_query_runs_the_operator_in_each_micro_batch(
    sidecar: tuple[Any, Sidecar], tmp_path_factory: pytest.TempPathFactory
) -> None:
    session, headgate = sidecar
    handle = headgate.coordinate("query", lambda: Numbers(range(3)), parallelism=1)
    files = tmp_path_factory.mktemp("input")
    (files / "a.txt").write_text("one\n")
    lines = session.readStream.text(files.as_uri()).repartition(1)

    query = (
        lines.mapInArrow(handle.subtask(ReadNumbers), SCHEMA)
        .writeStream.format("memory")
        .queryName("splits")
        .option("checkpointLocation", tmp_path_factory.mktemp("checkpoints").as_uri())
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(300)

    assert sorted(row.split for row in session.sql("SELECT * FROM splits").collect()) == [0, 1, 2]
    assert handle.statistics()["runs"] == 1


def test_a_source_is_a_format_of_the_session(sidecar: tuple[Any, Sidecar], tmp_path: Path) -> None:
    """A Python data source over Connect: its splits come from this process."""
    session, headgate = sidecar
    for number in range(3):
        table = pyarrow.table({"id": list(range(10 * number, 10 * number + 10))})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")
    headgate.source("numbers", FileSource(str(tmp_path), batch_rows=4), parallelism=2)

    rows = session.read.format("numbers").load().collect()

    assert sorted(row.id for row in rows) == list(range(30))


def test_a_source_is_a_stream_of_the_session(server: ConnectServer, tmp_path: Path) -> None:
    """Spark plans the micro-batches in a Python process of the server, which asks the sidecar in this process."""
    session = server.session()
    stream = Stream(session, tmp_path)
    add_files(stream.folder, range(4))
    with Sidecar(session, stream.config) as sidecar, travelling_by_value(test_sources, operators):
        source = test_sources.DyingSource(tmp_path / "died", str(stream.folder), batch_rows=50, discover_every_s=0.01)
        handle = sidecar.source("growing", source, parallelism=2)
        growing = session.readStream.format("growing").load()
        stream.run(growing)
        assert stream.rows() == list(range(4 * ROWS))
        assert (tmp_path / "died").exists()
        assert handle.statistics()["resets"] == 1, "a task was killed"
        add_files(stream.folder, range(4, 6))
        stream.run(growing)
        assert stream.rows() == list(range(6 * ROWS)), "the query was restarted"
    add_files(stream.folder, range(6, 7))
    with Sidecar(session, stream.config) as sidecar:
        sidecar.source("growing", FileSource(str(stream.folder), discover_every_s=0.01), parallelism=2)
        stream.run(session.readStream.format("growing").load())
        assert stream.rows() == list(range(7 * ROWS)), "another sidecar continues from the stored plan"
    session.stop()


def test_a_work_queue_and_counters(sidecar: tuple[Any, Sidecar]) -> None:
    session, headgate = sidecar
    queue = headgate.work_queue("todo", [1, 2, 3])
    handle = headgate.coordinate("worker", parallelism=2, uses=[queue])

    def work(context: Any, batches: Any) -> Iterator[Any]:
        import pyarrow

        for item in queue:
            context.count("items")
            yield pyarrow.RecordBatch.from_pydict({"split": [item]})

    rows = session.range(0, 2, 1, 2).mapInArrow(handle.subtask(work), SCHEMA).collect()

    assert sorted(row.split for row in rows) == [1, 2, 3]
    assert handle.counters() == {"items": 3}


def test_the_status_page_shows_the_operators(sidecar: tuple[Any, Sidecar]) -> None:
    _, headgate = sidecar
    headgate.coordinate("shown", lambda: Numbers(range(1)), parallelism=1)
    assert headgate.status_address is not None
    host, port = headgate.status_address

    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
        assert b'operator="shown"' in answer.read()


def test_the_function_of_foreach_batch_is_refused_with_the_alternative(sidecar: tuple[Any, Sidecar]) -> None:
    _, headgate = sidecar
    handle = headgate.coordinate("batches", lambda: Numbers(range(1)), parallelism=1, mode="streaming")

    with pytest.raises(ConnectRefused, match=r"on the server.*mapInArrow"):
        headgate.for_each_batch(handle, lambda frame, batch: None)


@pytest.fixture
def here(session: Any) -> Iterator[FrameJobs]:
    """The place of the sinks' test, which is the one of a driver: a task is killed, and a driver does not commit."""
    with travelling_by_value(test_two_phase_sinks, frames, operators):
        yield FrameJobs(session)


@pytest.mark.parametrize("method", ["applyInPandas", "applyInArrow"])
def test_a_group_is_refused_in_the_task(sidecar: tuple[Any, Sidecar], method: str) -> None:
    session, headgate = sidecar
    handle = headgate.coordinate(f"groups of {method}", lambda: Numbers(range(1)), parallelism=1)
    groups = session.range(0, 4).groupBy("id")

    with pytest.raises(PySparkException, match=r"takes the iterator over one partition.*mapInArrow"):
        getattr(groups, method)(handle.subtask(ReadInPandas), SCHEMA).collect()


@pytest.mark.parametrize("method", ["applyInPandas", "applyInArrow"])
def test_an_operator_works_before_and_after_groups(sidecar: tuple[Any, Sidecar], method: str) -> None:
    """The functions of the groups are plain ones; the operators on both sides of them take partitions."""
    session, headgate = sidecar
    before = headgate.coordinate(f"before {method}", lambda: Numbers(range(6)), parallelism=2)
    after = headgate.coordinate(f"after {method}", lambda: Numbers(range(3)), parallelism=1)

    def one_of(group: Any) -> Any:
        return group[:1] if method == "applyInPandas" else group.slice(0, 1)

    splits = session.range(0, 2, 1, 2).mapInArrow(before.subtask(ReadNumbers), SCHEMA)
    groups = getattr(splits.selectExpr("split % 3 AS split").groupBy("split"), method)(one_of, SCHEMA)
    assert sorted(row.split for row in groups.collect()) == [0, 1, 2]

    rows = groups.repartition(1).mapInArrow(after.subtask(ReadNumbers), SCHEMA).collect()
    assert sorted(row.split for row in rows) == [0, 1, 2]
    assert before.statistics()["runs"] == 2


@pytest.mark.parametrize(
    ("forbids", "version", "text"),
    [
        (
            strict_server.artifacts,
            None,
            r"refused the artifact headgate-relay-\w+\.jar \(.*\): let the server's adminis",
        ),
        (
            strict_server.java_functions,
            None,
            r"refused the Java function of the relay \(.*\): let the server's adminis",
        ),
        (
            strict_server.nothing,
            "4.0.1",
            r"runs Spark 4\.0\.1, but Headgate supports 4\.1 and later: update the server",
        ),
    ],
)
def test_what_a_server_forbids_is_refused_with_the_way_out(
    server: ConnectServer, forbids: strict_server.Forbids, version: str | None, text: str
) -> None:
    """The administrator's own gateway stands before the server."""
    with strict_server.strict(server.port, forbids, version) as url:
        session = SparkSession.Builder().remote(url).create()
        with pytest.raises(ConnectRefused, match=text):
            with Sidecar(session):
                pass
        session.stop()
