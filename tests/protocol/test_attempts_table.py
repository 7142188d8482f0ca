# SPDX-License-Identifier: Apache-2.0

"""The table of an attempt's life, cell by cell, and the path of an input through the ledger (H3, H12)."""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path
from types import FrameType

import pytest

import protocol
from protocol import attempts
from protocol.attempts import (
    AttemptCondemned,
    ConnectionExpired,
    KillTask,
    LedgerInput,
    OperatorOpened,
    ReportStale,
    SubtaskFailed,
    SubtaskFinished,
    SubtaskReady,
)
from protocol.attempts.records import TABLE, AttemptState, News, Outcome
from protocol.facts import TaskOutcome
from tests.protocol.attempts_kit import Playbook, end, goodbye, job, opened, reg, stage, start

TASK = 10
CELLS = [(state, news) for state in AttemptState for news in News]
STOPS_MAX = 15


def a_book_in(state: AttemptState) -> Playbook:
    """Create a run of two subtasks in which the attempt of task 10 is in this state."""
    book = Playbook(2)
    book.feed(job(), stage(tasks=2, partitions=2), start(11, 1), reg(11, 1), start(TASK, 0), reg(TASK, 0))
    match state:
        case AttemptState.READY:
            book.feed(opened(TASK))
        case AttemptState.ENDING:
            book.feed(opened(TASK), goodbye(TASK))
        case AttemptState.FINISHED:
            book.feed(opened(TASK), goodbye(TASK), end(TASK, 0, TaskOutcome.SUCCESS))
        case AttemptState.OVER:
            book.feed(opened(TASK), end(TASK, 0))
        case AttemptState.ACCEPTED:
            pass
    return book


def inputs_of(state: AttemptState, news: News) -> list[LedgerInput]:
    match news:
        case News.OPENED:
            return [OperatorOpened("words", TASK)]
        case News.ENDED_WELL:
            return [goodbye(TASK)]
        case News.ENDED_BADLY:
            return [goodbye(TASK, "it broke")]
        case News.GIVEN_UP:
            return [ConnectionExpired("words", TASK), AttemptCondemned("words", TASK, "not confirmed")]
        case News.SPARK_SUCCESS:
            return [end(TASK, 0, TaskOutcome.SUCCESS)]
        case News.SPARK_END:
            revokes = state is AttemptState.FINISHED
            return [end(TASK, 0, TaskOutcome.RESUBMITTED if revokes else TaskOutcome.FAILED)]


@pytest.mark.parametrize(("state", "news"), CELLS, ids=lambda part: part.name)
def test_each_cell_of_the_table_leads_where_it_says(state: AttemptState, news: News) -> None:
    for input in inputs_of(state, news):
        book = a_book_in(state)
        outcome = TABLE[state][news]
        effects = book.ledger.handle(input, book.now)
        kinds = {type(effect) for effect in effects}
        record = book.ledger._operators["words"].record.run
        assert record is not None
        match outcome:
            case Outcome.STALE:
                spark = news in (News.SPARK_SUCCESS, News.SPARK_END)
                assert kinds == (set() if spark else {ReportStale})
            case Outcome.READY:
                assert kinds == {SubtaskReady}
            case Outcome.ENDING:
                assert not effects
            case Outcome.FINISHED:
                assert kinds == {SubtaskFinished}
            case Outcome.FAILED | Outcome.KILLED | Outcome.REVOKED:
                assert SubtaskFailed in kinds
                assert (KillTask in kinds) == (outcome is Outcome.KILLED)
        over = outcome in (Outcome.FAILED, Outcome.KILLED, Outcome.REVOKED)
        becomes = state if outcome is Outcome.STALE else AttemptState.OVER if over else AttemptState[outcome.name]
        assert record.by_task[TASK].state is becomes


def table_text() -> str:
    """Return the table as text: a line of headings, then a line for each state."""
    lines = [["state", *(news.value for news in News)]]
    lines += [[state.name, *(outcome.value for outcome in row.values())] for state, row in TABLE.items()]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def test_the_package_documents_the_table_that_it_uses() -> None:
    printed = textwrap.indent(table_text(), "    ")
    assert printed in inspect.getdoc(attempts)  # type: ignore[operator]


def stops_of(book: Playbook, input: LedgerInput) -> list[str]:
    """Return the functions of ``protocol`` that one input enters, in the order of their first entry.

    A comprehension counts as part of its function. The comparison that ``@value`` gives a class is nothing to follow.
    """
    stops: list[str] = []
    folder = str(Path(protocol.__file__).parent)

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(folder)
            and not code.co_name.startswith(("<", "__eq__", "__hash__"))
        ):
            stops.append(code.co_qualname)

    sys.setprofile(note)
    try:
        book.ledger.handle(input, book.now)
    finally:
        sys.setprofile(None)
    return list(dict.fromkeys(stops))


def a_book_after_a_failure() -> Playbook:
    book = Playbook(2)
    book.feed(job(), stage(tasks=2, partitions=2))
    book.ready(TASK, 0)
    book.ready(11, 1)
    book.feed(end(TASK, 0), start(12, 0, number=1))
    return book


def test_a_reader_can_follow_an_input_through_few_functions() -> None:
    walks: dict[str, list[str]] = {}
    for state in (AttemptState.READY, AttemptState.ENDING):
        walks[f"failed while {state.name}"] = stops_of(a_book_in(state), end(TASK, 0))
        walks[f"success while {state.name}"] = stops_of(a_book_in(state), end(TASK, 0, TaskOutcome.SUCCESS))
    for news in News:
        for input in inputs_of(AttemptState.READY, news):
            walks[news.value] = stops_of(a_book_in(AttemptState.READY), input)
    walks["a retry registers"] = stops_of(a_book_after_a_failure(), reg(12, 0, number=1))
    book = Playbook(2)
    book.feed(job(), stage(tasks=2, partitions=2), start(TASK, 0))
    walks["the first one registers"] = stops_of(book, reg(TASK, 0))
    long = {name: walk for name, walk in walks.items() if len(walk) > STOPS_MAX}
    assert not long, "\n".join(f"{name}: {len(walk)} stops: {', '.join(walk)}" for name, walk in long.items())
