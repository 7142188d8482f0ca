# SPDX-License-Identifier: Apache-2.0

"""Arrow's types in Spark: each is kept, converted without a change of any value, or refused with the column."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from spark_bridge.common.arrow_types import SPARK_TYPES, arrow_form, conform, for_spark

NOON = datetime(2026, 1, 1, 12, 0, 0, 1)  # noqa: DTZ001  # it has no zone on purpose
WHOLE = NOON.replace(microsecond=0)
DICTIONARY = pa.dictionary(pa.int32(), pa.string())
KEPT: list[tuple[pa.DataType, Any, pa.DataType]] = [
    *(
        (one, True if one == pa.bool_() else 1, one)
        for one in (pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64())
    ),
    (pa.uint8(), 2**8 - 1, pa.int16()),
    (pa.uint16(), 2**16 - 1, pa.int32()),
    (pa.uint32(), 2**32 - 1, pa.int64()),
    (pa.uint64(), 2**64 - 1, pa.decimal128(20, 0)),
    (pa.float16(), 1.5, pa.float32()),
    (pa.float32(), 1.5, pa.float32()),
    (pa.float64(), 0.1, pa.float64()),
    (pa.decimal32(9, 2), Decimal("1.50"), pa.decimal128(9, 2)),
    (pa.decimal64(18, 2), Decimal("1.50"), pa.decimal128(18, 2)),
    (pa.decimal256(38, 2), Decimal("1.50"), pa.decimal128(38, 2)),
    *((one, "ü", pa.string()) for one in (pa.string(), pa.large_string(), pa.string_view(), DICTIONARY)),
    *((one, b"ab", pa.binary()) for one in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2))),
    *((one, date(1, 1, 1), pa.date32()) for one in (pa.date32(), pa.date64())),
    *((pa.timestamp(unit), WHOLE, pa.timestamp("us")) for unit in ("s", "ms")),
    *((pa.timestamp(unit), NOON, pa.timestamp("us")) for unit in ("us", "ns")),
    (pa.timestamp("ms", "Asia/Kolkata"), WHOLE.replace(tzinfo=UTC), pa.timestamp("us", "UTC")),
    (pa.timestamp("us", "+02:00"), NOON.replace(tzinfo=UTC), pa.timestamp("us", "UTC")),
    (pa.time32("s"), time(1, 2), pa.time64("ns")),
    (pa.time64("us"), time(1, 2, 3, 4), pa.time64("ns")),
    (pa.duration("ns"), timedelta(days=-1, microseconds=1), pa.duration("us")),
    (pa.null(), None, pa.string()),
    (pa.list_(pa.null()), [None], pa.list_(pa.string())),
    (pa.list_(DICTIONARY), ["a", None], pa.list_(pa.string())),
    *((one, [1, 2], pa.list_(pa.int64())) for one in (pa.large_list(pa.int64()), pa.list_(pa.int64(), 2))),
    *((one, [1, 2], pa.list_(pa.int64())) for one in (pa.list_view(pa.int64()), pa.large_list_view(pa.int64()))),
    (
        pa.struct([("a", pa.uint8()), ("b", pa.null())]),
        {"a": 1, "b": None},
        pa.struct([("a", pa.int16()), ("b", pa.string())]),
    ),
    (pa.map_(pa.large_string(), pa.uint8()), [("a", 1)], pa.map_(pa.string(), pa.int16())),
    (pa.run_end_encoded(pa.int32(), pa.int64()), 5, pa.int64()),
    (pa.uuid(), bytes(16), pa.binary()),
]


def batch_of(found: pa.DataType, value: Any) -> pa.RecordBatch:
    if pa.types.is_run_end_encoded(found):
        return pa.record_batch({"x": pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array([value]))})
    if isinstance(found, pa.BaseExtensionType):
        return pa.record_batch(
            {"x": pa.ExtensionArray.from_storage(found, pa.array([value, None], found.storage_type))}
        )
    return pa.record_batch({"x": pa.array([value, None], found)})


@pytest.mark.parametrize(("found", "value", "becomes"), KEPT, ids=lambda one: str(one)[:40])
def test_a_type_of_arrow_comes_to_spark_with_its_values(found: pa.DataType, value: Any, becomes: pa.DataType) -> None:
    # H171
    batch = batch_of(found, value)
    schema = for_spark(batch.schema)
    assert schema.field("x").type == becomes
    demanded = arrow_form(from_arrow_schema(schema))
    given = conform(batch, demanded)
    assert given.schema.equals(demanded), "otherwise Spark refuses it"
    assert given.column("x").to_pylist()[0] == value


@pytest.mark.parametrize(
    "found", [pa.decimal256(39, 0), pa.month_day_nano_interval(), pa.dense_union([pa.field("a", pa.int8())])], ids=str
)
@pytest.mark.parametrize("place", ["x", "x.y", "x[]"])
def test_a_type_that_spark_has_no_form_of_is_refused_with_the_column(found: pa.DataType, place: str) -> None:  # H171
    whole = {"x": found, "x.y": pa.struct([("y", found)]), "x[]": pa.list_(found)}[place]
    with pytest.raises(ValueError, match="which Spark has no type for: pass schema=") as caught:
        for_spark(pa.schema([("x", whole)]))
    assert f"column {place!r} is " in str(caught.value)


CHANGED: list[tuple[pa.Array, pa.DataType, str]] = [
    (pa.array([1], pa.timestamp("ns")), pa.timestamp("us"), "would lose data"),
    (pa.array([1, 5]), pa.bool_(), "would not be what it was"),
    (pa.array([2**53 + 1]), pa.float64(), "not in range"),
    (pa.array([300]), pa.int8(), "not in range"),
    (pa.array([0.1]), pa.float32(), "would not be what it was"),
    (pa.array([1.5]), pa.int64(), "truncated"),
    (pa.array(["02"]), pa.int64(), "would not be what it was"),
    (pa.array([NOON]), pa.date32(), "would not be what it was"),
    (pa.array([86_400_001], pa.int64()).view(pa.date64()), pa.date32(), "would lose data"),
    (pa.array([Decimal("1.55")]), pa.decimal128(5, 1), "data loss"),
    (pa.array([Decimal("1." + "1" * 20)]), pa.float64(), "would not be what it was"),
    (pa.array([b"\xff"]), pa.string(), "UTF8"),
    (pa.array([[0.1]]), pa.list_(pa.float32()), "would not be what it was"),
    (pa.array([NOON]), pa.timestamp("us", "UTC"), "has times without a zone"),
    (pa.array([{"y": NOON}]), pa.struct([("y", pa.timestamp("us", "UTC"))]), "'x.y' has times without a zone"),
    (pa.array([[NOON.replace(tzinfo=UTC)]]), pa.list_(pa.timestamp("us")), "has instants"),
]


@pytest.mark.parametrize(
    ("column", "wanted", "words"), CHANGED, ids=lambda one: str(one)[:30] if isinstance(one, pa.DataType) else ""
)
def test_a_value_that_would_be_changed_is_refused_with_the_column(
    column: pa.Array, wanted: pa.DataType, words: str
) -> None:  # H171
    with pytest.raises(ValueError, match=words) as caught:
        conform(pa.record_batch({"x": column}), pa.schema([("x", wanted)]))
    assert str(caught.value).startswith("column 'x")


def test_nulls_where_there_are_none_and_missing_columns_are_refused() -> None:  # H171
    batch = pa.record_batch({"x": pa.array([1, None])})
    with pytest.raises(ValueError, match="column 'x' has NULL"):
        conform(batch, pa.schema([pa.field("x", pa.int64(), nullable=False)]))
    with pytest.raises(ValueError, match=r"it has no columns \['y'\], only \['x'\]"):
        conform(batch, pa.schema([("y", pa.int64())]))
    nan = pa.record_batch({"x": pa.array([float("nan"), 0.5])})
    assert repr(conform(nan, pa.schema([("x", pa.float32())])).to_pylist()) == "[{'x': nan}, {'x': 0.5}]"


def test_the_page_of_types_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/types.md").read_text()
    for one in SPARK_TYPES:
        assert f"| {one.arrow} | {one.spark} | {one.how} |" in page
    assert page.count("\n| ") == len(SPARK_TYPES) + 1
