# SPDX-License-Identifier: Apache-2.0

"""The driver's half of a stream: plans micro-batches that can be asked for again, and hands out the splits of one.

Spark fixes a micro-batch by two offsets, which it keeps in the query's ``checkpointLocation``. It may ask for the same
two again: after the query was restarted, or the driver has died. So a batch is a list of splits that is *stored* before
Spark learns of its number. A split that never ends is cut: the batch has the part of it that can be read now, and the
next batch begins there (``Source.next_part``).

The state of a stream has the splits of each batch that Spark may still ask for, the open splits with the positions of
their next parts, and the state of the source's enumerator, which finds new splits. It is a checkpoint in the sidecar's
storage, so a later application takes the stream over, and the earlier one is fenced.

Inside a batch, tasks take splits as they become free. A lost task's splits go to others, and Spark drops what it had
put out. So the content of a batch is the same each time, but not that of one partition.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from actors.coordination import CoordinatorStore, SplitEnumerator, SplitEnumeratorContext, StaticSplitEnumerator
from actors.coordination.host.alone import HostAlone
from actors.coordination.user_calls import call_each, in_turns
from actors.logs import get_logger
from actors.threads import USER
from protocol.barrier_tracker import CompletedCheckpoint
from protocol.source_events import SplitAt, StreamBatch, decode_split, encode_split, parse_stream_batch
from protocol.wire.state import OLD, Steps, decode_state_in_steps, encode_entry, encode_state_in_steps
from spark_bridge.common.errors import StreamRefused
from spark_bridge.sources.source import Source
from spark_bridge.storage import StoragePort

log = get_logger("headgate.streams")

_PLAN = "a stream's plan"
_TURN_SPLITS = 256
"""After so many splits that an enumerator has found, other work of the loop gets a turn."""
_STEP_SPLITS = 2**16
"""So many references are copied in a step: a millisecond, because the splits are no longer in the processor's cache."""
_STREAM = re.compile(r"[0-9a-f]{16}")
_PLANS_KEPT = 16
"""So many plans besides the first are kept in memory."""
_READER = 0  # the only reader that an enumerator sees while a stream is planned


@dataclass(frozen=True)
class _State:
    """``stream``: its name, empty before it begins. ``dropped``: so many batches were committed and forgotten.
    ``open``: splits that have not ended, as ``SplitAt``.

    Splits are encoded. A plan may have millions, which are written as they are each time that a batch is planned.
    """

    stream: str = ""
    dropped: int = 0
    batches: tuple[tuple[bytes, ...], ...] = ()
    open: tuple[bytes, ...] = ()
    enumerator: bytes | None = None

    @property
    def last(self) -> int:
        """The number of the newest batch; 0 before the first."""
        return self.dropped + len(self.batches)

    def pack_in_steps(self) -> Steps[bytes]:
        fields = {
            "stream": self.stream,
            "dropped": self.dropped,
            "sizes": [len(batch) for batch in self.batches],
            "splits": chain.from_iterable(self.batches),
            "open": iter(self.open),
            "enumerator": self.enumerator,
        }
        return (yield from encode_state_in_steps(_PLAN, fields))

    @classmethod
    def unpack_in_steps(cls, state: bytes) -> Steps[_State]:
        fields = yield from decode_state_in_steps(_PLAN, state, list)
        if OLD in fields:
            return (yield from cls._unpack_old(*fields[OLD]))
        splits, batches = iter(fields["splits"]), []
        for size in fields["sizes"]:
            batch: list[bytes] = []
            for taken in range(0, size, _STEP_SPLITS):
                batch += islice(splits, min(_STEP_SPLITS, size - taken))
                yield
            batches.append(tuple(batch))
            yield
        return cls(fields["stream"], fields["dropped"], tuple(batches), tuple(fields["open"]), fields["enumerator"])

    @classmethod
    def _unpack_old(cls, stream: str, dropped: int, batches: Any, left: Any, enumerator: bytes | None) -> Steps[_State]:
        encoded = []
        for batch in batches:
            encoded.append(tuple(map(encode_entry, batch)))
            yield
        open_ = tuple(encode_split(SplitAt(split, position)) for split, position in left)
        return cls(stream, dropped, tuple(encoded), open_, enumerator)


