# SPDX-License-Identifier: Apache-2.0

"""Ready-made parts of a sidecar in another process (H52, H80): made by its factory, used by the driver's tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from headgate import Group, Permits, SharedValue, SubtaskContext, WorkQueue, concurrently
from headgate.errors import PeerLost
from protocol.errors import LocalProtocolError
from spark_bridge.primitives.chain import chain
from tests.spark.actions import Action, one_task_each
from tests.spark.conftest import LOCAL, NewProgram, SparkOn
from tests.spark.faults.own_process import attach, doubled, page_key
from tests.spark.faults.waiting import wait_until
from tests.spark.operators import kill_once

pytestmark = pytest.mark.spark

PAGES = 200


@pytest.fixture
def spark(spark_on: SparkOn) -> SparkSession:
    return spark_on(LOCAL)


def crawl(
    context: SubtaskContext,
    _: Iterator[Any],
    queue: WorkQueue[int],
    permits: Permits,
    rules: SharedValue[dict[str, int]],
    marker: Path,
) -> Iterator[tuple[int, int]]:
    while rules.get()["factor"] == 1:  # until the driver has set it
        context.count("looked")
        context.wait_for_event(0.01)
    for page in queue:
        if page == PAGES // 2:
            kill_once(marker)
        queue.add([next_ for next_ in (2 * page, 2 * page + 1, page // 2) if 1 <= next_ <= PAGES], key=page_key)
        with permits:
            context.count("pages")
        yield page, rules.get()["factor"]


def test_parts_of_another_process_work_and_count_once_though_a_worker_is_killed(
    spark: SparkSession, program: NewProgram, tmp_path: Path
) -> None:
    with attach(spark, program("with_parts")) as sidecar:
        job = sidecar.operator("crawl")
        parts = [job.part(name) for name in ("pages", "service", "rules")]
        action = Action(lambda: job.run(job.subtask(crawl, *parts, tmp_path / "killed")))
        wait_until(lambda: job.counters().get("looked", 0) != 0, "the tasks wait for a rule")
        assert sidecar.request("crawl", {"factor": 7}, part="rules") == 2
        assert sorted(action.result()) == [(page, 7) for page in range(1, PAGES + 1)]
        assert (tmp_path / "killed").exists()
        assert job.counters()["pages"] == PAGES
        assert job.statistics()["splits_done"] == PAGES


def test_a_budget_and_a_cache_of_another_process_serve_coroutines_though_a_worker_is_killed(
    spark: SparkSession, program: NewProgram, tmp_path: Path
) -> None:
    """H182 H183: what the lost attempt had reserved stays spent, and what it had answered is known."""
    with attach(spark, program("with_parts")) as sidecar:
        job = sidecar.operator("paid")
        cache, budget = job.part("answers"), job.part("usd")

        async def pay(context: Any, question: int) -> int:
            async with budget.reserve(0.02) as spent:
                context.count("paid")
                await asyncio.sleep(0.01)
                if question == 7:
                    kill_once(tmp_path / "killed")
                spent.settle(0.01)
            return question * question

        async def ask(context: Any, number: int) -> int:
            answer: int = await cache.get_async(number % 10, lambda: pay(context, number % 10))
            return answer

        answers = job.run(concurrently(ask, limit=3), range(200))
        assert answers == [(number % 10) ** 2 for number in range(200)]
        assert (tmp_path / "killed").exists()
        paid: Any = job.counters()["paid"]
        assert paid <= 10, "some of the answers are those of the lost attempt"


def test_parts_are_made_again_with_a_sidecar_that_is_started_again(
    spark: SparkSession, program: NewProgram, tmp_path: Path
) -> None:
    """H18: the attempts are killed, and the queue begins again for their successors."""
    here = program("with_parts")
    with attach(spark, here) as sidecar:
        job = sidecar.operator("crawl")
        parts = [job.part(name) for name in ("pages", "service", "rules")]
        (tmp_path / "killed").touch()
        action = Action(lambda: job.run(job.subtask(crawl, *parts, tmp_path / "killed")))
        wait_until(lambda: job.counters().get("looked", 0) != 0, "the tasks wait for a rule")
        here.kill()
        here.start()
        wait_until(lambda: job.counters().get("looked", 0) != 0, "their successors wait for a rule")
        assert sidecar.request("crawl", {"factor": 5}, part="rules") == 2
        assert sorted(action.result()) == [(page, 5) for page in range(1, PAGES + 1)]
        assert job.counters()["pages"] == PAGES


def train(_: Iterator[Any], group: Group, marker: Path) -> Iterator[tuple[int, bytes]]:
    while True:
        try:
            with group as member:
                step, model = 0, np.zeros(300)
                if member.checkpoint is not None:
                    step, model = member.checkpoint.step, np.frombuffer(member.checkpoint.blob)
                while step < 20:
                    if step == 10 and member.rank == 1:
                        kill_once(marker)
                    model = model + member.all_reduce(np.full(300, member.rank + 1.0))
                    step += 1
                    member.save(step, model.tobytes())
                yield step, model.tobytes()
                return
        except PeerLost:
            continue


def test_a_group_of_another_process_goes_on_after_the_loss_of_a_member(
    spark: SparkSession, program: NewProgram, tmp_path: Path
) -> None:
    with attach(spark, program("with_parts")) as sidecar:
        job = sidecar.operator("train")
        task = job.subtask(train, job.part("workers"), tmp_path / "killed")
        models = sidecar.run(one_task_each(spark, 2).mapPartitions(task).collect)
    assert models == [(20, np.full(300, 60.0).tobytes())] * 2
    assert (tmp_path / "killed").exists()


def test_a_chain_uses_parts_of_another_process(spark: SparkSession, program: NewProgram) -> None:
    with attach(spark, program("with_parts")) as sidecar:
        job = sidecar.operator("chained")
        rules: SharedValue[dict[str, int]] = job.part("rules")

        def negated(numbers: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
            for number, twice in numbers:
                yield number, -twice * rules.get()["factor"]

        numbers = spark.sparkContext.parallelize(range(4), 2)
        rdd = numbers.mapPartitions(job.subtask(chain(double=doubled, negate=negated)))
        assert sorted(sidecar.run(rdd.collect)) == [(number, -6 * number) for number in range(4)]


def test_what_a_part_of_another_process_cannot_do_says_so(spark: SparkSession, program: NewProgram) -> None:
    def without_key(_: Iterator[Any], queue: WorkQueue[int]) -> Iterator[str]:
        for page in queue:
            try:
                queue.add([page + 1])
            except LocalProtocolError as error:
                yield str(error)
            else:
                return

    with attach(spark, program("with_parts")) as sidecar:
        job = sidecar.operator("crawl")
        with pytest.raises(ValueError, match="uses no part 'page'; there is 'pages', 'rules', 'service'"):
            job.part("page")
        with pytest.raises(LocalProtocolError, match="is set on the driver"):
            job.part("rules").set({})
        with pytest.raises(LocalProtocolError, match=r"handle.subtask\(function\)"):
            list(job.part("pages"))
        task = job.subtask(without_key, job.part("pages"))
        told = sidecar.run(one_task_each(spark, 2).mapPartitions(task).collect)
        assert len(told) == 1
        assert "has a key, but the function is in the sidecar's process" in told[0]
