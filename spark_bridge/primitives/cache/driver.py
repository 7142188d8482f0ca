# SPDX-License-Identifier: Apache-2.0

"""The driver's half of a cache: answers what the tasks of all operators ask, as the book decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import anyio

from actors.coordination import OperatorCoordinator, Reply
from actors.logs import get_logger
from protocol.arguments import AT_LEAST_1, NAME, POSITIVE, checked
from protocol.describing import show
from protocol.errors import SAME_RELEASE, LocalProtocolError, RemoteProtocolError
from spark_bridge.primitives.cache.book import Answer, CacheBook, CacheEffect, Lease
from spark_bridge.primitives.cache.task import KEY_BYTES_MAX, VALUE_BYTES_MAX, CacheInTask, CachePart
from spark_bridge.primitives.primitive import Half, Primitive
from spark_bridge.primitives.tickets import Asker, Ticket
from spark_bridge.storage.port import ValuePort, ValueUser
from spark_bridge.subtask.operator import SubtaskOperator

log = get_logger("headgate.cache")

CACHE_BYTES_MAX = 256 * 2**20
LEASE_S = 600.0
ARRIVING_BYTES_MAX = 64 * 2**20
"""How much may wait for the storage before tasks that bring more have to wait too."""


class Cache(CacheInTask, Primitive):
    """Answers that all tasks share: each question is asked once, even if many tasks have it at the same time.

    ``sidecar.cache(name)`` makes it, and ``coordinate(..., uses=[cache])`` gives it to an operator; several operators
    may share it. In the functions that the tasks run, ``cache.get(key, make)`` returns the value of a key. If it has
    none yet, one task of all calls ``make``, and the others wait for its value. ``await cache.get_async(key, make)``
    does the same in a coroutine.

    While the task that computes a value lives, no other computes it. If that task is lost, or its ``make`` raises,
    exactly one of those that wait computes it instead. A value that ``get`` has returned was kept before: by this
    program, and with ``durable`` in the sidecar's storage, where it survives the driver and is there in the next run.
    A restore, a retry or a restart takes no value back: what was paid for stays.

    Two keys are the same if their encoded forms are, with their types: ``1``, ``1.0`` and ``True`` are three keys, and
    so are ``"a"`` and ``b"a"``. Every ``get`` of a key has the same value, in a new object each time.

    Args:
        name: the name of the part, at most 200 characters. A durable cache is found again by it.
        bytes_max: how many bytes all values with their keys may take in the driver's memory, with 256 bytes for each.
            Beyond that, the values that nobody has wanted for longest are dropped, and computed again if somebody
            does. Of a durable cache, they are dropped from the storage too.
        lease_s: after how many seconds a task that computes a value is not waited for any more. Then one of those that
            wait computes it, too.
        values: where the values are kept; ``sidecar.cache(name, durable=True)`` sets it.

    Raises:
        ValueError: a limit is too small, or the name is unsuitable.
    """

    outside_checkpoints = True

    @checked(name=NAME, bytes_max=AT_LEAST_1, lease_s=POSITIVE)
    def __init__(
        self,
        name: str,
        *,
        bytes_max: int = CACHE_BYTES_MAX,
        lease_s: float = LEASE_S,
        values: Callable[[], ValuePort] | None = None,
    ) -> None:
        CacheInTask.__init__(self, name)
        Primitive.__init__(self, name)
        self._desk = _Desk(name, CacheBook(bytes_max, lease_s), values)

    def __reduce__(self) -> Any:
        return CacheInTask, (self._name,)

    def figures(self) -> dict[str, float]:
        """Return what the status shows. For any thread.

        ``gets_total`` are all calls so far, of which ``hits_total`` found a value, and ``waits_total`` waited for one
        that another task computed. ``computed_total`` is how often a task was told to compute a value, of which
        ``lost_total`` ended without one. ``hit_share`` is the share of the calls that cost no computation.
        ``too_large_total`` are values that could not be kept, and ``evicted_total`` those that were dropped.
        ``entries`` and ``bytes`` are what is kept now, ``computing`` and ``waiting`` the calls that compute and wait.
        """
        book, counts = self._desk.book, self._desk.book.counts
        local_hits = self._desk.local_hits
        gets = counts.gets + local_hits
        return {
            "hit_share": 1.0 - counts.leases / gets if gets > counts.leases else 0.0,
            "gets_total": gets,
            "hits_total": counts.hits + local_hits,
            "waits_total": counts.waits,
            "computed_total": counts.leases,
            "lost_total": counts.leases_lost,
            "too_large_total": self._desk.too_large,
            "evicted_total": counts.evictions,
            "entries": len(book.values),
            "bytes": book.bytes,
            "computing": book.leased,
            "waiting": book.waiting,
        }

    def coordinator(self, operator_id: str) -> OperatorCoordinator:
        return _Coordinator(self._name, self._desk, operator_id)

    def task_part(self) -> Callable[[], SubtaskOperator]:
        return partial(CachePart, self._name)


class _Desk:
    """Carries out what the book of one ``Cache`` decides, for all operators that use it. On the loop.

    Attributes:
        local_hits: how many calls found their value in their task.
        too_large: how many values were computed and not kept.
    """

    def __init__(self, name: str, book: CacheBook, values: Callable[[], ValuePort] | None) -> None:
        self.book = book
        self.local_hits = 0
        self.too_large = 0
        self._name = name
        self._values = values
        self._port: ValuePort | None = None
        self._opening = anyio.Lock()
        self._halves: dict[str, _Coordinator] = {}
        self._replies: dict[Ticket, Reply] = {}
        self._puts: dict[bytes, list[tuple[Reply, bool]]] = {}  # of values that arrive; whether it was theirs
        self._arriving_bytes = 0
        self._fewer = anyio.Event()
        self._failing = False  # then the jobs fail, and must not wait for the storage
        self._timer: float | None = None

    async def attach(self, half: _Coordinator) -> None:
        """An operator uses this cache. Raises ``StorageError`` if its values cannot be read."""
        async with self._opening:
            if self._values is not None and self._port is None:
                port = self._values()
                user = ValueUser(self._written, self._failed, self.book.values.get, lambda: self.book.bytes)
                self._take(dict(await port.open(user)))
                self._port = port
            self._halves[half.operator_id] = half

    async def detach(self, half: _Coordinator) -> None:
        """It has ended."""
        self._halves.pop(half.operator_id, None)
        self.forget(half)
        if self._port is not None and not self._halves:
            self._port.close()
            self._port = None

    def forget(self, half: _Coordinator, subtask: int | None = None, attempt: int | None = None) -> None:
        """These attempts of the operator are over."""
        if subtask is None:
            self._timer = None  # it may have been one of the operator's, and end with it
        self.carry_out(self.book.forget(half.now, half.operator_id, subtask, attempt), half.now)

    def get(self, half: _Coordinator, key: bytes, ticket: Ticket) -> Reply:
        """Answer with the value as soon as there is one, or with the task's duty to compute it."""
        try:
            effects = self.book.get(key, ticket, half.now)
        except ValueError as error:
            raise RemoteProtocolError(f"{error}; {SAME_RELEASE}") from error
        except OverflowError as error:
            raise LocalProtocolError(
                f"a task asks the cache {self._name!r} for too many keys at the same time: let fewer calls run "
                "concurrently, or use shorter keys"
            ) from error
        self._replies[ticket] = reply = Reply()
        self.carry_out(effects, half.now)
        return reply

    async def put(self, half: _Coordinator, key: bytes, ticket: Ticket, value: bytes) -> Reply:
        """Answer when the value is kept: with None, or with the earlier one that is kept in its place."""
        while self._arriving_bytes > ARRIVING_BYTES_MAX and not self._failing:
            self._fewer = anyio.Event()
            await self._fewer.wait()
        reply: Reply = Reply()
        arrives = self.book.put(key, ticket, value)
        if key in self.book.values:
            kept = self.book.values[key]
            reply.answer(None if kept == value else kept)
            return reply
        self._puts.setdefault(key, []).append((reply, self.book.arriving[key] == value))
        if arrives:
            self._arriving_bytes += len(value)
            if self._port is None:
                self._arrived(key, half.now)
            else:
                self._port.append(key, value)
        return reply

    def end(self, half: _Coordinator, ticket: Ticket) -> None:
        """The call has ended without a value."""
        self.carry_out(self.book.end(ticket, half.now), half.now)

    def carry_out(self, effects: Iterable[CacheEffect], now: float) -> None:
        todo = list(effects)
        for effect in todo:
            reply = self._replies.pop(effect.ticket)
            if isinstance(effect, Answer):
                reply.answer(["value", effect.value])
            elif not isinstance(effect, Lease):
                reply.answer(None)
            elif reply.over:  # its attempt or its time is over, which this half has yet to hear
                todo += self.book.end(effect.ticket, now)
            else:
                if effect.overdue is not None:
                    log.warning(
                        "value of a cache overdue, another task computes it",
                        cache=self._name,
                        overdue=effect.overdue.asker._asdict(),
                        computes=effect.ticket.asker._asdict(),
                    )
                reply.answer(["compute"])
        self._arm(now)

    # --- values that arrive -------------------------------------------------------------------------------------------

    def _arrived(self, key: bytes, now: float) -> None:
        value = self.book.arriving[key]
        self._arriving_bytes -= len(value)
        self._fewer.set()
        effects = self.book.arrived(key)
        for reply, own in self._puts.pop(key, ()):
            reply.answer(None if own else value)
        self.carry_out(effects, now)

    def _written(self, entries: Mapping[bytes, bytes]) -> None:
        self._failing = False
        try:
            self._take(entries)
        except Exception as error:
            self._failed(error)

    def _take(self, entries: Mapping[bytes, bytes]) -> None:
        """What is in the storage. It may have been brought to an earlier cache of this name."""
        for key, value in entries.items():
            if key in self.book.arriving:
                self._arrived(key, self._now())
            else:
                self.book.add(key, value)

    def _failed(self, error: Exception) -> None:
        self._failing = True
        self._fewer.set()
        for half in list(self._halves.values()):
            half.context.fail_job(error)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return next(iter(self._halves.values())).now if self._halves else 0.0

    def _arm(self, now: float) -> None:
        due = self.book.next_deadline()
        if due is None or not self._halves or (self._timer is not None and now < self._timer <= due):
            return
        self._timer = due
        half = next(iter(self._halves.values()))
        half.context.call_later(max(0.0, due - now), partial(self._wake, half))

    async def _wake(self, half: _Coordinator) -> None:
        self._timer = None
        self.carry_out(self.book.pass_time(half.now), half.now)


