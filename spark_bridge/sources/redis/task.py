# SPDX-License-Identifier: Apache-2.0

"""The tasks' half of a Redis source: reads a stream as Arrow batches, and knows its position behind each.

A split is ``[stream, until]``: the key of a stream, and the id of the last entry that belongs to the split; None if the
split never ends. A position is the id of the last entry that was read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow
import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from spark_bridge.common.redis_clients import client_of
from spark_bridge.common.secret_texts import Secrets
from spark_bridge.sources.errors import SourceDataLost, SourceUnreachable
from spark_bridge.subtask.source import SplitReader

OPEN_MAX = 100_000
RETRIES = 8
BATCHES_MAX = 16
"""A task holds at most so many batches that it has read and not passed on, or one entry of each stream."""
CHECK_EVERY_S = 5.0
"""How often a task looks whether the streams that never end are still the same."""
CHECK_MAX = 1_000
"""So many streams are looked at together, and others the next time."""


class RedisReader(SplitReader):
    """Reads the splits of a ``RedisStreamsSource``: yields ``pyarrow.RecordBatch`` objects, all with one schema."""

    def __init__(
        self, url: str, schema: pyarrow.Schema, id_column: str | None, batch_rows: int, rate_limit_per_s: float | None
    ) -> None:
        self._url = url
        self._schema = schema
        self._id_column = id_column
        self._batch_rows = batch_rows
        self.rate_limit_per_s = rate_limit_per_s
        self._client: redis.Redis | None = None
        self._tails: _Tails | None = None
        self._counts: dict[str, _Count] = {}

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, pyarrow.RecordBatch] | None]:
        stream, until = split
        self.splits_open_max = OPEN_MAX if until is None else 1
        client = self._connected()
        if position is not None:
            check_position(stream, position, last_id(client, stream))
        if until is None:
            return self._follow(client, stream, position)
        return self._read_until(client, stream, position, until)

    def _connected(self) -> redis.Redis:
        if self._client is None:
            self._client = connect(self._url)
        return self._client

    def _read_until(
        self, client: redis.Redis, stream: str, position: str | None, until: str
    ) -> Iterator[tuple[Any, pyarrow.RecordBatch] | None]:
        while True:
            first = "-" if position is None else f"({position}"
            entries: Any = client.xrange(stream, first, until, self._batch_rows)
            if not entries:
                return
            position = entries[-1][0].decode()
            yield position, self._batch(stream, entries)

    def _follow(
        self, client: redis.Redis, stream: str, position: str | None
    ) -> Iterator[tuple[Any, pyarrow.RecordBatch] | None]:
        if self._tails is None:
            self._tails = _Tails(client, self._batch_rows)
        self._tails.open(stream, position)
        count = self._counts[stream] = _Count(from_start=position is None)
        while True:
            entries = self._tails.take(stream)
            count.read += len(entries)
            yield (entries[-1][0].decode(), self._batch(stream, entries)) if entries else None

    def _batch(self, stream: str, entries: list[Any]) -> pyarrow.RecordBatch:
        columns = [self._column(stream, field, entries) for field in self._schema]
        return pyarrow.RecordBatch.from_arrays(columns, schema=self._schema)

    def _column(self, stream: str, field: pyarrow.Field, entries: list[Any]) -> pyarrow.Array:
        if field.name == self._id_column:
            values = [entry_id for entry_id, _ in entries]
        else:
            name = field.name.encode()
            values = [fields.get(name) for _, fields in entries]
        raw = pyarrow.array(values, pyarrow.binary())
        if pyarrow.types.is_binary(field.type):
            return raw
        try:
            return raw.cast(pyarrow.string()).cast(field.type)
        except pyarrow.ArrowInvalid as error:
            first, last = (entries[at][0].decode() for at in (0, -1))
            raise ValueError(
                f"stream {stream!r}, entries {first} to {last}: a value of the field {field.name!r} is not of the type "
                f"{field.type} ({error}): change its type in the schema, to pyarrow.string() for any text"
            ) from error

    def weight(self, output: pyarrow.RecordBatch) -> float:
        return float(output.num_rows)

    def backlog(self, split: Any, position: Any) -> int:
        """How many entries are left. Exact for a stream that is read from its beginning or was once read to its end."""
        stream, until = split
        try:
            info: Any = self._connected().xinfo_stream(stream)
        except redis.ResponseError:
            return 0  # there is no such stream now
        if until is None:
            count = self._counts.get(stream) or _Count(from_start=position is None)
            return count.left(info, position)
        return _estimate(info, position, until)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


class _Tails:
    """Reads all streams that never end with one command for each round, in which every stream takes once."""

    def __init__(self, client: redis.Redis, batch_rows: int) -> None:
        self._client = client
        self._batch_rows = batch_rows
        self._positions: dict[Any, Any] = {}  # behind what was read here
        self._found: dict[str, list[Any]] = {}  # what was read and not taken
        self._asked: set[str] = set()  # the streams that have had nothing in this round
        self._unchecked: list[str] = []
        self._next_check_at = time.monotonic() + CHECK_EVERY_S
        self._added: dict[str, int] = {}  # to each stream, in its life, when it was last looked at

    def open(self, stream: str, position: str | None) -> None:
        self._positions[stream] = position or "0-0"

    def take(self, stream: str) -> list[Any]:
        """The next entries of a stream, at most a batch; none if it has none now."""
        if stream not in self._found and (stream in self._asked or not self._asked):
            self._read()
        self._asked.add(stream)
        return self._found.pop(stream, [])

    def _read(self) -> None:
        count = max(1, self._batch_rows * min(len(self._positions), BATCHES_MAX) // len(self._positions))
        self._asked.clear()
        for stream, entries in self._newer(count):
            self._positions[stream] = entries[-1][0].decode()
            self._found.setdefault(stream, []).extend(entries)
        if time.monotonic() >= self._next_check_at:
            self._check()
            self._next_check_at = time.monotonic() + CHECK_EVERY_S

    def _newer(self, count: int) -> Iterator[tuple[str, Any]]:
        """Up to so many entries of each stream, with one command, or in a cluster with one for each stream.

        There, a command has the keys of one slot, and the client does not send XREAD to another server after a failure.
        """
        if not hasattr(self._client, "keyslot"):
            answer: Any = self._client.xread(self._positions, count)
            for key, entries in answer:
                yield key.decode(), entries
            return
        for stream, position in self._positions.items():
            if entries := self._client.xrange(stream, f"({position}", "+", count):
                yield stream, entries

    def _check(self) -> None:
        """A stream that was deleted has nothing more, and one that was filled again has it behind smaller ids."""
        self._unchecked = self._unchecked or list(self._positions)
        streams, self._unchecked = self._unchecked[:CHECK_MAX], self._unchecked[CHECK_MAX:]
        with self._client.pipeline(transaction=False) as commands:
            for stream in streams:
                commands.xinfo_stream(stream)
            for stream, info in zip(streams, commands.execute(raise_on_error=False), strict=True):
                position = self._positions[stream]
                if position == "0-0":
                    continue
                check_position(stream, position, _last_id_of(info))
                added = info.get("entries-added", 0)  # since Redis 7
                if added < self._added.get(stream, 0):
                    raise _lost(stream, position, "it was deleted and filled again")
                self._added[stream] = added


@dataclass
class _Count:
    """How many entries of a stream this reader has read, and how many were added to the stream before these.

    After a restore the second is not known, because a position does not say it, until the stream is read to its end.
    """

    from_start: bool
    read: int = 0
    _before: int | None = None

    def left(self, info: Mapping[str, Any], position: str | None) -> int:
        added: int | None = info.get("entries-added")
        length: int = info["length"]
        if added is None:  # a server before Redis 7
            return _estimate(info, position, None)
        if position is not None and entry_number(position) >= entry_number(info["last-generated-id"]):
            self._before = added - self.read
        elif self._before is None and self.from_start:
            self._before = added - length
        if self._before is None:
            return _estimate(info, position, None)
        return max(0, min(length, added - self._before - self.read))


def _estimate(info: Mapping[str, Any], position: str | None, until: str | None) -> int:
    """How many entries there are behind a position, from the times in their ids, as if they had come evenly."""
    length: int = info["length"]
    if not length:
        return 0
    first, last = (entry_number(info[name][0]) for name in ("first-entry", "last-entry"))
    end = last if until is None else min(last, entry_number(until))
    behind = first if position is None else max(first, entry_number(position))
    if last == first or (position is None and end == last):
        return length if position is None or entry_number(position) < end else 0
    return max(0, -(-length * (end - behind) // (last - first)))


def entry_number(text: str | bytes) -> int:
    """An id as a number: the milliseconds, and the place within the millisecond in the lower 64 bits."""
    milliseconds, _, place = (text.decode() if isinstance(text, bytes) else text).partition("-")
    return (int(milliseconds) << 64) + int(place or 0)


def last_id(client: Any, stream: str) -> str | None:
    """The greatest id that a stream has ever had, also if its entries are deleted; None if there is no such stream."""
    try:
        return _last_id_of(client.xinfo_stream(stream))
    except redis.ResponseError as error:
        return _last_id_of(error)


def _last_id_of(answer: Any) -> str | None:
    if isinstance(answer, Exception):
        if "no such key" in str(answer):
            return None
        raise answer
    return str(answer["last-generated-id"].decode())


def check_position(stream: str, position: str, last: str | None) -> None:
    """Raise ``SourceDataLost`` if the stream is not the one that was read up to ``position``."""
    if last is None:
        raise _lost(stream, position, "it does not exist any more")
    if entry_number(last) < entry_number(position):
        raise _lost(
            stream,
            position,
            f"its greatest id is {last}: it was deleted and filled again with smaller ids, or the server is a replica "
            "that lacks entries",
        )


def _lost(stream: str, position: str, what: str) -> SourceDataLost:
    return SourceDataLost(
        f"stream {stream!r} was read up to the entry {position}, but {what}. Entries may be lost. If a replica lags "
        "behind, connect to the primary. Otherwise start again without a checkpoint, which reads the "
        "stream from its beginning"
    )


def connect(url: str) -> redis.Redis:
    """Return a client. It repeats what fails for some seconds, because reading changes nothing."""
    return client_of(url, lambda: Retry(ExponentialBackoff(cap=2.0, base=0.1), RETRIES))


@contextmanager
def reached(url: str, source: str) -> Iterator[Any]:
    """A client for the driver's half. Raises ``SourceUnreachable`` if the server does not answer, or wants a login."""

    def unreachable(text: str) -> SourceUnreachable:
        return SourceUnreachable(
            f"{source} cannot reach Redis: {text.rstrip('.')}. Check the url, with which the driver and every executor "
            "connect"
        )

    failures = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.RedisClusterException)
    with Secrets("url", url).kept(failures, unreachable), connect(url) as client:
        yield client
