# SPDX-License-Identifier: Apache-2.0

"""The conformance suite with every sink, on real files and servers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
import redis
import structlog
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyspark.sql import Row

from headgate.sinks import (
    DeltaSink,
    IcebergSink,
    PostgresSink,
    RedisStreamsSink,
    SinkCommitterContext,
    SinkWriterContext,
)
from headgate.testing import SinkCase, SinkTarget, sink_cases
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.postgres.task import PostgresWriter
from spark_bridge.sinks.two_phase.errors import SinkMisused
from tests.postgres import Postgres
from tests.redis_server import RedisServer
from tests.spark_bridge.sinks.files.kit import files_under, new_url, visible

SCHEMA = pyarrow.schema([("subtask", pyarrow.int64()), ("number", pyarrow.int64())])
COLUMNS = ["subtask", "number"]


class FilesTarget(SinkTarget):
    def __init__(self) -> None:
        self._url = new_url()

    def sink(self, name: str) -> FileSink:
        return FileSink(self._url, name=name)

    def record(self, subtask: int, number: int) -> str:
        return f"{subtask}:{number}"

    def read(self) -> list[tuple[int, int]]:
        rows = b"".join(content for _, content in sorted(visible(self._url).items())).decode().splitlines()
        return [(int(subtask), int(number)) for subtask, number in (row.split(":") for row in rows)]

    def clear(self) -> None:
        self._url = new_url()

    def leftovers(self, name: str) -> list[str]:
        return [path for path in files_under(self._url) if f".headgate-{name}/part" in path]


class PostgresTarget(SinkTarget):
    def __init__(self, server: Postgres, **settings: Any) -> None:
        self._server = server
        self._settings = settings
        self._connection = server.new_schema("suite")
        key = ", PRIMARY KEY (subtask, number)" if "key" in settings else ""
        self._connection.execute(f"CREATE TABLE suite.rows (subtask bigint, number bigint{key})")

    def sink(self, name: str) -> PostgresSink:
        return PostgresSink(self._server.conninfo, "suite.rows", COLUMNS, name=name, **self._settings)

    def read(self) -> list[tuple[int, int]]:
        return [(subtask, number) for subtask, number in self._connection.execute("SELECT * FROM suite.rows")]

    def clear(self) -> None:
        self._server.roll_back_prepared()
        for table in ("rows", "headgate_commits", "headgate_staged_rows"):
            self._connection.execute(f"DELETE FROM suite.{table}" if self._exists(table) else "SELECT 1")

    def kill(self, writer: Any) -> None:
        assert isinstance(writer, PostgresWriter)
        if writer._connection is not None:
            writer._connection.close()

    def close(self) -> None:
        self._connection.close()

    def _exists(self, table: str) -> bool:
        found = self._connection.execute("SELECT to_regclass(%s)", (f"suite.{table}",)).fetchone()
        return found is not None and found[0] is not None


def test_a_row_with_a_lone_surrogate_is_named_with_its_column_before_redis_has_it(redis_server: RedisServer) -> None:
    writer = RedisStreamsSink(redis_server.url, "rows", COLUMNS).writer(SinkWriterContext("out", 0, 0))
    columns = COLUMNS[1:]
    row = [1, *("\ud800" for _ in columns)]
    with pytest.raises(
        ValueError, match=rf"column '{columns[0]}' of the row .* cannot be written: it has a lone"
    ):  # H171
        writer.write(row)
    assert not redis_server.connect().keys("headgate:{rows}:*:out:*")
    writer.close()


ZONED = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
FORMS: list[tuple[Any, str | bytes]] = [
    (Decimal("1.20"), b"1.20"),
    (Decimal("1E+3"), b"1000"),
    (ZONED, b"2024-05-06 07:08:09.123456+00:00"),
    (ZONED.replace(tzinfo=None), b"2024-05-06 07:08:09.123456"),
    (ZONED.date(), b"2024-05-06"),
    (ZONED.time(), b"07:08:09.123456"),
    (bytearray(b"a\xff"), b"a\xff"),
    (memoryview(b"a\xff"), b"a\xff"),
    (numpy.int64(5), b"5"),
    (True, b"true"),
    (Row(price=Decimal("1.20"), at=[ZONED.date()]), b'{"price": "1.20", "at": ["2024-05-06"]}'),
    ([Row(a=1), {2: None}], b'[{"a": 1}, {"2": null}]'),
]


def written(server: RedisServer, rows: list[Any], columns: list[str]) -> list[Any]:
    sink = RedisStreamsSink(server.url, "forms", columns)
    writer = sink.writer(SinkWriterContext("out", 0, 0))
    for row in rows:
        writer.write(row)
    try:
        parts = writer.prepare()
    finally:
        writer.close()
    committer = sink.committer(SinkCommitterContext("out", "out", structlog.get_logger()))
    committer.open()
    committer.commit(parts)
    committer.close()
    client: Any = redis.Redis.from_url(server.url)
    with client:
        found = [fields for _, fields in client.xrange("forms")]
        client.flushdb()
    return found


def test_values_reach_redis_in_the_documented_form(redis_server: RedisServer) -> None:  # H171
    found = written(redis_server, [[value] for value, _ in FORMS], ["c"])
    assert [fields[b"c"] for fields in found] == [form for _, form in FORMS]


@pytest.mark.parametrize("value", [[b"x"], Row(a=bytearray(b"x")), {(1, 2): 3}, {1, 2}, object()])
def test_a_value_without_a_text_is_refused_with_its_column_before_redis_has_it(
    redis_server: RedisServer, value: Any
) -> None:  # H171
    with pytest.raises(ValueError, match=r"column 'c' of the row .* cannot be written"):
        written(redis_server, [[1, 1], [2, value]], ["id", "c"])
    assert not redis_server.connect().keys("headgate:{forms}:*")


def test_as_many_columns_as_a_command_takes_are_written_and_more_refused(redis_server: RedisServer) -> None:  # H170
    names = [f"c{number}" for number in range(3_900)]
    (fields,) = written(redis_server, [[*range(3_900)]], names)
    assert len(fields) == 3_900
    with pytest.raises(SinkMisused, match=r"at most 3,900 columns.*'last'"):
        RedisStreamsSink(redis_server.url, "forms", [*names, "last"])


class RedisTarget(SinkTarget):
    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._client = server.connect()

    def sink(self, name: str) -> RedisStreamsSink:
        return RedisStreamsSink(self._server.url, "rows", COLUMNS, name=name)

    def read(self) -> list[tuple[int, int]]:
        entries: Any = self._client.xrange("rows")
        return [(int(fields["subtask"]), int(fields["number"])) for _, fields in entries]

    def clear(self) -> None:
        self._client.flushdb()

    def close(self) -> None:
        self._client.close()


class DeltaTarget(SinkTarget):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0

    @property
    def _url(self) -> str:
        return str(self._folder / str(self._made))

    def sink(self, name: str) -> DeltaSink:
        return DeltaSink(self._url, SCHEMA, name=name)

    def read(self) -> list[tuple[int, int]]:
        if not DeltaTable.is_deltatable(self._url):
            return []
        table = DeltaTable(self._url).to_pyarrow_table()
        return list(zip(table["subtask"].to_pylist(), table["number"].to_pylist(), strict=True))

    def clear(self) -> None:
        self._made += 1


class IcebergTarget(SinkTarget):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0
        self._catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
        self._reader = load_catalog("headgate", **self._catalog)

    def sink(self, name: str) -> IcebergSink:
        location = f"file://{self._folder}/{self._made}"
        return IcebergSink(self._catalog, f"suite.rows{self._made}", location, SCHEMA, name=name)

    def read(self) -> list[tuple[int, int]]:
        if not self._reader.table_exists(f"suite.rows{self._made}"):
            return []
        table = self._reader.load_table(f"suite.rows{self._made}").scan().to_arrow()
        return list(zip(table["subtask"].to_pylist(), table["number"].to_pylist(), strict=True))

    def clear(self) -> None:
        self._made += 1


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkTarget]:
    match request.param:
        case "files":
            yield FilesTarget()
        case "delta":
            yield DeltaTarget(tmp_path)
        case "iceberg":
            yield IcebergTarget(tmp_path)
        case "redis":
            redis_target = RedisTarget(request.getfixturevalue("redis_server"))
            yield redis_target
            redis_target.close()
        case mode:
            settings: dict[str, Any] = {"mode": "prepared"} if mode == "postgres prepared" else {}
            settings |= {"key": COLUMNS} if mode == "postgres by key" else {}
            target = PostgresTarget(request.getfixturevalue("postgres"), **settings)
            yield target
            target.close()


QUICK = ["files", "postgres staged", "redis", "delta"]
LONG = [
    *(
        (target, case)
        for target in ("postgres prepared", "postgres by key")
        for case in sink_cases(histories=2, seed=7)
    ),
    *(("iceberg", case) for case in sink_cases(histories=1)),
]


@pytest.mark.parametrize("target", QUICK, indirect=True)
@pytest.mark.parametrize("case", sink_cases(histories=1), ids=str)
def test_a_sink_keeps_the_promises_of_the_pattern(
    case: SinkCase, target: SinkTarget
) -> None:  # H31, H64, H83, H140, H141
    case.run(target)


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "case"), [pytest.param(*pair, id=f"{pair[1]}-{pair[0]}") for pair in LONG], indirect=["target"]
)
def test_so_does_each_other_sink(case: SinkCase, target: SinkTarget) -> None:  # H31, H64, H83, H140, H141
    case.run(target)
