# SPDX-License-Identifier: Apache-2.0

"""The source coordinator: hands splits of an input to the subtasks that read them.

A ``SplitEnumerator`` decides *which* split goes where. The ``SourceCoordinator`` around it records the assignments, so
that no failure loses or duplicates a split:

* An assignment is recorded before it is sent (R118). ``subtask_reset`` gives back everything since the restored
  checkpoint, in the order in which it was assigned (R120, R122).
* Concurrent attempts of a subtask get the same splits. An attempt that becomes ready later gets what is recorded for
  its subtask in one event, and "no more splits" again if the subtask was told that (R126).
* After a revoked success in batch mode (H17, H56), Spark assumes that the recomputed partition equals the lost one,
  part of which others may have read. So the subtask keeps its splits: its next attempt gets the same ones, in the same
  order, then "no more", and nothing is given back. This lasts until the run ends, whatever fails meanwhile.
* A request that a checkpoint held is dropped, because the restored reader asks itself (H151).
* A later run is a new enumeration: the enumerator is closed, and another is built (H68), without a state unless the
  run continues the input of the restored checkpoint, or the enumerator continues over inputs.
* In batch mode Spark sometimes computes only some of the partitions and joins them with what it has kept of an
  earlier run (a cache, shuffle files), or computes in a later run what an earlier one left out (``take``). Then the
  enumeration continues with the same enumerator: a subtask that has finished keeps its splits, as after a revoked
  success, and the splits of the others are given back (H56). ``protocol.enumerations`` decides which case it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from heapq import nlargest
from operator import itemgetter
from typing import Any, Self

from anyio.lowlevel import checkpoint

from actors.coordination.interface import CoordinatorContext, OperatorCoordinator, SubtaskGateway
from actors.coordination.sources.pending_splits import PendingSplits
from actors.coordination.statistics import SPLITS_SHOWN, SourceBacklog, SplitBacklog
from actors.coordination.user_calls import Begun, call_each, in_turns
from protocol.arguments import AT_LEAST_1, check_settings, checked
from protocol.attempts import FailureKind, FailureReason
from protocol.describing import describe, line, name_of, show
from protocol.enumerations import CurrentEnumeration
from protocol.errors import EventEncodeError
from protocol.facts import StageLook
from protocol.ids import VIRTUAL_EMPTY_CHECKPOINT
from protocol.known_keys import KnownKeys
from protocol.overrides import errors_in_overrides
from protocol.source_events import (
    BacklogReported,
    SplitRequested,
    decode_split,
    forget_splits_event,
    no_more_splits_event,
    parse_source_event,
    split_to_value,
    splits_event,
)
from protocol.splits import SplitAssignmentTracker
from protocol.wire.codec import encode_argument, encode_event
from protocol.wire.messages import RestoreMode
from protocol.wire.state import OLD, Steps, decode_state_in_steps, drain, encode_state_in_steps, in_chunks

RECORDED_SPLITS_MAX = 256
"""How many of the splits that a subtask has already are in one event to a later attempt of it."""
BACKLOG_BYTES_MAX = 2**20
"""What is kept of a reader's report of its backlog."""
SPLIT_CHARS_MAX = 200
"""How much of the text of a split the status shows."""
SPLIT_VALUES_SHOWN = 8
"""A longer list is shown as Python writes it, and cut."""

STATIC = "a static split enumerator"

_Assigned = tuple[int, bytes]
"""One assignment: its number, which tells equal splits apart, and the encoded split."""


