"""What the bridge is told, against what it decides in the same step: nothing of it may be late, or meet another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from actors.coordination.messages import LedgerDecided
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

_KILLED_BY_US = (FailureKind.CONFIRMATION_TIMEOUT, FailureKind.CONNECTION_LOST)


class BridgeChecker:
    """One application's. Tasks are named by their task attempt id. ``attempts_max`` is as in ``LedgerConfig``."""

    def __init__(self, attempts_max: int) -> None:
        self._attempts_max = attempts_max
        self._killed: Counter[int] = Counter()  # in the present run: how often each subtask was killed for its fault
        self._ended: dict[int, TaskOutcome] = {}  # the first end that was told of each
        self._stages: set[int] = set()  # of which the bridge knows
        self._accepted: dict[int, int] = {}  # in the present run, neither failed nor finished: the subtask of each
        self._finished: set[int] = set()  # in the present run
        self._run_id = -1  # -1: there is none
        self._jobs: dict[int, tuple[int, ...]] = {}  # that run, as far as the bridge knows: their stages
        self._doomed: dict[int, float] = {}  # jobs of a run that has failed as a whole: since when
        self._over: set[int] = set()  # jobs that have ended, or are being cancelled

    def cancelled(self, job_id: int) -> None:
        """Spark is asked to cancel this job."""
        self._doomed.pop(job_id, None)
        self._over.add(job_id)

    def judge(self, item: object, told: Sequence[object], now: float) -> None:
        """``item`` was handled by the bridge, which told the tracker this."""
        self._judge_jobs(item, now)
        fact = item.fact if isinstance(item, RelayedFact) else None
        if isinstance(fact, StageSubmitted | TaskStarted):
            self._stages.add(fact.stage_id)
        news = isinstance(fact, TaskEnded) and self._is_news(fact)
        before = dict(self._accepted)
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
        """Spark counts no kill, so the ledger must: the run fails with the last one that is allowed (H69)."""
        self._killed[attempt.subtask] += 1
        killed = self._killed[attempt.subtask]
        demand(killed <= self._attempts_max, f"H69: {attempt} is killed ({reason}), number {killed} of its subtask")

    def _judge_jobs(self, item: object, now: float) -> None:
        """A run that fails as a whole ends its job, and does not wait until Spark gives it up (H15)."""
        match item.fact if isinstance(item, RelayedFact) else item:
            case JobStarted(job_id, stage_ids):
                self._jobs[job_id] = stage_ids
            case JobEnded(job_id=job_id):
                self.cancelled(job_id)
            case GlobalFailureRaised():
                for job_id in sorted(self._jobs.keys() - self._over):
                    if self._run_id in self._jobs[job_id]:
                        self._doomed.setdefault(job_id, now)
        for job_id, since in self._doomed.items():
            demand(now <= since + LATE_S, f"H15: the run of job {job_id} has failed, and nobody cancels the job")

    def _check_superseded(self, winner: ExecutionAttempt, before: dict[int, int]) -> None:
        """One success ends whatever else of its subtask was alive, in the same step (H12)."""
        left = [tid for tid, subtask in before.items() if subtask == winner.subtask and tid in self._accepted]
        demand(not left, f"H12: {winner} has succeeded, and tasks {left} of its subtask are not superseded")

    def _is_news(self, fact: TaskEnded) -> bool:
        if fact.stage_id not in self._stages:  # of a stage of which nothing else has come: forgotten
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
                self._accepted[tid] = attempt.subtask
            case RunStarted(run_id=run_id):
                self._run_id = run_id
                self._killed.clear()
            case SubtaskFinished(attempt=attempt):
                self._accepted.pop(attempt.task_attempt_id, None)
                self._finished.add(attempt.task_attempt_id)
            case SubtaskFailed(attempt, reason):
                was_accepted = self._accepted.pop(attempt.task_attempt_id, None) is not None
                self._finished.discard(attempt.task_attempt_id)
                if was_accepted and reason.kind in _KILLED_BY_US:
                    self._count_kill(attempt, reason)
                if isinstance(item, AttemptCondemned) and reason.kind is FailureKind.CONFIRMATION_TIMEOUT:
                    silent = item.task_attempt_id
                    demand(attempt.task_attempt_id == silent, f"H25: task {silent} is silent, and {attempt} is failed")
            case RunEnded():
                self._accepted.clear()
                self._finished.clear()
                self._run_id = -1
