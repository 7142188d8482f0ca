# SPDX-License-Identifier: Apache-2.0

"""Call users' methods, and format the tracebacks of their exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from actors import ExitRaised
from actors.coordination.call_watch import Call, current_watch
from actors.exits import Abandoned, contained
from protocol.describing import describe, is_a, traceback_of

T = TypeVar("T")

TRACEBACK_BYTES_MAX = 8192


async def call_user(method: str, call: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Call a user's method. Whatever it raises leaves here as an ``Exception``, so it ends nothing else.

    Anything that is not an ``Exception`` becomes an ``ExitRaised`` that names ``method``. The cancellation of something
    that the method awaited becomes a ``RuntimeError``. The call itself is included, so wrong arguments raise here too.
    The coordinator's ``CallWatch`` reports a call that does not return.
    """
    watch = current_watch.get()
    open_call: Call | None = None
    try:
        awaited = call(*args)
        if watch is not None:
            open_call = watch.begin(method, args, awaited)
        return await awaited
    except Exception:
        raise
    except BaseException as error:
        try:
            failure = contained(method, error)
        except (asyncio.CancelledError, Abandoned):
            if watch is not None and open_call is not None:
                watch.cancelled(open_call, error)
            raise
        if is_a(error, asyncio.CancelledError):
            failure = RuntimeError(str(failure))
        raise failure from error
    finally:
        if watch is not None and open_call is not None:
            watch.end(open_call)


async def call_each(method: str, calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Call the same method of several users' objects, each of them whatever the others raise.

    Then raise what was raised: alone, or in an ``ExceptionGroup``. A cancellation of the caller passes immediately.
    """
    failures: list[Exception] = []
    for call in calls:
        try:
            await call()
        except BaseException as error:
            failures.append(contained(method, error))
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ExceptionGroup(f"several raised in {method}", failures)


def is_fatal(error: BaseException) -> bool:
    """Whether ``error`` always fails the job, even in methods whose other exceptions are only reported."""
    if type(error) is RuntimeError and isinstance(error.__cause__, asyncio.CancelledError):
        return True
    return is_a(error, ExitRaised | MemoryError | RecursionError)


def true_cause(error: BaseException) -> BaseException:
    """The exception that the user's code raised; the cause of an ``ExitRaised``."""
    cause = error.__cause__
    if is_a(error, ExitRaised) and cause is not None and not is_a(cause, asyncio.CancelledError):
        return cause
    return error


def traceback_text(error: BaseException) -> str:
    """The traceback of ``error`` as text that can be encoded: its end, at most 8 KiB of UTF-8."""
    encoded = (traceback_of(error) or describe(error)).encode("utf-8", "backslashreplace")
    if len(encoded) <= TRACEBACK_BYTES_MAX:
        return encoded.decode()
    mark = b"...\n"
    end = encoded[len(mark) - TRACEBACK_BYTES_MAX :].decode("utf-8", "ignore")  # the cut may be inside a character
    return mark.decode() + end


__all__ = ["TRACEBACK_BYTES_MAX", "call_each", "call_user", "is_fatal", "traceback_text", "true_cause"]
