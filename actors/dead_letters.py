# SPDX-License-Identifier: Apache-2.0

"""Messages that no actor will handle, and why.

A dead letter is a fact, not an error: ``tell`` to a stopped actor does not raise. Subscribe to be notified of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.mailbox import DeadLetterReason
from actors.ref import ActorRef
from protocol.arguments import checked
from protocol.describing import name_of, type_name

__all__ = ["DeadLetter", "DeadLetterReason", "DeadLetters"]

LOGGED_MAX = 20
"""This many dead letters of a system are logged; further ones are only counted and passed to subscribers."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One message that was not handled. For ``ANSWER_TOO_LATE``, the target is the actor that was asked."""

    target: ActorRef[Any]
    message: object
    reason: DeadLetterReason


class DeadLetters:
    """The dead letters of one system, ``ActorSystem.dead_letters``. Loop-only.

    All are counted in ``counts``, by reason. The first 20 are logged; the last of these says that no more will be.
    """

    __slots__ = ("_log", "_logged", "_next", "_subscribers", "counts")

    def __init__(self, log: Any) -> None:
        self._log = log
        self._logged = 0
        self._next = 0
        self._subscribers: dict[int, Callable[[DeadLetter], object]] = {}
        self.counts: Counter[DeadLetterReason] = Counter()

    @checked()
    def subscribe(self, callback: Callable[[DeadLetter], object]) -> Callable[[], None]:
        """Call ``callback`` with each dead letter from now on. Returns the function that ends the subscription.

        Args:
            callback: Called on the loop, within the call that produced the dead letter, in order of subscription. To
                have an actor handle dead letters, give ``ref.tell`` of an actor of ``DeadLetter``. An exception of
                the callback is logged and goes no further.
        """
        self._next = key = self._next + 1
        self._subscribers[key] = callback

        def unsubscribe() -> None:
            self._subscribers.pop(key, None)

        return unsubscribe

    def publish(self, letter: DeadLetter) -> None:
        """Runtime only: count, log and hand out one dead letter. Never raises."""
        self.counts[letter.reason] += 1
        if isinstance(letter.message, DeadLetter):
            return  # a subscriber that is full or gone: telling it again would never end
        self._logged += 1
        if self._logged <= LOGGED_MAX:
            self._log.warning(
                "message not handled",
                actor=letter.target.name,
                message_type=type_name(letter.message),
                reason=letter.reason.name,
                more_are_only_counted=self._logged == LOGGED_MAX,
            )
        for callback in tuple(self._subscribers.values()):
            try:
                callback(letter)
            except Exception:
                self._log.exception("dead letter subscriber failed", subscriber=name_of(callback))
