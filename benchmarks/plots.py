# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.plots results/latest.json``: the figures as plots, SVG files next to the JSON.

``latency.svg``: the events' percentiles, subject and baseline, on an axis of nines. ``checkpoint.svg``: the cost of a
checkpoint by number of subtasks, with Flink's figures. ``timeline.svg``: one checkpoint, from the largest figure that
has ``details["timeline"]``: ``{"events": [{"what": str, "subtask": int | None, "ms": float}]}``. A figure that the
JSON does not have is left out. The same figures give the same bytes, so that a diff shows a real change.

Matplotlib, which only this module needs, is imported when something is drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

LATEST = Path(__file__).parent / "results" / "latest.json"
FLINK_CHECKPOINT_MS = {1: 3.0, 16: 8.0, 64: 30.0, 256: 144.0}
"""Median milliseconds of a checkpoint by number of subtasks: Flink 2.3.0."""
NINES = (("50", 0.5), ("90", 0.9), ("99", 0.99), ("99.9", 0.999))
MAX_NINES = 4.0
"""The position of the largest sample on the axis of nines."""
SUBJECT, BASELINE, OTHER = "#1f77b4", "#7f7f7f", "#d62728"
PANEL_INCHES = (4.2, 3.0)
PANELS_IN_A_ROW = 3


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the figures that ``results`` has in ``folder``; return the files. ``ImportError`` without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    figures = results["figures"]
    drawn = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("svg", hashsalt="headgate", fonttype="none")
        matplotlib.rc("font", size=9)
        matplotlib.rc("axes", grid=True)
        matplotlib.rc("grid", alpha=0.3)
        for name, plot in (("latency", draw_latency), ("checkpoint", draw_checkpoint), ("timeline", draw_timeline)):
            canvas = Canvas(layout="constrained")
            if plot(figures, canvas):
                file = folder / f"{name}.svg"
                canvas.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
                drawn.append(file)
    return drawn


def nines(fraction: float) -> float:
    """0.9 is one nine, 0.99 two; the largest sample has a separate place."""
    return MAX_NINES if fraction >= 1 else min(MAX_NINES, -math.log10(1 - fraction))


def title_of(figure: dict[str, Any]) -> str:
    case = ", ".join(f"{key} {value}" for key, value in figure["params"].get("case", {}).items())
    return f"{figure['name']} ({case})" if case else str(figure["name"])


def log_scale(axes: Axes) -> None:
    """Times upwards, by plain numbers: 1, 2, 5, 10, 20 and so on."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.minorticks_off()


def draw_latency(figures: list[dict[str, Any]], canvas: Canvas) -> bool:
    """One panel for each figure of events; False if there is none."""
    events = [figure for figure in figures if figure["name"].startswith("event_")]
    if not events:
        return False
    columns = min(PANELS_IN_A_ROW, len(events))
    rows = math.ceil(len(events) / columns)
    canvas.set_size_inches(columns * PANEL_INCHES[0], rows * PANEL_INCHES[1])
    for place, figure in enumerate(events, start=1):
        axes: Axes = canvas.add_subplot(rows, columns, place)
        curve = figure["curve"]
        places = [nines(fraction) for fraction in curve["fractions"]]
        axes.plot(places, curve["subject"], color=SUBJECT, label="Headgate")
        axes.plot(places, curve["baseline"], color=BASELINE, label="baseline")
        log_scale(axes)
        ticks = [(label, nines(fraction)) for label, fraction in NINES] + [("max", MAX_NINES)]
        axes.set_xticks([at for _, at in ticks], [label for label, _ in ticks])
        axes.set(title=title_of(figure), xlabel="percentile", ylabel=figure["unit"])
        axes.legend()
    return True


def draw_checkpoint(figures: list[dict[str, Any]], canvas: Canvas) -> bool:
    """The median by number of subtasks, up to the 99th percentile in a lighter band; False without such figures."""
    by_subtasks = checkpoints(figures)
    if not by_subtasks:
        return False
    canvas.set_size_inches(6.4, 4.4)
    axes: Axes = canvas.add_subplot(1, 1, 1)
    subtasks = sorted(by_subtasks)
    for who, prefix, color in (("Headgate", "", SUBJECT), ("baseline", "baseline_", BASELINE)):
        medians = [by_subtasks[number][f"{prefix}p50"] for number in subtasks]
        high = [by_subtasks[number][f"{prefix}p99"] for number in subtasks]
        axes.plot(subtasks, medians, marker="o", color=color, label=who)
        axes.fill_between(subtasks, medians, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(
        list(FLINK_CHECKPOINT_MS), list(FLINK_CHECKPOINT_MS.values()), marker="s", color=OTHER, label="Flink 2.3.0"
    )
    axes.set_xscale("log")
    axes.minorticks_off()
    log_scale(axes)
    ticks = sorted({*subtasks, *FLINK_CHECKPOINT_MS})
    axes.set_xticks(ticks, [str(number) for number in ticks])
    axes.set(title="one checkpoint: median, and up to p99", xlabel="subtasks", ylabel="ms")
    axes.legend()
    return True


def checkpoints(figures: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The figures named ``checkpoint``, by number of subtasks."""
    return {figure["params"]["case"]["subtasks"]: figure for figure in figures if figure["name"] == "checkpoint"}


def draw_timeline(figures: list[dict[str, Any]], canvas: Canvas) -> bool:
    """The steps of one checkpoint by subtask; steps without a subtask are a line across. False without a timeline."""
    timelines = {subtasks: figure["details"].get("timeline") for subtasks, figure in checkpoints(figures).items()}
    subtasks = max((subtasks for subtasks, timeline in timelines.items() if timeline), default=0)
    if not subtasks:
        return False
    canvas.set_size_inches(8.0, 4.4)
    axes: Axes = canvas.add_subplot(1, 1, 1)
    events = timelines[subtasks]["events"]
    for place, what in enumerate(dict.fromkeys(event["what"] for event in events)):
        color = f"C{place % 10}"
        dots = [event for event in events if event["what"] == what and event["subtask"] is not None]
        lines = [event for event in events if event["what"] == what and event["subtask"] is None]
        label: str | None = what
        if dots:
            axes.scatter(
                [dot["ms"] for dot in dots],
                [dot["subtask"] for dot in dots],
                s=4,
                color=color,
                label=label,
                linewidths=0,
            )
            label = None
        for line in lines:
            axes.axvline(line["ms"], color=color, linewidth=1, linestyle="--", label=label)
            label = None
    axes.set(title=f"one checkpoint of {subtasks} subtasks", xlabel="ms since its trigger", ylabel="subtask")
    canvas.legend(loc="outside right upper", markerscale=3)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.plots", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", default=LATEST, help="what python -m benchmarks has written")
    options = parser.parse_args(arguments)
    if not available():
        print("plots need matplotlib, which is in requirements.lock", file=sys.stderr)
        return 1
    for file in draw(json.loads(options.results.read_text()), options.results.parent):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
