# SPDX-License-Identifier: Apache-2.0

"""The messages between the actors of one operator.

Inputs and effects of the machines travel unchanged. For example, the attempt ledger decides ``SubtaskFailed``, the
barrier tracker takes it and passes it on, and the coordinator's actor handles it and calls ``subtask_failed``. This
module has the other messages.

``callback_us`` is the time, in microseconds since the epoch, at which the engine called back with the fact that caused
a message; None if no fact caused it. It is only measured; no decision depends on it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from actors import Reply
from actors.coordination.engine.inputs import BatchInput
from actors.coordination.host.gateway import AttemptSends, GatewayLine, SendEvent
from protocol.attempts import Decision, RunEnded, SubtaskFailed, SubtaskFinished
from protocol.barrier_tracker import (
    CollectRecorded,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NotifyCheckpointDiscarded,
    OperatorResetToCheckpoint,
    SnapshotCoordinator,
    SubtaskResetToCheckpoint,
    TrackerInput,
)
from protocol.barrier_tracker.pending import CheckpointView
from protocol.file_retention import ClaimConfirmed, FilesDeleted, FilesListed, RestoreChosen
from protocol.gateway.types import GatewayInput
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT, ExecutionAttempt
from protocol.values import value
from protocol.wire.messages import Downward, Positions, UpMessage
from protocol.wire.state_handles import StateHandle

# --- to a gateway -------------------------------------------------------------------------------------------------


class AttemptConnection(Protocol):
    """One authenticated connection to one execution attempt. The engine's server implements it. Loop only."""

    @property
    def connection_id(self) -> int: ...

    def heard(self) -> bool:
        """Whether bytes came from the peer since the last call, or were not read because others come first."""
        ...

    def progressed(self) -> bool:
        """Whether a part of a large message has left since the last call, after the peer has read earlier ones."""
        ...

    def send(self, message: Downward, *, immediately: bool = False) -> None:
        """Queue a message. After close it is dropped; unconfirmed items are sent again on the next connection.

        Queued messages leave at the end of this turn of the loop. ``immediately``: write it now, because no further
        message follows in this turn.
        """
        ...

    def close(self, *, flush: bool = True) -> None:
        """Close: immediately, or with ``flush`` after the queued messages have left. Idempotent."""
        ...


@value
class AttachConnection:
    """A connection of the attempt is up. ``received_seq``: None on the first one, otherwise what the peer has."""

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
    """The attempt is over and all earlier events are settled: the actor may stop."""


@value
class NoteAwaited:
    """Tell every attempt that has a gateway in which method the coordinator waits; see ``CoordinatorAwaited``."""

    call: str
    awaited_s: float
    place: str


@value
class RequestDeferred:
    """The coordinator has taken the request, and its answer comes later (H84)."""

    request_id: int


GatewayMessage = (
    RequestDeferred
    | NoteAwaited
    | Retire
    | SendEvent
    | AttachConnection
    | MessagesArrived
    | ConnectionClosed
    | GatewayInput
)

# --- to the coordinator -------------------------------------------------------------------------------------------


@value
class StartCoordinator:
    """The first message of all (H6). It is answered when ``start`` has returned, or failed with its exception.

    ``restored``: the id and state of the checkpoint that the application starts from. Then ``reset_to_checkpoint``
    comes before ``start``, and its exception counts in the same way.
    """

    reply_to: Reply[None]
    restored: tuple[int, bytes] | None = None


@value
class EventArrived:
    """An event of an attempt, for the coordinator.

    ``report_taken``: tell the gateway that all events up to this one are taken. This is not requested with each event,
    because the report goes through two mailboxes and to the task, and the next one includes it. ``sender``: the subtask
    that first sent an event of a restored snapshot (H52). ``after_snapshot``: no checkpoint up to this one records the
    event (H79).
    """

    attempt: ExecutionAttempt
    seq: int
    payload: bytes
    gateway_ref: GatewayLine[GatewayMessage]
    report_taken: bool
    sender: int | None = None
    after_snapshot: int = VIRTUAL_EMPTY_CHECKPOINT
    part: int = 0


