# SPDX-License-Identifier: Apache-2.0

"""The timeline of a sidecar as a file in Chrome's trace event format, which Perfetto opens.

The format: Google, "Trace Event Format". The file is a JSON array of events, each on its own line. Times are in
microseconds since the trace began. The closing bracket may be missing, so the file can also be read if the driver was
killed.

The event loop only appends values to a queue. A thread writes them four times a second. What would exceed the limit of
the file is left out; the file and the log say so.

What the trace needs beyond the journal comes through hooks that exist only while it is written: the end of each call of
a coordinator, and each confirmed event.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import anyio

from actors import Actor, ActorContext, ActorRef, ActorSystem, threads
from actors.coordination.engine.operator_config import Observed
from actors.coordination.user_calls import Call
from actors.logs import get_logger
from protocol.attempts import (
    AttemptAccepted,
    OperatorReset,
    RunEnded,
    RunStarted,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
    SubtaskReset,
)
from protocol.barrier_tracker import RaiseGlobalFailure
from protocol.describing import as_json, describe
from protocol.ids import ExecutionAttempt
from protocol.values import value
from spark_bridge.common.errors import SidecarError
from spark_bridge.observability.collector import ObservedOperator, StatusCollector
from spark_bridge.observability.displays import Displays
from spark_bridge.observability.journal import Journal, end_of
from spark_bridge.observability.status import SidecarStatus

BYTES_MAX = 100 * 2**20
WAITING_MAX = 200_000
"""Events that wait for the thread; more are left out."""
WRITE_EVERY_S = 0.25
SAMPLE_EVERY_S = 0.5
FREQUENT_PER_S = 500
"""Of each operator, this many confirmed events, and this many calls under a millisecond, are drawn in a second."""
SHORT_S = 1e-3

DRIVER = 1
SUBTASK_THREADS = 1_000_000
COPIES_MAX = 4
_COORDINATOR, _RUNS, _LANES = 1, 2, 8  # threads of an operator in the driver's process
_FREQUENT_METHODS = ("handle_event_from_operator", "handle_request")

log = get_logger("headgate.observability")

Event = dict[str, Any]

_BEGINNING, _FIRST_EVENT = "[\n", '{"name":"'


def _created(path: Path) -> TextIO:
    """Open the file for a new trace; a finished one is replaced. Raises ``OSError``."""
    # H162
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            begins = os.read(descriptor, len(_BEGINNING) + len(_FIRST_EVENT)).decode("utf-8", errors="replace")
            if begins not in ("", _BEGINNING, _BEGINNING + _FIRST_EVENT):
                raise FileExistsError(errno.EEXIST, "there is a file that is not a trace, and it is not replaced")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until the file is closed
            except BlockingIOError:
                raise FileExistsError(errno.EEXIST, "another sidecar is writing its trace there") from None
            with suppress(OSError):  # a filesystem without modes; an older trace may have another one
                os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
        return open(descriptor, "w", encoding="utf-8")
    except BaseException:
        os.close(descriptor)
        raise


class TraceFile:
    """Writes events to a file from a thread. ``add`` is cheap, and for the event loop only."""

    def __init__(self, path: Path, bytes_max: int = BYTES_MAX) -> None:
        """Raises ``OSError`` if the file cannot be created. One that is not a trace, or grows now, is not replaced."""
        self._file = _created(path)
        self._path = path
        self._bytes_max = bytes_max
        self._waiting: deque[Event] = deque()
        self._size = self._file.write(_BEGINNING)
        self._first = True
        self._over = threading.Event()
        self.left_out = 0
        """How many events were not written."""
        self.full = False
        self._thread = threading.Thread(target=self._run, name="headgate-trace", daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        """Write the event soon."""
        if self.full or len(self._waiting) >= WAITING_MAX:
            self._leave_out(1)
        else:
            self._waiting.append(event)

    def close(self) -> None:
        """Write what waits, and end the array. Blocks until it is on its way to the disk."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over.wait(WRITE_EVERY_S):
                self._write_waiting()
            self._write_waiting()
            self._write_raw({"name": "end of trace", "ph": "M", "pid": DRIVER, "args": {"left_out": self.left_out}})
            self._file.write("\n]\n")
        except Exception as error:  # most often an OSError; whatever it is, what waits must not grow
            self._stop_writing()
            log.warning("trace ended, file not writable", file=str(self._path), error=describe(error))
        finally:
            try:
                self._file.close()
            except OSError as error:
                log.warning("trace file not closed", file=str(self._path), error=str(error))

    def _write_waiting(self) -> None:
        while self._waiting:
            event = self._waiting.popleft()
            text = as_json(event).decode()
            if self._size + len(text) > self._bytes_max:
                self._stop_writing()
                last = {"name": "trace is full", "ph": "i", "s": "g", "pid": DRIVER, "tid": 0, "ts": event["ts"]}
                self._write_raw(last)
                log.warning("trace full, later events dropped", file=str(self._path), bytes_max=self._bytes_max)
            else:
                self._write_text(text)
        self._file.flush()

    def _stop_writing(self) -> None:
        self.full = True
        self._leave_out(len(self._waiting) + 1)
        self._waiting.clear()

    def _leave_out(self, count: int) -> None:
        self.left_out += count

    def _write_raw(self, event: Event) -> None:
        self._write_text(as_json(event).decode())

    def _write_text(self, text: str) -> None:
        self._size += self._file.write(text if self._first else f",\n{text}")
        self._first = False


