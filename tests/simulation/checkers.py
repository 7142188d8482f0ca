# SPDX-License-Identifier: Apache-2.0

"""Checkers that judge a simulated world. They know the contract, but not the machines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from protocol.subtask.types import MailboxAborted, MailboxBarrier, MailboxCompleted, MailboxEvent, MailboxItem
from protocol.wire.messages import (
    BarrierMessage,
    CloseForCheckpoint,
    Downward,
    EventMessage,
    Resumed,
    UrgentEventMessage,
)
from tests.simulation.application import HEARTBEAT_S, RECONNECT_S, TEAM, part_in, unpack

SLACK_S = 0.1
"""How late a task may look at its clock: timers are checked every few milliseconds."""
LATE_S = 1.0
"""How long a decision may take on its way through several mailboxes."""


class Violation(AssertionError):
    """The contract was broken; the message names the rule."""


def demand(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)


class Judged(Protocol):
    """Keeps a finding that the code under judgement may swallow."""

    broken: Exception | None


@contextmanager
def judged(world: Judged) -> Iterator[None]:
    """Record an error raised to the code under judgement, which may swallow it."""
    try:
        yield
    except Exception as error:
        world.broken = world.broken or error
        raise


@dataclass
class CallbackOrder:
    """Checks the calls that one coordinator receives, and their order (H10, H13, H15, H16, H18, H43)."""

    parallelism: int
    batch: bool
    copies: bool  # several attempts of a subtask may be alive at the same time, or appear so when facts are lost
    concurrent_max: int
    restored: int = -1
    live: dict[int, set[int]] = field(default_factory=dict)
    last_ready: dict[int, int] = field(default_factory=dict)
    failed: dict[int, set[int]] = field(default_factory=dict)
    beside: dict[int, set[int]] = field(default_factory=dict)
    reset_owed: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)
    discarded: set[int] = field(default_factory=set)
    savepoints: set[int] = field(default_factory=set)
    well: dict[int, bool] = field(default_factory=dict)  # whether a run ended well
    last_asked: int = -1
    told_complete: int = -1
    uncommitted: str = ""  # the run whose last output no checkpoint covers yet
    finished: dict[int, set[int]] = field(default_factory=dict)  # the finished ones among the live attempts

    suspects: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.last_asked = self.told_complete = self.restored

    def _live(self, subtask: int) -> set[int]:
        return self.live.setdefault(subtask, set())

    def _finished(self, subtask: int) -> set[int]:
        return self.finished.setdefault(subtask, set())

    def suspected(self, subtask: int, attempt: int) -> None:
        """Check a hint: of an attempt that is ready, not over, and not suspected already (H87)."""
        name = f"{subtask}#{attempt}"
        demand(attempt in self._live(subtask) - self._finished(subtask), f"H87: {name} is suspected, and not alive")
        demand((subtask, attempt) not in self.suspects, f"H87: {name} is suspected twice")
        self.suspects.add((subtask, attempt))

    def responsive(self, subtask: int, attempt: int) -> None:
        """Check that a hint is taken back: once, while the attempt is alive (H87)."""
        name = f"{subtask}#{attempt}"
        demand(attempt in self._live(subtask) - self._finished(subtask), f"H87: {name} lives, and was reported over")
        demand((subtask, attempt) in self.suspects, f"H87: {name} lives, and was never suspected")
        self.suspects.discard((subtask, attempt))

    def finish(self, subtask: int, attempt: int) -> None:
        """Check a success: once, of an attempt that has not failed; a later failure revokes it (H17, H86)."""
        demand(attempt not in self._finished(subtask), f"H86: {subtask}#{attempt} finishes twice")
        demand(attempt not in self.failed.get(subtask, set()), f"H86: {subtask}#{attempt} finishes after its failure")
        demand(subtask not in self.reset_owed or self.copies, f"H86: {subtask}#{attempt} finishes before the reset")
        self._finished(subtask).add(attempt)

    def ready(self, subtask: int, attempt: int, beside: set[int]) -> None:
        """Check an announcement. ``beside``: the siblings accepted then; concurrent attempts have no order (H13)."""
        live = self._live(subtask)
        copy = bool(live) or attempt in self.beside.get(subtask, set()) or (self.copies and bool(beside))
        demand(copy or attempt > self.last_ready.get(subtask, -1), f"H2: {subtask}#{attempt} does not rise")
        demand(attempt not in self.failed.get(subtask, set()), f"H11: {subtask}#{attempt} is ready after its failure")
        demand(copy or subtask not in self.reset_owed, f"H10: {subtask}#{attempt} is ready before the reset")
        demand(self.copies or not live, f"H10: {subtask}#{attempt} is ready beside {live}")
        self.last_ready[subtask] = max(attempt, self.last_ready.get(subtask, -1))
        live.add(attempt)

    def failed_attempt(self, subtask: int, attempt: int, accepted: bool, beside: set[int]) -> None:
        """Check a failure. ``beside``: the siblings accepted at that moment; the reset waits for their end (H13).

        An attempt that was never accepted may be reported late, after its successor has arrived (H11).
        """
        demand(self.copies or not (accepted and beside), f"H10: {subtask}#{attempt} failed beside {beside}")
        known = self.failed.setdefault(subtask, set())
        demand(attempt not in known, f"H10: {subtask}#{attempt} failed twice")
        known.add(attempt)
        demand(not self.pending(), f"H45: {subtask}#{attempt} failed while {self.pending()} are pending")
        self._live(subtask).discard(attempt)
        self._finished(subtask).discard(attempt)
        if accepted or not beside:
            self.reset_owed.add(subtask)
            self.beside[subtask] = beside

    def reset(self, subtask: int, checkpoint_id: int) -> None:
        demand(not self._live(subtask), f"H13: {subtask} is reset while {self._live(subtask)} are alive")
        demand(subtask in self.reset_owed, f"H10: {subtask} is reset without a failure")
        self._check_reset(checkpoint_id)
        self.reset_owed.discard(subtask)

    def reset_all(self, checkpoint_id: int) -> None:
        alive = {subtask: live for subtask, live in self.live.items() if live}
        demand(not alive, f"H15: the coordinator is reset while {alive} are alive")
        self._check_reset(checkpoint_id)
        self.reset_owed.clear()
        self.uncommitted = ""

    def _check_reset(self, checkpoint_id: int) -> None:
        expected = -1 if self.batch else self.told_complete
        demand(checkpoint_id == expected, f"H18: reset to {checkpoint_id}, told complete was {expected}")
        demand(not self.pending(), f"H16: reset while {self.pending()} are pending")

    def run_ended(self, run_id: int, succeeded: bool) -> None:
        left = {subtask: live - self._finished(subtask) for subtask, live in self.live.items()}
        demand(not any(left.values()), f"H15: run {run_id} has ended, and {left} are not reported failed")
        missing = [subtask for subtask in range(self.parallelism) if not self._finished(subtask)]
        demand(not (succeeded and missing), f"H86: run {run_id} has succeeded, and {missing} have not finished")
        self.live.clear()
        self.finished.clear()
        self.well[run_id] = succeeded
        if succeeded and not self.batch:
            self.uncommitted = f"run {run_id}"

    def pending(self) -> set[int]:
        return self.asked - self.ended

    def snapshot_asked(self, checkpoint_id: int, savepoint: bool) -> None:
        pending = self.pending()
        demand(checkpoint_id > self.last_asked, f"H43: asked for {checkpoint_id} after {self.last_asked}")
        demand(len(pending) < self.concurrent_max, f"H43: asked for {checkpoint_id} while {pending} are pending")
        for subtask, live in self.live.items():
            one = len(live) < 2 or bool(live & self._finished(subtask))
            demand(one, f"H13: asked for {checkpoint_id} while {subtask} has {live} at the same time")
        self.asked.add(checkpoint_id)
        self.last_asked = checkpoint_id
        if savepoint:
            self.savepoints.add(checkpoint_id)

    def checkpoint_over(self, checkpoint_id: int, completed: bool) -> None:
        demand(checkpoint_id not in self.ended, f"H44: {checkpoint_id} ended twice")
        self.ended.add(checkpoint_id)
        if completed:
            demand(checkpoint_id not in self.savepoints, f"H49: the savepoint {checkpoint_id} was told as complete")
            demand(checkpoint_id in self.asked, f"H40: {checkpoint_id} is complete, and was never asked for")
            demand(checkpoint_id > self.told_complete, f"H4: {checkpoint_id} is complete after {self.told_complete}")
            lower = {other for other in self.pending() - self.savepoints if other < checkpoint_id}
            demand(not lower, f"H43: {checkpoint_id} is complete while {lower} are pending")
            self.told_complete = checkpoint_id
            self.completed.add(checkpoint_id)

    def checkpoint_discarded(self, checkpoint_id: int) -> None:
        """Check a discarded checkpoint: no restart restores it, and its abort was reported before (H64)."""
        aborted = checkpoint_id in self.ended and checkpoint_id not in self.completed
        demand(aborted, f"H64: {checkpoint_id} is discarded, and was not aborted before")
        demand(checkpoint_id not in self.discarded, f"H64: {checkpoint_id} is discarded twice")
        self.discarded.add(checkpoint_id)

    def check_discarded(self) -> None:
        """Check that nothing is in doubt any more at rest."""
        left = self.ended - self.completed - self.discarded - self.savepoints
        demand(not left, f"H64: {sorted(left)} were aborted, and nobody is told that they are discarded")

    def savepoint_over(self, checkpoint_id: int) -> None:
        """Record the end of a savepoint, which only its requester learns (H49)."""
        demand(checkpoint_id not in self.ended, f"H44: {checkpoint_id} ended twice")
        demand(checkpoint_id in self.savepoints, f"H49: {checkpoint_id} ended as a savepoint, and is none")
        self.ended.add(checkpoint_id)

    def event(self, subtask: int, attempt: int) -> None:
        demand(attempt in self._live(subtask), f"H3: an event of {subtask}#{attempt}, which is not alive")


@dataclass
class AttemptRecord:
    """One attempt's events in both directions: those sent and those received (H20, H22, H30, H33).

    ``up_restored``: how many events of its subtask's history were sent before it (H32). What goes up is noted by part,
    each of which has its own positions (H150). ``parts``: their names, by index.
    """

    name: str
    parts: tuple[str, ...] = ("",)
    outside_sent: list[str] = field(default_factory=list)  # to the part outside of checkpoints, which passes the valve
    outside_came: int = 0
    outside_urgent: list[int] = field(default_factory=list)  # how many other events were read before each urgent one
    outside_acted: int = 0  # how many of these were handled
    up_restored: Counter[str] = field(default_factory=Counter)
    down_sent: list[str] = field(default_factory=list)
    down_came: list[str] = field(default_factory=list)
    settled: dict[int, bool] = field(default_factory=dict)
    loose: set[int] = field(default_factory=set)  # places of loss-tolerant events
    urgent: list[int] = field(default_factory=list)  # places of urgent events, ascending
    handles_urgent: bool = False  # otherwise they come as ordinary ones
    came_urgent: int = 0  # how many of these have come,
    begun: int = 0  # and have begun to be handled,
    acted: int = 0  # and have been handled
    came_ordinary: int = 0  # the place of the next ordinary event, if no urgent one follows
    up_sent: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    up_came: Counter[str] = field(default_factory=Counter)
    requests: dict[int, str] = field(default_factory=dict)
    answered: dict[int, str] = field(default_factory=dict)
    resolved: set[int] = field(default_factory=set)
    unrecorded_answers: bool = False  # to requests of a part, or that a request has failed
    cuts: dict[int, tuple[int, set[int]]] = field(default_factory=dict)  # events sent, requests answered at each cut
    barriers: set[int] = field(default_factory=set)  # put into the mailbox
    closed: set[int] = field(default_factory=set)  # the checkpoints that it was notified of
    urgent_read: set[int] = field(default_factory=set)  # items; one after a barrier may be handled later (H79)
    read: int = 0  # events that the task has read, but for those of the part outside of checkpoints,
    read_seq: int = 0  # and the last item among all events that it has read
    over: set[int] = field(default_factory=set)  # of these, the ones whose end it was told
    sent_at: list[float] = field(default_factory=list)  # on the clock that runs while a connection is up
    heard_at: float = 0.0  # when the driver last read something of it, or took a connection of it
    sent_up_at: float = 0.0  # when the task last sent anything
    greeted: int | None = None  # how many events had been sent when ``subtask_ready`` returned (H66)
    lost_at: float | None = None  # when the task lost its connection, while it has none
    connected_since: float | None = None
    connected_s: float = 0.0

    def connected(self, now: float, up: bool) -> None:
        """Record whether a connection is up from now on."""
        self.connected_s = self.connected_for(now)
        self.connected_since = now if up else None

    def connected_for(self, now: float) -> float:
        return self.connected_s + (0.0 if self.connected_since is None else now - self.connected_since)

    def came_down(self, payload: str) -> None:
        """Check an ordinary event that comes into the mailbox: the next one, after the urgent ones before it (H91)."""
        place = self.came_ordinary
        while self.handles_urgent and place in self.urgent:
            place += 1
        self._came(payload, place)
        self.came_ordinary = place + 1
        unbegun = self.urgent[self.begun : self.begun + 1] if self.handles_urgent else []
        text = f"H91: {self.name} may handle event {place}, and urgent event {unbegun} has not begun"
        demand(not unbegun or place < unbegun[0], text)

    def came_urgently(self, payload: str) -> None:
        """Check an urgent event that comes: the next of its kind."""
        demand(self.came_urgent < len(self.urgent), f"H91: {self.name} got {payload} as an urgent event")
        self._came(payload, self.urgent[self.came_urgent])
        self.came_urgent += 1

    def came_outside(self, payload: str) -> None:
        """Check an event for the part outside of checkpoints: the next one for it, wherever the others are (H152)."""
        place, self.outside_came = self.outside_came, self.outside_came + 1
        expected = self.outside_sent[place] if place < len(self.outside_sent) else None
        demand(expected == payload, f"H22: {self.name} got {payload}, not {expected}")

    def _came(self, payload: str, place: int) -> None:
        expected = self.down_sent[place] if place < len(self.down_sent) else None
        demand(expected == payload, f"H22: {self.name} got {payload}, not {expected}")
        self.down_came.append(payload)

    def _may_be_confirmed(self, place: int) -> bool:
        """Whether an event has come, perhaps after an urgent one that is not handled yet."""
        if place < self.read and any(before <= place for before in self.outside_urgent[self.outside_acted :]):
            return True  # it waits for an urgent event of the part outside of checkpoints (H91)
        if not self.handles_urgent:
            return place < len(self.down_came)
        read = max(self.came_urgent, len(self.urgent_read))
        if place in self.urgent:
            return self.urgent.index(place) < read
        waits = any(one < place for one in self.urgent[self.acted : read])
        return place < self.came_ordinary or waits

    def came_up(self, payload: str, position: int) -> None:
        """Check an upward event. ``position``: its place in the history of its part, as the coordinator receives it.

        It is a function of what the part has sent: neither other parts nor any speed have a say in it (H150).
        """
        part = part_in(payload)
        place, sent = self.up_came[part], self.up_sent[part]
        expected = sent[place] if place < len(sent) else None
        demand(expected == payload, f"H30: the coordinator got {payload} of {self.name}, not {expected}")
        self.up_came[part] += 1
        counted = self.up_restored[part] + self.up_came[part]
        demand(position == counted, f"H32: {payload} of {self.name} is at {counted}, not at {position}")

    def resolve_once(self, request_id: int) -> None:
        demand(request_id in self.requests, f"H33: an answer to request {request_id} of {self.name}, never asked")
        demand(request_id not in self.resolved, f"H33: request {request_id} of {self.name} was answered twice")
        self.resolved.add(request_id)

    def resolve(self, request_id: int, error: str, payload: str) -> None:
        """Check an answer that reaches its requester."""
        self.resolve_once(request_id)
        expected = self.answered.get(request_id)
        demand(bool(error) or expected == payload, f"H33: {self.name} is answered {payload}, not {expected}")

    def settle(self, place: int, confirmed: bool) -> None:
        demand(place not in self.settled, f"H21: event {place} of {self.name} was settled twice")
        demand(
            not confirmed or self._may_be_confirmed(place),
            f"H23: event {place} of {self.name} is confirmed, and not in its mailbox",
        )
        self.settled[place] = confirmed

    def cut(self, checkpoint_id: int) -> None:
        self.cuts[checkpoint_id] = len(self.down_sent), set(self.answered)

    def check_drained(self, checkpoint_id: int) -> None:
        """Check that a barrier may leave: every event sent before the cut is confirmed, whenever it was sent (H42)."""
        sent, answered = self.cuts[checkpoint_id]
        open_ones = [place for place in range(sent) if place not in self.loose and not self.settled.get(place)]
        demand(not open_ones, f"H42: {self.name} gets barrier {checkpoint_id}, and {open_ones} are not confirmed")
        open_requests = answered - self.resolved
        demand(not open_requests, f"H42: {self.name} gets barrier {checkpoint_id}, and waits for {open_requests}")

    def meet_barrier(self, checkpoint_id: int) -> None:
        """Check the barrier's place: after every event from before the cut, before every later one (H23, H41)."""
        demand(checkpoint_id not in self.barriers, f"H22: {self.name} meets barrier {checkpoint_id} twice")
        self.barriers.add(checkpoint_id)
        sent, came = self.cuts[checkpoint_id][0], len(self.down_came)
        demand(came == sent, f"H23: {self.name} meets barrier {checkpoint_id} after {came} events, not {sent}")
        self.check_acted(sent, f"meets barrier {checkpoint_id}")

    def check_acted(self, sent: int, what: str) -> None:
        """Check that each urgent event among the first ``sent`` was handled (H92)."""
        urgent = sum(place < sent for place in self.urgent) if self.handles_urgent else 0
        demand(self.acted >= urgent, f"H92: {self.name} {what} after {self.acted} urgent events, not {urgent}")

    def hear(self, message: Downward) -> None:
        """Record a message that the task reads."""
        if isinstance(message, CloseForCheckpoint | BarrierMessage):  # which may be the first sign of it (H79)
            self.closed.add(message.checkpoint_id)
        elif isinstance(message, EventMessage | UrgentEventMessage):
            self._hear_event(message)
        elif isinstance(message, Resumed):
            self.lost_at = None

    def _hear_event(self, event: EventMessage | UrgentEventMessage) -> None:
        urgent, outside = isinstance(event, UrgentEventMessage), self.parts[event.part] == TEAM
        if urgent and not outside:
            self.urgent_read.add(event.seq)
        if event.seq > self.read_seq:
            self.read_seq = event.seq
            self.read += not outside
            if urgent and outside:
                self.outside_urgent.append(self.read)

    def put_in_mailbox(self, item: MailboxItem) -> None:
        match item:
            case MailboxEvent(payload, part):
                text = unpack(payload, self.parts[part])
                (self.came_outside if self.parts[part] == TEAM else self.came_down)(text)
            case MailboxBarrier(checkpoint_id):
                self.meet_barrier(checkpoint_id)
            case MailboxCompleted(checkpoint_id) | MailboxAborted(checkpoint_id):
                self.hear_end(checkpoint_id)

    def begin(self, handled: int) -> None:
        """Check that the operator goes on to its records only after it handled the initial events (H66)."""
        greeted = self.greeted
        demand(greeted is not None, f"H66: {self.name} begins with its records before subtask_ready has returned")
        text = f"H66: {self.name} begins with its records after {handled} events, and subtask_ready sent {greeted}"
        demand(greeted is None or handled >= greeted, text)
        self.check_acted(greeted or 0, "begins with its records")

    def check_patience(self, now: float, frozen_until: float) -> None:
        """Check that a task without a connection ends itself in time (H24), unless it stands still."""
        if self.lost_at is not None and now > frozen_until + SLACK_S:
            demand(now < self.lost_at + RECONNECT_S + SLACK_S, f"H24: {self.name} waits forever for the driver")

    def check_beats(self, now: float, frozen_until: float) -> None:
        """Check that a connected task gives signs of life (H94), unless it stands still. Its looks are a bit late."""
        silent_s = now - max(self.sent_up_at, frozen_until)
        demand(silent_s < 3 * HEARTBEAT_S, f"H94: {self.name} has sent nothing for {silent_s:.3f} s")

    def hear_end(self, checkpoint_id: int) -> None:
        """Check that the task learns the end of each checkpoint that it knows once (H44)."""
        demand(checkpoint_id in self.closed, f"H44: {self.name} hears of the end of {checkpoint_id}, and knows none")
        demand(checkpoint_id not in self.over, f"H44: {self.name} hears twice of the end of {checkpoint_id}")
        self.over.add(checkpoint_id)

    def check_late(self, now: float, timeout_s: float) -> None:
        """Check an attempt given up for an unconfirmed event; a loss-tolerant one is not a reason (H28).

        An answer is a reason even after it arrived: on a cut connection, its confirmation is still under way.
        """
        waited_for = [n for n in range(len(self.down_sent)) if n not in self.loose and not self.settled.get(n)]
        answered = bool(self.answered) or self.unrecorded_answers
        demand(bool(waited_for) or answered, f"H28: {self.name} failed for a loss-tolerant event")
        if not answered:
            waited_s = self.connected_for(now) - self.sent_at[waited_for[0]]
            enough = waited_s >= timeout_s - 1e-6
            demand(enough, f"H24: {self.name} failed for an event that had {waited_s:.3f} s on a connection")

    def silent_for(self, now: float) -> float:
        """For how long the driver has heard nothing of it on its connection."""
        return 0.0 if self.connected_since is None else now - self.heard_at

    def check_silent(self, now: float, timeout_s: float) -> None:
        """Check that an attempt was not given up for its silence too soon (H94)."""
        silent_s = self.silent_for(now)
        demand(silent_s >= timeout_s - 1e-6, f"H94: {self.name} failed after a silence of {silent_s:.3f} s")

    def check_expired(self, place: int, now: float, timeout_s: float) -> None:
        """Check that a timeout did not end the wait for an event too soon (H25, H72)."""
        waited_s = self.connected_for(now) - self.sent_at[place]
        demand(waited_s >= timeout_s - 1e-6, f"H72: event {place} of {self.name} had {waited_s:.3f} s on a connection")

    def check_tolerated(self, now: float, limit_s: float) -> None:
        """Check that no wait for a loss-tolerant event exceeds the limit on a connection (H72)."""
        for place in self.loose - self.settled.keys():
            waits_s = self.connected_for(now) - self.sent_at[place]
            demand(waits_s <= limit_s, f"H72: loss-tolerant event {place} of {self.name} waits for {waits_s:.3f} s")

    def first_to_confirm(self, unread: Iterable[Downward]) -> str:
        """Return the first unread event that may not be lost (H28), or an empty string."""
        events = [
            unpack(message.payload, self.parts[message.part])
            for message in unread
            if isinstance(message, EventMessage | UrgentEventMessage) and self.parts[message.part] != TEAM
        ]
        return next((payload for payload in events if self.down_sent.index(payload) not in self.loose), "")

    def check_all_came_up(self) -> None:
        """Check that a success is reported after everything that the attempt sent (H86)."""
        left = [text for part, sent in self.up_sent.items() for text in sent[self.up_came[part] :]]
        demand(not left, f"H86: {self.name} has finished, and {left} have not come")

    def check_settled(self) -> None:
        waiting = [place for place in range(len(self.down_sent)) if place not in self.settled]
        demand(not waiting, f"H26: events {waiting} of {self.name} were never settled")


def check_whole(name: str, up: list[str], down: list[str], to_send: int) -> None:
    """Check that everything was exchanged, each event once and in order."""
    demand(up == [f"u{i}" for i in range(to_send)], f"exactly once, up, {name}: {up}")
    demand(down == [f"d{i}" for i in range(to_send)], f"exactly once, down, {name}: {down}")
