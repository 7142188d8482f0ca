# SPDX-License-Identifier: Apache-2.0

"""The executor's end of an attempt: the real ``SubtaskMachine``, the operator, and the task's process around them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, cast

from protocol.attempts import RegistrationArrived
from protocol.facts import TaskEnded, TaskOutcome, TaskStarted
from protocol.file_retention import LAST_STATE, FileOrigin, UploadedFiles, file_name
from protocol.gateway.inbound import OF_CHECKPOINT
from protocol.in_flight import Flight, InFlight
from protocol.machine import TimePassed
from protocol.parts import PartTable
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine, SubtaskStatus
from protocol.wire import messages as m
from protocol.wire.state_handles import StateHandle
from tests.exploration import vocabulary as v

RUN = 7


class Life(Enum):
    ABSENT = "absent"
    WAITING = "waiting"  # has registered
    RUNNING = "running"
    LEAVING = "leaving"  # has finished; its completion message is on the way
    GONE = "gone"
    SUCCEEDED = "succeeded"


class SubtaskFacts(NamedTuple):
    """The parts of one task's state that steps and reductions depend on."""

    life: Life
    attached: bool
    condemned: bool
    sends: bool
    abandons: bool
    at_barrier: bool
    may_begin_urgent: bool
    may_end_urgent: bool
    may_finish: bool
    may_leave: bool
    may_expire: bool
    done: bool
    sent_seq: int
    asks_permit: bool = False
    takes: bool = False
    open_calls: int = 0
    leaves: bool = False
    uploads: tuple[int, ...] = ()


class RecordFlight(Flight):
    """A record in flight."""

    __slots__ = ("record",)

    def __init__(self, record: int, landed: bool = False) -> None:
        super().__init__()
        self.record = record
        self.landed = landed


