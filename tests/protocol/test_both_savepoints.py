# SPDX-License-Identifier: Apache-2.0

"""A savepoint completes nothing, and everything that was closed for it still opens (H49)."""

from __future__ import annotations

import pytest

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.gateway.types import CheckpointOutcome, CheckpointOver, CloseRequested
from protocol.subtask.types import OperatorFinished, SnapshotTaken
from protocol.wire import messages as m
from tests.protocol.refusals import unchanged
from tests.protocol.test_gateway_checkpoints import a_wide_gateway, cut
from tests.protocol.test_subtask import a_subtask, hear, sent
from tests.protocol.test_subtask_checkpoints import WIDE, a_closed_subtask, events, mailbox, send, take_snapshot

SAVED = CheckpointOutcome.SAVEPOINT


def test_savepoints_and_checkpoints_share_one_sequence_of_ids() -> None:  # H4
    gateway = a_wide_gateway()
    cut(gateway, 5)
    gateway.handle(CheckpointOver(5, SAVED), 1.0)
    with pytest.raises(LocalProtocolError, match="ids must increase"):
        gateway.handle(CloseRequested(5), 1.0)
    subtask = a_closed_subtask(5)
    hear(subtask, m.SavepointTaken(7, 2, 5))
    with pytest.raises(RemoteProtocolError, match="ids must increase"):
        hear(subtask, m.CloseForCheckpoint(7, 3, 5))
    hear(subtask, m.CloseForCheckpoint(7, 3, 6))


def test_the_operator_hears_nothing_of_the_end_of_a_savepoint() -> None:
    subtask = a_closed_subtask(5)
    send(subtask, b"a")
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    assert take_snapshot(subtask, 5) == ((b"a",), [b"a"])
    effects = hear(subtask, m.SavepointTaken(7, 3, 5))
    assert mailbox(effects) == []
    assert sent(effects) == []
    assert sent(hear(subtask, m.CloseForCheckpoint(7, 4, 6))) == [m.ClosedForCheckpoint(7, 5, 6), m.Confirm(7, 4)]


def test_a_valve_that_is_still_closed_opens_and_the_barrier_in_the_mailbox_means_nothing() -> None:  # H44, G5
    subtask = a_closed_subtask(5)
    send(subtask, b"a")
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    assert subtask.wants_snapshot(5)
    effects = hear(subtask, m.SavepointTaken(7, 3, 5))
    assert mailbox(effects) == []
    assert events(effects) == [b"a"]
    assert not subtask.wants_snapshot(5)
    with unchanged(subtask):
        assert subtask.handle(SnapshotTaken(5, b"late"), 1.0) == []


def test_a_finished_subtask_takes_the_end_of_a_savepoint_calmly() -> None:  # H47
    subtask = a_subtask(limits=WIDE)
    subtask.handle(OperatorFinished("", b"s"), 1.0)
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    assert sent(hear(subtask, m.SavepointTaken(7, 2, 5))) == []
    assert sent(hear(subtask, m.CloseForCheckpoint(7, 3, 6))) == [m.ClosedForCheckpoint(7, 4, 6), m.Confirm(7, 3)]
