# SPDX-License-Identifier: Apache-2.0

"""The outbound half of a ``SubtaskMachine``: what waits, what is unconfirmed, and what a snapshot carries.

See the machine's text. Everything that waits, for any reason, is in one queue. So order is kept by construction, and a
snapshot carries the whole queue (H31). With several checkpoints (H43), an event leaves only when the valve is closed
for none, so it is in the snapshot of each one that was closed when it was sent. With 5 and 6 closed:

    | submitted                | snapshot 5 first         | snapshot 6 first         |
    |--------------------------|--------------------------|--------------------------|
    | before both snapshots    | in both, leaves after 6  | in both, leaves after 5  |
    | between the two          | in 6, leaves after 6     | in 5, leaves after 5     |

If one of them ends without a snapshot, the event is in the other alone, and leaves when neither is closed.

Without ``hold_events`` no checkpoint closes the valve (H79). What leaves between the coordinator's cut and the snapshot
is recorded at the other end; the queue has only what waits for the window.

*Outside of checkpoints* (H152): what a part sends that is outside passes the closed valve, is in no snapshot, and
counts in no position. Its sender waits for the window alone.

*Bounds.* The window of a part bounds its held and unconfirmed events together (H27, H150). What a closed valve holds
must fit into one frame together with the operator's state, so it has a further bound (``SubtaskLimits``): at most half
of a snapshot's bytes, and as many events as a snapshot may carry. The sender waits for capacity as at the window. An
event sent inside the snapshot ignores both bounds, because capacity might become available only after it. It waits in
the queue like any other, and leaves when the peer's window allows. So does one that the handler of an urgent event
sends while the valve is closed, because the snapshot waits for that handler (H92).

*Files* (H190, H192). If a part of the state is in files, the snapshot says that it follows, and the checkpoint is
UPLOADING here until it is stored. The valve is open in the meantime, as after any snapshot. If the upload fails, the
valve stays open too: only the checkpoint has failed.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from protocol.errors import GatewayFull, LocalProtocolError, RemoteProtocolError
from protocol.parts import OWN_PART, PartTable, positions
from protocol.streams import Entry, IncomingStream, OutgoingStream
from protocol.subtask.types import (
    CapacityAvailable,
    EventSubmitted,
    RequestSubmitted,
    SendToCoordinator,
    StartUpload,
    StopUpload,
    SubtaskEffect,
    SubtaskLimits,
    SubtaskStatistics,
)
from protocol.wire.messages import (
    CheckpointAcknowledged,
    CheckpointDeclined,
    ClosedForCheckpoint,
    EventMessage,
    HeldEvent,
    Positions,
    RequestCancelled,
    RequestMessage,
    RestoredEventMessage,
    RestoredRequestMessage,
    StateFailed,
    StateStored,
    UpItem,
)
from protocol.wire.state_handles import StateHandle

Submitted = EventSubmitted | RequestSubmitted
Effects = list[SubtaskEffect]

HELD_OVERHEAD_BYTES = 16
"""The maximum overhead of a held event in a snapshot, in bytes: a list, a number, a length, a flag, a part."""


class SubtaskPhase(Enum):
    """How far one checkpoint has come here. If checkpoints hold events, the valve is closed for it until its snapshot
    is taken, which is before UPLOADING."""

    CLOSED = "closed"
    BARRIER = "barrier"
    DECLINED = "declined"
    UPLOADING = "uploading"
    SNAPSHOT = "snapshot"


CUT = (SubtaskPhase.UPLOADING, SubtaskPhase.SNAPSHOT)
"""The phases of a checkpoint whose snapshot is taken."""


class _Window:
    """What one part has sent.

    ``events`` and ``bytes`` (of events and requests): what is held or unconfirmed, which is what its window bounds.
    ``held_events`` and ``held_bytes``: what of that is held. ``sent``: how many have left in the whole history (H32).
    """

    __slots__ = ("bytes", "events", "held_bytes", "held_events", "outside", "sent")

    def __init__(self, sent: int, *, outside: bool) -> None:
        self.sent = sent
        self.outside = outside
        self.events = self.bytes = 0
        self.held_events = self.held_bytes = 0


class SubtaskOutbound:
    """The items from one attempt. Every method that appends to ``effects`` does so in the order of the wire."""

    __slots__ = (
        "_checkpoints",
        "_closed",
        "_held",
        "_id",
        "_incoming",
        "_latest",
        "_limits",
        "_open_requests",
        "_refused",
        "_subtask",
        "_targets",
        "_windows",
        "attached",
        "hold_events",
        "stream",
    )

    def __init__(
        self,
        task_attempt_id: int,
        subtask: int,
        limits: SubtaskLimits,
        incoming: IncomingStream,
        held: tuple[HeldEvent, ...],
        events_sent: Positions,
        *,
        hold_events: bool,
        table: PartTable,
    ) -> None:
        if why := table.mismatch(events_sent, held):
            raise RemoteProtocolError(f"task {task_attempt_id} is to restore {why}")
        self._id = task_attempt_id
        self.hold_events = hold_events
        self._subtask = subtask
        self._limits = limits
        self._incoming = incoming  # of which items of checkpoints confirm what has come
        self.attached = False
        self.stream: OutgoingStream[UpItem] = OutgoingStream()
        sent = (*events_sent, *(0,) * (table.count - len(events_sent)))
        self._windows = [
            _Window(count, outside=outside) for count, outside in zip(sent, table.outside, strict=True)
        ]  # by part (H150)
        self._held: deque[Submitted | HeldEvent] = deque()
        for event in held:
            self._hold(event)
        self._open_requests: dict[int, int] = {}  # with their parts
        self._refused: dict[int, Submitted] = {}  # of each part, the first that met the window
        self._checkpoints: dict[int, SubtaskPhase] = {}  # not over
        self._closed: list[int] = []  # of these, the ones that close the valve
        self._targets: dict[int, str] = {}  # of savepoints that are not over
        self._latest: int | None = None
        self._release([])

    # --- connection ---------------------------------------------------------------------------------------

    def attach(self, received_seq: int, effects: Effects) -> None:
        """Drop what the peer has, send the rest again, then what fits into the window now (H24)."""
        self._trim(self.stream.resume(received_seq))
        self.attached = True
        effects.extend([SendToCoordinator(item) for item in self.stream.unconfirmed()])
        self._use_capacity(effects)

    def confirm(self, seq: int, effects: Effects) -> None:
        """The coordinator has taken everything up to ``seq``."""
        self._trim(self.stream.confirm(seq))
        self._use_capacity(effects)

    def _trim(self, entries: list[Entry[UpItem]]) -> None:
        for _, size, _, part in entries:
            if size is not None:
                window = self._windows[part]
                window.events -= 1
                window.bytes -= size

    def confirmation(self) -> int:
        """What an item of a checkpoint confirms: nothing without a connection, as a new one begins with ``Confirm``."""
        return self._incoming.confirmation() if self.attached else 0

    def _use_capacity(self, effects: Effects) -> None:
        if self._held:
            self._release(effects)
        if self._refused:
            self._announce_capacity(effects)

    # --- events and requests ------------------------------------------------------------------------------

    def submit(self, submitted: Submitted, effects: Effects) -> None:
        """Hold or send it. Raises ``GatewayFull`` if the window is full, or a snapshot could not carry more (H27)."""
        window = self._windows[submitted.part]
        waits = False
        if not self._has_capacity(submitted, window):
            if not self._is_unbounded(submitted, window):
                self._refused.setdefault(submitted.part, submitted)
                raise GatewayFull(self._describe_window(submitted.part))
            # If events wait for the window, there is no capacity; only an event that needs none could overtake them.
            waits = window.held_events > 0 or not self._fits(submitted)
        if isinstance(submitted, RequestSubmitted):
            if submitted.request_id in self._open_requests:
                raise LocalProtocolError(f"request id {submitted.request_id} is in use")
            self._open_requests[submitted.request_id] = submitted.part
        if waits or (self._closed and not window.outside):
            self._hold(submitted)
        else:
            window.events += 1
            window.bytes += len(submitted.payload)
            self._send_submitted(submitted, window, effects)

    def _is_unbounded(self, submitted: Submitted, window: _Window) -> bool:
        """Whether it is accepted without capacity. What is outside of checkpoints never waits for one, so its sender
        can wait for capacity at any time."""
        return (
            isinstance(submitted, EventSubmitted)
            and not window.outside
            and (submitted.in_snapshot or (submitted.in_urgent and self._awaits_snapshot()))
        )

    def _describe_window(self, part: int) -> str:
        limits, window = self._limits, self._windows[part]
        return (
            f"task {self._id}: {window.held_events} events held, {window.events - window.held_events} unconfirmed, "
            f"{self._open_requests_of(part)} open requests; the window is {limits.window_events} events "
            f"and {limits.window_bytes} bytes, of which a checkpoint may hold {limits.held_events_max} events "
            f"and {limits.snapshot_bytes_max // 2} bytes. Send less at a time, or raise upward_events_max or "
            "upward_bytes_max of GatewayLimits"
        )

    def _hold(self, submitted: Submitted | HeldEvent) -> None:
        self._held.append(submitted)
        window, size = self._windows[submitted.part], len(submitted.payload)
        window.events += 1
        window.bytes += size
        window.held_events += 1
        window.held_bytes += size

    def _let_go(self, submitted: Submitted | HeldEvent) -> _Window:
        """It is no longer held. It counts in its window until it is confirmed; return that window."""
        window = self._windows[submitted.part]
        window.held_events -= 1
        window.held_bytes -= len(submitted.payload)
        return window

    def _drop(self, submitted: Submitted | HeldEvent) -> None:
        """It is no longer held, and will never leave."""
        window = self._let_go(submitted)
        window.events -= 1
        window.bytes -= len(submitted.payload)

    @property
    def events_sent(self) -> Positions:
        """How many events and requests have been sent in the whole history, by part (H32, H150)."""
        return positions([window.sent for window in self._windows])

    def _send_submitted(self, submitted: Submitted | HeldEvent, window: _Window, effects: Effects) -> None:
        seq = self.stream.last_seq + 1
        payload, part = submitted.payload, submitted.part
        item: UpItem
        if isinstance(submitted, EventSubmitted):
            item = EventMessage(self._id, seq, payload, part)
        elif isinstance(submitted, RequestSubmitted):
            item = RequestMessage(self._id, seq, submitted.request_id, payload, part)
        elif submitted.is_request:
            item = RestoredRequestMessage(self._id, seq, submitted.sender, payload, part)
        else:
            item = RestoredEventMessage(self._id, seq, submitted.sender, payload, part)
        if not window.outside:
            window.sent += 1
        self.stream.append(item, len(payload), None, part)
        if self.attached:
            effects.append(SendToCoordinator(item))

    def send_item(self, item: UpItem, effects: Effects) -> None:
        """Send one of the protocol's own items, numbered ``next_seq``, which pass the valve and the window."""
        self.stream.append(item)
        if self.attached:
            effects.append(SendToCoordinator(item))

    @property
    def next_seq(self) -> int:
        return self.stream.last_seq + 1

    def _release(self, effects: Effects) -> None:
        held = self._held
        if self._closed:
            return
        while held and self._fits(held[0]):
            submitted = held.popleft()
            self._send_submitted(submitted, self._let_go(submitted), effects)
        if held and self._windows[held[0].part].held_events < len(held):
            self._release_others(effects)

    def _release_others(self, effects: Effects) -> None:
        """The first one waits for the window of its part, which holds back no other part (H150)."""
        waiting: set[int] = set()
        left: deque[Submitted | HeldEvent] = deque()
        for submitted in self._held:
            if submitted.part not in waiting and self._fits(submitted):
                self._send_submitted(submitted, self._let_go(submitted), effects)
            else:
                waiting.add(submitted.part)
                left.append(submitted)
        self._held = left

    def _fits(self, submitted: Submitted | HeldEvent) -> bool:
        """Whether the peer's window has capacity for an event that may leave."""
        window = self._windows[submitted.part]
        count = window.events - window.held_events
        if count >= self._limits.window_events:
            return False
        unconfirmed_bytes = window.bytes - window.held_bytes
        return not count or unconfirmed_bytes + len(submitted.payload) <= self._limits.window_bytes

    def _has_capacity(self, submitted: Submitted, window: _Window) -> bool:
        """Whether a new event may be accepted: held and unconfirmed events together must fit into the window, and what
        a closed valve holds into a snapshot."""
        limits, count = self._limits, window.events
        if count >= limits.window_events:
            return False
        if (
            self._open_requests
            and isinstance(submitted, RequestSubmitted)
            and self._open_requests_of(submitted.part) >= limits.window_events
        ):
            return False
        size = len(submitted.payload)
        if count and window.bytes + size > limits.window_bytes:
            return False
        if not (self._closed and self._held) or window.outside:
            return True
        held_bytes = self._held_size() + size + HELD_OVERHEAD_BYTES
        return len(self._held) < limits.held_events_max and held_bytes <= limits.snapshot_bytes_max // 2

    def _held_size(self) -> int:
        """How many bytes the held events take in a snapshot, at most."""
        if not self._held:  # as most often
            return 0
        return sum(window.held_bytes for window in self._windows) + HELD_OVERHEAD_BYTES * len(self._held)

    def _open_requests_of(self, part: int) -> int:
        return list(self._open_requests.values()).count(part)

    def _announce_capacity(self, effects: Effects) -> None:
        """Once for each part, when what was refused first would be accepted (H27)."""
        for part, submitted in list(self._refused.items()):
            if self._has_capacity(submitted, self._windows[part]):
                del self._refused[part]
                effects.append(CapacityAvailable())

    def resolve(self, request_id: int, effects: Effects) -> bool:
        """The request has its answer. False if it is not open."""
        if self._open_requests.pop(request_id, None) is None:
            return False
        self._announce_capacity(effects)
        return True

    def asked_outside(self, request_id: int) -> bool:
        """Whether an open request is one of a part outside of checkpoints."""
        return self._windows[self._open_requests.get(request_id, OWN_PART)].outside

    def abandon(self, request_id: int, effects: Effects) -> None:
        """Nobody waits for the answer any more: take the request back if it is held, otherwise report that (H85)."""
        if request_id not in self._open_requests:
            return
        for place, submitted in enumerate(self._held):
            if isinstance(submitted, RequestSubmitted) and submitted.request_id == request_id:
                del self._held[place]
                self._drop(submitted)
                del self._open_requests[request_id]
                self._use_capacity(effects)
                return
        self.send_item(RequestCancelled(self._id, self.next_seq, request_id), effects)

    def open_requests(self) -> list[int]:
        """The requests without an answer, oldest first."""
        return sorted(self._open_requests)

    def holds(self) -> int:
        """How many events and requests wait."""
        return len(self._held)

    def forget(self) -> None:
        """The operator sends nothing more. Items in the stream may still leave."""
        for submitted in self._held:
            self._drop(submitted)
        self._held.clear()
        self._open_requests.clear()
        self._refused.clear()
        self._checkpoints.clear()
        self._targets.clear()
        self._closed.clear()

    def end(self) -> None:
        """The attempt is over: nothing leaves any more."""
        self.forget()
        self.stream.clear()
        for window in self._windows:
            window.events = window.bytes = 0
        self.attached = False

    # --- checkpoints --------------------------------------------------------------------------------------

    def rises(self, checkpoint_id: int) -> bool:
        """Whether the id is higher than all before (H4)."""
        return self._latest is None or checkpoint_id > self._latest

    def phase(self, checkpoint_id: int) -> SubtaskPhase | None:
        """How far the checkpoint has come. None if it is over or unknown."""
        return self._checkpoints.get(checkpoint_id)

    def _awaits_snapshot(self) -> bool:
        """Whether a checkpoint that is not over waits for its snapshot here."""
        return any(phase not in CUT for phase in self._checkpoints.values())

    def close(self, checkpoint_id: int, effects: Effects) -> None:
        """Close for the checkpoint, and report it after everything that was sent before (H40).

        Without ``hold_events``, only make it known, for a barrier that comes apart.
        """
        self._latest = checkpoint_id
        self._checkpoints[checkpoint_id] = SubtaskPhase.CLOSED
        if self.hold_events:
            self._closed.append(checkpoint_id)
        self.send_item(ClosedForCheckpoint(self._id, self.next_seq, checkpoint_id, self.confirmation()), effects)

    def meet_barrier(self, checkpoint_id: int) -> None:
        """The barrier has come: a snapshot may follow. Without ``hold_events`` it may be the first sign of it (H79)."""
        if checkpoint_id not in self._checkpoints:
            self._latest = checkpoint_id
        self._checkpoints[checkpoint_id] = SubtaskPhase.BARRIER

    def aim(self, checkpoint_id: int, target: str) -> None:
        """The checkpoint is a savepoint, whose files belong into this folder (H193).

        Its barrier follows. So if another one is still unknown, its barrier never comes.
        """
        self._targets = {n: known for n, known in self._targets.items() if n in self._checkpoints}
        self._targets[checkpoint_id] = target

    def acknowledge(self, checkpoint_id: int, state: bytes, effects: Effects, *, state_follows: bool = False) -> None:
        """Send the snapshot with all that waits, in order (H31), then open the valve for it. Decline a snapshot that is
        too large for a frame."""
        if excess := self._describe_excess(len(state)):
            self.decline(checkpoint_id, excess, effects)
            return
        self._checkpoints[checkpoint_id] = SubtaskPhase.UPLOADING if state_follows else SubtaskPhase.SNAPSHOT
        seq = self.next_seq
        held, confirmed = self._snapshot_held(), self.confirmation()
        snapshot = CheckpointAcknowledged(
            self._id, seq, checkpoint_id, state, held, self.events_sent, confirmed, state_follows
        )
        self.send_item(snapshot, effects)
        if checkpoint_id in self._closed:
            self._open(checkpoint_id, effects)
        if state_follows:
            effects.append(StartUpload(checkpoint_id, self._targets.get(checkpoint_id, "")))

    def state_stored(self, checkpoint_id: int, handle: StateHandle, effects: Effects) -> None:
        """The files of the snapshot are stored: report their handle (H190)."""
        self._checkpoints[checkpoint_id] = SubtaskPhase.SNAPSHOT
        stored = StateStored(self._id, self.next_seq, checkpoint_id, handle, self.confirmation())
        self.send_item(stored, effects)

    def state_failed(self, checkpoint_id: int, reason: str, effects: Effects) -> None:
        """The files of the snapshot are not stored. The valve stays open (H192)."""
        self._checkpoints[checkpoint_id] = SubtaskPhase.SNAPSHOT
        failed = StateFailed(self._id, self.next_seq, checkpoint_id, reason, self.confirmation())
        self.send_item(failed, effects)

    def uploading(self) -> list[int]:
        """The checkpoints whose files are being uploaded."""
        return [n for n, phase in self._checkpoints.items() if phase is SubtaskPhase.UPLOADING]

    def _snapshot_held(self) -> tuple[HeldEvent, ...]:
        return tuple(
            [
                submitted
                if isinstance(submitted, HeldEvent)
                else HeldEvent(
                    self._subtask, submitted.payload, isinstance(submitted, RequestSubmitted), submitted.part
                )
                for submitted in self._held
            ]
        )

    def _describe_excess(self, state_bytes: int) -> str:
        """Why a snapshot with such a state cannot leave; empty if it can."""
        limits, count = self._limits, len(self._held)
        held_bytes = self._held_size()
        if count <= limits.held_events_max and state_bytes + held_bytes <= limits.snapshot_bytes_max:
            return ""
        return (
            f"the snapshot is too large: {state_bytes} bytes of state and {count} held events of {held_bytes} bytes, "
            f"where {limits.snapshot_bytes_max} bytes and {limits.held_events_max} events fit into a message: "
            "keep less state in the operator, or send less at a time"
        )

    def check_final_state(self, state: bytes) -> None:
        """Raise ``LocalProtocolError`` if it is too large for a frame."""
        if len(state) > self._limits.snapshot_bytes_max:
            raise LocalProtocolError(
                f"the final state is too large: {len(state)} bytes, where {self._limits.snapshot_bytes_max} fit into a "
                "message: keep less state in the operator"
            )

    def decline(self, checkpoint_id: int, reason: str, effects: Effects) -> None:
        """Report that there is no snapshot. The valve stays closed until the checkpoint is over."""
        self._checkpoints[checkpoint_id] = SubtaskPhase.DECLINED
        declined = CheckpointDeclined(self._id, self.next_seq, checkpoint_id, reason, self.confirmation())
        self.send_item(declined, effects)

    def end_checkpoint(self, checkpoint_id: int, effects: Effects) -> None:
        """Open the valve for it if needed. An unknown checkpoint changes nothing (H44)."""
        if self._checkpoints.pop(checkpoint_id, None) is SubtaskPhase.UPLOADING:
            effects.append(StopUpload(checkpoint_id))
        if self._targets:
            self._targets.pop(checkpoint_id, None)
        if checkpoint_id in self._closed:
            self._open(checkpoint_id, effects)

    def _open(self, checkpoint_id: int, effects: Effects) -> None:
        self._closed.remove(checkpoint_id)
        self._use_capacity(effects)  # what was refused only because of the snapshot's size may be accepted now

    # --- figures ------------------------------------------------------------------------------------------

    def statistics(self) -> SubtaskStatistics:
        return SubtaskStatistics(
            len(self._held),
            sum(window.held_bytes for window in self._windows),
            sum(window.events - window.held_events for window in self._windows),
            sum(window.bytes - window.held_bytes for window in self._windows),
            len(self._open_requests),
            tuple(self._closed),
        )

    def check_invariants(self) -> None:
        self.stream.check_invariants()
        closed = [n for n, phase in self._checkpoints.items() if phase not in CUT]
        assert sorted(self._closed) == (sorted(closed) if self.hold_events else [])
        assert len(set(self._targets) - set(self._checkpoints)) <= 1
        for part, window in enumerate(self._windows):
            held = [one for one in self._held if one.part == part]
            assert (window.held_events, window.held_bytes) == (len(held), sum(len(one.payload) for one in held))
            unconfirmed = (window.events - window.held_events, window.bytes - window.held_bytes)
            assert unconfirmed == self.stream.counted(part)
            assert unconfirmed[0] <= self._limits.window_events
            assert not held or self._closed or not self._fits(held[0]), "held, though it may leave"
            assert not (held and window.outside), "held, though it is outside of checkpoints"
