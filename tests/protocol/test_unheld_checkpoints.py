# SPDX-License-Identifier: Apache-2.0

"""Checkpoints that hold no events, one machine at a time (H79)."""

from __future__ import annotations

from typing import Any

import pytest

from actors.coordination.engine.coordinator import TakenEvents
from protocol import barrier_tracker as b
from protocol.attempts import AttemptAccepted, SubtaskReady
from protocol.barrier_tracker.pending import Phase
from protocol.barrier_tracker.tracker import BarrierTracker
from protocol.errors import GatewayFull, LocalProtocolError, RemoteProtocolError
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine
from protocol.ids import ExecutionAttempt
from protocol.streams import ConnectionAttached
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire import messages as m
from protocol.wire.framing import WireLimits

ATTEMPT = ExecutionAttempt("words", 2, 0, 7)
CONFIG = b.CheckpointConfig(mode=m.RestoreMode.STREAMING, concurrent_max=2, hold_events=False)


# --- the gateway ----------------------------------------------------------------------------------------------------


def an_open_gateway(window: int = 10, *, bytes_max: int = 1000) -> GatewayMachine:
    limits = g.GatewayLimits(upward_events_max=window, upward_bytes_max=bytes_max)
    gateway = GatewayMachine(ATTEMPT, limits, hold_events=False)
    gateway.handle(ConnectionAttached(0), 0.0)
    tell(gateway, m.Opened(7, 1))
    gateway.handle(g.ReadyAnnounced(), 0.0)
    return gateway


def tell(gateway: GatewayMachine, *messages: Any) -> list[Any]:
    """Give messages of the task to the gateway, and return the effects except confirmations."""
    effects = gateway.handle_batch(messages, 0.0)
    gateway.check_invariants()
    return [effect for effect in effects if not isinstance(getattr(effect, "message", None), m.Confirm)]


def do(machine: Any, *inputs: Any) -> list[Any]:
    effects = [effect for input in inputs for effect in machine.handle(input, 0.0)]
    machine.check_invariants()
    return [effect for effect in effects if not isinstance(getattr(effect, "message", None), m.Confirm)]


def test_the_barrier_follows_what_was_sent_before_the_cut_and_nothing_is_held_after_it() -> None:
    gateway = an_open_gateway()
    effects = do(
        gateway,
        g.EventSubmitted(1, b"before"),
        g.CutReached(5),
        g.EventSubmitted(2, b"after"),
    )
    sent = [type(effect.message) for effect in effects]
    assert sent == [m.EventMessage, m.BarrierMessage, m.EventMessage]
    assert gateway.statistics().held_events == 0
    assert gateway.statistics().closed_for == ()


def test_no_barrier_leaves_for_a_checkpoint_that_was_given_up_before_its_cut() -> None:
    gateway = an_open_gateway()
    assert do(gateway, g.CheckpointOver(5, g.CheckpointOutcome.ABORTED), g.CutReached(5)) == []
    assert [effect.message.checkpoint_id for effect in do(gateway, g.CutReached(6))] == [6]


def test_an_abort_of_a_higher_checkpoint_does_not_keep_the_barrier_of_a_lower_one() -> None:
    gateway = an_open_gateway()
    do(gateway, g.CheckpointOver(6, g.CheckpointOutcome.ABORTED))
    assert [effect.message.checkpoint_id for effect in do(gateway, g.CutReached(5))] == [5]
    assert do(gateway, g.CutReached(6)) == []


def test_a_gateway_that_holds_nothing_is_not_asked_to_close() -> None:
    with pytest.raises(LocalProtocolError, match="begins with its cut"):
        an_open_gateway().handle(g.CloseRequested(5), 0.0)


def test_an_event_says_which_snapshot_came_before_it() -> None:
    gateway = an_open_gateway()
    do(gateway, g.CutReached(5))
    first, acknowledged, second = tell(
        gateway,
        m.EventMessage(7, 2, b"first"),
        m.CheckpointAcknowledged(7, 3, 5, b"state", (), (1,), 1),
        m.RequestMessage(7, 4, 1, b"second"),
    )
    assert first == g.DeliverEvent(2, b"first")
    assert acknowledged == g.ReportAcknowledged(5, b"state", (), (1,))
    assert second == g.DeliverRequest(4, 1, b"second", None, 5)


