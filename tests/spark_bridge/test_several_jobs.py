# SPDX-License-Identifier: Apache-2.0

"""The warning about an action that runs job after job over an operator, as ``take`` does (H55)."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.attempts import AttemptAccepted, LedgerConfig, RunEnded, RunStarted
from protocol.ids import ExecutionAttempt
from protocol.wire.messages import RestoreMode
from spark_bridge.bridge.actor import BridgeActor
from spark_bridge.observability.journal import OperatorJournal


class Context:
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.log = self
        self.warnings: list[tuple[str, str]] = []

    def warning(self, what: str, *, operator_id: str, hint: str, missing: int = 0) -> None:
        assert "collect()" in hint or ("union()" in hint and missing == 2)
        self.warnings.append((what, operator_id))


def no_relay() -> Any:
    raise AssertionError("nothing asks Spark here")


@pytest.mark.parametrize(
    ("runs", "jobs"),
    [
        ([[0], [1, 2, 3]], 2),  # take(7): one partition, then three more
        ([[0], [1, 2, 3, 4], [5, 6]], 3),
        ([[0], [1]], 2),  # of two partitions
        ([[0], [0], [0]], 1),  # first(), three times
        ([[0]], 1),
        ([[], []], 0),
        ([[0], [], [1, 2, 3]], 1),  # two actions with collect() between them
        ([[0], [1], []], 0),  # then collect()
    ],
)
def test_several_jobs_of_one_action_are_reported_once_and_explained(runs: list[list[int]], jobs: int) -> None:
    """Each run is the subtasks that it computes, none for all of them. H55"""
    bridge, context = BridgeActor(LedgerConfig(), no_relay), Context()
    given: Any = context
    journal = OperatorJournal(0.0)
    warned = 0
    for number, subtasks in enumerate(runs):
        effects: list[Any] = [RunStarted("words", number)]
        effects += [
            AttemptAccepted(ExecutionAttempt("words", one, 0, 100 + one), RestoreMode.BATCH, number, 7)
            for one in subtasks or range(20)
        ]
        effects.append(RunEnded("words", number, True, "", len(subtasks)))
        for effect in effects:
            bridge._see_several_jobs(given, "words", effect)
            journal.observe(effect, 0.0)
        warned = max(warned, journal.jobs.count)
    assert context.warnings == ([("action ran several jobs over operator", "words")] if warned > 1 else [])
    assert journal.jobs.count == jobs


@pytest.mark.parametrize("missing", [0, 2])
def test_a_run_without_some_of_its_subtasks_is_reported(missing: int) -> None:  # H58
    bridge, context = BridgeActor(LedgerConfig(), no_relay), Context()
    given: Any = context
    bridge._see_missing(given, RunEnded("words", 1, True, missing=missing))
    assert context.warnings == ([("run ended without some of its subtasks", "words")] if missing else [])
