# SPDX-License-Identifier: Apache-2.0

"""The parts of an operator in both machines and in checkpoints (H150, H152, H154).

Most tables here have three parts: the user's own, ``pages``, and ``permits``, which is outside of checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.barrier_tracker.rescale import refitted, rescaled
from protocol.errors import CheckpointCorrupt, GatewayFull, LocalProtocolError, RemoteProtocolError
from protocol.gateway import types as g
from protocol.gateway.machine import GatewayMachine
from protocol.ids import ExecutionAttempt
from protocol.parts import FILES_OF, PartTable, covers, fewer, join_states, more, positions, states_by_part
from protocol.streams import ConnectionAttached, ConnectionLost, IncomingStream, OutgoingStream
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.wire import messages as m
from protocol.wire.checkpoint_format import StoredCheckpoint, decode_checkpoint, encode_checkpoint
from protocol.wire.messages import PARTS_MAX, HeldEvent, OperatorPart, RestoreMode, SubtaskState
from protocol.wire.state_handles import KeyGroupRange, StateHandle
from tests.protocol.refusals import unchanged
from tests.protocol.test_checkpoint_format import HEADER, body_of, sealed

OWN, PAGES, PERMITS = range(3)
TABLE = PartTable((OperatorPart(""), OperatorPart("pages"), OperatorPart("permits", outside=True)))
ATTEMPT = ExecutionAttempt("words", 2, 0, 7)
GOLDEN = Path(__file__).parents[1] / "golden"
UP = g.GatewayLimits(upward_events_max=2, upward_bytes_max=1000)
DOWN = s.SubtaskLimits(2, 1000, 30.0)


def a_gateway(*, hold_events: bool = True, ready: bool = True, limits: g.GatewayLimits = UP) -> GatewayMachine:
    """A gateway whose peer has opened with item 1."""
    gateway = GatewayMachine(ATTEMPT, limits, hold_events=hold_events, table=TABLE)
    gateway.handle(ConnectionAttached(0), 0.0)
    hear(gateway, m.Opened(7, 1))
    if ready:
        do(gateway, g.ReadyAnnounced())
    return gateway


def a_subtask(
    *, hold_events: bool = True, held: tuple[HeldEvent, ...] = (), events_sent: tuple[int, ...] = ()
) -> SubtaskMachine:
    """A subtask that has opened; its next item is 2, or follows the restored ones."""
    subtask = SubtaskMachine(7, 2, DOWN, held, events_sent, hold_events=hold_events, table=TABLE)
    subtask.handle(ConnectionAttached(0), 0.0)
    do(subtask, s.OperatorOpened(handles_urgent=True))
    return subtask


def plain(effects: list[Any]) -> list[Any]:
    """The effects except confirmations, of messages the messages."""
    said = [getattr(effect, "message", effect) for effect in effects]
    return [one for one in said if not isinstance(one, m.Confirm)]


def do(machine: Any, *inputs: Any) -> list[Any]:
    effects = [effect for input in inputs for effect in machine.handle(input, 0.0)]
    machine.check_invariants()
    return plain(effects)


def hear(machine: Any, *messages: Any) -> list[Any]:
    effects = machine.handle_batch(messages, 0.0)
    machine.check_invariants()
    return plain(effects)


def confirmed_up_to(effects: list[Any]) -> list[int]:
    """What the confirmations among the effects cover."""
    said = [getattr(effect, "message", None) for effect in effects]
    return [one.seq for one in said if isinstance(one, m.Confirm)]


# --- the table ----------------------------------------------------------------------------------------------------


def test_a_table_says_where_each_name_is() -> None:  # H150
    assert [TABLE.index(name) for name in ("", "pages", "permits", "other")] == [0, 1, 2, None]
    assert TABLE.taken_with == (frozenset({0, 1}), frozenset({0, 1}), frozenset({2}))
    assert PartTable(TABLE.parts[:2]).taken_with == (None, None)
    assert PartTable(TABLE.parts, {"pages"}).users == (True, True, False)
    assert TABLE.inside((4, 0, 9)) == (4,)


@pytest.mark.parametrize(
    "names", [(), ("pages",), ("", ""), ("", "a", "a"), ("", *map(str, range(PARTS_MAX)))], ids=len
)
def test_a_table_without_the_users_own_part_or_with_two_of_a_name_or_too_many_is_refused(
    names: tuple[str, ...],
) -> None:
    with pytest.raises(LocalProtocolError, match="its own part and at most 127 others, each with its own name"):
        PartTable([OperatorPart(name) for name in names])


# --- positions ----------------------------------------------------------------------------------------------------

EVENTS = st.lists(st.builds(HeldEvent, st.just(2), st.just(b""), st.booleans(), st.integers(0, 4)), max_size=12)
COUNTS = st.lists(st.integers(0, 9), max_size=5).map(positions)


@given(COUNTS, EVENTS)
def test_positions_count_the_events_of_each_part(sent: tuple[int, ...], events: list[HeldEvent]) -> None:  # H150
    after = more(sent, events)
    counted = Counter(event.part for event in events)
    assert dict(enumerate(after)) | {} == {
        part: (sent[part] if part < len(sent) else 0) + counted[part] for part in range(len(after))
    }
    assert sum(after) == sum(sent) + len(events)
    assert not after or after[-1]
    assert fewer(after, events) == sent
    assert covers(after, sent)
    assert covers(sent, after) == (not events)


@given(COUNTS, COUNTS)
def test_positions_cover_others_if_no_part_is_behind(one: tuple[int, ...], two: tuple[int, ...]) -> None:  # H150
    padded = [(*counts, *(0,) * (5 - len(counts))) for counts in (one, two)]
    assert covers(one, two) == all(mine >= theirs for mine, theirs in zip(*padded, strict=True))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), max_size=8), st.integers(0, 8), st.integers(0, 2))
def test_a_stream_counts_what_is_out_and_what_is_not_taken_by_part(
    items: list[tuple[int, int]], taken: int, part: int
) -> None:  # H150
    outgoing, incoming = OutgoingStream[str](), IncomingStream(3)
    for size, its in items:
        outgoing.append("item", size, None, its)
        incoming.advance(size, its)
    taken = min(taken, len(items))
    outgoing.confirm(taken)
    incoming.take(taken, {part})
    left = [item for place, item in enumerate(items, 1) if place > taken or item[1] != part]
    for its in range(3):
        assert outgoing.counted(its)[0] == sum(one == its for _, one in items[taken:])
        assert incoming.shares[its].bytes == sum(size for size, one in left if one == its)
    first = next((place for place, (_, its) in enumerate(items, 1) if place > taken or its != part), len(items) + 1)
    assert incoming.confirmable_seq == first - 1
    outgoing.check_invariants()
    incoming.check_invariants()


# --- windows of parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [PAGES, PERMITS])
def test_a_full_window_of_one_part_holds_back_no_other_at_the_sender(other: int) -> None:  # H150, H27
    subtask = a_subtask()
    assert do(subtask, *[s.EventSubmitted(b"own")] * 2) == [m.EventMessage(7, seq, b"own") for seq in (2, 3)]
    with unchanged(subtask), pytest.raises(GatewayFull, match="0 events held, 2 unconfirmed"):
        subtask.handle(s.EventSubmitted(b"own"), 0.0)
    with pytest.raises(GatewayFull):
        subtask.handle(s.RequestSubmitted(1, b"own"), 0.0)
    assert do(subtask, s.EventSubmitted(b"", part=other)) == [m.EventMessage(7, 4, b"", other)]
    assert do(subtask, s.RequestSubmitted(1, b"", other)) == [m.RequestMessage(7, 5, 1, b"", other)]
    assert hear(subtask, m.Confirm(7, 2)) == [s.CapacityAvailable()]


def test_each_part_that_was_refused_is_told_once_that_it_may_send() -> None:  # H150, H27
    subtask = a_subtask()
    for part in (OWN, PAGES):
        do(subtask, *[s.EventSubmitted(b"", part=part)] * 2)
        with pytest.raises(GatewayFull):
            subtask.handle(s.EventSubmitted(b"", part=part), 0.0)
    assert hear(subtask, m.Confirm(7, 3)) == [s.CapacityAvailable()]
    assert hear(subtask, m.Confirm(7, 4)) == [s.CapacityAvailable()]
    assert hear(subtask, m.Confirm(7, 5)) == []


def test_open_requests_of_one_part_leave_those_of_another_their_places() -> None:  # H150, H33
    subtask = a_subtask()
    do(subtask, s.RequestSubmitted(1, b""), s.RequestSubmitted(2, b""))
    hear(subtask, m.Confirm(7, 3))
    with pytest.raises(GatewayFull, match="2 open requests"):
        subtask.handle(s.RequestSubmitted(3, b""), 0.0)
    assert len(do(subtask, s.RequestSubmitted(3, b"", PAGES), s.RequestSubmitted(4, b"", PAGES))) == 2
    assert s.CapacityAvailable() in hear(subtask, m.AnswerMessage(7, 1, 1, "", b""))


def test_the_receiver_bounds_each_part_for_itself() -> None:  # H150, H27
    gateway = a_gateway()
    hear(gateway, m.EventMessage(7, 2, b""), m.EventMessage(7, 3, b""))
    assert hear(gateway, m.EventMessage(7, 4, b"", PAGES)) == [g.DeliverEvent(4, b"", part=PAGES)]
    with unchanged(gateway), pytest.raises(RemoteProtocolError, match="more than its window allows"):
        gateway.handle(g.MessageReceived(m.EventMessage(7, 5, b"")), 0.0)
    hear(gateway, m.RequestMessage(7, 5, 1, b"", PERMITS), m.RequestMessage(7, 6, 2, b"", PERMITS))
    do(gateway, g.ItemTaken(6, PERMITS))
    with unchanged(gateway), pytest.raises(RemoteProtocolError, match="more open requests"):
        gateway.handle(g.MessageReceived(m.RequestMessage(7, 7, 3, b"", PERMITS)), 0.0)
    assert hear(gateway, m.RequestMessage(7, 7, 3, b"", PAGES)) == [g.DeliverRequest(7, 3, b"", part=PAGES)]


def test_an_answer_on_its_way_counts_in_the_window_of_its_part_alone() -> None:  # H150, H33
    gateway = a_gateway()
    hear(gateway, m.RequestMessage(7, 2, 1, b"", PAGES), m.RequestMessage(7, 3, 2, b"", PAGES))
    do(gateway, g.ItemTaken(3, PAGES), g.AnswerSubmitted(1, "", b""), g.AnswerSubmitted(2, "", b""))
    with unchanged(gateway), pytest.raises(RemoteProtocolError, match="more open requests"):
        gateway.handle(g.MessageReceived(m.RequestMessage(7, 4, 3, b"", PAGES)), 0.0)
    assert hear(gateway, m.RequestMessage(7, 4, 3, b"")) == [g.DeliverRequest(4, 3, b"")]
    assert hear(gateway, m.Confirm(7, 1)) == []
    assert hear(gateway, m.RequestMessage(7, 5, 4, b"", PAGES)) == [g.DeliverRequest(5, 4, b"", part=PAGES)]


def test_a_held_event_that_waits_for_its_window_lets_those_of_other_parts_leave() -> None:  # H150, H31
    held = [HeldEvent(2, bytes([65 + n]), part=part) for n, part in enumerate((OWN, OWN, OWN, PAGES, OWN, PAGES))]
    subtask = SubtaskMachine(7, 2, DOWN, tuple(held), (), table=TABLE)
    left = plain(subtask.handle(ConnectionAttached(0), 0.0))
    assert [(one.payload, one.part) for one in left] == [(b"A", OWN), (b"B", OWN), (b"D", PAGES), (b"F", PAGES)]
    subtask.check_invariants()
    assert [one.payload for one in hear(subtask, m.Confirm(7, 1))] == [b"C"]
    assert [one.payload for one in hear(subtask, m.Confirm(7, 4))] == [b"E"]


def test_what_a_snapshot_sends_of_one_part_waits_behind_what_waits_of_this_part_alone() -> None:  # H150
    held = tuple(HeldEvent(2, b"%d" % n) for n in range(3))
    subtask = SubtaskMachine(7, 2, DOWN, held, (), hold_events=False, table=TABLE)
    subtask.handle(ConnectionAttached(0), 0.0)
    do(subtask, s.OperatorOpened())
    hear(subtask, m.BarrierMessage(7, 1, 5, 0))
    assert do(subtask, s.EventSubmitted(b"", in_snapshot=True)) == []
    assert do(subtask, s.EventSubmitted(b"p", in_snapshot=True, part=PAGES)) == [m.EventMessage(7, 4, b"p", PAGES)]
    [acknowledged] = do(subtask, s.SnapshotTaken(5, b""))
    assert acknowledged.events_sent == (2, 1)
    assert [one.payload for one in acknowledged.held] == [b"2", b""]


# --- positions in both machines -----------------------------------------------------------------------------------


def test_a_snapshot_says_how_many_events_of_each_part_have_left_in_the_whole_history() -> None:  # H150, H32
    subtask = a_subtask(events_sent=(4, 7))
    do(subtask, s.EventSubmitted(b"", part=PAGES), s.RequestSubmitted(1, b"", PAGES), s.EventSubmitted(b""))
    do(subtask, s.EventSubmitted(b"", part=PERMITS), s.RequestSubmitted(2, b"", PERMITS))
    hear(subtask, m.Confirm(7, 6), m.AnswerMessage(7, 1, 1, "", b""), m.AnswerMessage(7, 2, 2, "", b""))
    hear(subtask, m.CloseForCheckpoint(7, 3, 5), m.BarrierMessage(7, 4, 5, 1))
    do(subtask, s.EventSubmitted(b"held", part=PAGES))
    snapshot, *_ = do(subtask, s.SnapshotTaken(5, b""))
    assert snapshot.events_sent == (5, 9)
    assert snapshot.held == (HeldEvent(2, b"held", part=PAGES),)
    hear(subtask, m.CheckpointCompleted(7, 5, 5))
    assert do(subtask, s.OperatorFinished("", b""))[-1].events_sent == (5, 10)


def test_what_comes_down_goes_to_its_part_however_it_comes() -> None:  # H150
    subtask = a_subtask()
    assert hear(subtask, m.EventMessage(7, 1, b"", PAGES)) == [s.PutInMailbox(s.MailboxEvent(b"", PAGES))]
    assert hear(subtask, m.UrgentEventMessage(7, 2, b"u", PAGES)) == [s.HandleUrgent(b"u", PAGES)]
    assert hear(subtask, m.EventMessage(7, 3, b"later", PAGES)) == []
    assert do(subtask, s.UrgentBegan()) == [s.PutInMailbox(s.MailboxEvent(b"later", PAGES))]
    plain_one = SubtaskMachine(7, 2, DOWN, table=TABLE)
    do(plain_one, ConnectionAttached(0))
    do(plain_one, s.OperatorOpened(handles_urgent=True, parts_without_urgent=frozenset({PAGES})))
    assert hear(plain_one, m.UrgentEventMessage(7, 1, b"u", PAGES)) == [s.PutInMailbox(s.MailboxEvent(b"u", PAGES))]


# --- outside of checkpoints ---------------------------------------------------------------------------------------


def test_an_outside_part_passes_the_closed_valve_of_the_task() -> None:  # H152
    subtask = a_subtask()
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    assert do(subtask, s.EventSubmitted(b"own"), s.EventSubmitted(b"pages", part=PAGES)) == []
    assert do(subtask, s.EventSubmitted(b"now", part=PERMITS)) == [m.EventMessage(7, 3, b"now", PERMITS)]
    assert do(subtask, s.RequestSubmitted(1, b"may I", PERMITS)) == [m.RequestMessage(7, 4, 1, b"may I", PERMITS)]
    assert do(subtask, s.RequestAbandoned(1)) == [m.RequestCancelled(7, 5, 1)]  # it has left, so it is not taken back
    hear(subtask, m.BarrierMessage(7, 2, 5, 1), m.Confirm(7, 5))
    assert do(subtask, s.EventSubmitted(b"too", in_snapshot=True, part=PERMITS))[0].part == PERMITS
    snapshot, *rest = do(subtask, s.SnapshotTaken(5, b""))
    assert [one.part for one in snapshot.held] == [OWN, PAGES]
    assert snapshot.events_sent == ()
    assert [one.payload for one in rest] == [b"own", b"pages"]


@pytest.mark.parametrize("how", [{"in_snapshot": True}, {"in_urgent": True}])
def test_what_an_outside_part_sends_is_bounded_by_its_window_at_all_times(how: dict[str, bool]) -> None:  # H152, H27
    """It never waits for the snapshot, so its sender can."""
    subtask = a_subtask()
    hear(subtask, m.CloseForCheckpoint(7, 1, 5), m.BarrierMessage(7, 2, 5, 1))
    do(subtask, *[s.EventSubmitted(b"", part=PERMITS, **how)] * 2)
    with unchanged(subtask), pytest.raises(GatewayFull):
        subtask.handle(s.EventSubmitted(b"", part=PERMITS, **how), 0.0)


def test_what_a_closed_valve_may_hold_does_not_bound_an_outside_part() -> None:  # H152
    limits = s.SubtaskLimits(9, 1000, 30.0, snapshot_bytes_max=40, held_events_max=1)
    subtask = SubtaskMachine(7, 2, limits, table=TABLE)
    subtask.handle(ConnectionAttached(0), 0.0)
    do(subtask, s.OperatorOpened())
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    do(subtask, s.EventSubmitted(b"held"))
    with pytest.raises(GatewayFull):
        subtask.handle(s.EventSubmitted(b"held", part=PAGES), 0.0)
    assert do(subtask, s.EventSubmitted(b"", part=PERMITS)) == [m.EventMessage(7, 3, b"", PERMITS)]


def closed(*, parts: tuple[int, ...] = ()) -> tuple[GatewayMachine, list[Any]]:
    """A gateway that is closed for checkpoint 5, before whose cut an event of each of these parts was sent."""
    gateway = a_gateway()
    for part in parts:
        do(gateway, g.EventSubmitted(90 + part, b"before", part=part))
    do(gateway, g.CloseRequested(5))
    hear(gateway, m.ClosedForCheckpoint(7, 2, 5))
    return gateway, do(gateway, g.CutReached(5))


@pytest.mark.parametrize("urgent", [False, True])
@pytest.mark.parametrize("tolerant", [False, True])
def test_an_outside_part_passes_the_closed_valve_of_the_gateway(urgent: bool, tolerant: bool) -> None:  # H152
    gateway, _ = closed()
    assert do(gateway, g.EventSubmitted(1, b"own"), g.EventSubmitted(2, b"pages", part=PAGES)) == []
    [left] = do(gateway, g.EventSubmitted(3, b"permit", tolerant, urgent, PERMITS))
    assert left == (m.UrgentEventMessage if urgent else m.EventMessage)(7, 3, b"permit", PERMITS)
    assert hear(gateway, m.Confirm(7, 3)) == [g.ConfirmEvent(3)]
    _, *freed = hear(gateway, m.CheckpointAcknowledged(7, 3, 5, b"", (), (), 3))
    assert [(one.payload, one.part) for one in freed] == [(b"own", OWN), (b"pages", PAGES)]


def test_an_answer_to_an_outside_part_passes_the_closed_valve_and_any_other_is_held() -> None:  # H152, H33
    gateway = a_gateway()
    hear(gateway, m.RequestMessage(7, 2, 1, b"", PAGES), m.RequestMessage(7, 3, 2, b"", PERMITS))
    do(gateway, g.CloseRequested(5))
    hear(gateway, m.ClosedForCheckpoint(7, 4, 5))
    do(gateway, g.CutReached(5))
    assert do(gateway, g.AnswerSubmitted(1, "", b"later")) == []
    assert do(gateway, g.AnswerSubmitted(2, "", b"granted")) == [m.AnswerMessage(7, 3, 2, "", b"granted")]
    assert gateway.statistics().held_events == 1


def test_a_barrier_waits_for_what_was_sent_inside_before_the_cut_and_for_nothing_outside() -> None:  # H152, H42
    _, effects = closed(parts=(PERMITS,))
    assert effects == [m.BarrierMessage(7, 3, 5, 0, 2)]
    gateway, effects = closed(parts=(PAGES, PERMITS))
    assert effects == []
    [confirmed, barrier] = hear(gateway, m.Confirm(7, 1))
    assert confirmed == g.ConfirmEvent(90 + PAGES)
    assert (type(barrier), barrier.events_before) == (m.BarrierMessage, 1)


@pytest.mark.parametrize("apart", [False, True])
def test_an_event_of_an_outside_part_that_is_late_fails_its_attempt_as_any_other(apart: bool) -> None:  # H152, H25
    gateway = GatewayMachine(ATTEMPT, g.GatewayLimits(confirm_timeout_s=1.0), barriers_apart=apart, table=TABLE)
    gateway.handle(ConnectionAttached(0), 0.0)
    gateway.handle(g.EventSubmitted(1, b"", part=PERMITS), 0.0)
    effects = gateway.handle(g.TimePassed(), 1.0)
    assert [type(effect) for effect in effects] == [g.FailAttempt, g.FailEvent]


def recording(window: int = 1) -> GatewayMachine:
    """A gateway that holds nothing, and records for checkpoint 5 what the coordinator takes."""
    gateway = a_gateway(hold_events=False, limits=g.GatewayLimits(upward_events_max=window))
    do(gateway, g.CutReached(5))
    return gateway


def test_an_outside_part_is_neither_put_aside_nor_counted_among_what_is_recorded() -> None:  # H152, H79
    gateway = recording(2)
    assert len(hear(gateway, m.EventMessage(7, 2, b"", PERMITS), m.EventMessage(7, 3, b"", PERMITS))) == 2
    do(gateway, g.ItemTaken(3, PERMITS))
    assert len(hear(gateway, m.EventMessage(7, 4, b"own"), m.EventMessage(7, 5, b"pages", PAGES))) == 2
    do(gateway, g.ItemTaken(5))
    assert hear(gateway, m.EventMessage(7, 6, b"aside", PAGES)) == []
    assert hear(gateway, m.RequestMessage(7, 7, 1, b"permit", PERMITS)) == [
        g.DeliverRequest(7, 1, b"permit", part=PERMITS)
    ]
    acknowledged, delivered = hear(gateway, m.CheckpointAcknowledged(7, 8, 5, b"", (), (1, 2)))
    assert acknowledged == g.ReportAcknowledged(5, b"", (HeldEvent(2, b"aside", part=PAGES),), (1, 1))
    assert delivered == g.DeliverEvent(6, b"aside", None, 5, PAGES)


def test_an_outside_item_is_taken_for_itself_beside_one_that_was_put_aside() -> None:  # H152, H27
    """No confirmation covers what is aside, and what is confirmed later says that both are taken."""
    gateway = recording()
    hear(gateway, m.EventMessage(7, 2, b"own"))
    assert confirmed_up_to(gateway.handle(g.ItemTaken(2), 0.0)) == [2]
    hear(gateway, m.EventMessage(7, 3, b"aside"), m.EventMessage(7, 4, b"", PERMITS))
    with unchanged(gateway), pytest.raises(LocalProtocolError, match="put aside"):
        gateway.handle(g.ItemTaken(4), 0.0)
    assert confirmed_up_to(gateway.handle(g.ItemTaken(4, PERMITS), 0.0)) == []
    assert hear(gateway, m.EventMessage(7, 5, b"", PERMITS)) == [g.DeliverEvent(5, b"", part=PERMITS)]
    hear(gateway, m.CheckpointAcknowledged(7, 6, 5, b"", (), (1,)))
    assert confirmed_up_to(gateway.handle(g.ItemTaken(3), 0.0)) == [4]
    assert confirmed_up_to(gateway.handle(g.ItemTaken(5, PERMITS), 0.0)) == [6]


def test_an_inside_item_that_was_taken_leaves_an_earlier_outside_one_untaken() -> None:  # H152, H27
    gateway = a_gateway()
    hear(gateway, m.EventMessage(7, 2, b"", PERMITS), m.EventMessage(7, 3, b"", PAGES), m.EventMessage(7, 4, b""))
    assert confirmed_up_to(gateway.handle(g.ItemTaken(4), 0.0)) == []
    assert gateway.statistics().untaken_events == 1
    assert confirmed_up_to(gateway.handle(g.ItemTaken(2, PERMITS), 0.0)) == [4]


def test_an_outside_part_waits_for_readiness_as_any_other() -> None:  # H152, H10
    gateway = a_gateway(ready=False)
    assert hear(gateway, m.EventMessage(7, 2, b"", PERMITS)) == []
    with unchanged(gateway), pytest.raises(LocalProtocolError, match="before it was delivered"):
        gateway.handle(g.ItemTaken(2, PERMITS), 0.0)
    assert do(gateway, g.ReadyAnnounced()) == [g.DeliverEvent(2, b"", part=PERMITS)]


def test_after_a_resume_an_outside_item_that_was_taken_early_is_sent_again_and_dropped() -> None:  # H152, H22, H24
    gateway = recording()
    hear(gateway, m.EventMessage(7, 2, b"own"))
    do(gateway, g.ItemTaken(2))
    hear(gateway, m.EventMessage(7, 3, b"aside"), m.EventMessage(7, 4, b"permit", PERMITS))
    do(gateway, g.ItemTaken(4, PERMITS), ConnectionLost(), ConnectionAttached(0))
    assert gateway.resume_seq == 2
    assert hear(gateway, m.EventMessage(7, 3, b"aside"), m.EventMessage(7, 4, b"permit", PERMITS)) == []
    assert hear(gateway, m.EventMessage(7, 5, b"", PERMITS)) == [g.DeliverEvent(5, b"", part=PERMITS)]


def behind_a_barrier() -> SubtaskMachine:
    """A subtask in whose mailbox a barrier waits, of a checkpoint that holds nothing."""
    subtask = a_subtask(hold_events=False)
    do(subtask, s.RequestSubmitted(1, b"", PAGES), s.RequestSubmitted(2, b"", PERMITS))
    hear(subtask, m.BarrierMessage(7, 1, 5, 0))
    return subtask


def test_an_answer_to_an_outside_part_does_not_wait_for_the_snapshot() -> None:  # H152, H79
    subtask = behind_a_barrier()
    assert hear(subtask, m.AnswerMessage(7, 2, 1, "", b"page")) == []
    assert hear(subtask, m.AnswerMessage(7, 3, 2, "", b"permit")) == [s.ResolveRequest(2, "", b"permit")]
    assert s.ResolveRequest(1, "", b"page") in do(subtask, s.SnapshotTaken(5, b""))


def test_an_answer_to_an_abandoned_request_of_an_outside_part_does_not_wait_either() -> None:  # H152, H85
    subtask = behind_a_barrier()
    assert do(subtask, s.RequestAbandoned(2)) == [m.RequestCancelled(7, 4, 2)]
    assert hear(subtask, m.AnswerMessage(7, 2, 2, "nobody waits", b"")) == [s.ResolveRequest(2, "nobody waits", b"")]


def test_an_urgent_event_of_an_outside_part_does_not_wait_for_the_snapshot() -> None:  # H152, H92
    subtask = behind_a_barrier()
    assert hear(subtask, m.UrgentEventMessage(7, 2, b"u", PAGES)) == []
    assert hear(subtask, m.UrgentEventMessage(7, 3, b"now", PERMITS)) == [s.HandleUrgent(b"now", PERMITS)]
    do(subtask, s.UrgentBegan(), s.UrgentHandled())
    with pytest.raises(LocalProtocolError, match="still waits for a barrier"):
        subtask.handle(s.UrgentBegan(), 0.0)
    assert s.HandleUrgent(b"u", PAGES) in do(subtask, s.SnapshotTaken(5, b""))


@pytest.mark.parametrize("kind", ["event", "barrier", "start"])
def test_an_urgent_event_that_overtakes_another_lets_nothing_pass_that_came_after_that_one(kind: str) -> None:
    # H91, H92, H152: the handler of the outside part's event is not the one for which these wait.
    subtask = behind_a_barrier()
    hear(subtask, m.UrgentEventMessage(7, 2, b"first"))
    after: dict[str, Any] = {
        "event": m.EventMessage(7, 3, b"e"),
        "barrier": m.BarrierMessage(7, 3, 6, 0),
        "start": m.StartProcessing(7, 3),
    }
    assert hear(subtask, after[kind], m.UrgentEventMessage(7, 4, b"permit", PERMITS))[-1:] == [
        s.HandleUrgent(b"permit", PERMITS)
    ]
    assert do(subtask, s.UrgentBegan(), s.UrgentHandled()) == []
    assert do(subtask, s.SnapshotTaken(5, b""))[-1] == s.HandleUrgent(b"first")
    mailbox = [one for one in do(subtask, s.UrgentBegan(), s.UrgentHandled()) if isinstance(one, s.PutInMailbox)]
    assert len(mailbox) == 1


@pytest.mark.parametrize("hold_events", [False, True])
def test_an_outside_part_still_sends_after_its_subtask_is_refused_and_nothing_after_it_has_finished(
    hold_events: bool,
) -> None:  # H152, H23
    subtask = a_subtask(hold_events=hold_events)
    hear(subtask, *([m.CloseForCheckpoint(7, 1, 5)] if hold_events else []))
    do(subtask, s.EventSubmitted(b"", part=PERMITS))
    do(subtask, s.OperatorFinished("", b""))
    seq = 2 if hold_events else 1
    [refused] = hear(subtask, m.EventMessage(7, seq, b"", PERMITS))
    assert isinstance(refused, s.RefuseMessage)
    with pytest.raises(LocalProtocolError):
        subtask.handle(s.EventSubmitted(b"", part=PERMITS), 0.0)


# --- what is not of the operator ----------------------------------------------------------------------------------

REFUSED_UP: list[tuple[str, m.UpItem]] = [
    ("sends for part 3", m.EventMessage(7, 2, b"", 3)),
    ("sends for part 127", m.RequestMessage(7, 2, 1, b"", 127)),
    ("sends for part 3", m.RestoredEventMessage(7, 2, 2, b"", 3)),
    ("part that is in no checkpoint", m.RestoredEventMessage(7, 2, 2, b"", PERMITS)),
    ("part that is in no checkpoint", m.RestoredRequestMessage(7, 2, 2, b"", PERMITS)),
    ("a held event of part 3, but", m.CheckpointAcknowledged(7, 2, 5, b"", (HeldEvent(2, b"", part=3),), ())),
    ("part 2, which is outside", m.CheckpointAcknowledged(7, 2, 5, b"", (HeldEvent(2, b"", part=PERMITS),), ())),
    ("positions of 4 parts, but", m.CheckpointAcknowledged(7, 2, 5, b"", (), (0, 0, 0, 1))),
    ("positions of 4 parts, but", m.Finished(7, 2, "", b"", (0, 0, 0, 1))),
]


@pytest.mark.parametrize(("why", "message"), REFUSED_UP, ids=lambda value: value if type(value) is str else "")
@pytest.mark.parametrize("ready", [False, True])
def test_a_gateway_refuses_what_is_of_no_part_of_the_operator(why: str, message: m.UpItem, ready: bool) -> None:
    # H150, H152, H62: it could reach nobody, or make a checkpoint that no restore can read
    gateway = a_gateway(ready=ready)
    do(gateway, g.CloseRequested(5), g.CutReached(5))
    with unchanged(gateway), pytest.raises(RemoteProtocolError, match=why):
        gateway.handle(g.MessageReceived(message), 0.0)


@pytest.mark.parametrize("kind", [m.EventMessage, m.UrgentEventMessage])
def test_a_subtask_refuses_an_event_of_no_part_of_the_operator(kind: Any) -> None:  # H150, H62
    subtask = a_subtask()
    with unchanged(subtask), pytest.raises(RemoteProtocolError, match="for part 3, but there are 3"):
        subtask.handle(s.MessageReceived(kind(7, 1, b"", 3)), 0.0)


@pytest.mark.parametrize(
    ("held", "sent", "why"),
    [
        ((HeldEvent(2, b"", part=3),), (), "restore a held event of part 3, but there are 3"),
        ((HeldEvent(2, b"", part=PERMITS),), (), "part 2, which is outside of checkpoints"),
        ((), (1, 1, 0, 1), "positions of 4 parts, but there are 3"),
    ],
)
def test_a_subtask_does_not_begin_with_what_is_of_no_part(held: Any, sent: Any, why: str) -> None:  # H150, H152
    with pytest.raises(RemoteProtocolError, match=why):
        SubtaskMachine(7, 2, DOWN, held, sent, table=TABLE)


# --- both machines together ---------------------------------------------------------------------------------------


class Pair:
    """Both ends of one attempt, and what each part must see. The user's parts take their events at random moments."""

    def __init__(self, hold_events: bool, apart: bool) -> None:
        self.gateway = GatewayMachine(ATTEMPT, UP, hold_events=hold_events, barriers_apart=apart, table=TABLE)
        self.subtask = SubtaskMachine(7, 2, DOWN, hold_events=hold_events, table=TABLE)
        self.closes = hold_events or apart
        self.up: list[Any] = []
        self.down: list[Any] = []
        self.apart: list[s.BarrierArrived] = []
        self.untaken: list[tuple[int, int]] = []
        self.mail: list[Any] = []
        self.went_up = self.went_down = 0
        self.sent_up, self.got_up, self.at_cut, self.at_snapshot = [[0, 0, 0] for _ in range(4)]
        self.sent_down, self.got_down = [[0, 0, 0] for _ in range(2)]
        self.next_checkpoint, self.pending = 5, 0
        self.attach()
        self.tell_subtask(s.OperatorOpened())
        self.flow()
        self.tell_gateway(g.ReadyAnnounced())

    def attach(self) -> None:
        self.up, self.down = [], []
        received = self.subtask.resume_seq, self.gateway.resume_seq
        self.tell_gateway(ConnectionAttached(received[0]))
        self.tell_subtask(ConnectionAttached(received[1]))

    def tell_gateway(self, *inputs: Any) -> None:
        for input in inputs:
            effects = self.gateway.handle(input, 0.0)
            self.gateway.check_invariants()
            for effect in effects:
                match effect:
                    case g.SendToAttempt(message):
                        self.down.append(message)
                    case g.InjectBarrier(checkpoint_id, before):
                        self.apart.append(s.BarrierArrived(checkpoint_id, before))
                    case g.DeliverEvent(seq, payload, _, _, part):
                        assert payload == b"%d" % self.got_up[part], "out of order, or not once"
                        self.got_up[part] += 1
                        self.untaken.append((seq, part))
                    case g.ReportAcknowledged(checkpoint_id, _, held, sent):
                        assert checkpoint_id == self.pending
                        self.judge(held, sent)
                    case g.RefuseMessage(why):
                        raise AssertionError(why)
            if any(isinstance(effect, g.ReportAcknowledged) for effect in effects):
                done, self.pending = self.pending, 0
                self.tell_gateway(g.CheckpointOver(done, g.CheckpointOutcome.COMPLETED))

    def judge(self, held: tuple[HeldEvent, ...], sent: tuple[int, ...]) -> None:
        """A snapshot says of each part inside what it has sent, and its cut has the same or is followed by the rest."""
        assert all(not TABLE.outside[event.part] for event in held)
        cut, after = positions(self.at_cut[:PERMITS]), more(sent, held)
        assert len(after) <= PERMITS
        assert after == positions(self.at_snapshot[:PERMITS]), "an event is in neither half"
        assert covers(sent, cut)
        if self.subtask._outbound.hold_events:
            assert sent == cut, "the two halves differ"

    def tell_subtask(self, *inputs: Any) -> None:
        for input in inputs:
            effects = self.subtask.handle(input, 0.0)
            self.subtask.check_invariants()
            for effect in effects:
                match effect:
                    case s.SendToCoordinator(message):
                        self.up.append(message)
                    case s.PutInMailbox(item):
                        self.mail.append(item)
                    case s.RefuseMessage(why):
                        raise AssertionError(why)

    # --- steps ---

    def send_up(self, part: int) -> None:
        count, was_closed = len(self.up), bool(self.subtask.statistics().closed_for)
        try:
            self.tell_subtask(s.EventSubmitted(b"%d" % self.sent_up[part], part=part))
        except GatewayFull:
            return
        self.sent_up[part] += 1
        if TABLE.outside[part]:
            assert len(self.up) == count + 1, "held, though it is outside"
        elif was_closed:
            assert len(self.up) == count, "left, though the valve is closed"

    def send_down(self, part: int) -> None:
        count = len(self.down)
        self.tell_gateway(g.EventSubmitted(self.went_down, b"%d" % self.sent_down[part], part=part))
        self.went_down += 1
        self.sent_down[part] += 1
        closed_now = self.gateway.statistics().closed_for
        assert (len(self.down) > count) == (TABLE.outside[part] or not closed_now)

    def take(self) -> None:
        if self.untaken:
            seq, part = self.untaken.pop(0)
            self.tell_gateway(g.ItemTaken(seq, part))

    def work(self) -> None:
        """The operator takes its next item."""
        if not self.mail:
            return
        match self.mail.pop(0):
            case s.MailboxEvent(payload, part):
                assert payload == b"%d" % self.got_down[part], "out of order, or not once"
                self.got_down[part] += 1
            case s.MailboxBarrier(checkpoint_id):
                self.at_snapshot = list(self.sent_up)
                self.tell_subtask(s.SnapshotTaken(checkpoint_id, b""))

    def cut(self) -> None:
        if self.pending or self.untaken:
            return
        self.pending, self.next_checkpoint = self.next_checkpoint, self.next_checkpoint + 1
        if self.closes:
            self.tell_gateway(g.CloseRequested(self.pending))
            self.flow()  # the tracker cuts when each subtask has closed
            while self.untaken:
                self.take()
        self.at_cut = list(self.got_up)
        self.tell_gateway(g.CutReached(self.pending))

    def flow(self) -> None:
        while self.up or self.down:
            self.read_up()
            self.read_down()

    def read_up(self) -> None:
        if self.up:
            self.tell_gateway(g.MessageReceived(self.up.pop(0)))

    def read_down(self) -> None:
        if self.down:
            self.tell_subtask(s.MessageReceived(self.down.pop(0)))

    def meet_apart(self) -> None:
        if self.apart:
            self.tell_subtask(self.apart.pop(0))

    def reconnect(self) -> None:
        self.tell_gateway(ConnectionLost())
        self.tell_subtask(ConnectionLost())
        self.attach()

    def end(self) -> None:
        """Everything arrives, whatever happened."""
        for _ in range(200):
            self.flow()
            self.meet_apart()
            self.take()
            self.work()
        assert not self.pending, "the checkpoint never ends"
        assert self.got_up == self.sent_up
        assert self.got_down == self.sent_down
        assert self.gateway.statistics().untaken_events == self.subtask.statistics().unconfirmed_events == 0


