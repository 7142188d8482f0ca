# SPDX-License-Identifier: Apache-2.0

"""The ledger's machine: takes facts, registrations and words, and passes each to the operators that it concerns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.attempts import (
    MODES,
    AttemptCondemned,
    AttemptWord,
    ConnectionExpired,
    GlobalFailureRaised,
    LedgerConfig,
    LedgerEffect,
    LedgerInput,
    OperatorAdded,
    OperatorEnded,
    OperatorOpened,
    OperatorRemoved,
    QueryStatus,
    RefuseRegistration,
    RegistrationArrived,
    ReportStale,
    admission,
)
from protocol.attempts.operator import OperatorLedger
from protocol.attempts.reconciliation import looks_whole, why_unwanted
from protocol.attempts.records import (
    AttemptState,
    EngineRecords,
    HeldRegistration,
    OperatorRecord,
    StageRecord,
    TaskRecord,
)
from protocol.attempts.views import AttemptView, KnownAttempts, RunView, view_attempts, view_run
from protocol.describing import type_name
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.facts import (
    ApplicationEnded,
    ExecutorLost,
    FactsDropped,
    JobEnded,
    JobStarted,
    StageCompleted,
    StageSubmitted,
    StatusReported,
    TaskEnded,
    TaskOutcome,
    TaskPlace,
    TaskStarted,
    TaskState,
)
from protocol.machine import TimePassed
from protocol.wire.messages import RefusalCode, Register


class AttemptLedger:
    """One per Spark application. The package's docstring explains what it decides and why.

    ``handle`` raises ``LocalProtocolError`` for an operator that is added twice or without a positive parallelism, and
    for a value that is not an input. It raises ``RemoteProtocolError`` for a registration with an unknown mode or
    negative numbers. In both cases nothing is changed. After ``ApplicationEnded`` every registration is refused.
    """

    def __init__(self, config: LedgerConfig | None = None) -> None:
        self._config = config or LedgerConfig()
        self._engine = EngineRecords()
        self._operators: dict[str, OperatorLedger] = {}
        self._application_ended = False
        self._now = 0.0
        self._out: list[LedgerEffect] = []

    # --- the shape of every machine -------------------------------------------------------------------------

    def handle(self, input: LedgerInput, now: float) -> tuple[LedgerEffect, ...]:
        """Take one input and return the effects, which must be carried out in order.

        ``now`` is in seconds, on any monotonic clock.
        """
        act = _HANDLERS.get(type(input))
        if act is None:
            raise LocalProtocolError(f"not an input of the attempt ledger: {input!r}")
        self._now = now
        self._out = []
        for operator in self._operators.values():
            operator.out = self._out
            operator.now = now
        act(self, input)
        looks_due = False
        for operator in self._operators.values():
            record = operator.record
            if record.held:
                operator.settle()
            if record.look_at is not None and record.look_at <= now:
                looks_due = True
        if looks_due:
            self._look()
        return tuple(self._out)

    def next_deadline(self) -> float | None:
        """The latest time for ``TimePassed``, in seconds of the same clock; None if none is needed."""
        records = [operator.record for operator in self._operators.values()]
        deadlines = [record.look_at for record in records if record.look_at is not None]
        for record in records:
            deadlines.extend(held.since + self._config.give_up_after_s for held in record.held.values())
        return min(deadlines, default=None)

    # --- for people -----------------------------------------------------------------------------------------

    def view_run(self, operator_id: str) -> RunView | None:
        """What is known of an operator's run at this moment; None for an unknown operator."""
        operator = self._operators.get(operator_id)
        return None if operator is None else view_run(operator.record, self._engine)

    def view_attempts(self, operator_id: str, first: int, count: int, known: KnownAttempts) -> list[AttemptView]:
        """See ``views.view_attempts``; empty for an unknown operator."""
        operator = self._operators.get(operator_id)
        return [] if operator is None else view_attempts(operator.record, self._engine, first, count, known)

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state is impossible. Tests and the simulator call this after each step."""
        for operator in self._operators.values():
            operator.check_invariants()
            run = operator.record.run
            if run is not None:
                stage = self._engine.stages.get(run.run_id)
                assert stage is not None, "a run without its stage's facts"
                assert not stage.over, "a run whose jobs have all ended"
                for entry in run.entries():
                    assert entry.task_attempt_id in stage.tasks
            for held in operator.record.held.values():
                task = self._engine.task(held.message.run_id, held.task_attempt_id)
                assert task is not None, "held without a record"
                assert task.end is None, "held although its task is over"
        for job, stages in self._engine.job_stages.items():
            assert job not in self._engine.ended_jobs
            for stage_id in stages:
                record = self._engine.stages.get(stage_id)
                assert record is None or record.jobs.get(job) is False

    # --- operators ------------------------------------------------------------------------------------------

    def _operator_added(self, input: OperatorAdded) -> None:
        if input.operator_id in self._operators:
            raise LocalProtocolError(f"operator {input.operator_id!r} has a coordinator already")
        if input.parallelism < 1:
            raise LocalProtocolError(
                f"operator {input.operator_id!r}: parallelism must be at least 1, not {input.parallelism}"
            )
        record = OperatorRecord(input.operator_id, input.parallelism, input.allow_fewer)
        self._operators[input.operator_id] = OperatorLedger(record, self._engine, self._config)

    def _operator_removed(self, input: OperatorRemoved) -> None:
        operator = self._operators.pop(input.operator_id, None)
        if operator is not None:
            operator.shut("the operator was removed")

    def _global_failure_raised(self, input: GlobalFailureRaised) -> None:
        operator = self._operators.get(input.operator_id)
        if operator is None:
            self._out.append(ReportStale("GlobalFailureRaised", input.operator_id, -1))
        else:
            operator.fail_globally(input.cause)

    def _application_has_ended(self, fact: ApplicationEnded) -> None:
        self._application_ended = True
        for operator in self._operators.values():
            operator.shut("the application has ended")

    def _word_said(self, word: AttemptWord) -> None:
        operator = self._operators.get(word.operator_id)
        if operator is None:
            self._out.append(ReportStale(type_name(word), word.operator_id, word.task_attempt_id))
        else:
            operator.take_word(word)

    # --- registrations --------------------------------------------------------------------------------------

    def waits_for_facts_of(self, message: Register) -> bool:
        """Whether this registration was taken, and Spark has not confirmed the task yet (H75)."""
        task = self._engine.task(message.run_id, message.task_attempt_id)
        return task is not None and not task.confirmed

    def _registration_arrived(self, input: RegistrationArrived) -> None:
        message = input.message
        if message.mode not in MODES or min(message.subtask, message.attempt_number) < 0:
            raise RemoteProtocolError(f"not a registration that this release understands: {message}")
        operator = self._operators.get(message.operator_id)
        refused = self._why_refused(input, operator)
        elsewhere = self._engine.task_registered(message) if refused is None else None
        if elsewhere is not None:
            refused = RefusalCode.ATTEMPT_OVER, admission.runs_elsewhere(message.task_attempt_id, elsewhere)
        stage = self._engine.stages.get(message.run_id)
        if (
            refused is None
            and stage is not None
            and stage.in_one_task
            and (why := self._fail_if_not_both(stage, message.task_attempt_id))
        ):
            refused = RefusalCode.SECOND_OPERATOR, why
        if refused is None and operator is not None:
            ask_at = self._now + self._config.heal_after_s
            operator.hold(HeldRegistration(input.connection_id, message, self._now, ask_at))
        elif refused is not None:
            code, text = refused
            if operator is not None and code is not RefusalCode.DUPLICATE_REGISTRATION:
                operator.refused_before_held(message.task_attempt_id)
            self._out.append(RefuseRegistration(input.connection_id, message.task_attempt_id, code, text))

    def _why_refused(
        self, input: RegistrationArrived, operator: OperatorLedger | None
    ) -> tuple[RefusalCode, str] | None:
        message = input.message
        if self._application_ended:
            return RefusalCode.SHUTTING_DOWN, "the application has ended"
        if operator is None:
            known = ", ".join(repr(name) for name in sorted(self._operators)) or "none"
            return (
                RefusalCode.UNKNOWN_OPERATOR,
                f"no coordinator for operator {message.operator_id!r} (known: {known}); "
                "call coordinate() in the driver before the action, and keep the sidecar open until it ends",
            )
        record = operator.record
        if message.subtask >= record.parallelism:
            stage = self._engine.stages.get(message.run_id)
            partitions = max(message.subtask + 1, 0 if stage is None else max(stage.task_count, stage.partitions))
            return (
                RefusalCode.SUBTASK_OUT_OF_RANGE,
                f"subtask {message.subtask} of operator {message.operator_id!r}, which has "
                f"parallelism={record.parallelism}: an RDD with {partitions} partitions "
                f"needs parallelism={partitions}, or repartition({record.parallelism}) before its subtasks: "
                "without an explicit number, adaptive execution chooses one, and may choose another next time. If it "
                f"is one side of a union(), call repartition({record.parallelism}) after its subtasks and before the "
                "union() instead: a stage numbers the partitions of both sides in one row. So it does for cartesian()",
            )
        if operator.has_registered(message.task_attempt_id):
            return (
                RefusalCode.DUPLICATE_REGISTRATION,
                f"task {message.task_attempt_id} has registered for operator {message.operator_id!r} already: "
                "coalesce(), union(), cartesian() or a zip with itself has put two subtasks into one task; call "
                "repartition() after the subtasks, cache() what is used twice, or coordinate() each RDD as a separate "
                "operator, and use repartition() in place of coalesce(). flatMap() and foreach() call a subtask for "
                "each record; mapPartitions() and foreachPartition() call it once",
            )
        if message.run_id in self._engine.ended_stages or message.run_id in record.ended_runs:
            return RefusalCode.ATTEMPT_OVER, admission.run_has_ended(record, message.run_id)
        return None

    # --- facts ----------------------------------------------------------------------------------------------

    def _in_stage(self, stage_id: int) -> list[OperatorLedger]:
        """The operators whose current run is this stage."""
        found: list[OperatorLedger] = []
        for operator in self._operators.values():
            run = operator.record.run
            if run is not None and run.run_id == stage_id:
                found.append(operator)
        return found

    def _task_located(self, task_attempt_id: int, place: TaskPlace) -> None:
        if place.partition < 0:
            return  # Spark has forgotten it
        for operator in self._operators.values():
            operator.task_located(task_attempt_id, place)

    def _task_started(self, fact: TaskStarted) -> None:
        if not self._engine.is_confirmed(fact.stage_id, fact.task_attempt_id):
            self._task_located(fact.task_attempt_id, TaskPlace(fact.stage_id, fact.partition))
        self._engine.task_started(fact)
        self._see_barrier_restart(fact.stage_id)
        stage = self._engine.stages.get(fact.stage_id)
        if stage is not None and stage.in_one_task:
            self._fail_if_not_both(stage, fact.task_attempt_id)
        if stage is not None and stage.may_be_divided:
            self._fail_if_incomplete(stage)

    def _fail_if_incomplete(self, stage: StageRecord) -> None:
        """Fail the runs for which a registration came before the fact that the stage cannot have all subtasks."""
        for operator in self._in_stage(stage.stage_id):
            if incomplete := admission.why_incomplete(operator.record, stage):
                operator.fail_globally(incomplete)

    def _fail_if_not_both(self, stage: StageRecord, task_attempt_id: int) -> str:
        """Fail the runs of a task that has several operators in streaming mode; return why, or an empty text."""
        task = stage.tasks.get(task_attempt_id)
        why = "" if task is None else admission.why_not_both(task)
        if why:
            for operator in self._in_stage(stage.stage_id):
                operator.fail_globally(why)
        return why

    def _task_ended(self, fact: TaskEnded) -> None:
        stage = self._engine.stages.get(fact.stage_id)
        task = None if stage is None else stage.tasks.get(fact.task_attempt_id)
        if task is None or not task.confirmed:
            self._task_located(fact.task_attempt_id, TaskPlace(fact.stage_id, fact.partition))
        record = self._engine.task_ended(fact)
        self._see_barrier_restart(fact.stage_id)
        if record is not None:
            for operator in self._in_stage(record.stage_id):
                operator.task_ended(record)

    def _executor_lost(self, fact: ExecutorLost) -> None:
        """End the executor's tasks. One that is ENDING may have succeeded just before: Spark's own word decides."""
        for stage in list(self._engine.stages.values()):
            for task in list(stage.tasks.values()):
                if task.end is None and task.started and task.executor_id == fact.executor_id:
                    self._executor_of_task_lost(task, fact)

    def _executor_of_task_lost(self, task: TaskRecord, fact: ExecutorLost) -> None:
        operators = self._in_stage(task.stage_id)
        if any(self._is_ending(operator, task.task_attempt_id) for operator in operators):
            for operator in operators:
                operator.want_look(self._now + self._config.heal_after_s)
            return
        task.end = TaskOutcome.EXECUTOR_LOST
        task.end_reason = fact.reason or f"executor {fact.executor_id} was lost"
        for operator in self._in_stage(task.stage_id):
            operator.task_ended(task)

    @staticmethod
    def _is_ending(operator: OperatorLedger, task_attempt_id: int) -> bool:
        run = operator.record.run
        entry = None if run is None else run.by_task.get(task_attempt_id)
        return entry is not None and entry.state is AttemptState.ENDING

    def _see_barrier_restart(self, stage_id: int) -> None:
        stage = self._engine.stages.get(stage_id)
        if stage is not None and stage.barrier and stage.latest_attempt > 0:
            for operator in self._in_stage(stage_id):
                operator.barrier_attempt_failed(stage.latest_attempt - 1)

    def _stage_submitted(self, fact: StageSubmitted) -> None:
        self._engine.stage_submitted(fact)
        stage = self._engine.stages.get(fact.stage_id)
        if stage is not None:
            self._fail_if_incomplete(stage)
        self._see_barrier_restart(fact.stage_id)
        if fact.barrier and stage is not None and fact.task_count < stage.task_count:
            # If only a part of the stage runs again, Spark counts the results of the rest of the failed attempt.
            kept = f"{stage.task_count - fact.task_count} tasks of a failed attempt of barrier stage {fact.stage_id}"
            for operator in self._in_stage(fact.stage_id):
                operator.fail_globally(why_unwanted(kept))

    def _stage_completed(self, fact: StageCompleted) -> None:
        self._engine.stage_completed(fact)
        for operator in self._in_stage(fact.stage_id):
            operator.want_look(self._now + self._config.heal_after_s)  # ends may still come, or be lost
            if fact.failure is not None and self._engine.is_barrier(fact.stage_id):
                operator.barrier_attempt_failed(fact.stage_attempt)
        self._see_barrier_restart(fact.stage_id)

    def _job_started(self, fact: JobStarted) -> None:
        if self._engine.job_started(fact, self._now):
            for stage_id in fact.stage_ids:
                for operator in self._in_stage(stage_id):
                    operator.cancel_jobs()  # of a run that failed before its job was known

    def _job_ended(self, fact: JobEnded) -> None:
        self._end_job(fact.job_id, fact.succeeded, fact.reason)

    def _end_job(self, job_id: int, succeeded: bool, reason: str) -> None:
        if job_id in self._engine.ended_jobs:
            return
        failure = None if succeeded else reason or f"job {job_id} failed"
        orphan = job_id not in self._engine.job_stages
        over = self._engine.job_ended(job_id, failure)
        if orphan:  # its start was lost: it belongs to a run without a job that has nothing left to do (H19)
            over = [s.stage_id for s in self._engine.stages.values() if self._is_waiting_for_its_job(s, failure)]
            for stage_id in over:
                self._engine.stages[stage_id].failures.extend([] if failure is None else [failure])
        for stage_id in over:
            failures = self._engine.stages[stage_id].failures
            for operator in self._in_stage(stage_id):
                operator.end_run(not failures, "; ".join(failures))
            self._engine.forget_stage(stage_id)

    def _is_waiting_for_its_job(self, stage: StageRecord, failure: str | None) -> bool:
        """Whether a job whose start was lost may be the stage's.

        After a ``failure``, it may also be the job of a stage whose latest attempt has failed and was not run again.
        """
        if stage.jobs or not stage.hosts_operator:
            return False
        records = [operator.record for operator in self._in_stage(stage.stage_id)]
        if not records or any(record.run is not None and record.run.living() for record in records):
            return False
        given_up = failure is not None and stage.failed_attempt == stage.latest_attempt
        return given_up or stage.completed_well or all(self._all_finished(record) for record in records)

    @staticmethod
    def _all_finished(record: OperatorRecord) -> bool:
        run = record.run
        return run is not None and all(run.finished(subtask) for subtask in range(record.parallelism))

    # --- looks ----------------------------------------------------------------------------------------------

    def _facts_dropped(self, fact: FactsDropped) -> None:
        for operator in self._operators.values():
            if operator.record.run is not None:
                operator.want_look(self._now + self._config.heal_after_s)

    def _time_passed(self, input: TimePassed) -> None:
        """Do nothing: every input is followed by settling and, if due, a query of Spark."""

    def _look(self) -> None:
        tasks: set[int] = set()
        jobs: set[int] = set()
        has_a_job = False
        for operator in self._operators.values():
            look_at = operator.record.look_at
            if look_at is not None and look_at <= self._now:
                questions = operator.look()
                tasks |= questions.tasks
                jobs |= questions.jobs
                has_a_job |= questions.has_a_job
        if tasks or jobs or has_a_job:
            self._out.append(QueryStatus(frozenset(tasks), frozenset(jobs)))

    def _status_reported(self, fact: StatusReported) -> None:
        for task_attempt_id, place in sorted(fact.places.items()):
            self._task_located(task_attempt_id, place)
            self._engine.place_reported(task_attempt_id, place)
        for operator in self._operators.values():
            operator.tasks_reported(fact)
        for job_id in sorted(job_id for job_id, active in fact.jobs.items() if not active):
            self._job_reported_over(job_id, fact)
        for operator in self._operators.values():
            operator.conflict_reported(fact)
            operator.job_reported()
            operator.answered()

    def _job_reported_over(self, job_id: int, fact: StatusReported) -> None:
        """End the job at the second such report: the fact, which alone says how the job ended, may be on its way."""
        operators = [o for s in self._engine.job_stages.get(job_id, ()) for o in self._in_stage(s)]
        if not operators:
            return  # for any other job, only its own end counts
        since = self._engine.job_over_since.setdefault(job_id, self._now)
        if self._now < since + self._config.query_every_s:
            for operator in operators:
                operator.want_look(since + self._config.query_every_s)
            return
        whole = all(self._seems_whole(operator.record, fact) for operator in operators)
        self._end_job(job_id, whole, "" if whole else f"job {job_id} is over, but how it ended was lost")

    def _seems_whole(self, record: OperatorRecord, fact: StatusReported) -> bool:
        run = record.run
        assert run is not None, "it is the operator's run in a stage of the job"
        running = any(fact.tasks.get(entry.task_attempt_id) is TaskState.RUNNING for entry in run.living())
        return not running and looks_whole(record, self._engine)


_HANDLERS: dict[type, Callable[[AttemptLedger, Any], None]] = {
    OperatorAdded: AttemptLedger._operator_added,
    OperatorRemoved: AttemptLedger._operator_removed,
    GlobalFailureRaised: AttemptLedger._global_failure_raised,
    RegistrationArrived: AttemptLedger._registration_arrived,
    OperatorOpened: AttemptLedger._word_said,
    OperatorEnded: AttemptLedger._word_said,
    ConnectionExpired: AttemptLedger._word_said,
    AttemptCondemned: AttemptLedger._word_said,
    TaskStarted: AttemptLedger._task_started,
    TaskEnded: AttemptLedger._task_ended,
    ExecutorLost: AttemptLedger._executor_lost,
    StageSubmitted: AttemptLedger._stage_submitted,
    StageCompleted: AttemptLedger._stage_completed,
    JobStarted: AttemptLedger._job_started,
    JobEnded: AttemptLedger._job_ended,
    ApplicationEnded: AttemptLedger._application_has_ended,
    FactsDropped: AttemptLedger._facts_dropped,
    StatusReported: AttemptLedger._status_reported,
    TimePassed: AttemptLedger._time_passed,
}
