# SPDX-License-Identifier: Apache-2.0

"""What every two-phase sink must survive, as cases that a test runs one by one."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import count
from math import inf, isfinite, nan
from time import tzset
from types import FrameType
from typing import Any

from actors.logs import get_logger
from headgate.testing._cases import Case, case, some, told
from headgate.testing._sink_model import Row
from headgate.testing._sink_world import Attempt, SinkTarget, SinkWorld
from headgate.testing._world import World, running_operator
from protocol.arguments import ANY, checked
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.describing import describe
from protocol.errors import HeadgateError
from spark_bridge.sinks.two_phase.driver import TwoPhaseSinkCoordinator
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, SinkWriterContext, TwoPhaseCommitter
from spark_bridge.sinks.two_phase.task import TwoPhaseSinkOperator

Step = Callable[[SinkWorld], Awaitable[None] | None]

SCRIPT: list[Step] = [
    lambda world: world.write(0),
    lambda world: world.write(1),
    lambda world: world.write(0),
    lambda world: world.cut(),  # 1 completes
    lambda world: world.snapshot(0),
    lambda world: world.write(0),
    lambda world: world.snapshot(1),
    lambda world: world.deliver(0),
    lambda world: world.store(),
    lambda world: world.notify(),
    lambda world: world.deliver(1),  # the list arrives after the completion
    lambda world: world.write(1),
    lambda world: world.cut(),  # 2 is aborted when one of two has prepared for it
    lambda world: world.snapshot(0),
    lambda world: world.abort(),
    lambda world: world.write(0),
    lambda world: world.cut(0),  # 3 completes; at its cut the list of 2 is still held
    lambda world: world.snapshot(0),
    lambda world: world.snapshot(1),
    lambda world: world.store(),
    lambda world: world.notify(),
    lambda world: world.deliver(0),
    lambda world: world.write(0),
    lambda world: world.write(0),
    lambda world: world.cut(0),  # 4 completes; at its cut one list of 3 is still held, and the other has arrived
    lambda world: world.write(0),
    lambda world: world.finish(0),  # what it prepared last is for no checkpoint, and its list is held by 4
    lambda world: world.write(1),
    lambda world: world.snapshot(1),
    lambda world: world.snapshot(0),
    lambda world: world.store(),
    lambda world: world.notify(),
    lambda world: world.deliver(0),
    lambda world: world.finish(0),
    lambda world: world.write(1),
    lambda world: world.cut(),  # 5 completes
    lambda world: world.snapshot(1),
    lambda world: world.store(),
    lambda world: world.notify(),
]
"""One life of an application with two subtasks, to the completion of its fifth checkpoint."""

TOGETHER_S = 2.0
"""How long, in real seconds, an application waits for the other one to commit at the same moment."""
PARTS_AT_A_TIME = 10
SHORT_SCRIPT = [*SCRIPT[:11], *SCRIPT[23:]]
"""The same without the aborted checkpoint and the one after it."""

TROUBLES: dict[str, Step] = {
    "the first subtask fails": lambda world: world.fail(0),
    "the second subtask fails": lambda world: world.fail(1),
    "a subtask fails after a completion": lambda world: world.fail(1, told_first=True),
    "the job fails": lambda world: world.fail_job(),
    "the driver dies": lambda world: world.boot(),
}

WRITES: dict[str, list[Step]] = {
    "fails, and the checkpoint is there": [lambda world: world.store_and_fail(there=True)],
    "fails, and the checkpoint appears later": [
        lambda world: world.store_and_fail(there=False),
        lambda world: world.appear(),
    ],
    "hangs, is given up, and is carried out later": [SinkWorld.hang, lambda world: world.abort(), SinkWorld.appear],
}
LATER: dict[str, list[Step]] = {
    "nothing": [],
    "the discard succeeds": [lambda world: world.discard()],
    "the driver dies": [lambda world: world.boot()],
}


@checked(seed=ANY)
def sink_cases(*, histories: int = 20, seed: int = 0) -> list[Case[SinkTarget]]:
    """The conformance suite for a ``TwoPhaseSink``; run each case with the sink's ``SinkTarget``.

    The cases: no fault at all; a fault between any two steps of a script (a task, the job or the driver dies); storages
    that give wrong answers, so that a checkpoint is in doubt; the death of a task or the driver before each line of the
    sink's own code; commits that are repeated, and commits that succeed and report a failure; two applications at the
    same time on one target, and with one name on two targets; a driver that commits although it was given up; a schema
    that changes between prepare and commit; values of each type, and times without a zone in several zones; readers
    that look at every moment; a job that runs every day, is interrupted on some and then repeated, so that all rows of
    every day appear once; and random histories of the rest.

    Args:
        histories: how many histories a case tries at most. With a large number, every moment has its own.
        seed: for the choice of moments and the random histories. A failure names what it tried.
    """
    return [
        case("every row is visible once", no_trouble),
        *(
            case(f"{name}, between any two steps", a_fault_between_steps, step, histories, seed)
            for name, step in TROUBLES.items()
        ),
        *(
            case(f"a write of a checkpoint {name}", a_checkpoint_in_doubt, steps, histories, seed)
            for name, steps in WRITES.items()
        ),
        case("the driver dies before a line of the sink", without_leak_warnings, death_in_the_driver, histories, seed),
        case("a task dies before a line of the sink", without_leak_warnings, death_in_a_task, histories, seed),
        case("an answer is lost", lost_answers),
        case("a commit is repeated", repeated_commits),
        case("two drivers commit the same at the same time", a_race_of_drivers),
        case("two applications use the same target at the same time", two_applications),
        case("another target has a sink of the same name", the_same_name_elsewhere),
        case("the schema changes between prepare and commit", changed_schemas),
        case("values are kept or refused", values),
        case("what another application prepared is left alone", strangers_orphans),
        case("a reader looks at every moment", a_constant_reader),
        case("a job runs every day", without_leak_warnings, days, min(histories, 10), seed),
        case("random histories", random_histories, histories, seed),
    ]


async def take(world: SinkWorld, steps: Iterable[Step]) -> None:
    """Take steps, and check after each."""
    for step in steps:
        done = step(world)
        if done is not None:
            await done
        world.check()


async def a_world(target: SinkTarget, **settings: Any) -> SinkWorld:
    target.clear()
    world = SinkWorld(target, **settings)
    await world.boot()
    return world


async def to_the_end(world: SinkWorld) -> None:
    await world.end()
    world.check_end()


async def no_trouble(target: SinkTarget) -> None:
    world = await a_world(target)
    await take(world, SCRIPT)
    await to_the_end(world)
    assert sorted(target.read()) == world.all_rows
    await world.boot()  # an application that has nothing left to write
    world.check()
    await to_the_end(world)


async def a_fault_between_steps(target: SinkTarget, trouble: Step, histories: int, seed: int) -> None:
    for moment in some(range(len(SCRIPT) + 1), histories, seed):
        with told(f"the fault came before step {moment}"):
            world = await a_world(target)
            await take(world, [*SCRIPT[:moment], trouble, *SCRIPT[moment:]])
            await to_the_end(world)


async def a_checkpoint_in_doubt(target: SinkTarget, write: list[Step], histories: int, seed: int) -> None:
    stores = [place for place, step in enumerate(SCRIPT) if "store" in step.__code__.co_names]
    choices = [
        (place, trouble, later)
        for place in stores
        for trouble in ("the first subtask fails", "the job fails", "the driver dies")
        for later in LATER
    ]
    for place, trouble, later in some(choices, histories, seed):
        with told(f"the write was that of step {place}; then {trouble}; then {later}"):
            world = await a_world(target)
            steps = [*SCRIPT[:place], *write, TROUBLES[trouble], *SCRIPT[place + 1 : place + 3]]
            await take(world, [*steps, *LATER[later], *SCRIPT[place + 3 :]])
            await to_the_end(world)


class Died(BaseException):
    """Stands for the death of the process in which it is raised. Let it pass."""


def source_folders(*things: object) -> tuple[frozenset[str], frozenset[str]]:
    """Where the code of these objects is: files by themselves, and folders of packages with one sink each.

    What the pattern itself brings does not count.
    """
    files: set[str] = set()
    packages: set[str] = set()
    for thing in things:
        for class_ in type(thing).__mro__:
            module = inspect.getmodule(class_)
            file = getattr(module, "__file__", None)
            if file is None or class_.__module__.startswith(("spark_bridge.sinks.two_phase", "typing")):
                continue
            if class_.__module__.startswith("spark_bridge.sinks."):
                packages.add(package := os.path.dirname(file))
                files.add(os.path.join(os.path.dirname(package), "folder.py"))  # which several sinks have
            else:
                files.add(file)
    return frozenset(files), frozenset(packages)


class Clockwork:
    """Ends the process of the driver, or of a task, before line number ``fatal`` of the sink's own code.

    So a test needs no hooks in the sink: between any two effects of a sink there is a line of it.
    """

    def __init__(self, world: SinkWorld, *, in_driver: bool, fatal: int = -1) -> None:
        context = SinkCommitterContext(world.name, world.name, get_logger("headgate.testing"))
        sink = world.target.sink(world.name)
        writers = [attempt.operator.writer for attempts in world.attempts.values() for attempt in attempts]
        self._files, self._packages = source_folders(sink, sink.committer(context), *writers)
        self.places: list[str] = []
        self.fatal = fatal
        self.victim: Attempt | None = None
        if in_driver:
            world.in_driver = lambda _, function, *args: self._watch(function, *args)
        else:
            world.in_task = self._in_task

    def before(self, place: str) -> None:
        """Called before each line, with its place as ``file:line``."""
        self.places.append(place)
        if len(self.places) - 1 == self.fatal:
            raise Died(place)

    def _in_task(self, attempt: Attempt, function: Callable[..., Any], *args: Any) -> Any:
        self.victim = attempt
        return self._watch(function, *args)

    def _watch(self, function: Callable[..., Any], *args: Any) -> Any:
        outer = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            return function(*args)
        finally:
            sys.settrace(outer)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        return self._on_line if file in self._files or os.path.dirname(file) in self._packages else None

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.before(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        return self._on_line

    def stop(self, world: SinkWorld) -> None:
        world.in_driver = world.in_task = lambda _, function, *args: function(*args)


async def fatal_lines(target: SinkTarget, *, in_driver: bool, histories: int, seed: int) -> list[int]:
    """The moments at which to die: the first and the last time that each line runs, or some of those."""
    world = await a_world(target)
    clockwork = Clockwork(world, in_driver=in_driver)
    await take(world, SHORT_SCRIPT)
    await to_the_end(world)
    assert clockwork.places, "no line of the sink was seen: is another tracer running, such as a debugger?"
    first = {place: number for number, place in reversed(list(enumerate(clockwork.places)))}
    last = {place: number for number, place in enumerate(clockwork.places)}
    return some(sorted({*first.values(), *last.values()}), histories, seed)


async def without_leak_warnings(target: SinkTarget, check: Callable[..., Awaitable[None]], *args: Any) -> None:
    """A dead process closes nothing, and its kernel does. Here the garbage collector closes what it had open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            await check(target, *args)
        finally:
            gc.collect()


