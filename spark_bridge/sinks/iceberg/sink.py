# SPDX-License-Identifier: Apache-2.0

"""An Iceberg table as a two-phase sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from protocol.arguments import SCHEMA, checked, given
from spark_bridge.common.extras import require
from spark_bridge.common.urls import check_absolute
from spark_bridge.sinks.parquet.folder import DataFolder
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, SinkWriterContext, TwoPhaseSink

if TYPE_CHECKING:
    import pyarrow

    from spark_bridge.sinks.iceberg.driver import IcebergCommitter
    from spark_bridge.sinks.parquet.task import ParquetWriter


class IcebergSink(TwoPhaseSink[Any]):
    """Rows appended to an Iceberg table, exactly once. Needs ``pip install 'headgate[iceberg]'``.

    A record is a dict or a Spark ``Row`` with the columns' names, a tuple in their order, or an Arrow batch, which is
    written without a detour through Python's objects. Tasks write data files, and the driver adds all of a checkpoint
    with one snapshot, so readers see whole checkpoints. A table that does not exist is created. One with other
    columns, types or required fields is refused at the start and before each commit, and so is a partitioned one. If
    another writer commits at the same time, the commit is tried again on top of it.

    Exactly once, if the catalog's commits are atomic, nobody removes the table's property ``headgate.sink.NAME``, and
    ``remove_orphan_files`` leaves files of the last days alone, as it does by default.

    Only the driver uses the catalog.

    Args:
        catalog: the catalog's properties for ``pyiceberg.catalog.load_catalog``, such as ``type`` and ``uri``.
        table: the table, as ``namespace.table``.
        location: where the table lies, an absolute path or URL; the files go to ``LOCATION/data``.
        schema: the table's columns, a ``pyarrow.Schema``. Types that Iceberg lacks are stored as wider ones.
        name: distinguishes the sinks of one table; by default the operator's id.
        options: arguments for fsspec's filesystem, with which the tasks write the files.

    Raises:
        SinkMisused: the table has no namespace.
    """

    atomic = True

    @checked(schema=SCHEMA)
    def __init__(
        self,
        catalog: Mapping[str, str],
        table: str,
        location: str,
        schema: pyarrow.Schema,
        *,
        name: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        check_absolute(location, name="location", error=SinkMisused)
        if not all(table.partition(".")):
            raise SinkMisused(
                f"table must be named with its namespace, as namespace.table, not {given('table', table)}"
            )
        self._catalog = dict(catalog)
        self._table = table
        self._location = location.rstrip("/")
        self._schema = schema
        self.name = name
        self._options = options

    @property
    def target(self) -> str:
        return f"iceberg:{self._table} at {self._location}"

    def writer(self, context: SinkWriterContext) -> ParquetWriter:
        require("pyarrow", "iceberg")
        from spark_bridge.sinks.iceberg.form import check_years, iceberg_form
        from spark_bridge.sinks.parquet.task import ParquetWriter

        form = iceberg_form(self._schema)
        return ParquetWriter(context, self._folder(context.sink), self._schema, form, check_years)

    def committer(self, context: SinkCommitterContext) -> IcebergCommitter:
        require("pyiceberg", "iceberg")
        from spark_bridge.sinks.iceberg.driver import IcebergCommitter

        return IcebergCommitter(
            context, self._folder(context.sink), self._catalog, self._table, self._location, self._schema
        )

    def _folder(self, sink: str) -> DataFolder:
        return DataFolder(f"{self._location}/data", sink, self._options)
