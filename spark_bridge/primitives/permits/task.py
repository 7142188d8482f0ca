# SPDX-License-Identifier: Apache-2.0

"""The task's half of permits, and what user code sees of it there.

to the coordinator   request ["acquire", number, slot, timeout_s]   a permit of the rate, and a slot if one is needed;
                                                                    the answer is how long not to use them, or None
                                                                    if that would be too late. Asked again, it may
                                                                    be shorter
                     ["give up", number]                            the task has not used what it asked for there
                     ["more", count]                                permits ahead of need
                     ["release", numbers]                           slots, by the requests that got them
to a task            ["permits", delays]                            answer to "more"; perhaps none
                     ["contended", version, bool]                   whether others wait for slots (urgent)
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from protocol.arguments import WAIT, checked
from protocol.describing import show
from protocol.errors import SAME_RELEASE, GatewayFull, LocalProtocolError
from spark_bridge.primitives.permits.schedule import EXPIRY_S
from spark_bridge.subtask.errors import TimedOut
from spark_bridge.subtask.parts import ON_DRIVER, PartInTask, TaskPart

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

AHEAD_MAX = 256
"""The most permits that a task holds ahead of need."""
LOOK_S_MIN, LOOK_S_MAX = 1.0, 10.0
"""A task that waits for a permit looks for an earlier one after half of the time, within these bounds."""


class _Wait(NamedTuple):
    timeout_s: float
    deadline: float


class PermitsPart(TaskPart):
    """The permits that this task holds. ``acquire`` and ``release`` are for any of its threads."""

    waits_for_subtask_ready = False

    def __init__(self, name: str, limits_rate: bool, limits_users: bool, hands_out_ahead: bool) -> None:
        self._name = name
        self._requests = 0
        self._limits_rate = limits_rate
        self._limits_users = limits_users
        self._hands_out_ahead = hands_out_ahead
        self._permits: list[float] = []  # the moments from which they may be used, ascending
        self._ahead = 0 if not hands_out_ahead else 1  # how many to hold, as the use demands
        self._asked = False
        self._idle_slots: list[int] = []
        self._used_slots: list[int] = []
        self._contended = 0, False  # the version, and whether others wait
        self._unsent: deque[list[Any]] = deque()  # what is given back, and could not be sent yet
        self._lock = threading.Lock()
        self._context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context

    def acquire(self, timeout_s: float) -> None:
        """Wait until one may be used. A slot must be released.

        However this ends without a use, what was reserved for it is given back.
        """
        wait = _Wait(timeout_s, self._now() + timeout_s)
        self._send_back()
        with self._lock:
            slot = self._idle_slots.pop() if self._idle_slots else None
            needs_slot = self._limits_users and slot is None
            due = self._take_ahead() if self._limits_rate and not needs_slot else None
            number = None
            if needs_slot or (self._limits_rate and due is None):
                number = self._requests = self._requests + 1
        try:
            if number is not None:
                due = self._ask(number, needs_slot, wait)
            if due is not None:
                self._wait_until(due, number, wait)
            if self._limits_users:
                self._used_slots.append(cast("int", number) if slot is None else slot)
        except BaseException:
            self._undo(slot, number, due)
            raise

    def _ask(self, number: int, needs_slot: bool, wait: _Wait) -> float:
        """Ask until there is a permit of the rate, and a slot if one is needed. Return when they may be used."""
        while (due := self._look(number, needs_slot, wait)) is None:
            self._sleep_before_a_look(wait.deadline)
            if self._now() >= wait.deadline:
                raise self._timed_out(wait)
        return due

    def _wait_until(self, due: float, number: int | None, wait: _Wait) -> None:
        """Wait until the permit may be used. Others may give theirs back meanwhile, so look now and then."""
        while (left_s := due - self._now()) > 0:
            if due > wait.deadline:
                raise self._timed_out(wait)
            if number is None or left_s <= LOOK_S_MIN:
                self._context.sleep(left_s)
                return
            self._sleep_before_a_look(due)
            due = min(due, self._look(number, False, wait) or due)

    def _look(self, number: int, needs_slot: bool, wait: _Wait) -> float | None:
        left_s = max(0.0, wait.deadline - self._now())
        try:
            delay: float | None = self._context.request(["acquire", number, needs_slot, left_s], left_s)
        except TimedOut as error:
            raise self._timed_out(wait) from error
        return None if delay is None else self._now() + delay

    def _sleep_before_a_look(self, until: float) -> None:
        left_s = until - self._now()
        self._context.sleep(max(0.0, min(left_s, LOOK_S_MAX, max(LOOK_S_MIN, left_s / 2))))

    def _timed_out(self, wait: _Wait) -> TimedOut:
        return self.task.timed_out(
            f"no permit of {self._name!r} within {wait.timeout_s:g} s: others use them all, or this task itself holds "
            "one that it has not released; wait longer, or raise the limit"
        )

    def _undo(self, slot: int | None, number: int | None, due: float | None) -> None:
        """Give back what was not used: a slot of this task, what was asked of the driver, or a permit held ahead.

        Never raises: the caller raises why it was not used. What cannot be sent now leaves with the next call.
        """
        with self._lock:
            if number is not None:
                self._unsent.append(["give up", number])
            elif due is not None:
                insort(self._permits, due)
            if slot is not None:
                self._keep_or_return(slot)
        with suppress(Exception):
            self._send_back()

    def release(self) -> None:
        """Give a slot back, or keep it for the next use if nobody else waits for one."""
        if not self._limits_users:
            return
        with self._lock:
            if not self._used_slots:
                raise LocalProtocolError(
                    f"release() of the permits {self._name!r} without an acquire() before it: call it once after each, "
                    "or use `with permits:`"
                )
            self._keep_or_return(self._used_slots.pop())
        self._send_back()

    def _keep_or_return(self, slot: int) -> None:
        """Keep a slot for the next use, unless others wait or one is kept already. Under the lock."""
        if self._contended[1] or self._idle_slots:
            self._unsent.append(["release", [slot]])
        else:
            self._idle_slots.append(slot)

    def _send_back(self) -> None:
        """Send what is given back, in its order. What fails to leave is sent by a later call."""
        while True:
            try:
                event = self._unsent.popleft()
            except IndexError:
                return
            try:
                self._context.send_event(event)
            except BaseException:
                self._unsent.appendleft(event)
                raise

    def _take_ahead(self) -> float | None:
        """The moment from which the next permit held ahead may be used; None if there is none. Under the lock."""
        now = self._now()
        while self._permits and self._permits[0] < now - EXPIRY_S:
            del self._permits[0]
            self._ahead = max(1, self._ahead // 2)  # it holds more than it uses
        due = self._permits.pop(0) if self._permits else None
        if self._hands_out_ahead and not self._asked and len(self._permits) <= self._ahead // 2:
            if due is None or due <= now:
                self._ahead = min(AHEAD_MAX, 2 * self._ahead)
            with suppress(GatewayFull):  # then the driver is asked for each use
                self._context.send_event_nowait(["more", self._ahead])
                self._asked = True
        return due

    def handle_event(self, event: Any) -> None:
        match event:
            case ["permits", delays]:
                now = self._now()
                with self._lock:
                    self._permits = sorted([*self._permits, *(now + delay for delay in delays)])
                    self._asked = False
            case ["contended", int(version), bool(contended)]:
                with self._lock:
                    if version > self._contended[0]:
                        self._contended = version, contended
                    if self._contended[1] and self._idle_slots:
                        self._unsent.append(["release", self._idle_slots])
                        self._idle_slots = []
                self._send_back()
            case _:
                raise ValueError(f"not an event of permits: {show(event, 80)}; {SAME_RELEASE}")

    def handle_urgent(self, event: Any) -> None:
        self.handle_event(event)

    def _now(self) -> float:
        return self._context.now()


class PermitsInTask(PartInTask):
    """``Permits`` in a task."""

    _kind = "permits"
    _on_driver = ON_DRIVER | {"in_use"}

    @checked(timeout_s=WAIT)
    def acquire(self, timeout_s: float = 600.0) -> None:
        """In a task: wait until the next use is allowed. With ``concurrency``, call ``release`` after it.

        A checkpoint that begins while this waits is taken when the task is done with its record.

        Args:
            timeout_s: how many seconds to wait at most. A wait that times out, or ends with another error, uses up
                nothing.

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
