# SPDX-License-Identifier: Apache-2.0

"""A task is killed after a checkpoint, and the retry continues from there: both halves restore their state.

Run it with ``python -m pytest --asyncio-mode auto examples/testing/test_kill_and_retry.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

from headgate import FailureKind, FailureReason, OperatorCoordinator, SubtaskContext, SubtaskOperator
from headgate.testing import Bookkeeping, check_bookkeeping, running_operator


class Totals(OperatorCoordinator):
    """Adds up what the subtasks report, and rolls one subtask back when it restores a checkpoint."""

    def __init__(self) -> None:
        self.totals: dict[int, int] = {}
        self.failures: list[FailureKind] = []
        self._at_checkpoint: dict[int, dict[int, int]] = {-1: {}}

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: int) -> None:
        self.totals[subtask] = self.totals.get(subtask, 0) + event

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.failures.append(reason.kind)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self.totals[subtask] = self._at_checkpoint[checkpoint_id].get(subtask, 0)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self._at_checkpoint[checkpoint_id] = dict(self.totals)
        return json.dumps(sorted(self.totals.items())).encode()

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.totals = dict(json.loads(state)) if state else {}
        self._at_checkpoint[checkpoint_id] = dict(self.totals)


class Adder(SubtaskOperator):
    """Reports each number. Its state is how many it has reported, so that a retry skips those."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.reported = int(state) if state and context.input_begins_again else 0

    def process(self, records: Iterator[int]) -> None:
        for number in islice(records, self.reported, None):
            self.context.send_event(number)
            self.reported += 1

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return str(self.reported).encode()


async def test_killed_task_goes_on_from_the_checkpoint() -> None:
    totals = Totals()
    async with running_operator(totals, parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0, Adder)
        task.feed(1, 2, 3)
        await world.settle()
        await world.checkpoint()

        task.feed(100)  # no checkpoint covers this one
        await world.settle()
        assert totals.totals == {0: 106}

        await world.kill(task)
        assert totals.failures == [FailureKind.KILLED]
        assert totals.totals == {0: 6}

        retried = await world.retry(task, [1, 2, 3, 100, 4])
        assert retried.outcome == "success"
        assert totals.totals == {0: 110}


async def test_total_is_right_whatever_the_order_of_messages() -> None:
    for seed in range(20):
        totals = Totals()
        async with running_operator(totals, parallelism=2, mode="streaming", seed=seed) as world:
            first = await world.launch_operator(0, Adder)
            await world.launch_operator(1, Adder, range(5))
            first.feed(*range(10))
            world.begin_checkpoint()  # somewhere among the events
            await world.kill(first)
            await world.retry(first, range(20))
            assert totals.totals == {0: sum(range(20)), 1: sum(range(5))}


async def test_a_reset_returns_the_total_of_a_subtask_whatever_happened_before() -> None:
    def make() -> Bookkeeping:
        totals = Totals()
        return Bookkeeping(totals, Adder, records=range(10), view=lambda subtask: totals.totals.get(subtask, 0))

    await check_bookkeeping(make, parallelism=[2])
