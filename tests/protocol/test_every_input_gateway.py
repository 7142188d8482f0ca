# SPDX-License-Identifier: Apache-2.0

"""Every input in every state of a gateway: its tables, cell by cell (H20-H27, H40-H44)."""

from __future__ import annotations

from collections.abc import Hashable
from random import Random
from typing import Any, ClassVar

from hypothesis import given as hypothesis_given
from hypothesis import settings

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.gateway import types as g
from protocol.gateway.inbound import _Peer as Peer
from protocol.gateway.machine import LEGAL, GatewayMachine, GatewayState
from protocol.gateway.outbound import GatewayPhase
from protocol.ids import ExecutionAttempt
from protocol.machine import Reaction
from protocol.wire import messages as m
from tests.protocol.every_input import (
    HUGE,
    WANDERINGS,
    Cell,
    Given,
    Walk,
    differences,
    explore,
    freeze,
    members,
    wander,
)

ATTEMPT = ExecutionAttempt("words", 2, 1, 7)
ITEMS = members(m.UpItem)
PAYLOAD = (m.EventMessage, m.RequestMessage, m.RestoredEventMessage, m.RestoredRequestMessage)
OF_CHECKPOINT = (m.ClosedForCheckpoint, m.CheckpointAcknowledged, m.CheckpointDeclined)
ABOUT_CHECKPOINT = (g.CutReached, g.BarrierRequested, g.CheckpointOver, *OF_CHECKPOINT)
HEARD = "_heard_at"  # every message of a connection is a sign of life, even a refused one (H69)
STREAM = ("_untaken", "received_seq", "untaken_bytes", "_confirm_sent", HEARD)  # change even if an item is dropped
WHAT_CAME = ("_inbound", "_confirm_sent", HEARD)  # finished items that waited for readiness may be dropped

GatewayGiven = Given[g.GatewayInput, g.GatewayEffect]


