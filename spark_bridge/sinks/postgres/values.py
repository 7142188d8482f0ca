# SPDX-License-Identifier: Apache-2.0

"""The columns of a PostgreSQL table, and what the server would make of a value.

It rounds a number to the scale of its column, cuts a time to its precision, and drops the zone of a time for a column
without one, all without an error. So such values are refused before they are sent.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from math import inf
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from protocol.describing import show
from spark_bridge.sinks.rows import Take, instant, json_form, naming, take_list, take_struct

_COLUMNS = """
WITH RECURSIVE form AS (
    SELECT attnum, atttypid AS type, atttypmod AS modifier, false AS is_array, 0 AS depth
    FROM pg_attribute WHERE attrelid = {table} AND attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT attnum, CASE typtype WHEN 'd' THEN typbasetype ELSE typelem END,
        CASE typtype WHEN 'd' THEN typtypmod ELSE modifier END, is_array OR typtype <> 'd', depth + 1
    FROM form JOIN pg_type ON pg_type.oid = form.type WHERE typtype = 'd' OR (typcategory = 'A' AND typelem <> 0)
)
SELECT DISTINCT ON (attnum) attname, format_type(atttypid, atttypmod), atttypid, atttypmod,
    format_type(type, NULL), modifier, is_array, CASE typtype WHEN 'c' THEN typrelid ELSE 0 END
