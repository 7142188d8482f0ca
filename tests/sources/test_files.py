# SPDX-License-Identifier: Apache-2.0

"""Files as a source: every row once, whatever the size of splits and blocks, and from every position on."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog
from structlog.testing import capture_logs

from headgate.sinks import FileSink
from headgate.sources import FileSource
from headgate.testing import running_operator
from spark_bridge.sinks.parquet.folder import DataFolder
from tests.sources.test_split_reader import STREAMING
from tests.spark_bridge.s3 import new_bucket

TEXTS = ["", "a", 'say "so"', "two\nlines", "comma, here", "ü", "x" * 300, '"', "\n", '""\n"']


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [{"id": number, "text": chance.choice(TEXTS)} for number in range(count)]


def write(path: Path, content: list[dict[str, Any]]) -> None:
    """Write a file in the format that its name says."""
    suffix = path.suffixes[0]
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path, row_group_size=7)
        return
    if suffix == ".csv":
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, ["id", "text"], lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
        table.writeheader()
        table.writerows(content)
        data = text.getvalue().encode()
    else:
        data = "".join(json.dumps(row) + "\n" for row in content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def batches_of(reader: Any, split: Any, position: Any = None) -> list[Any]:
    """What the reader yields: pairs of a position and a batch."""
    return list(reader.read_from(split, position))


def read(source: FileSource, splits: list[Any] | None = None) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yield each row with its split and the position after its batch."""
    reader = source.operator()
    for split in list(source.splits()) if splits is None else splits:
        for position, batch in batches_of(reader, split):
            for row in batch.to_pylist():
                yield split, position, row


NAMES = ["a.jsonl", "a.csv", "a.parquet", "a.json.gz", "a.csv.gz"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split_bytes", [20, 333, 1 << 20])
@pytest.mark.parametrize("block_bytes", [1, 64, 1 << 20])
def test_each_row_is_read_once_whatever_the_size_of_splits_and_blocks(
    tmp_path: Path, name: str, split_bytes: int, block_bytes: int
) -> None:
    content = rows(40)
    write(tmp_path / name, content)
    source = FileSource(str(tmp_path), split_bytes=split_bytes, block_bytes=block_bytes, batch_rows=3)
    found = [row for _, _, row in read(source)]
    assert sorted(found, key=lambda row: row["id"]) == content


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_goes_on_from_every_position(tmp_path: Path, name: str) -> None:
    content = rows(120)
    write(tmp_path / name, content)
    source = FileSource(str(tmp_path / name), split_bytes=700, block_bytes=50, batch_rows=3)
    reader = source.operator()
    positions = 0
    for split in source.splits():
        batches = batches_of(reader, split)
        for number, (position, _) in enumerate(batches):
            rest = [batch.to_pylist() for _, batch in batches_of(reader, split, position)]
            assert [row for batch in rest for row in batch] == [
                row for _, batch in batches[number + 1 :] for row in batch.to_pylist()
            ]
            positions += 1
    assert positions > 5


def table_of(source: FileSource, splits: list[Any] | None = None) -> list[dict[str, Any]]:
    return [row for _, _, row in read(source, splits)]


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_a_quote_inside_of_a_value_does_not_move_the_ends_of_records(tmp_path: Path, block_bytes: int) -> None:  # H171
    lines = ['0,5" pipe', *(f'{number},"street {number}\n{number},town"' for number in range(1, 300))]
    (tmp_path / "a.csv").write_text("id,address\n" + "\n".join(lines) + "\n")
    found = table_of(FileSource(str(tmp_path), block_bytes=block_bytes))
    assert found == [
        {"id": 0, "address": '5" pipe'},
        *({"id": number, "address": f"street {number}\n{number},town"} for number in range(1, 300)),
    ]


@pytest.mark.parametrize(
    ("options", "text", "found"),
    [
        ({"quote_char": "'"}, "a,b\n'x,y',2\n", [{"a": "x,y", "b": 2}]),
        ({"escape_char": "\\", "quote_char": False}, "a,b\nx\\,y,2\n", [{"a": "x,y", "b": 2}]),
        ({"encoding": "latin-1"}, "a\nü\n", [{"a": "ü"}]),
        ({"column_names": ["a", "b"]}, "x,2\n", [{"a": "x", "b": 2}]),
        ({"skip_rows": 1}, "# made by hand\na\n1\n", [{"a": 1}]),
        ({"null_values": ["", "NA"]}, "a,b\nNA,1\n2,2\n", [{"a": None, "b": 1}, {"a": 2, "b": 2}]),
        ({}, "a,b\nNA,1\n2,2\n", [{"a": "NA", "b": 1}, {"a": "2", "b": 2}]),
        ({}, "a\nnan\n1\n", [{"a": pytest.approx(float("nan"), nan_ok=True)}, {"a": 1.0}]),
    ],
)
def test_every_dialect_of_csv_that_pyarrow_knows_can_be_read(
    tmp_path: Path, options: dict[str, Any], text: str, found: list[dict[str, Any]]
) -> None:
    (tmp_path / "a.csv").write_text(text, encoding=options.get("encoding", "utf-8"))
    assert table_of(FileSource(str(tmp_path), csv_options=options)) == found


@pytest.mark.parametrize("block_bytes", [4, 2**20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_empty_line_is_a_row_with_null_if_there_is_one_column(tmp_path: Path, end: str, block_bytes: int) -> None:
    """H171. pyarrow writes NULL so, and leaves such lines out when it reads, by default."""
    (tmp_path / "a.csv").write_text(end.join(["t", "a", "", "b", "", ""]), newline="")
    source = FileSource(str(tmp_path), block_bytes=block_bytes)
    assert [row["t"] for row in table_of(source)] == ["a", None, "b", None]
    (tmp_path / "a.csv").write_text("id,t\n1,a\n\n2,b\n")
    assert len(table_of(FileSource(str(tmp_path)))) == 2


def test_a_first_record_that_is_longer_than_a_block_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"id,t\n1,{'x' * 3_000_000}\n2,b\n")
    assert [(row["id"], len(row["t"])) for row in table_of(FileSource(str(tmp_path)))] == [(1, 3_000_000), (2, 1)]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"a.csv": b'id,t\n1,"abc\n2,x\n3,y\n'}, "'t' of its last record begins with a quote that is never closed"),
        ({"a.csv": "id,t\n1,é\n".encode("latin-1")}, r"'t' has text that is not UTF-8: pass its encoding"),
        ({"day=1/a.csv": b"id\n1\n", "b.csv": b"id\n2\n"}, "it has 'day', which the head of the first file"),
        ({"day=1/a.csv": b"id\n1\n", "day=2/n=5/b.csv": b"id\n2\n"}, "it has 'n', which the head of the first file"),
        ({"n=1/n=5/b.csv": b"id\n2\n"}, "two of the folders that it is in have values for one column"),
    ],
    ids=["open quote", "not UTF-8", "later folder", "later folder inside", "folder twice"],
)
def test_a_file_of_which_something_would_be_lost_is_refused(
    tmp_path: Path, files: dict[str, bytes], text: str
) -> None:  # H171
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=text):
        table_of(FileSource(str(tmp_path)))


