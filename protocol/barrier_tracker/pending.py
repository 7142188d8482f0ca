# SPDX-License-Identifier: Apache-2.0

"""The checkpoints in progress: the phase and the parts of each, which inputs may come, and how several go together.

A checkpoint N goes through these phases (H40), and is in exactly one of them::

    CLOSING         each running subtask closes its valve and says so
    SNAPSHOTTING    the coordinator snapshots; its return is the cut
    ACKNOWLEDGING   each gateway sends its barrier when every event sent before the cut is confirmed (H42, H78); each
                    subtask answers with its snapshot
    COLLECTING      only if no events are held (H79): the coordinator hands over what it has recorded
    UPLOADING       only if a subtask stores a part of its state itself (H190): until it has stored that
    STORING         the durable write

Each running subtask has a part in it, which only moves forward::

    AWAITING_CLOSE ─► AWAITING_ACKNOWLEDGE ─► AWAITING_STATE ─► SETTLED

AWAITING_STATE is only for a snapshot that says so. The subtask is at work again since its snapshot (H192), so its files
may be stored in any later phase before STORING.

A phase ends when no part is left in the step that it waits for. CLOSING also waits until every lower checkpoint has
been cut or is gone, so that the coordinator snapshots in the order of the ids (H43). An acknowledgement may be reported
before the coordinator's snapshot, because the two reports take different ways. It cannot come before the snapshot is
asked for; if it does, the tracker aborts. A subtask that has ended is SETTLED with its final state, from any step. It
ends only when its valve holds nothing, and nothing more will be taken from its mailbox, so its gateway has no
confirmation to wait for (G10).

**Without ``hold_events``** (H79) no valve is closed, so a part begins at AWAITING_ACKNOWLEDGE, and CLOSING only waits
for the lower cuts; unless barriers travel apart, where the closing tells the subtask of the checkpoint. The subtask's
snapshot may be later than the coordinator's, and what came between is recorded. It becomes held events of its sender,
before those that the subtask held, and ``events_sent`` becomes what the coordinator had taken at the cut. So a restore
sends it again. It is collected when all parts are settled, in the order of the coordinator's mailbox, which then has
everything that the subtasks had sent. A final state settles a part like a snapshot, also one that comes before the cut.

**Files** (H190, H193). A state in files is a handle here. If an upload fails, the checkpoint fails. A subtask that ends
completes its uploads before. If one did not, its state of this cut is missing, and its final state is of a later
moment, so the checkpoint fails too. What is written must not depend on the files of others. A savepoint copies the
files of the subtasks that did not store theirs in it: of those at rest, and of those that have finished. The first
checkpoint after the restore of a savepoint copies the files of the subtasks at rest into the application's own storage.

**Both halves must be of one cut** (H32). The coordinator's part says how many events of each attempt it covers. The
subtask's part says how many have left. The two are compared as soon as both are known. If they differ, an event was
lost, duplicated or taken on the wrong side of the cut, and the checkpoint must not complete. With recorded events, the
coordinator may have taken fewer, and exactly the difference must be recorded.

**Several at the same time** (H43). At most ``concurrent_max`` are in progress, and one request waits. Starts, the
coordinator's snapshots and completions are in the order of the ids. A checkpoint that completes *subsumes* every lower
one that is still pending. A subsumed checkpoint is aborted, but this does not count as a failure. A savepoint neither
subsumes nor is subsumed: it is stored elsewhere, and its requester waits for this savepoint and no other (H49).

**Withheld** is an attempt that becomes ready while a checkpoint in which it has no part is closing the others. The
coordinator learns of the attempt after the request for its own snapshot.

**Failures** in a row are counted over all checkpoints except savepoints, and those whose requester acts on a failure,
as a change of the parallelism does. More than ``tolerated_failures`` become a global failure (H45). From then on
everything is *halted* until the operator's reset: pending checkpoints are given up, none starts, and requests are
refused. The same holds after the end of a run in which a subtask has failed and was not reset. If the run succeeds
nevertheless, nothing is left to fail, and its final checkpoint may start.

**In doubt** is a checkpoint that was aborted after its write had begun (H64). It stays so until the storage has
discarded it durably, or until a higher one completes. Resets and the end of a run do not change this. The set grows by
one with each such abort. It stays bounded: a storage that fails permanently leads to a global failure, and restarts are
limited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Any, NamedTuple, assert_never

from protocol.attempts import SubtaskReady
from protocol.barrier_tracker import (
    AwaitUploads,
    CheckpointConfig,
    CheckpointDiscarded,
    CheckpointStored,
    CheckpointStoreFailed,
    CheckpointTriggered,
    CollectRecorded,
    CompletedCheckpoint,
    CoordinatorSnapshotFailed,
    CoordinatorSnapshotTaken,
    DiscardCheckpoint,
    EndSavepoint,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NotifyCheckpointDiscarded,
    RaiseGlobalFailure,
    RecordedCollected,
    RefuseCheckpoint,
    ReopenSubtask,
    SnapshotCoordinator,
    StoreCheckpoint,
    SubtaskAcknowledged,
    SubtaskClosed,
    SubtaskDeclined,
    SubtaskSnapshot,
    SubtaskStateFailed,
    SubtaskStateStored,
    TrackerEffect,
)
from protocol.describing import type_name
from protocol.errors import LocalProtocolError
from protocol.ids import ExecutionAttempt
from protocol.parts import covers, more
from protocol.subtask.outbound import HELD_OVERHEAD_BYTES
from protocol.subtask.types import snapshot_bytes_max
from protocol.wire.framing import DEFAULT_LIMITS, WireLimits
from protocol.wire.messages import HeldEvent, Positions, SubtaskState
from protocol.wire.state_handles import StateHandle


def _shown(counts: Positions) -> str:
    """The counts as text, in the order of the parts."""
    return ", ".join(map(str, counts)) or "0"


class Phase(Enum):
    """The phase of a checkpoint; IDLE before its trigger and after its end."""

    IDLE = "idle"
    CLOSING = "closing"
    SNAPSHOTTING = "snapshotting"
    ACKNOWLEDGING = "acknowledging"
    COLLECTING = "collecting"
    UPLOADING = "uploading"
    STORING = "storing"


class Step(IntEnum):
    """How far one subtask's part has come."""

    AWAITING_CLOSE = 0
    AWAITING_ACKNOWLEDGE = 1
    AWAITING_STATE = 2
    SETTLED = 3


