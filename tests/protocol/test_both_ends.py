# SPDX-License-Identifier: Apache-2.0

"""Exactly once and in order, both ways, over a channel that breaks at any time; see ``both_ends``."""

from __future__ import annotations

import pytest

from protocol.gateway import types as g
from protocol.gateway.machine import GatewayState
from protocol.subtask import types as s
from protocol.wire.messages import HeldEvent
from tests.protocol.both_ends import World


def run_without_checkpoints(seed: int, held: tuple[HeldEvent, ...] = ()) -> World:
    print(f"seed {seed}")
    world = World(seed, held)
    steps = [world.send_down, world.send_up, world.carry_down, world.carry_up, world.take]
    world.connect()
    world.drive_subtask(s.OperatorOpened())
    for step in range(400):
        world.now += world.random.random()
        if step == 20:
            world.drive_gateway(g.ReadyAnnounced())
        if world.random.random() < 0.05:
            (world.lose if world.connected else world.connect)()
        world.random.choice(steps)()
        world.check_order()
    return world


@pytest.mark.parametrize("seed", range(40))
def test_every_event_arrives_once_and_in_order_in_both_directions(seed: int) -> None:
    # H22, H24, H30
    world = run_without_checkpoints(seed)
    world.settle()
    world.check_order()
    assert world.refused == []
    assert world.arrived == world.submitted
    assert world.heard == world.sent_up
    assert world.confirmed == list(range(world.next_event))
    assert world.asked_back == list(range(world.next_request))
    assert world.failed == []
    assert world.reports.count(g.ReportOpened()) == 1
    assert world.subtask.all_confirmed


@pytest.mark.parametrize("seed", range(10))
def test_restored_events_come_first_even_when_they_exceed_the_window(seed: int) -> None:
    # H31, H52
    held = tuple(HeldEvent(place % 3, b"r%d" % place) for place in range(30))
    world = run_without_checkpoints(seed, held)
    world.settle()
    assert world.heard[:30] == [event.payload for event in held]
    assert world.heard == world.sent_up


@pytest.mark.parametrize("seed", range(20))
def test_an_attempt_that_ends_confirms_or_fails_each_event_once(seed: int) -> None:
    # H26
    world = run_without_checkpoints(seed)
    world.drive_gateway(g.AttemptIsOver("killed"))
    assert sorted(world.confirmed + world.failed) == list(range(world.next_event))
    world.drive_gateway(g.EventSubmitted(world.next_event, b"late"))
    assert world.failed[-1] == world.next_event
    assert world.gateway.state is GatewayState.OVER
