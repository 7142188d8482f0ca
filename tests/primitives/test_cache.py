# SPDX-License-Identifier: Apache-2.0

"""A cache: each question is asked once, over all tasks (H183)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import anyio
import pytest

from headgate import (
    Cache,
    CheckpointConfig,
    CheckpointStorage,
    FailureKind,
    FailureReason,
    SubtaskContext,
    event,
)
from headgate.errors import EventEncodeError, RequestFailed, TimedOut
from headgate.testing import running_operator
from protocol.errors import AttemptOver, GatewayFull, LocalProtocolError, RemoteProtocolError
from protocol.wire.codec import encode_event
from spark_bridge.primitives.cache import task as module
from spark_bridge.primitives.cache.task import KEY_BYTES_MAX, PUT_S, VALUE_BYTES_MAX, CachePart
from spark_bridge.storage import StorageError, StorageSession
from spark_bridge.storage.port import ValueUser
from tests.primitives.histories import cache_history, passing_on, results, until_done, with_held_requests
from tests.primitives.stand_ins import Recipient, bound, open_alone

pytestmark = pytest.mark.anyio


@event
@dataclass(frozen=True)
class Address:
    street: str
    number: int


def asking(cache: Cache, keys: list[Any], made: list[Any], takes_s: float = 1.0) -> Any:
    """The function of a task that wants the value of each key, which takes a while to compute."""

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        def make(key: Any) -> Any:
            made.append((key, context.subtask))
            context.sleep(takes_s)
            return [key, context.subtask]

        for key in keys:
            yield cache.get(key, partial(make, key))

    return work


async def test_a_question_that_all_tasks_have_is_asked_once() -> None:
    cache, made = Cache("geocode"), list[Any]()
    async with running_operator(parallelism=4, uses=[cache]) as world:
        work = asking(cache, ["a", "b", "a"], made)
        tasks = [await world.launch_operator(subtask, work, []) for subtask in range(4)]
        await until_done(world, tasks)
    assert sorted(key for key, _ in made) == ["a", "b"]
    assert len({str(task.outputs) for task in tasks}) == 1
    figures = cache.figures()
    assert (figures["gets_total"], figures["computed_total"], figures["entries"]) == (12, 2, 2)
    assert figures["hit_share"] == 1 - 2 / 12


async def test_two_operators_share_what_they_have_paid_for_and_the_next_run_has_it() -> None:
    cache, made = Cache("geocode"), list[Any]()
    work = asking(cache, [("street", 1)], made)
    async with running_operator(parallelism=1, uses=[cache]) as world:
        async with running_operator(parallelism=1, uses=[cache], operator_id="other", beside=world) as other:
            tasks = [await one.launch_operator(0, work, []) for one in (world, other)]
            await until_done(world, tasks)
            assert len(made) == 1
    async with running_operator(parallelism=1, uses=[cache]) as world:
        again = await world.launch_operator(0, work, [])
        await until_done(world, [again])
    assert again.outputs == tasks[0].outputs == tasks[1].outputs
    assert len(made) == 1


@pytest.mark.parametrize("how", ["kill", "lose_executor", "disconnect"])
async def test_the_value_of_a_lost_task_is_computed_by_exactly_one_of_those_that_wait(how: str) -> None:
    cache, made = Cache("geocode"), list[Any]()
    work = asking(cache, ["a"], made, takes_s=100.0)
    async with running_operator(parallelism=4, uses=[cache], attempts_max=10) as world:
        tasks = [await world.launch_operator(subtask, work, []) for subtask in range(4)]
        await world.advance(1.0)
        ((_, first),) = made
        if how == "disconnect":
            await world.break_connection(tasks[first])
            await world.advance(1.0)
            assert len(made) == 1, "its attempt lives"
            how = "kill"
        await getattr(world, how)(tasks[first])
        await world.advance(1.0)
        assert len(made) == 2
        await until_done(world, [task for task in tasks if task is not tasks[first]])
    assert len(made) == 2


@pytest.mark.parametrize("error", [ValueError("no such place"), KeyboardInterrupt(), GeneratorExit()])
async def test_an_error_belongs_to_its_caller_alone_and_one_other_computes(error: BaseException) -> None:
    cache, calls = Cache("geocode"), list[int]()

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        def make() -> str:
            calls.append(context.subtask)
            context.sleep(1.0)
            if len(calls) == 1:
                raise error
            return "found"

        try:
            yield cache.get("a", make)
        except type(error) as raised:
            yield "failed" if raised is error else "another error"

    async with running_operator(parallelism=4, uses=[cache]) as world:
        tasks = [await world.launch_operator(subtask, work, []) for subtask in range(4)]
        await until_done(world, tasks)
    assert len(calls) == 2
    assert results(tasks) == ["failed", "found", "found", "found"]
    assert cache.figures()["lost_total"] == 1


async def test_who_waits_too_long_gets_an_error_and_computes_nothing_later() -> None:
    cache, made = Cache("geocode"), list[Any]()

    def hurry(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        with pytest.raises(TimedOut, match=r"no value of the cache 'geocode' within 1 s: another task computes it"):
            cache.get("a", lambda: made.append("never"), timeout_s=1.0)
        context.sleep(20.0)
        yield "alive"

    async with running_operator(parallelism=3, uses=[cache], attempts_max=10) as world:
        first = await world.launch_operator(0, asking(cache, ["a"], made, takes_s=10.0), [])
        await world.advance(0.1)
        second = await world.launch_operator(1, hurry, [])
        third = await world.launch_operator(2, asking(cache, ["a"], made, takes_s=1.0), [])
        await world.advance(5.0)
        await world.kill(first)
        await until_done(world, [second, third])
        assert made == [("a", 0), ("a", 2)]


async def test_a_task_that_takes_too_long_is_not_waited_for_and_its_value_is_late() -> None:
    cache, made = Cache("geocode", lease_s=5.0), list[Any]()
    async with running_operator(parallelism=2, uses=[cache]) as world:
        slow = await world.launch_operator(0, asking(cache, ["a"], made, takes_s=20.0), [])
        await world.advance(0.1)
        quick = await world.launch_operator(1, asking(cache, ["a"], made, takes_s=1.0), [])
        await until_done(world, [slow, quick])
    assert made == [("a", 0), ("a", 1)]
    assert slow.outputs == quick.outputs == [["a", 1]], "the first value stays, and all have it"


async def test_a_lease_ends_in_time_though_another_operator_whose_timer_it_had_is_gone() -> None:  # H176
    cache, made = Cache("geocode", lease_s=5.0), list[Any]()
    async with running_operator(parallelism=1, uses=[cache]) as world:
        async with running_operator(parallelism=2, uses=[cache], operator_id="other", beside=world) as other:
            slow = await other.launch_operator(0, asking(cache, ["a"], made, takes_s=20.0), [])
            await world.advance(0.1)
            quick = await other.launch_operator(1, asking(cache, ["a"], made, takes_s=1.0), [])
            await world.advance(0.1)
            await world.stop()
            await other.advance(6.0)
            assert made == [("a", 0), ("a", 1)]
            await until_done(other, [slow, quick])
    assert slow.outputs == quick.outputs == [["a", 1]]


async def test_a_restore_and_a_reset_take_no_value_back() -> None:  # H152
    cache, made = Cache("geocode"), list[Any]()
    async with running_operator(
        parallelism=1, mode="streaming", uses=[cache], checkpoint=CheckpointConfig(hold_events=True), attempts_max=10
    ) as world:
        first = await world.launch_operator(0, asking(cache, ["a"], made), [])
        answer = world.begin_checkpoint()
        await until_done(world, [first])
        assert answer.value > 0
        await world.cancel_job()
        again = await world.launch_operator(0, asking(cache, ["a"], made), [])
        await until_done(world, [again])
    assert len(made) == 1


async def test_a_request_of_before_the_restore_gets_no_lease() -> None:  # H73
    cache = Cache("geocode")
    kept: dict[str, Any] = {"parallelism": 1, "mode": "streaming", "uses": [cache]}
    async with running_operator(**kept) as world:
        await world.launch_operator(0, passing_on)
        await world.checkpoint()
    restored = with_held_requests(world.checkpoints[-1], ["get", 1, b"a"], part="geocode")
    async with running_operator(**kept, restored=restored) as world:
        await world.launch_operator(0, passing_on)
        assert cache.figures()["computing"] == 0


async def test_keys_differ_by_type_and_values_arrive_as_new_objects() -> None:
    cache, made = Cache("geocode"), list[Any]()
    keys = [1, 1.0, True, "1", b"1", (1,), None, Address("Long Lane", 3)]

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        def make(key: Any) -> Any:
            made.append(key)
            return {"of": [key]}

        for key in (*keys, *keys):
            value = cache.get(key, partial(make, key))
            assert value == {"of": [key]}
            value["of"].append("changed")
            yield type(value["of"][0])

    async with running_operator(parallelism=1, uses=[cache]) as world:
        task = await world.launch_operator(0, work, [])
        await until_done(world, [task])
    assert made == keys
    assert task.outputs == [type(key) for key in (*keys, *keys)]
    exchanged = world.statistics.snapshot()["parts"]["geocode"]
    assert exchanged["requests_received"] == 2 * len(keys), "the second time they come from the task itself"


@pytest.mark.parametrize(
    ("key", "error", "text"),
    [
        ([1], TypeError, "must be hashable"),
        ({"a": 1}, TypeError, "must be hashable"),
        ((1, frozenset("ab")), TypeError, "has a set, whose order differs"),
        (object(), EventEncodeError, "object"),
        ("x" * KEY_BYTES_MAX, ValueError, "may have 32768 bytes, and this one has 32771: use a digest"),
    ],
    ids=["list", "dict", "set", "object", "long"],
)
async def test_a_key_that_cannot_be_one_is_refused_before_anything_is_asked(key: Any, error: Any, text: str) -> None:
    cache = Cache("geocode")

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        with pytest.raises(error, match=text):
            cache.get(key, lambda: pytest.fail("it was called"))
        yield "refused"

    async with running_operator(parallelism=1, uses=[cache]) as world:
        task = await world.launch_operator(0, work, [])
        await until_done(world, [task])
    assert (task.outputs, task.error) == (["refused"], None)


async def test_a_value_that_is_too_large_reaches_its_caller_and_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    cache, made = Cache("geocode"), list[int]()

    def make(size: int) -> bytes:
        made.append(size)
        return b"x" * size

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        for size in (VALUE_BYTES_MAX - 5, VALUE_BYTES_MAX, VALUE_BYTES_MAX):
            for _ in range(2):
                yield len(cache.get(size, partial(make, size)))

    async with running_operator(parallelism=1, uses=[cache]) as world:
        task = await world.launch_operator(0, work, [])
        await until_done(world, [task])
    assert made == [VALUE_BYTES_MAX - 5, *[VALUE_BYTES_MAX] * 4]
    assert len(task.outputs) == 6
    assert cache.figures()["too_large_total"] == 4
    (warning,) = [one.getMessage() for one in caplog.records if one.name.startswith("spark_bridge.primitives.cache")]
    assert "cache geocode: a value of 1000005 bytes is too large to be kept" in warning


async def test_what_make_must_not_do_is_an_error_and_keeps_nobody_waiting() -> None:
    cache = Cache("geocode")

    async def later() -> str:
        return "later"

    async def of_a_record(record: str) -> str:
        return record

    def returns_a_coroutine() -> Any:
        return later()

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        with pytest.raises(TypeError, match=r"in a coroutine, use `await cache\.get_async\(key, make\)`"):
            cache.get("a", later)  # type: ignore[unused-coroutine]
        with pytest.raises(LocalProtocolError, match=r"make returned coroutine, which has to be awaited: use `await"):
            cache.get("a", returns_a_coroutine)
        with pytest.raises(LocalProtocolError, match=r"asks the cache 'geocode' for that key itself"):
            cache.get("a", lambda: cache.get("a", lambda: "inner"))
        with pytest.raises(EventEncodeError, match="what make returned"):
            cache.get("a", object)
        asks: list[Any] = [cache.get, cache.get_async]
        for ask in asks:
            with pytest.raises(TypeError, match=r"make must be a function without arguments, .*, not 'value'$"):
                ask("a", "value")
        with pytest.raises(TypeError, match=r"make must be a function without arguments, (?!.*in a coroutine)"):
            cache.get_async("a", of_a_record)  # type: ignore[arg-type, unused-coroutine]
        yield cache.get("a", lambda: cache.get("b", lambda: "of b") + " in a")

    async with running_operator(parallelism=1, uses=[cache]) as world:
        task = await world.launch_operator(0, work, [])
        await until_done(world, [task])
    assert task.error is None, repr(task.error)
    assert task.outputs == ["of b in a"]


@pytest.mark.parametrize("seed", range(20))
async def test_each_value_is_computed_by_one_at_a_time_though_tasks_are_lost(seed: int) -> None:
    await cache_history(seed)


def test_wrong_settings_are_refused() -> None:
    for settings, text in (
        ({"bytes_max": 0}, "bytes_max must be an int of at least 1, not 0"),
        ({"lease_s": 0}, "lease_s must be a positive number"),
        ({"lease_s": float("nan")}, "lease_s must be a positive number"),
    ):
        with pytest.raises(ValueError, match=text):
            Cache("geocode", **settings)
    with pytest.raises(LocalProtocolError, match=r"handle\.subtask"):
        Cache("geocode").get("a", lambda: 1)


# --- coroutines: the part of a task, with the coordinator on the same loop --------------------------------------------


class Clock:
    def now(self) -> float:
        return asyncio.get_running_loop().time()


class Driver:
    """The coordinator's half of the cache of one operator, without the actors around it."""

    def __init__(self, cache: Cache) -> None:
        self.clock = Clock()
        self.timers: list[Callable[[], Any]] = []
        self.half = cache.coordinator("op")
        self.requests: list[str] = []
        self.failures: list[Exception] = []
        self.failed = anyio.Event()

    async def start(self) -> None:
        await self.half.start(self)  # type: ignore[arg-type]

    def fail_job(self, cause: Exception) -> None:
        self.failures.append(cause)
        self.failed.set()

    def call_later(self, delay_s: float, handler: Callable[[], Any]) -> None:
        self.timers.append(handler)


