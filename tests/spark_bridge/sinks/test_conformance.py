# SPDX-License-Identifier: Apache-2.0

"""The conformance suite with every sink, on real files and servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from math import inf
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
from headgate.testing import Case, SinkTarget, sink_cases
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.postgres.task import PostgresWriter
from spark_bridge.sinks.two_phase.errors import SinkMisused
from tests.postgres import Postgres
from tests.redis_server import RedisServer
from tests.spark_bridge.sinks.files.kit import files_under, new_url, visible

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

    def other(self, kind: str = "") -> SinkTarget:
        return FilesTarget()

    def leftovers(self, name: str) -> list[str]:
        return [path for path in files_under(self._url) if f".headgate-{name}/part" in path]


class PostgresTarget(SinkTarget):
    def __init__(self, server: Postgres, table: str = "rows", connection: Any = None, **settings: Any) -> None:
        self._server = server
        self._settings = settings
        self._connection = connection or server.new_schema("suite")
        self._table = f"suite.{table}"
        self._others: list[str] = []
        if connection is None:
            self._create(self._table, "bigint")

    def _create(self, table: str, kind: str) -> None:
        key = f", PRIMARY KEY ({', '.join(self._settings['key'])})" if "key" in self._settings else ""
        self._connection.execute(f"CREATE TABLE {table} (subtask bigint, number {kind}{key})")

    def sink(self, name: str) -> PostgresSink:
        return PostgresSink(self._server.conninfo, self._table, COLUMNS, name=name, **self._settings)

    def read(self) -> list[tuple[int, int]]:
        return [row[:2] for row in self._connection.execute(f"SELECT * FROM {self._table}")]

    def clear(self) -> None:
        self._server.roll_back_prepared()
        for table in self._others:
            self._connection.execute(f"DROP TABLE {table}")
        self._others.clear()
        for table in ("rows", "headgate_commits", "headgate_staged_rows"):
            self._connection.execute(f"DELETE FROM suite.{table}" if self._exists(table) else "SELECT 1")

    def other(self, kind: str = "") -> SinkTarget:
        name = f"other_{len(self._others)}"
        settings = {**self._settings, **({"key": ["subtask"]} if kind and "key" in self._settings else {})}
        found = PostgresTarget(self._server, name, self._connection, **settings)
        found._create(f"suite.{name}", kind or "bigint")
        self._others.append(f"suite.{name}")
        return found

    def types(self) -> Mapping[str, Sequence[Any]]:
        last = datetime(9999, 12, 31, 23, 59, 59, 999999)  # noqa: DTZ001 - that is the type
        return {
            "smallint": [-(2**15)],
            "bigint": [2**63 - 1],
            "numeric(10, 2)": [Decimal("-12345678.90")],
            "numeric": [Decimal("1E-30"), 10**100],
            "double precision": [0.1, 5e-324, inf],
            "boolean": [True],
            "date": [date(1, 1, 1)],
            "timestamp": [last],
            "timestamptz": [last.replace(tzinfo=UTC)],
        }

    def schema_changes(self) -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
        def run(statement: str) -> Callable[[], object]:
            return lambda: self._connection.execute(f"ALTER TABLE {self._table} {statement}")

        if self._settings.get("mode") == "prepared":
            return {}  # a table with prepared rows is locked
        return {
            "a column is added": (run("ADD more text"), run("DROP more")),
            "a column is renamed": (run("RENAME number TO no"), run("RENAME no TO number")),
            "a column is wider": (run("ALTER number TYPE numeric"), run("ALTER number TYPE bigint")),
            "a column is narrower": (run("ALTER number TYPE smallint"), run("ALTER number TYPE bigint")),
            "a rule is added": (run("ADD CONSTRAINT few CHECK (number < 2) NOT VALID"), run("DROP CONSTRAINT few")),
        }

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


@pytest.mark.parametrize("setting", [None, "appendonly no", "appendfsync everysec"])
def test_a_redis_server_that_may_lose_what_it_has_confirmed_is_told_in_the_log(
    redis_server: RedisServer, setting: str | None
) -> None:
    """H170: exactly once depends on it, so the sink looks at the start."""
    client: Any = redis.Redis.from_url(redis_server.url)
    name, value = (setting or "appendonly yes").split()
    before = client.config_get(name)[name]
    context = SinkCommitterContext("out", "out", structlog.get_logger())
    committer = RedisStreamsSink(redis_server.url, "rows", COLUMNS).committer(context)
    client.config_set(name, value)
    try:
        with structlog.testing.capture_logs() as logs:
            committer.open()
    finally:
        committer.close()
        client.config_set(name, before)
    told = [line["setting"] for line in logs if line["event"] == "Redis may lose what it has confirmed"]
    assert told == ([] if setting is None else [setting])


class RedisTarget(SinkTarget):
    def __init__(self, server: RedisServer, stream: str = "rows") -> None:
        self._server = server
        self._client = server.connect()
        self._stream = stream

    def sink(self, name: str) -> RedisStreamsSink:
        return RedisStreamsSink(self._server.url, self._stream, COLUMNS, name=name)

    def other(self, kind: str = "") -> SinkTarget:
        self._beside = RedisTarget(self._server, "other")
        return self._beside

    def read(self) -> list[tuple[int, int]]:
        entries: Any = self._client.xrange(self._stream)
        return [(int(fields["subtask"]), int(fields["number"])) for _, fields in entries]

    def clear(self) -> None:
        self._client.flushdb()

    def close(self) -> None:
        self._client.close()


KINDS: dict[str, tuple[pyarrow.DataType, list[Any]]] = {
    "int8": (pyarrow.int8(), [-128]),
    "int64": (pyarrow.int64(), [2**63 - 1]),
    "uint64": (pyarrow.uint64(), [2**64 - 1]),
    "double": (pyarrow.float64(), [0.1, 5e-324, inf]),
    "decimal": (pyarrow.decimal128(10, 2), [Decimal("-12345678.90")]),
    "bool": (pyarrow.bool_(), [True]),
    "string": (pyarrow.string(), ["\x01\n\\N"]),
    "binary": (pyarrow.binary(), [b"\x00\xff"]),
    "date": (pyarrow.date32(), [date(1, 1, 1)]),
    "time without a zone": (pyarrow.timestamp("us"), [ZONED.replace(tzinfo=None)]),
    "instant": (pyarrow.timestamp("us", "UTC"), [datetime.max.replace(tzinfo=UTC)]),
}


class TableTarget(SinkTarget):
    """A table in a separate folder, and another one for each history."""

    def __init__(self, folder: Path, kind: str = "int64") -> None:
        self._folder = folder
        self._made = 0
        self._others = 0
        self._schema = pyarrow.schema([("subtask", pyarrow.int64()), ("number", KINDS[kind][0])])

    @property
    def _url(self) -> str:
        return str(self._folder / str(self._made))

    def clear(self) -> None:
        self._made += 1

    def other(self, kind: str = "") -> SinkTarget:
        self._others += 1
        return type(self)(self._folder / f"other{self._others}", kind or "int64")

    def types(self) -> Mapping[str, Sequence[Any]]:
        return {kind: promised for kind, (_, promised) in KINDS.items()}


class DeltaTarget(TableTarget):
    def sink(self, name: str) -> DeltaSink:
        return DeltaSink(self._url, self._schema, name=name)

    def read(self) -> list[tuple[int, int]]:
        if not DeltaTable.is_deltatable(self._url):
            return []
        table = DeltaTable(self._url).to_pyarrow_table()
        return list(zip(table["subtask"].to_pylist(), table["number"].to_pylist(), strict=True))

    def schema_changes(self) -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
        def add_rule() -> None:
            DeltaTable(self._url).alter.add_constraint({"few": "number < 2"})

        return {"a rule is added": (add_rule, lambda: DeltaTable(self._url).alter.drop_constraint("few"))}


class IcebergTarget(TableTarget):
    def __init__(self, folder: Path, kind: str = "int64") -> None:
        super().__init__(folder, kind)
        folder.mkdir(exist_ok=True)
        self._catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
        self._reader = load_catalog("headgate", **self._catalog)

    def sink(self, name: str) -> IcebergSink:
        return IcebergSink(self._catalog, f"suite.rows{self._made}", f"file://{self._url}", self._schema, name=name)

    def read(self) -> list[tuple[int, int]]:
        if not self._reader.table_exists(f"suite.rows{self._made}"):
            return []
        table = self._reader.load_table(f"suite.rows{self._made}").scan().to_arrow()
        names = table.column_names
        return list(zip(table[names[0]].to_pylist(), table[names[1]].to_pylist(), strict=True))

    def schema_changes(self) -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
        def rename(before: str, now: str) -> Callable[[], None]:
            def run() -> None:
                with self._reader.load_table(f"suite.rows{self._made}").update_schema() as update:
                    update.rename_column(before, now)

            return run

        return {"a column is renamed": (rename("number", "no"), rename("no", "number"))}


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


@pytest.mark.parametrize(
    ("target", "whole"),
    [
        ("files", False),
        ("postgres staged", True),
        ("postgres by key", True),
        ("postgres prepared", False),
        ("redis", True),
        ("delta", True),
        ("iceberg", True),
    ],
    indirect=["target"],
)
def test_readers_see_whole_checkpoints_where_the_guide_says_so(target: SinkTarget, whole: bool) -> None:  # H141
    """The suite holds a sink to what it declares, so a sink that declares less would pass."""
    assert target.sink("one").atomic is whole


@pytest.mark.parametrize("target", QUICK, indirect=True)
@pytest.mark.parametrize("case", sink_cases(histories=1), ids=str)
def test_a_sink_keeps_the_promises_of_the_pattern(
    case: Case[SinkTarget], target: SinkTarget
) -> None:  # H31, H64, H83, H140, H141
    case.run(target)


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "case"), [pytest.param(*pair, id=f"{pair[1]}-{pair[0]}") for pair in LONG], indirect=["target"]
)
def test_so_does_each_other_sink(case: Case[SinkTarget], target: SinkTarget) -> None:  # H31, H64, H83, H140, H141
    case.run(target)
