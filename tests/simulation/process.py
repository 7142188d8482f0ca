# SPDX-License-Identifier: Apache-2.0

"""A task's process: the operator, and the real ``SubtaskMachine`` between it and the network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any

from actors.coordination.engine.inputs import ActionId
from protocol.errors import GatewayFull
from protocol.parts import ONE_PART, PartTable
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire import messages as m
from protocol.wire.codec import decode_event, encode_event
from tests.simulation.application import OPERATOR, PART, Application, pack, part_text, unpack
from tests.simulation.async_calls import TaskStagesWithCalls
from tests.simulation.checkers import demand
from tests.simulation.group import STEPS_MAX, model_of
from tests.simulation.inputs import Records
from tests.simulation.invariant import REQUEST, Log, wire_form
from tests.simulation.jobs import EngineTask
from tests.simulation.network import Connection
from tests.simulation.parts import TaskParts
from tests.simulation.pending_actions import PAUSE_S
from tests.simulation.stages import TaskStages
from tests.simulation.state_files import TaskFiles
from tests.simulation.troubles import Trap, Troubles
from tests.simulation.work import Work

if TYPE_CHECKING:
    from tests.simulation.world import World


class Life(Enum):
    NEW = "new"
    REGISTERING = "registering"
    RESTORING = "restoring"
    RUNNING = "running"
    LEAVING = "leaving"  # the completion message is on its way
    GONE = "gone"


class Process:
    """One task attempt. ``actions`` lists what could happen next in it; the world chooses.

    ``target``: how many events of each key are to be sent and received before it may finish.
    """

    def __init__(self, world: World, task: EngineTask, application: Application, target: int) -> None:
        self.world = world
        self.task = task
        self.tid = task.task_attempt_id
        self.application = application
        self.life = Life.NEW
        self.slowness = world.random.choice([0.0, 0.0, 0.5, 0.95])  # how likely it skips its turn
        self.troubles = Troubles(world, world.random.choice([0.0, 0.0, 0.0, 0.0, 0.003, 0.03]))
        self.record = world.record(self.tid)
        self.connection: Connection | None = None
        self.second: Connection | None = None  # a second connection that it has registered on
        self.token = b""
        self.input_begins_again = False
        self.resuming = False
        self.machine: SubtaskMachine | None = None
        self.table = ONE_PART
        self.mailbox: deque[s.MailboxItem] = deque()
        self.work = Work(self.tid, task.partition, application, target, self.record)
        self.records: Records | None = None
        self.action = str(ActionId(f"{task.stage_id:016x}", 0, "everything"))  # each run has the same input
        if world.inputs is not None:
            job = world.inputs.jobs[task.stage_id]
            self.action = job.action
            self.records = Records(application.keys_of(task.partition), job.input, world.inputs.size)
            if not application.settings.stages:
                self.work.records = self.records
        self.open_requests: dict[int, int | None] = {}  # the keys that they are about; None for a part's
        self.impatient: set[int] = set()  # of these, the ones that it will abandon if the answer is late
        in_hand = application.settings.in_hand
        self.parts: TaskParts | TaskStages | None = None
        if in_hand:
            self.parts = TaskParts(self, in_hand, application.settings.team)
        elif application.settings.stages:
            self.parts = TaskStagesWithCalls(self) if application.settings.in_flight else TaskStages(self)
        self.finishes: dict[str, bytes] | None = None  # the final states of the parts, while the rest is sent
        epoch = world.driver.files_epoch
        self.files = None if epoch is None else TaskFiles(self, world, epoch)
        self.waits_for_capacity = False
        self.awaits_start = False  # its records come after the events of subtask_ready (H66)
        self.handled = 0  # events
        self.urgent: deque[tuple[bytes, int]] = deque()  # not begun, with their parts
        self.acting: tuple[bytes, int] | None = None  # the urgent event whose handler runs

    # --- possible next actions ---

    @property
    def logs(self) -> dict[int, Log]:
        return self.work.logs

    @property
    def hung(self) -> bool:
        """Whether the whole process is unresponsive, perhaps permanently."""
        return self.troubles.unresponsive or self.troubles.frozen

    def actions(self) -> list[Callable[[], None]]:
        troubles = self.troubles
        if troubles.unresponsive or self.life is Life.GONE:
            return []
        if troubles.frozen:
            return [self.rest]
        actions = self.io_actions()
        if self.files is not None and self.files.uploads:
            actions.append(self.files.go_on)
        if self.parts is not None:
            actions += self.parts.background_actions()
        if troubles.next_relief(self.connection) < inf:
            actions.append(self.rest)
        if self.life is Life.NEW:
            actions.append(self.register)
        elif troubles.stalled:
            actions += self.urgent_actions()
        elif self.life is Life.RESTORING:
            actions.append(self.open)
        elif self.life is Life.RUNNING:
            actions += self.urgent_actions()
            if self.parts is not None and self.parts.blocked:
                return actions if self.waits_for_capacity else [*actions, self.parts.flush]
            if self.finishes is not None:
                return [*actions, self.end_well]
            if self.may_handle_mail():
                actions.append(self.handle_mail)
            if self.awaits_start:
                return actions
            if self.impatient and self.may_abandon():
                actions.append(self.abandon)
            if not self.waits_for_capacity and self.work.sendable():
                actions.append(self.send)
            if self.work.records is not None and self.work.records.wanting():
                actions.append(self.process_record)
            if self.parts is not None:
                actions += self.parts.actions()
            if self.may_finish():
                actions.append(self.finish)
        elif self.life is Life.LEAVING and self.machine is not None and self.machine.all_confirmed:
            actions.append(self.leave)
        return actions

    def may_handle_mail(self) -> bool:
        if not self.mailbox or self.troubles.stalled:
            return False
        return self.parts is None or self.parts.may_handle(self.mailbox[0])

    def io_actions(self) -> list[Callable[[], None]]:
        """Return the possible actions of its I/O thread, independent of the operator."""
        self.record.check_patience(self.world.now, self.troubles.frozen_until)
        if self.application.settings.heartbeats and self.machine is not None and self.machine._outbound.attached:
            due_at = self.machine.next_deadline()
            if due_at is None or due_at > self.world.now:  # it has been told the time
                self.record.check_beats(self.world.now, self.troubles.frozen_until)
        connection = self.connection
        if connection is None:
            return [self.reconnect] if self.machine is not None else []
        actions: list[Callable[[], None]] = []
        connection.arrive(self.world.now)
        if connection.down:
            actions.append(self.read)
        elif connection.server_gone and not connection.task_knows and not connection.down_way:
            actions.append(self.notice_loss)
        if self.second is not None and (self.second.down or self.second.server_gone):
            actions.append(self.read_second)
        return actions

    def urgent_actions(self) -> list[Callable[[], None]]:
        """Return the possible action of the thread for urgent events, which runs whatever the operator does."""
        if self.life is not Life.RUNNING:
            return []
        if self.acting is not None:
            return [self.end_urgent]
        return [self.begin_urgent] if self.urgent else []

    def begin_urgent(self) -> None:
        self.acting = self.urgent.popleft()
        self.record.begun += not self.table.outside[self.acting[1]]
        self.step(s.UrgentBegan())

    def end_urgent(self) -> None:
        """Let the handler return; perhaps it sends an event before, or raises."""
        assert self.acting is not None
        random = self.world.random
        if self.work.sendable() and random.random() < 0.3:
            self.send(in_urgent=True)
        if self.raises_in(Trap.EVENT):
            return
        self.take_event(*self.acting)
        if self.table.outside[self.acting[1]]:
            self.record.outside_acted += 1
        else:
            self.record.acted += 1
        self.acting = None
        self.step(s.UrgentHandled())

    def rest(self) -> None:
        """Let time pass in which it waits for the network, or for itself."""
        relief = self.troubles.next_relief(self.connection)
        self.world.now = min(self.world.now + PAUSE_S, relief)

    # --- connections ---

    def connect(self) -> Connection:
        connection = self.world.connect(self.tid)
        self.troubles.burden(connection)
        return connection

    def cut_off(self, until: float) -> None:
        """Let nothing pass until then, on any connection, old or new."""
        self.troubles.cut_until = max(self.troubles.cut_until, until)
        if self.connection is not None:
            self.connection.cut(self.world, until)

    def register(self) -> None:
        if not self.world.calm and self.world.random.random() < 0.01:
            self.world.figures.happen("never registers")
            self.exit("it died before it registered")
            return
        self.connection = self.connect()
        self.connection.send_up(self.registration())
        self.life = Life.REGISTERING

    def register_again(self) -> None:
        """Register a second subtask in one task, as ``coalesce`` can cause."""
        if self.second is None:
            self.second = self.world.connect(self.tid)
            self.second.send_up(self.registration())

    def read_second(self) -> None:
        """Fail the task, whatever the answer: it contains two subtasks."""
        self.fail("two subtasks in one task")

    def registration(self) -> m.Register:
        task, application = self.task, self.application
        mode, parallelism = application.settings.mode, application.parallelism
        run, number = task.stage_id, task.attempt_number
        own = self.action
        return m.Register(self.tid, OPERATOR, task.partition, run, number, mode, parallelism, "host", "3.11", own)

    def reconnect(self) -> None:
        assert self.machine is not None
        self.connection = self.connect()
        self.resuming = True
        self.connection.send_up(m.Resume(self.tid, OPERATOR, self.machine.resume_seq, self.token))

    def notice_loss(self) -> None:
        assert self.connection is not None
        self.connection.task_knows = True
        self.connection = None
        if self.machine is None:
            self.exit("the connection was lost before the answer to the registration")
        elif self.resuming:
            self.resuming = False
        else:
            self.record.lost_at = self.world.now
            self.step(ConnectionLost())

    def read(self) -> None:
        connection = self.connection
        assert connection is not None
        batch: list[m.DownMessage] = []
        for _ in range(self.world.random.randint(1, len(connection.down))):
            message = connection.down.popleft()
            self.record.hear(message)
            if self.machine is None:
                self.hear_answer(message)
            elif isinstance(message, m.Resumed):
                self.resuming = False
                self.record.sent_up_at = self.world.now
                self.step(ConnectionAttached(message.received_seq))
            elif isinstance(message, m.CoordinatorAwaited):
                self.world.figures.happen("a task is told what its coordinator waits for")
            elif isinstance(message, m.AttemptEnded | m.Refused) and self.resuming:
                self.exit(f"refused: {message}")
            else:
                batch.append(message)
            if self.life is Life.GONE:
                return
        if batch and self.machine is not None:
            self.carry_out(self.machine.handle_batch(batch, self.world.now))
            self.machine.check_invariants()

    def hear_answer(self, message: m.Downward) -> None:
        if not isinstance(message, m.Registered):
            self.exit(f"refused: {message}")
            return
        self.record.parts = tuple(part.name for part in message.parts)
        self.work.restore(message)
        if self.files is not None:
            self.files.restore(message.states, message.files_from)
        self.input_begins_again = message.input_begins_again
        self.record.sent_up_at = self.world.now
        self.token = message.token
        limits = s.SubtaskLimits(
            message.window_events,
            message.window_bytes,
            message.reconnect_timeout_s,
            heartbeat_interval_s=message.heartbeat_interval_s,
        )
        subtask = self.task.partition
        held, hold_events = message.held, message.hold_events
        self.table = PartTable(message.parts)
        self.machine = SubtaskMachine(
            self.tid, subtask, limits, held, message.events_sent, hold_events=hold_events, table=self.table
        )
        self.life = Life.RESTORING
        self.step(ConnectionAttached(0))

    # --- the operator ---

    def raises_in(self, where: Trap) -> bool:
        if self.troubles.trap is not where:
            return False
        self.world.figures.happen(f"operator raises in {where.value}")
        self.fail()
        return True

    def open(self) -> None:
        if self.raises_in(Trap.OPEN):
            return
        self.life = Life.RUNNING
        if self.parts is not None:
            self.parts.open(self.work.part_states)
        self.awaits_start = self.world.random.random() < 0.9
        handles_urgent = self.application.settings.urgent and self.world.random.random() < 0.8
        self.record.handles_urgent = handles_urgent or bool(self.application.settings.team)
        self.step(s.OperatorOpened(self.awaits_start, self.record.handles_urgent))

    def process_record(self) -> None:
        assert self.records is not None
        self.records.put(self.world.random.choice(self.records.wanting()))

    def send(self, *, in_snapshot: bool = False, in_urgent: bool = False) -> None:
        random, record = self.world.random, self.record
        key = random.choice(self.work.sendable())
        event = f"u{len(self.logs[key].sent)}"
        payload = wire_form(self.task.partition, key, event)
        asks = not (in_snapshot or in_urgent) and random.random() < self.application.settings.requests
        if asks:
            payload = REQUEST + payload
        request_id = len(record.requests)
        try:
            if asks:
                self.step(s.RequestSubmitted(request_id, pack(payload)))
            else:
                self.step(s.EventSubmitted(pack(payload), in_snapshot, in_urgent))
        except GatewayFull:
            demand(not in_snapshot, f"H31: task {self.tid} may not send inside its snapshot")
            closed = self.machine is not None and self.machine.statistics().closed_for
            demand(not (in_urgent and closed), f"H92: task {self.tid} may not send in a handler that a snapshot awaits")
            self.waits_for_capacity = True
            return
        if asks:
            record.requests[request_id] = payload
            self.open_requests[request_id] = key
            if random.random() < 0.3:
                self.impatient.add(request_id)
        self.logs[key].sent.append(event)
        self.work.submitted[""] += 1
        record.up_sent[""].append(payload)

    def may_abandon(self) -> bool:
        """Whether the oldest request that it is impatient about was the last message of its key."""
        request_id = min(self.impatient)
        key = self.open_requests[request_id]
        assert key is not None
        return self.record.requests[request_id].endswith(f":{self.logs[key].sent[-1]}")

    def abandon(self) -> None:
        """Wait no more for an answer. A request that was held has never been sent; any other is answered once (H85)."""
        request_id = min(self.impatient)
        self.impatient.remove(request_id)
        key, payload = self.open_requests[request_id], self.record.requests[request_id]
        assert self.machine is not None
        assert key is not None
        self.step(s.RequestAbandoned(request_id))
        if self.life is not Life.RUNNING or request_id in self.machine._outbound.open_requests():
            self.world.figures.happen("a request is abandoned")
            return
        self.world.figures.happen("a held request is taken back")
        del self.open_requests[request_id]
        self.logs[key].sent.pop()
        self.work.submitted[""] -= 1
        self.record.up_sent[""].remove(payload)

    def index_of(self, name: str) -> int:
        index = self.table.index(name)
        assert index is not None, f"{name} of {self.table}"
        return index

    def send_of_part(self, name: str, event: Any, *, in_snapshot: bool = False) -> None:
        """Send an event of a part. ``GatewayFull``: there is no capacity."""
        try:
            self.step(s.EventSubmitted(encode_event(event), in_snapshot, False, self.index_of(name)))
        except GatewayFull:
            demand(not in_snapshot, f"H31: a part of task {self.tid} may not send inside its snapshot")
            raise
        self.work.submitted[name] += 1
        self.record.up_sent[name].append(part_text(name, event))

    def ask_of_part(self, name: str, request: Any) -> int:
        """Send a request of a part, and return its id. ``GatewayFull``: there is no capacity."""
        request_id = len(self.record.requests)
        self.step(s.RequestSubmitted(request_id, encode_event(request), self.index_of(name)))
        text = part_text(name, request)
        self.record.requests[request_id] = text
        self.open_requests[request_id] = None
        self.record.unrecorded_answers = True
        self.work.submitted[name] += 1
        self.record.up_sent[name].append(text)
        return request_id

    def hear_answer_to(self, effect: s.ResolveRequest) -> None:
        key = self.open_requests.pop(effect.request_id)
        self.impatient.discard(effect.request_id)
        if key is None:
            assert self.parts is not None
            self.record.resolve_once(effect.request_id)
            self.parts.hear_answer(effect.request_id, effect.error, effect.payload)
            return
        answer = "" if effect.error else unpack(effect.payload)
        self.record.resolve(effect.request_id, effect.error, answer)
        if not effect.error:
            self.logs[key].answers.append(answer)

    def hear_barrier(self, barrier: s.BarrierArrived) -> None:
        """Receive a barrier, which travels separately and may come late or again."""
        if self.machine is not None and not self.hung and self.life is not Life.GONE:
            self.step(barrier)

    def handle_mail(self) -> None:
        if self.raises_in(Trap.of(self.mailbox[0])) or self.dawdles(self.mailbox[0]):
            return
        item = self.mailbox.popleft()
        self.world.tell(f"task {self.tid} handles {item}")
        match item:
            case s.MailboxStart():
                self.awaits_start = False
                self.record.begin(self.handled)
                if self.records is not None and self.world.inputs is not None:
                    self.world.inputs.check_begins(self.records, f"task {self.tid}")
            case s.MailboxEvent(payload, part):
                self.take_event(payload, part)
            case s.MailboxBarrier(checkpoint_id):
                self.meet_barrier(checkpoint_id)
            case s.MailboxCompleted(checkpoint_id) | s.MailboxAborted(checkpoint_id):
                completed = isinstance(item, s.MailboxCompleted)
                self.world.check_told(checkpoint_id, completed=completed)
                if self.parts is not None:
                    self.parts.hear_end(checkpoint_id, completed=completed)
                if self.files is not None and completed:
                    self.files.completed(checkpoint_id)

    def take_event(self, payload: bytes, part: int) -> None:
        self.handled += 1
        if part:
            assert self.parts is not None
            self.parts.handle(self.table.names[part], decode_event(payload))
            return
        target, _, rest = unpack(payload).partition("|")
        demand(int(target) == self.tid, f"H20: task {self.tid} got an event for task {target}")
        if rest.startswith("~"):
            self.work.loose += 1
        else:
            key, _, name = rest.partition(":")
            self.logs[int(key)].received.append(name)
            self.work.count()

    def dawdles(self, item: s.MailboxItem) -> bool:
        """Whether a snapshot is delayed before it is taken, as happens sometimes."""
        world, troubles = self.world, self.troubles
        if not isinstance(item, s.MailboxBarrier) or troubles.dawdled == item.checkpoint_id or world.calm:
            return False
        troubles.dawdled = item.checkpoint_id
        if world.random.random() >= 0.1:
            return False
        world.figures.happen("late snapshot")
        troubles.stalled_until = world.now + world.random.choice([0.05, 0.5, 7.0])
        return True

    def meet_barrier(self, checkpoint_id: int) -> None:
        assert self.machine is not None
        random = self.world.random
        if not self.machine.wants_snapshot(checkpoint_id):
            return  # it ended while its barrier lay in the mailbox
        if not self.world.calm and random.random() < 0.03:
            self.step(s.SnapshotRefused(checkpoint_id, "not now"))
            return
        for _ in range(3):
            if self.work.sendable() and random.random() < self.application.settings.in_snapshot:
                self.send(in_snapshot=True)
        of_parts = {} if self.parts is None else self.parts.snapshot_state(checkpoint_id)
        taken = s.SnapshotTaken(checkpoint_id, self.work.state(of_parts), state_follows=self.files is not None)
        self.step(taken)

    def awaits_events(self) -> bool:
        """Whether some awaited events have arrived and others are still to come."""
        came = sum("|~" not in payload and payload[0] != PART for payload in self.record.down_came)
        return 0 < came < self.work.expected

    def may_finish(self) -> bool:
        assert self.machine is not None
        return not self.mailbox and not self.open_requests and self.machine.may_finish and self.is_done()

    def check_model(self) -> None:
        """Check what the task of a successful job has trained."""
        assert isinstance(self.parts, TaskParts)
        group = self.parts.group
        assert group is not None
        wanted = model_of(min(self.work.target, STEPS_MAX))
        demand(group.model == wanted, f"H105: the model of task {self.tid} is {group.model}, not {wanted}")

    def is_done(self) -> bool:
        return self.work.is_done() and (self.parts is None or self.parts.done)

    def finish(self) -> None:
        waiting = len(self.urgent) + (self.acting is not None)
        demand(not waiting, f"H93: task {self.tid} may end well before {waiting} urgent events are handled")
        self.finishes = {} if self.parts is None else self.parts.final_state()
        if self.parts is None or not self.parts.blocked:
            self.end_well()

    def end_well(self) -> None:
        """Report the end, unless something has come or waits for the end of a checkpoint: then finish once more."""
        assert self.machine is not None
        assert self.finishes is not None
        if self.mailbox or not self.machine.may_finish:
            self.finishes = None
            return
        self.life = Life.LEAVING
        files = None if self.files is None else self.files.final()
        self.step(s.OperatorFinished("", self.work.state(self.finishes), files))

    def fail(self, why: str = "the operator raised") -> None:
        """Try to send a completion message, then end the process."""
        if self.machine is not None and self.life in (Life.RESTORING, Life.RUNNING):
            self.step(s.OperatorFinished(why, b""))
        self.exit(why, flush=True)

    def leave(self) -> None:
        self.work.check_whole()
        if self.parts is not None:
            self.parts.check_whole()
        self.exit("", flush=True)

    def exit(self, failure: str, *, flush: bool = False) -> None:
        self.die(flush=flush)
        self.world.exited(self.tid, failure)

    def die(self, *, flush: bool = False) -> None:
        """Die without a message, except for data already in the socket."""
        self.life = Life.GONE
        if self.files is not None:
            self.files.die()
        if self.parts is not None:  # also if it was killed: the chain of stages must not outlive it in this process
            self.parts.close()
        if self.connection is not None:
            self.connection.close_by_task(flush=flush)
            self.connection = None
        if self.second is not None:
            self.second.close_by_task(flush=False)
            self.second = None

    # --- the machine ---

    def step(self, input: s.SubtaskInput) -> None:
        assert self.machine is not None
        self.world.tell(f"task {self.tid}: {type(input).__name__}")
        effects = self.machine.handle(input, self.world.now)
        self.machine.check_invariants()
        self.carry_out(effects)

    def carry_out(self, effects: Sequence[s.SubtaskEffect]) -> None:
        for effect in effects:
            if isinstance(effect, s.SendToCoordinator):
                if self.connection is not None:
                    self.connection.send_up(effect.message)
                    self.record.sent_up_at = self.world.now
            elif isinstance(effect, s.PutInMailbox):
                self.record.put_in_mailbox(effect.item)
                self.mailbox.append(effect.item)
            elif isinstance(effect, s.HandleUrgent):
                self.world.figures.happen("an urgent event")
                text, outside = unpack(effect.payload, self.table.names[effect.part]), self.table.outside[effect.part]
                (self.record.came_outside if outside else self.record.came_urgently)(text)
                self.urgent.append((effect.payload, effect.part))
            elif isinstance(effect, s.EndAttempt):
                self.exit(f"ended: {effect.reason}")
                return
            elif isinstance(effect, DropConnection):
                demand(False, f"H22: task {self.tid} drops its connection: {effect.why}")
            elif isinstance(effect, s.CapacityAvailable):
                self.waits_for_capacity = False
            elif isinstance(effect, s.ResolveRequest):
                self.hear_answer_to(effect)
            elif isinstance(effect, s.StartUpload):
                assert self.files is not None
                self.files.start(effect)
            elif isinstance(effect, s.StopUpload):
                assert self.files is not None
                self.files.stop(effect.checkpoint_id)
