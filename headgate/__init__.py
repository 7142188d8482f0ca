# SPDX-License-Identifier: Apache-2.0

"""Headgate: operator coordinators for Apache Spark.

A coordinator lives on the driver and exchanges events with the running tasks of a job. What every program needs is
imported from here::

    from headgate import Sidecar, SourceCoordinator, SplitReader, StaticSplitEnumerator

    with Sidecar(spark) as sidecar:
        job = sidecar.coordinate("squares", coordinator, parallelism=2)
        rows = job.run(Squares)

Running:
    ``Sidecar`` runs coordinators in the driver's process (``async with`` gives a ``SidecarRuntime``), and
    ``AttachedSidecar`` reaches those in a separate process. ``start`` and ``stop`` are for notebooks and services that
    cannot use a ``with`` block. ``run_across_sessions`` continues a job after the loss of a Spark Connect server.
    ``coordinate`` returns an ``OperatorHandle``, whose ``run`` runs the tasks and returns what they yield.
    ``interrupts_held_back`` delays a Ctrl-C until a short block, such as the start of Spark, has ended.
Writing the driver's half:
    ``OperatorCoordinator`` is the base class. Its methods are given a ``CoordinatorContext``, a ``SubtaskGateway`` for
    each attempt, and a ``FailureReason`` with its ``FailureKind``. A request may be answered later with a ``Reply``.
    ``RecreateOnReset`` builds a new coordinator after each reset. ``SourceCoordinator`` hands out the splits of an
    enumerator; ``StaticSplitEnumerator`` knows all splits from the start.
Writing the task's half:
    ``SubtaskOperator`` is the base class, and is given a ``SubtaskContext``. ``SplitReader`` reads the splits of a
    ``SourceCoordinator``.
    ``concurrently`` calls an async function for many records at a time, or an ``AsyncOperator``; ``Retry`` says how a
    call that failed is tried again.
Building a chain:
    ``chain`` puts a source, functions and a sink into one operator, for ``coordinate``.
Ready-made parts:
    ``SharedValue`` is set on the driver and read in all tasks. ``WorkQueue`` hands out work to which tasks add what
    they find. A ``Group`` lets tasks work together, each as a ``GroupMember``, and continue from their last checkpoint
    when one of them is lost. ``Permits`` limit a rate, or a number of users, over all tasks. A ``Cache`` has the
    answers that all tasks share, so that each question is asked once. A ``Budget`` is what they may spend, once over
    all runs. ``handle.counters()`` has what tasks have counted with their context; a ``Distribution`` is what they
    observed.
Sending your own classes:
    ``event`` registers a dataclass, a named tuple or an enumeration, so that its values can be events. ``Request`` is
    the base of one whose answers are of one type.
Settings:
    ``SidecarConfig`` has what most programs set, and four groups of what fewer do: ``Addresses``, ``StorageDetails``,
    ``Watching`` and ``SidecarLimits``. It also takes a ``TlsCertificate``, a ``LedgerConfig`` and ``GatewayLimits``.
    An operator takes ``GatewayLimits``, a ``CheckpointConfig`` and an ``Autoscale``; ``CheckpointFile`` names a
    checkpoint to start from.
    ``FixedDelay``, ``ExponentialDelay`` and ``NO_RESTART`` are for restarts. A mode is the string "batch" or
    "streaming".
Inspecting:
    ``CheckpointStorage`` reads stored checkpoints. ``Sidecar.status`` and ``OperatorHandle.statistics`` return plain
    values. ``check`` finds out whether executors reach the driver, in a notebook or a job.
Errors:
    Those in ``headgate.errors`` have the base ``HeadgateError``. A wrong argument raises ``TypeError`` or
    ``ValueError`` instead.

What fewer programs need is in modules of this package:

- ``headgate.sinks``: write files, databases and tables exactly once, or write your own sink;
- ``headgate.sources``: read files and other inputs, or write your own source or enumerator;
- ``headgate.errors``: every error that a program may want to catch, with the tree of them;
- ``headgate.types``: types of values that a program is given, for annotations, and states that are folders of files;
- ``headgate.testing``: test coordinators and operators without Spark;
- ``headgate.actors``: the actor runtime by itself.

A name is loaded when it is first used, so a task never imports what only the driver needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate._lazy import lazy

if TYPE_CHECKING:
    from actors.coordination.engine.reply import Reply as Reply
    from actors.coordination.host.gateway import SubtaskGateway as SubtaskGateway
    from actors.coordination.host.part import RecreateOnReset as RecreateOnReset
    from actors.coordination.interface import CoordinatorContext as CoordinatorContext
    from actors.coordination.interface import OperatorCoordinator as OperatorCoordinator
    from actors.coordination.sources.source import SourceCoordinator as SourceCoordinator
    from actors.coordination.sources.source import StaticSplitEnumerator as StaticSplitEnumerator
    from protocol.attempts import FailureKind as FailureKind
    from protocol.attempts import FailureReason as FailureReason
    from protocol.attempts import LedgerConfig as LedgerConfig
    from protocol.autoscaling import Autoscale as Autoscale
    from protocol.barrier_tracker import CheckpointConfig as CheckpointConfig
    from protocol.errors import HeadgateError as HeadgateError
    from protocol.event_types import Request as Request
    from protocol.gateway.types import GatewayLimits as GatewayLimits
    from protocol.restart import NO_RESTART as NO_RESTART
    from protocol.restart import ExponentialDelay as ExponentialDelay
    from protocol.restart import FixedDelay as FixedDelay
    from protocol.wire.event_classes import event as event
    from spark_bridge.common.certificates import TlsCertificate as TlsCertificate
    from spark_bridge.connect.sessions import run_across_sessions as run_across_sessions
    from spark_bridge.driver.check import check as check
    from spark_bridge.driver.config import Addresses as Addresses
    from spark_bridge.driver.config import SidecarConfig as SidecarConfig
    from spark_bridge.driver.config import SidecarLimits as SidecarLimits
    from spark_bridge.driver.config import StorageDetails as StorageDetails
    from spark_bridge.driver.config import Watching as Watching
    from spark_bridge.driver.handle import OperatorHandle as OperatorHandle
    from spark_bridge.driver.interrupts import interrupts_held_back as interrupts_held_back
    from spark_bridge.driver.runtime import SidecarRuntime as SidecarRuntime
    from spark_bridge.driver.sidecar import Sidecar as Sidecar
    from spark_bridge.driver.started import start as start
    from spark_bridge.driver.started import stop as stop
    from spark_bridge.primitives.budget.driver import Budget as Budget
    from spark_bridge.primitives.cache.driver import Cache as Cache
    from spark_bridge.primitives.chain import chain as chain
    from spark_bridge.primitives.counters.book import Distribution as Distribution
    from spark_bridge.primitives.group.driver import Group as Group
    from spark_bridge.primitives.group.task import GroupMember as GroupMember
    from spark_bridge.primitives.permits.driver import Permits as Permits
    from spark_bridge.primitives.shared_value.driver import SharedValue as SharedValue
    from spark_bridge.primitives.work_queue.driver import WorkQueue as WorkQueue
    from spark_bridge.standalone.attached import AttachedSidecar as AttachedSidecar
    from spark_bridge.storage import CheckpointFile as CheckpointFile
    from spark_bridge.storage import CheckpointStorage as CheckpointStorage
    from spark_bridge.subtask.context import SubtaskContext as SubtaskContext
    from spark_bridge.subtask.coroutines.calls import AsyncOperator as AsyncOperator
    from spark_bridge.subtask.coroutines.concurrently import concurrently as concurrently
    from spark_bridge.subtask.coroutines.retry import Retry as Retry
    from spark_bridge.subtask.operator import SubtaskOperator as SubtaskOperator
    from spark_bridge.subtask.source import SplitReader as SplitReader

__version__ = "0.1.0"

if not TYPE_CHECKING:  # a type checker reports a name that does not exist
    __all__, __getattr__, __dir__ = lazy(globals())
