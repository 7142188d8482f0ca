# SPDX-License-Identifier: Apache-2.0

"""A Delta table as a two-phase sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol.arguments import SCHEMA, checked
from spark_bridge.common.extras import require
from spark_bridge.common.urls import check_absolute
from spark_bridge.sinks.parquet.folder import DataFolder
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, SinkWriterContext, TwoPhaseSink

if TYPE_CHECKING:
    import pyarrow

    from spark_bridge.sinks.delta.driver import DeltaCommitter
    from spark_bridge.sinks.parquet.task import ParquetWriter


class DeltaSink(TwoPhaseSink[Any]):
    """Rows appended to a Delta table, exactly once. Needs ``pip install 'headgate[delta]'``.

    A record is a dict or a Spark ``Row`` with the columns' names, a tuple in their order, or an Arrow batch, which is
    written without a detour through Python's objects. Tasks write data files into the table's folder, and the driver
    adds all of a checkpoint with one commit, so readers see whole checkpoints. A table that does not exist is created.
    One with other columns or types, or with rules that this sink does not keep, such as partitions, is refused at the
    start and before each commit. If another writer commits at the same time, the commit is tried again on top of it.

    Exactly once, if every other writer keeps Delta's protocol, and ``VACUUM`` leaves files of the last days alone, as
    it does by default. If ``delta.setTransactionRetentionDuration`` is set, it must be longer than the longest time for
    which a driver may be away.

    Args:
        url: an absolute path, or a URL that both fsspec and deltalake know.
        schema: the table's schema, a ``pyarrow.Schema``. Types that Delta lacks are stored as wider ones. A column that
            may not be NULL in the table needs ``nullable=False``.
        name: distinguishes the sinks of one table; by default the operator's id.
        options: arguments for fsspec's filesystem, with which the tasks write the files.
        storage_options: those of deltalake, with which the driver commits.
    """

    atomic = True

    @checked(schema=SCHEMA)
    def __init__(
        self,
        url: str,
        schema: pyarrow.Schema,
        *,
        name: str | None = None,
        options: dict[str, Any] | None = None,
        storage_options: dict[str, str] | None = None,
    ) -> None:
        check_absolute(url, error=SinkMisused)
        self._url = url.rstrip("/")
        self._schema = schema
        self.name = name
        self._options = options
        self._storage_options = storage_options

    @property
    def target(self) -> str:
        return f"delta:{self._url}"

    def writer(self, context: SinkWriterContext) -> ParquetWriter:
        require("pyarrow", "delta")
        from spark_bridge.common.arrow_types import for_spark
        from spark_bridge.sinks.parquet.task import ParquetWriter

        folder = DataFolder(self._url, context.sink, self._options)
        return ParquetWriter(context, folder, self._schema, for_spark(self._schema))

    def committer(self, context: SinkCommitterContext) -> DeltaCommitter:
        require("deltalake", "delta")
        from spark_bridge.sinks.delta.driver import DeltaCommitter

        folder = DataFolder(self._url, context.sink, self._options)
        return DeltaCommitter(context, folder, self._url, self._schema, self._storage_options)
