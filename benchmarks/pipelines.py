# SPDX-License-Identifier: Apache-2.0

"""Pipelines from systems to systems, beside what a user of plain Spark would do with the same cores.

``parquet_to_delta``: a chain from Parquet files to a Delta table in Arrow batches, compared with
``spark.read.parquet`` and ``df.write.parquet`` of the same files: plain Spark writes no Delta without another jar.
``json_as_format``: an aggregation over JSON lines that ``sidecar.source`` reads, compared with ``spark.read.json``.
``rows_to_postgres``: a chain from Parquet files to PostgreSQL, compared with a streaming query whose ``foreachBatch``
writes with psycopg's COPY in each task; neither the query nor a retried task of it would keep rows from coming twice.
A sample of these three is the time of a whole job in milliseconds, from the action to the last committed row. Each
checks the number of rows.

``row_visible``: from the moment at which a task makes a row until a reader of the Delta table sees it, compared with
the interval of checkpoints. ``skewed_splits``: a job whose splits need unequal work, handed out by a coordinator,
compared with Spark's static partitions of the same splits.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import Figure, Progress, interleave
from benchmarks.pipeline_tasks import COLUMNS, SCHEMA, Clock, Worker, copy_rows, work
from benchmarks.spark_session import spark_session
from headgate import CheckpointConfig, Sidecar, SidecarConfig, SourceCoordinator, StaticSplitEnumerator, chain
from headgate.sinks import DeltaSink, PostgresSink
from headgate.sources import FileSource

CORES = 2
FILES = 8
ROWS = 2_000_000
POSTGRES_ROWS = 200_000
INTERVAL_S = 1.0
SPLITS = tuple(round(6000 / (place + 1)) for place in range(64))
"""The work of each split, as Zipf's law has it for groups that are sorted by size. Static partitions put the heavy ones
into the first."""


def _parquet(folder: Path, rows: int) -> str:
    """Files with these rows in all; returns their folder."""
    for part in range(FILES):
        ids = range(part, rows, FILES)
        columns = [pyarrow.array(ids, pyarrow.int64()), pyarrow.array([f"row {one}" for one in ids])]
        columns.append(pyarrow.array([one * 0.5 for one in ids], pyarrow.float64()))
        table = pyarrow.table(columns, schema=SCHEMA)
        pyarrow.parquet.write_table(table, folder / f"{part}.parquet", row_group_size=max(1, rows // FILES // 4))
    return str(folder)


def _json_lines(folder: Path, rows: int) -> str:
    for part in range(FILES):
        with open(folder / f"{part}.json", "w", encoding="utf-8") as file:
            for one in range(part, rows, FILES):
                file.write(json.dumps({"id": one, "name": f"row {one}", "value": one * 0.5}) + "\n")
    return str(folder)


def _timed_ms(job: Callable[[], int], rows: int) -> list[float]:
    """The time of a job, which returns how many rows have arrived."""
    began = time.perf_counter()
    arrived = job()
    took_ms = (time.perf_counter() - began) * 1e3
    if arrived != rows:
        raise RuntimeError(f"{arrived} rows have arrived, of {rows}")
    return [took_ms]


def _run_chain(spark: SparkSession, sidecar: Sidecar, name: str, stages: Any) -> None:
    often = CheckpointConfig(interval_s=INTERVAL_S)
    job = sidecar.coordinate(name, stages, parallelism=CORES, mode="streaming", checkpoint=often)
    tasks = spark.sparkContext.parallelize(range(CORES), CORES)
    sidecar.run(lambda: tasks.foreachPartition(job.subtask()))
    sidecar.release(name)


def parquet_to_delta(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds of a job from Parquet to Delta, compared with plain Spark from Parquet to Parquet."""
    from deltalake import DeltaTable

    rounds, rows = (1, 10_000) if quick else (7, ROWS)
    names = (f"copy-{number}" for number in count())
    with tempfile.TemporaryDirectory() as name, spark_session(f"local[{CORES}]") as spark:
        folder = Path(name)
        (folder / "in").mkdir()
        source = _parquet(folder / "in", rows)

        def plain() -> list[float]:
            target = str(folder / next(names))

            def job() -> int:
                spark.read.parquet(source).write.parquet(target)
                return rows

            took = _timed_ms(job, rows)
            if spark.read.parquet(target).count() != rows:
                raise RuntimeError("plain Spark has not written every row")
            return took

        def through_headgate() -> list[float]:
            operator = next(names)
            target = str(folder / operator)

            def job() -> int:
                stages = chain(source=FileSource(source, batch_rows=65_536), sink=DeltaSink(target, SCHEMA))
                _run_chain(spark, sidecar, operator, stages)
                return rows

            took = _timed_ms(job, rows)
            if DeltaTable(target).to_pyarrow_dataset().count_rows() != rows:
                raise RuntimeError("not every row is in the table")
            return took

        with Sidecar(spark, SidecarConfig(storage=folder / "checkpoints")) as sidecar:
            samples, baseline = interleave(rounds, plain, through_headgate, progress)
    params = {"rows": rows, "files": FILES, "cores": CORES, "baseline": "spark.read.parquet and df.write.parquet"}
    return [Figure("parquet_to_delta", "ms", samples, baseline, params)]


