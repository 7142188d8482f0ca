# SPDX-License-Identifier: Apache-2.0

"""Every input in every state of a subtask: its tables, cell by cell (H20-H24, H30-H33, H40-H44)."""

from __future__ import annotations

from collections.abc import Hashable
from random import Random
from typing import Any, ClassVar

from hypothesis import given as hypothesis_given
from hypothesis import settings

from protocol.errors import AttemptOver, GatewayFull, LocalProtocolError, RemoteProtocolError
from protocol.machine import Reaction
from protocol.subtask import types as s
from protocol.subtask.machine import LEGAL, SubtaskMachine, SubtaskStatus
from protocol.subtask.outbound import SubtaskPhase
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

ITEMS = members(m.DownItem)
ENDS = (m.CheckpointCompleted, m.CheckpointAborted, m.SavepointTaken)
LAST = (m.AttemptEnded, m.Refused)
ABOUT_CHECKPOINT = (m.CloseForCheckpoint, m.BarrierMessage, *ENDS, s.BarrierArrived, s.SnapshotTaken, s.SnapshotRefused)
STREAM = ("_untaken", "received_seq", "untaken_bytes", "_confirm_sent")  # these change even if an item is dropped

SubtaskGiven = Given[s.SubtaskInput, s.SubtaskEffect]


