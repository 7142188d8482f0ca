# SPDX-License-Identifier: Apache-2.0

"""Mutants of the attempt ledger: live attempts, ready attempts, the consequences of a failure, and lost facts."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

ATTEMPTS = catalogue(r"""
failure-without-reset [FLINK-20290; H10]
  A subtask that failed is not reset; the coordinator has the failure alone to go by.
  @ protocol.attempts.operator:OperatorLedger._reset_if_vacant
  - self.out.append(SubtaskReset(self.record.operator_id, index))
timeout-fails-the-latest [FLINK-21996; H25]
  A confirmation that does not come fails the subtask's latest attempt, not the one that is silent.
  @ protocol.attempts.operator:OperatorLedger.take_word
  - entry = None if run is None else run.by_task.get(word.task_attempt_id)
  + entry = None if run is None else run.by_task.get(word.task_attempt_id); entry = \
  + (run.subtask(entry.attempt.subtask).living or [entry])[-1] if entry and isinstance(word, AttemptCondemned) \
  + else entry
kills-without-end [feared; H69]
  Attempts that the framework kills are run again however often, since Spark counts no kill.
  @ protocol.attempts.operator:OperatorLedger._kill
  T if count < limit:
reset-beside-the-living [feared; H13]
  A subtask is reset although another attempt of it is alive.
  @ protocol.attempts.operator:OperatorLedger._reset_if_vacant
  ~ if subtask.owes_reset and subtask.vacant: => if subtask.owes_reset and subtask.finished is None:
second-reset [feared; H15]
  A global failure resets the coordinator immediately, and once more before the next run.
  @ protocol.attempts.operator:OperatorLedger.fail_globally
  - self._fail_all_living(run, FailureKind.GLOBAL_FAILURE, cause)
  + self._fail_all_living(run, FailureKind.GLOBAL_FAILURE, cause); self._reset_operator(cause)
global-failure-without-reset [feared; H15 H55]
  After a global failure the coordinator is not reset.
  @ protocol.attempts.operator:OperatorLedger._reset_operator
  - self.out.append(OperatorReset(self.record.operator_id, cause))
revoked-success-not-noticed [feared; H17]
  A success that Spark revokes stays one, and the attempt that runs the partition again is accepted beside it.
  @ protocol.attempts.operator:OperatorLedger.task_ended
  ~ case Outcome.FAILED | Outcome.REVOKED: => case Outcome.FAILED:
  @ protocol.attempts.operator:OperatorLedger._end_earlier
  ~ if entry.state in (AttemptState.ENDING, AttemptState.FINISHED): => if entry.state is AttemptState.ENDING:
revoked-success-noticed-late [feared; H12 H17]
  A success that Spark revokes is taken back only when the partition's next attempt registers.
  @ protocol.attempts.operator:OperatorLedger.task_ended
  ~ case Outcome.FAILED | Outcome.REVOKED: => case Outcome.FAILED:
attempt-numbers-start-again [feared; H2]
  Attempt numbers start again with each run.
  @ protocol.attempts.operator:OperatorLedger._begin_run
  ~ self.record.run = RunRecord(run_id) => self.record.run = RunRecord(run_id); self.record.next_attempt.clear()
zombie-accepted [feared; H11 H13]
  A registration is accepted although Spark has said that its task is over.
  @ protocol.attempts.admission:decide
  F if task.end is not None:
