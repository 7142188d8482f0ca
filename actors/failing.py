"""What an actor's own task does about a failure, once ``supervision.decide`` has decided."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actors.errors import HandlerCancelled
from actors.exits import contained
from actors.signals import ChildFailed, FailCommand, RestartCommand
from actors.supervision import Decision, Directive, Scope

if TYPE_CHECKING:
    from actors.cell import ActorCell


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an instance ends: ``restart_after_s`` is None for a stop."""

    cause: BaseException | None
    restart_after_s: float | None = None


def own_failure(cell: ActorCell[Any], failure: BaseException, what: str) -> BaseException:
    """Tell a cancellation of this actor, which is raised again, from one that a handler let out: a failure.

    Without this, a handler that awaits something that others cancelled would end its actor without a word, and a
    ``SystemExit`` would end the event loop with all actors on it.
    """
    if not isinstance(failure, asyncio.CancelledError):
        return contained(f"actor {cell.path!r}: {what}", failure)
    task = asyncio.current_task()
    if cell.cancel_called or cell.system.cancelled or (task is not None and task.cancelling()):
        raise failure
    error = HandlerCancelled(cell.path, what)
    error.__cause__ = failure
    return error


def carry_out(cell: ActorCell[Any], cause: BaseException, decision: Decision) -> Verdict | None:
    """Tell those concerned, and say what the actor's task must do; None is to go on."""
    system = cell.system
    cell.log.warning("actor_failed", decision=decision.directive.value, exc_info=cause)
    for hook in system.hooks:
        hook.actor_failed(cell.ref, cause, decision)
    if cell.parent is not None:
        cell.parent.mailbox.signal(ChildFailed(cell.ref, cause, decision))
    _concern_siblings(cell, cause, decision)
    match decision.directive:
        case Directive.RESUME:
            return None
        case Directive.RESTART:
            return Verdict(cause, decision.delay_s)
        case Directive.ESCALATE:
            if cell.parent is None:
                system.fail(cause)
            else:
                cell.parent.mailbox.signal(FailCommand(cause))
    return Verdict(cause)


def _concern_siblings(cell: ActorCell[Any], cause: BaseException, decision: Decision) -> None:
    if decision.scope is not Scope.ONE_FOR_ALL:
        return
    for sibling in cell.system.siblings(cell):
        if decision.directive is Directive.RESTART:
            sibling.mailbox.signal(RestartCommand(cause, decision.delay_s))
        elif decision.directive is Directive.STOP:
            cell.system.request_stop(sibling)
