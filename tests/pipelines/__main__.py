# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.pipelines``: pairs of a source and a sink while everything dies; status 1 is a loss.

``--kind simulated`` runs each pair RUNS times around a simulated Spark, see ``soak``. ``--kind real`` makes RUNS runs
on a real Spark, each with the next pair, see ``real.soak``. By default, both.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import SystemRandom

from tests.pipelines.pairs import PAIRS, Outcome, Servers
from tests.pipelines.real.soak import draw, play
from tests.pipelines.soak import soak_once

Kind = Callable[[Servers, int, int], bool]


def simulated(servers: Servers, runs: int, first: int) -> bool:
    """Return whether all runs were right."""
    total, right = Outcome(), True
    for source, sink in PAIRS:
        of_pair = Outcome()
        for seed in range(first, first + runs):
            outcome = asyncio.run(soak_once(servers, source, sink, seed))
            of_pair.update(outcome)
            if not outcome.is_right:
                right = False
                print(f"{source} -> {sink}, seed {seed}: {outcome}", flush=True)
        total.update(of_pair)
        print(f"{source} -> {sink}: {runs} runs, {of_pair}", flush=True)
    print(f"simulated Spark: {len(PAIRS)} pairs, seeds {first} to {first + runs - 1}: {total}", flush=True)
    return right


def real(servers: Servers, runs: int, first: int, *, paid: bool | None = None) -> bool:
    """Return whether all runs were right. ``paid``: see ``draw``."""
    total, right = Outcome(), True
    for number, seed in enumerate(range(first, first + runs), start=1):
        plan = draw(seed, paid=paid)
        print(f"{number}/{runs}  seed {seed}  {plan}", flush=True)
        began = time.monotonic()
        try:
            outcome = play(servers, plan, lambda text: print(f"    {text}", flush=True))
        except AssertionError as error:
            print(f"    {error}", flush=True)
            right = False
            continue
        right = right and outcome.is_right
        total.update(outcome)
        print(f"    {outcome}, {time.monotonic() - began:.1f} s", flush=True)
    print(f"real Spark: {runs} runs, seeds {first} to {first + runs - 1}: {total}", flush=True)
    return right


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.pipelines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=("simulated", "real", "both"), default="both")
    parser.add_argument("--runs", type=int, default=30, help="see above (default: 30)")
    parser.add_argument("--seed", type=int, help="of the first run (default: a new one, printed)")
    parser.add_argument("--paid", action="store_true", help="pay for each row in all runs on a real Spark")
    options = parser.parse_args(arguments)
    first = SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"replay with --seed {first}; one run with --runs 1 --seed and its own seed", flush=True)
    servers = Servers()
    try:
        on_spark: Kind = partial(real, paid=options.paid or None)
        kinds: dict[str, list[Kind]] = {"simulated": [simulated], "real": [on_spark], "both": [simulated, on_spark]}
        right = [kind(servers, options.runs, first) for kind in kinds[options.kind]]
    finally:
        servers.close()
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