class Verdict(Enum):
    """How a report about a checkpoint is treated in one of its phases."""

    ACT = "act"
    STALE = "stale"  # outdated: counted and logged, and nothing changes (H44)
    ABORT = "abort"  # the peer is out of turn, which can happen: the checkpoint is given up
    ILLEGAL = "illegal"  # our own side is out of turn: ``LocalProtocolError``


# In Python 3.11, looking up an attribute of an Enum class takes ten times as long as looking up a global name.
_CLOSING, _ACKNOWLEDGING = Phase.CLOSING, Phase.ACKNOWLEDGING
_AWAITING_CLOSE, _AWAITING_ACKNOWLEDGE, _AWAITING_STATE, _SETTLED = Step

_A, _S, _X, _P = Verdict.ACT, Verdict.STALE, Verdict.ILLEGAL, Verdict.ABORT

# A report of an attempt that has no part, or whose part is past the step (``STEP_OF``), is stale in every phase.
LEGAL: dict[type, tuple[Verdict, Verdict, Verdict, Verdict, Verdict, Verdict, Verdict]] = {
    #                         IDLE CLOSING SNAPSHOTTING ACKNOWLEDGING COLLECTING UPLOADING STORING
    SubtaskClosed: (_S, _A, _S, _S, _S, _S, _S),
    CoordinatorSnapshotTaken: (_S, _X, _A, _X, _X, _X, _X),
    CoordinatorSnapshotFailed: (_S, _X, _A, _X, _X, _X, _X),
    SubtaskAcknowledged: (_S, _P, _A, _A, _S, _S, _S),
    SubtaskStateStored: (_S, _P, _A, _A, _A, _A, _S),
    SubtaskStateFailed: (_S, _P, _A, _A, _A, _A, _S),
    SubtaskDeclined: (_S, _A, _A, _A, _S, _S, _S),
    RecordedCollected: (_S, _X, _X, _X, _A, _X, _X),
    CheckpointStored: (_S, _X, _X, _X, _X, _X, _A),
    CheckpointStoreFailed: (_S, _X, _X, _X, _X, _X, _A),
}
_COLUMN = {phase: place for place, phase in enumerate(Phase)}

# The step at which the part of an attempt must be when its report comes; past it, the input is a
# repetition.
STEP_OF: dict[type, Step] = {
    SubtaskClosed: Step.AWAITING_CLOSE,
    SubtaskAcknowledged: Step.AWAITING_ACKNOWLEDGE,
    SubtaskStateStored: Step.AWAITING_STATE,
    SubtaskStateFailed: Step.AWAITING_STATE,
    SubtaskDeclined: Step.AWAITING_ACKNOWLEDGE,
}

# Which step a phase waits for.
WAITS_FOR: dict[Phase, Step] = {
    Phase.CLOSING: Step.AWAITING_CLOSE,
    Phase.ACKNOWLEDGING: Step.AWAITING_ACKNOWLEDGE,
    Phase.UPLOADING: Step.AWAITING_STATE,
}

BEFORE_CUT = (Phase.CLOSING, Phase.SNAPSHOTTING)

StateReport = SubtaskStateStored | SubtaskStateFailed
"""What has become of the files of a snapshot."""
SubtaskReport = SubtaskClosed | SubtaskAcknowledged | SubtaskDeclined | StateReport
"""The reports about a checkpoint on behalf of one attempt."""
SUBTASK_REPORTS = (SubtaskClosed, SubtaskAcknowledged, SubtaskDeclined, SubtaskStateStored, SubtaskStateFailed)