async def death_in_the_driver(target: SinkTarget, histories: int, seed: int) -> None:
    for fatal in await fatal_lines(target, in_driver=True, histories=3 * histories, seed=seed):
        world = await a_world(target)
        clockwork = Clockwork(world, in_driver=True, fatal=fatal)
        try:
            await take(world, SHORT_SCRIPT)
            await world.end()
        except Died:
            pass
        clockwork.stop(world)
        with told(f"the driver died before {clockwork.places[-1]}"):
            world.check()
            await world.boot()
            await take(world, SHORT_SCRIPT)
            await to_the_end(world)


async def death_in_a_task(target: SinkTarget, histories: int, seed: int) -> None:
    for fatal in await fatal_lines(target, in_driver=False, histories=2 * histories, seed=seed):
        world = await a_world(target)
        clockwork = Clockwork(world, in_driver=False, fatal=fatal)
        for step in [*SHORT_SCRIPT, to_the_end]:
            try:
                await take(world, [step])
            except Died:
                clockwork.stop(world)
                assert clockwork.victim is not None
                with told(f"the task died before {clockwork.places[-1]}"):
                    await world.fail(clockwork.victim.subtask)
                    await take(world, [step])
        clockwork.stop(world)


async def lost_answers(target: SinkTarget) -> None:
    """Each call of ``commit`` has its effect, reports an error, and is tried again, even if the driver dies then."""
    for dies in (False, True):
        world = await a_world(target)
        world.retry_delays_s = (0.0,) * 20
        await world.boot()
        dice = random.Random(0)
        lost = 0

        def answer(
            world: SinkWorld,
            function: Callable[..., Any],
            *args: Any,
            dies: bool = dies,
            dice: random.Random = dice,
        ) -> Any:
            nonlocal lost
            result = function(*args)
            if function.__name__ != "commit" or dice.random() < 0.5:
                return result
            lost += 1
            if dies:
                raise Died
            committer: Any = getattr(function, "__self__", None)
            raise committer.transient_errors[0]("the answer was lost")

        world.in_driver = answer
        left = [*SCRIPT, to_the_end]
        while left:
            try:
                await take(world, [left[0]])
                del left[0]
            except Died:
                left.insert(0, SinkWorld.boot)
        assert lost >= 3


