"""The driver's end of one execution attempt: what may be sent to it, what it says, and when it is over.

Theory of operation
-------------------
A gateway belongs to one attempt for ever (H20). It has three states,
which are about the connection only; what a checkpoint does to it is a matter of the *downward valve*, below.

*Down.* An event is held while the valve is closed; else it becomes the next item of the downward stream, and
is sent if a connection is up (``protocol.streams``). It is confirmed when the peer has put it into its
operator's mailbox (H23). Held and unconfirmed events together are bounded; at the bound ``EventSubmitted``
raises ``GatewayFull``, and ``RoomAvailable`` tells when to try again. An answer to a request is an event in
every respect (H33), but is never refused: the peer's open requests are bounded instead.

*Clocks.* Exactly one runs at a time. While a connection is up, the oldest unconfirmed event has
``confirm_timeout_s``, counted over connected time only: a broken connection is not a failure (H24), so this
clock stands still meanwhile, and the reconnect clock runs. A held event runs no clock; the checkpoint that
holds it has its own. When a clock runs out, the attempt is given up here and at once, for it must be mute
before Spark has killed it: the effect that fails it comes first, then its events fail (R26: the failover is
known before the failure is).

*Up.* Events and requests wait until the coordinator knows that the subtask is ready (H10); whatever comes
after them waits behind them, save ``Opened``, which is what readiness needs, and the news of a failure. They
are confirmed to the peer when the coordinator has taken them, so its window bounds what lies here;
everything else counts as taken when it comes.

*Checkpoints* (H40–H44). ``CloseRequested(n)`` makes n known and asks the peer to close; an id never made
known is ignored everywhere else, so a late or foreign one can neither close nor open anything.
``CutReached(n)`` closes the valve. An event that comes then is held under the highest closed id, and leaves
when that one and all lower ones are open. Barriers and completions pass a closed valve, for they are what
opens it. ``ReportDrained(n)`` comes when every event submitted before the cut has been confirmed, whichever
checkpoint held it; a loss-tolerant one is not waited for, but has left before the barrier does, in its place
(H28). The valve reopens for n on this attempt's own acknowledgement, or when n is over.

The order of effects is the order in which they must be carried out. At most one ``Confirm`` comes out of one
call, last of what is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from protocol.errors import (
    AttemptOver,
    ConfirmationTimeout,
    GatewayFull,
    LocalProtocolError,
    RemoteProtocolError,
)
from protocol.gateway_types import (
    AnswerSubmitted,
    AttemptIsOver,
    BarrierRequested,
    CheckpointOver,
    CloseRequested,
    ConfirmEvent,
    CutReached,
    DeliverEvent,
    DeliverRequest,
    EventSubmitted,
    ExpireConnection,
    FailAttempt,
    FailEvent,
    GatewayEffect,
    GatewayInput,
    GatewayLimits,
    GatewayStatistics,
    ItemTaken,
    MessageReceived,
    ReadyAnnounced,
    ReportAcknowledged,
    ReportClosed,
    ReportDeclined,
    ReportDrained,
    ReportFinished,
    ReportOpened,
    SendToAttempt,
)
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.messages import (
    AnswerMessage,
    BarrierMessage,
    CheckpointAborted,
    CheckpointAcknowledged,
    CheckpointCompleted,
    CheckpointDeclined,
    ClosedForCheckpoint,
    CloseForCheckpoint,
    Confirm,
    DownItem,
    EventMessage,
    Finished,
    Opened,
    RequestMessage,
    UpItem,
    UpMessage,
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


class GatewayState(Enum):
    DETACHED = "detached"  # no connection (yet, or for the moment): the reconnect clock runs
    ATTACHED = "attached"
    OVER = "over"  # for ever


class Verdict(Enum):
    """What becomes of an input in a state. No cell of the table raises by itself: what an input *says* may
    be wrong (a number out of order), but every fact can reach a gateway at any time."""

    ACT = "act"
    IGNORE = "ignore"
    REFUSE = "refuse"  # a message: dropped, and reported with ``RefuseMessage`` (H3)
    FAIL = "fail"  # an event: accepted, and failed at once; never raised at the sender (H21, H26)


_A, _I = Verdict.ACT, Verdict.IGNORE

LEGAL: dict[type, tuple[Verdict, Verdict, Verdict]] = {
    #                    DETACHED        ATTACHED  OVER
    ConnectionAttached: (_A, _A, _I),
    ConnectionLost: (_I, _A, _I),
    MessageReceived: (Verdict.REFUSE, _A, Verdict.REFUSE),
    EventSubmitted: (_A, _A, Verdict.FAIL),
    AnswerSubmitted: (_A, _A, _I),
    ReadyAnnounced: (_A, _A, _I),
    ItemTaken: (_A, _A, _I),
    CloseRequested: (_A, _A, _I),
    CutReached: (_A, _A, _I),
    BarrierRequested: (_A, _A, _I),
    CheckpointOver: (_A, _A, _I),
    AttemptIsOver: (_A, _A, _I),
    TimePassed: (_A, _A, _I),
}


class _Peer(Enum):
    """How far the operator at the other end has come, by the items that have arrived."""

    RESTORING = 0
    OPEN = 1
    FINISHED = 2


class _Phase(Enum):
    """How far one checkpoint has come at this gateway. The valve is closed for it from CUT to BARRIER."""

    REQUESTED = 0
    CUT = 1
    DRAINED = 2
    BARRIER = 3
    ACKNOWLEDGED = 4


class _Checkpoint:
    """What one gateway remembers of one checkpoint that is not over."""

    __slots__ = ("order_at_cut", "phase", "submitted_at_cut")

    def __init__(self) -> None:
        self.phase = _Phase.REQUESTED
        self.submitted_at_cut = 0
        self.order_at_cut = 0


_Submitted = EventSubmitted | AnswerSubmitted
_Effects = list[GatewayEffect]


class GatewayMachine:
    """The gateway of one execution attempt; see the module's text.

    ``attempt``: the one that it belongs to. ``limits``: its bounds and timeouts. Not thread-safe: one owner
    calls it. The first input of any kind starts the reconnect clock unless it attaches a connection.
    """

    __slots__ = (
        "_answers",
        "_awaited",
        "_checkpoints",
        "_closed",
        "_confirm_sent",
        "_detached_at",
        "_dispatch",
        "_held",
        "_held_bytes",
        "_id",
        "_in",
        "_kept",
        "_last_event_seq",
        "_latest",
        "_limits",
        "_order",
        "_out",
        "_paused_s",
        "_peer",
        "_ready",
        "_reason",
        "_refused_bytes",
        "_settled",
        "_state",
        "_submitted",
        "_unanswered",
        "attempt",
    )

    def __init__(self, attempt: ExecutionAttempt, limits: GatewayLimits) -> None:
        self.attempt = attempt
        self._id = attempt.task_attempt_id
        self._limits = limits
        self._enter(GatewayState.DETACHED)
        self._reason = ""
        # Down: what is held (the id that holds it, its place among all submitted, itself), what is in the
        # stream, and of that, with the reading of the connected clock, what must be confirmed in time.
        self._out: OutgoingStream[DownItem] = OutgoingStream()
        self._held: deque[tuple[int, int, _Submitted]] = deque()
        self._held_bytes = 0
        self._awaited: deque[tuple[int, float, _Submitted]] = deque()
        self._order = 0  # events and answers submitted, of all kinds
        self._submitted = 0  # of these, the ones that a checkpoint waits for,
        self._settled = 0  # and the confirmed ones of those
        self._last_event_seq = 0
        self._refused_bytes: int | None = None  # the size of the first event that met the bound
        # Clocks.
        self._detached_at: float | None = None
        self._paused_s = 0.0  # how long the confirm clock has stood still so far
        # Up.
        self._in = IncomingStream()
        self._confirm_sent = 0
        self._peer = _Peer.RESTORING
        self._ready = False
        self._kept: deque[UpItem] = deque()  # came before ReadyAnnounced
        self._unanswered: set[int] = set()
        self._answers = 0  # held or unconfirmed
        # Checkpoints that are not over, and the ids that close the valve, ascending.
        self._checkpoints: dict[int, _Checkpoint] = {}
        self._closed: list[int] = []
        self._latest: int | None = None

    # --- the shape of every machine -----------------------------------------------------------------------

    def handle(self, input: GatewayInput, now: float) -> list[GatewayEffect]:
        """Take one input; return what to do, in this order. ``now``: seconds of any monotonic clock.

        Raises ``GatewayFull`` (H27; a later ``RoomAvailable`` is all that is remembered of it),
        ``LocalProtocolError`` for an input that contradicts earlier ones, ``RemoteProtocolError`` when the
        peer broke the protocol (the shell then drops the connection and says ``ConnectionLost``). In each
        case nothing was changed.
        """
        try:
            act = self._dispatch[type(input)]
        except KeyError:
            raise LocalProtocolError(f"no input of a gateway: {input!r}") from None
        effects: _Effects = []
        act(self, input, now, effects)
        if self._detached_at is None and self._state is GatewayState.DETACHED:
            self._detached_at = now
        return effects

    def handle_batch(self, messages: Iterable[UpMessage], now: float) -> list[GatewayEffect]:
        """Take all that one read has brought, with one ``Confirm`` at the end.

        It does not raise for what the peer did: at a message that breaks the protocol it stops, and the last
        effect is ``DropConnection``; the messages before it count.
        """
        effects: _Effects = []
        if self._state is not GatewayState.ATTACHED:
            for message in messages:
                self._refuse(MessageReceived(message), now, effects)
            return effects
        again = False
        broken: RemoteProtocolError | None = None
        try:
            for message in messages:
                again |= self._receive(message, now, effects)
        except RemoteProtocolError as error:
            broken = error
        self._send_confirm(effects, again)
        if broken is not None:
            effects.append(DropConnection(str(broken)))
        return effects

    def next_deadline(self) -> float | None:
        """When ``TimePassed`` is due, on the clock of ``now``; None when no clock runs."""
        if self._state is GatewayState.ATTACHED:
            if self._awaited:
                return self._awaited[0][1] + self._limits.confirm_timeout_s + self._paused_s
            return None
        if self._state is GatewayState.DETACHED and self._detached_at is not None:
            return self._detached_at + self._limits.reconnect_timeout_s
        return None

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state is an impossible one."""
        self._out.check_invariants()
        self._in.check_invariants()
        assert self._closed == sorted(set(self._closed))
        assert self._held_bytes == sum(len(entry[2].payload) for entry in self._held)
        closing = (_Phase.CUT, _Phase.DRAINED, _Phase.BARRIER)
        assert set(self._closed) == {n for n, c in self._checkpoints.items() if c.phase in closing}
        if self._held:
            assert self._closed, "held, and nothing will ever release it"
            assert self._closed[0] <= self._held[0][0], "held, though it may leave"
        orders = [order for _, order, _ in self._held]
        assert orders == sorted(orders), "held events have lost their order"
        held = sum(1 for entry in self._held if _is_awaited(entry[2]))
        if self._state is not GatewayState.OVER:
            assert self._submitted - self._settled == held + len(self._awaited)
        assert not (self._kept and self._ready)
        assert self._confirm_sent <= self._in.received_seq
        if self._state is GatewayState.OVER:
            assert not any((len(self._out), self._held, self._awaited, self._kept, self._checkpoints))
            assert self.next_deadline() is None

    # --- what the shell may look at -----------------------------------------------------------------------

    @property
    def state(self) -> GatewayState:
        return self._state

    @property
    def resume_seq(self) -> int:
        """What to tell a peer that reconnects (``Resumed.received_seq``): what is taken, as in a
        ``Confirm``."""
        return self._in.confirmable_seq

    def statistics(self) -> GatewayStatistics:
        """The figures at this moment; after the end all are zero."""
        return GatewayStatistics(
            len(self._held),
            self._held_bytes,
            self._out.events_unconfirmed,
            self._out.bytes_unconfirmed,
            self._in.untaken_events,
            self._in.untaken_bytes,
            tuple(self._closed),
        )

    # --- connections and time -----------------------------------------------------------------------------

    def _attach(self, input: ConnectionAttached, now: float, effects: _Effects) -> None:
        self._trim(self._out.resume(input.received_seq), input.received_seq, effects)
        if self._detached_at is not None:
            self._paused_s += now - self._detached_at
            self._detached_at = None
        self._enter(GatewayState.ATTACHED)
        effects.extend([SendToAttempt(item) for item in self._out.unconfirmed()])
        self._send_confirm(effects, again=True)

    def _detach(self, input: ConnectionLost, now: float, effects: _Effects) -> None:
        self._detached_at = now
        self._enter(GatewayState.DETACHED)

    def _pass_time(self, input: TimePassed, now: float, effects: _Effects) -> None:
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return
        if self._state is GatewayState.DETACHED:
            reason = f"{self.attempt} did not reconnect within {self._limits.reconnect_timeout_s:g} s"
            effects.append(ExpireConnection(reason))
            self._end(reason, effects)
            return
        seq, started, submitted = self._awaited[0]
        late = submitted.event_id if isinstance(submitted, EventSubmitted) else None
        name = (
            f"answer to request {submitted.request_id}"
            if isinstance(submitted, AnswerSubmitted)
            else f"event {late}"
        )
        waited_s = now - self._paused_s - started
        reason = f"{name} (item {seq}) for {self.attempt} was not confirmed within {waited_s:.3f} s"
        effects.append(FailAttempt(reason))
        self._end(reason, effects, late)

    def _end_attempt(self, input: AttemptIsOver, now: float, effects: _Effects) -> None:
        self._end(input.reason, effects)

    def _end(self, reason: str, effects: _Effects, late: int | None = None) -> None:
        """Fail what was not confirmed, in order (H26), and forget everything. ``late``: the event that timed
        out."""
        self._enter(GatewayState.OVER)
        self._reason = reason
        for event_id in self._out.tags():
            kind = ConfirmationTimeout if event_id == late else AttemptOver
            effects.append(FailEvent(event_id, kind(reason)))
        for _, _, held in self._held:
            if isinstance(held, EventSubmitted):
                effects.append(FailEvent(held.event_id, AttemptOver(reason)))
        self._out.clear()
        self._in.clear()
        self._held.clear()
        self._held_bytes = 0
        self._awaited.clear()
        self._kept.clear()
        self._unanswered.clear()
        self._answers = 0
        self._checkpoints.clear()
        self._closed.clear()
        self._detached_at = None
        self._announce_room(effects)

    def _fail_at_once(self, input: EventSubmitted, now: float, effects: _Effects) -> None:
        effects.append(FailEvent(input.event_id, AttemptOver(self._reason)))

    def _ignore(self, input: GatewayInput, now: float, effects: _Effects) -> None:
        pass

    def _refuse(self, input: MessageReceived, now: float, effects: _Effects) -> None:
        why = (
            f"the attempt is over: {self._reason}"
            if self._state is GatewayState.OVER
            else "no connection is up"
        )
        effects.append(RefuseMessage(f"{type(input.message).__name__} from {self.attempt}: {why}"))

    # --- down ---------------------------------------------------------------------------------------------

    def _submit_event(self, input: EventSubmitted, now: float, effects: _Effects) -> None:
        size = len(input.payload)
        if not self._has_room(size):
            if self._refused_bytes is None:
                self._refused_bytes = size
            out = self._out
            raise GatewayFull(
                f"{self.attempt}: {len(self._held)} events held and {out.events_unconfirmed} unconfirmed, "
                f"{self._held_bytes + out.bytes_unconfirmed} bytes: at most {self._limits.events_max} events "
                f"and {self._limits.bytes_max} bytes"
            )
        self._submit(input, now, effects)

    def _submit_answer(self, input: AnswerSubmitted, now: float, effects: _Effects) -> None:
        if input.request_id not in self._unanswered:
            raise LocalProtocolError(f"request {input.request_id} of {self.attempt} is not open")
        self._unanswered.remove(input.request_id)
        self._answers += 1
        self._submit(input, now, effects)

    def _submit(self, submitted: _Submitted, now: float, effects: _Effects) -> None:
        self._order += 1
        if _is_awaited(submitted):
            self._submitted += 1
        if self._closed:
            self._held.append((self._closed[-1], self._order, submitted))
            self._held_bytes += len(submitted.payload)
        else:
            self._send_submitted(submitted, now, effects)

    def _send_submitted(self, submitted: _Submitted, now: float, effects: _Effects) -> None:
        out = self._out
        seq = out.last_seq + 1
        payload = submitted.payload
        item: DownItem
        if isinstance(submitted, EventSubmitted):
            item = EventMessage(self._id, seq, payload)
            out.append(item, len(payload), submitted.event_id)
            awaited = not submitted.loss_tolerant
        else:
            item = AnswerMessage(self._id, seq, submitted.request_id, submitted.error, payload)
            out.append(item, len(payload))
            awaited = True
        if awaited:
            stopped = self._detached_at
            self._awaited.append((seq, (now if stopped is None else stopped) - self._paused_s, submitted))
        self._last_event_seq = seq
        if self._state is GatewayState.ATTACHED:
            effects.append(SendToAttempt(item))

    def _send_item(self, item: DownItem, effects: _Effects) -> None:
        """One of the protocol's own items: it passes the valve and counts against no bound."""
        self._out.append(item)
        if self._state is GatewayState.ATTACHED:
            effects.append(SendToAttempt(item))

    def _release(self, now: float, effects: _Effects) -> None:
        """Send what is no longer held (H43: an event leaves when its id and all lower ones are open)."""
        held, closed = self._held, self._closed
        while held and not (closed and closed[0] <= held[0][0]):
            _, _, submitted = held.popleft()
            self._held_bytes -= len(submitted.payload)
            self._send_submitted(submitted, now, effects)
        self._report_drained(effects)

    def _confirmed(self, seq: int, effects: _Effects) -> None:
        self._trim(self._out.confirm(seq), seq, effects)

    def _trim(
        self, entries: list[tuple[DownItem, int | None, int | None]], seq: int, effects: _Effects
    ) -> None:
        for item, _, event_id in entries:
            if event_id is not None:
                effects.append(ConfirmEvent(event_id))
            elif type(item) is AnswerMessage:
                self._answers -= 1
        awaited = self._awaited
        while awaited and awaited[0][0] <= seq:
            awaited.popleft()
            self._settled += 1
        self._report_drained(effects)
        self._announce_room(effects)

    def _has_room(self, size: int) -> bool:
        count = len(self._held) + self._out.events_unconfirmed
        if count >= self._limits.events_max:
            return False
        return count == 0 or self._held_bytes + self._out.bytes_unconfirmed + size <= self._limits.bytes_max

    def _announce_room(self, effects: _Effects) -> None:
        if self._refused_bytes is not None and self._has_room(self._refused_bytes):
            self._refused_bytes = None
            effects.append(RoomAvailable())

    # --- up -----------------------------------------------------------------------------------------------

    def _take_message(self, input: MessageReceived, now: float, effects: _Effects) -> None:
        again = self._receive(input.message, now, effects)
        self._send_confirm(effects, again)

    def _receive(self, message: UpMessage, now: float, effects: _Effects) -> bool:
        """Take one message; True if it was a duplicate, which wants to be confirmed again."""
        if message.task_attempt_id != self._id:
            name = f"{type(message).__name__} of task {message.task_attempt_id}"
            effects.append(RefuseMessage(f"{name} on the connection of {self.attempt}"))
            return False
        if isinstance(message, Confirm):
            self._confirmed(message.seq, effects)
            return False
        if not isinstance(message, UpItem):
            raise RemoteProtocolError(
                f"{type(message).__name__} in the middle of a connection of {self.attempt}"
            )
        if not self._in.is_new(message.seq):
            return True
        if isinstance(message, EventMessage | RequestMessage):
            self._check_window(message)
            self._in.advance(len(message.payload))
        else:
            self._in.advance()
        self._take_item(message, now, effects)
        return False

    def _check_window(self, message: EventMessage | RequestMessage) -> None:
        """Refuse a peer that sends more than it was allowed to (H27); nothing has been changed so far."""
        came, limits = self._in, self._limits
        if came.untaken_events >= limits.upward_events_max or (
            came.untaken_events and came.untaken_bytes + len(message.payload) > limits.upward_bytes_max
        ):
            raise RemoteProtocolError(f"{self.attempt} has sent more than its window allows")
        if isinstance(message, RequestMessage):
            if message.request_id in self._unanswered:
                raise RemoteProtocolError(f"{self.attempt} has used request id {message.request_id} twice")
            if len(self._unanswered) + self._answers >= limits.upward_events_max:
                raise RemoteProtocolError(f"{self.attempt} has more open requests than its window allows")

    def _take_item(self, item: UpItem, now: float, effects: _Effects) -> None:
        if self._peer is _Peer.FINISHED and not isinstance(item, ClosedForCheckpoint):
            self._in.take(item.seq)
            effects.append(
                RefuseMessage(f"{type(item).__name__} of {self.attempt}, which has said that it finished")
            )
            return
        if isinstance(item, Opened):
            if self._peer is _Peer.RESTORING:
                self._peer = _Peer.OPEN
                effects.append(ReportOpened())
            else:
                effects.append(RefuseMessage(f"{self.attempt} has opened twice"))
            return
        if isinstance(item, Finished):
            self._peer = _Peer.FINISHED
            if item.failure:
                self._deliver(item, now, effects)
                return
        if isinstance(item, RequestMessage):
            self._unanswered.add(item.request_id)
        if self._kept or (not self._ready and isinstance(item, EventMessage | RequestMessage)):
            self._kept.append(item)
        else:
            self._deliver(item, now, effects)

    def _deliver(self, item: UpItem, now: float, effects: _Effects) -> None:
        match item:
            case EventMessage():
                effects.append(DeliverEvent(item.seq, item.payload))
            case RequestMessage():
                effects.append(DeliverRequest(item.seq, item.request_id, item.payload))
            case Finished():
                effects.append(ReportFinished(item.failure, item.state))
            case ClosedForCheckpoint() | CheckpointAcknowledged() | CheckpointDeclined():
                self._hear_of_checkpoint(item, now, effects)

    def _announce_ready(self, input: ReadyAnnounced, now: float, effects: _Effects) -> None:
        if self._ready:
            raise LocalProtocolError(f"{self.attempt} was announced ready twice")
        self._ready = True
        while self._kept:
            self._deliver(self._kept.popleft(), now, effects)

    def _take(self, input: ItemTaken, now: float, effects: _Effects) -> None:
        if input.seq > self._in.received_seq:
            raise LocalProtocolError(f"item {input.seq} of {self.attempt} was taken before it came")
        if self._kept and input.seq >= self._kept[0].seq:
            raise LocalProtocolError(f"item {input.seq} of {self.attempt} was taken before it was delivered")
        self._in.take(input.seq)
        self._send_confirm(effects, again=False)

    def _send_confirm(self, effects: _Effects, again: bool) -> None:
        seq = self._in.confirmable_seq
        if self._state is GatewayState.ATTACHED and seq and (again or seq > self._confirm_sent):
            self._confirm_sent = seq
            effects.append(SendToAttempt(Confirm(self._id, seq)))

    # --- checkpoints --------------------------------------------------------------------------------------

    def _request_close(self, input: CloseRequested, now: float, effects: _Effects) -> None:
        checkpoint_id = input.checkpoint_id
        if self._latest is not None and checkpoint_id <= self._latest:
            raise LocalProtocolError(f"checkpoint {checkpoint_id} after {self._latest}: ids must rise (H4)")
        self._latest = checkpoint_id
        self._checkpoints[checkpoint_id] = _Checkpoint()
        self._send_item(CloseForCheckpoint(self._id, self._out.last_seq + 1, checkpoint_id), effects)

    def _reach_cut(self, input: CutReached, now: float, effects: _Effects) -> None:
        checkpoint = self._checkpoints.get(input.checkpoint_id)
        if checkpoint is None:
            return  # over already, or none of ours: a late cut closes nothing (H44)
        if checkpoint.phase is not _Phase.REQUESTED:
            raise LocalProtocolError(f"checkpoint {input.checkpoint_id} was cut twice")
        if self._closed and input.checkpoint_id < self._closed[-1]:
            raise LocalProtocolError(
                f"the cut of {input.checkpoint_id} comes after that of {self._closed[-1]}"
            )
        checkpoint.phase = _Phase.CUT
        checkpoint.submitted_at_cut = self._submitted
        checkpoint.order_at_cut = self._order
        self._closed.append(input.checkpoint_id)
        self._report_drained(effects)

    def _report_drained(self, effects: _Effects) -> None:
        for checkpoint_id in self._closed:
            checkpoint = self._checkpoints[checkpoint_id]
            if (
                checkpoint.phase is _Phase.CUT
                and self._settled >= checkpoint.submitted_at_cut
                and not (self._held and self._held[0][1] <= checkpoint.order_at_cut)
            ):
                checkpoint.phase = _Phase.DRAINED
                effects.append(ReportDrained(checkpoint_id))

    def _send_barrier(self, input: BarrierRequested, now: float, effects: _Effects) -> None:
        checkpoint = self._checkpoints.get(input.checkpoint_id)
        if checkpoint is None:
            return  # over meanwhile
        if checkpoint.phase is not _Phase.DRAINED:
            raise LocalProtocolError(
                f"barrier {input.checkpoint_id} of {self.attempt} at {checkpoint.phase.name}"
            )
        checkpoint.phase = _Phase.BARRIER
        # The valve is closed, so the last event in the stream is the last one of before the cut.
        seq = self._out.last_seq + 1
        self._send_item(BarrierMessage(self._id, seq, input.checkpoint_id, self._last_event_seq), effects)

    def _hear_of_checkpoint(
        self,
        item: ClosedForCheckpoint | CheckpointAcknowledged | CheckpointDeclined,
        now: float,
        effects: _Effects,
    ) -> None:
        checkpoint_id = item.checkpoint_id
        checkpoint = self._checkpoints.get(checkpoint_id)
        if checkpoint is None:
            effects.append(
                RefuseMessage(f"{type(item).__name__} of {self.attempt}: {checkpoint_id} is not pending")
            )
        elif isinstance(item, ClosedForCheckpoint):
            effects.append(ReportClosed(checkpoint_id))
        elif isinstance(item, CheckpointDeclined):
            effects.append(ReportDeclined(checkpoint_id, item.reason))
        elif checkpoint.phase is not _Phase.BARRIER:
            effects.append(
                RefuseMessage(f"{self.attempt} acknowledged {checkpoint_id} at {checkpoint.phase.name}")
            )
        else:
            checkpoint.phase = _Phase.ACKNOWLEDGED
            effects.append(ReportAcknowledged(checkpoint_id, item.state, item.held))
            self._closed.remove(checkpoint_id)
            self._release(now, effects)

    def _end_checkpoint(self, input: CheckpointOver, now: float, effects: _Effects) -> None:
        checkpoint_id = input.checkpoint_id
        if self._checkpoints.pop(checkpoint_id, None) is None:
            return  # unknown ids are ignored (H44)
        kind = CheckpointCompleted if input.completed else CheckpointAborted
        self._send_item(kind(self._id, self._out.last_seq + 1, checkpoint_id), effects)
        if checkpoint_id in self._closed:
            self._closed.remove(checkpoint_id)
            self._release(now, effects)

    def _enter(self, state: GatewayState) -> None:
        self._state = state
        self._dispatch = _DISPATCH[state]


