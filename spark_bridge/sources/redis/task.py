# SPDX-License-Identifier: Apache-2.0

"""The tasks' half of a Redis source: reads a stream as Arrow batches, and knows its position behind each.

A split is ``[stream, until]``: the key of a stream, and the id of the last entry that belongs to the split; None if the
split never ends. A position is the id of the last entry that was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from spark_bridge.subtask.source import SplitReader

if TYPE_CHECKING:
    import pyarrow
    import redis

    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["RedisReader", "connect"]


class RedisReader(SplitReader):
    """Reads the splits of a ``RedisStreamsSource``: yields ``pyarrow.RecordBatch`` objects, all with one schema."""

    def __init__(
        self,
        url: str,
        schema: bytes,
        id_column: str | None,
        batch_rows: int,
        streams: int | None,
        rate_limit_per_s: float | None,
    ) -> None:
        """``schema`` is in Arrow's own format. ``streams``: how many there are; None if that may change."""
        self._url = url
        self._schema_bytes = schema
        self._id_column = id_column
        self._batch_rows = batch_rows
        self._streams = streams
        self.rate_limit_per_s = rate_limit_per_s
        self._client: redis.Redis | None = None

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        super().open(context, state)
        self.splits_open_max = 16 if self._streams is None else -(-self._streams // context.parallelism)

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, pyarrow.RecordBatch] | None]:
        stream, until = split
        if self._client is None:
            self._client = connect(self._url)
        to_batch = _batch_maker(self._schema_bytes, self._id_column)
        last = "+" if until is None else until
        while True:
            first = "-" if position is None else f"({position}"
            entries: Any = self._client.xrange(stream, first, last, self._batch_rows)
            if entries:
                position = entries[-1][0].decode()
                yield position, to_batch(entries)
            elif until is None:
                yield None
            else:
                return

    def weight(self, output: pyarrow.RecordBatch) -> float:
        return float(output.num_rows)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def connect(url: str) -> redis.Redis:
    """Return a client. It repeats what fails for some seconds, because reading changes nothing."""
    import redis
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry

    retry = Retry(ExponentialBackoff(cap=2.0, base=0.1), 8)
    client: redis.Redis = redis.Redis.from_url(url, retry=retry, client_name="headgate")
    return client


def _batch_maker(schema_bytes: bytes, id_column: str | None) -> Callable[[list[Any]], pyarrow.RecordBatch]:
    import pyarrow

    schema = pyarrow.ipc.read_schema(pyarrow.BufferReader(schema_bytes))

    def column(field: pyarrow.Field, entries: list[Any]) -> pyarrow.Array:
        if field.name == id_column:
            values = [entry_id for entry_id, _ in entries]
        else:
            name = field.name.encode()
            values = [fields.get(name) for _, fields in entries]
        raw = pyarrow.array(values, pyarrow.binary())
        if pyarrow.types.is_binary(field.type):
            return raw
        return raw.cast(pyarrow.string()).cast(field.type)

    def to_batch(entries: list[Any]) -> pyarrow.RecordBatch:
        return pyarrow.RecordBatch.from_arrays([column(field, entries) for field in schema], schema=schema)

    return to_batch
