# SPDX-License-Identifier: Apache-2.0

"""Mutants of the upward path: the subtask's valve, its snapshots, and the coordinator's intake."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

UPWARD = catalogue(r"""
upward-not-held [FLINK-26029; H31]
  The upward valve holds nothing during a checkpoint, and nobody compares the two halves.
  @ protocol.subtask.outbound:SubtaskOutbound.submit
  - if waits or (self._closed and not window.outside):
  + if waits:
  @ protocol.barrier_tracker.pending:Part.why_torn
  ~ if snapshot is None or => if True or
held-missing-from-snapshot [G1; H31]
  What the upward valve holds is left out of the snapshot.
  @ protocol.subtask.outbound:SubtaskOutbound._snapshot_held
  ~ for submitted in self._held => for submitted in ()
last-held-missing-from-snapshot [G1; H31]
  The newest of the held events is left out of the snapshot.
  @ protocol.subtask.outbound:SubtaskOutbound._snapshot_held
  ~ for submitted in self._held => for submitted in list(self._held)[:-1]
held-in-wrong-order [feared; H30 H31]
  Held events leave, and lie in the snapshot, in the wrong order.
  @ protocol.subtask.outbound:SubtaskOutbound._hold
  ~ self._held.append(submitted) => self._held.appendleft(submitted)
upward-release-while-another-is-closed [feared; H43]
  The upward valve opens for one checkpoint while it is closed for another, and nobody compares.
  @ protocol.subtask.outbound:SubtaskOutbound._open
  - self._use_capacity(effects)
  + closed, self._closed = self._closed, []; self._use_capacity(effects); self._closed = closed
  @ protocol.barrier_tracker.pending:Part.why_torn
  ~ if snapshot is None or => if True or
restored-after-new [G1; H31]
  The held events of a restored snapshot leave after new ones.
  @ protocol.subtask.outbound:SubtaskOutbound.__init__
  - self._release([])
  @ protocol.subtask.outbound:SubtaskOutbound.attach
  - self._use_capacity(effects)
forgets-to-resend-up [feared; H24 H30]
  After a reconnect the subtask sends all that is unconfirmed again but the first.
  @ protocol.subtask.outbound:SubtaskOutbound.attach
  ~ for item in self.stream.unconfirmed()] => for item in list(self.stream.unconfirmed())[1:]]
window-not-given-back [feared; H27 H48]
  A confirmation frees no capacity at the subtask.
  @ protocol.subtask.outbound:SubtaskOutbound.confirm
  - self._use_capacity(effects)
taken-items-are-lost [feared; H27 H48]
  The gateway does not hear that the coordinator has taken an event.
  @ protocol.gateway.machine:GatewayMachine._take
  - self._inbound.take(input.seq, input.part)
taken-items-are-not-told [feared; H27 H48]
  The subtask does not hear that the coordinator has taken an event.
  @ protocol.gateway.machine:GatewayMachine._take
  - self._send_confirm(effects, _NOW)
held-request-becomes-an-event [found; H73]
  A request that a checkpoint holds is stored as an event.
  @ protocol.subtask.outbound:SubtaskOutbound._snapshot_held
  - submitted.payload, isinstance(submitted, RequestSubmitted), submitted.part
  + submitted.payload, False, submitted.part
restored-request-leaves-as-an-event [found; H73]
  A restored request leaves as an event.
  @ protocol.subtask.outbound:SubtaskOutbound._send_submitted
  F elif submitted.is_request:
late-confirmation-never-leaves [feared; H30]
  What a subtask has said of a checkpoint is not confirmed with the end of the checkpoint.
  Argued: it only costs memory: nobody waits for this confirmation, the next close or any other confirmation takes
  it along, and a resume covers it; until then the task keeps its acknowledgement, state and all.
  tests/protocol/test_late_confirmations.py sees it
  @ protocol.gateway.outbound:GatewayOutbound.end_checkpoint
  ~ checkpoint_id, self._confirmation()) => checkpoint_id, 0)
events-sent-not-restored [feared; H32]
  After a restore, positions are counted from nothing again.
  @ protocol.barrier_tracker.tracker:BarrierTracker._accepted
  - snapshot.states, snapshot.held, snapshot.events_sent, begins_again,
  + snapshot.states, snapshot.held, 0, begins_again,
rescale-loses-held-events [feared; H52]
  With another parallelism, where the parts of two subtasks meet, the held events of one are lost.
  @ protocol.barrier_tracker.rescale:rescaled
  - replace(part, states=tuple(whole), events_sent=())
  + replace(part, states=tuple(whole), events_sent=(), held=() if old % parallelism in parts else part.held)
does-not-compare [feared; H32]
  The tracker does not compare the two halves of a checkpoint.
  Argued: a second line of defence: nothing but another bug makes the two halves differ (upward-not-held and
  upward-release-while-another-is-closed are hunted without it)
  @ protocol.barrier_tracker.pending:Part.why_torn
  ~ if snapshot is None or => if True or