def test_a_value_that_a_declared_column_cannot_hold_is_told_with_the_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,300\n")
    with pytest.raises(ValueError, match=r"column 'b': .*invalid value '300'"):
        table_of(FileSource(str(tmp_path), schema=pyarrow.schema([("b", pyarrow.int8())])))


def test_an_option_of_csv_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"csv_options has no 'block_size', 'quotechar': .* quote_char"):
        FileSource("/data", csv_options={"quotechar": "'", "block_size": 3})
    with pytest.raises(ValueError, match=r"pass delimiter=, and leave it out of csv_options"):  # H165
        FileSource("/data", csv_options={"delimiter": ";"})
    with pytest.raises(
        TypeError, match=r"csv_options is not as pyarrow\.csv takes it: .*\. It was \{'quote_char': 5\}"
    ):
        FileSource("/data", csv_options={"quote_char": 5})


def test_a_position_in_csv_of_an_earlier_release_is_continued(tmp_path: Path) -> None:  # H164
    (tmp_path / "a.csv").write_text("id,text\n" + "".join(f"{number},x\n" for number in range(20)))
    source = FileSource(str(tmp_path), block_bytes=16)
    (split,) = source.splits()
    batches = batches_of(source.operator(), split, len("id,text\n") + 3 * len("0,x\n"))
    assert [row["id"] for _, batch in batches for row in batch.to_pylist()] == list(range(3, 20))
    again = batches_of(source.operator(), split, batches[2][0])
    assert [row for _, batch in again for row in batch.to_pylist()] == [
        row for _, batch in batches[3:] for row in batch.to_pylist()
    ]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.csv", "zip\n02134\n10001\n", ["02134", "10001"]),
        ("a.csv", "n\n123456789012345678901\n5\n", [Decimal("123456789012345678901"), Decimal(5)]),
        ("a.csv", "n\n1.12345678901234567\n1\n", [Decimal("1.12345678901234567"), Decimal(1)]),
        ("a.csv", f"n\n{'9' * 60}\n", ["9" * 60]),
        ("a.csv", "n\n0.1\n1e5\n", [0.1, 1e5]),
        ("a.csv", "n\n4.9E-324\n0.10000000000000001\n2.98023223876953125E-8\n", [5e-324, 0.1, 2.0**-25]),
        ("a.jsonl", '{"n": 12345678901234567890123}\n{"n": 1}\n', [Decimal("12345678901234567890123"), Decimal(1)]),
        ("a.jsonl", '{"n": 18446744073709551615}\n', [Decimal(2**64 - 1)]),
        ("a.jsonl", '{"n": 0.1}\n{"n": 9007199254740993}\n', [Decimal("0.1"), Decimal(2**53 + 1)]),
        ("a.jsonl", '{"n": "2020-01-01T00:00:00Z"}\n', ["2020-01-01T00:00:00Z"]),
        ("a.jsonl", '{"n": []}\n' * 20 + '{"n": [1]}\n', [[]] * 20 + [[1]]),
        ("a.jsonl", '{"n": {"x": null}}\n' * 20 + '{"n": {"x": 1.5}}\n', [{"x": None}] * 20 + [{"x": 1.5}]),
        ("a.jsonl", '{"n": {}}\n' * 20 + '{"n": {"x": 1.5}}\n', [{"x": None}] * 20 + [{"x": 1.5}]),
        ("a.jsonl", '{"n": 1}\n' * 20 + '{"n": 1, "late": null}\n', [1] * 21),
        ("a.csv", "phone\n+491701234567\n+12\n", ["+491701234567", "+12"]),
        ("a.csv", "n\n0x1A\n0X1B\n", ["0x1A", "0X1B"]),
        ("a.csv", "n\n1e400\n1\n", ["1e400", "1"]),
        ("a.csv", "n\n1e-400\n", ["1e-400"]),
        ("a.csv", 'n,m\n,1\n"",2\na,3\n', [None, "", "a"]),
        (
            "a.csv",
            "n\n2026-01-01 00:00:00.000001\n9999-12-31 00:00:00\n",
            ["2026-01-01 00:00:00.000001", "9999-12-31 00:00:00"],
        ),
    ],
)
def test_a_type_that_is_found_out_changes_no_value(tmp_path: Path, name: str, text: str, found: list[Any]) -> None:
    # H171
    (tmp_path / name).write_text(text)
    assert [next(iter(row.values())) for row in table_of(FileSource(str(tmp_path), block_bytes=64))] == found


