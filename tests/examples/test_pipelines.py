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
def test_each_balance_is_in_the_history_once_over_deaths_of_the_driver(run_example: RunExample) -> None:
    """H52, H64, H134, H140. The example itself has ten deaths, which take two minutes.

    On the server that other tests share, a transaction that one of them has left open would delay the slot.
    """
    with closing(Postgres()) as postgres:
        ended = run_example("account_history", postgres.conninfo, 2)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "the driver was killed 2 times",
        "2000 of 2000 accounts have each balance once, up to the last one",
    ]
