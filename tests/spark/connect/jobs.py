# SPDX-License-Identifier: Apache-2.0

"""Coordinated jobs of a Spark Connect client. The module travels by value, since the server does not have it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from pyspark import cloudpickle

from headgate import CoordinatorContext, OperatorHandle, Reply, SourceCoordinator, SplitReader, StaticSplitEnumerator
from headgate.sources import Source, SplitEnumerator
from tests.spark.counting import Counting

SCHEMA = "split long"


@contextmanager
def travelling_by_value(*modules: ModuleType) -> Iterator[None]:
    """Send these modules' functions and classes whole, because the server has no tests."""
    for module in modules:
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]


class ReadNumbers(SplitReader):
    """Yields each split, which is a number, as a row. Tells its coordinator of each, and dies when it is told to."""

    def read_split(self, split: int) -> Iterator[Any]:
        import pyarrow

        self.context.send_event(["read", split, os.getpid()])
        if self.context.request(["next", split], timeout_s=600.0) == "die":  # the memory of a JVM takes long to search
            os.kill(os.getpid(), signal.SIGKILL)
        yield pyarrow.RecordBatch.from_pydict({"split": [split]})


class ReadInPandas(ReadNumbers):
    """The same for ``mapInPandas``."""

    def read_split(self, split: int) -> Iterator[Any]:
        for batch in super().read_split(split):
            yield batch.to_pandas()


class ReadRows(ReadNumbers):
    """The same for ``foreachPartition``, which wants no outputs."""

    def read_split(self, split: int) -> Iterator[Any]:
        for _ in super().read_split(split):
            yield split


class Numbers(SourceCoordinator):
    """Hands out numbers. ``fate(split)`` is called once for each reading of a split; "die" kills the reader."""

    def __init__(self, numbers: range, fate: Callable[[int], str] = lambda split: "go on") -> None:
        super().__init__(lambda state: StaticSplitEnumerator(list(numbers), batch_size=1))
        self.fate = fate
        self.lost: list[str] = []
        self.pids: list[int] = []

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if isinstance(event, list) and event[0] == "read":
            self.pids.append(event[2])
        else:
            await super().handle_event_from_operator(subtask, attempt, event)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        return self.fate(request[1])

    async def subtask_failed(self, subtask: int, attempt: int, reason: Any) -> None:
        self.lost.append(reason.kind.name)
        await super().subtask_failed(subtask, attempt, reason)


class Held(Numbers):
    """Does not answer before ``release``, so that its readers wait. ``waiting`` is set when one does."""

    def __init__(self, numbers: range) -> None:
        super().__init__(numbers)
        self.waiting = threading.Event()
        self.ended: list[str] = []
        self.replies: list[Reply] = []
        self._released = False
        self._at: CoordinatorContext | None = None

    async def start(self, context: CoordinatorContext) -> None:
        self._at = context
        await super().start(context)

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        if self._released:
            return "go on"
        self.replies.append(Reply())
        self.waiting.set()
        return self.replies[-1]

    def release(self) -> None:
        """Answer all that wait, and those that come. Any thread."""
        self._released = True
        if self._at is not None:
            self._at.call_soon_threadsafe(self._answer)

    async def _answer(self) -> None:
        for reply in self.replies:
            if not reply.settled:
                reply.answer("go on")

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self.ended.append(reason)
        await super().run_ended(run_id, succeeded, reason)


def read(session: Any, handle: OperatorHandle) -> list[int]:
    """Run the job, and return the splits of its rows, sorted."""
    tasks = session.range(0, handle.parallelism, 1, handle.parallelism)
    rows = tasks.mapInArrow(handle.subtask(ReadNumbers), SCHEMA).collect()
    return sorted(row.split for row in rows)


class CountInArrow(Counting):
    """``Counting``, with one record batch as its output. On request, it tells of its process."""

    def handle_event(self, event: Any) -> None:
        if event == "process":
            self.context.send_event(["process", os.getpid()])
        else:
            super().handle_event(event)

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        import pyarrow

        for subtask, last in super().process(records):
            yield pyarrow.RecordBatch.from_pydict({"subtask": [subtask], "last": [last]})


class NumberReader(SplitReader):
    """Yields each split, which is a number."""

    def read_split(self, split: int) -> Iterator[int]:
        yield split


class NumberSource(Source):
    """The numbers below ``count``, one for each split."""

    def __init__(self, count: int) -> None:
        self._count = count

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> SplitEnumerator:
        return StaticSplitEnumerator(range(self._count), state)

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return NumberReader


def write_lines(marker: str, fatal: int, numbers: Iterator[int]) -> Iterator[str]:
    """Each number as a line; the process dies once, at ``fatal``."""
    for number in numbers:
        if number == fatal and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield json.dumps({"number": number})


class DieOnce:
    """A fate: the first reader of ``split`` dies."""

    def __init__(self, split: int) -> None:
        self._split = split
        self._died = False

    def __call__(self, split: int) -> str:
        if split != self._split or self._died:
            return "go on"
        self._died = True
        return "die"
