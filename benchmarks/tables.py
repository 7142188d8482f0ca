# SPDX-License-Identifier: Apache-2.0

"""``python -m benchmarks.tables results/latest.json``: the table of docs/reference/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LATEST = Path(__file__).parent / "results" / "latest.json"
ELSEWHERE = ("all_reduce_route", "load", "saturation")
"""That page has separate tables for these, with what else matters about them."""
HEAD = """\
| figure | unit | p50 | p99 | baseline p50 | baseline p99 | ratio p50 (in single rounds) | ratio p99 |
|---|---|---:|---:|---:|---:|---:|---:|"""


def table(results: dict[str, Any]) -> str:
    """The table, as Markdown, without a line end after it."""
    return "\n".join([HEAD, *_rows(results["figures"])])


def _rows(figures: Sequence[dict[str, Any]]) -> Iterator[str]:
    for figure in figures:
        if figure["name"] in ELSEWHERE:
            continue
        times = [number(figure[name]) for name in ("p50", "p99", "baseline_p50", "baseline_p99")]
        low, high = figure["ratio_p50_low"], figure["ratio_p50_high"]
        ratios = [f"{figure['ratio_p50']:.2f} ({low:.2f} to {high:.2f})", f"{figure['ratio_p99']:.2f}"]
        yield "| " + " | ".join([_name(figure), figure["unit"], *times, *ratios]) + " |"


def _name(figure: dict[str, Any]) -> str:
    case = figure["params"].get("case", {})
    words = [str(value) if key in ("of", "what") else f"{key} {value}" for key, value in case.items()]
    return ", ".join([f"`{figure['name']}`", *(word.replace("_", " ") for word in words)])


def number(value: float) -> str:
    """Three digits, or all of the whole ones."""
    if abs(value) < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.tables", description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=LATEST, help="what python -m benchmarks has written")
    options = parser.parse_args(arguments)
    print(table(json.loads(options.results.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
