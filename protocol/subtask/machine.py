# SPDX-License-Identifier: Apache-2.0

"""The executor's end of one execution attempt: what the operator sends, and what goes into its mailbox.

Theory of operation
-------------------
There are two life cycles. The operator restores (``OPENING``), is ``OPEN``, and has ``FINISHED``, or the attempt is
``OVER`` before that. The connection is up or down, which only means waiting (H24). The table below is about the first.

*Down* (``protocol.subtask.inbound``). A new item goes into the operator's mailbox, and then the confirmation leaves,
one for all items of one read (H23). The mailbox is one queue, so no barrier overtakes an event there. Checkpoint items
are confirmed in the acknowledgement, the next item of a checkpoint, or with any other confirmation; nothing waits for
that. A barrier that comes apart from the items waits until those before it have come. After the operator has finished,
events still arrive but are never confirmed: the coordinator's side fails them when it learns of the end, instead of
treating them as handled.

*The first record.* An operator that waits for it gets ``StartProcessing``, which goes into the mailbox like an event,
after everything that the coordinator sent inside ``subtask_ready``. So the operator has handled all of that before it
sees a record (H66).

*Urgent events* (``protocol.subtask.urgent``). The shell handles them on a separate thread while the operator is busy
with anything else (H90). They are items like the others, so their order, their confirmation and the valve are the same.
A barrier that came after one goes into the mailbox when the handler has returned, and an event when it has begun.

*Up* (``protocol.subtask.outbound``). An event waits in one queue until it may leave: the valve is closed for no
checkpoint (H43: for *none* upward, because an event that left early would be in neither snapshot), and the peer's
window has capacity. ``CloseForCheckpoint(n)`` closes the valve immediately; what was sent before precedes
``ClosedForCheckpoint(n)`` in the stream. The valve reopens for n when the operator has taken its snapshot, which
carries all that still waits, in order (H31), or when n is over: complete, aborted, or a savepoint, of which the
operator is not told (H49). Restored events are the first in the queue, and keep the name of the subtask that first sent
them (H52). Restored events that exceed the window wait, and are in the next snapshot if it comes first. Every event has
a position, counted for each part over the whole restored history (H150). A snapshot says how many have left, and the
coordinator's part of the checkpoint must cover exactly these (H32). A snapshot that does not fit into a message is
declined.

*Checkpoints that hold nothing back* (H79). Without ``hold_events``, a checkpoint begins here with its barrier, which is
an item like the others, and the valve never closes. An answer does not go through the mailbox, so its place among the
barriers is kept here: one that comes after a barrier is given to its asker when that barrier is met, declined or over.
If barriers come apart, the checkpoint begins with ``CloseForCheckpoint`` as otherwise, and only closes nothing.

*Files* (H190 to H193). A part of the snapshot's state may be in files that the shell uploads. The snapshot leaves at
the cut and opens the valve, as any other. ``StartUpload`` asks for the upload, and its outcome leaves as
``StateStored`` or ``StateFailed``. If the checkpoint is over before, ``StopUpload`` says so, and what the upload
reports later has no effect. The files of a savepoint belong into a folder that ``SavepointTarget`` names before the
barrier.

*Requests* are treated the same (H33). A held request is in the snapshot as a request. After a restore it arrives as
one, and gets no answer, because the caller that waited for it died with the attempt (H73). An operator that waits for
an answer must keep handling its mailbox; otherwise a closed valve would wait for the barrier, and the barrier for the
answer.

*Requests that nobody waits for any more* (H85). A held one is taken back: it never left, and is in no later snapshot.
One that has left is part of the history of both ends, and stays there. ``RequestCancelled`` follows it, past the valve,
because it changes no state. The coordinator then answers the request immediately, unless it has. So each request that
leaves has exactly one answer, and gives its place back when that comes. Neither end needs to remember whether a
cancellation and an answer have crossed.

*Heartbeats.* If the coordinator wants signs of life, the machine sends a ``Heartbeat`` whenever it has sent nothing
else for one interval (H94). The shell's I/O thread keeps this clock, so a busy operator gives them too. They need no
question: a task that has stopped reading, because its mailbox is full, would not see one.

*The end.* ``OperatorFinished`` leaves last, so it needs an empty queue, and the end of every upload: check
``may_finish``. When the coordinator ends
the attempt, or the reconnect time is over, open requests fail and ``EndAttempt`` reports it, once.

Effects must be carried out in order. One call returns at most one ``Confirm``, after everything else that is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, cast

from protocol.describing import type_name
from protocol.errors import AttemptOver, LocalProtocolError, RemoteProtocolError
from protocol.machine import Reaction, TimePassed
from protocol.parts import ONE_PART, PartTable
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection, IncomingStream, RefuseMessage
from protocol.subtask.inbound import PAYLOAD, SubtaskInbound
from protocol.subtask.outbound import Effects, SubtaskOutbound, SubtaskPhase
from protocol.subtask.types import (
    BarrierArrived,
    EndAttempt,
    EventSubmitted,
    MessageReceived,
    OperatorFinished,
    OperatorOpened,
    RequestAbandoned,
    RequestSubmitted,
    ResolveRequest,
    SendToCoordinator,
    SnapshotRefused,
    SnapshotTaken,
    StateUploaded,
    StopUpload,
    SubtaskEffect,
    SubtaskInput,
    SubtaskLimits,
    SubtaskStatistics,
    UploadFailed,
    UrgentBegan,
    UrgentHandled,
)
from protocol.wire.messages import (
    OF_CHECKPOINT,
    AttemptEnded,
    Confirm,
    DownItem,
    DownMessage,
    EventMessage,
    Finished,
    Heartbeat,
    HeldEvent,
    OfCheckpoint,
    Opened,
    Positions,
    Refused,
    Registered,
    Resumed,
)


class SubtaskStatus(Enum):
    OPENING = "opening"  # registered; the operator restores its state
    OPEN = "open"
    FINISHED = "finished"  # the operator has ended; its ``Finished`` may still be on the way
    OVER = "over"  # the coordinator has ended the attempt, or cannot be reached


_FINISHED = SubtaskStatus.FINISHED  # in Python 3.11, to look up an attribute of an Enum class takes ten times as long
_A, _I, _X, _E = Reaction.ACT, Reaction.IGNORE, Reaction.ILLEGAL, Reaction.ENDED

LEGAL: dict[type, tuple[Reaction, Reaction, Reaction, Reaction]] = {
    #                   OPENING OPEN FINISHED OVER
    ConnectionAttached: (_A, _A, _A, _I),
    ConnectionLost: (_A, _A, _A, _I),
    MessageReceived: (_A, _A, _A, Reaction.REFUSE),
    OperatorOpened: (_A, _X, _X, _I),
    EventSubmitted: (_A, _A, _X, _E),
    RequestSubmitted: (_A, _A, _X, _E),
    RequestAbandoned: (_A, _A, _I, _I),
    UrgentBegan: (_X, _A, _I, _I),
    UrgentHandled: (_X, _A, _I, _I),
    BarrierArrived: (_A, _A, _I, _I),
    SnapshotTaken: (_A, _A, _I, _I),
    StateUploaded: (_A, _A, _I, _I),
    UploadFailed: (_A, _A, _I, _I),
    SnapshotRefused: (_A, _A, _I, _I),
    OperatorFinished: (_A, _A, _X, _I),
    TimePassed: (_A, _A, _A, _I),
}


_SEND_EARLIER = ": send from open() on, and before close(), for example in process() or final_state()"
_SENT_OUTSIDE: dict[type, tuple[str, str]] = {
    EventSubmitted: ("an event was sent", _SEND_EARLIER),
    RequestSubmitted: ("a request was sent", _SEND_EARLIER),
}
"""What a user's code does too early or too late, and when it can."""


