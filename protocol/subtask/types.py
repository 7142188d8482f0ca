"""What goes into a ``SubtaskMachine`` and what comes out of it: all of it can be imported from here."""

from __future__ import annotations

from protocol.machine import TimePassed
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection, RefuseMessage
from protocol.values import value
from protocol.wire.framing import DEFAULT_LIMITS
from protocol.wire.messages import DownMessage, UpMessage

__all__ = [
    "BarrierArrived",
    "ConnectionAttached",
    "ConnectionLost",
    "DropConnection",
    "EndAttempt",
    "EventSubmitted",
    "MailboxAborted",
    "MailboxBarrier",
    "MailboxCompleted",
    "MailboxEvent",
    "MailboxItem",
    "MailboxStart",
    "MessageReceived",
    "OperatorFinished",
    "OperatorOpened",
    "PutInMailbox",
    "RefuseMessage",
    "RequestSubmitted",
    "ResolveRequest",
    "RoomAvailable",
    "SendToCoordinator",
    "SnapshotRefused",
    "SnapshotTaken",
    "SubtaskEffect",
    "SubtaskInput",
    "SubtaskLimits",
    "SubtaskStatistics",
    "TimePassed",
]


@value
class SubtaskLimits:
    """The bounds of one subtask: the first three as ``Registered`` tells them (H24, H27), the others of the wire.

    The window covers the events and requests that are held, unconfirmed, or (of requests, in number)
    unanswered. An event larger than ``window_bytes`` passes when it is alone, so that nothing waits for
    ever.

    A snapshot leaves in one frame: at most ``snapshot_bytes_max`` bytes of state and held events together, and
    ``held_events_max`` held events (H62). A larger one is declined. A closed valve therefore holds no more than
    half of these bytes, however wide the window is: the other half is the state's for certain, and what the valve
    does not use is the state's too.
    """

    window_events: int
    window_bytes: int
    reconnect_timeout_s: float
    snapshot_bytes_max: int = DEFAULT_LIMITS.frame_bytes_max - 64 * 1024  # the rest is for the message's own fields
    held_events_max: int = DEFAULT_LIMITS.held_events_max

    def __post_init__(self) -> None:
        if self.reconnect_timeout_s <= 0:
            raise ValueError(f"the timeout must be positive: {self}")
        if min(self.window_events, self.window_bytes) < 1:
            raise ValueError(f"the window must be at least 1: {self}")
        if min(self.snapshot_bytes_max, self.held_events_max) < 1:
            raise ValueError(f"the bounds of a snapshot must be at least 1: {self}")


@value
class SubtaskStatistics:
    """The figures of one subtask's outgoing side at one moment (H27)."""

    held_events: int
    held_bytes: int
    unconfirmed_events: int
    unconfirmed_bytes: int
    open_requests: int
    closed_for: tuple[int, ...]


# --- inputs -----------------------------------------------------------------------------------------------


@value
class MessageReceived:
    """A message came on the present connection."""

    message: DownMessage


@value
class OperatorOpened:
    """The operator has restored its state and is open.

    ``awaits_start``: it begins with its records when it meets ``MailboxStart``, which else does not come (H66).
    """

    awaits_start: bool = False


@value
class EventSubmitted:
    """The operator sends an event.

    ``in_snapshot``: from inside its own snapshot. Such an event is never refused, for the room might come only
    behind that very snapshot; how large a snapshot may be bounds it.
    """

    payload: bytes
    in_snapshot: bool = False


@value
class RequestSubmitted:
    """The operator sends an event that wants an answer. ``request_id`` is the shell's count, never used
    twice."""

    request_id: int
    payload: bytes


@value
class BarrierArrived:
    """The barrier came on a way of its own, ahead of, between or behind the items. See ``InjectBarrier``.

    It goes into the mailbox when every item up to ``events_before`` has come. One of a checkpoint that is over, was
    never closed for, or has had its barrier is refused without effect.
    """

    checkpoint_id: int
    events_before: int


@value
class SnapshotTaken:
    """The operator has met the barrier in its mailbox and this is its state.

    To be given before the operator handles anything that lies behind the barrier.
    """

    checkpoint_id: int
    state: bytes


@value
class SnapshotRefused:
    """The operator could not take its snapshot."""

    checkpoint_id: int
    reason: str


@value
class OperatorFinished:
    """The operator has ended, well (``failure`` empty; ``state`` is its last one) or not.

    To end well it must have handled all that is in its mailbox (what arrives later is never confirmed, and
    fails at the sender), everything that it sent must have left (see ``SubtaskMachine.may_finish``), and the
    state must fit into a frame; else this is refused, and the operator has to end badly.
    """

    failure: str
    state: bytes


SubtaskInput = (
    ConnectionAttached
    | ConnectionLost
    | MessageReceived
    | OperatorOpened
    | EventSubmitted
    | RequestSubmitted
    | BarrierArrived
    | SnapshotTaken
    | SnapshotRefused
    | OperatorFinished
    | TimePassed
)


# --- what lies in an operator's mailbox -------------------------------------------------------------------


@value
class MailboxEvent:
    """An event of the coordinator."""

    payload: bytes


@value
class MailboxBarrier:
    """Take the snapshot now: between what lies before this and what lies behind it."""

    checkpoint_id: int


@value
class MailboxCompleted:
    """The checkpoint is complete and durable."""

    checkpoint_id: int


@value
class MailboxAborted:
    """The checkpoint was given up; its barrier, if it still lies in the mailbox, means nothing any more."""

    checkpoint_id: int


@value
class MailboxStart:
    """The coordinator's ``subtask_ready`` has returned: what it sent there lies before this (H66). Comes once."""


MailboxItem = MailboxEvent | MailboxBarrier | MailboxCompleted | MailboxAborted | MailboxStart


# --- effects ----------------------------------------------------------------------------------------------


@value
class SendToCoordinator:
    """Write this on the present connection; if that fails, report ``ConnectionLost`` and forget it."""

    message: UpMessage


@value
class PutInMailbox:
    """Append to the operator's mailbox. It must be there before the ``Confirm`` behind it leaves (H23)."""

    item: MailboxItem


@value
class ResolveRequest:
    """The answer to a request, or, with ``error``, the news that there is none."""

    request_id: int
    error: str
    payload: bytes


@value
class EndAttempt:
    """The attempt is over: the operator must stop now. Once, and the last effect that asks for anything."""

    reason: str


@value
class RoomAvailable:
    """After ``GatewayFull``: the first submission that was refused would be accepted now. Once for each refusal."""


SubtaskEffect = (
    SendToCoordinator | PutInMailbox | ResolveRequest | EndAttempt | RoomAvailable | RefuseMessage | DropConnection
)