DriverReport = (
    CoordinatorSnapshotTaken | CoordinatorSnapshotFailed | RecordedCollected | CheckpointStored | CheckpointStoreFailed
)
"""The reports of the coordinator and the storage about a checkpoint."""

Report = SubtaskReport | DriverReport


@dataclass(slots=True)
class Part:
    """One running subtask's part. Events are counted along the subtask's history (H32).

    ``events_restored``: where the attempt's count began. ``events_taken``: how many the coordinator had taken at the
    cut; None before the cut.
    """

    attempt: ExecutionAttempt
    events_restored: Positions
    step: Step = Step.AWAITING_CLOSE
    snapshot: SubtaskSnapshot | None = None
    events_taken: Positions | None = None
    hold_events: bool = True

    def is_of(self, attempt: ExecutionAttempt) -> bool:
        return self.attempt is attempt or self.attempt == attempt

    def agrees(self, events_sent: Positions) -> bool:
        """Whether a snapshot before which so many events had left is of the coordinator's cut, as far as it is known.

        What the coordinator had not taken yet may be recorded, unless events are held.
        """
        taken = self.events_taken
        return taken is None or taken == events_sent or (not self.hold_events and covers(events_sent, taken))

    def why_torn(self) -> str:
        """Say how the two halves differ (H32); empty if they agree, or one is not known yet."""
        snapshot = self.snapshot
        if snapshot is None or self.agrees(snapshot.events_sent):
            return ""
        return (
            f"{self.attempt}: {_shown(snapshot.events_sent)} of its events had left at its snapshot, but the "
            f"coordinator had taken {_shown(self.events_taken or ())} at the cut"
        )

    def collect(self, recorded: tuple[HeldEvent, ...]) -> str:
        """Take what was recorded into the snapshot. Say what is missing or too much; empty if nothing (H32, H79)."""
        snapshot, taken = self.snapshot, self.events_taken
        assert snapshot is not None
        assert taken is not None
        if more(taken, recorded) != snapshot.events_sent:
            return (
                f"{self.attempt}: {_shown(snapshot.events_sent)} of its events had left at its snapshot, but the "
                f"coordinator had taken {_shown(taken)} at the cut and recorded {_shown(more((), recorded))} since"
            )
        self.snapshot = SubtaskSnapshot(snapshot.states, (*recorded, *snapshot.held), taken)
        return ""


class CheckpointView(NamedTuple):
    """A checkpoint in progress at one moment, for people.

    ``deadline``: when it is given up, on the clock of ``now``. ``steps``: how far each running subtask has come.
    ``at_rest``: how many subtasks take part with a state that they have left.
    """

    checkpoint_id: int
    savepoint: bool
    phase: Phase
    deadline: float
    steps: dict[int, Step]
    at_rest: int


