# SPDX-License-Identifier: Apache-2.0

"""The Redis sink's half in a task: entries in a staging stream for each part."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date, timedelta
from datetime import time as datetime_time
from decimal import Decimal
from typing import Any
from uuid import UUID

import redis

from protocol.arguments import SHOWN_CHARS_MAX
from protocol.describing import a_type, show
from spark_bridge.sinks.redis.keys import RedisStream, connect
from spark_bridge.sinks.rows import naming_lone_surrogates, rows_of
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkWriterContext, TwoPhaseWriter

_ROWS_MAX = 1000  # in memory
_NUMBERS = frozenset("biuf")
"""Of NumPy's kinds, those of which a value has its own form in JSON."""


class RedisWriter(TwoPhaseWriter[Any]):
    """Adds entries to a staging stream. Each has an explicit id, so none can be there twice."""

    def __init__(self, context: SinkWriterContext, stream: RedisStream) -> None:
        self._context = context
        self._stream = stream
        self._client: redis.Redis | None = None
        self._part: Committable | None = None
        self._rows_staged = 0  # of the part
        self._rows: list[Sequence[Any]] = []

    def write(self, record: Any) -> None:
        self._rows.extend(rows_of(record, self._stream.columns))
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
                sink = self._context.sink
                with self._client.pipeline() as commands:
                    commands.delete(self._stream.staged(sink, part.name))
                    commands.srem(self._stream.parts(sink), part.name)
                    commands.execute()
        self._client.close()

    def _stage(self) -> None:
        if self._client is None:
            self._client = connect(self._stream.url)
        if self._part is None:
            self._part, self._rows_staged = Committable(self._context.next_name()), 0
        sink = self._context.sink
        staged = self._stream.staged(sink, self._part.name)
        with self._client.pipeline() as commands, naming_lone_surrogates(self._rows, self._stream.columns):
            commands.sadd(self._stream.parts(sink), self._part.name)
            for number, row in enumerate(self._rows, start=self._rows_staged + 1):
                commands.xadd(staged, _fields(self._stream.columns, row), id=f"0-{number}")
            commands.execute()
        self._rows_staged += len(self._rows)
        self._rows = []


def _fields(columns: Sequence[str], row: Sequence[Any]) -> dict[Any, Any]:
    """The fields of an entry: NULL has none. Raises ``ValueError`` for a value without a form, with its column."""
    fields = {}
    for column, value in zip(columns, row, strict=True):
        if value is None:
            continue
        try:
            fields[column] = _form(value)
        except TypeError as error:
            raise ValueError(
                f"column {column!r} of the row {show(row, SHOWN_CHARS_MAX)} cannot be written: {error}. Convert it to "
                "text, to bytes outside of lists and structs, or leave the column out"
            ) from None
    if not fields:
        raise ValueError(
            f"a row has no values in {list(columns)}, but an entry of a stream needs at least one: leave such rows out"
        )
    return fields


def _form(value: Any) -> str | bytes:
    """Text and bytes as they are, decimals, dates and times as text, and anything else as JSON."""
    if isinstance(value, (str, bytes)):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _is_number_of_numpy(value: Any) -> bool:
    return getattr(getattr(value, "dtype", None), "kind", "") in _NUMBERS and getattr(value, "ndim", -1) == 0


def _plain(value: Any) -> Any:
    """The value in JSON. Decimals, dates and times are texts there, and names of columns are kept."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (Decimal, date, datetime_time, timedelta, UUID)):
        return format(value, "f") if isinstance(value, Decimal) else str(value)
    if _is_number_of_numpy(value):
        return value.item()
    if hasattr(value, "asDict"):
        value = value.asDict()
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, (str, int)) or isinstance(key, bool)), None)
        if wrong is not None:
            raise TypeError(f"{a_type(wrong)} cannot be a key in JSON")
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    raise TypeError(f"{a_type(value)} cannot be written as JSON")