class TaskAlone:
    """As much of a task's context as the part needs."""

    def __init__(self, driver: Driver, subtask: int) -> None:
        self._driver = driver
        self._place = subtask, subtask
        self.full = False
        self.over = False
        self.blocked: Queue[Any] = Queue()

    def now(self) -> float:
        return self._driver.clock.now()

    async def request_async(self, payload: Any, timeout_s: float) -> Any:
        if self.over:
            raise AttemptOver("superseded")
        self._driver.requests.append(payload[0])
        reply = await self._driver.half.handle_request(*self._place, payload)
        waiting = Recipient()
        answer = bound(reply, waiting)
        try:
            with anyio.fail_after(timeout_s):
                return await answer
        except TimeoutError:
            raise TimedOut("no answer") from None
        finally:
            waiting.over = True

    def send_event_nowait(self, sent: Any) -> None:
        if self.full:
            raise GatewayFull("no capacity")
        asyncio.get_running_loop().create_task(self._driver.half.handle_event_from_operator(*self._place, sent))

    def send_event(self, sent: Any) -> None:
        self.full = False
        self.blocked.put(sent)

    def timed_out(self, failure: str) -> TimedOut:
        return TimedOut(failure)


async def tasks_alone(cache: Cache, count: int) -> tuple[Driver, list[TaskAlone], list[CachePart]]:
    driver = Driver(cache)
    await driver.start()
    tasks = [TaskAlone(driver, subtask) for subtask in range(count)]
    parts = [CachePart("geocode") for _ in tasks]
    for part, task in zip(parts, tasks, strict=True):
        open_alone(part, task)
    return driver, tasks, parts


