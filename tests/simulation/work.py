# SPDX-License-Identifier: Apache-2.0

"""The events that a task's operator has exchanged, by key, and the subtask state made of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

from protocol.parts import join_states, split_states
from protocol.wire.messages import Registered
from tests.simulation.application import LOGS, PARTS, TEAM, Application, own_state, unpack, whole_states
from tests.simulation.checkers import AttemptRecord, check_whole, demand
from tests.simulation.inputs import Records
from tests.simulation.invariant import TAIL, Log, merge, merge_tables


@dataclass
class Work:
    """``target``: how many events of each key are to be sent and received before the task may finish.

    ``expected`` are the events still to come at the start, ``submitted`` the events and requests of the subtask's whole
    history, by part (H32, H150), ``loose`` the loss-tolerant events that came, ``items`` the outputs of the work queue
    for this input.
    """

    task_attempt_id: int
    subtask: int
    application: Application
    target: int
    record: AttemptRecord
    logs: dict[int, Log] = field(init=False)
    expected: int = 0
    submitted: Counter[str] = field(default_factory=Counter)  # by part
    loose: int = 0
    items: list[str] = field(default_factory=list)
    counted: int = 0  # items, of all inputs
    part_states: list[dict[str, bytes]] = field(default_factory=list)
    table: dict[str, int] = field(default_factory=dict)  # if tasks have tables: how many events each entry counts
    records: Records | None = None  # if the jobs have inputs; those of a chain of stages are its own

    def __post_init__(self) -> None:
        self.logs = {key: Log() for key in self.application.keys_of(self.subtask)}
        self.table = dict.fromkeys(self.application.entries_of(self.subtask), 0)

    def restore(self, message: Registered) -> None:
        name = f"task {self.task_attempt_id}"
        if self.application.settings.tables:
            self.table |= merge_tables(name, message.states, self.table)
        whole = whole_states(message.states)
        states = [json.loads(own_state(state.state)) for state in whole]
        self.part_states = [split_states(state.state, PARTS)[1] for state in whole]
        for of_parts in self.part_states:
            of_parts.pop(LOGS, None)
        logs = merge(name, states)
        demand(set(logs) <= set(self.logs), f"H52: {name} of keys {list(self.logs)} restores {list(logs)}")
        self.logs.update(logs)
        if self.records is not None:
            self.records.restore([state["records"] for state in states], begins_again=message.input_begins_again)
        self.counted = sum(state["counted"] for state in states)
        if self.records is None:
            self.items = [item for state in states for item in state["items"]]
        elif message.input_begins_again:
            ours = self.records.of_its_input([state["records"] for state in states])
            self.items = [
                item for state, is_ours in zip(states, ours, strict=True) if is_ours for item in state["items"]
            ]
        self.expected = sum(self.target - len(log.received) for log in self.logs.values())
        held = [message.parts[event.part].name for event in message.held]
        same = len(states) == 1 and states[0]["generation"] == self.application.generation
        self.submitted = Counter(states[0]["submitted"] if same else held)
        self.submitted.pop(TEAM, None)  # its positions are in no checkpoint (H152)
        self.record.up_restored = self.submitted - Counter(held)
        for part, event in zip(held, message.held, strict=True):
            self.record.up_sent[part].append(unpack(event.payload, part))

    def sendable(self) -> list[int]:
        """Return the keys that still have an event to send."""
        return [key for key, log in self.logs.items() if len(log.sent) < self.target]

    def state(self, of_parts: dict[str, bytes]) -> bytes:
        state = {
            "subtask": self.subtask,
            "tid": self.task_attempt_id,
            "generation": self.application.generation,
            "submitted": self.submitted,
            "loose": self.loose,
            "tail": {part: sent[-TAIL:] for part, sent in self.record.up_sent.items()},
            "items": self.items,
            "counted": self.counted,
            "logs": {key: log.plain() for key, log in self.logs.items()},
        }
        if self.records is not None:
            state["records"] = self.records.state()
        logs = json.dumps(state).encode()
        if not self.application.settings.tables:
            return join_states(logs, of_parts)
        return join_states(json.dumps(self.table).encode(), {**of_parts, LOGS: logs})

    def count(self) -> None:
        """Count an event in the table."""
        if self.table:
            entries = list(self.table)
            self.table[entries[sum(self.table.values()) % len(entries)]] += 1

    def files(self) -> dict[str, bytes]:
        """What the files of the state contain, by path."""
        if self.application.settings.tables:
            return {entry: json.dumps(count).encode() for entry, count in self.table.items()}
        return {str(key): json.dumps(log.plain()).encode() for key, log in self.logs.items()}

    def is_done(self) -> bool:
        target = self.target
        if self.records is not None and self.records.wanting():
            return False
        return all(len(log.sent) >= target and len(log.received) >= target for log in self.logs.values())

    def check_whole(self) -> None:
        """Check that a successful task exchanged everything, whether or not the engine uses its output."""
        for key, log in self.logs.items():
            check_whole(f"task {self.task_attempt_id}, key {key}", log.sent, log.received, self.target)
