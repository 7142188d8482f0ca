# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks``: measure, print, and write the figures as JSON and plots."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from benchmarks import harness, plots
from benchmarks.harness import Measure, Progress

RESULTS = Path(__file__).parent / "results"
FIGURES = {
    "local_tell": "local_messages",
    "local_ask": "local_messages",
    "actors_10k": "actors_10k",
    "event_confirm": "events",
    "event_echo": "events",
    "event_confirm_busy": "events",
    "event_pipelined": "events",
    "event_flood_up": "events",
    "event_confirm_tls": "events",
    "event_flood_up_tls": "events",
    "event_confirm_watched": "watched",
    "event_confirm_traced": "watched",
    "event_pipelined_watched": "watched",
    "event_pipelined_traced": "watched",
    "checkpoint": "checkpoint",
    "checkpoint_unheld": "checkpoint",
    "checkpoint_hold": "checkpoint",
    "load": "under_load",
    "crowd": "under_load",
    "saturation": "saturation",
    "checkpoint_watched": "watched",
    "checkpoint_traced": "watched",
    "neighbour_flood": "neighbour",
    "status": "status",
    "memory": "memory",
    "recovery": "recovery",
    "spark_fact": "spark_fact",
    "spark_fact_py4j": "spark_fact",
    "failover": "failover",
    "connect_event_confirm": "connect",
    "connect_event_echo": "connect",
    "connect_checkpoint": "connect",
    "connect_failover": "connect",
    "tunnel_request": "tunnel",
    "tunnel_event_flood": "tunnel",
    "tunnel_large_reply": "tunnel",
    "sidecar_start": "starts",
    "first_record": "starts",
    "worker_import": "starts",
    "split_dispatch": "split_dispatch",
    "work_item": "parts",
    "permit": "parts",
    "async_records": "async_records",
    "async_http": "async_records",
    "async_wall": "async_records",
    "async_request": "async_calls",
    "async_operation": "async_calls",
    "async_limit": "async_calls",
    "shared_value": "parts",
    "group_call": "group",
    "all_reduce_route": "all_reduce_routes",
    "peer_lost": "group",
    "next_step": "group",
    "member_death": "member_death",
    "job_overhead": "job_overhead",
    "parquet_to_delta": "pipelines",
    "json_as_format": "pipelines",
    "rows_to_postgres": "pipelines",
    "row_visible": "pipelines",
    "skewed_splits": "pipelines",
}
"""The module of each figure, in which the function of the figure's name measures it. In the order of a full run."""


def host_facts() -> dict[str, Any]:
    """The facts about the machine that a reader needs to judge a figure."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def find(name: str) -> Measure:
    """The function that measures this figure. Imported only when needed: some need Java, others must not load it."""
    measure: Measure = getattr(importlib.import_module(f"benchmarks.{FIGURES[name]}"), name)
    return measure


def progress_of(name: str) -> Progress:
    return lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True)


def line_of(figure: dict[str, Any]) -> str:
    """One figure as a line of the table."""
    which = ", ".join(f"{key} {value}" for key, value in figure["params"].get("case", {}).items())
    name = f"{figure['name']} ({which})" if which else figure["name"]
    return (
        f"{name:<36} p50 {figure['p50']:10.1f}  p99 {figure['p99']:10.1f} {figure['unit']:<6}"
        f"  baseline {figure['baseline_p50']:10.1f} / {figure['baseline_p99']:10.1f}"
        f"  ratio {figure['ratio_p50']:5.2f} / {figure['ratio_p99']:5.2f}"
        f"  ({figure['ratio_p50_low']:.2f} to {figure['ratio_p50_high']:.2f})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument(
        "--only", choices=sorted(FIGURES), action="append", metavar="NAME", help="measure this one (may be repeated)"
    )
    parser.add_argument("--quick", action="store_true", help="few samples: shows that it runs, not how fast")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there (default: results/latest.json if all run)"
    )
    parser.add_argument("--list", action="store_true", help="only name the figures")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(FIGURES))
        return 0
    harness.one_jvm = options.quick
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    figures: list[dict[str, Any]] = []
    results = {"host": host_facts(), "quick": options.quick, "figures": figures}
    whole = not options.only and not options.quick
    target = options.json or (RESULTS / "latest.json" if whole else None)
    for name in FIGURES:
        if options.only and name not in options.only:
            continue
        for measured in find(name)(options.quick, progress_of(name)):
            figures.append(measured.as_dict())
            print(line_of(figures[-1]), flush=True)
        if target:  # after each figure, so that a run stopped early keeps its results
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(results, indent=1) + "\n")
    if target:
        print(f"written to {target}", file=sys.stderr)
        if whole:
            draw_plots(results, target.parent)
    return 0


def draw_plots(results: dict[str, Any], folder: Path) -> None:
    """Draw only if matplotlib is installed; the figures do not depend on it."""
    if not plots.available():
        print("no plots were drawn: they need matplotlib, which is in requirements.lock", file=sys.stderr)
        return
    for file in plots.draw(results, folder):
        print(f"drawn: {file}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
