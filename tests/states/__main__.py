# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.states``: large states while everything dies, see ``soak``; status 1 is a loss, or a rest."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from random import SystemRandom

from tests.spark_bridge.object_stores import STORES
from tests.states.soak import soak_states


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.states", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10, help="of the job (default: 10)")
    parser.add_argument("--mib", type=int, default=400, help="of all states together (default: 400)")
    parser.add_argument("--store", choices=STORES, default="gcs", help="only the server of gcs is killed (default)")
    parser.add_argument("--seed", type=int, help="(default: a new one, printed)")
    options = parser.parse_args(arguments)
    seed = SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"replay with --seed {seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        say = partial(print, flush=True)
        outcome = soak_states(folder, seed, options.runs, options.mib, say, store=options.store)
    print(f"{options.runs} runs, {options.mib} MiB, {time.monotonic() - began:.0f} s: {outcome}", flush=True)
    return 0 if outcome.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
