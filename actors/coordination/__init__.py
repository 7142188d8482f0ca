# SPDX-License-Identifier: Apache-2.0

"""Coordinator, gateway and barrier tracker as actors, and the interfaces that users implement.

Nothing here knows Spark: any engine that can say when its execution attempts start and end can stand behind
``OperatorPorts``.
"""

from actors.coordination.barrier_tracker import BarrierTrackerActor
from actors.coordination.chain import CoordinatorChain
from actors.coordination.checkpoint_requests import CheckpointFailed
from actors.coordination.confirmation import Confirmation
from actors.coordination.given import GivenCoordinator, ResetNotSupported
from actors.coordination.interface import CoordinatorContext, OperatorCoordinator, SubtaskGateway
from actors.coordination.live_gateways import LiveGateways
from actors.coordination.operator_config import OperatorConfig, OperatorPorts
from actors.coordination.recreate_on_reset import RecreateOnReset
from actors.coordination.reply import Reply
from actors.coordination.source import (
    SourceCoordinator,
    SplitEnumerator,
    SplitEnumeratorContext,
    StaticSplitEnumerator,
)
from actors.coordination.statistics import LatencyRecorder, OperatorStatistics, percentiles_of
from actors.coordination.store import CoordinatorStore

__all__ = [
    "BarrierTrackerActor",
    "CheckpointFailed",
    "Confirmation",
    "CoordinatorChain",
    "CoordinatorContext",
    "CoordinatorStore",
    "GivenCoordinator",
    "LatencyRecorder",
    "LiveGateways",
    "OperatorConfig",
    "OperatorCoordinator",
    "OperatorPorts",
    "OperatorStatistics",
    "RecreateOnReset",
    "Reply",
    "ResetNotSupported",
    "SourceCoordinator",
    "SplitEnumerator",
    "SplitEnumeratorContext",
    "StaticSplitEnumerator",
    "SubtaskGateway",
    "percentiles_of",
]
