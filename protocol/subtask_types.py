"""What goes into a ``SubtaskMachine`` and what comes out of it: all of it can be imported from here."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.machine import TimePassed
from protocol.messages import DownMessage, UpMessage
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection, RefuseMessage, RoomAvailable

__all__ = [
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


@dataclass(frozen=True, slots=True)
class SubtaskLimits:
    """The bounds of one subtask, as ``Registered`` tells them (H24, H27).

    The window covers the events and requests that are held, unconfirmed, or (of requests, in number)
    unanswered. An event larger than ``window_bytes`` passes when it is alone, so that nothing waits for
    ever.
    """

    window_events: int
    window_bytes: int
    reconnect_timeout_s: float

    def __post_init__(self) -> None:
        if self.reconnect_timeout_s <= 0:
            raise ValueError(f"the timeout must be positive: {self}")
        if min(self.window_events, self.window_bytes) < 1:
            raise ValueError(f"the window must be at least 1: {self}")


@dataclass(frozen=True, slots=True)
class SubtaskStatistics:
    """The figures of one subtask's outgoing side at one moment (H27)."""

    held_events: int
    held_bytes: int
    unconfirmed_events: int
    unconfirmed_bytes: int
    open_requests: int
    closed_for: tuple[int, ...]


# --- inputs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message came on the present connection."""

    message: DownMessage


@dataclass(frozen=True, slots=True)
class OperatorOpened:
    """The operator has restored its state and is open."""


@dataclass(frozen=True, slots=True)
class EventSubmitted:
    """The operator sends an event."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class RequestSubmitted:
    """The operator sends an event that wants an answer. ``request_id`` is the shell's count, never used
    twice."""

    request_id: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The operator has met the barrier in its mailbox and this is its state.

    To be given before the operator handles anything that lies behind the barrier.
    """

    checkpoint_id: int
    state: bytes


@dataclass(frozen=True, slots=True)
class SnapshotRefused:
    """The operator could not take its snapshot."""

    checkpoint_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class OperatorFinished:
    """The operator has ended, well (``failure`` empty; ``state`` is its last one) or not.

    To end well it must have handled all that is in its mailbox (what arrives later is never confirmed, and
    fails at the sender), and everything that it sent must have left: see ``SubtaskMachine.may_finish``.
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
    | SnapshotTaken
    | SnapshotRefused
    | OperatorFinished
    | TimePassed
)


# --- what lies in an operator's mailbox -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MailboxEvent:
    """An event of the coordinator."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class MailboxBarrier:
    """Take the snapshot now: between what lies before this and what lies behind it."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class MailboxCompleted:
    """The checkpoint is complete and durable."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class MailboxAborted:
    """The checkpoint was given up; its barrier, if it still lies in the mailbox, means nothing any more."""

    checkpoint_id: int


MailboxItem = MailboxEvent | MailboxBarrier | MailboxCompleted | MailboxAborted


# --- effects ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendToCoordinator:
    """Write this on the present connection; if that fails, report ``ConnectionLost`` and forget it."""

    message: UpMessage


@dataclass(frozen=True, slots=True)
class PutInMailbox:
    """Append to the operator's mailbox. It must be there before the ``Confirm`` behind it leaves (H23)."""

    item: MailboxItem


@dataclass(frozen=True, slots=True)
class ResolveRequest:
    """The answer to a request, or, with ``error``, the news that there is none."""

    request_id: int
    error: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """The attempt is over: the operator must stop now. Once, and the last effect that asks for anything."""

    reason: str


SubtaskEffect = (
    SendToCoordinator | PutInMailbox | ResolveRequest | EndAttempt | RoomAvailable | RefuseMessage | DropConnection
)
