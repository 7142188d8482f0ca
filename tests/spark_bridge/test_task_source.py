# SPDX-License-Identifier: Apache-2.0

"""A format that Spark reads: what it answers to Spark's planner and in tasks. tests/spark/ reads with a real Spark."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark import TaskContext, cloudpickle
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

import spark_bridge
from protocol.source_events import StreamBatch
from spark_bridge.streams.task import StreamClient, StreamFailed
from spark_bridge.subtask import SubtaskOperator
from spark_bridge.task_entry import SubtaskTask
from spark_bridge.task_source import source_format

SCHEMA = StructType().add("id", "long")
FIRST, SECOND = {"stream": "s", "batch": 4}, {"stream": "s", "batch": 6}
MARK = 0x5EC12E7A


class Task:
    """In place of the function that runs in a task: it yields what it was wrapped with."""

    def __init__(self, *wrapped: Any) -> None:
        self._wrapped = wrapped

    def wrapped(self, wrap: Any, *args: Any) -> Task:
        return Task(wrap.__name__, *args)

    def __call__(self, records: Iterator[Any]) -> Iterator[Any]:
        assert list(records) == []
        return iter([("row", *self._wrapped)])


class Stream:
    """In place of the sidecar: a stream with one more batch at each question."""

    def __init__(self, splits: int = 9) -> None:
        self.asked: list[Any] = []
        self._splits = splits

    def initial(self, latest: dict[str, Any] | None) -> dict[str, Any]:
        self.asked.append(("initial", latest))
        return {"stream": "s", "batch": 0}

    def latest(self, start: dict[str, Any] | None, before: dict[str, Any] | None) -> dict[str, Any]:
        self.asked.append(("latest", start, before))
        return {"stream": "s", "batch": len(self.asked)}

    def count(self, batch: StreamBatch) -> int:
        self.asked.append(("count", batch))
        return self._splits

    def commit(self, end: dict[str, Any]) -> None:
        self.asked.append(("commit", end))


def a_format(stream: Stream | None = None) -> DataSource:
    made = source_format("pages", SCHEMA, cast(SubtaskTask, Task()), cast(StreamClient, stream or Stream()), 3)
    return made({})


def in_partition(number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    context = None if number is None else SimpleNamespace(partitionId=lambda: number)
    monkeypatch.setattr(TaskContext, "get", lambda: context)


def test_a_format_has_the_name_of_the_operator_and_the_schema_that_was_given() -> None:
    made = a_format()
    assert (type(made).name(), made.schema()) == ("pages", SCHEMA)


def test_each_subtask_is_a_partition_of_a_scan_and_runs_the_task_without_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = a_format().reader(SCHEMA)
    partitions = reader.partitions()
    assert [partition.value for partition in partitions] == [0, 1, 2]
    in_partition(1, monkeypatch)
    assert list(reader.read(partitions[1])) == [("row",)]


@pytest.mark.parametrize(("streams", "way_out"), [(False, "repartition(3) or cache()"), (True, "repartition(3) after")])
def test_a_partition_that_is_another_one_of_its_stage_is_refused_with_a_way_out(
    streams: bool, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = a_format()
    in_partition(4, monkeypatch)
    scan, stream = made.reader(SCHEMA), made.streamReader(SCHEMA)
    partition = stream.partitions(FIRST, SECOND)[1] if streams else scan.partitions()[1]
    with pytest.raises(RuntimeError, match="partition 1 of 'pages' is partition 4 of its stage") as refused:
        (stream if streams else scan).read(partition)
    assert way_out in str(refused.value)


def test_a_partition_that_is_planned_outside_a_task_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = a_format().reader(SCHEMA)
    in_partition(None, monkeypatch)
    assert list(reader.read(reader.partitions()[2])) == [("row",)]


def test_a_batch_is_read_by_as_many_tasks_as_it_has_splits_and_at_most_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(splits=2)
    reader = a_format(stream).streamReader(SCHEMA)
    batch = StreamBatch("s", 4, 6)
    partitions = reader.partitions(FIRST, SECOND)
    assert [partition.value for partition in partitions] == [(0, batch), (1, batch)]
    assert stream.asked == [("count", batch)]
    assert len(a_format(Stream(splits=9)).streamReader(SCHEMA).partitions(FIRST, SECOND)) == 3
    in_partition(1, monkeypatch)
    assert list(reader.read(partitions[1])) == [("row", "reader_of_batch", batch)]


def test_the_offsets_of_two_streams_make_no_batch() -> None:
    reader = a_format().streamReader(SCHEMA)
    with pytest.raises(StreamFailed, match="belong to two streams"):
        reader.partitions({"stream": "s", "batch": 1}, {"stream": "t", "batch": 2})


def test_a_query_begins_once_and_before_what_spark_was_told_last() -> None:
    stream = Stream()
    reader = a_format(stream).streamReader(SCHEMA)
    latest = cast(Any, reader).latestOffset(None, None)
    again = cast(Any, reader).latestOffset({"stream": "s", "batch": 1})
    assert reader.initialOffset() == reader.initialOffset() == {"stream": "s", "batch": 0}
    reader.commit(again)
    assert stream.asked == [
        ("latest", None, None),
        ("latest", {"stream": "s", "batch": 1}, latest),
        ("initial", again),
        ("commit", again),
    ]


def test_it_travels_to_a_process_that_does_not_find_the_packages() -> None:  # as Spark Connect starts it
    folder = Path(spark_bridge.__file__).parent.parent
    format_class = source_format(
        "pages", SCHEMA, SubtaskTask(SubtaskOperator, cast(Any, None)), cast(StreamClient, None), 3
    )
    pickled = cloudpickle.dumps(format_class({"path": "/a"}))  # type: ignore[no-untyped-call]
    program = (
        "import pickle, sys\n"
        "from pathlib import Path\n"
        "sys.path = [place for place in sys.path if place and not Path(place, 'spark_bridge').is_dir()]\n"
        "made = pickle.loads(sys.stdin.buffer.read())\n"
        "print(type(made).name(), made.options['path'], len(made.reader(made.schema()).partitions()), sys.path[-1])\n"
    )
    told = subprocess.run([sys.executable, "-c", program], input=pickled, capture_output=True, cwd="/", check=False)
    assert told.returncode == 0, told.stderr.decode()
    assert told.stdout.decode().split() == ["pages", "/a", "3", str(folder)]
    assert pickle.loads(pickled).name() == "pages"


@pytest.mark.parametrize("streams", [False, True])
def test_what_spark_sends_to_tasks_has_nothing_of_what_plans_a_stream(streams: bool) -> None:
    """H76: Spark sends the reader and, for the texts of errors, the data source. What is sent for planning has it."""
    made = a_format(Stream(splits=MARK))
    planned = cloudpickle.dumps(made)  # type: ignore[no-untyped-call]
    reader = made.streamReader(SCHEMA) if streams else made.reader(SCHEMA)
    assert MARK.to_bytes(4, "little") in planned
    for sent in (made, reader):
        assert MARK.to_bytes(4, "little") not in cloudpickle.dumps(sent)  # type: ignore[no-untyped-call]
