"""What goes into the attempt ledger and what comes out of it.

Two kinds of values come out. A *decision* is a fact about an operator, in the past tense. It is the very value that the
operator's barrier tracker takes as its input, and several of them go on to the coordinator unchanged, so one name
leads from the bridge to the user's method: ``SubtaskFailed`` to ``subtask_failed``. A *request* is an imperative for
the bridge to carry out: answer a registration, kill a task, cancel a job, look at Spark's own records.

The effects of one ``handle`` call are to be carried out in their order, and those of one call before those of
the next. That order *is* H10: a failure stands before the reset that follows from it, the reset before the
acceptance of the next attempt. ``KillTask``, ``CancelJobs`` and ``QueryStatus`` may run in the background.
"""

from __future__ import annotations

from enum import Enum

from protocol.facts import EngineFact
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.values import value
from protocol.wire.messages import RefusalCode, Register, RestoreMode


@value
class LedgerConfig:
    """How long the ledger waits before it asks (H19), and how often a subtask may be killed (H69).

    All times are in seconds, on the clock of ``now``.

    ``attempts_max``: the job fails when Headgate has killed this many attempts of one subtask in one run, because an
    event was not confirmed in time, a connection did not come back, or a later attempt took over. None: the
    ``spark.task.maxFailures`` of the Spark context, or F on a master ``local[N,F]``. In streaming mode an attempt that
    lived for ``kills_forgotten_after_s`` starts the count again.
    """

    heal_after_s: float = 5.0  # an undecided thing waits this long for its fact, then Spark's own records are asked
    query_every_s: float = 2.0  # and again at this interval while it stays undecided
    audit_every_s: float = 30.0  # a look without cause, for facts that nobody misses
    conflict_wait_s: float = 1.0  # the job of a second run has started and the first one's has not ended
    give_up_after_s: float = 60.0  # a registration that nothing decides is refused: nothing waits permanently
    attempts_max: int | None = None
    kills_forgotten_after_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in (
            "heal_after_s",
            "query_every_s",
            "audit_every_s",
            "conflict_wait_s",
            "give_up_after_s",
            "kills_forgotten_after_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a positive number of seconds, not {getattr(self, name)!r}")
        if self.attempts_max is not None and self.attempts_max < 1:
            raise ValueError(f"attempts_max must be at least 1, or None for Spark's own, not {self.attempts_max!r}")


# --- inputs -------------------------------------------------------------------------------------------------


@value
class OperatorAdded:
    """A coordinator stands ready for ``operator_id``.

    Refused (LocalProtocolError) if there is one already. ``allow_fewer``: a run may have fewer partitions than
    subtasks.
    """

    operator_id: str
    parallelism: int
    allow_fewer: bool = False


@value
class OperatorRemoved:
    """The coordinator goes away; if a run of it is going on, that ends as failed. Unknown ids are ignored."""

    operator_id: str


@value
class RegistrationArrived:
    """A task has said who it is. ``connection_id`` only comes back in the answer."""

    connection_id: int
    message: Register


@value
class OperatorOpened:
    """The attempt has restored its state and is open (H11)."""

    operator_id: str
    task_attempt_id: int


@value
class OperatorEnded:
    """The task says that its operator has ended. ``failure`` is empty when it ended well."""

    operator_id: str
    task_attempt_id: int
    failure: str


@value
class ConnectionExpired:
    """The connection broke and ``reconnect_timeout_s`` has gone by (H24)."""

    operator_id: str
    task_attempt_id: int


@value
class AttemptCondemned:
    """The framework gives this attempt up, say because an event was not confirmed in time (H25)."""

    operator_id: str
    task_attempt_id: int
    reason: str


@value
class GlobalFailureRaised:
    """The coordinator has failed, or called ``fail_job`` (H7, H8)."""

    operator_id: str
    cause: str


AttemptWord = OperatorOpened | OperatorEnded | ConnectionExpired | AttemptCondemned
"""What comes from, or about, one attempt: the inputs that can be stale (H3)."""

