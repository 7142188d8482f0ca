"""Headgate for Apache Spark: the sidecar of the driver, and (in ``spark_bridge.subtask``) what runs in its tasks.

Imported in executors too, so nothing is loaded before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_bridge.config import SidecarConfig
    from spark_bridge.errors import (
        BatchFailed,
        BatchRefused,
        CoordinatorStartError,
        NotSettled,
        OutputNotCommitted,
        RestartsExhausted,
        SidecarError,
        SidecarNotRunning,
    )
    from spark_bridge.handle import OperatorHandle
    from spark_bridge.runtime import SidecarRuntime
    from spark_bridge.sidecar import Sidecar
    from spark_bridge.standalone.attached import AttachedSidecar
    from spark_bridge.standalone.control import SidecarUnreachable

_ROOMS = {
    "AttachedSidecar": ".standalone.attached",
    "BatchFailed": ".errors",
    "BatchRefused": ".errors",
    "CoordinatorStartError": ".errors",
    "NotSettled": ".errors",
    "OperatorHandle": ".handle",
    "OutputNotCommitted": ".errors",
    "RestartsExhausted": ".errors",
    "Sidecar": ".sidecar",
    "SidecarConfig": ".config",
    "SidecarError": ".errors",
    "SidecarNotRunning": ".errors",
    "SidecarRuntime": ".runtime",
    "SidecarUnreachable": ".standalone.control",
}

__all__ = [
    "AttachedSidecar",
    "BatchFailed",
    "BatchRefused",
    "CoordinatorStartError",
    "NotSettled",
    "OperatorHandle",
    "OutputNotCommitted",
    "RestartsExhausted",
    "Sidecar",
    "SidecarConfig",
    "SidecarError",
    "SidecarNotRunning",
    "SidecarRuntime",
    "SidecarUnreachable",
]


def __getattr__(name: str) -> Any:
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(room, __name__), name)
