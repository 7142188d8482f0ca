# SPDX-License-Identifier: Apache-2.0

"""Mutants of the downward path: the gateway, its valve, its confirmations, and the subtask's intake."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

DOWNWARD = catalogue(r"""
completes-with-confirmations-pending [FLINK-21996; H42]
  A barrier leaves at the cut, whatever is unconfirmed.
  @ protocol.gateway.outbound:GatewayOutbound._send_barriers
  ~ and self._settled >= checkpoint.submitted_at_cut => and self._settled >= 0
drains-on-failure [FLINK-23233; H42]
  An event that has failed counts as confirmed for the checkpoint that waits for it.
  @ protocol.gateway.outbound:GatewayOutbound.fail_all
  ~ self._settled = self._submitted => self._settled = self._submitted; self._send_barriers(effects)
confirms-when-sent [FLINK-23233; H23]
  An event is confirmed when it is written, not when it is in the mailbox.
  @ protocol.gateway.outbound:GatewayOutbound._send_submitted
  - stream.append(item, size, submitted.event_id, part)
  + stream.append(item, size, None, part); self.answers_pending[part] += 1; \
  + effects.append(ConfirmEvent(submitted.event_id))
reopens-at-barrier-injection [FLINK-28606; H41]
  The gateway reopens when the barrier leaves, not at the subtask's own acknowledgement.
  @ protocol.gateway.machine:GatewayMachine._reach_cut
  - self._outbound.reach_cut(checkpoint_id, input.target, effects)
  + self._outbound.reach_cut(checkpoint_id, input.target, effects); \
  + checkpoint = self._outbound._checkpoints.get(input.checkpoint_id); \
  + checkpoint and checkpoint.phase.value == "barrier" and self._outbound._reopen(input.checkpoint_id, now, effects)
  @ protocol.gateway.outbound:GatewayOutbound._reopen
  ~ closed.remove(checkpoint_id) => closed.remove(checkpoint_id) if checkpoint_id in closed else None
forgets-the-unconfirmed-on-abort [G3; H42]
  An aborted checkpoint empties the tracker: the next one does not wait for what was unconfirmed.
  @ protocol.gateway.outbound:GatewayOutbound.end_checkpoint
  - if checkpoint_id in self.closed:
  + self._settled = self._submitted if outcome is CheckpointOutcome.ABORTED else self._settled
  +     if checkpoint_id in self.closed:
opens-the-last-on-abort [G4; H44 H43]
  A checkpoint that is over opens the gateway for the last one that has closed it.
  @ protocol.gateway.outbound:GatewayOutbound.end_checkpoint
  ~ self._reopen(checkpoint_id, now, effects) => self._reopen(self.closed[-1], now, effects)
reopens-for-any [feared; H43]
  With several checkpoints, a held event leaves when any of them opens.
  @ protocol.gateway.outbound:GatewayOutbound._reopen
  ~ while held and not (closed and closed[0] <= held[0][0]): => while held:
barrier-overtakes [G8; H23]
  A barrier that comes on its own way does not wait for the events before it.
  @ protocol.subtask.inbound:SubtaskInbound.take_barrier_apart
  ~ self._apart[checkpoint_id] = barrier.events_before => self._apart[checkpoint_id] = 0
barrier-names-too-little [G8; H23]
  A barrier names the last event but one as the one that it follows.
  @ protocol.gateway.outbound:GatewayOutbound._send_barrier
  ~ events_before = self._last_event_seq => events_before = self._last_event_seq - 1
barrier-twice [feared; H22]
  A barrier is put twice into the mailbox.
  @ protocol.subtask.inbound:SubtaskInbound._meet_barrier
  - self.urgent.put(MailboxBarrier(checkpoint_id), effects)
  + self.urgent.put(MailboxBarrier(checkpoint_id), effects); self.urgent.put(MailboxBarrier(checkpoint_id), effects)
events-twice [feared; H22]
  An event is put twice into the mailbox.
  @ protocol.subtask.inbound:SubtaskInbound.take
  - effects.append(PutInMailbox(MailboxEvent(item.payload, part)))
  + effects.extend([PutInMailbox(MailboxEvent(item.payload, part))] * 2)
urgent-after-the-barrier [feared; H92]
  A barrier does not wait until the handlers of the urgent events before it have returned.
  @ protocol.subtask.urgent:UrgentOrder._may_pass
  ~ awaits_return = isinstance(item, MailboxBarrier | MailboxStart) => awaits_return = isinstance(item, MailboxStart)
