# SPDX-License-Identifier: Apache-2.0

"""The types of values that Headgate gives to a program, for its annotations.

A program gets these values from methods, parameters and attributes. It needs a type from here only to write it down,
except for ``StateFiles``, ``KeyGroups`` and ``KeyedState``, which it makes::

    from headgate.types import Confirmation

    sent: list[Confirmation] = []

Of the driver's half:
    ``send_event`` returns a ``Confirmation``. ``context.gateways`` is a ``LiveGateways``, ``context.store`` a
    ``CoordinatorStore``, ``gateway.attempt`` an ``ExecutionAttempt``, and ``context.mode`` a ``RestoreMode``: compare
    it with ``RestoreMode.STREAMING``. ``chain`` returns a ``Chain``, and ``coordinate`` of what ``async with Sidecar``
    returns an ``AsyncOperatorHandle``.
Of the task's half:
    ``GroupMember.checkpoint`` is a ``GroupCheckpoint``. ``permits.weight`` returns a ``PermitUse``, and
    ``budget.reserve`` a ``Reservation``. The coroutine of a record is given a ``RecordContext``, and a record without a
    result may become a ``Failed``. A ``SubtaskOperator`` whose state is a folder of files returns ``StateFiles`` from
    ``snapshot_state``, and ``open`` is given ``RestoredFiles``. ``KeyGroups`` divide its keys among the subtasks,
    and ``KeyedState`` is such a state in RocksDB.
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
    from actors.coordination.host.gateway import Confirmation as Confirmation
    from actors.coordination.host.gateway import LiveGateways as LiveGateways
    from actors.coordination.statistics import LatencyRecorder as LatencyRecorder
    from actors.coordination.statistics import OperatorStatistics as OperatorStatistics
    from actors.coordination.store import CoordinatorStore as CoordinatorStore
    from protocol.barrier_tracker import CompletedCheckpoint as CompletedCheckpoint
    from protocol.ids import ExecutionAttempt as ExecutionAttempt
    from protocol.key_groups import KeyGroups as KeyGroups
    from protocol.wire.messages import RestoreMode as RestoreMode
    from spark_bridge.driver.runtime import AsyncOperatorHandle as AsyncOperatorHandle
    from spark_bridge.observability.status import AttemptStatus as AttemptStatus
    from spark_bridge.observability.status import OperatorStatus as OperatorStatus
    from spark_bridge.observability.status import SidecarStatus as SidecarStatus
    from spark_bridge.primitives.budget.task import Reservation as Reservation
    from spark_bridge.primitives.chain import Chain as Chain
    from spark_bridge.primitives.group.task import GroupCheckpoint as GroupCheckpoint
    from spark_bridge.primitives.permits.task import PermitUse as PermitUse
    from spark_bridge.storage.state_files.values import RestoredFiles as RestoredFiles
    from spark_bridge.storage.state_files.values import StateFiles as StateFiles
    from spark_bridge.subtask.coroutines.calls import Failed as Failed
    from spark_bridge.subtask.coroutines.calls import RecordContext as RecordContext
    from spark_bridge.subtask.keyed_state import KeyedState as KeyedState

if not TYPE_CHECKING:  # a type checker reports a name that does not exist
    __all__, __getattr__, __dir__ = lazy(globals())