def _is_awaited(submitted: _Submitted) -> bool:
    """Whether it must be confirmed in time and a checkpoint waits for it: all but loss-tolerant events
    (H28)."""
    return not (isinstance(submitted, EventSubmitted) and submitted.loss_tolerant)


_Handler = Callable[[GatewayMachine, Any, float, _Effects], None]

_ACTS: dict[type, _Handler] = {
    ConnectionAttached: GatewayMachine._attach,
    ConnectionLost: GatewayMachine._detach,
    MessageReceived: GatewayMachine._take_message,
    EventSubmitted: GatewayMachine._submit_event,
    AnswerSubmitted: GatewayMachine._submit_answer,
    ReadyAnnounced: GatewayMachine._announce_ready,
    ItemTaken: GatewayMachine._take,
    CloseRequested: GatewayMachine._request_close,
    CutReached: GatewayMachine._reach_cut,
    BarrierRequested: GatewayMachine._send_barrier,
    CheckpointOver: GatewayMachine._end_checkpoint,
    AttemptIsOver: GatewayMachine._end_attempt,
    TimePassed: GatewayMachine._pass_time,
}
_OTHERS: dict[Verdict, _Handler] = {
    Verdict.IGNORE: GatewayMachine._ignore,
    Verdict.REFUSE: GatewayMachine._refuse,
    Verdict.FAIL: GatewayMachine._fail_at_once,
}
_DISPATCH: dict[GatewayState, dict[type, _Handler]] = {
    state: {
        kind: _ACTS[kind] if row[place] is Verdict.ACT else _OTHERS[row[place]] for kind, row in LEGAL.items()
    }
    for place, state in enumerate(GatewayState)
}
