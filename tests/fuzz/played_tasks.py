# SPDX-License-Identifier: Apache-2.0

"""Execution attempts whose every message the test sends itself, over real TCP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random

from protocol.wire.keys import KeyRing
from protocol.wire.messages import Confirm, Message, Opened, Register, Registered, RestoreMode
from tests.fuzz.attackers import AT_MOST_ONE_LINE, Intruder
from tests.fuzz.driver_half import PARALLELISM, STAGES, DriverHalf
from tests.fuzz.line import Line

KEYS = KeyRing(b"a secret of this application!!!!")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - other code does not know this condition
        await asyncio.sleep(0)


class PlayedTask:
    """One attempt, spoken for by the test."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._arrived: list[Message] = []

    async def until(self, kind: type[Message]) -> Message:
        """Return the next message of this kind; messages before it are dropped."""
        while True:
            while self._arrived:
                message = self._arrived.pop(0)
                if isinstance(message, kind):
                    return message
            self._arrived = await self.line.messages()
            assert self._arrived, f"the connection has ended without {kind.__name__}"

    async def until_taken(self, seq: int) -> None:
        """Return when the coordinator has taken the item with this number, and all before it."""
        confirmed = 0
        while confirmed < seq:
            message = await self.until(Confirm)
            assert isinstance(message, Confirm)
            confirmed = message.seq


class PlayedTasks(AsyncExitStack):
    """Starts such attempts, and closes their connections at the end."""

    def __init__(self, half: DriverHalf) -> None:
        super().__init__()
        self._half = half
        self._intruder = Intruder(Random(1), half.server.address, KEYS)

    async def start(self, operator: str, task_attempt_id: int) -> PlayedTask:
        self._half.spark.introduce(operator, task_attempt_id, 0, 0)
        line = await self._intruder.authenticated(AT_MOST_ONE_LINE, operator)
        self.push_async_callback(line.close)
        task = PlayedTask(line)
        run_id, parallelism = STAGES[operator], PARALLELISM[operator]
        await line.say(
            Register(task_attempt_id, operator, 0, run_id, 0, RestoreMode.BATCH, parallelism, "here", "3.11")
        )
        await task.until(Registered)
        await line.say(Opened(task_attempt_id, 1))
        return task