@value
class CancellationArrived:
    """The task waits no more for the answer to a request, which came before this (H85)."""

    attempt: ExecutionAttempt
    request_id: int


@value
class RequestArrived:
    """A request of an attempt. From a restored snapshot it has a ``sender``, but no ``request_id``: no answer (H73)."""

    attempt: ExecutionAttempt
    seq: int
    request_id: int | None
    payload: bytes
    gateway_ref: GatewayLine[GatewayMessage]
    sender: int | None = None
    after_snapshot: int = VIRTUAL_EMPTY_CHECKPOINT
    part: int = 0


@value
class SubtaskReadyWithGateway:
    """``SubtaskReady``, with what the gateways of all parts send through.

    ``events_sent``: where the counts of the attempt's upward events continue (H32).
    """

    attempt: ExecutionAttempt
    sends: AttemptSends
    gateway_ref: GatewayLine[GatewayMessage]
    events_sent: Positions


@value
class AttemptHint:
    """Something about a live attempt for the coordinators to know early (H87).

    It is told with their ``method``, whose arguments are the subtask, the attempt and ``args``.
    """

    attempt: ExecutionAttempt
    method: str
    args: tuple[str, ...] = ()


@value
class Timed:
    """A ``message`` caused by a fact of Spark's, with which the engine called back at ``callback_us``."""

    message: SubtaskFailed | SubtaskFinished | SubtaskResetToCheckpoint | RunEnded
    callback_us: int


@value
class CallHandler:
    """A continuation of the coordinator: a timer or the result of blocking work. ``caller`` is named in a failure."""

    handler: Callable[[], Awaitable[None]]
    caller: str = "call handler"


def failing(caller: str, error: Exception) -> CallHandler:
    """The message that makes the coordinator fail its job when the message's turn comes."""

    async def fail() -> None:
        raise error

    return CallHandler(fail, caller)


@value
class Settled:
    """How the last run of an operator ended.

    ``completed_id``: the last completed checkpoint, which a restart would restore; -1 for none. It also distinguishes
    two runs that failed with the same text.
    ``uncommitted``: why the final checkpoint of the last run failed, so that its last output is not committed; empty if
    the checkpoint completed or none was due.
    ``failed``: in streaming mode, the coordinator's failure since that run succeeded; otherwise empty. The coordinator
    may have failed to commit a complete checkpoint.
    """

    completed_id: int
    uncommitted: str
    failed: str = ""


@value
class Flush:
    """Answered with ``settled`` when the coordinator has handled everything that was sent to it before."""

    reply_to: Reply[Settled]
    settled: Settled


@value
class ClientRequest:
    """A request from the driver's side (R97), with no defined order relative to events and checkpoints.

    It is answered with the result of ``handle_client_request`` of the part of this name, or failed with its exception.
    The tracker passes it on. ``traceparent``: the span that was current where it was made, if there was one.
    """

    request: Any
    reply_to: Reply[Any]
    part: str = ""
    traceparent: str = ""