class StreamPlanner:
    """Plans the micro-batches of one source, for any number of queries. Loop only; requests are answered one at a time.

    Each query has its own stream: no query sees, or touches, the plan of another one (H173). ``port`` returns where the
    plan of a stream is stored. That of the first query is under the empty name, because Spark 4.1 does not say which
    query it asks for; with it, there is no other. ``splits_max`` is how many splits a batch has, about, at most.
    ``store`` is shared by all coordinators.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        port: Callable[[str], StoragePort],
        splits_max: int,
        store: CoordinatorStore | None = None,
    ) -> None:
        self._name = name
        self._port = port
        self._plan = partial(_Plan, name, source, splits_max, store or CoordinatorStore())
        self._turn = anyio.Lock()
        self._first = self._plan(port(""))
        self._is_first_taken = False  # by a query that has not read anything yet
        self._others: dict[str, _Plan] = {}  # the one that was used last is the last

    async def open(self) -> None:
        """Take over the stream of an earlier application, if the storage has one. Raises ``StorageError``."""
        await self._first.open()

    async def close(self) -> None:
        """Close the enumerators. The streams continue in a later application."""
        async with self._turn:
            for plan in (self._first, *self._others.values()):
                await plan.forget_finding()

    async def answer(self, method: str, argument: Any) -> Any:
        """Answer a request of Spark's planning process.

        Raises ``StreamRefused`` if it cannot be served, ``StorageError``, and what the source raises.
        """
        async with self._turn:
            match method, argument:
                case "initial", None:
                    return await self._begin()
                case "initial", [str(stream), int()]:
                    return self._initial_of(stream)
                case "latest", None:  # from Spark 4.1, perhaps for a new query, of which "initial" comes later
                    if not self._first.state.stream:
                        await self._first.begin()
                    return await self._first.latest(self._first.state.last)
                case "latest", [str(stream), int(number)]:
                    return await (await self._of(stream)).latest(number)
                case "target", [str(stream), int(number)]:
                    return await (await self._of(stream)).target(number)
                case "count", [str(stream), int(start), int(end)]:
                    return sum(map(len, (await self._of(stream)).batches(start, end)))
                case "commit", [str(stream), int(number)]:
                    return (await self._of(stream)).commit(number)
                case _:
                    raise StreamRefused(
                        f"source {self._name!r} does not know the request {method!r}: use the same release of "
                        "Headgate on the driver and the executors"
                    )

    def splits(self, batch: StreamBatch) -> list[bytes]:
        """The splits of a batch, encoded. Raises ``StreamRefused`` if it is not known."""
        plan = self._first if batch.stream == self._first.state.stream else self._others.get(batch.stream)
        if plan is None:
            raise self._unknown()
        return list(chain.from_iterable(plan.batches(batch.start, batch.end)))

    async def _begin(self) -> list[Any]:
        """A query without a checkpointLocation begins: at the beginning of the source."""
        if not (self._first.state.last or self._is_first_taken):
            self._is_first_taken = True
            return [self._first.state.stream or await self._first.begin(), 0]
        stream = secrets.token_hex(8)
        plan = self._plan(self._port(stream))
        await plan.begin(stream)
        await self._keep(plan)
        return [stream, 0]

    def _initial_of(self, stream: str) -> list[Any]:
        """A query without a checkpointLocation begins, and Spark 4.1 has asked for the end of its first batch."""
        if stream != self._first.state.stream or self._first.state.dropped:
            raise StreamRefused(
                f"another query has read source {self._name!r} before, and with Spark 4.1 a second one cannot begin at "
                "its beginning: register the source under another name, with sidecar.source(...), or keep the "
                "checkpointLocation of the first query"
            )
        return [stream, 0]

    async def _of(self, stream: str) -> _Plan:
        """The plan of a stream, perhaps of an earlier application."""
        if stream == self._first.state.stream:
            return self._first
        plan = self._others.pop(stream, None)
        if plan is None and _STREAM.fullmatch(stream):
            plan = self._plan(self._port(stream))
            await plan.open()
        if plan is None or plan.state.stream != stream:
            raise self._unknown()
        await self._keep(plan)
        return plan

    async def _keep(self, plan: _Plan) -> None:
        self._others[plan.state.stream] = plan
        while len(self._others) > _PLANS_KEPT:
            oldest = next(iter(self._others))
            await self._others.pop(oldest).forget_finding()  # what it has planned is stored

    def _unknown(self) -> StreamRefused:
        return StreamRefused(
            f"the query continues a stream of source {self._name!r} that this sidecar does not know: keep its plan "
            "with SidecarConfig(storage=...), the same for each driver, or begin with a new checkpointLocation"
        )


@dataclass(eq=False)
class _Plan:
    """The plan of one stream."""

    _name: str
    _source: Source
    _splits_max: int
    _store_of_all: CoordinatorStore
    _port: StoragePort
    state: _State = _State()
    _enumerator: SplitEnumerator = field(init=False)
    _context: _PlanningContext | None = None  # of the enumerator, if there is one

    async def open(self) -> None:
        """Take over what an earlier application has stored, if anything."""
        restored = await self._port.restore_latest()
        if restored is not None:
            self.state = await in_turns(_State.unpack_in_steps(restored.coordinator_state))

    async def begin(self, stream: str = "") -> str:
        """Store a new stream, and return its name."""
        await self.forget_finding()
        await self._store(_State(stream or secrets.token_hex(8)))
        return self.state.stream

    def batches(self, start: int, end: int) -> tuple[tuple[bytes, ...], ...]:
        """The splits of the batches after ``start`` up to ``end``."""
        self._check(start, end)
        return self.state.batches[start - self.state.dropped : end - self.state.dropped]

    async def latest(self, start: int) -> list[Any]:
        """The newest offset. Plans a batch if there is none after ``start``."""
        self._check(start, start)
        if start == self.state.last:
            await self._plan()
        return [self.state.stream, self.state.last]

    async def target(self, start: int) -> list[Any]:
        """Plan all that is there now, in batches of the usual size, and return the offset of the last."""
        self._check(start, start)
        await self._plan()
        while await self._plan(looks=False):
            pass
        return [self.state.stream, self.state.last]

    def commit(self, number: int) -> None:
        """Forget what Spark will not ask for again. Not stored: forgetting it again is harmless."""
        self._check(number, number)
        done = number - self.state.dropped
        self.state = replace(self.state, dropped=number, batches=self.state.batches[done:])

    def _check(self, start: int, end: int) -> None:
        if not self.state.dropped <= start <= end <= self.state.last:
            raise StreamRefused(
                f"source {self._name!r} has the batches after {self.state.dropped} up to {self.state.last}, but "
                f"Spark asks for those after {start} up to {end}: the checkpointLocation and SidecarConfig.storage do "
                "not belong together, because one of them is a copy of an earlier time"
            )

    # --- planning -------------------------------------------------------------------------------------------------

    async def _plan(self, *, looks: bool = True) -> bool:
        """Plan a batch of what is new, and store it. If that fails, what was found is found again.

        ``looks``: find what is new, and continue the splits that have not ended; otherwise only take what was found.
        Returns whether there was anything.
        """
        open_ = self.state.open
        try:
            if self._context is None:
                self._enumerator = self._source.enumerator(self.state.enumerator)
                self._context = _PlanningContext(HostAlone(self._name, self._store_of_all, log.bind(source=self._name)))
                await self._enumerator.start(self._context)
                await self._enumerator.add_reader(_READER)
            missing = self._splits_max - len(open_) if looks else self._splits_max
            found = await self._find(self._context, max(1, missing), runs_due=looks)
            parts, left = await USER.run(_cut, self._source, (*open_, *found) if looks else found)
            if not parts and not found:
                return False
            left = left if looks else [*open_, *left]
            batches = (*self.state.batches, tuple(parts)) if parts else self.state.batches
            enumerator = await self._enumerator.snapshot_state(0) if found else self.state.enumerator
            await self._store(replace(self.state, batches=batches, open=tuple(left), enumerator=enumerator))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.forget_finding()
            raise
        return True

    async def _find(self, context: _PlanningContext, splits_max: int, *, runs_due: bool) -> list[bytes]:
        """Return the splits that are new, about ``splits_max`` at most; each is an encoded ``SplitAt``.

        ``runs_due``: first let the enumerator do what is due, such as to look for new ones.
        """
        if runs_due:
            await context.host.run_due()
        while len(context.found) < splits_max and not context.has_no_more:
            before = len(context.found)
            await self._enumerator.handle_split_request(_READER)
            if len(context.found) == before:
                break
            if len(context.found) // _TURN_SPLITS > before // _TURN_SPLITS:
                await checkpoint()
        context.host.check()
        found, context.found = context.found, []
        return found

    async def _store(self, state: _State) -> None:
        checkpoint_id = self._port.next_checkpoint_id()
        packed = await in_turns(state.pack_in_steps())
        await self._port.store(CompletedCheckpoint(checkpoint_id, 1, packed, label=f"{self._name}: a stream"))
        self._port.completed(checkpoint_id)
        self.state = state

    async def forget_finding(self) -> None:
        """Close the enumerator. What it has found, and no batch has, is found again."""
        context, self._context = self._context, None
        if context is not None:
            try:
                await call_each("close", [self._enumerator.close])
            except Exception:
                log.exception("split enumerator close failed", source=self._name)
            finally:  # nothing that the enumerator has begun goes on
                await context.host.close()


def _cut(source: Source, splits: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The parts of these splits that can be read now, and the splits that have not ended, encoded. Blocks.

    Each split is decoded when it is due, and dropped: the garbage collector would stop the loop if there were many.
    """
    parts, left = [], []
    for encoded in splits:
        one = decode_split(encoded)
        cut = source.next_part(one.split, one.position)
        if cut is None:
            left.append(encoded)
            continue
        part, position = cut
        parts.append(encode_split(part))
        if position is not None:
            left.append(encode_split(SplitAt(one.split, position)))
    return parts, left


