# SPDX-License-Identifier: Apache-2.0

"""Accepts, fails and finishes the attempts of one operator, and begins and ends its runs.

Only ``OperatorLedger`` changes an ``OperatorRecord``. Its reaction to news of an attempt is in ``records.TABLE``.
``admission`` decides whether a registration is accepted, ``reconciliation`` what Spark's own records mean, and which
successes must not count. These modules only read; this one carries their decisions out. The package's docstring
explains the rules.
"""

from __future__ import annotations

from protocol.attempts import (
    MODES,
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
    admission,
    reconciliation,
)
from protocol.attempts.records import (
    TABLE,
    AttemptRecord,
    AttemptState,
    EngineRecords,
    HeldRegistration,
    News,
    OperatorRecord,
    Outcome,
    RunRecord,
    Seen,
    SubtaskRecord,
    TaskRecord,
    remember,
)
from protocol.describing import type_name
from protocol.facts import StatusReported, TaskOutcome, TaskPlace, TaskState
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import RefusalCode, RestoreMode

SPARK_TASK_FAILURES_MAX = 4
CONFLICT_WAIT_S = 1.0
"""How long a second run whose job has started waits for the end of the first one's job, before Spark is asked."""
"""The default of ``spark.task.maxFailures``."""

_KINDS = {
    TaskOutcome.FAILED: FailureKind.FAILED,
    TaskOutcome.COMMIT_DENIED: FailureKind.FAILED,
    TaskOutcome.KILLED: FailureKind.KILLED,
    TaskOutcome.RESUBMITTED: FailureKind.REVOKED,
    TaskOutcome.EXECUTOR_LOST: FailureKind.EXECUTOR_LOST,
    TaskOutcome.FETCH_FAILED: FailureKind.FETCH_FAILED,
}

NOBODY: frozenset[int] = frozenset()
"""Beside most attempts. Python makes a new object of 216 bytes for each empty frozenset that it is asked for."""


