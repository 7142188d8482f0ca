# SPDX-License-Identifier: Apache-2.0

"""The upward valve: closing, snapshots with held events, aborts, and two checkpoints at a time."""

from __future__ import annotations

import pytest

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire import messages as m
from tests.protocol.refusals import unchanged
from tests.protocol.test_subtask import a_subtask, hear, sent

WIDE = s.SubtaskLimits(100, 10_000, 30)


def a_closed_subtask(*checkpoint_ids: int) -> SubtaskMachine:
    """Return a subtask that opened and then closed for these; the coordinator's items are numbered from 1."""
    subtask = a_subtask(limits=WIDE)
    for seq, checkpoint_id in enumerate(checkpoint_ids, start=1):
        hear(subtask, m.CloseForCheckpoint(7, seq, checkpoint_id))
    return subtask


def send(subtask: SubtaskMachine, *payloads: bytes) -> list[bytes]:
    left: list[s.SubtaskEffect] = []
    for payload in payloads:
        left += subtask.handle(s.EventSubmitted(payload), 1.0)
        subtask.check_invariants()
    return events(left)


def events(effects: list[s.SubtaskEffect]) -> list[bytes]:
    return [
        message.payload for message in sent(effects) if isinstance(message, m.EventMessage | m.RestoredEventMessage)
    ]


def take_snapshot(subtask: SubtaskMachine, checkpoint_id: int) -> tuple[tuple[bytes, ...], list[bytes]]:
    """Return the payloads in the acknowledgement, and the messages that leave after it."""
    effects = subtask.handle(s.SnapshotTaken(checkpoint_id, b"s"), 1.0)
    subtask.check_invariants()
    first = sent(effects)[0]
    assert isinstance(first, m.CheckpointAcknowledged)
    return tuple(held.payload for held in first.held), events(effects)


def mailbox(effects: list[s.SubtaskEffect]) -> list[object]:
    return [effect.item for effect in effects if isinstance(effect, s.PutInMailbox)]


def test_the_valve_closes_immediately_after_everything_that_was_sent_before() -> None:  # H40
    subtask = a_subtask(limits=WIDE)
    assert send(subtask, b"before") == [b"before"]
    effects = hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    assert sent(effects) == [m.ClosedForCheckpoint(7, 3, 5, 1)]
    assert send(subtask, b"after") == []
    assert subtask.statistics().closed_for == (5,)


def test_what_is_held_is_in_the_snapshot_in_order_and_leaves_after_it() -> None:  # H31, G1
    subtask = a_closed_subtask(5)
    send(subtask, b"a", b"b")
    assert hear(subtask, m.BarrierMessage(7, 2, 5, 0))[0] == s.PutInMailbox(s.MailboxBarrier(5))
    assert send(subtask, b"c") == []
    assert take_snapshot(subtask, 5) == ((b"a", b"b", b"c"), [b"a", b"b", b"c"])
    assert send(subtask, b"d") == [b"d"]


def test_a_snapshot_taken_without_a_connection_waits_for_one() -> None:  # H24
    subtask = a_closed_subtask(5)
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    subtask.handle(s.ConnectionLost(), 1.0)
    assert subtask.handle(s.SnapshotTaken(5, b""), 2.0) == []
    assert not subtask.all_confirmed


def test_a_barrier_lies_in_the_mailbox_after_the_events_that_came_before_it() -> None:  # H23
    subtask = a_closed_subtask(5)
    batch: list[m.DownMessage] = [m.EventMessage(7, 2, b"a"), m.BarrierMessage(7, 3, 5, 2), m.EventMessage(7, 4, b"b")]
    effects = subtask.handle_batch(batch, 1.0)
    assert [effect.item for effect in effects if isinstance(effect, s.PutInMailbox)] == [
        s.MailboxEvent(b"a"),
        s.MailboxBarrier(5),
        s.MailboxEvent(b"b"),
    ]


def test_a_barrier_without_a_close_is_the_peers_fault() -> None:  # H40
    subtask = a_closed_subtask()
    with unchanged(subtask), pytest.raises(RemoteProtocolError, match="was not asked to close"):
        hear(subtask, m.BarrierMessage(7, 1, 5, 0))


def test_a_barrier_that_names_an_event_after_itself_is_the_peers_fault() -> None:  # H23
    subtask = a_closed_subtask(5)
    with unchanged(subtask), pytest.raises(RemoteProtocolError, match="has overtaken item 2"):
        hear(subtask, m.BarrierMessage(7, 2, 5, 2))


def test_ids_must_rise() -> None:  # H4
    subtask = a_closed_subtask(5)
    hear(subtask, m.CheckpointAborted(7, 2, 5))
    with pytest.raises(RemoteProtocolError, match="ids must increase"):
        hear(subtask, m.CloseForCheckpoint(7, 3, 5))


