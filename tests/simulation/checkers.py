"""Who judges a simulated world. Each checker knows the contract and nothing of the machines."""

from __future__ import annotations

from dataclasses import dataclass, field

END = "end"
"""The last event that a coordinator sends to a subtask."""


class Violation(AssertionError):
    """The contract was broken; the message names the rule."""


def demand(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)


@dataclass
class CallbackOrder:
    """What one coordinator is told, and in which order (H10, H13, H15, H16, H18)."""

    parallelism: int
    batch: bool
    copies: bool  # several attempts of a subtask may be alive at once, or look so when facts are lost
    live: dict[int, set[int]] = field(default_factory=dict)
    last_ready: dict[int, int] = field(default_factory=dict)
    failed: dict[int, set[int]] = field(default_factory=dict)
    beside: dict[int, set[int]] = field(default_factory=dict)
    reset_owed: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    told_complete: int = -1

    def _live(self, subtask: int) -> set[int]:
        return self.live.setdefault(subtask, set())

    def ready(self, subtask: int, attempt: int, beside: set[int]) -> None:
        """``beside``: its siblings that were accepted at that moment; several at once have no order (H13)."""
        live = self._live(subtask)
        copy = bool(live) or attempt in self.beside.get(subtask, set()) or (self.copies and bool(beside))
        demand(copy or attempt > self.last_ready.get(subtask, -1), f"H2: {subtask}#{attempt} does not rise")
        demand(attempt not in self.failed.get(subtask, set()), f"H11: {subtask}#{attempt} is ready after its failure")
        demand(copy or subtask not in self.reset_owed, f"H10: {subtask}#{attempt} is ready before the reset")
        demand(self.copies or not live, f"H10: {subtask}#{attempt} is ready beside {live}")
        self.last_ready[subtask] = max(attempt, self.last_ready.get(subtask, -1))
        live.add(attempt)

    def failed_attempt(self, subtask: int, attempt: int, accepted: bool, beside: set[int]) -> None:
        """``beside``: its siblings that were accepted at that moment; no reset comes before their end (H13).

        One that was never accepted may be told of late, when its successor is there already (H11).
        """
        demand(self.copies or not (accepted and beside), f"H10: {subtask}#{attempt} failed beside {beside}")
        known = self.failed.setdefault(subtask, set())
        demand(attempt not in known, f"H10: {subtask}#{attempt} failed twice")
        known.add(attempt)
        self._live(subtask).discard(attempt)
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

    def _check_reset(self, checkpoint_id: int) -> None:
        expected = -1 if self.batch else self.told_complete
        demand(checkpoint_id == expected, f"H18: reset to {checkpoint_id}, told complete was {expected}")
        demand(self.asked <= self.ended, f"H16: reset while {self.asked - self.ended} are pending")

    def run_ended(self) -> None:
        self.live.clear()

    def snapshot_asked(self, checkpoint_id: int) -> None:
        demand(checkpoint_id not in self.asked, f"H40: asked twice for {checkpoint_id}")
        demand(self.asked <= self.ended, f"H43: asked for {checkpoint_id} while {self.asked - self.ended} are pending")
        self.asked.add(checkpoint_id)

    def checkpoint_over(self, checkpoint_id: int, completed: bool) -> None:
        demand(checkpoint_id not in self.ended, f"H44: {checkpoint_id} ended twice")
        self.ended.add(checkpoint_id)
        if completed:
            demand(checkpoint_id in self.asked, f"H40: {checkpoint_id} is complete, and was never asked for")
            demand(checkpoint_id > self.told_complete, f"H4: {checkpoint_id} is complete after {self.told_complete}")
            self.told_complete = checkpoint_id

    def event(self, subtask: int, attempt: int) -> None:
        demand(attempt in self._live(subtask), f"H3: an event of {subtask}#{attempt}, which is not alive")


@dataclass
class AttemptRecord:
    """One attempt's events, both ways: what was sent, and what came (H20, H22, H30)."""

    name: str
    down_sent: list[str] = field(default_factory=list)
    down_came: list[str] = field(default_factory=list)
    settled: dict[int, bool] = field(default_factory=dict)
    up_sent: list[str] = field(default_factory=list)
    up_came: list[str] = field(default_factory=list)

    def came_down(self, payload: str) -> None:
        place = len(self.down_came)
        expected = self.down_sent[place] if place < len(self.down_sent) else None
        demand(expected == payload, f"H22: {self.name} got {payload}, not {expected}")
        self.down_came.append(payload)

    def came_up(self, payload: str) -> None:
        place = len(self.up_came)
        expected = self.up_sent[place] if place < len(self.up_sent) else None
        demand(expected == payload, f"H30: the coordinator got {payload} of {self.name}, not {expected}")
        self.up_came.append(payload)

    def settle(self, place: int, confirmed: bool) -> None:
        demand(place not in self.settled, f"H21: event {place} of {self.name} was settled twice")
        demand(
            not confirmed or place < len(self.down_came),
            f"H23: event {place} of {self.name} is confirmed, and not in its mailbox",
        )
        self.settled[place] = confirmed

    def check_settled(self) -> None:
        waiting = [place for place in range(len(self.down_sent)) if place not in self.settled]
        demand(not waiting, f"H26: events {waiting} of {self.name} were never settled")


@dataclass
class Log:
    """What one end believes to have been exchanged with one subtask, since the beginning of time."""

    sent: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)

    def copy(self) -> Log:
        return Log(list(self.sent), list(self.received))


def check_channel(name: str, coordinator: Log, subtask: Log, held: list[str]) -> None:
    """The invariant of the contract, for one subtask in one completed checkpoint, both ways."""
    demand(
        coordinator.sent == subtask.received,
        f"invariant, down, {name}: sent {coordinator.sent}, received {subtask.received}",
    )
    demand(
        subtask.sent == coordinator.received + held,
        f"invariant, up, {name}: sent {subtask.sent}, received {coordinator.received}, stored {held}",
    )


def check_whole(name: str, up: list[str], down: list[str], subtask: int, to_send: int) -> None:
    """Everything was exchanged, each event once and in its order."""
    demand(up == [f"{subtask}:u{i}" for i in range(to_send)], f"exactly once, up, {name}: {up}")
    demand(down == [f"d{i}" for i in range(to_send)] + [END], f"exactly once, down, {name}: {down}")
