"""The executor's end of one execution attempt: the operator's mailbox in one direction, its valve in the
other.

Theory of operation
-------------------
Two lives run side by side. The operator's: it restores
(``OPENING``), is ``OPEN``, has ``FINISHED``; or the attempt is ``OVER`` before that. And the connection's,
up or down, which is only a matter of waiting (H24): the table below is about the first.

*Down.* An item that comes for the first time goes into the operator's mailbox, and the confirmation leaves
behind it, one for all that one read has brought (H23). The mailbox is one queue, so no barrier overtakes an
event there. Once the operator has finished, events still arrive but are never confirmed: the coordinator's
side fails them when it learns of the end, rather than believing them handled.

*Up: the valve.* An event waits in one queue until it may leave: no checkpoint is closed here (H43: upward,
*none*, for an event that left early would be in neither snapshot), and the peer's window has room.
``CloseForCheckpoint(n)`` closes at once; what was sent before lies in front of ``ClosedForCheckpoint(n)`` in
the stream. The valve reopens for n when the operator has taken its snapshot, which carries all that still
waits, in order (H31), or when n is over. Restored events are the first in the queue, before anything new.
Usually the coordinator bounds what it gets with ``window_events``; restored ones that do not fit simply
wait, and are in the next snapshot if it comes first.

*Requests* take the same way (H33). One that is held is in the snapshot as the event that it carries: after a
restore it arrives as an event, because the one who waited for the answer died with the attempt. An operator
that waits for an answer must go on serving its mailbox, or a closed valve would wait for the barrier and the
barrier for the answer.

*The end.* ``OperatorFinished`` leaves last, so it needs an empty queue: ask ``may_finish``. When the
coordinator ends the attempt, or the reconnect time is over, open requests fail and ``EndAttempt`` says it,
once.

The order of effects is the order in which they must be carried out. At most one ``Confirm`` comes out of one
call, last of all that is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from protocol.errors import AttemptOver, GatewayFull, LocalProtocolError, RemoteProtocolError
from protocol.machine import TimePassed
from protocol.messages import (
    AnswerMessage,
    AttemptEnded,
    BarrierMessage,
    CheckpointAborted,
    CheckpointAcknowledged,
    CheckpointCompleted,
    CheckpointDeclined,
    ClosedForCheckpoint,
    CloseForCheckpoint,
    Confirm,
    DownItem,
    DownMessage,
    EventMessage,
    Finished,
    Opened,
    Refused,
    RequestMessage,
    UpItem,
)
from protocol.streams import (
    ConnectionAttached,
    ConnectionLost,
    DropConnection,
    IncomingStream,
    OutgoingStream,
    RefuseMessage,
    RoomAvailable,
)
from protocol.subtask_types import (
    EndAttempt,
    EventSubmitted,
    MailboxAborted,
    MailboxBarrier,
    MailboxCompleted,
    MailboxEvent,
    MessageReceived,
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
    SubtaskStatistics,
)


class SubtaskState(Enum):
    OPENING = "opening"  # registered; the operator restores its state
    OPEN = "open"
    FINISHED = "finished"  # the operator has ended, its goodbye may still be on the way
    OVER = "over"  # the coordinator has ended the attempt, or is out of reach


class Verdict(Enum):
    """What becomes of an input in a state."""

    ACT = "act"
    IGNORE = "ignore"
    ILLEGAL = "illegal"  # ``LocalProtocolError``
    ENDED = "ended"  # ``AttemptOver``: this is how the operator learns of it


_A, _I, _X, _E = Verdict.ACT, Verdict.IGNORE, Verdict.ILLEGAL, Verdict.ENDED

LEGAL: dict[type, tuple[Verdict, Verdict, Verdict, Verdict]] = {
    #                   OPENING OPEN FINISHED OVER
    ConnectionAttached: (_A, _A, _A, _I),
    ConnectionLost: (_A, _A, _A, _I),
    MessageReceived: (_A, _A, _A, _A),  # over: refused
    OperatorOpened: (_A, _X, _X, _I),
    EventSubmitted: (_A, _A, _X, _E),
    RequestSubmitted: (_A, _A, _X, _E),
    SnapshotTaken: (_A, _A, _I, _I),
    SnapshotRefused: (_A, _A, _I, _I),
    OperatorFinished: (_A, _A, _X, _I),
    TimePassed: (_A, _A, _A, _I),
}


class _Phase(Enum):
    """How far one checkpoint has come here. The valve is closed for it until SNAPSHOT."""

    CLOSED = 0
    BARRIER = 1
    DECLINED = 2
    SNAPSHOT = 3


_Submitted = EventSubmitted | RequestSubmitted
_Effects = list[SubtaskEffect]


class SubtaskMachine:
    """One attempt, seen from its task; see the module's text.

    ``task_attempt_id``: Spark's task id. ``limits``: as ``Registered`` tells them. ``held``: the upward
    events of the restored snapshot, in order; they leave first (H31). Not thread-safe: the shell locks it.
    """

    __slots__ = (
        "_attached",
        "_checkpoints",
        "_closed",
        "_detached_at",
        "_dispatch",
        "_held",
        "_held_bytes",
        "_id",
        "_in",
        "_latest",
        "_limits",
        "_open_requests",
        "_out",
        "_refused",
        "_state",
    )

    def __init__(self, task_attempt_id: int, limits: SubtaskLimits, held: tuple[bytes, ...] = ()) -> None:
        self._id = task_attempt_id
        self._limits = limits
        self._enter(SubtaskState.OPENING)
        self._attached = False
        self._detached_at: float | None = None
        self._in = IncomingStream()
        self._out: OutgoingStream[UpItem] = OutgoingStream()
        self._held: deque[_Submitted] = deque(EventSubmitted(payload) for payload in held)
        self._held_bytes = sum(len(payload) for payload in held)
        self._open_requests: set[int] = set()
        self._refused: _Submitted | None = None  # the first input that met the window
        self._checkpoints: dict[int, _Phase] = {}  # not over
        self._closed: list[int] = []  # in the order in which they were closed
        self._latest: int | None = None
        self._release([])

    # --- the shape of every machine -----------------------------------------------------------------------

    def handle(self, input: SubtaskInput, now: float) -> list[SubtaskEffect]:
        """Take one input; return what to do, in this order. ``now``: seconds of any monotonic clock.

        Raises ``GatewayFull`` (H27; a later ``RoomAvailable`` is all that is remembered of it),
        ``AttemptOver`` for what the operator sends when the attempt is over, ``LocalProtocolError`` for an
        input that the table or earlier ones forbid, ``RemoteProtocolError`` when the peer broke the protocol
        (the shell then drops the connection and says ``ConnectionLost``). In each case nothing was changed.
        """
        try:
            act = self._dispatch[type(input)]
        except KeyError:
            raise LocalProtocolError(f"no input of a subtask: {input!r}") from None
        effects: _Effects = []
        act(self, input, now, effects)
        if self._detached_at is None and not self._attached and self._state is not SubtaskState.OVER:
            self._detached_at = now
        return effects

    def handle_batch(self, messages: Iterable[DownMessage], now: float) -> list[SubtaskEffect]:
        """Take all that one read has brought, with one ``Confirm`` at the end.

        It does not raise for what the peer did: at a message that breaks the protocol it stops, and the last
        effect is ``DropConnection``; the messages before it count.
        """
        effects: _Effects = []
        confirm = False
        broken: RemoteProtocolError | None = None
        try:
            for message in messages:
                confirm |= self._receive(message, effects)
        except RemoteProtocolError as error:
            broken = error
        if confirm:
            self._send_confirm(effects)
        if broken is not None:
            effects.append(DropConnection(str(broken)))
        return effects

    def next_deadline(self) -> float | None:
        """When ``TimePassed`` is due, on the clock of ``now``; None while a connection is up or all is
        over."""
        return None if self._detached_at is None else self._detached_at + self._limits.reconnect_timeout_s

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state is an impossible one."""
        self._out.check_invariants()
        self._in.check_invariants()
        closed = [n for n, phase in self._checkpoints.items() if phase is not _Phase.SNAPSHOT]
        assert sorted(closed) == sorted(self._closed)
        assert self._held_bytes == sum(len(held.payload) for held in self._held)
        if self._held:
            assert self._closed or not self._fits(self._held[0]), "held, though it may leave"
        assert self._out.events_unconfirmed <= self._limits.window_events
        assert self._detached_at is None or not self._attached
        if self._state in (SubtaskState.FINISHED, SubtaskState.OVER):
            assert not any((self._held, self._checkpoints, self._closed, self._open_requests))
        if self._state is SubtaskState.OVER:
            assert not len(self._out)
            assert self.next_deadline() is None

    # --- what the shell may look at -----------------------------------------------------------------------

    @property
    def state(self) -> SubtaskState:
        return self._state

    @property
    def resume_seq(self) -> int:
        """What to tell the peer on a new connection (``Resume.received_seq``), as in a ``Confirm``."""
        return self._in.confirmable_seq

    @property
    def may_finish(self) -> bool:
        """Whether the operator may end well now: nothing that it sent waits behind the valve or the
        window."""
        return not self._held

    @property
    def all_confirmed(self) -> bool:
        """Whether the coordinator has taken everything that was sent, the goodbye included: the task may
        leave."""
        return not len(self._out)

    def statistics(self) -> SubtaskStatistics:
        """The figures at this moment."""
        return SubtaskStatistics(
            len(self._held),
            self._held_bytes,
            self._out.events_unconfirmed,
            self._out.bytes_unconfirmed,
            len(self._open_requests),
            tuple(self._closed),
        )

    # --- connections and time -----------------------------------------------------------------------------

    def _attach(self, input: ConnectionAttached, now: float, effects: _Effects) -> None:
        self._out.resume(input.received_seq)
        self._attached = True
        self._detached_at = None
        effects.extend([SendToCoordinator(item) for item in self._out.unconfirmed()])
        self._release(effects)
        self._send_confirm(effects)
        self._announce_room(effects)

    def _detach(self, input: ConnectionLost, now: float, effects: _Effects) -> None:
        if self._attached:
            self._attached = False
            self._detached_at = now

    def _pass_time(self, input: TimePassed, now: float, effects: _Effects) -> None:
        deadline = self.next_deadline()
        if deadline is not None and now >= deadline:
            timeout_s = self._limits.reconnect_timeout_s
            self._end(f"the coordinator was out of reach for {timeout_s:g} s", effects)

    def _end(self, reason: str, effects: _Effects) -> None:
        for request_id in sorted(self._open_requests):
            effects.append(ResolveRequest(request_id, f"the attempt is over: {reason}", b""))
        effects.append(EndAttempt(reason))
        self._forget()
        self._out.clear()
        self._in.clear()
        self._attached = False
        self._detached_at = None
        self._enter(SubtaskState.OVER)

    def _forget(self) -> None:
        """Nothing more will be sent by the operator."""
        self._held.clear()
        self._held_bytes = 0
        self._open_requests.clear()
        self._refused = None
        self._checkpoints.clear()
        self._closed.clear()

    def _ignore(self, input: SubtaskInput, now: float, effects: _Effects) -> None:
        pass

    def _raise_illegal(self, input: SubtaskInput, now: float, effects: _Effects) -> None:
        raise LocalProtocolError(f"{type(input).__name__} when the operator is {self._state.value}")

    def _raise_over(self, input: SubtaskInput, now: float, effects: _Effects) -> None:
        raise AttemptOver(f"the attempt of task {self._id} is over")

    # --- up -----------------------------------------------------------------------------------------------

    def _submit(self, input: _Submitted, now: float, effects: _Effects) -> None:
        if not self._has_room(input):
            if self._refused is None:
                self._refused = input
            raise GatewayFull(
                f"task {self._id}: {len(self._held)} events held, {self._out.events_unconfirmed} unconfirmed, "
                f"{len(self._open_requests)} open requests; the window is {self._limits.window_events} "
                f"events and {self._limits.window_bytes} bytes"
            )
        if isinstance(input, RequestSubmitted):
            if input.request_id in self._open_requests:
                raise LocalProtocolError(f"request id {input.request_id} is in use")
            self._open_requests.add(input.request_id)
        if self._closed or self._held:
            self._held.append(input)
            self._held_bytes += len(input.payload)
        else:
            self._send_submitted(input, effects)

    def _send_submitted(self, submitted: _Submitted, effects: _Effects) -> None:
        seq = self._out.last_seq + 1
        item: UpItem
        if isinstance(submitted, EventSubmitted):
            item = EventMessage(self._id, seq, submitted.payload)
        else:
            item = RequestMessage(self._id, seq, submitted.request_id, submitted.payload)
        self._out.append(item, len(submitted.payload))
        if self._attached:
            effects.append(SendToCoordinator(item))

    def _send_item(self, item: UpItem, effects: _Effects) -> None:
        """One of the protocol's own items: it passes the valve and the window."""
        self._out.append(item)
        if self._attached:
            effects.append(SendToCoordinator(item))

    def _release(self, effects: _Effects) -> None:
        held = self._held
        while held and not self._closed and self._fits(held[0]):
            submitted = held.popleft()
            self._held_bytes -= len(submitted.payload)
            self._send_submitted(submitted, effects)

    def _fits(self, submitted: _Submitted) -> bool:
        """Whether the peer's window has room for one that may leave."""
        out = self._out
        count = out.events_unconfirmed
        if count >= self._limits.window_events:
            return False
        return not count or out.bytes_unconfirmed + len(submitted.payload) <= self._limits.window_bytes

    def _has_room(self, submitted: _Submitted) -> bool:
        """Whether a new one may be accepted: held and unconfirmed ones together fit into the window."""
        limits = self._limits
        count = len(self._held) + self._out.events_unconfirmed
        if count >= limits.window_events:
            return False
        if isinstance(submitted, RequestSubmitted) and len(self._open_requests) >= limits.window_events:
            return False
        size = self._held_bytes + self._out.bytes_unconfirmed + len(submitted.payload)
        return not count or size <= limits.window_bytes

    def _announce_room(self, effects: _Effects) -> None:
        if self._refused is not None and self._has_room(self._refused):
            self._refused = None
            effects.append(RoomAvailable())

    # --- the operator -------------------------------------------------------------------------------------

    def _open(self, input: OperatorOpened, now: float, effects: _Effects) -> None:
        self._enter(SubtaskState.OPEN)
        self._send_item(Opened(self._id, self._out.last_seq + 1), effects)

    def _finish(self, input: OperatorFinished, now: float, effects: _Effects) -> None:
        if not input.failure:
            if self._state is SubtaskState.OPENING:
                raise LocalProtocolError("the operator ended well without being opened")
            if self._held:
                raise LocalProtocolError(f"{len(self._held)} events have not left: serve the mailbox, then finish")
        self._forget()
        self._enter(SubtaskState.FINISHED)
        self._send_item(Finished(self._id, self._out.last_seq + 1, input.failure, input.state), effects)

    def _acknowledge(self, input: SnapshotTaken, now: float, effects: _Effects) -> None:
        checkpoint_id = input.checkpoint_id
        if not self._at_barrier(checkpoint_id):
            return
        self._checkpoints[checkpoint_id] = _Phase.SNAPSHOT
        self._closed.remove(checkpoint_id)
        held = tuple([submitted.payload for submitted in self._held])
        seq = self._out.last_seq + 1
        self._send_item(CheckpointAcknowledged(self._id, seq, checkpoint_id, input.state, held), effects)
        self._release(effects)

    def _decline(self, input: SnapshotRefused, now: float, effects: _Effects) -> None:
        if not self._at_barrier(input.checkpoint_id):
            return
        self._checkpoints[input.checkpoint_id] = _Phase.DECLINED
        seq = self._out.last_seq + 1
        self._send_item(CheckpointDeclined(self._id, seq, input.checkpoint_id, input.reason), effects)

    def _at_barrier(self, checkpoint_id: int) -> bool:
        """False for a checkpoint that is over or unknown: nothing may come of it (H44)."""
        phase = self._checkpoints.get(checkpoint_id)
        if phase is None:
            return False
        if phase is not _Phase.BARRIER:
            raise LocalProtocolError(f"checkpoint {checkpoint_id} is not at its barrier but at {phase.name}")
        return True

    # --- down ---------------------------------------------------------------------------------------------

    def _take_message(self, input: MessageReceived, now: float, effects: _Effects) -> None:
        if self._receive(input.message, effects):
            self._send_confirm(effects)

    def _receive(self, message: DownMessage, effects: _Effects) -> bool:
        """Take one message; True if it is an item, which wants to be confirmed (again)."""
        kind = type(message)
        if message.task_attempt_id != self._id or not self._attached:
            whose = f"{kind.__name__} for task {message.task_attempt_id}"
            effects.append(
                RefuseMessage(f"{whose}: task {self._id} is {self._state.value}, attached: {self._attached}")
            )
            return False
        if kind in _ITEM_KINDS:
            if self._in.is_new(message.seq):  # type: ignore[union-attr]
                self._take_item(message, effects)  # type: ignore[arg-type]
            return True
        if isinstance(message, Confirm):
            self._out.confirm(message.seq)
            self._release(effects)
            self._announce_room(effects)
        elif isinstance(message, AttemptEnded):
            self._end(message.reason, effects)
        elif isinstance(message, Refused):
            self._end(message.message, effects)
        else:
            raise RemoteProtocolError(f"{kind.__name__} in the middle of a connection")
        return False

    def _take_item(self, item: DownItem, effects: _Effects) -> None:
        if isinstance(item, EventMessage | AnswerMessage):
            if self._state is SubtaskState.FINISHED:
                self._in.advance(0)  # never taken, so never confirmed
                effects.append(RefuseMessage(f"{type(item).__name__} {item.seq}: the operator has finished"))
                return
            self._in.advance()
            if isinstance(item, EventMessage):
                effects.append(PutInMailbox(MailboxEvent(item.payload)))
            else:
                self._resolve(item, effects)
            return
        if self._state is SubtaskState.FINISHED:
            self._in.advance()
            if isinstance(item, CloseForCheckpoint):
                self._send_item(ClosedForCheckpoint(self._id, self._out.last_seq + 1, item.checkpoint_id), effects)
            return
        if isinstance(item, CloseForCheckpoint):
            self._close(item, effects)
        elif isinstance(item, BarrierMessage):
            self._meet_barrier(item, effects)
        else:
            self._end_checkpoint(item, effects)

    def _resolve(self, item: AnswerMessage, effects: _Effects) -> None:
        if item.request_id not in self._open_requests:
            effects.append(RefuseMessage(f"an answer to request {item.request_id}, which is not open"))
            return
        self._open_requests.remove(item.request_id)
        effects.append(ResolveRequest(item.request_id, item.error, item.payload))
        self._announce_room(effects)

    def _close(self, item: CloseForCheckpoint, effects: _Effects) -> None:
        checkpoint_id = item.checkpoint_id
        if self._latest is not None and checkpoint_id <= self._latest:
            raise RemoteProtocolError(f"checkpoint {checkpoint_id} after {self._latest}: ids must rise (H4)")
        self._in.advance()
        self._latest = checkpoint_id
        self._checkpoints[checkpoint_id] = _Phase.CLOSED
        self._closed.append(checkpoint_id)
        self._send_item(ClosedForCheckpoint(self._id, self._out.last_seq + 1, checkpoint_id), effects)

    def _meet_barrier(self, item: BarrierMessage, effects: _Effects) -> None:
        if self._checkpoints.get(item.checkpoint_id) is not _Phase.CLOSED:
            raise RemoteProtocolError(f"barrier {item.checkpoint_id}, for which nothing was closed")
        if item.events_before >= item.seq:
            raise RemoteProtocolError(f"barrier {item.checkpoint_id} is item {item.seq}, behind {item.events_before}")
        self._in.advance()
        self._checkpoints[item.checkpoint_id] = _Phase.BARRIER
        effects.append(PutInMailbox(MailboxBarrier(item.checkpoint_id)))

    def _end_checkpoint(self, item: DownItem, effects: _Effects) -> None:
        self._in.advance()
        if not isinstance(item, CheckpointCompleted | CheckpointAborted):
            return
        checkpoint_id = item.checkpoint_id
        if self._checkpoints.pop(checkpoint_id, None) is None:
            return  # unknown ids are ignored (H44)
        over = MailboxCompleted if isinstance(item, CheckpointCompleted) else MailboxAborted
        effects.append(PutInMailbox(over(checkpoint_id)))
        if checkpoint_id in self._closed:
            self._closed.remove(checkpoint_id)
            self._release(effects)

    def _send_confirm(self, effects: _Effects) -> None:
        seq = self._in.confirmable_seq
        if self._attached and seq:
            effects.append(SendToCoordinator(Confirm(self._id, seq)))

    def _enter(self, state: SubtaskState) -> None:
        self._state = state
        self._dispatch = _DISPATCH[state]


