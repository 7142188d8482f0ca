"""The source coordinator: hands splits of an input to the subtasks that read them.

It is the first coordinator that users want, so it stands ready-made. A ``SplitEnumerator`` decides *which* split
goes where; the ``SourceCoordinator`` around it keeps the books, so that no failure loses or doubles a split:

* An assignment is recorded before it is sent (R118), and given back on ``subtask_reset``: everything since the
  restored checkpoint, in the order in which it was assigned (R120, R122).
* Concurrent attempts of a subtask get the same splits; an attempt that becomes ready later gets what is recorded for
  its subtask in one event, and "no more splits" again where that was said (R126).
* A revoked success in batch mode (H17, H56): Spark believes that the recomputed partition equals the lost one, part
  of which others may have read. So the subtask keeps its splits: its next attempt is handed the same ones, in the
  same order, then "no more", and nothing is given back. This lasts until the run ends, whatever fails meanwhile.
* A later run in batch mode (H55, H56): of what an earlier action computed, Spark may have kept a part (a cache, shuffle
  files) and run only the rest again. So a subtask that has finished once begins each later run with the splits that it
  had, and nobody else is given them: what the new enumerator assigns of them is passed over.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from actors.coordination.interface import CoordinatorContext, OperatorCoordinator, SubtaskGateway
from protocol.attempts import FailureKind, FailureReason
from protocol.codec import decode_event, encode_event
from protocol.messages import RestoreMode
from protocol.source_events import (
    SplitRequested,
    no_more_splits_event,
    parse_source_event,
    splits_event,
)
from protocol.splits import SplitAssignmentTracker

_Assigned = tuple[int, bytes]
"""One assignment: its number, which tells equal splits apart, and the encoded split."""


class SplitEnumeratorContext:
    """What an enumerator may do. Loop only, inside the enumerator's own methods or handlers."""

    def __init__(self, source: SourceCoordinator, context: CoordinatorContext) -> None:
        self._source = source
        self.coordinator = context

    @property
    def parallelism(self) -> int:
        return self.coordinator.parallelism

    def registered_readers(self) -> list[int]:
        """The subtasks that have a ready attempt, in order."""
        return self._source.registered_readers()

    def attempts(self, subtask: int) -> list[int]:
        """The numbers of the subtask's ready attempts, in order; more than one under speculation."""
        return self._source.attempts(subtask)

    async def send_event(self, subtask: int, event: Any) -> None:
        """Send an event of your own to every ready attempt of a subtask; nothing happens where there is none."""
        await self._source.send(subtask, event)

    async def assign_splits(self, subtask: int, splits: Iterable[Any]) -> None:
        """Give ``splits`` to a subtask: recorded first, then sent as one event; an empty list sends nothing.

        Raises ``ValueError`` when the subtask has no ready attempt, and then assigns nothing (R117), or when it was
        told that no more splits follow.
        """
        await self._source.assign_splits(subtask, list(splits))

    async def signal_no_more_splits(self, subtask: int) -> None:
        """Tell a subtask, and every later attempt of it until a reset, that its input ends with what it holds."""
        await self._source.signal_no_more_splits(subtask)


