# SPDX-License-Identifier: Apache-2.0

"""Ready split enumerators: one that finds splits while tasks read, and several sources one after the other."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from anyio.to_thread import run_sync

from actors.coordination.source import SplitEnumerator, SplitEnumeratorContext
from protocol.source_events import SplitAt, split_from_value, split_to_value
from protocol.wire.codec import decode_event, encode_event

__all__ = ["BoundedLogEnumerator", "DiscoveringSplitEnumerator", "HybridSplitEnumerator", "OwnedSplitEnumerator"]

FAILURES_MAX = 5


class DiscoveringSplitEnumerator(SplitEnumerator):
    """Hands out the splits that a function finds, and looks for new ones while tasks read.

    A reader that asks while there is none waits until one is found or given back. A split is found once, however often
    the function returns it: its key stays in the state, so the state grows with the number of splits. In streaming mode
    this holds over runs: a later run gets what is new.

    Args:
        discover: returns all splits that exist now, in the order in which they are to be read. It is called on a worker
            thread, at the start and then every ``every_s`` seconds. If it raises at the start, the coordinator does not
            start; later, an error is logged, and the fifth in a row fails the job.
        state: what an earlier instance returned from ``snapshot_state``, or None at the beginning.
        every_s: the seconds between two looks. None looks only once for each input, at the beginning, and readers are
            told that no more splits follow when all are assigned.
        key: what a split is recognised by, a str. By default the split itself, which then has to be a str.
        batch_size: how many splits one request gets.
        backlog: ``backlog(split, position)`` returns how much there is to read in a split, in the units of the readers'
            method of this name, when it is found or given back. It has to be quick. By default, splits that wait do not
            count in the source's backlog.
    """

    continues_with_other_input = True

    def __init__(
        self,
        discover: Callable[[], Iterable[Any]],
        state: bytes | None = None,
        *,
        every_s: float | None = None,
        key: Callable[[Any], str] = lambda split: split,
        batch_size: int = 1,
        backlog: Callable[[Any, Any], int] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if every_s is not None and every_s <= 0:
            raise ValueError(f"every_s must be positive, or None to look once, not {every_s}")
        self._discover = discover
        self._every_s = every_s
        self._key = key
        self._batch_size = batch_size
        self._backlog = backlog
        restored = {"pending": [], "known": []} if state is None else decode_event(state)
        self._is_restored = state is not None
        self._pending: deque[_Pending] = deque()
        self._pending_backlog = 0
        self._put_back(map(split_from_value, restored["pending"]))
        self._known: dict[str, None] = dict.fromkeys(restored["known"])
        self._waiting: dict[int, None] = {}
        self._failures = 0
        self._context: SplitEnumeratorContext

    @property
    def pending_count(self) -> int:
        """How many splits are known and not assigned."""
        return len(self._pending)

    @property
    def pending_backlog(self) -> int | None:
        """How much there is to read in these splits; None if ``backlog`` was not given."""
        return None if self._backlog is None else self._pending_backlog

    def _counted(self, split: Any) -> _Pending:
        """Count it in the backlog. What it counts is kept, so that the sum is right if the split grows meanwhile."""
        amount = 0
        if self._backlog is not None:
            at = split if isinstance(split, SplitAt) else SplitAt(split, None)
            amount = self._backlog(at.split, at.position)
        self._pending_backlog += amount
        return _Pending(split, amount)

    def _put_back(self, splits: Iterable[Any]) -> None:
        """Let these be the next splits."""
        self._pending.extendleft(reversed([self._counted(split) for split in splits]))

    def _take(self, chosen: Iterable[_Pending]) -> list[Any]:
        """Return the splits of some pending ones, which are handed out."""
        taken = list(chosen)
        self._pending_backlog -= sum(one.amount for one in taken)
        return [one.split for one in taken]

    async def start(self, context: SplitEnumeratorContext) -> None:
        self._context = context
        if self._every_s is not None or not self._is_restored or not context.coordinator.input_begins_again:
            self._add(await run_sync(lambda: list(self._discover())))
        self._look_again()

    def _look_again(self) -> None:
        if self._every_s is not None:
            self._context.coordinator.call_later(self._every_s, self._look)

    async def _look(self) -> None:
        self._context.coordinator.call_async(lambda: list(self._discover()), handler=self._looked)

    async def _looked(self, found: list[Any] | None, error: Exception | None) -> None:
        if error is not None:
            self._failures += 1
            if self._failures >= FAILURES_MAX:
                raise error
            self._context.coordinator.log.warning("split discovery failed", error=repr(error), failures=self._failures)
        else:
            self._failures = 0
            self._add(found or [])
            await self._serve()
        self._look_again()

    def _add(self, found: Iterable[Any]) -> None:
        for split in found:
            key = self._key(split.split if isinstance(split, SplitAt) else split)
            if key not in self._known:
                self._known[key] = None
                self._pending.append(self._counted(split))

    async def handle_split_request(self, subtask: int) -> None:
        self._waiting[subtask] = None
        await self._serve()

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        self._waiting.pop(subtask, None)
        self._put_back(splits)
        await self._serve()

    async def _serve(self) -> None:
        for subtask in tuple(self._waiting):
            if not self._context.attempts(subtask):
                del self._waiting[subtask]  # its next attempt asks itself
            elif self._pending:
                del self._waiting[subtask]
                next_ones = [self._pending.popleft() for _ in range(min(self._batch_size, len(self._pending)))]
                await self._context.assign_splits(subtask, self._take(next_ones))
            elif self._every_s is None:
                del self._waiting[subtask]
                await self._context.signal_no_more_splits(subtask)

    async def snapshot_state(self, checkpoint_id: int) -> bytes:
        return encode_event({"pending": [split_to_value(one.split) for one in self._pending], "known": [*self._known]})


class BoundedLogEnumerator(DiscoveringSplitEnumerator):
    """Hands out logs up to where each ended when it was looked at. A run with other input gets what has come since.

    Args:
        end: where a split ends, a str or an int.
        is_later: whether the first of two ends comes after the second one.
        others: as for ``DiscoveringSplitEnumerator``. ``key`` names the log of a split.
    """

    def __init__(
        self,
        discover: Callable[[], Iterable[Any]],
        state: bytes | None = None,
        *,
        key: Callable[[Any], str],
        end: Callable[[Any], Any],
        is_later: Callable[[Any, Any], bool],
        **others: Any,
    ) -> None:
        super().__init__(discover, state, key=key, **others)
        self._end = end
        self._is_later = is_later

    def _add(self, found: Iterable[Any]) -> None:
        ended = {name: (end, known) for known in self._known for name, end in [_log_end(known)]}
        for split in found:
            at = split if isinstance(split, SplitAt) else SplitAt(split, None)
            name, end = self._key(at.split), self._end(at.split)
            before, known = ended.get(name, (None, ""))
            if before is not None and not self._is_later(end, before):
                continue
            self._known.pop(known, None)
            self._known[json.dumps([name, end])] = None
            self._pending.append(self._counted(split if before is None else SplitAt(at.split, before)))


def _log_end(key: str) -> tuple[str, Any]:
    """The name of a log, and the end up to which it was handed out; None if an earlier release wrote the key."""
    if key.startswith("["):
        with suppress(ValueError):
            name, end = json.loads(key)
            return name, end
    return key, None


class OwnedSplitEnumerator(DiscoveringSplitEnumerator):
    """Hands out splits that never end: each to the subtask that it belongs to, and no other.

    Otherwise the subtask that asks first would get them all, and keep them. A subtask gets all of its splits together,
    so its reader has to read any number of them in turns. Readers are never told that no more splits follow.

    Args:
        place: a number for each split. It belongs to the subtask ``place(split) % parallelism``.
        others: as for ``DiscoveringSplitEnumerator``.
    """

    def __init__(
        self,
        discover: Callable[[], Iterable[Any]],
        state: bytes | None = None,
        *,
        place: Callable[[Any], int],
        **others: Any,
    ) -> None:
        super().__init__(discover, state, **others)
        self._place = place

    async def _serve(self) -> None:
        for subtask in tuple(self._waiting):
            if not self._context.attempts(subtask):
                del self._waiting[subtask]  # its next attempt asks itself
                continue
            owned = [one for one in self._pending if self._owner(one) == subtask]
            if owned:
                del self._waiting[subtask]
                self._pending = deque(one for one in self._pending if self._owner(one) != subtask)
                await self._context.assign_splits(subtask, self._take(owned))

    def _owner(self, pending: _Pending) -> int:
        split = pending.split.split if isinstance(pending.split, SplitAt) else pending.split
        return self._place(split) % self._context.parallelism


@dataclass(frozen=True, slots=True)
class _Pending:
    """A split that waits, and what it counts in the backlog."""

    split: Any
    amount: int


class HybridSplitEnumerator(SplitEnumerator):
    """Several sources, one after the other: first the files, for example, then the live stream.

    A source begins when everything of the one before it has been read. Its enumerator is then built from the enumerator
    before it, which knows where that has ended. So nothing is read twice, and nothing is left out. Splits that are
    given back later are read before anything else is given to the subtask that asks.

    A split reaches the reader as ``[index, split]``, where ``index`` counts the sources from 0, and events in both
    directions are ``[index, event]``. A reader asks for more only when it has read what it has, except for splits of
    the last source.

    Args:
        sources: what builds each enumerator: ``build(state, previous)``. ``state`` is what its ``snapshot_state``
            returned, or None at the beginning; ``previous`` is the enumerator before it, or None for the first.
        state: what an earlier instance returned from ``snapshot_state``, or None at the beginning.
    """

    def __init__(
        self,
        sources: Sequence[Callable[[bytes | None, SplitEnumerator | None], SplitEnumerator]],
        state: bytes | None = None,
    ) -> None:
        if not sources:
            raise ValueError("a hybrid source needs at least one source")
        self._sources = tuple(sources)
        self._restored: list[bytes | None] = [None] if state is None else list(decode_event(state))
        if len(self._restored) > len(self._sources):
            raise ValueError(f"the state is that of {len(self._restored)} sources, but there are {len(self._sources)}")
        self._begun: list[SplitEnumerator] = []
        self._ended: list[set[int]] = []  # for each begun source, the subtasks that have read all of it
        self._parts: list[_PartOfHybrid] = []
        self._unread: set[int] = set()  # subtasks that may still have something to read
        self._waiting: set[int] = set()  # those that wait for the next source
        self._readers: list[int] = []
        self._is_restored = state is not None
        self._context: SplitEnumeratorContext

    @property
    def continues_with_other_input(self) -> bool:  # type: ignore[override]  # its sources say it
        """See ``SplitEnumerator``: whether that is so for each source that has begun."""
        previous: SplitEnumerator | None = None
        for build, state in zip(self._sources, self._restored, strict=False):
            previous = build(state, previous)
            if not previous.continues_with_other_input:
                return False
        return True

    @property
    def current(self) -> int:
        """The index of the source that is being read."""
        return len(self._begun) - 1

    @property
    def pending_backlog(self) -> int | None:
        """How much there is to read in the splits of the sources that have begun; None if none of them says it."""
        amounts = [getattr(one, "pending_backlog", None) for one in tuple(self._begun)]
        known = [amount for amount in amounts if amount is not None]
        return sum(known) if known else None

    async def start(self, context: SplitEnumeratorContext) -> None:
        self._context = context
        if self._is_restored:
            self._unread.update(range(context.parallelism))  # a checkpoint may hold splits for any of them
        for state in self._restored:
            await self._begin(state)

    async def _begin(self, state: bytes | None) -> None:
        index = len(self._begun)
        enumerator = self._sources[index](state, self._begun[-1] if self._begun else None)
        part = _PartOfHybrid(self, self._context, index)
        self._begun.append(enumerator)
        self._ended.append(set())
        self._parts.append(part)
        await enumerator.start(part)
        for subtask in self._readers:
            await enumerator.add_reader(subtask)

    async def add_reader(self, subtask: int) -> None:
        self._readers.append(subtask)
        for enumerator in tuple(self._begun):
            await enumerator.add_reader(subtask)

    async def handle_split_request(self, subtask: int) -> None:
        self._unread.discard(subtask)
        await self._ask(subtask, 0)  # splits of an earlier source may have been given back

    async def _ask(self, subtask: int, index: int) -> None:
        self._waiting.discard(subtask)
        self._ended[index].discard(subtask)
        await self._begun[index].handle_split_request(subtask)

    def assigned(self, subtask: int) -> None:
        """The subtask is about to get splits."""
        self._unread.add(subtask)

    async def part_ended(self, subtask: int, index: int) -> None:
        """The source ``index`` has no more for the subtask."""
        self._ended[index].add(subtask)
        if index + 1 < len(self._begun):
            await self._ask(subtask, index + 1)
        elif index + 1 == len(self._sources):
            await self._context.signal_no_more_splits(subtask)
        else:
            self._waiting.add(subtask)
            await self._hand_over_if_read()

    def has_ended(self, subtask: int, index: int) -> bool:
        """Whether the source ``index`` has said that it has no more for the subtask."""
        return subtask in self._ended[index]

    def _is_exhausted(self, index: int) -> bool:
        """Whether the source has nothing more for anybody. One that does not count its splits has to tell each."""
        pending = getattr(self._begun[index], "pending_count", None)
        if pending is not None:
            return bool(pending == 0)
        return self._ended[index].issuperset(self._context.registered_readers())

    async def _hand_over_if_read(self) -> None:
        """Begin the next source for those that wait for it, if nobody has anything left of the current one."""
        if not self._waiting or self._unread or not self._is_exhausted(self.current):
            return
        await self._begin(None)
        for subtask in sorted(self._waiting):
            await self._ask(subtask, self.current)

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        self._readers = [reader for reader in self._readers if reader != subtask]
        self._waiting.discard(subtask)
        self._unread.add(subtask)  # what its checkpoint holds, until it asks again
        for index, enumerator in enumerate(self._begun):
            self._ended[index].discard(subtask)
            await enumerator.add_splits_back(
                [inner for part, inner in map(_untagged, splits) if part == index], subtask
            )
        if splits:
            for waiting in sorted(self._waiting):
                await self._ask(waiting, 0)

    async def attempt_ended(self, subtask: int, attempt: int, succeeded: bool) -> None:
        for enumerator in tuple(self._begun):  # one that begins meanwhile has never known the attempt
            await enumerator.attempt_ended(subtask, attempt, succeeded)
        if succeeded:  # if it has returned early, nobody reads what it has left
            self._unread.discard(subtask)
            self._waiting.discard(subtask)
            await self._hand_over_if_read()

    async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
        index, inner = event
        if index >= len(self._begun):
            raise ValueError(f"subtask {subtask} sent {inner!r} to source {index}, which has not begun: send it later")
        await self._begun[index].handle_source_event(subtask, attempt, inner)

    async def snapshot_state(self, checkpoint_id: int) -> bytes:
        return encode_event([await enumerator.snapshot_state(checkpoint_id) for enumerator in self._begun])

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        await self._each(lambda enumerator: enumerator.notify_checkpoint_complete(checkpoint_id))

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        await self._each(lambda enumerator: enumerator.notify_checkpoint_aborted(checkpoint_id))

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        await self._each(lambda enumerator: enumerator.notify_checkpoint_discarded(checkpoint_id))

    async def close(self) -> None:
        await self._each(lambda enumerator: enumerator.close())

    async def _each(self, call: Callable[[SplitEnumerator], Awaitable[None]]) -> None:
        for enumerator in self._begun:
            await call(enumerator)


def _tagged(index: int, split: Any) -> Any:
    return SplitAt([index, split.split], split.position) if isinstance(split, SplitAt) else [index, split]


def _untagged(split: Any) -> tuple[int, Any]:
    if isinstance(split, SplitAt):
        index, inner = split.split
        return index, SplitAt(inner, split.position)
    return split[0], split[1]


class _PartOfHybrid(SplitEnumeratorContext):
    """The context of one of the sources: its splits are marked, and its end is not the end."""

    def __init__(self, hybrid: HybridSplitEnumerator, context: SplitEnumeratorContext, index: int) -> None:
        self._hybrid = hybrid
        self._context = context
        self._index = index
        self.coordinator = context.coordinator

    def registered_readers(self) -> list[int]:
        return self._context.registered_readers()

    def attempts(self, subtask: int) -> list[int]:
        return self._context.attempts(subtask)

    async def send_event(self, subtask: int, event: Any) -> None:
        await self._context.send_event(subtask, [self._index, event])

    async def assign_splits(self, subtask: int, splits: Iterable[Any]) -> None:
        self._hybrid.assigned(subtask)
        await self._context.assign_splits(subtask, [_tagged(self._index, split) for split in splits])

    def assigned_splits(self, subtask: int) -> list[Any]:
        tagged = map(_untagged, self._context.assigned_splits(subtask))
        return [split for part, split in tagged if part == self._index]

    def take_back_splits(self, subtask: int, count: int, chosen: Callable[[Any], bool]) -> list[Any]:
        index = self._index

        def of_this(split: Any) -> bool:
            part, inner = _untagged(split)
            return part == index and chosen(inner)

        return [_untagged(split)[1] for split in self._context.take_back_splits(subtask, count, of_this)]

    async def signal_no_more_splits(self, subtask: int) -> None:
        await self._hybrid.part_ended(subtask, self._index)

    def has_no_more_splits(self, subtask: int) -> bool:
        return self._hybrid.has_ended(subtask, self._index)
