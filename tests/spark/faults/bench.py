# SPDX-License-Identifier: Apache-2.0

"""A test bench for faults: one long-lived cluster, session and sidecar, on which one fault follows another.

A test that takes only ``bench`` leaves it as it was (killed nodes are back, its operators are released), so that the
soak can run such tests in any order, for any length of time. A test that only uses what ``Bench`` has can run over
Spark Connect as well: ``tests/spark/connect/bench.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from pyspark.sql import SparkSession

from actors.coordination import OperatorCoordinator
from spark_bridge.bridge.relay.jvm_link import RelayServer
from spark_bridge.driver.handle import OperatorHandle
from spark_bridge.driver.sidecar import Sidecar
from spark_bridge.subtask import SubtaskOperator
from tests.spark.actions import Action
from tests.spark.cluster import StandaloneCluster
from tests.spark.faults.heard import Heard, listening_to
from tests.spark.faults.network import LINES_HOST, Line
from tests.spark.faults.rows import Jobs, Rows
from tests.spark.faults.waiting import wait_for_executors, wait_until


@contextmanager
def relays_by(line: Line, patience_s: float = 15.0) -> Iterator[None]:
    """A relay that starts within the block has its JVM connect by this line, and waits this long for a reconnection."""
    with pytest.MonkeyPatch.context() as patch:
        listen = RelayServer.listen

        async def listen_behind_the_line(server: RelayServer, host: str = "127.0.0.1") -> tuple[str, int]:
            server._reconnect_timeout_s = patience_s
            line.leads_to = await listen(server, host)
            return LINES_HOST, line.port

        patch.setattr(RelayServer, "listen", listen_behind_the_line)
        yield


class Bench(Jobs):
    """Not thread-safe, except for what Spark and the sidecar document as thread-safe."""

    def __init__(self, spark: SparkSession, sidecar: Sidecar, cluster: StandaloneCluster) -> None:
        Jobs.__init__(self, spark)
        self.sidecar = sidecar
        self.cluster = cluster
        self._numbers = itertools.count(1)

    @contextmanager
    def coordinated(
        self, coordinator: OperatorCoordinator, parallelism: int = 2, **options: Any
    ) -> Iterator[OperatorHandle]:
        """Coordinate an operator with a unique name; ``options`` as for ``Sidecar.coordinate``.

        It is released when its last run has ended, of which the sidecar may hear only after the action's result.
        """
        operator_id = f"fault-{next(self._numbers)}"
        handle = self.sidecar.coordinate(operator_id, coordinator, parallelism=parallelism, **options)
        try:
            yield handle
            wait_until(lambda: self.sidecar.status().operators[operator_id].run is None, "the end of the run")
        finally:
            self.sidecar.release(operator_id)

    def collect(
        self, coordinator: OperatorCoordinator, operator: Callable[..., SubtaskOperator], parallelism: int = 2
    ) -> list[Any]:
        """The simplest job: coordinate, run an operator over ``numbers``, return its sorted output."""
        with self.coordinated(coordinator, parallelism) as handle:
            return sorted(self.numbers(parallelism).through(handle, operator).collect())

    def start_collecting(self, rows: Rows) -> Action:
        """Run ``collect`` in a separate thread; its ``result()`` is the list, or raises what ``collect`` raised."""
        return Action(rows.collect)

    def listening(self) -> AbstractContextManager[Heard]:
        """Record what Spark itself says within the block."""
        return listening_to(self.spark)

    def wait_for_executors(self) -> None:
        """Wait until Spark has an executor on each host of the cluster, original or replacement."""
        wait_for_executors(self.spark, self.cluster.hosts)

    def places_in_the_task_set(self, stage_id: int, stage_attempt: int) -> dict[int, int]:
        """Map each partition to its index, from Spark's status store."""
        tasks = self._spark_core.statusStore().taskList(stage_id, stage_attempt, 100)
        return {tasks.apply(i).partitionId(): tasks.apply(i).index() for i in range(tasks.size())}

    def behind_a_line(self, line: Line) -> AbstractContextManager[Sidecar]:
        """Another sidecar, to which tasks connect by a line."""
        return Sidecar(self.spark, line.config())

    def behind_two_lines(self, tasks: Line, relay: Line) -> AbstractContextManager[Sidecar]:
        """Another sidecar, to which tasks and the relay connect by lines."""
        return self._behind_two_lines(tasks, relay)

    @contextmanager
    def _behind_two_lines(self, tasks: Line, relay: Line) -> Iterator[Sidecar]:
        with relays_by(relay), self.behind_a_line(tasks) as sidecar:
            yield sidecar

    # --- what a user may cancel: each returns a text that the user of the job then reads ---------------------------

    def cancel_stage(self, stage_id: int) -> str:
        self._spark_core.cancelStage(stage_id, "the stage was a mistake")
        return "the stage was a mistake"

    def cancel_job(self, job_id: int) -> str:
        self._spark_core.cancelJob(job_id, "the job was a mistake")
        return "the job was a mistake"

    def cancel_all_jobs(self) -> str:
        self.spark.sparkContext.cancelAllJobs()
        return "cancelled as part of cancellation of all jobs"

    def in_group(self, group: str, collect: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        """Each Python thread has its own thread in the JVM, and with it its own job group."""

        def action() -> list[Any]:
            self.spark.sparkContext.setJobGroup(group, "jobs of a test", interruptOnCancel=True)
            return collect()

        return action

    def cancel_group(self, group: str) -> str:
        self.spark.sparkContext.cancelJobGroup(group)
        return f"cancelled job group {group}"

    @property
    def _spark_core(self) -> Any:
        """The JVM's SparkContext, which offers more than the Python API."""
        java_context: Any = self.spark.sparkContext._jsc
        return java_context.sc()

    def kill_task(self, task_attempt_id: int, why: str) -> None:
        """Not over Connect: only the driver's JVM can do this."""
        self._spark_core.killTaskAttempt(task_attempt_id, True, why)