def json_as_format(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds of an aggregation over JSON lines, read by a source, compared with ``spark.read.json``."""
    rounds, rows = (1, 10_000) if quick else (7, ROWS // 2)
    with tempfile.TemporaryDirectory() as name, spark_session(f"local[{CORES}]") as spark:
        source = _json_lines(Path(name), rows)
        columns = "id long, name string, value double"

        def job(frame: Callable[[], DataFrame]) -> list[float]:
            return _timed_ms(lambda: int(frame().selectExpr("count(id)").first()[0]), rows)  # type: ignore[index]

        with Sidecar(spark) as sidecar:
            sidecar.source("orders", FileSource(source, schema=SCHEMA), parallelism=CORES)
            samples, baseline = interleave(
                rounds,
                lambda: job(lambda: spark.read.schema(columns).json(source)),
                lambda: job(lambda: spark.read.format("orders").load()),
                progress,
            )
    params = {"rows": rows, "files": FILES, "cores": CORES, "baseline": "spark.read.json"}
    return [Figure("json_as_format", "ms", samples, baseline, params)]


def rows_to_postgres(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds of a job from Parquet to PostgreSQL, compared with ``foreachBatch`` and psycopg."""
    from tests.postgres import Postgres

    rounds, rows = (1, 2_000) if quick else (7, POSTGRES_ROWS)
    names = (f"rows_{number}" for number in count())
    server = Postgres()
    try:
        with tempfile.TemporaryDirectory() as name, spark_session(f"local[{CORES}]") as spark:
            folder = Path(name)
            (folder / "in").mkdir()
            source = _parquet(folder / "in", rows)

            def arrived(job: Callable[[str], None]) -> list[float]:
                table = next(names)
                with server.connect() as database:
                    database.execute(f"CREATE TABLE {table} (id bigint, name text, value double precision)")

                    def write() -> int:
                        job(table)
                        (found,) = database.execute(f"SELECT count(*) FROM {table}").fetchone() or (0,)
                        return int(found)

                    return _timed_ms(write, rows)

            def plain(table: str) -> None:
                copy = partial(copy_rows, server.conninfo, table)
                query = (
                    spark.readStream.schema("id long, name string, value double")
                    .parquet(source)
                    .writeStream.foreachBatch(lambda batch, _: batch.repartition(CORES).foreachPartition(copy))
                    .option("checkpointLocation", str(folder / f"query-{table}"))
                    .trigger(availableNow=True)
                    .start()
                )
                query.awaitTermination()

            def through_headgate(table: str) -> None:
                sink = PostgresSink(server.conninfo, table, COLUMNS)
                _run_chain(spark, sidecar, table, chain(source=FileSource(source, batch_rows=8_192), sink=sink))

            with Sidecar(spark, SidecarConfig(storage=folder / "checkpoints")) as sidecar:
                samples, baseline = interleave(
                    rounds, lambda: arrived(plain), lambda: arrived(through_headgate), progress
                )
    finally:
        server.close()
    params = {"rows": rows, "files": FILES, "cores": CORES, "baseline": "foreachBatch with psycopg's COPY"}
    return [Figure("rows_to_postgres", "ms", samples, baseline, params)]


def row_visible(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds until a row is visible in a Delta table, compared with the interval of checkpoints."""
    rounds, seconds = (1, 2.0) if quick else (3, 30.0)
    samples: list[list[float]] = []
    schema = pyarrow.schema([("made_at", pyarrow.float64())])
    with tempfile.TemporaryDirectory() as name, spark_session(f"local[{CORES}]") as spark:
        for number in range(rounds):
            table = Path(name, f"table-{number}")
            with Sidecar(spark, SidecarConfig(storage=Path(name, "checkpoints"))) as sidecar, Watch(table) as watch:
                source = SourceCoordinator(lambda state: StaticSplitEnumerator(range(CORES), state))
                stages = chain(source=(source, partial(Clock, seconds)), sink=DeltaSink(str(table), schema))
                _run_chain(spark, sidecar, f"clock-{number}", stages)
            samples.append(watch.after_ms())
            progress(f"round {number + 1}/{rounds}: {len(samples[-1])} rows")
    params = {"interval_s": INTERVAL_S, "seconds": seconds, "baseline": "the interval of checkpoints"}
    return [Figure("row_visible", "ms", samples, [[INTERVAL_S * 1e3]] * rounds, params)]


class Watch:
    """Looks at a Delta table's log all the time, and notes when each version appears."""

    def __init__(self, table: Path) -> None:
        self._table = table
        self._seen: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch")

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        last_look = False
        while not last_look:
            last_look = self._over.wait(0.005)
            for file in (self._table / "_delta_log").glob("*.json"):
                self._seen.setdefault(str(file), time.time())

    def after_ms(self) -> list[float]:
        """For each row, the time from its making until its version appeared."""
        found: list[float] = []
        for file, seen_at in self._seen.items():
            for line in Path(file).read_text().splitlines():
                if "add" in (action := json.loads(line)):
                    made = pyarrow.parquet.read_table(self._table / action["add"]["path"])["made_at"].to_pylist()
                    found += [(seen_at - one) * 1e3 for one in made]
        return found


def skewed_splits(quick: bool, progress: Progress) -> list[Figure]:
    """Milliseconds of a job with unequal splits, handed out on demand, compared with static partitions."""
    rounds, divisor = (1, 200) if quick else (9, 1)
    splits = [(place, 1 + cost // divisor) for place, cost in enumerate(SPLITS)]
    expected = sorted(hashlib.sha256(str(place).encode()).hexdigest() for place, _ in splits)
    names = (f"skewed-{number}" for number in count())
    with spark_session(f"local[{CORES}]") as spark:

        def check(found: Iterator[str] | list[str]) -> int:
            if sorted(found) != expected:
                raise RuntimeError("a split was lost or done twice")
            return len(splits)

        def plain() -> list[float]:
            return _timed_ms(
                lambda: check(spark.sparkContext.parallelize(splits, CORES).map(work).collect()), len(splits)
            )

        def through_headgate() -> list[float]:
            name = next(names)
            source = SourceCoordinator(lambda state: StaticSplitEnumerator(splits, state))
            job = sidecar.coordinate(name, source, parallelism=CORES)
            tasks = spark.sparkContext.parallelize(range(CORES), CORES)
            took = _timed_ms(lambda: check(tasks.mapPartitions(job.subtask(Worker)).collect()), len(splits))
            sidecar.release(name)
            return took

        with Sidecar(spark) as sidecar:
            samples, baseline = interleave(rounds, plain, through_headgate, progress)
    params = {"splits": len(splits), "work": list(SPLITS), "cores": CORES, "baseline": "static partitions"}
    return [Figure("skewed_splits", "ms", samples, baseline, params)]
