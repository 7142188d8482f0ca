"""Coordinator, gateway and barrier tracker as actors, and the interfaces that users implement.

Nothing here knows Spark: any engine that can say when its execution attempts start and end can stand behind
``OperatorPorts``.
"""

from actors.coordination.barrier_tracker import (
    BarrierTrackerActor,
    CheckpointFailed,
    OperatorConfig,
    OperatorPorts,
)
from actors.coordination.confirmation import Confirmation
from actors.coordination.connection import AttemptConnection
from actors.coordination.coordinator import CoordinatorActor
from actors.coordination.gateway import GatewayActor, GatewayHandle
from actors.coordination.interface import CoordinatorContext, OperatorCoordinator, SubtaskGateway
from actors.coordination.source import (
    SourceCoordinator,
    SplitEnumerator,
    SplitEnumeratorContext,
    StaticSplitEnumerator,
)
from actors.coordination.statistics import LatencyRecorder, OperatorStatistics, percentiles_of

__all__ = [
    "AttemptConnection",
    "BarrierTrackerActor",
    "CheckpointFailed",
    "Confirmation",
    "CoordinatorActor",
    "CoordinatorContext",
    "GatewayActor",
    "GatewayHandle",
    "LatencyRecorder",
    "OperatorConfig",
    "OperatorCoordinator",
    "OperatorPorts",
    "OperatorStatistics",
    "SourceCoordinator",
    "SplitEnumerator",
    "SplitEnumeratorContext",
    "StaticSplitEnumerator",
    "SubtaskGateway",
    "percentiles_of",
]
