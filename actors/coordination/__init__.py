# SPDX-License-Identifier: Apache-2.0

"""Coordinator, gateway and barrier tracker as actors, and the interfaces that users implement.

Nothing here knows Spark: any engine that can say when its execution attempts start and end can stand behind
``OperatorPorts``.
"""

from actors.coordination.engine.barrier_tracker import BarrierTrackerActor, CheckpointFailed
from actors.coordination.engine.operator_config import OperatorConfig, OperatorPorts
from actors.coordination.engine.reply import Reply
from actors.coordination.host.gateway import Confirmation, LiveGateways, SubtaskGateway
from actors.coordination.host.given import GivenCoordinator, ResetNotSupported
from actors.coordination.host.part import Parts, RecreateOnReset, parts_of
from actors.coordination.interface import CoordinatorContext, OperatorCoordinator
from actors.coordination.sources.source import (
    SourceCoordinator,
    SplitEnumerator,
    SplitEnumeratorContext,
    StaticSplitEnumerator,
)
from actors.coordination.statistics import LatencyRecorder, OperatorStatistics
from actors.coordination.store import CoordinatorStore

__all__ = [
    "BarrierTrackerActor",
    "CheckpointFailed",
    "Confirmation",
    "CoordinatorContext",
    "CoordinatorStore",
    "GivenCoordinator",
    "LatencyRecorder",
    "LiveGateways",
    "OperatorConfig",
    "OperatorCoordinator",
    "OperatorPorts",
    "OperatorStatistics",
    "Parts",
    "RecreateOnReset",
    "Reply",
    "ResetNotSupported",
    "SourceCoordinator",
    "SplitEnumerator",
    "SplitEnumeratorContext",
    "StaticSplitEnumerator",
    "SubtaskGateway",
    "parts_of",
]
