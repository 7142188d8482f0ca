# SPDX-License-Identifier: Apache-2.0

"""Notices a coroutine that was created and never awaited, and says where.

Python's own warning names only the coroutine. The log says where it was created, because its work was not done.
"""

from __future__ import annotations

import sys
import threading

from actors.logs import get_logger
from actors.repeated_lines import CountedLog
from protocol.errors import LocalProtocolError
from protocol.ids import ExecutionAttempt

__all__ = ["AwaitCheck", "check_thread"]

log = CountedLog(get_logger("headgate.coordinator"))


class AwaitCheck:
    """An argument of the watched coroutine, which sets ``begun`` first. If it is dropped before that, it logs."""

    __slots__ = ("_attempt", "begun")

    def __init__(self, attempt: ExecutionAttempt) -> None:
        self._attempt = attempt
        self.begun = False

    def __del__(self) -> None:
        if not self.begun:
            frame = sys._getframe(1)  # usually the statement that lacks the await
            log.warning(
                "send_event never awaited",
                operator_id=self._attempt.operator_id,
                subtask=self._attempt.subtask,
                attempt=self._attempt.attempt,
                at=f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}",
                hint="the event was not sent: write `await gateway.send_event(...)`",
            )


def check_thread(owner: int, attempt: ExecutionAttempt) -> None:
    """Raise ``LocalProtocolError`` unless the caller is the thread ``owner``, in which the event loop runs."""
    if threading.get_ident() != owner:
        raise LocalProtocolError(
            f"the gateway of {attempt} was used from thread {threading.current_thread().name!r}, but it belongs to the "
            "event loop: call context.call_soon_threadsafe(handler), and send in the handler"
        )
