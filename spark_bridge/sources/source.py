# SPDX-License-Identifier: Apache-2.0

"""What every ready source has, and several of them in a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from actors.coordination import SourceCoordinator, SplitEnumerator
from actors.coordination.sources.enumerators import HybridSplitEnumerator
from protocol.arguments import checked
from protocol.source_events import SplitAt
from spark_bridge.sources.hybrid import HybridReader
from spark_bridge.subtask.source import SplitReader


class Source(ABC):
    """Both halves of a source: give it to ``chain(source=...)`` or to ``sidecar.source``.

    Its halves can also be used by themselves, ``coordinate(name, source.coordinator, ...)`` on the driver and
    ``handle.subtask(source.operator)`` for the tasks. Write your own source as a subclass that defines ``enumerator``
    and ``operator``.
    """

    @abstractmethod
    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        """Return a new enumerator, for its state in a checkpoint, or None at the beginning.

        ``previous`` is the enumerator of the source before this one in a ``HybridSource``.
        """

    def next_part(self, split: Any, position: Any) -> tuple[Any, Any] | None:
        """For ``spark.readStream``: return what can be read of a split now, from ``position`` on (None: its beginning).

        The result is ``(part, next_position)``. ``part`` is a split, or a ``SplitAt``, that ends where the next part
        begins. ``next_position`` is None if nothing follows. Return None if there is nothing now. The default is for
        splits that end: the whole rest is the last part. Override it for splits that never end, such as those of a log.
        The same part is read again if Spark repeats a micro-batch, and must then have the same records.

        Called on a worker thread of the driver, and may block.
        """
        return (split if position is None else SplitAt(split, position)), None

    @property
    @abstractmethod
    def operator(self) -> Callable[[], SplitReader]:
        """What makes the reader in a task. It is pickled."""

    @property
    def coordinator(self) -> SourceCoordinator:
        """A new coordinator, which builds the enumerators."""
        return SourceCoordinator(self.enumerator)


class HybridSource(Source):
    """Several sources, one after the other, as if they were one: for example the files of the past, then a live stream.

    Each source begins when the one before it is read to its end; its ``enumerator`` gets the one before as
    ``previous``, so that it can begin exactly where that has ended. All readers must have positions. Only the last
    source may be unbounded.
    """

    @checked()
    def __init__(self, *sources: Source) -> None:
        if not sources:
            raise ValueError("a hybrid source needs at least one source: pass them in the order in which they are read")
        self._sources = sources

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return HybridSplitEnumerator([source.enumerator for source in self._sources], state)

    def next_part(self, split: Any, position: Any) -> tuple[Any, Any] | None:
        index, inner = split
        cut = self._sources[index].next_part(inner, position)
        if cut is None:
            return None
        part, following = cut
        if isinstance(part, SplitAt):
            return SplitAt([index, part.split], part.position), following
        return [index, part], following

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return partial(HybridReader, [source.operator for source in self._sources])
