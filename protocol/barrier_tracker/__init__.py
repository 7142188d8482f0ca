# SPDX-License-Identifier: Apache-2.0

"""One operator's checkpoints.

``tracker`` is the machine, ``vocabulary`` its inputs, and ``effects`` its outputs. ``under_way`` keeps the checkpoints
that are pending at one time, ``pending`` is one of them, and ``attempts`` are the possible participants. ``schedule``
says when a checkpoint is due, and ``rescale`` cuts one to another parallelism.
"""

from protocol.barrier_tracker.effects import (
    CloseSubtask,
    CollectRecorded,
    DiscardCheckpoint,
    EndSavepoint,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NotifyCheckpointDiscarded,
    OperatorResetToCheckpoint,
    RaiseGlobalFailure,
    RefuseCheckpoint,
    ReopenSubtask,
    ReportStale,
    RestoreAttempt,
    SnapshotCoordinator,
    StoreCheckpoint,
    SubtaskResetToCheckpoint,
    TrackerEffect,
    TriggerCheckpoint,
)
from protocol.barrier_tracker.pending import CheckpointView, Phase, Step
from protocol.barrier_tracker.rescale import rescaled
from protocol.barrier_tracker.tracker import ONE_OF_MANY, BarrierTracker
from protocol.barrier_tracker.vocabulary import (
    AbortRequested,
    CheckpointConfig,
    CheckpointDiscarded,
    CheckpointStored,
    CheckpointStoreFailed,
    CheckpointTriggered,
    CompletedCheckpoint,
    CoordinatorSnapshotFailed,
    CoordinatorSnapshotTaken,
    InputBegan,
    RecordedCollected,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    SubtaskFinalState,
    SubtaskSnapshot,
    TrackerInput,
)
from protocol.machine import TimePassed

__all__ = [
    "ONE_OF_MANY",
    "AbortRequested",
    "BarrierTracker",
    "CheckpointConfig",
    "CheckpointDiscarded",
    "CheckpointStoreFailed",
    "CheckpointStored",
    "CheckpointTriggered",
    "CheckpointView",
    "CloseSubtask",
    "CollectRecorded",
    "CompletedCheckpoint",
    "CoordinatorSnapshotFailed",
    "CoordinatorSnapshotTaken",
    "DiscardCheckpoint",
    "EndSavepoint",
    "InputBegan",
    "NotifyCheckpointAborted",
    "NotifyCheckpointComplete",
    "NotifyCheckpointDiscarded",
    "OperatorResetToCheckpoint",
    "Phase",
    "RaiseGlobalFailure",
    "RecordedCollected",
    "RefuseCheckpoint",
    "ReopenSubtask",
    "ReportStale",
    "RestoreAttempt",
    "SnapshotCoordinator",
    "Step",
    "StoreCheckpoint",
    "SubtaskAcknowledged",
    "SubtaskClosed",
    "SubtaskDeclined",
    "SubtaskFinalState",
    "SubtaskResetToCheckpoint",
    "SubtaskSnapshot",
    "TimePassed",
    "TrackerEffect",
    "TrackerInput",
    "TriggerCheckpoint",
    "rescaled",
]
