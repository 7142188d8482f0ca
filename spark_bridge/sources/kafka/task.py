# SPDX-License-Identifier: Apache-2.0

"""The tasks' half of a Kafka source: reads partitions as Arrow batches, and knows its position after each.

A split is ``[topic, partition, until]``: ``until`` is the first offset that does not belong to the split, or None if it
never ends. A position is the offset of the next record. The client is told to read from there and to report an offset
that the brokers do not have; it never chooses another one itself, and takes no part in a consumer group.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from spark_bridge.common.secret_texts import Secrets
from spark_bridge.sources.errors import SourceDataLost, SourceUnreachable
from spark_bridge.subtask.source import SplitReader

CHECK = "Check the brokers in servers=, the name of the topic, and what the client may do (config=)"

_FIXED_CONFIG = {
    "auto.offset.reset": "error",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
}
_OF_PARAMETERS = ("bootstrap.servers", "error_cb", "group.id", "group.instance.id", "isolation.level", "logger")
OWN_CONFIG = frozenset((*_FIXED_CONFIG, *_OF_PARAMETERS))
"""What a user must not set in the client's configuration, because the positions depend on it, or it has a parameter."""

OPEN_MAX = 100_000
POLL_S = 0.05
"""How long a reader waits for records if none of its partitions has any."""
CHECK_EVERY_S = 5.0
"""A partition that is quiet for so long is asked whether it can still be reached."""
CHECK_TIMEOUT_S = 1.0
PATIENCE_S = 60.0
"""How long a partition that cannot be reached is waited for."""

_log = logging.getLogger(__name__)
_Key = tuple[str, int]


@dataclass(frozen=True)
class KafkaSettings:
    """What both halves know. ``group`` is None if no offsets are committed."""

    servers: str
    isolation_level: str
    group: str | None
    batch_rows: int
    skip_lost: bool
    config: dict[str, Any] = field(repr=False)


_WHEN = re.compile(r" \(after \d+ms in state \w+\)")
"""What librdkafka adds to one and the same problem, each time with another number."""


class KafkaClient:
    """A consumer that reads the partitions it is told to, and the last errors that it has reported."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.servers = settings.servers
        self.secrets = Secrets("config", settings.config)
        self.problems = _Problems(self.secrets)
        # Not a method of this client: in a cycle, sockets stay open until a full run of the garbage collector.
        own = {
            "bootstrap.servers": settings.servers,
            "group.id": settings.group or "headgate",
            "isolation.level": settings.isolation_level,
            "error_cb": self.problems.add,
        }
        # Below "critical", librdkafka logs each of many attempts to connect. Whatever fails for long is raised.
        quiet = {"client.id": "headgate", "log_level": 2}
        with self.secrets.kept():
            self.consumer = Consumer({**quiet, **settings.config, **_FIXED_CONFIG, **own}, logger=_log)

    def range_of(self, key: _Key, timeout_s: float) -> tuple[int, int]:
        """The first offset that a partition has, and the one after its last. Raises ``KafkaException``."""
        low, high = self.consumer.get_watermark_offsets(TopicPartition(*key), timeout=timeout_s)
        return low, high

    def close(self) -> None:
        self.consumer.close()


class _Problems(deque[str]):
    """The last errors that a client has reported, each once."""

    def __init__(self, secrets: Secrets) -> None:
        super().__init__(maxlen=3)
        self._secrets = secrets

    def add(self, error: KafkaError) -> None:
        said = self._secrets.shown(_WHEN.sub("", error.str()))
        if said not in self:
            self.append(said)


class KafkaReader(SplitReader):
    """Reads the splits of a ``KafkaSource``: yields ``pyarrow.RecordBatch`` objects, all with one schema.

    A reader has one client for all its partitions. Partitions that never end are read in turns; those that end, one
    after the other, so that a task which is free takes the next.
    """

    def __init__(self, settings: KafkaSettings, rate_limit_per_s: float | None) -> None:
        self._settings = settings
        self.rate_limit_per_s = rate_limit_per_s
        self._partitions: _Partitions | None = None
        self._positions: dict[_Key, int] = {}
        self._at_checkpoints: dict[int, dict[_Key, int]] = {}

    def read_from(self, split: Any, position: Any, /) -> Iterator[tuple[Any, pyarrow.RecordBatch] | None]:
        topic, partition, until = split
        self.splits_open_max = OPEN_MAX if until is None else 1
        if until is not None and position is not None and position >= until:
            return
        if self._partitions is None:
            self._partitions = _Partitions(self._settings)
        partitions, key = self._partitions, (topic, partition)
        partitions.open(key, position)
        while True:
            messages = partitions.take(key)
            due = [one for one in messages if until is None or _offset(one) < until]
            if due:
                position = self._positions[key] = _offset(due[-1]) + 1
                yield position, _batch(topic, partition, due)
            if until is not None and partitions.has_reached(key, until, len(due) < len(messages), position):
                partitions.close(key)
                return
            if not due:
                yield None

    def weight(self, output: pyarrow.RecordBatch) -> float:
        return float(output.num_rows)

    def backlog(self, split: Any, position: Any) -> int | None:
        topic, partition, until = split
        high = None if self._partitions is None else self._partitions.end_of((topic, partition))
        if high is None or position is None:
            return None
        end = high if until is None else min(high, until)
        return max(0, int(end - position))

    def close(self) -> None:
        partitions, self._partitions = self._partitions, None
        if partitions is not None:
            partitions.client.close()

    # --- offsets for others to look at ----------------------------------------------------------------------------

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        if self._settings.group is not None:
            self._at_checkpoints[checkpoint_id] = dict(self._positions)
        return super().snapshot_state(checkpoint_id)

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Commit what the checkpoint covers to the group. Nothing is read from there, so a failure is only logged."""
        positions = self._at_checkpoints.pop(checkpoint_id, None)
        for older in [one for one in self._at_checkpoints if one < checkpoint_id]:
            del self._at_checkpoints[older]
        if positions and self._partitions is not None:
            self._partitions.commit(positions)


