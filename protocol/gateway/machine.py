# SPDX-License-Identifier: Apache-2.0

"""The driver's end of one execution attempt: what may be sent to it, what it sends, and when it is over.

Theory of operation
-------------------
A gateway belongs to one attempt permanently (H20). Its three states concern only the connection. The outbound half
(``protocol.gateway.outbound``) has the valve that checkpoints close; the inbound half (``protocol.gateway.inbound``)
checks what the peer sends.

*Down.* An event is held while the valve is closed. Otherwise it becomes the next item of the outgoing stream, and
is sent if a connection is up (``protocol.streams``). It is confirmed when the peer has put it into its
operator's mailbox (H23). The shell bounds what it submits and has not yet seen confirmed or failed (H27): only there
can a sender wait, and an event that reaches the machine has been accepted already. An answer to a request is an event
in every respect (H33), but is never refused: the peer's open requests are bounded instead. An urgent event is an item
like the others, so it keeps its place in the stream and at the valve; only the peer treats it differently (H90).

*The first record.* ``ReadyAnnounced`` says that the coordinator's ``subtask_ready`` has returned. What it sent there
was submitted before, so ``StartProcessing`` follows it, and the operator handles all of that before it sees a record
(H66). An operator that does not wait for it says so when it opens. Nothing waits for its confirmation.

*Clocks.* Either the confirm clock runs or the reconnect clock. While a connection is up, the oldest unconfirmed
event has ``confirm_timeout_s``, counted over connected time only: a broken connection is not a failure (H24), so this
clock stands still meanwhile, and the reconnect clock runs. A held event runs no clock; the checkpoint that
holds it has its own. When a clock runs out, the attempt is given up here immediately, because it must not send or
receive anything before Spark has killed it. The effect that fails the attempt comes first, then its events fail (R26:
the failover is known before the failures are). Its reason says for how long nothing has come from the peer at all: a
process whose native code holds Python's interpreter lock is as silent as a stopped one, and nothing on the wire tells
the two apart (spark-facts 37). Neither clock gives up a peer that has sent ``Finished``. Its work is done, and Spark
decides how it ended: if it were given up here, it would reconnect after a long cut and wait forever for the
confirmation, or fail after all its work.

A loss-tolerant event has the same time on the same clock. When that is over, ``ExpireEvent`` ends the wait of its
sender and nothing else (H28, H72). The event stays in the stream: it may still arrive, and takes up capacity until it
does. If an event of the other kind is late at the same moment, the attempt is given up, and all fail with it.

*Heartbeats.* With ``heartbeat_interval_s``, the gateway looks once in each interval whether anything came from the
peer. Intervals without a sign of life add up, and at ``heartbeat_timeout_s`` the attempt is given up, as for a late
confirmation (H94). A look that comes late counts nothing: then this side may not have read what has come. Only the time
of a standing connection counts, and a peer that has sent ``Finished`` is not given up.

*Up.* Events and requests wait until the coordinator knows that the subtask is ready (H10). Items that come after them
wait too, except ``Opened``, which readiness needs, and the report of a failure. Events and requests are confirmed to
the peer when the coordinator has taken them, so the peer's window bounds what waits here. Everything else counts as
taken when it comes. The events and requests that a restored snapshot held come first, and name the subtask that first
sent them (H31, H52); such a request gets no answer (H73).

Checkpoint items are confirmed a little later: in the next item of a checkpoint, or with any other confirmation. Nothing
waits for them, and half of a checkpoint's messages would otherwise be such confirmations. A peer that has sent
``Finished`` does wait: what it still sends is confirmed immediately.

*Suspicion.* When the connection of an attempt that the coordinator knows is gone, ``ReportSuspected`` says so: usually
the process is dead, and the engine's word takes longer. It is a hint, and nothing here depends on it (H24, H87). A new
connection takes it back with ``ReportResponsive``. The two alternate, and an attempt that is over gives neither.

*Checkpoints* (H40–H44, H49). ``CloseRequested(n)`` makes n known and asks the peer to close; an id never made known is
ignored everywhere else, so a late or foreign one can neither close nor open anything. ``CutReached(n)`` closes the
valve. An event that comes then is held under the highest closed id, and leaves when that one and all lower ones are
open. Barriers and completions pass a closed valve, because they open it. The barrier leaves as soon as every event
submitted before the cut has been confirmed, whichever checkpoint held it, and however far other gateways are (H78); a
loss-tolerant event is not waited for, but has left before the barrier does, in its place (H28). The barrier is an item,
or travels apart: then ``InjectBarrier``
names the last item that precedes it, and the peer waits for that one. The valve reopens for n on this attempt's own
acknowledgement, never at the barrier, or when n is over: complete, aborted, or a savepoint that is stored. How many
events the peer had sent at its snapshot comes up with it; the tracker compares that to what the coordinator had taken
at its cut (H32).

*Files* (H190, H192). A snapshot may say that a part of its state follows: the peer stores it as files, and reports once
that it has, or could not. That opens and closes nothing. The folder for the files of a savepoint precedes its barrier.

*Checkpoints that hold nothing back* (H79). Without ``hold_events`` nobody is asked to close. ``CutReached(n)`` makes n
known, and the barrier is the next item. The valve stays open. What is delivered from the cut to the peer's snapshot is
recorded by the coordinator, within a bound that the inbound half keeps.

The order of effects is the order in which they must be carried out. At most one ``Confirm`` comes out of one
call, last of what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import Enum
from typing import Any

from protocol.describing import type_name
from protocol.errors import AttemptOver, LocalProtocolError, RemoteProtocolError
from protocol.gateway.inbound import GatewayInbound
from protocol.gateway.outbound import Effects, GatewayOutbound
from protocol.gateway.types import (
    CONNECTION_GONE,
    AnswerSubmitted,
    AttemptIsOver,
    CheckpointOver,
    CloseRequested,
    CutReached,
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
    PeerHeard,
    ReadyAnnounced,
    ReportResponsive,
    ReportSuspected,
    SendProgressed,
    SendToAttempt,
)
from protocol.ids import ExecutionAttempt
from protocol.machine import Reaction, TimePassed
from protocol.parts import ONE_PART, PartTable
from protocol.streams import ConnectionAttached, ConnectionLost, DropConnection, IncomingStream, RefuseMessage
from protocol.wire.messages import OF_CHECKPOINT, Confirm, EventMessage, Heartbeat, Register, Resume, UpMessage


class GatewayState(Enum):
    DETACHED = "detached"  # no connection yet, or not at the moment: the reconnect clock runs
    ATTACHED = "attached"
    OVER = "over"  # permanently


# In Python 3.11, looking up an attribute of an Enum class takes ten times as long as looking up a global name.
_DETACHED, _ATTACHED, _OVER = GatewayState.DETACHED, GatewayState.ATTACHED, GatewayState.OVER

_LATER, _NOW, _AGAIN = range(3)
"""When to confirm an item: with what is sent next, now, or now even if it was confirmed before."""

_A, _I = Reaction.ACT, Reaction.IGNORE

# No cell is ILLEGAL: what an input says may be wrong, but every fact can reach a gateway at any time.
LEGAL: dict[type, tuple[Reaction, Reaction, Reaction]] = {
    #                    DETACHED        ATTACHED  OVER
    ConnectionAttached: (_A, _A, _I),
    ConnectionLost: (_I, _A, _I),
    MessageReceived: (Reaction.REFUSE, _A, Reaction.REFUSE),
    PeerHeard: (_I, _A, _I),
    SendProgressed: (_I, _A, _I),
    EventSubmitted: (_A, _A, Reaction.FAIL),
    AnswerSubmitted: (_A, _A, _I),
    ReadyAnnounced: (_A, _A, _I),
    ItemTaken: (_A, _A, _I),
    CloseRequested: (_A, _A, _I),
    CutReached: (_A, _A, _I),
    CheckpointOver: (_A, _A, _I),
    AttemptIsOver: (_A, _A, _I),
    TimePassed: (_A, _A, _I),
}


class GatewayMachine:
    """The gateway of one execution attempt; see the module's text.

    ``limits``: its timeouts and the bounds on what the peer sends. ``senders``: the subtasks that first sent what its
    restored snapshot holds; nothing of others may come from it (H157). None: that is not checked. ``barriers_apart``:
    barriers travel separately from the items, as ``InjectBarrier``. ``hold_events``: whether checkpoints hold events
    back (H79). ``table``: the operator's parts. Not thread-safe: one owner calls it. The first input of any kind starts
    the reconnect clock, unless it attaches a connection.
    """

    __slots__ = (
        "_beat_at",
        "_dispatch",
        "_heard",
        "_heard_at",
        "_id",
        "_inbound",
        "_limits",
        "_outbound",
        "_reason",
        "_records",
        "_silent_s",
        "_state",
        "_suspected",
        "attempt",
    )

    def __init__(
        self,
        attempt: ExecutionAttempt,
        limits: GatewayLimits,
        *,
        barriers_apart: bool = False,
        hold_events: bool = True,
        senders: Collection[int] | None = None,
        table: PartTable = ONE_PART,
    ) -> None:
        self.attempt = attempt
        self._id = attempt.task_attempt_id
        self._limits = limits
        self._enter(GatewayState.DETACHED)
        self._reason = ""
        self._records = not hold_events
        incoming = IncomingStream(table.count)
        self._outbound = GatewayOutbound(
            attempt, limits, incoming, barriers_apart=barriers_apart, hold_events=hold_events, table=table
        )
        self._inbound = GatewayInbound(attempt, limits, incoming, self._outbound, senders, table)
        self._heard_at = 0.0  # when something last came from the peer
        self._suspected = False  # the coordinator has the hint that the attempt may be dead
        self._beat_at: float | None = None  # while a connection is up: when to look for a sign of life
        self._heard = True  # whether there was one since the previous look
        self._silent_s = 0.0  # for how long there was none, as far as it counts

    # --- the shape of every machine -----------------------------------------------------------------------

    def handle(self, input: GatewayInput, now: float) -> list[GatewayEffect]:
        """Take one input; return what to do, in order. ``now``: a reading of any monotonic clock, in seconds.

        Raises ``LocalProtocolError`` for an input that contradicts earlier ones, ``RemoteProtocolError`` when the
        peer broke the protocol (the shell then drops the connection and says ``ConnectionLost``). In both cases
        nothing was changed. After the end nothing raises, except what is not an input at all.
        """
        act = self._dispatch.get(type(input))
        if act is None:
            raise LocalProtocolError(f"not an input of a gateway: {input!r}")
        effects: Effects = []
        act(self, input, now, effects)
        if self._state is _DETACHED and self._outbound.stopped_at is None:
            self._outbound.stopped_at = now
        return effects

    def handle_batch(self, messages: Iterable[UpMessage], now: float) -> list[GatewayEffect]:
        """Take all messages of one read, with one ``Confirm`` at the end.

        It does not raise for the peer's mistakes: it stops at a message that breaks the protocol, and the last effect
        is ``DropConnection``. The messages before it count.
        """
        effects: Effects = []
        if self._state is not _ATTACHED:
            for message in messages:
                self._refuse(MessageReceived(message), now, effects)
            return effects
        self._heard_at = now
        when = _LATER
        try:
            for message in messages:
                wish = self._receive(message, now, effects)
                if wish > when:
                    when = wish
        except RemoteProtocolError as error:
            self._send_confirm(effects, when)
            effects.append(DropConnection(str(error)))
        else:
            self._send_confirm(effects, when)
        return effects

    def next_deadline(self) -> float | None:
        """When ``TimePassed`` is due, on the clock of ``now``. None if no clock runs."""
        if self._state is _ATTACHED:
            outbound = self._outbound
            if self._beat_at is None and not (outbound.awaited or outbound.tolerated):
                return None  # as of most gateways at most times
            late, tolerated = self._fatal_deadline(), self._outbound.tolerant_deadline()
            deadline = late if tolerated is None or (late is not None and late < tolerated) else tolerated
            beat_at = self._beat_at
            if beat_at is None or self._inbound.finished:
                return deadline
            return beat_at if deadline is None or beat_at < deadline else deadline
        if self._inbound.finished:
            return None
        stopped_at = self._outbound.stopped_at
        return None if stopped_at is None else stopped_at + self._limits.reconnect_timeout_s

    def _fatal_deadline(self) -> float | None:
        """When a connected peer is given up."""
        return None if self._inbound.finished else self._outbound.confirm_deadline()

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the state is impossible."""
        self._outbound.check_invariants()
        self._inbound.check_invariants()
        assert self._outbound.attached == (self._state is _ATTACHED)
        if self._state is _OVER:
            assert self.statistics() == GatewayStatistics(0, 0, 0, 0, 0, 0, ())
            assert self._inbound.idle
            assert not any(self._outbound.answers_pending)
            assert self.next_deadline() is None

    # --- what the shell may look at -----------------------------------------------------------------------

    @property
    def state(self) -> GatewayState:
        """Whether a connection is up, or the attempt is over."""
        return self._state

    @property
    def resume_seq(self) -> int:
        """What to tell a peer that reconnects (``Resumed.received_seq``): what is taken, as in a ``Confirm``."""
        return self._inbound.stream.confirmable_seq

    @property
    def ready(self) -> bool:
        """Whether the coordinator knows the subtask."""
        return self._inbound.ready

    @property
    def wants_heartbeats(self) -> bool:
        """Whether the peer has to give signs of life: then the shell reports ``PeerHeard``."""
        return self._limits.heartbeat_interval_s is not None

    @property
    def heard_at(self) -> float:
        """When something last came from the peer, on the clock of ``now``."""
        return self._heard_at

    @property
    def unconfirmed_since(self) -> float | None:
        """Since when the oldest unconfirmed event has been out, on the clock of ``now``; None if none is awaited."""
        return self._outbound.unconfirmed_since

    def statistics(self) -> GatewayStatistics:
        """The current figures. After the end all are zero."""
        outbound = self._outbound
        return GatewayStatistics(
            *outbound.held(),
            outbound.unconfirmed_events,
            outbound.unconfirmed_bytes,
            self._inbound.stream.untaken_events,
            self._inbound.stream.untaken_bytes,
            tuple(outbound.closed),
        )

    # --- connections and time -----------------------------------------------------------------------------

    def _attach(self, input: ConnectionAttached, now: float, effects: Effects) -> None:
        self._outbound.attach(input.received_seq, now, effects)
        self._heard_at = now
        if (interval_s := self._limits.heartbeat_interval_s) is not None:
            self._beat_at, self._heard, self._silent_s = now + interval_s, True, 0.0
        self._enter(GatewayState.ATTACHED)
        self._trust(effects)
        self._send_confirm(effects, _AGAIN)

    def _detach(self, input: ConnectionLost, now: float, effects: Effects) -> None:
        self._outbound.detach(now)
        self._beat_at = None
        self._enter(GatewayState.DETACHED)
        self._suspect(CONNECTION_GONE, effects)

    def _suspect(self, reason: str, effects: Effects) -> None:
        """Give the hint once, unless the coordinator does not know the attempt yet, or its work is done (H87)."""
        if self._inbound.ready and not self._inbound.finished and not self._suspected:
            self._suspected = True
            effects.append(ReportSuspected(reason))

    def _trust(self, effects: Effects) -> None:
        """Take the hint back."""
        if self._suspected:
            self._suspected = False
            effects.append(ReportResponsive())

    def _pass_time(self, input: TimePassed, now: float, effects: Effects) -> None:
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return
        if self._state is _DETACHED:
            reason = f"{self.attempt} did not reconnect within {self._limits.reconnect_timeout_s:g} s"
            effects.append(ExpireConnection(reason))
            self._end(reason, effects)
        elif (late := self._fatal_deadline()) is not None and now >= late:
            reason, event_id = self._outbound.describe_late(now, self._heard_at)
            effects.append(FailAttempt(reason))
            self._end(reason, effects, event_id)
        else:
            self._outbound.expire_tolerant(now, effects)
            if self._beat_at is not None and now >= self._beat_at and not self._inbound.finished:
                self._look_for_life(self._beat_at, now, effects)

    def _look_for_life(self, due_at: float, now: float, effects: Effects) -> None:
        """Count the interval that is over if the peer was silent in it, and give it up when there are enough (H94)."""
        limits = self._limits
        interval_s, timeout_s = limits.heartbeat_interval_s, limits.heartbeat_timeout_s
        assert interval_s is not None
        assert timeout_s is not None  # the limits see to it
        if self._heard:
            self._silent_s = 0.0
            self._trust(effects)
        elif now - due_at <= interval_s / 2:  # otherwise this side was late, and may not have read what has come
            self._silent_s += interval_s
        self._heard = False
        self._beat_at = now + interval_s
        if self._silent_s >= timeout_s:
            reason = (
                f"{self.attempt} has given no sign of life for {now - self._heard_at:.2f} s, although its connection "
                "stands: its process is stopped or swapped out, its host hangs, or native code holds Python's "
                "interpreter lock. If a native call may take that long, raise heartbeat_timeout_s"
            )
            effects.append(FailAttempt(reason, silent=True))
            self._end(reason, effects)
        elif self._silent_s >= timeout_s / 2:
            self._suspect(f"it has given no sign of life for {now - self._heard_at:.2f} s", effects)

    def _hear_life(self, input: PeerHeard, now: float, effects: Effects) -> None:
        self._heard = True

    def _progress(self, input: SendProgressed, now: float, effects: Effects) -> None:
        self._outbound.progress(now)

    def _end_attempt(self, input: AttemptIsOver, now: float, effects: Effects) -> None:
        self._end(input.reason, effects)

    def _end(self, reason: str, effects: Effects, late: int | None = None) -> None:
        self._enter(GatewayState.OVER)
        self._beat_at = None
        self._reason = reason
        self._outbound.fail_all(reason, late, effects)
        self._inbound.clear()

    def _fail_immediately(self, input: EventSubmitted, now: float, effects: Effects) -> None:
        effects.append(FailEvent(input.event_id, AttemptOver(self._reason)))

    def _ignore(self, input: GatewayInput, now: float, effects: Effects) -> None:
        pass

    def _refuse(self, input: MessageReceived, now: float, effects: Effects) -> None:
        over = self._state is _OVER
        why = f"the attempt is over: {self._reason}" if over else "no connection is up"
        effects.append(RefuseMessage(f"{type_name(input.message)} from {self.attempt}: {why}"))

    # --- down ---------------------------------------------------------------------------------------------
    # An item of a checkpoint confirms whatever can be confirmed, so it needs no ``Confirm`` after it.

    def _submit_event(self, input: EventSubmitted, now: float, effects: Effects) -> None:
        self._outbound.submit(input, input.part, not input.loss_tolerant, now, effects)

    def _submit_answer(self, input: AnswerSubmitted, now: float, effects: Effects) -> None:
        self._outbound.submit_answer(input, self._inbound.answer(input.request_id), now, effects)

    def _request_close(self, input: CloseRequested, now: float, effects: Effects) -> None:
        self._outbound.request_close(input.checkpoint_id, effects)

    def _reach_cut(self, input: CutReached, now: float, effects: Effects) -> None:
        checkpoint_id = input.checkpoint_id
        self._outbound.reach_cut(checkpoint_id, input.target, effects)
        if self._records and not self._inbound.finished and self._outbound.awaits_snapshot(checkpoint_id):
            self._inbound.start_recording(checkpoint_id)

    def _end_checkpoint(self, input: CheckpointOver, now: float, effects: Effects) -> None:
        self._outbound.end_checkpoint(input.checkpoint_id, input.outcome, now, effects)
        self._inbound.stop_recording(input.checkpoint_id, effects)

    # --- up -----------------------------------------------------------------------------------------------

    def _take_message(self, input: MessageReceived, now: float, effects: Effects) -> None:
        self._send_confirm(effects, self._receive(input.message, now, effects))
        self._heard_at = now

    def _receive(self, message: Any, now: float, effects: Effects) -> int:
        """Take one message, an ``UpMessage``; return when to confirm it."""
        if message.task_attempt_id != self._id:
            name = f"{type_name(message)} of task {message.task_attempt_id}"
            effects.append(RefuseMessage(f"{name} on the connection of {self.attempt}"))
            return _LATER
        kind = type(message)
        if kind is not EventMessage:
            if kind is Confirm:
                self._outbound.confirm(message.seq, effects)
                return _LATER
            if kind in OF_CHECKPOINT:
                return self._receive_report(message, now, effects)
            if isinstance(message, PLAIN):
                if isinstance(message, Heartbeat):  # a sign of life, as its bytes were
                    return _LATER
                raise RemoteProtocolError(
                    f"unexpected {type_name(message)} on the established connection of {self.attempt}"
                )
        return _AGAIN if self._inbound.receive(message, now, effects) else _NOW

    def _receive_report(self, report: Any, now: float, effects: Effects) -> int:
        """Take an item of a checkpoint, then what it confirms; return when to confirm it."""
        confirmed = report.confirmed
        if confirmed > self._outbound.stream.last_seq:
            raise RemoteProtocolError(f"{type_name(report)} confirms item {confirmed}, which was never sent")
        repeated = self._inbound.receive(report, now, effects)
        if confirmed:
            self._outbound.confirm(confirmed, effects)
        return _AGAIN if repeated else _NOW if self._inbound.finished else _LATER

    def _announce_ready(self, input: ReadyAnnounced, now: float, effects: Effects) -> None:
        if self._inbound.ready:
            raise LocalProtocolError(f"{self.attempt} was announced ready twice")
        if self._inbound.awaits_start:
            self._outbound.start_processing(effects)
        self._inbound.announce_ready(now, effects)
        if self._state is _DETACHED:
            self._suspect(CONNECTION_GONE, effects)

    def _take(self, input: ItemTaken, now: float, effects: Effects) -> None:
        self._inbound.take(input.seq, input.part)
        self._send_confirm(effects, _NOW)

    def _send_confirm(self, effects: Effects, when: int) -> None:
        if self._state is not _ATTACHED:
            return
        if when == _LATER:  # most often nothing is sent
            for effect in effects:
                if type(effect) is SendToAttempt:
                    break
            else:
                return
        incoming = self._inbound.stream
        seq = incoming.confirmable_seq
        if seq <= incoming.told_seq and (when != _AGAIN or not seq):
            return
        incoming.told_seq = seq
        effects.append(SendToAttempt(Confirm(self._id, seq)))

    def _enter(self, state: GatewayState) -> None:
        self._state = state
        self._dispatch = _DISPATCH[state]


