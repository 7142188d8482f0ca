# SPDX-License-Identifier: Apache-2.0

"""The examples from real systems to real systems lose and double nothing."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.examples.conftest import RunExample
from tests.postgres import Postgres
from tests.redis_server import RedisServer


@pytest.mark.long
@pytest.mark.spark
def test_each_payment_is_in_the_table_once_although_a_task_is_killed(
    run_example: RunExample, postgres: Postgres
) -> None:
    """H18, H52."""
    ended = run_example("postgres_sink", postgres.conninfo)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "after the first run, (payments, different ones): (2000, 2000), of 2000",
        "after the second run, (payments, different ones): (2000, 2000), of 2000",
        "balances: (1,) (2,) (3,)",
        "a process was killed: True",
    ]
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.spark
def test_orders_from_redis_are_in_a_delta_table_once_although_tasks_and_the_job_die(
    run_example: RunExample, redis_server: RedisServer
) -> None:
    """H80, H110, H130, H141."""
    ended = run_example("checked_orders", redis_server.url)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "3000 rows, 3000 different orders",
        "attempts lost: several",
        "limits that were used: several",
        "wrong rows: 0",
    ]
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.spark
def test_each_balance_is_in_the_history_once_over_five_deaths_of_the_driver(run_example: RunExample) -> None:
    """H52, H64, H134, H140. It takes longer than a minute, because six drivers start Spark one after the other.

    On the server that other tests share, a transaction that one of them has left open would delay the slot.
    """
    with closing(Postgres()) as postgres:
        ended = run_example("account_history", postgres.conninfo)

        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.splitlines() == [
            "the driver was killed 5 times",
            "2000 of 2000 accounts have each balance once, up to the last one",
        ]
        with postgres.connect() as database:
            database.execute(
                "CREATE TEMP TABLE expected AS SELECT id, one AS balance FROM accounts, "
                "LATERAL (SELECT min(balance) AS first FROM history WHERE history.id = accounts.id) AS read, "
                "generate_series(first, accounts.balance) AS one"
            )
            difference = "SELECT id, balance FROM {} EXCEPT ALL SELECT id, balance FROM {}"
            missing = database.execute(difference.format("expected", "history")).fetchall()
            doubled = database.execute(difference.format("history", "expected")).fetchall()
            assert (missing, doubled) == ([], []), "row by row"
            order = "SELECT id, balance, op, row_number() OVER (PARTITION BY id ORDER BY lsn, balance) FROM history"
            first = "SELECT id FROM ({}) AS one WHERE op <> CASE row_number WHEN 1 THEN 'r' ELSE 'u' END"
            assert database.execute(first.format(order)).fetchall() == [], "each account is read once, then updated"
            (left,) = database.execute("SELECT count(*) FROM headgate_staged_history").fetchone() or (None,)
            assert left == 0, "nothing is left that was staged"
