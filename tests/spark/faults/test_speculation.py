# SPDX-License-Identifier: Apache-2.0

"""Two concurrent attempts of one subtask: real speculative copies, on the other host. docs/spark-faults.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from actors.coordination import SourceCoordinator, StaticSplitEnumerator
from protocol.facts import TaskEnded, TaskOutcome
from protocol.wire.messages import RestoreMode
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask import SplitReader
from tests.spark.actions import Action
from tests.spark.cluster import StandaloneCluster
from tests.spark.conftest import SparkOn
from tests.spark.faults.bench import Bench
from tests.spark.faults.directing import Director, Life
from tests.spark.faults.heard import Heard
from tests.spark.operators import Listening
from tests.spark.recorder import Callback

pytestmark = pytest.mark.spark

ORIGINAL, COPY = (1, 0), (1, 1)
"""Copy subtask 1. Subtask 0 ends as soon as the original runs, so that Spark finds subtask 1 slow."""
OTHER = (0, 0)


SETTINGS = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.minTaskRuntime": "100ms",
}
"""Half of the tasks set the expected duration; Spark copies any task that takes longer."""


@pytest.fixture(scope="module")
def speculating(standalone: StandaloneCluster, spark_on: SparkOn) -> Iterator[Bench]:
    """A bench whose Spark has ``SETTINGS``, with an executor on each host."""
    settings = {name.replace(".", "_"): value for name, value in SETTINGS.items()}
    spark = spark_on(standalone.master_url, spark_executor_memory="512m", **settings)
    with Sidecar(spark) as sidecar:
        bench = Bench(spark, sidecar, standalone)
        bench.wait_for_executors()
        yield bench


@contextmanager
def a_subtask_and_its_copy(bench: Bench) -> Iterator[tuple[Director, Heard, Action]]:
    """Both attempts of subtask 1 run, each on its own host, and have talked with their coordinator; none has failed."""
    director = Director("hello")
    with bench.listening() as heard, bench.coordinated(director) as handle:
        action = bench.start_collecting(bench.numbers(2).through(handle, Listening))
        director.wait_until_ready([OTHER, ORIGINAL])
        director.hear(ORIGINAL, "are you 0?")
        director.tell(OTHER, "stop")
        director.wait_until_ready([COPY])
        director.hear(COPY, "are you 1?")
        original, copy = (heard.start_of(director.task_of(life)) for life in (ORIGINAL, COPY))
        assert (original.speculative, copy.speculative) == (False, True)
        assert original.host != copy.host
        assert lives_of(director) == [("ready", *ORIGINAL), ("ready", *COPY)]
        yield director, heard, action


def lives_of(director: Director) -> list[Callback]:
    """The attempts of subtask 1, checked for H13: a reset comes when no attempt is left, and at no other time."""
    lives = director.of_subtask(1)
    alive: set[int] = set()
    for at, callback in enumerate(lives):
        if callback[0] == "ready":
            alive.add(callback[2])
        elif callback[0] == "failed":
            alive.discard(callback[2])
            is_reset = lives[at + 1 : at + 2] == [("reset", 1, -1)]
            assert is_reset == (not alive), lives
        else:
            assert lives[at - 1][0] == "failed", lives
    return lives


def answers(director: Director, life: Life) -> list[Any]:
    return [callback[3][1] for callback in director.named("event") if callback[1:3] == life]


@pytest.mark.parametrize(("winner", "loser"), [(ORIGINAL, COPY), (COPY, ORIGINAL)])
def test_one_of_two_attempts_wins(speculating: Bench, winner: Life, loser: Life) -> None:
    """H12, H13: each attempt receives only its own events; the loser is superseded, its subtask is not failed over."""
    with a_subtask_and_its_copy(speculating) as (director, heard, action):
        director.tell(winner, "you win", "stop")
        results = sorted(action.result())
        end = heard.end_of(director.task_of(loser))
        director.wait_for(lambda story: ("run_ended", True) in story)

    assert results == [(0, 0, ["hello"]), (*winner, ["hello", f"are you {winner[1]}?", "you win"])]
    assert lives_of(director) == [("ready", *ORIGINAL), ("ready", *COPY), ("failed", *loser, "SUPERSEDED")]
    assert director.of_subtask(0) == [("ready", 0, 0)]
    assert answers(director, winner) == ["hello", f"are you {winner[1]}?", "you win"]
    assert answers(director, loser) == ["hello", f"are you {loser[1]}?"]
    assert end.outcome is TaskOutcome.KILLED
    assert "has succeeded" in director.reasons[0].text


def test_two_attempts_end_at_the_same_time(speculating: Bench) -> None:
    """H12, H13: one success for each subtask, whichever attempt Spark takes."""
    with a_subtask_and_its_copy(speculating) as (director, heard, action):
        for life in (ORIGINAL, COPY):
            director.tell(life, "stop")
        results = sorted(action.result())
        director.wait_for(lambda story: ("run_ended", True) in story)

    assert results[0] == (0, 0, ["hello"])
    [winner] = [life for life in (ORIGINAL, COPY) if results[1:] == [(*life, ["hello", f"are you {life[1]}?"])]]
    [loser] = {ORIGINAL, COPY} - {winner}
    assert lives_of(director)[2:] == [("failed", *loser, "SUPERSEDED")]
    assert heard.end_of(director.task_of(winner)).outcome is TaskOutcome.SUCCESS


def test_a_copy_fails_while_its_original_runs(speculating: Bench) -> None:
    """H13: no reset while one of them is left; it continues undisturbed."""
    with a_subtask_and_its_copy(speculating) as (director, heard, action):
        director.tell(COPY, "raise")
        assert heard.end_of(director.task_of(COPY)).outcome is TaskOutcome.FAILED
        director.wait_for(lambda story: ("failed", *COPY, "FAILED") in story)
        director.hear(ORIGINAL, "still there")
        director.tell(ORIGINAL, "stop")
        results = sorted(action.result())
        director.wait_for(lambda story: ("run_ended", True) in story)

    assert results == [(0, 0, ["hello"]), (*ORIGINAL, ["hello", "are you 0?", "still there"])]
    assert lives_of(director) == [("ready", *ORIGINAL), ("ready", *COPY), ("failed", *COPY, "FAILED")]


def test_both_attempts_fail(speculating: Bench) -> None:
    """H13: one reset, when the last of them ends."""
    with a_subtask_and_its_copy(speculating) as (director, heard, action):
        director.greet([1], "hello", "stop")
        for life in (ORIGINAL, COPY):
            director.tell(life, "raise")
        results = sorted(action.result())

    assert [(subtask, received) for subtask, _, received in results] == [(0, ["hello"]), (1, ["hello"])]
    lives = lives_of(director)
    assert {("failed", *ORIGINAL, "FAILED"), ("failed", *COPY, "FAILED")} <= set(lives)
    assert lives[-1][0] in ("ready", "failed")
    for life in (ORIGINAL, COPY):
        assert heard.end_of(director.task_of(life)).outcome is TaskOutcome.FAILED


def test_there_is_no_copy_in_streaming_mode(speculating: Bench) -> None:
    """H13: both would start from one state, so the later one takes over; the older is superseded and reset."""
    director = Director("hello")
    with speculating.listening() as heard, speculating.coordinated(director, mode=RestoreMode.STREAMING) as handle:
        action = speculating.start_collecting(speculating.numbers(2).through(handle, Listening))
        director.wait_until_ready([OTHER, ORIGINAL])
        director.hear(ORIGINAL, "are you 0?")
        director.greet([1], "hello", "stop")
        director.tell(OTHER, "stop")
        results = sorted(action.result())
        end = heard.end_of(director.task_of(ORIGINAL))

    assert [(subtask, received) for subtask, _, received in results] == [(0, ["hello"]), (1, ["hello"])]
    lives = lives_of(director)
    assert lives[:4] == [("ready", *ORIGINAL), ("failed", *ORIGINAL, "SUPERSEDED"), ("reset", 1, -1), ("ready", *COPY)]
    assert heard.start_of(director.task_of(COPY)).speculative
    assert end.outcome is not TaskOutcome.SUCCESS  # killed, unless it learns of it before Spark's kill comes


# --- splits ---------------------------------------------------------------------------------------------------------

SPLITS = list(range(12))


class OneFirst(StaticSplitEnumerator):
    """Subtask 0 waits until subtask 1 has its splits, and then takes all the others."""

    def __init__(self) -> None:
        super().__init__(SPLITS, batch_size=3)
        self.stuck: list[Any] = []
        self._waiting: list[int] = []
        self._one_has_some = False

    async def handle_split_request(self, subtask: int) -> None:
        if subtask == 0 and not self._one_has_some:
            self._waiting.append(subtask)
            return
        await super().handle_split_request(subtask)
        self._one_has_some = True
        while self._waiting:
            await super().handle_split_request(self._waiting.pop())

    async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
        self.stuck.append((subtask, attempt, event))


class FirstGetsStuck(SplitReader):
    """The first attempt of subtask 1 reads one split, and gets stuck in its second."""

    def read_split(self, split: int) -> Iterator[Any]:
        if self.context.subtask == 1 and self.context.attempt == 0 and split == 1:
            self.context.send_event("stuck")
            while True:
                self.context.wait_for_event()
        yield (self.context.subtask, self.context.attempt, split)


def test_a_copy_reads_the_splits_of_its_original(speculating: Bench) -> None:
    """H13: concurrent attempts have the same splits, so either can produce the whole output of the subtask."""
    enumerators: list[OneFirst] = []

    def build(state: bytes | None) -> OneFirst:
        enumerators.append(OneFirst())
        return enumerators[-1]

    source = SourceCoordinator(build)
    with speculating.listening() as heard, speculating.coordinated(source) as handle:
        rows = speculating.numbers(2).through(handle, FirstGetsStuck).collect()
        killed = heard.wait_for(TaskEnded, lambda fact: fact.outcome is TaskOutcome.KILLED)

    assert sorted(split for _, _, split in rows) == SPLITS
    assert {row for row in rows if row[0] == 1} == {(1, 1, 0), (1, 1, 1), (1, 1, 2)}
    assert enumerators[0].stuck == [(1, 0, "stuck")]
    assert source.splits_given_back == 0
    assert (killed.partition, killed.attempt_number) == ORIGINAL
