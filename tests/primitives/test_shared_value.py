# SPDX-License-Identifier: Apache-2.0

"""Shared values: there before the first record, newest at each look, and the program knows who has them (H110)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
from anyio import create_task_group
from anyio.abc import TaskGroup

from actors.coordination import Confirmation
from headgate import SharedValue, SubtaskContext
from headgate.errors import EventEncodeError, TimedOut
from headgate.testing import OperatorTask, World, running_operator
from protocol.attempts import FailureKind, FailureReason
from protocol.errors import AttemptOver, LocalProtocolError
from protocol.ids import ExecutionAttempt
from spark_bridge.primitives.shared_value import driver as driver_half
from spark_bridge.primitives.shared_value import task as task_half
from spark_bridge.primitives.shared_value.encoding import (
    CHUNK_BYTES,
    CHUNKS_UNCONFIRMED,
    COMPLETE,
    LARGE_BYTES,
    difference,
    digest_of,
    encode_value,
)
from tests.primitives.histories import shared_history
from tests.primitives.stand_ins import open_alone

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_half, "_in_process", {})


def reading(value: SharedValue[Any]) -> Any:
    def read(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        for _ in records:
            yield value.version, value.get(), value.changed()

    return read


async def until_done(world: World, tasks: list[OperatorTask]) -> None:
    for task in tasks:
        task.end_records()
    for _ in range(100):
        if all(task.outcome for task in tasks):
            return
        await world.advance(0.1)
    raise AssertionError(f"the work does not end: {tasks}")


async def test_the_value_is_there_before_the_first_record_and_each_new_one_before_the_next() -> None:
    rules = SharedValue("rules", {"limit": 3})
    async with running_operator(parallelism=2, uses=[rules]) as world:
        tasks = [await world.launch_operator(subtask, reading(rules)) for subtask in range(2)]
        for task in tasks:
            task.feed(1, 2)
        await world.settle()
        assert rules.set({"limit": 5}) == 2
        await world.settle()
        for task in tasks:
            task.feed(3)
        await until_done(world, tasks)
    expected = [(1, {"limit": 3}, True), (1, {"limit": 3}, False), (2, {"limit": 5}, True)]
    assert [task.outputs for task in tasks] == [expected, expected]
    assert (rules.get(), rules.version) == ({"limit": 5}, 2)


@pytest.mark.parametrize("seed", range(10))
async def test_a_value_never_becomes_older_and_the_newest_arrives(seed: int) -> None:
    await shared_history(seed)


async def test_a_task_that_starts_later_has_the_newest_value_and_so_has_a_second_operator() -> None:
    rules = SharedValue("rules", "old")
    for _ in range(2):
        async with running_operator(parallelism=1, uses=[rules]) as world:
            rules.set("new")
            task = await world.launch_operator(0, reading(rules), [1])
            await world.settle()
            assert [output[1] for output in task.outputs] == ["new"]
    assert rules.set("nobody is there") == 4


async def test_the_value_is_what_it_was_when_it_was_set() -> None:
    given = {"words": ["a"]}
    rules = SharedValue("rules", given)
    given["words"].append("b")
    assert rules.get() == {"words": ["a"]}
    rules.update(lambda value: {**value, "more": ["c"]})
    assert rules.get() == {"words": ["a"], "more": ["c"]}
    with pytest.raises(EventEncodeError):
        rules.set({"words": [object()]})  # type: ignore[list-item]
    assert rules.version == 2


def sent(world: World, value: SharedValue[Any]) -> int:
    """How many events the shared value has sent."""
    events: int = world.statistics.snapshot()["parts"][value.name]["events_sent"]
    return events


async def test_a_small_change_of_a_dict_travels_as_the_difference() -> None:
    rules: SharedValue[dict[str, Any]] = SharedValue("rules", {f"key {number}": number for number in range(1000)})
    async with running_operator(parallelism=1, uses=[rules]) as world:
        task = await world.launch_operator(0, reading(rules))
        await world.settle()
        before = sent(world, rules)
        rules.update(lambda value: {**{key: old for key, old in value.items() if key != "key 7"}, "key 3": "three"})
        await world.settle()
        assert sent(world, rules) == before + 1
        task.feed(1)
        await until_done(world, [task])
    kind, *_, change = driver_half._event_of(rules._newest, False, whole=False)
    assert kind == "change"
    assert len(change) < 100 < len(rules._newest.payload)
    ((version, value, _),) = task.outputs
    assert version == 2
    assert value == rules.get()
    assert "key 7" not in value
    assert value["key 3"] == "three"


async def test_a_key_that_only_changes_its_type_changes_in_the_tasks_too() -> None:  # H110
    rules: SharedValue[dict[Any, Any]] = SharedValue("rules", {number: str(number) for number in range(100)})
    async with running_operator(parallelism=1, uses=[rules]) as world:
        task = await world.launch_operator(0, reading(rules))
        await world.settle()
        rules.update(lambda value: {True if key == 1 else key: text for key, text in value.items()})
        await world.settle()
        rules.update(lambda value: {2.0 if key == 2 else key: text for key, text in value.items()})
        await world.settle()
        task.feed(1)
        await until_done(world, [task])
    ((version, value, _),) = task.outputs
    assert version == 3
    assert {repr(key) for key in value} == {"0", "True", "2.0", *map(str, range(3, 100))}


def moved(value: dict[Any, Any]) -> dict[Any, Any]:
    return {**{key: one for key, one in value.items() if key != 3}, 3: value[3]}


def changed_in_place(value: dict[Any, Any]) -> dict[Any, Any]:
    value[5].append("more")
    return value


def counted_on(value: dict[Any, Any]) -> dict[Any, Any]:
    return {**value, 7: [numpy.int64(1), numpy.zeros(3)], float("nan"): [8]}


def in_front(value: dict[Any, Any]) -> dict[Any, Any]:
    return {"new": ["first"], **value}


@pytest.mark.parametrize("change", [moved, changed_in_place, counted_on, in_front])
async def test_a_running_task_has_what_a_later_one_has_whatever_changes(change: Any) -> None:  # H110 H171
    values = {number: [numpy.arange(3), {"b": 1, "a": 2}] for number in range(100)}
    rules: SharedValue[dict[Any, Any]] = SharedValue("rules", {**values, float("nan"): ["NaN"]})
    async with running_operator(parallelism=2, uses=[rules]) as world:
        early = await world.launch_operator(0, reading(rules))
        await world.settle()
        rules.update(change)
        rules.update(lambda value: {**value, 9: ["another"]})
        await world.settle()
        early.feed(1)
        late = await world.launch_operator(1, reading(rules), [1])
        await until_done(world, [early, late])
    encoded = [encode_value(task.outputs[0][1]) for task in (early, late)]
    assert encoded == [encode_value(rules.get())] * 2


async def test_a_task_that_starts_after_a_small_change_gets_the_whole_value_without_asking() -> None:
    rules: SharedValue[dict[str, Any]] = SharedValue("rules", {f"key {number}": number for number in range(1000)})
    async with running_operator(parallelism=1, uses=[rules]) as world:
        rules.update(lambda value: {**value, "key 3": "three"})
        task = await world.launch_operator(0, reading(rules), [1])
        await world.settle()
        assert [output[1] for output in task.outputs] == [rules.get()]
        assert not any(part["events_received"] for part in world.statistics.snapshot()["parts"].values())  # H110


async def test_a_task_without_the_version_before_asks_for_the_whole_value() -> None:
    rules: SharedValue[dict[str, Any]] = SharedValue("rules", {f"key {number}": number for number in range(1000)})
    async with running_operator(parallelism=1, uses=[rules]) as world:
        task = await world.launch_operator(0, reading(rules))
        await world.settle()
        part = task._parts.operators["rules"]
        assert isinstance(part, task_half.SharedValuePart)
        part._current = (0, None)  # as if the version before had not come
        rules.update(lambda value: {**value, "key 3": "three"})
        await world.settle()
        task.feed(1)
        await until_done(world, [task])
    assert task.outputs[0][:2] == (2, rules.get())


async def test_a_large_value_comes_in_chunks_and_once_to_a_process() -> None:
    model = SharedValue("model", b"first " + bytes(3 * CHUNK_BYTES))
    async with running_operator(parallelism=3, uses=[model]) as world:
        first = await world.launch_operator(0, reading(model), [1])
        await world.advance(1.0)
        before = sent(world, model)
        second = await world.launch_operator(1, reading(model), [1])
        await world.advance(1.0)
        assert sent(world, model) == before + 1, "an offer, which the process has already"
        third = await world.launch_operator(2, reading(model))
        await world.advance(1.0)
        model.set(b"second " + bytes(LARGE_BYTES))
        model.set(b"third " + bytes(LARGE_BYTES))
        await world.advance(1.0)
        third.feed(1)
        await until_done(world, [third])
    assert [task.outputs[0][1][:6] for task in (first, second, third)] == [b"first ", b"first ", b"third "]


class SlowTask:
    """The gateways of a coordinator with one task, which confirms what it gets when the test says so."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.confirmations: list[Confirmation] = []
        self.is_over = False

    async def send(self, subtask: int, event: Any, *, attempt: int, urgent: bool = False) -> tuple[Confirmation, ...]:
        if self.is_over:
            return ()
        self.sent.append(event)
        self.confirmations.append(Confirmation(0, 0.0))
        return (self.confirmations[-1],)


