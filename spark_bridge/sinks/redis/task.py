# SPDX-License-Identifier: Apache-2.0

"""The Redis sink's half in a task: entries in a staging stream for each part."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, timedelta
from datetime import time as datetime_time
from decimal import Decimal
from typing import Any
from uuid import UUID

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from protocol.describing import a_type
from spark_bridge.common.redis_clients import client_of
from spark_bridge.common.secret_texts import Secrets, check_login
from spark_bridge.sinks.rows import Columns, json_form
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkWriterContext, TwoPhaseWriter

_ROWS_MAX = 1000  # in memory
_NUMBERS = frozenset("biuf")
"""Of NumPy's kinds, those of which a value has its own form in JSON."""


@dataclass(frozen=True)
class RedisStream:
    """The settings of a ``RedisStreamsSink``.

    All keys have one hash tag, so that a cluster keeps them in the slot of the stream.
    """

    url: str = field(repr=False)
    stream: str
    columns: tuple[str, ...]
    entries_max: int | None

    def staged(self, sink: str, part: str) -> str:
        """The stream in which a part waits."""
        return f"{self._beside(sink)}:staged:{part}"

    def parts(self, sink: str) -> str:
        """The set of the parts that are staged, or begun."""
        return f"{self._beside(sink)}:parts"

    def commits(self, sink: str) -> str:
        """The ledger: for each writer, the number of its last committed part."""
        return f"{self._beside(sink)}:commits"

    def destroy(self, client: redis.Redis, sink: str, parts: Iterable[str]) -> None:
        with client.pipeline() as commands:
            for part in parts:
                commands.delete(self.staged(sink, part))
                commands.srem(self.parts(sink), part)
            commands.execute()

    def _beside(self, sink: str) -> str:
        tag = re.search(r"\{([^{}]+)\}", self.stream)
        return f"headgate:{{{tag[1] if tag else self.stream}}}:{self.stream}:{sink}"


class RedisWriter(TwoPhaseWriter[Any]):
    """Adds entries to a staging stream. Each has an explicit id, so none can be there twice."""

    def __init__(self, context: SinkWriterContext, stream: RedisStream) -> None:
        self._context = context
        self._stream = stream
        self._columns = Columns(stream.columns, dict.fromkeys(stream.columns, _form))
        self._client: redis.Redis | None = None
        self._part: Committable | None = None
        self._rows_staged = 0  # of the part
        self._rows: list[Sequence[Any]] = []

    def write(self, record: Any) -> None:
        self._rows.extend(self._columns.rows(record))
        if len(self._rows) >= _ROWS_MAX:
            self._stage()

    def prepare(self) -> list[Committable]:
        if self._rows:
            self._stage()
        part, self._part = self._part, None
        return [] if part is None else [part._replace(payload=self._rows_staged)]

    def close(self) -> None:
        if self._client is None:
            return
        part, self._part = self._part, None
        with suppress(redis.RedisError, OSError):
            if part is not None:
                self._stream.destroy(self._client, self._context.sink, [part.name])
        self._client.close()

    def _stage(self) -> None:
        if self._client is None:
            self._client = connect(self._stream.url)
        if self._part is None:
            self._part, self._rows_staged = Committable(self._context.next_name()), 0
        sink = self._context.sink
        staged = self._stream.staged(sink, self._part.name)
        with self._client.pipeline() as commands:
            commands.sadd(self._stream.parts(sink), self._part.name)
            for number, row in enumerate(self._rows, start=self._rows_staged + 1):
                commands.xadd(staged, _fields(self._stream.columns, row), id=f"0-{number}")
            commands.execute()
        self._rows_staged += len(self._rows)
        self._rows = []


def connect(url: str) -> redis.Redis:
    """Return a client that repeats nothing by itself. Raises ``SinkMisused`` for an invalid URL."""
    check_login(url, "url", SinkMisused)

    def refused(text: str) -> SinkMisused:
        return SinkMisused(f"not the URL of a Redis server ({text}): pass one such as redis://host:6379/0")

    with Secrets("url", url).kept(ValueError, refused):
        parse_url(url)  # type: ignore[no-untyped-call]
    return client_of(url, lambda: Retry(NoBackoff(), 0))


def _fields(columns: Sequence[str], row: Sequence[Any]) -> dict[Any, Any]:
    """The fields of an entry: NULL has none."""
    fields = {column: value for column, value in zip(columns, row, strict=True) if value is not None}
    if not fields:
        raise ValueError(
            f"a row has no values in {list(columns)}, but an entry of a stream needs at least one: leave such rows out"
        )
    return fields


def _form(value: Any, of_spark: bool) -> bytes:
    """Text and bytes as they are, decimals, dates and times as text, and anything else as JSON."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    found = json_form(value, _key, _other)
    return (found if isinstance(found, str) else json.dumps(found)).encode()


def _key(value: Any) -> str:
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ValueError(f"{a_type(value)} cannot be a key in JSON: make text of it")
    return str(value)


def _other(value: Any) -> Any:
    if isinstance(value, (Decimal, date, datetime_time, timedelta, UUID)):
        return format(value, "f") if isinstance(value, Decimal) else str(value)
    if getattr(getattr(value, "dtype", None), "kind", "") in _NUMBERS and getattr(value, "ndim", -1) == 0:
        return value.item()
    raise ValueError(
        f"{a_type(value)} cannot be written as JSON: convert it to text, to bytes outside of lists and structs, or "
        "leave the column out"
    )
