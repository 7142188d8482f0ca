# SPDX-License-Identifier: Apache-2.0

"""Every kind of input in every state of the four machines, with values that fit and with others.

A ``Walk`` gives one machine seeded inputs. ``give`` checks what holds for every input of every machine: it is handled,
and the invariants hold; or a documented error refuses it, and nothing has changed. A deadline that has come passes. It
compares each cell of the machine's table with what happens, in all states that seeded walks reach.
"""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import product
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any, ClassVar, cast, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import attempts as a
from protocol import barrier_tracker as b
from protocol import facts as f
from protocol.attempts import AttemptWord, FailureKind, FailureReason
from protocol.attempts.ledger import AttemptLedger
from protocol.attempts.records import AttemptState, TaskRecord
from protocol.barrier_tracker.pending import LEGAL as PENDING
from protocol.barrier_tracker.pending import STEP_OF, Phase, Step, Verdict
from protocol.barrier_tracker.tracker import BarrierTracker
from protocol.errors import AttemptOver, LocalProtocolError, ProtocolError, RemoteProtocolError
from protocol.facts import TaskOutcome, TaskState
from protocol.gateway import machine as gateway
from protocol.gateway import types as g
from protocol.gateway.inbound import _Peer as Peer
from protocol.gateway.machine import GatewayMachine, GatewayState
from protocol.gateway.outbound import GatewayPhase
from protocol.ids import ExecutionAttempt
from protocol.machine import Reaction, TimePassed
from protocol.parts import ONE_PART, PartTable
from protocol.subtask import machine as subtask
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine, SubtaskStatus
from protocol.subtask.outbound import SubtaskPhase
from protocol.wire import messages as m
from protocol.wire.messages import HeldEvent, OperatorPart, Register, RestoreMode, SubtaskState
from protocol.wire.state_handles import KeyGroupRange, StateHandle
from tests.exploration.freezing import freeze

HANDLE = StateHandle("7-1-ab/0-100-cd", 100, bytes(32), 2**20, 3)
OTHER_HANDLE = HANDLE._replace(manifest="7-1-ab/1-101-cd", key_groups=KeyGroupRange(0, 8, 16))
HUGE = 2**63
"""One more than the largest number on the wire."""
Pool = tuple[Iterable[Any], Iterable[Any]]
"""Values of a field: those that fit in the present state, and others."""
PAYLOADS: Pool = ([b"", bytes(9), bytes(30)], [bytes(61), bytes(500)])
DEFAULTS: dict[str, Pool] = {
    "bool": ([False, True], []),
    "str": (["", "no"], []),
    "str | None": ([None, "no"], []),
    "int": ([3], []),
    "float": ([7.0], []),
    "bytes": (PAYLOADS[0], []),
    "frozenset[int]": ([frozenset(), frozenset({0, 1})], []),
    "Positions": ([(), (3,)], [(1, 2, 3, 4)]),
    "tuple[OperatorPart, ...]": ([(OperatorPart(""),)], []),
    "tuple[HeldEvent, ...]": ([(), (HeldEvent(2, b"held"),)], [(HeldEvent(2, b"held", part=3),)]),
    "tuple[SubtaskState, ...]": ([()], []),
    "StateHandle": ([HANDLE, OTHER_HANDLE], []),
    "StateHandle | None": ([None, HANDLE], []),
    "dict[StateHandle, StateHandle]": ([{}], [{HANDLE: OTHER_HANDLE}]),
}
"""The values of a field that no walk mentions, by its type."""
TABLES = (ONE_PART, PartTable((OperatorPart(""), OperatorPart("pages"), OperatorPart("permits", outside=True))))
"""Of one part, and of three, the last of which is outside of checkpoints (H150, H152)."""
ACTS = "acts"
REMEMBERED = frozenset({"_refused", "_now"})
"""What a refused input may change: the sender that waits for ``CapacityAvailable`` (H27), the reading of the clock."""


