# SPDX-License-Identifier: Apache-2.0

"""The Delta sink's half on the driver.

Each commit contains an application transaction for each writer in it: the writer and the number of its last file. Delta
keeps the last version of each application, so a commit that is repeated is recognised.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence

import pyarrow
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from spark_bridge.common.secret_texts import Secrets
from spark_bridge.sinks.parquet.driver import ParquetCommitter
from spark_bridge.sinks.parquet.folder import DataFolder
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext


class DeltaCommitter(ParquetCommitter):
    """Adds the files of one call with one commit."""

    conflicts = (CommitFailedError,)

    def __init__(
        self,
        context: SinkCommitterContext,
        folder: DataFolder,
        url: str,
        schema: pyarrow.Schema,
        storage_options: dict[str, str] | None,
    ) -> None:
        super().__init__(context, folder, f"the Delta table {url}", Secrets("storage_options", storage_options or {}))
        self._url = url
        self._schema = schema
        self._storage_options = storage_options

    def open(self) -> None:
        """Create the table, if there is none. Raises ``SinkMisused`` if it has another schema, or partitions."""
        with self.secrets.kept():
            if not DeltaTable.is_deltatable(self._url, self._storage_options):
                DeltaTable.create(self._url, self._schema, mode="ignore", storage_options=self._storage_options)
            table = self.load()
        if table.metadata().partition_columns:
            raise SinkMisused(
                f"the Delta table {self._url} is partitioned, which this sink cannot write: choose a table "
                "without partitions"
            )
        theirs = {field.name: str(field.type) for field in table.schema().fields}
        ours = {field.name: str(field.type) for field in Schema.from_arrow(self._schema).fields}
        if ours != theirs:
            raise SinkMisused(
                f"the Delta table {self._url} has the columns {theirs}, and the sink {ours}: give the sink the table's "
                "schema"
            )

    def load(self) -> DeltaTable:
        return DeltaTable(self._url, storage_options=self._storage_options, without_files=False)

    def committed_numbers(self, table: DeltaTable, writers: Iterable[str]) -> Mapping[str, int]:
        found = {writer: table.transaction_version(self._application(writer)) for writer in writers}
        return {writer: number for writer, number in found.items() if number is not None}

    def add(self, table: DeltaTable, new: Sequence[Committable]) -> None:
        now_ms = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            AddAction(part.name, part.payload[1], {}, now_ms, True, json.dumps({"numRecords": part.payload[0]}))
            for part in new
        ]
        highest = {part.writer: part.number for part in new}
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            commit_properties=CommitProperties(
                custom_metadata={"headgate.sink": self.sink},
                app_transactions=[Transaction(self._application(writer), number) for writer, number in highest.items()],
            ),
        )

    def _application(self, writer: str) -> str:
        return f"headgate/{self.sink}/{writer}"
