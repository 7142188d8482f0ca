# SPDX-License-Identifier: Apache-2.0

"""Async stages in virtual time: idle sources, batches, retries, failures, and wrong arguments."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pandas as pd
import pyarrow as pa
import pytest

from actors.coordination import (
    CoordinatorContext,
    OperatorCoordinator,
    SourceCoordinator,
    StaticSplitEnumerator,
    SubtaskGateway,
)
from actors.coordination.sources.enumerators import HybridSplitEnumerator
from headgate import CheckpointConfig, SplitReader, chain
from headgate.sinks import FileSink
from headgate.testing import running_operator
from protocol.errors import EventEncodeError, LocalProtocolError
from spark_bridge.sources.hybrid import HybridReader
from spark_bridge.subtask.coroutines.calls import AsyncOperator, Failed
from spark_bridge.subtask.coroutines.concurrently import concurrently
from spark_bridge.subtask.coroutines.retry import Retry
from spark_bridge.subtask.errors import BudgetExhausted

pytestmark = pytest.mark.anyio


async def double(number: int) -> int:
    await asyncio.sleep(1.0)
    return 2 * number


# --- sources ---------------------------------------------------------------------------------------------------------


class Waiting(SplitReader):
    """Reads one number of each split, and then has nothing for a long time."""

    idle_wait_s = 0.2

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any] | None]:
        if position is None:
            yield 1, split
        while True:
            yield None


class WaitingForSeveral(Waiting):
    splits_open_max = 2


def static(splits: list[Any], state: bytes | None, *_: Any) -> StaticSplitEnumerator:
    return StaticSplitEnumerator(splits, state)


def source_of(kind: str) -> Any:
    match kind:
        case "one split":
            return SourceCoordinator(partial(static, [4])), Waiting
        case "several splits":
            return SourceCoordinator(partial(static, [4, 5])), WaitingForSeveral
        case _:
            hybrid = partial(HybridSplitEnumerator, [partial(static, [4])])
            return SourceCoordinator(hybrid), partial(HybridReader, [Waiting])


@pytest.mark.parametrize("kind", ["one split", "several splits", "hybrid"])
async def test_results_leave_while_the_source_has_nothing(kind: str) -> None:
    stages = chain(source=source_of(kind), double=concurrently(double, limit=5))
    async with running_operator(stages, parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0)
        await world.advance(0.9)
        assert task.outputs == []
        await world.advance(0.4)
        assert task.outputs == ([8, 10] if kind == "several splits" else [8])
        assert not task.outcome


def as_they_are(records: Iterator[Any]) -> Iterator[Any]:
    yield from records


class Numbers(SplitReader):
    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any] | None]:
        for number in range(position or 0, split):
            yield number + 1, number


class Paced(Numbers):
    """Has a number for each 100 s of virtual time."""

    rate_limit_per_s = 0.01


async def stuck_at_one(number: int) -> int:
    if number == 1:
        await asyncio.Event().wait()
    return number


@pytest.mark.parametrize("waits", ["the source", "the stage before", "two stages before"])
async def test_results_leave_while_stages_before_wait(waits: str) -> None:
    """The stage in the middle has landed nothing, and passes on that the last one has."""
    first = [] if waits == "the source" else [concurrently(stuck_at_one, limit=1)]
    between = [concurrently(stuck_at_one)] if waits == "two stages before" else []
    source = SourceCoordinator(partial(static, [3])), Paced if waits == "the source" else Numbers
    stages = chain(
        source=source, **{f"stage{k}": one for k, one in enumerate([*first, *between])}, last=concurrently(double)
    )
    async with running_operator(stages, parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0)
        await world.advance(5.0)
        assert task.outputs == [0]
        assert not task.outcome


async def test_checkpoints_complete_while_the_limit_is_reached() -> None:  # H180
    numbers = SourceCoordinator(partial(static, [10])), Numbers
    never = asyncio.Event

    async def stuck(number: int) -> None:
        await never().wait()

    stages = chain(source=numbers, plain=as_they_are, stuck=concurrently(stuck, limit=2))
    config = CheckpointConfig(tolerated_failures=0)
    async with running_operator(stages, parallelism=1, mode="streaming", checkpoint=config) as world:
        await world.launch_operator(0)
        for _ in range(3):
            await world.checkpoint()
        restored = world.checkpoints[-1]
    stages = chain(source=numbers, plain=as_they_are, stuck=concurrently(double, limit=2))
    async with running_operator(stages, parallelism=1, mode="streaming", restored=restored) as world:
        task = await world.launch_operator(0)
        await world.advance(10.0)
        assert task.outputs == [2 * number for number in range(10)]


class Lists(SplitReader):
    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any] | None]:
        yield 1, [split]


async def test_a_call_begins_again_with_the_record_as_it_came_and_the_same_key() -> None:  # H180
    """The coroutine of before has changed the list. Another task, which has other records too, has the same key."""
    calls: list[tuple[list[int], str]] = []

    async def call(context: Any, record: list[int]) -> None:
        calls.append(([*record], context.key))
        record.append(99)
        await asyncio.Event().wait()

    stages = chain(source=(SourceCoordinator(partial(static, [3, 4])), Lists), stuck=concurrently(call))
    async with running_operator(stages, parallelism=2, mode="streaming") as world:
        for subtask in range(2):
            await world.launch_operator(subtask)
        await world.advance(0.1)
        await world.checkpoint()
        restored = world.checkpoints[-1]
    first = sorted(calls)
    assert [record for record, _ in first] == [[3], [4]]
    calls.clear()
    async with running_operator(stages, parallelism=1, mode="streaming", restored=restored) as world:
        await world.launch_operator(0)
        await world.advance(0.1)
    assert sorted(calls) == first


@pytest.mark.parametrize("when", ["when it comes", "at the checkpoint"])
async def test_a_result_that_no_checkpoint_can_hold_is_refused_with_its_record(when: str) -> None:  # H180
    """When it is produced, if it is the first of its type; the others are named by the checkpoint that fails."""

    async def call(number: int) -> dict[str, Any]:
        await asyncio.sleep(10.0 if number == 0 else 1.0)
        return {"id": number, "client": object() if number == (1 if when == "when it comes" else 3) else None}

    numbers = SourceCoordinator(partial(static, [4])), Numbers
    stages = chain(source=numbers, ask=concurrently(call))
    async with running_operator(stages, parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0)
        await world.advance(2.0)
        if when == "at the checkpoint":
            assert task.error is None
            world.begin_checkpoint()
            await world.advance(1.0)
    assert isinstance(task.error, EventEncodeError)
    assert f"for the record {1 if when == 'when it comes' else 3}, and a checkpoint cannot hold" in str(task.error)


class SlowToGreet(OperatorCoordinator):
    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        await gateway.send_event("hello")
        await self.context.clock.sleep(5.0)

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context


class Hears(AsyncOperator):
    def handle_event(self, event: Any) -> None:
        pass

    async def process_record(self, context: Any, record: int) -> int:
        return 2 * record


@pytest.mark.parametrize("hears", [False, True])
async def test_only_a_stage_that_handles_events_waits_for_the_first_of_them(hears: bool) -> None:
    async with running_operator(SlowToGreet, parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(Hears if hears else double), [1])
        await world.advance(2.0)
        assert task.outputs == ([] if hears else [2])
        await world.advance(5.0)
        assert task.outputs == [2]


async def test_the_seed_decides_the_pauses_of_retries() -> None:
    async def tries_at(seed: int) -> list[float]:
        times: list[float] = []

        async def fail(number: int) -> None:
            times.append(asyncio.get_running_loop().time())
            raise ConnectionError

        async with running_operator(parallelism=1, seed=seed) as world:
            await world.launch_operator(0, concurrently(fail, retry=Retry(4), on_error="skip"), [0])
            await world.advance(10.0)
        return [time - times[0] for time in times]

    first = await tries_at(1)
    assert len(first) == 4
    assert first == await tries_at(1)
    assert first != await tries_at(2)


async def test_a_coroutine_that_nothing_else_refers_to_is_not_collected() -> None:  # H180
    """A loop keeps no task alive, and this one waits for an object that only itself has."""
    events: WeakSet[asyncio.Event] = WeakSet()

    async def call(number: int) -> str:
        if number:
            while not events:  # noqa: ASYNC110 - no object may refer to what is waited for
                await asyncio.sleep(0.0)
            gc.collect()
            for event in list(events):
                event.set()
            return "collected"
        event = asyncio.Event()
        events.add(event)
        await event.wait()
        return "woken"

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(call), [0, 1])
        assert task.outputs == ["woken", "collected"]


# --- batches ---------------------------------------------------------------------------------------------------------

SCHEMA = pa.schema([("n", pa.int64())])


async def next_of(row: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(1.0 if row["n"] < 3 else 100.0)
    return {"n": row["n"] + 1}


def frames(kind: str) -> list[Any]:
    parts = [[0, 1, 2], [3, 4]]
    if kind == "arrow":
        return [pa.RecordBatch.from_pydict({"n": part}, schema=SCHEMA) for part in parts]
    return [pd.DataFrame({"n": part}) for part in parts]


@pytest.mark.parametrize("kind", ["arrow", "pandas"])
@pytest.mark.parametrize("batches", [2, 0], ids=["the input again", "no batch"])
async def test_a_snapshot_has_the_results_that_wait_for_their_batch(kind: str, batches: int) -> None:  # H180
    calls: list[int] = []

    async def counted(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row["n"])
        return await next_of(row)

    stage = concurrently(counted, limit=3, rows=True, schema=SCHEMA if kind == "arrow" else None)
    async with running_operator(parallelism=1, mode="streaming") as world:
        task = await world.launch_operator(0, stage, frames(kind))
        await world.advance(2.0)
        assert sorted(calls) == [0, 1, 2, 3, 4]
        await world.checkpoint()
        assert task.outputs == []
        await world.kill(task)
        task = await world.retry(task, frames(kind)[:batches])
        await world.advance(200.0)
        (batch,) = task.outputs
        assert isinstance(batch, type(frames(kind)[0]))
        assert (batch.to_pydict() if kind == "arrow" else batch.to_dict("list")) == {"n": [1, 2, 3, 4, 5]}
        assert sorted(calls) == [0, 1, 2, 3, 3, 4, 4]


async def test_batches_are_for_sparks_functions_and_dicts() -> None:
    with pytest.raises(ValueError, match="let a plain function before the stage yield its rows"):
        chain(read=(SourceCoordinator(partial(static, [1])), Numbers), call=concurrently(next_of, rows=True))
    for stage, records, error in [
        (concurrently(next_of, rows=True), [1], "not for 1: leave it out"),
        (concurrently(next_of, rows=True), frames("arrow"), "results of mapInArrow need a schema"),
        (concurrently(next_of_none, rows=True, schema=SCHEMA), frames("arrow"), "a dict of columns, not None"),
    ]:
        async with running_operator(parallelism=1) as world:
            task = await world.launch_operator(0, stage, records)
            await world.advance(1.0)
            assert isinstance(task.error, TypeError)
            assert error in str(task.error)


async def next_of_none(row: dict[str, Any]) -> None: ...


# --- retries and failures --------------------------------------------------------------------------------------------


class Refused(Exception):
    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"status {status}")
        self.response = SimpleNamespace(status_code=status, headers=headers)


@pytest.mark.parametrize(
    ("error", "least_s", "most_s"),
    [
        (Refused(503), 3.5, 7.0),  # half to whole of 1 + 2 + 4
        (Refused(429, **{"Retry-After": "10"}), 30.0, 30.0),
        (ConnectionResetError(), 3.5, 7.0),
        (TimeoutError("slow"), 3.5, 7.0),
    ],
)
async def test_pauses_between_tries_grow_and_are_as_long_as_the_service_asks(
    error: Exception, least_s: float, most_s: float
) -> None:
    tried_at: list[float] = []

    async def call(number: int) -> int:
        tried_at.append(asyncio.get_running_loop().time())
        if len(tried_at) < 4:
            raise error
        return number

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(call, retry=Retry(4, pause_s=1.0)), [7])
        await world.advance(100.0)
        assert task.outputs == [7]
        assert least_s <= tried_at[-1] - tried_at[0] <= most_s


@pytest.mark.parametrize("error", [Refused(404), ValueError("no")], ids=["404", "ValueError"])
async def test_what_cannot_pass_is_not_tried_again(error: Exception) -> None:
    async def call(number: int) -> None:
        raise error

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(call, retry=Retry(4), on_error="yield"), [7])
        (failed,) = task.outputs
        assert isinstance(failed, Failed)
        assert (failed.record, failed.tries) == (7, 1)
        assert world.counters() == {"failed": 1}


@pytest.mark.parametrize("on_error", ["raise", "skip", "yield"])
async def test_what_no_restart_helps_against_ends_the_task_whatever_is_said_of_errors(on_error: str) -> None:  # H182
    async def call(number: int) -> None:
        raise BudgetExhausted("nothing is left")

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(call, on_error=on_error), [7])
        assert isinstance(task.error, BudgetExhausted)


def no_key(record: Any) -> str:
    raise ZeroDivisionError("no key")


async def slow_by_itself(number: int) -> None:
    raise TimeoutError


async def asks_for_key(context: Any, number: int) -> str:
    return str(context.key)


def looks_badly(error: BaseException) -> bool:
    raise ZeroDivisionError("no decision")


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        (concurrently(slow_by_itself), TimeoutError),
        (concurrently(slow_by_itself, retry=Retry(3, on=looks_badly), on_error="skip"), ZeroDivisionError),
        (concurrently(asks_for_key, key=no_key), ZeroDivisionError),
    ],
    ids=["a time-out without timeout_s", "retry.on", "key"],
)
async def test_an_error_of_the_program_itself_ends_the_task(stage: Any, error: type[Exception]) -> None:
    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, stage, range(3))
        await world.advance(100.0)
        assert isinstance(task.error, error), "the task hangs"


async def test_an_exit_ends_the_task_whatever_is_done_with_errors() -> None:
    async def leave(number: int) -> None:
        raise SystemExit(3)

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(leave, on_error="skip"), range(3))
        assert isinstance(task.error, SystemExit)


async def test_a_blocking_call_in_a_coroutine_names_the_other_one() -> None:  # H9
    async def ask(context: Any, number: int) -> None:
        context._context.request(number)

    async with running_operator(parallelism=1) as world:
        task = await world.launch_operator(0, concurrently(ask), range(1))
        assert isinstance(task.error, LocalProtocolError)
        assert "`await request_async(...)`" in str(task.error)


# --- arguments -------------------------------------------------------------------------------------------------------


class Plain(AsyncOperator):
    def process_record(self, context: Any, record: Any) -> Any:
        return record


@asynccontextmanager
async def nothing() -> AsyncIterator[None]:
    yield


async def several(record: Any) -> AsyncIterator[Any]:
    yield record


async def of_three(one: Any, two: Any, three: Any) -> None: ...


async def by_keyword(record: Any, *, table: Any) -> None: ...


async def of_two(self: Any, one: Any) -> None: ...


def plain(self: Any) -> None: ...


def operator(**methods: Any) -> type[AsyncOperator]:
    return type("Made", (AsyncOperator,), methods)


@pytest.mark.parametrize(
    ("function", "more", "error"),
    [
        (lambda record: record, {}, "write `async def`"),
        (several, {}, "so it cannot be awaited. Return one result for each record"),
        (of_three, {}, "needs 3 arguments, but is given record"),
        (by_keyword, {}, "give them with functools.partial"),
        (AsyncOperator(), {}, "each task makes its own"),
        (partial(AsyncOperator), {}, "must define `async def process_record"),
        (operator(process_record=double), {}, "write `async def process_record.self, context, record.`"),
        (operator(process_records=of_three), {}, "did you mean process_record"),
        (operator(process_record=of_three, start=plain), {}, "write `async def start`"),
        (operator(process_record=of_three, handle_event=of_two), {}, "write `def handle_event`"),
        (Plain, {}, "write `async def process_record"),
        (AsyncOperator, {"lifespan": nothing}, "needs no lifespan"),
        (double, {"on_error": FileSink("/tmp/lines")}, "takes no rows, but each failure is a row"),
        (double, {"limit": 0}, "limit must be"),
        (double, {"limit": 1.5}, "limit must be"),
        (double, {"timeout_s": 0}, "timeout_s must be"),
        (double, {"timeout_s": float("nan")}, "timeout_s must be"),
        (double, {"on_error": "ignore"}, "on_error must be"),
        (double, {"on_error": None}, "on_error must be"),
        (double, {"schema": SCHEMA}, "pass both, or none"),
        (double, {"schema": "id long", "rows": True}, "schema must be a pyarrow.Schema, not 'id long'"),
        (double, {"retry": 3}, "retry must be"),
        (double, {"lifespan": nothing()}, "lifespan must be"),
        (double, {"key": "id"}, "key must be"),
        (double, {"ordered": "no"}, "ordered must be"),
        (double, {"rows": 1}, "rows must be"),
    ],
)
def test_wrong_arguments_are_refused_where_they_are_given(function: Any, more: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        concurrently(function, **more)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"retries": 3}, "it has tries, on, pause_s, pause_s_max. Did you mean tries"),
        ({"pause_s": 10, "pause_s_max": 1}, r"pause_s_max must be at least pause_s .10., not 1"),
    ],
)
def test_wrong_settings_of_retries_are_refused_where_they_are_given(settings: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        Retry(**settings)


def test_a_coroutine_in_place_of_its_function_is_refused_and_leaves_no_warning() -> None:
    with pytest.raises(TypeError, match="pass double itself, without calling it"):
        concurrently(double(1))
