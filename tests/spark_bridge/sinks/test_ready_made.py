# SPDX-License-Identifier: Apache-2.0

"""``TwoPhaseSinkOperator`` and ``TwoPhaseSinkCoordinator``, mostly with an atomic sink, in the real machines."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from threading import get_ident
from typing import Any

import pytest

from headgate import chain
from headgate.sinks import SinkCommitterContext, TwoPhaseSinkCoordinator, TwoPhaseSinkOperator
from headgate.testing import running_operator
from protocol.barrier_tracker import CompletedCheckpoint
from tests.spark_bridge.sinks.files.kit import a_driver
from tests.spark_bridge.sinks.memory import MemoryCommitter, MemorySink, Server


def row(subtask: int, number: int) -> dict[str, int]:
    return {"subtask": subtask, "number": number}


class Rows(TwoPhaseSinkOperator):
    """Its position does not depend on the parallelism: every application gets new records."""

    def snapshot_position(self) -> bytes:
        return b""

    def restore_position(self, position: bytes | None) -> None:
        """Nothing to return to."""

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return b""


class DiesFirst(TwoPhaseSinkCoordinator):
    """Its driver dies before it commits anything."""

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Too late."""


async def test_tasks_that_run_one_after_the_other_hold_up_nothing() -> None:  # H141
    """A subtask that has ended, or not begun, is not waited for."""
    server = Server()
    sink = MemorySink(server, "rows")
    async with running_operator(TwoPhaseSinkCoordinator(sink), parallelism=2, mode="streaming") as world:
        first = await world.launch_operator(0, lambda: TwoPhaseSinkOperator(sink))
        first.feed(row(0, 0))
        await world.settle()
        await world.checkpoint()
        assert server.rows == [(0, 0)]
        first.feed(row(0, 1))
        first.end_records()
        await world.settle()
        assert first.outcome == "success"
        second = await world.launch_operator(1, lambda: TwoPhaseSinkOperator(sink))
        second.feed(row(1, 0))
        await world.settle()
        await world.checkpoint()
        assert sorted(server.rows) == [(0, 0), (0, 1), (1, 0)]
        second.end_records()
    assert server.prepared == {"rows": {}}


async def test_a_killed_task_writes_again_only_what_no_checkpoint_covers() -> None:  # H18, H140
    server = Server()
    sink = MemorySink(server, "rows")
    async with running_operator(TwoPhaseSinkCoordinator(sink), parallelism=2, mode="streaming") as world:
        tasks = [await world.launch_operator(subtask, lambda: TwoPhaseSinkOperator(sink)) for subtask in range(2)]
        for subtask, task in enumerate(tasks):
            task.feed(row(subtask, 0))
        await world.settle()
        await world.checkpoint()
        assert sorted(server.rows) == [(0, 0), (1, 0)]
        tasks[0].feed(row(0, 1))
        await world.settle()
        await world.kill(tasks[0])
        again = await world.retry(tasks[0], [row(0, 0), row(0, 1)])
        assert again.outcome == "success"
        tasks[1].end_records()
        await world.settle()
    assert sorted(server.rows) == [(0, 0), (0, 1), (1, 0)]
    assert server.prepared == {"rows": {}}


async def a_checkpoint_with_held_lists(sink: MemorySink, parallelism: int) -> CompletedCheckpoint:
    async with running_operator(DiesFirst(sink), parallelism=parallelism, mode="streaming") as world:
        for subtask in range(parallelism):
            task = await world.launch_operator(subtask, lambda: Rows(sink))
            task.feed(row(subtask, 0))
        await world.settle()
        await world.checkpoint()
        return world.checkpoints[-1]


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
async def test_lists_that_were_held_make_a_whole_checkpoint_with_any_parallelism(
    parallelism: int, atomic: bool
) -> None:
    """H52, H83, H141: the proofs come with the lists, through attempts and subtasks that prepared nothing of them.

    In an atomic sink, nothing is visible before all lists have come again.
    """
    server = Server()
    checkpoint = await a_checkpoint_with_held_lists(MemorySink(server, "rows", atomic=atomic), 3)
    assert sum(len(part.held) for part in checkpoint.subtask_states.values()) == 3
    whole = [(subtask, 0) for subtask in range(3)]
    assert server.rows == []
    for _ in range(2):  # the second driver restores it too
        sink = MemorySink(server, "rows", atomic=atomic)
        coordinator: Any = TwoPhaseSinkCoordinator(sink)
        async with running_operator(
            coordinator, parallelism=parallelism, mode="streaming", restored=checkpoint
        ) as world:
            for subtask in range(parallelism):
                assert not atomic or sorted(server.rows) in ([], whole)
                await world.launch_operator(subtask, partial(Rows, sink))
                await world.settle()
            assert world.failures == []
            assert sorted(server.rows) == whole


async def test_a_sink_at_the_end_of_a_chain_commits_with_the_checkpoints_of_the_chain() -> None:  # H80, H140, H141
    server = Server()
    sink = MemorySink(server, "rows")

    def rows(numbers: Iterator[int]) -> Iterator[dict[str, int]]:
        for number in numbers:
            yield row(0, number)
            yield row(1, number)

    stages = chain(transform=rows, sink=(partial(TwoPhaseSinkCoordinator, sink), partial(TwoPhaseSinkOperator, sink)))
    async with running_operator(stages, parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0)
        task.feed(0)
        await world.settle()
        await world.checkpoint()
        assert server.rows == [(0, 0), (1, 0)]
        task.feed(1)
        await world.settle()
        await world.kill(task)
        task = await world.retry(task, [0, 1, 2])
        assert task.outcome == "success"
    assert server.rows == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert server.prepared == {"rows": {}}


async def test_a_committer_that_cannot_be_opened_is_closed() -> None:  # H6
    closed: list[bool] = []

    class Unreachable(MemoryCommitter):
        def open(self) -> None:
            raise ConnectionRefusedError("nobody is there")

        def close(self) -> None:
            closed.append(True)

    class UnreachableSink(MemorySink):
        def committer(self, context: SinkCommitterContext) -> MemoryCommitter:
            return Unreachable(context, self)

    coordinator = TwoPhaseSinkCoordinator(UnreachableSink(Server(), "rows"))
    with pytest.raises(ConnectionRefusedError):
        await coordinator.start(a_driver())
    await coordinator.close()
    assert closed == [True]


async def test_a_committer_is_made_outside_of_the_loop() -> None:
    made_in: list[int] = []

    class ImportingSink(MemorySink):
        @property
        def target(self) -> str:
            made_in.append(get_ident())
            return super().target

        def committer(self, context: SinkCommitterContext) -> MemoryCommitter:
            made_in.append(get_ident())
            return super().committer(context)

    coordinator = TwoPhaseSinkCoordinator(ImportingSink(Server(), "rows"))
    await coordinator.start(a_driver())
    await coordinator.close()
    assert len(made_in) >= 2
    assert get_ident() not in made_in
