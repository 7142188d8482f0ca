# SPDX-License-Identifier: Apache-2.0

"""The effects of a ``BarrierTracker``; ``tracker`` describes their order.

The coordinator's actor handles these values as they are. Decisions of the ledger pass unchanged: ``SubtaskReady``,
``SubtaskFailed``, ``RunEnded``. Only a reset gets the checkpoint to go back to, and with it another name.
"""

from __future__ import annotations

from protocol.attempts.types import RunEnded, SubtaskFailed, SubtaskFinished, SubtaskReady
from protocol.barrier_tracker.vocabulary import CompletedCheckpoint
from protocol.ids import ExecutionAttempt
from protocol.values import value
from protocol.wire.messages import HeldEvent, Positions, SubtaskState

# --- the steps of a checkpoint -------------------------------------------------------------------


@value
class CloseSubtask:
    """Close the attempt's valve for the checkpoint, through its gateway; ``SubtaskClosed`` is the answer."""

    attempt: ExecutionAttempt
    checkpoint_id: int


@value
class SnapshotCoordinator:
    """Call ``checkpoint_coordinator``, in the coordinator's order, unless the checkpoint has been aborted by then.

    Its return closes the gateways (H40).

    From then on each gateway sends its barrier by itself (H78), and the attempt answers with its snapshot, which
    reopens only its own valves (H41).
    """

    checkpoint_id: int


@value
class CollectRecorded:
    """Ask the coordinator for what it has recorded since the cut, in its order; the answer is ``RecordedCollected``.

    Everything that the subtasks had sent before their snapshots is ahead of this in the coordinator's mailbox (H79).
    """

    checkpoint_id: int


@value
class ReopenSubtask:
    """The attempt has ended, and so has its part: its gateway must neither close for the checkpoint nor stay closed.

    Only for a part that ends without an acknowledgement, because an acknowledgement itself reopens the gateway (H41).
    """

    attempt: ExecutionAttempt
    checkpoint_id: int


@value
class StoreCheckpoint:
    """Write the checkpoint durably and atomically; the answer is ``CheckpointStored`` or ``CheckpointStoreFailed``."""

    checkpoint: CompletedCheckpoint
    savepoint: bool = False


@value
class DiscardCheckpoint:
    """The checkpoint of a ``StoreCheckpoint`` is no longer wanted: stop the write, and void what it wrote.

    The answer is ``CheckpointDiscarded``, once the storage promises that no restart restores it, however late that is.
    A savepoint needs no answer.
    """

    checkpoint_id: int
    savepoint: bool = False


@value
class NotifyCheckpointComplete:
    """Tell the coordinator and every live attempt. From here on, resets name this checkpoint (H18)."""

    checkpoint_id: int


@value
class NotifyCheckpointAborted:
    """Tell the coordinator and every live attempt, and reopen only what is closed for this checkpoint (H44, H45).

    ``in_doubt``: a restart may still restore it (H64), until ``NotifyCheckpointDiscarded``. If False, it is discarded
    now: tell the coordinator that too, right after the abort.
    """

    checkpoint_id: int
    reason: str
    in_doubt: bool = False


@value
class NotifyCheckpointDiscarded:
    """Tell the coordinator that no restart can restore this aborted checkpoint any more (H64)."""

    checkpoint_id: int


@value
class EndSavepoint:
    """The savepoint is durable: tell the requester, and reopen what is closed for it. Nothing is committed (H49)."""

    checkpoint_id: int


@value
class TriggerCheckpoint:
    """A checkpoint is due: generate an id and answer ``CheckpointTriggered``. The machine generates no ids (H4).

    If no id is available, do not answer: the machine asks again later.
    """


@value
class RefuseCheckpoint:
    """Tell the requester that the checkpoint was refused; it never began."""

    checkpoint_id: int
    reason: str


# --- what the coordinator and the attempts are told ----------------------------------------------


@value
class RestoreAttempt:
    """The answer to ``AttemptAccepted``: restore this. ``held`` is sent first, before anything new (H31).

    ``input_begins_again``: ``states`` are of the input of the attempt's run (H174). ``partitions_before``: in how many
    partitions this input was when positions in the checkpoint were taken, if it is in another number now; otherwise 0.
    """

    attempt: ExecutionAttempt
    checkpoint_id: int
    states: tuple[SubtaskState, ...]
    held: tuple[HeldEvent, ...]
    events_sent: Positions
    input_begins_again: bool = False
    partitions_before: int = 0


@value
class SubtaskResetToCheckpoint:
    """Call ``subtask_reset``: a ``SubtaskReset``, with the checkpoint to go back to (H18).

    That is the last one whose completion the coordinator was told, or -1.
    """

    subtask: int
    checkpoint_id: int


@value
class OperatorResetToCheckpoint:
    """Call ``reset_to_checkpoint``: an ``OperatorReset``, with the checkpoint to go back to.

    ``(-1, None)`` if there is none (H15). ``input_begins_again``: it belongs to the input of the run that goes on, or
    begins (H174).
    """

    checkpoint_id: int
    state: bytes | None
    input_begins_again: bool = False


@value
class RaiseGlobalFailure:
    """Too many checkpoints in a row have failed (H45)."""

    cause: str


@value
class ReportStale:
    """An input about a checkpoint or attempt that is over changed nothing: count and log it (H3, H44)."""

    what: str


TrackerEffect = (
    CloseSubtask
    | SnapshotCoordinator
    | CollectRecorded
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
    | SubtaskFinished
    | SubtaskResetToCheckpoint
    | OperatorResetToCheckpoint
    | RunEnded
    | RaiseGlobalFailure
    | ReportStale
)
