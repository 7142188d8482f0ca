# SPDX-License-Identifier: Apache-2.0

"""Micro-batches on real actors and a storage in memory, without Spark: no task runs here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest

from actors.coordination import OperatorConfig, OperatorCoordinator, parts_of
from protocol.attempts import RunStarted
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.wire.messages import RestoreMode
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.common.errors import BatchFailed, BatchRefused, NotSettled, SidecarError
from spark_bridge.driver.micro_batches import ForEachBatch, MicroBatch, MicroBatches
from spark_bridge.driver.operators import Operators
from spark_bridge.storage import MemoryStorage
from tests.spark_bridge.test_operators import running_operators

pytestmark = pytest.mark.asyncio

QUERY = "query-1"


class World:
    def __init__(self, operators: Operators, storage: MemoryStorage, running: RunningJobs) -> None:
        self.operators = operators
        self.batches = MicroBatches(operators, 0.3)
        self.storage = storage
        self.running = running

    async def run(self, batch_id: int, query_id: str = QUERY, *, adopt: bool = False) -> bool:
        """Run a batch that has nothing for the operator; return whether it ran."""
        batch = MicroBatch("words", query_id, batch_id)
        operator = await self.batches.begin(batch, adopt)
        if operator is not None:
            await self.batches.finish(operator, batch)
        return operator is not None

    def labels(self) -> list[str | None]:
        return [info.label for info in self.storage.list("words")]


@asynccontextmanager
async def a_world(
    *labels: str, mode: RestoreMode = RestoreMode.STREAMING, coordinator: OperatorCoordinator | None = None
) -> AsyncIterator[World]:
    """An operator "words" that starts from a storage with checkpoints with these labels."""
    storage, running = MemoryStorage(retained=9), RunningJobs()
    for checkpoint_id, label in zip(storage.reserve_ids(len(labels) + 1), labels, strict=False):
        storage.store("words", CompletedCheckpoint(checkpoint_id, 1, b"state", label=label))
    async with running_operators(storage, running) as operators:
        await operators.add(OperatorConfig("words", 1, mode), parts_of(coordinator or OperatorCoordinator()), "latest")
        yield World(operators, storage, running)


async def test_a_batch_without_a_run_is_committed_by_a_checkpoint() -> None:
    async with a_world() as world:
        assert await world.run(0)
        assert await world.run(1)
        assert world.labels() == ["batch 0 of query-1: done", "batch 1 of query-1: done"]


async def test_a_committed_batch_is_skipped_and_the_next_one_runs() -> None:
    async with a_world("batch 3 of query-1: begun", "batch 3 of query-1: done") as world:
        assert not await world.run(3)
        assert len(world.labels()) == 2
        assert await world.run(4)


async def test_a_batch_that_has_begun_is_run_again() -> None:
    async with a_world("batch 2 of query-1: done", "batch 3 of query-1: begun") as world:
        assert await world.run(3)


@pytest.mark.parametrize("label", ["", "batch 1 of query-1: done", "batch 2 of query-2: done"])
async def test_a_batch_that_does_not_follow_is_refused_unless_it_is_adopted(label: str) -> None:
    async with a_world(label) as world:
        with pytest.raises(BatchRefused, match=r"operator 'words': Spark asks for batch 3 of query query-1"):
            await world.run(3)
        assert await world.run(3, adopt=True)
        assert await world.run(4)


async def test_the_first_batch_starts_from_the_state_before_the_query() -> None:
    async with a_world("") as world:
        assert await world.run(0)


async def test_an_older_query_is_refused_with_the_checkpoint_that_matches() -> None:
    async with a_world(*(f"batch {batch_id} of query-1: done" for batch_id in range(5))) as world:
        with pytest.raises(BatchRefused, match=r"restore=CheckpointFile\(\"checkpoint 2 of 'words' in memory\"\)"):
            await world.run(2, adopt=True)
        with pytest.raises(BatchRefused, match=r"restore='none'"):
            await world.run(0)


async def test_an_operator_in_batch_mode_is_refused() -> None:
    async with a_world(mode=RestoreMode.BATCH) as world:
        with pytest.raises(SidecarError, match='mode="streaming"'):
            world.batches.check("words")
        with pytest.raises(SidecarError, match="'letters' is not coordinated here"):
            world.batches.check("letters")


async def test_a_batch_waits_a_limited_time_for_the_current_one() -> None:  # H48
    async with a_world() as world:
        first = MicroBatch("words", QUERY, 0)
        operator = await world.batches.begin(first, False)
        assert operator is not None
        with pytest.raises(BatchRefused, match=r"batch 0 of query query-2.*belongs to one query"):
            await world.run(0, "query-2")
        await world.batches.abandon(operator)
        assert await world.run(0), "neither the refused nor the abandoned one has kept the turn"


async def test_a_batch_waits_for_the_end_of_a_run_of_its_operator_and_no_other() -> None:  # H48
    async with a_world() as world:
        world.running.note(RunStarted("others", 1))
        assert await world.run(0)
        world.running.note(RunStarted("words", 2))
        with pytest.raises(NotSettled):
            await world.run(1)


class Unwilling(OperatorCoordinator):
    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        raise ValueError("not today")


class Careless(OperatorCoordinator):
    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b""

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        raise ValueError("could not publish")


async def test_a_batch_that_cannot_be_committed_fails() -> None:
    async with a_world(coordinator=Unwilling()) as world:
        with pytest.raises(BatchFailed, match=r"batch 0 of query query-1, operator 'words'.*not today"):
            await world.run(0)
        assert world.labels() == []


async def test_a_coordinator_that_fails_after_a_batch_fails_the_query() -> None:  # H7
    async with a_world(coordinator=Careless()) as world:
        with pytest.raises(BatchFailed, match=r"is committed, but then the operator failed.*could not publish"):
            await world.run(0)
        assert not await world.run(0), "it is skipped, and the next run resets the coordinator (H55)"


async def test_an_adopted_batch_is_announced_as_such_until_it_is_committed() -> None:  # H174
    """So a batch that fails can be adopted again, and its number says nothing about that of another query."""
    told: list[tuple[int, bool]] = []

    class Batches:
        """Fails the first time that a batch is to be committed."""

        async def begin(self, batch: MicroBatch, adopt: bool) -> object:
            told.append((batch.batch_id, adopt))
            return self

        async def finish(self, operator: object, batch: MicroBatch) -> None:
            if len(told) == 1:
                raise BatchFailed("by the test")

        async def abandon(self, operator: object) -> None:
            raise AssertionError("the function did not raise")

    def call(method: Any) -> Any:
        coroutine = method(Batches())
        try:
            coroutine.send(None)
        except StopIteration as returned:
            return returned.value

    frame = MagicMock()
    frame.sparkSession.sparkContext.getLocalProperty.return_value = QUERY
    function = ForEachBatch("words", lambda frame, batch_id: None, True, call)
    with pytest.raises(BatchFailed):
        function(frame, 7)
    function(frame, 7)
    function(frame, 8)
    assert told == [(7, True), (7, True), (8, False)]


@pytest.mark.parametrize("query_id", [None, ""])
async def test_a_function_that_no_streaming_query_calls_says_where_to_pass_it(query_id: str | None) -> None:
    frame, called = MagicMock(), list[Any]()
    frame.sparkSession.sparkContext.getLocalProperty.return_value = query_id
    function = ForEachBatch("op", lambda *_: None, False, called.append)
    with pytest.raises(SidecarError, match=r"is not set: pass this function to writeStream\.foreachBatch"):
        function(frame, 0)
    assert called == []
