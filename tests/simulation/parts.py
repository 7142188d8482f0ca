# SPDX-License-Identifier: Apache-2.0

"""Ready-made parts in a simulated application: a work queue and the counters, both halves as users have them.

In some worlds, the operator is a chain of the user's coordinator and these parts (H80). Its tasks work on the items of
a queue, each of which adds others, and count them. The outputs of a successful job must contain every item once (H100),
and the sum of the counts must be exact (H101).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

from actors.coordination import (
    Confirmation,
    CoordinatorContext,
    LiveGateways,
    OperatorCoordinator,
    Parts,
    SubtaskGateway,
)
from actors.coordination.host.part import Part
from protocol.errors import GatewayFull
from protocol.subtask.types import MailboxItem
from protocol.wire.codec import encode_event
from protocol.wire.messages import RestoreMode
from spark_bridge.primitives.counters.driver import CountersCoordinator
from spark_bridge.primitives.counters.task import CountersPart
from spark_bridge.primitives.group.driver import Group
from spark_bridge.primitives.work_queue.driver import WorkQueue
from spark_bridge.primitives.work_queue.task import WorkQueuePart
from spark_bridge.subtask.context import SubtaskContext
from tests.simulation.application import COUNTS, ITEMS, OPERATOR, TEAM, part_text
from tests.simulation.checkers import demand, judged
from tests.simulation.group import TaskGroup

if TYPE_CHECKING:
    from tests.simulation.coordinator import Coordinator
    from tests.simulation.process import Process
    from tests.simulation.world import World

ROOTS = ("0", "1")
DEPTH = 3
SHARED = "shared"
"""Every item adds it, with the same key."""


def children(item: str) -> list[str]:
    """What is found in an item, other than the shared one."""
    return [] if item == SHARED or len(item) == DEPTH else [item + "0", item + "1"]


def all_items() -> list[str]:
    """Every item, sorted."""
    items = list(ROOTS)
    for item in items:
        items += children(item)
    return sorted([*items, SHARED])


# --- the driver -----------------------------------------------------------------------------------------------------


class JudgedParts(Parts):
    """The parts of the simulated operator. Its judge learns when those that hold what they send may send it (H80)."""

    judge: Coordinator

    def cut_reached(self) -> None:
        self.judge.cut_reached()
        super().cut_reached()


def judged_parts(
    judge: Coordinator, named: Mapping[str, OperatorCoordinator], stages: Collection[str] = ()
) -> JudgedParts:
    """The simulated coordinator and the others, with judges for what these send and receive.

    In a chain of stages, the simulated coordinator has its work nevertheless.
    """
    for name, coordinator in named.items():
        watch(judge, name, coordinator)
    parts = [
        Part(name, index, one, is_stage=name in stages, outside=name == TEAM)
        for index, (name, one) in enumerate(named.items(), 1)
    ]
    judged_by = JudgedParts([Part("", 0, judge), *parts])
    judged_by.judge = judge
    return judged_by


def watch(judge: Coordinator, name: str, coordinator: OperatorCoordinator) -> None:
    """Show the judge what a coordinator of a part gets, and give it gateways that show what it sends."""
    contexts: list[CoordinatorContext] = []
    start, ready = coordinator.start, coordinator.subtask_ready
    handle_event, handle_request = coordinator.handle_event_from_operator, coordinator.handle_request

    async def start_watched(context: CoordinatorContext) -> None:
        contexts.append(context)
        await start(cast("CoordinatorContext", WatchedContext(judge, name, context)))

    async def ready_watched(subtask: int, gateway: SubtaskGateway) -> None:
        await ready(subtask, cast("SubtaskGateway", WatchedGateway(judge, name, gateway)))

    async def event_noted(subtask: int, attempt: int, event: Any) -> None:
        note(subtask, attempt, event)
        await handle_event(subtask, attempt, event)

    async def request_noted(subtask: int, attempt: int, request: Any) -> Any:
        note(subtask, attempt, request)
        return await handle_request(subtask, attempt, request)

    def note(subtask: int, attempt: int, event: Any) -> None:
        with judged(judge._world):
            position = contexts[-1].events_taken(subtask)
            judge.take_of_part(subtask, attempt, part_text(name, event), position)

    vars(coordinator).update(
        start=start_watched,
        subtask_ready=ready_watched,
        handle_event_from_operator=event_noted,
        handle_request=request_noted,
    )


class SimulatedChain:
    """The ready-made parts beside the simulated coordinator."""

    def __init__(self, world: World, main: Coordinator) -> None:
        self.world = world
        self.counters = CountersCoordinator()
        self.queue = WorkQueue[str](ITEMS, ROOTS)
        parts: dict[str, OperatorCoordinator] = {COUNTS: self.counters, ITEMS: self.queue.coordinator(OPERATOR)}
        if world.settings.team:
            self.group = Group(TEAM, min_size=1 if world.settings.team == "elastic" else None)
            parts[TEAM] = self.group.coordinator(OPERATOR)
        self.run_ended = main.run_ended
        vars(main)["run_ended"] = self.run_ended_judged
        self.parts = judged_parts(main, parts)

    async def run_ended_judged(self, run_id: int, succeeded: bool, reason: str) -> None:
        """The last part hears it: all the others have."""
        await self.run_ended(run_id, succeeded, reason)
        if succeeded:
            with judged(self.world):
                self.world.counted[run_id] = int(self.counters.totals().get("items", 0))
                progress = self.queue.progress
                demand(progress == (len(all_items()),) * 2, f"H100: {progress} items are finished, and known")


class WatchedGateway:
    """A gateway that notes each event of a part as sent, when it is."""

    def __init__(self, judge: Coordinator, name: str, gateway: SubtaskGateway) -> None:
        self._judge = judge
        self._name = name
        self._gateway = gateway

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateway, name)

    async def send_event(self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False) -> Confirmation:
        with self._judge.waiting_for_capacity(self._gateway.attempt):
            confirmation = await self._gateway.send_event(event, loss_tolerant=loss_tolerant, urgent=urgent)
        self._note(event, urgent, confirmation)
        return confirmation

    def send_event_nowait(self, event: Any, *, loss_tolerant: bool = False, urgent: bool = False) -> Confirmation:
        confirmation = self._gateway.send_event_nowait(event, loss_tolerant=loss_tolerant, urgent=urgent)
        self._note(event, urgent, confirmation)
        return confirmation

    def _note(self, event: Any, urgent: bool, confirmation: Confirmation) -> None:
        self._judge.sent_by_part(self._gateway.attempt, self._name, event, urgent, confirmation)


class WatchedGateways:
    """A part's live gateways, each of which notes what is sent. It has what the parts here use."""

    def __init__(self, judge: Coordinator, name: str, gateways: LiveGateways) -> None:
        self._judge = judge
        self._name = name
        self._gateways = gateways

    async def send(self, subtask: int, event: Any, *, attempt: int, urgent: bool) -> None:
        for gateway in self._gateways.gateways(subtask):
            if gateway.attempt.attempt == attempt:
                await WatchedGateway(self._judge, self._name, gateway).send_event(event, urgent=urgent)


