# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.load``: a loaded sidecar must lose nothing, while subtasks are killed and strangers attack.

The exit status is 1 if an event was lost, doubled or out of order, or anything else was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom

import structlog

from tests.load.driver import Plan, Report, run_load


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.add_argument("--minutes", type=_positive, default=30.0, help="how long (default: 30)")
    parser.add_argument("--ends", type=int, default=2000, help="subtasks of the measured operator (default: 2000)")
    parser.add_argument("--processes", type=int, default=2, help="processes that they are in (default: 2)")
    parser.add_argument("--neighbours", type=int, default=4, help="subtasks that flood (default: 4)")
    parser.add_argument("--strangers", type=int, default=16, help="how many attack at the same time (default: 16)")
    parser.add_argument("--rate", type=_positive, default=1000.0, help="round trips per second (default: 1000)")
    parser.add_argument("--kills", type=_positive, default=2.0, help="kills per second (default: 2)")
    parser.add_argument("--checkpoint-s", type=_positive, default=5.0, help="seconds between checkpoints (default: 5)")
    parser.add_argument("--tls", action="store_true", help="encrypt all connections with TLS")
    parser.add_argument("--seed", type=int, help="which subtasks are killed, and how (default: a new one, printed)")
    parser.add_argument("--lose", type=int, metavar="N", help="hide the N-th upward event from the checker: must fail")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    options = parser.parse_args(arguments)
    seed = SystemRandom().randrange(2**31) if options.seed is None else options.seed
    plan = Plan(
        seed=seed,
        ends=options.ends,
        processes=min(options.processes, options.ends),
        neighbours=options.neighbours,
        strangers=options.strangers,
        events=max(1, round(options.minutes * 60 * options.rate)),
        rate=options.rate,
        kills=round(options.minutes * 60 * options.kills),
        checkpoint_every=max(1, round(options.rate * options.checkpoint_s)),
        lose=options.lose,
        tls=options.tls,
    )
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    over = "TLS" if plan.tls else "plain TCP"
    print(f"{plan.ends} subtasks, {plan.events} events, over {over}; replay the kills with --seed {seed}", flush=True)
    try:
        report = asyncio.run(run_load(plan, lambda report: print(_line(report), flush=True)))
    except KeyboardInterrupt:
        return 130
    print(_table(report), flush=True)
    if options.json:
        host = {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
        options.json.write_text(json.dumps(report.as_dict() | {"host": host}, indent=2) + "\n")
    return 0 if report.passed else 1


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, is {text}")
    return number


def _line(report: Report) -> str:
    tally = report.tally
    return (
        f"{report.seconds:6.0f} s: {tally.events} events, {report.neighbour.events} of the neighbour, "
        f"{report.kills} kills, lost {tally.lost}, doubled {tally.doubled}, out of order {tally.out_of_order}, "
        f"faults {tally.faults}; {report.checkpoints} checkpoints, {report.strangers} strangers; "
        f"{report.memory_end / 2**20:.0f} MiB; p50 {report.p50_ms:.1f} ms, p99 {report.p99_ms:.1f} ms"
    )


def _table(report: Report) -> str:
    both = [report.tally, report.neighbour]
    most_before, most_beside = report.memory_phases
    rows = (
        ("seconds", f"{report.seconds:.0f}"),
        ("events", f"{report.tally.events}"),
        ("events of the neighbour", f"{report.neighbour.events}"),
        ("kills", f"{report.kills}"),
        ("returns to a checkpoint", f"{report.restored}"),
        ("checkpoints, aborted ones", f"{report.checkpoints}, {report.checkpoints_failed}"),
        ("connections of strangers", f"{report.strangers}"),
        ("lost", f"{sum(each.lost for each in both)}"),
        ("doubled", f"{sum(each.doubled for each in both)}"),
        ("out of order", f"{sum(each.out_of_order for each in both)}"),
        ("other faults", f"{sum(each.faults for each in both)}"),
        ("memory at start", f"{report.memory_start / 2**20:.0f} MiB"),
        ("memory at end", f"{report.memory_end / 2**20:.0f} MiB"),
        ("round trips", f"{report.round_trips}"),
        ("p50", f"{report.p50_ms:.1f} ms"),
        ("p99", f"{report.p99_ms:.1f} ms"),
        ("p99.9", f"{report.p999_ms:.1f} ms"),
        ("longest", f"{report.max_ms:.1f} ms"),
        ("p50, p99 of the first half", "{:.1f}, {:.1f} ms".format(*report.phases[0])),
        ("p50, p99 beside a hostile operator", "{:.1f}, {:.1f} ms".format(*report.phases[1])),
        ("its connections", f"{report.attacks}"),
        ("memory that it has added", f"{max(0, most_beside - most_before) / 2**20:.0f} MiB"),
    )
    lines = [f"{name:36}{value:>16}" for name, value in rows]
    lines += [story for each in both for story in each.stories]
    lines.append("nothing was lost" if report.passed else f"FAILED; replay the kills with --seed {report.plan.seed}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
