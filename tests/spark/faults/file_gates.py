# SPDX-License-Identifier: Apache-2.0

"""Files by which plain tasks and the test's thread wait for one another, without a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.spark.faults.waiting import wait_until


def wait_for_files(folder: Path, pattern: str, count: int) -> None:
    """Wait until this many files with this name exist."""
    wait_until(lambda: len(list(folder.glob(pattern))) >= count, f"{count} x {pattern} in {folder}")


def all_together(folder: Path, tasks: int) -> Callable[[int, Iterable[Any]], Iterator[Any]]:
    """For ``mapPartitionsWithIndex``: no task continues before all have begun, so each has its own slot."""

    def run(partition: int, rows: Iterable[Any]) -> Iterator[Any]:
        Path(folder, f"begun-{partition}").touch()
        wait_for_files(folder, "begun-*", tasks)
        yield from rows

    return run


def one_by_one(folder: Path) -> Callable[[int, Iterable[Any]], Iterator[Any]]:
    """For ``mapPartitionsWithIndex``: a task reads its rows, and yields them when the test opens its gate."""

    def run(partition: int, rows: Iterable[Any]) -> Iterator[Any]:
        read = list(rows)
        Path(folder, f"read-{partition}").touch()
        wait_for_files(folder, f"open-{partition}", 1)
        yield from read

    return run


def open_gates(folder: Path, partitions: Iterable[int]) -> None:
    for partition in partitions:
        Path(folder, f"open-{partition}").touch()


def close_gates(folder: Path, partitions: Iterable[int]) -> None:
    """Close the gates for tasks that arrive from now on."""
    for partition in partitions:
        Path(folder, f"open-{partition}").unlink()
