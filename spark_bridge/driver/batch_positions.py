"""Which micro-batch of which query a checkpoint belongs to, and what follows when Spark asks for one. Pure.

The position is the checkpoint's label. ``done`` says that the checkpoint holds all of the batch, its output included;
else it was taken in the midst of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

__all__ = ["BatchDecision", "BatchPosition", "decide", "why_refused"]

_LABEL = re.compile(r"batch (0|[1-9]\d{0,18}) of (\S+): (begun|done)")


@dataclass(frozen=True, slots=True)
class BatchPosition:
    """``str`` gives the label, ``read`` takes it."""

    query_id: str
    batch_id: int
    done: bool

    def __str__(self) -> str:
        return f"batch {self.batch_id} of {self.query_id}: {'done' if self.done else 'begun'}"

    @classmethod
    def read(cls, label: str) -> BatchPosition | None:
        """None where there is no label, or one that is no position."""
        match = _LABEL.fullmatch(label)
        return None if match is None else cls(match[2], int(match[1]), match[3] == "done")


class BatchDecision(Enum):
    """What is done with the batch that Spark asks for; the last four refuse it."""

    RUN = "run it"
    SKIP = "its output is committed already"
    AHEAD = "later output is committed already"
    GAP = "earlier batches are missing"
    OTHER_QUERY = "the checkpoint is of another query"
    UNKNOWN = "the checkpoint is of no query"


def decide(found: BatchPosition | None, query_id: str, batch_id: int) -> BatchDecision:
    """``found`` is the position of the last completed checkpoint, None where there is none.

    Spark runs a batch again until it has noted its end, with the same data, and the next one only then.
    """
    if found is None:
        return BatchDecision.RUN if batch_id == 0 else BatchDecision.UNKNOWN
    if found.query_id != query_id:
        return BatchDecision.OTHER_QUERY
    if found.batch_id == batch_id:
        return BatchDecision.SKIP if found.done else BatchDecision.RUN
    if found.batch_id > batch_id:
        return BatchDecision.AHEAD
    return BatchDecision.RUN if found.done and found.batch_id == batch_id - 1 else BatchDecision.GAP


_ADOPT = "to go on from what there is all the same, without what is missing, use for_each_batch(..., adopt=True)"


def why_refused(
    decision: BatchDecision, found: BatchPosition | None, query_id: str, batch_id: int, matching_file: str | None
) -> str:
    """The reason, and what can be done. ``matching_file`` holds the checkpoint behind the batch before, if it is kept.

    Only for the decisions that refuse.
    """
    asked = f"Spark asks for batch {batch_id} of query {query_id}, but"
    if found is None:
        return (
            f"{asked} there is no checkpoint of any query: the operator is new in this query, or its storage is not"
            f" that of the runs before. Give it that storage; {_ADOPT}"
        )
    where = f"{'behind' if found.done else 'in the midst of'} batch {found.batch_id}"
    match decision:
        case BatchDecision.OTHER_QUERY:
            return (
                f"{asked} the last checkpoint is of query {found.query_id}, {where}: the query has lost its"
                " checkpointLocation, or two queries use one operator. Give the query its directory back, or coordinate"
                f" another operator id, or start from nothing with restore='none'; {_ADOPT}"
            )
        case BatchDecision.AHEAD:
            if batch_id == 0:
                back = "coordinate with restore='none'"
            elif matching_file is None:
                back = f"there is no way back, for no checkpoint behind batch {batch_id - 1} is kept any more"
            else:
                back = f"coordinate with restore={matching_file!r}, the checkpoint behind batch {batch_id - 1}"
            return (
                f"{asked} the last checkpoint is {where}: Spark's checkpointLocation is older than the operator's"
                f" checkpoints, and what came after batch {batch_id - 1} is committed. Give the query its newer"
                f" directory back; if all of that output has been taken back as well, {back}"
            )
        case _:
            return (
                f"{asked} the last checkpoint is {where}: the operator's storage is older than Spark's"
                f" checkpointLocation. Give it its newer storage; {_ADOPT}"
            )
