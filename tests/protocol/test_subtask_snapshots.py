# SPDX-License-Identifier: Apache-2.0

"""The content of a snapshot: positions (H32), names (H52), and no more than a frame (H62)."""

from __future__ import annotations

import pytest

from protocol.errors import GatewayFull, LocalProtocolError
from protocol.subtask import types as s
from protocol.subtask.machine import SubtaskMachine
from protocol.subtask.outbound import HELD_OVERHEAD_BYTES
from protocol.wire import messages as m
from protocol.wire.codec import encode_message
from protocol.wire.framing import DEFAULT_LIMITS, WireLimits
from tests.protocol.refusals import unchanged
from tests.protocol.test_subtask import hear, sent
from tests.protocol.test_subtask_checkpoints import WIDE, events, send

TIGHT = s.SubtaskLimits(100, 10_000, 30, snapshot_bytes_max=200, held_events_max=4)


def a_restored_subtask(
    held: tuple[m.HeldEvent, ...] = (), events_sent: m.Positions = (), limits: s.SubtaskLimits = WIDE
) -> SubtaskMachine:
    """Return task 7 of subtask 2, connected and open."""
    subtask = SubtaskMachine(7, 2, limits, held, events_sent)
    subtask.handle(s.ConnectionAttached(0), 0.0)
    subtask.handle(s.OperatorOpened(), 0.0)
    return subtask


def a_subtask_at_its_barrier(limits: s.SubtaskLimits = TIGHT) -> SubtaskMachine:
    subtask = a_restored_subtask(limits=limits)
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    return subtask


def take(subtask: SubtaskMachine, state: bytes = b"") -> m.CheckpointAcknowledged | m.CheckpointDeclined:
    effects = subtask.handle(s.SnapshotTaken(5, state), 1.0)
    subtask.check_invariants()
    answer = sent(effects)[0]
    assert isinstance(answer, m.CheckpointAcknowledged | m.CheckpointDeclined)
    return answer


# --- positions --------------------------------------------------------------------------------------------


def test_a_snapshot_counts_what_has_left_and_not_what_is_held() -> None:  # H32
    subtask = a_restored_subtask()
    send(subtask, b"a", b"b")
    subtask.handle(s.RequestSubmitted(1, b"?"), 1.0)
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    send(subtask, b"held")
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    answer = take(subtask)
    assert isinstance(answer, m.CheckpointAcknowledged)
    assert (answer.events_sent, [held.payload for held in answer.held]) == ((3,), [b"held"])


def test_the_count_goes_on_where_the_restored_history_ended() -> None:
    # H32: the restored events leave here for the first time
    held = (m.HeldEvent(2, b"r1"), m.HeldEvent(2, b"r2"))
    subtask = a_restored_subtask(held, events_sent=(40,))
    send(subtask, b"new")
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    answer = take(subtask)
    assert isinstance(answer, m.CheckpointAcknowledged)
    assert answer.events_sent == (43,)


def test_what_leaves_after_a_snapshot_is_in_the_count_of_the_next() -> None:  # H32
    subtask = a_subtask_at_its_barrier(WIDE)
    send(subtask, b"a", b"b")
    first = take(subtask)
    hear(subtask, m.CloseForCheckpoint(7, 3, 6))
    hear(subtask, m.BarrierMessage(7, 4, 6, 0))
    second = sent(subtask.handle(s.SnapshotTaken(6, b""), 1.0))[0]
    assert isinstance(first, m.CheckpointAcknowledged)
    assert isinstance(second, m.CheckpointAcknowledged)
    assert (first.events_sent, second.events_sent) == ((), (2,))


def test_a_resend_counts_once() -> None:  # H24, H32
    subtask = a_restored_subtask()
    send(subtask, b"a")
    subtask.handle(s.ConnectionAttached(0), 1.0)
    assert sent(subtask.handle(s.OperatorFinished("", b""), 2.0)) == [m.Finished(7, 3, "", b"", (1,))]


# --- names ------------------------------------------------------------------------------------------------


