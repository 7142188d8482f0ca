# SPDX-License-Identifier: Apache-2.0

"""Which micro-batch of which query a checkpoint belongs to, and what to do when Spark asks for one. Pure.

The position is the checkpoint's label. ``done`` means that the checkpoint contains the whole batch, including its
output. Otherwise it was taken during the batch.
"""

from __future__ import annotations

from enum import Enum

from actors.coordination.engine.inputs import BatchInput, InputPosition, NoInput

__all__ = ["BatchDecision", "decide", "why_refused"]


class BatchDecision(Enum):
    """What happens to the batch that Spark asks for. The last four decisions refuse it."""

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
            f" `python -m headgate checkpoints` lists; or, {_ADOPT}"
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