class _PlanningContext(SplitEnumeratorContext):
    """The context of an enumerator whose splits go into a plan, as if one reader had read everything so far."""

    def __init__(self, host: HostAlone) -> None:
        self.host = host
        self.coordinator = host.context
        self.found: list[bytes] = []
        self.has_no_more = False

    def registered_readers(self) -> list[int]:
        return [_READER]

    def attempts(self, subtask: int) -> list[int]:
        return [0]

    async def send_event(self, subtask: int, event: Any) -> None:
        """Nobody reads yet."""

    async def assign_splits(self, subtask: int, splits: Iterable[Any]) -> None:
        self.found += [encode_split(one if isinstance(one, SplitAt) else SplitAt(one, None)) for one in splits]

    def assigned_splits(self, subtask: int) -> list[Any]:
        return []

    def take_back_splits(self, subtask: int, count: int, chosen: Callable[[Any], bool]) -> list[Any]:
        return []

    async def signal_no_more_splits(self, subtask: int) -> None:
        self.has_no_more = True

    def has_no_more_splits(self, subtask: int) -> bool:
        return self.has_no_more


@dataclass
class FormatEnumerator(SplitEnumerator):
    """The splits of one run of a format: of a micro-batch, if its tasks say so, otherwise of the whole source."""

    source: Source
    planner: StreamPlanner
    _inner: SplitEnumerator | None = None
    _batch: StreamBatch | None = None
    _readers: list[int] = field(default_factory=list)

    @property
    def pending_count(self) -> int | None:
        """How many splits are not assigned; None if that is not known."""
        return getattr(self._inner, "pending_count", None)

    @property
    def pending_backlog(self) -> int | None:
        """How much there is to read in them; None if that is not known."""
        return getattr(self._inner, "pending_backlog", None)

    async def start(self, context: SplitEnumeratorContext) -> None:
        self._context = context

    async def add_reader(self, subtask: int) -> None:
        self._readers.append(subtask)
        if self._inner is not None:
            await self._inner.add_reader(subtask)

    async def handle_split_request(self, subtask: int) -> None:
        await (await self._begun(self._batch)).handle_split_request(subtask)

    async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
        batch = parse_stream_batch(event)
        inner = await self._begun(batch or self._batch)
        if batch is None:
            await inner.handle_source_event(subtask, attempt, event)

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        if self._inner is not None:
            await self._inner.add_splits_back(splits, subtask)

    async def attempt_ended(self, subtask: int, attempt: int, succeeded: bool) -> None:
        if self._inner is not None:
            await self._inner.attempt_ended(subtask, attempt, succeeded)

    async def close(self) -> None:
        if self._inner is not None:
            await self._inner.close()

    async def _begun(self, batch: StreamBatch | None) -> SplitEnumerator:
        if self._inner is None:
            self._batch = batch
            if batch is None:
                self._inner = self.source.enumerator(None)
            else:
                self._inner = StaticSplitEnumerator._of_encoded(self.planner.splits(batch))
            await self._inner.start(self._context)
            for subtask in self._readers:
                await self._inner.add_reader(subtask)
        elif batch != self._batch:
            raise StreamRefused("tasks of two micro-batches read one source in one run: give each query its own source")
        return self._inner
