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
from tests.postgres import Postgres

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
