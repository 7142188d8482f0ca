"""Work that an actor starts and does not wait for; what becomes of it comes back as a message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio

from actors.exits import contained
from actors.mailbox import Envelope
from actors.signals import FailCommand
from actors.stepping import Steps
from actors.waits import current_cell

if TYPE_CHECKING:
    from actors.cell import ActorCell


class Background:
    """One piece of background work. It is cancelled when its actor stops or restarts."""

    __slots__ = ("_scope", "done", "name", "steps")

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = False
        self._scope = anyio.CancelScope()
        self.steps: Steps[Any] | None = None  # what runs it

    def cancel(self) -> None:
        """Cancel the work. No message comes back from it, even if one waits in the mailbox. Harmless when
        over."""
        self._scope.cancel()

    def abandon(self, log: Any) -> None:
        """It has ignored its cancellation: name it, and run it no further."""
        if self.steps is not None and not self.steps.abandoned:
            log.error("background work ignored its cancellation", what=self.name, waiting_at=self.steps.place)
            self.steps.abandon()

    @property
    def cancelled(self) -> bool:
        """Whether it has been cancelled."""
        return self._scope.cancel_called


class ResultEnvelope(Envelope):
    """What came of background work; void if that was cancelled meanwhile."""

    __slots__ = ("_work",)

    def __init__(self, message: object, work: Background) -> None:
        self.message = message
        self._work = work

    def open(self) -> bool:
        return not self._work.cancelled

    def undeliverable(self, error: Exception) -> bool:
        return not self._work.cancelled


async def run_background(
    cell: ActorCell[Any],
    work: Background,
    function: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    on_result: Callable[[Any], Any] | None,
    on_error: Callable[[Exception], Any] | None,
) -> None:
    """Run one piece of work to its end and hand the outcome to the actor. Raises nothing but its own cancellation."""
    current_cell.set(cell)
    system = cell.system
    system.works.add(work)
    try:
        with work._scope:

            async def call() -> Any:
                return await function(*args)

            try:
                work.steps = Steps(
                    call(), system.loop_timer, system.slow_handler_limit_s, lambda s: cell.held(work.name, s)
                )
                result = await work.steps
                if work.steps.abandoned:
                    return
                message = None if on_result is None else on_result(result)
            except BaseException as error:
                failure = contained(work.name, error)
                if on_error is None:
                    cell.mailbox.signal(FailCommand(failure))
                    return
                on_result = on_error
                message = on_error(failure)
            if on_result is not None and not work.cancelled:
                cell.mailbox.force(ResultEnvelope(message, work))
    except BaseException as error:  # on_error itself raised
        cell.mailbox.signal(FailCommand(contained(work.name, error)))
    finally:
        work.done = True
        system.works.discard(work)
        cell.background_ended(work)
