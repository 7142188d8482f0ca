# SPDX-License-Identifier: Apache-2.0

"""Which operators can leave output uncommitted when their sidecar is left (H71). The driver is simulated."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
import pytest

from actors.coordination import OperatorCoordinator
from spark_bridge.common.errors import OutputNotCommitted
from spark_bridge.driver.config import SidecarConfig, SidecarLimits, Watching
from spark_bridge.driver.runtime import SidecarRuntime
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
        assert "checkpoint_coordinator" in str(await leave(config, mode, ran=True))
