# SPDX-License-Identifier: Apache-2.0

"""Ready split enumerators: one that finds splits while tasks read, and several sources one after the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import anyio

from actors.coordination.sources.pending_splits import PendingSplits
from actors.coordination.sources.source import SplitEnumerator, SplitEnumeratorContext
from actors.coordination.user_calls import Begun, call_each, in_turns
from actors.threads import USER
from protocol.arguments import AT_LEAST_1, checked
from protocol.describing import describe, show
from protocol.errors import SAME_RELEASE, RemoteProtocolError
from protocol.known_keys import KnownKeys
from protocol.source_events import SplitAt
from protocol.wire.state import (
    CHUNK_ENTRIES,
    OLD,
    Steps,
    decode_state_in_steps,
    drain,
    encode_state_in_steps,
    in_chunks,
)

__all__ = ["BoundedLogEnumerator", "DiscoveringSplitEnumerator", "HybridSplitEnumerator", "OwnedSplitEnumerator"]

DISCOVERING = "a discovering split enumerator"
HYBRID = "a hybrid split enumerator"
UNREAD = "unread"
"""The field of its state that says which subtasks had something to read."""

FAILURES_MAX = 5


class DiscoveringSplitEnumerator(SplitEnumerator):
    """Hands out the splits that a function finds, and looks for new ones while tasks read.

    A reader that asks while there is none waits until one is found or given back. A split is found once, however often
    the function returns it. That it was found is remembered with 15 bytes for each split, in memory and in the state,
    and permanently unless ``forget_after_s`` is given: ten million splits are 150 MB. In streaming mode this holds over
    runs: a later run gets what is new.

    Args:
        discover: returns all splits that exist now, in the order in which they are to be read. It is called on a worker
            thread, at the start and then every ``every_s`` seconds. If it raises at the start, the coordinator does not
            start; later, an error is logged, and the fifth in a row fails the job.
        state: what an earlier instance returned from ``snapshot_state``, or None at the beginning.
        every_s: the seconds between two looks. None looks only once for each input, at the beginning, and readers are
            told that no more splits follow when all are assigned.
        key: what a split is recognised by: a str, or another value that an event can have. It is called on the worker
            thread, too. By default the split itself, without its position.
        divide: returns the parts of a split that is found for the first time, which are handed out in its place. It is
            called on the worker thread. So the parts may be others in another run, and nothing is read twice: only the
            split is remembered.
        batch_size: how many splits one request gets.
        backlog: ``backlog(split, position)`` returns how much there is to read in a split, in the units of the readers'
            method of this name, when it is found or given back. It has to be quick. By default, splits that wait do not
            count in the source's backlog.
        forget_after_s: forget a split after ``discover`` has not returned it for so many seconds of running time, at
            most twice as many. So no more is remembered than what exists. A split that returns after that is read
            again, as a new one. Only for splits that end: a reader may still have one that does not. None: never.
    """

    continues_with_other_input = True

    @checked(batch_size=AT_LEAST_1)
    def __init__(
        self,
        discover: Callable[[], Iterable[Any]],
        state: bytes | None = None,
        *,
        every_s: float | None = None,
        key: Callable[[Any], Any] = lambda split: split,
        divide: Callable[[Any], Iterable[Any]] | None = None,
        batch_size: int = 1,
        backlog: Callable[[Any, Any], int] | None = None,
        forget_after_s: float | None = None,
    ) -> None:
        self._discover = discover
        self._every_s = every_s
        self._key = key
        self._divide = divide
        self._batch_size = batch_size
        self._backlog = backlog
        self._forget_after_s = forget_after_s
        self._is_restored = state is not None
        self._pending = PendingSplits(backlog)
        self._known = KnownKeys()
        self._waiting: dict[int, None] = {}
        self._failures = 0
        self._restored_period_s = 0.0
        self._period_begins_at = 0.0  # by the loop's clock
        self._started = False
        self._begun = Begun(self._restore(state))
        self._context: SplitEnumeratorContext

    def _restore(self, state: bytes | None) -> Steps[None]:
        if state is None:
            return
        fields = yield from decode_state_in_steps(DISCOVERING, state)
        if OLD in fields:
            yield from self._pending.restore_values_in_steps(fields[OLD]["pending"])
            for chunk in in_chunks(fields[OLD]["known"]):
                for key in chunk:
                    self._known.add(key)
                yield
            return
        yield from self._pending.restore_in_steps(fields["pending"])
        yield from self._restore_known(fields)

    def _restore_known(self, fields: dict[str, Any]) -> Steps[None]:
        yield from self._known.restore_in_steps(fields["known"], fields["period"])
        self._restored_period_s = fields["period_s"]

    def _known_fields(self) -> dict[str, Any]:
        """What the state says of the splits that were found."""
        return {"period": self._known.period, "known": self._known.buckets(), "period_s": self._period_s}

    @property
    def pending_count(self) -> int:
        """How many splits are known and not assigned."""
        return len(self._pending)

    @property
    def pending_backlog(self) -> int | None:
        """How much there is to read in these splits; None if ``backlog`` was not given."""
        return None if self._backlog is None else self._pending.amount

    async def start(self, context: SplitEnumeratorContext) -> None:
        self._context = context
        await self._begun.finish()
        self._period_begins_at = anyio.current_time() - self._restored_period_s
        self._started = True
        if self._every_s is not None or not self._is_restored or not context.coordinator.input_begins_again:
            await in_turns(self._add(await USER.run(self._find_new, False)))
        self._look_again()

    def _look_again(self) -> None:
        if self._every_s is not None:
            self._context.coordinator.call_later(self._every_s, self._look)

    @property
    def _period_s(self) -> float:
        """For how long the current period of remembering has lasted, while the coordinator was running."""
        return anyio.current_time() - self._period_begins_at if self._started else self._restored_period_s

    async def _look(self) -> None:
        forgets = self._forget_after_s is not None and self._period_s >= self._forget_after_s
        self._context.coordinator.call_async(self._find_new, forgets, handler=partial(self._looked, forgets))

    def _find_new(self, forgets: bool) -> list[Any]:
        """On a worker thread, while nothing else changes what is known: look, and return what is not known."""
        new = [split for split in self._discover() if not self._known.see(self._key_of(split))]
        if self._divide is not None:
            new = [(self._key_of(split), list(self._divide(split))) for split in new]
        if forgets:
            self._known.forget_unseen()
        return new

    async def _looked(self, forgot: bool, found: list[Any] | None, error: Exception | None) -> None:
        if error is not None:
            self._failures += 1
            if self._failures >= FAILURES_MAX:
                raise error
            self._context.coordinator.log.warning(
                "split discovery failed", error=describe(error), failures=self._failures
            )
        else:
            self._failures = 0
            if forgot:
                self._period_begins_at = anyio.current_time()
            await in_turns(self._add([] if found is None else found))
            await self._serve()
        self._look_again()

    def _key_of(self, split: Any) -> Any:
        return self._key(split.split if isinstance(split, SplitAt) else split)

    def _add(self, found: list[Any]) -> Steps[None]:
        for chunk in drain(found):
            for split in chunk:
                key, parts = (self._key_of(split), [split]) if self._divide is None else split
                if self._known.add(key):
                    for part in parts:
                        self._pending.add(part)
            yield

    async def handle_split_request(self, subtask: int) -> None:
        self._waiting[subtask] = None
        await self._serve()

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        await in_turns(self._pending.put_back_in_steps(splits))
        await self._serve()

    async def _add_encoded_back(self, splits: list[bytes], subtask: int) -> None:
        if type(self).add_splits_back is not DiscoveringSplitEnumerator.add_splits_back:
            return await super()._add_encoded_back(splits, subtask)
        await in_turns(self._pending.put_encoded_back_in_steps(splits))
        return await self._serve()

    async def _serve(self) -> None:
        for subtask in tuple(self._waiting):
            if not self._context.attempts(subtask):
                del self._waiting[subtask]  # its next attempt asks itself
            elif len(self._pending):
                del self._waiting[subtask]
                await self._context.assign_splits(subtask, self._pending.take(self._batch_size))
            elif self._every_s is None:
                del self._waiting[subtask]
                await self._context.signal_no_more_splits(subtask)

    def _waiting_splits(self) -> Iterator[bytes]:
        """All splits that are not assigned, encoded."""
        return self._pending.encoded()

    async def snapshot_state(self, checkpoint_id: int) -> bytes:
        await self._begun.finish()
        fields = {"pending": self._waiting_splits(), **self._known_fields()}
        return await in_turns(encode_state_in_steps(DISCOVERING, fields))


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
        self._end = end
        self._is_later = is_later
        self._ends: dict[str, Any] = {}  # by the name of a log: up to where it was handed out
        super().__init__(discover, state, key=key, **others)

    def _restore_known(self, fields: dict[str, Any]) -> Steps[None]:
        for chunk in drain(fields["ends"]):
            self._ends.update(chunk)
            yield

    def _known_fields(self) -> dict[str, Any]:
        return {"ends": iter(self._ends.items())}

    def _find_new(self, forgets: bool) -> list[Any]:
        return list(self._discover())

    def _add(self, found: list[Any]) -> Steps[None]:
        for chunk in drain(found):
            for split in chunk:
                at = split if isinstance(split, SplitAt) else SplitAt(split, None)
                name, end = self._key(at.split), self._end(at.split)
                before = self._ends.get(name)
                if before is None or self._is_later(end, before):
                    self._ends[name] = end
                    self._pending.add(split if before is None else SplitAt(at.split, before))
            yield


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
        self._owned: dict[int, PendingSplits] = {}  # by subtask: those of ``_pending`` whose owner was looked up

    @property
    def pending_count(self) -> int:
        """How many splits are known and not assigned."""
        return len(self._pending) + sum(map(len, tuple(self._owned.values())))

    @property
    def pending_backlog(self) -> int | None:
        """How much there is to read in these splits; None if ``backlog`` was not given."""
        if self._backlog is None:
            return None
        return self._pending.amount + sum(owned.amount for owned in tuple(self._owned.values()))

    def _waiting_splits(self) -> Iterator[bytes]:
        return chain(*(owned.encoded() for owned in self._owned.values()), self._pending.encoded())

    async def _serve(self) -> None:
        await in_turns(self._look_up_owners())
        for subtask in tuple(self._waiting):
            if not self._context.attempts(subtask):
                del self._waiting[subtask]  # its next attempt asks itself
            elif owned := self._owned.pop(subtask, None):
                del self._waiting[subtask]
                await self._context.assign_splits(subtask, owned.take(len(owned)))

    def _look_up_owners(self) -> Steps[None]:
        while len(self._pending):
            for split in self._pending.take(CHUNK_ENTRIES):
                owner = self._place(split.split if isinstance(split, SplitAt) else split) % self._context.parallelism
                self._owned.setdefault(owner, PendingSplits(self._backlog)).add(split)
            yield


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
            raise ValueError("a hybrid source needs at least one source: pass them in the order in which they are read")
        self._sources = tuple(sources)
        self._restored: list[bytes | None] = []
        self._begun: list[SplitEnumerator] = []
        self._ended: list[set[int]] = []  # for each begun source, the subtasks that have read all of it
        self._unread: set[int] = set()  # subtasks that may still have something to read
        self._unread_first: frozenset[int] = frozenset()  # in the restored checkpoint
        self._unread_at: dict[int, frozenset[int]] = {}  # at later cuts
        self._waiting: set[int] = set()  # those that wait for the next source
        self._readers: list[int] = []
        self._unread_restored: list[int] | None = []
        self._restoring = Begun(self._restore(state))
        self._context: SplitEnumeratorContext

    def _restore(self, state: bytes | None) -> Steps[None]:
        if state is None:
            self._restored = [None]
            return
        fields = yield from decode_state_in_steps(HYBRID, state, list)
        # Before, a state did not say who had something to read: any of them may.
        self._unread_restored = fields.pop(UNREAD, None)
        self._restored = list(fields[OLD] if OLD in fields else fields.values())
        if len(self._restored) > len(self._sources):
            raise ValueError(
                f"the state is that of {len(self._restored)} sources, but there are {len(self._sources)}: add "
                "sources only at the end"
            )

    @property
    def continues_with_other_input(self) -> bool:  # type: ignore[override]  # its sources say it
        """See ``SplitEnumerator``: whether that is so for each source that has begun."""
        self._restoring.finish_now()
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
        await self._restoring.finish()
        if self._unread_restored is None:
            self._unread.update(range(context.parallelism))
        else:  # with another parallelism, their splits are where `protocol.barrier_tracker.rescaled` has put them
            self._unread.update(subtask % context.parallelism for subtask in self._unread_restored)
        self._unread_first = frozenset(self._unread)
        for state in self._restored:
            await self._begin(state)

    async def _begin(self, state: bytes | None) -> None:
        index = len(self._begun)
        enumerator = self._sources[index](state, self._begun[-1] if self._begun else None)
        part = _PartOfHybrid(self, self._context, index)
        self._begun.append(enumerator)
        self._ended.append(set())
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

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self._readers = [reader for reader in self._readers if reader != subtask]
        self._waiting.discard(subtask)
        self._unread.discard(subtask)
        if subtask in self._unread_at.get(checkpoint_id, self._unread_first):
            self._unread.add(subtask)  # what the checkpoint holds for it, until it asks again
        await self._each(lambda enumerator: enumerator.subtask_reset(subtask, checkpoint_id))

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        for index, enumerator in enumerate(self._begun):
            self._ended[index].discard(subtask)
            await enumerator.add_splits_back(
                [inner for part, inner in map(_untagged, splits) if part == index], subtask
            )
        if splits:
            for waiting in sorted(self._waiting):
                await self._ask(waiting, 0)
        await self._hand_over_if_read()

    async def attempt_ended(self, subtask: int, attempt: int, succeeded: bool) -> None:
        for enumerator in tuple(self._begun):  # one that begins meanwhile has never known the attempt
            await enumerator.attempt_ended(subtask, attempt, succeeded)
        if succeeded:  # if it has returned early, nobody reads what it has left
            self._unread.discard(subtask)
            self._waiting.discard(subtask)
            await self._hand_over_if_read()

    async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
        match event:
            case [int(index), inner] if index >= 0:
                pass
            case _:
                raise RemoteProtocolError(f"not an event of a hybrid source: {show(event, 80)}; {SAME_RELEASE}")
        if index >= len(self._begun):
            raise ValueError(
                f"subtask {subtask} sent {show(inner)} to source {index}, which has not begun: send it later"
            )
        await self._begun[index].handle_source_event(subtask, attempt, inner)

    async def snapshot_state(self, checkpoint_id: int) -> bytes:
        fields: dict[str, Any] = {UNREAD: sorted(self._unread)}
        self._unread_at[checkpoint_id] = frozenset(self._unread)
        for index, one in enumerate(self._begun):
            fields[str(index)] = await one.snapshot_state(checkpoint_id)
        return await in_turns(encode_state_in_steps(HYBRID, fields))

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._unread_at = {cut: unread for cut, unread in self._unread_at.items() if cut >= checkpoint_id}
        await self._each(lambda enumerator: enumerator.notify_checkpoint_complete(checkpoint_id))

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._unread_at.pop(checkpoint_id, None)
        await self._each(lambda enumerator: enumerator.notify_checkpoint_aborted(checkpoint_id))

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        await self._each(lambda enumerator: enumerator.notify_checkpoint_discarded(checkpoint_id))

    async def close(self) -> None:
        await call_each("close", [enumerator.close for enumerator in self._begun])

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