CoordinatorMessage = (
    StartCoordinator
    | EventArrived
    | RequestArrived
    | CancellationArrived
    | SubtaskReadyWithGateway
    | AttemptHint
    | SubtaskFailed
    | SubtaskFinished
    | SubtaskResetToCheckpoint
    | OperatorResetToCheckpoint
    | RunEnded
    | Timed
    | SnapshotCoordinator
    | CollectRecorded
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
    """A decision of the attempt ledger about this operator, with the connection that it concerns, if any.

    ``action``: of a run that starts, the id of the call of an action that it belongs to; empty for none.
    """

    decision: Decision
    callback_us: int | None = None
    connection: AttemptConnection | None = None
    action: str = ""


@value
class StartOperator:
    """The first message of a tracker: start the coordinator. It is answered like ``StartCoordinator``."""

    reply_to: Reply[None]


@value
class RequestCheckpoint:
    """Take a checkpoint. Answered with its id once it is complete, or failed with ``CheckpointFailed``.

    With ``savepoint_directory`` it is a savepoint: stored there, and never restored by a reset (H49). ``counts``:
    whether its failure is one of those that are tolerated in a row (H45); that of a savepoint never is.
    """

    reply_to: Reply[int]
    savepoint_directory: str | None = None
    counts: bool = True


@value
class FilesGathered:
    """What a checkpoint names has been read, as ``StateRetention`` needs it; ``copied`` as in ``CheckpointStored``.

    ``uploaded_bytes``: of the files, those that were uploaded for this checkpoint.
    """

    checkpoint_id: int
    names: frozenset[str]
    copied: dict[StateHandle, StateHandle]
    uploaded_bytes: int


@value
class RecordsListed:
    """The checkpoints that the storage has; the others have been removed durably."""

    checkpoint_ids: frozenset[int]


@value
class WithdrawCheckpoint:
    """The sender of this ``RequestCheckpoint`` no longer waits: what is not complete yet is given up."""

    reply_to: Reply[int]


@value
class AwaitSettled:
    """Answered once the operator is settled.

    That is: no run is in progress, no checkpoint is pending or waiting, the final one of the run included, and the
    coordinator has handled everything that was sent to it before. Facts that the bridge has not received yet are not
    known here, so ask the bridge for the end of the runs first.
    """

    reply_to: Reply[Settled]


@value
class AnnounceBatch:
    """The next run is this micro-batch: see ``CheckpointLabels.announce``."""

    batch: BatchInput
    adopted: bool = False


@value
class WithdrawBatch:
    """The next run is not a batch, unless another one is announced."""


@value
class BatchDone:
    """The batch had nothing for the operator: the next checkpoint commits it."""

    batch: BatchInput


@value
class LabelledWork:
    """The state of labelled work.

    ``completed``: the label of the last completed checkpoint. ``runs``: how many have begun since ``AnnounceBatch``.
    ``failed``: the operator has failed, and no reset has followed yet.
    """

    completed: str
    runs: int
    failed: bool


@value
class AskLabelledWork:
    """Answered immediately, with the state at that moment."""

    reply_to: Reply[LabelledWork]


@value
class OperatorView:
    """One operator at one moment, for people.

    ``queued``: messages in the coordinator's mailbox. ``checkpoints``: those in progress. ``restore_id``: what a
    restart would restore, -1 for nothing. ``in_doubt``: aborted checkpoints that the storage may hold.
    """

    queued: int
    gateways: int
    checkpoints: tuple[CheckpointView, ...]
    restore_id: int
    in_doubt: tuple[int, ...]


@value
class ViewOperator:
    """Answered with the operator's state at that moment."""

    reply_to: Reply[OperatorView]


class GatewayView(NamedTuple):
    """The gateway of one attempt at one moment, for people. Times are readings of the system's clock.

    ``heard_at``: when something last came from the task. ``unconfirmed_since``: when the oldest unconfirmed event left.
    ``requested_at``: when the oldest request came that the coordinator has neither answered nor deferred yet;
    ``deferred_at``: when the oldest deferred one came that has no answer yet. ``closed_for``: the checkpoints for which
    events to the task are held back.
    """

    connected: bool
    ready: bool
    heard_at: float
    events_held: int
    events_unconfirmed: int
    events_untaken: int
    bytes: int
    unconfirmed_since: float | None
    requested_at: float | None
    deferred_at: float | None
    closed_for: tuple[int, ...]


@value
class ViewGateways:
    """Answered with the gateway of each of these task attempts; None for one that is closed."""

    reply_to: Reply[list[GatewayView | None]]
    task_attempt_ids: Sequence[int]


@value
class AnnounceNext:
    """The tracker tells the next gateways what was put off; see ``Announcer``."""


TrackerMessage = (
    StartOperator
    | AnnounceNext
    | ViewOperator
    | ViewGateways
    | NoteAwaited
    | RequestCheckpoint
    | WithdrawCheckpoint
    | AwaitSettled
    | AnnounceBatch
    | WithdrawBatch
    | BatchDone
    | AskLabelledWork
    | ClientRequest
    | LedgerDecided
    | TrackerInput
    | FilesGathered
    | RecordsListed
    | RestoreChosen
    | FilesListed
    | ClaimConfirmed
    | FilesDeleted
)
