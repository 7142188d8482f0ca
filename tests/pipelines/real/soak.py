# SPDX-License-Identifier: Apache-2.0

"""A pipeline between real servers on a real Spark, while each part of it dies at a moment that it reaches.

The seed draws the pair, whether the sidecar has a separate process, what checkpoints do with events, and some faults,
each with the place at which it strikes (see ``gates``):

  - ``task``: a Python worker is killed,
  - ``worker``: an executor's JVM is killed, and its Python workers stay behind as long as they can,
  - ``driver``: the driver's Python and JVM are killed, and another driver starts immediately,
  - ``sidecar``: the sidecar in its own process is killed and started again,
  - ``server``: PostgreSQL or Redis is killed and started again,
  - ``service``: the paid service between source and sink is killed and started again, see ``paid``,
  - ``cut``: nothing passes between tasks and sidecar, or every connection is reset, for a while,
  - ``server cut``: the same between the pipeline and its server.

A driver that ends with an error is started again, as its supervisor would do, and counted as ``gave up``.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.pipelines.pairs import PAIRS, Outcome, Pair, Servers, drop_slot, prepare
from tests.pipelines.real.gates import PLACES, Gate, Gates
from tests.pipelines.real.job import Job
from tests.pipelines.real.paid import PaidCalls
from tests.postgres import Postgres
from tests.redis_server import RedisServer
from tests.spark.cluster import ROOT, command_line, descendants
from tests.spark.faults.network import Line
from tests.spark.faults.own_process import free_ports

__all__ = ["KINDS", "Fault", "Plan", "draw", "play"]

KINDS = ("task", "worker", "driver", "sidecar", "server", "cut", "server cut", "service")
FAULTS = 3  # in a run
HEALS_AFTER_S = 6.0  # at the latest: a task may be without a connection for 10 s
GIVES_UP_MAX = 5
HANG_S = 600.0
LINES_SHOWN = 40


@dataclass(frozen=True)
class Fault:
    """What strikes, and where. ``how`` distinguishes ways of the same kind: a number that the strike interprets."""

    kind: str
    gate: Gate
    how: int

    def __str__(self) -> str:
        return f"{self.kind} at '{self.gate.place}' {self.gate.count}"


@dataclass(frozen=True)
class Plan:
    """One run. ``apart``: the sidecar has a separate process."""

    source: str
    sink: str
    apart: bool
    holds_events: bool
    faults: tuple[Fault, ...]
    pays: str = ""
    """``"ordered"`` or ``"unordered"`` if each row is paid for between source and sink, by an async stage."""
    per_s: int = 100
    """How many calls of it a second are permitted."""
    budget: int = 0
    """How many calls its budget is for at first; 0: it has none."""
    cached: bool = False
    """Whether each question is asked through a cache."""

    def __str__(self) -> str:
        sidecar = "sidecar apart" if self.apart else "sidecar in the driver"
        events = "holds events" if self.holds_events else "records events"
        budget, cached = f" of {self.budget}" if self.budget else "", " once" if self.cached else ""
        pays = f" -> paid {self.pays}{cached}, {self.per_s}/s{budget}" if self.pays else ""
        return f"{self.source}{pays} -> {self.sink}, {sidecar}, {events}; " + "; ".join(map(str, self.faults))


def draw(seed: int, *, paid: bool | None = None) -> Plan:
    """The run of this seed. As many seeds in a row as there are pairs have them all.

    ``paid``: whether each row is paid for; by default in every second run.
    """
    source, sink = PAIRS[seed % len(PAIRS)]
    chance = random.Random(seed)
    servers = Pair(source, sink, "", "", "").servers
    paid = chance.random() < 0.5 if paid is None else paid
    pays = chance.choice(["ordered", "unordered"]) if paid else ""
    kinds = [kind for kind in KINDS if (servers or not kind.startswith("server")) and (pays or kind != "service")]
    chosen = chance.sample(kinds, FAULTS)
    faults = []
    for kind in chosen:
        place = chance.choice(PLACES)
        count = chance.randint(1, 8) if place == "write" else chance.randint(1, 2)
        faults.append(Fault(kind, Gate(place, count), chance.randrange(1000)))
    apart = "sidecar" in chosen or chance.random() < 0.4
    holds_events, calls = chance.random() < 0.5, random.Random(f"calls {seed}")
    per_s, budget, cached = calls.choice([20, 100]), calls.choice([0, 120]), calls.random() < 0.5
    return Plan(source, sink, apart, holds_events, tuple(faults), pays, per_s, budget, cached)


class Process:
    """A program in a separate session, with its output in a file."""

    def __init__(self, log: Path, *arguments: str, **environment: str) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", **environment},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def kill(self, others: Iterable[int] = ()) -> None:
        """Kill these others, and it."""
        for pid in [*others, self.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """Kill it and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def show_stacks(self) -> None:
        """Let it and its JVMs write their stacks into the log."""
        for pid in descendants(self.pid):
            if "java" in command_line(pid):
                os.kill(pid, signal.SIGQUIT)
        time.sleep(3.0)
        self._process.send_signal(signal.SIGABRT)

    def last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LINES_SHOWN:])


