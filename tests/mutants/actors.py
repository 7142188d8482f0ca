# SPDX-License-Identifier: Apache-2.0

"""Mutants of the actors around the machines: the coordinator's, the gateways', the tracker's, and the router."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

ACTORS = catalogue(r"""
gateway-not-scoped-to-the-attempt [FLINK-18071; H20 H14]
  A gateway belongs to the subtask: what is sent to an attempt that is over goes to the next one.
  @ actors.coordination.engine.gateway:OpenGateways.open
  - sends = AttemptSends(attempt, line.tell_direct, bounds, context.clock.now, self._config.wire_limits)
  + sends = self.__dict__.setdefault('of_subtask', {}).setdefault(attempt.subtask, AttemptSends(attempt, \
  + line.tell_direct, bounds, context.clock.now, self._config.wire_limits)); sends.attempt, sends._submit, \
  + sends._budgets, sends.over = attempt, line.tell_direct, {}, None
begins-before-subtask-ready [found; H66]
  An operator may begin with its records before subtask_ready has sent anything.
  @ actors.coordination.engine.coordinator:CoordinatorActor._tell_ready
  - ready = await self._guarded(name, calls)
  + message.gateway_ref.tell_direct(ReadyAnnounced()); ready = False; await self._guarded(name, calls)
begins-though-subtask-ready-failed [feared; H66]
  An operator begins with its records although subtask_ready raised.
  @ actors.coordination.engine.coordinator:CoordinatorActor._tell_ready
  T if ready:
never-begins [feared; H66 H48]
  After subtask_ready, nobody tells the operator to begin.
  @ protocol.gateway.machine:GatewayMachine._announce_ready
  - self._outbound.start_processing(effects)
dead-gateway-takes-events [feared; H14]
  Inside subtask_reset the old gateway still takes events.
  @ actors.coordination.engine.gateway:OpenGateways.reject_sends
  - gateway.sends.end(AttemptOver(f"{attempt} is over: {reason}"))
hears-attempts-that-are-over [feared; H3]
  An event of an attempt that is over reaches the coordinator's handler.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_lifecycle
  - self._live.pop(attempt.task_attempt_id, None)
  -             self.taken.forget(attempt)
cut-one-message-late [feared; H40 H41]
  The gateways hear of the cut one message of the coordinator later.
  @ actors.coordination.engine.coordinator:CoordinatorActor._take_snapshot
  - self._announcer.announce(open_ones, CutReached(checkpoint_id, target))
  + async def late() -> None:
  +             [line.tell_direct(CutReached(checkpoint_id, target)) for line in open_ones]
  +         self._context.self_ref.tell(CallHandler(late))
cut-overtaken-where-it-was-put-off [prototype; H41 H79]
  A gateway that is notified of the cut later gets an event of after the cut before that.
  @ actors.coordination.host.gateway:GatewayLine.tell_direct
  - if self._put_off:
  + if False:
notification-swallowed [Flink R50; H7]
  What a method of the coordinator raises is logged, and the job goes on.
  @ actors.coordination.engine.coordinator:CoordinatorActor._guarded
  - self.raise_global_failure(method, error)
  + context.log.warning('swallowed', error=repr(error))
