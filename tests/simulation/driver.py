"""The driver's side: the real ledger, tracker and gateways, joined by mailboxes as the actors are.

Every actor has an ordered mailbox of its own, and the world chooses whose turn it is. So whatever can overtake in
the real sidecar can overtake here, and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from protocol.attempts import GlobalFailureRaised
from protocol.barrier_tracker import AbortRequested
from protocol.machine import TimePassed
from tests.simulation.application import OPERATOR, Application
from tests.simulation.bridge import Bridge
from tests.simulation.checkers import demand
from tests.simulation.coordination import Coordination
from tests.simulation.gateways import GatewayTable
from tests.simulation.network import Connection
from tests.simulation.shared import Boxes, DriverWorld
from tests.simulation.tracking import Tracking


class Driver:
    """Bridge, tracker, coordinator and gateways of one application. It can be dropped at any moment."""

    def __init__(self, world: DriverWorld, application: Application) -> None:
        self.world = world
        self.application = application
        self.boxes = boxes = Boxes(world, application)
        self.table = GatewayTable()
        self.bridge = Bridge(boxes, self.table)
        self.tracking = Tracking(boxes, self.table)
        self.coordination = Coordination(boxes)

    def actions(self) -> list[Callable[[], None]]:
        """What could happen next, but for what comes from outside."""
        boxes, coordination, storage = self.boxes, self.coordination, self.world.storage
        actions: list[Callable[[], None]] = []
        if boxes.bridge:
            actions.append(self.bridge.receive)
        if boxes.tracker:
            actions.append(self.tracking.receive)
        if coordination.snapshotting is not None:
            actions.append(coordination.end_snapshot)
        elif boxes.coordinator:
            actions.append(coordination.receive)
        if coordination.unanswered and (not actions or self.world.random.random() < 0.2):
            actions.append(coordination.answer_one)
        actions.extend([gateway.receive for gateway in self.table.all if gateway.box])
        if storage.writing:
            actions.append(self.tracking.end_write)
        if storage.unwanted:
            actions.append(storage.take_away_one)
        if self.bridge.queries:
            actions.append(self.bridge.answer_query)
        if coordination.senders():
            actions.append(coordination.send_something)
        return actions

    def read(self, connection: Connection) -> None:
        self.bridge.read(connection)

    def fail_job(self, cause: str) -> None:
        """The coordinator gives the job up (H8)."""
        self.boxes.bridge.append(GlobalFailureRaised(OPERATOR, cause))

    def abort_checkpoint(self, reason: str) -> None:
        """Somebody gives up the checkpoint that was begun last; it may be over already (H45)."""
        self.boxes.tracker.append(AbortRequested(self.tracking.last_id, reason))

    def next_deadline(self) -> float | None:
        deadlines = [self.bridge.ledger.next_deadline(), self.tracking.tracker.next_deadline()]
        deadlines.extend(gateway.machine.next_deadline() for gateway in self.table.all)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def pass_time(self) -> None:
        """Every timer that is due fires into the mailbox of its actor."""
        now = self.world.now

        def fire_if_due(deadline: float | None, box: deque[Any]) -> None:
            if deadline is not None and deadline <= now and TimePassed() not in box:
                box.append(TimePassed())

        fire_if_due(self.bridge.ledger.next_deadline(), self.boxes.bridge)
        fire_if_due(self.tracking.tracker.next_deadline(), self.boxes.tracker)
        for gateway in self.table.all:
            fire_if_due(gateway.machine.next_deadline(), gateway.box)

    def settled(self) -> bool:
        """Nothing runs, nothing is under way, and no last output waits for its checkpoint."""
        boxes, tracking = self.boxes, self.tracking
        quiet = not boxes.bridge and not boxes.tracker and not boxes.coordinator
        return quiet and not tracking.run_is_on and tracking.tracker.next_deadline() is None

    def check_rest(self) -> None:
        """Nothing is left, and nobody was left without an answer."""
        self.tracking.check_rest()
        demand(not self.table.open, f"H57: gateways are left: {list(self.table.open)}")
        demand(not self.table.all, f"H57: gateways are not over: {[gateway.attempt for gateway in self.table.all]}")
        uncommitted = self.coordination.order.uncommitted
        told = self.tracking.uncommitted
        demand(
            not uncommitted or bool(told), f"H45: no checkpoint covers the last output of {uncommitted}: nobody is told"
        )
