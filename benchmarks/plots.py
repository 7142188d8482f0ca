# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.plots results/latest.json``: the figures as plots, SVG files next to the JSON.

``latency.svg``: the events' percentiles, subject and baseline, on an axis of nines. ``checkpoint.svg``: the cost of a
checkpoint by number of subtasks, in both modes, with Flink's figures. ``hold.svg``: an event that is sent at the worst
moment of a checkpoint, the same way. ``load.svg``: the percentiles of events under load, with and without checkpoints.
``timeline.svg``: one checkpoint, from the largest figure that has ``details["timeline"]``:
``{"events": [{"what": str, "subtask": int | None, "ms": float}]}``. A figure that the JSON does not have is left out.
The same figures give the same bytes, so that a diff shows a real change.

Matplotlib, which only this module needs, is imported when something is drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

LATEST = Path(__file__).parent / "results" / "latest.json"
NINES = (("50", 0.5), ("90", 0.9), ("99", 0.99), ("99.9", 0.999), ("99.99", 0.9999))
MAX_NINES = 5.0
"""The position of the largest sample on the axis of nines."""
SUBJECT, UNHELD, BASELINE, OTHER = "#1f77b4", "#2ca02c", "#7f7f7f", "#d62728"
MODES = (("aligned", "events held", SUBJECT), ("unheld", "hold_events=False", UNHELD))
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
        for name, plot in PLOTS.items():
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
        plot_percentiles(axes, figure, "subject", SUBJECT, "Headgate")
        plot_percentiles(axes, figure, "baseline", BASELINE, "baseline")
        axes.set(title=title_of(figure), ylabel=figure["unit"])
        axes.legend()
    return True


def plot_percentiles(axes: Axes, figure: dict[str, Any], which: str, color: str, label: str) -> None:
    """One curve of a figure, on an axis of nines."""
    curve = figure["curve"]
    axes.plot([nines(fraction) for fraction in curve["fractions"]], curve[which], color=color, label=label)
    log_scale(axes)
    ticks = [(name, nines(fraction)) for name, fraction in NINES] + [("max", MAX_NINES)]
    axes.set_xticks([at for _, at in ticks], [name for name, _ in ticks])
    axes.set_xlabel("percentile")


def draw_load(figures: list[dict[str, Any]], canvas: Canvas) -> bool:
    """The percentiles of an event in each mode, and of one without checkpoints; False without such figures."""
    by_mode = {figure["params"]["case"]["mode"]: figure for figure in figures if figure["name"] == "load"}
    if not by_mode:
        return False
    canvas.set_size_inches(6.4, 4.4)
    axes: Axes = canvas.add_subplot(1, 1, 1)
    for mode, label, color in MODES:
        if mode in by_mode:
            plot_percentiles(axes, by_mode[mode], "subject", color, f"a checkpoint every second, {label}")
    figure = next(iter(by_mode.values()))
    plot_percentiles(axes, figure, "baseline", BASELINE, "no checkpoints")
    events, subtasks = figure["params"]["events_per_s"], figure["params"]["subtasks"]
    axes.set(title=f"an event to the coordinator: {subtasks:,} subtasks, {events:,} events/s", ylabel=figure["unit"])
    axes.legend()
    return True


def draw_checkpoint(figures: list[dict[str, Any]], canvas: Canvas) -> bool:
    """The median by number of subtasks, up to the 99th percentile in a lighter band; False without such figures."""
    held = by_subtasks(figures, "checkpoint")
    if not held:
        return False
    canvas.set_size_inches(6.4, 4.4)
    axes: Axes = canvas.add_subplot(1, 1, 1)
    plot_by_subtasks(axes, held, "", SUBJECT, "Headgate, events held")
    plot_by_subtasks(axes, by_subtasks(figures, "checkpoint_unheld"), "", UNHELD, "Headgate, hold_events=False")
    plot_by_subtasks(axes, held, "baseline_", BASELINE, "bare frames")
    plot_flink(axes, held, "flink_p50_ms")
    scale_by_subtasks(axes, sorted(held))
    axes.set(title="one checkpoint: median, and up to p99", ylabel="ms")
    axes.legend()
    return True


def draw_hold(figures: list[dict[str, Any]], canvas: Canvas) -> bool:
    """A panel for each direction: the median by number of subtasks, up to the 99th percentile; False without any."""
    closing = partial(by_subtasks, figures, "checkpoint_hold", moment="closing")
    directions = [direction for direction in ("down", "up") if closing(direction=direction)]
    if not directions:
        return False
    canvas.set_size_inches(len(directions) * 5.2, 4.2)
    for place, direction in enumerate(directions, start=1):
        axes: Axes = canvas.add_subplot(1, len(directions), place)
        for mode, label, color in MODES:
            plot_by_subtasks(axes, closing(direction=direction, mode=mode), "", color, label)
        either = closing(direction=direction)
        plot_by_subtasks(axes, either, "baseline_", BASELINE, "without a checkpoint")
        if direction == "down":
            plot_flink(axes, either, "flink_ms")
        scale_by_subtasks(axes, sorted(either))
        where = (
            "to a task, as its gateway closes" if direction == "down" else "to the driver, as the task's valve closes"
        )
        axes.set(title=f"an event {where}", ylabel="ms")
        axes.legend()
    return True


def by_subtasks(figures: list[dict[str, Any]], name: str, **case: str) -> dict[int, dict[str, Any]]:
    """The figures of this name and of these cases, by number of subtasks."""
    found = [figure for figure in figures if figure["name"] == name]
    return {
        figure["params"]["case"]["subtasks"]: figure
        for figure in found
        if case.items() <= figure["params"]["case"].items()
    }


def plot_by_subtasks(axes: Axes, figures: dict[int, dict[str, Any]], prefix: str, color: str, label: str) -> None:
    """One line of medians with a lighter band up to the 99th percentile; none without figures."""
    subtasks = sorted(figures)
    medians = [figures[number][f"{prefix}p50"] for number in subtasks]
    high = [figures[number][f"{prefix}p99"] for number in subtasks]
    if subtasks:
        axes.plot(subtasks, medians, marker="o", color=color, label=label)
        axes.fill_between(subtasks, medians, high, color=color, alpha=0.15, linewidth=0)


def plot_flink(axes: Axes, figures: dict[int, dict[str, Any]], parameter: str) -> None:
    """The times of Flink 2.3.0 that these figures name."""
    times = {number: figures[number]["params"].get(parameter) for number in sorted(figures)}
    known = {number: time for number, time in times.items() if time is not None}
    if known:
        axes.plot(list(known), list(known.values()), marker="s", color=OTHER, label="Flink 2.3.0")


def scale_by_subtasks(axes: Axes, subtasks: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.minorticks_off()
    log_scale(axes)
    axes.set_xticks(subtasks, [f"{number:,}" for number in subtasks])
    axes.set_xlabel("subtasks")


def draw_timeline(figures: list[dict[str, Any]], canvas: Canvas) -> bool:
    """The steps of one checkpoint by subtask; steps without a subtask are a line across. False without a timeline."""
    held = by_subtasks(figures, "checkpoint")
    timelines = {subtasks: figure["details"].get("timeline") for subtasks, figure in held.items()}
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


PLOTS = {
    "latency": draw_latency,
    "load": draw_load,
    "checkpoint": draw_checkpoint,
    "hold": draw_hold,
    "timeline": draw_timeline,
}


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
