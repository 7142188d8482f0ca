# SPDX-License-Identifier: Apache-2.0

"""One run of a job with large states, as its own process: ``python -m tests.states.job OPTIONS``, options as JSON.

Its records put new values of some keys into a ``KeyedState``. It says ``begun`` when its action begins, and ``done``
when its result is in FOLDER/result.json. It may be killed at any moment; run again, it goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from headgate import CheckpointConfig, Sidecar, SidecarConfig, StorageDetails, SubtaskContext, SubtaskOperator
from headgate.types import KeyedState, KeyGroups, RestoredFiles, StateFiles
from spark_bridge.storage import CheckpointStorage
from tests.spark.quiet_session import quiet_session

OPERATOR = "values"
GROUPS = KeyGroups(32)
VALUE_BYTES = 2**16
CHANGED = 0.05
"""Which share of the keys a run changes. The first one puts all of them."""
PROCESS_S = 4.0
"""About how long the records of a run take at least, however few they are, so that something can strike."""
SWEEP_S = 60.0


@dataclass(frozen=True)
class Run:
    """``mib``: of all states together. ``settle``: look at the end what is left in the storage."""

    folder: str
    storage: str
    options: dict[str, Any]
    seed: int
    number: int
    parallelism: int
    mib: int
    settle: bool = False

    def encode(self) -> str:
        return json.dumps(asdict(self))

    def records(self) -> list[tuple[int, int]]:
        """Keys, with how often each has been put by then."""
        keys = range(self.mib * 2**20 // VALUE_BYTES)
        if self.number == 0:
            return [(key, 1) for key in keys]
        counts = model_of(self.seed, self.number - 1, self.mib)
        changed = sorted(_changed(self.seed, self.number, len(keys)))
        return [(key, counts[key] + 1) for key in changed]


def _changed(seed: int, number: int, keys: int) -> list[int]:
    return Random(f"{seed} changes {number}").sample(range(keys), max(1, int(keys * CHANGED)))


def model_of(seed: int, number: int, mib: int) -> dict[int, int]:
    """How often each key has been put after this run."""
    keys = mib * 2**20 // VALUE_BYTES
    counts = dict.fromkeys(range(keys), 1)
    for earlier in range(1, number + 1):
        for key in _changed(seed, earlier, keys):
            counts[key] += 1
    return counts


def value_of(seed: int, key: int, count: int) -> bytes:
    return Random(f"{seed} {key} {count}").randbytes(VALUE_BYTES)


class Values(SubtaskOperator):
    """Has the last value of each of its keys. Yields all of them at the end, with their digests."""

    goes_on_after_restore = True

    def __init__(self, folder: str, seed: int, record_s: float) -> None:
        self._folder, self._seed, self._record_s = folder, seed, record_s

    def open(self, context: SubtaskContext[Any], state: bytes | RestoredFiles | None) -> None:
        self._values = KeyedState(context, GROUPS)
        self._done = 0
        if isinstance(state, RestoredFiles) and context.input_begins_again:
            self._done = int(state.data or 0)
        Path(self._folder, f"task-{context.subtask}").write_text(str(os.getpid()))

    def process(self, records: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int, str]]:
        order = Path(self._folder, "raise")
        for key, count in islice(records, self._done, None):
            if order.exists():
                order.unlink(missing_ok=True)
                raise RuntimeError("this task was asked to fail")
            before = self._values.get(key)
            last = 0 if before is None else int.from_bytes(before[:4], "big")
            if last != count - 1:
                raise ValueError(f"key {key} was put {last} times, and now comes number {count}")
            self._values.put(key, count.to_bytes(4, "big") + value_of(self._seed, key, count))
            self._done += 1
            time.sleep(self._record_s)
        for number, value in self._values.scan():
            assert isinstance(number, int)
            yield number, int.from_bytes(value[:4], "big"), sha256(value[4:]).hexdigest()

    def merge_files(self, pieces: Sequence[RestoredFiles]) -> bytes:
        return KeyedState.merge(pieces)

    def snapshot_state(self, checkpoint_id: int) -> StateFiles:
        return self._values.snapshot(checkpoint_id, b"%d" % self._done)

    def close(self) -> None:
        self._values.close()


def say(what: str) -> None:
    print(what, flush=True)


def left_in(storage: CheckpointStorage) -> list[str]:
    """The files of states that no kept checkpoint needs."""
    folder = storage.state_folder(OPERATOR)
    kept = storage.kept_states(OPERATOR).values()
    named = {name for handles in kept for handle in handles or () for name in folder.names_of(handle)}
    return list(folder.orphans(named))


def settled(sidecar: Sidecar, run: Run) -> list[str]:
    """What is left once the sweeps have had their time. One follows each checkpoint, when a new one is complete."""
    storage = CheckpointStorage(run.storage, options=run.options)
    deadline = time.monotonic() + SWEEP_S
    while True:
        sidecar.checkpoint()
        left = left_in(storage)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def main(run: Run) -> None:
    spark = quiet_session(f"local[{run.parallelism},8]", "headgate states")
    records = run.records()
    record_s = PROCESS_S * run.parallelism / len(records)
    by_key = spark.sparkContext.parallelize(records, 1).partitionBy(
        run.parallelism, partial(GROUPS.subtask_of, parallelism=run.parallelism)
    )
    details = StorageDetails(options=run.options, task_options=run.options)
    often = CheckpointConfig(interval_s=0.3, tolerated_failures=1000)
    with Sidecar(spark, SidecarConfig(storage=run.storage, storage_details=details)) as sidecar:
        handle = sidecar.coordinate(OPERATOR, parallelism=run.parallelism, mode="streaming", checkpoint=often)
        action = by_key.mapPartitions(handle.subtask(Values, run.folder, run.seed, record_s)).collect
        say("begun")
        found = sidecar.run(action, input_id=f"run {run.number}")
        left = settled(sidecar, run) if run.settle else []
    Path(run.folder, "result.json").write_text(json.dumps({"found": found, "left": left}))
    say("done")
    spark.stop()


if __name__ == "__main__":
    main(Run(**json.loads(sys.argv[1])))
