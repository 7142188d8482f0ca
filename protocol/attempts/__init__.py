# SPDX-License-Identifier: Apache-2.0

"""The attempt ledger: which attempts of which subtasks are alive (H1-H3, H10-H17, H19, H55, H57, H69).

The ledger has two streams of input. *Facts* are what Spark posts on its listener bus: in its own order, but late, and
some are dropped or duplicated. *Words* are what the tasks say themselves: a registration, "open", a last word. The two
race: under load a registration arrives before the fact that its task was started. So the ledger keeps what Spark has
said (``EngineRecords``) apart from what it has decided (``OperatorRecord``). It records each input, and then *settles*:
it decides again on every waiting registration with what is known now. The order in which the inputs arrive does not
matter, except where the bus's own order is a proof.

===================  ==================================================================================================
this module          the inputs, decisions and requests
``records``          what is known, of Spark and of each operator; the states of an attempt as a table
``admission``        decides about a registration; reads, and returns a verdict
``reconciliation``   what to ask Spark's own records, and what an answer means; which successes must not count; reads
``operator``         one operator: the only module that changes its record
``ledger``           the machine: takes inputs, and passes each to the operators that it concerns
``views``            what is known, for people
===================  ==================================================================================================

The ledger returns two kinds of values. A *decision* is a fact about an operator, in the past tense. The operator's
barrier tracker takes the same value as its input, and several go on to the coordinator unchanged. So one name leads
from the bridge to the user's method: ``SubtaskFailed`` to ``subtask_failed``. A *request* is an imperative for the
bridge to carry out: answer a registration, kill a task, cancel a job, query Spark's own records.

Carry out the effects of one ``handle`` call in their order, and those of one call before those of the next. That order
*is* H10: a failure comes before the reset that follows from it, and the reset before the acceptance of the next
attempt. ``KillTask``, ``CancelJobs`` and ``QueryStatus`` may run in the background.

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
while it is in the middle, the run fails (``reconciliation``).

What may be said of an attempt, and the resulting state (``records.TABLE``; a dash is stale)::

    state      opened   ended well   ended badly   expired, condemned   Spark: success   Spark: other end
    ACCEPTED   READY    ENDING       OVER          OVER, killed         FINISHED         OVER
    READY      -        ENDING       OVER          OVER, killed         FINISHED         OVER
    ENDING     -        -            -             -                    FINISHED         OVER
    FINISHED   -        -            -             -                    -                OVER, revoked
    OVER       -        -            -             -                    -                -
"""

from __future__ import annotations

from enum import Enum

from protocol.arguments import AT_LEAST_1, check_fields, checked_names
from protocol.facts import EngineFact, TaskPlace
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.values import value
from protocol.wire.messages import RefusalCode, Register, RestoreMode

MODES = {int(mode): mode for mode in RestoreMode}
"""The modes that a registration may have, by number."""


@checked_names
@value
class LedgerConfig:
    """How long Headgate waits for a fact before it asks Spark, and how often a subtask may be killed.

    All times are in seconds, on the clock of ``now``.

    ``attempts_max``: the job fails when Headgate has killed this many attempts of one subtask in one run, because an
    event was not confirmed in time, a connection did not come back, or a later attempt took over. None: the
    ``spark.task.maxFailures`` of the Spark context, or F on a master ``local[N,F]``. In streaming mode an attempt that
    lived for ``kills_forgotten_after_s`` starts the count again.
    """

    heal_after_s: float = 5.0  # how long an undecided thing waits for its fact before Spark is asked (H19)
    query_every_s: float = 2.0  # how often Spark is asked again while it stays undecided
    audit_every_s: float = 30.0  # how often Spark is asked without a cause, to find facts that nothing misses
    give_up_after_s: float = 60.0  # after this, an undecided registration is refused: nothing waits permanently
    attempts_max: int | None = None  # H69
    kills_forgotten_after_s: float = 3600.0

    def __post_init__(self) -> None:
        check_fields(self, attempts_max=AT_LEAST_1)


# --- inputs -------------------------------------------------------------------------------------------------


@value
class OperatorAdded:
    """A coordinator is ready for ``operator_id``.

    Raises ``LocalProtocolError`` if there is one already. ``allow_fewer``: a run may have fewer partitions than
    subtasks.
    """

    operator_id: str
    parallelism: int
    allow_fewer: bool = False


@value
class OperatorRemoved:
    """The coordinator is removed. A run in progress ends as failed. Unknown ids are ignored."""

    operator_id: str


@value
class RegistrationArrived:
    """A task has registered. ``connection_id`` is only repeated in the answer."""

    connection_id: int
    message: Register


@value
class OperatorOpened:
    """The attempt has restored its state and is open (H11)."""

    operator_id: str
    task_attempt_id: int


@value
class OperatorEnded:
    """The task says that its operator has ended. ``failure`` is empty if it succeeded."""

    operator_id: str
    task_attempt_id: int
    failure: str


@value
class ConnectionExpired:
    """The connection broke, and did not come back within ``reconnect_timeout_s`` (H24)."""

    operator_id: str
    task_attempt_id: int


@value
class AttemptCondemned:
    """Headgate gives this attempt up, for example because an event was not confirmed in time (H25).

    ``silent``: it gave no sign of life (H94). ``unusable``: it did not miss a deadline, but its event cannot be read,
    or its state not be restored (H62).
    """

    operator_id: str
    task_attempt_id: int
    reason: str
    silent: bool = False
    unusable: bool = False


@value
class GlobalFailureRaised:
    """The coordinator has failed, or called ``fail_job`` (H7, H8)."""

    operator_id: str
    cause: str