def a_committer(target: SinkTarget, name: str) -> TwoPhaseCommitter:
    committer = target.sink(name).committer(SinkCommitterContext(name, name, get_logger("headgate.testing")))
    committer.open()
    return committer


def watch_commits(world: SinkWorld) -> list[list[Committable]]:
    """Collect what is committed from now on."""
    batches: list[list[Committable]] = []

    def note(world: SinkWorld, function: Callable[..., Any], *args: Any) -> Any:
        if function.__name__ == "commit":
            batches.append(list(args[0]))
        return function(*args)

    world.in_driver = note
    return batches


async def repeated_commits(target: SinkTarget) -> None:
    """Old and new batches come again, from other committers, alone and together."""
    world = await a_world(target)
    batches = watch_commits(world)
    for step in SCRIPT:
        await take(world, [step])
        for batch in batches:
            again = a_committer(target, world.name)
            again.commit(list(batch))
            again.close()
            world.check()
    await to_the_end(world)
    again = a_committer(target, world.name)
    again.commit([part for batch in batches for part in batch])
    for batch in batches:
        again.commit(batch)
    again.close()
    world.check_end()


async def a_race_of_drivers(target: SinkTarget) -> None:
    """A driver that was given up commits the same at the same moment as its successor."""
    world = await a_world(target)

    def race(world: SinkWorld, function: Callable[..., Any], *args: Any) -> Any:
        if function.__name__ != "commit":
            return function(*args)
        start = threading.Barrier(2)
        rival = a_committer(target, world.name)

        def commit(committer: TwoPhaseCommitter) -> None:
            start.wait()
            try:
                committer.commit(list(args[0]))
            except committer.transient_errors:
                committer.commit(list(args[0]))

        with ThreadPoolExecutor(2) as threads:
            runs = [threads.submit(commit, committer) for committer in (rival, function.__self__)]  # type: ignore[attr-defined]
            for run in runs:
                run.result()
        rival.close()
        return None

    world.in_driver = race
    await take(world, SCRIPT)
    await to_the_end(world)