urgent-after-the-start [feared; H66 H92]
  The operator begins while an urgent event that subtask_ready sent is still being handled.
  @ protocol.subtask.urgent:UrgentOrder._may_pass
  ~ awaits_return = isinstance(item, MailboxBarrier | MailboxStart) => awaits_return = isinstance(item, MailboxBarrier)
urgent-is-overtaken [feared; H91]
  An event that was sent later is handled before the urgent one begins.
  @ protocol.subtask.urgent:UrgentOrder._may_pass
  - return came_before <= (self._handled if awaits_return else self._begun)
  + return came_before <= (self._handled if awaits_return else self._came)
urgent-passes-the-valve [feared; H92 H41]
  An urgent event that is sent after a cut does not wait for the valve.
  @ protocol.gateway.outbound:GatewayOutbound.submit
  - if self.closed:
  + if self.closed and not (isinstance(submitted, EventSubmitted) and submitted.urgent):
urgent-is-ordinary [feared; H90]
  The gateway sends an urgent event as an ordinary one.
  @ protocol.gateway.outbound:GatewayOutbound._send_submitted
  - item = (UrgentEventMessage if submitted.urgent else EventMessage)(self._id, seq, payload, part)
  + item = EventMessage(self._id, seq, payload, part)
urgent-not-counted [feared; H91 H92]
  What comes after an urgent event goes into the mailbox as if there were none.
  @ protocol.subtask.urgent:UrgentOrder.come
  ~ self._came += 1 => self._came += 1; self._begun = self._handled = self._came
  @ protocol.subtask.urgent:UrgentOrder.begin
  - self._begun += 1
  @ protocol.subtask.urgent:UrgentOrder.end
  - self._handled += 1
urgent-twice [feared; H22 H91]
  An urgent event is handled twice.
  @ protocol.subtask.urgent:UrgentOrder.come
  ~ self._came += 1 => self._came += 2; effects.append(HandleUrgent(payload, part))
urgent-waits-forever [feared; H48 H92]
  The return of a handler lets nothing pass.
  @ protocol.subtask.urgent:UrgentOrder.end
  - self._release(effects)
urgent-handler-is-refused [feared; H92]
  What a handler sends while a snapshot waits for it finds no capacity.
  @ protocol.subtask.outbound:SubtaskOutbound._is_unbounded
  - submitted.in_snapshot or (submitted.in_urgent and self._awaits_snapshot())
  + submitted.in_snapshot
ends-before-its-urgent-events [feared; H93]
  An operator may end well while an urgent event is being handled.
  @ protocol.subtask.machine:SubtaskMachine.may_finish
  ~ return self._inbound.urgent.idle and not self._outbound.holds() => return not self._outbound.holds()
  @ protocol.subtask.machine:SubtaskMachine._finish
  F if not self._inbound.urgent.idle:
never-gives-up-the-silent [feared; H94]
  An attempt that gives no sign of life is never given up.
  @ protocol.gateway.machine:GatewayMachine._look_for_life
  F if self._silent_s >= timeout_s:
forgets-the-signs-of-life [feared; H94]
  A sign of life does not begin the wait again.
  @ protocol.gateway.machine:GatewayMachine._look_for_life
  - self._silent_s = 0.0
hears-no-signs-of-life [feared; H94]
  Intervals count as silent whatever came.
  @ protocol.gateway.machine:GatewayMachine._hear_life
  - self._heard = True
sends-no-heartbeat [feared; H94]
  A task that has nothing to say gives no sign of life.
  @ protocol.subtask.machine:SubtaskMachine._beat
  - effects.append(SendToCoordinator(Heartbeat(self._id)))
sends-no-heartbeat-after-a-loss [feared; H94]
  A task gives no signs of life on its second connection.
  @ protocol.subtask.machine:SubtaskMachine._attach
  ~ self._schedule_beat(now) => self._beat_at = now + 99.0 if input.received_seq else None
resend-without-suppression [G9; H22 H30]
  What is sent again after a reconnect is taken again.
  @ protocol.streams:IncomingStream.is_new
  ~ return seq == expected => self.received_seq = seq - 1; return True
