# SPDX-License-Identifier: Apache-2.0

"""Find and kill executors of the bench."""

from __future__ import annotations

import os
import signal

from tests.spark.faults.bench import Bench


def kill_the_executor(bench: Bench, host: str) -> None:
    """Kill (SIGKILL) the JVM that runs the tasks of this host; the worker starts another one."""
    [pid] = bench.cluster.executor_pids(host)
    os.kill(pid, signal.SIGKILL)
