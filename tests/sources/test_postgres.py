# SPDX-License-Identifier: Apache-2.0

"""A PostgreSQL table and its changes as a source, read from a real server while the table changes."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
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
from spark_bridge.common import conninfo
from spark_bridge.sources.errors import SourceBlocked, SourceUnreachable
from spark_bridge.sources.postgres import driver
from spark_bridge.sources.postgres.ranges import unpack_ranges
from spark_bridge.sources.postgres.task import PostgresReader, _Snapshot, range_read_event
from tests.postgres import ROOT, PgBouncer, Postgres
from tests.sources.incarnations import incarnation_of

pytestmark = pytest.mark.anyio

DEATHS = 10
STREAMING: dict[str, Any] = {"mode": "streaming", "checkpoint": CheckpointConfig(tolerated_failures=9)}


@pytest.fixture
def database(postgres: Postgres) -> Iterator[psycopg.Connection]:
    with postgres.new_schema("src") as connection:
        yield connection
        connection.execute("SELECT pg_terminate_backend(active_pid, 60000) FROM pg_replication_slots")
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        for (name,) in connection.execute("SELECT pubname FROM pg_publication").fetchall():
            connection.execute(f"DROP PUBLICATION {name}")


def rows(source: PostgresSource, split: Any, position: Any = None) -> list[dict[str, Any]]:
    make: Any = source.operator
    reader: PostgresReader = make()
    reader.context = Silent()  # type: ignore[assignment]
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
    assert not _Snapshot.parse("0:0:").shows((1 << 32) - 5), "a range that nobody has read"
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


class Silent:
    """The context of a reader whose events nobody wants."""

    def send_event(self, event: Any) -> None:
        """Nobody is told."""


class Asked:
    """What an enumerator does with its readers, which are always there."""

    parallelism = 3

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


async def test_changes_begin_although_a_task_has_left_its_range(
    postgres: Postgres, database: psycopg.Connection
) -> None:
    """H134. When a checkpoint covers that it succeeded, nobody can read the range any more."""
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY); INSERT INTO src.t VALUES (1), (2)")
    asked: Any = Asked()
    enumerator: Any = PostgresSource(postgres.conninfo, "src.t", "id", changes="left", range_rows=2).enumerator(None)
    await enumerator.start(asked)
    for subtask in (0, 1):
        await enumerator.handle_split_request(subtask)
    (_, first), _ = asked.assigned
    await enumerator.handle_source_event(0, 0, range_read_event(first[1], first[2], "10:10:"))
    await enumerator.handle_split_request(0)
    await enumerator.attempt_ended(1, 0, True)
    await enumerator.snapshot_state(1)
    assert len(asked.assigned) == 2
    await enumerator.notify_checkpoint_complete(1)
    ((subtask, changes),) = asked.assigned[2:]
    assert (subtask, unpack_ranges(changes[1])) == (0, (["2", None], ["10:10:", "0:0:"]))


def test_a_server_that_cannot_be_reached_is_said_with_what_to_do(postgres: Postgres) -> None:
    wrong = PostgresSource(f"{postgres.conninfo} dbname=nosuch", "src.t", "id")
    with pytest.raises(
        SourceUnreachable,
        match=r"PostgresSource\('src\.t'\) cannot connect: (.|\n)*\"nosuch\" does not exist\. Check conni",
    ):
        list(wrong.ranges())
    with pytest.raises(ValueError, match=r"cannot understand conninfo: write 'host=db dbname=shop user=me'"):
        PostgresSource("hots=127.0.0.1", "src.t", "id").ranges().__next__()


@pytest.mark.parametrize(
    ("listens", "says"),
    [(True, "did not answer in time: check that"), (False, "is not running: start it, or correct host and port")],
)
def test_a_server_that_does_not_answer_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, listens: bool, says: str
) -> None:
    monkeypatch.setattr(conninfo, "CONNECT_TIMEOUT_S", 2)  # the least that psycopg takes
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        port = silent.getsockname()[1]
        where = f"host=127.0.0.1 port={port} user=me dbname=shop"
        text = rf"PostgreSQL at 127\.0\.0\.1, port {port} {says}"
        with pytest.raises(SourceUnreachable, match=text):
            _ = PostgresSource(where, "src.t", "id").schema
        with pytest.raises(psycopg.OperationalError, match=text):
            PostgresSink(where, "src.t", ["id"])._table.connect()


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
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="backlog", range_rows=5, batch_rows=100)
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


TABLE = "CREATE TABLE src.t (id int PRIMARY KEY, other int NOT NULL UNIQUE, v text); "
FOREIGN = "CREATE FOREIGN DATA WRAPPER far; CREATE SERVER far FOREIGN DATA WRAPPER far; "
REFUSED = {
    "no primary key": ("CREATE TABLE src.t (id int NOT NULL UNIQUE, v text)", r"no replica.*PRIMARY KEY \(id"),
    "identity nothing": (
        f"{TABLE} ALTER TABLE src.t REPLICA IDENTITY NOTHING",
        "no replica identity.*DEFAULT",
    ),
    "identity of another index": (
        f"{TABLE} ALTER TABLE src.t REPLICA IDENTITY USING INDEX t_other_key",
        "is other, without the key 'id'.*REPLICA IDENTITY DEFAULT",
    ),
    "another primary key": (
        "CREATE TABLE src.t (id int NOT NULL UNIQUE, v text PRIMARY KEY)",
        "is v, without the key 'id'.*REPLICA IDENTITY FULL",
    ),
    "the index of the identity is dropped": (
        f"{TABLE} ALTER TABLE src.t REPLICA IDENTITY USING INDEX t_other_key; "
        "ALTER TABLE src.t DROP CONSTRAINT t_other_key",
        r"src\.t has no replica identity",
    ),
    "a deferrable primary key": (
        "CREATE TABLE src.t (id int PRIMARY KEY DEFERRABLE, v text)",
        r"src\.t has no replica identity",
    ),
    "a key that may be NULL": (
        "CREATE TABLE src.t (id int, v text); ALTER TABLE src.t REPLICA IDENTITY FULL",
        "'id' of src.t may be NULL.*SET NOT NULL",
    ),
    "a partition": (
        "CREATE TABLE src.t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id); "
        "CREATE TABLE src.low PARTITION OF src.t FOR VALUES FROM (0) TO (10); "
        "ALTER TABLE src.low REPLICA IDENTITY NOTHING",
        r"src\.low has no replica identity",
    ),
    "partitions to come": (
        "CREATE TABLE src.t (id int NOT NULL, v text) PARTITION BY RANGE (id)",
        r"src\.t has no replica identity.*PRIMARY KEY \(id\)$",
    ),
    "a foreign partition": (
        f"{FOREIGN} CREATE TABLE src.t (id int NOT NULL, v text) PARTITION BY RANGE (id); "
        "CREATE FOREIGN TABLE src.low PARTITION OF src.t FOR VALUES FROM (0) TO (10) SERVER far",
        "foreign table|no replica identity",
    ),
    "a foreign table": (
        f"{FOREIGN} CREATE FOREIGN TABLE src.t (id int NOT NULL, v text) SERVER far",
        "a foreign table",
    ),
    "a view": ("CREATE VIEW src.t AS SELECT 1 AS id, 'a' AS v", "is a view, whose changes the server does not log"),
    "a materialized view": ("CREATE MATERIALIZED VIEW src.t AS SELECT 1 AS id, 'a' AS v", "is a materialized view"),
    "unlogged": ("CREATE UNLOGGED TABLE src.t (id int PRIMARY KEY, v text)", "is an unlogged table"),
    "inherited": (f"{TABLE} CREATE TABLE src.child () INHERITS (src.t)", "has tables that inherit from it"),
    "generated": (
        "CREATE TABLE src.t (id int PRIMARY KEY, v text, twice int GENERATED ALWAYS AS (2 * id) STORED)",
        r"columns \['twice'\] of src\.t are generated.*columns= without them",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_whose_changes_would_not_come_or_fail_for_others_is_refused_before_anything_is_created(
    postgres: Postgres, database: psycopg.Connection, case: str
) -> None:  # H170
    statements, text = REFUSED[case]
    try:
        database.execute(statements)
        source = PostgresSource(postgres.conninfo, "src.t", "id", changes="refused", bounded=True)
        with pytest.raises(ValueError, match=text):
            source.create_slot()
        assert database.execute("SELECT pubname FROM pg_publication").fetchall() == []
        assert database.execute("SELECT slot_name FROM pg_replication_slots").fetchall() == []
    finally:
        database.execute("DROP FOREIGN DATA WRAPPER IF EXISTS far CASCADE")


@pytest.mark.parametrize("identity", ["FULL", "USING INDEX t_both"])
def test_a_table_with_another_sufficient_replica_identity_is_read(
    postgres: Postgres, database: psycopg.Connection, identity: str
) -> None:  # H170
    database.execute("CREATE TABLE src.t (id int NOT NULL, other int NOT NULL)")
    database.execute(f"CREATE UNIQUE INDEX t_both ON src.t (id, other); ALTER TABLE src.t REPLICA IDENTITY {identity}")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="enough", bounded=True, lsn_column=None)
    source.create_slot()
    database.execute("INSERT INTO src.t VALUES (1, 2); UPDATE src.t SET id = 5; DELETE FROM src.t")
    found = [(row["op"], row["id"]) for row in rows(source, ["changes", []])]
    assert found == [("i", 1), ("d", 1), ("i", 5), ("d", 5)]


def test_an_update_of_any_column_of_the_primary_key_deletes_the_old_row(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H171
    database.execute("CREATE TABLE src.t (tenant int, id int, PRIMARY KEY (tenant, id))")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="tenants", bounded=True, lsn_column=None)
    source.create_slot()
    database.execute("INSERT INTO src.t VALUES (1, 1); UPDATE src.t SET tenant = 3")
    found = [(row["op"], row["tenant"], row["id"]) for row in rows(source, ["changes", []])]
    assert found == [("i", 1, 1), ("d", 1, 1), ("i", 3, 1)]


PUBLICATION = "ALTER PUBLICATION headgate_watched "
ELSEWHERE = {
    "swapped": (
        "ALTER TABLE src.t RENAME TO before; CREATE TABLE src.t (id int PRIMARY KEY)",
        r"that one is src\.before now, and another one has the name src\.t",
    ),
    "made again": ("DROP TABLE src.t; CREATE TABLE src.t (id int PRIMARY KEY)", "that one was dropped, and another"),
    "made again, and published": (
        f"DROP TABLE src.t; CREATE TABLE src.t (id int PRIMARY KEY); {PUBLICATION} ADD TABLE src.t",
        "that one was dropped, and another",
    ),
    "dropped": ("DROP TABLE src.t", "there is no table src.t|that one was dropped"),
    "moved": ("ALTER TABLE src.t SET SCHEMA public", "there is no table src.t|that one is t now"),
    "a list of columns": (f"{PUBLICATION} SET TABLE src.t (id)", "was without the table for a time, or was changed"),
    "a row filter": (f"{PUBLICATION} SET TABLE src.t WHERE (id > 5)", "was without the table for a time"),
    "only inserts": (f"{PUBLICATION} SET (publish = 'insert')", "does not publish all of insert, update, delete"),
    "not published": (f"{PUBLICATION} DROP TABLE src.t", "does not have the table any more.*copy the table again"),
    "published again": (
        f"{PUBLICATION} DROP TABLE src.t; {PUBLICATION} ADD TABLE src.t",
        "was without the table for a time",
    ),
    "no publication": ("DROP PUBLICATION headgate_watched", "does not have the table any more"),
    "no identity": ("ALTER TABLE src.t REPLICA IDENTITY NOTHING", "no replica identity.*call drop_slot"),
    "inherited": ("CREATE TABLE src.child () INHERITS (src.t)", "inherit from it"),
}


@pytest.mark.parametrize("case", ELSEWHERE)
@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_table_that_is_another_one_or_is_not_published_any_more_is_not_silence(
    postgres: Postgres, database: psycopg.Connection, case: str, is_idle: bool
) -> None:  # H170
    """At the next look, after a change or without one; at a restore in another task; and on another driver."""
    statements, text = ELSEWHERE[case]
    database.execute("DROP TABLE IF EXISTS public.t; CREATE TABLE src.t (id int PRIMARY KEY)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="watched")
    try:
        asked: Any = Asked()
        enumerator: Any = source.enumerator(None)
        await enumerator.start(asked)
        await enumerator.handle_split_request(0)
        await enumerator.handle_source_event(0, 0, range_read_event(None, None, "10:10:"))
        await enumerator.handle_split_request(0)
        state = await enumerator.snapshot_state(1)
        await enumerator.notify_checkpoint_complete(1)
        _, changes = asked.assigned[-1]
        assert changes[0] == "changes"
        make: Any = source.operator
        reader, restored = make(), make()
        reading = reader.read_from(changes, None)
        database.execute("INSERT INTO src.t VALUES (1)")
        position, batch = next(reading)
        assert batch.column("id").to_pylist() == [1]
        assert next(reading) is None
        if not is_idle:
            database.execute("INSERT INTO src.t VALUES (2)")
        database.execute(statements)
        for someone in (reading, restored.read_from(changes, position)):
            with pytest.raises(SourceDataLost, match=text):
                next(someone)
        reader.close()
        restored.close()
        again: Any = PostgresSource(postgres.conninfo, "src.t", "id", changes="watched").enumerator(state)
        if case not in ("no identity", "inherited"):
            with pytest.raises((SourceDataLost, ValueError), match=text):
                await again.start(Asked())
    finally:
        database.execute("DROP TABLE IF EXISTS public.t")


def test_a_slot_that_was_made_again_before_the_first_change_is_an_error(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H170
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="remade", bounded=True)
    identity = source.create_slot()
    database.execute("INSERT INTO src.t VALUES (1); SELECT pg_drop_replication_slot('remade')")
    source.create_slot()
    with pytest.raises(SourceDataLost, match="has moved on past the checkpoint"):
        rows(source, ["changes", [], identity])


def test_a_table_that_is_swapped_while_it_is_copied_is_an_error(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H170, H172
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY); INSERT INTO src.t VALUES (1), (2)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", range_rows=1)
    reading: PostgresReader = source.operator()  # type: ignore[assignment]
    first, second, *_ = source.ranges()
    assert next(iter(reading.read_from(first, None)))
    database.execute("ALTER TABLE src.t RENAME TO before; CREATE TABLE src.t (id int PRIMARY KEY)")
    with pytest.raises(SourceDataLost, match=r"that one is src\.before now"):
        next(iter(reading.read_from(second, None)))


COLUMNS = {
    "renamed": ("ALTER TABLE src.t RENAME v TO w", "column 'v' is not there: it was renamed"),
    "dropped": ("ALTER TABLE src.t DROP v", "column 'v' is not there"),
    "added": ("ALTER TABLE src.t ADD w int DEFAULT 7", "column 'w' is not among those that are read"),
    "generated": (
        "ALTER TABLE src.t DROP v; ALTER TABLE src.t ADD v text GENERATED ALWAYS AS ('a') STORED",
        "column 'v' is not there|are generated",
    ),
    "wider": ("ALTER TABLE src.t ALTER n TYPE bigint", "column 'n' has another type: it is int64 in Arrow, and int32"),
    "more digits": ("ALTER TABLE src.t ALTER d TYPE numeric(9, 4)", r"column 'd' has another type: it is decimal128"),
    "another kind": ("ALTER TABLE src.t ALTER v TYPE int USING 5", "column 'v' has another type: it is int32"),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_that_are_not_those_that_are_read_are_named_and_never_null(
    postgres: Postgres, database: psycopg.Connection, case: str
) -> None:  # H170, H171
    statement, text = COLUMNS[case]
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY, v text, n int, d numeric(9, 2))")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="columns", bounded=True)
    source.create_slot()
    make: Any = source.operator
    reader, copying = make(), make()
    database.execute("INSERT INTO src.t VALUES (6, 'before', 1, 1)")
    database.execute(statement)
    database.execute("INSERT INTO src.t (id) VALUES (7)")
    with pytest.raises(SourceDataLost, match=rf"src\.t.*{text}|{text}") as refusal:
        list(reader.read_from(["changes", []], None))
    if case != "generated":
        assert "at the change of the row with id = 7" in str(refusal.value)
        assert "Pass columns= without this one" in str(refusal.value)
    reader.close()
    if case == "generated":  # the table still has its values
        return
    with pytest.raises(SourceDataLost, match=rf"the columns of src\.t.*{text}"):
        list(copying.read_from(["range", None, None], None))


def test_a_column_that_comes_later_is_null_in_no_change_before_it(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H171
    """A later run wants it too; one that names its columns reads on."""
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", ["id"], changes="later", bounded=True)
    source.create_slot()
    database.execute("INSERT INTO src.t VALUES (1)")
    database.execute("ALTER TABLE src.t ADD v text NOT NULL DEFAULT 'a'")
    database.execute("INSERT INTO src.t VALUES (2, 'b')")
    assert [row["id"] for row in rows(source, ["changes", []])] == [1, 2]
    later = PostgresSource(postgres.conninfo, "src.t", "id", changes="later", bounded=True)
    with pytest.raises(SourceDataLost, match=r"row with id = 1: column 'v' is not there.*added later"):
        rows(later, ["changes", []])


IMPOSSIBLE = {
    "'infinity'::timestamptz": "timestamptz",
    "'-infinity'::date": "date",
    "'0044-03-15 BC'::date": "date",
    "'0044-03-15 10:00 BC'::timestamp": "timestamp",
    "'NaN'::numeric": "numeric(10, 2)",
}


@pytest.mark.parametrize("value", IMPOSSIBLE)
def test_a_value_that_arrow_does_not_have_is_named_with_its_row(
    postgres: Postgres, database: psycopg.Connection, value: str
) -> None:  # H171
    database.execute(f"CREATE TABLE src.t (id int PRIMARY KEY, v {IMPOSSIBLE[value]})")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="impossible", bounded=True)
    source.create_slot()
    database.execute(f"INSERT INTO src.t VALUES (6, NULL), (7, {value})")
    for split in (["range", None, None], ["changes", []]):
        with pytest.raises(
            ValueError, match=r"column 'v' of src\.t is '.*' in the row with id = 7, .*columns= without"
        ):
            rows(source, split)


def test_values_are_the_same_in_the_table_and_in_its_changes(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H171
    database.execute(
        "CREATE TABLE src.t (id int PRIMARY KEY, code char(5), net inet, less real, more double precision, "
        "list real[], span interval, cash money, bits bit(3), one xml, yes boolean[], point point, range int4range)"
    )
    database.execute("ALTER ROLE headgate SET extra_float_digits = 0")
    try:
        source = PostgresSource(postgres.conninfo, "src.t", "id", changes="same", bounded=True, lsn_column=None)
        source.create_slot()
        database.execute(
            "INSERT INTO src.t VALUES (1, 'ab', '10.0.0.1', 0.1, 0.1::float8 + 0.2, '{0.1,1e-7}', '1 day 2 hours', 5, "
            "B'101', '<a/>', '{t,f}', '(0.1,2)', '[1,5)')"
        )
        (copied,), (changed,) = rows(source, ["range", None, None]), rows(source, ["changes", []])
    finally:
        database.execute("ALTER ROLE headgate RESET extra_float_digits")
    assert {**changed, "op": "r"} == copied
    assert (copied["code"], copied["net"], copied["more"]) == ("ab   ", "10.0.0.1", 0.1 + 0.2)


@pytest.mark.parametrize("range_rows", [1, 2, 3, 4, 10])
def test_rows_without_a_key_are_read_too(
    postgres: Postgres, database: psycopg.Connection, range_rows: int
) -> None:  # H171
    database.execute("CREATE TABLE src.t (id int UNIQUE); INSERT INTO src.t VALUES (1), (2), (NULL), (NULL)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", range_rows=range_rows)
    splits = list(islice(source.ranges(), 10))
    assert [row["id"] for split in splits for row in rows(source, split)] == [1, 2, None, None]


def test_a_view_is_read_without_changes(postgres: Postgres, database: psycopg.Connection) -> None:
    database.execute("CREATE VIEW src.v AS SELECT 1 AS id; CREATE MATERIALIZED VIEW src.m AS SELECT 2 AS id")
    for name, key in (("src.v", 1), ("src.m", 2)):
        source = PostgresSource(postgres.conninfo, name, "id")
        assert [row for split in source.ranges() for row in rows(source, split)] == [{"id": key}]


SET = ["IntervalStyle", "bytea_output", "extra_float_digits", "idle_in_transaction_session_timeout", "lock_timeout"]


def test_the_table_is_read_through_a_pooler_and_its_changes_are_refused_there(
    postgres: Postgres, database: psycopg.Connection, pooler: PgBouncer
) -> None:  # H170
    """PgBouncer knows no setting in the request for a session, keeps none, and passes no replication on."""
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY, at timestamptz, raw bytea, span interval, d date)")
    database.execute(
        "INSERT INTO src.t SELECT one, '2024-02-29', '\\x00ff', '26 hours', '2024-02-29' "
        "FROM generate_series(1, 30) one"
    )
    plain = PostgresSource(postgres.conninfo, "src.t", "id", range_rows=3)
    pooled = PostgresSource(pooler.conninfo, "src.t", "id", range_rows=3)
    with psycopg.connect(pooler.conninfo, autocommit=True) as other:
        splits = list(pooled.ranges())
        assert len(splits) == 11
        assert [rows(pooled, split) for split in splits] == [rows(plain, split) for split in splits]
        assert other.execute("SELECT name FROM pg_prepared_statements").fetchall() == []
        left = other.execute("SELECT name FROM pg_settings WHERE source = 'session' AND name = ANY(%s)", (SET,))
        assert left.fetchall() == [], "the next one who gets the session finds it as it was"
    changing = PostgresSource(pooler.conninfo, "src.t", "id", changes="pooled")
    with pytest.raises(
        SourceUnreachable, match=r"takes no replication connection.*name the server itself and not a pooler"
    ):
        changing.create_slot()
    assert database.execute("SELECT pubname FROM pg_publication").fetchall() == []
    assert database.execute("SELECT slot_name FROM pg_replication_slots").fetchall() == []


@pytest.mark.parametrize("value", ["a user without the right", "a server without a free sender", "everybody waits"])
def test_a_server_that_sends_no_changes_or_would_wait_for_this_source_is_refused_at_the_start(value: str) -> None:
    """H170."""
    settings = {"max_wal_senders": "0"} if value == "a server without a free sender" else {}
    server = Postgres(**settings)
    try:
        with server.connect() as connection:
            connection.execute(
                "CREATE TABLE t (id int PRIMARY KEY); CREATE ROLE clerk LOGIN; ALTER TABLE t OWNER TO clerk"
            )
            connection.execute("GRANT ALL ON DATABASE postgres TO clerk; GRANT ALL ON SCHEMA public TO clerk")
            conninfo, text = server.conninfo, "needs a free one of its max_wal_senders"
            if value == "a user without the right":
                conninfo, text = conninfo.replace("user=headgate", "user=clerk"), "the right REPLICATION"
            elif value == "everybody waits":
                connection.execute("SET synchronous_commit = local")
                connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 (*)'")
                connection.execute("SELECT pg_reload_conf()")
                text = "would take this source for a standby"
                while "*" not in connection.execute("SHOW synchronous_standby_names").fetchone()[0]:  # type: ignore[index]
                    pass
            with pytest.raises((SourceUnreachable, ValueError), match=text):
                PostgresSource(conninfo, "public.t", "id", changes="none").create_slot()
            assert connection.execute("SELECT slot_name FROM pg_replication_slots").fetchall() == []
    finally:
        server.close()


def reading_of(source: PostgresSource, position: Any = None) -> tuple[PostgresReader, Iterator[Any]]:
    make: Any = source.operator
    reader: PostgresReader = make()
    reader.context = Silent()  # type: ignore[assignment]
    return reader, reader.read_from(["changes", []], position)


def test_a_large_transaction_is_divided_and_read_on_inside_of_it(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H134
    """Small ones stay whole. From each position on, exactly what follows is read."""
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY, v text); CREATE TABLE src.other (id int)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="large", bounded=True, batch_rows=10)
    source.create_slot()
    for first, count in ((0, 4), (100, 4), (200, 35), (300, 10), (400, 3)):
        with database.transaction():
            database.execute("INSERT INTO src.t SELECT generate_series(%s::int, %s)", (first, first + count - 1))
            database.execute("INSERT INTO src.other SELECT generate_series(1, 20)")
            database.execute("UPDATE src.t SET id = id + 50 WHERE id = %s", (first,))

    def read(position: Any) -> list[tuple[Any, list[tuple[str, int, int]]]]:
        reader, reading = reading_of(source, position)
        found = [item for item in reading if item is not None]
        reader.close()
        return [(at, [(row["op"], row["id"], row["lsn"]) for row in batch.to_pylist()]) for at, batch in found]

    batches = read(None)
    flat = [row for _, batch in batches for row in batch]
    assert [len(batch) for _, batch in batches] == [6, 6, 11, 11, 11, 4, 12, 5]
    assert [isinstance(at, list) for at, _ in batches] == [False, False, True, True, True, False, True, False]
    assert len(flat) == len(set(flat)) == 4 + 4 + 35 + 10 + 3 + 2 * 5
    assert len({lsn for *_, lsn in flat}) == 5, "all rows of a transaction have one place"
    for number, (position, _) in enumerate(batches):
        rest = [row for _, batch in batches[number + 1 :] for row in batch]
        assert [row for _, batch in read(position) for row in batch] == rest, number


@pytest.mark.parametrize("size_mib", [12, pytest.param(100, marks=pytest.mark.long)])
def test_a_large_transaction_needs_no_more_memory_than_a_small_one(
    postgres: Postgres, database: psycopg.Connection, size_mib: int
) -> None:  # H157
    """In a separate process, whose memory the system knows: Python does not count that of libpq."""
    peaks = []
    for count in (2, size_mib):
        database.execute("DROP TABLE IF EXISTS src.t; CREATE TABLE src.t (id int PRIMARY KEY, v text)")
        source = PostgresSource(postgres.conninfo, "src.t", "id", changes="memory", bounded=True)
        source.create_slot()
        database.execute(
            "INSERT INTO src.t SELECT one, repeat('x', 1000) FROM generate_series(1, %s) one", (count * 1024,)
        )
        command = [sys.executable, "-m", "tests.sources.peak_memory", postgres.conninfo, "src.t", "memory"]
        read = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.split()
        assert int(read[0]) == count * 1024
        peaks.append(int(read[1]))
        source.drop_slot()
    assert peaks[1] - peaks[0] < 10 * 2**20, peaks


def test_a_look_that_finds_nothing_decodes_nothing_again(postgres: Postgres, database: psycopg.Connection) -> None:
    """Although no checkpoint covers what was read, and others write: the server decodes its log once."""
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY); CREATE TABLE src.other (id int)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="quiet", lsn_column=None)
    source.create_slot()
    reader, reading = reading_of(source)
    for number in range(50):
        database.execute("INSERT INTO src.t VALUES (%s)", (number,))
    assert next(reading)[1].num_rows == 50
    for number in range(20):
        database.execute("INSERT INTO src.other VALUES (%s)", (number,))
        assert next(reading) is None
    database.execute("INSERT INTO src.t VALUES (50)")
    assert next(reading)[1].num_rows == 1
    reader.close()
    while (decoded := decoded_transactions(database)) == 0:  # the session reports them at its end at the latest
        pass
    assert decoded <= 50 + 20 + 1 + 5, "each once"


def decoded_transactions(database: psycopg.Connection) -> int:
    found = database.execute("SELECT total_txns FROM pg_stat_replication_slots WHERE slot_name = 'quiet'").fetchone()
    return int(found[0]) if found else 0


def confirmed(database: psycopg.Connection, slot: str) -> int:
    """Up to where the server may forget its log for the slot."""
    query = "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = %s"
    (place,) = database.execute(query, (slot,)).fetchone() or (0,)
    return int(place)


def test_the_slot_advances_with_checkpoints_although_only_other_tables_change(
    postgres: Postgres, database: psycopg.Connection
) -> None:
    """Otherwise the server's disk would fill up, and a restarted reader would decode all of it again."""
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY); CREATE TABLE src.other (v text)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="others")
    source.create_slot()
    reader, reading = reading_of(source)
    assert next(reading) is None
    begin = confirmed(database, "others")
    for checkpoint_id in (1, 2):
        database.execute("INSERT INTO src.other SELECT repeat('x', 1000) FROM generate_series(1, 3000)")
        position, batch = next(reading)
        assert batch.num_rows == 0
        reader.snapshot_state(checkpoint_id)
        assert confirmed(database, "others") == begin, "not before the checkpoint is complete"
        reader.notify_checkpoint_complete(checkpoint_id)
        while confirmed(database, "others") != position:  # until the server has read the message
            pass
        assert position > begin + 3000 * 1000
        begin = position
        assert next(reading) is None
    reader.close()