LedgerInput = (
    OperatorAdded | OperatorRemoved | EngineFact | RegistrationArrived | AttemptWord | GlobalFailureRaised | TimePassed
)


# --- why an attempt is over ---------------------------------------------------------------------------------


class FailureKind(Enum):
    """Why an attempt is over (H12)."""

    FAILED = "failed"
    KILLED = "killed"
    SUPERSEDED = "superseded"  # another attempt of the subtask has succeeded
    EXECUTOR_LOST = "executor lost"
    FETCH_FAILED = "fetch failed"
    REVOKED = "revoked"  # a success whose output is lost: the same input must be handed out again (H17, H56)
    CONFIRMATION_TIMEOUT = "confirmation timeout"
    CONNECTION_LOST = "connection lost"
    GLOBAL_FAILURE = "global failure"
    RUN_ENDED = "run ended"
    LOST_FACT = "lost fact"  # over, as we know from something else than its own end (H19)


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
    """A new run of the operator begins; an ``OperatorReset`` stands before it if there was one before (H55)."""

    operator_id: str
    run_id: int


@value
class AttemptAccepted:
    """Build the attempt's gateway and answer its registration, which came on ``connection_id``.

    The attempt's number is given out here (H2).
    """

    attempt: ExecutionAttempt
    mode: RestoreMode
    run_id: int
    connection_id: int


@value
class SubtaskReady:
    """The attempt is ready: started, registered, restored, open and alive (H11)."""

    attempt: ExecutionAttempt


@value
class SubtaskFailed:
    """The attempt is over without success, or its success was revoked (H12, H17).

    Its gateway ends first, then the coordinator is told (H14, H26). The attempt may never have been accepted; its
    number is new then (H11).
    """

    attempt: ExecutionAttempt
    reason: FailureReason


@value
class SubtaskFinished:
    """Spark counts the attempt as a success, which can be revoked until the run ends (H17).

    No method of the coordinator is called. What the attempt had said before counts, and what it says from here on is
    stale (H3). Its final state comes on its own way, before or after this.
    """

    attempt: ExecutionAttempt


@value
class SubtaskReset:
    """No attempt of the subtask is alive any more; the next one comes after this, and restores (H10, H13)."""

    operator_id: str
    subtask: int


@value
class OperatorReset:
    """The coordinator is reset as a whole, and everything restores (H15, H55). Nothing of the operator is alive."""

    operator_id: str
    cause: str


@value
class RunEnded:
    """The run is over: what is left of its gateways, finished ones too, ends silently (H57)."""

    operator_id: str
    run_id: int
    succeeded: bool
    reason: str = ""


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
"""What the ledger has decided about one operator."""


# --- requests -----------------------------------------------------------------------------------------------


@value
class RefuseRegistration:
    """Answer with a refusal; the connection ends. No attempt of the coordinator comes from it."""

    connection_id: int
    task_attempt_id: int
    code: RefusalCode
    message: str


@value
class KillTask:
    """Have Spark kill exactly this task attempt; it may be over already.

    ``count``: how many attempts of this subtask have been killed in this run, with this one, of at most ``limit``; 0
    for a kill that is not the attempt's fault and does not count (H69). ``attempt``: None if it was never accepted.
    """

    task_attempt_id: int
    reason: str
    operator_id: str = ""
    subtask: int | None = None
    attempt: int | None = None
    count: int = 0
    limit: int = 0


@value
class CancelJobs:
    """Have Spark cancel these jobs, after a global failure (H8). They may be over already."""

    job_ids: tuple[int, ...]
    reason: str


@value
class QueryStatus:
    """Look at Spark's own records; ``StatusReported`` brings the answer. If none comes, the ledger asks again."""

    task_attempt_ids: frozenset[int]
    job_ids: frozenset[int]


@value
class ReportStale:
    """Something came from, or about, an attempt that is over or unknown; it was dropped.

    Count and log it (H3).
    """

    what: str
    operator_id: str
    task_attempt_id: int


LedgerEffect = Decision | RefuseRegistration | KillTask | CancelJobs | QueryStatus | ReportStale
