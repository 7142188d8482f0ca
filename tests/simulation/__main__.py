"""``python -m tests.simulation``: run worlds until one breaks the contract."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from random import SystemRandom

from tests.simulation.world import Totals, run_world


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one world and print its story")
    parser.add_argument("--seeds", type=int, default=200, help="how many worlds to run (default: 200)")
    parser.add_argument("--first", type=int, help="the first seed (default: a random one)")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return run_one(options.seed)
    first = SystemRandom().randrange(1_000_000_000) if options.first is None else options.first
    return run_many(first, options.seeds)


def run_one(seed: int) -> int:
    world, error = run_world(seed)
    print("\n".join(world.story))
    if error is None:
        print(world.totals())
        return 0
    report(seed, error)
    return 1


def run_many(first: int, count: int) -> int:
    totals, began = Totals(), time.monotonic()
    for done, seed in enumerate(range(first, first + count), start=1):
        world, error = run_world(seed)
        if error is not None:
            print("\n".join(world.story[-200:]))
            report(seed, error)
            return 1
        totals.add(world.totals())
        if done % 50 == 0 or done == count:
            print(f"{done}/{count} worlds, seeds {first}..{seed}, {time.monotonic() - began:.1f} s", flush=True)
    print("; ".join(f"{name.replace('_', ' ')} {value}" for name, value in vars(totals).items()))
    print("no rule was broken")
    return 0


def report(seed: int, error: Exception) -> None:
    traceback.print_exception(error)
    print(f"\nseed {seed} broke the contract: {error}\nreplay: python -m tests.simulation --seed {seed}")


if __name__ == "__main__":
    sys.exit(main())
