# SPDX-License-Identifier: Apache-2.0

"""The rows that a coordinator prepares for its checkpoints and commits on completion, as in a two-phase sink.

``Output`` outlives every driver, as files or database transactions do. At each cut, the coordinator prepares the rows
that came since the last one. They are committed with a checkpoint that covers them, and destroyed when no checkpoint
that may be restored refers to them. A restored checkpoint must find everything that it refers to (H64).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.checkers import demand

Rows = tuple[int, int, int, int]
"""Prepared at the cut of this checkpoint, for this key: from this row on, up to that one."""


@dataclass
class Output:
    """``committed``: how many rows of each key, from the first on, a reader has seen."""

    prepared: set[Rows] = field(default_factory=set)
    done: set[Rows] = field(default_factory=set)
    committed: dict[int, int] = field(default_factory=dict)

    def prepare(self, rows: Rows) -> None:
        self.prepared.add(rows)

    def destroy(self, rows: Rows) -> None:
        self.prepared.discard(rows)

    def commit(self, rows: Rows, whose: str) -> None:
        """Commit the rows; a repetition has no effect."""
        if rows in self.done:
            return
        demand(rows in self.prepared, f"H64: {whose} refers to {rows}, which was destroyed")
        _, key, first, end = rows
        there = self.committed.get(key, 0)
        demand(
            there == first, f"exactly once, output: {whose} commits rows {first} to {end} of key {key} after {there}"
        )
        self.committed[key] = end
        self.prepared.remove(rows)
        self.done.add(rows)

    def check_covered(self, covered: Mapping[int, int], whose: str) -> None:
        """Check that the committed rows are those that this checkpoint covers: more repeat rows, fewer lose them."""
        for key in sorted(self.committed.keys() | covered.keys()):
            there, expected = self.committed.get(key, 0), covered.get(key, 0)
            demand(there == expected, f"exactly once, output: {there} rows of key {key}, and {whose} covers {expected}")

    def begin_again(self, covered: Mapping[int, int], listed: Iterable[Rows]) -> None:
        """Prepare the output for the start that the user has chosen."""
        self.prepared, self.done = set(listed), set()
        self.committed = dict(covered)
        for _, key, first, _ in sorted(self.prepared, reverse=True):
            self.committed[key] = first


class PreparedRows:
    """The coordinator's half: the rows that it has prepared and not yet committed, within the limits of its API.

    ``by_notice``: whether it uses ``notify_checkpoint_discarded``; otherwise it asks for the checkpoints in doubt.
    """

    def __init__(self, output: Output, by_notice: bool) -> None:
        self.output = output
        self.by_notice = by_notice
        self.pending: dict[int, list[Rows]] = {}  # by key, in the order of the cuts
        self.covered: dict[int, int] = {}
        self.dead: set[Rows] = set()
        self.in_doubt: set[int] = set()  # aborted, and not known to be discarded

    # --- state ---

    def snapshot(self, checkpoint_id: int, received: Mapping[int, int]) -> dict[str, Any]:
        """Cut the state. ``received``: how many rows of each key have come."""
        for key, count in received.items():
            first = self.covered.get(key, 0)
            if count > first:
                rows = (checkpoint_id, key, first, count)
                self.output.prepare(rows)
                self.pending.setdefault(key, []).append(rows)
                self.covered[key] = count
        listed = [rows for of_key in self.pending.values() for rows in of_key]
        return {"rows": listed, "covered": self.covered}

    def go_back(self, key: int, state: Mapping[str, Any] | None) -> None:
        """Return the key to this state; rows prepared later are dead."""
        _, covered = read(state)
        self.dead.update(self.pending.pop(key, []))
        self.covered[key] = covered.get(key, 0)

    # --- notifications ---

    def completed(self, checkpoint_id: int, state: Mapping[str, Any]) -> None:
        """Commit the rows that the checkpoint covers. From now on, a reset goes back to it."""
        listed, covered = read(state)
        for rows in listed:
            self.output.commit(rows, f"checkpoint {checkpoint_id}")
        self.output.check_covered(covered, f"checkpoint {checkpoint_id}, which is complete,")
        for key, of_key in self.pending.items():
            self.pending[key] = [rows for rows in of_key if rows not in self.output.done]
        self.in_doubt = {other for other in self.in_doubt if other > checkpoint_id}

    def aborted(self, checkpoint_id: int) -> None:
        self.in_doubt.add(checkpoint_id)

    def discarded(self, checkpoint_id: int) -> None:
        self.in_doubt.discard(checkpoint_id)

    def clean_up(self, in_doubt: Iterable[int]) -> None:
        """Destroy dead rows once nothing can refer to them. ``in_doubt``: as the context reports it."""
        if not (self.in_doubt if self.by_notice else set(in_doubt)):
            for rows in self.dead:
                self.output.destroy(rows)
            self.dead.clear()

    def restored(self, checkpoint_id: int, state: Mapping[str, Any] | None) -> None:
        """Start a new application: commit the rows that the state lists, and destroy rows that no state lists."""
        listed, covered = read(state)
        whose = f"the restored checkpoint {checkpoint_id}"
        for rows in listed:
            self.output.commit(rows, whose)
        self.output.check_covered(covered, whose)
        self.covered = dict(covered)
        self.output.prepared.clear()


def read(state: Mapping[str, Any] | None) -> tuple[list[Rows], dict[int, int]]:
    """Return the state's prepared but uncommitted rows, in order, and how many rows of each key it covers."""
    if state is None:
        return [], {}
    listed = sorted((int(a), int(b), int(c), int(d)) for a, b, c, d in state["rows"])
    return listed, {int(key): count for key, count in state["covered"].items()}