class Walk(ABC):
    """A walk through the states of one machine. Subclasses say how it is built and which values fit."""

    kinds: ClassVar[tuple[type, ...]]
    effects: ClassVar[tuple[type, ...]]
    rare: ClassVar[tuple[type, ...]]
    """Kinds of input that end much, so that a walk gives them seldom."""
    rows: ClassVar[Iterable[Hashable]]
    acting: ClassVar[Iterable[tuple[Hashable, type]]] = ()
    """The cells of its table in which an input has an effect, at least in some state."""
    machine: Any  # walks look at what is inside

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        self.now = self.dice.choice((0.0, 0.3, 1e6))
        self.history: list[tuple[Any, float, str]] = []
        self.fresh = 0
        self.changed = False
        self.seen: Counter[Hashable] = Counter()
        self.waiting: set[int] = set()  # connections whose registration is not answered
        self.machine = self.build()
        self.form = freeze(self.machine, REMEMBERED)
        self.first = copy.deepcopy(self.machine)

    @abstractmethod
    def build(self) -> Any:
        """Create a machine before its first input. Its settings may be random."""

    @abstractmethod
    def values(self, kind: type, fits: bool) -> dict[str, Pool]:
        """Return the names and values of fields."""

    @abstractmethod
    def leading(self) -> list[type]:
        """Return kinds of inputs that lead to states which random choices seldom reach."""

    @abstractmethod
    def row(self) -> Hashable:
        """Return the row of the machine's table."""

    def row_of(self, input: Any) -> Hashable:
        """Return the row in which the table has this input."""
        return self.row()

    @abstractmethod
    def state(self) -> Hashable:
        """Return the present state in more detail than its row."""

    @abstractmethod
    def judge(self, row: Any, input: Any, effects: Sequence[Any], error: Exception | None, changed: bool) -> None:
        """Check the result of an input against what the machine's table says."""

    # --- inputs ---

    def pick(self, pool: Pool, fits: bool) -> Any:
        good, others = list(pool[0]), list(pool[1])
        fits = fits or self.dice.random() < 0.6
        return self.dice.choice((good or others) if fits else (others or good))

    def make(self, kind: type, fits: bool) -> Any:
        if kind is TimePassed and fits and (deadline := self.machine.next_deadline()) is not None:
            self.now = max(self.now, deadline)
        self.fresh += 1
        values = self.values(kind, fits)
        pools = [values[field.name] if field.name in values else DEFAULTS[str(field.type)] for field in fields(kind)]
        return kind(*[self.pick(pool, fits) for pool in pools])

    def give(self, input: Any) -> tuple[list[Any], Exception | None]:
        """Give the machine one input, and check what holds for every input."""
        machine, row, cell = self.machine, self.row(), self.row_of(input)
        due, before = machine.next_deadline(), self.form
        effects: list[Any] = []
        error: ProtocolError | None = None
        try:
            try:
                effects = list(machine.handle(input, self.now))
            except (LocalProtocolError, RemoteProtocolError, AttemptOver) as refusal:
                error = refusal
            machine.check_invariants()
            self.form = freeze(machine, REMEMBERED)
            changed = self.changed = self.form != before
            assert not (error and changed), f"refused by {error!r}, and not as before"
            deadline = machine.next_deadline()
            assert deadline is None or isfinite(deadline)
            if isinstance(input, TimePassed) and due is not None and due <= self.now:
                assert deadline is None or deadline > self.now, "its moment has come, and it goes on waiting for it"
            self.judge(cell, input, effects, error, changed)
        except Exception as failure:
            failure.add_note(self.story(input))
            raise
        about = input.message if isinstance(input, g.MessageReceived | s.MessageReceived) else input
        self.seen.update([(row, type(about)), *map(type, effects)])
        if effects or changed:
            self.seen[ACTS, cell, type(input)] += 1
        self.history.append((input, self.now, f"{effects} {error!r}"))
        return effects, error

    def step(self) -> None:
        """Give one input, which usually fits and often leads to a new state."""
        self.now += self.dice.choice((0.0, 0.0, 0.0, 0.1, 0.7))
        kinds = self.leading() if self.dice.random() < 0.6 else []
        if kinds:
            self.give(self.make(self.dice.choice(kinds), True))
        else:
            [kind] = self.dice.choices(self.kinds, [0.2 if kind in self.rare else 1.0 for kind in self.kinds])
            self.give(self.make(kind, self.dice.random() < 0.85))

    def probe(self) -> None:
        """Give copies of the machine every kind of input, fitting and not. The walk itself does not move."""
        fork = self.fork()
        for kind, fits in product(self.kinds, (True, False)):
            fork.give(fork.make(kind, fits))
            fork = self.fork() if fork.changed else fork

    def fork(self) -> Any:
        fork = copy.copy(self)
        fork.machine = pickle.loads(pickle.dumps(self.machine))  # copy.deepcopy takes five times as long
        fork.history, fork.waiting = list(self.history), set(self.waiting)
        return fork

    def wait(self, rounds: int = 12) -> None:
        """Advance to the machine's deadlines; ``give`` fails if one does not pass."""
        for _ in range(rounds):
            if self.machine.next_deadline() is not None:
                self.give(self.make(TimePassed, True))

    def replay(self) -> None:
        """Check that the same inputs have the same effects on a machine built in the same way."""
        for input, now, told in self.history:
            try:
                again = f"{list(self.first.handle(input, now))} None"
            except ProtocolError as error:
                again = f"[] {error!r}"
            assert again == told

    def story(self, last: Any) -> str:
        lines = [f"{now:10.3f} <- {input}\n{'':11}-> {told:.300}" for input, now, told in self.history]
        return "\n".join([type(self).__name__, *lines, f"{self.now:10.3f} <- {last}"])


def members(union: Any) -> tuple[type, ...]:
    return tuple(get_args(union))


def cells_of(legal: Any, rows: Iterable[Any], reaction: Reaction | Verdict) -> list[tuple[Any, type]]:
    """Return the cells of a table in which it has this reaction."""
    return [
        (row, kind) for kind, cells in legal.items() for row, cell in zip(rows, cells, strict=True) if cell is reaction
    ]


def judge_reaction(reaction: Reaction, effects: Sequence[Any], error: Exception | None, changed: bool) -> None:
    """Check the cell of a gateway's or a subtask's table (H3, H21, H26)."""
    names = [type(effect).__name__ for effect in effects]
    match reaction:
        case Reaction.IGNORE:
            assert (names, error, changed) == ([], None, False)
        case Reaction.REFUSE:
            assert (names, error, changed) == (["RefuseMessage"], None, False)
        case Reaction.FAIL:
            assert (names, error, changed) == (["FailEvent"], None, False)
        case Reaction.ILLEGAL:
            assert isinstance(error, LocalProtocolError)
        case Reaction.ENDED:
            assert isinstance(error, AttemptOver)
        case Reaction.ACT:
            assert not isinstance(error, AttemptOver)


