# SPDX-License-Identifier: Apache-2.0

"""The fifth hunter: applications that die while they write a checkpoint, whose file appears later (H64).

In the simulation, a restore record rarely decides anything: a driver's file has to appear after its successor has
restored an older checkpoint, and the successor has to die before it completes one. Of 1,500 worlds a handful get that
far. Here every application ends that way. The storage is the product's, on the simulator's disk.
"""

from __future__ import annotations

import random

from protocol.barrier_tracker import CompletedCheckpoint
from spark_bridge.storage import CheckpointStorage
from tests.simulation.application import OPERATOR
from tests.simulation.checkers import demand
from tests.simulation.disk import Disk
from tests.simulation.storage import URL
from tests.simulation.threads import Operation, SimulatedThread

LIVES = 16
NOTHING = 0


def check_late_writes(seed: int) -> None:
    """Run one history; raise the violation that it finds."""
    dice = random.Random(seed)
    disk = Disk(dice, lambda: 0.0, lambda what, which: None)
    disk.budget, disk.renames = 0, False
    late: list[Operation] = []
    intact = {NOTHING}  # the checkpoints whose references all exist
    completed = NOTHING
    for _ in range(LIVES):
        for operation in [operation for operation in late if dice.random() < 0.5]:
            late.remove(operation)
            operation.effect()
        storage = CheckpointStorage(URL, options={"disk": disk})
        storage.prepare()
        first, *ids = storage.reserve_ids(2 + dice.choice([0, 0, 1, 2]))
        if dice.random() < 0.1:  # the user wants to begin again
            storage.start_from(OPERATOR, None, first=first)
            base = completed = NOTHING
        else:
            found = storage.restore_latest(OPERATOR, first=first)
            base = NOTHING if found is None else found.checkpoint_id
            demand(base >= completed, f"H50: checkpoint {base} is restored, and {completed} has completed")
            demand(base in intact, f"H64: checkpoint {base} is restored, and what it refers to was destroyed")
        intact = {base, *ids}  # a new application destroys everything that it has not restored
        for checkpoint_id in ids[:-1]:
            storage.store(OPERATOR, _checkpoint(checkpoint_id))
            completed = checkpoint_id
        late.append(_begin_to_store(storage, disk, ids[-1]))


def _checkpoint(checkpoint_id: int) -> CompletedCheckpoint:
    return CompletedCheckpoint(checkpoint_id, 1, b"", {})


def _begin_to_store(storage: CheckpointStorage, disk: Disk, checkpoint_id: int) -> Operation:
    """Start to store a checkpoint and die after asking the disk to name the file; return that request."""
    thread = SimulatedThread(lambda: storage.store(OPERATOR, _checkpoint(checkpoint_id)), lambda result, error: None)
    while thread.operation is not None and thread.operation.kind != "copy":
        disk.serve(thread)
    asked = thread.operation
    assert asked is not None
    thread.kill()
    return asked