def test_restored_events_leave_under_the_name_of_the_subtask_that_sent_them_first() -> None:  # H31, H52
    subtask = SubtaskMachine(7, 2, WIDE, (m.HeldEvent(6, b"r1"), m.HeldEvent(2, b"r2")))
    subtask.handle(s.EventSubmitted(b"new"), 0.0)
    assert sent(subtask.handle(s.ConnectionAttached(0), 0.0)) == [
        m.RestoredEventMessage(7, 1, 6, b"r1"),
        m.RestoredEventMessage(7, 2, 2, b"r2"),
        m.EventMessage(7, 3, b"new"),
    ]


def test_a_restored_event_that_has_not_left_keeps_its_name_in_the_next_snapshot() -> None:  # H52
    limits = s.SubtaskLimits(2, 10_000, 30)
    subtask = a_restored_subtask(tuple(m.HeldEvent(place, b"r") for place in (6, 2, 8)), limits=limits)
    hear(subtask, m.CloseForCheckpoint(7, 1, 5))
    hear(subtask, m.Confirm(7, 1))
    hear(subtask, m.BarrierMessage(7, 2, 5, 0))
    answer = take(subtask)
    assert isinstance(answer, m.CheckpointAcknowledged)
    assert answer.held == (m.HeldEvent(8, b"r"),)


# --- size -------------------------------------------------------------------------------------------------


def test_a_state_that_fits_no_frame_is_declined_with_the_sizes_and_the_fix() -> None:
    # H45, H62: it must not reach the codec, which could only end the attempt
    subtask = a_subtask_at_its_barrier()
    answer = take(subtask, b"x" * 201)
    assert isinstance(answer, m.CheckpointDeclined)
    for words in ("201 bytes of state", "0 held events", "200 bytes", "keep less state"):
        assert words in answer.reason
    assert send(subtask, b"a") == []
    assert events(hear(subtask, m.CheckpointAborted(7, 3, 5))) == [b"a"]


def test_state_and_held_events_have_to_fit_together() -> None:  # H62
    for state_bytes, kind in ((200 - HELD_OVERHEAD_BYTES - 10, m.CheckpointAcknowledged), (180, m.CheckpointDeclined)):
        subtask = a_subtask_at_its_barrier()
        send(subtask, b"y" * 10)
        assert type(take(subtask, bytes(state_bytes))) is kind


