# SPDX-License-Identifier: Apache-2.0

"""A budget on a real Spark (H182): whatever dies, no more is spent than there is, and nothing twice."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headgate import FixedDelay, Sidecar, SidecarConfig, SubtaskContext
from headgate.errors import BudgetExhausted
from tests.spark.conftest import LOCAL, SparkOn
from tests.spark.operators import kill_once
from tests.spark.primitives import killed_budget

pytestmark = pytest.mark.spark


@pytest.fixture
def spark(spark_on: SparkOn) -> SparkSession:
    return spark_on(LOCAL)


def test_what_a_killed_worker_had_reserved_is_spent(spark: SparkSession, tmp_path: Path) -> None:  # H182
    with Sidecar(spark) as sidecar:
        budget = sidecar.budget("usd", 10)
        job = sidecar.coordinate("call", parallelism=1, uses=[budget])

        def call(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
            for record in records:
                with budget.reserve(0.5) as spent:
                    if record == 3:
                        kill_once(tmp_path / "killed")
                    spent.settle(0.1)
                yield record

        assert sorted(job.run(call, range(6))) == list(range(6))
        assert (budget.reserved, budget.left) == (0.0, 10 - budget.spent)
        assert budget.spent == pytest.approx(3 * 0.1 + 0.5 + 6 * 0.1)
        figures = sidecar.status().operators["call"].parts["usd"]
        assert (figures["lost_total"], figures["limit"]) == (0.5, 10.0)


def test_a_job_whose_budget_is_exhausted_ends_with_that_once(spark: SparkSession, tmp_path: Path) -> None:
    with Sidecar(spark) as sidecar:
        budget = sidecar.budget("usd", 1.0)
        job = sidecar.coordinate("call", parallelism=2, uses=[budget])

        def call(context: SubtaskContext, records: Iterator[int]) -> Iterator[int]:
            (tmp_path / f"{context.subtask} {context.task_attempt_id}").touch()
            for record in records:
                with budget.reserve(0.25):
                    yield record

        with pytest.raises(BudgetExhausted, match=r"'usd' is exhausted: 1 of 1 is spent"):
            job.run(call, range(100), restart=FixedDelay(3, 0.0))
        assert budget.spent == 1.0
        assert len(list(tmp_path.iterdir())) <= 2 * 2, "no restarts, and few tasks again before the job has ended"


def test_coroutines_spend_a_budget_to_its_last_unit(spark: SparkSession) -> None:
    with Sidecar(spark) as sidecar:
        budget = sidecar.budget("calls", 300)
        permits = sidecar.permits("tokens", per_s=100_000, burst=20_000)
        job = sidecar.coordinate("call", parallelism=2, uses=[budget, permits])

        def call(records: Iterator[int]) -> Iterator[int]:
            async def one(record: int) -> int:
                try:
                    async with budget.reserve(2) as spent, permits.weight(100) as used:
                        await asyncio.sleep(0.001)
                        used.correct(60)
                        spent.settle(1)
                except BudgetExhausted:
                    return 0
                return 1

            async def all_of_them() -> list[int]:
                return await asyncio.gather(*map(one, records))

            return iter(asyncio.run(all_of_them()))

        results = job.run(call, range(400))
        assert sum(results) == budget.spent
        assert budget.spent in (299, 300), "the last one cannot reserve 2"


def test_a_killed_driver_gives_nothing_back_and_the_next_run_continues(spark: SparkSession, tmp_path: Path) -> None:
    """H182. What the next run finds spent is above what was really spent by little."""
    storage, notes = tmp_path / "storage", tmp_path / "notes"
    notes.mkdir()
    killed = subprocess.run([sys.executable, killed_budget.__file__, str(storage), str(notes)], check=False)
    assert killed.returncode == -signal.SIGKILL
    really = sum(float(line) for one in notes.iterdir() for line in one.read_text().split())
    assert really >= 20.0

    def run(total: float, amount: float) -> tuple[float, float]:
        """Return what was spent before, and what is left after, a use of ``amount``."""
        with Sidecar(spark, SidecarConfig(storage=storage)) as sidecar:
            budget = sidecar.budget("usd", total)
            job = sidecar.coordinate("call", parallelism=1, uses=[budget])
            before = budget.spent

            def call(records: Iterator[int]) -> Iterator[int]:
                with budget.reserve(amount):
                    yield from records

            job.run(call, [1])
            return before, budget.left

    found, left = run(100.0, 1.0)
    in_flight = 2 * 2 * killed_budget.COST
    assert really <= found <= really + 2 * in_flight + 2.0, "what two tasks had reserved or waited for, and a fiftieth"
    assert left == 100.0 - found - 1.0
    assert run(150.0, 2.0) == (found + 1.0, 150.0 - found - 3.0), "a total that was raised leaves more"
    with pytest.raises(BudgetExhausted, match=r"of 10 is spent, in this run and in earlier ones"):
        run(10.0, 1.0)