older-attempt-accepted [feared; H10 H13]
  A registration is accepted although Spark has started a later attempt of the partition since.
  Argued: it only costs time: Spark starts the later one when the earlier one is over, so what is accepted is a task
  without a process, which never opens, is never announced, and is failed with its connection or by its end; in
  streaming mode it is refused all the same
  @ protocol.attempts.admission:_beside_newer
  ~ return Refusal(RefusalCode.ATTEMPT_OVER, f"Spark has => str(f"Spark has
predecessor-not-failed [feared; H10]
  A retry is accepted although nobody has said that the attempt before it is over.
  @ protocol.attempts.admission:_beside_rivals
  - predecessors.append(entry)
undecided-is-accepted [feared; H10 H13]
  A registration is accepted while a fact is missing that says what becomes of the attempt before it.
  @ protocol.attempts.admission:_beside_rivals
  ~ elif relation is Relation.UNDECIDED or (one_at_a_time and => elif (one_at_a_time and
streaming-copies [feared; H13]
  A streaming subtask may have two attempts at a time.
  @ protocol.attempts.admission:_beside_rivals
  ~ one_at_a_time = held.message.mode == RestoreMode.STREAMING => one_at_a_time = False
rival-of-a-success-lives-on [feared; H12 H13]
  When one attempt of a subtask has succeeded, the others go on.
  @ protocol.attempts.operator:OperatorLedger._finish
  ~ for rival in subtask.living: => for rival in ():
barrier-stage-keeps-its-finished [feared; H15 H17]
  A barrier stage fails, and what has finished in it counts as finished.
  @ protocol.attempts.operator:OperatorLedger._fail_over_barrier_stage
  ~ if entry.state is AttemptState.OVER: => if not entry.alive:
dropped-fact-never-healed [feared; H19]
  Nobody looks at Spark's records.
  @ protocol.attempts.operator:OperatorLedger.want_look
  ~ self.record.look_at = at => self.record.look_at = None
half-work-called-a-success [feared; H86]
  A job ends well while what looked like a rerun of a success is in the middle, and its half work counts.
  @ protocol.attempts.reconciliation:doubtful_success
  - may_count = stage.tasks[entry.task_attempt_id].end in (None, TaskOutcome.SUCCESS)
  + may_count = stage.tasks[entry.task_attempt_id].end is None
run-without-a-job-never-ends [feared; H19]
  A run stays open if the facts of both ends of its job are lost: every call that waits for its end fails for good.
  @ protocol.attempts.operator:OperatorLedger.job_reported
  - self._end_run_without_facts()
run-ends-at-the-first-look [feared; H19]
  A run ends at the first look that knows no job of it, which may have been asked before its job began.
  @ protocol.attempts.operator:OperatorLedger.job_reported
  F elif run.jobless_since is None:
  @ protocol.attempts.operator:OperatorLedger.job_reported
  ~ elif self.now >= run.jobless_since + self.config.query_every_s: => else:
run-ends-between-two-attempts [feared; H19]
  A look does not tell the start of the active jobs first, or it is not heard.
  @ protocol.attempts.reconciliation:is_jobless
  - return run is not None and not run.living() and not engine.active_jobs(run.run_id)
  + return run is not None and not run.living()
audit-never-comes [feared; H19]
  Nobody looks at Spark's records unless something is strange.
  @ protocol.attempts.operator:OperatorLedger._want_audit
  F if self.record.run is not None:
  @ protocol.attempts.operator:OperatorLedger._accept
  - self.want_look(self.now + self.config.audit_every_s)
  @ protocol.attempts.operator:OperatorLedger._begin_run
  - self.want_look(self.now + self.config.audit_every_s)
connection-loss-never-fails [feared; H24 H19]
  An attempt whose connection does not come back is not failed.
  @ protocol.attempts.operator:OperatorLedger.take_word
  - self._fail(entry, FailureKind.CONNECTION_LOST, "the task did not come back in time", kill=True)
condemned-is-not-killed [feared; H25 H48]
  An attempt that was given up is not killed: Spark goes on waiting for it.
  @ protocol.attempts.operator:OperatorLedger._fail
  ~ if kill else => if False else
unreadable-event-is-a-missed-deadline [feared; H62]
  An attempt whose event cannot be read is said to have missed a deadline.
  @ protocol.attempts.operator:_fault_of
  ~ if condemned.unusable => if False
job-is-not-cancelled [feared; H8 H15]
  A global failure does not cancel the job.
  @ protocol.attempts.operator:OperatorLedger.cancel_jobs
  ~ if run is None or => if True or run is None or
living-not-failed-at-run-end [feared; H15 H57]
  A run ends, and its living attempts are not reported failed.
  @ protocol.attempts.operator:OperatorLedger._end_subtask
  ~ for entry in subtask.living: => for entry in ():
claim-accepted [feared; H75]
  A registration beside a living attempt needs no confirmation by Spark.
  @ protocol.attempts.admission:_beside_rivals
  - must_wait = must_wait or not task.confirmed
  + must_wait = must_wait or not task.confirmed and held.seen is Seen.NOTHING
claim-displaces [feared; H75]
  A registration that Spark has not confirmed takes the place of a living attempt.
  @ protocol.attempts.admission:_beside_rivals
  - must_wait = must_wait or not task.confirmed
unknown-accepted [feared; H75]
  A task that Spark's own records do not know counts as running, because a connection claims it.
  @ protocol.attempts.operator:OperatorLedger._task_reported
  - held = record.held.get(task_attempt_id)
  + held = record.held.get(task_attempt_id); task = held and self.engine.task(held.message.run_id, task_attempt_id); \
  + task and setattr(task, "confirmed", True)
claim-never-refuted [feared; H75]
  A task may claim the id of another one, whatever Spark's facts say of that.
  @ protocol.attempts.ledger:AttemptLedger._task_located
  - operator.task_located(task_attempt_id, place)
claim-keeps-its-place [feared; H75]
  A task that came first keeps its subtask, although Spark knows only the task that waits for it.
  @ protocol.attempts.reconciliation:task_reported
  ~ return _claim_reported(known, engine, entry) => return None
claimed-run-keeps-its-place [feared; H75]
  A run in which Spark has confirmed no task keeps the real one out.
  @ protocol.attempts.reconciliation:conflict_reported
  ~ claimed = engine.only_claimed(run) => claimed = False
kill-by-id [feared; H75]
  Spark kills whatever task has the id that a peer has claimed.
  @ protocol.attempts.operator:OperatorLedger._place
  ~ return TaskPlace(self.record.run.run_id, subtask) => return None
success-is-not-told [feared; H86]
  The coordinator is not told that an attempt has finished.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_lifecycle
  - await self._tell_each("subtask_finished", attempt.subtask, attempt.attempt)
  + pass
finished-on-the-tasks-word [feared; H86]
  An attempt counts as finished when its operator has ended, before Spark counts it.
  @ protocol.attempts.operator:OperatorLedger.take_word
  ~ entry.state = AttemptState.ENDING => self._finish(entry, run.subtasks[entry.attempt.subtask])
superseded-before-the-success [feared; H86]
  What loses to a success is reported before that success.
  @ protocol.attempts.operator:OperatorLedger._finish
  - self.out.append(SubtaskFinished(entry.attempt))
  @ protocol.attempts.operator:OperatorLedger._finish
  -         self._fail(rival, reason.kind, reason.text)
  +         self._fail(rival, reason.kind, reason.text)
  +     self.out.append(SubtaskFinished(entry.attempt))
suspects-the-dead [feared; H87]
  The coordinator is given hints about attempts that are over.
  @ actors.coordination.engine.coordinator:CoordinatorActor._give_hint
  F if attempt.task_attempt_id not in self._live:
suspects-those-that-have-ended [feared; H87]
  An attempt whose operator has ended is suspected when its connection closes.
  @ protocol.gateway.machine:GatewayMachine._suspect
  ~ and not self._inbound.finished => and True
never-trusts-again [feared; H87]
  A connection that comes back does not take the suspicion back.
  @ protocol.gateway.machine:GatewayMachine._attach
  ~ self._trust(effects) => self._suspected = False
suspects-before-it-is-known [feared; H87]
  An attempt is suspected before the coordinator knows it.
  @ protocol.gateway.machine:GatewayMachine._suspect
  ~ if self._inbound.ready and => if True and
missing-subtasks-are-not-told [found; H58]
  A run whose stage has tasks without the operator ends as if all of its subtasks had come.
  @ protocol.attempts.operator:OperatorLedger._left_out
  - return 0, self.record.parallelism - came
  + return 0, 0
""")
