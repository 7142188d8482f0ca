# SPDX-License-Identifier: Apache-2.0

"""Tests with the fixtures that Headgate adds to pytest: a world without Spark, and a sidecar on a real one.

Run it with ``python -m pytest --asyncio-mode auto examples/testing/test_fixtures.py``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from headgate import OperatorCoordinator, Sidecar
from headgate.testing import World


class Tickets(OperatorCoordinator):
    def __init__(self) -> None:
        self.last = 0

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> int:
        self.last += 1
        return self.last


async def test_no_ticket_is_given_out_twice(headgate_world: Callable[..., Awaitable[World]]) -> None:
    world = await headgate_world(Tickets, parallelism=2)
    first, second = await world.launch_all()
    answers = [task.request("ticket") for task in (first, second)]
    await world.settle()
    assert sorted(answer.value for answer in answers) == [1, 2]


def squares(numbers: Iterator[int]) -> Iterator[int]:
    return (number * number for number in numbers)


@pytest.mark.spark
def test_squares_on_a_real_spark(headgate_sidecar: Sidecar) -> None:
    job = headgate_sidecar.coordinate("squares", parallelism=2)
    assert job.run(squares, range(4)) == [0, 1, 4, 9]
