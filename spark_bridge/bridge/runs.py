# SPDX-License-Identifier: Apache-2.0

"""The operators that have a run now, the Spark jobs of these runs, and the actions that they belong to."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from protocol.attempts import AttemptAccepted, LedgerEffect, RunEnded, RunStarted
from protocol.describing import is_a
from protocol.errors import RunRefused
from protocol.facts import ApplicationEnded, EngineFact, JobEnded, JobStarted
from spark_bridge.common.errors import SidecarError

__all__ = ["ActiveStage", "InheritedRuns", "JobsOfAction", "RunningJobs", "why_worker_died"]

ACTIONS_KEPT = 4096
"""The number of stages that are remembered with their action, more than can run at the same time."""

_WORKER_DIED = "Python worker exited unexpectedly (crashed)"
_FAILED_ONCE = "failed 1 times"
"""How Spark says that it does not run a task again, because its master allows no failure."""


def why_worker_died(reason: str) -> str:
    """What a user should know of a job that Spark failed for this reason, if a worker's process died; else empty."""
    if _WORKER_DIED not in reason:
        return ""
    why = (
        "the Python process of a task has died: it was killed, most often by the system because memory ran out, or "
        "native code in it crashed. Use less memory in each task, or see the log of the system"
    )
    if _FAILED_ONCE not in reason:
        return why
    return (
        f"{why}. Spark has not run the task again: local[N] and spark.task.maxFailures=1 allow no failure, and "
        "local[N,F], such as local[2,4], allows F-1 of each task"
    )


@dataclass(slots=True)
class JobsOfAction:
    """How many jobs over one operator the last action seems to have made, each over some of the partitions (H55).

    ``take`` and similar actions run job after job. The first of them computes partition 0, and no later one does.
    """

    count: int = 0
    _later: bool = False

    def note(self, effect: LedgerEffect) -> None:
        match effect:
            case RunStarted():
                self._later = True
            case AttemptAccepted(attempt=attempt) if attempt.subtask == 0:
                self._later = False
            case RunEnded(computed=computed):
                self.count = 0 if not computed else self.count + 1 if self._later and self.count else 1


@dataclass(slots=True)
class _Action:
    """One call of an action by ``run``. Its operators are those that are ``named``, else those whose runs have its id.

    If no run has its id, they are those whose runs belong to no action and began during the call. So an action keeps
    the runs of its threads even if these do not inherit Spark's local properties.
    """

    named: frozenset[str] | None
    marked: set[str] = field(default_factory=set)
    unmarked: set[str] = field(default_factory=set)
    failed_count: int = 0
    unmarked_failed_count: int = 0
    cause: BaseException | None = None
    unmarked_cause: BaseException | None = None
    why: str = ""  # the latest run failed
    rescaled: int | None = None  # see ``RunningJobs.rescaled``

    @property
    def operator_ids(self) -> frozenset[str]:
        return self.named if self.named is not None else frozenset(self.marked or self.unmarked)

    @property
    def failures(self) -> tuple[int, BaseException | None]:
        if self.named is None and not self.marked:
            return self.unmarked_failed_count, self.unmarked_cause
        return self.failed_count, self.cause


