# SPDX-License-Identifier: Apache-2.0

"""A coordinator that sends each attempt the events that a script lists for it."""

from __future__ import annotations

from typing import Any

from tests.spark.recorder import Recorder


class Script(Recorder):
    """Sends each attempt of each subtask its events from the script as soon as it is ready."""

    def __init__(self, script: dict[tuple[int, int], list[Any]], otherwise: list[Any]) -> None:
        super().__init__()
        self._script = script
        self._otherwise = otherwise
        self._seen: dict[int, int] = {}

    async def subtask_ready(self, subtask: int, gateway: Any) -> None:
        await super().subtask_ready(subtask, gateway)
        nth = self._seen[subtask] = self._seen.get(subtask, -1) + 1
        for event in self._script.get((subtask, nth), self._otherwise):
            self.confirmations.append(await gateway.send_event(event))

    def say(self, events: list[Any]) -> None:
        """From the test's thread: send these to every subtask that is ready."""

        async def send() -> None:
            for gateway in self.gateways.values():
                for event in events:
                    await gateway.send_event(event)

        self.context.call_soon_threadsafe(send)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        await super().reset_to_checkpoint(checkpoint_id, state)
        self._seen.clear()
