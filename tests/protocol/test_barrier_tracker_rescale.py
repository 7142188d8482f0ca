# SPDX-License-Identifier: Apache-2.0

"""A checkpoint restored with another parallelism (H52)."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from protocol import barrier_tracker as t
from protocol.attempts import OperatorReset
from protocol.barrier_tracker.rescale import rescaled
from protocol.errors import LocalProtocolError
from protocol.key_groups import KeyGroups
from protocol.parts import FILES_OF, join_states, split_states
from protocol.wire.messages import HeldEvent, SubtaskState
from protocol.wire.state_handles import KeyGroupRange, StateHandle
from tests.protocol.barrier_tracker_kit import A, B, Dialogue, accepted, snapshot_of


def checkpoint_of(parallelism: int, *subtasks: int) -> t.CompletedCheckpoint:
    parts = {
        subtask: snapshot_of(subtask, b"s%d" % subtask, b"h%d" % subtask, b"i%d" % subtask, events_sent=(5,))
        for subtask in subtasks
    }
    return t.CompletedCheckpoint(4, parallelism, b"coordinator", parts)


def whose(snapshot: t.SubtaskSnapshot) -> list[int]:
    return [state.subtask for state in snapshot.states]


def test_with_fewer_subtasks_one_takes_over_the_parts_of_several() -> None:
    # H52: part j goes to j modulo the new parallelism.
    checkpoint = rescaled(checkpoint_of(5, 4, 2, 0, 1, 3), 2)
    assert (checkpoint.checkpoint_id, checkpoint.parallelism) == (4, 2)
    assert checkpoint.coordinator_state == b"coordinator"
    assert {subtask: whose(part) for subtask, part in checkpoint.subtask_states.items()} == {0: [0, 2, 4], 1: [1, 3]}


def test_held_events_keep_their_sender_and_their_order() -> None:  # H52, H31
    part = rescaled(checkpoint_of(3, 2, 0, 1), 1).subtask_states[0]
    assert part.held == tuple(HeldEvent(j, payload % j) for j in range(3) for payload in (b"h%d", b"i%d"))


def test_positions_start_again() -> None:
    # H32: they belong to the history of one old subtask.
    assert rescaled(checkpoint_of(2, 0, 1), 3).subtask_states[0].events_sent == ()


def test_with_more_subtasks_the_new_ones_have_no_part() -> None:  # H52, H47
    checkpoint = rescaled(checkpoint_of(2, 0, 1), 4)
    assert checkpoint.subtask_states == {
        0: snapshot_of(0, b"s0", b"h0", b"i0"),
        1: snapshot_of(1, b"s1", b"h1", b"i1"),
    }


def test_an_empty_part_stays_empty() -> None:  # H47
    assert rescaled(checkpoint_of(3, 1), 2).subtask_states.keys() == {1}


def test_with_the_same_parallelism_nothing_changes() -> None:
    # H32: nor do the positions.
    checkpoint = checkpoint_of(2, 0, 1)
    assert rescaled(checkpoint, 2) == checkpoint


def test_what_was_never_restored_is_handed_on() -> None:
    # H52: subtask 1 was idle with two states while the others went on.
    once = rescaled(checkpoint_of(4, 0, 1, 2, 3), 2)
    again = t.CompletedCheckpoint(9, 2, b"c", {0: snapshot_of(0, b"new"), 1: once.subtask_states[1]})
    assert rescaled(again, 1).subtask_states[0].states == (
        SubtaskState(0, b"new"),
        SubtaskState(1, b"s1"),
        SubtaskState(3, b"s3"),
    )


def test_two_states_of_one_subtask_that_would_meet_are_refused() -> None:
    # H52: one of them would be lost in the merge.
    mixed = t.CompletedCheckpoint(
        9, 3, b"c", {0: t.SubtaskSnapshot((SubtaskState(0, b"a"), SubtaskState(2, b"old"))), 2: snapshot_of(2, b"new")}
    )
    with pytest.raises(LocalProtocolError, match="Restore it with 3"):
        rescaled(mixed, 2)


@pytest.mark.parametrize(("parallelism", "asked"), [(2, 2), (2, 0)])
def test_a_part_without_a_place_is_refused(parallelism: int, asked: int) -> None:  # H50
    with pytest.raises(LocalProtocolError, match="of parallelism 2"):
        rescaled(checkpoint_of(parallelism, *((2,) if asked else (0,))), asked)


def test_a_parallelism_that_a_file_only_claims_costs_nothing() -> None:
    # H50, H81: it is compared with the subtasks that are there.
    checkpoint = replace(checkpoint_of(2, 0, 1), parallelism=1_000_000)
    tracemalloc.start()
    try:
        assert set(rescaled(checkpoint, 2).subtask_states) == {0, 1}
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# --- states in files that have key groups ---------------------------------------------------------------------------


def divided(subtask: int, parallelism: int, state: bytes = b"data", *, total: int = 8) -> SubtaskState:
    own = KeyGroups(total).range_of(subtask, parallelism)
    groups = KeyGroupRange(own.start, own.stop, total)
    return SubtaskState(subtask, state, StateHandle(f"m{subtask}", 1, bytes(32), 7, 1, groups))


def checkpoint_with(parallelism: int, *states: SubtaskState) -> t.CompletedCheckpoint:
    parts = {state.subtask: t.SubtaskSnapshot((state,), events_sent=(3,)) for state in states}
    return t.CompletedCheckpoint(4, parallelism, b"c", parts)


def pieces_in(checkpoint: t.CompletedCheckpoint) -> dict[int, list[tuple[int, bytes, tuple[int, int] | None]]]:
    return {
        subtask: [(state.subtask, state.state, state.groups) for state in part.states]
        for subtask, part in checkpoint.subtask_states.items()
    }


def test_a_subtask_gets_the_groups_in_its_own_range() -> None:  # H52, H190
    checkpoint = checkpoint_with(2, divided(0, 2, b"a"), divided(1, 2, b"b"))
    cut = rescaled(checkpoint, 3)
    assert pieces_in(cut) == {
        0: [(0, b"a", (0, 3))],
        1: [(0, b"a", (3, 4)), (1, b"b", (4, 6))],
        2: [(1, b"b", (6, 8))],
    }
    assert cut.subtask_states[1].events_sent == ()


def test_a_piece_is_cut_again_and_becomes_one_with_its_neighbour() -> None:
    """H52: no subtask has restored in between, so nothing may be restored twice."""
    checkpoint = checkpoint_with(2, divided(0, 2, b"a"), divided(1, 2, b"b"))
    again = rescaled(rescaled(checkpoint, 8), 2)
    assert pieces_in(again) == {0: [(0, b"a", (0, 4))], 1: [(1, b"b", (4, 8))]}
    assert pieces_in(rescaled(again, 1)) == {0: [(0, b"a", (0, 4)), (1, b"b", (4, 8))]}


def test_pieces_do_not_collide_with_the_new_state_of_the_subtask_that_had_them() -> None:
    """H52: subtask 0 went on after the rescale, and its neighbours still have what the old subtask 0 stored."""
    once = rescaled(checkpoint_with(2, divided(0, 2, b"a"), divided(1, 2, b"b")), 4)
    parts = {**once.subtask_states, 0: t.SubtaskSnapshot((divided(0, 4, b"new"),))}
    again = rescaled(replace(once, subtask_states=parts), 1)
    assert pieces_in(again) == {0: [(0, b"new", (0, 2)), (0, b"a", (2, 4)), (1, b"b", (4, 8))]}


def test_the_states_of_other_parts_stay_together() -> None:
    """H52: as without files, they go to subtask j modulo the new parallelism; the files take only their own bytes."""
    joined = [
        join_states(b"", {"source": b"at %d" % j, "count": b"data %d" % j, FILES_OF: b"count"}, ("source", "count"))
        for j in range(2)
    ]
    cut = rescaled(checkpoint_with(2, *(divided(j, 2, state) for j, state in enumerate(joined))), 4)
    names = ("source", "count", FILES_OF)
    states = {n: [split_states(one.state, names)[1] for one in cut.subtask_states[n].states] for n in range(4)}
    pieces = [{"count": b"data %d" % j, FILES_OF: b"count"} for j in range(2)]
    assert states == {
        0: [{"source": b"at 0"}, pieces[0]],
        1: [{"source": b"at 1"}, pieces[0]],
        2: [pieces[1]],
        3: [pieces[1]],
    }
    assert [one.files is None for one in cut.subtask_states[0].states] == [True, False]


def test_a_state_in_files_without_groups_goes_whole() -> None:  # H52
    state = divided(1, 2)
    assert state.files is not None
    whole = state._replace(files=state.files._replace(key_groups=None))
    assert rescaled(checkpoint_with(2, whole), 3).subtask_states[1].states == (whole,)


def test_fewer_groups_than_subtasks_are_refused() -> None:  # H50
    with pytest.raises(LocalProtocolError, match="8 key groups, so 8 is the highest parallelism"):
        rescaled(checkpoint_with(2, divided(0, 2)), 9)


def test_states_with_different_numbers_of_groups_are_refused() -> None:  # H50
    with pytest.raises(LocalProtocolError, match="have 8 and 16 key groups"):
        rescaled(checkpoint_with(2, divided(0, 2), divided(1, 2, total=16)), 3)


def test_a_new_application_restores_a_checkpoint_of_another_parallelism() -> None:
    # H52, H4: ids go on above it.
    dialogue = Dialogue(2, restored=checkpoint_of(3, 0, 1, 2))
    assert dialogue.tell(accepted(A)) == [
        t.RestoreAttempt(
            A,
            4,
            (SubtaskState(0, b"s0"), SubtaskState(2, b"s2")),
            (HeldEvent(0, b"h0"), HeldEvent(0, b"i0"), HeldEvent(2, b"h2"), HeldEvent(2, b"i2")),
            (),
            True,
            partitions_before=3,
        )
    ]
    [restore] = dialogue.tell(accepted(B))
    assert isinstance(restore, t.RestoreAttempt)
    assert restore.states == (SubtaskState(1, b"s1"),)
    with pytest.raises(LocalProtocolError, match="must increase"):
        dialogue.tell(t.CheckpointTriggered(4))
    assert dialogue.tell(OperatorReset("words", "x")) == [t.OperatorResetToCheckpoint(4, b"coordinator", True)]
