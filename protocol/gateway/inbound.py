# SPDX-License-Identifier: Apache-2.0

"""The inbound half of a ``GatewayMachine``: what has come from the peer, what may be delivered, and what is taken.

See the machine's text. What an item does depends on how far the peer has come:

    | item                | RESTORING            | OPEN     | FINISHED |
    |---------------------|----------------------|----------|----------|
    | Opened              | reported immediately | refused  | refused  |
    | an event or request | waits for readiness  | the same | refused  |
    | of a checkpoint     | after what waits     | the same | refused, except that the valve is closed (H47) |
    | Finished, success   | after what waits     | the same | refused  |
    | a cancellation      | follows its request  | the same | refused  |
    | Finished, failure   | reported immediately | the same | refused  |

Events of a restored snapshot are ordinary events, except that they name the subtask which first sent them (H52). So do
its requests, and nothing waits for their answers (H73).

*Put aside* (H79). If checkpoints hold no events, what the coordinator takes between its cut and the subtask's snapshot
is recorded in the checkpoint. That is bounded here: for each checkpoint that is cut and waits for the snapshot, this
half counts what it has delivered since the cut. At the bound of the window it delivers nothing more, and puts aside
what comes. The window bounds that too, because it is not taken. The snapshot ends the wait. What was put aside before
it was sent before it and has not reached the coordinator, so the checkpoint gets it as held events.

    | ends the wait for N        | what is aside                                |
    |----------------------------|----------------------------------------------|
    | the snapshot for N         | is held in N, then delivered if it now may   |
    | N is over                  | is delivered if it now may                   |
    | ``Finished``, success      | is delivered: no other snapshot comes        |

With two concurrent checkpoints, it may be delivered when neither is at the bound.

What a part outside of checkpoints sends is neither recorded nor put aside (H152). So it may be taken before earlier
items of the others, and each of the two is taken for itself.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Any, get_args

from protocol.describing import type_name
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.gateway.outbound import Effects, GatewayOutbound
from protocol.gateway.types import (
    DeliverCancellation,
    DeliverEvent,
    DeliverRequest,
    GatewayLimits,
    ReportClosed,
    ReportDeclined,
    ReportFinished,
    ReportOpened,
)
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT, ExecutionAttempt
from protocol.parts import PartTable
from protocol.streams import IncomingStream, RefuseMessage
from protocol.wire.messages import (
    CheckpointAcknowledged,
    CheckpointDeclined,
    ClosedForCheckpoint,
    EventMessage,
    Finished,
    HeldEvent,
    Opened,
    RequestCancelled,
    RequestMessage,
    RestoredEventMessage,
    RestoredRequestMessage,
    StateFailed,
    StateStored,
    UpItem,
)

_Payload = EventMessage | RequestMessage | RestoredEventMessage | RestoredRequestMessage
PAYLOAD = frozenset(get_args(_Payload))
OfCheckpointUp = ClosedForCheckpoint | CheckpointAcknowledged | StateStored | StateFailed | CheckpointDeclined
OF_CHECKPOINT = frozenset(get_args(OfCheckpointUp))
WITH_POSITIONS = frozenset({CheckpointAcknowledged, Finished})

_NO_REQUESTS: frozenset[int] = frozenset()
_NO_REPORTS: frozenset[tuple[type, int]] = frozenset()
"""Shared by all gateways, of which there may be thousands: each empty set takes 216 bytes."""


class _Peer(Enum):
    """How far the peer's operator has come, according to the items that have arrived."""

    RESTORING = 0
    OPEN = 1
    FINISHED = 2


_RESTORING, _OPEN, _FINISHED = _Peer.RESTORING, _Peer.OPEN, _Peer.FINISHED


