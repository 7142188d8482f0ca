# SPDX-License-Identifier: Apache-2.0

"""A checkpoint barrier that travels apart from the items: both ends, and what each may rely on."""

from __future__ import annotations

import pytest

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.gateway import types as g
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire import messages as m
from tests.protocol.refusals import refusal, unchanged
from tests.protocol.test_gateway import hear as hear_up
from tests.protocol.test_gateway import sent
from tests.protocol.test_gateway_checkpoints import a_wide_gateway, cut, submit
from tests.protocol.test_subtask import hear
from tests.protocol.test_subtask import sent as subtask_sent
from tests.protocol.test_subtask_checkpoints import a_closed_subtask, mailbox, take_snapshot


def arrive(subtask: SubtaskMachine, checkpoint_id: int, events_before: int) -> list[s.SubtaskEffect]:
    effects = subtask.handle(s.BarrierArrived(checkpoint_id, events_before), 1.0)
    subtask.check_invariants()
    return effects


# --- the gateway ------------------------------------------------------------------------------------------


def test_the_gateway_names_a_loss_tolerant_event_that_is_still_under_way() -> None:
    # H23, H28: the drain does not wait for it, but the barrier must follow it
    gateway = a_wide_gateway(apart=True)
    gateway.handle(g.EventSubmitted(1, b"1", loss_tolerant=True), 1.0)
    assert cut(gateway, 5) == [g.InjectBarrier(5, 1)]


def test_a_barrier_apart_obeys_the_drain_too_and_leaves_once() -> None:  # H40, H42
    gateway = a_wide_gateway(apart=True)
    submit(gateway, 1)
    assert cut(gateway, 5) == []
    assert hear_up(gateway, m.Confirm(7, 1)) == [g.ConfirmEvent(1), g.InjectBarrier(5, 1)]
    assert hear_up(gateway, m.Confirm(7, 2)) == []


def test_the_gateway_opens_at_the_acknowledgement_and_not_when_the_barrier_is_handed_over() -> None:  # H41
    gateway = a_wide_gateway(apart=True)
    assert cut(gateway, 5) == [g.InjectBarrier(5, 0)]
    assert submit(gateway, 1) == []
    effects = hear_up(gateway, m.CheckpointAcknowledged(7, 1, 5, b"", (), (3,)))
    assert effects[0] == g.ReportAcknowledged(5, b"", (), (3,))
    assert m.EventMessage(7, 2, b"1") in sent(effects)


def test_no_barrier_is_handed_over_for_a_checkpoint_that_is_over() -> None:  # H44
    gateway = a_wide_gateway(apart=True)
    submit(gateway, 1)
    cut(gateway, 5)
    gateway.handle(g.CheckpointOver(5, g.CheckpointOutcome.ABORTED), 1.0)
    assert hear_up(gateway, m.Confirm(7, 1)) == [g.ConfirmEvent(1)]


# --- the subtask ------------------------------------------------------------------------------------------


def test_a_barrier_after_its_items_is_put_into_the_mailbox_immediately() -> None:  # H23
    subtask = a_closed_subtask(5)
    hear(subtask, m.EventMessage(7, 2, b"a"))
    assert arrive(subtask, 5, 2) == [s.PutInMailbox(s.MailboxBarrier(5))]
    assert take_snapshot(subtask, 5) == ((), [])


def test_a_barrier_ahead_of_its_items_waits_for_the_last_of_them() -> None:  # H23
    subtask = a_closed_subtask(5)
    assert arrive(subtask, 5, 3) == []
    with pytest.raises(LocalProtocolError, match="which is at closed"):
        take_snapshot(subtask, 5)
    assert mailbox(hear(subtask, m.EventMessage(7, 2, b"a"))) == [s.MailboxEvent(b"a")]
    assert mailbox(hear(subtask, m.EventMessage(7, 3, b"b"))) == [s.MailboxEvent(b"b"), s.MailboxBarrier(5)]
    assert take_snapshot(subtask, 5) == ((), [])


