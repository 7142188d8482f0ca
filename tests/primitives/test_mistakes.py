# SPDX-License-Identifier: Apache-2.0

"""Mistakes that are easily made with the ready-made parts: the error says what happened, why, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from headgate import Cache, Group, OperatorCoordinator, Permits, SharedValue, SubtaskContext, WorkQueue
from headgate.testing import running_operator
from protocol.errors import LocalProtocolError
from spark_bridge.primitives.chain import composed
from spark_bridge.primitives.primitive import Primitive
from tests.primitives.histories import until_done

pytestmark = pytest.mark.anyio

RULES: SharedValue[dict[str, int]] = SharedValue("rules", {"limit": 1})
QUEUE: WorkQueue[str] = WorkQueue("crawl", ["a"])
TEAM = Group("team", 1)


def set_in_a_task(context: SubtaskContext) -> None:
    RULES.__reduce__()[0]("rules").set({"limit": 2})


def key_that_is_not_callable(context: SubtaskContext) -> None:
    for _ in QUEUE:
        QUEUE.add(["b"], key=cast("Any", 3))


def call_after_the_block(context: SubtaskContext) -> None:
    with TEAM as member:
        pass
    member.barrier()


def save_a_text(context: SubtaskContext) -> None:
    with TEAM as member:
        member.save(1, cast("Any", "model"))


def count_a_text(context: SubtaskContext) -> None:
    context.count("kept", cast("Any", "3"))


def observe_a_text(context: SubtaskContext) -> None:
    context.observe("size", cast("Any", "3"))


@pytest.mark.parametrize(
    ("mistake", "part", "error", "says"),
    [
        (set_in_a_task, RULES, LocalProtocolError, r"'rules' is set on the driver, and tasks only read it: .*count"),
        (key_that_is_not_callable, QUEUE, TypeError, r"key must be a function of an item, such as .*, not 3"),
        (call_after_the_block, TEAM, LocalProtocolError, r"its `with` block has ended: enter one again"),
        (save_a_text, TEAM, TypeError, r"blob must be bytes, so encode it first, not"),
        (count_a_text, None, TypeError, r"count\('kept', ...\) takes a number, not '3': convert it first"),
        (observe_a_text, None, TypeError, r"observe\('size', ...\) takes a number, not '3': convert it first"),
    ],
)
async def test_a_mistake_in_a_task_is_named_with_its_remedy(
    mistake: Callable[[SubtaskContext], None], part: Primitive | None, error: type[Exception], says: str
) -> None:
    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        with pytest.raises(error, match=says):
            mistake(context)
        yield "refused"

    async with running_operator(parallelism=1, uses=[] if part is None else [part]) as world:
        task = await world.launch_operator(0, work)
        await until_done(world, [task])
    assert task.outputs == ["refused"], task.error


@pytest.mark.parametrize("part", [QUEUE, TEAM])
async def test_a_question_of_the_driver_to_a_part_says_whom_to_ask(part: Primitive) -> None:
    async with running_operator(parallelism=1, uses=[part]) as world:
        with pytest.raises(LocalProtocolError, match=r"cannot ask the part '\w+': .* names a stage .*; leave it out"):
            await world.request("how many?", part=part.name)


def test_a_key_that_is_not_callable_is_refused_where_the_queue_is_made() -> None:
    with pytest.raises(TypeError, match=r"key must be a function of an item, such as .*, not 'url'"):
        WorkQueue("crawl", ["a"], key=cast("Any", "url"))


def test_one_part_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(TypeError, match=r"uses must be a list of parts, uses=\[part\]"):
        composed("check", OperatorCoordinator, cast("Any", RULES))


def leave_in_the_middle(queue: WorkQueue[str] | None, group: Group | None) -> Any:
    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        if queue is not None:
            for item in queue:
                context.wait_for_event(1.0)
                yield item
        if group is not None:
            with group as member:
                member.save(1, b"model")
                context.wait_for_event(5.0)
                yield member.rank

    return run


@pytest.mark.parametrize("was", ["queue", "group"])
@pytest.mark.parametrize("becomes", ["queue", "group", "permits", "shared", "cache"])
async def test_a_part_is_not_restored_with_the_state_of_another_kind_of_part(was: str, becomes: str) -> None:
    """H80: it would be lost, or misread."""
    makes: dict[str, Callable[[], Any]] = {
        "queue": lambda: WorkQueue("part", ["a", "b", "c"]),
        "group": lambda: Group("part"),
        "permits": lambda: Permits("part", concurrency=1),
        "shared": lambda: SharedValue("part", 1),
        "cache": lambda: Cache("part"),
    }
    part = makes[was]()
    run = leave_in_the_middle(part if was == "queue" else None, part if was == "group" else None)
    async with running_operator(parallelism=1, mode="streaming", uses=[part]) as world:
        await world.launch_operator(0, run, [])
        await world.advance(0.5)
        await world.checkpoint()
        restored = world.checkpoints[-1]
    other = running_operator(parallelism=1, mode="streaming", uses=[makes[becomes]()], restored=restored)
    if was == becomes:
        async with other:
            return
    with pytest.raises(LocalProtocolError, match="the checkpoint has a state of 'part' that is not that of"):
        async with other:
            pass
