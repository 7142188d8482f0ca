# SPDX-License-Identifier: Apache-2.0

"""Your own sink, for a SQLite database that all processes of one machine see, and the suite that tests any sink.

Run it with ``python -m pytest examples/testing/test_own_sink.py``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from headgate.errors import SinkDataLost
from headgate.sinks import (
    Committable,
    SinkCommitterContext,
    SinkWriterContext,
    TwoPhaseCommitter,
    TwoPhaseSink,
    TwoPhaseWriter,
)
from headgate.testing import SinkTarget, sink_cases

TABLES = """
CREATE TABLE IF NOT EXISTS rows (subtask, number);
CREATE TABLE IF NOT EXISTS staged (sink, part, subtask, number);
CREATE TABLE IF NOT EXISTS commits (sink, writer, number, PRIMARY KEY (sink, writer));
"""


class SqliteWriter(TwoPhaseWriter[Any]):
    """In a task: rows are collected, and go into the staging table with the snapshot."""

    def __init__(self, context: SinkWriterContext, path: str) -> None:
        self._context = context
        self._path = path
        self._rows: list[tuple[int, int]] = []

    def write(self, record: tuple[int, int]) -> None:
        self._rows.append(record)

    def prepare(self) -> list[Committable]:
        if not self._rows:
            return []
        part = Committable(self._context.next_name(), payload=len(self._rows))
        with closing(sqlite3.connect(self._path)) as database, database:
            rows = [(self._context.sink, part.name, *row) for row in self._rows]
            database.executemany("INSERT INTO staged VALUES (?, ?, ?, ?)", rows)
        self._rows = []
        return [part]


class SqliteCommitter(TwoPhaseCommitter):
    """On the driver: staged rows become visible in one transaction with the number of the last part of each writer."""

    transient_errors = (sqlite3.OperationalError,)

    def __init__(self, context: SinkCommitterContext, path: str) -> None:
        self._sink = context.sink
        self._path = path

    def open(self) -> None:
        with closing(sqlite3.connect(self._path)) as database:
            database.executescript(TABLES)

    def commit(self, committables: Sequence[Committable]) -> None:
        with closing(sqlite3.connect(self._path, isolation_level="IMMEDIATE")) as database, database:
            for part in committables:
                known = database.execute(
                    "INSERT INTO commits VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET number = excluded.number "
                    "WHERE excluded.number > number",
                    (self._sink, part.writer, part.number),
                )
                if known.rowcount == 0:
                    continue  # committed before
                moved = database.execute(
                    "INSERT INTO rows SELECT subtask, number FROM staged WHERE sink = ? AND part = ?",
                    (self._sink, part.name),
                )
                if moved.rowcount != part.payload:
                    raise SinkDataLost(f"{part.name} is no longer staged in {self._path}")
                database.execute("DELETE FROM staged WHERE sink = ? AND part = ?", (self._sink, part.name))

    def abort(self, names: Sequence[str]) -> None:
        with closing(sqlite3.connect(self._path)) as database, database:
            for name in names:
                database.execute("DELETE FROM staged WHERE sink = ? AND part = ?", (self._sink, name))

    def prepared(self) -> list[str]:
        with closing(sqlite3.connect(self._path)) as database:
            found = database.execute("SELECT DISTINCT part FROM staged WHERE sink = ?", (self._sink,))
            return [part for (part,) in found]


class SqliteSink(TwoPhaseSink[Any]):
    """Settings only: it travels to the tasks."""

    atomic = True  # one commit is one transaction

    def __init__(self, path: str, name: str | None = None) -> None:
        self._path = path
        self.name = name

    @property
    def target(self) -> str:
        return f"sqlite:{self._path}"

    def writer(self, context: SinkWriterContext) -> SqliteWriter:
        return SqliteWriter(context, self._path)

    def committer(self, context: SinkCommitterContext) -> SqliteCommitter:
        return SqliteCommitter(context, self._path)


class SqliteTarget(SinkTarget):
    """How the suite makes the sink, and reads what it wrote."""

    def __init__(self, folder: Path, database: str = "rows.db") -> None:
        self._folder = folder
        self._path = str(folder / database)

    def other(self, kind: str = "") -> SinkTarget:
        found = SqliteTarget(self._folder, "other.db")
        found.clear()
        return found

    def sink(self, name: str) -> SqliteSink:
        return SqliteSink(self._path, name)

    def record(self, subtask: int, number: int) -> tuple[int, int]:
        return (subtask, number)

    def read(self) -> list[tuple[int, int]]:
        with closing(sqlite3.connect(self._path)) as database:
            database.executescript(TABLES)
            return list(database.execute("SELECT subtask, number FROM rows"))

    def clear(self) -> None:
        Path(self._path).unlink(missing_ok=True)


def test_the_sink_keeps_the_promises_of_the_pattern(tmp_path: Path) -> None:
    for case in sink_cases(histories=1):
        case.run(SqliteTarget(tmp_path))