STEPS: list[Callable[[Pair], None]] = [
    *[lambda pair, part=part: pair.send_up(part) for part in range(3)],
    *[lambda pair, part=part: pair.send_down(part) for part in range(3)],
    *(Pair.take, Pair.work, Pair.cut, Pair.read_up, Pair.read_down, Pair.meet_apart, Pair.reconnect),
]


@given(st.booleans(), st.booleans(), st.lists(st.integers(0, len(STEPS) - 1), max_size=60))
def test_each_part_gets_its_events_once_and_in_order_and_its_own_positions(
    hold_events: bool, apart: bool, steps: list[int]
) -> None:
    """H150, H152: whatever the order of two checkpoints, sends, losses of connections and takes, of three parts."""
    pair = Pair(hold_events, apart)
    for step in steps:
        STEPS[step](pair)
    pair.end()


# --- checkpoints --------------------------------------------------------------------------------------------------


def checkpoint_of(parts: tuple[str, ...], sent: tuple[int, ...], *held: int) -> CompletedCheckpoint:
    events = tuple(HeldEvent(0, parts[index].encode(), part=index) for index in held)
    return CompletedCheckpoint(4, 1, b"c", {0: SubtaskSnapshot((SubtaskState(0, b"s"),), events, sent)}, parts=parts)