FROM form JOIN pg_type ON pg_type.oid = form.type JOIN pg_attribute USING (attnum) WHERE attrelid = {table}
ORDER BY attnum, depth DESC
"""
_OFFSET = re.compile(r":\d\d(\.\d+)?\s*(Z|UTC|[+-]\d\d(:?\d\d){0,2})\s*$", re.IGNORECASE)
_NOT_A_TIME = re.compile(r"\s*([+-]?infinity|epoch)\s*$", re.IGNORECASE)
_BYTES = (bytes, bytearray, memoryview)
_REAL_DIGITS = 6  # of a decimal number that every real keeps
_KEPT = {
    **dict.fromkeys(("smallint", "integer", "bigint"), int),
    **dict.fromkeys(("text", "character varying", "citext", "json", "jsonb"), str),
    "double precision": float,
    "date": date,
    "bytea": bytes,
}
"""The type whose values ``_take`` returns as they are, if the column has no modifier."""


class Column(NamedTuple):
    """A column of a table. ``take`` makes what is sent of a value; None: the value itself."""

    name: str
    declared: str
    identity: tuple[int, int]  # the type's oid and modifier
    take: Take | None
    kept: type | None  # see ``Columns``


def columns_of(connection: psycopg.Connection, table: sql.Identifier) -> dict[str, Column]:
    """The columns of a table by name; empty if there is none."""
    place = sql.SQL("to_regclass({})").format(sql.Literal(table.as_string(connection)))
    return _columns_of(connection, place, "")


def _columns_of(connection: psycopg.Connection, place: sql.Composable, above: str) -> dict[str, Column]:
    found = connection.execute(sql.SQL(_COLUMNS).format(table=place)).fetchall()
    columns = {}
    for name, declared, type_, declared_modifier, base, modifier, is_array, relation in found:
        path = f"{above}{name}{'[]' if is_array else ''}"
        if relation:
            fields = _columns_of(connection, sql.Literal(relation), f"{path}.")
            take: Take | None = _composite(path, declared, {field: one.take for field, one in fields.items()})
        elif (take := _take(base, modifier)) is not None:
            take = naming(path, declared, take)
        if take is not None and is_array:
            # The elements of arrays of JSON may be lists, and those of composite types are tuples.
            take = _array(take, () if base in ("json", "jsonb") else (list,) if relation else (list, tuple))
        kept = None if is_array or relation or modifier >= 0 else _KEPT.get(base)
        columns[name] = Column(name, declared, (type_, declared_modifier), take, kept)
    return columns


def _array(take: Take, inner: tuple[type, ...]) -> Take:
    take_all = take_list(take, inner)
    return lambda value, of_spark: (take_all if isinstance(value, (list, tuple)) else take)(value, of_spark)


def _composite(path: str, declared: str, takes: Mapping[str, Take | None]) -> Take:
    take_fields = take_struct(path, declared, takes)

    def take(value: Any, of_spark: bool) -> Any:
        if not isinstance(value, (tuple, Mapping)):
            return value  # such as its text
        return tuple(take_fields(value, of_spark).values())

    return take


def _take(base: str, modifier: int) -> Take | None:
    if base in ("json", "jsonb"):
        return _json
    if base == "numeric":
        if modifier < 0:
            return None
        scale = (((modifier - 4) & 0x7FF) ^ 0x400) - 0x400
        return lambda value, of_spark: _number(value, scale)
    if base in ("smallint", "integer", "bigint"):
        return _integer
    if base in ("real", "double precision"):
        return lambda value, of_spark: _float(value, base)
    if base.startswith(("timestamp", "time ")):
        precision = modifier if modifier >= 0 else 6
        return lambda value, of_spark: _time(value, of_spark, base, precision)
    if base == "interval":
        precision = 6 if modifier < 0 or modifier & 0xFFFF == 0xFFFF else modifier & 0xFFFF
        return lambda value, of_spark: _with_fraction(value, precision)
    if base == "date":
        return _date
    if base in ("text", "character varying", "character", "citext"):
        chars_max = modifier - 4 if modifier >= 4 else None
        return lambda value, of_spark: _text(value, chars_max)
    return _bytes if base == "bytea" else None


def _integer(value: Any, of_spark: bool) -> Any:
    """pandas makes floats of integers beside NULLs, and PostgreSQL reads no text of a float as an integer."""
    if not isinstance(value, (float, Decimal)):
        return value
    if value != value:
        raise ValueError("NaN is not an integer: write None for NULL")
    if value in (inf, -inf) or int(value) != value:
        raise ValueError("this is not a whole number: round it first, or give the column another type")
    return int(value)


def _json(value: Any, of_spark: bool) -> Any:
    if isinstance(value, str):
        return value  # the text of a document
    if isinstance(value, _BYTES):
        raise ValueError("JSON has no bytes: write text")
    text = json.dumps(json_form(value, _key, _not_in_json), ensure_ascii=False, allow_nan=False)
    if "\\u0000" in text and _has_nul(value):
        raise ValueError("PostgreSQL's text has no character NUL: replace it, as text.replace('\\0', '') does")
    return text


def _key(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("the names in a JSON object are text: make text of the keys")
    return value


def _not_in_json(value: Any) -> Any:
    raise ValueError(f"JSON has no form for {show(value, 80)}: write text or a number instead")


def _has_nul(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_nul, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        return any(map(_has_nul, value))
    return isinstance(value, str) and "\0" in value


def _decimal(value: Any) -> Decimal | None:
    """The number exactly as it would be sent; None if it is not one, or not finite."""
    try:
        number = Decimal(float.__repr__(value) if isinstance(value, float) else value)
    except (InvalidOperation, TypeError, ValueError):
        return None
    return number if number.is_finite() else None


def _number(value: Any, scale: int) -> Any:
    if isinstance(value, (str, float, Decimal, int)) and (number := _decimal(value)) is not None:
        _, digits, exponent = number.as_tuple()
        text = "".join(map(str, digits))
        zeros = len(text) - len(text.rstrip("0"))
        if number and int(exponent) + zeros < -scale:
            raise ValueError(f"it has more than {scale} digits after the point, and PostgreSQL would round it")
    return value


def _float(value: Any, base: str) -> Any:
    if base == "double precision" and isinstance(value, float):
        return value
    number = _decimal(value) if isinstance(value, (float, int, Decimal)) and not isinstance(value, bool) else None
    if number is None:
        return value
    try:
        kept = float(number) if base == "double precision" else struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return value  # the server refuses it
    if Decimal(kept) == number or Decimal(repr(kept)) == number:
        return value
    if base == "real" and Decimal(f"{number:.{_REAL_DIGITS}g}") == number:
        return value
    raise ValueError("it has more digits than the type, and PostgreSQL would round it")


def _with_fraction(value: Any, precision: int) -> Any:
    if isinstance(value, str):
        fraction = re.search(r":\d\d\.(\d+)", value)
        too_fine = fraction is not None and len(fraction[1].rstrip("0")) > precision
    else:
        micros = int(value.microseconds if isinstance(value, timedelta) else getattr(value, "microsecond", 0))
        too_fine = micros % 10 ** (6 - precision) != 0
    if too_fine or any(getattr(value, name, 0) for name in ("nanosecond", "nanoseconds")):  # pandas has them
        raise ValueError(f"it has more than {precision} digits after the second, and PostgreSQL would round it")
    return value


def _time(value: Any, of_spark: bool, base: str, precision: int) -> Any:
    has_zone = base.endswith("with time zone")
    _with_fraction(value, precision)
    if isinstance(value, str) and not _NOT_A_TIME.match(value):
        named = _OFFSET.search(value) is not None
        if has_zone and not named:
            raise ValueError("the text names no offset, such as +01:00 or Z at its end, so its moment is unknown")
    elif has_zone and isinstance(value, (date, time)):
        value, named = instant(value, of_spark), True
    else:
        named = isinstance(value, (datetime, time)) and value.tzinfo is not None
    if named and not has_zone:
        raise ValueError(
            "the column has no zone, and PostgreSQL would drop that of the value: change it to the zone of the column, "
            "and take its zone away, as value.astimezone(zone).replace(tzinfo=None) does, or make the column one with "
            "a zone"
        )
    if base.startswith("time ") and isinstance(value, datetime):
        raise ValueError("PostgreSQL would drop its date: write value.time()")
    return value


def _date(value: Any, of_spark: bool) -> Any:
    if isinstance(value, datetime) and (value.tzinfo is not None or value.time() != time.min):
        raise ValueError("PostgreSQL would drop its time: write value.date()")
    if isinstance(value, str) and ":" in value:
        raise ValueError("PostgreSQL would drop its time: write the date alone")
    return value


def _text(value: Any, chars_max: int | None) -> Any:
    if isinstance(value, _BYTES):
        raise ValueError("bytes are not text, and would become their hexadecimal digits: decode them")
    if chars_max is not None and isinstance(value, str) and len(value) > chars_max:
        raise ValueError(f"it has more than {chars_max} characters")
    return value


def _bytes(value: Any, of_spark: bool) -> Any:
    if isinstance(value, str) and "\\" in value and not value.startswith("\\x"):
        raise ValueError("PostgreSQL takes a backslash in text for the beginning of an escape: write bytes")
    return value
