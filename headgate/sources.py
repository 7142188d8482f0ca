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
    from actors.coordination.sources.enumerators import DiscoveringSplitEnumerator as DiscoveringSplitEnumerator
    from actors.coordination.sources.source import SplitEnumerator as SplitEnumerator
    from actors.coordination.sources.source import SplitEnumeratorContext as SplitEnumeratorContext
    from protocol.source_events import SplitAt as SplitAt
    from spark_bridge.sources.files.driver import FileSource as FileSource
    from spark_bridge.sources.kafka.driver import KafkaSource as KafkaSource
    from spark_bridge.sources.postgres.driver import PostgresSource as PostgresSource
    from spark_bridge.sources.redis.driver import RedisStreamsSource as RedisStreamsSource
    from spark_bridge.sources.source import HybridSource as HybridSource
    from spark_bridge.sources.source import Source as Source

if not TYPE_CHECKING:  # a type checker reports a name that does not exist
    __all__, __getattr__, __dir__ = lazy(globals())
