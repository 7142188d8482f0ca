# SPDX-License-Identifier: Apache-2.0

"""The Iceberg sink's half on the driver.

A table property has the number of the last committed file of each writer. It changes in the same commit as the files,
so a commit that is repeated is recognised. The summary of each snapshot names the sink too, but snapshots expire, and
with them what is in their summaries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from uuid import UUID

import pyarrow
from pyarrow import types
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.name_mapping import MappedField

from spark_bridge.common.secret_texts import Secrets
from spark_bridge.sinks.iceberg.form import iceberg_form
from spark_bridge.sinks.parquet.driver import ParquetCommitter
from spark_bridge.sinks.parquet.folder import DataFolder
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext

WRITERS_MAX = 10_000
FORMAT_VERSION_MAX = 2
_PROMOTIONS = {(pyarrow.int32(), pyarrow.int64()), (pyarrow.float32(), pyarrow.float64())}


def _mapped(fields: Iterable[MappedField], where: str = "") -> Iterator[tuple[str, int | None]]:
    """Each name that a name mapping knows, with the column that it leads to."""
    for field in fields:
        for name in field.names:
            yield where + name, field.field_id
            yield from _mapped(field.fields, f"{where}{name}.")


class IcebergCommitter(ParquetCommitter):
    """Adds the files of one call with one snapshot."""

    form = staticmethod(iceberg_form)
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
        self._schema = self.form(schema)
        self._property = f"headgate.sink.{self.sink}"

    def open(self) -> None:
        """Create the table, if there is none. Raises ``SinkMisused`` if rows of the sink may not be added to it."""
        properties = dict(self._catalog_properties)
        name = properties.pop("name", "headgate")
        with self.secrets.kept():
            self._catalog = load_catalog(name, **properties)
            if self._catalog.table_exists(self._table):
                table = self.load()
            else:
                table = self._create()
        self.check_table(table, self._schema)

    def _create(self) -> Table:
        namespace = self._table.rpartition(".")[0]
        try:
            self._catalog.create_namespace_if_not_exists(namespace)
        except Exception:  # another application has made it meanwhile, which each catalog says in another way
            if not self._catalog.namespace_exists(namespace):
                raise
        try:
            return self._catalog.create_table_if_not_exists(self._table, self._schema, location=self._location)
        except UnsupportedPyArrowTypeException as error:
            raise SinkMisused(
                f"{self._target} cannot be made: column {error.field.name!r} is {error.field.type}, which Iceberg has "
                "no type for: declare it with another one, such as a string"
            ) from error

    def identity(self, table: Table) -> UUID:
        return table.metadata.table_uuid

    def rules_of(self, table: Table) -> Sequence[str]:
        rules = []
        if not table.spec().is_unpartitioned():
            rules.append(f"it is partitioned by {table.spec()}")
        if table.format_version > FORMAT_VERSION_MAX:
            rules.append(f"it has the format version {table.format_version}, and pyiceberg writes {FORMAT_VERSION_MAX}")
        mapping = table.name_mapping()
        if mapping is not None:  # by which readers find the columns of our files, which have no ids
            mapped = dict(_mapped(mapping))
            for field_id in table.schema().field_ids:
                name = table.schema().find_column_name(field_id) or ""
                if name.partition(".")[0] in self._schema.names and mapped.get(name) != field_id:
                    rules.append(f"its property {TableProperties.DEFAULT_NAME_MAPPING} does not lead to {name}")
        return rules

    def columns_of(self, table: Table) -> pyarrow.Schema:
        try:
            return table.schema().as_arrow()
        except (TypeError, ValueError, NotImplementedError) as error:
            raise SinkMisused(
                f"{self._target} has a column that pyiceberg cannot write: {error}. Choose another table"
            ) from error

    def is_read_as(self, ours: pyarrow.DataType, theirs: pyarrow.DataType) -> bool:
        """Iceberg's promotions: readers widen these."""
        if types.is_decimal(ours) and types.is_decimal(theirs):
            return bool(ours.scale == theirs.scale and ours.precision <= theirs.precision)
        return (ours, theirs) in _PROMOTIONS

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
