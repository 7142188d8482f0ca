# SPDX-License-Identifier: Apache-2.0

"""Random histories of chains, from a source to a sink, and what must hold at their end. The seed decides everything."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from actors.coordination import OperatorCoordinator, SourceCoordinator, StaticSplitEnumerator, SubtaskGateway
from actors.coordination.sources.enumerators import HybridSplitEnumerator
from actors.coordination.statistics import OperatorStatistics
from headgate import CheckpointConfig, FailureReason, SplitReader, SubtaskContext, SubtaskOperator, chain
from headgate.testing import OperatorTask, World, running_operator
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.parts import split_states
from protocol.wire.codec import decode_event, encode_event
from spark_bridge.sources.hybrid import HybridReader
from tests.simulation.checkers import demand

SPLITS = 9
ROWS = 7
INCARNATIONS = 6


class Numbers(SplitReader):
    """Reads a split ``[start, end]``: the numbers in between, each with the position after it."""

    def __init__(self, limit_per_s: float | None = None) -> None:
        self.rate_limit_per_s = limit_per_s

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any]]:
        start, end = split
        for number in range(start if position is None else position, end):
            yield number + 1, number

    def backlog(self, split: Any, position: Any) -> int:
        start, end = split
        return int(end - (start if position is None else position))


class Calls:
    """The calls that reach the last two stages, on the driver and in the tasks: the same ones, in the fixed order."""

    def __init__(self) -> None:
        self.driver: list[tuple[Any, ...]] = []
        self.tasks: dict[tuple[int, int], dict[str, list[tuple[Any, ...]]]] = {}
        self._half: tuple[Any, ...] | None = None  # the second stage has got it, and the third has not yet

    def on_driver(self, stage: str, *call: Any) -> None:
        if stage == "double":
            demand(self._half is None, f"H80: the sink's coordinator does not get {self._half}")
            self._half = call
        else:
            demand(
                self._half == call, f"H80: the sink's coordinator gets {call} after {self._half} of the second stage"
            )
            self._half = None
            self.driver.append(call)

    def in_task(self, stage: str, context: SubtaskContext, *call: Any) -> None:
        of_task = self.tasks.setdefault((context.subtask, context.attempt), {"double": [], "sink": []})
        of_task[stage].append(call)
        if call == ("close",) and stage == "double":
            demand(of_task["sink"][-1:] == [call], "H80: the second stage is closed before the sink")

    def judge(self, statistics: OperatorStatistics) -> None:
        """What has happened in an application reached both stages. Some of it may be on its way when a driver dies."""
        demand(self._half is None, f"H80: the sink's coordinator does not get {self._half}")
        for name, count in (
            ("complete", statistics.checkpoints_completed),
            ("aborted", statistics.checkpoints_aborted),
            ("failed", statistics.failures),
            ("finished", statistics.finished),
            ("run ended", statistics.runs),
        ):
            told = sum(call[0] == name for call in self.driver)
            demand(told == count, f"H80: the stages are told {told} times of {count}: {name}")
        for task, calls in self.tasks.items():
            demand(calls["double"] == calls["sink"], f"H80: the stages of {task} get different calls: {calls}")


class Doubling(SubtaskOperator):
    """Two outputs for each number, and an event to its coordinator between them; its state is how many it has taken."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.calls.in_task("double", self.context, "complete", checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.calls.in_task("double", self.context, "aborted", checkpoint_id)

    def close(self) -> None:
        self.calls.in_task("double", self.context, "close")

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.taken = int(state or b"0")

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for number in records:
            self.taken += 1
            if number % 9 == 4:
                answer = self.context.request(number)
                demand(answer == ["double", number], f"H80: the second stage asks for {number} and gets {answer!r}")
            yield [number, "a"]
            self.context.send_event(number)
            yield [number, "b"]

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return b"%d" % sum(map(int, states.values()))

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return b"%d" % self.taken


