# SPDX-License-Identifier: Apache-2.0

"""Tests slow, cut and broken networks and tasks in trouble, and that everything that can happen does."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from random import Random

import pytest

from protocol.wire.messages import AttemptEnded, Confirm, RestoreMode
from tests.simulation.jobs import Faults
from tests.simulation.network import Connection
from tests.simulation.troubles import Trap, Troubles
from tests.simulation.world import World

WORLDS_MAX = 400


@dataclass
class At:
    now: float = 0.0


def a_connection(clock: At, *, latency_s: float = 0.0) -> Connection:
    connection = Connection(1, 100)
    Troubles(clock, latency_s).burden(connection)
    return connection


def up(*seqs: int) -> list[Confirm]:
    return [Confirm(100, seq) for seq in seqs]


def send_up(connection: Connection, *seqs: int) -> None:
    for message in up(*seqs):
        connection.send_up(message)


# --- the network --------------------------------------------------------------------------------------------------


def test_a_slow_connection_keeps_the_order() -> None:
    clock = At()
    connection = a_connection(clock, latency_s=0.5)
    send_up(connection, 1)
    clock.now = 0.3
    send_up(connection, 2)
    connection.arrive(clock.now)
    assert not connection.up
    clock.now = 0.5
    connection.arrive(clock.now)
    assert list(connection.up) == up(1)
    assert connection.arrives_at == pytest.approx(0.8)
    connection.arrive(0.8)
    assert list(connection.up) == up(1, 2)


def test_nothing_passes_a_cut_and_nobody_notices_the_end_of_the_other() -> None:
    clock = At(1.0)
    connection = a_connection(clock)
    send_up(connection, 1)
    connection.cut(clock, until=3.0)
    send_up(connection, 2)
    assert list(connection.up) == up(1)
    connection.close_by_task(flush=True)
    assert not connection.task_gone
    connection.arrive(2.9)
    assert not connection.task_gone
    connection.arrive(3.0)
    assert list(connection.up) == up(1, 2)
    assert connection.task_gone


def test_what_was_sent_before_a_short_cut_comes_after_it() -> None:
    clock = At(1.0)
    connection = a_connection(clock)
    connection.cut(clock, until=3.0)
    send_up(connection, 1)
    clock.now = 4.0
    send_up(connection, 2)
    connection.arrive(clock.now)
    assert list(connection.up) == up(1, 2)


def test_one_end_may_find_out_much_later_and_writes_without_success() -> None:
    connection = a_connection(At())
    connection.break_now(Random(0), task_sees_at=2.0)
    assert (connection.task_gone, connection.server_gone) == (True, False)
    send_up(connection, 1)
    assert not connection.up
    connection.arrive(2.0)
    assert connection.server_gone


def test_a_break_loses_the_end_of_what_is_under_way() -> None:
    for seed in range(20):
        connection = a_connection(At(), latency_s=0.5)
        send_up(connection, 1, 2, 3)
        connection.send_down(AttemptEnded(100, "over"))
        connection.break_now(Random(seed))
        connection.arrive(0.5)
        arrived = list(connection.up)
        assert arrived == up(1, 2, 3)[: len(arrived)]
        assert connection.task_gone


# --- every event occurs -------------------------------------------------------------------------------------------

# Events that need two ends at one moment are rarer; test_engine.py covers them.
NAMES = """
fact dropped; fact doubled; dropped facts are reported; outdated look
copy; fetch failure; zombie; two of one number; zombie succeeds; stage resubmitted; stage given up
downstream fetch failure; barrier stage fails
executor lost; ghost; output lost; resubmitted
executor's own fact: before; executor's own fact: between; executor's own fact: after
executor's own fact: late; executor's own fact: never
slow kill; kill too late; end after its job; too many failures; job cancelled; two jobs at a time
the user cancels; the coordinator fails the job; a checkpoint is given up
never registers; crash before it registers; crash; registers twice; forged claim; slow to open
stalled; late snapshot; frozen; unresponsive; operator raises in process
connection breaks; half-open: the task knows later; half-open: the server knows later; network cut
storage: fails; storage: fails after its effect; storage: fails before its effect; storage: a late effect
storage: hangs; storage: out of reach; storage: out of reach after an effect; storage: refuses deletions
"""
HAPPENINGS = {*re.split(r"; |\n", NAMES.strip()), *(f"operator raises in {trap.value}" for trap in Trap)}


def an_unlucky_world(seed: int) -> World:
    """Create a world: half with many checkpoints, half with copies of short tasks that end together if possible."""
    in_batch_mode = seed % 2 == 1  # where no checkpoint knows an input
    world = World(seed, eager=0.0, inputs=0.0) if in_batch_mode else World(seed, eager=0.1)
    world.faults = Faults(drop=0.01, double=0.01, break_connection=0.004, crash=0.02, lose_driver=0.0, budget=60)
    if in_batch_mode:
        checkpoints = replace(world.settings.checkpoints, mode=RestoreMode.BATCH)
        world.to_send, world.growth = 3, 0
        world.settings = replace(
            world.settings, mode=RestoreMode.BATCH, checkpoints=checkpoints, copies=True, barrier_stage=False
        )
    return world


@pytest.mark.long
def test_everything_that_can_befall_a_world_does() -> None:
    missing = set(HAPPENINGS)
    for seed in range(WORLDS_MAX):
        world = an_unlucky_world(seed)
        world.run()
        missing -= world.figures.happenings.keys()
        if not missing:
            return
    raise AssertionError(f"never in {WORLDS_MAX} worlds: {sorted(missing)}")