@pytest.mark.parametrize(
    ("name", "head", "later", "words"),
    [
        ("a.csv", "1\n", "02134\n", "column 'n' has '02134', which the type int64"),
        ("a.csv", "1.5\n", "9007199254740993\n", "column 'n' has '9007199254740993', which the type double"),
        (
            "a.jsonl",
            '{"n": 1.5}\n',
            '{"n": 9007199254740993}\n',
            "column 'n' has '9007199254740993', which its type double",
        ),
        ("a.jsonl", '{"n": {"x": [1.5]}}\n', '{"n": {"x": [9007199254740993]}}\n', r"column 'n\.x\[\]' has '900719925"),
        ("a.jsonl", '{"n": 1}\n', '{"n": 1.5}\n', "JSON"),
        ("a.jsonl", '{"n": {"x": 9007199254740993.5}}\n', "", "its type is not found out: pass schema="),
        ("a.csv", "1.5\n", "1e400\n", "column 'n' has '1e400', which the type double"),
        ("a.csv", "1\n", "0x1A\n", "column 'n' has '0x1A', which the type int64"),
        ("a.csv", "1\n", "x\n", "column 'n': Failed to parse string: 'x' as a scalar of type int64"),
        ("a.jsonl", '{"n": 1.5}\n', '{"n": 1e-400}\n', "column 'n' has '1E-400', which its type double"),
        ("a.jsonl", '{"n": 1}\n', '{"n": 1, "late": 1}\n', "it has 'late', which the head of the first file does not"),
        ("a.jsonl", '{"n": [{"x": 1}]}\n', '{"n": [{"y": 1}]}\n', r"it has 'n\.y', which the head of the first file"),
    ],
)
def test_a_later_value_that_a_found_out_type_would_change_is_refused(
    tmp_path: Path, name: str, head: str, later: str, words: str
) -> None:  # H171
    (tmp_path / name).write_text(("n\n" if name == "a.csv" else "") + head * 20 + later)
    with pytest.raises(ValueError, match=rf"cannot read \S*{name}: .*{words}"):
        table_of(FileSource(str(tmp_path), block_bytes=16))


