# SPDX-License-Identifier: Apache-2.0

"""Requests whose asker waits no more: each gives its place back, and gets one answer if it had left (H85)."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from protocol.errors import GatewayFull, RemoteProtocolError
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine
from protocol.ids import ExecutionAttempt
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire import messages as m
from tests.protocol.refusals import unchanged
from tests.protocol.test_gateway import a_gateway
from tests.protocol.test_gateway import hear as hear_up
from tests.protocol.test_gateway import sent as sent_down
from tests.protocol.test_subtask import a_subtask, hear, sent
from tests.protocol.test_unheld_checkpoints import an_open_gateway, tell

ATTEMPT = ExecutionAttempt("words", 2, 0, 7)


# --- the subtask ----------------------------------------------------------------------------------------------------


def test_abandoning_a_request_that_has_left_tells_the_coordinator_and_its_answer_frees_the_place() -> None:
    subtask = a_subtask()
    for request_id in (1, 2, 3):
        subtask.handle(s.RequestSubmitted(request_id, b"?"), 1.0)
    hear(subtask, m.Confirm(7, 4))
    assert sent(subtask.handle(s.RequestAbandoned(2), 1.0)) == [m.RequestCancelled(7, 5, 2)]
    with pytest.raises(GatewayFull, match=r"3 open requests; .* raise upward_events_max"):
        subtask.handle(s.RequestSubmitted(4, b"?"), 1.0)
    effects = hear(subtask, m.AnswerMessage(7, 1, 2, "nobody waits", b""))
    assert s.CapacityAvailable() in effects
    assert not any(isinstance(effect, s.RefuseMessage) for effect in effects)  # a late answer is not an error
    assert sent(subtask.handle(s.RequestSubmitted(4, b"?"), 1.0)) == [m.RequestMessage(7, 6, 4, b"?")]


def test_a_held_request_that_is_abandoned_never_leaves_and_is_in_no_later_snapshot() -> None:  # H85, H31, H73
    subtask = a_subtask()
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    subtask.handle(s.RequestSubmitted(1, b"one"), 1.0)
    subtask.handle(s.RequestSubmitted(2, b"two"), 1.0)
    assert subtask.handle(s.RequestAbandoned(1), 1.0) == []
    assert subtask.statistics().open_requests == 1
    assert subtask.statistics().held_bytes == 3
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    snapshot, request = sent(subtask.handle(s.SnapshotTaken(5, b""), 1.0))[:2]
    assert isinstance(snapshot, m.CheckpointAcknowledged)
    assert snapshot.held == (m.HeldEvent(2, b"two", is_request=True),)
    assert request == m.RequestMessage(7, 4, 2, b"two")


def test_taking_a_held_request_back_lets_others_use_its_capacity() -> None:  # H27
    subtask = a_subtask()
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    for request_id in (1, 2, 3):
        subtask.handle(s.RequestSubmitted(request_id, b"?"), 1.0)
    with pytest.raises(GatewayFull):
        subtask.handle(s.EventSubmitted(b"e"), 1.0)
    assert subtask.handle(s.RequestAbandoned(3), 1.0) == [s.CapacityAvailable()]
    assert subtask.handle(s.EventSubmitted(b"e"), 1.0) == []


def test_abandoning_an_answered_request_does_nothing() -> None:
    subtask = a_subtask()
    subtask.handle(s.RequestSubmitted(1, b"?"), 1.0)
    hear(subtask, m.AnswerMessage(7, 1, 1, "", b"!"))
    with unchanged(subtask):
        assert subtask.handle(s.RequestAbandoned(1), 1.0) == []


def test_a_cancellation_is_sent_again_after_a_reconnect() -> None:  # H24
    subtask = a_subtask()
    subtask.handle(s.RequestSubmitted(1, b"?"), 1.0)
    subtask.handle(ConnectionLost(), 1.0)
    assert subtask.handle(s.RequestAbandoned(1), 1.0) == []
    again = sent(subtask.handle(ConnectionAttached(2), 2.0))
    assert again == [m.RequestCancelled(7, 3, 1)]


def test_abandoning_after_the_operator_has_ended_does_nothing() -> None:
    subtask = a_subtask()
    subtask.handle(s.RequestSubmitted(1, b"?"), 1.0)
    subtask.handle(s.OperatorFinished("", b""), 1.0)
    with unchanged(subtask):
        assert subtask.handle(s.RequestAbandoned(1), 1.0) == []
    hear(subtask, m.AttemptEnded(7, "over"))
    with unchanged(subtask):
        assert subtask.handle(s.RequestAbandoned(1), 1.0) == []


# --- the gateway ----------------------------------------------------------------------------------------------------


def test_the_coordinator_is_told_after_the_request_and_still_answers_once() -> None:
    gateway = a_gateway()
    hear_up(gateway, m.RequestMessage(7, 1, 5, b"?"))
    effects = hear_up(gateway, m.RequestCancelled(7, 2, 5))
    assert effects[0] == g.DeliverCancellation(5)
    assert g.SendToAttempt(m.Confirm(7, 2)) not in effects  # the request before it is not taken yet
    assert sent_down(gateway.handle(g.AnswerSubmitted(5, "nobody waits", b""), 1.0)) == [
        m.AnswerMessage(7, 1, 5, "nobody waits", b"")
    ]


def test_a_cancellation_that_crosses_the_answer_is_dropped() -> None:
    gateway = a_gateway()
    hear_up(gateway, m.RequestMessage(7, 1, 5, b"?"))
    gateway.handle(g.ItemTaken(1), 1.0)
    gateway.handle(g.AnswerSubmitted(5, "", b"!"), 1.0)
    effects = hear_up(gateway, m.RequestCancelled(7, 2, 5))
    assert effects == [g.SendToAttempt(m.Confirm(7, 2))]


def test_a_cancellation_before_readiness_follows_its_request_when_that_is_delivered() -> None:  # H10
    gateway = a_gateway(ready=False)
    hear_up(gateway, m.Opened(7, 1))
    assert hear_up(gateway, m.RequestMessage(7, 2, 5, b"?")) == []
    assert not [e for e in hear_up(gateway, m.RequestCancelled(7, 3, 5)) if isinstance(e, g.DeliverCancellation)]
    effects = gateway.handle(g.ReadyAnnounced(), 1.0)
    assert effects[:2] == [g.DeliverRequest(2, 5, b"?"), g.DeliverCancellation(5)]


def test_a_cancellation_of_a_request_that_was_put_aside_follows_it() -> None:  # H79
    gateway = an_open_gateway(1)
    gateway.handle(g.CutReached(5), 0.0)
    tell(gateway, m.EventMessage(7, 2, b"recorded"))
    gateway.handle(g.ItemTaken(2), 0.0)
    assert tell(gateway, m.RequestMessage(7, 3, 9, b"aside")) == []
    assert tell(gateway, m.RequestCancelled(7, 4, 9)) == []
    effects = tell(gateway, m.CheckpointAcknowledged(7, 5, 5, b"", (), (2,)))
    delivered = [e for e in effects if isinstance(e, (g.DeliverRequest, g.DeliverCancellation))]
    assert delivered == [g.DeliverRequest(3, 9, b"aside", None, 5), g.DeliverCancellation(9)]


def test_a_peer_that_repeats_a_cancellation_tells_the_coordinator_once() -> None:
    gateway = a_gateway()
    hear_up(gateway, m.RequestMessage(7, 1, 5, b"?"))
    hear_up(gateway, m.RequestCancelled(7, 2, 5))
    for seq, request_id in ((3, 5), (4, 6), (5, 5)):
        effects = hear_up(gateway, m.RequestCancelled(7, seq, request_id))
        assert not any(isinstance(effect, g.DeliverCancellation) for effect in effects)


def test_cancelled_requests_still_count_against_the_window_of_a_hostile_peer() -> None:  # H27
    gateway = a_gateway()
    for seq in (1, 3, 5):
        hear_up(gateway, m.RequestMessage(7, seq, seq, b"?"))
        gateway.handle(g.ItemTaken(seq), 1.0)
        hear_up(gateway, m.RequestCancelled(7, seq + 1, seq))
    with pytest.raises(RemoteProtocolError, match="more open requests than its window"):
        hear_up(gateway, m.RequestMessage(7, 7, 7, b"?"))


# --- both ends ------------------------------------------------------------------------------------------------------


class Pair:
    """A subtask, its gateway and a coordinator, with everything between them on its way.

    ``answers``: what reached the subtask, by request. ``taken_back``: the requests that were abandoned while they were
    held. ``abandoned``: those that were abandoned in all.
    """

    WINDOW = 4

    def __init__(self, dice: random.Random, *, hold_events: bool) -> None:
        self.dice = dice
        self.hold_events = hold_events
        self.subtask = SubtaskMachine(7, 2, s.SubtaskLimits(self.WINDOW, 1000, 99.0), hold_events=hold_events)
        limits = g.GatewayLimits(upward_events_max=self.WINDOW)
        self.gateway = GatewayMachine(ATTEMPT, limits, hold_events=hold_events)
        self.up: deque[Any] = deque()
        self.down: deque[Any] = deque()
        self.mailbox: deque[s.MailboxItem] = deque()
        self.coordinator: deque[Any] = deque()  # its mailbox
        self.decided: deque[Any] = deque()
        self.deferred: list[int] = []
        self.answers: dict[int, bytes] = {}
        self.asked: set[int] = set()
        self.waiting: set[int] = set()
        self.abandoned: set[int] = set()
        self.taken_back: set[int] = set()
        self.checkpoint_id = 0
        self.in_checkpoint = False
        self.attached = False
        self.attach()
        self.do(self.subtask, s.OperatorOpened())
        self.do(self.gateway, g.ReadyAnnounced())

    def do(self, machine: Any, *inputs: Any) -> None:
        for input in inputs:
            effects = machine.handle(input, 0.0)
            machine.check_invariants()
            for effect in effects:
                self.carry_out(effect)
        while self.decided:  # what the tracker decides comes after the effects that it follows from
            self.do(self.gateway, self.decided.popleft())

    def carry_out(self, effect: Any) -> None:
        match effect:
            case s.SendToCoordinator(message):
                self.up.append(message)
            case g.SendToAttempt(message):
                self.down.append(message)
            case s.PutInMailbox(item):
                self.mailbox.append(item)
            case s.ResolveRequest(request_id, error, payload):
                assert request_id not in self.answers, f"request {request_id} has two answers"
                assert request_id not in self.taken_back, f"request {request_id} was never sent, and has an answer"
                assert payload == (b"" if error else b"to %d" % request_id)
                assert not error or request_id in self.abandoned
                self.answers[request_id] = payload
                self.waiting.discard(request_id)
            case g.DeliverRequest() | g.DeliverCancellation() | g.DeliverEvent():
                self.coordinator.append(effect)
            case g.ReportClosed(checkpoint_id):
                self.decided.append(g.CutReached(checkpoint_id))
            case g.ReportAcknowledged(checkpoint_id, _, held, _):
                text = [int(event.payload) for event in held]
                assert not self.taken_back & set(text), "a checkpoint holds a request that was taken back before"
                self.decided.append(g.CheckpointOver(checkpoint_id, g.CheckpointOutcome.COMPLETED))
                self.in_checkpoint = False
            case DropConnection(why):
                raise AssertionError(why)
            case s.RefuseMessage(why):
                raise AssertionError(why)

    # --- what may happen ---

    def attach(self) -> None:
        self.attached = True
        received = self.gateway.resume_seq, self.subtask.resume_seq
        self.do(self.gateway, ConnectionAttached(received[1]))
        self.do(self.subtask, ConnectionAttached(received[0]))

    def reconnect(self) -> None:
        """Lose the connection, with all that is on its way, and perhaps get another."""
        if self.attached:
            self.up.clear()
            self.down.clear()
            self.attached = False
            self.do(self.gateway, ConnectionLost())
            self.do(self.subtask, ConnectionLost())
        else:
            self.attach()

    def ask(self) -> None:
        request_id = len(self.asked) + 1
        try:
            self.do(self.subtask, s.RequestSubmitted(request_id, b"%d" % request_id))
        except GatewayFull:
            return
        self.asked.add(request_id)
        self.waiting.add(request_id)

    def abandon(self) -> None:
        if self.waiting:
            request_id = self.dice.choice(sorted(self.waiting))
            self.waiting.remove(request_id)
            self.abandoned.add(request_id)
            self.do(self.subtask, s.RequestAbandoned(request_id))
            if request_id not in self.subtask._outbound.open_requests() and request_id not in self.answers:
                self.taken_back.add(request_id)

    def read_up(self) -> None:
        if self.up:
            self.do(self.gateway, g.MessageReceived(self.up.popleft()))

    def read_down(self) -> None:
        if self.down:
            self.do(self.subtask, s.MessageReceived(self.down.popleft()))

    def handle_mail(self) -> None:
        if self.mailbox:
            item = self.mailbox.popleft()
            if isinstance(item, s.MailboxBarrier) and self.subtask.wants_snapshot(item.checkpoint_id):
                self.do(self.subtask, s.SnapshotTaken(item.checkpoint_id, b""))

    def coordinate(self) -> None:
        if not self.coordinator:
            return
        match self.coordinator.popleft():
            case g.DeliverRequest(seq, request_id, _):
                assert request_id is not None
                if self.dice.random() < 0.3:
                    self.do(self.gateway, g.AnswerSubmitted(request_id, "", b"to %d" % request_id))
                else:
                    self.deferred.append(request_id)
                self.do(self.gateway, g.ItemTaken(seq))
            case g.DeliverCancellation(request_id):
                if request_id in self.deferred:
                    self.deferred.remove(request_id)
                    self.do(self.gateway, g.AnswerSubmitted(request_id, "nobody waits", b""))

    def settle(self) -> None:
        if self.deferred:
            request_id = self.deferred.pop(self.dice.randrange(len(self.deferred)))
            self.do(self.gateway, g.AnswerSubmitted(request_id, "", b"to %d" % request_id))

    def begin_checkpoint(self) -> None:
        if not self.in_checkpoint:
            self.in_checkpoint = True
            self.checkpoint_id += 1
            self.do(self.gateway, (g.CloseRequested if self.hold_events else g.CutReached)(self.checkpoint_id))

    def drain(self) -> None:
        """Abandon everything, and let everything arrive; the coordinator answers nothing by itself."""
        if not self.attached:
            self.attach()
        while self.waiting:
            self.abandon()
        while self.up or self.down or self.mailbox or self.coordinator:
            for step in (self.read_up, self.coordinate, self.read_down, self.handle_mail):
                step()


@pytest.mark.parametrize("hold_events", [True, False])
@pytest.mark.parametrize("seed", range(100))
def test_the_whole_window_is_free_again_when_nobody_waits_any_more(seed: int, hold_events: bool) -> None:  # H85, H27
    """Random requests, time-outs, answers, losses of the connection and checkpoints; the seed is the test's id."""
    dice = random.Random(seed)
    pair = Pair(dice, hold_events=hold_events)
    quick = [pair.read_up, pair.read_down, pair.handle_mail, pair.coordinate]
    actions = [*quick, *quick, pair.ask, pair.ask, pair.abandon, pair.settle, pair.begin_checkpoint]
    for _ in range(600):
        dice.choice(actions)()
        if dice.random() < (0.02 if pair.attached else 0.2):
            pair.reconnect()
    pair.drain()
    figures = pair.subtask.statistics()
    assert (figures.open_requests, figures.held_events, figures.unconfirmed_events) == (0, 0, 0)
    assert pair.deferred == []
    assert set(pair.answers) == pair.asked - pair.taken_back
    for number in range(pair.WINDOW):
        pair.do(pair.subtask, s.RequestSubmitted(10_000 + number, b"%d" % (10_000 + number)))
    assert len(pair.asked) > 2 * pair.WINDOW
    assert pair.abandoned
