# SPDX-License-Identifier: Apache-2.0

"""The driver's half of the load test: a sidecar, the simulated Spark, both coordinators, and the kills.

The measured operator has many ends in a few processes, the neighbour a few ends that flood. In the second half of the
events, the neighbour also does its worst with its key: connections without an end, messages that are never complete,
registrations that are refused, records below the plaintext. A subtask's coordinator
numbers the events that it sends, and checks the numbers of those that come. Both ends return to the checkpoint that a
new attempt continues from, each by its own records, so any event that is lost or comes twice shows as a number that is
not the next one.

Everything is counted in events that the coordinator sends: the end, the kills and the checkpoints. A rate only says
when each event is due. A round trip lasts from the moment at which the event was due until the coordinator has the
answer, so waiting behind other work counts. Events whose attempt was killed meanwhile are not measured.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from actors.coordination import CoordinatorContext, OperatorCoordinator, SubtaskGateway
from actors.coordination.engine.barrier_tracker import CheckpointFailed
from benchmarks.crowd import OWN_FILES, TIMEOUT_S, Child, CrowdRuntime, PretendedSpark, running_child
from benchmarks.many_endpoints import allow_files, resident_bytes
from protocol.barrier_tracker import CheckpointConfig
from protocol.errors import GatewayFull
from protocol.facts import (
    JobEnded,
    JobStarted,
    StageSubmitted,
    StatusReported,
    TaskEnded,
    TaskOutcome,
    TaskPlace,
    TaskStarted,
    TaskState,
)
from protocol.gateway.types import GatewayLimits
from protocol.wire.keys import KeyRing
from protocol.wire.messages import RestoreMode
from spark_bridge.common.certificates import certificate_digest
from spark_bridge.driver.config import SidecarConfig
from tests.load.checker import DOWN, UP, Durations, Sequence, Tally
from tests.load.endpoints import UNASKED

MEASURED, NEIGHBOUR = "measured", "victim"
"""The name of the neighbour is that under which the attackers of ``tests.fuzz`` have a key: it is hostile."""
STAGES = {MEASURED: 1, NEIGHBOUR: 2}
SETTLE_S = 60.0
"""How long the last events may take. What has not come by then is lost."""
LOOK_S = 0.1
FLOODING_NICENESS = 5
"""The flooding process must not take the processor from the measured ends: on a cluster it would be elsewhere."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run does. ``rate`` is in events per second that the coordinator sends; None: as fast as they go.

    ``events`` and ``checkpoint_every`` are counted in these events, and ``kills`` are at random ones. ``lose``: the
    checker is not shown the upward event with this position in the run, and must find that. ``tls``: encrypt all
    connections.
    """

    seed: int
    ends: int
    processes: int
    neighbours: int
    strangers: int
    events: int
    rate: float | None
    kills: int
    checkpoint_every: int
    lose: int | None = None
    tls: bool = False
    hostile: int = 8
    """So many attack with the neighbour's key at the same time."""


@dataclass
class Report:
    """The result of a run, or the figures so far. Memory is that of the driver's process, in bytes."""

    plan: Plan
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    neighbour: Tally = field(default_factory=Tally)
    kills: int = 0
    checkpoints: int = 0
    checkpoints_failed: int = 0
    restored: int = 0
    strangers: int = 0
    memory_start: int = 0
    memory_end: int = 0
    memory_phases: list[int] = field(default_factory=lambda: [0, 0])
    """The most in the first half, and in the second one, in which the neighbour does its worst."""
    phases: list[tuple[float, float]] = field(default_factory=list)
    """The 50th and the 99th percentile of the round trips of each half, in milliseconds."""
    attacks: int = 0
    round_trips: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    p999_ms: float = 0.0
    max_ms: float = 0.0

    @property
    def passed(self) -> bool:
        return self.tally.clean and self.neighbour.clean and self.kills == self.restored == self.plan.kills

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