class SubtaskMachine:
    """One attempt, seen from its task; see the module's text.

    ``task_attempt_id``: Spark's task id. ``subtask``: its index, which identifies the sender of held events.
    ``held``: the events that the restored snapshot held, in order; they leave first (H31). ``events_sent``: where the
    counts of sent events continue (H32). ``hold_events``: whether checkpoints hold events back (H79). ``table``: the
    operator's parts. Not thread-safe: the shell locks it. Raises ``RemoteProtocolError`` if what is restored is not of
    these parts.
    """

    __slots__ = (
        "_beat_at",
        "_detached_at",
        "_dispatch",
        "_id",
        "_inbound",
        "_limits",
        "_outbound",
        "_sent_at_beat",
        "_state",
    )

    def __init__(
        self,
        task_attempt_id: int,
        subtask: int,
        limits: SubtaskLimits,
        held: tuple[HeldEvent, ...] = (),
        events_sent: Positions = (),
        *,
        hold_events: bool = True,
        table: PartTable = ONE_PART,
    ) -> None:
        self._id = task_attempt_id
        self._limits = limits
        self._enter(SubtaskStatus.OPENING)
        self._detached_at: float | None = None
        self._beat_at: float | None = None  # while a connection is up: when to look whether a heartbeat is due
        self._sent_at_beat = (0, 0)  # what had been sent at the previous look
        incoming = IncomingStream()
        self._outbound = SubtaskOutbound(
            task_attempt_id, subtask, limits, incoming, held, events_sent, hold_events=hold_events, table=table
        )
        self._inbound = SubtaskInbound(task_attempt_id, incoming, self._outbound, table)

    # --- the shape of every machine -----------------------------------------------------------------------

    def handle(self, input: SubtaskInput, now: float) -> list[SubtaskEffect]:
        """Take one input; return what to do, in order. ``now``: a reading of any monotonic clock, in seconds.

        Raises ``GatewayFull`` (H27; it changes nothing, except that ``CapacityAvailable`` comes later), ``AttemptOver``
        if the operator sends when the attempt is over, ``LocalProtocolError`` for an input that the table or earlier
        inputs forbid, and ``RemoteProtocolError`` if the peer broke the protocol (the shell then drops the connection
        and reports ``ConnectionLost``). In each case nothing was changed.
        """
        act = self._dispatch.get(type(input))
        if act is None:
            raise LocalProtocolError(f"not an input of a subtask: {input!r}")
        effects: Effects = []
        act(self, input, now, effects)
        if self._detached_at is None and not self._outbound.attached and self._state is not SubtaskStatus.OVER:
            self._detached_at = now
        return effects

    def handle_batch(self, messages: Iterable[DownMessage], now: float) -> list[SubtaskEffect]:
        """Take all messages of one read, with one ``Confirm`` at the end.

        It does not raise for the peer's mistakes: it stops at a message that breaks the protocol, and the last effect
        is ``DropConnection``. The messages before it count.
        """
        effects: Effects = []
        confirm = False
        try:
            for message in messages:
                confirm |= self._receive(message, effects)
        except RemoteProtocolError as error:
            self._send_confirm(effects, immediately=confirm)
            effects.append(DropConnection(str(error)))
        else:
            self._send_confirm(effects, immediately=confirm)
        return effects

    def next_deadline(self) -> float | None:
        """When ``TimePassed`` is due, on the clock of ``now``. None at the end, and while a connection is up that needs
        no heartbeats."""
        return self._beat_at if self._detached_at is None else self._detached_at + self._limits.reconnect_timeout_s

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state is impossible."""
        self._outbound.check_invariants()
        self._inbound.check_invariants()
        assert self._detached_at is None or not self._outbound.attached
        if self._state in (SubtaskStatus.FINISHED, SubtaskStatus.OVER):
            figures = self._outbound.statistics()
            assert (figures.held_events, figures.open_requests, figures.closed_for) == (0, 0, ())
            assert not self._outbound.uploading()
        if self._state is SubtaskStatus.OVER:
            assert self.all_confirmed
            assert self.next_deadline() is None

    # --- what the shell may look at -----------------------------------------------------------------------

    @property
    def state(self) -> SubtaskStatus:
        """How far the operator has come."""
        return self._state

    @property
    def resume_seq(self) -> int:
        """What to tell the peer on a new connection (``Resume.received_seq``), as in a ``Confirm``."""
        return self._inbound.stream.confirmable_seq

    @property
    def may_finish(self) -> bool:
        """Whether the operator may succeed now: nothing that it sent waits for the valve or the window, no urgent
        event waits for its handler, and no upload is going on."""
        return self._inbound.urgent.idle and not self._outbound.holds() and not self._outbound.uploading()

    @property
    def urgent_idle(self) -> bool:
        """Whether each urgent event that has come was handled."""
        return self._inbound.urgent.idle

    @property
    def urgent_came(self) -> int:
        """How many urgent events have come."""
        return self._inbound.urgent.came

    @property
    def waiting(self) -> tuple[int, int]:
        """How many received items wait for urgent events before them, and the bytes of the events among these."""
        return self._inbound.urgent.waiting

    @property
    def all_confirmed(self) -> bool:
        """Whether the coordinator has taken everything that was sent, ``Finished`` included: the task may end."""
        return not len(self._outbound.stream)

    def wants_snapshot(self, checkpoint_id: int) -> bool:
        """Whether a barrier in the mailbox still counts. False after its checkpoint is over (H44, H49)."""
        return self._outbound.phase(checkpoint_id) is SubtaskPhase.BARRIER

    def statistics(self) -> SubtaskStatistics:
        """The current figures."""
        return self._outbound.statistics()

    # --- connections and time -----------------------------------------------------------------------------

    def _attach(self, input: ConnectionAttached, now: float, effects: Effects) -> None:
        self._outbound.attach(input.received_seq, effects)
        self._detached_at = None
        self._schedule_beat(now)
        self._send_confirm(effects, immediately=True)

    def _detach(self, input: ConnectionLost, now: float, effects: Effects) -> None:
        if self._outbound.attached:
            self._outbound.attached = False
            self._detached_at = now
            self._beat_at = None

    def _pass_time(self, input: TimePassed, now: float, effects: Effects) -> None:
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return
        if self._detached_at is None:
            self._beat(now, effects)
        else:
            timeout_s = self._limits.reconnect_timeout_s
            self._end(f"the coordinator could not be reached for {timeout_s:g} s", effects)

    def _schedule_beat(self, now: float) -> None:
        interval_s = self._limits.heartbeat_interval_s
        self._beat_at = now + interval_s if interval_s else None
        self._sent_at_beat = self._outbound.stream.last_seq, self._inbound.stream.told_seq

    def _beat(self, now: float, effects: Effects) -> None:
        """Send a heartbeat, unless anything else was sent since the previous look (H94).

        After a late look, what was sent may be long ago.
        """
        beat_at, interval_s = self._beat_at, self._limits.heartbeat_interval_s
        assert beat_at is not None
        assert interval_s is not None
        late = now - beat_at >= interval_s
        if late or self._sent_at_beat == (self._outbound.stream.last_seq, self._inbound.stream.told_seq):
            effects.append(SendToCoordinator(Heartbeat(self._id)))
        self._schedule_beat(now)

    def _end(self, reason: str, effects: Effects) -> None:
        for request_id in self._outbound.open_requests():
            effects.append(ResolveRequest(request_id, f"the attempt is over: {reason}", b""))
        self._stop_uploads(effects)
        effects.append(EndAttempt(reason))
        self._outbound.end()
        self._inbound.stream.clear()
        self._inbound.forget()
        self._detached_at = None
        self._beat_at = None
        self._enter(SubtaskStatus.OVER)

    def _ignore(self, input: SubtaskInput, now: float, effects: Effects) -> None:
        pass

    def _raise_illegal(self, input: SubtaskInput, now: float, effects: Effects) -> None:
        what, hint = _SENT_OUTSIDE.get(type(input), (type_name(input), ""))
        raise LocalProtocolError(f"{what} when the operator is {self._state.value}{hint}")

    def _raise_over(self, input: SubtaskInput, now: float, effects: Effects) -> None:
        raise AttemptOver(f"the attempt of task {self._id} is over")

    def _refuse(self, input: MessageReceived, now: float, effects: Effects) -> None:
        self._receive(input.message, effects)  # no connection is up any more

    # --- the operator -------------------------------------------------------------------------------------

    def _open(self, input: OperatorOpened, now: float, effects: Effects) -> None:
        self._enter(SubtaskStatus.OPEN)
        self._inbound.handles_urgent = input.handles_urgent
        self._inbound.parts_without_urgent = input.parts_without_urgent
        self._outbound.send_item(Opened(self._id, self._outbound.next_seq, input.awaits_start), effects)

    def _submit(self, input: EventSubmitted | RequestSubmitted, now: float, effects: Effects) -> None:
        self._outbound.submit(input, effects)

    def _abandon(self, input: RequestAbandoned, now: float, effects: Effects) -> None:
        self._outbound.abandon(input.request_id, effects)

    def _begin_urgent(self, input: UrgentBegan, now: float, effects: Effects) -> None:
        self._inbound.urgent.begin(effects)

    def _end_urgent(self, input: UrgentHandled, now: float, effects: Effects) -> None:
        self._inbound.urgent.end(effects)

    def _finish(self, input: OperatorFinished, now: float, effects: Effects) -> None:
        if not input.failure:
            if self._state is SubtaskStatus.OPENING:
                raise LocalProtocolError("the operator ended successfully without being opened")
            if self._outbound.holds():
                raise LocalProtocolError(f"{self._outbound.holds()} events have not left: handle the mailbox first")
            if not self._inbound.urgent.idle:
                raise LocalProtocolError("some urgent events have arrived and are not handled yet")
            if uploading := self._outbound.uploading():
                raise LocalProtocolError(f"the files of checkpoint {uploading[0]} are being uploaded: wait for the end")
            self._outbound.check_final_state(input.state)
        self._stop_uploads(effects)
        self._outbound.forget()
        self._inbound.forget()
        self._enter(SubtaskStatus.FINISHED)
        finished = Finished(
            self._id, self._outbound.next_seq, input.failure, input.state, self._outbound.events_sent, input.files
        )
        self._outbound.send_item(finished, effects)

    def _stop_uploads(self, effects: Effects) -> None:
        effects.extend(map(StopUpload, self._outbound.uploading()))

    def _acknowledge(self, input: SnapshotTaken, now: float, effects: Effects) -> None:
        if self._is_at_barrier(input.checkpoint_id):
            self._outbound.acknowledge(input.checkpoint_id, input.state, effects, state_follows=input.state_follows)
            self._inbound.barrier_met(input.checkpoint_id, effects)
            self._send_confirm(effects, immediately=False)

    def _end_upload(self, input: StateUploaded | UploadFailed, now: float, effects: Effects) -> None:
        phase = self._outbound.phase(input.checkpoint_id)
        if phase is None:
            return  # it is over, and ``StopUpload`` has said so
        if phase is not SubtaskPhase.UPLOADING:
            raise LocalProtocolError(f"the end of an upload for checkpoint {input.checkpoint_id}, at {phase.value}")
        if isinstance(input, StateUploaded):
            self._outbound.state_stored(input.checkpoint_id, input.handle, effects)
        else:
            self._outbound.state_failed(input.checkpoint_id, input.reason, effects)
        self._send_confirm(effects, immediately=False)

    def _decline(self, input: SnapshotRefused, now: float, effects: Effects) -> None:
        if self._is_at_barrier(input.checkpoint_id):
            self._outbound.decline(input.checkpoint_id, input.reason, effects)
            self._inbound.barrier_met(input.checkpoint_id, effects)
            self._send_confirm(effects, immediately=False)

    def _is_at_barrier(self, checkpoint_id: int) -> bool:
        """Whether a snapshot is due. False for a checkpoint that is over or unknown, which has no effect (H44)."""
        phase = self._outbound.phase(checkpoint_id)
        if phase is None:
            return False
        if phase is not SubtaskPhase.BARRIER:
            raise LocalProtocolError(f"a snapshot for checkpoint {checkpoint_id}, which is at {phase.value}")
        if self._inbound.urgent.holds_barrier(checkpoint_id):
            raise LocalProtocolError(
                f"a snapshot for checkpoint {checkpoint_id}, before the urgent events that precede it were handled"
            )
        return True

    # --- down ---------------------------------------------------------------------------------------------

    def _take_message(self, input: MessageReceived, now: float, effects: Effects) -> None:
        self._send_confirm(effects, immediately=self._receive(input.message, effects))

    def _receive(self, message: DownMessage, effects: Effects) -> bool:
        """Take one message. True if it is an item to be confirmed now, perhaps again."""
        if message.task_attempt_id != self._id or not self._outbound.attached:
            whose = f"{type_name(message)} for task {message.task_attempt_id}"
            where = "connected" if self._outbound.attached else "not connected"
            effects.append(RefuseMessage(f"{whose}, when task {self._id} is {self._state.value} and {where}"))
            return False
        if isinstance(message, EventMessage) and self._state is not _FINISHED:  # as most messages
            if self._inbound.stream.is_new(message.seq):
                self._inbound.take(message, effects)
            return True
        if isinstance(message, Confirm):
            self._outbound.confirm(message.seq, effects)
            return False
        if type(message) in OF_CHECKPOINT:
            return self._receive_report(cast(OfCheckpoint, message), effects)
        if isinstance(message, ENDS):
            self._end(message.reason if isinstance(message, AttemptEnded) else message.message, effects)
            return False
        if isinstance(message, PLAIN):
            raise RemoteProtocolError(f"unexpected {type_name(message)} on an established connection")
        if self._inbound.stream.is_new(message.seq):
            self._take_item(message, effects)
            return isinstance(message, PAYLOAD)
        return True

    def _receive_report(self, report: OfCheckpoint, effects: Effects) -> bool:
        """Take an item of a checkpoint, then what it confirms. True if it was a duplicate."""
        confirmed = report.confirmed
        if confirmed > self._outbound.stream.last_seq:
            raise RemoteProtocolError(f"{type_name(report)} confirms item {confirmed}, which was never sent")
        is_new = self._inbound.stream.is_new(report.seq)
        if is_new:
            self._take_item(cast(DownItem, report), effects)
        if confirmed:
            self._outbound.confirm(confirmed, effects)
        return not is_new

    def _take_item(self, item: DownItem, effects: Effects) -> None:
        if self._state is _FINISHED:
            self._inbound.take_after_finish(item, effects)
        else:
            self._inbound.take(item, effects)

    def _take_barrier_apart(self, input: BarrierArrived, now: float, effects: Effects) -> None:
        self._inbound.take_barrier_apart(input, effects)

    def _send_confirm(self, effects: Effects, *, immediately: bool) -> None:
        """Confirm what has come. If that is not urgent, only together with something else, and only if it is new."""
        if not (immediately or effects) or not self._outbound.attached:
            return
        incoming = self._inbound.stream
        seq = incoming.confirmable_seq
        if not immediately and (
            seq == incoming.told_seq or not any(isinstance(effect, SendToCoordinator) for effect in effects)
        ):
            return
        if seq:
            incoming.told_seq = seq
            effects.append(SendToCoordinator(Confirm(self._id, seq)))

    def _enter(self, state: SubtaskStatus) -> None:
        self._state = state
        self._dispatch = _DISPATCH[state]


ENDS = (AttemptEnded, Refused)
PLAIN = (Registered, Resumed)

_Handler = Callable[[SubtaskMachine, Any, float, Effects], None]

_ACTS: dict[type, _Handler] = {
    ConnectionAttached: SubtaskMachine._attach,
    ConnectionLost: SubtaskMachine._detach,
    MessageReceived: SubtaskMachine._take_message,
    OperatorOpened: SubtaskMachine._open,
    EventSubmitted: SubtaskMachine._submit,
    RequestSubmitted: SubtaskMachine._submit,
    RequestAbandoned: SubtaskMachine._abandon,
    UrgentBegan: SubtaskMachine._begin_urgent,
    UrgentHandled: SubtaskMachine._end_urgent,
    BarrierArrived: SubtaskMachine._take_barrier_apart,
    SnapshotTaken: SubtaskMachine._acknowledge,
    StateUploaded: SubtaskMachine._end_upload,
    UploadFailed: SubtaskMachine._end_upload,
    SnapshotRefused: SubtaskMachine._decline,
    OperatorFinished: SubtaskMachine._finish,
    TimePassed: SubtaskMachine._pass_time,
}
_OTHERS: dict[Reaction, _Handler] = {
    Reaction.IGNORE: SubtaskMachine._ignore,
    Reaction.REFUSE: SubtaskMachine._refuse,
    Reaction.ILLEGAL: SubtaskMachine._raise_illegal,
    Reaction.ENDED: SubtaskMachine._raise_over,
}
_DISPATCH: dict[SubtaskStatus, dict[type, _Handler]] = {
    state: {kind: _ACTS[kind] if row[place] is Reaction.ACT else _OTHERS[row[place]] for kind, row in LEGAL.items()}
    for place, state in enumerate(SubtaskStatus)
}
