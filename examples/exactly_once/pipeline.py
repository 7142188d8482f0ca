# SPDX-License-Identifier: Apache-2.0

"""Numbered events in both directions, and a file sink, exactly once whatever fails.

The coordinator sends each subtask 1, 2, 3 and so on, and each subtask does the same upwards, all of them concurrently
and all the time. Both sides know their position, and keep it in their part of each checkpoint. The subtasks write the
numbers that they sent and received into part files, which the coordinator makes visible when a checkpoint is
complete.

The expected number of each event is the one after the last: anything else was lost, duplicated or out of order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from headgate import CoordinatorContext, FailureReason, OperatorCoordinator, SubtaskContext, SubtaskOperator
from headgate.errors import GatewayFull
from headgate.sinks import SinkCommitter, SinkWriter

OPERATOR_ID = "numbers"
NUMBER, WRONG = "number", "wrong"
TICK_S = 0.01  # how often both sides send a number to each other


# --- in the tasks -------------------------------------------------------------------------------------------------


class NumberSubtask(SubtaskOperator):
    """Sends its numbers up, receives those that come down, and writes both into the sink."""

    snapshot_anywhere = True  # at every call of the context, the fields agree with what was sent and received

    def __init__(self, numbers: int, sink_url: str) -> None:
        self._numbers = numbers
        self._sink_url = sink_url
        self._sent = 0
        self._received = 0
        self.context: SubtaskContext
        self._sink: SinkWriter | None = None

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self.context = context
        self._sink = SinkWriter.for_subtask(context, self._sink_url)
        if state is not None and context.input_begins_again:
            self._sent, self._received = json.loads(state)

    def process(self, records: Iterator[Any]) -> None:
        next_tick = time.monotonic()
        while self._sent < self._numbers or self._received < self._numbers:
            if self._sent < self._numbers:
                self._send_next()
            next_tick = max(next_tick, time.monotonic()) + TICK_S
            while (left_s := next_tick - time.monotonic()) > 0:
                self.context.wait_for_event(left_s)

    def _send_next(self) -> None:
        """The count follows the event: a snapshot that comes while ``send_event`` waits includes neither."""
        self.context.send_event([NUMBER, self._sent + 1])
        self._sent += 1
        self._write(f"up {self._sent}")

    def handle_event(self, event: Any) -> None:
        _, number = event
        if number != self._received + 1:
            self.context.send_event([WRONG, f"took {number} from the coordinator after {self._received}"])
        self._received = number
        self._write(f"down {number}")

    def _write(self, row: str) -> None:
        assert self._sink is not None, "open comes first"
        self._sink.write(f"{self.context.subtask} {row}")

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        """The rows since the last snapshot belong to this one; the coordinator is told which files hold them."""
        assert self._sink is not None, "open comes first"
        self._sink.send_sealed(self.context, checkpoint_id)
        return json.dumps([self._sent, self._received]).encode()

    def close(self) -> None:
        if self._sink is not None:
            self._sink.abandon()


# --- in the driver ------------------------------------------------------------------------------------------------


class Position(NamedTuple):
    """The coordinator's position with one subtask, in both directions."""

    sent: int = 0
    received: int = 0


class NumberCoordinator(OperatorCoordinator):
    """Sends every subtask its numbers, receives theirs, and publishes their files.

    Its core is ``_cuts``: the position with each subtask at each checkpoint that may still be restored. When one
    subtask goes back to a checkpoint, the coordinator goes back with it, for this subtask alone: what it sent after
    the cut must be sent again, and what it received after the cut will come again.
    """

    def __init__(self, numbers: int, sink_url: str, on_wrong: Callable[[str], None]) -> None:
        """``on_wrong`` gets every event that does not follow the last one; a failover does not undo that."""
        self._numbers = numbers
        self._on_wrong = on_wrong
        self._sink = SinkCommitter(sink_url)
        self._positions: dict[int, Position] = {}
        self._cuts: dict[int, dict[int, Position]] = {}
        self.context: CoordinatorContext

    @property
    def progress(self) -> float:
        """The part of all numbers that was sent and received, 0 to 1."""
        parallelism = self.context.parallelism
        return sum(map(self.progress_of, range(parallelism))) / parallelism

    def progress_of(self, subtask: int) -> float:
        """The part of one subtask's numbers that was sent and received, 0 to 1."""
        return sum(self._position(subtask)) / (2 * self._numbers)

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context
        await self._sink.start(context)
        context.call_later(TICK_S, self._tick)

    async def _tick(self) -> None:
        self.context.call_later(TICK_S, self._tick)
        await self.send_more()

    async def send_more(self) -> None:
        """Send the next number to each subtask that is ready for it."""
        for gateway in self.context.gateways:
            subtask = gateway.attempt.subtask
            position = self._position(subtask)
            if position.sent == self._numbers:
                continue
            try:
                gateway.send_event_nowait([NUMBER, position.sent + 1])
            except GatewayFull:  # it is slow, or about to be declared dead; the others need not wait
                continue
            self._positions[subtask] = position._replace(sent=position.sent + 1)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if await self._sink.sealed(subtask, attempt, event):
            return
        match event:
            case ["number", number]:
                position = self._position(subtask)
                if number != position.received + 1:
                    self._on_wrong(f"the coordinator took {number} from subtask {subtask} after {position.received}")
                self._positions[subtask] = position._replace(received=number)
            case ["wrong", text]:
                self._on_wrong(f"subtask {subtask} {text}")

    # --- attempts ---

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self._sink.subtask_failed(subtask, attempt)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self._positions[subtask] = self._cuts.get(checkpoint_id, {}).get(subtask, Position())
        await self._sink.subtask_reset(subtask, checkpoint_id)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self._sink.run_ended(succeeded)

    async def close(self) -> None:
        await self._sink.close()

    # --- checkpoints ---

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self._cuts[checkpoint_id] = dict(self._positions)
        return json.dumps(self._positions).encode() + b"\n" + self._sink.snapshot(checkpoint_id)

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """No subtask will return to a checkpoint before this one."""
        self._cuts = {cut: positions for cut, positions in self._cuts.items() if cut >= checkpoint_id}
        await self._sink.complete(checkpoint_id)

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """This driver's subtasks no longer restore it. The next driver may, so nothing else is cleaned up here."""
        self._cuts.pop(checkpoint_id, None)

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        """Drivers no longer restore it either: the sink deletes what it has kept for it."""
        await self._sink.discarded(checkpoint_id)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        positions, sink_state = read_state(state)
        self._positions = dict(positions)
        self._cuts = {checkpoint_id: positions}
        await self._sink.restore(checkpoint_id, sink_state)

    def _position(self, subtask: int) -> Position:
        return self._positions.get(subtask, Position())


def read_state(state: bytes | None) -> tuple[dict[int, Position], bytes | None]:
    """Read the result of ``checkpoint_coordinator``: the positions, and the sink's own part."""
    if state is None:
        return {}, None
    positions, _, sink_state = state.partition(b"\n")
    return {int(subtask): Position(*position) for subtask, position in json.loads(positions).items()}, sink_state