union-runs-with-half-of-the-subtasks [found; H58]
  Two operators share out the tasks of a stage, and each runs with some of its subtasks.
  @ protocol.attempts.admission:_why_divided
  - if not (mine and others):
  + if True:
union-is-proven-by-claims [feared; H58 H75]
  What tasks claim that Spark has not confirmed shows that a stage is divided.
  @ protocol.attempts.admission:_why_divided
  - if task.confirmed and task.operators:
  + if task.operators:
event-class-with-its-own-init [found; H97]
  A dataclass with its own __init__ is registered, and its values arrive changed.
  @ protocol.wire.event_classes:_owner_of
  ~ return None if generated else owner => return None
event-is-changed-by-its-post-init [found; H97]
  What __post_init__ makes of the fields that were sent is not taken back.
  @ protocol.wire.event_classes:Registration.build
  F if self._again:
close-fails-a-success [found; H178]
  What an operator raises in close fails a task whose outputs are complete.
  @ spark_bridge.subtask.operator:close_quietly
  - except BaseException:
  + except SystemExit:
exit-in-close-ends-the-process [found; H178]
  An exit in close takes the place of the result.
  @ spark_bridge.subtask.operator:close_quietly
  - except BaseException:
  + except Exception:
text-replaces-the-error [found; H178]
  An exception whose text cannot be had is replaced by the error of its text.
  @ protocol.describing:_plain
  ~ except BaseException as broken: => except ZeroDivisionError as broken:
reply-survives-its-attempt [feared; H85]
  The replies of an attempt that is over stay open.
  @ actors.coordination.engine.reply:OpenReplies.attempt_over
  ~ in self._tasks.pop(task_attempt_id, {}).values(): => in ():
abandoned-request-keeps-its-place [found; H85 H27]
  A task whose request has timed out tells nobody, so its place in the window is lost.
  @ protocol.subtask.outbound:SubtaskOutbound.abandon
  - self.send_item(RequestCancelled(self._id, self.next_seq, request_id), effects)
abandoned-request-leaves-all-the-same [feared; H85 H31]
  A request that was abandoned while it was held stays in the queue and in the snapshot.
  @ protocol.subtask.outbound:SubtaskOutbound.abandon
  F if isinstance(submitted, RequestSubmitted) and submitted.request_id == request_id:
taken-back-request-frees-nothing [feared; H85 H27]
  Nobody who waits for capacity learns that a held request was taken back.
  @ protocol.subtask.outbound:SubtaskOutbound.abandon
  - self._use_capacity(effects)
cancellation-overtakes-its-request [feared; H85]
  The coordinator is notified of a cancellation before it has the request, and forgets it.
  @ protocol.gateway.inbound:GatewayInbound._cancel
  ~ if not any( => if True or any(
  @ protocol.gateway.inbound:GatewayInbound._deliver_payload
  F if item.request_id in self._cancelled:
cancelled-reply-stays-open [feared; H85 H48]
  The coordinator does not answer a request that nobody waits for.
  @ actors.coordination.engine.reply:OpenReplies.cancel
  - recipient.cancel()
deferred-request-is-answered-too [feared; H84]
  A request whose answer is deferred gets an empty one at the same time.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_request
  ~ and deferred is None: => and True:
deferred-answer-never-leaves [feared; H84 H48]
  A settled reply tells the gateway nothing.
  @ actors.coordination.engine.reply:WaitingTask._submit
  - self._part.submit(partial(self._gateway_ref.tell_direct, answer))
completes-at-the-acknowledgements [prototype; invariant H79]
  A checkpoint is stored before the coordinator has taken the tail of the stream.
  @ protocol.barrier_tracker.pending:PendingCheckpoint.advance
  T if self.hold_events:
covers-what-was-recorded [prototype; H32 H79]
  The part of a subtask says that the coordinator's state covers what was recorded too.
  @ protocol.barrier_tracker.pending:Part.collect
  ~ (*recorded, *snapshot.held), taken) => (*recorded, *snapshot.held), snapshot.events_sent)
records-requests-as-events [feared; H73 H79]
  A request that is recorded comes again as an event.
  @ actors.coordination.engine.coordinator:TakenEvents.take
  - HeldEvent(first_sender, payload, is_request, part)
  + HeldEvent(first_sender, payload, False, part)
records-after-what-was-held [feared; H31 H79]
  What was recorded is stored after what the subtask held.
  @ protocol.barrier_tracker.pending:Part.collect
  ~ (*recorded, *snapshot.held) => (*snapshot.held, *recorded)
loses-what-was-put-aside [feared; H31 H79]
  What the gateway has put aside is missing in the checkpoint.
  @ protocol.gateway.outbound:GatewayOutbound.acknowledge
  ~ (*aside, *item.held) => item.held
puts-aside-forever [feared; H48 H79]
  What was put aside does not come when the checkpoint is over.
  @ protocol.gateway.inbound:GatewayInbound._deliver_aside
  ~ while self._aside and not self._is_at_bound(): => while False:
""")
