# SPDX-License-Identifier: Apache-2.0

"""From Parquet files to a table, neither the Python code that runs nor the objects grow with the number of rows."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from actors.logs import get_logger
from headgate.sinks import DeltaSink, IcebergSink, SinkCommitterContext, SinkWriterContext, TwoPhaseSink
from headgate.sources import FileSource

SCHEMA = pyarrow.schema([("id", pyarrow.int64()), ("what", pyarrow.string())])
ROWS = (10, 20_000)


@contextmanager
def counted() -> Iterator[Callable[[], tuple[int, int]]]:
    """Count the calls of functions, those in C too, and the bytes that Python's objects have taken at most."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    previous = sys.getprofile()
    tracemalloc.start()
    sys.setprofile(note)
    try:
        yield lambda: (count, tracemalloc.get_traced_memory()[1])
    finally:
        sys.setprofile(previous)
        tracemalloc.stop()


def read_and_prepare(folder: Path, rows: int, sink: TwoPhaseSink[Any]) -> tuple[int, int, int]:
    """Move a file of so many rows into a part of the sink; return the rows, and the calls and bytes that it took."""
    folder.mkdir()
    table = pyarrow.table({"id": range(rows), "what": ["x"] * rows}, SCHEMA)
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    source = FileSource(str(folder), batch_rows=rows)
    (split,) = source.splits()
    make: Any = source.operator
    reader, writer = make(), sink.writer(SinkWriterContext("out", 0, 0))
    moved = 0
    with counted() as cost:
        for _, batch in reader.read_from(split, None):
            moved += batch.num_rows
            writer.write(batch)
        writer.prepare()
        return moved, *cost()


def delta(folder: Path) -> DeltaSink:
    return DeltaSink(str(folder / "table"), SCHEMA)


def iceberg(folder: Path) -> IcebergSink:
    catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
    return IcebergSink(catalog, "shop.orders", f"file://{folder}/table", SCHEMA)


@pytest.mark.parametrize("make", [delta, iceberg])
def test_no_python_runs_for_each_row_between_a_parquet_file_and_a_table(tmp_path: Path, make: Any) -> None:
    sink = make(tmp_path)
    committer: Any = sink.committer(SinkCommitterContext("out", "out", get_logger("test")))
    committer.open()
    read_and_prepare(tmp_path / "warm", ROWS[0], sink)  # what is imported and cached the first time
    few, many = (read_and_prepare(tmp_path / str(rows), rows, sink) for rows in ROWS)
    assert (few[0], many[0]) == ROWS
    assert many[1] < few[1] + ROWS[1] // 20, "a call for each row would be 20,000 more"
    assert many[2] < few[2] + ROWS[1] * 20, "an object for each row has more bytes than that"