def table_of(*names: str, outside: tuple[str, ...] = ()) -> PartTable:
    return PartTable([OperatorPart(name, name in outside) for name in names])


def test_a_restored_checkpoint_has_the_indices_of_the_operators_own_table() -> None:  # H154, H150
    before = checkpoint_of(("", "a", "b"), (1, 2, 3), 2, 0, 1, 2)
    after = refitted(before, table_of("", "b", "new", "a"))
    snapshot = after.subtask_states[0]
    assert after.parts == ("", "b", "new", "a")
    assert snapshot.events_sent == (1, 3, 0, 2)
    assert [(event.payload, event.part) for event in snapshot.held] == [(b"b", 1), (b"", 0), (b"a", 3), (b"b", 1)]
    assert (after.coordinator_state, snapshot.states) == (b"c", before.subtask_states[0].states)


def test_what_was_held_for_a_part_that_is_gone_or_outside_now_is_dropped_and_the_rest_keeps_its_order() -> None:  # H154
    before = checkpoint_of(("", "a", "b", "c"), (1, 2, 3, 4), 1, 2, 3, 0, 1)
    after = refitted(before, table_of("", "c", "b", outside=("b",))).subtask_states[0]
    assert [event.payload for event in after.held] == [b"c", b""]
    assert after.events_sent == (1, 4)


