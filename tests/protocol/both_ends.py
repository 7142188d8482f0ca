# SPDX-License-Identifier: Apache-2.0

"""Both machines of an attempt and a channel that delays, breaks and reconnects, all driven by one seed.

The channel behaves as badly as a real network may. A connection carries frames in order and in bursts. It may die at
any moment and lose everything in flight, in both directions. The two sides notice that at different times. Independent
records on both sides say what must have arrived.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from protocol.errors import GatewayFull
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine
from protocol.ids import ExecutionAttempt
from protocol.streams import ConnectionAttached, ConnectionLost, RefuseMessage
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire.messages import DownMessage, HeldEvent, UpMessage

__all__ = ["ATTEMPT", "World"]

ATTEMPT = ExecutionAttempt("words", 2, 1, 77)
SENT_DOWN_MAX = 10
"""The limit of unsettled events to the subtask; the machine leaves this limit to its shell (H27)."""


class World:
    """Both ends, the channel between them, and the records of what was sent."""

    def __init__(self, seed: int, held: tuple[HeldEvent, ...] = (), events_sent: int = 0) -> None:
        """Start both ends; ``held`` and ``events_sent`` come from the snapshot that the attempt restores."""
        self.random = random.Random(seed)
        self.now = 0.0
        self.gateway = GatewayMachine(ATTEMPT, g.GatewayLimits(1e6, 1e6, upward_events_max=8, upward_bytes_max=200))
        self.subtask = SubtaskMachine(77, 2, s.SubtaskLimits(8, 200, 1e6), held, events_sent)
        self.connected = False
        self.down: deque[DownMessage] = deque()
        self.up: deque[UpMessage] = deque()
        # The coordinator's side.
        self.submitted: list[bytes] = []  # accepted by the gateway, in order
        self.confirmed: list[int] = []
        self.failed: list[int] = []
        self.heard: list[bytes] = []  # delivered to the coordinator, in order
        self.to_take: list[int] = []
        self.to_answer: list[int] = []
        self.asked_back: list[int] = []  # request ids that were resolved at the subtask
        self.next_event = 0
        self.reports: list[g.GatewayEffect] = []
        # The subtask's side.
        self.mailbox: deque[s.MailboxItem] = deque()
        self.arrived: list[bytes] = []  # events that reached the mailbox, in order
        self.sent_up: list[bytes] = [event.payload for event in held]  # accepted by the subtask, in order
        self.held = held  # restored events
        self.refused: list[str] = []
        self.next_up = 0
        self.next_request = 0
        self.ended: list[str] = []

    # --- minimal shells ---------------------------------------------------------------------------------

    def drive_gateway(self, input: g.GatewayInput) -> None:
        self.run_gateway(self.gateway.handle(input, self.now))

    def drive_subtask(self, input: s.SubtaskInput) -> None:
        self.run_subtask(self.subtask.handle(input, self.now))

    def run_gateway(self, effects: Sequence[g.GatewayEffect]) -> None:
        self.gateway.check_invariants()
        for effect in effects:
            match effect:
                case g.SendToAttempt(message):
                    if self.connected:
                        self.down.append(message)
                case g.ConfirmEvent(event_id):
                    self.confirmed.append(event_id)
                    # H23: a confirmed event is in the mailbox at this moment.
                    assert event_id < len(self.arrived), "confirmed before it arrived"
                case g.FailEvent(event_id, _):
                    self.failed.append(event_id)
                case g.DeliverEvent(seq, payload, sender):
                    self.check_restored(sender, is_request=False)
                    self.heard.append(payload)
                    self.to_take.append(seq)
                case g.DeliverRequest(seq, request_id, payload, sender):
                    self.check_restored(sender, is_request=request_id is None)
                    self.heard.append(payload)
                    self.to_take.append(seq)
                    if request_id is not None:
                        self.to_answer.append(request_id)
                case _:
                    self.reports.append(effect)

    def check_restored(self, sender: int | None, *, is_request: bool) -> None:
        """A restored item names the subtask that first sent it (H52), and a request stays a request (H73)."""
        place = len(self.heard)
        restored = self.held[place] if place < len(self.held) else None
        assert sender == (None if restored is None else restored.sender)
        assert is_request == (restored is not None and restored.is_request)

    def run_subtask(self, effects: Sequence[s.SubtaskEffect]) -> None:
        self.subtask.check_invariants()
        for effect in effects:
            match effect:
                case s.SendToCoordinator(message):
                    if self.connected:
                        self.up.append(message)
                case s.PutInMailbox(item):
                    self.mailbox.append(item)
                    if isinstance(item, s.MailboxEvent):
                        self.arrived.append(item.payload)
                case s.ResolveRequest(request_id, _, _):
                    self.asked_back.append(request_id)
                case s.EndAttempt(reason):
                    self.ended.append(reason)
                case s.RoomAvailable():
                    pass
                case RefuseMessage(why):
                    self.refused.append(why)
                case _:
                    raise AssertionError(f"not expected: {effect}")

    # --- what can happen ----------------------------------------------------------------------------------

    def connect(self) -> None:
        """Shake hands: each side reports what it has received, and notices that its old connection is gone."""
        self.down.clear()
        self.up.clear()
        self.connected = True
        to_gateway, to_subtask = self.subtask.resume_seq, self.gateway.resume_seq
        self.drive_gateway(ConnectionAttached(to_gateway))
        self.drive_subtask(ConnectionAttached(to_subtask))

    def lose(self) -> None:
        """Lose everything in flight. Each side notices by itself, or only at the next connection."""
        self.connected = False
        self.down.clear()
        self.up.clear()
        if self.random.random() < 0.7:
            self.drive_gateway(ConnectionLost())
        if self.random.random() < 0.7:
            self.drive_subtask(ConnectionLost())

    def send_down(self) -> None:
        if self.next_event - len(self.confirmed) - len(self.failed) >= SENT_DOWN_MAX:
            return
        payload = b"d%d" % self.next_event
        self.drive_gateway(g.EventSubmitted(self.next_event, payload, self.random.random() < 0.1))
        self.next_event += 1
        self.submitted.append(payload)

    def send_up(self) -> None:
        payload = b"u%d" % self.next_up
        try:
            if self.random.random() < 0.2:
                self.drive_subtask(s.RequestSubmitted(self.next_request, payload))
                self.next_request += 1
            else:
                self.drive_subtask(s.EventSubmitted(payload))
        except GatewayFull:
            return
        self.next_up += 1
        self.sent_up.append(payload)

    def carry_down(self) -> None:
        burst = [self.down.popleft() for _ in range(min(len(self.down), self.random.randint(1, 4)))]
        self.run_subtask(self.subtask.handle_batch(burst, self.now))

    def carry_up(self) -> None:
        burst = [self.up.popleft() for _ in range(min(len(self.up), self.random.randint(1, 4)))]
        self.run_gateway(self.gateway.handle_batch(burst, self.now))

    def take(self) -> None:
        if self.to_take:
            taken = self.random.randint(1, len(self.to_take))
            seq = self.to_take[taken - 1]
            del self.to_take[:taken]
            self.drive_gateway(g.ItemTaken(seq))
        if self.to_answer:
            self.drive_gateway(g.AnswerSubmitted(self.to_answer.pop(0), "", b"answer"))

    def settle(self) -> None:
        """Deliver everything in flight, on a connection that does not break."""
        self.connect()
        while self.down or self.up or self.to_take or self.to_answer:
            self.carry_down()
            self.carry_up()
            self.take()

    def check_order(self) -> None:
        """Check that the received items are a prefix of the sent ones, in both directions (H22, H30)."""
        assert self.arrived == self.submitted[: len(self.arrived)]
        assert self.heard == self.sent_up[: len(self.heard)]
        assert self.confirmed == list(range(len(self.confirmed)))