async def test_coroutines_that_want_one_key_ask_once_in_each_task() -> None:
    cache, made = Cache("geocode"), list[str]()
    driver, _, parts = await tasks_alone(cache, 3)

    async def make() -> str:
        made.append("a")
        await anyio.sleep(0.01)
        return "value"

    wanted = [part.get_async("a", make, 60.0) for part in parts for _ in range(100)]
    assert await asyncio.gather(*wanted) == ["value"] * 300
    assert made == ["a"]
    assert driver.requests.count("get") == 3
    assert await parts[0].get_async("b", lambda: "plain function", 60.0) == "plain function"


@pytest.mark.parametrize("how", ["cancelled", "raises", "times out"])
async def test_if_one_coroutine_fails_exactly_one_of_the_others_computes(how: str) -> None:
    cache, made = Cache("geocode"), list[int]()
    _, _, parts = await tasks_alone(cache, 2)
    began = anyio.Event()

    async def make() -> str:
        made.append(len(made))
        began.set()
        if len(made) == 1:
            await anyio.sleep(0.05)
            if how == "raises":
                raise ValueError("no such place")
            await anyio.sleep_forever()
        return "value"

    outcomes: list[Any] = []

    async def want(part: CachePart, timeout_s: float = 60.0) -> None:
        try:
            outcomes.append(await part.get_async("a", make, timeout_s))
        except Exception as error:
            outcomes.append(type(error))

    first = anyio.CancelScope()

    async def want_first() -> None:
        with first:
            await want(parts[0])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(want_first)
        await began.wait()
        for part in parts:
            for _ in range(5):
                tasks.start_soon(want, part)
        await anyio.wait_all_tasks_blocked()
        if how == "times out":
            await want(parts[1], 0.01)
        if how != "raises":
            first.cancel()
    failed: dict[str, list[Any]] = {"raises": [ValueError], "cancelled": [], "times out": [TimedOut]}
    assert outcomes == failed[how] + ["value"] * 10
    assert made == [0, 1]
    cache._desk.book.check_invariants()
    assert cache.figures()["computing"] == 0


