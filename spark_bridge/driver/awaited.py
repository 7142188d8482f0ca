# SPDX-License-Identifier: Apache-2.0

"""Methods that must be awaited, and say so if they are not.

Without this, the second line of a forgotten ``await`` fails with "'coroutine' object has no attribute 'subtask'", and a
call whose result is not used does nothing, silently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Generator
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

from actors.logs import get_logger

__all__ = ["must_be_awaited"]

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])

log = get_logger("headgate.sidecar")


class _Call(Coroutine[Any, Any, Any]):
    """A coroutine of a method of ``SidecarRuntime``. It logs if it is dropped before anything has run it."""

    __slots__ = ("_at", "_begun", "_coroutine", "_method", "_told")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], method: str, at: str) -> None:
        self._coroutine = coroutine
        self._method = method
        self._at = at
        self._begun = False  # or closed
        self._told = False  # the caller was, by an exception

    def __await__(self) -> Generator[Any, Any, Any]:
        self._begun = True
        return self._coroutine.__await__()

    def send(self, value: Any, /) -> Any:
        self._begun = True
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._begun = True
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._begun = True
        self._coroutine.close()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith(("_", "cr_", "gi_")):  # asked for by tools, which expect to be refused
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._told = True
        raise AttributeError(
            f"{self._method}() was called without await, so its result with {name!r} is not here yet: "
            f"write `await sidecar.{self._method}(...)` at {self._at}"
        )

    def __del__(self) -> None:
        if self._begun or sys.is_finalizing():
            return
        self._coroutine.close()  # Python would only name the coroutine, not the line
        if self._told:
            return
        log.warning(
            "sidecar method never awaited",
            method=self._method,
            at=self._at,
            hint=f"nothing was done: write `await sidecar.{self._method}(...)`",
        )


def must_be_awaited(method: F) -> F:
    """Decorate an ``async def`` of ``SidecarRuntime``: a forgotten ``await`` is then refused or logged, with its line.

    The call returns a coroutine as before, which can be awaited, given to a task, or passed to ``asyncio.gather``.
    """

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> _Call:
        caller = sys._getframe(1)
        at = f"{caller.f_code.co_filename}:{caller.f_lineno} in {caller.f_code.co_name}"
        return _Call(method(*args, **kwargs), method.__name__, at)

    return cast(F, call)
