# SPDX-License-Identifier: Apache-2.0

"""Coordinated tasks in the micro-batches of a Structured Streaming query (``foreachBatch``).

Each micro-batch is one run of the operator in streaming mode, and its final checkpoint commits it. That checkpoint is
labelled with the query's id, which is kept in the query's ``checkpointLocation``, and with the batch. Spark records the
end of a batch only when the function has returned, which happens when that checkpoint is complete. So Spark's record
and our checkpoint are never more than one batch apart, and after any crash the batch that Spark asks for can be placed:

| the last completed checkpoint is | Spark asks for batch k because | so the batch |
|---|---|---|
| after batch k - 1, or k is 0 and there is none | it is next, or is repeated after a crash | runs |
| during batch k | the driver died, or the run failed | runs from that checkpoint |
| after batch k | the driver died before Spark recorded the end | is skipped, because it is committed |
| during or after a later batch | Spark's directory is older than our storage | is refused |
| older than batch k - 1, or none and k > 0 | our storage is older than Spark's directory | is refused, or adopted |
| of another query | the directory is new, or two queries use one operator | is refused, or adopted |

In the first of the refused cases, the output of the later batches is committed, and going back would write it again.
That is for a person to decide; the error names the file of the matching checkpoint. ``adopt`` runs the first batch from
the existing state in the other cases, in which nothing is written twice.

A batch whose function raises fails the query. When the query is started again, in this application or another, its
first run resets the coordinator to the last completed checkpoint (H55), which is the one that matches. A batch in which
no coordinated task ran is committed by a checkpoint too, so that none is missing later. A second coordinated run in one
batch is failed, because a crash between the two runs would lose one or repeat it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import anyio

from actors import AskTimeout
from actors.coordination import CheckpointFailed
from actors.coordination.engine.inputs import BatchInput, InputPosition, NoInput
from actors.coordination.engine.messages import AnnounceBatch, AskLabelledWork, BatchDone, LabelledWork, WithdrawBatch
from actors.logs import get_logger
from protocol.wire.messages import RestoreMode
from spark_bridge.common.errors import BatchFailed, BatchRefused, SidecarError
from spark_bridge.driver.operators import Operator, Operators
from spark_bridge.task_entry import BATCH_PROPERTY, QUERY_ID

__all__ = ["BatchDecision", "ForEachBatch", "MicroBatch", "MicroBatches", "decide", "why_refused"]

T = TypeVar("T")
BatchFunction = Callable[[Any, int], object]
log = get_logger("headgate.micro_batches")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The batch that Spark asks for."""

    operator_id: str
    query_id: str
    batch_id: int

    def __str__(self) -> str:
        return f"batch {self.batch_id} of query {self.query_id}, operator {self.operator_id!r}"

    @property
    def input(self) -> BatchInput:
        return BatchInput(self.query_id, self.batch_id)

    def is_done(self, label: str) -> bool:
        """Whether the checkpoint with this label commits it."""
        return _is_of(self.input, label)


