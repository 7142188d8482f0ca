# SPDX-License-Identifier: Apache-2.0

"""The task's half of permits, and what user code sees of it there.

to the coordinator   request ["acquire", number, slot,              a permit of the rate, and a slot if one is needed;
                              timeout_s, weight]                    the answer is how long not to use them, or None
                                                                    if that would be too late. Asked again, it may
                                                                    be shorter
                     ["give up", number]                            the task has not used what it asked for there
                     ["correct", number, before, after]             the use had another weight than it asked for
                     ["more", count]                                permits ahead of need
                     ["release", numbers]                           slots, by the requests that got them
to a task            ["permits", delays]                            answer to "more"; perhaps none, or None if there
                                                                    will never be any
                     ["contended", version, bool]                   whether others wait for slots (urgent)
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from protocol.arguments import AT_LEAST_1, WAIT, between, checked
from protocol.describing import show
from protocol.errors import SAME_RELEASE, GatewayFull, LocalProtocolError
from spark_bridge.primitives.permits.schedule import EXPIRY_S
from spark_bridge.primitives.waiting import Block, OnLoop, OnThread, Unsent, finished, waiting_here
from spark_bridge.subtask.context import refuse_on_loop
from spark_bridge.subtask.errors import TimedOut
from spark_bridge.subtask.parts import ON_DRIVER, PartInTask, TaskPart

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

WEIGHT_MAX = 2**53
"""What a use can have weighed at most: such a number is exact as a float."""
WEIGHED = between(0, WEIGHT_MAX, f"an int from 0 to {WEIGHT_MAX}")
AHEAD_MAX = 256
"""The most permits that a task holds ahead of need."""
LOOK_S_MIN, LOOK_S_MAX = 1.0, 10.0
"""A task that waits for a permit looks for an earlier one after half of the time, within these bounds."""


class _Wait(NamedTuple):
    """``by``: how it waits."""

    by: OnThread
    weight: int
    timeout_s: float
    deadline: float


def check_weight(name: str, burst: int, weight: int) -> None:
    """Raise ``LocalProtocolError`` if no use of these permits can have this weight."""
    if not burst:
        raise LocalProtocolError(
            f"a use of the permits {name!r} was given a weight, but they limit no rate: pass per_s and burst "
            "to sidecar.permits(), or use `with permits:`"
        )
    if weight > burst:
        raise LocalProtocolError(
            f"a use of the permits {name!r} has the weight {weight}, but their burst is {burst}, and "
            "no more may be used at one moment: pass a larger burst to sidecar.permits(), or divide the use"
        )


class PermitsPart(TaskPart):
    """The permits that this task holds. ``acquire`` and ``release`` are for any of its threads."""

    waits_for_subtask_ready = False

    def __init__(self, name: str, burst: int, limits_users: bool, hands_out_ahead: bool) -> None:
        """``burst``: 0 if there is no rate."""
        self.name = name
        self._requests = 0
        self.burst = burst
        self._limits_users = limits_users
        self._hands_out_ahead = hands_out_ahead
        self._permits: list[float] = []  # the moments from which they may be used, ascending
        self._ahead = 0 if not hands_out_ahead else 1  # how many to hold, as the use demands
        self._asked = False
        self._idle_slots: list[int] = []
        self._used_slots: list[int] = []
        self._contended = 0, False  # the version, and whether others wait
        self._unsent = Unsent()  # what is given back
        self._lock = threading.Lock()
        self._context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context

    def acquire(self, weight: int, timeout_s: float, *, may_be_held: bool = True) -> int | None:
        """Wait until a use of this weight may begin; return its number, if the driver was asked. A slot must be
        released.

        However this ends without a use, what was reserved for it is given back. Without ``may_be_held`` the driver is
        asked, also if a permit is held ahead.
        """
        refuse_on_loop("acquire", "acquire_async")
        return finished(self._acquire(OnThread(self._context), weight, timeout_s, may_be_held))

    async def acquire_async(self, weight: int, timeout_s: float, *, may_be_held: bool = True) -> int | None:
        """``acquire`` in a coroutine, which may be cancelled."""
        return await self._acquire(OnLoop(self._context), weight, timeout_s, may_be_held)

    async def _acquire(self, by: OnThread, weight: int, timeout_s: float, may_be_held: bool) -> int | None:
        if weight != 1:
            check_weight(self.name, self.burst, weight)
        wait = _Wait(by, weight, timeout_s, self._now() + timeout_s)
        self._unsent.send(by)
        with self._lock:
            slot = self._idle_slots.pop() if self._idle_slots else None
            needs_slot = self._limits_users and slot is None
            may_be_held = may_be_held and weight == 1 and not needs_slot
            due = self._take_ahead() if self.burst and may_be_held else None
            number = None
            if needs_slot or (self.burst and due is None):
                number = self._requests = self._requests + 1
        try:
            if number is not None:
                due = await self._ask(number, needs_slot, wait)
            if due is not None:
                await self._wait_until(due, number, wait)
            if self._limits_users:
                self._used_slots.append(cast("int", number) if slot is None else slot)
        except BaseException:
            self._undo(slot, number, due, by)
            raise
        return number

    async def _ask(self, number: int, needs_slot: bool, wait: _Wait) -> float:
        """Ask until there is a permit of the rate, and a slot if one is needed. Return when they may be used."""
        while (due := await self._look(number, needs_slot, wait)) is None:
            await self._sleep_before_a_look(wait, wait.deadline)
            if self._now() >= wait.deadline:
                raise self._timed_out(wait)
        return due

    async def _wait_until(self, due: float, number: int | None, wait: _Wait) -> None:
        """Wait until the permit may be used. Others may give theirs back meanwhile, so look now and then."""
        while (left_s := due - self._now()) > 0:
            if due > wait.deadline:
                raise self._timed_out(wait)
            if number is None or left_s <= LOOK_S_MIN:
                await wait.by.sleep(left_s)
                return
            await self._sleep_before_a_look(wait, due)
            due = min(due, await self._look(number, False, wait) or due)

    async def _look(self, number: int, needs_slot: bool, wait: _Wait) -> float | None:
        left_s = max(0.0, wait.deadline - self._now())
        try:
            delay: float | None = await wait.by.request(["acquire", number, needs_slot, left_s, wait.weight], left_s)
        except TimedOut as error:
            raise self._timed_out(wait) from error
        return None if delay is None else self._now() + delay

    async def _sleep_before_a_look(self, wait: _Wait, until: float) -> None:
        left_s = until - self._now()
        await wait.by.sleep(max(0.0, min(left_s, LOOK_S_MAX, max(LOOK_S_MIN, left_s / 2))))

    def _timed_out(self, wait: _Wait) -> TimedOut:
        return self.task.timed_out(
            f"no permit of {self.name!r} within {wait.timeout_s:g} s: others use them all, or this task itself holds "
            "one that it has not released; wait longer, or raise the limit"
        )

    def _undo(self, slot: int | None, number: int | None, due: float | None, by: OnThread) -> None:
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
            self._unsent.send(by)

    def correct(self, number: int, before: int, after: int) -> None:
        """A use has another weight than it asked for."""
        self._unsent.append(["correct", number, before, after])
        self._unsent.send(waiting_here(self._context))

    def release(self) -> None:
        """Give a slot back, or keep it for the next use if nobody else waits for one."""
        if not self._limits_users:
            return
        with self._lock:
            if not self._used_slots:
                raise LocalProtocolError(
                    f"release() of the permits {self.name!r} without an acquire() before it: call it once after each, "
                    "or use `with permits:`"
                )
            self._keep_or_return(self._used_slots.pop())
        self._unsent.send(waiting_here(self._context))

    def _keep_or_return(self, slot: int) -> None:
        """Keep a slot for the next use, unless others wait or one is kept already. Under the lock."""
        if self._contended[1] or self._idle_slots:
            self._unsent.append(["release", [slot]])
        else:
            self._idle_slots.append(slot)

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
            case ["permits", None]:
                with self._lock:
                    self._hands_out_ahead = False
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
                self._unsent.send(OnThread(self._context))
            case _:
                raise ValueError(f"not an event of permits: {show(event, 80)}; {SAME_RELEASE}")

    def handle_urgent(self, event: Any) -> None:
        self.handle_event(event)

    def _now(self) -> float:
        return self._context.now()


class PermitUse(Block):
    """One use of permits with a weight, such as the tokens of a call: ``with permits.weight(1200) as used:``.

    ``async with`` waits in a coroutine. It is for one ``with`` block. Raises as ``Permits.acquire``.
    """

    def __init__(self, part: Callable[[], PermitsPart], weight: int, timeout_s: float) -> None:
        self._find = part
        self._weight = weight
        self._timeout_s = timeout_s
        self._corrected = False
        self._number: int | None = None
        self._part: PermitsPart | None = None

    @checked(weight=WEIGHED)
    def correct(self, weight: int) -> None:
        """Say what the use really weighed, once, inside the block or after it.

        If it is less than what was waited for, the rest is there for other uses, unless the rate has filled it in
        meanwhile: that is so when ``(burst - weight) / per_s`` seconds have gone since the use began. If it is more,
        all later uses wait until the rate has made up for it. Without this call, the use counts as it was asked for.

        Raises:
            LocalProtocolError: before the block, or a second time.
            AttemptOver: the attempt is over.
        """
        if self._part is None or self._number is None:
            raise LocalProtocolError("correct() of a use that has not begun: call it in `with permits.weight(...)`")
        if self._corrected:
            raise LocalProtocolError("correct() was called twice for one use: call it once, with what it really was")
        self._corrected = True
        if weight != self._weight:
            self._part.correct(self._number, self._weight, weight)

    def _begun(self) -> PermitsPart:
        if self._part is not None:
            raise LocalProtocolError("a use of permits was entered twice: call permits.weight(...) for each use")
        part = self._find()
        check_weight(part.name, part.burst, self._weight)
        return part

    def __enter__(self) -> PermitUse:
        refuse_on_loop("with permits.weight(...)", "async with permits.weight(...)")
        part = self._begun()
        self._number = part.acquire(self._weight, self._timeout_s, may_be_held=False)
        self._part = part
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._part is not None:
            self._part.release()

    async def __aenter__(self) -> PermitUse:
        part = self._begun()
        self._number = await part.acquire_async(self._weight, self._timeout_s, may_be_held=False)
        self._part = part
        return self


class PermitsInTask(PartInTask, Block):
    """``Permits`` in a task. ``burst``: 0 if there is no rate; None if only the task's half knows it."""

    _kind = "permits"
    _on_driver = ON_DRIVER | {"in_use"}

    def __init__(self, name: str, burst: int | None = None) -> None:
        super().__init__(name)
        self._burst = burst

    @checked(weight=AT_LEAST_1, timeout_s=WAIT)
    def acquire(self, *, weight: int = 1, timeout_s: float = 600.0) -> None:
        """In a task: wait until the next use is allowed. With ``concurrency``, call ``release`` after it.

        A checkpoint that begins while this waits is taken when the task is done with its record.

        Args:
            weight: how much of the rate the use takes, from 1 to ``burst``.
            timeout_s: how many seconds to wait at most. A wait that times out, or ends with another error, uses up
                nothing.

        Raises:
            TimedOut: no permit within ``timeout_s`` seconds.
            LocalProtocolError: the weight is above ``burst``, or there is no rate; outside a function that
                ``handle.subtask`` runs in tasks; or in a coroutine, where it would stop all others:
                use ``acquire_async`` there.
            AttemptOver: the attempt is over.
        """
        self._part().acquire(weight, timeout_s)

    @checked(weight=AT_LEAST_1, timeout_s=WAIT)
    async def acquire_async(self, *, weight: int = 1, timeout_s: float = 600.0) -> None:
        """``acquire`` in a coroutine of a task. A wait that is cancelled uses up nothing.

        Thousands of coroutines may wait at the same time. Raises as ``acquire`` does.
        """
        await self._part().acquire_async(weight, timeout_s)

    @checked(weight=AT_LEAST_1, timeout_s=WAIT)
    def weight(self, weight: int, *, timeout_s: float = 600.0) -> PermitUse:
        """In a task: a use of this weight, such as tokens or bytes, for ``with`` or ``async with``.

        ``with permits.weight(1200) as used:`` waits as ``acquire`` does, and ``used.correct(900)`` says what the use
        really weighed. A use whose weight is given this way asks the driver, also if the weight is 1.

        Raises ``LocalProtocolError`` here, also on the driver, if the weight is above ``burst``, or there is no rate.
        """
        if self._burst is not None:
            check_weight(self._name, self._burst, weight)
        return PermitUse(self._part, weight, timeout_s)

    def release(self) -> None:
        """In a task: end a use that ``acquire`` or ``acquire_async`` began. Has no effect without ``concurrency``.

        Never waits in a coroutine. Raises ``LocalProtocolError`` if this task uses none.
        """
        self._part().release()

    def __enter__(self) -> None:
        refuse_on_loop("with permits", "async with permits")
        self.acquire()

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    async def __aenter__(self) -> None:
        await self.acquire_async()
