# SPDX-License-Identifier: Apache-2.0

"""The gateway without checkpoints: sending, confirming, reconnecting, receiving, ending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import pytest

from protocol.errors import AttemptOver, ConfirmationTimeout, LocalProtocolError, RemoteProtocolError
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine, GatewayState
from protocol.ids import ExecutionAttempt
from protocol.wire import messages as m
from tests.protocol.refusals import refusal, unchanged

ATTEMPT = ExecutionAttempt("words", 2, 1, 7)
LIMITS = g.GatewayLimits(
    confirm_timeout_s=10, reconnect_timeout_s=30, events_max=3, bytes_max=100, upward_events_max=3, upward_bytes_max=100
)


def a_gateway(
    limits: g.GatewayLimits = LIMITS, connected: bool = True, ready: bool = True, apart: bool = False
) -> GatewayMachine:
    gateway = GatewayMachine(ATTEMPT, limits, barriers_apart=apart)
    if connected:
        assert gateway.handle(g.ConnectionAttached(0), 0.0) == []
    if ready:
        gateway.handle(g.ReadyAnnounced(), 0.0)
    return gateway


def sent(effects: Sequence[g.GatewayEffect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, g.SendToAttempt)]


def hear(gateway: GatewayMachine, message: m.UpMessage, now: float = 0.0) -> list[g.GatewayEffect]:
    effects = gateway.handle(g.MessageReceived(message), now)
    gateway.check_invariants()
    return effects


def failed(effects: Sequence[g.GatewayEffect]) -> list[int]:
    return [effect.event_id for effect in effects if isinstance(effect, g.FailEvent)]


# --- down -------------------------------------------------------------------------------------------------


def test_an_event_leaves_immediately_and_is_confirmed_by_the_peer() -> None:  # H22, H23
    gateway = a_gateway()
    assert gateway.handle(g.EventSubmitted(41, b"a"), 1.0) == [g.SendToAttempt(m.EventMessage(7, 1, b"a"))]
    assert gateway.handle(g.EventSubmitted(42, b"b"), 1.0) == [g.SendToAttempt(m.EventMessage(7, 2, b"b"))]
    assert hear(gateway, m.Confirm(7, 2)) == [g.ConfirmEvent(41), g.ConfirmEvent(42)]
    assert hear(gateway, m.Confirm(7, 1)) == []


def test_events_without_a_connection_wait_and_leave_in_order_when_there_is_one() -> None:  # H24
    gateway = a_gateway(connected=False)
    assert gateway.handle(g.EventSubmitted(1, b"a"), 1.0) == []
    assert gateway.handle(g.EventSubmitted(2, b"b"), 1.0) == []
    effects = gateway.handle(g.ConnectionAttached(0), 2.0)
    assert sent(effects) == [m.EventMessage(7, 1, b"a"), m.EventMessage(7, 2, b"b")]


def test_a_resumed_connection_carries_only_what_the_peer_does_not_have() -> None:
    # H24: nothing lost, nothing twice
    gateway = a_gateway()
    for event_id in (1, 2, 3):
        gateway.handle(g.EventSubmitted(event_id, b"%d" % event_id), 1.0)
    gateway.handle(g.ConnectionLost(), 2.0)
    effects = gateway.handle(g.ConnectionAttached(2), 3.0)
    again = g.SendToAttempt(m.EventMessage(7, 3, b"3"))
    assert effects == [g.ConfirmEvent(1), g.ConfirmEvent(2), again, g.ReportResponsive()]


def test_a_new_connection_replaces_one_whose_loss_was_never_noticed() -> None:  # H24
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(1, b"a"), 1.0)
    assert sent(gateway.handle(g.ConnectionAttached(0), 3.0)) == [m.EventMessage(7, 1, b"a")]
    assert gateway.state is GatewayState.ATTACHED


def test_a_confirmation_of_what_was_never_sent_is_the_peers_fault_and_changes_nothing() -> None:
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(1, b"a"), 1.0)
    with unchanged(gateway), pytest.raises(RemoteProtocolError):
        hear(gateway, m.Confirm(7, 2))


def test_the_figures_are_visible() -> None:  # H27
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(1, b"xx"), 1.0)
    hear(gateway, m.EventMessage(7, 1, b"yyy"))
    assert gateway.statistics() == g.GatewayStatistics(0, 0, 1, 2, 1, 3, ())


# --- clocks -----------------------------------------------------------------------------------------------


def reason_of_the_end(gateway: GatewayMachine, at: float) -> str:
    failure = gateway.handle(g.TimePassed(), at)[0]
    assert isinstance(failure, g.FailAttempt)
    return failure.reason


def test_the_reason_says_how_long_a_task_gave_no_sign_of_life_and_what_to_do() -> None:
    gateway = a_gateway()  # H69
    gateway.handle(g.MessageReceived(m.EventMessage(7, 1, b"a")), 2.0)
    gateway.handle_batch([m.EventMessage(7, 2, b"a")], 4.5)
    gateway.handle(g.EventSubmitted(41, b"a"), 6.0)
    reason = reason_of_the_end(gateway, 16.0)
    assert "no sign of life for 11.5 s" in reason
    assert "native code holds Python's interpreter lock" in reason
    assert "GatewayLimits(confirm_timeout_s=...)" in reason


def test_a_new_connection_is_a_sign_of_life() -> None:
    gateway = a_gateway()  # H69, H24
    gateway.handle(g.EventSubmitted(41, b"a"), 6.0)
    gateway.handle(g.ConnectionLost(), 8.0)
    gateway.handle(g.ConnectionAttached(0), 12.0)
    assert "no sign of life for 8.0 s" in reason_of_the_end(gateway, 20.0)


def test_the_reason_does_not_call_a_task_silent_that_has_just_spoken() -> None:
    gateway = a_gateway()  # H69
    gateway.handle(g.EventSubmitted(41, b"a"), 1.0)
    gateway.handle(g.MessageReceived(m.EventMessage(7, 1, b"a")), 9.0)
    reason = reason_of_the_end(gateway, 11.0)
    assert "sent something 2.0 s ago" in reason
    assert "mailbox is full" in reason
    assert "interpreter lock" not in reason


def test_without_a_confirmation_in_time_exactly_this_attempt_is_failed_with_the_event_named() -> None:  # H25
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(41, b"a"), 1.0)
    gateway.handle(g.EventSubmitted(42, b"b"), 5.0)
    assert gateway.next_deadline() == 11.0
    assert gateway.handle(g.TimePassed(), 10.9) == []
    effects = gateway.handle(g.TimePassed(), 11.0)
    # R26: the failure of the attempt is known before that of the event
    assert isinstance(effects[0], g.FailAttempt)
    assert effects[0].reason.startswith("event 41 (item 1) for words[2]#1 (task 7) was not confirmed within 10.000 s. ")
    assert failed(effects) == [41, 42]
    kinds = [type(effect.error) for effect in effects if isinstance(effect, g.FailEvent)]
    assert kinds == [ConfirmationTimeout, AttemptOver]
    assert gateway.state is GatewayState.OVER
    assert gateway.handle(g.TimePassed(), 99.0) == []
    gateway.check_invariants()


def test_an_attempt_that_is_over_already_is_not_failed_again() -> None:  # H25
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(1, b"a"), 1.0)
    gateway.handle(g.AttemptIsOver("killed"), 2.0)
    assert gateway.next_deadline() is None
    assert gateway.handle(g.TimePassed(), 50.0) == []


def test_a_confirmation_moves_the_deadline_to_the_next_event() -> None:  # H25
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(1, b"a"), 1.0)
    gateway.handle(g.EventSubmitted(2, b"b"), 5.0)
    hear(gateway, m.Confirm(7, 1), 6.0)
    assert gateway.next_deadline() == 15.0
    hear(gateway, m.Confirm(7, 2), 7.0)
    assert gateway.next_deadline() is None


def test_the_confirm_clock_stands_still_while_the_reconnect_clock_runs() -> None:  # H24, H25
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(1, b"a"), 1.0)
    gateway.handle(g.ConnectionLost(), 4.0)
    assert gateway.next_deadline() == 34.0
    gateway.handle(g.EventSubmitted(2, b"b"), 10.0)
    gateway.handle(g.ConnectionAttached(0), 24.0)
    assert gateway.next_deadline() == 31.0  # three seconds had passed before the break
    hear(gateway, m.Confirm(7, 1), 25.0)
    assert gateway.next_deadline() == 34.0  # the second one has had a connection since 24
    hear(gateway, m.Confirm(7, 2), 26.0)
    gateway.handle(g.EventSubmitted(3, b"c"), 27.0)
    assert gateway.next_deadline() == 37.0  # the break was before this one


def test_a_peer_that_stays_away_too_long_ends_its_attempt() -> None:  # H24
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(1, b"a"), 1.0)
    gateway.handle(g.ConnectionLost(), 4.0)
    assert gateway.handle(g.TimePassed(), 33.9) == []
    effects = gateway.handle(g.TimePassed(), 34.0)
    assert effects[0] == g.ExpireConnection("words[2]#1 (task 7) did not reconnect within 30 s")
    assert failed(effects) == [1]
    assert gateway.state is GatewayState.OVER


def test_a_peer_that_said_goodbye_may_stay_away_for_long_and_is_confirmed_when_it_comes_back() -> None:
    """H24, H48. Found by the simulation: just after the goodbye, the network is cut for longer than the reconnect
    timeout. The attempt, given up after its goodbye, waited for the confirmation without end."""
    gateway = a_gateway()
    hear(gateway, m.Opened(7, 1))
    gateway.handle(g.EventSubmitted(1, b"late"), 0.0)
    hear(gateway, m.Finished(7, 2, "", b"s", ()))
    gateway.handle(g.ConnectionLost(), 1.0)
    assert gateway.next_deadline() is None
    assert gateway.handle(g.TimePassed(), 100.0) == []
    assert sent(gateway.handle(g.ConnectionAttached(0), 200.0)) == [m.EventMessage(7, 1, b"late"), m.Confirm(7, 2)]
    assert gateway.handle(g.TimePassed(), 300.0) == []
    assert failed(gateway.handle(g.AttemptIsOver("it has finished"), 400.0)) == [1]


def test_a_second_report_of_the_same_loss_does_not_start_the_reconnect_clock_again() -> None:  # H48
    gateway = a_gateway()
    gateway.handle(g.ConnectionLost(), 4.0)
    gateway.handle(g.ConnectionLost(), 20.0)
    assert gateway.next_deadline() == 34.0


def test_a_gateway_that_never_gets_a_connection_does_not_wait_forever() -> None:  # H48
    gateway = a_gateway(connected=False, ready=False)
    assert gateway.next_deadline() is None
    gateway.handle(g.EventSubmitted(1, b"a"), 5.0)
    assert gateway.next_deadline() == 35.0


def test_what_is_late_is_named_though_other_items_are_under_way_before_it() -> None:  # H25, H28
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(41, b"a", loss_tolerant=True), 1.0)
    gateway.handle(g.EventSubmitted(42, b"b"), 2.0)
    effects = gateway.handle(g.TimePassed(), 12.0)
    assert isinstance(effects[0], g.FailAttempt)
    assert effects[0].reason.startswith("event 42 (item 2) for")
    assert [(effect.event_id, type(effect.error)) for effect in effects if isinstance(effect, g.FailEvent)] == [
        (41, AttemptOver),
        (42, ConfirmationTimeout),
    ]


def test_a_loss_tolerant_event_fails_no_attempt() -> None:  # H28
    gateway = a_gateway()
    assert sent(gateway.handle(g.EventSubmitted(1, b"a", loss_tolerant=True), 1.0)) == [m.EventMessage(7, 1, b"a")]
    assert [type(effect) for effect in gateway.handle(g.TimePassed(), 11.0)] == [g.ExpireEvent]
    assert gateway.state is GatewayState.ATTACHED
    assert gateway.next_deadline() is None
    gateway.handle(g.EventSubmitted(2, b"b"), 15.0)
    assert gateway.next_deadline() == 25.0


def test_a_loss_tolerant_event_expires_after_the_same_timeout_and_stays_on_its_way() -> None:  # H72, H28
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(1, b"a", loss_tolerant=True), 1.0)
    gateway.handle(g.EventSubmitted(2, b"b", loss_tolerant=True), 3.0)
    assert gateway.next_deadline() == 11.0
    (expired,) = gateway.handle(g.TimePassed(), 11.0)
    assert isinstance(expired, g.ExpireEvent)
    assert (expired.event_id, type(expired.error)) == (1, ConfirmationTimeout)
    assert "loss-tolerant event 1 (item 1)" in str(expired.error)
    assert "was not confirmed within 10.000 s" in str(expired.error)
    assert gateway.next_deadline() == 13.0
    assert gateway.statistics().unconfirmed_events == 2  # H27: it takes up capacity until it arrives
    assert hear(gateway, m.Confirm(7, 1)) == [g.ConfirmEvent(1)]
    gateway.check_invariants()


def test_a_loss_tolerant_event_that_has_expired_fails_with_the_attempt() -> None:  # H26, H72
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(1, b"a", loss_tolerant=True), 1.0)
    gateway.handle(g.TimePassed(), 11.0)
    assert failed(gateway.handle(g.AttemptIsOver("killed"), 12.0)) == [1]
    gateway.check_invariants()


def test_the_clock_of_a_loss_tolerant_event_stands_still_without_a_connection() -> None:  # H24, H72
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(1, b"a", loss_tolerant=True), 1.0)
    gateway.handle(g.ConnectionLost(), 5.0)
    assert gateway.next_deadline() == 35.0  # the reconnect clock
    gateway.handle(g.ConnectionAttached(0), 25.0)
    assert gateway.next_deadline() == 31.0
    assert [type(effect) for effect in gateway.handle(g.TimePassed(), 31.0)] == [g.ExpireEvent]


def test_a_held_loss_tolerant_event_has_its_time_from_the_moment_it_leaves() -> None:
    # H41, H72: until then the checkpoint that holds it has its own clock
    gateway = a_gateway()
    gateway.handle(g.CloseRequested(5), 1.0)
    gateway.handle(g.CutReached(5), 1.0)
    gateway.handle(g.EventSubmitted(1, b"a", loss_tolerant=True), 2.0)
    assert gateway.next_deadline() is None
    gateway.handle(g.CheckpointOver(5, g.CheckpointOutcome.ABORTED), 60.0)
    assert gateway.next_deadline() == 70.0


def test_a_loss_tolerant_event_expires_though_its_peer_has_said_goodbye() -> None:
    # H72: only the wait for the event ends, so the peer's own end is not affected
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(1, b"a", loss_tolerant=True), 1.0)
    gateway.handle(g.EventSubmitted(2, b"b"), 1.0)
    hear(gateway, m.Opened(7, 1))
    hear(gateway, m.Finished(7, 2, "", b"", ()))
    assert gateway.next_deadline() == 11.0
    assert [type(effect) for effect in gateway.handle(g.TimePassed(), 11.0)] == [g.ExpireEvent]
    assert gateway.next_deadline() is None
    assert gateway.state is GatewayState.ATTACHED


# --- the end ----------------------------------------------------------------------------------------------


def test_when_the_attempt_is_over_what_is_unconfirmed_fails_once_and_immediately() -> None:  # H14, H26
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(1, b"a"), 1.0)
    gateway.handle(g.EventSubmitted(2, b"b", loss_tolerant=True), 1.0)
    effects = gateway.handle(g.AttemptIsOver("executor lost"), 2.0)
    assert failed(effects) == [1, 2]
    assert all(str(effect.error) == "executor lost" for effect in effects if isinstance(effect, g.FailEvent))
    assert gateway.handle(g.AttemptIsOver("again"), 2.0) == []
    gateway.check_invariants()


def test_an_event_to_an_attempt_that_is_over_is_accepted_and_failed() -> None:
    # H21: sending never raises for the attempt's state
    gateway = a_gateway()
    gateway.handle(g.AttemptIsOver("killed"), 2.0)
    for event_id in range(10):
        assert failed(gateway.handle(g.EventSubmitted(event_id, b"x" * 90), 3.0)) == [event_id]


def test_what_an_attempt_says_when_it_is_over_is_refused() -> None:  # H3
    gateway = a_gateway()
    gateway.handle(g.AttemptIsOver("killed"), 2.0)
    for message in (m.Opened(7, 1), m.EventMessage(7, 1, b"x"), m.Confirm(7, 99), m.Resume(7, "words", 0)):
        assert "killed" in refusal(hear(gateway, message))
    assert refusal(gateway.handle_batch([m.Opened(7, 1)], 3.0))


def test_an_answer_to_an_attempt_that_is_over_is_dropped() -> None:  # H33
    gateway = a_gateway()
    hear(gateway, m.RequestMessage(7, 1, 5, b"?"))
    gateway.handle(g.AttemptIsOver("killed"), 2.0)
    assert gateway.handle(g.AnswerSubmitted(5, "", b"!"), 3.0) == []


# --- up ---------------------------------------------------------------------------------------------------


def test_a_message_of_another_attempt_is_refused_before_anything_else() -> None:  # H3
    gateway = a_gateway()
    for message in (m.Opened(8, 1), m.EventMessage(8, 5, b"x"), m.Confirm(8, 99), m.Resume(8, "words", 0)):
        assert refusal(hear(gateway, message))


def test_what_comes_when_no_connection_is_up_is_refused_and_comes_again_later() -> None:  # H24
    gateway = a_gateway()
    gateway.handle(g.ConnectionLost(), 1.0)
    assert refusal(hear(gateway, m.EventMessage(7, 1, b"x")))
    assert gateway.resume_seq == 0


def test_events_are_delivered_in_order_and_confirmed_when_taken() -> None:  # H30
    gateway = a_gateway()
    assert hear(gateway, m.EventMessage(7, 1, b"a")) == [g.DeliverEvent(1, b"a")]
    assert hear(gateway, m.EventMessage(7, 2, b"b")) == [g.DeliverEvent(2, b"b")]
    assert gateway.handle(g.ItemTaken(1), 1.0) == [g.SendToAttempt(m.Confirm(7, 1))]
    assert gateway.handle(g.ItemTaken(1), 1.0) == []
    assert gateway.handle(g.ItemTaken(2), 1.0) == [g.SendToAttempt(m.Confirm(7, 2))]


def test_a_restored_event_is_an_event_that_names_its_first_sender() -> None:  # H27, H31, H52
    gateway = a_gateway(ready=False)
    restored = m.RestoredEventMessage(7, 1, 6, b"r")
    assert hear(gateway, restored) == []
    assert gateway.handle(g.ReadyAnnounced(), 1.0) == [g.DeliverEvent(1, b"r", sender=6)]
    assert gateway.statistics().untaken_events == 1
    assert gateway.handle(g.ItemTaken(1), 1.0) == [g.SendToAttempt(m.Confirm(7, 1))]
    assert hear(gateway, restored) == [g.SendToAttempt(m.Confirm(7, 1))]
    with pytest.raises(RemoteProtocolError, match="window"):
        hear(a_busy_gateway(90), m.RestoredEventMessage(7, 2, 6, b"x" * 11))


def test_how_many_events_had_left_comes_up_with_the_goodbye() -> None:  # H32
    assert hear(a_gateway(), m.Finished(7, 1, "", b"s", (12,)))[0] == g.ReportFinished("", b"s", (12,))
    assert hear(a_gateway(ready=False), m.Finished(7, 1, "boom", b"", (9,)))[0] == g.ReportFinished("boom", b"", (9,))


def test_a_duplicate_is_dropped_and_confirmed_again() -> None:  # H30
    gateway = a_gateway()
    hear(gateway, m.EventMessage(7, 1, b"a"))
    gateway.handle(g.ItemTaken(1), 1.0)
    assert hear(gateway, m.EventMessage(7, 1, b"a")) == [g.SendToAttempt(m.Confirm(7, 1))]


def test_a_hole_is_the_peers_fault_and_changes_nothing() -> None:  # H30
    gateway = a_gateway()
    with unchanged(gateway), pytest.raises(RemoteProtocolError, match="item 2 arrived, but item 1"):
        hear(gateway, m.EventMessage(7, 2, b"b"))


def test_events_wait_until_the_coordinator_knows_that_the_subtask_is_ready() -> None:
    # H10, H11: readiness itself does not wait
    gateway = a_gateway(ready=False)
    assert hear(gateway, m.EventMessage(7, 1, b"a")) == []
    assert hear(gateway, m.Opened(7, 2)) == [g.ReportOpened()]
    assert hear(gateway, m.RequestMessage(7, 3, 5, b"?")) == []
    assert hear(gateway, m.Finished(7, 4, "", b"s", ())) == []
    with pytest.raises(LocalProtocolError, match="before it was delivered"):
        gateway.handle(g.ItemTaken(1), 1.0)
    assert gateway.handle(g.ReadyAnnounced(), 1.0) == [
        g.DeliverEvent(1, b"a"),
        g.DeliverRequest(3, 5, b"?"),
        g.ReportFinished("", b"s", ()),
    ]
    with pytest.raises(LocalProtocolError, match="twice"):
        gateway.handle(g.ReadyAnnounced(), 1.0)


def test_the_news_of_a_failure_does_not_wait_for_readiness() -> None:
    # H11, H12: an attempt that dies before it is ready must be reported failed
    gateway = a_gateway(ready=False)
    hear(gateway, m.EventMessage(7, 1, b"a"))
    assert hear(gateway, m.Finished(7, 2, "ValueError", b"", ())) == [g.ReportFinished("ValueError", b"", ())]


def test_the_own_items_of_the_protocol_are_confirmed_immediately_but_never_past_an_untaken_event() -> None:  # H27
    gateway = a_gateway()
    assert hear(gateway, m.Opened(7, 1)) == [g.ReportOpened(), g.SendToAttempt(m.Confirm(7, 1))]
    hear(gateway, m.EventMessage(7, 2, b"a"))
    assert hear(gateway, m.Finished(7, 3, "", b"", ())) == [g.ReportFinished("", b"", ())]
    assert gateway.handle(g.ItemTaken(2), 1.0) == [g.SendToAttempt(m.Confirm(7, 3))]


def test_a_peer_that_sends_more_than_its_window_is_at_fault() -> None:  # H27
    gateway = a_gateway()
    for seq in (1, 2, 3):
        hear(gateway, m.EventMessage(7, seq, b"x"))
    with pytest.raises(RemoteProtocolError, match="window"):
        hear(gateway, m.EventMessage(7, 4, b"x"))
    gateway.handle(g.ItemTaken(1), 1.0)
    assert hear(gateway, m.EventMessage(7, 4, b"x")) == [g.DeliverEvent(4, b"x")]
    with pytest.raises(RemoteProtocolError, match="window"):
        hear(a_busy_gateway(90), m.EventMessage(7, 2, b"x" * 11))


def a_busy_gateway(size: int) -> GatewayMachine:
    gateway = a_gateway()
    hear(gateway, m.EventMessage(7, 1, b"x" * size))
    return gateway


def test_a_peer_with_more_open_requests_than_its_window_is_at_fault() -> None:
    # H27, H33: an answer is never refused, so requests are bounded
    gateway = a_gateway()
    for seq in (1, 2, 3):
        hear(gateway, m.RequestMessage(7, seq, seq, b"?"))
        gateway.handle(g.ItemTaken(seq), 1.0)
    with pytest.raises(RemoteProtocolError, match="open requests"):
        hear(gateway, m.RequestMessage(7, 4, 4, b"?"))
    gateway.handle(g.AnswerSubmitted(2, "", b"!"), 1.0)
    with pytest.raises(RemoteProtocolError, match="open requests"):
        hear(gateway, m.RequestMessage(7, 4, 4, b"?"))
    hear(gateway, m.Confirm(7, 1))
    assert hear(gateway, m.RequestMessage(7, 4, 4, b"?")) == [g.DeliverRequest(4, 4, b"?")]


def test_a_request_id_in_use_is_the_peers_fault() -> None:
    gateway = a_gateway()
    hear(gateway, m.RequestMessage(7, 1, 5, b"?"))
    with pytest.raises(RemoteProtocolError, match="request id 5 twice"):
        hear(gateway, m.RequestMessage(7, 2, 5, b"?"))


def test_an_answer_goes_the_way_of_an_event() -> None:  # H33
    gateway = a_gateway()
    hear(gateway, m.RequestMessage(7, 1, 5, b"?"))
    gateway.handle(g.EventSubmitted(1, b"a"), 1.0)
    assert sent(gateway.handle(g.AnswerSubmitted(5, "no", b"!"), 2.0)) == [m.AnswerMessage(7, 2, 5, "no", b"!")]
    with pytest.raises(LocalProtocolError, match=r"request 5 .* is not open"):
        gateway.handle(g.AnswerSubmitted(5, "", b"!"), 2.0)
    assert hear(gateway, m.Confirm(7, 1)) == [g.ConfirmEvent(1)]
    [failure] = gateway.handle(g.TimePassed(), 12.0)
    assert isinstance(failure, g.FailAttempt)
    assert failure.reason.startswith("the answer to request 5 (item 2)")


def test_an_event_cannot_be_taken_before_it_came() -> None:
    gateway = a_gateway()
    with pytest.raises(LocalProtocolError, match="before it arrived"):
        gateway.handle(g.ItemTaken(1), 1.0)


@pytest.mark.parametrize("plain", [m.Resume(7, "words", 0), m.Register(7, "words", 2, 0, 0, 0, 4, "here", "3.11")])
def test_a_handshake_in_the_middle_of_a_connection_is_the_peers_fault(plain: m.UpMessage) -> None:
    with pytest.raises(RemoteProtocolError, match="established connection"):
        hear(a_gateway(), plain)


def test_a_subtask_says_nothing_after_its_goodbye() -> None:
    gateway = a_gateway()
    hear(gateway, m.Opened(7, 1))
    hear(gateway, m.Finished(7, 2, "", b"s", ()))
    effects = hear(gateway, m.EventMessage(7, 3, b"x"))
    assert [type(effect) for effect in effects] == [g.RefuseMessage, g.SendToAttempt]
    assert sent(effects) == [m.Confirm(7, 3)]


def test_a_subtask_opens_once() -> None:
    gateway = a_gateway()
    hear(gateway, m.Opened(7, 1))
    assert refusal(hear(gateway, m.Opened(7, 2))[:1])


# --- batches ----------------------------------------------------------------------------------------------


def test_one_read_of_many_frames_costs_one_confirm() -> None:
    gateway = a_gateway()
    gateway.handle(g.EventSubmitted(1, b"a"), 1.0)
    effects = gateway.handle_batch([m.Opened(7, 1), m.Confirm(7, 1), m.EventMessage(7, 2, b"x"), m.Opened(7, 1)], 2.0)
    assert effects == [
        g.ReportOpened(),
        g.ConfirmEvent(1),
        g.DeliverEvent(2, b"x"),
        g.SendToAttempt(m.Confirm(7, 1)),
    ]


def test_a_batch_stops_at_the_message_that_breaks_the_protocol_and_keeps_what_came_before() -> None:  # H62
    gateway = a_gateway()
    effects = gateway.handle_batch([m.Opened(7, 1), m.EventMessage(7, 9, b"x"), m.EventMessage(7, 2, b"y")], 2.0)
    assert effects[:2] == [g.ReportOpened(), g.SendToAttempt(m.Confirm(7, 1))]
    assert isinstance(effects[2], g.DropConnection)
    assert len(effects) == 3
    gateway.handle(g.ConnectionLost(), 3.0)
    assert gateway.resume_seq == 1


def test_a_new_connection_starts_with_what_was_taken_meanwhile() -> None:
    # H24, H30: the handshake named the items taken before it; more may have been taken since
    gateway = a_gateway()
    hear(gateway, m.EventMessage(7, 1, b"a"))
    gateway.handle(g.ConnectionLost(), 1.0)
    assert gateway.resume_seq == 0
    assert gateway.handle(g.ItemTaken(1), 2.0) == []
    confirm = g.SendToAttempt(m.Confirm(7, 1))
    assert gateway.handle(g.ConnectionAttached(0), 3.0) == [g.ReportResponsive(), confirm]


@pytest.mark.parametrize("field", ["confirm_timeout_s", "reconnect_timeout_s", "events_max", "upward_bytes_max"])
def test_limits_that_nothing_could_keep_are_refused(field: str) -> None:
    values = {field.name: 1 for field in fields(g.GatewayLimits)}
    with pytest.raises(ValueError, match="must be"):
        g.GatewayLimits(**{**values, field: 0})


# --- suspicion (H87) ----------------------------------------------------------------------------------------


GONE = g.ReportSuspected("its connection is gone")


def test_each_broken_connection_is_a_suspicion_that_the_next_one_takes_back() -> None:  # H87, H24
    gateway = a_gateway()
    for number in range(2):
        assert gateway.handle(g.ConnectionLost(), 1.0 + number) == [GONE]
        assert gateway.handle(g.ConnectionLost(), 1.0 + number) == []
        assert gateway.handle(g.ConnectionAttached(0), 1.5 + number) == [g.ReportResponsive()]
    assert gateway.handle(g.ConnectionAttached(0), 4.0) == []  # it replaces one whose loss was never noticed


def test_an_attempt_that_the_coordinator_does_not_know_is_suspected_once_it_does() -> None:  # H87
    gateway = a_gateway(ready=False)
    assert gateway.handle(g.ConnectionLost(), 1.0) == []
    assert gateway.handle(g.ConnectionAttached(0), 2.0) == []
    assert gateway.handle(g.ConnectionLost(), 3.0) == []
    assert gateway.handle(g.ReadyAnnounced(), 4.0) == [GONE]
    assert gateway.handle(g.ConnectionAttached(0), 5.0) == [g.ReportResponsive()]


def test_an_attempt_whose_operator_has_ended_is_not_suspected() -> None:  # H87
    gateway = a_gateway()
    hear(gateway, m.Finished(7, 1, "", b"", ()))
    assert gateway.handle(g.ConnectionLost(), 1.0) == []
    assert g.ReportResponsive() not in gateway.handle(g.ConnectionAttached(0), 2.0)


def test_an_attempt_that_is_over_gives_no_hint() -> None:  # H87
    gateway = a_gateway()
    gateway.handle(g.AttemptIsOver("killed"), 1.0)
    assert gateway.handle(g.ConnectionLost(), 2.0) == []
    assert gateway.handle(g.ConnectionAttached(0), 3.0) == []
