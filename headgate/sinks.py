# SPDX-License-Identifier: Apache-2.0

"""Sinks that write exactly once, and what your own sink is made of.

A sink has two halves: an operator prepares output in the tasks, and a coordinator commits it on the driver when a
checkpoint is durable. In a ``chain`` the sink is enough::

    from headgate import chain
    from headgate.sinks import FileSink

    pages = chain(read=source, parse=parse, write=FileSink("/data/out"))

Ready-made sinks:
    ``FileSink`` for a ``chain``, and the ``TwoPhaseSink`` classes ``PostgresSink``, ``DeltaSink``, ``IcebergSink``
    and ``RedisStreamsSink``.
Their coordinators and operators:
    ``FileSinkCoordinator`` and ``FileSinkOperator`` for files; ``TwoPhaseSinkCoordinator`` and
    ``TwoPhaseSinkOperator`` for every ``TwoPhaseSink``.
Files in your own classes:
    ``SinkCommitter`` in a coordinator, and ``SinkWriter`` in an operator.
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
    from spark_bridge.sinks.delta.sink import DeltaSink
    from spark_bridge.sinks.files.coordinator import FileSinkCoordinator, SinkCommitter
    from spark_bridge.sinks.files.sink import FileSink
    from spark_bridge.sinks.files.task import FileSinkOperator
    from spark_bridge.sinks.files.writer import SinkWriter
    from spark_bridge.sinks.iceberg.sink import IcebergSink
    from spark_bridge.sinks.postgres.sink import PostgresSink
    from spark_bridge.sinks.redis.sink import RedisStreamsSink
    from spark_bridge.sinks.two_phase.driver import TwoPhaseSinkCoordinator
    from spark_bridge.sinks.two_phase.parts import Committable
    from spark_bridge.sinks.two_phase.sink import (
        SinkCommitterContext,
        SinkWriterContext,
        TwoPhaseCommitter,
        TwoPhaseSink,
        TwoPhaseWriter,
    )
    from spark_bridge.sinks.two_phase.task import TwoPhaseSinkOperator

_MODULES = {
    # Ready-made sinks
    "FileSink": "spark_bridge.sinks.files.sink",
    "PostgresSink": "spark_bridge.sinks.postgres.sink",
    "DeltaSink": "spark_bridge.sinks.delta.sink",
    "IcebergSink": "spark_bridge.sinks.iceberg.sink",
    "RedisStreamsSink": "spark_bridge.sinks.redis.sink",
    # Their coordinators and operators
    "FileSinkCoordinator": "spark_bridge.sinks.files.coordinator",
    "FileSinkOperator": "spark_bridge.sinks.files.task",
    "TwoPhaseSinkCoordinator": "spark_bridge.sinks.two_phase.driver",
    "TwoPhaseSinkOperator": "spark_bridge.sinks.two_phase.task",
    # Files in your own classes
    "SinkCommitter": "spark_bridge.sinks.files.coordinator",
    "SinkWriter": "spark_bridge.sinks.files.writer",
    # Your own sink
    "TwoPhaseSink": "spark_bridge.sinks.two_phase.sink",
    "TwoPhaseWriter": "spark_bridge.sinks.two_phase.sink",
    "SinkWriterContext": "spark_bridge.sinks.two_phase.sink",
    "TwoPhaseCommitter": "spark_bridge.sinks.two_phase.sink",
    "SinkCommitterContext": "spark_bridge.sinks.two_phase.sink",
    "Committable": "spark_bridge.sinks.two_phase.parts",
}

__all__ = [  # noqa: RUF022 - grouped by use, as in the docstring
    # Ready-made sinks
    "FileSink",
    "PostgresSink",
    "DeltaSink",
    "IcebergSink",
    "RedisStreamsSink",
    # Their coordinators and operators
    "FileSinkCoordinator",
    "FileSinkOperator",
    "TwoPhaseSinkCoordinator",
    "TwoPhaseSinkOperator",
    # Files in your own classes
    "SinkCommitter",
    "SinkWriter",
    # Your own sink
    "TwoPhaseSink",
    "TwoPhaseWriter",
    "SinkWriterContext",
    "TwoPhaseCommitter",
    "SinkCommitterContext",
    "Committable",
]

if not TYPE_CHECKING:  # a type checker reports a name that does not exist
    __getattr__, __dir__ = lazy(globals(), _MODULES)
