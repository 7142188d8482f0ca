"""The attempts of one operator: accepting, failing, finishing; beginning and ending its runs.

What is decided here is explained at the top of the package. ``judge.py`` decides on registrations.
"""

from __future__ import annotations

from protocol.attempts import kills, unwanted
from protocol.attempts.books import EngineBooks, RecentIds, TaskRecord
from protocol.attempts.entries import AttemptEntry, AttemptState, HeldRegistration, Run, SubtaskEntry
from protocol.attempts.types import (
    AttemptAccepted,
    AttemptCondemned,
    AttemptWord,
    CancelJobs,
    ConnectionExpired,
    FailureKind,
    FailureReason,
    KillTask,
    LedgerConfig,
    LedgerEffect,
    OperatorEnded,
    OperatorOpened,
    OperatorReset,
    RefuseRegistration,
    ReportStale,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.facts import TaskOutcome
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import RefusalCode, RestoreMode

_KINDS = {
    TaskOutcome.FAILED: FailureKind.FAILED,
    TaskOutcome.COMMIT_DENIED: FailureKind.FAILED,
    TaskOutcome.KILLED: FailureKind.KILLED,
    TaskOutcome.RESUBMITTED: FailureKind.REVOKED,
    TaskOutcome.EXECUTOR_LOST: FailureKind.EXECUTOR_LOST,
    TaskOutcome.FETCH_FAILED: FailureKind.FETCH_FAILED,
}

_LEGAL_WORDS: frozenset[tuple[AttemptState, type]] = frozenset(
    {
        # in this state       this may be said; anything else is stale
        (AttemptState.ACCEPTED, OperatorOpened),
        (AttemptState.ACCEPTED, OperatorEnded),
        (AttemptState.ACCEPTED, ConnectionExpired),
        (AttemptState.ACCEPTED, AttemptCondemned),
        (AttemptState.READY, OperatorEnded),
        (AttemptState.READY, ConnectionExpired),
        (AttemptState.READY, AttemptCondemned),
        # ENDING: the operator has ended, so its connection may go, and what is unconfirmed is no failure
        # (H25). Spark may have its success already: giving the attempt up now could count its output twice.
    }
)


class OperatorLedger:
    """One operator's part of the ledger. ``out`` collects effects in their order."""

    def __init__(
        self,
        operator_id: str,
        parallelism: int,
        books: EngineBooks,
        config: LedgerConfig,
        *,
        allow_fewer: bool = False,
    ) -> None:
        self.operator_id = operator_id
        self.parallelism = parallelism
        self.allow_fewer = allow_fewer
        self.books = books
        self.config = config
        self.run: Run | None = None
        self.held: dict[int, HeldRegistration] = {}  # by task id
        self.next_attempt: dict[int, int] = {}  # for the life of the operator, across runs (H2)
        self.reset_due: str | None = None  # the coordinator is to be reset, for this first cause, before an accept
        self.ended_runs = RecentIds()
        self.look_at: float | None = None
        self.asked_again_at: float | None = None  # an answer is awaited, and this is when to ask again
        self.out: list[LedgerEffect] = []
        self.now = 0.0

    # --- small things ---------------------------------------------------------------------------------------

    def want_look(self, at: float) -> None:
        if self.look_at is None or at < self.look_at:
            self.look_at = at

    def task_of(self, task_attempt_id: int) -> TaskRecord | None:
        return None if self.run is None else self.books.task(self.run.run_id, task_attempt_id)

    def why_too_few(self, stage_id: int) -> str:
        """Why the stage cannot run this operator: some subtask has no partition (H58).

        Empty if it can, or if Spark has not said how many partitions there are. The tasks of a stage attempt do not
        count: ``take`` and a retry run a part of the partitions.
        """
        stage = self.books.stages.get(stage_id)
        if self.allow_fewer or stage is None or not 0 < stage.partitions < self.parallelism:
            return ""
        partitions = "1 partition" if stage.partitions == 1 else f"{stage.partitions} partitions"
        return (
            f"operator {self.operator_id!r} has parallelism={self.parallelism}, but the RDD of stage {stage_id} has "
            f"only {partitions}: coordinate it with parallelism={stage.partitions}, call "
            f"repartition({self.parallelism}) before its subtasks, or pass allow_fewer=True to coordinate() if some "
            "subtasks may be missing. Without repartition, adaptive execution chooses a number for each run. After its "
            "subtasks, use repartition() in place of coalesce(), which puts several subtasks into one task"
        )

    def _mint(self, subtask: int, task_attempt_id: int) -> ExecutionAttempt:
        number = self.next_attempt.get(subtask, 0)
        self.next_attempt[subtask] = number + 1
        return ExecutionAttempt(self.operator_id, subtask, number, task_attempt_id)

    def _is_barrier(self, run: Run) -> bool:
        stage = self.books.stages.get(run.run_id)
        return stage is not None and stage.barrier

    def _reset_operator(self) -> None:
        if self.reset_due is not None:
            self.out.append(OperatorReset(self.operator_id, self.reset_due))
            self.reset_due = None

    def _announce_failed(self, attempt: ExecutionAttempt, kind: FailureKind, text: str) -> None:
        self.out.append(SubtaskFailed(attempt, FailureReason(kind, text)))

    def looks_whole(self, run: Run) -> bool:
        """Nobody has said how the run ended, but every partition that Spark has made of it seems to have ended well.

        One of which nothing was ever heard may not have begun: the fact of its start may be the lost one.
        """
        stage = self.books.stages.get(run.run_id)
        partitions = 0 if stage is None else stage.task_count
        return run.looks_whole(partitions or self.parallelism)

    # --- runs -----------------------------------------------------------------------------------------------

    def open_run(self, run_id: int, now: float) -> None:
        """The first registration of a run begins it.

        Deaths that the facts told before it are told now (H11).
        """
        self._reset_operator()
        self.out.append(RunStarted(self.operator_id, run_id))
        self.run = Run(run_id)
        self.want_look(now + self.config.audit_every_s)
        stage = self.books.stage(run_id)
        if not stage.active_jobs:
            self.want_look(now + self.config.heal_after_s)  # the start of its job is late, or lost: a look tells it
        tasks = stage.tasks
        for task_attempt_id in sorted(tasks):
            if tasks[task_attempt_id].end is not None:
                self.task_ended(tasks[task_attempt_id])
        if stage.barrier and stage.latest_attempt > 0:
            self.barrier_attempt_failed(stage.latest_attempt - 1)

    def end_run(self, succeeded: bool, reason: str) -> None:
        """H57.

        With a failed run every live attempt fails (H15); the reset comes before the next run's first
        accept.
        """
        run = self.run
        if run is None:
            return
        succeeded = succeeded and run.failed_cause is None
        if succeeded and (doubt := unwanted.doubtful_success(self, run)):
            succeeded, reason = False, doubt
        for subtask in run.subtasks.values():
            self._end_subtask(subtask, succeeded, reason)
        reason = run.failed_cause or reason
        self.out.append(RunEnded(self.operator_id, run.run_id, succeeded, reason))
        self.run = None
        self.ended_runs.add(run.run_id)
        if self.reset_due is None:
            self.reset_due = reason if reason and not succeeded else f"run {run.run_id} has ended"
        for task_attempt_id in [t for t, h in self.held.items() if h.message.run_id == run.run_id]:
            self.refuse(task_attempt_id, RefusalCode.ATTEMPT_OVER, f"run {run.run_id} has ended")
        if not self.held:
            self.look_at = None

    def _end_subtask(self, subtask: SubtaskEntry, succeeded: bool, reason: str) -> None:
        if succeeded and subtask.finished is None:
            # Spark says that the partition succeeded, so one of these did; its TaskEnded is late or lost.
            living = subtask.living
            said_goodbye = [entry for entry in living if entry.state is AttemptState.ENDING]
            if said_goodbye or len(living) == 1:
                self._finish((said_goodbye or living)[0], subtask)
        for entry in subtask.living:
            entry.state = AttemptState.OVER
            entry.failure = FailureKind.RUN_ENDED
            self._announce_failed(entry.attempt, FailureKind.RUN_ENDED, reason or "the run has ended")
        subtask.owes_reset = False

    def fail_globally(self, cause: str) -> None:
        """H8, H15: latched until the next run's reset; the first cause is kept."""
        if self.reset_due is None:
            self.reset_due = cause
        run = self.run
        if run is None or run.failed_cause is not None:
            return
        run.failed_cause = cause
        stage = self.books.stages.get(run.run_id)
        if stage is None or not stage.active_jobs:
            # The fact of the job's start is lost, so it cannot be cancelled. Its tasks are killed instead, and their
            # retries refused, until Spark gives the job up: a deaf task would hold it up for ever (H48).
            self.out.extend(self._kill_not_counted(entry, cause) for entry in run.living())
        self._fail_all_living(run, FailureKind.GLOBAL_FAILURE, cause)
        self.cancel_jobs()

    def cancel_jobs(self) -> None:
        run = self.run
        stage = None if run is None else self.books.stages.get(run.run_id)
        if run is not None and run.failed_cause is not None and stage is not None and stage.active_jobs:
            self.out.append(CancelJobs(stage.active_jobs, f"operator {self.operator_id!r}: {run.failed_cause}"))

    def _fail_all_living(self, run: Run, kind: FailureKind, text: str) -> None:
        for entry in run.living():
            entry.state = AttemptState.OVER
            entry.failure = kind
            self._announce_failed(entry.attempt, kind, text)
        for subtask in run.subtasks.values():
            subtask.owes_reset = False

    # --- attempts -------------------------------------------------------------------------------------------

    def accept(self, held: HeldRegistration, now: float) -> None:
        """Nothing of the subtask stands in the way any more (H10)."""
        message = held.message
        assert self.run is not None
        self._reset_operator()
        self.want_look(now + self.config.audit_every_s)
        del self.held[held.task_attempt_id]
        subtask = self.run.subtask(message.subtask)
        attempt = self._mint(message.subtask, message.task_attempt_id)
        beside = frozenset(entry.task_attempt_id for entry in subtask.living)
        entry = AttemptEntry(attempt, beside, now, message.mode == RestoreMode.STREAMING)
        subtask.attempts[attempt.task_attempt_id] = self.run.by_task[attempt.task_attempt_id] = entry
        self.out.append(AttemptAccepted(attempt, RestoreMode(message.mode), message.run_id, held.connection_id))

    def refuse(self, task_attempt_id: int, code: RefusalCode, text: str) -> None:
        held = self.held.pop(task_attempt_id)
        self.out.append(RefuseRegistration(held.connection_id, task_attempt_id, code, text))
        if code is not RefusalCode.ATTEMPT_OVER and self.run is not None:
            self.run.told.add(task_attempt_id)  # it dies of the refusal, and was never an attempt of this operator

    def fail(self, entry: AttemptEntry, kind: FailureKind, text: str, *, kill: bool = False) -> None:
        """End an attempt that is alive, or revoke one that has finished.

        Then the reset, if none is left (H13). ``kill``: for its own fault, and so one of ``attempts_max`` (H69).
        """
        run = self.run
        assert run is not None
        too_many = ""
        if kill:
            subtask = run.subtask(entry.attempt.subtask)
            too_many = kills.kill_attempt(self, subtask, entry, str(FailureReason(kind, text)))
        entry.state = AttemptState.OVER
        entry.failure = kind
        self._announce_failed(entry.attempt, kind, text)
        if too_many:
            self.fail_globally(too_many)
        self._after_failure(run, entry.attempt, text or kind.value)

    def _kill_not_counted(self, entry: AttemptEntry, reason: str) -> KillTask:
        attempt = entry.attempt
        return KillTask(attempt.task_attempt_id, reason, self.operator_id, attempt.subtask, attempt.attempt)

    def _after_failure(self, run: Run, attempt: ExecutionAttempt, text: str) -> None:
        if self._is_barrier(run):
            self._fail_barrier_stage(run, attempt, text)
            return
        if run.failed_cause is not None:
            return  # the whole coordinator will be reset (H15)
        subtask = run.subtask(attempt.subtask)
        subtask.owes_reset = True
        if not subtask.living and subtask.finished is None:
            self.out.append(SubtaskReset(self.operator_id, attempt.subtask))
            subtask.owes_reset = False

    def _fail_barrier_stage(self, run: Run, attempt: ExecutionAttempt, text: str) -> None:
        """One failed task of a barrier stage fails them all: a global failover inside the run (H15)."""
        task = self.books.task(run.run_id, attempt.task_attempt_id)
        failed = None if task is None else task.stage_attempt
        if failed is None:
            failed = self.books.stage(run.run_id).latest_attempt
        self._fail_over_barrier_stage(run, failed, f"barrier stage {run.run_id} failed: {attempt}: {text}")

    def _is_echo_of_barrier_failure(self, run: Run, task_attempt_id: int) -> bool:
        """A task without a gateway died with a stage attempt whose failover has been; there is nothing to add."""
        if run.barrier_failed is None:
            return False
        task = self.books.task(run.run_id, task_attempt_id)
        return task is None or task.stage_attempt is None or task.stage_attempt <= run.barrier_failed

    def barrier_attempt_failed(self, failed: int) -> None:
        """The stage's own end or a later attempt of it shows it, should the tasks' facts be lost (H19)."""
        run = self.run
        if run is None or run.failed_cause is not None:
            return
        known = run.barrier_failed is not None and run.barrier_failed >= failed
        if not known or any(self._is_of_stage_attempt(run, entry, failed) for entry in run.entries()):
            self._fail_over_barrier_stage(run, failed, f"barrier stage {run.run_id} failed (attempt {failed})")

    def _is_of_stage_attempt(self, run: Run, entry: AttemptEntry, last: int) -> bool:
        """Not over, and known to be of stage attempt ``last`` or an earlier one."""
        task = self.books.task(run.run_id, entry.task_attempt_id)
        known = None if task is None else task.stage_attempt
        return entry.state is not AttemptState.OVER and known is not None and known <= last

    def _fail_over_barrier_stage(self, run: Run, failed: int, cause: str) -> None:
        run.barrier_failed = max(failed, -1 if run.barrier_failed is None else run.barrier_failed)
        successes = unwanted.perhaps_of_a_later_stage_attempt(self, run, failed)
        for entry in run.entries():
            if entry.state is AttemptState.OVER:
                continue
            # The stage is run again as a whole, and with it what has finished already.
            revoked = entry.state is AttemptState.FINISHED
            entry.state = AttemptState.OVER
            entry.failure = FailureKind.REVOKED if revoked else FailureKind.GLOBAL_FAILURE
            self._announce_failed(entry.attempt, entry.failure, cause)
        for subtask in run.subtasks.values():
            subtask.owes_reset = False
        coordinator_knows = bool(run.told or run.by_task)
        if self.reset_due is None and coordinator_knows:
            self.reset_due = cause
        if successes:
            unwanted.fail_for_success(self, str(successes[0].attempt))

    def _finish(self, entry: AttemptEntry, subtask: SubtaskEntry) -> None:
        """A subtask has one success: whatever else of it is alive is superseded, and dies.

        Spark kills speculative copies itself. A zombie's rival of another stage attempt it lets run, and it
        may use the output of either; killing the rival at once makes it the one that the coordinator knows.
        """
        entry.state = AttemptState.FINISHED
        entry.finished_at = self.now
        self.out.append(SubtaskFinished(entry.attempt))
        for rival in subtask.living:
            reason = FailureReason(FailureKind.SUPERSEDED, f"{entry.attempt} has succeeded")
            self.out.append(self._kill_not_counted(rival, str(reason)))
            self.fail(rival, reason.kind, reason.text)

    # --- what the attempt itself says -----------------------------------------------------------------------

    def word(self, word: AttemptWord, now: float) -> None:
        entry = None if self.run is None else self.run.find(word.task_attempt_id)
        if entry is None and word.task_attempt_id in self.held:
            self._word_about_held(word, now)
            return
        if entry is None or (entry.state, type(word)) not in _LEGAL_WORDS:  # H3, in this one place
            self.out.append(ReportStale(type(word).__name__, self.operator_id, word.task_attempt_id))
            return
        match word:
            case OperatorOpened():
                entry.state = AttemptState.READY
                self.out.append(SubtaskReady(entry.attempt))
            case OperatorEnded(failure=""):
                entry.state = AttemptState.ENDING
                self.want_look(now + self.config.heal_after_s)
            case OperatorEnded(failure=failure):
                self.fail(entry, FailureKind.FAILED, failure)
            case ConnectionExpired():
                self.fail(entry, FailureKind.CONNECTION_LOST, "the task did not come back in time", kill=True)
            case AttemptCondemned(reason=reason):
                self.fail(entry, FailureKind.CONFIRMATION_TIMEOUT, reason, kill=True)

    def _word_about_held(self, word: AttemptWord, now: float) -> None:
        """A task that still waits for its answer has nothing to say, but it can go away."""
        if not isinstance(word, ConnectionExpired | AttemptCondemned):
            self.out.append(ReportStale(type(word).__name__, self.operator_id, word.task_attempt_id))
            return
        message = self.held[word.task_attempt_id].message
        text = "its connection was lost before it was accepted"
        self.out.append(KillTask(word.task_attempt_id, text, self.operator_id, message.subtask))
        self.refuse(word.task_attempt_id, RefusalCode.ATTEMPT_OVER, text)
        if self.run is not None and self.run.run_id == message.run_id and self.run.failed_cause is None:
            self._tell_death_before_accept(message.subtask, word.task_attempt_id, FailureKind.CONNECTION_LOST, text)

    # --- what the engine says about it ----------------------------------------------------------------------

    def task_ended(self, task: TaskRecord) -> None:
        """News of a task of the current run: its end, or that its success is revoked."""
        run = self.run
        assert run is not None
        entry = run.find(task.task_attempt_id)
        if entry is None:
            self._task_without_entry_ended(run, task)
        elif task.end is TaskOutcome.SUCCESS:
            if entry.alive:
                self._finish(entry, run.subtask(entry.attempt.subtask))
            elif entry.state is AttemptState.OVER:
                unwanted.check_success(self, run, entry)
        elif entry.alive or entry.state is AttemptState.FINISHED:
            self.fail(entry, self._kind_of(task, run), task.end_reason)
            unwanted.check_winner(self, run, entry)

    def _kind_of(self, task: TaskRecord, run: Run) -> FailureKind:
        assert task.end is not None
        kind = _KINDS[task.end]
        if kind is FailureKind.KILLED:
            finished = run.subtask(task.partition).finished
            if finished is not None or unwanted.lost_to_another(task):
                return FailureKind.SUPERSEDED
        return kind

    def _task_without_entry_ended(self, run: Run, task: TaskRecord) -> None:
        """Never announced ready, but reported failed (H11)."""
        if task.task_attempt_id in self.held:
            text = f"task {task.task_attempt_id} is over"
            self.refuse(task.task_attempt_id, RefusalCode.ATTEMPT_OVER, text)
        no_place = not 0 <= task.partition < self.parallelism  # -1 is Spark's own word for one that it does not know
        if task.end is TaskOutcome.SUCCESS or no_place or run.failed_cause is not None:
            return
        kind = self._kind_of(task, run)
        self._tell_death_before_accept(task.partition, task.task_attempt_id, kind, task.end_reason)

    def _tell_death_before_accept(self, subtask: int, task_attempt_id: int, kind: FailureKind, text: str) -> None:
        run = self.run
        assert run is not None
        if task_attempt_id in run.told or self._is_echo_of_barrier_failure(run, task_attempt_id):
            return
        run.told.add(task_attempt_id)
        if any(entry.task_attempt_id > task_attempt_id for entry in run.subtask(subtask).living):
            return  # known too late: a failure told now would come between its successor's ready and failed (H10)
        attempt = self._mint(subtask, task_attempt_id)
        self._announce_failed(attempt, kind, text)
        self._after_failure(run, attempt, text or kind.value)
