# SPDX-License-Identifier: Apache-2.0

"""What the ready-made parts keep when a run has other input than the one before; docs/how-to/run-a-job-every-day.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from actors.coordination import SourceCoordinator, StaticSplitEnumerator
from actors.coordination.host.context import Context
from headgate import Group, Permits, SharedValue, SplitReader, SubtaskContext, WorkQueue, chain
from headgate.testing import World, running_operator
from protocol.facts import StageLook
from tests.primitives.histories import until_done

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("new_application", [True, False])
async def test_totals_and_values_stay_and_whatever_belongs_to_one_input_begins_anew(
    named: bool, new_application: bool
) -> None:  # H174
    rules, budget = SharedValue("rules", "as given"), Permits("budget", concurrency=1)
    items, group = WorkQueue("items", range(4)), Group("train")
    steps: list[int] = []

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        budget.acquire()  # and does not give it back
        context.count("tasks")
        with group as member:
            steps.append(0 if member.checkpoint is None else member.checkpoint.step)
            member.save(steps[-1] + 1, b"")
        yield rules.get(), list(items)

    async def day(world: World, number: int) -> tuple[Any, Any]:
        world.input_id = f"day {number}" if named else None
        task = await world.launch_operator(0, work, [])
        await until_done(world, [task])
        await world.advance(5.0)  # until the final checkpoint is complete
        return task.outputs[0], world.counters()["tasks"]

    kept: dict[str, Any] = {"parallelism": 1, "mode": "streaming", "uses": [rules, budget, items, group]}
    async with running_operator(**kept) as world:
        assert await day(world, 1) == (("as given", [0, 1, 2, 3]), 1)
        rules.set("as set")
        if not new_application:
            assert await day(world, 2) == (("as set", [0, 1, 2, 3]), 2)
    if new_application:
        async with running_operator(**kept, restored=world.checkpoints[-1], restored_input="other") as world:
            assert await day(world, 2) == (("as set", [0, 1, 2, 3]), 2)
    assert steps == [0, 0]


def nothing(state: bytes | None, *_: Any) -> StaticSplitEnumerator:
    return StaticSplitEnumerator([], state)


class Nothing(SplitReader):
    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any] | None]:
        return iter(())


@pytest.mark.parametrize("part", ["group", "counters", "source"])
async def test_spark_is_asked_once_in_each_run_which_partitions_it_computes(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # H72
    looks = list[str]()

    async def look_at_run(context: Context) -> StageLook:
        looks.append(part)
        return await asked(context)

    asked = Context.look_at_run
    monkeypatch.setattr(Context, "look_at_run", look_at_run)

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        if part == "counters":
            context.count("tasks")
        yield from records

    chosen = [chain(source=(SourceCoordinator(nothing), Nothing), work=work)] if part == "source" else []
    uses = [Group("train", 3)] if part == "group" else []
    async with running_operator(*chosen, parallelism=3, uses=uses) as world:
        for _ in range(2):
            looks.clear()
            tasks = [await world.launch_operator(subtask, None if chosen else work, []) for subtask in range(3)]
            await until_done(world, tasks)
            assert looks == [part]
