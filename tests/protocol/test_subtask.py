# SPDX-License-Identifier: Apache-2.0

"""The subtask without checkpoints: mailbox, sending, requests, reconnecting, ending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import pytest

from protocol.errors import AttemptOver, GatewayFull, LocalProtocolError, RemoteProtocolError
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine, SubtaskStatus
from protocol.wire import messages as m
from tests.protocol.refusals import refusal, unchanged

LIMITS = s.SubtaskLimits(window_events=3, window_bytes=100, reconnect_timeout_s=30)


def a_subtask(
    held: tuple[bytes, ...] = (), limits: s.SubtaskLimits = LIMITS, connected: bool = True, opened: bool = True
) -> SubtaskMachine:
    """Return an attempt of task 7, subtask 2. If it is open, ``Opened`` was confirmed.

    ``held``: events first sent by subtask 5."""
    subtask = SubtaskMachine(7, 2, limits, tuple(m.HeldEvent(5, payload) for payload in held))
    if connected:
        subtask.handle(s.ConnectionAttached(0), 0.0)
    if opened:
        subtask.handle(s.OperatorOpened(), 0.0)
        if connected and not held:
            hear(subtask, m.Confirm(7, 1))
    return subtask


def sent(effects: Sequence[s.SubtaskEffect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, s.SendToCoordinator)]


def hear(subtask: SubtaskMachine, message: m.DownMessage, now: float = 0.0) -> list[s.SubtaskEffect]:
    effects = subtask.handle(s.MessageReceived(message), now)
    subtask.check_invariants()
    return effects


# --- down -------------------------------------------------------------------------------------------------


def test_one_read_of_many_frames_costs_one_confirm_after_all_of_them() -> None:  # H23
    subtask = a_subtask()
    batch: list[m.DownMessage] = [
        m.EventMessage(7, 1, b"a"),
        m.Confirm(7, 1),
        m.EventMessage(7, 2, b"b"),
        m.EventMessage(7, 2, b"b"),
    ]
    assert subtask.handle_batch(batch, 1.0) == [
        s.PutInMailbox(s.MailboxEvent(b"a")),
        s.PutInMailbox(s.MailboxEvent(b"b")),
        s.SendToCoordinator(m.Confirm(7, 2)),
    ]


def test_a_duplicate_is_dropped_and_confirmed_again() -> None:  # H22
    subtask = a_subtask()
    hear(subtask, m.EventMessage(7, 1, b"a"))
    assert hear(subtask, m.EventMessage(7, 1, b"a")) == [s.SendToCoordinator(m.Confirm(7, 1))]


def test_a_hole_is_the_peers_fault_and_changes_nothing() -> None:  # H22
    subtask = a_subtask()
    with unchanged(subtask), pytest.raises(RemoteProtocolError, match="item 3 arrived, but item 1"):
        hear(subtask, m.EventMessage(7, 3, b"a"))


def test_a_batch_stops_at_the_message_that_breaks_the_protocol_and_keeps_what_came_before() -> None:  # H62
    subtask = a_subtask()
    effects = subtask.handle_batch([m.EventMessage(7, 1, b"a"), m.Confirm(7, 99), m.EventMessage(7, 2, b"b")], 1.0)
    assert effects[:2] == [s.PutInMailbox(s.MailboxEvent(b"a")), s.SendToCoordinator(m.Confirm(7, 1))]
    assert isinstance(effects[2], s.DropConnection)
    assert len(effects) == 3


def test_a_message_of_another_attempt_is_refused_before_anything_else() -> None:  # H3
    subtask = a_subtask()
    for message in (m.EventMessage(8, 1, b"a"), m.Confirm(8, 99), m.AttemptEnded(8, "x"), m.Resumed(8, 0)):
        assert refusal(hear(subtask, message))
    assert subtask.state is SubtaskStatus.OPEN


@pytest.mark.parametrize("plain", [m.Resumed(7, 0), m.Registered(7, 0, -1, (), (), 30.0, 3, 100, ())])
def test_a_handshake_in_the_middle_of_a_connection_is_the_peers_fault(plain: m.DownMessage) -> None:
    with pytest.raises(RemoteProtocolError, match="established connection"):
        hear(a_subtask(), plain)


# --- up ---------------------------------------------------------------------------------------------------


def test_an_operator_opens_once_and_says_so() -> None:  # H11
    subtask = a_subtask(opened=False)
    assert subtask.handle(s.OperatorOpened(), 1.0) == [s.SendToCoordinator(m.Opened(7, 1))]
    with pytest.raises(LocalProtocolError, match="OperatorOpened when the operator is open"):
        subtask.handle(s.OperatorOpened(), 1.0)


def test_events_leave_in_order_and_wait_for_a_connection() -> None:  # H24, H30
    subtask = a_subtask(connected=False)
    assert subtask.handle(s.EventSubmitted(b"a"), 1.0) == []
    assert sent(subtask.handle(s.ConnectionAttached(0), 2.0)) == [m.Opened(7, 1), m.EventMessage(7, 2, b"a")]
    assert sent(subtask.handle(s.EventSubmitted(b"b"), 3.0)) == [m.EventMessage(7, 3, b"b")]


def test_a_resumed_connection_carries_only_what_the_coordinator_does_not_have() -> None:  # H24, H30
    subtask = a_subtask()
    subtask.handle(s.EventSubmitted(b"a"), 1.0)
    subtask.handle(s.EventSubmitted(b"b"), 1.0)
    hear(subtask, m.EventMessage(7, 1, b"x"))
    subtask.handle(s.ConnectionLost(), 2.0)
    assert subtask.resume_seq == 1
    effects = subtask.handle(s.ConnectionAttached(2), 3.0)
    assert sent(effects) == [m.EventMessage(7, 3, b"b"), m.Confirm(7, 1)]


def test_at_the_window_the_operator_is_refused_and_told_once_when_there_is_capacity() -> None:  # H27
    subtask = a_subtask()
    for _ in range(3):
        subtask.handle(s.EventSubmitted(b"x"), 1.0)
    with unchanged(subtask):
        for _ in range(2):
            with pytest.raises(GatewayFull, match="3 unconfirmed"):
                subtask.handle(s.EventSubmitted(b"x"), 1.0)
    assert hear(subtask, m.Confirm(7, 2)) == [s.CapacityAvailable()]
    assert hear(subtask, m.Confirm(7, 3)) == []


def test_an_event_larger_than_the_window_passes_alone() -> None:  # H27, H48
    subtask = a_subtask()
    assert len(subtask.handle(s.EventSubmitted(b"x" * 1000), 1.0)) == 1
    with pytest.raises(GatewayFull):
        subtask.handle(s.EventSubmitted(b"x"), 1.0)


def test_restored_events_beyond_the_window_wait_for_confirmations() -> None:  # H27, H31
    subtask = a_subtask((b"1", b"2", b"3", b"4", b"5"), opened=False)
    with pytest.raises(GatewayFull):
        subtask.handle(s.EventSubmitted(b"new"), 1.0)
    assert sent(hear(subtask, m.Confirm(7, 2))) == [
        m.RestoredEventMessage(7, 4, 5, b"4"),
        m.RestoredEventMessage(7, 5, 5, b"5"),
    ]
    effects = hear(subtask, m.Confirm(7, 3))
    assert effects == [s.CapacityAvailable()]


def test_the_figures_are_visible() -> None:  # H27
    subtask = a_subtask()
    subtask.handle(s.RequestSubmitted(1, b"??"), 1.0)
    assert subtask.statistics() == s.SubtaskStatistics(0, 0, 1, 2, 1, ())


# --- requests ---------------------------------------------------------------------------------------------


def test_a_request_gets_its_answer_once() -> None:  # H33
    subtask = a_subtask()
    assert sent(subtask.handle(s.RequestSubmitted(5, b"?"), 1.0)) == [m.RequestMessage(7, 2, 5, b"?")]
    assert hear(subtask, m.AnswerMessage(7, 1, 5, "", b"!")) == [
        s.ResolveRequest(5, "", b"!"),
        s.SendToCoordinator(m.Confirm(7, 1)),
    ]
    effects = hear(subtask, m.AnswerMessage(7, 2, 5, "", b"!"))
    assert isinstance(effects[0], s.RefuseMessage)
    assert sent(effects) == [m.Confirm(7, 2)]


def test_open_requests_are_bounded_although_they_are_confirmed() -> None:  # H27, H33
    subtask = a_subtask()
    for request_id in (1, 2, 3):
        subtask.handle(s.RequestSubmitted(request_id, b"?"), 1.0)
    hear(subtask, m.Confirm(7, 4))
    with pytest.raises(GatewayFull, match="3 open requests"):
        subtask.handle(s.RequestSubmitted(4, b"?"), 1.0)
    assert len(sent(subtask.handle(s.EventSubmitted(b"x"), 1.0))) == 1
    assert s.CapacityAvailable() in hear(subtask, m.AnswerMessage(7, 1, 2, "", b"!"))


def test_a_request_id_in_use_is_refused() -> None:
    subtask = a_subtask()
    subtask.handle(s.RequestSubmitted(5, b"?"), 1.0)
    with unchanged(subtask), pytest.raises(LocalProtocolError, match="request id 5"):
        subtask.handle(s.RequestSubmitted(5, b"?"), 1.0)


# --- the end ----------------------------------------------------------------------------------------------


def test_the_goodbye_is_the_last_item_and_no_event_follows_it() -> None:
    subtask = a_subtask()
    assert sent(subtask.handle(s.OperatorFinished("", b"s"), 1.0)) == [m.Finished(7, 2, "", b"s", ())]
    assert not subtask.all_confirmed
    with pytest.raises(
        LocalProtocolError, match=r"an event was sent when the operator is finished: send .* before close\(\)"
    ):
        subtask.handle(s.EventSubmitted(b"x"), 1.0)
    hear(subtask, m.Confirm(7, 2))
    assert subtask.all_confirmed


def test_an_operator_does_not_end_well_while_something_that_it_sent_waits() -> None:  # H30, H31
    subtask = a_subtask((b"1", b"2", b"3", b"4"))
    with unchanged(subtask), pytest.raises(LocalProtocolError, match="1 events have not left"):
        subtask.handle(s.OperatorFinished("", b""), 1.0)
    hear(subtask, m.Confirm(7, 1))
    assert subtask.may_finish
    assert isinstance(sent(subtask.handle(s.OperatorFinished("", b""), 1.0))[0], m.Finished)


def test_a_failed_operator_takes_with_it_what_waited() -> None:
    # The attempt is reset to a snapshot that contains its own events.
    subtask = a_subtask((b"1", b"2", b"3", b"4"), opened=False)
    assert sent(subtask.handle(s.OperatorFinished("ValueError", b""), 1.0)) == [
        m.Finished(7, 4, "ValueError", b"", (3,))
    ]


def test_an_operator_that_was_never_opened_cannot_have_ended_well() -> None:
    with pytest.raises(LocalProtocolError, match="without being opened"):
        a_subtask(opened=False).handle(s.OperatorFinished("", b""), 1.0)


def test_an_event_that_comes_after_the_end_of_the_operator_is_never_confirmed() -> None:
    # H23: no operator will handle it, so it must fail at its sender (H26)
    subtask = a_subtask()
    hear(subtask, m.EventMessage(7, 1, b"a"))
    subtask.handle(s.OperatorFinished("", b""), 1.0)
    effects = hear(subtask, m.EventMessage(7, 2, b"late"))
    assert isinstance(effects[0], s.RefuseMessage)
    assert sent(effects) == [m.Confirm(7, 1)]
    assert subtask.resume_seq == 1
    assert sent(hear(subtask, m.EventMessage(7, 2, b"late"))) == [m.Confirm(7, 1)]


@pytest.mark.parametrize("last", [m.AttemptEnded(7, "superseded"), m.Refused(7, 4, "superseded")])
def test_when_the_coordinator_ends_the_attempt_the_operator_is_stopped_once(last: m.DownMessage) -> None:  # H3, H57
    subtask = a_subtask()
    subtask.handle(s.RequestSubmitted(5, b"?"), 1.0)
    assert hear(subtask, last) == [
        s.ResolveRequest(5, "the attempt is over: superseded", b""),
        s.EndAttempt("superseded"),
    ]
    assert refusal(hear(subtask, last))
    with pytest.raises(AttemptOver):
        subtask.handle(s.EventSubmitted(b"x"), 2.0)
    with pytest.raises(AttemptOver):
        subtask.handle(s.RequestSubmitted(6, b"x"), 2.0)
    assert subtask.next_deadline() is None


def test_what_follows_the_end_in_the_same_read_is_refused() -> None:  # H3
    subtask = a_subtask()
    effects = subtask.handle_batch([m.AttemptEnded(7, "x"), m.EventMessage(7, 1, b"a")], 1.0)
    assert [type(effect) for effect in effects] == [s.EndAttempt, s.RefuseMessage]


def test_a_coordinator_out_of_reach_for_too_long_ends_the_attempt() -> None:  # H24, H48
    subtask = a_subtask()
    assert subtask.next_deadline() is None
    subtask.handle(s.ConnectionLost(), 4.0)
    subtask.handle(s.ConnectionLost(), 20.0)
    assert subtask.next_deadline() == 34.0
    assert subtask.handle(s.TimePassed(), 33.9) == []
    assert subtask.handle(s.TimePassed(), 34.0) == [s.EndAttempt("the coordinator could not be reached for 30 s")]
    assert subtask.handle(s.TimePassed(), 99.0) == []


def test_a_reconnect_in_time_stops_the_clock() -> None:  # H24
    subtask = a_subtask()
    subtask.handle(s.ConnectionLost(), 4.0)
    subtask.handle(s.ConnectionAttached(1), 33.0)
    assert subtask.next_deadline() is None
    assert subtask.handle(s.TimePassed(), 99.0) == []


def test_a_subtask_that_never_gets_a_connection_does_not_wait_forever() -> None:  # H48
    subtask = a_subtask(connected=False)
    assert subtask.next_deadline() == 30.0


@pytest.mark.parametrize("field", [field.name for field in fields(s.SubtaskLimits)])
def test_limits_that_nothing_could_keep_are_refused(field: str) -> None:
    values = {field.name: 1 for field in fields(s.SubtaskLimits)}
    with pytest.raises(ValueError, match="must be"):
        s.SubtaskLimits(**{**values, field: -1 if field == "heartbeat_interval_s" else 0})  # 0 turns heartbeats off
