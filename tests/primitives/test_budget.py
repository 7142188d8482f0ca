# SPDX-License-Identifier: Apache-2.0

"""A budget: what all tasks together may spend, once over all runs (H182)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
import structlog.testing

from headgate import Budget, CheckpointConfig, SubtaskContext
from headgate.errors import BudgetExhausted, GatewayFull, TimedOut
from headgate.testing import running_operator
from protocol.errors import AttemptOver, LocalProtocolError
from spark_bridge.primitives.budget.task import BudgetInTask, BudgetPart, Reservation
from tests.primitives.histories import budget_history, passing_on, until_done, with_held_requests
from tests.primitives.stand_ins import open_alone

pytestmark = pytest.mark.anyio


async def test_what_is_settled_is_spent_and_the_rest_is_there_for_others() -> None:
    budget = Budget("usd", 1.0)

    def call(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        with budget.reserve(0.4) as spent:
            spent.settle(0.1)
            with pytest.raises(LocalProtocolError, match=r"settle\(\) of a reservation that is settled already"):
                spent.settle(0.1)
            with pytest.raises(LocalProtocolError, match=r"refund\(\) of a reservation that is settled already"):
                spent.refund()
        with budget.reserve(Decimal("0.2")):
            yield "nothing was said, so 0.2 is spent"
        with budget.reserve(0.4) as spent:
            spent.refund()
        with pytest.raises(ValueError, match="of the service"), budget.reserve(0.1):
            raise ValueError("of the service")
        with pytest.raises(LocalProtocolError, match=r"settled already"):
            spent.settle(0.1)
        with pytest.raises(LocalProtocolError, match="entered twice"), spent:
            pass
        with pytest.raises(LocalProtocolError, match="before the reservation"):
            budget.reserve(0.1).settle(0.1)

    async with running_operator(parallelism=1, uses=[budget]) as world:
        task = await world.launch_operator(0, call, [])
        await until_done(world, [task])
        assert task.error is None, repr(task.error)
        assert (budget.total, budget.spent, budget.reserved, budget.left) == (1.0, 0.4, 0.0, 0.6)
        assert budget.figures()["spent_total"] == 0.4


async def test_without_a_storage_a_budget_says_once_that_it_is_in_memory_only() -> None:
    budget = Budget("usd", 1.0)
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            async with running_operator(parallelism=1, uses=[budget]):
                pass
    said = [line for line in lines if line["event"].startswith("budget kept in memory only")]
    assert [line["log_level"] for line in said] == ["warning"]


async def test_one_that_can_never_have_enough_learns_it_and_one_that_may_waits() -> None:
    budget = Budget("usd", 1)

    def hold(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        with budget.reserve(0.8) as spent:
            context.sleep(5.0)
            spent.settle(0.7)
        yield "held"

    def want(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        with pytest.raises(TimedOut, match="nothing was reserved of the budget 'usd' within 1 s"):
            with budget.reserve(0.3, timeout_s=1.0):
                pass
        try:
            with budget.reserve(1.5):
                pass
        except BudgetExhausted as error:
            yield str(error)
        with budget.reserve(0.25) as spent:
            yield f"{context.now() - began:.0f}"
            spent.refund()

    async with running_operator(parallelism=2, uses=[budget]) as world:
        began = world.now
        first = await world.launch_operator(0, hold, [])
        await world.settle()
        second = await world.launch_operator(1, want, [])
        await until_done(world, [first, second])
    assert second.error is None, repr(second.error)
    assert second.outputs == [
        "the budget 'usd' is exhausted: 1.5 was to be reserved, but 0 of 1 is spent, in this run and in earlier ones. "
        "Pass a larger total to sidecar.budget() to go on",
        "5",
    ]
    assert budget.spent == 0.7


@pytest.mark.parametrize("how", ["kill", "lose_executor", "cancel_job"])
async def test_what_a_lost_attempt_had_reserved_is_spent(how: str) -> None:  # H182
    budget = Budget("usd", 1.0)

    def hold(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        with budget.reserve(0.3):
            context.sleep(50.0)
        yield "held"

    async with running_operator(parallelism=1, uses=[budget]) as world:
        task = await world.launch_operator(0, hold, [])
        await world.settle()
        assert (budget.reserved, budget.spent) == (0.3, 0.0)
        await (world.cancel_job() if how == "cancel_job" else getattr(world, how)(task))
        await world.settle()
        assert (budget.reserved, budget.spent) == (0.0, 0.3)
        assert budget.figures()["lost_total"] == 0.3


@pytest.mark.parametrize("catch", [True, False])
async def test_a_task_that_fails_because_the_budget_is_exhausted_fails_the_job_with_it(catch: bool) -> None:
    budget = Budget("usd", 1.0)

    def call(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        for _ in range(4):
            try:
                with budget.reserve(0.4):
                    yield "called"
            except BudgetExhausted:
                if not catch:
                    raise
                return

    async with running_operator(parallelism=1, uses=[budget]) as world:
        task = await world.launch_operator(0, call, [])
        await until_done(world, [task], or_failed=True)
        await world.settle()
        assert task.outputs == ["called"] * 2
        assert [type(one) for one in world.failures] == [] if catch else [BudgetExhausted]
    assert budget.spent == 0.8


async def test_a_refused_task_fails_the_job_with_that_although_another_one_has_failed_before() -> None:
    budget = Budget("usd", 1.0)

    def call(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        try:
            with budget.reserve(2.0):
                yield "never"
        except BudgetExhausted:
            context.sleep(1.0)
            if context.subtask == 0:
                raise ValueError("of the first task") from None
            context.sleep(10.0)
            raise

    async with running_operator(parallelism=2, uses=[budget], attempts_max=3) as world:
        tasks = [await world.launch_operator(subtask, call, []) for subtask in range(2)]
        await until_done(world, tasks, or_failed=True)
        await world.settle()
        assert [type(one) for one in world.failures] == [BudgetExhausted]


async def test_no_restore_gives_anything_back() -> None:  # H152 H182
    budget = Budget("usd", 10.0)

    def call(context: SubtaskContext, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            with budget.reserve(1.0) as spent:
                spent.settle(0.5)
            yield record

    kept: dict[str, Any] = {"parallelism": 1, "mode": "streaming", "uses": [budget]}
    async with running_operator(**kept, checkpoint=CheckpointConfig()) as world:
        task = await world.launch_operator(0, call)
        task.feed(1)
        await world.settle()
        await world.checkpoint()
        task.feed(2, 3)
        await world.settle()
        await world.kill(task)
        await world.settle()
        assert budget.spent == 1.5
    restored = with_held_requests(world.checkpoints[-1], ["reserve", 1, 10**9, 600.0], part="usd")
    async with running_operator(**kept, restored=restored) as world:
        await world.launch_operator(0, passing_on)
        await world.settle()
        assert (budget.spent, budget.reserved) == (1.5, 0.0)


@pytest.mark.parametrize("seed", range(20))
async def test_never_more_is_spent_than_the_total_however_many_are_lost(seed: int) -> None:
    await budget_history(seed)


def test_wrong_totals_and_amounts_are_refused() -> None:
    for total in (0, -1.0, float("nan"), 1e-10, 1e10, Decimal("Infinity")):
        with pytest.raises(ValueError, match="total must be a number from 0"):
            Budget("usd", total)
    wrong: list[Any] = [True, "50", None]
    for total in wrong:
        with pytest.raises(TypeError, match="total must be"):
            Budget("usd", total)
    budget = Budget("usd", 1.0)
    for amount in (0, -1, float("inf"), Decimal("1e-11")):
        with pytest.raises(ValueError, match="amount must be a number from 0"):
            budget.reserve(amount)
    with pytest.raises(LocalProtocolError, match=r"handle\.subtask"), budget.reserve(0.1):
        pass


# --- coroutines -------------------------------------------------------------------------------------------------------


class Line:
    """As much of a task's context as the part needs. What it asks is answered when the test says so."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[list[Any], asyncio.Future[Any]]] = asyncio.Queue()
        self.sent: list[Any] = []
        self.told = asyncio.Event()
        self.full = 0

    async def request_async(self, payload: Any, timeout_s: float) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((payload, answer))
        return await answer

    def send_event_nowait(self, event: Any) -> None:
        if self.full:
            self.full -= 1
            raise GatewayFull("full")
        self.sent.append(event)
        self.told.set()

    def timed_out(self, text: str) -> TimedOut:
        return TimedOut(text)


