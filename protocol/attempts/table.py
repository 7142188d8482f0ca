# SPDX-License-Identifier: Apache-2.0

"""The states of an attempt as a table: which news may come in which state, and what it leads to.

The ledger dispatches on ``TABLE``, and ``table_text`` prints it for the documentation.
"""

from __future__ import annotations

from enum import Enum


class AttemptState(Enum):
    """The state of an accepted attempt."""

    ACCEPTED = "accepted"  # has a gateway and restores its state
    READY = "ready"  # announced to the coordinator
    ENDING = "ending"  # has said that it ended well; only Spark's word can end it now
    FINISHED = "finished"  # Spark counts it as a success; revocable
    OVER = "over"  # reported failed; later words are ignored


ALIVE = (AttemptState.ACCEPTED, AttemptState.READY, AttemptState.ENDING)


class News(Enum):
    """News of an attempt: the columns. The first four come from the task or are about its connection."""

    OPENED = "opened"
    ENDED_WELL = "ended well"
    ENDED_BADLY = "ended badly"
    GIVEN_UP = "expired, condemned"
    SPARK_SUCCESS = "Spark: success"
    SPARK_END = "Spark: other end"


class Outcome(Enum):
    """What news leads to: the cells."""

    READY = "READY"
    ENDING = "ENDING"
    FINISHED = "FINISHED"
    FAILED = "OVER"
    KILLED = "OVER, killed"  # for its own fault, which counts towards ``attempts_max``
    REVOKED = "OVER, revoked"
    STALE = "-"  # nothing changes


_NONE = Outcome.STALE

_ROWS: dict[AttemptState, tuple[Outcome, ...]] = {
    # The columns are those of News, in their order.
    AttemptState.ACCEPTED: (
        Outcome.READY,
        Outcome.ENDING,
        Outcome.FAILED,
        Outcome.KILLED,
        Outcome.FINISHED,
        Outcome.FAILED,
    ),
    AttemptState.READY: (_NONE, Outcome.ENDING, Outcome.FAILED, Outcome.KILLED, Outcome.FINISHED, Outcome.FAILED),
    # The operator has ended, so its connection may close, and unconfirmed events are not a failure (H25). Spark may
    # have counted its success already: giving the attempt up now could count its output twice.
    AttemptState.ENDING: (_NONE, _NONE, _NONE, _NONE, Outcome.FINISHED, Outcome.FAILED),
    AttemptState.FINISHED: (_NONE, _NONE, _NONE, _NONE, _NONE, Outcome.REVOKED),
    AttemptState.OVER: (_NONE, _NONE, _NONE, _NONE, _NONE, _NONE),
}

TABLE: dict[AttemptState, dict[News, Outcome]] = {
    state: dict(zip(News, row, strict=True)) for state, row in _ROWS.items()
}


def table_text() -> str:
    """Return the table as text: a line of headings, then a line for each state."""
    lines = [["state", *(news.value for news in News)]]
    lines += [[state.name, *(outcome.value for outcome in row.values())] for state, row in TABLE.items()]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