class Keeping(SubtaskOperator):
    """The sink: its state is all rows that have reached it, and how many events of its coordinator."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.calls.in_task("sink", self.context, "complete", checkpoint_id)

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.calls.in_task("sink", self.context, "aborted", checkpoint_id)

    def close(self) -> None:
        self.calls.in_task("sink", self.context, "close")

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.rows, self.greetings = decode_event(state) if state else ([], 0)

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        parts = [decode_event(state) for state in states.values()]
        return encode_event([[row for rows, _ in parts for row in rows], sum(count for _, count in parts)])

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for row in records:
            self.rows.append(row)
            if row[0] % 5 == 0:
                self.context.sleep(0.02)  # a barrier comes meanwhile, and waits
            elif row[0] % 5 == 1:
                self.context.wait_for_event(timeout_s=0.02)  # the checkpoint is declined if it would cut a record
            yield from ()

    def handle_event(self, event: Any) -> None:
        demand(event == "for the sink", f"H80: the sink gets {event!r}")
        self.greetings += 1

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return encode_event([self.rows, self.greetings])


class Told(OperatorCoordinator):
    """A stage's coordinator that notes the calls that concern all stages."""

    stage = ""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    async def subtask_suspected(self, subtask: int, attempt: int, reason: str) -> None:
        self.calls.on_driver(self.stage, "suspected", subtask, attempt)

    async def subtask_responsive(self, subtask: int, attempt: int) -> None:
        self.calls.on_driver(self.stage, "responsive", subtask, attempt)

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self.calls.on_driver(self.stage, "failed", subtask, attempt)

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        self.calls.on_driver(self.stage, "finished", subtask, attempt)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self.calls.on_driver(self.stage, "reset", subtask, checkpoint_id)

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self.calls.on_driver(self.stage, "complete", checkpoint_id)

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.calls.on_driver(self.stage, "aborted", checkpoint_id)

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        self.calls.on_driver(self.stage, "discarded", checkpoint_id)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self.calls.on_driver(self.stage, "run ended", run_id, succeeded)


class Greeting(Told):
    """The sink's coordinator. It must see each failure and each reset, and gets no event and no request."""

    stage = "sink"

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self.alive: dict[int, set[int]] = {}
        self.lost: set[int] = set()

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        demand(False, f"H80: the sink's coordinator gets {event!r}")

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        demand(False, f"H80: the sink's coordinator is asked {request!r}")

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        demand(subtask not in self.lost, f"H80: the sink's coordinator is not notified of the reset of {subtask}")
        self.alive.setdefault(subtask, set()).add(gateway.attempt.attempt)
        await gateway.send_event("for the sink")

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        await super().subtask_failed(subtask, attempt, reason)
        alive = self.alive.get(subtask, set())
        alive.discard(attempt)
        if not alive:
            self.lost.add(subtask)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        await super().subtask_reset(subtask, checkpoint_id)
        demand(not self.alive.get(subtask), f"H80: the sink's coordinator was not told that {subtask} has failed")
        self.lost.discard(subtask)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        demand(state in (None, b"sink"), f"H80: the sink's coordinator gets the state {state!r}")
        self.alive.clear()
        self.lost.clear()

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        await super().run_ended(run_id, succeeded, reason)
        self.alive.clear()
        self.lost.clear()

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b"sink"


class Counting(Told):
    """The coordinator of ``Doubling``: knows every number that was doubled. One may come again after a reset."""

    stage = "double"

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self.numbers: set[int] = set()

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        demand(type(event) is int, f"H80: the coordinator of the second stage gets {event!r}")
        self.numbers.add(event)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return ["double", request]

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self.numbers = set() if state is None else set(decode_event(state))

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return encode_event(sorted(self.numbers))


def ranges(first: int = 0) -> list[list[int]]:
    return [[first + split * ROWS, first + (split + 1) * ROWS] for split in range(SPLITS)]


def simple_source() -> Any:
    return SourceCoordinator(lambda state: StaticSplitEnumerator(ranges(), state)), lambda: Numbers(20.0)


def hybrid_source() -> Any:
    """The second half of the numbers is a separate source, which begins after the first."""
    half = SPLITS // 2

    def first(state: bytes | None, previous: Any) -> StaticSplitEnumerator:
        return StaticSplitEnumerator(ranges()[:half], state)

    def second(state: bytes | None, previous: Any) -> StaticSplitEnumerator:
        return StaticSplitEnumerator(ranges()[half:], state)

    def reader() -> HybridReader:
        return HybridReader([partial(Numbers, 20.0), partial(Numbers, 20.0)])

    return SourceCoordinator(lambda state: HybridSplitEnumerator([first, second], state)), reader


