# SPDX-License-Identifier: Apache-2.0

"""The task's half of permits, and what user code sees of it there.

to the coordinator   request ["acquire", number, slot]      a permit of the rate, and a slot if one is needed;
                                                            the answer is how long not to use them
                     ["cancel", number]                     the task waits no longer
                     ["more", count]                        permits ahead of need
                     ["release", slots]
to a task            ["permits", delays]                    answer to "more"
                     ["contended", bool]                    whether others wait for slots (urgent)
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

from protocol.arguments import WAIT, checked
from protocol.errors import LocalProtocolError
from spark_bridge.primitives.permits.schedule import EXPIRY_S
from spark_bridge.subtask.chain import TaskPart, current_part
from spark_bridge.subtask.errors import TimedOut

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["PermitsInTask", "PermitsPart"]

AHEAD_MAX = 256
"""The most permits that a task holds ahead of need."""


class PermitsPart(TaskPart):
    """The permits that this task holds. ``acquire`` and ``release`` are for any of its threads."""

    waits_for_subtask_ready = False

    def __init__(self, name: str, limits_rate: bool, limits_users: bool, hands_out_ahead: bool) -> None:
        self._name = name
        self._requests = 0
        self._limits_rate = limits_rate
        self._limits_users = limits_users
        self._hands_out_ahead = hands_out_ahead
        self._permits: deque[float] = deque()  # the moments from which they may be used, ascending
        self._ahead = 0 if not hands_out_ahead else 1  # how many to hold, as the use demands
        self._asked = False
        self._idle_slots = 0
        self._users = 0  # in this task, each with a slot
        self._contended = False
        self._lock = threading.Lock()
        self._context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context

    def acquire(self, timeout_s: float) -> None:
        """Wait until one may be used. A slot must be released."""
        deadline = self._now() + timeout_s
        with self._lock:
            needs_slot = self._limits_users and not self._idle_slots
            if self._limits_users and not needs_slot:
                self._idle_slots -= 1
                self._users += 1
            due = self._take() if self._limits_rate and not needs_slot else None
        if needs_slot or (self._limits_rate and due is None):
            due = self._ask(needs_slot, timeout_s)
        if due is not None and due > self._now():
            if due > deadline:
                self.release()
                raise self._context.timed_out(
                    f"no permit of {self._name!r} within {timeout_s:g} s: raise its limits, or wait longer"
                )
            self._context.sleep(due - self._now())

    def _ask(self, needs_slot: bool, timeout_s: float) -> float:
        """Ask for a permit of the rate, as far as there is one, and for a slot. Return when they may be used."""
        with self._lock:
            self._requests += 1
            number = self._requests
        try:
            delay: float = self._context.request(["acquire", number, needs_slot], timeout_s)
        except TimedOut as error:
            self._context.send_event(["cancel", number])
            raise self._context.timed_out(
                f"no permit of {self._name!r} within {timeout_s:g} s: others use them all, or this task itself holds "
                "one that it has not released; wait longer, or raise the limit"
            ) from error
        if needs_slot:
            with self._lock:
                self._users += 1
        return self._now() + delay

    def release(self) -> None:
        """Give a slot back, or keep it for the next use if nobody else waits for one."""
        if not self._limits_users:
            return
        with self._lock:
            if not self._users:
                raise LocalProtocolError(
                    f"release() of the permits {self._name!r} without an acquire() before it: call it once after each, "
                    "or use `with permits:`"
                )
            self._users -= 1
            keeps = not self._contended and not self._idle_slots
            if keeps:
                self._idle_slots += 1
        if not keeps:
            self._context.send_event(["release", 1])

    def _take(self) -> float | None:
        """The moment from which the next permit of the rate may be used; None if there is none here."""
        now = self._now()
        while self._permits and self._permits[0] < now - EXPIRY_S:
            self._permits.popleft()
            self._ahead = max(1, self._ahead // 2)  # it holds more than it uses
        due = self._permits.popleft() if self._permits else None
        if self._hands_out_ahead and not self._asked and len(self._permits) <= self._ahead // 2:
            if due is None or due <= now:
                self._ahead = min(AHEAD_MAX, 2 * self._ahead)
            self._asked = True
            self._context.send_event(["more", self._ahead])
        return due

    def handle_event(self, event: Any) -> None:
        match event:
            case ["permits", delays]:
                now = self._now()
                with self._lock:
                    self._permits.extend(now + delay for delay in delays)
                    self._asked = False
            case ["contended", bool(contended)]:
                with self._lock:
                    self._contended = contended
                    idle, self._idle_slots = (self._idle_slots, 0) if contended else (0, self._idle_slots)
                if idle:
                    self._context.send_event(["release", idle])
            case _:
                raise ValueError(f"not an event of permits: {event!r:.80}")

    def handle_urgent(self, event: Any) -> None:
        self.handle_event(event)

    def _now(self) -> float:
        return self._context.now()


class PermitsInTask:
    """``Permits`` in a task."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<Permits {self._name!r}>"

    def _part(self) -> PermitsPart:
        part: PermitsPart = current_part("permits", self._name)
        return part

    @checked(timeout_s=WAIT)
    def acquire(self, timeout_s: float = 600.0) -> None:
        """In a task: wait until the next use is allowed. With ``concurrency``, call ``release`` after it.

        A checkpoint that begins while this waits for the driver is declined, as in ``context.request``.

        Raises:
            TimedOut: no permit within ``timeout_s`` seconds.
            LocalProtocolError: outside a function that ``handle.subtask`` runs in tasks.
            AttemptOver: the attempt is over.
        """
        self._part().acquire(timeout_s)

    def release(self) -> None:
        """In a task: end a use that ``acquire`` began. Has no effect without ``concurrency``.

        Raises ``LocalProtocolError`` if this task uses none.
        """
        self._part().release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
