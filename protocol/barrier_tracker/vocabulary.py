"""What a ``BarrierTracker`` is told and what it asks for; ``tracker`` says in which order."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.attempts.types import FailureReason
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.messages import RestoreMode


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """How checkpoints are taken.

    ``timeout_s``: how long one may take from its start to its durable write, and how long a request may
    wait for its start. ``tolerated_failures``: how many in a row may fail; one more is a global failure
    (H45). ``mode`` holds until the first attempt is accepted, which brings its own.
    """

    timeout_s: float = 60.0
    tolerated_failures: int = 0
    mode: RestoreMode = RestoreMode.BATCH


@dataclass(frozen=True, slots=True)
class SubtaskSnapshot:
    """A subtask's part of a checkpoint: its state, and the events its valve held, in order (H31)."""

    state: bytes
    held: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """A whole checkpoint. A subtask that is not in ``subtask_states`` took part as empty (H47)."""

    checkpoint_id: int
    coordinator_state: bytes
    subtask_states: dict[int, SubtaskSnapshot] = field(default_factory=dict)


# --- inputs: requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointTriggered:
    """Somebody wants checkpoint ``checkpoint_id``; it is higher than every id before it (H4).

    Exactly one of ``CompleteCheckpoint``, ``AbortCheckpoint`` and ``RefuseCheckpoint`` answers it.
    """

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """Give ``checkpoint_id`` up, if it is still pending or queued (H44)."""

    checkpoint_id: int
    reason: str


# --- inputs: what the attempt ledger decided --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttemptAccepted:
    """An attempt has registered; what does it restore?"""

    attempt: ExecutionAttempt
    mode: RestoreMode


@dataclass(frozen=True, slots=True)
class AttemptReady:
    """It has restored, it is open, and it is alive (H11)."""

    attempt: ExecutionAttempt


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """It is over without success, or its success was revoked (H12, H17)."""

    attempt: ExecutionAttempt
    reason: FailureReason


@dataclass(frozen=True, slots=True)
class AttemptFinished:
    """It has ended well. Its final state comes on its own way, before or after this."""

    attempt: ExecutionAttempt


@dataclass(frozen=True, slots=True)
class SubtaskResetRequired:
    """No attempt of the subtask is left; the next one restores (H13)."""

    subtask: int


@dataclass(frozen=True, slots=True)
class OperatorResetRequired:
    """Global failover, or a new run: everything restores (H15, H55)."""

    cause: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run is over; its attempts are, too (H57)."""

    run_id: int
    succeeded: bool
    reason: str = ""


# --- inputs: the steps of a checkpoint --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubtaskClosed:
    """What the attempt sent before its close is in the coordinator's mailbox, ahead of what follows."""

    attempt: ExecutionAttempt
    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class CoordinatorSnapshotTaken:
    """The cut: ``checkpoint_coordinator`` has returned, and every gateway closed at that moment (H40)."""

    checkpoint_id: int
    state: bytes


@dataclass(frozen=True, slots=True)
class CoordinatorSnapshotFailed:
    """It raised, returned no bytes, or took too long (H45, H46)."""

    checkpoint_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class GatewayDrained:
    """Every event that was sent to the attempt before the cut is confirmed (H42)."""

    attempt: ExecutionAttempt
    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class SubtaskAcknowledged:
    """The attempt's snapshot."""

    attempt: ExecutionAttempt
    checkpoint_id: int
    state: bytes
    held: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class SubtaskDeclined:
    """The attempt cannot take part."""

    attempt: ExecutionAttempt
    checkpoint_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class SubtaskFinalState:
    """The operator ended well with this state; nothing more comes from the attempt (H47)."""

    attempt: ExecutionAttempt
    state: bytes


