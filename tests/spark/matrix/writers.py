# SPDX-License-Identifier: Apache-2.0

"""Files that pandas, Polars, DuckDB and pyarrow write, as users would write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import deltalake
import duckdb
import pandas
import polars
import pyarrow as pa
from pyarrow import csv, dataset, parquet
from pyiceberg.catalog import load_catalog

from tests.spark.matrix.values import ORIGINAL

FAR = {"far_day", "far_naive", "far_instant"}
NESTED = {"list", "nested", "map"}
ALL = set(ORIGINAL.schema.names)
IN_FOLDERS = ["day", "digits"]
FOLDERS = ORIGINAL.select(["id", "text", *IN_FOLDERS])
Write = Callable[[pa.Table, Path], object]


def in_duckdb(table: pa.Table, statement: str) -> None:
    """Run a statement of SQL over ``original``."""
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")  # it writes instants in it, with the offset
        connection.register("original", table)
        connection.execute(statement)


def classic(table: pa.Table) -> pandas.DataFrame:
    """As pandas has it without Arrow: a category, objects, its own integers with NULL."""
    frame = table.to_pandas(types_mapper={pa.int64(): pandas.Int64Dtype(), pa.bool_(): pandas.BooleanDtype()}.get)
    return frame.astype({"text": "category"})


def arrow(table: pa.Table) -> pandas.DataFrame:
    return table.to_pandas(types_mapper=pandas.ArrowDtype)


def in_polars(table: pa.Table) -> polars.DataFrame:
    return polars.DataFrame(table)


# What each writes, and the columns that it cannot write, or changes itself.
FILES: dict[tuple[str, str], tuple[Write, set[str]]] = {
    ("pyarrow", "parquet"): (lambda table, path: parquet.write_table(table, path, row_group_size=4), set()),
    ("pyarrow, INT96", "parquet"): (
        lambda table, path: parquet.write_table(
            table, path, use_deprecated_int96_timestamps=True, data_page_version="2.0", store_schema=False
        ),
        ALL - {"id", "instant", "far_instant", "text"},
    ),
    ("pyarrow", "csv"): (csv.write_csv, {"bytes", "span", *NESTED, *FAR}),
    ("pandas", "parquet"): (
        lambda table, path: classic(table).to_parquet(path),
        {"u8", "u16", "u32", "u64", "i8", "i16", "i32", "odd", "map", *FAR},
    ),
    ("pandas with Arrow", "parquet"): (lambda table, path: arrow(table).to_parquet(path), FAR),
    ("pandas with Arrow", "csv"): (
        lambda table, path: arrow(table).to_csv(path, index=False),
        {"text", "bytes", "span", *NESTED, *FAR},
    ),
    ("pandas with Arrow", "jsonl"): (
        lambda table, path: arrow(table).to_json(path, orient="records", lines=True, date_format="iso"),
        {"f32", "f64", "odd", "exact", "bytes", "day", "naive", "instant", "span", *NESTED, *FAR},
    ),
    ("Polars", "parquet"): (lambda table, path: in_polars(table).write_parquet(path), set()),
    ("Polars", "csv"): (
        lambda table, path: in_polars(table).write_csv(path),
        {"bytes", "span", *NESTED, *FAR},
    ),
    ("Polars", "jsonl"): (
        lambda table, path: in_polars(table).write_ndjson(path),
        {"odd", "bytes", "span", "map", *FAR},
    ),
    ("DuckDB", "parquet"): (
        lambda table, path: in_duckdb(table, f"COPY original TO '{path}' (FORMAT parquet)"),
        {"span"},
    ),
    ("DuckDB", "csv"): (
        lambda table, path: in_duckdb(table, f"COPY original TO '{path}' (HEADER)"),
        {"bytes", "span", *NESTED, *FAR},
    ),
    ("DuckDB", "jsonl"): (
        lambda table, path: in_duckdb(table, f"COPY original TO '{path}' (FORMAT json)"),
        {"f32", "bytes", "span", "map", *FAR},
    ),
    ("pyarrow", "folders"): (
        lambda table, path: dataset.write_dataset(
            table, path, format="parquet", partitioning=IN_FOLDERS, partitioning_flavor="hive"
        ),
        ALL - set(FOLDERS.schema.names),
    ),
    ("pandas with Arrow", "folders"): (
        lambda table, path: arrow(table).to_parquet(path, partition_cols=IN_FOLDERS),
        ALL - set(FOLDERS.schema.names),
    ),
    ("Polars", "folders"): (
        lambda table, path: in_polars(table).lazy().sink_parquet(polars.PartitionBy(str(path), key=IN_FOLDERS)),
        ALL - set(FOLDERS.schema.names),
    ),
    ("DuckDB", "folders"): (
        lambda table, path: in_duckdb(
            table, f"COPY original TO '{path}' (FORMAT parquet, PARTITION_BY ({', '.join(IN_FOLDERS)}))"
        ),
        ALL - set(FOLDERS.schema.names),
    ),
}


def _iceberg(path: Path) -> None:
    catalog = load_catalog("here", type="sql", uri=f"sqlite:///{path}.db", warehouse=f"file://{path}")
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.orders", FOLDERS.schema, location=f"file://{path}")
    table.append(FOLDERS)
    table.delete("id = 1")


def _delta(path: Path) -> None:
    deltalake.write_deltalake(path, FOLDERS)
    deltalake.DeltaTable(path).delete("id = 1")


def _parquet(column: pa.Array) -> Callable[[Path], object]:
    return lambda path: parquet.write_table(pa.table({"a": column}), path)


def _by_duckdb(expression: str) -> Callable[[Path], object]:
    return lambda path: in_duckdb(FOLDERS, f"COPY (SELECT {expression} AS a) TO '{path}' (FORMAT parquet)")


# What is refused: how it is written, the file, and what the error says.
REFUSED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a Delta table (deltalake)": (_delta, "table", "there is a Delta table in .*: its folder has files with rows that"),
    "an Iceberg table (pyiceberg)": (
        _iceberg,
        "table",
        "there is an Iceberg table in .*: its folder has files with rows",
    ),
    "an INTERVAL (DuckDB)": (
        _by_duckdb("INTERVAL '1 month 2 days'"),
        "a.parquet",
        r"a\.parquet: column 'a' is an interval of months, .*: pass schema= without it",
    ),
    "a HUGEINT as Int128 (Polars)": (
        lambda path: polars.DataFrame({"a": polars.Series([2**100], dtype=polars.Int128)}).write_parquet(path),
        "a.parquet",
        r"cannot read .*a\.parquet: Integers with more than 64 bits",
    ),
    "decimals of more than 38 digits (pyarrow)": (
        _parquet(pa.array([1], pa.decimal256(60, 0))),
        "a.parquet",
        r"column 'a' is decimal256\(60, 0\), which Spark has no type for: pass schema=",
    ),
    "nanoseconds that are used (pandas)": (
        lambda path: pandas.DataFrame({"a": pandas.to_datetime(["2026-01-01 00:00:00.000000001"])}).to_parquet(path),
        "a.parquet",
        r"column 'a' is timestamp\[ns\], and cannot be timestamp\[us\]: .* Pass a schema with a type for this column",
    ),
    "two columns of one name (pyarrow)": (
        lambda path: parquet.write_table(pa.table([pa.array([1]), pa.array([2])], ["a", "a"]), path),
        "a.parquet",
        r"a\.parquet: it has more than one column of the name a: pass schema= without it",
    ),
    "numbers and texts in one column (DuckDB)": (
        lambda path: in_duckdb(FOLDERS, f"COPY (SELECT unnest(['1', '\"x\"'])::JSON AS a) TO '{path}' (FORMAT json)"),
        "a.jsonl",
        r"a\.jsonl: .*Column\(/a\) changed from number to string",
    ),
}


def write_all(folder: Path) -> None:
    """Write everything, each file into ``folder/TOOL/FORMAT``, and what is refused into ``folder/refused/WHAT``."""
    for (tool, kind), (write, omitted) in FILES.items():
        place = folder / tool / kind
        place.mkdir(parents=True)
        path = place if kind == "folders" else place / f"a.{kind}"
        write(ORIGINAL.select([name for name in ORIGINAL.schema.names if name not in omitted]), path)
    for what, (write_refused, name, _) in REFUSED.items():
        (folder / "refused" / what).mkdir(parents=True)
        write_refused(folder / "refused" / what / name)
