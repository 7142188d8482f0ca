# SPDX-License-Identifier: Apache-2.0

"""Every input in every phase of a barrier tracker: its table, cell by cell (H10, H16, H40, H43-H45)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from random import Random
from typing import Any, ClassVar

from hypothesis import given as hypothesis_given
from hypothesis import settings

from protocol import attempts as a
from protocol import barrier_tracker as b
from protocol.attempts.types import FailureKind, FailureReason
from protocol.barrier_tracker.pending import LEGAL, STEP_OF, PendingCheckpoint, Step, Verdict
from protocol.errors import LocalProtocolError
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import HeldEvent, RestoreMode, SubtaskState
from tests.protocol.every_input import HUGE, WANDERINGS, Cell, Given, Walk, explore, members, wander

PARALLELISM = 3
SUBTASK_WORDS = (b.SubtaskClosed, b.GatewayDrained, b.SubtaskAcknowledged, b.SubtaskDeclined)
OTHERS = tuple(kind for kind in members(b.TrackerInput) if kind not in LEGAL)
NEWS = (a.SubtaskReady, a.SubtaskFinished, b.SubtaskFinalState)
REASON = FailureReason(FailureKind.KILLED, "")
STRANGER = ExecutionAttempt("words", 1, 77, 7777)

TrackerGiven = Given[b.TrackerInput, b.TrackerEffect]


class TrackerWalk(Walk[b.TrackerInput, b.TrackerEffect]):
    kinds = members(b.TrackerInput)
    errors = (LocalProtocolError,)
    weights: ClassVar = {
        a.OperatorReset: 0.15,
        a.RunEnded: 0.15,
        a.SubtaskFailed: 0.3,
        a.SubtaskFinished: 0.4,
        b.SubtaskFinalState: 0.4,
        b.AbortRequested: 0.3,
        b.CheckpointTriggered: 2.0,
        b.TimePassed: 0.5,
        b.SubtaskDeclined: 0.3,
    }
    machine: b.BarrierTracker

    def build(self) -> b.BarrierTracker:
        dice = self.dice
        config = b.CheckpointConfig(
            10.0,
            dice.choice((0, 2, 50)),
            dice.choice(list(RestoreMode)),
            dice.choice((None, 4.0, 0.1)),
            dice.choice((0.0, 0.7)),
            dice.choice((1, 2, 3)),
        )
        snapshot = b.SubtaskSnapshot((SubtaskState(0, b"0"),), (HeldEvent(0, b"h"),), 5)
        restored = b.CompletedCheckpoint(4, dice.choice((PARALLELISM, 2)), b"c", {0: snapshot})
        self.next_task = 100
        self.over: set[int] = set()
        return b.BarrierTracker("words", PARALLELISM, config, restored if dice.random() < 0.5 else None)

    def fork(self) -> TrackerWalk:
        fork = super().fork()
        assert isinstance(fork, TrackerWalk)
        fork.over = set(self.over)
        return fork

    # --- what fits ---

    def known(self) -> list[Any]:
        return list(self.machine._attempts.by_task.values())

    def gone(self) -> list[ExecutionAttempt]:
        """Return attempts that no input may name: one that is over, and an unknown one."""
        return [STRANGER, *(ExecutionAttempt("words", 0, 0, task) for task in sorted(self.over)[-1:])]

    def in_turn(self, kind: type) -> Iterator[tuple[ExecutionAttempt, int]]:
        """Return which attempts may send an input of this kind, and about which checkpoint."""
        for n, pending in self.machine._under_way.pending.items():
            if LEGAL[kind][list(b.Phase).index(pending.phase)] is Verdict.ACT:
                for part in pending.parts.values():
                    if part.step is STEP_OF[kind] or (kind is b.SubtaskDeclined and part.step is not Step.SETTLED):
                        yield part.attempt, n

    def out_of_turn(self) -> list[tuple[ExecutionAttempt, int]]:
        attempts = [*(known.attempt for known in self.known()), *self.gone()]
        others = () if self.machine.pending_ids and self.dice.random() < 0.6 else (self.stale_id(), -1)
        return [(attempt, n) for attempt in attempts for n in (*self.machine.pending_ids, *others)]

    def stale_id(self) -> int:
        return self.dice.choice((self.machine._highest_id, self.machine._highest_id + 1, HUGE))

    def checkpoint(self, fits: bool, *phases: b.Phase) -> int:
        pending = self.machine._under_way.pending
        fitting = [n for n, checkpoint in pending.items() if checkpoint.phase in phases]
        return self.one_of(fitting, [*(n for n in pending if n not in fitting), self.stale_id(), -1], fits)

    def draw(self, kind: type, fits: bool) -> b.TrackerInput:
        if kind in SUBTASK_WORDS:
            return self.draw_word(kind, fits)
        if kind in (a.AttemptAccepted, a.SubtaskFailed, *NEWS):
            return self.draw_attempt(kind, fits)
        dice, machine = self.dice, self.machine
        highest = machine._highest_id
        if kind is b.CheckpointTriggered:
            return b.CheckpointTriggered(self.one_of((highest + 1,), (highest, -1, 0), fits), dice.random() < 0.25)
        if kind is b.AbortRequested:
            queued = machine._under_way.queued
            waiting = [] if queued is None else [queued[0].checkpoint_id]
            return b.AbortRequested(self.one_of([*machine.pending_ids, *waiting], (self.stale_id(), -1), fits), "no")
        if kind is a.SubtaskReset:
            return a.SubtaskReset("words", self.one_of(sorted(machine._attempts.resets_owed), (0, 1, 2), fits))
        if kind is b.CoordinatorSnapshotTaken:
            taken = {known.attempt.task_attempt_id: known.events_restored for known in self.known()}
            if dice.random() < 0.1:
                taken = {task: count + dice.choice((0, 1, HUGE)) for task, count in taken.items()}
            return b.CoordinatorSnapshotTaken(self.checkpoint(fits, b.Phase.SNAPSHOTTING), b"c", taken)
        if kind is b.CoordinatorSnapshotFailed:
            return b.CoordinatorSnapshotFailed(self.checkpoint(fits, b.Phase.SNAPSHOTTING), "no")
        if kind is b.CheckpointStored:
            return b.CheckpointStored(self.checkpoint(fits, b.Phase.STORING))
        if kind is b.CheckpointStoreFailed:
            return b.CheckpointStoreFailed(self.checkpoint(fits, b.Phase.STORING), "no")
        if kind is b.CheckpointDiscarded:
            others = [*machine.pending_ids, self.stale_id(), -1]
            return b.CheckpointDiscarded(self.one_of(machine.in_doubt_ids, others, fits))
        if kind is b.TimePassed:
            deadline = machine.next_deadline()
            if fits and deadline is not None:
                self.now = max(self.now, deadline)
            return b.TimePassed()
        simple: dict[type, b.TrackerInput] = {
            a.OperatorReset: a.OperatorReset("words", "it failed"),
            a.RunEnded: a.RunEnded("words", 1, dice.random() < 0.5),
        }
        return simple[kind]

    def draw_word(self, kind: type, fits: bool) -> b.TrackerInput:
        attempt, n = self.one_of(self.in_turn(kind), self.out_of_turn(), fits)
        if kind is b.SubtaskClosed:
            return b.SubtaskClosed(attempt, n)
        if kind is b.GatewayDrained:
            return b.GatewayDrained(attempt, n)
        if kind is b.SubtaskDeclined:
            return b.SubtaskDeclined(attempt, n, "no")
        return b.SubtaskAcknowledged(attempt, n, b"s", (HeldEvent(attempt.subtask, b"h"),), self.sent_by(attempt))

    def sent_by(self, attempt: ExecutionAttempt) -> int:
        """Draw the number of restored events, which the coordinator has taken; rarely another number."""
        known = self.machine._attempts.get(attempt)
        return (known.events_restored if known else 0) + (self.dice.random() < 0.05)

    def draw_attempt(self, kind: type, fits: bool) -> b.TrackerInput:
        dice, known = self.dice, self.known()
        if kind is a.AttemptAccepted:
            alive = {one.attempt.subtask for one in known}
            subtask = dice.choice([s for s in range(PARALLELISM) if s not in alive] or range(PARALLELISM))
            self.next_task += 1
            new = ExecutionAttempt("words", subtask, self.next_task, self.next_task)
            places = (ExecutionAttempt("words", place, 1, 9999) for place in (-1, PARALLELISM, HUGE))
            attempt = self.one_of((new,), (*(one.attempt for one in known), *places), fits)
            mode = dice.choice(list(RestoreMode)) if dice.random() < 0.1 else self.mode()
            return a.AttemptAccepted(attempt, mode, 1, attempt.task_attempt_id)
        if kind is a.SubtaskFailed:
            return a.SubtaskFailed(self.one_of((one.attempt for one in known), self.gone(), fits), REASON)
        if kind is a.SubtaskReady:
            fitting = [one.attempt for one in known if not one.ready]
            return a.SubtaskReady(self.one_of(fitting, [*(one.attempt for one in known), *self.gone()], fits))
        if kind is a.SubtaskFinished:
            fitting = [one.attempt for one in known if one.ready and not one.finished]
            return a.SubtaskFinished(self.one_of(fitting, [*(one.attempt for one in known), *self.gone()], fits))
        fitting = [one.attempt for one in known if one.final is None]
        attempt = self.one_of(fitting, [*(one.attempt for one in known), *self.gone()], fits)
        return b.SubtaskFinalState(attempt, b"f", self.sent_by(attempt))

    def mode(self) -> RestoreMode:
        return self.machine._mode

    def follow(self) -> b.TrackerInput | None:
        """Draw the next step of a run that takes checkpoints."""
        known = self.known()
        ready = [one for one in known if one.ready]
        steps: list[type] = [] if len(known) >= PARALLELISM else [a.AttemptAccepted]
        steps += [a.SubtaskReady] if len(ready) < len(known) else []
        steps += [a.SubtaskReset] if self.machine._attempts.resets_owed else []
        steps += [a.OperatorReset] if self.machine._under_way.halted else []
        steps += [b.CheckpointTriggered] if ready and not self.machine._under_way.queued else []
        phases = {pending.phase for pending in self.machine._under_way.pending.values()}
        for phase, kind in (
            (b.Phase.CLOSING, b.SubtaskClosed),
            (b.Phase.SNAPSHOTTING, b.CoordinatorSnapshotTaken),
            (b.Phase.DRAINING, b.GatewayDrained),
            (b.Phase.ACKNOWLEDGING, b.SubtaskAcknowledged),
            (b.Phase.STORING, b.CheckpointStored),
        ):
            steps += [kind, kind] if phase in phases else []
        return self.draw(self.dice.choice(steps), True) if steps else None

    # --- the table ---

    def state(self) -> Hashable:
        machine, under_way = self.machine, self.machine._under_way
        flags = (under_way.queued is not None, bool(under_way.withheld), under_way.halted, machine.final_pending)
        attempts = frozenset((one.ready, one.finished) for one in self.known())
        pending = frozenset(
            (p.phase, frozenset(part.step for part in p.parts.values())) for p in under_way.pending.values()
        )
        return pending, flags, attempts, bool(machine._attempts.copies())

    def pending(self, n: int) -> PendingCheckpoint | None:
        return self.machine._under_way.pending.get(n)

    def cells(self, input: b.TrackerInput) -> list[Cell]:
        kind = type(input)
        if kind not in LEGAL:
            known = getattr(input, "attempt", None)
            if isinstance(input, b.CheckpointDiscarded):
                return [("other", self.machine.phase, kind), ("doubt", self.doubt(input))]
            return [("other", self.machine.phase, kind)] + ([] if known is None else [("news", self.standing(input))])
        word: Any = input
        pending = self.pending(word.checkpoint_id)
        phase = b.Phase.IDLE if pending is None else pending.phase
        if kind not in SUBTASK_WORDS or pending is None:
            return [("word", phase, kind)]
        part = pending.parts.get(word.attempt.subtask)
        if part is None or part.attempt != word.attempt:
            return [("stale", phase, kind, "no part")]
        if part.step.value > STEP_OF[kind].value:
            return [("stale", phase, kind, "said before")]
        return [("word", phase, kind)]

    def standing(self, input: Any) -> Hashable:
        """Return whether the attempt of an input is known, and whether the input repeats a known fact."""
        known = self.machine._attempts.by_task.get(input.attempt.task_attempt_id)
        if known is None or not isinstance(input, NEWS):
            return type(input), known is not None
        said = {
            a.SubtaskReady: known.ready,
            a.SubtaskFinished: known.finished,
            b.SubtaskFinalState: known.final is not None,
        }[type(input)]
        return type(input), "repeated" if said else True

    def doubt(self, input: b.CheckpointDiscarded) -> str:
        if input.checkpoint_id in self.machine.in_doubt_ids:
            return "in doubt"
        return "pending" if input.checkpoint_id in self.machine.pending_ids else "neither"

    def judge(self, cells: list[Cell], given: TrackerGiven) -> None:
        stale = given.kinds == [b.ReportStale]
        assert stale or b.ReportStale not in given.kinds
        if stale:  # H3, H44
            assert not given.changed()
        for cell in cells:
            match cell:
                case ("word", phase, kind):
                    self.judge_word(LEGAL[kind][list(b.Phase).index(phase)], given)
                case ("stale", _, _, _):
                    assert stale
                case ("news", (kind, standing)) if kind in NEWS:
                    assert stale == (standing is not True)
                case ("doubt", standing):  # H64
                    assert stale == (standing == "neither")
                    assert (given.error is not None) == (standing == "pending")
                case ("news", (a.AttemptAccepted, True)):
                    assert given.error is not None  # H1
        self.judge_order(given)
        self.judge_names(given)

    def judge_word(self, verdict: Verdict, given: TrackerGiven) -> None:
        stale, refused = given.kinds == [b.ReportStale], given.error is not None
        assert stale == (verdict is Verdict.STALE)
        assert refused == (verdict is Verdict.ILLEGAL)
        if verdict is Verdict.ACT:
            assert given.changed()
        elif verdict is Verdict.ABORT:
            assert b.NotifyCheckpointAborted in given.kinds

    def judge_order(self, given: TrackerGiven) -> None:
        """Check that pending checkpoints are aborted before the failure is announced (H16)."""
        tells = (
            a.SubtaskFailed,
            b.SubtaskResetToCheckpoint,
            b.OperatorResetToCheckpoint,
            a.RunEnded,
            b.RaiseGlobalFailure,
        )
        told = False
        for effect in given.effects:
            told = told or isinstance(effect, tells)
            assert not (told and isinstance(effect, b.NotifyCheckpointAborted)), "aborted behind the news"

    def judge_names(self, given: TrackerGiven) -> None:
        """Check that no effect concerns a checkpoint or an attempt that is over (H3, H44)."""
        input: Any = given.input
        if isinstance(input, a.SubtaskFailed):
            self.over.add(input.attempt.task_attempt_id)
        if isinstance(input, a.OperatorReset | a.RunEnded):
            kept = set(self.machine._attempts.by_task)
            self.over |= {
                g.input.attempt.task_attempt_id for g in self.history if isinstance(g.input, a.AttemptAccepted)
            }
            self.over -= kept
        ended: set[int] = set()
        in_doubt: set[int] = set()
        for effect in given.effects:
            match effect:
                case a.SubtaskReady(attempt) | b.CloseSubtask(attempt, _) | b.SendBarrier(attempt, _):
                    assert attempt.task_attempt_id not in self.over
                    assert self.machine._attempts.get(attempt)
                case b.NotifyCheckpointDiscarded(n):
                    assert n not in self.machine.in_doubt_ids
                    in_doubt.discard(n)
                case (
                    b.NotifyCheckpointAborted(n, _)
                    | b.NotifyCheckpointComplete(n)
                    | b.EndSavepoint(n)
                    | b.RefuseCheckpoint(n, _)
                ):
                    assert n not in ended
                    assert n not in self.machine.pending_ids
                    ended.add(n)
                    if isinstance(effect, b.NotifyCheckpointAborted) and effect.in_doubt:
                        in_doubt.add(n)
                case b.SnapshotCoordinator(n) | b.StoreCheckpoint(b.CompletedCheckpoint(n)):
                    assert n in self.machine.pending_ids
                case b.DiscardCheckpoint(n, savepoint):
                    assert n in ended
                    assert savepoint or n in in_doubt
        assert in_doubt <= set(self.machine.in_doubt_ids)


ALL_CELLS: list[Cell] = [
    *(("word", phase, kind) for phase in b.Phase for kind in LEGAL),
    *(("other", phase, kind) for phase in b.Phase for kind in OTHERS),
    *(("stale", phase, kind, "no part") for phase in b.Phase if phase is not b.Phase.IDLE for kind in SUBTASK_WORDS),
    ("stale", b.Phase.CLOSING, b.SubtaskClosed, "said before"),
    ("stale", b.Phase.DRAINING, b.GatewayDrained, "said before"),
    ("stale", b.Phase.ACKNOWLEDGING, b.SubtaskAcknowledged, "said before"),
    *(("stale", b.Phase.STORING, kind, "said before") for kind in SUBTASK_WORDS),
    *(("doubt", standing) for standing in ("in doubt", "pending", "neither")),
    *(("news", (kind, standing)) for kind in NEWS for standing in (False, True, "repeated")),
    *(("news", (kind, known)) for kind in (a.AttemptAccepted, a.SubtaskFailed) for known in (False, True)),
]


def test_every_input_of_a_tracker_has_a_generator() -> None:
    walk = TrackerWalk(Random(1))
    assert set(LEGAL) <= set(TrackerWalk.kinds)
    for kind in TrackerWalk.kinds:
        for fits in (True, False):
            assert type(walk.draw(kind, fits)) is kind


def test_no_cell_of_the_trackers_table_is_left_out() -> None:
    reachable = [cell for cell in ALL_CELLS if cell not in UNREACHABLE]
    seen = explore(TrackerWalk, reachable, members(b.TrackerEffect))
    assert not UNREACHABLE & seen.cells.keys()


# While a checkpoint is being stored, every part is settled, so each message of a subtask repeats one or comes from an
# unknown attempt. The part of a draining subtask has closed.
UNREACHABLE = {
    *(("word", b.Phase.STORING, kind) for kind in SUBTASK_WORDS),
    *(("word", phase, b.SubtaskClosed) for phase in b.Phase if phase not in (b.Phase.IDLE, b.Phase.CLOSING)),
    ("word", b.Phase.ACKNOWLEDGING, b.GatewayDrained),
}


@settings(max_examples=100, print_blob=True)
@hypothesis_given(WANDERINGS)
def test_a_tracker_takes_every_input_or_refuses_it_unchanged(numbers: list[int]) -> None:
    # H3, H16, H44, H48
    wander(TrackerWalk, numbers)
