# SPDX-License-Identifier: Apache-2.0

"""Random histories of operators with ready-made parts, and what must hold at their end. The seed decides everything.

The tests run them, and so does the hunt for mutants.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

from headgate import Budget, Cache, Group, GroupMember, Permits, SharedValue, SubtaskContext, SubtaskOperator, WorkQueue
from headgate.errors import BudgetExhausted, PeerLost, TimedOut
from headgate.testing import OperatorTask, World, running_operator
from headgate.testing._bookkeeping import with_held
from protocol.barrier_tracker import CheckpointConfig, CompletedCheckpoint
from tests.primitives.stage_histories import chain_history
from tests.simulation.checkers import demand

DEPTH = 6
RECORDS = 8
Judge = Callable[[World, list[OperatorTask]], None]
NODES = 2**DEPTH - 1


def in_turn(seed: int) -> CheckpointConfig:
    """Checkpoints that hold events, or that record them."""
    return CheckpointConfig(hold_events=seed % 2 == 0)


def pause(context: SubtaskContext, seconds: float) -> None:
    """Compute for some virtual seconds, as far as the rest of the world can see."""
    if seconds:
        context.wait_for_event(timeout_s=seconds)


def passing_on(records: Iterator[Any]) -> Iterator[Any]:
    """The function of a task that only waits for its records."""
    return records


def with_held_requests(
    checkpoint: CompletedCheckpoint, *requests: Any, subtask: int = 0, part: str = ""
) -> CompletedCheckpoint:
    """Return the checkpoint as it would be if the subtask's part had asked this, and had no answer yet."""
    return with_held(checkpoint, subtask, requests, are_requests=True, part=part)


def spread(item: object, seed: int) -> int:
    """A number from 0 to 3 that looks random."""
    return crc32(f"{item} {seed}".encode()) % 4


