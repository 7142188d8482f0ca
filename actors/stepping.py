"""Measure how long a coroutine holds the event loop, step by step.

A coroutine that awaits for an hour harms nobody; one that computes for half a second stops every other actor.
To tell the two apart its steps are timed one by one: from where it is resumed to where it next suspends.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Resume:
    """Awaitable for the rest of a coroutine that has made its first step and has yielded ``yielded``.

    ``held`` is called with the length in seconds of each step that took longer than ``limit_s``.
    """

    __slots__ = ("_coroutine", "_held", "_limit_s", "_timer", "_yielded")

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        yielded: Any,
        timer: Callable[[], float],
        limit_s: float,
        held: Callable[[float], None],
    ) -> None:
        self._coroutine = coroutine
        self._yielded = yielded
        self._timer = timer
        self._limit_s = limit_s
        self._held = held

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, yielded, timer = self._coroutine, self._yielded, self._timer
        while True:
            thrown: BaseException | None = None
            sent: Any = None
            try:
                sent = yield yielded
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as exception:
                thrown = exception
            resumed_at = timer()
            try:
                yielded = coroutine.send(sent) if thrown is None else coroutine.throw(thrown)
            except StopIteration as stop:
                return stop.value
            finally:
                thrown = None
                held_s = timer() - resumed_at
                if held_s > self._limit_s:
                    self._held(held_s)


async def timed(
    coroutine: Coroutine[Any, Any, T],
    timer: Callable[[], float],
    limit_s: float,
    held: Callable[[float], None],
) -> T:
    """Await ``coroutine`` and have ``held`` called for each step that took longer than ``limit_s``
    seconds."""
    began_at = timer()
    try:
        yielded = coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        held_s = timer() - began_at
        if held_s > limit_s:
            held(held_s)
    rest: T = await Resume(coroutine, yielded, timer, limit_s, held)
    return rest
