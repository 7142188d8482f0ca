# SPDX-License-Identifier: Apache-2.0

"""The outbound half of a ``GatewayMachine``: what is held, what is unconfirmed, and what a cut waits for.

See the machine's text. Of what the peer sends, this half sees only confirmations and acknowledgements. It never ends by
itself.

Two counts make a drain cheap (H42). Events are confirmed in the order in which they were submitted, whatever
held them meanwhile. So "everything submitted before the cut is confirmed" is: as many are settled as were
submitted then.

A held event carries the id that was the highest closed one when it was submitted. It leaves when neither
that id nor a lower one is closed any more (H43). Later events carry no lower id unless the higher ones have
opened, so the head of the queue always decides, and order is never lost. With 5 and 6 closed:

    | submitted           | leaves, when 5 opens first | leaves, when 6 opens first |
    |---------------------|----------------------------|----------------------------|
    | between their cuts  | with 5                     | with 5                     |
    | after the cut of 6  | with 6                     | with 5                     |
    | between the two     | with 6                     | with 5                     |

An event or answer of a part outside of checkpoints passes the closed valve, and no cut waits for it (H152).

It makes no difference why one opens: through this attempt's own acknowledgement (H41), an abort, or a savepoint that is
over, for which no completion ever comes (H49).

Without ``hold_events`` (H79), ``CutReached`` is the first sign of a checkpoint, and its barrier is the next item.
Nothing closes, because first in, first out is enough: what was sent before the cut is before the barrier, and the
subtask's snapshot proves that it came. The tracker may give the checkpoint up before the coordinator's cut comes here.
So the id of an abort that comes first is remembered until a later cut, and no barrier leaves for it. If barriers travel
apart, they could overtake events, so checkpoints begin and close as otherwise; only the subtask's own valve stays open.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from protocol.describing import type_name
from protocol.errors import AttemptOver, ConfirmationTimeout, LocalProtocolError
from protocol.gateway.types import (
    AnswerSubmitted,
    CheckpointOutcome,
    ConfirmEvent,
    EventSubmitted,
    ExpireEvent,
    FailEvent,
    GatewayEffect,
    GatewayLimits,
    InjectBarrier,
    RefuseMessage,
    ReportAcknowledged,
    ReportStateFailed,
    ReportStateStored,
    SendToAttempt,
)
from protocol.ids import ExecutionAttempt
from protocol.parts import PartTable, fewer
from protocol.streams import Entry, IncomingStream, OutgoingStream
from protocol.wire.messages import (
    AnswerMessage,
    BarrierMessage,
    CheckpointAborted,
    CheckpointAcknowledged,
    CheckpointCompleted,
    CloseForCheckpoint,
    DownItem,
    EventMessage,
    HeldEvent,
    SavepointTaken,
    SavepointTarget,
    StartProcessing,
    StateFailed,
    StateStored,
    UrgentEventMessage,
)

Submitted = EventSubmitted | AnswerSubmitted

_SILENT = (
    "Its process has given no sign of life for {silent_s:.1f} s. Usually a C extension or a tight loop in native code "
    "holds Python's interpreter lock, or the process is stopped, swapped out or cut off. If a native call may take so "
    "long, raise confirm_timeout_s for this operator: coordinate(..., gateway=GatewayLimits(confirm_timeout_s=...))"
)
_TALKING = (
    "Its process sent something {silent_s:.1f} s ago, so it is alive. Usually the operator does not take its events, "
    "and its mailbox is full"
)
Effects = list[GatewayEffect]

_ENDS: dict[CheckpointOutcome, type[CheckpointCompleted | CheckpointAborted | SavepointTaken]] = {
    CheckpointOutcome.COMPLETED: CheckpointCompleted,
    CheckpointOutcome.ABORTED: CheckpointAborted,
    CheckpointOutcome.SAVEPOINT: SavepointTaken,
}

_NONE: frozenset[int] = frozenset()
"""Shared by all gateways, of which there may be thousands: each empty set takes 216 bytes."""


class GatewayPhase(Enum):
    """How far one checkpoint has come at this gateway. If it holds events, the valve is closed from CUT to BARRIER."""

    REQUESTED = "requested"
    CUT = "cut"
    BARRIER = "barrier"
    UPLOADING = "uploading"
    ACKNOWLEDGED = "acknowledged"


# In Python 3.11, looking up an attribute of an Enum class takes ten times as long as looking up a global name.
_REQUESTED, _CUT, _BARRIER, _UPLOADING, _ACKNOWLEDGED = GatewayPhase
CUT = (_CUT, _BARRIER)
"""The phases of a checkpoint that is cut, and waits for the attempt's snapshot."""


