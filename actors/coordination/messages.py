"""What the actors of one operator say to one another.

Inputs and effects of the machines travel as they are: ``SubtaskFailed`` is decided by the attempt ledger, taken and
handed on by the barrier tracker, and handled by the coordinator's actor, which calls ``subtask_failed``. The messages
below are the rest.

``callback_us`` is the moment, in microseconds since the epoch, at which the engine called back with the fact that a
message comes from; None if no fact caused it. It is measured, never decided upon.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from actors import ActorRef, Reply
from actors.coordination.confirmation import Confirmation
from actors.coordination.connection import AttemptConnection
from actors.coordination.interface import SubtaskGateway
from protocol.attempts import Decision, RunEnded, SubtaskFailed, SubtaskFinished
from protocol.barrier_tracker import (
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NotifyCheckpointDiscarded,
    OperatorResetToCheckpoint,
    SnapshotCoordinator,
    SubtaskResetToCheckpoint,
    TrackerInput,
)
from protocol.gateway.types import GatewayInput
from protocol.ids import ExecutionAttempt
from protocol.values import value
from protocol.wire.messages import UpMessage

# --- to a gateway -------------------------------------------------------------------------------------------------


@value
class SendEvent:
    payload: bytes
    loss_tolerant: bool
    confirmation: Confirmation


@value
class AttachConnection:
    """A connection of the attempt is there; ``received_seq`` is None on the first one, else what the peer has."""

    connection: AttemptConnection
    received_seq: int | None


@value
class MessagesArrived:
    connection_id: int
    messages: Sequence[UpMessage]


@value
class ConnectionClosed:
    connection_id: int
    reason: str


@value
class Retire:
    """The attempt is over and every event handed over before has been settled: the actor may go."""


@value
class NoteAwaited:
    """For every attempt that has a gateway: what the coordinator is waiting in; see ``CoordinatorAwaited``."""

    call: str
    awaited_s: float
    place: str


GatewayMessage = NoteAwaited | Retire | SendEvent | AttachConnection | MessagesArrived | ConnectionClosed | GatewayInput

# --- to the coordinator -------------------------------------------------------------------------------------------


@value
class StartCoordinator:
    """The first message of all (H6); answered when ``start`` has returned, failed with what it raised.

    ``restored``: the id and state of the checkpoint that the application starts from; ``reset_to_checkpoint`` comes
    before ``start`` then, and fails like it.
    """

    reply_to: Reply[None]
    restored: tuple[int, bytes] | None = None


@value
class EventArrived:
    """``report_taken``: tell the gateway that all events up to this one are taken. Not requested with each event: the
    report goes through two mailboxes and to the task, and the next one says as much. ``sender``: the subtask that sent
    it first, for an event out of a restored snapshot (H52).
    """

    attempt: ExecutionAttempt
    seq: int
    payload: bytes
    gateway_ref: ActorRef[GatewayMessage]
    report_taken: bool
    sender: int | None = None


@value
class RequestArrived:
    """A request out of a restored snapshot has a ``sender`` and no ``request_id``: no answer is awaited (H73)."""

    attempt: ExecutionAttempt
    seq: int
    request_id: int | None
    payload: bytes
    gateway_ref: ActorRef[GatewayMessage]
    sender: int | None = None


@value
class SubtaskReadyWithGateway:
    """``SubtaskReady``, with the gateway that the coordinator gets for the attempt.

    ``events_sent``: where the count of the attempt's upward events goes on (H32).
    """

    attempt: ExecutionAttempt
    gateway: SubtaskGateway
    gateway_ref: ActorRef[GatewayMessage]
    events_sent: int


@value
class Timed:
    """``message`` follows from a fact of Spark's, with which the engine called back at ``callback_us``."""

    message: SubtaskFailed | SubtaskResetToCheckpoint | RunEnded
    callback_us: int


@value
class CallHandler:
    """A continuation of the coordinator's own: a timer or the result of blocking work. ``caller`` names a failure."""

    handler: Callable[[], Awaitable[None]]
    caller: str = "call handler"


@value
class Settled:
    """How the last run of an operator ended.

    ``completed_id``: the last completed checkpoint, which a restart would restore; -1 for none. It also tells two runs
    apart that failed with the same text.
    ``uncommitted``: why the final checkpoint of the run that ended last failed, so that its last output is not
    committed; empty when it completed or none was due.
    ``failed``: with what the coordinator has failed since that run ended well, in streaming mode; else empty. It may
    have failed to commit what is complete.
    """

    completed_id: int
    uncommitted: str
    failed: str = ""


@value
class Flush:
    """Answered with ``settled`` when all that was sent to the coordinator before has been handled."""

    reply_to: Reply[Settled]
    settled: Settled


@value
class ClientRequest:
    """A request from the driver's side (R97), outside of every order with events and checkpoints.

    Answered with what ``handle_client_request`` returns, failed with what it raises. The tracker hands it on.
    """

    request: Any
    reply_to: Reply[Any]


CoordinatorMessage = (
    StartCoordinator
    | EventArrived
    | RequestArrived
    | SubtaskReadyWithGateway
    | SubtaskFailed
    | SubtaskFinished
    | SubtaskResetToCheckpoint
    | OperatorResetToCheckpoint
    | RunEnded
    | Timed
    | SnapshotCoordinator
    | NotifyCheckpointComplete
    | NotifyCheckpointAborted
    | NotifyCheckpointDiscarded
    | CallHandler
    | ClientRequest
    | Flush
)

# --- to the barrier tracker ---------------------------------------------------------------------------------------


@value
class LedgerDecided:
    """A decision of the attempt ledger about this operator, with the connection that it concerns, if any."""

    decision: Decision
    callback_us: int | None = None
    connection: AttemptConnection | None = None


@value
class StartOperator:
    """First message of a tracker: start the coordinator; answered as ``StartCoordinator`` is."""

    reply_to: Reply[None]


@value
class RequestCheckpoint:
    """Take a checkpoint; answered with its id once it is complete, failed with ``CheckpointFailed``.

    With ``savepoint_directory`` it is a savepoint: stored there, and no point that a reset restores (H49).
    """

    reply_to: Reply[int]
    savepoint_directory: str | None = None


@value
class AwaitSettled:
    """Answered once no run is in progress, no checkpoint is pending or waits, the final one of the run included, and
    the coordinator has handled all that was sent to it before.

    What the bridge has not received yet is not known here: ask it for the end of the runs first.
    """

    reply_to: Reply[Settled]


@value
class LabelCheckpoints:
    """Label the checkpoints from here on: see ``CheckpointLabels.announce``."""

    during: str
    after: str


@value
class LabelledWork:
    """``completed``: the label of the last completed checkpoint. ``runs``: how many have begun since
    ``LabelCheckpoints``. ``failed``: the operator has failed, and no reset has followed yet.
    """

    completed: str
    runs: int
    failed: bool


@value
class AskLabelledWork:
    """Answered immediately, with the state at that moment."""

    reply_to: Reply[LabelledWork]


TrackerMessage = (
    StartOperator
    | NoteAwaited
    | RequestCheckpoint
    | AwaitSettled
    | LabelCheckpoints
    | AskLabelledWork
    | ClientRequest
    | LedgerDecided
    | TrackerInput
)
