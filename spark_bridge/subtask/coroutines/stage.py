# SPDX-License-Identifier: Apache-2.0

"""The operator of an async stage: takes records on the task's thread, and runs their coroutines on the task's loop.

    task's thread    take a record -> submit -> ... -> give out results, with their effects -> snapshot
    loop's thread               begin -> tries -> landed, in a queue for the task's thread -> nudge

``InFlight`` knows what is on its way. Only the task's thread uses it: what has landed waits in ``_landed`` until that
thread looks, at the latest before a snapshot, so that a checkpoint holds every result that was paid for by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Generator, Iterable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from protocol.describing import describe, show
from protocol.errors import EventEncodeError, NoRestart
from protocol.in_flight import Flight, InFlight
from protocol.wire.messages import RestoreMode
from protocol.wire.state import decode_entry, decode_state, encode_entry, encode_state
from spark_bridge.subtask.coroutines.calls import (
    AsyncOperator,
    Effects,
    Failed,
    RecordContext,
    Settings,
    content_key,
)
from spark_bridge.subtask.coroutines.loop import END_S, TaskLoop
from spark_bridge.subtask.coroutines.rows import Rows
from spark_bridge.subtask.items import ADDS, Items
from spark_bridge.subtask.operator import PAUSE, SubtaskOperator
from spark_bridge.subtask.parts import current_part

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

__all__ = ["AsyncStage"]

STATE = "an async stage"
FAILED = "failed"
"""The counter of records without a result."""
NO_OUTPUT: Any = object()
END: Any = object()
_log = logging.getLogger(__name__)


class _Record:
    """An input: the record, its encoded form if checkpoints hold it, and its id if it is an item of a work queue."""

    __slots__ = ("encoded", "item", "record")

    def __init__(self, record: Any, encoded: bytes | None, item: int | None) -> None:
        self.record = record
        self.encoded = encoded
        self.item = item

    @property
    def items(self) -> list[int]:
        """The id as a checkpoint has it: if there is one."""
        return [] if self.item is None else [self.item]


class _Result:
    """What has landed: a value with its effects, or a failure that ends the task."""

    __slots__ = ("effects", "error", "value")

    def __init__(self, value: Any, effects: Effects, error: BaseException | None = None) -> None:
        self.value = value
        self.effects = effects
        self.error = error

    def as_value(self) -> list[Any]:
        has_output = self.value is not NO_OUTPUT
        return [has_output, self.value if has_output else None, self.effects]


class AsyncStage(SubtaskOperator):
    """Runs what ``concurrently`` was given. Its state is consistent wherever it waits or has yielded."""

    snapshot_anywhere = True
    goes_on_after_restore = True
    takes_pauses = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._flights: InFlight[_Record] = InFlight(settings.limit, ordered=settings.ordered)
        self._landed: deque[tuple[Flight[_Record], _Result]] = deque()  # not yet known to ``_flights``
        self._by_class = settings.is_class  # looked up once: it inspects the function (``async_records``)
        self._operator = settings.call() if self._by_class else AsyncOperator()
        self._resources = AsyncExitStack()
        self._lifespan: tuple[Any, ...] = ()
        self._taken = 0  # how many records of this input are in flight or have left
        self._keeps = False  # whether checkpoints hold what is in flight
        self._held_types: set[type] = {type(NO_OUTPUT)}  # those of results of which a checkpoint could hold one
        self._started = False
        self._leaving: Flight[_Record] | None = None  # one that is being given out
        self._gathered: list[Any] = []  # values that have left, and are not yet together in a batch
        self._loop: TaskLoop | None = None
        self._items: Items | None = None  # that the records are
        self._context: SubtaskContext[Any]
        if not isinstance(self._operator, AsyncOperator):
            raise TypeError(f"{settings.name} must make an AsyncOperator, not {show(self._operator)}")
        # Otherwise nothing needs the coordinator's initial values before the first record.
        self.waits_for_subtask_ready = type(self._operator).handle_event is not AsyncOperator.handle_event

    # --- the beginning and the end --------------------------------------------------------------------------------

    def open(self, context: SubtaskContext[Any], state: bytes | None) -> None:
        self._context = context
        self._keeps = context.mode == RestoreMode.STREAMING  # otherwise Spark computes all records again
        self._items = context._items
        if state:
            fields = decode_state(STATE, state)
            self._flights.restore(map(_restored, fields["flights"]))
            if context.input_begins_again:
                self._taken = fields["taken"]
        known = () if self._items is None else self._items.resume([one.item for one, _ in self._flights.held()])
        for one, _ in self._flights.held():
            one.item = one.item if one.item in known else None
        channel = context._channel
        self._loop = (channel.stepped_loop or TaskLoop)(channel)
        self._dice = self._loop.dice

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()

    async def _start(self) -> None:
        if self._settings.lifespan is not None:
            self._lifespan = (await self._resources.enter_async_context(self._settings.lifespan()),)
        await self._operator.start()
        self._started = True

    async def _stop(self) -> None:
        """Cancel what is in flight, then release what it used."""
        assert self._loop is not None
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        try:
            async with asyncio.timeout(END_S):
                await asyncio.gather(*left, return_exceptions=True)
                if self._started:
                    await self._operator.stop()
                await self._resources.aclose()
        except Exception:
            _log.exception("%s did not stop", self._settings.name)

    # --- records and results, on the task's thread ----------------------------------------------------------------

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        if not self._settings.rows:
            return self._results(records)
        rows = Rows(self._settings.schema)
        return rows.together(self._results(rows.of(records)), self._gathered)

    def _results(self, records: Iterator[Any]) -> Generator[Any, None, None]:
        loop, flights = self._loop, self._flights
        assert loop is not None
        failures = current_part("sink", self._settings.failures_to) if self._settings.failures_to else None
        more, pull = True, False
        for _ in islice(records, self._taken):
            pass  # they have left, or are restored
        try:
            loop.run(self._start)
            while more or flights:
                self._know_landed()
                while flights.may_leave:
                    yield from self._given_out(flights.leave(), failures)
                    self._know_landed()
                self._begin()
                if more and (pull or flights.has_capacity):
                    # Capacity first: a record that was taken without a place would be in no checkpoint.
                    record = next(records, END)
                    more, pull = record is not END, False
                    if more and record is not PAUSE:
                        self._take(record)
                    elif more and self._items is not None:  # there will be items when results have left, or never
                        self._context._calls.wait_until(self._something_landed)
                elif flights:
                    # A barrier that can only be met upstream, behind a plain function, is met as that takes its next
                    # record. What it makes of that waits beyond the limit.
                    pull = not self._context._calls.wait_until(self._something_landed)
        finally:
            loop.run(self._stop)

    def _take(self, record: Any) -> None:
        item = None if self._items is None else self._items.given
        self._flights.take(_Record(record, encode_entry(record) if self._keeps else None, item))
        self._taken += 1
        self._begin()

    def _begin(self) -> None:
        assert self._loop is not None
        for flight in self._flights.begin():
            self._loop.submit(partial(self._loop.start, self._fly(flight)))

    def _something_landed(self) -> bool:
        return bool(self._landed)

    def _know_landed(self) -> None:
        """Take note of what has landed. Raises the error of a record that fails the task: nothing else is paid for."""
        while self._landed:
            flight, result = self._landed.popleft()
            if result.error is not None:
                raise result.error
            if self._keeps and type(result.value) not in self._held_types:
                self._check_held(flight.input, result)
                self._held_types.add(type(result.value))
            self._flights.land(flight, result)

    def _check_held(self, input: _Record, result: _Result) -> None:
        """Raise ``EventEncodeError`` if a checkpoint cannot hold the result. It costs as much as a short call."""
        try:
            encode_entry(result.as_value())
        except EventEncodeError as error:
            raise EventEncodeError(
                f"{self._settings.name} gave {show(result.value)} for the record {show(input.record)}, and a "
                f"checkpoint cannot hold this result, or an event that belongs to it: {error}"
            ) from error

    def _given_out(self, flight: Flight[_Record], failures: Any) -> Iterator[Any]:
        """Let the effects of a result happen, and yield it. A snapshot while an event waits has what is left of it."""
        result, item = flight.result, flight.input.item
        self._leaving = flight
        if item is not None and self._items is not None:
            self._items.giving_out(item)
        while result.effects:
            self._happen(result.effects[0])
            del result.effects[0]
        if failures is not None and isinstance(result.value, Failed):
            failed = result.value
            failures.write({"record": failed.record, "error": failed.error, "tries": failed.tries})
            result.value = NO_OUTPUT
        self._leaving = None
        if result.value is not NO_OUTPUT:
            yield result.value
        if item is not None and self._items is not None:
            self._items.left()

    def _happen(self, effect: list[Any]) -> None:
        match effect:
            case ["event", event]:
                self._context.send_event(event)
            case ["count", name, by]:
                self._context.count(name, by)
            case ["observe", name, value]:
                self._context.observe(name, value)
            case ["add", found]:
                if self._items is not None:
                    self._items.add_found(found)

    # --- coroutines, on the loop ----------------------------------------------------------------------------------

    async def _fly(self, flight: Flight[_Record]) -> None:
        try:
            result = await self._result_of(flight.input)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise  # by the end of the attempt, or of the task
            result = _Result(NO_OUTPUT, [], error)  # whatever on_error says: an exit ends the task, and so does a
            # function of the program that fails while it looks at a failure
        self._landed.append((flight, result))
        assert self._loop is not None
        self._loop.nudge_soon()

    async def _result_of(self, input: _Record) -> _Result:
        settings, tries = self._settings, 0
        while True:
            tries += 1
            context = RecordContext(self._context, partial(self._key, input), tries)
            if input.item is not None and self._items is not None:
                ADDS.set((self._items.name, context.effects))
            try:
                if settings.timeout_s is None:  # asyncio's own context costs as much as a call: ``async_records``
                    value = await self._call(context, input.record)
                else:
                    async with asyncio.timeout(settings.timeout_s):
                        value = await self._call(context, input.record)
            except Exception as error:
                each_counts = self._context._calls.each_failure_counts
                pause_s = None if each_counts else settings.retry.pause_after(tries, error, self._dice)
                if pause_s is None:
                    return self._failed(input.record, error, tries)
                await asyncio.sleep(pause_s)
            else:
                return _Result(value, context.effects)

    def _call(self, context: RecordContext, record: Any) -> Awaitable[Any]:
        settings = self._settings
        if self._by_class:
            return self._operator.process_record(context, record)
        given = (*self._lifespan, record)
        awaitable: Awaitable[Any] = settings.call(context, *given) if settings.with_context else settings.call(*given)
        return awaitable

    def _key(self, input: _Record) -> str:
        if self._settings.key is not None:
            return self._settings.key(input.record)
        return content_key(self._settings.name, input.encoded or encode_entry(input.record))

    def _failed(self, record: Any, error: Exception, tries: int) -> _Result:
        # What each further record would meet, such as an exhausted budget, is not left out: one by
        # one, all of them would be lost quietly.
        each_counts = self._context._calls.each_failure_counts
        if self._settings.on_error == "raise" or each_counts or isinstance(error, NoRestart):
            if isinstance(error, TimeoutError) and not str(error) and self._settings.timeout_s is not None:
                error = TimeoutError(f"no result within {self._settings.timeout_s:g} s, {tries} times")
            error.add_note(f"in {self._settings.name}, for the record {show(record)}")
            if each_counts:
                error.add_note("retry and on_error have no effect in a task whose coroutines loop over a work queue")
            return _Result(NO_OUTPUT, [], error)
        failed = Failed(record, describe(error), tries)
        return _Result(NO_OUTPUT if self._settings.on_error == "skip" else failed, [["count", FAILED, 1]])

    # --- events, on the task's thread -----------------------------------------------------------------------------

    def handle_event(self, event: Any) -> None:
        if self._loop is not None and type(self._operator).handle_event is not AsyncOperator.handle_event:
            self._loop.call(self._operator.handle_event, event)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        if not self._keeps:
            return b""
        self._know_landed()
        try:
            return self._state()
        except EventEncodeError:
            for one, result in self._flights.held():
                if result is not None:
                    self._check_held(one, result)
            raise

    def _state(self) -> bytes:
        leaving: list[list[Any]] = [[b"", _Result(value, []).as_value()] for value in self._gathered]
        if self._leaving is not None:
            leaving.append([b"", self._leaving.result.as_value(), *self._leaving.input.items])
        flights = [[one.encoded, result and result.as_value(), *one.items] for one, result in self._flights.held()]
        return _state_of(self._taken, [*leaving, *flights])

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        """What is in flight in all of them. A position would be that of the same input, which other subtasks refuse."""
        return _state_of(0, (flight for state in states.values() if state for flight in _flights_of(state)))


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _state_of(taken: int, flights: Iterable[Any]) -> bytes:
    return encode_state(STATE, {"taken": taken, "flights": list(flights)})


def _flights_of(state: bytes) -> list[Any]:
    flights: list[Any] = decode_state(STATE, state)["flights"]
    return flights


def _restored(flight: Any) -> tuple[_Record, _Result | None]:
    encoded, result, *items = flight
    item = items[0] if items else None
    if result is None:
        return _Record(decode_entry(encoded), encoded, item), None
    has_output, value, effects = result
    return _Record(None, encoded, item), _Result(value if has_output else NO_OUTPUT, effects)
