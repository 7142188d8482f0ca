# SPDX-License-Identifier: Apache-2.0

"""The errors that a program may want to catch.

All have the base ``HeadgateError``, which is also in ``headgate``. So do those that only a traceback shows, and that no
program needs to tell apart. A wrong argument raises ``TypeError`` or ``ValueError`` instead, a missing package
``ModuleNotFoundError``, and an input that does not exist ``FileNotFoundError``::

    HeadgateError
        AskTimeout
        AttemptOver
            ConfirmationTimeout
        CheckpointDeclinedByOperator
        CheckpointFailed
        EventEncodeError
        GatewayFull
        InputRefused
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
        SinkDataLost
            SinkFileLost
        SourceDataLost
        TimedOut

As in ``headgate``, a name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate._lazy import lazy

if TYPE_CHECKING:
    from actors.coordination.checkpoint_requests import CheckpointFailed
    from actors.errors import AskTimeout
    from protocol.errors import (
        AttemptOver,
        ConfirmationTimeout,
        EventEncodeError,
        GatewayFull,
        HeadgateError,
        InputRefused,
        RequestFailed,
    )
    from spark_bridge.errors import (
        BatchFailed,
        BatchRefused,
        CoordinatorStartError,
        OutputNotCommitted,
        RestartsExhausted,
        SidecarError,
    )
    from spark_bridge.sinks.two_phase.errors import SinkDataLost, SinkFileLost
    from spark_bridge.sources.errors import SourceDataLost
    from spark_bridge.standalone.control_client import SidecarUnreachable
    from spark_bridge.storage.errors import StorageError
    from spark_bridge.subtask.errors import CheckpointDeclinedByOperator, PeerLost, TimedOut

_MODULES = {
    # Of both halves
    "HeadgateError": "protocol.errors",
    "AttemptOver": "protocol.errors",
    "ConfirmationTimeout": "protocol.errors",
    "EventEncodeError": "protocol.errors",
    "GatewayFull": "protocol.errors",
    # In a task
    "CheckpointDeclinedByOperator": "spark_bridge.subtask.errors",
    "PeerLost": "spark_bridge.subtask.errors",
    "RequestFailed": "protocol.errors",
    "TimedOut": "spark_bridge.subtask.errors",
    # On the driver
    "AskTimeout": "actors.errors",
    "CheckpointFailed": "actors.coordination.checkpoint_requests",
    "InputRefused": "protocol.errors",
    "SidecarError": "spark_bridge.errors",
    "BatchFailed": "spark_bridge.errors",
    "BatchRefused": "spark_bridge.errors",
    "CoordinatorStartError": "spark_bridge.errors",
    "OutputNotCommitted": "spark_bridge.errors",
    "RestartsExhausted": "spark_bridge.errors",
    "SidecarUnreachable": "spark_bridge.standalone.control_client",
    "StorageError": "spark_bridge.storage.errors",
    # Of sources and sinks
    "SourceDataLost": "spark_bridge.sources.errors",
    "SinkDataLost": "spark_bridge.sinks.two_phase.errors",
    "SinkFileLost": "spark_bridge.sinks.two_phase.errors",
}

__all__ = [  # noqa: RUF022 - grouped by use, as in the docstring
    # Of both halves
    "HeadgateError",
    "AttemptOver",
    "ConfirmationTimeout",
    "EventEncodeError",
    "GatewayFull",
    # In a task
    "CheckpointDeclinedByOperator",
    "PeerLost",
    "RequestFailed",
    "TimedOut",
    # On the driver
    "AskTimeout",
    "CheckpointFailed",
    "InputRefused",
    "SidecarError",
    "BatchFailed",
    "BatchRefused",
    "CoordinatorStartError",
    "OutputNotCommitted",
    "RestartsExhausted",
    "SidecarUnreachable",
    "StorageError",
    # Of sources and sinks
    "SourceDataLost",
    "SinkDataLost",
    "SinkFileLost",
]

if not TYPE_CHECKING:  # a type checker reports a name that does not exist
    __getattr__, __dir__ = lazy(globals(), _MODULES)