async def disturb(world: World, chance: random.Random, *, calm: bool) -> bool:
    """Let a run go on for a while. True if it has ended well; otherwise its driver dies."""
    tasks = [await world.launch_operator(subtask) for subtask in range(world.parallelism)]
    for _ in range(0 if calm else chance.randrange(1, 12)):
        await world.advance(chance.choice([0.0, 0.2, 0.7]))
        running = [task for task in tasks if not task.outcome]
        if not running:
            return True
        victim = chance.choice(running)
        match chance.choice(["checkpoint", "checkpoint", "kill", "kill", "lose", "copy", "time"]):
            case "checkpoint":
                world.begin_checkpoint()
            case "copy":
                tasks.append(await world.launch_operator(victim.attempt.subtask))
            case "kill" | "lose" as how:
                await (world.kill if how == "kill" else world.lose_executor)(victim)
                await relaunch(world, tasks, victim)
    return await until_over(world, tasks) if calm or chance.random() < 0.5 else False


async def relaunch(world: World, tasks: list[OperatorTask], victim: OperatorTask) -> None:
    subtask = victim.attempt.subtask
    if not any(task.attempt.subtask == subtask and task.outcome in ("", "success") for task in tasks):
        tasks.append(await world.launch_operator(subtask))


async def until_over(world: World, tasks: list[OperatorTask]) -> bool:
    for _ in range(500):
        for task in tasks:
            if task.outcome == "failed" and isinstance(task.error, Exception):
                raise task.error
        if all(task.outcome for task in tasks):
            return True
        await world.advance(0.5)
    demand(False, f"H80: the chain does not end: {tasks}")
    return False


async def chain_history(seed: int) -> None:
    """Streaming mode, with a new driver now and then: each number counts once in every stage (H80)."""
    chance = random.Random(seed)
    make_source = chance.choice([simple_source, hybrid_source])
    restored: CompletedCheckpoint | None = None
    for incarnation in range(INCARNATIONS):
        parallelism = chance.choice([1, 2, 3])
        calls = Calls()
        stages = chain(
            source=make_source(),
            double=(Counting(calls), partial(Doubling, calls)),
            sink=(Greeting(calls), partial(Keeping, calls)),
        )
        last = incarnation == INCARNATIONS - 1
        async with running_operator(
            stages,
            parallelism=parallelism,
            mode="streaming",
            checkpoint=CheckpointConfig(tolerated_failures=1000),
            restored=restored,
            attempts_max=1000,
            seed=seed,
        ) as world:
            over = await disturb(world, chance, calm=last)
            await world.advance(1.0)
            demand(not world.failures, f"H80: the job fails: {world.failures}")
            calls.judge(world.statistics)
            restored = world.checkpoints[-1] if world.checkpoints else restored
        if over:
            break
    assert restored is not None, "there is no final checkpoint"
    judge(restored)


def judge(checkpoint: CompletedCheckpoint) -> None:
    """The final checkpoint has each number once, in all three stages."""
    known = {"source", "double", "sink", "headgate.counters"}
    rows: list[Any] = []
    taken = 0
    for snapshot in checkpoint.subtask_states.values():
        for _, state, *_ in snapshot.states:
            _, parts = split_states(state, known)
            rows += decode_event(parts["sink"])[0]
            taken += int(parts["double"])
    numbers = range(SPLITS * ROWS)
    expected = sorted([number, letter] for number in numbers for letter in "ab")
    demand(sorted(rows) == expected, f"exactly once: {len(rows)} rows instead of {len(expected)}")
    demand(taken == len(numbers), f"exactly once: the second stage has taken {taken} numbers")
    _, coordinators = split_states(checkpoint.coordinator_state, known)
    counted = sorted(decode_event(coordinators["double"]))
    demand(counted == list(numbers), f"exactly once: {len(counted)} events, of {len(set(counted))} numbers")
