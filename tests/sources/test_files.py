# SPDX-License-Identifier: Apache-2.0

"""Files as a source: every row once, whatever the size of splits and blocks, and from every position on."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

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
        ("a.jsonl", '{"n": 12345678901234567890123}\n{"n": 1}\n', [Decimal("12345678901234567890123"), Decimal(1)]),
        ("a.jsonl", '{"n": 18446744073709551615}\n', [Decimal(2**64 - 1)]),
        ("a.jsonl", '{"n": 0.1}\n{"n": 9007199254740993}\n', [Decimal("0.1"), Decimal(2**53 + 1)]),
        ("a.jsonl", '{"n": "2020-01-01T00:00:00Z"}\n', ["2020-01-01T00:00:00Z"]),
        ("a.jsonl", '{"n": []}\n' * 20 + '{"n": [1]}\n', [[]] * 20 + [[1]]),
        ("a.jsonl", '{"n": {"x": null}}\n' * 20 + '{"n": {"x": 1.5}}\n', [{"x": None}] * 20 + [{"x": 1.5}]),
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
        ("a.jsonl", '{"n": 1.5}\n', '{"n": 9007199254740993}\n', "column 'n' has '9007199254740993', which a double"),
        ("a.jsonl", '{"n": {"x": [1.5]}}\n', '{"n": {"x": [9007199254740993]}}\n', r"column 'n\.x\[\]' has '900719925"),
        ("a.jsonl", '{"n": 1}\n', '{"n": 1.5}\n', "JSON"),
        ("a.jsonl", '{"n": {"x": 9007199254740993.5}}\n', "", "its type is not found out: pass schema="),
    ],
)
def test_a_later_value_that_a_found_out_type_would_change_is_refused(
    tmp_path: Path, name: str, head: str, later: str, words: str
) -> None:  # H171
    (tmp_path / name).write_text(("n\n" if name == "a.csv" else "") + head * 20 + later)
    with pytest.raises(ValueError, match=rf"cannot read \S*{name}: .*{words}"):
        table_of(FileSource(str(tmp_path), block_bytes=16))


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
    assert source.schema == pyarrow.schema([("id", pyarrow.int64()), ("x", pyarrow.string())])
    assert [row for _, _, row in read(source)] == [{"id": 1, "x": None}, {"id": 2, "x": "text"}]
    given_schema = pyarrow.schema([("x", pyarrow.string()), ("id", pyarrow.int32())])
    source = FileSource(str(tmp_path), schema=given_schema)
    batches = [batch for split in source.splits() for _, batch in batches_of(source.operator(), split)]
    assert all(batch.schema == given_schema for batch in batches)


def names_in(url: Any) -> list[str]:
    source = FileSource(str(url))
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
