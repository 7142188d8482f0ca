# SPDX-License-Identifier: Apache-2.0

"""The PostgreSQL sink beyond the pattern: keys, kinds of records, a server that dies, and settings that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow
import pytest
from pyspark.sql import Row

from actors.logs import get_logger
from headgate.errors import SinkDataLost
from headgate.sinks import Committable, PostgresSink, SinkCommitterContext, SinkWriterContext
from spark_bridge.sinks.two_phase.errors import SinkCommitFailed, SinkMisused
from tests.postgres import PgBouncer, Postgres

NAMES = ["orders", "returns"]


@pytest.fixture
def database(postgres: Postgres) -> Iterator[psycopg.Connection]:
    """An empty schema ``shop`` with a table."""
    with postgres.new_schema("shop") as connection:
        connection.execute('CREATE TABLE shop.orders (id bigint PRIMARY KEY, "what" text, price numeric, day date)')
        yield connection


def committer(sink: PostgresSink) -> Any:
    made = sink.committer(SinkCommitterContext("out", "out", get_logger("test")))
    made.open()
    return made


class Task:
    def __init__(self, sink: PostgresSink, attempt: int = 0) -> None:
        self._names = SinkWriterContext("out", 0, attempt)
        self.writer = sink.writer(self._names)

    def prepare(self, *records: Any) -> list[Committable]:
        for record in records:
            self.writer.write(record)
        return self.writer.prepare()

    def close(self) -> None:
        self.writer.close()


def test_every_kind_of_record_is_written_with_its_types(postgres: Postgres, database: psycopg.Connection) -> None:
    sink = PostgresSink(postgres.conninfo, "shop.orders", ["id", "what", "price", "day"])
    driver, task = committer(sink), Task(sink)
    batch = pyarrow.record_batch({"id": [4, 5], "price": [Decimal("1.50"), None]})
    parts = task.prepare(
        {"id": 1, "what": 'a\t"b"\n\\N', "price": Decimal("0.10"), "day": date(2026, 2, 28)},
        (2, None, None, None),
        Row(day=date(2026, 3, 1), id=3, what="ä"),
        batch,
    )
    driver.commit(parts)
    task.close()
    assert database.execute("SELECT * FROM shop.orders ORDER BY id").fetchall() == [
        (1, 'a\t"b"\n\\N', Decimal("0.10"), date(2026, 2, 28)),
        (2, None, None, None),
        (3, "ä", None, date(2026, 3, 1)),
        (4, None, Decimal("1.50"), None),
        (5, None, None, None),
    ]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"id": 1, "colour": "red"}, r"no columns \['colour'\], only \['id', 'what'\]"),
        ((1, 2, 3), "has 3 values, and the sink 2 columns"),
        (7, "an int is not a row.*override encode"),
        (pyarrow.record_batch({"colour": ["red"]}), "no columns"),
    ],
)
def test_a_record_that_does_not_fit_says_why(postgres: Postgres, record: Any, says: str) -> None:
    task = Task(PostgresSink(postgres.conninfo, "shop.orders", ["id", "what"]))
    with pytest.raises((ValueError, TypeError), match=says):
        task.prepare(record)


@pytest.mark.parametrize("text", ["\ud800", ["a", "\ud800"]], ids=["text", "array"])
def test_a_row_with_a_lone_surrogate_is_named_with_its_column(
    postgres: Postgres, database: psycopg.Connection, text: Any
) -> None:  # H171
    sink = PostgresSink(postgres.conninfo, "shop.orders", ["id", "what"])
    committer(sink)
    task = Task(sink)
    with pytest.raises(
        ValueError, match=r"column 'what' of the row \(2, .*\) cannot be written: it has a lone surrogate"
    ):
        task.prepare((1, "a"), (2, text))
    task.close()


def test_with_a_key_the_last_row_counts_in_the_order_of_checkpoints_and_rows(
    postgres: Postgres, database: psycopg.Connection
) -> None:
    sink = PostgresSink(postgres.conninfo, "shop.orders", ["id", "what"], key=["id"])
    database.execute("INSERT INTO shop.orders VALUES (1, 'old', 9.5, NULL), (3, 'stays', 1, NULL)")
    driver, task = committer(sink), Task(sink)
    first = task.prepare((1, "first"), (1, "second"), (2, "first"))
    second = task.prepare((2, "second"))
    driver.commit([*first, *second])
    driver.commit(task.prepare((1, "third")))
    driver.commit(first)  # a replay must not bring the older rows back
    task.close()
    assert database.execute("SELECT id, what, price FROM shop.orders ORDER BY id").fetchall() == [
        (1, "third", Decimal("9.5")),  # a column that is not written keeps its value
        (2, "second", None),
        (3, "stays", Decimal(1)),
    ]


CHANGES: dict[str, tuple[list[tuple[str, Any, Any]], dict[int, str]]] = {
    "a deletion": ([("d", 1, None)], {2: "b"}),
    "deleted and inserted again": ([("d", 1, None), ("i", 1, "again")], {1: "again", 2: "b"}),
    "inserted and deleted": ([("i", 3, "c"), ("u", 3, "d"), ("d", 3, None)], {1: "a", 2: "b"}),
    "another key": ([("d", 1, None), ("i", 7, "a")], {2: "b", 7: "a"}),
    "keys that are exchanged": ([("d", 1, None), ("i", 2, "a"), ("u", 1, "b")], {1: "b", 2: "a"}),
    "a row that is not there": ([("d", 9, None), ("u", 8, "h")], {1: "a", 2: "b", 8: "h"}),
    "emptied": ([("i", 3, "c"), ("t", None, None)], {}),
    "emptied twice, and filled": ([("t", None, None), ("i", 3, "c"), ("t", None, None), ("i", 4, "d")], {4: "d"}),
    "a row that was read": ([("r", 1, "copied")], {1: "copied", 2: "b"}),
}


@pytest.mark.parametrize("checkpoints", [1, 2])
@pytest.mark.parametrize("case", CHANGES)
def test_changes_are_carried_to_the_table_as_they_are(
    postgres: Postgres, database: psycopg.Connection, case: str, checkpoints: int
) -> None:
    """Whether a checkpoint has all of them, or the commit of two checkpoints has."""
    changes, expected = CHANGES[case]
    database.execute("INSERT INTO shop.orders VALUES (1, 'a'), (2, 'b')")
    sink = PostgresSink(postgres.conninfo, "shop.orders", ["id", "what"], key=["id"], op_column="op")
    driver, task = committer(sink), Task(sink)
    rows = [{"op": op, "id": id_, "what": what} for op, id_, what in changes]
    parts = [*task.prepare(*rows[:1]), *task.prepare(*rows[1:])] if checkpoints == 2 else task.prepare(*rows)
    for _ in range(2):  # a replay changes nothing
        driver.commit(parts)
        assert dict(database.execute("SELECT id, what FROM shop.orders").fetchall()) == expected
    task.close()
    assert list(driver.prepared()) == []


def test_a_deletion_finds_the_row_that_the_index_finds(postgres: Postgres, database: psycopg.Connection) -> None:
    """In a collation without case, and by all columns of the key; another unique column may take over its value."""
    database.execute("CREATE COLLATION shop.ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    database.execute(
        'CREATE TABLE shop.users (name text COLLATE shop.ci, "of" int, mail text UNIQUE, PRIMARY KEY (name, "of"))'
    )
    database.execute("INSERT INTO shop.users VALUES ('Anna', 1, 'anna@'), ('Anna', 2, 'other@')")
    sink = PostgresSink(postgres.conninfo, "shop.users", ["name", "of", "mail"], key=["name", "of"], op_column="what")
    driver, task = committer(sink), Task(sink)
    driver.commit(
        task.prepare(
            {"name": "ANNA", "of": 1, "mail": "new@", "what": "u"},
            {"name": "anna", "of": 1, "what": "d"},
            {"name": "Bert", "of": 1, "mail": "anna@", "what": "i"},
        )
    )
    task.close()
    found = database.execute("SELECT * FROM shop.users ORDER BY mail").fetchall()
    assert found == [("Bert", 1, "anna@"), ("Anna", 2, "other@")]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"id": 1, "op": "x"}, "'x' is not an operation: write r, i or u for a row"),
        ({"id": 1}, "'op' is the op_column and NULL"),
        ({"op": "d", "what": "a"}, "'id' is in the key and NULL"),
        ({"id": 1, "op": "d", "lsn": 7}, r"no columns \['lsn'\]"),
    ],
)
def test_a_change_that_does_not_say_what_to_do_is_refused(
    postgres: Postgres, database: psycopg.Connection, record: Any, text: str
) -> None:  # H171
    sink = PostgresSink(postgres.conninfo, "shop.orders", ["id", "what"], key=["id"], op_column="op")
    committer(sink)
    task = Task(sink)
    with pytest.raises(ValueError, match=text):
        task.prepare(record)
    task.close()


@pytest.mark.parametrize("mode", ["staged", "prepared"])
def test_a_task_survives_that_the_server_ends_its_idle_session(
    postgres: Postgres, database: psycopg.Connection, mode: Any
) -> None:  # H170
    """As with ``idle_session_timeout``, between two checkpoints with rows."""
    sink = PostgresSink(postgres.conninfo, "shop.orders", ["id"], mode=mode)
    driver, task = committer(sink), Task(sink)
    for number in range(3):
        driver.commit(task.prepare((number,)))
        database.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = 'headgate'"
        )
    task.close()
    assert database.execute("SELECT id FROM shop.orders ORDER BY id").fetchall() == [(0,), (1,), (2,)]


@pytest.mark.parametrize("mode", ["staged", "prepared"])
def test_what_is_prepared_survives_the_death_of_the_server(
    postgres: Postgres, database: psycopg.Connection, mode: Any
) -> None:
    """With its defaults, except for ``fsync``, which concerns a power failure only."""
    sink = PostgresSink(postgres.conninfo, "shop.orders", ["id"], mode=mode)
    driver, task = committer(sink), Task(sink)
    prepared = task.prepare((1,), (2,))
    task.writer.write((3,))
    postgres.kill()
    with pytest.raises(driver.transient_errors):
        driver.commit(prepared)
    postgres.start()
    with pytest.raises(psycopg.OperationalError):
        task.prepare((4,))
    task.close()
    assert list(driver.prepared()) == [part.name for part in prepared]
    driver.commit(prepared)
    with postgres.connect() as connection:
        assert connection.execute("SELECT id FROM shop.orders ORDER BY id").fetchall() == [(1,), (2,)]
    assert list(driver.prepared()) == []


def test_two_applications_with_one_operator_id_and_different_tables_do_not_meet(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H172, H173
    database.execute("CREATE TABLE shop.returns (id bigint)")
    with postgres.new_schema("store") as store:
        store.execute("CREATE TABLE store.orders (id bigint)")
    tables = ["shop.orders", "shop.returns", "store.orders"]
    sinks = [PostgresSink(postgres.conninfo, table, ["id"], mode="prepared") for table in tables]
    drivers, tasks = [committer(sink) for sink in sinks], [Task(sink) for sink in sinks]
    parts = [task.prepare((number,)) for number, task in enumerate(tasks)]
    for driver, task, own in zip(drivers, tasks, parts, strict=True):
        task.close()
        assert list(driver.prepared()) == [part.name for part in own]
        driver.commit(own)
        assert list(driver.prepared()) == []
    assert [database.execute(f"SELECT id FROM {table}").fetchall() for table in tables] == [[(0,)], [(1,)], [(2,)]]


@pytest.mark.parametrize("how", ["commit", "abort"])
def test_what_an_earlier_release_prepared_is_finished(
    postgres: Postgres, database: psycopg.Connection, how: str
) -> None:  # H172
    """The names of its transactions do not have the table in them."""
    database.execute("CREATE TABLE shop.returns (id bigint)")
    sink, other = (PostgresSink(postgres.conninfo, f"shop.{name}", ["id"], mode="prepared") for name in NAMES)
    driver, others = committer(sink), committer(other)
    names = SinkWriterContext("out", 0, 0)
    part = Committable(names.next_name(), 1)
    database.execute("BEGIN; INSERT INTO shop.orders (id) VALUES (7)")
    database.execute("INSERT INTO shop.headgate_commits VALUES ('out', %s, %s)", (part.writer, part.number))
    database.execute(f"PREPARE TRANSACTION 'headgate/out/{part.name}'")
    assert list(others.prepared()) == []
    assert list(driver.prepared()) == [part.name]
    driver.commit([part]) if how == "commit" else driver.abort([part.name])
    assert list(driver.prepared()) == []
    assert database.execute("SELECT id FROM shop.orders").fetchall() == ([(7,)] if how == "commit" else [])


@pytest.mark.parametrize("mode", ["staged", "prepared"])
def test_a_part_that_somebody_destroyed_is_an_error_and_not_passed_over(
    postgres: Postgres, database: psycopg.Connection, mode: Any
) -> None:
    sink = PostgresSink(postgres.conninfo, "shop.orders", ["id"], mode=mode)
    driver, task = committer(sink), Task(sink)
    parts = task.prepare((1,))
    driver.abort([part.name for part in parts])
    driver.abort([part.name for part in parts])  # harmless
    with pytest.raises(SinkDataLost, match=r"never reached table shop\.orders.*rolled it back or emptied"):
        driver.commit(parts)
    task.close()
    assert database.execute("SELECT count(*) FROM shop.orders").fetchone() == (0,)


@pytest.mark.parametrize("mode", ["staged", "prepared"])
def test_the_ledger_keeps_one_row_for_each_writer(postgres: Postgres, database: psycopg.Connection, mode: Any) -> None:
    sink = PostgresSink(postgres.conninfo, "shop.orders", ["id"], mode=mode)
    driver = committer(sink)
    for attempt in range(2):
        task = Task(sink, attempt)
        for number in range(3):
            driver.commit(task.prepare((10 * attempt + number,)))
        task.close()
    assert database.execute("SELECT sink, number FROM shop.headgate_commits").fetchall() == [("out", 2), ("out", 2)]


def test_a_user_who_may_not_create_tables_can_use_those_of_another(
    postgres: Postgres, database: psycopg.Connection
) -> None:
    sink = PostgresSink(postgres.conninfo, "shop.orders", ["id"])
    committer(sink)
    database.execute("DROP ROLE IF EXISTS clerk; CREATE ROLE clerk LOGIN; GRANT USAGE ON SCHEMA shop TO clerk")
    database.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA shop TO clerk")
    clerks = PostgresSink(postgres.conninfo.replace("user=headgate", "user=clerk"), "shop.orders", ["id"])
    driver, task = committer(clerks), Task(clerks)
    driver.commit(task.prepare((1,)))
    task.close()
    assert database.execute("SELECT id FROM shop.orders").fetchall() == [(1,)]


def test_a_table_that_does_not_fit_fails_the_start(postgres: Postgres, database: psycopg.Connection) -> None:  # H6
    with pytest.raises(SinkMisused, match=r"no table shop\.orderz"):
        committer(PostgresSink(postgres.conninfo, "shop.orderz", ["id"]))
    with pytest.raises(SinkMisused, match=r"no columns \['colour'\]"):
        committer(PostgresSink(postgres.conninfo, "shop.orders", ["id", "colour"]))


def test_a_key_without_a_unique_index_fails_the_start(postgres: Postgres, database: psycopg.Connection) -> None:  # H6
    database.execute("CREATE TABLE shop.plain (id bigint, name text)")
    sink = PostgresSink(postgres.conninfo, "shop.plain", ["id", "name"], key=["id", "name"])
    with pytest.raises(
        SinkMisused, match=r"no unique index on \(id, name\).*CREATE UNIQUE INDEX ON shop\.plain \(id, na"
    ):
        committer(sink)
    database.execute("CREATE UNIQUE INDEX ON shop.plain (id, name)")
    committer(sink)


def test_rows_that_the_table_refuses_wait_for_a_change_of_the_table(
    postgres: Postgres, database: psycopg.Connection
) -> None:
    database.execute("CREATE TABLE shop.strict (id bigint NOT NULL)")
    sink = PostgresSink(postgres.conninfo, "shop.strict", ["id"])
    driver, task = committer(sink), Task(sink)
    parts = task.prepare((1,), (None,))
    for _ in range(2):
        with pytest.raises(
            SinkCommitFailed, match=r"refuses rows of sink .*stay in shop\.headgate_staged_strict, .*: null value"
        ):
            driver.commit(parts)
    database.execute("ALTER TABLE shop.strict ALTER id DROP NOT NULL")
    driver.commit(parts)
    assert database.execute("SELECT id FROM shop.strict ORDER BY id").fetchall() == [(1,), (None,)]
    task.close()


def test_prepared_transactions_that_are_switched_off_fail_the_start() -> None:  # H6
    server = Postgres(max_prepared_transactions="0")
    try:
        with server.connect() as connection:
            connection.execute("CREATE TABLE orders (id bigint)")
        with pytest.raises(SinkMisused, match=r'switched off.*mode="staged"'):
            committer(PostgresSink(server.conninfo, "orders", ["id"], mode="prepared"))
        committer(PostgresSink(server.conninfo, "orders", ["id"]))
    finally:
        server.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"columns": []}, "list of names"),
        ({"columns": ["id"], "key": ["id"], "mode": "prepared"}, 'use mode="staged"'),
        ({"columns": ["id"], "op_column": "op"}, "pass key= too"),
        ({"columns": ["id", "op"], "key": ["id"], "op_column": "op"}, "leave it out of columns"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SinkMisused, match=says):
        PostgresSink("", "orders", **settings)


def test_a_name_that_is_too_long_for_a_prepared_transaction_is_refused(
    postgres: Postgres, database: psycopg.Connection
) -> None:
    sink = PostgresSink(postgres.conninfo, "shop.orders", ["id"], mode="prepared")
    with pytest.raises(SinkMisused, match="at most"):
        sink.committer(SinkCommitterContext("x" * 150, "out", get_logger("test"))).open()


@pytest.mark.parametrize("mode", ["staged", "prepared"])
def test_a_task_leaves_nothing_in_a_session_that_a_pooler_gives_to_others(
    postgres: Postgres, database: psycopg.Connection, mode: Any
) -> None:  # H170
    """As PgBouncer does after each transaction: a statement that psycopg prepares would be missing in the next one."""
    sink = PostgresSink(postgres.conninfo, "shop.orders", ["id"], mode=mode)
    driver, task = committer(sink), Task(sink)
    limits = "SELECT name, setting FROM pg_settings WHERE name LIKE '%timeout'"
    for number in range(8):  # psycopg prepares what it executes for the sixth time
        driver.commit(task.prepare((number,)))
    session = task.writer._connection
    assert session is not None
    assert session.execute("SELECT statement FROM pg_prepared_statements").fetchall() == []
    assert session.execute(limits).fetchall() == database.execute(limits).fetchall()
    task.close()


@pytest.mark.parametrize("mode", ["staged", "prepared"])
def test_rows_are_written_through_a_pooler(
    postgres: Postgres, database: psycopg.Connection, pooler: PgBouncer, mode: Any
) -> None:  # H170
    sink = PostgresSink(pooler.conninfo, "shop.orders", ["id"], mode=mode)
    driver, tasks = committer(sink), [Task(sink, attempt) for attempt in range(2)]
    for number in range(8):  # psycopg prepares what it executes for the sixth time
        driver.commit([part for task in tasks for part in task.prepare((2 * number + tasks.index(task),))])
    for task in tasks:
        task.close()
    assert database.execute("SELECT array_agg(id ORDER BY id) FROM shop.orders").fetchone() == (list(range(16)),)


def test_a_long_name_of_a_sink_still_fits_into_its_transactions(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H172
    sink = PostgresSink(postgres.conninfo, "shop.orders", ["id"], mode="prepared")
    drivers = [sink.committer(SinkCommitterContext("x" * 98 + end, "out", get_logger("test"))) for end in "ab"]
    for driver in drivers:
        driver.open()
    writer = sink.writer(SinkWriterContext("x" * 98 + "a", 0, 0))
    writer.write((1,))
    parts = list(writer.prepare())
    writer.close()
    assert [list(driver.prepared()) for driver in drivers] == [[parts[0].name], []]
    drivers[0].commit(parts)
    assert database.execute("SELECT id FROM shop.orders").fetchall() == [(1,)]


def test_the_target_names_neither_password_nor_host() -> None:
    sink = PostgresSink("postgresql://me:secret@db1.example/shop", "orders", ["id"])
    assert sink.target == "postgresql:shop/orders/staged"
