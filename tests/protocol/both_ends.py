# SPDX-License-Identifier: Apache-2.0

"""Both machines of an attempt, and a connection between them that a test carries, breaks and replaces."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine
from protocol.ids import ExecutionAttempt
from protocol.streams import ConnectionAttached, ConnectionLost, RefuseMessage
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire.messages import DownMessage, HeldEvent, UpMessage

ATTEMPT = ExecutionAttempt("words", 2, 1, 77)


class World:
    """Both ends and what each has reported. A connection carries frames in order, in bursts that a seed decides."""

    def __init__(self, seed: int, held: tuple[HeldEvent, ...] = ()) -> None:
        """Start both ends; ``held`` comes from the snapshot that the attempt restores."""
        self.random = random.Random(seed)
        self.gateway = GatewayMachine(ATTEMPT, g.GatewayLimits(1e6, 1e6, upward_events_max=8, upward_bytes_max=200))
        self.subtask = SubtaskMachine(77, 2, s.SubtaskLimits(8, 200, 1e6), held)
        self.held = held
        self.connected = False
        self.down: deque[DownMessage] = deque()
        self.up: deque[UpMessage] = deque()
        self.heard: list[bytes] = []  # delivered to the coordinator, in order
        self.to_take: list[int] = []
        self.to_answer: list[int] = []
        self.reports: list[g.GatewayEffect] = []
        self.mailbox: deque[s.MailboxItem] = deque()
        self.asked_back: list[int] = []  # request ids that were resolved at the subtask
        self.refused: list[str] = []

    def drive_gateway(self, input: g.GatewayInput) -> None:
        self.run_gateway(self.gateway.handle(input, 0.0))

    def drive_subtask(self, input: s.SubtaskInput) -> None:
        self.run_subtask(self.subtask.handle(input, 0.0))

    def run_gateway(self, effects: Sequence[g.GatewayEffect]) -> None:
        self.gateway.check_invariants()
        for effect in effects:
            match effect:
                case g.SendToAttempt(message):
                    self.down.extend([message] if self.connected else [])
                case g.DeliverEvent(seq, payload, sender):
                    self.hear(seq, payload, sender, is_request=False)
                case g.DeliverRequest(seq, request_id, payload, sender):
                    self.hear(seq, payload, sender, is_request=request_id is None)
                    self.to_answer += [] if request_id is None else [request_id]
                case _:
                    self.reports.append(effect)

    def hear(self, seq: int, payload: bytes, sender: int | None, *, is_request: bool) -> None:
        """A restored item names the subtask that first sent it (H52), and a request stays a request (H73)."""
        place = len(self.heard)
        restored = self.held[place] if place < len(self.held) else None
        assert sender == (None if restored is None else restored.sender)
        assert is_request == (restored is not None and restored.is_request)
        self.heard.append(payload)
        self.to_take.append(seq)

    def run_subtask(self, effects: Sequence[s.SubtaskEffect]) -> None:
        self.subtask.check_invariants()
        for effect in effects:
            match effect:
                case s.SendToCoordinator(message):
                    self.up.extend([message] if self.connected else [])
                case s.PutInMailbox(item):
                    self.mailbox.append(item)
                case s.ResolveRequest(request_id, _, _):
                    self.asked_back.append(request_id)
                case RefuseMessage(why):
                    self.refused.append(why)
                case _:
                    raise AssertionError(f"not expected: {effect}")

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

    def carry_down(self) -> None:
        burst = [self.down.popleft() for _ in range(min(len(self.down), self.random.randint(1, 4)))]
        self.run_subtask(self.subtask.handle_batch(burst, 0.0))

    def carry_up(self) -> None:
        burst = [self.up.popleft() for _ in range(min(len(self.up), self.random.randint(1, 4)))]
        self.run_gateway(self.gateway.handle_batch(burst, 0.0))

    def carry(self) -> None:
        while self.down or self.up:
            self.carry_down()
            self.carry_up()

    def settle(self) -> None:
        """Deliver everything in flight on a new connection; the coordinator takes and answers everything."""
        self.connect()
        while self.down or self.up or self.to_take or self.to_answer:
            self.carry()
            if self.to_take:
                self.drive_gateway(g.ItemTaken(self.to_take[-1]))
                self.to_take.clear()
            if self.to_answer:
                self.drive_gateway(g.AnswerSubmitted(self.to_answer.pop(0), "", b"answer"))
