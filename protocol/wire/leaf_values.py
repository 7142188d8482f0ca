# SPDX-License-Identifier: Apache-2.0

"""Dates, times, decimals, UUIDs and NumPy values as the data of msgpack extension types, and back (H96).

All numbers are big-endian, except NumPy's, which are little-endian. Bytes from a peer that are not exactly what this
module writes raise ``ValueError``; every size is checked before memory is taken for it.

A time zone arrives as its offset from UTC, because a region's rules are not part of the value. Arrays arrive as
separate arrays, contiguous and writable.

NumPy is optional. It is imported when the first of its values arrives, and never for one that leaves.
"""

from __future__ import annotations

import re
import sys  # noqa: TID251 - to see whether NumPy is there
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo  # noqa: TID251 - values, not clocks
from decimal import Decimal, InvalidOperation
from math import prod
from struct import Struct
from struct import error as StructError
from typing import Any, cast
from uuid import UUID  # noqa: TID251 - a value, not a source of them

from protocol.errors import RemoteProtocolError
from protocol.wire.extension_types import ExtensionType

__all__ = ["decode_leaf", "encode_leaf"]

DECIMAL_CHARS_MAX = 4096
ARRAY_DIMENSIONS_MAX = 32

_DATETIME = Struct(">HBBBBBIB")  # year, month, day, hour, minute, second, microsecond, fold
_DATE = Struct(">HBB")
_TIME = Struct(">BBBIB")
_TIMEDELTA = Struct(">iII")  # days, seconds, microseconds
_OFFSET = Struct(">q")  # microseconds, from -24 to 24 hours
_DIMENSION = Struct("<Q")
_MICROSECOND = timedelta(microseconds=1)
_DECIMAL_TEXT = re.compile(r"-?(\d+(\.\d*)?|\.\d+)(E[+-]?\d{1,19})?|-?Infinity|-?s?NaN\d*", re.ASCII)
_ITEM_BYTES = {
    "|b1": 1, "|i1": 1, "<i2": 2, "<i4": 4, "<i8": 8, "|u1": 1, "<u2": 2, "<u4": 4, "<u8": 8,
    "<f2": 2, "<f4": 4, "<f8": 8, "<c8": 8, "<c16": 16,
}  # fmt: skip
_ITEM_BYTES |= {
    f"<{kind}8{unit}": 8
    for kind in "mM"
    for unit in ("", "[Y]", "[M]", "[W]", "[D]", "[h]", "[m]", "[s]", "[ms]", "[us]", "[ns]", "[ps]", "[fs]", "[as]")
}


# --- dates and times ----------------------------------------------------------------------------------------------


def _encode_datetime(value: datetime) -> bytes:
    clock = (value.hour, value.minute, value.second, value.microsecond, value.fold)
    return _DATETIME.pack(value.year, value.month, value.day, *clock) + _encode_offset(value)


def _decode_datetime(data: bytes) -> datetime:
    year, month, day, hour, minute, second, microsecond, fold = _DATETIME.unpack(data[:12])
    return datetime(year, month, day, hour, minute, second, microsecond, _decode_offset(data[12:]), fold=fold)


def _encode_date(value: date) -> bytes:
    return _DATE.pack(value.year, value.month, value.day)


def _decode_date(data: bytes) -> date:
    return date(*_DATE.unpack(data))


def _encode_time(value: time) -> bytes:
    clock = (value.hour, value.minute, value.second, value.microsecond, value.fold)
    return _TIME.pack(*clock) + _encode_offset(value)


def _decode_time(data: bytes) -> time:
    hour, minute, second, microsecond, fold = _TIME.unpack(data[:8])
    return time(hour, minute, second, microsecond, _decode_offset(data[8:]), fold=fold)


def _encode_timedelta(value: timedelta) -> bytes:
    return _TIMEDELTA.pack(value.days, value.seconds, value.microseconds)


def _decode_timedelta(data: bytes) -> timedelta:
    days, seconds, microseconds = _TIMEDELTA.unpack(data)
    if seconds >= 86_400 or microseconds >= 1_000_000:
        raise ValueError("a timedelta whose seconds or microseconds are out of range")
    return timedelta(days, seconds, microseconds)


