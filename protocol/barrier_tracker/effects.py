"""What a ``BarrierTracker`` asks for; ``tracker`` says in which order.

What the coordinator is told is the very value that its actor handles. A decision of the ledger goes through unchanged:
``SubtaskReady``, ``SubtaskFailed``, ``RunEnded``. A reset gains the checkpoint to go back to, and another name with it.
"""

from __future__ import annotations

from protocol.attempts.types import RunEnded, SubtaskFailed, SubtaskReady
from protocol.barrier_tracker.vocabulary import CompletedCheckpoint
from protocol.ids import ExecutionAttempt
from protocol.values import value
from protocol.wire.messages import HeldEvent, SubtaskState

# --- the steps of a checkpoint -------------------------------------------------------------------


@value
class CloseSubtask:
    """Close the attempt's valve for the checkpoint, through its gateway; it answers ``SubtaskClosed``."""

    attempt: ExecutionAttempt
    checkpoint_id: int


@value
class SnapshotCoordinator:
    """``checkpoint_coordinator``, in the coordinator's order; its return closes the gateways (H40)."""

    checkpoint_id: int


@value
class SendBarrier:
    """Send the barrier; the attempt answers with its snapshot, which reopens its valves, and only its
    (H41).
    """

    attempt: ExecutionAttempt
    checkpoint_id: int


@value
class ReopenSubtask:
    """The attempt has ended, and so has its part: its gateway need not close for the checkpoint, or stay
    closed.

    Only for a part that ends without an acknowledgement; that one reopens the gateway by itself (H41).
    """

    attempt: ExecutionAttempt
    checkpoint_id: int


@value
class StoreCheckpoint:
    """Write it durably and atomically, then say ``CheckpointStored`` or ``CheckpointStoreFailed``."""

    checkpoint: CompletedCheckpoint
    savepoint: bool = False


@value
class DiscardCheckpoint:
    """What ``StoreCheckpoint`` asked for is not wanted any more: stop the write, and void what it wrote.

    ``CheckpointDiscarded`` follows once the storage promises that no restart restores it, however late that is. None
    is expected for a savepoint.
    """

    checkpoint_id: int
    savepoint: bool = False


@value
class NotifyCheckpointComplete:
    """Tell the coordinator and every live attempt; from here on resets name this checkpoint (H18)."""

    checkpoint_id: int


@value
class NotifyCheckpointAborted:
    """Tell the coordinator and every live attempt; reopen what is closed for it, and only that (H44, H45).

    ``in_doubt``: a restart may still restore it (H64), and ``NotifyCheckpointDiscarded`` says when that has ended. If
    False, it is discarded at this moment: tell the coordinator that too, right after the abort.
    """

    checkpoint_id: int
    reason: str
    in_doubt: bool = False


@value
class NotifyCheckpointDiscarded:
    """It was aborted in doubt, and no restart restores it any more: tell the coordinator (H64)."""

    checkpoint_id: int


@value
class EndSavepoint:
    """The savepoint is durable: tell who asked, reopen what is closed for it; nobody commits anything (H49)."""

    checkpoint_id: int


@value
class TriggerCheckpoint:
    """One is due: mint an id and say ``CheckpointTriggered``. The machine mints none itself (H4).

    If no id can be had, say nothing: it is asked for again in time.
    """


@value
class RefuseCheckpoint:
    """Tell the requester that the checkpoint was refused; it never began."""

    checkpoint_id: int
    reason: str


# --- what the coordinator and the attempts are told ----------------------------------------------


@value
class RestoreAttempt:
    """The answer to ``AttemptAccepted``: restore this; ``held`` is sent first, before anything new (H31)."""

    attempt: ExecutionAttempt
    checkpoint_id: int
    states: tuple[SubtaskState, ...]
    held: tuple[HeldEvent, ...]
    events_sent: int


@value
class SubtaskResetToCheckpoint:
    """``subtask_reset``: a ``SubtaskReset``, with the checkpoint to go back to (H18).

    That is the last one whose completion the coordinator was told, or -1.
    """

    subtask: int
    checkpoint_id: int


@value
class OperatorResetToCheckpoint:
    """``reset_to_checkpoint``: an ``OperatorReset``, with the checkpoint to go back to.

    ``(-1, None)`` if there is none (H15).
    """

    checkpoint_id: int
    state: bytes | None


@value
class RaiseGlobalFailure:
    """Too many checkpoints in a row have failed (H45)."""

    cause: str


@value
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
    | NotifyCheckpointComplete
    | NotifyCheckpointAborted
    | NotifyCheckpointDiscarded
    | EndSavepoint
    | TriggerCheckpoint
    | RefuseCheckpoint
    | RestoreAttempt
    | SubtaskReady
    | SubtaskFailed
    | SubtaskResetToCheckpoint
    | OperatorResetToCheckpoint
    | RunEnded
    | RaiseGlobalFailure
    | ReportStale
)
