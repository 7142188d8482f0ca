# SPDX-License-Identifier: Apache-2.0

"""A server that is killed under a job, and started again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from headgate import FixedDelay, Sidecar, SidecarConfig, run_across_sessions
from tests.spark.connect.jobs import CountInArrow
from tests.spark.connect.server import ConnectServer
from tests.spark.counting import CountingCoordinator

WAIT_S = 300.0


def continue_after_the_server_has_died(server: ConnectServer, config: SidecarConfig) -> None:
    """SIGKILL, and the server is started again: what was counted before the checkpoint counts once."""
    coordinators: SimpleQueue[tuple[CountingCoordinator, Sidecar]] = SimpleQueue()

    def count(session: Any, sidecar: Sidecar) -> list[tuple[int, int]]:
        coordinator = CountingCoordinator()
        handle = sidecar.coordinate("counting", lambda: coordinator, parallelism=1, mode="streaming")
        coordinators.put((coordinator, sidecar))
        tasks = session.range(0, 1, 1, 1).mapInArrow(handle.subtask(CountInArrow), "subtask long, last long")
        return [tuple(row) for row in sidecar.run(tasks.collect)]

    with ThreadPoolExecutor(1) as program:
        job = program.submit(run_across_sessions, server.session, count, config, restart=FixedDelay(1, 0.1))
        before, sidecar = coordinators.get(timeout=WAIT_S)
        before.wait_for(lambda story: any(callback[0] == "ready" for callback in story))
        before.send_numbers(0, 5)
        before.wait_until_seen(0, 5)
        sidecar.checkpoint("counting")
        before.send_numbers(0, 3)  # after the checkpoint: they are lost with the server
        before.wait_until_seen(0, 8)
        server.kill()
        before.wait_for(lambda story: story[-2:] == [("run_ended", False), ("close",)])

        server.launch()
        after, sidecar = coordinators.get(timeout=WAIT_S)
        after.wait_for(lambda story: any(callback[0] == "ready" for callback in story))
        assert config.addresses.way in ("auto", sidecar.status().relay.way)
        after.send_numbers(0, 2)  # the numbers 6 and 7, or the subtask raises
        after.wait_until_seen(0, 7)
        after.stop_all()
        assert job.result(WAIT_S) == [(0, 7)]
    assert after.wrong == []
