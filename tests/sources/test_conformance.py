# SPDX-License-Identifier: Apache-2.0

"""The conformance suite with every source and enumerator, on real files and servers, and what it catches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from headgate.sources import (
    DiscoveringSplitEnumerator,
    FileSource,
    KafkaSource,
    PostgresSource,
    RedisStreamsSource,
    SplitEnumerator,
)
from headgate.testing import Case, SourceTarget, source_cases
from protocol.errors import RemoteProtocolError
from tests.kafka_brokers import KafkaBrokers
from tests.mutants.downward import DOWNWARD
from tests.postgres import Postgres
from tests.redis_server import RedisServer
from tests.sources.memory import DiscoveringTarget, HybridTarget, LogTarget, MemoryTarget, Splits

SCHEMA = pyarrow.schema([("number", pyarrow.int64()), ("text", pyarrow.string())])


class FilesTarget(SourceTarget):
    """Each write is a file."""

    def __init__(self, folder: Path, form: Any) -> None:
        self._root = folder
        self._form = form
        self._folders, self._files = count(), count()

    def source(self, *, bounded: bool) -> FileSource:
        every_s = None if bounded else 0.5
        return FileSource(
            str(self._folder), self._form, schema=SCHEMA, discover_every_s=every_s, batch_rows=2, split_bytes=40
        )

    def write(self, split: int, numbers: Sequence[int]) -> None:
        table = pyarrow.table([numbers, [f"n{number}" for number in numbers]], schema=SCHEMA)
        self._write(self._changed(table))

    def clear(self) -> None:
        self._folder = self._root / str(next(self._folders))
        self._folder.mkdir(parents=True)
        self._changed: Callable[[pyarrow.Table], pyarrow.Table] = lambda table: table

    def _write(self, table: pyarrow.Table) -> None:
        path = self._folder / f".{next(self._files)}"
        match self._form:
            case "parquet":
                pyarrow.parquet.write_table(table, path, row_group_size=2)
            case "csv":
                pyarrow.csv.write_csv(table, path)
            case _:
                path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        path.rename(path.with_name(f"{path.name[1:]}.{self._form}"))

    def schema_changes(self) -> Mapping[str, Callable[[], object]]:
        def change(to: Callable[[pyarrow.Table], pyarrow.Table]) -> Callable[[], None]:
            def now() -> None:
                self._changed = to
                self._write(to(pyarrow.table([[], []], schema=SCHEMA)))

            return now

        missing = {  # in JSON, what is not there is NULL
            "a column is renamed": change(lambda table: table.rename_columns(["no", "text"])),
            "a column is dropped": change(lambda table: table.drop_columns(["number"])),
        }
        return {
            **({} if self._form == "json" else missing),
            "a column is added": change(lambda table: table.append_column("more", table["text"])),
            "the columns change places": change(lambda table: table.select(["text", "number"])),
            "a number becomes a text": change(lambda table: table.set_column(0, "number", table["text"])),
            "a number becomes a double": change(
                lambda table: table.set_column(0, "number", table["number"].cast("double"))
            ),
        }


class RedisTarget(SourceTarget):
    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._client: Any = server.connect()

    def source(self, *, bounded: bool) -> RedisStreamsSource:
        schema = SCHEMA.remove(1)
        return RedisStreamsSource(self._server.url, "in:*", schema, bounded=bounded, discover_every_s=0.5, batch_rows=2)

    def write(self, split: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._client.xadd(f"in:{split}", self._fields(number))

    def clear(self) -> None:
        self._client.flushdb()
        self._fields: Callable[[int], dict[str, Any]] = lambda number: {"number": number}

    def schema_changes(self) -> Mapping[str, Callable[[], object]]:
        return {
            "a field is added": lambda: setattr(self, "_fields", lambda number: {"number": number, "more": "x"}),
            "a number becomes a text": lambda: setattr(self, "_fields", lambda number: {"number": f"n{number}"}),
        }

    def close(self) -> None:
        self._client.close()


class PostgresTarget(SourceTarget):
    """A table, and its changes."""

    def __init__(self, server: Postgres, *, changes_too: bool = False) -> None:
        self._server = server
        self._changes_too = changes_too
        self._connection = server.new_schema("suite")

    def source(self, *, bounded: bool) -> PostgresSource:
        changes = None if bounded and not self._changes_too else "suite"
        return PostgresSource(
            self._server.conninfo, "suite.t", "number", changes=changes, bounded=bounded, range_rows=3, batch_rows=2
        )

    def write(self, split: int, numbers: Sequence[int]) -> None:
        rows = [(number,) for number in numbers]
        self._connection.cursor().executemany(f"INSERT INTO suite.t ({self._key}) VALUES (%s)", rows)

    def clear(self) -> None:
        self._connection.execute("SELECT pg_terminate_backend(active_pid, 60000) FROM pg_replication_slots")
        self._connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        for (name,) in self._connection.execute("SELECT pubname FROM pg_publication").fetchall():
            self._connection.execute(f"DROP PUBLICATION {name}")
        self._connection.execute("DROP TABLE IF EXISTS suite.t, suite.before")
        self._connection.execute("CREATE TABLE suite.t (number int PRIMARY KEY, text text)")
        self._key = "number"

    def schema_changes(self) -> Mapping[str, Callable[[], object]]:
        def rename() -> None:
            self._connection.execute("ALTER TABLE suite.t RENAME number TO no")
            self._key = "no"

        def change(statement: str) -> Callable[[], object]:
            return lambda: self._connection.execute(statement)

        return {
            "a column is added": change("ALTER TABLE suite.t ADD more text"),
            "a column is dropped": change("ALTER TABLE suite.t DROP text"),
            "the key is renamed": rename,
            "the key is wider": change("ALTER TABLE suite.t ALTER number TYPE numeric(20, 3)"),
            "the table is swapped": change(
                "ALTER TABLE suite.t RENAME TO before; CREATE TABLE suite.t (number int PRIMARY KEY, text text)"
            ),
        }

    def close(self) -> None:
        self.clear()
        self._connection.close()


class KafkaTarget(SourceTarget):
    """Each split is a topic of one partition."""

    def __init__(self, brokers: KafkaBrokers) -> None:
        self._brokers = brokers
        self._names = count()

    def source(self, *, bounded: bool) -> KafkaSource:
        return KafkaSource(
            self._brokers.servers,
            f"{self._prefix}*",
            bounded=bounded,
            discover_every_s=0.5,
            batch_rows=2,
            config={"fetch.wait.max.ms": 20},
        )

    def write(self, split: int, numbers: Sequence[int]) -> None:
        if split not in self._topics:
            self._topics.add(split)
            self._brokers.create_topic(f"{self._prefix}{split}", 1)
        self._brokers.append(f"{self._prefix}{split}", 0, numbers)

    def clear(self) -> None:
        self._prefix = f"suite-{id(self)}-{next(self._names)}-"
        self._topics: set[int] = set()

    def numbers(self, output: Any) -> list[int]:
        return [json.loads(value) for value in output.column("value").to_pylist()]


TARGETS: dict[str, Callable[[], SourceTarget]] = {
    "static": MemoryTarget,
    "static, several at a time": lambda: MemoryTarget(batch_size=3),
    "discovering": DiscoveringTarget,
    "logs": LogTarget,
    "hybrid": lambda: HybridTarget(MemoryTarget(), MemoryTarget(batch_size=3), MemoryTarget()),
    "hybrid with discovery": lambda: HybridTarget(DiscoveringTarget(batch_size=2), LogTarget()),
    "hybrid in a hybrid": lambda: HybridTarget(HybridTarget(MemoryTarget(), MemoryTarget()), MemoryTarget()),
}
QUICK = ["static", "discovering", "logs", "hybrid", "hybrid with discovery", "csv", "redis"]
LONG = [
    *("static, several at a time", "hybrid in a hybrid", "json", "parquet", "files, then redis"),
    *("postgres", "postgres with changes", "kafka"),
]


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SourceTarget]:
    match request.param:
        case "redis" | "files, then redis" as name:
            redis = RedisTarget(request.getfixturevalue("redis_server"))
            yield redis if name == "redis" else HybridTarget(FilesTarget(tmp_path, "csv"), redis)
            redis.close()
        case "postgres" | "postgres with changes" as name:
            postgres = PostgresTarget(request.getfixturevalue("postgres"), changes_too=name != "postgres")
            yield postgres
            postgres.close()
        case "kafka":
            yield KafkaTarget(request.getfixturevalue("kafka"))
        case "csv" | "json" | "parquet" as form:
            yield FilesTarget(tmp_path, form)
        case name:
            yield TARGETS[name]()


@pytest.mark.parametrize("target", QUICK, indirect=True)
@pytest.mark.parametrize("case", source_cases(histories=1), ids=str)
def test_every_record_of_a_source_counts_once(case: Case[SourceTarget], target: SourceTarget) -> None:
    """H130 H132 H153 H174"""
    case.run(target)


@pytest.mark.long
@pytest.mark.parametrize("target", LONG, indirect=True)
@pytest.mark.parametrize("case", source_cases(histories=2, seed=7), ids=str)
def test_so_does_each_of_every_other_source(case: Case[SourceTarget], target: SourceTarget) -> None:
    """H130 H132 H153 H174"""
    case.run(target)


# --- sources that are wrong, and the case that says so ------------------------------------------------------------


class FromTheBeginning(Splits):
    def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
        return super().read_from(split, None)


class OneTooFar(Splits):
    def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
        for place, number in super().read_from(split, position):  # type: ignore[misc]
            yield place + 1, number


class WaitsForMore(Splits):
    def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
        while not split[1]:
            yield None
        yield from super().read_from(split, position)


class KeepsOne(Splits):
    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return states[min(states)]


class OnlyItsFirst(Splits):
    def handle_event(self, event: Any) -> None:
        super().handle_event(event)
        while len(self.splits) > 1:
            self.splits.pop()


class Dropping(DiscoveringSplitEnumerator):
    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        pass


class Drops(DiscoveringTarget):
    def enumerator(self, every_s: float | None, state: bytes | None) -> SplitEnumerator:
        return Dropping(self.splits, state, every_s=every_s)


class Forgets(DiscoveringTarget):
    def enumerator(self, every_s: float | None, state: bytes | None) -> SplitEnumerator:
        return super().enumerator(every_s, None)


class NeverLooksAgain(DiscoveringTarget):
    def enumerator(self, every_s: float | None, state: bytes | None) -> SplitEnumerator:
        return super().enumerator(every_s and 1e9, state)


class WaitsForTheFirst(DiscoveringTarget):
    def enumerator(self, every_s: float | None, state: bytes | None) -> SplitEnumerator:
        return super().enumerator(every_s if self.system else 1e9, state)


class Disheartened(DiscoveringSplitEnumerator):
    """Hands out nothing after a checkpoint has failed."""

    has_failed = False

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.has_failed = True

    async def handle_split_request(self, subtask: int) -> None:
        if self.has_failed:
            await self._context.signal_no_more_splits(subtask)
        else:
            await super().handle_split_request(subtask)


class GivesUp(DiscoveringTarget):
    def enumerator(self, every_s: float | None, state: bytes | None) -> SplitEnumerator:
        return Disheartened(self.splits, state, every_s=every_s)


class StoresLater(DiscoveringSplitEnumerator):
    """Has its states in another storage, from the completion on."""

    taken: ClassVar[dict[bytes, bytes]] = {}
    stored: ClassVar[dict[bytes, bytes]] = {}

    async def snapshot_state(self, checkpoint_id: int) -> bytes:
        name = b"%d" % checkpoint_id
        self.taken[name] = await super().snapshot_state(checkpoint_id)
        return name

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.stored[b"%d" % checkpoint_id] = self.taken[b"%d" % checkpoint_id]


class ForgetsDoubt(DiscoveringTarget):
    def enumerator(self, every_s: float | None, state: bytes | None) -> SplitEnumerator:
        return StoresLater(self.splits, None if state is None else StoresLater.stored.get(state), every_s=every_s)

    def clear(self) -> None:
        super().clear()
        StoresLater.stored.clear()


class TakesFromTheSystem(DiscoveringTarget):
    """As a queue whose items are gone when somebody has them."""

    def splits(self) -> list[Any]:
        found = super().splits()
        self.system = [[]] * len(found)
        return [split for split in found if split[1]]


class WholeLogs(LogTarget):
    """A log that was read once is known, and what has come since is not looked for."""

    def ending(self, state: bytes | None) -> SplitEnumerator:
        logs = [[log, len(numbers)] for log, numbers in enumerate(self.system)]
        return DiscoveringSplitEnumerator(lambda: logs, state, key=lambda split: str(split[0]))


class GivesNull(DiscoveringTarget):
    def numbers(self, output: Any) -> Any:
        return [None if self.changed else output]

    changed = False

    def clear(self) -> None:
        super().clear()
        self.changed = False

    def schema_changes(self) -> Mapping[str, Callable[[], object]]:
        return {"a column is renamed": lambda: setattr(self, "changed", True)}


class BreaksUp(GivesNull):
    def numbers(self, output: Any) -> Any:
        return ({True: {}, False: {"number": output}}[self.changed]["number"],)


BROKEN: dict[str, tuple[Callable[[], SourceTarget], str, str]] = {
    "ignores positions": (lambda: MemoryTarget(reader=FromTheBeginning), "a task dies", "doubled"),
    "counts one too far": (lambda: MemoryTarget(reader=OneTooFar), "the driver dies,", "lost"),
    "waits in an empty split": (lambda: MemoryTarget(reader=WaitsForMore), "empty splits", "does not end"),
    "keeps one of several states": (
        lambda: MemoryTarget(reader=KeepsOne, batch_size=2),
        "there are fewer tasks",
        "lost",
    ),
    "reads one split of several": (lambda: MemoryTarget(reader=OnlyItsFirst, batch_size=2), "many splits", "lost"),
    "drops what comes back": (Drops, "an executor is lost", "lost"),
    "forgets what was found": (Forgets, "the driver dies,", "doubled"),
    "never looks again": (NeverLooksAgain, "splits and records come later", "lost"),
    "waits for the first split": (WaitsForTheFirst, "no split", "does not end"),
    "gives up after a failure": (GivesUp, "a checkpoint fails", "lost"),
    "stores its state too late": (ForgetsDoubt, "a checkpoint is in doubt", "doubled"),
    "takes from its system": (TakesFromTheSystem, "the driver dies,", "lost"),
    "reads a log once": (WholeLogs, "a job runs every day", "lost"),
    "gives NULL": (GivesNull, "the schema changes", "other records"),
    "breaks up at another schema": (BreaksUp, "the schema changes", "KeyError"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", BROKEN)
def test_a_source_that_is_wrong_is_caught(name: str) -> None:
    make, where, words = BROKEN[name]
    with pytest.raises(AssertionError, match=words):
        run_cases(make, where)


def run_cases(make: Callable[[], SourceTarget], where: str) -> None:
    cases = [case for case in source_cases(histories=8) if where in str(case)]
    assert cases
    for case in cases:
        case.run(make())


@pytest.mark.parametrize("name", ["forgets-to-resend-down", "events-twice"])
def test_a_bug_that_loses_or_repeats_messages_is_caught(name: str) -> None:
    (mutant,) = (mutant for mutant in DOWNWARD if mutant.name == name)
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.apply(monkeypatch)
        with pytest.raises((AssertionError, RemoteProtocolError)):
            run_cases(MemoryTarget, "messages are lost")