@pytest.mark.parametrize(
    ("name", "text", "wanted", "found"),
    [
        ("a.jsonl", '{"n": 9007199254740993}', pyarrow.float64(), "column 'n' has '9007199254740993', which its type"),
        ("a.jsonl", '{"n": 16777217}', pyarrow.float32(), "column 'n' has '16777217', which its type float would"),
        ("a.jsonl", '{"n": 0.1}', pyarrow.float32(), pytest.approx(0.1)),
        ("a.jsonl", '{"n": 9223372036854775807}', pyarrow.int64(), 2**63 - 1),
        ("a.jsonl", '{"n": 9223372036854775808}', pyarrow.int64(), "couldn't parse:9223372036854775808"),
        ("a.jsonl", '{"n": "2026-01-01"}', pyarrow.date32(), date(2026, 1, 1)),
        ("a.jsonl", '{"n": 1767225600000}', pyarrow.date32(), "changed from string to number"),
        ("a.jsonl", '{"n": "01:02:03.000004"}', pyarrow.time64("us"), "changed from number to string"),
        ("a.jsonl", '{"n": "AAE="}', pyarrow.binary(), "JSON has no bytes, and the schema has binary: pass schema="),
        ("a.csv", "n\n9007199254740993", pyarrow.float64(), "column 'n' has '9007199254740993', which the type double"),
        ("a.csv", "n\n16777217", pyarrow.float32(), "column 'n' has '16777217', which the type float would change"),
        ("a.csv", "n\n0.1", pyarrow.float32(), pytest.approx(0.1)),
        ("a.csv", "n\n007", pyarrow.int64(), 7),
        ("a.csv", "n\n1.555", pyarrow.decimal128(5, 2), "would cause data loss"),
    ],
)
def test_a_declared_type_changes_no_value_either(
    tmp_path: Path, name: str, text: str, wanted: pyarrow.DataType, found: Any
) -> None:  # H171
    (tmp_path / name).write_text(text + "\n")
    source = FileSource(str(tmp_path), schema=pyarrow.schema([("n", wanted)]))
    if isinstance(found, str):
        with pytest.raises(ValueError, match=rf"cannot read \S*{name}: .*{found}"):
            table_of(source)
    else:
        assert table_of(source) == [{"n": found}]


def test_a_time_of_json_gets_no_zone_and_loses_none(tmp_path: Path) -> None:  # H171
    utc, naive = (pyarrow.schema([("t", pyarrow.timestamp("us", zone))]) for zone in ("UTC", None))
    (tmp_path / "a.jsonl").write_text('{"t": "2020-01-01T10:00:00+02:00"}\n')
    assert table_of(FileSource(str(tmp_path), schema=utc)) == [{"t": datetime(2020, 1, 1, 8, tzinfo=UTC)}]
    with pytest.raises(ValueError, match="zone offset"):
        table_of(FileSource(str(tmp_path), schema=naive))
    (tmp_path / "a.jsonl").write_text('{"t": "2020-01-01T10:00:00"}\n')
    assert table_of(FileSource(str(tmp_path), schema=naive)) == [{"t": datetime(2020, 1, 1, 10)}]  # noqa: DTZ001
    with pytest.raises(ValueError, match="zone offset"):
        table_of(FileSource(str(tmp_path), schema=utc))