def test_a_checkpoint_of_the_same_parts_is_itself() -> None:  # H154
    before = checkpoint_of(("", "a"), (1, 2), 1)
    assert refitted(before, table_of("", "a")) is before
    assert refitted(before, table_of("", "a", outside=("a",))).subtask_states[0].events_sent == (1,)


NAMES = st.lists(st.sampled_from("abcde"), max_size=5, unique=True).map(lambda names: ("", *names))


@given(NAMES, NAMES, st.sets(st.sampled_from("abcde")), st.data())
def test_a_part_that_stays_keeps_its_events_and_its_position_under_any_other_table(
    old: tuple[str, ...], new: tuple[str, ...], outside: set[str], data: st.DataObject
) -> None:  # H154, H150
    sent = positions(data.draw(st.lists(st.integers(0, 3), max_size=len(old))))
    before = checkpoint_of(old, sent, *data.draw(st.lists(st.integers(0, len(old) - 1), max_size=6)))
    table = table_of(*new, outside=tuple(outside))
    after = refitted(before, table)
    snapshot, restored = before.subtask_states[0], after.subtask_states[0]
    kept = [name for name in new if name not in outside]
    assert after.parts == table.names
    assert [e.payload.decode() for e in restored.held] == [
        n for e in snapshot.held if (n := e.payload.decode()) in kept
    ]
    assert all(new[event.part] == event.payload.decode() for event in restored.held)
    for name in kept:
        counts = [
            dict(enumerate(one.events_sent)).get(names.index(name), 0) if name in names else 0
            for names, one in ((old, snapshot), (new, restored))
        ]
        assert counts[0] == counts[1]
    SubtaskMachine(7, 0, DOWN, restored.held, restored.events_sent, table=table).check_invariants()


