# SPDX-License-Identifier: Apache-2.0

"""Collects relayed facts and waits for them, with a deadline and without sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from protocol.facts import EngineFact
from spark_bridge.bridge.relay.records import RelayedFact

FactT = TypeVar("FactT")


class FactsLog:
    """Give ``receive`` to a relay as its ``on_fact``."""

    def __init__(self) -> None:
        self.relayed: list[RelayedFact] = []
        self._news = asyncio.Event()

    def receive(self, relayed: RelayedFact) -> None:
        self.relayed.append(relayed)
        self._news.set()

    @property
    def facts(self) -> list[EngineFact]:
        return [relayed.fact for relayed in self.relayed]

    def of(self, kind: type[FactT]) -> list[FactT]:
        return [fact for fact in self.facts if isinstance(fact, kind)]

    async def wait_for(
        self, kind: type[FactT], where: Callable[[FactT], bool] = lambda _: True, within_s: float = 60.0
    ) -> FactT:
        """Return the first matching fact of that kind; wait for it if it has not come yet."""
        found: list[FactT] = []

        def look() -> bool:
            found.extend(fact for fact in self.of(kind) if where(fact))
            return bool(found)

        await self.wait_until(look, within_s)
        return found[0]

    async def wait_until(self, condition: Callable[[], bool], within_s: float = 60.0) -> None:
        """Return once ``condition`` holds; check it now and after each fact."""
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"not within {within_s} s; facts: {self.facts}") from None
