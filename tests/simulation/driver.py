"""The driver's side: the real ledger, tracker and gateways, joined by mailboxes as the actors are.

Every actor has an ordered mailbox of its own, and the world chooses whose turn it is. So whatever can overtake in
the real sidecar can overtake here, and nothing else.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from protocol.attempts import (
    AcceptAttempt,
    AnnounceFailed,
    AnnounceReady,
    AttemptLedger,
    CancelJobs,
    ConnectionExpired,
    EndRun,
    FinishAttempt,
    GlobalFailureRaised,
    KillTask,
    LedgerConfig,
    LedgerEffect,
    OperatorAdded,
    QueryStatus,
    RefuseRegistration,
    RegistrationArrived,
    ResetOperator,
    ResetSubtask,
)
from protocol.barrier_tracker import (
    AbortCheckpoint,
    AttemptAccepted,
    AttemptFailed,
    AttemptFinished,
    AttemptReady,
    BarrierTracker,
    CheckpointConfig,
    CheckpointStored,
    CheckpointStoreFailed,
    CheckpointTriggered,
    CloseSubtask,
    CompleteCheckpoint,
    CompletedCheckpoint,
    CoordinatorSnapshotTaken,
    DiscardCheckpoint,
    OperatorResetRequired,
    RaiseGlobalFailure,
    RefuseCheckpoint,
    ReopenSubtask,
    RestoreAttempt,
    RunEnded,
    SendBarrier,
    SnapshotCoordinator,
    StoreCheckpoint,
    SubtaskResetRequired,
    TellFailed,
    TellReady,
    TellReset,
    TellResetToCheckpoint,
    TellRunEnded,
    TrackerEffect,
)
from protocol.gateway_types import (
    AttemptIsOver,
    BarrierRequested,
    CheckpointOver,
    CloseRequested,
    CutReached,
    GatewayLimits,
    ItemTaken,
    ReadyAnnounced,
)
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.messages import Refused, Registered, RestoreMode
from tests.simulation.checkers import END, AttemptRecord, CallbackOrder, Log, check_channel, check_whole, demand
from tests.simulation.coordinator import Coordinator, log_in
from tests.simulation.engine import Engine
from tests.simulation.gateways import OPERATOR, Arrived, Attach, Gateway, Lost
from tests.simulation.network import Connection


class DriverWorld(Protocol):
    """What the driver's side may touch."""

    random: Random
    now: float
    engine: Engine
    connections: dict[int, Connection]

    @property
    def calm(self) -> bool: ...
    def record(self, task_attempt_id: int) -> AttemptRecord: ...
    def tell(self, line: str) -> None: ...


