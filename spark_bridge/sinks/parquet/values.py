# SPDX-License-Identifier: Apache-2.0

"""The values of rows, before pyarrow makes arrays of them.

pyarrow drops the fraction of a number in a column of integers, the part of a time that is finer than its column, the
fields of a nested dict that its type lacks, and a zone that its column lacks; and takes a time without a zone to be in
UTC. Here each value stays what it was, or is refused.
"""

from __future__ import annotations

from datetime import date, datetime, time
from functools import partial
from numbers import Number
from typing import Any

import pyarrow
from pyarrow import types

from spark_bridge.sinks.rows import Take, instant, naming, take_list, take_map, take_struct

_STEPS_US = {"s": 1_000_000, "ms": 1_000}


def take_of(given: pyarrow.DataType, path: str) -> Take | None:
    """What becomes of the values of a type; None if pyarrow's own checks are enough. ``path`` is for errors."""
    if types.is_dictionary(given) or types.is_run_end_encoded(given):
        return take_of(given.value_type, path)
    if types.is_struct(given):
        return take_struct(path, given, {field.name: take_of(field.type, f"{path}.{field.name}") for field in given})
    if types.is_map(given):
        key, item = take_of(given.key_type, f"{path} (key)"), take_of(given.item_type, f"{path} (value)")
        return take_map(key, item) if key or item else None
    if types.is_nested(given) and given.num_fields == 1:
        element = take_of(given.value_type, f"{path}[]")
        return take_list(element) if element else None
    if types.is_timestamp(given):
        return naming(path, given, partial(_timestamp, given=given))
    if types.is_date(given):
        return naming(path, given, _date)
    if types.is_time(given):
        return naming(path, given, partial(_time, given=given))
    return naming(path, given, _integer) if types.is_integer(given) else None


def _integer(value: Any, of_spark: bool) -> Any:
    if type(value) is int:
        return value
    try:
        is_whole = int(value) == value
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if is_whole:
        return value
    raise ValueError("this is not a whole number: round it first, or declare another type")


def _refuse_number(value: Any) -> None:
    """Arrow would count it from 1970 on, drop its fraction, and take NaN for NULL."""
    if isinstance(value, Number):
        raise ValueError("this is a number: write a date or a time")


def _timestamp(value: Any, of_spark: bool, given: pyarrow.TimestampType) -> Any:
    _refuse_number(value)
    if value != value:  # NaT of pandas, which is not equal to itself, is its NULL
        return None
    if isinstance(value, datetime):
        if given.tz is None and value.utcoffset() is not None:
            raise ValueError("it has a zone: declare timestamp('us', 'UTC'), or remove the zone first")
        _check_precision(value, given)
    return instant(value, of_spark) if given.tz is not None and isinstance(value, date) else value


def _date(value: Any, of_spark: bool) -> Any:
    _refuse_number(value)
    if value != value:  # NaT of pandas, as above
        return None
    if isinstance(value, datetime) and (value.time() != time() or value.tzinfo is not None):
        raise ValueError("this has a time of day: write value.date()")
    return value


def _time(value: Any, of_spark: bool, given: Any) -> Any:
    _refuse_number(value)
    if isinstance(value, time):
        _check_precision(value, given)
    return value


def _check_precision(value: datetime | time, given: Any) -> None:
    is_finer = value.microsecond % _STEPS_US.get(given.unit, 1)
    if is_finer or (given.unit != "ns" and getattr(value, "nanosecond", 0)):
        raise ValueError("this is finer: declare a finer unit, or truncate it first")
