# SPDX-License-Identifier: Apache-2.0

"""What somebody who looks sees of a gateway, without asking its actor."""

from __future__ import annotations

from typing import NamedTuple

from protocol.gateway.machine import GatewayMachine, GatewayState


class GatewayView(NamedTuple):
    """The gateway of one attempt at one moment, for people. Times are readings of the system's clock.

    ``heard_at``: when something last came from the task. ``unconfirmed_since``: when the oldest unconfirmed event left.
    ``requested_at``: when the oldest request came that the coordinator has neither answered nor deferred yet;
    ``deferred_at``: when the oldest deferred one came that has no answer yet. ``closed_for``: the checkpoints for which
    events to the task are held back.
    """

    connected: bool
    ready: bool
    heard_at: float
    events_held: int
    events_unconfirmed: int
    events_untaken: int
    bytes: int
    unconfirmed_since: float | None
    requested_at: float | None
    deferred_at: float | None
    closed_for: tuple[int, ...]


class GatewaySight:
    """The machine of a gateway's actor, which alone changes it, and since when each request has had no answer.

    The actor sets ``view`` to None with each message. So looking often at many gateways that are idle makes no garbage.
    Loop only.
    """

    __slots__ = ("deferred_at", "machine", "requested_at", "view")

    def __init__(self, machine: GatewayMachine) -> None:
        self.machine = machine
        self.requested_at: dict[int, float] = {}
        """When each request came that has no answer yet, by its id, oldest first; without the deferred ones."""
        self.deferred_at: dict[int, float] = {}
        """The same of those whose answer the coordinator has deferred, in the order in which it took them."""
        self.view: GatewayView | None = None

    def look(self) -> GatewayView:
        """The gateway at this moment."""
        if self.view is None:
            machine, figures = self.machine, self.machine.statistics()
            self.view = GatewayView(
                machine.state is GatewayState.ATTACHED,
                machine.ready,
                machine.heard_at,
                figures.held_events,
                figures.unconfirmed_events,
                figures.untaken_events,
                figures.held_bytes + figures.unconfirmed_bytes + figures.untaken_bytes,
                machine.unconfirmed_since,
                next(iter(self.requested_at.values()), None),
                next(iter(self.deferred_at.values()), None),
                figures.closed_for,
            )
        return self.view


__all__ = ["GatewaySight", "GatewayView"]
