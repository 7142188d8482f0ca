"""Whole Spark histories against the ledger, with a checker that knows only the contract and the truth.

A failing case prints its seed and its story; ``run_history(seed, chances)`` replays it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import get_args

import pytest

from protocol.attempts import (
    AttemptAccepted,
    FailureKind,
    FailureReason,
    LedgerEffect,
    OperatorReset,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.facts import TaskState
from tests.protocol.attempts_simulation import Chances, Simulation, Stage

HEALED_WITHIN_S = 45.0  # an audit every 30 s, an answer that may be lost, and the time to ask again


class Checker:
    """The order of what a coordinator is told (H2, H10, H11, H13, H15, H55), and that it agrees with the truth."""

    def __init__(self, lossy: bool) -> None:
        self.lossy = lossy
        self.simulation: Simulation | None = None
        self.run: int | None = None
        self.runs = 0
        self.operator_resets = 0
        self.numbers: dict[int, int] = defaultdict(lambda: -1)
        self.alive: dict[int, dict[int, int]] = defaultdict(dict)  # subtask -> number -> task
        self.ready: set[tuple[int, int]] = set()
        self.finished: dict[int, dict[int, int]] = defaultdict(dict)
        self.owes_reset: set[int] = set()
        self.reasons: dict[int, FailureReason] = {}  # by task
        self.outcomes: dict[str, int] = defaultdict(int)
        self.kills: dict[int, int] = defaultdict(int)  # in the present run: how often each subtask was killed by us

    def __call__(self, effect: LedgerEffect) -> None:
        self.outcomes[type(effect).__name__] += 1
        match effect:
            case RunStarted(run_id=run_id):
                assert self.run is None, "H55: one run at a time"
                if self.runs:
                    assert self.operator_resets == 1, "H55: one reset between two runs"
                else:
                    assert self.operator_resets <= 1, "H15: only a failure before the first run resets there"
                self.run, self.runs, self.operator_resets = run_id, self.runs + 1, 0
            case RunEnded(run_id=run_id):
                self._run_ended(effect)
            case AttemptAccepted():
                self._accepted(effect)
            case SubtaskReady(attempt=a):
                assert self.alive[a.subtask].get(a.attempt) == a.task_attempt_id, "H11: alive at this moment"
                assert (a.subtask, a.attempt) not in self.ready, "H10: ready once"
                assert self.simulation is not None
                assert a.task_attempt_id not in self.simulation.delivered_ends, "H11: ready after its end was known"
                self.ready.add((a.subtask, a.attempt))
            case SubtaskFailed(attempt=a, reason=reason):
                self.reasons[a.task_attempt_id] = reason
                if a.attempt in self.alive[a.subtask]:
                    self._count_kill(a.subtask, reason)
                if a.attempt in self.alive[a.subtask]:
                    del self.alive[a.subtask][a.attempt]
                elif a.attempt in self.finished[a.subtask]:
                    assert reason.kind is FailureKind.REVOKED, "H17"
                    del self.finished[a.subtask][a.attempt]
                else:
                    self._new_number(a.subtask, a.attempt)  # H11: never ready, but reported failed
                self.owes_reset.add(a.subtask)
            case SubtaskFinished(attempt=a):
                self.finished[a.subtask][a.attempt] = self.alive[a.subtask].pop(a.attempt)
            case SubtaskReset(subtask=subtask):
                assert not self.alive[subtask], "H13: reset only when none is left"
                assert not self.finished[subtask]
                assert subtask in self.owes_reset, "H10: reset only after a failure"
                self.owes_reset.discard(subtask)
            case OperatorReset():
                assert not any(self.alive.values()), "H15: every live attempt was reported failed before"
                self.owes_reset.clear()
                self.operator_resets += 1
            case _:
                pass

    def _new_number(self, subtask: int, number: int) -> None:
        assert number > self.numbers[subtask], "H2: numbers rise strictly"
        self.numbers[subtask] = number

    def _count_kill(self, subtask: int, reason: FailureReason) -> None:
        """Spark never gives up a task that is killed again and again."""
        if reason.kind in (FailureKind.CONFIRMATION_TIMEOUT, FailureKind.CONNECTION_LOST):
            assert self.simulation is not None
            self.kills[subtask] += 1
            assert self.kills[subtask] <= (self.simulation.chances.attempts_max or 4), f"H69: {reason}"

    def _accepted(self, effect: AttemptAccepted) -> None:
        assert self.simulation is not None
        a = effect.attempt
        assert effect.run_id == self.run, "an attempt of no run"
        self.operator_resets = 0
        self._new_number(a.subtask, a.attempt)
        assert not self.finished[a.subtask], "H10: beside a success"
        if not self.alive[a.subtask]:
            assert a.subtask not in self.owes_reset, "H10: failed, but not reset"
        elif not self.lossy:
            tasks = self.simulation.stages[effect.run_id].tasks
            for rival in self.alive[a.subtask].values():
                one, other = tasks[rival], tasks[a.task_attempt_id]
                first, second = sorted((one, other), key=lambda task: task.id)
                overlap = first.ended_at is None or first.ended_at > second.started_at
                assert overlap, f"H13: {first} and {second} never ran at the same time"
        self.alive[a.subtask][a.attempt] = a.task_attempt_id

    def _run_ended(self, effect: RunEnded) -> None:
        assert self.simulation is not None
        assert self.run == effect.run_id
        assert not any(self.alive.values()), "H57: every attempt was failed or finished before"
        stage = self.simulation.stages[effect.run_id]
        if effect.succeeded:
            for subtask in range(stage.partitions):
                tasks = list(self.finished[subtask].values())
                if not tasks and self.lossy and self._revoked_for_nothing(stage, subtask):
                    continue
                assert len(tasks) == 1, f"a good run needs one success of subtask {subtask}: {tasks}"
                if not self.lossy:  # with facts missing it may be a copy of the one that Spark took
                    assert stage.tasks[tasks[0]].state is TaskState.SUCCEEDED, "its task did not succeed"
                    assert not stage.tasks[tasks[0]].revoked, "H17: the success was revoked"
        self.run = None
        self.finished.clear()
        self.kills.clear()
        self.owes_reset.clear()

    def _revoked_for_nothing(self, stage: Stage, subtask: int) -> bool:
        """With its facts lost, a task beside a zombie looks like a rerun after the zombie's success.

        Then the same splits are handed out again (H56), which is harmless: Spark counts the one or the other.
        """
        winner = stage.winners.get(subtask)
        reason = None if winner is None else self.reasons.get(winner)
        return reason is not None and reason.kind is FailureKind.REVOKED

    def check_after_step(self, simulation: Simulation) -> None:
        """Nobody stays alive for us who has been dead for long (H19); no task waits for its answer for ever."""
        for stage in simulation.stages.values():
            for task in stage.tasks.values():
                if task.ended_at is not None and simulation.now - task.ended_at > HEALED_WITHIN_S:
                    for alive in self.alive.values():
                        assert task.id not in alive.values(), f"{task} is still alive for the coordinator"

    def check_at_end(self, simulation: Simulation) -> None:
        assert all(not attempts for attempts in self.alive.values())
        for stage in simulation.stages.values():
            for task in stage.tasks.values():
                if task.started_at < simulation.now - 100 and task.state is TaskState.RUNNING:
                    assert task.answered, f"{task} has waited for ever"
        if not self.lossy:
            self._check_kinds(simulation)

    def _check_kinds(self, simulation: Simulation) -> None:
        """With every fact there, each end is told as what it was; only a look may overtake a fact on its way."""
        for stage in simulation.stages.values():
            for task in stage.tasks.values():
                reason = self.reasons.get(task.id)
                if reason is None:
                    continue
                if reason.kind is FailureKind.LOST_FACT:
                    assert "status" in reason.text, f"no fact was lost: {reason}"
                if reason.kind is FailureKind.FAILED:
                    assert task.state is TaskState.ENDED, f"{task} was told as {reason}"


def run_history(seed: int, chances: Chances, jobs: int = 3) -> tuple[Simulation, Checker]:
    checker = Checker(lossy=chances.drop > 0)
    simulation = Simulation(seed, chances, checker, checker.check_after_step)
    checker.simulation = simulation
    try:
        simulation.run(jobs, until=600.0)
        checker.check_at_end(simulation)
    except AssertionError:
        print(f"seed {seed}, {chances}")
        print("\n".join(simulation.story[-400:]))
        raise
    return simulation, checker


@pytest.mark.parametrize("seed", range(60))
def test_a_plausible_history_keeps_the_order_of_the_contract(seed: int) -> None:
    run_history(seed, Chances())  # H2, H10, H11, H13, H17, H55, H57


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_doubled_facts_change_nothing(seed: int) -> None:
    run_history(seed, Chances(double=0.3))  # H19


@pytest.mark.parametrize("seed", range(2000, 2080))
def test_dropped_facts_are_healed(seed: int) -> None:
    run_history(seed, Chances(drop=0.2, double=0.1))  # H19


@pytest.mark.parametrize("seed", range(3000, 3040))
def test_a_barrier_stage_fails_over_as_a_whole(seed: int) -> None:
    run_history(seed, Chances(barrier=True, double=0.1))  # H15


@pytest.mark.parametrize("seed", range(4000, 4060))
def test_two_actions_at_the_same_time_never_mix(seed: int) -> None:
    run_history(seed, Chances(overlaps=0.5, double=0.1, drop=0.1 * (seed % 2)))  # H55


@pytest.mark.parametrize("seed", range(5000, 5040))
def test_a_coordinator_that_fails_is_reset_once_before_the_next_run(seed: int) -> None:
    run_history(seed, Chances(coordinator_fails=0.6, drop=0.1 * (seed % 2)))  # H8, H15


@pytest.mark.parametrize("seed", range(6000, 6060))
def test_zombies_copies_and_lost_executors_together(seed: int) -> None:
    run_history(seed, Chances(fetch_fails=1.0, executor_lost=1.0, speculates=0.4, drop=0.15 * (seed % 2)))  # H13


@pytest.mark.parametrize("seed", range(8000, 8040))
def test_attempts_that_are_killed_again_and_again_end_the_job(seed: int) -> None:
    chances = Chances(condemned=1.0, job_cancelled=0.0, attempts_max=(1, 2, None)[seed % 3], drop=0.1 * (seed % 2))
    simulation, _ = run_history(seed, chances)  # H69
    assert all(stage.over for stage in simulation.stages.values()), "a job goes on although its attempts are killed"


def test_the_histories_reach_every_effect() -> None:
    seen: set[str] = set()
    for seed in range(7000, 7030):
        _, checker = run_history(seed, Chances(overlaps=0.3, coordinator_fails=0.3, drop=0.1))
        seen |= set(checker.outcomes)
    assert seen == {effect.__name__ for effect in get_args(LedgerEffect)}
