# SPDX-License-Identifier: Apache-2.0

"""One operator's checkpoints: the inputs of a ``BarrierTracker``, its effects, and the values that it keeps.

``tracker`` is the machine. Its docstring explains what it decides, and the order of the effects. ``pending`` has the
checkpoints that are in progress, and ``rescale`` cuts one to another parallelism.

The inputs are requests for checkpoints, the steps of each, and the unchanged decisions of the attempt ledger
(``protocol.attempts``). The coordinator's actor handles the effects as they are. Decisions of the ledger pass unchanged
here, too: ``SubtaskReady``, ``SubtaskFailed``, ``RunEnded``. Only a reset gets the checkpoint to go back to, and with
it another name.
"""

from __future__ import annotations

from dataclasses import field

from protocol.arguments import AT_LEAST_1, WAIT, check_fields, checked_names
from protocol.attempts import (
    AttemptAccepted,
    OperatorReset,
    RunEnded,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.values import value
from protocol.wire.messages import HeldEvent, Positions, RestoreMode, SubtaskState
from protocol.wire.state_handles import StateHandle


@checked_names
@value
class CheckpointConfig:
    """When and how checkpoints are taken. Times are in seconds.

    ``timeout_s``: how long a checkpoint may take from its start to its durable write, and how long a request may wait
    for its start. ``tolerated_failures``: how many in a row may fail; one more is a global failure. ``mode`` holds
    until the first attempt is accepted, which brings its own. ``interval_s``: seconds between due times while an
    attempt runs; None: only on request. ``min_pause_s``: no checkpoint is due for this long after one has ended.
    ``concurrent_max``: how many may be in progress at the same time. ``hold_events``: whether an event that is sent
    while a checkpoint is in progress may have to wait for it. If False, none waits: events to the coordinator are
    recorded in the checkpoint while they are delivered, so that checkpoints may become larger. Savepoints do the same.
    """

    timeout_s: float = 60.0
    tolerated_failures: int = 0
    mode: RestoreMode = RestoreMode.BATCH
    interval_s: float | None = None
    min_pause_s: float = 0.0
    concurrent_max: int = 1
    hold_events: bool = True

    def __post_init__(self) -> None:
        check_fields(self, min_pause_s=WAIT, concurrent_max=AT_LEAST_1)


@value
class SubtaskSnapshot:
    """A subtask's part of a checkpoint.

    ``states``: usually one, its own; several or none if a rescaled checkpoint was never restored (H52).
    ``held``: the events its valve held, in order (H31); before them, those that were recorded (H79). ``events_sent``:
    how many of its events had left, by part, without the recorded ones, which is what the coordinator's part covers
    (H32).
    ``earlier_input``: no attempt of the subtask had begun with the input that the checkpoint belongs to, so positions
    in the states count the records of an earlier one (H174).
    """

    states: tuple[SubtaskState, ...] = ()
    held: tuple[HeldEvent, ...] = ()
    events_sent: Positions = ()
    earlier_input: bool = False


@value
class CompletedCheckpoint:
    """A complete checkpoint. A subtask that is missing in ``subtask_states`` took part without a state.

    ``label`` says which input it belongs to; see ``actors.coordination.engine.inputs``. ``partitions``: in how many
    partitions that input was, whose records positions in the states count (H174); 0 if that is not known, and in batch
    mode.
    ``parts``: the names to which indices of parts refer.
    """

    # H47

    checkpoint_id: int
    parallelism: int
    coordinator_state: bytes
    subtask_states: dict[int, SubtaskSnapshot] = field(default_factory=dict)
    label: str = ""
    partitions: int = 0
    parts: tuple[str, ...] = ("",)


# --- inputs: requests -------------------------------------------------------------------------------------


@value
class CheckpointTriggered:
    """Checkpoint ``checkpoint_id`` is requested; the id is higher than every one before it (H4).

    Exactly one of ``NotifyCheckpointComplete``, ``EndSavepoint``, ``NotifyCheckpointAborted`` and ``RefuseCheckpoint``
    answers it. A ``savepoint`` is stored elsewhere, completes nothing, and is not a point to restore (H49).
    ``target``: the folder for its files (H193). ``counts``: whether its failure counts as one of those in a row (H45);
    False if the one who asked for it acts on the failure, as for every savepoint.
    """

    checkpoint_id: int
    savepoint: bool = False
    target: str = ""
    counts: bool = True


@value
class InputBegan:
    """A run begins. ``same``: its input is that of the last completed checkpoint, from the first record on (H174).

    Otherwise, positions in that checkpoint, and in those that are in progress now, say nothing about this run.
    """

    same: bool


@value
class AbortRequested:
    """Give ``checkpoint_id`` up, if it is still pending or queued (H44). It does not count as a failure."""

    checkpoint_id: int
    reason: str


# --- inputs: the steps of a checkpoint --------------------------------------------------------------------


@value
class SubtaskClosed:
    """The attempt has closed its valve, and everything that it sent before is in the coordinator's mailbox."""

    attempt: ExecutionAttempt
    checkpoint_id: int


@value
class CoordinatorSnapshotTaken:
    """The cut: ``checkpoint_coordinator`` has returned, and every gateway closed at that moment (H40).

    ``events_taken``: per task attempt id, how many upward events of the attempt's history each part had taken at that
    moment, counting on from what the attempt restored (H32). Finished attempts are included. A missing attempt has
    sent nothing since its restore.
    """

    checkpoint_id: int
    state: bytes
    events_taken: dict[int, Positions] = field(default_factory=dict)


@value
class RecordedCollected:
    """The answer to ``CollectRecorded``: by task attempt id, what the coordinator has recorded, in order (H79)."""

    checkpoint_id: int
    recorded: dict[int, tuple[HeldEvent, ...]] = field(default_factory=dict)


@value
class CoordinatorSnapshotFailed:
    """``checkpoint_coordinator`` raised, did not return bytes, or took too long (H45, H46)."""

    checkpoint_id: int
    reason: str


@value
class SubtaskAcknowledged:
    """The attempt's snapshot. ``state_follows``: ``SubtaskStateStored`` or ``SubtaskStateFailed`` follows (H192)."""

    attempt: ExecutionAttempt
    checkpoint_id: int
    state: bytes
    held: tuple[HeldEvent, ...] = ()
    events_sent: Positions = ()
    state_follows: bool = False


@value
class SubtaskStateStored:
    """The attempt has stored the files of its snapshot (H190)."""

    attempt: ExecutionAttempt
    checkpoint_id: int
    handle: StateHandle


@value
class SubtaskStateFailed:
    """The attempt could not store the files of its snapshot. Its valve and its gateway are open all the same."""

    attempt: ExecutionAttempt
    checkpoint_id: int
    reason: str


@value
class SubtaskDeclined:
    """The attempt cannot take part."""

    attempt: ExecutionAttempt
    checkpoint_id: int
    reason: str


@value
class SubtaskFinalState:
    """The operator succeeded and ended with this state, whose ``files`` are stored; nothing more comes from the attempt
    (H47)."""

    attempt: ExecutionAttempt
    state: bytes
    events_sent: Positions = ()
    files: StateHandle | None = None


@value
class CheckpointStored:
    """The checkpoint is durable: a reader sees all of it (H50).

    ``copied``: for each handle of ``StoreCheckpoint.to_copy``, that of the copy, which was stored in its place.
    """

    checkpoint_id: int
    copied: dict[StateHandle, StateHandle] = field(default_factory=dict)


@value
class CheckpointStoreFailed:
    """The write has failed, as far as is known: the storage may hold all of it nevertheless (H45, H64)."""

    checkpoint_id: int
    reason: str


@value
class CheckpointDiscarded:
    """The answer to ``DiscardCheckpoint``: the storage promises durably that no restart restores it (H64)."""

    checkpoint_id: int


TrackerInput = (
    CheckpointTriggered
    | InputBegan
    | AbortRequested
    | AttemptAccepted
    | SubtaskReady
    | SubtaskFailed
    | SubtaskFinished
    | SubtaskReset
    | OperatorReset
    | RunEnded
    | SubtaskClosed
    | CoordinatorSnapshotTaken
    | CoordinatorSnapshotFailed
    | RecordedCollected
    | SubtaskAcknowledged
    | SubtaskStateStored
    | SubtaskStateFailed
    | SubtaskDeclined
    | SubtaskFinalState
    | CheckpointStored
    | CheckpointStoreFailed
    | CheckpointDiscarded
    | TimePassed
)


# --- effects: the steps of a checkpoint -------------------------------------------------------------------


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
    reopens only its own valves (H41). ``target``: what the gateways need to know of a savepoint; see ``CutReached``.
    """

    checkpoint_id: int
    target: str = ""


@value
class CollectRecorded:
    """Ask the coordinator for what it has recorded since the cut, in its order; the answer is ``RecordedCollected``.

    Everything that the subtasks had sent before their snapshots is ahead of this in the coordinator's mailbox (H79).
    """

    checkpoint_id: int


@value
class AwaitUploads:
    """Every snapshot is taken, and some subtasks still store the files of theirs: nothing to do but to show it."""

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
    """Write the checkpoint durably and atomically; the answer is ``CheckpointStored`` or ``CheckpointStoreFailed``.

    ``to_copy``: the states in it whose files are elsewhere. Copy these files first, into the savepoint, or to where
    this application stores its own, and write the handles of the copies (H190, H193).
    """

    checkpoint: CompletedCheckpoint
    savepoint: bool = False
    to_copy: tuple[StateHandle, ...] = ()


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


# --- effects: what the coordinator and the attempts are told ----------------------------------------------


@value
class RestoreAttempt:
    """The answer to ``AttemptAccepted``: restore this. ``held`` is sent first, before anything new (H31).

    ``input_begins_again``: ``states`` are of the input of the attempt's run (H174). ``partitions_before``: in how many
    partitions this input was when positions in the checkpoint were taken, if it is in another number now; otherwise 0.
    ``elsewhere``: the files of ``states`` are still in the savepoint that this application starts from.
    """

    attempt: ExecutionAttempt
    checkpoint_id: int
    states: tuple[SubtaskState, ...]
    held: tuple[HeldEvent, ...]
    events_sent: Positions
    input_begins_again: bool = False
    partitions_before: int = 0
    elsewhere: bool = False


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
    | AwaitUploads
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
