# SPDX-License-Identifier: Apache-2.0

"""Every blocking call of a sidecar is interrupted by a Ctrl-C at every point of the calling thread (H160).

Afterwards everything is as before the call or as after it, the name can be used, and no thread, socket or task is
left. The driver is simulated. ``test_cancelled_calls.py`` is the same for the coroutines.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import random
import signal
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext

import headgate
from protocol.restart import FixedDelay
from spark_bridge.driver import sidecar as sidecar_module
from spark_bridge.driver import started
from spark_bridge.driver.config import SidecarConfig, Watching
from spark_bridge.driver.sidecar import Sidecar
from tests.spark.faults.waiting import wait_until
from tests.spark_bridge.descriptors import check_that_all_are_closed, open_descriptors, opened_since
from tests.spark_bridge.interrupting import Point, interrupted_at, python_handles_interrupts
from tests.spark_bridge.simulated_driver import SimulatedDriver
from tests.spark_bridge.test_cancelled_calls import COLUMNS, Living, Numbers

POINTS_MAX = 50_000
"""A call that has more points than this does not end."""


def context_of(driver: SimulatedDriver) -> Any:
    """What a sidecar takes for a SparkContext."""
    context: Any = object.__new__(SparkContext)
    context.simulated = driver
    return context


class Bench:
    """A running sidecar over a simulated driver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.driver = SimulatedDriver()
        self.sidecar = Sidecar(context_of(self.driver), SidecarConfig(watching=Watching(stalled_report_s=3600.0)))
        self.calls = 0

    def coordinate(self, **options: Any) -> None:
        self.sidecar.coordinate("a", Living, parallelism=1, **options)

    def source(self, **options: Any) -> None:
        self.sidecar.source("a", Numbers(), schema=COLUMNS, **options)

    def trace(self) -> None:
        with self.sidecar.trace(self.folder / "trace.json"):
            self.calls += 1

    def action(self) -> int:
        self.calls += 1
        return self.calls

    @property
    def there(self) -> bool:
        runtime = self.sidecar._runtime
        assert runtime is not None
        return "a" in runtime.handles


@dataclass(frozen=True)
class Case:
    """``prepare`` comes before each call, ``check`` after it."""

    call: Callable[[Bench], object]
    prepare: Callable[[Bench], object] | None = None
    check: Callable[[Bench], object] | None = None


def still_there(it: Bench) -> None:
    assert it.there


def streaming(it: Bench) -> None:
    it.coordinate(mode="streaming")


def nothing_runs(it: Bench) -> None:
    runtime = it.sidecar._runtime
    assert runtime is not None
    assert not runtime._running_jobs.action_ids
    assert it.sidecar.run(lambda: 7) == 7


CASES = {
    "coordinate": Case(Bench.coordinate),
    "coordinate replace": Case(lambda it: it.coordinate(replace=True), Bench.coordinate, still_there),
    "release": Case(lambda it: it.sidecar.release("a"), Bench.coordinate),
    "source": Case(Bench.source),
    "checkpoint": Case(lambda it: it.sidecar.checkpoint("a"), streaming, still_there),
    "savepoint": Case(
        lambda it: it.sidecar.savepoint("a", directory=str(it.folder / "savepoints")), streaming, still_there
    ),
    "request": Case(lambda it: it.sidecar.request("a", 1), Bench.coordinate, still_there),
    "status": Case(lambda it: it.sidecar.status(), Bench.coordinate, still_there),
    "explain": Case(lambda it: it.sidecar.explain(), Bench.coordinate, still_there),
    "repr": Case(lambda it: it.sidecar._repr_html_(), Bench.coordinate, still_there),
    "for_each_batch": Case(lambda it: it.sidecar.for_each_batch("a", print), streaming, still_there),
    "trace": Case(Bench.trace, None, Bench.trace),
    "run": Case(lambda it: it.sidecar.run(it.action, restart=FixedDelay(delay_s=0.0)), Bench.coordinate, nothing_runs),
}


def usable(it: Bench) -> None:
    """The name works again, and nothing of what was interrupted is left."""
    assert len(Living.living) <= it.there
    it.coordinate(replace=True)
    assert it.sidecar.request("a", 1) == 1
    assert len(Living.living) == 1
    it.sidecar.release("a")
    assert not Living.living
    assert not it.there


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sidecar_module, "driver_of", lambda context: context.simulated)
    monkeypatch.setattr(started, "driver_context", lambda context: context)
    Living.living.clear()
    with python_handles_interrupts():
        yield


def threads_of_headgate() -> Counter[str]:
    """How many of each name, without idle workers, and without those that other libraries start at any moment."""
    return Counter(thread.name for thread in threading.enumerate() if thread.name.startswith("headgate"))


def join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join()


def points(call: Callable[[int], Point], many: int | None) -> None:
    """Call with 0, 1, 2 and so on until no interrupt comes; only a sample of them, if there are more than ``many``."""
    last = POINTS_MAX
    for number in range(POINTS_MAX) if many is None else _sample(call, many):
        if call(number).place is None:
            last = number
            break
    assert last > 10, "interrupted nowhere"
    assert last < POINTS_MAX or many is not None, "it does not end"


