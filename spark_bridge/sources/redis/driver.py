# SPDX-License-Identifier: Apache-2.0

"""The driver's half of a Redis source: finds the streams, and where each of them ends now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter, ne
from typing import Any, Literal
from zlib import crc32

import pyarrow

from actors.coordination import SplitEnumerator
from actors.coordination.sources.enumerators import (
    BoundedLogEnumerator,
    DiscoveringSplitEnumerator,
    OwnedSplitEnumerator,
)
from protocol.arguments import AT_LEAST_1, POSITIVE, SCHEMA, checked, given
from protocol.describing import show
from protocol.source_events import SplitAt
from spark_bridge.sources.redis.task import RedisReader, check_position, last_id, reached
from spark_bridge.sources.source import Source
from spark_bridge.subtask.source import SplitReader


class RedisStreamsSource(Source):
    """Reads Redis Streams as Arrow batches, one row for each entry. Needs ``pip install 'headgate[redis,dataframe]'``.

    Each stream is read by one task, in the order of its entries. A task reads any number of streams, in turns.

    Exactly once for each entry that is in its stream until it is read, if ``url`` leads to the primary. A position is
    an entry's id, and the checkpoints have the positions: consumer groups are not used, and nothing is acknowledged. If
    an entry is trimmed or deleted before the source reads it, the source skips it. If a stream was deleted, or has only
    smaller ids than its position, the job fails with ``SourceDataLost``.

    In a cluster, streams are found and read on all primaries, also after a failover.

    Args:
        url: how to connect, from the driver and from every task: ``redis://host:6379/0``. It travels to the tasks in
            Spark's closure. In a cluster, it may be any server.
        streams: the keys of the streams; or a pattern such as ``"orders:*"``, for all streams with such a key.
        schema: the columns, as a ``pyarrow.Schema``: each is the field of that name, converted from its text, and NULL
            if an entry does not have it.
        id_column: the column of the schema that gets the entry's id, if any.
        bounded: read what the streams have when the run begins, and end. In streaming mode, the run after that reads
            what has come since. Otherwise the source never ends.
        start: from which entry on: ``"first"``, or ``"new"`` for those that are added after the run has begun.
        discover_every_s: look for new streams of a pattern so often, in seconds. Not if it is bounded.
        batch_rows: how many entries a batch has at most.
        rate_limit_per_s: how many entries all tasks together read in a second; None for no limit.

    Raises:
        ValueError: no streams, an unknown ``start``, or a number that is not positive.
    """

    @checked(schema=SCHEMA, batch_rows=AT_LEAST_1, rate_limit_per_s=POSITIVE)
    def __init__(
        self,
        url: str,
        streams: Sequence[str] | str,
        schema: pyarrow.Schema,
        *,
        id_column: str | None = None,
        bounded: bool = False,
        start: Literal["first", "new"] = "first",
        discover_every_s: float = 10.0,
        batch_rows: int = 1_000,
        rate_limit_per_s: float | None = None,
    ) -> None:
        if not streams:
            raise ValueError(f"streams must be a list of keys, or a pattern, not {show(streams)}")
        if id_column is not None and id_column not in schema.names:
            shown = given("id_column", id_column)
            raise ValueError(f"id_column must be a column of the schema ({schema.names}), not {shown}")
        self._url = url
        self._streams = streams if isinstance(streams, str) else tuple(streams)
        self.schema = schema
        self._id_column = id_column
        self._bounded = bounded
        self._start = start
        self._discover_every_s = discover_every_s
        self._batch_rows = batch_rows
        self._rate_limit_per_s = rate_limit_per_s
        self._lengths: dict[str, int] = {}  # when they were last looked at

    def __repr__(self) -> str:
        return f"RedisStreamsSource({self._streams!r})"

    def splits(self) -> list[Any]:
        """The splits that exist now. Blocks."""
        with reached(self._url, repr(self)) as client:
            if isinstance(self._streams, str):
                keys = sorted(key.decode() for key in client.scan_iter(match=self._streams, count=1000, _type="STREAM"))
            else:
                keys = list(self._streams)
            for key in keys:
                if (kind := client.type(key).decode()) not in ("stream", "none"):
                    raise ValueError(f"the key {key!r} is a {kind}, not a stream: correct it in streams")
            ends = {key: last_id(client, key) for key in keys}
            self._lengths = {key: client.xlen(key) for key in keys}
        found: list[Any] = []
        for key, end in ends.items():
            split = [key, (end or "0-0") if self._bounded else None]
            found.append(SplitAt(split, end) if self._start == "new" and end not in (None, "0-0") else split)
        return found

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> DiscoveringSplitEnumerator:
        if self._bounded:
            return BoundedLogEnumerator(
                self.splits,
                state,
                key=_key,
                end=itemgetter(1),
                is_later=ne,  # an earlier end is of another stream, which the task says that gets the split
                backlog=self._not_begun,
            )
        every_s = self._discover_every_s if isinstance(self._streams, str) else None
        return OwnedSplitEnumerator(
            self.splits, state, every_s=every_s, key=_key, backlog=self._not_begun, place=self._place
        )

    def _not_begun(self, split: Any, position: Any) -> int:
        """The entries of a stream that no task has begun. One that was begun counts when a task has it again."""
        return self._lengths.get(_key(split), 0) if position is None else 0

    def _place(self, split: Any) -> int:
        """Streams of a list are dealt out evenly; those of a pattern by their names, as their number may change."""
        key = _key(split)
        return crc32(key.encode()) if isinstance(self._streams, str) else self._streams.index(key)

    def next_part(self, split: Any, position: Any) -> tuple[Any, Any] | None:
        stream, until = split
        if until is not None:
            return super().next_part(split, position)
        with reached(self._url, repr(self)) as client:
            end = last_id(client, stream)
        if position is not None:
            check_position(stream, position, end)
        return None if end in (None, "0-0", position) else (SplitAt([stream, end], position), end)

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return partial(RedisReader, self._url, self.schema, self._id_column, self._batch_rows, self._rate_limit_per_s)


def _key(split: Any) -> str:
    return str(split[0])
