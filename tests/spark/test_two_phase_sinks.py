# SPDX-License-Identifier: Apache-2.0

"""Two-phase sinks on real Spark: a task is killed, and a driver dies before its commit."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import SparkSession

from headgate import (
    CheckpointConfig,
    FixedDelay,
    Retry,
    Sidecar,
    SidecarConfig,
    SourceCoordinator,
    SplitReader,
    StaticSplitEnumerator,
    chain,
    concurrently,
)
from headgate.errors import RestartsExhausted
from headgate.sinks import (
    DeltaSink,
    FileSink,
    IcebergSink,
    PostgresSink,
    TwoPhaseSink,
    TwoPhaseSinkCoordinator,
    TwoPhaseSinkOperator,
)
from spark_bridge.sinks.two_phase.errors import SinkMisused
from tests.spark.faults.rows import Jobs
from tests.spark.operators import kill_once

if TYPE_CHECKING:
    from tests.postgres import Postgres
pytestmark = pytest.mark.spark

OFTEN = CheckpointConfig(interval_s=0.05, tolerated_failures=1000)
RECORDS = 12
PARTITIONS = 2
ROWS = [(number, f"row {number}") for number in range(RECORDS)]


class Troubled(TwoPhaseSinkOperator):
    """In the first attempt of a subtask it waits halfway for a completed checkpoint, writes on, and is killed."""

    def __init__(self, sink: TwoPhaseSink[Any], folder: str) -> None:
        super().__init__(sink)
        self._writes_lines = isinstance(sink, FileSink)
        self._folder = folder
        self._completed = False
        self._rows_here = 0

    def encode(self, record: int) -> dict[str, Any] | str:
        row = {"number": record, "what": f"row {record}"}
        return json.dumps(row) if self._writes_lines else row

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._completed = True

    def process(self, records: Iterator[Any]) -> None:
        def watched() -> Iterator[Any]:
            for record in records:
                yield record
                self._rows_here += 1
                while self._rows_here == 2 and not self._completed:
                    self.context.wait_for_event()
                if self._rows_here == 4:
                    kill_once(Path(self._folder, f"died {self.context.subtask}"))

        super().process(watched())


class Written(TwoPhaseSinkOperator):
    def encode(self, record: int) -> dict[str, Any]:
        return {"number": record, "what": None}


class InNewYork(TwoPhaseSinkOperator):
    """Reads its rows in a worker with another zone."""

    def process(self, records: Iterator[Any]) -> None:
        os.environ["TZ"] = "America/New_York"
        time.tzset()
        try:
            super().process(records)
        finally:
            del os.environ["TZ"]
            time.tzset()


class DiesBeforeItsCommit(TwoPhaseSinkCoordinator):
    """Its checkpoints become durable, and its driver is gone before it commits one that has rows."""

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        if self.commits.pending:
            raise LookupError("the driver is gone")
        await super().notify_checkpoint_complete(checkpoint_id)


@pytest.fixture
def here(spark: SparkSession) -> Jobs:
    return Jobs(spark)


def run(here: Jobs, folder: Path, coordinator: TwoPhaseSinkCoordinator, sink: TwoPhaseSink[Any]) -> None:
    with Sidecar(here.spark, SidecarConfig(storage=str(folder / "kept"))) as sidecar:
        job = sidecar.coordinate("rows", coordinator, parallelism=PARTITIONS, mode="streaming", checkpoint=OFTEN)
        tasks = here.numbers(PARTITIONS, range(RECORDS)).through(job, Troubled, sink, str(folder))
        restart = FixedDelay(0 if isinstance(coordinator, DiesBeforeItsCommit) else 3, delay_s=0.0)
        sidecar.run(tasks.collect, restart=restart, input_id="the rows")


def a_schema() -> Any:
    import pyarrow

    return pyarrow.schema([("number", pyarrow.int64()), ("what", pyarrow.string())])


def a_sink(which: str, folder: Path, server: Callable[[], Postgres]) -> tuple[TwoPhaseSink[Any], Callable[[], Any]]:
    """A sink, and how to read what is in its target."""
    # Imported here, because each of Spark's workers imports this module.
    if which == "files":
        out = folder / "out"
        return FileSink(str(out)), lambda: [
            json.loads(line) for file in out.glob("part-*") for line in file.read_text().splitlines()
        ]
    if which == "delta":
        from deltalake import DeltaTable

        url = str(folder / "table")
        return DeltaSink(url, a_schema()), lambda: DeltaTable(url).to_pyarrow_table().to_pylist()
    if which == "iceberg":
        from pyiceberg.catalog import load_catalog

        catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db"}
        sink = IcebergSink(catalog, "suite.rows", f"file://{folder}/table", a_schema())
        return sink, lambda: load_catalog("headgate", **catalog).load_table("suite.rows").scan().to_arrow().to_pylist()
    postgres, mode = server(), "prepared" if "prepared" in which else "staged"
    with postgres.new_schema("suite") as connection:
        connection.execute("CREATE TABLE suite.rows (number bigint, what text)")

    def read() -> list[dict[str, Any]]:
        with postgres.connect() as connection:
            found = connection.execute("SELECT number, what FROM suite.rows").fetchall()
        return [{"number": number, "what": what} for number, what in found]

    return PostgresSink(postgres.conninfo, "suite.rows", ["number", "what"], mode=mode), read  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "which",
    [
        "files",
        "postgres staged",
        pytest.param("postgres prepared", marks=pytest.mark.long),
        pytest.param("delta", marks=pytest.mark.long),
        pytest.param("iceberg", marks=pytest.mark.long),
    ],
)
def test_every_row_is_there_once_after_a_killed_task_and_a_driver_that_died_before_its_commit(
    here: Jobs, tmp_path: Path, which: str, request: pytest.FixtureRequest
) -> None:
    """H31, H40, H47, H52, H64."""
    sink, read = a_sink(which, tmp_path, lambda: request.getfixturevalue("postgres"))
    with pytest.raises(RestartsExhausted):
        run(here, tmp_path, DiesBeforeItsCommit(sink), sink)
    assert read() == []
    run(here, tmp_path, TwoPhaseSinkCoordinator(sink), sink)
    rows = sorted((row["number"], row["what"]) for row in read())
    assert rows == ROWS
    assert (tmp_path / "died 0").exists()
    run(here, tmp_path, TwoPhaseSinkCoordinator(sink), sink)  # nothing is left to write
    assert sorted((row["number"], row["what"]) for row in read()) == ROWS
    if which == "postgres prepared":
        assert request.getfixturevalue("postgres").prepared() == []


def test_a_timestamp_of_spark_is_the_same_instant_in_a_table_whatever_the_zone_of_the_worker(
    here: Jobs, tmp_path: Path
) -> None:
    """H171."""
    import pyarrow
    from deltalake import DeltaTable

    instants = pyarrow.timestamp("us", "UTC")
    sink = DeltaSink(str(tmp_path / "table"), pyarrow.schema([("at", instants), ("more", pyarrow.list_(instants))]))
    frame = here.spark.sql("SELECT at, array(at) AS more FROM (SELECT timestamp_seconds(1782921600) AS at)").coalesce(1)
    with Sidecar(here.spark) as sidecar:
        coordinator = TwoPhaseSinkCoordinator(sink)
        job = sidecar.coordinate("rows", coordinator, parallelism=1, mode="streaming", checkpoint=OFTEN)
        rows = frame.rdd.mapPartitions(job.subtask(InNewYork, sink))
        sidecar.run(rows.collect, input_id="the instant")
    instant = datetime(2026, 7, 1, 16, tzinfo=UTC)
    assert DeltaTable(tmp_path / "table").to_pyarrow_table().to_pylist() == [{"at": instant, "more": [instant]}]


class Numbers(SplitReader):
    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[int, int]]:
        for number in range(split if position is None else position, split + 100):
            yield number + 1, number


@pytest.mark.long
@pytest.mark.parametrize("ordered", [True, False])
def test_rows_that_fail_reach_their_sink_once_with_the_reason_although_tasks_are_killed(
    here: Jobs, tmp_path: Path, ordered: bool
) -> None:  # H180
    """The sink of failures is beside the chain, and is cut with it."""
    import pyarrow
    from deltalake import DeltaTable

    schemas = {
        "located": pyarrow.schema([("number", pyarrow.int64())]),
        "failed": pyarrow.schema(
            [("record", pyarrow.int64()), ("error", pyarrow.string()), ("tries", pyarrow.int64())]
        ),
    }
    sinks = {name: DeltaSink(str(tmp_path / name), schema) for name, schema in schemas.items()}

    async def locate(number: int) -> dict[str, int]:
        await asyncio.sleep(0.01 * (number % 5))
        if number % 100 in (40, 70):
            kill_once(tmp_path / f"died at {number}")
        if number % 3 == 0:
            raise ConnectionError(f"nobody lives at {number}")
        return {"number": number}

    stage = concurrently(
        locate, limit=10, ordered=ordered, retry=Retry(2, pause_s=0.01), on_error=sinks["failed"], timeout_s=60.0
    )
    source = SourceCoordinator(lambda state: StaticSplitEnumerator([0, 100, 200], state))
    stages = chain(read=(source, Numbers), locate=stage, write=sinks["located"])
    with Sidecar(here.spark) as sidecar:
        job = sidecar.coordinate("located", stages, parallelism=2, mode="streaming", checkpoint=OFTEN)
        job.run()
        counted = job.counters()["failed"]
    rows = {name: DeltaTable(tmp_path / name).to_pyarrow_table().to_pylist() for name in schemas}
    failed = [number for number in range(300) if number % 3 == 0]
    assert sorted(row["number"] for row in rows["located"]) == sorted({*range(300)} - {*failed})
    assert sorted(row["record"] for row in rows["failed"]) == failed
    assert {row["error"] for row in rows["failed"]} == {
        f"ConnectionError: nobody lives at {number}" for number in failed
    }
    assert {row["tries"] for row in rows["failed"]} == {2}
    assert counted == len(failed)
    assert len([*tmp_path.glob("died at *")]) == 6


def test_a_commit_that_can_never_succeed_ends_the_action_with_its_reason(here: Jobs, tmp_path: Path) -> None:
    """H170. No restart is tried, because each would fail like the first."""
    from deltalake import DeltaTable

    sink = DeltaSink(str(tmp_path / "table"), a_schema())
    calls: list[Any] = []
    with Sidecar(here.spark) as sidecar:
        coordinator = TwoPhaseSinkCoordinator(sink)
        job = sidecar.coordinate("rows", coordinator, parallelism=1, mode="streaming", checkpoint=OFTEN)
        tasks = here.numbers(1, range(RECORDS)).through(job, Written, sink)

        def action() -> None:
            if not calls:
                DeltaTable(tmp_path / "table").alter.add_constraint({"positive": "number > 0"})
            calls.append(tasks.collect())

        with pytest.raises(SinkMisused, match="CHECK constraint positive"):
            sidecar.run(action, restart=FixedDelay(3, delay_s=0.0), input_id="the rows")
    assert len(calls) <= 1
    assert DeltaTable(tmp_path / "table").to_pyarrow_table().num_rows == 0