@dataclass(slots=True)
class PendingCheckpoint:
    """One pending checkpoint; see the module. ``at_rest`` has the parts of the subtasks that are not running.

    Only ``move``, ``settle`` and ``take_one_of_many`` change a part's step. They count how many parts are in each step,
    because every subtask reports twice about each checkpoint, and no report may cost a look at all subtasks.
    """

    checkpoint_id: int
    deadline: float
    parts: dict[int, Part]
    at_rest: dict[int, SubtaskSnapshot]
    savepoint: bool = False
    target: str = ""  # of a savepoint
    counts: bool = True  # its failure, unless it is a savepoint
    hold_events: bool = True
    partitions: int = 0  # see ``CompletedCheckpoint``
    elsewhere: frozenset[StateHandle] = frozenset()  # whose files a checkpoint must copy
    uploaded: list[StateHandle] = field(default_factory=list)  # for this one
    to_copy: tuple[StateHandle, ...] = ()
    phase: Phase = Phase.CLOSING
    coordinator_state: bytes | None = None
    stored: CompletedCheckpoint | None = None  # what is being written
    _in_step: list[int] = field(default_factory=lambda: [0] * len(Step))

    def __post_init__(self) -> None:
        for part in self.parts.values():
            self._in_step[part.step] += 1

    def move(self, subtask: int, step: Step) -> None:
        """Move this subtask's part one step further."""
        part = self.parts[subtask]
        self._in_step[part.step] -= 1
        self._in_step[step] += 1
        part.step = step

    def settle(self, subtask: int, snapshot: SubtaskSnapshot) -> None:
        """Record the subtask's snapshot; nothing more is awaited from it."""
        self.move(subtask, Step.SETTLED)
        self.parts[subtask].snapshot = snapshot

    def take_one_of_many(self, report: Any) -> bool:
        """Take a report in its turn, if others of the same kind are still awaited, so that nothing else changes.

        ``report``: a ``SubtaskClosed`` or ``SubtaskAcknowledged``. False, and nothing is changed, for every other one.
        All but a few of a checkpoint of many subtasks are such reports, so they must cost little.
        """
        attempt = report.attempt
        part = self.parts.get(attempt.subtask)
        if part is None or part.attempt is not attempt:
            return False
        in_step, step = self._in_step, part.step
        if type(report) is SubtaskClosed:
            if self.phase is not _CLOSING or step is not _AWAITING_CLOSE or in_step[step] == 1:
                return False
            part.step = _AWAITING_ACKNOWLEDGE
            in_step[_AWAITING_ACKNOWLEDGE] += 1
        else:
            sent = report.events_sent
            if self.phase is not _ACKNOWLEDGING or step is not _AWAITING_ACKNOWLEDGE or in_step[step] == 1:
                return False
            if report.state_follows or (part.events_taken != sent and not part.agrees(sent)):
                return False
            part.step = _SETTLED
            in_step[_SETTLED] += 1
            part.snapshot = SubtaskSnapshot((SubtaskState(attempt.subtask, report.state),), report.held, sent)
        in_step[step] -= 1
        return True

    def judge(self, report: Report) -> Verdict:
        """Return how a report about this checkpoint is treated."""
        if isinstance(report, SUBTASK_REPORTS):
            part = self.parts.get(report.attempt.subtask)
            if part is None or not part.is_of(report.attempt) or part.step > STEP_OF[type(report)]:
                return _S
        return LEGAL[type(report)][_COLUMN[self.phase]]

    def describe(self, report: Report) -> str:
        """Say, for a message to people, why a report about this checkpoint was not taken."""
        name = type_name(report)
        if isinstance(report, SUBTASK_REPORTS):
            if not self.has_part(report.attempt):
                return f"{name} of {report.attempt}, which has no part in checkpoint {report.checkpoint_id}"
            return f"{name} of {report.attempt} for checkpoint {report.checkpoint_id}, said before"
        return f"{name} for checkpoint {report.checkpoint_id}, which is {self.phase.value}"

    def has_part(self, attempt: ExecutionAttempt) -> bool:
        """Whether this attempt takes part as a running one, or did."""
        part = self.parts.get(attempt.subtask)
        return part is not None and part.is_of(attempt)

    def cut(self, state: bytes, events_taken: dict[int, Positions]) -> None:
        """Record the cut: the coordinator has returned its snapshot. ``events_taken``: per task attempt id."""
        self.phase, self.coordinator_state = Phase.ACKNOWLEDGING, state
        for part in self.parts.values():
            part.events_taken = events_taken.get(part.attempt.task_attempt_id, part.events_restored)

    def why_torn(self) -> str:
        """Say in which parts the halves differ (H32); empty if in none."""
        return "; ".join(filter(None, (part.why_torn() for part in self.parts.values())))

    def settled(self) -> bool:
        """Whether no subtask's part is missing."""
        return self._in_step[Step.SETTLED] == len(self.parts)

    def advance(self, parallelism: int, may_cut: bool, out: list[TrackerEffect]) -> None:
        """Advance through every phase that has nothing left to wait for.

        ``may_cut``: every lower checkpoint has been cut, or is gone.
        """
        if self.phase is Phase.CLOSING and may_cut and not self._in_step[Step.AWAITING_CLOSE]:
            self.phase = Phase.SNAPSHOTTING
            out.append(SnapshotCoordinator(self.checkpoint_id, self.target))
        if self.phase is Phase.ACKNOWLEDGING and not self._in_step[Step.AWAITING_ACKNOWLEDGE]:
            if self.hold_events:
                self.upload(parallelism, out)
            else:
                self.phase = Phase.COLLECTING
                out.append(CollectRecorded(self.checkpoint_id))
        elif self.phase is Phase.UPLOADING and self.settled():
            self.store(parallelism, out)

    def upload(self, parallelism: int, out: list[TrackerEffect]) -> None:
        """Every snapshot is taken: have the checkpoint written as soon as every file is stored."""
        if self.settled():
            self.store(parallelism, out)
        else:
            self.phase = Phase.UPLOADING
            out.append(AwaitUploads(self.checkpoint_id))

    def collect(self, recorded: dict[int, tuple[HeldEvent, ...]]) -> str:
        """Take what the coordinator has recorded into the parts. Say in which the halves differ; empty if in none."""
        problems = []
        for part in self.parts.values():
            events, snapshot = recorded.get(part.attempt.task_attempt_id, ()), part.snapshot
            if not events and snapshot is not None and snapshot.events_sent == part.events_taken:
                continue  # as of most subtasks
            if problem := part.collect(events):
                problems.append(problem)
        return "; ".join(problems)

    def store(self, parallelism: int, out: list[TrackerEffect]) -> None:
        """Everything is there: have it written."""
        self.phase = Phase.STORING
        self.stored = self._whole(parallelism)
        if self.savepoint:
            inside = set(self.uploaded)
            self.to_copy = tuple([files for files in files_of(self.stored) if files not in inside])
        elif self.elsewhere:
            self.to_copy = tuple([files for files in files_of(self.stored) if files in self.elsewhere])
        out.append(StoreCheckpoint(self.stored, self.savepoint, self.to_copy))

    def _whole(self, parallelism: int) -> CompletedCheckpoint:
        assert self.coordinator_state is not None
        states = dict(self.at_rest)
        for subtask, part in self.parts.items():
            assert part.snapshot is not None
            states[subtask] = part.snapshot
        return CompletedCheckpoint(
            self.checkpoint_id,
            parallelism,
            self.coordinator_state,
            dict(sorted(states.items())),
            partitions=self.partitions,
        )

    def view(self) -> CheckpointView:
        """What is known of it at this moment."""
        steps = {subtask: part.step for subtask, part in self.parts.items()}
        return CheckpointView(self.checkpoint_id, self.savepoint, self.phase, self.deadline, steps, len(self.at_rest))

    def waiting_for(self) -> str:
        """Name, for a log, what the checkpoint is waiting for."""
        match self.phase:
            case Phase.SNAPSHOTTING:
                return "the coordinator has not returned its snapshot"
            case Phase.COLLECTING:
                return "the coordinator has not come to what the subtasks had sent before their snapshots"
            case Phase.STORING:
                return "the storage has not written it"
            case Phase.CLOSING:
                what = "not closed"
            case Phase.ACKNOWLEDGING:
                what = "not acknowledged it, or not confirmed every event sent before it"
            case Phase.UPLOADING:
                what = "not stored the files of its state"
            case Phase.IDLE:
                raise AssertionError("a pending checkpoint is never idle")
            case _:
                assert_never(self.phase)
        late = [str(part.attempt) for part in self.parts.values() if part.step is WAITS_FOR[self.phase]]
        return f"{', '.join(late)}: {what}" if late else "the coordinator has not returned an earlier snapshot"

    def check_invariants(self, may_cut: bool) -> None:
        """Raise ``AssertionError`` if the state is impossible. ``may_cut``: as in ``advance``."""
        assert self._in_step == [sum(part.step is step for part in self.parts.values()) for step in Step]
        for subtask, part in self.parts.items():
            assert part.attempt.subtask == subtask
            assert (part.snapshot is not None) == (part.step >= Step.AWAITING_STATE)
            assert (part.events_taken is None) == (self.phase in BEFORE_CUT)
        assert not self.why_torn(), "H32: the two halves are of different cuts"
        assert not set(self.parts) & set(self.at_rest)
        assert (self.coordinator_state is None) == (self.phase in BEFORE_CUT)
        assert self.phase is not Phase.COLLECTING or not self.hold_events
        assert (self.stored is not None) == (self.phase is Phase.STORING)
        self._check_steps({part.step for part in self.parts.values()}, may_cut)

    def _check_steps(self, steps: set[Step], may_cut: bool) -> None:
        """The phase has waited for what it waits for, and not for nobody."""
        if self.phase is Phase.CLOSING:
            assert Step.AWAITING_CLOSE in steps or not may_cut, "closing, and waits for nobody"
        else:
            assert may_cut, "H43: cut before a lower one"
            assert Step.AWAITING_CLOSE not in steps
        if self.phase is Phase.ACKNOWLEDGING:
            assert Step.AWAITING_ACKNOWLEDGE in steps, "acknowledging, and waits for nobody"
        if self.phase is Phase.COLLECTING:
            assert steps <= {Step.AWAITING_STATE, Step.SETTLED}
        if self.phase is Phase.UPLOADING:
            assert Step.AWAITING_STATE in steps, "uploading, and waits for nobody"
            assert steps <= {Step.AWAITING_STATE, Step.SETTLED}
        if self.phase is Phase.STORING:
            assert steps <= {Step.SETTLED}
        if self.phase is Phase.STORING:
            assert all(p.snapshot and p.snapshot.events_sent == p.events_taken for p in self.parts.values())


