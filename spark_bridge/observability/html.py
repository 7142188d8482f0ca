# SPDX-License-Identifier: Apache-2.0

"""What notebooks show: small tables without scripts, everything escaped, in the colours of the page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import isfinite
from typing import Any, TypeVar

from protocol.describing import describe, line
from spark_bridge.driver.interrupts import interrupts_held_back

T = TypeVar("T")

WITHIN_S = 1.0
"""A notebook waits no longer than this for what it shows."""
SENTENCES_MAX = 10

_CELL = "padding: 2px 10px; text-align: right; border-bottom: 1px solid rgba(128, 128, 128, 0.4)"
_NAME = _CELL.replace("right", "left")
_TABLE = "border-collapse: collapse; margin: 4px 0"


def status_html(status: Any) -> str:
    """A ``SidecarStatus`` as a table of its operators. Never raises."""
    return _shown(lambda: _status(status, ()))


def sidecar_html(read: Callable[[], tuple[Any, Sequence[str]]]) -> str:
    """The status and the diagnosis that ``read`` returns, or why there are none. Never raises, takes 1 s at most."""

    def shown() -> str:
        status, sentences = shown_within(read)
        return _status(status, sentences)

    return _shown(shown)


def handle_html(operator_id: str, parallelism: int, read: Callable[[], tuple[Mapping[str, Any], Any]]) -> str:
    """An operator with the statistics and the failure that ``read`` returns. Never raises, and takes 1 s at most."""

    def shown() -> str:
        head = _head(f"Operator {operator_id}", f"{parallelism} subtasks")
        try:
            statistics, failure = shown_within(read)
        except Exception as error:
            return head + _line(describe(error))
        counts = ("attempts", "ready", "failures", "subtask_resets", "events_received", "events_sent", "runs")
        rows = [(name.replace("_", " "), statistics[name]) for name in counts if name in statistics]
        failed = "" if failure is None else _line(f"failed: {describe(failure)}")
        return head + _table((), rows) + failed

    return _shown(shown)


def shown_within(read: Callable[[], T], within_s: float = WITHIN_S) -> T:
    """The result of ``read``, which runs in a thread. Raises what it raises, and ``TimeoutError`` if it takes longer.

    The thread is left behind until ``read`` returns.
    """
    answers: list[tuple[T] | Exception] = []

    def run() -> None:
        try:
            answers.append((read(),))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run, name="headgate-shown", daemon=True)
    with interrupts_held_back():  # otherwise it might be listed permanently as a thread that is about to start
        thread.start()
    thread.join(within_s)
    match answers:
        case [Exception() as error]:
            raise error
        case [(answer,)]:
            return answer
    raise TimeoutError(f"no answer within {within_s:g} s: the sidecar is busy; call status() to wait longer")


def _shown(make: Callable[[], str]) -> str:
    try:
        return f"<div>{make()}</div>"
    except Exception as error:
        return f"<div>{_head('Headgate', '')}{_line(f'not available: {describe(error)}')}</div>"


def _status(status: Any, sentences: Sequence[str]) -> str:
    relay = status.relay
    about = f"{status.host}:{status.port}, up {duration(status.uptime_s)}, {relay.facts} facts by {relay.kind}"
    rows = [
        (
            one.operator_id,
            one.mode,
            "running" if one.run is not None else "",
            f"{one.ready} of {one.parallelism}",
            f"{one.events_up_per_s:.0f}",
            f"{one.events_down_per_s:.0f}",
            f"{one.requests_per_s:.0f}",
            "" if one.last_completed_checkpoint_id < 0 else one.last_completed_checkpoint_id,
            one.counts.get("failures", 0),
            "" if one.call is None else f"{one.call.name}, {duration(one.call.running_s)}",
        )
        for one in status.operators.values()
    ]
    heads = (
        "operator",
        "mode",
        "run",
        "ready",
        "events/s up",
        "down",
        "requests/s",
        "checkpoint",
        "failures",
        "method",
    )
    said = "".join(map(_line, sentences[:SENTENCES_MAX]))
    return _head("Headgate sidecar", about) + said + (_table(heads, rows) if rows else _line("no operators"))


def duration(seconds: float) -> str:
    """In words as short as can be: ``12 s``, ``3 min 5 s``, ``2 h 10 min``."""
    if not isfinite(seconds):
        return f"{seconds} s"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _head(title: str, about: str) -> str:
    return f"<b>{_text(title)}</b> <span>{_text(about)}</span>"


def _line(text: str) -> str:
    return f"<div>{_text(text)}</div>"


def _text(shown: object) -> str:
    return escape(line(str(shown)))


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f'<th scope="col" style="{_CELL}">{escape(one)}</th>' for one in heads)
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{_CELL if number else _NAME}">{_text(one)}</td>' for number, one in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<table style="{_TABLE}">{f"<thead><tr>{head}</tr></thead>" if head else ""}<tbody>{body}</tbody></table>'
