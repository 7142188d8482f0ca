# SPDX-License-Identifier: Apache-2.0

"""The PostgreSQL example writes each payment once, into a real server."""

from __future__ import annotations

import pytest

from tests.examples.conftest import RunExample
from tests.postgres import Postgres


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
