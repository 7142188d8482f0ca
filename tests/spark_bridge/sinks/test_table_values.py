# SPDX-License-Identifier: Apache-2.0

"""What values are after they went through a Delta or an Iceberg table, and which are refused."""

from __future__ import annotations

import os
import subprocess
import sys
import time as clock
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyspark.sql import Row

from headgate.sinks import DeltaSink, IcebergSink, TwoPhaseSink
from tests.spark_bridge.sinks.test_tables import catalog_of, committer, prepare

Make = Callable[[Path, pa.DataType], TwoPhaseSink[Any]]
INSTANTS = pa.timestamp("us", "UTC")
NOON = datetime.fromisoformat("2026-07-01T12:00:00")
AT_SEVEN = timezone(timedelta(hours=7))


def delta(folder: Path, kind: pa.DataType) -> TwoPhaseSink[Any]:
    return DeltaSink(str(folder / "table"), pa.schema([("a", kind)]))


def iceberg(folder: Path, kind: pa.DataType) -> TwoPhaseSink[Any]:
    return IcebergSink(catalog_of(folder), "shop.values", f"file://{folder}/table", pa.schema([("a", kind)]))


def values(folder: Path, sink: TwoPhaseSink[Any]) -> list[Any]:
    if isinstance(sink, DeltaSink):
        table = DeltaTable(str(folder / "table")).to_pyarrow_table()
    else:
        table = load_catalog("headgate", **catalog_of(folder)).load_table("shop.values").scan().to_arrow()
    return [one["a"] for one in table.to_pylist()]


@pytest.mark.parametrize("make", [delta, iceberg])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.uint8(), 255),
        (pa.uint16(), 65535),
        (pa.uint32(), 2**32 - 1),
        (pa.uint64(), 2**64 - 1),
        (pa.int8(), -128),
        (pa.float16(), 0.5),
        (pa.timestamp("ns"), NOON),
        (pa.timestamp("s"), NOON),
        (pa.timestamp("ms", "UTC"), NOON.replace(tzinfo=UTC)),
        (pa.timestamp("us", "America/New_York"), NOON.replace(tzinfo=AT_SEVEN)),
        (pa.date64(), date(1, 1, 1)),
        (pa.decimal256(20, 2), Decimal("1.25")),
        (pa.large_string(), "a"),
        (pa.dictionary(pa.int32(), pa.string()), "a"),
        (pa.list_(pa.uint8()), [255, None]),
        (pa.struct([("b", pa.timestamp("us", "UTC"))]), {"b": NOON.replace(tzinfo=UTC)}),
        (pa.null(), None),
    ],
    ids=str,
)
def test_a_type_that_the_table_lacks_becomes_one_that_holds_its_values(
    tmp_path: Path, make: Make, kind: pa.DataType, value: Any
) -> None:
    """H171. As rows and as a batch."""
    sink = make(tmp_path, kind)
    driver = committer(sink)
    driver.commit(prepare(sink, {"a": value}, pa.record_batch([pa.array([value], kind)], ["a"])))
    driver.commit(prepare(sink, (None,)))
    committer(sink)  # what it has created suits it
    assert sorted(map(repr, values(tmp_path, sink))) == sorted(map(repr, [as_stored(value), as_stored(value), None]))


def as_stored(value: Any) -> Any:
    return (
        pa.scalar(value, INSTANTS).as_py()
        if isinstance(value, datetime) and value.tzinfo
        else (
            Decimal(value) if value == 2**64 - 1 else {"b": as_stored(value["b"])} if isinstance(value, dict) else value
        )
    )


@pytest.mark.parametrize(
    ("kind", "far"),
    [(pa.date32(), 2932897), (pa.date32(), -719163), (pa.timestamp("us"), 253402300800000000), (INSTANTS, 2**62)],
    ids=str,
)
def test_iceberg_refuses_years_with_which_pyiceberg_could_never_add_the_file(
    tmp_path: Path, kind: pa.DataType, far: int
) -> None:  # H171
    sink = iceberg(tmp_path, kind)
    committer(sink)
    batch = pa.record_batch([pa.array([0, far], pa.int32() if kind == pa.date32() else pa.int64()).cast(kind)], ["a"])
    with pytest.raises(ValueError, match=r"column 'a' has a year before 1 or after 9999"):
        prepare(sink, batch)
    assert not list(tmp_path.glob("table/data/**/*.parquet"))
    committer(sink).commit(prepare(sink, batch.slice(0, 1)))
    assert len(values(tmp_path, sink)) == 1