def test_an_abort_reopens_and_is_told_to_the_operator() -> None:  # H44, H45
    subtask = a_closed_subtask(5)
    send(subtask, b"a")
    effects = hear(subtask, m.CheckpointAborted(7, 2, 5))
    assert effects[0] == s.PutInMailbox(s.MailboxAborted(5))
    assert events(effects) == [b"a"]


def test_a_completion_reopens_and_is_told_to_the_operator() -> None:  # H49
    subtask = a_closed_subtask(5)
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    take_snapshot(subtask, 5)
    assert hear(subtask, m.CheckpointCompleted(7, 3, 5))[0] == s.PutInMailbox(s.MailboxCompleted(5))


def test_a_snapshot_that_comes_after_the_abort_changes_nothing() -> None:  # H44
    subtask = a_closed_subtask(5)
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    hear(subtask, m.CheckpointAborted(7, 3, 5))
    hear(subtask, m.CloseForCheckpoint(7, 4, 6))
    send(subtask, b"a")
    with unchanged(subtask):
        assert subtask.handle(s.SnapshotTaken(5, b"late"), 1.0) == []
        assert subtask.handle(s.SnapshotRefused(5, "late"), 1.0) == []


def test_unknown_checkpoints_are_ignored() -> None:  # H44, G5
    subtask = a_closed_subtask(5)
    send(subtask, b"a")
    assert sent(hear(subtask, m.CheckpointAborted(7, 2, 4))) == []
    assert sent(hear(subtask, m.CheckpointCompleted(7, 3, 9))) == []
    assert sent(hear(subtask, m.SavepointTaken(7, 4, 9))) == []
    assert subtask.handle(s.SnapshotTaken(4, b""), 1.0) == []
    assert subtask.statistics().closed_for == (5,)
    assert sent(hear(subtask, m.EventMessage(7, 5, b"e"))) == [m.Confirm(7, 5)]


def test_a_snapshot_cannot_come_before_its_barrier_nor_twice() -> None:  # H23
    subtask = a_closed_subtask(5)
    with pytest.raises(LocalProtocolError, match="which is at closed"):
        subtask.handle(s.SnapshotTaken(5, b""), 1.0)
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    take_snapshot(subtask, 5)
    with pytest.raises(LocalProtocolError, match="which is at snapshot"):
        subtask.handle(s.SnapshotTaken(5, b""), 1.0)


def test_a_refused_snapshot_is_declined_and_the_valve_waits_for_the_abort() -> None:  # H45
    subtask = a_closed_subtask(5)
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    assert sent(subtask.handle(s.SnapshotRefused(5, "disk full"), 1.0)) == [
        m.CheckpointDeclined(7, 3, 5, "disk full", 2)
    ]
    assert send(subtask, b"a") == []
    assert events(hear(subtask, m.CheckpointAborted(7, 3, 5))) == [b"a"]


def test_requests_obey_the_valve_and_are_stored_as_requests() -> None:  # H33, H73, G14
    subtask = a_closed_subtask(5)
    send(subtask, b"a")
    assert subtask.handle(s.RequestSubmitted(1, b"?"), 1.0) == []
    send(subtask, b"b")
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    effects = subtask.handle(s.SnapshotTaken(5, b""), 1.0)
    assert sent(effects) == [
        m.CheckpointAcknowledged(
            7, 3, 5, b"", (m.HeldEvent(2, b"a"), m.HeldEvent(2, b"?", is_request=True), m.HeldEvent(2, b"b")), (), 2
        ),
        m.EventMessage(7, 4, b"a"),
        m.RequestMessage(7, 5, 1, b"?"),
        m.EventMessage(7, 6, b"b"),
    ]
    assert len(hear(subtask, m.AnswerMessage(7, 3, 1, "", b"!"))) == 2


def test_an_operator_cannot_end_well_while_the_valve_holds_what_it_sent() -> None:
    # H31: held events are not in a snapshot yet, and the completion message must not overtake them
    subtask = a_closed_subtask(5)
    send(subtask, b"a")
    assert not subtask.may_finish
    with pytest.raises(LocalProtocolError, match="handle the mailbox"):
        subtask.handle(s.OperatorFinished("", b""), 1.0)


def test_an_operator_that_has_nothing_held_ends_in_the_middle_of_a_checkpoint() -> None:
    # H47: its final state is its part of the checkpoint
    subtask = a_closed_subtask(5)
    assert sent(subtask.handle(s.OperatorFinished("", b"s"), 1.0)) == [m.Finished(7, 3, "", b"s", ())]
    assert sent(hear(subtask, m.BarrierMessage(7, 2, 5, 0))) == []
    assert subtask.handle(s.SnapshotTaken(5, b""), 1.0) == []
    assert sent(hear(subtask, m.CheckpointCompleted(7, 3, 5))) == []
    assert sent(hear(subtask, m.CloseForCheckpoint(7, 4, 6))) == [m.ClosedForCheckpoint(7, 4, 6, 4)]
