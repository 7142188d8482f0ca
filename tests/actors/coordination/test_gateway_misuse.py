# SPDX-License-Identifier: Apache-2.0

"""A misused gateway: a call from another thread, or one without its await."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from actors.coordination import RecreateOnReset
from protocol.errors import LocalProtocolError
from tests.actors.coordination.operator_world import RecordingCoordinator, running_tasks


@pytest.mark.parametrize("method", ["send_event", "send_event_nowait"])
async def test_a_gateway_refuses_another_thread_and_names_the_way(method: str) -> None:  # H59
    async with running_tasks(1) as (world, (task,)):
        with pytest.raises(LocalProtocolError, match=r"from thread .* call context\.call_soon_threadsafe\(handler\)"):
            await anyio.to_thread.run_sync(getattr(world.coordinator.gateways[0], method), "from afar")
        await world.settle()
        assert task.events == []


@pytest.mark.parametrize("recreated", [False, True])
async def test_a_send_event_that_is_never_awaited_is_told_with_its_place(recreated: bool) -> None:  # H59
    made: list[RecordingCoordinator] = []

    def make() -> RecordingCoordinator:
        made.append(RecordingCoordinator())
        return made[-1]

    coordinator: Any = RecreateOnReset(make) if recreated else make()
    with capture_logs() as logs:
        async with running_tasks(1, coordinator) as (world, (task,)):
            gateway = made[-1].gateways[0]
            with pytest.warns(RuntimeWarning, match="never awaited"):
                gateway.send_event("lost")  # type: ignore[unused-coroutine]
            async with anyio.create_task_group() as group:
                group.start_soon(gateway.send_event, "sent")
            await world.settle()
            assert task.events == ["sent"]
    (line,) = [line for line in logs if line["event"] == "send_event never awaited"]
    assert (line["operator_id"], line["subtask"], line["attempt"]) == (world.config.operator_id, 0, 0)
    assert "test_gateway_misuse.py" in line["at"]
    assert "await gateway.send_event" in line["hint"]
