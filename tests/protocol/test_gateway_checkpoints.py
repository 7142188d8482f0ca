# SPDX-License-Identifier: Apache-2.0

"""The downward valve: cuts, drains, barriers, aborts, and two checkpoints at a time."""

from __future__ import annotations

import pytest

from protocol.errors import LocalProtocolError
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine
from protocol.wire import messages as m
from tests.protocol.refusals import unchanged
from tests.protocol.test_gateway import a_gateway, hear, sent

WIDE = g.GatewayLimits(10, 30, 100, 10_000, 100, 10_000)


def a_wide_gateway(apart: bool = False) -> GatewayMachine:
    return a_gateway(WIDE, apart=apart)


def submit(gateway: GatewayMachine, *event_ids: int) -> list[int]:
    """Submit events whose payload is their id; return the ids of those that left immediately."""
    left: list[object] = []
    for event_id in event_ids:
        left += sent(gateway.handle(g.EventSubmitted(event_id, b"%d" % event_id), 1.0))
        gateway.check_invariants()
    return ids(left)


def ids(messages: list[object]) -> list[int]:
    return [int(message.payload) for message in messages if isinstance(message, m.EventMessage)]


def cut(gateway: GatewayMachine, checkpoint_id: int) -> list[g.GatewayEffect]:
    gateway.handle(g.CloseRequested(checkpoint_id), 1.0)
    effects = gateway.handle(g.CutReached(checkpoint_id), 1.0)
    gateway.check_invariants()
    return effects


def test_closing_is_asked_of_the_subtask_and_events_go_on_until_the_cut() -> None:
    # H40, R42
    gateway = a_wide_gateway()
    assert gateway.handle(g.CloseRequested(5), 1.0) == [g.SendToAttempt(m.CloseForCheckpoint(7, 1, 5))]
    assert submit(gateway, 1) == [1]
    assert gateway.handle(g.CutReached(5), 1.0) == []  # event 1 is not confirmed
    assert submit(gateway, 2) == []
    assert gateway.statistics().closed_for == (5,)
    assert gateway.statistics().held_events == 1


def test_events_sent_after_the_cut_wait_for_the_acknowledge() -> None:  # H41
    gateway = a_wide_gateway()
    assert cut(gateway, 5) == [g.SendToAttempt(m.BarrierMessage(7, 2, 5, 0))]
    assert submit(gateway, 1, 2) == []
    effects = hear(gateway, m.CheckpointAcknowledged(7, 1, 5, b"state", (m.HeldEvent(2, b"h"),), (4,)))
    assert effects == [
        g.ReportAcknowledged(5, b"state", (m.HeldEvent(2, b"h"),), (4,)),
        g.SendToAttempt(m.EventMessage(7, 3, b"1")),
        g.SendToAttempt(m.EventMessage(7, 4, b"2")),
        g.SendToAttempt(m.Confirm(7, 1)),
    ]
    assert submit(gateway, 3) == [3]


def test_held_events_run_no_confirm_clock_until_they_leave() -> None:  # H25, H41
    gateway = a_wide_gateway()
    cut(gateway, 5)
    submit(gateway, 1)
    assert gateway.next_deadline() is None
    assert gateway.handle(g.TimePassed(), 100.0) == []
    gateway.handle(g.CheckpointOver(5, g.CheckpointOutcome.ABORTED), 100.0)
    assert gateway.next_deadline() == 110.0


def test_the_barrier_waits_for_every_event_of_before_the_cut_and_for_no_later_one() -> None:  # H42, H78
    gateway = a_wide_gateway()
    submit(gateway, 1, 2)
    assert cut(gateway, 5) == []
    submit(gateway, 3)
    assert hear(gateway, m.Confirm(7, 1)) == [g.ConfirmEvent(1)]
    assert hear(gateway, m.Confirm(7, 2)) == [g.ConfirmEvent(2), g.SendToAttempt(m.BarrierMessage(7, 4, 5, 2))]
    assert hear(gateway, m.Confirm(7, 3)) == []


