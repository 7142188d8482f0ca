"""Every cell of both legality tables, and long random runs in which a refused input must change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import AttemptOver, GatewayFull, LocalProtocolError, RemoteProtocolError
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
    with pytest.raises(LocalProtocolError, match="no input of"):
        make().handle("hello", 1.0)


# --- random runs ------------------------------------------------------------------------------------------

small = st.integers(0, 6)
payloads = st.binary(max_size=40)
ids = st.integers(-1, 6)
task = st.sampled_from([7, 7, 7, 7, 8])

up_messages = st.one_of(
    st.builds(m.Confirm, task, small),
    st.builds(m.Opened, task, small),
    st.builds(m.EventMessage, task, small, payloads),
    st.builds(m.RequestMessage, task, small, small, payloads),
    st.builds(m.ClosedForCheckpoint, task, small, ids),
    st.builds(m.RestoredEventMessage, task, small, small, payloads),
    st.builds(m.RestoredRequestMessage, task, small, small, payloads),
    st.builds(m.CheckpointAcknowledged, task, small, ids, payloads, st.just(()), small),
    st.builds(m.CheckpointDeclined, task, small, ids, st.just("no")),
    st.builds(m.Finished, task, small, st.sampled_from(["", "", "boom"]), payloads, small),
    st.builds(m.Resume, task, st.just("words"), small),
)
down_messages = st.one_of(
    st.builds(m.Confirm, task, small),
    st.builds(m.EventMessage, task, small, payloads),
    st.builds(m.AnswerMessage, task, small, small, st.just(""), payloads),
    st.builds(m.CloseForCheckpoint, task, small, ids),
    st.builds(m.BarrierMessage, task, small, ids, small),
    st.builds(m.CheckpointCompleted, task, small, ids),
    st.builds(m.CheckpointAborted, task, small, ids),
    st.builds(m.SavepointTaken, task, small, ids),
    st.builds(m.Resumed, task, small),
    st.builds(m.AttemptEnded, st.just(8), st.just("x")),
)
gateway_inputs = st.one_of(
    st.builds(g.ConnectionAttached, small),
    st.just(g.ConnectionLost()),
    st.builds(g.MessageReceived, up_messages),
    st.builds(g.MessageReceived, up_messages),
    st.builds(g.EventSubmitted, st.integers(0, 99), payloads, st.booleans()),
    st.builds(g.AnswerSubmitted, small, st.just(""), payloads),
    st.just(g.ReadyAnnounced()),
    st.builds(g.ItemTaken, small),
    st.builds(g.CloseRequested, ids),
    st.builds(g.CutReached, ids),
    st.builds(g.BarrierRequested, ids, st.booleans()),
    st.builds(g.CheckpointOver, ids, st.sampled_from(g.CheckpointOutcome)),
    st.just(g.TimePassed()),
)
subtask_inputs = st.one_of(
    st.builds(s.ConnectionAttached, small),
    st.just(s.ConnectionLost()),
    st.builds(s.MessageReceived, down_messages),
    st.builds(s.MessageReceived, down_messages),
    st.just(s.OperatorOpened()),
    st.builds(s.EventSubmitted, payloads, st.booleans()),
    st.builds(s.RequestSubmitted, small, payloads),
    st.builds(s.BarrierArrived, ids, small),
    st.builds(s.SnapshotTaken, ids, payloads),
    st.builds(s.SnapshotRefused, ids, st.just("no")),
    st.builds(s.OperatorFinished, st.sampled_from(["", "boom"]), payloads),
    st.just(s.TimePassed()),
)


def step(machine: Any, input: Any, now: float) -> list[Any]:
    """One input; whatever the machine says to it, its state is possible, and a refusal has changed
    nothing."""
    before = snapshot(machine)
    try:
        effects: list[Any] = machine.handle(input, now)
    except (GatewayFull, LocalProtocolError, RemoteProtocolError, AttemptOver):
        assert snapshot(machine) == before
        effects = []
    machine.check_invariants()
    confirms = [e for e in effects if isinstance(getattr(e, "message", None), m.Confirm)]
    assert len(confirms) <= 1
    return effects


@settings(max_examples=150)
@given(st.lists(gateway_inputs, max_size=40), st.booleans())
def test_no_run_of_inputs_brings_a_gateway_into_an_impossible_state(inputs: list[Any], start: bool) -> None:
    machine = (
        a_gateway_in(GatewayState.ATTACHED) if start else GatewayMachine(ATTEMPT, g.GatewayLimits(9, 9, 3, 60, 3, 60))
    )
    ended: list[int] = []
    submitted: list[int] = [0] if start else []
    for place, drawn in enumerate(inputs):
        input = replace(drawn, event_id=1000 + place) if isinstance(drawn, g.EventSubmitted) else drawn
        refused = machine.statistics()
        effects = step(machine, input, float(place))
        if isinstance(input, g.EventSubmitted) and (effects or machine.statistics() != refused):
            submitted.append(input.event_id)
        ended += [effect.event_id for effect in effects if isinstance(effect, g.ConfirmEvent | g.FailEvent)]
    effects = step(machine, g.AttemptIsOver("end"), 99.0)
    ended += [effect.event_id for effect in effects if isinstance(effect, g.FailEvent)]
    assert sorted(ended) == submitted  # H26: each is confirmed or failed, once


@settings(max_examples=150)
@given(st.lists(subtask_inputs, max_size=40), st.booleans(), st.lists(payloads, max_size=6))
def test_no_run_of_inputs_brings_a_subtask_into_an_impossible_state(
    inputs: list[Any], start: bool, held: list[bytes]
) -> None:
    restored = tuple(m.HeldEvent(5, payload) for payload in held)
    limits = s.SubtaskLimits(3, 60, 9, snapshot_bytes_max=100, held_events_max=4)
    machine = a_subtask_in(SubtaskStatus.OPEN) if start else SubtaskMachine(7, 2, limits, restored)
    ends = 0
    for place, input in enumerate([*inputs, s.MessageReceived(m.AttemptEnded(7, "end"))]):
        effects = step(machine, input, float(place))
        ends += sum(isinstance(effect, s.EndAttempt) for effect in effects)
    assert ends <= 1
