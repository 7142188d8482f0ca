# SPDX-License-Identifier: Apache-2.0

"""Kafka as a source, read over TCP from librdkafka's mock cluster in a separate process.

It has no compaction, no control records and no look-up of a time.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

from headgate import CheckpointConfig, chain
from headgate.errors import SourceDataLost
from headgate.sources import KafkaSource, SplitAt
from headgate.testing import OperatorTask, World, running_operator
from spark_bridge.sources.errors import SourceUnreachable
from spark_bridge.sources.kafka import task as reading
from spark_bridge.sources.kafka.task import KafkaReader
from tests.kafka_brokers import KafkaBrokers

pytestmark = pytest.mark.anyio

FAST: dict[str, Any] = {"config": {"fetch.wait.max.ms": 20}, "batch_rows": 7}
STREAMING: dict[str, Any] = {"mode": "streaming", "checkpoint": CheckpointConfig(tolerated_failures=9)}
_names = count()


@pytest.fixture
def topic(kafka: KafkaBrokers) -> str:
    """A new topic with three partitions."""
    name = f"orders-{next(_names)}"
    kafka.create_topic(name, 3)
    return name


def ids(batch: Any) -> list[int]:
    return [json.loads(value) for value in batch["value"].to_pylist()]


class Reading:
    """A reader without a Spark, and the outputs of one split."""

    def __init__(self, source: KafkaSource, split: Any, position: Any = None) -> None:
        make: Any = source.operator
        self.reader: KafkaReader = make()
        self.outputs = self.reader.read_from(split, position)

    def rest(self) -> list[tuple[Any, Any]]:
        """Read a split that ends."""
        try:
            return [item for item in self.outputs if item is not None]
        finally:
            self.reader.close()

    def until(self, records: int) -> list[int]:
        """Read so many records of a split that does not end."""
        found: list[int] = []
        for item in self.outputs:
            found += ids(item[1]) if item else []
            if len(found) >= records:
                return found
        raise AssertionError(f"the split has ended after {found}")


def test_records_are_rows_with_the_columns_of_sparks_own_source(kafka: KafkaBrokers, topic: str) -> None:  # H130
    kafka.append(topic, 1, ["a", "b"], key=b"k", headers=[("h", b"1"), ("h", None)], timestamp=1_700_000_000_123)
    source = KafkaSource(kafka.servers, [topic], bounded=True, **FAST)
    ((position, batch),) = Reading(source, [topic, 1, 2]).rest()
    assert (position, batch.schema) == (2, source.schema)
    assert batch.to_pylist()[0] == {
        "key": b"k",
        "value": b'"a"',
        "topic": topic,
        "partition": 1,
        "offset": 0,
        "timestamp": datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC),
        "timestampType": 0,
        "headers": [{"key": "h", "value": b"1"}, {"key": "h", "value": None}],
    }


def test_a_time_that_arrow_cannot_hold_is_refused_with_its_offset_and_any_other_is_kept(
    kafka: KafkaBrokers, topic: str
) -> None:  # H171
    times_ms = [1, 253_402_300_800_000, (2**63 - 1) // 1000]
    for at_ms in times_ms:
        kafka.append(topic, 0, [0], timestamp=at_ms)
    source = KafkaSource(kafka.servers, [topic], bounded=True, **FAST)
    first = source.splits()[0]
    [(_, batch)] = Reading(source, first.split, first.position).rest()
    assert batch["timestamp"].cast("int64").to_pylist() == [at_ms * 1000 for at_ms in times_ms]
    kafka.append(topic, 0, [0], timestamp=(2**63 - 1) // 1000 + 1)
    first = source.splits()[0]
    with pytest.raises(ValueError, match=f"partition 0 of topic '{topic}', offset 3: the timestamp .* without a check"):
        Reading(source, first.split, first.position).rest()


def test_a_bounded_source_ends_where_the_partitions_ended_when_the_run_began(kafka: KafkaBrokers, topic: str) -> None:
    kafka.append(topic, 0, range(20))
    source = KafkaSource(kafka.servers, [topic], bounded=True, **FAST)
    first, second, _ = source.splits()
    assert (first, second) == (SplitAt([topic, 0, 20], 0), SplitAt([topic, 1, 0], 0))
    kafka.append(topic, 0, range(20, 30))
    outputs = Reading(source, first.split, first.position).rest()
    assert [position for position, _ in outputs] == [7, 14, 20]
    assert [one for _, batch in outputs for one in ids(batch)] == list(range(20))
    assert [ids(batch) for _, batch in Reading(source, first.split, 14).rest()] == [list(range(14, 20))]
    assert Reading(source, second.split, second.position).rest() == []


def test_a_read_begins_and_ends_at_the_offsets_that_are_named(kafka: KafkaBrokers, topic: str) -> None:
    for partition in range(3):
        kafka.append(topic, partition, range(9))
    starts = {(topic, 0): 2, (topic, 1): 0, (topic, 2): 9}
    stops = {(topic, 0): 5, (topic, 1): 9, (topic, 2): 9}
    source = KafkaSource(kafka.servers, topic, start=starts, stop=stops, bounded=True, **FAST)
    assert source.splits() == [SplitAt([topic, 0, 5], 2), SplitAt([topic, 1, 9], 0), SplitAt([topic, 2, 9], 9)]
    assert [ids(batch) for _, batch in Reading(source, [topic, 0, 5], 2).rest()] == [[2, 3, 4]]
    latest = KafkaSource(kafka.servers, topic, start="latest", **FAST)
    assert [one.position for one in latest.splits()] == [9, 9, 9]
    assert [one.position for one in latest.splits(found_later=True)] == [0, 0, 0]
    with pytest.raises(ValueError, match=r"no offset for these partitions: .*, 2\)"):
        KafkaSource(kafka.servers, [topic], start={(topic, 0): 2, (topic, 1): 2}).splits()
    with pytest.raises(ValueError, match="the partition ends at 9"):
        KafkaSource(kafka.servers, [topic], start={**starts, (topic, 1): 10}).splits()
    kafka.expire(topic, 0, 4)
    with pytest.raises(ValueError, match="the oldest record there is 4"):
        source.splits()


def test_positions_of_times(kafka: KafkaBrokers, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mock cluster says of every time that nothing is as late, so the other answer is put in."""
    kafka.append(topic, 0, range(9))
    at = datetime(2026, 1, 1, tzinfo=UTC)
    source = KafkaSource(kafka.servers, [topic], start=at, **FAST)
    assert [one.position for one in source.splits()] == [9, 0, 0]
    asked: list[tuple[Any, int]] = []

    def offsets_at(_: Any, partitions: Any, at_ms: int) -> dict[Any, int | None]:
        asked.append((list(partitions), at_ms))
        return {(topic, 0): 4, (topic, 1): None, (topic, 2): 0}

    monkeypatch.setattr("spark_bridge.sources.kafka.driver._Asked.offsets_at", offsets_at)
    assert [one.position for one in source.splits()] == [4, 0, 0]
    assert asked == [([(topic, 0), (topic, 1), (topic, 2)], 1_767_225_600_000)]