class SubtaskEnd:
    """See the module. The operator counts the events that it has sent and received over its subtask's history.

    Items in its mailbox before a barrier are handled immediately: only the operator sees them, so the time makes no
    difference. ``expected``: by checkpoint, the number of events of this attempt that come before the barrier;
    ``put``: how many have come into the mailbox, and answers. It sends nothing before the message to begin (H66);
    ``to_greet``: how many events of its history must have come by then. ``urgent``: the urgent events that wait
    for their handlers; ``begun`` and ``acted``: how many handlers of its history have begun and returned.

    If it is an async stage: ``taken`` records, of which some have ``left``; ``known`` are those whose results the
    restored checkpoint has, or this attempt.

    If it has ``files``: ``uploads`` are those of its snapshots that it stores, by checkpoint.
    """

    def __init__(self, slot: int, subtask: int, number: int, parallelism: int, to_exchange: tuple[int, int]) -> None:
        self.task = v.Task(slot + 1)
        self.subtask = v.Subtask(subtask)
        self.number = number
        self.parallelism = parallelism
        self.of_input = to_exchange
        self.to_send, self.to_receive = to_exchange
        self.parts, self.permits = 1, 0  # of the scope
        self.limit, self.ordered = 0, False  # of the scope
        self.stage: InFlight[RecordFlight] | None = None
        self.open_calls: list[RecordFlight] = []
        self.taken = 0
        self.left: tuple[int, ...] = ()
        self.known: frozenset[int] = frozenset()
        self.files = False  # of the scope
        self.uploads: dict[int, StateHandle] = {}
        self.uploaded: UploadedFiles | None = None  # if files are named again
        self.to_ask = 0  # permits, by this attempt
        self.awaits_permit = False
        self.run_id = RUN
        self.input = 0
        self.restored: tuple[int, ...] = ()  # the inputs of the states that it restores
        self.begins_again = False
        self.asks = self.in_snapshot = self.finishes = self.greeted = self.start_is_lost = self.has_urgent = False
        self.started = self.abandons = self.abandoned = False
        self.to_greet = 0
        self.mode = m.RestoreMode.STREAMING
        self.life = Life.ABSENT
        self.condemned = False
        self.attached = False
        self.machine: SubtaskMachine | None = None
        self.mailbox: deque[s.MailboxItem] = deque()
        self.sent = 0
        self.received = 0
        self.put = 0
        self.handled = 0  # by this attempt: events, and answers given
        self.got = 0  # answers, of its history
        self.hold_events = True
        self.in_barrier = False
        self.urgent: deque[bytes] = deque()
        self.begun = self.acted = 0
        self.expected: dict[int, int] = {}
        self.unanswered = False

    # --- inputs ---

    def step(self, message: Any) -> list[v.Output]:
        out: list[v.Output] = []
        match message:
            case v.Started(input):
                self.input = input
                self.to_send, self.to_receive = [count * (input + 1) for count in self.of_input]
                self._start(out)
            case v.KillRequested():
                self.condemned = self.life not in (Life.GONE, Life.SUCCEEDED)
            case v.Died():
                self._end(Life.GONE, TaskOutcome.FAILED, out)
            case v.Killed():
                self._end(Life.GONE, TaskOutcome.KILLED, out)
            case v.Leave():
                self._end(Life.SUCCEEDED, TaskOutcome.SUCCESS, out)
            case v.CameDown(m.Registered() as registered):
                self._register(registered, out)
            case v.CameDown(m.AttemptEnded() | m.Refused()) if self.machine is None or not self.attached:
                self._end(Life.GONE, TaskOutcome.FAILED, out)
            case v.CameDown(m.Resumed() as resumed):
                self.attached = True
                self._handle(ConnectionAttached(resumed.received_seq), out)
            case v.CameDown(item, events_before):
                self._take(item, events_before, out)
            case v.LossNoticed():
                self._reconnect(out)
            case _:
                self._operate(message, out)
        return out

    def _operate(self, message: Any, out: list[v.Output]) -> None:
        match message:
            case v.Send():
                self._send(out)
            case v.Abandon():
                self._abandon(out)
            case v.AskPermit():
                self.awaits_permit = True
                self._handle(s.RequestSubmitted(v.PERMIT + self.to_ask, b"permit?", self.parts), out)
                self.to_ask -= 1
            case v.TakeRecord() | v.EndCall() | v.LeaveResult():
                self._fly(message, out)
            case v.MeetBarrier(declines, sends):
                self._meet_barrier(declines, sends, out)
            case v.EndUpload(checkpoint_id, stored):
                handle = self.uploads.pop(checkpoint_id)
                if stored and self.uploaded is not None:
                    handle = handle._replace(manifest=self._store(checkpoint_id, handle.size, out))
                ended = s.StateUploaded(checkpoint_id, handle) if stored else s.UploadFailed(checkpoint_id, "no space")
                self._handle(ended, out)
            case v.CameApart(checkpoint_id, item_before, events_before):
                self.expected.setdefault(checkpoint_id, events_before)
                self._handle(s.BarrierArrived(checkpoint_id, item_before), out)
            case v.BeginUrgent():
                self._begin_urgent(out)
            case v.EndUrgent():
                self.acted += 1
                self.received += 1
                self.handled += 1
                self.put += 1
                self._handle(s.UrgentHandled(), out)
            case v.Finish():
                self.life = Life.LEAVING
                files = self._handle_of("last")
                if files is not None and self.uploaded is not None:
                    files = files._replace(manifest=self._store(LAST_STATE - 1, files.size, out))
                self._handle(s.OperatorFinished("", self._state(), files), out)
            case v.OutOfTime():
                assert self.machine is not None
                deadline = self.machine.next_deadline()
                assert deadline is not None
                self._carry_out(self.machine.handle(TimePassed(), deadline), out)
            case _:
                raise AssertionError(f"no step of a task: {message}")

    def _start(self, out: list[v.Output]) -> None:
        self.life, self.to_ask = Life.WAITING, self.permits
        if not self.start_is_lost:
            out.append((v.To.BRIDGE, TaskStarted(self.task, self.run_id, 0, self.subtask, self.number)))
        register = m.Register(
            self.task, v.OPERATOR, self.subtask, self.run_id, self.number, self.mode, self.parallelism, "host", "3.11"
        )
        out.append((v.To.BRIDGE, RegistrationArrived(self.task, register)))

    def _end(self, life: Life, outcome: TaskOutcome, out: list[v.Output]) -> None:
        """End the task; only its end and the data that it wrote remain."""
        self.life = life
        self.attached = self.condemned = self.unanswered = self.started = False
        self.machine = None
        self.mailbox.clear()
        self.sent = self.received = self.put = self.to_greet = self.begun = self.acted = 0
        self.handled = self.got = self.to_ask = 0
        self.awaits_permit = False
        self.restored, self.begins_again = (), False
        self.stage, self.taken, self.left, self.known = None, 0, (), frozenset()
        self.open_calls.clear()
        self.uploads = {}
        self.uploaded = None
        self.urgent.clear()
        self.expected = {}
        out.append((v.To.BRIDGE, TaskEnded(self.task, self.run_id, 0, self.subtask, self.number, outcome)))

    def _register(self, message: m.Registered, out: list[v.Output]) -> None:
        """Take the answer to its registration: it restores, and opens immediately."""
        if self.limit:
            self.stage = InFlight(self.limit, ordered=self.ordered)
        for state in message.states:
            v.demand(state.subtask == self.subtask, "H52", f"task {self.task} restores the state of {state.subtask}")
            counts = state.state.split(b":")
            _, self.sent, self.received, self.got, input = map(int, counts[:5])
            self._restore_flights(*counts[5:])
            check_files(state, self.files)
            if self.uploaded is not None and state.files is not None:
                self.uploaded.restored([(self.sent, state.files.manifest)])
            self.restored = (*self.restored, input)
        self.begins_again = message.input_begins_again
        for place, event in enumerate(message.held):
            at = self.sent - len(message.held) + place
            v.demand(event.part == at % self.parts, "H150", f"task {self.task} restores {event} for another part")
            sent = event_up(self.subtask, at)
            v.demand(
                is_event_up(event.payload, sent), "H31", f"task {self.task} restores {event.payload!r}, not {sent!r}"
            )
        self.begun = self.acted = (self.received + 1) // 2 if self.has_urgent else 0
        limits = s.SubtaskLimits(message.window_events, message.window_bytes, message.reconnect_timeout_s)
        self.hold_events = message.hold_events
        self.machine = SubtaskMachine(
            self.task,
            self.subtask,
            limits,
            message.held,
            message.events_sent,
            hold_events=message.hold_events,
            table=PartTable(message.parts),
        )
        self.life, self.attached = Life.RUNNING, True
        self._handle(ConnectionAttached(0), out)
        self.to_greet = self.received + (self.greeted and self.received < self.to_receive)
        self._handle(s.OperatorOpened(awaits_start=True, handles_urgent=True), out)

    def _reconnect(self, out: list[v.Output]) -> None:
        assert self.machine is not None
        if self.attached:
            self._handle(ConnectionLost(), out)
        self.attached = False
        out.append((v.To.UP, v.CameUp(m.Resume(self.task, v.OPERATOR, self.machine.resume_seq))))

    def _take(self, message: Any, events_before: int, out: list[v.Output]) -> None:
        if events_before or hasattr(message, "events_before"):
            self.expected[message.checkpoint_id] = events_before
        self._handle(s.MessageReceived(message), out)

    # --- the operator ---

    def _restore_flights(self, state: bytes = b"0,,") -> None:
        taken, left, flights = state.decode().split(",")
        self.taken, self.left = int(taken), tuple(map(int, left.split(".") if left else ()))
        held = [RecordFlight(int(one.strip("*")), "*" in one) for one in flights.split(".") if one]
        self.known = frozenset([*self.left, *(one.record for one in held if one.landed)])
        if self.stage is not None:
            self.stage.restore(held)

    def _fly(self, message: Any, out: list[v.Output]) -> None:
        stage = self.stage
        assert stage is not None
        match message:
            case v.TakeRecord():
                flight = RecordFlight(self.taken)
                self.taken += 1
                if stage.take(flight):
                    self._called(flight)
            case v.EndCall(place):
                flight = self.open_calls.pop(place)
                self.known |= {flight.record}
                stage.land(flight)
            case v.LeaveResult():
                leaving = stage.leave()
                assert leaving is not None
                record, name = leaving.record, f"task {self.task}, record"
                expected = len(self.left) if self.ordered else record
                v.demand(record == expected, "H181", f"{name} {record} leaves after {self.left}")
                v.demand(record in self.known and record not in self.left, "H180", f"{name} {record} leaves twice")
                self.left = (*self.left, record)
                self._send(out)
        self._begin_calls()

    def _begin_calls(self) -> None:
        if self.stage is None:
            return
        for flight in self.stage.begin():
            self._called(flight)
        v.demand(len(self.open_calls) <= self.limit, "H181", f"task {self.task} has {len(self.open_calls)} calls open")
        self.stage.check_invariants()

    def _called(self, flight: RecordFlight) -> None:
        v.demand(flight.record not in self.known, "H180", f"task {self.task} calls for {flight.record} again")
        self.open_calls.append(flight)

    def _send(self, out: list[v.Output]) -> None:
        payload, part = event_up(self.subtask, self.sent), self.sent % self.parts
        self.sent += 1
        if self.asks and self.sent == self.to_send:
            self.unanswered = True
            self._handle(s.RequestSubmitted(self._request_id, REQUEST + payload, part), out)
        else:
            self._handle(s.EventSubmitted(payload, part=part), out)

    @property
    def _request_id(self) -> int:
        """One that is taken back is asked again, under another id."""
        return 2 * self.sent + self.abandoned

    def _abandon(self, out: list[v.Output]) -> None:
        """Wait no more. A request that was held has never been sent, and any other still gets its answer (H85)."""
        machine = self.machine
        assert machine is not None
        self._handle(s.RequestAbandoned(self._request_id), out)
        if self._request_id not in machine._outbound.open_requests():
            self.unanswered = False
            self.sent -= 1
        self.abandoned = True

    def _begin_urgent(self, out: list[v.Output]) -> None:
        payload = self.urgent.popleft()
        expected = event_down(self.task, 2 * self.begun)
        v.demand(payload == expected, "H91", f"task {self.task} begins {payload!r}, not {expected!r}")
        self.begun += 1
        self._handle(s.UrgentBegan(), out)

    def _meet_barrier(self, declines: bool, sends: bool, out: list[v.Output]) -> None:
        barrier = self.mailbox.popleft()
        assert isinstance(barrier, s.MailboxBarrier)
        assert self.machine is not None
        if self.machine.wants_snapshot(barrier.checkpoint_id):
            if not self.hold_events:
                cut = self.expected.pop(barrier.checkpoint_id, None)
                what = f"task {self.task} meets barrier {barrier.checkpoint_id} after {self.handled} events and answers"
                v.demand(self.handled == cut, "H23", f"{what}, not {cut}")
            self.in_barrier = True  # no mail is handled before the snapshot
            if declines:
                self._handle(s.SnapshotRefused(barrier.checkpoint_id, "not now"), out)
            else:
                if sends:
                    payload, part = event_up(self.subtask, self.sent), self.sent % self.parts
                    self.sent += 1
                    self._handle(s.EventSubmitted(payload, in_snapshot=True, part=part), out)
                self._check_snapshot()
                taken = s.SnapshotTaken(barrier.checkpoint_id, self._state(), state_follows=self.files)
                self._handle(taken, out)
            self.in_barrier = False
        self._handle_mail()

    def _check_snapshot(self) -> None:
        """What was handled must be the first events of the history, although urgent ones overtake."""
        if self.has_urgent:
            what = f"task {self.task} takes its snapshot after {self.acted} urgent events of {self.begun} begun"
            whole = self.acted == self.begun == (self.received + 1) // 2
            v.demand(whole, "H92", f"{what}, and {self.received} events in all")

    def _state(self) -> bytes:
        counts = b"%d:%d:%d:%d:%d" % (self.task, self.sent, self.received, self.got, self.input)
        if self.stage is None:
            return counts
        held = self.stage.held
        whole = sorted([*self.left, *(one.record for one in held)]) == list(range(self.taken))
        v.demand(
            whole, "H180", f"task {self.task} took {self.taken} records, has {list(held)} in flight, {self.left} left"
        )
        left, flights = map(str, self.left), [f"{one.record}{'*' * one.landed}" for one in held]
        return counts + f":{self.taken},{'.'.join(left)},{'.'.join(flights)}".encode()

    def _handle_of(self, name: str) -> StateHandle | None:
        """The handle of the files that the state has now. It says which task stored them, and at which cut."""
        return StateHandle(name, self.sent, b"", self.received, self.task) if self.files else None

    def _store(self, checkpoint_id: int, content: int, out: list[v.Output]) -> str:
        """Return the name of a file with this content, which may be stored already."""
        assert self.uploaded is not None
        name = self.uploaded.find(content)
        if name is None:
            name = file_name(FileOrigin(checkpoint_id + 1, 1), "a", self.subtask, self.task, "0", checkpoint_id)
            self.uploaded.stored(content, name, checkpoint_id)
            out.append((v.To.TRACKER, v.FileStored(name)))
        self.uploaded.manifest_stored(checkpoint_id, [name])
        return name

    def _handle_mail(self) -> None:
        """Handle everything before the next barrier."""
        while not self.in_barrier and self.mailbox and not isinstance(self.mailbox[0], s.MailboxBarrier):
            item = self.mailbox.popleft()
            if isinstance(item, s.MailboxEvent):
                place = 2 * (self.received - self.acted) + 1 if self.has_urgent else self.received
                expected = event_down(self.task, place)
                text = f"task {self.task} gets {item.payload!r}, not {expected!r}"
                v.demand(item.payload.startswith(b"%d|" % self.task), "H20", text)
                v.demand(item.payload == expected, "H22", text)
                v.demand(item.part == place % self.parts, "H150", f"{text}, for part {item.part}")
                if self.has_urgent:
                    text = f"task {self.task} handles {item.payload!r} when {self.begun} urgent events have begun"
                    v.demand(2 * self.begun > place, "H91", text)
                self.received += 1
                self.handled += 1
            elif isinstance(item, s.MailboxStart):
                v.demand(not self.started, "H66", f"task {self.task} begins twice")
                text = f"task {self.task} begins with its records after {self.received} events of {self.to_greet}"
                v.demand(self.received >= self.to_greet, "H66", text)
                text = (
                    f"task {self.task} has input {self.input}, uses positions of {self.restored}: {self.begins_again}"
                )
                v.demand(self.begins_again == (self.restored == (self.input,)), "H174", text)
                self.started = True
                self._begin_calls()
            elif isinstance(item, s.MailboxCompleted | s.MailboxAborted):
                stopped = item.checkpoint_id not in self.uploads
                v.demand(stopped, "H190", f"task {self.task} uploads for {item.checkpoint_id}, which is over")
                if self.uploaded is not None:
                    done = isinstance(item, s.MailboxCompleted)
                    (self.uploaded.completed if done else self.uploaded.aborted)(item.checkpoint_id)

    def _put(self, item: s.MailboxItem) -> None:
        if isinstance(item, s.MailboxEvent):
            self.put += 1
        elif isinstance(item, s.MailboxBarrier) and self.hold_events:
            cut = self.expected.pop(item.checkpoint_id, None)
            what = f"task {self.task} gets barrier {item.checkpoint_id} after {self.put} events"
            v.demand(self.put == cut, "H23", f"{what}, not {cut}")
        elif isinstance(item, s.MailboxCompleted | s.MailboxAborted):
            self.expected.pop(item.checkpoint_id, None)
        self.mailbox.append(item)

    # --- its machine ---

    def _handle(self, message: Any, out: list[v.Output]) -> None:
        assert self.machine is not None
        self._carry_out(self.machine.handle(message, 0.0), out, comes=isinstance(message, s.MessageReceived))
        if self.machine is not None:
            self.machine.check_invariants()
            self._handle_mail()

    def _carry_out(self, effects: Sequence[s.SubtaskEffect], out: list[v.Output], *, comes: bool = False) -> None:
        """Do what the machine says. ``comes``: these are the effects of an item that comes now.

        Such an item must be in its place before its confirmation leaves. One that came before and has waited in the
        machine for a barrier was there, and may have been confirmed (H23, H79).
        """
        confirmed = False
        for effect in effects:
            match effect:
                case s.SendToCoordinator(message):
                    confirmed = confirmed or (comes and m.confirmed_by(message) > 0)
                    out.append((v.To.UP, v.CameUp(message)))
                case s.PutInMailbox(item):
                    v.demand(not confirmed, "H23", f"task {self.task} confirms ahead of its mailbox")
                    self._put(item)
                case s.HandleUrgent(payload):
                    v.demand(not confirmed, "H23", f"task {self.task} confirms ahead of its urgent events")
                    self.urgent.append(payload)
                case s.StartUpload(checkpoint_id, target):
                    handle = self._handle_of(f"{target}at {checkpoint_id}")
                    v.demand(handle is not None, "H190", f"task {self.task} uploads what it has not")
                    self.uploads[checkpoint_id] = cast(StateHandle, handle)
                case s.StopUpload(checkpoint_id):
                    v.demand(
                        self.uploads.pop(checkpoint_id, None) is not None,
                        "H190",
                        f"task {self.task} stops an upload for {checkpoint_id} that it has not begun",
                    )
                    assert self.machine is not None
                    late = s.StateUploaded(checkpoint_id, StateHandle("late", 0, b"", 0, 0))
                    if self.machine.state is not SubtaskStatus.OVER:
                        v.demand(
                            not self.machine.handle(late, 0.0), "H44", f"{late} counts, and its checkpoint is over"
                        )
                case s.EndAttempt():
                    self._end(Life.GONE, TaskOutcome.FAILED, out)
                    return
                case s.ResolveRequest(request_id) if request_id >= v.PERMIT:
                    v.demand(self.awaits_permit, "H33", f"task {self.task} gets a permit twice, or unasked")
                    self.awaits_permit = False
                case s.ResolveRequest():
                    v.demand(self.unanswered, "H33", f"task {self.task} is answered twice, or unasked")
                    self.unanswered = False
                    self.got += 1
                    self.handled += 1
                    self.put += 1  # it has its place towards the barriers too
                case DropConnection(why):
                    v.demand(False, "H22", f"task {self.task} drops its connection: {why}")
                case _:
                    pass

    # --- view for the world ---

    def facts(self) -> SubtaskFacts:
        machine = self.machine
        if machine is None:
            return SubtaskFacts(
                self.life, False, self.condemned, False, False, False, False, False, False, False, False, True, 0
            )
        running = self.life is Life.RUNNING
        all_sent = self.sent == self.to_send
        done = (
            self.started and all_sent and self.received == self.to_receive and not self.mailbox and not self.unanswered
        ) and not (self.to_ask or self.awaits_permit)
        stage, calls = self.stage, running and self.started and self.stage is not None
        may_send = running and self.started and not all_sent and has_capacity(machine, self.sent % self.parts)
        return SubtaskFacts(
            self.life,
            self.attached,
            self.condemned,
            may_send and stage is None,
            running and self.abandons and self.unanswered and not self.abandoned,
            running and bool(self.mailbox) and not self.awaits_permit,
            running and bool(self.urgent) and self.begun == self.acted,
            running and self.begun > self.acted,
            running and self.finishes and done and machine.may_finish,
            self.life is Life.LEAVING and machine.all_confirmed,
            machine.next_deadline() is not None,
            done and not machine.statistics().closed_for and only_reports_unconfirmed(machine),
            machine._outbound.stream.last_seq,
            running
            and self.started
            and self.to_ask > 0
            and not self.awaits_permit
            and has_capacity(machine, self.parts),
            calls and self.taken < self.to_send and self._may_take(),
            len(self.open_calls) if calls else 0,
            may_send and stage is not None and self._may_leave(stage),
            tuple(self.uploads),
        )

    def _may_leave(self, stage: InFlight[RecordFlight]) -> bool:
        landed = [one.landed for one in stage.held]
        return landed[:1] == [True] if self.ordered else any(landed)

    def _may_take(self) -> bool:
        """Whether the stage takes another record: also one beyond the limit, if a barrier can only be met upstream."""
        assert self.stage is not None
        return self.stage.has_capacity or (bool(self.mailbox) and len(self.stage) == self.limit)


