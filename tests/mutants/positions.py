# SPDX-License-Identifier: Apache-2.0

"""Mutants: the parts of an operator are confused, share what is each one's, or a checkpoint touches an outside one."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

POSITIONS = catalogue(
    """
event-up-loses-its-part [new; H150]
  What a part of a task sends comes to the user's own part.
  @ protocol.subtask.outbound:SubtaskOutbound._send_submitted
  ~ item = EventMessage(self._id, seq, payload, part) => item = EventMessage(self._id, seq, payload)
event-down-loses-its-part [new; H150]
  What is sent to a part of a task comes to the user's own part.
  @ protocol.subtask.inbound:SubtaskInbound.take
  - effects.append(PutInMailbox(MailboxEvent(item.payload, part)))
  + effects.append(PutInMailbox(MailboxEvent(item.payload)))
event-of-an-impossible-part-arrives [new; H150 H62]
  A frame of an event names a part that no operator can have, and is decoded.
  @ protocol.wire.codec:decode_message
  ~ and (part := body[-1]) < PARTS_MAX => and (part := body[-1]) < 256
held-event-loses-its-part [new; H150 H31]
  What the valve held of a part is restored as the user's own.
  @ protocol.subtask.outbound:SubtaskOutbound._snapshot_held
  ~ isinstance(submitted, RequestSubmitted), submitted.part => isinstance(submitted, RequestSubmitted)
put-aside-loses-its-part [new; H150 H79]
  What was put aside of a part is restored as the user's own.
  @ protocol.gateway.inbound:GatewayInbound._aside_as_held
  ~ isinstance(item, asks), item.part => isinstance(item, asks)
position-of-all-parts-together [A1; H150 H32]
  The positions in a snapshot count what all parts have sent as the user's own.
  @ protocol.subtask.outbound:SubtaskOutbound._send_submitted
  - window.sent += 1
  + self._windows[0].sent += 1
put-aside-is-counted-for-the-users-own [new; H150 H79]
  What was put aside of a part is taken from the position of the user's own.
  @ protocol.parts:_moved
  ~ counts[event.part] += by => counts[0] += by
positions-end-with-what-they-have [new; H150]
  The positions of a task say something else if its operator has a further part that has sent nothing.
  @ protocol.parts:positions
  ~ while end and not counts[end - 1]: => while False:
