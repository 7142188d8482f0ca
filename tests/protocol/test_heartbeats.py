# SPDX-License-Identifier: Apache-2.0

"""Signs of life: what a subtask's machine sends, and when a gateway gives a silent peer up (H94)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine, GatewayState
from protocol.machine import TimePassed
from protocol.streams import ConnectionAttached, ConnectionLost
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire import messages as m
from tests.protocol.test_gateway import a_gateway, hear
from tests.protocol.test_subtask import a_subtask, sent
from tests.protocol.test_subtask import hear as hear_down

WATCHFUL = g.GatewayLimits(heartbeat_interval_s=0.25, heartbeat_timeout_s=1.0)
BEATING = s.SubtaskLimits(100, 10_000, 30, heartbeat_interval_s=0.25)


# --- the subtask ------------------------------------------------------------------------------------------------------


def look(subtask: SubtaskMachine, now: float) -> list[object]:
    assert subtask.next_deadline() == now
    effects = subtask.handle(s.TimePassed(), now)
    subtask.check_invariants()
    return sent(effects)


def test_quiet_task_sends_a_heartbeat_in_each_interval() -> None:  # H94
    subtask = a_subtask(limits=BEATING)
    assert look(subtask, 0.25) == []  # ``Opened`` was sent
    assert look(subtask, 0.5) == [m.Heartbeat(7)]
    assert look(subtask, 0.75) == [m.Heartbeat(7)]


def test_task_that_sends_anything_else_needs_no_heartbeat() -> None:  # H94
    subtask = a_subtask(limits=BEATING)
    look(subtask, 0.25)
    subtask.handle(s.EventSubmitted(b"e"), 0.3)
    assert look(subtask, 0.5) == []
    hear_down(subtask, m.EventMessage(7, 1, b"e"), 0.6)  # which it confirms
    assert look(subtask, 0.75) == []
    assert look(subtask, 1.0) == [m.Heartbeat(7)]


def test_late_look_sends_a_heartbeat_whatever_was_sent_before() -> None:
    """H94: otherwise the silence could last for the delay and two intervals more."""
    subtask = a_subtask(limits=BEATING)
    look(subtask, 0.25)
    subtask.handle(s.EventSubmitted(b"e"), 0.3)
    assert sent(subtask.handle(s.TimePassed(), 0.7)) == []  # late by less than an interval
    subtask.handle(s.EventSubmitted(b"e"), 0.8)
    assert sent(subtask.handle(s.TimePassed(), 1.2)) == [m.Heartbeat(7)]


def test_task_without_the_wish_for_heartbeats_has_no_clock() -> None:
    assert a_subtask().next_deadline() is None


def test_task_without_a_connection_sends_none_and_goes_on_after_it_is_back() -> None:  # H94, H24
    subtask = a_subtask(limits=BEATING)
    subtask.handle(s.ConnectionLost(), 1.0)
    assert subtask.next_deadline() == 31.0
    subtask.handle(s.ConnectionAttached(1), 2.0)
    assert look(subtask, 2.25) == [m.Heartbeat(7)]


def test_task_sends_heartbeats_while_it_waits_for_the_end_to_be_confirmed() -> None:  # H94
    subtask = a_subtask(limits=BEATING)
    subtask.handle(s.OperatorFinished("", b""), 0.1)
    look(subtask, 0.25)
    assert look(subtask, 0.5) == [m.Heartbeat(7)]
    hear_down(subtask, m.AttemptEnded(7, "over"), 0.6)
    assert subtask.next_deadline() is None


# --- the gateway ------------------------------------------------------------------------------------------------------


def a_watchful_gateway() -> GatewayMachine:
    """Return one that was attached at 0."""
    gateway = a_gateway(WATCHFUL, connected=False)
    gateway.handle(ConnectionAttached(0), 0.0)
    return gateway


def tick(gateway: GatewayMachine, *times: float) -> list[g.GatewayEffect]:
    """Look at these times, which are as on time as the test wants."""
    effects: list[g.GatewayEffect] = []
    for now in times:
        effects += gateway.handle(TimePassed(), now)
        gateway.check_invariants()
    return effects


def failures(effects: Sequence[g.GatewayEffect]) -> list[g.FailAttempt]:
    return [effect for effect in effects if isinstance(effect, g.FailAttempt)]


def test_silent_peer_is_given_up_with_its_reason() -> None:  # H94
    gateway = a_watchful_gateway()
    gateway.handle(g.EventSubmitted(1, b"e"), 0.1)
    assert failures(tick(gateway, 0.25, 0.5, 0.75, 1.0)) == []
    failure, failed = tick(gateway, 1.25)
    assert isinstance(failure, g.FailAttempt)
    assert failure.silent
    assert "no sign of life for 1.25 s" in failure.reason
    assert isinstance(failed, g.FailEvent)
    assert gateway.state is GatewayState.OVER
    assert gateway.next_deadline() is None


def test_coordinator_has_a_hint_at_half_of_the_time_and_it_is_taken_back() -> None:  # H87, H94
    gateway = a_watchful_gateway()
    hear(gateway, m.Opened(7, 1))
    assert tick(gateway, 0.25, 0.5) == []
    (hint,) = tick(gateway, 0.75, 1.0)
    assert isinstance(hint, g.ReportSuspected)
    assert "no sign of life for 0.75 s" in hint.reason
    gateway.handle(g.PeerHeard(), 1.1)
    assert tick(gateway, 1.25) == [g.ReportResponsive()]


def test_sign_of_life_begins_the_wait_again() -> None:  # H94
    gateway = a_watchful_gateway()
    tick(gateway, 0.25, 0.5, 0.75, 1.0)
    gateway.handle(g.PeerHeard(), 1.1)
    assert failures(tick(gateway, 1.25, 1.5, 1.75, 2.0)) == []
    assert failures(tick(gateway, 2.25))


def test_heartbeat_has_no_other_effect() -> None:  # H94
    gateway = a_watchful_gateway()
    assert hear(gateway, m.Heartbeat(7)) == []


def test_driver_that_is_late_fails_nobody() -> None:  # H94
    gateway = a_watchful_gateway()
    assert tick(gateway, *(10.0 * look for look in range(1, 100))) == []
    assert gateway.state is GatewayState.ATTACHED


def test_one_late_look_counts_nothing() -> None:  # H94
    gateway = a_watchful_gateway()
    assert failures(tick(gateway, 0.25, 0.5, 0.75, 5.0, 5.25)) == []
    assert failures(tick(gateway, 5.5))


def test_early_look_changes_nothing() -> None:
    gateway = a_watchful_gateway()
    assert tick(gateway, *(0.25 * look / 100 for look in range(99))) == []
    assert gateway.next_deadline() == 0.25


def test_peer_without_a_connection_has_the_reconnect_time_instead() -> None:  # H94, H24
    gateway = a_watchful_gateway()
    tick(gateway, 0.25, 0.5, 0.75)
    gateway.handle(ConnectionLost(), 0.8)
    assert gateway.next_deadline() == 0.8 + WATCHFUL.reconnect_timeout_s
    gateway.handle(ConnectionAttached(0), 3.0)
    assert failures(tick(gateway, 3.25, 3.5, 3.75, 4.0)) == []
    assert failures(tick(gateway, 4.25))


def test_peer_that_has_finished_is_not_given_up() -> None:  # H94
    gateway = a_watchful_gateway()
    hear(gateway, m.Opened(7, 1))
    hear(gateway, m.Finished(7, 2, "", b"", ()))
    assert gateway.next_deadline() is None
    assert tick(gateway, *(0.25 * look for look in range(1, 20))) == []


def test_late_confirmation_is_found_beside_the_heartbeats() -> None:  # H25, H94
    gateway = a_watchful_gateway()
    gateway.handle(g.EventSubmitted(1, b"e"), 0.0)
    now, effects = 0.0, list[g.GatewayEffect]()
    while not (failed := failures(effects)):
        now += 0.25
        gateway.handle(g.PeerHeard(), now)
        effects = tick(gateway, now)
    assert now == WATCHFUL.confirm_timeout_s
    assert not failed[0].silent


@pytest.mark.parametrize(("interval_s", "timeout_s"), [(0.0, 1.0), (-1.0, 1.0), (0.6, 1.0), (0.25, 0.0)])
def test_limits_that_cannot_work_are_refused(interval_s: float, timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"heartbeat_(interval|timeout)_s must be (a positive number|at most half)"):
        g.GatewayLimits(heartbeat_interval_s=interval_s, heartbeat_timeout_s=timeout_s)
