# SPDX-License-Identifier: Apache-2.0

"""Delta and Iceberg tables with rules, types or an identity that the sink does not have: on real tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from deltalake import DeltaTable, Field, Schema, write_deltalake
from deltalake.schema import PrimitiveType
from pyiceberg import types
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.transforms import DayTransform

from headgate.sinks import DeltaSink, IcebergSink
from protocol.errors import NoRestart
from spark_bridge.sinks.two_phase.errors import SinkMisused
from tests.spark_bridge.sinks.test_tables import SCHEMA, catalog_of, committer, prepare, rows

Rule = Callable[[Path], None]
LONG, STRING = PrimitiveType("long"), PrimitiveType("string")


def delta_table(folder: Path, **settings: Any) -> Path:
    DeltaTable.create(folder, Schema.from_arrow(SCHEMA), **settings)
    return folder


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the first version of a table as another writer than deltalake would have written it."""
    [path] = (folder / "_delta_log").glob("*0.json")
    actions = [json.loads(line) for line in path.read_text().splitlines()]
    for action in actions:
        change(action)
    path.write_text("\n".join(map(json.dumps, actions)))


def a_column_with(metadata: dict[str, Any]) -> Rule:
    def make(folder: Path) -> None:
        fields = [Field("id", LONG, metadata=metadata), Field("what", STRING)]
        DeltaTable.create(folder, Schema(fields))

    return make


def a_constraint(folder: Path) -> None:
    DeltaTable(delta_table(folder)).alter.add_constraint({"positive": "id > 0"})


def not_null(folder: Path) -> None:
    DeltaTable.create(folder, Schema([Field("id", LONG, nullable=False), Field("what", STRING)]))


def column_mapping(folder: Path) -> None:
    delta_table(folder, configuration={"delta.columnMapping.mode": "name"})


def a_feature(feature: str) -> Rule:
    def make(folder: Path) -> None:
        def change(action: dict[str, Any]) -> None:
            if "protocol" in action:
                action["protocol"] = {
                    "minReaderVersion": 3,
                    "minWriterVersion": 7,
                    "readerFeatures": [],
                    "writerFeatures": [feature],
                }

        rewritten(delta_table(folder), change)

    return make


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (not_null, "id may not be NULL in the table: declare it with nullable=False"),
        (a_constraint, r"CHECK constraint positive \(id > 0\)"),
        (column_mapping, "column mapping"),
        (a_column_with({"delta.generationExpression": "1"}), "column id is generated"),
        (a_column_with({"delta.identity.start": 1}), "column id is an identity column"),
        (a_column_with({"delta.invariants": "{}"}), "column id has an invariant"),
        (a_feature("rowTracking"), r"features \['rowTracking'\]"),
        (a_feature("clustering"), r"features \['clustering'\]"),
        (a_feature("fromTheFuture"), r"features \['fromTheFuture'\]"),
    ],
)
def test_a_delta_table_whose_rules_the_sink_does_not_keep_is_refused_at_the_start(
    tmp_path: Path, make: Rule, why: str
) -> None:
    """H170."""
    make(tmp_path / "table")
    before = DeltaTable(tmp_path / "table").version()
    with pytest.raises(SinkMisused, match=why):
        committer(DeltaSink(str(tmp_path / "table"), SCHEMA))
    assert DeltaTable(tmp_path / "table").version() == before


@pytest.mark.parametrize("feature", ["appendOnly", "checkConstraints", "generatedColumns", "changeDataFeed"])
def test_a_feature_that_asks_nothing_of_a_writer_who_appends_is_accepted(tmp_path: Path, feature: str) -> None:
    """H170."""
    a_feature(feature)(tmp_path / "table")
    sink = DeltaSink(str(tmp_path / "table"), SCHEMA)
    committer(sink).commit(prepare(sink, (1, "a")))
    assert rows(tmp_path, sink) == [(1, "a")]


def test_a_row_without_a_value_that_the_table_demands_is_refused_with_its_column(tmp_path: Path) -> None:  # H170, H171
    not_null(tmp_path / "table")
    sink = DeltaSink(str(tmp_path / "table"), pyarrow.schema([SCHEMA.field(0).with_nullable(False), SCHEMA.field(1)]))
    driver = committer(sink)
    driver.commit(prepare(sink, {"id": 1}))
    assert rows(tmp_path, sink) == [(1, None)]
    for record in ({"what": "b"}, (None, "b"), pyarrow.record_batch({"what": ["b"]})):
        with pytest.raises(ValueError, match=r"column 'id' (is nullable=False .* and NULL in the row|has NULL)"):
            prepare(sink, record)


