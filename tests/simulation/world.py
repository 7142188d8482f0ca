"""One world: a seed decides how unkind it is, and in which order things happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from protocol.attempts import GlobalFailureRaised
from protocol.barrier_tracker import AbortRequested, Phase
from protocol.gateway import GatewayState
from protocol.machine import TimePassed
from protocol.messages import RestoreMode
from tests.simulation.checkers import END, AttemptRecord, Violation, check_whole, demand
from tests.simulation.driver import Driver
from tests.simulation.engine import Engine, EngineTask, Faults
from tests.simulation.gateways import OPERATOR
from tests.simulation.network import Connection
from tests.simulation.process import Life, Process

STEPS_MAX = 60_000
SECONDS_MAX = 3_000.0
JOBS_WANTED = 2  # that succeed
JOBS_MAX = 6


@dataclass
class Totals:
    """What happened, over one world or many."""

    worlds: int = 0
    steps: int = 0
    events_down: int = 0
    events_up: int = 0
    checkpoints: int = 0
    aborted: int = 0
    failures: int = 0
    resets: int = 0
    reconnects: int = 0
    jobs: int = 0
    jobs_failed: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    def add(self, other: Totals) -> None:
        for name, value in vars(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        for kind, count in other.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + count


class World:
    """See the module. ``run`` ends in a quiet world, or raises ``Violation``."""

    def __init__(self, seed: int, eager: float | None = None) -> None:
        self.seed = seed
        self.random = random = Random(seed)
        self.now = 0.0
        self.steps = 0
        self.story: list[str] = []
        self.records: dict[int, AttemptRecord] = {}
        self.connections: dict[int, Connection] = {}
        self.processes: dict[int, Process] = {}
        self.reconnects = 0
        self.mode = random.choice(list(RestoreMode))
        self.parallelism = random.randint(1, 3)
        self.to_send = random.choice([1, 3, 12, 40])
        self.faults = Faults(
            drop=random.choice([0.0, 0.02, 0.1, 0.3]),
            double=random.choice([0.0, 0.05, 0.2]),
            break_connection=random.choice([0.0, 0.005, 0.02, 0.05]),
            crash=random.choice([0.0, 0.004, 0.01, 0.03]),
            budget=random.choice([0, 3, 8, 15, 40]),
        )
        self.eager = random.choice([0.0, 0.004, 0.02, 0.05])  # how often somebody asks for a checkpoint
        if eager is not None:
            self.eager = eager
        barrier = random.random() < 0.2
        copies = self.mode is RestoreMode.BATCH and not barrier and random.random() < 0.5
        self.engine = Engine(random, self.parallelism, self.faults, self.launch, self.kill_process, copies, barrier)
        self.driver = Driver(self, self.parallelism, self.mode, self.to_send)
        self.tell(f"{self.mode.name}, parallelism {self.parallelism}, {self.to_send} events, {self.faults}")
        self.tell(f"a barrier stage: {barrier}; copies: {copies}; requests for checkpoints: {self.eager}")

    # --- what the parts may touch ---

    @property
    def calm(self) -> bool:
        """The faults are used up: from here on everything has to heal."""
        return self.faults.budget <= 0

    def tell(self, line: str) -> None:
        self.story.append(f"{self.steps:5} {self.now:9.4f}  {line}")

    def record(self, task_attempt_id: int) -> AttemptRecord:
        return self.records.setdefault(task_attempt_id, AttemptRecord(f"task {task_attempt_id}"))

    def connect(self, task_attempt_id: int) -> Connection:
        connection = Connection(len(self.connections) + 1, task_attempt_id)
        self.connections[connection.connection_id] = connection
        self.reconnects += self.processes[task_attempt_id].machine is not None
        return connection

    def launch(self, task: EngineTask) -> None:
        self.tell(f"engine launches {task.task_attempt_id}: {task}")
        self.processes[task.task_attempt_id] = Process(self, task, OPERATOR, self.mode, self.parallelism, self.to_send)

    def kill_process(self, task_attempt_id: int) -> None:
        process = self.processes[task_attempt_id]
        if process.life is not Life.GONE:
            process.die()

    def exited(self, task_attempt_id: int, failure: str) -> None:
        self.tell(f"task {task_attempt_id} exits: {failure or 'well'}")
        self.engine.exited(task_attempt_id, failure)

    # --- the loop ---

    def run(self) -> Totals:
        while not self.is_over():
            demand(self.steps < STEPS_MAX and self.now < SECONDS_MAX, "H48: the world does not come to rest")
            self.step()
        self.check_rest()
        return self.totals()

    def is_over(self) -> bool:
        done = not self.more_jobs() and not self.engine.active
        return done and not self.actions() and self.next_deadline() is None

    def more_jobs(self) -> bool:
        engine = self.engine
        return sum(engine.results.values()) < JOBS_WANTED and len(engine.jobs) < JOBS_MAX

    def step(self) -> None:
        self.steps += 1
        self.now += self.random.expovariate(1000.0)
        self.misfortune()
        self.pass_time()
        actions = self.actions(patient=False) or self.actions()
        if actions:
            self.random.choice(actions)()
            return
        deadline = self.next_deadline()
        demand(deadline is not None, "H48: nothing can happen any more")
        assert deadline is not None
        self.now = max(self.now, deadline)

    def actions(self, *, patient: bool = True) -> list[Callable[[], None]]:
        """What could happen next. Without patience, slow processes are passed over more often than not."""
        engine = self.engine
        actions = self.driver.actions()
        for process in self.processes.values():
            if process.life is not Life.GONE and (patient or self.random.random() >= process.slowness):
                actions.extend(process.actions())
        if engine.bus:
            actions.extend([self.deliver_fact] * 3)
        if engine.late and not engine.bus:
            actions.append(lambda: engine.bus.append(engine.late.pop(0)))
        if engine.kills:
            actions.append(engine.carry_out_kill)
        if not engine.active and self.more_jobs():
            actions.append(self.start_job)
        return actions

    def start_job(self) -> None:
        self.check_results()
        self.tell("the user starts a job")
        self.engine.start_job()

    def deliver_fact(self) -> None:
        fact = self.engine.bus.popleft()
        self.tell(f"bus: {fact}")
        self.driver.bridge_box.append(fact)

    def next_deadline(self) -> float | None:
        deadlines = [self.driver.next_deadline()]
        for process in self.processes.values():
            if process.machine is not None and not process.hung and process.life is not Life.GONE:
                deadlines.append(process.machine.next_deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def pass_time(self) -> None:
        self.driver.pass_time()
        for process in list(self.processes.values()):
            machine = process.machine
            if machine is None or process.hung or process.life is Life.GONE:
                continue
            deadline = machine.next_deadline()
            if deadline is not None and deadline <= self.now:
                process.step(TimePassed())

    # --- misfortune ---

    def misfortune(self) -> None:
        random, faults = self.random, self.faults
        if self.engine.active and random.random() < self.eager:
            self.driver.trigger()
        if self.calm:
            return
        if faults.spend(random, faults.break_connection):
            self.break_a_connection()
        if not self.engine.active or not faults.spend(random, faults.crash):
            return
        what = random.choice(
            [self.crash, self.crash, self.hang, self.raise_in_operator, self.lose, self.copy, self.lull, self.upset]
        )
        what()

    def victims(self) -> list[Process]:
        return [process for process in self.processes.values() if process.life is not Life.GONE and not process.hung]

    def break_a_connection(self) -> None:
        whole = [c for c in self.connections.values() if not c.task_gone and not c.server_gone]
        if whole:
            connection = self.random.choice(whole)
            self.tell(f"connection {connection.connection_id} of task {connection.task_attempt_id} breaks")
            connection.break_now(self.random)

    def crash(self) -> None:
        if victims := self.victims():
            process = self.random.choice(victims)
            self.tell(f"task {process.tid} crashes")
            process.exit("the process crashed")

    def hang(self) -> None:
        """Deaf: only a missing confirmation can show it, so there must be one to miss."""

        def still_to_come(process: Process) -> bool:
            came = self.record(process.tid).down_came
            return process.life is Life.RUNNING and bool(came) and not came[-1].endswith(END)

        victims = [process for process in self.victims() if still_to_come(process)]
        if victims:
            process = self.random.choice(victims)
            self.tell(f"task {process.tid} goes deaf")
            process.hung = True

    def raise_in_operator(self) -> None:
        victims = [process for process in self.victims() if process.life in (Life.RESTORING, Life.RUNNING)]
        if victims:
            process = self.random.choice(victims)
            self.tell(f"the operator of task {process.tid} raises")
            process.fail()

    def lose(self) -> None:
        self.tell("an executor is lost")
        self.engine.lose_executor()

    def copy(self) -> None:
        if self.engine.copies:
            self.engine.copy_one()

    def lull(self) -> None:
        self.now += self.random.uniform(0.0, 2.5)

    def upset(self) -> None:
        """The coordinator fails the job, or somebody gives a checkpoint up."""
        if self.random.random() < 0.5:
            self.tell("the coordinator fails the job")
            self.driver.bridge_box.append(GlobalFailureRaised(OPERATOR, "fail_job"))
        else:
            self.driver.tracker_box.append(AbortRequested(self.driver.last_checkpoint, "never mind"))

    # --- the end ---

    def check_results(self) -> None:
        """The output that the engine uses for a job is that of whole subtasks."""
        engine = self.engine
        if not engine.results.get(engine.job_id, False):
            return
        for partition, tid in engine.finished.items():
            log = self.processes[tid].log
            check_whole(f"job {engine.job_id}, task {tid}", log.sent, log.received, partition, self.to_send)

    def check_rest(self) -> None:
        """Nothing is left, and nobody was left without an answer."""
        self.check_results()
        driver = self.driver
        demand(driver.tracker.phase is Phase.IDLE, "H48: a checkpoint is pending for ever")
        unanswered = driver.triggered - driver.answered
        demand(not unanswered, f"H45: the requests for checkpoints {unanswered} were never answered")
        demand(not driver.gateways, f"H57: gateways are left: {list(driver.gateways)}")
        for gateway in driver.all_gateways:
            demand(gateway.machine.state is GatewayState.OVER, f"H57: the gateway of {gateway.attempt} is not over")
        for record in self.records.values():
            record.check_settled()
        for process in self.processes.values():
            demand(process.life is Life.GONE, f"H19: task {process.tid} waits for ever: {process.life}")

    def totals(self) -> Totals:
        driver, engine = self.driver, self.engine
        results = list(engine.results.values())
        return Totals(
            1,
            self.steps,
            driver.confirmed,
            driver.events_up,
            driver.completed,
            driver.aborted,
            driver.failures,
            driver.resets,
            self.reconnects,
            len(results),
            results.count(False),
            dict(driver.kinds),
        )


def run_world(seed: int, eager: float | None = None) -> tuple[World, Exception | None]:
    """Run one world; return it with what went wrong, if anything did. Any exception is a finding.

    ``eager``: how likely somebody asks for a checkpoint at each step, where the seed shall not decide.
    """
    world = World(seed, eager)
    try:
        world.run()
    except Exception as error:
        return world, error
    return world, None


__all__ = ["Totals", "Violation", "World", "run_world"]
