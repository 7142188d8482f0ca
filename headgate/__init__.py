"""Headgate: operator coordinators for Apache Spark.

A coordinator lives on the driver and exchanges events with the running tasks of a job. Everything that a program needs
is imported from here::

    from headgate import Sidecar, SourceCoordinator, SplitReader, StaticSplitEnumerator

    with Sidecar(spark) as sidecar:
        job = sidecar.coordinate("squares", coordinator, parallelism=2)
        rows = rdd.mapPartitions(job.subtask(Squares)).collect()

`headgate.HeadgateError` is the base of every error that Headgate raises, except for wrong arguments (`TypeError`,
`ValueError`). A name is loaded when it is first used, so a task never imports what only the driver needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spark_bridge import foreign_packages

if TYPE_CHECKING:
    from actors.coordination.checkpoint_requests import CheckpointFailed
    from actors.coordination.confirmation import Confirmation
    from actors.coordination.given import ResetNotSupported
    from actors.coordination.interface import CoordinatorContext, OperatorCoordinator, SubtaskGateway
    from actors.coordination.recreate_on_reset import RecreateOnReset
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
        LocalProtocolError,
        ProtocolError,
    )
    from protocol.gateway.types import GatewayLimits
    from protocol.ids import ExecutionAttempt
    from protocol.restart import NO_RESTART, ExponentialDelay, FixedDelay
    from protocol.wire.messages import RestoreMode
    from spark_bridge.bridge.relay import RelayError
    from spark_bridge.driver.config import SidecarConfig
    from spark_bridge.driver.handle import OperatorHandle
    from spark_bridge.driver.interrupts import interrupts_held_back
    from spark_bridge.driver.runtime import SidecarRuntime
    from spark_bridge.driver.sidecar import Sidecar
    from spark_bridge.errors import (
        BatchFailed,
        BatchRefused,
        CoordinatorStartError,
        OutputNotCommitted,
        RestartsExhausted,
        SidecarError,
        SidecarNotRunning,
    )
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
        CannotReachSidecar,
        CheckpointDeclinedByOperator,
        RegistrationRefused,
        RequestFailed,
        TimedOut,
    )
    from spark_bridge.subtask.operator import SubtaskOperator
    from spark_bridge.subtask.source import SplitReader

_MODULES = {
    # Running
    "Sidecar": "spark_bridge.driver.sidecar",
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
    "CoordinatorStore": "actors.coordination.store",
    "RecreateOnReset": "actors.coordination.recreate_on_reset",
    "SourceCoordinator": "actors.coordination.source",
    "SplitEnumerator": "actors.coordination.source",
    "SplitEnumeratorContext": "actors.coordination.source",
    "StaticSplitEnumerator": "actors.coordination.source",
    "FileSinkCoordinator": "spark_bridge.sink.coordinator",
    "SinkCommitter": "spark_bridge.sink.committer",
    "ExecutionAttempt": "protocol.ids",
    "FailureKind": "protocol.attempts",
    "FailureReason": "protocol.attempts",
    "CompletedCheckpoint": "protocol.barrier_tracker",
    # Writing the task's half
    "SubtaskOperator": "spark_bridge.subtask.operator",
    "SubtaskContext": "spark_bridge.subtask.context",
    "SplitReader": "spark_bridge.subtask.source",
    "FileSinkOperator": "spark_bridge.sink.operator",
    "SinkWriter": "spark_bridge.sink.writer",
    # Settings
    "CheckpointConfig": "protocol.barrier_tracker",
    "GatewayLimits": "protocol.gateway.types",
    "LedgerConfig": "protocol.attempts",
    "RestoreMode": "protocol.wire.messages",
    "FixedDelay": "protocol.restart",
    "ExponentialDelay": "protocol.restart",
    "NO_RESTART": "protocol.restart",
    # Looking at what there is
    "CheckpointStorage": "spark_bridge.storage",
    "OperatorStatistics": "actors.coordination.statistics",
    "LatencyRecorder": "actors.coordination.statistics",
    # Errors
    "HeadgateError": "protocol.errors",
    "ProtocolError": "protocol.errors",
    "LocalProtocolError": "protocol.errors",
    "AttemptOver": "protocol.errors",
    "ConfirmationTimeout": "protocol.errors",
    "EventEncodeError": "protocol.errors",
    "GatewayFull": "protocol.errors",
    "CheckpointDeclinedByOperator": "spark_bridge.subtask.errors",
    "RequestFailed": "spark_bridge.subtask.errors",
    "RegistrationRefused": "spark_bridge.subtask.errors",
    "CannotReachSidecar": "spark_bridge.subtask.errors",
    "TimedOut": "spark_bridge.subtask.errors",
    "AskTimeout": "actors.errors",
    "CheckpointFailed": "actors.coordination.checkpoint_requests",
    "ResetNotSupported": "actors.coordination.given",
    "SidecarError": "spark_bridge.errors",
    "CoordinatorStartError": "spark_bridge.errors",
    "SidecarNotRunning": "spark_bridge.errors",
    "RestartsExhausted": "spark_bridge.errors",
    "OutputNotCommitted": "spark_bridge.errors",
    "BatchFailed": "spark_bridge.errors",
    "BatchRefused": "spark_bridge.errors",
    "StorageError": "spark_bridge.storage.errors",
    "SidecarUnreachable": "spark_bridge.standalone.control_client",
    "RelayError": "spark_bridge.bridge.relay",
    "SinkFileLost": "spark_bridge.sink.errors",
}

__all__ = [  # noqa: RUF022 - grouped by use
    # Running
    "AttachedSidecar",
    "OperatorHandle",
    "Sidecar",
    "SidecarConfig",
    "SidecarRuntime",
    "interrupts_held_back",
    # Writing the driver's half
    "CompletedCheckpoint",
    "Confirmation",
    "CoordinatorContext",
    "CoordinatorStore",
    "ExecutionAttempt",
    "FailureKind",
    "FailureReason",
    "FileSinkCoordinator",
    "OperatorCoordinator",
    "RecreateOnReset",
    "SinkCommitter",
    "SourceCoordinator",
    "SplitEnumerator",
    "SplitEnumeratorContext",
    "StaticSplitEnumerator",
    "SubtaskGateway",
    # Writing the task's half
    "FileSinkOperator",
    "SinkWriter",
    "SplitReader",
    "SubtaskContext",
    "SubtaskOperator",
    # Settings
    "CheckpointConfig",
    "ExponentialDelay",
    "FixedDelay",
    "GatewayLimits",
    "LedgerConfig",
    "NO_RESTART",
    "RestoreMode",
    # Looking at what there is
    "CheckpointStorage",
    "LatencyRecorder",
    "OperatorStatistics",
    # Errors
    "AskTimeout",
    "AttemptOver",
    "BatchFailed",
    "BatchRefused",
    "CannotReachSidecar",
    "CheckpointDeclinedByOperator",
    "CheckpointFailed",
    "ConfirmationTimeout",
    "CoordinatorStartError",
    "EventEncodeError",
    "GatewayFull",
    "HeadgateError",
    "LocalProtocolError",
    "OutputNotCommitted",
    "ProtocolError",
    "RegistrationRefused",
    "RelayError",
    "RequestFailed",
    "ResetNotSupported",
    "RestartsExhausted",
    "SidecarError",
    "SidecarNotRunning",
    "SidecarUnreachable",
    "SinkFileLost",
    "StorageError",
    "TimedOut",
]


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