class LoadSpark(PretendedSpark):
    """Runs one job with one stage for each operator, and knows which tasks are running."""

    def __init__(self, secret: bytes, tally: Tally) -> None:
        super().__init__()
        self.secret = secret
        self.keys = KeyRing(secret)
        self.running: dict[int, TaskStarted] = {}
        self._tally = tally
        self._last_task_id = 0

    def begin(self, operator: str, parallelism: int) -> None:
        stage = STAGES[operator]
        self.say(JobStarted(stage, (stage,)))
        self.say(StageSubmitted(stage, 0, parallelism))

    def end(self) -> None:
        for stage in STAGES.values():
            self.say(JobEnded(stage, False, "the load test is over"))

    def new_task(self, operator: str, subtask: int, attempt_number: int) -> TaskStarted:
        """Return a task that Spark has launched. Its start is not reported yet."""
        self._last_task_id += 1
        task = TaskStarted(self._last_task_id, STAGES[operator], 0, subtask, attempt_number)
        self.running[task.task_attempt_id] = task
        return task

    def fail(self, task: TaskStarted, outcome: TaskOutcome, reason: str) -> None:
        if self.running.pop(task.task_attempt_id, None) is not None:
            place = (task.stage_id, task.stage_attempt, task.partition, task.attempt_number)
            self.say(TaskEnded(task.task_attempt_id, *place, outcome, reason))

    async def query_status(self, task_attempt_ids: frozenset[int], job_ids: frozenset[int]) -> StatusReported:
        states = {id: TaskState.RUNNING if id in self.running else TaskState.UNKNOWN for id in task_attempt_ids}
        running = [self.running[id] for id in task_attempt_ids if id in self.running]
        places = {task.task_attempt_id: TaskPlace(task.stage_id, task.partition) for task in running}
        return StatusReported(dict.fromkeys(job_ids, True), states, places)

    async def kill_task(self, task_attempt_id: int, reason: str, place: TaskPlace | None = None) -> None:
        if (task := self.running.get(task_attempt_id)) is not None:
            self._tally.fault(f"the sidecar has killed subtask {task.partition} of stage {task.stage_id}: {reason}")
            self.fail(task, TaskOutcome.KILLED, reason)

    async def cancel_job(self, job_id: int, reason: str) -> None:
        if self.running:
            self._tally.fault(f"the sidecar has cancelled job {job_id}: {reason}")


class CheckingCoordinator(OperatorCoordinator):
    """Checks the numbers of all events that come. A subtask returns to a checkpoint alone."""

    def __init__(self, parallelism: int, tally: Tally, lose: int | None = None) -> None:
        self.tally = tally
        self.gateways: dict[int, SubtaskGateway] = {}
        self.sent = [0] * parallelism
        self.taken = [Sequence(tally, f"subtask {subtask}, up") for subtask in range(parallelism)]
        self.round_trips = Durations()
        self.phases = [Durations(), Durations()]
        self.phase = 0
        self.restored = 0
        self._lose = lose
        self._came = 0
        self._due_of: list[dict[int, float]] = [{} for _ in range(parallelism)]
        self._cuts: dict[int, tuple[list[int], list[int]]] = {}
        self._ready = asyncio.Event()

    async def until_ready(self, subtasks: range) -> None:
        """Wait until each of these subtasks has an attempt that is ready."""
        async with asyncio.timeout(TIMEOUT_S):
            while not all(subtask in self.gateways for subtask in subtasks):
                self._ready.clear()
                await self._ready.wait()

    def send(self, subtask: int, due: float) -> None:
        """Send the next event. Raises ``GatewayFull``."""
        number = self.sent[subtask]
        self.gateways[subtask].send_event_nowait([subtask, DOWN, number])
        self.sent[subtask] += 1
        self._due_of[subtask][number] = due

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        whose, direction, number, answered = event
        self._came += 1
        if (whose, direction) != (subtask, UP):
            self.tally.fault(f"an event {direction} of subtask {whose} came from subtask {subtask}")
            return
        if self._came != self._lose:
            self.taken[subtask].take(number)
        if answered != UNASKED and (due := self._due_of[subtask].pop(answered, None)) is not None:
            took_s = time.monotonic() - due
            self.round_trips.add(took_s)
            self.phases[self.phase].add(took_s)

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateways[subtask] = gateway
        self._ready.set()

    async def subtask_failed(self, subtask: int, attempt: int, reason: Any) -> None:
        self.gateways.pop(subtask, None)
        self._due_of[subtask].clear()

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        sent, taken = self._cuts[checkpoint_id]
        self.restored += 1
        self.sent[subtask] = sent[subtask]
        self.taken[subtask].rewind(taken[subtask])

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self._cuts[checkpoint_id] = (list(self.sent), [each.expected for each in self.taken])
        return b""

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._cuts = {id: cut for id, cut in self._cuts.items() if id >= checkpoint_id}

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        self._cuts.pop(checkpoint_id, None)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        if any(self.sent):
            self.tally.fault(f"the whole operator was reset to checkpoint {checkpoint_id}")