def test_the_barrier_waits_for_events_of_before_an_aborted_checkpoint_too() -> None:
    # H42, G3: Flink's tracker forgets them
    gateway = a_wide_gateway()
    submit(gateway, 1)
    cut(gateway, 5)
    submit(gateway, 2)
    gateway.handle(g.CheckpointOver(5, g.CheckpointOutcome.ABORTED), 1.0)
    assert cut(gateway, 6) == []
    assert hear(gateway, m.Confirm(7, 1)) == [g.ConfirmEvent(1)]
    # item 2 asks to close for 5, item 3 aborts it, item 4 is the event that was held
    assert hear(gateway, m.Confirm(7, 4)) == [g.ConfirmEvent(2), g.SendToAttempt(m.BarrierMessage(7, 6, 6, 4))]


def test_the_barrier_leaves_on_a_resumed_connection_too() -> None:  # H24, H42
    gateway = a_wide_gateway()
    submit(gateway, 1)
    gateway.handle(g.ConnectionLost(), 1.0)
    cut(gateway, 5)
    assert gateway.handle(g.ConnectionAttached(1), 2.0)[:3] == [
        g.ConfirmEvent(1),
        g.SendToAttempt(m.CloseForCheckpoint(7, 2, 5)),
        g.SendToAttempt(m.BarrierMessage(7, 3, 5, 1)),
    ]


def test_the_barrier_keeps_its_place_on_a_connection_that_replaces_a_standing_one() -> None:  # H22, H24
    gateway = a_wide_gateway()
    submit(gateway, 1)
    cut(gateway, 5)
    effects = gateway.handle(g.ConnectionAttached(1), 2.0)  # before the loss of the first one was noticed
    assert sent(effects) == [m.CloseForCheckpoint(7, 2, 5), m.BarrierMessage(7, 3, 5, 1)]


def test_no_barrier_leaves_when_the_attempt_is_over() -> None:
    # H26, H42: the event fails, and with it the checkpoint
    gateway = a_wide_gateway()
    submit(gateway, 1)
    cut(gateway, 5)
    effects = gateway.handle(g.AttemptIsOver("killed"), 2.0)
    assert [type(effect) for effect in effects] == [g.FailEvent]


def test_a_loss_tolerant_event_is_not_waited_for_but_keeps_its_place() -> None:  # H28, G10, H23
    gateway = a_wide_gateway()
    gateway.handle(g.EventSubmitted(1, b"1", loss_tolerant=True), 1.0)
    assert cut(gateway, 5) == [g.SendToAttempt(m.BarrierMessage(7, 3, 5, 1))]


def test_the_barrier_names_the_last_event_of_before_the_cut() -> None:  # H23
    gateway = a_wide_gateway()
    submit(gateway, 1, 2)
    gateway.handle(g.CloseRequested(5), 1.0)
    submit(gateway, 3)
    gateway.handle(g.CutReached(5), 1.0)
    submit(gateway, 4)
    assert sent(hear(gateway, m.Confirm(7, 4))) == [m.BarrierMessage(7, 5, 5, 4)]


def test_a_barrier_leaves_once() -> None:  # H22, H78
    gateway = a_wide_gateway()
    submit(gateway, 1)
    cut(gateway, 5)
    assert sent(hear(gateway, m.Confirm(7, 1))) == [m.BarrierMessage(7, 3, 5, 1)]
    assert sent(hear(gateway, m.Confirm(7, 2))) == []
    assert sent(hear(gateway, m.Confirm(7, 3))) == []


def test_the_peers_report_of_its_closing_comes_after_what_it_sent_before() -> None:  # H40
    gateway = a_wide_gateway()
    gateway.handle(g.CloseRequested(5), 1.0)
    effects = gateway.handle_batch([m.EventMessage(7, 1, b"x"), m.ClosedForCheckpoint(7, 2, 5)], 1.0)
    assert effects == [g.DeliverEvent(1, b"x"), g.ReportClosed(5)]


