# SPDX-License-Identifier: Apache-2.0

"""What of ready-made parts reaches another process, and bounds that the other tests of parts do not reach."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from headgate import Budget, Cache, Group, Permits, SharedValue, SubtaskContext, WorkQueue
from headgate.testing import running_operator
from protocol.errors import LocalProtocolError
from protocol.wire.events import decode_event, encode_event
from spark_bridge.primitives import elsewhere
from spark_bridge.primitives.budget.task import BudgetInTask
from spark_bridge.primitives.cache.task import CacheInTask
from spark_bridge.primitives.counters.book import Distribution
from spark_bridge.primitives.elsewhere import described_parts, in_task, task_parts_of
from spark_bridge.primitives.group.task import GroupInTask
from spark_bridge.primitives.permits.task import PermitsInTask
from spark_bridge.primitives.primitive import PARTS_OF_ALL
from spark_bridge.primitives.shared_value.task import SharedValueInTask
from spark_bridge.primitives.work_queue.task import FOUND_MAX, WorkQueueInTask
from tests.primitives.histories import results, until_done

pytestmark = pytest.mark.anyio

PARTS = {
    "rules": (SharedValue("rules", {"a": 1}), SharedValueInTask),
    "service": (Permits("service", per_s=5.0, concurrency=2), PermitsInTask),
    "usd": (Budget("usd", 50.0), BudgetInTask),
    "tree": (WorkQueue("tree", ["root"]), WorkQueueInTask),
    "train": (Group("train", 3), GroupInTask),
    "geocode": (Cache("geocode", lease_s=5.0), CacheInTask),
}


def test_every_kind_of_part_has_its_example_here() -> None:
    assert {
        kind for kind, _ in described_parts({name: part.task_part() for name, (part, _) in PARTS.items()}).values()
    } == set(elsewhere._KINDS)


def test_parts_are_the_same_in_a_process_that_only_has_their_description() -> None:
    here = {**PARTS_OF_ALL, **{name: part.task_part() for name, (part, _) in PARTS.items()}}
    sent = decode_event(encode_event(described_parts(here)))
    there = task_parts_of(sent)
    assert set(there) == set(here)
    for name, (_, kind) in PARTS.items():
        made, known = there[name], here[name]
        assert isinstance(made, partial)
        assert isinstance(known, partial)
        assert (made.func, made.args) == (known.func, known.args)
        assert type(in_task(there, name)) is kind
    for name in ("no such part", *PARTS_OF_ALL):
        assert in_task(there, name) is None


@pytest.mark.parametrize("name", list(PARTS))
def test_a_part_travels_to_a_task_as_what_works_there_and_says_its_name(name: str) -> None:
    part, kind = PARTS[name]
    arrived = pickle.loads(pickle.dumps(part))
    assert type(arrived) is kind
    assert repr(name) in repr(part)
    assert repr(name) in repr(arrived)


async def test_more_items_than_a_task_may_keep_are_reported_while_their_parent_is_processed() -> None:
    """H100"""
    queue = WorkQueue[Any]("wide", ["root"])
    children = [f"child {number}" for number in range(2 * FOUND_MAX + 1)]
    seen: list[int] = []

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        for item in queue:
            if item == "root":
                queue.add(children)
                context.wait_for_event(timeout_s=1.0)
                seen.append(queue.progress[1])
            yield item

    async with running_operator(parallelism=2, uses=[queue]) as world:
        tasks = [await world.launch_operator(subtask, work, []) for subtask in range(2)]
        await until_done(world, tasks)
    assert results(tasks) == sorted(["root", *children])
    assert seen == [1 + 2 * FOUND_MAX]


async def test_a_task_in_another_process_passes_the_key_of_its_queue() -> None:
    queue = WorkQueue[Any]("keyed", ["root"], key=len)
    there = pickle.loads(pickle.dumps(WorkQueueInTask("keyed")))

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        for item in there:
            if item == "root":
                with pytest.raises(LocalProtocolError, match=r"'keyed' has a key.*pass it here too, add\(items, key="):
                    there.add(["other"])
                there.add(["other", "others"], key=len)
            yield item

    async with running_operator(parallelism=1, uses=[queue]) as world:
        task = await world.launch_operator(0, work, [])
        await until_done(world, [task])
    assert results([task]) == ["other", "others", "root"]


def test_the_highest_quantile_of_rounded_counts_is_the_maximum() -> None:
    found = Distribution(count=3, sum=6.0, minimum=1.0, maximum=3.0, buckets=((1.0, 1), (2.0, 1)))
    assert found.quantile(1.0) == 3.0
