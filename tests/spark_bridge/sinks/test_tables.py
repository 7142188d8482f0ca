# SPDX-License-Identifier: Apache-2.0

"""The Delta and Iceberg sinks beyond the pattern: batches, other writers, compaction, and tables that do not fit."""

from __future__ import annotations

import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog

from actors.logs import get_logger
from headgate.errors import SinkDataLost
from headgate.sinks import Committable, DeltaSink, IcebergSink, SinkCommitterContext, SinkWriterContext, TwoPhaseSink
from spark_bridge.sinks.two_phase.errors import SinkMisused

SCHEMA = pyarrow.schema([("id", pyarrow.int64()), ("what", pyarrow.string())])


def delta(folder: Path) -> DeltaSink:
    return DeltaSink(str(folder / "table"), SCHEMA)


def catalog_of(folder: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}


def iceberg(folder: Path) -> IcebergSink:
    return IcebergSink(catalog_of(folder), "shop.orders", f"file://{folder}/table", SCHEMA)


def committer(sink: TwoPhaseSink[Any]) -> Any:
    made = sink.committer(SinkCommitterContext("out", "out", get_logger("test")))
    made.open()
    return made


def prepare(sink: TwoPhaseSink[Any], *records: Any) -> list[Committable]:
    writer = sink.writer(SinkWriterContext("out", 0, 0))
    for record in records:
        writer.write(record)
    return list(writer.prepare())


def rows(folder: Path, sink: TwoPhaseSink[Any]) -> list[tuple[int, str | None]]:
    if isinstance(sink, DeltaSink):
        table = DeltaTable(str(folder / "table")).to_pyarrow_table()
    else:
        table = load_catalog("headgate", **catalog_of(folder)).load_table("shop.orders").scan().to_arrow()
    return sorted((row["id"], row["what"]) for row in table.to_pylist())


@pytest.mark.parametrize("make", [delta, iceberg])
def test_arrow_batches_and_single_rows_go_into_one_file(tmp_path: Path, make: Any) -> None:
    sink = make(tmp_path)
    driver = committer(sink)
    batch = pyarrow.record_batch({"what": ["c", None], "id": pyarrow.array([3, 4], pyarrow.int32())})
    parts = prepare(sink, {"id": 1, "what": "a"}, (2, "b"), batch, {"id": 5})
    assert [part.payload[0] for part in parts] == [5]
    driver.commit(parts)
    assert rows(tmp_path, sink) == [(1, "a"), (2, "b"), (3, "c"), (4, None), (5, None)]