def test_partitions_that_never_end_are_read_in_turns(kafka: KafkaBrokers, topic: str) -> None:
    kafka.append(topic, 0, range(100))
    source = KafkaSource(kafka.servers, [topic], **FAST)
    first = Reading(source, [topic, 0, None], 0)
    second = first.reader.read_from([topic, 1, None], 0)
    assert next(second) is None
    assert first.until(50) == list(range(56))
    assert first.reader.backlog([topic, 0, None], 56) == 44
    kafka.append(topic, 1, range(3))
    of_first: list[int] = []
    of_second: list[int] = []
    while len(of_second) < 3:
        for outputs, found in ((first.outputs, of_first), (second, of_second)):
            item = next(outputs)
            found.extend(ids(item[1]) if item else [])
    assert of_second == [0, 1, 2]
    assert of_first == list(range(56, 56 + len(of_first)))
    first.reader.close()


def test_a_partition_is_cut_where_it_is_now(kafka: KafkaBrokers, topic: str) -> None:  # H133
    source = KafkaSource(kafka.servers, [topic], **FAST)
    whole = [topic, 0, None]
    assert source.next_part(whole, 0) is None
    kafka.append(topic, 0, range(3))
    assert source.next_part(whole, 0) == (SplitAt([topic, 0, 3], 0), 3)
    assert source.next_part(whole, 3) is None
    kafka.append(topic, 0, range(3, 5))
    part, position = source.next_part(whole, 3) or (SplitAt("", ""), "")
    assert [ids(batch) for _, batch in Reading(source, part.split, part.position).rest()] == [[3, 4]]
    assert position == 5