@pytest.mark.parametrize("kind", [pa.time64("us"), pa.binary(3), pa.uuid()], ids=str)
def test_iceberg_has_types_that_spark_lacks(tmp_path: Path, kind: pa.DataType) -> None:  # H171
    value = {"time64[us]": time(1, 2, 3, 4)}.get(str(kind), b"abc" if kind == pa.binary(3) else uuid.uuid4().bytes)
    sink = iceberg(tmp_path, kind)
    committer(sink).commit(prepare(sink, {"a": value}))
    assert [one.bytes if isinstance(one, uuid.UUID) else one for one in values(tmp_path, sink)] == [value]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (delta, pa.duration("us")),
        (delta, pa.time64("us")),
        (delta, pa.decimal256(40, 2)),
        (iceberg, pa.duration("us")),
        (iceberg, pa.month_day_nano_interval()),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_a_type_that_the_table_has_no_form_of_is_refused_before_a_table_is_made(
    tmp_path: Path, make: Make, kind: pa.DataType
) -> None:
    """H170, H171."""
    with pytest.raises(ValueError, match=r"column 'a' is .*, which .* has no type for"):
        committer(make(tmp_path, kind))
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        (pa.int64(), 1.5, "not a whole number"),
        (pa.int64(), float("nan"), "not a whole number"),
        (pa.uint8(), -1, "cannot hold"),
        (pa.int32(), 2**40, "cannot hold"),
        (pa.date32(), NOON, "time of day"),
        (pa.timestamp("s"), NOON.replace(microsecond=7), "finer"),
        (pa.timestamp("us"), NOON.replace(tzinfo=UTC), "has a zone"),
        (INSTANTS, NOON, "has no zone"),
        (INSTANTS, NOON.date(), "has no zone"),
        (INSTANTS, 1.5, "this is a number"),
        (pa.date32(), float("nan"), "this is a number"),
        (pa.list_(INSTANTS), [NOON], r"'a\[\]' .* has no zone"),
        (pa.struct([("b", INSTANTS)]), {"b": NOON}, r"'a\.b' .* has no zone"),
        (pa.struct([("b", INSTANTS)]), (NOON,), r"'a\.b' .* has no zone"),
        (pa.map_(pa.string(), INSTANTS), {"x": NOON}, r"'a \(value\)' .* has no zone"),
        (pa.struct([("b", pa.int64())]), {"b": 1, "c": 2}, "leave others out"),
        (pa.decimal128(5, 1), Decimal("1.25"), "cannot hold"),
    ],
    ids=str,
)
def test_a_value_that_would_change_is_refused_with_its_column(
    tmp_path: Path, kind: pa.DataType, value: Any, why: str
) -> None:
    """H171."""
    with pytest.raises(ValueError, match=rf"column 'a.*{why}|column {why}"):
        prepare(delta(tmp_path, kind), {"a": value})


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        (INSTANTS, pa.array([NOON])),
        (pa.timestamp("us"), pa.array([NOON.replace(tzinfo=UTC)])),
        (pa.timestamp("ns"), pa.array([1], pa.timestamp("ns"))),
        (pa.float32(), pa.array([0.1])),
        (pa.int64(), pa.array([1.5])),
    ],
    ids=str,
)
def test_a_batch_whose_values_would_change_is_refused_with_its_column(
    tmp_path: Path, kind: pa.DataType, column: pa.Array
) -> None:
    """H171."""
    with pytest.raises(ValueError, match="column 'a'"):
        prepare(delta(tmp_path, kind), pa.record_batch([column], ["a"]))


def test_the_fields_of_a_nested_row_are_found_by_their_names(tmp_path: Path) -> None:  # H171
    sink = delta(tmp_path, pa.struct([("b", pa.int64()), ("c", pa.int64())]))
    committer(sink).commit(prepare(sink, {"a": Row(c=3, b=2)}))
    assert values(tmp_path, sink) == [{"b": 2, "c": 3}]


@pytest.fixture
def in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "America/New_York")
        clock.tzset()
        yield
    clock.tzset()


@pytest.mark.usefixtures("in_new_york")
def test_a_time_without_a_zone_is_local_in_a_row_and_in_no_other_record(tmp_path: Path) -> None:  # H171
    sink = delta(tmp_path, INSTANTS)
    committer(sink).commit(prepare(sink, Row(a=NOON), {"a": NOON.replace(tzinfo=UTC)}))
    assert sorted(values(tmp_path, sink)) == [NOON.replace(tzinfo=UTC), NOON.replace(hour=16, tzinfo=UTC)]
    for record in ({"a": NOON}, (NOON,)):
        with pytest.raises(ValueError, match=r"column 'a' .* has no zone"):
            prepare(sink, record)


WRITES_ROWS = """
import sys
from datetime import datetime
from pathlib import Path
from pyspark.sql import Row
from tests.spark_bridge.sinks import test_table_values as here

def write(sink, records):
    here.committer(sink).commit(here.prepare(sink, *records))

folder, pa = Path(sys.argv[1]), here.pa
plain, noon, fold = here.INSTANTS, here.NOON, datetime(2026, 11, 1, 1, 30)
write(here.delta(folder / "1", plain), [Row(a=noon), Row(a=fold), Row(a=fold.replace(fold=1)), Row(a=None)])
write(here.delta(folder / "2", pa.timestamp("us")), [Row(a=noon)])
nested = pa.struct([("l", pa.list_(plain)), ("m", pa.map_(pa.string(), plain)), ("s", pa.struct([("t", plain)]))])
inside = Row(s=Row(t=noon), l=[noon, None], m={"x": noon})
write(here.delta(folder / "3", nested), [Row(a=inside), {"a": Row(s=None, l=[noon], m=None)}])
"""


def test_a_row_of_spark_keeps_its_instant_in_a_worker_whose_zone_is_not_utc(tmp_path: Path) -> None:  # H171
    for number in "123":
        (tmp_path / number).mkdir()
    command = [sys.executable, "-c", WRITES_ROWS, str(tmp_path)]
    subprocess.run(command, env={**os.environ, "TZ": "America/New_York"}, check=True, timeout=60)

    def read(number: str) -> list[Any]:
        return values(tmp_path / number, delta(tmp_path / number, INSTANTS))

    instant = datetime(2026, 7, 1, 16, 0, tzinfo=UTC)
    twice = [datetime(2026, 11, 1, hour, 30, tzinfo=UTC) for hour in (5, 6)]
    assert read("1") == [instant, *twice, None]
    assert read("2") == [NOON]
    assert read("3") == [
        {"l": [instant, None], "m": [("x", instant)], "s": {"t": instant}},
        {"l": [instant], "m": None, "s": None},
    ]
