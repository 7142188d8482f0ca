# SPDX-License-Identifier: Apache-2.0

"""The types of values that Headgate gives to a program, for its annotations.

A program gets these values from methods, parameters and attributes. It needs a type from here only to write it down::

    from headgate.types import Confirmation

    sent: list[Confirmation] = []

Of the driver's half:
    ``send_event`` returns a ``Confirmation``. ``context.gateways`` is a ``LiveGateways``, ``context.store`` a
    ``CoordinatorStore``, ``gateway.attempt`` an ``ExecutionAttempt``, and ``context.mode`` a ``RestoreMode``: compare
    it with ``RestoreMode.STREAMING``. ``chain`` returns a ``Chain``.
Of the task's half:
    ``GroupMember.checkpoint`` is a ``GroupCheckpoint``.
Of what you inspect:
    ``Sidecar.status`` returns a ``SidecarStatus``: an ``OperatorStatus`` for each operator, with an ``AttemptStatus``
    for each attempt. ``OperatorHandle.statistics`` returns ``OperatorStatistics``, whose latencies are
    ``LatencyRecorder`` objects. ``CheckpointStorage`` returns a ``CompletedCheckpoint``.

As in ``headgate``, a name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate._lazy import lazy

if TYPE_CHECKING:
    from actors.coordination.confirmation import Confirmation
    from actors.coordination.host.gateways import LiveGateways
    from actors.coordination.statistics import LatencyRecorder, OperatorStatistics
    from actors.coordination.store import CoordinatorStore
    from protocol.barrier_tracker import CompletedCheckpoint
    from protocol.ids import ExecutionAttempt
    from protocol.wire.messages import RestoreMode
    from spark_bridge.observability.status import AttemptStatus, OperatorStatus, SidecarStatus
    from spark_bridge.primitives.chain import Chain
    from spark_bridge.primitives.group.task import GroupCheckpoint

_MODULES = {
    # Of the driver's half
    "Confirmation": "actors.coordination.confirmation",
    "LiveGateways": "actors.coordination.host.gateways",
    "ExecutionAttempt": "protocol.ids",
    "CoordinatorStore": "actors.coordination.store",
    "RestoreMode": "protocol.wire.messages",
    "Chain": "spark_bridge.primitives.chain",
    # Of the task's half
    "GroupCheckpoint": "spark_bridge.primitives.group.task",
    # Of what you inspect
    "SidecarStatus": "spark_bridge.observability.status",
    "OperatorStatus": "spark_bridge.observability.status",
    "AttemptStatus": "spark_bridge.observability.status",
    "OperatorStatistics": "actors.coordination.statistics",
    "LatencyRecorder": "actors.coordination.statistics",
    "CompletedCheckpoint": "protocol.barrier_tracker",
}

__all__ = [  # noqa: RUF022 - grouped by use, as in the docstring
    # Of the driver's half
    "Confirmation",
    "LiveGateways",
    "ExecutionAttempt",
    "CoordinatorStore",
    "RestoreMode",
    "Chain",
    # Of the task's half
    "GroupCheckpoint",
    # Of what you inspect
    "SidecarStatus",
    "OperatorStatus",
    "AttemptStatus",
    "OperatorStatistics",
    "LatencyRecorder",
    "CompletedCheckpoint",
]

if not TYPE_CHECKING:  # a type checker reports a name that does not exist
    __getattr__, __dir__ = lazy(globals(), _MODULES)