class EndWalk(Walk):
    """A walk of one end of an attempt."""

    received: ClassVar[Any]
    messages: ClassVar[tuple[type, ...]]
    legal: ClassVar[Any]
    table: PartTable
    phase_of: ClassVar[dict[type, Any]]
    """The phase of a checkpoint in which an input about it fits; any phase, if it is not named."""

    def make(self, kind: type, fits: bool) -> Any:
        made = super().make(kind, fits)
        return self.received(made) if kind in self.messages else made

    def row(self) -> Any:
        return self.machine.state

    def phases(self) -> dict[int, Any]:
        checkpoints = self.machine._outbound._checkpoints
        return {n: getattr(checkpoint, "phase", checkpoint) for n, checkpoint in checkpoints.items()}

    def values(self, kind: type, fits: bool) -> dict[str, Pool]:
        sent, came = self.machine._outbound.stream, self.machine._inbound.stream.received_seq
        latest, phases = self.machine._outbound._latest or 0, self.phases()
        wanted = self.phase_of.get(kind)
        ids = [n for n, phase in phases.items() if wanted in (None, phase)]
        starts = kind in (g.CloseRequested, m.CloseForCheckpoint)
        kept = range(sent.confirmed_seq, sent.last_seq + 1)
        lost = [(HeldEvent(2, b"held", part=self.table.count),)]
        lost += [(HeldEvent(2, b"held", part=2),)] if self.table.count > 1 else []
        return {
            "task_attempt_id": ([7], [8, -1]),
            "seq": (kept if kind is m.Confirm else [came + 1], [came, came + 2, sent.last_seq + 1, -1, HUGE]),
            "received_seq": (kept, [sent.confirmed_seq - 1, sent.last_seq + 1, HUGE]),
            "checkpoint_id": ([latest + 1, latest + 3] if starts else ids, [*phases, latest, latest + 1, -1, HUGE]),
            "confirmed": (kept, [sent.last_seq + 1, -1, HUGE]),
            "payload": PAYLOADS,
            "part": (range(self.table.count), [self.table.count, 127] if kind in self.messages else []),
            "events_sent": ([(), (3,), (3, 1)[: self.table.count]], [(1, 2, 3, 4)]),
            "held": ([(), tuple(HeldEvent(2, b"held", part=part) for part in range(min(2, self.table.count)))], lost),
        }

    def judge(self, row: Any, input: Any, effects: Sequence[Any], error: Exception | None, changed: bool) -> None:
        started = not any(told.endswith(" None") for _, _, told in self.history)  # the first input starts a clock
        judge_reaction(self.legal[type(input)][[*self.rows].index(row)], effects, error, changed and not started)

    def probe(self) -> None:
        super().probe()
        self.probe_batch()

    def probe_batch(self) -> None:
        """A batch equals its single messages, except the confirmations, up to the one that breaks the protocol."""
        one_by_one, whole = self.fork(), self.fork()
        batch: list[Any] = []
        apart: list[Any] = []
        error: Exception | None = None
        while len(batch) < 4 and error is None:
            input = one_by_one.make(self.dice.choice(self.messages), self.dice.random() < 0.8)
            effects, error = one_by_one.give(input)
            batch.append(input.message)
            apart += effects
        together = whole.machine.handle_batch([*batch, *([m.EventMessage(7, HUGE, b"")] if error else [])], self.now)
        whole.machine.check_invariants()
        self.seen.update(map(type, together))
        assert [isinstance(effect, g.DropConnection) for effect in together].count(True) == (error is not None)
        assert without_confirms(together) == without_confirms(apart)
        but = REMEMBERED | {"told_seq", "confirmed", "_heard_at", "stopped_at", "_detached_at"}
        assert freeze(whole.machine, but) == freeze(one_by_one.machine, but)


def without_confirms(effects: Iterable[Any]) -> list[Any]:
    left = [effect for effect in effects if not isinstance(effect, g.DropConnection)]
    return [
        replace(effect, message=replace(cast(m.OfCheckpoint, message), confirmed=0))
        if type(message) in m.OF_CHECKPOINT
        else effect
        for effect in left
        if not isinstance(message := getattr(effect, "message", None), m.Confirm)
    ]


