"""A small world around one barrier tracker: gateways, coordinator and storage, each with its own ordered way to it.

What one of them says arrives in its order; between them, everything may overtake everything. Events are counts: an
attempt sends while its valve is open, and the coordinator has taken them all when the closes are in (H40). Now and then
one is lost on the way, and then the checkpoint must not complete (H32). The world knows only the contract; it checks
what the tracker asks for as it is asked.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from random import Random

from protocol.attempts import (
    AttemptAccepted,
    OperatorReset,
    RunEnded,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.attempts.types import FailureKind, FailureReason
from protocol.barrier_tracker import (
    AbortRequested,
    BarrierTracker,
    CheckpointConfig,
    CheckpointDiscarded,
    CheckpointStored,
    CheckpointStoreFailed,
    CheckpointTriggered,
    CloseSubtask,
    CompletedCheckpoint,
    CoordinatorSnapshotFailed,
    CoordinatorSnapshotTaken,
    DiscardCheckpoint,
    EndSavepoint,
    GatewayDrained,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NotifyCheckpointDiscarded,
    OperatorResetToCheckpoint,
    RaiseGlobalFailure,
    RefuseCheckpoint,
    ReopenSubtask,
    ReportStale,
    RestoreAttempt,
    SendBarrier,
    SnapshotCoordinator,
    StoreCheckpoint,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    SubtaskFinalState,
    SubtaskResetToCheckpoint,
    TimePassed,
    TrackerEffect,
    TrackerInput,
    TriggerCheckpoint,
)
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import RestoreMode

KILLED = FailureReason(FailureKind.KILLED, "")


@dataclass
class Task:
    """One execution attempt. ``closed``: the checkpoints that close its valve."""

    attempt: ExecutionAttempt
    restored: int = 0
    sent: int = 0
    ready: bool = False
    told: bool = False
    finished: bool = False
    closed: set[int] = field(default_factory=set)


@dataclass
class Checkpoint:
    """What the world knows of one that was triggered. Attempts by task id."""

    savepoint: bool
    asked_to_close: set[int] = field(default_factory=set)
    ended_instead: set[int] = field(default_factory=set)
    drained: set[int] = field(default_factory=set)
    states: dict[int, bytes] = field(default_factory=dict)  # by subtask: what its part must be
    snapshot_asked: bool = False
    cut: bool = False
    torn: bool = False
    durable: bool = False
    answer: str = ""
    written: bool = False
    in_doubt: bool = False
    discarded: bool = False


class World:
    """See the module. Everything comes from the seed."""

    def __init__(self, seed: int, concurrent_max: int, parallelism: int = 3) -> None:
        self.random = Random(seed)
        self.parallelism = parallelism
        self.concurrent_max = concurrent_max
        config = CheckpointConfig(20.0, 1, RestoreMode.STREAMING, 5.0, 1.0, concurrent_max)
        self.tracker = BarrierTracker("words", parallelism, config)
        self.now = 0.0
        self.tasks: dict[int, Task] = {}  # alive, by task id
        self.attempts: dict[int, ExecutionAttempt] = {}  # all that ever were
        self.owed: set[int] = set()  # subtasks that wait for their reset
        self.operator_owed = False
        self.next_id = 1
        self.ways: dict[object, deque[TrackerInput]] = defaultdict(deque)
        self.to_snapshot: deque[int] = deque()
        self.due = False  # one was asked for, and gets its id in time
        self.checkpoints: dict[int, Checkpoint] = {}
        self.point: CompletedCheckpoint | None = None  # the last one whose completion was told
        self.last_cut = 0
        self.were_pending: set[int] = set()  # before the input that is being answered
        self.kinds: dict[str, int] = defaultdict(int)
        self.story: list[str] = []

    # --- what happens -------------------------------------------------------------------------------------

    def tell(self, input: TrackerInput) -> None:
        self.story.append(f"{self.now:7.2f}  {input}")
        self.were_pending = set(self.tracker.pending_ids)
        self.note(input)
        effects = self.tracker.handle(input, self.now)
        self.tracker.check_invariants()
        for effect in effects:
            self.story.append(f"             {effect}")
            self.kinds[type(effect).__name__] += 1
            self.carry_out(effect)
        self.check_abort_first(effects)
        self.check_doubt()
        assert len(self.tracker.pending_ids) <= self.concurrent_max  # H43

    def note(self, input: TrackerInput) -> None:
        """What the world holds the tracker to from here on."""
        match input:
            case GatewayDrained(attempt, n):
                self.checkpoints[n].drained.add(attempt.task_attempt_id)
            case SubtaskAcknowledged(attempt, n, state) if attempt.task_attempt_id in self.tasks:
                self.checkpoints[n].states[attempt.subtask] = state
            case CoordinatorSnapshotTaken(n):
                self.checkpoints[n].cut = True
            case CheckpointStored(n):
                self.checkpoints[n].durable = True
            case _:
                pass

    def check_doubt(self) -> None:
        """H64: in doubt until it is discarded or superseded, and not a moment longer."""
        completed = -1 if self.point is None else self.point.checkpoint_id
        in_doubt = tuple(n for n, checkpoint in self.checkpoints.items() if checkpoint.in_doubt and n > completed)
        expected = tuple(n for n in in_doubt if not self.checkpoints[n].discarded)
        assert self.tracker.in_doubt_ids == expected
        superseded = [n for n, checkpoint in self.checkpoints.items() if checkpoint.in_doubt and n < completed]
        assert all(self.checkpoints[n].discarded for n in superseded)

    def check_abort_first(self, effects: list[TrackerEffect]) -> None:
        """H16: both sides know of the abort before they hear what caused it."""
        tells = (SubtaskFailed, SubtaskResetToCheckpoint, OperatorResetToCheckpoint)
        place = next((i for i, effect in enumerate(effects) if isinstance(effect, tells)), None)
        if place is not None:
            aborted = {
                effect.checkpoint_id for effect in effects[:place] if isinstance(effect, NotifyCheckpointAborted)
            }
            assert aborted == self.were_pending, f"H16: {self.were_pending} were pending, {aborted} aborted"

    def trigger(self, savepoint: bool = False) -> None:
        checkpoint_id, self.next_id = self.next_id, self.next_id + 1
        self.checkpoints[checkpoint_id] = Checkpoint(savepoint)
        self.tell(CheckpointTriggered(checkpoint_id, savepoint))

    def deliver(self) -> None:
        """The next word of one of the ways, the coordinator's return, or an id for what is due."""
        ways = [key for key, way in self.ways.items() if way]
        chosen = self.random.choice([*ways, *["snapshot"] * bool(self.to_snapshot), *["due"] * self.due, None])
        if chosen == "snapshot":
            self.take_snapshot(self.to_snapshot.popleft())
        elif chosen == "due":
            self.due = False
            self.trigger()
        elif chosen is not None:
            self.tell(self.ways[chosen].popleft())

    def idle(self) -> bool:
        """Whether nothing is on the way."""
        return not (self.due or self.to_snapshot or any(self.ways.values()))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        deadline = self.tracker.next_deadline()
        if deadline is not None and deadline <= self.now:
            self.tell(TimePassed())

    def abort(self) -> None:
        """H44: by id."""
        n = self.random.randrange(1, self.next_id + 1)
        before = set(self.tracker.pending_ids)
        self.tell(AbortRequested(n, "why not"))
        assert before - {n} <= set(self.tracker.pending_ids)

    def speak_for_another(self) -> None:
        """H44, G7: an attempt that is over acknowledges what is pending now."""
        over = [attempt for tid, attempt in self.attempts.items() if tid not in self.tasks]
        pending = self.tracker.pending_ids
        if over and pending:
            word = SubtaskAcknowledged(self.random.choice(over), self.random.choice(pending), b"foreign")
            stale = self.kinds["ReportStale"]
            self.tell(word)
            assert self.kinds["ReportStale"] == stale + 1

    def send(self) -> None:
        """H31: not while the valve is closed."""
        for task in self.tasks.values():
            if task.told and not task.closed and not task.finished:
                task.sent += self.random.randrange(3)

    def take_snapshot(self, checkpoint_id: int) -> None:
        checkpoint = self.checkpoints[checkpoint_id]
        if self.random.random() < 0.03:
            self.ways["coordinator"].append(CoordinatorSnapshotFailed(checkpoint_id, "returned None"))
            return
        taken = {tid: task.sent for tid, task in self.tasks.items() if task.sent != task.restored}
        parts = checkpoint.asked_to_close | checkpoint.ended_instead
        if self.random.random() < 0.05 and parts & taken.keys() and not checkpoint.answer:
            taken[self.random.choice(sorted(parts & taken.keys()))] -= 1  # one was lost on the way
            checkpoint.torn = True
        state = b"coordinator %d" % checkpoint_id
        self.ways["coordinator"].append(CoordinatorSnapshotTaken(checkpoint_id, state, taken))
        for tid in checkpoint.asked_to_close & self.tasks.keys():
            self.ways[tid].append(GatewayDrained(self.tasks[tid].attempt, checkpoint_id))

    def register(self, subtask: int) -> None:
        number = len(self.attempts)
        attempt = ExecutionAttempt("words", subtask, number, 1000 + number)
        self.attempts[attempt.task_attempt_id] = attempt
        self.tasks[attempt.task_attempt_id] = Task(attempt)
        self.tell(AttemptAccepted(attempt, RestoreMode.STREAMING, 1, attempt.task_attempt_id))

    def open(self, task: Task) -> None:
        task.ready = True
        self.tell(SubtaskReady(task.attempt))

    def fail(self, task: Task) -> None:
        attempt = task.attempt
        del self.tasks[attempt.task_attempt_id]
        if self.random.random() < 0.7:  # else what it has said comes late
            self.ways.pop(attempt.task_attempt_id, None)
        if not any(other.attempt.subtask == attempt.subtask for other in self.tasks.values()):
            self.owed.add(attempt.subtask)
        self.tell(SubtaskFailed(attempt, KILLED))

    def finish(self, task: Task) -> None:
        attempt = task.attempt
        task.finished = True
        self.ways[attempt.task_attempt_id].append(
            SubtaskFinalState(attempt, b"final of %d" % attempt.task_attempt_id, task.sent)
        )
        self.tell(SubtaskFinished(attempt))

    def reset(self) -> None:
        if self.operator_owed or (self.owed and self.random.random() < 0.1) or self.random.random() < 0.02:
            self.tasks.clear()
            self.owed.clear()
            self.operator_owed = False
            self.tell(OperatorReset("words", "why not"))
        elif self.owed:
            self.tell(SubtaskReset("words", self.owed.pop()))

    def end_run(self, succeeded: bool) -> None:
        """As the ledger does it: the operator is reset before the next run."""
        self.tasks = {tid: task for tid, task in self.tasks.items() if task.finished}
        self.tell(RunEnded("words", 1, succeeded))
        self.operator_owed = True

    # --- what the tracker asks for ------------------------------------------------------------------------

    def carry_out(self, effect: TrackerEffect) -> None:
        match effect:
            case CloseSubtask(attempt, n):
                tid = attempt.task_attempt_id
                self.checkpoints[n].asked_to_close.add(tid)
                if tid in self.tasks and not self.tasks[tid].finished:
                    self.tasks[tid].closed.add(n)
                    self.ways[tid].append(SubtaskClosed(attempt, n))
            case SnapshotCoordinator(n):
                assert n > self.last_cut, "H43: cuts in the order of the ids"
                lower = [self.checkpoints[m] for m in self.tracker.pending_ids if m < n]
                assert all(checkpoint.cut for checkpoint in lower), "H43: one after the other"
                self.last_cut = n
                self.checkpoints[n].snapshot_asked = True
                self.to_snapshot.append(n)
            case SendBarrier(attempt, n):
                self.send_barrier(attempt, n)
            case ReopenSubtask(attempt, n):
                self.checkpoints[n].ended_instead.add(attempt.task_attempt_id)
                self.checkpoints[n].states[attempt.subtask] = b"final of %d" % attempt.task_attempt_id
            case StoreCheckpoint():
                self.store(effect)
            case NotifyCheckpointComplete() | EndSavepoint() | NotifyCheckpointAborted() | RefuseCheckpoint():
                self.end(effect)
            case SubtaskReady(attempt):
                self.hear_ready(attempt)
            case RestoreAttempt(attempt, n, _, _, sent):
                assert n == (-1 if self.point is None else self.point.checkpoint_id)  # H18
                self.tasks[attempt.task_attempt_id].restored = self.tasks[attempt.task_attempt_id].sent = sent
            case SubtaskResetToCheckpoint(_, n) | OperatorResetToCheckpoint(n, _):
                assert n == (-1 if self.point is None else self.point.checkpoint_id), "H18"
            case TriggerCheckpoint():
                self.due = True
            case RaiseGlobalFailure():
                self.operator_owed = True
            case DiscardCheckpoint(n, savepoint):
                assert self.checkpoints[n].answer == "NotifyCheckpointAborted"
                assert self.checkpoints[n].in_doubt is not savepoint
                if not savepoint and self.random.random() < 0.5:  # else the storage never manages to
                    self.ways["discard", n].append(CheckpointDiscarded(n))
            case NotifyCheckpointDiscarded(n):
                assert self.checkpoints[n].in_doubt, "H64: discarded together with its abort, or not aborted"
                assert not self.checkpoints[n].discarded, "H64: said twice"
                self.checkpoints[n].discarded = True
            case ReportStale() | SubtaskFailed() | RunEnded():
                pass

    def send_barrier(self, attempt: ExecutionAttempt, checkpoint_id: int) -> None:
        tid, checkpoint = attempt.task_attempt_id, self.checkpoints[checkpoint_id]
        assert checkpoint.asked_to_close - checkpoint.ended_instead <= checkpoint.drained, "H42"
        task = self.tasks.get(tid)
        if task is None or task.finished:
            return
        task.closed.discard(checkpoint_id)
        if self.random.random() < 0.02:
            self.ways[tid].append(SubtaskDeclined(attempt, checkpoint_id, "no room"))
            return
        state = b"%d at %d" % (tid, checkpoint_id)
        self.ways[tid].append(SubtaskAcknowledged(attempt, checkpoint_id, state, (), task.sent))

    def store(self, effect: StoreCheckpoint) -> None:
        whole = effect.checkpoint
        checkpoint = self.checkpoints[whole.checkpoint_id]
        assert effect.savepoint == checkpoint.savepoint
        assert not checkpoint.torn, "H32: an event is in neither half"
        assert not checkpoint.answer, "H44: stored behind its end"
        asked = {self.attempts[tid].subtask for tid in checkpoint.asked_to_close}
        assert asked <= checkpoint.states.keys(), "H40: somebody has not answered"
        for subtask, state in checkpoint.states.items():
            part = whole.subtask_states[subtask]
            assert [mine.state for mine in part.states] == [state], "H44, G7: whose snapshot is it?"
        n = whole.checkpoint_id
        checkpoint.written = True
        word = CheckpointStored(n) if self.random.random() < 0.85 else CheckpointStoreFailed(n, "disk full")
        self.ways["storage", n].append(word)

    def end(self, effect: NotifyCheckpointComplete | EndSavepoint | NotifyCheckpointAborted | RefuseCheckpoint) -> None:
        n, checkpoint = effect.checkpoint_id, self.checkpoints[effect.checkpoint_id]
        assert not checkpoint.answer, f"H44: {n} was answered twice"
        checkpoint.answer = type(effect).__name__
        if isinstance(effect, NotifyCheckpointAborted):
            checkpoint.in_doubt = effect.in_doubt
            assert checkpoint.in_doubt == (checkpoint.written and not checkpoint.savepoint), "H64"
        if isinstance(effect, NotifyCheckpointComplete | EndSavepoint):
            assert checkpoint.durable, "H40: the durable write comes first"
            assert checkpoint.savepoint is isinstance(effect, EndSavepoint), "H49"
        if isinstance(effect, NotifyCheckpointComplete):
            assert self.point is None or n > self.point.checkpoint_id, "H43: completions rise"
            self.point = CompletedCheckpoint(n, self.parallelism, b"")
        for task in self.tasks.values():
            task.closed.discard(n)

    def hear_ready(self, attempt: ExecutionAttempt) -> None:
        task = self.tasks[attempt.task_attempt_id]
        assert task.ready
        assert not task.told
        task.told = True
        for n in self.were_pending & set(self.tracker.pending_ids):
            checkpoint = self.checkpoints[n]
            known = checkpoint.snapshot_asked or attempt.task_attempt_id in checkpoint.asked_to_close
            assert known or task.finished, f"the coordinator hears of {attempt} before its cut {n}"
