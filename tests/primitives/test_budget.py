# SPDX-License-Identifier: Apache-2.0

"""A budget: what all tasks together may spend, once over all runs (H182)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import anyio.lowlevel
import pytest
import structlog.testing

from headgate import Budget, CheckpointConfig, FailureKind, FailureReason, SubtaskContext
from headgate.errors import BudgetExhausted, GatewayFull, TimedOut
from headgate.testing import running_operator
from protocol.errors import AttemptOver, LocalProtocolError, RemoteProtocolError
from spark_bridge.primitives.budget.book import UNITS
from spark_bridge.primitives.budget.driver import CEILING
from spark_bridge.primitives.budget.task import BudgetInTask, BudgetPart, Reservation
from spark_bridge.storage import StorageError, StorageFenced
from spark_bridge.storage.port import ValueUser
from tests.primitives.histories import budget_history, passing_on, until_done, with_held_requests
from tests.primitives.stand_ins import Recipient, bound, open_alone

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


# --- durable ----------------------------------------------------------------------------------------------------------


class Store:
    """What a storage has of the budget, and a port to it that writes when the test says so."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}
        self.waiting: dict[bytes, bytes] = {}
        self.user: ValueUser | None = None
        self.immediate = True

    async def open(self, user: ValueUser) -> list[tuple[bytes, bytes]]:
        assert self.user is None
        self.user = user
        return list(self.entries.items())

    def append(self, key: bytes, value: bytes) -> None:
        self.waiting[key] = value
        if self.immediate:
            asyncio.get_running_loop().call_soon(self.write)

    def write(self) -> None:
        entries, self.waiting = self.waiting, {}
        self.entries |= entries
        if self.user is not None and entries:
            self.user.written(entries)

    def close(self) -> None:
        self.user = None


class Half:
    """The coordinator's half of one operator, without the actors around it."""

    def __init__(self, budget: Budget, operator_id: str = "op") -> None:
        self.half = budget.coordinator(operator_id)
        self.clock = self
        self.failures: list[Exception] = []

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def fail_job(self, cause: Exception) -> None:
        self.failures.append(cause)

    async def start(self) -> Half:
        await self.half.start(self)  # type: ignore[arg-type]
        return self

    async def reserve(self, number: int, units: int) -> asyncio.Future[Any]:
        return bound(await self.half.handle_request(0, 0, ["reserve", number, units * UNITS, 60.0]))

    async def settle(self, number: int, units: int) -> None:
        await self.half.handle_event_from_operator(0, 0, ["settle", number, units * UNITS])


async def turns() -> None:
    for _ in range(5):
        await anyio.lowlevel.checkpoint()


def durable(store: Store, total: float) -> Budget:
    return Budget("usd", total, values=lambda: store)  # type: ignore[arg-type, return-value]


async def test_the_next_run_continues_with_what_is_left_of_a_durable_budget() -> None:  # H182
    store = Store()
    for run, total in enumerate((100, 100, 150)):
        budget = durable(store, total)
        op = await Half(budget).start()
        assert budget.spent == 20 * run, "what really was spent, when the run before ended well"
        answer = await op.reserve(1, 30)
        assert await answer == ""
        await op.settle(1, 20)
        await op.half.close()
        assert int(store.entries[CEILING]) == (20 * run + 20) * UNITS
    killed = durable(store, 150)
    op = await Half(killed).start()
    assert await (await op.reserve(1, 50)) == ""
    store.close()
    again = durable(store, 150)
    await Half(again).start()
    assert 110 <= again.spent <= 110 + 150 / 50, "what was reserved may be spent"


async def test_nothing_is_reserved_before_the_storage_has_a_ceiling_for_it() -> None:  # H182
    store = Store()
    budget = durable(store, 100)
    op = await Half(budget).start()
    store.immediate = False
    answer = await op.reserve(1, 30)
    await turns()
    assert (answer.done(), budget.reserved) == (False, 0)
    store.write()
    assert await answer == ""
    assert int(store.entries[CEILING]) >= 30 * UNITS
    await op.settle(1, 0)
    assert int(store.waiting[CEILING]) <= 100 * UNITS / 50, "it comes down again"
    answer = await op.reserve(2, 30)
    await turns()
    assert not answer.done(), "the lower one of both may be the one that is written"
    store.write()
    store.write()
    assert await answer == ""


