# SPDX-License-Identifier: Apache-2.0

"""Jobs that fail in each way in which a setting with a password can, with marked passwords in all settings.

Reads the settings as JSON from standard input, so they are in no argument and no variable of the environment. Shows
what a user can look at, after each failure: the exception, the status, what ``top`` shows. Spark writes its event log.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import psycopg
import pyarrow
from pyspark.sql import SparkSession

from headgate import NO_RESTART, CheckpointConfig, Sidecar, SidecarConfig, StorageDetails, Watching
from headgate.sinks import (
    DeltaSink,
    FileSink,
    IcebergSink,
    PostgresSink,
    RedisStreamsSink,
    TwoPhaseSink,
    TwoPhaseSinkCoordinator,
    TwoPhaseSinkOperator,
)
from headgate.sources import FileSource, PostgresSource, RedisStreamsSource, Source
from spark_bridge.standalone.top import lines_of

SCHEMA = pyarrow.schema([("id", pyarrow.int64())])
OFTEN = CheckpointConfig(interval_s=0.05, tolerated_failures=1000)


class Rows(TwoPhaseSinkOperator):
    """Writes numbers as lines of files, or as rows."""

    def __init__(self, sink: TwoPhaseSink[Any], lines: bool) -> None:
        super().__init__(sink)
        self._lines = lines

    def encode(self, record: int) -> Any:
        return str(record) if self._lines else (record,)


class Failures:
    """Every way to fail. Each takes what is missing or wrong away only when the driver's half has begun."""

    def __init__(self, spark: SparkSession, sidecar: Sidecar, asked: dict[str, Any]) -> None:
        self.spark = spark
        self.sidecar = sidecar
        self.asked = asked

    def write(self, sink: Any, spoil: Callable[[], Any] = lambda: None) -> None:
        """``spoil`` is called before the tasks begin."""
        name = f"sink-{id(sink)}"
        job = self.sidecar.coordinate(
            name, TwoPhaseSinkCoordinator(sink), parallelism=1, mode="streaming", checkpoint=OFTEN
        )
        spoil()
        rows = self.spark.sparkContext.parallelize(range(3), 1)
        tasks = rows.mapPartitions(job.subtask(Rows, sink, isinstance(sink, FileSink)))
        self.sidecar.run(tasks.collect, restart=NO_RESTART)

    def read(self, source: Source, spoil: Callable[[], Any] = lambda: None) -> None:
        name = f"source_{id(source)}"
        self.sidecar.source(name, source, parallelism=1, schema="id long")
        spoil()
        self.spark.read.format(name).load().collect()

    def all(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        asked, write, read = self.asked, self.write, self.read
        for which in ("wrong password", "refused"):
            conninfo, redis = asked[f"conninfo, {which}"], asked[f"redis, {which}"]
            yield f"PostgreSQL sink, {which}", partial(write, PostgresSink(conninfo, "kept", ["id"]))
            yield f"PostgreSQL source, {which}", partial(read, PostgresSource(conninfo, "kept", "id"))
            yield f"Redis sink, {which}", partial(write, RedisStreamsSink(redis, "s", ["id"]))
            yield f"Redis source, {which}", partial(read, RedisStreamsSource(redis, ["s"], SCHEMA, bounded=True))
        right = asked["conninfo"]
        yield "PostgreSQL sink, missing table", partial(write, PostgresSink(right, "nowhere", ["id"]))
        yield "PostgreSQL source, missing table", partial(read, PostgresSource(right, "nowhere", "id"))
        change = partial(self.sql, "ALTER ROLE me PASSWORD 'another'")
        yield "PostgreSQL sink, password changed", partial(write, PostgresSink(right, "kept", ["id"]), change)
        files = FileSink("s3://x/x", options=asked["denying"])  # a bucket that is gone would be made again
        yield "files, denied", partial(write, files)
        for which, options in (("bucket gone", asked["store"]), ("denied", asked["denying"])):
            spoil: list[Callable[[], Any]] = [lambda: None] * len(BUCKETS)
            if which == "bucket gone":
                store = fsspec.filesystem("s3", **options)
                for bucket in BUCKETS:
                    store.mkdir(bucket)
                spoil = [partial(store.rm, bucket, recursive=True) for bucket in BUCKETS]
            names = {"aws_" + theirs: options[ours] for theirs, ours in AWS.items()}
            delta = {**names, "aws_allow_http": "true", "aws_region": "us-east-1", "retry_timeout": "1s"}
            tables = {"s3." + theirs: options[ours] for theirs, ours in ICEBERG.items()}
            catalog = {
                "type": "sql",
                "uri": f"sqlite:///{asked['folder']}/{which}.db",
                **tables,
                "s3.region": "us-east-1",
            }
            yield (
                f"Delta, {which}",
                partial(write, DeltaSink("s3://one/x", SCHEMA, options=options, storage_options=delta), spoil[0]),
            )
            iceberg = IcebergSink(catalog, "n.t", "s3://two/x", SCHEMA, options=options)
            yield f"Iceberg, {which}", partial(write, iceberg, spoil[1])
            source = FileSource("s3://three/x", "json", schema=SCHEMA, options=options)
            yield f"source, {which}", partial(read, source, spoil[2])

    def sql(self, text: str) -> None:
        with psycopg.connect(self.asked["owner"], autocommit=True) as connection:
            connection.execute(text.encode())


BUCKETS = ("one", "two", "three")
AWS = {"access_key_id": "key", "secret_access_key": "secret", "session_token": "token", "endpoint_url": "endpoint_url"}
ICEBERG = {"access-key-id": "key", "secret-access-key": "secret", "session-token": "token", "endpoint": "endpoint_url"}


REASONS = {
    "wrong password": "password authentication failed|invalid username-password",
    "refused": "[Rr]efused",
    "missing table": "there is no table",
    "password changed": "password authentication failed",
    "bucket gone": "NoSuchBucket|not exist|No files in log|there is nothing at|FileNotFound",
    "denied": "text left out, because a part of|ACCESS_DENIED|Forbidden",
}
"""What is in the errors of each kind: another one would not show what this one says."""


def show(sidecar: Sidecar, token: str) -> None:
    """What anybody who may look can see now."""
    host, port = sidecar.status_address or ("", 0)
    for path in ("status.json", "metrics", "explain", ""):
        request = urllib.request.Request(f"http://{host}:{port}/{path}", headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                print(answer.read().decode())
        except OSError as error:
            print(path, error)
    print("\n".join(lines_of(sidecar.status(), 200, subtasks_max=100)), sidecar.explain(), repr(sidecar.status()))


def attempt(name: str, fail: Callable[[], Any]) -> None:
    print(f"--- {name}", flush=True)
    try:
        fail()
    except Exception as error:
        said = "".join(traceback.format_exception(error))
        print(f"{said}{error}{error!r}{error.args!r}")
        if re.search(REASONS[name.partition(", ")[2]], said):
            print(f"--- failed: {name}")


def main() -> None:
    asked = json.load(sys.stdin)
    folder = Path(asked["folder"])
    (folder / "events").mkdir()
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (folder / "events").as_uri(),
        "spark.eventLog.compress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.showConsoleProgress": "false",
        "spark.ui.port": "0",
    }
    builder = SparkSession.Builder().master("local[2,1]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("INFO")
    config = SidecarConfig(
        storage="s3://kept/x",
        storage_details=StorageDetails(options=asked["store"]),
        watching=Watching(status_port=0, status_token=asked["status token"], trace=str(folder / "trace.json")),
    )
    print(config)
    with Sidecar(spark, config) as sidecar:
        print(sidecar)
        for name, fail in Failures(spark, sidecar, asked).all():
            attempt(name, fail)
            show(sidecar, asked["status token"])
    denied = Sidecar(spark, replace(config, storage_details=StorageDetails(options=asked["denying"])))
    attempt("storage, denied", denied.__enter__)
    spark.stop()
    print("--- the end")


if __name__ == "__main__":
    main()
