# SPDX-License-Identifier: Apache-2.0

"""The types in which rows are stored in an Iceberg table."""

from __future__ import annotations

from typing import Any

import pyarrow
from pyarrow import compute, types

from spark_bridge.common.arrow_types import for_spark

_IN_INT = (pyarrow.int8(), pyarrow.int16(), pyarrow.uint8(), pyarrow.uint16())


def iceberg_form(schema: pyarrow.Schema) -> pyarrow.Schema:
    """Return the schema in types that Iceberg has: Spark's, and those that Spark lacks and Iceberg does not.

    Raises ``ValueError``, which names the column, for a type that has no such form.
    """
    return for_spark(schema, _own)


def check_years(table: pyarrow.Table) -> None:
    """Raise ``ValueError`` for a date or a timestamp that Python has none for.

    pyiceberg describes each file by the least and the greatest value of its columns, so it could never add the file.
    """
    for name, column in zip(table.schema.names, table.columns, strict=True):
        if types.is_date(column.type) or types.is_timestamp(column.type):
            try:
                compute.min_max(column).as_py()
            except (OverflowError, ValueError) as error:
                raise ValueError(
                    f"column {name!r} has a year before 1 or after 9999, with which pyiceberg cannot add a file: "
                    "leave such rows out, or declare the column as a string or as int64"
                ) from error


def _own(given: Any) -> Any:
    if given in _IN_INT:
        return pyarrow.int32()
    if types.is_time(given):
        return pyarrow.time64("us")
    if types.is_fixed_size_binary(given) or isinstance(given, pyarrow.UuidType):
        return given
    return None
