# SPDX-License-Identifier: Apache-2.0

"""Tests with the fixtures that Headgate adds to pytest: a world without Spark, and a sidecar on a real one.

Run it with ``python -m pytest --asyncio-mode auto examples/testing/test_fixtures.py``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest

from examples.testing.test_rate_limit import PermitBucket
from headgate import Sidecar
from headgate.testing import World


async def test_permits_are_the_same_for_all_callers(headgate_world: Callable[..., Awaitable[World]]) -> None:
    world = await headgate_world(PermitBucket, parallelism=2)
    first, second = await world.launch_all()
    answers = [task.request("permit") for task in (first, second)]
    await world.settle()
    assert [answer.value for answer in answers] == [0.0, 0.0]


def squares(numbers: Iterator[int]) -> Iterator[int]:
    return (number * number for number in numbers)


@pytest.mark.spark
def test_squares_on_a_real_spark(headgate_sidecar: Sidecar) -> None:
    job = headgate_sidecar.coordinate("squares", parallelism=2)
    assert job.run(squares, range(4)) == [0, 1, 4, 9]
