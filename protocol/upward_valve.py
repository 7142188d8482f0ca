"""The subtask's side of one upward stream: what waits, what is unconfirmed, and what a snapshot carries.

This is the half of a ``SubtaskMachine`` that sends; see the text there. Everything that waits stands in one
queue, for whichever reason it waits, so order is kept by construction, and a snapshot carries the whole
queue (H31).
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from protocol.errors import GatewayFull, LocalProtocolError
from protocol.messages import (
    CheckpointAcknowledged,
    CheckpointDeclined,
    ClosedForCheckpoint,
    EventMessage,
    RequestMessage,
    UpItem,
)
from protocol.streams import OutgoingStream, RoomAvailable
from protocol.subtask_types import (
    EventSubmitted,
    RequestSubmitted,
    SendToCoordinator,
    SubtaskEffect,
    SubtaskLimits,
    SubtaskStatistics,
)

Submitted = EventSubmitted | RequestSubmitted
Effects = list[SubtaskEffect]


class Phase(Enum):
    """How far one checkpoint has come here. The valve is closed for it until SNAPSHOT."""

    CLOSED = "closed"
    BARRIER = "barrier"
    DECLINED = "declined"
    SNAPSHOT = "snapshot"


class UpwardValve:
    """What one attempt sends. Every method that appends to ``effects`` does so in the order of the wire."""

    __slots__ = (
        "_checkpoints",
        "_closed",
        "_held",
        "_held_bytes",
        "_id",
        "_latest",
        "_limits",
        "_open_requests",
        "_refused",
        "attached",
        "stream",
    )

    def __init__(self, task_attempt_id: int, limits: SubtaskLimits, held: tuple[bytes, ...]) -> None:
        self._id = task_attempt_id
        self._limits = limits
        self.attached = False
        self.stream: OutgoingStream[UpItem] = OutgoingStream()
        self._held: deque[Submitted] = deque(EventSubmitted(payload) for payload in held)
        self._held_bytes = sum(len(payload) for payload in held)
        self._open_requests: set[int] = set()
        self._refused: Submitted | None = None  # the first that met the window
        self._checkpoints: dict[int, Phase] = {}  # not over
        self._closed: list[int] = []  # of these, the ones that close the valve
        self._latest: int | None = None
        self._release([])

    # --- connection ---------------------------------------------------------------------------------------

    def attach(self, received_seq: int, effects: Effects) -> None:
        """Trim what the peer has, send the rest again, then what fits into the window now (H24)."""
        self.stream.resume(received_seq)
        self.attached = True
        effects.extend([SendToCoordinator(item) for item in self.stream.unconfirmed()])
        self._make_room(effects)

    def confirm(self, seq: int, effects: Effects) -> None:
        """The coordinator has taken everything up to ``seq``."""
        self.stream.confirm(seq)
        self._make_room(effects)

    def _make_room(self, effects: Effects) -> None:
        if self._held:
            self._release(effects)
        if self._refused is not None:
            self._announce_room(effects)

    # --- events and requests ------------------------------------------------------------------------------

    def submit(self, submitted: Submitted, effects: Effects) -> None:
        """Hold or send it. Raises ``GatewayFull`` at the window (H27)."""
        if not self._has_room(submitted):
            if self._refused is None:
                self._refused = submitted
            raise GatewayFull(
                f"task {self._id}: {len(self._held)} events held, {self.stream.events_unconfirmed} unconfirmed, "
                f"{len(self._open_requests)} open requests; the window is {self._limits.window_events} events "
                f"and {self._limits.window_bytes} bytes"
            )
        if isinstance(submitted, RequestSubmitted):
            if submitted.request_id in self._open_requests:
                raise LocalProtocolError(f"request id {submitted.request_id} is in use")
            self._open_requests.add(submitted.request_id)
        if self._closed:  # what waits for the window alone leaves no room here, so nothing is overtaken
            self._held.append(submitted)
            self._held_bytes += len(submitted.payload)
        else:
            self._send_submitted(submitted, effects)

    def _send_submitted(self, submitted: Submitted, effects: Effects) -> None:
        seq = self.stream.last_seq + 1
        payload = submitted.payload
        item: UpItem
        if isinstance(submitted, EventSubmitted):
            item = EventMessage(self._id, seq, payload)
        else:
            item = RequestMessage(self._id, seq, submitted.request_id, payload)
        self.stream.append(item, len(payload))
        if self.attached:
            effects.append(SendToCoordinator(item))

    def send_item(self, item: UpItem, effects: Effects) -> None:
        """One of the protocol's own items, numbered ``next_seq``: it passes the valve and the window."""
        self.stream.append(item)
        if self.attached:
            effects.append(SendToCoordinator(item))

    @property
    def next_seq(self) -> int:
        return self.stream.last_seq + 1

    def _release(self, effects: Effects) -> None:
        held = self._held
        while held and not self._closed and self._fits(held[0]):
            submitted = held.popleft()
            self._held_bytes -= len(submitted.payload)
            self._send_submitted(submitted, effects)

    def _fits(self, submitted: Submitted) -> bool:
        """Whether the peer's window has room for one that may leave."""
        count = self.stream.events_unconfirmed
        if count >= self._limits.window_events:
            return False
        return not count or self.stream.bytes_unconfirmed + len(submitted.payload) <= self._limits.window_bytes

    def _has_room(self, submitted: Submitted) -> bool:
        """Whether a new one may be accepted: held and unconfirmed ones together fit into the window."""
        limits = self._limits
        count = len(self._held) + self.stream.events_unconfirmed
        if count >= limits.window_events:
            return False
        if isinstance(submitted, RequestSubmitted) and len(self._open_requests) >= limits.window_events:
            return False
        size = self._held_bytes + self.stream.bytes_unconfirmed + len(submitted.payload)
        return not count or size <= limits.window_bytes

    def _announce_room(self, effects: Effects) -> None:
        """Once, when what was refused first would be accepted (H27)."""
        if self._refused is not None and self._has_room(self._refused):
            self._refused = None
            effects.append(RoomAvailable())

    def resolve(self, request_id: int, effects: Effects) -> bool:
        """The request has its answer; False if it is not open."""
        if request_id not in self._open_requests:
            return False
        self._open_requests.remove(request_id)
        self._announce_room(effects)
        return True

    def open_requests(self) -> list[int]:
        """The requests without an answer, oldest first."""
        return sorted(self._open_requests)

    def holds(self) -> int:
        """How many events and requests wait."""
        return len(self._held)

    def forget(self) -> None:
        """The operator sends nothing more; what is in the stream may still leave."""
        self._held.clear()
        self._held_bytes = 0
        self._open_requests.clear()
        self._refused = None
        self._checkpoints.clear()
        self._closed.clear()

    # --- checkpoints --------------------------------------------------------------------------------------

    def rises(self, checkpoint_id: int) -> bool:
        """Whether the id is higher than all before (H4)."""
        return self._latest is None or checkpoint_id > self._latest

    def phase(self, checkpoint_id: int) -> Phase | None:
        """How far it has come; None for one that is over or unknown."""
        return self._checkpoints.get(checkpoint_id)

    def close(self, checkpoint_id: int, effects: Effects) -> None:
        """Close for it, and say so behind everything that was sent before (H40)."""
        self._latest = checkpoint_id
        self._checkpoints[checkpoint_id] = Phase.CLOSED
        self._closed.append(checkpoint_id)
        self.send_item(ClosedForCheckpoint(self._id, self.next_seq, checkpoint_id), effects)

    def meet_barrier(self, checkpoint_id: int) -> None:
        """The barrier is in the mailbox: a snapshot may come."""
        self._checkpoints[checkpoint_id] = Phase.BARRIER

    def acknowledge(self, checkpoint_id: int, state: bytes, effects: Effects) -> None:
        """Send the snapshot with all that waits, in order (H31); then open for it."""
        self._checkpoints[checkpoint_id] = Phase.SNAPSHOT
        held = tuple([submitted.payload for submitted in self._held])
        self.send_item(CheckpointAcknowledged(self._id, self.next_seq, checkpoint_id, state, held), effects)
        self._closed.remove(checkpoint_id)
        self._release(effects)

    def decline(self, checkpoint_id: int, reason: str, effects: Effects) -> None:
        """Say that there is no snapshot; the valve stays closed until the checkpoint is over."""
        self._checkpoints[checkpoint_id] = Phase.DECLINED
        self.send_item(CheckpointDeclined(self._id, self.next_seq, checkpoint_id, reason), effects)

    def end_checkpoint(self, checkpoint_id: int, effects: Effects) -> bool:
        """Open for it if need be; False for an unknown one, which changes nothing (H44)."""
        if self._checkpoints.pop(checkpoint_id, None) is None:
            return False
        if checkpoint_id in self._closed:
            self._closed.remove(checkpoint_id)
            self._release(effects)
        return True

    # --- figures ------------------------------------------------------------------------------------------

    def statistics(self) -> SubtaskStatistics:
        return SubtaskStatistics(
            len(self._held),
            self._held_bytes,
            self.stream.events_unconfirmed,
            self.stream.bytes_unconfirmed,
            len(self._open_requests),
            tuple(self._closed),
        )

    def check_invariants(self) -> None:
        self.stream.check_invariants()
        closed = [n for n, phase in self._checkpoints.items() if phase is not Phase.SNAPSHOT]
        assert sorted(closed) == sorted(self._closed)
        assert self._held_bytes == sum(len(held.payload) for held in self._held)
        if self._held:
            assert self._closed or not self._fits(self._held[0]), "held, though it may leave"
        assert self.stream.events_unconfirmed <= self._limits.window_events
