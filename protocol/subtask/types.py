# SPDX-License-Identifier: Apache-2.0

"""The inputs and effects of a ``SubtaskMachine``. All of them can be imported from here."""

from __future__ import annotations

from protocol.machine import TimePassed
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection, RefuseMessage
from protocol.values import value
from protocol.wire.framing import DEFAULT_LIMITS, WireLimits
from protocol.wire.messages import DownMessage, UpMessage
from protocol.wire.state_handles import StateHandle

__all__ = [
    "BarrierArrived",
    "CapacityAvailable",
    "ConnectionAttached",
    "ConnectionLost",
    "DropConnection",
    "EndAttempt",
    "EventSubmitted",
    "HandleUrgent",
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
    "RequestAbandoned",
    "RequestSubmitted",
    "ResolveRequest",
    "SendToCoordinator",
    "SnapshotRefused",
    "SnapshotTaken",
    "StartUpload",
    "StateUploaded",
    "StopUpload",
    "SubtaskEffect",
    "SubtaskInput",
    "SubtaskLimits",
    "SubtaskStatistics",
    "TimePassed",
    "UploadFailed",
    "UrgentBegan",
    "UrgentHandled",
    "snapshot_bytes_max",
]


def snapshot_bytes_max(limits: WireLimits) -> int:
    """The size limit of a snapshot; the rest of its message is for the message's own fields."""
    return limits.message_bytes_max - 64 * 1024


@value
class SubtaskLimits:
    """The bounds of one subtask. ``Registered`` carries the first three and the last one (H24, H27, H94); the wire
    determines the others. ``heartbeat_interval_s`` is 0 if no heartbeats are wanted.

    The window covers events and requests that are held or unconfirmed, and also limits the number of unanswered
    requests. An event larger than ``window_bytes`` passes when it is alone, so that nothing waits forever.

    A snapshot leaves in one message, with at most ``snapshot_bytes_max`` bytes of state and held events together, and
    at most ``held_events_max`` held events (H62). A larger one is declined. So a closed valve holds at most half of
    these bytes, however large the window is, or one event. The rest is for the state.
    """

    window_events: int
    window_bytes: int
    reconnect_timeout_s: float
    snapshot_bytes_max: int = snapshot_bytes_max(DEFAULT_LIMITS)
    held_events_max: int = DEFAULT_LIMITS.held_events_max
    heartbeat_interval_s: float = 0.0

    def __post_init__(self) -> None:
        # Made for each attempt, from settings that the driver has checked: this costs a twentieth of `check_fields`.
        if self.reconnect_timeout_s <= 0:
            raise ValueError(f"reconnect_timeout_s must be a positive number of seconds: {self}")
        if self.heartbeat_interval_s < 0:
            raise ValueError(f"heartbeat_interval_s must be positive, or 0 for no heartbeats: {self}")
        if min(self.window_events, self.window_bytes) < 1:
            raise ValueError(f"window_events and window_bytes must be at least 1: {self}")
        if min(self.snapshot_bytes_max, self.held_events_max) < 1:
            raise ValueError(f"snapshot_bytes_max and held_events_max must be at least 1: {self}")


@value
class SubtaskStatistics:
    """The figures of one subtask's outbound half at one moment (H27)."""

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

    ``awaits_start``: it begins with its records at ``MailboxStart``, which otherwise does not come (H66).
    ``handles_urgent``: it handles urgent events apart from the others. Otherwise they are ordinary events (H90).
    ``parts_without_urgent``: the indices of the parts that do not.
    """

    awaits_start: bool = False
    handles_urgent: bool = False
    parts_without_urgent: frozenset[int] = frozenset()


@value
class EventSubmitted:
    """The operator sends an event.

    ``in_snapshot``: from inside its own snapshot. Such an event is never refused, because capacity might become
    available only after that snapshot. The size limit of a snapshot bounds it.
    ``in_urgent``: from inside the handler of an urgent event. While a checkpoint closes the valve, it is never refused
    either: the snapshot waits for that handler (H92).
    """

    payload: bytes
    in_snapshot: bool = False
    in_urgent: bool = False
    part: int = 0


@value
class RequestSubmitted:
    """The operator sends an event that asks for an answer. ``request_id`` is the shell's count, never used twice."""

    request_id: int
    payload: bytes
    part: int = 0


@value
class RequestAbandoned:
    """The operator waits no more for the answer to a request that it has submitted. It has no effect once answered.

    A request that is still held is taken back, as if it had never been submitted. One that has left keeps its place in
    the window until its answer comes, which the shell drops. The coordinator gives that answer immediately.
    """

    request_id: int


@value
class UrgentBegan:
    """The handler of the next urgent event begins. One runs at a time, in the order of ``HandleUrgent``."""


@value
class UrgentHandled:
    """The handler of the urgent event has returned. If it raises instead, this never comes: the operator fails."""


