# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.fuzz``: try every target in turn until the time is over, or one is broken."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from random import SystemRandom

from actors.logs import ROOT
from tests.fuzz import below, hostile_parts, pure, ring_port, siege, status_attackers, three_ports
from tests.fuzz.target import CaseFailed, Target, run_case

_MODULES = (pure, below, status_attackers, hostile_parts, ring_port, siege, three_ports)
TARGETS = {target.name: target for module in _MODULES for target in module.TARGETS}
QUICK_ROUND_S = 1.0
"""How long a target without a socket runs before the next one; the others have one case each."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=_positive, default=60.0, help="when to stop (default: after 60)")
    parser.add_argument("--target", choices=TARGETS, help="try this one only")
    parser.add_argument("--seed", type=int, help="the number of the first case (default: a random one)")
    parser.add_argument("--cases", type=_positive, help="so many of each target at the most, whatever time that takes")
    parser.add_argument("--list", action="store_true", help="say which targets there are, and stop")
    options = parser.parse_args(arguments)
    if options.list:
        for target in TARGETS.values():
            print(f"{target.name:22} {target.about}")
        return 0
    logging.getLogger(ROOT).setLevel(logging.CRITICAL)  # a hostile task is warned about in each case
    first = SystemRandom().randrange(1_000_000_000) if options.seed is None else options.seed
    targets = list(TARGETS.values()) if options.target is None else [TARGETS[options.target]]
    return _Run(targets, first, options.seconds, options.cases).go()


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, is {text}")
    return number


class _Run:
    """Cases of several targets in turn, with occasional progress lines."""

    def __init__(self, targets: Sequence[Target], first: int, seconds: float, cases: float | None) -> None:
        self._targets = targets
        self._first = first
        self._seconds = seconds
        self._cases = cases
        self._done = {target.name: 0 for target in targets}
        self._began = self._told = time.monotonic()

    def go(self) -> int:
        print(f"first case {self._first}", flush=True)
        try:
            while waiting := [target for target in self._targets if self._is_wanted(target)]:
                for target in waiting:
                    self._turn(target)
        except CaseFailed as failed:
            traceback.print_exception(failed.__cause__ or failed)
            print(f"\n{failed}", flush=True)
            return 1
        self._tell()
        print("nothing was broken")
        return 0

    def _is_wanted(self, target: Target) -> bool:
        if self._cases is not None:
            return self._done[target.name] < self._cases
        return time.monotonic() - self._began < self._seconds

    def _turn(self, target: Target) -> None:
        until = time.monotonic() + (0.0 if target.slow else QUICK_ROUND_S)
        if target.slow:
            self._tell(target.name)
        while self._is_wanted(target):
            run_case(target, self._first + self._done[target.name])
            self._done[target.name] += 1
            if time.monotonic() - self._told >= 1.0:
                self._tell()
            if time.monotonic() >= until:
                break

    def _tell(self, at: str = "") -> None:
        self._told = time.monotonic()
        counts = ", ".join(f"{name} {count}" for name, count in self._done.items() if count)
        print(f"{self._told - self._began:6.1f} s: {counts}{f'; now {at}' if at else ''}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it immediately; a besieged process ends with its input
    sys.exit(main())
