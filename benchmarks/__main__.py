"""``python -m benchmarks``: measure, show, and write the figures as JSON."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from benchmarks.event_confirm import event_confirm, event_confirm_busy, event_echo, event_flood_up, event_pipelined
from benchmarks.harness import Figure
from benchmarks.local_messages import local_ask, local_tell
from benchmarks.spark_fact import spark_fact

FIGURES: dict[str, Callable[[bool, Callable[[str], None]], Figure]] = {
    "local_tell": local_tell,
    "local_ask": local_ask,
    "event_confirm": event_confirm,
    "event_echo": event_echo,
    "event_confirm_busy": event_confirm_busy,
    "event_pipelined": event_pipelined,
    "event_flood_up": event_flood_up,
    "spark_fact": spark_fact,
}


def host_facts() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
    }


def progress_of(name: str) -> Callable[[str], None]:
    return lambda text: print(f"{name}: {text}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--only", choices=sorted(FIGURES), action="append", help="measure this one (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="few samples: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    figures = []
    for name, measure in FIGURES.items():
        if options.only and name not in options.only:
            continue
        figure = measure(options.quick, progress_of(name)).as_dict()
        figures.append(figure)
        print(
            f"{name:<18} p50 {figure['p50']:8.1f} p99 {figure['p99']:8.1f} {figure['unit']:<3}"
            f" baseline {figure['baseline_p50']:8.1f} / {figure['baseline_p99']:8.1f}"
            f" ratio {figure['ratio_p50']:.2f} / {figure['ratio_p99']:.2f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"host": host_facts(), "figures": figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