def test_a_rescaled_checkpoint_keeps_the_parts_of_what_was_held() -> None:  # H52, H154
    before = checkpoint_of(("", "a"), (1, 2), 1, 0)
    after = rescaled(before, 2)
    assert after.parts == ("", "a")
    assert [event.part for event in after.subtask_states[0].held] == [1, 0]


def stored(checkpoint: CompletedCheckpoint) -> StoredCheckpoint:
    return StoredCheckpoint("words", RestoreMode.STREAMING, 0, "0.1.0", checkpoint)


def test_only_a_checkpoint_that_names_a_part_takes_the_fifth_format() -> None:  # H50, H150, H154
    """So a driver of the release before reads every checkpoint of an operator that uses none."""
    for parts, sent, held, version in (
        (("",), (3,), (0,), 1),
        (("", "a"), (3,), (0,), 1),
        (("", "a"), (3, 1), (), 5),
        (("", "a"), (), (1,), 5),
    ):
        before = checkpoint_of(parts, sent, *held)
        data = encode_checkpoint(stored(before))
        assert data[11] == version
        after = decode_checkpoint(data).checkpoint
        assert after.subtask_states == before.subtask_states
        assert after.parts == (parts if version == 5 else ("",))


def test_a_held_event_that_begins_as_an_envelope_of_earlier_formats_comes_back_as_it_is() -> None:  # H50, H62
    """A hostile task may send one; it must not make the whole checkpoint unreadable."""
    for payload in (b"\x93\xc7\x00\x01", b"\x93\xc7\x00\x01\xa1a\x01", b"\x93\xc7\x00\x01\xd9\xff"):
        held = (HeldEvent(0, payload),)
        data = encode_checkpoint(stored(CompletedCheckpoint(4, 1, b"", {0: SubtaskSnapshot((), held)})))
        assert decode_checkpoint(data).checkpoint.subtask_states[0].held == held


