# SPDX-License-Identifier: Apache-2.0

"""Mutants of the actors around the machines: the coordinator's, the gateways', the tracker's, and the router."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

COORDINATOR = "actors.coordination.coordinator:CoordinatorActor."
GATEWAY = "actors.coordination.gateway:GatewayActor."
GATEWAYS = "actors.coordination.open_gateways:OpenGateways."
TRACKER = "actors.coordination.barrier_tracker:BarrierTrackerActor."
ROUTER = "spark_bridge.bridge.router:ConnectionRouter."

ACTORS = (
    Mutant(
        "gateway-not-scoped-to-the-attempt",
        "A gateway belongs to the subtask: what is sent to an attempt that is over goes to the next one.",
        "FLINK-18071",
        ("H20", "H14"),
        (
            Edit(
                f"{GATEWAYS}open",
                "handle = GatewayHandle(attempt, ref, budget, context.clock.now)",
                "handle = self.__dict__.setdefault('of_subtask', {}).setdefault("
                "attempt.subtask, GatewayHandle(attempt, ref, budget, context.clock.now));"
                " handle._attempt, handle._ref, handle._budget = attempt, ref, budget",
            ),
        ),
    ),
    Mutant(
        "begins-before-subtask-ready",
        "An operator may begin with its records before subtask_ready has sent anything.",
        "found",
        ("H66",),
        (
            Edit(
                f"{COORDINATOR}_handle_lifecycle",
                'ready = await self._guarded(context, "subtask_ready"',
                "gateway_ref.tell_direct(ReadyAnnounced()); ready = False;"
                ' await self._guarded(context, "subtask_ready"',
            ),
        ),
    ),
    Mutant(
        "begins-though-subtask-ready-failed",
        "An operator begins with its records although subtask_ready raised.",
        "feared",
        ("H66",),
        (Edit(f"{COORDINATOR}_handle_lifecycle", "if ready:", "if True:"),),
    ),
    Mutant(
        "never-begins",
        "After subtask_ready, nobody tells the operator to begin.",
        "feared",
        ("H66", "H48"),
        (
            Edit(
                "protocol.gateway.machine:GatewayMachine._announce_ready",
                "self._outbound.start_processing(effects)",
                "pass",
            ),
        ),
    ),
    Mutant(
        "dead-gateway-takes-events",
        "Inside subtask_reset the old gateway still takes events.",
        "feared",
        ("H14",),
        (
            Edit(
                f"{GATEWAYS}reject_sends",
                'gateway.budget.end(AttemptOver(f"{attempt} is over: {reason}"))',
                "pass",
            ),
        ),
    ),
    Mutant(
        "hears-attempts-that-are-over",
        "An event of an attempt that is over reaches the coordinator's handler.",
        "feared",
        ("H3",),
        (
            Edit(
                f"{COORDINATOR}_handle_lifecycle",
                "self._live.pop(attempt.task_attempt_id, None)\n            self.taken.forget(attempt)",
                "pass",
            ),
        ),
    ),
    Mutant(
        "cut-one-message-late",
        "The gateways hear of the cut one message of the coordinator later.",
        "feared",
        ("H40", "H41"),
        (
            Edit(
                f"{COORDINATOR}_take_snapshot",
                "for gateway_ref in self._live.values():\n"
                "            gateway_ref.tell_direct(CutReached(checkpoint_id))",
                "async def late() -> None:\n"
                "            [ref.tell_direct(CutReached(checkpoint_id)) for ref in self._live.values()]\n"
                "        context.self_ref.tell(CallHandler(late))",
            ),
        ),
    ),
    Mutant(
        "notification-swallowed",
        "What a method of the coordinator raises is logged, and the job goes on.",
        "Flink R50",
        ("H7",),
        (
            Edit(
                f"{COORDINATOR}_guarded",
                "self.raise_global_failure(method, error, context)",
                "context.log.warning('swallowed', error=repr(error))",
            ),
        ),
    ),
    Mutant(
        "answers-another-attempt",
        "The answer to a request goes to the attempt that has been alive for longest.",
        "G14",
        ("H33",),
        (
            Edit(
                f"{COORDINATOR}_handle_request",
                "message.gateway_ref.tell_direct(AnswerSubmitted(",
                "next(iter(self._live.values())).tell_direct(AnswerSubmitted(",
            ),
        ),
    ),
    Mutant(
        "coordinator-takes-in-silence",
        "The coordinator does not tell the gateway that it has taken an event.",
        "feared",
        ("H27", "H48"),
        (Edit(f"{COORDINATOR}_handle_event", "message.gateway_ref.tell_direct(ItemTaken(message.seq))", "pass"),),
    ),
    Mutant(
        "credit-not-given-back",
        "A confirmed event goes on counting against the sender's bound.",
        "feared",
        ("H27", "H48"),
        (Edit(f"{GATEWAY}_confirm_event", "self._budget.give_back(confirmation.size)", "pass"),),
    ),
    Mutant(
        "old-connection-ends-the-new-one",
        "The end of a connection that was replaced counts as the end of the new one.",
        "feared",
        ("H24",),
        (
            Edit(
                f"{GATEWAY}_lose_connection",
                "if self._connection is not None and self._connection.connection_id == message.connection_id:",
                "if self._connection is not None:",
            ),
        ),
    ),
    Mutant(
        "old-connection-is-heard",
        "Messages of a connection that was replaced are taken.",
        "feared",
        ("H24", "H30"),
        (
            Edit(
                f"{GATEWAY}_take_messages",
                "if connection is None or connection.connection_id != message.connection_id:",
                "if connection is None:",
            ),
        ),
        argued=(
            "the numbers make it harmless (H22, H30): what comes on a connection that was replaced is either "
            "known or the very next"
        ),
    ),
    Mutant(
        "gateways-outlive-their-run",
        "When a run ends its gateways stay open.",
        "feared",
        ("H57", "H26"),
        (Edit(f"{TRACKER}_tell_coordinator", 'self._gateways.close_all("the run has ended")', "pass"),),
        argued=(
            "a second line of defence: the ledger reports every attempt as finished or failed before it ends "
            "the run, and each report closes a gateway"
        ),
    ),
    Mutant(
        "gateway-outlives-its-success",
        "The gateway of a subtask that has finished stays open.",
        "feared",
        ("H26",),
        (Edit(f"{TRACKER}_take_decision", 'self._gateways.close(attempt, "it has finished")', "pass"),),
    ),
    Mutant(
        "abort-not-told-to-subtasks",
        "Subtasks do not hear that a checkpoint was aborted: their valves stay closed.",
        "G5",
        ("H45", "H44"),
        (
            Edit(
                f"{TRACKER}_end_checkpoint",
                "self._gateways.tell_all(CheckpointOver(checkpoint_id, CheckpointOutcome.ABORTED))",
                "pass",
            ),
        ),
    ),
    Mutant(
        "abort-not-told-to-the-coordinator",
        "The coordinator does not hear that a checkpoint was aborted.",
        "G5",
        ("H45", "H16"),
        (
            Edit(
                f"{TRACKER}_end_checkpoint",
                "self._coordinator_ref.tell(effect)\n            if not in_doubt:",
                "pass\n            if not in_doubt:",
            ),
        ),
    ),
    Mutant(
        "attempt-stays-reachable",
        "A task whose attempt is over may resume: its connection goes to a gateway that is gone.",
        "feared",
        ("H3", "H48"),
        (Edit(f"{ROUTER}gateway_closed", "self._by_attempt.pop(key, None)", "pass"),),
    ),
    Mutant(
        "direct-overtakes-the-mailbox",
        "What an actor is told directly overtakes what lies in its mailbox.",
        "feared",
        ("H5", "H22", "H30"),
        (
            Edit(
                "actors.ref:ActorRef.tell_direct",
                "if parked is None or parked.done() or cell.direct is None:",
                "if (parked is not None and parked.done()) or cell.direct is None:",
            ),
        ),
    ),
    Mutant(
        "direct-while-busy",
        "What an actor is told directly it handles in the middle of another message.",
        "feared",
        ("H5", "H22", "H30"),
        (
            Edit(
                "actors.cell:ActorCell.handle_direct",
                "self.direct = None  # further messages wait for their turn",
                "pass",
            ),
        ),
    ),
    Mutant(
        "failure-of-before-the-reset",
        "A failure of before a reset fails the run that comes after it.",
        "feared",
        ("H15",),
        (
            Edit(
                "actors.coordination.failure:FailureLatch.raise_failure",
                "if self._latched or resets < self.resets:",
                "if self._latched:",
            ),
        ),
    ),
    Mutant(
        "second-run-not-refused",
        "An instance that does not forget serves a second run.",
        "feared",
        ("H68",),
        (Edit("actors.coordination.given:why_not_resettable", "name = type(coordinator).__name__", "return ''"),),
    ),
    Mutant(
        "class-kept-over-runs",
        "A class or factory that was given serves all runs with one coordinator.",
        "feared",
        ("H68",),
        (
            Edit(
                "actors.coordination.recreate_on_reset:RecreateOnReset.reset_to_checkpoint",
                "if context is None or old.awaited:",
                "if True:",
            ),
        ),
    ),
    Mutant(
        "action-goes-on-with-old-splits",
        "A new action goes on with the enumeration of the one before.",
        "feared",
        ("H68",),
        (
            Edit(
                "protocol.enumerations:CurrentEnumeration.goes_on_in",
                "if look.kept & self._outputs:",
                "if self._runs:",
            ),
        ),
    ),
    Mutant(
        "kept-output-is-enumerated-anew",
        "What is computed again beside kept output is handed other splits.",
        "feared",
        ("H56",),
        (
            Edit(
                "protocol.enumerations:CurrentEnumeration.goes_on_in",
                "if look.kept & self._outputs:\n        return True",
                "pass",
            ),
        ),
    ),
)
