# SPDX-License-Identifier: Apache-2.0

"""What the page in Spark's UI shows, as compact JSON: a pure function of a ``SidecarStatus``.

Attempts travel as columns, because there may be 10,000 of them. A column whose values are all equal is that value. The
heat map is one text with a letter for each subtask (``CELLS``). What only the page wants, such as the points of a
sparkline, is kept in the browser.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Any

from protocol.describing import as_json, plain
from spark_bridge.observability.diagnosis import WAITING_S
from spark_bridge.observability.status import (
    AttemptStatus,
    CallStatus,
    CheckpointProgress,
    OperatorStatus,
    SidecarStatus,
)

VERSION = 1
"""Raised when the page could not read what was written for the one before."""
CHECKPOINTS_SHOWN = 50
COUNTERS_SHOWN = 100
FAILURES_SHOWN = 50
REGISTRATIONS_SHOWN = 50
TEXT_MAX = 2000
"""How many characters of a text the page gets, such as a failure's reason."""
FLOATS_EXACT_MAX = 2**53

CELLS = {
    "n": "not started",
    "a": "accepted",
    "r": "ready",
    "w": "waiting",
    "s": "stuck",
    "o": "over",
    "f": "finished",
}
"""What becomes of a subtask, by the letter in the heat map. A subtask is stuck after it has waited for 5 s."""

_STRENGTH = "noafrws"
"""Of a subtask with several attempts, the heat map shows the one whose letter comes last here."""


def page_json(status: SidecarStatus, sentences: Sequence[str]) -> bytes:
    """The status and its diagnosis as the page reads them. May be called on any thread."""
    return b"".join(page_parts(status, sentences))


def page_parts(status: SidecarStatus, sentences: Sequence[str]) -> Iterator[bytes]:
    """The same in parts, each of which takes less than about a millisecond to make."""
    head = {
        "version": VERSION,
        "taken_at": round(status.taken_at, 3),
        "uptime_s": round(status.uptime_s, 1),
        "address": f"{status.host}:{status.port}",
        "tls": status.tls,
        "relay": status.relay._asdict(),
        "loop_lag_ms": [status.loop_lag_p99_ms, status.loop_lag_max_ms],
        "cores": status.cores,
        "sentences": [sentence[:TEXT_MAX] for sentence in sentences],
        "cells": CELLS,
    }
    yield as_json(head)[:-1] + b',"operators":['
    for index, name in enumerate(sorted(status.operators)):
        if index:
            yield b","
        yield from _operator(status.operators[name], status.taken_at)
    yield b"]}"


def cells(operator: OperatorStatus, now: float, *, waiting_s: float = WAITING_S) -> str:
    """A letter of ``CELLS`` for each subtask, in order. ``now``: the status was taken then."""
    letters = ["n"] * operator.parallelism
    late = {
        subtask: "s" if checkpoint.phase_s >= waiting_s else "w"
        for checkpoint in operator.checkpoints
        for subtask in checkpoint.awaited
    }
    for attempt in operator.attempts:
        letter = _cell(attempt, late.get(attempt.subtask, ""), now - waiting_s)
        if attempt.subtask < len(letters) and _STRENGTH.index(letter) >= _STRENGTH.index(letters[attempt.subtask]):
            letters[attempt.subtask] = letter
    for registration in () if operator.run is None else operator.run.registrations:
        if registration.waiting_s >= waiting_s and registration.subtask < len(letters):
            letters[registration.subtask] = "s"
    return "".join(letters)


def _cell(attempt: AttemptStatus, late: str, since: float) -> str:
    if attempt.state == "over":
        return "o"
    if attempt.state == "finished":
        return "f"
    waits = [attempt.requested_at, attempt.unconfirmed_since_at, None if attempt.connected else attempt.heard_at]
    if late == "s" or any(begun is not None and begun <= since for begun in waits):
        return "s"
    if attempt.state == "accepted":
        return "a"
    return "w" if late or attempt.waits_for else "r"