class GatewayWalk(EndWalk):
    received, messages, legal = g.MessageReceived, members(m.UpMessage), gateway.LEGAL
    kinds = (*(kind for kind in members(g.GatewayInput) if kind is not g.MessageReceived), *messages)
    effects, rows = members(g.GatewayEffect), GatewayState
    acting = cells_of(gateway.LEGAL, GatewayState, Reaction.ACT)
    rare = (g.AttemptIsOver, TimePassed, g.ConnectionLost, m.Finished)
    phase_of: ClassVar = {
        g.CutReached: GatewayPhase.REQUESTED,
        m.ClosedForCheckpoint: GatewayPhase.REQUESTED,
        m.CheckpointAcknowledged: GatewayPhase.BARRIER,
        m.StateStored: GatewayPhase.UPLOADING,
        m.StateFailed: GatewayPhase.UPLOADING,
        m.CheckpointDeclined: GatewayPhase.BARRIER,
    }

    def build(self) -> GatewayMachine:
        self.table = self.dice.choice(TABLES)
        beats = self.dice.choice((None, 2.0))
        limits = g.GatewayLimits(
            10.0,
            7.0,
            4,
            60,
            self.dice.choice((3, 5)),
            60,
            heartbeat_interval_s=beats,
            heartbeat_timeout_s=None if beats is None else 6.0,
        )
        return GatewayMachine(
            ExecutionAttempt("words", 2, 1, 7),
            limits,
            barriers_apart=self.dice.choice((False, True)),
            hold_events=self.dice.choice((False, True)),
            table=self.table,
        )

    def values(self, kind: type, fits: bool) -> dict[str, Pool]:
        inbound, values = self.machine._inbound, super().values(kind, fits)
        open_requests = sorted(inbound._unanswered)
        if kind is g.ItemTaken:
            waiting = inbound._kept or inbound._aside
            delivered = waiting[0].seq - 1 if waiting else inbound.stream.received_seq
            values["seq"] = range(delivered + 1), [delivered + 1, HUGE, -1]
        if kind is g.CutReached and not self.machine._outbound.closes:  # the first sign of its checkpoint
            latest = self.machine._outbound._latest or 0
            values["checkpoint_id"] = [latest + 1, latest + 3], [*self.phases(), latest, -1]
        return {
            **values,
            "event_id": ([self.fresh], []),
            "request_id": (open_requests if kind is g.AnswerSubmitted else [self.fresh], [*open_requests, -1, HUGE]),
            "outcome": (g.CheckpointOutcome, []),
        }

    def leading(self) -> list[type]:
        inbound, phases = self.machine._inbound, list(self.phases().values())
        if self.machine.state is not GatewayState.ATTACHED:
            answers = [g.AnswerSubmitted] if inbound._unanswered else []
            return [g.ConnectionAttached, *answers] if self.machine.state is GatewayState.DETACHED else []
        kinds = [
            m.Confirm,
            g.ItemTaken,
            g.EventSubmitted,
            *(kind for kind, at in self.phase_of.items() if at in phases),
        ]
        kinds += [g.CloseRequested if self.machine._outbound.closes else g.CutReached] if len(phases) < 3 else []
        kinds += [g.CheckpointOver] if GatewayPhase.ACKNOWLEDGED in phases else []
        kinds += [] if inbound._ready else [g.ReadyAnnounced]
        kinds += [] if inbound._unanswered else [m.RequestMessage]
        return [*kinds, m.Opened] if inbound._peer is Peer.RESTORING else kinds

    def state(self) -> Hashable:
        outbound, inbound = self.machine._outbound, self.machine._inbound
        waits = [outbound._held, outbound.awaited, outbound.tolerated, inbound._kept, inbound._unanswered]
        phases = frozenset(self.phases().values())
        return self.machine.state, inbound._peer, inbound._ready, phases, tuple(map(bool, waits))


class SubtaskWalk(EndWalk):
    received, messages, legal = s.MessageReceived, members(m.DownMessage), subtask.LEGAL
    kinds = (*(kind for kind in members(s.SubtaskInput) if kind is not s.MessageReceived), *messages)
    effects, rows = members(s.SubtaskEffect), SubtaskStatus
    acting = cells_of(subtask.LEGAL, SubtaskStatus, Reaction.ACT)
    rare = (s.OperatorFinished, TimePassed, s.ConnectionLost, m.AttemptEnded, m.Refused)
    phase_of: ClassVar = {
        m.BarrierMessage: SubtaskPhase.CLOSED,
        s.BarrierArrived: SubtaskPhase.CLOSED,
        s.SnapshotTaken: SubtaskPhase.BARRIER,
        s.SnapshotRefused: SubtaskPhase.BARRIER,
        s.StateUploaded: SubtaskPhase.UPLOADING,
        s.UploadFailed: SubtaskPhase.UPLOADING,
        m.SavepointTarget: SubtaskPhase.CLOSED,
        m.CheckpointCompleted: SubtaskPhase.SNAPSHOT,
        m.CheckpointAborted: SubtaskPhase.DECLINED,
    }

    def build(self) -> SubtaskMachine:
        self.table = self.dice.choice(TABLES)
        inside = self.table.outside.count(False)
        limits = s.SubtaskLimits(
            self.dice.choice((3, 5)),
            60,
            7.0,
            snapshot_bytes_max=200,
            held_events_max=4,
            heartbeat_interval_s=self.dice.choice((0.0, 2.0)),
        )
        held = tuple(HeldEvent(5, bytes(n), n % 2 == 1, n % 3 % inside) for n in range(self.dice.choice((0, 0, 2, 6))))
        hold_events = self.dice.choice((False, True, True))
        sent = self.dice.choice(((), (11,), (0, 2)[: self.table.count - 1]))
        return SubtaskMachine(7, 2, limits, held, sent, hold_events=hold_events, table=self.table)

    def values(self, kind: type, fits: bool) -> dict[str, Pool]:
        came, asked = self.machine._inbound.stream.received_seq, sorted(self.machine._outbound._open_requests)
        values = super().values(kind, fits)
        first = kind in (m.BarrierMessage, m.SavepointTarget)
        if first and not self.machine._outbound.hold_events:  # the first sign of its checkpoint
            latest = self.machine._outbound._latest or 0
            values["checkpoint_id"] = [latest + 1, latest + 3], [*self.phases(), latest, -1, HUGE]
        return {
            **values,
            "events_before": ([came, came + (kind is s.BarrierArrived), 0], [HUGE, -1, came + 2]),
            "request_id": ([self.fresh] if kind is s.RequestSubmitted else asked, [*asked, self.fresh, -1, HUGE]),
            "state": ([b"", bytes(20)], [bytes(500)]),
            "failure": (["", "boom"], []),
        }

    def leading(self) -> list[type]:
        machine, phases = self.machine, list(self.phases().values())
        if machine.state is SubtaskStatus.OVER:
            return []
        if not machine._outbound.attached:
            return [s.ConnectionAttached]
        kinds = [m.Confirm, m.AnswerMessage, m.EventMessage, *(k for k, at in self.phase_of.items() if at in phases)]
        kinds += [m.CloseForCheckpoint] if len(phases) < 3 else []
        kinds += [s.OperatorOpened] if machine.state is SubtaskStatus.OPENING else []
        urgent = machine._inbound.urgent
        if not urgent.idle and machine.state is SubtaskStatus.OPEN:
            kinds += [s.UrgentHandled if urgent._begun > urgent._handled else s.UrgentBegan]
        return kinds if machine._inbound._started else [*kinds, m.StartProcessing]

    def state(self) -> Hashable:
        machine, outbound = self.machine, self.machine._outbound
        waits = (bool(outbound._held), bool(outbound._open_requests), bool(machine._inbound._apart))
        phases = frozenset(self.phases().values())
        return machine.state, outbound.attached, phases, waits, machine.all_confirmed, bool(outbound._refused)