def on_a_loop() -> tuple[Line, Any]:
    part, line = BudgetPart("usd"), Line()
    open_alone(part, line)
    return line, lambda amount: Reservation(lambda: part, amount, 60.0)


async def test_a_coroutine_reserves_and_settles_without_stopping_its_loop() -> None:
    line, reserve = on_a_loop()

    async def use() -> None:
        async with reserve(5) as spent:
            spent.settle(3e-9)
        async with reserve(5):
            pass

    task = asyncio.get_running_loop().create_task(use())
    for number in (1, 2):
        payload, answer = await line.asked.get()
        assert payload == ["reserve", number, 5, 60.0]
        answer.set_result("")
    await task
    assert line.sent == [["settle", 1, 3], ["settle", 2, 5]]
    with pytest.raises(
        LocalProtocolError, match=r"with budget\.reserve\(\.\.\.\) would stop .* use `async with budget"
    ):
        reserve(5).__enter__()


@pytest.mark.parametrize("full", [0, 1])
async def test_a_reservation_whose_wait_is_cancelled_is_given_back(full: int) -> None:  # H176
    line, reserve = on_a_loop()
    line.full = full

    async def use() -> None:
        async with reserve(5):
            pass

    task = asyncio.get_running_loop().create_task(use())
    await line.asked.get()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await line.told.wait()  # what found no capacity is sent again
    assert line.sent == [["refund", 1]]


@pytest.mark.parametrize("outcome", ["exhausted", None, AttemptOver("over")])
async def test_a_coroutine_learns_why_nothing_was_reserved(outcome: Any) -> None:
    line, reserve = on_a_loop()

    async def use() -> None:
        async with reserve(5):
            pass

    task = asyncio.get_running_loop().create_task(use())
    _, answer = await line.asked.get()
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
    expected = {"exhausted": BudgetExhausted, None: TimedOut}.get(outcome, AttemptOver)
    with pytest.raises(expected):
        await task
    assert line.sent == ([] if outcome == "exhausted" else [["refund", 1]])


def test_a_budget_in_a_task_has_nothing_of_the_driver() -> None:
    with pytest.raises(AttributeError, match="left of the budget 'usd' is for the driver"):
        BudgetInTask("usd").left  # noqa: B018
