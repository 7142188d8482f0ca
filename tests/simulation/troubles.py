# SPDX-License-Identifier: Apache-2.0

"""The troubles of one task: an operator that raises or is slow, a frozen process, a slow or cut network."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf

from protocol.subtask.types import MailboxBarrier, MailboxEvent, MailboxItem
from tests.simulation.network import Clock, Connection


class Trap(Enum):
    """The method in which the operator will raise."""

    OPEN = "open"
    EVENT = "handle_event"
    SNAPSHOT = "snapshot_state"
    NOTIFICATION = "a notification"

    @staticmethod
    def of(item: MailboxItem) -> Trap:
        if isinstance(item, MailboxEvent):
            return Trap.EVENT
        return Trap.SNAPSHOT if isinstance(item, MailboxBarrier) else Trap.NOTIFICATION


@dataclass
class Troubles:
    """The troubles; times are on the world's clock.

    ``unresponsive``: it will never read again; ``becoming_unresponsive``: as soon as it awaits an event.
    ``frozen_until``: the whole process stands still; ``stalled_until``: only the operator does, inside one of its
    methods. ``latency_s`` and ``cut_until`` apply to all of its connections.
    """

    clock: Clock
    latency_s: float = 0.0
    cut_until: float = 0.0
    unresponsive: bool = False
    becoming_unresponsive: bool = False
    frozen_until: float = 0.0
    stalled_until: float = 0.0
    trap: Trap | None = None
    dawdled: int = -1  # the checkpoint whose snapshot was postponed

    @property
    def frozen(self) -> bool:
        return self.frozen_until > self.clock.now

    @property
    def stalled(self) -> bool:
        return self.stalled_until > self.clock.now

    def burden(self, connection: Connection) -> None:
        """Apply the troubles to a new connection."""
        if self.latency_s or self.cut_until > self.clock.now:
            connection.clock = self.clock
            connection.latency_s = self.latency_s
            connection.cut_until = self.cut_until

    def next_relief(self, connection: Connection | None) -> float:
        """Return when the first trouble ends that the process waits for now, or infinity."""
        times = [self.frozen_until, self.stalled_until, inf if connection is None else connection.arrives_at]
        return min(time for time in [*times, inf] if time > self.clock.now)
