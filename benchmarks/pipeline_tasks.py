# SPDX-License-Identifier: Apache-2.0

"""What the benchmarks of pipelines run in Spark's tasks. Newly forked workers import this again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import pyarrow

from headgate import SplitReader

SCHEMA = pyarrow.schema([("id", pyarrow.int64()), ("name", pyarrow.string()), ("value", pyarrow.float64())])
COLUMNS = SCHEMA.names
HASHED_BYTES = bytes(1 << 16)


def copy_rows(conninfo: str, table: str, rows: Iterator[Any]) -> None:
    """Write a partition with COPY, in one transaction."""
    import psycopg

    with psycopg.connect(conninfo) as database, database.cursor() as cursor:
        with cursor.copy(f"COPY {table} FROM STDIN") as copy:
            for row in rows:
                copy.write_row((row.id, row.name, row.value))


def work(split: Any) -> str:
    """Compute for as long as the split says, in steps of some 50 µs."""
    place, steps = split
    for _ in range(steps):
        hashlib.sha256(HASHED_BYTES).digest()
    return hashlib.sha256(str(place).encode()).hexdigest()


class Worker(SplitReader):
    def read_split(self, split: Any) -> Iterator[str]:
        yield work(split)


class Clock(SplitReader):
    """Makes rows of the time for so many seconds: 200 in a second, over all tasks."""

    rate_limit_per_s = 200.0

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def read_from(self, split: int, position: float | None, /) -> Iterator[tuple[float, dict[str, float]]]:
        until = time.time() + self._seconds if position is None else position
        while time.time() < until:
            yield until, {"made_at": time.time()}
