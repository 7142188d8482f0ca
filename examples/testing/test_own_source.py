# SPDX-License-Identifier: Apache-2.0

"""Your own source, for the lines of files that grow in one folder, and the suite that tests any source.

Run it with ``python -m pytest examples/testing/test_own_source.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from headgate import SplitReader
from headgate.sources import DiscoveringSplitEnumerator, Source, SplitEnumerator
from headgate.testing import SourceTarget, source_cases


class LinesReader(SplitReader):
    """In a task: reads the lines of its files in turns. A position is how many bytes of a file were read."""

    splits_open_max = 100

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_from(self, split: str, position: int | None, /) -> Iterator[tuple[int, str] | None]:
        at = position or 0
        while True:
            with open(self._folder / split, "rb") as file:
                file.seek(at)
                line = file.readline()
            if line.endswith(b"\n"):
                at += len(line)
                yield at, line.decode().rstrip("\n")
            else:
                yield None  # the rest of the line comes later


class Lines(Source):
    """Settings only: it travels to the tasks. New files are found twice in a second."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return DiscoveringSplitEnumerator(
            lambda: sorted(file.name for file in self._folder.glob("*.txt")), state, every_s=0.5
        )

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return partial(LinesReader, self._folder)


class LinesTarget(SourceTarget):
    """How the suite makes the source, and fills the folder."""

    forms = ("unbounded",)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def source(self, *, bounded: bool) -> Lines:
        return Lines(self._folder)

    def write(self, split: int, numbers: Sequence[int]) -> None:
        with open(self._folder / f"{split}.txt", "a") as file:
            file.writelines(f"{number}\n" for number in numbers)

    def clear(self) -> None:
        for file in self._folder.glob("*.txt"):
            file.unlink()

    def numbers(self, output: str) -> Iterable[int]:
        return [int(output)]


def test_every_line_counts_once(tmp_path: Path) -> None:
    for case in source_cases(histories=1):
        case.run(LinesTarget(tmp_path))
