# SPDX-License-Identifier: Apache-2.0

"""The coordinator of the pictures."""

from __future__ import annotations

import asyncio
from typing import Any

from headgate import CoordinatorContext, OperatorCoordinator, SubtaskGateway


class Crawler(OperatorCoordinator):
    """Hands out pages and sends news to everybody; on request it stops answering one subtask."""

    def __init__(self) -> None:
        self.gateways: dict[int, SubtaskGateway] = {}
        self.silence: asyncio.Future[None] | None = None

    async def start(self, context: CoordinatorContext) -> None:
        self.context = context
        self.loop = asyncio.get_running_loop()

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self.gateways[subtask] = gateway

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        if self.silence is not None:
            await self.silence
        return ["page", subtask]

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        return b""

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if event[1] % 9 == 0 and subtask in self.gateways:
            await self.gateways[subtask].send_event("news")

    def tell(self, event: Any, *subtasks: int) -> None:
        """From another thread: send an event to some subtasks, or to all."""

        async def send() -> None:
            for subtask in subtasks or tuple(self.gateways):
                await self.gateways[subtask].send_event(event)

        self.context.call_soon_threadsafe(send)

    def fall_silent(self) -> None:
        """From another thread: stop answering requests."""

        def begin() -> None:
            self.silence = self.loop.create_future()

        self.loop.call_soon_threadsafe(begin)

    def speak(self) -> None:
        """From another thread: go on. It does not go through the mailbox, where it would wait."""

        def end() -> None:
            silence, self.silence = self.silence, None
            if silence is not None:
                silence.set_result(None)

        self.loop.call_soon_threadsafe(end)