def test_what_just_fits_passes_the_codec() -> None:
    # H62: the limit includes the overhead of held events beyond their payloads
    wire = WireLimits(
        message_bytes_max=70_000,
        event_bytes_max=100,
        text_chars_max=100,
        held_events_max=DEFAULT_LIMITS.held_events_max,
    )
    limits = s.SubtaskLimits(10_000, 2**30, 30, snapshot_bytes_max=wire.message_bytes_max - 1000)
    subtask = a_subtask_at_its_barrier(limits)
    count = (limits.snapshot_bytes_max // 2) // (1 + HELD_OVERHEAD_BYTES)
    send_all(subtask, count)
    with pytest.raises(GatewayFull):
        subtask.handle(s.EventSubmitted(b"x"), 1.0)
    left = limits.snapshot_bytes_max - count * (1 + HELD_OVERHEAD_BYTES)
    answer = take(subtask, bytes(left))
    assert isinstance(answer, m.CheckpointAcknowledged)
    assert len(encode_message(answer, wire)) <= wire.message_bytes_max


def send_all(subtask: SubtaskMachine, count: int) -> None:
    for _ in range(count):
        subtask.handle(s.EventSubmitted(b"x"), 1.0)


def test_a_closed_valve_holds_no_more_than_half_a_snapshot_and_tells_when_there_is_capacity() -> None:
    # H27, H62: whatever the window size; otherwise the operator's events would leave no space for its state
    subtask = a_subtask_at_its_barrier()
    send(subtask, bytes(50))
    with unchanged(subtask), pytest.raises(GatewayFull, match="a checkpoint may hold 4 events and 100 bytes"):
        subtask.handle(s.EventSubmitted(bytes(50)), 1.0)
    effects = subtask.handle(s.SnapshotTaken(5, b""), 1.0)
    assert effects[-1:] == [s.CapacityAvailable()]
    assert send(subtask, bytes(50)) == [bytes(50)]


def test_a_closed_valve_holds_no_more_events_than_a_snapshot_may_carry() -> None:  # H27, H62
    subtask = a_subtask_at_its_barrier()
    send(subtask, b"", b"", b"", b"")
    with pytest.raises(GatewayFull):
        subtask.handle(s.EventSubmitted(b""), 1.0)
    assert hear(subtask, m.CheckpointAborted(7, 3, 5))[-2:-1] == [s.CapacityAvailable()]


def test_one_event_larger_than_half_a_snapshot_is_held_alone() -> None:
    # H27, H48: no wait is unlimited
    subtask = a_subtask_at_its_barrier()
    assert send(subtask, bytes(150)) == []
    assert isinstance(take(subtask), m.CheckpointAcknowledged)


def test_the_bound_of_a_snapshot_holds_back_nothing_that_may_leave_immediately() -> None:  # H27
    subtask = a_restored_subtask(limits=TIGHT)
    assert len(send(subtask, *[bytes(60)] * 10)) == 10


def test_a_final_state_that_fits_no_frame_is_refused_and_the_attempt_may_end_badly() -> None:  # H47, H62
    subtask = a_restored_subtask(limits=TIGHT)
    with (
        unchanged(subtask),
        pytest.raises(LocalProtocolError, match="201 bytes, where 200 fit into a message: keep less state") as refused,
    ):
        subtask.handle(s.OperatorFinished("", bytes(201)), 1.0)
    reason = str(refused.value)
    assert sent(subtask.handle(s.OperatorFinished(reason, b""), 1.0)) == [m.Finished(7, 2, reason, b"", ())]


# --- sent by the snapshot itself --------------------------------------------------------------------------


def send_in_snapshot(subtask: SubtaskMachine, payload: bytes) -> list[s.SubtaskEffect]:
    effects = subtask.handle(s.EventSubmitted(payload, in_snapshot=True), 1.0)
    subtask.check_invariants()
    return effects


def test_an_event_of_the_snapshot_is_in_that_very_snapshot_however_full_the_valve_is() -> None:
    # H31, H48: capacity would come only after the snapshot that sends it
    subtask = a_subtask_at_its_barrier(s.SubtaskLimits(3, 10_000, 30))
    send(subtask, b"1", b"2", b"3")
    with pytest.raises(GatewayFull):
        subtask.handle(s.EventSubmitted(b"4"), 1.0)
    assert send_in_snapshot(subtask, b"files") == []
    effects = subtask.handle(s.SnapshotTaken(5, b""), 1.0)
    answer = sent(effects)[0]
    assert isinstance(answer, m.CheckpointAcknowledged)
    assert [held.payload for held in answer.held] == [b"1", b"2", b"3", b"files"]
    assert events(effects) == [b"1", b"2", b"3"]  # the peer's window still applies (H27)
    subtask.check_invariants()
    with pytest.raises(GatewayFull):
        subtask.handle(s.EventSubmitted(b"4"), 1.0)
    assert events(hear(subtask, m.Confirm(7, 4))) == [b"files"]


def test_an_event_of_a_snapshot_whose_checkpoint_has_just_ended_overtakes_nothing() -> None:
    # H30, H44: the abort came while the snapshot was being taken
    subtask = a_subtask_at_its_barrier(s.SubtaskLimits(2, 10_000, 30))
    send(subtask, b"1", b"2")
    send_in_snapshot(subtask, b"3")
    assert events(hear(subtask, m.CheckpointAborted(7, 3, 5))) == [b"1", b"2"]
    assert send_in_snapshot(subtask, b"4") == []
    assert events(hear(subtask, m.Confirm(7, 3))) == [b"3"]
    assert events(hear(subtask, m.Confirm(7, 4))) == [b"4"]


def test_a_small_event_of_a_snapshot_does_not_overtake_a_large_one_that_waits_for_the_window() -> None:  # H30
    subtask = a_subtask_at_its_barrier(s.SubtaskLimits(9, 100, 30))
    send(subtask, bytes(60))
    send_in_snapshot(subtask, bytes(70))
    assert events(hear(subtask, m.CheckpointAborted(7, 3, 5))) == [bytes(60)]
    assert send_in_snapshot(subtask, b"small") == []
    assert events(hear(subtask, m.Confirm(7, 3))) == [bytes(70), b"small"]
