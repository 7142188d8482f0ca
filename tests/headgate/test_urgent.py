# SPDX-License-Identifier: Apache-2.0

"""Urgent events in ``headgate.testing``, in virtual time (H90 to H93)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headgate import SubtaskContext, SubtaskOperator
from headgate.testing import RecordingCoordinator, running_operator
from protocol.errors import LocalProtocolError


class Steered(SubtaskOperator):
    """Waits for its records, and keeps what it handles with the thread that does."""

    def __init__(self) -> None:
        self.handled: list[Any] = []

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self.thread = threading.get_ident()

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records

    def handle_event(self, event: Any) -> None:
        self.handled.append(event)

    def handle_urgent(self, event: Any) -> None:
        assert threading.get_ident() != self.thread
        self.handled.append(["urgent", event])
        match event:
            case "raise":
                raise ValueError("raised in handle_urgent")
            case "send":
                self.context.send_event("from handle_urgent")
            case "request":
                self.context.request("anything")

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        return repr(self.handled).encode()


async def test_busy_task_handles_urgent_events_before_those_that_wait() -> None:  # H90, H91
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1) as world:
        task = await world.launch(0)
        task.busy = True
        gateway = coordinator.gateways[0]
        await gateway.send_event("a")
        confirmation = await gateway.send_event("u", urgent=True)
        await world.settle()
        assert confirmation.confirmed()
        assert task.urgent_events == ["u"]
        task.busy = False
        await world.settle()
        assert task.events == ["u", "a"]


async def test_task_without_a_handler_handles_them_in_their_place() -> None:  # H90
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1) as world:
        task = await world.launch_operator(0, SubtaskOperatorWithEvents)
        await coordinator.gateways[0].send_event("a")
        await coordinator.gateways[0].send_event("u", urgent=True)
        await coordinator.gateways[0].send_event("b")
        await world.settle()
        assert task.operator.handled == ["a", "u", "b"]  # type: ignore[attr-defined]


class SubtaskOperatorWithEvents(SubtaskOperator):
    def __init__(self) -> None:
        self.handled: list[Any] = []

    def handle_event(self, event: Any) -> None:
        self.handled.append(event)

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records


async def test_operator_handles_urgent_events_on_another_thread_while_it_is_busy() -> None:  # H90, H91
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1) as world:
        task = await world.launch_operator(0, Steered)
        task.busy = True
        for event, urgent in (("a", False), ("u", True), ("v", True)):
            await coordinator.gateways[0].send_event(event, urgent=urgent)
        await world.settle()
        assert task.operator.handled == [["urgent", "u"], ["urgent", "v"]]  # type: ignore[attr-defined]
        task.busy = False
        await world.settle()
        assert task.operator.handled[2:] == ["a"]  # type: ignore[attr-defined]


async def test_urgent_event_sent_during_a_checkpoint_comes_after_the_snapshot() -> None:  # H92
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1, mode="streaming") as world:
        task = await world.launch(0)
        await coordinator.gateways[0].send_event("before", urgent=True)
        task.busy = True
        answer = world.begin_checkpoint()
        await world.settle()
        await coordinator.gateways[0].send_event("after", urgent=True)
        await world.settle()
        assert task.urgent_events == ["before"]
        task.busy = False
        await world.settle()
        assert answer.value == 1
        assert task.handled == ["before", ("snapshot", 1), "after", ("completed", 1)]


async def test_what_the_handler_sends_arrives() -> None:  # H93
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1) as world:
        task = await world.launch_operator(0, Steered)
        task.busy = True
        await coordinator.gateways[0].send_event("send", urgent=True)
        await world.settle()
        arrived = coordinator.calls_of("handle_event_from_operator")
        assert arrived == [("handle_event_from_operator", 0, 0, "from handle_urgent")]


@pytest.mark.parametrize(
    ("event", "error", "text"),
    [("raise", ValueError, "raised in handle_urgent"), ("request", LocalProtocolError, "inside handle_urgent")],
)
async def test_handler_that_raises_fails_the_task(event: str, error: type[Exception], text: str) -> None:  # H93
    coordinator = RecordingCoordinator()
    async with running_operator(coordinator, parallelism=1) as world:
        task = await world.launch_operator(0, Steered)
        task.busy = True
        await coordinator.gateways[0].send_event(event, urgent=True)
        await coordinator.gateways[0].send_event("no more", urgent=True)
        await world.settle()
        assert task.operator.context.cancelled  # type: ignore[attr-defined]
        assert task.outcome == ""
        task.busy = False
        await world.settle()
        assert task.outcome == "failed"
        assert isinstance(task.error, error)
        assert text in str(task.error)
        assert task.operator.handled == [["urgent", event]]  # type: ignore[attr-defined]
