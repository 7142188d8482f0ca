# SPDX-License-Identifier: Apache-2.0

"""The kit on event loops that are not asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from headgate import OperatorCoordinator
from headgate.testing import running_operator


class Waiting(OperatorCoordinator):
    """Waits for the virtual time and for a thread, with a timeout that does not pass, and one that does."""

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        async with asyncio.timeout(5.0):
            await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.sleep(60.0)
        return await asyncio.to_thread(lambda: request + 1)


class ShowsNoTimers(asyncio.SelectorEventLoop):
    """Knows no timers but its own, as loops that are not asyncio's."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if not handle._scheduled:  # type: ignore[attr-defined]
            raise NotImplementedError
        super()._timer_handle_cancelled(handle)  # type: ignore[misc]


@pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, ShowsNoTimers, uvloop.new_event_loop])
def test_a_coordinator_uses_timeouts_and_threads(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def ask() -> Any:
        async with running_operator(Waiting, parallelism=1) as world:
            task = await world.launch(0)
            answer = task.request(1)
            await world.advance(3.0)
            return answer.value

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(ask()) == 2
