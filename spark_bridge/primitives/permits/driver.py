# SPDX-License-Identifier: Apache-2.0

"""The driver's half of permits: a schedule of the rate and a count of the slots, for all operators that use them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from actors.coordination import CoordinatorContext, OperatorCoordinator, Reply, SubtaskGateway
from protocol.arguments import AT_LEAST_1, NAME, POSITIVE, checked
from protocol.attempts import FailureReason
from protocol.errors import GatewayFull
from spark_bridge.primitives.permits.schedule import RateSchedule
from spark_bridge.primitives.permits.task import PermitsInTask, PermitsPart
from spark_bridge.primitives.primitive import Primitive, not_the_state_of
from spark_bridge.subtask.operator import SubtaskOperator

__all__ = ["Permits"]

_User = tuple[str, int, int]  # operator, subtask, attempt


class _Waiting(NamedTuple):
    """A request for a slot. ``number`` is the task's own; ``half`` passed it on."""

    user: _User
    number: int
    reply: Reply
    half: _Coordinator


class Permits(PermitsInTask, Primitive):
    """A rate and a number of concurrent users that all tasks keep to together, such as those of an external service.

    ``sidecar.permits(name, per_s=20)`` makes it, and ``coordinate(..., uses=[permits])`` gives it to an operator;
    several operators may share it. In the functions that the tasks run, ``with permits:`` waits for a permit.

    In any ``w`` seconds at most ``burst + per_s * w`` uses are allowed, over all tasks. If ``per_s`` is at least
    100, and ``burst`` more than a twentieth of it, the tasks hold a few permits ahead of need, so that the usual use
    costs no round trip; a task that dies takes those of about a tenth of a second with it. At most ``concurrency``
    tasks or threads are inside ``with permits:`` at the same time. The places of an attempt that is lost become free
    when Spark or the sidecar knows that it is over. Waiting tasks are served in the order in which they ask.

    Args:
        name: the name of the part, at most 200 characters.
        per_s: permits a second. None for no limit.
        burst: how many permits may be used at one moment after a pause, at least 1.
        concurrency: how many may be in use at the same time, at least 1. None for no limit.

    Raises:
        ValueError: there is no limit at all, a limit is too small, or the name is unsuitable.
    """

    @checked(name=NAME, per_s=POSITIVE, burst=AT_LEAST_1, concurrency=AT_LEAST_1)
    def __init__(
        self, name: str, *, per_s: float | None = None, burst: int = 1, concurrency: int | None = None
    ) -> None:
        PermitsInTask.__init__(self, name)
        Primitive.__init__(self, name)
        if per_s is None and concurrency is None:
            raise ValueError(f"permits {name!r} limit nothing: pass per_s, concurrency or both")
        self._slots = concurrency or 0
        self._book = _Book(per_s, burst, self._slots)
        self._hands_out_ahead = per_s is not None and RateSchedule(per_s, burst, 0.0).shares
        self._limits_rate = per_s is not None

    def __reduce__(self) -> Any:
        return PermitsInTask, (self._name,)

    @property
    def in_use(self) -> int:
        """How many of the ``concurrency`` are taken now: by those inside, and by tasks that keep one for the next use.

        For any thread."""
        return self._book.in_use

    def coordinator(self, operator_id: str) -> OperatorCoordinator:
        return _Coordinator(self._name, self._book, operator_id)

    def task_part(self) -> Callable[[], SubtaskOperator]:
        return partial(PermitsPart, self._name, self._limits_rate, self._slots > 0, self._hands_out_ahead)


