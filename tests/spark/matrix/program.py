# SPDX-License-Identifier: Apache-2.0

"""One start of Spark with certain zones. That of the driver is the one of the process, ``TZ``.

Reads what the other tools wrote in ``FOLDER``, and what Spark
writes in these zones, with each way to use a source; writes with sinks, and reads back with each tool. What became of
each column goes into ``found.json`` in a folder of these zones.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from datetime import time
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import psycopg
import pyarrow as pa
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyspark import RDD
from pyspark.sql import SparkSession

from headgate import Sidecar, SidecarConfig, chain
from headgate.sinks import (
    DeltaSink,
    IcebergSink,
    PostgresSink,
    TwoPhaseSink,
    TwoPhaseSinkCoordinator,
    TwoPhaseSinkOperator,
)
from headgate.sources import FileSource, PostgresSource, Source
from tests.spark.conftest import start_spark
from tests.spark.matrix.values import ORIGINAL, comparable
from tests.spark.matrix.writers import ALL, FAR, FILES, IN_FOLDERS, NESTED, REFUSED

# What Spark writes, and the columns that it does not have, or changes itself.
FORMATS = {"folders": "parquet", "jsonl": "json"}
EARLY = {"day", "naive", "instant", *NESTED, *FAR}
BY_SPARK: dict[tuple[str, str], tuple[Callable[[Any, str], None], set[str]]] = {
    ("Spark, INT96", "parquet"): (lambda frame, path: _parquet(frame, path, "INT96"), {"span"}),
    ("Spark, TIMESTAMP_MICROS", "parquet"): (lambda frame, path: _parquet(frame, path, "TIMESTAMP_MICROS"), {"span"}),
    ("Spark, legacy calendar", "parquet"): (
        lambda frame, path: _parquet(frame, path, "INT96", "LEGACY"),
        {"span", *EARLY},
    ),
    ("Spark", "csv"): (
        lambda frame, path: frame.write.csv(
            path, header=True, ignoreLeadingWhiteSpace=False, ignoreTrailingWhiteSpace=False
        ),
        {"span", "bytes", "naive", "instant", *NESTED, *FAR},
    ),
    ("Spark", "jsonl"): (
        lambda frame, path: frame.write.json(path),
        {"span", "bytes", "odd", "naive", "instant", *NESTED, *FAR},
    ),
    ("Spark", "folders"): (
        lambda frame, path: frame.write.partitionBy(*IN_FOLDERS).parquet(path),
        ALL - {"id", "text", *IN_FOLDERS},
    ),
}
OMITTED = {key: one[1] for written in (FILES, BY_SPARK) for key, one in written.items()}
CSV_OF_SPARK = {"escape_char": "\\"}
IN_EACH_ZONE = {("pyarrow", "parquet"), ("Spark, INT96", "parquet"), ("Spark", "csv"), ("Spark", "jsonl")}
"""What is read with ``spark.read`` in each zone. Each of the others is read so in one of them, and in a task in all."""
STREAMED = ("pyarrow", "parquet")
POSTGRES = {
    "id": "bigint",
    "flag": "boolean",
    "i16": "smallint",
    "i32": "integer",
    "i64": "bigint",
    "f32": "real",
    "f64": "double precision",
    "odd": "double precision",
    "exact": "numeric(38, 2)",
    "text": "text",
    "digits": "text",
    "bytes": "bytea",
    "day": "date",
    "naive": "timestamp",
    "recent": "timestamptz",
}
"""The columns of a table that is made by hand. Python's rows in Spark have no early instants."""
TURNS = 5
Outcomes = dict[str, dict[str, str]]


def _parquet(frame: Any, path: str, form: str, calendar: str = "CORRECTED") -> None:
    spark = frame.sparkSession
    for name in ("datetimeRebaseModeInWrite", "int96RebaseModeInWrite"):
        spark.conf.set(f"spark.sql.parquet.{name}", calendar)
    frame.write.option("outputTimestampType", form).parquet(path)


def verdict(found: Any, original: Any) -> str:
    """Whether the values are the original ones, perhaps as text."""
    found, original = (one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one for one in (found, original))
    wanted = comparable(original)
    if comparable(found) == wanted:
        return "kept"
    try:
        parsed = _times(found) if pa.types.is_time(original.type) else found.cast(original.type)
        if comparable(parsed) == wanted:
            return "text"
    except (ValueError, TypeError, NotImplementedError):
        pass
    return f"DIFFERENT: {comparable(found)} ({found.type}) in place of {wanted}"


def _times(texts: Any) -> Any:
    return pa.array([None if one is None else time.fromisoformat(one) for one in texts.to_pylist()], pa.time64("us"))


