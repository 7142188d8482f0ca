# SPDX-License-Identifier: Apache-2.0

"""Reads several sources, one after the other: the task's half of a ``HybridSplitEnumerator``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from spark_bridge.subtask.source import SplitReader

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["HybridReader"]


class HybridReader(SplitReader):
    """Reads a split ``[index, split]`` with the reader of that index. Each reader must define ``read_from``.

    Splits of the last source may be open at the same time, as its reader says; all others are read one at a time.
    """

    def __init__(self, make_readers: Sequence[Callable[[], SplitReader]]) -> None:
        self._readers: list[SplitReader] = [make() for make in make_readers]
        for reader in self._readers:
            if type(reader).read_from is SplitReader.read_from:
                raise TypeError(
                    f"{type(reader).__name__} has no positions: define read_from to use it in a hybrid source"
                )
        self.rate_limit_per_s = self._readers[-1].rate_limit_per_s
        self.idle_wait_s = self._readers[-1].idle_wait_s

    @property
    def splits_open_max(self) -> int:  # type: ignore[override]  # depends on the source that is being read
        """See ``SplitReader``."""
        last = len(self._readers) - 1
        in_last = bool(self._open) and all(reading.split[0] == last for reading in self._open)
        return self._readers[last].splits_open_max if in_last else 1

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        super().open(context, state)
        for reader in self._readers:
            reader.open(context, None)

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, Any] | None]:
        return self._reader(split).read_from(split[1], position)

    def backlog(self, split: Any, position: Any) -> int | None:
        return self._reader(split).backlog(split[1], position)

    def _reader(self, split: list[Any]) -> SplitReader:
        index: int = split[0]
        return self._readers[index]

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
