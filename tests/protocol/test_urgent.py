# SPDX-License-Identifier: Apache-2.0

"""Urgent events in the machines: their order among the other items, and their place at a checkpoint (H90 to H93)."""

from __future__ import annotations

import pytest

from protocol.errors import GatewayFull, LocalProtocolError
from protocol.gateway import types as g
from protocol.parts import PartTable
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire import messages as m
from tests.protocol.refusals import unchanged
from tests.protocol.test_gateway import a_gateway
from tests.protocol.test_gateway import hear as hear_up
from tests.protocol.test_gateway import sent as sent_down
from tests.protocol.test_subtask import LIMITS, a_subtask, hear, sent
from tests.protocol.test_subtask_checkpoints import WIDE, mailbox, send, take_snapshot


def an_urgent_subtask(limits: s.SubtaskLimits = WIDE) -> SubtaskMachine:
    subtask = a_subtask(limits=limits, opened=False)
    subtask.handle(s.OperatorOpened(handles_urgent=True), 0.0)
    hear(subtask, m.Confirm(7, 1))
    return subtask


def urgent(effects: list[s.SubtaskEffect]) -> list[bytes]:
    return [effect.payload for effect in effects if isinstance(effect, s.HandleUrgent)]


def begin(subtask: SubtaskMachine) -> list[object]:
    effects = subtask.handle(s.UrgentBegan(), 1.0)
    subtask.check_invariants()
    return mailbox(effects)


def end(subtask: SubtaskMachine) -> list[object]:
    effects = subtask.handle(s.UrgentHandled(), 1.0)
    subtask.check_invariants()
    return mailbox(effects)


def test_gateway_sends_an_urgent_event_in_its_place() -> None:  # H90, H91
    gateway = a_gateway()
    assert sent_down(gateway.handle(g.EventSubmitted(1, b"a"), 1.0)) == [m.EventMessage(7, 1, b"a")]
    assert sent_down(gateway.handle(g.EventSubmitted(2, b"b", urgent=True), 1.0)) == [m.UrgentEventMessage(7, 2, b"b")]
    confirmed = hear_up(gateway, m.Confirm(7, 2))
    assert [effect for effect in confirmed if isinstance(effect, g.ConfirmEvent)] == [
        g.ConfirmEvent(1),
        g.ConfirmEvent(2),
    ]


def test_closed_valve_holds_an_urgent_event_as_any_other() -> None:  # H92, H41
    gateway = a_gateway()
    gateway.handle(g.CloseRequested(5), 1.0)
    hear_up(gateway, m.ClosedForCheckpoint(7, 1, 5))
    gateway.handle(g.CutReached(5), 1.0)
    assert gateway.handle(g.EventSubmitted(1, b"u", urgent=True), 1.0) == []
    assert m.UrgentEventMessage(7, 4, b"u") in sent_down(
        gateway.handle(g.CheckpointOver(5, g.CheckpointOutcome.ABORTED), 1.0)
    )


def test_urgent_event_does_not_go_into_the_mailbox() -> None:  # H90, H23
    subtask = an_urgent_subtask()
    assert hear(subtask, m.UrgentEventMessage(7, 1, b"u")) == [
        s.HandleUrgent(b"u"),
        s.SendToCoordinator(m.Confirm(7, 1)),
    ]


def test_operator_without_a_handler_gets_it_as_an_ordinary_event() -> None:  # H90
    subtask = a_subtask()
    assert hear(subtask, m.UrgentEventMessage(7, 1, b"u"))[0] == s.PutInMailbox(s.MailboxEvent(b"u"))
    assert subtask.may_finish


PARTS = PartTable((m.OperatorPart(""), m.OperatorPart("rules"), m.OperatorPart("sink")))


