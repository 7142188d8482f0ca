# SPDX-License-Identifier: Apache-2.0

"""Arrow's types and Spark's: what becomes of each column that a source gives to Spark, and how values are converted.

Spark has fewer types than Arrow. A column that it lacks is *converted* to the one that holds every value of it, or
*refused*, before anything is read. A conversion that depends on the values (nanoseconds, a schema that is narrower than
its file) either keeps each value or fails and names the column: what is converted back must be what was there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

__all__ = ["SPARK_TYPES", "SparkType", "arrow_form", "conform", "for_spark"]

DECIMAL_DIGITS = 38


class SparkType(NamedTuple):
    """A row of the table: what a type of Arrow becomes in Spark."""

    arrow: str
    spark: str
    how: str


SPARK_TYPES = (
    SparkType("bool, int8, int16, int32, int64, float32, float64", "the same", "kept"),
    SparkType("uint8, uint16, uint32", "smallint, int, bigint", "converted: the next wider one"),
    SparkType("uint64", "decimal(20, 0)", "converted"),
    SparkType("float16", "float", "converted"),
    SparkType("decimal32, decimal64, decimal128", "decimal", "kept"),
    SparkType("decimal256", "decimal", "kept up to 38 digits, otherwise refused"),
    SparkType("string, large_string, string_view", "string", "kept"),
    SparkType("binary, large_binary, binary_view, fixed_size_binary", "binary", "kept"),
    SparkType("date32", "date", "kept"),
    SparkType("date64", "date", "kept; a value with a time of day is refused"),
    SparkType("timestamp[s], [ms], [us] with a zone", "timestamp", "kept: the same instant"),
    SparkType("timestamp[s], [ms], [us] without a zone", "timestamp_ntz", "kept"),
    SparkType("timestamp[ns]", "as above", "kept; a value with a part of a microsecond is refused"),
    SparkType("time32, time64", "time", "kept where Spark has the type, from 4.1; otherwise refused"),
    SparkType("duration", "interval day to second", "kept; a value with a part of a microsecond is refused"),
    SparkType("list, large_list, fixed_size_list, list_view, large_list_view", "array", "kept"),
    SparkType("struct, map", "struct, map", "kept"),
    SparkType("dictionary, run_end_encoded", "the type of its values", "kept"),
    SparkType("extension types", "the type in which they are stored", "kept"),
    SparkType("null", "string", "converted: all values are NULL"),
    SparkType("month_day_nano_interval, unions", "", "refused"),
)


def for_spark(schema: pyarrow.Schema, own: Callable[[Any], Any] = lambda given: None) -> pyarrow.Schema:
    """Return the schema, in Arrow's types, with which Spark gets what has this one.

    ``own`` returns the form of types that a target other than Spark has another form of, and None for all others.

    Raises ``ValueError``, which names the column, for a type that Spark has no form of.
    """
    import pyarrow

    return pyarrow.schema([one.with_type(_spark_type(one.type, one.name, own)).remove_metadata() for one in schema])


def with_leaves(given: Any, change: Callable[[Any], Any]) -> Any:
    """The type with ``change`` applied to each type in it that contains no other."""
    import pyarrow as pa

    if pa.types.is_struct(given):
        return pa.struct([one.with_type(with_leaves(one.type, change)) for one in given])
    if pa.types.is_map(given):
        item = given.item_field.with_type(with_leaves(given.item_type, change))
        return pa.map_(with_leaves(given.key_type, change), item)
    if pa.types.is_list(given):
        return pa.list_(given.value_field.with_type(with_leaves(given.value_type, change)))
    return change(given)


def arrow_form(schema: StructType) -> pyarrow.Schema:
    """Return the schema that Spark demands of Arrow batches with these columns."""
    from inspect import signature

    from pyspark.sql.pandas.types import to_arrow_schema

    if "timezone" in signature(to_arrow_schema).parameters:
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)  # Spark 4.1 and 4.2, where UTC is the default


def _spark_type(given: Any, column: str, own: Callable[[Any], Any]) -> Any:
    import pyarrow as pa

    types = pa.types
    if (chosen := own(given)) is not None:
        return chosen
    if isinstance(given, pa.BaseExtensionType):
        return _spark_type(given.storage_type, column, own)
    if types.is_dictionary(given) or types.is_run_end_encoded(given):
        return _spark_type(given.value_type, column, own)
    if types.is_struct(given):
        return pa.struct([one.with_type(_spark_type(one.type, f"{column}.{one.name}", own)) for one in given])
    if types.is_map(given):
        return pa.map_(_spark_type(given.key_type, column, own), _field(given.item_field, column, own))
    if _is_list(given):
        return pa.list_(_field(given.value_field, f"{column}[]", own))
    found = _simple(given)
    if found is not None:
        return found
    raise ValueError(
        f"column {column!r} is {given}, which Spark has no type for: pass schema= with another type, such as a string, "
        "or leave the column out"
    )


def _field(field: Any, column: str, own: Callable[[Any], Any]) -> Any:
    return field.with_type(_spark_type(field.type, column, own))


def _is_list(given: Any) -> bool:
    from pyarrow import types

    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(kind(given) for kind in lists)


def _simple(given: Any) -> Any:
    """The type for one that contains no other; None if Spark has none."""
    import pyarrow as pa

    types = pa.types
    fixed = {
        **{one: one for one in (pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64())},
        pa.uint8(): pa.int16(),
        pa.uint16(): pa.int32(),
        pa.uint32(): pa.int64(),
        pa.uint64(): pa.decimal128(20, 0),
        **{one: pa.string() for one in (pa.string(), pa.large_string(), pa.string_view(), pa.null())},
        **{one: pa.binary() for one in (pa.binary(), pa.large_binary(), pa.binary_view())},
        pa.float16(): pa.float32(),
        pa.date32(): pa.date32(),
        pa.date64(): pa.date32(),
    }
    if given in fixed:
        return fixed[given]
    if types.is_fixed_size_binary(given):
        return pa.binary()
    if types.is_timestamp(given):
        return pa.timestamp("us", None if given.tz is None else "UTC")
    if types.is_duration(given):
        return pa.duration("us")
    if types.is_decimal(given) and given.precision <= DECIMAL_DIGITS:
        return pa.decimal128(given.precision, given.scale)
    if types.is_time(given) and _has_time():
        return pa.time64("ns")
    return None


def _has_time() -> bool:
    from pyspark.sql import types

    return hasattr(types, "TimeType")


def conform(batch: Any, schema: pyarrow.Schema, *, utc_is_named: bool = False) -> pyarrow.RecordBatch:
    """Return the batch or table with exactly this schema; each value is what it was.

    ``utc_is_named``: the user who made ``schema`` knew times without a zone, and called them UTC. Otherwise nobody has
    named their zone, and they are refused where the schema has one.

    Raises ``ValueError``, which names the column, if a column is missing, or if a value would not be what it was.
    """
    import pyarrow as pa

    if batch.schema.equals(schema) and isinstance(batch, pa.RecordBatch):
        return batch
    missing = [name for name in schema.names if name not in batch.schema.names]
    if missing:
        raise ValueError(
            f"it has no columns {missing}, only {batch.schema.names}: correct the schema, or read such files separately"
        )
    columns = []
    for field in schema:
        column = batch.column(field.name)
        if isinstance(column, pa.ChunkedArray):
            # pyarrow would copy a single chunk, too, which `json_as_format` has in each batch.
            column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        columns.append(_converted(column, field, utc_is_named))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _converted(column: Any, field: Any, utc_is_named: bool) -> Any:
    import pyarrow as pa

    given, wanted = column.type, field.type
    if not field.nullable and column.null_count:
        raise ValueError(f"column {field.name!r} has NULL in it, and the schema says that it has none")
    if given == wanted:
        return column
    _check_zones(given, wanted, field.name, utc_is_named)
    try:
        column = _plain(column)
        converted = column.cast(wanted)
        if _keeps(column.type, wanted) or _equal(column, converted.cast(column.type)):
            return converted
        why = "a value would not be what it was"
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        why = str(error)
    raise ValueError(
        f"column {field.name!r} is {given}, and cannot be {wanted}: {why}. Pass a schema with a type for this column "
        "that holds its values, such as a string"
    )


def _plain(column: Any) -> Any:
    """The column without an encoding that pyarrow cannot cast."""
    import pyarrow as pa

    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if pa.types.is_run_end_encoded(column.type):
        column = pa.compute.run_end_decode(column)
    if pa.types.is_list_view(column.type):  # a cast of pyarrow 26 makes an invalid list of one that ends with NULL
        column = pa.array(column.to_pylist(), pa.list_(column.type.value_type))
    return column


def _check_zones(given: Any, wanted: Any, column: str, utc_is_named: bool) -> None:
    """Raise ``ValueError`` where times would get a zone that nobody named, or lose theirs."""
    from pyarrow import types

    if types.is_timestamp(given) and types.is_timestamp(wanted):
        _check_zone(given, wanted, column, utc_is_named)
    elif types.is_struct(given) and types.is_struct(wanted):
        for one in wanted:
            if given.get_field_index(one.name) >= 0:
                _check_zones(given.field(one.name).type, one.type, f"{column}.{one.name}", utc_is_named)
    elif given.num_fields == wanted.num_fields:
        for place in range(given.num_fields):
            _check_zones(given.field(place).type, wanted.field(place).type, column, utc_is_named)


def _check_zone(given: Any, wanted: Any, column: str, utc_is_named: bool) -> None:
    is_named = utc_is_named and wanted.tz in ("UTC", "+00:00")
    if given.tz is None and wanted.tz is not None and not is_named:
        raise ValueError(
            f"column {column!r} has times without a zone, and the schema says {wanted}: declare it without a zone "
            "(timestamp_ntz in Spark), and convert it where the zone is known"
        )
    if given.tz is not None and wanted.tz is None:
        raise ValueError(
            f"column {column!r} has instants ({given}), and the schema says {wanted}, which has no zone: declare it as "
            "timestamp('us', 'UTC'), timestamp in Spark"
        )


def _keeps(given: Any, wanted: Any) -> bool:
    """Whether a cast keeps each value or fails by itself. Others are checked by the way back."""
    from pyarrow import types

    if given == wanted or types.is_null(given):
        return True
    if types.is_dictionary(given):
        return _keeps(given.value_type, wanted)
    if types.is_struct(given) and types.is_struct(wanted):
        return all(_keeps(given.field(one.name).type, one.type) for one in wanted if one.name in given.names)
    if given.num_fields and given.num_fields == wanted.num_fields:
        return all(_keeps(given.field(n).type, wanted.field(n).type) for n in range(given.num_fields))
    kinds = (types.is_integer, types.is_time, types.is_duration, types.is_timestamp, types.is_date, _is_text, _is_bytes)
    return any(kind(given) and kind(wanted) for kind in kinds) or (types.is_integer(given) and types.is_decimal(wanted))


def _is_text(given: Any) -> bool:
    from pyarrow import types

    return any(kind(given) for kind in (types.is_string, types.is_large_string, types.is_string_view))


def _is_bytes(given: Any) -> bool:
    from pyarrow import types

    kinds = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    return any(kind(given) for kind in kinds)


def _equal(one: Any, other: Any) -> bool:
    return bool(one.equals(other)) or repr(one.to_pylist()) == repr(other.to_pylist())  # NaN is not equal to itself