def test_a_closing_waits_behind_events_that_the_coordinator_may_not_hear_yet() -> None:
    # H10, H40: otherwise the coordinator's snapshot could precede an event that the subtask has released
    gateway = a_gateway(WIDE, ready=False)
    gateway.handle(g.CloseRequested(5), 1.0)
    assert hear(gateway, m.EventMessage(7, 1, b"restored")) == []
    assert hear(gateway, m.Opened(7, 2)) != []
    assert hear(gateway, m.ClosedForCheckpoint(7, 3, 5)) == []
    assert gateway.handle(g.ReadyAnnounced(), 1.0) == [g.DeliverEvent(1, b"restored"), g.ReportClosed(5)]


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (g.CheckpointOutcome.ABORTED, m.CheckpointAborted),
        (g.CheckpointOutcome.COMPLETED, m.CheckpointCompleted),
        (g.CheckpointOutcome.SAVEPOINT, m.SavepointTaken),
    ],
)
def test_the_end_of_a_checkpoint_is_told_once_and_reopens_a_gateway_whose_subtask_never_acknowledged(
    outcome: g.CheckpointOutcome, told: type[m.CheckpointAborted | m.CheckpointCompleted | m.SavepointTaken]
) -> None:
    # H44, H45, H47, H49, G6: a finished subtask took part with its final state
    gateway = a_wide_gateway()
    cut(gateway, 5)
    submit(gateway, 1)
    assert sent(gateway.handle(g.CheckpointOver(5, outcome), 1.0)) == [told(7, 3, 5), m.EventMessage(7, 4, b"1")]
    assert gateway.handle(g.CheckpointOver(5, outcome), 1.0) == []


def test_unknown_checkpoints_change_nothing() -> None:  # H44, G5
    gateway = a_wide_gateway()
    with unchanged(gateway):
        assert gateway.handle(g.CutReached(5), 1.0) == []
        assert gateway.handle(g.CheckpointOver(5, g.CheckpointOutcome.COMPLETED), 1.0) == []
        assert gateway.handle(g.CheckpointOver(-1, g.CheckpointOutcome.ABORTED), 1.0) == []


def test_a_cut_that_comes_after_the_abort_closes_nothing() -> None:
    # H44, R35: the coordinator was still taking its snapshot when the checkpoint was aborted
    gateway = a_wide_gateway()
    gateway.handle(g.CloseRequested(5), 1.0)
    gateway.handle(g.CheckpointOver(5, g.CheckpointOutcome.ABORTED), 1.0)
    assert gateway.handle(g.CutReached(5), 1.0) == []
    assert submit(gateway, 1) == [1]


def test_a_late_acknowledgement_opens_nothing() -> None:  # H44
    gateway = a_wide_gateway()
    cut(gateway, 5)
    gateway.handle(g.CheckpointOver(5, g.CheckpointOutcome.ABORTED), 1.0)
    cut(gateway, 6)
    submit(gateway, 1)
    effects = hear(gateway, m.CheckpointAcknowledged(7, 1, 5, b"", (), ()))
    assert isinstance(effects[0], g.RefuseMessage)
    assert sent(effects) == []
    assert gateway.statistics().closed_for == (6,)
    assert sent(gateway.handle(g.CheckpointOver(6, g.CheckpointOutcome.ABORTED), 1.0)) == [
        m.CheckpointAborted(7, 6, 6, 1),
        m.EventMessage(7, 7, b"1"),
    ]


def test_an_acknowledgement_before_the_barrier_opens_nothing() -> None:
    gateway = a_wide_gateway()
    submit(gateway, 1)
    assert cut(gateway, 5) == []
    effects = hear(gateway, m.CheckpointAcknowledged(7, 1, 5, b"", (), ()))
    assert isinstance(effects[0], g.RefuseMessage)
    assert gateway.statistics().closed_for == (5,)


def test_a_declining_subtask_stays_closed_until_the_checkpoint_is_over() -> None:  # H45
    gateway = a_wide_gateway()
    cut(gateway, 5)
    assert hear(gateway, m.CheckpointDeclined(7, 1, 5, "disk full"))[0] == g.ReportDeclined(5, "disk full")
    assert submit(gateway, 1) == []


def test_a_finished_subtask_still_says_that_it_closes() -> None:  # H47
    gateway = a_wide_gateway()
    gateway.handle(g.CloseRequested(5), 1.0)
    hear(gateway, m.Finished(7, 1, "", b"s", ()))
    assert hear(gateway, m.ClosedForCheckpoint(7, 2, 5))[0] == g.ReportClosed(5)


