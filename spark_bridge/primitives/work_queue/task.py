# SPDX-License-Identifier: Apache-2.0

"""The task's half of a work queue, and what user code sees of it there."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from protocol.arguments import INT64, Rule, checked
from protocol.errors import LocalProtocolError
from protocol.source_events import NoMoreSplits, SplitsAdded, parse_source_event
from protocol.wire.codec import encode_argument
from protocol.wire.messages import RestoreMode
from protocol.wire.state import OLD, decode_state, encode_state
from spark_bridge.primitives.work_queue.messages import (
    Item,
    KeepItems,
    Report,
    ReturnItems,
    id_of_child,
    id_of_key,
    parse_return,
)
from spark_bridge.subtask.context import refuse_on_loop, runs_on_loop
from spark_bridge.subtask.items import ADDS
from spark_bridge.subtask.operator import PAUSE, SubtaskOperator
from spark_bridge.subtask.parts import ON_DRIVER, PartInTask, TaskPart, parts_here

if TYPE_CHECKING:
    from spark_bridge.subtask.context import SubtaskContext

T = TypeVar("T")

_HAND = "the hand of a work queue"
FOUND_MAX = 256
"""So many found items leave before their parent is finished."""
FOUND_BYTES_MAX = 2**20
"""The same, in bytes: all of them leave in one event."""
REPORT_S = 0.05
"""A task that still has items in hand reports at least this often, between two items."""


class _Parent:
    """The item to which belongs what is added now, and how many children of each value it has so far."""

    def __init__(self, id_: int) -> None:
        self.id = id_
        self.children: Counter[int] = Counter()  # by the id of the first of each value


class WorkQueuePart(TaskPart):
    """The items of this task. All of it happens on the task's own thread. An item is in one of four places:

    * in the hand;
    * with the function that loops over the queue (``_current``), which does it again after a restore;
    * with one of the coroutines that loop over the queue (``_in_loops``), in batch mode;
    * with the stages that ``QueueItems`` feeds (``_begun``), which hold it themselves in a checkpoint, and its result.
    """

    waits_for_subtask_ready = False
    goes_on_after_restore = True

    def __init__(self, name: str, in_hand: int, keyed: bool) -> None:
        self._name = name
        self._in_hand = in_hand
        self._keyed = keyed  # the queue has a key function
        self._clock: Callable[[], float]
        self._report_at = 0.0
        self._hand: deque[Item] = deque()
        self._current: Item | None = None
        self._begun: dict[int, None] = {}  # ids, in this order
        self._in_loops: dict[int, Item] = {}
        self._takers: deque[Callable[[Item | None], object]] = deque()  # of coroutines that wait for an item
        self._parent: _Parent | None = None
        self.given = 0
        self._finished: list[int] = []  # and not reported
        self._found: list[Item] = []
        self._found_bytes = 0
        self._given_back: list[int] = []
        self._offered: dict[int, Item] = {}  # given back, and perhaps to be kept
        self._asked = 0
        self._no_more = False
        self._context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context
        self._clock = context.now
        if state is not None and context.input_begins_again:  # otherwise the items are those of an earlier input
            items, begun = _fields_of(state)
            self._hand.extend(items)
            self._begun = dict.fromkeys(begun)

    @property
    def name(self) -> str:
        return self._name

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        fields = [_fields_of(state) for state in states.values()]
        return _state_of([item for items, _ in fields for item in items], [id_ for _, begun in fields for id_ in begun])

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        """What is finished or found leaves first, so the coordinator has it after the snapshot, in any case."""
        if self._finished or self._found or self._given_back:
            self._report(self._asked)
        return _state_of([item for item in (self._current, *self._hand) if item is not None], self._begun)

    def final_state(self) -> bytes:
        """The function has returned: the current item is finished, and so is what the stages have given out.

        The report names the others. In batch mode they go to other tasks. In streaming mode, where a checkpoint may
        hold them for this task, it keeps them for its next run of the same input.
        """
        self._finish_current()
        if self._parent is not None:
            self.left()
        self._finished += self._in_loops  # the coroutines have ended
        self._in_loops.clear()
        left = list(self._hand)
        self._given_back += [*(item[0] for item in left), *self._begun]
        if self._finished or self._found or self._given_back or self._asked:
            self._report(0, last=True)
        if self._context.mode is RestoreMode.BATCH:
            self._hand.clear()
            self._begun.clear()
            return b""
        return _state_of(left, self._begun)

    def handle_event(self, event: Any) -> None:
        match parse_source_event(event):
            case SplitsAdded(splits):
                items = cast("list[Item]", [tuple(split) for split in splits])
                self._hand.extend(items)
                for item in items:  # what was given back, and comes again
                    self._offered.pop(item[0], None)
                self._asked = max(0, self._asked - len(splits))
            case NoMoreSplits():
                self._no_more = True
            case _:
                match parse_return(event):
                    case ReturnItems(count):
                        self._give_back(count)
                    case KeepItems(ids):
                        self._hand.extend([self._offered.pop(id_) for id_ in reversed(ids) if id_ in self._offered])
        self._serve()

    def _give_back(self, count: int) -> None:
        """Give back what was added last; a report answers even if there is nothing."""
        offered = [self._hand.pop() for _ in range(min(count, len(self._hand)))]
        self._offered |= {item[0]: item for item in offered}
        self._given_back += [item[0] for item in offered]
        self._report(self._asked)

    # --- for user code, on the task's thread ----------------------------------------------------------------------

    def items(self) -> Iterator[Any]:
        """Yield the items one after another; each is finished when the next one is asked for."""
        self._refuse_to_feed_coroutines()
        try:
            while (item := self._next()) is not None:
                yield item[2]
        except GeneratorExit:
            self._leave_loop()
            raise

    def _leave_loop(self) -> None:
        """The loop was left early, but its function may go on for long: others get what it has in hand.

        Not in streaming mode, where a checkpoint may hold that for this task. If it cannot be sent now, it is given
        back at the end of the function.
        """
        if self._context.mode is RestoreMode.STREAMING or not (self._hand or self._asked):
            return
        given_back = (*self._given_back, *(item[0] for item in self._hand))
        report = Report(tuple(self._finished), tuple(self._found), given_back, 0, begun=1)
        with suppress(Exception):  # the garbage collector may run this, whatever the task does
            self._context.send_event_nowait(report.as_event())
            self._offered |= {item[0]: item for item in self._hand}
            self._hand.clear()
            self._finished, self._found, self._given_back, self._asked, self._found_bytes = [], [], [], 0, 0

    def _next(self) -> Item | None:
        self._finish_current()
        while True:
            self._report_if_due()
            if self._hand:
                self._current = self._hand.popleft()
                self._parent = _Parent(self._current[0])
                return self._current
            if self._no_more:
                return None
            self._context.wait_for_event()

    def _report_if_due(self) -> None:
        """Report before waiting; otherwise seldom: when half of the hand is used up, or some time has passed."""
        wanted = self._in_hand - len(self._hand)
        if self._no_more or not (self._finished or self._found or self._asked < wanted):
            return
        if not self._hand or wanted - self._asked >= max(1, self._in_hand // 2) or self._clock() >= self._report_at:
            self._report(wanted)

    def _finish_current(self) -> None:
        if self._current is not None:
            self._finished.append(self._current[0])
            self._current = self._parent = None

    # --- for coroutines ---------------------------------------------------------------------------------------------

    async def items_on_loop(self) -> AsyncIterator[Any]:
        """``items`` in a coroutine, of which many may loop at the same time.

        A coroutine that fails has lost the results of its earlier items too, so it fails the task. In streaming mode a
        checkpoint would hold its record, and not what it has made of the items before.
        """
        if self._context.mode is RestoreMode.STREAMING:
            raise LocalProtocolError(
                f"`async for` over the work queue {self._name!r} is for batch mode: a checkpoint has no results of a "
                "coroutine that is still in its loop. Let the queue be a stage, whose items are the records of an "
                "async one: chain(take=queue, work=concurrently(...))"
            )
        self.task.each_failure_counts = True
        item: Item | None = None
        try:
            while (item := await self._next_on_loop(item)) is not None:
                ADDS.set((self._name, _Posted(self, _Parent(item[0]))))
                yield item[2]
        except GeneratorExit:
            if item is not None:
                self.task.post(partial(self._finish_in_loop, item))
            raise
        finally:
            ADDS.set(None)

    async def _next_on_loop(self, done: Item | None) -> Item | None:
        import asyncio  # most tasks have not imported it

        loop = asyncio.get_running_loop()
        next_one: asyncio.Future[Item | None] = loop.create_future()

        def settle(item: Item | None) -> None:
            if not next_one.done():
                next_one.set_result(item)
            elif item is not None:
                self.task.post(partial(self._put_back, item))

        def take() -> None:
            if done is not None:
                self._finish_in_loop(done)
            self._takers.append(lambda item: loop.call_soon_threadsafe(settle, item))
            self._serve()

        self.task.post(take)
        try:
            return await next_one
        except asyncio.CancelledError:
            if next_one.done() and not next_one.cancelled() and (item := next_one.result()) is not None:
                self.task.post(partial(self._put_back, item))
            raise

    def _serve(self) -> None:
        """Give items to the coroutines that wait, and ask for more if there are too few."""
        while self._takers and (self._hand or self._no_more):
            item = self._hand.popleft() if self._hand else None
            if item is not None:
                self._in_loops[item[0]] = item
            self._takers.popleft()(item)
        if self._takers:
            self._report_if_due()

    def _finish_in_loop(self, item: Item) -> None:
        if self._in_loops.pop(item[0], None) is not None:
            self._finished.append(item[0])
            self._report_if_due()

    def _put_back(self, item: Item) -> None:
        """The coroutine that was to have it was cancelled."""
        del self._in_loops[item[0]]
        self._hand.appendleft(item)
        self._serve()

    # --- for the stages of a chain, on the task's thread: see ``Items`` ---------------------------------------------

    def given_to_stages(self, gives_pauses: bool) -> Iterator[Any]:
        """Yield the items to the next stage: an async one, which says what has left, or another, which is done with an
        item when it asks for the next one."""
        if not gives_pauses:
            self._refuse_to_feed_coroutines()
            self.resume(())
        while True:
            self._report_if_due()
            if self._hand:
                self.given, _, value = self._hand.popleft()
                self._begun[self.given] = None
                if not gives_pauses:
                    self.giving_out(self.given)
                yield value
                if not gives_pauses:
                    self.left()
            elif self._no_more:
                return
            elif self._begun:
                yield PAUSE
            else:
                self._context.wait_for_event()

    def resume(self, ids: Collection[int | None]) -> Collection[int | None]:
        self._finished += [id_ for id_ in self._begun if id_ not in ids]
        self._begun = {id_: None for id_ in self._begun if id_ in ids}
        return self._begun

    def giving_out(self, id_: int) -> None:
        self._parent = _Parent(id_)

    def left(self) -> None:
        assert self._parent is not None
        del self._begun[self._parent.id]
        self._finished.append(self._parent.id)
        self._parent = None

    def add_found(self, found: list[Any]) -> None:
        for id_, priority, item in found:
            self._add(self._parent, id_, priority, item)

    def _refuse_to_feed_coroutines(self) -> None:
        """They would wait for each other: the loop for an item that a result adds, and the result for the loop."""
        parts = parts_here()
        if parts is not None and parts.feeds_coroutines:
            raise LocalProtocolError(
                f"a loop over the work queue {self._name!r} feeds an async stage through a plain function, which would "
                "hold back each result until it has the next item, although results may add items: put the queue "
                "itself before the async stage, chain(take=queue, work=concurrently(...)), and do in the coroutine "
                "what the function does"
            )

    # --- adding ---------------------------------------------------------------------------------------------------

    def add(self, items: Iterable[Any], key: Callable[[Any], Any] | None, priority: int) -> None:
        queue, effects = ADDS.get() or (self._name, None)
        if queue != self._name or (effects is None and (self._parent is None or runs_on_loop())):
            raise LocalProtocolError(
                "add() was called outside the loop over the queue: what a task adds belongs to the item that it is "
                "processing. Give the first items to work_queue(), or add inside `for item in queue:`, or in the "
                "stages after it in chain(take=queue, ...), down to the first async one"
            )
        if key is None and self._keyed:
            raise LocalProtocolError(
                f"the work queue {self._name!r} has a key, but the function is in the sidecar's process: pass it here "
                "too, add(items, key=...)"
            )
        for item in items:
            id_ = None if key is None else id_of_key(key(item))
            if effects is None:
                self._add(self._parent, id_, priority, item)
            else:
                encode_argument("an item", item)  # so that the caller hears of an item that cannot be sent
                effects.append(["add", [[id_, priority, item]]])

    def _add(self, parent: _Parent | None, id_: int | None, priority: int, item: Any) -> None:
        if parent is None:
            return  # in the result of an item of an earlier input, which a checkpoint held
        encoded = encode_argument("an item", item)
        self._found_bytes += len(encoded)
        self._found.append((self._id_of(parent, encoded) if id_ is None else id_, priority, item))
        if len(self._found) >= FOUND_MAX or self._found_bytes >= FOUND_BYTES_MAX:
            self._report(self._asked)

    def _id_of(self, parent: _Parent, encoded: bytes) -> int:
        first = id_of_child(parent.id, encoded, 0)
        number = parent.children[first]
        parent.children[first] += 1
        return id_of_child(parent.id, encoded, number) if number else first

    def _report(self, wanted: int, *, last: bool = False) -> None:
        self._report_at = self._clock() + REPORT_S
        finished, found, given_back = self._finished, self._found, self._given_back
        begun = len(self._begun) + len(self._in_loops) + (self._current is not None)
        self._asked = wanted
        self._context.send_event(
            Report(tuple(finished), tuple(found), tuple(given_back), wanted, last, begun).as_event()
        )
        if self._finished is finished:  # otherwise a checkpoint was taken while this waited for capacity, and has all
            self._finished, self._found, self._given_back, self._found_bytes = [], [], [], 0


KEY = Rule("a function of an item, such as `lambda item: item.url`", callable)
ITEMS = Rule("several items, such as a list with one", lambda items: True)


def _state_of(items: list[Item], begun: Iterable[int]) -> bytes:
    fields = {"items": [list(item) for item in items], "begun": list(begun)}
    return encode_state(_HAND, fields) if any(fields.values()) else b""


def _fields_of(state: bytes) -> tuple[list[Item], list[int]]:
    """The items in the hand, and the ids of those with the next stages."""
    if not state:
        return [], []
    fields = decode_state(_HAND, state, list)
    items = [cast("Item", tuple(item)) for item in (fields[OLD] if OLD in fields else fields["items"])]
    return items, fields.get("begun", [])


class _Posted:
    """Where a coroutine that loops over the queue appends what it adds; it happens on the task's own thread."""

    def __init__(self, part: WorkQueuePart, parent: _Parent) -> None:
        self._part = part
        self._parent = parent

    def append(self, effect: list[Any]) -> None:
        for found in effect[1]:
            self._part.task.post(partial(self._part._add, self._parent, *found))


