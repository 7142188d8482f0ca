# SPDX-License-Identifier: Apache-2.0

"""The PostgreSQL sink and types: each value arrives as it was, or is refused with its column, also after an ALTER."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from select import select
from typing import Any

import psycopg
import pyarrow
import pytest
from pyspark.sql import Row

from headgate.sinks import PostgresSink
from spark_bridge.sinks.two_phase.errors import SinkCommitFailed, SinkMisused
from tests.postgres import Postgres
from tests.spark_bridge.sinks.test_postgres import Task, committer

NOON = datetime(2026, 1, 1, 12)  # noqa: DTZ001
PRICE = "CREATE TYPE typed.price AS (amount numeric(10,2), at timestamptz)"


@pytest.fixture
def database(postgres: Postgres) -> Iterator[psycopg.Connection]:
    """An empty schema ``typed``, in a server whose zone is neither UTC nor the worker's."""
    with postgres.new_schema("typed") as connection:
        connection.execute("ALTER DATABASE postgres SET timezone = 'America/New_York'; SET timezone = 'UTC'")
        yield connection
        connection.execute("ALTER DATABASE postgres RESET timezone")


def a_sink(postgres: Postgres, database: psycopg.Connection, columns: str, **settings: Any) -> PostgresSink:
    """A sink for a new table ``typed.t``; ``columns`` as in CREATE TABLE."""
    database.execute(f"CREATE TABLE typed.t ({columns})")
    names = [column.split()[0] for column in columns.split(", ")]
    return PostgresSink(postgres.conninfo, "typed.t", names, **settings)


def write(sink: PostgresSink, *records: Any) -> None:
    driver, task = committer(sink), Task(sink)
    try:
        driver.commit(task.prepare(*records))
    finally:
        task.close()


def rows(database: psycopg.Connection) -> list[Any]:
    return database.execute("SELECT * FROM typed.t").fetchall()


@pytest.mark.parametrize("mode", ["staged", "prepared"])
def test_timestamps_of_spark_arrive_as_the_same_instants_whatever_the_zones(
    postgres: Postgres, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:  # H171
    database.execute("CREATE TYPE typed.span AS (since timestamptz, local timestamp)")
    columns = "at timestamptz, local timestamp, many timestamptz[], span typed.span"
    sink = a_sink(postgres, database, columns, mode=mode)
    with monkeypatch.context() as context:
        context.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        write(sink, Row(at=NOON, local=NOON, many=[NOON], span=Row(since=NOON, local=NOON)))
    time.tzset()
    at = datetime(2026, 1, 1, 6, 30, tzinfo=UTC)
    found = database.execute("SELECT at, local, many, (span).since, (span).local FROM typed.t").fetchall()
    assert found == [(at, NOON, [at], at, NOON)]


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        ("timestamptz", NOON),
        ("timestamptz", date(2026, 1, 1)),
        ("timestamptz", "2026-01-01 12:00:00"),
        ("timestamptz[]", [None, NOON]),
        ("timestamp", NOON.replace(tzinfo=UTC)),
        ("timestamp", "2026-01-01 12:00:00+02"),
        ("timestamp(0)", NOON.replace(microsecond=1)),
        ("timestamptz(3)", NOON.replace(microsecond=1, tzinfo=UTC)),
        ("timetz", NOON.time()),
        ("time", NOON),
        ("time", NOON.replace(tzinfo=UTC).timetz()),
        ("interval(0)", timedelta(microseconds=1)),
        ("date", NOON),
        ("date", "2026-01-01 12:00:00"),
        ("numeric(10,2)", Decimal("1.2345")),
        ("numeric(10,2)", 1.2345),
        ("numeric(10,2)", "1.2345"),
        ("numeric(10,2)[]", [Decimal(1), [Decimal("1.2345")]]),
        ("typed.money", Decimal("1.2345")),
        ("bigint", 7.5),
        ("integer[]", [float("nan")]),
        ("smallint", float("inf")),
        ("real", 3.141592653589793),
        ("double precision", Decimal("1.23456789012345678901")),
        ("double precision", 2**53 + 1),
        ("text", b"a"),
        ("text", "a\0b"),
        ("text[]", ["a\0b"]),
        ("text", {"a": 1}),
        ("varchar(2)", "a  "),
        ("bytea", "a\\\\b"),
        ("jsonb", {"a": NOON}),
        ("jsonb", {"a": ["b\0"]}),
        ("jsonb", {1: "a", "1": "b"}),
        ("jsonb", [float("nan")]),
        ("jsonb", b"{}"),
        ("typed.price", {"amount": Decimal("1.2345")}),
        ("typed.price", (1, datetime(2026, 1, 1))),  # noqa: DTZ001
        ("typed.price", {"amount": 1, "discount": 1}),
        ("typed.price[]", [(1, None), (Decimal("1.2345"), None)]),
    ],
)
def test_a_value_that_the_server_would_change_is_refused_with_its_column(
    postgres: Postgres, database: psycopg.Connection, type_: str, value: Any
) -> None:  # H171
    database.execute("CREATE DOMAIN typed.money AS numeric(10,2)")
    database.execute(PRICE)
    sink = a_sink(postgres, database, f"id bigint, v {type_}")
    with pytest.raises(ValueError, match=r"column 'v[][.a-z]*' of the row \(1, .*: \S+"):
        write(sink, (1, value))
    assert rows(database) == []