class SubtaskWalk(Walk[s.SubtaskInput, s.SubtaskEffect]):
    kinds = tuple(kind for kind in members(s.SubtaskInput) if kind is not s.MessageReceived) + members(m.DownMessage)
    errors = (LocalProtocolError, RemoteProtocolError, AttemptOver)
    remembered: ClassVar = {GatewayFull: frozenset({"_refused"})}
    weights: ClassVar = {
        s.OperatorFinished: 0.8,
        s.TimePassed: 0.2,
        s.ConnectionLost: 0.5,
        s.EventSubmitted: 2.0,
        s.RequestSubmitted: 2.0,
        m.AttemptEnded: 0.2,
        m.Refused: 0.1,
    }
    machine: SubtaskMachine

    def build(self) -> SubtaskMachine:
        dice = self.dice
        self.limits = s.SubtaskLimits(dice.choice((3, 5)), 60, 7.0, snapshot_bytes_max=200, held_events_max=4)
        self.request_id = 0
        self.asked: set[int] = set()
        self.room_owed = False
        self.begun = False
        held = tuple(m.HeldEvent(5, bytes(n), n % 2 == 1) for n in range(dice.choice((0, 0, 2, 6))))
        return SubtaskMachine(7, 2, self.limits, held, dice.choice((0, 11)))

    def fork(self) -> SubtaskWalk:
        fork = super().fork()
        assert isinstance(fork, SubtaskWalk)
        fork.asked = set(self.asked)
        return fork

    # --- what fits ---

    def checkpoint(self, fits: bool, *phases: SubtaskPhase) -> int:
        known = self.machine._outbound._checkpoints
        latest = self.machine._outbound._latest or 0
        fitting = [n for n, phase in known.items() if phase in phases]
        others = [n for n in known if n not in fitting]
        return self.one_of(fitting, [*others, latest + 1, -1, 0, HUGE, max(latest - 1, 0)], fits)

    def payload(self, fits: bool) -> bytes:
        return bytes(self.one_of((0, 1, 9, 30), (61, 500), fits or self.dice.random() < 0.5))

    def draw(self, kind: type, fits: bool) -> s.SubtaskInput:
        dice, sent = self.dice, self.machine._outbound.stream
        if kind in members(m.DownMessage):
            return s.MessageReceived(self.message(kind, fits))
        if kind is s.ConnectionAttached:
            low, high = sent.confirmed_seq, sent.last_seq
            return s.ConnectionAttached(self.one_of(range(low, high + 1), (low - 1, high + 1, -HUGE, HUGE), fits))
        if kind is s.EventSubmitted:
            return s.EventSubmitted(self.payload(fits), dice.random() < 0.2)
        if kind is s.RequestSubmitted:
            self.request_id += 1
            used = sorted(self.machine._outbound._open_requests)
            return s.RequestSubmitted(self.one_of((self.request_id,), used, fits), self.payload(fits))
        if kind is s.BarrierArrived:
            came = self.machine._inbound.stream.received_seq
            events_before = self.one_of((came, came, came + 1, came + 2, 0), (HUGE, -1), fits)
            return s.BarrierArrived(self.checkpoint(fits, SubtaskPhase.CLOSED), events_before)
        if kind is s.SnapshotTaken:
            return s.SnapshotTaken(self.checkpoint(fits, SubtaskPhase.BARRIER), bytes(dice.choice((0, 20, 500))))
        if kind is s.SnapshotRefused:
            return s.SnapshotRefused(self.checkpoint(fits, SubtaskPhase.BARRIER), "no")
        if kind is s.OperatorFinished:
            failure = "boom" if dice.random() < (0.5 if self.machine.may_finish else 0.1) else ""
            return s.OperatorFinished(failure, bytes(dice.choice((0, 20)) if fits else 500))
        if kind is s.TimePassed:
            deadline = self.machine.next_deadline()
            if fits and deadline is not None:
                self.now = max(self.now, deadline)
            return s.TimePassed()
        if kind is s.OperatorOpened:
            return s.OperatorOpened(dice.random() < 0.5)
        assert kind is s.ConnectionLost, f"an input without a generator: {kind}"
        return s.ConnectionLost()

    def message(self, kind: type, fits: bool) -> m.DownMessage:
        dice, outbound = self.dice, self.machine._outbound
        came, sent = self.machine._inbound.stream.received_seq, outbound.stream
        task = 7 if self.perhaps(fits) else dice.choice((8, -1))
        seq = self.one_of((came + 1,), (came + 1, came + 1, came, 0, -1, came + 2, HUGE), self.perhaps(fits))
        if kind is m.Confirm:
            low, high = sent.confirmed_seq, sent.last_seq
            return m.Confirm(task, self.one_of(range(low, high + 1), (high + 1, HUGE, low - 1, -1), fits))
        if kind is m.Registered:
            return m.Registered(task, 1, -1, (), (), 7.0, 3, 60, 0)
        if kind is m.Resumed:
            return m.Resumed(task, dice.choice((0, came)))
        if kind is m.Refused:
            return m.Refused(task, m.RefusalCode.ATTEMPT_OVER, "refused")
        if kind is m.AttemptEnded:
            return m.AttemptEnded(task, "killed")
        if kind is m.EventMessage:
            return m.EventMessage(task, seq, self.payload(fits))
        if kind is m.AnswerMessage:
            request_id = self.one_of(sorted(outbound._open_requests), (self.request_id + 1, -1, HUGE), fits)
            return m.AnswerMessage(task, seq, request_id, dice.choice(("", "no")), self.payload(fits))
        if kind is m.CloseForCheckpoint:
            latest = outbound._latest or 0
            return m.CloseForCheckpoint(
                task, seq, self.one_of((latest + 1, latest + 3), (latest, latest - 1, -1), fits)
            )
        if kind is m.BarrierMessage:
            events_before = self.one_of((came, 0), (seq, HUGE), fits)
            return m.BarrierMessage(task, seq, self.checkpoint(fits, SubtaskPhase.CLOSED), events_before)
        if kind is m.StartProcessing:
            return m.StartProcessing(task, seq)
        ends: dict[type, type[m.CheckpointCompleted | m.CheckpointAborted | m.SavepointTaken]] = {e: e for e in ENDS}
        return ends[kind](task, seq, self.checkpoint(fits, *SubtaskPhase))

    def follow(self) -> s.SubtaskInput | None:
        """Draw the next step of an attempt that usually has a checkpoint in progress."""
        machine, outbound = self.machine, self.machine._outbound
        if machine.state is SubtaskStatus.OVER:
            return None
        if machine.state is SubtaskStatus.FINISHED:
            any_of = (s.ConnectionAttached, s.ConnectionLost, m.Confirm, m.EventMessage, m.CloseForCheckpoint)
            return self.draw(self.dice.choice(any_of), True)
        if not outbound.attached:
            return self.draw(s.ConnectionAttached, True)
        steps: list[type] = [m.Confirm, m.AnswerMessage, m.EventMessage]
        steps += [s.OperatorOpened] if machine.state is SubtaskStatus.OPENING else []
        steps += [] if machine._inbound._started else [m.StartProcessing]
        phases = set(outbound._checkpoints.values())
        steps += [] if len(outbound._checkpoints) > 2 else [m.CloseForCheckpoint]
        steps += [m.BarrierMessage, s.BarrierArrived] if SubtaskPhase.CLOSED in phases else []
        steps += [s.SnapshotTaken, s.SnapshotTaken, s.SnapshotRefused] if SubtaskPhase.BARRIER in phases else []
        steps += list(ENDS) if phases & {SubtaskPhase.SNAPSHOT, SubtaskPhase.DECLINED} else []
        return self.draw(self.dice.choice(steps), True)

    # --- the tables ---

    def state(self) -> Hashable:
        machine, outbound = self.machine, self.machine._outbound
        phases = frozenset(outbound._checkpoints.values())
        waits = (
            bool(outbound._held),
            bool(outbound._open_requests),
            bool(machine._inbound._apart),
            machine.all_confirmed,
        )
        return machine.state, outbound.attached, phases, waits, outbound._refused is not None

    def cells(self, input: s.SubtaskInput) -> list[Cell]:
        machine = self.machine
        attached = machine._outbound.attached
        cells: list[Cell] = [("state", machine.state, type(input))]
        about: Any = input
        if isinstance(input, s.MessageReceived):
            about = input.message
            if about.task_attempt_id != 7:
                return [*cells, ("stranger", type(about))]
            cells.append(("message", machine.state, attached, type(about)))
            if (
                not attached
                or not isinstance(about, m.DownItem)
                or about.seq != machine._inbound.stream.received_seq + 1
            ):
                return cells
            cells.append(("item", machine.state, type(about)))
        if isinstance(about, ABOUT_CHECKPOINT) and machine.state in (SubtaskStatus.OPENING, SubtaskStatus.OPEN):
            cells.append(("checkpoint", machine._outbound.phase(about.checkpoint_id), type(about)))
        return cells

    def judge(self, cells: list[Cell], given: SubtaskGiven) -> None:
        for cell in cells:
            match cell:
                case ("state", state, kind):
                    assert state is not SubtaskStatus.OVER or self.machine.state is SubtaskStatus.OVER  # permanently
                    self.judge_state(LEGAL[kind][list(SubtaskStatus).index(state)], given)
                case ("stranger", _):
                    assert given.kinds == [s.RefuseMessage]
                    assert not given.changed(*self.started())
                case ("message", state, attached, kind):
                    self.judge_message(state, attached, kind, given)
                case ("item", SubtaskStatus.FINISHED, kind):
                    self.judge_item_after_finish(kind, given)
                case ("checkpoint", phase, kind):
                    self.judge_checkpoint(phase, kind, given)
        self.judge_effects(given)

    def started(self) -> tuple[str, ...]:
        """The attributes that the first input of any kind changes, because it starts the clock."""
        return () if any(given.error is None for given in self.history) else ("_detached_at",)

    def judge_state(self, reaction: Reaction, given: SubtaskGiven) -> None:
        match reaction:
            case Reaction.IGNORE:
                assert given.nothing(*self.started())
            case Reaction.REFUSE:  # H3
                assert given.kinds == [s.RefuseMessage]
                assert not given.changed()
            case Reaction.ILLEGAL:
                assert isinstance(given.error, LocalProtocolError)
            case Reaction.ENDED:
                assert isinstance(given.error, AttemptOver)
            case Reaction.ACT:
                assert not isinstance(given.error, AttemptOver)
                remote = isinstance(given.input, s.MessageReceived | s.ConnectionAttached)
                assert given.error is None or isinstance(given.error, RemoteProtocolError) == remote

    def judge_message(self, state: SubtaskStatus, attached: bool, kind: type, given: SubtaskGiven) -> None:
        if not attached:  # H3: only input from the present connection counts
            assert given.kinds == [s.RefuseMessage]
            assert not given.changed(*self.started())
        elif kind in (m.Registered, m.Resumed):
            assert isinstance(given.error, RemoteProtocolError)
        elif kind in LAST:
            assert given.kinds[-1] is s.EndAttempt
            assert self.machine.state is SubtaskStatus.OVER

    def judge_item_after_finish(self, kind: type, given: SubtaskGiven) -> None:
        """Check an attempt whose mailbox is not read: no mailbox item is confirmed (H23), and valves close (H47)."""
        assert given.error is None
        assert s.PutInMailbox not in given.kinds
        if kind in (m.EventMessage, m.AnswerMessage):
            assert given.kinds[0] is s.RefuseMessage
            assert self.machine.resume_seq <= self.machine._inbound.stream.received_seq - 1
            assert not given.changed(*STREAM)
        elif kind is m.CloseForCheckpoint:
            sent = [e.message for e in given.effects if isinstance(e, s.SendToCoordinator)]
            assert isinstance(sent[0], m.ClosedForCheckpoint)
        else:
            assert not given.changed(*STREAM)

    def judge_checkpoint(self, phase: SubtaskPhase | None, kind: type, given: SubtaskGiven) -> None:
        """Check the phases of a checkpoint at ``protocol.subtask.outbound``. An unknown id changes nothing (H44)."""
        local, remote = isinstance(given.error, LocalProtocolError), isinstance(given.error, RemoteProtocolError)
        if kind is m.CloseForCheckpoint:
            assert remote or phase is None
        elif kind is m.BarrierMessage:
            assert remote or phase is SubtaskPhase.CLOSED
        elif kind is s.BarrierArrived:
            assert given.error is None
            if phase is not SubtaskPhase.CLOSED:
                assert given.kinds == [s.RefuseMessage]
                assert not given.changed(*self.started())
        elif kind in (s.SnapshotTaken, s.SnapshotRefused):
            assert local == (phase not in (None, SubtaskPhase.BARRIER))
            if phase is None:
                assert given.nothing(*self.started())
        else:
            assert given.error is None
            items = [effect.item for effect in given.effects if isinstance(effect, s.PutInMailbox)]
            told = any(isinstance(item, s.MailboxCompleted | s.MailboxAborted) for item in items)
            assert told == (phase is not None and kind is not m.SavepointTaken)  # H49
            # As an item of the stream, it may still be the one that a barrier waited for.
            assert phase is not None or not given.changed(*STREAM, "_apart", "_checkpoints")

    def judge_effects(self, given: SubtaskGiven) -> None:
        """Check that every request is resolved once, and nothing is sent after the attempt's end (H3, H26, H33)."""
        if isinstance(given.input, s.RequestSubmitted) and given.error is None:
            self.asked.add(given.input.request_id)
        self.room_owed = self.room_owed or isinstance(given.error, GatewayFull)
        confirms = 0
        for place, effect in enumerate(given.effects):
            match effect:
                case s.ResolveRequest(request_id, _, _):
                    self.asked.remove(request_id)
                case s.RoomAvailable():  # H27: once for each refusal, or consecutive refusals
                    assert self.room_owed
                    self.room_owed = False
                case s.EndAttempt(_):
                    assert place == len(given.effects) - 1
                    assert not self.asked or self.machine.state is SubtaskStatus.OVER
                case s.PutInMailbox(s.MailboxStart()):  # H66: once
                    assert not self.begun
                    self.begun = True
                case s.SendToCoordinator(message):
                    confirms += isinstance(message, m.Confirm)
                    assert message.task_attempt_id == 7
                    assert self.machine._outbound.attached
        assert confirms <= 1
        if self.machine.state is SubtaskStatus.FINISHED:
            self.asked.clear()  # no caller waits any more
        if self.machine.state is SubtaskStatus.OVER:
            assert not self.asked

    # --- batches ---

    def probe(self, rounds: int = 1) -> None:
        super().probe(rounds)
        self.probe_batch()

    def probe_batch(self) -> None:
        """A batch equals its single messages, except the confirmations, up to the one that breaks the protocol."""
        one_by_one, whole = self.fork(), self.fork()
        messages: list[m.DownMessage] = []
        apart: list[s.SubtaskEffect] = []
        broken = False
        while len(messages) < 4 and not broken:
            messages.append(one_by_one.message(self.dice.choice(members(m.DownMessage)), self.dice.random() < 0.8))
            given = one_by_one.give(s.MessageReceived(messages[-1]))
            apart += given.effects
            broken = given.error is not None
        together = whole.machine.handle_batch(
            [*messages, *([m.EventMessage(7, HUGE, b"")] if broken else [])], self.now
        )
        whole.machine.check_invariants()
        self.seen.effects.update(type(effect) for effect in together)
        assert broken == (s.DropConnection in map(type, together))
        assert not any(isinstance(effect, s.DropConnection) for effect in together[:-1])
        assert silent(together) == silent(apart)
        but = frozenset({"_confirm_sent", *self.started()})
        assert not differences(freeze(whole.machine), freeze(one_by_one.machine), but)


