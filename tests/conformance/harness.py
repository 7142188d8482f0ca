# SPDX-License-Identifier: Apache-2.0

"""Helpers for the parity scenarios: gateways without a loop, and the checkpoint steps of an operator's actors.

The scenarios restate those of Flink's own tests. S numbers count the entries of the parity list. R and G numbers name
clauses and gaps of Flink's contract (``docs/flink-parity.md``), and H numbers the rules of Headgate's contract. If the
two contracts differ, the H rule wins, and the test says so.
"""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.barrier_tracker import AbortRequested
from protocol.gateway.machine import GatewayMachine
from protocol.gateway.types import (
    AttemptIsOver,
    CheckpointOutcome,
    CheckpointOver,
    CloseRequested,
    ConfirmEvent,
    ConnectionAttached,
    CutReached,
    EventSubmitted,
    FailEvent,
    GatewayInput,
    GatewayLimits,
    MessageReceived,
    ReadyAnnounced,
    SendToAttempt,
)
from protocol.ids import ExecutionAttempt
from protocol.wire.codec import decode_event, encode_event
from protocol.wire.messages import BarrierMessage, Confirm, DownItem, EventMessage, Opened, UpItem
from tests.actors.coordination.executor import Task
from tests.actors.coordination.operator_world import Answer, RecordingCoordinator, World

Received = list[tuple[Any, int]]
"""Events with the subtask that received them, in the order of arrival."""


class Line:
    """A ``GatewayMachine`` with one running attempt, which confirms events immediately or only on request.

    ``received``: shared by the lines of one scenario. ``confirmed`` and ``failed`` tell what happened to each event, by
    the number that ``send`` returned. ``barriers``: the checkpoints whose barrier has been sent.
    """

    def __init__(self, subtask: int = 0, received: Received | None = None, *, confirms: bool = True) -> None:
        self.attempt = ExecutionAttempt("words", subtask, 0, 100 + subtask)
        self.received: Received = [] if received is None else received
        self.confirms = confirms
        self.confirmed: list[int] = []
        self.failed: dict[int, str] = {}
        self.barriers: list[int] = []
        self.machine = GatewayMachine(self.attempt, GatewayLimits())
        self._sent = 0
        self._said = 0
        self._highest_seq = 0
        self._do(ConnectionAttached(0))
        self._say(Opened(self.attempt.task_attempt_id, 1))
        self._do(ReadyAnnounced())

    # --- the coordinator ------------------------------------------------------------------------------------------

    def send(self, event: Any, *, loss_tolerant: bool = False) -> int:
        self._sent += 1
        self._do(EventSubmitted(self._sent, encode_event(event), loss_tolerant))
        return self._sent

    def mark(self, checkpoint_id: int) -> None:
        """Announce the checkpoint to the gateway, which stays open."""
        self._do(CloseRequested(checkpoint_id))

    def close(self, checkpoint_id: int) -> bool:
        """Close for the checkpoint, as the coordinator's cut does. Return False if the gateway refuses."""
        self._do(CutReached(checkpoint_id))
        return checkpoint_id in self.machine.statistics().closed_for

    def abort(self, checkpoint_id: int) -> None:
        self._do(CheckpointOver(checkpoint_id, CheckpointOutcome.ABORTED))

    def end(self, reason: str) -> None:
        """End the attempt."""
        self._do(AttemptIsOver(reason))

    # --- the attempt ----------------------------------------------------------------------------------------------

    def confirm(self) -> None:
        """Confirm everything that has arrived."""
        self._do(MessageReceived(Confirm(self.attempt.task_attempt_id, self._highest_seq)))

    def _say(self, item: UpItem) -> None:
        self._said += 1
        assert item.seq == self._said
        self._do(MessageReceived(item))

    def _do(self, fact: GatewayInput) -> None:
        effects = self.machine.handle(fact, 1.0)
        self.machine.check_invariants()
        arrived = False
        for effect in effects:
            match effect:
                case SendToAttempt(message) if isinstance(message, DownItem):
                    self._highest_seq = message.seq
                    arrived = True
                    if isinstance(message, BarrierMessage):
                        self.barriers.append(message.checkpoint_id)
                    if isinstance(message, EventMessage):
                        self.received.append((decode_event(message.payload), self.attempt.subtask))
                case ConfirmEvent(event_id):
                    self.confirmed.append(event_id)
                case FailEvent(event_id, error):
                    self.failed[event_id] = str(error)
        if arrived and self.confirms:
            self.confirm()


class SlowSnapshot:
    """A ``checkpoint_coordinator`` that returns when the test says so. ``begun``: the requested ids."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._answers: dict[int, asyncio.Future[bytes]] = {}

    async def __call__(self, checkpoint_id: int) -> bytes:
        self.begun.append(checkpoint_id)
        self._answers[checkpoint_id] = asyncio.get_running_loop().create_future()
        return await self._answers[checkpoint_id]

    def complete(self, checkpoint_id: int, state: bytes = b"") -> None:
        self._answers[checkpoint_id].set_result(state)

    def fail(self, checkpoint_id: int, error: Exception) -> None:
        self._answers[checkpoint_id].set_exception(error)


async def cut(world: World, *busy: Task) -> Answer:
    """Run a checkpoint up to the barriers: the coordinator has its snapshot, these tasks have not taken theirs."""
    for task in busy:
        task.busy = True
    answer = await world.checkpoint()
    return answer


async def acknowledge(world: World, task: Task) -> None:
    """Let the task reach its barrier; its mailbox is empty afterwards."""
    task.busy = False
    await world.settle()


async def abort(world: World, checkpoint_id: int) -> None:
    world.tracker.tell(AbortRequested(checkpoint_id, "by the test"))
    await world.settle()


async def send(world: World, coordinator: RecordingCoordinator, subtask: int, event: Any) -> None:
    """Send from the coordinator in its own order: between two calls of its methods."""

    async def now() -> None:
        await coordinator.gateways[subtask].send_event(event)

    coordinator.context.call_soon_threadsafe(now)
    await world.settle()
