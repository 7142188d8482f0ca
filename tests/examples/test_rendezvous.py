# SPDX-License-Identifier: Apache-2.0

"""The example of tasks that wait for each other. tests/spark/test_replies.py kills one of them."""

from __future__ import annotations

import pytest

from examples.rendezvous import Meeting
from headgate.testing import running_operator
from tests.examples.conftest import RunExample


async def test_all_get_the_total_when_the_last_one_has_reported() -> None:  # H84
    async with running_operator(Meeting, parallelism=4) as world:
        tasks = await world.launch_all()
        answers = [task.request([0, 10 * task.attempt.subtask]) for task in tasks[:3]]
        await world.advance(3600.0)
        assert all(answer.open for answer in answers)
        answers.append(tasks[3].request([0, 30]))
        await world.settle()
        assert [answer.value for answer in answers] == [60] * 4


async def test_a_task_that_dies_while_it_waits_reports_again() -> None:  # H85
    async with running_operator(Meeting, parallelism=4) as world:
        tasks = await world.launch_all()
        answers = [task.request([0, 1]) for task in tasks[:3]]
        await world.settle()
        await world.kill(tasks[0])
        tasks[3].request([0, 1])
        await world.settle()
        assert answers[1].open  # one is missing again
        retry = await world.retry(tasks[0])
        answer = retry.request([0, 1])
        await world.settle()
        assert [one.value for one in (answer, *answers[1:])] == [4] * 3
        again = retry.request([0, 1])
        await world.settle()
        assert again.value == 4  # that round is over


@pytest.mark.long
@pytest.mark.spark
def test_the_example_shows_the_totals(run_example: RunExample) -> None:
    ended = run_example("rendezvous")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("the totals of its rounds are [4950, 24750, 123750]") == 4
    assert ended.stderr == ""