def test_ids_must_rise() -> None:  # H4
    gateway = a_wide_gateway()
    gateway.handle(g.CloseRequested(5), 1.0)
    gateway.handle(g.CheckpointOver(5, g.CheckpointOutcome.COMPLETED), 1.0)
    for checkpoint_id in (5, 4):
        with pytest.raises(LocalProtocolError, match="ids must increase"):
            gateway.handle(g.CloseRequested(checkpoint_id), 1.0)


def test_a_checkpoint_is_cut_once() -> None:
    gateway = a_wide_gateway()
    cut(gateway, 5)
    with pytest.raises(LocalProtocolError, match="cut twice"):
        gateway.handle(g.CutReached(5), 1.0)


def test_answers_obey_the_valve_and_the_drain() -> None:  # H33
    gateway = a_wide_gateway()
    hear(gateway, m.RequestMessage(7, 1, 1, b"?"))
    hear(gateway, m.RequestMessage(7, 2, 2, b"?"))
    gateway.handle(g.AnswerSubmitted(1, "", b"!"), 1.0)
    assert cut(gateway, 5) == []
    assert gateway.handle(g.AnswerSubmitted(2, "", b"!"), 1.0) == []
    assert hear(gateway, m.Confirm(7, 1)) == [g.SendToAttempt(m.BarrierMessage(7, 3, 5, 1))]
    effects = gateway.handle(g.CheckpointOver(5, g.CheckpointOutcome.ABORTED), 1.0)
    assert sent(effects) == [m.CheckpointAborted(7, 4, 5), m.AnswerMessage(7, 5, 2, "", b"!")]


def test_held_events_of_a_dead_attempt_fail_with_it() -> None:  # H26, G19
    gateway = a_wide_gateway()
    submit(gateway, 1)
    cut(gateway, 5)
    submit(gateway, 2, 3)
    effects = gateway.handle(g.AttemptIsOver("killed"), 2.0)
    assert [effect.event_id for effect in effects if isinstance(effect, g.FailEvent)] == [1, 2, 3]


# --- two at a time (H43) ----------------------------------------------------------------------------------


def a_gateway_closed_twice() -> GatewayMachine:
    """Return a gateway closed for 5, then for 6, with events 1 and 2 held for 5, and events 3 and 4 for 6."""
    gateway = a_wide_gateway()
    cut(gateway, 5)
    submit(gateway, 1, 2)
    assert cut(gateway, 6) == []
    submit(gateway, 3, 4)
    return gateway


def over(gateway: GatewayMachine, checkpoint_id: int) -> list[int]:
    effects = gateway.handle(g.CheckpointOver(checkpoint_id, g.CheckpointOutcome.ABORTED), 1.0)
    gateway.check_invariants()
    return ids(sent(effects))


def test_the_barrier_of_the_higher_waits_for_what_the_lower_holds() -> None:
    # H42, R46
    gateway = a_gateway_closed_twice()
    over(gateway, 5)
    # items: 1 close 5, 2 its barrier, 3 close 6, 4 abort 5, 5 and 6 the events that 5 held
    assert hear(gateway, m.Confirm(7, 5)) == [g.ConfirmEvent(1)]
    assert hear(gateway, m.Confirm(7, 6)) == [g.ConfirmEvent(2), g.SendToAttempt(m.BarrierMessage(7, 7, 6, 6))]


def test_a_barrier_does_not_overtake_a_held_loss_tolerant_event_either() -> None:  # H23, H28
    gateway = a_wide_gateway()
    cut(gateway, 5)
    gateway.handle(g.EventSubmitted(1, b"1", loss_tolerant=True), 1.0)
    assert cut(gateway, 6) == []
    effects = gateway.handle(g.CheckpointOver(5, g.CheckpointOutcome.ABORTED), 1.0)
    assert effects[-2:] == [
        g.SendToAttempt(m.EventMessage(7, 5, b"1")),
        g.SendToAttempt(m.BarrierMessage(7, 6, 6, 5)),
    ]


def test_cuts_come_in_the_order_of_the_ids() -> None:
    # H43: the coordinator takes one snapshot after the other
    gateway = a_wide_gateway()
    gateway.handle(g.CloseRequested(5), 1.0)
    gateway.handle(g.CloseRequested(6), 1.0)
    gateway.handle(g.CutReached(6), 1.0)
    with pytest.raises(LocalProtocolError, match="the cut of 5 comes after"):
        gateway.handle(g.CutReached(5), 1.0)
