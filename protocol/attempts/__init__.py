"""The attempt ledger: which attempts of which subtasks are alive (H1-H3, H10-H17, H19, H55, H57, H69).

Two streams come in. The *facts* are what the engine posts on its listener bus: in its own order, but late, and some
are dropped or doubled. The *words* are what the tasks say themselves: a registration, "open", a goodbye. They race:
under load a registration overtakes the fact that its task was started. So the ledger keeps what it knows
(``books.py``) apart from what it has told (``entries.py``), takes each input down, and then *settles*
(``judge.py``): every registration that waits is looked at again with what is known now. The order in which the
inputs came does not matter but where the bus's own order is a proof.

What the ledger tells, per subtask: accept(n), ready(n), then finish(n) or failed(n), reset, accept(n+1) (H10). A
number is given out when an attempt is accepted, or when one is reported failed that never was (H2, H11).

**Accepting.** A registration is accepted at once when no attempt of its subtask is alive or finished in this run;
no fact is waited for. Otherwise it is held until it is clear how the two stand (``books.relate``). Spark counts task
ids up as it launches; the smaller id is the older task.

- The older one's end came: it is failed and reset, the newer one accepted.
- The newer one's start came, plain and of the same stage attempt: Spark posts an end before the next start, so the
  end was dropped. The older one fails with LOST_FACT (REVOKED if it had said goodbye: it may have succeeded).
- It is speculative, or of another stage attempt (a zombie's rival): both are alive, it is accepted beside (H13). Not in
  streaming mode: the two would go on from one state, and the coordinator can follow only one of them. There the later
  one takes over: the older is superseded, killed and reset first (unless it has said goodbye: then the copy waits), and
  an older one that comes late is refused and killed.
- The older one has *finished*: a copy, known by its start or because it was launched before the success, is of no
  use and waits until it ends. Anything else is a rerun: the success is revoked (H17), reset, and the rerun accepted.
- A task of a barrier stage always waits for its start, which says whether its stage attempt has failed.

**Ending.** FAILED and the like on Spark's word or on the task's own; KILLED, SUPERSEDED and the rest say why (H12).
An attempt is over the moment it is told so: whatever it says later is reported stale, in one place (H3). A goodbye
that says "well" is a point of no return: only Spark's word, its success or its end, counts after it, because its
output may be counted already. A task must therefore not end well before its goodbye is confirmed. Should Spark count
a success of an attempt that *we* gave up, the job is failed: rather no result than one that is counted twice. One
success per subtask: when an attempt finishes, others of its subtask are superseded and killed. The reset comes
right after the failure that leaves nobody alive and nothing finished.

**Runs.** A run is a stage; it lasts until every job that names the stage has ended. At its end live attempts fail
(in a good run the one that said goodbye, or the only one, finishes: its last fact is late or lost). The operator is
reset as a whole before the first accept of the next run, and of the next attempt of a barrier stage, once, however
many failures led there. A global failure latches for the run: its jobs are cancelled, its tasks refused. A second
run waits for the end of the first, and is refused when Spark says that the first is still active (H55).

**Kills.** An attempt that is killed for its own fault (it expired or was condemned, a later one took over, or Spark
does not know it any more and a later one has come) counts against ``attempts_max`` of its subtask in this run. At the
limit the run fails globally, because Spark itself counts no kill (``kills.py``, H69).

**Healing.** Nothing waits for ever for a fact. What is undecided for ``heal_after_s`` is asked
(``QueryStatus``), again every ``query_every_s``, and refused after ``give_up_after_s``; what nobody misses is found
by the audit. A look can overtake facts on their way, so: an answer decides on a registration only if it was asked
for after that came; a job must be known for ``heal_after_s`` before it is asked about, and be reported over twice;
"unknown" ends an attempt only when a later one stands waiting. A job that was never seen to start is taken to be
that of the run which has nothing left to do when an unknown job ends, or whose stage has failed when one ends badly;
failing that, its run ends when the next begins and none of its tasks runs. With facts lost, a task beside a zombie can
look like a rerun of the zombie's success; it is then revoked for nothing, which is harmless, because the same input is
handed out again (H56). A copy can look so, too; when Spark kills it for the first success, the job fails
(``unwanted.py``).

What may be said of an attempt (a row that is missing is stale)::

    state      opened   goodbye "well"   goodbye "failed"   expired, condemned   Spark: success   Spark: any other end
    ACCEPTED   READY    ENDING           OVER               OVER, killed         FINISHED         OVER
    READY      -        ENDING           OVER               OVER, killed         FINISHED         OVER
    ENDING     -        -                -                  -                    FINISHED         OVER
    FINISHED   -        -                -                  -                    -                OVER (revoked)
    OVER       -        -                -                  -                    -                -
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
