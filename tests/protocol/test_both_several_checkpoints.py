# SPDX-License-Identifier: Apache-2.0

"""Both valves over every order in which three checkpoints can open (H43), and what a savepoint opens (H49)."""

from __future__ import annotations

from itertools import permutations

import pytest

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine
from protocol.subtask import types as s
from protocol.wire import messages as m
from tests.protocol import test_gateway_checkpoints as down
from tests.protocol import test_subtask_checkpoints as up
from tests.protocol.refusals import refusal, unchanged
from tests.protocol.test_gateway import hear as hear_up
from tests.protocol.test_gateway import sent as sent_down
from tests.protocol.test_subtask import a_subtask
from tests.protocol.test_subtask import hear as hear_down
from tests.protocol.test_subtask import sent as sent_up

ORDERS = list(permutations((5, 6, 7)))
OUTCOMES = list(g.CheckpointOutcome)


def barriers(effects: list[g.GatewayEffect]) -> list[int]:
    return [message.checkpoint_id for message in sent_down(effects) if isinstance(message, m.BarrierMessage)]


def a_gateway_at_three_barriers() -> GatewayMachine:
    """Cut for 5, 6 and 7 and send nothing between the cuts, so that all three barriers could leave."""
    gateway = down.a_wide_gateway()
    for checkpoint_id in (5, 6, 7):
        assert barriers(down.cut(gateway, checkpoint_id)) == [checkpoint_id]
    assert gateway.statistics().closed_for == (5, 6, 7)  # H41: the gateway does not open when a barrier leaves
    return gateway


def acknowledge(gateway: GatewayMachine, seq: int, checkpoint_id: int) -> list[int]:
    """Return the payloads of the events that this acknowledgement releases."""
    effects = hear_up(gateway, m.CheckpointAcknowledged(7, seq, checkpoint_id, b"", (), ()))
    assert effects[0] == g.ReportAcknowledged(checkpoint_id, b"", (), ())
    return down.ids(sent_down(effects))


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("order", ORDERS)
def test_downward_an_event_leaves_when_its_own_and_all_lower_ones_are_open(
    order: tuple[int, ...], outcome: g.CheckpointOutcome
) -> None:  # H43, R34
    gateway = down.a_wide_gateway()
    held: dict[int, list[int]] = {}
    for checkpoint_id in (5, 6, 7):
        down.cut(gateway, checkpoint_id)
        held[checkpoint_id] = [checkpoint_id * 10, checkpoint_id * 10 + 1]
        down.submit(gateway, *held[checkpoint_id])
    closed = {5, 6, 7}
    waiting = [(n, event_id) for n in held for event_id in held[n]]
    for checkpoint_id in order:
        closed.remove(checkpoint_id)
        left = down.ids(sent_down(gateway.handle(g.CheckpointOver(checkpoint_id, outcome), 1.0)))
        gateway.check_invariants()
        may_leave = [event_id for n, event_id in waiting if not any(other <= n for other in closed)]
        assert left == may_leave
        waiting = [(n, event_id) for n, event_id in waiting if event_id not in may_leave]
    assert waiting == []


@pytest.mark.parametrize("order", ORDERS)
def test_downward_acknowledgements_open_each_their_own_in_any_order(order: tuple[int, ...]) -> None:
    # H41, H43: events after all three cuts wait for all three acknowledgements of this subtask, and no other's
    gateway = a_gateway_at_three_barriers()
    down.submit(gateway, 1, 2)
    assert acknowledge(gateway, 1, order[0]) == []
    assert acknowledge(gateway, 2, order[1]) == []
    assert acknowledge(gateway, 3, order[2]) == [1, 2]
    assert down.submit(gateway, 3) == [3]


def test_downward_a_second_acknowledgement_of_one_checkpoint_opens_no_other() -> None:  # H43, H44
    gateway = a_gateway_at_three_barriers()
    down.submit(gateway, 1)
    acknowledge(gateway, 1, 5)
    effects = hear_up(gateway, m.CheckpointAcknowledged(7, 2, 5, b"", (), ()))
    assert isinstance(effects[0], g.RefuseMessage)
    assert gateway.statistics().closed_for == (6, 7)


def test_downward_an_acknowledgement_of_another_attempt_opens_nothing() -> None:  # H44, G7
    gateway = a_gateway_at_three_barriers()
    down.submit(gateway, 1)
    assert refusal(hear_up(gateway, m.CheckpointAcknowledged(8, 1, 5, b"", (), ())))
    assert gateway.statistics().closed_for == (5, 6, 7)


def test_a_checkpoint_is_known_from_its_request_and_the_higher_one_may_be_over_first() -> None:
    # H43, H44: 6 was aborted before its cut came; 5 goes on
    gateway = down.a_wide_gateway()
    down.cut(gateway, 5)
    down.submit(gateway, 1)
    assert down.cut(gateway, 6) == []  # the events that 5 holds must be confirmed first
    assert down.over(gateway, 6) == []
    assert gateway.handle(g.CutReached(6), 1.0) == []
    assert gateway.statistics().closed_for == (5,)
    assert down.over(gateway, 5) == [1]