def flood(gateway: GatewayMachine, first: int, count: int) -> list[Any]:
    """Send ``count`` events, each taken if it is delivered."""
    effects = []
    for seq in range(first, first + count):
        delivered = tell(gateway, m.EventMessage(7, seq, b"%d" % seq))
        effects += delivered
        for effect in delivered:
            do(gateway, g.ItemTaken(effect.seq))
    return effects


def test_a_flood_meets_the_bound_of_what_is_recorded_and_then_the_window() -> None:
    gateway = an_open_gateway(window=3)
    do(gateway, g.CutReached(5))
    assert [effect.seq for effect in flood(gateway, 2, 3)] == [2, 3, 4]
    assert flood(gateway, 5, 3) == []  # put aside
    assert gateway.statistics().untaken_events == 3
    refused = tell(gateway, m.EventMessage(7, 8, b"8"))
    assert refused == [g.DropConnection(f"{ATTEMPT} has sent more than its window allows")]


def test_the_bytes_of_what_is_recorded_are_bounded_too() -> None:
    gateway = an_open_gateway(bytes_max=8)
    do(gateway, g.CutReached(5))
    assert [effect.payload for effect in flood(gateway, 2, 9)] == [b"%d" % n for n in range(2, 10)]
    assert flood(gateway, 11 - 1, 2) == []


def test_what_was_put_aside_is_held_in_the_checkpoint_and_delivered_after_the_snapshot() -> None:
    gateway = an_open_gateway(window=2)
    do(gateway, g.CutReached(5))
    flood(gateway, 2, 2)
    tell(gateway, m.RestoredRequestMessage(7, 4, 6, b"r"), m.EventMessage(7, 5, b"e"))
    ack = m.CheckpointAcknowledged(7, 6, 5, b"state", (m.HeldEvent(2, b"held"),), (9,))
    acknowledged, *delivered = tell(gateway, ack)
    held = (m.HeldEvent(6, b"r", is_request=True), m.HeldEvent(2, b"e"), m.HeldEvent(2, b"held"))
    assert acknowledged == g.ReportAcknowledged(5, b"state", held, (7,))
    assert delivered == [g.DeliverRequest(4, None, b"r", 6, 5), g.DeliverEvent(5, b"e", None, 5)]


def test_what_was_put_aside_comes_when_the_checkpoint_is_given_up() -> None:
    gateway = an_open_gateway(window=2)
    do(gateway, g.CutReached(5))
    flood(gateway, 2, 4)
    effects = do(gateway, g.CheckpointOver(5, g.CheckpointOutcome.ABORTED))
    assert [effect.seq for effect in effects if isinstance(effect, g.DeliverEvent)] == [4, 5]


def test_with_two_checkpoints_an_event_comes_when_neither_is_at_its_bound() -> None:
    gateway = an_open_gateway(window=2)
    do(gateway, g.CutReached(5))
    flood(gateway, 2, 1)
    do(gateway, g.CutReached(6))
    flood(gateway, 3, 2)  # one delivered: 5 has two, and 6 has one
    effects = tell(gateway, m.CheckpointAcknowledged(7, 5, 5, b"", (), (3,)))
    assert [effect.seq for effect in effects if isinstance(effect, g.DeliverEvent)] == [4]  # now 6 has two
    assert flood(gateway, 6, 1) == []


def test_what_was_put_aside_comes_before_the_end_of_a_subtask_is_reported() -> None:
    gateway = an_open_gateway(window=1)
    do(gateway, g.CutReached(5))
    flood(gateway, 2, 1)
    tell(gateway, m.EventMessage(7, 3, b"late"))
    effects = tell(gateway, m.Finished(7, 4, "", b"end", (2,)))
    assert effects == [g.DeliverEvent(3, b"late"), g.ReportFinished("", b"end", (2,))]