async def send_to(task: SlowTask, group: TaskGroup, chunks: int) -> None:
    shared = SharedValue("model", bytes(chunks * CHUNK_BYTES - 100))
    half = driver_half._Coordinator(shared, "op")
    half._context = cast(Any, SimpleNamespace(gateways=task))
    group.start_soon(half._send_whole, shared.attach(half), 0, 0, False)
    await turns_of_the_loop()


async def turns_of_the_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_large_value_leaves_as_the_task_takes_it() -> None:
    """Otherwise one turn of the event loop would encode and write all of it."""
    task = SlowTask()
    async with create_task_group() as group:
        await send_to(task, group, 6)
        for confirmed in range(4):
            assert len(task.sent) == confirmed + CHUNKS_UNCONFIRMED
            task.confirmations[confirmed].settle()
            await turns_of_the_loop()
    assert [event[0] for event in task.sent] == ["chunk"] * 6 + ["complete"]
    assert b"".join(event[5] for event in task.sent[:-1]) == encode_value(bytes(6 * CHUNK_BYTES - 100))


@pytest.mark.parametrize("noticed", ["by the confirmation", "by the gateways"])
async def test_a_large_value_for_a_task_that_is_over_leaves_no_further(noticed: str) -> None:
    task = SlowTask()
    async with create_task_group() as group:
        await send_to(task, group, 6)
        task.is_over = noticed == "by the gateways"
        task.confirmations[0].settle(None if task.is_over else AttemptOver("it is over"))
    assert len(task.sent) == CHUNKS_UNCONFIRMED


