# SPDX-License-Identifier: Apache-2.0

"""The values that all tools write, and a form of them in which those of different tools and types can be compared."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa

FAR_DAYS = 3_663_425  # 1 January 12000, which Python does not have
_EXACT = Context(prec=100)
_DAY_US = 86_400_000_000
_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_EDGES = [
    "0001-01-01",
    "1883-11-18 12:03:57",
    "2026-03-08 02:30:00",
    "9999-12-31 23:59:59.999999",
    "1960-01-01 00:00:00.000001",
]
"""The first day, the hour in which New York got its zone, one that it skips, the last microsecond, before 1970."""
NAIVE = [datetime.fromisoformat(one) for one in _EDGES]
INSTANTS = [one.replace(tzinfo=UTC) for one in NAIVE]
INSTANT = pa.timestamp("us", "UTC")
RECENT = [datetime(2026, 3, 8, 7, tzinfo=UTC) + timedelta(milliseconds=one) for one in (-1, 0, 1)]
"""Around the hour that New York skips, in milliseconds, which is what Spark writes as text."""


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The five values, and NULL."""
    return pa.array([*values, *[values[-1]] * (5 - len(values)), None], kind)


ORIGINAL = pa.table(
    {
        "id": pa.array(range(6)),
        "flag": _column([True, False], pa.bool_()),
        "i8": _column([-(2**7), 2**7 - 1], pa.int8()),
        "i16": _column([-(2**15), 2**15 - 1], pa.int16()),
        "i32": _column([-(2**31), 2**31 - 1], pa.int32()),
        "i64": _column([-(2**63), 2**63 - 1, 2**53 + 1], pa.int64()),
        "u8": _column([2**8 - 1, 0], pa.uint8()),
        "u16": _column([2**16 - 1, 0], pa.uint16()),
        "u32": _column([2**32 - 1, 0], pa.uint32()),
        "u64": _column([2**64 - 1, 0], pa.uint64()),
        "f32": _column([0.1, -0.0, 1.5e30], pa.float32()),
        "f64": _column([0.1, 0.1 + 0.2, 1e22, 5e-324, -1.5], pa.float64()),
        "odd": _column([float("nan"), float("inf"), float("-inf"), -0.0], pa.float64()),
        "exact": _column([Decimal("0.10"), Decimal("12345678901234567890.12"), Decimal("-1.00")], pa.decimal128(38, 2)),
        "text": _column(["", "ü", "two\nlines", 'a "quoted", part', " NA "], pa.string()),
        "digits": _column(["02134", "+4917", "1e400", "0x1A", "-"], pa.string()),
        "bytes": _column([b"", b"\x00\xff"], pa.binary()),
        "day": _column([one.date() for one in NAIVE], pa.date32()),
        "naive": _column(NAIVE, pa.timestamp("us")),
        "instant": _column(INSTANTS, INSTANT),
        "recent": _column(RECENT, pa.timestamp("ms", "UTC")),
        "clock": _column([time(2, 30), time(23, 59, 59, 999999)], pa.time64("us")),
        "span": _column([timedelta(days=-1, microseconds=1), timedelta(days=400)], pa.duration("us")),
        "list": _column([[], [1, None]], pa.list_(pa.int64())),
        "nested": _column(
            [{"at": one, "days": [date(1600, 1, 1), None]} for one in INSTANTS],
            pa.struct([("at", INSTANT), ("days", pa.list_(pa.date32()))]),
        ),
        "map": _column([[("k", NAIVE[2])], []], pa.map_(pa.string(), pa.timestamp("us"))),
        "far_day": _column([FAR_DAYS], pa.int32()).cast(pa.date32()),
        "far_naive": _column([FAR_DAYS * _DAY_US], pa.int64()).cast(pa.timestamp("us")),
        "far_instant": _column([FAR_DAYS * _DAY_US], pa.int64()).cast(INSTANT),
    }
)


def comparable(values: Any) -> list[Any]:
    """A column as plain values: numbers are equal if they are the same number, and times if they are the same time."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        if isinstance(values, pa.ChunkedArray):  # of an older pyarrow, if it is empty
            values = pa.array([], values.type)
    kind = values.type
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return comparable(values.storage)
    if types.is_dictionary(kind):
        return comparable(values.dictionary_decode())
    if types.is_struct(kind):
        columns = [comparable(values.field(place)) for place in range(kind.num_fields)]
        rows = [dict(zip([one.name for one in kind], row, strict=True)) for row in zip(*columns, strict=True)]
        return [row if valid else None for row, valid in zip(rows, values.is_valid().to_pylist(), strict=True)]
    if types.is_map(kind) or hasattr(kind, "value_field"):
        return [None if not one.is_valid else comparable(one.values) for one in values]
    return [None if not one.is_valid else _plain(one, kind) for one in values]


def _plain(one: Any, kind: pa.DataType) -> Any:
    types = pa.types
    if types.is_timestamp(kind):
        return ("naive" if kind.tz is None else "instant", one.value * _NS[kind.unit])
    if types.is_date(kind):
        return ("day", one.value // (86_400_000 if types.is_date64(kind) else 1))
    if types.is_time(kind) or types.is_duration(kind):
        return ("time" if types.is_time(kind) else "span", one.value * _NS[kind.unit])
    if types.is_boolean(kind):
        return one.as_py()
    if types.is_floating(kind) or types.is_integer(kind) or types.is_decimal(kind):
        number = Decimal(str(one.as_py()) if types.is_decimal(kind) else one.cast(pa.string()).as_py())
        return (
            str(number.normalize(_EXACT))
            if number.is_finite() and number
            else str(number if types.is_floating(kind) else 0)
        )
    value = one.as_py()
    return value if isinstance(value, str) else ("bytes", bytes(value))
