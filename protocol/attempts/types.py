# SPDX-License-Identifier: Apache-2.0

"""The inputs, decisions and requests of the attempt ledger.

The ledger returns two kinds of values. A *decision* is a fact about an operator, in the past tense. The operator's
barrier tracker takes the same value as its input, and several go on to the coordinator unchanged. So one name leads
from the bridge to the user's method: ``SubtaskFailed`` to ``subtask_failed``. A *request* is an imperative for the
bridge to carry out: answer a registration, kill a task, cancel a job, query Spark's own records.

Carry out the effects of one ``handle`` call in their order, and those of one call before those of the next. That order
*is* H10: a failure comes before the reset that follows from it, and the reset before the acceptance of the next
attempt. ``KillTask``, ``CancelJobs`` and ``QueryStatus`` may run in the background.
"""

from __future__ import annotations

from enum import Enum

from protocol.arguments import AT_LEAST_1, check_fields
from protocol.facts import EngineFact, TaskPlace
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.values import value
from protocol.wire.messages import RefusalCode, Register, RestoreMode

MODES = {int(mode): mode for mode in RestoreMode}
"""The modes that a registration may have, by number."""


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
    """

    operator_id: str
    run_id: int
    succeeded: bool
    reason: str = ""
    computed: int = 0
    missing: int = 0


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
