# SPDX-License-Identifier: Apache-2.0

"""The driver's end of an attempt: the real ``GatewayMachine``, with its actor's surroundings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from protocol import barrier_tracker as t
from protocol.attempts import AttemptCondemned, ConnectionExpired, OperatorEnded, OperatorOpened
from protocol.errors import RemoteProtocolError
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine, GatewayState
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection
from protocol.wire.messages import AttemptEnded, BarrierMessage, Registered, Resumed
from tests.exploration import vocabulary as v
from tests.exploration.scopes import Scope


class GatewayEnd:
    """See the module. It is empty until its attempt is accepted.

    For the checks, apart from the machine: ``submitted`` and ``unsettled`` events, ``confirmed_events``, the
    loss-tolerant ones whose wait is not over (``tolerated``), and for each checkpoint that was cut how many had been
    submitted then (``cuts``), and how many requests had been answered (``answered_at``).
    """

    def __init__(self, slot: int, scope: Scope) -> None:
        self.slot = v.Slot(slot)
        self.tolerant = scope.tolerant  # the scope's events down are loss-tolerant
        self.apart = scope.apart
        self.unheld = scope.unheld
        self.table = scope.table
        self.limits = g.GatewayLimits(upward_events_max=scope.window)
        self.attempt: ExecutionAttempt | None = None
        self.registered: Registered | None = None
        self.machine: GatewayMachine | None = None
        self.over = False
        self.submitted = 0
        self.confirmed_events = 0
        self.unsettled: set[int] = set()
        self.tolerated: set[int] = set()
        self.answered = 0
        self.cuts: dict[int, int] = {}
        self.answered_at: dict[int, int] = {}

    # --- inputs ---

    def step(self, message: Any) -> list[v.Output]:
        out: list[v.Output] = []
        if isinstance(message, t.RestoreAttempt):
            self._open(message, out)
            return out
        if self.over:
            if isinstance(message, v.Attached):
                self._attach(None, True, out)
            return out
        assert self.machine is not None
        match message:
            case v.CameUp(item):
                self._carry_out(self.machine.handle_batch([item], 0.0), out)
            case v.Attached(received_seq, over):
                self._attach(received_seq, over, out)
            case v.LossNoticed():
                self._carry_out(self.machine.handle(ConnectionLost(), 0.0), out)
            case g.AttemptIsOver(reason):
                self.over = True
                self._carry_out(self.machine.handle(message, 0.0), out)
                self._hang_up(reason, out)
                v.demand(not self.unsettled, "H26", f"events {self.unsettled} of {self.attempt} are never settled")
                self.machine, self.registered, self.cuts, self.answered_at = None, None, {}, {}
                self.submitted = self.confirmed_events = self.answered = 0
                self.tolerated = set()
            case v.OutOfTime():
                deadline = self.machine.next_deadline()
                assert deadline is not None
                self._carry_out(self.machine.handle(TimePassed(), deadline), out)
            case _:
                self._note(message)
                self._carry_out(self.machine.handle(message, 0.0), out)
        if self.machine is not None:
            self.machine.check_invariants()
            waits = self.tolerated and not self.machine.statistics().held_events
            if waits and self.machine.state is GatewayState.ATTACHED:
                v.demand(self.machine.next_deadline() is not None, "H72", f"{self.attempt} waits forever for an event")
        return out

    def _open(self, effect: t.RestoreAttempt, out: list[v.Output]) -> None:
        self.attempt = attempt = effect.attempt
        limits = self.limits
        self.machine = GatewayMachine(
            attempt, limits, barriers_apart=self.apart, hold_events=not self.unheld, table=self.table
        )
        self.registered = Registered(
            attempt.task_attempt_id,
            attempt.attempt,
            effect.checkpoint_id,
            effect.states,
            effect.held,
            limits.reconnect_timeout_s,
            limits.upward_events_max,
            limits.upward_bytes_max,
            effect.events_sent,
            hold_events=not self.unheld,
            input_begins_again=effect.input_begins_again,
            parts=self.table.parts,
        )
        self._attach(None, False, out)

    def _note(self, message: Any) -> None:
        if isinstance(message, g.EventSubmitted):
            v.demand(message.event_id == self.submitted, "H22", f"event {message.event_id} after {self.submitted}")
            self.submitted += 1
            self.unsettled.add(message.event_id)
            if message.loss_tolerant:
                self.tolerated.add(message.event_id)
        elif isinstance(message, g.AnswerSubmitted) and message.request_id < v.PERMIT:
            self.answered += 1
        elif isinstance(message, g.CutReached):
            self.cuts[message.checkpoint_id] = self.submitted
            self.answered_at[message.checkpoint_id] = self.answered

    def _before(self, checkpoint_id: int) -> int:
        """How many events and answers come before the barrier."""
        return self.cuts.get(checkpoint_id, 0) + self.answered_at.get(checkpoint_id, 0)

    def _attach(self, received_seq: int | None, over: bool, out: list[v.Output]) -> None:
        assert self.attempt is not None
        task = self.attempt.task_attempt_id
        if over or self.machine is None:
            out.append((v.To.RESUMED, None))
            out.append((v.To.DOWN, v.CameDown(AttemptEnded(task, "the attempt is over"))))
            out.append((v.To.HANG_UP, None))
            return
        try:
            effects = self.machine.handle(ConnectionAttached(received_seq or 0), 0.0)
        except RemoteProtocolError as error:
            v.demand(False, "H24", f"the gateway of {self.attempt} refuses its only new connection: {error}")
            return
        out.append((v.To.RESUMED, None))
        if received_seq is None:
            assert self.registered is not None
            out.append((v.To.DOWN, v.CameDown(self.registered)))
        else:
            out.append((v.To.DOWN, v.CameDown(Resumed(task, self.machine.resume_seq))))
        self._carry_out(effects, out)

    def _hang_up(self, reason: str, out: list[v.Output]) -> None:
        assert self.attempt is not None
        out.append((v.To.DOWN, v.CameDown(AttemptEnded(self.attempt.task_attempt_id, reason))))
        out.append((v.To.HANG_UP, None))

    def _settle(self, event_id: int, confirmed: bool) -> None:
        v.demand(event_id in self.unsettled, "H21", f"event {event_id} of {self.attempt} is settled twice, or unasked")
        self.unsettled.discard(event_id)
        self.tolerated.discard(event_id)
        if confirmed:
            v.demand(
                event_id == self.confirmed_events, "H23", f"event {event_id} of {self.attempt} is confirmed out of turn"
            )
            self.confirmed_events += 1

    def _expire(self, event_id: int) -> None:
        """End the wait for an event, which must be loss-tolerant, and only once (H72)."""
        v.demand(event_id in self.tolerated, "H72", f"the wait for event {event_id} of {self.attempt} ends, unasked")
        self.tolerated.discard(event_id)

    def _check_drained(self, checkpoint_id: int) -> None:
        cut = self.cuts.get(checkpoint_id)
        in_place = self.tolerant or (self.unheld and not self.apart)  # its place in the stream is enough
        holds = cut is not None and (in_place or self.confirmed_events >= cut)
        v.demand(
            holds,
            "H42",
            f"barrier {checkpoint_id} of {self.attempt} leaves: {self.confirmed_events} of {cut} confirmed",
        )

    # --- effects of its machine ---

    def _carry_out(self, effects: Sequence[g.GatewayEffect], out: list[v.Output]) -> None:
        assert self.attempt is not None
        task = self.attempt.task_attempt_id
        for effect in effects:
            match effect:
                case g.SendToAttempt(BarrierMessage(checkpoint_id=checkpoint_id) as message):
                    self._check_drained(checkpoint_id)
                    out.append((v.To.DOWN, v.CameDown(message, self._before(checkpoint_id))))
                case g.SendToAttempt(message):
                    out.append((v.To.DOWN, v.CameDown(message)))
                case g.InjectBarrier(checkpoint_id, events_before):
                    self._check_drained(checkpoint_id)
                    out.append((v.To.APART, v.CameApart(checkpoint_id, events_before, self._before(checkpoint_id))))
                case g.ConfirmEvent(event_id):
                    self._settle(event_id, True)
                case g.FailEvent(event_id):
                    self._settle(event_id, False)
                case g.ExpireEvent(event_id):
                    self._expire(event_id)
                case g.DeliverEvent(seq, payload, sender, after, part):
                    came = v.EventCame(self.slot, seq, payload, sender, None, False, after, part)
                    out.append((v.To.COORDINATOR, came))
                case g.DeliverRequest(seq, request_id, payload, sender, after, part):
                    came = v.EventCame(self.slot, seq, payload, sender, request_id, True, after, part)
                    out.append((v.To.COORDINATOR, came))
                case g.DeliverCancellation(request_id):
                    out.append((v.To.COORDINATOR, v.CancellationCame(self.slot, request_id)))
                case g.FailAttempt(reason):
                    v.demand(not self.tolerant, "H28", f"{self.attempt} fails for a loss-tolerant event: {reason}")
                    out.append((v.To.BRIDGE, AttemptCondemned(v.OPERATOR, task, reason)))
                    self._hang_up(reason, out)
                case g.ExpireConnection():
                    out.append((v.To.BRIDGE, ConnectionExpired(v.OPERATOR, task)))
                case DropConnection(why):
                    v.demand(False, "H30", f"the gateway of {self.attempt} drops its connection: {why}")
                case _:
                    self._report(self.attempt, effect, out)

    def _report(self, attempt: ExecutionAttempt, effect: g.GatewayEffect, out: list[v.Output]) -> None:
        match effect:
            case g.ReportSuspected() | g.ReportResponsive():
                assert self.machine is not None
                well = not self.machine._inbound.finished or isinstance(effect, g.ReportResponsive)
                v.demand(well, "H87", f"{attempt} is suspected, and its operator has ended")
                out.append((v.To.COORDINATOR, v.Suspected(self.slot, isinstance(effect, g.ReportSuspected))))
            case g.ReportOpened():
                out.append((v.To.BRIDGE, OperatorOpened(v.OPERATOR, attempt.task_attempt_id)))
            case g.ReportFinished(failure, state, events_sent, files):
                if not failure:
                    out.append((v.To.TRACKER, t.SubtaskFinalState(attempt, state, events_sent, files)))
                out.append((v.To.BRIDGE, OperatorEnded(v.OPERATOR, attempt.task_attempt_id, failure)))
            case g.ReportClosed(checkpoint_id):
                out.append((v.To.TRACKER, t.SubtaskClosed(attempt, checkpoint_id)))
            case g.ReportAcknowledged(checkpoint_id, state, held, events_sent, follows):
                acknowledged = t.SubtaskAcknowledged(attempt, checkpoint_id, state, held, events_sent, follows)
                out.append((v.To.TRACKER, acknowledged))
            case g.ReportStateStored(checkpoint_id, handle):
                out.append((v.To.TRACKER, t.SubtaskStateStored(attempt, checkpoint_id, handle)))
            case g.ReportStateFailed(checkpoint_id, reason):
                out.append((v.To.TRACKER, t.SubtaskStateFailed(attempt, checkpoint_id, reason)))
            case g.ReportDeclined(checkpoint_id, reason):
                out.append((v.To.TRACKER, t.SubtaskDeclined(attempt, checkpoint_id, reason)))

    # --- view for the world ---

    def facts(self) -> GatewayFacts:
        if self.machine is None:
            return GatewayFacts(self.over, self.over, True, (), 0, False, True, 0)
        figures = self.machine.statistics()
        pending = figures.held_events + figures.unconfirmed_events + figures.untaken_events
        return GatewayFacts(
            True,
            self.over,
            figures.held_events == 0,
            figures.closed_for,
            len(self.unsettled),
            self.machine.next_deadline() is not None,
            not pending and not figures.closed_for,
            self.machine.resume_seq,
        )


class GatewayFacts(NamedTuple):
    """The parts of one gateway's state that steps, reductions and the end depend on."""

    exists: bool
    over: bool
    holds_nothing: bool
    closed_for: tuple[int, ...]
    unsettled: int
    may_expire: bool
    idle: bool
    taken_seq: int
