# SPDX-License-Identifier: Apache-2.0

"""Long work on the event loop, in steps: other work of the loop gets a turn after each.

A thread would not help, because what takes long here holds the interpreter lock. A coordinator takes one message at a
time, so the order of what happens to it stays as it is.
"""

from __future__ import annotations

from typing import TypeVar

from anyio.lowlevel import checkpoint

from protocol.wire.state import Steps, run_steps

__all__ = ["Begun", "in_turns"]

T = TypeVar("T")

FIRST_STEPS = 16
"""How many steps a constructor does by itself. Each takes a millisecond or less."""


async def in_turns(steps: Steps[T]) -> T:
    """Do all steps, with a turn for others after each, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await checkpoint()


class Begun:
    """Work that a constructor begins, and ``start`` finishes in turns. The first steps are done right away."""

    __slots__ = ("_is_over", "_steps")

    def __init__(self, steps: Steps[None]) -> None:
        self._steps = steps
        self._is_over = any(next(steps, self) is self for _ in range(FIRST_STEPS))

    async def finish(self) -> None:
        """Do what is left. Raises what the work raises."""
        if not self._is_over:
            self._is_over = True
            await in_turns(self._steps)

    def finish_now(self) -> None:
        """Do what is left without a turn for others: for work that is short."""
        if not self._is_over:
            self._is_over = True
            run_steps(self._steps)