class _Book:
    """What is handed out of one ``Permits``. On the loop."""

    def __init__(self, per_s: float | None, burst: int, slots: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._slots = slots
        self._schedule: RateSchedule | None = None
        self._used: Counter[_User] = Counter()
        self._waiting: deque[_Waiting] = deque()
        self._halves: dict[str, _Coordinator] = {}
        self.contended = False
        """Whether some task waits for a slot, so that nobody keeps one for later."""

    @property
    def in_use(self) -> int:
        """How many slots are taken. Any thread."""
        return sum(list(self._used.values()))

    def attach(self, half: _Coordinator, now: float) -> None:
        """An operator uses these permits."""
        self._halves[half.operator_id] = half
        if self._per_s is not None and self._schedule is None:
            self._schedule = RateSchedule(self._per_s, self._burst, now)

    def detach(self, half: _Coordinator) -> None:
        """It has ended."""
        self._halves.pop(half.operator_id, None)
        self.forget(half.operator_id)

    def take(self, now: float, count: int) -> list[float]:
        """Permits of the rate: how long each may not yet be used."""
        return self._schedule.take(now, count) if self._schedule is not None else [0.0] * count

    def acquire(self, waiting: _Waiting) -> None:
        """Answer as soon as there is a slot."""
        self._waiting.append(waiting)
        self._serve()

    def cancel(self, user: _User, number: int) -> None:
        """The task waits no longer. If it was answered meanwhile, it did not hear that."""
        kept = [one for one in self._waiting if (one.user, one.number) != (user, number)]
        if len(kept) < len(self._waiting):
            self._waiting = deque(kept)
            self._serve()
        else:
            self.release(user, 1)

    def release(self, user: _User, count: int) -> None:
        """An attempt gives slots back; not more than it has."""
        self._used[user] -= min(count, self._used[user])
        self._used += Counter()  # without those that have none
        self._serve()

    def forget(self, operator_id: str, subtask: int | None = None, attempt: int | None = None) -> None:
        """These attempts are over."""
        for user in [one for one in self._used if _is_of(one, operator_id, subtask, attempt)]:
            del self._used[user]
        self._serve()

    def _serve(self) -> None:
        while self._waiting and (self._waiting[0].reply.over or self.in_use < self._slots):
            waiting = self._waiting.popleft()
            if not waiting.reply.over:
                self._used[waiting.user] += 1
                waiting.reply.answer(self.take(waiting.half.now, 1)[0])
        if self.contended != bool(self._waiting):
            self.contended = bool(self._waiting)
            for half in list(self._halves.values()):
                half.tell_contended()


async def _raise_error(result: object, error: Exception | None) -> None:
    if error is not None:
        raise error


def _is_of(user: _User, operator_id: str, subtask: int | None, attempt: int | None) -> bool:
    return user[0] == operator_id and subtask in (None, user[1]) and attempt in (None, user[2])


class _Coordinator(OperatorCoordinator):
    """Passes on what one operator's tasks want."""

    def __init__(self, name: str, book: _Book, operator_id: str) -> None:
        self._name = name
        self._book = book
        self.operator_id = operator_id
        self._context: CoordinatorContext

    async def start(self, context: CoordinatorContext) -> None:
        self._context = context
        self._book.attach(self, context.clock.now())

    async def close(self) -> None:
        self._book.detach(self)

    @property
    def now(self) -> float:
        """The time of the sidecar's clock."""
        return self._context.clock.now()

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        if self._context.handles_restored:  # nobody would give back what it gets
            return None
        match request:
            case ["acquire", int(), False]:
                return self._book.take(self.now, 1)[0]
            case ["acquire", int(number), True]:
                reply = Reply()
                self._book.acquire(_Waiting((self.operator_id, subtask, attempt), number, reply, self))
                return reply
            case _:
                raise ValueError(f"not a request for permits: {request!r:.80}")

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        match event:
            case ["more", int(count)]:
                delays = self._book.take(self.now, min(max(count, 1), 1000))
                await self._context.gateways.send(subtask, ["permits", delays], attempt=attempt, urgent=True)
            case ["cancel", int(number)]:
                self._book.cancel((self.operator_id, subtask, attempt), number)
            case ["release", int(count)]:
                self._book.release((self.operator_id, subtask, attempt), count)
            case _:
                raise ValueError(f"not an event of permits: {event!r:.80}")

    def tell_contended(self) -> None:
        """Tell all attempts whether some task waits for a slot."""
        event = ["contended", self._book.contended]
        try:
            self._context.gateways.broadcast_nowait(event, urgent=True)
        except GatewayFull:  # some task is slow; no other task waits for it
            self._context.run_in_background(
                partial(self._context.gateways.broadcast, event, urgent=True), handler=_raise_error
            )

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        if self._book.contended:
            await gateway.send_event(["contended", True], urgent=True)

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self._book.forget(self.operator_id, subtask, attempt)

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        self._book.forget(self.operator_id, subtask, attempt)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self._book.forget(self.operator_id)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        if state:
            raise not_the_state_of("permits", self._name)
        self._book.forget(self.operator_id)