forgets-to-resend-down [feared; H24]
  After a reconnect the gateway sends all that is unconfirmed again but the first.
  @ protocol.gateway.outbound:GatewayOutbound.attach
  ~ for item in self.stream.unconfirmed()] => for item in list(self.stream.unconfirmed())[1:]]
held-not-failed [feared; H26]
  Events that are held when the attempt is over are forgotten, not failed.
  @ protocol.gateway.outbound:GatewayOutbound.fail_all
  ~ for _, _, held, _ in self._held: => for _, _, held, _ in ():
unconfirmed-not-failed [feared; H26]
  Events that are unconfirmed when the attempt is over are forgotten, not failed.
  @ protocol.gateway.outbound:GatewayOutbound.fail_all
  ~ for event_id in self.stream.tags(): => for event_id in ():
answers-pass-the-valve [G14; H33 H41 H84]
  The answer to a request passes the closed gateway.
  @ protocol.gateway.outbound:GatewayOutbound.submit
  - if self.closed:
  + if self.closed and isinstance(submitted, EventSubmitted):
drain-forgets-answers [G14; H33 H42]
  A checkpoint does not wait for the answers of before its cut.
  @ protocol.gateway.outbound:GatewayOutbound.submit
  - self._submitted += awaited
  + self._submitted += awaited and isinstance(submitted, EventSubmitted)
waits-for-the-loss-tolerant [G10; H28]
  An attempt that does not confirm a loss-tolerant event is failed for it.
  @ protocol.gateway.outbound:GatewayOutbound._send_submitted
  ~ awaited = not submitted.loss_tolerant => awaited = True
tolerates-forever [E15; H72]
  The wait for a loss-tolerant event that is not confirmed never ends.
  @ protocol.gateway.outbound:GatewayOutbound.tolerant_deadline
  ~ return self._deadline_of(self.tolerated) => return None
expires-twice [feared; H72]
  The wait for a loss-tolerant event that has ended ends again.
  @ protocol.gateway.outbound:GatewayOutbound.expire_tolerant
  - effects.append(ExpireEvent(event_id, ConfirmationTimeout(reason)))
  + effects.extend([ExpireEvent(event_id, ConfirmationTimeout(reason))] * 2)
expires-too-soon [feared; H72]
  The clock of a loss-tolerant event does not stand still while no connection is up.
  @ protocol.gateway.outbound:GatewayOutbound.tolerant_deadline
  - return self._deadline_of(self.tolerated)
  + return self.tolerated[0][1] + self._limits.confirm_timeout_s if self.tolerated else None
delivers-before-ready [feared; H10 H11]
  Events come to the coordinator before it knows that their subtask is ready.
  @ protocol.gateway.inbound:GatewayInbound._take_item
  F if not self._ready and (self._kept or type(item) in PAYLOAD):
confirms-before-taken [feared; H27 H30]
  An upward event is confirmed when it arrives, not when the coordinator has taken it.
  @ protocol.streams:IncomingStream.confirmable_seq
  ~ return self._untaken[0][0] - 1 if self._untaken else self.received_seq => return self.received_seq
a-report-confirms-what-is-not-taken [feared; H27 H30]
  A report about a checkpoint confirms events that have arrived, and that the coordinator has not taken.
  @ protocol.streams:IncomingStream.confirmation
  ~ seq = self._untaken[0][0] - 1 if self._untaken else self.received_seq => seq = self.received_seq
barrier-apart-without-a-valve [prototype; H79]
  Barriers travel apart, and nothing is held.
  @ protocol.gateway.outbound:GatewayOutbound.submit
  - if self.closed:
  + if self.closed and not self._apart:
answer-overtakes-the-barrier [prototype; H33 H79]
  An answer is given to its asker although a barrier before it is not met.
  @ protocol.subtask.inbound:SubtaskInbound._take_answer
  F if self._unmet and not self._outbound.asked_outside(item.request_id):
answers-wait-until-no-barrier-is-unmet [prototype; H33 H79]
  An answer waits for later barriers too, so an answer of before a cut is missing in that snapshot.
  @ protocol.subtask.inbound:SubtaskInbound.barrier_met
  ~ while self._answers and (first is None or first > self._answers[0][0]): => while self._answers and first is None:
urgent-overtakes-the-barrier [found; H92 H79]
  An urgent event is handled although it came after a barrier that is not met.
  @ protocol.subtask.inbound:SubtaskInbound._take_urgent
  ~ self._unmet[-1] if self._unmet and not self._outside[part] else None => None
""")
