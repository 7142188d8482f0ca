# SPDX-License-Identifier: Apache-2.0

"""The values of rows, before pyarrow makes arrays of them.

pyarrow drops the fraction of a number in a column of integers, the part of a time that is finer than its column, the
fields of a nested dict that its type lacks, and a zone that its column lacks; and takes a time without a zone to be in
UTC. Here each value stays what it was, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from datetime import time as time_of_day
from numbers import Number
from typing import Any

import pyarrow
from pyarrow import types

from protocol.arguments import SHOWN_CHARS_MAX
from protocol.describing import show

Check = Callable[[Any, bool], Any]
"""Returns the value as pyarrow is given it. The second argument is whether it comes from a Spark ``Row``."""

_STEPS_US = {"s": 1_000_000, "ms": 1_000}


def check_of(field: pyarrow.Field) -> Check | None:
    """Return the check for the values of a column; None if pyarrow's own is enough.

    It raises ``ValueError``, which names the column, for a value that would not arrive as it is.
    """
    check = _check_of(field.type, field.name)
    if field.nullable:
        return check

    def not_null(value: Any, in_row: bool) -> Any:
        if value is None:
            raise ValueError(f"column {field.name!r} is NULL in a row, and the sink's schema says that it never is")
        return value if check is None else check(value, in_row)

    return not_null


def _check_of(given: pyarrow.DataType, column: str) -> Check | None:
    if types.is_dictionary(given) or types.is_run_end_encoded(given):
        return _check_of(given.value_type, column)
    if types.is_struct(given):
        return _struct(given, column)
    if types.is_map(given):
        return _map(given, column)
    if types.is_nested(given) and given.num_fields == 1:
        return _list(given, column)
    if types.is_timestamp(given):
        return _timestamp(given, column)
    if types.is_date(given):
        return _date(given, column)
    if types.is_time(given):
        return _time(given, column)
    if types.is_integer(given):
        return _integer(given, column)
    return None


def _refused(column: str, value: Any, given: pyarrow.DataType, why: str) -> ValueError:
    return ValueError(f"column {column!r} cannot be {show(value, SHOWN_CHARS_MAX)}: it is {given}, and {why}")


def _refuse_number(column: str, value: Any, given: pyarrow.DataType) -> None:
    """Arrow would count it from 1970 on, drop its fraction, and take NaN for NULL."""
    if isinstance(value, Number):
        raise _refused(column, value, given, "this is a number: write a date or a time")


def _integer(given: pyarrow.DataType, column: str) -> Check:
    def check(value: Any, in_row: bool) -> Any:
        if type(value) is int or value is None:
            return value
        try:
            is_whole = int(value) == value
        except (TypeError, ValueError, OverflowError):
            is_whole = False
        if is_whole:
            return value
        raise _refused(column, value, given, "this is not a whole number: round it first, or declare another type")

    return check


def _timestamp(given: pyarrow.TimestampType, column: str) -> Check:
    def check(value: Any, in_row: bool) -> Any:
        _refuse_number(column, value, given)
        if value is None or value != value:  # NaT of pandas, which is not equal to itself, is its NULL
            return None
        if not isinstance(value, datetime):
            return value
        has_zone = value.utcoffset() is not None
        if given.tz is None and has_zone:
            raise _refused(
                column, value, given, "this has a zone: declare timestamp('us', 'UTC'), or remove the zone first"
            )
        _check_precision(column, value, given)
        if given.tz is None or has_zone:
            return value
        if not in_row:
            raise _refused(
                column, value, given, "this has no zone: give it one, as value.replace(tzinfo=timezone.utc) does"
            )
        try:
            return value.astimezone()  # PySpark gives an instant as the local time of the worker
        except (OverflowError, OSError, ValueError) as error:
            raise _refused(column, value, given, f"this has no instant in the local zone ({error})") from error

    return check


def _date(given: pyarrow.DataType, column: str) -> Check:
    def check(value: Any, in_row: bool) -> Any:
        _refuse_number(column, value, given)
        if value is None or value != value:  # NaT of pandas, as above
            return None
        if isinstance(value, datetime) and (value.time() != time_of_day() or value.tzinfo is not None):
            raise _refused(column, value, given, "this has a time of day: write value.date()")
        return value

    return check


def _time(given: pyarrow.DataType, column: str) -> Check:
    def check(value: Any, in_row: bool) -> Any:
        _refuse_number(column, value, given)
        if isinstance(value, time_of_day):
            _check_precision(column, value, given)
        return value

    return check


def _check_precision(column: str, value: datetime | time_of_day, given: Any) -> None:
    is_finer = value.microsecond % _STEPS_US.get(given.unit, 1)
    if is_finer or (given.unit != "ns" and getattr(value, "nanosecond", 0)):
        raise _refused(column, value, given, "this is finer: declare a finer unit, or truncate it first")


def _list(given: Any, column: str) -> Check | None:
    check = _check_of(given.value_type, f"{column}[]")
    if check is None:
        return None

    def check_all(value: Any, in_row: bool) -> Any:
        return None if value is None else [check(one, in_row) for one in value]

    return check_all


def _map(given: pyarrow.MapType, column: str) -> Check | None:
    key, item = _check_of(given.key_type, f"{column} (key)"), _check_of(given.item_type, f"{column} (value)")
    if key is None and item is None:
        return None

    def check_all(value: Any, in_row: bool) -> Any:
        if value is None:
            return None
        pairs = value.items() if isinstance(value, Mapping) else value
        return [(key(one, in_row) if key else one, item(other, in_row) if item else other) for one, other in pairs]

    return check_all


def _struct(given: pyarrow.StructType, column: str) -> Check:
    names = [field.name for field in given]
    checks = [(field.name, _check_of(field.type, f"{column}.{field.name}")) for field in given]

    def check_all(value: Any, in_row: bool) -> Any:
        if value is None:
            return None
        if hasattr(value, "asDict"):
            value, in_row = value.asDict(), True
        elif isinstance(value, (tuple, list)) and len(value) == len(names):
            value = dict(zip(names, value, strict=True))
        if not isinstance(value, Mapping) or not set(value) <= set(names):
            raise _refused(
                column, value, given, f"this is not a dict or a Row with these fields, {names}: leave others out"
            )
        return {name: check(value.get(name), in_row) if check else value.get(name) for name, check in checks}

    return check_all