@pytest.mark.parametrize(
    ("without", "part", "is_ordinary"), [({0}, 0, True), ({2}, 0, False), ({0, 2}, 2, True), ({0, 2}, 1, False)]
)
def test_an_event_for_a_part_without_a_handler_is_an_ordinary_one(
    without: set[int], part: int, is_ordinary: bool
) -> None:  # H90, H80
    subtask = SubtaskMachine(7, 2, WIDE, table=PARTS)
    subtask.handle(s.ConnectionAttached(0), 0.0)
    subtask.handle(s.OperatorOpened(handles_urgent=True, parts_without_urgent=frozenset(without)), 0.0)
    hear(subtask, m.Confirm(7, 1))
    effect = hear(subtask, m.UrgentEventMessage(7, 1, b"u", part))[0]
    assert effect == (s.PutInMailbox(s.MailboxEvent(b"u", part)) if is_ordinary else s.HandleUrgent(b"u", part))
    assert subtask.urgent_idle == is_ordinary


def test_duplicate_of_an_urgent_event_is_dropped() -> None:  # H91, H22
    subtask = an_urgent_subtask()
    hear(subtask, m.UrgentEventMessage(7, 1, b"u"))
    assert hear(subtask, m.UrgentEventMessage(7, 1, b"u")) == [s.SendToCoordinator(m.Confirm(7, 1))]


def test_event_sent_later_waits_until_the_handler_begins() -> None:  # H91
    subtask = an_urgent_subtask()
    hear(subtask, m.UrgentEventMessage(7, 1, b"u"))
    effects = hear(subtask, m.EventMessage(7, 2, b"later"))
    assert effects == [s.SendToCoordinator(m.Confirm(7, 2))]
    assert subtask.waiting == (1, 5)
    assert begin(subtask) == [s.MailboxEvent(b"later")]
    assert subtask.waiting == (0, 0)


def test_event_waits_for_the_begin_of_each_urgent_one_before_it_and_no_other() -> None:  # H91
    subtask = an_urgent_subtask()
    hear(subtask, m.UrgentEventMessage(7, 1, b"u"))
    hear(subtask, m.EventMessage(7, 2, b"a"))
    hear(subtask, m.UrgentEventMessage(7, 3, b"v"))
    hear(subtask, m.EventMessage(7, 4, b"b"))
    assert begin(subtask) == [s.MailboxEvent(b"a")]
    assert end(subtask) == []
    assert begin(subtask) == [s.MailboxEvent(b"b")]
    assert mailbox(hear(subtask, m.EventMessage(7, 5, b"c"))) == [s.MailboxEvent(b"c")]


def test_barrier_waits_until_the_handlers_have_returned() -> None:  # H92
    subtask = an_urgent_subtask()
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    hear(subtask, m.UrgentEventMessage(7, 2, b"u"))
    hear(subtask, m.UrgentEventMessage(7, 3, b"v"))
    assert mailbox(hear(subtask, m.BarrierMessage(7, 4, 5, 3))) == []
    assert (begin(subtask), end(subtask), begin(subtask)) == ([], [], [])
    with unchanged(subtask), pytest.raises(LocalProtocolError, match="before the urgent events"):
        subtask.handle(s.SnapshotTaken(5, b""), 1.0)
    assert end(subtask) == [s.MailboxBarrier(5)]
    assert take_snapshot(subtask, 5) == ((), [])


def test_barrier_apart_waits_for_the_handlers_too() -> None:  # H92
    subtask = an_urgent_subtask()
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    subtask.handle(s.BarrierArrived(5, 2), 1.0)
    assert mailbox(hear(subtask, m.UrgentEventMessage(7, 2, b"u"))) == []
    assert begin(subtask) == []
    assert end(subtask) == [s.MailboxBarrier(5)]


def test_word_to_begin_waits_until_the_handlers_have_returned() -> None:  # H92, H66
    subtask = an_urgent_subtask()
    hear(subtask, m.UrgentEventMessage(7, 1, b"rule"))
    hear(subtask, m.StartProcessing(7, 2))
    assert begin(subtask) == []
    assert end(subtask) == [s.MailboxStart()]


