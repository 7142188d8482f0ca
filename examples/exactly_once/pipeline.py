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

from headgate import CoordinatorContext
from headgate.errors import GatewayFull
from headgate.sinks import FileSink, TwoPhaseSinkCoordinator, TwoPhaseSinkOperator

OPERATOR_ID = "numbers"
NUMBER, WRONG = "number", "wrong"
TICK_S = 0.01  # how often both sides send a number to each other


# --- in the tasks -------------------------------------------------------------------------------------------------


class NumberSubtask(TwoPhaseSinkOperator):
    """Sends its numbers up, receives those that come down, and writes both into the sink."""

    snapshot_anywhere = True  # at every call of the context, the fields agree with what was sent and received

    def __init__(self, numbers: int, sink_url: str) -> None:
        super().__init__(FileSink(sink_url))
        self._numbers = numbers
        self._sent = 0
        self._received = 0

    def restore_position(self, position: bytes | None) -> None:
        if position is not None and self.context.input_begins_again:
            self._sent, self._received = json.loads(position)

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
        self.write(f"{self.context.subtask} up {self._sent}")

    def handle_event(self, event: Any) -> None:
        _, number = event
        if number != self._received + 1:
            self.context.send_event([WRONG, f"took {number} from the coordinator after {self._received}"])
        self._received = number
        self.write(f"{self.context.subtask} down {number}")

    def snapshot_position(self) -> bytes:
        """The rows since the last snapshot belong to this one, with the list of the files that hold them."""
        return json.dumps([self._sent, self._received]).encode()


# --- in the driver ------------------------------------------------------------------------------------------------


class Position(NamedTuple):
    """The coordinator's position with one subtask, in both directions."""

    sent: int = 0
    received: int = 0


class NumberCoordinator(TwoPhaseSinkCoordinator):
    """Sends every subtask its numbers, receives theirs, and publishes their files.

    Its core is ``_cuts``: the position with each subtask at each checkpoint that may still be restored. When one
    subtask goes back to a checkpoint, the coordinator goes back with it, for this subtask alone: what it sent after
    the cut must be sent again, and what it received after the cut will come again.
    """

    def __init__(self, numbers: int, sink_url: str, on_wrong: Callable[[str], None]) -> None:
        """``on_wrong`` gets every event that does not follow the last one; a failover does not undo that."""
        super().__init__(FileSink(sink_url))
        self._numbers = numbers
        self._on_wrong = on_wrong
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
        await super().start(context)
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

    async def handle_other_event(self, subtask: int, attempt: int, event: Any) -> None:
        match event:
            case ["number", number]:
                position = self._position(subtask)
                if number != position.received + 1:
                    self._on_wrong(f"the coordinator took {number} from subtask {subtask} after {position.received}")
                self._positions[subtask] = position._replace(received=number)
            case ["wrong", text]:
                self._on_wrong(f"subtask {subtask} {text}")

    # --- checkpoints ---

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self._positions[subtask] = self._cuts.get(checkpoint_id, {}).get(subtask, Position())
        await super().subtask_reset(subtask, checkpoint_id)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self._cuts[checkpoint_id] = dict(self._positions)
        return json.dumps(self._positions).encode() + b"\n" + await super().checkpoint_coordinator(checkpoint_id)

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """No subtask will return to a checkpoint before this one."""
        self._cuts = {cut: positions for cut, positions in self._cuts.items() if cut >= checkpoint_id}
        await super().notify_checkpoint_complete(checkpoint_id)

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """This driver's subtasks no longer restore it. The next driver may, so nothing else is cleaned up here."""
        self._cuts.pop(checkpoint_id, None)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        positions, sink_state = read_state(state)
        self._positions = dict(positions)
        self._cuts = {checkpoint_id: positions}
        await super().reset_to_checkpoint(checkpoint_id, sink_state)

    def _position(self, subtask: int) -> Position:
        return self._positions.get(subtask, Position())


def read_state(state: bytes | None) -> tuple[dict[int, Position], bytes | None]:
    """Read the result of ``checkpoint_coordinator``: the positions, and the sink's own part."""
    if state is None:
        return {}, None
    positions, _, sink_state = state.partition(b"\n")
    return {int(subtask): Position(*position) for subtask, position in json.loads(positions).items()}, sink_state
