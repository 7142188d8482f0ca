# SPDX-License-Identifier: Apache-2.0

"""The part that runs inside a Spark task: the user's operator, and its connection to the coordinator."""

from __future__ import annotations

from spark_bridge.common.bootstrap import ensure_msgpack

ensure_msgpack()

from protocol.errors import AttemptOver  # noqa: E402 - msgpack must be importable first
from spark_bridge.common.endpoint import TaskEndpoint, TaskIdentity  # noqa: E402
from spark_bridge.subtask.context import SubtaskContext  # noqa: E402
from spark_bridge.subtask.errors import (  # noqa: E402
    CannotReachSidecar,
    CheckpointDeclinedByOperator,
    RegistrationFailed,
    RegistrationRefused,
    RequestFailed,
    TimedOut,
)
from spark_bridge.subtask.operator import SubtaskOperator  # noqa: E402
from spark_bridge.subtask.runner import run_subtask  # noqa: E402
from spark_bridge.subtask.source import SplitReader  # noqa: E402

__all__ = [
    "AttemptOver",
    "CannotReachSidecar",
    "CheckpointDeclinedByOperator",
    "RegistrationFailed",
    "RegistrationRefused",
    "RequestFailed",
    "SplitReader",
    "SubtaskContext",
    "SubtaskOperator",
    "TaskEndpoint",
    "TaskIdentity",
    "TimedOut",
    "run_subtask",
]
