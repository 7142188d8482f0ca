# SPDX-License-Identifier: Apache-2.0

"""The Delta sink's half on the driver.

Each commit contains an application transaction for each writer in it: the writer and the number of its last file. Delta
keeps the last version of each application, so a commit that is repeated is recognised.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from spark_bridge.common.arrow_types import for_spark
from spark_bridge.common.secret_texts import Secrets
from spark_bridge.sinks.parquet.driver import ParquetCommitter
from spark_bridge.sinks.parquet.folder import DataFolder
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.parts import Committable
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext

_WRITER_VERSIONS = (1, 2, 3, 4, 5, 7)  # 6 has identity columns, which deltalake does not write
_WRITER_FEATURES = {
    *("appendOnly", "deletionVectors", "timestampNtz", "v2Checkpoint"),  # nothing to do for who appends
    "changeDataFeed",  # readers take what is only added from the data files themselves
    # These demand something only of a table that uses them, and then its metadata shows it.
    *("invariants", "checkConstraints", "generatedColumns", "columnMapping", "variantType"),
}
_COLUMN_RULES = {
    "delta.invariants": "has an invariant",
    "delta.generationExpression": "is generated",
    "delta.identity.": "is an identity column",
    "CURRENT_DEFAULT": "has a default",
}


def _rules_of_columns(given: Any) -> Iterator[str]:
    """Look for rules in a type of Delta's JSON, which has fields in it at any depth."""
    if isinstance(given, list):
        for one in given:
            yield from _rules_of_columns(one)
    elif isinstance(given, dict):
        for key in given.get("metadata", ()):
            for prefix, rule in _COLUMN_RULES.items():
                if key.startswith(prefix):
                    yield f"the column {given['name']} {rule} ({key})"
        if "variant" in given.values():
            yield f"a variant ({given.get('name', 'in an array or a map')})"
        for name in ("fields", "type", "elementType", "keyType", "valueType"):
            yield from _rules_of_columns(given.get(name))


class DeltaCommitter(ParquetCommitter):
    """Adds the files of one call with one commit."""

    form = staticmethod(for_spark)
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
        self._schema = self.form(schema)
        self._storage_options = storage_options

    def open(self) -> None:
        """Create the table, if there is none. Raises ``SinkMisused`` if rows of the sink may not be added to it."""
        for field in self._schema:
            try:
                Schema.from_arrow(pyarrow.schema([field]))
            except Exception as error:  # deltalake raises it as it is
                raise SinkMisused(
                    f"column {field.name!r} is {field.type}, which {self._target} has no type for: declare it with "
                    "another one, such as a string"
                ) from error
        with self.secrets.kept():
            if not DeltaTable.is_deltatable(self._url, self._storage_options):
                DeltaTable.create(self._url, self._schema, mode="ignore", storage_options=self._storage_options)
            table = self.load()
        self.check_table(table, self._schema)

    def identity(self, table: DeltaTable) -> Any:
        return table.metadata().id

    def rules_of(self, table: DeltaTable) -> Sequence[str]:
        """What a writer must do: each is refused that is not done, even if deltalake would commit without it."""
        metadata, protocol = table.metadata(), table.protocol()
        rules = []
        if metadata.partition_columns:
            rules.append(f"it is partitioned by {metadata.partition_columns}")
        unknown = sorted(set(protocol.writer_features or ()) - _WRITER_FEATURES)
        if unknown or protocol.min_writer_version not in _WRITER_VERSIONS:
            rules.append(f"it is for writers of version {protocol.min_writer_version} with the features {unknown}")
        for name, value in metadata.configuration.items():
            if name.startswith("delta.constraints."):
                rules.append(f"the CHECK constraint {name.removeprefix('delta.constraints.')} ({value})")
        if metadata.configuration.get("delta.columnMapping.mode", "none") != "none":
            rules.append("column mapping (delta.columnMapping.mode)")
        rules.extend(_rules_of_columns(json.loads(table.schema().to_json())))
        return rules

    def columns_of(self, table: DeltaTable) -> pyarrow.Schema:
        return pyarrow.schema(table.schema().to_arrow())

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
