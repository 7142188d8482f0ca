# SPDX-License-Identifier: Apache-2.0

"""The Iceberg sink's half on the driver.

A table property has the number of the last committed file of each writer. It changes in the same commit as the files,
so a commit that is repeated is recognised. The summary of each snapshot names the sink too, but snapshots expire, and
with them what is in their summaries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import pyarrow
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, NamespaceAlreadyExistsError
from pyiceberg.table import Table, TableProperties

from spark_bridge.common.secret_texts import Secrets
from spark_bridge.sinks.parquet.driver import ParquetCommitter
from spark_bridge.sinks.parquet.folder import DataFolder
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext

WRITERS_MAX = 10_000


class IcebergCommitter(ParquetCommitter):
    """Adds the files of one call with one snapshot."""

    conflicts = (CommitFailedException, CommitStateUnknownException)

    def __init__(
        self,
        context: SinkCommitterContext,
        folder: DataFolder,
        catalog: Mapping[str, str],
        table: str,
        location: str,
        schema: pyarrow.Schema,
    ) -> None:
        super().__init__(context, folder, f"the Iceberg table {table}", Secrets("catalog", catalog))
        self._catalog_properties = dict(catalog)
        self._catalog: Catalog
        self._table = table
        self._location = location
        self._schema = schema
        self._property = f"headgate.sink.{self.sink}"

    def open(self) -> None:
        """Create the table, if there is none. Raises ``SinkMisused`` if it has other columns, or partitions."""
        name = self._catalog_properties.get("name", "headgate")
        with self.secrets.kept():
            self._catalog = load_catalog(name, **self._catalog_properties)
            with suppress(NamespaceAlreadyExistsError):
                self._catalog.create_namespace(self._table.rpartition(".")[0])
            table = self._catalog.create_table_if_not_exists(self._table, self._schema, location=self._location)
        if not table.spec().is_unpartitioned():
            raise SinkMisused(
                f"the Iceberg table {self._table} is partitioned, which this sink cannot write: choose a table "
                "without partitions"
            )
        theirs, ours = list(table.schema().as_arrow().names), list(self._schema.names)
        if theirs != ours:
            raise SinkMisused(
                f"the Iceberg table {self._table} has the columns {theirs}, and the sink {ours}: give the sink the "
                "table's schema"
            )

    def load(self) -> Table:
        table = self._catalog.load_table(self._table)
        # pyiceberg itself would put a commit that met a conflict on top of the other one, and would not look whether
        # the other one was the same. This is in memory only.
        table.metadata.properties[TableProperties.COMMIT_NUM_RETRIES] = "0"
        return table

    def committed_numbers(self, table: Table, writers: Iterable[str]) -> Mapping[str, int]:
        numbers: Mapping[str, int] = json.loads(table.properties.get(self._property, "{}"))
        return numbers

    def add(self, table: Table, new: Sequence[Committable]) -> None:
        highest = {part.writer: part.number for part in new}
        before: dict[str, int] = json.loads(table.properties.get(self._property, "{}"))
        numbers = {**{writer: number for writer, number in before.items() if writer not in highest}, **highest}
        numbers = dict(list(numbers.items())[-WRITERS_MAX:])
        summary = {"headgate.sink": self.sink, "headgate.parts": str(len(new))}
        with table.transaction() as transaction:
            transaction.set_properties({self._property: json.dumps(numbers)})
            transaction.add_files(
                [self.folder.path(part.name) for part in new], snapshot_properties=summary, check_duplicate_files=False
            )
