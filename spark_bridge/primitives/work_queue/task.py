# SPDX-License-Identifier: Apache-2.0

"""The task's half of a work queue, and what user code sees of it there."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
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
from spark_bridge.subtask.parts import ON_DRIVER, PartInTask, TaskPart

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


class WorkQueuePart(TaskPart):
    """The items in this task's hand."""

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
        self._children: Counter[int] = Counter()  # of the current item, so far: by the id of the first of each value
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
            self._hand.extend(_items_of(state))

    def merge_states(self, states: dict[int, bytes]) -> bytes:
        return _state_of([item for state in states.values() for item in _items_of(state)])

    def snapshot_state(self, checkpoint_id: int) -> bytes:
        """What is finished or found leaves first, so the coordinator has it after the snapshot, in any case."""
        if self._finished or self._found or self._given_back:
            self._report(self._asked)
        held = [item for item in (self._current, *self._hand) if item is not None]
        return _state_of(held) if held else b""

    def final_state(self) -> bytes:
        """The function has returned: the current item is finished.

        The report names the others. In batch mode they go to other tasks. In streaming mode, where a checkpoint may
        hold them for this task, it keeps them for its next run of the same input.
        """
        self._finish_current()
        left = list(self._hand)
        self._given_back += [item[0] for item in left]
        if self._finished or self._found or self._given_back or self._asked:
            self._report(0, last=True)
        if self._context.mode is RestoreMode.BATCH:
            self._hand.clear()
            return b""
        return _state_of(left) if left else b""

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

    def _give_back(self, count: int) -> None:
        """Give back what was added last; a report answers even if there is nothing."""
        offered = [self._hand.pop() for _ in range(min(count, len(self._hand)))]
        self._offered |= {item[0]: item for item in offered}
        self._given_back += [item[0] for item in offered]
        self._report(self._asked)

    # --- for user code, on the task's thread ----------------------------------------------------------------------

    def items(self) -> Iterator[Any]:
        """Yield the items one after another; each is finished when the next one is asked for."""
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
        report = Report(tuple(self._finished), tuple(self._found), given_back, 0)
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
                self._current, self._children = self._hand.popleft(), Counter()
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
            self._current = None

    def add(self, items: Iterable[Any], key: Callable[[Any], Any] | None, priority: int) -> None:
        if self._current is None:
            raise LocalProtocolError(
                "add() was called outside the loop over the queue: what a task adds belongs to the item that it is "
                "processing. Give the first items to work_queue(), or add inside `for item in queue:`"
            )
        if key is None and self._keyed:
            raise LocalProtocolError(
                f"the work queue {self._name!r} has a key, but the function is in the sidecar's process: pass it here "
                "too, add(items, key=...)"
            )
        for item in items:
            encoded = encode_argument("an item", item)  # so that the caller hears of an item that cannot be sent
            id_ = self._id_of(self._current[0], encoded) if key is None else id_of_key(key(item))
            self._found_bytes += len(encoded)
            self._found.append((id_, priority, item))
            if len(self._found) >= FOUND_MAX or self._found_bytes >= FOUND_BYTES_MAX:
                self._report(self._asked)

    def _id_of(self, parent: int, encoded: bytes) -> int:
        first = id_of_child(parent, encoded, 0)
        number = self._children[first]
        self._children[first] += 1
        return id_of_child(parent, encoded, number) if number else first

    def _report(self, wanted: int, *, last: bool = False) -> None:
        self._report_at = self._clock() + REPORT_S
        report = Report(tuple(self._finished), tuple(self._found), tuple(self._given_back), wanted, last)
        self._finished, self._found, self._given_back, self._asked = [], [], [], wanted
        self._found_bytes = 0
        self._context.send_event(report.as_event())


KEY = Rule("a function of an item, such as `lambda item: item.url`", callable)
ITEMS = Rule("several items, such as a list with one", lambda items: True)


def _state_of(items: list[Item]) -> bytes:
    return encode_state(_HAND, {"items": [list(item) for item in items]})


def _items_of(state: bytes) -> list[Item]:
    if not state:
        return []
    fields = decode_state(_HAND, state, list)
    return [cast("Item", tuple(item)) for item in (fields[OLD] if OLD in fields else fields["items"])]


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

        Raises ``LocalProtocolError`` outside a function that ``handle.subtask`` runs in tasks.
        """
        items: Iterator[T] = self._part().items()
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
