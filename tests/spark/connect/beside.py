# SPDX-License-Identifier: Apache-2.0

"""A client of Spark Connect that is attached to a sidecar beside the server, and talks with its coordinator."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headgate import AttachedSidecar, OperatorHandle
from tests.spark.connect.jobs import CountInArrow
from tests.spark.faults.own_process import OPERATOR, SidecarProgram, callbacks
from tests.spark.faults.waiting import wait_until

WAIT_S = 300.0


def exchange(sidecar: AttachedSidecar, count: int, seen: int) -> None:
    """Send so many numbers to each subtask as soon as it is ready, and wait until all are answered, up to ``seen``."""
    wait_until(lambda: len({subtask for _, subtask, _ in callbacks(sidecar, "ready")}) == 2, "both are ready", WAIT_S)
    for subtask in (0, 1):
        sidecar.request(OPERATOR, ["send", subtask, count])
    wait_until(lambda: sidecar.request(OPERATOR, "seen") == {0: seen, 1: seen}, f"both have seen {seen}", WAIT_S)


def run_through_a_kill(session: Any, sidecar: AttachedSidecar, program: SidecarProgram) -> OperatorHandle:
    """Run a job whose sidecar is killed and started again in the middle; return its operator."""
    handle = sidecar.operator(OPERATOR)
    tasks = session.range(0, 2, 1, 2).mapInArrow(handle.subtask(CountInArrow), "subtask long, last long")
    with ThreadPoolExecutor(1) as client:
        job = client.submit(sidecar.run, tasks.collect)
        exchange(sidecar, 5, seen=5)
        sidecar.checkpoint(OPERATOR)
        program.kill()
        program.start()
        exchange(sidecar, 2, seen=7)
        sidecar.request(OPERATOR, "stop")
        assert sorted(tuple(row) for row in job.result(WAIT_S)) == [(0, 7), (1, 7)]
    return handle
