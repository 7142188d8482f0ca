# SPDX-License-Identifier: Apache-2.0

"""When a gateway's messages leave, and how often it confirms the task's events: these affect only the speed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, get_args

from actors.coordination.engine.gateway import _EFFECTS, TAKEN_EVERY
from actors.coordination.engine.messages import MessagesArrived
from protocol.gateway.types import DeliverEvent, GatewayEffect, SendToAttempt
from protocol.wire.messages import (
    BarrierMessage,
    CheckpointCompleted,
    CloseForCheckpoint,
    Confirm,
    Downward,
    EventMessage,
)
from tests.actors.coordination.executor import MemoryConnection, Task
from tests.actors.coordination.operator_world import World, running_operator


class WatchedConnection(MemoryConnection):
    """Also keeps which messages had to leave immediately."""

    def __init__(self, connection_id: int) -> None:
        super().__init__(connection_id)
        self.sent: list[tuple[Downward, bool]] = []

    def send(self, message: Downward, *, immediately: bool = False) -> None:
        self.sent.append((message, immediately))
        super().send(message, immediately=immediately)

    def events(self) -> list[tuple[Any, bool]]:
        return [(message.seq, immediately) for message, immediately in self.sent if isinstance(message, EventMessage)]

    def confirms(self) -> list[int]:
        return [message.seq for message, _ in self.sent if isinstance(message, Confirm)]


def watch(world: World) -> list[WatchedConnection]:
    """Return the connections of all attempts that register from now on."""
    made: list[WatchedConnection] = []

    def connection() -> MemoryConnection:
        made.append(WatchedConnection(len(made) + 1))
        return made[-1]

    world.connection = connection  # type: ignore[method-assign]
    return made


def together(task: Task, events: Iterable[Any]) -> None:
    """Let the task send these events, which all arrive in one read."""
    assert task.connection is not None
    task.silent = True
    for event in events:
        task.send(event)
    task.gateway_ref.tell(MessagesArrived(task.connection.connection_id, task.kept_back))
    task.silent, task.kept_back = False, []


async def test_an_event_leaves_with_others_of_its_turn_where_one_is_under_way_already() -> None:
    async with running_operator() as world:
        connections = watch(world)
        await world.running(0)
        for number in range(5):
            await world.coordinator.gateways[0].send_event(number)
        await world.settle()
        assert connections[0].events() == [(1, True), (2, False), (3, False), (4, False), (5, False)]


async def test_messages_of_a_checkpoint_leave_before_the_next_subtask_is_told() -> None:
    """What they confirm is in them."""
    async with running_operator() as world:
        connections = watch(world)
        await world.running(0)
        before = len(connections[0].sent)
        await world.checkpoint()
        assert [(type(message), immediately) for message, immediately in connections[0].sent[before:]] == [
            (CloseForCheckpoint, True),
            (BarrierMessage, True),
            (CheckpointCompleted, True),
        ]


async def test_events_that_arrived_together_are_confirmed_once() -> None:
    async with running_operator() as world:
        connections = watch(world)
        (task,) = await world.running(0)
        opened_seq = connections[0].confirms()[-1]
        together(task, range(10))
        await world.settle()
        assert world.coordinator.events == list(range(10))
        assert connections[0].confirms() == [opened_seq, opened_seq + 10]


async def test_a_very_large_batch_of_events_is_confirmed_in_parts_so_that_the_window_moves() -> None:
    async with running_operator() as world:
        connections = watch(world)
        (task,) = await world.running(0)
        together(task, range(10 * TAKEN_EVERY))
        await world.settle()
        confirms = connections[0].confirms()
        steps = [later - earlier for earlier, later in pairwise(confirms)]
        assert max(steps) <= TAKEN_EVERY
        assert len(confirms) <= 13
        assert confirms[-1] == confirms[0] + 10 * TAKEN_EVERY


def test_every_effect_of_the_machine_is_carried_out() -> None:
    assert set(get_args(GatewayEffect)) == {SendToAttempt, DeliverEvent, *_EFFECTS}
