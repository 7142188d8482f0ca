# SPDX-License-Identifier: Apache-2.0

"""The heap of a sidecar with many subtasks is kept from the garbage collector, for as long as a run lasts."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from actors.coordination import OperatorStatistics
from protocol.attempts import RunEnded, RunStarted
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.driver import runtime
from spark_bridge.driver.config import SidecarConfig, SidecarLimits
from spark_bridge.driver.loop import SUBTASKS_MIN, FrozenHeap
from spark_bridge.driver.runtime import SidecarRuntime
from tests.spark_bridge.simulated_driver import SimulatedDriver

STARTED, ENDED = RunStarted("words", 1), RunEnded("words", 1, True, "it is over")


class Cycle:
    """Refers to itself, so only the garbage collector can free it."""

    def __init__(self) -> None:
        self.myself = self


def is_freed(cycle: weakref.ref[Cycle]) -> bool:
    gc.collect()
    return cycle() is None


@pytest.fixture(autouse=True)
def _tests_own_heap() -> Iterator[None]:
    """The tests freeze what they have collected, and need it frozen again."""
    gc.unfreeze()
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.collect()
    gc.freeze()


@pytest.fixture
def running() -> RunningJobs:
    running = RunningJobs()
    running.note(STARTED)
    return running


def test_the_heap_is_frozen_once_no_more_subtasks_become_ready_and_until_the_run_ends(running: RunningJobs) -> None:
    statistics = OperatorStatistics("words")
    heap = FrozenHeap(running, lambda: [statistics])
    statistics.ready = SUBTASKS_MIN
    heap.look()
    assert gc.get_freeze_count() == 0, "more may come"
    heap.look()
    assert gc.get_freeze_count() > 0
    running.note(ENDED)
    heap.look()
    assert gc.get_freeze_count() == 0


async def test_a_sidecar_that_is_left_during_a_run_leaves_nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FrozenHeap] = []

    def make(*given: Any) -> FrozenHeap:
        made.append(FrozenHeap(*given))
        return made[0]

    monkeypatch.setattr(runtime, "FrozenHeap", make)
    async with SidecarRuntime(SimulatedDriver(), SidecarConfig(limits=SidecarLimits(freeze_heap=True))):
        made[0]._freeze()
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


async def test_a_program_that_wants_no_frozen_heap_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "FrozenHeap", lambda *given: pytest.fail("it was made"))
    async with SidecarRuntime(SimulatedDriver(), SidecarConfig(limits=SidecarLimits(freeze_heap=False))):
        pass


def test_few_subtasks_are_left_to_the_collector(running: RunningJobs) -> None:
    statistics = OperatorStatistics("words")
    statistics.ready = SUBTASKS_MIN - 1
    heap = FrozenHeap(running, lambda: [statistics])
    for _ in range(3):
        heap.look()
    assert gc.get_freeze_count() == 0


def test_garbage_that_was_frozen_is_freed_after_the_run(running: RunningJobs) -> None:
    statistics = OperatorStatistics("words")
    statistics.ready = SUBTASKS_MIN
    heap = FrozenHeap(running, lambda: [statistics])
    cycle = weakref.ref(Cycle())
    heap.look()
    heap.look()
    assert not is_freed(cycle)
    heap.close()
    assert is_freed(cycle)
    heap.close()  # once more is harmless


def test_a_few_attempts_after_it_do_not_freeze_it_again(running: RunningJobs) -> None:
    statistics = OperatorStatistics("words")
    statistics.ready = 8 * SUBTASKS_MIN
    heap = FrozenHeap(running, lambda: [statistics])
    heap.look()
    heap.look()
    statistics.ready += SUBTASKS_MIN
    cycle = weakref.ref(Cycle())
    heap.look()
    heap.look()
    assert is_freed(cycle)
    statistics.ready += SUBTASKS_MIN
    cycle = weakref.ref(Cycle())
    heap.look()
    heap.look()
    assert not is_freed(cycle), "a quarter more have become ready"
    heap.close()


def frozen_heap(running: RunningJobs) -> FrozenHeap:
    statistics = OperatorStatistics("words")
    statistics.ready = SUBTASKS_MIN
    heap = FrozenHeap(running, lambda: [statistics])
    heap.look()
    heap.look()
    assert gc.get_freeze_count() > 0
    return heap


def test_while_it_is_frozen_a_full_run_is_made_when_the_process_has_grown(running: RunningJobs) -> None:
    gc.set_threshold(100_000, 10, 10)  # the younger generations leave the cycles here alone
    heap = frozen_heap(running)
    assert gc.get_threshold()[0] == 100_000
    gc.disable()  # no other run than the one that is asked for
    try:
        heap.look()
        cycle = weakref.ref(Cycle())
        kept = [object() for _ in range(sys.getallocatedblocks() // 2)]
        heap.look()
        assert cycle() is not None, "the program has switched the collector off"
        gc.enable()
        heap.look()
        assert cycle() is None
        cycle = weakref.ref(Cycle())
        heap.look()
        assert cycle() is not None, "it has not grown since"
        kept.clear()
        heap.look()  # what it holds from now on is more
        kept += [object() for _ in range(sys.getallocatedblocks() // 3)]
        heap.look()
        assert cycle() is None, "it has grown again, though it was larger before"
    finally:
        gc.enable()
        heap.close()
    assert gc.get_threshold() == (100_000, 10, 10)


def test_a_run_of_the_middle_generation_visits_what_few_of_the_youngest_have_left(running: RunningJobs) -> None:
    gc.set_threshold(700, 10, 10)
    visited: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 1:
            visited.append(sum(type(one) is Cycle for young in (0, 1) for one in gc.get_objects(generation=young)))

    heap = frozen_heap(running)
    gc.callbacks.append(note)
    try:
        kept = [Cycle() for _ in range(10_000)]
    finally:
        gc.callbacks.remove(note)
        heap.close()
    assert len(kept) == 10_000
    assert 0 < max(visited) < 3_000, "with Python's threshold of 10 it would be 8,000"
    assert gc.get_threshold() == (700, 10, 10)


def test_a_program_that_runs_the_middle_generation_earlier_keeps_its_threshold(running: RunningJobs) -> None:
    gc.set_threshold(700, 1, 10)
    heap = frozen_heap(running)
    assert gc.get_threshold()[:2] == (700, 1)
    heap.close()
    assert gc.get_threshold() == (700, 1, 10)


def test_python_itself_makes_no_full_run_while_it_is_frozen(running: RunningJobs) -> None:
    gc.set_threshold(1, 1, 1)
    heap = frozen_heap(running)
    gc.collect()
    runs = gc.get_stats()[2]["collections"]
    kept = [Cycle() for _ in range(10_000)]
    assert gc.get_stats()[2]["collections"] == runs
    heap.close()
    kept += [Cycle() for _ in range(10_000)]
    assert gc.get_stats()[2]["collections"] > runs


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_two_sidecars_of_one_process_leave_the_thresholds_as_they_were(
    running: RunningJobs, *, first_ends_first: bool
) -> None:
    gc.set_threshold(700, 10, 7)
    heaps = [frozen_heap(running), frozen_heap(running)]
    for heap in heaps if first_ends_first else reversed(heaps):
        heap.close()
    assert gc.get_threshold() == (700, 10, 7)
