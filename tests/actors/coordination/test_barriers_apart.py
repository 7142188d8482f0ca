# SPDX-License-Identifier: Apache-2.0

"""Checkpoint barriers that travel apart from the events (H23, H40)."""

from __future__ import annotations

from protocol.ids import ExecutionAttempt
from tests.actors.coordination.operator_world import running_tasks


async def test_barriers_are_handed_over_and_the_checkpoint_waits_for_them() -> None:  # H23, H40
    handed_over: list[tuple[ExecutionAttempt, int, int]] = []
    async with running_tasks(2, inject_barrier=lambda *args: handed_over.append(args)) as (world, tasks):
        await world.coordinator.gateways[0].send_event("before the cut")
        answer = await world.checkpoint()
        assert sorted(attempt.subtask for attempt, _, _ in handed_over) == [0, 1]
        await world.coordinator.gateways[0].send_event("after the cut")
        await world.settle()
        assert tasks[0].handled == ["before the cut"]
        assert answer.open
        for attempt, checkpoint_id, events_before in handed_over:
            tasks[attempt.subtask].meet_barrier(checkpoint_id, events_before)
        await world.settle()
        assert tasks[0].handled[:2] == ["before the cut", ("snapshot", 1)]
        assert tasks[0].events == ["before the cut", "after the cut"]
        assert answer.values == [1]


async def test_a_barrier_that_cannot_be_sent_aborts_the_checkpoint() -> None:  # H45, H48
    def fail(attempt: ExecutionAttempt, checkpoint_id: int, events_before: int) -> None:
        raise ConnectionError("no micro-batch is running")

    async with running_tasks(1, inject_barrier=fail) as (world, (task,)):
        answer = await world.checkpoint()
        assert "its barrier could not be sent: ConnectionError: no micro-batch is running" in answer.reason()
        assert task.handled == [("aborted", 1)]
        task.send("open again")
        await world.settle()
        assert world.coordinator.events == ["open again"]
        assert not world.failures
