# SPDX-License-Identifier: Apache-2.0

"""Checkpoint items are confirmed with the next message that leaves: no later, once, and never alone. If that message is
a checkpoint item too, the confirmation is a field of it.

No peer waits for such a confirmation: if the connection breaks before it leaves, the next one still resumes after the
confirmed item (H24). Peers do wait for the confirmation of events, requests, answers and the completion message, so it
leaves immediately. So does that of a duplicate, whose sender may have lost the confirmation.
"""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import RemoteProtocolError
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine
from protocol.streams import ConnectionAttached, ConnectionLost
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire import messages as m
from tests.protocol import test_gateway as gateways
from tests.protocol import test_subtask as subtasks
from tests.protocol.test_gateway import a_gateway
from tests.protocol.test_gateway_checkpoints import WIDE as WIDE_DOWN
from tests.protocol.test_gateway_checkpoints import a_wide_gateway, cut, submit
from tests.protocol.test_subtask import a_subtask
from tests.protocol.test_subtask_checkpoints import WIDE, a_closed_subtask, send

COMPLETED, ABORTED = g.CheckpointOutcome.COMPLETED, g.CheckpointOutcome.ABORTED
ENDS = {COMPLETED: m.CheckpointCompleted, ABORTED: m.CheckpointAborted, g.CheckpointOutcome.SAVEPOINT: m.SavepointTaken}


# --- down: the subtask confirms ---------------------------------------------------------------------------


def done(machine: GatewayMachine | SubtaskMachine, input: Any) -> list[object]:
    """Return the messages that the machine sends on this input."""
    effects = machine.handle(input, 1.0)
    machine.check_invariants()
    return [effect.message for effect in effects if isinstance(effect, s.SendToCoordinator | g.SendToAttempt)]


def told(subtask: SubtaskMachine, message: m.DownMessage) -> list[object]:
    return done(subtask, s.MessageReceived(message))


def a_subtask_at_its_barrier() -> SubtaskMachine:
    """Close for 5 and receive its barrier, which is item 2; ``Closed`` was item 2, and is not confirmed."""
    subtask = a_closed_subtask(5)
    assert told(subtask, m.BarrierMessage(7, 2, 5, 0)) == []
    return subtask


@pytest.mark.parametrize(
    ("input", "answer"),
    [
        (s.SnapshotTaken(5, b"s"), m.CheckpointAcknowledged(7, 3, 5, b"s", (), (), 2)),
        (s.SnapshotRefused(5, "no"), m.CheckpointDeclined(7, 3, 5, "no", 2)),
    ],
)
def test_a_barrier_is_confirmed_with_what_the_operator_answers(input: s.SubtaskInput, answer: m.UpMessage) -> None:
    # H22
    subtask = a_subtask_at_its_barrier()
    assert subtask.resume_seq == 2
    assert done(subtask, input) == [answer]


@pytest.mark.parametrize("end", ENDS.values())
def test_the_end_of_a_checkpoint_is_confirmed_with_the_answer_to_the_next_close(
    end: type[m.CheckpointCompleted | m.CheckpointAborted | m.SavepointTaken],
) -> None:  # H22, H44, H49
    subtask = a_subtask_at_its_barrier()
    done(subtask, s.SnapshotTaken(5, b""))
    assert told(subtask, end(7, 3, 5)) == []
    assert told(subtask, m.CloseForCheckpoint(7, 4, 6)) == [m.ClosedForCheckpoint(7, 4, 6, 4)]


@pytest.mark.parametrize("end", ENDS.values())
def test_an_end_that_opens_the_valve_is_confirmed_after_what_leaves(
    end: type[m.CheckpointCompleted | m.CheckpointAborted | m.SavepointTaken],
) -> None:  # H22, H31, H44
    subtask = a_subtask_at_its_barrier()
    send(subtask, b"a")
    assert told(subtask, end(7, 3, 5)) == [m.EventMessage(7, 3, b"a"), m.Confirm(7, 3)]


@pytest.mark.parametrize("last", [m.EventMessage(7, 3, b"e"), m.CloseForCheckpoint(7, 2, 6)])
def test_any_other_confirmation_takes_the_reports_with_it(last: m.DownMessage) -> None:
    # H23: an event's confirmation leaves immediately, and that of a close in its answer
    subtask = a_subtask_at_its_barrier() if isinstance(last, m.EventMessage) else a_closed_subtask(5)
    *_, answer = told(subtask, last)
    assert isinstance(answer, m.Confirm | m.ClosedForCheckpoint)
    assert m.confirmed_by(answer) == subtask.resume_seq