class TrackerWalk(Walk):
    kinds, effects, rows = members(b.TrackerInput), members(b.TrackerEffect), Phase
    acting = cells_of(PENDING, Phase, Verdict.ACT)
    rare = (
        a.OperatorReset,
        a.RunEnded,
        a.SubtaskFailed,
        a.SubtaskFinished,
        b.SubtaskFinalState,
        b.AbortRequested,
        b.SubtaskDeclined,
    )

    def build(self) -> BarrierTracker:
        pick = self.dice.choice
        modes, intervals, pauses = list(RestoreMode), (None, 4.0, 0.1), (0.0, 0.7)
        failures, immediately, hold_events, apart = (
            pick((0, 2, 50)),
            pick((1, 2, 3)),
            pick((True, False)),
            pick((True, False)),
        )
        config = b.CheckpointConfig(
            10.0, failures, pick(modes), pick(intervals), pick(pauses), immediately, hold_events=hold_events
        )
        state = SubtaskState(0, b"0", pick((None, HANDLE)))
        snapshot = b.SubtaskSnapshot((state,), (HeldEvent(0, b"h"),), (5,))
        restored = b.CompletedCheckpoint(4, pick((3, 2)), b"c", {0: snapshot})
        elsewhere = pick((True, False))
        return BarrierTracker(
            "words", 3, config, pick((None, restored)), restored_elsewhere=elsewhere, barriers_apart=apart
        )

    def row(self) -> Any:
        return self.machine.phase

    def row_of(self, input: Any) -> Any:
        """Return the phase of the checkpoint that a report is about: idle, if nothing waits for the report."""
        if type(input) not in PENDING:
            return self.row()
        pending = self.machine._under_way.pending.get(input.checkpoint_id)
        attempt = getattr(input, "attempt", None)
        if pending is None or attempt is None:
            return Phase.IDLE if pending is None else pending.phase
        part = pending.parts.get(attempt.subtask)
        takes_part = part is not None and part.attempt == attempt and part.step <= STEP_OF[type(input)]
        return pending.phase if takes_part else Phase.IDLE

    def values(self, kind: type, fits: bool) -> dict[str, Pool]:
        machine, pending = self.machine, self.machine._under_way.pending
        known = list(machine._attempts.by_task.values())
        strangers = [ExecutionAttempt("words", 1, 77, 7777), ExecutionAttempt("words", HUGE, 1, 9999)]
        highest, waiting = machine._highest_id, machine._under_way.queued
        others = [*pending, highest, highest + 1, HUGE, -1]
        ids: Any = [*pending, *([waiting[0].checkpoint_id] if waiting else [])]
        attempts: Any = [one.attempt for one in known]
        if kind in PENDING:
            acts = [n for n, one in pending.items() if PENDING[kind][list(Phase).index(one.phase)] is Verdict.ACT]
            turns = [(part.attempt, n) for n in acts for part in pending[n].parts.values() if self.in_turn(kind, part)]
            chosen = self.dice.choice(turns) if turns else None
            ids, attempts = (acts, attempts) if chosen is None else ([chosen[1]], [chosen[0]])
            ids = ids[:1]
        elif kind is a.AttemptAccepted:
            idle = sorted({0, 1, 2} - {one.attempt.subtask for one in known}) or [0, 1, 2]
            strangers += attempts
            attempts = [ExecutionAttempt("words", self.dice.choice(idle), self.fresh, 100 + self.fresh)]
        elif kind is a.SubtaskReady:
            attempts = [one.attempt for one in known if not one.ready]
        elif kind is a.SubtaskFinished:
            attempts = [one.attempt for one in known if one.ready and not one.finished]
        attempt = self.pick((attempts, strangers + [one.attempt for one in known]), fits)
        restored = {one.attempt.task_attempt_id: one.events_restored for one in known}
        sent = restored.get(attempt.task_attempt_id, ())
        return {
            "attempt": ([attempt], []),
            "mode": ([machine._mode], RestoreMode),
            "checkpoint_id": (
                [highest + 1] if kind is b.CheckpointTriggered
                else machine.in_doubt_ids if kind is b.CheckpointDiscarded
                else ids,
                others,
            ),
            "operator_id": (["words"], []),
            "subtask": (sorted(machine._attempts.resets_owed), [0, 1, 2]),
            "events_taken": ([restored], [{task: (*counts, HUGE) for task, counts in restored.items()}]),
            "events_sent": ([sent], [(*sent, 1)]),
            "recorded": ([{}], [{task: (HeldEvent(0, b"r"),) for task in restored}]),
            "reason": ([FailureReason(FailureKind.KILLED, "")] if kind is a.SubtaskFailed else ["no"], []),
            "connection_id": ([attempt.task_attempt_id], []),
            "copied": (
                [{files: files._replace(manifest=f"copy-{self.fresh}") for files in pending[ids[0]].to_copy}]
                if kind is b.CheckpointStored and ids else [{}],
                [{HANDLE: OTHER_HANDLE}],
            ),
        }  # fmt: skip

    @staticmethod
    def in_turn(kind: type, part: Any) -> bool:
        return part.step is STEP_OF.get(kind) or (kind is b.SubtaskDeclined and part.step is not Step.SETTLED)

    def leading(self) -> list[type]:
        known, under_way = list(self.machine._attempts.by_task.values()), self.machine._under_way
        ready = sum(one.ready for one in known)
        kinds: list[type] = [a.AttemptAccepted] if len(known) < 3 else []
        kinds += [a.SubtaskReady] if ready < len(known) else []
        kinds += [a.SubtaskReset] if self.machine._attempts.resets_owed else []
        kinds += [a.OperatorReset] if under_way.halted else []
        kinds += [b.CheckpointTriggered] if ready and not under_way.queued else []
        phases = {pending.phase for pending in under_way.pending.values()}
        words = (
            b.SubtaskClosed,
            b.CoordinatorSnapshotTaken,
            b.SubtaskAcknowledged,
            b.SubtaskStateStored,
            b.RecordedCollected,
            b.CheckpointStored,
        )
        for kind in words:
            acts = {phase for phase in Phase if PENDING[kind][list(Phase).index(phase)] is Verdict.ACT}
            kinds += [kind, kind] if acts & phases else []
        return kinds

    def state(self) -> Hashable:
        machine, under_way = self.machine, self.machine._under_way
        flags = (under_way.queued is not None, bool(under_way.withheld), under_way.halted, machine.final_pending)
        attempts = frozenset((one.ready, one.finished) for one in machine._attempts.by_task.values())
        steps = [(one.phase, frozenset(p.step for p in one.parts.values())) for one in under_way.pending.values()]
        return frozenset(steps), flags, attempts, bool(machine._attempts.copies())

    def judge(self, row: Any, input: Any, effects: Sequence[Any], error: Exception | None, changed: bool) -> None:
        names = [type(effect).__name__ for effect in effects]
        assert "ReportStale" not in names or (names, changed) == (["ReportStale"], False)  # H3, H44
        if type(input) in PENDING:  # H40, H44
            match PENDING[type(input)][[*Phase].index(row)]:
                case Verdict.ACT:
                    assert changed or (error and isinstance(input, b.CheckpointStored))  # with other copies
                case Verdict.STALE:
                    assert names == ["ReportStale"]
                case Verdict.ABORT:
                    assert "NotifyCheckpointAborted" in names
                case Verdict.ILLEGAL:
                    assert isinstance(error, LocalProtocolError)
        news = [names.index(name) for name in NEWS if name in names]
        aborts = [place for place, name in enumerate(names) if name == "NotifyCheckpointAborted"]
        assert not news or not aborts or max(aborts) < min(news), "aborted after the news"  # H16


