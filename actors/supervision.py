# SPDX-License-Identifier: Apache-2.0

"""Decides what to do about a failure, as a pure function.

``decide`` takes a policy, the restarts so far, the failure and the time, and returns what to do. It does nothing
itself: the actor's own task carries the decision out, and tests read it as a table.

The policy belongs to the actor that failed and is given to ``spawn``. The default is to escalate: the parent fails with
the same cause, and so on up to the system, whose ``async with`` raises it. So a failure is loud unless a policy says
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from protocol.arguments import FACTOR, WAIT, check_fields
from protocol.describing import is_a


class Directive(Enum):
    """What happens to an actor that failed."""

    RESUME = "resume"
    """Skip the message; keep the instance and its state."""
    RESTART = "restart"
    """Close the instance and build a new one. Queued messages stay, in order; references stay valid."""
    STOP = "stop"
    """End the actor; its watchers get the cause."""
    ESCALATE = "escalate"
    """End the actor, and fail its parent with the same cause."""


_FROM_LENIENT_TO_STRICT = (Directive.RESUME, Directive.RESTART, Directive.STOP, Directive.ESCALATE)


@dataclass(frozen=True, slots=True)
class Supervision:
    """The policy for one actor.

    Args:
        on_failure: What to do about an exception that no rule matches.
        rules: Pairs of an exception type and a directive; the first whose type matches counts. Rules see into an
            ``ExceptionGroup``: the strictest directive for any exception in it counts (in the order RESUME, RESTART,
            STOP, ESCALATE), unless a rule names the group's own type.
        max_restarts: How many restarts are allowed within ``within_s``; None for any number.
        within_s: The length of that sliding window in seconds; None for the whole life of the actor.
        backoff_s: Seconds that the first restart in the window waits.
        backoff_factor: How many times as long each further restart waits.
        backoff_max_s: The longest such wait in seconds.
        when_exhausted: What to do about the failure after ``max_restarts``: STOP or ESCALATE.

    Raises:
        ValueError: A number is negative, the window empty, or ``when_exhausted`` would never end.
    """

    on_failure: Directive = Directive.ESCALATE
    rules: tuple[tuple[type[BaseException], Directive], ...] = ()
    max_restarts: int | None = 3
    within_s: float | None = 60.0
    backoff_s: float = 0.0
    backoff_factor: float = 2.0
    backoff_max_s: float = 30.0
    when_exhausted: Directive = Directive.ESCALATE

    def __post_init__(self) -> None:
        check_fields(self, backoff_s=WAIT, backoff_factor=FACTOR, backoff_max_s=WAIT)
        if self.when_exhausted in (Directive.RESTART, Directive.RESUME):
            raise ValueError(
                f"when_exhausted must be STOP or ESCALATE, not {self.when_exhausted.name}: that would never end"
            )


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong. ``while_starting``: no instance has completed ``started`` yet, so none can be resumed."""

    cause: BaseException
    while_starting: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a failure.

    Args:
        directive: What happens to the actor.
        delay_s: Seconds before a restart.
        history: The times of the restarts so far, for the next decision.
        exhausted: Whether the policy's restarts are used up.
    """

    directive: Directive
    delay_s: float = 0.0
    history: tuple[float, ...] = field(default=(), compare=False)
    exhausted: bool = False


def decide(policy: Supervision, history: Sequence[float], failure: Failure, now: float) -> Decision:
    """Decide about one failure.

    A failure while starting turns RESUME into RESTART, because there is no instance to keep.

    Args:
        policy: The policy of the actor that failed.
        history: The times of the restarts so far, oldest first (``Decision.history`` of the last decision).
        failure: What went wrong.
        now: The current time in seconds, on the clock of the history.
    """
    directive = _directive_for(policy, failure.cause)
    if directive is Directive.RESUME and failure.while_starting:
        directive = Directive.RESTART
    if directive is not Directive.RESTART:
        return Decision(directive, history=tuple(history))
    recent = tuple(at for at in history if policy.within_s is None or at > now - policy.within_s)
    if policy.max_restarts is not None and len(recent) >= policy.max_restarts:
        return Decision(policy.when_exhausted, history=recent, exhausted=True)
    delay_s = _back_off(policy, len(recent))
    return Decision(Directive.RESTART, delay_s, _bounded(policy, (*recent, now)))


def _directive_for(policy: Supervision, cause: BaseException) -> Directive:
    """The strictest directive for any exception in a group, unless a rule names groups themselves."""
    for exception_type, directive in policy.rules:
        names_groups = issubclass(exception_type, BaseExceptionGroup)
        if is_a(cause, exception_type) and names_groups == is_a(cause, BaseExceptionGroup):
            return directive
    if is_a(cause, BaseExceptionGroup):
        return max((_directive_for(policy, one) for one in cause.exceptions), key=_FROM_LENIENT_TO_STRICT.index)
    return policy.on_failure


def _back_off(policy: Supervision, restarts: int) -> float:
    # The exponent is capped so that a long history cannot overflow a float.
    return min(policy.backoff_s * policy.backoff_factor ** min(restarts, 64), policy.backoff_max_s)


def _bounded(policy: Supervision, history: tuple[float, ...]) -> tuple[float, ...]:
    # Without a limit of number only the back-off reads the history, and it stops growing at 64.
    return history if policy.max_restarts is not None else history[-64:]
