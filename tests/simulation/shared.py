# SPDX-License-Identifier: Apache-2.0

"""The figures of a world."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Totals:
    """Counts of events, over one world or many."""

    worlds: int = 0
    steps: int = 0
    events_down: int = 0
    events_up: int = 0
    events_restored: int = 0
    requests: int = 0
    requests_restored: int = 0
    checkpoints: int = 0
    savepoints: int = 0
    subsumed: int = 0
    final: int = 0
    aborted: int = 0
    refused: int = 0
    barriers_apart: int = 0
    taken_direct: int = 0
    failures: int = 0
    resets: int = 0
    reconnects: int = 0
    jobs: int = 0
    jobs_failed: int = 0
    drivers_lost: int = 0
    restores: int = 0
    uncompleted_restores: int = 0
    rescales: int = 0
    kinds: dict[str, int] = field(default_factory=dict)  # failures of attempts, as reported to the coordinator
    happenings: dict[str, int] = field(default_factory=dict)  # faults and other events of the world

    def count_failure(self, kind: str) -> None:
        self.failures += 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def happen(self, what: str) -> None:
        self.happenings[what] = self.happenings.get(what, 0) + 1

    def add(self, other: Totals) -> None:
        for name, value in vars(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        for mine, others in ((self.kinds, other.kinds), (self.happenings, other.happenings)):
            for name, count in others.items():
                mine[name] = mine.get(name, 0) + count