async def test_set_waits_until_every_running_task_has_applied_the_value() -> None:
    rules = SharedValue("rules", 1)
    async with running_operator(parallelism=3, uses=[rules]) as world:
        tasks = [await world.launch_operator(subtask, reading(rules)) for subtask in range(3)]
        await world.settle()
        tasks[1].unresponsive = True
        versions: list[int] = []
        setter = threading.Thread(target=lambda: versions.append(rules.set(2, wait="all")))
        setter.start()
        while rules.version == 1:
            await world.settle()
        await world.settle()
        assert setter.is_alive(), "one task has not applied it"
        await world.kill(tasks[1])
        setter.join(30)
        assert versions == [2]


async def test_set_names_those_who_have_not_applied_it_in_time() -> None:
    rules = SharedValue("rules", 1)
    async with running_operator(parallelism=2, uses=[rules]) as world:
        tasks = [await world.launch_operator(subtask, reading(rules)) for subtask in range(2)]
        await world.settle()
        tasks[1].unresponsive = True
        errors: list[Exception] = []

        def set_it() -> None:
            try:
                rules.set(2, wait="all", timeout_s=0.2)
            except TimedOut as error:
                errors.append(error)

        setter = threading.Thread(target=set_it)
        setter.start()
        while setter.is_alive():
            await world.settle()
        assert "not applied within 0.2 s by subtask 1 of 'operator'" in str(errors[0])
        with pytest.raises(LocalProtocolError, match=r"asyncio\.to_thread"):
            rules.set(3, wait="all")
        assert rules.version == 2


