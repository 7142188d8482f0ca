# SPDX-License-Identifier: Apache-2.0

"""Connections that break: two ordered queues, cut at any point, slow, or blocked for a while."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Protocol

from protocol.wire.messages import Downward, UpMessage


class Clock(Protocol):
    @property
    def now(self) -> float: ...


@dataclass
class Connection:
    """A connection between one task and the server. Each end notices by itself that the other is gone, after its data.

    ``up`` and ``down`` hold data that has arrived but is not read. Data on its way has a time of arrival:
    ``latency_s`` later, and not before ``cut_until``, because the network is cut until then. The caller that makes
    a connection slow sets ``clock``.
    """

    connection_id: int
    task_attempt_id: int
    up: deque[UpMessage] = field(default_factory=deque)
    down: deque[Downward] = field(default_factory=deque)
    task_gone: bool = False  # the server can see that this end no longer writes or reads
    server_gone: bool = False  # the task can see the same of the server
    task_knows: bool = False  # this end has noticed that the connection is over
    server_knows: bool = False
    server_closed: bool = False  # this end reads no more
    clock: Clock | None = None
    latency_s: float = 0.0
    cut_until: float = 0.0
    up_way: deque[tuple[float, UpMessage]] = field(default_factory=deque)
    down_way: deque[tuple[float, Downward]] = field(default_factory=deque)
    broken: bool = False  # nothing that is sent arrives any more, and perhaps only one end can see it
    server_sees_at: float = inf  # when the loss of the other end shows
    task_sees_at: float = inf

    def send_up(self, message: UpMessage) -> None:
        if self.task_gone or self.server_gone or self.broken or self.server_closed:
            return
        if (arrival := self._arrival(self.up_way)) is None:
            self.up.append(message)
        else:
            self.up_way.append((arrival, message))

    def send_down(self, message: Downward) -> None:
        if self.task_gone or self.server_gone or self.broken or self.server_closed:
            return
        if (arrival := self._arrival(self.down_way)) is None:
            self.down.append(message)
        else:
            self.down_way.append((arrival, message))

    def _arrival(self, way: deque[tuple[float, UpMessage]] | deque[tuple[float, Downward]]) -> float | None:
        """Return the time of arrival; None: immediately."""
        if self.clock is None or not (way or self.latency_s or self.cut_until > self.clock.now):
            return None
        return max(self.clock.now + self.latency_s, self.cut_until, way[-1][0] if way else 0.0)

    def cut(self, clock: Clock, until: float) -> None:
        """Let nothing pass until then, not even data on its way; neither end is notified."""
        self.clock = clock
        self.cut_until = max(self.cut_until, until)
        self.up_way = deque((max(at, until), message) for at, message in self.up_way)
        self.down_way = deque((max(at, until), message) for at, message in self.down_way)

    def is_sound(self, now: float) -> bool:
        """Whether it is open at both ends and not cut now."""
        over = self.task_gone or self.server_gone or self.broken or self.server_closed
        return not over and self.cut_until <= now

    @property
    def arrives_at(self) -> float:
        """When something will happen here by itself; infinity if nothing will."""
        up = self.up_way[0][0] if self.up_way else self.server_sees_at
        down = self.down_way[0][0] if self.down_way else self.task_sees_at
        return min(up, down)

    def arrive(self, now: float) -> None:
        """Deliver everything that is due by now."""
        while self.up_way and self.up_way[0][0] <= now:
            self.up.append(self.up_way.popleft()[1])
        while self.down_way and self.down_way[0][0] <= now:
            self.down.append(self.down_way.popleft()[1])
        if self.server_sees_at <= now and not self.up_way:
            self.task_gone, self.server_sees_at = True, inf
        if self.task_sees_at <= now and not self.down_way:
            self.server_gone, self.task_sees_at = True, inf

    def break_now(self, random: Random, *, server_sees_at: float = 0.0, task_sees_at: float = 0.0) -> None:
        """Cut off both ends; of the data on its way, a random first part still arrives.

        An end that does not notice immediately goes on writing, without success.
        """
        self.broken = True
        for queue, way in ((self.up, self.up_way), (self.down, self.down_way)):
            lost = random.randint(0, len(queue) + len(way))
            for _ in range(lost):
                (way or queue).pop()
        self.server_sees_at, self.task_sees_at = server_sees_at, task_sees_at
        self.arrive(0.0)

    def close_by_task(self, *, flush: bool) -> None:
        self.task_knows = True
        self.down.clear()
        self.down_way.clear()
        if not flush:
            self.up.clear()
            self.up_way.clear()
        if self.clock is not None and self.cut_until > self.clock.now:
            self.broken = True
            self.server_sees_at = self.cut_until
        elif not self.broken:
            self.up.extend(message for _, message in self.up_way)
            self.up_way.clear()
            self.task_gone = True

    def close_by_server(self, *, flush: bool) -> None:
        """Stop reading and writing at the server; it receives the end of the connection later, as with a loss."""
        self.server_closed = True
        self.up.clear()
        self.up_way.clear()
        if not flush:
            self.down.clear()
            self.down_way.clear()
        if self.clock is not None and self.cut_until > self.clock.now:
            self.broken = True
            self.task_sees_at = self.cut_until
        elif not self.broken:
            self.server_gone = True
