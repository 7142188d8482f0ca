# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.simulation``: run worlds until one breaks the contract, and print its story."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from functools import partial
from random import SystemRandom

from tests.simulation.checkers import Violation
from tests.simulation.many import run_many
from tests.simulation.shared import Totals
from tests.simulation.world import run_world

say = partial(print, flush=True)
TITLES = {"kinds": "failures of attempts by kind", "happenings": "what befell the worlds"}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line()
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs have to be above zero")
    try:
        return run_one(options.seed) if options.seed is not None else run_seeds(options)
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, help="run this one world")
    what.add_argument("--seeds", type=int, default=200, help="how many worlds to run (default: 200)")
    parser.add_argument("--first", type=int, help="the first seed of many (default: a random one)")
    cores = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=cores, help=f"over so many processes (default: {cores}, the cores)")
    return parser


def run_one(seed: int) -> int:
    """Run one world and print its story."""
    world, error = run_world(seed)
    say("\n".join(world.story))
    if error is None:
        say(table(world.totals()))
        say("no rule was broken")
        return 0
    broken = isinstance(error, Violation)
    say(f"\nbreaks the contract: {error}" if broken else "".join(traceback.format_exception(error)))
    say(f"seed {seed} broke the contract; replay: python -m tests.simulation --seed {seed}")
    return 1


def run_seeds(options: argparse.Namespace) -> int:
    first = SystemRandom().randrange(1_000_000_000) if options.first is None else options.first
    seeds = range(first, first + options.seeds)
    say(f"seeds {seeds[0]}..{seeds[-1]}, over {min(options.jobs, options.seeds)} processes")
    summary = run_many(seeds, options.jobs, say)
    say(summary.progress())
    if summary.broken is None:
        say(table(summary.totals))
        say("no rule was broken")
        return 0
    seed = summary.broken.seed
    say(f"seed {seed}: {summary.broken.broken}")
    if run_one(seed) == 0:
        say(f"seed {seed} broke the contract only once: a world has to follow from its seed")
    return 1


def table(totals: Totals) -> str:
    """Format a row for each figure, with the members of each group below it."""
    rows: list[tuple[str, int]] = []
    for name, value in vars(totals).items():
        title = TITLES.get(name, name.replace("_", " "))
        if isinstance(value, int):
            rows.append((title, value))
        else:
            rows.append((title, sum(value.values())))
            rows.extend((f"  {member}", count) for member, count in sorted(value.items()))
    width = max(len(title) for title, _ in rows)
    return "\n".join(f"{title:{width}}  {value:>14,}" for title, value in rows)


if __name__ == "__main__":
    sys.exit(main())
