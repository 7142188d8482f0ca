# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.load.endpoints``: subtasks that number what they send, and check what they receive.

They are those of ``benchmarks.many_endpoints``, many in one process on one selector. A second thread registers new
attempts, so the others are served meanwhile. A subtask answers each event, and sends a further one after every second
event. Its snapshot holds its place in both directions, and a new attempt continues there.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import deque
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from benchmarks.many_endpoints import Endpoints, Subtask, main, say
from protocol.errors import AttemptOver, GatewayFull
from protocol.subtask.types import MailboxBarrier, MailboxEvent
from protocol.wire.codec import decode_event, encode_event
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity
from tests.load.checker import DOWN, UP, Sequence, Tally

UNASKED = -1
"""The answered event's number in an event that answers none."""
RESET = struct.pack("ii", 1, 0)
"""The value of ``SO_LINGER`` with which a close resets the connection."""


class End(Subtask):
    """One attempt. ``waiting`` are the answers that found no capacity yet; they are part of its snapshot."""

    def __init__(self, endpoint: TaskEndpoint, identity: TaskIdentity, tally: Tally) -> None:
        super().__init__(endpoint, identity)
        self.sent = 0
        self.received = Sequence(tally, f"subtask {self.subtask}, down")
        self.waiting: deque[int] = deque()
        self._tally = tally

    def restore(self) -> None:
        """Register, and restore what the checkpoint says."""
        for state in self.begin().states:
            self.sent, expected, waiting = json.loads(state.state)
            self.received.rewind(expected)
            self.waiting.extend(waiting)

    def state(self) -> bytes:
        return json.dumps([self.sent, self.received.expected, list(self.waiting)]).encode()

    def take_event(self, payload: bytes) -> None:
        whose, direction, number = decode_event(payload)
        if (whose, direction) != (self.subtask, DOWN):
            self._tally.fault(f"subtask {self.subtask} has received an event {direction} of subtask {whose}")
            return
        self.received.take(number)
        self.waiting.append(number)
        if number % 2:
            self.waiting.append(UNASKED)

    def send_waiting(self) -> None:
        """Send what waits, as long as there is capacity."""
        while self.waiting and self.send(self.waiting[0]):
            self.waiting.popleft()

    def send(self, answered: int) -> bool:
        """Send an event. False if there is no capacity, or the attempt is over."""
        try:
            self.submit_event_nowait(encode_event([self.subtask, UP, self.sent, answered]))
        except (GatewayFull, AttemptOver):
            return False
        self.sent += 1
        return True


class LoadEndpoints(Endpoints):
    """All subtasks of this process. Those of a flooding neighbour send as much as they may."""

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__(task)
        self._tally = Tally()
        self._flooding: bool = task["floods"]
        self._over_early: dict[int, str] = {}
        self._to_register: SimpleQueue[End | None] = SimpleQueue()
        self._registered: SimpleQueue[End] = SimpleQueue()
        self._bell, self._rings = socket.socketpair()
        self._selector.register(self._rings, 1, self._adopt_registered)
        self._registering = threading.Thread(target=self._register_all, name="registering", daemon=True)

    def run(self) -> None:
        self._registering.start()
        try:
            super().run()
        finally:
            self._to_register.put(None)
            self._bell.close()
            self._rings.close()

    def act(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "open":
                for task_attempt_id, number, attempt in command["tasks"]:
                    identity = TaskIdentity(task_attempt_id, number, self._task["stage_id"], attempt)
                    self._to_register.put(End(self._endpoint, identity, self._tally))
            case "kill":
                self._kill(command["number"])
                say(killed=command["number"])
            case "calm":
                self._flooding = False
                say(calm=True)
            case "report":
                say(tally=asdict(self._tally), ends=self._ends() if command["ends"] else {})

    def _ends(self) -> dict[int, tuple[int, int]]:
        """Return how many each subtask has sent and received. No kill is in progress."""
        for number, reason in self._over_early.items():
            self._tally.fault(f"subtask {number} has ended: {reason}")
            del self._subtasks[number]
        self._over_early.clear()
        ends = (end for end in self._subtasks.values() if isinstance(end, End))
        return {end.subtask: (end.sent, end.received.expected) for end in ends}

    def _kill(self, number: int) -> None:
        """End this attempt as a kill of its process would: its connection is reset, and it says nothing."""
        end = self._subtasks.pop(number)
        connection = end.connection
        if self._over_early.pop(number, None) is None and connection is not None:
            self._selector.unregister(connection.sock)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        end.close()

    def _register_all(self) -> None:
        while (end := self._to_register.get()) is not None:
            try:
                end.restore()
            except Exception as error:
                self._tally.fault(f"subtask {end.subtask} could not register: {error!r}")
                end.close()
            else:
                self._registered.put(end)
                self._bell.send(b".")

    def _adopt_registered(self, events: int) -> None:
        for _ in self._rings.recv(4096):
            end = self._registered.get()
            self.adopt(end)
            if end.over is None:
                end.operator_opened(awaits_start=False)
                self.empty_mailbox(end)

    def _serve(self, subtask: Subtask, sock: socket.socket, events: int) -> None:
        if self._subtasks.get(subtask.subtask) is subtask:  # it may have been killed in this turn
            super()._serve(subtask, sock, events)

    def empty_mailbox(self, subtask: Subtask) -> None:
        assert isinstance(subtask, End)
        while (item := subtask.take()) is not None:
            if isinstance(item, MailboxEvent):
                subtask.take_event(item.payload)
            elif isinstance(item, MailboxBarrier) and subtask.wants_snapshot(item.checkpoint_id):
                subtask.snapshot_taken(item.checkpoint_id, subtask.state())
        subtask.send_waiting()
        while self._flooding and subtask.send(UNASKED):
            """Send the next one."""

    def ended(self, subtask: Subtask) -> None:
        """The sidecar has ended it. That is right only if it is about to be killed."""
        self._over_early[subtask.subtask] = subtask.over or ""


if __name__ == "__main__":
    main(LoadEndpoints)
