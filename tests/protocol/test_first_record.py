# SPDX-License-Identifier: Apache-2.0

"""Events that the coordinator sends inside ``subtask_ready`` are in the mailbox before the signal to begin (H66)."""

from __future__ import annotations

import pytest

from protocol.errors import RemoteProtocolError
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine
from protocol.streams import ConnectionAttached, ConnectionLost
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire import messages as m
from tests.protocol.test_gateway import a_gateway, hear, sent
from tests.protocol.test_subtask import hear as hear_down
from tests.protocol.test_subtask_checkpoints import WIDE


def an_open_gateway() -> GatewayMachine:
    gateway = a_gateway(g.GatewayLimits(), ready=False)
    hear(gateway, m.Opened(7, 1, awaits_start=True))
    return gateway


def test_the_word_to_begin_follows_what_subtask_ready_has_sent() -> None:  # H66
    gateway = an_open_gateway()
    assert sent(gateway.handle(g.EventSubmitted(1, b"rule"), 1.0)) == [m.EventMessage(7, 1, b"rule")]
    assert sent(gateway.handle(g.EventSubmitted(2, b"loose", loss_tolerant=True), 1.0)) == [
        m.EventMessage(7, 2, b"loose")
    ]
    assert sent(gateway.handle(g.ReadyAnnounced(), 1.0)) == [m.StartProcessing(7, 3)]
    assert sent(gateway.handle(g.EventSubmitted(3, b"later"), 1.0)) == [m.EventMessage(7, 4, b"later")]


def test_an_operator_that_does_not_wait_is_not_told_to_begin() -> None:  # H66
    gateway = a_gateway(ready=False)
    hear(gateway, m.Opened(7, 1))
    assert gateway.handle(g.ReadyAnnounced(), 1.0) == []


def test_an_operator_that_opens_after_it_was_announced_is_told_to_begin_immediately() -> None:  # H66
    gateway = a_gateway()
    assert sent(hear(gateway, m.Opened(7, 1, awaits_start=True)))[0] == m.StartProcessing(7, 1)


def test_the_word_to_begin_gets_lost_with_no_connection() -> None:  # H66, H24
    gateway = an_open_gateway()
    gateway.handle(g.EventSubmitted(1, b"rule"), 1.0)
    gateway.handle(ConnectionLost(), 1.0)
    assert gateway.handle(g.ReadyAnnounced(), 1.0) == [g.ReportSuspected("its connection is gone")]
    again = [m.EventMessage(7, 1, b"rule"), m.StartProcessing(7, 2), m.Confirm(7, 1)]
    assert sent(gateway.handle(ConnectionAttached(0), 2.0)) == again
    gateway.handle(ConnectionLost(), 3.0)
    assert sent(gateway.handle(ConnectionAttached(2), 4.0)) == [m.Confirm(7, 1)]


def test_the_word_to_begin_overtakes_no_event_that_a_checkpoint_holds() -> None:  # H66, H41
    gateway = an_open_gateway()
    gateway.handle(g.CloseRequested(5), 1.0)
    gateway.handle(g.CutReached(5), 1.0)
    assert gateway.handle(g.EventSubmitted(1, b"rule"), 1.0) == []
    assert sent(gateway.handle(g.ReadyAnnounced(), 1.0)) == []
    gateway.check_invariants()
    hear(gateway, m.ClosedForCheckpoint(7, 2, 5))
    effects = hear(gateway, m.CheckpointAcknowledged(7, 3, 5, b"", (), ()))
    assert sent(effects)[:2] == [m.EventMessage(7, 3, b"rule"), m.StartProcessing(7, 4)]


def test_no_clock_runs_for_the_word_to_begin() -> None:  # H66, H25
    gateway = an_open_gateway()
    gateway.handle(g.ReadyAnnounced(), 1.0)
    assert gateway.next_deadline() is None


def test_an_attempt_that_is_over_is_not_told_to_begin() -> None:  # H66, H26
    gateway = an_open_gateway()
    gateway.handle(g.AttemptIsOver("subtask_ready has failed"), 1.0)
    assert gateway.handle(g.ReadyAnnounced(), 2.0) == []


def test_the_operator_meets_the_word_to_begin_after_the_events_and_once() -> None:  # H66, H22
    subtask = SubtaskMachine(7, 2, WIDE)
    subtask.handle(ConnectionAttached(0), 0.0)
    opened = subtask.handle(s.OperatorOpened(awaits_start=True), 0.0)
    assert opened == [s.SendToCoordinator(m.Opened(7, 1, awaits_start=True))]
    items = [*hear_down(subtask, m.EventMessage(7, 1, b"rule")), *hear_down(subtask, m.StartProcessing(7, 2))]
    mailbox = [effect.item for effect in items if isinstance(effect, s.PutInMailbox)]
    assert mailbox == [s.MailboxEvent(b"rule"), s.MailboxStart()]
    assert not any(isinstance(effect, s.PutInMailbox) for effect in hear_down(subtask, m.StartProcessing(7, 2)))
    with pytest.raises(RemoteProtocolError, match="begin with its records arrived twice"):
        hear_down(subtask, m.StartProcessing(7, 3))


def test_a_failed_operator_takes_the_word_to_begin_without_harm() -> None:  # H66, H23
    subtask = SubtaskMachine(7, 2, WIDE)
    subtask.handle(ConnectionAttached(0), 0.0)
    subtask.handle(s.OperatorOpened(awaits_start=True), 0.0)
    subtask.handle(s.OperatorFinished("boom", b""), 0.0)
    assert not any(isinstance(effect, s.PutInMailbox) for effect in hear_down(subtask, m.StartProcessing(7, 1)))
