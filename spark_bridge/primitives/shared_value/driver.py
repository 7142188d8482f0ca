# SPDX-License-Identifier: Apache-2.0

"""The driver's half of a shared value.

The ``SharedValue`` belongs to the program, on any thread. Each operator that uses it has a coordinator's half, which is
notified of each version on the sidecar's loop, in their order, and sends it to the operator's tasks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from actors.coordination import Confirmation, CoordinatorContext, OperatorCoordinator, SubtaskGateway
from protocol.arguments import NAME, WAIT, checked
from protocol.attempts import FailureReason
from protocol.describing import show
from protocol.errors import SAME_RELEASE, AttemptOver, LocalProtocolError, RemoteProtocolError
from protocol.ids import ExecutionAttempt
from spark_bridge.primitives.primitive import Primitive, not_the_state_of, raise_error, tell_all
from spark_bridge.primitives.shared_value.encoding import (
    CHUNK_BYTES,
    CHUNKS_UNCONFIRMED,
    COMPLETE,
    LARGE_BYTES,
    decode_value,
    digest_of,
    encode_change,
    encode_value,
)
from spark_bridge.primitives.shared_value.task import SharedValueInTask, SharedValuePart
from spark_bridge.subtask.errors import TimedOut
from spark_bridge.subtask.operator import SubtaskOperator
from spark_bridge.subtask.parts import runs_in_task

T = TypeVar("T")


class _Version(NamedTuple):
    """One version of the value. ``change`` is what it differs in from the version before, if that is small."""

    number: int
    payload: bytes
    change: bytes | None


class SharedValue(SharedValueInTask[T], Primitive):
    """A value that the driver sets at any time, and that all tasks read: rules, thresholds, a model.

    ``sidecar.shared(name, value)`` makes it, and ``coordinate(..., uses=[value])`` gives it to an operator; several
    operators may use it. In the functions that the tasks run, ``value.get()`` is the newest value, ``value.version``
    its number, and ``value.changed()`` whether it is new. A task has the value before its first record, and each later
    one while it computes, usually within a millisecond.

    A new value reaches each task after the earlier ones, or in place of them: a slow task may skip versions.
    A dict of which little has changed travels as the difference, and every task has it in the order in which it was
    set. Whether something has changed is decided by how values are encoded, with their types and the order of dicts:
    1, 1.0, ``True`` and ``np.int64(1)`` differ, and arrays are equal if their dtype, shape and bytes are.

    A value above 64 KiB travels in chunks, once to each executor: one task fetches it, and the others read it from a
    file in the executor's local directory, unless Spark encrypts what is there. It may have 256 MiB. The value is not
    part of checkpoints: after a restore, tasks have what the program has set.

    On the driver, all methods are for any thread.

    Args:
        name: the name of the part, at most 200 characters.
        value: the first value: anything that an event can carry.

    Raises:
        EventEncodeError: an event cannot carry the value.
        ValueError: the name is unsuitable.
    """

    @checked(name=NAME)
    def __init__(self, name: str, value: T) -> None:
        SharedValueInTask.__init__(self, name)
        Primitive.__init__(self, name)
        self._lock = threading.RLock()
        self._newest = _Version(1, encode_value(value), None)
        self._value: T = decode_value(self._newest.payload)
        self._halves: list[_Coordinator] = []

    def __reduce__(self) -> Any:
        return SharedValueInTask, (self._name,)

    @property
    def version(self) -> int:
        """How often the value was set: 1 for the initial one."""
        return super().version if runs_in_task() else self._newest.number

    def get(self) -> T:
        """Return the newest value: in a task the newest that has come there. Do not change what it returns."""
        return super().get() if runs_in_task() else self._value

    @checked(timeout_s=WAIT)
    def set(self, value: T, *, wait: Literal["none", "all"] = "none", timeout_s: float = 30.0) -> int:
        """Set a new value, and return its version. Later changes of ``value`` itself have no effect.

        Args:
            value: anything that an event can carry.
            wait: with ``"all"``, return when every task that is running has applied this value or a later one. A task
                that ends meanwhile is not waited for, and one that starts has the value anyway.
            timeout_s: how many seconds to wait at most.

        Raises:
            EventEncodeError: an event cannot carry the value. Nothing has changed.
            TimedOut: some tasks have not applied it in time; the text names them. They will get it nevertheless.
            LocalProtocolError: ``wait`` on the sidecar's own event loop, which has to run meanwhile.
        """
        return self._update(lambda _: value, "value", wait=wait, timeout_s=timeout_s)

    @checked(timeout_s=WAIT)
    def update(
        self, function: Callable[[T], T], *, wait: Literal["none", "all"] = "none", timeout_s: float = 30.0
    ) -> int:
        """Set what ``function`` returns for the present value. No other thread sets a value meanwhile.

        ``function`` must return a new object and leave its argument as it is. Otherwise as ``set``.
        """
        return self._update(function, "what function returned", wait=wait, timeout_s=timeout_s)

    def _update(self, function: Callable[[T], T], what: str, *, wait: Literal["none", "all"], timeout_s: float) -> int:
        with self._lock:
            halves = list(self._halves)
            if wait == "all" and any(half.thread == threading.get_ident() for half in halves):
                raise LocalProtocolError(
                    f"{self!r} cannot wait on the sidecar's event loop, which delivers the value: "
                    'await asyncio.to_thread(value.set, new, wait="all")'
                )
            value = function(self._value)
            payload = encode_value(value, what)
            change = encode_change(self._value, self._newest.payload, value, payload)
            self._newest = newest = _Version(self._newest.number + 1, payload, change)
            self._value = decode_value(payload)
            applied = _Applied(newest.number, halves) if wait == "all" else None
            for half in halves:
                half.publish(newest, applied)
        if applied is not None:
            missing = applied.wait(timeout_s)
            if missing:
                raise TimedOut(
                    f"version {newest.number} of the shared value {self._name!r} was not applied within "
                    f"{timeout_s:g} s by {missing}: they get it as soon as they can. Pass a higher timeout_s to "
                    "wait longer"
                )
        return newest.number

    def figures(self) -> dict[str, float]:
        return {"version": self.version}

    def coordinator(self, operator_id: str) -> OperatorCoordinator:
        return _Coordinator(self, operator_id)

    def task_part(self) -> Callable[[], SubtaskOperator]:
        return partial(SharedValuePart, self._name)

    def attach(self, half: _Coordinator) -> _Version:
        """The newest version; the half of each operator learns of later ones."""
        with self._lock:
            self._halves.append(half)
            return self._newest

    def detach(self, half: _Coordinator) -> None:
        """The operator has ended."""
        with self._lock:
            if half in self._halves:
                self._halves.remove(half)


class _Applied:
    """Who has not applied a version yet. Any thread."""

    def __init__(self, version: int, halves: Iterable[_Coordinator]) -> None:
        self.version = version
        self._busy = set(halves)  # of the operators that have not said which of their attempts are alive
        self._missing: dict[ExecutionAttempt, None] = {}
        self._given_up = False
        self._changed = threading.Condition()

    def expect(self, half: _Coordinator, attempts: list[ExecutionAttempt]) -> None:
        """These attempts of the operator are alive; none if it has ended."""
        with self._changed:
            self._busy.discard(half)
            self._missing.update(dict.fromkeys(attempts))
            self._changed.notify_all()

    def done(self, operator_id: str, subtask: int, attempt: int) -> None:
        """The attempt has applied it, or is over."""
        with self._changed:
            self._missing = {
                one: None
                for one in self._missing
                if (one.operator_id, one.subtask, one.attempt) != (operator_id, subtask, attempt)
            }
            self._changed.notify_all()

    def abandon(self, operator_id: str) -> None:
        """The operator's run has ended."""
        with self._changed:
            self._missing = {one: None for one in self._missing if one.operator_id != operator_id}
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for this any more, or nobody is missing."""
        return self._given_up or not (self._busy or self._missing)

    def wait(self, timeout_s: float) -> str:
        """Wait, and return who is missing; empty for nobody."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            try:
                while not self.is_over and (left_s := deadline - time.monotonic()) > 0:
                    self._changed.wait(left_s)
            finally:
                self._given_up = True
            if self._busy:
                return "an operator whose coordinator is busy"
            named = [f"subtask {one.subtask} of {one.operator_id!r}" for one in self._missing]
            more = f" and {len(named) - 10} more" if len(named) > 10 else ""
            return ", ".join(named[:10]) + more