class GatewayWalk(Walk[g.GatewayInput, g.GatewayEffect]):
    kinds = tuple(kind for kind in members(g.GatewayInput) if kind is not g.MessageReceived) + members(m.UpMessage)
    errors = (LocalProtocolError, RemoteProtocolError)
    weights: ClassVar = {
        g.AttemptIsOver: 0.05,
        g.TimePassed: 0.3,
        g.ConnectionAttached: 2.0,
        g.ConnectionLost: 0.5,
        m.Finished: 0.5,
        g.EventSubmitted: 2.0,
        m.EventMessage: 2.0,
        m.RequestMessage: 2.0,
    }

    machine: GatewayMachine

    def build(self) -> GatewayMachine:
        self.limits = g.GatewayLimits(10.0, 7.0, 4, 60, self.dice.choice((3, 5)), 60)
        self.event_id = self.request_id = 0
        self.open_events: set[int] = set()
        self.tolerated: set[int] = set()  # of these, the loss-tolerant ones whose wait has not ended
        self.open_requests: set[int] = set()
        return GatewayMachine(ATTEMPT, self.limits)

    def fork(self) -> GatewayWalk:
        fork = super().fork()
        assert isinstance(fork, GatewayWalk)
        fork.open_events, fork.open_requests = set(self.open_events), set(self.open_requests)
        fork.tolerated = set(self.tolerated)
        return fork

    # --- what fits ---

    def phases(self) -> dict[int, GatewayPhase]:
        return {n: checkpoint.phase for n, checkpoint in self.machine._outbound._checkpoints.items()}

    def held_events(self) -> list[tuple[int, int, g.EventSubmitted]]:
        return [held for held in self.machine._outbound._held if isinstance(held[2], g.EventSubmitted)]  # type: ignore[misc]

    def checkpoint(self, fits: bool, *phases: GatewayPhase) -> int:
        known = self.phases()
        latest = self.machine._outbound._latest or 0
        fitting = [n for n, phase in known.items() if phase in phases]
        others = [n for n in known if n not in fitting]
        return self.one_of(fitting, [*others, latest + 1, -1, 0, HUGE, max(latest - 1, 0)], fits)

    def payload(self, fits: bool) -> bytes:
        return bytes(self.one_of((0, 1, 9, 30), (61, 500), fits or self.dice.random() < 0.5))

    def draw(self, kind: type, fits: bool) -> g.GatewayInput:
        if kind in members(m.UpMessage):
            return g.MessageReceived(self.message(kind, fits))
        outbound, inbound, dice = self.machine._outbound, self.machine._inbound, self.dice
        stream = outbound.stream
        if kind is g.ConnectionAttached:
            low, high = stream.confirmed_seq, stream.last_seq
            return g.ConnectionAttached(self.one_of(range(low, high + 1), (low - 1, high + 1, -HUGE, HUGE), fits))
        if kind is g.EventSubmitted:
            self.event_id += 1
            return g.EventSubmitted(self.event_id, self.payload(fits), dice.random() < 0.2)
        if kind is g.AnswerSubmitted:
            unanswered = sorted(inbound._unanswered)
            answered = sorted(set(range(1, self.request_id)) - set(unanswered))
            request_id = self.one_of(unanswered, (-1, HUGE, *answered[-3:]), fits)
            return g.AnswerSubmitted(request_id, dice.choice(("", "no")), self.payload(fits))
        if kind is g.ItemTaken:
            delivered = inbound._kept[0].seq - 1 if inbound._kept else inbound.stream.received_seq
            return g.ItemTaken(self.one_of(range(delivered + 1), (delivered + 1, HUGE, -1), fits))
        if kind is g.CloseRequested:
            latest = outbound._latest or 0
            return g.CloseRequested(self.one_of((latest + 1, latest + 3), (latest, -1, latest - 1), fits))
        if kind is g.CutReached:
            return g.CutReached(self.checkpoint(fits, GatewayPhase.REQUESTED))
        if kind is g.BarrierRequested:
            return g.BarrierRequested(self.checkpoint(fits, GatewayPhase.DRAINED), dice.random() < 0.3)
        if kind is g.CheckpointOver:
            return g.CheckpointOver(self.checkpoint(fits, *GatewayPhase), dice.choice(list(g.CheckpointOutcome)))
        if kind is g.TimePassed:
            deadline = self.machine.next_deadline()
            if fits and deadline is not None:
                self.now = max(self.now, deadline)
            return g.TimePassed()
        simple: dict[type, g.GatewayInput] = {
            g.ConnectionLost: g.ConnectionLost(),
            g.ReadyAnnounced: g.ReadyAnnounced(),
            g.AttemptIsOver: g.AttemptIsOver("killed"),
        }
        return simple[kind]

    def message(self, kind: type, fits: bool) -> m.UpMessage:
        dice, inbound, sent = self.dice, self.machine._inbound, self.machine._outbound.stream
        came = inbound.stream.received_seq
        task = 7 if self.perhaps(fits) else dice.choice((8, -1))
        seq = self.one_of((came + 1,), (came + 1, came + 1, came, 0, -1, came + 2, HUGE), self.perhaps(fits))
        if kind is m.Confirm:
            low, high = sent.confirmed_seq, sent.last_seq
            return m.Confirm(task, self.one_of(range(low, high + 1), (high + 1, HUGE, low - 1, -1), fits))
        if kind is m.Register:
            return m.Register(task, "words", 2, 1, 0, m.RestoreMode.BATCH, 3, "h", "3.11")
        if kind is m.Resume:
            return m.Resume(task, "words", dice.choice((0, came)))
        if kind is m.EventMessage:
            return m.EventMessage(task, seq, self.payload(fits))
        if kind is m.RestoredEventMessage:
            return m.RestoredEventMessage(task, seq, dice.choice((0, 5, HUGE)), self.payload(fits))
        if kind is m.RestoredRequestMessage:
            return m.RestoredRequestMessage(task, seq, dice.choice((0, 5, HUGE)), self.payload(fits))
        if kind is m.RequestMessage:
            self.request_id += 1
            request_id = self.one_of((self.request_id,), (*sorted(inbound._unanswered), HUGE), fits)
            return m.RequestMessage(task, seq, request_id, self.payload(fits))
        if kind is m.ClosedForCheckpoint:
            return m.ClosedForCheckpoint(task, seq, self.checkpoint(fits, GatewayPhase.REQUESTED))
        if kind is m.CheckpointAcknowledged:
            checkpoint_id = self.checkpoint(fits, GatewayPhase.BARRIER)
            return m.CheckpointAcknowledged(task, seq, checkpoint_id, b"state", (m.HeldEvent(2, b"held"),), 3)
        if kind is m.CheckpointDeclined:
            return m.CheckpointDeclined(task, seq, self.checkpoint(fits, GatewayPhase.BARRIER), "no")
        if kind is m.Finished:
            return m.Finished(task, seq, dice.choice(("", "boom")), b"last", 3)
        assert kind is m.Opened, f"a message without a generator: {kind}"
        return m.Opened(task, seq, dice.random() < 0.5)

    def follow(self) -> g.GatewayInput | None:
        """Draw the next step of an attempt that usually has a checkpoint in progress."""
        if self.machine.state is GatewayState.OVER:
            return None
        if self.machine.state is GatewayState.DETACHED:
            return self.draw(g.ConnectionAttached, True)
        steps: list[type] = [m.Confirm, g.ItemTaken, g.EventSubmitted, g.EventSubmitted]
        steps += [] if self.machine._inbound._ready else [g.ReadyAnnounced]
        steps += [m.Opened] if self.machine._inbound._peer is Peer.RESTORING else []
        phases = set(self.phases().values())
        steps += [] if len(self.phases()) > 2 else [g.CloseRequested]
        steps += [g.CutReached, m.ClosedForCheckpoint] if GatewayPhase.REQUESTED in phases else []
        steps += [g.BarrierRequested] if GatewayPhase.DRAINED in phases else []
        steps += [m.CheckpointAcknowledged] if GatewayPhase.BARRIER in phases else []
        steps += [g.CheckpointOver] if GatewayPhase.ACKNOWLEDGED in phases else []
        return self.draw(self.dice.choice(steps), True)

    # --- the tables ---

    def state(self) -> Hashable:
        outbound, inbound = self.machine._outbound, self.machine._inbound
        phases = frozenset(self.phases().values())
        waits = (
            bool(outbound._held),
            bool(outbound._awaited),
            bool(outbound._tolerated),
            bool(inbound._kept),
            bool(inbound._unanswered),
        )
        return self.machine.state, inbound._peer, inbound._ready, phases, waits

    def is_news(self, message: m.UpMessage) -> bool:
        """Whether it is the next item on this connection, and there is room for it."""
        if not isinstance(message, m.UpItem) or message.task_attempt_id != 7:
            return False
        inbound = self.machine._inbound
        if self.machine.state is not GatewayState.ATTACHED or message.seq != inbound.stream.received_seq + 1:
            return False
        if not isinstance(message, PAYLOAD):
            said = {(type(item), getattr(item, "checkpoint_id", None)) for item in inbound._kept}
            return (type(message), getattr(message, "checkpoint_id", None)) not in said
        count, size = inbound.stream.untaken_events, inbound.stream.untaken_bytes + len(message.payload)
        if count and (count >= self.limits.upward_events_max or size > self.limits.upward_bytes_max):
            return False
        if isinstance(message, m.RequestMessage):
            open_requests = len(inbound._unanswered) + self.machine._outbound.answers_pending
            return message.request_id not in inbound._unanswered and open_requests < self.limits.upward_events_max
        return True

    def cells(self, input: g.GatewayInput) -> list[Cell]:
        state, inbound = self.machine.state, self.machine._inbound
        self.waited = bool(inbound._kept)
        cells: list[Cell] = [("state", state, type(input))]
        about: Any = input
        if isinstance(input, g.MessageReceived):
            about = input.message
            cells.append(("message", state, type(about)))
            if not self.is_news(about):
                return cells
            cells.append(("item", inbound._peer, inbound._ready, type(about)))
            if inbound._kept or inbound._peer is Peer.FINISHED:
                return cells
        if isinstance(about, ABOUT_CHECKPOINT) and state is not GatewayState.OVER:
            cells.append(("checkpoint", self.phases().get(about.checkpoint_id), type(about)))
        return cells

    def judge(self, cells: list[Cell], given: GatewayGiven) -> None:
        for cell in cells:
            match cell:
                case ("state", state, kind):
                    assert state is not GatewayState.OVER or self.machine.state is GatewayState.OVER  # permanently
                    self.judge_state(LEGAL[kind][list(GatewayState).index(state)], given)
                case ("message", GatewayState.ATTACHED, kind) if kind in (m.Register, m.Resume):
                    own = isinstance(given.input, g.MessageReceived) and given.input.message.task_attempt_id == 7
                    assert isinstance(given.error, RemoteProtocolError) == own
                case ("item", peer, ready, kind):
                    self.judge_item(peer, ready, kind, given)
                case ("checkpoint", phase, kind):
                    self.judge_checkpoint(phase, kind, given)
        self.judge_events(given)
        self.judge_requests(cells, given)
        self.judge_ids(given)

    def judge_state(self, reaction: Reaction, given: GatewayGiven) -> None:
        match reaction:
            case Reaction.IGNORE:
                assert given.nothing(*self.started())
            case Reaction.REFUSE:  # H3
                assert given.kinds == [g.RefuseMessage]
                assert not given.changed(*self.started())
            case Reaction.FAIL:  # H21, H26
                assert given.kinds == [g.FailEvent]
                assert not given.changed(*self.started())
            case Reaction.ACT if isinstance(given.input, g.MessageReceived) and g.RefuseMessage in given.kinds:
                assert set(given.kinds) <= {g.RefuseMessage, g.SendToAttempt}
                assert not given.changed(*(WHAT_CAME if self.waited else STREAM))

    def started(self) -> tuple[str, ...]:
        """The attributes that the first input of any kind changes, because it starts the clock."""
        return () if any(given.error is None for given in self.history) else ("stopped_at",)

    def judge_item(self, peer: Peer, ready: bool, kind: type, given: GatewayGiven) -> None:
        """Check the table at the top of ``protocol.gateway.inbound``, for an item that arrives for the first time."""
        assert given.error is None
        refused = g.RefuseMessage in given.kinds
        waits = g.DeliverEvent not in given.kinds and g.DeliverRequest not in given.kinds
        if peer is Peer.FINISHED:  # H47
            assert refused or kind is m.ClosedForCheckpoint
        elif kind is m.Opened:
            assert (g.ReportOpened in given.kinds) == (peer is Peer.RESTORING)
            assert refused == (peer is Peer.OPEN)
        elif kind in PAYLOAD:  # H10
            assert not refused
            assert waits == (not ready)
        elif kind is m.Finished:
            input = given.input
            badly = isinstance(input, g.MessageReceived) and isinstance(input.message, m.Finished)
            badly = badly and bool(input.message.failure)  # type: ignore[union-attr]
            assert not refused
            assert (g.ReportFinished in given.kinds) or not (ready or badly)

    def judge_checkpoint(self, phase: GatewayPhase | None, kind: type, given: GatewayGiven) -> None:
        """Check the phases of a checkpoint at ``protocol.gateway.outbound``. An unknown id changes nothing (H44)."""
        refused = given.kinds[:1] == [g.RefuseMessage]
        if phase is None:
            assert refused if kind in OF_CHECKPOINT else given.nothing(*self.started())
        elif kind is g.CutReached:
            assert phase is GatewayPhase.REQUESTED or isinstance(given.error, LocalProtocolError)
        elif kind is g.BarrierRequested:
            assert (given.error is None) == (phase is GatewayPhase.DRAINED)
        elif kind is m.CheckpointAcknowledged:
            assert refused == (phase is not GatewayPhase.BARRIER)
            assert (g.ReportAcknowledged in given.kinds) == (phase is GatewayPhase.BARRIER)
        elif kind is m.ClosedForCheckpoint:
            assert g.ReportClosed in given.kinds
        elif kind is m.CheckpointDeclined:
            assert g.ReportDeclined in given.kinds
        else:
            assert given.error is None
            assert given.changed()

    def judge_events(self, given: GatewayGiven) -> None:
        """Check that every accepted event is confirmed or failed, once (H21, H26), or expires first if it may (H72)."""
        if isinstance(given.input, g.EventSubmitted) and given.error is None:
            self.open_events.add(given.input.event_id)
            if given.input.loss_tolerant:
                self.tolerated.add(given.input.event_id)
        for effect in given.effects:
            if isinstance(effect, g.ConfirmEvent | g.FailEvent):
                self.open_events.remove(effect.event_id)
                self.tolerated.discard(effect.event_id)
            elif isinstance(effect, g.ExpireEvent):  # H28: it has no other effect
                self.tolerated.remove(effect.event_id)
                assert isinstance(given.input, g.TimePassed)
                assert set(given.kinds) == {g.ExpireEvent}
                assert self.machine.state is GatewayState.ATTACHED
        if self.machine.state is GatewayState.OVER:
            assert not self.open_events
        elif self.machine.state is GatewayState.ATTACHED:  # H72: there is a deadline, and it has not passed
            sent = self.tolerated - {event.event_id for _, _, event in self.held_events()}
            assert not sent or self.machine.next_deadline() is not None

    def judge_requests(self, cells: list[Cell], given: GatewayGiven) -> None:
        """Check that a request is answered at most once, and only after it has arrived (H33)."""
        input = given.input
        came = any(cell[0] == "item" and cell[1] is not Peer.FINISHED for cell in cells)
        if came and isinstance(input, g.MessageReceived) and isinstance(input.message, m.RequestMessage):
            self.open_requests.add(input.message.request_id)
        if isinstance(input, g.AnswerSubmitted) and self.machine.state is not GatewayState.OVER:
            assert (given.error is None) == (input.request_id in self.open_requests)
            self.open_requests.discard(input.request_id)

    def judge_ids(self, given: GatewayGiven) -> None:
        """Check that no effect concerns a finished checkpoint (H44), and that at most one ``Confirm`` leaves."""
        known = {*self.phases(), getattr(given.input, "checkpoint_id", None)}
        confirms = 0
        for effect in given.effects:
            if isinstance(effect, g.SendToAttempt):
                if isinstance(effect.message, m.StartProcessing):  # H66
                    assert self.machine._inbound.ready
                    assert self.machine._inbound.awaits_start
                confirms += isinstance(effect.message, m.Confirm)
                assert effect.message.task_attempt_id == 7
            else:
                assert getattr(effect, "checkpoint_id", None) in {None, *known}
        assert confirms <= 1

    # --- batches ---

    def probe(self, rounds: int = 1) -> None:
        super().probe(rounds)
        self.probe_batch()

    def probe_batch(self) -> None:
        """A batch equals its single messages, except the confirmations, up to the one that breaks the protocol."""
        one_by_one, whole = self.fork(), self.fork()
        messages: list[m.UpMessage] = []
        apart: list[g.GatewayEffect] = []
        broken = False
        while len(messages) < 4 and not broken:
            messages.append(one_by_one.message(self.dice.choice(members(m.UpMessage)), self.dice.random() < 0.8))
            given = one_by_one.give(g.MessageReceived(messages[-1]))
            apart += given.effects
            broken = given.error is not None
        together = whole.machine.handle_batch([*messages, *([m.Opened(7, HUGE)] if broken else [])], self.now)
        whole.machine.check_invariants()
        self.seen.effects.update(type(effect) for effect in together)
        assert broken == (g.DropConnection in map(type, together))
        assert not any(isinstance(effect, g.DropConnection) for effect in together[:-1])
        assert silent(together) == silent(apart)
        but = frozenset({"_confirm_sent", HEARD, *self.started()})
        assert not differences(freeze(whole.machine), freeze(one_by_one.machine), but)