# --- up ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_upward_an_event_is_in_every_snapshot_taken_while_it_waits_and_leaves_after_the_last(
    order: tuple[int, ...],
) -> None:
    # H43: it reaches the coordinator after the later snapshots, so it must still be here for the subtask's own
    subtask = up.a_closed_subtask(5, 6, 7)
    for seq, checkpoint_id in enumerate(order, start=4):
        hear_down(subtask, m.BarrierMessage(7, seq, checkpoint_id, 0))
    waiting: list[bytes] = []
    for place, checkpoint_id in enumerate(order):
        waiting.append(b"%d" % place)
        assert up.send(subtask, waiting[-1]) == []
        held, left = up.take_snapshot(subtask, checkpoint_id)
        assert held == tuple(waiting)
        assert left == (waiting if place == 2 else [])


@pytest.mark.parametrize("end", [m.CheckpointAborted, m.CheckpointCompleted, m.SavepointTaken])
@pytest.mark.parametrize("order", ORDERS)
def test_upward_whatever_ends_a_checkpoint_opens_it_alone(
    order: tuple[int, ...], end: type[m.CheckpointAborted | m.CheckpointCompleted | m.SavepointTaken]
) -> None:  # H43, H44, H49
    subtask = up.a_closed_subtask(5, 6, 7)
    up.send(subtask, b"a")
    for place, checkpoint_id in enumerate(order):
        ends: m.DownMessage = end(7, 4 + place, checkpoint_id)
        assert up.events(hear_down(subtask, ends)) == ([b"a"] if place == 2 else [])


def test_upward_nothing_leaves_at_a_snapshot_while_another_checkpoint_is_closed() -> None:
    # H43: it would reach the coordinator after its snapshot 6, and be in none of the subtask's snapshots
    subtask = up.a_closed_subtask(5, 6)
    up.send(subtask, b"a")
    hear_down(subtask, m.BarrierMessage(7, 3, 5, 0))
    assert up.take_snapshot(subtask, 5) == ((b"a",), [])
    assert up.events(hear_down(subtask, m.CheckpointCompleted(7, 4, 5))) == []
    assert subtask.statistics().closed_for == (6,)
    assert up.events(hear_down(subtask, m.EventMessage(7, 5, b"x"))) == []


# --- savepoints complete nothing (H49) ----------------------------------------------------------------------


SAVED = g.CheckpointOutcome.SAVEPOINT


def test_savepoints_and_checkpoints_share_one_sequence_of_ids() -> None:  # H4
    gateway = down.a_wide_gateway()
    down.cut(gateway, 5)
    gateway.handle(g.CheckpointOver(5, SAVED), 1.0)
    with pytest.raises(LocalProtocolError, match="ids must increase"):
        gateway.handle(g.CloseRequested(5), 1.0)
    subtask = up.a_closed_subtask(5)
    hear_down(subtask, m.SavepointTaken(7, 2, 5))
    with pytest.raises(RemoteProtocolError, match="ids must increase"):
        hear_down(subtask, m.CloseForCheckpoint(7, 3, 5))
    hear_down(subtask, m.CloseForCheckpoint(7, 3, 6))


def test_the_operator_hears_nothing_of_the_end_of_a_savepoint() -> None:
    subtask = up.a_closed_subtask(5)
    up.send(subtask, b"a")
    hear_down(subtask, m.BarrierMessage(7, 2, 5, 0))
    assert up.take_snapshot(subtask, 5) == ((b"a",), [b"a"])
    effects = hear_down(subtask, m.SavepointTaken(7, 3, 5))
    assert up.mailbox(effects) == []
    assert sent_up(effects) == []
    assert sent_up(hear_down(subtask, m.CloseForCheckpoint(7, 4, 6))) == [m.ClosedForCheckpoint(7, 5, 6, 4)]


def test_a_valve_that_is_still_closed_opens_and_the_barrier_in_the_mailbox_means_nothing() -> None:  # H44, G5
    subtask = up.a_closed_subtask(5)
    up.send(subtask, b"a")
    hear_down(subtask, m.BarrierMessage(7, 2, 5, 0))
    assert subtask.wants_snapshot(5)
    effects = hear_down(subtask, m.SavepointTaken(7, 3, 5))
    assert up.mailbox(effects) == []
    assert up.events(effects) == [b"a"]
    assert not subtask.wants_snapshot(5)
    with unchanged(subtask):
        assert subtask.handle(s.SnapshotTaken(5, b"late"), 1.0) == []


def test_a_finished_subtask_takes_the_end_of_a_savepoint_calmly() -> None:  # H47
    subtask = a_subtask(limits=up.WIDE)
    subtask.handle(s.OperatorFinished("", b"s"), 1.0)
    hear_down(subtask, m.CloseForCheckpoint(7, 1, 5))
    assert sent_up(hear_down(subtask, m.SavepointTaken(7, 2, 5))) == []
    assert sent_up(hear_down(subtask, m.CloseForCheckpoint(7, 3, 6))) == [m.ClosedForCheckpoint(7, 4, 6, 3)]
