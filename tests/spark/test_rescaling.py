# SPDX-License-Identifier: Apache-2.0

"""Another parallelism while the application runs, on real Spark: nothing lost or doubled, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headgate import (
    NO_RESTART,
    CheckpointConfig,
    Sidecar,
    SidecarConfig,
    SourceCoordinator,
    SplitReader,
    StaticSplitEnumerator,
    chain,
)
from headgate.errors import CheckpointFailed, SidecarError
from headgate.sinks import FileSink
from spark_bridge.driver.handle import OperatorHandle
from tests.spark.actions import Action
from tests.spark.conftest import SparkOn
from tests.spark.counting import Counting
from tests.spark.operators import kill_once

pytestmark = pytest.mark.spark

SPLITS, ROWS = 10, 50
CHANGES = (4, 8, 3, 5)


class Gated(SplitReader):
    """Reads the numbers of a split, as far as the test has opened them, and kills its process once for each part."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    def read_from(self, split: Any, position: Any, /) -> Iterator[Any]:
        for number in range(position or 0, ROWS):
            part = number * len(CHANGES) // ROWS
            while not (self._folder / f"open {part}").exists():
                yield None
            if number * len(CHANGES) % ROWS >= ROWS // 2 and split == min(part, 2):
                kill_once(self._folder / f"died in part {part}")
            yield number + 1, str(split * ROWS + number)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rescale(sidecar: Sidecar, name: str, parallelism: int) -> None:
    """A task that dies while the checkpoint is taken fails it, and nothing changes."""
    for _ in range(20):
        before = sidecar.handles[name].parallelism if hasattr(sidecar, "handles") else None
        try:
            sidecar.rescale(name, parallelism)
        except CheckpointFailed as error:
            print(f"still {before}: {error}")
        else:
            return
    raise AssertionError("no checkpoint was completed twenty times")


@pytest.mark.long
def test_every_record_is_written_once_over_four_parallelisms_while_tasks_are_killed(
    spark_on: SparkOn, tmp_path: Path
) -> None:
    spark = spark_on("local[8,4]")
    out = tmp_path / "out"
    source = (
        SourceCoordinator(lambda state: StaticSplitEnumerator(range(SPLITS), state)),
        lambda: Gated(str(tmp_path)),
    )
    with Sidecar(spark, SidecarConfig(storage=str(tmp_path / "checkpoints"))) as sidecar:
        handle = sidecar.coordinate(
            "pipeline",
            chain(source=source, sink=FileSink(str(out))),
            parallelism=CHANGES[0],
            mode="streaming",
            checkpoint=CheckpointConfig(interval_s=0.2, tolerated_failures=1000),
        )
        action = Action(lambda: handle.run(restart=NO_RESTART))
        for part, parallelism in enumerate(CHANGES):
            if part:
                began = time.monotonic()
                rescale(sidecar, "pipeline", parallelism)
                print(f"{CHANGES[part - 1]} -> {parallelism}: {time.monotonic() - began:.2f} s")
            assert handle.parallelism == parallelism
            until(lambda: handle.statistics()["ready"] >= handle.parallelism)
            print(f"all ready after {time.monotonic() - began:.2f} s" if part else "begun")
            (tmp_path / f"open {part}").touch()
        action.result()
        assert sidecar.status().operators["pipeline"].parallelism == CHANGES[-1]
    lines = [line for file in out.glob("part-*") for line in file.read_text().splitlines()]
    assert sorted(map(int, lines)) == list(range(SPLITS * ROWS))
    assert list(tmp_path.glob("died*")), "no task was killed"
