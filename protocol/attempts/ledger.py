"""The machine itself: takes facts, registrations and words, and hands each to the operators it concerns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from protocol.attempts import judge, unwanted
from protocol.attempts.books import EngineBooks, StageRecord, TaskRecord
from protocol.attempts.entries import AttemptState, HeldRegistration
from protocol.attempts.invariants import check_operator
from protocol.attempts.operator import OperatorLedger
from protocol.attempts.types import (
    AttemptCondemned,
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
)
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
    TaskStarted,
    TaskState,
)
from protocol.machine import TimePassed
from protocol.wire.messages import RefusalCode, RestoreMode

_INPUTS = frozenset(get_args(LedgerInput))


class AttemptLedger:
    """One per Spark application; see the package for what it decides and why.

    ``handle`` raises ``LocalProtocolError`` for an operator that is added twice or without a positive
    parallelism and for what is no input at all, and ``RemoteProtocolError`` for a registration with an unknown mode
    or negative numbers; nothing is changed then. After ``ApplicationEnded`` every registration is refused.
    """

    def __init__(self, config: LedgerConfig | None = None) -> None:
        self._config = config or LedgerConfig()
        self._books = EngineBooks()
        self._operators: dict[str, OperatorLedger] = {}
        self._application_ended = False
        self._out: list[LedgerEffect] = []

    # --- the shape of every machine -------------------------------------------------------------------------

    def handle(self, input: LedgerInput, now: float) -> tuple[LedgerEffect, ...]:
        """Effects, to be carried out in their order.

        ``now`` in seconds, on any clock that does not go back.
        """
        if type(input) not in _INPUTS:
            raise LocalProtocolError(f"no input of the attempt ledger: {input!r}")
        self._out = []
        for operator in self._operators.values():
            operator.out = self._out
            operator.now = now
        self._dispatch(input, now)
        for operator in self._operators.values():
            judge.settle(operator, now)
        self._look_if_due(now)
        return tuple(self._out)

    def next_deadline(self) -> float | None:
        """When ``TimePassed`` must come at the latest, in seconds of the same clock.

        None: there is no need.
        """
        deadlines = [o.look_at for o in self._operators.values() if o.look_at is not None]
        for operator in self._operators.values():
            deadlines.extend(held.since + self._config.give_up_after_s for held in operator.held.values())
        return min(deadlines, default=None)

    def check_invariants(self) -> None:
        """Raises AssertionError when the state is impossible.

        For tests and the simulator, after each step.
        """
        for operator in self._operators.values():
            check_operator(operator)
            if operator.run is not None:
                stage = self._books.stages.get(operator.run.run_id)
                assert stage is not None, "a run without its stage's facts"
                assert not stage.over, "a run whose jobs have all ended"
                for entry in operator.run.entries():
                    assert entry.task_attempt_id in stage.tasks
            for held in operator.held.values():
                task = self._books.task(held.message.run_id, held.task_attempt_id)
                assert task is not None, "held without a record"
                assert task.end is None, "held although its task is over"
        for job, stages in self._books.job_stages.items():
            assert job not in self._books.ended_jobs
            for stage_id in stages:
                record = self._books.stages.get(stage_id)
                assert record is None or record.jobs.get(job) is False

    def _dispatch(self, input: LedgerInput, now: float) -> None:
        match input:
            case RegistrationArrived():
                self._registration_arrived(input, now)
            case OperatorOpened() | OperatorEnded() | ConnectionExpired() | AttemptCondemned():
                operator = self._operators.get(input.operator_id)
                if operator is None:
                    what = type(input).__name__
                    self._out.append(ReportStale(what, input.operator_id, input.task_attempt_id))
                else:
                    operator.word(input, now)
            case TaskStarted() | TaskEnded() | ExecutorLost():
                self._task_fact(input, now)
            case StageSubmitted() | StageCompleted():
                self._stage_fact(input, now)
            case JobStarted() | JobEnded():
                self._job_fact(input, now)
            case StatusReported():
                self._status_reported(input, now)
            case FactsDropped():
                for operator in self._operators.values():
                    if operator.run is not None:
                        operator.want_look(now + self._config.heal_after_s)
            case GlobalFailureRaised():
                if input.operator_id in self._operators:
                    self._operators[input.operator_id].fail_globally(input.cause)
                else:
                    self._out.append(ReportStale("GlobalFailureRaised", input.operator_id, -1))
            case OperatorAdded():
                self._operator_added(input)
            case OperatorRemoved():
                self._operator_removed(input.operator_id, "the operator was removed")
            case ApplicationEnded():
                self._application_ended = True
                for operator in self._operators.values():
                    self._shut(operator, "the application has ended")
            case TimePassed():
                pass  # settling and looking follow every input

    # --- operators and registrations ------------------------------------------------------------------------

    def _operator_added(self, input: OperatorAdded) -> None:
        if input.operator_id in self._operators:
            raise LocalProtocolError(f"operator {input.operator_id!r} has a coordinator already")
        if input.parallelism < 1:
            raise LocalProtocolError(
                f"operator {input.operator_id!r}: parallelism must be at least 1, not {input.parallelism}"
            )
        operator = OperatorLedger(
            input.operator_id, input.parallelism, self._books, self._config, allow_fewer=input.allow_fewer
        )
        self._operators[input.operator_id] = operator

    def _operator_removed(self, operator_id: str, reason: str) -> None:
        operator = self._operators.pop(operator_id, None)
        if operator is not None:
            self._shut(operator, reason)

    def _shut(self, operator: OperatorLedger, reason: str) -> None:
        operator.end_run(False, reason)
        for task_attempt_id in list(operator.held):
            operator.refuse(task_attempt_id, RefusalCode.SHUTTING_DOWN, reason)
        operator.look_at = None

    def _registration_arrived(self, input: RegistrationArrived, now: float) -> None:
        message = input.message
        if message.mode not in set(RestoreMode) or min(message.subtask, message.attempt_number) < 0:
            raise RemoteProtocolError(f"not a registration that this release understands: {message}")
        operator = self._operators.get(message.operator_id)
        if self._application_ended:
            self._refuse(input, RefusalCode.SHUTTING_DOWN, "the application has ended")
        elif operator is None:
            known = ", ".join(repr(name) for name in sorted(self._operators)) or "none"
            self._refuse(
                input,
                RefusalCode.UNKNOWN_OPERATOR,
                f"no coordinator for operator {message.operator_id!r} (known: {known}); "
                "call coordinate() in the driver before the action, and keep the sidecar open until it ends",
            )
        elif message.subtask >= operator.parallelism:
            stage = self._books.stages.get(message.run_id)
            partitions = max(message.subtask + 1, 0 if stage is None else max(stage.task_count, stage.partitions))
            self._refuse(
                input,
                RefusalCode.SUBTASK_OUT_OF_RANGE,
                f"subtask {message.subtask} of operator {message.operator_id!r}, which has "
                f"parallelism={operator.parallelism}: an RDD with {partitions} partitions "
                f"needs parallelism={partitions}, or repartition({operator.parallelism}) before its subtasks: "
                "where nobody says how many there are, adaptive execution chooses, now one number, now another",
            )
        elif message.task_attempt_id in operator.held or (
            operator.run is not None and operator.run.find(message.task_attempt_id) is not None
        ):
            self._refuse(
                input,
                RefusalCode.DUPLICATE_REGISTRATION,
                f"task {message.task_attempt_id} has registered for operator {message.operator_id!r} already: "
                "coalesce() or union() has put two subtasks into one task; coordinate() each RDD as an operator "
                "of its own, and use repartition() in place of coalesce(). flatMap() and foreach() call a subtask for "
                "each record; mapPartitions() and foreachPartition() call it once",
            )
        else:
            self._hold(operator, input, now)

    def _refuse(self, input: RegistrationArrived, code: RefusalCode, text: str) -> None:
        task_attempt_id = input.message.task_attempt_id
        self._out.append(RefuseRegistration(input.connection_id, task_attempt_id, code, text))
        operator = self._operators.get(input.message.operator_id)
        if operator is not None and operator.run is not None and code is not RefusalCode.DUPLICATE_REGISTRATION:
            operator.run.told.add(task_attempt_id)

    def _hold(self, operator: OperatorLedger, input: RegistrationArrived, now: float) -> None:
        """Every registration is held for a moment.

        Settling accepts it in the same step if nothing is in its way.
        """
        message = input.message
        if message.run_id in self._books.ended_stages or message.run_id in operator.ended_runs:
            self._refuse(
                input,
                RefusalCode.ATTEMPT_OVER,
                f"run {message.run_id} of operator {message.operator_id!r} has ended",
            )
            return
        self._books.task_registered(message)
        operator.held[message.task_attempt_id] = HeldRegistration(input.connection_id, message, now)
        judge.settle(operator, now)
        if message.task_attempt_id in operator.held:
            operator.want_look(now + self._config.heal_after_s)

    # --- facts ----------------------------------------------------------------------------------------------

    def _in_stage(self, stage_id: int) -> Iterator[OperatorLedger]:
        """The operators whose current run is this stage."""
        for operator in list(self._operators.values()):
            if operator.run is not None and operator.run.run_id == stage_id:
                yield operator

    def _task_fact(self, fact: TaskStarted | TaskEnded | ExecutorLost, now: float) -> None:
        if isinstance(fact, ExecutorLost):
            self._executor_lost(fact, now)
            return
        if isinstance(fact, TaskEnded):
            record = self._books.task_ended(fact)
        else:
            record = self._books.task_started(fact)
        self._see_barrier_restart(fact.stage_id)
        if record is not None and isinstance(fact, TaskEnded):
            self._route_end(record)

    def _route_end(self, record: TaskRecord) -> None:
        for operator in self._in_stage(record.stage_id):
            operator.task_ended(record)

    def _executor_lost(self, fact: ExecutorLost, now: float) -> None:
        """Its tasks are over. One that is ENDING may have succeeded just before: Spark's own word decides."""
        for stage in list(self._books.stages.values()):
            for task in list(stage.tasks.values()):
                if task.end is not None or not task.started or task.executor_id != fact.executor_id:
                    continue
                operators = list(self._in_stage(stage.stage_id))
                if any(self._is_ending(operator, task.task_attempt_id) for operator in operators):
                    for operator in operators:
                        operator.want_look(now + self._config.heal_after_s)
                    continue
                task.end = TaskOutcome.EXECUTOR_LOST
                task.end_reason = fact.reason or f"executor {fact.executor_id} was lost"
                self._route_end(task)

    @staticmethod
    def _is_ending(operator: OperatorLedger, task_attempt_id: int) -> bool:
        entry = None if operator.run is None else operator.run.find(task_attempt_id)
        return entry is not None and entry.state is AttemptState.ENDING

    def _see_barrier_restart(self, stage_id: int) -> None:
        stage = self._books.stages.get(stage_id)
        if stage is not None and stage.barrier and stage.latest_attempt > 0:
            for operator in self._in_stage(stage_id):
                operator.barrier_attempt_failed(stage.latest_attempt - 1)

    def _stage_fact(self, fact: StageSubmitted | StageCompleted, now: float) -> None:
        if isinstance(fact, StageSubmitted):
            self._books.stage_submitted(fact)
            for operator in self._in_stage(fact.stage_id):  # a registration has overtaken this fact
                if too_few := operator.why_too_few(fact.stage_id):
                    operator.fail_globally(too_few)
        else:
            self._books.stage_completed(fact)
            for operator in self._in_stage(fact.stage_id):
                operator.want_look(now + self._config.heal_after_s)  # ends may still come, or be lost
                if fact.failure is not None and self._books.stage(fact.stage_id).barrier:
                    operator.barrier_attempt_failed(fact.stage_attempt)
        self._see_barrier_restart(fact.stage_id)
        if isinstance(fact, StageSubmitted) and fact.barrier:
            self._see_part_of_barrier_stage(fact)

    def _see_part_of_barrier_stage(self, fact: StageSubmitted) -> None:
        """When only a part of it runs again, Spark counts what the rest of the failed attempt has done."""
        stage = self._books.stages.get(fact.stage_id)
        if stage is not None and fact.task_count < stage.task_count:
            kept = f"{stage.task_count - fact.task_count} tasks of a failed attempt of barrier stage {fact.stage_id}"
            for operator in self._in_stage(fact.stage_id):
                unwanted.fail_for_success(operator, kept)

    def _job_fact(self, fact: JobStarted | JobEnded, now: float) -> None:
        if isinstance(fact, JobEnded):
            self._job_ended(fact.job_id, fact.succeeded, fact.reason)
        elif self._books.job_started(fact, now):
            for stage_id in fact.stage_ids:
                for operator in self._in_stage(stage_id):
                    operator.cancel_jobs()  # of a run that failed before its job was known

    def _job_ended(self, job_id: int, succeeded: bool, reason: str) -> None:
        if job_id in self._books.ended_jobs:
            return
        failure = None if succeeded else reason or f"job {job_id} failed"
        orphan = job_id not in self._books.job_stages
        over = self._books.job_ended(job_id, failure)
        if orphan:  # its start was lost: it is the job of a run without one that has nothing left to do (H19)
            over = [s.stage_id for s in self._books.stages.values() if self._is_waiting_for_its_job(s, failure)]
            for stage_id in over:
                self._books.stages[stage_id].failures.extend([] if failure is None else [failure])
        for stage_id in over:
            failures = self._books.stages[stage_id].failures
            for operator in self._in_stage(stage_id):
                operator.end_run(not failures, "; ".join(failures))
            self._books.forget_stage(stage_id)

    def _is_waiting_for_its_job(self, stage: StageRecord, failure: str | None) -> bool:
        """After a ``failure`` it may be that of a stage whose latest attempt has failed, and has not come again."""
        if stage.jobs or not stage.hosts_operator:
            return False
        operators = list(self._in_stage(stage.stage_id))
        given_up = failure is not None and stage.failed_attempt == stage.latest_attempt
        done = (
            given_up
            or stage.completed_well
            or all(
                o.run is not None and all(o.run.subtask(i).finished for i in range(o.parallelism)) for o in operators
            )
        )
        return bool(operators) and done and not any(o.run is not None and o.run.living() for o in operators)

    # --- looks ----------------------------------------------------------------------------------------------

    def _look_if_due(self, now: float) -> None:
        tasks: set[int] = set()
        jobs: set[int] = set()
        for operator in self._operators.values():
            if operator.look_at is not None and operator.look_at <= now:
                more_tasks, more_jobs = judge.look(operator, now)
                tasks |= more_tasks
                jobs |= more_jobs
                judge.settle(operator, now)
        if tasks or jobs:
            self._out.append(QueryStatus(frozenset(tasks), frozenset(jobs)))

    def _status_reported(self, fact: StatusReported, now: float) -> None:
        for operator in self._operators.values():
            judge.tasks_reported(operator, fact)
        for job_id in sorted(job_id for job_id, active in fact.jobs.items() if not active):
            self._job_reported_over(job_id, fact, now)
        for operator in self._operators.values():
            judge.conflicts_reported(operator, fact)
            judge.answered(operator)

    def _job_reported_over(self, job_id: int, fact: StatusReported, now: float) -> None:
        """The second such report counts: the fact, which alone says how the job ended, may be on its way."""
        operators = [o for s in self._books.job_stages.get(job_id, ()) for o in self._in_stage(s)]
        if not operators:
            return  # of any other job only its own end says something
        since = self._books.job_over_since.setdefault(job_id, now)
        if now < since + self._config.query_every_s:
            for operator in operators:
                operator.want_look(since + self._config.query_every_s)
            return
        whole = all(
            operator.run is None
            or (
                operator.looks_whole(operator.run)
                and not any(fact.tasks.get(e.task_attempt_id) is TaskState.RUNNING for e in operator.run.living())
            )
            for operator in operators
        )
        self._job_ended(job_id, whole, "" if whole else f"job {job_id} is over, but how it ended was lost")


__all__ = ["AttemptLedger"]
