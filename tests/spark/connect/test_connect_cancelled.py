# SPDX-License-Identifier: Apache-2.0

"""Actions of a Spark Connect client that are cancelled or interrupted, while another client's job runs (H160).

The jobs of the action end, the operator can be used again, and nothing happens to the other client.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate import AttachedSidecar, Sidecar
from tests.spark.connect.jobs import CountInArrow, Held, read
from tests.spark.connect.server import ConnectServer
from tests.spark.faults.own_process import OPERATOR, SidecarProgram, attach, callbacks
from tests.spark.faults.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.long]

WAIT_S = 300.0


def active(server: ConnectServer) -> int:
    return len(server.rest("jobs?status=running"))


class Other:
    """Another client, whose job keeps ``slots`` of the two slots busy until it is released."""

    def __init__(self, server: ConnectServer, slots: int) -> None:
        self._server = server
        self._slots = slots
        self._held = Held(range(4))
        self._released = threading.Event()

    def _run(self) -> list[int]:
        session = self._server.session()
        try:
            with Sidecar(session) as sidecar:
                handle = sidecar.coordinate("numbers", lambda: self._held, parallelism=self._slots)
                return sidecar.run(lambda: read(session, handle))
        finally:
            session.stop()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Its job runs within the block, and ends well after it."""
        with ThreadPoolExecutor(1) as client:
            result: Future[list[int]] = client.submit(self._run)
            wait_until(lambda: len(self._held.replies) == self._slots, "its slots are busy", WAIT_S)
            try:
                yield
            finally:
                self._held.release()
            assert result.result(WAIT_S) == [0, 1, 2, 3]
            assert self._held.lost == []


@contextmanager
def interrupted_when(condition: Callable[[], bool], what: str) -> Iterator[None]:
    """Press Ctrl-C when the condition holds."""

    def press() -> None:
        wait_until(condition, what, WAIT_S)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as fingers:
        pressed = fingers.submit(press)
        with pytest.raises(KeyboardInterrupt):
            yield
        pressed.result(WAIT_S)


@pytest.mark.parametrize("queued", [True, False], ids=["before its tasks start", "in the middle"])
async def test_cancelled_action_ends_its_job_and_the_name_can_be_used(
    server: ConnectServer, session: Any, queued: bool
) -> None:  # H160
    coordinators = [Held(range(8))]
    async with Sidecar(session) as sidecar:
        handle = await sidecar.coordinate("numbers", lambda: coordinators[-1], parallelism=1)
        with Other(server, 2 if queued else 1).running():
            running = asyncio.get_running_loop().create_task(sidecar.run(lambda: read(session, handle)))
            if queued:
                await asyncio.to_thread(wait_until, lambda: active(server) == 2, "both jobs are active", WAIT_S)
            else:
                await asyncio.to_thread(coordinators[0].waiting.wait, WAIT_S)
            running.cancel()
            await asyncio.wait([running])
            assert running.cancelled()
            await asyncio.to_thread(wait_until, lambda: active(server) == 1, "its job has ended", WAIT_S)
            assert coordinators[0].waiting.is_set() is not queued
        coordinators.append(Held(range(8)))
        for coordinator in coordinators:  # the first one is still there if no run has begun
            coordinator.release()
        assert await sidecar.run(lambda: read(session, handle)) == list(range(8))


@pytest.mark.parametrize("queued", [True, False], ids=["before its tasks start", "in the middle"])
def test_interrupted_action_ends_its_job_and_the_name_can_be_used(
    server: ConnectServer, session: Any, queued: bool
) -> None:  # H160
    coordinators = [Held(range(8))]
    with Sidecar(session) as sidecar:
        handle = sidecar.coordinate("numbers", lambda: coordinators[-1], parallelism=1)
        ready = (lambda: active(server) == 2) if queued else coordinators[0].waiting.is_set
        with Other(server, 2 if queued else 1).running():
            with interrupted_when(ready, "the action is under way"):
                sidecar.run(lambda: read(session, handle))
            wait_until(lambda: active(server) == 1, "its job has ended", WAIT_S)
            assert coordinators[0].waiting.is_set() is not queued
        coordinators.append(Held(range(8)))
        for coordinator in coordinators:  # the first one is still there if no run has begun
            coordinator.release()
        assert sidecar.run(lambda: read(session, handle)) == list(range(8))


def test_interrupted_action_of_an_attached_client_ends_its_job_and_no_other(
    server: ConnectServer, session: Any, tmp_path: Path
) -> None:  # H160
    program = SidecarProgram(tmp_path, "batch")
    program.start()
    try:
        with attach(session, program) as sidecar:
            handle = sidecar.operator(OPERATOR)
            action = (
                session.range(0, 2, 1, 2).mapInArrow(handle.subtask(CountInArrow), "subtask long, last long").collect
            )
            with interrupted_when(lambda: _ready(sidecar) == 2, "both are ready"):
                sidecar.run(action)
            wait_until(lambda: active(server) == 0, "its job has ended", WAIT_S)
            with Other(server, 2).running():
                with interrupted_when(lambda: active(server) == 2, "the job is queued"):
                    sidecar.run(action)
                wait_until(lambda: active(server) == 1, "its job has ended", WAIT_S)
            before = _ready(sidecar)
            with ThreadPoolExecutor(1) as client:
                job = client.submit(sidecar.run, action)
                wait_until(lambda: _ready(sidecar) == before + 2, "both are ready again", WAIT_S)
                sidecar.request(OPERATOR, "stop")
                assert sorted(tuple(row) for row in job.result(WAIT_S)) == [(0, 0), (1, 0)]
    finally:
        program.kill()


def _ready(sidecar: AttachedSidecar) -> int:
    """How often a subtask has become ready."""
    return len(callbacks(sidecar, "ready"))