@pytest.mark.parametrize(
    ("parts", "sent", "held"),
    [
        ((), (1, 2), ()),
        (("a", "b"), (1, 2), ()),
        (("", "a", "a"), (1, 2), ()),
        (("", "a"), (1, 2, 3), ()),
        (("", "a"), (), (2,)),
    ],
)
def test_a_checkpoint_whose_parts_are_not_those_of_an_operator_is_not_stored(parts: Any, sent: Any, held: Any) -> None:
    # H50, H150
    events = tuple(HeldEvent(0, b"", part=index) for index in held)
    checkpoint = CompletedCheckpoint(4, 1, b"", {0: SubtaskSnapshot((), events, sent)}, parts=parts)
    with pytest.raises(LocalProtocolError):
        encode_checkpoint(stored(checkpoint))


def forged(parts: tuple[str, ...], sent: tuple[int, ...], part: int) -> bytes:
    snapshot = (0, len(sent), *sent, 0, 1, 0, b"", False, part, False)
    return sealed(body_of(*HEADER, 1, *snapshot, "", 0, len(parts), *parts), version=5)


@pytest.mark.parametrize(
    ("parts", "sent", "part", "why"),
    [
        ((), (), 0, "not the user's own"),
        (("a",), (), 0, "not the user's own"),
        (("", "a", "a"), (), 0, "two parts 'a'"),
        (("", "a"), (), 2, "a part without a name"),
        (("", "a"), (1, 2, 3), 0, "a part without a name"),
    ],
)
def test_a_file_whose_parts_are_not_those_of_an_operator_is_damaged(
    parts: tuple[str, ...], sent: tuple[int, ...], part: int, why: str
) -> None:  # H50, H150
    assert decode_checkpoint(forged(("", "a"), (1, 2), 1)).checkpoint.parts == ("", "a")
    with pytest.raises(CheckpointCorrupt, match=why):
        decode_checkpoint(forged(parts, sent, part))


