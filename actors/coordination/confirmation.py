# SPDX-License-Identifier: Apache-2.0

"""The awaitable that tells whether an event arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator

from protocol.arguments import checked
from protocol.errors import AttemptOver


class Confirmation:
    """The outcome of one event. Awaiting it returns when the event is in the operator's mailbox.

    It may be awaited many times, by many tasks, or not at all. Cancelling one that waits does not affect the event.

    Raises:
        AttemptOver: when awaited, if the attempt ended first. The operator may or may not have handled the event.
        ConfirmationTimeout: when awaited, for a loss-tolerant event that was not confirmed in time.
    """

    # H23
    __slots__ = ("_callbacks", "_done", "_error", "_waiters", "part", "sent_at", "size")

    def __init__(self, size: int = 0, sent_at: float = 0.0, part: int = 0) -> None:
        """For the gateway: the encoded event's size in bytes, when it was sent, in seconds of the actors' clock, and
        the part that sent it."""
        self.size = size
        self.sent_at = sent_at
        self.part = part
        self._done = False
        self._error: AttemptOver | None = None
        self._waiters: list[asyncio.Future[None]] | None = None  # most confirmations need at most one of these lists
        self._callbacks: list[Callable[[Confirmation], object]] | None = None

    def __await__(self) -> Generator[object, None, None]:
        if not self._done:
            waiter = asyncio.get_running_loop().create_future()
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
            try:
                yield from waiter.__await__()
            finally:
                if self._waiters and waiter in self._waiters:
                    self._waiters.remove(waiter)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._done

    def confirmed(self) -> bool:
        """Whether the event is known to be in the operator's mailbox."""
        return self._done and self._error is None

    def error(self) -> AttemptOver | None:
        """Why the event will never be confirmed; None if it was, or if that is still open."""
        return self._error

    @checked()
    def add_done_callback(self, callback: Callable[[Confirmation], object]) -> None:
        """Call ``callback(self)`` on the event loop when the outcome is known; immediately if it already is."""
        if self._done:
            callback(self)
        else:
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append(callback)

    def settle(self, error: AttemptOver | None = None) -> None:
        """For the gateway: the event was confirmed, or never will be. Only the first call counts."""
        if self._done:
            return
        self._done = True
        self._error = error
        if self._waiters:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters = None
        if self._callbacks:
            callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks:
                callback(self)