@pytest.mark.parametrize("over", [m.CheckpointAborted, m.SavepointTaken])
def test_barrier_of_a_checkpoint_that_is_over_holds_back_nothing(
    over: type[m.CheckpointAborted | m.SavepointTaken],
) -> None:  # H92, H44
    subtask = an_urgent_subtask()
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    hear(subtask, m.UrgentEventMessage(7, 2, b"u"))
    hear(subtask, m.BarrierMessage(7, 3, 5, 2))
    begin(subtask)
    assert mailbox(hear(subtask, m.EventMessage(7, 4, b"e"))) == []
    effects = mailbox(hear(subtask, over(7, 5, 5)))
    assert effects == [s.MailboxEvent(b"e")] + [s.MailboxAborted(5)] * (over is m.CheckpointAborted)
    assert end(subtask) == []
    assert not subtask.wants_snapshot(5)


def test_what_a_handler_sends_after_a_closed_valve_is_never_refused_and_in_the_snapshot() -> None:  # H92, H31
    subtask = an_urgent_subtask(LIMITS)
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    hear(subtask, m.UrgentEventMessage(7, 2, b"u"))
    hear(subtask, m.BarrierMessage(7, 3, 5, 2))
    send(subtask, b"a", b"b", b"c")
    with unchanged(subtask), pytest.raises(GatewayFull):
        subtask.handle(s.EventSubmitted(b"d"), 1.0)
    assert subtask.handle(s.EventSubmitted(b"d", in_urgent=True), 1.0) == []
    begin(subtask)
    end(subtask)
    held, _ = take_snapshot(subtask, 5)
    assert held == (b"a", b"b", b"c", b"d")


def test_what_a_handler_sends_through_an_open_valve_waits_for_capacity() -> None:  # H92, H27
    subtask = an_urgent_subtask(LIMITS)
    send(subtask, b"a", b"b", b"c")
    with pytest.raises(GatewayFull):
        subtask.handle(s.EventSubmitted(b"d", in_urgent=True), 1.0)


def test_operator_ends_well_only_after_each_urgent_event_was_handled() -> None:  # H93
    subtask = an_urgent_subtask()
    hear(subtask, m.UrgentEventMessage(7, 1, b"u"))
    for step in (begin, end):
        assert not subtask.may_finish
        with unchanged(subtask), pytest.raises(LocalProtocolError, match="not handled yet"):
            subtask.handle(s.OperatorFinished("", b""), 1.0)
        step(subtask)
    assert subtask.may_finish
    subtask.handle(s.OperatorFinished("", b""), 1.0)


def test_urgent_event_after_the_end_is_not_confirmed() -> None:  # H93, H23
    subtask = an_urgent_subtask()
    subtask.handle(s.OperatorFinished("", b""), 1.0)
    effects = hear(subtask, m.UrgentEventMessage(7, 1, b"u"))
    assert urgent(effects) == []
    assert sent(effects) == []


def test_handler_that_outlives_its_operator_has_no_effect() -> None:  # H93
    subtask = an_urgent_subtask()
    hear(subtask, m.UrgentEventMessage(7, 1, b"u"))
    hear(subtask, m.EventMessage(7, 2, b"later"))
    begin(subtask)
    subtask.handle(s.OperatorFinished("it raised", b""), 1.0)
    assert end(subtask) == []
    hear(subtask, m.AttemptEnded(7, "gone"))
    assert end(subtask) == []


def test_handlers_run_one_at_a_time_and_only_for_what_has_come() -> None:  # H91
    subtask = an_urgent_subtask()
    for step in (begin, end):
        with unchanged(subtask), pytest.raises(LocalProtocolError):
            step(subtask)
    hear(subtask, m.UrgentEventMessage(7, 1, b"u"))
    hear(subtask, m.UrgentEventMessage(7, 2, b"v"))
    begin(subtask)
    with unchanged(subtask), pytest.raises(LocalProtocolError, match="the handler of the previous one"):
        begin(subtask)