def silent(effects: list[g.GatewayEffect]) -> list[g.GatewayEffect]:
    """Return all effects but the confirmations, and the effect that ends a batch."""
    return [
        effect
        for effect in effects
        if not isinstance(effect, g.DropConnection)
        and not (isinstance(effect, g.SendToAttempt) and isinstance(effect.message, m.Confirm))
    ]


ALL_CELLS: list[Cell] = [
    *(("state", state, kind) for state in GatewayState for kind in LEGAL),
    *(("message", state, kind) for state in GatewayState for kind in members(m.UpMessage)),
    *(("item", peer, ready, kind) for peer in Peer for ready in (False, True) for kind in ITEMS),
    *(("checkpoint", phase, kind) for phase in (None, *GatewayPhase) for kind in ABOUT_CHECKPOINT),
]


def test_every_input_of_a_gateway_has_a_row_and_a_generator() -> None:
    assert set(LEGAL) == set(members(g.GatewayInput))
    walk = GatewayWalk(Random(1))
    for kind in GatewayWalk.kinds:
        for fits in (True, False):
            input = walk.draw(kind, fits)
            assert type(input.message if isinstance(input, g.MessageReceived) else input) is kind


def test_no_cell_of_the_gateways_tables_is_left_out() -> None:
    explore(GatewayWalk, ALL_CELLS, members(g.GatewayEffect))


@settings(max_examples=100, print_blob=True)
@hypothesis_given(WANDERINGS)
def test_a_gateway_takes_every_input_or_refuses_it_unchanged(numbers: list[int]) -> None:
    # H3, H21, H26, H44
    wander(GatewayWalk, numbers)