@dataclass(frozen=True, slots=True)
class CheckpointStored:
    """It is durable: a reader sees all of it (H50)."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class CheckpointStoreFailed:
    """It could not be written; nothing of it may be restored (H45, H50)."""

    checkpoint_id: int
    reason: str


TrackerInput = (
    CheckpointTriggered
    | AbortRequested
    | AttemptAccepted
    | AttemptReady
    | AttemptFailed
    | AttemptFinished
    | SubtaskResetRequired
    | OperatorResetRequired
    | RunEnded
    | SubtaskClosed
    | CoordinatorSnapshotTaken
    | CoordinatorSnapshotFailed
    | GatewayDrained
    | SubtaskAcknowledged
    | SubtaskDeclined
    | SubtaskFinalState
    | CheckpointStored
    | CheckpointStoreFailed
    | TimePassed
)

# --- effects: the steps of a checkpoint -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CloseSubtask:
    """Close the attempt's valve for the checkpoint, through its gateway; it answers ``SubtaskClosed``."""

    attempt: ExecutionAttempt
    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class SnapshotCoordinator:
    """Call ``checkpoint_coordinator`` in the coordinator's order; its return closes the gateways (H40)."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class SendBarrier:
    """Send the barrier; the attempt answers with its snapshot, which reopens its valves, and only its
    (H41).
    """

    attempt: ExecutionAttempt
    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class ReopenSubtask:
    """The attempt has ended, and so has its part: its gateway need not close for the checkpoint, or stay
    closed.

    Only for a part that ends without an acknowledgement; that one reopens the gateway by itself (H41).
    """

    attempt: ExecutionAttempt
    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class StoreCheckpoint:
    """Write it durably and atomically, then say ``CheckpointStored`` or ``CheckpointStoreFailed``."""

    checkpoint: CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class DiscardCheckpoint:
    """What ``StoreCheckpoint`` asked for is not wanted any more: stop the write, or delete what it wrote."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint:
    """Tell the coordinator and every live attempt; from here on resets name this checkpoint (H18)."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class AbortCheckpoint:
    """Tell the coordinator and every live attempt; reopen what is closed for it, and only that (H44, H45)."""

    checkpoint_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class RefuseCheckpoint:
    """It never began; nobody but the one who asked need know."""

    checkpoint_id: int
    reason: str


# --- effects: what the coordinator and the attempts are told ----------------------------------------------


@dataclass(frozen=True, slots=True)
class RestoreAttempt:
    """The answer to ``AttemptAccepted``: restore this; ``held`` is sent first, before anything new (H31)."""

    attempt: ExecutionAttempt
    checkpoint_id: int
    state: bytes | None
    held: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TellReady:
    """``subtask_ready``, with the gateway of this attempt (H11, H20)."""

    attempt: ExecutionAttempt


@dataclass(frozen=True, slots=True)
class TellFailed:
    """``subtask_failed``; the gateway of the attempt ends first (H14, H26)."""

    attempt: ExecutionAttempt
    reason: FailureReason


@dataclass(frozen=True, slots=True)
class TellReset:
    """``subtask_reset``, to the last checkpoint whose completion the coordinator was told, or -1 (H18)."""

    subtask: int
    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class TellResetToCheckpoint:
    """``reset_to_checkpoint``, with ``(-1, None)`` where there is none (H15)."""

    checkpoint_id: int
    state: bytes | None


@dataclass(frozen=True, slots=True)
class TellRunEnded:
    """The run is over, and what is left of its gateways ends with it (H57)."""

    run_id: int
    succeeded: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RaiseGlobalFailure:
    """Too many checkpoints in a row have failed (H45)."""

    cause: str


@dataclass(frozen=True, slots=True)
class ReportStale:
    """Count and log: the input is of a checkpoint or attempt that is over, and changed nothing (H3, H44)."""

    what: str


TrackerEffect = (
    CloseSubtask
    | SnapshotCoordinator
    | SendBarrier
    | ReopenSubtask
    | StoreCheckpoint
    | DiscardCheckpoint
    | CompleteCheckpoint
    | AbortCheckpoint
    | RefuseCheckpoint
    | RestoreAttempt
    | TellReady
    | TellFailed
    | TellReset
    | TellResetToCheckpoint
    | TellRunEnded
    | RaiseGlobalFailure
    | ReportStale
)
