# SPDX-License-Identifier: Apache-2.0

"""A process that stores checkpoints until it is killed: ``python -m tests.spark_bridge.storage.writer DIR``.

It prints "stored ID" for each one after the write.
"""

from __future__ import annotations

import sys

from protocol.barrier_tracker import CompletedCheckpoint
from spark_bridge.storage import CheckpointStorage


def state_of(checkpoint_id: int) -> bytes:
    """Large enough for a kill to interrupt its write."""
    return checkpoint_id.to_bytes(8, "big") * 50_000


def main() -> None:
    storage = CheckpointStorage(sys.argv[1], retained=2)
    storage.prepare()
    while True:
        for checkpoint_id in storage.reserve_ids(3):
            storage.store("words", CompletedCheckpoint(checkpoint_id, 1, state_of(checkpoint_id)))
            print("stored", checkpoint_id, flush=True)


if __name__ == "__main__":
    main()
