# SPDX-License-Identifier: Apache-2.0

"""Files as a source: every row once, whatever the size of splits and blocks, and from every position on."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.sinks import FileSink
from headgate.sources import FileSource
from headgate.testing import running_operator
from spark_bridge.sinks.parquet.folder import DataFolder
from spark_bridge.sources.files.task import _first_record, _last_record
from tests.sources.test_split_reader import STREAMING, until_over
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
    content = rows(40)
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


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.text(alphabet='a"\n,ü', max_size=8), min_size=2, max_size=2), min_size=1, max_size=10),
    st.integers(1, 60),
)
def test_a_block_of_csv_ends_behind_a_record(records: list[list[str]], cut: int) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(records)
    data = text.getvalue().encode()
    ends = set()
    for count in range(len(records) + 1):
        part = io.StringIO(newline="")
        csv.writer(part, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(records[:count])
        ends.add(len(part.getvalue().encode()))
    block = data[:cut]
    assert _last_record(block) == max(end for end in ends if end <= len(block))
    first = min(ends - {0})
    assert _first_record(block) == (first if first <= len(block) else 0)


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


def test_hidden_and_empty_files_are_left_out_and_folders_are_read(tmp_path: Path) -> None:
    for name in ("year=1/a.csv", "b.csv", "_tmp/c.csv", ".d.csv", "_e.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, rows(2))
    (tmp_path / "empty.csv").touch()
    names = [Path(path).name for path, _ in FileSource(str(tmp_path)).files()]
    assert names == ["b.csv", "a.csv"]
    assert [Path(path).name for path, _ in FileSource(f"{tmp_path}/*.csv").files()] == ["b.csv"]


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


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["{}.jsonl", "{}.csv", "{}.parquet"])
async def test_files_that_appear_later_are_read_too_and_a_restored_reader_goes_on_inside_one(
    tmp_path: Path, name: str
) -> None:
    content = rows(60)
    for number in range(2):
        write(tmp_path / name.format(number), content[number * 20 : (number + 1) * 20])
    source = FileSource(
        str(tmp_path), discover_every_s=1.0, block_bytes=100, batch_rows=3, rate_limit_per_s=10.0, split_bytes=500
    )
    async with running_operator(source.coordinator, parallelism=2, **STREAMING) as world:
        tasks = [await world.launch_operator(subtask, source.operator) for subtask in range(2)]
        await world.advance(1.5)
        answer = world.begin_checkpoint()
        await world.advance(0.5)
        assert answer.value == 1
        restored = world.checkpoints[-1]
        before = [row for task in tasks for batch in task.outputs for row in batch.to_pylist()]
    write(tmp_path / name.format(2), content[40:])
    async with running_operator(source.coordinator, parallelism=2, restored=restored, **STREAMING) as world:
        tasks = [await world.launch_operator(subtask, source.operator) for subtask in range(2)]
        await world.advance(20.0)
        after = [row for task in tasks for batch in task.outputs for row in batch.to_pylist()]
    ids = [row["id"] for row in after]
    assert len(set(ids)) == len(ids)
    assert {row["id"] for row in before} | set(ids) == set(range(60))
    assert 20 <= len(ids) < 60


@pytest.mark.anyio
async def test_a_folder_is_read_once_by_several_tasks_although_one_is_lost(tmp_path: Path) -> None:
    for number in range(6):
        write(tmp_path / f"{number}.parquet", rows(30, seed=number))
    source = FileSource(str(tmp_path), rate_limit_per_s=100.0, batch_rows=5)
    async with running_operator(source.coordinator, parallelism=2) as world:
        tasks = [await world.launch_operator(subtask, source.operator) for subtask in range(2)]
        await world.advance(0.5)
        await world.kill(tasks[0])
        tasks.append(await world.retry(tasks[0]))
        await until_over(world, *tasks)
        kept = [batch.num_rows for task in tasks if task.outcome == "success" for batch in task.outputs]
    assert sum(kept) == 180


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
