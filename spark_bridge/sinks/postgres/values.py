# SPDX-License-Identifier: Apache-2.0

"""The columns of a PostgreSQL table, and what the server would make of a value.

It rounds a number to the scale of its column, cuts a time to its precision, and drops the zone of a time for a column
without one, all without an error. So such values are refused before they are sent.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

import psycopg
from psycopg import sql
from psycopg.adapt import PyFormat, Transformer

from protocol.arguments import SHOWN_CHARS_MAX
from protocol.describing import show
from spark_bridge.sinks.rows import WithZone

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


@dataclass(frozen=True)
class Column:
    """A column. ``base`` and ``modifier`` are those of its elements if it is an array, and never those of a domain."""

    name: str
    declared: str
    identity: tuple[int, int]  # the type's oid and modifier
    base: str
    modifier: int
    is_array: bool
    with_zone: WithZone

    def taker(self) -> Callable[[Any], Any] | None:
        """What makes the form that is sent of a value, or raises ``ValueError`` if it would change; None: it stays."""
        take = _taker(self.base, self.modifier)
        if take is None:
            return None
        take_all = self.is_array and self.base in ("json", "jsonb")  # their elements may be lists

        def taken(value: Any) -> Any:
            if not self.is_array or not isinstance(value, (list, tuple)):
                return take(value)
            if take_all:
                return [None if one is None else take(one) for one in value]
            return [None if one is None else taken(one) for one in value]

        def named(value: Any) -> Any:
            try:
                return taken(value)
            except ValueError as error:
                shown = show(value, SHOWN_CHARS_MAX)
                raise ValueError(
                    f"column {self.name!r} is {self.declared}, and cannot have {shown} unchanged: {error}"
                ) from None

        return named


def columns_of(connection: psycopg.Connection, table: sql.Identifier) -> dict[str, Column]:
    """The columns of a table by name; empty if there is none."""
    place = sql.SQL("to_regclass({})").format(sql.Literal(table.as_string(connection)))
    return _columns_of(connection, place)


def _columns_of(connection: psycopg.Connection, place: sql.Composable) -> dict[str, Column]:
    found = connection.execute(sql.SQL(_COLUMNS).format(table=place)).fetchall()
    columns = {}
    for name, declared, type_, declared_modifier, base, modifier, is_array, relation in found:
        if relation:
            fields = _columns_of(connection, sql.Literal(relation))
            with_zone = WithZone(fields={field.name: field.with_zone for field in fields.values()})
        else:
            with_zone = WithZone(base in ("timestamp with time zone", "time with time zone"))
        identity = (type_, declared_modifier)
        columns[name] = Column(name, declared, identity, base, modifier, is_array, with_zone)
    return columns


def name_what_cannot_be_sent(
    connection: psycopg.Connection, rows: Sequence[Sequence[Any]], columns: Sequence[str], error: Exception
) -> None:
    """Raise ``ValueError`` with the column of the value that psycopg has no form for, such as text with NUL in it."""
    forms = Transformer(connection)
    for row in rows:
        for column, value in zip(columns, row, strict=True):
            try:
                if value is not None:
                    forms.get_dumper(value, PyFormat.TEXT).dump(value)
            except (psycopg.Error, TypeError) as why:
                raise ValueError(
                    f"column {column!r} of the row {show(row, SHOWN_CHARS_MAX)} cannot be written: {why}. Replace the "
                    "value, or change it to one that PostgreSQL has, in encode of the operator"
                ) from error


def _taker(base: str, modifier: int) -> Callable[[Any], Any] | None:
    if base in ("json", "jsonb"):
        return _json
    if base == "numeric":
        if modifier < 0:
            return None
        scale = (((modifier - 4) & 0x7FF) ^ 0x400) - 0x400
        return lambda value: _number(value, scale)
    if base in ("real", "double precision"):
        return lambda value: _float(value, base)
    if base.startswith(("timestamp", "time ")):
        precision = modifier if modifier >= 0 else 6
        return lambda value: _time(value, base, precision)
    if base == "interval":
        precision = 6 if modifier < 0 or modifier & 0xFFFF == 0xFFFF else modifier & 0xFFFF
        return lambda value: _interval(value, precision)
    if base == "date":
        return _date
    if base in ("text", "character varying", "character", "citext"):
        chars_max = modifier - 4 if modifier >= 4 else None
        return lambda value: _text(value, chars_max)
    return _bytes if base == "bytea" else None


def _json(value: Any) -> Any:
    if isinstance(value, str):
        return value  # the text of a document
    if isinstance(value, _BYTES):
        raise ValueError("JSON has no bytes: write text")
    text = json.dumps(_document(value), ensure_ascii=False, allow_nan=False)
    if "\\u0000" in text and _has_nul(value):
        raise ValueError("PostgreSQL's text has no character NUL: replace it, as text.replace('\\0', '') does")
    return text


def _document(value: Any) -> Any:
    """The value with Spark's rows as objects. Raises ``ValueError`` for what JSON would change, or has no form for."""
    if hasattr(value, "__fields__"):
        value = value.asDict()
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ValueError("the names in a JSON object are text: make text of the keys")
        return {name: _document(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_document(one) for one in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
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


def _check_fraction(value: Any, precision: int) -> None:
    if isinstance(value, str):
        fraction = re.search(r":\d\d\.(\d+)", value)
        too_fine = fraction is not None and len(fraction[1].rstrip("0")) > precision
    else:
        micros = int(value.microseconds if isinstance(value, timedelta) else getattr(value, "microsecond", 0))
        too_fine = micros % 10 ** (6 - precision) != 0
    if too_fine or any(getattr(value, name, 0) for name in ("nanosecond", "nanoseconds")):  # pandas has them
        raise ValueError(f"it has more than {precision} digits after the second, and PostgreSQL would round it")


def _time(value: Any, base: str, precision: int) -> Any:
    has_zone = base.endswith("with time zone")
    _check_fraction(value, precision)
    if isinstance(value, str) and not _NOT_A_TIME.match(value):
        named = _OFFSET.search(value) is not None
        if has_zone and not named:
            raise ValueError("the text names no offset, such as +01:00 or Z at its end, so its moment is unknown")
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


def _interval(value: Any, precision: int) -> Any:
    _check_fraction(value, precision)
    return value


def _date(value: Any) -> Any:
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


def _bytes(value: Any) -> Any:
    if isinstance(value, str) and "\\" in value and not value.startswith("\\x"):
        raise ValueError("PostgreSQL takes a backslash in text for the beginning of an escape: write bytes")
    return value
