# SPDX-License-Identifier: Apache-2.0

"""What every source must survive, as cases that a test runs one by one.

The last stage of a chain keeps all that has reached it. So each complete checkpoint shows which records it covers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from typing import Any, Literal

from actors.coordination.sources.source import SourceCoordinator
from actors.testing import Candidate
from headgate.testing._bookkeeping import Bookkeeping, KeptOutputs, check_bookkeeping
from headgate.testing._cases import Case, case, some, told
from headgate.testing._operator_task import OperatorTask
from headgate.testing._world import World, running_operator
from protocol.arguments import ANY, checked
from protocol.barrier_tracker import CheckpointConfig, CompletedCheckpoint
from protocol.describing import describe, show
from protocol.errors import HeadgateError, LocalProtocolError
from protocol.parts import split_states
from protocol.source_events import backlog_event, split_request_event
from protocol.wire.codec import decode_event
from spark_bridge.primitives.chain import Chain, chain
from spark_bridge.sources.source import Source
from spark_bridge.subtask.context import SubtaskContext

STAGES = ("source", "kept")
OUTPUT_S = 0.05
"""Virtual seconds that the chain works on an output, so that a history has a middle."""
ROUNDS = 100
"""How many times a source is looked at, half a virtual second apart, until it must have come to its end."""
DAYS = 3


class SourceTarget:
    """A system that a source is tested with: what the test supplies. The server behind it should be a real one.

    Each record has a number, and no two have the same. The suite calls ``clear`` before each history.
    """

    forms: tuple[Literal["bounded", "unbounded"], ...] = ("bounded", "unbounded")
    """The forms that the source has: one that ends, and one that finds what comes after it has begun."""

    def source(self, *, bounded: bool) -> Source:
        """Return the source under test for a new application. It reads the same system each time.

        ``bounded``: it ends after what there is when it begins. Otherwise it does not end; it should look for what is
        new at least once in a (virtual) second.
        """
        raise NotImplementedError

    def write(self, split: int, numbers: Sequence[int]) -> None:
        """Add records with these numbers, none or some, to split number ``split``, which is new if it was not there.

        The target decides what a split is: a file, a stream, a partition. If it has no splits, or divides what it has
        by itself, the number has no meaning.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Empty the system: no records, no splits, and nothing that an earlier application has left."""
        raise NotImplementedError

    def numbers(self, output: Any) -> Iterable[int]:
        """Return the numbers of the records in one output: by default those in the column ``number`` of a batch."""
        found: list[int] = output.column("number").to_pylist()
        return found

    def schema_changes(self) -> Mapping[str, Callable[[], object]]:
        """Return what may happen to the schema while it is read, by name. ``write`` writes in the new one then.

        After each, a source must go on with every record, or refuse with ``ValueError`` or a ``HeadgateError``.
        """
        return {}


@checked(seed=ANY)
def source_cases(*, histories: int = 20, seed: int = 0) -> list[Case[SourceTarget]]:
    """The conformance suite for a source; run each case with its ``SourceTarget``.

    What complete checkpoints cover has every record once, and a later one has what an earlier one had. The cases: no
    split, one, many, empty ones and fewer than tasks; splits and records that come later; trouble at every step (a
    task, an executor or the driver dies, the next application has more tasks or fewer, a job is cancelled, a task
    starts twice, messages are lost and repeated or late, a checkpoint fails or is in doubt); a schema that changes; a
    job that runs every day; and random histories. Each runs with the bounded source and, if there is one, the other.

    Args:
        histories: how many histories a case tries at most. With a large number, every step has its own.
        seed: for the choice of steps and the random histories. A failure names what it tried.
    """
    return [
        *(case(name, splits, *layout) for name, layout in LAYOUTS.items()),
        case("splits and records come later", later),
        *(case(f"{name}, at any step", a_trouble, trouble, histories, seed) for name, trouble in TROUBLES.items()),
        case("the schema changes", changed_schemas),
        case("a job runs every day", days, seed),
        *(
            case(f"random histories in {mode} mode", random_histories, mode, histories, seed)
            for mode in ("streaming", "batch")
        ),
    ]


class Covered(KeptOutputs):
    """Keeps the number of each record, and gives other things the time to happen."""

    def __init__(self, target: SourceTarget) -> None:
        self._target = target

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        super().open(context, state)
        self._context = context

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for output in records:
            self._outputs += self._target.numbers(output)
            self._context.sleep(OUTPUT_S)
        yield from self._outputs


def covered_by(checkpoint: CompletedCheckpoint | None) -> Counter[Any]:
    """The numbers of the records that a checkpoint covers."""
    found: Counter[Any] = Counter()
    for snapshot in {} if checkpoint is None else checkpoint.subtask_states.values():
        for state in snapshot.states:
            _, parts = split_states(state.state, (*STAGES, "headgate.counters"))
            found.update(decode_event(parts["kept"]) if parts.get("kept") else [])
    return found


def stages_of(target: SourceTarget, source: Source, coordinator: SourceCoordinator) -> Chain:
    return chain(source=(coordinator, source.operator), kept=partial(Covered, target))


class Interrupted(Exception):
    """The step of a history has come at which there is trouble."""


class Life:
    """Consecutive applications with one source on one system."""

    def __init__(self, target: SourceTarget, *, bounded: bool = True, parallelism: int = 2, seed: int = 0) -> None:
        target.clear()
        self.target, self.bounded, self.parallelism = target, bounded, parallelism
        self.expected: Counter[Any] = Counter()
        self.newest: CompletedCheckpoint | None = None
        self.input_id: str | None = "all of it"
        self.steps = 0
        """How many messages were delivered."""
        self.trouble_at: int | None = None
        self.world: World
        self.coordinator: SourceCoordinator
        self.tasks: list[OperatorTask] = []
        self.victims: list[OperatorTask] = []
        self._dice = random.Random(seed)
        self._numbers = count()
        self._application = AsyncExitStack()

    async def __aenter__(self) -> Life:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """The driver dies."""
        await self._application.aclose()

    def write(self, split: int, how_many: int) -> None:
        numbers = [next(self._numbers) for _ in range(how_many)]
        self.target.write(split, numbers)
        self.expected.update(numbers)

    async def boot(self, parallelism: int | None = None) -> None:
        """Start a driver, and everything else with it, from the newest checkpoint."""
        await self.leave()
        self.parallelism = parallelism or self.parallelism
        source = self.target.source(bounded=self.bounded)
        self.coordinator = source.coordinator
        steps, self.steps = self.steps, -(1 << 60)  # its start is one step
        self.world = await self._application.enter_async_context(
            running_operator(
                stages_of(self.target, source, self.coordinator),
                parallelism=self.parallelism,
                mode="streaming",
                checkpoint=CheckpointConfig(tolerated_failures=1000),
                restored=self.newest,
                attempts_max=1000,
                schedule=self._choose,
            )
        )
        self.world.input_id = self.input_id
        self.steps = steps
        self.tasks, self.victims = [], []

    def _choose(self, candidates: Sequence[Candidate]) -> int:
        self.steps += 1
        if self.steps == self.trouble_at:
            raise Interrupted
        return self._dice.randrange(len(candidates))

    async def pass_time(self, seconds: float) -> None:
        """Let tasks run in all that have none, and time pass."""
        for subtask in range(self.parallelism):
            if all(task.attempt.subtask != subtask or task.outcome not in ("", "success") for task in self.tasks):
                await self.launch(subtask)
        await self.world.advance(seconds)
        self.check()

    async def launch(self, subtask: int) -> None:
        self.tasks.append(await self.world.launch_operator(subtask))

    @property
    def running(self) -> list[OperatorTask]:
        return [task for task in self.tasks if not task.outcome]

    async def play(self, trouble: Trouble | None = None) -> None:
        """One life with checkpoints, and what comes later if the source finds that, to its end."""
        for split in range(3):
            self.write(split, 4)
        await self.boot()
        for step in SCRIPT:
            try:
                await step(self)
            except Interrupted:
                assert trouble is not None
                await trouble(self)
        await self.end()

    async def end(self) -> None:
        """Let nothing happen any more, until all is read."""
        self.trouble_at = None
        for _ in range(ROUNDS):
            await self.pass_time(0.5)
            if self.bounded and not self.running:
                break
            self.world.begin_checkpoint()
            await self.pass_time(0.2)
            if not self.bounded and covered_by(self.newest) == self.expected:
                break
        await self.world.advance(2.0)  # the final checkpoint
        self.check()
        missing = self.expected - covered_by(self.newest)
        assert not missing, f"records are lost: {show(sorted(missing.elements()))}"
        assert not (self.bounded and self.running), f"the source does not end: {self.tasks}"

    def check(self) -> None:
        """What each new checkpoint covers is right, and nothing has failed by itself."""
        for checkpoint in self.world.checkpoints:
            if self.newest is None or checkpoint.checkpoint_id > self.newest.checkpoint_id:
                before, now = covered_by(self.newest), covered_by(checkpoint)
                self.newest = checkpoint
                strange = [one for one in now if one not in self.expected]
                assert not strange, f"there are other records: {show(strange)}"
                doubled = now - self.expected
                assert not doubled, f"records are doubled: {show(sorted(doubled.elements()))}"
                lost = before - now
                assert not lost, f"records are gone that an earlier checkpoint covered: {show(sorted(lost.elements()))}"
        for failure in self.world.failures:
            raise AssertionError(f"the coordinator has failed the job: {describe(failure)}") from failure
        for task in self.tasks:
            if task.outcome == "failed" and task not in self.victims:
                raise AssertionError(f"{task} has failed: {task.error and describe(task.error)}") from task.error


Step = Callable[[Life], Awaitable[None]]
Trouble = Step

LAYOUTS: dict[str, tuple[int, list[int]]] = {
    "no split": (2, []),
    "one split": (2, [7]),
    "many splits": (2, [3] * 9),
    "more tasks than splits": (3, [4, 4]),
    "empty splits": (2, [0, 3, 0]),
}
"""How many tasks, and how many records each split has."""


def _passing(seconds: float) -> Step:
    return lambda life: life.pass_time(seconds)


async def _checkpoint(life: Life) -> None:
    life.world.begin_checkpoint()


async def _more(life: Life) -> None:
    if not life.bounded:
        life.write(1, 3)
        life.write(3, 3)


SCRIPT: list[Step] = [
    _passing(0.12),
    _checkpoint,
    _passing(0.1),
    _more,
    _passing(0.3),
    _checkpoint,
    _passing(1.0),
    _checkpoint,
    _passing(0.2),
]


async def _a_task_dies(life: Life) -> None:
    if life.running:
        life.victims.append(life.running[0])
        await life.world.kill(life.running[0])


async def _an_executor_is_lost(life: Life) -> None:
    if life.running:
        life.victims.append(life.running[-1])
        await life.world.lose_executor(life.running[-1])


async def _a_task_starts_twice(life: Life) -> None:
    """The later attempt takes over."""
    if life.running:
        life.victims.append(life.running[0])
        await life.launch(life.running[0].attempt.subtask)


async def _the_job_is_cancelled(life: Life) -> None:
    """The next run continues with the same input."""
    life.victims += life.running
    await life.world.cancel_job()
    life.tasks = []


async def _messages_are_lost_and_repeated(life: Life) -> None:
    for task in life.running:
        try:
            await life.world.break_connection(task)
            await life.world.advance(0.2)
            await life.world.restore_connection(task)
        except LocalProtocolError:
            pass  # it has no connection yet, or not any more


async def _messages_are_late(life: Life) -> None:
    for task in life.running:
        task.silent = True
    await life.world.advance(0.3)
    for task in life.running:
        task.silent = False


async def _a_checkpoint_fails(life: Life) -> None:
    """Only one: the last one of a run is repeated immediately."""
    world, before = life.world, life.world.statistics.checkpoints_aborted
    world.storage_error = OSError("the storage is full")
    world.begin_checkpoint()
    while world.statistics.checkpoints_aborted == before and await world.kit.step():
        pass
    world.storage_error = None


async def _a_checkpoint_is_in_doubt(life: Life) -> None:
    """It was written, its coordinator is told that it failed, and the next driver starts from it."""
    life.world.storage_in_doubt = True
    await _a_checkpoint_fails(life)
    if life.world.in_doubt:
        life.newest = life.world.in_doubt[-1]
    await life.boot()


TROUBLES: dict[str, Trouble] = {
    "a task dies": _a_task_dies,
    "an executor is lost": _an_executor_is_lost,
    "a task starts twice": _a_task_starts_twice,
    "the job is cancelled": _the_job_is_cancelled,
    "messages are lost and repeated": _messages_are_lost_and_repeated,
    "messages are late": _messages_are_late,
    "a checkpoint fails": _a_checkpoint_fails,
    "a checkpoint is in doubt": _a_checkpoint_is_in_doubt,
    "the driver dies": lambda life: life.boot(),
    "the driver dies, and there are more tasks": lambda life: life.boot(life.parallelism + 2),
    "the driver dies, and there are fewer tasks": lambda life: life.boot(1),
}


def forms_of(target: SourceTarget) -> list[bool]:
    """Whether the source is bounded, in each form that it has."""
    return [form == "bounded" for form in target.forms]


async def splits(target: SourceTarget, parallelism: int, layout: list[int]) -> None:
    for bounded in forms_of(target):
        async with Life(target, bounded=bounded, parallelism=parallelism) as life:
            for split, how_many in enumerate(layout):
                life.write(split, how_many)
            await life.boot()
            await life.end()
            await life.boot()  # an application that has nothing left to read
            await life.end()


async def later(target: SourceTarget) -> None:
    """The first split comes after the source has begun; then more of them, and more records, also between drivers."""
    if "unbounded" in target.forms:
        async with Life(target, bounded=False) as life:
            await life.boot()
            for number in range(4):
                await life.pass_time(0.4)
                life.write(number, 3)
                life.write(0, 2)
                await life.end()
                if number % 2:
                    await life.leave()
                    life.write(10 + number, 2)
                    await life.boot()
            await life.end()


async def a_trouble(target: SourceTarget, trouble: Trouble, histories: int, seed: int) -> None:
    for bounded in forms_of(target):
        async with Life(target, bounded=bounded) as quiet:
            await quiet.play()
        for moment in some(range(1, quiet.steps), histories, seed):
            with told(f"there was trouble at step {moment} of the {'' if bounded else 'un'}bounded source"):
                async with Life(target, bounded=bounded) as life:
                    life.trouble_at = moment
                    await life.play(trouble)


async def changed_schemas(target: SourceTarget) -> None:
    """While it is read, and between two drivers: the source goes on with every record, or refuses."""
    for name in target.schema_changes():
        for bounded in forms_of(target):
            for dies in (False, True):
                with told(f"{name}, {'between two drivers' if dies else 'while it is read'}"):
                    async with Life(target, bounded=bounded) as life:
                        await _changed_schema(life, name, dies)


async def _changed_schema(life: Life, name: str, dies: bool) -> None:
    for split in range(3):
        life.write(split, 4)
    await life.boot()
    await life.pass_time(0.12)
    life.world.begin_checkpoint()
    await life.pass_time(0.1)
    if dies:
        await life.leave()
    life.target.schema_changes()[name]()
    await _more(life)
    try:
        if dies:
            await life.boot()
        await life.end()
    except AssertionError as failure:
        if not isinstance(failure.__cause__, (ValueError, HeadgateError)):
            raise
    except (ValueError, HeadgateError):
        pass  # the coordinator does not start


async def days(target: SourceTarget, seed: int) -> None:
    """Each day has its input, of which the source reads all, or what is new; an interrupted day continues."""
    for number in range(seed, seed + 2 if "bounded" in target.forms else seed):
        chance = random.Random(number)
        with told(f"the days of history {number}"):
            async with Life(target) as life:
                for day in range(DAYS):
                    await _a_day(life, day, chance)


async def _a_day(life: Life, day: int, chance: random.Random) -> None:
    life.input_id = f"day {day}"
    so_far = set(life.expected)
    life.write(0, 2)
    life.write(day + 1, 3)
    await life.boot()
    if not life.coordinator.enumerator.continues_with_other_input:
        life.expected.update(so_far)
    for _ in range(chance.randrange(3)):
        await life.pass_time(chance.choice([0.1, 0.3]))
        life.world.begin_checkpoint()
        await life.pass_time(chance.choice([0.0, 0.1]))
        await life.boot(chance.choice([1, 2, 3]))
    await life.end()


async def random_histories(target: SourceTarget, mode: Any, histories: int, seed: int) -> None:
    if "bounded" not in target.forms:
        return
    target.clear()
    for split in range(5):
        target.write(split, range(4 * split, 4 * split + 4))

    def make() -> Bookkeeping:
        source = target.source(bounded=True)
        coordinator = source.coordinator
        goes_on = mode == "streaming" and source.enumerator(None).continues_with_other_input
        return Bookkeeping(
            stages_of(target, source, coordinator),
            expected=range(20),
            expected_later=[] if goes_on else None,
            held=[("source", split_request_event()), ("source", backlog_event([("a split", 5)]))],
            view=lambda subtask: (coordinator.assigned_splits(subtask), coordinator.has_no_more_splits(subtask)),
        )

    await check_bookkeeping(make, mode=mode, histories=histories, seed=seed)
