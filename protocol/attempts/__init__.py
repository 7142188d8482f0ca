"""The attempt ledger: which attempts of which subtasks are alive (H1-H3, H10-H17, H19, H55, H57, H69).

Two streams come in. The *facts* are what Spark posts on its listener bus: in its own order, but late, and some
are dropped or doubled. The *words* are what the tasks say themselves: a registration, "open", a last word. They race:
under load a registration overtakes the fact that its task was started. So the ledger keeps what Spark has said
(``EngineRecords``) apart from what it has decided (``OperatorRecord``). It records each input, and then *settles*:
every registration that waits is decided on again with what is known now. The order in which the inputs came does not
matter, except where the bus's own order is a proof.

===================  ====================================================================================
``types``            what goes in and what comes out
``table``            the life of an attempt
``records``          what is known, of Spark and of each operator
``admission``        what becomes of a registration; reads, and returns a verdict
``reconciliation``   what to ask Spark's own records, and what an answer means; reads, and returns findings
``unwanted``         successes that must not count; reads
``operator``         one operator: the only one that changes its record
``ledger``           the machine: takes inputs, and hands each to the operators that it concerns
===================  ====================================================================================

What the ledger reports, per subtask: accepted(n), ready(n), then finished(n) or failed(n), reset, accepted(n+1) (H10).
A number is given out when an attempt is accepted, or when one is reported failed that never was (H2, H11).

**Accepting.** A registration is accepted immediately if no attempt of its subtask is alive or finished in this run;
no fact is waited for. Otherwise it is held until it is clear how the two stand (``records.relate``). Spark counts task
ids up as it launches; the smaller id is the older task.

- The older one's end came: it is failed and reset, and the newer one accepted.
- The newer one's start came, plain and of the same stage attempt: Spark posts an end before the next start, so the
  end was dropped. The older one fails with LOST_FACT, or with REVOKED if it had said that it ended well: it may have
  succeeded.
- The newer one is speculative, or of another stage attempt (a zombie's rival): both are alive, and it is accepted as
  well (H13). Not in streaming mode: the two would go on from one state, and the coordinator can follow only one of
  them. There the later one takes over. The older is superseded, killed and reset first, unless it has said that it
  ended well: then the copy waits. An older one that comes late is refused and killed.
- The older one has *finished*: a copy, known by its start or because it was launched before the success, is of no
  use and waits until it ends. Anything else is a rerun: the success is revoked (H17), reset, and the rerun accepted.
- A task of a barrier stage always waits for its start, which says whether its stage attempt has failed.

**Ending.** An attempt fails on Spark's word or on the task's own; KILLED, SUPERSEDED and the other kinds say why (H12).
It is over the moment this is reported: whatever it says later is reported stale, in one place (H3). A last word
that says "well" is a point of no return: only Spark's word, its success or its end, counts after it, because its
output may be counted already. A task must therefore not end well before its last word is confirmed. If Spark counts
a success of an attempt that *we* gave up, the job fails: better no result than one that is counted twice. A subtask has
one success: when an attempt finishes, others of its subtask are superseded and killed. The reset comes right after the
failure that leaves nobody alive and nothing finished.

**Runs.** A run is a stage; it lasts until every job that names the stage has ended. At its end live attempts fail. In a
good run the one that said it ended well, or the only one, finishes: its last fact is late or lost. The operator is
reset as a whole before the first accept of the next run, and of the next attempt of a barrier stage, once, however
many failures led there. A global failure holds for the rest of the run: its jobs are cancelled, its tasks refused. A
second run waits for the end of the first, and is refused when Spark says that the first is still active (H55).

**Kills.** Spark counts a failure against ``spark.task.maxFailures``, but never a kill. Without a count of our own, an
attempt that we kill, and whose successors end in the same way, would be run again without end (H69).

- What counts: the attempt expired or was condemned, a later one took over, or Spark does not know it any more and a
  later one has come.
- What does not: a copy that lost to the success of another, what dies with a run that fails anyway, and a task whose
  connection was lost while its registration was held. That one fails by itself, which Spark counts, or is dead already.
- The count is that of a subtask in one run, as Spark's is that of a task in one task set: neither a good attempt in
  between nor a success that is revoked later starts it again, and the next action begins at 0. A barrier stage that is
  run again keeps its count. A streaming run may last for months: there an attempt that was accepted
  ``kills_forgotten_after_s`` ago starts the count again when it is killed.
- At ``attempts_max`` the run fails globally.

**Healing.** Nothing waits permanently for a fact. What is undecided for ``heal_after_s`` is asked
(``QueryStatus``), again every ``query_every_s``, and refused after ``give_up_after_s``; what nobody misses is found
by the audit. A look can overtake facts on their way, so: an answer decides on a registration only if it was asked
for after that came; a job must be known for ``heal_after_s`` before it is asked about, and be reported over twice;
"unknown" ends an attempt only when a later one waits. A job that was never seen to start is taken to be
that of the run which has nothing left to do when an unknown job ends, or whose stage has failed when one ends badly.
Failing that, its run ends when the next begins and none of its tasks runs. With facts lost, a task beside a zombie can
look like a rerun of the zombie's success; it is then revoked for nothing, which is harmless, because the same input is
handed out again (H56). A copy can look so, too; when Spark kills it for the first success, the job fails
(``unwanted``).

What may be said of an attempt, and what becomes of it (``table.TABLE``; a dash is stale)::

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

__all__ = [
    "AttemptAccepted",
    "AttemptCondemned",
    "AttemptLedger",
    "CancelJobs",
    "ConnectionExpired",
    "Decision",
    "FailureKind",
    "FailureReason",
    "GlobalFailureRaised",
    "KillTask",
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
    "SubtaskFailed",
    "SubtaskFinished",
    "SubtaskReady",
    "SubtaskReset",
]