def test_what_was_put_aside_cannot_have_been_taken() -> None:
    gateway = an_open_gateway(window=1)
    do(gateway, g.CutReached(5))
    flood(gateway, 2, 1)
    tell(gateway, m.EventMessage(7, 3, b"late"))
    with pytest.raises(LocalProtocolError, match="put aside"):
        gateway.handle(g.ItemTaken(3), 0.0)


# --- the subtask ----------------------------------------------------------------------------------------------------


def an_open_subtask(window: int = 10) -> SubtaskMachine:
    subtask = SubtaskMachine(7, 2, s.SubtaskLimits(window, 1000, 10.0), hold_events=False)
    do(subtask, ConnectionAttached(0), s.OperatorOpened(handles_urgent=True))
    return subtask


def read(subtask: SubtaskMachine, *messages: Any) -> list[Any]:
    effects = subtask.handle_batch(messages, 0.0)
    subtask.check_invariants()
    return [effect for effect in effects if not isinstance(getattr(effect, "message", None), m.Confirm)]


def test_events_leave_while_a_barrier_waits_and_the_snapshot_counts_them() -> None:
    subtask = an_open_subtask()
    assert read(subtask, m.BarrierMessage(7, 1, 5, 0)) == [s.PutInMailbox(s.MailboxBarrier(5))]
    (left,) = do(subtask, s.EventSubmitted(b"u"))
    assert left == s.SendToCoordinator(m.EventMessage(7, 2, b"u"))
    (acknowledged,) = do(subtask, s.SnapshotTaken(5, b"state"))
    assert acknowledged.message == m.CheckpointAcknowledged(7, 3, 5, b"state", (), (1,), 1)


def test_the_ids_of_barriers_must_increase() -> None:
    subtask = an_open_subtask()
    read(subtask, m.BarrierMessage(7, 1, 5, 0))
    with pytest.raises(RemoteProtocolError, match="ids must increase"):
        subtask.handle(s.MessageReceived(m.BarrierMessage(7, 2, 5, 0)), 0.0)


def answers(effects: list[Any]) -> list[int]:
    return [effect.request_id for effect in effects if isinstance(effect, s.ResolveRequest)]


def asking(count: int) -> SubtaskMachine:
    subtask = an_open_subtask()
    for request_id in range(1, count + 1):
        do(subtask, s.RequestSubmitted(request_id, b"?"))
    return subtask


def test_an_answer_does_not_overtake_the_barrier_before_it() -> None:
    subtask = asking(2)
    first, barrier, second = (
        m.AnswerMessage(7, 1, 1, "", b"1"),
        m.BarrierMessage(7, 2, 5, 1),
        m.AnswerMessage(7, 3, 2, "", b"2"),
    )
    assert answers(read(subtask, first, barrier, second)) == [1]
    assert answers(do(subtask, s.SnapshotTaken(5, b""))) == [2]


def test_each_answer_waits_for_the_barriers_before_it_and_for_no_other() -> None:
    """Released only when no barrier is unmet, an answer of before cut 6 would be missing in snapshot 6."""
    subtask = asking(2)
    read(subtask, m.BarrierMessage(7, 1, 5, 0), m.AnswerMessage(7, 2, 1, "", b"1"))
    read(subtask, m.BarrierMessage(7, 3, 6, 2), m.AnswerMessage(7, 4, 2, "", b"2"))
    assert answers(do(subtask, s.SnapshotTaken(5, b""))) == [1]
    assert answers(do(subtask, s.SnapshotRefused(6, "no"))) == [2]


def test_an_answer_does_not_wait_for_a_checkpoint_that_is_over() -> None:
    subtask = asking(1)
    read(subtask, m.BarrierMessage(7, 1, 5, 0), m.AnswerMessage(7, 2, 1, "", b"1"))
    assert answers(read(subtask, m.CheckpointAborted(7, 3, 5))) == [1]