class SplitEnumeratorContext:
    """The actions of an enumerator. Use it on the event loop only, inside the enumerator's own methods or handlers."""

    def __init__(self, source: SourceCoordinator, context: CoordinatorContext) -> None:
        self._source = source
        self.coordinator = context

    @property
    def parallelism(self) -> int:
        """The number of subtasks."""
        return self.coordinator.parallelism

    def registered_readers(self) -> list[int]:
        """The subtasks that have a ready attempt, in order."""
        return self._source.registered_readers()

    @checked()
    def attempts(self, subtask: int) -> list[int]:
        """The numbers of the subtask's ready attempts, in order. Speculation can make it more than one."""
        return self._source.attempts(subtask)

    async def send_event(self, subtask: int, event: Any) -> None:
        """Send an event to every ready attempt of a subtask. Does nothing if there is none."""
        await self._source.send(subtask, event)

    @checked()
    async def assign_splits(self, subtask: int, splits: Iterable[Any]) -> None:
        """Give ``splits`` to a subtask. They are recorded, then sent. An empty list sends nothing.

        They travel as one event, or as several if they exceed the limits of one.

        A ``SplitAt`` is a split that is read from a position on, by a reader that has positions.

        While an event from a restored checkpoint is handled, its sender may have no attempt. What it is assigned then
        is not sent, and comes back to ``add_splits_back`` right after the handler.

        Raises:
            ValueError: the subtask has no ready attempt, or was told that no more splits follow. Nothing is assigned.
        """
        # R117 H151
        await self._source.assign_splits(subtask, list(splits))

    @checked()
    def assigned_splits(self, subtask: int) -> list[Any]:
        """What each new attempt of a subtask is given first: the splits assigned to it since its last checkpoint."""
        return self._source.assigned_splits(subtask)

    @checked()
    def take_back_splits(self, subtask: int, count: int, chosen: Callable[[Any], bool]) -> list[Any]:
        """Forget that ``subtask`` was assigned splits that its reader has agreed not to read, and return them.

        It takes at most ``count`` splits for which ``chosen(split)`` is true, the newest first. Only the reader can
        know that it has not begun a split, so let it say so in an event. A split that a checkpoint may hold for the
        reader is not found.
        """
        return self._source.take_back_splits(subtask, count, chosen)

    @checked()
    async def signal_no_more_splits(self, subtask: int) -> None:
        """Tell a subtask, and each of its later attempts until a reset, that its input ends with what it has."""
        await self._source.signal_no_more_splits(subtask)

    @checked()
    def has_no_more_splits(self, subtask: int) -> bool:
        """Whether the subtask was told that no more splits follow."""
        return self._source.has_no_more_splits(subtask)


