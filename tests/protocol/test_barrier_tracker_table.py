# SPDX-License-Identifier: Apache-2.0

"""The table of valid inputs in each phase of a checkpoint, cell by cell (H40, H44)."""

from __future__ import annotations

import copy

import pytest

from protocol.barrier_tracker import (
    CheckpointStored,
    CheckpointStoreFailed,
    CoordinatorSnapshotFailed,
    CoordinatorSnapshotTaken,
    GatewayDrained,
    NotifyCheckpointAborted,
    Phase,
    ReportStale,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    TrackerInput,
)
from protocol.barrier_tracker.pending import LEGAL, Verdict
from protocol.errors import LocalProtocolError
from tests.protocol.barrier_tracker_kit import A, B, Dialogue, kinds

WORDS: list[TrackerInput] = [
    SubtaskClosed(B, 1),
    CoordinatorSnapshotTaken(1, b"c"),
    CoordinatorSnapshotFailed(1, "no"),
    GatewayDrained(B, 1),
    SubtaskAcknowledged(B, 1, b"b"),
    SubtaskDeclined(B, 1, "no"),
    CheckpointStored(1),
    CheckpointStoreFailed(1, "no"),
]


def dialogue_in(phase: Phase) -> Dialogue:
    """Bring checkpoint 1 into this phase. It waits for B if it waits for a subtask."""
    dialogue = Dialogue(tolerated_failures=9).run(A, B)
    match phase:
        case Phase.CLOSING:
            dialogue.close(1, A)
        case Phase.SNAPSHOTTING:
            dialogue.close(1, A, B)
        case Phase.DRAINING:
            dialogue.close(1, A, B).tell(CoordinatorSnapshotTaken(1, b"c"), GatewayDrained(A, 1))
        case Phase.ACKNOWLEDGING:
            dialogue.cut(1, A, B).acknowledge(1, A)
        case Phase.STORING:
            dialogue.store(1, A, B)
        case Phase.IDLE:
            dialogue.complete(1, A, B)
    assert dialogue.tracker.phase is phase
    return dialogue


def test_the_table_has_a_row_for_every_report() -> None:
    assert LEGAL.keys() == {type(word) for word in WORDS}


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_every_cell_does_what_it_says(word: TrackerInput, phase: Phase) -> None:
    dialogue = dialogue_in(phase)
    before = copy.deepcopy(vars(dialogue.tracker))
    match LEGAL[type(word)][list(Phase).index(phase)]:
        case Verdict.ACT:
            assert ReportStale not in kinds(dialogue.tell(word))
            assert vars(dialogue.tracker) != before
        case Verdict.STALE:
            assert kinds(dialogue.tell(word)) == [ReportStale]
            assert vars(dialogue.tracker) == before
        case Verdict.ABORT:
            assert kinds(dialogue.tell(word)) == [NotifyCheckpointAborted]
        case Verdict.ILLEGAL:
            with pytest.raises(LocalProtocolError, match=phase.value):
                dialogue.tell(word)
            assert vars(dialogue.tracker) == before
