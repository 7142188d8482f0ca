# SPDX-License-Identifier: Apache-2.0

"""Sinks that write exactly once, and what your own sink is made of.

A sink has two halves: an operator prepares output in the tasks, and a coordinator commits it on the driver when a
checkpoint is durable. In a ``chain`` the sink is enough::

    from headgate import chain
    from headgate.sinks import FileSink

    pages = chain(read=source, parse=parse, write=FileSink("/data/out"))

Ready-made sinks:
    ``FileSink``, ``PostgresSink``, ``DeltaSink``, ``IcebergSink`` and ``RedisStreamsSink``.
Their coordinator and operator, which your own classes can extend:
    ``TwoPhaseSinkCoordinator`` and ``TwoPhaseSinkOperator``, which are given the sink.
Your own sink:
    A ``TwoPhaseSink`` makes a ``TwoPhaseWriter`` for each task, which is given a ``SinkWriterContext``, and a
    ``TwoPhaseCommitter`` for the driver, which is given a ``SinkCommitterContext``. What passes between them is a
    ``Committable``.

As in ``headgate``, a name is loaded when it is first used. The errors of sinks are in ``headgate.errors``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate._lazy import lazy

if TYPE_CHECKING:
    from spark_bridge.sinks.delta.sink import DeltaSink as DeltaSink
    from spark_bridge.sinks.files.sink import FileSink as FileSink
    from spark_bridge.sinks.iceberg.sink import IcebergSink as IcebergSink
    from spark_bridge.sinks.postgres.sink import PostgresSink as PostgresSink
    from spark_bridge.sinks.redis.sink import RedisStreamsSink as RedisStreamsSink
    from spark_bridge.sinks.two_phase.driver import TwoPhaseSinkCoordinator as TwoPhaseSinkCoordinator
    from spark_bridge.sinks.two_phase.parts import Committable as Committable
    from spark_bridge.sinks.two_phase.sink import SinkCommitterContext as SinkCommitterContext
    from spark_bridge.sinks.two_phase.sink import SinkWriterContext as SinkWriterContext
    from spark_bridge.sinks.two_phase.sink import TwoPhaseCommitter as TwoPhaseCommitter
    from spark_bridge.sinks.two_phase.sink import TwoPhaseSink as TwoPhaseSink
    from spark_bridge.sinks.two_phase.sink import TwoPhaseWriter as TwoPhaseWriter
    from spark_bridge.sinks.two_phase.task import TwoPhaseSinkOperator as TwoPhaseSinkOperator

if not TYPE_CHECKING:  # a type checker reports a name that does not exist
    __all__, __getattr__, __dir__ = lazy(globals())
