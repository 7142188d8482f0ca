# SPDX-License-Identifier: Apache-2.0

"""The simulated Spark behaves as Spark does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import pytest

from protocol.facts import (
    ExecutorLost,
    FactsDropped,
    JobEnded,
    JobStarted,
    StageCompleted,
    StageSubmitted,
    TaskEnded,
    TaskOutcome,
    TaskStarted,
    TaskState,
)
from tests.simulation import accidents
from tests.simulation.engine import Engine, EngineTask, Faults
from tests.simulation.jobs import Job
from tests.simulation.pending_actions import KILL_S_MAX

T = TypeVar("T")


class Tame(Random):
    """Picks the first option and avoids unusual events, unless ``answers`` say otherwise."""

    def __init__(self) -> None:
        super().__init__(0)
        self.answers: list[Any] = []
        self.unusual: list[float] = []

    def random(self) -> float:
        return self.unusual.pop(0) if self.unusual else 0.999

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        if self.answers and self.answers[0] in seq:
            return seq[seq.index(self.answers.pop(0))]
        return seq[0]

    def randrange(self, *_: Any) -> int:
        return 0


@dataclass
class Stage:
    """An engine whose processes are names in a set; ``shuffles`` and ``reads`` shape its jobs."""

    partitions: int = 2
    copies: bool = True
    barrier: bool = False
    budget: int = 0
    random: Tame = field(default_factory=Tame)
    processes: set[int] = field(default_factory=set)
    happened: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        def launch(task: EngineTask) -> None:
            self.processes.add(task.task_attempt_id)

        self.faults = faults = Faults(0.0, 0.0, 0.0, 0.0, 0.0, self.budget)
        kill = self.processes.discard
        self.engine = Engine(
            self.random, self.partitions, faults, launch, kill, self.copies, self.barrier, self.happened.append
        )

    def start(self, *, shuffles: bool = False, reads: bool = False) -> Job:
        unusual = [0.999 if self.barrier and shuffles else 0.0 if shuffles or self.barrier else 0.999]
        self.random.unusual = [*unusual, 0.0 if reads else 0.999]
        self.engine.start_job()
        assert self.engine.job is not None
        return self.engine.job

    def told(self, *kinds: type) -> list[Any]:
        """Take the facts of these kinds about our own stages off the bus."""
        facts = [fact for fact in self.engine.bus if not kinds or isinstance(fact, kinds)]
        self.engine.bus.clear()
        return [fact for fact in facts if getattr(fact, "stage_id", 0) < 10_000]

    def work(self) -> None:
        """Carry out everything that was postponed, including kills."""
        while self.engine.kills:
            self.engine.carry_out_kill()

    def tasks(self) -> list[tuple[int, int, int]]:
        """Return the stage attempt, partition and attempt number of each running task."""
        return [(task.stage_attempt, task.partition, task.attempt_number) for task in self.engine.running()]


def started(*, shuffles: bool = False, reads: bool = False, **stage: Any) -> Stage:
    """Return a stage whose first job runs."""
    under_test = Stage(**stage)
    under_test.start(shuffles=shuffles, reads=reads)
    return under_test


def outcomes(facts: list[Any]) -> list[tuple[int, TaskOutcome]]:
    return [(fact.task_attempt_id, fact.outcome) for fact in facts if isinstance(fact, TaskEnded)]


# --- retries, failures, kills -------------------------------------------------------------------------------------


def test_an_end_is_posted_before_the_start_of_the_retry() -> None:
    stage = started()
    assert stage.told(JobStarted, StageSubmitted) == [JobStarted(0, (10,)), StageSubmitted(10, 0, 2, partitions=2)]
    stage.engine.exited(100, "broken")
    end, start = stage.told()
    assert (end.task_attempt_id, end.outcome, end.reason) == (100, TaskOutcome.FAILED, "broken")
    assert (start.task_attempt_id, start.partition, start.attempt_number) == (102, 0, 1)


def test_a_job_that_fails_too_often_is_given_up_and_its_other_tasks_end_later() -> None:
    stage = started()
    for _ in range(4):
        stage.engine.exited(next(t.task_attempt_id for t in stage.engine.running() if t.partition == 0), "broken")
    facts = stage.told(JobEnded, StageCompleted, TaskEnded)
    assert [type(fact) for fact in facts[-2:]] == [StageCompleted, JobEnded]
    assert not facts[-1].succeeded
    assert 101 in stage.processes
    stage.work()
    assert outcomes(stage.told()) == [(101, TaskOutcome.KILLED)]
    assert not stage.processes


def test_a_killed_task_talks_on_until_the_kill_is_carried_out_and_counts_as_no_failure() -> None:
    stage = Stage(partitions=1, budget=1)
    job = stage.start()
    stage.random.answers = [25]
    stage.engine.request_kill(100, "no answer")
    for _ in range(20):
        stage.engine.carry_out_kill()
    assert 100 in stage.processes
    assert stage.engine.pending.rest() == pytest.approx(20 / 25 * KILL_S_MAX)
    stage.told()
    stage.engine.pending.catch_up(KILL_S_MAX)
    assert 100 not in stage.processes
    assert [type(fact) for fact in stage.told()] == [TaskEnded, TaskStarted]
    assert job.latest.failures == {0: 0}


def test_a_kill_may_come_when_the_task_has_ended() -> None:
    stage = started(partitions=1)
    stage.engine.request_kill(100, "no answer")
    stage.engine.exited(100, "")
    assert outcomes(stage.told()) == [(100, TaskOutcome.SUCCESS)]
    assert not stage.engine.kills


def test_the_loser_of_two_copies_is_killed_even_if_it_ends_well() -> None:
    stage = started()
    accidents.copy_a_task(stage.engine)
    stage.engine.exited(102, "")
    stage.engine.exited(100, "")
    ends = stage.told(TaskEnded)
    assert outcomes(ends) == [(102, TaskOutcome.SUCCESS), (100, TaskOutcome.KILLED)]
    assert "another attempt succeeded" in ends[1].reason
    assert "loser ends well" in stage.happened
    assert stage.engine.finished == {0: 102}


# --- stage attempts -----------------------------------------------------------------------------------------------


def test_after_a_fetch_failure_a_zombie_and_its_rival_have_one_number() -> None:
    stage = started(partitions=3, reads=True)
    stage.engine.exited(103, "")  # task 100 belongs to the stage before
    stage.told()
    accidents.fail_fetch(stage.engine)
    assert [type(fact) for fact in stage.told()] == [TaskEnded, StageCompleted]
    assert stage.tasks() == [(0, 1, 0)]
    stage.work()
    assert StageSubmitted(10, 1, 2, partitions=3) in stage.told()
    assert stage.tasks() == [(0, 1, 0), (1, 0, 0), (1, 1, 0)]


def test_of_two_successes_the_first_is_the_result_and_the_last_is_read_by_a_shuffle() -> None:
    for shuffles, counts in ((False, "zombie"), (True, "rival")):
        stage = Stage(partitions=3)
        job = stage.start(reads=True, shuffles=shuffles)
        accidents.fail_fetch(stage.engine)
        stage.work()
        zombie = next(task for task in stage.engine.running() if task.of is job.sets[0])
        rival = next(t for t in stage.engine.running(job, job.latest) if t.partition == zombie.partition)
        stage.engine.exited(zombie.task_attempt_id, "")
        stage.engine.exited(rival.task_attempt_id, "")
        expected = zombie if counts == "zombie" else rival
        assert stage.engine.finished == {zombie.partition: expected.task_attempt_id}
        assert ("second success" in stage.happened) == shuffles
        assert (rival.outcome, zombie.outcome) == (TaskOutcome.SUCCESS, TaskOutcome.SUCCESS)


def test_a_zombie_starts_no_retry() -> None:
    stage = started(partitions=2, reads=True)
    accidents.fail_fetch(stage.engine)
    (zombie,) = stage.engine.running()
    stage.told()
    stage.engine.exited(zombie.task_attempt_id, "broken")
    assert [type(fact) for fact in stage.told()] == [TaskEnded]


def test_only_what_is_missing_runs_again_when_outputs_cannot_be_read() -> None:
    # H17: success is revoked without a fact of the task's own
    stage = started(partitions=2, shuffles=True)
    stage.engine.exited(100, "")
    stage.engine.exited(101, "")
    assert stage.told(StageCompleted) == [StageCompleted(10, 0)]
    accidents.fail_fetch_downstream(stage.engine)
    stage.work()
    assert stage.tasks() == [(1, 0, 0)]
    stage.told()
    stage.engine.exited(next(iter(stage.processes)), "")
    stage.work()
    assert [fact.succeeded for fact in stage.told(JobEnded)] == [True]


def test_a_barrier_stage_fails_and_starts_again_as_a_whole() -> None:
    stage = started(barrier=True, shuffles=True)
    stage.engine.exited(100, "")
    stage.engine.exited(101, "broken")
    stage.work()
    assert stage.tasks() == [(1, 0, 0), (1, 1, 0)]
    stages = [fact for fact in stage.told() if isinstance(fact, StageSubmitted | StageCompleted)]
    assert stages == [
        StageSubmitted(10, 0, 2, True, 2),
        StageCompleted(10, 0, "broken"),
        StageSubmitted(10, 1, 2, True, 2),
    ]


def test_what_succeeds_after_the_failure_of_a_barrier_stage_is_kept() -> None:
    stage = started(barrier=True, shuffles=True)
    stage.engine.exited(101, "broken")
    stage.random.unusual = [0.999]  # the kill comes too late
    stage.engine.exited(100, "")
    stage.work()
    assert stage.tasks() == [(1, 1, 0)]
    assert "barrier zombie succeeds" in stage.happened


def test_a_barrier_stage_is_given_up_in_the_end_and_immediately_when_nothing_reads_it() -> None:
    for shuffles, attempts in ((True, 4), (False, 1)):
        stage = started(partitions=1, barrier=True, shuffles=shuffles)
        while stage.engine.active:
            stage.engine.exited(next(iter(stage.processes)), "broken")
            stage.work()
        assert len(stage.told(StageSubmitted)) == attempts
        assert stage.engine.results == {0: False}


# --- executors ----------------------------------------------------------------------------------------------------


def test_with_an_executor_go_its_tasks_and_the_outputs_of_a_stage_that_runs() -> None:
    stage = started(partitions=3, shuffles=True)
    stage.engine.exited(100, "")
    stage.told()
    accidents.lose_executor(stage.engine)
    facts = stage.told()
    assert outcomes(facts) == [
        (100, TaskOutcome.RESUBMITTED),
        (101, TaskOutcome.EXECUTOR_LOST),
        (102, TaskOutcome.EXECUTOR_LOST),
    ]
    assert facts[3] == ExecutorLost("executor-0", "gone")
    assert [(fact.partition, fact.attempt_number) for fact in facts[4:]] == [(1, 1), (2, 1), (0, 1)]
    assert "executor-0" not in stage.engine.executors


def test_an_output_elsewhere_is_made_again_when_a_failed_attempt_was_on_the_lost_executor() -> None:
    stage = started(partitions=2, shuffles=True)
    stage.random.answers = ["executor-1"]
    stage.engine.exited(100, "broken")
    stage.engine.exited(102, "")
    stage.told()
    accidents.lose_executor(stage.engine)
    assert outcomes(stage.told()) == [(100, TaskOutcome.RESUBMITTED), (101, TaskOutcome.EXECUTOR_LOST)]
    assert stage.tasks() == [(0, 1, 1), (0, 0, 2)]
    assert stage.engine.finished == {0: 102}


def test_a_result_is_not_lost_with_its_executor() -> None:
    stage = started(partitions=2)
    stage.engine.exited(100, "")
    accidents.lose_executor(stage.engine)
    assert stage.engine.finished == {0: 100}
    assert stage.tasks() == [(0, 1, 1)]


def test_outputs_of_a_stage_that_is_complete_are_missed_when_they_are_read() -> None:
    stage = started(partitions=1, shuffles=True)
    stage.engine.exited(100, "")
    stage.told()
    accidents.lose_executor(stage.engine)
    assert stage.told() == [ExecutorLost("executor-0", "gone")]
    stage.work()
    assert stage.tasks() == [(1, 0, 0)]


@pytest.mark.parametrize("place", ["before", "between", "late", "never"])
def test_the_executors_own_fact_comes_anywhere(place: str) -> None:
    stage = started(partitions=2)
    stage.told()
    stage.random.answers = [place]
    accidents.lose_executor(stage.engine)
    own = ExecutorLost("executor-0", "gone")
    places = [i for i, fact in enumerate(stage.told()) if fact == own]
    assert (places, stage.engine.late) == {
        "before": ([0], []),
        "between": ([1], []),
        "late": ([], [own]),
        "never": ([], []),
    }[place]


def test_a_ghost_lives_on_after_its_executor() -> None:
    stage = started(partitions=1)
    stage.random.unusual = [0.0]
    accidents.lose_executor(stage.engine)
    assert stage.processes == {100, 101}
    stage.engine.exited(100, "")
    assert stage.engine.finished == {}
    stage.work()
    assert stage.processes == {101}


# --- the bus, the records, two jobs -------------------------------------------------------------------------------


def test_lost_facts_are_counted_and_reported() -> None:
    stage = Stage(partitions=1, budget=1)
    stage.faults.drop = 1.0
    stage.random.unusual = [0.999, 0.999, 0.5, 0.0]
    stage.engine.start_job()
    assert [type(fact) for fact in stage.told()] == [FactsDropped, StageSubmitted, TaskStarted]


def test_a_look_may_find_the_books_of_yesterday() -> None:
    stage = started(partitions=1, budget=1)
    both = frozenset({100, 999}), frozenset({0})
    assert stage.engine.status(*both).tasks == {100: TaskState.RUNNING, 999: TaskState.UNKNOWN}
    stage.engine.exited(100, "")
    stage.random.unusual = [0.0]
    outdated = stage.engine.status(*both)
    assert (outdated.tasks[100], outdated.jobs) == (TaskState.RUNNING, {0: True})
    now = stage.engine.status(*both)
    assert (now.tasks[100], now.jobs) == (TaskState.SUCCEEDED, {0: False})


def test_two_jobs_run_concurrently() -> None:
    # H55: refusing one is the ledger's job
    stage = started(partitions=1)
    stage.engine.start_rival()
    assert len({task.stage_id for task in stage.engine.running()}) == 2
    stage.engine.exited(100, "")
    assert [job.job_id for job in stage.engine.active_jobs()] == [501]
    stage.engine.exited(101, "")
    assert stage.engine.results == {0: True, 501: True}