def _encode_offset(value: datetime | time) -> bytes:
    if value.tzinfo is None:
        return b""
    offset = value.utcoffset()
    if offset is None:
        raise ValueError(
            f"the time zone {value.tzinfo} has no offset from UTC here: send a datetime, or use a fixed offset"
        )
    return _OFFSET.pack(offset // _MICROSECOND)


def _decode_offset(data: bytes) -> tzinfo | None:
    if not data:
        return None
    (microseconds,) = _OFFSET.unpack(data)
    if not -86_400_000_000 < microseconds < 86_400_000_000:
        raise ValueError("an offset from UTC of a day or more")
    return timezone(timedelta(microseconds=microseconds)) if microseconds else UTC


# --- numbers and UUIDs --------------------------------------------------------------------------------------------


def _encode_decimal(value: Decimal) -> bytes:
    text = str(value)
    if len(text) > DECIMAL_CHARS_MAX:
        raise ValueError(
            f"a Decimal of {len(text)} characters, and at most {DECIMAL_CHARS_MAX} can be sent: send it as a str, or "
            "round it"
        )
    return text.encode("ascii")


def _decode_decimal(data: bytes) -> Decimal:
    if len(data) > DECIMAL_CHARS_MAX:
        raise ValueError(f"a Decimal of {len(data)} characters")
    text = data.decode("ascii")
    if not _DECIMAL_TEXT.fullmatch(text):
        raise ValueError("a Decimal that is not a number")
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError("a Decimal whose exponent is out of range") from None


def _encode_uuid(value: UUID) -> bytes:
    return value.bytes


def _decode_uuid(data: bytes) -> UUID:
    return UUID(bytes=data)


# --- NumPy --------------------------------------------------------------------------------------------------------


_scalar_heads: dict[type, bytes] = {}
"""By NumPy's types of numbers that are in memory as they are on the wire: what comes before their bytes."""


def _encode_numpy(value: Any) -> tuple[ExtensionType, bytes] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    is_array = type(value) is numpy.ndarray
    if not is_array and not isinstance(value, numpy.generic):
        return None
    name = _dtype_name(value)
    if not is_array:
        head = bytes((len(name),)) + name.encode("ascii")
        if value.dtype.str == name and name[1] not in "mM":  # the units of those are each value's own
            _scalar_heads[type(value)] = head
        return ExtensionType.NUMPY_SCALAR, head + value.astype(name).tobytes()
    return ExtensionType.NUMPY_ARRAY, _array_head(value, name) + value.astype(name, copy=False).tobytes()


def _dtype_name(value: Any) -> str:
    name: str = value.dtype.newbyteorder("<").str
    if name not in _ITEM_BYTES:
        raise ValueError(
            f"NumPy values of dtype {value.dtype} cannot be sent: convert it to numbers, bools, datetime64 or "
            "timedelta64 with astype(), or to Python's values with tolist()"
        )
    return name


def _array_head(value: Any, name: str) -> bytes:
    if value.ndim > ARRAY_DIMENSIONS_MAX:
        raise ValueError(
            f"an array of {value.ndim} dimensions, and at most {ARRAY_DIMENSIONS_MAX} can be sent: send it in another "
            "shape, with reshape()"
        )
    shape = b"".join(map(_DIMENSION.pack, value.shape))
    return b"".join((bytes((len(name),)), name.encode("ascii"), bytes((value.ndim,)), shape))


def is_large_array(value: Any, bytes_least: int, bytes_max: int) -> bool:
    """Whether the value is an array of at least ``bytes_least`` bytes. Raises ``ValueError`` if it cannot be sent."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or value.nbytes < bytes_least:
        return False
    _check_size(value.nbytes, bytes_max)
    _array_head(value, _dtype_name(value))
    return True


def _check_size(size: int, bytes_max: int) -> None:
    if size > bytes_max:
        raise ValueError(f"an array of {size} bytes exceeds the limit of {bytes_max}: send it in parts")


def encode_large_array(value: Any) -> tuple[bytes, memoryview]:
    """Return the head of an array's data, and its items without a copy if that can be.

    Raises ``ValueError`` for an array that cannot be sent.
    """
    numpy = sys.modules["numpy"]
    name = _dtype_name(value)
    items = numpy.ascontiguousarray(value.astype(name, copy=False))
    return _array_head(value, name), memoryview(items.reshape(-1).view("u1"))


def _dtype_of(data: bytes) -> tuple[str, int]:
    """Read the name of the dtype, and return it with the place after it."""
    end = 1 + data[0] if data else 0
    name = bytes(data[1:end]).decode("ascii")
    if name not in _ITEM_BYTES:
        raise ValueError(f"a NumPy value of dtype {name!r:.40}")
    return name, end


def _decode_numpy_scalar(data: bytes) -> Any:
    name, start = _dtype_of(data)
    if len(data) - start != _ITEM_BYTES[name]:
        raise ValueError(f"a NumPy value of dtype {name} with {len(data) - start} bytes")
    numbers = _numpy().frombuffer(data, name, 1, start)
    return (numbers if numbers.dtype.isnative else numbers.astype(_native(name)))[0]


def _decode_numpy_array(data: bytes) -> Any:
    name, start = _dtype_of(data)
    dimensions = data[start] if start < len(data) else ARRAY_DIMENSIONS_MAX + 1
    begin = start + 1 + 8 * dimensions
    if dimensions > ARRAY_DIMENSIONS_MAX or begin > len(data):
        raise ValueError("an array without its shape")
    shape = tuple(size for (size,) in _DIMENSION.iter_unpack(data[start + 1 : begin]))
    count = prod(shape)
    if count * _ITEM_BYTES[name] != len(data) - begin:
        raise ValueError(f"an array of {count} items of dtype {name} with {len(data) - begin} bytes")
    numpy = _numpy()
    if not count:
        return numpy.empty(shape, _native(name))
    items = numpy.frombuffer(data, name, count, begin).reshape(shape)
    # A bytearray is the event's own, so the array may keep it.
    return items.astype(_native(name), copy=not items.flags.writeable or not items.flags.aligned)


def _native(name: str) -> str:
    return name.replace("<", "=")


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise RemoteProtocolError(
            "the event cannot be decoded: it has a NumPy value, and numpy cannot be imported here: install it on the "
            f"driver and on every executor, or send Python's values ({error})"
        ) from None
    return numpy


# --- the table ----------------------------------------------------------------------------------------------------

_Encode = Callable[[Any], bytes]
_Decode = Callable[[bytes], Any]

_LEAVES: dict[type, tuple[ExtensionType, _Encode, _Decode]] = {
    datetime: (ExtensionType.DATETIME, _encode_datetime, _decode_datetime),
    date: (ExtensionType.DATE, _encode_date, _decode_date),
    time: (ExtensionType.TIME, _encode_time, _decode_time),
    timedelta: (ExtensionType.TIMEDELTA, _encode_timedelta, _decode_timedelta),
    Decimal: (ExtensionType.DECIMAL, _encode_decimal, _decode_decimal),
    UUID: (ExtensionType.UUID, _encode_uuid, _decode_uuid),
}
_DECODERS: dict[int, _Decode] = {code: decode for code, _, decode in _LEAVES.values()}
_DECODERS[ExtensionType.NUMPY_SCALAR] = _decode_numpy_scalar
_DECODERS[ExtensionType.NUMPY_ARRAY] = _decode_numpy_array


def encode_leaf(value: Any, bytes_max: int) -> tuple[int, bytes] | None:
    """Return the code and the data of a leaf, or None if the value is not one. Subclasses are not.

    Raises ``ValueError`` for a value that cannot be sent, among them an array of more than ``bytes_max`` bytes.
    """
    row = _LEAVES.get(type(value))
    if row is not None:
        return row[0], row[1](value)
    head = _scalar_heads.get(type(value))
    if head is not None:
        return ExtensionType.NUMPY_SCALAR, head + value.tobytes()
    if type(value).__module__ != "numpy":
        return None
    _check_size(getattr(value, "nbytes", 0), bytes_max)  # before it is copied: a broadcast array takes no memory
    return _encode_numpy(value)


def decode_leaf(code: int, data: bytes | memoryview) -> Any:
    """Return the value. Raises ``ValueError`` for a code that has none, and for data that is not a value's."""
    decode = _DECODERS.get(code)
    if decode is None:
        raise ValueError(f"extension type {code}, which this release does not know")
    try:
        return decode(cast(bytes, data) if code == ExtensionType.NUMPY_ARRAY else bytes(data))
    except (StructError, OverflowError) as error:
        raise ValueError(f"data that is not a {ExtensionType(code).name.lower()}: {error}") from None