async def test_nobody_is_waited_for_when_nobody_runs() -> None:
    rules = SharedValue("rules", 1)
    assert rules.set(2, wait="all") == 2
    with pytest.raises(ValueError, match="wait must be"):
        rules.set(3, wait="some")  # type: ignore[arg-type]


async def test_a_restored_task_has_what_the_program_has_set() -> None:
    rules = SharedValue("rules", "first")
    async with running_operator(parallelism=1, mode="streaming", uses=[rules]) as world:
        await world.launch_operator(0, reading(rules))
        await world.checkpoint()
        restored = world.checkpoints[-1]
    rules = SharedValue("rules", "second")
    async with running_operator(parallelism=1, mode="streaming", uses=[rules], restored=restored) as world:
        task = await world.launch_operator(0, reading(rules), [1])
        await world.settle()
        assert task.outputs == [(1, "second", True)]


OTHERS: dict[Any, Any] = {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 4}, ({"c": 4}, [])),
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2}, ({}, ["c"])),
        ({"a": 1, "b": 2}, {"a": True, "b": 2}, ({"a": True}, [])),
        ({"a": [1], "b": 2}, {"a": [1.0], "b": 2}, ({"a": [1.0]}, [])),
        ({1: 1, **OTHERS}, {True: 1, **OTHERS}, ({True: 1}, [1])),
        ({(1, 2): 1, **OTHERS}, {(1.0, 2): 1, **OTHERS}, ({(1.0, 2): 1}, [(1, 2)])),
        ({1: "a", "b": 2}, {1: "a", "b": 2}, ({}, [])),
        ({"a": 1}, {"b": 1}, None),
        ([1], [1], None),
    ],
)
def test_the_difference_tells_values_apart_that_are_equal_in_python(old: Any, new: Any, expected: Any) -> None:
    assert repr(difference(old, new)) == repr(expected)


class LateHandler:
    """The context of a task whose thread for urgent events is slow: ``COMPLETE`` overtakes the last chunk there."""

    endpoint = SimpleNamespace(local_files=False)

    def __init__(self, part: task_half.SharedValuePart, chunk: list[Any]) -> None:
        self.part = part
        self.chunk = chunk
        self.waits: list[float | None] = []

    def wait_for_event(self, timeout_s: float | None = None) -> int:
        self.waits.append(timeout_s)
        if len(self.waits) == 1:
            self.part.handle_event(COMPLETE)
            return 1
        self.part.handle_urgent(self.chunk)  # by the other thread, so nothing wakes this one
        return 0


def test_a_task_looks_again_if_the_last_chunk_is_still_being_handled() -> None:  # H110
    part = task_half.SharedValuePart("model")
    context = LateHandler(part, ["chunk", 1, False, 0, 1, encode_value("the value")])
    open_alone(part, context)
    part.before_records()
    assert part.get() == "the value"
    assert len(context.waits) == 2
    assert None not in context.waits, "it waits for an event that never comes"


class Answers:
    """The context of a task that keeps what is sent."""

    endpoint = SimpleNamespace(local_files=False)

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_event(self, event: Any) -> None:
        self.sent.append(event)


def test_the_driver_hears_of_a_value_that_came_in_answer_to_an_earlier_question() -> None:  # H110
    """The task had asked for version 1 when version 2 was set; the driver answers with version 2, for nobody waits."""
    part = task_half.SharedValuePart("another model")
    context = Answers()
    open_alone(part, context)
    value = encode_value("the model")
    part.handle_urgent(["offer", 1, False, b"a digest"])
    part.handle_urgent(["offer", 2, True, digest_of(value)])
    part.handle_urgent(["chunk", 2, False, 0, 1, value])
    assert context.sent == [["want", 1, False], ["want", 2, True], ["applied", 2]]


