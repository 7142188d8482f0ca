# SPDX-License-Identifier: Apache-2.0

"""How values are read from records: which of their times become instants, and which are refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row

from spark_bridge.sinks.rows import WithZone, instants_of_row, rows_of

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

ZONES = {
    "at": WithZone(True),
    "many": WithZone(True),
    "both": WithZone(fields={"at": WithZone(True), "local": WithZone()}),
    "map": WithZone(pair=(WithZone(), WithZone(True))),
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
    row = next(iter(rows_of(record, SCHEMA.names)))
    return list(instants_of_row(row, SCHEMA.names, ZONES, of_spark=hasattr(record, "asDict")))


def test_times_of_a_row_of_spark_are_instants_in_the_local_zone_of_the_worker(berlin: None) -> None:  # H171
    both = Row(local=SUMMER_NOON, at=SUMMER_NOON)  # in another order than in the schema
    row = Row(map={SUMMER_NOON: SUMMER_NOON}, both=both, many=[SUMMER_NOON, None], local=SUMMER_NOON, at=SUMMER_NOON)
    at = datetime(2026, 7, 1, 10, tzinfo=UTC)
    assert read(row) == [at, SUMMER_NOON, [at, None], Row(local=SUMMER_NOON, at=at), {SUMMER_NOON: at}]


def test_the_second_of_two_equal_hours_is_an_hour_later(berlin: None) -> None:  # H171
    twice = [datetime(2026, 10, 25, 2, 30, fold=fold) for fold in (0, 1)]  # noqa: DTZ001
    assert [read(Row(at=one))[0] for one in twice] == [
        datetime(2026, 10, 25, 0, 30, tzinfo=UTC),
        datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
    ]


def test_times_with_a_zone_and_without_one_arrive_where_they_belong() -> None:  # H171
    at = SUMMER_NOON.replace(tzinfo=timezone(timedelta(hours=2)))
    record = {"at": at, "local": SUMMER_NOON, "map": [(SUMMER_NOON, at)], "both": (at, SUMMER_NOON)}
    assert read(record) == [at, SUMMER_NOON, None, (at, SUMMER_NOON), [(SUMMER_NOON, at)]]
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
    with pytest.raises(ValueError, match=r"column '(at|many|both|map)' has a zone, and .* has none.*give it its zone"):
        read(record)


def test_a_row_in_a_dict_is_still_one_of_spark(berlin: None) -> None:  # H171
    found = read({"both": Row(at=SUMMER_NOON, local=SUMMER_NOON)})[3]
    assert found == Row(at=datetime(2026, 7, 1, 10, tzinfo=UTC), local=SUMMER_NOON)


def test_a_time_of_a_row_that_utc_cannot_have_is_named(berlin: None) -> None:  # H171
    with pytest.raises(ValueError, match=r"column 'at' has the time .*datetime\(1, 1, 1.*cannot take .* to UTC"):
        read(Row(at=datetime(1, 1, 1)))  # noqa: DTZ001