class _Checkpoint:
    """A gateway's record of a checkpoint that is not over."""

    __slots__ = ("order_at_cut", "phase", "submitted_at_cut")

    def __init__(self) -> None:
        self.phase = _REQUESTED
        self.submitted_at_cut = 0
        self.order_at_cut = 0


class GatewayOutbound:
    """The items to one attempt. Every method that appends to ``effects`` does so in the order of the wire."""

    __slots__ = (
        "_aborted",
        "_apart",
        "_attempt",
        "_checkpoints",
        "_held",
        "_held_bytes",
        "_id",
        "_incoming",
        "_last_event_seq",
        "_latest",
        "_latest_cut",
        "_limits",
        "_order",
        "_outside",
        "_paused_s",
        "_progressed",
        "_settled",
        "_start_held",
        "_submitted",
        "answers_pending",
        "attached",
        "awaited",
        "closed",
        "closes",
        "stopped_at",
        "stream",
        "tolerated",
        "unconfirmed_bytes",
        "unconfirmed_events",
    )

    def __init__(
        self,
        attempt: ExecutionAttempt,
        limits: GatewayLimits,
        incoming: IncomingStream,
        *,
        barriers_apart: bool,
        hold_events: bool,
        table: PartTable,
    ) -> None:
        self._attempt = attempt
        self._outside = table.outside
        self._apart = barriers_apart
        self.closes = hold_events or barriers_apart  # whether a checkpoint closes the valve
        self._id = attempt.task_attempt_id
        self._limits = limits
        self._incoming = incoming  # of which items of checkpoints confirm what has come
        self.stream: OutgoingStream[DownItem] = OutgoingStream()
        self.unconfirmed_events = 0  # and answers, in the stream
        self.unconfirmed_bytes = 0
        # Held: the id that holds it, its place among all that were submitted, itself, its part.
        self._held: list[tuple[int, int, Submitted, int]] = []
        self._held_bytes = 0
        # In the stream and to be confirmed in time: item number, reading of the connected clock, whether a checkpoint
        # waits for it. Plain numbers, because there may be thousands, and objects would be work for the garbage
        # collector.
        self.awaited: list[tuple[int, float, bool]] = []
        self.tolerated: list[tuple[int, float, bool]] = []  # the same of the loss-tolerant ones that may expire (H72)
        self._order = 0  # events and answers submitted, of all kinds;
        self._submitted = 0  # of these, the ones that a checkpoint waits for;
        self._settled = 0  # of those, the confirmed ones
        self._last_event_seq = 0
        self.answers_pending = [0] * table.count  # held or unconfirmed, by part
        self._start_held = False  # StartProcessing waits for the last held event to leave
        # The connected clock stands still while no connection is up.
        self.attached = False
        self.stopped_at: float | None = None
        self._paused_s = 0.0
        self._progressed = -inf  # when a part of a large message last left; also a reading of the connected clock
        self._checkpoints: dict[int, _Checkpoint] = {}  # not over
        self.closed: list[int] = []  # the ids that close the valve, ascending
        self._latest: int | None = None
        self._latest_cut: int | None = None
        self._aborted: frozenset[int] = _NONE  # given up before their cut came; only if nothing makes them known before

    # --- connection and clock -----------------------------------------------------------------------------

    def attach(self, received_seq: int, now: float, effects: Effects) -> None:
        """Drop what the peer has, send the rest again, and let the confirm clock continue (H24).

        What the peer has may let a barrier leave. It keeps its place, after what is sent again.
        """
        entries = self.stream.resume(received_seq)
        self.attached = False
        self._trim(entries, received_seq, effects)
        if self.stopped_at is not None:
            self._paused_s += now - self.stopped_at
            self.stopped_at = None
        self.attached = True
        effects.extend([SendToAttempt(item) for item in self.stream.unconfirmed()])

    def detach(self, now: float) -> None:
        self.attached = False
        self.stopped_at = now

    @property
    def unconfirmed_since(self) -> float | None:
        """Since when the oldest unconfirmed event has been out, on the clock of ``now``; None if none is awaited."""
        return self.awaited[0][1] + self._paused_s if self.awaited else None

    def confirm_deadline(self) -> float | None:
        """When the oldest unconfirmed event is late, if the connection lasts. None if nothing is awaited."""
        return self._deadline_of(self.awaited)

    def progress(self, now: float) -> None:
        """A part of a large message has left: what waits for it or after it gets the whole time again."""
        self._progressed = now - self._paused_s

    def _deadline_of(self, waiting: list[tuple[int, float, bool]]) -> float | None:
        if not waiting:
            return None
        return max(waiting[0][1], self._progressed) + self._limits.confirm_timeout_s + self._paused_s

    def tolerant_deadline(self) -> float | None:
        """When the wait for the oldest unconfirmed loss-tolerant event ends. None if there is none."""
        return self._deadline_of(self.tolerated)

    def expire_tolerant(self, now: float, effects: Effects) -> None:
        """End the wait for each late loss-tolerant event. The events themselves stay in the stream (H72)."""
        while (deadline := self.tolerant_deadline()) is not None and now >= deadline:
            seq, started, _ = self.tolerated.pop(0)
            event_id = self.stream.entry(seq)[2]
            assert event_id is not None
            waited_s = now - self._paused_s - started
            name = f"loss-tolerant event {event_id} (item {seq}) for {self._attempt}"
            reason = f"{name} was not confirmed within {waited_s:.3f} s"
            effects.append(ExpireEvent(event_id, ConfirmationTimeout(reason)))

    def describe_late(self, now: float, heard_at: float) -> tuple[str, int | None]:
        """Describe what is late (H25), and return its event id unless it is an answer.

        ``heard_at``: when something last came from the peer, which tells the likely cause (H69).
        """
        seq, started, _ = self.awaited[0]
        waited_s = now - self._paused_s - started
        item, _, event_id, _ = self.stream.entry(seq)
        name = f"the answer to request {item.request_id}" if isinstance(item, AnswerMessage) else f"event {event_id}"
        silent_s = max(0.0, now - heard_at)
        cause = _SILENT if silent_s >= self._limits.confirm_timeout_s / 2 else _TALKING
        return (
            f"{name} (item {seq}) for {self._attempt} was not confirmed within {waited_s:.3f} s. "
            f"{cause.format(silent_s=silent_s)}"
        ), event_id

    # --- events and answers -------------------------------------------------------------------------------

    def submit_answer(self, answer: AnswerSubmitted, part: int, now: float, effects: Effects) -> None:
        """Like an event (H33). The bound on the peer's open requests bounds the answers."""
        self.answers_pending[part] += 1
        self.submit(answer, part, True, now, effects)

    def submit(self, submitted: Submitted, part: int, awaited: bool, now: float, effects: Effects) -> None:
        """Hold the event or answer, or send it. The shell has made sure that there is capacity (H27)."""
        inside = not self._outside[part]
        if inside:  # otherwise it passes the valve, and no checkpoint waits for it (H152)
            self._order += 1
            self._submitted += awaited
            if self.closed:
                self._held.append((self.closed[-1], self._order, submitted, part))
                self._held_bytes += len(submitted.payload)
                return
        self._send_submitted(submitted, part, inside, now, effects)

    def start_processing(self, effects: Effects) -> None:
        """Let the operator begin, after everything that was submitted so far (H66)."""
        if self._held:
            self._start_held = True
            return
        self._last_event_seq = self.stream.last_seq + 1  # a barrier that travels apart must not come before it either
        self._send_item(StartProcessing(self._id, self._last_event_seq), effects)

    def _send_submitted(self, submitted: Submitted, part: int, inside: bool, now: float, effects: Effects) -> None:
        stream = self.stream
        seq = stream.last_seq + 1
        payload = submitted.payload
        size = len(payload)
        item: DownItem
        if isinstance(submitted, EventSubmitted):
            item = (UrgentEventMessage if submitted.urgent else EventMessage)(self._id, seq, payload, part)
            stream.append(item, size, submitted.event_id, part)
            awaited = not submitted.loss_tolerant
        else:
            item = AnswerMessage(self._id, seq, submitted.request_id, submitted.error, payload)
            stream.append(item, size, None, part)
            awaited = True
        self.unconfirmed_events += 1
        self.unconfirmed_bytes += size
        reading = now if self.stopped_at is None else self.stopped_at
        (self.awaited if awaited else self.tolerated).append((seq, reading - self._paused_s, inside))
        if inside:
            self._last_event_seq = seq
        if self.attached:
            effects.append(SendToAttempt(item))

    def _send_item(self, item: DownItem, effects: Effects) -> None:
        """Send one of the protocol's own items, which pass the valve and count against no bound."""
        self.stream.append(item)
        if self.attached:
            effects.append(SendToAttempt(item))

    def _confirmation(self) -> int:
        """What an item of a checkpoint confirms: nothing without a connection, as a new one begins with ``Confirm``."""
        return self._incoming.confirmation() if self.attached else 0

    def confirm(self, seq: int, effects: Effects) -> None:
        """The peer has everything up to ``seq`` in its mailbox."""
        self._trim(self.stream.confirm(seq), seq, effects)

    def _trim(self, entries: list[Entry[DownItem]], seq: int, effects: Effects) -> None:
        for _, size, event_id, part in entries:
            if size is None:
                continue
            self.unconfirmed_events -= 1
            self.unconfirmed_bytes -= size
            if event_id is not None:
                effects.append(ConfirmEvent(event_id))
            else:  # an answer
                self.answers_pending[part] -= 1
        tolerated = self.tolerated
        while tolerated and tolerated[0][0] <= seq:
            tolerated.pop(0)
        count = 0
        for number, _, inside in self.awaited:
            if number > seq:
                break
            self._settled += inside
            count += 1
        if count:
            del self.awaited[:count]
            if self.closed:
                self._send_barriers(effects)

    def fail_all(self, reason: str, late: int | None, effects: Effects) -> None:
        """Fail every event that is not confirmed, in order, and forget everything (H26). ``late``: the event that
        timed out, if any."""
        for event_id in self.stream.tags():
            kind = ConfirmationTimeout if event_id == late else AttemptOver
            effects.append(FailEvent(event_id, kind(reason)))
        for _, _, held, _ in self._held:
            if isinstance(held, EventSubmitted):
                effects.append(FailEvent(held.event_id, AttemptOver(reason)))
        self.stream.clear()
        self.unconfirmed_events = self.unconfirmed_bytes = 0
        self._held.clear()
        self._held_bytes = 0
        self.awaited.clear()
        self.tolerated.clear()
        self._settled = self._submitted
        self.answers_pending = [0] * len(self.answers_pending)
        self._start_held = False
        self._checkpoints.clear()
        self._aborted = _NONE
        self.closed.clear()
        self.attached = False
        self.stopped_at = None

    # --- checkpoints --------------------------------------------------------------------------------------

    def knows(self, checkpoint_id: int) -> bool:
        """Whether the checkpoint has begun here and is not over."""
        return checkpoint_id in self._checkpoints

    def request_close(self, checkpoint_id: int, effects: Effects) -> None:
        """Make the checkpoint known and have the subtask close. Raises ``LocalProtocolError`` unless ids increase."""
        if not self.closes:
            raise LocalProtocolError(f"checkpoint {checkpoint_id} closes nothing: it begins with its cut")
        if self._latest is not None and checkpoint_id <= self._latest:
            raise LocalProtocolError(f"checkpoint {checkpoint_id} after {self._latest}: ids must increase")
        self._latest = checkpoint_id
        self._checkpoints[checkpoint_id] = _Checkpoint()
        close = CloseForCheckpoint(self._id, self.stream.last_seq + 1, checkpoint_id, self._confirmation())
        self._send_item(close, effects)

    def reach_cut(self, checkpoint_id: int, target: str, effects: Effects) -> None:
        """Close for the checkpoint, and send its barrier if nothing is unconfirmed. A late or unknown one closes
        nothing (H44). ``target``: see ``CutReached``."""
        if not self.closes:
            self._begin_at_cut(checkpoint_id, target, effects)
            return
        checkpoint = self._checkpoints.get(checkpoint_id)
        if checkpoint is None:
            return
        if checkpoint.phase is not _REQUESTED:
            raise LocalProtocolError(f"checkpoint {checkpoint_id} of {self._attempt} was cut twice")
        if self._latest_cut is not None and checkpoint_id < self._latest_cut:
            raise LocalProtocolError(f"the cut of {checkpoint_id} comes after that of {self._latest_cut}")
        self._latest_cut = checkpoint_id
        checkpoint.phase = _CUT
        checkpoint.submitted_at_cut = self._submitted
        checkpoint.order_at_cut = self._order
        self.closed.append(checkpoint_id)
        if target:
            self._send_target(checkpoint_id, target, effects)
        self._send_barriers(effects)

    def _send_target(self, checkpoint_id: int, target: str, effects: Effects) -> None:
        seq = self._last_event_seq = self.stream.last_seq + 1  # a barrier that travels apart must not come before it
        self._send_item(SavepointTarget(self._id, seq, checkpoint_id, target), effects)

    def _begin_at_cut(self, checkpoint_id: int, target: str, effects: Effects) -> None:
        """Send the barrier as the next item, unless the checkpoint was given up before (H79)."""
        if self._latest_cut is not None and checkpoint_id <= self._latest_cut:
            raise LocalProtocolError(f"the cut of {checkpoint_id} comes after that of {self._latest_cut}")
        self._latest = self._latest_cut = checkpoint_id
        given_up = checkpoint_id in self._aborted
        self._forget_aborted(checkpoint_id)
        if given_up:
            return
        checkpoint = self._checkpoints[checkpoint_id] = _Checkpoint()
        checkpoint.phase = _BARRIER
        if target:
            self._send_target(checkpoint_id, target, effects)
        self._send_barrier(checkpoint_id, effects)

    def _forget_aborted(self, checkpoint_id: int) -> None:
        """Cuts come in the order of the ids, so no cut up to this one comes any more."""
        if self._aborted:
            self._aborted = frozenset([n for n in self._aborted if n > checkpoint_id]) or _NONE

    def awaits_snapshot(self, checkpoint_id: int) -> bool:
        """Whether the checkpoint is cut here, and the attempt's snapshot has not come."""
        checkpoint = self._checkpoints.get(checkpoint_id)
        return checkpoint is not None and checkpoint.phase in CUT

    def _send_barriers(self, effects: Effects) -> None:
        """Send the barrier of each checkpoint before whose cut everything is confirmed; no other gateway is waited for
        (H78)."""
        first_held = self._held[0][1] if self._held else self._order + 1
        for checkpoint_id in self.closed:
            checkpoint = self._checkpoints[checkpoint_id]
            if (
                checkpoint.phase is _CUT
                and self._settled >= checkpoint.submitted_at_cut
                and first_held > checkpoint.order_at_cut
            ):
                checkpoint.phase = _BARRIER
                self._send_barrier(checkpoint_id, effects)

    def _send_barrier(self, checkpoint_id: int, effects: Effects) -> None:
        """Send the barrier as the next item, or apart."""
        # Nothing was submitted since the cut, or it is held: the last event in the stream is the last one before it.
        events_before = self._last_event_seq
        if self._apart:
            effects.append(InjectBarrier(checkpoint_id, events_before))
        else:
            seq = self.stream.last_seq + 1
            barrier = BarrierMessage(self._id, seq, checkpoint_id, events_before, self._confirmation())
            self._send_item(barrier, effects)

    def acknowledge(
        self, item: CheckpointAcknowledged, aside: tuple[HeldEvent, ...], now: float, effects: Effects
    ) -> bool:
        """The attempt's own snapshot: report it, open the valve, release held events (H41). False if it is refused.

        ``aside``: the events that it had sent before, and the coordinator has not got (H79). They count as held.
        """
        checkpoint_id = item.checkpoint_id
        checkpoint = self._checkpoints[checkpoint_id]
        if checkpoint.phase is not _BARRIER:
            phase = checkpoint.phase.value
            effects.append(RefuseMessage(f"{self._attempt} acknowledged checkpoint {checkpoint_id}, which is {phase}"))
            return False
        follows = item.state_follows
        checkpoint.phase = _UPLOADING if follows else _ACKNOWLEDGED
        events_sent = fewer(item.events_sent, aside) if aside else item.events_sent
        effects.append(ReportAcknowledged(checkpoint_id, item.state, (*aside, *item.held), events_sent, follows))
        if checkpoint_id in self.closed:
            self._reopen(checkpoint_id, now, effects)
        return True

    def end_upload(self, item: StateStored | StateFailed, effects: Effects) -> None:
        """What has become of the files of the attempt's snapshot. Once for each snapshot whose state follows."""
        checkpoint = self._checkpoints[item.checkpoint_id]
        if checkpoint.phase is not _UPLOADING:
            phase = checkpoint.phase.value
            what = f"{type_name(item)} of {self._attempt} for checkpoint {item.checkpoint_id}, which is {phase}"
            effects.append(RefuseMessage(what))
            return
        checkpoint.phase = _ACKNOWLEDGED
        if isinstance(item, StateStored):
            effects.append(ReportStateStored(item.checkpoint_id, item.handle))
        else:
            effects.append(ReportStateFailed(item.checkpoint_id, item.reason))

    def end_checkpoint(self, checkpoint_id: int, outcome: CheckpointOutcome, now: float, effects: Effects) -> None:
        """Tell the subtask and open the valve. Unknown ids are ignored (H44, H49)."""
        if self._checkpoints.pop(checkpoint_id, None) is None:
            if not self.closes and outcome is CheckpointOutcome.ABORTED:
                self._note_early_abort(checkpoint_id)
            return
        end = _ENDS[outcome](self._id, self.stream.last_seq + 1, checkpoint_id, self._confirmation())
        self._send_item(end, effects)
        if checkpoint_id in self.closed:
            self._reopen(checkpoint_id, now, effects)

    def _note_early_abort(self, checkpoint_id: int) -> None:
        if self._latest_cut is None or checkpoint_id > self._latest_cut:
            self._aborted |= {checkpoint_id}

    def _reopen(self, checkpoint_id: int, now: float, effects: Effects) -> None:
        held, closed = self._held, self.closed
        closed.remove(checkpoint_id)
        while held and not (closed and closed[0] <= held[0][0]):
            _, _, submitted, part = held.pop(0)
            self._held_bytes -= len(submitted.payload)
            self._send_submitted(submitted, part, True, now, effects)
        if self._start_held and not held:
            self._start_held = False
            self.start_processing(effects)
        if closed:
            self._send_barriers(effects)

    # --- figures ------------------------------------------------------------------------------------------

    def held(self) -> tuple[int, int]:
        """How many events and answers are held, and their bytes."""
        return len(self._held), self._held_bytes

    def check_invariants(self) -> None:
        self.stream.check_invariants()
        assert (self.unconfirmed_events, self.unconfirmed_bytes) == self.stream.counted()
        assert not self.attached or self.stopped_at is None
        self._check_checkpoints()
        self._check_held()
        self._check_clocks()
        answers = [part for _, _, submitted, part in self._held if isinstance(submitted, AnswerSubmitted)]
        answers += self.stream.parts_of(AnswerMessage)
        assert self.answers_pending == [answers.count(part) for part in range(len(self._outside))]

    def _check_checkpoints(self) -> None:
        assert self.closed == sorted(set(self.closed))
        cut = {n for n, c in self._checkpoints.items() if c.phase in CUT}
        assert set(self.closed) == (cut if self.closes else set())
        assert not (self._aborted and self.closes)
        assert self._latest_cut is None or all(n > self._latest_cut for n in self._aborted)

    def _check_held(self) -> None:
        assert self._held_bytes == sum(len(entry[2].payload) for entry in self._held)
        for label, _, _, part in self._held:
            assert self.closed, "held, and nothing will ever release it"
            assert self.closed[0] <= label, "held, though it may leave"
            assert not self._outside[part], "held, though it is outside of checkpoints"
        assert self._held or not self._start_held
        orders = [order for _, order, _, _ in self._held]
        assert orders == sorted(orders), "held events have lost their order"

    def _check_clocks(self) -> None:
        tolerant = sum(1 for _, _, e, _ in self._held if isinstance(e, EventSubmitted) and e.loss_tolerant)
        waited_for = sum(inside for _, _, inside in self.awaited)
        assert self._submitted - self._settled == len(self._held) - tolerant + waited_for
        clocks = [seq for seq, _, _ in (*self.awaited, *self.tolerated)]
        assert len(clocks) == len(set(clocks)), "an item has two clocks"
        assert all(self.stream.confirmed_seq < seq <= self.stream.last_seq for seq in clocks)