class QueueItems(SubtaskOperator):
    """The stage that a work queue is in a chain: it yields the items of the task's part."""

    snapshot_anywhere = True
    goes_on_after_restore = True
    counts_records = False
    waits_for_subtask_ready = False

    def __init__(self, queue: WorkQueueInTask[Any]) -> None:
        self._queue = queue
        self._context: SubtaskContext

    def open(self, context: SubtaskContext, state: bytes | None) -> None:
        self._context = context
        self.items_from: WorkQueuePart = self._queue._part()

    def process(self, records: Iterator[Any]) -> Iterator[Any]:
        return self.items_from.given_to_stages(self._context._fed_has_results is not None)


class WorkQueueInTask(PartInTask, Generic[T]):
    """A ``WorkQueue`` in a task."""

    _kind = "work queue"
    _on_driver = ON_DRIVER | {"progress"}

    def __init__(self, name: str, key: Callable[[T], Any] | None = None) -> None:
        super().__init__(name)
        self._key = key

    def __iter__(self) -> Iterator[T]:
        """In a task: yield items until nothing is left anywhere. A checkpoint may be taken between two of them.

        If the loop is left early, others get the items that this task has not begun (in batch mode).

        Raises ``LocalProtocolError`` outside a function that ``handle.subtask`` runs in tasks; in a coroutine; and in a
        function that feeds an async stage of its chain, which gets its items from the queue directly.
        """
        refuse_on_loop("for item in queue", "async for item in queue")
        items: Iterator[T] = self._part().items()
        return items

    def __aiter__(self) -> AsyncIterator[T]:
        """``for item in queue`` for a coroutine that ``concurrently`` runs, in batch mode.

        Many coroutines may loop at the same time. An item is finished when its coroutine asks for the next one, leaves
        the loop, or is cancelled. A coroutine that fails fails its task, whatever ``retry`` and ``on_error`` say,
        because what it has made of its earlier items is lost with it. So try a call again inside of the loop.

        Raises ``LocalProtocolError`` in streaming mode, and outside of such a coroutine.
        """
        items: AsyncIterator[T] = self._part().items_on_loop()
        return items

    @checked(items=ITEMS, key=KEY, priority=INT64)
    def add(self, items: Iterable[T], *, key: Callable[[T], Any] | None = None, priority: int = 0) -> None:
        """In a task, inside the loop: add items that were found while working on the current one.

        Args:
            items: values that an event can carry.
            key: in place of the queue's ``key``, for these items.
            priority: items of a higher priority are handed out first; equal ones in the order of their arrival.

        Raises:
            LocalProtocolError: outside a function that ``handle.subtask`` runs in tasks, or outside the loop.
            EventEncodeError: an event cannot carry an item. Those before it are added.
            TypeError: ``items`` is a text, or no collection.
        """
        self._part().add(items, key or self._key, priority)
