"""A user's coordinator, as simple as one can be that would show every lost, doubled or misplaced event."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from tests.simulation.application import Application
from tests.simulation.gateways import Gateway
from tests.simulation.invariant import Log, read_coordinator


@dataclass
class Coordinator:
    """Hands each key numbered events, and keeps a log for each attempt. Resets come with nothing but its own bytes."""

    application: Application
    base: dict[int, Log] = field(default_factory=dict)  # by key: what an attempt would start from
    logs: dict[int, dict[int, dict[int, Log]]] = field(default_factory=dict)  # by subtask and attempt, then by key
    handles: dict[int, dict[int, Gateway]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    loose_sent: dict[int, int] = field(default_factory=dict)  # by task
    snapshots: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        restored = self.application.restored
        if restored is not None:
            self.snapshots[restored.checkpoint_id] = restored.coordinator_state
            self.base = read_coordinator(restored.coordinator_state)[0]

    def base_of(self, key: int) -> Log:
        return self.base.setdefault(key, Log())

    def ready(self, gateway: Gateway) -> None:
        subtask, number = gateway.attempt.subtask, gateway.attempt.attempt
        keys = self.application.keys_of(subtask)
        self.logs.setdefault(subtask, {})[number] = {key: self.base_of(key).copy() for key in keys}
        self.handles.setdefault(subtask, {})[number] = gateway

    def over(self, subtask: int, number: int) -> None:
        self.handles.get(subtask, {}).pop(number, None)

    def finish(self, subtask: int, number: int) -> None:
        """From here on its gateway is dead; what it exchanged stays part of every snapshot until a reset."""
        self.over(subtask, number)
        self.finished.add(subtask)
        self.base.update({key: log.copy() for key, log in self.logs.get(subtask, {}).get(number, {}).items()})

    def snapshot(self, checkpoint_id: int) -> bytes:
        logs: dict[int, list[list[str]]] = {}
        for key in range(self.application.settings.keys):
            subtask = self.application.owner(key)
            handles = self.handles.get(subtask)
            if handles and subtask not in self.finished:
                logs[key] = self.logs[subtask][next(iter(handles))][key].plain()
            else:
                logs[key] = self.base_of(key).plain()
        state = self.snapshots[checkpoint_id] = json.dumps({"logs": logs, "loose": self.loose_sent}).encode()
        return state

    def reset(self, subtask: int, checkpoint_id: int) -> None:
        logs = read_coordinator(self.snapshots[checkpoint_id])[0] if checkpoint_id >= 0 else {}
        self._forget(subtask, logs)

    def reset_all(self, state: bytes | None) -> None:
        logs = {} if state is None else read_coordinator(state)[0]
        for subtask in range(self.application.parallelism):
            self._forget(subtask, logs)

    def _forget(self, subtask: int, logs: dict[int, Log]) -> None:
        self.logs.pop(subtask, None)
        self.handles.pop(subtask, None)
        self.finished.discard(subtask)
        for key in self.application.keys_of(subtask):
            self.base[key] = logs.get(key, Log())