class WatchedContext:
    """The ``CoordinatorContext`` of the parts."""

    def __init__(self, judge: Coordinator, name: str, context: CoordinatorContext) -> None:
        self._context = context
        self.gateways = WatchedGateways(judge, name, context.gateways)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


# --- a task ---------------------------------------------------------------------------------------------------------


class TaskParts:
    """The task's halves, and the user's function that works on the queue."""

    def __init__(self, process: Process, in_hand: int, team: str) -> None:
        self.process = process
        self.counters = CountersPart()
        self.queue = WorkQueuePart("queue", in_hand, False)
        self.group = TaskGroup(self, elastic=team == "elastic") if team else None
        self.in_hand = in_hand
        self.worked = False  # through the queue
        self.in_snapshot = False
        self.outbox: deque[tuple[str, Any]] = deque()  # the task waits until these are sent

    @property
    def done(self) -> bool:
        return self.worked and (self.group is None or self.group.done)

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

    def handle(self, name: str, event: Any) -> None:
        if name == TEAM:
            assert self.group is not None
            self.group.handle(event)
        else:
            self._by_name[name].handle_event(event)

    def hear_answer(self, request_id: int, error: str, payload: bytes) -> None:
        assert self.group is not None
        self.group.hear_answer(error, payload)

    def hear_end(self, checkpoint_id: int, *, completed: bool) -> None:
        """These parts do not use it."""

    def may_handle(self, item: MailboxItem) -> bool:
        """Whether the task may take this out of its mailbox now."""
        return True

    def close(self) -> None:
        """These parts have nothing to close."""

    def check_whole(self) -> None:
        """The outputs of all tasks together are checked."""

    def background_actions(self) -> list[Callable[[], None]]:
        """These parts do nothing by themselves."""
        return []

    def next_deadline(self) -> float | None:
        return None

    def send(self, name: str, event: Any) -> None:
        """Send an event, after those that wait for capacity."""
        encode_event(event)
        self.outbox.append((name, event))
        self.flush()

    # --- what the function does ---

    @property
    def blocked(self) -> bool:
        """Whether the function waits for capacity."""
        return bool(self.outbox)

    def actions(self) -> list[Callable[[], None]]:
        """What it may do next. Between two of these, the task may take a snapshot, or die."""
        queue, in_group = self.queue, [] if self.group is None else self.group.actions()
        if self.worked:
            return in_group
        if queue._current is not None:
            return [*in_group, self.work]
        if queue._hand or queue._no_more:
            return [*in_group, self.take]
        return [*in_group, queue._report_if_due] if queue._asked < self.in_hand else in_group

    def take(self) -> None:
        """Take the next item."""
        self.worked = self.queue._next() is None

    def work(self) -> None:
        """Work on the item. If a snapshot comes before that, it contains the item, and a restore works on it."""
        assert self.queue._current is not None
        item = self.queue._current[2]
        self.process.work.items.append(item)
        self.process.work.counted += 1
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
        """Send what waits for capacity, as far as there is any."""
        while self.outbox:
            name, event = self.outbox[0]
            try:
                self.process.send_of_part(name, event)
            except GatewayFull:
                self.process.waits_for_capacity = True
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

    @property
    def input_begins_again(self) -> bool:
        return self._parts.process.input_begins_again

    def now(self) -> float:
        return self._parts.process.world.now

    def send_event(self, event: Any) -> None:
        if self._parts.in_snapshot:
            self._parts.process.send_of_part(self._name, event, in_snapshot=True)
        else:
            self._parts.send(self._name, event)

    def send_event_nowait(self, event: Any) -> None:
        if self._parts.outbox:
            raise GatewayFull("others wait for capacity")
        self._parts.process.send_of_part(self._name, event)

    def wait_for_event(self, timeout_s: float | None = None) -> int:
        raise AssertionError("the world lets it work only while it has an item, or none will come")
