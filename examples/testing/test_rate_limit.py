# SPDX-License-Identifier: Apache-2.0

"""A global rate limit, tested in virtual time: seconds pass without waiting, to the millisecond.

Run it with ``python -m pytest --asyncio-mode auto examples/testing/test_rate_limit.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headgate import CoordinatorContext, OperatorCoordinator, SubtaskContext, SubtaskOperator
from headgate.testing import running_operator

PERMITS_PER_S = 2.0
PERMITS_IN_A_BURST = 4.0


class PermitBucket(OperatorCoordinator):
    """A bucket that fills steadily; one permit allows one call."""

    async def start(self, context: CoordinatorContext) -> None:
        self._clock = context.clock  # the virtual one in a test
        self._permits = PERMITS_IN_A_BURST
        self._filled_at = self._clock.now()

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> float:
        """Answer 0 for a permit, else the seconds after which to ask again."""
        now = self._clock.now()
        self._permits = min(PERMITS_IN_A_BURST, self._permits + (now - self._filled_at) * PERMITS_PER_S)
        self._filled_at = now
        if self._permits < 1:
            return (1 - self._permits) / PERMITS_PER_S
        self._permits -= 1
        return 0.0


class Caller(SubtaskOperator):
    """Calls a service once for each record, never without a permit."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context

    def process(self, records: Iterator[str]) -> Iterator[str]:
        for record in records:
            while wait_s := self.context.request("permit"):
                self.context.wait_for_event(wait_s)
            yield f"called for {record}"


async def test_permits_come_back_at_the_agreed_rate() -> None:
    async with running_operator(PermitBucket, parallelism=2) as world:
        first, second = await world.launch_all()

        answers = [task.request("permit") for task in (first, second, first, second)]
        await world.settle()
        assert [answer.value for answer in answers] == [0.0, 0.0, 0.0, 0.0]

        early = first.request("permit")
        await world.settle()
        assert early.value == 0.5

        await world.advance(0.5)
        late = first.request("permit")
        await world.settle()
        assert late.value == 0.0


async def test_all_callers_together_keep_the_rate() -> None:
    async with running_operator(PermitBucket, parallelism=2) as world:
        records = [f"record {number}" for number in range(10)]
        callers = [await world.launch_operator(subtask, Caller, records) for subtask in (0, 1)]

        assert sum(len(caller.outputs) for caller in callers) == 4
        await world.advance(3.0)
        assert sum(len(caller.outputs) for caller in callers) == 10
        await world.advance(60.0)
        assert [caller.outcome for caller in callers] == ["success", "success"]