class Budget:
    """How much of something frequent is drawn: so many in a second, then none until the next one."""

    def __init__(self, per_s: int = FREQUENT_PER_S) -> None:
        self._per_s = per_s
        self._second = -1
        self._left = 0

    def take(self, now: float) -> bool:
        """Whether to draw this one."""
        if int(now) != self._second:
            self._second, self._left = int(now), self._per_s
        self._left -= 1
        return self._left >= 0


class _Traced:
    """One operator: its threads in the driver's process, and what is open."""

    def __init__(self, number: int) -> None:
        base = 100 * number
        self.coordinator, self.runs, self.lanes = base + _COORDINATOR, base + _RUNS, base + _LANES
        self.subtasks = SUBTASK_THREADS * number  # threads in the executors' processes
        self.lane_ends: list[float] = []
        self.calls = Budget()
        self.events = Budget()
        self.attempts: dict[int, ExecutionAttempt] = {}
        self.began: dict[int, tuple[float, float | None]] = {}  # when each was accepted, and ready
        self.drawn: dict[int, tuple[int, int]] = {}  # the process and thread of those whose beginning is drawn
        self.running: str = ""
        self.unhook: Callable[[], None] = lambda: None


class Trace:
    """Draws what the journal, the hooks and the statuses say. Loop only."""

    def __init__(
        self,
        file: TraceFile,
        journal: Journal,
        now: Callable[[], float],
        operators: Callable[[], Mapping[str, ObservedOperator]],
    ) -> None:
        self._file = file
        self._journal = journal
        self._now = now
        self._operators = operators
        self._began = now()
        self._traced: dict[str, _Traced] = {}
        self._executors: dict[tuple[str, str], int] = {}
        self._named: set[tuple[int, int]] = set()
        self._checkpoints: dict[tuple[str, int], tuple[str, bool]] = {}  # the phase, and whether it is a savepoint
        self._event_ids = 0
        self._name_process(DRIVER, "driver")
        self._emit("trace began", "M", DRIVER, 0, self._began, args={"epoch_s": journal.epoch + self._began})
        for operator_id in operators():
            self._of(operator_id)
        self._end = journal.subscribe("trace", self.observe)

    def close(self) -> None:
        """Take the hooks away, and end what is open. The file stays open."""
        self._end()
        now = self._now()
        for traced in self._traced.values():
            traced.unhook()
            for attempt in list(traced.attempts.values()):
                self._end_attempt(traced, attempt, now, "still running")
            if traced.running:
                self._emit(traced.running, "E", DRIVER, traced.runs, now)
        for operator_id, checkpoint_id in list(self._checkpoints):
            self._end_checkpoint(operator_id, checkpoint_id, now, "in progress")

    # --- what was observed ----------------------------------------------------------------------------------------

    def observe(self, operator_id: str, observed: Observed, now: float) -> None:
        """A ``Subscriber`` of the journal."""
        traced = self._of(operator_id)
        match observed:
            case RunStarted(_, run_id):
                traced.running = f"run, stage {run_id}"
                self._emit(traced.running, "B", DRIVER, traced.runs, now)
            case RunEnded(_, run_id, succeeded, reason):
                for attempt in list(traced.attempts.values()):
                    self._end_attempt(traced, attempt, now, "run ended")
                args = {"succeeded": succeeded, "reason": reason}
                if traced.running:
                    self._emit(traced.running, "E", DRIVER, traced.runs, now, args=args)
                traced.running = ""
            case AttemptAccepted(attempt):
                traced.attempts[attempt.task_attempt_id] = attempt
                traced.began[attempt.task_attempt_id] = (now, None)
            case SubtaskReady(attempt):
                accepted, _ = traced.began.get(attempt.task_attempt_id, (now, None))
                traced.began[attempt.task_attempt_id] = (accepted, now)
            case SubtaskFinished(attempt):
                self._end_attempt(traced, attempt, now, "finished")
            case SubtaskFailed(attempt, reason_of_failure):
                kind = reason_of_failure.kind.name.lower()
                where = self._end_attempt(traced, attempt, now, kind) or (DRIVER, traced.coordinator)
                args = {"subtask": attempt.subtask, "attempt": attempt.attempt, "reason": reason_of_failure.text}
                self._emit(f"failure: {kind}", "i", *where, now, args=args, s="t")
            case SubtaskReset(_, subtask):
                self._emit(f"reset of subtask {subtask}", "i", DRIVER, traced.coordinator, now, s="t")
            case OperatorReset(_, cause):
                self._emit("reset of the operator", "i", DRIVER, traced.coordinator, now, args={"cause": cause}, s="p")
            case RaiseGlobalFailure(cause):
                self._emit("job failed", "i", DRIVER, traced.coordinator, now, args={"cause": cause}, s="p")
            case _:
                self._observe_checkpoint(operator_id, observed, now)

    def _observe_checkpoint(self, operator_id: str, observed: Observed, now: float) -> None:
        if (ended := end_of(observed)) is not None:
            self._end_checkpoint(operator_id, ended[0], now, *ended[1:])
            return
        for checkpoint_id, under_way in self._journal.of(operator_id).under_way.items():
            key = (operator_id, checkpoint_id)
            before = self._checkpoints.get(key)
            if before is None:
                kind = "savepoint" if under_way.savepoint else "checkpoint"
                self._emit_async(f"{kind} {checkpoint_id}", "b", "checkpoint", key, under_way.triggered)
            elif before[0] == under_way.phase:
                continue
            else:
                self._emit_async(before[0], "e", "checkpoint", key, under_way.phase_began)
            self._emit_async(under_way.phase, "b", "checkpoint", key, under_way.phase_began)
            self._checkpoints[key] = (under_way.phase, under_way.savepoint)

    def _end_checkpoint(self, operator_id: str, checkpoint_id: int, now: float, outcome: str, reason: str = "") -> None:
        key = (operator_id, checkpoint_id)
        before = self._checkpoints.pop(key, None)
        if before is None:
            return
        phase, savepoint = before
        args = {"outcome": outcome, "reason": reason}
        self._emit_async(phase, "e", "checkpoint", key, now)
        name = f"{'savepoint' if savepoint else 'checkpoint'} {checkpoint_id}"
        self._emit_async(name, "e", "checkpoint", key, now, args)

    def _end_attempt(
        self, traced: _Traced, attempt: ExecutionAttempt, now: float, outcome: str
    ) -> tuple[int, int] | None:
        """Draw an attempt when it ends, because its place is known then. Returns its process and thread."""
        task_attempt_id = attempt.task_attempt_id
        if task_attempt_id not in traced.began:
            return None
        self._begin_attempt(traced, attempt, ("", ""))
        accepted, ready = traced.began.pop(task_attempt_id)
        del traced.attempts[task_attempt_id]
        where = traced.drawn.pop(task_attempt_id)
        # Not one complete event: Perfetto would place it around what begins at the same time.
        self._emit("restore and open", "B", *where, accepted)
        self._emit("restore and open", "E", *where, now if ready is None else ready)
        self._emit(_name_of(attempt), "E", *where, now, args={"outcome": outcome})
        return where

    def _begin_attempt(self, traced: _Traced, attempt: ExecutionAttempt, place: tuple[str, str]) -> None:
        """Draw the beginning of an attempt as soon as its place is known, or it ends."""
        task_attempt_id = attempt.task_attempt_id
        if task_attempt_id in traced.drawn:
            return
        where = traced.drawn[task_attempt_id] = self._thread_of(traced, attempt, place)
        accepted, _ = traced.began[task_attempt_id]
        self._emit(_name_of(attempt), "B", *where, accepted, args={"task_attempt_id": task_attempt_id})

    # --- hooks ----------------------------------------------------------------------------------------------------

    def _call_ended(self, traced: _Traced, call: Call, now: float) -> None:
        lasted = now - call.began_at
        if lasted < SHORT_S and call.method in _FREQUENT_METHODS and not traced.calls.take(now):
            return
        lane = next((lane for lane, end in enumerate(traced.lane_ends) if end <= call.began_at), len(traced.lane_ends))
        if lane == len(traced.lane_ends):
            traced.lane_ends.append(now)
        traced.lane_ends[lane] = now
        thread = traced.coordinator if not lane else traced.lanes + lane
        if lane:
            self._name_thread(DRIVER, thread, f"coordinator, concurrent calls {lane}")
        self._emit(call.method, "X", DRIVER, thread, call.began_at, args=call.arguments, dur=_us(lasted))

    def _event_confirmed(self, traced: _Traced, microseconds: float, subject: object) -> None:
        now = self._now()
        if not isinstance(subject, ExecutionAttempt) or not traced.events.take(now):
            return
        self._event_ids += 1
        key = (subject.operator_id, f"event {self._event_ids}")
        name = f"event to {_name_of(subject)}"
        self._emit_async(name, "b", "event", key, now - microseconds / 1e6)
        self._emit_async(name, "e", "event", key, now)

    def sample(self, status: SidecarStatus) -> None:
        """Draw rates and the loop's lag, and learn where attempts run."""
        now = self._now()
        self._count("event loop lag p99 (ms)", now, {"lag": status.loop_lag_p99_ms})
        for operator_id, operator in status.operators.items():
            traced = self._of(operator_id)
            rates = {"up": operator.events_up_per_s, "down": operator.events_down_per_s}
            self._count(f"{operator_id}: events/s", now, rates)
            self._count(f"{operator_id}: mailbox", now, {"messages": operator.queued})
            for attempt in operator.attempts:
                known = traced.attempts.get(attempt.task_attempt_id)
                if known is not None and attempt.host:
                    self._begin_attempt(traced, known, (attempt.executor_id, attempt.host))

    # --- processes and threads ------------------------------------------------------------------------------------

    def _of(self, operator_id: str) -> _Traced:
        traced = self._traced.get(operator_id)
        if traced is None:
            traced = self._traced[operator_id] = _Traced(len(self._traced) + 1)
            self._name_thread(DRIVER, traced.coordinator, f"coordinator of {operator_id}")
            self._name_thread(DRIVER, traced.runs, f"runs of {operator_id}")
        operator = self._operators().get(operator_id)
        if operator is not None and operator.statistics.confirm_us.show is None:
            self._hook(operator, traced)
        return traced

    def _hook(self, operator: ObservedOperator, traced: _Traced) -> None:
        recorder, watch = operator.statistics.confirm_us, operator.watch
        run = self._journal.displays.run  # these are called in the middle of the operator's work
        recorder.show = lambda us, subject: run("trace", self._event_confirmed, traced, us, subject)
        watch.on_end = lambda call: run("trace", self._call_ended, traced, call, self._now())

        def unhook() -> None:
            recorder.show = None
            watch.on_end = None

        traced.unhook = unhook

    def _thread_of(self, traced: _Traced, attempt: ExecutionAttempt, place: tuple[str, str]) -> tuple[int, int]:
        """A thread for each subtask, and further ones for copies that run beside it."""
        executor_id, host = place
        process = self._executors.get(place)
        if process is None:
            process = self._executors[place] = DRIVER + 1 + len(self._executors)
            known = f"executor {executor_id} on {host}" if host else "executor not known"
            self._name_process(process, known)
        taken = set(traced.drawn.values())
        first = traced.subtasks + COPIES_MAX * attempt.subtask
        threads = range(first, first + COPIES_MAX)
        thread = next((one for one in threads if (process, one) not in taken), first)
        copy = ", copy" if thread != first else ""
        self._name_thread(process, thread, f"{attempt.operator_id}[{attempt.subtask}]{copy}")
        return process, thread

    def _name_process(self, process: int, name: str) -> None:
        self._emit("process_name", "M", process, 0, self._began, args={"name": name})

    def _name_thread(self, process: int, thread: int, name: str) -> None:
        if (process, thread) not in self._named:
            self._named.add((process, thread))
            self._emit("thread_name", "M", process, thread, self._began, args={"name": name})

    # --- events ---------------------------------------------------------------------------------------------------

    def _emit(self, name: str, phase: str, process: int, thread: int, at: float, **more: Any) -> None:
        ts = _us(max(0.0, at - self._began))
        self._file.add({"name": name, "ph": phase, "pid": process, "tid": thread, "ts": ts, **more})

    def _emit_async(
        self, name: str, phase: str, category: str, key: tuple[str, object], at: float, args: Event | None = None
    ) -> None:
        traced = self._traced[key[0]]
        name_and_id: Event = {"cat": category, "id": f"{key[0]}/{key[1]}"}
        if args:
            name_and_id["args"] = args
        self._emit(name, phase, DRIVER, traced.coordinator, at, **name_and_id)

    def _count(self, name: str, now: float, values: Mapping[str, float]) -> None:
        self._emit(name, "C", DRIVER, 0, now, args=dict(values))