class Driver:
    """Bridge, tracker, coordinator and gateways."""

    def __init__(self, world: DriverWorld, parallelism: int, mode: RestoreMode, to_send: int) -> None:
        self.world = world
        self.parallelism = parallelism
        self.mode = mode
        self.to_send = to_send
        self.ledger = AttemptLedger(LedgerConfig(heal_after_s=1.0, query_every_s=0.5, audit_every_s=5.0))
        self.ledger.handle(OperatorAdded(OPERATOR, parallelism), world.now)
        config = CheckpointConfig(timeout_s=6.0, tolerated_failures=1, mode=mode)
        self.tracker = BarrierTracker(OPERATOR, parallelism, config)
        self.limits = GatewayLimits(3.0, 2.0, 8, 10_000, 4, 10_000)
        self.bridge_box: deque[Any] = deque()
        self.tracker_box: deque[Any] = deque()
        self.coordinator_box: deque[tuple[Any, ...]] = deque()
        self.registering: dict[int, Connection] = {}  # by connection, until the ledger has decided
        self.accepting: dict[int, Connection] = {}  # by task, until its gateway is there
        self.gateways: dict[int, Gateway] = {}
        self.all_gateways: list[Gateway] = []
        self.by_connection: dict[int, Gateway] = {}
        self.coordinator = Coordinator(to_send)
        self.order = CallbackOrder(parallelism, mode is RestoreMode.BATCH, world.engine.copies or world.engine.barrier)
        self.storing: CompletedCheckpoint | None = None
        self.stored: dict[int, CompletedCheckpoint] = {}
        self.triggered: set[int] = set()
        self.answered: set[int] = set()
        self.last_checkpoint = 0
        self.queries: deque[QueryStatus] = deque()
        self.confirmed = self.events_up = self.completed = self.aborted = self.resets = self.failures = 0
        self.kinds: dict[str, int] = {}

    # --- what could happen next ---

    def actions(self) -> list[Callable[[], None]]:
        actions: list[Callable[[], None]] = []
        if self.bridge_box:
            actions.append(self.receive_at_bridge)
        if self.tracker_box:
            actions.append(self.receive_at_tracker)
        if self.coordinator.snapshotting is not None:
            actions.append(self.end_snapshot)
        elif self.coordinator_box:
            actions.append(self.receive_at_coordinator)
        actions.extend(gateway.receive for gateway in self.all_gateways if gateway.box)
        if self.storing is not None:
            actions.append(self.end_store)
        if self.queries:
            actions.append(self.answer_query)
        if any(True for _ in self.senders()):
            actions.append(self.send_something)
        for connection in self.world.connections.values():
            if not connection.server_knows and (connection.up or connection.task_gone):
                actions.append(lambda connection=connection: self.read(connection))  # type: ignore[misc]
        return actions

    def next_deadline(self) -> float | None:
        deadlines = [self.ledger.next_deadline(), self.tracker.next_deadline()]
        deadlines.extend(gateway.machine.next_deadline() for gateway in self.all_gateways)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def pass_time(self) -> None:
        """Every timer that is due fires into the mailbox of its actor."""
        now = self.world.now

        def due(deadline: float | None) -> bool:
            return deadline is not None and deadline <= now

        def fire(box: deque[Any]) -> None:
            if TimePassed() not in box:
                box.append(TimePassed())

        if due(self.ledger.next_deadline()):
            fire(self.bridge_box)
        if due(self.tracker.next_deadline()):
            fire(self.tracker_box)
        for gateway in self.all_gateways:
            if due(gateway.machine.next_deadline()):
                fire(gateway.box)

    # --- server ---

    def read(self, connection: Connection) -> None:
        if not connection.up:
            connection.server_knows = True
            gateway = self.by_connection.get(connection.connection_id)
            if gateway is not None:
                gateway.box.append(Lost(connection.connection_id))
            else:
                self.bridge_box.append(("abandoned", connection.connection_id))
            return
        count = self.world.random.randint(1, len(connection.up))
        messages = [connection.up.popleft() for _ in range(count)]
        gateway = self.by_connection.get(connection.connection_id)
        if gateway is None:
            first, *messages = messages
            if type(first).__name__ == "Register":
                self.bridge_box.append(("register", connection, first))
                demand(not messages, "a task spoke before it was registered")
                return
            tid, received_seq = connection.task_attempt_id, getattr(first, "received_seq", 0)
            gateway = self.gateways.get(tid)
            if gateway is None:
                connection.send_down(Refused(tid, 4, "the attempt is over"))
                connection.close_by_server()
                return
            self.by_connection[connection.connection_id] = gateway
            gateway.box.append(Attach(connection, received_seq))
        if messages:
            gateway.box.append(Arrived(connection.connection_id, messages))

    # --- bridge ---

    def receive_at_bridge(self) -> None:
        message = self.bridge_box.popleft()
        match message:
            case ("register", connection, register):
                self.registering[connection.connection_id] = connection
                message = RegistrationArrived(connection.connection_id, register)
            case ("abandoned", connection_id):
                connection = self.registering.pop(connection_id, None)
                if connection is None:
                    return
                message = ConnectionExpired(OPERATOR, connection.task_attempt_id)
            case _:
                pass
        effects = self.ledger.handle(message, self.world.now)
        self.ledger.check_invariants()
        for effect in effects:
            self.carry_out_ledger(effect)

    def carry_out_ledger(self, effect: LedgerEffect) -> None:
        engine = self.world.engine
        match effect:
            case RefuseRegistration(connection_id, tid, code, text):
                self.registering.pop(connection_id, None)
                connection = self.world.connections[connection_id]
                connection.send_down(Refused(tid, code, text))
                connection.close_by_server()
                self.world.tell(f"ledger refuses task {tid}: {text}")
            case KillTask(tid, reason):
                self.world.tell(f"ledger kills task {tid}: {reason}")
                engine.request_kill(tid, reason)
            case CancelJobs(job_ids, reason):
                self.world.tell(f"ledger cancels jobs {job_ids}: {reason}")
                engine.cancel(job_ids, reason)
            case QueryStatus():
                self.queries.append(effect)
            case AcceptAttempt() | AnnounceReady() | AnnounceFailed() | FinishAttempt() | ResetSubtask():
                self.tracker_box.append(effect)
            case ResetOperator() | EndRun():
                self.tracker_box.append(effect)
            case _:
                pass

    def answer_query(self) -> None:
        query = self.queries.popleft()
        self.bridge_box.append(self.world.engine.status(query.task_attempt_ids, query.job_ids))

    # --- tracker ---

    def trigger(self) -> None:
        self.last_checkpoint += 1
        self.triggered.add(self.last_checkpoint)
        self.tracker_box.append(CheckpointTriggered(self.last_checkpoint))

    def receive_at_tracker(self) -> None:
        message = self.tracker_box.popleft()
        match message:
            case AcceptAttempt(connection_id, attempt, _, mode):
                self.registering.pop(connection_id, None)
                self.accepting[attempt.task_attempt_id] = self.world.connections[connection_id]
                message = AttemptAccepted(attempt, mode)
            case AnnounceReady(attempt):
                message = AttemptReady(attempt)
            case AnnounceFailed(attempt, reason):
                message = AttemptFailed(attempt, reason)
            case FinishAttempt(attempt):
                self.close_gateway(attempt, "it has finished")
                self.coordinator_box.append(("finished", attempt))
                message = AttemptFinished(attempt)
            case ResetSubtask(_, subtask):
                message = SubtaskResetRequired(subtask)
            case ResetOperator(_, cause):
                message = OperatorResetRequired(cause)
            case EndRun(_, run_id, succeeded, reason):
                message = RunEnded(run_id, succeeded, reason)
            case _:
                pass
        effects = self.tracker.handle(message, self.world.now)
        self.tracker.check_invariants()
        for effect in effects:
            self.carry_out_tracker(effect)

    def carry_out_tracker(self, effect: TrackerEffect) -> None:
        if not isinstance(effect, CloseSubtask | SendBarrier):
            self.world.tell(f"tracker: {effect}"[:200])
        match effect:
            case CloseSubtask(attempt, checkpoint_id):
                self.tell_gateway(attempt, CloseRequested(checkpoint_id))
            case SendBarrier(attempt, checkpoint_id):
                self.tell_gateway(attempt, BarrierRequested(checkpoint_id))
            case ReopenSubtask(attempt, checkpoint_id):
                self.tell_gateway(attempt, CheckpointOver(checkpoint_id, False))
            case SnapshotCoordinator(checkpoint_id):
                self.coordinator_box.append(("snapshot", checkpoint_id))
            case StoreCheckpoint(checkpoint):
                demand(self.storing is None, f"H43: two checkpoints are being stored, {checkpoint.checkpoint_id}")
                self.storing = checkpoint
            case DiscardCheckpoint(checkpoint_id):
                self.storing = None
                self.stored.pop(checkpoint_id, None)
            case CompleteCheckpoint(checkpoint_id):
                self.check_invariant(self.stored[checkpoint_id])
                self.end_checkpoint(checkpoint_id, True)
            case AbortCheckpoint(checkpoint_id):
                self.end_checkpoint(checkpoint_id, False)
            case RefuseCheckpoint(checkpoint_id):
                self.answer(checkpoint_id)
            case RaiseGlobalFailure(cause):
                self.bridge_box.append(GlobalFailureRaised(OPERATOR, cause))
            case RestoreAttempt():
                self.open_gateway(effect)
            case TellReady(attempt):
                gateway = next(g for g in self.all_gateways if g.attempt == attempt)
                self.coordinator_box.append(("ready", gateway, self.accepted_beside(attempt)))
            case TellFailed(attempt, reason):
                self.close_gateway(attempt, str(reason))
                beside = self.accepted_beside(attempt)
                accepted = any(gateway.attempt == attempt for gateway in self.all_gateways)
                self.coordinator_box.append(("failed", attempt, reason, accepted, beside))
            case TellReset(subtask, checkpoint_id):
                self.coordinator_box.append(("reset", subtask, checkpoint_id))
            case TellResetToCheckpoint(checkpoint_id, state):
                self.coordinator_box.append(("reset_all", checkpoint_id, state))
            case TellRunEnded(run_id, succeeded):
                for gateway in list(self.gateways.values()):
                    self.close_gateway(gateway.attempt, "the run has ended")
                self.coordinator_box.append(("run_ended", run_id, succeeded))
            case _:
                pass

    def answer(self, checkpoint_id: int) -> None:
        demand(checkpoint_id not in self.answered, f"H44: checkpoint {checkpoint_id} was answered twice")
        self.answered.add(checkpoint_id)

    def end_checkpoint(self, checkpoint_id: int, completed: bool) -> None:
        self.answer(checkpoint_id)
        self.completed += completed
        self.aborted += not completed
        for gateway in self.gateways.values():
            gateway.box.append(CheckpointOver(checkpoint_id, completed))
        self.coordinator_box.append(("over", checkpoint_id, completed))

    def end_store(self) -> None:
        assert self.storing is not None
        checkpoint, self.storing = self.storing, None
        if not self.world.calm and self.world.random.random() < 0.05:
            self.tracker_box.append(CheckpointStoreFailed(checkpoint.checkpoint_id, "no space"))
            return
        self.stored[checkpoint.checkpoint_id] = checkpoint
        self.tracker_box.append(CheckpointStored(checkpoint.checkpoint_id))

    def check_invariant(self, checkpoint: CompletedCheckpoint) -> None:
        """The invariant of the contract, on a checkpoint that has just become complete."""
        coordinator = json.loads(checkpoint.coordinator_state)
        for subtask in range(self.parallelism):
            snapshot = checkpoint.subtask_states.get(subtask)
            name = f"checkpoint {checkpoint.checkpoint_id}, subtask {subtask}"
            if snapshot is None:
                check_channel(f"{name} (empty)", log_in(coordinator, subtask, None), Log(), [])
                continue
            state = json.loads(snapshot.state)
            held = [payload.decode() for payload in snapshot.held]
            log = log_in(coordinator, subtask, state["tid"])
            check_channel(f"{name} (task {state['tid']})", log, Log(state["sent"], state["received"]), held)

    # --- gateways ---

    def accepted_beside(self, attempt: ExecutionAttempt) -> set[int]:
        """The other attempts of its subtask that are alive now, ready or not."""
        same = (g.attempt for g in self.gateways.values() if g.attempt.subtask == attempt.subtask)
        return {other.attempt for other in same if other != attempt}

    def open_gateway(self, effect: RestoreAttempt) -> None:
        attempt, limits = effect.attempt, self.limits
        tid = attempt.task_attempt_id
        connection = self.accepting.pop(tid)
        registered = Registered(
            tid,
            attempt.attempt,
            effect.checkpoint_id,
            effect.state,
            effect.held,
            limits.reconnect_timeout_s,
            limits.upward_events_max,
            limits.upward_bytes_max,
        )
        gateway = Gateway(self, attempt, limits, registered)
        self.gateways[tid] = gateway
        self.all_gateways.append(gateway)
        self.by_connection[connection.connection_id] = gateway
        gateway.box.append(Attach(connection, None))
        if connection.server_knows:
            gateway.box.append(Lost(connection.connection_id))

    def close_gateway(self, attempt: ExecutionAttempt, reason: str) -> None:
        gateway = self.gateways.pop(attempt.task_attempt_id, None)
        if gateway is not None:
            gateway.dead = True
            gateway.box.append(AttemptIsOver(reason))

    def tell_gateway(self, attempt: ExecutionAttempt, message: Any) -> None:
        gateway = self.gateways.get(attempt.task_attempt_id)
        if gateway is not None:
            gateway.box.append(message)

    # --- coordinator ---

    def senders(self) -> list[tuple[Gateway, Log]]:
        found = []
        for subtask, handles in self.coordinator.handles.items():
            for number, gateway in handles.items():
                log = self.coordinator.log_of(subtask, number)
                if log.sent[-1:] != [END] and gateway.open_events < self.limits.events_max:
                    found.append((gateway, log))
        return found

    def send_something(self) -> None:
        gateway, log = self.world.random.choice(self.senders())
        payload = f"d{len(log.sent)}" if len(log.sent) < self.coordinator.to_send else END
        log.sent.append(payload)
        gateway.send(f"{gateway.attempt.task_attempt_id}|{payload}")

    def end_snapshot(self) -> None:
        """``checkpoint_coordinator`` returns: this is the cut."""
        checkpoint_id, self.coordinator.snapshotting = self.coordinator.snapshotting, None
        assert checkpoint_id is not None
        state = self.coordinator.state()
        for handles in self.coordinator.handles.values():
            for gateway in handles.values():
                gateway.box.append(CutReached(checkpoint_id))
        self.tracker_box.append(CoordinatorSnapshotTaken(checkpoint_id, json.dumps(state).encode()))

    def receive_at_coordinator(self) -> None:
        coordinator, order = self.coordinator, self.order
        message = self.coordinator_box.popleft()
        match message:
            case ("event", gateway, seq, payload):
                attempt = gateway.attempt
                if attempt.attempt not in coordinator.handles.get(attempt.subtask, {}):
                    return  # over: dropped in one place (H3)
                order.event(attempt.subtask, attempt.attempt)
                gateway.record.came_up(payload)
                coordinator.log_of(attempt.subtask, attempt.attempt).received.append(payload)
                self.events_up += 1
                gateway.box.append(ItemTaken(seq))
            case ("snapshot", checkpoint_id):
                order.snapshot_asked(checkpoint_id)
                coordinator.snapshotting = checkpoint_id
            case ("over", checkpoint_id, completed):
                order.checkpoint_over(checkpoint_id, completed)
            case ("ready", gateway, beside):
                subtask, number = gateway.attempt.subtask, gateway.attempt.attempt
                order.ready(subtask, number, beside)
                coordinator.logs.setdefault(subtask, {})[number] = coordinator.base_of(subtask).copy()
                coordinator.handles.setdefault(subtask, {})[number] = gateway
                gateway.box.append(ReadyAnnounced())
            case ("finished", attempt):
                self.finish_attempt(attempt)
            case ("failed", attempt, reason, accepted, beside):
                order.failed_attempt(attempt.subtask, attempt.attempt, accepted, beside)
                self.failures += 1
                self.kinds[reason.kind.value] = self.kinds.get(reason.kind.value, 0) + 1
                coordinator.handles.get(attempt.subtask, {}).pop(attempt.attempt, None)
            case ("reset", subtask, checkpoint_id):
                self.resets += 1
                order.reset(subtask, checkpoint_id)
                self.restore_base(subtask, checkpoint_id)
            case ("reset_all", checkpoint_id, _):
                self.resets += 1
                order.reset_all(checkpoint_id)
                for subtask in range(self.parallelism):
                    self.restore_base(subtask, checkpoint_id)
            case ("run_ended", _, succeeded):
                order.run_ended()
                coordinator.handles.clear()
                if succeeded:
                    self.check_whole_run()

    def check_whole_run(self) -> None:
        """A run that succeeded has exchanged everything, once, with every subtask."""
        for subtask in range(self.parallelism):
            log = self.coordinator.base_of(subtask)
            check_whole(f"coordinator's view of subtask {subtask}", log.received, log.sent, subtask, self.to_send)

    def finish_attempt(self, attempt: ExecutionAttempt) -> None:
        """From here on its gateway is dead; what it exchanged stays part of every snapshot until a reset."""
        coordinator = self.coordinator
        coordinator.handles.get(attempt.subtask, {}).pop(attempt.attempt, None)
        if attempt.attempt in coordinator.logs.get(attempt.subtask, {}):
            coordinator.base[attempt.subtask] = coordinator.log_of(attempt.subtask, attempt.attempt).copy()

    def restore_base(self, subtask: int, checkpoint_id: int) -> None:
        coordinator = self.coordinator
        coordinator.logs.pop(subtask, None)
        coordinator.handles.pop(subtask, None)
        coordinator.base[subtask] = Log()
        if checkpoint_id >= 0:
            checkpoint = self.stored[checkpoint_id]
            snapshot = checkpoint.subtask_states.get(subtask)
            tid = None if snapshot is None else json.loads(snapshot.state)["tid"]
            coordinator.base[subtask] = log_in(json.loads(checkpoint.coordinator_state), subtask, tid)
