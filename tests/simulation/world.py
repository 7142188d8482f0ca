# SPDX-License-Identifier: Apache-2.0

"""One world: a seed decides how unkind it is, and the order of events."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

from actors.coordination.engine.inputs import RestoredInput
from protocol.barrier_tracker import CheckpointConfig
from protocol.errors import InputRefused, LocalProtocolError
from protocol.facts import EngineFact
from protocol.machine import TimePassed
from protocol.subtask.types import BarrierArrived
from protocol.wire.messages import RestoreMode
from spark_bridge.common.errors import BatchRefused, NotSettled
from tests.simulation.application import PARALLELISM_MAX, Application, Settings, own_state
from tests.simulation.bus import HeldFacts
from tests.simulation.checkers import AttemptRecord, Violation, check_whole, demand
from tests.simulation.disk import PROTOCOL
from tests.simulation.driver import BATCH_SETTLE_S, Driver
from tests.simulation.engine import Engine, EngineTask, Faults
from tests.simulation.fault_injectors import CUTS, FAULT_INJECTORS, copy, lull, some_of, start_rival, strike
from tests.simulation.forger import FIRST_ID, Forger
from tests.simulation.inputs import Inputs
from tests.simulation.invariant import never_restored_since_rescale
from tests.simulation.logs import quiet_logs
from tests.simulation.network import Connection
from tests.simulation.output import Output, read
from tests.simulation.parts import all_items
from tests.simulation.ports import simulated_waits
from tests.simulation.process import Life, Process
from tests.simulation.shared import Totals
from tests.simulation.state_files import SimulatedFolder, with_files
from tests.simulation.storage import Storage

STEPS_MAX = 60_000
SECONDS_MAX = 3_000.0
CLOCK_S = 0.005
"""How late a timer may be."""
JOBS_WANTED = 2  # jobs that must succeed
JOBS_MAX = 6
JOBS_WITH_INPUTS = 4
PATIENCE_S = 30.0
TEMPORARY = re.compile(r"-[0-9a-f]{16}(?=\.tmp$)")
"""The part of a file's name that differs each time."""
CHAINS = 0.25
"""How likely the operator of a world is a chain with ready-made parts."""
TEAMS = 0.5
"""How likely a group is a part of it."""
INPUTS = 0.4
"""How likely the jobs of a world in streaming mode have inputs."""
STAGED = 0.2
"""How likely the operator of another world is a chain of stages."""
PAID = 0.6
"""How likely one of the stages makes a call for each record, beside others."""
FILES = 0.3
"""How likely tasks store a part of their states as files."""
TABLES = 0.5
"""How likely these have key groups."""
HELD_BACK = 0.7
"""How likely the relay holds back the facts of stages that nobody watches, as with a JVM; Py4J holds none."""


def draw_settings(random: Random, hold_events: bool) -> Settings:
    mode = random.choice([RestoreMode.BATCH, RestoreMode.STREAMING, RestoreMode.STREAMING])
    barrier_stage = random.random() < 0.2
    checkpoints = CheckpointConfig(
        timeout_s=6.0,
        tolerated_failures=random.choice([1, 1, 4]),
        mode=mode,
        interval_s=random.choice([None, None, 0.04, 0.2]),
        min_pause_s=random.choice([0.0, 0.0, 0.05]),
        concurrent_max=random.choice([1, 1, 2, 3]),
        hold_events=hold_events,
    )
    return Settings(
        mode=mode,
        keys=random.choice([1, 2, 2, 3, 4]),
        checkpoints=checkpoints,
        requests=random.choice([0.0, 0.0, 0.3]),
        stalls=random.choice([0.0, 0.0, 0.02, 0.2]),
        inside=random.choice([0.0, 0.2]),
        loose=random.choice([0.0, 0.3]),
        apart=random.choice([0.0, 0.5, 1.0]),
        in_snapshot=random.choice([0.0, 0.0, 0.5]),
        by_notice=random.choice([True, False]),
        copies=not barrier_stage and random.random() < 0.5,
        barrier_stage=barrier_stage,
        attempts_max=random.choice([1, 1, 2, 4]),
        urgent=random.random() < 0.4,
        heartbeats=random.random() < 0.4,
    )


