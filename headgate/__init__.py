# SPDX-License-Identifier: Apache-2.0

"""Headgate: operator coordinators for Apache Spark.

A coordinator lives on the driver and exchanges events with the running tasks of a job. Everything that a program needs
is imported from here::

    from headgate import Sidecar, SourceCoordinator, SplitReader, StaticSplitEnumerator

    with Sidecar(spark) as sidecar:
        job = sidecar.coordinate("squares", coordinator, parallelism=2)
        rows = rdd.mapPartitions(job.subtask(Squares)).collect()

Running:
    ``Sidecar`` runs coordinators in the driver's process (``async with`` gives a ``SidecarRuntime``), and
    ``AttachedSidecar`` reaches those in a separate process. ``start`` and ``stop`` are for notebooks and services that
    cannot use a ``with`` block. ``SidecarConfig`` holds the settings.
    ``coordinate`` returns an ``OperatorHandle``. ``interrupts_held_back`` delays a Ctrl-C until a short block, such as
    the start of Spark, has ended.
Writing the driver's half:
    ``OperatorCoordinator`` is the base class. Its methods are given a ``CoordinatorContext``, a ``SubtaskGateway`` for
    each ``ExecutionAttempt``, and a ``FailureReason`` with its ``FailureKind``. ``LiveGateways`` has all gateways. An
    event that was sent has a ``Confirmation``, and a request may be answered later with a ``Reply``; coordinators share
    a ``CoordinatorStore``. ``RecreateOnReset`` builds a new coordinator after each reset. ``SourceCoordinator`` hands
    out the splits of a ``SplitEnumerator``, which is given a ``SplitEnumeratorContext``; ``StaticSplitEnumerator``
    knows all splits from the start.
Writing the task's half:
    ``SubtaskOperator`` is the base class, and is given a ``SubtaskContext``. ``SplitReader`` reads the splits of a
    ``SourceCoordinator``.
Ready-made parts:
    ``SharedValue`` is set on the driver and read in all tasks. ``WorkQueue`` hands out work to which tasks add what
    they find. A ``Group`` lets tasks work together, each as a ``GroupMember``, and go on from a ``GroupCheckpoint``
    after a ``PeerLost``. ``Permits`` limit a rate, or a number of users, over all tasks. ``handle.counters()`` has what
    tasks have counted with their context; a ``Distribution`` is what they observed.
Sending your own classes:
    ``event`` registers a dataclass, a named tuple or an enumeration, so that its values can be events.
Writing files exactly once:
    ``FileSinkCoordinator`` and ``FileSinkOperator``, or ``SinkCommitter`` and ``SinkWriter`` inside your own classes.
Settings:
    ``CheckpointConfig``, ``GatewayLimits``, ``LedgerConfig``, ``TlsCertificate``; ``RestoreMode``, or "batch" and
    "streaming"; ``FixedDelay``, ``ExponentialDelay`` and ``NO_RESTART`` for restarts.
Inspecting:
    ``Sidecar.status`` returns a ``SidecarStatus``: an ``OperatorStatus`` for each operator, with an ``AttemptStatus``
    for each attempt. ``CheckpointStorage`` reads stored checkpoints, each a ``CompletedCheckpoint``.
    ``OperatorStatistics`` counts events and failures; its latencies are ``LatencyRecorder`` objects.
Errors:
    All have the base ``HeadgateError``, as do those that a traceback may show and that no program needs to tell apart.
    A wrong argument raises ``TypeError`` or ``ValueError`` instead::

        HeadgateError
            AskTimeout
            AttemptOver
                ConfirmationTimeout
            CheckpointDeclinedByOperator
            CheckpointFailed
            EventEncodeError
            GatewayFull
            PeerLost
            RequestFailed
            SidecarError
                BatchFailed
                BatchRefused
                CoordinatorStartError
                OutputNotCommitted
                RestartsExhausted
                SidecarUnreachable
                StorageError
            SinkFileLost
            TimedOut

A name is loaded when it is first used, so a task never imports what only the driver needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spark_bridge import foreign_packages

if TYPE_CHECKING:
    from actors.coordination.checkpoint_requests import CheckpointFailed
    from actors.coordination.confirmation import Confirmation
    from actors.coordination.interface import CoordinatorContext, OperatorCoordinator, SubtaskGateway
    from actors.coordination.live_gateways import LiveGateways
    from actors.coordination.recreate_on_reset import RecreateOnReset
    from actors.coordination.reply import Reply
    from actors.coordination.source import (
        SourceCoordinator,
        SplitEnumerator,
        SplitEnumeratorContext,
        StaticSplitEnumerator,
    )
    from actors.coordination.statistics import LatencyRecorder, OperatorStatistics
    from actors.coordination.store import CoordinatorStore
    from actors.errors import AskTimeout
    from protocol.attempts import FailureKind, FailureReason, LedgerConfig
    from protocol.barrier_tracker import CheckpointConfig, CompletedCheckpoint
    from protocol.errors import (
        AttemptOver,
        ConfirmationTimeout,
        EventEncodeError,
        GatewayFull,
        HeadgateError,
        RequestFailed,
    )
    from protocol.gateway.types import GatewayLimits
    from protocol.ids import ExecutionAttempt
    from protocol.restart import NO_RESTART, ExponentialDelay, FixedDelay
    from protocol.wire.event_classes import event
    from protocol.wire.messages import RestoreMode
    from spark_bridge.certificates import TlsCertificate
    from spark_bridge.driver.config import SidecarConfig
    from spark_bridge.driver.handle import OperatorHandle
    from spark_bridge.driver.interrupts import interrupts_held_back
    from spark_bridge.driver.runtime import SidecarRuntime
    from spark_bridge.driver.sidecar import Sidecar
    from spark_bridge.driver.started import start, stop
    from spark_bridge.errors import (
        BatchFailed,
        BatchRefused,
        CoordinatorStartError,
        OutputNotCommitted,
        RestartsExhausted,
        SidecarError,
    )
    from spark_bridge.observability.status import AttemptStatus, OperatorStatus, SidecarStatus
    from spark_bridge.primitives.counters.book import Distribution
    from spark_bridge.primitives.group.driver import Group
    from spark_bridge.primitives.group.task import GroupCheckpoint, GroupMember
    from spark_bridge.primitives.permits.driver import Permits
    from spark_bridge.primitives.shared_value.driver import SharedValue
    from spark_bridge.primitives.work_queue.driver import WorkQueue
    from spark_bridge.sink.committer import SinkCommitter
    from spark_bridge.sink.coordinator import FileSinkCoordinator
    from spark_bridge.sink.errors import SinkFileLost
    from spark_bridge.sink.operator import FileSinkOperator
    from spark_bridge.sink.writer import SinkWriter
    from spark_bridge.standalone.attached import AttachedSidecar
    from spark_bridge.standalone.control_client import SidecarUnreachable
    from spark_bridge.storage import CheckpointStorage
    from spark_bridge.storage.errors import StorageError
    from spark_bridge.subtask.context import SubtaskContext
    from spark_bridge.subtask.errors import (
        CheckpointDeclinedByOperator,
        PeerLost,
        TimedOut,
    )
    from spark_bridge.subtask.operator import SubtaskOperator
    from spark_bridge.subtask.source import SplitReader

_MODULES = {
    # Running
    "Sidecar": "spark_bridge.driver.sidecar",
    "start": "spark_bridge.driver.started",
    "stop": "spark_bridge.driver.started",
    "AttachedSidecar": "spark_bridge.standalone.attached",
    "SidecarConfig": "spark_bridge.driver.config",
    "SidecarRuntime": "spark_bridge.driver.runtime",
    "OperatorHandle": "spark_bridge.driver.handle",
    "interrupts_held_back": "spark_bridge.driver.interrupts",
    # Writing the driver's half
    "OperatorCoordinator": "actors.coordination.interface",
    "CoordinatorContext": "actors.coordination.interface",
    "SubtaskGateway": "actors.coordination.interface",
    "Confirmation": "actors.coordination.confirmation",
    "LiveGateways": "actors.coordination.live_gateways",
    "Reply": "actors.coordination.reply",
    "ExecutionAttempt": "protocol.ids",
    "FailureReason": "protocol.attempts",
    "FailureKind": "protocol.attempts",
    "CoordinatorStore": "actors.coordination.store",
    "RecreateOnReset": "actors.coordination.recreate_on_reset",
    "SourceCoordinator": "actors.coordination.source",
    "SplitEnumerator": "actors.coordination.source",
    "SplitEnumeratorContext": "actors.coordination.source",
    "StaticSplitEnumerator": "actors.coordination.source",
    # Writing the task's half
    "SubtaskOperator": "spark_bridge.subtask.operator",
    "SubtaskContext": "spark_bridge.subtask.context",
    "SplitReader": "spark_bridge.subtask.source",
    # Ready-made parts
    "Distribution": "spark_bridge.primitives.counters.book",
    "Group": "spark_bridge.primitives.group.driver",
    "GroupCheckpoint": "spark_bridge.primitives.group.task",
    "GroupMember": "spark_bridge.primitives.group.task",
    "Permits": "spark_bridge.primitives.permits.driver",
    "SharedValue": "spark_bridge.primitives.shared_value.driver",
    "WorkQueue": "spark_bridge.primitives.work_queue.driver",
    # Sending your own classes
    "event": "protocol.wire.event_classes",
    # Writing files exactly once
    "FileSinkCoordinator": "spark_bridge.sink.coordinator",
    "FileSinkOperator": "spark_bridge.sink.operator",
    "SinkCommitter": "spark_bridge.sink.committer",
    "SinkWriter": "spark_bridge.sink.writer",
    # Settings
    "CheckpointConfig": "protocol.barrier_tracker",
    "GatewayLimits": "protocol.gateway.types",
    "LedgerConfig": "protocol.attempts",
    "TlsCertificate": "spark_bridge.certificates",
    "RestoreMode": "protocol.wire.messages",
    "FixedDelay": "protocol.restart",
    "ExponentialDelay": "protocol.restart",
    "NO_RESTART": "protocol.restart",
    # Inspecting
    "SidecarStatus": "spark_bridge.observability.status",
    "OperatorStatus": "spark_bridge.observability.status",
    "AttemptStatus": "spark_bridge.observability.status",
    "CheckpointStorage": "spark_bridge.storage",
    "CompletedCheckpoint": "protocol.barrier_tracker",
    "OperatorStatistics": "actors.coordination.statistics",
    "LatencyRecorder": "actors.coordination.statistics",
    # Errors
    "HeadgateError": "protocol.errors",
    "AttemptOver": "protocol.errors",
    "ConfirmationTimeout": "protocol.errors",
    "EventEncodeError": "protocol.errors",
    "GatewayFull": "protocol.errors",
    "RequestFailed": "protocol.errors",
    "PeerLost": "spark_bridge.subtask.errors",
    "TimedOut": "spark_bridge.subtask.errors",
    "CheckpointDeclinedByOperator": "spark_bridge.subtask.errors",
    "CheckpointFailed": "actors.coordination.checkpoint_requests",
    "AskTimeout": "actors.errors",
    "SinkFileLost": "spark_bridge.sink.errors",
    "SidecarError": "spark_bridge.errors",
    "BatchFailed": "spark_bridge.errors",
    "BatchRefused": "spark_bridge.errors",
    "CoordinatorStartError": "spark_bridge.errors",
    "OutputNotCommitted": "spark_bridge.errors",
    "RestartsExhausted": "spark_bridge.errors",
    "SidecarUnreachable": "spark_bridge.standalone.control_client",
    "StorageError": "spark_bridge.storage.errors",
}

__all__ = [  # noqa: RUF022 - grouped by use, as in the docstring
    # Running
    "Sidecar",
    "start",
    "stop",
    "AttachedSidecar",
    "SidecarConfig",
    "SidecarRuntime",
    "OperatorHandle",
    "interrupts_held_back",
    # Writing the driver's half
    "OperatorCoordinator",
    "CoordinatorContext",
    "SubtaskGateway",
    "Confirmation",
    "LiveGateways",
    "Reply",
    "ExecutionAttempt",
    "FailureReason",
    "FailureKind",
    "CoordinatorStore",
    "RecreateOnReset",
    "SourceCoordinator",
    "SplitEnumerator",
    "SplitEnumeratorContext",
    "StaticSplitEnumerator",
    # Writing the task's half
    "SubtaskOperator",
    "SubtaskContext",
    "SplitReader",
    # Ready-made parts
    "Distribution",
    "Group",
    "GroupCheckpoint",
    "GroupMember",
    "Permits",
    "SharedValue",
    "WorkQueue",
    # Sending your own classes
    "event",
    # Writing files exactly once
    "FileSinkCoordinator",
    "FileSinkOperator",
    "SinkCommitter",
    "SinkWriter",
    # Settings
    "CheckpointConfig",
    "GatewayLimits",
    "LedgerConfig",
    "TlsCertificate",
    "RestoreMode",
    "FixedDelay",
    "ExponentialDelay",
    "NO_RESTART",
    # Inspecting
    "SidecarStatus",
    "OperatorStatus",
    "AttemptStatus",
    "CheckpointStorage",
    "CompletedCheckpoint",
    "OperatorStatistics",
    "LatencyRecorder",
    # Errors
    "HeadgateError",
    "AttemptOver",
    "ConfirmationTimeout",
    "EventEncodeError",
    "GatewayFull",
    "RequestFailed",
    "PeerLost",
    "TimedOut",
    "CheckpointDeclinedByOperator",
    "CheckpointFailed",
    "AskTimeout",
    "SinkFileLost",
    "SidecarError",
    "BatchFailed",
    "BatchRefused",
    "CoordinatorStartError",
    "OutputNotCommitted",
    "RestartsExhausted",
    "SidecarUnreachable",
    "StorageError",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        foreign_packages.explain(error)
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