def tree(queue: WorkQueue[str], depth: int, takes_s: Callable[[str], float] = lambda item: 0.0) -> Any:
    """Each item adds its two children; the results are the items."""

    def crawl(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        for item in queue:
            pause(context, takes_s(item))
            if len(item) < depth:
                queue.add([item + "a", item + "b"])
            yield item

    return crawl


def names(depth: int) -> list[str]:
    """All items of the tree, sorted."""
    found, level = [], ["r"]
    for _ in range(depth):
        found += level
        level = [item + child for item in level for child in "ab"]
    return sorted(found)


def results(tasks: list[OperatorTask]) -> list[Any]:
    """What Spark would return: the outputs of the attempts that have succeeded."""
    return sorted(output for task in tasks if task.outcome == "success" for output in task.outputs)


async def until_done(world: World, tasks: list[OperatorTask], *, or_failed: bool = False) -> None:
    """Let time pass until no task runs, or the coordinator has failed the job."""
    for _ in range(1000):
        if all(task.outcome for task in tasks) or (or_failed and world.failures):
            return
        await world.advance(0.1)
    demand(False, f"H100: the work does not end: {tasks}")


def nothing(world: World, tasks: list[OperatorTask]) -> None:
    """Judges nothing."""


async def disturb(
    world: World,
    tasks: list[OperatorTask],
    chance: random.Random,
    function: Any,
    records: Any,
    judge: Judge = nothing,
) -> None:
    """Kill tasks, run each again that has no other attempt, and start copies; then let the work end."""
    for _ in range(chance.randrange(3, 20)):
        await world.advance(chance.choice([0.0, 0.1, 0.3, 0.5]))
        judge(world, tasks)
        running = [task for task in tasks if not task.outcome]
        if not running:
            break
        victim = chance.choice(running)
        subtask = victim.attempt.subtask
        if chance.random() < 0.3:
            tasks.append(await world.launch_operator(subtask, function, records))
            continue
        await (world.kill if chance.random() < 0.5 else world.lose_executor)(victim)
        if not any(task.attempt.subtask == subtask and task.outcome in ("", "success") for task in tasks):
            tasks.append(await world.launch_operator(subtask, function, records))
    await until_done(world, tasks)


async def queue_history(seed: int) -> None:
    """Batch mode: every item counts once in what Spark keeps (H100)."""
    chance = random.Random(seed)
    queue = WorkQueue("tree", ["r"], in_hand=chance.choice([1, 1, 2, 5]))
    function = tree(queue, DEPTH, lambda item: 0.1 * spread(item, seed))
    async with running_operator(
        parallelism=3, uses=[queue], seed=seed, attempts_max=100, checkpoint=in_turn(seed)
    ) as world:
        tasks = [await world.launch_operator(subtask, function, []) for subtask in range(3)]
        await disturb(world, tasks, chance, function, [])
    demand(results(tasks) == names(DEPTH), "H100: the results are not those of every item once")


async def given_back_history(seed: int) -> None:
    """Batch mode: others take over what a slow task has not begun, beside checkpoints and a copy of it (H100)."""
    chance = random.Random(seed)
    items = chance.randrange(5, 16)
    queue = WorkQueue("items", range(items), in_hand=chance.choice([4, 12]))
    slow_s, looks = chance.choice([0.7, 2.0, 4.0]), chance.random() < 0.3

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        takes_s = 0.1 if context.subtask else slow_s if context.attempt == 0 else slow_s / 3
        pause(context, 0.5 if context.subtask else 0.0)  # so that the slow one has its share
        for item in queue:
            if looks:
                pause(context, takes_s)
            else:
                context.sleep(takes_s)
            yield item

    async with running_operator(parallelism=3, uses=[queue], seed=seed, checkpoint=in_turn(seed)) as world:
        tasks = [await world.launch_operator(subtask, work, []) for subtask in range(3)]
        copy_at = chance.choice([-1, 2, 3, 5])
        for step in range(6):
            if chance.random() < 0.5:
                world.begin_checkpoint()
            await world.advance(chance.choice([0.1, 0.4]))
            if step == copy_at and not tasks[0].outcome:
                tasks.append(await world.launch_operator(0, work, []))
        await until_done(world, tasks)
    demand(results(tasks) == list(range(items)), "H100: the results are not those of every item once")


async def returned_early_history(seed: int) -> None:
    """Batch mode: functions return before the work ends, beside kills and copies that return elsewhere (H100)."""
    chance = random.Random(seed)
    items = chance.randrange(5, 16)
    queue = WorkQueue("items", range(items), in_hand=chance.choice([1, 2, 5]))
    limits = {(subtask, attempt): chance.randrange(1, 5) for subtask in range(2) for attempt in range(100)}

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        limit = limits.get((context.subtask, context.attempt), items)
        takes_s = 0.1 * spread(f"{context.subtask} {context.attempt}", seed)
        for number, item in enumerate(queue, 1):
            if number % 2:
                pause(context, takes_s)
            else:
                context.sleep(takes_s)
            yield item
            if number == limit:
                return

    async with running_operator(parallelism=3, uses=[queue], seed=seed, attempts_max=100) as world:
        tasks = [await world.launch_operator(subtask, work, []) for subtask in range(3)]
        await disturb(world, tasks, chance, work, [])
    demand(results(tasks) == list(range(items)), "H100: the results are not those of every item once")


class Crawler(SubtaskOperator):
    """Its state is its results, as of an operator that commits them with checkpoints."""

    def __init__(self, queue: WorkQueue[Any], seed: int, depth: int = DEPTH) -> None:
        self.queue = queue
        self.seed = seed
        self.depth = depth

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.done: list[Any] = json.loads(state) if state else []

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return json.dumps([item for state in states.values() for item in json.loads(state)]).encode()

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for item in self.queue:
            for _ in range(spread(item, self.seed)):
                pause(self.context, 0.1)
            if len(item) < self.depth:
                self.queue.add([item + "a", item + "b"])
            self.done.append(item)
        yield from self.done

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return json.dumps(self.done).encode()


class Taker(Crawler):
    """Does up to ``limit`` items in one life, and adds none."""

    def __init__(self, queue: WorkQueue[int], limit: int, seed: int) -> None:
        super().__init__(queue, seed)
        self.limit = limit

    def process(self, records: Iterator[Any]) -> Iterator[int]:
        for number, item in enumerate(self.queue, 1):
            pause(self.context, 0.1 * spread(item, self.seed))
            self.done.append(item)
            if number == self.limit:
                break
        yield from self.done


async def returned_early_in_streaming_history(seed: int) -> None:
    """Functions return before the work ends, beside kills and checkpoints: nobody waits without end (H100)."""
    chance = random.Random(seed)
    items, in_hand = chance.randrange(5, 16), chance.choice([1, 2, 5])
    queue = WorkQueue("items", range(items), in_hand=in_hand)

    async def launch(subtask: int) -> OperatorTask:
        limit = items if subtask == 2 else chance.randrange(1, 5)
        return await world.launch_operator(subtask, lambda: Taker(queue, limit, seed), [])

    async with running_operator(
        parallelism=3, mode="streaming", uses=[queue], seed=seed, attempts_max=100, checkpoint=in_turn(seed)
    ) as world:
        tasks = [await launch(subtask) for subtask in range(3)]
        for _ in range(chance.randrange(3, 15)):
            if chance.random() < 0.4:
                world.begin_checkpoint()
            await world.advance(chance.choice([0.0, 0.1, 0.3]))
            running = [task for task in tasks if not task.outcome]
            if world.failures or not running:
                break
            if chance.random() < 0.4:
                victim = chance.choice(running)
                await (world.kill if chance.random() < 0.5 else world.lose_executor)(victim)
                tasks.append(await launch(victim.attempt.subtask))
        await until_done(world, tasks, or_failed=True)
        if world.failures:
            text = f"H100: with {in_hand} in hand, the job fails: {world.failures}"
            demand(in_hand > 1 and "returned in subtask" in str(world.failures), text)
            return
    demand(results(tasks) == list(range(items)), f"H100: the results are not those of every item once: {tasks}")


class Counting(SubtaskOperator):
    """Counts each record once in its life: its state is how far it is."""

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.done = int(state or b"0")

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return b"0"

    def process(self, records: Iterator[int]) -> Iterator[int]:
        for record in records:
            if record < self.done:
                continue
            self.done = record + 1
            self.context.count("records")
            self.context.count("sum", record)
            self.context.observe("value", record)
            pause(self.context, 0.3)
        yield self.done

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"%d" % self.done


def judge_counts(world: World, tasks: list[OperatorTask]) -> None:
    """The sums are those of every record of three subtasks once (H101)."""
    counters = world.counters()
    value: Any = counters.pop("value")
    short = world.counter_totals()
    expected = {"records": 3 * RECORDS, "sum": 3 * sum(range(RECORDS)), "value": 3 * RECORDS}
    demand(short == expected, f"H101: in short {short}")
    demand(counters == {"records": 3 * RECORDS, "sum": 3 * sum(range(RECORDS))}, f"H101: {counters}")
    demand(value.count == 3 * RECORDS, f"H101: {value.count} values")


def judge_counts_so_far(world: World, tasks: list[OperatorTask]) -> None:
    """No more is counted than what one attempt of each subtask has done."""
    done: dict[int, int] = {}
    for task in tasks:
        operator = getattr(task, "operator", None)
        if task.outcome in ("", "success") and isinstance(operator, Counting) and hasattr(operator, "done"):
            done[task.attempt.subtask] = max(done.get(task.attempt.subtask, 0), operator.done)
    counted: Any = world.counters().get("records", 0)
    demand(counted <= sum(done.values()), f"H101: {counted} counted of {done}")


async def counters_history(seed: int) -> None:
    """Batch mode: lost attempts take their counts back, and of copies one counts (H101)."""
    chance = random.Random(seed)
    async with running_operator(parallelism=3, seed=seed, attempts_max=100, checkpoint=in_turn(seed)) as world:
        tasks = [await world.launch_operator(subtask, Counting, range(RECORDS)) for subtask in range(3)]
        await disturb(world, tasks, chance, Counting, range(RECORDS), judge_counts_so_far)
        judge_counts(world, tasks)


async def permits_history(seed: int) -> None:
    """Never more users than allowed, and the places of the lost come back (H111)."""
    chance = random.Random(seed)
    permits = Permits("db", concurrency=2)
    inside: dict[int, int] = {}  # subtask to attempt
    crowds: list[int] = []
    waits: list[float] = []

    def use(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        if context.subtask > 1 and seed % 2:
            context.sleep(4.0)  # the first two may have an idle place each
        for number in range(5):
            asked_at = context.now()
            with permits:
                waits.append(context.now() - asked_at)
                inside[context.subtask] = context.attempt
                crowds.append(len(inside))
                context.sleep(0.3)
                del inside[context.subtask]
            context.sleep(0.1 * (number % 2))
            yield number
        if context.subtask < 2:
            context.sleep(30.0)

    async with running_operator(
        parallelism=4, uses=[permits], seed=seed, attempts_max=100, checkpoint=in_turn(seed)
    ) as world:
        tasks = [await world.launch_operator(subtask, use, []) for subtask in range(4)]
        for _ in range(6):
            await world.advance(chance.choice([0.1, 0.25, 0.5]))
            running = [task for task in tasks if not task.outcome]
            if not running:
                break
            victim = chance.choice(running)
            inside.pop(victim.attempt.subtask, None)
            await world.kill(victim)
            tasks.append(await world.launch_operator(victim.attempt.subtask, use, []))
        await until_done(world, tasks)
    demand(max(waits) < 10, f"H111: somebody waited for {max(waits)} s")
    demand(max(crowds) <= 2, f"H111: {max(crowds)} inside")
    demand(results(tasks) == sorted([*range(5)] * 4), f"H111: {[task.error for task in tasks]}")
    demand(permits.in_use == 0, "H111: a place is left behind")


async def cache_history(seed: int) -> None:
    """Each value is computed by one at a time, though tasks are lost and give up, and all have the same one (H183)."""
    chance = random.Random(seed)
    computing: dict[str, tuple[tuple[int, int], float]] = {}  # by key: who, and since when
    computed: list[str] = []
    calls: list[str] = []
    answers: dict[str, set[str]] = {}
    lease_s = 600.0 if seed % 2 else 1.0
    cache = Cache("geocode", lease_s=lease_s)

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[str]:
        me = context.subtask, context.attempt

        def make(key: str) -> str:
            who, since = computing.get(key, (me, -lease_s))
            held_s = context.now() - since
            demand(held_s >= lease_s, f"H183: {key} is computed by {who} and {me} at the same time")
            computing[key] = me, context.now()
            calls.append(key)
            fails = spread(f"{key} {len(calls)}", seed) == 0
            context.sleep(0.1 * spread(f"{key} {me}", seed))
            computing.pop(key, None)
            if fails:
                raise ValueError(key)
            computed.append(key)
            return f"{key} of {me}"

        for number in range(8):
            key = f"key {spread(f'{number} {context.subtask}', seed)}"
            while True:
                try:
                    answer = cache.get(key, partial(make, key), timeout_s=chance_s(key, context))
                except (TimedOut, ValueError):
                    context.sleep(0.01)
                else:
                    answers.setdefault(key, set()).add(answer)
                    break
            yield key

    def chance_s(key: str, context: SubtaskContext) -> float:
        return (0.05, 60.0, 60.0, 60.0)[spread(f"{key} {context.now()} {context.subtask}", seed)]

    async with running_operator(
        parallelism=4, uses=[cache], seed=seed, attempts_max=100, checkpoint=in_turn(seed)
    ) as world:
        tasks = [await world.launch_operator(subtask, work, []) for subtask in range(4)]
        for _ in range(6):
            await world.advance(chance.choice([0.0, 0.05, 0.1, 0.25]))
            running = [task for task in tasks if not task.outcome]
            if not running:
                break
            victim = chance.choice(running)
            lost = victim.attempt.subtask, victim.attempt.attempt
            for key in [key for key, (who, _) in computing.items() if who == lost]:
                del computing[key]
            await world.kill(victim)
            tasks.append(await world.launch_operator(victim.attempt.subtask, work, []))
        await until_done(world, tasks)
        cache._desk.book.check_invariants()
    demand(all(len(found) == 1 for found in answers.values()), f"H183: a value was replaced: {answers}")
    demand(lease_s < 600.0 or len(computed) <= 4 + 6, f"H183: {computed} were computed, and four values are needed")
    demand(len(results(tasks)) == 4 * 8, f"H183: {[task.error for task in tasks]}")
    figures = cache.figures()
    demand(figures["computing"] == figures["waiting"] == 0, f"H183: somebody is left behind: {figures}")


async def given_up_history(seed: int) -> None:
    """After all who asked for permits have given up or died, a patient task is served within its time (H176)."""
    chance = random.Random(seed)
    per_s, concurrency = chance.choice([(1.0, None), (20.0, None), (None, 1), (1.0, 1), (200.0, 2)])
    permits = Permits("api", per_s=per_s, burst=chance.choice([1, 1, 3]), concurrency=concurrency)
    stop_at = 3.0
    served: list[float] = []

    def impatient(context: SubtaskContext, records: Iterator[Any]) -> None:
        while context.now() - begun < stop_at:
            try:
                permits.acquire(timeout_s=0.01 + 0.1 * spread(f"{context.subtask} {context.now()}", seed))
            except TimedOut:
                context.sleep(0.02)
            else:
                context.sleep(0.01 + 0.1 * spread(context.subtask, seed))
                permits.release()

    def greedy(context: SubtaskContext, records: Iterator[Any]) -> None:
        for _ in range(100):
            permits.acquire()  # it never releases, until it is killed
            context.sleep(0.05)

    def patient(context: SubtaskContext, records: Iterator[Any]) -> None:
        context.sleep(stop_at + 1.0)
        asked_at = context.now()
        permits.acquire(timeout_s=1.0 / (per_s or 1.0) + 0.01)
        served.append(context.now() - asked_at)
        permits.release()

    checkpoint = replace(in_turn(seed), tolerated_failures=100)  # tasks that wait for a place decline them
    async with running_operator(
        parallelism=6, uses=[permits], seed=seed, attempts_max=100, checkpoint=checkpoint
    ) as world:
        begun = world.now
        greedy_ones = [await world.launch_operator(subtask, greedy, []) for subtask in range(2)]
        tasks = [await world.launch_operator(subtask, impatient, []) for subtask in range(2, 5)]
        last = await world.launch_operator(5, patient, [])
        await world.advance(stop_at * chance.random())
        if chance.random() < 0.5:
            world.begin_checkpoint()
        for task in greedy_ones:
            await world.advance(chance.choice([0.0, 0.3]))
            await (world.kill if chance.random() < 0.5 else world.lose_executor)(task)
        await until_done(world, [*tasks, last])
    demand(last.error is None, f"H176: {last.error}")
    demand(len(served) == 1 and permits.in_use == 0, f"H176: {permits.in_use} places are left behind")


async def shared_history(seed: int) -> None:
    """A value is there before the first record and never becomes older; the newest arrives (H110)."""
    chance = random.Random(seed)
    value = SharedValue("value", {f"key {number}": 0 for number in range(50)})

    def read(context: SubtaskContext, records: Iterator[Any]) -> Iterator[tuple[int, int]]:
        for _ in records:
            version, seen = value.version, value.get()
            yield version, sum(seen.values())
            pause(context, 0.1)

    async with running_operator(
        parallelism=2, uses=[value], seed=seed, attempts_max=100, checkpoint=in_turn(seed)
    ) as world:
        tasks = [await world.launch_operator(subtask, read, range(20)) for subtask in range(2)]
        for _ in range(10):
            key = f"key {chance.randrange(50)}"
            value.update(lambda now, key=key: {**now, key: now[key] + 1})  # type: ignore[misc]
            await world.advance(chance.choice([0.0, 0.0, 0.2]))
            victim = chance.choice(tasks)
            if chance.random() < 0.2 and not victim.outcome:
                await world.kill(victim)
                tasks.append(await world.launch_operator(victim.attempt.subtask, read, range(20)))
        await until_done(world, tasks)
    for task in tasks:
        seen = list(task.outputs)
        demand(all(version >= 1 and total == version - 1 for version, total in seen), f"H110: {seen}")
        demand(seen == sorted(seen), f"H110: it becomes older: {seen}")
        demand(task.outcome != "success" or seen[-1][0] == 11, f"H110: the newest is missing: {seen}")


STEPS = 6


def training(group: Group, *, is_new_after_all: bool = False) -> Any:
    """Each step adds up what all members compute from the model so far. Steps, and the end of a task, take a moment.

    ``is_new_after_all``: the training may begin again, in another run or from an earlier checkpoint.
    """
    saved = [0]

    def train(context: SubtaskContext, member: GroupMember) -> int:
        step, model = (0, 1) if member.checkpoint is None else json.loads(member.checkpoint.blob)
        demand(is_new_after_all or step >= max(saved), f"H105: it begins with step {step}, after {max(saved)}")
        while step < STEPS:
            pause(context, 0.1 * (1 + (step + member.rank) % 3))
            model = sum(member.all_gather(model * (member.rank + 1) % 1000003)) % 1000003
            step += 1
            member.save(step, json.dumps([step, model]).encode())
            saved.append(step)
        return int(model)

    def run(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        while True:
            try:
                with group as member:
                    model = train(context, member)
            except PeerLost:
                continue
            pause(context, 1.0 * context.subtask)
            yield model
            return

    return run


def trained(world_size: int) -> int:
    """The model of a training in which nothing happens."""
    model = 1
    for _ in range(STEPS):
        model = sum(model * (rank + 1) % 1000003 for rank in range(world_size)) % 1000003
    return model


async def group_history(seed: int) -> None:
    """The model is that of an undisturbed training, whatever is lost or copied (H102 to H106)."""
    chance = random.Random(seed)
    group = Group("train")
    function = training(group)
    async with running_operator(
        parallelism=3, uses=[group], seed=seed, attempts_max=100, checkpoint=in_turn(seed)
    ) as world:
        tasks = [await world.launch_operator(subtask, function, []) for subtask in range(3)]
        await disturb(world, tasks, chance, function, [])
    demand(results(tasks) == [trained(3)] * 3, f"H104 H105: {tasks}")


async def budget_history(seed: int) -> None:
    """What was really spent is never more than the total, or than the budget knows, however many are lost (H182)."""
    chance = random.Random(seed)
    budget = Budget("usd", 3.0)
    costs: list[float] = []

    def work(context: SubtaskContext, records: Iterator[Any]) -> Iterator[int]:
        for number in range(10):
            kind = spread(f"{number} {context.subtask} {context.attempt}", seed)
            with suppress(TimedOut, BudgetExhausted), budget.reserve(0.2, timeout_s=0.3) as spent:
                costs.append((0.2, 0.1, 0.0, 0.05)[kind])
                context.sleep(0.1 * kind)
                if kind == 1:
                    spent.settle(0.1)
                elif kind == 2:
                    spent.refund()
                elif kind == 3:
                    spent.settle(0.05)
            yield number

    def judge(world: World, tasks: list[OperatorTask]) -> None:
        demand(sum(costs) <= budget.spent + budget.reserved + 1e-9, "H182: more was spent than the budget knows")
        demand(budget.spent + budget.reserved <= budget.total, "H182: more is spent than there is")

    async with running_operator(
        parallelism=3, uses=[budget], seed=seed, attempts_max=100, checkpoint=in_turn(seed)
    ) as world:
        tasks = [await world.launch_operator(subtask, work, []) for subtask in range(3)]
        await disturb(world, tasks, chance, work, [], judge)
        await world.settle()
        judge(world, tasks)
        demand(budget.reserved == 0, "H182: a reservation outlives its attempt")


HISTORIES = (
    budget_history,
    group_history,
    queue_history,
    given_back_history,
    counters_history,
    permits_history,
    given_up_history,
    cache_history,
    shared_history,
    chain_history,
)
