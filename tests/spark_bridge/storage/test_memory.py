# SPDX-License-Identifier: Apache-2.0

"""Checkpoints in memory are whole, and cost the garbage collector nothing for each subtask."""

from __future__ import annotations

import gc

from protocol.barrier_tracker import CompletedCheckpoint, SubtaskSnapshot
from protocol.wire.messages import HeldEvent, RestoreMode, SubtaskState
from spark_bridge.storage import MemoryStorage, WriteOptions

SUBTASKS = 1_000


def a_large_checkpoint(checkpoint_id: int) -> CompletedCheckpoint:
    parts = {
        subtask: SubtaskSnapshot((SubtaskState(subtask, b"state"),), (HeldEvent(subtask, b"\xc0"),), (subtask,))
        for subtask in range(SUBTASKS)
    }
    return CompletedCheckpoint(checkpoint_id, SUBTASKS, b"coordinator", parts)


def tracked() -> int:
    """How many objects the garbage collector visits, without garbage."""
    gc.collect()
    return len(gc.get_objects())


def test_the_collector_does_not_visit_the_parts_of_a_stored_checkpoint() -> None:
    storage = MemoryStorage(retained=3)
    storage.store("words", a_large_checkpoint(1))
    before = tracked()
    for checkpoint_id in (2, 3):
        storage.store("words", a_large_checkpoint(checkpoint_id))
    assert tracked() - before < SUBTASKS / 10


def test_a_checkpoint_is_read_as_it_was_stored() -> None:
    parts = {
        3: SubtaskSnapshot(),
        0: SubtaskSnapshot((SubtaskState(0, b"a"), SubtaskState(4, b"")), (), (7,)),
        2: SubtaskSnapshot((), (HeldEvent(2, b"\xc0", True), HeldEvent(5, b"\xc3", False)), ()),
        1: SubtaskSnapshot((SubtaskState(1, b"b"),), (HeldEvent(1, b"\x01"),), (2**40, 3)),
    }
    checkpoint = CompletedCheckpoint(9, 6, b"coordinator", parts, "a label")
    storage = MemoryStorage()
    storage.store("words", checkpoint, WriteOptions(mode=RestoreMode.BATCH))
    read = storage.read("words", 9)
    assert read == checkpoint
    assert list(read.subtask_states) == [3, 0, 2, 1]
    assert [type(one) for one in (*read.subtask_states[1].states, *read.subtask_states[1].held)] == [
        SubtaskState,
        HeldEvent,
    ]
    assert storage.latest("words") == checkpoint
    (info,) = storage.list("words")
    assert (info.subtasks, info.held_events, info.size_bytes, info.mode, info.label) == (4, 3, 16, "batch", "a label")