async def test_the_word_that_a_lease_has_ended_waits_for_capacity_in_another_thread() -> None:
    cache = Cache("geocode")
    _, tasks, parts = await tasks_alone(cache, 1)

    async def make() -> str:
        tasks[0].full = True
        raise ValueError("no such place")

    with pytest.raises(ValueError, match="no such place"):
        await parts[0].get_async("a", make, 60.0)
    assert await anyio.to_thread.run_sync(tasks[0].blocked.get, True, 60.0) == ["end", 1, False]


async def test_a_task_that_is_over_ends_its_coroutines_with_that() -> None:
    cache = Cache("geocode")
    _, tasks, parts = await tasks_alone(cache, 1)
    tasks[0].over = True
    with pytest.raises(AttemptOver, match="superseded"):
        await parts[0].get_async("a", lambda: 1, 60.0)


async def test_the_awaitable_form_takes_functions_of_both_kinds() -> None:
    async def later() -> int:
        return 1

    for make in (later, lambda: 1):
        with pytest.raises(LocalProtocolError, match=r"handle\.subtask"):
            await Cache("geocode").get_async("a", make)


async def test_the_blocking_form_names_the_awaitable_one() -> None:
    with pytest.raises(
        LocalProtocolError, match=r"cache\.get\(\) would stop the event loop .* `await cache\.get_async"
    ):
        Cache("geocode").get("a", lambda: 1)


