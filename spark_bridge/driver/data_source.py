# SPDX-License-Identifier: Apache-2.0

"""Registers a source as a format of a Spark session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol.describing import show
from spark_bridge.common.arrow_types import for_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from spark_bridge.driver.handle import OperatorHandle
    from spark_bridge.sources.source import Source
    from spark_bridge.streams.task import StreamClient
    from spark_bridge.task_entry import SubtaskTask

__all__ = ["columns_of", "register_source"]


def columns_of(source: Source, schema: Any) -> StructType:
    """Return the columns of a source as Spark has them. May read the head of a file, and blocks.

    ``schema``: a ``StructType``, a ``pyarrow.Schema`` or Spark's text for one; None for what the source knows itself.

    Raises ``ValueError`` if nobody knows them, or Spark has no type for one of them.
    """
    from pyspark.sql.types import StructType

    known = getattr(source, "schema", None) if schema is None else schema
    if known is None:
        raise ValueError(f"{show(source)} does not know its columns: pass schema=")
    if isinstance(known, StructType):
        return known
    if isinstance(known, str):
        parsed = StructType.fromDDL(known)
        if not isinstance(parsed, StructType):
            raise ValueError(
                f"{show(known)} is a type without column names: pass a schema such as 'id long, name string'"
            )
        return parsed
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(for_spark(known))


def register_source(
    session: SparkSession, columns: StructType, task: SubtaskTask, stream: StreamClient, handle: OperatorHandle
) -> None:
    """Make ``session.read.format(name)`` read with ``task``; ``name`` is that of the operator. Blocks.

    ``stream`` plans the micro-batches of ``session.readStream.format(name)``.
    """
    from spark_bridge.task_source import source_format

    session.dataSource.register(source_format(handle.operator_id, columns, task, stream, handle.parallelism))