AttemptWord = OperatorOpened | OperatorEnded | ConnectionExpired | AttemptCondemned
"""The inputs from, or about, one attempt. They can be stale (H3)."""

LedgerInput = (
    OperatorAdded | OperatorRemoved | EngineFact | RegistrationArrived | AttemptWord | GlobalFailureRaised | TimePassed
)


# --- why an attempt is over ---------------------------------------------------------------------------------


class FailureKind(Enum):
    """Why an attempt is over."""

    # H12

    FAILED = "failed"
    KILLED = "killed"
    SUPERSEDED = "superseded"  # another attempt of the subtask has succeeded
    EXECUTOR_LOST = "executor lost"
    FETCH_FAILED = "fetch failed"
    REVOKED = "revoked"  # a success whose output is lost: the same input must be handed out again (H17, H56)
    CONFIRMATION_TIMEOUT = "confirmation timeout"
    HEARTBEAT_TIMEOUT = "heartbeat timeout"
    CONNECTION_LOST = "connection lost"
    UNUSABLE = "unusable"  # its event cannot be read, or its state not be restored
    GLOBAL_FAILURE = "global failure"
    RUN_ENDED = "run ended"
    LOST_FACT = "lost fact"  # over, as inferred from other facts than its own end (H19)


@value
class FailureReason:
    """Why an attempt is over: the kind to decide by, the text for people. ``str()`` gives both."""

    kind: FailureKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.text}" if self.text else self.kind.value


# --- decisions ----------------------------------------------------------------------------------------------


@value
class RunStarted:
    """A new run of the operator begins. If it is not the first, an ``OperatorReset`` comes before it (H55)."""

    operator_id: str
    run_id: int


@value
class AttemptAccepted:
    """Build the attempt's gateway and answer its registration, which came on ``connection_id``.

    The attempt's number is given out here (H2). ``partitions``: those of the run's RDD, if they may be fewer than the
    subtasks; 0 if there are as many.
    """

    attempt: ExecutionAttempt
    mode: RestoreMode
    run_id: int
    connection_id: int
    partitions: int = 0


@value
class SubtaskReady:
    """The attempt is ready: started, registered, restored, open and alive (H11)."""

    attempt: ExecutionAttempt


@value
class SubtaskFailed:
    """The attempt is over without success, or its success was revoked (H12, H17).

    Its gateway ends first, then the coordinator is told (H14, H26). If the attempt was never accepted, its number is
    new (H11).
    """

    attempt: ExecutionAttempt
    reason: FailureReason


@value
class SubtaskFinished:
    """Spark counts the attempt as a success, which can be revoked until the run ends (H17, H86).

    Earlier messages of the attempt count, and later ones are stale (H3). Its final state comes separately, before or
    after this. Other attempts of the subtask that are alive fail right after it, as superseded.
    """

    attempt: ExecutionAttempt


@value
class SubtaskReset:
    """No attempt of the subtask is alive any more. The next one is accepted after this, and restores (H10, H13)."""

    operator_id: str
    subtask: int


@value
class OperatorReset:
    """The coordinator is reset as a whole, and everything restores (H15, H55). Nothing of the operator is alive."""

    operator_id: str
    cause: str


@value
class RunEnded:
    """The run is over: its remaining gateways, finished ones too, end silently (H57).

    ``computed``: how many partitions a successful job computed, if it left some out, as ``take`` does; otherwise 0.
    ``missing``: of how many subtasks no task came, although a successful job went through all partitions.
    ``job_succeeded``: Spark called each job of the run a success, so a plain action has returned its result, even if
    the run failed meanwhile.
    """

    operator_id: str
    run_id: int
    succeeded: bool
    reason: str = ""
    computed: int = 0
    missing: int = 0
    job_succeeded: bool = False


Decision = (
    RunStarted
    | AttemptAccepted
    | SubtaskReady
    | SubtaskFailed
    | SubtaskFinished
    | SubtaskReset
    | OperatorReset
    | RunEnded
)
"""The ledger's decisions about one operator."""


# --- requests -----------------------------------------------------------------------------------------------


@value
class RefuseRegistration:
    """Answer with a refusal and end the connection. The registration does not become an attempt."""

    connection_id: int
    task_attempt_id: int
    code: RefusalCode
    message: str


@value
class KillTask:
    """Have Spark kill exactly this task attempt, which may already be over.

    ``count``: how many attempts of this subtask have been killed in this run, with this one, of at most ``limit``; 0
    for a kill that is not the attempt's fault and does not count (H69). ``attempt``: None if it was never accepted.
    ``place``: what the task has claimed to be. If Spark runs it elsewhere, leave it alone (H75).
    """

    task_attempt_id: int
    reason: str
    operator_id: str = ""
    subtask: int | None = None
    attempt: int | None = None
    count: int = 0
    limit: int = 0
    place: TaskPlace | None = None


@value
class CancelJobs:
    """Have Spark cancel these jobs, after a global failure (H8). They may be over already."""

    job_ids: tuple[int, ...]
    reason: str


@value
class QueryStatus:
    """Query Spark's own records. ``StatusReported`` is the answer; if none comes, the ledger asks again."""

    task_attempt_ids: frozenset[int]
    job_ids: frozenset[int]


@value
class ReportStale:
    """An input from, or about, an attempt that is over or unknown was dropped: count and log it (H3)."""

    what: str
    operator_id: str
    task_attempt_id: int


LedgerEffect = Decision | RefuseRegistration | KillTask | CancelJobs | QueryStatus | ReportStale