def replace_columns(folder: Path) -> None:
    write_deltalake(folder, pyarrow.table({"other": ["x"]}), mode="overwrite", schema_mode="overwrite")


def change_a_type(folder: Path) -> None:
    table = pyarrow.table({"id": ["x"], "what": ["y"]})
    write_deltalake(folder, table, mode="overwrite", schema_mode="overwrite")


def partition(folder: Path) -> None:
    write_deltalake(
        folder,
        pyarrow.table({"id": [9], "what": ["y"]}),
        mode="overwrite",
        schema_mode="overwrite",
        partition_by=["what"],
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (replace_columns, "the table has no id"),
        (change_a_type, "id is string in the table, and int64 in the sink"),
        (partition, r"it is partitioned by \['what'\]"),
        (lambda folder: DeltaTable(folder).alter.add_constraint({"positive": "id > 0"}), "CHECK constraint positive"),
    ],
)
def test_a_delta_table_that_changes_before_the_commit_gets_no_rows(
    tmp_path: Path, change: Callable[[Path], None], why: str
) -> None:
    """H170, H171."""
    sink = DeltaSink(str(tmp_path / "table"), SCHEMA)
    driver = committer(sink)
    parts = prepare(sink, (1, "a"))
    change(tmp_path / "table")
    version = DeltaTable(tmp_path / "table").version()
    with pytest.raises(SinkMisused, match=why) as refused:
        driver.commit(parts)
    assert isinstance(refused.value, NoRestart)  # no restart would change it
    assert DeltaTable(tmp_path / "table").version() == version
    DeltaTable(tmp_path / "table").restore(0)
    driver.commit(parts)
    assert rows(tmp_path, sink) == [(1, "a")]


def test_rows_that_keep_a_rule_which_came_later_are_committed(tmp_path: Path) -> None:  # H170
    sink = DeltaSink(str(tmp_path / "table"), SCHEMA)
    driver = committer(sink)
    good, bad = prepare(sink, (1, "a")), prepare(sink, {"what": "b"})
    fields = [Field("id", LONG, nullable=False), Field("what", STRING), Field("new", STRING)]
    rewritten(
        tmp_path / "table",
        lambda one: one.get("metaData", {}).update(schemaString=Schema(fields).to_json()),
    )
    driver.commit(good)
    assert rows(tmp_path, sink) == [(1, "a")]
    with pytest.raises(SinkMisused, match="id may not be NULL in the table"):
        driver.commit(bad)


def remake_delta(folder: Path) -> None:
    DeltaTable.create(folder / "table", Schema.from_arrow(SCHEMA), mode="overwrite")


def remake_iceberg(folder: Path) -> None:
    catalog(folder).drop_table("shop.orders")
    catalog(folder).create_table("shop.orders", SCHEMA, location=f"file://{folder}/table")


def catalog(folder: Path) -> Catalog:
    made = load_catalog("headgate", **catalog_of(folder))
    made.create_namespace_if_not_exists("shop")
    return made


def iceberg(folder: Path, schema: pyarrow.Schema = SCHEMA, **more: str) -> IcebergSink:
    return IcebergSink({**catalog_of(folder), **more}, "shop.orders", f"file://{folder}/table", schema)


@pytest.mark.parametrize("which", ["delta", "iceberg"])
def test_another_table_of_the_same_name_does_not_get_the_rows_of_the_first(tmp_path: Path, which: str) -> None:
    """H170, H172."""
    sink = DeltaSink(str(tmp_path / "table"), SCHEMA) if which == "delta" else iceberg(tmp_path)
    driver = committer(sink)
    parts = prepare(sink, (1, "a"))
    (remake_delta if which == "delta" else remake_iceberg)(tmp_path)
    with pytest.raises(SinkMisused, match="was dropped and made again, or replaced"):
        driver.commit(parts)
    assert rows(tmp_path, sink) == []


def iceberg_table(folder: Path, *fields: types.NestedField, **settings: Any) -> None:
    catalog(folder).create_table("shop.orders", IcebergSchema(*fields), location=f"file://{folder}/table", **settings)


