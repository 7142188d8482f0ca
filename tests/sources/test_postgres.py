# SPDX-License-Identifier: Apache-2.0

"""A PostgreSQL table and its changes as a source, read from a real server while the table changes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow
import pytest

from headgate import CheckpointConfig, chain
from headgate.errors import SourceDataLost
from headgate.sinks import PostgresSink
from headgate.sources import PostgresSource
from headgate.testing import running_operator
from protocol.barrier_tracker import CompletedCheckpoint
from spark_bridge.sources.errors import SourceBlocked, SourceUnreachable
from spark_bridge.sources.postgres import driver
from spark_bridge.sources.postgres.ranges import unpack_ranges
from spark_bridge.sources.postgres.task import PostgresReader, _Snapshot, range_read_event
from tests.postgres import Postgres
from tests.sources.incarnations import incarnation_of

pytestmark = pytest.mark.anyio

DEATHS = 10
STREAMING: dict[str, Any] = {"mode": "streaming", "checkpoint": CheckpointConfig(tolerated_failures=9)}


@pytest.fixture
def database(postgres: Postgres) -> Iterator[psycopg.Connection]:
    with postgres.new_schema("src") as connection:
        yield connection
        for (slot,) in connection.execute("SELECT slot_name FROM pg_replication_slots").fetchall():
            connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        for (name,) in connection.execute("SELECT pubname FROM pg_publication").fetchall():
            connection.execute(f"DROP PUBLICATION {name}")


def rows(source: PostgresSource, split: Any, position: Any = None) -> list[dict[str, Any]]:
    make: Any = source.operator
    reader: PostgresReader = make()

    class Context:
        def send_event(self, event: Any) -> None:
            """Nobody is told."""

    reader.context = Context()  # type: ignore[assignment]
    try:
        found = [item for item in reader.read_from(split, position) if item is not None]
        return [row for _, batch in found for row in batch.to_pylist()]
    finally:
        reader.close()


def test_the_ranges_of_a_table_have_each_row_once(postgres: Postgres, database: psycopg.Connection) -> None:
    database.execute("CREATE TABLE src.t (id bigint PRIMARY KEY, name text)")
    database.execute("INSERT INTO src.t SELECT 3 * one, 'n' || one FROM generate_series(-10, 12) one")
    source = PostgresSource(postgres.conninfo, "src.t", "id", range_rows=5)
    splits = list(source.ranges())
    assert len(splits) == 5
    database.execute("INSERT INTO src.t VALUES (1000, 'late')")
    found = [row for split in splits for row in rows(source, split)]
    assert found == [{"id": 3 * one, "name": f"n{one}"} for one in range(-10, 13)] + [{"id": 1000, "name": "late"}]


def test_values_keep_their_types_in_the_table_and_in_its_changes(
    postgres: Postgres, database: psycopg.Connection
) -> None:
    database.execute(
        "CREATE TABLE src.t (id uuid PRIMARY KEY, small smallint, real_ double precision, yes boolean, raw bytea, "
        "day date, at timestamptz, local_ timestamp, amount numeric(12, 2), free numeric, doc jsonb, list int[])"
    )
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="types", bounded=True)
    source.create_slot()
    database.execute(
        "INSERT INTO src.t VALUES ('6ecd8c99-4036-403d-bf84-cf8400f67836', -7, 1.5, true, '\\x00ff', '2024-02-29', "
        "'2024-02-29 12:30:00.25+02', '2024-02-29 12:30', 1234.50, 1e30, '{\"a\": 1}', '{1,2}')"
    )
    database.execute("INSERT INTO src.t (id) VALUES ('6ecd8c99-4036-403d-bf84-cf8400f67837')")
    (split,) = source.ranges()
    copied = rows(source, split)
    changed = rows(source, ["changes", []])
    assert [{**row, "op": "r", "lsn": 0} for row in changed] == copied
    assert copied[0]["amount"].as_tuple().exponent == -2
    assert [str(copied[0][one]) for one in ("at", "raw", "yes")] == [
        "2024-02-29 10:30:00.250000+00:00",
        repr(b"\x00\xff"),
        "True",
    ]
    assert set(copied[1].values()) == {None, "6ecd8c99-4036-403d-bf84-cf8400f67837", "r", 0}


def test_updates_deletes_and_changed_keys_are_rows(postgres: Postgres, database: psycopg.Connection) -> None:
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY, name text); CREATE TABLE src.other (id int)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="ops", bounded=True, lsn_column=None)
    source.create_slot()
    database.execute("INSERT INTO src.t VALUES (1, 'a'), (2, 'b'); INSERT INTO src.other VALUES (1)")
    database.execute("UPDATE src.t SET name = 'c' WHERE id = 1")
    database.execute("UPDATE src.t SET id = 5 WHERE id = 2")
    database.execute("DELETE FROM src.t WHERE id = 1")
    with database.transaction(force_rollback=True):
        database.execute("DELETE FROM src.t")
    database.execute("TRUNCATE src.t")
    found = rows(source, ["changes", []])
    assert [(row["op"], row["id"], row["name"]) for row in found] == [
        ("i", 1, "a"),
        ("i", 2, "b"),
        ("u", 1, "c"),
        ("d", 2, None),
        ("i", 5, "b"),
        ("d", 1, None),
        ("t", None, None),
    ]


def test_a_large_value_that_is_not_sent_says_what_to_do(postgres: Postgres, database: psycopg.Connection) -> None:
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY, n int, doc text)")
    database.execute("ALTER TABLE src.t ALTER doc SET STORAGE EXTERNAL")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="toast", bounded=True)
    source.create_slot()
    database.execute("INSERT INTO src.t VALUES (1, 1, repeat('x', 100000))")
    database.execute("UPDATE src.t SET n = 2")
    with pytest.raises(SourceDataLost, match="REPLICA IDENTITY FULL"):
        rows(source, ["changes", []])
    source.drop_slot()
    source.create_slot()
    database.execute("ALTER TABLE src.t REPLICA IDENTITY FULL")
    database.execute("UPDATE src.t SET n = 3")
    (row,) = rows(source, ["changes", []])
    assert (row["n"], len(row["doc"])) == (3, 100000)


def test_a_slot_that_is_gone_or_ahead_is_an_error(postgres: Postgres, database: psycopg.Connection) -> None:
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="lost", bounded=True)
    with pytest.raises(SourceDataLost, match="is gone"):
        rows(source, ["changes", []])
    source.create_slot()
    with pytest.raises(SourceDataLost, match="has moved on"):
        rows(source, ["changes", []], 1)


def test_a_transaction_that_does_not_end_is_named_instead_of_waited_for(
    postgres: Postgres, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "SLOT_TIMEOUT_S", 0.5)
    database.execute("CREATE TABLE src.things (id int PRIMARY KEY)")
    source = PostgresSource(postgres.conninfo, "src.things", "id", changes="things_slot")
    with psycopg.connect(postgres.conninfo, application_name="forgotten") as other:
        other.execute("INSERT INTO src.things VALUES (7)")
        with pytest.raises(SourceBlocked, match=rf"that of process {other.info.backend_pid} \(forgotten\).*terminate"):
            source.create_slot()
        other.execute("PREPARE TRANSACTION 'left behind'")
        with pytest.raises(SourceBlocked, match=r"'left behind' in 'postgres', prepared \(end it with ROLLBACK PREP"):
            source.create_slot()
    database.execute("ROLLBACK PREPARED 'left behind'")
    source.create_slot()
    source.drop_slot()


def test_a_snapshot_shows_what_was_committed_before_it() -> None:
    snapshot = _Snapshot.parse("10:20:12,15")
    assert [xid for xid in range(8, 22) if snapshot.shows(xid)] == [8, 9, 10, 11, 13, 14, 16, 17, 18, 19]
    beyond = _Snapshot.parse(f"{(1 << 32) + 5}:{(1 << 32) + 5}:")
    assert beyond.shows((1 << 32) - 1), "of the epoch before"
    assert beyond.shows(4)
    assert not beyond.shows(5)
    assert not _Snapshot.parse(f"{(1 << 32) - 2}:{(1 << 32) - 2}:").shows(1), "of the epoch after"


def test_wrong_settings_say_what_is_wrong(postgres: Postgres, database: psycopg.Connection) -> None:
    database.execute("CREATE TABLE src.t (id text PRIMARY KEY)")
    for table, key, text in (("src.no", "id", "no table"), ("src.t", "x", "no columns"), ("src.t", "id", "is a text")):
        with pytest.raises(ValueError, match=text):
            _ = PostgresSource(postgres.conninfo, table, key).schema
    with pytest.raises(ValueError, match="changes must be the name of a slot, of lower-case letters"):
        PostgresSource(postgres.conninfo, "src.t", "id", changes="No-Slot")


class Busy:
    """Changes a table at random. Each change of a key raises its version by one."""

    def __init__(self, database: psycopg.Connection, seed: int) -> None:
        self.chance = random.Random(seed)
        self.database = database
        self.versions: dict[int, int] = {}
        database.execute("CREATE TABLE src.t (id int PRIMARY KEY, version int)")
        database.execute("CREATE TABLE src.log (id int, version int, op text, lsn bigint)")
        self.change(60)

    def change(self, count: int) -> None:
        with self.database.transaction(force_rollback=True):
            self.database.execute("UPDATE src.t SET version = -1 WHERE id < 5")
        for _ in range(count):
            key = self.chance.randrange(80)
            version = self.versions[key] = self.versions.get(key, 0) + 1
            self.database.execute(
                "INSERT INTO src.t VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET version = %s", (key, version, version)
            )


def as_rows(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield from batch.to_pylist()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
async def test_the_table_and_its_changes_meet_exactly(
    postgres: Postgres, database: psycopg.Connection, seed: int
) -> None:
    """H130, H134, H140: whatever is killed, over ten deaths of the driver.

    For each key, the log has its row and then each version after it, once.
    """
    busy = Busy(database, seed)
    chance = busy.chance
    sink = PostgresSink(postgres.conninfo, "src.log", ["id", "version", "op", "lsn"], name=f"log{seed}")
    restored: CompletedCheckpoint | None = None
    for incarnation in range(DEATHS + 1):
        last = incarnation == DEATHS
        source = PostgresSource(
            postgres.conninfo,
            "src.t",
            "id",
            changes=f"meet{seed}",
            range_rows=5,
            batch_rows=9,
            rate_limit_per_s=40.0,
            bounded=last,
        )
        stages = chain(source=source, transform=as_rows, sink=sink)
        async with incarnation_of(stages, chance, restored, seed) as world:
            tasks = [await world.launch_operator(subtask) for subtask in range(world.parallelism)]
            for _ in range(chance.randrange(2, 6)):
                for _ in range(4):
                    busy.change(0 if last else chance.randrange(6))
                    await world.advance(0.2)
                running = [task for task in tasks if not task.outcome]
                if running and not last:
                    victim = chance.choice(running)
                    await world.kill(victim)
                    tasks.append(await world.retry(victim))
            for _ in range(200):
                if last and any(not task.outcome for task in tasks):
                    await world.advance(1.0)
            await world.advance(1.0)
            assert not world.failures
            restored = world.checkpoints[-1] if world.checkpoints else restored
    found: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for key, op, version in database.execute("SELECT id, op, version FROM src.log ORDER BY lsn"):
        found[key].append((op, version))
    for key, changes in found.items():
        versions = [version for _, version in changes]
        assert versions == list(range(versions[0], versions[-1] + 1)), (seed, key, changes)
        assert [op for op, _ in changes[1:]] == ["u"] * (len(changes) - 1)
        assert changes[0][0] == "r" or changes[0] == ("i", 1), (seed, key, changes)
    assert {key: changes[-1][1] for key, changes in found.items()} == busy.versions


class Asked:
    """What an enumerator does with its readers, which are always there."""

    def __init__(self) -> None:
        self.assigned: list[tuple[int, Any]] = []
        self.ended: list[int] = []

    def attempts(self, subtask: int) -> list[int]:
        return [0]

    async def assign_splits(self, subtask: int, splits: list[Any]) -> None:
        self.assigned += [(subtask, split) for split in splits]

    async def signal_no_more_splits(self, subtask: int) -> None:
        self.ended.append(subtask)


async def test_changes_begin_when_a_checkpoint_covers_every_range(
    postgres: Postgres, database: psycopg.Connection
) -> None:
    """H134. A range that may be read again has another snapshot then."""
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY); INSERT INTO src.t VALUES (1), (2)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="settled", range_rows=2)
    asked: Any = Asked()
    enumerator: Any = source.enumerator(None)
    await enumerator.start(asked)
    for subtask in (0, 1, 2):
        await enumerator.handle_split_request(subtask)
    (_, first), (_, second) = asked.assigned
    await enumerator.handle_source_event(0, 0, range_read_event(first[1], first[2], "10:10:"))
    await enumerator.handle_source_event(1, 0, range_read_event(second[1], second[2], "11:11:"))
    await enumerator.snapshot_state(1)
    await enumerator.add_splits_back([second], 1)  # its attempt was lost before the checkpoint completed
    assert asked.assigned[2:] == [(2, second)]
    await enumerator.handle_source_event(2, 0, range_read_event(second[1], second[2], "12:12:"))
    await enumerator.handle_split_request(0)
    state = await enumerator.snapshot_state(2)
    assert len(asked.assigned) == 3
    await enumerator.notify_checkpoint_complete(2)
    ((subtask, changes),) = asked.assigned[3:]
    assert (subtask, changes[0], unpack_ranges(changes[1])) == (0, "changes", (["2", None], ["10:10:", "12:12:"]))
    await enumerator.handle_split_request(2)
    assert asked.ended == [2]
    again: Any = source.enumerator(state)
    asked_again: Any = Asked()
    await again.start(asked_again)
    await again.handle_split_request(1)
    assert asked_again.assigned == [(1, changes)], "another driver knows the snapshots"
    await again.add_splits_back([changes], 1)
    assert (again.pending_count, again.pending_backlog) == (1, 0), "changes count when a task has them"


def test_a_server_that_cannot_be_reached_is_said_with_what_to_do(postgres: Postgres) -> None:
    wrong = PostgresSource(f"{postgres.conninfo} dbname=nosuch", "src.t", "id")
    with pytest.raises(
        SourceUnreachable,
        match=r"PostgresSource\('src\.t'\) cannot connect: (.|\n)*\"nosuch\" does not exist\. Check conni",
    ):
        list(wrong.ranges())
    with pytest.raises(ValueError, match=r"cannot understand conninfo: write 'host=db dbname=shop user=me'"):
        PostgresSource("hots=127.0.0.1", "src.t", "id").ranges().__next__()


def test_changes_of_a_partitioned_table_come_under_its_name(postgres: Postgres, database: psycopg.Connection) -> None:
    database.execute(
        "CREATE TABLE src.parts (id int PRIMARY KEY) PARTITION BY RANGE (id); "
        "CREATE TABLE src.low PARTITION OF src.parts FOR VALUES FROM (0) TO (10); "
        "CREATE TABLE src.high PARTITION OF src.parts FOR VALUES FROM (10) TO (20)"
    )
    source = PostgresSource(postgres.conninfo, "src.parts", "id", changes="parts", bounded=True)
    source.create_slot()
    database.execute("INSERT INTO src.parts VALUES (5), (15)")
    assert [row["id"] for row in rows(source, ["changes", []])] == [5, 15]


def test_a_name_that_belongs_to_another_table_or_plugin_is_refused(
    postgres: Postgres, database: psycopg.Connection
) -> None:
    """The changes of the table would never come, and nobody would notice."""
    database.execute("CREATE TABLE src.one (id int PRIMARY KEY); CREATE TABLE src.two (id int PRIMARY KEY)")
    first, second = (PostgresSource(postgres.conninfo, f"src.{one}", "id", changes="shared") for one in ("one", "two"))
    first.create_slot()
    first.create_slot()
    with pytest.raises(ValueError, match=r"'headgate_shared' is for src\.one, not for src\.two: give each source"):
        second.create_slot()
    first.drop_slot()
    second.create_slot()
    database.execute("SELECT pg_create_logical_replication_slot('foreign', 'test_decoding')")
    foreign = PostgresSource(postgres.conninfo, "src.one", "id", changes="foreign")
    with pytest.raises(ValueError, match="'foreign' is of the plugin 'test_decoding' in the database"):
        foreign.create_slot()


async def test_the_backlog_is_rows_of_the_table_and_then_bytes_of_the_log(
    postgres: Postgres, database: psycopg.Connection
) -> None:
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY); INSERT INTO src.t SELECT generate_series(1, 12)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="backlog", range_rows=5, batch_rows=1)
    coordinator = source.coordinator
    async with running_operator(coordinator, parallelism=1, **STREAMING) as world:
        await world.settle()
        assert coordinator.backlog[:3] == (3, 0, 15), "three ranges, the last of which is not full"
    source.create_slot()
    make: Any = source.operator
    reader: PostgresReader = make()
    assert [reader.backlog(["range", None, "5"], position) for position in (None, "10:10:")] == [5, 0]
    split = ["changes", []]
    assert reader.backlog(split, None) is None, "not known before the log is looked at"
    changes = reader.read_from(split, None)
    for start in (100, 200):
        database.execute("INSERT INTO src.t SELECT generate_series(%s::int, %s::int)", (start, start + 99))
    left: list[int] = []
    position: int | None = None
    for _ in range(2):
        position, _ = next(changes) or (None, None)
        left.append(reader.backlog(split, position) or 0)
    assert next(changes) is None
    left.append(reader.backlog(split, position) or 0)
    database.execute("CREATE TABLE src.other AS SELECT generate_series(1, 100)")
    for _ in range(2):  # the first looks at the log and finds nothing of this table
        assert next(changes) is None
    assert reader.backlog(split, position) == 0, "the log of another table is looked through"
    reader.close()
    assert left[0] > left[1] >= left[2] == 0
    per_transaction = left[0] - left[1]
    assert 100 * 50 < per_transaction < 100 * 500, "a hundred rows of some dozens of bytes each"
