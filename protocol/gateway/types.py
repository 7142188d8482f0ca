# SPDX-License-Identifier: Apache-2.0

"""The inputs and effects of a ``GatewayMachine``. All of them can be imported from here."""

from __future__ import annotations

from enum import Enum

from protocol.arguments import AT_LEAST_1, check_fields, checked_names
from protocol.errors import AttemptOver, ConfirmationTimeout
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from protocol.machine import TimePassed
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection, RefuseMessage
from protocol.values import value
from protocol.wire.messages import DownMessage, HeldEvent, Positions, UpMessage
from protocol.wire.state_handles import StateHandle

__all__ = [
    "CONNECTION_GONE",
    "AnswerSubmitted",
    "AttemptIsOver",
    "CheckpointOutcome",
    "CheckpointOver",
    "CloseRequested",
    "ConfirmEvent",
    "ConnectionAttached",
    "ConnectionLost",
    "CutReached",
    "DeliverCancellation",
    "DeliverEvent",
    "DeliverRequest",
    "DropConnection",
    "EventSubmitted",
    "ExpireConnection",
    "ExpireEvent",
    "FailAttempt",
    "FailEvent",
    "GatewayEffect",
    "GatewayInput",
    "GatewayLimits",
    "GatewayStatistics",
    "InjectBarrier",
    "ItemTaken",
    "MessageReceived",
    "PeerHeard",
    "ReadyAnnounced",
    "RefuseMessage",
    "ReportAcknowledged",
    "ReportClosed",
    "ReportDeclined",
    "ReportFinished",
    "ReportOpened",
    "ReportResponsive",
    "ReportStateFailed",
    "ReportStateStored",
    "ReportSuspected",
    "SendProgressed",
    "SendToAttempt",
    "TimePassed",
]

HEARTBEAT_TIMEOUT_S = 1.0
"""For an interval that is given without a timeout."""


@checked_names
@value
class GatewayLimits:
    """The timeouts and bounds of the gateway to one task. Times are in seconds, sizes in bytes.

    An event that exceeds a bound in bytes still passes when nothing else is on its way, so that nothing waits forever.
    Raises ``ValueError`` for a timeout that is not positive and finite, and for a bound below 1.

    Attributes:
        confirm_timeout_s: how long a connected task may leave an event unconfirmed before its attempt is killed. A
            task confirms events while its Python code computes, but not while native code holds the interpreter lock:
            choose a time longer than the longest such call.
        reconnect_timeout_s: how long a task may be without a connection before its attempt is given up.
        events_max: how many events to the task may be held back or unconfirmed. At this bound ``send_event`` waits and
            ``send_event_nowait`` raises ``GatewayFull``. Answers to requests do not count. Each part of the operator
            has as many.
        bytes_max: the same, in bytes of encoded events.
        upward_events_max: how many events and requests of the task the coordinator may have left untaken. At this bound
            the task's ``send_event`` and ``request`` wait. Each part of the operator has as many.
        upward_bytes_max: the same, in bytes. If checkpoints hold no events, the two also bound what one checkpoint
            records of the task's events while it waits for the task's snapshot. At this bound the coordinator takes no
            more from the task until that snapshot.
        heartbeat_interval_s: how often each task gives a sign of life, at least. None: not at all.
        heartbeat_timeout_s: how long a connected task may give no sign of life before its attempt is killed; at least
            twice the interval. None: 1 s. It is refused without an interval. A thread beside the task's own sends them,
            so a task that computes is not silent. Native code that holds the interpreter lock keeps that thread from
            running: choose a time longer than the longest such call. Time in which the sidecar's own event loop was
            late does not count.
    """

    confirm_timeout_s: float = 10.0
    reconnect_timeout_s: float = 10.0
    events_max: int = 4096
    bytes_max: int = 64 * 1024 * 1024
    upward_events_max: int = 1024
    upward_bytes_max: int = 64 * 1024 * 1024
    heartbeat_interval_s: float | None = None
    heartbeat_timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_fields(
            self, events_max=AT_LEAST_1, bytes_max=AT_LEAST_1, upward_events_max=AT_LEAST_1, upward_bytes_max=AT_LEAST_1
        )
        if self.heartbeat_interval_s is None:
            if self.heartbeat_timeout_s is not None:
                raise ValueError(
                    f"heartbeat_interval_s must be given with heartbeat_timeout_s={self.heartbeat_timeout_s!r}: "
                    "without it, tasks give no signs of life, and nobody counts them"
                )
            return
        if self.heartbeat_timeout_s is None:
            object.__setattr__(self, "heartbeat_timeout_s", HEARTBEAT_TIMEOUT_S)
        assert self.heartbeat_timeout_s is not None
        if 2 * self.heartbeat_interval_s > self.heartbeat_timeout_s:
            raise ValueError(
                f"heartbeat_interval_s must be at most half of heartbeat_timeout_s ({self.heartbeat_timeout_s!r}), not "
                f"{self.heartbeat_interval_s!r}: otherwise one late heartbeat would end an attempt"
            )