def check_files(state: m.SubtaskState, has_files: bool) -> None:
    """The files of a state are those that its task had at the same cut as its bytes (H190)."""
    task, sent, received = map(int, state.state.split(b":")[:3])
    of_cut = None if state.files is None else (state.files.files, state.files.size, state.files.total_bytes)
    expected = (task, sent, received) if has_files else None
    v.demand(of_cut == expected, "H190", f"{state} has files of {of_cut}, not of {expected}")


def has_capacity(machine: SubtaskMachine, part: int) -> bool:
    """Whether the operator would not have to wait for capacity to send."""
    outbound = machine._outbound
    return outbound._has_capacity(s.EventSubmitted(b"1>1", part=part), outbound._windows[part])


def only_reports_unconfirmed(machine: SubtaskMachine) -> bool:
    """Whether only checkpoint messages are unconfirmed: the coordinator's next message, if any, confirms them."""
    return all(type(item) in OF_CHECKPOINT for item in machine._outbound.stream.unconfirmed())


def event_up(subtask: int, place: int) -> bytes:
    """Return the event at ``place`` among those that a subtask sends in its history."""
    return b"%d>%d" % (subtask, place)


REQUEST = b"?"
"""Prefixes requests."""


def is_event_up(payload: bytes, event: bytes) -> bool:
    """Whether ``payload`` is this event, either as an event or as a request."""
    return payload.removeprefix(REQUEST) == event


def event_down(task: int, place: int) -> bytes:
    """Return the event at ``place`` among those that a subtask receives in its history, sent to this task."""
    return b"%d|%d" % (task, place)
