# SPDX-License-Identifier: Apache-2.0

"""The scopes: small worlds, each with its budgets, that are explored completely."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.parts import PartTable
from protocol.wire.messages import OperatorPart, RestoreMode

BATCH = RestoreMode.BATCH


@dataclass(frozen=True)
class Scope:
    """One small world.

    ``subtasks``: how many. ``attempts``: how often each may start. ``events_up`` and ``events_down``: how many of each
    subtask's history; a restored attempt continues from its checkpoint. ``concurrent``: the maximum number of
    concurrent checkpoints. The others are budgets of the whole world: how often a checkpoint or a savepoint is
    requested, one is aborted by request, a task dies, a connection breaks, an event is given up as not confirmed in
    time, a subtask declines its snapshot, the storage fails. ``apart``: barriers travel separately. ``asks``: the
    last upward event is a request; ``defers``: it is answered later; ``abandons``: an attempt may give up its wait.
    ``in_snapshot``: a subtask may send from inside its snapshot. ``finishes``: operators that have exchanged
    everything end well, at any time from then on.
    ``greets``: the coordinator sends its next event from inside ``subtask_ready``. ``late``: subtasks that are not
    started at the beginning; the others are ready. ``tolerant``: the downward events are loss-tolerant.
    ``forgeries``: registrations under task ids that do not exist. ``lost_starts``: the facts that tasks have
    started do not come. ``urgent``: every other downward event is urgent, from the first on. ``unheld``: checkpoints
    hold no events (H79). ``window``: how many upward events may be untaken, and how many a checkpoint records.
    ``runs``: how often another run begins, with the same input or another one (H174); ``interruptions``: how many runs
    fail; ``restarts``: how often another driver starts. Each run has ``attempts`` for each subtask.
    ``parts``: how many parts inside of checkpoints exchange the events, in turn (H150). ``permits``: how often each
    attempt asks a part outside of checkpoints for a permit. Until it has that, it meets no barrier (H152).
    ``in_flight``: the operator is an async stage with so many records at a time, one for each upward event, which is
    sent as the result leaves (H180, H181); 0: it is not. ``ordered``: results leave in the order of the records.
    ``files``: a part of each state is in files, which are uploaded after the snapshot (H190, H192);
    ``upload_failures``: how many uploads fail. ``sweeps``: a file that has not changed is named again, and the driver
    deletes what nothing needs; only with one subtask, because the names of files say whose they are.
    """

    name: str
    about: str
    subtasks: int = 1
    attempts: int = 1
    events_up: int = 1
    events_down: int = 1
    concurrent: int = 1
    checkpoints: int = 1
    savepoints: int = 0
    aborts: int = 0
    failures: int = 0
    drops: int = 0
    timeouts: int = 0
    declines: int = 0
    store_failures: int = 0
    forgeries: int = 0
    upload_failures: int = 0
    runs: int = 0
    interruptions: int = 0
    restarts: int = 0
    apart: bool = False
    asks: bool = False
    defers: bool = False
    abandons: bool = False
    in_snapshot: bool = False
    finishes: bool = False
    greets: bool = False
    late: int = 0
    tolerant: bool = False
    lost_starts: bool = False
    urgent: bool = False
    unheld: bool = False
    window: int = 64
    parts: int = 1
    permits: int = 0
    in_flight: int = 0
    ordered: bool = False
    files: bool = False
    sweeps: bool = False
    mode: RestoreMode = RestoreMode.STREAMING

    @property
    def starts(self) -> int:
        """How often each subtask may start, in all runs together."""
        return self.attempts * (1 + self.runs)

    @property
    def table(self) -> PartTable:
        """The parts: those inside, then the one that gives permits, if any."""
        inside = [OperatorPart(str(index) if index else "") for index in range(self.parts)]
        return PartTable([*inside, OperatorPart("permits", outside=True)] if self.permits else inside)

    def __post_init__(self) -> None:
        if self.attempts < 1 + self.failures + (0 if self.tolerant and not self.drops else self.timeouts):
            raise ValueError(f"scope {self.name}: a subtask may fail for good, and its stage with it")


_ALL = (
    Scope("tiny", "one subtask, one checkpoint, an event each way"),
    Scope("tiny-drop", "the same, and its connection breaks", drops=1),
    Scope("tiny-fail", "the same, and its task dies", attempts=2, failures=1),
    Scope(
        "loss-tolerant",
        "events that nobody waits for, which run out of time during a checkpoint (H28, H72)",
        events_down=2,
        timeouts=2,
        tolerant=True,
    ),
    Scope("goodbye", "a subtask finishes, or dies before", attempts=2, failures=1, finishes=True),
    Scope(
        "goodbye-drop",
        "a subtask finishes, its connection breaks, a clock runs out",
        attempts=2,
        events_down=0,
        drops=1,
        timeouts=1,
        finishes=True,
    ),
    Scope(
        "batch", "a retry that starts from nothing, two checkpoints", attempts=2, failures=1, checkpoints=2, mode=BATCH
    ),
    Scope("two-together", "two concurrent checkpoints", events_up=2, events_down=2, checkpoints=2, concurrent=2),
    Scope("aborts", "three checkpoints, of which up to two are given up (G3)", events_down=2, checkpoints=3, aborts=2),
    Scope(
        "aborts-together", "two concurrent ones, of which any is given up (G4)", checkpoints=2, concurrent=2, aborts=2
    ),
    Scope("declines", "a subtask declines, the storage fails", checkpoints=3, declines=1, store_failures=1),
    Scope(
        "in-doubt",
        "the storage fails, and a reset comes before the discard (H64)",
        attempts=2,
        checkpoints=2,
        failures=1,
        store_failures=1,
    ),
    Scope("forged", "a claim beside a living attempt (H75)", drops=1, finishes=True, forgeries=1),
    # These two have the same numbers: no task dies, so all that differs is what the ledger knows when it refuses.
    Scope("forged-batch", "the same in batch mode, no connection breaks", finishes=True, forgeries=1, mode=BATCH),
    Scope(
        "forged-unheard",
        "in streaming mode, the attempt's start was lost",
        finishes=True,
        forgeries=1,
        lost_starts=True,
    ),
    Scope(
        "apart",
        "barriers on their own way, two concurrent ones",
        events_down=2,
        checkpoints=2,
        concurrent=2,
        apart=True,
    ),
    Scope("savepoint", "a savepoint beside two checkpoints", checkpoints=2, savepoints=1, concurrent=2),
    Scope("requests", "the last event up wants an answer", events_up=2, checkpoints=2, asks=True, in_snapshot=True),
    Scope(
        "deferred",
        "the answer to the last event up comes later, and the task may die before (H84, H85)",
        attempts=2,
        checkpoints=2,
        failures=1,
        asks=True,
        defers=True,
    ),
    Scope("deferred-drop", "the same, and the connection breaks", drops=1, asks=True, defers=True),
    Scope(
        "abandoned",
        "a request is abandoned, held or not, two concurrent checkpoints (H85)",
        events_down=0,
        checkpoints=2,
        concurrent=2,
        asks=True,
        defers=True,
        abandons=True,
    ),
    Scope(
        "abandoned-drop",
        "the same, one checkpoint, and the connection breaks",
        events_down=0,
        drops=1,
        asks=True,
        defers=True,
        abandons=True,
    ),
    Scope(
        "abandoned-fail",
        "the same, and the task dies",
        attempts=2,
        events_down=0,
        failures=1,
        asks=True,
        defers=True,
        abandons=True,
    ),
    Scope(
        "held",
        "a retry restores what its valve held",
        attempts=2,
        events_up=3,
        events_down=1,
        checkpoints=2,
        failures=1,
    ),
    Scope(
        "held-request",
        "a retry restores a request that its valve held (H73)",
        attempts=2,
        events_up=2,
        events_down=0,
        failures=1,
        asks=True,
    ),
    Scope(
        "greeting",
        "what subtask_ready sends comes before the first record (H66)",
        attempts=2,
        events_down=2,
        failures=1,
        drops=1,
        greets=True,
    ),
    Scope("urgent", "urgent events and a checkpoint (H91, H92)", events_down=3, urgent=True),
    Scope("urgent-drop", "the same, and the connection breaks", events_up=0, events_down=3, drops=1, urgent=True),
    Scope("urgent-aborts", "urgent events, a checkpoint that is given up", 1, 1, 0, 3, 1, 2, aborts=1, urgent=True),
    Scope("urgent-two", "urgent events, two concurrent checkpoints", 1, 1, 0, 3, 2, 2, urgent=True),
    Scope("urgent-apart", "urgent events, barriers on their own way", 1, 1, 0, 3, apart=True, urgent=True),
    Scope(
        "urgent-greeting",
        "subtask_ready sends an urgent event; a task dies (H66, H92)",
        attempts=2,
        events_up=0,
        events_down=2,
        failures=1,
        greets=True,
        finishes=True,
        urgent=True,
    ),
    Scope("unconfirmed", "an event is not confirmed in time (H25)", attempts=2, events_down=2, drops=1, timeouts=1),
    Scope("drop", "a connection breaks during two checkpoints", events_up=2, events_down=2, checkpoints=2, drops=1),
    Scope("finish", "subtasks finish during a checkpoint (H47)", subtasks=2, checkpoints=1, finishes=True),
    Scope(
        "inputs",
        "one input ends well, and the next run has it again or another one (H174)",
        1,
        1,
        0,
        0,
        runs=1,
        finishes=True,
    ),
    Scope("inputs-interrupted", "the same, and a run may fail", 1, 1, 1, 0, interruptions=1, runs=1, finishes=True),
    Scope("inputs-restart", "the same, and the driver may die", 1, 1, 0, 0, restarts=1, runs=1, finishes=True),
    Scope("inputs-again", "three runs, the driver dies", 1, 1, 0, 0, 1, 0, restarts=1, runs=2, finishes=True),
    Scope("inputs-three", "three runs, of which any may fail", 1, 1, 0, 0, interruptions=1, runs=2, finishes=True),
    Scope(
        "inputs-rest", "a subtask that starts after a checkpoint of the next input", 2, 1, 0, 0, runs=1, finishes=True
    ),
    Scope(
        "inputs-doubt",
        "the storage fails, and the driver dies",
        1,
        1,
        0,
        0,
        restarts=1,
        store_failures=1,
        runs=1,
        finishes=True,
    ),
    Scope("inputs-fail", "a task dies, and the driver", 1, 2, 1, 0, failures=1, restarts=1, runs=1),
    Scope("inputs-late", "a subtask is not in every run, and a run fails", 2, 1, 0, 0, late=1, interruptions=1, runs=1),
    Scope("inputs-two", "two subtasks, and the driver dies", 2, 1, 0, 0, restarts=1, runs=1),
    Scope("late", "a subtask starts during a checkpoint (H11)", subtasks=2, checkpoints=2, late=1),
    Scope("apart-drop", "barriers apart, a broken connection", drops=1, events_down=2, checkpoints=2, apart=True),
    Scope(
        "example",
        "two subtasks, two attempts each, two checkpoints, a task that dies",
        subtasks=2,
        attempts=2,
        checkpoints=2,
        failures=1,
    ),
    Scope("example-events", "two subtasks, two events each way, two checkpoints", 2, 1, 2, 2, checkpoints=2),
    Scope("example-drop", "two subtasks, a broken connection", subtasks=2, checkpoints=2, drops=1),
    Scope(
        "example-whole",
        "two subtasks, a task that dies and a broken connection",
        subtasks=2,
        attempts=2,
        failures=1,
        drops=1,
    ),
    Scope("parts", "two parts, two concurrent checkpoints (H150)", 1, 1, 2, 2, 2, 2, parts=2),
    Scope("parts-drop", "the same, one checkpoint, and the connection breaks", 1, 1, 2, 2, drops=1, parts=2),
    Scope(
        "parts-fail",
        "a retry restores what its valve held of two parts",
        attempts=2,
        events_up=3,
        events_down=1,
        checkpoints=2,
        failures=1,
        parts=2,
    ),
    Scope("parts-urgent", "urgent events of two parts", events_down=3, urgent=True, parts=2),
    Scope("permits", "two parts, and a task waits for a permit before its barrier (H152)", parts=2, permits=1),
    Scope("permits-two", "two permits, two concurrent checkpoints", 1, 1, 1, 1, 2, 2, permits=2),
    Scope("permits-drop", "and the connection breaks", 1, 1, 1, 1, drops=1, permits=1),
    Scope("permits-fail", "and the task dies", attempts=2, failures=1, permits=1),
    Scope("permits-apart", "and barriers are on their own way", 1, 1, 1, 1, apart=True, permits=1),
    Scope("permits-finish", "and the task finishes", events_down=0, finishes=True, permits=1),
    Scope(
        "in-flight",
        "an async stage: calls end in any order, a checkpoint, the task dies (H180, H181)",
        attempts=2,
        events_up=3,
        events_down=0,
        failures=1,
        in_flight=2,
    ),
    Scope(
        "in-flight-ordered",
        "the same, and the results leave in the order of the records",
        attempts=2,
        events_up=3,
        events_down=0,
        failures=1,
        in_flight=2,
        ordered=True,
    ),
    Scope(
        "in-flight-one",
        "one call at a time, and a record beyond the limit that waits; two checkpoints",
        attempts=2,
        events_up=2,
        events_down=0,
        checkpoints=2,
        failures=1,
        in_flight=1,
    ),
    Scope("files", "a part of the state is in files, two concurrent checkpoints (H190)", 1, 1, 1, 1, 2, 2, files=True),
    Scope("files-drop", "the same, one checkpoint, and the connection breaks", drops=1, files=True),
    Scope("files-fail", "and the task dies, and restores", attempts=2, checkpoints=2, failures=1, files=True),
    Scope("files-upload-fails", "an upload fails", 1, 1, 1, 0, 2, 2, upload_failures=1, files=True),
    Scope("files-aborts", "an upload outlives an abort", 1, 1, 1, 0, 1, 2, aborts=1, files=True),
    Scope("files-finish", "a task that finishes during its upload", 1, 2, 1, 0, failures=1, finishes=True, files=True),
    Scope(
        "sweeps", "what nothing needs is deleted; an abort (H190)", 1, 1, 1, 0, 1, 3, aborts=1, files=True, sweeps=True
    ),
    Scope("sweeps-finish", "and a last state is stored", 1, 1, 1, 0, 1, 3, finishes=True, files=True, sweeps=True),
    Scope(
        "sweeps-doubt",
        "the storage fails, and the task dies and restores",
        1,
        2,
        1,
        0,
        1,
        2,
        failures=1,
        store_failures=1,
        files=True,
        sweeps=True,
    ),
    Scope("files-two", "two subtasks, one dies", 2, 2, 1, 0, failures=1, files=True),
    Scope(
        "files-savepoint", "a savepoint, whose files are its own (H193)", 2, 1, 0, 0, 1, 0, 1, finishes=True, files=True
    ),
    Scope("files-apart", "barriers on their own way", 1, 1, 1, 1, 2, 1, savepoints=1, apart=True, files=True),
    Scope(
        "unheld-files",
        "checkpoints hold nothing, the task dies",
        1,
        2,
        2,
        1,
        failures=1,
        window=1,
        unheld=True,
        files=True,
    ),
    Scope("unheld-files-savepoint", "and a savepoint", 1, 1, 1, 1, 2, 1, savepoints=1, unheld=True, files=True),
    Scope("unheld-parts-fail", "two parts, and the task dies", 1, 2, 2, 1, failures=1, window=1, parts=2, unheld=True),
    Scope("unheld-permits", "two parts, a task waits for a permit", parts=2, permits=2, window=1, unheld=True),
    Scope("unheld-permits-drop", "the same, and the connection breaks", drops=1, permits=1, unheld=True),
    Scope("unheld-permits-fail", "and the task dies", attempts=2, failures=1, permits=1, unheld=True),
    Scope("unheld", "checkpoints that hold nothing (H79)", events_up=2, events_down=2, unheld=True),
    Scope("unheld-drop", "the same, and the connection breaks", drops=1, unheld=True),
    Scope("unheld-fail", "the same, and the task dies", attempts=2, failures=1, unheld=True),
    Scope("unheld-two", "two concurrent ones", 1, 1, 2, 2, 2, 2, unheld=True),
    Scope("unheld-aborts", "two, of which any is given up", 1, 1, 1, 2, 1, 2, aborts=2, unheld=True),
    Scope("unheld-aborts-long", "three, of which up to two are given up", 1, 1, 1, 2, 1, 3, aborts=2, unheld=True),
    Scope(
        "unheld-aborts-together",
        "two concurrent ones, of which any is given up",
        1,
        1,
        1,
        1,
        2,
        2,
        aborts=2,
        unheld=True,
    ),
    Scope(
        "unheld-declines",
        "a subtask declines, the storage fails",
        checkpoints=3,
        declines=1,
        store_failures=1,
        unheld=True,
    ),
    Scope("unheld-savepoint", "a savepoint beside a checkpoint", 1, 1, 1, 1, 2, 1, savepoints=1, unheld=True),
    Scope("unheld-apart", "barriers on their own way, two concurrent ones", 1, 1, 1, 2, 2, 2, apart=True, unheld=True),
    Scope("unheld-apart-drop", "the same, and the connection breaks", drops=1, apart=True, unheld=True),
    Scope(
        "unheld-requests",
        "the last event up wants an answer, two concurrent ones",
        events_up=2,
        checkpoints=2,
        concurrent=2,
        asks=True,
        in_snapshot=True,
        unheld=True,
    ),
    Scope(
        "unheld-deferred",
        "the answer comes later, two concurrent ones, one is given up",
        checkpoints=2,
        concurrent=2,
        aborts=1,
        asks=True,
        defers=True,
        unheld=True,
    ),
    Scope(
        "unheld-deferred-fail",
        "the answer comes later, and the task may die before",
        attempts=2,
        checkpoints=2,
        failures=1,
        asks=True,
        defers=True,
        unheld=True,
    ),
    Scope("unheld-deferred-drop", "and the connection breaks", drops=1, asks=True, defers=True, unheld=True),
    Scope(
        "unheld-abandoned",
        "a request is abandoned, perhaps while it is put aside",
        events_up=2,
        events_down=0,
        checkpoints=2,
        concurrent=2,
        asks=True,
        defers=True,
        abandons=True,
        window=1,
        unheld=True,
    ),
    Scope(
        "recorded",
        "a retry restores what was recorded",
        attempts=2,
        events_up=3,
        events_down=1,
        checkpoints=2,
        failures=1,
        unheld=True,
    ),
    Scope(
        "recorded-request",
        "a retry restores a request that was recorded (H73)",
        attempts=2,
        events_up=2,
        events_down=0,
        failures=1,
        asks=True,
        unheld=True,
    ),
    Scope(
        "recorded-bound",
        "more than is recorded is put aside; the task may die",
        attempts=2,
        events_up=3,
        events_down=0,
        checkpoints=2,
        concurrent=2,
        failures=1,
        window=2,
        unheld=True,
    ),
    Scope(
        "bound-finish",
        "what was put aside comes when the subtask finishes",
        events_up=3,
        events_down=0,
        drops=1,
        finishes=True,
        window=2,
        unheld=True,
    ),
    Scope(
        "unheld-greeting",
        "what subtask_ready sends comes before the first record (H66)",
        attempts=2,
        events_down=2,
        failures=1,
        greets=True,
        unheld=True,
    ),
    Scope("unheld-urgent", "urgent events, two concurrent checkpoints", 1, 1, 0, 3, 2, 2, urgent=True, unheld=True),
    Scope(
        "unheld-urgent-aborts", "urgent events, one is given up", 1, 1, 0, 3, 1, 2, aborts=1, urgent=True, unheld=True
    ),
    Scope("unheld-goodbye", "a subtask finishes, or dies before", attempts=2, failures=1, finishes=True, unheld=True),
    Scope(
        "unheld-tolerant",
        "loss-tolerant events that run out of time",
        events_down=2,
        timeouts=2,
        tolerant=True,
        unheld=True,
    ),
    Scope("unheld-finish", "subtasks finish during a checkpoint", 2, 1, 1, 1, 1, 1, finishes=True, unheld=True),
    Scope("unheld-late", "a subtask starts during a checkpoint", 2, 1, 1, 1, 1, 2, late=1, unheld=True),
    Scope("unheld-example", "two subtasks, a task that dies", 2, 2, 1, 0, 1, 1, failures=1, unheld=True),
    Scope(
        "unheld-example-long", "the same, events both ways, two checkpoints", 2, 2, 1, 1, 1, 2, failures=1, unheld=True
    ),
    Scope("unheld-example-two", "two subtasks, two concurrent checkpoints", 2, 1, 1, 0, 2, 2, unheld=True),
    Scope("unheld-example-down", "the same, with events down", 2, 1, 0, 1, 2, 2, unheld=True),
    Scope(
        "unheld-deep",
        "one subtask with all of it",
        attempts=2,
        checkpoints=2,
        concurrent=2,
        failures=1,
        drops=1,
        unheld=True,
    ),
    Scope(
        "deep", "one subtask with all of it", attempts=2, events_up=2, events_down=2, checkpoints=2, failures=1, drops=1
    ),
)
LONG = frozenset({"example-events", "unheld-aborts-long", "unheld-example-long"})
"""Excluded from the default, which must finish within ten minutes on two cores."""
DEFAULT = tuple(scope.name for scope in _ALL if scope.name not in LONG)
SCOPES = {scope.name: scope for scope in _ALL}