class MicroBatches:
    """The batches of all operators of a sidecar. Loop only."""

    def __init__(self, operators: Operators, settle_timeout_s: float) -> None:
        self._operators = operators
        self._settle_timeout_s = settle_timeout_s

    def check(self, operator_id: str) -> None:
        """Raise ``SidecarError`` if the operator cannot run in micro-batches."""
        if self._operators.find(operator_id).config.mode is not RestoreMode.STREAMING:
            raise SidecarError(
                f"operator {operator_id!r} is in batch mode, which keeps nothing between runs: coordinate it with "
                'mode="streaming", or pass your function to foreachBatch directly'
            )

    async def begin(self, batch: MicroBatch, adopt: bool) -> Operator | None:
        """Return the operator if the batch is to run, or None if it is already committed.

        If it is to run, ``finish`` or ``abandon`` must follow. Waits until an earlier batch of the operator and its
        run have ended. Raises ``BatchRefused`` and ``NotSettled``.
        """
        await self._take_turn(self._operators.find(batch.operator_id), batch)
        operator = self._operators.find(batch.operator_id)  # it may have another parallelism now
        try:
            await self._settle(batch)
            found = InputPosition.read((await self._work(operator)).completed)
            decision = decide(found, batch.query_id, batch.batch_id)
            if decision is BatchDecision.SKIP:
                log.info("committed batch skipped", batch=str(batch))
                operator.batch_turn.release()
                return None
            if decision is not BatchDecision.RUN:
                await self._refuse(batch, decision, found, adopt)
        except BaseException:
            operator.batch_turn.release()
            raise
        operator.tracker_ref.tell(AnnounceBatch(batch.input, adopt))
        return operator

    async def finish(self, operator: Operator, batch: MicroBatch) -> None:
        """The user's function has returned: wait until the batch is committed. Raises ``BatchFailed``."""
        try:
            uncommitted, work = await self._settle(batch), await self._work(operator)
            if work.runs == 0 and not work.failed:
                await self._commit_without_run(operator, batch)
                uncommitted, work = await self._settle(batch), await self._work(operator)
            if work.failed:
                what = "is committed, but then" if batch.is_done(work.completed) else "is not committed:"
                raise BatchFailed(
                    f"{batch} {what} the operator failed: {operator.failure}. Start the query again: it repeats "
                    "the batch"
                ) from operator.failure
            if not batch.is_done(work.completed):
                why = uncommitted or "its run did not succeed, although the function returned"
                raise BatchFailed(f"{batch} is not committed: {why}. Start the query again: it repeats the batch")
        finally:
            self._leave(operator)

    async def abandon(self, operator: Operator) -> None:
        """The user's function has raised."""
        self._leave(operator)

    def _leave(self, operator: Operator) -> None:
        operator.tracker_ref.tell(WithdrawBatch())
        operator.batch_turn.release()

    async def _take_turn(self, operator: Operator, batch: MicroBatch) -> None:
        """A query that was stopped may leave its function running for a while, or two queries share an operator."""
        try:
            with anyio.fail_after(self._settle_timeout_s):
                await operator.batch_turn.acquire()
        except TimeoutError:
            raise BatchRefused(
                f"{batch}: another batch of this operator has been running for {self._settle_timeout_s:g} s, in a "
                "query that was stopped or in a second one; an operator belongs to one query"
            ) from None

    async def _settle(self, batch: MicroBatch) -> str:
        settled = await self._operators.settle_one(batch.operator_id, self._settle_timeout_s)
        if self._operators.fenced is not None:
            raise self._operators.fenced
        return settled.uncommitted

    async def _work(self, operator: Operator) -> LabelledWork:
        work: LabelledWork = await operator.tracker_ref.ask(AskLabelledWork, timeout_s=self._settle_timeout_s)
        return work

    async def _refuse(
        self, batch: MicroBatch, decision: BatchDecision, found: InputPosition | None, adopt: bool
    ) -> None:
        """Raise, unless the batch is adopted."""
        if adopt and decision is not BatchDecision.AHEAD:
            log.warning("batch adopted from non-matching checkpoint", batch=str(batch))
            return
        matching = None
        if decision is BatchDecision.AHEAD and batch.batch_id > 0:
            before = BatchInput(batch.query_id, batch.batch_id - 1)
            infos = await self._operators.retained(batch.operator_id)
            matching = next((i.file for i in reversed(infos) if _is_of(before, i.label or "") and not i.void), None)
        why = why_refused(decision, found, batch.query_id, batch.batch_id, matching)
        raise BatchRefused(f"operator {batch.operator_id!r}: {why}")

    async def _commit_without_run(self, operator: Operator, batch: MicroBatch) -> None:
        operator.tracker_ref.tell(BatchDone(batch.input))
        try:
            await self._operators.checkpoint(batch.operator_id, timeout_s=self._settle_timeout_s)
        except (CheckpointFailed, AskTimeout) as error:
            raise BatchFailed(f"{batch} ran no coordinated task, and could not be committed: {error}") from error


def _is_of(batch: BatchInput, label: str) -> bool:
    """Whether the checkpoint with this label was taken after the run of a batch had ended well."""
    found = InputPosition.read(label)
    return found is not None and found.done and found.input == batch


class ForEachBatch:
    """The function for ``foreachBatch``. ``call`` runs a method of ``MicroBatches`` on the sidecar's loop and waits."""

    def __init__(
        self,
        operator_id: str,
        function: BatchFunction,
        adopt: bool,
        call: Callable[[Callable[[MicroBatches], Awaitable[Any]]], Any],
    ) -> None:
        self._operator_id = operator_id
        self._function = function
        self._adopt = adopt
        self._call = call

    def __call__(self, frame: Any, batch_id: int) -> None:
        """Run one batch, on the thread in which Spark calls back. An exception fails the query."""
        query_id = frame.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
        if not query_id:
            raise SidecarError(
                f"not called by a streaming query, because the local property {QUERY_ID} is not set: pass this "
                "function to writeStream.foreachBatch"
            )
        batch = MicroBatch(self._operator_id, query_id, batch_id)
        operator = self._call(lambda batches: batches.begin(batch, self._adopt))
        if operator is None:
            self._adopt = False
            return
        context = frame.sparkSession.sparkContext
        before = context.getLocalProperty(BATCH_PROPERTY)
        context.setLocalProperty(BATCH_PROPERTY, self._operator_id)
        try:
            self._function(frame, batch_id)
        except BaseException:
            with suppress(SidecarError):  # closed in the meantime; the function's own exception says more
                self._call(lambda batches: batches.abandon(operator))
            raise
        finally:
            with suppress(Exception):  # the context has stopped
                context.setLocalProperty(BATCH_PROPERTY, before)
        self._call(lambda batches: batches.finish(operator, batch))
        self._adopt = False  # only now: until a batch is committed, its checkpoint may be asked for again


