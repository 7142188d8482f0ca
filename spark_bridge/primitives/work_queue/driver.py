# SPDX-License-Identifier: Apache-2.0

"""The driver's half of a work queue: a split enumerator whose readers find new splits.

``SourceCoordinator`` records which task has which items, gives back those of a lost attempt, finished ones too, because
the outputs of the attempt are lost with it, and gives concurrent attempts the same ones. The enumerator here knows what
is waiting, what is being worked on, and which ids were ever seen. The work is at an end when nothing waits and nothing
is being worked on anywhere.

An item that waits costs about 170 bytes beside its own: its id is the same object in the set of ids seen and in the
queue, and its value is kept encoded.

In streaming mode, an attempt restores the items that it had in hand at a checkpoint, works on them again, and may find
others than before. So what its subtask has finished since then is in work again after a reset to it (H153).

What tasks add is charged to an account, of which an error ends the operator (H157). An id stays. A value stays as long
as a failure may give it back: in batch mode for the whole action, in streaming mode until a checkpoint that began after
the item was finished is complete.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from struct import Struct, unpack_from
from struct import error as StructError
from typing import Any, TypeVar

from actors.coordination import OperatorCoordinator, SourceCoordinator, SplitEnumerator, SplitEnumeratorContext
from actors.coordination.user_calls import Begun, in_turns
from protocol.arguments import AT_LEAST_1, NAME, checked
from protocol.errors import LocalProtocolError
from protocol.kept_bytes import KeptBytes
from protocol.splits import SplitAssignmentTracker
from protocol.wire.codec import decode_event, encode_argument, encode_event
from protocol.wire.messages import RestoreMode
from protocol.wire.state import Steps, decode_state_in_steps, drain, encode_state_in_steps, in_chunks, is_state_of
from spark_bridge.primitives.primitive import Primitive, not_the_state_of
from spark_bridge.primitives.work_queue.messages import (
    ROOT,
    KeepItems,
    Report,
    ReturnItems,
    id_of_child,
    id_of_key,
    parse_item,
    parse_report,
)
from spark_bridge.primitives.work_queue.task import ITEMS, KEY, WorkQueueInTask, WorkQueuePart
from spark_bridge.subtask.operator import SubtaskOperator

T = TypeVar("T")

NOBODY = -1
"""The subtask of an item that was in work when a restored checkpoint was taken: it is in some task's own state."""
ASSIGN_MAX = 256
"""The items in one event to a task."""
QUEUE = "a work queue"
QUEUE_BYTES_MAX = 2**30
"""How much a queue keeps of what tasks add, by default."""
ENTRIES_A_STEP = 512
"""So many entries of a report are looked at in one step: other operators wait for several steps in each round trip."""
ITEM_BYTES = 400
"""What an item takes beside its value, at most, wherever it is."""
ID_BYTES = 100
"""What the id of a finished item takes."""
PRIORITY_BYTES = 1000
"""What a priority takes as long as an item of it waits."""
_ITEMS, _IDS, _PRIORITIES, _DONE = "items", "ids", "priorities", "done"
"""The owners in the account, beside the numbers of checkpoints: ``_DONE`` is finished, and in no checkpoint yet."""
_ITEM = Struct(">Qq")  # id and priority, before the value
_OLD_HEAD = Struct(">II")  # how many ids were seen, and how many are being worked on
_OLD_ENTRY = Struct(">QqI")  # id, priority, bytes of the value