def test_an_urgent_event_behind_a_barrier_is_handled_after_the_snapshot() -> None:  # H91, H92
    subtask = an_open_subtask()
    came = read(
        subtask, m.BarrierMessage(7, 1, 5, 0), m.UrgentEventMessage(7, 2, b"urgent"), m.EventMessage(7, 3, b"e")
    )
    assert came == [s.PutInMailbox(s.MailboxBarrier(5))]
    with pytest.raises(LocalProtocolError, match="waits for a barrier"):
        subtask.handle(s.UrgentBegan(), 0.0)
    assert do(subtask, s.SnapshotTaken(5, b""))[1:] == [s.HandleUrgent(b"urgent")]
    assert do(subtask, s.UrgentBegan()) == [s.PutInMailbox(s.MailboxEvent(b"e"))]


def test_an_urgent_handler_that_a_barrier_waits_for_is_never_refused_for_capacity() -> None:  # H92
    subtask = an_open_subtask(window=1)
    read(subtask, m.UrgentEventMessage(7, 1, b"urgent"))
    do(subtask, s.UrgentBegan(), s.EventSubmitted(b"fills the window"))
    with pytest.raises(GatewayFull):
        subtask.handle(s.EventSubmitted(b"no", in_urgent=True), 0.0)
    read(subtask, m.BarrierMessage(7, 2, 5, 1))
    do(subtask, s.EventSubmitted(b"yes", in_urgent=True), s.UrgentHandled())
    (acknowledged,) = do(subtask, s.SnapshotTaken(5, b""))
    assert acknowledged.message.held == (m.HeldEvent(2, b"yes"),)


# --- the coordinator's record ---------------------------------------------------------------------------------------


def test_what_is_taken_after_the_cut_is_recorded_in_the_name_of_its_first_sender() -> None:
    taken = TakenEvents()
    taken.begin(ATTEMPT, (3,))
    taken.take(ATTEMPT, None, b"before")
    taken.record(5)
    taken.take(ATTEMPT, 6, b"restored", is_request=True)
    taken.record(6)
    taken.take(ATTEMPT, None, b"own")
    taken.take(ATTEMPT, None, b"after the snapshot of 5", after_snapshot=5)
    late = ExecutionAttempt("words", 1, 0, 8)
    taken.begin(late, ())
    taken.take(late, None, b"of an attempt that was not there")
    assert taken.collect(5) == {7: (m.HeldEvent(6, b"restored", is_request=True), m.HeldEvent(2, b"own"))}
    assert taken.collect(6) == {7: (m.HeldEvent(2, b"own"), m.HeldEvent(2, b"after the snapshot of 5"))}
    assert taken.collect(5) == {}


def test_nothing_is_recorded_for_a_checkpoint_that_is_over() -> None:
    taken = TakenEvents()
    taken.begin(ATTEMPT, ())
    taken.record(5)
    taken.drop(5)
    taken.take(ATTEMPT, None, b"e")
    assert taken.collect(5) == {}


# --- the tracker ----------------------------------------------------------------------------------------------------


def a_tracker(limits: WireLimits | None = None, *, apart: bool = False) -> BarrierTracker:
    more: dict[str, Any] = {} if limits is None else {"limits": limits}
    tracker = BarrierTracker("words", 3, CONFIG, barriers_apart=apart, **more)
    do(tracker, AttemptAccepted(ATTEMPT, m.RestoreMode.STREAMING, 0, 0), SubtaskReady(ATTEMPT))
    return tracker


def test_the_coordinator_is_asked_immediately_and_nobody_closes() -> None:
    assert do(a_tracker(), b.CheckpointTriggered(1)) == [b.SnapshotCoordinator(1)]


def test_if_barriers_travel_apart_the_subtasks_are_told_first() -> None:
    tracker = a_tracker(apart=True)
    assert do(tracker, b.CheckpointTriggered(1)) == [b.CloseSubtask(ATTEMPT, 1)]
    assert do(tracker, b.SubtaskClosed(ATTEMPT, 1)) == [b.SnapshotCoordinator(1)]


