# SPDX-License-Identifier: Apache-2.0

"""The ledger stays readable: to follow one input of a task's life, a reader needs a handful of functions."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from protocol.attempts import LedgerConfig, LedgerInput, OperatorAdded
from protocol.attempts.ledger import AttemptLedger
from protocol.facts import TaskOutcome
from tests.protocol.attempts_kit import end, goodbye, job, job_end, opened, reg, stage, start

STOPS_MAX = 15
SUCCEEDS: list[LedgerInput] = [start(100, 0), reg(100, 0), opened(100), goodbye(100), end(100, 0, TaskOutcome.SUCCESS)]
IS_RETRIED: list[LedgerInput] = [
    start(101, 1),
    reg(101, 1),
    opened(101),
    end(101, 1),
    start(102, 1, number=1),
    reg(102, 1, number=1),
    opened(102),
    goodbye(102),
    end(102, 1, TaskOutcome.SUCCESS, number=1),
]


def functions_that_see(ledger: AttemptLedger, input: LedgerInput) -> list[str]:
    """Return the functions of the protocol through which an input goes, each once, without comprehensions."""
    found: dict[str, None] = {}

    def called(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and "/protocol/attempts/" in code.co_filename and not code.co_name.startswith(("<", "__")):
            found[code.co_qualname] = None

    sys.setprofile(called)
    try:
        ledger.handle(input, 0.0)
    finally:
        sys.setprofile(None)
    return list(found)


def test_an_input_of_a_tasks_life_goes_through_at_most_fifteen_functions() -> None:
    ledger = AttemptLedger(LedgerConfig())
    ledger.handle(OperatorAdded("words", 2), 0.0)
    longest = 0
    inputs: list[LedgerInput] = [job(), stage(tasks=2), *SUCCEEDS, *IS_RETRIED, job_end()]
    for input in inputs:
        functions = functions_that_see(ledger, input)
        assert len(functions) <= STOPS_MAX, (input, functions)
        longest = max(longest, len(functions))
    assert longest > 10, "it counts"
