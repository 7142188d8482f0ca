# SPDX-License-Identifier: Apache-2.0

"""Every ready-made part survives random histories of failures, checkpoints and restores (H151, H153)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from headgate import (
    Group,
    Permits,
    SharedValue,
    SourceCoordinator,
    SplitReader,
    StaticSplitEnumerator,
    SubtaskContext,
    WorkQueue,
    chain,
)
from headgate.testing import Bookkeeping, KeptOutputs, World, check_bookkeeping
from protocol.source_events import split_request_event
from spark_bridge.primitives.group.messages import Blob, Call, GiveUp, Join, Leave, Question
from tests.primitives.histories import Crawler, names, pause, spread, trained, training

pytestmark = pytest.mark.anyio

SPLITS = list(range(12))
DEPTH = 4


def work_queue(in_hand: int) -> Bookkeeping:
    queue = WorkQueue("tree", ["r"], in_hand=in_hand)
    return Bookkeeping(operator=lambda: Crawler(queue, seed=1, depth=DEPTH), uses=[queue], expected=names(DEPTH))


def wandering_queue(in_hand: int) -> Bookkeeping:
    """Each visit of an item adds another child. Whatever was added is done, so each surviving visit has its child."""
    queue: WorkQueue[str] = WorkQueue("items", ["a", "b", "c"], in_hand=in_hand)
    visits = count()

    class Wandering(Crawler):
        def process(self, records: Iterator[Any]) -> Iterator[str]:
            for item in self.queue:
                pause(self.context, 0.1 * spread(item, 1))
                if len(item) == 1:
                    self.done.append(child := f"{item} {next(visits)}")
                    self.queue.add([child])
                else:
                    self.done.append(f"{item} done")
            yield from self.done

    def judge(world: World, outputs: list[str]) -> None:
        added = {output for output in outputs if not output.endswith("done")}
        done = [output.removesuffix(" done") for output in outputs if output.endswith("done")]
        assert {output[0] for output in added} == {"a", "b", "c"}
        assert added <= set(done), f"what was added and is not done: {added - set(done)}"

    return Bookkeeping(operator=lambda: Wandering(queue, seed=1), uses=[queue], judge=judge)


class Careful(SplitReader):
    """Reads each split with a permit, and counts it, and looks at a shared value."""

    def __init__(self, permits: Permits, value: SharedValue[int]) -> None:
        self.permits = permits
        self.value = value

    def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
        if position is None:
            with self.permits:
                assert self.value.get() == 5
                pause(self.context, 0.1 * spread(split, 1))
            self.context.count("splits")
            self.context.count("sum", split)
            yield 1, split


def all_parts(**limits: Any) -> Bookkeeping:
    permits, value = Permits("api", **limits), SharedValue("value", 5)

    def judge(world: World, outputs: list[int]) -> None:
        expected = {"splits": len(outputs), "sum": sum(outputs)}
        assert world.counters() == expected == world.counter_totals(), world.counters()
        assert permits.in_use == 0

    coordinator = SourceCoordinator(lambda state: StaticSplitEnumerator(SPLITS, state))
    stages = chain(source=(coordinator, lambda: Careful(permits, value)), kept=KeptOutputs)
    return Bookkeeping(
        stages,
        uses=[permits, value],
        expected=SPLITS,
        held=[
            ("source", split_request_event()),
            ("api", ["more", 3]),
            ("api", ["give up", 1]),
            ("api", ["release", [1]]),
            ("value", ["want", 1, False]),
            ("value", ["applied", 7]),
        ],
        held_requests=[("api", ["acquire", 1, True, 5.0, 1])],
        judge=judge,
    )


PARTS: dict[str, Callable[[], Bookkeeping]] = {
    "a work queue": lambda: work_queue(1),
    "a work queue with many in hand": lambda: work_queue(5),
    "a work queue whose items differ": lambda: wandering_queue(2),
    "a rate": lambda: all_parts(per_s=20.0),
    "a rate ahead of need": lambda: all_parts(per_s=200.0, burst=20),
    "places": lambda: all_parts(concurrency=1),
}


@pytest.mark.parametrize("mode", ["streaming", "batch"])
@pytest.mark.parametrize("name", PARTS)
async def test_a_part_knows_after_a_reset_what_it_knew_and_loses_nothing(name: str, mode: Any) -> None:
    """H52 H100 H101 H110 H111 H151 H153"""
    await check_bookkeeping(PARTS[name], mode=mode, histories=12)


HELD = [("train", event.as_event()) for event in (Leave(1, ""), GiveUp(1), Blob(1, 7, 9, b"x"))]
ASKED = [("train", request.as_event()) for request in (Join("host", 1), Call(1, 1, "barrier()", None), Question(1))]


@pytest.mark.parametrize("mode", ["streaming", "batch"])
async def test_a_group_trains_the_same_model_whatever_happens(mode: Any) -> None:  # H105 H151
    def make() -> Bookkeeping:
        group = Group("train")
        run = training(group, is_new_after_all=True)

        def once(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
            yield from run(context, records)

        return Bookkeeping(
            operator=once, uses=[group], expected=[trained(3)] * 3, expected_later=[], held=HELD, held_requests=ASKED
        )

    await check_bookkeeping(make, mode=mode, parallelism=[3], slots=4, histories=12)