def test_an_earlier_version_that_comes_later_changes_nothing() -> None:  # H110
    """The driver sends to a task that is behind in the background, so a later version may overtake an earlier one."""
    part = task_half.SharedValuePart("rules")
    context = Answers()
    open_alone(part, context)
    for version in (1, 3, 2):
        part.handle_urgent(["value", version, True, encode_value(f"value {version}")])
    part.handle_urgent(["change", 2, True, 1, encode_value([{}, []])])
    assert (part.version, part.get()) == (3, "value 3")
    assert context.sent == [["applied", 1], *[["applied", 3]] * 3]


def test_a_process_keeps_the_large_values_of_a_few_names() -> None:
    count = task_half.KEPT_VALUES + 2
    for number in [*range(count), 2, count]:
        part = task_half.SharedValuePart(f"model {number}")
        open_alone(part, Answers())
        part.handle_urgent(["chunk", 1, False, 0, 1, encode_value("a model")])
    kept = [number for number in range(count + 1) if f"model {number}" in task_half._in_process]
    assert kept == [2, *range(4, count + 1)]  # the ones that came last


class Silent(list[Any]):
    """The gateways of an operator whose tasks get nothing."""

    def broadcast_nowait(self, event: Any, *, urgent: bool) -> None:
        """It reaches nobody."""


def a_half(shared: SharedValue[Any], attempts: list[ExecutionAttempt]) -> tuple[driver_half._Coordinator, list[Any]]:
    """The half of an operator with these attempts, and what is queued for it."""
    half, queued = driver_half._Coordinator(shared, "op"), list[Any]()
    gateways = Silent(SimpleNamespace(attempt=attempt) for attempt in attempts)
    half._context = cast(Any, SimpleNamespace(call_soon_threadsafe=queued.append, gateways=gateways))
    half._newest = shared.attach(half)
    return half, queued


def test_a_call_does_not_wait_for_an_operator_that_ends_before_it_has_heard_of_the_version() -> None:  # H110 H176
    shared = SharedValue("rules", 1)
    half, queued = a_half(shared, [])
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(shared.set, 2, wait="all", timeout_s=100.0)
        while not queued:
            pass
        asyncio.run(half.close())
        assert future.result(60.0) == 2


@pytest.mark.parametrize(
    "ends", ["its run ends", "it is restored", "the operator ends", "its attempt fails", "it succeeds"]
)
def test_a_call_does_not_wait_for_an_attempt_that_is_over(ends: str) -> None:  # H110 H176
    shared = SharedValue("rules", 1)
    half, queued = a_half(shared, [ExecutionAttempt("op", 0, 0, 7)])
    over: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "its run ends": lambda: half.run_ended(1, False, "cancelled"),
        "it is restored": lambda: half.reset_to_checkpoint(1, None),
        "the operator ends": half.close,
        "its attempt fails": lambda: half.subtask_failed(0, 0, FailureReason(FailureKind.FAILED, "lost")),
        "it succeeds": lambda: half.subtask_finished(0, 0),
    }
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(shared.set, 2, wait="all", timeout_s=60.0)
        while not queued:
            pass
        asyncio.run(queued.pop()())
        asyncio.run(over[ends]())
        assert future.result(60.0) == 2


def test_a_call_that_has_given_up_is_not_remembered() -> None:  # H176
    shared = SharedValue("rules", 1)
    half, queued = a_half(shared, [ExecutionAttempt("op", 0, 0, 7)])
    for number in range(50):
        with pytest.raises(TimedOut, match="an operator whose coordinator is busy"):
            shared.set(number, wait="all", timeout_s=0.0)
        asyncio.run(queued.pop()())
    assert len(half._waiting) == 1
    shared.set(-1)
    asyncio.run(queued.pop()())
    assert half._waiting == []


async def test_an_operator_that_has_ended_hears_of_no_more_values() -> None:
    rules = SharedValue("rules", 1)
    async with running_operator(parallelism=1, uses=[rules]) as world:
        assert len(rules._halves) == 1
        await world.stop()
        assert rules._halves == []
        assert rules.set(2) == 2