NEWS = ("SubtaskFailed", "SubtaskResetToCheckpoint", "OperatorResetToCheckpoint", "RunEnded", "RaiseGlobalFailure")
OPERATORS = ("words", "other")


class LedgerWalk(Walk):
    kinds, effects = members(a.LedgerInput), members(a.LedgerEffect)
    rows = ("ended", "no operator", "no run", "run", "failed")
    rare = (a.OperatorAdded, a.OperatorRemoved, a.GlobalFailureRaised, f.ApplicationEnded, f.ExecutorLost, f.JobEnded)

    def build(self) -> AttemptLedger:
        self.mode = self.dice.choice(list(RestoreMode))
        ledger = AttemptLedger(a.LedgerConfig(attempts_max=self.dice.choice((1, 2, None))))
        for name in self.dice.choice((OPERATORS[:1], OPERATORS, OPERATORS[::-1], ())):
            ledger.handle(a.OperatorAdded(name, 2), self.now)
        return ledger

    @property
    def operator(self) -> Any:
        operator = self.machine._operators.get("words")
        return None if operator is None else operator.record

    def entries(self, *states: AttemptState) -> list[Any]:
        run = None if self.operator is None else self.operator.run
        return [] if run is None else [entry for entry in run.entries() if entry.state in (states or AttemptState)]

    def row(self) -> Hashable:
        if self.machine._application_ended:
            return "ended"
        if self.operator is None or self.operator.run is None:
            return "no operator" if self.operator is None else "no run"
        return "failed" if self.operator.run.failed_cause is not None else "run"

    def stages(self) -> list[int]:
        return sorted({stage for stages in self.machine._engine.job_stages.values() for stage in stages})

    def values(self, kind: type, fits: bool) -> dict[str, Pool]:
        dice, engine = self.dice, self.machine._engine
        alive = [AttemptState.ACCEPTED] if kind is a.OperatorOpened else [AttemptState.ACCEPTED, AttemptState.READY]
        held = [] if self.operator is None else list(self.operator.held)
        if kind in members(AttemptWord):
            tasks = [entry.task_attempt_id for entry in self.entries(*alive)]
            every = [entry.task_attempt_id for entry in self.entries()]
            return {"operator_id": (["words"], ["nobody", "other"]), "task_attempt_id": (tasks, [*every, *held, -1])}
        task = self.task(kind, fits)
        stage = dice.choice(self.stages() or [2]) if kind in (f.StageSubmitted, f.StageCompleted) else task.stage_id
        latest = engine.stages[stage].latest_attempt if stage in engine.stages else 0
        attempt = latest if task.stage_attempt is None or stage != task.stage_id else task.stage_attempt
        missing = [name for name in OPERATORS if name not in self.machine._operators]
        jobs, tasks = [*engine.job_stages], [*(entry.task_attempt_id for entry in self.entries()), *held]
        resubmits = task.end is TaskOutcome.SUCCESS and dice.random() < 0.5
        return {
            "operator_id": (missing if kind is a.OperatorAdded else ["words"], ["nobody", *self.machine._operators]),
            "parallelism": ([2], [0, -1]),
            "job_id": ([self.fresh] if kind is f.JobStarted else jobs, [*jobs, -1, HUGE]),
            "stage_ids": ([(2 * self.fresh,), (2 * self.fresh, 2 * self.fresh + 1)], []),
            "stage_id": ([stage], [99, -1, HUGE]),
            "stage_attempt": (
                [attempt] if kind not in (f.StageSubmitted, f.StageCompleted) else [latest, latest + 1],
                [-1],
            ),
            "task_count": ([0, 2], []),
            "partitions": ([0, 2, 1], []),
            "task_attempt_id": ([task.task_attempt_id], [-1, HUGE]),
            "partition": ([task.partition], [0, -1, HUGE]),
            "attempt_number": ([task.attempt_number], [-1]),
            "outcome": ([TaskOutcome.RESUBMITTED] if resubmits else TaskOutcome, []),
            "executor_id": (["e1", "e2"], ["e9"]),
            "jobs": ([{job: dice.random() < 0.6 for job in jobs if dice.random() < 0.8}], [{-1: True, HUGE: False}]),
            "tasks": (
                [{one: dice.choice(list(TaskState)) for one in tasks if dice.random() < 0.5}],
                [{-1: TaskState.ENDED}],
            ),
            "places": ([self.places()], [{one: f.TaskPlace(stage, 1) for one in tasks}, {HUGE: f.TaskPlace(99, -1)}]),
            "connection_id": ([1000 + self.fresh], []),
            "message": ([self.registration(task, fits)], []),
            "cause": (["it failed"], []),
        }

    def places(self) -> dict[int, f.TaskPlace]:
        """Where the tasks are, if all of their claims are true."""
        record = self.operator
        if record is None or record.run is None:
            return {}
        alive = {
            entry.task_attempt_id: f.TaskPlace(record.run.run_id, entry.attempt.subtask) for entry in self.entries()
        }
        waiting = {task: f.TaskPlace(one.message.run_id, one.message.subtask) for task, one in record.held.items()}
        return alive | waiting

    def registration(self, task: TaskRecord, fits: bool) -> Register:
        name, mode = self.pick((["words"], ["nobody", "other"]), fits), self.pick(([self.mode], [0, 1, 7, -1]), fits)
        place = self.pick(([task.partition], [-1, 2, HUGE]), fits)
        number = self.pick(([task.attempt_number], [-1]), fits)
        return Register(task.task_attempt_id, name, place, task.stage_id, number, mode, 2, "h", "3.11")

    def task(self, kind: type, fits: bool) -> TaskRecord:
        """Choose a task of which Spark may say this, or draw a new one of a running stage."""
        records = [task for stage in self.machine._engine.stages.values() for task in stage.tasks.values()]
        taken = {entry.task_attempt_id for entry in self.entries()} | set(self.operator.held if self.operator else ())
        open_ends = (None, TaskOutcome.SUCCESS) if kind is f.TaskEnded else (None,)
        fitting = [task for task in records if task.end in open_ends]
        if kind is f.TaskStarted:
            fitting = [task for task in fitting if not task.started]
        elif kind is a.RegistrationArrived:
            fitting = [task for task in fitting if task.task_attempt_id not in taken]
        if not fitting or self.dice.random() < 0.3:
            stage = self.dice.choice(self.stages()[-2:] or [2])
            alive = {entry.attempt.subtask for entry in self.entries() if entry.alive}
            partition = self.dice.choice([place for place in (0, 1) if place not in alive] or [0, 1])
            number = sum(task.partition == partition and task.stage_id == stage for task in records)
            fitting.append(TaskRecord(self.fresh, stage, partition, number))
        chosen = self.pick((fitting, [*records, TaskRecord(HUGE, 99, -1, 0)]), fits)
        assert isinstance(chosen, TaskRecord)
        return chosen

    def leading(self) -> list[type]:
        if self.operator is None or not self.stages():
            return [a.OperatorAdded if self.operator is None else f.JobStarted]
        kinds: list[type] = [f.TaskStarted, a.RegistrationArrived]
        kinds += [a.OperatorOpened, a.OperatorOpened] if self.entries(AttemptState.ACCEPTED) else []
        kinds += [a.OperatorEnded] if self.entries(AttemptState.READY) else []
        kinds += [f.TaskEnded] if self.entries(AttemptState.ENDING, AttemptState.FINISHED) else []
        kinds += [f.StatusReported, TimePassed] if self.operator.held else []
        finished = {entry.attempt.subtask for entry in self.entries(AttemptState.FINISHED)}
        return [*kinds, f.JobEnded] if len(finished) == 2 else kinds

    def state(self) -> Hashable:
        operator, row = self.operator, self.row()
        if operator is None or operator.run is None:
            return row, bool(self.machine._operators), operator is not None and operator.reset_due is not None
        held, run = frozenset(one.waits_for for one in operator.held.values()), operator.run
        flags = (run.barrier_failed is not None, operator.asked_again_at is not None)
        return row, frozenset(entry.state for entry in run.entries()), held, flags

    def judge(self, row: Any, input: Any, effects: Sequence[Any], error: Exception | None, changed: bool) -> None:
        """Check that each registration is answered once, or waits (H19), and that nothing begins after the end."""
        if isinstance(input, a.RegistrationArrived) and error is None:
            self.waiting.add(input.connection_id)
        for effect in effects:
            if isinstance(effect, a.AttemptAccepted | a.RefuseRegistration):
                self.waiting.remove(effect.connection_id)
        assert len(self.waiting) == sum(len(one.record.held) for one in self.machine._operators.values())
        if row == "ended":
            assert {type(effect) for effect in effects} <= {a.RefuseRegistration, a.ReportStale}
            assert self.machine.next_deadline() is None

    def wait(self, rounds: int = 80) -> None:
        super().wait(rounds if self.waiting else 8)
        assert not self.waiting, "a registration waits permanently"


