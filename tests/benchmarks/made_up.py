# SPDX-License-Identifier: Apache-2.0

"""Made-up figures for tests."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Figure, Progress


def event_figure(name: str = "event_confirm", case: dict[str, Any] | None = None) -> Figure:
    samples = [float(100 + number) for number in range(200)]
    params = {"case": case} if case else {}
    return Figure(name, "µs", [samples], [[sample / 2 for sample in samples]], params)


def checkpoint_figure(subtasks: int, *, timeline: bool = False) -> Figure:
    details = {}
    if timeline:
        events: list[dict[str, Any]] = [{"what": "snapshot", "subtask": None, "ms": 1.5}]
        for subtask in range(subtasks):
            events.append({"what": "barrier", "subtask": subtask, "ms": 2 + subtask / 50})
            events.append({"what": "acknowledged", "subtask": subtask, "ms": 3 + subtask / 40})
        details["timeline"] = {"events": events}
    took = [subtasks / 8 + 2, subtasks / 6 + 3]
    params = {"case": {"subtasks": subtasks}, "flink_p50_ms": 144.0}
    return Figure("checkpoint", "ms", [took], [[1.0, 2.0]], params, details)


def hold_figure(mode: str, direction: str, subtasks: int) -> Figure:
    case = {"mode": mode, "moment": "closing", "direction": direction, "subtasks": subtasks}
    return Figure("checkpoint_hold", "ms", [[1.0, 3.0]], [[0.1, 0.2]], {"case": case, "flink_ms": 113.0})


def load_figure(mode: str) -> Figure:
    params = {"case": {"mode": mode}, "subtasks": 2000, "events_per_s": 2000}
    return Figure("load", "ms", [[1.0, 3.0]], [[0.1, 0.2]], params)


def results(*figures: Figure) -> dict[str, Any]:
    """The figures in the format of ``python -m benchmarks``."""
    return {"host": {}, "quick": False, "figures": [figure.as_dict() for figure in figures]}


def measure(quick: bool, progress: Progress) -> list[Figure]:
    """A benchmark that ends immediately."""
    progress("measuring nothing")
    return [event_figure(case={"in_flight": 1}), event_figure(case={"in_flight": 64})]