class SplitEnumerator:
    """Decides which split goes where. Its methods are called one at a time, in order; never block in them.

    A split has the types that events can have. An instance lives from one reset of the coordinator to the next, so
    each action has its own. It continues in the next action only if Spark computes there what it lost or left out in
    this one.

    If a reader fails after it sent an event, the next reader of that split sends the event again. So an enumerator that
    adds splits as readers discover them must recognise those that it already knows.
    """

    continues_with_other_input: bool = False
    """Set it to True if the state says what was read ever, so that a run with other input reads what is new.

    Otherwise a run that begins after one that ended well gets an enumerator without a state, which begins at its first
    split (streaming mode).
    """

    async def start(self, context: SplitEnumeratorContext) -> None:
        """Prepare the enumerator; keep ``context``. The first call."""

    async def add_reader(self, subtask: int) -> None:
        """A subtask has its first ready attempt."""
        # R115

    async def handle_split_request(self, subtask: int) -> None:
        """A subtask has nothing to read. Not called after it was told that no more splits follow."""
        # R116

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        """No attempt of the subtask is left. The next one restores ``checkpoint_id``; -1 means nothing.

        Roll back what the subtask's events have told you since that checkpoint: it works on the splits in its restored
        state again, and sends them again. ``add_splits_back`` follows, with what it was assigned since then.
        """
        # H153

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        """Take back the splits of a lost attempt, in the order in which they were assigned. The list may be empty."""
        # R122

    async def _add_encoded_back(self, splits: list[bytes], subtask: int) -> None:
        """``add_splits_back`` of what ``encode_split`` returned.

        Ours take them as they are: a million decoded splits make the garbage collector stop the loop.
        """
        decoded = await in_turns(_all_decoded(splits))
        await self.add_splits_back(decoded, subtask)

    async def attempt_ended(self, subtask: int, attempt: int, succeeded: bool) -> None:
        """A ready attempt is over. ``attempts`` no longer names it.

        If it succeeded, its copies end without a word, and nothing that they have read counts. If it failed, its copies
        go on, or ``add_splits_back`` follows.
        """

    async def handle_source_event(self, subtask: int, attempt: int, event: Any) -> None:
        """Handle an event of a reader that is not a split request."""

    async def snapshot_state(self, checkpoint_id: int) -> bytes:
        """Return the state: all splits that are not assigned, and what is needed to find new ones."""
        return b""

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        """The checkpoint is complete and durable."""

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint was given up. A restart may still restore it, so destroy nothing that was prepared for it."""

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        """No restart can restore the checkpoint any more: clean up what was prepared for it alone."""

    async def close(self) -> None:
        """Release what the enumerator holds. The last call."""


class StaticSplitEnumerator(SplitEnumerator):
    """Hands out a fixed list of splits on request, and then says that there are no more.

    There may be millions. The first thousands are looked at here, and the rest in ``start``, which raises what is wrong
    with it.

    Args:
        splits: the splits. No two may be equal, because a split is recognised by its value.
        state: what an earlier instance returned from ``snapshot_state``. If given, ``splits`` is ignored.
        batch_size: how many splits one request gets, at least 1.

    Raises:
        ValueError: two splits are equal, or ``batch_size`` is too small.
        EventEncodeError: a split is a value that an event cannot have.
    """

    @checked(batch_size=AT_LEAST_1)
    def __init__(self, splits: Iterable[Any], state: bytes | None = None, *, batch_size: int = 1) -> None:
        self._pending = PendingSplits()
        self._begun = Begun(self._restore(state) if state else self._take(list(splits)))
        self._batch_size = batch_size
        self._context: SplitEnumeratorContext

    @classmethod
    def _of_encoded(cls, splits: list[bytes]) -> Self:
        """Return an enumerator of splits that ``encode_split`` returned, which are known to differ."""
        enumerator = cls(())
        enumerator._begun = Begun(enumerator._pending.restore_in_steps(splits))
        return enumerator

    def _take(self, splits: list[Any]) -> Steps[None]:
        seen = KnownKeys()
        for chunk in drain(splits):
            for split in chunk:
                if not seen.add(self._pending.add(split)):
                    raise ValueError(
                        f"two splits are equal, {show(split)}: add something to each that makes it unique, such as an "
                        "index"
                    )
            yield

    def _restore(self, state: bytes) -> Steps[None]:
        fields = yield from decode_state_in_steps(STATIC, state, list)
        if OLD in fields:
            yield from self._pending.restore_values_in_steps(fields[OLD])
        else:
            yield from self._pending.restore_in_steps(fields["pending"])

    @property
    def pending_count(self) -> int:
        """How many splits are not assigned."""
        return len(self._pending)

    async def start(self, context: SplitEnumeratorContext) -> None:
        self._context = context
        await self._begun.finish()

    async def handle_split_request(self, subtask: int) -> None:
        batch = self._pending.take(self._batch_size)
        if batch:
            await self._context.assign_splits(subtask, batch)
        else:
            await self._context.signal_no_more_splits(subtask)

    async def add_splits_back(self, splits: list[Any], subtask: int) -> None:
        await in_turns(self._pending.put_back_in_steps(splits))

    async def _add_encoded_back(self, splits: list[bytes], subtask: int) -> None:
        if type(self).add_splits_back is not StaticSplitEnumerator.add_splits_back:
            return await super()._add_encoded_back(splits, subtask)
        return await in_turns(self._pending.put_encoded_back_in_steps(splits))

    async def snapshot_state(self, checkpoint_id: int) -> bytes:
        await self._begun.finish()
        return await in_turns(encode_state_in_steps(STATIC, {"pending": self._pending.encoded()}))


class SourceCoordinator(OperatorCoordinator[list[Any], list[Any]]):
    """Hands splits of an input to the ``SplitReader`` tasks that read them, so that no failure loses or doubles one.

    Splits of an attempt that fails go back to the enumerator, and another task reads them. Concurrent attempts of a
    subtask get the same splits. Each run has a new enumerator, except when Spark computes in it only what an
    earlier run lost or left out.

    Args:
        enumerator: builds the ``SplitEnumerator`` from its state in a checkpoint, or from None at the beginning.
    """

    @checked()
    def __init__(self, enumerator: Callable[[bytes | None], SplitEnumerator]) -> None:
        self._build = enumerator
        self._enumerator: SplitEnumerator | None = None
        self._restored: bytes | None = None
        self._started = False
        self._context: CoordinatorContext
        self._splits: SplitAssignmentTracker[_Assigned] = SplitAssignmentTracker()
        self._gateways: dict[int, dict[int, SubtaskGateway]] = {}
        self._finished: set[int] = set()  # in the current run
        self._known_readers: set[int] = set()
        self._no_more: set[int] = set()
        self._forgets = False  # this enumeration was begun without the state that was restored
        self._recomputed: set[int] = set()  # Spark may keep a part of their success, so they keep their splits (H56)
        self._enumeration = CurrentEnumeration()
        self._run_over = False  # and no attempt of the next run is ready yet
        self._met_run = False  # whether it is known what the current run computes
        self._recreated = False  # runs before this coordinator was built are unknown
        self._broken: Exception | None = None  # raised by the enumerator or its factory
        self._reading: dict[int, int] = {}  # how many of its splits each subtask has not finished
        self._reading_at: dict[int, dict[int, int]] = {}  # the same at the cuts to which a reset may go back
        self._unsent: list[tuple[int, list[Any]]] | None = None  # assigned to first senders that have no attempt
        self._given_out = 0  # and not given back, in this enumeration
        self._backlogs: dict[int, tuple[tuple[Any, int], ...]] = {}  # of the splits that each subtask has open
        self._heard: set[int] = set()  # ready subtasks that have asked for splits, or reported theirs
        self._reported = False  # whether any has ever reported its backlog
        self.splits_assigned = 0
        self.splits_given_back = 0

    @property
    def splits_progress(self) -> tuple[int, int | None]:
        """How many splits of this enumeration are read, and how many there are; None if the enumerator does not say.

        A subtask has read what it was assigned when it asks for more. An enumerator says it with ``pending_count``, or
        both with ``progress``. For any thread: the values may be a moment old.
        """
        progress = getattr(self._enumerator, "progress", None)
        if progress is not None:
            read, total = progress
            return int(read), int(total)
        pending = getattr(self._enumerator, "pending_count", None)
        total = self._given_out + pending if isinstance(pending, int) else None
        return max(0, self._given_out - sum(tuple(self._reading.values()))), total

    @property
    def backlogs(self) -> dict[int, tuple[tuple[Any, int], ...]]:
        """What is left in the splits that are being read: subtask to pairs of a split and an amount, as last reported.

        Readers that override ``SplitReader.backlog`` report it about once a second, in their own units. For any
        thread.
        """
        return dict(self._backlogs)

    @property
    def backlog(self) -> SourceBacklog:
        """What all subtasks have not read yet, and what is not handed out; see ``SourceBacklog``. For any thread."""
        pending = getattr(self._enumerator, "pending_count", None)
        pending_amount = getattr(self._enumerator, "pending_backlog", None)
        backlogs = dict(self._backlogs)
        reading = dict(self._reading)
        # What a restored reader has in hand was not assigned in this enumeration, but the reader reports it.
        in_hand = sum(max(reading.get(one, 0), len(backlogs.get(one, ()))) for one in reading.keys() | backlogs.keys())
        amounts = [left for splits in backlogs.values() for _, left in splits]
        if isinstance(pending_amount, int):
            amounts.append(pending_amount)
        each = ((subtask, split, left) for subtask, splits in backlogs.items() for split, left in splits)
        largest = nlargest(SPLITS_SHOWN, each, key=itemgetter(2))
        return SourceBacklog(
            pending if isinstance(pending, int) else None,
            in_hand,
            sum(amounts) if amounts else None,
            tuple([SplitBacklog(subtask, text_of_split(split), left) for subtask, split, left in largest]),
        )

    def _whole_backlog(self, *, in_splits: bool) -> int | str:
        """How much all subtasks have not read yet, together with what is not handed out; why, if that is not known.

        Unlike ``backlog``, it is never a part of that. A subtask that is ready and has not said anything has a split
        from its restored state, or will ask for one in a moment.
        """
        if not self._started:
            return "the source has not begun"
        readers = {subtask for subtask, gateways in self._gateways.items() if gateways}
        if missing := self._context.parallelism - len(readers | self._finished):
            return f"{missing} of {self._context.parallelism} subtasks do not run"
        known = self.backlog
        if in_splits:
            if known.splits_pending is None:
                return "the enumerator does not say how many splits are not handed out: define pending_count in it"
            return known.splits_pending + known.splits_in_hand + len(readers - self._heard - self._reading.keys())
        if known.splits_pending != 0 and getattr(self._enumerator, "pending_backlog", None) is None:
            return (
                "the enumerator does not say how much is in the splits that are not handed out: define "
                "pending_backlog in it"
            )
        reading = {subtask for subtask, count in self._reading.items() if count}
        if silent := sorted(readers & ((reading - self._backlogs.keys()) | (readers - self._heard))):
            return f"subtask {silent[0]} has not reported how much it has to read: define backlog in the reader"
        if known.amount is None and not self._reported:
            return "no subtask has reported how much it has to read: define backlog in the reader"
        return known.amount or 0

    # --- what the enumerator's context does -----------------------------------------------------------------------

    def registered_readers(self) -> list[int]:
        return sorted(subtask for subtask, gateways in self._gateways.items() if gateways)

    def attempts(self, subtask: int) -> list[int]:
        return sorted(self._gateways.get(subtask, {}))

    def assigned_splits(self, subtask: int) -> list[Any]:
        return [decode_split(split) for _, split in self._splits.assigned(subtask)]

    async def send(self, subtask: int, event: Any) -> None:
        for _, gateway in sorted(self._gateways.get(subtask, {}).items()):
            await gateway.send_event(event)

    async def assign_splits(self, subtask: int, splits: list[Any]) -> None:
        if not self._gateways.get(subtask):
            if self._unsent is not None:
                self._unsent.append((subtask, splits))
                return
            raise ValueError(
                f"cannot assign splits to subtask {subtask}: it has no ready attempt. Assign them when it asks for "
                "one, or from add_reader on"
            )
        if subtask in self._no_more:
            raise ValueError(
                f"cannot assign splits to subtask {subtask}: it was told that no more follow. Call "
                "signal_no_more_splits only after its last split"
            )
        encoded = [encode_argument("a split", split_to_value(split)) for split in splits]
        if encoded:
            self._splits.record(subtask, enumerate(encoded, start=self.splits_assigned))
            self.splits_assigned += len(encoded)
            self._given_out += len(encoded)
            self._reading[subtask] = self._reading.get(subtask, 0) + len(encoded)
            await _send_splits(partial(self.send, subtask), [decode_split(split) for split in encoded])

    def take_back_splits(self, subtask: int, count: int, chosen: Callable[[Any], bool]) -> list[Any]:
        taken = self._splits.take_back(subtask, count, lambda split: chosen(decode_split(split[1])))
        self._given_out -= len(taken)
        if subtask in self._reading:
            self._reading[subtask] -= len(taken)
        return [decode_split(split) for _, split in taken]

    def has_no_more_splits(self, subtask: int) -> bool:
        return subtask in self._no_more

    async def signal_no_more_splits(self, subtask: int) -> None:
        if self._unsent is not None and not self._gateways.get(subtask):
            return
        self._no_more.add(subtask)
        await self.send(subtask, no_more_splits_event())

    # --- the coordinator ------------------------------------------------------------------------------------------

    async def start(self, context: CoordinatorContext) -> None:
        self._context = context
        self._started = True
        await self._start_enumerator(self._restored)

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        self._require_start("handle_event_from_operator")
        match parse_source_event(event):
            case SplitRequested() | BacklogReported() if self._context.handles_restored:
                pass  # its reader sends it again; its first sender may not exist any more (H151)
            case SplitRequested():
                self._heard.add(subtask)
                self._reading.pop(subtask, None)
                if subtask in self._no_more:
                    await self.send(subtask, no_more_splits_event())
                else:
                    await self._ask(self.enumerator.handle_split_request, subtask)
            case BacklogReported(backlogs):
                self._heard.add(subtask)
                self._reported = True
                self._backlogs.pop(subtask, None)
                if len(encode_event(event)) <= BACKLOG_BYTES_MAX:  # otherwise it is not shown (H157)
                    self._backlogs[subtask] = backlogs
            case _ if self._context.handles_restored:
                await self._handle_restored(subtask, attempt, event)
            case _:
                await self._ask(self.enumerator.handle_source_event, subtask, attempt, event)

    async def _handle_restored(self, subtask: int, attempt: int, event: Any) -> None:
        """An enumerator may answer the first sender of a restored event as any other, and loses no split by that."""
        unsent: list[tuple[int, list[Any]]] = []
        self._unsent = unsent
        try:
            await self._ask(self.enumerator.handle_source_event, subtask, attempt, event)
        finally:
            self._unsent = None
        for sender, splits in unsent:
            await self._ask(self.enumerator.add_splits_back, splits, sender)

    async def subtask_ready(self, subtask: int, gateway: SubtaskGateway) -> None:
        self._require_start("subtask_ready")
        if not self._met_run and self._context.mode is RestoreMode.BATCH:
            await self._meet_run()
        self._gateways.setdefault(subtask, {})[gateway.attempt.attempt] = gateway
        if self._forgets:
            await gateway.send_event(forget_splits_event())
        for recorded in drain(self._splits.assigned(subtask), RECORDED_SPLITS_MAX):
            await _send_splits(gateway.send_event, [decode_split(split) for _, split in recorded])
            await checkpoint()
        if subtask in self._no_more:
            await gateway.send_event(no_more_splits_event())
        if subtask not in self._known_readers:
            self._known_readers.add(subtask)
            await self._ask(self.enumerator.add_reader, subtask)

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self._require_start("subtask_failed")
        was_ready = self._gateways.get(subtask, {}).pop(attempt, None) is not None
        if reason.kind is FailureKind.REVOKED:
            self._finished.discard(subtask)
        self._backlogs.pop(subtask, None)
        if reason.kind is FailureKind.REVOKED and self._context.mode is RestoreMode.BATCH:
            self._recomputed.add(subtask)
            await self.signal_no_more_splits(subtask)  # to a concurrent attempt, and to later ones

        if was_ready:
            await self._ask(self.enumerator.attempt_ended, subtask, attempt, False)

    async def subtask_finished(self, subtask: int, attempt: int) -> None:
        self._backlogs.pop(subtask, None)
        if self._gateways.get(subtask, {}).pop(attempt, None) is not None:
            self._finished.add(subtask)
            await self._ask(self.enumerator.attempt_ended, subtask, attempt, True)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        self._require_start("subtask_reset")
        self._gateways.pop(subtask, None)
        self._heard.discard(subtask)
        if subtask in self._recomputed:
            return
        self._no_more.discard(subtask)
        self._known_readers.discard(subtask)
        recorded = self._splits.get_and_remove(subtask, checkpoint_id)
        self.splits_given_back += len(recorded)
        self._given_out -= len(recorded)
        self._reading[subtask] = self._reading_at.get(checkpoint_id, {}).get(subtask, 0)
        await self._ask(self.enumerator.subtask_reset, subtask, checkpoint_id)
        splits = await in_turns(_all_encoded(recorded))
        await self._ask(self.enumerator._add_encoded_back, splits, subtask)

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        self._require_start("checkpoint_coordinator")
        # In batch mode, a subtask is reset to the beginning only, so no checkpoint holds what it was assigned.
        if self._context.mode is RestoreMode.STREAMING:
            self._splits.on_checkpoint(checkpoint_id)
            self._reading_at[checkpoint_id] = dict(self._reading)
        return await self.enumerator.snapshot_state(checkpoint_id)

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._require_start("notify_checkpoint_complete")
        if self._context.mode is RestoreMode.STREAMING:
            self._splits.on_checkpoint_complete(checkpoint_id)
            self._reading_at = {cut: known for cut, known in self._reading_at.items() if cut >= checkpoint_id}
        await self.enumerator.notify_checkpoint_complete(checkpoint_id)

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._require_start("notify_checkpoint_aborted")
        self._reading_at.pop(checkpoint_id, None)
        await self.enumerator.notify_checkpoint_aborted(checkpoint_id)

    async def notify_checkpoint_discarded(self, checkpoint_id: int) -> None:
        self._require_start("notify_checkpoint_discarded")
        await self.enumerator.notify_checkpoint_discarded(checkpoint_id)

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        self._gateways.clear()
        self._finished.clear()
        self._backlogs.clear()
        self._heard.clear()
        self._restored = state
        if not self._started:
            self._recreated = True
        elif not self._run_over or self._context.mode is not RestoreMode.BATCH:
            await self._begin_anew()
        # Otherwise, the first ready attempt of the next run shows whether that run continues this enumeration.

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self._require_start("run_ended")
        if self._context.mode is RestoreMode.BATCH:
            self._recomputed.update(self._finished)
            self._run_over, self._met_run = True, False
        self._gateways.clear()
        self._finished.clear()
        self._backlogs.clear()
        self._heard.clear()

    async def _meet_run(self) -> None:
        """The first attempt of a run is ready: continue the previous run's enumeration, or begin a new one."""
        look = await self._context.look_at_run()
        goes_on = self._enumeration.goes_on_in(look)
        if self._run_over:
            await (self._go_on() if goes_on else self._begin_anew())
        elif self._recreated:
            _refuse_unknown_past(look)
        self._enumeration.see(look, anew=not goes_on)
        self._run_over, self._met_run = False, True

    async def _go_on(self) -> None:
        """Continue as if the previous run had not ended: reset the subtasks that have not finished in it."""
        if self._broken is not None:
            raise RuntimeError(
                f"Spark computes only a part of the partitions again, but the split enumerator that knows the rest has"
                f" failed ({describe(self._broken)}): call unpersist() on what is cached, or build the RDD inside the"
                " action, so that all of it is computed"
            ) from self._broken
        for subtask in range(self._context.parallelism):
            if subtask in self._known_readers or self._splits.assigned(subtask):
                await self.subtask_reset(subtask, VIRTUAL_EMPTY_CHECKPOINT)

    async def _begin_anew(self) -> None:
        self._splits = SplitAssignmentTracker()
        self._reading.clear()
        self._reading_at.clear()
        self._given_out = 0
        for book in (self._known_readers, self._no_more, self._recomputed):
            book.clear()
        await self._close_enumerator()
        await self._start_enumerator(self._restored)

    async def _ask(self, method: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Call the enumerator. After an exception its state may be inconsistent, so no further run uses it."""
        try:
            await method(*args)
        except Exception as error:
            self._broken = error
            raise

    async def close(self) -> None:
        await self._close_enumerator()

    @property
    def enumerator(self) -> SplitEnumerator:
        """The enumerator of this incarnation.

        Raises ``RuntimeError`` if there is none: before ``start``, after ``close``, or if the last one could not be
        built.
        """
        if self._enumerator is None:
            self._require_start("enumerator")
            raise RuntimeError(
                "the source coordinator has no enumerator: it is closed, or the last one could not be built, and the "
                "log says why"
            )
        return self._enumerator

    def _require_start(self, method: str) -> None:
        if not self._started:
            raise RuntimeError(
                f"SourceCoordinator.{method} was called before start: the coordinator has no context and no enumerator "
                "yet. Call start first; only reset_to_checkpoint, to restore, and close may come before it"
            )

    async def _close_enumerator(self) -> None:
        """Close each one once. A failure is logged: it must not prevent the next one (R113)."""
        enumerator, self._enumerator = self._enumerator, None
        try:
            if enumerator is not None:
                await call_each("close", [enumerator.close])
        except Exception:
            self._context.log.exception("split enumerator close failed")

    def _build_for_run(self, state: bytes | None) -> SplitEnumerator:
        enumerator = self._build_checked(state)
        same = state is None or self._context.input_begins_again
        self._forgets = not (same or enumerator.continues_with_other_input)
        return self._build_checked(None) if self._forgets else enumerator

    def _build_checked(self, state: bytes | None) -> SplitEnumerator:
        enumerator = self._build(state)
        if not isinstance(enumerator, SplitEnumerator):
            raise TypeError(
                f"{name_of(self._build)} returned {show(enumerator)}, which is not a SplitEnumerator: return a new one "
                "each time it is called"
            )
        check_settings(enumerator, SplitEnumerator)
        if errors := errors_in_overrides(enumerator):
            raise TypeError("; ".join(errors))
        return enumerator

    async def _start_enumerator(self, state: bytes | None) -> None:
        try:
            self._enumerator = self._build_for_run(state)  # if this raises, none exists until a reset
            await self._enumerator.start(SplitEnumeratorContext(self, self._context))
        except Exception as error:
            self._broken = error
            raise
        self._broken = None


def _all_encoded(recorded: list[_Assigned]) -> Steps[list[bytes]]:
    """The splits of some assignments, in order. A subtask may have been assigned a million since its last reset."""
    splits: list[bytes] = []
    for chunk in drain(recorded):
        splits += [split for _, split in chunk]
        yield
    return splits


async def _send_splits(send: Callable[[Any], Awaitable[object]], splits: list[Any]) -> None:
    """Send them as one event, or as several if one cannot have them all: an event has limits, and a batch has none."""
    try:
        await send(splits_event(splits))
    except EventEncodeError:
        if len(splits) == 1:
            raise
        middle = len(splits) // 2
        await _send_splits(send, splits[:middle])
        await _send_splits(send, splits[middle:])


def _all_decoded(encoded: list[bytes]) -> Steps[list[Any]]:
    splits: list[Any] = []
    for chunk in in_chunks(encoded):
        splits += map(decode_split, chunk)
        yield
    return splits


def text_of_split(split: object, lists: int = 2) -> str:
    """The split as people read it, in one line: the values of a list in a row, without Python's brackets and quotes.

    ``lists``: how many levels of lists are opened. What nests deeper is shown as Python writes it.
    """
    if type(split) is str:
        return line(split, SPLIT_CHARS_MAX)
    values: tuple[object, ...] = tuple(split) if type(split) is list or type(split) is tuple else ()
    if lists and 0 < len(values) <= SPLIT_VALUES_SHOWN:
        return line(", ".join([text_of_split(one, lists - 1) for one in values]), SPLIT_CHARS_MAX)
    return show(split, SPLIT_CHARS_MAX)


def _refuse_unknown_past(look: StageLook) -> None:
    """Raise if Spark has kept results of an earlier run, whose splits a newly built coordinator does not know."""
    if look.kept or (look.partition_count > len(look.partitions) and 0 not in look.partitions):
        raise RuntimeError(
            "Spark computes only a part of the partitions and keeps the rest from an earlier action, but this "
            "coordinator was built after that action and does not know which splits the rest has read: pass an "
            "instance of SourceCoordinator to coordinate, not a class or factory. It builds a new enumerator for each "
            "action all the same"
        )
