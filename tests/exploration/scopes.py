"""What is explored: small worlds, each with its budgets. Each is explored completely."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import RestoreMode


@dataclass(frozen=True)
class Scope:
    """One small world.

    ``subtasks``: how many. ``attempts``: how often each may start. ``events_up`` and ``events_down``: how many of each
    subtask's history; an attempt that restores goes on where its checkpoint stands. ``concurrent``: checkpoints that
    may be under way at once. The others are budgets of the whole world: how often a checkpoint or a savepoint is
    asked for, one is given up by request, a task dies, a connection breaks, an event is given up as not confirmed in
    time, a subtask declines its snapshot, the storage fails. ``apart``: barriers go their own way. ``asks``: the last
    upward event wants an answer. ``in_snapshot``: a subtask may send from inside its snapshot. ``finishes``: operators
    that have exchanged everything end well, at any time from then on. ``late``: subtasks that are not yet started at
    the beginning; the others are ready.
    """

    name: str
    about: str
    subtasks: int = 1
    attempts: int = 1
    events_up: int = 1
    events_down: int = 1
    concurrent: int = 1
    checkpoints: int = 1
    savepoints: int = 0
    aborts: int = 0
    failures: int = 0
    drops: int = 0
    timeouts: int = 0
    declines: int = 0
    store_failures: int = 0
    apart: bool = False
    asks: bool = False
    in_snapshot: bool = False
    finishes: bool = False
    late: int = 0
    mode: RestoreMode = RestoreMode.STREAMING

    def __post_init__(self) -> None:
        if self.attempts < 1 + self.failures + self.timeouts:
            raise ValueError(f"scope {self.name}: a subtask may fail for good, and its stage with it")


SCOPES = {
    scope.name: scope
    for scope in (
        Scope("tiny", "one subtask, one checkpoint, an event each way"),
        Scope("tiny-drop", "the same with a broken connection", drops=1),
        Scope("tiny-fail", "the same with a task that dies", attempts=2, failures=1),
    )
}
