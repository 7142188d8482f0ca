# SPDX-License-Identifier: Apache-2.0

"""Checks the bridge's decisions against its input in the same step: each must be timely and correctly addressed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from actors.coordination.engine.messages import LedgerDecided
from protocol.attempts import (
    AttemptAccepted,
    AttemptCondemned,
    FailureKind,
    FailureReason,
    GlobalFailureRaised,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
)
from protocol.facts import JobEnded, JobStarted, StageSubmitted, TaskEnded, TaskOutcome, TaskStarted
from protocol.ids import ExecutionAttempt
from spark_bridge.bridge.relay.records import RelayedFact
from tests.simulation.checkers import LATE_S, demand

_SILENT = (FailureKind.CONFIRMATION_TIMEOUT, FailureKind.HEARTBEAT_TIMEOUT)
_KILLED_BY_US = (*_SILENT, FailureKind.CONNECTION_LOST, FailureKind.UNUSABLE)


class BridgeChecker:
    """Checks the bridge of one application. Task attempt ids name tasks. ``attempts_max`` is as in ``LedgerConfig``."""

    def __init__(self, attempts_max: int) -> None:
        self._attempts_max = attempts_max
        self.forged: set[int] = set()  # task ids that hostile tasks claim, and Spark has never given out
        self._superseded: dict[int, int] = {}  # in the present step: the subtask of each
        self._killed: Counter[int] = Counter()  # in the present run: how often each subtask was killed for its fault
        self._ended: dict[int, TaskOutcome] = {}  # the first reported end of each task
        self._stages: set[int] = set()  # known to the bridge
        self._accepted: dict[int, int] = {}  # in the present run, neither failed nor finished: the subtask of each
        self._finished: set[int] = set()  # in the present run
        self._run_id = -1  # -1: no run
        self.run_begins: Callable[[], None] = lambda: None
        self._jobs: dict[int, tuple[int, ...]] = {}  # that run, as far as the bridge knows: their stages
        self._failed_jobs: dict[int, float] = {}  # jobs of a run that has failed as a whole: since when
        self._over: set[int] = set()  # jobs that have ended, or are being cancelled

    def cancelled(self, job_id: int) -> None:
        """Record that Spark is asked to cancel this job."""
        self._failed_jobs.pop(job_id, None)
        self._over.add(job_id)

    def judge(self, item: object, told: Sequence[object], now: float) -> None:
        """Judge a step in which the bridge handled ``item`` and sent ``told`` to the tracker."""
        self._judge_jobs(item, now)
        fact = item.fact if isinstance(item, RelayedFact) else None
        if isinstance(fact, StageSubmitted | TaskStarted):
            self._stages.add(fact.stage_id)
        news = isinstance(fact, TaskEnded) and self._is_news(fact)
        before = dict(self._accepted)
        self._superseded.clear()
        decisions = [message for message in told if isinstance(message, LedgerDecided)]
        for message in decisions:
            self._decided(item, message)
        for message in decisions:
            if isinstance(message.decision, SubtaskFinished):
                self._check_superseded(message.decision.attempt, before)
        if isinstance(fact, TaskEnded) and news and fact.outcome is not TaskOutcome.SUCCESS:
            tid = fact.task_attempt_id
            alive = tid in self._accepted or tid in self._finished
            demand(not alive, f"H12: the end of task {tid} was told, and its failure is not reported")

    def _count_kill(self, attempt: ExecutionAttempt, reason: FailureReason) -> None:
        """Count a kill: Spark does not count kills, so the ledger must fail the run at the last allowed one (H69)."""
        self._killed[attempt.subtask] += 1
        killed = self._killed[attempt.subtask]
        demand(killed <= self._attempts_max, f"H69: {attempt} is killed ({reason}), number {killed} of its subtask")

    def _judge_jobs(self, item: object, now: float) -> None:
        """Check that a run that fails as a whole ends its job, without waiting for Spark to give up (H15)."""
        match item.fact if isinstance(item, RelayedFact) else item:
            case JobStarted(job_id, stage_ids):
                self._jobs[job_id] = stage_ids
            case JobEnded(job_id=job_id):
                self.cancelled(job_id)
            case GlobalFailureRaised():
                for job_id in sorted(self._jobs.keys() - self._over):
                    if self._run_id in self._jobs[job_id]:
                        self._failed_jobs.setdefault(job_id, now)
        for job_id, since in self._failed_jobs.items():
            demand(now <= since + LATE_S, f"H15: the run of job {job_id} has failed, and nobody cancels the job")

    def _check_superseded(self, winner: ExecutionAttempt, before: dict[int, int]) -> None:
        """Check that one success ends every other live attempt of its subtask in the same step (H12)."""
        left = [tid for tid, subtask in before.items() if subtask == winner.subtask and tid in self._accepted]
        demand(not left, f"H12: {winner} has succeeded, and tasks {left} of its subtask are not superseded")

    def _check_claim(self, claim: ExecutionAttempt) -> None:
        """Check that a claim that Spark never confirms is accepted only where no attempt lives, and ends none (H75)."""
        real = (self._accepted | self._superseded).items()
        beside = [tid for tid, subtask in real if subtask == claim.subtask and tid not in self.forged]
        demand(not beside, f"H75: {claim} is accepted beside tasks {beside}, and Spark does not know it")

    def _is_news(self, fact: TaskEnded) -> bool:
        if fact.stage_id not in self._stages:  # nothing else of this stage has come, so the ledger forgot it
            return False
        before = self._ended.setdefault(fact.task_attempt_id, fact.outcome)
        if before is TaskOutcome.SUCCESS and fact.outcome is TaskOutcome.RESUBMITTED:
            self._ended[fact.task_attempt_id] = fact.outcome
        return before is fact.outcome or fact.outcome is TaskOutcome.RESUBMITTED

    def _decided(self, item: object, message: LedgerDecided) -> None:
        match message.decision:
            case AttemptAccepted(attempt=attempt, run_id=run_id):
                self._stages.add(run_id)
                tid = attempt.task_attempt_id
                end = self._ended.get(tid)
                demand(end in (None, TaskOutcome.SUCCESS), f"H11: task {tid} is accepted, and it is over: {end}")
                if tid in self.forged:
                    self._check_claim(attempt)
                self._accepted[tid] = attempt.subtask
            case RunStarted(run_id=run_id):
                self._run_id = run_id
                self.run_begins()
                self._killed.clear()
            case SubtaskFinished(attempt=attempt):
                self._accepted.pop(attempt.task_attempt_id, None)
                self._finished.add(attempt.task_attempt_id)
            case SubtaskFailed(attempt, reason):
                was_accepted = self._accepted.pop(attempt.task_attempt_id, None) is not None
                if was_accepted and reason.kind is FailureKind.SUPERSEDED:
                    self._superseded[attempt.task_attempt_id] = attempt.subtask
                self._finished.discard(attempt.task_attempt_id)
                if was_accepted and reason.kind in _KILLED_BY_US:
                    self._count_kill(attempt, reason)
                if isinstance(item, AttemptCondemned) and reason.kind in _SILENT:
                    silent = item.task_attempt_id
                    demand(attempt.task_attempt_id == silent, f"H25: task {silent} is silent, and {attempt} is failed")
            case RunEnded():
                self._accepted.clear()
                self._finished.clear()
                self._run_id = -1
