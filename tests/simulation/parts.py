# SPDX-License-Identifier: Apache-2.0

"""Ready-made parts in a simulated application: a work queue and the counters, both halves as users have them.

In some worlds, the operator is a chain of the user's coordinator and these parts (H80). Its tasks work on the items of
a queue, each of which adds others, and count them. The outputs of a successful job must contain every item once (H100),
and the sum of the counts must be exact (H101).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from actors.coordination import Confirmation, CoordinatorChain, SubtaskGateway
from actors.coordination.chain import PartGateway
from protocol.errors import GatewayFull
from protocol.wire.codec import encode_event
from protocol.wire.extension_types import PartEvent
from protocol.wire.messages import RestoreMode
from spark_bridge.primitives.counters.driver import CountersCoordinator
from spark_bridge.primitives.counters.task import CountersPart
from spark_bridge.primitives.work_queue.driver import WorkQueue
from spark_bridge.primitives.work_queue.task import WorkQueuePart
from spark_bridge.subtask.context import SubtaskContext
from tests.simulation.application import COUNTS, ITEMS, OPERATOR, part_text
from tests.simulation.checkers import demand, judged

if TYPE_CHECKING:
    from tests.simulation.coordinator import Coordinator
    from tests.simulation.process import Process
    from tests.simulation.world import World

ROOTS = ("0", "1")
DEPTH = 3
SHARED = "shared"
"""Every item adds it, with the same key."""


def children(item: str) -> list[str]:
    """What is found in an item, besides the shared one."""
    return [] if item == SHARED or len(item) == DEPTH else [item + "0", item + "1"]


def all_items() -> list[str]:
    """Every item, sorted."""
    items = list(ROOTS)
    for item in items:
        items += children(item)
    return sorted([*items, SHARED])


# --- the driver -----------------------------------------------------------------------------------------------------


class SimulatedChain(CoordinatorChain):
    """The chain of the simulated coordinator and the parts; shows the judges what the parts send and receive."""

    def __init__(self, world: World, main: Coordinator) -> None:
        self.world = world
        self.judge = main
        self.counters = CountersCoordinator()
        self.queue = WorkQueue[str](ITEMS, ROOTS)
        super().__init__(main, {COUNTS: self.counters, ITEMS: self.queue.coordinator(OPERATOR)})

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if type(event) is PartEvent:
            with judged(self.world):
                self.judge.take_of_part(subtask, attempt, part_text(event))
        await super().handle_event_from_operator(subtask, attempt, event)

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        watched = cast("SubtaskGateway", WatchedGateway(self.judge, gateway))
        for name, part in self._parts.items():
            await part.subtask_ready(subtask, PartGateway(watched, name))
        await self.main.subtask_ready(subtask, gateway)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        await super().run_ended(run_id, succeeded, reason)
        if succeeded:
            with judged(self.world):
                counted = self.counters.totals().get("items", 0)
                demand(counted == len(all_items()), f"H101: {counted} items are counted, of {len(all_items())}")
                progress = self.queue.progress
                demand(progress == (len(all_items()),) * 2, f"H100: {progress} items are finished, and known")


class WatchedGateway:
    """A gateway that notes each event of a part as sent, when it is."""

    def __init__(self, judge: Coordinator, gateway: SubtaskGateway) -> None:
        self._judge = judge
        self._gateway = gateway

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateway, name)

    async def send_event(self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False) -> Confirmation:
        with self._judge.waiting_for_room(self._gateway.attempt):
            confirmation = await self._gateway.send_event(event, loss_tolerant=loss_tolerant, urgent=urgent)
        self._judge.sent_by_part(self._gateway.attempt, part_text(event), confirmation)
        return confirmation


# --- a task ---------------------------------------------------------------------------------------------------------


class TaskParts:
    """The task's halves, and the user's function that works on the queue."""

    def __init__(self, process: Process, in_hand: int) -> None:
        self.process = process
        self.counters = CountersPart()
        self.queue = WorkQueuePart(in_hand)
        self.in_hand = in_hand
        self.done = False
        self.in_snapshot = False
        self.outbox: deque[tuple[str, Any]] = deque()  # the task waits until these are sent

    @property
    def _by_name(self) -> dict[str, CountersPart | WorkQueuePart]:
        return {COUNTS: self.counters, ITEMS: self.queue}

    def open(self, states: list[dict[str, bytes]]) -> None:
        for name, part in self._by_name.items():
            own = [state[name] for state in states if name in state]
            state = None if not states else b"" if not own else own[0] if len(own) == 1 else None
            if len(own) > 1:
                state = part.merge_states(dict(enumerate(own)))
            part.open(cast("SubtaskContext", PartContext(self, name)), state or None)

    def handle(self, event: PartEvent) -> None:
        self._by_name[event.name].handle_event(event.event)

    # --- what the function does ---

    @property
    def blocked(self) -> bool:
        """Whether the function waits for room."""
        return bool(self.outbox)

    def actions(self) -> list[Callable[[], None]]:
        """What it may do next. Between two of these, the task may take a snapshot, or die."""
        queue = self.queue
        if self.done:
            return []
        if queue._current is not None:
            return [self.work]
        if queue._hand or queue._no_more:
            return [self.take]
        return [queue._report_if_due] if queue._asked < self.in_hand else []

    def take(self) -> None:
        """Take the next item."""
        self.done = self.queue._next() is None

    def work(self) -> None:
        """Work on the item. If a snapshot comes before that, it contains the item, and a restore works on it."""
        assert self.queue._current is not None
        item = self.queue._current[2]
        self.process.work.items.append(item)
        self.counters.count("items", 1)
        self.queue.add(children(item), None, priority=len(item))
        self.queue.add([SHARED], lambda one: one, priority=0)
        self.queue._finish_current()
        self.process.world.figures.happen("an item")

    def snapshot_state(self, checkpoint_id: int) -> dict[str, bytes]:
        self.in_snapshot = True
        try:
            return {name: part.snapshot_state(checkpoint_id) for name, part in self._by_name.items()}
        finally:
            self.in_snapshot = False

    def final_state(self) -> dict[str, bytes]:
        return {name: part.final_state() for name, part in self._by_name.items()}

    def flush(self) -> None:
        """Send what waits for room, as far as there is any."""
        while self.outbox:
            name, event = self.outbox[0]
            try:
                self.process.send_of_part(PartEvent(name, event))
            except GatewayFull:
                self.process.waits_for_room = True
                return
            self.outbox.popleft()


class PartContext:
    """The ``SubtaskContext`` of a part of a simulated task."""

    def __init__(self, parts: TaskParts, name: str) -> None:
        self._parts = parts
        self._name = name

    @property
    def mode(self) -> RestoreMode:
        return self._parts.process.application.settings.mode

    def now(self) -> float:
        return self._parts.process.world.now

    def send_event(self, event: Any) -> None:
        encode_event(event)
        if self._parts.in_snapshot:
            self._parts.process.send_of_part(PartEvent(self._name, event), in_snapshot=True)
        else:
            self._parts.outbox.append((self._name, event))
            self._parts.flush()

    def send_event_nowait(self, event: Any) -> None:
        if self._parts.outbox:
            raise GatewayFull("others wait for room")
        self._parts.process.send_of_part(PartEvent(self._name, event))

    def wait_for_event(self, timeout_s: float | None = None) -> int:
        raise AssertionError("the world lets it work only while it has an item, or none will come")
