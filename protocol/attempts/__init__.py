# SPDX-License-Identifier: Apache-2.0

"""The attempt ledger: which attempts of which subtasks are alive (H1-H3, H10-H17, H19, H55, H57, H69).

The ledger has two streams of input. *Facts* are what Spark posts on its listener bus: in its own order, but late, and
some are dropped or duplicated. *Words* are what the tasks say themselves: a registration, "open", a last word. The two
race: under load a registration arrives before the fact that its task was started. So the ledger keeps what Spark has
said (``EngineRecords``) apart from what it has decided (``OperatorRecord``). It records each input, and then *settles*:
it decides again on every waiting registration with what is known now. The order in which the inputs arrive does not
matter, except where the bus's own order is a proof.

===================  ====================================================================================
``types``            the inputs, decisions and requests
``table``            the states of an attempt
``records``          what is known, of Spark and of each operator
``admission``        decides about a registration; reads, and returns a verdict
``reconciliation``   what to ask Spark's own records, and what an answer means; reads, and returns findings
``unwanted``         successes that must not count; reads
``operator``         one operator: the only module that changes its record
``ledger``           the machine: takes inputs, and passes each to the operators that it concerns
===================  ====================================================================================

For each subtask, the ledger reports accepted(n), ready(n), then finished(n) or failed(n), reset, accepted(n+1) (H10).
An attempt gets its number when it is accepted, or when it is reported failed without ever being accepted (H2, H11).

**Accepting.** A registration is accepted immediately, without waiting for a fact, if no attempt of its subtask is alive
or finished in this run. Otherwise it is held until the relation of the two is known (``records.relate``). Spark assigns
task ids in the order of launches, so the smaller id is the older task.

- The older task's end has come: it is failed and reset, and the newer one is accepted.
- The newer task's start has come, and it is plain and of the same stage attempt. Spark posts an end before the next
  start, so the end was dropped. The older one fails with LOST_FACT. If it had said that it ended well, it fails with
  REVOKED, because it may have succeeded.
- The newer task is speculative, or of another stage attempt (a zombie's rival): both are alive, and it is accepted as
  well (H13). This does not hold in streaming mode, where both would continue from one state, and the coordinator can
  follow only one of them. There the later one takes over: the older is superseded, killed and reset first. But if the
  older one has said that it ended well, the copy waits. An older task that registers late is refused and killed.
- The older task has *finished*: a copy is not needed, and waits until it ends. It is a copy if its start says so, or if
  it was launched before the success. Anything else is a rerun: the success is revoked (H17), the subtask is reset, and
  the rerun is accepted.
- A task of a barrier stage always waits for its start, which says whether its stage attempt has failed.

**Claims.** A registration is what a peer claims; a peer with the operator's key can make one (H75). Spark *confirms* a
task by a fact that names it, or by its own records, with the stage and the partition. Until then, a registration is
accepted only where it displaces nothing. It waits beside any other attempt; nothing is concluded from its task id; it
ends no run. An unconfirmed attempt gives way when Spark confirms a task that waits for it and does not know this one.
Nothing that runs is ever unknown to Spark's schedulers, so a lost fact costs a real task a look, but not its place. A
claim that is refuted is dropped without a trace: the real task may register under the same id. Of two claims to one id
the first counts until Spark has confirmed or refuted it.

**Ending.** An attempt fails when Spark or the task itself says so; KILLED, SUPERSEDED and the other kinds say why
(H12). It is over as soon as this is reported. Whatever it says later is reported as stale, in one place (H3). A last
word that says "well" is a point of no return: after it, only Spark's word counts, its success or its end, because its
output may be counted already. So a task must not end well before its last word is confirmed. If Spark counts a success
of an attempt that *we* gave up, the job fails: no result is better than one that is counted twice. A subtask has one
success: when an attempt finishes, the others of its subtask are superseded and killed. The reset comes right after the
failure that leaves no attempt alive and none finished.

**Runs.** A run is a stage; it lasts until every job that names the stage has ended. At its end, live attempts fail. In
a successful run, the attempt that said it ended well, or the only one, finishes instead: its last fact is late or lost.
The operator is reset as a whole before the first accept of the next run, and before that of the next attempt of a
barrier stage. It is reset once, however many failures caused it. A global failure holds for the rest of the run: its
jobs are cancelled, and its tasks refused. A second run waits for the end of the first. It is refused if Spark says that
the first is still active (H55).

**Kills.** Spark counts a failure against ``spark.task.maxFailures``, but never a kill. Without Headgate's own count, an
attempt that we kill, and whose successors end in the same way, would be rerun forever (H69).

- Counted: the attempt expired or was condemned; a later one took over; or Spark does not know it any more and a later
  one has come.
- Not counted: a copy that lost to the success of another; what dies with a run that fails anyway; and a task whose
  connection was lost while its registration was held. That task fails by itself, which Spark counts, or is dead.
- The count is per subtask and run, as Spark's is per task and task set. Neither a success in between nor a success that
  is revoked later restarts it, and the next action begins at 0. A barrier stage that is rerun keeps its count. A
  streaming run may last for months: there, killing an attempt that was accepted ``kills_forgotten_after_s`` ago or
  earlier restarts the count.
- At ``attempts_max`` the run fails globally.

**Healing.** Nothing waits permanently for a fact. After ``heal_after_s`` without a decision, Spark is asked
(``QueryStatus``), and again every ``query_every_s``; after ``give_up_after_s`` the registration is refused. The audit
finds facts that nothing waits for. An answer can overtake facts that are still on their way. Therefore:

- An answer decides on a registration only if it was asked for after the registration came.
- A job must be known for ``heal_after_s`` before it is asked about, and must be reported over twice.
- A run without a known job and a living attempt ends at the second answer after which that is still so, because each
  answer is preceded by the starts of all active jobs.
- "Unknown" ends an attempt only if a later one waits that Spark confirms. It confirms nothing (H75).

A job that was never seen to start is assigned to a run when it ends: to the run that has nothing left to do or, if the
job ends badly, to the run whose stage has failed. Otherwise, a run whose job is unknown ends when the next begins or
Spark knows no job of it, and none of its tasks runs. With facts lost, a task beside a zombie can look like a rerun of
the zombie's success. That success is then revoked needlessly, which is harmless, because the same input is handed out
again (H56). A copy can look like a rerun, too; when Spark kills it because of the first success, or the job ends well
while it is in the middle, the run fails (``unwanted``).

What may be said of an attempt, and the resulting state (``table.TABLE``; a dash is stale)::

    state      opened   ended well   ended badly   expired, condemned   Spark: success   Spark: other end
    ACCEPTED   READY    ENDING       OVER          OVER, killed         FINISHED         OVER
    READY      -        ENDING       OVER          OVER, killed         FINISHED         OVER
    ENDING     -        -            -             -                    FINISHED         OVER
    FINISHED   -        -            -             -                    -                OVER, revoked
    OVER       -        -            -             -                    -                -
"""

