"""A task's process: the operator, and the real ``SubtaskMachine`` between it and the network."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from random import Random
from typing import Protocol

from protocol.errors import GatewayFull
from protocol.messages import (
    AttemptEnded,
    DownMessage,
    Refused,
    Register,
    Registered,
    RestoreMode,
    Resume,
    Resumed,
)
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection
from protocol.subtask import SubtaskMachine
from protocol.subtask_types import (
    EndAttempt,
    EventSubmitted,
    MailboxBarrier,
    MailboxEvent,
    MailboxItem,
    OperatorFinished,
    OperatorOpened,
    PutInMailbox,
    SendToCoordinator,
    SnapshotRefused,
    SnapshotTaken,
    SubtaskEffect,
    SubtaskInput,
    SubtaskLimits,
)
from tests.simulation.checkers import END, AttemptRecord, Log, demand
from tests.simulation.engine import EngineTask
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
    def tell(self, line: str) -> None: ...


class Process:
    """One task attempt. ``actions`` says what could happen next in it; the world chooses."""

    def __init__(
        self, world: TaskWorld, task: EngineTask, operator_id: str, mode: RestoreMode, parallelism: int, to_send: int
    ) -> None:
        self.world = world
        self.task = task
        self.tid = task.task_attempt_id
        self.operator_id = operator_id
        self.mode = mode
        self.parallelism = parallelism
        self.to_send = to_send
        self.life = Life.NEW
        self.hung = False
        self.slowness = world.random.choice([0.0, 0.0, 0.5, 0.95])  # how likely it lets its turn pass
        self.connection: Connection | None = None
        self.resuming = False
        self.machine: SubtaskMachine | None = None
        self.mailbox: deque[MailboxItem] = deque()
        self.log = Log()
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
            if len(self.log.sent) < self.to_send and not self.waits_for_room:
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
                self.operator_id,
                task.partition,
                task.stage_id,
                task.attempt_number,
                self.mode,
                self.parallelism,
                "host",
                "3.11",
            )
        )
        self.life = Life.REGISTERING

    def reconnect(self) -> None:
        assert self.machine is not None
        self.connection = self.world.connect(self.tid)
        self.resuming = True
        self.connection.send_up(Resume(self.tid, self.operator_id, self.machine.resume_seq))

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
        if message.state is not None:
            state = json.loads(message.state)
            self.log = Log(state["sent"], state["received"])
        record = self.world.record(self.tid)
        record.up_sent.extend(payload.decode() for payload in message.held)
        limits = SubtaskLimits(message.window_events, message.window_bytes, message.reconnect_timeout_s)
        self.machine = SubtaskMachine(self.tid, limits, message.held)
        self.life = Life.RESTORING
        self.step(ConnectionAttached(0))

    # --- the operator ---

    def open(self) -> None:
        self.life = Life.RUNNING
        self.step(OperatorOpened())

    def send(self) -> None:
        payload = f"{self.task.partition}:u{len(self.log.sent)}"
        try:
            self.step(EventSubmitted(payload.encode()))
        except GatewayFull:
            self.waits_for_room = True
            return
        self.log.sent.append(payload)
        self.world.record(self.tid).up_sent.append(payload)

    def handle_mail(self) -> None:
        item = self.mailbox.popleft()
        if isinstance(item, MailboxEvent):
            target, _, payload = item.payload.decode().partition("|")
            demand(int(target) == self.tid, f"H20: task {self.tid} got an event for task {target}")
            self.log.received.append(payload)
        elif isinstance(item, MailboxBarrier):
            if not self.world.calm and self.world.random.random() < 0.03:
                self.step(SnapshotRefused(item.checkpoint_id, "not now"))
            else:
                self.step(SnapshotTaken(item.checkpoint_id, self.state()))

    def state(self) -> bytes:
        return json.dumps({"tid": self.tid, "sent": self.log.sent, "received": self.log.received}).encode()

    def may_finish(self) -> bool:
        assert self.machine is not None
        done = self.log.received[-1:] == [END] and len(self.log.sent) >= self.to_send
        return done and not self.mailbox and self.machine.may_finish

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
                    self.world.record(self.tid).came_down(effect.item.payload.decode())
                self.mailbox.append(effect.item)
            elif isinstance(effect, EndAttempt):
                self.exit(f"ended: {effect.reason}")
                return
            elif isinstance(effect, DropConnection):
                demand(False, f"H22: task {self.tid} drops its connection: {effect.why}")
            else:
                self.waits_for_room = False