def test_times_in_int96_are_instants_of_every_year(tmp_path: Path) -> None:  # H171
    years = [datetime(year, 1, 1, tzinfo=UTC) for year in (1500, 1883, 2026, 9999)]
    table = pyarrow.table(
        {
            "t": pyarrow.array([one.replace(tzinfo=None) for one in years], pyarrow.timestamp("us")),
            "n": pyarrow.array(
                [{"x": one.replace(tzinfo=None)} for one in years], pyarrow.struct([("x", pyarrow.timestamp("us"))])
            ),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    found = table_of(FileSource(str(tmp_path)))
    assert found == [{"t": one, "n": {"x": one}} for one in years]
    assert found == table_of(FileSource(str(tmp_path), schema=FileSource(str(tmp_path)).schema))
    with pytest.raises(ValueError, match="column 't' has instants"):
        table_of(FileSource(str(tmp_path), schema=pyarrow.schema([("t", pyarrow.timestamp("us"))])))


@pytest.mark.parametrize("mark", [b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"])
def test_early_days_in_the_calendar_of_before_1582_are_refused(tmp_path: Path, mark: bytes) -> None:  # H171
    for first, refused in [(date(1582, 10, 4), True), (date(1582, 10, 15), False)]:
        table = pyarrow.table({"d": [[first], [date(2026, 1, 1)]]}).replace_schema_metadata({mark: b""})
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        if refused:
            with pytest.raises(
                ValueError, match="column 'd' has 1582-10-04, and Spark wrote the file with the calendar"
            ):
                table_of(FileSource(str(tmp_path)))
        else:
            assert table_of(FileSource(str(tmp_path))) == [{"d": [first]}, {"d": [date(2026, 1, 1)]}]


def test_early_days_are_looked_for_beside_years_that_python_does_not_have(tmp_path: Path) -> None:  # H171
    mark = {b"org.apache.spark.legacyDateTime": b""}
    for days, refused in [([2**22, 2**22], False), ([-(2**22), 2**22], True)]:
        table = pyarrow.table({"d": pyarrow.array(days, pyarrow.date32())}).replace_schema_metadata(mark)
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        source = FileSource(str(tmp_path))
        if refused:
            with pytest.raises(ValueError, match="column 'd' has -9514-"):
                batches_of(source.operator(), next(source.splits()))
        else:
            ((_, batch),) = batches_of(source.operator(), next(source.splits()))
            assert batch.column(0).cast(pyarrow.int32()).to_pylist() == days


def test_columns_of_parquet_are_told_apart_whatever_their_names_are(tmp_path: Path) -> None:  # H171
    noon = pyarrow.array([datetime(2026, 1, 1, 12)], pyarrow.timestamp("us"))  # noqa: DTZ001
    named = {"a.b": noon, "a": pyarrow.array([{"b": 1, "c.d": 2}]), "": pyarrow.array([3])}
    pyarrow.parquet.write_table(pyarrow.table(named), tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    utc = datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert table_of(FileSource(str(tmp_path))) == [{"a.b": utc, "a": {"b": 1, "c.d": 2}, "": 3}]
    one = FileSource(str(tmp_path), schema=pyarrow.schema([("", pyarrow.int8())]))
    assert table_of(one) == [{"": 3}]
    twice = pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], names=["n", "n"])
    pyarrow.parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: it has more than one column of the name n: pass schema="):
        _ = FileSource(str(tmp_path)).schema


def test_a_field_that_a_later_parquet_file_has_more_or_less_is_named(tmp_path: Path) -> None:  # H171
    pyarrow.parquet.write_table(pyarrow.table({"a": [{"x": 1}]}), tmp_path / "a.parquet")
    source = FileSource(str(tmp_path))
    schema = source.schema
    for later, wrong in [
        (pyarrow.table({"a": [{"x": 1}], "b": [1]}), "it has 'b', which the head of the first file does not have"),
        (pyarrow.table({"a": [{"x": 1, "y": 2}]}), r"it has 'a\.y', which the head of the first file does not have"),
        (pyarrow.table({"a": [{"y": 2}]}), r"it has no 'a\.x': correct the schema"),
    ]:
        pyarrow.parquet.write_table(later, tmp_path / "b.parquet")
        with pytest.raises(ValueError, match=rf"b\.parquet: {wrong}"):
            table_of(source)
    pyarrow.parquet.write_table(pyarrow.table({"a": [{"x": 1}], "b": [1]}), tmp_path / "b.parquet")
    assert table_of(FileSource(str(tmp_path), schema=schema)) == [{"a": {"x": 1}}] * 2, "what was asked for"


def test_the_folder_of_a_table_is_refused(tmp_path: Path) -> None:
    """H170: its files have rows that were deleted."""
    table = pyarrow.table({"id": [1, 2]})
    write_deltalake(tmp_path / "delta", table)
    DeltaTable(tmp_path / "delta").delete("id = 1")
    with load_catalog("here", type="sql", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=str(tmp_path)) as catalog:
        catalog.create_namespace("shop")
        catalog.create_table("shop.orders", table.schema, location=f"{tmp_path}/iceberg").append(table)
    for kind, url in [("a Delta", "delta"), ("an Iceberg", "iceberg"), ("a Delta", "d*/*"), ("an Iceberg", "ice*")]:
        source = FileSource(f"{tmp_path}/{url}", "parquet")
        with pytest.raises(ValueError, match=f"there is {kind} table in .*: its folder has files with rows"):
            _ = source.schema
    write(tmp_path / "metadata.json", rows(1))
    assert len(table_of(FileSource(f"{tmp_path}/metadata.json"))) == 1


def test_an_interval_in_parquet_is_refused_unless_it_is_left_out(tmp_path: Path) -> None:  # H171
    duckdb.sql(f"COPY (SELECT 1 AS n, [INTERVAL '1 month'] AS i) TO '{tmp_path}/a.parquet' (FORMAT parquet)")
    with pytest.raises(ValueError, match=r"column 'i' is an interval of months, .*: pass schema="):
        _ = FileSource(str(tmp_path)).schema
    assert table_of(FileSource(str(tmp_path), schema=pyarrow.schema([("n", pyarrow.int32())]))) == [{"n": 1}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_what_the_names_of_folders_say_are_columns(tmp_path: Path, name: str) -> None:  # H171
    for folders in ("shop=a%2Fb%3D/day=02", "shop=__HIVE_DEFAULT_PARTITION__/day=10"):
        (tmp_path / "in" / folders).mkdir(parents=True)
        write(tmp_path / "in" / folders / name, rows(1))
    (row,) = rows(1)
    url = f"{tmp_path}/in"
    assert table_of(FileSource(url)) == [{**row, "shop": None, "day": "10"}, {**row, "shop": "a/b=", "day": "02"}]
    for other in (f"{url}/*/*/{name}", f"{url}/*"):
        assert [one["day"] for one in table_of(FileSource(other))] == ["10", "02"]
    typed = pyarrow.schema([("day", pyarrow.int8()), ("id", pyarrow.int64())])
    assert table_of(FileSource(url, schema=typed)) == [{"day": 10, "id": 0}, {"day": 2, "id": 0}]
    inner = f"{url}/shop=__HIVE_DEFAULT_PARTITION__"
    assert table_of(FileSource(inner)) == [{**row, "day": "10"}], "only below the URL"
    wrong = pyarrow.schema([("shop", pyarrow.int64())])
    with pytest.raises(ValueError, match="column 'shop' is 'a/b=' in the name of a folder: Failed to parse"):
        table_of(FileSource(url, schema=wrong))


def test_a_file_that_has_the_column_of_its_folder_says_the_same(tmp_path: Path) -> None:  # H171
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pyarrow.parquet.write_table(pyarrow.table({"day": [day], "n": [5]}), tmp_path / f"day={day}" / "a.parquet")
    assert table_of(FileSource(str(tmp_path))) == [{"day": 1, "n": 5}, {"day": 2, "n": 5}]
    pyarrow.parquet.write_table(pyarrow.table({"day": [3], "n": [5]}), tmp_path / "day=2" / "a.parquet")
    with pytest.raises(ValueError, match="column 'day' is 2 in the name of a folder, and something else in the file"):
        table_of(FileSource(str(tmp_path)))


def test_a_schema_that_would_change_a_value_of_a_file_is_refused(tmp_path: Path) -> None:  # H171
    pyarrow.parquet.write_table(pyarrow.table({"x": [0.1], "n": [1], "s": ["02"]}), tmp_path / "a.parquet")
    ones = FileSource(str(tmp_path), schema=pyarrow.schema([("n", pyarrow.bool_())]))
    assert table_of(ones) == [{"n": True}], "1 is True, and back"
    for name, wanted in [("x", pyarrow.float32()), ("s", pyarrow.int64())]:
        schema = pyarrow.schema([(name, wanted)])
        with pytest.raises(
            ValueError, match=f"column '{name}' is .* and cannot be {wanted}: a value would not be what"
        ):
            table_of(FileSource(str(tmp_path), schema=schema))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_files_on_an_object_store_are_read_in_parts_and_from_every_position(
    name: str, s3: dict[str, Any], tmp_path: Path
) -> None:
    bucket = new_bucket(s3)
    store = fsspec.filesystem("s3", **s3)
    write(tmp_path / name, rows(40))
    store.pipe_file(f"{bucket}/in/{name}", (tmp_path / name).read_bytes())
    source = FileSource(f"s3://{bucket}/in", split_bytes=700, block_bytes=200, batch_rows=9, options=s3)
    assert sorted((row for _, _, row in read(source)), key=lambda row: row["id"]) == rows(40)
    split = next(iter(source.splits()))
    reader = source.operator()
    (position, _), *rest = batches_of(reader, split)
    again = [row for _, batch in batches_of(reader, split, position) for row in batch.to_pylist()]
    assert again == [row for _, batch in rest for row in batch.to_pylist()]
    (tmp_path / name).unlink()
    write(tmp_path / name, rows(3))
    fsspec.filesystem("s3", **s3, skip_instance_cache=True).pipe_file(
        f"{bucket}/in/b-{name}", (tmp_path / name).read_bytes()
    )
    assert f"b-{name}" in str(list(source.splits())), (
        "what another process adds is found, although it was listed before"
    )


def test_columns_are_those_of_the_schema_in_every_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1, "x": null}\n')
    (tmp_path / "b.jsonl").write_text('{"id": 2, "x": "text", "more": 1}\n')
    source = FileSource(str(tmp_path))
    found = pyarrow.schema([("id", pyarrow.int64()), ("x", pyarrow.string())])
    assert source.schema == found
    with pytest.raises(ValueError, match=r"b\.jsonl: it has 'more', which the head of the first file does not have"):
        table_of(source)
    assert table_of(FileSource(str(tmp_path), schema=found)) == [{"id": 1, "x": None}, {"id": 2, "x": "text"}]
    given_schema = pyarrow.schema([("x", pyarrow.string()), ("id", pyarrow.int32())])
    source = FileSource(str(tmp_path), schema=given_schema)
    batches = [batch for split in source.splits() for _, batch in batches_of(source.operator(), split)]
    assert all(batch.schema == given_schema for batch in batches)


def names_in(url: Any) -> list[str]:
    source = FileSource(str(url), schema=pyarrow.schema([("id", pyarrow.int64())]))
    found = [Path(path).name for path, _ in source.files()]
    assert not found or len(table_of(source)) == 2 * len(found)
    return found


def test_hidden_and_empty_files_are_left_out_and_folders_are_read(tmp_path: Path) -> None:  # H171
    for name in ("year=1/a.csv", "b.csv", "_tmp/c.csv", ".d.csv", "_e.csv", "_day=1/f.csv", "out.csv/part.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, rows(2))
    (tmp_path / "empty.csv").touch()
    assert names_in(tmp_path) == ["f.csv", "b.csv", "part.csv", "a.csv"]
    assert names_in(f"{tmp_path}/*.csv") == ["b.csv", "part.csv"]
    assert names_in(f"{tmp_path}/_tmp/*.csv") == ["c.csv"], "what the URL names is not hidden"
    assert names_in(f"{tmp_path}/*/c.csv") == []
    assert names_in(f"{tmp_path}/[_a]*/*.csv") == ["f.csv"]
    assert names_in(f"{tmp_path}/_*/*.csv") == ["f.csv", "c.csv"]
    assert names_in(f"{tmp_path}/**/a.csv") == ["a.csv"]


def test_links_are_followed_and_a_circle_ends(tmp_path: Path) -> None:  # H171
    real, volume = tmp_path / "real", tmp_path / "volume"
    (real / "sub").mkdir(parents=True)
    volume.mkdir()
    for name in ("a.csv", "sub/b.csv"):
        write(real / name, rows(2))
    (volume / "..data").symlink_to(real)  # as Kubernetes does
    (volume / "a.csv").symlink_to("..data/a.csv")
    (volume / "folder").symlink_to(real / "sub")
    (volume / "circle").symlink_to(volume)
    (volume / "nothing.csv").symlink_to(tmp_path / "nowhere")
    assert names_in(volume) == ["a.csv", "b.csv"]
    assert names_in(f"{volume}/*.csv") == ["a.csv"]
    assert names_in(f"{volume}/*/*.csv") == ["a.csv", "b.csv"], "the circle leads to the folder once"
    assert names_in(volume / "..data" / "a.csv") == ["a.csv"]


@pytest.mark.parametrize("name", ["a[1].csv", "a*b.csv", "a?.csv", "a::b.csv", "a b%20.csv", "ü#1.csv", "~a.csv"])
def test_any_name_of_a_file_can_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "[d]*").mkdir()
    for place in (tmp_path / name, tmp_path / "[d]*" / name):
        write(place, rows(2))
    assert names_in(tmp_path / name) == [name]
    assert names_in(tmp_path / "[d]*") == [name]
    assert names_in(tmp_path) == [name, name]


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
async def test_another_size_of_splits_in_a_later_run_reads_nothing_twice(tmp_path: Path, name: str) -> None:  # H172
    write(tmp_path / name, rows(200))
    found: list[int] = []
    restored = None
    for split_bytes in (400, 150, 1 << 20):
        source = FileSource(str(tmp_path), discover_every_s=1.0, split_bytes=split_bytes, batch_rows=3, block_bytes=64)
        async with running_operator(source.coordinator, parallelism=2, restored=restored, **STREAMING) as world:
            source_rate = FileSource(
                str(tmp_path), split_bytes=split_bytes, batch_rows=3, block_bytes=64, rate_limit_per_s=30.0
            )
            tasks = [await world.launch_operator(subtask, source_rate.operator) for subtask in range(2)]
            await world.advance(1.2 if split_bytes < 1 << 20 else 30.0)
            await world.checkpoint()
            restored = world.checkpoints[-1]
            found += [row["id"] for task in tasks for batch in task.outputs for row in batch.to_pylist()]
    assert sorted(found) == list(range(200))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("data",), "url must be an absolute path or a URL"),
        (("/data", "xml"), "format must be 'json', 'csv' or 'parquet'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FileSource(*arguments)


def test_what_cannot_be_found_out_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass format="):
        _ = FileSource(str(tmp_path)).operator
    with pytest.raises(ValueError, match="pass schema="):
        _ = FileSource(str(tmp_path), "csv").operator
    (tmp_path / "a.csv").write_text("id\n")
    with pytest.raises(ValueError, match="has no rows"):
        _ = FileSource(str(tmp_path)).operator


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"id": 1, "text": "a"}\nno json\n', "JSON parse error"),
        ("a.csv", b"id,text\n1,a\n2\n", "CSV parse error"),
        ("a.parquet", b"no parquet at all", "Parquet"),
        ("a.jsonl.gz", b"not compressed", "gzip"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    schema = pyarrow.schema([("id", pyarrow.int64()), ("text", pyarrow.string())])
    for source in (FileSource(str(tmp_path), schema=schema), FileSource(str(tmp_path))):
        with pytest.raises(
            ValueError, match=rf"cannot read \S*{name}: .*{words}.*\. Correct or remove the file, or pass"
        ):
            list(read(source))


def test_a_column_that_a_file_lacks_is_named_with_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", rows(1))
    source = FileSource(str(tmp_path), schema=pyarrow.schema([("id", pyarrow.int64()), ("zip", pyarrow.string())]))
    with pytest.raises(ValueError, match=r"a\.parquet: it has no columns \['zip'\], only \['id'\]"):
        list(read(source))
    (tmp_path / "a.parquet").unlink()
    write(tmp_path / "a.csv", rows(1))
    with pytest.raises(ValueError, match=r"a\.csv: .*'zip'"):
        list(read(FileSource(str(tmp_path), schema=source.schema)))


def test_a_path_at_which_there_is_nothing_is_refused_unless_files_come_later(tmp_path: Path) -> None:
    missing = f"{tmp_path}/typo"
    with pytest.raises(ValueError, match=f"there are no files in {missing}, so their format is not known: correct the"):
        FileSource(missing).operator()
    with pytest.raises(FileNotFoundError, match=f"nothing at {missing}: correct the path, or pass discover_every_s="):
        list(FileSource(missing, "json").splits())
    assert list(FileSource(missing, "json", discover_every_s=1.0).splits()) == []
    assert list(FileSource(f"{missing}/*.json").splits()) == []
    assert list(FileSource(str(tmp_path), "json").splits()) == [], "an empty folder may be right"


@pytest.mark.parametrize(
    ("place", "beside"),
    [
        ("in/*.json", ["'a.csv'", "'b.csv'", "'c.csv'"]),
        ("in/**/*.json", ["'a.csv'", "'b.csv'", "'c.csv'"]),
        ("empty", []),
        ("gone/*.json", []),
    ],
)
async def test_a_bounded_source_warns_once_if_it_finds_no_files_at_its_first_start(
    tmp_path: Path, place: str, beside: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "in").mkdir()
    for name in "abcd":
        (tmp_path / "in" / f"{name}.csv").write_text("id\n1\n")
    url = f"{tmp_path}/{place}"
    first = FileSource(url, "json").enumerator(None)
    state = await first.snapshot_state(1)
    with capture_logs() as lines:
        assert list(first._discover()) == []
    expected = {"event": "bounded file source found no files", "log_level": "warning", "url": repr(url)}
    assert [line for line in lines if line["log_level"] == "warning"] == [expected | {"other_names": beside}]
    with capture_logs() as lines:  # later, and if files are expected, finding nothing is normal
        assert list(FileSource(url, "json").enumerator(state)._discover()) == []
        assert list(FileSource(url, "json", discover_every_s=1.0).enumerator(None)._discover()) == []
    assert lines == []


def test_a_filesystem_that_does_not_exist_or_is_not_installed_is_named_with_its_url() -> None:
    for make in (
        lambda url: FileSource(url).files(),
        lambda url: FileSink(url).target,
        lambda url: DataFolder(url, "sink"),
    ):
        with pytest.raises(
            ValueError, match=r"cannot use typo://bucket/x: Protocol not known: typo\. Correct the URL, or"
        ):
            make("typo://bucket/x")
        with pytest.raises(ImportError, match=r"cannot use dropbox://bucket/x: .*dropbox.*install the package of its"):
            make("dropbox://bucket/x")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_reading_does_not_import_pandas(tmp_path: Path, name: str) -> None:
    """Spark's worker collects garbage after each task, and all of pandas makes that slower."""
    table = [{"id": number, "value": number * 0.5} for number in range(100)]
    write(tmp_path / name, table)
    program = (
        "import pickle, sys\n"
        "reader, splits = pickle.load(sys.stdin.buffer)\n"
        "rows = [row for split in splits for _, batch in reader.read_from(split, None) for row in batch.to_pylist()]\n"
        "assert len(rows) == 100, rows\n"
        "assert 'pandas' not in sys.modules\n"
    )
    source = FileSource(str(tmp_path))
    given = pickle.dumps((source.operator(), list(source.splits())))
    done = subprocess.run([sys.executable, "-c", program], input=given, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