PLAIN = (Register, Resume, Heartbeat)

_Handler = Callable[[GatewayMachine, Any, float, Effects], None]

_ACTS: dict[type, _Handler] = {
    ConnectionAttached: GatewayMachine._attach,
    ConnectionLost: GatewayMachine._detach,
    MessageReceived: GatewayMachine._take_message,
    EventSubmitted: GatewayMachine._submit_event,
    AnswerSubmitted: GatewayMachine._submit_answer,
    PeerHeard: GatewayMachine._hear_life,
    SendProgressed: GatewayMachine._progress,
    ReadyAnnounced: GatewayMachine._announce_ready,
    ItemTaken: GatewayMachine._take,
    CloseRequested: GatewayMachine._request_close,
    CutReached: GatewayMachine._reach_cut,
    CheckpointOver: GatewayMachine._end_checkpoint,
    AttemptIsOver: GatewayMachine._end_attempt,
    TimePassed: GatewayMachine._pass_time,
}
_OTHERS: dict[Reaction, _Handler] = {
    Reaction.IGNORE: GatewayMachine._ignore,
    Reaction.REFUSE: GatewayMachine._refuse,
    Reaction.FAIL: GatewayMachine._fail_immediately,
}
_DISPATCH: dict[GatewayState, dict[type, _Handler]] = {
    state: {kind: _ACTS[kind] if row[place] is Reaction.ACT else _OTHERS[row[place]] for kind, row in LEGAL.items()}
    for place, state in enumerate(GatewayState)
}