# --- what must never be passed over in silence (H135) --------------------------------------------------------------


def test_records_that_were_deleted_before_they_were_read_fail_the_job(kafka: KafkaBrokers, topic: str) -> None:
    kafka.append(topic, 0, range(50))
    kafka.expire(topic, 0, 30)
    source = KafkaSource(kafka.servers, [topic], **FAST)
    with pytest.raises(SourceDataLost, match=rf"partition 0 of topic '{topic}': offset 10 and those up to 30 are gone"):
        Reading(source, [topic, 0, None], 10).until(1)
    with pytest.raises(SourceDataLost, match="offset 10 and those up to 30 are gone"):
        Reading(source, [topic, 0, 50], 10).rest()


def test_deleted_records_are_skipped_only_if_that_is_asked_for(
    kafka: KafkaBrokers, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    kafka.append(topic, 0, range(50))
    kafka.expire(topic, 0, 30)
    source = KafkaSource(kafka.servers, [topic], on_lost="skip", **FAST)
    assert [one for _, batch in Reading(source, [topic, 0, 50], 10).rest() for one in ids(batch)] == [*range(30, 50)]
    assert f"skipped records that were deleted: {topic}, partition 0, offsets 10 to 30" in caplog.messages


def test_a_topic_that_was_created_again_is_not_read_from_the_old_offset(kafka: KafkaBrokers, topic: str) -> None:
    kafka.append(topic, 0, range(50))
    kafka.delete_topic(topic)
    kafka.create_topic(topic, 3)
    for on_lost in ("fail", "skip"):
        source = KafkaSource(kafka.servers, [topic], on_lost=on_lost, **FAST)
        with pytest.raises(SourceDataLost, match="the position is offset 50, but the partition ends at 0"):
            Reading(source, [topic, 0, None], 50).until(1)


def test_a_source_keeps_a_connection_only_for_streams_and_only_while_somebody_has_it(
    kafka: KafkaBrokers, topic: str
) -> None:
    """Without a run of the garbage collector: it seldom sees the older part of a driver's heap."""
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir()))
    gc.disable()
    try:
        source = KafkaSource(kafka.servers, topic)
        split = source.splits()[0].split
        assert len(list(open_files.iterdir())) <= before
        source.next_part(split, None)
        assert len(list(open_files.iterdir())) > before
        del source
        assert len(list(open_files.iterdir())) <= before
    finally:
        gc.enable()