def _operator(operator: OperatorStatus, now: float) -> Iterator[bytes]:
    run = operator.run
    head = {
        "name": operator.operator_id,
        "mode": operator.mode,
        "parallelism": operator.parallelism,
        "ready": operator.ready,
        "run": None
        if run is None
        else {
            **run._asdict(),
            "registrations": [list(one) for one in run.registrations[:REGISTRATIONS_SHOWN]],
            "failed_cause": run.failed_cause[:TEXT_MAX],
        },
        "call": None if operator.call is None else _call(operator.call),
        "queued": operator.queued,
        "last_completed_checkpoint_id": operator.last_completed_checkpoint_id,
        "last_checkpoint_files_bytes": operator.last_checkpoint_files_bytes,
        "last_checkpoint_uploaded_bytes": operator.last_checkpoint_uploaded_bytes,
        "autoscale": operator.autoscale and operator.autoscale.why[:TEXT_MAX],
        "in_doubt": operator.in_doubt,
        "counts": dict(operator.counts),
        "counters": [
            [name[:TEXT_MAX], _number(value)] for name, value in sorted(operator.counters.items())[:COUNTERS_SHOWN]
        ],
        "sources": [[name[:TEXT_MAX], *one] for name, one in operator.sources.items()],
        "parts": [
            [name[:TEXT_MAX], figure, _number(value)]
            for name, part in sorted(operator.parts.items())[:COUNTERS_SHOWN]
            for figure, value in part.items()
        ],
        "rates": [
            round(one, 2) for one in (operator.events_up_per_s, operator.events_down_per_s, operator.requests_per_s)
        ],
        "latencies": {
            name: [latency.samples, latency.last_minute, latency.last_five_minutes, latency.ever, latency.histogram]
            for name, latency in (
                ("confirm", operator.confirm),
                ("request", operator.request),
                ("checkpoint", operator.checkpoint),
                ("fact", operator.fact),
            )
        },
    }
    yield as_json(head)[:-1]
    yield b',"cells":' + as_json(cells(operator, now))
    yield b',"checkpoints":' + as_json([_progress(one) for one in operator.checkpoints])
    history = operator.checkpoint_history[-CHECKPOINTS_SHOWN:]
    yield b',"checkpoint_history":' + as_json(
        [{**one._asdict(), "phases_s": dict(one.phases_s), "reason": one.reason[:TEXT_MAX]} for one in history]
    )
    failures = operator.failures[-FAILURES_SHOWN:]
    yield b',"failures":' + as_json([[*one[:4], one.reason[:TEXT_MAX]] for one in failures])
    yield b',"timeline":' + as_json(
        [[round(at, 2), what, subtask, attempt, text[:200]] for at, what, subtask, attempt, text in operator.timeline]
    )
    yield b',"attempts":{"count":' + as_json(len(operator.attempts))
    for name, column in _columns(operator.attempts):
        yield b"," + as_json(name) + b":" + as_json(_one_if_equal(column))
    yield b"}}"


def _call(call: CallStatus) -> dict[str, Any]:
    return call._replace(name=call.name[:TEXT_MAX], waiting_at=call.waiting_at[:TEXT_MAX])._asdict()


def _number(value: Any) -> Any:
    """An integer that the browser would round is its digits, which it shows as they are."""
    number = plain(value)
    return str(number) if type(number) is int and abs(number) > FLOATS_EXACT_MAX else number


def _progress(checkpoint: CheckpointProgress) -> dict[str, Any]:
    awaited = checkpoint.awaited
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "savepoint": checkpoint.savepoint,
        "triggered_at": round(checkpoint.triggered_at, 3),
        "phase": checkpoint.phase,
        "phase_s": round(checkpoint.phase_s, 2),
        "deadline_s": round(checkpoint.deadline_s, 1) if isfinite(checkpoint.deadline_s) else None,
        "subtasks": len(checkpoint.subtasks),
        "awaited": awaited[:20],
        "awaited_count": len(awaited),
        "uploading": checkpoint.uploading,
    }


def _columns(attempts: Sequence[AttemptStatus]) -> Iterator[tuple[str, Sequence[Any]]]:
    if not attempts:
        return
    taken = dict(zip(AttemptStatus._fields, zip(*attempts, strict=True), strict=True))
    for name in ("subtask", "attempt", "task_attempt_id", "state"):
        yield name, taken[name]
    for name in ("accepted_at", "heard_at", "unconfirmed_since_at", "requested_at", "deferred_at"):
        yield name, [None if one is None else round(one, 1) for one in taken[name]]
    for name in ("failure", "host", "executor_id"):
        yield name, [text[:TEXT_MAX] for text in taken[name]]
    yield "connected", [int(one) for one in taken["connected"]]
    for name in ("events_unconfirmed", "events_held", "events_untaken", "bytes"):
        yield name, taken[name]
    yield "waits_for", [attempt.waits_for for attempt in attempts]


def _one_if_equal(column: Iterable[Any]) -> Any:
    values = list(column)
    return values[0] if values.count(values[0]) == len(values) else values