class _Partitions:
    """The partitions that are open, and the records of each that the client has delivered already.

    At most about two batches are kept here. The client has its own buffer, which its configuration bounds.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self.client = KafkaClient(settings)
        self._settings = settings
        self._open: dict[_Key, _Partition] = {}
        self._buffered = 0
        self._next_check_at = 0.0

    def open(self, key: _Key, position: int | None) -> None:
        at = OFFSET_BEGINNING if position is None else position
        self._open[key] = _Partition(position)
        self.client.consumer.incremental_assign([TopicPartition(*key, at)])

    def close(self, key: _Key) -> None:
        self._buffered -= len(self._open.pop(key).messages)
        self.client.consumer.incremental_unassign([TopicPartition(*key)])

    def take(self, key: _Key) -> list[Message]:
        """The next records of a partition, at most a batch; none if there are none now.

        Raises ``SourceDataLost`` or ``SourceUnreachable``.
        """
        partition = self._open[key]
        if not partition.messages and self._buffered < self._settings.batch_rows:
            self._poll(0.0 if self._buffered else POLL_S / len(self._open))
        if partition.messages:
            count = min(len(partition.messages), self._settings.batch_rows)
            messages = [partition.messages.popleft() for _ in range(count)]
            self._buffered -= count
            partition.position = _offset(messages[-1]) + 1
            return messages
        if partition.error is not None:
            self._handle(key, partition, partition.error)
        elif time.monotonic() > max(self._next_check_at, partition.heard_at + CHECK_EVERY_S):
            self._next_check_at = time.monotonic() + CHECK_TIMEOUT_S * 2
            self._check(key, partition)
        return []

    def has_reached(self, key: _Key, until: int, has_more: bool, position: int | None) -> bool:
        """Whether nothing below ``until`` is left, although the last offsets may have no record that is shown."""
        partition = self._open[key]
        is_at_end = partition.end is not None and partition.end >= until and not partition.messages
        return has_more or is_at_end or (position is not None and position >= until)

    def end_of(self, key: _Key) -> int | None:
        """Where a partition ended when it was last read from."""
        at = TopicPartition(*key)
        high = int(self.client.consumer.get_watermark_offsets(at, cached=True)[1])
        return high if high >= 0 else None

    def commit(self, positions: dict[_Key, int]) -> None:
        offsets = [TopicPartition(*key, position) for key, position in positions.items()]
        try:
            self.client.consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            _log.warning("committing offsets to the group %r failed: %s", self._settings.group, error)

    def _poll(self, timeout_s: float) -> None:
        for message in self.client.consumer.consume(self._settings.batch_rows, timeout_s):
            error = message.error()
            partition = self._open.get((message.topic() or "", message.partition() or 0))
            if partition is None:
                if error is not None and error.fatal():
                    raise SourceUnreachable(f"the client of Kafka has failed: {error.str()}. {CHECK}")
                continue
            partition.heard_at, partition.failing_since = time.monotonic(), None
            if error is None:
                partition.messages.append(message)
                self._buffered += 1
            elif error.code() == KafkaError._PARTITION_EOF:
                partition.end = message.offset()
            else:
                partition.error = error

    def _handle(self, key: _Key, partition: _Partition, error: KafkaError) -> None:
        """What the client has said of one partition, after all records before were taken."""
        topic, number = key
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._handle_lost(key, partition, error)
        elif error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
            raise _gone(key)
        elif error.retriable():
            partition.error = None
        else:
            raise SourceUnreachable(f"partition {number} of topic {topic!r} cannot be read: {error.str()}. {CHECK}")

    def _handle_lost(self, key: _Key, partition: _Partition, error: KafkaError) -> None:
        topic, number = key
        try:
            low, high = self.client.range_of(key, timeout_s=CHECK_TIMEOUT_S)
        except KafkaException as unknown:
            self._failed(key, partition, unknown.args[0])
            return  # the range is needed to say what is gone, so it is asked for again
        position = partition.position
        if position is not None and position < low and self._settings.skip_lost:
            _log.warning("skipped records that were deleted: %s, partition %d, offsets %d to %d", *key, position, low)
            self.close(key)
            self.open(key, low)
            return
        where = f"partition {number} of topic {topic!r}"
        if position is None or low <= position <= high:
            raise SourceUnreachable(f"{where} cannot be read from offset {position} on: {error.str()}. {CHECK}")
        if position < low:
            text = (
                f"offset {position} and those up to {low} are gone, because they were deleted before they were read. "
                "Let the brokers keep records for longer than the job may be down. To continue without these records, "
                'set on_lost="skip"'
            )
        else:
            text = (
                f"the position is offset {position}, but the partition ends at {high}: the topic was created again, or "
                "the brokers have lost records. Start again without a checkpoint"
            )
        raise SourceDataLost(f"{where}: {text}")

    def _check(self, key: _Key, partition: _Partition) -> None:
        """Ask whether a quiet partition can be reached. The client itself would wait for it without end."""
        try:
            self.client.range_of(key, timeout_s=CHECK_TIMEOUT_S)
        except KafkaException as error:
            self._failed(key, partition, error.args[0])
        else:
            partition.heard_at, partition.failing_since = time.monotonic(), None

    def _failed(self, key: _Key, partition: _Partition, error: KafkaError) -> None:
        now = time.monotonic()
        partition.heard_at = now
        if partition.failing_since is None:
            partition.failing_since = now
        if now - partition.failing_since < PATIENCE_S:
            return
        if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
            raise _gone(key)
        raise SourceUnreachable(
            f"partition {key[1]} of topic {key[0]!r} could not be reached for {PATIENCE_S:g} s: {error.str()}. Check "
            f"that the brokers at {self._settings.servers} run and that this host can reach them"
        )


@dataclass(slots=True)
class _Partition:
    """``position``: the offset after the last record that was taken. ``end``: where the client has met the end."""

    position: int | None
    messages: deque[Message] = field(default_factory=deque)
    end: int | None = None
    error: KafkaError | None = None
    heard_at: float = field(default_factory=time.monotonic)
    failing_since: float | None = None


def _gone(key: _Key) -> SourceDataLost:
    return SourceDataLost(
        f"partition {key[1]} of topic {key[0]!r} does not exist any more: the topic was deleted, or created again with "
        "fewer partitions. Start again without a checkpoint, or read other topics"
    )


def _offset(message: Message) -> int:
    return int(message.offset() or 0)


# --- Arrow ------------------------------------------------------------------------------------------------------------


SCHEMA = pyarrow.schema(
    [
        ("key", pyarrow.binary()),
        ("value", pyarrow.binary()),
        ("topic", pyarrow.string()),
        ("partition", pyarrow.int32()),
        ("offset", pyarrow.int64()),
        ("timestamp", pyarrow.timestamp("us", "UTC")),
        ("timestampType", pyarrow.int32()),
        ("headers", pyarrow.list_(pyarrow.struct([("key", pyarrow.string()), ("value", pyarrow.binary())]))),
    ]
)
"""The columns of Spark's own Kafka source, in its order."""


def _microseconds(topic: str, partition: int, message: Message) -> int | None:
    type_, at_ms = message.timestamp()
    if not type_:
        return None
    at_us = at_ms * 1000
    if not -(2**63) <= at_us < 2**63:
        raise ValueError(
            f"partition {partition} of topic {topic!r}, offset {message.offset()}: the timestamp {at_ms} ms is beyond "
            "what a timestamp of Arrow and Spark holds. Correct its producer, and begin after this record: give start= "
            "with the offset of each partition, without a checkpoint"
        )
    return at_us


def _batch(topic: str, partition: int, messages: list[Message]) -> pyarrow.RecordBatch:
    times = [one.timestamp() for one in messages]
    columns: list[list[Any]] = [
        [one.key() for one in messages],
        [one.value() for one in messages],
        [topic] * len(messages),
        [partition] * len(messages),
        [one.offset() for one in messages],
        [_microseconds(topic, partition, message) for message in messages],
        [type_ - 1 for type_, _ in times],
        [[{"key": one[0], "value": one[1]} for one in message.headers() or ()] for message in messages],
    ]
    return pyarrow.RecordBatch.from_arrays(list(map(pyarrow.array, columns, SCHEMA.types)), schema=SCHEMA)