class MeasuredCoordinator(CheckingCoordinator):
    """Also sends the events of the plan, each at its time, to one subtask after the other."""

    def __init__(self, plan: Plan, tally: Tally) -> None:
        super().__init__(plan.ends, tally, plan.lose)
        kills = Random(plan.seed).choices(range(1, plan.events + 1), k=plan.kills)
        self._kills_after = Counter(kills)
        self.kills_due = asyncio.Semaphore(0)
        self.checkpoint_due = asyncio.Event()
        self.all_sent = asyncio.Event()
        self.half_sent = asyncio.Event()
        self.scheduled = 0
        self._plan = plan
        self._next = 0
        self._began = 0.0

    async def start(self, context: CoordinatorContext) -> None:
        self._context = context

    def begin(self) -> None:
        """Start to send. All subtasks are ready."""
        self._began = time.monotonic()
        self._context.call_later(0.0, self._send_due)

    async def _send_due(self) -> None:
        plan, now = self._plan, time.monotonic()
        for _ in range(plan.ends):  # then it is the turn of what has come meanwhile
            due = now if plan.rate is None else self._began + self.scheduled / plan.rate
            waits = plan.rate is None and not self.kills_due.locked()  # so that kills and events alternate
            if waits or due > now or self.scheduled == plan.events or not self._send_next(due):
                break
            self.scheduled += 1
            if self.scheduled == max(1, plan.events // 2):
                self.half_sent.set()
            for _ in range(self._kills_after[self.scheduled]):
                self.kills_due.release()
            if self.scheduled % plan.checkpoint_every == 0:
                self.checkpoint_due.set()
        if self.scheduled == plan.events:
            self.all_sent.set()
        else:
            next_due = now if plan.rate is None else self._began + self.scheduled / plan.rate
            self._context.call_later(max(0.0005, next_due - time.monotonic()), self._send_due)

    def _send_next(self, due: float) -> bool:
        """Send to the next subtask that is ready and has capacity. False if there is none."""
        for _ in range(self._plan.ends):
            subtask = self._next
            self._next = (subtask + 1) % self._plan.ends
            if subtask in self.gateways:
                try:
                    self.send(subtask, due)
                except GatewayFull:
                    continue
                return True
        return False


class Load:
    """One run: the parts, and what was counted."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.report = Report(plan)
        self.measured = MeasuredCoordinator(plan, Tally())
        self.neighbour = CheckingCoordinator(plan.neighbours, Tally())
        self.faults = Tally()
        self.spark = LoadSpark(secrets.token_bytes(32), self.faults)
        self.runtime: CrowdRuntime
        self.children: dict[str, list[Child]] = {MEASURED: [], NEIGHBOUR: []}
        self.strangers: Child
        self.insiders: Child
        self._locks: dict[Child, asyncio.Lock] = {}
        self._random = Random(plan.seed)
        self._tasks: list[TaskStarted] = []
        self._began = time.monotonic()

    async def ask(self, child: Child, **command: Any) -> dict[str, Any]:
        async with self._locks.setdefault(child, asyncio.Lock()):
            child.tell(**command)
            return await child.hear()

    async def open_ends(self) -> None:
        """Start all subtasks, and wait until each is ready and strangers have come."""
        for operator, coordinator in ((MEASURED, self.measured), (NEIGHBOUR, self.neighbour)):
            parallelism, children = len(coordinator.sent), self.children[operator]
            tasks = [self.spark.new_task(operator, subtask, 0) for subtask in range(parallelism)]
            if operator == MEASURED:
                self._tasks = tasks
            for task in tasks:
                self.spark.say(task)
            for place, child in enumerate(children):
                child.tell(do="open", tasks=[_identity(task) for task in tasks[place :: len(children)]])
            await coordinator.until_ready(range(parallelism))
        while not (await self.ask(self.strangers, do="report"))["connections"]:  # noqa: ASYNC110 - another process
            await asyncio.sleep(LOOK_S)

    async def run(self, progress: Callable[[Report], None], progress_s: float) -> None:
        """Send everything, with kills and checkpoints, then wait until all of it has come."""
        self._began = time.monotonic()
        self.report.memory_start = resident_bytes()
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(self._checkpoints()),
                group.create_task(self._progress(progress, progress_s)),
                group.create_task(self._begin_second_half()),
                group.create_task(self._watch_memory()),
            ]
            self.measured.begin()
            await self.runtime.checkpoint(MEASURED, timeout_s=TIMEOUT_S)  # so that no kill leads back to the start
            self.report.checkpoints += 1
            await self._kills()
            await self.measured.all_sent.wait()
            await self.measured.until_ready(range(self.plan.ends))
            for each in beside:
                each.cancel()
        self.report.seconds = time.monotonic() - self._began
        await self.runtime.checkpoint(MEASURED, timeout_s=TIMEOUT_S)
        self.report.checkpoints += 1
        await self._settle()

    async def _kills(self) -> None:
        for _ in range(self.plan.kills):
            await self.measured.kills_due.acquire()
            subtask = self._random.randrange(self.plan.ends)
            fact_first, start_first = self._random.random() < 0.5, self._random.random() < 0.5
            await self._kill(subtask, fact_first=fact_first, start_first=start_first)
            self.report.kills += 1

    async def _kill(self, subtask: int, *, fact_first: bool, start_first: bool) -> None:
        """Kill the subtask's attempt and start the next one. Spark's facts come before or after what tasks do."""
        await self.measured.until_ready(range(subtask, subtask + 1))
        child = self.children[MEASURED][subtask % self.plan.processes]
        task = self._tasks[subtask]
        if fact_first:
            self.spark.fail(task, TaskOutcome.FAILED, "it was killed")
        await self.ask(child, do="kill", number=subtask)
        if not fact_first:
            self.spark.fail(task, TaskOutcome.FAILED, "it was killed")
        self.measured.gateways.pop(subtask, None)
        task = self._tasks[subtask] = self.spark.new_task(MEASURED, subtask, task.attempt_number + 1)
        if start_first:
            self.spark.say(task)
        child.tell(do="open", tasks=[_identity(task)])
        if not start_first:
            self.spark.say(task)

    async def _checkpoints(self) -> None:
        """Take a checkpoint whenever one is due. A kill aborts one that is in progress."""
        while True:
            await self.measured.checkpoint_due.wait()
            self.measured.checkpoint_due.clear()
            try:
                await self.runtime.checkpoint(MEASURED, timeout_s=TIMEOUT_S)
                self.report.checkpoints += 1
            except CheckpointFailed:
                self.report.checkpoints_failed += 1

    async def _begin_second_half(self) -> None:
        await self.measured.half_sent.wait()
        await self.ask(self.insiders, do="begin")
        self.measured.phase = 1

    async def _watch_memory(self) -> None:
        most = self.report.memory_phases
        while True:
            most[self.measured.phase] = max(most[self.measured.phase], resident_bytes())
            await asyncio.sleep(LOOK_S)

    async def _progress(self, progress: Callable[[Report], None], progress_s: float) -> None:
        while True:
            await asyncio.sleep(progress_s)
            progress(await self.figures(ends=False))

    async def _settle(self) -> None:
        """Wait until each event that was sent has come. What has not come after ``SETTLE_S`` is lost."""
        for child in self.children[NEIGHBOUR]:
            await self.ask(child, do="calm")
        until = time.monotonic() + SETTLE_S
        while not await self._all_came() and time.monotonic() < until:  # noqa: ASYNC110 - other processes
            await asyncio.sleep(LOOK_S)

    async def _all_came(self) -> bool:
        for operator, coordinator in ((MEASURED, self.measured), (NEIGHBOUR, self.neighbour)):
            for child in self.children[operator]:
                report = await self.ask(child, do="report", ends=True)
                for subtask, (sent, received) in report["ends"].items():
                    ours = coordinator.sent[int(subtask)], coordinator.taken[int(subtask)].expected
                    if ours != (received, sent):
                        return False
        return True

    async def figures(self, *, ends: bool) -> Report:
        """Return what was counted so far. ``ends``: also compare how many were sent and have come, which is the end."""
        report, trips = self.report, self.measured.round_trips
        report.tally, report.neighbour = Tally(), Tally()
        for tally, operator, coordinator in (
            (report.tally, MEASURED, self.measured),
            (report.neighbour, NEIGHBOUR, self.neighbour),
        ):
            for child in self.children[operator]:
                answer = await self.ask(child, do="report", ends=ends)
                tally.add(answer["tally"])
                for subtask, (sent, received) in answer["ends"].items():
                    coordinator.taken[int(subtask)].end(sent)
                    Sequence(tally, f"subtask {subtask}, down", received).end(coordinator.sent[int(subtask)])
            tally.add(coordinator.tally)
        heard = await self.ask(self.strangers, do="report")
        report.strangers = heard["connections"]
        report.tally.add(self.faults)
        report.tally.add(Tally(faults=heard["faults"], stories=heard["stories"]))
        if self.measured.phase:
            heard = await self.ask(self.insiders, do="report")
            report.attacks = heard["connections"]
            report.tally.add(Tally(faults=heard["faults"], stories=heard["stories"]))
        report.phases = [(one.percentile_ms(0.5), one.percentile_ms(0.99)) for one in self.measured.phases]
        report.memory_end = resident_bytes()
        report.seconds = report.seconds if ends else time.monotonic() - self._began
        report.restored = self.measured.restored
        report.round_trips, report.max_ms = trips.count, trips.max_ms
        report.p50_ms, report.p99_ms, report.p999_ms = (trips.percentile_ms(each) for each in (0.5, 0.99, 0.999))
        return report


def _identity(task: TaskStarted) -> list[int]:
    return [task.task_attempt_id, task.partition, task.attempt_number]


@asynccontextmanager
async def _running(plan: Plan) -> AsyncIterator[Load]:
    load = Load(plan)
    allow_files(2 * (plan.ends + plan.neighbours) + plan.strangers * 100 + OWN_FILES)
    async with AsyncExitStack() as stack:
        load.runtime = CrowdRuntime(load.spark, SidecarConfig(tls=plan.tls))
        await stack.enter_async_context(load.runtime)
        host, port = load.runtime.address
        pin = certificate_digest(plan.tls, load.spark.keys).hex()
        stack.callback(load.spark.end)
        for operator, coordinator in ((MEASURED, load.measured), (NEIGHBOUR, load.neighbour)):
            parallelism = len(coordinator.sent)
            await load.runtime.coordinate(
                operator,
                coordinator,
                parallelism=parallelism,
                mode=RestoreMode.STREAMING,
                gateway=GatewayLimits(confirm_timeout_s=TIMEOUT_S),
                checkpoint=CheckpointConfig(timeout_s=TIMEOUT_S, tolerated_failures=2**31),
            )
            load.spark.begin(operator, parallelism)
            task = {
                "host": host,
                "port": port,
                "key": load.spark.keys.task_key(operator).secret.hex(),
                "pin": pin,
                "operator_id": operator,
                "parallelism": parallelism,
                "mode": int(RestoreMode.STREAMING),
                "stage_id": STAGES[operator],
                "files": 8 * parallelism + OWN_FILES,
                "floods": operator == NEIGHBOUR,
                "niceness": FLOODING_NICENESS if operator == NEIGHBOUR else 0,
            }
            for _ in range(plan.processes if operator == MEASURED else 1):
                child = await stack.enter_async_context(running_child(task, "tests.load.endpoints"))
                load.children[operator].append(child)
        stack.callback(load.spark.running.clear)
        strangers = {
            "host": host,
            "port": port,
            "secret": load.spark.secret.hex(),
            "pin": pin,
            "seed": plan.seed,
            "count": plan.strangers,
        }
        load.strangers = await stack.enter_async_context(running_child(strangers, "tests.load.strangers"))
        insiders = strangers | {"insiders": True, "count": plan.hostile}
        load.insiders = await stack.enter_async_context(running_child(insiders, "tests.load.strangers"))
        await load.open_ends()
        yield load


async def run_load(plan: Plan, progress: Callable[[Report], None], progress_s: float = 10.0) -> Report:
    """Run the plan and return its report. ``progress`` gets the figures so far, every ``progress_s`` seconds."""
    async with _running(plan) as load:
        await load.run(progress, progress_s)
        return await load.figures(ends=True)
