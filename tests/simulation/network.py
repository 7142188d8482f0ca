"""Connections that break: two ordered queues, cut at any point."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from protocol.messages import DownMessage, UpMessage


@dataclass
class Connection:
    """Between one task and the server. Each end notices by itself that the other is gone, after what came before."""

    connection_id: int
    task_attempt_id: int
    up: deque[UpMessage] = field(default_factory=deque)
    down: deque[DownMessage] = field(default_factory=deque)
    task_gone: bool = False  # nothing more will be written by this end, or read
    server_gone: bool = False
    task_knows: bool = False  # this end has noticed that the connection is over
    server_knows: bool = False

    def send_up(self, message: UpMessage) -> None:
        if not self.task_gone and not self.server_gone:
            self.up.append(message)

    def send_down(self, message: DownMessage) -> None:
        if not self.task_gone and not self.server_gone:
            self.down.append(message)

    def break_now(self, random: Random) -> None:
        """Both ends are cut off; of what is on the way, some of the beginning still arrives."""
        self.task_gone = self.server_gone = True
        for queue in (self.up, self.down):
            for _ in range(random.randint(0, len(queue))):
                queue.pop()

    def close_by_task(self, *, flush: bool) -> None:
        self.task_gone = self.task_knows = True
        self.down.clear()
        if not flush:
            self.up.clear()

    def close_by_server(self) -> None:
        self.server_gone = self.server_knows = True
        self.up.clear()
