# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.golden``: write checkpoints of the applications as files, once for each version of the format.

Only when a new version comes: what is there is never written again. A file is named for its application, for whether
checkpoints hold or record events, and for the version of its format.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from headgate.testing import OperatorTask, World
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.wire.checkpoint_format import StoredCheckpoint, encode_checkpoint
from protocol.wire.messages import RestoreMode
from tests.golden.applications import APPLICATIONS, HELD, run, with_files, with_pieces
from tests.primitives.histories import with_held_requests

FOLDER = Path(__file__).parent
CREATED_MS = 1_795_769_592_000
MOMENTS_S = (0.35, 0.5)
"""When a checkpoint is asked for, in seconds after the one before: in the middle of the work."""


async def checkpoints_of(name: str, *, hold: bool) -> list[CompletedCheckpoint]:
    async def steps(world: World, tasks: list[OperatorTask]) -> None:
        for moment_s in MOMENTS_S:
            await world.advance(moment_s)
            world.begin_checkpoint()
        await world.advance(0.1)

    return await run(name, steps, hold=hold)


def in_every_format(name: str, checkpoint: CompletedCheckpoint) -> Iterator[CompletedCheckpoint]:
    """The checkpoint as releases with each version of the format would have written it.

    The first had no labels, and so no number of partitions; in a later one this number may be unknown.
    """
    yield replace(checkpoint, label="", partitions=0)
    yield checkpoint
    if name == "requests":
        yield with_held_requests(checkpoint, HELD, subtask=1)
    if name == "counts":
        yield with_files(checkpoint)
        yield with_pieces(checkpoint)
    yield replace(checkpoint, partitions=0)


def main() -> None:
    written = 0
    for name in APPLICATIONS:
        for hold in (True, False):
            *_, checkpoint = asyncio.run(checkpoints_of(name, hold=hold))
            for one in in_every_format(name, checkpoint):
                data = encode_checkpoint(StoredCheckpoint(name, RestoreMode.STREAMING, CREATED_MS, "0.1.0", one))
                path = FOLDER / f"{name}-{'held' if hold else 'recorded'}-format{data[11]}.checkpoint"
                if not path.exists():
                    path.write_bytes(data)
                    written += 1
    print(f"{written} files in {FOLDER}", file=sys.stderr)


if __name__ == "__main__":
    main()
