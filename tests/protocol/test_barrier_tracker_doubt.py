# SPDX-License-Identifier: Apache-2.0

"""Aborted checkpoints that a restart may still restore, and when they stop being in doubt (H64)."""

from __future__ import annotations

import pytest

from protocol import barrier_tracker as t
from protocol.attempts import OperatorReset, RunEnded, SubtaskFailed, SubtaskReset
from protocol.errors import LocalProtocolError
from tests.protocol.barrier_tracker_kit import A2, FAILED, A, B, Dialogue, kinds


def with_one_in_doubt() -> Dialogue:
    """Checkpoint 1 is complete, and 2 was aborted while it was being written."""
    dialogue = Dialogue(tolerated_failures=9).run(A, B)
    dialogue.complete(1, A, B)
    dialogue.store(2, A, B)
    dialogue.tell(t.CheckpointStoreFailed(2, "the disk does not answer"))
    assert dialogue.tracker.in_doubt_ids == (2,)
    return dialogue


@pytest.mark.parametrize(
    "cause",
    [
        t.CheckpointStoreFailed(1, "the disk does not answer"),
        t.AbortRequested(1, "enough"),
        SubtaskFailed(A, FAILED),
        SubtaskReset("words", 0),
        OperatorReset("words", "fail_job"),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_a_checkpoint_aborted_after_its_write_began_is_in_doubt(cause: t.TrackerInput) -> None:  # H64
    dialogue = Dialogue(tolerated_failures=9).run(A, B).store(1, A, B)
    effects = dialogue.tell(cause)
    aborted = effects[0]
    assert isinstance(aborted, t.NotifyCheckpointAborted)
    assert aborted.in_doubt
    assert effects[1] == t.DiscardCheckpoint(1)
    assert dialogue.tracker.in_doubt_ids == (1,)
    assert t.NotifyCheckpointDiscarded(1) not in effects


def test_a_checkpoint_aborted_before_its_write_is_never_in_doubt() -> None:  # H64
    dialogue = Dialogue(tolerated_failures=9).run(A, B).close(1, A, B)
    assert dialogue.tell(t.CoordinatorSnapshotFailed(1, "no")) == [t.NotifyCheckpointAborted(1, "coordinator: no")]
    assert dialogue.tracker.in_doubt_ids == ()
    assert kinds(dialogue.tell(t.CheckpointDiscarded(1))) == [t.ReportStale]


def test_the_doubt_ends_with_a_durable_discard_and_is_reported_once() -> None:  # H64
    dialogue = with_one_in_doubt()
    assert dialogue.tell(t.CheckpointDiscarded(2)) == [t.NotifyCheckpointDiscarded(2)]
    assert dialogue.tracker.in_doubt_ids == ()
    assert kinds(dialogue.tell(t.CheckpointDiscarded(2))) == [t.ReportStale]
    assert dialogue.complete(3, A, B)[-1] == t.NotifyCheckpointComplete(3)


def test_the_doubt_ends_when_a_later_checkpoint_completes() -> None:  # H64
    dialogue = with_one_in_doubt()
    dialogue.store(3, A, B)
    dialogue.tell(t.CheckpointStoreFailed(3, "still not"))
    assert list(dialogue.tracker.in_doubt_ids) == [2, 3]
    assert dialogue.complete(4, A, B)[-3:] == [
        t.NotifyCheckpointComplete(4),
        t.NotifyCheckpointDiscarded(2),
        t.NotifyCheckpointDiscarded(3),
    ]
    assert not dialogue.tracker.in_doubt_ids
    assert kinds(dialogue.tell(t.CheckpointDiscarded(3))) == [t.ReportStale]


def test_a_lower_checkpoint_that_completes_leaves_a_higher_one_in_doubt() -> None:  # H64, H43
    dialogue = Dialogue(tolerated_failures=9, concurrent_max=2).run(A).cut(1, A).store(2, A)
    dialogue.tell(t.AbortRequested(2, "enough"))
    dialogue.acknowledge(1, A)
    assert dialogue.tell(t.CheckpointStored(1)) == [t.NotifyCheckpointComplete(1)]
    assert dialogue.tracker.in_doubt_ids == (2,)


def test_neither_resets_nor_the_end_of_a_run_end_the_doubt() -> None:  # H64, H18
    dialogue = with_one_in_doubt()
    dialogue.tell(SubtaskFailed(A, FAILED))
    assert dialogue.tell(SubtaskReset("words", 0)) == [t.SubtaskResetToCheckpoint(0, 1)]
    dialogue.run(A2)
    assert t.OperatorResetToCheckpoint(1, b"coordinator 1", True) in dialogue.tell(OperatorReset("words", "fail_job"))
    dialogue.tell(RunEnded("words", 7, False))
    assert dialogue.tracker.in_doubt_ids == (2,)
    assert dialogue.tell(t.CheckpointDiscarded(2)) == [t.NotifyCheckpointDiscarded(2)]


def test_a_savepoint_is_never_in_doubt() -> None:  # H64, H49
    dialogue = Dialogue(tolerated_failures=9).run(A).store(1, A, savepoint=True)
    aborted, discarded = dialogue.tell(t.AbortRequested(1, "enough"))
    assert isinstance(aborted, t.NotifyCheckpointAborted)
    assert not aborted.in_doubt
    assert discarded == t.DiscardCheckpoint(1, savepoint=True)
    assert dialogue.tracker.in_doubt_ids == ()


def test_what_is_still_pending_cannot_be_discarded() -> None:  # H64
    dialogue = Dialogue().run(A).store(1, A)
    with pytest.raises(LocalProtocolError, match="although it is pending"):
        dialogue.tell(t.CheckpointDiscarded(1))
    assert dialogue.tell(t.CheckpointStored(1)) == [t.NotifyCheckpointComplete(1)]
