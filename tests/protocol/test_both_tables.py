# SPDX-License-Identifier: Apache-2.0

"""Every cell of both legality tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import AttemptOver, LocalProtocolError
from protocol.gateway import machine as gateway
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine, GatewayState
from protocol.ids import ExecutionAttempt
from protocol.machine import Reaction
from protocol.subtask import machine as subtask
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine, SubtaskStatus
from protocol.wire import messages as m
from tests.protocol.snapshots import snapshot

ATTEMPT = ExecutionAttempt("words", 2, 1, 7)


def a_gateway_in(state: GatewayState) -> GatewayMachine:
    machine = GatewayMachine(ATTEMPT, g.GatewayLimits(10, 30, 4, 60, 4, 60))
    machine.handle(g.ConnectionAttached(0), 0.0)
    machine.handle_batch([m.EventMessage(7, 1, b"u"), m.RequestMessage(7, 2, 5, b"?")], 0.0)
    machine.handle(g.CloseRequested(3), 0.0)
    machine.handle(g.EventSubmitted(0, b"d"), 0.0)
    if state is GatewayState.DETACHED:
        machine.handle(g.ConnectionLost(), 0.0)
    if state is GatewayState.OVER:
        machine.handle(g.AttemptIsOver("killed"), 0.0)
    assert machine.state is state
    return machine


GATEWAY_INPUTS: list[Any] = [
    g.ConnectionAttached(0),
    g.ConnectionLost(),
    g.MessageReceived(m.Opened(7, 3)),
    g.EventSubmitted(1, b"x"),
    g.AnswerSubmitted(5, "", b"!"),
    g.ReadyAnnounced(),
    g.ItemTaken(0),
    g.CloseRequested(4),
    g.CutReached(3),
    g.BarrierRequested(9),
    g.CheckpointOver(3, g.CheckpointOutcome.COMPLETED),
    g.AttemptIsOver("again"),
    g.TimePassed(),
]


def test_the_gateways_table_has_a_row_for_every_input() -> None:
    assert {type(input) for input in GATEWAY_INPUTS} == set(gateway.LEGAL)


@pytest.mark.parametrize("state", GatewayState)
@pytest.mark.parametrize("input", GATEWAY_INPUTS, ids=lambda input: type(input).__name__)
def test_each_cell_of_the_gateways_table_holds(input: Any, state: GatewayState) -> None:
    machine = a_gateway_in(state)
    before = snapshot(machine)
    effects = machine.handle(input, 1.0)
    machine.check_invariants()
    match gateway.LEGAL[type(input)][list(GatewayState).index(state)]:
        case Reaction.IGNORE:
            assert effects == []
            assert snapshot(machine) == before
        case Reaction.REFUSE:  # H3
            assert [type(effect) for effect in effects] == [g.RefuseMessage]
            assert snapshot(machine) == before
        case Reaction.FAIL:  # H21, H26
            assert [type(effect) for effect in effects] == [g.FailEvent]
            assert snapshot(machine) == before
        case Reaction.ACT:
            assert state is not GatewayState.OVER
            idle = isinstance(input, g.ItemTaken | g.BarrierRequested | g.TimePassed)
            assert (effects == [] and snapshot(machine) == before) == idle


def a_subtask_in(state: SubtaskStatus) -> SubtaskMachine:
    machine = SubtaskMachine(7, 2, s.SubtaskLimits(4, 60, 30))
    machine.handle(s.ConnectionAttached(0), 0.0)
    machine.handle(s.EventSubmitted(b"u"), 0.0)
    if state is not SubtaskStatus.OPENING:
        machine.handle(s.OperatorOpened(), 0.0)
    machine.handle_batch([m.CloseForCheckpoint(7, 1, 3), m.BarrierMessage(7, 2, 3, 0)], 0.0)
    if state is SubtaskStatus.FINISHED:
        machine.handle(s.OperatorFinished("", b""), 0.0)
    if state is SubtaskStatus.OVER:
        machine.handle(s.MessageReceived(m.AttemptEnded(7, "killed")), 0.0)
    assert machine.state is state
    return machine


SUBTASK_INPUTS: list[Any] = [
    s.ConnectionAttached(1),
    s.ConnectionLost(),
    s.MessageReceived(m.CloseForCheckpoint(7, 3, 4)),
    s.OperatorOpened(),
    s.EventSubmitted(b"x"),
    s.RequestSubmitted(5, b"?"),
    s.BarrierArrived(3, 0),
    s.SnapshotTaken(3, b""),
    s.SnapshotRefused(3, "no"),
    s.OperatorFinished("ValueError", b""),
    s.TimePassed(),
]


def test_the_subtasks_table_has_a_row_for_every_input() -> None:
    assert {type(input) for input in SUBTASK_INPUTS} == set(subtask.LEGAL)


@pytest.mark.parametrize("state", SubtaskStatus)
@pytest.mark.parametrize("input", SUBTASK_INPUTS, ids=lambda input: type(input).__name__)
def test_each_cell_of_the_subtasks_table_holds(input: Any, state: SubtaskStatus) -> None:
    machine = a_subtask_in(state)
    before = snapshot(machine)
    reaction = subtask.LEGAL[type(input)][list(SubtaskStatus).index(state)]
    if reaction in (Reaction.ILLEGAL, Reaction.ENDED):
        error = LocalProtocolError if reaction is Reaction.ILLEGAL else AttemptOver
        with pytest.raises(error):
            machine.handle(input, 1.0)
        assert snapshot(machine) == before
        return
    effects = machine.handle(input, 1.0)
    machine.check_invariants()
    match reaction:
        case Reaction.IGNORE:
            assert effects == []
            assert snapshot(machine) == before
        case Reaction.REFUSE:  # H3
            assert [type(effect) for effect in effects] == [s.RefuseMessage]
            assert snapshot(machine) == before
        case _:
            assert (effects == [] and snapshot(machine) == before) == isinstance(input, s.TimePassed)


@pytest.mark.parametrize("make", [lambda: a_gateway_in(GatewayState.OVER), lambda: a_subtask_in(SubtaskStatus.OPEN)])
def test_what_is_no_input_at_all_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(LocalProtocolError, match="not an input of"):
        make().handle("hello", 1.0)
