# SPDX-License-Identifier: Apache-2.0

"""Mutants of the downward path: the gateway, its valve, its confirmations, and the subtask's intake."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

DOWNWARD = catalogue(r"""
completes-with-confirmations-pending [FLINK-21996; H42]
  A gateway is drained at its cut, whatever is unconfirmed.
  @ protocol.gateway.outbound:GatewayOutbound._report_drained
  - and self._settled >= checkpoint.submitted_at_cut
  + and self._settled >= 0
drains-on-failure [FLINK-23233; H42]
  An event that has failed counts as confirmed for the checkpoint that waits for it.
  @ protocol.gateway.outbound:GatewayOutbound.fail_all
  - self._settled = self._submitted
  + self._settled = self._submitted; self._report_drained(effects)
confirms-when-sent [FLINK-23233; H23]
  An event is confirmed when it is written, not when it is in the mailbox.
  @ protocol.gateway.outbound:GatewayOutbound._send_submitted
  - stream.append(item, len(payload), submitted.event_id)
  + stream.append(item, len(payload)); effects.append(ConfirmEvent(submitted.event_id))
reopens-at-barrier-injection [FLINK-28606; H41]
  The gateway reopens when the barrier leaves, not at the subtask's own acknowledgement.
  @ protocol.gateway.machine:GatewayMachine._send_barrier
  - self._outbound.send_barrier(input.checkpoint_id, input.apart, effects)
  + self._outbound.send_barrier(input.checkpoint_id, input.apart, effects); \
  + self._outbound._reopen(input.checkpoint_id, now, effects)
  @ protocol.gateway.outbound:GatewayOutbound._reopen
  - closed.remove(checkpoint_id)
  + closed.remove(checkpoint_id) if checkpoint_id in closed else None
forgets-the-unconfirmed-on-abort [G3; H42]
  An aborted checkpoint empties the tracker: the next one does not wait for what was unconfirmed.
  @ protocol.gateway.outbound:GatewayOutbound.end_checkpoint
  - if checkpoint_id in self.closed:
  + self._settled = self._submitted if outcome is CheckpointOutcome.ABORTED else self._settled
  +     if checkpoint_id in self.closed:
opens-the-last-on-abort [G4; H44 H43]
  A checkpoint that is over opens the gateway for the last one that has closed it.
  @ protocol.gateway.outbound:GatewayOutbound.end_checkpoint
  - self._reopen(checkpoint_id, now, effects)
  + self._reopen(self.closed[-1], now, effects)
reopens-for-any [feared; H43]
  With several checkpoints, a held event leaves when any of them opens.
  @ protocol.gateway.outbound:GatewayOutbound._reopen
  - while held and not (closed and closed[0] <= held[0][0]):
  + while held:
barrier-overtakes [G8; H23]
  A barrier that comes on its own way does not wait for the events before it.
  @ protocol.subtask.inbound:SubtaskInbound.take_barrier_apart
  - self._apart[checkpoint_id] = barrier.events_before
  + self._apart[checkpoint_id] = 0
barrier-names-too-little [G8; H23]
  A barrier names the last event but one as the one that it follows.
  @ protocol.gateway.outbound:GatewayOutbound.send_barrier
  - events_before = self._last_event_seq
  + events_before = self._last_event_seq - 1
barrier-twice [feared; H22]
  A barrier is put twice into the mailbox.
  @ protocol.subtask.inbound:SubtaskInbound._meet_barrier
  - effects.append(PutInMailbox(MailboxBarrier(checkpoint_id)))
  + effects.extend([PutInMailbox(MailboxBarrier(checkpoint_id))] * 2)
events-twice [feared; H22]
  An event is put twice into the mailbox.
  @ protocol.subtask.inbound:SubtaskInbound.take
  - effects.append(PutInMailbox(MailboxEvent(item.payload)))
  + effects.extend([PutInMailbox(MailboxEvent(item.payload))] * 2)
resend-without-suppression [G9; H22 H30]
  What is sent again after a reconnect is taken again.
  @ protocol.streams:IncomingStream.is_new
  - return seq == expected
  + self.received_seq = seq - 1; return True
forgets-to-resend-down [feared; H24]
  After a reconnect the gateway sends all that is unconfirmed again but the first.
  @ protocol.gateway.outbound:GatewayOutbound.attach
  - for item in self.stream.unconfirmed()]
  + for item in list(self.stream.unconfirmed())[1:]]
held-not-failed [feared; H26]
  Events that are held when the attempt is over are forgotten, not failed.
  @ protocol.gateway.outbound:GatewayOutbound.fail_all
  - for _, _, held in self._held:
  + for _, _, held in ():
unconfirmed-not-failed [feared; H26]
  Events that are unconfirmed when the attempt is over are forgotten, not failed.
  @ protocol.gateway.outbound:GatewayOutbound.fail_all
  - for event_id in self.stream.tags():
  + for event_id in ():
answers-pass-the-valve [G14; H33 H41]
  The answer to a request passes the closed gateway.
  Argued: with the actors around it, the machine never holds an answer: the coordinator answers within the call that
  brings the request, and no request comes between its cut and the subtask's snapshot, because the upward valve is
  closed all that time and what left before lies in front of the cut
  @ protocol.gateway.outbound:GatewayOutbound.submit_answer
  - if self.closed:
  + if False:
drain-forgets-answers [G14; H33 H42]
  A checkpoint does not wait for the answers of before its cut.
  @ protocol.gateway.outbound:GatewayOutbound.submit_answer
  - self._submitted += 1
  + pass
waits-for-the-loss-tolerant [G10; H28]
  An attempt that does not confirm a loss-tolerant event is failed for it.
  @ protocol.gateway.outbound:GatewayOutbound._send_submitted
  - awaited = not submitted.loss_tolerant
  + awaited = True
tolerates-for-ever [E15; H72]
  The wait for a loss-tolerant event that is not confirmed never ends.
  @ protocol.gateway.outbound:GatewayOutbound.tolerant_deadline
  - if not self._tolerated:
  + if True:
expires-twice [feared; H72]
  The wait for a loss-tolerant event that has ended ends again.
  @ protocol.gateway.outbound:GatewayOutbound.expire_tolerant
  - effects.append(ExpireEvent(event_id, ConfirmationTimeout(reason)))
  + effects.extend([ExpireEvent(event_id, ConfirmationTimeout(reason))] * 2)
expires-too-soon [feared; H72]
  The clock of a loss-tolerant event does not stand still while no connection is up.
  @ protocol.gateway.outbound:GatewayOutbound.tolerant_deadline
  - return self._tolerated[0][1] + self._limits.confirm_timeout_s + self._paused_s
  + return self._tolerated[0][1] + self._limits.confirm_timeout_s
delivers-before-ready [feared; H10 H11]
  Events come to the coordinator before it knows that their subtask is ready.
  @ protocol.gateway.inbound:GatewayInbound._take_item
  - if not self._ready and (self._kept or isinstance(item, PAYLOAD)):
  + if False:
confirms-before-taken [feared; H27 H30]
  An upward event is confirmed when it arrives, not when the coordinator has taken it.
  @ protocol.streams:IncomingStream.confirmable_seq
  - return self._untaken[0][0] - 1 if self._untaken else self.received_seq
  + return self.received_seq
""")
