"""A user's coordinator, as simple as one can be that would show every lost, doubled or misplaced event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.simulation.checkers import Log
from tests.simulation.gateways import Gateway


@dataclass
class Coordinator:
    """The user's coordinator: hands each subtask numbered events and an end, and keeps a log for each attempt."""

    to_send: int
    base: dict[int, Log] = field(default_factory=dict)
    logs: dict[int, dict[int, Log]] = field(default_factory=dict)
    handles: dict[int, dict[int, Gateway]] = field(default_factory=dict)
    snapshotting: int | None = None

    def log_of(self, subtask: int, attempt: int) -> Log:
        return self.logs[subtask][attempt]

    def base_of(self, subtask: int) -> Log:
        return self.base.setdefault(subtask, Log())

    def state(self) -> dict[str, Any]:
        def plain(log: Log) -> list[list[str]]:
            return [list(log.sent), list(log.received)]

        return {
            "base": {str(s): plain(log) for s, log in self.base.items()},
            "logs": {
                str(s): {str(h.attempt.task_attempt_id): plain(self.logs[s][n]) for n, h in handles.items()}
                for s, handles in self.handles.items()
            },
        }


def log_in(state: dict[str, Any], subtask: int, task_attempt_id: int | None) -> Log:
    """What a coordinator's snapshot says of one subtask, in the life of that attempt."""
    entry = state["logs"].get(str(subtask), {}).get(str(task_attempt_id))
    if entry is None:
        entry = state["base"].get(str(subtask), [[], []])
    return Log(list(entry[0]), list(entry[1]))