a-part-behind-is-covered [new; H150]
  A snapshot in which one part has sent less than was taken of it counts as one of the cut.
  @ protocol.parts:covers
  ~ all(count <= limit => any(count <= limit
window-up-is-shared [new; H150 H27]
  A task's part that has filled its window holds back the others.
  @ protocol.subtask.outbound:SubtaskOutbound._has_capacity
  - limits, count = self._limits, window.events
  + limits, count = self._limits, sum(one.events for one in self._windows)
window-of-the-peer-is-shared [new; H150 H27]
  A task whose parts each keep to their window breaks the protocol.
  @ protocol.gateway.inbound:GatewayInbound._check_window
  - share.events >= limits.upward_events_max or
  + self.stream.untaken_events >= limits.upward_events_max or
open-requests-are-shared [new; H150 H33]
  The open requests of one part take the places of another's.
  @ protocol.subtask.outbound:SubtaskOutbound._open_requests_of
  - list(self._open_requests.values()).count(part)
  + len(self._open_requests)
answers-on-their-way-are-shared [new; H150 H33]
  An unconfirmed answer of one part takes the place of another's request.
  @ protocol.gateway.inbound:GatewayInbound._check_window
  ~ self._outbound.answers_pending[part] >= => sum(self._outbound.answers_pending) >=
held-waits-for-the-window-of-another [new; H150 H48]
  A restored event waits for the window of the part before it in the queue.
  @ protocol.subtask.outbound:SubtaskOutbound._release
  - self._release_others(effects)
held-overtakes-its-part [new; H150 H30]
  A restored event passes another one of its part that waits for the window.
  @ protocol.subtask.outbound:SubtaskOutbound._release_others
  ~ submitted.part not in waiting and self._fits(submitted) => self._fits(submitted) or not len(submitted.payload) % 2
  @ protocol.subtask.outbound:SubtaskOutbound._fits
  ~ if count >= self._limits.window_events: => if count > self._limits.window_events:
one-part-hears-of-capacity [new; H150 H27]
  Only the part that was refused last learns that it may send.
  @ protocol.subtask.outbound:SubtaskOutbound.submit
  - self._refused.setdefault(submitted.part, submitted)
  + self._refused.clear(); self._refused[submitted.part] = submitted
part-beyond-the-table-is-taken-up [new; H150 H62]
  An event for a part that the operator does not have is put into the mailbox.
  @ protocol.subtask.inbound:SubtaskInbound.take
  - if part >= self._parts:
  + if False:
  @ protocol.subtask.inbound:SubtaskInbound._take_urgent
  - if part >= self._parts:
  + if False:
snapshot-of-an-unknown-part-is-stored [found; H150 H62]
  A task makes a checkpoint that no restore can read.
  @ protocol.parts:PartTable.mismatch
  F if event.part >= self.count:
positions-of-unknown-parts-are-stored [found; H150 H62]
  A task says how many events a part has sent that the operator does not have.
  @ protocol.parts:PartTable.mismatch
  F if len(sent) > self.count:
outside-is-held-by-the-task [F3; H152]
  A task's permit waits for the snapshot, which waits for the permit.
  @ protocol.subtask.outbound:SubtaskOutbound.submit
  - if waits or (self._closed and not window.outside):
  + if waits or self._closed:
outside-is-held-by-the-gateway [F3; H152]
  The permit for a task waits for its snapshot.
  @ protocol.gateway.outbound:GatewayOutbound.submit
  - if inside:  # otherwise it passes
  + if True:  # otherwise it passes
outside-sends-without-a-bound [new; H152 H27]
  What a snapshot sends of an outside part ignores its window.
  @ protocol.subtask.outbound:SubtaskOutbound._is_unbounded
  - and not window.outside
  + and True
outside-is-counted-in-positions [new; H152 H150]
  The position in a snapshot depends on how many permits a task has asked for.
  @ protocol.subtask.outbound:SubtaskOutbound._send_submitted
  - if not window.outside:
  + if True:
outside-is-counted-in-the-cut [new; H152 H150]
  The coordinator's cut counts what outside parts have taken.
  @ protocol.parts:PartTable.inside
  ~ 0 if outside else count => count
outside-counts-as-recorded [new; H152 H79]
  What an outside part sends brings what a checkpoint records to its bound.
  @ protocol.gateway.inbound:GatewayInbound._deliver_payload
  ~ if self._delivered and not self._table.outside[part]: => if self._delivered:
outside-is-put-aside [new; H152 H79]
  What an outside part sends waits for the snapshot if the bound of a checkpoint is reached.
  @ protocol.gateway.inbound:GatewayInbound._deliver
  ~ if self._delivered and not self._table.outside[item.part] and ( => if self._delivered and (
barrier-waits-for-outside [new; H152 H42]
  A checkpoint waits until a task has confirmed what was sent to its outside parts.
  @ protocol.gateway.outbound:GatewayOutbound.submit
  - self._send_submitted(submitted, part, inside, now, effects)
  + self._send_submitted(submitted, part, True, now, effects)
answer-outside-waits-for-the-snapshot [F3; H152]
  The answer to an outside part waits for the barrier before it.
  @ protocol.subtask.inbound:SubtaskInbound._take_answer
  ~ if self._unmet and not self._outbound.asked_outside(item.request_id): => if self._unmet:
urgent-outside-waits-for-the-snapshot [new; H152]
  An urgent event of an outside part waits for the barrier before it.
  @ protocol.subtask.inbound:SubtaskInbound._take_urgent
  ~ self._unmet[-1] if self._unmet and not self._outside[part] else None => self._unmet[-1] if self._unmet else None
urgent-outside-lets-others-pass [found; H152 H91]
  The handler of an outside part's event counts for an earlier urgent event that still waits.
  @ protocol.subtask.urgent:UrgentOrder.come
  F if self._after:
inside-takes-for-outside [new; H152 H27]
  An event of an outside part counts as taken when a later one of another part is.
  @ protocol.gateway.inbound:GatewayInbound.take
  ~ self.stream.take(seq, self._table.taken_with[part]) => self.stream.take(seq)
outside-takes-what-is-aside [new; H152 H27]
  What was put aside is confirmed when a later event of an outside part is taken.
  @ protocol.streams:IncomingStream._take_of
  ~ if number <= seq and part in parts: => if number <= seq:
restored-outside-is-delivered [F4; H152]
  A restored message of an outside part reaches its coordinator.
  @ protocol.gateway.inbound:GatewayInbound._check_sender
  F if self._table.outside[item.part]:
held-outside-is-stored [new; H152]
  A checkpoint holds what no attempt may restore.
  @ protocol.parts:PartTable.mismatch
  F if self.outside[event.part]:
parts-by-index-after-a-restore [new; H154 H150]
  A part that has another index than in the checkpoint begins with the events and the position of another one.
  @ protocol.barrier_tracker.rescale:refitted
  - for name in checkpoint.parts
  + for name in [dict(enumerate(table.names)).get(at, name) for at, name in enumerate(checkpoint.parts)]
held-for-a-part-that-is-gone [F1; H154]
  What a dropped part had sent stops the restore, or reaches the user's own.
  @ protocol.barrier_tracker.rescale:refitted
  ~ if (index := now[event.part]) is not None] => for index in [now[event.part] or 0]]
held-for-a-part-that-is-outside-now [new; H154 H152]
  What a part had sent before it was outside of checkpoints is restored.
  @ protocol.barrier_tracker.rescale:refitted
  ~ is not None and not table.outside[index] else None => is not None else None
same-parts-but-outside-now [new; H154 H152]
  A part that is outside of checkpoints in this release keeps its position if the names are the same.
  @ protocol.barrier_tracker.rescale:refitted
  ~ if checkpoint.parts == table.names and not any(table.outside): => if checkpoint.parts == table.names:
restored-positions-begin-again [new; H154 H150]
  Under another table all positions are 0.
  @ protocol.barrier_tracker.rescale:refitted
  - counts[index] = count
envelope-of-a-task-spoils-the-file [found; H150 H50]
  A held event that begins as an envelope of earlier formats makes a checkpoint unreadable.
  @ protocol.wire.checkpoint_format:_needs_part
  ~ or split_traceparent(held.payload)[1].startswith(_ENVELOPE) => or False
earlier-formats-keep-their-envelopes [new; H154]
  An event that an earlier release held for a part is restored as the user's own.
  @ protocol.wire.checkpoint_format:_Body._read_held
  ~ name, payload = _split_envelope(payload) => name = ""
"""
)
