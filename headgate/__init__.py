# SPDX-License-Identifier: Apache-2.0

"""Headgate: operator coordinators for Apache Spark.

A coordinator lives on the driver and exchanges events with the running tasks of a job. What every program needs is
imported from here::

    from headgate import Sidecar, SourceCoordinator, SplitReader, StaticSplitEnumerator

    with Sidecar(spark) as sidecar:
        job = sidecar.coordinate("squares", coordinator, parallelism=2)
        rows = rdd.mapPartitions(job.subtask(Squares)).collect()

Running:
    ``Sidecar`` runs coordinators in the driver's process (``async with`` gives a ``SidecarRuntime``), and
    ``AttachedSidecar`` reaches those in a separate process. ``start`` and ``stop`` are for notebooks and services that
    cannot use a ``with`` block. ``run_across_sessions`` continues a job after the loss of a Spark Connect server.
    ``SidecarConfig`` holds the settings.
    ``coordinate`` returns an ``OperatorHandle``. ``interrupts_held_back`` delays a Ctrl-C until a short block, such as
    the start of Spark, has ended.
Writing the driver's half:
    ``OperatorCoordinator`` is the base class. Its methods are given a ``CoordinatorContext``, a ``SubtaskGateway`` for
    each attempt, and a ``FailureReason`` with its ``FailureKind``. A request may be answered later with a ``Reply``.
    ``RecreateOnReset`` builds a new coordinator after each reset. ``SourceCoordinator`` hands out the splits of an
    enumerator; ``StaticSplitEnumerator`` knows all splits from the start.
Writing the task's half:
    ``SubtaskOperator`` is the base class, and is given a ``SubtaskContext``. ``SplitReader`` reads the splits of a
    ``SourceCoordinator``.
Building a chain:
    ``chain`` puts a source, functions and a sink into one operator, for ``coordinate``.
Ready-made parts:
    ``SharedValue`` is set on the driver and read in all tasks. ``WorkQueue`` hands out work to which tasks add what
    they find. A ``Group`` lets tasks work together, each as a ``GroupMember``, and continue from their last checkpoint
    when one of them is lost. ``Permits`` limit a rate, or a number of users, over all tasks. ``handle.counters()`` has
    what tasks have counted with their context; a ``Distribution`` is what they observed.
Sending your own classes:
    ``event`` registers a dataclass, a named tuple or an enumeration, so that its values can be events.
Settings:
    ``CheckpointConfig``, ``GatewayLimits``, ``LedgerConfig`` and ``TlsCertificate``; ``FixedDelay``,
    ``ExponentialDelay`` and ``NO_RESTART`` for restarts. A mode is the string "batch" or "streaming".
Inspecting:
    ``CheckpointStorage`` reads stored checkpoints. ``Sidecar.status`` and ``OperatorHandle.statistics`` return plain
    values.
Errors:
    Those in ``headgate.errors`` have the base ``HeadgateError``. A wrong argument raises ``TypeError`` or
    ``ValueError`` instead.

What fewer programs need is in modules of this package:

- ``headgate.sinks``: write files, databases and tables exactly once, or write your own sink;
- ``headgate.sources``: read files and other inputs, or write your own source or enumerator;
- ``headgate.errors``: every error that a program may want to catch, with the tree of them;
- ``headgate.types``: types of values that a program is given and never makes, for annotations;
- ``headgate.testing``: test coordinators and operators without Spark;
- ``headgate.actors``: the actor runtime by itself.

A name is loaded when it is first used, so a task never imports what only the driver needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate._lazy import lazy

if TYPE_CHECKING:
    from actors.coordination.host.recreate_on_reset import RecreateOnReset
    from actors.coordination.interface import CoordinatorContext, OperatorCoordinator
    from actors.coordination.reply import Reply
    from actors.coordination.source import SourceCoordinator, StaticSplitEnumerator
    from actors.coordination.subtask_gateway import SubtaskGateway
    from protocol.attempts import FailureKind, FailureReason, LedgerConfig
    from protocol.barrier_tracker import CheckpointConfig
    from protocol.errors import HeadgateError
    from protocol.gateway.types import GatewayLimits
    from protocol.restart import NO_RESTART, ExponentialDelay, FixedDelay
    from protocol.wire.event_classes import event
    from spark_bridge.certificates import TlsCertificate
    from spark_bridge.connect.sessions import run_across_sessions
    from spark_bridge.driver.config import SidecarConfig
    from spark_bridge.driver.handle import OperatorHandle
    from spark_bridge.driver.interrupts import interrupts_held_back
    from spark_bridge.driver.runtime import SidecarRuntime
    from spark_bridge.driver.sidecar import Sidecar
    from spark_bridge.driver.started import start, stop
    from spark_bridge.primitives.chain import chain
    from spark_bridge.primitives.counters.book import Distribution
    from spark_bridge.primitives.group.driver import Group
    from spark_bridge.primitives.group.task import GroupMember
    from spark_bridge.primitives.permits.driver import Permits
    from spark_bridge.primitives.shared_value.driver import SharedValue
    from spark_bridge.primitives.work_queue.driver import WorkQueue
    from spark_bridge.standalone.attached import AttachedSidecar
    from spark_bridge.storage import CheckpointStorage
    from spark_bridge.subtask.context import SubtaskContext
    from spark_bridge.subtask.operator import SubtaskOperator
    from spark_bridge.subtask.source import SplitReader

_MODULES = {
    # Running
    "Sidecar": "spark_bridge.driver.sidecar",
    "start": "spark_bridge.driver.started",
    "stop": "spark_bridge.driver.started",
    "run_across_sessions": "spark_bridge.connect.sessions",
    "AttachedSidecar": "spark_bridge.standalone.attached",
    "SidecarConfig": "spark_bridge.driver.config",
    "SidecarRuntime": "spark_bridge.driver.runtime",
    "OperatorHandle": "spark_bridge.driver.handle",
    "interrupts_held_back": "spark_bridge.driver.interrupts",
    # Writing the driver's half
    "OperatorCoordinator": "actors.coordination.interface",
    "CoordinatorContext": "actors.coordination.interface",
    "SubtaskGateway": "actors.coordination.subtask_gateway",
    "Reply": "actors.coordination.reply",
    "FailureReason": "protocol.attempts",
    "FailureKind": "protocol.attempts",
    "RecreateOnReset": "actors.coordination.host.recreate_on_reset",
    "SourceCoordinator": "actors.coordination.source",
    "StaticSplitEnumerator": "actors.coordination.source",
    # Writing the task's half
    "SubtaskOperator": "spark_bridge.subtask.operator",
    "SubtaskContext": "spark_bridge.subtask.context",
    "SplitReader": "spark_bridge.subtask.source",
    # Building a chain
    "chain": "spark_bridge.primitives.chain",
    # Ready-made parts
    "Distribution": "spark_bridge.primitives.counters.book",
    "Group": "spark_bridge.primitives.group.driver",
    "GroupMember": "spark_bridge.primitives.group.task",
    "Permits": "spark_bridge.primitives.permits.driver",
    "SharedValue": "spark_bridge.primitives.shared_value.driver",
    "WorkQueue": "spark_bridge.primitives.work_queue.driver",
    # Sending your own classes
    "event": "protocol.wire.event_classes",
    # Settings
    "CheckpointConfig": "protocol.barrier_tracker",
    "GatewayLimits": "protocol.gateway.types",
    "LedgerConfig": "protocol.attempts",
    "TlsCertificate": "spark_bridge.certificates",
    "FixedDelay": "protocol.restart",
    "ExponentialDelay": "protocol.restart",
    "NO_RESTART": "protocol.restart",
    # Inspecting
    "CheckpointStorage": "spark_bridge.storage",
    # Errors
    "HeadgateError": "protocol.errors",
}

__all__ = [  # noqa: RUF022 - grouped by use, as in the docstring
    # Running
    "Sidecar",
    "start",
    "stop",
    "run_across_sessions",
    "AttachedSidecar",
    "SidecarConfig",
    "SidecarRuntime",
    "OperatorHandle",
    "interrupts_held_back",
    # Writing the driver's half
    "OperatorCoordinator",
    "CoordinatorContext",
    "SubtaskGateway",
    "Reply",
    "FailureReason",
    "FailureKind",
    "RecreateOnReset",
    "SourceCoordinator",
    "StaticSplitEnumerator",
    # Writing the task's half
    "SubtaskOperator",
    "SubtaskContext",
    "SplitReader",
    # Building a chain
    "chain",
    # Ready-made parts
    "Distribution",
    "Group",
    "GroupMember",
    "Permits",
    "SharedValue",
    "WorkQueue",
    # Sending your own classes
    "event",
    # Settings
    "CheckpointConfig",
    "GatewayLimits",
    "LedgerConfig",
    "TlsCertificate",
    "FixedDelay",
    "ExponentialDelay",
    "NO_RESTART",
    # Inspecting
    "CheckpointStorage",
    # Errors
    "HeadgateError",
]

__version__ = "0.1.0"

if not TYPE_CHECKING:  # a type checker reports a name that does not exist
    __getattr__, __dir__ = lazy(globals(), _MODULES)