class RunningJobs:
    """Updated by the bridge, and used to cancel the jobs when the bridge is gone. Loop only."""

    def __init__(self) -> None:
        self._stages_of_job: dict[int, frozenset[int]] = {}
        self._run_of_operator: dict[str, int] = {}
        self._marked_failed: set[int] = set()
        self._action_of_run: dict[int, str] = {}
        self._action_of_operator: dict[str, str] = {}  # of its latest run
        self._actions: dict[str, _Action] = {}
        self._action_of_job: dict[int, str] = {}
        self._stopped: dict[str, str] = {}  # actions of which no job may run any more, and why
        self.application_ended = False
        self._refused: dict[str, RunRefused] = {}  # by operator: of the run that is about to start

    def hear(self, fact: EngineFact) -> None:
        """Spark reports a fact, in the order of the bus."""
        match fact:
            case JobStarted(job_id=job_id, stage_ids=stage_ids, action=action):
                self._stages_of_job[job_id] = frozenset(stage_ids)
                if action:
                    self._action_of_job[job_id] = action
            case JobEnded(job_id=job_id):
                self._stages_of_job.pop(job_id, None)
                self._action_of_job.pop(job_id, None)
            case ApplicationEnded():
                self._stages_of_job.clear()
                self._action_of_job.clear()
                self.application_ended = True

    def note(self, effect: LedgerEffect) -> None:
        """The ledger has made a decision."""
        match effect:
            case RunStarted(operator_id, run_id):
                self._run_of_operator[operator_id] = run_id
                self._belongs(operator_id, self._action_of_run.get(run_id, ""))
                if operator_id in self._refused:
                    self.failed(operator_id, self._refused.pop(operator_id))
            case RunEnded(operator_id=operator_id, run_id=run_id, succeeded=succeeded, reason=reason):
                self._run_of_operator.pop(operator_id, None)
                if run_id not in self._run_of_operator.values():
                    self._action_of_run.pop(run_id, None)
                if not succeeded:
                    self.failed(operator_id, why=reason)

    def registered(self, run_id: int, action_id: str) -> None:
        """A task of this run names the action that its job belongs to. Comes before the run is known."""
        if action_id and run_id not in self._action_of_run:
            while len(self._action_of_run) >= ACTIONS_KEPT:
                del self._action_of_run[next(iter(self._action_of_run))]
            self._action_of_run[run_id] = action_id

    def mark_failed(self, run_id: int, operator_id: str) -> bool:
        """Record that an inherited run cannot continue; returns False if that is already known."""
        news = run_id not in self._marked_failed
        self._marked_failed.add(run_id)
        if news:
            self._belongs(operator_id, self._action_of_run.get(run_id, ""))
            self.failed(operator_id)
        return news

    # --- actions --------------------------------------------------------------------------------------------------

    def begin_action(self, action_id: str, named: frozenset[str] | None, *, found: bool = False) -> None:
        """The action is about to be called. If ``found``, it began under an earlier sidecar and may have runs."""
        action = self._actions[action_id] = _Action(named)
        if found:
            for operator_id, its_action in self._action_of_operator.items():
                if its_action == action_id:
                    action.marked.add(operator_id)
                elif not its_action:
                    action.unmarked.add(operator_id)

    def end_action(self, action_id: str) -> None:
        self._actions.pop(action_id, None)

    def stop_actions(self, action_ids: Collection[str], why: str) -> tuple[int, ...]:
        """No job of these actions may run any more. Returns those that do."""
        for action_id in action_ids:
            while len(self._stopped) >= ACTIONS_KEPT:
                del self._stopped[next(iter(self._stopped))]
            self._stopped[action_id] = why
        return self.jobs_of(action_ids)

    def why_stopped(self, action_id: str) -> str:
        """Why no job of the action may run any more; empty if they may."""
        return self._stopped.get(action_id, "")

    def jobs_of(self, action_ids: Collection[str]) -> tuple[int, ...]:
        """The jobs of these actions that have not ended, as far as their start is known."""
        return tuple(sorted(job_id for job_id, action_id in self._action_of_job.items() if action_id in action_ids))

    @property
    def stopped_jobs(self) -> tuple[int, ...]:
        """The jobs of stopped actions that have not ended."""
        return self.jobs_of(self._stopped)

    @property
    def action_ids(self) -> frozenset[str]:
        """The actions that are being called now."""
        return frozenset(self._actions)

    def knows(self, action_id: str) -> bool:
        return action_id in self._actions

    def operators_of(self, action_id: str) -> frozenset[str]:
        """The operators whose tasks have run in this action, as far as is known now."""
        action = self._actions.get(action_id)
        return frozenset() if action is None else action.operator_ids

    def ran(self, action_id: str) -> bool:
        """Whether a task of an operator has run in this action, as far as is known now."""
        action = self._actions[action_id]
        return bool(action.marked or action.unmarked)

    def action_of(self, operator_id: str) -> str:
        """The id of the call of an action that the operator's latest run belongs to; empty if that is not known."""
        marked = self._action_of_operator.get(operator_id, "")
        possible = [
            action_id
            for action_id, action in self._actions.items()
            if operator_id in (action.named if action.named is not None else action.unmarked)
        ]
        return marked or (possible[0] if len(possible) == 1 else "")

    def failures_of(self, action_id: str) -> tuple[int, BaseException | None]:
        """How often its runs and their coordinators have failed since it began, and the last coordinator's cause.

        Without such a cause, it is why the last run failed, for an action that has returned nevertheless.
        """
        action = self._actions[action_id]
        count, cause = action.failures
        if count and cause is None and action.why:
            cause = SidecarError(
                f"a run failed, although the action returned: {action.why}. Allow a restart, or call run again with "
                "the same action and input_id; actions over one operator must be called one after the other"
            )
        return count, cause

    def end_for_rescale(self, operator_id: str) -> frozenset[str]:
        """Return the actions that run the operator, or are about to run it as they have said.

        From now on, the end of one of their runs is not a failure, unless a coordinator is its cause.
        """
        if operator_id in self._run_of_operator:
            action_ids = {self.action_of(operator_id)} & self._actions.keys()
        else:
            action_ids = {
                action_id
                for action_id, action in self._actions.items()
                if operator_id in (action.named or ()) and operator_id not in action.marked | action.unmarked
            }
        for action_id in action_ids:
            self._actions[action_id].rescaled = 0
        return frozenset(action_ids)

    def rescaled(self, action_id: str) -> int | None:
        """How many runs of this action have ended for another parallelism; None if it need not be called again."""
        return self._actions[action_id].rescaled

    def failed(self, operator_id: str, cause: BaseException | None = None, why: str = "") -> None:
        """A run has failed, and ``why`` if the ledger says that, or a coordinator has failed because of ``cause``.

        A failure between two runs belongs to the action of the earlier run. Only the refusal of a run belongs to the
        action of that run, which may be about to start.
        """
        if is_a(cause, RunRefused) and operator_id not in self._run_of_operator:
            self._refused[operator_id] = cause
            return
        its_action = self._action_of_operator.get(operator_id, "")
        for action_id, action in self._actions.items():
            if action.rescaled is not None and cause is None and operator_id in action.operator_ids:
                action.rescaled += 1
            elif operator_id in action.named if action.named is not None else its_action == action_id:
                action.failed_count += 1
                action.cause = cause or action.cause
                action.why = f"operator {operator_id!r}: {why}" if why else action.why
            elif operator_id in action.unmarked and not its_action:
                action.unmarked_failed_count += 1
                action.unmarked_cause = cause or action.unmarked_cause
                action.why = f"operator {operator_id!r}: {why}" if why else action.why

    def _belongs(self, operator_id: str, action_id: str) -> None:
        self._action_of_operator[operator_id] = action_id
        if action_id in self._actions:
            self._actions[action_id].marked.add(operator_id)
        elif not action_id:
            for action in self._actions.values():
                action.unmarked.add(operator_id)

    # --- jobs -----------------------------------------------------------------------------------------------------

    @property
    def operator_ids(self) -> list[str]:
        """The operators that have a run."""
        return sorted(self._run_of_operator)

    @property
    def job_ids(self) -> list[int]:
        """The jobs of their runs, and of actions that are stopped, as far as their start is known."""
        runs = set(self._run_of_operator.values())
        of_runs = {job_id for job_id, stages in self._stages_of_job.items() if stages & runs}
        return sorted(of_runs.union(self.stopped_jobs))