class _Coordinator(Half[_Desk]):
    """Passes on what one operator's tasks want."""

    kind = "a cache"

    async def handle_request(self, subtask: int, attempt: int, request: Any) -> Any:
        asker, desk = Asker(self.operator_id, subtask, attempt), self._desk
        match request:
            case [str("get"), int(number), bytes(key)] if number > 0 and len(key) <= KEY_BYTES_MAX:
                return desk.get(self, key, Ticket(asker, number))
            case [str("put"), int(number), bytes(key), bytes(value)] if (
                number > 0 and len(key) <= KEY_BYTES_MAX and len(value) <= VALUE_BYTES_MAX
            ):
                return await desk.put(self, key, Ticket(asker, number), value)
            case _:
                raise RemoteProtocolError(f"not a request for a cache: {show(request, 80)}; {SAME_RELEASE}")

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        match event:
            case [str("end"), int(number), bool(too_large)] if number > 0:
                self._desk.too_large += too_large
                self._desk.end(self, Ticket(Asker(self.operator_id, subtask, attempt), number))
            case [str("hits"), int(count)] if 0 <= count < 2**40:
                self._desk.local_hits += count
            case _:
                raise RemoteProtocolError(f"not an event of a cache: {show(event, 80)}; {SAME_RELEASE}")
