# SPDX-License-Identifier: Apache-2.0

"""The driver's half of the counters: what each attempt has counted, and the sum of those that count.

An attempt reports its counts as they are, not what was added. So the sum over the subtasks is exact at any moment: it
takes one attempt of each subtask, and an attempt that is lost takes its counts back. Of several live attempts the
earliest is taken; the others are lost when one of them has succeeded.

In batch mode a new action counts from zero. If Spark computes in it only what it has lost of an earlier action, or had
left out, the counts of the other partitions stay, as their results do (H56). In streaming mode an attempt continues
from the counts in its restored state, so all of them are part of the checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from actors.coordination import CoordinatorContext, OperatorCoordinator
from actors.coordination.user_calls import in_turns
from protocol.attempts import FailureReason
from protocol.describing import describe, show
from protocol.enumerations import CurrentEnumeration
from protocol.errors import SAME_RELEASE, RemoteProtocolError
from protocol.wire.messages import RestoreMode
from spark_bridge.primitives.counters.book import Book, Total, added_up


class CountersCoordinator(OperatorCoordinator):
    """The counts of one operator. ``sums`` is for any thread, everything else for the event loop."""

    def __init__(self) -> None:
        self._context: CoordinatorContext
        self._attempts: dict[int, dict[int, Book]] = {}  # subtask to attempt to what it has counted
        self._restored: dict[int, Book] = {}  # until an attempt of the subtask reports
        self._restored_parallelism = 0
        self._counted: dict[int, dict[str, int | float]] = {}  # by subtask: what is in the totals
        self._totals: dict[str, Total] = {}
        self._filed: dict[int, dict[int, Book]] = {}  # subtask to checkpoint to counts, which hold until a later one
        self._cuts: set[int] = set()  # checkpoints to which a report may belong, aborted ones too
        self._aborted: set[int] = set()  # those to which no reset goes back
        self._enumeration = CurrentEnumeration()
        self._started = False
        self._run_over = False
        self._met_run = False

    def sums(self) -> list[Any]:
        """The sums, as a value that ``Book.from_value`` takes."""
        return added_up(self._counting()).as_value()

    def totals(self) -> dict[str, int | float]:
        """The sums of the counts, and how many values were observed, without looking at each subtask.

        They are kept up to date with each report, and are exact, so rounding may differ a little from that of ``sums``
        for counts that are not integers.
        """
        return {name: total.number for name, total in self._totals.items()}

    def _recount(self, subtask: int) -> None:
        """What counts for the subtask may have changed."""
        books = self._attempts.get(subtask)
        book = books[min(books)] if books else self._restored.get(subtask)
        now: dict[str, int | float] = {}
        if book is not None:
            now = {**book.counts, **{name: seen[0] for name, seen in book.observed.items()}}
        before = self._counted.get(subtask, {})
        for name in before.keys() | now.keys():
            total = self._totals.setdefault(name, Total())
            total.add(now.get(name, 0))
            total.add(-before.get(name, 0))
        self._counted[subtask] = now

    def _counting(self) -> Iterator[Book]:
        attempts = {subtask: dict(books) for subtask, books in list(self._attempts.items()) if books}
        for books in attempts.values():
            yield books[min(books)]
        for subtask, book in list(self._restored.items()):
            if subtask not in attempts:
                yield book

    async def start(self, context: CoordinatorContext) -> None:
        self._context = context
        self._started = True
        self._forget_another_parallelism()

    async def handle_event_from_operator(self, subtask: int, attempt: int, event: Any) -> None:
        if self._context.handles_restored:  # the attempt has restored these counts and reports them itself
            return
        checkpoint_id, newer = await _checked(event)
        if not self._met_run and self._is_batch:
            await self._meet_run()
        books = self._attempts.setdefault(subtask, {})
        books[attempt] = book = books.get(attempt, Book()).replace(newer).check_names()
        self._recount(subtask)
        if checkpoint_id in self._cuts:  # a task may name any (H157)
            self._filed.setdefault(subtask, {})[checkpoint_id] = book
            self._filed[subtask] = self._needed(self._filed[subtask])

    async def subtask_ready(self, subtask: int, gateway: object) -> None:
        if self._run_over and self._is_batch:
            await self._meet_run()

    async def subtask_failed(self, subtask: int, attempt: int, reason: FailureReason) -> None:
        self._attempts.get(subtask, {}).pop(attempt, None)
        self._recount(subtask)

    async def subtask_reset(self, subtask: int, checkpoint_id: int) -> None:
        filed = {known: book for known, book in self._filed.get(subtask, {}).items() if known <= checkpoint_id}
        self._filed[subtask] = filed
        if filed:
            self._restored[subtask] = filed[max(filed)]
            self._recount(subtask)

    async def run_ended(self, run_id: int, succeeded: bool, reason: str) -> None:
        self._run_over, self._met_run = True, False

    async def reset_to_checkpoint(self, checkpoint_id: int, state: bytes | None) -> None:
        if state is not None:
            self._forget()
            self._restored_parallelism, books = json.loads(state) if state else (0, {})
            self._restored = {int(subtask): Book.from_value(value) for subtask, value in books.items()}
            self._cuts.add(checkpoint_id)
            for subtask, book in self._restored.items():
                self._filed[subtask] = {checkpoint_id: book}
                self._recount(subtask)
            if self._started:
                self._forget_another_parallelism()
        elif not (self._run_over and self._is_batch):
            self._forget()
        # Otherwise the first attempt of the next run shows whether that run continues with this one's results.

    async def checkpoint_coordinator(self, checkpoint_id: int) -> bytes:
        if self._is_batch:
            return b""
        self._cuts.add(checkpoint_id)
        books = {**self._restored, **{subtask: books[min(books)] for subtask, books in self._attempts.items() if books}}
        if not any(books.values()):
            return b""
        return json.dumps([self._context.parallelism, {one: book.as_value() for one, book in books.items()}]).encode()

    async def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._aborted.add(checkpoint_id)
        self._drop_unneeded()

    async def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._cuts = {cut for cut in self._cuts if cut >= checkpoint_id}
        self._aborted &= self._cuts
        self._drop_unneeded()

    def _drop_unneeded(self) -> None:
        self._filed = {subtask: self._needed(filed) for subtask, filed in self._filed.items()}

    def _needed(self, filed: dict[int, Book]) -> dict[int, Book]:
        """What later checkpoints may refer to: a task whose counts have not changed files nothing under them (H153)."""
        ids = sorted(filed)
        cuts = self._cuts - self._aborted
        needed = [one for one, end in pairwise(ids) if any(one <= cut < end for cut in cuts)]
        return {one: filed[one] for one in (*needed, *ids[-1:])}

    @property
    def _is_batch(self) -> bool:
        return self._context.mode is RestoreMode.BATCH

    def _forget_another_parallelism(self) -> None:
        """If the checkpoint is of another parallelism, the tasks have the same counts, divided differently."""
        if self._restored_parallelism != self._context.parallelism:
            self._forget()

    def _forget(self) -> None:
        self._attempts, self._restored, self._filed = {}, {}, {}
        self._counted, self._totals = {}, {}

    async def _meet_run(self) -> None:
        """The first attempt of a run: does it continue with the results of the run before?"""
        self._met_run = True
        if self._run_over and not self._attempts:
            self._run_over = False
            return
        try:
            goes_on = self._enumeration.meet(await self._context.look_at_run())
        except Exception as error:  # it must not fail a job that only counts something
            self._context.log.warning("counters restarted, partitions of the run unknown", error=describe(error))
            goes_on = False
        if self._run_over and not goes_on:
            self._forget()
        self._run_over = False


async def _checked(event: Any) -> tuple[int | None, Book]:
    """The checkpoint to which a report belongs, if any, and the counts. A task whose report is forged fails alone."""
    match event:
        case [None | int() as checkpoint_id, value]:
            try:
                return checkpoint_id, await in_turns(Book.from_value(value).check_in_steps())
            except ValueError as error:
                raise RemoteProtocolError(str(error)) from None
    raise RemoteProtocolError(f"not a report of counts: {show(event, 80)}; {SAME_RELEASE}")