class WorkQueue(WorkQueueInTask[T], Primitive):
    """Work for tasks to share out among themselves: each takes the next item when it is free, and may add new ones.

    ``sidecar.work_queue(name, roots)`` makes it, and ``coordinate(..., uses=[queue])`` gives it to an operator. In the
    function that the tasks run, ``for item in queue:`` yields items until nothing is left anywhere: not in the queue,
    and not in the hands of another task, which may still add some. An item is finished when the loop asks for the next
    one or the function returns. In coroutines it is ``async for item in queue:``. As the first stage of a chain, the
    queue feeds the next one: ``chain(take=queue, visit=concurrently(visit))``. There, an item is finished when its
    result has left.

    The outputs that belong to an item count once. If an attempt is lost, all its items go back to the queue, finished
    ones too, because Spark drops its outputs. If the function returns early, what is left of its items goes to other
    tasks. What it had added stays, and adding it a second time has no effect. Each action begins with the roots again.

    In streaming mode, the queue is part of the checkpoints. One may hold what a task has in hand, so a function that
    returns early keeps it, for the next run of its subtask with the same input. If others wait for it, the job fails.

    Args:
        name: the name of the part, at most 200 characters.
        roots: the first items. Like all items, they are values that an event can carry.
        key: a function of an item. Items with equal keys count as one, no matter which task adds them, or when. Keys
            are equal if they are encoded equally, types and the order of dicts included: 1, 1.0, ``True`` and
            ``np.int64(1)`` are four keys, and so are ``(1, 2)`` and ``[1, 2]`` two. Without it, all items differ.
        in_hand: how many items a task holds at a time, at least 1: the one that it works on, and those that wait for
            it, so that it never waits for the driver. What an async stage has in flight comes on top. When others have
            nothing to do, it gives back those that wait (in batch mode).
        bytes_max: how many bytes the driver keeps of the items that tasks add, with some 400 for each. If they would
            exceed it, the job fails. In batch mode, finished items count too, because a lost task may give them back.
            In streaming mode, 100 bytes stay of each that was in a complete checkpoint.

    Raises:
        ValueError: ``in_hand`` or ``bytes_max`` is too small, or the name is unsuitable.
        EventEncodeError: an event cannot carry one of the roots.
        TypeError: ``roots`` is a text, or no collection.
    """

    @checked(name=NAME, roots=ITEMS, key=KEY, in_hand=AT_LEAST_1, bytes_max=AT_LEAST_1)
    def __init__(
        self,
        name: str,
        roots: Iterable[T],
        *,
        key: Callable[[T], Any] | None = None,
        in_hand: int = 1,
        bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        WorkQueueInTask.__init__(self, name, key)
        Primitive.__init__(self, name)
        self._in_hand = in_hand
        self._bytes_max = bytes_max
        encoded = [(root, encode_argument("a root", root)) for root in roots]
        self._roots = [
            (id_of_child(ROOT, value, number) if key is None else id_of_key(key(root)), value)
            for number, (root, value) in enumerate(encoded)
        ]
        self._latest: _Enumerator | None = None

    def __reduce__(self) -> Any:
        return WorkQueueInTask, (self._name, self._key)

    @property
    def progress(self) -> tuple[int, int]:
        """How many items are finished, and how many are known, in the latest action. For any thread."""
        latest = self._latest
        return (0, len(self._roots)) if latest is None else latest.progress

    def coordinator(self, operator_id: str) -> OperatorCoordinator:
        return SourceCoordinator(self._enumerator)

    def task_part(self) -> Callable[[], SubtaskOperator]:
        return partial(WorkQueuePart, self._name, self._in_hand, self._key is not None)

    def _enumerator(self, state: bytes | None) -> SplitEnumerator:
        try:
            self._latest = _Enumerator(self._roots, state, self._in_hand, self._account())
        except (StructError, LocalProtocolError) as error:
            raise not_the_state_of(QUEUE, self._name) from error
        return self._latest

    def _account(self) -> KeptBytes:
        return KeptBytes(
            self._bytes_max,
            f"what tasks have added to the work queue {self._name!r}",
            "add smaller items, such as references, or fewer, or raise bytes_max of the queue",
        )


class _Enumerator(SplitEnumerator):
    """What waits, what is being worked on, and which ids were ever seen."""

    def __init__(
        self, roots: Iterable[tuple[int, bytes]], state: bytes | None, in_hand: int, account: KeptBytes
    ) -> None:
        self._in_hand = in_hand
        self._account = account
        self._sizes: dict[int, int] = {}  # of what is being worked on, in streaming mode
        self._waiting: dict[int, deque[tuple[int, bytes]]] = {}  # by priority
        self._priorities: list[int] = []  # that have something, the highest last
        self._waiting_count = 0
        self._in_work: dict[int, int] = {}  # id to subtask
        self._held: dict[int, int] = {}  # how many of these each subtask has
        self._working: dict[int, int] = {}  # on how many each says that it works
        # In streaming mode, what each subtask has finished, with its size: a reset returns it.
        self._finished: SplitAssignmentTracker[tuple[int, int]] = SplitAssignmentTracker()
        self._seen: set[int] = set()
        self._wanting: dict[int, int] = {}  # subtask to how many, in the order of asking
        self._returning: set[int] = set()  # subtasks that were asked to give back and have not answered
        self._undone: dict[int, dict[int, set[int]]] = {}  # of a subtask with copies: what each attempt has not done
        self._superseded: dict[int, set[int]] = {}  # copies of an attempt that counts
        self._is_over = False  # nothing is left, and the tasks were told so
        self._too_late: set[tuple[int, int]] = set()  # attempts with copies that have found something after that
        self._returned: dict[int, set[int]] = {}  # attempts whose function has returned, and that may still fail
        self._kept: dict[int, set[int]] = {}  # what such a subtask keeps in its state, in streaming mode
        self._context: SplitEnumeratorContext
        self._begun = Begun(self._begin(roots) if state is None else self._restore(state, roots))

    def _begin(self, roots: Iterable[tuple[int, bytes]]) -> Steps[None]:
        for chunk in in_chunks(roots):
            for root in chunk:  # the same objects in each action
                if root[0] not in self._seen:
                    self._seen.add(root[0])
                    self._put(root, 0)
                    self._account.keep_beside(_ITEMS, len(root[1]) + ITEM_BYTES)
            yield

    @property
    def known(self) -> int:
        return len(self._seen)

    @property
    def finished(self) -> int:
        return len(self._seen) - self._waiting_count - len(self._in_work)

    @property
    def progress(self) -> tuple[int, int]:
        """How many items are finished, and how many are known."""
        return self.finished, self.known

    async def start(self, context: SplitEnumeratorContext) -> None:
        self._context = context
        await self._begun.finish()

    async def handle_split_request(self, subtask: int) -> None:
        raise RuntimeError("a work queue takes no requests for splits: its tasks send reports")

    async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
        report = parse_report(event)
        if attempt in self._superseded.get(subtask, ()):
            return  # another attempt counts, and nothing that this one has done
        self._note_copies(subtask, self._context.attempts(subtask))
        known = len(self._seen)
        await in_turns(self._take_report(subtask, attempt, report))
        if self._is_over and len(self._seen) > known:
            self._too_late.add((subtask, attempt))
        if self._context.coordinator.handles_restored:
            await self._hand_out()
            return  # the attempt of before wanted something, or had returned; this one asks itself
        self._working[subtask] = report.begun
        if report.last:
            self._returned.setdefault(subtask, set()).add(attempt)
        await self._take_back(subtask, report)
        if report.wanted > 0:
            self._wanting[subtask] = min(report.wanted, self._in_hand)
        elif not report.last or subtask not in self._undone:
            self._wanting.pop(subtask, None)
        await self._hand_out()

    def _take_report(self, subtask: int, attempt: int, report: Report) -> Steps[None]:
        """In steps: a hostile task can send as many ids and items as fit into an event."""
        undone = self._undone.get(subtask, {}).get(attempt, set())
        for ids in in_chunks(report.finished, ENTRIES_A_STEP):
            for id_ in ids:
                undone.discard(id_)
                if self._in_work.get(id_) in (subtask, NOBODY):
                    size = self._end_work(id_)
                    self._account.move(_ITEMS, _DONE, size)
                    if not self._is_batch:
                        self._finished.record(subtask, [(id_, size)])
            yield
        for items in in_chunks(report.found, ENTRIES_A_STEP):
            for id_, priority, value in map(parse_item, items):
                if id_ not in self._seen:
                    encoded = encode_event(value)
                    self._account.charge(_ITEMS, len(encoded) + ITEM_BYTES)
                    if priority not in self._waiting:
                        self._account.charge(_PRIORITIES, PRIORITY_BYTES)
                    self._seen.add(id_)
                    self._put((id_, encoded), priority)
            yield

    @property
    def _is_batch(self) -> bool:
        """In streaming mode, a task keeps its items for its next run of this input, and checkpoints have them."""
        return self._context.coordinator.mode is RestoreMode.BATCH

    def _note_copies(self, subtask: int, attempts: list[int]) -> None:
        """Begin to record what each of several attempts has done: only one of them will count.

        In batch mode: in streaming mode a subtask has one attempt at a time (H13).
        """
        if len(attempts) < 2 and subtask not in self._undone:
            return
        known = self._undone.setdefault(subtask, {})
        first = not known
        for attempt in attempts:
            if attempt in known:
                continue
            if first:  # until now, nobody else has reported what this subtask has done
                known[attempt] = {id_ for id_, worker in self._in_work.items() if worker == subtask}
                first = False
            else:  # it gets everything, from the beginning
                known[attempt] = {split[0] for split in self._context.assigned_splits(subtask)}

    async def _take_back(self, subtask: int, report: Report) -> None:
        self._returning.discard(subtask)
        if not report.given_back:
            return
        if report.last and not self._is_batch:
            self._keep(subtask, report.given_back)
            return
        if len(self._context.attempts(subtask)) > 1:  # the other one may have begun them
            if not report.last:  # of an attempt that returns: nothing, until it is known which attempt counts
                await self._context.send_event(subtask, KeepItems(report.given_back).as_event())
            return
        ids = self._in_work.keys() & set(report.given_back)
        ids = {id_ for id_ in ids if self._in_work[id_] == subtask}
        if ids:
            self._put_back(subtask, ids)

    def _keep(self, subtask: int, ids: Iterable[int]) -> None:
        """The subtask keeps them in its state, those that it has restored too: from now on, they are known as its."""
        kept = self._kept.setdefault(subtask, set())
        for id_ in ids:
            worker = self._in_work.get(id_)
            if worker == NOBODY:
                del self._in_work[id_]
                self._work_again(subtask, [id_])
            if worker in (subtask, NOBODY):
                kept.add(id_)

    def _put_back(self, subtask: int, ids: set[int]) -> None:
        """Take items away from a subtask, so that they come next."""
        for id_, priority, value in self._context.take_back_splits(subtask, len(ids), lambda split: split[0] in ids):
            self._end_work(id_)
            self._put((id_, encode_event(value)), priority, first=True)
        for undone in self._undone.get(subtask, {}).values():
            undone.difference_update(ids)

    async def attempt_ended(self, subtask: int, attempt: int, succeeded: bool) -> None:
        """If the function of an attempt that counts has returned early, what it has not done goes to others.

        In streaming mode, without what it keeps in its state.
        """
        if not succeeded and subtask in self._superseded:  # another attempt counts, and what this one has done does not
            self._superseded[subtask].discard(attempt)
            self._returned.get(subtask, set()).discard(attempt)
            return
        copies = self._context.attempts(subtask)
        self._note_copies(subtask, sorted((*copies, attempt)))
        if succeeded or not copies:
            self._wanting.pop(subtask, None)
            self._working.pop(subtask, None)
        undone = self._undone.get(subtask, {}).pop(attempt, None)
        if succeeded:
            self._superseded[subtask] = set(copies)
            self._put_back_of_returned(subtask, attempt, undone)
        else:
            self._returned.get(subtask, set()).discard(attempt)
            copies_undone = list(self._undone.get(subtask, {}).values())
            if copies_undone:  # what only this attempt had done is in work again
                self._work_again(subtask, copies_undone[0].intersection(*copies_undone[1:]))
        await self._hand_out()

    def _put_back_of_returned(self, subtask: int, attempt: int, undone: set[int] | None) -> None:
        """The function of an attempt that counts has returned. ``undone`` is None if it had no copies."""
        in_work = {id_ for id_, worker in self._in_work.items() if worker == subtask}
        if not self._is_batch:  # what came too late for its function is in no state
            self._put_back(subtask, in_work - self._kept.get(subtask, set()))
            return
        self._undone.pop(subtask, None)
        if (subtask, attempt) in self._too_late and self._waiting_count:
            self._context.coordinator.fail_job(
                f"subtask {subtask} has added items to a work queue after a copy of it had done the same items "
                "without adding these, and the work had ended: let an item add the same ones each time, or run it "
                "without spark.speculation"
            )
        self._put_back_undone(subtask, in_work if undone is None else undone)

    def _work_again(self, subtask: int, ids: Iterable[int]) -> None:
        for id_ in ids:
            if id_ not in self._in_work:
                self._in_work[id_] = subtask
                self._held[subtask] = self._held.get(subtask, 0) + 1

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        finished = self._finished.get_and_remove(subtask, checkpoint_id)
        self._work_again(subtask, (id_ for id_, _ in finished))
        self._sizes.update(finished)
        size = sum(size for _, size in finished)
        for owner in self._account.owners():  # what is in work again is not done
            if owner == _DONE or (isinstance(owner, int) and owner > checkpoint_id):
                moved = self._account.release(owner, size)
                self._account.keep(_ITEMS, moved)
                size -= moved

    def _put_back_undone(self, subtask: int, undone: set[int]) -> None:
        if undone and self._is_over:
            self._context.coordinator.fail_job(
                f"a function that takes items from a work queue returned in subtask {subtask} before it had done "
                f"{len(undone)} of its items, after a copy of it had done them and the work had ended: let it take "
                "items until the queue has no more, or run it without spark.speculation"
            )
        elif undone:
            self._put_back(subtask, undone)

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        self._is_over = False
        self._too_late.clear()  # the next attempt can take it
        self._wanting.pop(subtask, None)
        self._returning.discard(subtask)
        for known in (self._undone, self._returned, self._superseded, self._kept, self._working):
            known.pop(subtask, None)
        await in_turns(self._put_back_in_steps(splits))
        await self._hand_out()

    def _put_back_in_steps(self, splits: list[Any]) -> Steps[None]:
        for chunk in in_chunks(reversed(splits)):
            for id_, priority, value in chunk:
                self._end_work(id_)
                self._put((id_, encode_event(value)), priority, first=True)
            yield

    # --- handing out ----------------------------------------------------------------------------------------------

    def _put(self, item: tuple[int, bytes], priority: int, *, first: bool = False) -> None:
        queue = self._waiting.get(priority)
        if queue is None:
            queue = self._waiting[priority] = deque()
            insort(self._priorities, priority)
        if first:
            queue.appendleft(item)
        else:
            queue.append(item)
        self._waiting_count += 1

    def _end_work(self, id_: int) -> int:
        """Nobody works on it any more. Return its size in streaming mode."""
        worker = self._in_work.pop(id_, None)
        if worker in self._held:
            self._held[worker] -= 1
        return self._sizes.pop(id_, 0)

    def _take(self, count: int) -> list[list[Any]]:
        taken: list[list[Any]] = []
        while len(taken) < count and self._waiting_count:
            priority = self._priorities[-1]
            queue = self._waiting[priority]
            id_, value = queue.popleft()
            taken.append([id_, priority, decode_event(value)])
            if not self._is_batch:
                self._sizes[id_] = len(value) + ITEM_BYTES - ID_BYTES
            self._waiting_count -= 1
            if not queue:
                del self._waiting[priority]
                self._priorities.pop()
                self._account.release(_PRIORITIES, PRIORITY_BYTES)
        return taken

    async def _hand_out(self) -> None:
        """Give to those who want, in the order in which they asked, and never more than their share."""
        kept: dict[int, int] = {}
        while self._waiting_count and self._wanting:
            subtask, wanted = next(iter(self._wanting.items()))
            del self._wanting[subtask]
            if self._returned.get(subtask):  # a copy of this attempt has returned: if that counts, this one does not
                kept[subtask] = wanted
                continue
            share = max(1, self._waiting_count // max(1, 2 * len(self._context.registered_readers())))
            items = self._take(min(wanted, share, ASSIGN_MAX))
            for item in items:
                self._in_work[item[0]] = subtask
            self._held[subtask] = self._held.get(subtask, 0) + len(items)
            for undone in self._undone.get(subtask, {}).values():
                undone.update(item[0] for item in items)
            if wanted > len(items):
                self._wanting[subtask] = wanted - len(items)
            await self._context.assign_splits(subtask, items)
        self._wanting |= kept
        if self._waiting_count or self._is_unsettled:
            return
        if not self._in_work:
            self._is_over = True
            for subtask in self._context.registered_readers():
                if not self._context.has_no_more_splits(subtask):
                    await self._context.signal_no_more_splits(subtask)
            self._wanting.clear()
        elif self._is_batch:
            await self._ask_for_return()
        elif self._wanting:
            await self._check_somebody_works()

    async def _check_somebody_works(self) -> None:
        """Fail the job if tasks wait for items that only functions which have returned had in hand (H100).

        A checkpoint may hold these for their subtasks, so nobody else may have them. The same holds for what a restored
        checkpoint has for subtasks without a partition in this run.
        """
        left = {subtask: count for subtask in self._superseded if (count := self._held.get(subtask))}
        if sum(left.values()) == len(self._in_work):
            subtask, count = next(iter(left.items()))
            self._context.coordinator.fail_job(
                f"a function that takes items from a work queue returned in subtask {subtask} before it had done "
                f"{count} of the items in its hand. In streaming mode, a checkpoint may hold them for this subtask, so "
                "the other tasks cannot have them, and would wait for them without end: let the function take items "
                "until the queue has no more, or give the queue in_hand=1"
            )
        elif missing := len(self._in_work) - sum(self._held.values()):
            look = await self._context.coordinator.look_at_run()
            if look.partition_count and not any(map(self._may_work, range(look.partition_count))):
                self._context.coordinator.fail_job(
                    f"a checkpoint holds {missing} items of a work queue for subtasks that have no partition in this "
                    "run, so the other tasks cannot have them, and would wait for them without end: run this input in "
                    "as many partitions as before"
                )

    def _may_work(self, subtask: int) -> bool:
        """Whether it may have an item, in streaming mode: it has not returned, and works on one, or may get one."""
        works = self._working.get(subtask) or self._wanting.get(subtask) != self._in_hand
        return subtask not in self._superseded and bool(works)

    @property
    def _is_unsettled(self) -> bool:
        """Whether an attempt has returned that may count, although a copy of it has done more."""
        return any(
            self._undone[subtask].get(attempt)
            for subtask, attempts in self._returned.items()
            if subtask in self._undone
            for attempt in attempts
        )

    async def _ask_for_return(self) -> None:
        """Some task has nothing to do: let the one with most items give back half of those that it has not begun.

        Not in streaming mode, where a checkpoint may hold them for that task. Not from concurrent attempts, one of
        which may have begun what the other has not.
        """
        idle = [subtask for subtask in self._wanting if not self._held.get(subtask)]
        rich = [
            (waiting, subtask)
            for subtask, count in self._held.items()
            if (waiting := count - max(1, self._working.get(subtask, 0))) > 0
            and subtask not in self._returning
            and len(self._context.attempts(subtask)) == 1
        ]
        if idle and rich:
            waiting, subtask = max(rich)
            self._returning.add(subtask)
            await self._context.send_event(subtask, ReturnItems((waiting + 1) // 2).as_event())

    # --- state ----------------------------------------------------------------------------------------------------

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._finished.on_checkpoint_complete(checkpoint_id)
        for owner in self._account.owners():
            if isinstance(owner, int) and owner <= checkpoint_id:
                self._account.release(owner)

    async def snapshot_state(self, checkpoint_id: int) -> bytes:
        if not self._is_batch:
            self._account.move(_DONE, checkpoint_id)
            self._finished.on_checkpoint(checkpoint_id)
        waiting = self._waiting.items()
        fields = {  # without a copy: the enumerator takes no other call until they are encoded
            "seen": iter(self._seen),
            "in work": iter(self._in_work),
            "waiting": (_ITEM.pack(id_, priority) + value for priority, queue in waiting for id_, value in queue),
        }
        return await in_turns(encode_state_in_steps(QUEUE, fields))

    def _restore(self, state: bytes, roots: Iterable[tuple[int, bytes]]) -> Steps[None]:
        """What tasks have added counts as before (H157): otherwise each restart would allow as much again."""
        own: set[int] = set()
        for some in in_chunks(roots):
            own.update(id_ for id_, _ in some)
            yield
        if not is_state_of(QUEUE, state):
            self._restore_old(state)
            fields: dict[str, Any] = {"seen": list(self._seen), "in work": self._in_work, "waiting": []}
        else:
            fields = yield from decode_state_in_steps(QUEUE, state)
        same: dict[int, int] = {}  # one object for each id
        for chunk in drain(fields["seen"]):
            self._seen.update(chunk)
            same.update(zip(chunk, chunk, strict=True))
            ours = len(own.intersection(chunk))
            self._account.keep_beside(_IDS, ID_BYTES * ours)
            self._account.keep(_IDS, ID_BYTES * (len(chunk) - ours))
            yield
        self._in_work = dict.fromkeys(fields["in work"], NOBODY)
        for chunk in drain(fields["waiting"]):
            for item in chunk:
                id_, priority = _ITEM.unpack_from(item)
                self._put((same.get(id_, id_), item[_ITEM.size :]), priority)
            yield
        for priority, queue in self._waiting.items():
            self._account.keep(_PRIORITIES, PRIORITY_BYTES if priority else 0)
            for items in in_chunks(queue):
                for id_, value in items:
                    keep = self._account.keep_beside if id_ in own else self._account.keep
                    keep(_ITEMS, len(value) + ITEM_BYTES - ID_BYTES)
                yield

    def _restore_old(self, state: bytes) -> None:
        """A state of before: the ids in one piece, then the items that wait, each with its length."""
        seen, in_work = _OLD_HEAD.unpack_from(state)
        ids = unpack_from(f">{seen + in_work}Q", state, _OLD_HEAD.size)
        self._seen.update(ids[:seen])
        self._in_work = dict.fromkeys(ids[seen:], NOBODY)
        at = _OLD_HEAD.size + 8 * len(ids)
        while at < len(state):
            id_, priority, size = _OLD_ENTRY.unpack_from(state, at)
            at += _OLD_ENTRY.size
            self._put((id_, state[at : at + size]), priority)
            at += size
        if at > len(state):
            raise StructError("the last item is not complete")