@value
class GatewayStatistics:
    """The figures of one gateway at one moment (H27)."""

    held_events: int
    held_bytes: int
    unconfirmed_events: int
    unconfirmed_bytes: int
    untaken_events: int  # received, not yet taken by the coordinator
    untaken_bytes: int
    closed_for: tuple[int, ...]


# --- inputs -----------------------------------------------------------------------------------------------


@value
class EventSubmitted:
    """The coordinator sends an event. ``event_id`` is the shell's own number, which effects refer to.

    ``urgent``: it does not wait for the task's thread (H90). ``part``: whose it is (H150).
    """

    event_id: int
    payload: bytes
    loss_tolerant: bool = False
    urgent: bool = False
    part: int = 0


@value
class AnswerSubmitted:
    """The coordinator answers a request; ``error`` is empty unless it fails the request (H33).

    With an error, ``payload`` is the traceback as UTF-8 text, or empty.
    """

    request_id: int
    error: str
    payload: bytes


@value
class MessageReceived:
    """A message came on the present connection."""

    message: UpMessage


@value
class PeerHeard:
    """Bytes came from the peer since this was said last, or this side has held back from reading them.

    The shell looks before each ``TimePassed``. A part of a message counts: a large one may take long.
    """


@value
class SendProgressed:
    """A part of a large message has left since this was said last, because the peer has read those before it.

    The shell looks before each ``TimePassed``. What is late is counted from here (H114).
    """


@value
class ReadyAnnounced:
    """The coordinator's ``subtask_ready`` has returned: the subtask's events may be delivered, and its operator may
    begin with its records (H66). The shell gives this after everything that was sent inside ``subtask_ready``."""


@value
class ItemTaken:
    """The coordinator has taken item ``seq``, of ``part``, and what was delivered before it.

    Of a part outside of checkpoints, this says only what has come from that part: its items do not wait for those that
    were put aside. Of all others, it says what has come from any part inside.
    """

    seq: int
    part: int = 0


@value
class CloseRequested:
    """A checkpoint begins: the subtask must close its valve. Without this input, the gateway takes no part in it."""

    checkpoint_id: int


@value
class CutReached:
    """The coordinator's snapshot has returned. The shell gives this at exactly that point of the coordinator's
    order: after everything that was submitted before, and before anything that is submitted later.

    ``target``: the folder for the files of a savepoint, which the subtask learns before the barrier (H193)."""

    checkpoint_id: int
    target: str = ""


class CheckpointOutcome(Enum):
    """How a checkpoint ended."""

    COMPLETED = "completed"  # and durable
    ABORTED = "aborted"
    SAVEPOINT = "savepoint"  # durable elsewhere; nothing is committed for it (H49)


@value
class CheckpointOver:
    """The checkpoint has ended, with this outcome."""

    checkpoint_id: int
    outcome: CheckpointOutcome


@value
class AttemptIsOver:
    """The attempt has ended. Nothing is sent to it or taken from it any more."""

    reason: str


GatewayInput = (
    ConnectionAttached
    | ConnectionLost
    | EventSubmitted
    | AnswerSubmitted
    | MessageReceived
    | PeerHeard
    | SendProgressed
    | ReadyAnnounced
    | ItemTaken
    | CloseRequested
    | CutReached
    | CheckpointOver
    | AttemptIsOver
    | TimePassed
)


# --- effects ----------------------------------------------------------------------------------------------


@value
class SendToAttempt:
    """Write this on the present connection; if that fails, report ``ConnectionLost`` and forget it."""

    message: DownMessage


@value
class ConfirmEvent:
    """The event is in the operator's mailbox (H23)."""

    event_id: int


@value
class FailEvent:
    """The event will never be confirmed. This causes no failover (H26)."""

    event_id: int
    error: AttemptOver