def test_a_batch_of_reports_alone_is_confirmed_by_nobody_and_one_with_an_event_immediately() -> None:  # H22, H23
    subtask = a_closed_subtask(5)
    effects = subtask.handle_batch([m.BarrierMessage(7, 2, 5, 0), m.CheckpointAborted(7, 3, 5)], 1.0)
    assert subtasks.sent(effects) == []
    effects = subtask.handle_batch([m.EventMessage(7, 4, b"e"), m.CheckpointCompleted(7, 5, 4)], 1.0)
    assert subtasks.sent(effects) == [m.Confirm(7, 5)]


@pytest.mark.parametrize(
    "report", [m.CloseForCheckpoint(7, 1, 5), m.BarrierMessage(7, 2, 5, 0), m.CheckpointAborted(7, 3, 5)]
)
def test_a_duplicate_is_confirmed_immediately_however_often_it_comes(report: m.DownMessage) -> None:
    # H22, H24: the first time too, although the item itself still waits for its confirmation
    subtask = a_subtask_at_its_barrier()
    told(subtask, m.CheckpointAborted(7, 3, 5))
    assert told(subtask, report) == [m.Confirm(7, 3)]
    assert told(subtask, report) == [m.Confirm(7, 3)]


def test_the_subtask_resumes_after_the_reports_that_it_has_not_confirmed() -> None:  # H24
    subtask = a_subtask_at_its_barrier()
    subtask.handle(ConnectionLost(), 1.0)
    assert subtask.resume_seq == 2
    assert done(subtask, ConnectionAttached(2)) == [m.Confirm(7, 2)]
    assert done(subtask, s.SnapshotTaken(5, b""))[:1] == [m.CheckpointAcknowledged(7, 3, 5, b"", (), ())]


def test_a_snapshot_that_was_taken_without_a_connection_leaves_with_the_confirmation() -> None:  # H24
    subtask = a_subtask_at_its_barrier()
    subtask.handle(ConnectionLost(), 1.0)
    assert done(subtask, s.SnapshotTaken(5, b"s")) == []
    assert done(subtask, ConnectionAttached(2)) == [m.CheckpointAcknowledged(7, 3, 5, b"s", (), ()), m.Confirm(7, 2)]


def test_events_that_leave_for_the_window_confirm_nothing_twice() -> None:  # H24, H27
    subtask = a_subtask((b"1", b"2", b"3", b"4", b"5"))
    assert told(subtask, m.CloseForCheckpoint(7, 1, 5)) == [m.ClosedForCheckpoint(7, 5, 5, 1)]
    assert told(subtask, m.CheckpointAborted(7, 2, 5)) == []
    assert told(subtask, m.Confirm(7, 1)) == [m.RestoredEventMessage(7, 6, 5, b"4"), m.Confirm(7, 2)]
    assert told(subtask, m.Confirm(7, 2)) == [m.RestoredEventMessage(7, 7, 5, b"5")]


def test_a_report_confirms_what_the_subtask_sent_before() -> None:  # H24, H27
    subtask = a_subtask(limits=WIDE)
    send(subtask, b"a")
    send(subtask, b"b")
    assert told(subtask, m.CloseForCheckpoint(7, 1, 5, 2)) == [m.ClosedForCheckpoint(7, 4, 5, 1)]
    assert subtask.statistics().unconfirmed_events == 1
    assert told(subtask, m.CheckpointAborted(7, 2, 5, 4)) == []
    assert subtask.statistics().unconfirmed_events == 0
    assert subtask.all_confirmed


@pytest.mark.parametrize("kind", [m.CloseForCheckpoint, m.CheckpointAborted])
def test_a_report_that_confirms_what_was_never_sent_is_refused(kind: Any) -> None:  # H24, H62
    subtask = a_subtask(limits=WIDE)
    with pytest.raises(RemoteProtocolError, match="confirms item 9, which was never sent"):
        told(subtask, kind(7, 1, 5, 9))
    assert subtask.resume_seq == 0


def test_a_duplicate_confirms_too_what_it_says() -> None:  # H24
    subtask = a_closed_subtask(5)
    assert not subtask.all_confirmed
    assert told(subtask, m.CloseForCheckpoint(7, 1, 5, 2)) == [m.Confirm(7, 1)]
    assert subtask.all_confirmed


# --- up: the gateway confirms -----------------------------------------------------------------------------


def heard(gateway: GatewayMachine, message: m.UpMessage) -> list[object]:
    return done(gateway, g.MessageReceived(message))


