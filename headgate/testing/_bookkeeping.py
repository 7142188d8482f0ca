# SPDX-License-Identifier: Apache-2.0

"""Random histories of an operator: what its coordinator knows must return with its tasks, and nothing may be lost.

A history is data: applications one after the other, each restored from the last checkpoint of the one before it, with
another number of subtasks, and steps in each. So it can be played again, and without some of its steps: that is how the
shortest one is found. A step that does not fit where it comes, such as a kill when nothing runs, does nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from actors.coordination.host.given import GivenCoordinator
from actors.coordination.interface import OperatorCoordinator
from headgate.testing._operator_task import OperatorTask
from headgate.testing._world import World, running_operator
from protocol.arguments import ANY, AT_LEAST_1, check_fields, checked
from protocol.barrier_tracker import CheckpointConfig, CompletedCheckpoint, SubtaskSnapshot
from protocol.describing import describe, show
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import HeldEvent, SubtaskState
from spark_bridge.primitives.chain import Chain
from spark_bridge.primitives.primitive import USES, Primitive
from spark_bridge.subtask.context import SubtaskContext
from spark_bridge.subtask.operator import SubtaskOperator

SHRINKS_MAX = 150
"""How many shorter histories are tried after a failure."""
TOLERATED = 40
"""Checkpoints that may fail in a row: more than the steps of a history make. The last one of a run is repeated."""
STORAGE_ERROR = "the storage is full"
END_AFTER_S = 400.0
"""Virtual seconds without a disturbance, after which a run must have ended."""


class KeptOutputs(SubtaskOperator):
    """A last stage for chains that are tested: its state is all that has reached it, which it yields at its end.

    So the tasks that succeed in the end yield what the whole chain has done in all its life, each as often as it
    counts: ``chain(source=source, kept=KeptOutputs)``.
    """

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._outputs: list[Any] = decode_event(state) if state else []

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        for record in records:
            self._outputs.append(record)
        yield from self._outputs

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return encode_event(self._outputs)

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return encode_event([output for state in states.values() for output in decode_event(state)])


@dataclass(frozen=True)
class Bookkeeping:
    """An operator that ``check_bookkeeping`` tests, for one application.

    Attributes:
        coordinator: what ``Sidecar.coordinate`` takes: a coordinator, or a chain with all its stages.
        operator: what the tasks run: the class of a ``SubtaskOperator``, or a function. None for a chain.
        uses: the ready-made parts.
        records: what each task is given, the same for all.
        expected: what the tasks that succeed yield, all together, in any order. In streaming mode, each yields at its
            end what it has done in all its life, also in earlier runs: end a chain with ``KeptOutputs``. None for
            anything.
        expected_later: what each later run, which has other input, adds to that. By default it is ``expected`` again.
        held: events that a restored checkpoint may hold in addition, from each subtask of before, each with the name of
            its part or stage (empty for the operator itself). They are questions, which a restored task asks again:
            give one of each kind.
        held_requests: the same for requests.
        view: what the coordinator knows of a subtask. After a reset of the subtask this must equal what the coordinator
            of a new application knows that was restored from the same checkpoint. None: nothing is compared.
        judge: is called with the world and these outputs at the end of each run; raise ``AssertionError`` in it.
    """

    coordinator: GivenCoordinator | Chain = OperatorCoordinator
    operator: Callable[..., SubtaskOperator | Iterable[Any] | None] | None = None
    uses: Collection[Primitive] = ()
    records: Iterable[Any] | None = ()
    expected: Iterable[Any] | None = None
    expected_later: Iterable[Any] | None = None
    held: Collection[tuple[str, Any]] = ()
    held_requests: Collection[tuple[str, Any]] = ()
    view: Callable[[int], Any] | None = None
    judge: Callable[[World, list[Any]], None] | None = None

    def __post_init__(self) -> None:
        check_fields(self, uses=USES)


class _Step(NamedTuple):
    what: str
    who: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.what}{f' {self.who}' if self.what in _AIMED else ''}, then {self.seconds:g} s"


class _Application(NamedTuple):
    parallelism: int
    steps: tuple[_Step, ...]
    asked: bool = False
    """Whether the checkpoint that it begins with holds questions in addition."""

    def __str__(self) -> str:
        asked = ", restored with questions" if self.asked else ""
        return "\n".join([f"{self.parallelism} subtasks{asked}", *(f"    {step}" for step in self.steps)])


@dataclass(frozen=True)
class _History:
    seed: int
    slots: int
    runs: int
    applications: tuple[_Application, ...]

    def __str__(self) -> str:
        parts = [f"  application {number}: {one}" for number, one in enumerate(self.applications)]
        return "\n".join([f"  {self.slots} slots, {self.runs} runs", *parts])

    def shorter(self) -> Iterator[_History]:
        """This history without a part of it, the largest parts first."""
        for number in range(len(self.applications) - 1):
            yield replace(self, applications=self.applications[:number] + self.applications[number + 1 :])
        if self.runs > 1:
            yield replace(self, runs=self.runs - 1)
        for number, one in enumerate(self.applications):
            if one.asked:
                left = one._replace(asked=False)
                yield replace(self, applications=(*self.applications[:number], left, *self.applications[number + 1 :]))
            half = len(one.steps) // 2
            cuts = [one.steps[:half], one.steps[half:]] if half > 1 else []
            cuts += [one.steps[:index] + one.steps[index + 1 :] for index in range(len(one.steps))]
            for steps in cuts:
                left = one._replace(steps=steps)
                yield replace(self, applications=(*self.applications[:number], left, *self.applications[number + 1 :]))


_AIMED = ("kill", "lose", "copy")
_STEPS = (*2 * ("time", "checkpoint", "kill"), "failing checkpoint", "lose", "copy", "cancel", "wait")
_SECONDS = (0.0, 0.0, 0.05, 0.1, 0.3, 1.0)


def _drawn(seed: int, mode: str, parallelism: Sequence[int], slots: int | None) -> _History:
    chance = random.Random(seed)
    applications = []
    for _ in range(chance.randrange(1, 4) if mode == "streaming" else 1):
        steps = [
            _Step(chance.choice(_STEPS), chance.randrange(4), chance.choice(_SECONDS))
            for _ in range(chance.randrange(2, 16))
        ]
        applications.append(_Application(chance.choice(parallelism), tuple(steps), chance.random() < 0.5))
    return _History(seed, slots or chance.choice((1, 2, 9, 9)), chance.choice((1, 1, 2)), tuple(applications))


@checked(parallelism=ANY, histories=AT_LEAST_1, slots=AT_LEAST_1, seed=ANY)
async def check_bookkeeping(
    make: Callable[[], Bookkeeping],
    *,
    mode: Literal["batch", "streaming"] = "streaming",
    parallelism: Sequence[int] = (1, 2, 3),
    slots: int | None = None,
    histories: int = 30,
    seed: int = 0,
) -> None:
    """Check with random histories that what a coordinator knows returns with its tasks, and that nothing is lost.

    In a history, tasks are killed and retried, later or immediately; executors are lost; copies start; checkpoints are
    taken at any moment, with messages on their way, and some of them fail; and runs follow each other. In streaming
    mode, applications follow each other too, each restored from the last checkpoint with another number of subtasks.
    In the end all tasks succeed, and together have yielded what is ``expected``. No coordinator fails its job, no task
    fails by itself, and none waits without end.

    Args:
        make: returns the operator for a new application. What outlives an application belongs outside of it.
        mode: the mode of the operator.
        parallelism: the numbers of subtasks to choose from.
        slots: how many tasks run at the same time at most. By default a history has 1, 2, or enough.
        histories: how many histories are played.
        seed: the seed of the first one; the others have those that follow.

    Raises:
        AssertionError: a history has failed; the text has its seed, and the shortest history found that fails too.
    """
    for one in range(seed, seed + histories):
        history = _drawn(one, mode, parallelism, slots)
        error = await _failure_of(history, make, mode)
        if error is None:
            continue
        left, going_on = SHRINKS_MAX, True
        while going_on:
            going_on = False
            for shorter in history.shorter():
                left -= 1
                found = await _failure_of(shorter, make, mode) if left >= 0 else None
                if found is not None:
                    history, error, going_on = shorter, found, True
                    break
        raise AssertionError(
            f"{describe(error)}\nThe shortest history found that fails so:\n{history}\n"
            f"Play it again with check_bookkeeping(..., mode={mode!r}, histories=1, seed={one})"
        ) from error


async def _failure_of(history: _History, make: Callable[[], Bookkeeping], mode: str) -> Exception | None:
    try:
        await _Play(history, make, mode).all_of_it()
    except Exception as error:
        return error
    return None


class _View(NamedTuple):
    """What a coordinator knows of a subtask after a reset."""

    parallelism: int
    checkpoint: CompletedCheckpoint | None
    subtask: int
    known: Any


@dataclass
class _Play:
    """One performance of a history."""

    history: _History
    make: Callable[[], Bookkeeping]
    mode: Any
    runs: int = 0
    views: list[_View] = field(default_factory=list)

    async def all_of_it(self) -> None:
        restored: CompletedCheckpoint | None = None
        for number, application in enumerate(self.history.applications):
            is_last = number == len(self.history.applications) - 1
            subject = self.make()
            if restored is not None and application.asked:
                for subtask in restored.subtask_states:
                    for part, event in subject.held:
                        restored = with_held(restored, subtask, [event], part=part)
                    for part, request in subject.held_requests:
                        restored = with_held(restored, subtask, [request], are_requests=True, part=part)
            async with self._world(subject, application.parallelism, restored) as world:
                await _Run(self, subject, world, restored).play(application.steps, is_last)
                restored = world.checkpoints[-1] if world.checkpoints else restored
        for view in self.views:
            fresh = self.make()
            async with self._world(fresh, view.parallelism, view.checkpoint) as world:
                await world.settle()
                assert fresh.view is not None
                known = fresh.view(view.subtask)
            whence = "nothing" if view.checkpoint is None else f"checkpoint {view.checkpoint.checkpoint_id}"
            assert view.known == known, (
                f"after a reset to {whence} the coordinator knows {show(view.known)} of subtask {view.subtask}, but "
                f"one that was restored from it knows {show(known)}"
            )

    def _world(self, subject: Bookkeeping, parallelism: int, restored: CompletedCheckpoint | None) -> Any:
        return running_operator(
            subject.coordinator,
            parallelism=parallelism,
            uses=subject.uses,
            mode=self.mode,
            checkpoint=CheckpointConfig(
                hold_events=self.history.seed % 2 == 0,
                tolerated_failures=TOLERATED,
                interval_s=(None, 0.05, 0.1)[self.history.seed % 3],
            ),
            restored=restored,
            attempts_max=1000,
            seed=self.history.seed,
        )


class _Run:
    """The part of a history that is in one application."""

    def __init__(self, play: _Play, subject: Bookkeeping, world: World, restored: CompletedCheckpoint | None) -> None:
        self.play_ = play
        self.subject = subject
        self.world = world
        self.restored = restored
        self.tasks: list[OperatorTask] = []  # of the current run
        self.victims: list[OperatorTask] = []
        self.first: list[int] = []  # subtasks that have failed: Spark retries them before it begins others

    async def play(self, steps: Sequence[_Step], is_last: bool) -> None:
        for step in steps:
            if step.what != "wait":
                await self._launch()
            await getattr(self, "_" + step.what.replace(" ", "_"))(step)
            await self.world.advance(step.seconds)
            await self._look()
        while is_last and self.play_.runs < self.play_.history.runs:
            await self._launch()
            for _ in range(int(2 * END_AFTER_S)):
                await self.world.advance(0.5)
                if await self._look():
                    break
                await self._launch()
            else:
                raise AssertionError(f"the run does not end: {self.tasks}")

    # --- steps ----------------------------------------------------------------------------------------------------

    async def _time(self, step: _Step) -> None:
        pass

    _wait = _time

    async def _checkpoint(self, step: _Step) -> None:
        """It begins at a moment at which tasks begin something too, so that it may hold their messages."""
        self.world.kit.clock.call_later(step.seconds, self._begin_checkpoint)

    def _begin_checkpoint(self) -> None:
        self.world.begin_checkpoint()

    async def _failing_checkpoint(self, step: _Step) -> None:
        self.world.storage_error = OSError(STORAGE_ERROR)
        self.world.begin_checkpoint()
        await self.world.advance(step.seconds)
        self.world.storage_error = None

    async def _kill(self, step: _Step) -> None:
        await self._end(step, self.world.kill)

    async def _lose(self, step: _Step) -> None:
        await self._end(step, self.world.lose_executor)

    async def _end(self, step: _Step, end: Callable[[OperatorTask], Any]) -> None:
        running = self._running()
        if running:
            victim = running[step.who % len(running)]
            subtask = victim.attempt.subtask
            self.victims.append(victim)
            await end(victim)
            if not any(task.attempt.subtask == subtask for task in self._running()):
                self.first.append(subtask)
                self._note_view(subtask)

    async def _cancel(self, step: _Step) -> None:
        """The next run goes on with the same input."""
        if self._running():
            await self.world.cancel_job()
            self._forget()

    async def _copy(self, step: _Step) -> None:
        """In streaming mode, the later attempt takes over."""
        running = self._running()
        if running and len(running) < self.play_.history.slots:
            await self._start(running[step.who % len(running)].attempt.subtask)

    # --- Spark ----------------------------------------------------------------------------------------------------

    def _running(self) -> list[OperatorTask]:
        return [task for task in self.tasks if not task.outcome]

    def _over(self) -> set[int]:
        return {task.attempt.subtask for task in self.tasks if task.outcome == "success"}

    async def _launch(self) -> None:
        """Start tasks in all free slots: retries first."""
        for subtask in [*self.first, *range(self.world.parallelism)]:
            busy = {task.attempt.subtask for task in self._running()} | self._over()
            if subtask not in busy and len(self._running()) < self.play_.history.slots:
                await self._start(subtask)
        self.first.clear()

    async def _start(self, subtask: int) -> None:
        if not self.tasks:
            self.world.input_id = f"input {self.play_.runs}"
        given = () if self.subject.operator is None else (self.subject.operator, self.subject.records)
        self.tasks.append(await self.world.launch_operator(subtask, *given))

    def _forget(self) -> None:
        """The run is over."""
        self.tasks, self.first = [], []

    async def _look(self) -> bool:
        """Whether a run has just ended well. Raises what has gone wrong."""
        self._check_failures()
        if len(self._over()) < self.world.parallelism:
            return False
        await self.world.advance(1.0)  # the final checkpoint
        outputs = [output for task in self.tasks if task.outcome == "success" for output in task.outputs]
        self._check_outputs(outputs)
        if self.subject.judge is not None:
            self.subject.judge(self.world, outputs)
        self._forget()
        self.play_.runs += 1
        return True

    def _check_failures(self) -> None:
        for failure in self.world.failures:
            if STORAGE_ERROR not in str(failure):
                raise AssertionError(f"the coordinator has failed the job: {describe(failure)}") from failure
        if self.world.failures:
            self.world.failures.clear()
            self._forget()
        for task in self.tasks:
            if task.outcome == "failed" and isinstance(task.error, Exception) and task not in self.victims:
                raise AssertionError(f"{task} has failed: {describe(task.error)}") from task.error

    def _check_outputs(self, outputs: list[Any]) -> None:
        if self.subject.expected is None:
            return
        later = self.subject.expected if self.subject.expected_later is None else self.subject.expected_later
        in_life = self.play_.runs if self.play_.mode == "streaming" else 0
        expected = [*self.subject.expected, *in_life * [*later]]
        missing, more = _difference(expected, outputs), _difference(outputs, expected)
        assert not missing, f"not every output counts once: these are missing: {show(missing)}"
        assert not more, f"not every output counts once: these are too many: {show(more)}"

    def _note_view(self, subtask: int) -> None:
        if self.subject.view is not None and not self.play_.runs and not self.world.failures:
            is_batch = self.play_.mode == "batch"
            completed = None if is_batch else self.world.checkpoints[-1] if self.world.checkpoints else self.restored
            self.play_.views.append(_View(self.world.parallelism, completed, subtask, self.subject.view(subtask)))


def with_held(
    checkpoint: CompletedCheckpoint, subtask: int, items: Iterable[Any], *, are_requests: bool = False, part: str = ""
) -> CompletedCheckpoint:
    """Return the checkpoint as it would be if the subtask's part had sent these too late for the coordinator."""
    index = checkpoint.parts.index(part)
    held = tuple(HeldEvent(subtask, encode_event(item), are_requests, index) for item in items)
    snapshots = dict(checkpoint.subtask_states)
    own = snapshots.get(subtask, SubtaskSnapshot((SubtaskState(subtask, b""),)))
    snapshots[subtask] = replace(own, held=(*own.held, *held))
    return replace(checkpoint, subtask_states=snapshots)


def _difference(some: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """What the first has more often than the second. Values are compared as an event would carry them."""
    left = Counter(map(encode_event, some))
    left.subtract(Counter(map(encode_event, others)))
    return sorted(map(decode_event, left.elements()), key=repr)