class Run:
    """One run; ``with`` it, and call ``play``."""

    def __init__(self, servers: Servers, plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
        self._servers = servers
        self._plan = plan
        self._folder = folder
        self._say = say
        self._stack = ExitStack()
        self._drivers: list[Process] = []
        self._sidecar: Process | None = None
        self._service: Process | None = None
        self._faults = Outcome()
        self._deadline = 0.0

    def __enter__(self) -> Run:
        self._line = self._stack.enter_context(Line())
        redis_line = self._stack.enter_context(Line())
        postgres_line = self._stack.enter_context(Line())
        servers = self._servers
        redis_line.leads_to = "127.0.0.1", servers.redis.port
        postgres_line.leads_to = "127.0.0.1", servers.postgres.port
        self._server_lines = {"redis": redis_line, "postgres": postgres_line}
        pair = Pair(
            self._plan.source,
            self._plan.sink,
            str(self._folder),
            servers.postgres.conninfo.replace(str(servers.postgres.port), str(postgres_line.port)),
            servers.redis.url.replace(str(servers.redis.port), str(redis_line.port)),
        )
        gates = self._folder / "gates"
        gates.mkdir()
        self._control, relay, service = free_ports(3)
        pays = self._plan.pays
        self._paid = (
            PaidCalls(
                str(self._folder), service, pays == "ordered", self._plan.per_s, self._plan.budget, self._plan.cached
            )
            if pays
            else None
        )
        self._job = Job(
            pair=pair,
            gates=Gates(str(gates), tuple(fault.gate for fault in self._plan.faults)),
            config=self._line.config(storage=str(self._folder / "checkpoints")),
            holds_events=self._plan.holds_events,
            secret_file=str(self._folder / "secret"),
            control=f"127.0.0.1:{self._control}" if self._plan.apart else None,
            paid=self._paid,
        )
        self._relay = relay
        self._job.write(self._folder / "job")
        return self

    def __exit__(self, *unused: object) -> None:
        self._end_all()
        self._stack.close()

    def play(self) -> Outcome:
        """Run the pipeline to its end, and return what has come of it. Raises ``AssertionError`` if it hangs."""
        prepare(self._servers, self._job.pair, late=False)
        self._start_service()
        self._start_sidecar()
        self._start_driver()
        for number, fault in enumerate(self._plan.faults):
            if self._wait_for(partial(self._job.gates.is_reached, number)):
                self._say(str(fault))
                self._faults[fault.kind] += 1
                self._strike(fault, number)
            else:
                self._faults["not reached"] += 1
            self._job.gates.open(number)
        undisturbed_since = time.time()
        self._wait_for(lambda: False)
        self._end_all()
        outcome = self._job.pair.judge(self._servers)
        outcome.update(self._faults)
        if self._paid is not None:
            outcome.update(self._paid.wrong())
            if (used := self._paid.used(undisturbed_since)) is not None:
                self._say(f"{used:.1%} of the limit was used after the last fault")
        drop_slot(self._servers, self._job.pair)
        return outcome

    # --- processes ------------------------------------------------------------------------------------------------

    @property
    def _driver(self) -> Process:
        return self._drivers[-1]

    def _start_driver(self) -> None:
        self._deadline = time.monotonic() + HANG_S  # a busy machine needs minutes for each driver
        log = self._folder / f"driver-{len(self._drivers)}.log"
        self._drivers.append(Process(log, "-m", "tests.pipelines.real.driver", str(self._folder / "job")))

    def _start_sidecar(self) -> None:
        if self._plan.apart:
            module = "tests.pipelines.real.sidecar"
            self._sidecar = Process(
                self._folder / "sidecar.log",
                *("-m", "headgate", "sidecar", f"{module}:coordinate", "--config", f"{module}:config"),
                *("--secret-file", self._job.secret_file, "--lost-after", "2"),
                *("--port", str(self._control), "--relay-port", str(self._relay)),
                *("--task-port", str(self._line.port)),
                HEADGATE_SOAK_JOB=str(self._folder / "job"),
            )

    def _start_service(self) -> None:
        if self._paid is not None:
            arguments = "-m", "tests.pipelines.real.paid", str(self._paid.port), str(self._paid.file("calls"))
            self._service = Process(self._folder / "service.log", *arguments)

    def _end_all(self) -> None:
        for process in (*self._drivers, self._sidecar, self._service):
            if process is not None:
                process.end()

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition, or until everything is committed. Start a driver again that ends with an error."""
        while not condition():
            status = self._driver.status
            if status == 0:
                return condition()
            if status is not None and self._is_exhausted():
                self._say("the budget is exhausted, and raised")
                self._faults["exhausted"] += 1
                self._raise_budget()
            elif status is not None:
                self._say(f"driver gave up: {self._driver.last_lines()}")
                self._faults["gave up"] += 1
                assert self._faults["gave up"] <= GIVES_UP_MAX, f"a driver gave up again: {self._driver.last_lines()}"
                self._start_driver()
            if time.monotonic() > self._deadline:
                self._driver.show_stacks()
                raise AssertionError(f"not over {HANG_S:g} s after a driver began: {self._driver.last_lines()}")
            time.sleep(0.05)
        return True

    def _is_exhausted(self) -> bool:
        paid = self._paid
        return paid is not None and paid.total_now == paid.total > 0 and "is exhausted" in self._driver.last_lines()

    def _raise_budget(self) -> None:
        """As a user does: the sidecar begins with a larger total, and a driver with it."""
        assert self._paid is not None
        self._paid.raise_total()
        if self._sidecar is not None:
            self._sidecar.kill()
            self._start_sidecar()
        self._start_driver()

    # --- faults ---------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault, number: int) -> None:
        match fault.kind:
            case "task":
                self._kill_one(self._tasks, fault)
            case "worker":
                self._kill_one(self._executors, fault)
            case "driver":
                self._driver.kill(self._jvms())
                self._start_driver()
            case "sidecar":
                assert self._sidecar is not None
                self._sidecar.kill()
                self._start_sidecar()
            case "server":
                server = self._server(fault)[0]
                server.kill()
                self._job.gates.open(number)  # the pipeline goes on without its server
                server.start()
            case "service":
                assert self._service is not None
                self._service.kill()
                self._job.gates.open(number)  # the pipeline goes on without it
                self._start_service()
            case "cut":
                self._cut(self._line, fault, number)
            case _:
                self._cut(self._server(fault)[1], fault, number)

    def _kill_one(self, find: Callable[[], list[int]], fault: Fault) -> None:
        if self._wait_for(lambda: bool(find())):
            found = find()
            with suppress(ProcessLookupError, IndexError):
                os.kill(found[fault.how % len(found)], signal.SIGKILL)

    def _tasks(self) -> list[int]:
        """The processes in which an attempt has begun."""
        noted = {int(path.name[5:]) for path in Path(self._job.gates.folder).glob("task-*")}
        return sorted(noted & set(descendants(self._driver.pid)))

    def _executors(self) -> list[int]:
        return sorted(pid for pid in descendants(self._driver.pid) if "ExecutorBackend" in command_line(pid))

    def _jvms(self) -> list[int]:
        return [pid for pid in descendants(self._driver.pid) if "SparkSubmit" in command_line(pid)]

    def _server(self, fault: Fault) -> tuple[Postgres | RedisServer, Line]:
        used = sorted(self._job.pair.servers)
        name = used[fault.how % len(used)]
        server = self._servers.postgres if name == "postgres" else self._servers.redis
        return server, self._server_lines[name]

    def _cut(self, line: Line, fault: Fault, number: int) -> None:
        """Cut the line, let the pipeline feel it, and heal it."""
        turned_away = line.turned_away
        quietly = fault.how % 2 == 0
        line.cut() if quietly else line.break_off()
        self._job.gates.open(number)

        def is_felt() -> bool:
            if not quietly:
                return line.turned_away > turned_away
            return any(end.waiting_bytes for one in line.connections for end in (one.of_task, one.of_sidecar))

        heal_at = time.monotonic() + HEALS_AFTER_S
        self._wait_for(lambda: is_felt() or time.monotonic() > heal_at)
        line.heal()


def play(servers: Servers, plan: Plan, say: Callable[[str], None] = lambda text: None) -> Outcome:
    """Make this run, and return what came of it. ``say`` is told each fault.

    If the run hangs or its outcome is wrong, its files and logs stay, and ``say`` is told where.
    """
    folder = Path(tempfile.mkdtemp(prefix="headgate-soak-"))
    is_right = False
    try:
        with Run(servers, plan, folder, say) as run:
            outcome = run.play()
        is_right = outcome.is_right
        return outcome
    finally:
        if is_right:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"its files are in {folder}")
