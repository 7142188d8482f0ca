# SPDX-License-Identifier: Apache-2.0

"""Reads a trace as Perfetto does: checks what the format demands, and puts its slices into tables for SQL.

The format: "Trace Event Format", Google. Perfetto's trace processor takes it into tables ``slice``, ``thread`` and
``process``; this does the same with SQLite, for what Headgate writes.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Slice = tuple[str, str, float, float, int, str, str, int]

TABLE = "create table slice (name text, category text, ts real, dur real, depth int, track text, args text, pid int)"


def events_of(path: Path) -> list[Event]:
    """The events, also of a file without its end."""
    text = path.read_text(encoding="utf-8").rstrip()
    if not text.endswith("]"):
        text = text[: text.rindex("}") + 1] + "]"
    events: list[Event] = json.loads(text)
    return events


def query(path: Path, sql: str) -> list[Any]:
    """Ask a valid trace a question in SQL."""
    with sqlite3.connect(":memory:") as database:
        database.execute(TABLE)
        database.executemany("insert into slice values (?, ?, ?, ?, ?, ?, ?, ?)", slices_of(events_of(path)))
        return database.execute(sql).fetchall()


def slices_of(events: list[Event]) -> list[Slice]:
    """Check every event, and return the slices with their depth. Slices that have no end last until the last event."""
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    stacks: dict[object, list[Event]] = {}
    complete: dict[object, list[Slice]] = {}
    slices: list[Slice] = []
    last = max((one.get("ts", 0.0) for one in events), default=0.0)
    timed = sorted((one for one in events if one["ph"] not in "M"), key=lambda one: one["ts"])
    for event in timed:
        check(event)
        thread = names.get((event["pid"], event["tid"]), f"{event['pid']}/{event['tid']}")
        match event["ph"]:
            case "X":
                one = _slice(event, event["ts"] + event["dur"], 0, thread)
                complete.setdefault((event["pid"], event["tid"]), []).append(one)
            case "B" | "b":
                stacks.setdefault(_stack_of(event), []).append(event)
            case "E" | "e":
                stack = stacks[_stack_of(event)]
                began = stack.pop()
                assert began["name"] == event["name"], "ends are in the order of beginnings"
                slices.append(_slice(_joined(began, event), event["ts"], len(stack), thread))
    for stack in stacks.values():
        slices += [_slice(one, last, depth, "") for depth, one in enumerate(stack)]
    for thread, ones in complete.items():
        ends: list[float] = []
        for one in sorted(ones, key=lambda one: (one[2], -one[3])):
            while ends and ends[-1] <= one[2] + 0.2:
                ends.pop()
            assert not ends or one[2] + one[3] <= ends[-1] + 0.2, f"{one[0]} overlaps another slice of {thread}"
            ends.append(one[2] + one[3])
            slices.append(one)
    return slices


def check(event: Event) -> None:
    """What the format demands of each event."""
    assert isinstance(event["name"], str)
    assert event["ph"] in "BEXiCbe"
    assert isinstance(event["pid"], int)
    assert 0 <= event["tid"] < 2**32
    assert event["ts"] >= 0
    assert ("dur" in event and event["dur"] >= 0) == (event["ph"] == "X")
    assert ("id" in event and "cat" in event) == (event["ph"] in "be")
    assert (event.get("s") in ("g", "p", "t")) == (event["ph"] == "i")
    if event["ph"] == "C":
        assert all(isinstance(value, int | float) for value in event["args"].values())


def _stack_of(event: Event) -> object:
    if event["ph"] in "be":
        return (event["cat"], event["id"])
    return (event["pid"], event["tid"])


def _joined(began: Event, ended: Event) -> Event:
    return {**began, "args": {**began.get("args", {}), **ended.get("args", {})}}


def _slice(event: Event, end: float, depth: int, thread: str) -> Slice:
    track = event.get("id", thread)
    args = json.dumps(event.get("args", {}))
    return (event["name"], event.get("cat", ""), event["ts"], end - event["ts"], depth, track, args, event["pid"])
