# SPDX-License-Identifier: Apache-2.0

"""When a call is tried again: exponential pauses with jitter, and what the service itself asks for."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from protocol.arguments import AT_LEAST_1, NOT_NEGATIVE, check_fields, checked_names

__all__ = ["NO_RETRY", "Retry"]

AGAIN = frozenset({408, 409, 425, 429, *range(500, 600)})
"""The statuses of HTTP after which the same call may go well."""


def _status(error: BaseException) -> int | None:
    """The status of HTTP that an error has, as those of aiohttp, httpx and requests, and of clients made with them."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code"):
            status = getattr(holder, name, None)
            if isinstance(status, int):
                return status
    return None


def may_pass(error: BaseException) -> bool:
    """Whether the failure may pass by itself: a time-out, a connection that broke, or a status of HTTP that says so."""
    status = _status(error)
    return status in AGAIN if status is not None else isinstance(error, TimeoutError | ConnectionError)


def asked_pause_s(error: BaseException) -> float | None:
    """The seconds that ``Retry-After`` of an error's response asks for; None if it asks for nothing."""
    for holder in (error, getattr(error, "response", None)):
        headers: Any = getattr(holder, "headers", None)
        text = headers.get("Retry-After") or headers.get("retry-after") if hasattr(headers, "get") else None
        if isinstance(text, str):
            try:
                return max(0.0, float(text))
            except ValueError:
                pass
            try:
                return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
            except (TypeError, ValueError):
                return None
    return None


@checked_names
@dataclass(frozen=True)
class Retry:
    """How a call that failed is tried again.

    The pause before the second try is ``pause_s``, before the third one twice that, and so on up to ``pause_s_max``,
    each shortened at random by up to a half, so that calls that failed together do not come back together. If the
    error's response has ``Retry-After``, the pause is at least that, however long. A call that waits between two tries
    keeps its place among those in flight.

    Args:
        tries: how many calls are made at most, with the first one; at least 1.
        on: a function of the error that says whether to try again. By default time-outs, connections that broke
            (``ConnectionError``), and errors with one of these statuses of HTTP: 408, 409, 425, 429, and 500 to 599.
        pause_s: seconds before the second try.
        pause_s_max: the longest pause, in seconds, unless the service asks for a longer one.
    """

    tries: int = 5
    on: Callable[[Exception], bool] = may_pass
    pause_s: float = 0.5
    pause_s_max: float = 60.0

    def __post_init__(self) -> None:
        check_fields(self, tries=AT_LEAST_1, pause_s=NOT_NEGATIVE, pause_s_max=NOT_NEGATIVE)
        if self.pause_s_max < self.pause_s:
            raise ValueError(f"pause_s_max must be at least pause_s ({self.pause_s!r}), not {self.pause_s_max!r}")

    def pause_after(self, tries: int, error: Exception) -> float | None:
        """The seconds until the next try after ``tries`` that failed, the last one with ``error``; None if it was the
        last."""
        if tries >= self.tries or not self.on(error):
            return None
        pause_s = min(self.pause_s_max, self.pause_s * 2.0 ** min(tries - 1, 60))
        asked = asked_pause_s(error)
        return max(pause_s * random.uniform(0.5, 1.0), asked or 0.0)


NO_RETRY = Retry(tries=1)