async def test_operators_that_share_a_durable_budget_read_it_once_and_the_last_one_writes_what_is_spent() -> None:
    store = Store()
    budget = durable(store, 100)
    one, other = await Half(budget, "one").start(), await Half(budget, "other").start()
    assert await (await one.reserve(1, 30)) == ""
    assert await (await other.reserve(1, 30)) == ""
    await one.half.close()
    assert store.user is not None
    assert (budget.spent, budget.reserved) == (30, 30), "what one had reserved may be spent"
    await other.settle(1, 5)
    await other.half.close()
    assert int(store.entries[CEILING]) == 35 * UNITS
    later = await Half(budget, "later").start()
    assert (budget.spent, budget.left) == (35, 65)
    assert store.user is not None
    await later.half.close()


async def test_what_is_spent_never_falls_although_an_earlier_end_is_written_late() -> None:  # H182
    store = Store()
    store.entries[CEILING] = b"%d" % (90 * UNITS)
    store.waiting[CEILING] = b"%d" % (10 * UNITS)  # an end that has given up waiting for its write
    budget = durable(store, 100)
    await Half(budget).start()
    store.write()
    assert (budget.spent, int(store.entries[CEILING])) == (90, 90 * UNITS)


async def test_an_end_waits_for_what_was_spent_to_be_written_and_not_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    budget = durable(store, 100)
    op = await Half(budget).start()
    assert await (await op.reserve(1, 30)) == ""
    await op.settle(1, 10)
    store.immediate = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(op.half.close)
        await anyio.wait_all_tasks_blocked()
        assert store.user is not None, "it waits"
        store.write()  # of before
        store.write()
    assert int(store.entries[CEILING]) == 10 * UNITS
    op = await Half(budget).start()
    monkeypatch.setattr("spark_bridge.primitives.budget.driver.LAST_WRITE_S", 0.001)
    with structlog.testing.capture_logs() as lines:
        await op.half.close()
    assert [line["event"] for line in lines] == ["what was spent not written, so the next run finds a ceiling"]
    assert store.user is None


async def test_a_late_write_of_an_earlier_operator_is_not_taken_for_one_of_the_present_one() -> None:
    store = Store()
    budget = durable(store, 100)
    op = await Half(budget).start()
    store.immediate = False
    answer = await op.reserve(1, 30)
    await turns()
    assert store.user is not None
    store.user.written({CEILING: b"%d" % (90 * UNITS)})
    await turns()
    assert not answer.done()
    assert store.user.value_of(CEILING) == b"%d" % (90 * UNITS), "for the merge of files: what is in the storage"
    store.write()
    assert await answer == ""


async def test_only_a_storage_that_another_program_has_taken_fails_the_jobs() -> None:
    store = Store()
    budget = durable(store, 100)
    ops = [await Half(budget, name).start() for name in ("one", "other")]
    assert store.user is not None
    store.user.failed(StorageError("full"))
    assert [op.failures for op in ops] == [[], []], "the port tries again"
    fenced = StorageFenced("another program has it")
    store.user.failed(fenced)
    assert [op.failures for op in ops] == [[fenced], [fenced]]


async def test_a_number_that_was_used_is_refused() -> None:
    op = await Half(Budget("usd", 100.0)).start()
    await op.reserve(1, 30)
    with pytest.raises(RemoteProtocolError, match="has asked already"):
        await op.reserve(1, 30)


async def test_a_reservation_passes_over_one_that_waits_no_more_although_nothing_was_heard_of_it() -> None:  # H176
    budget = Budget("usd", 100.0)
    op, gone = await Half(budget).start(), Recipient()
    assert await (await op.reserve(1, 90)) == ""
    bound(await op.half.handle_request(0, 0, ["reserve", 2, 50 * UNITS, 60.0]), gone)
    last = await op.reserve(3, 80)
    gone.over = True
    await op.half.handle_event_from_operator(0, 0, ["refund", 1])
    assert await last == ""
    assert (gone.answered.done(), budget.reserved) == (False, 80)


async def test_the_figures_are_those_of_the_book() -> None:
    budget = Budget("usd", 100.0)
    op = await Half(budget).start()
    answers = [await op.reserve(number, 30) for number in range(1, 5)]
    await op.settle(1, 35)
    await op.half.handle_event_from_operator(0, 0, ["refund", 2])
    waits = await op.reserve(5, 40)
    assert [await answer for answer in answers] == ["", "", "", ""]
    assert not waits.done()
    assert budget.figures() == {
        "limit": 100.0,
        "left": 5.0,
        "reserved": 60.0,
        "spent_total": 35.0,
        "lost_total": 0.0,
        "above_total": 5.0,
        "waiting": 1,
    }
    await op.half.subtask_failed(0, 0, FailureReason(FailureKind.KILLED, "killed by the test"))
    assert await waits is None
    assert (budget.figures()["lost_total"], budget.figures()["waiting"]) == (60.0, 0)
    await op.half.close()