ID = types.NestedField(1, "id", types.LongType())
WHAT = types.NestedField(2, "what", types.StringType())


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (types.NestedField(1, "id", types.IntegerType()), "id is int32 in the table, and int64 in the sink"),
        (types.NestedField(1, "id", types.StringType()), "id is string in the table, and int64 in the sink"),
        (types.NestedField(1, "id", types.LongType(), required=True), "id may not be NULL in the table"),
        (types.NestedField(1, "ID", types.LongType()), "the table has no id"),
    ],
)
def test_an_iceberg_table_with_other_types_or_required_fields_is_refused_at_the_start(
    tmp_path: Path, first: types.NestedField, why: str
) -> None:
    """H170."""
    iceberg_table(tmp_path, first, WHAT)
    with pytest.raises(SinkMisused, match=why):
        committer(iceberg(tmp_path))


def test_the_required_fields_of_an_iceberg_table_inside_others_are_compared_too(tmp_path: Path) -> None:  # H170
    inside = types.StructType(types.NestedField(4, "at", types.TimestamptzType()))
    fields = (ID, types.NestedField(3, "more", types.ListType(5, inside)))
    iceberg_table(tmp_path, *fields)
    schema = pyarrow.schema(
        [SCHEMA.field(0), ("more", pyarrow.list_(pyarrow.struct([("at", pyarrow.timestamp("us"))])))]
    )
    with pytest.raises(SinkMisused, match=r"more\[\]\.at is timestamp\[us, tz=UTC\] in the table"):
        committer(iceberg(tmp_path, schema))


def test_a_partitioned_iceberg_table_is_refused_at_the_start(tmp_path: Path) -> None:  # H170
    day = PartitionSpec(PartitionField(2, 1000, DayTransform(), "day"))
    iceberg_table(tmp_path, ID, types.NestedField(2, "what", types.DateType()), partition_spec=day)
    with pytest.raises(SinkMisused, match="partitioned"):
        committer(iceberg(tmp_path))


def test_a_table_with_wider_numbers_takes_rows_as_iceberg_promotes_them(tmp_path: Path) -> None:  # H170, H171
    iceberg_table(tmp_path, ID, WHAT)
    sink = iceberg(tmp_path, pyarrow.schema([("id", pyarrow.uint16()), SCHEMA.field(1)]))
    committer(sink).commit(prepare(sink, (65535, "a")))
    assert rows(tmp_path, sink) == [(65535, "a")]


def test_an_iceberg_table_that_changes_before_the_commit_gets_no_rows_until_the_change_is_undone(
    tmp_path: Path,
) -> None:
    """H170, H171."""
    sink = iceberg(tmp_path)
    driver = committer(sink)
    parts = prepare(sink, (1, "a"))
    table = catalog(tmp_path).load_table("shop.orders")
    with table.update_schema() as update:
        update.add_column("extra", types.StringType())
        update.rename_column("id", "ident")
    with pytest.raises(SinkMisused, match="the table has no id") as refused:
        driver.commit(parts)
    assert isinstance(refused.value, NoRestart)
    with table.update_schema() as update:
        update.rename_column("ident", "id")
    driver.commit(parts)
    assert rows(tmp_path, sink) == [(1, "a")]


def test_a_name_mapping_that_would_lose_a_column_is_refused(tmp_path: Path) -> None:  # H170, H171
    committer(iceberg(tmp_path))
    table = catalog(tmp_path).load_table("shop.orders")
    with table.transaction() as transaction:
        transaction.set_properties({"schema.name-mapping.default": '[{"field-id": 1, "names": ["id"]}]'})
    with pytest.raises(SinkMisused, match=r"schema\.name-mapping\.default does not lead to what"):
        committer(iceberg(tmp_path))


def test_the_catalog_of_an_iceberg_sink_may_have_a_name(tmp_path: Path) -> None:
    sink = iceberg(tmp_path, name="prod")
    committer(sink).commit(prepare(sink, (1, "a")))
    assert catalog_rows(tmp_path, "prod") == [{"id": 1, "what": "a"}]


def catalog_rows(folder: Path, name: str = "headgate") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        load_catalog(name, **catalog_of(folder)).load_table("shop.orders").scan().to_arrow().to_pylist()
    )
    return found