def test_sessions_that_the_server_ends_are_opened_again_and_nothing_is_lost(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H170
    """As it does after ``idle_session_timeout`` or ``wal_sender_timeout``, also in the middle of a transaction."""
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="ended", batch_rows=10)
    source.create_slot()
    reader, reading = reading_of(source)
    database.execute("INSERT INTO src.t SELECT generate_series(1, 200000)")
    found: list[int] = []
    sessions = "FROM pg_stat_activity WHERE application_name = 'headgate' AND pid <> pg_backend_pid()"
    for number in range(6):
        kind = ("client backend", "walsender")[number % 2]
        database.execute(f"SELECT pg_terminate_backend(pid) {sessions} AND backend_type = %s", (kind,))
        for item in islice((one for one in reading if one is not None), 50):
            found += item[1].column("id").to_pylist()
    while len(found) < 200_000:
        item = next(reading)
        found += item[1].column("id").to_pylist() if item else []
    assert found == list(range(1, 200_001))
    reader.close()


def test_a_session_that_is_idle_for_too_long_is_opened_again(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H170
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY); INSERT INTO src.t VALUES (0)")
    idle = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'headgate' AND backend_type LIKE 'client%%'"
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="idle")
    source.create_slot()
    limits = ("idle_session_timeout", "idle_in_transaction_session_timeout")
    for limit in limits:
        database.execute(f"ALTER ROLE headgate SET {limit} = '1s'")
    try:
        reader, reading = reading_of(source)
        for number in range(2):
            database.execute("INSERT INTO src.t VALUES (%s)", (number + 1,))
            item = None
            while item is None:
                item = next(reading)
            assert item[1].column("id").to_pylist() == [number + 1]
            while database.execute(idle).fetchone() != (0,):
                pass
        assert [row["id"] for split in source.ranges() for row in rows(source, split)] == [0, 1, 2]
        reader.close()
    finally:
        for limit in limits:
            database.execute(f"ALTER ROLE headgate RESET {limit}")