_ITEM_KINDS: frozenset[type] = frozenset(
    (EventMessage, AnswerMessage, CloseForCheckpoint, BarrierMessage, CheckpointCompleted, CheckpointAborted)
)
_Handler = Callable[[SubtaskMachine, Any, float, _Effects], None]

_ACTS: dict[type, _Handler] = {
    ConnectionAttached: SubtaskMachine._attach,
    ConnectionLost: SubtaskMachine._detach,
    MessageReceived: SubtaskMachine._take_message,
    OperatorOpened: SubtaskMachine._open,
    EventSubmitted: SubtaskMachine._submit,
    RequestSubmitted: SubtaskMachine._submit,
    SnapshotTaken: SubtaskMachine._acknowledge,
    SnapshotRefused: SubtaskMachine._decline,
    OperatorFinished: SubtaskMachine._finish,
    TimePassed: SubtaskMachine._pass_time,
}
_OTHERS: dict[Verdict, _Handler] = {
    Verdict.IGNORE: SubtaskMachine._ignore,
    Verdict.ILLEGAL: SubtaskMachine._raise_illegal,
    Verdict.ENDED: SubtaskMachine._raise_over,
}
_DISPATCH: dict[SubtaskState, dict[type, _Handler]] = {
    state: {kind: _ACTS[kind] if row[place] is Verdict.ACT else _OTHERS[row[place]] for kind, row in LEGAL.items()}
    for place, state in enumerate(SubtaskState)
}