def verdicts(found: pa.Table, original: pa.Table) -> dict[str, str]:
    found = found.sort_by("id")
    assert sorted(found.schema.names) == sorted(original.schema.names), found.schema.names
    return {name: verdict(found[name], original[name]) for name in original.schema.names}


def read_here(path: str, options: dict[str, Any]) -> pa.Table:
    source = FileSource(path, **options)
    reader = source.operator()
    items = (item for split in source.splits() for item in reader.read_from(split, None))
    return pa.Table.from_batches([item[1] for item in items if item is not None])


class Readers:
    """The ways to use a source: its reader in a task, ``spark.read``, and ``spark.readStream``."""

    def __init__(self, spark: SparkSession, sidecar: Sidecar) -> None:
        self._spark = spark
        self._sidecar = sidecar
        self._number = 0

    def in_one_task(self, places: list[tuple[str, dict[str, Any]]]) -> list[pa.Table]:
        task: RDD[Any] = self._spark.sparkContext.parallelize(places, 1)
        return task.map(lambda place: read_here(*place)).collect()

    def read(self, path: str, **options: Any) -> pa.Table:
        return self.table_of(FileSource(path, **options))

    def table_of(self, source: Source) -> pa.Table:
        self._number += 1
        self._sidecar.source(f"read_{self._number}", source, parallelism=1)
        return self._spark.read.format(f"read_{self._number}").load().toArrow()

    def stream(self, path: str, **options: Any) -> pa.Table:
        self._number += 1
        name = f"stream_{self._number}"
        self._sidecar.source(name, FileSource(path, discover_every_s=60.0, **options), parallelism=1)
        batches: list[pa.Table] = []
        # Spark's memory sink sends java.sql.Date to the driver, which is another day in another zone.
        writer = (
            self._spark.readStream.format(name)
            .load()
            .writeStream.foreachBatch(lambda batch, _: batches.append(batch.toArrow()))
        )
        writer.trigger(availableNow=True).start().awaitTermination()
        return pa.concat_tables(batches)


def read_files(readers: Readers, folder: Path, by_spark: Path, turn: int) -> Outcomes:
    """What becomes of each column of each file, in each way to read it that has its turn."""
    places: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    originals: dict[tuple[str, str], pa.Table] = {}
    for key, omitted in OMITTED.items():
        tool, kind = key
        options = {"csv_options": CSV_OF_SPARK} if key == ("Spark", "csv") else {}
        place = (by_spark if key in BY_SPARK else folder) / tool / kind
        places[key] = str(place), {"format": FORMATS.get(kind, kind), **options}
        originals[key] = ORIGINAL.select([name for name in ORIGINAL.schema.names if name not in omitted])
    found: Outcomes = {}
    in_task = dict(zip(places, readers.in_one_task(list(places.values())), strict=True))
    for number, ((tool, kind), (path, options)) in enumerate(places.items()):
        original = originals[tool, kind]
        found[f"{tool}|{kind}|task"] = verdicts(in_task[tool, kind], original)
        if (tool, kind) in IN_EACH_ZONE or number % TURNS == turn:
            found[f"{tool}|{kind}|spark.read"] = verdicts(readers.read(path, **options), original)
    path, options = places[STREAMED]
    found["|".join((*STREAMED, "spark.readStream"))] = verdicts(readers.stream(path, **options), originals[STREAMED])
    return found


def read_what_is_refused(readers: Readers, folder: Path, by_spark: Path) -> Outcomes:
    found: Outcomes = {}
    places = {what: (folder / "refused" / what / name, words) for what, (_, name, words) in REFUSED.items()}
    places["early days in the legacy calendar (Spark)"] = (
        by_spark / "refused",
        "and Spark wrote the file with the calendar",
    )
    for what, (place, words) in places.items():
        path = str(place.parent if place.name == "table" else place)
        kind = "json" if path.endswith("jsonl") else "parquet"
        found[f"{what}|refused|task"] = {"a": refusal(partial(read_here, path, {"format": kind}), words)}
        found[f"{what}|refused|spark.read"] = {"a": refusal(partial(readers.read, path, format=kind), words)}
    return found


