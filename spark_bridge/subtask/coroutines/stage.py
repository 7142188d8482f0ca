# SPDX-License-Identifier: Apache-2.0

"""The operator of an async stage: takes records on the task's thread, and runs their coroutines on the task's loop.

    task's thread    take a record -> submit -> ... -> give out results, with their effects -> snapshot
    loop's thread               begin -> tries -> landed, in a queue for the task's thread -> nudge

``InFlight`` knows what is on its way. Only the task's thread uses it: what has landed waits in ``_landed`` until that
thread looks, at the latest before a snapshot, so that a checkpoint holds every result that was paid for by then.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import AsyncExitStack
from contextvars import Context, copy_context
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
from spark_bridge.subtask.coroutines.retry import NO_RETRY
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
WITHOUT_EFFECTS: Any = ()
_log = logging.getLogger(__name__)


class _Record(Flight):
    """A record on its way: its encoded form if checkpoints hold it, its id if it is an item of a work queue, and what
    its coroutine has made of it.

    The loop's thread writes that before the record is in ``_landed``, and the task's thread reads it afterwards.
    """

    __slots__ = ("effects", "encoded", "error", "item", "record", "value")

    def __init__(self, record: Any, encoded: bytes | None, item: int | None) -> None:
        super().__init__()
        self.record = record
        self.encoded = encoded
        self.item = item
        self.value: Any = NO_OUTPUT
        self.effects: Effects = WITHOUT_EFFECTS
        self.error: BaseException | None = None  # one that fails the task

    def clear(self) -> None:
        """Be ready for another record: this one has left, without effects."""
        self.begun = self.landed = False
        self.record = self.encoded = None
        self.value = NO_OUTPUT

    def result(self) -> list[Any]:
        """The result with its effects, as a checkpoint holds it."""
        has_output = self.value is not NO_OUTPUT
        return [has_output, self.value if has_output else None, self.effects]

    @property
    def items(self) -> list[int]:
        """The id as a checkpoint has it: if there is one."""
        return [] if self.item is None else [self.item]


class AsyncStage(SubtaskOperator):
    """Runs what ``concurrently`` was given. Its state is consistent wherever it waits or has yielded."""

    snapshot_anywhere = True
    goes_on_after_restore = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._flights: InFlight[_Record] = InFlight(settings.limit, ordered=settings.ordered)
        self._landed: deque[_Record] = deque()  # not yet known to ``_flights``
        by_class = settings.is_class
        self._operator = settings.call() if by_class else AsyncOperator()
        self._function: Callable[..., Awaitable[Any]] = self._operator.process_record if by_class else settings.call
        self._resources = AsyncExitStack()
        self._lifespan: tuple[Any, ...] = ()
        self._plain: Callable[..., Awaitable[Any]] | None = None  # the call, if it needs no preparation
        self._spare: list[_Record] = []  # whose results have left without effects: saves 0.5 µs (``async_records``)
        self._taken = 0  # how many records of this input are in flight or have left
        self._keeps = False  # whether checkpoints hold what is in flight
        self._held_types: set[type] = {type(NO_OUTPUT)}  # those of results of which a checkpoint could hold one
        self._started = self._stopped = False
        self._leaving: _Record | None = None  # one that is being given out
        self._begun: deque[_Record] = deque()  # for the loop's thread, which has not yet seen them
        self._workers: set[asyncio.Task[None]] = set()  # a loop keeps no task alive: it would be collected
        self._variables = copy_context()  # those that each record finds: of the task's thread
        self._resting: list[asyncio.Future[_Record | None]] = []  # workers without a record
        self._rested = self._variables  # those that a new record would find with one of these
        self._until_turn = 0  # how many records workers may take before the loop takes its next turn
        self._gathered: list[Any] = []  # values that have left, and are not yet together in a batch
        self._loop: TaskLoop | None = None
        self._items: Items | None = None  # that the records are
        self._thresholds = self._thresholds_before = gc.get_threshold()
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
        known = () if self._items is None else self._items.resume([one.item for one in self._flights.held])
        for one in self._flights.held:
            one.item = one.item if one.item in known else None
        self._collect_less_often()
        channel = context._channel
        self._loop = (channel.stepped_loop or TaskLoop)(channel)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
        if gc.get_threshold() == self._thresholds:
            gc.set_threshold(*self._thresholds_before)

    def _collect_less_often(self) -> None:
        """Let the garbage collector wait until there are more new objects than those of one turn of the loop.

        They come and go together, and each turn had four collections that found nothing: 0.9 µs for each record with
        1,000 in flight (``async_records``).
        """
        first, second, third = self._thresholds_before = gc.get_threshold()
        self._thresholds = (max(first, 5 * self._settings.limit) if first else 0, second, third)
        gc.set_threshold(*self._thresholds)

    async def _start(self) -> None:
        if self._settings.lifespan is not None:
            self._lifespan = (await self._resources.enter_async_context(self._settings.lifespan()),)
        await self._operator.start()
        if not self._settings.with_context and self._items is None and self._settings.timeout_s is None:
            self._plain = partial(self._function, *self._lifespan)
        self._started = True

    async def _stop(self) -> None:
        """Cancel what is in flight, then release what it used."""
        assert self._loop is not None
        self._stopped = True
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
        more, pull, fed_has_results = True, False, self._context._fed_has_results
        deque(islice(records, self._taken), maxlen=0)  # they have left, or are restored
        try:
            loop.run(self._start)
            self._begin()
            while more or flights:
                if self._landed:
                    self._know_landed()
                leaving = flights.leave()
                if leaving is not None:
                    item, value = leaving.item, leaving.value
                    if leaving.effects or failures is not None or item is not None:
                        value = self._happen(leaving, failures)
                    elif leaving.effects is WITHOUT_EFFECTS:
                        leaving.clear()
                        self._spare.append(leaving)
                    if value is not NO_OUTPUT:
                        yield value
                    if item is not None and self._items is not None:
                        self._items.left()
                elif more and (pull or flights.has_capacity):
                    more, pull = self._take(records), False
                elif flights:
                    # A barrier that can only be met upstream, behind a plain function, is met as that takes its next
                    # record. What it makes of that waits beyond the limit.
                    pull = not self._context._calls.wait_until(self.has_results)
                if fed_has_results is not None and not self._landed and fed_has_results():
                    yield PAUSE
        finally:
            loop.run(self._stop)

    def _take(self, records: Iterator[Any]) -> bool:
        """Take a record, and more while nothing else can be done. Return whether there may be others."""
        flights, fed_has_results = self._flights, self._context._fed_has_results
        for record in records:
            if record is PAUSE:
                if self._items is not None:  # there will be items when results have left, or never
                    self._context._calls.wait_until(self.has_results)
                return True
            encoded = encode_entry(record) if self._keeps else None
            item = None if self._items is None else self._items.given
            if self._spare:
                taken = self._spare.pop()
                taken.record, taken.encoded, taken.item = record, encoded, item
            else:
                taken = _Record(record, encoded, item)
            self._taken += 1
            if flights.take(taken):
                self._submit(taken)
            # Capacity first: a record that was taken without a place would be in no checkpoint.
            if self._landed or fed_has_results is not None or not flights.has_capacity:
                return True
        return False

    def _begin(self) -> None:
        for record in self._flights.begin():
            self._submit(record)

    def _submit(self, record: _Record) -> None:
        """Have the coroutine of a record begun on the loop. The first one wakes it for all."""
        if not self._begun:
            self._variables = copy_context()
        self._begun.append(record)
        if len(self._begun) == 1:
            assert self._loop is not None
            self._loop.loop.call_soon_threadsafe(self._set_to_work)

    def has_results(self) -> bool:
        """Whether this stage, or an async one that it feeds, would give out something."""
        fed_has_results = self._context._fed_has_results
        return bool(self._landed) or (fed_has_results is not None and fed_has_results())

    def _know_landed(self) -> None:
        """Take note of what has landed. Raises the error of a record that fails the task: nothing else is paid for."""
        while self._landed:
            record = self._landed.popleft()
            if record.error is not None:
                self._context._channel.check()  # whose end has cancelled it
                raise record.error
            if self._keeps and type(record.value) not in self._held_types:
                self._check_held(record)
                self._held_types.add(type(record.value))
            self._flights.land(record)
        if self._flights.waiting:
            self._begin()

    def _check_held(self, record: _Record) -> None:
        """Raise ``EventEncodeError`` if a checkpoint cannot hold the result. It costs as much as a short call."""
        try:
            encode_entry(record.result())
        except EventEncodeError as error:
            raise EventEncodeError(
                f"{self._settings.name} gave {show(record.value)} for the record {show(record.record)}, and a "
                f"checkpoint cannot hold this result, or an event that belongs to it: {error}"
            ) from error

    def _happen(self, leaving: _Record, failures: Any) -> Any:
        """Let the effects of a result happen, and return what is given out.

        A snapshot while an event waits has what is left of it.
        """
        self._leaving = leaving
        if leaving.item is not None and self._items is not None:
            self._items.giving_out(leaving.item)
        while leaving.effects:
            match leaving.effects[0]:
                case ["event", event]:
                    self._context.send_event(event)
                case ["count", name, by]:
                    self._context.count(name, by)
                case ["observe", name, value]:
                    self._context.observe(name, value)
                case ["add", found]:
                    if self._items is not None:
                        self._items.add_found(found)
            del leaving.effects[0]
        if failures is not None and isinstance(leaving.value, Failed):
            failed = leaving.value
            failures.write({"record": failed.record, "error": failed.error, "tries": failed.tries})
            leaving.value = NO_OUTPUT
        self._leaving = None
        return leaving.value

    # --- coroutines, on the loop ----------------------------------------------------------------------------------

    def _set_to_work(self) -> None:
        """Give the records that have come to the workers that rest, and the others to new ones.

        It is called soon whenever there are some: ``_submit`` sees to that when it adds the first one.
        """
        assert self._loop is not None
        loop = self._loop.loop
        self._until_turn = self._settings.limit
        begun, resting = self._begun, self._resting
        if resting and not _equal(self._rested, self._variables):
            for rest in resting:
                if not rest.done():
                    rest.set_result(None)
            resting.clear()
        while begun:
            record = begun.popleft()
            while resting:
                rest = resting.pop()
                if not rest.done():
                    rest.set_result(record)
                    break
            else:
                variables = self._variables.copy()
                task = loop.create_task(self._work(record, variables), context=variables)
                self._workers.add(task)
                task.add_done_callback(self._workers.discard)

    async def _work(self, record: _Record | None, variables: Context) -> None:
        """Process a record, and then others, as long as they would find the same context variables in a new task.

        A task for each record would cost more than all the rest (``async_records``).
        """
        task = asyncio.current_task()
        assert task is not None
        assert self._loop is not None
        begun, resting, create_future = self._begun, self._resting, self._loop.loop.create_future
        plain = self._plain
        while record is not None:
            try:
                try:
                    record.value = await (plain(record.record) if plain else self._call(record, 1))
                except Exception as error:
                    await self._recover(record, error)
            except BaseException as error:
                # Whatever on_error says: an exit ends the task, and so does a function of the program that fails while
                # it looks at a failure.
                record.error = error
            self._has_landed(record)
            if task.cancelling() or not _equal(variables, self._variables):
                return
            if begun and self._until_turn:
                self._until_turn -= 1
                record = begun.popleft()
                continue
            rest = create_future()
            if not resting:
                self._rested = variables
            resting.append(rest)
            try:
                record = await rest
            except asyncio.CancelledError as error:  # by somebody who meant an earlier record
                if not rest.cancelled() and (record := rest.result()) is not None:
                    record.error = error
                    self._has_landed(record)
                return

    def _has_landed(self, record: _Record) -> None:
        if record.error is not None and self._stopped:
            return  # it was cancelled, and a checkpoint holds its input
        self._landed.append(record)
        if len(self._landed) == 1:  # otherwise the task's thread has not seen the one before, and will look
            assert self._loop is not None
            self._loop.nudge_soon()

    def _call(self, record: _Record, tries: int) -> Awaitable[Any]:
        settings = self._settings
        if settings.with_context or record.item is not None:
            record.effects = []  # those of a try that failed do not happen
        if record.item is not None and self._items is not None:
            ADDS.set((self._items.name, record.effects))
        if settings.with_context:
            context = RecordContext(self._context, partial(self._key, record), tries, record.effects)
            call = self._function(context, *self._lifespan, record.record)
        else:
            call = self._function(*self._lifespan, record.record)
        return call if settings.timeout_s is None else _within(settings.timeout_s, call)

    async def _recover(self, record: _Record, error: Exception) -> None:
        """After the first try has failed: try again, or take note of the failure."""
        assert self._loop is not None
        tries, retry = 1, NO_RETRY if self._context._calls.each_failure_counts else self._settings.retry
        while (pause_s := retry.pause_after(tries, error, self._loop.dice)) is not None:
            await asyncio.sleep(pause_s)
            tries += 1
            try:
                record.value = await self._call(record, tries)
            except Exception as failure:
                error = failure
            else:
                return
        self._failed(record, error, tries)

    def _key(self, record: _Record) -> str:
        if self._settings.key is not None:
            return self._settings.key(record.record)
        return content_key(self._settings.name, record.encoded or encode_entry(record.record))

    def _failed(self, record: _Record, error: Exception, tries: int) -> None:
        # What each further record would meet, such as an exhausted budget, is not left out: one by one, all of them
        # would be lost quietly.
        each_counts = self._context._calls.each_failure_counts
        if self._settings.on_error == "raise" or each_counts or isinstance(error, NoRestart):
            if isinstance(error, TimeoutError) and not str(error) and self._settings.timeout_s is not None:
                error = TimeoutError(f"no result within {self._settings.timeout_s:g} s, {tries} times")
            error.add_note(f"in {self._settings.name}, for the record {show(record.record)}")
            if each_counts:
                error.add_note("retry and on_error have no effect in a task whose coroutines loop over a work queue")
            record.error = error
        else:
            failed = Failed(record.record, describe(error), tries)
            record.value = NO_OUTPUT if self._settings.on_error == "skip" else failed
            record.effects = [["count", FAILED, 1]]

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
            for one in self._flights.held:
                if one.landed:
                    self._check_held(one)
            raise

    def _state(self) -> bytes:
        leaving: list[list[Any]] = [[b"", [True, value, []]] for value in self._gathered]
        if self._leaving is not None:
            leaving.append([b"", self._leaving.result(), *self._leaving.items])
        flights = [[one.encoded, one.result() if one.landed else None, *one.items] for one in self._flights.held]
        return _state_of(self._taken, [*leaving, *flights])

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        """What is in flight in all of them. A position would be that of the same input, which other subtasks refuse."""
        return _state_of(0, (flight for state in states.values() if state for flight in _flights_of(state)))


async def _within(timeout_s: float, call: Awaitable[Any]) -> Any:
    async with asyncio.timeout(timeout_s):
        return await call


def _equal(one: Context, other: Context) -> bool:
    try:
        return one == other
    except Exception:  # of values that cannot be compared
        return False


def _state_of(taken: int, flights: Iterable[Any]) -> bytes:
    return encode_state(STATE, {"taken": taken, "flights": list(flights)})


def _flights_of(state: bytes) -> list[Any]:
    flights: list[Any] = decode_state(STATE, state)["flights"]
    return flights


def _restored(flight: Any) -> _Record:
    encoded, result, *items = flight
    record = _Record(decode_entry(encoded) if result is None else None, encoded, items[0] if items else None)
    if result is not None:
        record.landed = True
        has_output, value, record.effects = result
        record.value = value if has_output else NO_OUTPUT
    return record
