# SPDX-License-Identifier: Apache-2.0

"""Mutants of the attempt ledger: live attempts, ready attempts, the consequences of a failure, and lost facts."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

OPERATOR = "protocol.attempts.operator:OperatorLedger."
ADMISSION = "protocol.attempts.admission:"

ATTEMPTS = (
    Mutant(
        "failure-without-reset",
        "A subtask that failed is not reset; the coordinator has the failure alone to go by.",
        "FLINK-20290",
        ("H10",),
        (
            Edit(
                f"{OPERATOR}_after_failure",
                "self.out.append(SubtaskReset(self.record.operator_id, attempt.subtask))",
                "pass",
            ),
        ),
    ),
    Mutant(
        "timeout-fails-the-latest",
        "A confirmation that does not come fails the subtask's latest attempt, not the one that is silent.",
        "FLINK-21996",
        ("H25",),
        (
            Edit(
                f"{OPERATOR}take_word",
                "entry = None if run is None else run.by_task.get(word.task_attempt_id)",
                "entry = None if run is None else run.by_task.get(word.task_attempt_id);"
                " entry = (run.subtask(entry.attempt.subtask).living or [entry])[-1]"
                " if entry and isinstance(word, AttemptCondemned) else entry",
            ),
        ),
    ),
    Mutant(
        "kills-without-end",
        "Attempts that the framework kills are run again however often, since Spark counts no kill.",
        "feared",
        ("H69",),
        (Edit(f"{OPERATOR}_kill", "if count < limit:", "if True:"),),
    ),
    Mutant(
        "reset-beside-the-living",
        "A subtask is reset although another attempt of it is alive.",
        "feared",
        ("H13",),
        (Edit(f"{OPERATOR}_after_failure", "if subtask.vacant:", "if subtask.finished is None:"),),
    ),
    Mutant(
        "second-reset",
        "A global failure resets the coordinator immediately, and once more before the next run.",
        "feared",
        ("H15",),
        (
            Edit(
                f"{OPERATOR}fail_globally",
                "self._fail_all_living(run, FailureKind.GLOBAL_FAILURE, cause)",
                "self._fail_all_living(run, FailureKind.GLOBAL_FAILURE, cause); self._reset_operator(cause)",
            ),
        ),
    ),
    Mutant(
        "global-failure-without-reset",
        "After a global failure the coordinator is not reset.",
        "feared",
        ("H15", "H55"),
        (
            Edit(
                f"{OPERATOR}_reset_operator",
                "self.out.append(OperatorReset(self.record.operator_id, cause))",
                "pass",
            ),
        ),
    ),
    Mutant(
        "revoked-success-not-noticed",
        "A success that Spark revokes stays one, and the attempt that runs the partition again is accepted beside it.",
        "feared",
        ("H17",),
        (
            Edit(
                f"{OPERATOR}task_ended",
                "case Outcome.FAILED | Outcome.REVOKED:",
                "case Outcome.FAILED:",
            ),
            Edit(
                f"{OPERATOR}_make_room",
                "if entry.state in (AttemptState.ENDING, AttemptState.FINISHED):",
                "if entry.state is AttemptState.ENDING:",
            ),
        ),
    ),
    Mutant(
        "revoked-success-noticed-late",
        "A success that Spark revokes is taken back only when the partition's next attempt registers.",
        "feared",
        ("H12", "H17"),
        (
            Edit(
                f"{OPERATOR}task_ended",
                "case Outcome.FAILED | Outcome.REVOKED:",
                "case Outcome.FAILED:",
            ),
        ),
    ),
    Mutant(
        "attempt-numbers-start-again",
        "Attempt numbers start again with each run.",
        "feared",
        ("H2",),
        (
            Edit(
                f"{OPERATOR}_begin_run",
                "self.record.run = RunRecord(run_id)",
                "self.record.run = RunRecord(run_id); self.record.next_attempt.clear()",
            ),
        ),
    ),
    Mutant(
        "zombie-accepted",
        "A registration is accepted although Spark has said that its task is over.",
        "feared",
        ("H11", "H13"),
        (Edit(f"{ADMISSION}decide", "if task.end is not None:", "if False:"),),
    ),
    Mutant(
        "older-attempt-accepted",
        "A registration is accepted although Spark has started a later attempt of the partition since.",
        "feared",
        ("H10", "H13"),
        (Edit(f"{ADMISSION}_beside_newer", 'return Refusal(RefusalCode.ATTEMPT_OVER, f"Spark has', 'str(f"Spark has'),),
        argued=(
            "it only costs time: Spark starts the later one when the earlier one is over, so what is accepted is "
            "a task without a process, which never opens, is never announced, and is failed with its connection or "
            "by its end; in streaming mode it is refused all the same"
        ),
    ),
    Mutant(
        "predecessor-not-failed",
        "A retry is accepted although nobody has said that the attempt before it is over.",
        "feared",
        ("H10",),
        (Edit(f"{ADMISSION}_beside_rivals", "predecessors.append(entry)", "pass"),),
    ),
    Mutant(
        "undecided-is-accepted",
        "A registration is accepted while a fact is missing that says what becomes of the attempt before it.",
        "feared",
        ("H10", "H13"),
        (
            Edit(
                f"{ADMISSION}_beside_rivals",
                "elif relation is Relation.UNDECIDED or (one_at_a_time and",
                "elif (one_at_a_time and",
            ),
        ),
    ),
    Mutant(
        "streaming-copies",
        "A streaming subtask may have two attempts at a time.",
        "feared",
        ("H13",),
        (
            Edit(
                f"{ADMISSION}_beside_rivals",
                "one_at_a_time = held.message.mode == RestoreMode.STREAMING",
                "one_at_a_time = False",
            ),
        ),
    ),
    Mutant(
        "rival-of-a-success-lives-on",
        "When one attempt of a subtask has succeeded, the others go on.",
        "feared",
        ("H12", "H13"),
        (Edit(f"{OPERATOR}_finish", "for rival in subtask.living:", "for rival in ():"),),
    ),
    Mutant(
        "barrier-stage-keeps-its-finished",
        "A barrier stage fails, and what has finished in it counts as finished.",
        "feared",
        ("H15", "H17"),
        (
            Edit(
                f"{OPERATOR}_fail_over_barrier_stage",
                "if entry.state is AttemptState.OVER:",
                "if not entry.alive:",
            ),
        ),
    ),
    Mutant(
        "dropped-fact-never-healed",
        "Nobody looks at Spark's books.",
        "feared",
        ("H19",),
        (Edit(f"{OPERATOR}want_look", "self.record.look_at = at", "self.record.look_at = None"),),
    ),
    Mutant(
        "audit-never-comes",
        "Nobody looks at Spark's books unless something is strange.",
        "feared",
        ("H19",),
        (
            Edit("protocol.attempts.reconciliation:needs_audit", "return run is not None and", "return False and"),
            Edit(f"{OPERATOR}_accept", "self.want_look(self.now + self.config.audit_every_s)", "pass"),
            Edit(f"{OPERATOR}_begin_run", "self.want_look(self.now + self.config.audit_every_s)", "pass"),
        ),
    ),
    Mutant(
        "connection-loss-never-fails",
        "An attempt whose connection does not come back is not failed.",
        "feared",
        ("H24", "H19"),
        (
            Edit(
                f"{OPERATOR}take_word",
                'self._fail(entry, FailureKind.CONNECTION_LOST, "the task did not come back in time", kill=True)',
                "pass",
            ),
        ),
    ),
    Mutant(
        "condemned-is-not-killed",
        "An attempt that was given up is not killed: Spark goes on waiting for it.",
        "feared",
        ("H25", "H48"),
        (Edit(f"{OPERATOR}_fail", "if kill else", "if False else"),),
    ),
    Mutant(
        "job-is-not-cancelled",
        "A global failure does not cancel the job.",
        "feared",
        ("H8", "H15"),
        (Edit(f"{OPERATOR}cancel_jobs", "if run is None or", "if True or run is None or"),),
    ),
    Mutant(
        "living-not-failed-at-run-end",
        "A run ends, and its living attempts are not reported failed.",
        "feared",
        ("H15", "H57"),
        (Edit(f"{OPERATOR}_end_subtask", "for entry in subtask.living:", "for entry in ():"),),
    ),
)