OLD = sorted(path.name for path in GOLDEN.glob("*.checkpoint") if path.name[-12] < "5")


@pytest.mark.parametrize("name", OLD)
def test_what_earlier_formats_hold_for_a_part_is_known_by_the_name_in_its_envelope(name: str) -> None:  # H154, H150
    """The files were written by the releases before parts had an index."""
    checkpoint = decode_checkpoint((GOLDEN / name).read_bytes()).checkpoint
    held = [event for snapshot in checkpoint.subtask_states.values() for event in snapshot.held]
    assert checkpoint.parts[0] == ""
    assert set(range(1, len(checkpoint.parts))) <= {event.part for event in held}
    assert not any(event.payload.startswith(b"\x93\xc7\x00\x01") for event in held)
    assert all(len(snapshot.events_sent) <= 1 for snapshot in checkpoint.subtask_states.values())


def test_some_file_of_an_earlier_format_holds_events_of_named_parts() -> None:
    assert any(len(decode_checkpoint((GOLDEN / name).read_bytes()).checkpoint.parts) > 1 for name in OLD)


def test_a_piece_of_one_part_leaves_the_states_of_the_others_as_they_are() -> None:  # H52
    files = StateHandle("1-e-t/0-1-n-1", 1, bytes(32), 1, 1, KeyGroupRange(0, 8, 8))
    others = SubtaskState(1, join_states(b"own", {"counters": b"some"}))
    of_files = join_states(b"", {"stage": b"data", FILES_OF: b"stage"}, ("stage",))
    piece = SubtaskState(1, of_files, files, (0, 4))
    for states in ([others, piece], [piece, others]):
        in_bytes, in_files = states_by_part(states, ["counters", "stage"])
        assert in_bytes == {"": {1: b"own"}, "counters": {1: b"some"}}
        assert in_files == {"stage": [piece._replace(state=b"data")]}
    whole = SubtaskState(1, join_states(b"own", {"stage": b"data", FILES_OF: b"stage"}, ("stage",)), files)
    assert states_by_part([whole], ["stage"]) == ({"": {1: b"own"}}, {"stage": [whole._replace(state=b"data")]})
