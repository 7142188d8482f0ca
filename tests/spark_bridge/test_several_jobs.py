# SPDX-License-Identifier: Apache-2.0

"""The warning about an action that runs job after job over an operator, as ``take`` does (H55)."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.attempts import LedgerConfig, RunEnded
from spark_bridge.bridge.actor import BridgeActor


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
    ("computed", "warned"),
    [
        ([1, 3], True),  # take(7): one partition, then three more
        ([1, 4, 16], True),
        ([1, 1, 1], False),  # first(), three times
        ([1], False),
        ([0, 0], False),
        ([1, 0, 3], False),  # two actions with collect() between them
    ],
)
def test_several_jobs_of_one_action_are_reported_once(computed: list[int], warned: bool) -> None:
    bridge, context = BridgeActor(LedgerConfig(), no_relay), Context()
    given: Any = context
    for number, count in enumerate(computed):
        bridge._see_several_jobs(given, RunEnded("words", number, True, "", count))
    assert context.warnings == ([("action ran several jobs over operator", "words")] if warned else [])


@pytest.mark.parametrize("missing", [0, 2])
def test_a_run_without_some_of_its_subtasks_is_reported(missing: int) -> None:  # H58
    bridge, context = BridgeActor(LedgerConfig(), no_relay), Context()
    given: Any = context
    bridge._see_missing(given, RunEnded("words", 1, True, missing=missing))
    assert context.warnings == ([("run ended without some of its subtasks", "words")] if missing else [])
