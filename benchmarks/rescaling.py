# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.rescaling [MIB]``: another parallelism while tasks run; states of 1,024 MiB in all.

Each subtask keeps a file for each of its key groups and reads from a source that has nothing to read. Printed are the
seconds that ``sidecar.rescale`` takes, and those until all new tasks are ready, for 4, 8, 3 and then 5 subtasks. The
storage is a local directory.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.spark_session import spark_session
from headgate import (
    CheckpointConfig,
    Sidecar,
    SidecarConfig,
    SourceCoordinator,
    SplitReader,
    StaticSplitEnumerator,
    SubtaskContext,
    SubtaskOperator,
    chain,
)
from headgate.types import KeyGroups, RestoredFiles, StateFiles

CHANGES = (4, 8, 3, 5)
GROUPS = KeyGroups(128)
POLL_S = 0.005
PATIENCE_S = 300.0


class Idle(SplitReader):
    def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
        while True:
            yield None


class Holds(SubtaskOperator):
    """Has a file for each key group, and lets records pass."""

    counts_records = False

    def __init__(self, file_bytes: int) -> None:
        self.file_bytes = file_bytes

    def open(self, context: SubtaskContext[Any], state: bytes | RestoredFiles | None) -> None:
        self.folder = context.state_folder
        groups = GROUPS.range_of(context.subtask, context.parallelism)
        if state is None:
            for group in groups:
                (self.folder / f"{group}.sst").write_bytes(os.urandom(self.file_bytes))
        found = sorted(int(file.stem) for file in self.folder.iterdir())
        assert found == [*groups], found

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        yield from records

    def merge_files(self, pieces: Sequence[RestoredFiles]) -> bytes:
        for piece in pieces:
            assert piece.key_groups is not None
            for file in list(piece.folder.iterdir()):
                if int(file.stem) not in piece.key_groups:
                    file.unlink()
                elif piece is not pieces[0]:
                    file.rename(pieces[0].folder / file.name)
        return b""

    def snapshot_state(self, checkpoint_id: int) -> StateFiles:
        return StateFiles(self.folder, key_groups=GROUPS)


def wait_for_tasks(sidecar: Sidecar, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while sidecar.status().operators["holds"].counts["ready"] != count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} tasks are not ready within {PATIENCE_S:g} s")
        time.sleep(POLL_S)


def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 1_024
    source = SourceCoordinator(lambda state: StaticSplitEnumerator(range(max(CHANGES)), state)), Idle
    holds = lambda: Holds(mib * 2**20 // GROUPS.count)  # noqa: E731
    print(f"{mib} MiB; load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as root, spark_session(f"local[{max(CHANGES)}]") as spark:
        rare = CheckpointConfig(interval_s=None, timeout_s=PATIENCE_S)
        with Sidecar(spark, SidecarConfig(storage=Path(root, "storage"))) as sidecar:
            handle = sidecar.coordinate(
                "holds", chain(read=source, hold=holds), parallelism=CHANGES[0], mode="streaming", checkpoint=rare
            )

            def run() -> None:
                with suppress(Exception):  # it ends with the sidecar
                    handle.run()

            threading.Thread(target=run, daemon=True).start()
            wait_for_tasks(sidecar, CHANGES[0])
            began = time.perf_counter()
            sidecar.checkpoint("holds", timeout_s=PATIENCE_S)
            print(f"first checkpoint: {time.perf_counter() - began:.2f} s", flush=True)
            for before, after in pairwise(CHANGES):
                began = time.perf_counter()
                sidecar.rescale("holds", after, timeout_s=PATIENCE_S)
                returned_s = time.perf_counter() - began
                wait_for_tasks(sidecar, after)
                ready_s = time.perf_counter() - began
                print(f"{before} to {after}: the call {returned_s:.2f} s, all ready {ready_s:.2f} s", flush=True)


if __name__ == "__main__":
    main()