def test_a_missing_topic_is_named(kafka: KafkaBrokers, topic: str) -> None:
    for topics in (["nowhere"], "nowhere", [topic, "nowhere"]):
        with pytest.raises(ValueError, match=f"there is no topic 'nowhere' at {kafka.servers}"):
            KafkaSource(kafka.servers, topics).splits()
    assert KafkaSource(kafka.servers, "nowhere-*").splits() == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds in place of a minute."""
    monkeypatch.setattr("spark_bridge.sources.kafka.driver.ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(reading, "CHECK_EVERY_S", 0.1)
    monkeypatch.setattr(reading, "CHECK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(reading, "PATIENCE_S", 1.0)


@pytest.mark.usefixtures("impatient")
def test_brokers_that_cannot_be_reached_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    source = KafkaSource("127.0.0.1:1", ["orders"])
    with pytest.raises(SourceUnreachable, match=r"no broker at 127\.0\.0\.1:1 has answered ") as unreachable:
        source.splits()
    assert str(unreachable.value).count("Connection refused") == 1
    problems = source._asked_for_batches.problems
    for took_ms in (1, 2):  # each attempt to connect says this, with another number
        problems.add(KafkaError(KafkaError._TRANSPORT, f"Connect failed (after {took_ms}ms in state CONNECT)"))
    assert "; ".join(problems).count("Connect failed") == 1
    assert caplog.text == ""
    with pytest.raises(SourceUnreachable, match=r"partition 0 of topic 'orders' could not be reached for 1 s"):
        Reading(source, ["orders", 0, None], 0).until(1)


@pytest.mark.usefixtures("impatient")
def test_a_topic_that_is_deleted_while_it_is_read_fails_the_job(kafka: KafkaBrokers, topic: str) -> None:
    kafka.append(topic, 0, range(3))
    source = KafkaSource(kafka.servers, [topic], **FAST)
    one = Reading(source, [topic, 0, None], 0)
    assert one.until(3) == [0, 1, 2]
    kafka.delete_topic(topic)
    with pytest.raises(SourceDataLost, match="does not exist any more"):
        one.until(1)
    one.reader.close()


def test_brokers_that_stop_for_a_while_are_waited_for(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(reading, "CHECK_TIMEOUT_S", 0.05)
    failures: list[float] = []
    failed = reading._Partitions._failed

    def counted(partitions: Any, *args: Any) -> None:
        failures.append(time.monotonic())
        failed(partitions, *args)

    monkeypatch.setattr(reading._Partitions, "_failed", counted)
    brokers = KafkaBrokers()
    try:
        brokers.create_topic(topic, 1)
        brokers.append(topic, 0, range(3))
        one = Reading(KafkaSource(brokers.servers, [topic], **FAST), [topic, 0, None], 0)
        assert one.until(3) == [0, 1, 2]
        brokers.stop_all()
        while not failures:
            assert next(one.outputs) is None
        brokers.stop_all(False)
        brokers.append(topic, 0, range(3, 6))
        assert one.until(3) == [3, 4, 5]
        one.reader.close()
    finally:
        brokers.close()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"start": "old"}, "start must be"),
        ({"start": datetime(2026, 1, 1)}, "start must be a datetime with a time zone"),  # noqa: DTZ001 - that is the mistake
        ({"stop": {("orders", 0): 1}}, "pass bounded=True too"),
        ({"isolation_level": "serializable"}, "isolation_level must be"),
        ({"on_lost": "ignore"}, "on_lost must be"),
        ({"batch_rows": 0}, "at least 1"),
        ({"topics": []}, "must be a list of names, or a pattern"),
        ({"config": {"auto.offset.reset": "earliest"}}, r"config must not have \['auto.offset.reset'\]"),
    ],
)
def test_wrong_settings_are_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        KafkaSource("nowhere:9092", **{"topics": ["orders"], **more})


def test_secrets_are_not_shown(kafka: KafkaBrokers) -> None:
    source = KafkaSource(kafka.servers, ["orders"], config={"sasl.password": "hidden"})
    assert "hidden" not in f"{source} {source.operator} {source._settings}"


# --- with checkpoints ----------------------------------------------------------------------------------------------


async def until(world: World, holds: Callable[[], bool], *, what: str) -> None:
    for _ in range(300):
        if holds():
            return
        await world.advance(0.2)
    raise AssertionError(f"never: {what}")


def read_by(tasks: list[OperatorTask]) -> list[int]:
    return sorted(one for task in tasks for batch in task.outputs for one in ids(batch))


async def checkpoint(world: World) -> Any:
    answer = world.begin_checkpoint()
    await until(world, lambda: answer.done, what="the checkpoint completes")
    return world.checkpoints[-1]


async def test_partitions_are_shared_out_and_new_ones_are_read_from_their_beginning(kafka: KafkaBrokers) -> None:
    """H131, H135: with ``start="latest"`` too, or what is written before they are found would be lost."""
    prefix = f"found-{next(_names)}"
    kafka.create_topic(f"{prefix}-a", 4)
    kafka.append(f"{prefix}-a", 0, [999])
    source = KafkaSource(kafka.servers, f"{prefix}-*", start="latest", discover_every_s=1.0, **FAST)
    async with running_operator(source.coordinator, parallelism=2, **STREAMING) as world:
        tasks = [await world.launch_operator(0, source.operator)]
        await world.advance(1.0)  # it has asked again and again before the other one begins
        tasks.append(await world.launch_operator(1, source.operator))
        await world.advance(0.5)
        for partition in range(4):
            kafka.append(f"{prefix}-a", partition, [partition])
        await until(world, lambda: read_by(tasks) == [0, 1, 2, 3], what="all partitions are read")
        assert all(len(task.outputs) == 2 for task in tasks), "each task has two of the four partitions"
        restored = await checkpoint(world)
    kafka.create_topic(f"{prefix}-b", 2)
    kafka.append(f"{prefix}-b", 1, range(4, 9))
    kafka.append(f"{prefix}-a", 3, [9])
    async with running_operator(source.coordinator, parallelism=2, restored=restored, **STREAMING) as world:
        tasks = [await world.launch_operator(subtask, source.operator) for subtask in range(2)]
        await until(world, lambda: read_by(tasks) == [*range(4, 10)], what="what was written meanwhile is read")


async def test_offsets_of_completed_checkpoints_are_committed_for_others_and_never_read(
    kafka: KafkaBrokers, topic: str
) -> None:
    kafka.append(topic, 0, range(10))
    group = f"watched-{topic}"
    watcher = Consumer({"bootstrap.servers": kafka.servers, "group.id": group})

    def committed() -> list[int]:
        found = watcher.committed([TopicPartition(topic, partition) for partition in range(2)], timeout=60)
        return [one.offset for one in found]

    source = KafkaSource(kafka.servers, [topic], group=group, **FAST)
    async with running_operator(source.coordinator, parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, source.operator)
        await until(world, lambda: read_by([task]) == [*range(10)], what="all is read")
        assert committed() == [-1001, -1001], "only a checkpoint commits"
        await checkpoint(world)
        await until(world, lambda: committed() == [10, -1001], what="the offsets of the checkpoint are committed")
    async with running_operator(source.coordinator, parallelism=1, **STREAMING) as world:
        task = await world.launch_operator(0, source.operator)
        await until(world, lambda: read_by([task]) == [*range(10)], what="without a checkpoint, all is read again")
    watcher.close()


async def test_a_bounded_read_of_the_next_day_that_names_its_start_begins_there(
    kafka: KafkaBrokers, topic: str
) -> None:  # H174
    restored: Any = None
    for day in range(3):
        for partition in range(3):
            kafka.append(topic, partition, range(100 * day + 10 * partition, 100 * day + 10 * partition + 5))
        start = {(topic, part): 5 * max(0, day - 1) for part in range(3)}
        source = KafkaSource(kafka.servers, [topic], bounded=True, start=start, **FAST)
        async with running_operator(chain(read=source), parallelism=2, mode="streaming", restored=restored) as world:
            tasks = [await world.launch_operator(subtask) for subtask in range(2)]
            await until(world, lambda: all(task.outcome == "success" for task in world.tasks), what="the day's end")
            await world.advance(1.0)
            restored = world.checkpoints[-1]
        days = range(max(0, day - 1), day + 1)
        expected = [100 * one + 10 * part + row for one in days for part in range(3) for row in range(5)]
        assert sorted(read_by(tasks)) == expected
