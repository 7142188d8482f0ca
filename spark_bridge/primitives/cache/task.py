# SPDX-License-Identifier: Apache-2.0

"""The task's half of a cache, and what user code sees of it there.

to the coordinator   request ["get", number, key]          the answer is ["value", value], perhaps after a while, or
                                                           ["compute"]: then this task has the lease
                     request ["put", number, key, value]   the answer comes when the value is kept: None, or the
                                                           earlier value that is kept in its place
                     ["end", number, too_large]            that call brings no value
                     ["hits", count]                       calls that found their value in the task

``number`` is the call's own, and is used once. Keys and values travel as their encoded forms.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from inspect import isawaitable, iscoroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from protocol.arguments import ANY, WAIT, Rule, checked, is_async
from protocol.describing import describe, show, type_name
from protocol.errors import AttemptOver, GatewayFull, LocalProtocolError
from protocol.wire.codec import decode_event, encode_argument
from protocol.wire.framing import CODEC_LIMITS
from spark_bridge.subtask.context import refuse_on_loop
from spark_bridge.subtask.errors import RequestFailed, TimedOut
from spark_bridge.subtask.parts import ON_DRIVER, PartInTask, TaskPart

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

T = TypeVar("T")
_log = logging.getLogger(__name__)

KEY_BYTES_MAX = 32_768
VALUE_BYTES_MAX = 1_000_000
LOCAL_BYTES_MAX = 16 * 2**20
"""What a task keeps of the values that it has had."""
PUT_S = 60.0
"""How long a task waits until its value is kept. It has the value anyway."""
_HITS_TOLD = 256
MAKE = Rule("a function without arguments, such as lambda: ask(question)", callable, is_type=True)
MAKE_NOW = replace(
    MAKE, advice=lambda make: "in a coroutine, use `await cache.get_async(key, make)`" if is_async(make) else ""
)

_making: ContextVar[tuple[tuple[str, bytes], ...]] = ContextVar("_making", default=())
"""The keys whose values the running code computes, with the names of their caches."""


class _Call(NamedTuple):
    number: int
    key: bytes
    timeout_s: float
    deadline: float


class CachePart(TaskPart):
    """The calls of this task, and the values that it has had. For any thread, and any asyncio loop."""

    waits_for_subtask_ready = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._local: OrderedDict[bytes, bytes] = OrderedDict()  # the one not wanted for longest first
        self._local_bytes = 0
        self._calls = 0
        self._hits = 0  # that the coordinator does not know of
        self._unsent: deque[list[Any]] = deque()
        self._flights: dict[tuple[asyncio.AbstractEventLoop, bytes], asyncio.Future[bytes | None]] = {}
        self._warned = False
        self._context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context

    def final_state(self) -> bytes:
        if self._hits:
            with suppress(GatewayFull, AttemptOver):
                self._context.send_event_nowait(["hits", self._hits])
                self._hits = 0
        return b""

    def get(self, key: Hashable, make: Callable[[], Any], timeout_s: float) -> Any:
        packed = self._packed(key)
        value = self._found_here(packed)
        return decode_event(self._ask(self._call(packed, timeout_s), make) if value is None else value)

    def _ask(self, call: _Call, make: Callable[[], Any]) -> bytes:
        ask = self._context.request
        with self._ended_if_it_fails(call):
            try:
                answer = ask(["get", call.number, call.key], call.timeout_s)
            except TimedOut as error:
                raise self._timed_out(call) from error
            if answer[0] == "value":
                return self._kept_here(call.key, answer[1])
            with self._computed(call):
                made = make()
                if isawaitable(made):
                    if iscoroutine(made):
                        made.close()
                    raise LocalProtocolError(
                        f"make returned {type_name(made)}, which has to be awaited: use `await cache.get_async(...)`"
                    )
            value = encode_argument("what make returned", made, CODEC_LIMITS)
            if len(value) > VALUE_BYTES_MAX:
                return self._too_large(call, value)
            try:
                kept = ask(["put", call.number, call.key, value], PUT_S)
            except (RequestFailed, TimedOut) as error:
                return self._not_kept(call, value, error)
        return self._kept_here(call.key, value if kept is None else kept)

    async def get_async(self, key: Hashable, make: Callable[[], Any], timeout_s: float) -> Any:
        packed = self._packed(key)
        flight_of = asyncio.get_running_loop(), packed
        call = self._call(packed, timeout_s)
        while (value := self._found_here(packed)) is None:
            flight = self._flights.get(flight_of)
            if flight is None:
                value = await self._fly(flight_of, call, make)
                break
            # Another coroutine of this loop asks already. If that fails, one of those that wait asks instead.
            await asyncio.wait([flight], timeout=max(0.0, call.deadline - self._context.now()))
            if not flight.done():
                raise self._timed_out(call)
            if (value := flight.result()) is not None:
                with self._lock:
                    self._hits += 1
                break
        return decode_event(value)

    async def _fly(
        self, flight_of: tuple[asyncio.AbstractEventLoop, bytes], call: _Call, make: Callable[[], Any]
    ) -> bytes:
        flight = self._flights[flight_of] = flight_of[0].create_future()
        value = None
        try:
            value = await self._ask_async(call, make)
        finally:
            del self._flights[flight_of]
            flight.set_result(value)
        return value

    async def _ask_async(self, call: _Call, make: Callable[[], Any]) -> bytes:
        ask = self._context.request_async
        with self._ended_if_it_fails(call):
            try:
                answer = await ask(["get", call.number, call.key], max(0.0, call.deadline - self._context.now()))
            except TimedOut as error:
                raise self._timed_out(call) from error
            if answer[0] == "value":
                return self._kept_here(call.key, answer[1])
            with self._computed(call):
                made = make()
                if isawaitable(made):
                    made = await made
            value = encode_argument("what make returned", made, CODEC_LIMITS)
            if len(value) > VALUE_BYTES_MAX:
                return self._too_large(call, value)
            try:
                kept = await ask(["put", call.number, call.key, value], PUT_S)
            except (RequestFailed, TimedOut) as error:
                return self._not_kept(call, value, error)
        return self._kept_here(call.key, value if kept is None else kept)

    # --- one step of a call -------------------------------------------------------------------------------------------

    def _packed(self, key: Hashable) -> bytes:
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(
                f"the key of a cache must be hashable, and {show(key, 80)} is not ({error}): use a tuple of texts and "
                "numbers, or a frozen dataclass that is registered with headgate.event"
            ) from None
        if _holds_set(key):
            raise TypeError(
                f"the key {show(key, 80)} of a cache has a set, whose order differs from process to process: use a "
                "sorted tuple"
            )
        packed = encode_argument("key", key, CODEC_LIMITS)
        if len(packed) > KEY_BYTES_MAX:
            raise ValueError(
                f"the key of a cache may have {KEY_BYTES_MAX} bytes, and this one has {len(packed)}: use a digest of it"
            )
        if (self._name, packed) in _making.get():
            raise LocalProtocolError(
                f"make of the key {show(key, 80)} asks the cache {self._name!r} for that key itself, which would wait "
                "for its own result"
            )
        return packed

    def _call(self, key: bytes, timeout_s: float) -> _Call:
        with self._lock:
            self._calls += 1
            return _Call(self._calls, key, timeout_s, self._context.now() + timeout_s)

    def _found_here(self, key: bytes) -> bytes | None:
        with self._lock:
            value = self._local.get(key)
            if value is not None:
                self._local.move_to_end(key)
                self._hits += 1
                if self._hits >= _HITS_TOLD:
                    self._unsent.append(["hits", self._hits])
                    self._hits = 0
        if self._unsent:
            self._send()
        return value

    def _kept_here(self, key: bytes, value: bytes) -> bytes:
        with self._lock:
            if key not in self._local:
                self._local[key] = value
                self._local_bytes += len(key) + len(value)
                while self._local_bytes > LOCAL_BYTES_MAX:
                    self._local_bytes -= sum(map(len, self._local.popitem(last=False)))
        return value

    @contextmanager
    def _ended_if_it_fails(self, call: _Call) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._end(call)
            raise

    @contextmanager
    def _computed(self, call: _Call) -> Iterator[None]:
        making = _making.set((*_making.get(), (self._name, call.key)))
        try:
            yield
        finally:
            _making.reset(making)

    def _too_large(self, call: _Call, value: bytes) -> bytes:
        self._end(call, too_large=True)
        if not self._warned:
            self._warned = True
            _log.warning(
                "cache %s: a value of %s bytes is too large to be kept, and is computed again",
                self._name,
                len(value),
            )
        return value

    def _not_kept(self, call: _Call, value: bytes, error: Exception) -> bytes:
        """The caller has its value, which was paid for, although it may be computed again."""
        self._end(call)
        _log.warning("cache %s: a value was not kept, and may be computed again: %s", self._name, describe(error))
        return value

    def _timed_out(self, call: _Call) -> TimedOut:
        return self.task.timed_out(
            f"no value of the cache {self._name!r} within {call.timeout_s:g} s: another task computes it; wait longer"
        )

    def _end(self, call: _Call, *, too_large: bool = False) -> None:
        """Let another one compute the value. Never raises: the caller raises why there is none."""
        self._unsent.append(["end", call.number, too_large])
        self._send()

    def _send(self) -> None:
        """Send what is to be told, in its order; in another thread if that has to wait and a loop runs here."""
        try:
            self._send_all(self._context.send_event_nowait)
        except GatewayFull:
            with suppress(Exception):
                try:
                    loop = asyncio.get_running_loop()
                except RuntimeError:
                    self._send_all(self._context.send_event)
                else:
                    loop.run_in_executor(None, self._send_all, self._context.send_event)
        except Exception:
            pass  # the attempt is over, which ends its leases

    def _send_all(self, send: Callable[[Any], object]) -> None:
        while True:
            try:
                event = self._unsent.popleft()
            except IndexError:
                return
            try:
                send(event)
            except BaseException:
                self._unsent.appendleft(event)
                raise


def _holds_set(value: Any) -> bool:
    """Whether a hashable value has a set of several members in it."""
    kind = type(value)
    if kind in (str, int, bytes, float, bool, type(None)):
        return False
    if isinstance(value, tuple):
        return any(map(_holds_set, value))
    if isinstance(value, frozenset):
        return len(value) > 1 or any(map(_holds_set, value))
    return is_dataclass(kind) and any(_holds_set(getattr(value, one.name)) for one in fields(kind))


class CacheInTask(PartInTask):
    """``Cache`` in a task."""

    _kind = "cache"
    _on_driver = ON_DRIVER

    @checked(key=ANY, make=MAKE_NOW, timeout_s=WAIT)
    def get(self, key: Any, make: Callable[[], T], timeout_s: float = 600.0) -> T:
        """In a task: return the value of a key, which ``make()`` computes if there is none and nobody else does.

        Any thread of the task may call this. ``make`` runs in the calling thread. Values that this task has had lately,
        up to 16 MiB, come without a round trip.

        Args:
            key: a hashable value that an event can have, without sets, at most 32,768 bytes when encoded: a text, a
                number, a tuple of these, or a frozen dataclass that is registered with ``headgate.event``. Types count:
                ``1``, ``1.0`` and ``True`` are different keys.
            make: a function without arguments. It returns a value that an event can have. What has more than 1,000,000
                bytes when encoded is returned and not kept; the log warns once, and the next one that asks computes it
                again.
            timeout_s: how many seconds to wait at most for another task that computes the value. ``make`` itself may
                take longer, up to ``lease_s`` of the cache without being computed a second time.

        Raises:
            TimedOut: another task has not computed the value within ``timeout_s`` seconds.
            EventEncodeError: the key, or what ``make`` has returned, is of a type that events cannot have.
            TypeError, ValueError: the key is not hashable, has a set, or is too long.
            LocalProtocolError: on the thread of a running asyncio loop, inside ``make`` for the same key, or outside a
                function that ``handle.subtask`` runs in tasks.
            AttemptOver: the attempt is over.

        What ``make`` raises is raised here, and nowhere else: one of those that wait calls its own ``make``.
        """
        refuse_on_loop("cache.get()", "await cache.get_async(...)")
        value: T = self._part().get(key, make, timeout_s)
        return value

    @overload
    async def get_async(self, key: Any, make: Callable[[], Awaitable[T]], timeout_s: float = 600.0) -> T: ...

    @overload
    async def get_async(self, key: Any, make: Callable[[], T], timeout_s: float = 600.0) -> T: ...

    @checked(key=ANY, make=MAKE, timeout_s=WAIT)
    async def get_async(
        self, key: Any, make: Callable[[], Awaitable[Any]] | Callable[[], Any], timeout_s: float = 600.0
    ) -> Any:
        """As ``get``, for a coroutine on any asyncio loop in the task. ``make`` may be an ``async def``.

        Coroutines of one loop that want the same key at the same time ask once. One that is cancelled stops waiting; if
        it was computing the value, one of those that wait computes it instead.
        """
        return await self._part().get_async(key, make, timeout_s)