def test_in_one_read_the_barrier_has_its_place_among_the_items() -> None:  # H23
    subtask = a_closed_subtask(5)
    arrive(subtask, 5, 2)
    effects = subtask.handle_batch([m.EventMessage(7, 2, b"a"), m.EventMessage(7, 3, b"b")], 1.0)
    assert mailbox(effects) == [s.MailboxEvent(b"a"), s.MailboxBarrier(5), s.MailboxEvent(b"b")]


def test_a_barrier_may_come_while_no_connection_is_up() -> None:  # H24
    subtask = a_closed_subtask(5)
    subtask.handle(s.ConnectionLost(), 1.0)
    assert arrive(subtask, 5, 1) == [s.PutInMailbox(s.MailboxBarrier(5))]
    subtask.handle(s.SnapshotTaken(5, b"s"), 1.0)
    assert m.CheckpointAcknowledged(7, 3, 5, b"s", (), ()) in subtask_sent(subtask.handle(s.ConnectionAttached(2), 1.0))


@pytest.mark.parametrize("checkpoint_id", [4, 6, -1])
def test_a_barrier_of_an_unknown_checkpoint_is_refused_without_effect(checkpoint_id: int) -> None:
    # H44: it was meant for an earlier attempt, for instance
    subtask = a_closed_subtask(5)
    with unchanged(subtask):
        assert f"checkpoint {checkpoint_id}" in refusal(arrive(subtask, checkpoint_id, 0))


def test_a_barrier_that_comes_after_the_end_of_its_checkpoint_is_refused() -> None:  # H44
    subtask = a_closed_subtask(5)
    hear(subtask, m.CheckpointAborted(7, 2, 5))
    assert refusal(arrive(subtask, 5, 0))


def test_a_checkpoint_that_ends_takes_its_waiting_barrier_away() -> None:  # H44
    subtask = a_closed_subtask(5)
    arrive(subtask, 5, 3)
    hear(subtask, m.CheckpointAborted(7, 2, 5))
    assert mailbox(hear(subtask, m.EventMessage(7, 3, b"a"))) == [s.MailboxEvent(b"a")]


@pytest.mark.parametrize("events_before", [1, 9])
def test_a_barrier_that_comes_twice_is_one(events_before: int) -> None:  # H44
    subtask = a_closed_subtask(5)
    arrive(subtask, 5, events_before)
    with unchanged(subtask):
        assert refusal(arrive(subtask, 5, 0))


def test_a_barrier_cannot_come_both_ways() -> None:
    subtask = a_closed_subtask(5)
    arrive(subtask, 5, 9)
    with pytest.raises(RemoteProtocolError, match="was not asked to close"):
        hear(subtask, m.BarrierMessage(7, 2, 5, 0))


def test_barriers_of_two_checkpoints_may_come_in_any_order() -> None:  # H43
    subtask = a_closed_subtask(5, 6)
    arrive(subtask, 6, 3)
    assert arrive(subtask, 5, 2) == [s.PutInMailbox(s.MailboxBarrier(5))]
    assert mailbox(hear(subtask, m.EventMessage(7, 3, b"a"))) == [s.MailboxEvent(b"a"), s.MailboxBarrier(6)]


def test_a_finished_subtask_meets_no_barrier() -> None:  # H47
    subtask = a_closed_subtask(5, 6)
    arrive(subtask, 5, 9)
    subtask.handle(s.OperatorFinished("", b""), 1.0)
    assert arrive(subtask, 6, 0) == []
    assert mailbox(hear(subtask, m.CloseForCheckpoint(7, 3, 7))) == []


def test_an_attempt_that_is_over_meets_no_barrier() -> None:  # H3
    subtask = a_closed_subtask(5)
    arrive(subtask, 5, 9)
    hear(subtask, m.AttemptEnded(7, "killed"))
    assert arrive(subtask, 5, 0) == []
