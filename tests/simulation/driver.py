"""The driver's side: the real actors of a sidecar, on a loop whose turns and time are the world's.

The server's connections, Spark's relay and the storage are the world's; everything between them is the product's own
code. Each actor has its mailbox, and the world chooses whose turn it is, so whatever can overtake in the real sidecar
can overtake here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from actors import ActorSystem
from actors.cell import ActorCell
from actors.coordination import OperatorConfig
from actors.coordination.checkpoint_requests import CheckpointFailed
from actors.coordination.operator_config import UNBOUNDED
from actors.errors import ActorError
from actors.testing import TurnGate, next_item
from protocol.attempts import LedgerConfig, SubtaskFinished
from protocol.barrier_tracker import AbortRequested
from protocol.errors import LocalProtocolError
from protocol.facts import EngineFact
from protocol.gateway.types import GatewayLimits
from protocol.ids import ExecutionAttempt
from spark_bridge.bridge.actor import BridgeActor
from spark_bridge.bridge.relay.records import RelayedFact
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.driver.config import SidecarConfig
from spark_bridge.driver.operators import Operator, Operators
from spark_bridge.errors import NotSettled, SidecarError
from spark_bridge.storage import StorageError
from tests.simulation.application import (
    CONFIRM_S,
    EVENTS_MAX,
    OPERATOR,
    RECONNECT_S,
    REPORT_S,
    UPWARD_EVENTS_MAX,
    Application,
)
from tests.simulation.checkers import demand, judged
from tests.simulation.coordinator import Coordinator
from tests.simulation.invariant_monitor import InvariantMonitor
from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import Connection
from tests.simulation.ports import SimulatedRelay, SimulatedSession
from tests.simulation.server import Router, ServerEnd
from tests.simulation.shared import DriverWorld

LIMITS = GatewayLimits(CONFIRM_S, RECONNECT_S, EVENTS_MAX, 2**40, UPWARD_EVENTS_MAX, 10_000)
LEDGER = LedgerConfig(heal_after_s=1.0, query_every_s=0.5, audit_every_s=5.0)
CHECKPOINT_ANSWER_S = 60.0
SNAPSHOT_TIMEOUT_S = 4.0
DIRECT = (0.0, 0.5, 1.0)
"""How likely an idle actor takes a message within the call that tells it: one of these in each life."""


class Gate(TurnGate):
    """Whether an idle actor takes a message immediately, if it may, is up to the dice."""

    def __init__(self, monitor: InvariantMonitor, roll: Callable[[], float], likelihood: float) -> None:
        super().__init__()
        self.held = False  # nobody takes anything: another driver is still there
        self._monitor = monitor
        self._roll = roll
        self._likelihood = likelihood

    def direct(self, cell: ActorCell[Any], message: object) -> bool:
        if self.held or self._roll() >= self._likelihood:
            return False
        self._monitor.direct(cell, message)
        return True


class Driver:
    """One life of the sidecar. It can be killed at any moment; ``close`` is the other end.

    ``held``: it starts beside another one, which it fences, and comes no further than its storage until
    ``gate.held`` is False.
    """

    def __init__(self, world: DriverWorld, application: Application, *, held: bool = False) -> None:
        self.world = world
        self.application = application
        self.loop = SimulatedLoop(lambda: world.now)  # type: ignore[abstract]  # there is no I/O
        self.router = Router()
        self.monitor = InvariantMonitor(world, self.router, application.settings.attempts_max)
        self.gate = Gate(self.monitor, world.random.random, world.random.choice(DIRECT))
        self.gate.held = held
        self.coordinator = Coordinator(world, application, self.monitor)
        self.running = RunningJobs()
        self.relay = SimulatedRelay(world, self.monitor, self.loop)
        self.session: SimulatedSession
        self.threads = world.storage.threads()
        self.operator: Operator | None = None  # once it is coordinated
        self.refused: LocalProtocolError | None = None  # why it never will be
        self.failed: StorageError | None = None  # or why it has not started
        self.requests = 0  # for a checkpoint, not answered yet
        self.settling = self.settled = False
        self.uncommitted = ""  # the answer to those who wait for the last output
        self._answers: list[tuple[int, bool]] = []
        self._ends: dict[int, ServerEnd] = {}
        self._operators: Operators
        self._over = self.loop.create_future()
        self._apart = world.random.random() < application.settings.apart
        self._life = self.loop.create_task(self._live())
        self._run()

    async def _live(self) -> None:
        try:
            self.session = SimulatedSession(self.world, self.application, self.monitor, self.running, self.threads)
            await self.session.__aenter__()
        except StorageError as error:
            self.failed = error
            return
        try:
            async with ActorSystem("simulated", gate=self.gate, loop_timer=lambda: 0.0) as system:
                try:
                    await self._coordinate(system)
                except StorageError as error:
                    self.failed = error
                except Exception as error:  # seen immediately, not when all actors have had their turns to stop
                    self.world.broken = self.world.broken or error
                    raise
                await self._over
        finally:
            await self.session.__aexit__(None, None, None)

    async def _coordinate(self, system: ActorSystem) -> None:
        ledger = replace(LEDGER, attempts_max=self.application.settings.attempts_max)
        bridge = partial(BridgeActor, ledger, lambda: self.relay, running=self.running)
        self._bridge_ref = system.spawn(bridge, name="bridge", mailbox=UNBOUNDED)
        sidecar_config = SidecarConfig(storage_options={"disk": self.world.storage.disk})
        self._operators = Operators(sidecar_config, system, self._bridge_ref, self.router, self.session)
        self.router.attach(self._bridge_ref)
        settings = self.application.settings
        config = OperatorConfig(
            OPERATOR,
            self.application.parallelism,
            settings.mode,
            LIMITS,
            settings.checkpoints,
            SNAPSHOT_TIMEOUT_S,
            inject_barrier=self._inject_barrier if self._apart else None,
            method_report_s=REPORT_S,
        )
        try:
            operator = await self._operators.add(config, self.coordinator, self.application.restore)
        except SidecarError as error:
            if not isinstance(error.__cause__, LocalProtocolError):
                raise
            self.refused = error.__cause__
            return
        self.operator = operator
        self.monitor.watch(self._bridge_ref, operator.tracker_ref, operator.statistics)

    # --- what could happen next -----------------------------------------------------------------------------------

    def actions(self) -> list[Callable[[], None]]:
        """What could happen next, but for what comes from outside."""
        self._judge_answers()
        if self.settled and not self.coordinator.busy and not self.monitor.waiting("coordinator"):
            self.check_settled()
        world, coordinator = self.world, self.coordinator
        actions: list[Callable[[], None]] = [partial(self._turn, cell) for cell in self.gate.waiting]
        if coordinator.stalled is not None and not coordinator.hangs:
            actions.append(self._end_stall)
        if self.threads.ready() and (not actions or world.random.random() >= world.storage.slowness):
            actions.append(self._serve_storage)
        if self.relay.queries:
            actions.append(partial(self._run, self.relay.answer_query))
        if self.monitor.is_behind_a_reset() and world.engine.faults.spend(world.random, 0.05):
            actions.append(partial(self.fail_job, "once more, before the reset is known"))
        if coordinator.can_send():
            actions.append(partial(self._run, coordinator.send_something))
        return actions

    def storage_actions(self) -> list[Callable[[], None]]:
        """What its storage could do next, all that a driver beside another one may."""
        return [self._serve_storage] if self.threads.ready() else []

    def _turn(self, cell: ActorCell[Any]) -> None:
        item = next_item(cell)
        self.monitor.before(cell, item)
        if isinstance(item, SubtaskFinished):  # no callback tells of it
            self.coordinator.finish(item.attempt)
        self.gate.release(cell)
        self._run()
        self.monitor.after()

    def _end_stall(self) -> None:
        self._run(self.coordinator.end_stall)

    def _serve_storage(self) -> None:
        self._run(self.world.storage.serve_one, self.threads)

    def _run(self, function: Callable[..., object] | None = None, *args: Any) -> None:
        """Do something on the loop, and all that follows from it; whatever nobody catches there is a finding."""
        if function is not None:
            self.loop.call_soon(function, *args)
        self.loop.run_until_idle()
        self.monitor.check_raised()
        if self.world.broken is not None:
            raise self.world.broken
        if self._life.done() and not self._life.cancelled():
            error = self._life.exception()
            if error is not None:
                raise error
        for context in self.loop.errors:
            raise context.get("exception") or AssertionError(context["message"])

    @property
    def fenced(self) -> bool:
        """A later application has taken the storage over, or looks so: this one is of no use any more."""
        return self.operator is not None and self._operators.fenced is not None

    # --- time -----------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        deadlines = (self.loop.next_deadline(), self.threads.next_relief())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def pass_time(self) -> None:
        """Every timer that is due fires."""
        deadline = self.loop.next_deadline()
        if deadline is not None and deadline <= self.world.now:
            self.loop.fire_timers()
            self._run()

    # --- from outside ---------------------------------------------------------------------------------------------

    def read(self, connection: Connection) -> None:
        """The server reads from a connection, or notices its end."""
        end = self._ends.get(connection.connection_id)
        if end is None:
            end = self._ends[connection.connection_id] = ServerEnd(connection, self.monitor.connection_dropped)
            self._run(self.router.connected, end)
        if connection.up:
            count = self.world.random.randint(1, len(connection.up))
            messages = [connection.up.popleft() for _ in range(count)]
            self._run(self.router.messages_received, end, messages)
            return
        connection.server_knows = True
        del self._ends[connection.connection_id]
        self.monitor.connection_gone(connection.connection_id)
        self._run(self.router.disconnected, end, "closed")

    def hear_fact(self, fact: EngineFact) -> None:
        self._run(self._bridge_ref.tell_direct, RelayedFact(fact, 0))

    def fail_job(self, cause: str) -> None:
        """The coordinator finds, by itself, that it cannot go on (H8)."""
        if self.operator is not None:
            late, told = self.monitor.is_behind_a_reset(), self.monitor.waiting("bridge")
            self._run(self.coordinator.context.fail_job, cause)
            silent = self.monitor.waiting("bridge") == told
            demand(silent or not late, "H15: a failure of before a reset fails the run that comes after it")

    def abort_checkpoint(self, reason: str) -> None:
        """Somebody gives the latest checkpoint up (H45)."""
        if self.operator is not None:
            self._run(self.operator.tracker_ref.tell, AbortRequested(self.monitor.give_up(reason), reason))

    def request(self, *, savepoint: bool) -> None:
        """Somebody asks for a checkpoint, or a savepoint."""
        if self.operator is not None:
            self.requests += 1
            self._run(self.loop.create_task, self._ask_for_checkpoint(savepoint))

    async def _ask_for_checkpoint(self, savepoint: bool) -> None:
        directory = "savepoints" if savepoint else None
        try:
            checkpoint_id = await self._operators.checkpoint(
                OPERATOR, timeout_s=CHECKPOINT_ANSWER_S, savepoint_directory=directory
            )
        except (CheckpointFailed, ActorError) as error:
            with judged(self.world):
                self.monitor.request_failed(error)
        else:
            self._answers.append((checkpoint_id, savepoint))
        self.requests -= 1

    def _judge_answers(self) -> None:
        """After the step in which they were given, with what was decided in it."""
        for checkpoint_id, savepoint in self._answers:
            self.monitor.request_answered(checkpoint_id, savepoint=savepoint)
            if savepoint:
                self.coordinator.order.savepoint_over(checkpoint_id)
        self._answers.clear()

    def settle(self, timeout_s: float) -> None:
        """The user waits for the end of the run, and for its last checkpoint."""
        self.settling, self.settled, self.uncommitted = True, False, ""
        self._run(self.loop.create_task, self._settle(timeout_s))

    async def _settle(self, timeout_s: float) -> None:
        try:
            self.uncommitted = await self._operators.settle(timeout_s)
        except NotSettled as error:
            self.uncommitted = str(error)
        except ActorError:
            pass  # the driver dies
        self.settling, self.settled = False, True

    def _inject_barrier(self, attempt: ExecutionAttempt, checkpoint_id: int, events_before: int) -> None:
        world = self.world
        if not world.calm and world.random.random() < 0.02:
            raise OSError("no way for the barrier")
        world.figures.barriers_apart += 1
        world.send_barrier_apart(attempt.task_attempt_id, checkpoint_id, events_before)

    # --- the end --------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """Whatever it was at stays as it is; what its threads asked for last may still take effect."""
        self.threads.die()
        self.loop.kill()
        demand(self._life.done(), "H48: a killed sidecar goes on")

    def abandon(self) -> None:
        """End all tasks of a world that broke the contract: anyio keeps each one that is pending, with all it knows."""
        with suppress(Exception):  # it is broken, and may break once more
            self.die()

    def close(self) -> None:
        """The user leaves the sidecar: nothing of it may be left (H57)."""
        self.gate.open()
        if self.world.random.random() < 0.5:
            self._release()
        self._run(self._over.set_result, None)
        demand(self._life.done(), "H48: the sidecar does not come to its end")
        demand(self.coordinator.closed, "H6: the coordinator was not closed")
        demand(self.loop.next_deadline() is None, "H57: a closed sidecar leaves a timer")

    def _release(self) -> None:
        """The user takes the operator out first; what its coordinator is told on the way may take its time (H57)."""
        removal = self.loop.create_task(self._operators.remove(OPERATOR))
        self._run()
        while not removal.done():
            deadline = self.loop.next_deadline()
            demand(self.coordinator.stalled is not None or deadline is not None, "H48: a release does not end")
            if self.coordinator.stalled is not None and not self.coordinator.hangs:
                self._end_stall()
            elif deadline is not None:
                self.world.now = max(self.world.now, deadline)
                self.pass_time()
        removal.result()
        demand(self.coordinator.closed, "H57: the operator is released, and its coordinator was not closed")

    def check_rest(self) -> None:
        """Nothing is left, and nobody was left without an answer."""
        demand(self.requests == 0, f"H45: {self.requests} requests for a checkpoint were never answered")
        demand(not self.router.open, f"H57: gateways are left: {list(self.router.open)}")
        demand(not self.router.gateway_count, "H57: the router keeps gateways that are closed")
        self.monitor.check_rest()
        self.coordinator.order.check_discarded()
        self.settled = True
        self.check_settled()

    def check_settled(self) -> None:
        """Callers who waited for the last output, and were told that it is committed, have it (H45)."""
        uncommitted = self.coordinator.order.uncommitted
        demand(
            not (self.settled and uncommitted) or bool(self.uncommitted),
            f"H45: no checkpoint covers the last output of {uncommitted}: nobody is told",
        )
