# SPDX-License-Identifier: Apache-2.0

"""Keep an exception that would end the loop, or a task, inside the call that raised it.

``SystemExit`` and ``KeyboardInterrupt`` out of any task stop the whole event loop; ``CancelledError`` and
``GeneratorExit`` look like an end of the task that was never requested. User code may raise any of them.
``contained`` turns each into an ordinary exception, so that it fails the actor that made the call and nothing else.
"""

from __future__ import annotations

import asyncio
import math

import anyio

from actors.errors import ExitRaised
from protocol.describing import describe, is_a

__all__ = ["Abandoned", "as_exception", "contained", "forget_cancellations"]


def as_exception(what: str, error: BaseException) -> Exception:
    """``error`` itself, or an ``ExitRaised`` with ``error`` as its cause; ``what`` names the call."""
    if is_a(error, Exception):
        return error
    if is_a(error, asyncio.CancelledError):
        exit_raised = ExitRaised(what, "awaited something that was cancelled")
    else:
        exit_raised = ExitRaised(what, f"raised {describe(error)}")
    exit_raised.__cause__ = error
    return exit_raised


class Abandoned(BaseException):
    """Thrown into code that ignores its cancellation, before it is left where it stands permanently.

    It is not a ``GeneratorExit``: that would close what a coroutine awaits instead of being raised there.
    """


def contained(what: str, error: BaseException) -> Exception:
    """``as_exception``, for use in the task that made the call.

    A cancellation of this task by a cancel scope is raised again: that is how the runtime ends actors and their work.
    Any other cancellation comes from the called code, even if that cancelled the task itself. ``Abandoned`` is raised
    again, and so is a ``GeneratorExit`` if no task runs, because the coroutine is then being closed.
    """
    if is_a(error, Abandoned):
        raise error
    if is_a(error, asyncio.CancelledError):
        if anyio.current_effective_deadline() == -math.inf:
            raise error
        forget_cancellations()
    elif is_a(error, GeneratorExit) and not _in_a_task():
        raise error
    return as_exception(what, error)


def forget_cancellations() -> None:
    """Take back all requests to cancel this task; they did not come from the runtime."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()


def _in_a_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no running event loop
        return False