def test_the_slot_is_taken_from_a_session_whose_machine_was_lost(
    postgres: Postgres, database: psycopg.Connection
) -> None:
    """It is silent, and the server has not noticed yet."""
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY)")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="taken")
    source.create_slot()
    lost, silent = reading_of(source)
    assert next(silent) is None
    database.execute("INSERT INTO src.t VALUES (1)")
    reader, reading = reading_of(source)
    item = None
    while item is None:
        item = next(reading)
    assert item[1].column("id").to_pylist() == [1]
    reader.close()
    lost.close()


class First:
    """Passes on the first three rows that it gets in one of the subtasks, and all in the others."""

    def __init__(self) -> None:
        self.limited = False

    def __call__(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[dict[str, Any]]:
        limited, self.limited = not self.limited, True
        return islice(as_rows(batches), 3 if limited else None)


async def test_a_transform_that_returns_early_does_not_keep_changes_from_beginning(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H134
    """What it has left of its range, nobody reads. What it has read is in no change again."""
    database.execute("CREATE TABLE src.t (id int PRIMARY KEY, version int)")
    database.execute("INSERT INTO src.t SELECT one, 0 FROM generate_series(1, 20) one")
    source = PostgresSource(postgres.conninfo, "src.t", "id", changes="early", range_rows=5, lsn_column=None)
    source.create_slot()
    database.execute("UPDATE src.t SET version = 1")  # in the snapshot of each range that is read
    checkpoint = CheckpointConfig(interval_s=0.4, tolerated_failures=1000)
    stages = chain(source=source, transform=First())
    async with running_operator(stages, parallelism=2, mode="streaming", checkpoint=checkpoint) as world:
        tasks = [await world.launch_operator(subtask) for subtask in range(2)]
        for _ in range(10):
            await world.advance(0.5)
        database.execute("UPDATE src.t SET version = 2")
        found: list[dict[str, Any]] = []
        for _ in range(100):
            await world.advance(0.5)
            found = [row for task in tasks for row in task.outputs]
            if sum(row["version"] == 2 for row in found) == 20:
                break
        assert not world.failures
    outcomes = [task.outcome for task in tasks]
    assert [row["version"] for row in found].count(2) == 20, outcomes
    copied = [row["id"] for row in found if row["op"] == "r"]
    assert len(copied) == len(set(copied)) == 18
    assert {row["version"] for row in found if row["op"] == "r"} == {1}
    assert not {row["id"] for row in found if row["op"] == "u" and row["version"] == 1}


class Restless:
    """Changes a table in every way at random: large and small transactions, deletions, other keys, and TRUNCATE."""

    def __init__(self, database: psycopg.Connection, seed: int) -> None:
        self.chance = random.Random(seed)
        self.database = database
        columns = "(id int PRIMARY KEY, version int, doc text)"
        database.execute(f"CREATE TABLE src.t {columns}; CREATE TABLE src.copy {columns}")
        self.version = 0
        self.truncates = False
        self.change(60)

    def change(self, count: int) -> None:
        while count > 0:
            with self.database.transaction(force_rollback=self.chance.random() < 0.1):
                for _ in range(self.chance.choice([1, 2, 30])):
                    self._change_one()
                    count -= 1

    def _change_one(self) -> None:
        self.version += 1
        key, other = self.chance.randrange(40), self.chance.randrange(40)
        kind = self.chance.random()
        if kind < 0.2:
            self.database.execute("DELETE FROM src.t WHERE id = %s", (key,))
        elif kind < 0.4:
            self.database.execute("DELETE FROM src.t WHERE id = %s AND id <> %s", (other, key))
            self.database.execute("UPDATE src.t SET id = %s, version = %s WHERE id = %s", (other, self.version, key))
        elif kind < 0.42 and self.truncates:
            self.database.execute("TRUNCATE src.t")
        else:
            self.database.execute(
                "INSERT INTO src.t VALUES (%s, %s, 'd') ON CONFLICT (id) DO UPDATE SET version = EXCLUDED.version",
                (key, self.version),
            )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
async def test_a_copy_that_follows_a_table_equals_it_whatever_is_killed(
    postgres: Postgres, database: psycopg.Connection, seed: int
) -> None:
    """H134, H140: over deaths of tasks and drivers."""
    restless = Restless(database, seed)
    chance = restless.chance
    sink = PostgresSink(
        postgres.conninfo, "src.copy", ["id", "version", "doc"], key=["id"], op_column="op", name=f"copy{seed}"
    )
    restored: CompletedCheckpoint | None = None
    begin = 0
    for incarnation in range(5):
        last = incarnation == 4
        source = PostgresSource(
            postgres.conninfo,
            "src.t",
            "id",
            changes=f"follow{seed}",
            range_rows=5,
            batch_rows=9,
            lsn_column=None,
            rate_limit_per_s=None if last else 40.0,
            bounded=last,
        )
        async with incarnation_of(chain(source=source, sink=sink), chance, restored, seed) as world:
            tasks = [await world.launch_operator(subtask) for subtask in range(world.parallelism)]
            for _ in range(chance.randrange(3, 7)):
                for _ in range(4):
                    # A table that is emptied while it is copied is an error. When the slot advances, it is copied.
                    begin = begin or confirmed(database, f"follow{seed}")
                    restless.truncates = confirmed(database, f"follow{seed}") > begin
                    restless.change(0 if last else chance.choice([0, 2, 40]))
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
    rows = [database.execute(f"SELECT * FROM src.{table} ORDER BY id").fetchall() for table in ("t", "copy")]
    assert rows[0] == rows[1], seed