class SplitEnumerator:
    """Decides which split goes where. Called one method at a time, in order; never block in it (H9).

    A split is any value that msgpack carries. An instance lives from one reset of the coordinator to the next.
    """

    async def start(self, context: SplitEnumeratorContext) -> None:
        """First call."""

    async def add_reader(self, subtask: int) -> None:
        """The first ready attempt of a subtask is there (R115)."""

    async def handle_split_request(self, subtask: int) -> None:
        """A subtask has nothing to read; not called once it was told that no more splits follow (R116)."""

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        """These were assigned to an attempt that is lost, in this order, and are yours again. May be empty (R122)."""

    async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
        """An event of a reader that is no split request."""

    async def snapshot_state(self, checkpoint_id: int) -> bytes:
        """Your state: all splits that are not assigned, and what finds new ones."""
        return b""

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """The checkpoint is durable."""

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint was given up."""

    async def close(self) -> None:
        """Last call."""


class StaticSplitEnumerator(SplitEnumerator):
    """Hands out a fixed list of splits on demand, ``batch_size`` at a time, and then says that there are no more.

    ``state`` is what an earlier instance returned from ``snapshot_state``; it wins over ``splits``. Splits must differ
    from one another, for the books know a split by its value; ``ValueError`` otherwise.
    """

    def __init__(self, splits: Iterable[Any], state: bytes | None = None, *, batch_size: int = 1) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self._pending: deque[Any] = deque(decode_event(state) if state else splits)
        if len({encode_event(split) for split in self._pending}) != len(self._pending):
            raise ValueError("two splits are equal: give each something of its own, such as an index")
        self._batch_size = batch_size
        self._context: SplitEnumeratorContext

    @property
    def pending_count(self) -> int:
        """Splits that nobody holds."""
        return len(self._pending)

    async def start(self, context: SplitEnumeratorContext) -> None:
        self._context = context

    async def handle_split_request(self, subtask: int) -> None:
        batch = [self._pending.popleft() for _ in range(min(self._batch_size, len(self._pending)))]
        if batch:
            await self._context.assign_splits(subtask, batch)
        else:
            await self._context.signal_no_more_splits(subtask)

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        self._pending.extendleft(reversed(splits))

    async def snapshot_state(self, checkpoint_id: int) -> bytes:
        return encode_event(list(self._pending))


class SourceCoordinator(OperatorCoordinator):
    """See the module. ``enumerator`` builds one, from the bytes of a checkpoint or from None at the beginning."""

    def __init__(self, enumerator: Callable[[bytes | None], SplitEnumerator]) -> None:
        self._build = enumerator
        self._enumerator: SplitEnumerator | None = None
        self._restored: bytes | None = None
        self._started = False
        self._context: CoordinatorContext
        self._splits: SplitAssignmentTracker[_Assigned] = SplitAssignmentTracker()
        self._gateways: dict[int, dict[int, SubtaskGateway]] = {}
        self._known_readers: set[int] = set()
        self._no_more: set[int] = set()
        self._recomputed: set[int] = set()  # success revoked in this run: keep their splits (H56)
        self._kept: dict[int, list[bytes]] = {}  # of the subtasks that have finished in an earlier run (H56)
        self._withheld: Counter[bytes] = Counter()  # of these, what the present enumerator has not assigned yet
        self._passed_over = False  # something was withheld since this was last looked at
        self.splits_assigned = 0
        self.splits_given_back = 0

    # --- what the enumerator's context does -----------------------------------------------------------------------

    def registered_readers(self) -> list[int]:
        return sorted(subtask for subtask, gateways in self._gateways.items() if gateways)

    def attempts(self, subtask: int) -> list[int]:
        return sorted(self._gateways.get(subtask, {}))

    async def send(self, subtask: int, event: Any) -> None:
        for _, gateway in sorted(self._gateways.get(subtask, {}).items()):
            await gateway.send_event(event)

    async def assign_splits(self, subtask: int, splits: list[Any]) -> None:
        if not self._gateways.get(subtask):
            raise ValueError(f"Cannot assign splits to subtask {subtask}: it has no ready attempt")
        if subtask in self._no_more:
            raise ValueError(f"Cannot assign splits to subtask {subtask}: it was told that no more follow")
        free = [encoded for split in splits if not self._withhold(encoded := encode_event(split))]
        if free:
            self._record(subtask, free)
            await self.send(subtask, splits_event([decode_event(split) for split in free]))

    def _record(self, subtask: int, encoded: list[bytes]) -> None:
        self._splits.record(subtask, enumerate(encoded, start=self.splits_assigned))
        self.splits_assigned += len(encoded)

    def _withhold(self, encoded: bytes) -> bool:
        """Whether it belongs to a subtask that had it in an earlier run."""
        if not self._withheld[encoded]:  # asking does not make an entry
            return False
        self._withheld[encoded] -= 1
        self._passed_over = True
        return True

    async def signal_no_more_splits(self, subtask: int) -> None:
        self._no_more.add(subtask)
        await self.send(subtask, no_more_splits_event())

    # --- the coordinator ------------------------------------------------------------------------------------------

    async def start(self, context: CoordinatorContext) -> None:
        self._context = context
        self._started = True
        await self._start_enumerator(self._restored)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if not isinstance(parse_source_event(event), SplitRequested):
            await self.enumerator.handle_source_event(subtask, attempt, event)
        elif subtask in self._no_more:
            await self.send(subtask, no_more_splits_event())
        else:
            await self._request_splits(subtask)

    async def _request_splits(self, subtask: int) -> None:
        """Ask again while nothing came of it but what is withheld."""
        passed_over = True
        while passed_over and subtask not in self._no_more:
            self._passed_over, before = False, self.splits_assigned
            await self.enumerator.handle_split_request(subtask)
            passed_over = self._passed_over and self.splits_assigned == before

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self._gateways.setdefault(subtask, {})[gateway.attempt.attempt] = gateway
        if subtask in self._kept and not self._splits.assigned(subtask):
            self._record(subtask, self._kept[subtask])
        recorded = [decode_event(split) for _, split in self._splits.assigned(subtask)]
        if recorded:
            await gateway.send_event(splits_event(recorded))
        if subtask in self._no_more:
            await gateway.send_event(no_more_splits_event())
        if subtask not in self._known_readers:
            self._known_readers.add(subtask)
            await self.enumerator.add_reader(subtask)

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self._gateways.get(subtask, {}).pop(attempt, None)
        if reason.kind is FailureKind.REVOKED and self._context.mode is RestoreMode.BATCH:
            self._recomputed.add(subtask)
            await self.signal_no_more_splits(subtask)  # to an attempt that may still run beside it, and to the next

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self._gateways.pop(subtask, None)
        if subtask in self._recomputed:
            return
        self._no_more.discard(subtask)
        self._known_readers.discard(subtask)
        taken = [split for _, split in self._splits.get_and_remove(subtask, checkpoint_id)]
        splits = taken[len(self._kept.get(subtask, ())) :]  # what it began with is its own, and not the enumerator's
        self.splits_given_back += len(splits)
        await self.enumerator.add_splits_back([decode_event(split) for split in splits], subtask)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self._splits.on_checkpoint(checkpoint_id)
        return await self.enumerator.snapshot_state(checkpoint_id)

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        if self._context.mode is RestoreMode.STREAMING:  # in batch mode a subtask still falls back to the beginning
            self._splits.on_checkpoint_complete(checkpoint_id)
        await self.enumerator.notify_checkpoint_complete(checkpoint_id)

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        await self.enumerator.notify_checkpoint_aborted(checkpoint_id)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self._splits = SplitAssignmentTracker()
        for book in (self._gateways, self._known_readers, self._no_more, self._recomputed):
            book.clear()
        self._restored = state
        self._withheld = Counter(split for splits in self._kept.values() for split in splits)
        if self._started:
            await self._close_enumerator()
            await self._start_enumerator(state)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        if self._context.mode is RestoreMode.BATCH:
            for subtask in {*self.registered_readers(), *self._recomputed}:  # the others were reported as failed
                self._kept[subtask] = [split for _, split in self._splits.assigned(subtask)]
        self._gateways.clear()

    async def close(self) -> None:
        await self._close_enumerator()

    @property
    def enumerator(self) -> SplitEnumerator:
        """The enumerator of this incarnation; none before ``start``."""
        if self._enumerator is None:
            raise RuntimeError("the source coordinator has not started")
        return self._enumerator

    async def _close_enumerator(self) -> None:
        """Close each one once. A failure is logged: it must not stand in the way of the next one (R113)."""
        enumerator, self._enumerator = self._enumerator, None
        try:
            if enumerator is not None:
                await enumerator.close()
        except Exception:
            self._context.log.exception("split enumerator close failed")

    async def _start_enumerator(self, state: bytes | None) -> None:
        self._enumerator = self._build(state)  # if this raises there is none, until the next reset builds another
        await self._enumerator.start(SplitEnumeratorContext(self, self._context))
