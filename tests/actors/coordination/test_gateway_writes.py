"""When what a gateway sends leaves, and how often the task hears that its events were taken: matters of speed only."""

from __future__ import annotations

from typing import Any

from protocol.messages import Confirm, DownMessage, EventMessage
from tests.actors.coordination.executor import MemoryConnection
from tests.actors.coordination.operator_world import RecordingCoordinator, World, running_operator


class WatchedConnection(MemoryConnection):
    """Also keeps which messages were to leave at once."""

    def __init__(self, connection_id: int) -> None:
        super().__init__(connection_id)
        self.sent: list[tuple[DownMessage, bool]] = []

    def send(self, message: DownMessage, *, at_once: bool = False) -> None:
        self.sent.append((message, at_once))
        super().send(message, at_once=at_once)

    def events(self) -> list[tuple[Any, bool]]:
        return [(message.seq, at_once) for message, at_once in self.sent if isinstance(message, EventMessage)]

    def confirms(self) -> list[int]:
        return [message.seq for message, _ in self.sent if isinstance(message, Confirm)]


def watch(world: World) -> list[WatchedConnection]:
    """The connections of the attempts that register from now on."""
    made: list[WatchedConnection] = []

    def connection() -> MemoryConnection:
        made.append(WatchedConnection(len(made) + 1))
        return made[-1]

    world.connection = connection  # type: ignore[method-assign]
    return made


async def test_a_lone_event_does_not_wait_for_the_end_of_the_turn() -> None:
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        connections = watch(world)
        await world.running(0)
        await coordinator.gateways[0].send_event("alone")
        await world.settle()
        assert connections[0].events() == [(1, True)]


async def test_of_many_events_only_the_last_one_leaves_at_once_and_takes_the_others_with_it() -> None:
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator) as world:
        connections = watch(world)
        await world.running(0)
        for number in range(5):
            await coordinator.gateways[0].send_event(number)
        await world.settle()
        assert connections[0].events() == [(1, False), (2, False), (3, False), (4, False), (5, True)]
