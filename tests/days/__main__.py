# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.days``: the same program ten days in a row, killed on some of them; status 1 is a loss.

RUNS runs for each sink and part, see ``soak``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from random import SystemRandom

from tests.days.soak import DAYS, KINDS, soak_days
from tests.pipelines.pairs import Outcome, Servers


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.days", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=KINDS, help="only this sink or part")
    parser.add_argument("--runs", type=int, default=1, help="of each (default: 1)")
    parser.add_argument("--days", type=int, default=DAYS, help="of a run (default: 10)")
    parser.add_argument("--seed", type=int, help="of the first run (default: a new one, printed)")
    options = parser.parse_args(arguments)
    first = SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"replay with --seed {first}", flush=True)
    kinds = KINDS if options.kind is None else (options.kind,)
    total, right, began = Outcome(), True, time.monotonic()
    servers = Servers()
    try:
        for seed in range(first, first + options.runs):
            for kind in kinds:
                try:
                    outcome = soak_days(servers, kind, seed, days=options.days)
                except AssertionError as error:
                    print(f"{kind}, seed {seed}: {error}", flush=True)
                    right = False
                    continue
                right = right and is_right(outcome)
                total.update(outcome)
                print(f"{kind}, seed {seed}: {options.days} days, {outcome}", flush=True)
    finally:
        servers.close()
    spent_s = time.monotonic() - began
    print(f"{options.runs} runs of {len(kinds)} kinds, {options.days} days each, {spent_s:.0f} s: {total}", flush=True)
    return 0 if right else 1


def is_right(outcome: Outcome) -> bool:
    return outcome.is_right and not outcome["strange"] and not outcome["miscounted"]


if __name__ == "__main__":
    sys.exit(main())
