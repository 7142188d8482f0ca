# SPDX-License-Identifier: Apache-2.0

"""The pairs of a source and a sink that the soak tests run, and what they find in the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow
import pyarrow.parquet
from deltalake import DeltaTable

from headgate.sinks import DeltaSink, FileSink, IcebergSink, PostgresSink, RedisStreamsSink, TwoPhaseSink
from headgate.sources import FileSource, HybridSource, PostgresSource, RedisStreamsSource, Source
from tests.postgres import Postgres
from tests.redis_server import RedisServer

__all__ = ["PAIRS", "ROWS", "Outcome", "Pair", "Servers", "prepare"]

ROWS = 240
RATE = 60.0  # rows in a second
SCHEMA = pyarrow.schema([("id", pyarrow.int64()), ("name", pyarrow.string())])
PAIRS = (
    ("files", "files"),
    ("files", "postgres"),
    ("files", "delta"),
    ("redis", "redis"),
    ("redis", "prepared"),
    ("redis", "delta"),
    ("table", "redis"),
    ("table", "files"),
    ("table", "iceberg"),
    ("changes", "postgres"),
    ("changes", "redis"),
    ("hybrid", "postgres"),
)


class Outcome(Counter[str]):
    """What a run has counted: what is wrong in the target, and how often each kind of fault has struck.

    ``left`` are parts that are still prepared, ``unnamed`` files in a table's folder that no version of it names.
    ``paid twice`` are calls whose result the attempt had restored, ``over the limit`` windows with too many calls,
    ``over the budget`` calls beyond it, and ``asked twice`` questions that two attempts asked at a time.
    """

    WRONG: ClassVar[tuple[str, ...]] = (
        "missing",
        "doubled",
        "left",
        "unnamed",
        "paid twice",
        "over the limit",
        "over the budget",
        "asked twice",
    )

    @property
    def is_right(self) -> bool:
        return not any(self[name] for name in self.WRONG)

    def __str__(self) -> str:
        wrong = ", ".join(f"{name} {self[name]}" for name in self.WRONG)
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.items()) if name not in self.WRONG)
        return f"{wrong} (faults: {faults or 'none'})"


class Servers:
    """The servers of all runs."""

    def __init__(self) -> None:
        self.postgres = Postgres()
        self.redis = RedisServer()

    def close(self) -> None:
        self.postgres.close()
        self.redis.close()


@dataclass(frozen=True)
class Pair:
    """One source and one sink in one folder. The two addresses are those at which the pipeline reaches its servers."""

    source_kind: str
    sink_kind: str
    folder: str
    conninfo: str
    redis_url: str

    def source(self, *, ends: bool = True) -> Source:
        """The source. Only changes may not end. A hybrid source reads files, then a table, and then its changes."""
        match self.source_kind:
            case "files":
                return self._files()
            case "redis":
                keys = [f"in:{one}" for one in range(3)]
                url = self.redis_url
                return RedisStreamsSource(url, keys, SCHEMA, bounded=True, batch_rows=9, rate_limit_per_s=RATE)
            case "hybrid":
                return HybridSource(self._files(), self.table(ends=ends))
            case _:
                return self.table(ends=ends)

    def _files(self) -> FileSource:
        return FileSource(f"{self.folder}/in", batch_rows=9, rate_limit_per_s=RATE)

    def table(self, *, ends: bool = True) -> PostgresSource:
        """The table of the pair, with its changes unless only the table is read."""
        slot = None if self.source_kind == "table" else "soak"
        more: dict[str, Any] = {"changes": slot, "bounded": ends, "op_column": None, "lsn_column": None}
        return PostgresSource(self.conninfo, "soak.source", "id", range_rows=20, rate_limit_per_s=RATE, **more)

    def sink(self) -> TwoPhaseSink[Any]:
        columns = SCHEMA.names
        match self.sink_kind:
            case "files":
                return FileSink(f"{self.folder}/out", name="soak")
            case "redis":
                return RedisStreamsSink(self.redis_url, "out", columns, name="soak")
            case "delta":
                return DeltaSink(f"{self.folder}/table", SCHEMA, name="soak")
            case "iceberg":
                return IcebergSink(self._catalog, "soak.target", f"file://{self.folder}/table", SCHEMA, name="soak")
            case kind:
                mode: Any = "prepared" if kind == "prepared" else "staged"
                return PostgresSink(self.conninfo, "soak.target", columns, mode=mode, name="soak")

    @property
    def transform(self) -> Callable[[Iterator[Any]], Iterator[Any]]:
        return _as_lines if self.sink_kind == "files" else _as_they_are

    @property
    def servers(self) -> set[str]:
        """The servers that this pair uses."""
        used = {"files": "", "delta": "", "iceberg": "", "redis": "redis"}
        return {used.get(kind, "postgres") for kind in (self.source_kind, self.sink_kind)} - {""}

    @property
    def _catalog(self) -> dict[str, str]:
        return {"type": "sql", "uri": f"sqlite:///{self.folder}/catalog.db"}

    # --- what is in the target ------------------------------------------------------------------------------------

    def judge(self, servers: Servers) -> Outcome:
        """Compare the target with the source, and count what the sink has left there."""
        found = Counter(self.read(servers))
        outcome = Outcome()
        outcome["missing"] = ROWS - len(found.keys() & set(range(ROWS)))
        outcome["doubled"] = found.total() - len(found)
        outcome["left"] = self._left(servers)
        outcome["unnamed"] = len(self._unnamed())
        return outcome

    def read(self, servers: Servers) -> list[int]:
        match self.sink_kind:
            case "files":
                files = Path(self.folder, "out").glob("part-*")
                return [int(line) for file in files for line in file.read_text().splitlines()]
            case "redis":
                with servers.redis.connect() as client:
                    entries: Any = client.xrange("out")
                    return [int(fields["id"]) for _, fields in entries]
            case "delta":
                ids: list[int] = DeltaTable(f"{self.folder}/table").to_pyarrow_table()["id"].to_pylist()
                return ids
            case "iceberg":
                ids = self._iceberg().scan().to_arrow()["id"].to_pylist()
                return ids
            case _:
                with servers.postgres.connect() as database:
                    return [one for (one,) in database.execute("SELECT id FROM soak.target")]

    def _left(self, servers: Servers) -> int:
        match self.sink_kind:
            case "files":
                return len([one for one in Path(self.folder, "out").rglob("part-*") if ".headgate" in str(one)])
            case "redis":
                with servers.redis.connect() as client:
                    return len(list(client.scan_iter("headgate:*:staged:*")))
            case "delta" | "iceberg":
                return len(list(Path(self.folder, "table").rglob("_headgate/*/*")))  # notes of files without a commit
            case "prepared":
                return len(servers.postgres.prepared())
            case _:
                with servers.postgres.connect() as database:
                    (count,) = database.execute("SELECT count(*) FROM soak.headgate_staged_target").fetchone() or (0,)
                    return int(count)

    def _unnamed(self) -> set[str]:
        named: Iterable[str]
        match self.sink_kind:
            case "delta":
                named = DeltaTable(f"{self.folder}/table").file_uris()
            case "iceberg":
                named = self._iceberg().inspect.files()["file_path"].to_pylist()
            case _:
                return set()
        there = {path.name for path in Path(self.folder, "table").rglob("*.parquet") if "_headgate" not in path.parts}
        return there - {name.rpartition("/")[2] for name in named}

    def _iceberg(self) -> Any:
        from pyiceberg.catalog import load_catalog

        return load_catalog("headgate", **self._catalog).load_table("soak.target")


def prepare(servers: Servers, pair: Pair, *, late: bool) -> list[tuple[int, str]]:
    """Empty the servers and fill the source. Return the changes that are to be inserted later, if ``late``."""
    with servers.redis.connect() as client:
        client.flushdb()
    servers.postgres.roll_back_prepared()
    with servers.postgres.connect() as database:
        database.execute("DROP SCHEMA IF EXISTS soak CASCADE; CREATE SCHEMA soak")
        database.execute("CREATE TABLE soak.source (id bigint PRIMARY KEY, name text)")
        database.execute("CREATE TABLE soak.target (id bigint, name text)")
    rows = [(number, f"row {number}") for number in range(ROWS)]
    match pair.source_kind:
        case "files":
            write_files(pair, rows)
        case "redis":
            with servers.redis.connect() as client:
                for number, name in rows:
                    client.xadd(f"in:{number % 3}", {"id": number, "name": name})
        case "table":
            insert(servers, rows)
        case kind:
            if kind == "hybrid":
                write_files(pair, rows[: ROWS // 3])
                rows = rows[ROWS // 3 :]
            drop_slot(servers, pair)
            half = len(rows) // 2
            insert(servers, rows[:half])
            if late:
                return rows[half:]
            pair.table().create_slot()
            insert(servers, rows[half:])
    return []


def write_files(pair: Pair, rows: list[tuple[int, str]]) -> None:
    Path(pair.folder, "in").mkdir()
    for part in range(4):
        some = rows[part::4]
        table = pyarrow.table([[one[0] for one in some], [one[1] for one in some]], schema=SCHEMA)
        pyarrow.parquet.write_table(table, f"{pair.folder}/in/{part}.parquet", row_group_size=20)


def insert(servers: Servers, rows: list[tuple[int, str]]) -> None:
    with servers.postgres.connect() as database:
        database.cursor().executemany("INSERT INTO soak.source VALUES (%s, %s)", rows)


def drop_slot(servers: Servers, pair: Pair) -> None:
    """Drop the slot of a pair that reads changes, past the line to the server."""
    if pair.source_kind in ("changes", "hybrid"):
        Pair(pair.source_kind, pair.sink_kind, pair.folder, servers.postgres.conninfo, "").table().drop_slot()


def _as_lines(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[str]:
    for batch in batches:
        for number in batch["id"].to_pylist():
            yield str(number)


def _as_they_are(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    yield from batches
