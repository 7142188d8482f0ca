# SPDX-License-Identifier: Apache-2.0

"""Cuts a checkpoint to another parallelism (H52, H190), and to other parts of the operator (H154)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.errors import LocalProtocolError
from protocol.key_groups import cut
from protocol.parts import PartTable, divide_state, positions
from protocol.wire.messages import SubtaskState
from protocol.wire.state_handles import KeyGroupRange


def rescaled(checkpoint: CompletedCheckpoint, parallelism: int) -> CompletedCheckpoint:
    """Return the same checkpoint for ``parallelism`` subtasks; the checkpoint itself if nothing changes.

    The share of subtask j goes to subtask ``j % parallelism``. If several meet, their states are next to each other, in
    the order of the subtasks that took them, for the operator to merge. Held events are in the order of the old
    subtasks, each with its first sender and in its old order. A position belongs to the history of one old subtask, so
    the count of events starts again at 0 (H32). What positions in the states count were records in the old number of
    partitions (H174).

    A state in files that has key groups is cut into pieces instead: each subtask gets those of its groups that are in
    its own range (``protocol.key_groups``), with the bytes that belong to the files. The states of other parts, which
    are in the same bytes, stay together, and go where those without files go. What was cut before and not restored is
    cut again.

    Raises ``LocalProtocolError`` for a part outside the checkpoint's own parallelism; if two states of one subtask
    would meet that have no key groups, which needs a second change of parallelism before a subtask has restored after
    the first one; for fewer key groups than subtasks; and for states with different numbers of them.
    """
    whose = f"checkpoint {checkpoint.checkpoint_id}"
    outside = [subtask for subtask in checkpoint.subtask_states if not 0 <= subtask < checkpoint.parallelism]
    if parallelism < 1 or outside:  # compared, not enumerated: a file may claim any parallelism
        raise LocalProtocolError(
            f"{whose} of parallelism {checkpoint.parallelism} cannot be restored with parallelism {parallelism}"
            + (f": {len(outside)} of its subtasks do not exist, such as {min(outside)}" if outside else "")
            + ". Restore an earlier checkpoint"
        )
    if parallelism == checkpoint.parallelism:
        return checkpoint
    parts: dict[int, SubtaskSnapshot] = {}
    pieces: list[tuple[SubtaskState, KeyGroupRange, bool]] = []
    for old in sorted(checkpoint.subtask_states):
        part = checkpoint.subtask_states[old]
        whole, cut_ones = _divided(part.states)
        _add(parts, old % parallelism, replace(part, states=tuple(whole), events_sent=()))
        pieces += [(state, groups, part.earlier_input) for state, groups in cut_ones]
    for subtask, part in parts.items():
        states = tuple(sorted(part.states, key=lambda state: state.subtask))
        if len({state.subtask for state in states}) < len(states):
            raise LocalProtocolError(
                f"{whose} cannot be restored with parallelism {parallelism}: it still holds states from before its last"
                f" change of parallelism. Restore it with {checkpoint.parallelism}, take a checkpoint once every"
                " subtask runs, then change"
            )
        parts[subtask] = replace(part, states=states)
    try:
        cuts = cut([groups for _, groups, _ in pieces], parallelism)
    except ValueError as error:
        raise LocalProtocolError(
            f"{whose} cannot be restored with parallelism {parallelism}: {error}. Use a parallelism that fits, or"
            ' start without the checkpoint (restore="none")'
        ) from None
    for subtask, index, low, high in cuts:
        state, _, earlier_input = pieces[index]
        _add(parts, subtask, SubtaskSnapshot((state._replace(groups=(low, high)),), earlier_input=earlier_input))
    partitions = checkpoint.partitions or checkpoint.parallelism
    return replace(checkpoint, parallelism=parallelism, subtask_states=parts, partitions=partitions)


def _divided(states: Iterable[SubtaskState]) -> tuple[list[SubtaskState], list[tuple[SubtaskState, KeyGroupRange]]]:
    """Divide states into what stays together, and the pieces of those with key groups."""
    whole, pieces = [], []
    for state in states:
        groups = None if state.files is None else state.files.key_groups
        if groups is None:
            whole.append(state)
        elif state.groups is not None:
            low, high = state.groups
            pieces.append((state, groups._replace(first=low, end=high)))
        else:
            others, data = divide_state(state.state)
            if others is not None:
                whole.append(SubtaskState(state.subtask, others))
            pieces.append((state._replace(state=data), groups))
    return whole, pieces


def _add(parts: dict[int, SubtaskSnapshot], subtask: int, part: SubtaskSnapshot) -> None:
    """Add what a subtask gets to what it has. Two pieces of the same files whose groups touch become one."""
    mine = parts.get(subtask)
    if mine is None:
        parts[subtask] = part
        return
    states = mine.states
    if states and part.states and states[-1].groups is not None and part.states[0].groups is not None:
        (low, middle), (also_middle, high) = states[-1].groups, part.states[0].groups
        if middle == also_middle and states[-1] == part.states[0]._replace(groups=(low, middle)):
            part = replace(part, states=(part.states[0]._replace(groups=(low, high)),))
            states = states[:-1]
    earlier_input = mine.earlier_input and part.earlier_input
    parts[subtask] = SubtaskSnapshot((*states, *part.states), (*mine.held, *part.held), earlier_input=earlier_input)


def refitted(checkpoint: CompletedCheckpoint, table: PartTable) -> CompletedCheckpoint:
    """Return the same checkpoint with the indices of another table; the checkpoint itself if nothing changes.

    A part that is not in the checkpoint begins at position 0. What was held for a part that the operator does not have,
    or has outside of checkpoints, is dropped: such a part either has no state, or its state refuses the restore (H154).
    """
    if checkpoint.parts == table.names and not any(table.outside):
        return checkpoint
    now = [
        index if (index := table.index(name)) is not None and not table.outside[index] else None
        for name in checkpoint.parts
    ]

    def refit(snapshot: SubtaskSnapshot) -> SubtaskSnapshot:
        counts = [0] * table.count
        for index, count in zip(now, snapshot.events_sent, strict=False):
            if index is not None:
                counts[index] = count
        held = [event._replace(part=index) for event in snapshot.held if (index := now[event.part]) is not None]
        return replace(snapshot, held=tuple(held), events_sent=positions(counts))

    states = {subtask: refit(snapshot) for subtask, snapshot in checkpoint.subtask_states.items()}
    return replace(checkpoint, subtask_states=states, parts=table.names)