def a_gateway_that_heard_of_the_close(apart: bool = False) -> GatewayMachine:
    """Receive item 1 of the subtask: it has closed for 5."""
    gateway = a_wide_gateway(apart)
    assert done(gateway, g.CloseRequested(5)) == [m.CloseForCheckpoint(7, 1, 5)]
    assert heard(gateway, m.ClosedForCheckpoint(7, 1, 5)) == []
    assert gateway.resume_seq == 1
    return gateway


def a_gateway_at_its_barrier() -> GatewayMachine:
    gateway = a_gateway_that_heard_of_the_close()
    assert done(gateway, g.CutReached(5)) == [m.BarrierMessage(7, 2, 5, 0, 1)]
    return gateway


@pytest.mark.parametrize("outcome", ENDS)
def test_or_with_the_end_of_a_checkpoint_that_came_to_no_barrier(outcome: g.CheckpointOutcome) -> None:  # H30, H44
    gateway = a_gateway_that_heard_of_the_close()
    assert done(gateway, g.CheckpointOver(5, outcome)) == [ENDS[outcome](7, 2, 5, 1)]


def test_or_with_the_close_for_the_next_one() -> None:  # H30, H43
    gateway = a_gateway_that_heard_of_the_close()
    assert done(gateway, g.CloseRequested(6)) == [m.CloseForCheckpoint(7, 2, 6, 1)]


def test_a_barrier_apart_takes_no_confirmation_with_it() -> None:
    # H23, H30: it leaves on a separate path
    gateway = a_gateway_that_heard_of_the_close(apart=True)
    assert done(gateway, g.CutReached(5)) == []
    assert heard(gateway, m.CheckpointAcknowledged(7, 2, 5, b"", (), ())) == []
    assert done(gateway, g.CheckpointOver(5, COMPLETED)) == [m.CheckpointCompleted(7, 2, 5, 2)]


@pytest.mark.parametrize(
    ("report", "outcome"),
    [
        (m.CheckpointAcknowledged(7, 2, 5, b"s", (), ()), COMPLETED),
        (m.CheckpointAcknowledged(7, 2, 5, b"s", (), ()), g.CheckpointOutcome.SAVEPOINT),
        (m.CheckpointDeclined(7, 2, 5, "no"), ABORTED),
    ],
)
def test_the_answer_to_a_barrier_is_confirmed_with_the_end_of_its_checkpoint(
    report: m.UpMessage, outcome: g.CheckpointOutcome
) -> None:  # H30, H45, H49
    gateway = a_gateway_at_its_barrier()
    assert heard(gateway, report) == []
    assert done(gateway, g.CheckpointOver(5, outcome)) == [ENDS[outcome](7, 3, 5, 2)]


def test_what_was_confirmed_is_not_confirmed_a_second_time() -> None:  # H24, H30
    gateway = a_gateway_at_its_barrier()
    assert done(gateway, g.CheckpointOver(5, ABORTED)) == [m.CheckpointAborted(7, 3, 5)]
    assert done(gateway, g.CloseRequested(6)) == [m.CloseForCheckpoint(7, 4, 6)]


def test_a_report_confirms_the_events_that_came_before_it_and_lets_the_barrier_leave() -> None:  # H23, H42
    gateway = a_wide_gateway()
    submit(gateway, 1)
    assert cut(gateway, 5) == []
    assert gateways.hear(gateway, m.ClosedForCheckpoint(7, 1, 5, 2)) == [
        g.ReportClosed(5),
        g.ConfirmEvent(1),
        g.SendToAttempt(m.BarrierMessage(7, 3, 5, 1, 1)),
    ]


def test_a_report_that_confirms_what_was_never_sent_to_the_peer_is_refused() -> None:  # H24, H62
    gateway = a_wide_gateway()
    submit(gateway, 1)
    done(gateway, g.CloseRequested(5))
    with pytest.raises(RemoteProtocolError, match="confirms item 3, which was never sent"):
        heard(gateway, m.ClosedForCheckpoint(7, 1, 5, 3))
    assert gateway.resume_seq == 0
    assert gateway.statistics().unconfirmed_events == 1
    with pytest.raises(RemoteProtocolError, match="item 2 arrived"):  # a gap: what it confirms does not count either
        heard(gateway, m.ClosedForCheckpoint(7, 2, 5, 2))
    assert gateway.statistics().unconfirmed_events == 1