def files_of(checkpoint: CompletedCheckpoint) -> list[StateHandle]:
    """The handles of all states in files, each once."""
    states = [state for part in checkpoint.subtask_states.values() for state in part.states]
    return list(dict.fromkeys([state.files for state in states if state.files is not None]))


def with_copies(checkpoint: CompletedCheckpoint, copied: dict[StateHandle, StateHandle]) -> CompletedCheckpoint:
    """Return the checkpoint with the handles of the copies."""
    parts = {
        subtask: replace(
            part,
            states=tuple(
                [
                    one if one.files is None else one._replace(files=copied.get(one.files, one.files))
                    for one in part.states
                ]
            ),
        )
        for subtask, part in checkpoint.subtask_states.items()
    }
    return replace(checkpoint, subtask_states=parts)


Effects = list[TrackerEffect]


@dataclass(slots=True)
class CheckpointsUnderWay:
    """The checkpoints in progress; see the module.

    ``pending`` is by id, ascending. ``queued`` is the waiting request, and until when it waits.
    """

    operator_id: str
    parallelism: int
    config: CheckpointConfig
    limits: WireLimits = DEFAULT_LIMITS
    pending: dict[int, PendingCheckpoint] = field(default_factory=dict)
    queued: tuple[CheckpointTriggered, float] | None = None
    withheld: list[ExecutionAttempt] = field(default_factory=list)
    elsewhere: frozenset[StateHandle] = frozenset()  # of the savepoint that this application starts from
    in_doubt: set[int] = field(default_factory=set)
    failures: int = 0
    halted: bool = False

    def phase(self) -> Phase:
        """The phase of the lowest one."""
        return next((pending.phase for pending in self.pending.values()), Phase.IDLE)

    def next_deadline(self) -> float | None:
        deadlines = [pending.deadline for pending in self.pending.values()]
        if self.queued is not None:
            deadlines.append(self.queued[1])
        return min(deadlines, default=None)

    def obstacle(self) -> str:
        """Why no checkpoint can start now; empty if one can."""
        if self.halted:
            return "the operator has failed, and its next run begins with a reset: ask again when that run is on"
        if len(self.pending) < self.config.concurrent_max:
            return ""
        return ", ".join(f"checkpoint {checkpoint_id} is pending" for checkpoint_id in self.pending)

    # --- requests -----------------------------------------------------------------------------------------

    def queue(self, request: CheckpointTriggered, now: float, out: Effects) -> None:
        """Let the request wait; a second one is refused."""
        if self.queued is not None:
            reason = (
                f"checkpoint {self.queued[0].checkpoint_id} waits already, and only one may: ask again when an earlier "
                "one has ended, or let more be taken at one time with CheckpointConfig.concurrent_max"
            )
            out.append(RefuseCheckpoint(request.checkpoint_id, reason))
        else:
            self.queued = (request, now + self.config.timeout_s)

    def refuse_queued(self, reason: str, out: Effects) -> None:
        if self.queued is not None:
            out.append(RefuseCheckpoint(self.queued[0].checkpoint_id, reason))
            self.queued = None

    def is_known(self, checkpoint_id: int) -> bool:
        """Whether the checkpoint is pending or waiting."""
        return checkpoint_id in self.pending or (
            self.queued is not None and self.queued[0].checkpoint_id == checkpoint_id
        )

    def start_queued(
        self, parts: dict[int, Part], at_rest: dict[int, SubtaskSnapshot], now: float
    ) -> PendingCheckpoint:
        """Start the waiting request. The caller then closes its subtasks and calls ``move_on``."""
        assert self.queued is not None
        request, self.queued = self.queued[0], None
        pending = PendingCheckpoint(request.checkpoint_id, now + self.config.timeout_s, parts, at_rest)
        pending.savepoint, pending.hold_events = request.savepoint, self.config.hold_events
        pending.target, pending.counts, pending.elsewhere = request.target, request.counts, self.elsewhere
        self.pending[request.checkpoint_id] = pending
        return pending

    def expire(self, now: float, out: Effects) -> None:
        """Give up every checkpoint that is not complete in time (H48)."""
        for pending in list(self.pending.values()):
            if pending.deadline <= now and pending.checkpoint_id in self.pending:
                reason = f"not complete within {self.config.timeout_s:g} s: {pending.waiting_for()}"
                self._fail(pending, reason, out)
        self.move_on(out)

    # --- steps --------------------------------------------------------------------------------------------

    def why_stale(self, report: Report) -> str | None:
        """Say why the report is stale, or None. Raises ``LocalProtocolError`` if it must not come in this phase."""
        pending = self.pending.get(report.checkpoint_id)
        if pending is None:
            return f"{type_name(report)} for checkpoint {report.checkpoint_id}, which is not pending"
        verdict = pending.judge(report)
        if verdict is Verdict.ILLEGAL:
            raise LocalProtocolError(pending.describe(report))
        return pending.describe(report) if verdict is Verdict.STALE else None

    def take(self, report: Report, out: Effects) -> None:
        """Take a step of one checkpoint, which is not stale."""
        pending = self.pending[report.checkpoint_id]
        _STEPS[type(report)](self, pending, report, out)
        self.move_on(out)

    def _closed(self, pending: PendingCheckpoint, report: SubtaskClosed, out: Effects) -> None:
        pending.move(report.attempt.subtask, Step.AWAITING_ACKNOWLEDGE)

    def _snapshot_taken(self, pending: PendingCheckpoint, report: CoordinatorSnapshotTaken, out: Effects) -> None:
        pending.cut(report.state, report.events_taken)
        self._fail_if_torn(pending, pending.why_torn(), out)

    def _collected(self, pending: PendingCheckpoint, report: RecordedCollected, out: Effects) -> None:
        problem = pending.collect(report.recorded) or self._why_too_large(pending)
        if problem:
            self._fail(pending, problem, out)
        else:
            pending.upload(self.parallelism, out)

    def _why_too_large(self, pending: PendingCheckpoint) -> str:
        """Say which part could not be restored, because it does not fit into a message; empty if all do (H62)."""
        events_max, bytes_max = self.limits.held_events_max, snapshot_bytes_max(self.limits)
        for part in pending.parts.values():
            assert part.snapshot is not None
            held = part.snapshot.held
            if not held:
                continue
            size = sum(len(event.payload) for event in held) + HELD_OVERHEAD_BYTES * len(held)
            size += sum(len(state.state) for state in part.snapshot.states)
            if len(held) > events_max or size > bytes_max:
                return (
                    f"{part.attempt}: {len(held)} recorded and held events take {size} bytes with its state, where "
                    f"{events_max} events and {bytes_max} bytes fit into a message: let it send less, lower its "
                    "upward_events_max and upward_bytes_max, or let checkpoints hold events"
                )
        return ""

    def _snapshot_failed(self, pending: PendingCheckpoint, report: CoordinatorSnapshotFailed, out: Effects) -> None:
        self._fail(pending, f"coordinator: {report.reason}", out)

    def _acknowledged(self, pending: PendingCheckpoint, report: SubtaskAcknowledged, out: Effects) -> None:
        if pending.judge(report) is Verdict.ABORT:
            self._fail(pending, f"{report.attempt} acknowledged it before the coordinator was asked", out)
            return
        subtask = report.attempt.subtask
        states = (SubtaskState(subtask, report.state),)
        pending.settle(subtask, SubtaskSnapshot(states, report.held, report.events_sent))
        if report.state_follows:
            pending.move(subtask, Step.AWAITING_STATE)
        self._fail_if_torn(pending, pending.parts[subtask].why_torn(), out)

    def _state_stored(self, pending: PendingCheckpoint, report: SubtaskStateStored, out: Effects) -> None:
        part = pending.parts[report.attempt.subtask]
        if part.step is not Step.AWAITING_STATE:
            self._fail(pending, f"{report.attempt} stored files before its snapshot", out)
            return
        assert part.snapshot is not None
        [state] = part.snapshot.states
        pending.settle(state.subtask, replace(part.snapshot, states=(state._replace(files=report.handle),)))
        pending.uploaded.append(report.handle)

    def _state_failed(self, pending: PendingCheckpoint, report: SubtaskStateFailed, out: Effects) -> None:
        self._fail(pending, f"{report.attempt} could not store the files of its state: {report.reason}", out)

    def _declined(self, pending: PendingCheckpoint, report: SubtaskDeclined, out: Effects) -> None:
        self._fail(pending, f"{report.attempt} declined: {report.reason}", out)

    def _store_failed(self, pending: PendingCheckpoint, report: CheckpointStoreFailed, out: Effects) -> None:
        self._fail(pending, f"storage: {report.reason}", out)

    def _fail_if_torn(self, pending: PendingCheckpoint, why_torn: str, out: Effects) -> None:
        if why_torn:
            self._fail(pending, why_torn, out)

    def end_part(self, attempt: ExecutionAttempt, final: SubtaskSnapshot, out: Effects) -> None:
        """The attempt's operator has ended: use its final state as its part wherever that is missing (H47)."""
        for pending in list(self.pending.values()):
            if pending.checkpoint_id not in self.pending:
                continue  # already given up together with an earlier one
            if not pending.has_part(attempt):
                continue
            if pending.parts[attempt.subtask].step is Step.AWAITING_STATE:
                self._fail(pending, f"{attempt} ended before it had stored the files of its state", out)
            elif pending.parts[attempt.subtask].step is not Step.SETTLED:
                pending.settle(attempt.subtask, final)
                out.append(ReopenSubtask(attempt, pending.checkpoint_id))
                self._fail_if_torn(pending, pending.parts[attempt.subtask].why_torn(), out)
        self.move_on(out)

    def move_on(self, out: Effects) -> None:
        """Advance each as far as possible, in the order of the ids; then report the attempts no longer withheld."""
        may_cut = True
        for pending in self.pending.values():
            pending.advance(self.parallelism, may_cut, out)
            may_cut = may_cut and pending.phase not in BEFORE_CUT
        withheld, self.withheld = self.withheld, []
        for attempt in withheld:
            if self._withholds(attempt):
                self.withheld.append(attempt)
            else:
                out.append(SubtaskReady(attempt))

    # --- readiness ----------------------------------------------------------------------------------------

    def tell_ready(self, attempt: ExecutionAttempt, out: Effects) -> None:
        """Report an attempt ready, immediately or after the snapshots in which it has no part."""
        self.withheld.append(attempt)
        self.move_on(out)

    def forget(self, attempt: ExecutionAttempt) -> None:
        """Forget an attempt that is over: it is no longer reported ready."""
        self.withheld = [other for other in self.withheld if other != attempt]

    def _withholds(self, attempt: ExecutionAttempt) -> bool:
        return any(
            pending.phase is Phase.CLOSING and not pending.has_part(attempt) for pending in self.pending.values()
        )

    # --- ends ---------------------------------------------------------------------------------------------

    def complete(self, report: CheckpointStored, out: Effects) -> CompletedCheckpoint | None:
        """Complete a durable checkpoint and return it, for later restores; None for a savepoint."""
        checkpoint_id, copied = report.checkpoint_id, report.copied
        pending = self.pending[checkpoint_id]
        if set(copied) != set(pending.to_copy):
            raise LocalProtocolError(f"checkpoint {checkpoint_id} was stored with copies of other files than asked for")
        del self.pending[checkpoint_id]
        if pending.savepoint:
            out.append(EndSavepoint(checkpoint_id))
        else:
            lower = [other for other in self.pending.values() if other.checkpoint_id < checkpoint_id]
            subsumed = [other for other in lower if not other.savepoint]
            self.give_up(subsumed, f"subsumed by checkpoint {checkpoint_id}", out)
            self.failures = 0
            out.append(NotifyCheckpointComplete(checkpoint_id))
            superseded = sorted(other for other in self.in_doubt if other < checkpoint_id)
            self.in_doubt.difference_update(superseded)
            out.extend(map(NotifyCheckpointDiscarded, superseded))
        self.move_on(out)
        if pending.savepoint or pending.stored is None:
            return None
        return with_copies(pending.stored, copied) if copied else pending.stored

    def abort(self, checkpoint_id: int, reason: str, out: Effects) -> None:
        """Give up one checkpoint, pending or waiting, by its id (H44). It does not count as a failure."""
        pending = self.pending.get(checkpoint_id)
        if pending is None:
            self.refuse_queued(reason, out)
        else:
            self.give_up([pending], reason, out)

    def abort_all(self, reason: str, out: Effects) -> None:
        """Give up everything pending; none counts as a failure."""
        self.give_up(list(self.pending.values()), reason, out)

    def give_up(self, those: list[PendingCheckpoint], reason: str, out: Effects) -> None:
        """Give up one checkpoint: tell both sides first, then what waited for it."""
        for pending in those:
            self._end(pending, reason, out)
        self.move_on(out)

    def _fail(self, pending: PendingCheckpoint, reason: str, out: Effects) -> None:
        """Fail a checkpoint, which counts unless its requester acts on it (H45). The caller then calls ``move_on``."""
        self._end(pending, reason, out)
        if pending.counts and not pending.savepoint:
            self.failures += 1
        if self.failures > self.config.tolerated_failures:
            what = f"{self.failures} checkpoints in a row failed, the last one, {pending.checkpoint_id}"
            self.failures, self.halted = 0, True
            self.abort_all(f"the operator fails over: {what}", out)
            out.append(RaiseGlobalFailure(f"operator {self.operator_id!r}: {what}: {reason}"))

    def _end(self, pending: PendingCheckpoint, reason: str, out: Effects) -> None:
        checkpoint_id = pending.checkpoint_id
        del self.pending[checkpoint_id]
        written = pending.phase is Phase.STORING
        in_doubt = written and not pending.savepoint
        if in_doubt:
            self.in_doubt.add(checkpoint_id)
        out.append(NotifyCheckpointAborted(checkpoint_id, reason, in_doubt))
        if written:
            out.append(DiscardCheckpoint(checkpoint_id, pending.savepoint))

    # --- doubt --------------------------------------------------------------------------------------------

    def why_no_doubt(self, report: CheckpointDiscarded) -> str | None:
        """Say why the report is stale, or None. Raises ``LocalProtocolError`` if no discard was requested."""
        checkpoint_id = report.checkpoint_id
        if checkpoint_id in self.pending:
            raise LocalProtocolError(f"checkpoint {checkpoint_id} was discarded, although it is pending")
        if checkpoint_id in self.in_doubt:
            return None
        return f"CheckpointDiscarded for checkpoint {checkpoint_id}, which is not in doubt"

    def discarded(self, checkpoint_id: int, out: Effects) -> None:
        """End the doubt about a checkpoint: no restart restores it any more."""
        self.in_doubt.remove(checkpoint_id)
        out.append(NotifyCheckpointDiscarded(checkpoint_id))

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state is impossible."""
        assert list(self.pending) == sorted(self.pending)
        assert len(self.pending) <= self.config.concurrent_max
        assert self.failures <= self.config.tolerated_failures
        assert not (self.halted and self.pending), "H16: pending, although the operator's reset is owed"
        assert not self.in_doubt.intersection(self.pending), "pending and aborted"
        may_cut = True
        for checkpoint_id, pending in self.pending.items():
            assert pending.checkpoint_id == checkpoint_id
            pending.check_invariants(may_cut)
            may_cut = may_cut and pending.phase not in BEFORE_CUT
        assert all(self._withholds(attempt) for attempt in self.withheld), "withheld, and for nothing"


_Step = Callable[[CheckpointsUnderWay, PendingCheckpoint, Any, Effects], None]

_STEPS: dict[type, _Step] = {
    SubtaskClosed: CheckpointsUnderWay._closed,
    CoordinatorSnapshotTaken: CheckpointsUnderWay._snapshot_taken,
    CoordinatorSnapshotFailed: CheckpointsUnderWay._snapshot_failed,
    RecordedCollected: CheckpointsUnderWay._collected,
    SubtaskAcknowledged: CheckpointsUnderWay._acknowledged,
    SubtaskStateStored: CheckpointsUnderWay._state_stored,
    SubtaskStateFailed: CheckpointsUnderWay._state_failed,
    SubtaskDeclined: CheckpointsUnderWay._declined,
    CheckpointStoreFailed: CheckpointsUnderWay._store_failed,
}
