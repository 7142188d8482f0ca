"""A task's process: the operator, and the real ``SubtaskMachine`` between it and the network."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from random import Random
from typing import Protocol

from protocol.errors import GatewayFull
from protocol.messages import AttemptEnded, DownMessage, Refused, Register, Registered, Resume, Resumed
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection, RoomAvailable
from protocol.subtask import SubtaskMachine
from protocol.subtask_types import (
    BarrierArrived,
    EndAttempt,
    EventSubmitted,
    MailboxAborted,
    MailboxBarrier,
    MailboxCompleted,
    MailboxEvent,
    MailboxItem,
    OperatorFinished,
    OperatorOpened,
    PutInMailbox,
    RequestSubmitted,
    ResolveRequest,
    SendToCoordinator,
    SnapshotRefused,
    SnapshotTaken,
    SubtaskEffect,
    SubtaskInput,
    SubtaskLimits,
)
from tests.simulation.application import OPERATOR, Application
from tests.simulation.checkers import AttemptRecord, demand
from tests.simulation.engine import EngineTask
from tests.simulation.invariant import TAIL, Log, merge, wire_form
from tests.simulation.network import Connection


class Life(Enum):
    NEW = "new"
    REGISTERING = "registering"
    RESTORING = "restoring"
    RUNNING = "running"
    LEAVING = "leaving"  # the goodbye is on its way
    GONE = "gone"


class TaskWorld(Protocol):
    """What a process may touch."""

    random: Random
    now: float

    def connect(self, task_attempt_id: int) -> Connection: ...
    @property
    def calm(self) -> bool: ...
    def record(self, task_attempt_id: int) -> AttemptRecord: ...
    def exited(self, task_attempt_id: int, failure: str) -> None: ...
    def check_told(self, checkpoint_id: int, *, completed: bool) -> None: ...
    def tell(self, line: str) -> None: ...


class Process:
    """One task attempt. ``actions`` says what could happen next in it; the world chooses.

    ``target``: how many events of each key are to be sent, and to come, until it may finish.
    """

    def __init__(self, world: TaskWorld, task: EngineTask, application: Application, target: int) -> None:
        self.world = world
        self.task = task
        self.tid = task.task_attempt_id
        self.application = application
        self.target = target
        self.life = Life.NEW
        self.hung = False
        self.slowness = world.random.choice([0.0, 0.0, 0.5, 0.95])  # how likely it lets its turn pass
        self.record = world.record(self.tid)
        self.connection: Connection | None = None
        self.resuming = False
        self.machine: SubtaskMachine | None = None
        self.mailbox: deque[MailboxItem] = deque()
        self.logs = {key: Log() for key in application.keys_of(task.partition)}
        self.expected = 0  # events that are still to come at the start
        self.loose = 0  # loss-tolerant events that came
        self.submitted = 0  # events and requests of the subtask's whole history (H32)
        self.open_requests: dict[int, int] = {}  # the keys that they are about
        self.waits_for_room = False

    # --- what could happen next ---

    def actions(self) -> list[Callable[[], None]]:
        if self.hung or self.life is Life.GONE:
            return []
        actions: list[Callable[[], None]] = []
        connection = self.connection
        if connection is not None:
            if connection.down:
                actions.append(self.read)
            elif connection.server_gone and not connection.task_knows:
                actions.append(self.notice_loss)
        if self.life is Life.NEW:
            actions.append(self.register)
        elif connection is None and self.machine is not None:
            actions.append(self.reconnect)
        if self.life is Life.RESTORING:
            actions.append(self.open)
        elif self.life is Life.RUNNING:
            if self.mailbox:
                actions.append(self.handle_mail)
            if not self.waits_for_room and self.sendable():
                actions.append(self.send)
            if self.may_finish():
                actions.append(self.finish)
        elif self.life is Life.LEAVING and self.machine is not None and self.machine.all_confirmed:
            actions.append(self.leave)
        return actions

    # --- connections ---

    def register(self) -> None:
        task = self.task
        self.connection = self.world.connect(self.tid)
        self.connection.send_up(
            Register(
                self.tid,
                OPERATOR,
                task.partition,
                task.stage_id,
                task.attempt_number,
                self.application.settings.mode,
                self.application.parallelism,
                "host",
                "3.11",
            )
        )
        self.life = Life.REGISTERING

    def reconnect(self) -> None:
        assert self.machine is not None
        self.connection = self.world.connect(self.tid)
        self.resuming = True
        self.connection.send_up(Resume(self.tid, OPERATOR, self.machine.resume_seq))

    def notice_loss(self) -> None:
        assert self.connection is not None
        self.connection.task_knows = True
        self.connection = None
        if self.machine is None:
            self.exit("the connection was lost before the answer to the registration")
        elif self.resuming:
            self.resuming = False
        else:
            self.step(ConnectionLost())

    def read(self) -> None:
        connection = self.connection
        assert connection is not None
        batch: list[DownMessage] = []
        for _ in range(self.world.random.randint(1, len(connection.down))):
            message = connection.down.popleft()
            if self.machine is None:
                self.hear_answer(message)
            elif isinstance(message, Resumed):
                self.resuming = False
                self.step(ConnectionAttached(message.received_seq))
            elif isinstance(message, AttemptEnded | Refused) and self.resuming:
                self.exit(f"refused: {message}")
            else:
                batch.append(message)
            if self.life is Life.GONE:
                return
        if batch and self.machine is not None:
            self.carry_out(self.machine.handle_batch(batch, self.world.now))
            self.machine.check_invariants()

    def hear_answer(self, message: DownMessage) -> None:
        if not isinstance(message, Registered):
            self.exit(f"refused: {message}")
            return
        self.restore(message)
        limits = SubtaskLimits(message.window_events, message.window_bytes, message.reconnect_timeout_s)
        subtask = self.task.partition
        self.machine = SubtaskMachine(self.tid, subtask, limits, message.held, message.events_sent)
        self.life = Life.RESTORING
        self.step(ConnectionAttached(0))

    def restore(self, message: Registered) -> None:
        states = [json.loads(state.state) for state in message.states]
        logs = merge(f"task {self.tid}", states)
        demand(set(logs) <= set(self.logs), f"H52: task {self.tid} of keys {list(self.logs)} restores {list(logs)}")
        self.logs.update(logs)
        self.expected = sum(self.target - len(log.received) for log in self.logs.values())
        held = [event.payload.decode() for event in message.held]
        same = len(states) == 1 and states[0]["generation"] == self.application.generation
        self.submitted = states[0]["submitted"] if same else len(held)
        record = self.record
        record.up_restored = self.submitted - len(held)
        record.up_sent.extend(held)

    # --- the operator ---

    def open(self) -> None:
        self.life = Life.RUNNING
        self.step(OperatorOpened())

    def sendable(self) -> list[int]:
        return [key for key, log in self.logs.items() if len(log.sent) < self.target]

    def send(self, *, in_snapshot: bool = False) -> None:
        random, record = self.world.random, self.record
        key = random.choice(self.sendable())
        event = f"u{len(self.logs[key].sent)}"
        payload = wire_form(self.task.partition, key, event)
        asks = not in_snapshot and random.random() < self.application.settings.requests
        request_id = len(record.requests)
        try:
            if asks:
                self.step(RequestSubmitted(request_id, payload.encode()))
            else:
                self.step(EventSubmitted(payload.encode(), in_snapshot))
        except GatewayFull:
            demand(not in_snapshot, f"H31: task {self.tid} may not send inside its snapshot")
            self.waits_for_room = True
            return
        if asks:
            record.requests[request_id] = payload
            self.open_requests[request_id] = key
        self.logs[key].sent.append(event)
        self.submitted += 1
        record.up_sent.append(payload)

    def hear_answer_to(self, effect: ResolveRequest) -> None:
        answer = effect.payload.decode()
        self.record.resolve(effect.request_id, effect.error, answer)
        key = self.open_requests.pop(effect.request_id)
        if not effect.error:
            self.logs[key].answers.append(answer)

    def hear_barrier(self, barrier: BarrierArrived) -> None:
        """It comes on its own way, perhaps late, perhaps again."""
        if self.machine is not None and not self.hung and self.life is not Life.GONE:
            self.step(barrier)

    def handle_mail(self) -> None:
        item = self.mailbox.popleft()
        match item:
            case MailboxEvent(payload):
                target, _, rest = payload.decode().partition("|")
                demand(int(target) == self.tid, f"H20: task {self.tid} got an event for task {target}")
                if rest.startswith("~"):
                    self.loose += 1
                else:
                    key, _, event = rest.partition(":")
                    self.logs[int(key)].received.append(event)
            case MailboxBarrier(checkpoint_id):
                self.meet_barrier(checkpoint_id)
            case MailboxCompleted(checkpoint_id):
                self.world.check_told(checkpoint_id, completed=True)
            case MailboxAborted(checkpoint_id):
                self.world.check_told(checkpoint_id, completed=False)

    def meet_barrier(self, checkpoint_id: int) -> None:
        assert self.machine is not None
        random = self.world.random
        if not self.machine.wants_snapshot(checkpoint_id):
            return  # it ended while its barrier lay in the mailbox
        if not self.world.calm and random.random() < 0.03:
            self.step(SnapshotRefused(checkpoint_id, "not now"))
            return
        for _ in range(3):
            if self.sendable() and random.random() < self.application.settings.in_snapshot:
                self.send(in_snapshot=True)
        self.step(SnapshotTaken(checkpoint_id, self.state()))

    def state(self) -> bytes:
        state = {
            "subtask": self.task.partition,
            "tid": self.tid,
            "generation": self.application.generation,
            "submitted": self.submitted,
            "loose": self.loose,
            "tail": self.record.up_sent[-TAIL:],
            "logs": {key: log.plain() for key, log in self.logs.items()},
        }
        return json.dumps(state).encode()

    def is_done(self) -> bool:
        target = self.target
        return all(len(log.sent) >= target and len(log.received) >= target for log in self.logs.values())

    def awaits_events(self) -> bool:
        """Whether one that is waited for is still to come, of which none has arrived."""
        came = sum("|~" not in payload for payload in self.record.down_came)
        return 0 < came < self.expected

    def may_finish(self) -> bool:
        assert self.machine is not None
        return not self.mailbox and not self.open_requests and self.machine.may_finish and self.is_done()

    def finish(self) -> None:
        self.life = Life.LEAVING
        self.step(OperatorFinished("", self.state()))

    def fail(self) -> None:
        """The operator raises: the goodbye is tried, then the process ends."""
        if self.machine is not None and self.life in (Life.RESTORING, Life.RUNNING):
            self.step(OperatorFinished("the operator raised", b""))
        self.exit("the operator raised", flush=True)

    def leave(self) -> None:
        self.exit("", flush=True)

    def exit(self, failure: str, *, flush: bool = False) -> None:
        self.die(flush=flush)
        self.world.exited(self.tid, failure)

    def die(self, *, flush: bool = False) -> None:
        """Without a word, but for what is in the socket."""
        self.life = Life.GONE
        if self.connection is not None:
            self.connection.close_by_task(flush=flush)
            self.connection = None

    # --- the machine ---

    def step(self, input: SubtaskInput) -> None:
        assert self.machine is not None
        effects = self.machine.handle(input, self.world.now)
        self.machine.check_invariants()
        self.carry_out(effects)

    def carry_out(self, effects: Sequence[SubtaskEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendToCoordinator):
                if self.connection is not None:
                    self.connection.send_up(effect.message)
            elif isinstance(effect, PutInMailbox):
                if isinstance(effect.item, MailboxEvent):
                    self.record.came_down(effect.item.payload.decode())
                elif isinstance(effect.item, MailboxBarrier):
                    self.record.meet_barrier(effect.item.checkpoint_id)
                self.mailbox.append(effect.item)
            elif isinstance(effect, EndAttempt):
                self.exit(f"ended: {effect.reason}")
                return
            elif isinstance(effect, DropConnection):
                demand(False, f"H22: task {self.tid} drops its connection: {effect.why}")
            elif isinstance(effect, RoomAvailable):
                self.waits_for_room = False
            elif isinstance(effect, ResolveRequest):
                self.hear_answer_to(effect)