@value
class BarrierArrived:
    """The barrier came separately, before, between or after the items. See ``InjectBarrier``.

    It goes into the mailbox after every item up to ``events_before`` has come. It is refused without effect if its
    checkpoint is over, unknown, or has had its barrier.
    """

    checkpoint_id: int
    events_before: int


@value
class SnapshotTaken:
    """The operator took the barrier from its mailbox, and this is its state.

    The shell gives this before the operator handles anything after the barrier. ``state_follows``: there are files
    too, which do not change any more. They are uploaded if ``StartUpload`` comes, which is in this answer or never.
    """

    checkpoint_id: int
    state: bytes
    state_follows: bool = False


@value
class StateUploaded:
    """The files of the snapshot are stored, and so is the manifest that ``handle`` names (H190).

    It has no effect if the checkpoint is over, as ``StopUpload`` has said.
    """

    checkpoint_id: int
    handle: StateHandle


@value
class UploadFailed:
    """The files of the snapshot could not be stored. It has no effect if the checkpoint is over."""

    checkpoint_id: int
    reason: str


@value
class SnapshotRefused:
    """The operator could not take its snapshot."""

    checkpoint_id: int
    reason: str


@value
class OperatorFinished:
    """The operator has ended, successfully (``failure`` is empty; ``state`` is its last one) or not.

    ``files``: those of the last state, which are stored already.

    To succeed it must have handled everything in its mailbox and each urgent event (what arrives later is never
    confirmed, and fails at the sender), everything that it sent must have left, no upload may be going on (see
    ``SubtaskMachine.may_finish``), and the state must fit into a message. Otherwise this is refused, and the operator
    has to end with a failure.
    """

    failure: str
    state: bytes
    files: StateHandle | None = None


SubtaskInput = (
    ConnectionAttached
    | ConnectionLost
    | MessageReceived
    | OperatorOpened
    | EventSubmitted
    | RequestSubmitted
    | RequestAbandoned
    | UrgentBegan
    | UrgentHandled
    | BarrierArrived
    | SnapshotTaken
    | StateUploaded
    | UploadFailed
    | SnapshotRefused
    | OperatorFinished
    | TimePassed
)


# --- the items of an operator's mailbox -------------------------------------------------------------------


@value
class MailboxEvent:
    """An event of the coordinator."""

    payload: bytes
    part: int = 0


@value
class MailboxBarrier:
    """Take the snapshot here: after the items before this, before those after it."""

    checkpoint_id: int


@value
class MailboxCompleted:
    """The checkpoint is complete and durable."""

    checkpoint_id: int


@value
class MailboxAborted:
    """The checkpoint was aborted. Its barrier, if it is still in the mailbox, no longer counts."""

    checkpoint_id: int


@value
class MailboxStart:
    """The coordinator's ``subtask_ready`` has returned: what it sent there precedes this (H66). Comes once."""


MailboxItem = MailboxEvent | MailboxBarrier | MailboxCompleted | MailboxAborted | MailboxStart


# --- effects ----------------------------------------------------------------------------------------------


@value
class SendToCoordinator:
    """Write this on the present connection; if that fails, report ``ConnectionLost`` and forget it."""

    message: UpMessage


@value
class PutInMailbox:
    """Append to the operator's mailbox. It must be there before the next ``Confirm`` leaves (H23)."""

    item: MailboxItem


@value
class HandleUrgent:
    """Handle this event on the thread for urgent events, after those before it (H90).

    Report ``UrgentBegan`` and ``UrgentHandled``. It must be in that thread's queue before the next ``Confirm`` leaves.
    """

    payload: bytes
    part: int = 0


@value
class ResolveRequest:
    """The answer to a request, or, with ``error``, the reason why there is none."""

    request_id: int
    error: str
    payload: bytes


@value
class StartUpload:
    """Store the files of the snapshot, then report ``StateUploaded`` or ``UploadFailed``.

    ``target``: the folder of a savepoint, which gets all of them (H193). Empty for a checkpoint, whose files are where
    this application stores its own.
    """

    checkpoint_id: int
    target: str = ""


@value
class StopUpload:
    """The checkpoint is over: its upload may stop. What it has stored may be named by the next one."""

    checkpoint_id: int


@value
class EndAttempt:
    """The attempt is over: the operator must stop now. It comes once, and is the last effect that asks for anything."""

    reason: str


@value
class CapacityAvailable:
    """After ``GatewayFull``: the first refused submission would be accepted now. Once for each row of refusals."""


SubtaskEffect = (
    SendToCoordinator
    | PutInMailbox
    | HandleUrgent
    | ResolveRequest
    | StartUpload
    | StopUpload
    | EndAttempt
    | CapacityAvailable
    | RefuseMessage
    | DropConnection
)
