# SPDX-License-Identifier: Apache-2.0

"""The driver's side: a sidecar's real actors, on a loop whose turns and time the world controls.

The world provides the server's connections, Spark's relay and the storage; everything between them is product code.
Each actor has its mailbox, and the world chooses whose turn it is. So the same things can overtake each other here as
in the real sidecar, and nothing else can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from actors import ActorRef, ActorSystem, Decision, Hook
from actors.cell import ActorCell
from actors.coordination import OperatorConfig, parts_of
from actors.coordination.engine.barrier_tracker import CheckpointFailed
from actors.coordination.engine.operator_config import UNBOUNDED
from actors.errors import ActorError
from actors.testing import TurnGate, next_item
from protocol.attempts import LedgerConfig
from protocol.barrier_tracker import AbortRequested
from protocol.errors import LocalProtocolError
from protocol.facts import EngineFact
from protocol.gateway.types import GatewayLimits
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import Register, Resume
from spark_bridge.bridge.actor import BridgeActor
from spark_bridge.bridge.relay.records import RelayedFact
from spark_bridge.bridge.runs import RunningJobs
from spark_bridge.common.errors import NotSettled, SidecarError
from spark_bridge.driver.config import SidecarConfig, StorageDetails
from spark_bridge.driver.micro_batches import MicroBatch, MicroBatches
from spark_bridge.driver.operators import Operator, Operators
from spark_bridge.storage import CheckpointFile, StorageError
from tests.simulation.application import (
    CONFIRM_S,
    EVENTS_MAX,
    HEARTBEAT_S,
    OPERATOR,
    RECONNECT_S,
    REPORT_S,
    SILENCE_S,
    UPWARD_EVENTS_MAX,
    Application,
)
from tests.simulation.checkers import demand, judged
from tests.simulation.coordinator import Coordinator
from tests.simulation.inputs import QUERY
from tests.simulation.invariant_monitor import InvariantMonitor
from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import Connection
from tests.simulation.parts import SimulatedChain
from tests.simulation.ports import SimulatedRelay, SimulatedSession
from tests.simulation.server import Router, ServerEnd
from tests.simulation.stages import SimulatedStages

if TYPE_CHECKING:
    from tests.simulation.world import World

LIMITS = GatewayLimits(CONFIRM_S, RECONNECT_S, EVENTS_MAX, 2**40, UPWARD_EVENTS_MAX, 10_000)
WATCHFUL = replace(LIMITS, heartbeat_interval_s=HEARTBEAT_S, heartbeat_timeout_s=SILENCE_S)
LEDGER = LedgerConfig(heal_after_s=1.0, query_every_s=0.5, audit_every_s=5.0)
CHECKPOINT_ANSWER_S = 60.0
SNAPSHOT_TIMEOUT_S = 4.0
BATCH_SETTLE_S = 30.0
DIRECT = (0.0, 0.5, 1.0)
"""How likely an idle actor handles a message within the call that sends it: one of these in each life."""


class Gate(TurnGate):
    """Decides by chance whether an idle actor handles a message immediately, if it may."""

    def __init__(self, monitor: InvariantMonitor, roll: Callable[[], float], likelihood: float) -> None:
        super().__init__()
        self.held = False  # no actor handles anything: another driver still exists
        self._monitor = monitor
        self._roll = roll
        self._likelihood = likelihood

    def direct(self, cell: ActorCell[Any], message: object) -> bool:
        if self.held or self._roll() >= self._likelihood:
            return False
        self._monitor.direct(cell, message)
        return True


class Alarm(Hook):
    """An actor that fails is a bug, even though only its operator would end."""

    def __init__(self, world: World) -> None:
        self._world = world

    def actor_failed(self, ref: ActorRef[Any], cause: BaseException, decision: Decision) -> None:
        if isinstance(cause, Exception):
            self._world.broken = self._world.broken or cause


class Driver:
    """One life of the sidecar. It can be killed at any moment, or be closed by ``close``.

    ``held``: it starts alongside another one, which it fences, and gets only as far as its storage until
    ``gate.held`` is False.
    """

    def __init__(self, world: World, application: Application, *, held: bool = False) -> None:
        self.world = world
        self.application = application
        self.loop = SimulatedLoop(lambda: world.now)  # type: ignore[abstract]  # there is no I/O
        self.router = Router()
        self.monitor = InvariantMonitor(world, self.router, application.settings.attempts_max)
        self.gate = Gate(self.monitor, world.random.random, world.random.choice(DIRECT))
        self.gate.held = held
        self.coordinator = Coordinator(world, application, self.monitor)
        self.stages: SimulatedStages | None = None
        self.parts = parts_of(self.coordinator)
        if application.settings.in_hand:
            self.parts = SimulatedChain(world, self.coordinator).parts
        elif application.settings.stages:
            self.stages = SimulatedStages(world, self.coordinator, application, self.monitor)
            self.parts = self.stages.parts
        self.running = RunningJobs()
        self.relay = SimulatedRelay(world, self.monitor, self.loop, self._tell_bridge)
        self.session: SimulatedSession
        self.threads = world.storage.threads()
        self.files_epoch: int | None = None  # if tasks have files
        self.operator: Operator | None = None  # once it is coordinated
        self.refused: LocalProtocolError | None = None  # why it can never be coordinated
        self.failed: StorageError | None = None  # or why it has not started
        self._asking: list[asyncio.Task[Any]] = []  # for a checkpoint, and not answered yet
        self._asked = 0
        self.settling = self.settled = False
        self.uncommitted = ""  # the answer to callers that wait for the last output
        self.run_is_over = True  # as far as they know
        self.batch: tuple[Operator, MicroBatch] | None = None  # whose function runs
        self.monitor.bridge_checker.run_begins = self._run_begins
        self.batch_busy = False  # the query waits
        self.batch_outcome: str | SidecarError = ""
        self._batches: MicroBatches
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
            if self.application.settings.files:
                self.files_epoch = self.session.epoch
        except StorageError as error:
            self.failed = error
            return
        try:
            hooks = [Alarm(self.world)]
            async with ActorSystem("simulated", hooks=hooks, gate=self.gate, loop_timer=lambda: 0.0) as system:
                try:
                    await self._coordinate(system)
                except StorageError as error:
                    self.failed = error
                except Exception as error:  # reported immediately, not after every actor has had its turn to stop
                    self.world.broken = self.world.broken or error
                    raise
                await self._over
        finally:
            await self.session.__aexit__(None, None, None)

    async def _coordinate(self, system: ActorSystem) -> None:
        ledger = replace(LEDGER, attempts_max=self.application.settings.attempts_max)
        bridge = partial(BridgeActor, ledger, lambda: self.relay, running=self.running)
        self._bridge_ref = system.spawn(bridge, name="bridge", mailbox=UNBOUNDED)
        sidecar_config = SidecarConfig(storage_details=StorageDetails(options={"disk": self.world.storage.disk}))
        self._operators = Operators(sidecar_config, system, self._bridge_ref, self.router, self.session)
        self.router.attach(self._bridge_ref)
        settings = self.application.settings
        config = OperatorConfig(
            OPERATOR,
            self.application.parallelism,
            settings.mode,
            WATCHFUL if settings.heartbeats else LIMITS,
            settings.checkpoints,
            SNAPSHOT_TIMEOUT_S,
            inject_barrier=self._inject_barrier if self._apart else None,
            method_report_s=REPORT_S,
            gateways_per_turn=self.world.random.choice([1, 1, 2, 16]),
            restored_input=self.application.said,
        )
        asked = self.application.restore
        try:
            operator = await self._operators.add(
                config, self.parts, "latest" if asked == "latest" else CheckpointFile(asked)
            )
        except SidecarError as error:
            if not isinstance(error.__cause__, LocalProtocolError):
                raise
            self.refused = error.__cause__
            return
        self.operator = operator
        self._batches = MicroBatches(self._operators, BATCH_SETTLE_S)
        self.world.started()
        self.monitor.watch(self._bridge_ref, operator.tracker_ref, operator.statistics)

    # --- possible next actions ------------------------------------------------------------------------------------

    def actions(self) -> list[Callable[[], None]]:
        """Return the possible next actions, except those from outside."""
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
        if self.stages is not None and self.stages.can_send():
            actions.append(partial(self._run, self.stages.send_something))
        if coordinator.may_settle():
            actions.append(partial(self._run, coordinator.settle_something))
        return actions

    def storage_actions(self) -> list[Callable[[], None]]:
        """Return its storage's possible next actions, the only ones allowed alongside another driver."""
        return [self._serve_storage] if self.threads.ready() else []

    def _turn(self, cell: ActorCell[Any]) -> None:
        item = next_item(cell)
        self.monitor.before(cell, item)
        self.gate.release(cell)
        self._run()
        self.monitor.after()

    def _end_stall(self) -> None:
        self._run(self.coordinator.end_stall)

    def _serve_storage(self) -> None:
        self._run(self.world.storage.serve_one, self.threads)

    def _run(self, function: Callable[..., object] | None = None, *args: Any) -> None:
        """Run a function on the loop with everything that follows; an uncaught error is a finding."""
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
        """Whether a later application has taken the storage over, or appears to have, so that this one is useless."""
        return self.operator is not None and self._operators.fenced is not None

    # --- time -----------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        deadlines = (self.loop.next_deadline(), self.threads.next_relief(), self.coordinator.settles_at())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def pass_time(self) -> None:
        """Fire every timer that is due."""
        deadline = self.loop.next_deadline()
        if deadline is not None and deadline <= self.world.now:
            self.loop.fire_timers()
            self._run()

    # --- external events ------------------------------------------------------------------------------------------

    def read(self, connection: Connection) -> None:
        """Let the server read from a connection or notice its end."""
        end = self._ends.get(connection.connection_id)
        if end is None:
            end = self._ends[connection.connection_id] = ServerEnd(
                connection, self.monitor.connection_dropped, self.world.check_drained
            )
            self._run(self.router.connected, end)
        if connection.up:
            count = self.world.random.randint(1, len(connection.up))
            messages = [connection.up.popleft() for _ in range(count)]
            end.came = True
            if not isinstance(messages[0], Register | Resume):  # a gateway hears it only if it gets the connection
                self.world.record(connection.task_attempt_id).heard_at = self.world.now
            self._run(self.router.messages_received, end, messages)
            return
        connection.server_knows = True
        del self._ends[connection.connection_id]
        self.monitor.connection_gone(connection.connection_id)
        self._run(self.router.disconnected, end, "closed")

    def hear_fact(self, fact: EngineFact) -> None:
        self._run(self._tell_bridge, fact)

    def _tell_bridge(self, fact: EngineFact) -> None:
        self._bridge_ref.tell_direct(RelayedFact(fact, 0))

    def fail_job(self, cause: str) -> None:
        """Let the coordinator fail its job because it cannot go on (H8)."""
        if self.operator is not None:
            late, told = self.monitor.is_behind_a_reset(), self.monitor.waiting("bridge")
            self._run(self.coordinator.context.fail_job, cause)
            silent = self.monitor.waiting("bridge") == told
            demand(silent or not late, "H15: a failure of before a reset fails the run that comes after it")

    def abort_checkpoint(self, reason: str) -> None:
        """Abort the latest checkpoint on request (H45)."""
        if self.operator is not None:
            self._run(self.operator.tracker_ref.tell, AbortRequested(self.monitor.give_up(reason), reason))

    def request(self, *, savepoint: bool) -> None:
        """Request a checkpoint or a savepoint."""
        if self.operator is not None:
            self._run(self.loop.create_task, self._ask_for_checkpoint(savepoint))

    def give_up_request(self) -> None:
        """Cancel a call that waits for a checkpoint (H160)."""
        if self._asking:
            self._run(self.world.random.choice(self._asking).cancel)

    async def _ask_for_checkpoint(self, savepoint: bool) -> None:
        directory = "savepoints" if savepoint else None
        task = asyncio.current_task()
        assert task is not None
        self._asking.append(task)
        self._asked += 1
        counts = self._asked % 3 != 0  # otherwise, as one that a change of the parallelism takes
        try:
            checkpoint_id = await self._operators.checkpoint(
                OPERATOR, timeout_s=CHECKPOINT_ANSWER_S, savepoint_directory=directory, counts=counts
            )
        except (CheckpointFailed, ActorError) as error:
            with judged(self.world):
                self.monitor.request_failed(error)
        else:
            self._answers.append((checkpoint_id, savepoint))
        finally:
            self._asking.remove(task)

    def _judge_answers(self) -> None:
        """Judge the answers after the step in which they were given, together with its decisions."""
        for checkpoint_id, savepoint in self._answers:
            self.monitor.request_answered(checkpoint_id, savepoint=savepoint)
            if savepoint:
                self.world.check_savepoint(checkpoint_id)
                for order in self.coordinator.orders:
                    order.savepoint_over(checkpoint_id)
        self._answers.clear()

    def settle(self, timeout_s: float) -> None:
        """Wait, as the user, for the end of the run and its last checkpoint."""
        self.settling, self.settled, self.uncommitted, self.run_is_over = True, False, "", True
        self._run(self.loop.create_task, self._settle(timeout_s))

    async def _settle(self, timeout_s: float) -> None:
        try:
            self.uncommitted = await self._operators.settle(timeout_s)
        except NotSettled as error:
            self.world.figures.happen("a run does not end in time")
            self.uncommitted, self.run_is_over = str(error), False
        except ActorError:
            pass  # the driver dies
        self.settling, self.settled = False, True

    # --- the batches of a query -----------------------------------------------------------------------------------

    def begin_batch(self, batch_id: int, *, adopt: bool) -> None:
        """Ask, as a query does, whether a batch is to run; ``batch_outcome`` is then "runs", "skipped", or an error."""
        self._run(self.loop.create_task, self._batch(self._begin_batch(MicroBatch(OPERATOR, QUERY, batch_id), adopt)))

    def end_batch(self, *, returned: bool) -> None:
        """The user's function has returned, or raised; ``batch_outcome`` is then "committed", "raised", or an error."""
        self._run(self.loop.create_task, self._batch(self._end_batch(returned)))

    async def _batch(self, call: Coroutine[Any, Any, str]) -> None:
        self.batch_busy = True
        try:
            self.batch_outcome = await call
        except SidecarError as error:
            self.batch_outcome = error
        except ActorError:
            pass  # the driver dies
        self.batch_busy = False

    def _run_begins(self) -> None:
        self.world.strayed |= self.batch is None

    async def _begin_batch(self, batch: MicroBatch, adopt: bool) -> str:
        operator = await self._batches.begin(batch, adopt)
        self.batch = None if operator is None else (operator, batch)
        return "skipped" if operator is None else "runs"

    async def _end_batch(self, returned: bool) -> str:
        assert self.batch is not None
        (operator, batch), self.batch = self.batch, None
        if not returned:
            await self._batches.abandon(operator)
            return "raised"
        await self._batches.finish(operator, batch)
        return "committed"

    def _inject_barrier(self, attempt: ExecutionAttempt, checkpoint_id: int, events_before: int) -> None:
        world = self.world
        if not world.calm and world.random.random() < 0.02:
            raise OSError("no way for the barrier")
        world.figures.barriers_apart += 1
        world.send_barrier_apart(attempt.task_attempt_id, checkpoint_id, events_before)

    # --- the end --------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """Die in the middle of an action; the last operations of its threads may still take effect."""
        self.threads.die()
        self.loop.kill()
        demand(self._life.done(), "H48: a killed sidecar goes on")

    def close(self) -> None:
        """Leave the sidecar as the user does; nothing of it may be left (H57)."""
        self.gate.open()
        if self.world.random.random() < 0.5:
            self._release()
        self._run(self._over.set_result, None)
        demand(self._life.done(), "H48: the sidecar does not come to its end")
        demand(self.coordinator.closed, "H6: the coordinator was not closed")
        demand(self.loop.next_deadline() is None, "H57: a closed sidecar leaves a timer")

    def _release(self) -> None:
        """Release the operator first, as the user may; its coordinator may be slow in the callbacks (H57)."""
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
        """Check that nothing is left and every caller got an answer."""
        demand(not self._asking, f"H45: {len(self._asking)} requests for a checkpoint were never answered")
        demand(not self.router.open, f"H57: gateways are left: {list(self.router.open)}")
        demand(not self.router.gateway_count, "H57: the router keeps gateways that are closed")
        self.monitor.check_rest()
        for order in self.coordinator.orders:
            order.check_discarded()
        self.settled = True
        self.check_settled()

    def check_settled(self) -> None:
        """Check the last output: a caller that received confirmation of its commit has it (H45)."""
        uncommitted = self.coordinator.order.uncommitted
        demand(
            not (self.settled and uncommitted) or bool(self.uncommitted),
            f"H45: no checkpoint covers the last output of {uncommitted}: nobody is told",
        )
