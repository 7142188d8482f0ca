"""Messages that nobody will handle, and why.

A dead letter is a fact, not an error: ``tell`` to an actor that is over does not raise. Who wants to know
subscribes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.ref import ActorRef


class DeadLetterReason(Enum):
    """Why a message ended here."""

    STOPPED = "the target was already stopped"
    LEFT_BEHIND = "it was still in the mailbox when the target stopped"
    DROPPED_NEWEST = "the mailbox was full and drops what comes"
    DROPPED_OLDEST = "the mailbox was full and dropped its oldest message"
    REFUSED = "the mailbox was full and the sender could not be told"
    HANDLER_FAILED = "the handler raised"
    CUT_OFF = "the handler was cancelled because the target did not stop in time"
    ANSWER_TOO_LATE = "nobody waits for this answer any more"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One message that was not handled. For ``ANSWER_TOO_LATE`` the target is the actor that was asked."""

    target: ActorRef[Any]
    message: object
    reason: DeadLetterReason


class DeadLetters:
    """The dead letters of one system. Loop-only.

    All are counted; the first ``logged_max`` are logged, the last of these saying that no more will be.
    """

    __slots__ = ("_log", "_logged", "_next", "_subscribers", "counts", "logged_max")

    def __init__(self, log: Any, logged_max: int = 20) -> None:
        self._log = log
        self._logged = 0
        self._next = 0
        self._subscribers: dict[int, Callable[[DeadLetter], object]] = {}
        self.counts: Counter[DeadLetterReason] = Counter()
        self.logged_max = logged_max

    def subscribe(self, callback: Callable[[DeadLetter], object]) -> Callable[[], None]:
        """Have ``callback`` called, on the loop and at once, for each dead letter from now on.

        ``ref.tell`` of an actor of ``DeadLetter`` does. An exception of the callback is logged and goes no
        further. Returns the function that ends the subscription.
        """
        self._next = key = self._next + 1
        self._subscribers[key] = callback

        def unsubscribe() -> None:
            self._subscribers.pop(key, None)

        return unsubscribe

    def publish(self, letter: DeadLetter) -> None:
        """Count, log and hand out one dead letter. Never raises."""
        self.counts[letter.reason] += 1
        if isinstance(letter.message, DeadLetter):
            return  # a subscriber that is full or gone: telling it again would never end
        self._log_some(letter)
        for callback in tuple(self._subscribers.values()):
            try:
                callback(letter)
            except Exception:
                self._log.exception("dead_letter_subscriber_failed", subscriber=repr(callback))

    def _log_some(self, letter: DeadLetter) -> None:
        self._logged += 1
        if self._logged > self.logged_max:
            return
        self._log.warning(
            "dead_letter",
            actor=letter.target.name,
            message_type=type(letter.message).__name__,
            reason=letter.reason.name,
            more_are_only_counted=self._logged == self.logged_max,
        )
