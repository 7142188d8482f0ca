# SPDX-License-Identifier: Apache-2.0

"""Redis Streams as a two-phase sink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from protocol.arguments import AT_LEAST_1, checked
from spark_bridge.common.extras import require
from spark_bridge.sinks.rows import check_columns
from spark_bridge.sinks.two_phase.errors import SinkMisused
from spark_bridge.sinks.two_phase.sink import SinkCommitterContext, SinkWriterContext, TwoPhaseSink

if TYPE_CHECKING:
    from spark_bridge.sinks.redis.driver import RedisCommitter
    from spark_bridge.sinks.redis.task import RedisWriter

COLUMNS_MAX = 3_900
"""A script of Redis can pass on 8,000 words, of which a field takes two."""


class RedisStreamsSink(TwoPhaseSink[Any]):
    """Entries of a Redis stream, exactly once. Needs ``pip install 'headgate[redis]'``, and Redis 5 or later.

    A record is a dict or a Spark ``Row`` with the columns' names, a tuple in their order, or an Arrow batch. Each row
    is an entry. Text and bytes become fields as they are, and NULL becomes no field. A decimal becomes its digits, and
    a date or time what Python's ``str`` makes of it, with its zone if it has one. Any other value becomes its JSON, a
    struct an object with the names, and decimals, dates and times in it are texts. A value without such a form, as
    bytes in an array, is refused with its column, before any row of the batch is written. Tasks
    add entries to staging streams, and the driver moves all entries of a checkpoint with one script, so readers see
    whole checkpoints. Meanwhile the server does nothing else: take checkpoints often enough that one has at most some
    100,000 entries. The entries get new ids.

    Exactly once only if Redis keeps what it has confirmed: set ``appendonly yes`` and ``appendfsync always`` in the
    server. Otherwise rows may be lost when the server dies. They may also be lost when a replica takes over, because
    Redis copies data to replicas only after it has confirmed it.

    In a cluster, all keys are in the slot of the stream, and ``url`` may be of any of its servers.

    Args:
        url: how to connect, from the driver and from every task: ``redis://user:password@host:6379/0``, or
            ``rediss://`` with TLS. It travels to the tasks in Spark's closure.
        stream: the key of the stream. It is created if it does not exist.
        columns: the columns to write.
        entries_max: about how many entries the stream keeps; older ones are dropped. None keeps all.
        name: distinguishes the sinks of one stream; by default the operator's id.

    Raises:
        SinkMisused: no columns, more than 3,900, or ``entries_max`` below 1.
    """

    atomic = True

    @checked(entries_max=AT_LEAST_1)
    def __init__(
        self, url: str, stream: str, columns: Sequence[str], *, entries_max: int | None = None, name: str | None = None
    ) -> None:
        check_columns(columns)
        if len(columns) > COLUMNS_MAX:
            raise SinkMisused(
                f"a stream takes at most {COLUMNS_MAX:,} columns in one command, not {len(columns):,}, from "
                f"{columns[COLUMNS_MAX]!r} on: leave some out, or write several as one struct"
            )
        self.name = name
        self._settings = (url, stream, tuple(columns), entries_max)

    @property
    def target(self) -> str:
        """The stream, without the host, which may change when a replica takes over."""
        return f"redis:{self._settings[1]}"

    def writer(self, context: SinkWriterContext) -> RedisWriter:
        require("redis", "redis")
        from spark_bridge.sinks.redis.task import RedisStream, RedisWriter

        return RedisWriter(context, RedisStream(*self._settings))

    def committer(self, context: SinkCommitterContext) -> RedisCommitter:
        require("redis", "redis")
        from spark_bridge.sinks.redis.driver import RedisCommitter
        from spark_bridge.sinks.redis.task import RedisStream

        return RedisCommitter(context, RedisStream(*self._settings))