@pytest.mark.parametrize("message", [m.EventMessage(7, 2, b"e"), m.RequestMessage(7, 2, 1, b"?")])
def test_an_event_that_comes_has_the_report_before_it_confirmed(message: m.UpMessage) -> None:
    # H27, H30: the event itself is confirmed when it is taken
    gateway = a_gateway_that_heard_of_the_close()
    assert heard(gateway, message) == [m.Confirm(7, 1)]
    assert done(gateway, g.ItemTaken(2)) == [m.Confirm(7, 2)]


def test_a_report_after_an_event_is_not_confirmed_before_the_event_is_taken() -> None:  # H27, H30
    gateway = a_wide_gateway()
    done(gateway, g.CloseRequested(5))
    heard(gateway, m.EventMessage(7, 1, b"e"))
    assert heard(gateway, m.ClosedForCheckpoint(7, 2, 5)) == []
    assert gateway.resume_seq == 0
    assert done(gateway, g.CutReached(5)) == [m.BarrierMessage(7, 2, 5, 0)]
    assert done(gateway, g.ItemTaken(1)) == [m.Confirm(7, 2)]


def test_a_report_that_waited_for_readiness_is_confirmed_when_the_event_before_it_is_taken() -> None:  # H10, H27
    gateway = a_gateway(WIDE_DOWN, ready=False)
    done(gateway, g.CloseRequested(5))
    batch: list[m.UpMessage] = [m.Opened(7, 1), m.EventMessage(7, 2, b"e"), m.ClosedForCheckpoint(7, 3, 5)]
    assert gateways.sent(gateway.handle_batch(batch, 1.0)) == [m.Confirm(7, 1)]
    assert done(gateway, g.ReadyAnnounced()) == []
    assert done(gateway, g.ItemTaken(2)) == [m.Confirm(7, 3)]


def test_a_batch_with_anything_else_in_it_is_confirmed_immediately() -> None:  # H30
    gateway = a_gateway(WIDE_DOWN)
    done(gateway, g.CloseRequested(5))
    assert gateways.sent(gateway.handle_batch([m.Opened(7, 1), m.ClosedForCheckpoint(7, 2, 5)], 1.0)) == [
        m.Confirm(7, 2)
    ]


def test_a_gateway_confirms_a_duplicate_immediately_however_often_it_comes() -> None:  # H24, H30
    gateway = a_gateway_that_heard_of_the_close()
    assert heard(gateway, m.ClosedForCheckpoint(7, 1, 5)) == [m.Confirm(7, 1)]
    assert heard(gateway, m.ClosedForCheckpoint(7, 1, 5)) == [m.Confirm(7, 1)]
    assert done(gateway, g.CutReached(5)) == [m.BarrierMessage(7, 2, 5, 0)]


def test_a_stale_report_is_confirmed_like_any_other() -> None:  # H44
    gateway = a_gateway_that_heard_of_the_close()
    done(gateway, g.CheckpointOver(5, ABORTED))
    assert heard(gateway, m.CheckpointAcknowledged(7, 2, 5, b"", (), ())) == []
    assert done(gateway, g.CloseRequested(6)) == [m.CloseForCheckpoint(7, 3, 6, 2)]


def test_the_gateway_resumes_after_the_reports_that_it_has_not_confirmed() -> None:  # H24
    gateway = a_gateway_that_heard_of_the_close()
    gateway.handle(ConnectionLost(), 1.0)
    assert gateway.resume_seq == 1
    assert done(gateway, ConnectionAttached(1)) == [m.Confirm(7, 1)]
    assert done(gateway, g.CutReached(5)) == [m.BarrierMessage(7, 2, 5, 0)]


def test_an_item_that_was_asked_for_without_a_connection_leaves_with_the_confirmation() -> None:  # H24
    gateway = a_gateway_that_heard_of_the_close()
    gateway.handle(ConnectionLost(), 1.0)
    assert done(gateway, g.CheckpointOver(5, ABORTED)) == []
    assert done(gateway, ConnectionAttached(1)) == [m.CheckpointAborted(7, 2, 5), m.Confirm(7, 1)]


def test_what_a_peer_says_after_its_goodbye_is_confirmed_immediately() -> None:
    # H47, H48: it waits for that, and nothing else may ever leave
    gateway = a_wide_gateway()
    done(gateway, g.CloseRequested(5))
    done(gateway, g.CheckpointOver(5, ABORTED))
    assert heard(gateway, m.Finished(7, 1, "", b"s", ())) == [m.Confirm(7, 1)]
    assert heard(gateway, m.ClosedForCheckpoint(7, 2, 5)) == [m.Confirm(7, 2)]
