# SPDX-License-Identifier: Apache-2.0

"""A few days of two kinds; ``make soak-daily`` has ten days of every one."""

from __future__ import annotations

import pytest

from tests.days.__main__ import is_right
from tests.days.soak import soak_days
from tests.pipelines.pairs import Servers

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.mark.parametrize("kind", ["files", "splits"])
def test_all_rows_of_every_day_are_there_once_although_the_job_is_killed_and_repeated(kind: str) -> None:  # H174
    servers = Servers()
    try:
        outcome = soak_days(servers, kind, seed=6, days=3)
    finally:
        servers.close()
    assert is_right(outcome), outcome