async def two_applications(target: SinkTarget) -> None:
    """Two applications with different names, each in a thread, commit at the same moments; one dies in the middle."""
    target.clear()
    one, two = SinkWorld(target, name="one"), SinkWorld(target, name="two", subtasks=(10, 11))
    start = threading.Barrier(2)

    def together(world: SinkWorld, function: Callable[..., Any], *args: Any) -> Any:
        if function.__name__ == "commit" and not start.broken:
            with suppress(threading.BrokenBarrierError):  # the other one has nothing to commit any more
                start.wait(TOGETHER_S)
        return function(*args)

    async def live(world: SinkWorld, steps: list[Step], dies_at: int) -> None:
        world.in_driver = together
        await world.boot()
        await take(world, steps[:dies_at])
        await world.boot()
        await take(world, steps[dies_at:])
        await to_the_end(world)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(asyncio.run, live(one, SCRIPT, len(SCRIPT) // 2))
        second = threads.submit(asyncio.run, live(two, [_for_subtasks(step, {0: 10, 1: 11}) for step in SCRIPT], 0))
        first.result()
        second.result()
    assert sorted(target.read()) == sorted([*one.all_rows, *two.all_rows])


async def the_same_name_elsewhere(target: SinkTarget) -> None:
    """Two applications with one name and operator id, on two targets. A driver dies while the other has prepared."""
    for dead, alive in ((0, 1), (1, 0)):
        target.clear()
        worlds = [SinkWorld(target), SinkWorld(target.other())]
        for world in worlds:
            await world.boot()
            await take(world, SCRIPT[:7])
        await worlds[dead].boot()
        for world in (worlds[alive], worlds[dead]):
            await take(world, SCRIPT[7:])
            await to_the_end(world)
        worlds[alive].check_end()


async def changed_schemas(target: SinkTarget) -> None:
    """After rows were prepared and before they are committed. Nothing of it is lost when the change is undone."""
    for name, (change, undo) in target.schema_changes().items():
        with told(name):
            world = await a_world(target)
            await take(world, SCRIPT[:9])
            change()
            try:
                await take(world, SCRIPT[9:])
                await to_the_end(world)
            except (HeadgateError, ValueError):
                world.check()
                undo()
                await world.boot()
                await take(world, SCRIPT)
                await to_the_end(world)
            else:
                undo()


VALUES = [
    *(None, True, 0, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 10**30, 0.1, -0.0, 1e300, nan, inf, 16777217.0),
    *(Decimal("1.20"), Decimal("0.0000001"), Decimal("12345678901234567890.123456789"), Decimal("NaN")),
    *("", "a", "02134", "ü\n", "a\0b", "\ud800", " a ", b"", b"\x00\xff"),
    *(date(1, 1, 1), date(1582, 10, 10), date(9999, 12, 31), time(23, 59, 59, 999999), timedelta(days=-1, seconds=1)),
    *map(datetime.fromisoformat, ("2026-03-08T02:30:00", "1883-11-18T12:00:00", "9999-12-31T23:59:59.999999")),
    *(datetime(2026, 3, 8, 2, 30, tzinfo=UTC), datetime(1, 1, 1, tzinfo=UTC)),
    datetime(2026, 3, 8, 2, 30, tzinfo=timezone(timedelta(hours=5, minutes=30))),
]
"""What has been changed silently somewhere. Some of the times do not exist in some zone, or have none."""
ZONES = ("UTC", "America/New_York", "Asia/Kolkata")


async def values(target: SinkTarget) -> None:
    """Each value is read back as it was, or is refused while it is written, in whatever zone the process is."""
    target.clear()
    for kind, promised in target.types().items():
        with told(f"the type was {kind}"):
            place = target.other(kind)
            kept = _write_values(place, promised)
            rows: list[Any] = list(place.read())
            found = dict(rows)
            assert len(rows) == len(found) == len(kept), f"{len(kept)} rows were written, and {len(rows)} are there"
            for number, (zone, value) in enumerate(kept):
                assert _is_kept(value, found[number]), f"{value!r} is {found[number]!r}, written in {zone}"


def _write_values(place: SinkTarget, promised: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return those that were not refused, each with the zone of the process. A refusal ends the attempt."""
    attempts = count()
    committer = a_committer(place, "values")
    kept: list[tuple[str, Any]] = []
    parts: list[Committable] = []
    writer = None
    for zone, value in [(zone, value) for zone in ZONES for value in [*promised, *VALUES]]:
        if zone == ZONES[0] or isinstance(value, (datetime, time)):
            writer = writer or place.sink("values").writer(SinkWriterContext("values", 0, next(attempts)))
            try:
                with local_zone(zone):
                    writer.write(place.record(len(kept), value))
                    parts += writer.prepare()
                kept.append((zone, value))
            except Exception as error:
                if value in promised:
                    raise AssertionError(f"{value!r} is refused: {describe(error)}") from error
                writer.close()
                writer = None
            if len(parts) >= PARTS_AT_A_TIME:
                committer.commit(parts)
                parts.clear()
    if writer is not None:
        writer.close()
    committer.commit(parts)
    committer.close()
    return kept


def _is_kept(value: Any, found: Any) -> bool:
    """A text for a column of another type is a form that the target reads; and bytes may be those of a text."""
    if isinstance(value, str) and not isinstance(found, str):
        return found == value.encode() if isinstance(found, bytes) else found is not None
    if isinstance(value, bytes) and isinstance(found, str):
        return found.encode() == value
    if isinstance(value, float) and isinstance(found, Decimal):
        return str(found) == "NaN" if value != value else found == Decimal(repr(value))
    if type(value) is date and isinstance(found, datetime):
        return found == datetime.combine(value, time.min)  # not an instant
    if isinstance(found, float) and isfinite(found) and Decimal(repr(found)) == value:
        return True  # in the shortest form, in which people read it
    return bool(found == value) or str(found).lower() == str(value).lower()  # NaN is not equal to itself


@contextmanager
def local_zone(name: str) -> Iterator[None]:
    """The local time zone of this process is this one."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = name
    tzset()
    try:
        yield
    finally:
        del os.environ["TZ"]
        if before is not None:
            os.environ["TZ"] = before
        tzset()


def _for_subtasks(step: Step, others: dict[int, int]) -> Step:
    """The same step for other subtasks."""

    class Renamed:
        def __init__(self, world: SinkWorld) -> None:
            self._world = world

        def __getattr__(self, name: str) -> Any:
            method = getattr(self._world, name)
            if name in ("write", "snapshot", "deliver", "finish", "fail"):
                return lambda subtask, *args, **settings: method(others[subtask], *args, **settings)
            return method

    return lambda world: step(Renamed(world))  # type: ignore[arg-type]


async def strangers_orphans(target: SinkTarget) -> None:
    """What another application has prepared and not committed survives the start, resets and end of this one."""
    target.clear()
    stranger = SinkWorld(target, name="stranger", subtasks=(10, 11))
    await stranger.boot()
    await take(stranger, [_for_subtasks(step, {0: 10, 1: 11}) for step in SCRIPT[:9]])  # prepared, and not committed
    before = sorted(target.leftovers("stranger"))
    assert before, "nothing was prepared"
    world = SinkWorld(target)
    await world.boot()
    await take(world, [*SCRIPT[:20], TROUBLES["the first subtask fails"], TROUBLES["the job fails"]])
    await to_the_end(world)
    assert sorted(target.leftovers("stranger")) == before
    await to_the_end(stranger)


async def a_constant_reader(target: SinkTarget) -> None:
    """Before each line of the committer, a reader sees whole parts; if the sink is atomic, whole checkpoints."""
    world = await a_world(target)
    looks = 0

    def look(place: str) -> None:
        nonlocal looks
        looks += 1
        rows = world.own(target.read())
        assert len(set(rows)) == len(rows), f"rows are doubled before {place}: {rows}"
        if world.atomic:
            assert set(rows) in world.covered, f"before {place}, half a checkpoint is visible: {rows}"
        else:
            for subtask in world.subtasks:
                count = sum(row[0] == subtask for row in rows)
                assert (subtask, count) in world.prepared_at, f"before {place}, half a part is visible: {rows}"

    clockwork = Clockwork(world, in_driver=True)
    clockwork.before = look  # type: ignore[method-assign]
    await take(world, SCRIPT)
    await to_the_end(world)
    assert looks > 10


def a_step(dice: random.Random, subtasks: int) -> tuple[str, Step]:
    subtask, which = dice.randrange(subtasks), dice.randrange(2)
    most, told_first = dice.choice([0, 1, 100]), dice.choice([True, False])
    steps: list[tuple[int, str, Step]] = [
        (30, f"write({subtask})", lambda world: world.write(subtask)),
        (12, f"deliver({subtask}, {most})", lambda world: world.deliver(subtask, most)),
        (10, f"cut({most})", lambda world: world.cut(most)),
        (25, f"snapshot({subtask})", lambda world: world.snapshot(subtask)),
        (10, "store", lambda world: world.store()),
        (3, f"store_and_fail({told_first})", lambda world: world.store_and_fail(there=told_first)),
        (2, "hang", lambda world: world.hang()),
        (4, f"appear({which})", lambda world: world.appear(which)),
        (4, f"discard({which})", lambda world: world.discard(which)),
        (10, "notify", lambda world: world.notify()),
        (4, "abort", lambda world: world.abort()),
        (6, f"finish({subtask})", lambda world: world.finish(subtask)),
        (3, f"fail({subtask}, {told_first})", lambda world: world.fail(subtask, told_first=told_first)),
        (3, f"copy({subtask})", lambda world: world.copy(subtask)),
        (4, f"lose_copy({subtask}, {which})", lambda world: world.lose_copy(subtask, which)),
        (1, "fail_job", lambda world: world.fail_job()),
        (2, "boot", lambda world: world.boot()),
    ]
    (chosen,) = dice.choices(steps, [weight for weight, _, _ in steps])
    return chosen[1], chosen[2]


async def random_histories(target: SinkTarget, histories: int, seed: int) -> None:
    for number in range(seed, seed + histories):
        dice = random.Random(number)
        subtasks = dice.choice([1, 2, 3])
        with told(f"random history {number}: sink_cases(histories=1, seed={number})"):
            world = await a_world(target, subtasks=range(subtasks), rows=dice.choice([3, 12]))
            for _ in range(dice.choice([40, 100])):
                _, step = a_step(dice, subtasks)
                await take(world, [step])
            await to_the_end(world)


# --- a job that runs every day: each day's input appears once, however often it is interrupted ------------------------

NAME = "sink"
SUBTASKS = (0, 1)
DAYS = 3
ROWS = 4
"""How many rows of a subtask a day has. Their numbers go on from day to day, so that a reader can tell them apart."""


async def days(target: SinkTarget, histories: int, seed: int) -> None:
    """A run that ended well, then runs with other input: all of it appears; an interrupted one continues, once."""
    for number in range(seed, seed + max(2, histories)):
        for named in (False, True):
            with told(f"the days of history {number}, {'with' if named else 'without'} input_id"):
                await _days_of(target, random.Random(number), named=named)


async def _days_of(target: SinkTarget, chance: random.Random, *, named: bool) -> None:
    target.clear()
    restored: CompletedCheckpoint | None = None
    expected: list[Row] = []
    for day in range(DAYS):
        numbers = range(day * ROWS, (day + 1) * ROWS)
        expected += [(subtask, number) for subtask in SUBTASKS for number in numbers]
        interruptions, done = chance.randrange(3), False
        while not done:
            coordinator = TwoPhaseSinkCoordinator(target.sink(NAME), retry_delays_s=())
            async with running_operator(coordinator, mode="streaming", restored=restored) as world:
                world.input_id = f"day {day}" if named else None
                done = await _application(world, target, numbers, chance, interrupted=interruptions > 0)
                restored = world.checkpoints[-1] if world.checkpoints else restored
            interruptions -= 1
            if done and named and chance.random() < 0.3:  # a scheduler repeats a day that is done
                done = False
        _compare(target.read(), expected, day)


async def _application(
    world: World, target: SinkTarget, numbers: Sequence[int], chance: random.Random, *, interrupted: bool
) -> bool:
    """Run the day in one application. False if its driver dies in the middle, sometimes before any checkpoint."""

    def make() -> TwoPhaseSinkOperator:
        return TwoPhaseSinkOperator(target.sink(NAME))

    tasks = [await world.launch_operator(subtask, make) for subtask in SUBTASKS]
    for place, number in enumerate(numbers):
        for subtask in SUBTASKS:
            tasks[subtask].feed(target.record(subtask, number))
        await world.settle()
        if chance.random() < 0.4:
            await world.checkpoint()
        if interrupted and chance.random() < 0.4:
            return False
        if chance.random() < 0.2:
            victim = chance.choice(SUBTASKS)
            await world.kill(tasks[victim])
            tasks[victim] = await world.launch_operator(victim, make)
            tasks[victim].feed(*(target.record(victim, one) for one in numbers[: place + 1]))
            await world.settle()
    if interrupted:
        return False
    for task in tasks:
        task.end_records()
    await world.advance(1.0)
    assert not world.failures, world.failures[0]
    assert all(task.outcome == "success" for task in tasks), [task.outcome for task in tasks]
    return True


def _compare(found: Sequence[Row], expected: list[Row], day: int) -> None:
    lost, doubled = sorted(set(expected) - set(found)), len(found) - len(set(found))
    assert not lost, f"rows are lost at the end of day {day}: {lost}"
    assert not doubled, f"rows are doubled at the end of day {day}: {sorted(found)}"
    assert set(found) == set(expected), f"there are other rows: {sorted(set(found) - set(expected))}"
