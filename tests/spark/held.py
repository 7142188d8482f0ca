# SPDX-License-Identifier: Apache-2.0

"""Operators that tell which process they run in, and wait until the test has looked at it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from headgate import SplitReader
from headgate.sources import FileSource
from spark_bridge.sources.files.task import FileReader
from tests.spark.faults.file_gates import wait_for_files
from tests.spark.faults.waiting import wait_until

PLANS = "python_streaming_source_runner"
"""What is in the command of a process in which Spark plans a stream."""


def held(folder: str, name: str) -> None:
    """In a task: tell which process this is, and wait until the test has looked at it."""
    Path(folder, f"pid-{name}-{os.getpid()}").touch()
    wait_until(Path(folder, "open-0").exists, "the test has looked", 600.0)  # a JVM's memory is large


def pid_of(folder: Path, name: str) -> int:
    wait_for_files(folder, f"pid-{name}-*", 1)
    [found] = folder.glob(f"pid-{name}-*")
    return int(found.name.rpartition("-")[2])


class HeldReader(FileReader):
    """Waits before its first row."""

    def __init__(self, place: str, *args: Any) -> None:
        super().__init__(*args)
        self._place = place

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any]]:
        held(self._place, "reader")
        yield from super().read_from(split, position)


class HeldSource(FileSource):
    """A ``FileSource`` whose reader waits."""

    def __init__(self, place: Path, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.place = place

    @property
    def operator(self) -> Any:
        make: Any = super().operator
        return partial(HeldReader, str(self.place), *make.args)


class HeldSplits(SplitReader):
    """Waits before its first split."""

    def __init__(self, place: str) -> None:
        self._place = place

    def read_split(self, split: int) -> Iterator[int]:
        held(self._place, "neighbour")
        yield split