answers-another-attempt [G14; H33]
  The answer to a request goes to the attempt that has been alive for longest.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_request
  ~ message.gateway_ref.tell_direct(AnswerSubmitted( => next(iter(self._live.values())).tell_direct(AnswerSubmitted(
coordinator-takes-in-silence [feared; H27 H48]
  The coordinator does not tell the gateway that it has taken an event.
  @ actors.coordination.engine.coordinator:CoordinatorActor._handle_event
  - message.gateway_ref.tell_direct(ItemTaken(message.seq, index))
credit-not-given-back [feared; H27 H48]
  A confirmed event goes on counting against the sender's bound.
  @ actors.coordination.engine.gateway:GatewayActor._confirm_event
  - self._sends.give_back(confirmation)
old-connection-ends-the-new-one [feared; H24]
  The end of a connection that was replaced counts as the end of the new one.
  @ actors.coordination.engine.gateway:GatewayActor._lose_connection
  - if self._connection is not None and self._connection.connection_id == message.connection_id:
  + if self._connection is not None:
old-connection-is-heard [feared; H24 H30]
  Messages of a connection that was replaced are taken.
  Argued: the numbers make it harmless (H22, H30): what comes on a connection that was replaced is either known or
  the very next
  @ actors.coordination.engine.gateway:GatewayActor._take_messages
  ~ if connection is None or connection.connection_id != message.connection_id: => if connection is None:
gateways-outlive-their-run [feared; H57 H26]
  When a run ends its gateways stay open.
  Argued: a second line of defence: the ledger reports every attempt as finished or failed before it ends the run,
  and each report closes a gateway
  @ actors.coordination.engine.barrier_tracker:BarrierTrackerActor._tell_coordinator
  - self._gateways.close_all("the run has ended")
gateway-outlives-its-success [feared; H26]
  The gateway of a subtask that has finished stays open.
  @ actors.coordination.engine.barrier_tracker:BarrierTrackerActor._tell_coordinator
  - self._gateways.close(attempt, "it has finished")
abort-not-told-to-subtasks [G5; H45 H44]
  Subtasks do not hear that a checkpoint was aborted: their valves stay closed.
  @ actors.coordination.engine.barrier_tracker:BarrierTrackerActor._end_checkpoint
  - self._gateways.tell_all(CheckpointOver(checkpoint_id, CheckpointOutcome.ABORTED))
abort-not-told-to-the-coordinator [G5; H45 H16]
  The coordinator does not hear that a checkpoint was aborted.
  @ actors.coordination.engine.barrier_tracker:BarrierTrackerActor._end_checkpoint
  - self._coordinator_ref.tell(effect)
  -             if not in_doubt:
  + pass
  +             if not in_doubt:
attempt-stays-reachable [feared; H3 H48]
  A task whose attempt is over may resume: its connection goes to a gateway that is gone.
  @ spark_bridge.bridge.router:ConnectionRouter.gateway_closed
  - self._by_attempt.pop(key, None)
direct-overtakes-the-mailbox [feared; H5 H22 H30]
  What an actor is told directly overtakes what lies in its mailbox.
  @ actors.ref:ActorRef.tell_direct
  - if parked is None or parked.done() or cell.direct is None:
  + if (parked is not None and parked.done()) or cell.direct is None:
direct-while-busy [feared; H5 H22 H30]
  What an actor is told directly it handles in the middle of another message.
  @ actors.cell:ActorCell.handle_direct
  - self.direct = None  # further messages wait for their turn
failure-of-before-the-reset [feared; H15]
  A failure of before a reset fails the run that comes after it.
  @ actors.coordination.engine.coordinator:FailureLatch.raise_failure
  - if self._latched or resets < self.resets:
  + if self._latched:
second-run-not-refused [feared; H68]
  An instance that does not forget serves a second run.
  @ actors.coordination.host.given:why_not_resettable
  ~ name = type_name(part.coordinator) => return ''
class-kept-over-runs [feared; H68]
  A class or factory that was given serves all runs with one coordinator.
  @ actors.coordination.host.part:Part.reset_to_checkpoint
  T elif host is None or old.awaited:
action-goes-on-with-old-splits [feared; H68]
  A new action goes on with the enumeration of the one before.
  @ protocol.enumerations:CurrentEnumeration.goes_on_in
  ~ if look.kept & self._outputs: => if self._runs:
kept-output-is-enumerated-anew [feared; H56]
  What is computed again beside kept output is handed other splits.
  @ protocol.enumerations:CurrentEnumeration.goes_on_in
  - if look.kept & self._outputs:
  -         return True
finished-gateway-is-kept [feared; H88]
  The context keeps the gateway of an attempt that has finished.
  @ actors.coordination.host.gateway:GatewayTable.remove
  - of_subtask.pop(attempt.task_attempt_id, None)
copy-replaces-the-first-gateway [feared; H88 H13]
  The context has only the newest gateway of a subtask.
  @ actors.coordination.host.gateway:GatewayTable.add
  - self.by_subtask.setdefault(attempt.subtask, {})[attempt.task_attempt_id] = sends
  + self.by_subtask[attempt.subtask] = {attempt.task_attempt_id: sends}
factory-of-no-actor-is-taken [feared; H165]
  What a factory returns is taken for an actor, whatever it is.
  @ actors.cell:ActorCell._made
  ~ isinstance(made, Actor) => True
""")