def test_writing_arrow_batches_does_not_import_pandas(tmp_path: Path) -> None:
    """A worker that is new would take longer for that than for its first batches."""
    program = (
        "import pickle, sys\n"
        "writer, batch = pickle.load(sys.stdin.buffer)\n"
        "writer().write(batch)\n"
        "assert 'pandas' not in sys.modules\n"
    )
    batch = pyarrow.record_batch({"id": [1, 2], "what": ["a", None]})
    given = pickle.dumps((partial(delta(tmp_path).writer, SinkWriterContext("out", 0, 0)), batch))
    done = subprocess.run([sys.executable, "-c", program], input=given, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("make", [delta, iceberg])
def test_a_row_with_a_lone_surrogate_is_named_with_its_column(tmp_path: Path, make: Any) -> None:  # H171
    with pytest.raises(
        ValueError, match=r"column 'what' of the row \(2, '\\ud800'\) cannot be written: .*: replace it"
    ):
        prepare(make(tmp_path), (1, "a"), (2, "\ud800"))


@pytest.mark.parametrize("make", [delta, iceberg])
def test_a_column_that_a_batch_lacks_is_null_and_an_unknown_one_is_refused(tmp_path: Path, make: Any) -> None:
    sink = make(tmp_path)
    driver = committer(sink)
    driver.commit(prepare(sink, pyarrow.record_batch({"id": pyarrow.array([1], pyarrow.int32())})))
    assert rows(tmp_path, sink) == [(1, None)]
    for record in (pyarrow.record_batch({"id": [2], "colour": ["red"]}), {"id": 2, "colour": "red"}):
        with pytest.raises(ValueError, match=r"the sink has no columns \['colour'\], only .*: leave them out"):
            prepare(sink, record)


@pytest.mark.parametrize("make", [delta, iceberg])
def test_a_file_that_is_gone_is_an_error_and_not_passed_over(tmp_path: Path, make: Any) -> None:
    sink = make(tmp_path)
    driver = committer(sink)
    good, lost = prepare(sink, (1, "a")), prepare(sink, (2, "b"))
    (path,) = (path for path in tmp_path.rglob(lost[0].name) if path.stat().st_size)
    path.unlink()
    with pytest.raises(SinkDataLost, match="never added"):
        driver.commit([*good, *lost])
    assert rows(tmp_path, sink) == []


@pytest.mark.parametrize("make", [delta, iceberg])
def test_a_committed_file_is_never_deleted_no_matter_who_asks(tmp_path: Path, make: Any) -> None:
    sink = make(tmp_path)
    driver = committer(sink)
    parts = prepare(sink, (1, "a"))
    driver.commit(parts)
    driver.abort([part.name for part in parts])
    assert rows(tmp_path, sink) == [(1, "a")]
    assert list(driver.prepared()) == []


def test_a_replay_does_not_bring_back_what_a_compaction_has_replaced(tmp_path: Path) -> None:
    sink = delta(tmp_path)
    driver = committer(sink)
    parts = [*prepare(sink, (1, "a")), *prepare(sink, (2, "b"))]
    driver.commit(parts)
    DeltaTable(str(tmp_path / "table")).optimize.compact()
    driver.commit(parts)
    assert rows(tmp_path, sink) == [(1, "a"), (2, "b")]


def test_a_commit_goes_on_top_of_another_writers(tmp_path: Path) -> None:
    sink = delta(tmp_path)
    driver = committer(sink)
    load = driver.load

    def outrun() -> Any:
        table = load()
        write_deltalake(str(tmp_path / "table"), pyarrow.table({"id": [9], "what": ["x"]}), mode="append")
        driver.load = load
        return table

    driver.load = outrun
    driver.commit(prepare(sink, (1, "a")))
    assert rows(tmp_path, sink) == [(1, "a"), (9, "x")]


def test_the_marker_of_an_iceberg_table_outlives_its_snapshots(tmp_path: Path) -> None:
    sink = iceberg(tmp_path)
    driver = committer(sink)
    first, second = prepare(sink, (1, "a")), prepare(sink, (2, "b"))
    driver.commit(first)
    driver.commit(second)
    table = load_catalog("headgate", **catalog_of(tmp_path)).load_table("shop.orders")
    oldest = table.snapshots()[0]
    assert oldest.summary is not None
    assert oldest.summary["headgate.sink"] == "out"
    table.maintenance.expire_snapshots().by_id(oldest.snapshot_id).commit()
    driver.commit(first)
    assert rows(tmp_path, sink) == [(1, "a"), (2, "b")]


def test_a_delta_table_that_does_not_fit_fails_the_start(tmp_path: Path) -> None:  # H6
    write_deltalake(str(tmp_path / "table"), pyarrow.table({"id": [1], "other": ["x"]}))
    with pytest.raises(SinkMisused, match="give the sink the table's schema"):
        committer(delta(tmp_path))
    partitioned = tmp_path / "partitioned"
    write_deltalake(str(partitioned), pyarrow.table({"id": [1], "what": ["x"]}), partition_by=["what"])
    with pytest.raises(SinkMisused, match="partitioned"):
        committer(DeltaSink(str(partitioned), SCHEMA))


def test_an_iceberg_table_that_does_not_fit_fails_the_start(tmp_path: Path) -> None:  # H6
    committer(iceberg(tmp_path))
    other = pyarrow.schema([("id", pyarrow.int64())])
    with pytest.raises(SinkMisused, match="give the sink the table's schema"):
        committer(IcebergSink(catalog_of(tmp_path), "shop.orders", f"file://{tmp_path}/table", other))
    with pytest.raises(SinkMisused, match="namespace"):
        IcebergSink({}, "orders", str(tmp_path), SCHEMA)


@pytest.mark.parametrize("url", ["table", "./table"])
def test_a_relative_path_is_refused(url: str) -> None:
    with pytest.raises(SinkMisused, match="absolute"):
        DeltaSink(url, SCHEMA).writer(SinkWriterContext("out", 0, 0))
