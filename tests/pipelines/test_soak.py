# SPDX-License-Identifier: Apache-2.0

"""Each pair of the soak test once, and one run on a real Spark; ``make soak-pipeline`` makes many of both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pipelines.pairs import PAIRS, Servers
from tests.pipelines.real.gates import Gate
from tests.pipelines.real.soak import Fault, Plan, draw, play
from tests.pipelines.soak import soak_once

pytestmark = [pytest.mark.anyio, pytest.mark.long]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


@pytest.mark.parametrize(("source", "sink"), PAIRS)
async def test_each_row_reaches_the_target_once_although_tasks_drivers_and_servers_die(
    servers: Servers, source: str, sink: str
) -> None:  # H80, H130, H134, H140, H141
    outcome = await soak_once(servers, source, sink, seed=3)
    assert outcome.is_right, outcome


@pytest.mark.spark
def test_each_row_reaches_the_target_once_although_parts_of_a_real_spark_die(servers: Servers) -> None:
    """H24, H52, H64, H80: each fault waits until the pipeline is in the middle, and the pipeline waits for it."""
    plan = Plan(
        "redis",
        "prepared",
        apart=True,
        holds_events=True,
        faults=(
            Fault("sidecar", Gate("after prepare", 1), 0),
            Fault("worker", Gate("write", 2), 0),
            Fault("server", Gate("before commit", 1), 0),
        ),
    )
    outcome = play(servers, plan)
    assert outcome.is_right, outcome
    assert (outcome["sidecar"], outcome["worker"], outcome["server"], outcome["not reached"]) == (1, 1, 1, 0)


def test_a_seed_names_one_run() -> None:
    assert draw(7) == draw(7)
    assert {draw(seed).source for seed in range(len(PAIRS))} == {one for one, _ in PAIRS}