@pytest.mark.parametrize(
    ("type_", "value", "arrives"),
    [
        ("timestamptz", "2026-01-01 12:00:00+00", NOON.replace(tzinfo=UTC)),
        ("timestamptz(0)", NOON.replace(tzinfo=UTC), NOON.replace(tzinfo=UTC)),
        ("timestamp", "2026-01-01", datetime(2026, 1, 1)),  # noqa: DTZ001
        ("date", datetime(2026, 1, 1), date(2026, 1, 1)),  # noqa: DTZ001
        ("numeric(10,2)", Decimal("1.2500"), Decimal("1.25")),
        ("numeric(10,2)", Decimal("NaN"), "NaN"),
        ("numeric(10,2)[]", [[Decimal(1), Decimal("2.5")]], [[Decimal(1), Decimal("2.50")]]),
        ("bigint", 7.0, 7),
        ("integer[]", [Decimal("2.00"), None, 3], [2, None, 3]),
        ("real", 0.1, 0.1),
        ("double precision", Decimal("0.1"), 0.1),
        ("jsonb", {"a": [1, None, True, "ä\\u0000"], "b": 1.5}, {"a": [1, None, True, "ä\\u0000"], "b": 1.5}),
        ("jsonb", Row(a=[Row(b=1)]), {"a": [{"b": 1}]}),
        ("jsonb", '{"a": 1}', {"a": 1}),
        ("json", [], []),
        ("jsonb", True, True),
        ("jsonb[]", [{"a": 1}, [2], None], [{"a": 1}, [2], None]),
        ("varchar(2)", "ab", "ab"),
        ("bytea", "\\x00ff", b"\x00\xff"),
        ("typed.price", Row(at=None, amount=Decimal("1.5")), "(1.50,)"),  # by name, not by place
        ("typed.price", {"amount": 1}, "(1.00,)"),
        ("typed.price", "(1.5,)", "(1.50,)"),
        ("typed.price[]", [(1, None), None], '{"(1.00,)",NULL}'),
    ],
)
def test_a_value_that_the_column_can_have_arrives(
    postgres: Postgres, database: psycopg.Connection, type_: str, value: Any, arrives: Any
) -> None:  # H171
    database.execute(PRICE)
    write(a_sink(postgres, database, f"v {type_}"), {"v": value})
    ((found,),) = rows(database)
    assert found == arrives or str(found) == arrives