@value
class ExpireEvent:
    """The loss-tolerant event was not confirmed within ``confirm_timeout_s``: its sender waits no longer (H72).

    This causes no failover (H28). The event stays in the stream and counts against the bounds until ``ConfirmEvent`` or
    ``FailEvent`` ends it. At most once for each event.
    """

    event_id: int
    error: ConfirmationTimeout


@value
class DeliverEvent:
    """Hand the event to the coordinator; then report ``ItemTaken(seq)``.

    ``sender`` is the subtask that first sent it, for an event of a restored snapshot (H52); otherwise None.
    ``after_snapshot``: the last checkpoint whose snapshot the subtask had taken before; -1 for none. No checkpoint up
    to it records this event (H79). ``part``: whose it is.
    """

    seq: int
    payload: bytes
    sender: int | None = None
    after_snapshot: int = VIRTUAL_EMPTY_CHECKPOINT
    part: int = 0


@value
class DeliverRequest:
    """Hand the request to the coordinator; report ``ItemTaken(seq)`` and, in time, ``AnswerSubmitted``.

    A request of a restored snapshot has no ``request_id``, and its answer is dropped (H73). ``sender`` is the subtask
    that first sent it (H52); otherwise None. ``after_snapshot`` and ``part``: as in ``DeliverEvent``.
    """

    seq: int
    request_id: int | None
    payload: bytes
    sender: int | None = None
    after_snapshot: int = VIRTUAL_EMPTY_CHECKPOINT
    part: int = 0


@value
class DeliverCancellation:
    """Tell the coordinator that the task waits no more for the answer to this request, which was delivered (H85).

    ``AnswerSubmitted`` is still due, if it has not come. At most once for each request.
    """

    request_id: int


@value
class ReportOpened:
    """The operator has restored its state and is open (H11)."""


CONNECTION_GONE = "its connection is gone"
"""The reason of a ``ReportSuspected`` that does not come from silence."""


@value
class ReportSuspected:
    """The attempt may be dead: a hint for the coordinator, and nothing else (H87). ``reason``: what makes it so."""

    reason: str


@value
class ReportResponsive:
    """The attempt lives: the hint before was wrong (H87)."""


@value
class ReportClosed:
    """The subtask's valve is closed. Earlier effects have delivered everything that it sent before."""

    checkpoint_id: int


@value
class ReportAcknowledged:
    """The subtask's snapshot. Its gateway is open again for this checkpoint.

    ``state_follows``: ``ReportStateStored`` or ``ReportStateFailed`` follows (H192).
    """

    checkpoint_id: int
    state: bytes
    held: tuple[HeldEvent, ...]
    events_sent: Positions
    state_follows: bool = False


@value
class ReportStateStored:
    """The subtask has stored the files of its snapshot. At most once for each snapshot whose state follows."""

    checkpoint_id: int
    handle: StateHandle


@value
class ReportStateFailed:
    """The subtask could not store the files of its snapshot. The gateway is open all the same (H192)."""

    checkpoint_id: int
    reason: str


@value
class ReportDeclined:
    """The subtask cannot take part. The gateway stays closed until ``CheckpointOver``."""

    checkpoint_id: int
    reason: str


@value
class ReportFinished:
    """The operator has ended. ``failure`` is empty if it succeeded; ``state`` is its last state, with its ``files``."""

    failure: str
    state: bytes
    events_sent: Positions
    files: StateHandle | None = None


@value
class InjectBarrier:
    """Bring the barrier to the attempt separately; the shell there reports it as ``BarrierArrived``.

    It belongs after item ``events_before``, which may still be on its way: the attempt waits for it. It comes only
    once. If the barrier is lost, the checkpoint times out.
    """

    checkpoint_id: int
    events_before: int


@value
class FailAttempt:
    """Fail exactly this attempt through the engine: it did not confirm in time (H25), or gave no sign of life (H94).

    ``silent``: it is the latter. The gateway is already over.
    """

    reason: str
    silent: bool = False


@value
class ExpireConnection:
    """The peer did not reconnect in time (H24). The gateway is already over."""

    reason: str


GatewayEffect = (
    SendToAttempt
    | ConfirmEvent
    | FailEvent
    | ExpireEvent
    | DeliverEvent
    | DeliverRequest
    | DeliverCancellation
    | ReportOpened
    | ReportSuspected
    | ReportResponsive
    | ReportClosed
    | ReportAcknowledged
    | ReportStateStored
    | ReportStateFailed
    | ReportDeclined
    | ReportFinished
    | InjectBarrier
    | FailAttempt
    | ExpireConnection
    | RefuseMessage
    | DropConnection
)
