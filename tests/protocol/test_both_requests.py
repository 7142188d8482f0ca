# SPDX-License-Identifier: Apache-2.0

"""Requests and answers obey the rules of events, at both ends, during checkpoints and across a restore (H33)."""

from __future__ import annotations

from protocol.gateway import types as g
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire import messages as m
from tests.protocol.test_gateway import hear as hear_up
from tests.protocol.test_gateway import sent as sent_down
from tests.protocol.test_gateway_checkpoints import a_wide_gateway, cut
from tests.protocol.test_subtask import hear, sent
from tests.protocol.test_subtask_checkpoints import WIDE, a_closed_subtask


def test_a_request_that_has_left_counts_as_an_event_does() -> None:  # H32
    subtask = a_closed_subtask()
    subtask.handle(s.RequestSubmitted(1, b"?"), 1.0)
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    effects = subtask.handle(s.SnapshotTaken(5, b""), 1.0)
    assert m.CheckpointAcknowledged(7, 4, 5, b"", (), (1,), 2) in sent(effects)


def test_an_answer_given_after_the_cut_waits_for_the_acknowledgement() -> None:
    # H41: it comes after the checkpoint, like an event
    gateway = a_wide_gateway()
    hear_up(gateway, m.RequestMessage(7, 1, 4, b"?"))
    cut(gateway, 5)
    assert gateway.handle(g.AnswerSubmitted(4, "", b"!"), 1.0) == []
    assert gateway.statistics().held_events == 1
    effects = hear_up(gateway, m.CheckpointAcknowledged(7, 2, 5, b"", (), (1,)))
    assert effects[0] == g.ReportAcknowledged(5, b"", (), (1,))
    assert sent_down(effects)[0] == m.AnswerMessage(7, 3, 4, "", b"!")


def test_a_held_answer_of_an_attempt_that_is_over_is_dropped_with_it() -> None:  # H26
    gateway = a_wide_gateway()
    hear_up(gateway, m.RequestMessage(7, 1, 4, b"?"))
    hear_up(gateway, m.RequestMessage(7, 2, 5, b"?"))
    cut(gateway, 5)
    gateway.handle(g.AnswerSubmitted(4, "", b"!"), 1.0)
    assert gateway.handle(g.AttemptIsOver("killed"), 2.0) == []
    assert gateway.handle(g.AnswerSubmitted(5, "", b"late"), 3.0) == []
    gateway.check_invariants()


def test_a_restored_request_leaves_and_arrives_as_a_request_of_the_subtask_that_asked() -> None:
    # H73, H31, H52: no task waits for the answer, since the attempt that waited is over
    subtask = SubtaskMachine(7, 2, WIDE, (m.HeldEvent(6, b"?", is_request=True),))
    [request] = sent(subtask.handle(s.ConnectionAttached(0), 0.0))
    assert request == m.RestoredRequestMessage(7, 1, 6, b"?")
    gateway = a_wide_gateway()
    assert hear_up(gateway, request) == [g.DeliverRequest(1, None, b"?", sender=6)]
    assert gateway.handle(g.ItemTaken(1), 1.0) == [g.SendToAttempt(m.Confirm(7, 1))]


def test_a_restored_request_that_has_not_left_is_a_request_in_the_next_snapshot() -> None:  # H73, H31
    held = (m.HeldEvent(6, b"?", is_request=True), m.HeldEvent(6, b"."))
    subtask = SubtaskMachine(7, 2, s.SubtaskLimits(1, 1000, 10.0), (m.HeldEvent(6, b"first"), *held))
    subtask.handle(s.ConnectionAttached(0), 0.0)
    subtask.handle(s.OperatorOpened(), 0.0)
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    snapshot = sent(subtask.handle(s.SnapshotTaken(5, b""), 1.0))[0]
    assert isinstance(snapshot, m.CheckpointAcknowledged)
    assert snapshot.held == held


def test_an_answer_that_comes_in_the_middle_of_a_checkpoint_does_not_open_the_valve() -> None:
    # H33, H41: sent before the cut, it arrives between the close and the barrier
    subtask = SubtaskMachine(7, 2, WIDE)
    subtask.handle(s.ConnectionAttached(0), 0.0)
    subtask.handle(s.OperatorOpened(), 0.0)
    subtask.handle(s.RequestSubmitted(1, b"?"), 0.0)
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    assert s.ResolveRequest(1, "", b"!") in hear(subtask, m.AnswerMessage(7, 2, 1, "", b"!"))
    assert subtask.handle(s.EventSubmitted(b"after"), 1.0) == []
    assert subtask.statistics().closed_for == (5,)
    hear(subtask, m.CheckpointCompleted(7, 3, 5))
    assert subtask.statistics().closed_for == ()
