# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.mutants``: put known and feared bugs into the product, one at a time, and see each one caught."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence

from tests.mutants import results
from tests.mutants.catalogue import BY_NAME, MUTANTS
from tests.mutants.cited_tests import NoTestRuns
from tests.mutants.drawn import PACKAGES
from tests.mutants.hunt import Budget, Finding, Place, changed, run_seed
from tests.mutants.mutant import DoesNotFit, Mutant
from tests.mutants.runner import run
from tests.mutants.trial import MUTANT_S, try_all


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to hunt (default: all of them)")
    parser.add_argument("--list", action="store_true", help="only say what there is; with a NAME, the change too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (default: cores)")
    parser.add_argument("--seed", type=int, default=0, help="the first of the simulation; of --random (default: 0)")
    parser.add_argument(
        "--worlds", type=int, default=Budget.worlds, help=f"of the simulation, at most (default: {Budget.worlds})"
    )
    parser.add_argument("--story", action="store_true", help="tell the world of --seed with the one NAME in it")
    parser.add_argument(
        "--resume", action="store_true", help="skip what results.json has as caught in this code; record the others"
    )
    parser.add_argument(
        "--random", type=int, metavar="N", help="draw N mutants from all other lines instead, with --seed"
    )
    parser.add_argument(
        "--within",
        nargs="+",
        default=PACKAGES,
        metavar="PATH",
        help="the files and folders to draw from (default: all)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=MUTANT_S,
        metavar="SECONDS",
        help=f"for the tests of one mutant of --random (default: {MUTANT_S:.0f})",
    )
    options = parser.parse_args(arguments)
    if options.random is not None:
        return try_all(options.random, options.seed, options.within, options.jobs, MUTANTS, options.limit)
    if unknown := [name for name in options.names if name not in BY_NAME]:
        parser.error(f"no such mutant: {', '.join(unknown)} (--list names them all)")
    if min(options.jobs, options.worlds) < 1 or options.seed < 0:
        parser.error("--jobs and --worlds are at least 1, --seed at least 0")
    if options.resume and (options.seed, options.worlds) != (0, Budget.worlds):
        parser.error("--resume records hunts with the default seed and worlds")
    if options.story and len(options.names) != 1:
        parser.error("--story takes one NAME")
    chosen = [BY_NAME[name] for name in options.names] or list(MUTANTS)
    try:
        if options.list:
            return show(chosen, with_diff=bool(options.names))
        if options.story:
            return tell_story(chosen[0], options.seed)
        budget = Budget(options.seed, options.worlds)
        known = results.read() if budget == Budget() else {}
        if options.resume:
            chosen = [mutant for mutant in chosen if not results.is_done(mutant, known.get(mutant.name))]
        places = {name: (result.hunter, result.where) for name, result in known.items()}
        return hunt_all(chosen, budget, options.jobs, places, record=options.resume)
    except (DoesNotFit, NoTestRuns) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def show(mutants: Sequence[Mutant], *, with_diff: bool) -> int:
    for mutant in mutants:
        print(f"{mutant.name}  [{mutant.origin}; {', '.join(mutant.rules)}]\n    {mutant.what}")
        if mutant.argued:
            print(f"    Not seen, for: {mutant.argued}")
        if with_diff:
            print(mutant.diff())
    print(f"{len(mutants)} mutants")
    return 0


def tell_story(mutant: Mutant, seed: int) -> int:
    with changed(mutant):
        world, error = run_seed(seed)
    print("\n".join(world.story))
    print("nothing was seen" if error is None else f"seen: {type(error).__name__}: {error}")
    return 0 if error is not None else 1


def hunt_all(
    mutants: Sequence[Mutant],
    budget: Budget,
    jobs: int,
    places: Mapping[str, Place] | None = None,
    *,
    record: bool = False,
) -> int:
    """Hunt all mutants; return exit status 1 if one survives without an argument.

    ``places``: where to look for a mutant first, by name. ``record``: put each finding into ``results.json``.
    """
    if not mutants:
        print("nothing to hunt: in the present code, results.json has all of these mutants as caught")
        return 0
    began = time.monotonic()
    found: dict[str, Finding] = {}

    def ended(mutant: Mutant, finding: Finding) -> None:
        found[mutant.name] = finding
        print(f"{len(found)}/{len(mutants)} {line(mutant, finding)}", flush=True)
        if record:
            results.record(mutant, finding, MUTANTS)

    def progress(running: list[tuple[str, int]]) -> None:
        names = ", ".join(f"{name} ({looked})" for name, looked in running)
        print(f"{len(found)}/{len(mutants)} {time.monotonic() - began:.0f} s, hunting {names}", flush=True)

    for mutant in mutants:
        mutant.diff()  # check that it matches before the hunt begins
    run(mutants, budget, jobs, ended, progress, places)
    print(table(mutants, found))
    surviving = [mutant for mutant in mutants if not found[mutant.name].seen]
    unargued = [mutant.name for mutant in surviving if not mutant.argued]
    caught = len(mutants) - len(surviving)
    print(f"{caught} of {len(mutants)} caught in {time.monotonic() - began:.0f} s", end="; ")
    print(f"{len(surviving) - len(unargued)} change nothing that is promised", end="; ")
    print(f"survived: {', '.join(unargued) or 'none'}")
    return 1 if unargued else 0


def line(mutant: Mutant, finding: Finding) -> str:
    return (
        f"{mutant.name}: {outcome(mutant, finding)}, {finding.looked} looked at, {finding.seconds:.1f} s {finding.seen}"
    )


def outcome(mutant: Mutant, finding: Finding) -> str:
    if finding.seen:
        return f"caught by {finding.hunter}, {finding.where}"
    return "changes nothing that is promised" if mutant.argued else f"SURVIVED {finding.hunter}, {finding.where}"


def table(mutants: Sequence[Mutant], found: dict[str, Finding]) -> str:
    width = max(len(mutant.name) for mutant in mutants)
    lines = [f"\n{'mutant':{width}}  {'origin':12} {'breaks':13} {'seen as':22} {'after':>8} {'seconds':>8}  by"]
    for mutant in mutants:
        finding = found[mutant.name]
        lines.append(
            f"{mutant.name:{width}}  {mutant.origin:12} {', '.join(mutant.rules):13} {finding.rule or '-':22} "
            f"{finding.looked:>8} {finding.seconds:>8.1f}  {outcome(mutant, finding)}"
        )
        if mutant.argued:
            lines.append(f"{'':{width}}  {mutant.argued}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
