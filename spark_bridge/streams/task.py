# SPDX-License-Identifier: Apache-2.0

"""A stream outside the sidecar: the process in which Spark plans it, and the tasks that read a micro-batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.describing import show
from protocol.errors import SAME_RELEASE, HeadgateError
from protocol.source_events import StreamBatch, stream_batch_event
from spark_bridge.subtask.source import SplitReader

IDLE_PAUSE_S = 0.1
"""Spark asks again after some milliseconds if there is nothing new."""


class StreamFailed(HeadgateError):
    """The sidecar refused to plan a stream, or has failed. The message says why."""


@dataclass(frozen=True)
class StreamClient:
    """Asks the sidecar what a stream has. It travels to Spark's planning process with pickle, and holds a key."""

    ask: Callable[[str, Any], Any]
    """Called with a method and an argument, and returns the raw answer of the sidecar. Blocks."""

    def initial(self, latest: dict[str, Any] | None = None) -> dict[str, Any]:
        """The offset at which a new query begins; before ``latest``, if Spark was told one already."""
        return _offset(self._ask("initial", None if latest is None else _pair(latest)))

    def latest(self, start: dict[str, Any] | None, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """The newest offset. Plans a batch of all that is new, if every batch up to ``start`` has been given out.

        ``before`` is the last answer.
        """
        answer = _offset(self._ask("latest", None if start is None else _pair(start)))
        if answer == (before if start is None else start):
            time.sleep(IDLE_PAUSE_S)
        return answer

    def target(self, start: dict[str, Any]) -> dict[str, Any]:
        """Plan all that is new, in batches of the usual size; return the offset of the last."""
        return _offset(self._ask("target", _pair(start)))

    def count(self, batch: StreamBatch) -> int:
        """How many splits the batch has."""
        return int(self._ask("count", [batch.stream, batch.start, batch.end]))

    def commit(self, end: dict[str, Any]) -> None:
        """Spark will not ask for anything up to ``end`` again."""
        self._ask("commit", _pair(end))

    def _ask(self, method: str, argument: Any = None) -> Any:
        match answer := self.ask(method, argument):
            case [True, result]:
                return result
            case [False, str(kind), str(text)]:
                raise StreamFailed(f"{text} ({kind})")
            case _:
                raise StreamFailed(f"the sidecar sent an invalid answer, {show(answer)}: {SAME_RELEASE}")


def batch_between(start: dict[str, Any], end: dict[str, Any]) -> StreamBatch:
    """The batch of Spark's two offsets. Raises ``StreamFailed`` if they belong to different streams."""
    (stream, first), (other, last) = _pair(start), _pair(end)
    if stream != other:
        raise StreamFailed(
            "the offsets of this batch belong to two streams: the checkpointLocation is damaged. Start the query "
            "with a new one"
        )
    return StreamBatch(stream, first, last)


def next_of(start: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """The offset of the batch after ``start``, up to ``target``."""
    batch = batch_between(start, target)
    return _offset([batch.stream, min(batch.start + 1, batch.end)])


def reader_of_batch(make_reader: Callable[[], SplitReader], batch: StreamBatch) -> SplitReader:
    """Make a reader that first tells the split enumerator which batch its task belongs to."""
    reader = make_reader()
    reader.announced = stream_batch_event(batch)
    return reader


def _offset(pair: list[Any]) -> dict[str, Any]:
    stream, number = pair
    return {"stream": stream, "batch": number}


def _pair(offset: dict[str, Any]) -> list[Any]:
    try:
        return [offset["stream"], offset["batch"]]
    except (KeyError, TypeError) as error:
        raise StreamFailed(
            f"{show(offset)} is not an offset of a Headgate source, so the checkpointLocation is that of another "
            "query: start the query with its own, or with a new one"
        ) from error
