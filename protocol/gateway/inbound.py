# SPDX-License-Identifier: Apache-2.0

"""The inbound half of a ``GatewayMachine``: what has come from the peer, what may be delivered, and what is taken.

See the machine's text. What an item does depends on how far the peer has come:

    | item                | RESTORING            | OPEN     | FINISHED |
    |---------------------|----------------------|----------|----------|
    | Opened              | reported immediately | refused  | refused  |
    | an event or request | waits for readiness  | the same | refused  |
    | of a checkpoint     | after what waits     | the same | refused, except that the valve is closed (H47) |
    | Finished, success   | after what waits     | the same | refused  |
    | Finished, failure   | reported immediately | the same | refused  |

Events of a restored snapshot are ordinary events, except that they name the subtask which first sent them (H52). So do
its requests, and nothing waits for their answers (H73).
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import get_args

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.gateway.outbound import Effects, GatewayOutbound
from protocol.gateway.types import (
    DeliverEvent,
    DeliverRequest,
    GatewayLimits,
    ReportClosed,
    ReportDeclined,
    ReportFinished,
    ReportOpened,
)
from protocol.ids import ExecutionAttempt
from protocol.streams import IncomingStream, RefuseMessage
from protocol.wire.messages import (
    CheckpointAcknowledged,
    CheckpointDeclined,
    ClosedForCheckpoint,
    EventMessage,
    Finished,
    Opened,
    RequestMessage,
    RestoredEventMessage,
    RestoredRequestMessage,
    UpItem,
)

_Payload = EventMessage | RequestMessage | RestoredEventMessage | RestoredRequestMessage
PAYLOAD = get_args(_Payload)
_OfCheckpoint = ClosedForCheckpoint | CheckpointAcknowledged | CheckpointDeclined
OF_CHECKPOINT = get_args(_OfCheckpoint)


class _Peer(Enum):
    """How far the peer's operator has come, according to the items that have arrived."""

    RESTORING = 0
    OPEN = 1
    FINISHED = 2


