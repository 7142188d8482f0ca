# SPDX-License-Identifier: Apache-2.0

"""Cuts a checkpoint to another parallelism (H52), and to other parts of the operator (H154)."""

from __future__ import annotations

from dataclasses import replace

from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.errors import LocalProtocolError
from protocol.parts import PartTable, positions


def rescaled(checkpoint: CompletedCheckpoint, parallelism: int) -> CompletedCheckpoint:
    """Return the same checkpoint for ``parallelism`` subtasks; the checkpoint itself if nothing changes.

    The share of subtask j goes to subtask ``j % parallelism``. If several meet, their states are next to each other, in
    the order of the subtasks that took them, for the operator to merge. Held events are in the order of the old
    subtasks, each with its first sender and in its old order. A position belongs to the history of one old subtask, so
    the count of events starts again at 0 (H32). What positions in the states count were records in the old number of
    partitions (H174).

    Raises ``LocalProtocolError`` for a part outside the checkpoint's own parallelism, and if two states of one subtask
    would meet. The latter needs a second change of parallelism before a subtask has restored after the first one.
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
    for old in sorted(checkpoint.subtask_states):
        part, mine = checkpoint.subtask_states[old], parts.get(old % parallelism, SubtaskSnapshot())
        states = tuple(sorted((*mine.states, *part.states), key=lambda state: state.subtask))
        if len({state.subtask for state in states}) < len(states):
            raise LocalProtocolError(
                f"{whose} cannot be restored with parallelism {parallelism}: it still holds states from before its last"
                f" change of parallelism. Restore it with {checkpoint.parallelism}, take a checkpoint once every"
                " subtask runs, then change"
            )
        earlier = part.earlier_input and (old % parallelism not in parts or mine.earlier_input)
        parts[old % parallelism] = SubtaskSnapshot(states, (*mine.held, *part.held), earlier_input=earlier)
    partitions = checkpoint.partitions or checkpoint.parallelism
    return replace(checkpoint, parallelism=parallelism, subtask_states=parts, partitions=partitions)


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