def test_times_of_arrow_are_taken_as_its_types_say(postgres: Postgres, database: psycopg.Connection) -> None:  # H171
    sink = a_sink(postgres, database, "at timestamptz, local timestamp")
    instants = pyarrow.array([NOON.replace(tzinfo=UTC)], pyarrow.timestamp("us", "Asia/Kolkata"))
    local = pyarrow.array([NOON], pyarrow.timestamp("us"))
    write(sink, pyarrow.record_batch({"at": instants, "local": local}))
    assert rows(database) == [(NOON.replace(tzinfo=UTC), NOON)]
    with pytest.raises(ValueError, match=r"column 'at' .* has no zone"):
        write(sink, pyarrow.record_batch({"at": local}))


def test_an_empty_staging_table_follows_the_table(postgres: Postgres, database: psycopg.Connection) -> None:  # H170
    sink = a_sink(postgres, database, "amount numeric(10,2), code varchar(5), what text")
    write(sink, (Decimal("1.25"), "a", "b"))
    database.execute("ALTER TABLE typed.t ALTER amount TYPE numeric(14,4), ALTER code TYPE text")
    database.execute("ALTER TABLE typed.t DROP what; ALTER TABLE typed.t ADD what int")
    write(sink, (Decimal("1.2345"), "longer text", 5))
    assert rows(database) == [(Decimal("1.2500"), "a", None), (Decimal("1.2345"), "longer text", 5)]