def test_a_checkpoint_is_stored_with_what_the_coordinator_recorded() -> None:
    """Completed at the acknowledgements, it would be torn: the tail of the stream is still to come."""
    tracker = a_tracker()
    do(tracker, b.CheckpointTriggered(1), b.CoordinatorSnapshotTaken(1, b"c", {7: (4,)}))
    asked = do(tracker, b.SubtaskAcknowledged(ATTEMPT, 1, b"s", (m.HeldEvent(2, b"held"),), (6,)))
    assert asked == [b.CollectRecorded(1)]
    assert tracker.phase is Phase.COLLECTING
    recorded = (m.HeldEvent(2, b"r1"), m.HeldEvent(6, b"r2", is_request=True))
    (stored,) = do(tracker, b.RecordedCollected(1, {7: recorded}))
    part = stored.checkpoint.subtask_states[2]
    assert part == b.SubtaskSnapshot((m.SubtaskState(2, b"s"),), (*recorded, m.HeldEvent(2, b"held")), (4,))


@pytest.mark.parametrize("recorded", [{}, {7: (m.HeldEvent(2, b"1"), m.HeldEvent(2, b"2"), m.HeldEvent(2, b"3"))}])
def test_a_checkpoint_of_which_too_little_or_too_much_was_recorded_is_given_up(recorded: Any) -> None:  # H32
    tracker = a_tracker()
    do(tracker, b.CheckpointTriggered(1), b.CoordinatorSnapshotTaken(1, b"c", {7: (4,)}))
    do(tracker, b.SubtaskAcknowledged(ATTEMPT, 1, b"s", (), (6,)))
    aborted = do(tracker, b.RecordedCollected(1, recorded))[0]
    assert isinstance(aborted, b.NotifyCheckpointAborted)
    assert "had taken 4 at the cut and recorded" in aborted.reason


def test_a_coordinator_that_took_more_than_the_subtask_had_sent_gives_the_checkpoint_up() -> None:  # H32
    tracker = a_tracker()
    do(tracker, b.CheckpointTriggered(1), b.CoordinatorSnapshotTaken(1, b"c", {7: (4,)}))
    aborted = do(tracker, b.SubtaskAcknowledged(ATTEMPT, 1, b"s", (), (3,)))[0]
    assert isinstance(aborted, b.NotifyCheckpointAborted)


def test_a_final_state_that_comes_before_the_cut_settles_the_part() -> None:  # H47
    tracker = a_tracker()
    do(tracker, b.CheckpointTriggered(1))
    assert do(tracker, b.SubtaskFinalState(ATTEMPT, b"end", (5,))) == [b.ReopenSubtask(ATTEMPT, 1)]
    assert do(tracker, b.CoordinatorSnapshotTaken(1, b"c", {7: (3,)})) == [b.CollectRecorded(1)]
    recorded = (m.HeldEvent(2, b"4"), m.HeldEvent(2, b"5"))
    (stored,) = do(tracker, b.RecordedCollected(1, {7: recorded}))
    assert stored.checkpoint.subtask_states[2] == b.SubtaskSnapshot((m.SubtaskState(2, b"end"),), recorded, (3,))


@pytest.mark.parametrize("limits", [WireLimits(held_events_max=1), None], ids=["events", "bytes"])
def test_a_part_that_could_not_be_restored_is_given_up_before_it_is_stored(limits: WireLimits | None) -> None:
    """H62: ``Registered`` has to carry it."""
    tracker = a_tracker(limits)
    do(tracker, b.CheckpointTriggered(1), b.CoordinatorSnapshotTaken(1, b"c", {7: ()}))
    do(tracker, b.SubtaskAcknowledged(ATTEMPT, 1, b"s", (), (2,)))
    recorded = m.HeldEvent(2, b"x" if limits else bytes(64 * 2**20))
    aborted = do(tracker, b.RecordedCollected(1, {7: (recorded, recorded)}))[0]
    assert isinstance(aborted, b.NotifyCheckpointAborted)
    assert "fit into a message" in aborted.reason
    assert tracker.phase is Phase.IDLE
