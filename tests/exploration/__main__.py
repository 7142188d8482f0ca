# SPDX-License-Identifier: Apache-2.0

"""``python -m tests.exploration``: explore scopes, and print the findings."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing import Pool

from tests.exploration import SCOPES, Result, counts, explore
from tests.exploration.scopes import DEFAULT


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.exploration", description=__doc__)
    parser.add_argument("--scope", default="default", help="a name of --list, default (some of them), or all")
    parser.add_argument("--list", action="store_true", help="say which scopes there are")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="how many at a time")
    parser.add_argument("--whole", action="store_true", help="leave no order out; for tiny scopes")
    parser.add_argument("--check", action="store_true", help="fail if the numbers are not those of counts.json")
    parser.add_argument("--write", action="store_true", help="put the numbers into counts.json")
    options = parser.parse_args(arguments)
    if options.whole and (options.check or options.write):
        parser.error("counts.json has the numbers with reductions: use --check and --write without --whole")
    if options.list:
        for scope in SCOPES.values():
            print(f"{'*' if scope.name in DEFAULT else ' '} {scope.name:<18} {scope.about}")
        print("* belongs to the default")
        return 0
    groups = {"default": list(DEFAULT), "all": list(SCOPES)}
    names = groups.get(options.scope, [options.scope])
    unknown = [name for name in names if name not in SCOPES]
    if unknown or options.jobs < 1:
        parser.error(f"no scope {unknown[0]!r}; --list names them" if unknown else "--jobs must be 1 or more")
    try:
        results = run(names, options.jobs, reduce=not options.whole)
    except KeyboardInterrupt:
        return 130
    states = sum(result.states for result in results)
    transitions = sum(result.transitions for result in results)
    broken = [result.scope.name for result in results if result.violation is not None]
    print(f"{len(results)} scopes, {states} states, {transitions} transitions")
    print(f"the contract is broken in: {', '.join(broken)}" if broken else "each is complete, and the contract holds")
    changed = counts.differences(results) if options.check else []
    for line in changed:
        print(line)
    if changed:
        print("the machines have changed: if that is intended, explain it in the commit and run this with --write")
    if options.write:
        counts.write(results)
    return 1 if broken or changed else 0


def run(names: list[str], jobs: int, *, reduce: bool) -> list[Result]:
    """Explore these scopes, ``jobs`` at a time, the large ones first, and report each when it is done."""
    work = [(name, reduce) for name in reversed(names)]
    if jobs == 1 or len(names) == 1:
        return [explore_one(each) for each in work]
    with Pool(min(jobs, len(names)), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        return list(pool.imap_unordered(explore_one, work, chunksize=1))


def explore_one(work: tuple[str, bool]) -> Result:
    name, reduce = work
    result = explore(SCOPES[name], tell=tell, reduce=reduce)
    tell(str(result))
    return result


def tell(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