# --- what a task keeps and tells, in both forms -----------------------------------------------------------------------


class Line:
    """As much of a task's context as the part needs: the driver answers as the test says."""

    def __init__(self, *answers: Any) -> None:
        self.answers = deque(answers)
        self.asked: list[Any] = []
        self.sent: list[Any] = []
        self.full = False
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def request(self, payload: Any, timeout_s: float) -> Any:
        self.asked.append([*payload, timeout_s])
        answer = self.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def request_async(self, payload: Any, timeout_s: float) -> Any:
        return self.request(payload, timeout_s)

    def send_event_nowait(self, event: Any) -> None:
        if self.full:
            raise GatewayFull("no capacity")
        self.sent.append(event)

    def send_event(self, event: Any) -> None:
        self.sent.append(event)

    def timed_out(self, failure: str) -> TimedOut:
        return TimedOut(failure)


def part_on(line: Line) -> CachePart:
    part = CachePart("geocode")
    open_alone(part, line)
    return part


def on_thread(part: CachePart, key: Any, make: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    return part.get(key, make, timeout_s)


def on_loop(part: CachePart, key: Any, make: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    return asyncio.run(part.get_async(key, make, timeout_s))


both_forms = pytest.mark.parametrize("get", [on_thread, on_loop])
Get = Callable[..., Any]


@both_forms
def test_a_value_that_the_driver_has_is_asked_for_once_in_each_task(get: Get) -> None:
    line = Line(["value", encode_event("v")])
    part = part_on(line)
    assert [get(part, "a", lambda: "another", 7.0) for _ in range(3)] == ["v"] * 3
    assert line.asked == [["get", 1, encode_event("a"), 7.0]]


@both_forms
@pytest.mark.parametrize(("kept", "value"), [(None, "own"), (encode_event("the first one"), "the first one")])
def test_a_value_that_was_computed_is_the_one_that_is_kept(get: Get, kept: Any, value: str) -> None:  # H183
    line = Line(["compute"], kept)
    part = part_on(line)
    assert [get(part, "a", lambda: "own", 7.0) for _ in range(2)] == [value] * 2
    assert line.asked[1:] == [["put", 1, encode_event("a"), encode_event("own"), PUT_S]]
    assert line.sent == []


@both_forms
@pytest.mark.parametrize("error", [TimedOut("no answer"), RequestFailed("the driver has failed")])
def test_a_value_that_was_not_kept_is_its_callers_and_another_one_may_compute_it(
    get: Get, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line(["compute"], error, ["value", encode_event("later")])
    part = part_on(line)
    assert get(part, "a", lambda: "own") == "own"
    assert line.sent == [["end", 1, False]]
    assert f"a value was not kept, and may be computed again: {type(error).__name__}" in caplog.text
    assert get(part, "a", lambda: "own") == "later", "it is asked for again"


@both_forms
@pytest.mark.parametrize("bytes_over", [0, 1])
def test_a_value_of_the_largest_size_is_kept_and_a_larger_one_is_not(get: Get, bytes_over: int) -> None:
    value = b"v" * (VALUE_BYTES_MAX + bytes_over - len(encode_event(b"v" * VALUE_BYTES_MAX)) + VALUE_BYTES_MAX)
    line = Line(["compute"], None)
    part = part_on(line)
    assert get(part, "a", lambda: value) == value
    assert line.sent == [["end", 1, True]] * bytes_over
    assert len(line.answers) == bytes_over


@both_forms
def test_a_call_that_ends_without_a_value_says_so_and_raises_why(get: Get) -> None:
    def fail() -> Any:
        raise ValueError("no such place")

    for number, answer, make, error in (
        (1, TimedOut("no answer"), fail, TimedOut),
        (2, ["compute"], fail, ValueError),
        (3, ["compute"], object, EventEncodeError),
    ):
        line = Line(answer)
        part = part_on(line)
        with pytest.raises(error):
            get(part, "a", make, 5.0)
        assert line.sent == [["end", 1, False]], number
    with pytest.raises(TimedOut, match="no value of the cache 'geocode' within 5 s: another task computes it"):
        get(part_on(Line(TimedOut("no answer"))), "a", fail, 5.0)


@pytest.mark.parametrize("is_coroutine", [True, False])
def test_the_blocking_form_takes_nothing_that_has_to_be_awaited(is_coroutine: bool) -> None:
    async def later() -> None: ...

    class Later:
        def __await__(self) -> Iterator[Any]:
            yield

    line = Line(["compute"])
    with pytest.raises(LocalProtocolError, match=r"has to be awaited: use `await cache\.get_async"):
        part_on(line).get("a", later if is_coroutine else Later, 60.0)
    assert line.sent == [["end", 1, False]]


@both_forms
def test_a_task_keeps_the_values_that_it_has_wanted_lately(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(encode_event("a")) + len(encode_event("v"))
    monkeypatch.setattr(module, "LOCAL_BYTES_MAX", 2 * size)
    line = Line(*[["value", encode_event("v")]] * 6)
    part = part_on(line)
    for key in ("a", "b", "a", "c", "a", "c", "b", "c"):
        get(part, key, lambda: "another")
    assert [one[2] for one in line.asked] == [encode_event(key) for key in "abcb"]
    assert part._local_bytes == 2 * size


@both_forms
def test_every_hit_in_a_task_reaches_the_driver(get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HITS_TOLD", 3)
    line = Line(["value", encode_event("v")])
    part = part_on(line)
    for _ in range(6):
        get(part, "a", lambda: "another")
    assert line.sent == [["hits", 3]]
    assert part.final_state() == b""
    assert line.sent == [["hits", 3], ["hits", 2]]
    idle = Line()
    part_on(idle).final_state()
    assert idle.sent == []


def test_what_a_thread_has_to_say_waits_for_capacity() -> None:
    line = Line(TimedOut("no answer"))
    line.full = True
    with pytest.raises(TimedOut):
        part_on(line).get("a", lambda: 1, 60.0)
    assert line.sent == [["end", 1, False]]


async def test_calls_of_one_loop_that_waited_for_another_one_are_hits() -> None:
    cache = Cache("geocode")
    _, _, parts = await tasks_alone(cache, 1)

    async def make() -> str:
        await anyio.sleep(0.01)
        return "value"

    await asyncio.gather(*(parts[0].get_async("a", make, 60.0) for _ in range(10)))
    parts[0].final_state()
    await anyio.wait_all_tasks_blocked()
    figures = cache.figures()
    assert (figures["gets_total"], figures["hits_total"], figures["hit_share"]) == (10, 9, 0.9)


async def test_a_call_that_has_waited_for_another_one_asks_with_the_time_that_is_left() -> None:
    line = Line(["compute"], ["value", encode_event("v")], ["compute"])
    part = part_on(line)

    async def fail() -> None:
        await anyio.wait_all_tasks_blocked()
        line.time += 5.0
        raise ValueError("no such place")

    for timeout_s, left_s in ((12.0, 7.0), (5.0, 0.0)):
        calls = part.get_async("a", fail, 60.0), part.get_async("a", lambda: "own", timeout_s)
        outcomes: list[Any] = [*await asyncio.gather(*calls, return_exceptions=True)]
        assert isinstance(outcomes[0], ValueError)
        assert outcomes[1] == "v"
        assert line.asked[-1][2:] == [encode_event("a"), left_s]
        part._local.clear()
        line.answers.append(["value", encode_event("v")])


@both_forms
@pytest.mark.parametrize("bytes_over", [0, 1])
def test_a_key_may_have_its_whole_length(get: Get, bytes_over: int) -> None:
    key = "k" * (KEY_BYTES_MAX + bytes_over - len(encode_event("k" * KEY_BYTES_MAX)) + KEY_BYTES_MAX)
    line = Line(["value", encode_event("v")])
    with pytest.raises(ValueError, match="may have 32768 bytes, and this") if bytes_over else nullcontext():
        assert get(part_on(line), key, lambda: "own") == "v"


# --- the driver's half alone ------------------------------------------------------------------------------------------


async def asked(driver: Driver, message: list[Any], recipient: Recipient | None = None) -> asyncio.Future[Any]:
    return bound(await driver.half.handle_request(0, 0, message), recipient)


async def test_a_number_that_was_used_and_too_many_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:  # H157
    driver, _, _ = await tasks_alone(Cache("geocode"), 1)
    await asked(driver, ["get", 1, b"a"])
    with pytest.raises(RemoteProtocolError, match="has asked already"):
        await asked(driver, ["get", 1, b"a"])
    monkeypatch.setattr("spark_bridge.primitives.cache.book.LEASED_BYTES_MAX", 1)
    with pytest.raises(LocalProtocolError, match="asks the cache 'geocode' for too many keys at the same time"):
        await asked(driver, ["get", 2, b"b"])


async def test_one_that_waits_and_brings_a_value_is_answered_all_the_same() -> None:  # H157
    driver, _, _ = await tasks_alone(Cache("geocode"), 1)
    await asked(driver, ["get", 1, b"a"])
    waits = await asked(driver, ["get", 2, b"a"])
    assert await (await asked(driver, ["put", 2, b"a", b"value"])) is None
    assert await waits == ["value", b"value"]


async def test_a_lease_passes_over_one_that_waits_no_more_although_nothing_was_heard_of_it() -> None:  # H176
    driver, _, _ = await tasks_alone(Cache("geocode"), 1)
    first = await asked(driver, ["get", 1, b"a"])
    gone = Recipient()
    await asked(driver, ["get", 2, b"a"], gone)
    last = await asked(driver, ["get", 3, b"a"])
    gone.over = True
    assert await first == ["compute"]
    await driver.half.handle_event_from_operator(0, 0, ["end", 1, False])
    assert await last == ["compute"]
    assert not gone.answered.done()


async def test_of_several_values_that_arrive_the_first_one_stays_and_all_learn_it() -> None:  # H183
    store: list[tuple[bytes, bytes]] = []
    cache = Cache("geocode", values=lambda: Slow(store))  # type: ignore[arg-type, return-value]
    driver, _, _ = await tasks_alone(cache, 1)
    answers = [await asked(driver, ["put", number, b"a", value]) for number, value in ((1, b"x"), (2, b"y"), (3, b"x"))]
    assert store == [(b"a", b"x")]
    assert not any(answer.done() for answer in answers)
    Slow.user.written(dict(store))
    assert [await answer for answer in answers] == [None, b"x", None]
    late = [await asked(driver, ["put", number, b"a", value]) for number, value in ((4, b"x"), (5, b"y"))]
    assert [await answer for answer in late] == [None, b"x"]


async def test_an_operator_that_begins_later_reads_nothing_twice() -> None:  # H183
    cache = Cache("geocode", values=lambda: Slow([], [(b"a", b"x"), (b"b", b"y")]))  # type: ignore[arg-type, return-value]
    for _ in range(2):
        driver, _, _ = await tasks_alone(cache, 1)
        assert await (await asked(driver, ["get", 1, b"a"])) == ["value", b"x"]
        assert (cache.figures()["entries"], cache.figures()["bytes"]) == (2, 2 * (256 + 2))
        await driver.half.close()


class Slow:
    """A port to a storage that writes when the test says so."""

    user: ValueUser

    def __init__(self, store: list[tuple[bytes, bytes]], has: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._store, self._has = store, has

    async def open(self, user: ValueUser) -> list[tuple[bytes, bytes]]:
        Slow.user = user
        return list(self._has)

    def append(self, key: bytes, value: bytes) -> None:
        self._store.append((key, value))

    def close(self) -> None: ...


@pytest.mark.parametrize("ends", ["written", "failed"])
async def test_values_that_wait_for_the_storage_hold_back_those_that_come_after_them(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # H157
    monkeypatch.setattr("spark_bridge.primitives.cache.driver.ARRIVING_BYTES_MAX", 10)
    store: list[tuple[bytes, bytes]] = []
    driver, _, _ = await tasks_alone(Cache("geocode", values=lambda: Slow(store)), 1)  # type: ignore[arg-type, return-value]
    await asked(driver, ["put", 1, b"a", b"x" * 10])
    await asked(driver, ["put", 2, b"b", b"x"])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(asked, driver, ["put", 3, b"c", b"x"])
        await anyio.wait_all_tasks_blocked()
        assert [key for key, _ in store] == [b"a", b"b"]
        if ends == "written":
            Slow.user.written({b"a": b"x" * 10})
        else:
            Slow.user.failed(StorageError("full"))
    assert [key for key, _ in store] == [b"a", b"b", b"c"]
    assert len(driver.failures) == (ends == "failed")
    if ends == "failed":
        Slow.user.written({b"b": b"x"})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asked, driver, ["put", 4, b"d", b"x"])
            await anyio.wait_all_tasks_blocked()
            assert [key for key, _ in store] == [b"a", b"b", b"c"], "it waits again"
            Slow.user.written({b"a": b"x" * 10})


async def test_all_figures_of_a_cache() -> None:
    cache = Cache("geocode", bytes_max=2 * (256 + 2))
    driver, _, _ = await tasks_alone(cache, 1)
    assert cache.figures()["hit_share"] == 0.0
    for number, key in enumerate((b"a", b"b", b"c"), 1):
        await asked(driver, ["get", number, key])
        await asked(driver, ["put", number, key, b"v"])
    await asked(driver, ["get", 4, b"c"])
    await asked(driver, ["get", 5, b"d"])
    await asked(driver, ["get", 6, b"d"])
    await asked(driver, ["get", 7, b"e"])
    await driver.half.handle_event_from_operator(0, 0, ["end", 7, True])
    await driver.half.handle_event_from_operator(0, 0, ["hits", 3])
    assert cache.figures() == {
        "hit_share": 0.5,
        "gets_total": 10,
        "hits_total": 4,
        "waits_total": 1,
        "computed_total": 5,
        "lost_total": 1,
        "too_large_total": 1,
        "evicted_total": 1,
        "entries": 2,
        "bytes": 2 * (256 + 2),
        "computing": 1,
        "waiting": 1,
    }


# --- durable ----------------------------------------------------------------------------------------------------------


async def test_a_durable_value_is_in_the_storage_before_anybody_has_it(tmp_path: Path) -> None:  # H183
    made: list[str] = []

    def make() -> str:
        made.append("a")
        return "value"

    async with StorageSession(CheckpointStorage(tmp_path)) as session:
        port = session.values("geocode")
        cache = Cache("geocode", values=lambda: port)
        driver, _, parts = await tasks_alone(cache, 2)
        got: list[str] = []

        async def want(part: CachePart) -> None:
            got.append(await part.get_async("a", make, 60.0))

        async with anyio.create_task_group() as tasks:
            async with port._busy:  # the storage is slow
                tasks.start_soon(want, parts[0])
                await anyio.wait_all_tasks_blocked()
                await driver.half.subtask_failed(0, 0, FailureReason(FailureKind.KILLED, "killed by the test"))
                tasks.start_soon(want, parts[1])
                await anyio.wait_all_tasks_blocked()
                assert got == [], "it would be lost with the driver"
        assert got == ["value"] * 2
        await driver.half.close()
    async with StorageSession(CheckpointStorage(tmp_path)) as session:
        cache = Cache("geocode", values=lambda: session.values("geocode"))
        _, _, parts = await tasks_alone(cache, 1)
        assert await parts[0].get_async("a", make, 60.0) == "value"
    assert made == ["a"]


async def test_a_value_that_cannot_be_written_fails_the_jobs_and_is_seen_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # H183
    monkeypatch.setattr("spark_bridge.storage.port._RETRY_S", 0.001)
    async with StorageSession(CheckpointStorage(tmp_path)) as session:
        cache = Cache("geocode", values=lambda: session.values("geocode"))
        driver, _, parts = await tasks_alone(cache, 1)
        folder = tmp_path / "_caches"
        folder.write_text("a file is in the way")
        got: list[str] = []

        async def want() -> None:
            got.append(await parts[0].get_async("a", lambda: "value", 60.0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(want)
            await driver.failed.wait()
            assert got == []
            folder.unlink()
        assert got == ["value"]
        assert isinstance(driver.failures[0], StorageError)
