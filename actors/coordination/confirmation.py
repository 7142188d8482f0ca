"""The awaitable that tells the fate of one event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator

from protocol.errors import AttemptOver


class Confirmation:
    """Await it to wait until the event is in the operator's mailbox (H23); raises ``AttemptOver`` otherwise.

    May be awaited many times, by many, or not at all; cancelling a waiter leaves the event alone.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_waiters", "sent_at", "size")

    def __init__(self, size: int = 0, sent_at: float = 0.0) -> None:
        """For the gateway: the bytes of the encoded event, and when it was handed over, on the actors' clock."""
        self.size = size
        self.sent_at = sent_at
        self._done = False
        self._error: AttemptOver | None = None
        self._waiters: list[asyncio.Future[None]] | None = None  # most have one of these at the most
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
        """Whether the fate of the event is known."""
        return self._done

    def confirmed(self) -> bool:
        """Whether the event is known to be in the operator's mailbox."""
        return self._done and self._error is None

    def error(self) -> AttemptOver | None:
        """Why the event will never be confirmed, if so."""
        return self._error

    def add_done_callback(self, callback: Callable[[Confirmation], object]) -> None:
        """Call ``callback(self)`` on the loop once the fate is known; at once if it is known already."""
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