def test_rows_that_are_staged_with_another_type_are_refused_until_somebody_decides(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H170, H171
    sink = a_sink(postgres, database, "amount numeric(14,4)")
    driver, task = committer(sink), Task(sink)
    parts = task.prepare((Decimal("1.2345"),))
    database.execute("ALTER TABLE typed.t ALTER amount TYPE numeric(10,2)")
    for again in (driver, committer(sink)):
        with pytest.raises(
            SinkCommitFailed, match=r"'amount' .* numeric\(10,2\) now, but still numeric\(14,4\).*ALTER"
        ):
            again.commit(parts)
    with pytest.raises(SinkMisused, match="Change the table back"):
        task.prepare((1,))  # so no more of them come
    task.close()
    assert rows(database) == []
    database.execute("ALTER TABLE typed.t ALTER amount TYPE numeric(14,4)")
    committer(sink).commit(parts)
    assert rows(database) == [(Decimal("1.2345"),)]


def test_rows_are_committed_after_the_staging_table_was_given_the_type_as_the_error_says(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H170
    sink = a_sink(postgres, database, "amount numeric(10,2)")
    driver, task = committer(sink), Task(sink)
    parts = task.prepare((Decimal("1.25"),))
    task.close()
    database.execute("ALTER TABLE typed.t ALTER amount TYPE numeric(14,4)")
    with pytest.raises(SinkCommitFailed) as refused:
        driver.commit(parts)
    database.execute(str(refused.value).split("stay what they are: ")[1].split(". Then")[0])
    committer(sink).commit(parts)
    assert rows(database) == [(Decimal("1.2500"),)]


def test_a_user_who_may_not_change_the_staging_table_is_told_what_its_owner_must_do(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H170
    committer(a_sink(postgres, database, "amount numeric(10,2)"))
    database.execute("DROP ROLE IF EXISTS typist; CREATE ROLE typist LOGIN; GRANT USAGE ON SCHEMA typed TO typist")
    database.execute("GRANT ALL ON ALL TABLES IN SCHEMA typed TO typist")
    database.execute("ALTER TABLE typed.t ALTER amount TYPE numeric(14,4)")
    sink = PostgresSink(postgres.conninfo.replace("user=headgate", "user=typist"), "typed.t", ["amount"])
    with pytest.raises(
        SinkMisused, match=r'ALTER TABLE "typed"\."headgate_staged_t" ALTER COLUMN "amount" TYPE num'
    ) as no:
        committer(sink)
    database.execute(str(no.value).split("stay what they are: ")[1].split(". Then")[0])
    write(sink, (Decimal("1.2345"),))
    assert rows(database) == [(Decimal("1.2345"),)]


def test_the_next_attempt_can_write_after_a_change_of_the_table(
    postgres: Postgres, database: psycopg.Connection
) -> None:  # H170
    sink = a_sink(postgres, database, "amount numeric(10,2)")
    driver, task = committer(sink), Task(sink)
    driver.commit(task.prepare((1,)))
    database.execute("ALTER TABLE typed.t ALTER amount TYPE numeric(14,4)")
    with pytest.raises(SinkMisused, match="amount"):
        task.prepare((Decimal("1.2345"),))
    task.close()
    assert list(driver.prepared()) == []  # the coordinator looks for leftovers before an attempt begins again
    task = Task(sink, 1)
    driver.commit(task.prepare((Decimal("1.2345"),)))
    task.close()
    assert rows(database) == [(Decimal("1.0000"),), (Decimal("1.2345"),)]


def test_null_in_the_key_is_refused(postgres: Postgres, database: psycopg.Connection) -> None:  # H171
    sink = a_sink(postgres, database, "id int UNIQUE, v text", key=["id"])
    with pytest.raises(ValueError, match=r"column 'id' is in the key and NULL in the row \(None, 'a'\)"):
        write(sink, (None, "a"), (None, "b"))
    assert rows(database) == []


@pytest.mark.parametrize("place", ["column", "index"])
def test_of_keys_that_differ_in_case_only_the_last_row_counts_if_they_are_one(
    postgres: Postgres, database: psycopg.Connection, place: str
) -> None:  # H171
    database.execute(
        "CREATE COLLATION typed.any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
    )
    collate = "COLLATE typed.any_case"
    sink = a_sink(postgres, database, f"id text {collate if place == 'column' else ''}, v int", key=["id"])
    database.execute(f"CREATE UNIQUE INDEX ON typed.t (id {collate})")
    write(sink, ("Ab", 1), ("aB", 2), ("c", 3))
    write(sink, ("AB", 4))
    assert sorted(v for _, v in rows(database)) == [3, 4]


@pytest.mark.parametrize("mode", ["staged", "prepared"])
def test_names_may_have_anything_in_them(postgres: Postgres, database: psycopg.Connection, mode: Any) -> None:
    database.execute('CREATE TABLE typed."Order 50%" ("select" int PRIMARY KEY, "Ünï %s %(x)s" text, "a""b{}" text)')
    columns = ["select", "Ünï %s %(x)s", 'a"b{}']
    sink = PostgresSink(
        postgres.conninfo, "typed.Order 50%", columns, key=["select"] if mode == "staged" else [], mode=mode
    )
    write(sink, (1, "x", "y"))
    assert database.execute('SELECT * FROM typed."Order 50%"').fetchall() == [(1, "x", "y")]
    assert list(committer(sink).prepared()) == []


@pytest.mark.parametrize("mode", ["staged", "prepared"])
def test_a_server_that_ends_idle_transactions_does_not_end_those_of_a_task(
    postgres: Postgres, database: psycopg.Connection, mode: Any
) -> None:
    sink = a_sink(postgres, database, "id int", mode=mode)
    driver, task = committer(sink), Task(sink)
    # Longer than the way from the task's BEGIN to its next statement, which switches it off, on a busy machine.
    database.execute("ALTER DATABASE postgres SET idle_in_transaction_session_timeout = '1s'")
    try:
        task.writer.write((1,))
        with closing(postgres.connect()) as witness:
            witness.execute("BEGIN")
            assert select([witness], [], [], 60)[0]  # the server has ended the later of the two
        parts = task.prepare((2,))
    finally:
        database.execute("ALTER DATABASE postgres RESET idle_in_transaction_session_timeout")
        task.close()
    driver.commit(parts)
    assert rows(database) == [(1,), (2,)]
