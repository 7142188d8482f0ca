# SPDX-License-Identifier: Apache-2.0

"""A model of the coordinator's actor and of a user's coordinator, with checks of the calls that it receives.

Only this part is not a machine. It takes its mailbox in order, counts the events that it sends and receives for each
subtask's history, and cuts at the return of its snapshot, as ``CoordinatorActor`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.coordination.engine.coordinator import TakenEvents
from protocol.barrier_tracker import CollectRecorded, CoordinatorSnapshotTaken, RecordedCollected
from protocol.gateway.types import AnswerSubmitted, CutReached, EventSubmitted, ItemTaken, ReadyAnnounced
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import Positions, RestoreMode
from tests.exploration import vocabulary as v
from tests.exploration.scopes import Scope
from tests.exploration.subtask_end import REQUEST, event_down, event_up, is_event_up


@dataclass(frozen=True)
class Ready:
    attempt: ExecutionAttempt
    events_sent: Positions


@dataclass(frozen=True)
class Failed:
    attempt: ExecutionAttempt


@dataclass(frozen=True)
class Reset:
    subtask: int
    checkpoint_id: int


def read_counts(state: bytes) -> dict[int, tuple[int, int, int]]:
    """Return how many events the coordinator has received and sent, and how many requests answered, by subtask."""
    counts = {}
    for word in state.split():
        subtask, came, went, answered = map(int, word.replace(b"=", b":").split(b":"))
        counts[subtask] = came, went, answered
    return counts


class CoordinatorEnd:
    """See the module. ``live``: by slot, the attempts that it can exchange events with, and how often it has sent.

    ``prepared``: what it has prepared, as a two-phase sink does: the checkpoint of the cut, and the checkpoints that
    refer to it; ``dead``: the part that a reset has made useless; ``in_doubt`` and ``aborted``: checkpoints that a
    restart may restore, and whose discard was not reported to it.

    For the checks: ``told``: the last callback for each subtask; ``pending``: checkpoints requested of it.
    """

    def __init__(self, scope: Scope) -> None:
        self.subtasks = scope.subtasks
        self.to_hear, self.to_send = scope.events_up, scope.events_down
        self.input = 0
        self.several = scope.runs > 0
        self.cut_in: dict[int, tuple[int, bytes]] = {}  # by checkpoint that may be restored: input and state
        self.greets = scope.greets
        self.batch = scope.mode is RestoreMode.BATCH
        self.concurrent = scope.concurrent
        self.tolerant = scope.tolerant
        self.defers = scope.defers
        self.suspected: set[int] = set()  # slots
        self.over: set[int] = set()  # slots
        self.deferred: dict[int, int] = {}  # by slot: the request that waits for its answer
        self.urgent = scope.urgent
        self.parts, self.table = scope.parts, scope.table
        self.taken = TakenEvents(self.table)
        self.live: dict[int, ExecutionAttempt] = {}
        self.handed: dict[int, int] = {}
        self.received: dict[int, int] = dict.fromkeys(map(v.Subtask, range(scope.subtasks)), 0)
        self.sent: dict[int, int] = dict.fromkeys(map(v.Subtask, range(scope.subtasks)), 0)
        self.answered: dict[int, int] = dict.fromkeys(map(v.Subtask, range(scope.subtasks)), 0)
        self.unheld = scope.unheld
        self.snapshots: dict[int, bytes] = {}
        self.told: dict[int, tuple[str, int]] = dict.fromkeys(map(v.Subtask, range(scope.subtasks)), ("reset", -1))
        self.pending: set[int] = set()
        self.asked = -1
        self.complete = -1
        self.prepared: dict[int, tuple[int, ...]] = {}
        self.dead: dict[int, tuple[int, ...]] = {}
        self.in_doubt: set[int] = set()
        self.aborted: set[int] = set()

    # --- inputs ---

    def step(self, message: Any) -> list[v.Output]:
        out: list[v.Output] = []
        match message:
            case v.Send(slot):
                self._send(slot, out)
            case v.Settle(slot):
                self._answer(slot, self.deferred.pop(v.Slot(slot)), out)
            case v.CancellationCame(slot, request_id):
                self._cancel(slot, request_id, out)
            case v.EventCame():
                self._hear(message, out)
            case v.Snapshot(checkpoint_id, target):
                self._snapshot(checkpoint_id, target, out)
            case CollectRecorded(checkpoint_id):
                collected = self.taken.collect(checkpoint_id)
                out.append((v.To.TRACKER, RecordedCollected(checkpoint_id, collected)))
            case v.CheckpointEnded(checkpoint_id, completed, in_doubt):
                self._end_checkpoint(checkpoint_id, completed)
                self.taken.drop(checkpoint_id)
                if not completed:
                    self.aborted.add(checkpoint_id)
                if in_doubt:
                    self.in_doubt.add(checkpoint_id)
            case v.Discarded(checkpoint_id):
                v.demand(
                    checkpoint_id in self.aborted, "H64", f"{checkpoint_id} is discarded, and not aborted or twice"
                )
                self.aborted.remove(checkpoint_id)
                self.in_doubt.discard(checkpoint_id)
                self._clean_up(out)
            case v.SavepointEnded(checkpoint_id):
                self.pending.discard(checkpoint_id)
            case v.Suspected(slot, suspected):
                self._suspect(slot, suspected)
            case v.AttemptFinished(slot):
                self._finish(slot)
            case _:
                self._hear_lifecycle(message, out)
        return out

    def _send(self, slot: int, out: list[v.Output]) -> None:
        attempt = self.live[slot]
        place = self.sent[attempt.subtask]
        payload = event_down(attempt.task_attempt_id, place)
        self.sent[attempt.subtask] += 1
        submitted = EventSubmitted(
            self.handed[slot], payload, self.tolerant, self.urgent and place % 2 == 0, place % self.parts
        )
        out.append((v.To.GATEWAYS + slot, submitted))
        self.handed[slot] += 1

    def _hear(self, event: v.EventCame, out: list[v.Output]) -> None:
        attempt = self.live.get(event.slot)
        if attempt is None:
            return  # from an attempt that is over: dropped in one place (H3)
        subtask = attempt.subtask
        if self.table.outside[event.part]:
            self._permit(event, attempt, out)
            return
        expected = event_up(subtask, self.received[subtask])
        v.demand(
            is_event_up(event.payload, expected), "H30", f"{event.payload!r} comes from {attempt}, not {expected!r}"
        )
        v.demand(event.is_request == event.payload.startswith(REQUEST), "H73", f"{event.payload!r} comes as {event}")
        v.demand(event.sender in (None, subtask), "H52", f"{event.payload!r} comes in the name of {event.sender}")
        payload, part, before = event.payload, self.received[subtask] % self.parts, event.after_snapshot
        v.demand(event.part == part, "H150", f"{payload!r} comes from part {event.part}, not {part}")
        self.taken.take(attempt, subtask, payload, part, is_request=event.is_request, after_snapshot=before)
        self.received[subtask] += 1
        place, expected_place = self.taken.position(subtask, part), -(-(self.received[subtask] - part) // self.parts)
        v.demand(place == expected_place, "H32", f"{payload!r} is said to be event {place} of part {part}")
        self.taken.taken()
        if event.request_id is not None:
            if self.defers:
                self.deferred[v.Slot(event.slot)] = event.request_id
            else:
                self._answer(event.slot, event.request_id, out)
        out.append((v.To.GATEWAYS + event.slot, ItemTaken(event.seq, event.part)))

    def _permit(self, event: v.EventCame, attempt: ExecutionAttempt, out: list[v.Output]) -> None:
        """Give a permit. It is a fact about this attempt, so it comes from no checkpoint, and is in none (H152)."""
        v.demand(event.sender is None, "H152", f"{event.payload!r} is restored")
        assert event.request_id is not None
        before = event.after_snapshot
        self.taken.take(attempt, None, event.payload, event.part, is_request=True, after_snapshot=before)
        self.taken.taken()
        out.append((v.To.GATEWAYS + event.slot, AnswerSubmitted(event.request_id, "", b"permit")))
        out.append((v.To.GATEWAYS + event.slot, ItemTaken(event.seq, event.part)))

    def _cancel(self, slot: int, request_id: int, out: list[v.Output]) -> None:
        """Answer what was deferred for this request, unless that has happened (H85)."""
        if self.deferred.get(slot) == request_id:
            self._answer(slot, self.deferred.pop(v.Slot(slot)), out)

    def _answer(self, slot: int, request_id: int, out: list[v.Output]) -> None:
        self.answered[self.live[slot].subtask] += 1
        out.append((v.To.GATEWAYS + slot, AnswerSubmitted(request_id, "", b"answer")))

    def _snapshot(self, checkpoint_id: int, target: str, out: list[v.Output]) -> None:
        v.demand(checkpoint_id > self.asked, "H43", f"asked for checkpoint {checkpoint_id} after {self.asked}")
        v.demand(len(self.pending) < self.concurrent, "H43", f"{checkpoint_id} is asked for beside {self.pending}")
        self.asked = checkpoint_id
        self.pending.add(checkpoint_id)
        self.prepared[checkpoint_id] = ()
        self.prepared = {cut: (*referring, checkpoint_id) for cut, referring in self.prepared.items()}
        counts = self.received, self.sent, self.answered
        words = [b"%d=%d:%d:%d" % (s, *[count[s] for count in counts]) for s in range(self.subtasks)]
        state = self.snapshots[checkpoint_id] = b" ".join(words)
        if self.several:
            self.cut_in[checkpoint_id] = self.input, state
        if self.unheld:
            self.taken.record(checkpoint_id)
        out.extend((v.To.GATEWAYS + slot, CutReached(checkpoint_id, target)) for slot in sorted(self.live))
        out.append((v.To.TRACKER, CoordinatorSnapshotTaken(checkpoint_id, state, self.taken.at_this_moment())))

    def _end_checkpoint(self, checkpoint_id: int, completed: bool) -> None:
        if completed:
            v.demand(checkpoint_id in self.pending, "H40", f"{checkpoint_id} is complete, and was never asked for")
            v.demand(checkpoint_id > self.complete, "H4", f"{checkpoint_id} is complete after {self.complete}")
            self.complete = checkpoint_id
            self.prepared = {cut: referring for cut, referring in self.prepared.items() if cut > checkpoint_id}
        self.pending.discard(checkpoint_id)
        for other in [n for n in self.snapshots if n != self.complete and n not in self.pending]:
            del self.snapshots[other]
        self.cut_in = {n: one for n, one in self.cut_in.items() if n >= self.complete}

    # --- attempts (H10) ---

    def _hear_lifecycle(self, message: Any, out: list[v.Output]) -> None:
        match message:
            case Ready(attempt, events_sent):
                last, number = self.told[attempt.subtask]
                v.demand(last == "reset", "H10", f"{attempt} is ready after {last} {number}")
                v.demand(attempt.attempt > number, "H2", f"{attempt} is ready after number {number}")
                self.told[attempt.subtask] = "ready", attempt.attempt
                slot = v.Slot(attempt.task_attempt_id - 1)
                self.live[slot] = attempt
                self.handed[slot] = 0
                self.taken.begin(attempt, events_sent)
                if self.greets and self.sent[attempt.subtask] < self.to_send:
                    self._send(slot, out)
                out.append((v.To.GATEWAYS + slot, ReadyAnnounced()))
            case Failed(attempt):
                last, number = self.told[attempt.subtask]
                v.demand(last == "reset" or number == attempt.attempt, "H10", f"{attempt} fails after {last} {number}")
                v.demand(last != "failed", "H10", f"{attempt} fails twice")
                self.told[attempt.subtask] = "failed", attempt.attempt
                self._forget(attempt.task_attempt_id - 1)
                self.taken.forget(attempt)
            case Reset(subtask, checkpoint_id):
                last, number = self.told[subtask]
                v.demand(last == "failed", "H10", f"subtask {subtask} is reset after {last} {number}")
                self._reset(subtask, checkpoint_id)
                self._drop_prepared(out)
            case v.InputIs(input):
                self.input = input
            case v.RunIsOver():
                for slot_of_run, attempt in list(self.live.items()):
                    self.taken.forget(attempt)
                    self._forget(slot_of_run)
            case v.ResetAll(checkpoint_id, begins_again):
                text = f"the coordinator has input {self.input}, uses positions of {checkpoint_id}: {begins_again}"
                same = checkpoint_id >= 0 and self.cut_in[checkpoint_id][0] == self.input
                v.demand(begins_again == same, "H174", text)
                v.demand(not self.live, "H15", f"the operator is reset while {self.live} live")
                for subtask in self.told:
                    self._reset(subtask, checkpoint_id)
                self._drop_prepared(out)
            case _:
                raise AssertionError(f"beyond what is explored: {message}")

    def _suspect(self, slot: int, suspected: bool) -> None:
        """Hints come alternately, and count only of attempts that are not over (H87)."""
        attempt = self.live.get(slot)
        if attempt is None:
            v.demand(slot in self.over, "H87", f"a hint about slot {slot}, which is not ready")
            return
        v.demand(suspected != (slot in self.suspected), "H87", f"{attempt} is suspected, or not, twice: {suspected}")
        self.suspected ^= {v.Slot(slot)}

    def _finish(self, slot: int) -> None:
        """A success: after everything that the attempt sent, and only of one that is alive (H86)."""
        attempt = self.live.get(slot)
        v.demand(attempt is not None, "H86", f"the attempt in slot {slot} finishes, and is not known to be alive")
        assert attempt is not None
        last, number = self.told[attempt.subtask]
        v.demand((last, number) == ("ready", attempt.attempt), "H86", f"{attempt} finishes after {last} {number}")
        heard = self.received[attempt.subtask]
        to_hear = self.to_hear * (self.input + 1)
        v.demand(heard == to_hear, "H86", f"{attempt} finishes after {heard} of {to_hear} events")
        self.told[attempt.subtask] = "finished", attempt.attempt
        self._forget(slot)

    def _clean_up(self, out: list[v.Output]) -> None:
        """Destroy prepared parts that no checkpoint can need any more (H64)."""
        if not self.in_doubt:
            out.extend((v.To.OUTPUT, v.Destroyed(cut, referring)) for cut, referring in sorted(self.dead.items()))
            self.dead.clear()

    def _drop_prepared(self, out: list[v.Output]) -> None:
        self.dead |= self.prepared
        self.prepared.clear()
        self._clean_up(out)

    def _forget(self, slot: int) -> None:
        self.live.pop(slot, None)
        self.handed.pop(slot, None)
        self.deferred.pop(slot, None)
        self.suspected.discard(slot)
        self.over.add(v.Slot(slot))

    def _reset(self, subtask: int, checkpoint_id: int) -> None:
        number = self.told[subtask][1]
        expected = -1 if self.batch else self.complete
        v.demand(checkpoint_id == expected, "H18", f"reset to {checkpoint_id}, told complete was {expected}")
        v.demand(not self.pending, "H16", f"subtask {subtask} is reset while {self.pending} are pending")
        self.told[subtask] = "reset", number
        counts = read_counts(self.snapshots[checkpoint_id]) if checkpoint_id >= 0 else {}
        at_cut = counts.get(subtask, (0, 0, 0))
        self.received[subtask], self.sent[subtask], self.answered[subtask] = at_cut

    def successor(self, scope: Scope, checkpoint_id: int) -> CoordinatorEnd:
        """The coordinator of the next driver, which is restored before its first run."""
        end = CoordinatorEnd(scope)
        end.input = -1
        if checkpoint_id >= 0:
            end.complete = end.asked = checkpoint_id
            end.input, end.snapshots[checkpoint_id] = end.cut_in[checkpoint_id] = self.cut_in[checkpoint_id]
            for subtask in end.told:
                end._reset(subtask, checkpoint_id)
        return end

    def facts(self) -> CoordinatorFacts:
        return CoordinatorFacts(self)


class CoordinatorFacts:
    """The parts of the coordinator's state that steps and the end depend on."""

    __slots__ = ("aborted", "complete", "counts", "deferred", "live", "pending", "senders", "suspected", "told")

    def __init__(self, end: CoordinatorEnd) -> None:
        to_send = end.to_send * (end.input + 1)
        wanting = [slot for slot, attempt in end.live.items() if end.sent[attempt.subtask] < to_send]
        self.senders = tuple(sorted(wanting))
        self.deferred = tuple(sorted(end.deferred))
        self.suspected = frozenset(end.suspected)
        self.live = frozenset(end.live)
        self.pending = frozenset(end.pending)
        self.aborted = frozenset(end.aborted)
        self.complete = end.complete
        self.counts = {subtask: (end.received[subtask], end.sent[subtask]) for subtask in range(end.subtasks)}
        self.told = dict(end.told)