class World:
    """See the module. ``run`` ends in a quiet world, or raises ``Violation``."""

    def __init__(
        self,
        seed: int,
        eager: float | None = None,
        chains: float = CHAINS,
        teams: float = TEAMS,
        staged: float = STAGED,
        inputs: float = INPUTS,
        paid: float = PAID,
        files: float = FILES,
    ) -> None:
        self.seed = seed
        self.random = random = Random(seed)
        self.now = 0.0
        self.look_at = 0.0  # when timers are checked next
        self.steps = 0
        self.story: list[str] = []
        self.records: dict[int, AttemptRecord] = {}
        self.connections: list[Connection] = []  # not over for the server
        self.processes: dict[int, Process] = {}
        self.living: list[Process] = []
        self.forgers: list[Forger] = []
        self.claims = 0
        self.barriers: list[tuple[int, BarrierArrived]] = []  # travelling separately
        self.figures = Totals(1)
        self.broken: Exception | None = None
        hold_events = Random(f"events are held in {seed}").random() < 0.5  # H79
        self.settings = settings = draw_settings(random, hold_events)
        parts = Random(f"parts {seed}")  # so that the other worlds are what they were
        if parts.random() < chains:
            self.settings = settings = replace(settings, in_hand=parts.choice([1, 1, 2, 5]))
            if parts.random() < teams:
                self.settings = settings = replace(settings, team=parts.choice(["fixed", "elastic"]))
        elif parts.random() < staged:
            self.settings = settings = replace(settings, stages=True)
            calls = Random(f"calls {seed}")
            if calls.random() < paid:
                self.settings = settings = replace(
                    settings,
                    in_flight=calls.choice([1, 2, 3, 8]),
                    ordered=calls.random() < 0.5,
                    behind_plain=calls.random() < 0.4,
                )
        if Random(f"files {seed}").random() < files:
            tables = not settings.stages and Random(f"tables {seed}").random() < TABLES
            self.settings = settings = replace(settings, files=True, tables=tables)
        self.inputs: Inputs | None = None
        if settings.mode is RestoreMode.STREAMING and Random(f"with inputs {seed}").random() < inputs:
            self.inputs = Inputs(seed)
        self.to_send = random.choice([1, 3, 8, 20])
        self.growth = random.choice([0, 3, 8])  # from one good job to the next
        self.targets: dict[int, int] = {}  # by run
        self.patience_s = random.choice(
            [0.0, PATIENCE_S, PATIENCE_S]
        )  # how long the user waits for the last output's checkpoint
        self.user_waits = False  # for the end of the run, and the last output's checkpoint
        self.asked_at_the_end = False
        self.faults = Faults(
            drop=random.choice([0.0, 0.02, 0.1, 0.3]),
            double=random.choice([0.0, 0.05, 0.2]),
            break_connection=random.choice([0.0, 0.005, 0.02, 0.05]),
            crash=random.choice([0.0, 0.004, 0.01, 0.03]),
            lose_driver=random.choice([0.0, 0.002, 0.005]),
            budget=random.choice([0, 3, 8, 15, 40]),
        )
        self.grudge = random.choice([0.0, 0.01, 0.1])  # how likely another fault is while a checkpoint is in doubt
        self.cuts = some_of(CUTS, random)
        self.fault_injectors = some_of(FAULT_INJECTORS, random)
        if settings.copies and settings.mode is RestoreMode.BATCH:
            self.fault_injectors = self.fault_injectors + [copy] * len(
                self.fault_injectors
            )  # as in an engine that speculates
        self.eager = random.choice([0.0, 0.004, 0.02, 0.05])  # how often a checkpoint is requested
        if eager is not None:
            self.eager = eager
        self.storage = Storage(random, lambda: self.now, self.befall_storage)
        self.output = Output()
        self.named = ""  # the file that the user has restored last
        # Tasks of a job that was cancelled have registered after its batch had given it up. If no fact says that the
        # job is over, their run belongs to no batch, and a checkpoint may hold its output.
        self.strayed = False
        self.asked_for = ""  # the file that a driver was to start from, and has not started from yet
        self.counted: dict[int, int] = {}  # by run that ended well: the items, as the coordinator counts them
        self.failure: BaseException | None = None  # of the operator, the last one that was seen
        self.successor: Driver | None = None  # starts while the driver lives
        self.was_completed: set[int] = set()  # by drivers that are dead
        self.drivers = self.jobs = self.jobs_done = self.connection_count = 0
        if self.inputs is not None:
            self.fault_injectors = [one for one in self.fault_injectors if one is not start_rival] or [lull]
            self.tell(f"{self.inputs.kind} inputs of {self.inputs.size} records of each key")
        self.tell(f"{settings}")
        self.tell(
            f"{self.to_send} events and {self.growth} more, requests for checkpoints: {self.eager}, {self.faults}"
        )

    def start_application(self, application: Application, successor: Driver | None = None) -> None:
        """Start an application. ``successor``: its driver, if that has already begun to start."""
        self.drivers += 1
        restores = re.sub("-[0-9a-f]{16}(?=[.])", "", str(application.restore))  # without a savepoint's random token
        self.tell(f"a driver starts: parallelism {application.parallelism}, restores {restores}")
        copies, barrier = self.settings.copies, self.settings.barrier_stage
        self.held_facts = HeldFacts(Random(f"held facts {self.seed} {self.drivers}").random() < HELD_BACK)
        self.released: deque[EngineFact] = deque()
        self.engine = Engine(
            self.random,
            application.parallelism,
            self.faults,
            self.launch,
            self.kill_process,
            copies,
            barrier,
            self.happen,
        )
        self.engine.next_task = 1000 * self.drivers  # so that a number identifies one task
        self.application = application
        self.asked_for = "" if application.restore == "latest" else application.restore
        if successor is None:
            self.driver = Driver(self, application)
        else:
            self.driver, successor.gate.held = successor, False

    # --- access for the parts ---

    @property
    def calm(self) -> bool:
        """Whether the faults are used up: from now on, everything has to heal."""
        return self.faults.budget <= 0

    def tell(self, line: str) -> None:
        if "savepoint-" in line:  # the storage makes up a part of the name, but a seed tells the same story twice
            line = re.sub(r"-[0-9a-f]{16}(?=\.)", "-...", line)
        self.story.append(f"{self.steps:5} {self.now:9.4f}  {line}")

    def happen(self, what: str) -> None:
        self.figures.happen(what)
        if what in ("fetch failure", "outdated look"):
            # If the end of a task is lost, the task looks like a zombie or a copy that runs on.
            for order in self.driver.coordinator.orders:
                order.copies = True

    def befall(self, what: str, line: str) -> None:
        """Count what befell the world, and tell it."""
        self.figures.happen(what)
        self.tell(line)

    def befall_storage(self, what: str, which: str) -> None:
        self.befall(what, f"{what}: {TEMPORARY.sub('', which)}")

    def restores(self, checkpoint_id: int) -> None:
        """Record the checkpoint that the starting driver has restored."""
        stored, application = self.storage.written[checkpoint_id], self.application
        application.become(stored)
        if self.inputs is not None:
            self.inputs.restored(checkpoint_id, application.said)
        self.tell(f"checkpoint {checkpoint_id} of {stored.checkpoint.parallelism} is restored")
        self.figures.restores += 1
        self.figures.uncompleted_restores += checkpoint_id not in self.was_completed
        self.figures.rescales += application.parallelism != stored.checkpoint.parallelism
        if application.restore != "latest":
            self.named = application.restore
            listed, covered = read(json.loads(own_state(stored.checkpoint.coordinator_state))["output"])
            self.output.begin_again(covered, listed)

    def check_savepoint(self, checkpoint_id: int) -> None:
        """Check that a savepoint has all files of its states, now that a user has it (H193)."""
        self.storage.savepoints.add(checkpoint_id)
        folder = SimulatedFolder(self, self.storage.states_of(checkpoint_id))
        for state in with_files(self.storage.written[checkpoint_id].checkpoint):
            folder.check(state, f"savepoint {checkpoint_id} has")
            self.happen("a savepoint has files")

    def started(self) -> None:
        """The driver has started, and recorded what it has restored."""
        self.asked_for = ""

    def record(self, task_attempt_id: int) -> AttemptRecord:
        return self.records.setdefault(task_attempt_id, AttemptRecord(f"task {task_attempt_id}"))

    def target(self, run_id: int) -> int:
        """Return how many events of each key must be exchanged by the successful end of this run."""
        return self.targets[run_id]

    def target_of(self, task_attempt_id: int) -> int:
        return self.processes[task_attempt_id].work.target

    def connect(self, task_attempt_id: int) -> Connection:
        self.connection_count += 1
        connection = Connection(self.connection_count, task_attempt_id)
        self.connections.append(connection)
        self.figures.reconnects += self.processes[task_attempt_id].machine is not None
        return connection

    def forge(self, victim: Process) -> None:
        """Let a hostile task claim to be another attempt of this one's subtask."""
        self.claims += 1
        task_attempt_id = self.claims + self.random.choice([0, FIRST_ID])
        claim = replace(
            victim.registration(), task_attempt_id=task_attempt_id, attempt_number=self.random.choice([0, 1, 99])
        )
        self.driver.monitor.bridge_checker.forged.add(task_attempt_id)
        self.connection_count += 1
        connection = Connection(self.connection_count, task_attempt_id)
        self.connections.append(connection)
        self.forgers.append(Forger(connection, claim, self.now + self.random.uniform(0.0, 8.0), self.figures))

    def launch(self, task: EngineTask) -> None:
        which = f"partition {task.partition}, number {task.attempt_number}, stage {task.stage_id}.{task.stage_attempt}"
        self.tell(f"Spark launches task {task.task_attempt_id}: {which}, {task.executor_id}")
        process = Process(self, task, self.application, self.target(task.stage_id))
        self.processes[task.task_attempt_id] = process
        self.living.append(process)

    def kill_process(self, task_attempt_id: int) -> None:
        process = self.processes[task_attempt_id]
        if process.life is not Life.GONE:
            process.die()

    def end_tasks(self) -> None:
        for process in self.living:
            if process.life is not Life.GONE:
                process.die()

    def exited(self, task_attempt_id: int, failure: str) -> None:
        self.tell(f"task {task_attempt_id} exits: {failure or 'well'}")
        self.engine.exited(task_attempt_id, failure)

    def check_told(self, checkpoint_id: int, *, completed: bool) -> None:
        """Check that the end of a checkpoint may be reported to a subtask (H40, H45, H49)."""
        monitor = self.driver.monitor
        truth = monitor.completed if completed else monitor.aborted
        demand(checkpoint_id in truth, f"H40: a subtask hears that {checkpoint_id} is over, completed: {completed}")

    def check_drained(self, task_attempt_id: int, checkpoint_id: int) -> None:
        """Check that a barrier may leave (H42, H78). If no events are held, its place in the stream is enough (H79)."""
        if self.settings.checkpoints.hold_events:
            self.record(task_attempt_id).check_drained(checkpoint_id)

    def send_barrier_apart(self, task_attempt_id: int, checkpoint_id: int, events_before: int) -> None:
        self.record(task_attempt_id).check_drained(checkpoint_id)
        self.barriers.append((task_attempt_id, BarrierArrived(checkpoint_id, events_before)))

    # --- the loop ---

    def run(self) -> Totals:
        with quiet_logs(), simulated_waits():
            self.start_application(Application(self.settings, self.random.randint(1, 3)))
            try:
                while not self.is_over():
                    demand(self.steps < STEPS_MAX and self.now < SECONDS_MAX, "H48: the world does not come to rest")
                    self.step()
                self.check_rest()
            finally:
                for driver in (self.driver, self.successor):
                    if driver is not None:
                        driver.threads.die()
                self.end_tasks()  # if a rule was broken, they still live
        return self.totals()

    def is_over(self) -> bool:
        driver = self.driver
        if self.successor is not None:
            return False
        if self.storage.disk.dies or driver.refused is not None or driver.failed is not None or driver.fenced:
            return False  # another one starts
        if self.engine.active or self.more_jobs() or self.actions() or self.next_deadline() is not None:
            return False
        if not self.asked_at_the_end:
            self.asked_at_the_end = True
            self.driver.settle(PATIENCE_S)
            if self.random.random() < 0.5:
                self.driver.request(savepoint=False)  # without a target, or halted since the last failure
            return False
        return True

    def more_jobs(self) -> bool:
        wanted, most = (JOBS_WANTED, JOBS_MAX) if self.inputs is None else (JOBS_WITH_INPUTS, 3 * JOBS_WITH_INPUTS)
        return self.done() < wanted and self.jobs < most

    def done(self) -> int:
        """How many jobs have ended well, over all drivers."""
        return self.jobs_done + sum(self.engine.results.values())

    def step(self) -> None:
        self.steps += 1
        self.now += self.random.expovariate(1000.0)
        if self.engine.active and self.random.random() < self.eager:
            self.driver.request(savepoint=self.random.random() < 0.15)
        strike(self)
        if self.now >= self.look_at:
            self.look_at = self.now + CLOCK_S
            self.pass_time()
        if self.storage.disk.dies:
            self.storage.disk.dies = False
            self.lose_driver()
        if self.driver.fenced:
            self.befall("a driver is fenced", "the user ends the driver, which is fenced")
            self.lose_driver()
        if self.driver.refused is not None:
            self.start_unscaled(self.driver.refused)
        if self.driver.failed is not None:
            self.tell(f"the driver does not start: {self.driver.failed}")
            self.now += self.random.uniform(1.0, 5.0)  # the user retries
            self.lose_driver(self.named if "name that file again" in str(self.driver.failed) else "")
        actions = self.actions(patient=False) or self.actions()
        if actions:
            self.random.choice(actions)()
            return
        deadline = self.next_deadline()
        if deadline is None:
            had_asked = self.asked_at_the_end
            demand(self.is_over() or not had_asked, "H48: nothing can happen any more")
        else:
            self.now = self.look_at = max(self.now, deadline)

    def actions(self, *, patient: bool = True) -> list[Callable[[], None]]:
        """Return the possible next actions. Without patience, slow processes are usually skipped."""
        engine, random = self.engine, self.random
        if not engine.active and not self.user_waits and self.driver.operator is not None:
            self.user_waits = True
            if self.patience_s:
                self.driver.settle(self.patience_s)
        actions = self.driver.actions()
        self.living = [process for process in self.living if process.life is not Life.GONE]
        for process in self.living:
            if patient or random.random() >= process.slowness:
                actions.extend(process.actions())
        self.forgers = [forger for forger in self.forgers if not forger.gone]
        for forger in self.forgers:
            actions.extend(forger.actions(self.now))
        self.connections = [connection for connection in self.connections if not connection.server_knows]
        for connection in self.connections:
            if connection.up or connection.task_gone or connection.server_closed:
                actions.append(partial(self.driver.read, connection))
        actions.extend(self.go_on_beside())
        if self.storage.disk.can_land():
            actions.append(self.storage.disk.land_one)
        if engine.bus or self.released:
            actions.extend([self.deliver_fact] * 3)
        if engine.late and not engine.bus:
            actions.append(lambda: engine.bus.append(engine.late.pop(0)))
        if engine.kills:
            actions.append(engine.carry_out_kill)
        if self.barriers and (patient or random.random() < 0.2):
            actions.append(self.bring_barrier)
        if not engine.active and self.more_jobs() and self.driver.operator is not None and not self.driver.settling:
            if self.inputs is None or self.inputs.kind != "batches":
                actions.append(self.start_job)
            elif not self.driver.batch_busy:
                actions.append(self.next_batch)
        return actions

    def start_job(self) -> None:
        self.check_results()
        self.check_input()
        self.targets[self.engine.stage_id + 1] = self.to_send + self.growth * self.done()
        self.jobs += 1
        self.user_waits = self.driver.settled = False
        self.tell("the user starts a job")
        if self.inputs is not None:
            job = self.inputs.next_job(self.engine.stage_id + 1, first=self.engine.job is None)
            self.tell(f"it has input {job.input}: {job.action}")
        self.engine.start_job()

    def next_batch(self) -> None:
        """Do the next step of a query, which repeats a batch until it is committed."""
        driver, inputs = self.driver, self.inputs
        assert inputs is not None
        outcome, driver.batch_outcome = driver.batch_outcome, ""
        if outcome:
            self.happen(f"a batch: {outcome if isinstance(outcome, str) else type(outcome).__name__}")
            self.tell(f"batch {inputs.number}: {outcome}")
        newest = max(driver.monitor.completed, default=driver.coordinator.order.restored)
        if isinstance(outcome, NotSettled):  # a disk that fails may hold up the last checkpoint
            demand(self.now - self.storage.disk.troubled_at < BATCH_SETTLE_S, f"H19: a run never ends: {outcome}")
        self.jobs += bool(outcome) and outcome != "runs"  # patience ends here too
        if outcome == "runs" and inputs.has_job():
            self.start_job()
        elif driver.batch is not None:
            began = outcome != "runs"
            driver.end_batch(returned=not began or self.engine.results.get(self.engine.job_id, False))
        elif outcome in ("committed", "skipped"):
            inputs.batch_over(newest, self.settings.keys)
        elif isinstance(outcome, BatchRefused):
            demand(
                bool(self.named) or self.strayed,
                f"H174: batch {inputs.number} is refused, those before are committed: {outcome}",
            )
            inputs.adopt()
        else:
            driver.begin_batch(inputs.number, adopt=inputs.adopts)

    def deliver_fact(self) -> None:
        if self.released:
            fact = self.released.popleft()
            self.tell(f"relay, no longer held: {fact}")
            self.driver.hear_fact(fact)
            return
        fact = self.engine.bus.popleft()
        held = self.held_facts.keep(fact)
        self.tell(f"bus: {fact}{', held back' if held else ''}")
        if not held:
            self.driver.hear_fact(fact)

    def watch(self, stage_id: int, task_attempt_id: int) -> None:
        """Let the bus bring what the relay has held of a stage, and of a task, before anything else."""
        for fact in self.held_facts.watch(stage_id, task_attempt_id):
            self.happen("fact released")
            self.released.append(fact)

    def bring_barrier(self) -> None:
        """Deliver a separate barrier: any of them, once or twice, or never."""
        barrier = self.barriers.pop(self.random.randrange(len(self.barriers)))
        chance = self.random.random()
        if not self.calm and chance < 0.03:
            return
        if not self.calm and chance < 0.23:
            self.barriers.append(barrier)
        self.processes[barrier[0]].hear_barrier(barrier[1])

    def next_deadline(self) -> float | None:
        deadlines = [self.driver.next_deadline(), self.storage.disk.next_relief()]
        if self.successor is not None:
            deadlines.append(self.successor.next_deadline())
        deadlines.extend(forger.until for forger in self.forgers if not forger.gone)
        for process in self.living:
            if process.machine is not None and not process.hung and process.life is not Life.GONE:
                deadlines.append(process.machine.next_deadline())
                deadlines.append(None if process.parts is None else process.parts.next_deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def pass_time(self) -> None:
        own = [(connection, self.processes.get(connection.task_attempt_id)) for connection in self.connections]
        tasks = ((connection, process.hung) for connection, process in own if process is not None)
        self.driver.monitor.look(tasks, idle=not self.driver.gate.waiting)
        self.driver.pass_time()
        if self.successor is not None:
            self.successor.pass_time()
        for process in list(self.living):
            machine = process.machine
            if machine is None or process.hung or process.life is Life.GONE:
                continue
            deadline = machine.next_deadline()
            if deadline is not None and deadline <= self.now:
                process.step(TimePassed())

    # --- the driver dies ---

    def lose_driver(self, restore: str = "") -> None:
        """Kill the driver and its tasks. Another one starts from the storage, or from the named file (H52)."""
        self.tell("the driver dies")
        self.user_waits = self.asked_at_the_end = False
        self.end_tasks()
        if not self.engine.active:
            self.check_results()
        self.jobs_done += sum(self.engine.results.values())
        self.figures.drivers_lost += 1
        self.figures.jobs_failed += self.jobs_failed()
        self.driver.die()
        self.living, self.connections, self.barriers, self.processes, self.records = [], [], [], {}, {}
        self.forgers = []
        self.was_completed |= self.driver.monitor.completed
        if not restore:
            restore = "latest"
            if self.settings.mode is RestoreMode.STREAMING:
                restore = self.storage.choose(savepoints=self.settings.files)
        successor, self.successor = self.successor, None
        if successor is not None:
            self.start_application(successor.application, successor)
        else:
            self.start_application(self.next_application(restore))

    def next_application(self, restore: str) -> Application:
        """What the user starts next, from the newest checkpoint or the named file; he says what its first run has."""
        said: RestoredInput | None = None
        if self.asked_for and self.asked_for.removeprefix(f"{PROTOCOL}://") not in self.storage.disk.files:
            self.asked_for = ""  # a late deletion: the user has to choose anew
        if self.asked_for:  # it may have been recorded as the new start, so the user asks for it again
            restore = self.asked_for
            said = self.application.said
        elif self.inputs is not None and (found := self.storage.found(restore)) >= 0:
            said = self.inputs.say(found)
            if restore == "latest" and said is not None:
                restore = f"{PROTOCOL}://{self.storage.file_of(found)}"
        return Application(self.settings, self.draw_parallelism(), restore, said=said)

    def draw_parallelism(self) -> int:
        return self.random.choice([self.application.parallelism, self.random.randint(1, PARALLELISM_MAX)])

    def take_over(self) -> None:
        """Start another driver while this one lives: it claims the storage and decides what to restore."""
        self.befall("a second driver", "a second driver begins to start")
        self.successor = Driver(self, self.next_application("latest"), held=True)

    def go_on_beside(self) -> list[Callable[[], None]]:
        """Return the possible actions of the second driver, which sooner or later ends the first one."""
        successor = self.successor
        if successor is None:
            return []
        if successor.failed is not None:
            self.tell(f"the second driver does not start: {successor.failed}")
            successor.die()
            self.successor = None
            return []
        actions = successor.storage_actions()
        if (not actions and successor.gate.waiting) or self.random.random() < 0.02:
            actions.append(self.lose_driver)
        return actions

    def start_unscaled(self, refusal: LocalProtocolError) -> None:
        """Start with the restored parallelism, because the state cannot be cut to the requested one (H52)."""
        stored = self.storage.written[self.driver.session.read_id]
        parts = stored.checkpoint.subtask_states.values()
        demand(never_restored_since_rescale(parts), f"H52: {refusal}")
        self.tell(f"refused: {refusal}")
        self.driver.die()
        application = self.application
        again = Application(self.settings, stored.checkpoint.parallelism, application.restore, said=application.said)
        self.start_application(again)

    # --- the end ---

    def check_results(self) -> None:
        """Check that the output that the engine uses for a job is that of whole subtasks."""
        engine = self.engine
        if not engine.results.get(engine.job_id, False):
            return
        if self.settings.in_hand:
            outputs = sorted(item for tid in engine.finished.values() for item in self.processes[tid].work.items)
            demand(outputs == all_items(), f"H100: the outputs of job {engine.job_id} are {outputs}")
            done = sum(self.processes[tid].work.counted for tid in engine.finished.values())
            counted = self.counted.get(engine.stage_id, done)
            whole = counted == done or self.inputs is not None  # whose counts go on with another input, or not
            demand(whole, f"H101: {counted} items are counted, of {done}")
        if self.settings.team:
            for tid in engine.finished.values():
                self.processes[tid].check_model()
        for tid in engine.finished.values():
            for key, log in self.processes[tid].logs.items():
                name = f"job {engine.job_id}, task {tid}, key {key}"
                check_whole(name, log.sent, log.received, self.target(engine.stage_id))

    def check_input(self) -> None:
        """Check what became of the input of the newest job, and let the user see it."""
        job = None if self.inputs is None else self.inputs.jobs.get(self.engine.stage_id)
        if self.inputs is None or job is None or self.engine.job is None or self.driver.operator is None:
            return
        newest = max(self.driver.monitor.completed, default=self.driver.coordinator.order.restored)
        # ``run`` raises if the run has failed or does not end, even if the action has returned.
        well = self.driver.coordinator.order.well.get(self.engine.stage_id, True) and self.driver.run_is_over
        succeeded = self.engine.results[self.engine.job_id] and well
        if (failure := self.driver.operator.failure) is not None and failure is not self.failure:
            self.failure = failure
            if isinstance(failure, InputRefused):
                wrongly = self.inputs.kind == "batches" and not self.named and not self.strayed
                demand(not wrongly, f"H174: the run of a batch is refused: {failure}")
                self.happen("an input is refused")
                self.inputs.refused(job, newest, failure)
                return
        committed = self.driver.settled and not self.driver.uncommitted
        if self.inputs.ended(job, newest, self.settings.keys, succeeded, committed):
            self.happen("an input is done")

    def check_rest(self) -> None:
        """Check that nothing is left and every caller got an answer."""
        self.check_results()
        self.check_input()
        self.driver.check_rest()
        self.driver.close()
        for record in self.records.values():
            record.check_settled()
        for process in self.processes.values():
            demand(process.life is Life.GONE, f"H19: task {process.tid} waits forever: {process.life}")

    def jobs_failed(self) -> int:
        """How many jobs of the present engine failed; one that still runs will not succeed either."""
        return len(self.engine.jobs) - sum(self.engine.results.values())

    def totals(self) -> Totals:
        figures = replace(self.figures, steps=self.steps, jobs=self.jobs, kinds=dict(self.figures.kinds))
        figures.jobs_failed += self.jobs_failed()
        return figures


def run_world(
    seed: int,
    eager: float | None = None,
    chains: float = CHAINS,
    teams: float = TEAMS,
    staged: float = STAGED,
    inputs: float = INPUTS,
    paid: float = PAID,
    files: float = FILES,
) -> tuple[World, Exception | None]:
    """Run one world; return it with the error, if there was one. Any exception is a finding.

    ``eager``: how likely a checkpoint is requested at each step, instead of the seed's choice. ``chains``: how likely
    the operator is a chain with ready-made parts. ``teams``: how likely a group is one of them. ``staged``: how likely
    another operator is a chain of stages. ``inputs``: how likely the jobs of a streaming world have inputs. ``paid``:
    how likely one of the stages makes a call for each record. ``files``: how likely states have files.
    """
    world = World(seed, eager, chains, teams, staged, inputs, paid, files)
    try:
        world.run()
    except Exception as error:
        return world, error
    return world, None


__all__ = ["Totals", "Violation", "World", "run_world"]