class OperatorLedger:
    """One operator's part of the ledger. ``out`` collects effects in their order."""

    def __init__(self, record: OperatorRecord, engine: EngineRecords, config: LedgerConfig) -> None:
        self.record = record
        self.engine = engine
        self.config = config
        self.out: list[LedgerEffect] = []
        self.now = 0.0

    def want_look(self, at: float) -> None:
        """Query Spark's own records at this time, unless an earlier time is set."""
        if self.record.look_at is None or at < self.record.look_at:
            self.record.look_at = at

    # --- registrations --------------------------------------------------------------------------------------

    def hold(self, held: HeldRegistration) -> None:
        """Hold a registration. It is accepted in the same step if nothing prevents that."""
        self.record.held[held.message.task_attempt_id] = held
        self.settle()
        if held.message.task_attempt_id in self.record.held:
            self.want_look(self.now + self.config.heal_after_s)

    def has_registered(self, task_attempt_id: int) -> bool:
        """Whether this task has registered before. A claim that is over without a confirmation does not count (H75)."""
        run = self.record.run
        entry = None if run is None else run.by_task.get(task_attempt_id)
        if run is None or entry is None:
            return task_attempt_id in self.record.held
        if entry.state is AttemptState.OVER and not self.engine.is_confirmed(run.run_id, task_attempt_id):
            self._forget(run, entry)
            return False
        return True

    def _forget(self, run: RunRecord, entry: AttemptRecord) -> None:
        """Forget a claim, so that the real task can register under this id."""
        del run.by_task[entry.task_attempt_id], run.subtasks[entry.attempt.subtask].attempts[entry.task_attempt_id]
        self.engine.forget_claim(run.run_id, entry.task_attempt_id)

    def settle(self) -> None:
        """Decide on each held registration for which that is possible, the oldest task first."""
        record = self.record
        progress = True
        while progress and record.held:
            progress = False
            for task_attempt_id in sorted(record.held):
                held = record.held.get(task_attempt_id)
                if held is None:
                    continue
                verdict = admission.decide(record, held, self.engine, self.config, self.now)
                if isinstance(verdict, admission.BeginRun):
                    self._begin_run(held.message.run_id)
                    verdict = admission.decide(record, held, self.engine, self.config, self.now)
                if isinstance(verdict, admission.Wait):
                    self._keep_waiting(held, verdict)
                    continue
                progress = True
                if isinstance(verdict, admission.Refusal):
                    self._refuse_for(held, verdict)
                elif isinstance(verdict, admission.Acceptance):
                    self._accept(held, verdict)

    def _keep_waiting(self, held: HeldRegistration, wait: admission.Wait) -> None:
        held.waits_for = wait.waits_for
        soon = held.since + CONFLICT_WAIT_S
        if wait.hurry and held.ask_at != soon:
            held.ask_at = soon
            self.want_look(self.now + CONFLICT_WAIT_S)

    def _refuse_for(self, held: HeldRegistration, refusal: admission.Refusal) -> None:
        message, too_many = held.message, ""
        if refusal.kill and self.record.run is not None:
            subtask = self.record.run.subtasks.setdefault(message.subtask, SubtaskRecord())
            too_many = self._kill(subtask, message.subtask, message.task_attempt_id, refusal.text)
        self.refuse(message.task_attempt_id, refusal.code, refusal.text)
        if too_many:
            self.fail_globally(too_many)

    def refuse(self, task_attempt_id: int, code: RefusalCode, text: str) -> None:
        """Refuse a registration that waits."""
        held = self.record.held.pop(task_attempt_id)
        self.out.append(RefuseRegistration(held.connection_id, task_attempt_id, code, text))
        if code is not RefusalCode.ATTEMPT_OVER:
            self.refused_before_held(task_attempt_id)

    def refused_before_held(self, task_attempt_id: int) -> None:
        """Do not report the end of a task that was refused immediately: it was never an attempt of this operator."""
        if self.record.run is not None:
            self.record.run.told.add(task_attempt_id)

    def _accept(self, held: HeldRegistration, acceptance: admission.Acceptance) -> None:
        """Accept the task, after ending the attempts of the subtask that must go first (H10)."""
        if acceptance.superseded or acceptance.predecessors:
            self._end_earlier(acceptance)
        record, run, message = self.record, self.record.run, held.message
        if run is None or run.failed_cause is not None:
            return  # ending a predecessor has failed the whole job, and the registration is refused next
        if record.reset_due is not None:
            self._reset_operator(record.reset_due)
        self.want_look(self.now + self.config.audit_every_s)
        del record.held[message.task_attempt_id]
        subtask = run.subtasks.setdefault(message.subtask, SubtaskRecord())
        attempt = self._new_attempt(message.subtask, message.task_attempt_id)
        living = [entry.task_attempt_id for entry in subtask.living]
        beside = frozenset(living) if living else NOBODY
        mode = MODES[message.mode]
        entry = AttemptRecord(attempt, beside, self.now, mode is RestoreMode.STREAMING)
        subtask.attempts[message.task_attempt_id] = run.by_task[message.task_attempt_id] = entry
        partitions = self.engine.stages[message.run_id].partitions if record.allow_fewer else 0
        self.out.append(AttemptAccepted(attempt, mode, message.run_id, held.connection_id, partitions))

    def _end_earlier(self, acceptance: admission.Acceptance) -> None:
        for entry in acceptance.superseded:
            if entry.alive:
                self._fail(entry, FailureKind.SUPERSEDED, "a later attempt has taken over", kill=True)
        for entry in acceptance.predecessors:
            if entry.state in (AttemptState.ENDING, AttemptState.FINISHED):
                self._fail(entry, FailureKind.REVOKED, "Spark runs the partition again")
            elif entry.alive:
                self._fail(entry, FailureKind.LOST_FACT, "Spark has started a later attempt of the partition")

    def _new_attempt(self, subtask: int, task_attempt_id: int) -> ExecutionAttempt:
        number = self.record.next_attempt.get(subtask, 0)
        self.record.next_attempt[subtask] = number + 1
        return ExecutionAttempt(self.record.operator_id, subtask, number, task_attempt_id)

    def _reset_operator(self, cause: str) -> None:
        self.out.append(OperatorReset(self.record.operator_id, cause))
        self.record.reset_due = None

    # --- runs -----------------------------------------------------------------------------------------------

    def _begin_run(self, run_id: int) -> None:
        """Begin a run at its first registration, and report the failures that facts told before it (H11)."""
        self.out.append(RunStarted(self.record.operator_id, run_id))  # first: the reset depends on its input (H174)
        if self.record.reset_due is not None:
            self._reset_operator(self.record.reset_due)
        self.record.run = RunRecord(run_id)
        self.want_look(self.now + self.config.audit_every_s)
        stage = self.engine.stages[run_id]
        if all(stage.jobs.values()):  # the start of its job is late or lost: a query tells it
            self.want_look(self.now + self.config.heal_after_s)
        for _, task in sorted(stage.tasks.items()):
            if task.end is not None:
                self.task_ended(task)
        if stage.barrier and stage.latest_attempt > 0:
            self.barrier_attempt_failed(stage.latest_attempt - 1)

    def end_run(self, succeeded: bool, reason: str) -> None:
        """End the run (H57).

        If it failed, every live attempt fails with it (H15). The reset comes before the next run's first accept.
        """
        record, run = self.record, self.record.run
        if run is None:
            return
        job_succeeded = succeeded
        succeeded = succeeded and run.failed_cause is None
        if succeeded and (doubt := reconciliation.doubtful_success(run, self.engine.stages[run.run_id])):
            succeeded, reason = False, doubt
        for subtask in run.subtasks.values():
            self._end_subtask(subtask, succeeded, reason)
        reason = run.failed_cause or reason
        computed, missing = self._left_out(run) if succeeded else (0, 0)
        self.out.append(RunEnded(record.operator_id, run.run_id, succeeded, reason, computed, missing, job_succeeded))
        record.run = None
        remember(record.ended_runs, run.run_id)
        if record.reset_due is None:
            record.reset_due = reason if reason and not succeeded else f"run {run.run_id} has ended"
        for task_attempt_id in [t for t, h in record.held.items() if h.message.run_id == run.run_id]:
            self.refuse(task_attempt_id, RefusalCode.ATTEMPT_OVER, f"run {run.run_id} has ended")
        if not record.held:
            record.look_at = None

    def _left_out(self, run: RunRecord) -> tuple[int, int]:
        """Of a run that succeeded, the ``computed`` and the ``missing`` of its ``RunEnded``."""
        stage = self.engine.stages[run.run_id]
        if stage.task_count < stage.partitions:
            return stage.task_count, 0
        if stage.task_count > stage.partitions or self.record.allow_fewer:
            return 0, 0
        came = sum(bool(subtask.attempts) for subtask in run.subtasks.values())
        return 0, self.record.parallelism - came

    def _end_subtask(self, subtask: SubtaskRecord, succeeded: bool, reason: str) -> None:
        if succeeded and subtask.finished is None:
            # Spark says that the partition succeeded, so one of these did, and its TaskEnded is late or lost.
            living = subtask.living
            ended_well = [entry for entry in living if entry.state is AttemptState.ENDING]
            if ended_well or len(living) == 1:
                self._finish((ended_well or living)[0], subtask)
        for entry in subtask.living:
            self._end_attempt(entry, FailureKind.RUN_ENDED, reason or "the run has ended")
        subtask.owes_reset = False

    def shut(self, reason: str) -> None:
        """End everything: the operator is removed, or the application ends."""
        self.end_run(False, reason)
        for task_attempt_id in list(self.record.held):
            self.refuse(task_attempt_id, RefusalCode.SHUTTING_DOWN, reason)
        self.record.look_at = None

    def fail_globally(self, cause: str) -> None:
        """Fail the run until the next run's reset; the first cause is kept (H8, H15)."""
        if self.record.reset_due is None:
            self.record.reset_due = cause
        run = self.record.run
        if run is None or run.failed_cause is not None:
            return
        run.failed_cause = cause
        if not self.engine.active_jobs(run.run_id):
            # The fact of the job's start is lost, so the job cannot be cancelled. Its tasks are killed instead, and
            # their retries refused, until Spark gives the job up: an unresponsive task would block it forever (H48).
            self.out.extend(self._kill_not_counted(entry, cause) for entry in run.living())
        self._fail_all_living(run, FailureKind.GLOBAL_FAILURE, cause)
        self.cancel_jobs()

    def cancel_jobs(self) -> None:
        """Have Spark cancel the jobs of a run that has failed."""
        run = self.record.run
        if run is None or run.failed_cause is None:
            return
        if jobs := self.engine.active_jobs(run.run_id):
            self.out.append(CancelJobs(jobs, f"operator {self.record.operator_id!r}: {run.failed_cause}"))

    def _fail_all_living(self, run: RunRecord, kind: FailureKind, text: str) -> None:
        for entry in run.living():
            self._end_attempt(entry, kind, text)
        for subtask in run.subtasks.values():
            subtask.owes_reset = False

    # --- what the attempt itself says -----------------------------------------------------------------------

    def take_word(self, word: AttemptWord) -> None:
        """Take an input from, or about, one attempt. This is the only place that finds it stale (H3)."""
        run = self.record.run
        entry = None if run is None else run.by_task.get(word.task_attempt_id)
        if entry is None:
            self._take_word_of_stranger(word)
            return
        match TABLE[entry.state][_news_of(word)], word:
            case Outcome.READY, _:
                entry.state = AttemptState.READY
                self.out.append(SubtaskReady(entry.attempt))
            case Outcome.ENDING, _:
                entry.state = AttemptState.ENDING
                self.want_look(self.now + self.config.heal_after_s)
            case Outcome.FAILED, OperatorEnded(failure=failure):
                self._fail(entry, FailureKind.FAILED, failure)
            case Outcome.KILLED, ConnectionExpired():
                self._fail(entry, FailureKind.CONNECTION_LOST, "the task did not come back in time", kill=True)
            case Outcome.KILLED, AttemptCondemned() as condemned:
                self._fail(entry, _fault_of(condemned), condemned.reason, kill=True)
            case _:
                self._report_stale(word)

    def _report_stale(self, word: AttemptWord) -> None:
        self.out.append(ReportStale(type_name(word), self.record.operator_id, word.task_attempt_id))

    def _take_word_of_stranger(self, word: AttemptWord) -> None:
        """Take an input about a task that waits for its answer: only the loss of its connection counts."""
        held = self.record.held.get(word.task_attempt_id)
        if held is None or not isinstance(word, ConnectionExpired | AttemptCondemned):
            self._report_stale(word)
            return
        message, run = held.message, self.record.run
        text = "its connection was lost before it was accepted"
        place = TaskPlace(message.run_id, message.subtask)
        self.out.append(KillTask(word.task_attempt_id, text, self.record.operator_id, message.subtask, place=place))
        self.refuse(word.task_attempt_id, RefusalCode.ATTEMPT_OVER, text)
        known = self.engine.is_confirmed(message.run_id, word.task_attempt_id)  # of a claim, nothing is told (H75)
        if known and run is not None and run.run_id == message.run_id and run.failed_cause is None:
            kind = FailureKind.CONNECTION_LOST
            self._tell_death_before_accept(run, message.subtask, word.task_attempt_id, kind, text)

    # --- what the engine says about it ----------------------------------------------------------------------

    def task_located(self, task_attempt_id: int, place: TaskPlace) -> None:
        """Drop a claim to be this task, if Spark has it in another place (H75)."""
        record, run = self.record, self.record.run
        text = admission.runs_elsewhere(task_attempt_id, place)
        held = record.held.get(task_attempt_id)
        if held is not None and (held.message.run_id, held.message.subtask) != (place.stage_id, place.partition):
            self.refuse(task_attempt_id, RefusalCode.ATTEMPT_OVER, text)
            self.engine.forget_claim(held.message.run_id, task_attempt_id)
        entry = None if run is None else run.by_task.get(task_attempt_id)
        if run is None or entry is None or (run.run_id, entry.attempt.subtask) == (place.stage_id, place.partition):
            return
        if self.engine.is_confirmed(run.run_id, task_attempt_id):
            return  # two facts that contradict each other: the first counts
        subtask = run.subtasks[entry.attempt.subtask]
        self._forget(run, entry)
        if entry.state is not AttemptState.OVER:
            self._end_attempt(entry, FailureKind.LOST_FACT, text)
            subtask.owes_reset = run.failed_cause is None
            self._reset_if_vacant(subtask, entry.attempt.subtask)

    def task_ended(self, task: TaskRecord) -> None:
        """Take the end of a task of the current run, or the revocation of its success."""
        run = self.record.run
        assert run is not None
        assert task.end is not None
        entry = run.by_task.get(task.task_attempt_id)
        if entry is None:
            self._task_without_record_ended(run, task)
            return
        news = News.SPARK_SUCCESS if task.end is TaskOutcome.SUCCESS else News.SPARK_END
        unwanted, stage = None, self.engine.stages[run.run_id]
        match TABLE[entry.state][news]:
            case Outcome.FINISHED:
                self._finish(entry, run.subtasks[entry.attempt.subtask])
            case Outcome.FAILED | Outcome.REVOKED:
                self._fail(entry, _kind_of(task, run), task.end_reason)
                if task.lost_to_another:
                    unwanted = reconciliation.unwanted_winner(run, stage, entry)
            case _ if news is News.SPARK_SUCCESS and reconciliation.is_unwanted(run, stage, entry):
                unwanted = entry
        if unwanted is not None:
            self.fail_globally(reconciliation.why_unwanted(unwanted.attempt))

    def _task_without_record_ended(self, run: RunRecord, task: TaskRecord) -> None:
        """Report a failed task that was never announced ready (H11)."""
        if task.task_attempt_id in self.record.held:
            text = f"task {task.task_attempt_id} is over"
            self.refuse(task.task_attempt_id, RefusalCode.ATTEMPT_OVER, text)
        no_place = not 0 <= task.partition < self.record.parallelism  # Spark says -1 for one that it does not know
        if task.end is TaskOutcome.SUCCESS or no_place or run.failed_cause is not None:
            return
        kind = _kind_of(task, run)
        self._tell_death_before_accept(run, task.partition, task.task_attempt_id, kind, task.end_reason)

    def _tell_death_before_accept(
        self, run: RunRecord, subtask: int, task_attempt_id: int, kind: FailureKind, text: str
    ) -> None:
        if task_attempt_id in run.told or self._is_echo_of_barrier_failure(run, task_attempt_id):
            return
        run.told.add(task_attempt_id)
        if any(
            entry.task_attempt_id > task_attempt_id
            for entry in run.subtasks.setdefault(subtask, SubtaskRecord()).living
        ):
            return  # too late: reported now, the failure would come between its successor's ready and failed (H10)
        attempt = self._new_attempt(subtask, task_attempt_id)
        self.out.append(SubtaskFailed(attempt, FailureReason(kind, text)))
        self._after_failure(run, attempt, text or kind.value)

    # --- ends of attempts -----------------------------------------------------------------------------------

    def _fail(self, entry: AttemptRecord, kind: FailureKind, text: str, *, kill: bool = False) -> None:
        """End a live attempt, or revoke a finished one, and reset the subtask if none is left (H13).

        ``kill``: it is killed for its own fault, which counts towards ``attempts_max`` (H69).
        """
        run = self.record.run
        assert run is not None
        too_many = self._kill_attempt(run, entry, FailureReason(kind, text)) if kill else ""
        entry.state = AttemptState.OVER
        entry.failure = kind
        self.out.append(SubtaskFailed(entry.attempt, FailureReason(kind, text)))
        if too_many:
            self.fail_globally(too_many)
        self._after_failure(run, entry.attempt, text or kind.value)

    def _end_attempt(self, entry: AttemptRecord, kind: FailureKind, text: str) -> None:
        """End an attempt together with its run or stage attempt; no reset of its subtask follows."""
        entry.state = AttemptState.OVER
        entry.failure = kind
        self.out.append(SubtaskFailed(entry.attempt, FailureReason(kind, text)))

    def _after_failure(self, run: RunRecord, attempt: ExecutionAttempt, text: str) -> None:
        if self.engine.is_barrier(run.run_id):
            self._fail_barrier_stage(run, attempt, text)
            return
        if run.failed_cause is not None:
            return  # the whole coordinator will be reset (H15)
        subtask = run.subtasks.setdefault(attempt.subtask, SubtaskRecord())
        subtask.owes_reset = True
        self._reset_if_vacant(subtask, attempt.subtask)

    def _reset_if_vacant(self, subtask: SubtaskRecord, index: int) -> None:
        if subtask.owes_reset and subtask.vacant:
            self.out.append(SubtaskReset(self.record.operator_id, index))
            subtask.owes_reset = False

    def _finish(self, entry: AttemptRecord, subtask: SubtaskRecord) -> None:
        """Finish an attempt, and supersede and kill the others of its subtask, which has only one success.

        Spark kills speculative copies itself. It lets a zombie's rival of another stage attempt run, and may use the
        output of either. Killing the rival immediately ensures that it uses the one that the coordinator knows.
        """
        entry.state = AttemptState.FINISHED
        entry.finished_at = self.now
        self.out.append(SubtaskFinished(entry.attempt))
        for rival in subtask.living:
            reason = FailureReason(FailureKind.SUPERSEDED, f"{entry.attempt} has succeeded")
            self.out.append(self._kill_not_counted(rival, str(reason)))
            self._fail(rival, reason.kind, reason.text)

    # --- kills ----------------------------------------------------------------------------------------------

    def _kill_attempt(self, run: RunRecord, entry: AttemptRecord, reason: FailureReason) -> str:
        """Have Spark kill an attempt for its own fault. Returns why the run has to fail because of that, or "".

        The caller reports the end of the attempt before it fails the run.
        """
        subtask = run.subtasks[entry.attempt.subtask]
        if entry.streaming and self.now >= entry.accepted_at + self.config.kills_forgotten_after_s:
            subtask.killed = 0
        return self._kill(subtask, entry.attempt.subtask, entry.task_attempt_id, str(reason), entry.attempt)

    def _kill(
        self,
        subtask: SubtaskRecord,
        index: int,
        task_attempt_id: int,
        reason: str,
        attempt: ExecutionAttempt | None = None,
    ) -> str:
        """Like ``_kill_attempt``, for any task of the subtask. ``attempt``: None if it was never accepted."""
        subtask.killed += 1
        operator_id = self.record.operator_id
        count, limit = subtask.killed, self.config.attempts_max or SPARK_TASK_FAILURES_MAX
        number = None if attempt is None else attempt.attempt
        place = self._place(index)
        self.out.append(KillTask(task_attempt_id, reason, operator_id, index, number, count, limit, place))
        if count < limit:
            return ""
        times = "once" if count == 1 else f"{count} times"
        return (
            f"Headgate has killed subtask {index} of operator {operator_id!r} {times}, which is the limit "
            f"(attempts_max={limit}). The last kill was that of {attempt or f'task {task_attempt_id}'}: {reason}"
        )

    def _kill_not_counted(self, entry: AttemptRecord, reason: str) -> KillTask:
        attempt = entry.attempt
        operator_id, subtask, place = self.record.operator_id, attempt.subtask, self._place(attempt.subtask)
        return KillTask(attempt.task_attempt_id, reason, operator_id, subtask, attempt.attempt, place=place)

    def _place(self, subtask: int) -> TaskPlace:
        assert self.record.run is not None
        return TaskPlace(self.record.run.run_id, subtask)

    # --- barrier stages -------------------------------------------------------------------------------------

    def _fail_barrier_stage(self, run: RunRecord, attempt: ExecutionAttempt, text: str) -> None:
        """Fail all tasks of a barrier stage because one has failed: a global failover inside the run (H15)."""
        task = self.engine.task(run.run_id, attempt.task_attempt_id)
        failed = None if task is None else task.stage_attempt
        if failed is None:
            failed = self.engine.stages[run.run_id].latest_attempt
        self._fail_over_barrier_stage(run, failed, f"barrier stage {run.run_id} failed: {attempt}: {text}")

    def _is_echo_of_barrier_failure(self, run: RunRecord, task_attempt_id: int) -> bool:
        """Whether the end of a task without a gateway belongs to a stage attempt that has already failed over."""
        if run.barrier_failed is None:
            return False
        task = self.engine.task(run.run_id, task_attempt_id)
        return task is None or task.stage_attempt is None or task.stage_attempt <= run.barrier_failed

    def barrier_attempt_failed(self, failed: int) -> None:
        """Fail a barrier stage attempt; its end or a later attempt shows it even if the tasks' facts are lost (H19)."""
        run = self.record.run
        if run is None or run.failed_cause is not None:
            return
        known = run.barrier_failed is not None and run.barrier_failed >= failed
        if not known or any(self._is_of_stage_attempt(run, entry, failed) for entry in run.entries()):
            self._fail_over_barrier_stage(run, failed, f"barrier stage {run.run_id} failed (attempt {failed})")

    def _is_of_stage_attempt(self, run: RunRecord, entry: AttemptRecord, last: int) -> bool:
        """Whether the attempt is not over, and known to be of stage attempt ``last`` or an earlier one."""
        task = self.engine.task(run.run_id, entry.task_attempt_id)
        known = None if task is None else task.stage_attempt
        return entry.state is not AttemptState.OVER and known is not None and known <= last

    def _fail_over_barrier_stage(self, run: RunRecord, failed: int, cause: str) -> None:
        run.barrier_failed = max(failed, -1 if run.barrier_failed is None else run.barrier_failed)
        successes = reconciliation.possible_later_attempts(run, self.engine.stages[run.run_id], failed)
        for entry in run.entries():
            if entry.state is AttemptState.OVER:
                continue
            # The whole stage is run again, including the tasks that have finished.
            revoked = entry.state is AttemptState.FINISHED
            self._end_attempt(entry, FailureKind.REVOKED if revoked else FailureKind.GLOBAL_FAILURE, cause)
        for subtask in run.subtasks.values():
            subtask.owes_reset = False
        coordinator_knows = bool(run.told or run.by_task)
        if self.record.reset_due is None and coordinator_knows:
            self.record.reset_due = cause
        if successes:
            self.fail_globally(reconciliation.why_unwanted(successes[0].attempt))

    # --- looks at Spark's own records -----------------------------------------------------------------------

    def look(self) -> reconciliation.Questions:
        """Query Spark's own records if that is due, and set the time of the next query."""
        record = self.record
        asks = reconciliation.questions(record, self.engine, self.config, self.now)
        record.look_at = None
        for held in asks.asked:
            held.seen = Seen.ASKED
        if asks.run_is_over:
            self._end_run_without_facts()
        if asks.tasks or asks.jobs or asks.has_a_job:
            record.asked_again_at = self.now + self.config.query_every_s
            self.want_look(record.asked_again_at)
        else:
            self._want_audit()
        self.settle()
        return asks

    def _want_audit(self) -> None:
        """Schedule the next audit while a run could have ended unnoticed."""
        if self.record.run is not None:
            jobless = reconciliation.is_jobless(self.record, self.engine)
            self.want_look(self.now + (self.config.query_every_s if jobless else self.config.audit_every_s))

    def tasks_reported(self, fact: StatusReported) -> None:
        """Take the states of waiting registrations and live attempts in Spark's own records."""
        for task_attempt_id in sorted(fact.tasks, key=lambda task: (task not in self.record.held, task)):
            if self.record.run is not None:
                self._task_reported(task_attempt_id, fact.tasks[task_attempt_id])

    def _task_reported(self, task_attempt_id: int, state: TaskState) -> None:
        record, run = self.record, self.record.run
        assert run is not None
        held = record.held.get(task_attempt_id)
        finding = reconciliation.task_reported(record, self.engine, self.config, self.now, task_attempt_id, state)
        match finding:
            case reconciliation.HasEnded(outcome, reason):
                run_id = run.run_id if held is None else held.message.run_id
                task = self.engine.report_end(run_id, task_attempt_id, outcome, reason)
                if run_id == run.run_id:
                    self.task_ended(task)
            case reconciliation.GiveUp(kind, text, kill, claim):
                entry = run.by_task[task_attempt_id]
                if claim:
                    self.out.append(self._kill_not_counted(entry, text))
                self._fail(entry, kind, text, kill=kill)
            case reconciliation.RunsBeside(waiting):
                for waits in waiting:
                    waits.beside.add(task_attempt_id)
            case reconciliation.StillWaits(seen):
                record.held[task_attempt_id].seen = seen

    def conflict_reported(self, fact: StatusReported) -> None:
        """Take the answer to whether the first of two runs is still in progress."""
        conflict = reconciliation.conflict_reported(self.record, self.engine, fact)
        run = self.record.run
        if conflict is None or run is None:
            return
        if not conflict.goes_on:
            self._end_run_without_facts()
            return
        for held in conflict.waiting:
            text = admission.in_use(self.record, run, self.engine)
            self.refuse(held.task_attempt_id, RefusalCode.CONCURRENT_RUN, text)

    def job_reported(self) -> None:
        """End the run at the second answer that knows no job of it: the facts of one may be on their way (H19)."""
        run = self.record.run
        if run is None:
            return
        if not reconciliation.is_jobless(self.record, self.engine):
            run.jobless_since = None
        elif run.jobless_since is None:
            run.jobless_since = self.now
        elif self.now >= run.jobless_since + self.config.query_every_s:
            self._end_run_without_facts()

    def _end_run_without_facts(self) -> None:
        """End a run of which no job is known and no task runs: a later run waits, or Spark knows no job of it."""
        run = self.record.run
        assert run is not None
        whole = reconciliation.looks_whole(self.record, self.engine)
        self.end_run(whole, "" if whole else f"run {run.run_id} is over, but how it ended was lost")

    def answered(self) -> None:
        """Ask again soon only if something is still undecided."""
        record = self.record
        if record.asked_again_at is not None and record.look_at == record.asked_again_at and not record.held:
            record.look_at = None
            self._want_audit()
        record.asked_again_at = None

    # --- invariants -----------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state is impossible."""
        record, run = self.record, self.record.run
        for task_attempt_id, held in record.held.items():
            assert held.task_attempt_id == task_attempt_id
            assert held.message.run_id not in record.ended_runs, "held for a run that is over"
            assert run is not None, "held although nothing runs"
            assert record.look_at is not None, "held without a deadline"
            assert task_attempt_id not in run.by_task, "held and accepted"
        if run is None:
            return
        assert run.run_id not in record.ended_runs
        assert {id(entry) for entry in run.entries()} == {id(entry) for entry in run.by_task.values()}
        if record.reset_due is not None or run.failed_cause is not None:
            assert not run.living(), "alive across a global failover"
        for index, subtask in run.subtasks.items():
            self._check_subtask(run, index, subtask)

    def _check_subtask(self, run: RunRecord, index: int, subtask: SubtaskRecord) -> None:
        numbers = [entry.attempt.attempt for entry in subtask.attempts.values()]
        assert numbers == sorted(set(numbers)), "attempt numbers do not rise (H2)"
        assert all(number < self.record.next_attempt[index] for number in numbers)
        assert 0 <= index < self.record.parallelism
        living = subtask.living
        assert not (living and subtask.finished), "alive beside a success"
        for position, entry in enumerate(living):
            older = {other.task_attempt_id for other in living[:position]}
            assert older <= entry.beside, "two alive that are not copies of each other (H10)"
        limit = self.config.attempts_max or SPARK_TASK_FAILURES_MAX
        assert subtask.killed <= limit, "killed too often (H69)"
        assert subtask.killed < limit or run.failed_cause is not None, "killed often enough, and no failure (H69)"
        assert not subtask.owes_reset or not subtask.vacant, "a reset is owed (H10)"
        for entry in subtask.attempts.values():
            assert (entry.failure is not None) == (entry.state is AttemptState.OVER)


def _fault_of(condemned: AttemptCondemned) -> FailureKind:
    if condemned.unusable:
        return FailureKind.UNUSABLE
    return FailureKind.HEARTBEAT_TIMEOUT if condemned.silent else FailureKind.CONFIRMATION_TIMEOUT


def _news_of(word: AttemptWord) -> News:
    match word:
        case OperatorOpened():
            return News.OPENED
        case OperatorEnded(failure=failure):
            return News.ENDED_BADLY if failure else News.ENDED_WELL
        case ConnectionExpired() | AttemptCondemned():
            return News.GIVEN_UP


def _kind_of(task: TaskRecord, run: RunRecord) -> FailureKind:
    assert task.end is not None
    kind = _KINDS[task.end]
    lost = kind is FailureKind.KILLED and (run.finished(task.partition) is not None or task.lost_to_another)
    return FailureKind.SUPERSEDED if lost else kind
