# SPDX-License-Identifier: Apache-2.0

"""The inbound half of a ``SubtaskMachine``: what has come, and what goes into the operator's mailbox.

See the machine's text. The mailbox is one queue, so items keep their order there (H22, H23). Urgent events do not go
there, and ``protocol.subtask.urgent`` keeps what comes after them in its place.

*The barrier apart.* A checkpoint barrier may travel separately from the items, and arrive before or after them. It
names the item that it follows, and goes into the mailbox when that one has come. Nothing that belongs after the barrier
can be there before it: the coordinator's valve holds that back until this attempt's snapshot (H41).

*After a barrier.* If checkpoints hold nothing back (H79), an answer may come after a barrier that is still in the
mailbox. It waits here until every barrier that came before it is met, declined or over, whatever comes later. So does
an urgent event (``protocol.subtask.urgent``); an ordinary one is after the barrier in the mailbox too. What is for a
part outside of checkpoints does not wait (H152).

    | came                  | the answer is given to its asker              |
    |-----------------------|-----------------------------------------------|
    | answer, barrier 5     | immediately                                   |
    | barrier 5, answer, 6  | when 5 is met or over; 6 makes no difference  |
    | barrier 5, 6, answer  | when both are met or over                     |
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import NoReturn

from protocol.describing import type_name
from protocol.errors import RemoteProtocolError
from protocol.parts import PartTable
from protocol.streams import IncomingStream, RefuseMessage
from protocol.subtask.outbound import Effects, SubtaskOutbound, SubtaskPhase
from protocol.subtask.types import (
    BarrierArrived,
    MailboxAborted,
    MailboxBarrier,
    MailboxCompleted,
    MailboxEvent,
    MailboxStart,
    PutInMailbox,
    ResolveRequest,
)
from protocol.subtask.urgent import UrgentOrder
from protocol.wire.messages import (
    AnswerMessage,
    BarrierMessage,
    CheckpointAborted,
    CheckpointCompleted,
    ClosedForCheckpoint,
    CloseForCheckpoint,
    DownItem,
    EventMessage,
    SavepointTaken,
    SavepointTarget,
    StartProcessing,
    UrgentEventMessage,
)

PAYLOAD = (EventMessage, AnswerMessage, UrgentEventMessage)


class SubtaskInbound:
    """The items to one attempt. ``outbound`` is the other half, which has the valve and the open requests.

    ``handles_urgent``: the operator handles urgent events apart from the others, except those for
    ``parts_without_urgent``, by index.
    """

    __slots__ = (
        "_answers",
        "_apart",
        "_id",
        "_outbound",
        "_outside",
        "_parts",
        "_started",
        "_unmet",
        "handles_urgent",
        "parts_without_urgent",
        "stream",
        "urgent",
    )

    def __init__(
        self, task_attempt_id: int, incoming: IncomingStream, outbound: SubtaskOutbound, table: PartTable
    ) -> None:
        self._id = task_attempt_id
        self._parts = table.count
        self._outside = table.outside
        self._outbound = outbound
        self.stream = incoming
        self.urgent = UrgentOrder()
        self.handles_urgent = False
        self.parts_without_urgent: frozenset[int] = frozenset()
        self._started = False
        self._apart: dict[int, int] = {}  # barriers that came apart: the item that each waits for
        self._unmet: list[int] = []  # barriers that have come and are not met, ascending
        self._answers: deque[tuple[int, AnswerMessage]] = deque()  # each with the last barrier before it

    def take(self, item: DownItem, effects: Effects) -> None:
        """Take the next item. Raises ``RemoteProtocolError``, and changes nothing, if it is out of turn."""
        if isinstance(item, EventMessage):
            part = item.part
            if part >= self._parts:
                self._refuse_part(part)
            self.stream.advance()
            if self.urgent.idle:
                effects.append(PutInMailbox(MailboxEvent(item.payload, part)))
            else:
                self.urgent.put(MailboxEvent(item.payload, part), effects)
        elif isinstance(item, UrgentEventMessage):
            self._take_urgent(item, effects)
        elif isinstance(item, AnswerMessage):
            self.stream.advance()
            self._take_answer(item, effects)
        elif isinstance(item, CloseForCheckpoint):
            if not self._outbound.rises(item.checkpoint_id):
                raise RemoteProtocolError(f"checkpoint {item.checkpoint_id} after a later one: ids must increase")
            self.stream.advance()
            self._outbound.close(item.checkpoint_id, effects)
        elif isinstance(item, BarrierMessage):
            self._check_barrier(item)
            self.stream.advance()
            self._meet_barrier(item.checkpoint_id, effects)
        elif isinstance(item, SavepointTarget):
            self._take_target(item)
        elif isinstance(item, StartProcessing):
            self._start(effects)
        else:
            self.stream.advance()
            self._end_checkpoint(item, effects)
        if self._apart:
            self._meet_barriers_apart(effects)

    def _take_urgent(self, item: UrgentEventMessage, effects: Effects) -> None:
        part = item.part
        if part >= self._parts:
            self._refuse_part(part)
        self.stream.advance()
        if self.handles_urgent and part not in self.parts_without_urgent:
            after = self._unmet[-1] if self._unmet and not self._outside[part] else None
            self.urgent.come(item.payload, part, after, effects)
        else:
            self.urgent.put(MailboxEvent(item.payload, part), effects)

    def _refuse_part(self, part: int) -> NoReturn:
        raise RemoteProtocolError(f"an event for part {part}, but there are {self._parts}")

    def _take_answer(self, item: AnswerMessage, effects: Effects) -> None:
        if self._unmet and not self._outbound.asked_outside(item.request_id):
            self._answers.append((self._unmet[-1], item))
        else:
            self._give_answer(item, effects)

    def barrier_met(self, checkpoint_id: int, effects: Effects) -> None:
        """The barrier no longer counts: let go what waited for it and for none before it."""
        if checkpoint_id in self._unmet:
            self._unmet.remove(checkpoint_id)
            first = self._unmet[0] if self._unmet else None
            while self._answers and (first is None or first > self._answers[0][0]):
                self._give_answer(self._answers.popleft()[1], effects)
            self.urgent.barrier_met(first, effects)

    def _give_answer(self, item: AnswerMessage, effects: Effects) -> None:
        if self._outbound.resolve(item.request_id, effects):
            effects.append(ResolveRequest(item.request_id, item.error, item.payload))
        else:
            effects.append(RefuseMessage(f"an answer to request {item.request_id}, which is not open"))

    def _end_checkpoint(self, item: CheckpointCompleted | CheckpointAborted | SavepointTaken, effects: Effects) -> None:
        if self._outbound.phase(item.checkpoint_id) is None:
            return
        self.urgent.drop_barrier(item.checkpoint_id, effects)
        if isinstance(item, CheckpointCompleted):
            self.urgent.put(MailboxCompleted(item.checkpoint_id), effects)
        elif isinstance(item, CheckpointAborted):
            self.urgent.put(MailboxAborted(item.checkpoint_id), effects)
        self._apart.pop(item.checkpoint_id, None)
        self._outbound.end_checkpoint(item.checkpoint_id, effects)
        self.barrier_met(item.checkpoint_id, effects)

    def take_after_finish(self, item: DownItem, effects: Effects) -> None:
        """Take an item when nothing reads the mailbox any more. An event is not confirmed (H23) and fails at its
        sender; a checkpoint is told that nothing more will come (H47)."""
        if isinstance(item, PAYLOAD):
            self.stream.advance(0)  # never taken, so never confirmed
            effects.append(RefuseMessage(f"{type_name(item)} {item.seq}: the operator has finished"))
            return
        self.stream.advance()
        if isinstance(item, CloseForCheckpoint):
            closed = ClosedForCheckpoint(
                self._id, self._outbound.next_seq, item.checkpoint_id, self._outbound.confirmation()
            )
            self._outbound.send_item(closed, effects)

    def take_barrier_apart(self, barrier: BarrierArrived, effects: Effects) -> None:
        """Put the barrier into the mailbox as soon as its items are there. Refuse an unexpected one (H44)."""
        checkpoint_id = barrier.checkpoint_id
        if self._outbound.phase(checkpoint_id) is not SubtaskPhase.CLOSED or checkpoint_id in self._apart:
            why = "unknown, over, or has had its barrier"
            effects.append(RefuseMessage(f"barrier of checkpoint {checkpoint_id} at task {self._id}, which is {why}"))
            return
        self._apart[checkpoint_id] = barrier.events_before
        self._meet_barriers_apart(effects)

    def forget(self) -> None:
        """The operator has ended, and takes nothing any more."""
        self._apart.clear()
        self._unmet.clear()
        self._answers.clear()
        self.urgent.forget()

    def _check_barrier(self, item: BarrierMessage) -> None:
        if not self._outbound.hold_events:
            if not self._outbound.rises(item.checkpoint_id):
                raise RemoteProtocolError(
                    f"barrier of checkpoint {item.checkpoint_id} after a later one: ids must increase"
                )
        elif self._outbound.phase(item.checkpoint_id) is not SubtaskPhase.CLOSED or item.checkpoint_id in self._apart:
            raise RemoteProtocolError(
                f"barrier of checkpoint {item.checkpoint_id}, for which this subtask was not asked to close"
            )
        if item.events_before >= item.seq:
            raise RemoteProtocolError(f"barrier {item.checkpoint_id} has overtaken item {item.events_before}")

    def _start(self, effects: Effects) -> None:
        if self._started:
            raise RemoteProtocolError("the message that lets the operator begin with its records arrived twice")
        self.stream.advance()
        self._started = True
        self.urgent.put(MailboxStart(), effects)

    def _take_target(self, item: SavepointTarget) -> None:
        if not self._precedes_barrier(item.checkpoint_id):
            raise RemoteProtocolError(
                f"the folder of savepoint {item.checkpoint_id}, whose barrier has come, or cannot come any more"
            )
        self.stream.advance()
        self._outbound.aim(item.checkpoint_id, item.target)

    def _precedes_barrier(self, checkpoint_id: int) -> bool:
        """Whether the barrier of this checkpoint may still come. One that came apart waits for the items before it."""
        if self._outbound.phase(checkpoint_id) is SubtaskPhase.CLOSED:
            return True
        return not self._outbound.hold_events and self._outbound.rises(checkpoint_id)

    def _meet_barriers_apart(self, effects: Effects) -> None:
        received_seq = self.stream.received_seq
        for checkpoint_id in sorted(n for n, events_before in self._apart.items() if events_before <= received_seq):
            del self._apart[checkpoint_id]
            self._meet_barrier(checkpoint_id, effects)

    def _meet_barrier(self, checkpoint_id: int, effects: Effects) -> None:
        self._outbound.meet_barrier(checkpoint_id)
        insort(self._unmet, checkpoint_id)
        self.urgent.put(MailboxBarrier(checkpoint_id), effects)

    def check_invariants(self) -> None:
        self.stream.check_invariants()
        self.urgent.check_invariants()
        for checkpoint_id, events_before in self._apart.items():
            assert self._outbound.phase(checkpoint_id) is SubtaskPhase.CLOSED
            assert events_before > self.stream.received_seq, "every item before the barrier is here"
        assert self._unmet == sorted(self._unmet)
        assert all(self._outbound.phase(n) is SubtaskPhase.BARRIER for n in self._unmet)
        if self._answers:
            assert self._unmet, "an answer waits, and nothing will ever release it"
            assert self._unmet[0] <= self._answers[0][0], "an answer waits, though it may be given"
