# SPDX-License-Identifier: Apache-2.0

"""Which operators can leave output uncommitted when their sidecar is left (H71). The driver is simulated."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
import pytest

from actors.coordination import OperatorCoordinator
from headgate.testing import RecordingCoordinator
from protocol.facts import JobEnded, TaskOutcome
from spark_bridge.common.errors import OutputNotCommitted
from spark_bridge.driver.config import SidecarConfig, SidecarLimits, Watching
from spark_bridge.driver.runtime import SidecarRuntime
from tests.conformance.application import OPERATOR, application
from tests.spark_bridge.simulated_driver import SimulatedDriver

pytestmark = pytest.mark.anyio


class Hangs(OperatorCoordinator):
    """Its checkpoints never end."""

    def __init__(self) -> None:
        self.called = anyio.Event()

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self.called.set()
        await anyio.sleep_forever()
        return b""


async def leave(config: SidecarConfig, mode: Any, *, ran: bool) -> OutputNotCommitted | None:
    """Leave a sidecar during a checkpoint that does not end. Returns what that raises."""
    runtime, coordinator = SidecarRuntime(SimulatedDriver(), config), Hangs()

    async def ask() -> None:
        with suppress(Exception):
            await runtime.checkpoint("a")

    async with anyio.create_task_group() as group:
        try:
            async with runtime:
                await runtime.coordinate("a", coordinator, parallelism=1, mode=mode)
                if ran:
                    runtime._operators.find("a").statistics.attempts = 1
                group.start_soon(ask)
                await coordinator.called.wait()
        except OutputNotCommitted as error:
            return error
    return None


@pytest.mark.parametrize("mode", ["batch", "streaming"])
@pytest.mark.parametrize(("settle_s", "shutdown_s"), [(0.2, 5.0), (60.0, 0.2)])
async def test_an_operator_that_never_ran_has_no_output_to_commit(
    mode: str, settle_s: float, shutdown_s: float
) -> None:  # H71
    config = SidecarConfig(
        watching=Watching(stalled_report_s=3600.0),
        limits=SidecarLimits(settle_timeout_s=settle_s, shutdown_timeout_s=shutdown_s),
    )
    assert await leave(config, mode, ran=False) is None
    if mode == "streaming":
        said = str(await leave(config, mode, ran=True))
        assert "checkpoint_coordinator" in said
        assert ("did not end within 0.2 s" in said) is (settle_s < shutdown_s)


@pytest.mark.parametrize("fault", ["the storage is full", "the coordinator fails after the run"])
@pytest.mark.parametrize("asked", ["by nobody", "by run", "by another operator", "while its run is being failed"])
async def test_why_output_is_not_committed_is_said_once(fault: str, asked: str) -> None:  # H71
    async def fail(*args: Any) -> None:
        raise OSError("no space left")

    coordinator = RecordingCoordinator()
    async with application() as app:
        await app.coordinate(coordinator)
        await app.coordinate(RecordingCoordinator(), "others")
        tasks = await app.running()
        if fault == "the storage is full":
            app.storage.store = fail  # type: ignore[assignment,method-assign]
        for task in tasks:
            task.finish()
        await app.settle()
        for task in tasks:
            await app.end(task, TaskOutcome.SUCCESS, "")
        app.post(JobEnded(1, True, ""))
        await app.settle()
        if fault == "the coordinator fails after the run":
            coordinator.context.fail_job("no space left")
        await app.settle()
        if asked == "by run":
            assert "no space left" in str(await app.kit.drive(app.operators.settle_one(OPERATOR, 10.0)))
        elif asked == "by another operator":
            assert await app.kit.drive(app.operators.settle(10.0, ["others"])) == ""
        skipped = [OPERATOR] if asked == "while its run is being failed" else []
        said = await app.kit.drive(app.operators.uncommitted(10.0, skipped, 5.0))
        if asked in ("by nobody", "by another operator"):
            assert said.startswith(f"operator {OPERATOR!r}: ")
            assert "no space left" in said
        else:
            assert said == ""