WALKS = (GatewayWalk, SubtaskWalk, TrackerWalk, LedgerWalk)


@pytest.mark.parametrize("kind", WALKS)
def test_every_kind_of_input_reaches_every_row_of_the_table_and_every_effect_comes(kind: type[Walk]) -> None:
    """Take the same walks every time, and probe each state that none of them has reached before."""
    seen: Counter[Hashable] = Counter()
    states: set[Hashable] = set()
    wanted = {*product(kind.rows, kind.kinds), *kind.effects, *((ACTS, *cell) for cell in kind.acting)}
    for seed in range(150):
        walk = kind(seed)
        walk.seen = seen
        for _ in range(50):
            if (state := walk.state()) not in states:
                states.add(state)
                walk.probe()
            walk.step()
        if seed >= 14 and wanted <= seen.keys():
            break
    print(
        f"{seed + 1} walks, {len(states)} states, {sum(seen[cell] for cell in product(kind.rows, kind.kinds))} inputs"
    )
    missing = wanted - seen.keys()
    assert not missing, missing


@pytest.mark.parametrize("kind", WALKS)
@settings(max_examples=60, print_blob=True)
@given(numbers=st.lists(st.integers(0, 2**16), min_size=2, max_size=40))
def test_a_machine_takes_every_input_or_refuses_it_unchanged(kind: type[Walk], numbers: list[int]) -> None:
    # H3, H16, H19, H21, H26, H44, H48: each step has its own number, so a failure shrinks to the necessary steps
    first, *steps, last = numbers
    walk = kind(first)
    for number in steps:
        walk.dice.seed(number)
        walk.step()
    walk.dice.seed(last)
    walk.probe()
    walk.wait()
    walk.replay()


@cache
def told() -> str:
    """Return every input, effect and error of a few walks of each machine, one per line."""
    walks = [kind(seed) for kind in WALKS for seed in range(5)]
    for walk in walks:
        for _ in range(20):
            walk.step()
    return "\n".join(f"{input} {told}" for walk in walks for input, _, told in walk.history)


def test_a_machine_does_not_depend_on_the_order_of_hashes() -> None:
    program = "from tests.protocol.test_every_input import told; print(told())"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    root = Path(__file__).parents[2]
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert process.stdout.splitlines() == told().splitlines()