class _Coordinator(OperatorCoordinator):
    """Sends the value to one operator's tasks. On the loop, except ``publish``."""

    def __init__(self, shared: SharedValue[Any], operator_id: str) -> None:
        self._shared = shared
        self._operator_id = operator_id
        self._context: CoordinatorContext
        self._newest: _Version
        self._published: deque[_Applied] = deque()  # any thread; those that the loop has yet to hear of
        self._waiting: list[_Applied] = []
        self._whole_sent: dict[tuple[int, int], int] = {}  # by subtask and attempt: the last version sent as a whole
        self.thread = 0

    async def start(self, context: CoordinatorContext) -> None:
        self._context = context
        self.thread = threading.get_ident()
        self._newest = self._shared.attach(self)

    async def close(self) -> None:
        self._shared.detach(self)
        for applied in self._published:  # what is published now reaches nobody any more
            applied.expect(self, [])
        self._forget_attempts()

    def publish(self, newest: _Version, applied: _Applied | None) -> None:
        """Send a version to all attempts. Any thread; the calls come in the order of the versions."""
        if applied is not None:
            self._published.append(applied)
        self._context.call_soon_threadsafe(partial(self._publish, newest, applied))

    async def _publish(self, newest: _Version, applied: _Applied | None) -> None:
        self._newest = newest
        self._waiting = [one for one in self._waiting if not one.is_over]
        if applied is not None:
            self._published.popleft()
            applied.expect(self, [gateway.attempt for gateway in self._context.gateways])
            self._waiting.append(applied)
        tell_all(self._context, _event_of(newest, applied is not None, whole=False))

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        await gateway.send_event(_event_of(self._newest, False, whole=True), urgent=True)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if self._context.handles_restored:  # of an attempt that is over; the one of now wants and applies by itself
            return
        match event:
            case [str("applied"), int(version)]:
                for waiting in self._waiting:
                    if version >= waiting.version:
                        waiting.done(self._operator_id, subtask, attempt)
            case [str("want"), int(), bool(wants_answer)]:
                if self._whole_sent.get((subtask, attempt)) != self._newest.number:
                    self._whole_sent[subtask, attempt] = self._newest.number
                    self._context.run_in_background(
                        partial(self._send_whole, self._newest, subtask, attempt, wants_answer), handler=raise_error
                    )
            case _:
                raise RemoteProtocolError(f"not an event of a shared value: {show(event, 80)}; {SAME_RELEASE}")

    async def handle_client_request(self, request: Any) -> int:
        """Set the value, for a program whose sidecar is in another process, and return its version."""
        return self._shared.set(request)

    async def _send_whole(self, version: _Version, subtask: int, attempt: int, wants_answer: bool) -> None:
        """Send the value in chunks, as the task takes them. All together would hold the event loop.

        Whatever else is sent to the task meanwhile takes its place between them.
        """
        send = partial(self._context.gateways.send, subtask, attempt=attempt, urgent=True)
        if len(version.payload) <= LARGE_BYTES:
            await send(["value", version.number, wants_answer, version.payload])
            return
        count = -(-len(version.payload) // CHUNK_BYTES)
        unconfirmed: deque[Confirmation] = deque()
        for number in range(count):
            if len(unconfirmed) == CHUNKS_UNCONFIRMED:
                try:
                    await unconfirmed.popleft()
                except AttemptOver:
                    return
            chunk = version.payload[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            sent = await send(["chunk", version.number, wants_answer, number, count, chunk])
            if not sent:
                return  # the attempt is over
            unconfirmed.extend(sent)
        await self._context.gateways.send(subtask, COMPLETE, attempt=attempt)

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self._is_over(subtask, attempt)

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        self._is_over(subtask, attempt)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self._forget_attempts()

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        if state:
            raise not_the_state_of("a shared value", self._shared.name)
        self._forget_attempts()

    def _is_over(self, subtask: int, attempt: int) -> None:
        self._whole_sent.pop((subtask, attempt), None)
        for waiting in self._waiting:
            waiting.done(self._operator_id, subtask, attempt)

    def _forget_attempts(self) -> None:
        for waiting in self._waiting:
            waiting.abandon(self._operator_id)
        self._waiting.clear()
        self._whole_sent.clear()


def _event_of(version: _Version, wants_answer: bool, *, whole: bool) -> list[Any]:
    if version.change is not None and not whole:
        return ["change", version.number, wants_answer, version.number - 1, version.change]
    if len(version.payload) > LARGE_BYTES:
        return ["offer", version.number, wants_answer, digest_of(version.payload)]
    return ["value", version.number, wants_answer, version.payload]