def write_tables(spark: SparkSession, sidecar: Sidecar, folder: Path, own: Path) -> Outcomes:
    """Read the file with all types into Delta and Iceberg tables, in a job, and read them with each tool."""
    catalog = {"type": "sql", "uri": f"sqlite:///{own}/catalog.db", "warehouse": f"file://{own}"}
    found: Outcomes = {}
    for kind, omitted in {"Delta": {"clock", "span"}, "Iceberg": {"span", *FAR}}.items():
        original = ORIGINAL.select([name for name in ORIGINAL.schema.names if name not in omitted])
        source = FileSource(f"{folder}/pyarrow/parquet", schema=original.schema)
        sink: TwoPhaseSink[Any] = DeltaSink(f"{own}/Delta", original.schema)
        if kind == "Iceberg":
            sink = IcebergSink(catalog, "shop.orders", f"file://{own}/Iceberg", original.schema)
        job = sidecar.coordinate(kind, chain(source=source, sink=sink), parallelism=1, mode="streaming")
        tasks = spark.sparkContext.parallelize([0], 1)
        sidecar.run(partial(tasks.foreachPartition, job.subtask()))
        if kind == "Delta":
            table = DeltaTable(f"{own}/Delta")
            files = table.file_uris()
            tables = {"deltalake": table.to_pyarrow_table(), "Polars": polars.read_delta(f"{own}/Delta").to_arrow()}
        else:
            iceberg = load_catalog("headgate", **catalog).load_table("shop.orders")
            files = [one.file.file_path for one in iceberg.scan().plan_files()]
            tables = {
                "pyiceberg": iceberg.scan().to_arrow(),
                "Polars": polars.scan_iceberg(iceberg).collect().to_arrow(),
            }
        paths = [file.removeprefix("file://") for file in files]
        tables["DuckDB, the files"] = duckdb.read_parquet(paths).to_arrow_table()
        tables["pandas, the files"] = pa.Table.from_pandas(pandas.read_parquet(paths, dtype_backend="pyarrow"))
        tables["Spark, the files"] = spark.read.parquet(*paths).toArrow()
        found |= {f"{tool}|{kind}|reads": verdicts(read, original) for tool, read in tables.items()}
    return found


def copy_in_postgres(readers: Readers, spark: SparkSession, sidecar: Sidecar, conninfo: str) -> Outcomes:
    """Read a table that SQL has made, and write Spark's rows of it into another one."""
    original = ORIGINAL.select(list(POSTGRES))
    columns = ", ".join(f"{name} {kind}" for name, kind in POSTGRES.items())
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS made, copied")
        for table in ("made", "copied"):
            connection.execute(f"CREATE TABLE {table} ({columns}, PRIMARY KEY (id))")
        rows = [tuple(row.values()) for row in original.to_pylist()]
        connection.cursor().executemany(f"INSERT INTO made VALUES ({', '.join(['%s'] * len(POSTGRES))})", rows)
        source = PostgresSource(conninfo, "made", "id")
        found = {"SQL|PostgreSQL|spark.read": verdicts(readers.table_of(source), original)}
        sidecar.source("made", source, parallelism=1)
        records = spark.read.format("made").load().rdd
        sink = PostgresSink(conninfo, "copied", list(POSTGRES))
        make = partial(TwoPhaseSinkCoordinator, sink)
        job = sidecar.coordinate("copied", make, parallelism=1, mode="streaming")
        sidecar.run(lambda: records.foreachPartition(job.subtask(partial(TwoPhaseSinkOperator, sink))))
        for name in POSTGRES:
            other = f"(SELECT id, {name} FROM {{}} EXCEPT SELECT id, {name} FROM {{}})".format
            different = connection.execute(f"{other('made', 'copied')} UNION ALL {other('copied', 'made')}").fetchall()
            found.setdefault("Spark's Row|PostgreSQL|writes", {})[name] = (
                f"DIFFERENT: {different}" if different else "kept"
            )
    return found


def refusal(read: Callable[[], pa.Table], words: str) -> str:
    try:
        table = read()
    except Exception as error:
        return "refused" if re.search(words, str(error), re.DOTALL) else f"DIFFERENT: {error}"
    return f"read as {table.schema.types[0]}"


def main(folder: str, turn: str, master: str, session_zone: str, worker_zone: str, conninfo: str) -> None:
    own = Path(folder, f"zones-{os.environ['TZ']}-{session_zone}-{worker_zone}".replace("/", "-"))
    own.mkdir()
    spark = start_spark(
        master,
        spark_sql_session_timeZone=session_zone,
        spark_sql_timeType_enabled="true",
        spark_executorEnv_TZ=worker_zone,
        spark_executorEnv_PYTHONPATH=os.environ["PYTHONPATH"],
    )
    try:
        frame = spark.read.parquet(f"{folder}/pyarrow/parquet").coalesce(1)
        for (tool, kind), (write, omitted) in BY_SPARK.items():
            write(frame.drop(*omitted), f"{own}/{tool}/{kind}")
        _parquet(frame.select("id", "instant"), f"{own}/refused", "INT96", "LEGACY")
        with Sidecar(spark, SidecarConfig(storage=f"{own}/storage")) as sidecar:
            readers = Readers(spark, sidecar)
            found = write_tables(spark, sidecar, Path(folder), own)
            found |= copy_in_postgres(readers, spark, sidecar, conninfo)
            found |= read_what_is_refused(readers, Path(folder), own)
            found |= read_files(readers, Path(folder), own, int(turn))
        Path(own, "found.json").write_text(json.dumps(found))
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
