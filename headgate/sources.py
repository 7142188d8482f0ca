# SPDX-License-Identifier: Apache-2.0

"""Sources that read an input exactly once, and what your own source or enumerator is made of.

A source has two halves: an enumerator on the driver hands out splits, and readers in the tasks read them::

    from headgate import chain
    from headgate.sources import FileSource

    orders = chain(read=FileSource("/data/in/*.json"), parse=parse)

``SourceCoordinator``, ``StaticSplitEnumerator`` and ``SplitReader`` hand out a fixed list of work; they are in
``headgate``.

Ready-made sources:
    ``FileSource`` reads files, ``KafkaSource`` topics of Kafka, ``PostgresSource`` a table and then its changes, and
    ``RedisStreamsSource`` Redis Streams. A ``HybridSource`` reads several sources, one after the other.
Your own source:
    A ``Source`` has both halves. A ``SplitAt`` is a split that is read from a position on.
Your own enumerator:
    A ``SplitEnumerator`` decides who gets which split, and is given a ``SplitEnumeratorContext``.
    ``DiscoveringSplitEnumerator`` looks for new splits.

As in ``headgate``, a name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate._lazy import lazy

if TYPE_CHECKING:
    from actors.coordination.enumerators import DiscoveringSplitEnumerator
    from actors.coordination.source import SplitEnumerator, SplitEnumeratorContext
    from protocol.source_events import SplitAt
    from spark_bridge.sources.files.driver import FileSource
    from spark_bridge.sources.kafka.driver import KafkaSource
    from spark_bridge.sources.postgres.driver import PostgresSource
    from spark_bridge.sources.redis.driver import RedisStreamsSource
    from spark_bridge.sources.source import HybridSource, Source

_MODULES = {
    # Ready-made sources
    "FileSource": "spark_bridge.sources.files.driver",
    "KafkaSource": "spark_bridge.sources.kafka.driver",
    "PostgresSource": "spark_bridge.sources.postgres.driver",
    "RedisStreamsSource": "spark_bridge.sources.redis.driver",
    "HybridSource": "spark_bridge.sources.source",
    # Your own source
    "Source": "spark_bridge.sources.source",
    "SplitAt": "protocol.source_events",
    # Your own enumerator
    "SplitEnumerator": "actors.coordination.source",
    "SplitEnumeratorContext": "actors.coordination.source",
    "DiscoveringSplitEnumerator": "actors.coordination.enumerators",
}

__all__ = [  # noqa: RUF022 - grouped by use, as in the docstring
    # Ready-made sources
    "FileSource",
    "KafkaSource",
    "PostgresSource",
    "RedisStreamsSource",
    "HybridSource",
    # Your own source
    "Source",
    "SplitAt",
    # Your own enumerator
    "SplitEnumerator",
    "SplitEnumeratorContext",
    "DiscoveringSplitEnumerator",
]

if not TYPE_CHECKING:  # a type checker reports a name that does not exist
    __getattr__, __dir__ = lazy(globals(), _MODULES)
