# SPDX-License-Identifier: Apache-2.0

"""What the conformance suites have in common."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from protocol.arguments import ANY, checked

TargetT = TypeVar("TargetT")


@dataclass(frozen=True)
class Case(Generic[TargetT]):
    """One thing that a sink, with a ``SinkTarget``, or a source, with a ``SourceTarget``, must survive.

    Its text is a name for people.
    """

    name: str
    check: Callable[[TargetT], Awaitable[None]]

    def __str__(self) -> str:
        return self.name

    @checked(target=ANY)
    def run(self, target: TargetT) -> None:
        """Run the case on ``target``, in this thread. It may be on an event loop's thread only if that loop is idle.

        Raises:
            AssertionError: records are lost, doubled or changed, some are visible too early, or something is left
                behind.
        """
        asyncio.run(self._run(target))

    async def _run(self, target: TargetT) -> None:
        await self.check(target)


def case(name: str, check: Callable[..., Awaitable[None]], *args: Any) -> Case[Any]:
    """A case whose ``check`` gets the target, and then ``args``."""
    return Case(name, lambda target: check(target, *args))


def some(moments: Sequence[Any], most: int, seed: int) -> list[Any]:
    """At most so many of ``moments``, in order."""
    if len(moments) <= most:
        return list(moments)
    return [moments[place] for place in sorted(random.Random(seed).sample(range(len(moments)), most))]


@contextmanager
def told(what: str) -> Iterator[None]:
    """Add to a failure what was tried."""
    try:
        yield
    except BaseException as error:
        error.add_note(what)
        raise