def _sample(call: Callable[[int], Point], many: int) -> Iterator[int]:
    step, last = 1, 1
    while call(last).place is not None:  # how many there are
        last *= 2
    chosen = random.Random(7)
    step = max(1, last // many)
    return (number + chosen.randrange(step) for number in range(0, last, step))


every_point = pytest.mark.parametrize(
    "many", [60, pytest.param(None, marks=pytest.mark.long)], ids=["some points", "all points"]
)


@every_point
@pytest.mark.parametrize("name", CASES)
def test_call_interrupted_at_any_point_leaves_everything_as_before_or_as_after(
    name: str, many: int | None, tmp_path: Path
) -> None:  # H160
    case = CASES[name]
    it = Bench(tmp_path)
    with it.sidecar:
        it.source()  # the first one opens a port, which stays
        usable(it)
        threads, files = threads_of_headgate(), open_descriptors()

        def call(number: int) -> Point:
            if case.prepare is not None:
                case.prepare(it)
            with contextlib.suppress(KeyboardInterrupt), interrupted_at(number) as point:
                case.call(it)
            print(f"{name} interrupted at {number}: {point}")
            if case.check is not None:
                case.check(it)
            usable(it)
            join("headgate-shown")  # it ends when it has read the status
            assert threads_of_headgate() <= threads
            return point

        points(call, many)
        check_that_all_are_closed(files)


def test_an_archive_on_the_path_of_imports_is_not_taken_for_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``importlib.metadata`` opens it and keeps it open, perhaps before an import has looked into it."""
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.py", "")
    files = open_descriptors()
    monkeypatch.syspath_prepend(archive)
    list(importlib.metadata.distributions())
    assert str(archive) in {meaning for _, meaning in open_descriptors()}
    check_that_all_are_closed(files)


def test_a_write_that_an_interrupt_leaves_behind_closes_its_files_when_the_disk_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H160: the interrupt itself does not wait for the disk."""
    it, answers, sync = Bench(tmp_path), threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert answers.wait(60)
        sync(descriptor)

    with it.sidecar:
        streaming(it)
        it.sidecar.savepoint("a", directory=str(tmp_path))
        usual, files = set(tmp_path.iterdir()), open_descriptors()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", slow)
            with pytest.raises(KeyboardInterrupt):
                it.sidecar.savepoint("a", directory=str(tmp_path))
            assert opened_since(files)
            patch.setattr(os, "fsync", sync)
            answers.set()
        check_that_all_are_closed(files)
        usable(it)
    wait_until(lambda: set(tmp_path.iterdir()) == usual, "the unfinished file is deleted")


def _left(it: Bench) -> None:
    assert not it.sidecar.is_running
    relay = getattr(it.driver, "relay", None)  # there is none if the interrupt came early
    assert relay is None or relay.opened == relay.closed
    assert not Living.living


@every_point
def test_entering_interrupted_at_any_point_leaves_nothing(many: int | None, tmp_path: Path) -> None:  # H160
    threads, files = threads_of_headgate(), open_descriptors()

    def call(number: int) -> Point:
        it = Bench(tmp_path)
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(number, skip="__enter__") as point:
            it.sidecar.__enter__()
        print(f"interrupted at {number}: {point}")
        if point.place is not None and it.sidecar.is_running:
            raise AssertionError(point)
        it.sidecar.stop()
        _left(it)
        with it.sidecar:  # it can be entered again
            it.coordinate()
        _left(it)
        join("AnyIO worker thread")  # their loop has ended
        assert threads_of_headgate() == threads
        return point

    points(call, many)
    check_that_all_are_closed(files)


def test_an_interrupt_that_is_held_back_until_the_sidecar_is_entered_leaves_it_again(tmp_path: Path) -> None:  # H160
    it = Bench(tmp_path)

    async def start_interrupted() -> None:
        await SimulatedDriver.start(it.driver)
        os.kill(os.getpid(), signal.SIGINT)

    it.driver.start = start_interrupted  # type: ignore[method-assign]
    with python_handles_interrupts(), pytest.raises(KeyboardInterrupt):
        it.sidecar.__enter__()
    _left(it)


@every_point
@pytest.mark.parametrize("how", ["leave", "stop"])
def test_leaving_interrupted_at_any_point_is_complete(how: str, many: int | None, tmp_path: Path) -> None:  # H160
    threads, files = threads_of_headgate(), open_descriptors()

    def call(number: int) -> Point:
        it = Bench(tmp_path)
        it.sidecar.__enter__()
        it.coordinate()
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(number, skip="__exit__") as point:
            if how == "leave":
                it.sidecar.__exit__(None, None, None)
            else:
                it.sidecar.stop()
        print(f"interrupted at {number}: {point}")
        _left(it)
        join("AnyIO worker thread")  # their loop has ended
        assert threads_of_headgate() == threads
        return point

    points(call, many)
    check_that_all_are_closed(files)


@every_point
def test_start_and_stop_interrupted_at_any_point_can_be_repeated(many: int | None, tmp_path: Path) -> None:  # H160
    threads, files = threads_of_headgate(), open_descriptors()
    context = context_of(SimulatedDriver())

    def call(number: int) -> Point:
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(number) as point:
            headgate.start(context, name="fuzzed")
            headgate.stop("fuzzed")
        print(f"interrupted at {number}: {point}")
        headgate.start(context, name="fuzzed").coordinate("a", Living, parallelism=1, replace=True)
        headgate.stop("fuzzed")
        assert not Living.living
        join("AnyIO worker thread")  # their loop has ended
        assert threads_of_headgate() == threads
        return point

    points(call, many)
    check_that_all_are_closed(files)


def test_leaving_raises_what_could_not_be_closed() -> None:  # H160
    class Stuck(SimulatedDriver):
        async def close(self) -> None:
            raise OSError("the relay cannot be closed")

    with pytest.raises(OSError, match="the relay cannot be closed"), Sidecar(context_of(Stuck())):
        pass


def test_a_sidecar_stops_when_the_interpreter_ends_and_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H120: as in Python 3.12 and later."""

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    it = Bench(tmp_path)
    it.sidecar.__enter__()
    it.coordinate(mode="streaming")
    assert len(Living.living) == 1
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        it.sidecar.stop()
    assert not Living.living
    assert not it.sidecar.is_running