# --- pure: what to do about a batch --------------------------------------------------------------------------------


class BatchDecision(Enum):
    """What happens to the batch that Spark asks for. The last four decisions refuse it.

    The label of a checkpoint says which batch of which query it belongs to. ``done`` means that the checkpoint contains
    the whole batch, including its output. Otherwise it was taken during the batch.
    """

    RUN = "run it"
    SKIP = "its output is committed already"
    AHEAD = "later output is committed already"
    GAP = "earlier batches are missing"
    OTHER_QUERY = "the checkpoint is of another query"
    UNKNOWN = "the checkpoint is of no query"


def decide(found: InputPosition | None, query_id: str, batch_id: int) -> BatchDecision:
    """Decide about a batch. ``found`` is the position of the last completed checkpoint, or None.

    Runs outside of a query are between its batches: whether a batch may follow such a run is decided when the batch's
    own run begins. If there was no batch before them, only the first batch of a query may.

    Spark repeats a batch with the same data until it has recorded the end of the batch, and only then runs the next.
    """
    last = None if found is None else found.batch
    if last is None or not isinstance(batch := last.input, BatchInput):
        return BatchDecision.RUN if batch_id == 0 else BatchDecision.UNKNOWN
    if batch.query_id != query_id:
        return BatchDecision.OTHER_QUERY
    if batch.batch_id == batch_id:
        return BatchDecision.SKIP if last.done else BatchDecision.RUN
    if batch.batch_id > batch_id:
        return BatchDecision.AHEAD
    return BatchDecision.RUN if last.done and batch.batch_id == batch_id - 1 else BatchDecision.GAP


_ADOPT = "to continue from the existing state without the missing batches, use for_each_batch(..., adopt=True)"


def why_refused(
    decision: BatchDecision, found: InputPosition | None, query_id: str, batch_id: int, matching_file: str | None
) -> str:
    """The reason for a decision that refuses, and what the user can do.

    ``matching_file`` holds the checkpoint after the previous batch, if it is still stored.
    """
    asked = f"Spark asks for batch {batch_id} of query {query_id}, but"
    last = None if found is None else found.batch
    if found is not None and last is None and found.input != NoInput():
        return (
            f"{asked} the last checkpoint belongs to a run outside of the query, so it is not known which batches are"
            " committed: an operator belongs to one query or to such runs. Use another operator for them, and restore"
            " this one from a checkpoint of the query with coordinate(restore=CheckpointFile(...)), which"
            f" `headgate checkpoints` lists; or, {_ADOPT}"
        )
    if last is None or not isinstance(batch := last.input, BatchInput):
        return (
            f"{asked} there is no checkpoint of any query: the operator is new in this query, or its storage is not"
            f" the one of earlier runs. Use that storage; {_ADOPT}"
        )
    where = f"{'after' if last.done else 'during'} batch {batch.batch_id}"
    match decision:
        case BatchDecision.OTHER_QUERY:
            return (
                f"{asked} the last checkpoint is of query {batch.query_id}, {where}: the query has lost its"
                " checkpointLocation, or two queries use one operator. Restore the query's directory, use another"
                f" operator id, or start without a checkpoint with restore='none'; {_ADOPT}"
            )
        case BatchDecision.AHEAD:
            if batch_id == 0:
                back = "coordinate with restore='none'"
            elif matching_file is None:
                back = f"there is no way back, because no checkpoint after batch {batch_id - 1} is stored any more"
            else:
                file = f"restore=CheckpointFile({matching_file!r})"
                back = f"coordinate with {file}, the checkpoint after batch {batch_id - 1}"
            return (
                f"{asked} the last checkpoint is {where}: Spark's checkpointLocation is older than the operator's"
                f" checkpoints, and the output after batch {batch_id - 1} is already committed. Restore the query's"
                f" newer directory; if all of that output has been withdrawn as well, {back}"
            )
        case _:
            return (
                f"{asked} the last checkpoint is {where}: the operator's storage is older than Spark's"
                f" checkpointLocation. Use the newer storage; {_ADOPT}"
            )
