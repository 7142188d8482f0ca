# SPDX-License-Identifier: Apache-2.0

"""A sink that is restored with another parallelism: the product's coordinator and operator, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headgate.testing import running_operator
from protocol.barrier_tracker import CompletedCheckpoint
from spark_bridge.sinks.files.sink import FileSink
from spark_bridge.sinks.two_phase.driver import TwoPhaseSinkCoordinator
from spark_bridge.sinks.two_phase.task import TwoPhaseSinkOperator
from tests.spark_bridge.sinks.files.kit import rows_of, staged, visible

SUBTASKS = 3


class Lines(TwoPhaseSinkOperator):
    """Its position does not depend on the parallelism: every application gets new records."""

    def snapshot_position(self) -> bytes:
        return b""

    def restore_position(self, position: bytes | None) -> None:
        """Nothing to return to."""

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return b""


class DiesFirst(TwoPhaseSinkCoordinator):
    """Its driver dies before it publishes anything."""

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Too late."""


async def a_checkpoint_with_held_lists(url: str) -> CompletedCheckpoint:
    """Each of three subtasks has written a row, and its list is a part of its snapshot."""
    async with running_operator(DiesFirst(FileSink(url)), parallelism=SUBTASKS, mode="streaming") as world:
        for subtask in range(SUBTASKS):
            task = await world.launch_operator(subtask, lambda: Lines(FileSink(url)))
            task.feed(f"row of {subtask}")
        await world.settle()
        await world.checkpoint()
        return world.checkpoints[-1]


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
async def test_what_subtasks_had_listed_is_published_once_with_any_parallelism(
    parallelism: int, tmp_path: Path
) -> None:
    """H83, H52: the proofs travel with the lists, to attempts and subtasks that did not write the files."""
    url = str(tmp_path / "out")
    checkpoint = await a_checkpoint_with_held_lists(url)
    assert sum(len(part.held) for part in checkpoint.subtask_states.values()) == SUBTASKS
    assert visible(url) == {}
    for again in (False, True):  # the second driver restores it too
        coordinator: Any = TwoPhaseSinkCoordinator(FileSink(url))
        async with running_operator(
            coordinator, parallelism=parallelism, mode="streaming", restored=checkpoint
        ) as world:
            for subtask in range(parallelism):
                task = await world.launch_operator(subtask, lambda: Lines(FileSink(url)))
                task.feed(f"new row of {subtask}")
            await world.settle()
            assert world.failures == []
            assert rows_of(visible(url)) == [f"row of {subtask}" for subtask in range(SUBTASKS)], again
    assert all("-e0000000000-" not in path for path in staged(url))
