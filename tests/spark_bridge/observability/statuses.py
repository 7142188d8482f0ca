# SPDX-License-Identifier: Apache-2.0

"""Statuses for tests: something ordinary, in which a test changes what it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spark_bridge.observability.status import (
    AttemptStatus,
    CheckpointProgress,
    LatencyStatus,
    OperatorStatus,
    RelayStatus,
    RunStatus,
    SidecarStatus,
)

NOW = 1_000_000.0


def attempt(subtask: int = 0, **changes: Any) -> AttemptStatus:
    """An attempt that works."""
    return AttemptStatus(
        subtask, 0, 100 + subtask, "ready", NOW - 60, "", "host", "1", True, True, NOW - 0.1, 0, None, 0, (), 0, 0, None
    )._replace(**changes)


def checkpoint(phase: str, *awaited: int, step: str = "nothing", phase_s: float = 25.0) -> CheckpointProgress:
    """Checkpoint 12, of whose four subtasks these have still to take a step."""
    steps = {subtask: step if subtask in awaited else "nothing" for subtask in range(4)}
    return CheckpointProgress(12, False, NOW - 30, phase, phase_s, 570.0, steps)


def run(**changes: Any) -> RunStatus:
    """A run in which every subtask has an attempt."""
    return RunStatus(7, NOW - 60, 4, 4, 4, (), (), "")._replace(**changes)


def operator(**changes: Any) -> OperatorStatus:
    """An operator of four subtasks in which everything moves."""
    quiet = LatencyStatus()
    ordinary = OperatorStatus(
        operator_id="crawl",
        mode="batch",
        parallelism=4,
        run=run(),
        call=None,
        queued=0,
        attempts=tuple(attempt(subtask) for subtask in range(4)),
        checkpoints=(),
        checkpoint_history=(),
        failures=(),
        last_completed_checkpoint_id=-1,
        in_doubt=(),
        counts={},
        events_up_per_s=0.0,
        events_down_per_s=0.0,
        requests_per_s=0.0,
        confirm=quiet,
        request=quiet,
        checkpoint=quiet,
        fact=quiet,
    )
    return replace(ordinary, **changes)


def sidecar(*operators: OperatorStatus, **changes: Any) -> SidecarStatus:
    """A sidecar with these operators."""
    ordinary = SidecarStatus(
        taken_at=NOW,
        uptime_s=100.0,
        host="127.0.0.1",
        port=4242,
        tls=False,
        relay=RelayStatus("jvm", 10, 0, 0),
        loop_lag_p99_ms=1.0,
        loop_lag_max_ms=2.0,
        cores=None,
        operators={one.operator_id: one for one in operators},
    )
    return replace(ordinary, **changes)
