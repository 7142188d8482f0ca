# SPDX-License-Identifier: Apache-2.0

"""How values are read from records: which of their times become instants, and which are refused with column and row."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row

from spark_bridge.sinks.postgres import values
from spark_bridge.sinks.rows import Columns, instant, json_form, take_list, take_map, take_struct

SUMMER_NOON = datetime(2026, 7, 1, 12)  # noqa: DTZ001
INSTANT = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [
        ("at", INSTANT),
        ("local", pa.timestamp("us")),
        ("many", pa.list_(INSTANT)),
        ("both", pa.struct([("at", INSTANT), ("local", pa.timestamp("us"))])),
        ("map", pa.map_(pa.timestamp("us"), INSTANT)),
    ]
)

TAKES = {
    "at": instant,
    "many": take_list(instant),
    "both": take_struct("both", "a struct", {"at": instant, "local": None}),
    "map": take_map(None, instant),
}


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process is in Berlin, as a worker of Spark may be."""
    with monkeypatch.context() as context:
        context.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


def read(record: Any) -> list[Any]:
    return list(Columns(SCHEMA.names, TAKES).rows(record)[0])


def test_times_of_a_row_of_spark_are_instants_in_the_local_zone_of_the_worker(berlin: None) -> None:  # H171
    both = Row(local=SUMMER_NOON, at=SUMMER_NOON)  # in another order than in the schema
    row = Row(map={SUMMER_NOON: SUMMER_NOON}, both=both, many=[SUMMER_NOON, None], local=SUMMER_NOON, at=SUMMER_NOON)
    at = datetime(2026, 7, 1, 10, tzinfo=UTC)
    assert read(row) == [at, SUMMER_NOON, [at, None], {"at": at, "local": SUMMER_NOON}, [(SUMMER_NOON, at)]]


def test_the_second_of_two_equal_hours_is_an_hour_later(berlin: None) -> None:  # H171
    twice = [datetime(2026, 10, 25, 2, 30, fold=fold) for fold in (0, 1)]  # noqa: DTZ001
    assert [read(Row(at=one))[0] for one in twice] == [
        datetime(2026, 10, 25, 0, 30, tzinfo=UTC),
        datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
    ]


def test_times_with_a_zone_and_without_one_arrive_where_they_belong() -> None:  # H171
    at = SUMMER_NOON.replace(tzinfo=timezone(timedelta(hours=2)))
    record = {"at": at, "local": SUMMER_NOON, "map": [(SUMMER_NOON, at)], "both": (at, SUMMER_NOON)}
    assert read(record) == [at, SUMMER_NOON, None, {"at": at, "local": SUMMER_NOON}, [(SUMMER_NOON, at)]]
    assert read(pa.RecordBatch.from_pylist([record], SCHEMA))[0] == at


@pytest.mark.parametrize(
    "record",
    [
        {"at": SUMMER_NOON},
        {"at": date(2026, 7, 1)},
        Row(at=date(2026, 7, 1)),
        (None, None, [SUMMER_NOON], None, None),
        {"both": {"local": SUMMER_NOON, "at": SUMMER_NOON}},
        {"map": {SUMMER_NOON: SUMMER_NOON}},
        pa.record_batch({"at": pa.array([SUMMER_NOON])}),
    ],
)
def test_a_time_without_a_zone_is_refused_where_nobody_has_named_one(record: Any) -> None:  # H171
    with pytest.raises(ValueError, match=r"column '(at|many|both|map)' of the row .* has no zone.*give it its zone"):
        read(record)


def test_a_row_in_a_dict_is_still_one_of_spark(berlin: None) -> None:  # H171
    found = read({"both": Row(at=SUMMER_NOON, local=SUMMER_NOON)})[3]
    assert found == {"at": datetime(2026, 7, 1, 10, tzinfo=UTC), "local": SUMMER_NOON}


def test_a_time_of_a_row_that_utc_cannot_have_is_named(berlin: None) -> None:  # H171
    with pytest.raises(ValueError, match=r"column 'at' of the row \(datetime.datetime\(1, 1, 1.*cannot take .* to UTC"):
        read(Row(at=datetime(1, 1, 1)))  # noqa: DTZ001


BATCH = pa.record_batch({"at": pa.array([None, SUMMER_NOON]), "local": pa.array([SUMMER_NOON, None])})


@pytest.mark.parametrize(
    ("never_null", "error"),
    [
        ({}, r"column 'at' of the row \(datetime.datetime\(2026, 7, 1, 12, 0\), None, .* has no zone"),
        ({"local": "in the key"}, r"column 'local' is in the key and NULL in the row \(datetime.*2026.*\): give it"),
    ],
)
def test_the_row_of_a_batch_is_named(never_null: dict[str, str], error: str) -> None:  # H171
    with pytest.raises(ValueError, match=error):
        Columns(SCHEMA.names, TAKES, never_null).rows(BATCH)


def test_only_columns_with_values_of_the_kept_type_alone_are_left_as_they_are() -> None:  # H171
    def double(value: Any, of_spark: bool) -> Any:
        return value * 2

    columns = Columns("ab", dict.fromkeys("ab", double), kept={"a": int, "b": int})
    batch = pa.record_batch({"a": pa.array([1, None, 3]), "b": pa.array([0.5, None, 1.5])})
    assert columns.rows(batch) == [(1, 1.0), (None, None), (3, 3.0)]
    assert columns.rows({"a": True, "b": 1}) == [(2, 1)]  # True is 1 in a column of integers, but of another type


def test_a_value_of_the_kept_type_stays_the_same_in_postgresql() -> None:  # H171
    samples: dict[Any, list[Any]] = {
        int: [0, -(2**70)],
        float: [0.1, 5e-324, float("inf")],
        str: ["", "{}", "10:00", "\\x"],
        date: [date(1, 1, 1)],
        bytes: [b"", b"\\"],
    }
    for base, kind in values._KEPT.items():
        take = values._take(base, -1)
        assert take is not None
        assert all(take(one, False) is one for one in samples[kind]), base


def test_the_value_that_the_target_fails_at_is_named() -> None:  # H171
    def write(column: str, value: Any) -> None:
        if column == "b":
            value.encode()

    rows = [(None, "x"), ("\ud800", None), ("y", "\ud801")]
    with pytest.raises(
        ValueError, match=r"column 'b' of the row \('y', '\\ud801'\) cannot be written: it has a lone"
    ) as named:
        Columns("ab", {}).name_value(rows, write, OSError("it"))
    assert isinstance(named.value.__cause__, OSError)
    Columns("ab", {}).name_value(rows[:2], write, OSError("it"))  # none of these is the cause


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({"b": 1}, r"no columns \['b'\]"),
        (pa.record_batch({"b": pa.array([1])}), r"no columns \['b'\]"),
        ((1, 2), "the row has 2 values, and the sink 1 columns"),
    ],
)
def test_other_columns_are_refused(record: Any, error: str) -> None:  # H171
    with pytest.raises(ValueError, match=error):
        Columns(["a"], {}).rows(record)


@pytest.mark.parametrize("value", [{1: "a", "1": "b"}, [{"a": {2: None, "2": None}}]])
def test_keys_that_become_one_name_in_json_are_refused(value: Any) -> None:  # H171
    with pytest.raises(ValueError, match="two of its keys are one name"):
        json_form(value, str, str)
