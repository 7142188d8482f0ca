# SPDX-License-Identifier: Apache-2.0

"""Bugs that the walks over every input found, each as the shortest sequence that shows it."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.attempts.ledger import AttemptLedger
from protocol.barrier_tracker import CheckpointConfig
from protocol.barrier_tracker.tracker import BarrierTracker
from protocol.errors import LocalProtocolError
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine
from protocol.ids import ExecutionAttempt
from protocol.machine import TimePassed
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from tests.protocol.attempts_kit import Playbook, end, job, reg


@pytest.mark.parametrize("since", [0.1, 0.3, 33.1, 1e6 / 3])
def test_what_waits_is_refused_at_the_very_moment_that_the_ledger_names(since: float) -> None:
    # H19: a shell whose clock stands still between two moments would never reach that moment.
    playbook = Playbook()
    playbook.now = since
    playbook.feed(job(0, (1,)), reg(1, 0), job(1, (2,)))
    answers = playbook.feed(reg(2, 0, run=2))
    while 2 in playbook.ledger._operators["words"].record.held:
        before = playbook.now
        deadline = playbook.ledger.next_deadline()
        assert deadline is not None
        playbook.now = deadline
        answers = playbook.feed(TimePassed())
        assert playbook.now > before
    assert "refuse task 2 CONCURRENT_RUN" in answers


@pytest.mark.parametrize("partition", [-1, 4])
def test_the_death_of_a_task_without_a_place_is_not_news_of_any_subtask(partition: int) -> None:
    # H11: Spark uses -1 for a partition that it does not know.
    playbook = Playbook(parallelism=4)
    playbook.feed(job(), reg(1, 0))
    assert playbook.feed(end(2, partition)) == []


@pytest.mark.parametrize(
    "machine",
    [
        AttemptLedger(),
        BarrierTracker("words", 2, CheckpointConfig()),
        GatewayMachine(ExecutionAttempt("words", 2, 1, 7), g.GatewayLimits()),
        SubtaskMachine(7, 2, s.SubtaskLimits(4, 60, 30)),
    ],
    ids=lambda machine: type(machine).__name__,
)
def test_what_is_not_an_input_at_all_is_refused(machine: Any) -> None:
    with pytest.raises(LocalProtocolError, match="not an input of"):
        machine.handle("hello", 1.0)


def test_cuts_come_in_the_order_of_the_ids_also_when_the_higher_one_is_over() -> None:
    # H43: otherwise events held for the higher one block events that may leave, and the lower one never drains.
    gateway = GatewayMachine(ExecutionAttempt("words", 2, 1, 7), g.GatewayLimits())
    for input in (
        g.ConnectionAttached(0),
        g.CloseRequested(4),
        g.CloseRequested(5),
        g.CutReached(5),
        g.CheckpointOver(5, g.CheckpointOutcome.ABORTED),
    ):
        gateway.handle(input, 0.0)
    with pytest.raises(LocalProtocolError, match="the cut of 4 comes after that of 5"):
        gateway.handle(g.CutReached(4), 0.0)
    assert gateway.statistics().closed_for == ()