from protocol.attempts.ledger import AttemptLedger
from protocol.attempts.types import (
    AttemptAccepted,
    AttemptCondemned,
    CancelJobs,
    ConnectionExpired,
    Decision,
    FailureKind,
    FailureReason,
    GlobalFailureRaised,
    KillTask,
    LedgerConfig,
    LedgerEffect,
    LedgerInput,
    OperatorAdded,
    OperatorEnded,
    OperatorOpened,
    OperatorRemoved,
    OperatorReset,
    QueryStatus,
    RefuseRegistration,
    RegistrationArrived,
    ReportStale,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.attempts.views import AttemptView, KnownAttempts, RunView

__all__ = [
    "AttemptAccepted",
    "AttemptCondemned",
    "AttemptLedger",
    "AttemptView",
    "CancelJobs",
    "ConnectionExpired",
    "Decision",
    "FailureKind",
    "FailureReason",
    "GlobalFailureRaised",
    "KillTask",
    "KnownAttempts",
    "LedgerConfig",
    "LedgerEffect",
    "LedgerInput",
    "OperatorAdded",
    "OperatorEnded",
    "OperatorOpened",
    "OperatorRemoved",
    "OperatorReset",
    "QueryStatus",
    "RefuseRegistration",
    "RegistrationArrived",
    "ReportStale",
    "RunEnded",
    "RunStarted",
    "RunView",
    "SubtaskFailed",
    "SubtaskFinished",
    "SubtaskReady",
    "SubtaskReset",
]
