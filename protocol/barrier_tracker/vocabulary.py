# SPDX-License-Identifier: Apache-2.0

"""The inputs of a ``BarrierTracker``, and the values that it keeps; ``effects`` has its outputs.

The inputs are requests for checkpoints, the steps of each, and the unchanged decisions of the attempt ledger
(``protocol.attempts.types``).
"""

from __future__ import annotations

from dataclasses import field

from protocol.arguments import AT_LEAST_1, WAIT, check_fields
from protocol.attempts.types import (
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
    """

    checkpoint_id: int
    savepoint: bool = False


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
    """The attempt's snapshot."""

    attempt: ExecutionAttempt
    checkpoint_id: int
    state: bytes
    held: tuple[HeldEvent, ...] = ()
    events_sent: Positions = ()


@value
class SubtaskDeclined:
    """The attempt cannot take part."""

    attempt: ExecutionAttempt
    checkpoint_id: int
    reason: str


@value
class SubtaskFinalState:
    """The operator succeeded and ended with this state; nothing more comes from the attempt (H47)."""

    attempt: ExecutionAttempt
    state: bytes
    events_sent: Positions = ()


@value
class CheckpointStored:
    """The checkpoint is durable: a reader sees all of it (H50)."""

    checkpoint_id: int


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
    | SubtaskDeclined
    | SubtaskFinalState
    | CheckpointStored
    | CheckpointStoreFailed
    | CheckpointDiscarded
    | TimePassed
)