def _name_of(attempt: ExecutionAttempt) -> str:
    return f"{attempt.operator_id}[{attempt.subtask}]#{attempt.attempt}"


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


@value
class TakeSample:
    """It is time to draw the figures of a status."""


class TraceActor(Actor[TakeSample]):
    """Takes a status now and then, for what only a status says."""

    def __init__(self, trace: Trace, collector: StatusCollector) -> None:
        self._trace = trace
        self._collector = collector

    async def started(self, context: ActorContext[TakeSample]) -> None:
        context.timers.start("sample", TakeSample(), every_s=SAMPLE_EVERY_S)

    async def receive(self, context: ActorContext[TakeSample], message: TakeSample) -> None:
        self._trace.sample(await self._collector.take())


class _Operators(Protocol):
    @property
    def observed(self) -> dict[str, ObservedOperator]: ...


@dataclass(slots=True)
class Tracing:
    """A trace that is being written: the file, what draws into it, and the actor that samples. Loop only."""

    path: Path
    file: TraceFile
    trace: Trace
    actor: ActorRef[TakeSample]
    system: ActorSystem
    displays: Displays

    async def end(self) -> None:
        """Take the hooks away, and complete the file."""
        self.displays.run("trace", self.trace.close)
        with anyio.CancelScope(shield=True):
            await self.system.stop(self.actor)
            await threads.DRIVER.run(self.file.close)


async def start_tracing(
    path: Path, system: ActorSystem, journal: Journal, collector: StatusCollector, operators: _Operators
) -> Tracing:
    """Begin to write. Raises ``SidecarError`` if the file cannot be created."""
    try:
        file = await threads.DRIVER.run(TraceFile, path)
    except OSError as error:
        raise SidecarError(
            f"cannot write the trace to {path}: {error.strerror or error}; choose another file"
        ) from error
    trace = Trace(file, journal, system.clock.now, lambda: operators.observed)
    displays = journal.displays
    actor = displays.spawn(system, lambda: TraceActor(trace, collector), "trace")
    return Tracing(path, file, trace, actor, system, displays)
