"""What to do about a failure, as a pure function.

``decide`` looks at a policy, at the restarts there have been, at the failure and at the time, and says what
is to be done. It does nothing itself: the actor's own task carries the decision out, and tests read it as a
table.

The policy belongs to the actor that failed and is given when it is spawned. The default is to escalate: the
parent fails with the same cause, and so on up to the system, whose ``async with`` raises it. A failure is
therefore loud unless somebody said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Directive(Enum):
    """What becomes of an actor that failed."""

    RESUME = "resume"
    """Skip the message, keep the instance and its state."""
    RESTART = "restart"
    """Close the instance and build a new one; the messages that wait stay, in order. References stay
    valid."""
    STOP = "stop"
    """End the actor; those who watch it are told the cause."""
    ESCALATE = "escalate"
    """End the actor, and fail the parent with the same cause."""


class Scope(Enum):
    """Whom a decision concerns."""

    ONE_FOR_ONE = "one-for-one"
    ONE_FOR_ALL = "one-for-all"
    """A restart or a stop is done to every child of the same parent. (Give all siblings the same policy.)"""


@dataclass(frozen=True, slots=True)
class Supervision:
    """The policy for one actor.

    on_failure: what is done about an exception for which ``rules`` has nothing.
    rules: pairs of an exception type and a directive; the first that fits is taken.
    max_restarts, within_s: at most so many restarts in a sliding window of so many seconds. None for either
        means without limit (of number, of time). One more failure than that gets ``when_exhausted``.
    backoff_s, backoff_factor, backoff_max_s: the first restart in the window waits ``backoff_s`` seconds,
        each further one ``backoff_factor`` times as long, up to ``backoff_max_s``.
    """

    on_failure: Directive = Directive.ESCALATE
    rules: tuple[tuple[type[BaseException], Directive], ...] = ()
    max_restarts: int | None = 3
    within_s: float | None = 60.0
    backoff_s: float = 0.0
    backoff_factor: float = 2.0
    backoff_max_s: float = 30.0
    when_exhausted: Directive = Directive.ESCALATE
    scope: Scope = Scope.ONE_FOR_ONE

    def __post_init__(self) -> None:
        if self.max_restarts is not None and self.max_restarts < 0:
            raise ValueError("max_restarts must be 0 or more, or None")
        if self.within_s is not None and self.within_s <= 0:
            raise ValueError("within_s must be positive, or None")
        if self.backoff_s < 0 or self.backoff_max_s < 0 or self.backoff_factor < 1:
            raise ValueError("back-off times must be 0 or more and the factor 1 or more")
        if self.when_exhausted in (Directive.RESTART, Directive.RESUME):
            raise ValueError("when_exhausted must be STOP or ESCALATE: the others would never end")


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong. ``while_starting``: no instance has completed ``started`` yet, so none can be
    resumed."""

    cause: BaseException
    while_starting: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done. ``history`` is to be given to the next call of ``decide``."""

    directive: Directive
    delay_s: float = 0.0
    scope: Scope = Scope.ONE_FOR_ONE
    history: tuple[float, ...] = field(default=(), compare=False)
    exhausted: bool = False


def decide(policy: Supervision, history: Sequence[float], failure: Failure, now: float) -> Decision:
    """Decide about one failure.

    history: the times of the restarts so far, oldest first (``Decision.history`` of the last decision).
    now: the current time in seconds, on the clock of the history.

    A failure while starting turns RESUME into RESTART, because there is nothing that could go on.
    """
    directive = _directive_for(policy, failure.cause)
    if directive is Directive.RESUME and failure.while_starting:
        directive = Directive.RESTART
    if directive is not Directive.RESTART:
        return Decision(directive, scope=policy.scope, history=tuple(history))
    recent = tuple(history) if policy.within_s is None else _since(history, now - policy.within_s)
    if policy.max_restarts is not None and len(recent) >= policy.max_restarts:
        return Decision(policy.when_exhausted, scope=policy.scope, history=recent, exhausted=True)
    delay_s = _back_off(policy, len(recent))
    return Decision(Directive.RESTART, delay_s, policy.scope, _bounded(policy, (*recent, now)))


def _directive_for(policy: Supervision, cause: BaseException) -> Directive:
    for exception_type, directive in policy.rules:
        if isinstance(cause, exception_type):
            return directive
    return policy.on_failure


def _since(history: Sequence[float], oldest: float) -> tuple[float, ...]:
    return tuple(at for at in history if at > oldest)


def _back_off(policy: Supervision, restarts: int) -> float:
    # The exponent is capped so that a long history cannot overflow a float.
    return min(policy.backoff_s * policy.backoff_factor ** min(restarts, 64), policy.backoff_max_s)


def _bounded(policy: Supervision, history: tuple[float, ...]) -> tuple[float, ...]:
    # Without a limit of number only the back-off reads the history, and it stops growing at 64.
    return history if policy.max_restarts is not None else history[-64:]