class GatewayInbound:
    """The items from one attempt. ``outbound``, the other half, gets acknowledgements, and bounds the answers."""

    __slots__ = (
        "_aside",
        "_attempt",
        "_cancelled",
        "_delivered",
        "_kept",
        "_kept_reports",
        "_limits",
        "_open_requests",
        "_outbound",
        "_peer",
        "_ready",
        "_senders",
        "_snapshot",
        "_table",
        "_unanswered",
        "awaits_start",
        "stream",
    )

    def __init__(
        self,
        attempt: ExecutionAttempt,
        limits: GatewayLimits,
        incoming: IncomingStream,
        outbound: GatewayOutbound,
        senders: Collection[int] | None,
        table: PartTable,
    ) -> None:
        self._attempt = attempt
        self._table = table
        self._senders = senders  # of what the restored snapshot held; None if that is not known
        self._limits = limits
        self._outbound = outbound
        self.stream = incoming
        self._peer = _RESTORING
        self._ready = False
        self.awaits_start = False  # the operator has opened, and waits for ``StartProcessing`` (H66)
        self._kept: list[UpItem] = []  # arrived before readiness was announced
        self._kept_reports: frozenset[tuple[type, int]] = _NO_REPORTS  # the checkpoint items among these: kind and id
        self._unanswered: dict[int, int] = {}  # the requests without an answer, each with its part
        self._open_requests = [0] * table.count  # how many these are, by part
        self._cancelled = _NO_REQUESTS  # of these, the ones whose answer nobody waits for
        self._snapshot = VIRTUAL_EMPTY_CHECKPOINT  # the last one that the peer has taken
        self._delivered: dict[int, tuple[int, int]] = {}  # since each cut that waits for a snapshot: events, bytes
        self._aside: list[_Payload] = []

    @property
    def finished(self) -> bool:
        """Whether the peer has sent ``Finished``."""
        return self._peer is _FINISHED

    @property
    def ready(self) -> bool:
        """Whether the coordinator knows the subtask."""
        return self._ready

    def receive(self, item: Any, now: float, effects: Effects) -> bool:
        """Take one ``UpItem``. True if it was a duplicate, which must be confirmed again."""
        if not self.stream.is_new(item.seq):
            return True
        kind = type(item)
        if kind in PAYLOAD:
            size = len(item.payload)
            self._check_window(item, size)
            self.stream.advance(size, item.part)
            if kind is EventMessage and self._ready and self._peer is _OPEN and not self._delivered:  # as most items
                effects.append(DeliverEvent(item.seq, item.payload, None, self._snapshot, item.part))
                return False
        else:
            if kind in WITH_POSITIONS:
                self._check_parts(item)
            self.stream.advance()
            if kind in OF_CHECKPOINT and self._ready and self._peer is _OPEN:
                self._deliver_report(item, now, effects)  # as most items of quiet subtasks
                return False
        self._take_item(item, now, effects)
        return False

    def _check_window(self, item: _Payload, size: int) -> None:
        """Refuse a peer that exceeds its window (H27). Nothing has been changed so far."""
        limits, part = self._limits, item.part
        try:
            share = self.stream.shares[part]
        except IndexError:
            raise RemoteProtocolError(
                f"{self._attempt} sends for part {part}, but there are {self._table.count}"
            ) from None
        if share.events and (share.events >= limits.upward_events_max or share.bytes + size > limits.upward_bytes_max):
            raise RemoteProtocolError(f"{self._attempt} has sent more than its window allows")
        if isinstance(item, EventMessage):  # as most items
            return
        if isinstance(item, RequestMessage):
            if item.request_id in self._unanswered:
                raise RemoteProtocolError(f"{self._attempt} has used request id {item.request_id} twice")
            if self._open_requests[part] + self._outbound.answers_pending[part] >= limits.upward_events_max:
                raise RemoteProtocolError(f"{self._attempt} has more open requests than its window allows")
        else:
            self._check_sender(item)

    def _check_parts(self, item: CheckpointAcknowledged | Finished) -> None:
        """Refuse what a restore could not give to any part. Nothing has been changed so far."""
        held = item.held if isinstance(item, CheckpointAcknowledged) else ()
        if not held and len(item.events_sent) <= self._table.count:  # as of most
            return
        if why := self._table.mismatch(item.events_sent, held):
            raise RemoteProtocolError(f"{self._attempt} reports {why}")

    def _check_sender(self, item: RestoredEventMessage | RestoredRequestMessage) -> None:
        if self._table.outside[item.part]:
            raise RemoteProtocolError(f"{self._attempt} restores an event of a part that is in no checkpoint")
        if self._senders is not None and item.sender not in self._senders:
            raise RemoteProtocolError(
                f"{self._attempt} sends an event of subtask {item.sender}, of which its restored snapshot holds none"
            )

    def _take_item(self, item: UpItem, now: float, effects: Effects) -> None:
        if self._peer is not _OPEN and not self._check_turn(item, effects):
            return
        if isinstance(item, Opened):
            if self._peer is _OPEN:
                effects.append(RefuseMessage(f"{self._attempt} has opened twice"))
            else:
                self._peer = _OPEN
                self.awaits_start = item.awaits_start
                effects.append(ReportOpened())
                if self._ready and item.awaits_start:
                    self._outbound.start_processing(effects)
            return
        if isinstance(item, Finished):
            self._peer = _FINISHED
            if item.failure:  # readiness may never come
                effects.append(ReportFinished(item.failure, item.state, item.events_sent, item.files))
                return
        elif isinstance(item, RequestCancelled):
            self._cancel(item.request_id, effects)
            return
        elif isinstance(item, RequestMessage):
            self._unanswered[item.request_id] = item.part
            self._open_requests[item.part] += 1
        if not self._ready and (self._kept or type(item) in PAYLOAD):
            self._keep(item, effects)
        else:
            self._deliver(item, now, effects)

    def _cancel(self, request_id: int, effects: Effects) -> None:
        """Nobody waits for the answer any more: the coordinator is told that after the request (H85).

        The answer may have crossed with it. The peer gets one answer to each request, in either case.
        """
        if request_id not in self._unanswered or request_id in self._cancelled:
            return
        self._cancelled |= {request_id}
        undelivered = (*self._kept, *self._aside)
        if not any(isinstance(item, RequestMessage) and item.request_id == request_id for item in undelivered):
            effects.append(DeliverCancellation(request_id))

    def _keep(self, item: UpItem, effects: Effects) -> None:
        """Keep the item until readiness.

        A checkpoint item is kept only if its checkpoint is not over, and only once. So items that count against no
        window are bounded too (H27).
        """
        if isinstance(item, OfCheckpointUp):
            report = (type(item), item.checkpoint_id)
            if report in self._kept_reports or not self._outbound.knows(item.checkpoint_id):
                self._refuse_stale(item, effects)
                return
            self._forget_stale(effects)
            self._kept_reports |= {report}
        self._kept.append(item)

    def _forget_stale(self, effects: Effects) -> None:
        if all(self._outbound.knows(checkpoint_id) for _, checkpoint_id in self._kept_reports):
            return
        waiting, self._kept = self._kept, []
        for item in waiting:
            if isinstance(item, OfCheckpointUp) and not self._outbound.knows(item.checkpoint_id):
                self._kept_reports -= {(type(item), item.checkpoint_id)}
                self._refuse_stale(item, effects)
            else:
                self._kept.append(item)

    def _refuse_stale(self, item: OfCheckpointUp, effects: Effects) -> None:
        name = f"{type_name(item)} of {self._attempt}"
        why = "was reported before" if self._outbound.knows(item.checkpoint_id) else "is over or unknown"
        effects.append(RefuseMessage(f"{name}: checkpoint {item.checkpoint_id} {why}"))

    def _check_turn(self, item: UpItem, effects: Effects) -> bool:
        """False for what a peer sends after ``Finished``, unless it is that it closes (H47)."""
        if self._peer is _RESTORING or isinstance(item, ClosedForCheckpoint):
            return True
        self.stream.take(item.seq)
        effects.append(RefuseMessage(f"{type_name(item)} of {self._attempt}, which has finished"))
        return False

    def _deliver(self, item: UpItem, now: float, effects: Effects) -> None:
        if type(item) in OF_CHECKPOINT:
            self._deliver_report(item, now, effects)
        elif isinstance(item, (EventMessage, RequestMessage, RestoredEventMessage, RestoredRequestMessage)):
            if self._delivered and not self._table.outside[item.part] and (self._aside or self._is_at_bound()):
                self._aside.append(item)
            else:
                self._deliver_payload(item, effects)
        elif isinstance(item, Finished):
            self._delivered.clear()
            self._deliver_aside(effects)
            effects.append(ReportFinished(item.failure, item.state, item.events_sent, item.files))
        else:
            raise AssertionError("readiness never waits for itself")

    def _deliver_report(self, item: Any, now: float, effects: Effects) -> None:
        """Deliver an ``OfCheckpointUp``."""
        kind = type(item)
        if not self._outbound.knows(item.checkpoint_id):
            self._refuse_stale(item, effects)
        elif kind is ClosedForCheckpoint:
            effects.append(ReportClosed(item.checkpoint_id))
        elif kind is CheckpointDeclined:
            effects.append(ReportDeclined(item.checkpoint_id, item.reason))
        elif kind is not CheckpointAcknowledged:
            self._outbound.end_upload(item, effects)
        elif self._outbound.acknowledge(item, self._aside_as_held(), now, effects):
            self._snapshot = item.checkpoint_id
            self.stop_recording(item.checkpoint_id, effects)

    def _deliver_payload(self, item: _Payload, effects: Effects) -> None:
        after, part = self._snapshot, item.part
        if isinstance(item, EventMessage):
            effects.append(DeliverEvent(item.seq, item.payload, None, after, part))
        elif isinstance(item, RequestMessage):
            effects.append(DeliverRequest(item.seq, item.request_id, item.payload, None, after, part))
            if item.request_id in self._cancelled:
                effects.append(DeliverCancellation(item.request_id))
        elif isinstance(item, RestoredEventMessage):
            effects.append(DeliverEvent(item.seq, item.payload, item.sender, after, part))
        else:
            effects.append(DeliverRequest(item.seq, None, item.payload, item.sender, after, part))
        if self._delivered and not self._table.outside[part]:
            size = len(item.payload)
            self._delivered = {n: (count + 1, sum_ + size) for n, (count, sum_) in self._delivered.items()}

    # --- recording ----------------------------------------------------------------------------------------

    def start_recording(self, checkpoint_id: int) -> None:
        """The cut: what is delivered from here on is recorded in the checkpoint, until the peer's snapshot."""
        self._delivered[checkpoint_id] = 0, 0

    def stop_recording(self, checkpoint_id: int, effects: Effects) -> None:
        """The peer's snapshot has come, or the checkpoint is over: deliver what may be delivered now."""
        if self._delivered and self._delivered.pop(checkpoint_id, None) is not None:
            self._deliver_aside(effects)

    def _is_at_bound(self) -> bool:
        limits = self._limits
        return any(
            count >= limits.upward_events_max or size >= limits.upward_bytes_max
            for count, size in self._delivered.values()
        )

    def _deliver_aside(self, effects: Effects) -> None:
        while self._aside and not self._is_at_bound():
            self._deliver_payload(self._aside.pop(0), effects)

    def _aside_as_held(self) -> tuple[HeldEvent, ...]:
        if not self._aside:
            return ()
        own, asks = self._attempt.subtask, (RequestMessage, RestoredRequestMessage)
        return tuple(
            [
                HeldEvent(getattr(item, "sender", own), item.payload, isinstance(item, asks), item.part)
                for item in self._aside
            ]
        )

    # --- the coordinator ----------------------------------------------------------------------------------

    def announce_ready(self, now: float, effects: Effects) -> None:
        """The coordinator knows the subtask: deliver what waits. Called once."""
        self._ready = True
        while self._kept:
            self._deliver(self._kept.pop(0), now, effects)
        self._kept_reports = _NO_REPORTS

    def take(self, seq: int, part: int) -> None:
        """Item ``seq`` is taken; see ``ItemTaken``. Raises ``LocalProtocolError`` if it was not delivered."""
        if seq > self.stream.received_seq:
            raise LocalProtocolError(f"item {seq} of {self._attempt} was taken before it arrived")
        if self._kept and seq >= self._kept[0].seq:
            raise LocalProtocolError(f"item {seq} of {self._attempt} was taken before it was delivered")
        if self._aside and seq >= self._aside[0].seq and not self._table.outside[part]:
            raise LocalProtocolError(f"item {seq} of {self._attempt} was taken, although it was put aside")
        self.stream.take(seq, self._table.taken_with[part])

    def answer(self, request_id: int) -> int:
        """The request has its answer: return its part. Raises ``LocalProtocolError`` if it is not open."""
        if request_id not in self._unanswered:
            raise LocalProtocolError(f"request {request_id} of {self._attempt} is not open")
        part = self._unanswered.pop(request_id)
        self._open_requests[part] -= 1
        if self._cancelled:
            self._cancelled = self._cancelled - {request_id} or _NO_REQUESTS
        return part

    def clear(self) -> None:
        """The attempt is over: forget what is not taken."""
        self.stream.clear()
        self._kept.clear()
        self._kept_reports = _NO_REPORTS
        self._unanswered.clear()
        self._open_requests = [0] * self._table.count
        self._cancelled = _NO_REQUESTS
        self._delivered.clear()
        self._aside.clear()

    @property
    def idle(self) -> bool:
        """Whether nothing waits for readiness, for an answer, or for a snapshot."""
        return not (self._kept or self._unanswered or self._aside)

    def check_invariants(self) -> None:
        self.stream.check_invariants()
        assert not (self._kept and self._ready)
        reports = [(type(item), item.checkpoint_id) for item in self._kept if isinstance(item, OfCheckpointUp)]
        assert len(reports) == len(self._kept_reports) == len(self._kept_reports.intersection(reports))
        assert all(self._outbound.awaits_snapshot(checkpoint_id) for checkpoint_id in self._delivered)
        assert not self._aside or self._is_at_bound(), "put aside, and nothing will ever deliver it"
        assert len(self._aside) <= self.stream.untaken_events
        assert not any(self._table.outside[item.part] for item in self._aside)
        assert self._cancelled <= set(self._unanswered)
        parts = list(self._unanswered.values())
        assert self._open_requests == [parts.count(part) for part in range(self._table.count)]