def silent(effects: list[s.SubtaskEffect]) -> list[s.SubtaskEffect]:
    """Return all effects but the confirmations, and the effect that ends a batch."""
    return [
        effect
        for effect in effects
        if not isinstance(effect, s.DropConnection)
        and not (isinstance(effect, s.SendToCoordinator) and isinstance(effect.message, m.Confirm))
    ]


ALL_CELLS: list[Cell] = [
    *(("state", state, kind) for state in SubtaskStatus for kind in LEGAL),
    *(("stranger", kind) for kind in members(m.DownMessage)),
    *(
        ("message", state, attached, kind)
        for state in SubtaskStatus
        for attached in (False, True)
        for kind in members(m.DownMessage)
        if not (attached and state is SubtaskStatus.OVER)
    ),
    *(("item", state, kind) for state in SubtaskStatus if state is not SubtaskStatus.OVER for kind in ITEMS),
    *(("checkpoint", phase, kind) for phase in (None, *SubtaskPhase) for kind in ABOUT_CHECKPOINT),
]


def test_every_input_of_a_subtask_has_a_row_and_a_generator() -> None:
    assert set(LEGAL) == set(members(s.SubtaskInput))
    walk = SubtaskWalk(Random(1))
    for kind in SubtaskWalk.kinds:
        for fits in (True, False):
            input = walk.draw(kind, fits)
            assert type(input.message if isinstance(input, s.MessageReceived) else input) is kind


def test_no_cell_of_the_subtasks_tables_is_left_out() -> None:
    explore(SubtaskWalk, ALL_CELLS, members(s.SubtaskEffect))


@settings(max_examples=100, print_blob=True)
@hypothesis_given(WANDERINGS)
def test_a_subtask_takes_every_input_or_refuses_it_unchanged(numbers: list[int]) -> None:
    # H3, H23, H33, H44
    wander(SubtaskWalk, numbers)