# --- runs of an earlier sidecar -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ActiveStage:
    """A stage of a running job, and how many of its tasks have succeeded so far."""

    job_id: int
    stage_id: int
    succeeded: int


class InheritedRuns:
    """The runs that a sidecar finds when it takes over a driver with running jobs, because their earlier one has died.

    The new coordinators start from the last completed checkpoint, so every attempt that talked to the dead sidecar must
    start from there too. It is killed through Spark, which starts the next attempt and does not count that as a
    failure. Spark does not run a task again that has already succeeded. Then the job cannot continue, and fails as a
    whole (H15). Without ``resume`` no run may continue, because the user prefers failed jobs.
    """

    def __init__(self, stages: Iterable[ActiveStage] = (), *, resume: bool = True) -> None:
        self._stages: dict[int, list[ActiveStage]] = {}
        self._resume = resume
        for stage in stages:
            self._stages.setdefault(stage.stage_id, []).append(stage)

    def job_stages(self) -> dict[int, tuple[int, ...]]:
        """The running jobs and their stages."""
        jobs: dict[int, list[int]] = {}
        for stages in self._stages.values():
            for stage in stages:
                jobs.setdefault(stage.job_id, []).append(stage.stage_id)
        return {job_id: tuple(sorted(stages)) for job_id, stages in jobs.items()}

    def why_not_resumable(self, run_id: int) -> tuple[str, tuple[int, ...]]:
        """Why this run cannot continue, and the jobs to cancel; empty if it can, or began after the takeover."""
        stages = self._stages.get(run_id, [])
        succeeded = max((stage.succeeded for stage in stages), default=0)
        if not stages or (self._resume and not succeeded):
            return "", ()
        why = (
            f"{succeeded} of its tasks had already succeeded, and Spark does not run them again"
            if self._resume
            else "the sidecar was started with --takeover fail"
        )
        text = (
            f"the sidecar of this job died and was started again, and the job cannot continue: {why}; run the job again"
        )
        return text, tuple(stage.job_id for stage in stages)
