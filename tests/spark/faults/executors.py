"""Executors of the bench, and their end."""

from __future__ import annotations

import os
import signal

from tests.spark.faults.bench import Bench


def kill_the_executor(bench: Bench, host: str) -> None:
    """The JVM that runs the tasks of this host, by SIGKILL; the worker starts another one."""
    [pid] = bench.cluster.executor_pids(host)
    os.kill(pid, signal.SIGKILL)
