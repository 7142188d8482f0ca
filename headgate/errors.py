# SPDX-License-Identifier: Apache-2.0

"""The errors that a program may want to catch.

All have the base ``HeadgateError``, which is also in ``headgate``. So do those that only a traceback shows, and that no
program needs to tell apart. A wrong argument raises ``TypeError`` or ``ValueError`` instead, a missing package
``ModuleNotFoundError``, and an input that does not exist ``FileNotFoundError``::

    HeadgateError
        AskTimeout
        AttemptOver
            ConfirmationTimeout
        BudgetExhausted
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
    from actors.coordination.engine.barrier_tracker import CheckpointFailed as CheckpointFailed
    from actors.errors import AskTimeout as AskTimeout
    from protocol.errors import AttemptOver as AttemptOver
    from protocol.errors import ConfirmationTimeout as ConfirmationTimeout
    from protocol.errors import EventEncodeError as EventEncodeError
    from protocol.errors import GatewayFull as GatewayFull
    from protocol.errors import HeadgateError as HeadgateError
    from protocol.errors import InputRefused as InputRefused
    from protocol.errors import RequestFailed as RequestFailed
    from spark_bridge.common.errors import BatchFailed as BatchFailed
    from spark_bridge.common.errors import BatchRefused as BatchRefused
    from spark_bridge.common.errors import CoordinatorStartError as CoordinatorStartError
    from spark_bridge.common.errors import OutputNotCommitted as OutputNotCommitted
    from spark_bridge.common.errors import RestartsExhausted as RestartsExhausted
    from spark_bridge.common.errors import SidecarError as SidecarError
    from spark_bridge.sinks.two_phase.errors import SinkDataLost as SinkDataLost
    from spark_bridge.sinks.two_phase.errors import SinkFileLost as SinkFileLost
    from spark_bridge.sources.errors import SourceDataLost as SourceDataLost
    from spark_bridge.standalone.control_client import SidecarUnreachable as SidecarUnreachable
    from spark_bridge.storage.errors import StorageError as StorageError
    from spark_bridge.subtask.errors import BudgetExhausted as BudgetExhausted
    from spark_bridge.subtask.errors import CheckpointDeclinedByOperator as CheckpointDeclinedByOperator
    from spark_bridge.subtask.errors import PeerLost as PeerLost
    from spark_bridge.subtask.errors import TimedOut as TimedOut

if not TYPE_CHECKING:  # a type checker reports a name that does not exist
    __all__, __getattr__, __dir__ = lazy(globals())
