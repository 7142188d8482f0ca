# SPDX-License-Identifier: Apache-2.0

"""The driver's half of a Kafka source: finds the partitions, and where each begins and ends."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from functools import cached_property, partial
from operator import gt, itemgetter
from typing import Any, Literal, TypeVar
from zlib import crc32

import pyarrow
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from actors.coordination import SplitEnumerator
from actors.coordination.sources.enumerators import (
    BoundedLogEnumerator,
    DiscoveringSplitEnumerator,
    OwnedSplitEnumerator,
)
from protocol.arguments import AT_LEAST_1, POSITIVE, checked
from protocol.describing import show
from protocol.source_events import SplitAt
from spark_bridge.sources.errors import SourceUnreachable
from spark_bridge.sources.kafka.task import CHECK, OWN_CONFIG, SCHEMA, KafkaClient, KafkaReader, KafkaSettings
from spark_bridge.sources.source import Source
from spark_bridge.subtask.source import SplitReader

ANSWER_TIMEOUT_S = 30.0
"""How long the brokers may take for one answer."""

_Offsets = Mapping[tuple[str, int], int]
_Answer = TypeVar("_Answer")


class KafkaSource(Source):
    """Reads topics of Kafka as Arrow batches. Needs ``pip install 'headgate[kafka,dataframe]'``.

    The columns are those of Spark's own Kafka source: ``key`` and ``value`` (binary), ``topic``, ``partition``,
    ``offset``, ``timestamp``, ``timestampType`` and ``headers``. Each partition is read by one task, in the order of
    its offsets.

    Exactly once for each record that the brokers keep until it is read. A position is an offset, and the checkpoints
    have the positions: consumer groups decide nothing. If the brokers have deleted records before they were read, the
    job fails with ``SourceDataLost``; it never continues at another offset by itself.

    Args:
        servers: how to find the brokers, from the driver and from every task: ``"host1:9092,host2:9092"``.
        topics: their names; or a pattern such as ``"orders-*"``, for all topics with such a name.
        start: where to begin when there is no checkpoint: ``"earliest"``; ``"latest"``, for records that are written
            after the run has begun; a ``datetime`` with a time zone, for the first record of each partition at that
            time or later; or the offset of each partition, ``{("orders", 0): 1200, ...}``. A partition that is found
            later is read from its beginning.
        bounded: end where each partition ended when the run began. In streaming mode, the run after that reads what has
            come since, unless ``start`` is given as offsets or a time. Otherwise the source never ends.
        stop: where a bounded read ends instead, as a ``datetime`` or as offsets, which are not read themselves.
        discover_every_s: look for new partitions and topics so often, in seconds; None for never. Not if it is bounded.
        isolation_level: ``"read_committed"`` leaves out the records of transactions that are open or were aborted;
            ``"read_uncommitted"`` reads them.
        group: commit the offsets that a completed checkpoint covers to this consumer group, so that tools which look at
            groups show how far the job is. Nothing is read from there. None commits nothing.
        on_lost: ``"fail"``, or ``"skip"``: if the brokers have deleted records that were not read, continue with the
            oldest that there are, and write a warning to the task's log.
        batch_rows: how many records a batch has at most.
        rate_limit_per_s: how many records all tasks together read in a second; None for no limit.
        config: further settings of librdkafka, such as ``{"security.protocol": "SASL_SSL", "sasl.username": ...}``.
            Like ``servers``, they travel to the tasks in Spark's closure.

    Raises:
        ValueError: no topics, an unknown word, a time without a time zone, a number that is not positive, or a setting
            in ``config`` that this source makes itself.
    """

    @checked(batch_rows=AT_LEAST_1, rate_limit_per_s=POSITIVE)
    def __init__(
        self,
        servers: str,
        topics: Sequence[str] | str,
        *,
        start: Literal["earliest", "latest"] | datetime | _Offsets = "earliest",
        bounded: bool = False,
        stop: datetime | _Offsets | None = None,
        discover_every_s: float | None = 30.0,
        isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed",
        group: str | None = None,
        on_lost: Literal["fail", "skip"] = "fail",
        batch_rows: int = 1_000,
        rate_limit_per_s: float | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if not topics:
            raise ValueError(f"topics must be a list of names, or a pattern, not {show(topics)}")
        for name, where in (("start", start), ("stop", stop)):
            if isinstance(where, datetime) and where.tzinfo is None:
                raise ValueError(f"{name} must be a datetime with a time zone, such as datetime.now(UTC), not {where}")
            if isinstance(where, Mapping) and not where:
                raise ValueError(
                    f"{name} must have the offset of each partition, such as {{('orders', 0): 17}}, not {{}}"
                )
        if stop is not None and not bounded:
            raise ValueError("stop is where a bounded read ends: pass bounded=True too")
        own = sorted(OWN_CONFIG.intersection(config or ()))
        if own:
            raise ValueError(f"config must not have {own}: the source sets them itself, some from its parameters")
        self.schema: pyarrow.Schema = SCHEMA
        """The columns, as a ``pyarrow.Schema``."""
        self._topics = topics if isinstance(topics, str) else tuple(topics)
        self._start = start
        self._bounded = bounded
        self._stop = stop
        self._discover_every_s = None if bounded else discover_every_s
        self._settings = KafkaSettings(
            servers, isolation_level, group, batch_rows, on_lost == "skip", dict(config or {})
        )
        self._rate_limit_per_s = rate_limit_per_s

    def __repr__(self) -> str:
        return f"KafkaSource({self._topics!r})"

    @cached_property
    def _asked_for_batches(self) -> _Asked:
        """Kept, because a stream asks before each micro-batch, once for each partition."""
        return _Asked(self._settings)

    @checked()
    def splits(self, *, found_later: bool = False) -> list[SplitAt]:
        """The partitions that exist now, each from where it is to be read. Blocks.

        ``found_later``: partitions that were not there at the beginning are read from their beginning.

        Raises ``SourceUnreachable``; ``ValueError`` if a topic is missing, ``start`` or ``stop`` name no offset of a
        partition, or an offset of ``start`` is not there.
        """
        # Not kept until the next look: a source that ended stays in the heap until a full run of the garbage collector.
        with closing(_Asked(self._settings)) as asked:
            found = asked.partitions(self._topics)
            ranges = {one: asked.ends_of(one) for one in found}
            starts = {one: low for one, (low, _) in ranges.items()}
            ends: dict[tuple[str, int], int | None] = dict.fromkeys(found)
            if not found_later and self._start != "earliest":
                starts = _places("start", self._start, ranges, asked)
            if self._bounded:
                ends |= _places("stop", self._stop or "latest", ranges, asked)
        return [SplitAt([*one, ends[one]], starts[one]) for one in found]

    def enumerator(self, state: bytes | None, previous: SplitEnumerator | None = None) -> DiscoveringSplitEnumerator:
        looks = 0 if state is None else 1

        def look() -> list[SplitAt]:
            nonlocal looks
            found = self.splits(found_later=looks > 0)
            looks += 1
            return found

        if self._bounded:
            enumerator = BoundedLogEnumerator(look, state, key=_name, end=itemgetter(2), is_later=gt)
            enumerator.continues_with_other_input = isinstance(self._start, str)  # otherwise each run has its own start
            return enumerator
        return OwnedSplitEnumerator(look, state, every_s=self._discover_every_s, key=_name, place=_place)

    def next_part(self, split: Any, position: Any) -> tuple[Any, Any] | None:
        topic, partition, until = split
        if until is not None:
            return super().next_part(split, position)
        low, end = self._asked_for_batches.ends_of((topic, partition))
        begin = low if position is None else position
        return None if end <= begin else (SplitAt([topic, partition, end], begin), end)

    @property
    def operator(self) -> Callable[[], SplitReader]:
        return partial(KafkaReader, self._settings, self._rate_limit_per_s)


def _places(
    name: str, where: str | datetime | _Offsets, ranges: dict[tuple[str, int], tuple[int, int]], asked: _Asked
) -> dict[tuple[str, int], int]:
    if isinstance(where, str):
        return {one: high for one, (_, high) in ranges.items()}
    if isinstance(where, datetime):
        at = asked.offsets_at(ranges, round(where.timestamp() * 1000))
        return {one: high if at[one] is None else at[one] or 0 for one, (_, high) in ranges.items()}
    missing = [one for one in ranges if one not in where]
    if missing:
        raise ValueError(f"{name} has no offset for these partitions: {missing}; give one for each")
    if name == "start":
        _check_starts(where, ranges)
    return {one: where[one] for one in ranges}


def _check_starts(where: _Offsets, ranges: dict[tuple[str, int], tuple[int, int]]) -> None:
    for one, (low, high) in ranges.items():
        if where[one] < low:
            raise ValueError(
                f"start must not be before the oldest record of {one}, but is offset {where[one]}, and the oldest "
                f'record there is {low}: begin there, or at "earliest"'
            )
        if where[one] > high:
            raise ValueError(
                f"start must not be after the end of {one}, but is offset {where[one]}, and the partition ends at "
                f"{high}: begin there at the latest"
            )


def _name(split: Any) -> str:
    return f"{split[0]}:{split[1]}"


def _place(split: Any) -> int:
    return crc32(split[0].encode()) + int(split[1])


class _Asked(KafkaClient):
    """A client that asks the brokers. For worker threads, one at a time or several."""

    def partitions(self, topics: Sequence[str] | str) -> list[tuple[str, int]]:
        """The partitions of the topics, in order."""
        if isinstance(topics, str):
            found = self._metadata(None)
            names = sorted(fnmatch.filter(found, topics))
            if not topics.startswith("_"):
                names = [one for one in names if not one.startswith("__")]  # the brokers' own topics
            if not names and not any(letter in topics for letter in "*?["):
                names = [topics]
        else:
            found, names = {}, list(topics)
        for name in names:
            metadata = found.get(name) or self._metadata(name)[name]
            if metadata.error is not None and metadata.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise ValueError(
                    f"there is no topic {name!r} at {self.servers}: create it, or correct the name. A pattern such as "
                    "'orders-*' may match no topic yet"
                )
            if metadata.error is not None:
                raise SourceUnreachable(f"topic {name!r} cannot be read: {metadata.error.str()}. {CHECK}")
            found[name] = metadata
        return [(name, number) for name in names for number in sorted(found[name].partitions)]

    def _metadata(self, topic: str | None) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            topics: dict[str, Any] = self.consumer.list_topics(topic, timeout=ANSWER_TIMEOUT_S).topics
            return topics

        return self._answer("the topics", ask)

    def ends_of(self, partition: tuple[str, int]) -> tuple[int, int]:
        """The first offset that a partition has, and the one after the last that may be read."""
        return self._answer(
            f"partition {partition[1]} of topic {partition[0]!r}",
            lambda: self.range_of(partition, timeout_s=ANSWER_TIMEOUT_S),
        )

    def offsets_at(self, partitions: Iterable[tuple[str, int]], at_ms: int) -> dict[tuple[str, int], int | None]:
        """The offset of the first record at that time or later; None if there is none."""
        asked = [TopicPartition(*one, at_ms) for one in partitions]
        found = self._answer("a time", lambda: self.consumer.offsets_for_times(asked, timeout=ANSWER_TIMEOUT_S))
        for one in found:
            if one.error is not None:
                raise SourceUnreachable(
                    f"partition {one.partition} of topic {one.topic!r} cannot be read: {one.error.str()}. {CHECK}"
                )
        return {(one.topic, one.partition): one.offset if one.offset >= 0 else None for one in found}

    def _answer(self, what: str, ask: Callable[[], _Answer]) -> _Answer:
        try:
            with self.secrets.kept():
                return ask()
        except KafkaException as error:
            [said, *_] = error.args  # what librdkafka says, or what is left of it
            self.consumer.poll(0)  # calls ``error_cb``; nothing is assigned to a client that only asks
            said = "; ".join((said.str() if hasattr(said, "str") else str(said), *self.problems))
            raise SourceUnreachable(
                f"no broker at {self.servers} has answered when it was asked for {what}: {said}. Check that "
                "the brokers run, that this host can reach them, and the settings in config"
            ) from error
