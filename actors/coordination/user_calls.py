"""Calls of what users have written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def call_user(method: str, call: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Call a method of the user's. One that awaits something which was cancelled has failed; it is not cancelled.

    That is a ``RuntimeError`` which names ``method``. The call itself is inside: wrong arguments raise here too.
    """
    try:
        return await call(*args)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError(f"{method} awaited something that was cancelled") from error


__all__ = ["call_user"]