class GatewayInbound:
    """The items from one attempt. ``outbound``, the other half, gets acknowledgements, and bounds the answers."""

    __slots__ = (
        "_attempt",
        "_kept",
        "_kept_words",
        "_limits",
        "_outbound",
        "_peer",
        "_ready",
        "_unanswered",
        "awaits_start",
        "stream",
    )

    def __init__(self, attempt: ExecutionAttempt, limits: GatewayLimits, outbound: GatewayOutbound) -> None:
        self._attempt = attempt
        self._limits = limits
        self._outbound = outbound
        self.stream = IncomingStream()
        self._peer = _Peer.RESTORING
        self._ready = False
        self.awaits_start = False  # the operator has opened, and waits for ``StartProcessing`` (H66)
        self._kept: deque[UpItem] = deque()  # arrived before readiness was announced
        self._kept_words: set[tuple[type, int]] = set()  # the checkpoint items among these: kind and id
        self._unanswered: set[int] = set()

    @property
    def finished(self) -> bool:
        """Whether the peer has sent ``Finished``."""
        return self._peer is _Peer.FINISHED

    @property
    def ready(self) -> bool:
        """Whether the coordinator knows the subtask."""
        return self._ready

    def receive(self, item: UpItem, now: float, effects: Effects) -> bool:
        """Take one item. True if it was a duplicate, which must be confirmed again."""
        if not self.stream.is_new(item.seq):
            return True
        if isinstance(item, PAYLOAD):
            self._check_window(item)
            self.stream.advance(len(item.payload))
        else:
            self.stream.advance()
        self._take_item(item, now, effects)
        return False

    def _check_window(self, item: _Payload) -> None:
        """Refuse a peer that exceeds its window (H27). Nothing has been changed so far."""
        came, limits = self.stream, self._limits
        count = came.untaken_events
        if count and (
            count >= limits.upward_events_max or came.untaken_bytes + len(item.payload) > limits.upward_bytes_max
        ):
            raise RemoteProtocolError(f"{self._attempt} has sent more than its window allows")
        if isinstance(item, RequestMessage):
            if item.request_id in self._unanswered:
                raise RemoteProtocolError(f"{self._attempt} has used request id {item.request_id} twice")
            if len(self._unanswered) + self._outbound.answers_pending >= limits.upward_events_max:
                raise RemoteProtocolError(f"{self._attempt} has more open requests than its window allows")

    def _take_item(self, item: UpItem, now: float, effects: Effects) -> None:
        if self._peer is not _Peer.OPEN and not self._check_turn(item, effects):
            return
        if isinstance(item, Opened):
            if self._peer is _Peer.OPEN:
                effects.append(RefuseMessage(f"{self._attempt} has opened twice"))
            else:
                self._peer = _Peer.OPEN
                self.awaits_start = item.awaits_start
                effects.append(ReportOpened())
                if self._ready and item.awaits_start:
                    self._outbound.start_processing(effects)
            return
        if isinstance(item, Finished):
            self._peer = _Peer.FINISHED
            if item.failure:  # readiness may never come
                effects.append(ReportFinished(item.failure, item.state, item.events_sent))
                return
        elif isinstance(item, RequestMessage):
            self._unanswered.add(item.request_id)
        if not self._ready and (self._kept or isinstance(item, PAYLOAD)):
            self._keep(item, effects)
        else:
            self._deliver(item, now, effects)

    def _keep(self, item: UpItem, effects: Effects) -> None:
        """Keep the item until readiness.

        A checkpoint item is kept only if its checkpoint is not over, and only once. So items that count against no
        window are bounded too (H27).
        """
        if isinstance(item, OF_CHECKPOINT):
            word = (type(item), item.checkpoint_id)
            if word in self._kept_words or not self._outbound.knows(item.checkpoint_id):
                self._refuse_stale(item, effects)
                return
            self._forget_stale(effects)
            self._kept_words.add(word)
        self._kept.append(item)

    def _forget_stale(self, effects: Effects) -> None:
        if all(self._outbound.knows(checkpoint_id) for _, checkpoint_id in self._kept_words):
            return
        waiting, self._kept = self._kept, deque()
        for item in waiting:
            if isinstance(item, OF_CHECKPOINT) and not self._outbound.knows(item.checkpoint_id):
                self._kept_words.remove((type(item), item.checkpoint_id))
                self._refuse_stale(item, effects)
            else:
                self._kept.append(item)

    def _refuse_stale(self, item: _OfCheckpoint, effects: Effects) -> None:
        name = f"{type(item).__name__} of {self._attempt}"
        why = "was reported before" if self._outbound.knows(item.checkpoint_id) else "is over or unknown"
        effects.append(RefuseMessage(f"{name}: checkpoint {item.checkpoint_id} {why}"))

    def _check_turn(self, item: UpItem, effects: Effects) -> bool:
        """False for what a peer sends after ``Finished``, unless it is that it closes (H47)."""
        if self._peer is _Peer.RESTORING or isinstance(item, ClosedForCheckpoint):
            return True
        self.stream.take(item.seq)
        effects.append(RefuseMessage(f"{type(item).__name__} of {self._attempt}, which has finished"))
        return False

    def _deliver(self, item: UpItem, now: float, effects: Effects) -> None:
        if isinstance(item, EventMessage):
            effects.append(DeliverEvent(item.seq, item.payload))
        elif isinstance(item, RequestMessage):
            effects.append(DeliverRequest(item.seq, item.request_id, item.payload))
        elif isinstance(item, RestoredEventMessage):
            effects.append(DeliverEvent(item.seq, item.payload, item.sender))
        elif isinstance(item, RestoredRequestMessage):
            effects.append(DeliverRequest(item.seq, None, item.payload, item.sender))
        elif isinstance(item, Finished):
            effects.append(ReportFinished(item.failure, item.state, item.events_sent))
        elif isinstance(item, Opened):
            raise AssertionError("readiness never waits for itself")
        elif not self._outbound.knows(item.checkpoint_id):
            self._refuse_stale(item, effects)
        elif isinstance(item, ClosedForCheckpoint):
            effects.append(ReportClosed(item.checkpoint_id))
        elif isinstance(item, CheckpointDeclined):
            effects.append(ReportDeclined(item.checkpoint_id, item.reason))
        else:
            self._outbound.acknowledge(item, now, effects)

    def announce_ready(self, now: float, effects: Effects) -> None:
        """The coordinator knows the subtask: deliver what waits. Called once."""
        self._ready = True
        while self._kept:
            self._deliver(self._kept.popleft(), now, effects)
        self._kept_words.clear()

    def take(self, seq: int) -> None:
        """Everything delivered up to ``seq`` is taken. Raises ``LocalProtocolError`` if it was not delivered."""
        if seq > self.stream.received_seq:
            raise LocalProtocolError(f"item {seq} of {self._attempt} was taken before it came")
        if self._kept and seq >= self._kept[0].seq:
            raise LocalProtocolError(f"item {seq} of {self._attempt} was taken before it was delivered")
        self.stream.take(seq)

    def answer(self, request_id: int) -> None:
        """The request has its answer. Raises ``LocalProtocolError`` if it is not open."""
        if request_id not in self._unanswered:
            raise LocalProtocolError(f"request {request_id} of {self._attempt} is not open")
        self._unanswered.remove(request_id)

    def clear(self) -> None:
        """The attempt is over: forget what is not taken."""
        self.stream.clear()
        self._kept.clear()
        self._kept_words.clear()
        self._unanswered.clear()

    @property
    def idle(self) -> bool:
        """Whether nothing waits for readiness or for an answer."""
        return not (self._kept or self._unanswered)

    def check_invariants(self) -> None:
        self.stream.check_invariants()
        assert not (self._kept and self._ready)
        words = [(type(item), item.checkpoint_id) for item in self._kept if isinstance(item, OF_CHECKPOINT)]
        assert len(words) == len(self._kept_words) == len(self._kept_words.intersection(words))
