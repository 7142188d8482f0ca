# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.simulation``: run worlds until one breaks the contract, and print a short story of it."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from random import SystemRandom

from tests.simulation.many import run_many
from tests.simulation.shared import Totals
from tests.simulation.shrink import EFFORT, SECONDS, shrink
from tests.simulation.stories import Story, load, save, tell, tell_seed

say = partial(print, flush=True)
TITLES = {"kinds": "failures of attempts by kind", "happenings": "what befell the worlds"}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line()
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.jobs < 1 or options.shrink_steps < 1 or options.shrink_seconds <= 0:
        parser.error("--seeds, --jobs, --shrink-steps and --shrink-seconds have to be above zero")
    try:
        if options.replay is not None:
            return replay(options.replay)
        if options.seed is not None:
            return run_one(options)
        return run_seeds(options)
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, help="run this one world")
    what.add_argument("--seeds", type=int, default=200, help="how many worlds to run (default: 200)")
    what.add_argument("--replay", type=Path, metavar="FILE", help="run the world of a saved story")
    parser.add_argument("--first", type=int, help="the first seed of many (default: a random one)")
    cores = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=cores, help=f"over so many processes (default: {cores}, the cores)")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="where to put the story of a world that breaks a rule"
    )
    parser.add_argument("--no-shrink", action="store_true", help="tell the whole story, instead of a short one")
    parser.add_argument(
        "--shrink-steps",
        type=int,
        default=EFFORT,
        help=f"how many steps may be run to find a short story (default: {EFFORT})",
    )
    parser.add_argument(
        "--shrink-seconds",
        type=float,
        default=SECONDS,
        help=f"and how long at most; what is found then depends on the machine (default: {SECONDS:g})",
    )
    return parser


def replay(path: Path) -> int:
    world, story = tell(load(path))
    if story is not None:
        say(story.text())
        return 1
    say("\n".join(world.story))
    say("no rule was broken")
    return 0


def run_one(options: argparse.Namespace) -> int:
    world, story = tell_seed(options.seed)
    if story is not None:
        return report(story, options)
    say("\n".join(world.story))
    say(table(world.totals()))
    say("no rule was broken")
    return 0


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
    _, story = tell_seed(seed)
    if story is None:
        say(
            f"seed {seed} broke the contract, and when it was run again it did not: a world has to follow from its seed"
        )
        return 1
    return report(story, options)


def report(story: Story, options: argparse.Namespace) -> int:
    """Print the story of a world that broke a rule, shortened if requested."""
    seed = story.record.seed
    if not options.no_shrink:
        say(f"the whole story has {story.steps} steps and {len(story.lines)} lines; looking for a short one")
        story = shrink(story, say, options.shrink_steps, options.shrink_seconds)
        say(f"this one has {story.steps} steps and {len(story.lines)} lines\n")
    say(story.text())
    say(f"\nseed {seed} broke the contract; replay: python -m tests.simulation --seed {seed}")
    if options.save is not None:
        save(story, options.save)
        say(f"replay the story above: python -m tests.simulation --replay {options.save}")
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
